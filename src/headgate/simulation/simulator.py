"""The simulator: runs a scenario, and measures what its fleet does."""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections import Counter
from dataclasses import asdict, dataclass
from itertools import pairwise
from math import exp, log
from random import Random
from typing import TYPE_CHECKING, Any, Final
from zlib import crc32

from headgate import bounds
from headgate.bounds import OvershootMeter
from headgate.errors import StoreError
from headgate.simulation.simulated_gateways import make_gateways
from headgate.simulation.simulated_node import SimulatedNode
from headgate.simulation.simulated_store import SimulatedShard
from headgate.simulation.traffic import arrivals
from headgate.simulation.virtual_time import START_NS, VirtualTime
from headgate.stores.operations import Check

if TYPE_CHECKING:
    from collections.abc import Callable

    from headgate.limits import Limit
    from headgate.simulation.scenario import Fault, Scenario

__all__ = ["LimitResult", "SecondResult", "ShardResult", "SimulationResult", "simulate"]

SECOND_NS: Final = 1_000_000_000
DEPLOY_PAUSE_S: Final = 1.0
"""Time in which a node that is deployed gets no requests."""
_STEPS_PER_FACTOR: Final = 20.0
"""Buckets of the latency histogram per factor of e: 5 % wide."""
_ORDER_US: Final = 2_000_000
"""Time after which all requests that were admitted at an instant are known."""
_SECONDS_PER_MONTH: Final = 30 * 86_400


@dataclass(frozen=True, slots=True)
class LimitResult:
    """The use of one limit."""

    limit: str
    allows: str
    requests: int
    admitted: int
    """Tokens."""
    counters: int
    bound: int | None
    """The most that may be admitted beyond the limit by one counter; None if nothing bounds it."""
    largest_overshoot: int
    worst_counter: str | None
    bound_holds: bool


@dataclass(frozen=True, slots=True)
class ShardResult:
    """The load of one server."""

    shard: int
    region: str
    """Empty without regions."""
    calls: int
    background_calls: int
    calls_per_s: float
    peak_calls_per_s: int
    cpu: float
    """The share of one core."""
    peak_cpu: float

    @property
    def name(self) -> str:
        return f"{self.region} {self.shard}".strip()


@dataclass(frozen=True, slots=True)
class SecondResult:
    """One second of the simulation."""

    second: int
    requests: int
    admitted: int
    denied: int
    degraded: int
    """Decided without the store, by the failure mode."""
    store_calls: int
    shard_cpu: tuple[float, ...]
    p50_ms: float
    p99_ms: float


@dataclass(frozen=True, slots=True)
class SimulationResult:
    """The result of a simulation."""

    name: str
    seed: int
    scale: int
    duration_s: float
    nodes: int
    requests: int
    admitted: int
    denied: int
    errors: int
    degraded: int
    store_calls: int
    background_calls: int
    round_trips: int
    gateway_calls: int
    """Calls of gateways to nodes."""
    undecided: int
    """Requests that gateways decided without an answer of a node, or without a quota."""
    store_calls_per_request: float
    limits: tuple[LimitResult, ...]
    p50_ms: float
    p99_ms: float
    p999_ms: float
    shards: tuple[ShardResult, ...]
    node_cpu: float
    """The mean share of one core that a node spends on checks."""
    node_outage_s: float
    """The longest time for which a node decided without the store."""
    cost: dict[str, Any] | None
    seconds: tuple[SecondResult, ...]

    @property
    def bounds_hold(self) -> bool:
        return all(limit.bound_holds for limit in self.limits)

    def as_dict(self) -> dict[str, Any]:
        """The result for JSON."""
        return {**asdict(self), "bounds_hold": self.bounds_hold}


def simulate(scenario: Scenario, progress: Callable[[float], None] = lambda share: None) -> SimulationResult:
    """Run a scenario; `progress` is called with the part of the virtual time that is over."""
    logger = logging.getLogger("headgate")
    was_disabled, logger.disabled = logger.disabled, True  # the events of simulated nodes
    try:
        return _Simulation(scenario).run(progress)
    finally:
        logger.disabled = was_disabled


class _LimitUse:
    """The counters of one limit."""

    def __init__(self, limit: Limit) -> None:
        self.limit = limit
        self.requests = self.admitted = 0
        self.meters: dict[str, OvershootMeter] = {}


class _Simulation:
    def __init__(self, scenario: Scenario) -> None:
        self._scenario = scenario
        self._time = VirtualTime()
        self._random = Random(scenario.seed)
        regions, count = scenario.regions.names, scenario.store.shards
        self._shards = [SimulatedShard(number, self._time, scenario.store) for number in range(count * len(regions))]
        self._shards_of = {region: self._shards[at * count : (at + 1) * count] for at, region in enumerate(regions)}
        self._nodes = [
            SimulatedNode(number, scenario, self._shards_of, Random(f"{scenario.seed} {number}"))
            for number in range(scenario.nodes.count)
        ]
        self._region_of = [region for region in regions for _ in range(count)]
        """The region of each shard."""
        self._nodes_of = {region: [node for node in self._nodes if node.region == region] for region in regions}
        self._is_cut = False
        """True once regions were cut off from each other."""
        self._gateways = make_gateways(scenario.gateways, self._nodes, self._time, Random(f"{scenario.seed} gateways"))
        self._uses = {name: _LimitUse(limit) for name, limit in scenario.limits.items()}
        self._checks: dict[tuple[int, str], Check] = {}
        self._pending: list[tuple[int, str, str, int]] = []
        """Admitted tokens that the meters do not know yet: time, limit, identity and tokens."""
        self._requests = self._admitted = self._errors = self._degraded = self._local = 0
        self._latencies: Counter[int] = Counter()
        seconds = int(scenario.duration_s) + 1
        self._by_second = [Counter[str]() for _ in range(seconds)]
        self._latencies_by_second = [Counter[int]() for _ in range(seconds)]
        self._samples: list[tuple[int, list[int], list[int]]] = []
        """At the end of each second: store calls, and calls and busy time of each shard."""
        self._clock_steps = 0
        self._node_clock_steps = 0

    def run(self, progress: Callable[[float], None]) -> SimulationResult:
        scenario, time = self._scenario, self._time
        for fault in scenario.faults:
            time.at(START_NS + round(fault.at_s * SECOND_NS), self._start_fault, fault)
        for second in range(1, int(scenario.duration_s) + 1):
            time.at(START_NS + second * SECOND_NS, self._sample, progress)
        random = self._random
        reached = [self._nodes_of.get(source.region or "", self._nodes) for source in scenario.traffic]
        sticky = [source.is_sticky for source in scenario.traffic]
        traffic = Random(f"{scenario.seed} traffic")
        for at_ns, number, client, logged_node in arrivals(scenario, traffic):
            time.advance(at_ns)
            check = self._checks.get((number, client)) or self._new_check(number, client)
            nodes = reached[number]
            count = len(nodes)
            if logged_node >= 0:
                node = nodes[logged_node % count]
            else:
                node = nodes[crc32(client.encode()) % count if sticky[number] else int(random.random() * count)]
            self._send(number, check, node, 0)
        time.advance(START_NS + round(scenario.duration_s * SECOND_NS))
        time.advance(time.now_ns + SECOND_NS)  # for answers that are under way
        self._flush(complete=True)
        for node in self._nodes:
            node.finish()
        return self._result()

    # ---------------------------------------------------------------- requests

    def _new_check(self, number: int, client: str) -> Check:
        source = self._scenario.traffic[number]
        keys = tuple([self._scenario.limits[name].by(client) for name in source.limits])
        check = self._checks[number, client] = Check(keys, source.cost)
        return check

    def _send(self, number: int, check: Check, node: SimulatedNode, attempt: int) -> None:
        self._requests += 1
        tries = 0
        while node.is_down:  # a load balancer sends it to another one
            tries += 1
            if tries > len(self._nodes):
                self._errors += 1
                return
            node = self._nodes[(node.number + len(self._nodes_of)) % len(self._nodes)]  # of the same region
        sent_ns = self._time.now_ns

        def answer(decision: Any, at_ns: int) -> None:
            self._finish(number, check, node, attempt, sent_ns, decision, at_ns)

        if self._gateways is None:
            node.engine.decide(check, answer)
        else:
            self._gateways.decide(node, check, answer)

    def _finish(
        self, number: int, check: Check, node: SimulatedNode, attempt: int, sent_ns: int, decision: Any, at_ns: int
    ) -> None:
        now_ns, settings = self._time.now_ns, self._scenario.nodes
        second = min((sent_ns - START_NS) // SECOND_NS, len(self._by_second) - 1)
        counts = self._by_second[second]
        counts["requests"] += 1
        if now_ns == sent_ns:
            latency_ns = settings.local_ns
            self._local += 1
        else:
            latency_ns = now_ns - sent_ns + settings.call_ns
        bucket = round(log(latency_ns) * _STEPS_PER_FACTOR)
        self._latencies[bucket] += 1
        self._latencies_by_second[second][bucket] += 1
        if isinstance(decision, StoreError):
            self._errors += 1
            return
        if decision.degraded is not None:
            self._degraded += 1
            counts["degraded"] += 1
        if not decision.allowed:
            counts["denied"] += 1
            for key in check.keys:
                self._uses[key.limit.name].requests += 1
            self._retry(number, check, node, attempt, decision)
            return
        self._admitted += 1
        counts["admitted"] += 1
        at_us = at_ns // 1000
        for key, cost in zip(check.keys, check.costs, strict=True):
            use = self._uses[key.limit.name]
            use.requests += 1
            use.admitted += cost
            skew_us = 0
            if self._clock_steps and key.limit.algorithm in ("fixed_window", "sliding_window"):
                # Its windows are those of the server's clock.
                store = node.engine.store
                skew_us = store.shards[store.shard_of(key)].skew_us
            self._pending.append((at_us + skew_us, key.limit.name, key.identity, cost))

    def _retry(self, number: int, check: Check, node: SimulatedNode, attempt: int, decision: Any) -> None:
        retries = self._scenario.traffic[number].retries
        if retries is None or attempt >= retries.times or self._random.random() >= retries.share:
            return
        wait_ns = retries.after_ns
        if wait_ns is None:
            if decision.retry_after_us is None:
                return
            wait_ns = decision.retry_after_us * 1000
        at_ns = self._time.now_ns + wait_ns
        if at_ns < START_NS + self._scenario.duration_s * SECOND_NS:
            self._time.at(at_ns, self._send, number, check, node, attempt + 1)

    def _flush(self, *, complete: bool = False) -> None:
        """Pass admitted requests to the meters in the order of time, in which they do not become known."""
        pending = self._pending
        pending.sort()
        known_us = self._time.now_ns // 1000 - _ORDER_US
        end = len(pending) if complete else bisect_left(pending, (known_us,))
        for at_us, name, identity, cost in pending[:end]:
            use = self._uses[name]
            meter = use.meters.get(identity)
            if meter is None:
                meter = use.meters[identity] = OvershootMeter(use.limit)
            meter.add(at_us, cost)
        self._pending = pending[end:]

    def _sample(self, progress: Callable[[float], None]) -> None:
        self._flush()
        calls = sum([node.store_calls for node in self._nodes])
        self._samples.append(
            (calls, [shard.calls for shard in self._shards], [shard.busy_ns for shard in self._shards])
        )
        progress((self._time.now_ns - START_NS) / (self._scenario.duration_s * SECOND_NS))

    # ---------------------------------------------------------------- faults

    def _start_fault(self, fault: Fault) -> None:
        time = self._time
        concerned = [shards for region, shards in self._shards_of.items() if fault.region in (None, region)]
        shards = [shard for each in concerned for shard in (each if fault.shard is None else [each[fault.shard]])]
        nodes = self._nodes if fault.region is None else self._nodes_of[fault.region]
        nodes = nodes[: max(1, round(fault.nodes * len(nodes)))]
        match fault.kind:
            case "store_down" | "restart" if fault.kind == "store_down" or fault.shard is not None:
                for shard in shards:
                    shard.failure = fault.how if fault.kind == "store_down" else "refuse"
                    time.after(fault.for_s, self._end_failure, shard, fault.loses_data)
            case "slow_shard":
                for shard in shards:
                    shard.slowdown = fault.factor
                    time.after(fault.for_s, setattr, shard, "slowdown", 1.0)
            case "partition" if fault.region is not None:
                self._cut_off(fault.region, fault.for_s)
            case "partition":
                for node in nodes:
                    numbers = {shard.number for shard in shards}
                    node.cut_off |= numbers
                    time.after(fault.for_s, node.cut_off.difference_update, numbers)
            case "clock_step" if fault.shard is not None:
                self._clock_steps += 1
                for shard in shards:
                    shard.skew_us += round(fault.by_s * 1_000_000)
            case "clock_step":
                self._node_clock_steps += len(nodes)
                for node in nodes:
                    node.runtime.skew_us += round(fault.by_s * 1_000_000)
            case "restart":
                for node in nodes:
                    self._stop_node(node, fault.for_s, crashes=True)
            case "deploy":
                for index, node in enumerate(nodes):
                    time.after(fault.for_s * index / len(nodes), self._stop_node, node, DEPLOY_PAUSE_S)

    def _cut_off(self, region: str, seconds: float) -> None:
        """Cut a region off from the others: neither side reaches the servers of the other one."""
        self._is_cut = True
        inside = {shard.number for shard in self._shards_of[region]}
        outside = {shard.number for shard in self._shards} - inside
        for node in self._nodes:
            numbers = outside if node.region == region else inside
            node.cut_off |= numbers
            self._time.after(seconds, node.cut_off.difference_update, numbers)

    def _stop_node(self, node: SimulatedNode, seconds: float, crashes: bool = False) -> None:
        if node.is_down:
            return
        (node.crash if crashes else node.shut_down)()
        self._time.after(max(seconds, 0.001), node.start)

    def _end_failure(self, shard: SimulatedShard, loses_data: bool) -> None:
        shard.failure = None
        shard.restart(loses_data=loses_data)

    # ---------------------------------------------------------------- results

    def _result(self) -> SimulationResult:
        scenario = self._scenario
        store_calls = sum(node.store_calls for node in self._nodes)
        limits = tuple([self._limit_result(use) for use in self._uses.values()])
        shards = tuple([self._shard_result(shard) for shard in self._shards])
        calls_per_request = store_calls / self._requests if self._requests else 0.0
        answered = self._latencies.total()
        cpu_ns = self._local * scenario.nodes.local_ns + (answered - self._local) * scenario.nodes.call_ns
        if self._gateways is not None:
            cpu_ns = self._gateways.calls * scenario.nodes.call_ns
        outages = [end_ns - began_ns for node in self._nodes for began_ns, end_ns, _ in node.outages]
        return SimulationResult(
            name=scenario.name,
            seed=scenario.seed,
            scale=scenario.scale,
            duration_s=scenario.duration_s,
            nodes=scenario.nodes.count,
            requests=self._requests,
            admitted=self._admitted,
            denied=answered - self._admitted - self._errors,
            errors=self._errors,
            degraded=self._degraded,
            store_calls=store_calls,
            background_calls=sum(shard.background_calls for shard in self._shards),
            round_trips=sum(node.round_trips for node in self._nodes),
            gateway_calls=0 if self._gateways is None else self._gateways.calls,
            undecided=0 if self._gateways is None else self._gateways.undecided,
            store_calls_per_request=round(calls_per_request, 6),
            limits=limits,
            p50_ms=_quantile(self._latencies, 0.5),
            p99_ms=_quantile(self._latencies, 0.99),
            p999_ms=_quantile(self._latencies, 0.999),
            shards=shards,
            node_cpu=round(cpu_ns / scenario.duration_s / scenario.nodes.count / SECOND_NS, 6),
            node_outage_s=max(outages, default=0) / SECOND_NS,
            cost=self._cost(calls_per_request),
            seconds=tuple(self._seconds()),
        )

    def _limit_result(self, use: _LimitUse) -> LimitResult:
        worst = max(use.meters.items(), key=lambda item: item[1].largest, default=None)
        largest = 0 if worst is None else worst[1].largest
        bound = self._bound(use.limit)
        return LimitResult(
            limit=use.limit.name,
            allows=str(use.limit),
            requests=use.requests,
            admitted=use.admitted,
            counters=len(use.meters),
            bound=bound,
            largest_overshoot=largest,
            worst_counter=worst[0] if worst is not None and largest else None,
            bound_holds=bound is None or largest <= bound,
        )

    def _bound(self, limit: Limit) -> int | None:
        """The bound of all modes that were in use, given the faults and the times without the store."""
        settings, regions = self._scenario.nodes, len(self._nodes_of)
        if settings.on_failure == "open" and self._degraded:
            return None
        losses = max(shard.losses for shard in self._shards) + self._clock_steps
        beyond = 0 if self._gateways is None else self._gateways.bound(limit)
        if beyond is None:
            return None
        lease_us = 0 if limit.name in self._scenario.never_leased else settings.lease_us
        bound = beyond + bounds.prepaid(limit, lease_us) + bounds.lost_data(limit, losses)
        if limit.region in ("regional", "reconciled"):  # each region has counters of its own
            span_us = round(self._scenario.duration_s * 1_000_000)
            is_connected = limit.region == "reconciled" and not (self._is_cut or losses or self._degraded)
            shared = bounds.connected_regions(limit, regions) if is_connected else None
            bound = regions * bound + (bounds.regions(limit, regions, span_us) if shared is None else shared)
        if settings.on_failure == "local":
            for node in self._nodes:
                for began_ns, end_ns, nodes in node.outages:
                    outage_us = -(-(end_ns - began_ns) // 1000)
                    bound += bounds.local_failure(limit, settings.share, nodes, outage_us, down=1)
            stepped = self._node_clock_steps
            bound += bounds.local_failure(limit, settings.share, settings.count, 0, down=stepped) if stepped else 0
        return bound

    def _shard_result(self, shard: SimulatedShard) -> ShardResult:
        duration_s = self._scenario.duration_s
        number = shard.number
        calls = [0, *[sample[1][number] for sample in self._samples]]
        busy = [0, *[sample[2][number] for sample in self._samples]]
        return ShardResult(
            shard=number % self._scenario.store.shards,
            region=self._region_of[number],
            calls=shard.calls,
            background_calls=shard.background_calls,
            calls_per_s=round(shard.calls / duration_s, 1),
            peak_calls_per_s=max([after - before for before, after in pairwise(calls)], default=0),
            cpu=round(shard.busy_ns / duration_s / SECOND_NS, 4),
            peak_cpu=round(max([after - before for before, after in pairwise(busy)], default=0) / SECOND_NS, 4),
        )

    def _cost(self, calls_per_request: float) -> dict[str, Any] | None:
        prices, scenario = self._scenario.prices, self._scenario
        if prices is None:
            return None
        requests_per_month = self._requests * scenario.scale / scenario.duration_s * _SECONDS_PER_MONTH
        parts = {
            "nodes": prices.node * scenario.nodes.count * scenario.scale,
            "shards": prices.shard * scenario.described_shards,
            "calls": prices.million_calls * requests_per_month * calls_per_request / 1_000_000,
        }
        return {**parts, "total": sum(parts.values()), "currency": prices.currency}

    def _seconds(self) -> list[SecondResult]:
        found = []
        calls, busy = 0, [0] * len(self._shards)
        for second, (total, _, shard_busy) in enumerate(self._samples):
            counts, latencies = self._by_second[second], self._latencies_by_second[second]
            found.append(
                SecondResult(
                    second=second,
                    requests=counts["requests"],
                    admitted=counts["admitted"],
                    denied=counts["denied"],
                    degraded=counts["degraded"],
                    store_calls=total - calls,
                    shard_cpu=tuple(
                        [round((now - before) / SECOND_NS, 4) for before, now in zip(busy, shard_busy, strict=True)]
                    ),
                    p50_ms=_quantile(latencies, 0.5),
                    p99_ms=_quantile(latencies, 0.99),
                )
            )
            calls, busy = total, shard_busy
        return found


def _quantile(buckets: Counter[int], share: float) -> float:
    """The latency in milliseconds that this share of the requests does not exceed, to within 5 %."""
    left = buckets.total() * share
    for bucket in sorted(buckets):
        left -= buckets[bucket]
        if left <= 0:
            return float(f"{exp(bucket / _STEPS_PER_FACTOR) / 1_000_000:.3g}")
    return 0.0
