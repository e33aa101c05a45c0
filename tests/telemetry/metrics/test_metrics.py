"""Metrics: counters of gates under bounded labels, without client names."""

from __future__ import annotations

import asyncio
import gc
import json
import re
import subprocess
import sys
from contextlib import closing
from typing import TYPE_CHECKING, Any

import pytest
import yaml
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.multiprocess import MultiProcessCollector
from prometheus_client.parser import text_string_to_metric_families

from headgate import InvalidConfiguration
from headgate.adapters.asgi import AsgiRequest
from headgate.gate.gate import AsyncGate, Gate
from headgate.health import OutageReport
from headgate.policy import read
from headgate.telemetry import otel, prometheus
from headgate.telemetry.metrics import counters, families, limit_stats
from headgate.telemetry.metrics.counters import Metrics
from headgate.telemetry.metrics.families import FAMILIES, Histogram
from headgate.telemetry.metrics.limit_stats import DistinctCounter, LimitStats
from headgate.testing import FakeClock
from support.paths import ROOT
from support.servers import RedisServer

if TYPE_CHECKING:
    from pathlib import Path

OPS = ROOT / "ops"
NOWHERE = "redis://127.0.0.1:1/0"
SECRET_KEY = "sk_live_do_not_tell"

POLICY = """
routes:
  - {path: /search, class: search}
limits:
  - {name: per-ip, by: ip, bucket: 4/minute, tiers: {pro: 9/minute}}
  - {name: searches, by: ip, class: search, bucket: 2/minute}
  - {name: watched, by: ip, bucket: 1/minute, shadow: true}
clients:
  - {ip: 203.0.113.7, tier: pro}
blocked:
  - {ip: 203.0.113.66}
"""


def make_request(path: str = "/", *, client: str = "203.0.113.9", **headers: str) -> AsgiRequest:
    lines = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
    return AsgiRequest({"type": "http", "method": "GET", "path": path, "client": (client, 1), "headers": lines})


def numbers(metrics: Metrics) -> dict[Any, Any]:
    """The readings by name and labels, those without labels by name alone."""
    return {
        (reading.family.name.removeprefix("rate_limiter_"), *reading.labels) if reading.labels
        else reading.family.name.removeprefix("rate_limiter_"): reading.value
        for reading in metrics.read()
    }  # fmt: skip


def watched(policy: str, store: str = "memory://", **options: Any) -> tuple[Gate, Metrics]:
    gate, counted = Gate(read(policy), store, **options), Metrics()
    counted.watch(gate)
    return gate, counted


# ---------------------------------------------------------------- decisions


def test_bounds_are_exported_with_the_overshoot_of_the_last_outage() -> None:
    limits = "{name: a, by: ip, bucket: 1000/second}, {name: b, by: ip, bucket: 9/minute, algorithm: fixed_window}"
    gate, counted = watched(f"on_failure: local\nlimits: [{limits}]")
    told = numbers(counted)
    assert (told["overshoot_bound", "a"], told["overshoot_bound", "b"]) == (500, 1)  # the refill of a lease, a share
    assert ("outage_overshoot", "a") not in told
    gate._limiter.engine.local.last_outage = OutageReport("a", 1012, 1000, 1040)
    told = numbers(counted)
    assert (told["outage_overshoot", "a"], told["outage_bound", "a"]) == (12, 40)
    gate._limiter.engine.local.last_outage = OutageReport("a", 1012, 1000, None)
    assert ("outage_bound", "a") not in numbers(counted), "mode open is not bounded"


def test_request_is_counted_once_and_once_per_limit() -> None:
    gate, counted = watched(POLICY, clock=FakeClock())
    for _ in range(3):
        gate.admit(make_request("/search"))
    gate.admit(make_request("/other", client="203.0.113.7"))
    gate.admit(make_request("/other", client="203.0.113.66"))
    told = numbers(counted)
    assert {key: told[key] for key in told if key[0] in ("decisions", "allowed", "blocked", "rejections")} == {
        ("decisions", "allowed", "search", "/search", "none"): 2,
        ("decisions", "denied", "search", "/search", "none"): 1,
        ("decisions", "allowed", "none", "unmatched", "pro"): 1,
        ("decisions", "blocked", "none", "unmatched", "none"): 1,
        ("allowed", "per-ip", "search", "/search"): 2,
        ("allowed", "searches", "search", "/search"): 2,
        ("allowed", "per-ip", "none", "unmatched"): 1,
        ("blocked", "searches", "search", "/search"): 1,
        ("rejections", "none", "limit"): 1,
        ("rejections", "none", "blocked"): 1,
    }
    assert told["shadow_blocked", "watched", "search", "/search"] == 1
    gate.admit(make_request("/search"))
    assert numbers(counted)["decisions", "denied", "search", "/search", "none"] == 2  # counting continues


def test_route_with_shadow_limits_only_denies_nothing() -> None:
    gate, counted = watched("limits: [{name: watched, by: ip, bucket: 1/day, shadow: true}]")
    assert all(gate.admit(make_request()).allowed for _ in range(3))
    told = numbers(counted)
    assert told["shadow_blocked", "watched", "none", "unmatched"] == 2
    assert told["decisions", "allowed", "none", "unmatched", "none"] == 3


def test_async_gate_evaluates_shadow_only_routes() -> None:
    gate = AsyncGate(read("limits: [{name: watched, by: ip, bucket: 1/day, shadow: true}]"))

    async def said() -> list[tuple[bool, list[bool]]]:
        found = [await gate.admit(make_request()) for _ in range(2)]
        return [(each.allowed, [shadow.decision.allowed for shadow in each.shadows]) for each in found]

    assert asyncio.run(said()) == [(True, [True]), (True, [False])]


def test_two_denying_limits_are_one_rejection_and_two_denials() -> None:
    gate, counted = watched(
        "limits: [{name: a, by: ip, bucket: 1/day}, {name: b, by: ip, bucket: 1/day}, {name: c, by: ip, bucket: 9/day}]"
    )
    for _ in range(2):
        gate.admit(make_request())
    told = numbers(counted)
    assert told["rejections", "none", "limit"] == 1
    assert [told.get(("blocked", name, "none", "unmatched")) for name in "abc"] == [1, 1, None]


def test_requests_of_a_route_are_grouped_by_denying_limits() -> None:
    gate, counted = watched(
        "limits: [{name: here, by: ip, bucket: 1/day}, {name: all, by: global, bucket: 3/day}]", clock=FakeClock()
    )
    for client in ("203.0.113.1", "203.0.113.1", "203.0.113.2", "203.0.113.3", "203.0.113.4"):
        gate.admit(make_request(client=client))
    told = numbers(counted)
    assert [told["blocked", name, "none", "unmatched"] for name in ("here", "all")] == [1, 1]
    assert told["decisions", "denied", "none", "unmatched", "none"] == 2


def test_only_applied_limits_are_counted_as_allowing() -> None:
    gate = Gate(
        read("limits: [{name: ours, by: user, missing: skip, bucket: 9/day}, {name: all, by: global, bucket: 9/day}]"),
        identities={"user": lambda request: "ada" if request.path == "/ada" else None},
    )
    counted = Metrics()
    counted.watch(gate)
    for path in ("/ada", "/nobody", "/nobody"):
        gate.admit(make_request(path))
    told = numbers(counted)
    assert [told["allowed", name, "none", "unmatched"] for name in ("ours", "all")] == [1, 3]
    assert sum(told["remaining_ratio", "ours"].counts) == 1


def test_degraded_pass_is_not_counted_as_allowed_by_a_limit() -> None:
    with RedisServer() as redis:
        gate, counted = watched("limits: [{name: a, by: ip, bucket: 100/day}]", redis.url, budget=1.0)
        with closing(gate):
            gate.admit(make_request())
            redis.kill()
            gate.admit(make_request())
            told = numbers(counted)
    assert told["decisions", "allowed", "none", "unmatched", "none"] == 2
    assert told["degraded_mode", "fail_open"] == 1
    assert sum(told["remaining_ratio", "a"].counts) == 1


def test_latency_starts_when_the_client_is_resolved() -> None:
    clock = FakeClock()
    gate = Gate(read("limits: [{by: ip, bucket: 9/minute}]"), clock=clock)
    counted = Metrics()
    gate.on_decision = lambda *_: clock.advance(0.004)  # as a slow store would
    counted.watch(gate)
    gate.admit(make_request())
    latency = numbers(counted)["check_latency_seconds"]
    assert isinstance(latency, Histogram)
    assert (latency.total, latency.counts[latency.bounds.index(0.005)], sum(latency.counts)) == (0.004, 1, 1)


def test_clock_set_back_gives_no_negative_latency() -> None:
    clock = FakeClock(10_000_000)
    gate, counted = Gate(read("limits: [{by: ip, bucket: 9/minute}]"), clock=clock), Metrics()
    gate.on_decision = lambda *_: clock.set_us(5_000_000)
    counted.watch(gate)
    gate.admit(make_request())
    latency = numbers(counted)["check_latency_seconds"]
    assert (latency.total, latency.counts[0]) == (0, 1)


def test_existing_listener_is_still_called_and_may_fail(caplog: pytest.LogCaptureFixture) -> None:
    gate, counted, told = Gate(read("limits: [{by: ip, bucket: 9/minute}]")), Metrics(), []

    def fail(*_: object) -> None:
        told.append(1)
        raise RuntimeError("a hook of the app's")

    gate.on_decision = fail
    counted.watch(gate)
    gate.admit(make_request())
    assert told == [1]
    assert numbers(counted)["decisions", "allowed", "none", "unmatched", "none"] == 1
    assert "on_decision failed" in caplog.text


# -------------------------------------------------------------------- labels


def test_number_of_series_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(families, "MAX_SERIES", 3)
    monkeypatch.setattr(counters, "MAX_LIMITS", 2)
    limits = ", ".join(f"{{name: n{number}, by: ip, path: /{number}, bucket: 9/minute}}" for number in range(6))
    gate, counted = watched(f"limits: [{limits}]")
    for number in range(6):
        gate.admit(make_request(f"/{number}"))
    told = numbers(counted)
    assert {key: told[key] for key in told if key[0] == "allowed"} == {
        ("allowed", "n0", "none", "/0"): 1,
        ("allowed", "n1", "none", "/1"): 1,
        ("allowed", "n2", "none", "/2"): 1,
        ("allowed", "other", "other", "other"): 3,
    }
    assert {key[1:] for key in told if key[0] == "keys"} == {("n0", "ip"), ("n1", "ip"), ("other", "other")}


def test_labels_contain_no_client_path_or_key() -> None:
    registry = CollectorRegistry()
    gate = Gate(read("limits: [{by: api_key+user, bucket: 1/minute}, {by: ip, bucket: 2/minute}]"),
                identities={"user": lambda _: "ada@example.org"})  # fmt: skip
    prometheus.register(gate, registry)
    spans, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(spans))
    otel.trace(gate, provider)
    meters, reader = meter_provider()
    otel.instrument(gate, meters)
    for number in range(5):
        gate.admit(make_request(f"/orders/{number}-secret", x_api_key=SECRET_KEY))
    told = generate_latest(registry).decode() + str(reader.get_metrics_data().to_json())
    told += "".join(span.to_json() for span in spans.get_finished_spans())
    hashed = gate.active_policy.identities.fingerprint(SECRET_KEY)
    for secret in (SECRET_KEY, hashed, hashed[-16:], "203.0.113", "ada@", "secret", "/orders"):
        assert secret not in told, secret


# ----------------------------------------------------- what is left, and to whom


def test_remaining_is_reported_as_a_share_of_each_limit() -> None:
    gate, counted = watched("limits: [{name: a, by: ip, bucket: 4/minute}]", clock=FakeClock())
    for _ in range(5):
        gate.admit(make_request())
    left = numbers(counted)["remaining_ratio", "a"]
    assert dict(zip(left.bounds, left.counts, strict=False)) == {
        0.0: 2, 0.01: 0, 0.05: 0, 0.1: 0, 0.25: 1, 0.5: 1, 0.75: 1, 0.9: 0, 1.0: 0,
    }  # fmt: skip
    assert left.total == 0.75 + 0.5 + 0.25


def test_key_is_at_zero_after_five_minutes_without_quota() -> None:
    clock = FakeClock()
    gate, counted = watched("limits: [{name: a, by: ip, bucket: 60/minute}]", clock=clock)
    for _ in range(60):
        gate.admit(make_request())  # only the last one leaves nothing
    for _ in range(300):
        assert numbers(counted)["keys_at_zero", "a"] == 0
        clock.advance(1)
        gate.admit(make_request())
    clock.advance(1)
    assert numbers(counted)["keys_at_zero", "a"] == 1
    clock.advance(9)
    gate.admit(make_request())
    assert numbers(counted)["keys_at_zero", "a"] == 0


def test_silent_key_leaves_the_zero_count_in_time() -> None:
    stats = LimitStats("ip")
    stats.record("patient", 0.0, 1_000_000_000, 0)  # it has to wait for 1000 s, and does
    stats.record("gone", 0.0, 1_000_000, 0)
    assert [stats.count_at_zero(now_us) for now_us in (300_000_000, 300_000_001)] == [0, 1]
    assert stats.count_at_zero(1_000_000_001) == 0
    stats.record("gone", 0.0, 1_000_000, 400_000_000)  # starts again
    assert stats.count_at_zero(400_000_001) == 1
    stats.forget_recovered(400_000_001)
    assert len(stats._at_zero) == 2


def test_key_with_too_little_for_its_cost_is_at_zero() -> None:
    stats = LimitStats("ip")
    for seconds in (0, 59, 118, 177, 236, 295):
        stats.record("greedy", 0.3, 50_000_000, seconds * 1_000_000)
    assert [stats.count_at_zero(now_us) for now_us in (300_000_000, 301_000_000, 356_000_000)] == [0, 1, 0]


def test_keys_at_zero_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limit_stats, "MAX_AT_ZERO", 10)
    stats = LimitStats("ip")
    for number in range(50):
        stats.record(f"{number}", 0.0, 1_000_000_000, 0)
    assert stats.count_at_zero(400_000_000) == 10


@pytest.mark.parametrize("many", [0, 1, 1000, 1024])
def test_few_keys_are_counted_exactly(many: int) -> None:
    seen = DistinctCounter()
    for number in [*range(many)] * 2:
        seen.update([f"client {number}"])
    assert seen.estimate == many


def test_many_keys_are_estimated_in_bounded_memory() -> None:
    seen = DistinctCounter()
    for number in range(100_000):
        seen.update([f"client {number}"])
    assert 80_000 < seen.estimate < 120_000  # five standard errors, as hashes differ between runs
    assert len(seen.marks) <= limit_stats.MAX_MARKS


def test_keys_cover_the_last_five_minutes() -> None:
    clock = FakeClock(1_000_000)
    gate, counted = watched("limits: [{name: a, by: ip, bucket: 60/minute}]", clock=clock)
    for number in range(8):
        gate.admit(make_request(client=f"203.0.113.{number}"))
    assert numbers(counted)["keys", "a", "ip"] == 8
    for seconds, expected in ((100, 9), (200, 9), (300, 9), (400, 9), (600, 1)):
        clock.set_us(1_000_000 + seconds * 1_000_000)
        gate.admit(make_request(client="203.0.113.99"))
        assert numbers(counted)["keys", "a", "ip"] == expected, seconds


# --------------------------------------------------------- the store and the policy


@pytest.mark.parametrize(
    ("mode", "outcome", "reason"),
    [("open", "allowed", None), ("closed", "unavailable", "unavailable"), ("local", "allowed", None)],
)
def test_degraded_decisions_are_counted_by_mode(mode: str, outcome: str, reason: str | None) -> None:
    gate, counted = watched(f"on_failure: {mode}\nlimits: [{{name: a, by: ip, bucket: 100/minute}}]", NOWHERE)
    modes = ("open", "closed", "local")
    assert [numbers(counted)["degraded_mode", f"fail_{each}"] for each in modes] == [0, 0, 0]
    with closing(gate):
        for _ in range(2):
            gate.admit(make_request())
        told = numbers(counted)
    assert [told["degraded_mode", f"fail_{each}"] for each in modes] == [2 * (each == mode) for each in modes]
    assert told["decisions", outcome, "none", "unmatched", "none"] == 2
    assert told.get(("rejections", "none", reason)) == (2 if reason else None)
    assert sum(told["remaining_ratio", "a"].counts) == 0, "nothing is known of what is left"
    assert (told["degraded"], told["fallback_mode"], told["redis_errors"]) == (1, 1, 2)
    assert told["fallback_seconds"] == pytest.approx(told["fallback_current_seconds"], abs=0.1)


def test_outage_is_counted_with_its_duration(redis7: RedisServer, unique: str) -> None:
    gate, counted = watched(
        "limits: [{name: a, by: ip, bucket: 100/minute}]", redis7.url, namespace=unique, budget=1.0, on_event=print
    )
    with closing(gate):
        gate.admit(make_request())
        outage = gate._limiter.engine.local.outage
        began = [100.0]
        outage._now = lambda: began[0]
        outage.record_failure(RuntimeError("away"))
        began[0] += 30
        assert numbers(counted)["fallback_current_seconds"] == numbers(counted)["fallback_seconds"] == 30
        outage.end()
        for _ in range(2):
            told = numbers(counted)
            assert (told["fallback_mode"], told["fallback_seconds"], told["redis_errors"]) == (1, 30, 1)
            assert (told["fallback_current_seconds"], told["degraded"]) == (0, 0)
        assert told["store_events", "store-lost"] == told["store_events", "store-back"] == 1
        outage.record_failure(RuntimeError("away again"))
        began[0] += 5
        outage.end()
        told = numbers(counted)
        assert (told["fallback_mode"], told["fallback_seconds"], told["redis_errors"]) == (2, 35, 2)


def test_redis_operations_and_cache_hits_are_counted(redis7: RedisServer, unique: str) -> None:
    gate, counted = watched("limits: [{name: a, by: ip, bucket: 2/day}]", redis7.url, namespace=unique, budget=1.0)
    with closing(gate):
        for _ in range(10):
            gate.admit(make_request())
        told = numbers(counted)
    hits = told["local_cache_hits", "remembered"]
    assert hits >= 4  # two pass, and Redis denies at most four
    assert told["redis_ops"] + hits == 10
    assert told["redis_round_trips"] == told["redis_ops"]
    assert (told["script_eval_errors"], told["shards", "ready"]) == (0, 1)


def test_foreign_value_under_a_key_is_a_script_error(redis7: RedisServer, unique: str) -> None:
    gate, counted = watched("limits: [{name: a, by: ip, bucket: 2/day}]", redis7.url, namespace=unique, budget=1.0)
    with closing(gate), redis7.client() as client:
        gate.admit(make_request())
        (key,) = client.keys(f"{unique}:a:*")
        client.delete(key)
        client.lpush(key, "not ours")
        gate.admit(make_request())
        assert numbers(counted)["script_eval_errors"] == 1


def test_refresh_lag_starts_with_the_rejected_policy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "policy.yaml"
    file.write_text("limits: [{by: ip, bucket: 9/minute}]")
    gate, counted = Gate(file, reload_every=None), Metrics()
    counted.watch(gate)
    now = [50.0]
    monkeypatch.setattr(counters.time, "monotonic", lambda: now[0])
    assert numbers(counted)["config_refresh_lag_seconds"] == 0
    version = gate.policy_version
    file.write_text("limits: [{by: ip}]")
    assert gate.policy_watcher is not None
    gate.policy_watcher.look()
    for lag in (0, 90):
        now[0] += lag
        assert numbers(counted)["config_refresh_lag_seconds"] == lag
    file.write_text("limits: [{by: ip, bucket: 8/minute}]")
    gate.policy_watcher.look()
    told = numbers(counted)
    assert told["config_refresh_lag_seconds"] == 0
    assert told["config_info", gate.policy_version] == 1
    assert ("config_info", version) not in told


def test_lag_function_reports_the_policy_lag() -> None:
    counted = Metrics()
    counted.watch(Gate(read("limits: [{by: ip, bucket: 9/minute}]")), lag=lambda: 12.5)
    gc.collect()
    gate = Gate(read("limits: [{by: ip, bucket: 9/minute}]"))
    counted.watch(gate, lag=lambda: 7.5)
    assert numbers(counted)["config_refresh_lag_seconds"] == 7.5


def test_counters_never_decrease_when_a_gate_is_gone() -> None:
    gate, counted = watched("limits: [{by: ip, bucket: 9/minute}]", NOWHERE)
    gate.admit(make_request())
    before = numbers(counted)
    gate.close()
    del gate
    gc.collect()
    after = numbers(counted)
    assert (
        (after["fallback_mode"], after["redis_errors"]) == (before["fallback_mode"], before["redis_errors"]) == (1, 1)
    )
    assert "degraded" not in after


def test_counts_do_not_keep_an_old_policy_alive() -> None:
    clock = FakeClock()
    gate, counted = watched("limits: [{by: ip, bucket: 9/minute}]", clock=clock)
    gate.admit(make_request())
    gate.flush_events()
    assert len(counted._tallies) == 1
    clock.advance(60)
    gate.admit(make_request())
    gate.flush_events()
    assert len(counted._tallies) == 1, "what was counted a minute ago is under its labels"
    numbers(counted)
    assert not counted._tallies


def test_forked_child_does_not_repeat_counts_of_its_parent() -> None:
    gate, counted = watched("limits: [{name: a, by: ip, bucket: 1/minute}]")
    for _ in range(2):
        gate.admit(make_request())
    numbers(counted)
    counted.reset_after_fork()
    told = numbers(counted)
    assert not [key for key in told if key[0] in ("decisions", "allowed", "blocked", "rejections", "keys")]
    assert (told["degraded_mode", "fail_open"], sum(told["check_latency_seconds"].counts)) == (0, 0)
    gate.admit(make_request())
    assert numbers(counted)["rejections", "none", "limit"] == 1


def test_forked_child_does_not_repeat_store_latencies_of_its_parent(redis7: RedisServer, unique: str) -> None:
    gate, counted = watched("limits: [{by: ip, bucket: 9/minute}]", redis7.url, namespace=unique)
    with closing(gate):
        emitter = gate._limiter.engine.local.event_emitter
        emitter.emit("store-lost", "gone")
        emitter.emit("state-lost", "empty")
        emitter.emit("store-back", "here", requests=3, seconds=2.0)
        told = numbers(counted)
        assert (told["fallback_mode"], told["fallback_seconds"], told["redis_errors"]) == (1, 2, 3)
        assert told["store_events", "state-lost"] == 1
        counted.reset_after_fork()
        told = numbers(counted)
        assert (told["fallback_mode"], told["fallback_seconds"], told["redis_errors"]) == (0, 0, 0)
        assert {told[key] for key in told if key[0] == "store_events"} == {0}
        emitter.emit("state-lost", "empty")
        assert numbers(counted)["store_events", "state-lost"] == 1


# -------------------------------------------------------------------- Prometheus


def exposed(registry: CollectorRegistry) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    families = text_string_to_metric_families(generate_latest(registry).decode())
    return {(each.name, frozenset(each.labels.items())): each.value for family in families for each in family.samples}


def labels(**names: str) -> frozenset[tuple[str, str]]:
    return frozenset(({"gate": "default"} | names).items())


def test_registry_exports_registered_gates() -> None:
    registry = CollectorRegistry()
    one, other, third = (Gate(read("limits: [{name: a, by: ip, bucket: 1/minute}]")) for _ in range(3))
    prometheus.register(one, registry)
    prometheus.register(other, registry)
    prometheus.register(third, registry, name="admin")
    for gate in (one, one, other, third):
        gate.admit(make_request())
    told = exposed(registry)
    about = {"outcome": "allowed", "route_class": "none", "endpoint": "unmatched", "tier": "none"}
    assert told["rate_limiter_decisions_total", labels(**about)] == 2
    assert told["rate_limiter_decisions_total", labels(**about, gate="admin")] == 1
    assert told["rate_limiter_rejections_total", labels(tier="none", reason="limit")] == 1
    assert told["rate_limiter_check_latency_seconds_count", labels()] == 3
    assert told["rate_limiter_check_latency_seconds_bucket", labels(le="+Inf")] == 3
    assert told["rate_limiter_memory_keys", labels()] == 2
    text = generate_latest(registry).decode()
    assert text.count("# TYPE rate_limiter_decisions_total counter") == 1


def test_gate_registered_twice_is_counted_once() -> None:
    registry = CollectorRegistry()
    gate = Gate(read("limits: [{name: a, by: ip, bucket: 1/minute}]"))
    first = prometheus.register(gate, registry)
    assert prometheus.register(gate, registry, lag=lambda: 7.0) is first
    prometheus.register(gate, registry)  # as in a startup hook that runs repeatedly
    gate.admit(make_request())
    told = exposed(registry)
    assert told["rate_limiter_allowed_total", labels(policy="a", route_class="none", endpoint="unmatched")] == 1
    assert told["rate_limiter_check_latency_seconds_count", labels()] == 1
    assert told["rate_limiter_memory_keys", labels()] == 1
    assert told["rate_limiter_config_refresh_lag_seconds", labels()] == 7


def test_histogram_buckets_are_cumulative() -> None:
    registry = CollectorRegistry()
    gate = Gate(read("limits: [{name: a, by: ip, bucket: 4/minute}]"), clock=FakeClock())
    prometheus.register(gate, registry)
    for _ in range(5):
        gate.admit(make_request())
    told = exposed(registry)
    shares = ("0.0", "0.01", "0.25", "0.5", "0.75", "1.0", "+Inf")
    found = [told["rate_limiter_remaining_ratio_bucket", labels(policy="a", le=share)] for share in shares]
    assert found == [2, 2, 3, 4, 5, 5, 5]


def test_duplicate_metric_names_are_rejected() -> None:
    registry = CollectorRegistry()
    prometheus.register(Gate(read("limits: [{by: ip, bucket: 1/minute}]")), registry)
    with pytest.raises(ValueError, match="Duplicated timeseries"):
        registry.register(prometheus.MetricsCollector())


CHILD = """
import sys
from pathlib import Path
from headgate.adapters.asgi import AsgiRequest
from headgate.gate.gate import Gate
from headgate.telemetry import prometheus

file = Path(sys.argv[2])
file.write_text("limits: [{name: a, by: ip, bucket: 2/day}]")
gate = Gate(file, reload_every=None)
metrics = prometheus.register(gate)
(mirror,) = prometheus._exporters.values()
for _ in range(int(sys.argv[1])):
    gate.admit(AsgiRequest({"type": "http", "method": "GET", "path": "/", "client": ("203.0.113.9", 1), "headers": []}))
mirror.write()
file.write_text("limits: [{name: a, by: ip, bucket: 3/day}]")
gate.policy_watcher.look()
mirror.write()
"""


def test_several_processes_are_aggregated(tmp_path: Path) -> None:
    settings = ["env", f"PROMETHEUS_MULTIPROC_DIR={tmp_path}", sys.executable, "-c", CHILD]
    children = [subprocess.Popen([*settings, requests, f"{tmp_path}/{requests}.yaml"]) for requests in ("3", "4")]
    assert [child.wait(20) for child in children] == [0, 0]
    registry = CollectorRegistry()
    MultiProcessCollector(registry, path=f"{tmp_path}")
    told = exposed(registry)
    about = {"route_class": "none", "endpoint": "unmatched", "tier": "none"}
    assert told["rate_limiter_decisions_total", labels(outcome="allowed", **about)] == 4
    assert told["rate_limiter_decisions_total", labels(outcome="denied", **about)] == 3
    assert told["rate_limiter_check_latency_seconds_count", labels()] == 7
    assert told["rate_limiter_remaining_ratio_bucket", labels(policy="a", le="0.5")] == 7
    assert told["rate_limiter_memory_keys", labels()] == 2
    assert told["rate_limiter_degraded", labels()] == 0
    versions = [value for (name, _), value in told.items() if name == "rate_limiter_config_info"]
    assert versions == [0, 1], "a version that is in force nowhere is not told as if it were"


def test_missing_package_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate(read("limits: [{by: ip, bucket: 9/minute}]"))
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    with pytest.raises(InvalidConfiguration, match=re.escape("pip install 'headgate[prometheus]'")):
        prometheus.register(gate)
    monkeypatch.setitem(sys.modules, "opentelemetry", None)
    monkeypatch.setitem(sys.modules, "opentelemetry.metrics", None)
    with pytest.raises(InvalidConfiguration, match=re.escape("pip install 'headgate[otel]'")):
        otel.instrument(gate)


# ----------------------------------------------------------------- OpenTelemetry


def meter_provider() -> tuple[MeterProvider, InMemoryMetricReader]:
    reader = InMemoryMetricReader()
    return MeterProvider([reader], shutdown_on_exit=False), reader


def points(reader: InMemoryMetricReader) -> dict[str, list[Any]]:
    data = reader.get_metrics_data()
    assert data is not None
    (scope,) = data.resource_metrics[0].scope_metrics
    return {metric.name: list(metric.data.data_points) for metric in scope.metrics}


def test_opentelemetry_reports_the_same_numbers() -> None:
    provider, reader = meter_provider()
    gate = Gate(read("limits: [{name: a, by: ip, bucket: 2/minute}]"), clock=FakeClock())
    other = Gate(read("limits: [{name: b, by: ip, bucket: 2/minute}]"))
    counted = otel.instrument(gate, provider)
    otel.instrument(other, provider, name="other")
    for _ in range(3):
        gate.admit(make_request())
    other.admit(make_request())
    told = points(reader)
    rejections = [(point.attributes, point.value) for point in told["limiter.rejections"]]
    assert rejections == [({"gate": "default", "tier": "none", "reason": "limit"}, 1)]
    latency = {point.attributes["gate"]: point.count for point in told["limiter.check.latency"]}
    assert latency == {"default": 3, "other": 1}
    (left,) = [point for point in told["limiter.remaining_ratio"] if point.attributes["policy"] == "a"]
    same = numbers(counted)["remaining_ratio", "a"]
    assert (left.bucket_counts, left.explicit_bounds, left.sum) == (same.counts, same.bounds, same.total)
    gate.admit(make_request())
    assert [point.value for point in points(reader)["limiter.rejections"]] == [2]
    assert set(told) <= {family.otel_name for family in FAMILIES.values()}
    assert {"config.refresh.lag_seconds", "limiter.degraded_mode", "limiter.keys"} <= set(told)


def test_gate_instrumented_twice_is_reported_once() -> None:
    gate = Gate(read("limits: [{name: a, by: ip, bucket: 4/minute}]"))
    reader, spans, other = InMemoryMetricReader(), InMemorySpanExporter(), InMemorySpanExporter()
    meters, tracers, others = MeterProvider([reader]), TracerProvider(), TracerProvider()
    tracers.add_span_processor(SimpleSpanProcessor(spans))
    others.add_span_processor(SimpleSpanProcessor(other))
    for _ in range(2):
        otel.instrument(gate, meters)
        otel.trace(gate, tracers)
    otel.trace(gate, others)
    gate.admit(make_request())
    data = reader.get_metrics_data()
    assert data is not None
    told = {each.name: each.data.data_points for each in data.resource_metrics[0].scope_metrics[0].metrics}
    assert [point.value for point in told["limiter.allowed"]] == [1]
    assert [point.count for point in told["limiter.check.latency"]] == [1]
    assert [point.count for point in told["limiter.remaining_ratio"]] == [1]
    assert (len(spans.get_finished_spans()), len(other.get_finished_spans())) == (1, 1)


def test_opentelemetry_omits_unknown_remaining() -> None:
    provider, reader = meter_provider()
    with closing(Gate(read("limits: [{name: a, by: ip, bucket: 2/minute}]"), NOWHERE)) as gate:
        otel.instrument(gate, provider)
        gate.admit(make_request())
        told = points(reader)
    assert "limiter.remaining_ratio" not in told
    modes = {point.attributes["mode"]: point.value for point in told["limiter.degraded_mode"]}
    assert modes == {"fail_open": 1, "fail_closed": 0, "fail_local": 0}


def test_decision_is_a_child_span_of_its_request() -> None:
    exporter, provider, clock = InMemorySpanExporter(), TracerProvider(), FakeClock()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    gate = Gate(read(POLICY), clock=clock)
    gate.on_decision = lambda *_: clock.advance(0.003)
    otel.trace(gate, provider)
    with provider.get_tracer("app").start_as_current_span("GET /search"):
        for _ in range(3):
            gate.admit(make_request("/search"))
    first, _, last, request = exporter.get_finished_spans()
    assert request.context is not None
    assert first.parent is not None
    assert (first.name, first.parent.span_id) == ("headgate.check", request.context.span_id)
    assert dict(first.attributes or {}) == {
        "http.route": "/search",
        "headgate.outcome": "allowed",
        "headgate.limits": ("per-ip", "searches"),
        "headgate.route_class": "search",
        "headgate.remaining": 1,
    }
    assert last.attributes is not None
    assert (last.attributes["headgate.denied_by"], last.attributes["headgate.outcome"]) == (("searches",), "denied")
    assert first.start_time is not None
    assert first.end_time is not None
    assert 3_000_000 <= first.end_time - first.start_time < 500_000_000
    gate.admit(make_request("/x", client="203.0.113.66"))
    blocked = exporter.get_finished_spans()[-1]
    assert blocked.attributes is not None
    assert blocked.attributes["headgate.outcome"] == "blocked"


def test_span_names_the_failure_mode_and_not_the_error() -> None:
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    with closing(Gate(read("limits: [{by: ip, bucket: 9/minute}]"), NOWHERE)) as gate:
        otel.trace(gate, provider)
        gate.admit(make_request())
    (span,) = exporter.get_finished_spans()
    assert span.attributes is not None
    assert span.attributes["headgate.degraded_mode"] == "fail_open"
    assert "127.0.0.1" not in span.to_json()


# ---------------------------------------------------------- dashboard, alerts and docs


def shown_names() -> set[str]:
    """Every sample name exposed to Prometheus."""
    endings = {"counter": ["_total"], "gauge": [""], "histogram": ["_bucket", "_count", "_sum"]}
    return {family.name + ending for family in FAMILIES.values() for ending in endings[family.kind]}


def dashboard() -> dict[str, Any]:
    board: dict[str, Any] = json.loads((OPS / "grafana" / "headgate.json").read_text("utf-8"))
    return board


def alerts() -> list[dict[str, Any]]:
    groups = yaml.safe_load((OPS / "prometheus" / "alerts.yml").read_text("utf-8"))["groups"]
    return [rule for group in groups for rule in group["rules"]]


def named(expression: str) -> set[str]:
    return set(re.findall(r"\brate_limiter[\w:]+", expression))


def test_dashboard_shows_every_metric() -> None:
    found = {
        name for panel in dashboard()["panels"] for each in panel.get("targets", ()) for name in named(each["expr"])
    }
    assert found <= shown_names()
    families = {re.sub("_(total|bucket|count|sum)$", "", name) for name in found}
    assert families == set(FAMILIES)


def test_every_label_of_the_dashboard_exists() -> None:
    known = {label for family in FAMILIES.values() for label in family.labels} | {"gate", "instance", "job", "le"}
    for panel in dashboard()["panels"]:
        for target in panel.get("targets", ()):
            used = re.findall(r"(\w+)(?:=~|!=|=)\"", target["expr"]) + re.findall(r"{{(\w+)}}", target["legendFormat"])
            grouped = [name for group in re.findall(r"by \(([^)]*)\)", target["expr"]) for name in group.split(", ")]
            assert {*used, *grouped} <= known, panel["title"]


def test_panels_do_not_overlap_and_have_descriptions() -> None:
    panels = dashboard()["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        place = panel["gridPos"]
        cells = {(place["x"] + x, place["y"] + y) for x in range(place["w"]) for y in range(place["h"])}
        assert not cells & taken, panel["title"]
        assert place["x"] + place["w"] <= 24
        taken |= cells
        assert panel["type"] == "row" or panel["description"]


def test_alerts_use_existing_metrics_and_have_a_severity() -> None:
    recorded = {rule["record"] for rule in alerts() if "record" in rule}
    assert {name for rule in alerts() for name in named(rule["expr"])} <= shown_names() | recorded
    severities = {rule["alert"]: rule["labels"]["severity"] for rule in alerts() if "alert" in rule}
    pages = {"HeadgateCheckSlow", "HeadgateDegraded", "HeadgateDegradedForLong", "HeadgateScriptErrors"}
    pages |= {"HeadgateLedgerUnavailable"}
    assert {name for name, severity in severities.items() if severity == "page"} == pages
    assert {*severities.values()} == {"page", "ticket"}


def test_every_metric_and_every_alert_is_documented() -> None:
    page = (ROOT / "docs" / "metrics.md").read_text("utf-8")
    for family in FAMILIES.values():
        name = family.name + "_total" * (family.kind == "counter")
        labels = ", ".join(f"`{label}`" for label in family.labels)
        assert f"| `{name}` | `{family.otel_name}` | {family.kind} | {labels} |" in page
    for rule in alerts():
        if "alert" in rule:
            assert f"### {rule['alert']}\n" in page
            assert rule["annotations"]["runbook"] == f"docs/metrics.md#{rule['alert'].lower()}"


def test_batch_is_counted_like_single_events() -> None:
    clock, together, apart = FakeClock(), Metrics(), Metrics()
    gate = Gate(read(POLICY), clock=clock)
    events: list[Any] = []

    class Recorder:
        def observe(self, batch: Any) -> None:
            events.extend(batch)

    gate.add_observer(Recorder())
    for number in range(400):
        gate.admit(make_request("/search" if number % 3 else "/other", client=f"203.0.113.{number % 7}"))
        clock.advance(number % 5 / 10)
    gate.flush_events()
    for start in range(0, len(events), 64):
        together.observe(events[start : start + 64])
    for event in events:
        apart.observe([event])
    assert [rounded(each) for each in numbers(together).items()] == [rounded(each) for each in numbers(apart).items()]


def rounded(item: tuple[Any, Any]) -> Any:
    key, value = item
    return (key, value._replace(total=round(value.total, 9))) if isinstance(value, Histogram) else item
