"""Gateways of a simulated fleet: proxies that call a node for each request, or that decide within quotas.

The grants of quotas are those of production (`headgate.server.quota_grants`). Modelled are the network between
gateways and nodes, the timeout of a call, and the token bucket into which Envoy puts a grant.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from math import ceil
from typing import TYPE_CHECKING, Any, Final

from headgate import bounds, flow
from headgate.decisions import Decision
from headgate.errors import StoreError
from headgate.server.quota_grants import (
    FIRST_TTL_S,
    MAX_TTL_S,
    MIN_TTL_S,
    TTL_REPORTS,
    QuotaGrant,
    QuotaGrants,
    QuotaHolder,
    QuotaReport,
)
from headgate.simulation.simulated_node import FlowRun
from headgate.stores.operations import Call, Check, checked_refund

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Generator, Sequence
    from random import Random

    from headgate.keys import Key
    from headgate.limits import Limit
    from headgate.simulation.scenario import GatewaySettings
    from headgate.simulation.simulated_node import SimulatedEngine, SimulatedNode
    from headgate.simulation.virtual_time import VirtualTime

__all__ = ["CallingGateways", "QuotaGateways", "SimulatedGateways", "make_gateways"]

SECOND_NS: Final = 1_000_000_000


def make_gateways(
    settings: GatewaySettings | None, nodes: Sequence[SimulatedNode], time: VirtualTime, random: Random
) -> SimulatedGateways | None:
    """The gateways of a scenario; None if it has none."""
    if settings is None:
        return None
    return (QuotaGateways if settings.has_quotas else CallingGateways)(settings, nodes, time, random)


class SimulatedGateways:
    """The gateways between clients and nodes."""

    def __init__(
        self, settings: GatewaySettings, nodes: Sequence[SimulatedNode], time: VirtualTime, random: Random
    ) -> None:
        self.calls = 0
        """Calls to nodes; each bucket of a report counts as one."""
        self.undecided = 0
        """Requests that gateways decided without an answer or a quota."""
        self._settings, self._nodes, self._time, self._random = settings, nodes, time, random
        self._way_ns = settings.round_trip_ns // 2

    def decide(self, node: SimulatedNode, check: Check, answer: Callable[[Any, int], None]) -> None:
        """Decide a request that a load balancer sends to this node."""
        raise NotImplementedError

    def bound(self, limit: Limit) -> int | None:
        """The most that gateways admit beyond what nodes do; None if nothing bounds it."""
        raise NotImplementedError

    def _decide_alone(self, check: Check, is_allowed: bool) -> Decision:
        self.undecided += 1
        verdicts = tuple([(0, 0 if is_allowed else SECOND_NS // 1000, 0, 0) for _ in check.keys])
        return Decision(is_allowed, check.keys, verdicts, None, None, self._time.now_ns // 1000, 0, check.cost)


class CallingGateways(SimulatedGateways):
    """Gateways that call a node for each request, as Envoy's rate limit filter does."""

    def decide(self, node: SimulatedNode, check: Check, answer: Callable[[Any, int], None]) -> None:
        self.calls += 1
        call, time = _GatewayCall(answer), self._time
        time.at(time.now_ns + self._way_ns, self._arrive, node, check, call)
        time.at(time.now_ns + round(self._settings.timeout_s * SECOND_NS), self._fail, check, call)

    def bound(self, limit: Limit) -> int | None:
        return None if self.undecided and self._settings.allows_on_failure else 0

    def _arrive(self, node: SimulatedNode, check: Check, call: _GatewayCall) -> None:
        if node.is_down:
            self._fail(check, call)
        elif not call.is_over:
            node.engine.decide(check, lambda result, at_ns: self._reply(check, call, result, at_ns))

    def _reply(self, check: Check, call: _GatewayCall, result: Any, at_ns: int) -> None:
        self._time.at(self._time.now_ns + self._way_ns, self._end, check, call, result, at_ns)

    def _end(self, check: Check, call: _GatewayCall, result: Any, at_ns: int) -> None:
        if isinstance(result, StoreError):  # the node answers with an error of the server
            self._fail(check, call)
        elif not call.is_over:
            call.is_over = True
            call.answer(result, at_ns)

    def _fail(self, check: Check, call: _GatewayCall) -> None:
        if not call.is_over:
            call.is_over = True
            decision = self._decide_alone(check, self._settings.allows_on_failure)
            call.answer(decision, self._time.now_ns)


@dataclass(slots=True, eq=False)
class _GatewayCall:
    """A call that has no answer yet."""

    answer: Callable[[Any, int], None]
    is_over: bool = False


# ------------------------------------------------------------------ quotas


class QuotaGateways(SimulatedGateways):
    """Gateways that decide within quotas, as Envoy's rate limit quota filter does."""

    def __init__(
        self, settings: GatewaySettings, nodes: Sequence[SimulatedNode], time: VirtualTime, random: Random
    ) -> None:
        super().__init__(settings, nodes, time, random)
        self._gateways = [_QuotaGateway(number, QuotaHolder()) for number in range(settings.count)]
        self._servers: dict[int, _QuotaServer] = {}
        """By the number of the node."""
        self._early: dict[Key, int] = {}
        """Tokens admitted without a quota, by counter."""
        for gateway in self._gateways:
            time.after(settings.report_s * random.random(), self._report_all, gateway)

    def decide(self, node: SimulatedNode, check: Check, answer: Callable[[Any, int], None]) -> None:
        gateway = self._gateways[int(self._random.random() * len(self._gateways))]
        [key], now_ns = check.keys, self._time.now_ns
        [cost] = check.costs
        bucket = gateway.buckets.get(key)
        is_new = bucket is None
        if bucket is None:
            bucket = gateway.buckets[key] = _GatewayBucket(reported_ns=now_ns)
        if now_ns < bucket.until_ns:
            wait_us = bucket.take(cost, now_ns)
            verdicts = ((int(bucket.tokens), wait_us, 0, 0),)
            decision = Decision(not wait_us, check.keys, verdicts, None, None, now_ns // 1000, 0, check.cost)
        else:
            decision = self._decide_alone(check, self._settings.allows_without_quota)
            if decision.allowed:
                self._early[key] = self._early.get(key, 0) + cost
        if decision.allowed:
            bucket.allowed += cost
        else:
            bucket.denied += cost
        if is_new:
            self._report(gateway, [key])
        answer(decision, now_ns)

    def bound(self, limit: Limit) -> int | None:
        """The bound of grants, and what was admitted without one."""
        settings = self._settings
        valid_s = max(FIRST_TTL_S, min(max(settings.report_s * TTL_REPORTS, MIN_TTL_S), MAX_TTL_S))
        valid_us = round(valid_s * 1_000_000) + settings.round_trip_ns // 1000
        early = max([tokens for key, tokens in self._early.items() if key.limit is limit], default=0)
        return bounds.quota_grants(limit, valid_us) + early

    def _report_all(self, gateway: _QuotaGateway) -> None:
        self._report(gateway, [*gateway.buckets])
        self._time.after(self._settings.report_s, self._report_all, gateway)

    def _report(self, gateway: _QuotaGateway, keys: Sequence[Key]) -> None:
        if not keys:
            return
        now_ns, reports = self._time.now_ns, []
        for key in keys:
            bucket = gateway.buckets[key]
            elapsed_s = (now_ns - bucket.reported_ns) / SECOND_NS
            reports.append((key, QuotaReport(bucket.allowed, bucket.denied, elapsed_s)))
            bucket.allowed = bucket.denied = 0
            bucket.reported_ns = now_ns
        self.calls += len(reports)
        self._time.at(now_ns + self._way_ns, self._arrive, gateway, reports)

    def _arrive(self, gateway: _QuotaGateway, reports: list[tuple[Key, QuotaReport]]) -> None:
        server = self._server(gateway)
        if server is None:
            return  # no node is up; the usage of these reports is lost
        _drive(server.engine, server.settle(gateway.holder, reports), lambda grants: self._reply(gateway, grants))

    def _reply(self, gateway: _QuotaGateway, grants: list[tuple[Key, QuotaGrant | None]]) -> None:
        self._time.at(self._time.now_ns + self._way_ns, self._apply, gateway, grants)

    def _apply(self, gateway: _QuotaGateway, grants: list[tuple[Key, QuotaGrant | None]]) -> None:
        for key, grant in grants:
            if grant is None:
                gateway.buckets.pop(key, None)
            elif (bucket := gateway.buckets.get(key)) is not None:
                bucket.fill(grant, self._time.now_ns)

    def _server(self, gateway: _QuotaGateway) -> _QuotaServer | None:
        """The node that a gateway is connected to; another one after a restart, which knows nothing of its grants."""
        for attempt in range(len(self._nodes)):
            node = self._nodes[(gateway.number + attempt) % len(self._nodes)]
            if not node.is_down:
                break
        else:
            return None
        server = self._servers.get(node.number)
        if server is None or server.engine is not node.engine:
            server = self._servers[node.number] = _QuotaServer(node)
        if gateway.server is not server:
            if gateway.server is not None:
                gateway.server.grants.disconnect(gateway.holder)
            gateway.server, gateway.holder = server, QuotaHolder()
            server.grants.connect(gateway.holder)
        return server


@dataclass(slots=True, eq=False)
class _QuotaGateway:
    """A proxy with the buckets that it has grants for."""

    number: int
    holder: QuotaHolder
    server: _QuotaServer | None = None
    buckets: dict[Key, _GatewayBucket] = field(default_factory=dict)


@dataclass(slots=True, eq=False)
class _GatewayBucket:
    """The token bucket of a grant, and the requests since the last report."""

    reported_ns: int
    allowed: int = 0
    denied: int = 0
    tokens: float = 0.0
    capacity: int = 0
    rate: float = 0.0
    """Tokens per second."""
    filled_ns: int = 0
    until_ns: int = 0

    def fill(self, grant: QuotaGrant, now_ns: int) -> None:
        self.tokens = self.capacity = grant.burst if grant.tokens else 0
        self.rate = (grant.tokens - self.capacity) / grant.ttl_s
        self.filled_ns, self.until_ns = now_ns, now_ns + round(grant.ttl_s * SECOND_NS)

    def take(self, cost: int, now_ns: int) -> int:
        """Take tokens; the wait in microseconds if there are too few."""
        self.tokens = min(self.capacity, self.tokens + self.rate * (now_ns - self.filled_ns) / SECOND_NS)
        self.filled_ns = now_ns
        if self.tokens >= cost:
            self.tokens -= cost
            return 0
        left_us = -(-(self.until_ns - now_ns) // 1000)
        return min(left_us, ceil((cost - self.tokens) / self.rate * 1_000_000)) if self.rate else left_us


class _QuotaServer:
    """The quota service of one node."""

    def __init__(self, node: SimulatedNode) -> None:
        self.engine = node.engine
        limiter: Any = _SimulatedLimiter()
        self.grants = QuotaGrants(limiter, node.runtime, _Turns())

    async def settle(
        self, holder: QuotaHolder, reports: Sequence[tuple[Key, QuotaReport]]
    ) -> list[tuple[Key, QuotaGrant | None]]:
        """The next grants; None for buckets that the gateway forgets."""
        found: list[tuple[Key, QuotaGrant | None]] = []
        for key, report in reports:
            name = ((key.limit.name, key.identity),)
            if await self.grants.is_abandoned(holder, name, report):
                found.append((key, None))
                continue
            window_us = key.limit.period_us if key.limit.algorithm == "fixed_window" else None
            try:
                found.append((key, await self.grants.grant(holder, name, key, report, window_us)))
            except StoreError:
                found.append((key, QuotaGrant(0, MIN_TTL_S)))
        return found


class _SimulatedLimiter:
    """The operations of an `AsyncLimiter` that grants need; `_drive` carries them out."""

    async def check(self, key: Key, *, cost: int) -> Decision:
        decision: Decision = await _Step(Check((key,), cost))
        return decision

    async def peek(self, key: Key) -> Decision:
        return await self.check(key, cost=0)

    async def refund(self, key: Key, amount: int, *, of: Decision | None) -> bool:
        is_returned: bool = await _Step(checked_refund(key, amount, None, of))
        return is_returned


class _Step:
    """An operation on the store, for which a coroutine waits."""

    def __init__(self, call: Call) -> None:
        self.call = call

    def __await__(self) -> Generator[_Step, Any, Any]:
        result = yield self
        if isinstance(result, StoreError):
            raise result
        return result


class _Turns:
    """A lock for coroutines in virtual time: first come, first served."""

    def __init__(self) -> None:
        self.waiters: deque[Callable[[Any], None]] = deque()
        self._is_held = False

    def __await__(self) -> Generator[_Turns, Any, None]:
        yield self

    async def __aenter__(self) -> None:
        if self._is_held:
            await self  # the one that leaves passes it on
        self._is_held = True

    async def __aexit__(self, *error: object) -> None:
        if self.waiters:
            self.waiters.popleft()(None)
        else:
            self._is_held = False


def _drive(engine: SimulatedEngine, coroutine: Coroutine[Any, Any, Any], done: Callable[[Any], None]) -> None:
    """Run a coroutine whose operations an engine carries out, and pass its result on."""
    results: deque[Any] = deque()
    is_running = False

    def advance(result: Any) -> None:
        nonlocal is_running
        results.append(result)
        if is_running:  # answered at once: the loop below continues
            return
        is_running = True
        try:
            while results:
                step = coroutine.send(results.popleft())
                if isinstance(step, _Turns):
                    step.waiters.append(advance)
                elif isinstance(step.call, Check):
                    engine.decide(step.call, lambda result, at_ns: advance(result))
                else:
                    FlowRun(
                        engine,
                        flow.run(step.call, engine.tier, engine.failure, engine.router),
                        lambda result, at_ns: advance(result),
                    ).advance()
        except StopIteration as end:
            done(end.value)
        finally:
            is_running = False

    advance(None)
