"""Node status reports: bounded, without client names, and summed correctly across clock skew."""

from __future__ import annotations

import gc
import json
import logging
import os
import random
import threading
import weakref
from typing import TYPE_CHECKING, Any

import pytest
import redis.asyncio

from headgate import InvalidConfiguration, StoreError
from headgate.adapters.asgi import AsgiRequest
from headgate.clock import in_ns
from headgate.gate.gate import Gate
from headgate.health import OutageReport
from headgate.local import prepaid
from headgate.policy import read
from headgate.telemetry import DecisionLog
from headgate.telemetry.fleet import rollups
from headgate.telemetry.fleet.aggregator import SECONDS, ClockAligner, ClockShift, FleetAggregator
from headgate.telemetry.fleet.redis_status_store import RedisStatusStore
from headgate.telemetry.fleet.reporter import StatusReporter
from headgate.telemetry.fleet.rollups import (
    MAX_COUNTED_CLIENTS,
    MAX_REPORTED_CLIENTS,
    ClientRequests,
    MinuteRollup,
    Second,
    TrafficSketch,
    bucket_of,
    quantile,
    read_minute,
)
from headgate.telemetry.fleet.status_store import MemoryStatusStore, open_status_store
from headgate.telemetry.pseudonyms import Pseudonymizer
from headgate.testing import FakeClock
from support.servers import RedisServer, wait_until

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from headgate.telemetry.fleet.status_store import StatusStore

SECRET = b"a secret of thirty-two bytes ..."
RAW_KEY = "sk_live_do_not_tell"
NOON_US = 1_800_000_000_000_000
"""A whole minute."""
NOWHERE = "redis://127.0.0.1:1/0"

POLICY = """
routes: [{path: /search, class: search}]
limits:
  - {name: requests, by: client, bucket: 10/minute}
  - {name: searches, by: global, class: search, bucket: 5/minute}
blocked: [{ip: 203.0.113.66}]
clients: [{tenant: acme, label: Acme Inc.}]
"""


def make_request(path: str = "/", *, client: str = "203.0.113.9", **headers: str) -> AsgiRequest:
    lines = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
    return AsgiRequest({"type": "http", "method": "GET", "path": path, "client": (client, 1), "headers": lines})


class Site:
    """A gate with a manually driven reporter and an aggregator, all on one clock."""

    def __init__(self, policy: str = POLICY, store: str = "memory://", **options: Any) -> None:
        self.clock = FakeClock(NOON_US)
        self.board = MemoryStatusStore(monotonic=lambda: self.clock.now_us() / 1_000_000)
        self.beats = FleetAggregator(self.board, clock=self.clock)
        self.gate, self.reporter = self.node(policy, store, **options)

    def node(
        self, policy: str = POLICY, store: str = "memory://", *, skew: float = 0.0, name: str = "web", **options: Any
    ) -> tuple[Gate, StatusReporter]:
        """Add a node whose clock is off by skew seconds."""
        clock = _Skewed(self.clock, round(skew * 1_000_000))
        gate = Gate(
            read(policy),
            store,
            clock=clock,
            secret=SECRET,
            identities={"tenant": lambda a: (a.header("x-tenant") or [None])[0]},
        )
        return gate, StatusReporter(gate, self.board, secret=SECRET, node=name, every=None, **options)

    def pass_seconds(self, number: int = 1, *others: StatusReporter) -> None:
        for _ in range(number):
            self.clock.advance(1)
            for reporter in (self.reporter, *others):
                reporter.report()


class _Skewed:
    def __init__(self, clock: FakeClock, off_us: int) -> None:
        self._clock, self.off_us = clock, off_us

    def now_us(self) -> int:
        return self._clock.now_us() + self.off_us


# ------------------------------------------------------------------ what is told


def test_overshoot_of_the_last_outage_is_reported() -> None:
    site = Site()
    site.pass_seconds(2)
    assert site.beats.gather().nodes[0].last_outage is None
    site.gate._limiter.engine.local.last_outage = OutageReport("requests", 1012, 1000, 1040)
    site.pass_seconds(2)
    [node] = site.beats.gather().nodes
    assert f"{node.last_outage}" == "limit 'requests' admitted 1,012 of 1,000; bound 1,040"


def test_decisions_are_charted_two_seconds_later() -> None:
    site = Site()
    for _ in range(12):
        site.gate.admit(make_request())
    site.gate.admit(make_request(client="203.0.113.66"))
    site.pass_seconds(2)
    told = site.beats.gather()
    assert told.troubles == ()
    assert len(told.series.allowed) == len(told.series.p99_us) == SECONDS
    assert told.series.start_s + SECONDS - 1 == NOON_US // 1_000_000
    assert (told.series.allowed[-1], told.series.denied[-1], told.series.blocked[-1]) == (10, 2, 1)
    assert sum(told.series.allowed) == told.totals.allowed == told.nodes[0].allowed == 10
    assert (told.totals.denied, told.totals.blocked) == (2, 1)
    assert told.series.p50_us[-1] == 0  # the clock does not move
    assert told.series.p50_us[-2] is None


def test_lost_writes_and_many_reads_keep_counts_exact() -> None:
    site = Site()
    for second in range(40):
        for _ in range(second % 3):
            site.gate.admit(make_request(client=f"203.0.113.{second}"))
        site.clock.advance(1)
        if second % 7 == 0:  # six of seven writes are lost
            site.reporter.report()
            for _ in range(3):
                site.beats.gather()
    site.pass_seconds(2)
    assert site.beats.gather().totals.allowed == sum(second % 3 for second in range(40))


def test_overview_starts_with_the_last_five_minutes() -> None:
    site = Site("limits: [{by: ip, bucket: 100000/minute}]")
    for _ in range(200):
        site.gate.admit(make_request())
        site.pass_seconds()
    site.pass_seconds(2)
    assert sum(FleetAggregator(site.board, clock=site.clock).gather().series.allowed) == 200
    # Also after a long pause between two reads.
    late = FleetAggregator(site.board, clock=site.clock)
    late.gather()
    for _ in range(60):
        site.gate.admit(make_request())
        site.pass_seconds()
    site.pass_seconds(2)
    assert sum(late.gather().series.allowed) == 260


def test_data_older_than_five_minutes_is_dropped() -> None:
    site = Site()
    site.gate.admit(make_request())
    site.pass_seconds(3)
    assert sum(site.beats.gather().series.allowed) == 1
    for _ in range(SECONDS + 5):
        site.pass_seconds()
        told = site.beats.gather()
    assert sum(told.series.allowed) == 0
    assert len(site.beats._totals) <= SECONDS + 3


def test_node_is_silent_after_5_s_and_gone_after_60_s() -> None:
    site = Site()
    site.pass_seconds()
    states = []
    for _ in range(62):
        told = site.beats.gather()
        states.append(told.nodes[0].state if told.nodes else "gone")
        site.clock.advance(1)
    assert states == ["ready"] * 6 + ["silent"] * 54 + ["gone"] * 2


def test_closed_node_is_gone_at_once() -> None:
    site = Site()
    site.pass_seconds()
    site.reporter.close()
    site.reporter.close()
    assert site.beats.gather().nodes == ()
    site.pass_seconds()
    assert site.beats.gather().nodes == ()


def test_node_reports_its_health(tmp_path: Path) -> None:
    file = tmp_path / "policy.yaml"
    file.write_text("limits: [{by: ip, bucket: 1/day}]", "utf-8")
    board, log = MemoryStatusStore(), DecisionLog("logging://", secret=SECRET)
    gate = Gate(file, NOWHERE, secret=SECRET, on_decision=log, reload_every=None)
    reporter = StatusReporter(gate, board, node="web-1", region="eu", every=None)
    gate.admit(make_request())
    reporter.report()
    (node,) = FleetAggregator(board).gather().nodes
    assert (node.name, node.region, node.state) == (f"web-1:{os.getpid()}", "eu", "degraded")
    assert node.shards in ((), (("127.0.0.1:1", False),), (("127.0.0.1:1", True),))
    assert node.degraded_for_s is not None
    assert node.policy_version == gate.policy_version is not None
    assert node.config_age_s is None
    assert (node.lost, node.log_error) == (0, None)
    log.close()
    reporter.close()
    gate.close()


def test_degraded_decisions_are_counted_without_limits() -> None:
    board = MemoryStatusStore()
    clock = FakeClock(NOON_US)
    gate = Gate(read("limits: [{by: ip, bucket: 1/day}]\non_failure: closed"), NOWHERE, secret=SECRET)
    reporter = StatusReporter(gate, board, every=None)
    gate._time_ns = in_ns(clock)
    for _ in range(3):
        gate.admit(make_request())
    clock.advance(3)
    reporter.report()
    told = FleetAggregator(board, clock=clock).gather()
    assert (told.totals.unavailable, told.totals.degraded, told.near) == (3, 3, ())
    reporter.close()
    gate.close()


def test_top_denied_covers_the_last_minute() -> None:
    site = Site()
    for number, client in enumerate(("203.0.113.1", "203.0.113.2", "203.0.113.3")):
        for _ in range(10 + number):
            site.gate.admit(make_request(client=client))
    site.pass_seconds(2)
    told = site.beats.gather().top_denied
    assert [(each.denied, each.allowed) for each in told] == [(2, 10), (1, 10)]
    key = Pseudonymizer(SECRET).key("ip", "203.0.113.3")
    assert (told[0].key, told[0].label) == (key, f"ip 203.0.113.* ({key[5:13]})")
    assert len({each.label for each in told}) == 2, "addresses of one network are told apart"
    site.pass_seconds(61)
    assert site.beats.gather().top_denied == ()


def test_denials_of_several_nodes_are_summed() -> None:
    site = Site()
    gate, reporter = site.node(name="other")
    for each in (site.gate, gate):
        for _ in range(13):
            each.admit(make_request())
    site.pass_seconds(2, reporter)
    told = site.beats.gather()
    assert len(told.nodes) == 2
    assert [(each.denied, each.allowed) for each in told.top_denied] == [(6, 20)]
    assert (told.series.allowed[-1], told.series.denied[-1]) == (20, 6)


def test_near_means_a_tenth_left() -> None:
    site = Site()
    for _ in range(8):
        site.gate.admit(make_request(x_tenant="acme"))
    site.pass_seconds()
    assert site.beats.gather().near == ()
    site.gate.admit(make_request(x_tenant="acme"))
    site.pass_seconds()
    (near,) = site.beats.gather().near
    assert (near.kind, near.label, near.limit, near.left, near.capacity, near.share) == (
        "tenant", "Acme Inc.", "requests", 1, 10, 0.1
    )  # fmt: skip
    site.clock.advance(12)  # two tokens are refilled
    site.gate.admit(make_request(x_tenant="acme"))
    site.pass_seconds()
    assert site.beats.gather().near == ()


@pytest.mark.parametrize(
    ("by", "kind", "value", "label"),
    [
        ("client", "user", "ada", "user {hash}"),
        ("[client, endpoint]", "user", "ada", "user {hash}"),
        ("user", "user", "ada", "user {hash}"),
        ("ip", "ip", "203.0.113.9", "The office"),
        ("session", "ip", "203.0.113.9", "The office"),
        ("[ip, endpoint]", "ip", "203.0.113.9", "The office"),
        ("subnet", "subnet", "203.0.113.0/24", "subnet {hash}"),
        ("endpoint", "endpoint", "/items", "/items"),
    ],
)
def test_near_counts_the_limit_not_the_last_client(by: str, kind: str, value: str, label: str) -> None:
    site = Site()
    policy = read(
        f"limits: [{{name: few, by: {by}, bucket: 1/day}}]\nroutes: [{{path: /items}}]\n"
        "clients: [{ip: 203.0.113.9, label: The office}]"
    )
    users = {"user": lambda a: a.header("x-user")[0], "session": lambda _: None}
    gate = Gate(policy, clock=site.clock, secret=SECRET, identities=users)
    reporter = StatusReporter(gate, site.board, every=None)
    gate.admit(make_request("/items", client="203.0.113.9", x_user="ada"))
    site.pass_seconds(2, reporter)
    (near,) = site.beats.gather().near
    key = Pseudonymizer(SECRET).key(kind, value)
    assert (near.limit, near.kind, near.key, near.label) == ("few", kind, key, label.format(hash=key[:13]))
    reporter.close()
    gate.close()


def test_near_entry_expires_after_a_minute() -> None:
    site = Site()
    for _ in range(10):
        site.gate.admit(make_request())
    site.pass_seconds(58)
    assert [near.left for near in site.beats.gather().near] == [0]
    site.pass_seconds(3)
    assert site.beats.gather().near == ()
    assert site.reporter._seconds.near == {}


def test_global_limit_is_near_for_all_clients() -> None:
    site = Site()
    for number in range(5):
        site.gate.admit(make_request("/search", client=f"203.0.113.{number}"))
    site.pass_seconds()
    assert [(near.kind, near.label, near.limit, near.left) for near in site.beats.gather().near] == [
        ("global", "everybody", "searches", 0)
    ]


@pytest.mark.parametrize(
    ("by", "kind", "label"),
    [
        ("client", "tenant", "tenant acme"),
        ("tenant", "tenant", "tenant acme"),
        ("[tenant, endpoint]", "tenant", "tenant acme"),
        ("[client, endpoint]", "tenant", "tenant acme"),
        ("ip", "ip", "ip 203.0.113.* ({})"),
        ("global", "global", "everybody"),
    ],
)
def test_hot_keys_are_named_by_limit_and_client(
    by: str, kind: str, label: str, redis7: RedisServer, unique: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prepaid.HotKeyDetector, "record_sample", lambda *_: True)
    policy = read(f"limits: [{{name: {unique}, by: {by}, bucket: 100000/second}}]")
    tenant = {"tenant": lambda a: a.header("x-tenant")[0]}
    gate = Gate(policy, redis7.url, secret=SECRET, identities=tenant, budget=1.0)
    board = MemoryStatusStore()
    reporter = StatusReporter(gate, board, every=None)
    for _ in range(40):
        gate.admit(make_request(x_tenant="acme"))
    reporter.report()
    (hot,) = FleetAggregator(board).gather().hot
    assert (hot.limit, hot.kind, hot.label) == (unique, kind, label.format(hot.key[5:13]))
    assert hot.rate > 100
    reporter.close()
    gate.close()


def test_status_store_holds_no_client_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StatusReporter, "sample_share", 1.0)
    names = {"tenant": "tenant-nobody-knows", "user": "user-nobody-knows"}
    policy = read(
        "limits: [{by: api_key, bucket: 1/day}, {by: user, bucket: 1/day}, {by: tenant, bucket: 1/day}]\n"
        "identity: {api_key: {header: x-api-key}}"
    )
    for kinds in (["user", "tenant"], ["user"], []):
        site = Site()
        identities = {kind: lambda _, kind=kind: names[kind] for kind in kinds}
        gate = Gate(policy, clock=site.clock, secret=SECRET, identities=identities)
        reporter = StatusReporter(gate, site.board, show=(), every=None)
        for _ in range(30):
            gate.admit(
                make_request("/secret-path", client="198.51.100.77", x_api_key=RAW_KEY, user_agent="secret-agent")
            )
        site.pass_seconds(70, reporter)
        text = repr(site.board._documents) + repr(site.beats.gather())
        assert "minutes/" in text
        assert not [
            word for word in (*names.values(), RAW_KEY, "198.51.100.77", "secret-path", "secret-agent") if word in text
        ]


def test_document_size_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rollups, "MAX_CLIENTS", 400)
    monkeypatch.setattr(rollups, "MAX_NEAR", 50)
    site = Site("limits: [{by: ip, bucket: 1/day}]")
    for number in range(1000):
        for _ in range(2):
            site.gate.admit(make_request(client=f"10.1.{number // 250}.{number % 250}"))
    site.pass_seconds(2)
    assert len(site.reporter._seconds.near) == 50
    told = site.beats.gather()
    assert (told.totals.allowed, told.totals.denied) == (1000, 1000)  # all are counted, though not all by name
    assert len(told.top_denied) == len(told.near) == 20
    assert all(len(posted.document) < 10_000 for posted in site.board.read("beats/").values())
    site.pass_seconds(61)
    assert site.reporter._recent == {}


# ------------------------------------------------------------------ clocks


@pytest.mark.parametrize("skew", [0.0, 0.4, -0.4, 37.0, -3600.0, 86400.3])
def test_skewed_nodes_are_summed_in_the_right_seconds(skew: float) -> None:
    site = Site("limits: [{by: ip, bucket: 100000/minute}]")
    gate, reporter = site.node("limits: [{by: ip, bucket: 100000/minute}]", skew=skew, name="skewed")
    site.clock.advance(0.5)
    for second in range(30):
        for _ in range(10 if second == 15 else 1):
            site.gate.admit(make_request())
            gate.admit(make_request())
        site.pass_seconds(1, reporter)
        site.beats.gather()
    site.pass_seconds(3, reporter)
    series = site.beats.gather().series
    peak = series.allowed.index(max(series.allowed))
    assert series.start_s + peak == NOON_US // 1_000_000 + 15
    assert series.allowed[peak] == 20
    assert sum(series.allowed) == 2 * 39


@pytest.mark.parametrize("step", [-3600, -30, -3, 3, 30])
def test_clock_step_loses_little_and_doubles_nothing(step: int) -> None:
    site = Site("limits: [{by: ip, bucket: 100000/minute}]")
    skewed: Any = site.gate._clock
    for second in range(60):
        if second == 20:
            skewed.off_us = step * 1_000_000
        if second == 40:
            skewed.off_us = 0
        for _ in range(10):
            site.gate.admit(make_request())
        site.pass_seconds()
        site.beats.gather()
    site.pass_seconds(3)
    told = site.beats.gather()
    assert 540 <= sum(told.series.allowed) <= 600
    assert max(told.series.allowed) == 10


def test_three_late_reports_in_a_row_shift_a_node() -> None:
    placing = ClockAligner(1_000_000)
    shifts = [placing.shift("a", 0, put_us) for put_us in (0, 100_000, 5_000_000, 100_000)]
    assert shifts == [ClockShift(0), ClockShift(0), ClockShift(0, is_in_doubt=True), ClockShift(0)]
    late = [placing.shift("a", 0, 5_000_000) for _ in range(4)]
    assert late == [*[ClockShift(0, is_in_doubt=True)] * 2, ClockShift(5, is_moved=True), ClockShift(5)]
    assert placing.shift("a", 0, 0) == ClockShift(0, is_moved=True)  # a report cannot arrive before it was sent
    placing.keep(["b"])
    assert placing._shifts == {}


# ------------------------------------------------------------------ latency


def test_latencies_are_accurate_within_a_quarter() -> None:
    assert [bucket_of(took_us) for took_us in (-5, 0, 7, 8, 9, 10, 15, 16)] == [0, 0, 7, 8, 8, 9, 11, 12]
    rng = random.Random(5)
    for _ in range(2000):
        took_us = rng.randrange(1, 2 ** rng.randrange(1, 24))
        told = quantile({bucket_of(took_us): 3}, 0.99)
        assert told is not None
        assert abs(told - took_us) <= took_us / 4
    assert quantile({}, 0.5) is None
    assert bucket_of(10**12) == rollups.BUCKETS - 1


def test_quantiles_cover_all_requests() -> None:
    counts: dict[int, int] = {}
    for took_us in range(1000):
        counts[bucket_of(took_us)] = counts.get(bucket_of(took_us), 0) + 1
    told = [quantile(counts, share) or 0 for share in (0.5, 0.99)]
    assert told[0] == pytest.approx(500, abs=8)
    assert told[1] == pytest.approx(990, rel=0.03)


# ------------------------------------------------------------------ the thread


def test_reporter_runs_until_its_gate_is_gone() -> None:
    board, before = MemoryStatusStore(), {*threading.enumerate()}

    def beating() -> list[threading.Thread]:
        return [thread for thread in {*threading.enumerate()} - before if thread.name == "headgate-status"]

    gate = Gate(read("limits: [{by: ip, bucket: 1/day}]"))
    there = weakref.ref(StatusReporter(gate, board, every=0.02))  # referenced by the gate only
    gate.admit(make_request())
    wait_until(lambda: FleetAggregator(board).gather().nodes, "a beat")
    assert there() is not None
    assert beating()
    del gate
    gc.collect()
    assert there() is None
    wait_until(lambda: not beating(), "the end of the thread")


def test_reporter_ends_with_the_closed_gate(redis7: RedisServer) -> None:
    board = MemoryStatusStore()
    gate = Gate(read("limits: [{by: ip, bucket: 1/day}]"), redis7.url)
    reporter = StatusReporter(gate, board, secret=SECRET, every=0.02)
    wait_until(lambda: board.read("beats/"), "a beat")
    gate.close()
    wait_until(lambda: not board.read("beats/"), "the node to leave")
    assert reporter._is_closed


def test_reporter_keeps_the_decision_listener_of_its_gate() -> None:
    heard: list[Any] = []
    gate = Gate(read("limits: [{by: ip, bucket: 1/day}]"), on_decision=lambda *told: heard.append(told))
    reporter = StatusReporter(gate, MemoryStatusStore(), every=None)
    gate.admit(make_request())
    assert len(heard) == 1
    gate.flush_events()
    assert reporter._seconds.has_decisions


def test_forked_child_is_a_node_of_its_own() -> None:
    site = Site()
    site.pass_seconds()
    assert len(site.beats.gather().nodes) == 1
    there, here = os.pipe()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            site.gate.admit(make_request())
            site.pass_seconds(2)
            names = sorted(site.board.read("beats/"))
            os.write(here, json.dumps([names, site.beats.gather().totals.allowed]).encode())
            status = 0
        finally:
            os._exit(status)
    os.close(here)
    with os.fdopen(there, "rb") as pipe:
        names, allowed = json.loads(pipe.read())
    assert os.waitpid(child, 0)[1] == 0
    assert (len(names), allowed) == (2, 1)
    assert [name for name in names if f":{child}:" in name]
    site.clock.advance(61)
    site.pass_seconds()
    assert site.beats.gather().nodes == ()  # the parent has decided nothing since the fork
    site.gate.admit(make_request())
    site.pass_seconds(2)
    assert [node.allowed for node in site.beats.gather().nodes] == [1]


def test_unavailable_status_store_is_logged_once_and_delays_no_request(caplog: pytest.LogCaptureFixture) -> None:
    site = Site()
    broken = _Broken(site.board)
    site.reporter._store = broken
    broken.is_away = True
    with caplog.at_level(logging.WARNING, "headgate"):
        for _ in range(70):
            assert site.gate.admit(make_request(client="203.0.113.200")).decision is not None
            site.pass_seconds()
    assert [record.message.partition(":")[0] for record in caplog.records if "node status" in record.message] == [
        "node status cannot be written"
    ]
    caplog.clear()
    broken.is_away = False
    with caplog.at_level(logging.WARNING, "headgate"):
        site.pass_seconds(2)
    assert [record.message for record in caplog.records] == ["node status is written again"]
    assert site.beats.gather().nodes[0].state == "ready"
    assert len(site.board.read("minutes/")) == 1  # the minute waited for the store


class _Broken:
    def __init__(self, board: StatusStore) -> None:
        self._board = board
        self.is_away = False

    def put(self, name: str, document: bytes, *, keep: float) -> None:
        if self.is_away:
            raise StoreError("it is away")
        self._board.put(name, document, keep=keep)

    def read(self, prefix: str) -> Any:
        raise StoreError("it is away")

    def close(self) -> None: ...


def test_unreadable_entries_are_reported_and_the_rest_is_listed() -> None:
    site = Site()
    site.gate.admit(make_request())
    site.pass_seconds(2)
    for number, junk in enumerate((b"", b"{", b"[]", b'{"v":2}', b"\xff\x00", b'{"v":1,"at_us":0,"beats":[[1,-1]]}')):
        site.board.put(f"beats/junk-{number}", junk, keep=60)
    told = site.beats.gather()
    assert (told.totals.allowed, len(told.nodes), len(told.troubles)) == (1, 1, 5)
    assert "is invalid" in told.troubles[0]
    told = FleetAggregator(_Broken(site.board), clock=site.clock).gather()
    assert (told.nodes, sum(told.series.allowed)) == ((), 0)
    assert told.troubles == ("the node status cannot be read: it is away",)


def test_reporter_uses_the_secret_of_the_gate() -> None:
    site = Site()
    gate = Gate(read("limits: [{by: ip, bucket: 1/day}]"), clock=site.clock, secret=SECRET)
    reporter = StatusReporter(gate, site.board, every=None)
    gate.admit(make_request())
    site.pass_seconds(1, reporter)
    assert site.beats.gather().near[0].key == Pseudonymizer(SECRET).key("ip", "203.0.113.9")
    nobodys = Gate(read("limits: [{by: ip, bucket: 1/day}]"), clock=site.clock)
    StatusReporter(nobodys, site.board, every=None).report()
    with pytest.raises(InvalidConfiguration, match="every 7"):
        StatusReporter(nobodys, site.board, every=7)


# ------------------------------------------------------------------ minutes


def test_clients_of_a_minute_are_reported_after_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StatusReporter, "sample_share", 1.0)
    site = Site()
    for number in range(60):
        for _ in range(number % 3):
            site.gate.admit(make_request(f"/{number}", client="203.0.113.7", user_agent=f"agent {number % 2}"))
        site.pass_seconds()
    ((name, posted),) = site.board.read("minutes/").items()
    assert name.endswith(f":{NOON_US // 60_000_000}")
    said, (client,) = read_minute(posted.document)
    assert said["minute"] == NOON_US // 60_000_000
    assert (client.kind, client.key, client.requests) == ("ip", Pseudonymizer(SECRET).key("ip", "203.0.113.7"), 60)
    assert client.traits is not None
    assert (client.traits.looked_at, client.traits.estimates[:2]) == (60, (2, 1))
    assert client.traits.estimates[2] == pytest.approx(40, abs=6)
    site.pass_seconds(60)
    assert len(site.board.read("minutes/")) == 2


def test_one_off_clients_do_not_evict_frequent_ones() -> None:
    minutes = MinuteRollup()
    for number in range(60):
        second = Second(number)
        for client in range(500):
            second.clients["ip", f"{number}-{client}"] = visits({"ip": "x", "address": "x"}, 1)
        second.clients["ip", "regular"] = visits({"ip": "regular", "address": "regular"}, 2)
        assert minutes.add(second)
        assert len(minutes._clients) <= MAX_COUNTED_CLIENTS
    assert minutes.total == 60 * 502
    assert not minutes.add(Second(60))
    names = Pseudonymizer(SECRET)
    document = minutes.document(lambda who: names.pseudonym((*who, *who.values())), at_us=0)
    told = read_minute(document)[1]
    assert len(told) == MAX_REPORTED_CLIENTS
    assert (told[0].key, told[0].requests) == (names.key("ip", "regular"), 120)


def visits(who: dict[str, str], allowed: int) -> ClientRequests:
    made = ClientRequests(who)
    made.allowed = allowed
    return made


@pytest.mark.parametrize("number", [1, 2, 5, 30, 100, 250])
def test_distinct_counts_are_estimated_within_15_percent(number: int) -> None:
    traits = [TrafficSketch.of([(f"agent {n}", "x", f"/{n}") for n in range(k, number, 2)]) for k in (0, 1)]
    traits[0].add(traits[1])
    agents, addresses, paths = traits[0].estimates
    assert addresses == 1
    assert traits[0].looked_at == number
    assert agents == pytest.approx(number, rel=0.15)
    assert paths == pytest.approx(number, rel=0.15)


@pytest.mark.parametrize("junk", [b"", b"[]", b"{}", b'{"v":1,"minute":1,"at_us":1,"clients":[["a"]]}', b"[" * 100_000])
def test_invalid_minute_document_is_rejected(junk: bytes) -> None:
    with pytest.raises(ValueError, match=r"not the document of a minute|Expecting value|recursion|Extra data"):
        read_minute(junk)


# ------------------------------------------------------------------ boards


@pytest.fixture(params=["memory", "redis7", "valkey9", "cluster", "sentinel"])
def board(request: pytest.FixtureRequest, unique: str) -> StatusStore:
    if request.param == "memory":
        return MemoryStatusStore()
    return open_status_store(request.getfixturevalue(request.param).url, namespace=unique)


def test_documents_are_replaced_listed_and_expire(board: StatusStore) -> None:
    every_byte = bytes(range(256))
    board.put("beats/a", b"one", keep=60)
    board.put("beats/a", every_byte, keep=60)
    board.put("beats/b c", b"", keep=60)
    board.put("past/a", b"other", keep=60)
    board.put("beats/gone", b"soon", keep=0.001)
    board.put("beats/left", b"at once", keep=60)
    board.put("beats/left", b"", keep=0)
    wait_until(lambda: "beats/gone" not in board.read("beats/"), "its end")
    found = board.read("beats/")
    assert {name: posted.document for name, posted in found.items()} == {"beats/a": every_byte, "beats/b c": b""}
    assert all(0 <= posted.age < 5 for posted in found.values())
    assert list(board.read("beats/b")) == ["beats/b c"]
    assert board.read("nothing/") == {}
    with pytest.raises(InvalidConfiguration, match="like 'beats/web-1'"):
        board.put("beats", b"", keep=1)
    board.close()
    assert board.read("past/")["past/a"].document == b"other"  # opened again
    board.close()


def test_expired_documents_are_swept_with_their_hash(
    redis7: RedisServer, unique: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headgate.telemetry.fleet.redis_status_store.SWEEP_MS", 1)
    board, key = RedisStatusStore(redis7.url, namespace=unique), f"{unique}:%board:beats"
    with redis7.client() as client:
        board.put("beats/short", b"x", keep=0.001)
        board.put("beats/long", b"x", keep=60)
        wait_until(lambda: (board.put("beats/new", b"x", keep=50), client.hkeys(key).count("short") == 0)[1], "a sweep")
        assert set(client.hkeys(key)) == {"%sweep", "long", "new"}
        assert 50_000 < client.pttl(key) <= 60_000
        client.hset(key, "strange", "what is that")
        assert set(board.read("beats/")) == {"beats/long", "beats/new"}
    board.close()


def test_processes_share_a_redis_status_store(redis7: RedisServer, unique: str) -> None:
    gate = Gate(read("limits: [{by: ip, bucket: 1/day}]"), redis7.url, namespace=unique, budget=1.0)
    writing, reading = open_status_store(redis7.url, namespace=unique), open_status_store(redis7.url, namespace=unique)
    reporter = StatusReporter(gate, writing, secret=SECRET, every=None)
    gate.admit(make_request(client="203.0.113.9"))
    gate.admit(make_request(client="203.0.113.9"))
    reporter.report()
    told = FleetAggregator(reading).gather()
    assert [near.left for near in told.near] == [0]
    reporter.close()
    assert reading.read("beats/") == {}
    for each in (writing, reading, gate):
        each.close()


def test_status_store_accepts_the_urls_of_stores(redis7: RedisServer, unique: str) -> None:
    assert open_status_store("memory://") is open_status_store("memory:") is open_status_store()
    mine = MemoryStatusStore()
    assert open_status_store(mine) is mine
    with redis7.client() as client:
        board = open_status_store(client, namespace=unique)
        board.put("beats/a", b"x", keep=60)
        other = open_status_store(redis.asyncio.Redis.from_url(redis7.url), namespace=unique)
        assert list(other.read("beats/")) == ["beats/a"]
        board.close()
        other.close()
    for strange in ("http://x", "beats", "memory://there"):
        with pytest.raises(InvalidConfiguration, match="no status store for"):
            open_status_store(strange)
    with pytest.raises(InvalidConfiguration, match="neither a URL"):
        open_status_store(7)


def test_unavailable_redis_status_store_raises_store_errors() -> None:
    board = open_status_store(NOWHERE)
    with pytest.raises(StoreError):
        board.put("beats/a", b"", keep=1)
    with pytest.raises(StoreError):
        board.read("beats/")
    board.close()


def test_memory_status_store_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headgate.telemetry.fleet.status_store.MAX_DOCUMENTS", 3)
    board = MemoryStatusStore()
    for number in range(9):
        board.put(f"beats/{number}", b"", keep=60)
    assert list(board.read("beats/")) == ["beats/6", "beats/7", "beats/8"]


def test_threads_are_counted_exactly(fresh_name: Callable[[], str]) -> None:
    site = Site("limits: [{by: ip, bucket: 1000000/second}]")
    threads = [
        threading.Thread(target=lambda: [site.gate.admit(make_request(client="203.0.113.5")) for _ in range(2000)])
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    site.pass_seconds(2)
    assert site.beats.gather().totals.allowed == 8000
