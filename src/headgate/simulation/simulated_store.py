"""The store of a simulation: the memory store's exact algorithms behind a modelled network and modelled servers.

Modelled are: the way of a message, its loss, the time for which a server works on a batch, the queue before it, and the
two batches that a process keeps in flight to each server. Operations, failures, budget and circuit breaker are real.
"""

from __future__ import annotations

from functools import partial
from math import exp
from typing import TYPE_CHECKING, Any, Final, TypeAlias
from zlib import crc32

from headgate.decisions import Decision
from headgate.errors import StoreError, StoreTimeout, StoreUnavailable
from headgate.simulation.simulated_regions import RegionUsage
from headgate.stores.memory import MemoryStore
from headgate.stores.operations import Call, Check, Refund, Reset
from headgate.stores.redis.async_store import MAX_IN_FLIGHT
from headgate.stores.redis.breaker import CircuitBreakers
from headgate.stores.redis.encoding import Node
from headgate.stores.redis.exchange import MAX_BATCH, MIN_BUDGET_SHARE, MIN_REPLY_S

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from random import Random

    from headgate.keys import Key
    from headgate.simulation.scenario import NetworkModel, ServerModel
    from headgate.simulation.virtual_time import VirtualTime

__all__ = ["Done", "SimulatedShard", "SimulatedStore"]

Done: TypeAlias = "Callable[[Any, int], None]"
"""Receives the result of an operation, or its StoreError, and when the server executed it, in virtual nanoseconds."""

RETRANSMISSION_NS: Final = 200_000_000
"""The least time after which TCP sends a lost packet again."""


class SimulatedShard:
    """A server: a single thread that works on one batch after the other. It is the clock of its counters."""

    def __init__(self, number: int, time: VirtualTime, model: ServerModel) -> None:
        self.number = number
        self.time = time
        self.model = model
        self.skew_us = 0
        self.slowdown = 1.0
        self.failure: str | None = None
        """None, "refuse" if connections are refused, or "hang" if nothing is answered."""
        self.calls = self.background_calls = self.batches = self.losses = 0
        self.busy_ns = 0
        self._epochs = 0
        self._free_ns = 0
        self._exec_ns = 0
        self.members: dict[str, int] = {}
        self.restart(loses_data=True)
        self.losses = 0

    def now_us(self) -> int:
        return (self._exec_ns or self.time.now_ns) // 1000 + self.skew_us

    def restart(self, *, loses_data: bool) -> None:
        if loses_data:
            self.losses += 1
            self.epoch: str | None = None
            self.store = MemoryStore(self, max_keys=10_000_000)
            self._epochs += 1
            self.usage = RegionUsage(f"{self.number}-{self._epochs}")
            self.members.clear()

    def serve(self, calls: Sequence[Call]) -> tuple[list[Any], int]:
        """Execute a batch that arrives now: the results, and the instant at which they are sent back."""
        work_ns = round((self.model.batch_ns + self.model.call_ns * len(calls)) * self.slowdown)
        end_ns = max(self.time.now_ns, self._free_ns) + work_ns
        self._free_ns = end_ns
        self.busy_ns += work_ns
        self.calls += len(calls)
        self.batches += 1
        return self.execute(calls, end_ns), end_ns

    def execute(self, calls: Sequence[Call], at_ns: int) -> list[Any]:
        self._exec_ns = at_ns
        try:
            return [self._run(call) for call in calls]
        finally:
            self._exec_ns = 0

    def queue_ns(self) -> int:
        """The time that a message waits before the server looks at it."""
        return max(0, self._free_ns - self.time.now_ns)

    def _run(self, call: Call) -> Any:
        if not isinstance(call, Check):
            return self.store.run(call)
        decision = self.store.decide(call)
        if not decision.allowed or not call.cost:
            return decision
        if all(verdict[0] >= cost for verdict, cost in zip(decision.verdicts, call.costs, strict=True)):
            return decision
        # As the scripts do: with the answer to the last request that passes goes the time of the next one.
        again = self.store.decide(Check(call.keys, call.cost))
        return decision._replace(next_allowed_us=max((verdict[1] for verdict in again.verdicts), default=0))


class SimulatedStore:
    """The store of one process: a `MaintainedStore` whose operations end with a callback."""

    def __init__(
        self,
        shards: Sequence[SimulatedShard],
        network: NetworkModel,
        *,
        budget: float,
        random: Random,
        is_cut_off: Callable[[int], bool],
    ) -> None:
        self.shards = shards
        self.budget = budget
        self.time = shards[0].time
        self.is_cut_off = is_cut_off
        """True for the number of a shard that this process cannot reach."""
        self.breakers = CircuitBreakers(lambda: self.time.now_ns / 1_000_000_000)
        self.calls = self.round_trips = 0
        self._network, self._random = network, random
        self._nodes: list[Node | None] = [Node(f"shard-{shard.number}", 6379) for shard in shards]
        if len(shards) == 1:
            self._nodes = [None]
        self._lanes = [_Lane(self, shard, node) for shard, node in zip(shards, self._nodes, strict=True)]

    @property
    def stats(self) -> dict[str, int]:
        return {"calls": self.calls, "round_trips": self.round_trips}

    def submit(self, call: Call, done: Done) -> None:
        """Carry out an operation, and pass its result to `done`."""
        if len(self._lanes) == 1:
            self._lanes[0].submit(call, done)
            return
        keys = call.keys if isinstance(call, Check | Reset) else (call.key,)
        shards = [self.shard_of(key) for key in keys]
        if len(set(shards)) == 1:
            self._lanes[shards[0]].submit(call, done)
        else:
            _SplitCheck(self, call, shards, done)

    def submit_to(self, shard: int, call: Call, done: Done) -> None:
        self._lanes[shard].submit(call, done)

    def shard_of(self, key: Key) -> int:
        return crc32(f"{key.limit.space}|{key.identity}".encode()) % len(self.shards)

    def one_way_ns(self) -> int:
        """The time of a message on its way; a lost one arrives when it is sent again."""
        network, random = self._network, self._random
        way_ns = network.round_trip_ns / 2
        if network.jitter:
            way_ns *= exp(random.gauss(0.0, network.jitter))
        if network.loss and random.random() < network.loss:
            way_ns += RETRANSMISSION_NS
        return round(way_ns)

    # ---------------------------------------------------------------- what maintenance needs

    def background_client(self) -> SimulatedClient:
        return SimulatedClient(self)

    def rollout_follower(self, client: SimulatedClient) -> Any:
        return _NoRollout()

    def message_sources(self) -> list[None]:
        return []

    def subscriber(self, source: Any, **callbacks: Any) -> Any:
        raise NotImplementedError("a simulated store has no messages")

    def is_available(self, call: Call) -> bool:
        keys = call.keys if isinstance(call, Check | Reset) else (call.key,)
        down = self.breakers.open_breakers()
        return down.keys().isdisjoint([self._nodes[self.shard_of(key)] for key in keys])

    def preconnect(self, node: Node | None, *, wait: float) -> None:
        """Nothing to do: connections are not modelled."""

    def drop_preconnected(self, node: Node | None) -> None:
        """Nothing to do."""

    def warm(self, *, wait: float = 0) -> None:
        """Nothing to do."""

    def set_budget(self, budget: float) -> None:
        self.budget = budget

    def nodes(self) -> list[Node | None]:
        return self._nodes

    def address(self, node: Node | None) -> str:
        return "shard-0" if node is None else node.host

    def shard_at(self, node: Node | None) -> SimulatedShard:
        return self.shards[self._nodes.index(node)]

    def close(self) -> None:
        """Nothing to close."""

    def trouble(self, shard: SimulatedShard, timeout_s: float) -> StoreError | None:
        """The error of an operation that the background client sends now; None if the shard answers in time."""
        if self.is_cut_off(shard.number) or shard.failure == "hang":
            return StoreTimeout("Redis did not answer in time")
        if shard.failure == "refuse":
            return StoreUnavailable("cannot reach Redis: connection refused")
        work_ns = (shard.model.batch_ns + shard.model.call_ns) * shard.slowdown
        if self._network.round_trip_ns + shard.queue_ns() + work_ns > timeout_s * 1_000_000_000:
            return StoreTimeout("Redis did not answer in time")
        return None


class _Lane:
    """The operations of a process for one shard: at most so many batches in flight; the others wait for the next."""

    def __init__(self, store: SimulatedStore, shard: SimulatedShard, node: Node | None) -> None:
        self._store, self._shard, self._node = store, shard, node
        self._waiting: list[tuple[Call, Done, int]] = []
        self._in_flight: list[_Batch] = []
        self._has_failed = False

    def submit(self, call: Call, done: Done) -> None:
        breaker = self._store.breakers[self._node]
        if breaker.is_open:
            done(StoreUnavailable(str(breaker.refusal())), 0)
            return
        self._waiting.append((call, done, self._store.time.now_ns))
        if len(self._in_flight) < MAX_IN_FLIGHT:
            self._send()

    def _send(self) -> None:
        store, time = self._store, self._store.time
        entries, self._waiting = self._waiting[:MAX_BATCH], self._waiting[MAX_BATCH:]
        batch = _Batch(entries)
        self._in_flight.append(batch)
        store.calls += len(entries)
        store.round_trips += 1
        # The budget includes the time spent waiting; see `RedisStoreBase.start_exchange`.
        least_s = min(MIN_REPLY_S, store.budget) if self._has_failed else store.budget * MIN_BUDGET_SHARE
        arrived_ns = min(entry[2] for entry in entries)
        deadline_ns = max(arrived_ns + round(store.budget * 1e9), time.now_ns + round(least_s * 1e9))
        if store.is_cut_off(self._shard.number) or self._shard.failure == "hang":
            time.at(deadline_ns, self._time_out, batch)
            return
        way_ns = store.one_way_ns()
        if self._shard.failure == "refuse":
            time.at(time.now_ns + 2 * way_ns, self._refuse, batch)
            return
        if time.now_ns + way_ns >= deadline_ns:
            time.at(deadline_ns, self._time_out, batch)
        time.at(time.now_ns + way_ns, self._arrive, batch, deadline_ns)

    def _arrive(self, batch: _Batch, deadline_ns: int) -> None:
        store, time, shard = self._store, self._store.time, self._shard
        if shard.failure is not None:
            if not batch.is_over:
                time.at(deadline_ns, self._time_out, batch)
            return
        batch.results, sent_ns = shard.serve([call for call, _, _ in batch.entries])
        batch.executed_ns = sent_ns
        reply_ns = sent_ns + store.one_way_ns()
        if batch.is_over:
            return
        if reply_ns > deadline_ns:
            time.at(deadline_ns, self._time_out, batch)
        else:
            time.at(reply_ns, self._reply, batch)

    def _reply(self, batch: _Batch) -> None:
        if batch.is_over:
            return
        self._store.breakers.succeed(self._node)
        self._has_failed = False
        self._end(batch, batch.results)

    def _time_out(self, batch: _Batch) -> None:
        if batch.is_over:
            return
        error = StoreTimeout(f"Redis did not answer within the budget of {self._store.budget * 1000:g} ms")
        self._store.breakers.fail(self._node, error)
        self._has_failed = True
        # The connection is closed, as a late reply would be taken for that of another request.
        for each in list(self._in_flight):
            self._end(each, [_copy(error) for _ in each.entries])

    def _refuse(self, batch: _Batch) -> None:
        error = StoreUnavailable("cannot reach Redis: connection refused")
        self._store.breakers.fail(self._node, error)
        self._has_failed = True
        self._end(batch, [_copy(error) for _ in batch.entries])

    def _end(self, batch: _Batch, results: list[Any]) -> None:
        batch.is_over = True
        self._in_flight.remove(batch)
        for (_, done, _), result in zip(batch.entries, results, strict=True):
            done(result, batch.executed_ns)
        if self._waiting and len(self._in_flight) < MAX_IN_FLIGHT:
            if self._store.breakers[self._node].is_open:
                waiting, self._waiting = self._waiting, []
                for _, done, _ in waiting:
                    done(StoreUnavailable(str(self._store.breakers[self._node].refusal())), 0)
            else:
                self._send()


class _Batch:
    """Operations that travel together."""

    __slots__ = ("entries", "executed_ns", "is_over", "results")

    def __init__(self, entries: list[tuple[Call, Done, int]]) -> None:
        self.entries = entries
        self.results: list[Any] = []
        self.executed_ns = 0
        self.is_over = False


class _SplitCheck:
    """A check of keys on several shards: all at the same time; what was charged is returned if one denies or fails."""

    def __init__(self, store: SimulatedStore, call: Any, shards: list[int], done: Done) -> None:
        self._store, self._call, self._done, self._shards = store, call, done, shards
        self._parts: dict[int, Any] = {}
        self._executed_ns = 0
        costs = call.costs if isinstance(call, Check) else ()
        for shard in dict.fromkeys(shards):
            indices = [index for index, each in enumerate(shards) if each == shard]
            keys = tuple([call.keys[index] for index in indices])
            if isinstance(call, Check):
                part: Call = call._replace(keys=keys, cost=tuple([costs[index] for index in indices]))
            else:
                part = Reset(keys)
            store.submit_to(shard, part, partial(self._take, shard))

    def _take(self, shard: int, result: Any, executed_ns: int) -> None:
        self._parts[shard] = result
        self._executed_ns = max(self._executed_ns, executed_ns)
        if len(self._parts) == len(set(self._shards)):
            self._finish()

    def _finish(self) -> None:
        parts = list(self._parts.values())
        error = next((part for part in parts if isinstance(part, StoreError)), None)
        if not isinstance(self._call, Check):
            self._done(error, self._executed_ns)
            return
        allowed = error is None and all(part.allowed for part in parts)
        if not allowed:
            for shard, part in self._parts.items():
                if isinstance(part, Decision) and part.allowed:
                    for key, cost in zip(part.keys, Check(part.keys, part.cost).costs, strict=True):
                        if cost:
                            undo = Refund(key, cost, None, part.at_us)
                            self._store.submit_to(shard, undo, lambda result, at_ns: None)
        if error is not None:
            self._done(error, self._executed_ns)
            return
        verdicts = {
            (key.limit.space, key.identity): verdict
            for part in parts
            for key, verdict in zip(part.keys, part.verdicts, strict=True)
        }
        call = self._call
        merged = tuple([verdicts[key.limit.space, key.identity] for key in call.keys])
        next_us = max(part.next_allowed_us for part in parts) if allowed else 0
        at_us = max(part.at_us for part in parts)
        self._done(Decision(allowed, call.keys, merged, call.id, None, at_us, next_us, call.cost), self._executed_ns)


class SimulatedClient:
    """The background client of a process. It is answered at once: the time of background work is not modelled."""

    def __init__(self, store: SimulatedStore) -> None:
        self._store = store

    def run_all(self, calls: Sequence[Call]) -> list[Any]:
        return [self._run(call) for call in calls]

    def find_primaries(
        self, suspects: Any = (), *, of: Node | None = None, timeout_s: float = 1.0
    ) -> list[Node | None]:
        return self._store.nodes()

    def read_epoch(self, node: Node | None, fresh: str, *, timeout_s: float = 1.0) -> str:
        shard = self._store.shard_at(node)
        self._check(shard, timeout_s)
        shard.epoch = shard.epoch or fresh
        return shard.epoch

    def epoch_key(self, node: Node | None) -> str:
        return self._store.address(node)

    def heartbeat(self, member: str, lifetime_us: int) -> int:
        shard = self._store.shards[0]
        self._check(shard, 1.0)
        now_us = shard.now_us()
        shard.members[member] = now_us + lifetime_us
        for name in [name for name, until_us in shard.members.items() if until_us <= now_us]:
            del shard.members[name]
        return len(shard.members)

    def leave(self, member: str) -> int:
        shard = self._store.shards[0]
        self._check(shard, 1.0)
        shard.members.pop(member, None)
        return len(shard.members)

    def home_shard(self) -> SimulatedShard:
        """The first server, which has the usage that its region shares; raises a StoreError if it does not answer."""
        shard = self._store.shards[0]
        self._check(shard, 1.0)
        return shard

    def close(self) -> None:
        """Nothing to close."""

    def _run(self, call: Any) -> Any:
        key = call.keys[0] if isinstance(call, Check | Reset) else call.key
        shard = self._store.shards[self._store.shard_of(key)]
        try:
            self._check(shard, 1.0)
        except StoreError as error:
            return error
        return shard.execute([call], shard.time.now_ns)[0]

    def _check(self, shard: SimulatedShard, timeout_s: float) -> None:
        if (error := self._store.trouble(shard, timeout_s)) is not None:
            raise error
        shard.background_calls += 1
        shard.busy_ns += shard.model.batch_ns + shard.model.call_ns


class _NoRollout:
    """The part of a node in a rollout of scripts: there is none."""

    needs_poll = is_refused = False

    def __init__(self) -> None:
        self.wake: Callable[[], None] = lambda: None

    def check_store(self) -> None:
        """The formats are always those of this version."""

    def poll(self) -> None:
        """There is no record."""


def _copy(error: StoreError) -> StoreError:
    return type(error)(*error.args)
