"""What takes several steps, written once: generators that are driven by both limiters.

They yield what has to be done, a call or a `Pause`, and get the answer sent, or the store's failure thrown, back in.
So the rules stand here, and `limiter.py` only knows how to wait: with threads, or with `await`. The way of a single
check is in `shield.front`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol, TypeAlias

from headgate.errors import StoreError
from headgate.stores.operations import Check, IdempotentCheck, Leave, Refund, Renew, Withdraw

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

    from headgate.algorithms import Verdict
    from headgate.decisions import Decision
    from headgate.keys import Key

__all__ = ["Fallback", "Flow", "Pause", "acquire", "ask"]


FIRST_LOOK: Final = 0.005
LONGEST_LOOK: Final = 0.1
"""Seconds until a place is looked for again that may come free at any moment: soon at first, then less often."""


class Pause(NamedTuple):
    """Wait for so long, then go on."""

    seconds: float


class Fallback(Protocol):
    """What answers when the store fails: raises, or decides without it."""

    def decide(self, call: Check, error: StoreError) -> Decision: ...
    def tell(self, call: Refund | Renew | Leave, error: StoreError) -> bool: ...


Flow: TypeAlias = "Generator[Any, Any, Any]"
"""Yields calls and pauses."""


def ask(call: Refund | Renew | Leave, fallback: Fallback) -> Flow:
    """Whether the call took effect."""
    try:
        return (yield call)
    except StoreError as error:
        return fallback.tell(call, error)


def acquire(call: Check, fallback: Fallback, timeout: float | None, elapsed: Callable[[], float]) -> Flow:
    """A decision that is allowed, after waiting for it; or the denial, as soon as waiting cannot help in time."""
    held = {} if timeout is None else (yield from _held_already(call, fallback))
    look = FIRST_LOOK
    while True:
        decision: Decision = yield call
        left = None if timeout is None else timeout - elapsed()
        if decision.allowed:
            if decision.delay_us and left is not None and decision.delay > left:
                yield from _give_back(call, decision, fallback, held)
                standing: Decision = yield Check(call.keys, 0, call.id)
                return standing._replace(allowed=False, verdicts=_as_denied(standing, decision))
            if decision.delay_us:
                yield Pause(decision.delay)
            return decision
        if decision.unsatisfiable:
            return decision
        wait, turn, may_end_early = _prospect(decision)
        if left is not None and (turn > left or left <= 0):
            return decision
        if may_end_early:
            wait, look = min(wait, look) if left is None else min(wait, look, left), min(2 * look, LONGEST_LOOK)
        yield Pause(wait)


def _prospect(decision: Decision) -> tuple[float, float, bool]:
    """How long to wait before asking again, the least time until the request's turn can come, and whether the wait may
    end earlier: for a place in a concurrency limit, which somebody may leave at any moment."""
    denials = [outcome for outcome in decision.outcomes if not outcome.allowed]
    timed = [outcome for outcome in denials if outcome.limit.algorithm != "concurrency"]
    wait = max([outcome.retry_after or 0 for outcome in timed or denials], default=0)
    # Who gets into a queue has to wait there for all that is in it now.
    turns = [
        outcome.reset_after if outcome.limit.algorithm == "leaky_bucket" else outcome.retry_after for outcome in timed
    ]
    return wait, max([turn or 0 for turn in turns], default=0), not timed


def _held_already(call: Check, fallback: Fallback) -> Flow:
    """Which leases are the caller's own before it acquires: they are not this call's to give back."""
    held: dict[Key, bool] = {}
    if call.id is not None and any(key.limit.algorithm == "leaky_bucket" for key in call.keys):
        for key in call.keys:
            if key.limit.algorithm == "concurrency":
                held[key] = yield from ask(Renew(key, call.id), fallback)
    return held


def _give_back(call: Check, decision: Decision, fallback: Fallback, held: dict[Key, bool]) -> Flow:
    """Its turn in the queue would come too late: it does not take the place of another. An id is decided anew then."""
    kind = Withdraw if isinstance(call, IdempotentCheck) else Refund
    for key, cost in zip(call.keys, call.costs, strict=True):
        if key.limit.algorithm != "concurrency":
            yield from ask(kind(key, cost, call.id if kind is Withdraw else None, decision.at_us or None), fallback)
        elif not held.get(key):
            yield from ask(Leave(key, decision.id or ""), fallback)


def _as_denied(standing: Decision, admitted: Decision) -> tuple[Verdict, ...]:
    """How the limits stand without a request that was admitted only to wait too long: its turn is its retry."""
    return tuple(
        (remaining, delay_us, reset_us, 0)
        for (remaining, _, reset_us, _), (_, _, _, delay_us) in zip(standing.verdicts, admitted.verdicts, strict=True)
    )
