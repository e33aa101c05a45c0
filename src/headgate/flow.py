"""The order of a check, and of every other call that takes several steps, written once without I/O.

A flow is a generator. It yields an operation for the store, a `Pause`, or a `SingleFlight` to wait for; the result is
sent back in, or the store's error thrown. The two engines drive flows, one with threads, one with `await`.

A check goes through these steps (the block list comes before: it is about identities, which only gates know):

1. local answer: prepaid tokens, then the denial cache (`LocalTier.try_local`)
2. the store; where a cached denial has just ended, one of the identical requests asks for all of them (single flight)
3. if the store fails: the failure mode (`LocalTier.handle_failure`)
4. bookkeeping: caches, prepaid tokens, the end of an outage (`LocalTier.record_answer`)
"""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias

from headgate.decisions import Decision
from headgate.errors import ScriptError, StoreError
from headgate.leases import log_failed_release
from headgate.local.sharded_limits import merge, shard, shard_operation
from headgate.local.single_flight import SingleFlight
from headgate.local.tier import SAMPLE_MASK
from headgate.stores.operations import Check, IdempotentCheck, Leave, Refund, Renew, Withdraw

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

    from headgate.algorithms import Verdict
    from headgate.failure import Fallback
    from headgate.keys import Key
    from headgate.leases import HoldTimes
    from headgate.local.tier import LocalTier
    from headgate.stores.operations import Call

__all__ = ["Flow", "Pause", "acquire", "change", "decide", "release", "run", "start"]

FIRST_POLL_S: Final = 0.005
MAX_POLL_S: Final = 0.1
"""Interval between two attempts to take a place that may be freed at any moment; doubles from the first to the last."""

MAX_FLIGHTS: Final = 2
"""Times a request waits for the answer to another. If that answer says that more may pass, the request asks the store
itself, and each wait before that adds to its latency."""

Flow: TypeAlias = "Generator[Any, Any, Any]"

_pick: Final = Random().randrange
"""Chooses the shard of a limit with `split`."""


class Pause(NamedTuple):
    """Wait for so long, then continue the flow."""

    seconds: float


def start(check: Check, local: LocalTier, fallback: Fallback) -> Decision | Flow | None:
    """Begin a check: return its decision if it is known locally, or the flow that leads to it.

    None is the common case, in which nothing is known: the engine sends the check to the store, then calls
    `LocalTier.record_answer` or `LocalTier.handle_failure`. It does so without a generator, as every request pays.
    """
    for key in check[0]:
        if key[0].split > 1:
            return _decide_sharded(check, local, fallback)
    local.checks += 1
    if not local.is_active and local.checks & SAMPLE_MASK:
        return None
    found = local.try_local(check, fallback)
    return found if found is None or isinstance(found, Decision) else _continue(check, found, local, fallback)


def decide(check: Check, local: LocalTier | None, fallback: Fallback) -> Flow:
    """Decide a check; without a local tier, which a store in memory does not need, the store alone does."""
    if local is None:
        return (yield check)
    found = start(check, local, fallback)
    if found is None:
        found = _continue(check, None, local, fallback)
    return found if isinstance(found, Decision) else (yield from found)


def change(operation: Call, local: LocalTier | None, fallback: Fallback | None = None) -> Flow:
    """Run an operation that is not a check; without a fallback, an error of the store is raised."""
    if local is None:
        return (yield operation)
    operation = shard_operation(operation, _pick)
    try:
        return (yield operation)
    except StoreError as error:
        local.record_failure(error)
        if fallback is None:
            raise
        return fallback.answer(operation, error)
    finally:  # also after an error: the operation may have been carried out
        local.invalidate(operation)


def run(operation: Call, local: LocalTier | None, fallback: Fallback) -> Flow:
    """Run any operation: a check with its failure mode, all others without."""
    return decide(operation, local, fallback) if isinstance(operation, Check) else change(operation, local)


def release(
    keys: list[Key],
    id: str,
    local: LocalTier | None,
    fallback: Fallback,
    *,
    hold_times: HoldTimes,
    elapsed: Callable[[], float],
) -> Flow:
    """End the leases of a hold. A failure is logged and not raised: the lease expires by itself."""
    for key in keys:
        hold_times.record(key.limit, elapsed())
        with log_failed_release(key, id):
            yield from change(Leave(key, id), local, fallback)


def acquire(
    check: Check,
    local: LocalTier | None,
    fallback: Fallback,
    *,
    timeout: float | None,
    elapsed: Callable[[], float],
) -> Flow:
    """Wait until a check is allowed; return the denial as soon as waiting cannot help within the timeout."""
    held = {} if timeout is None else (yield from _find_held(check, local, fallback))
    poll = FIRST_POLL_S
    while True:
        decision: Decision = yield from decide(check, local, fallback)
        left = None if timeout is None else timeout - elapsed()
        if decision.allowed:
            if decision.delay_us and left is not None and decision.delay > left:
                yield from _undo(check, decision, local, fallback, held)
                peeked: Decision = yield from decide(Check(check.keys, 0, check.id), local, fallback)
                return peeked._replace(allowed=False, verdicts=_denied_verdicts(peeked, decision))
            if decision.delay_us:
                yield Pause(decision.delay)
            return decision
        if decision.unsatisfiable:
            return decision
        wait, least_wait, may_end_early = _expected_wait(decision)
        if left is not None and (least_wait > left or left <= 0):
            return decision
        if may_end_early:
            wait, poll = min(wait, poll) if left is None else min(wait, poll, left), min(2 * poll, MAX_POLL_S)
        yield Pause(wait)


# ---------------------------------------------------------------- steps of a check


def _continue(check: Check, found: SingleFlight | Flow | None, local: LocalTier, fallback: Fallback) -> Flow:
    """The remaining steps of a check, given what the local tier has found."""
    try:
        if found is None:
            return (yield from _ask_store(check, local))
        if isinstance(found, SingleFlight):
            return (yield from _join_flight(check, found, local))
        decision = yield from found  # a refill of prepaid tokens
        if local.outage.failures:
            local.outage.record_answer()
        return decision
    except StoreError as error:
        return local.handle_failure(check, error, fallback)


def _decide_sharded(check: Check, local: LocalTier, fallback: Fallback) -> Flow:
    decision = yield from decide(shard(check, _pick), local, fallback)
    return merge(check, decision)


def _ask_store(check: Check, local: LocalTier) -> Flow:
    sent_ns = local.now_ns()
    decision: Decision = yield check
    local.record_answer(check, decision, sent_ns)
    return decision


def _join_flight(check: Check, flight: SingleFlight, local: LocalTier, attempts: int = MAX_FLIGHTS) -> Flow:
    """Ask the store for all identical requests, or wait for the one that does, and use its answer if that is a denial
    of this request, too."""
    if flight.try_lead():
        return (yield from _lead_flight(check, flight, local))
    if not attempts or flight.is_lost:
        return (yield from _ask_store(check, local))
    received_us = local.now_ns() // 1000
    yield flight
    denial = local.denial_cache.get_from_flight(check, received_us)
    if denial is not None:
        return denial
    if flight.error is not None and not isinstance(flight.error, ScriptError):
        # As if it had been sent with the leader's request, whose time budget was its own, too; but it was never sent.
        error = type(flight.error)(*flight.error.args)
        error.may_have_happened = False
        raise error
    found = local.denial_cache.get(check)
    if isinstance(found, Decision):
        return found
    return (yield from _ask_store(check, local) if found is None else _join_flight(check, found, local, attempts - 1))


def _lead_flight(check: Check, flight: SingleFlight, local: LocalTier) -> Flow:
    decision = None
    try:
        decision = yield from _ask_store(check, local)
    except StoreError as error:
        flight.error = error
        raise
    finally:
        local.denial_cache.end_flight(check, flight, decision)
    return decision


# ---------------------------------------------------------------- steps of acquire


def _expected_wait(decision: Decision) -> tuple[float, float, bool]:
    """The wait before the next attempt, the least time until the request can pass, and whether it may pass earlier: a
    place in a concurrency limit may be freed at any moment."""
    denials = [outcome for outcome in decision.outcomes if not outcome.allowed]
    timed = [outcome for outcome in denials if outcome.limit.algorithm != "concurrency"]
    wait = max([outcome.retry_after or 0 for outcome in timed or denials], default=0)
    # A request that enters a queue waits for everything that is in the queue now.
    least = [
        outcome.reset_after if outcome.limit.algorithm == "leaky_bucket" else outcome.retry_after for outcome in timed
    ]
    return wait, max([each or 0 for each in least], default=0), not timed


def _find_held(check: Check, local: LocalTier | None, fallback: Fallback) -> Flow:
    """Find the leases that the caller holds already: `acquire` must not end these when it gives up."""
    held: dict[Key, bool] = {}
    if check.id is not None and any(key.limit.algorithm == "leaky_bucket" for key in check.keys):
        for key in check.keys:
            if key.limit.algorithm == "concurrency":
                held[key] = yield from change(Renew(key, check.id), local, fallback)
    return held


def _undo(check: Check, decision: Decision, local: LocalTier | None, fallback: Fallback, held: dict[Key, bool]) -> Flow:
    """Give up the place in a queue whose turn comes too late. With an id, the next attempt is decided anew."""
    kind = Withdraw if isinstance(check, IdempotentCheck) else Refund
    for key, cost in zip(check.keys, check.costs, strict=True):
        if key.limit.algorithm != "concurrency":
            id = check.id if kind is Withdraw else None
            yield from change(kind(key, cost, id, decision.at_us or None), local, fallback)
        elif not held.get(key):
            yield from change(Leave(key, decision.id or ""), local, fallback)


def _denied_verdicts(peeked: Decision, admitted: Decision) -> tuple[Verdict, ...]:
    """The verdicts without a request that was admitted only to wait too long: its delay is the retry time."""
    return tuple(
        (remaining, delay_us, reset_us, 0)
        for (remaining, _, reset_us, _), (_, _, _, delay_us) in zip(peeked.verdicts, admitted.verdicts, strict=True)
    )
