"""The local tier: what a process can decide without its store, and what it learns from the store's answers.

Nothing in here waits or knows a store. `headgate.flow` has the order of the steps; this has the state they work on.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any, Final

from headgate._fork import reinit_after_fork
from headgate.errors import ScriptError, StoreError, StoreUnavailable
from headgate.health import Health, OutageReport, Shard
from headgate.local.denial_cache import MIN_DENIALS, DenialCache
from headgate.local.hot_keys import SAMPLED_EVERY
from headgate.local.ledger import OutageLedger
from headgate.local.live_clients import LiveClients
from headgate.local.outage import AdmittedIds, OutageTracker
from headgate.local.prepaid import PrepaidTokens
from headgate.runtime import SYSTEM, Runtime
from headgate.stores.operations import Deposit, IdempotentCheck, Refund, Reset

if TYPE_CHECKING:
    from collections.abc import Callable

    from headgate.clock import Clock
    from headgate.decisions import Decision
    from headgate.events import EventEmitter
    from headgate.failure import Fallback, FleetShare
    from headgate.limits import Limit
    from headgate.local.prepaid import Refill
    from headgate.local.single_flight import SingleFlight
    from headgate.stores.operations import Call, Check

__all__ = ["SAMPLE_MASK", "LocalTier"]

SAMPLE_MASK: Final = SAMPLED_EVERY - 1
"""A check whose number has none of these bits is sampled for hot keys."""


class LocalTier:
    """The local state of one limiter."""

    __slots__ = (
        *("__weakref__", "_breaker_error", "_can_cache", "_can_prepay", "_clock", "admitted_ids"),
        *("breaker", "checks", "denial_cache", "ensure", "event_emitter", "fleet", "is_active", "last_outage"),
        *("ledger", "live_clients", "listeners", "now_ns", "outage", "pick", "prepaid", "script_errors", "unspent"),
    )

    def __init__(
        self, event_emitter: EventEmitter, *, clock: Clock | None, fleet: FleetShare, runtime: Runtime = SYSTEM
    ) -> None:
        self.event_emitter, self.fleet = event_emitter, fleet
        self.denial_cache = DenialCache(
            clock,
            exact=clock is not None,
            min_denials=MIN_DENIALS,
            is_refund_announced=_is_refund_announced,
            runtime=runtime,
        )
        self.prepaid = PrepaidTokens(nodes=lambda: fleet.nodes, now_us=lambda: runtime.monotonic_ns() // 1000)
        self.live_clients = LiveClients()
        """The clients that are blocked or restricted on all nodes."""
        self.ledger = OutageLedger(clock or runtime, nodes=lambda: fleet.nodes)
        self.outage = OutageTracker(event_emitter, runtime.monotonic)
        self.last_outage: OutageReport | None = None
        """The overshoot of the last outage that was settled."""
        self.admitted_ids = AdmittedIds(lambda: self.now_ns() // 1000)
        self.script_errors = 0
        """Answers that were script errors: a bug or a foreign value, not an outage."""
        self.listeners: list[Any] = []
        """The pub/sub subscribers, once they run."""
        self.unspent: deque[Refund] = deque()
        """Prepaid tokens to return to the store."""
        self.ensure: Callable[[], None] = lambda: None
        """Starts or wakes the maintenance thread if it has work."""
        self.checks = -1
        """Checks so far; incremented by the caller, as this runs on every request."""
        self.is_active = False
        """True if anything is cached, prepaid or failing; otherwise `try_local` has nothing to offer."""
        self.now_ns: Callable[[], int] = runtime.monotonic_ns if clock is None else lambda: clock.now_us() * 1000
        """The clock of this tier. Read it before sending a check; see `record_answer`."""
        self.pick: Callable[[int], int] = runtime.random.randrange
        """Chooses the shard of a limit with `split`."""
        self.breaker: Any = None
        """The circuit breaker, if the store is a single server."""
        self._breaker_error: tuple[str | None, str] = (None, "")
        """The reason of the open breaker, and the error message made of it."""
        self._clock = clock
        self._can_cache = self._can_prepay = False
        reinit_after_fork(self)

    def reset_after_fork(self) -> None:
        """Leave the parent's prepaid tokens to the parent, and start maintenance with the first check."""
        self.unspent.clear()
        self.checks, self.is_active = -1, True

    def configure(self, *, remember: int, lease_us: int) -> None:
        """Set the size of the denial cache and the lease time of prepaid tokens; 0 turns either off."""
        self._can_cache = remember > 0
        # An injected clock does not advance by itself: prepaid tokens would never expire.
        self._can_prepay = lease_us > 0 and self._clock is None
        self.denial_cache.max_entries = remember
        if self._can_prepay:
            self.prepaid.lease_us = lease_us
        else:
            self.stop_prepaying()
        if not self._can_cache:
            self.denial_cache.clear()
        self.is_active = True

    def stop_prepaying(self) -> None:
        """Refill no more tokens, and queue those that are held for their return to the store."""
        self._can_prepay = False
        self.unspent.extend(self.prepaid.clear())

    def sample(self, check: Check) -> None:
        """Sample a check for hot keys, and update `is_active`."""
        self.ensure()
        if self._can_prepay:
            self.prepaid.sample(check)
        self.is_active = bool(self.denial_cache or self.prepaid or self.outage.failures or self.admitted_ids)

    def try_local(self, check: Check, fallback: Fallback | None = None) -> Decision | Refill | SingleFlight | None:
        """The decision on a check if it is known locally; None where the store has to be asked.

        A refill of prepaid tokens, or the single flight of requests whose cached denial has just ended, are further
        steps for `headgate.flow`. With a fallback, that answers while the circuit breaker is open.
        """
        if not self.checks & SAMPLE_MASK:
            self.sample(check)
        if type(check) is IdempotentCheck:  # recorded in the store, or here if it was admitted without the store
            first = self.admitted_ids.get(check) if self.admitted_ids else None
            if first is not None or not self.outage.failures:
                return first
            return self._decide_if_open(check, fallback)
        # Tokens first: a denial may have been cached while they were on their way.
        found: Any = self.prepaid.take(check) if self._can_prepay and self.prepaid else None
        if found is None and self.denial_cache:
            found = self.denial_cache.get(check)
        if found is None and self.outage.failures:
            found = self._decide_if_open(check, fallback)
        return found  # type: ignore[no-any-return]

    def record_answer(self, check: Check, decision: Decision, sent_ns: int) -> None:
        """Learn from the store's answer to a check that was sent after `sent_ns`."""
        if decision[0] and not decision[6] and not self.is_active:  # the common case
            return
        if type(check) is not IdempotentCheck:
            self._learn(check, decision, sent_ns // 1000)
        elif decision.allowed and self.denial_cache:
            # It was charged now or earlier; in the latter case its numbers are of that time.
            for limit, _, identity in check.keys:
                self.denial_cache.invalidate(limit.space, identity)
        if self.outage.failures:
            self.outage.record_answer()

    def _learn(self, check: Check, decision: Decision, sent_us: int) -> None:
        if self._can_cache:
            self.denial_cache.record(check, decision, sent_us)
            if self.denial_cache and not self.is_active:
                self.is_active = True
                self.ensure()
        if self._can_prepay and not decision.allowed and self.prepaid:
            self.prepaid.record_denial(check, decision, sent_us)

    def handle_failure(self, check: Check, error: StoreError, fallback: Fallback) -> Decision:
        """Record that the store failed, and decide without it."""
        self.record_failure(error)
        return self.decide_without_store(check, error, fallback)

    def decide_without_store(self, check: Check, error: StoreError, fallback: Fallback) -> Decision:
        """The fallback's decision. What it admits is charged after the outage, unless the store may have charged it
        already, or a script failed, which is not an outage. An id is admitted, and charged, once."""
        decision = fallback.decide(check, error)
        if not decision[0]:
            return decision
        if type(check) is IdempotentCheck:
            first = self.admitted_ids.record(check, decision)
            if first is not None:
                return first
        self._owe(check, error, is_bounded=not (decision.degraded or "").startswith("open"))
        return decision

    def _owe(self, check: Check, error: StoreError, *, is_bounded: bool = True) -> None:
        if isinstance(error, ScriptError):
            return
        if error.may_have_happened:
            self.ledger.record_uncertain(check)
        else:
            self.ledger.record(check, is_bounded=is_bounded)

    def _decide_if_open(self, check: Check, fallback: Fallback | None) -> Decision | None:
        """The fallback's decision if the only server's breaker is open: without raising an exception, which is slow."""
        breaker = self.breaker
        if breaker is None or not breaker.is_open or fallback is None:
            return None
        reason, message = self._breaker_error
        if reason is not breaker.reason:
            reason, message = self._breaker_error = breaker.reason, str(breaker.refusal())
        error = StoreUnavailable(message)
        self.outage.record_failure(error)
        return self.decide_without_store(check, error, fallback)

    def defer(self, operation: Check | Refund, error: StoreError) -> None:
        """Keep a charge or refund that failed until the store is back, if it cannot have been carried out."""
        if not isinstance(operation, Refund):
            self._owe(operation, error)
        elif operation.at_us and not error.may_have_happened and not isinstance(error, ScriptError):
            self.ledger.record_refund(operation)
        self.ensure()

    def record_failure(self, error: StoreError) -> None:
        if isinstance(error, ScriptError):
            self.script_errors += 1
        else:
            self.outage.record_failure(error)
            self.is_active = True
        self.ensure()

    def invalidate(self, operation: Call) -> None:
        """Drop what is cached of counters that were refunded or reset."""
        if isinstance(operation, Reset):
            for limit, _, identity in operation.keys:
                self.denial_cache.invalidate(limit.space, identity)
                self.prepaid.discard(limit.space, identity)
        elif isinstance(operation, Refund | Deposit):
            limit, _, identity = operation.key
            self.denial_cache.invalidate(limit.space, identity)
            self.prepaid.wake(limit.space, identity)

    def health(self, shards: tuple[Shard, ...] = ()) -> Health:
        """The health of the limiter, given that of its servers."""
        down = [shard for shard in shards if not shard.ready]
        outage, nodes, debt = self.outage, self.fleet.nodes, self.ledger.debt
        state: Final = "degraded" if down or outage.failures else "ready"
        reason = down[0].reason if down else outage.reason
        return Health(state, reason, outage.duration, outage.failures, shards, nodes, *debt, self.last_outage)

    @property
    def stats(self) -> dict[str, int]:
        """Counts of what was answered locally, and of errors that were not the store's."""
        prepaid = self.prepaid.stats
        return {
            "remembered": self.denial_cache.hits,
            "prepaid": prepaid.allowed + prepaid.denied,
            "hot_keys": prepaid.hot,
            "hot_keys_detected": prepaid.found,
            "script_errors": self.script_errors,
            "ignored_messages": sum([listener.ignored for listener in self.listeners]),
        }


def _is_refund_announced(cost: int, limit: Limit) -> bool:
    """False where a refund may end a denial without this process hearing of it: refunds to counters with a tenth or
    more left are not published (stores/redis/lua/refund.lua)."""
    return cost == 1 or cost * 10 <= limit.capacity
