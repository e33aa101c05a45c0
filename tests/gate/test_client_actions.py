"""Actions as requests meet them: tightened limits, held responses, challenges and blocks, and who is spared."""

from __future__ import annotations

import asyncio
import json
import re
import threading
from contextlib import closing
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import pytest

from headgate import Limit
from headgate.abuse.actions import list_actions, undo_action
from headgate.abuse.challenge import COOKIE, is_solved
from headgate.abuse.model import AbuseScenario, ActionStep, Finding, Threshold
from headgate.errors import StoreTimeout
from headgate.gate.admission import UNLIMITED
from headgate.gate.gate import AsyncGate, Gate
from headgate.gate.view_limits import LimitDeclaration
from headgate.policy import read
from headgate.telemetry import DecisionLog
from headgate.telemetry.human_time import Span
from headgate.telemetry.metrics.counters import Metrics
from headgate.telemetry.why.render import details, mail
from headgate.telemetry.why.report import ClientQuery, why
from headgate.testing import FakeClock, FakeRequest
from support.traffic import SECRET, START_US, Kept, Request, Traffic

if TYPE_CHECKING:
    from collections.abc import Mapping

    from headgate.gate.admission import Admission

SECOND = 1_000_000
POLICY = """
limits:
  - {name: per-ip, by: ip, bucket: 100/minute}
  - {name: everyone, by: global, bucket: 100000/minute}
abuse:
  scenarios: {}
  allow: [{ip: 203.0.113.9}, {ip: 10.0.0.0/8}, {tenant: acme}]
"""
EVIDENCE = "45 accounts were tried from 198.51.100.0/24 in one minute"


def step(action: Any, minutes: float = 10, **more: Any) -> ActionStep:
    return ActionStep(action, timedelta(minutes=minutes), **more)


def act(
    gate: Any, *steps: ActionStep, value: str = "198.51.100.7", kind: str = "ip", name: str = "credential-stuffing"
) -> None:
    """Take the first step against a client."""
    scenario = AbuseScenario(name, "ip", (Threshold("accounts", 20),), timedelta(minutes=1), steps)
    gate.actions.apply(Finding(name, kind, value, gate.now_us(), "accounts", 45, 20, EVIDENCE), scenario)
    gate.actions.flush()


@dataclass(frozen=True, slots=True)
class Visit(FakeRequest):
    """A request with any headers."""

    path: str = "/login"
    peer: str = "198.51.100.7"
    headers: Mapping[str, str] = field(default_factory=dict)
    tenant: str | None = None

    def header(self, name: str) -> list[str]:
        return [self.headers[name]] if name in self.headers else []


BROWSER = {"accept": "text/html,application/xhtml+xml,*/*;q=0.8"}


@pytest.fixture
def gate() -> Any:
    identities: Any = {"tenant": lambda request: request.tenant}
    return Gate(read(POLICY), clock=FakeClock(START_US), secret=SECRET, identities=identities)


def admitted(gate: Gate, count: int, **more: Any) -> int:
    return sum(gate.admit(Visit(**more)).allowed for _ in range(count))


def solved(admission: Admission) -> str:
    """The cookie of a client that has solved the challenge in this refusal."""
    assert admission.refusal is not None
    headers = dict(admission.refusal.headers)
    found = re.search(rb'token="([^"]+)"; difficulty=(\d+)', headers[b"headgate-challenge"])
    if found is None:
        found = re.search(rb'data-token="([^"]+)" data-difficulty="(\d+)"', admission.refusal.body)
    assert found is not None
    token, difficulty = found[1].decode(), int(found[2])
    solution = next(number for number in range(10**7) if is_solved(token, str(number), difficulty))
    return f"other=1; {COOKIE}={token}.{solution}; more=2"


# tighten


@pytest.mark.parametrize("algorithm", ["token_bucket", "fixed_window", "sliding_window", "sliding_log", "gcra"])
def test_limits_of_the_client_are_divided_until_the_action_ends(algorithm: str) -> None:
    policy = f"limits: [{{name: per-ip, by: ip, bucket: 100/minute, algorithm: {algorithm}}}]"
    gate = Gate(read(policy), clock=FakeClock(START_US))
    act(gate, step("tighten", 10, factor=4), value="198.51.100.0/24")
    assert admitted(gate, 50) == 25
    assert admitted(gate, 200, peer="203.0.113.77") == 100
    headers = dict(gate.admit(Visit(peer="198.51.100.8")).headers)
    assert headers[b"x-ratelimit-limit"] == b"25"
    assert headers[b"ratelimit-policy"] == b'"per-ip";q=25;w=60'
    gate._clock.advance(601)  # type: ignore[union-attr]
    assert admitted(gate, 200) == 100


def test_limits_that_all_clients_share_stay_as_they_are(gate: Any) -> None:
    act(gate, step("tighten", factor=1000))
    admission = gate.admit(Visit())
    assert [key.limit.quota for key in admission.resolution.keys] == [1, 100_000]
    assert not gate.admit(Visit()).allowed
    assert gate.admit(Visit(peer="192.0.2.1")).allowed


@pytest.mark.parametrize(
    ("text", "factor", "expected"),
    [
        ("100/minute", 4, "25 per minute, token_bucket"),
        ("3/minute", 10, "1 per minute, token_bucket"),
        ("100/second, burst 10", 4, "25 per second, burst 2, token_bucket"),
        ("10000000/day", 3, "3333330 per day, token_bucket"),  # a third would not be exact
        ("100/month", 8, "12 per month, fixed_window"),
    ],
)
def test_tightened_limit_is_exact(gate: Any, text: str, factor: int, expected: str) -> None:
    snapshot = gate.active_policy.snapshot
    limit = Limit.parse(text, name="x")
    assert str(snapshot.tightened(limit, factor)).replace("1 month", "month") == expected
    assert snapshot.tightened(limit, factor) is snapshot.tightened(limit, factor)


def test_strictest_of_several_scenarios_applies(gate: Any) -> None:
    act(gate, step("tighten", factor=2), name="one")
    act(gate, step("tighten", factor=10), name="two", value="198.51.100.0/24")
    assert admitted(gate, 30) == 10


# delay


def test_responses_are_held_back(gate: Any) -> None:
    act(gate, step("delay", delay=timedelta(seconds=2)))
    before_us = gate.now_us()
    admission = gate.admit(Visit())
    assert admission.allowed
    assert gate.now_us() - before_us == 2 * SECOND
    assert [each.action for each in admission.restrictions] == ["delay"]
    before_us = gate.now_us()
    assert gate.admit(Visit(peer="192.0.2.1")).allowed
    assert gate.now_us() == before_us


def test_only_so_many_requests_are_held_at_a_time() -> None:
    release = threading.Event()

    class SlowClock(FakeClock):
        def sleep(self, seconds: float) -> None:
            release.wait(20)

    gate = Gate(read(POLICY), clock=SlowClock(START_US), secret=SECRET)
    act(gate, step("delay", delay=timedelta(seconds=3)))
    found: list[Any] = []
    threads = [threading.Thread(target=lambda: found.append(gate.admit(Visit()))) for _ in range(gate._most_held)]
    for thread in threads:
        thread.start()
    while gate.action_counts.held < gate._most_held:
        pass
    refusal = gate.admit(Visit()).refusal
    assert refusal is not None
    assert (refusal.status, dict(refusal.headers)[b"retry-after"]) == (429, b"3")
    body = json.loads(refusal.body)
    assert (body["error"], body["type"].rpartition("#")[2]) == ("slowed_down", "abnormal-usage-detected")
    release.set()
    for thread in threads:
        thread.join()
    assert all(each.allowed for each in found)


def test_async_requests_are_held_without_blocking_others() -> None:
    async def run() -> None:
        gate = AsyncGate(read(POLICY), secret=SECRET)
        act(gate, step("delay", delay=timedelta(seconds=10)))
        held = asyncio.ensure_future(gate.admit(Visit()))
        for _ in range(5):  # steps of the event loop, until it waits
            await asyncio.sleep(0)
        assert gate.action_counts.held == 1
        assert (await gate.admit(Visit(peer="192.0.2.1"))).allowed
        held.cancel()
        with pytest.raises(asyncio.CancelledError):
            await held
        assert gate._held_places._value == gate._most_held  # its place is free again
        await gate.close()

    asyncio.run(run())


def test_held_requests_enter_the_concurrency_limit_afterwards() -> None:
    gate = Gate(read("overload: 1\n" + POLICY), clock=FakeClock(START_US), secret=SECRET)
    act(gate, step("delay"))
    first = gate.admit(Visit())
    assert first.allowed
    second = gate.admit(Visit())
    assert second.refusal is not None
    assert second.refusal.status == 503
    gate.finish(first, 200)
    third = gate.admit(Visit())
    assert third.allowed
    gate.finish(third, 200)
    assert gate.overload_stats()["*"].in_flight == 0


def test_request_that_must_not_wait_is_not_held(gate: Any) -> None:
    act(gate, step("delay"))
    before_us = gate.now_us()
    admission = gate.admit_without_store(Visit(), StoreTimeout("too late"))
    assert (admission.allowed, gate.now_us()) == (True, before_us)


# challenge


def test_api_clients_get_a_problem_that_is_never_cached(gate: Any) -> None:
    act(gate, step("challenge", difficulty=8))
    for headers in ({}, {"accept": "application/json"}):
        refusal = gate.admit(Visit(headers=headers)).refusal
        assert refusal.status == 403
        fields = dict(refusal.headers)
        assert fields[b"cache-control"] == b"no-store"
        assert fields[b"content-type"] == b"application/problem+json"
        assert b"retry-after" not in fields
        assert json.loads(refusal.body) == {
            "type": "https://iana.org/assignments/http-problem-types#abnormal-usage-detected",
            "title": "Abnormal Usage Detected",
            "status": 403,
            "detail": "Unusual requests came from this client: open this URL in a browser to continue.",
            "error": "challenge_required",
            "message": "Unusual requests came from this client: open this URL in a browser to continue.",
            "retry_after_seconds": None,
            "doc_url": None,
        }


def test_solution_lets_its_client_pass_and_nobody_else(gate: Any) -> None:
    act(gate, step("challenge", 120, difficulty=8), value="198.51.100.0/24")
    cookie = solved(gate.admit(Visit(headers=BROWSER)))
    assert gate.admit(Visit(headers={"cookie": cookie})).allowed
    assert not gate.admit(Visit(headers={"cookie": cookie}, peer="198.51.100.8")).allowed  # another bot
    assert not gate.admit(Visit(headers={"cookie": cookie.replace(f"{COOKIE}=", f"{COOKIE}=0")})).allowed
    forged = re.sub(r"\.8\.", ".7.", cookie)
    assert not gate.admit(Visit(headers={"cookie": forged})).allowed
    act(gate, step("challenge", 120, difficulty=9), value="198.51.100.7")  # a more difficult one
    assert not gate.admit(Visit(headers={"cookie": cookie})).allowed
    gate._clock.advance(3600)
    assert gate.action_counts.challenges == {"presented": 1, "failed": 4, "passed": 1}


def test_solution_expires(gate: Any) -> None:
    act(gate, step("challenge", 120, difficulty=8))
    cookie = solved(gate.admit(Visit()))
    gate._clock.advance(3599)
    assert gate.admit(Visit(headers={"cookie": cookie})).allowed
    gate._clock.advance(1)
    assert not gate.admit(Visit(headers={"cookie": cookie})).allowed


def test_every_gate_with_the_secret_accepts_the_solution(gate: Any) -> None:
    act(gate, step("challenge", difficulty=8))
    cookie = solved(gate.admit(Visit()))
    for secret, is_accepted in ((SECRET, True), ("another secret of a gate", False)):
        other = Gate(read(POLICY), clock=FakeClock(START_US), secret=secret)
        act(other, step("challenge", difficulty=8))
        assert other.admit(Visit(headers={"cookie": cookie})).allowed == is_accepted


HOSTILE_COOKIES = [
    COOKIE, f"{COOKIE}=", f"{COOKIE}=1.2", f"{COOKIE}=ffffffffffffffff.8.{'0' * 32}.1", f"{COOKIE}=1.0.{'0' * 32}",
    f"{COOKIE}=ffffffff.99.{'0' * 32}.1", f"{COOKIE}=ffffffff.8.{'0' * 32}.{'9' * 5000}", "\xff\x00;=;;",
    "; ".join([f"{COOKIE}=ffffffff.8.{'a' * 32}.1"] * 1000),
]  # fmt: skip


@pytest.mark.parametrize("cookie", HOSTILE_COOKIES, ids=range(len(HOSTILE_COOKIES)))
def test_hostile_cookies_do_not_pass(gate: Any, cookie: str) -> None:
    act(gate, step("challenge", difficulty=8))
    assert not gate.admit(Visit(headers={"cookie": cookie})).allowed


def test_redirect_leads_to_the_page_of_the_app_and_back(gate: Any) -> None:
    act(gate, step("challenge", mode="redirect", url="/captcha?from=gate"))
    refusal = gate.admit(Visit(headers=BROWSER, path="/a b/ü")).refusal
    assert refusal.status == 303
    fields = dict(refusal.headers)
    assert fields[b"location"] == b"/captcha?from=gate&return_to=/a%20b/%C3%BC"
    assert fields[b"cache-control"] == b"no-store"
    refusal = gate.admit(Visit()).refusal
    assert (refusal.status, dict(refusal.headers)[b"headgate-challenge"]) == (
        403,
        b'redirect; url="/captcha?from=gate"',
    )
    own = gate.admit(Visit(headers=BROWSER, path="/captcha"))
    assert own.allowed
    cookie = own.challenge.pass_cookie().partition(";")[0]
    assert gate.admit(Visit(headers={**BROWSER, "cookie": cookie})).allowed


def test_app_is_told_to_challenge_its_client(gate: Any) -> None:
    act(gate, step("challenge", mode="app"))
    admission = gate.admit(Visit())
    assert admission.allowed
    assert (b"headgate-challenge", b"required") in admission.headers
    cookie = admission.challenge.pass_cookie(secure=False)
    assert cookie.endswith("; Path=/; Max-Age=3600; HttpOnly; SameSite=Lax")
    passed = gate.admit(Visit(headers={"cookie": cookie.partition(";")[0]}))
    assert passed.challenge is None
    assert (b"headgate-challenge", b"required") not in passed.headers


def test_solution_of_the_page_is_no_pass_of_the_app(gate: Any) -> None:
    act(gate, step("challenge", difficulty=8), name="one")
    cookie = solved(gate.admit(Visit()))
    for action in list_actions(gate._limiter.engine, gate.now_us()):
        undo_action(gate._limiter.engine, action, grace=timedelta(hours=1), by="ada", now_us=gate.now_us())
    act(gate, step("challenge", mode="app"), name="two")
    assert gate.admit(Visit(headers={"cookie": cookie})).challenge is not None


# who is spared


@pytest.mark.parametrize("action", ["tighten", "delay", "challenge", "block"])
def test_allow_listed_clients_are_never_acted_on(gate: Any, action: Any) -> None:
    for value in ("203.0.113.9", "10.1.0.0/16", "10.1.2.3"):
        act(gate, step(action), value=value)
    act(gate, step(action), kind="tenant", value="acme")
    assert list_actions(gate._limiter.engine, gate.now_us()) == []
    act(gate, step(action), value="203.0.113.0/24")  # the network around one, and others
    before_us = gate.now_us()
    spared = gate.admit(Visit(peer="203.0.113.9"))
    assert (spared.allowed, spared.restrictions, gate.now_us()) == (True, (), before_us)
    assert [key.limit.quota for key in spared.resolution.keys] == [100, 100_000]
    assert gate.admit(Visit(peer="203.0.113.10", tenant="acme")).restrictions == ()
    hindered = gate.admit(Visit(peer="203.0.113.10"))
    assert hindered.restrictions or not hindered.allowed


def test_block_of_a_person_applies_to_allow_listed_clients_too(gate: Any) -> None:
    act(gate, step("block"), value="203.0.113.0/24")
    assert gate.admit(Visit(peer="203.0.113.9")).allowed
    gate.block("ip", "203.0.113.9", reason="court order")
    assert not gate.admit(Visit(peer="203.0.113.9")).allowed


def test_exempt_routes_and_other_clients_are_not_affected() -> None:
    gate = Gate(read(POLICY + "\nroutes: [{path: /health, cost: 0}]"), clock=FakeClock(START_US), secret=SECRET)
    assert not gate._live.is_active
    act(gate, step("challenge"))
    assert gate.admit(Visit(path="/health")) is UNLIMITED
    assert gate.admit(Visit(peer="192.0.2.1")).restrictions == ()


def test_views_do_not_hold_a_request_again(gate: Any) -> None:
    act(gate, step("delay"), name="one")
    act(gate, step("tighten", factor=5), name="two")
    view = gate.view_policy((LimitDeclaration("10/minute", by="ip"),), "view")
    before_us = gate.now_us()
    assert sum(gate.admit(Visit(), view).allowed for _ in range(20)) == 2
    assert gate.now_us() == before_us


def test_gates_without_a_common_secret_are_warned_about(redis7: Any, unique: str, caplog: Any) -> None:
    policy = "limits: [{by: ip, bucket: 9/minute}]\nabuse: {scenarios: {scraping: {steps: [challenge for 1 minute]}}}"
    for secret in (SECRET, None):
        with closing(Gate(read(policy), redis7.url, namespace=unique, secret=secret)):
            assert ("other nodes will challenge them again" in caplog.text) == (secret is None)


# explanation


def test_actions_explain_themselves_in_log_why_and_metrics() -> None:
    kept = Kept()
    log = DecisionLog(kept, secret=SECRET, sample=1.0, every=0.005)
    traffic = Traffic(POLICY, log)
    metrics = Metrics()
    metrics.watch(traffic.gate)
    sentences = {
        "tighten": "Limits divided by 100 until 15:10: ",
        "delay": "Delayed by 2 s until 15:10: ",
        "challenge": "Challenged until 15:10: ",
        "block": "Blocked until 15:10: ",
    }
    for number, action in enumerate(sentences):
        act(traffic.gate, step(action, factor=100), value=f"198.51.100.{number}")  # type: ignore[arg-type]
    for number in range(4):
        traffic.send(Request(peer=f"198.51.100.{number}"), times=2)
    assert log.flush(10)
    found: dict[str, Any] = {}
    for record in kept.records:
        found[record.outcome, record.reason] = record
    expected = {
        ("denied", "over-limit"): "tighten",
        ("allowed", "within-limits"): "delay",
        ("blocked", "challenged"): "challenge",
        ("blocked", "blocked"): "block",
    }
    assert found.keys() == expected.keys()
    for key, action in expected.items():
        assert found[key].note == f"{sentences[action]}{EVIDENCE} (credential-stuffing)."
        assert found[key].note in found[key].words
    assert found["denied", "over-limit"].origin == "action"
    samples: dict[Any, Any] = {(each.family.name, *each.labels): each.value for each in metrics.read()}
    assert samples["rate_limiter_actions", "credential-stuffing", "delay", "enforced"] == 1
    assert samples["rate_limiter_challenges", "presented"] == 2
    assert samples["rate_limiter_held_requests",] == 2
    assert samples["rate_limiter_decisions", "blocked", "none", "unmatched", "none"] == 4
    report = why(
        AllRecords(kept.records),
        ClientQuery("", (), {}),
        Span(datetime(2026, 11, 15, tzinfo=UTC), datetime(2026, 11, 16, tzinfo=UTC), None),
    )
    assert (report.blocked, report.challenged) == (4, 2)
    text = "\n".join(details(report, zone=None))
    assert all(sentences[each] in text for each in sentences)
    assert "tightened by an action" in text
    assert "overrides:" not in text
    assert "a check in the browser was needed" in "\n".join(mail(report, zone=None))
    log.close()


class AllRecords:
    """A reader that finds all records, whoever they are about."""

    def __init__(self, records: list[Any]) -> None:
        self._records = records

    def find(self, keys: Any, **_: Any) -> list[Any]:
        return [each for each in self._records if "lost" not in keys]
