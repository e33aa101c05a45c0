"""`headgate why`: reports agree with the traffic, and suggested overrides would have helped."""

from __future__ import annotations

import io
import json
import os
import re
import time
from contextlib import closing
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headgate import Calendar, InvalidInput
from headgate.cli import build_parser
from headgate.cli.terminal import Terminal
from headgate.policy import read
from headgate.policy.api_keys import ApiKeyHasher
from headgate.quotas import Ledger, QuotaPlan
from headgate.telemetry import DecisionLog
from headgate.telemetry.decision_log.sinks import open_reader, open_sink
from headgate.telemetry.human_time import coming, microseconds, shown, shown_span, span
from headgate.telemetry.pseudonyms import Pseudonymizer
from headgate.telemetry.why.render import details, mail
from headgate.telemetry.why.report import ClientQuery, why
from support.traffic import NOW, SECRET, START_US, Kept, Request, Traffic

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from headgate.telemetry import DecisionRecord
    from headgate.telemetry.why.report import RejectionReport

KEY = "sk_live_4f9a"
HASH = ApiKeyHasher(SECRET.encode()).fingerprint(KEY)
"""On a Monday."""
CLIENTS = Pseudonymizer(SECRET)

POLICY = """
name: shop
routes:
  - {path: /search, class: search, cost: 5}
limits:
  - {name: per-ip, by: ip, bucket: 10000/minute}
  - {name: per-tenant, by: tenant, missing: skip, bucket: 10000/minute}
  - {name: search, class: search, by: tenant, missing: ip, bucket: "100/minute, burst 50"}
  - {name: keys, path: /keys, by: api_key, missing: skip, bucket: 2/minute}
  - {name: everything, path: /all, by: global, bucket: 1/minute}
clients:
  - {tenant: acme, label: Acme Corp}
blocked:
  - {user: mallory, reason: scraping}
"""


class Shelf(Kept):
    """A sink that is also a log reader."""

    def find(self, keys: Sequence[str], *, since_us: int, until_us: int, most: int) -> list[DecisionRecord]:
        found = [each for each in self.records if {*keys} & {*each.clients} and since_us <= each.at_us < until_us]
        return sorted(found, key=lambda each: each.id)[:most]

    def nearest(self, keys: Sequence[str], *, at_us: int) -> tuple[int | None, int | None]:
        times = [each.at_us for each in self.records if {*keys} & {*each.clients} and each.is_rejection]
        before, after = [each for each in times if each < at_us], [each for each in times if each >= at_us]
        return max(before, default=None), min(after, default=None)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HEADGATE_SECRET", SECRET)
    monkeypatch.setenv("TZ", "Europe/Berlin")
    time.tzset()
    (tmp_path / "policy.yaml").write_text(POLICY)
    return tmp_path


@pytest.fixture(autouse=True)
def restore_time_zone() -> Iterator[None]:
    yield
    os.environ.pop("TZ", None)
    time.tzset()


@pytest.fixture
def asked(folder: Path) -> Callable[..., str]:
    """Run `headgate why` and return its output."""

    def ask(*words: str, code: int = 0) -> str:
        arguments, out = build_parser(only="why").parse_args(["why", *words]), io.StringIO()
        assert arguments.run(arguments, Terminal(out), Terminal(out)) == code
        return out.getvalue()

    return ask


@pytest.fixture
def traffic(folder: Path) -> Iterator[Traffic]:
    with DecisionLog("sqlite:///decisions.db", secret=SECRET, sample=0, every=0.005) as log:
        traffic = Traffic(POLICY, log)
        traffic.flush = log.flush  # type: ignore[attr-defined]
        yield traffic


# ------------------------------------------------------------------ the question of the seeds


def test_why_was_acme_blocked_at_3pm_yesterday(
    traffic: Any, asked: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    acme = Request(tenant="acme", api_key=KEY)
    statuses: list[tuple[float, bool]] = []
    for second in range(120):
        statuses += [(second, each.allowed) for each in traffic.send(acme, 2 if second % 60 < 30 else 0)]
        traffic.send(Request(tenant="globex"))
        traffic.clock.advance(1)
    assert traffic.flush()
    denied = [second for second, allowed in statuses if not allowed]
    assert 60 < len(denied) < 120
    monkeypatch.setattr("headgate.cli.why.datetime", Now)
    told = asked("acme", "--at", "yesterday 16:00", "--policy", "policy.yaml")
    first, last = f"16:00:{denied[0]:02}", f"16:01:{denied[-1] - 60:02}"
    to_customer, separator, for_colleagues = told.partition("\n\n---- For colleagues, not part of the mail ----\n\n")
    assert separator
    assert to_customer.startswith(
        "This is about requests from Acme Corp on Sunday 15 November 2026 between 15:50 and 16:11 CET (UTC+01:00). "
        f"We rejected {len(denied)} of them.\n"
    )
    assert (
        f"\nAll {len(denied)} (GET /search) exceeded the limit of 100 tokens per minute (at most 50 at once) for each "
        f"account, between {first} and {last}. At 16:0"
    ) in to_customer
    assert re.search(
        r"At 16:0[\d:]+ a request needed 5 tokens and (none|\d) (was|were) left; it would have succeeded \d(\.\d)? s "
        r"later\. At the busiest time, requests needed \d+ tokens more than the limit allows in one minute\.\n\n"
        r"To avoid this, send no more than 20 of these requests per minute, and no more than 10 at once\. ",
        to_customer,
    )
    for word in ("token_bucket", "hmac:", "tenant", "override", "exact", "search:"):
        assert word not in to_customer
    assert for_colleagues.startswith("Client: Acme Corp.\n")
    assert 'Limit "search" (100 per minute, burst 50, token_bucket, by tenant) denied' in for_colleagues
    assert '\n  - {tenant: "acme", limit: "search", bucket: "' in for_colleagues
    assert for_colleagues.endswith("These figures are exact: the store made all of the decisions.\n")
    assert asked("acme", "--at", "yesterday 16:00", "--only", "mail") == f"{to_customer}\n"
    assert asked("acme", "--at", "yesterday 16:00", "--policy", "policy.yaml", "--only", "details") == for_colleagues
    assert "on Sunday 15 November 2026 between 14:50 and 15:11 UTC." in asked(
        "acme", "--at", "2026-11-15 15:00", "--utc"
    )


class Now(datetime):
    @classmethod
    def now(cls, tz: Any = None) -> datetime:
        return NOW.astimezone(tz)


@pytest.mark.parametrize(
    "client",
    [
        "acme",
        "tenant=acme",
        "Acme Corp",
        "acme  CORP",
        KEY,
        f"api_key={KEY}",
        HASH,
        HASH.upper().lower(),
        "203.0.113.9",
    ],
)
def test_client_is_found_by_any_identifier(traffic: Any, asked: Callable[..., str], client: str) -> None:
    traffic.send(Request("/keys", tenant="acme", api_key=KEY), 5)
    assert traffic.flush()
    told = json.loads(asked(client, "--at", "2026-11-15T15:00Z", "--json"))
    assert (told["rejected"], told["labels"], told["limits"][0]["name"]) == (3, ["Acme Corp"], "keys")
    assert told["limits"][0]["override"] == f'{{api_key: "{HASH}", limit: "keys", bucket: "5/minute"}}'
    assert KEY not in json.dumps(told)


@pytest.mark.parametrize("client", ["globex", "user=acme", "sk_live_other", "hmac:" + "0" * 32, "203.0.113.10"])
def test_report_on_another_client_is_empty(traffic: Any, asked: Callable[..., str], client: str) -> None:
    traffic.send(Request("/keys", tenant="acme", api_key=KEY), 5)
    assert traffic.flush()
    told = json.loads(asked(client, "--at", "2026-11-15T15:00Z", "--json"))
    assert (told["rejected"], told["labels"], told["limits"], told["rejected_before"]) == (0, [], [], None)


def test_api_key_is_read_from_stdin_and_never_printed(
    traffic: Any, asked: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    traffic.send(Request("/keys", api_key=KEY), 3)
    assert traffic.flush()
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(f"{KEY}\n".encode())))
    told = asked("-", "--at", "2026-11-15T15:00Z")
    assert told.startswith("This is about requests with your API key on ")
    assert KEY not in told
    assert KEY not in asked(KEY, "--at", "2026-11-14")


def test_report_on_one_request_uses_the_singular(traffic: Any, asked: Callable[..., str]) -> None:
    traffic.send(Request("/keys", api_key=KEY), 3)
    assert traffic.flush()
    assert asked(HASH, "--at", "2026-11-15 15:00", "--utc") == (
        "This is about requests with your API key on Sunday 15 November 2026 between 14:50 and 15:11 UTC. "
        "We rejected 1 of them.\n"
        "\nThe request (GET /keys) exceeded the limit of 2 requests per minute for each API key. At 15:00:00 the "
        "request needed 1 token and none were left; it would have succeeded 30 s later.\n"
        "\nTo avoid this, send no more than 2 requests per minute. After a response with status 429, wait as long as "
        "its Retry-After header says before you try again. If you need a higher limit, please let us know.\n"
        "\n---- For colleagues, not part of the mail ----\n"
        f"\nClient: api_key {HASH[:13]} (asked for: {HASH}).\n"
        '\nLimit "keys" (2 per minute, token_bucket, by api_key) denied 1 request at 2026-11-15 15:00:00 UTC, on '
        "GET /keys (1). Furthest over: cost 1, 0 left, 1 over, passes after 30 s. With this entry under overrides: in "
        "the policy, all of them would have passed:\n"
        f'  - {{api_key: "{HASH}", limit: "keys", bucket: "3/minute"}}\n'
        "\nThese figures are exact: the store made all of the decisions.\n"
    )


def test_quiet_time_points_to_the_nearest_rejections(traffic: Any, asked: Callable[..., str]) -> None:
    traffic.send(Request("/keys", api_key=KEY), 3)
    traffic.clock.advance(7200)
    traffic.send(Request("/keys", api_key=KEY), 3)
    assert traffic.flush()
    assert "The log has no record" in asked(HASH, "--at", "2026-11-15 16:00", "--utc", "--only", "details")
    assert asked(HASH, "--at", "2026-11-15 16:00", "--utc", "--only", "mail") == (
        "This is about your requests on Sunday 15 November 2026 between 15:50 and 16:11 UTC. We rejected none of "
        "them.\n"
        "\nThe last rejected request before that was at 2026-11-15 15:00:00 UTC.\n"
        "\nThe next one after that was at 2026-11-15 17:00:00 UTC.\n"
    )


def test_missing_secret_limits_the_search_to_labels_and_hashes(
    traffic: Any, asked: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    traffic.send(Request(tenant="acme"), 30)
    assert traffic.flush()
    monkeypatch.delenv("HEADGATE_SECRET")
    assert "Without a secret, only labels and hashes are found" in asked("ada", "--at", "2026-11-15")
    assert "This is about requests from Acme Corp" in asked("acme corp", "--at", "2026-11-15")
    with pytest.raises(InvalidInput, match="the log names each ip by a keyed hash, and there is no secret"):
        asked("203.0.113.9", "--at", "2026-11-15")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--log", "sqlite:///missing.db"), "there is no decision log at missing.db"),
        (("--log", "sqlite:///policy.yaml"), "policy.yaml is not a decision log: file is not a database"),
        (("--log", "sqlite:///empty.db"), "empty.db is not a decision log: it has no decisions"),
        (("--log", "mysql://u:hidden@h/d"), "cannot open the decision log 'mysql://***@h/d': known are sqlite, "),
        (("--log", "decisions.db"), "cannot open the decision log 'decisions.db': known are sqlite, "),
        (("--log", "clickhouse://ada:hidden@127.0.0.1:1/d"), "the decision log cannot be read: "),
        (("--at", "half past"), "'half past' is not a time; write it like"),
        (("--at", "15:00", "--until", "14:00"), "is before '15:00'"),
    ],
)
def test_invalid_query_is_explained(
    asked: Callable[..., str], folder: Path, words: tuple[str, ...], message: str
) -> None:
    (folder / "empty.db").touch()
    with pytest.raises(InvalidInput, match=re.escape(message)) as refusal:
        asked("acme", *words)
    assert "hidden" not in str(refusal.value)


def test_policy_errors_are_reported(asked: Callable[..., str], folder: Path) -> None:
    (folder / "bad.yaml").write_text("limits: [{by: ip, bukcet: 1/minute}]")
    assert "bad.yaml:1:19: unknown field 'bukcet'" in asked("acme", "--policy", "bad.yaml", code=1)


# ------------------------------------------------------------------ what the answer says


def answer_to(policy: str, send: Callable[[Traffic], Any], client: str, **options: Any) -> RejectionReport:
    shelf = Shelf()
    with DecisionLog(shelf, secret=SECRET, every=0.005, **{"node": "n1", "sample": 0, **options}) as log:
        traffic = Traffic(policy, log)
        with closing(traffic.gate):
            send(traffic)
            assert log.flush()
    when = span("2026-11-15", now=NOW, zone=UTC)
    return why(shelf, ClientQuery.read(client, CLIENTS, read(policy)), when, policy=read(policy))


def sent(answer: RejectionReport) -> str:
    """The mail to the customer."""
    return "\n".join(mail(answer, zone=UTC))


def known(answer: RejectionReport) -> str:
    """The details for operators."""
    return "\n".join(details(answer, zone=UTC))


def test_report_on_a_blocked_client_suggests_no_limit() -> None:
    answer = answer_to(POLICY, lambda traffic: traffic.send(user="mallory", times=2), "user=mallory")
    assert (answer.rejected, answer.blocked, answer.limits) == (2, 2, ())
    assert "Both were rejected with status 403, because access was blocked at that time." in sent(answer)
    assert "scraping" not in sent(answer), "why somebody was blocked is not for everybody to know"
    assert "Reason of the block: scraping." in known(answer)


def test_global_limit_has_no_override() -> None:
    answer = answer_to(POLICY, lambda traffic: traffic.send(path="/all", times=4), "203.0.113.9")
    (found,) = answer.limits
    assert found.remedy.line is None
    assert "All clients share this limit, so it can be exceeded through no fault of your own." in sent(answer)
    told = (
        "With 4 per minute, token_bucket, all of them would have passed, but the limit counts by global, so it cannot"
    )
    assert told in known(answer)


def test_client_known_by_hash_needs_the_key() -> None:
    policy = "limits: [{name: per-user, by: user, bucket: 1/minute}]"
    answer = answer_to(policy, lambda traffic: traffic.send(user="ada", tenant="acme", times=3), "tenant=acme")
    assert answer.rejected == 0  # no limit of the policy counts by tenant
    answer = answer_to(policy, lambda traffic: traffic.send(user="ada", times=3), "203.0.113.9")
    assert answer.limits[0].remedy.line == '{user: "...", limit: "per-user", bucket: "3/minute"}'
    assert answer.limits[0].remedy.note == "insert the user, of which the log has only a keyed hash"
    named = f"{policy}\nclients: [{{user: ada, label: Ada}}]"
    answer = answer_to(named, lambda traffic: traffic.send(user="ada", times=3), "203.0.113.9")
    assert answer.limits[0].remedy.line == '{user: "ada", limit: "per-user", bucket: "3/minute"}'


def test_override_of_a_sharded_limit_can_be_sharded() -> None:
    policy = "limits: [{name: per-user, by: user, bucket: 8/minute, split: 8}]"
    answer = answer_to(policy, lambda traffic: traffic.send(user="ada", times=20), "user=ada")
    line = answer.limits[0].remedy.line
    assert line is not None
    read(f"{policy}\noverrides:\n  - {line}")
    assert answer.limits[0].remedy.note == "the limit is split over 8 counters, one of which may deny before the others"


def test_unsatisfiable_request_is_reported_as_such() -> None:
    policy = "limits: [{name: pay, path: /pay, by: ip, bucket: 10/minute, cost: 5}]"
    record = Shelf()
    with DecisionLog(record, secret=SECRET, sample=0, every=0.005) as log:
        Traffic(policy, log).send(path="/pay", times=3)
        assert log.flush()
    record.records = [each._replace(retry_us=None, reason="over-capacity", cost=11) for each in record.records]
    answer = why(record, ClientQuery.read("203.0.113.9", CLIENTS), span("2026-11-15", now=NOW, zone=UTC))
    told = "the request needed 11 tokens and none were left; the limit never allows so many at once, so it could not"
    assert told in sent(answer)
    assert "split requests that need more than the limit allows into smaller ones" in sent(answer)
    assert answer.limits[0].remedy.line == '{ip: "203.0.113.9", limit: "pay", bucket: "21/minute"}'


@pytest.mark.parametrize("mode", ["closed", "local"])
def test_degraded_decisions_are_reported(mode: str) -> None:
    policy = f"on_failure: {mode}\nlimits: [{{name: per-ip, by: ip, bucket: 5/minute}}]"
    shelf = Shelf()
    with DecisionLog(shelf, secret=SECRET, every=0.005, sample=0) as log:
        traffic = Traffic(policy, log, store="redis://127.0.0.1:1/0")
        with closing(traffic.gate):
            traffic.send(times=3)
        assert log.flush()
    answer = why(shelf, ClientQuery.read("203.0.113.9", CLIENTS), span("2026-11-15", now=NOW, zone=UTC))
    assert answer.degraded == answer.rejected > 0
    assert f"decided without the store: {mode}: " in known(answer)
    is_closed = mode == "closed"
    assert ("rejected with status 503, because of a temporary problem on our side" in sent(answer)) == is_closed
    assert ("by a stricter limit than usual" in sent(answer)) == (not is_closed)
    assert ("You do not have to change anything." in sent(answer)) == (not is_closed)
    assert "To avoid this" not in sent(answer)


def test_allowed_requests_are_estimated_from_the_sample() -> None:
    answer = answer_to(POLICY, lambda traffic: traffic.send(path="/other", times=7), "203.0.113.9", sample=1)
    about = "This is about requests from 203.0.113.9 on Sunday 15 November 2026, UTC."
    assert sent(answer) == f"{about} We rejected none of them, and accepted about 7."


def test_shadow_limit_rejected_nothing() -> None:
    limits = "[{name: soon, by: ip, bucket: 2/minute, shadow: true}, {name: now, by: ip, bucket: 9/minute}]"
    answer = answer_to(f"limits: {limits}", lambda traffic: traffic.send(times=5), "203.0.113.9", sample=0)
    assert answer.rejected == 0
    assert "soon" not in sent(answer)
    assert 'Limit "soon" (2 per minute, token_bucket, by ip, shadow mode: not enforced) would have denied 3' in known(
        answer
    )


def test_losses_are_reported() -> None:
    shelf = Shelf()
    with DecisionLog(shelf, secret=SECRET, every=0.005, sample=0, most=5) as log:
        shelf.refuses = OSError("disk full")
        traffic = Traffic("limits: [{by: ip, bucket: 1/hour}]", log)
        traffic.send(times=2)
        assert not log.flush(0.05)
        traffic.send(times=30)
        shelf.refuses = None
        assert log.flush()
    answer = why(shelf, ClientQuery.read("203.0.113.9", CLIENTS), span("2026-11-15", now=NOW, zone=UTC))
    assert answer.lost == log.stats.lost == 31 - answer.rejected > 0
    assert f"{answer.lost} decisions of all clients in that time could not be logged." in known(answer)
    assert "Some records of that time are missing, so there may have been more rejected requests." in sent(answer)
    for day in ("2026-11-14", "2026-11-16"):
        assert why(shelf, ClientQuery.read("203.0.113.9", CLIENTS), span(day, now=NOW, zone=UTC)).lost == 0


def test_truncated_results_are_reported() -> None:
    shelf = Shelf()
    with DecisionLog(shelf, secret=SECRET, sample=0, every=0.005) as log:
        Traffic("limits: [{by: ip, bucket: 1/hour}]", log).send(times=30)
    asked, when = ClientQuery.read("203.0.113.9", CLIENTS), span("2026-11-15", now=NOW, zone=UTC)
    assert (why(shelf, asked, when, most=28).is_cut, why(shelf, asked, when, most=28).rejected) == (True, 28)
    assert not why(shelf, asked, when, most=29).is_cut
    assert "ask for a shorter time" in known(why(shelf, asked, when, most=28))
    assert "We rejected at least 28 of them." in sent(why(shelf, asked, when, most=28))


# ------------------------------------------------------------------ the mail


def test_mail_names_the_queried_address() -> None:
    answer = answer_to("limits: [{by: ip, bucket: 60/minute}]", lambda traffic: traffic.send(times=62), "203.0.113.9")
    assert sent(answer) == (
        "This is about requests from 203.0.113.9 on Sunday 15 November 2026, UTC. We rejected 2 of them.\n"
        "Both exceeded the limit of 60 requests per minute for each IP address. At 15:00:00 a request needed 1 token "
        "and none were left; it would have succeeded 1 s later. At the busiest time, there were 2 requests more than "
        "the limit allows in one minute.\n"
        "To avoid this, send no more than 60 requests per minute. After a response with status 429, wait as long as "
        "its Retry-After header says before you try again. If you need a higher limit, please let us know."
    )


def test_mail_names_no_other_clients_of_an_address() -> None:
    def send(traffic: Traffic) -> None:
        traffic.send(tenant="acme", times=2)
        traffic.send(tenant="globex", times=2)

    policy = (
        "limits: [{by: ip, bucket: 1/minute}, {by: tenant, bucket: 9/minute}]\n"
        "clients: [{tenant: acme, label: Acme}, {tenant: globex, label: Globex}]"
    )
    answer = answer_to(policy, send, "203.0.113.9")
    assert "Globex" not in sent(answer)
    assert "Acme" not in sent(answer)
    assert "Client: Acme and Globex (asked for: 203.0.113.9)." in known(answer)


def test_mail_on_a_concurrency_limit_mentions_open_requests() -> None:
    policy = "limits: [{name: reports, by: user, bucket: '2/minute, concurrency'}]"
    answer = answer_to(policy, lambda traffic: traffic.send(user="ada", times=3), "user=ada")
    assert "exceeded the limit of 2 requests at the same time for each user." in sent(answer)
    assert "the request arrived while 2 others were in progress." in sent(answer)
    assert "keep at most 2 requests open at the same time" in sent(answer)


@pytest.mark.parametrize(
    ("retry_us", "told"),
    [
        (1, "less than 0.1 s"),
        (1_790, "less than 0.1 s"),
        (600_000, "0.6 s"),
        (600_001, "0.7 s"),
        (1_000_000, "1 s"),
        (30_000_000, "30 s"),
        (90_500_000, "91 s"),
        (600_000_000, "10 minutes"),
        (3 * 3_600_000_000, "3 hours"),
    ],
)
def test_wait_is_rounded_up(retry_us: int, told: str) -> None:
    answer = answer_to(POLICY, lambda traffic: traffic.send(Request("/keys", api_key=KEY), 3), KEY)
    (found,) = answer.limits
    found = replace(found, denial=found.denial._replace(retry_us=retry_us))
    assert f"it would have succeeded {told} later." in sent(replace(answer, limits=(found,)))


@given(
    by=st.sampled_from(["ip", "tenant", "api_key", "user", "global", "tenant+user", "client", "device_id"]),
    algorithm=st.sampled_from(
        ["token_bucket", "gcra", "leaky_bucket", "fixed_window", "sliding_window", "sliding_log", "concurrency"]
    ),
    cost=st.integers(1, 3),
    times=st.integers(1, 12),
    client=st.sampled_from(["203.0.113.9", "tenant=acme", "user=ada", KEY, HASH, "acme"]),
)
def test_mail_contains_no_internal_details(by: str, algorithm: str, cost: int, times: int, client: str) -> None:
    policy = f"limits: [{{name: internal-name, by: {by}, missing: ip, cost: {cost}, bucket: '3/minute, {algorithm}'}}]"

    def send(traffic: Traffic) -> None:
        traffic.send(Request(tenant="acme", user="ada", api_key=KEY), times)

    text = sent(answer_to(policy, send, client, sample=1))
    for word in ("hmac:", algorithm, "internal-name", KEY, ".*", "unmatched", "override", "store"):
        assert word not in text
    assert not re.search(r"\b1 (requests|tokens|others)\b|\b1 were\b", text)


# ------------------------------------------------------------------ what it proposes


@given(
    algorithm=st.sampled_from(
        ["token_bucket", "gcra", "leaky_bucket", "fixed_window", "sliding_window", "sliding_log"]
    ),
    quota=st.integers(1, 12),
    burst=st.integers(1, 12),
    cost=st.integers(1, 3),
    pauses=st.lists(st.sampled_from([0, 0, 0, 0.3, 1, 4, 9, 11, 30]), min_size=5, max_size=60),
)
def test_suggested_override_would_have_allowed_all(
    algorithm: str, quota: int, burst: int, cost: int, pauses: list[float]
) -> None:
    shape = f", burst {burst}" if algorithm in ("token_bucket", "gcra", "leaky_bucket") else ""
    policy = (
        f'limits: [{{name: it, by: user, cost: {cost}, bucket: "{max(quota, cost)}/10 seconds'
        f'{shape if burst >= cost else ""}, {algorithm}"}}]'
    )

    def send(traffic: Traffic) -> None:
        for pause in pauses:
            traffic.clock.advance(pause)
            traffic.send(user="ada")

    answer = answer_to(policy, send, "user=ada", sample=0)
    if not answer.limits:
        return
    (found,) = answer.limits
    assert found.remedy.line is not None
    helped = answer_to(f"{policy}\noverrides:\n  - {found.remedy.line}", send, "user=ada", sample=0)
    assert helped.rejected == 0


def test_suggested_override_is_not_much_too_large() -> None:
    policy = 'limits: [{name: it, by: user, bucket: "60/minute"}]'
    answer = answer_to(policy, lambda traffic: traffic.send(user="ada", times=100), "user=ada")
    assert answer.limits[0].peak == 40
    assert answer.limits[0].remedy.line == '{user: "ada", limit: "it", bucket: "100/minute"}'


# ------------------------------------------------------------------ when


BERLIN = ZoneInfo("Europe/Berlin")


@pytest.mark.parametrize(
    ("written", "moment"),
    [
        ("yesterday 15:00", "2026-11-15T15:00:00+01:00"),
        ("yesterday at 3pm", "2026-11-15T15:00:00+01:00"),
        ("3pm yesterday", "2026-11-15T15:00:00+01:00"),
        ("3:05 PM, yesterday", "2026-11-15T15:05:00+01:00"),
        ("2026-11-15 15:00", "2026-11-15T15:00:00+01:00"),
        ("2026-11-15 3pm", "2026-11-15T15:00:00+01:00"),
        ("2026-07-15 15:00", "2026-07-15T15:00:00+02:00"),
        ("2026-11-15T15:00:30Z", "2026-11-15T15:00:30+00:00"),
        ("2026-11-15T15:00:30-05:00", "2026-11-15T15:00:30-05:00"),
        ("15:00", "2026-11-15T15:00:00+01:00"),
        ("11:00", "2026-11-16T11:00:00+01:00"),
        ("today 11:00", "2026-11-16T11:00:00+01:00"),
        ("12am", "2026-11-16T00:00:00+01:00"),
        ("12pm", "2026-11-15T12:00:00+01:00"),
        ("noon", "2026-11-15T12:00:00+01:00"),
        ("friday 9:30", "2026-11-13T09:30:00+01:00"),
        ("mon 9:30", "2026-11-09T09:30:00+01:00"),
        ("10 minutes ago", "2026-11-16T11:20:00+01:00"),
        ("an hour ago", "2026-11-16T10:30:00+01:00"),
        ("2h ago", "2026-11-16T09:30:00+01:00"),
        ("a week ago", "2026-11-09T11:30:00+01:00"),
        ("now", "2026-11-16T11:30:00+01:00"),
    ],
)
def test_moment_accepts_colloquial_times(written: str, moment: str) -> None:
    found = span(written, now=NOW, zone=BERLIN)
    assert found.moment is not None
    assert found.moment == datetime.fromisoformat(moment)
    assert found.since == found.moment - timedelta(minutes=10)
    assert timedelta(minutes=10) < found.until - found.moment <= timedelta(minutes=11)


@pytest.mark.parametrize(
    ("at", "until", "since", "end"),
    [
        ("yesterday", None, "2026-11-15T00:00+01:00", "2026-11-16T00:00+01:00"),
        ("2026-11-14", None, "2026-11-14T00:00+01:00", "2026-11-15T00:00+01:00"),
        ("yesterday 15:00", "16:30", "2026-11-15T15:00+01:00", "2026-11-15T16:31+01:00"),
        ("yesterday 22:00", "today 2:00", "2026-11-15T22:00+01:00", "2026-11-16T02:01+01:00"),
        ("friday", "yesterday", "2026-11-13T00:00+01:00", "2026-11-16T00:00+01:00"),
    ],
)
def test_interval_has_a_start_and_an_end(at: str, until: str | None, since: str, end: str) -> None:
    found = span(at, until, now=NOW, zone=BERLIN)
    assert (found.since, found.until) == (datetime.fromisoformat(since), datetime.fromisoformat(end))
    assert found.moment is None


@pytest.mark.parametrize(
    "written", ["", "soon", "15", "25:00", "13pm", "0am", "3 months ago", "2026-13-01", "2026-W46", "yesterday 7 pm x"]
)
def test_invalid_time_is_rejected(written: str) -> None:
    with pytest.raises(InvalidInput, match="write it like"):
        span(written, now=NOW, zone=BERLIN)


@pytest.fixture(params=[BERLIN, None], ids=["a zone by its name", "the zone of this machine"])
def zone(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> ZoneInfo | None:
    """Berlin, where clocks were put forward on 2026-03-29 and back on 2026-10-25."""
    monkeypatch.setenv("TZ", "Europe/Berlin")
    time.tzset()
    found: ZoneInfo | None = request.param
    return found


@pytest.mark.parametrize(
    ("at", "until", "since", "end"),
    [
        # Days of 23 and 25 hours.
        ("2026-03-29", None, "2026-03-29T00:00+01:00", "2026-03-30T00:00+02:00"),
        ("2026-10-25", None, "2026-10-25T00:00+02:00", "2026-10-26T00:00+01:00"),
        ("2026-10-24", "2026-10-25", "2026-10-24T00:00+02:00", "2026-10-26T00:00+01:00"),
        # Ten minutes are elapsed time, also across a clock change.
        ("2026-03-29 01:55", None, "2026-03-29T01:45+01:00", "2026-03-29T03:06+02:00"),
        ("2026-03-29 03:05", None, "2026-03-29T01:55+01:00", "2026-03-29T03:16+02:00"),
        ("2026-10-25 03:05", None, "2026-10-25T02:55+01:00", "2026-10-25T03:16+01:00"),
        # 02:30 does not exist in spring and exists twice in autumn.
        ("2026-03-29 02:30", None, "2026-03-29T03:20+02:00", "2026-03-29T03:41+02:00"),
        ("2026-10-25 02:30", None, "2026-10-25T02:20+02:00", "2026-10-25T02:41+01:00"),
        ("2026-10-25 2:30am", None, "2026-10-25T02:20+02:00", "2026-10-25T02:41+01:00"),
        ("2026-10-25 01:50", "2:10", "2026-10-25T01:50+02:00", "2026-10-25T02:11+01:00"),
        ("2026-10-25T02:30+01:00", None, "2026-10-25T02:20+01:00", "2026-10-25T02:41+01:00"),
    ],
)
def test_interval_across_a_clock_change_is_complete(
    zone: ZoneInfo | None, at: str, until: str | None, since: str, end: str
) -> None:
    found = span(at, until, now=NOW, zone=zone)
    times = datetime.fromisoformat(since), datetime.fromisoformat(end)
    assert (found.since_us, found.until_us) == tuple(microseconds(each) for each in times)


@pytest.mark.parametrize(
    ("written", "moment"),
    [
        ("2:50", "2026-10-25T02:50+02:00"),
        ("2:30", "2026-10-25T02:30+01:00"),
        ("2026-10-25 02:30", "2026-10-25T02:30+01:00"),
        ("today", "2026-10-26T00:00+01:00"),
    ],
)
def test_repeated_hour_is_ahead_until_its_second_pass(zone: ZoneInfo | None, written: str, moment: str) -> None:
    now = datetime.fromisoformat("2026-10-25T02:40+02:00")
    assert coming(written, now=now, zone=zone, at_its_end=True) == datetime.fromisoformat(moment)


@pytest.mark.parametrize("written", ["0001-01-01", "9999-12-31", "9999-12-31 23:59", "999999 days ago"])
def test_time_outside_the_calendar_is_rejected(zone: ZoneInfo | None, written: str) -> None:
    with pytest.raises(InvalidInput, match="no time before the year 1, nor after 9999"):
        span(written, now=NOW, zone=zone)


@pytest.mark.parametrize("written", ["9999-12-31", "999999 weeks"])
def test_time_too_far_ahead_is_rejected(zone: ZoneInfo | None, written: str) -> None:
    with pytest.raises(InvalidInput, match="too far ahead"):
        coming(written, now=NOW, zone=zone, at_its_end=True)


def test_times_are_shown_with_their_zone() -> None:
    summer = datetime(2026, 7, 1, 13, tzinfo=UTC)
    assert shown(NOW, UTC) == "2026-11-16 10:30:00 UTC"
    assert shown(NOW, BERLIN) == "2026-11-16 11:30:00 CET (UTC+01:00)"
    assert shown_span(NOW, NOW + timedelta(hours=1), zone=BERLIN) == "2026-11-16 11:30:00 and 12:30:00 CET (UTC+01:00)"
    assert shown_span(NOW, NOW + timedelta(days=1), zone=UTC) == "2026-11-16 10:30:00 and 2026-11-17 10:30:00 UTC"
    assert shown_span(summer, NOW, zone=BERLIN) == (
        "2026-07-01 15:00:00 CEST (UTC+02:00) and 2026-11-16 11:30:00 CET (UTC+01:00)"
    )


def test_sqlite_reader_finds_the_same_as_memory(folder: Path) -> None:
    shelf = Shelf()
    with DecisionLog(shelf, secret=SECRET, sample=0.5) as one, closing(open_sink("sqlite:///decisions.db")) as sink:
        traffic = Traffic("limits: [{name: it, by: client, bucket: 3/minute}]", one)
        for second in range(200):
            traffic.send(Request(user=f"u{second % 3}", tenant=None if second % 2 else "acme"))
            traffic.clock.advance(1)
        assert one.flush()
        sink.write(shelf.records)
        sink.write(shelf.records[:50])
    keys = [CLIENTS.key("tenant", "acme"), CLIENTS.key("user", "u1")]
    with closing(open_reader("sqlite:///decisions.db")) as reader:
        for since, until, most in [(0, 300, 1000), (20, 90, 1000), (20, 21, 5), (0, 300, 7), (500, 600, 7)]:
            when = {"since_us": START_US + since * 1_000_000, "until_us": START_US + until * 1_000_000}
            for asked in (keys, keys[:1]):
                assert reader.find(asked, **when, most=most) == shelf.find(asked, **when, most=most)
                assert reader.nearest(asked, at_us=when["since_us"]) == shelf.nearest(asked, at_us=when["since_us"])


# ------------------------------------------------------------------ charged requests


def make_charges(folder: Path) -> None:
    plan = QuotaPlan("exports", 10, Calendar("month"))
    with closing(Ledger(f"sqlite:///{folder}/quota.db")) as ledger:
        ledger.open_period("exports/acme", plan)
        ledger.charge("exports/acme", 7, id="export-1", reference="GET /exports/1")
        ledger.charge("exports/acme", 3, id="export-2")


def test_charged_requests_follow_the_rejected_ones(traffic: Any, asked: Callable[..., str], folder: Path) -> None:
    assert not all(each.allowed for each in traffic.send(Request(tenant="acme", api_key=KEY), 300))
    assert traffic.flush()
    make_charges(folder)
    told = asked("tenant=acme", "--ledger", "sqlite:///quota.db", "--utc")
    _, about = told.split("For colleagues")
    assert "Account exports/acme: 2 requests charged with 10 units, paid by allowance 10." in about
    assert "Nothing was left from" in about
    assert re.search(r"export-1  7  allowance  GET /exports/1", about)
    (report,) = json.loads(asked("acme", "--ledger", "sqlite:///quota.db", "--json"))["charges"]
    assert (report["requests"], report["amount"], report["last"][0]["id"]) == (2, 10, "export-1")
    assert "Account" not in asked("globex", "--ledger", "sqlite:///quota.db")


def test_ledger_alone_is_enough(asked: Callable[..., str], folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_charges(folder)
    monkeypatch.delenv("HEADGATE_SECRET")
    monkeypatch.setenv("HEADGATE_LEDGER", "sqlite:///quota.db")
    assert asked("tenant=acme").startswith("Account exports/acme: 2 requests charged with 10 units")
    assert asked("exports/acme").startswith("Account exports/acme: 2 requests charged with 10 units")
    assert len(json.loads(asked("acme", "--json"))["charges"]) == 1
    assert asked("globex") == "No account of this client in sqlite:///quota.db.\n"
