"""What a limiter asks before it asks the store, and tells afterwards. Nothing in here waits, and nothing knows a store.

A request's way is: tokens that were paid for already? a remembered denial? the store; and if that fails, what was
agreed on for then. The two limiters are the drivers that wait for the store in between.
"""

from __future__ import annotations

import time
from collections import deque
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from headgate._fork import reinit_after_fork
from headgate.decisions import Decision
from headgate.errors import ScriptError, StoreError, StoreUnavailable
from headgate.health import Health, Shard
from headgate.local.admitted_ids import AdmittedIds
from headgate.local.block_list import BlockList
from headgate.local.denial_cache import MIN_DENIALS, DenialCache
from headgate.local.hot_keys import SAMPLED_EVERY
from headgate.local.ledger import OutageLedger
from headgate.local.outage import OutageTracker
from headgate.local.prepaid import PrepaidTokens
from headgate.stores.operations import IdempotentCheck, Refund, Reset

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

    from headgate.clock import Clock
    from headgate.events import EventEmitter
    from headgate.failure import FleetShare
    from headgate.flow import Fallback
    from headgate.limits import Limit
    from headgate.local.single_flight import SingleFlight
    from headgate.stores.operations import Call, Check

__all__ = ["LOOKS", "LocalTier"]

LOOKS: Final = SAMPLED_EVERY - 1
"""A check whose number has none of these bits is looked at for what is hot."""

MOST_ROUNDS: Final = 2
"""How often a request waits for another's answer. That comes, or fails, within what is left of the other's budget; but
where it says that there is more, this one asks itself, and each wait before that is added to the time it takes."""

Way: TypeAlias = "Generator[Check | SingleFlight, Any, Decision]"
"""Yields the check to send, and is sent its decision, or an inquiry that is to be waited for; returns the answer."""


class LocalTier:
    """All that one limiter knows beside its store."""

    __slots__ = (
        *("__weakref__", "_clock", "_prepays", "_refusal", "_remembers", "admitted_ids", "blocks", "breaker", "checks"),
        *("denials", "ensure", "fleet", "is_alert", "ledger", "listener", "now_ns", "outage", "purses"),
        *("script_errors", "unspent"),
    )

    def __init__(self, herald: EventEmitter, *, clock: Clock | None, fleet: FleetShare) -> None:
        self.fleet = fleet
        self.denials = DenialCache(clock, exactly=clock is not None, knocks=MIN_DENIALS, is_heard=_is_heard)
        self.purses = PrepaidTokens(nodes=lambda: fleet.nodes)
        self.blocks = BlockList()
        """Who is blocked, as far as this process has heard."""
        self.ledger = OutageLedger(clock, nodes=lambda: fleet.nodes)
        self.outage = OutageTracker(herald)
        self.script_errors = 0
        """Answers that were errors of a script: a bug, or a foreign value, but no outage."""
        self.listener: Any = None
        """The pub/sub subscriber, once there is one."""
        self.unspent: deque[Refund] = deque()
        """What was prepaid and is to be given back."""
        self.ensure: Callable[[], None] = lambda: None
        """Called now and then while there are checks, and when there is something new to do in the background."""
        self.checks = -1
        """How many were asked for; counted by whoever asks, as this runs on every request."""
        self.is_alert = False
        """Whether anything is remembered, prepaid or amiss: else `at_once` and `answered` need not be asked."""
        self.now_ns: Callable[[], int] = time.monotonic_ns if clock is None else lambda: clock.now_us() * 1000
        """The instant to be read before the store is asked."""
        self.breaker: Any = None
        """That of the only server, where there is one."""
        self._refusal: tuple[str | None, str] = (None, "")
        """What it was opened by, and what those are told who would ask."""
        self.admitted_ids = AdmittedIds(lambda: self.now_ns() // 1000)
        self._clock = clock
        self._remembers = self._prepays = False
        reinit_after_fork(self)

    def reset_after_fork(self) -> None:
        """The parent gives back what it has prepaid, and a child looks at its first check for what there is to do."""
        self.unspent.clear()
        self.checks, self.is_alert = -1, True

    def configure(self, *, remember: int, lease_us: int) -> None:
        """Remember so many denials, and prepay hot keys for so long, from now on; 0 for neither."""
        self._remembers = remember > 0
        # An injected clock does not go on by itself: nothing that is prepaid would ever end.
        self._prepays = lease_us > 0 and self._clock is None
        self.denials.most = remember
        if self._prepays:
            self.purses.lease_us = lease_us
        if not self._remembers:
            self.denials.clear()
        if not self._prepays:
            self.stop_prepaying()
        self.is_alert = True

    def stop_prepaying(self) -> None:
        """Order no more tokens for hot keys, and queue what is held for its return to the store."""
        self._prepays = False
        self.unspent.extend(self.purses.clear())

    def look(self, call: Check) -> None:
        """Look at a check for what is hot, and around."""
        self.ensure()
        if self._prepays:
            self.purses.sample(call)
        self.is_alert = bool(self.denials or self.purses or self.outage.failures or self.admitted_ids)

    def at_once(self, call: Check, fallback: Fallback | None = None) -> Decision | Way | None:
        """The answer to a check, if it is known here; or the way to one, for a key that is prepaid, or that was denied
        until now; or None. The fallback's, where nobody asks the store now."""
        if not self.checks & LOOKS:
            self.look(call)
        if type(call) is IdempotentCheck:  # whose answer is recorded in the store, or, if it was admitted here, here
            first = self.admitted_ids.get(call) if self.admitted_ids else None
            if first is not None or not self.outage.failures:
                return first
            return self._refused(call, fallback)
        # First what is paid for: a denial may be remembered from while it was on its way.
        ready = self.purses.provide(call) if self._prepays and self.purses else None
        if ready is None:
            recalled = self.denials.recall(call) if self.denials else None
            if recalled is None:
                return self._refused(call, fallback) if self.outage.failures else None
            return recalled if isinstance(recalled, Decision) else self._way(call, recalled)
        return self._watched(ready) if self.outage.failures and not isinstance(ready, Decision) else ready

    def answered(self, call: Check, decision: Decision, asked_ns: int) -> None:
        """The store has answered, and denied, or said when it will; or something else is to be looked at."""
        if type(call) is not IdempotentCheck:
            self._learn(call, decision, asked_ns // 1000)
        elif decision.allowed and self.denials:
            # It has charged now, or some time ago, and then its numbers are of that time.
            for limit, _, identity in call.keys:
                self.denials.forget(limit.space, identity)
        if self.outage.failures:
            self.outage.note_answer()

    def _learn(self, call: Check, decision: Decision, asked_us: int) -> None:
        if self._remembers:
            self.denials.note(call, decision, asked_us)
            if self.denials and not self.is_alert:
                self.is_alert = True
                self.ensure()
        if self._prepays and not decision.allowed and self.purses:
            self.purses.deny(call, decision, asked_us)

    def _way(self, call: Check, inquiry: SingleFlight, *, rounds: int = MOST_ROUNDS) -> Way | None:
        """How the answer to a request is found whose denial is just over."""
        if inquiry.take():
            return self._asking(call, inquiry)
        if rounds and not inquiry.is_lost:
            return self._waiting(call, inquiry, rounds)
        return None

    def _asking(self, call: Check, inquiry: SingleFlight) -> Way:
        """Ask the store for all who wait, and tell them when there is an answer."""
        decision = None
        try:
            decision = yield from self._exactly(call)
        except StoreError as error:
            inquiry.error = error
            raise
        finally:
            self.denials.end(call, inquiry, decision)
        return decision

    def _waiting(self, call: Check, inquiry: SingleFlight, rounds: int) -> Way:
        """Wait for whoever asks for the same, and ask only if that says nothing of this request."""
        came_us = self.now_ns() // 1000
        yield inquiry
        brought = self.denials.brought(call, came_us)
        if brought is not None:
            return brought
        error = inquiry.error
        if error is not None and not isinstance(error, ScriptError):
            # As if it had travelled with that one, whose time was its own, too. But it was never sent.
            told = type(error)(*error.args)
            told.may_have_happened = False
            raise told
        found = self.denials.recall(call)
        if isinstance(found, Decision):
            return found
        way = None if found is None else self._way(call, found, rounds=rounds - 1)
        return (yield from way or self._exactly(call))

    def _exactly(self, call: Check) -> Way:
        """Ask the store."""
        asked_ns = self.now_ns()
        decision: Decision = yield call
        self.answered(call, decision, asked_ns)
        return decision

    def _watched(self, ordering: Way) -> Way:
        """The same; that it was answered ends an outage, too, where all that is asked for is prepaid."""
        decision = yield from ordering
        self.outage.note_answer()
        return decision

    def failed(self, call: Check, error: StoreError, fallback: Fallback) -> Decision:
        """The store has failed: the answer without it."""
        self.note_failure(error)
        return self.without_store(call, error, fallback)

    def without_store(self, call: Check, error: StoreError, fallback: Fallback) -> Decision:
        """The fallback's decision. What it admits is charged later, unless it may have been already or a script failed,
        which is not an outage. An id is admitted, and charged, once."""
        decision = fallback.decide(call, error)
        if not decision[0]:
            return decision
        if type(call) is IdempotentCheck:
            first = self.admitted_ids.record(call, decision)
            if first is not None:
                return first
        if not isinstance(error, ScriptError):
            if error.may_have_happened:
                self.ledger.note_uncertain(call)
            else:
                self.ledger.note(call)
        return decision

    def _refused(self, call: Check, fallback: Fallback | None) -> Decision | None:
        """The answer while the breaker of the only server is open, without an exception on the way; else None."""
        breaker = self.breaker
        if breaker is None or not breaker.is_open or fallback is None:
            return None
        reason, told = self._refusal
        if reason is not breaker.reason:
            reason, told = self._refusal = breaker.reason, str(breaker.refusal())
        error = StoreUnavailable(told)
        self.outage.note_failure(error)
        return self.without_store(call, error, fallback)

    def keep(self, call: Check | Refund, error: StoreError) -> None:
        """The cost of a request could not be settled: it is when the store is back, if that is certain to be once."""
        if isinstance(error, ScriptError):
            return
        if error.may_have_happened:
            if not isinstance(call, Refund):
                self.ledger.note_uncertain(call)
        elif not isinstance(call, Refund):
            self.ledger.note(call)
        elif call.at_us:
            self.ledger.note_refund(call)
        self.ensure()

    def note_failure(self, error: StoreError) -> None:
        if isinstance(error, ScriptError):
            self.script_errors += 1
        else:
            self.outage.note_failure(error)
            self.is_alert = True
        self.ensure()

    def changed(self, call: Call) -> None:
        """Counters were refunded, reset or left: what is known of them here holds no more."""
        if isinstance(call, Reset):
            for limit, _, identity in call.keys:
                self.denials.forget(limit.space, identity)
                self.purses.forget(limit.space, identity)
        elif isinstance(call, Refund):
            self.denials.forget(call.key.limit.space, call.key.identity)
            self.purses.awaken(call.key.limit.space, call.key.identity)

    def health(self, shards: tuple[Shard, ...] = ()) -> Health:
        """How all of this is, given how the servers are."""
        down = [shard for shard in shards if not shard.ready]
        degraded = bool(down or self.outage.failures)
        debt = self.ledger.debt
        return Health(
            "degraded" if degraded else "ready",
            down[0].reason if down else self.outage.reason,
            self.outage.lasts,
            self.outage.failures,
            shards,
            self.fleet.nodes,
            debt.keys,
            debt.tokens,
        )

    @property
    def stats(self) -> dict[str, int]:
        """What was answered without the store, and what was not its fault."""
        purses = self.purses.stats
        return {
            "remembered": self.denials.hits,
            "prepaid": purses.allowed + purses.denied,
            "hot_keys": purses.hot,
            "hot_keys_detected": purses.found,
            "script_errors": self.script_errors,
            "ignored_messages": 0 if self.listener is None else self.listener.ignored,
        }


def _is_heard(cost: int, limit: Limit) -> bool:
    """Refunds to counters with a tenth or more left are not announced (stores/redis/lua/refund.lua), so a denial of a
    higher cost may be outdated before this process hears of it."""
    return cost == 1 or cost * 10 <= limit.capacity
