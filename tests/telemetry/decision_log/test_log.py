"""The decision log: recorded fields, pseudonyms, bounds, and delivery to sinks."""

from __future__ import annotations

import gc
import json
import logging
import random
import re
import sqlite3
import subprocess
import sys
import threading
import weakref
from contextlib import closing
from typing import TYPE_CHECKING, Any

import pytest

from headgate import InvalidConfiguration, Limit
from headgate.gate.event_stream import DecisionEvent, flush_all, outcome_of
from headgate.policy import read
from headgate.policy.api_keys import ApiKeyHasher
from headgate.telemetry import DecisionLog, DecisionRecord
from headgate.telemetry.decision_log import codec, queue
from headgate.telemetry.decision_log.record import LimitDenial
from support.paths import TESTS
from support.servers import wait_until
from support.traffic import SECRET, START_US, Kept, Request, Traffic

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from headgate.gate.admission import Admission

KEY = "sk_live_4f9a"
HASH = ApiKeyHasher(SECRET.encode()).fingerprint(KEY)

POLICY = """
name: shop
tier: free
routes:
  - {path: /health, cost: 0}
  - {path: "/orders/{id}", class: orders, cost: 2}
limits:
  - {name: per-ip, by: ip, bucket: "60/minute, burst 3"}
  - {name: orders, class: orders, by: tenant, missing: skip, bucket: 4/minute, tiers: {pro: 6/minute}}
clients:
  - {tenant: acme, tier: pro, label: Acme Corp}
  - {ip: 198.51.100.0/24, label: the office}
blocked:
  - {user: mallory, reason: scraping}
"""


@pytest.fixture
def sink() -> Kept:
    return Kept()


@pytest.fixture
def open_log(sink: Kept) -> Iterator[Callable[..., DecisionLog]]:
    opened: list[DecisionLog] = []

    def open_one(where: Any = sink, **options: Any) -> DecisionLog:
        opened.append(DecisionLog(where, **{"secret": SECRET, "node": "n1", "sample": 0, "every": 0.005, **options}))
        return opened[-1]

    yield open_one
    for log in opened:
        log.close(0.2)


# ------------------------------------------------------------------ what is kept


def test_rejection_record_is_complete(open_log: Callable[..., DecisionLog], sink: Kept) -> None:
    log = open_log(region="eu-1")
    traffic = Traffic(POLICY, log)
    traffic.send(path="/search", times=3)
    traffic.clock.advance(0.25)
    traffic.send(path="/search", method="POST")
    assert log.flush()
    (record,) = sink.records
    assert record == DecisionRecord(
        id=record.id,
        at_us=START_US + 250_000,
        node="n1",
        region="eu-1",
        policy="shop",
        method="POST",
        route="unmatched",
        route_class="",
        tier="free",
        outcome="denied",
        reason="over-limit",
        limit="per-ip",
        by="ip",
        quota=60,
        period_us=60_000_000,
        burst=3,
        algorithm="token_bucket",
        origin="",
        cost=1,
        remaining=0,
        retry_us=750_000,
        client_kind="ip",
        client=record.client,
        label="ip 203.0.113.*",
        degraded="",
        shadow=False,
        note="",
        quotas="",
        weight=1.0,
        kinds=("ip",),
        clients=(record.client,),
        also=(),
    )
    assert re.fullmatch("hmac:[0-9a-f]{32}", record.client)


def test_record_names_the_calendar_of_a_limit(open_log: Callable[..., DecisionLog], sink: Kept) -> None:
    log = open_log()
    written = "1/month, starts 15, timezone Europe/Berlin"
    traffic = Traffic(f"limits: [{{name: exports, by: ip, bucket: '{written}'}}]", log)
    traffic.send(path="/exports", times=2)
    assert log.flush()
    (record,) = sink.records
    assert record.algorithm == "fixed_window month.15 Europe/Berlin"
    assert [denial.allows for denial in record.denials] == [Limit.parse(written, name="exports")]


def test_all_denying_limits_are_recorded_longest_wait_first(open_log: Callable[..., DecisionLog], sink: Kept) -> None:
    log = open_log()
    traffic = Traffic(POLICY, log)
    acme = Request("/orders/7", tenant="globex")
    assert [each.allowed for each in traffic.send(acme, 2)] == [True, False]
    traffic.send(Request("/orders/8", tenant="globex", peer="203.0.113.10"))
    assert traffic.send(acme)[0].allowed is False
    assert log.flush()
    first, last = sink.records
    assert (first.limit, first.cost, first.remaining, first.retry_us, first.also) == ("per-ip", 2, 1, 1_000_000, ())
    assert (last.limit, last.remaining, last.retry_us, last.route) == ("orders", 0, 30_000_000, "/orders/{id}")
    assert last.also == (LimitDenial("per-ip", "ip", 60, 60_000_000, 3, "token_bucket", "", 2, 1, 1_000_000),)
    assert [denial.limit for denial in last.denials] == ["orders", "per-ip"]


def test_numbers_name_their_source(open_log: Callable[..., DecisionLog], sink: Kept) -> None:
    log = open_log()
    policy = f"{POLICY}overrides: [{{tenant: globex, limit: orders, bucket: 2/minute}}]"
    traffic = Traffic(policy, log)
    for peer in range(4):
        traffic.send(Request("/orders/7", tenant="acme", peer=f"192.0.2.{peer}"))
    for peer in range(2):
        traffic.send(Request("/orders/7", tenant="globex", peer=f"192.0.2.{peer + 8}"))
    assert log.flush()
    assert [(each.origin, each.quota, each.tier) for each in sink.records] == [
        ("tier", 6, "pro"),
        ("override", 2, "free"),
    ]


def test_blocked_record_has_the_reason_of_the_block(open_log: Callable[..., DecisionLog], sink: Kept) -> None:
    log = open_log()
    Traffic(POLICY, log).send(user="mallory")
    assert log.flush()
    (record,) = sink.records
    assert (record.outcome, record.reason, record.note, record.limit) == ("blocked", "blocked", "scraping", "")
    assert record.words == f"blocked GET unmatched of user hmac:{record.client[5:13]}: blocked: scraping"


@pytest.mark.parametrize(
    ("mode", "outcome", "limit", "remaining"), [("closed", "unavailable", "", 0), ("local", "denied", "per-ip", 0)]
)
def test_degraded_decision_is_recorded_as_such(
    open_log: Callable[..., DecisionLog], sink: Kept, mode: str, outcome: str, limit: str, remaining: int
) -> None:
    log = open_log()
    policy = f"on_failure: {mode}\nlimits: [{{name: per-ip, by: ip, bucket: 5/minute}}]"
    traffic = Traffic(policy, log, store="redis://127.0.0.1:1/0")
    with closing(traffic.gate):
        traffic.send(times=2)
        assert log.flush()
    record = sink.records[-1]
    assert (record.outcome, record.limit, record.remaining) == (outcome, limit, remaining)
    assert record.degraded.startswith(f"{mode}: ")
    assert record.words.endswith(f"[{record.degraded}]")


def test_shadow_denial_is_recorded(open_log: Callable[..., DecisionLog], sink: Kept) -> None:
    log = open_log()
    limits = "[{name: soon, by: ip, bucket: 2/minute, shadow: true}, {name: now, by: ip, bucket: 9/minute}]"
    traffic = Traffic(f"limits: {limits}", log)
    assert all(each.allowed for each in traffic.send(times=3))
    assert log.flush()
    (record,) = sink.records
    assert (record.outcome, record.shadow, record.reason, record.limit) == (
        "allowed",
        True,
        "over-shadow-limit",
        "soon",
    )
    assert (record.cost, record.remaining, record.weight) == (1, 0, 1.0)
    assert "would be denied: soon (2 per minute, token_bucket): cost 1, 0 left, passes in 30 s" in record.words


def test_allowed_requests_are_sampled_with_weights(open_log: Callable[..., DecisionLog], sink: Kept) -> None:
    log = open_log(sample=0.25)
    traffic = Traffic("limits: [{name: per-ip, by: ip, bucket: 1000000/minute}]", log)
    random.seed(20261115)
    traffic.send(times=4000)
    assert log.flush()
    assert 870 <= len(sink.records) <= 1130  # 1000, plus or minus five standard deviations
    assert {(each.outcome, each.reason, each.weight) for each in sink.records} == {("allowed", "within-limits", 4.0)}
    first = sink.records[0]
    assert (first.limit, first.cost, first.retry_us) == ("per-ip", 1, 0)


@pytest.mark.parametrize(("sample", "kept"), [(0, 0), (1, 5)])
def test_sample_may_be_all_or_nothing(
    open_log: Callable[..., DecisionLog], sink: Kept, sample: float, kept: int
) -> None:
    log = open_log(sample=sample)
    Traffic("limits: [{by: ip, bucket: 10/minute}]", log).send(times=5)
    assert log.flush()
    assert len(sink.records) == kept


def test_request_without_limits_is_recorded_as_such(open_log: Callable[..., DecisionLog], sink: Kept) -> None:
    log = open_log(sample=1)
    traffic = Traffic("limits: [{path: /login, by: ip, bucket: 10/minute}]\nroutes: [{path: /health, cost: 0}]", log)
    traffic.send(path="/other")
    traffic.send(path="/health")
    assert log.flush()
    assert [(each.reason, each.limit, each.outcome) for each in sink.records] == [("no-limit", "", "allowed")]


def test_raw_paths_and_unknown_methods_are_not_recorded(open_log: Callable[..., DecisionLog], sink: Kept) -> None:
    log = open_log(sample=1)
    Traffic(POLICY, log).send(Request("/orders/ada@example.com", method="MADEUP"))
    assert log.flush()
    assert "ada" not in sink.records[0].as_json()
    assert (sink.records[0].method, sink.records[0].route) == ("OTHER", "/orders/{id}")


def test_ids_are_unique_and_ordered_by_time(open_log: Callable[..., DecisionLog], sink: Kept) -> None:
    logs = [open_log(sample=1), open_log(sample=1)]
    traffics = [Traffic("limits: [{by: ip, bucket: 1000000/minute}]", log) for log in logs]
    for _ in range(50):
        for traffic in traffics:
            traffic.send(times=3)
            traffic.clock.advance(0.000001)
    assert all(log.flush() for log in logs)
    assert len({record.id for record in sink.records}) == 300
    assert sorted(sink.records, key=lambda each: each.id) == sorted(
        sink.records, key=lambda each: (each.at_us, each.id)
    )
    assert {len(record.id) for record in sink.records} == {32}


# ------------------------------------------------------------------ who it was


@pytest.mark.parametrize(
    ("request_", "kind", "label"),
    [
        (Request(tenant="acme", api_key=KEY), "tenant", "Acme Corp"),
        (Request(tenant="globex"), "tenant", "tenant globex"),
        (Request(api_key=KEY), "api_key", f"api_key {HASH[:13]}"),
        (Request(peer="198.51.100.7"), "ip", "the office"),
        (Request(peer="2001:db8:1:2::7"), "ip", "ip 2001:db8:1:*"),
        (Request(peer=None), "ip", "ip unknown"),
    ],
)
def test_clients_have_labels_that_may_be_shown(
    open_log: Callable[..., DecisionLog], sink: Kept, request_: Request, kind: str, label: str
) -> None:
    log = open_log(sample=1)
    policy = f"{POLICY}\n".replace("limits:", "limits:\n  - {name: per-client, by: client, bucket: 9/minute}")
    Traffic(policy, log).send(request_)
    assert log.flush()
    assert (sink.records[0].client_kind, sink.records[0].label) == (kind, label)


def test_api_key_hash_equals_that_of_policies(open_log: Callable[..., DecisionLog], sink: Kept) -> None:
    log = open_log(sample=1)
    Traffic("limits: [{by: api_key, bucket: 9/minute}]", log).send(api_key=KEY)
    assert log.flush()
    assert sink.records[0].client == HASH


def test_equal_values_of_different_kinds_are_different_clients(
    open_log: Callable[..., DecisionLog], sink: Kept
) -> None:
    log = open_log(sample=1)
    traffic = Traffic("limits: [{by: client, bucket: 9/minute}]", log)
    traffic.send(user="7")
    traffic.send(tenant="7")
    assert log.flush()
    assert sink.records[0].client != sink.records[1].client


def test_show_selects_the_kinds_in_labels(open_log: Callable[..., DecisionLog], sink: Kept) -> None:
    log = open_log(sample=1, show=("ip",))
    traffic = Traffic("limits: [{by: client, bucket: 9/minute}]", log)
    traffic.send()
    traffic.send(tenant="acme")
    assert log.flush()
    assert [each.label for each in sink.records] == ["ip 203.0.113.9", f"tenant {sink.records[1].client[:13]}"]


@pytest.mark.parametrize("scheme", ["sqlite", "jsonl", "logging"])
def test_no_sink_gets_a_key_an_address_or_a_user(
    open_log: Callable[..., DecisionLog], tmp_path: Path, scheme: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    file = tmp_path / "decisions"
    log = open_log(f"{scheme}:///{file}" if scheme != "logging" else "logging://decisions", sample=1)
    traffic = Traffic(
        "limits: [{name: per-client, by: client, bucket: 1/minute}]\nblocked: [{api_key: stolen-key}]", log
    )
    for request in (Request(api_key=KEY), Request(user="ada@example.com"), Request(), Request(api_key="stolen-key")):
        traffic.send(request, 2)
    assert log.flush()
    log.close()
    written = b"".join(each.read_bytes() for each in tmp_path.iterdir()) + caplog.text.encode()
    written += json.dumps([getattr(each, "decision", None) for each in caplog.records]).encode()
    assert HASH.encode() in written
    for secret in (KEY, "ada@example.com", "203.0.113.9", "stolen-key", SECRET):
        assert secret.encode() not in written


# ------------------------------------------------------------------ what it may cost


def test_rejected_batch_is_retried_with_the_same_ids(
    open_log: Callable[..., DecisionLog], sink: Kept, caplog: pytest.LogCaptureFixture
) -> None:
    log = open_log()
    sink.refuses = ConnectionError("no route to host")
    Traffic("limits: [{by: ip, bucket: 1/hour}]", log).send(times=51)
    assert not log.flush(0.05)
    assert not log.flush(0.05)
    assert log.stats.waiting >= 50
    assert log.stats.failures == sink.attempts >= 2
    assert log.stats.error == "ConnectionError: no route to host"
    sink.refuses = None
    assert log.flush()
    assert len({each.id for each in sink.records}) == len(sink.records) == 50
    assert log.stats == (50, 0, 0, sink.attempts - len(sink.batches), None)
    told = [each.getMessage() for each in caplog.records]
    assert [text for text in told if "cannot write to its sink: ConnectionError: no route to host" in text][1:] == []
    assert "the decision log writes to its sink again; 0 records were lost" in told


def test_retries_back_off(open_log: Callable[..., DecisionLog], sink: Kept) -> None:
    log = open_log()
    sink.refuses = ConnectionError()
    Traffic("limits: [{by: ip, bucket: 1/hour}]", log).send(times=2)
    pauses = []
    while sink.attempts < 12:
        log.flush(0.01)
        pauses.append(log._queue._retry_s)
    assert sorted(pauses) == pauses
    assert pauses[0] >= queue.MIN_RETRY_S
    assert pauses[-1] == queue.MAX_RETRY_S


def test_records_beyond_the_bound_are_dropped_counted_and_logged(
    open_log: Callable[..., DecisionLog], sink: Kept, caplog: pytest.LogCaptureFixture
) -> None:
    log = open_log(most=20, batch=5)
    sink.refuses = OSError("disk full")
    traffic = Traffic("limits: [{by: ip, bucket: 1/hour}]", log)
    traffic.send(times=2)
    assert not log.flush(0.05)  # one batch is in flight, and no more are dequeued
    traffic.send(times=19)
    traffic.clock.advance(60)
    traffic.send(times=30)
    traffic.clock.advance(60)
    traffic.send(times=10)
    assert log.stats.lost == 40
    told = [each.getMessage() for each in caplog.records if "losing" in each.getMessage()]
    slowly = "the decision log is losing records, as its sink is too slow: 1 lost, 20 waiting"
    assert told == [f"{slowly}: OSError: disk full"]
    sink.refuses = None
    assert log.flush()
    lost = [each for each in sink.records if each.outcome == "lost"]
    assert [(each.weight, each.at_us, each.period_us) for each in lost] == [(40.0, START_US + 60_000_000, 60_000_000)]
    assert lost[0].words == "40 decisions could not be recorded"
    assert len(sink.records) == 1 + 19 + 1
    assert max(sink.batches) <= 6


def test_allowed_records_leave_half_the_queue_to_rejections(open_log: Callable[..., DecisionLog], sink: Kept) -> None:
    log = open_log(sample=1, most=20)
    sink.refuses = OSError("disk full")
    traffic = Traffic("limits: [{by: ip, bucket: 100/hour}]", log)
    traffic.send()
    assert not log.flush(0.05)
    traffic.send(times=99)
    flush_all()
    assert len(log._queue.events) == 10
    traffic.send(times=99)
    flush_all()
    assert len(log._queue.events) == 20


def test_bound_may_be_larger_than_any_queue(open_log: Callable[..., DecisionLog], sink: Kept) -> None:
    log = open_log(most=10**30)
    Traffic("limits: [{by: ip, bucket: 1/hour}]", log).send(times=4)
    assert log.flush()
    assert len(sink.records) == 3


def test_hanging_sink_delays_no_request(open_log: Callable[..., DecisionLog]) -> None:
    class Hanging(Kept):
        def __init__(self) -> None:
            super().__init__()
            self.is_asked, self.may_go_on = threading.Event(), threading.Event()

        def write(self, batch: Sequence[DecisionRecord]) -> None:
            self.is_asked.set()
            assert self.may_go_on.wait(20)
            super().write(batch)

    hanging = Hanging()
    log = open_log(hanging)
    traffic = Traffic("limits: [{by: ip, bucket: 1/hour}]", log)
    traffic.send(times=2)
    assert hanging.is_asked.wait(20)
    traffic.send(times=500)  # would block if it waited for the sink
    hanging.may_go_on.set()
    assert log.flush()
    assert len(hanging.records) == 501


def test_waiting_records_are_written_with_later_ones(open_log: Callable[..., DecisionLog], sink: Kept) -> None:
    log = open_log(batch=2, every=60)
    traffic = Traffic("limits: [{by: ip, bucket: 1/hour}]", log)
    sink.refuses = OSError("disk full")
    traffic.send(times=8)
    assert not log.flush(0.05)
    traffic.send(times=1)
    sink.refuses = None
    assert log.flush()
    assert len(sink.records) == 8


def event_of(admission: Admission, who: dict[str, str] | None = None, method: str = "GET") -> DecisionEvent:
    """The event of an admission, optionally with other identities."""
    resolution = admission.resolution
    assert resolution is not None
    if who is not None:
        resolution = resolution._replace(who=who)
    outcome = outcome_of(admission)
    return DecisionEvent(
        admission.received_us, 0, method, outcome, resolution, admission.decision, admission.shadows, None
    )


def test_unencodable_event_loses_no_other(
    open_log: Callable[..., DecisionLog], sink: Kept, caplog: pytest.LogCaptureFixture
) -> None:
    log = open_log(every=0.2)
    traffic = Traffic("limits: [{by: ip, bucket: 1/hour}]", log)
    (refused,) = traffic.send(times=2)[1:]
    log.observe([event_of(refused, {}), event_of(refused)])
    assert log.flush()
    assert [each.outcome for each in sink.records if each.outcome != "lost"] == ["denied", "denied"]
    assert log.stats.lost == 1
    traffic.send()
    assert log.flush()
    assert [each.at_us for each in sink.records if each.outcome == "lost"] == [START_US]
    assert "a decision could not be recorded: ValueError" in caplog.text


def test_str_subclass_is_recorded_as_str(open_log: Callable[..., DecisionLog], sink: Kept) -> None:
    class Text(str):
        __slots__ = ()

    log = open_log()
    (refused,) = Traffic("limits: [{by: tenant, bucket: 1/hour}]", log).send(tenant="acme", times=2)[1:]
    who = {kind: Text(value) for kind, value in refused.resolution.who.items()}  # type: ignore[union-attr]
    log.observe([event_of(refused, who, method=Text("GET"))])
    assert log.flush()
    first, second = sink.records
    assert first._replace(id="") == second._replace(id="")


def test_clients_with_shared_counters_are_distinguished(open_log: Callable[..., DecisionLog], sink: Kept) -> None:
    log = open_log()
    wanted = "clients: [{tenant: none, tier: pro}, {user: none, tier: pro}]"
    traffic = Traffic(f"limits: [{{by: ip, bucket: 1/hour, tiers: {{pro: 2/hour}}}}]\n{wanted}", log)
    traffic.send()
    said: list[tuple[str, dict[str, Any]]] = [
        ("GET", {"tenant": "a"}),
        ("GET", {"user": "a"}),
        ("GET", {"tenant": "b"}),
        ("PUT", {"tenant": "b"}),
    ]
    for method, who in said * 3:
        traffic.send(method=method, **who)
    assert log.flush()
    assert [(each.method, each.client_kind) for each in sink.records] == [(m, *who) for m, who in said] * 3
    assert len({each.client for each in sink.records}) == 3
    assert len({(each.method, each.clients) for each in sink.records}) == 4


@pytest.mark.parametrize("count", [1, 2, 3, 32, 33, 40])
def test_each_of_many_denying_limits_keeps_its_numbers(
    open_log: Callable[..., DecisionLog], sink: Kept, count: int
) -> None:
    log = open_log()
    limits = [f"  - {{name: l{each}, by: ip, cost: {1 + each % 3}, bucket: {3 + each}/hour}}" for each in range(count)]
    traffic = Traffic("\n".join(["limits:", *limits]), log)
    traffic.clock.advance(0.000_001)
    *_, refused = traffic.send(times=5)
    assert log.flush()
    decision, record = refused.decision, sink.records[-1]
    assert decision is not None
    denied = [(each.limit.name, each.remaining, each.retry_after_us) for each in decision.outcomes if not each.allowed]
    assert denied
    assert sorted((each.limit, each.remaining, each.retry_us) for each in record.denials) == sorted(denied)
    assert {each.limit: each.cost for each in record.denials} == {name: 1 + int(name[1:]) % 3 for name, _, _ in denied}
    assert record.at_us == START_US + 1


def test_threads_lose_no_records(open_log: Callable[..., DecisionLog], sink: Kept) -> None:
    log = open_log(batch=64)
    traffic = Traffic("limits: [{by: ip, bucket: 1/hour}]", log)
    traffic.send()
    threads = [threading.Thread(target=traffic.send, args=(None, 250)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert log.flush()
    assert len({each.id for each in sink.records}) == len(sink.records) == 1000
    assert max(sink.batches) <= 64


def test_idle_thread_ends(open_log: Callable[..., DecisionLog], sink: Kept, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queue, "IDLE_S", 0)
    log = open_log()
    traffic = Traffic("limits: [{by: ip, bucket: 1/hour}]", log)
    for count in (1, 2, 3):
        traffic.send(times=2 if count == 1 else 1)
        thread = log._queue.thread
        assert log.flush()
        if thread is not None:
            thread.join(5)
        assert len(sink.records) == count
    assert log._queue.thread is None


def test_close_writes_the_rest(sink: Kept) -> None:
    with DecisionLog(sink, secret=SECRET, sample=0, every=60) as log:
        traffic = Traffic("limits: [{by: ip, bucket: 1/hour}]", log)
        traffic.send(times=30)
    assert len(sink.records) == 29
    assert sink.is_closed
    traffic.send(times=5)
    log.close()
    assert len(sink.records) == 29
    assert log.flush()


def test_close_times_out(sink: Kept, caplog: pytest.LogCaptureFixture) -> None:
    log = DecisionLog(sink, secret=SECRET, sample=0)
    sink.refuses = OSError("disk full")
    Traffic("limits: [{by: ip, bucket: 1/hour}]", log).send(times=8)
    log.close(0.05)
    assert log.stats.lost == 7
    assert sink.is_closed
    assert "the decision log has lost 7 records that its sink did not take" in caplog.text


def test_close_reports_records_held_by_a_hanging_sink(sink: Kept, caplog: pytest.LogCaptureFixture) -> None:
    is_asked, may_go_on = threading.Event(), threading.Event()

    class Hanging(Kept):
        def write(self, batch: Sequence[DecisionRecord]) -> None:
            is_asked.set()
            assert may_go_on.wait(20)

    log = DecisionLog(Hanging(), secret=SECRET, sample=0)
    Traffic("limits: [{by: ip, bucket: 1/hour}]", log).send(times=8)
    assert is_asked.wait(20)
    log.close(0.01)
    assert log.stats.waiting == 7
    assert "the decision log ends while its sink hangs; 7 records may be lost" in caplog.text
    may_go_on.set()


def test_codec_cache_drops_old_policies(
    open_log: Callable[..., DecisionLog], sink: Kept, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(codec, "CACHE_LIFETIME_S", 0)
    log = open_log(sample=1)
    traffic = Traffic(POLICY, log)
    for name in ("one", "two", "three"):
        traffic.gate._activate(read(POLICY.replace("Acme Corp", name)))
        traffic.send(tenant="acme")
        assert log.flush()
    assert [each.label for each in sink.records] == ["one", "two", "three"]
    encoder = log._encoder
    assert 1 <= len(encoder._headers) + len(encoder._limits) <= 2
    assert len(encoder._policies) <= 2


def test_unreferenced_log_writes_the_rest_and_ends(sink: Kept) -> None:
    log = DecisionLog(sink, secret=SECRET, sample=0, every=60)
    Traffic("limits: [{by: ip, bucket: 1/hour}]", log).send(times=10)
    writer, gone = log._queue, weakref.ref(log)
    wait_until(lambda: writer.thread, "the events of a gate that is gone")
    thread = writer.thread
    assert thread is not None
    del log
    gc.collect()
    assert gone() is None
    thread.join(5)
    assert not thread.is_alive()
    assert len(sink.records) == 9
    assert sink.is_closed


PROCESS = """
import os, sys
sys.path.insert(0, {tests!r})
from headgate.telemetry import DecisionLog
from support.traffic import SECRET, Traffic
log = DecisionLog("sqlite:///decisions.db", secret=SECRET, sample=0, every=30)
traffic = Traffic("limits: [{{by: ip, bucket: 1/hour}}]", log)
traffic.send(times=41)
{then}
"""


def run_process(folder: Path, then: str) -> list[str]:
    """Run a process and return the ids that it wrote."""
    subprocess.run(
        [sys.executable, "-c", PROCESS.format(tests=str(TESTS), then=then)], cwd=folder, check=True, timeout=30
    )
    with closing(sqlite3.connect(folder / "decisions.db")) as connection:
        return [id for (id,) in connection.execute("SELECT id FROM decisions")]


def test_process_exit_waits_for_pending_records(tmp_path: Path) -> None:
    assert len(run_process(tmp_path, "")) == 40


def test_forked_child_writes_only_its_own_records(tmp_path: Path) -> None:
    then = """
if not os.fork():
    traffic.send(times=7)
    sys.exit()
traffic.send(times=2)
assert os.wait()[1] == 0
"""
    ids = run_process(tmp_path, then)
    assert len(ids) == 40 + 7 + 2
    assert len({id[14:24] for id in ids}) == 2  # each process has its own token in its ids


# ------------------------------------------------------------------ how it is made


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sample": 1.5}, "sample 1.5: give the share of passed requests to log, from 0 to 1"),
        ({"sample": True}, "sample True: give the share"),
        ({"most": 0}, "most 0: give a number of records, at least 1"),
        ({"batch": 2.0}, "batch 2.0: give a number of records"),
        ({"every": 0}, "every 0: give the seconds between two batches, above 0 and at most 60"),
        ({"show": ("api_key",)}, "API keys are never shown: leave 'api_key' out of show"),
        ({"secret": "short"}, "the secret for API keys has 5 bytes and can be guessed"),
        ({"secret": None}, "clients are stored as keyed hashes, which need a secret: give secret="),
    ],
)
def test_invalid_options_are_rejected(
    options: dict[str, Any], message: str, sink: Kept, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("HEADGATE_SECRET", raising=False)
    with pytest.raises(InvalidConfiguration, match=re.escape(message)):
        DecisionLog(sink, **{"secret": SECRET, **options})


def test_secret_is_read_from_the_environment(sink: Kept, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADGATE_SECRET", SECRET)
    with DecisionLog(sink, sample=1) as log:
        Traffic("limits: [{by: api_key, bucket: 9/minute}]", log).send(api_key=KEY)
    assert sink.records[0].client == HASH


def test_record_round_trips_through_json_and_rows(open_log: Callable[..., DecisionLog], sink: Kept) -> None:
    log = open_log(sample=1)
    traffic = Traffic(POLICY, log)
    for peer in ("192.0.2.1", "192.0.2.2", "192.0.2.2"):
        traffic.send(Request("/orders/7", tenant='ac"me\\', user="ada", peer=peer))
    assert log.flush()
    assert any(each.also for each in sink.records)
    for record in sink.records:
        assert DecisionRecord.from_dict(json.loads(record.as_json())) == record
        assert DecisionRecord.from_row(record.as_row()) == record


@pytest.mark.parametrize("retry_us", [0, 59_999_999, None])
def test_denials_in_rows_are_json(open_log: Callable[..., DecisionLog], sink: Kept, retry_us: int | None) -> None:
    log = open_log(sample=1)
    Traffic(POLICY, log).send()
    assert log.flush()
    denials = [
        LimitDenial(name, "ip", 60, 1, 3, "gcra", "tier", 2, 1, retry_us) for name in ("per-ip", 'a "1\\"', "ünd")
    ]
    record = sink.records[0]._replace(also=tuple(denials))
    assert record.as_row()[-1] == json.dumps(denials, separators=(",", ":"))
    assert DecisionRecord.from_row(record.as_row()) == record
