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

from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias

from headgate.decisions import Decision
from headgate.errors import ScriptError, StoreError
from headgate.leases import log_failed_release
from headgate.local.sharded_limits import merge, shard, shard_operation
from headgate.local.single_flight import SingleFlight
from headgate.local.tier import SAMPLE_MASK
from headgate.regions.routing import AtHome, check_region, merge_regions, select
from headgate.stores.operations import Check, IdempotentCheck, Leave, Refund, Renew, Reset, Withdraw

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

    from headgate.algorithms import Verdict
    from headgate.failure import Fallback
    from headgate.keys import Key
    from headgate.leases import HoldTimes
    from headgate.local.tier import LocalTier
    from headgate.regions.routing import RegionRouter
    from headgate.stores.operations import Call, Deposit

__all__ = ["Flow", "Pause", "acquire", "change", "decide", "finish", "release", "run", "start"]

FIRST_POLL_S: Final = 0.005
MAX_POLL_S: Final = 0.1
"""Interval between two attempts to take a place that may be freed at any moment; doubles from the first to the last."""

MAX_FLIGHTS: Final = 2
"""Times a request waits for the answer to another. If that answer says that more may pass, the request asks the store
itself, and each wait before that adds to its latency."""

Flow: TypeAlias = "Generator[Any, Any, Any]"


class Pause(NamedTuple):
    """Wait for so long, then continue the flow."""

    seconds: float


def start(
    check: Check, local: LocalTier, fallback: Fallback, router: RegionRouter | None = None
) -> Decision | Flow | None:
    """Begin a check: return its decision if it is known locally, or the flow that leads to it.

    None is the common case, in which nothing is known: the engine sends the check to the store, then calls
    `LocalTier.record_answer` or `LocalTier.handle_failure`. It does so without a generator, as every request pays.
    """
    for key in check[0]:
        if key[0].is_composite:
            return _decide_composite(check, local, fallback, router)
    local.checks += 1
    if not local.is_active and local.checks & SAMPLE_MASK:
        return None
    found = local.try_local(check, fallback)
    return found if found is None or isinstance(found, Decision) else _continue(check, found, local, fallback)


def decide(check: Check, local: LocalTier | None, fallback: Fallback, router: RegionRouter | None = None) -> Flow:
    """Decide a check; without a local tier, which a store in memory does not need, the store alone does."""
    if local is None:
        return (yield check)
    found = start(check, local, fallback, router)
    if found is None:
        found = _continue(check, None, local, fallback)
    return found if isinstance(found, Decision) else (yield from found)


def change(
    operation: Call, local: LocalTier | None, fallback: Fallback | None = None, router: RegionRouter | None = None
) -> Flow:
    """Run an operation that is not a check; without a fallback, an error of the store is raised."""
    if local is None:
        return (yield operation)
    if router is None:
        check_region(operation.keys if isinstance(operation, Check | Reset) else (operation.key,))
        return (yield from _change_own(operation, local, fallback))
    result = None
    for step in router.route(operation):
        result = (
            yield from _change_home(step, fallback) if isinstance(step, AtHome) else _change_own(step, local, fallback)
        )
    router.record_change(operation, result=result)
    return result


def _change_home(step: AtHome, fallback: Fallback | None) -> Flow:
    try:
        return (yield step)
    except StoreError as error:
        if fallback is None:
            raise
        return fallback.answer(step.operation, error)


def _change_own(operation: Call, local: LocalTier, fallback: Fallback | None) -> Flow:
    operation = shard_operation(operation, local.pick)
    try:
        return (yield operation)
    except StoreError as error:
        local.record_failure(error)
        if fallback is None:
            raise
        return fallback.answer(operation, error)
    finally:  # also after an error: the operation may have been carried out
        local.invalidate(operation)


def run(operation: Call, local: LocalTier | None, fallback: Fallback, router: RegionRouter | None = None) -> Flow:
    """Run any operation: a check with its failure mode, all others without."""
    if isinstance(operation, Check):
        return decide(operation, local, fallback, router)
    return change(operation, local, router=router)


def release(
    keys: list[Key],
    id: str,
    local: LocalTier | None,
    fallback: Fallback,
    *,
    hold_times: HoldTimes,
    elapsed: Callable[[], float],
    router: RegionRouter | None = None,
) -> Flow:
    """End the leases of a hold. A failure is logged and not raised: the lease expires by itself."""
    for key in keys:
        hold_times.record(key.limit, elapsed())
        with log_failed_release(key, id):
            yield from change(Leave(key, id), local, fallback, router)


def acquire(
    check: Check,
    local: LocalTier | None,
    fallback: Fallback,
    *,
    timeout: float | None,
    elapsed: Callable[[], float],
    router: RegionRouter | None = None,
) -> Flow:
    """Wait until a check is allowed; return the denial as soon as waiting cannot help within the timeout."""
    held = {} if timeout is None else (yield from _find_held(check, local, fallback, router))
    poll = FIRST_POLL_S
    while True:
        decision: Decision = yield from decide(check, local, fallback, router)
        left = None if timeout is None else timeout - elapsed()
        if decision.allowed:
            if decision.delay_us and left is not None and decision.delay > left:
                yield from _undo(check, decision, local, fallback, held, router)
                peeked: Decision = yield from decide(Check(check.keys, 0, check.id), local, fallback, router)
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


def finish(
    check: Check, counted: Check, decision: Decision, local: LocalTier, fallback: Fallback, router: RegionRouter
) -> Decision | Flow:
    """The decision on a check, given that on the keys which its region counts; or the flow that leads to it."""
    if not decision[0] and (deposits := router.safe_deposits(counted, decision)):
        return _use_safe_shares(check, counted, deposits, local, fallback, router)
    return router.finish(check, counted, decision)


def _use_safe_shares(
    check: Check, counted: Check, deposits: list[Deposit], local: LocalTier, fallback: Fallback, router: RegionRouter
) -> Flow:
    """Decide again after the region's own tokens were added to the pools of reserved limits."""
    for deposit in deposits:
        yield from _change_own(deposit, local, fallback)
    decision: Decision = yield from decide(counted, local, fallback)
    return router.finish(check, counted, decision)


def _decide_composite(check: Check, local: LocalTier, fallback: Fallback, router: RegionRouter | None) -> Flow:
    """Decide a check on the shards of its keys, and on those that their region modes count."""
    if router is None:
        check_region(check.keys)
    else:
        counted = router.own_check(check)
        if counted is not check:
            decision = yield from decide(counted, local, fallback)
            finished = finish(check, counted, decision, local, fallback, router)
            return finished if isinstance(finished, Decision) else (yield from finished)
        if any(router.is_remote(key) for key in check.keys):
            return (yield from _decide_at_home(check, local, fallback, router))
    decision = yield from decide(shard(check, local.pick), local, fallback)
    return merge(check, decision)


def _decide_at_home(check: Check, local: LocalTier, fallback: Fallback, router: RegionRouter) -> Flow:
    """Decide a check first on the keys of the own region, then on those of the home region."""
    remote = [index for index, key in enumerate(check.keys) if router.is_remote(key)]
    own = [index for index in range(len(check.keys)) if index not in remote]
    parts: list[tuple[list[int], Decision]] = []
    if own:
        decision = yield from decide(select(check, own, check.keys), local, fallback, router)
        parts.append((own, decision))
    if not own or decision.allowed:
        home_keys = [router.counted(key) if router.is_remote(key) else key for key in check.keys]
        try:
            decision = yield AtHome(select(check, remote, home_keys), fallback)
        except StoreError:
            yield from _undo_own(check, own, parts, local, fallback, router)
            raise
        if not decision.allowed:
            yield from _undo_own(check, own, parts, local, fallback, router)
        parts.append((remote, decision))
    return merge_regions(check, parts)


def _undo_own(
    check: Check, own: list[int], parts: list[Any], local: LocalTier, fallback: Fallback, router: RegionRouter
) -> Flow:
    """Return what the own region was charged for a request that the home region does not admit."""
    if parts and check.cost:
        yield from _undo(select(check, own, check.keys), parts[0][1], local, fallback, {}, router)


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


def _find_held(check: Check, local: LocalTier | None, fallback: Fallback, router: RegionRouter | None = None) -> Flow:
    """Find the leases that the caller holds already: `acquire` must not end these when it gives up."""
    held: dict[Key, bool] = {}
    if check.id is not None and any(key.limit.algorithm == "leaky_bucket" for key in check.keys):
        for key in check.keys:
            if key.limit.algorithm == "concurrency":
                held[key] = yield from change(Renew(key, check.id), local, fallback, router)
    return held


def _undo(
    check: Check,
    decision: Decision,
    local: LocalTier | None,
    fallback: Fallback,
    held: dict[Key, bool],
    router: RegionRouter | None = None,
) -> Flow:
    """Give up the place in a queue whose turn comes too late. With an id, the next attempt is decided anew."""
    kind = Withdraw if isinstance(check, IdempotentCheck) else Refund
    for key, cost in zip(check.keys, check.costs, strict=True):
        if key.limit.algorithm != "concurrency":
            id = check.id if kind is Withdraw else None
            yield from change(kind(key, cost, id, decision.at_us or None), local, fallback, router)
        elif not held.get(key):
            yield from change(Leave(key, decision.id or ""), local, fallback, router)


def _denied_verdicts(peeked: Decision, admitted: Decision) -> tuple[Verdict, ...]:
    """The verdicts without a request that was admitted only to wait too long: its delay is the retry time."""
    return tuple(
        (remaining, delay_us, reset_us, 0)
        for (remaining, _, reset_us, _), (_, _, _, delay_us) in zip(peeked.verdicts, admitted.verdicts, strict=True)
    )
