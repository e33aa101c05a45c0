"""What takes several steps, written once: generators that are driven by both limiters.

They yield what has to be done, a call or a `Pause`, and get the answer sent, or the store's failure thrown, back in.
So the rules stand here, and `limiter.py` only knows how to wait: with threads, or with `await`. The way of a single
check is in `shield.front`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeAlias

from headgate.errors import StoreError
from headgate.stores.calls import Check, Leave, Refund, Renew

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

    from headgate.algorithms import Verdict
    from headgate.decisions import Decision

__all__ = ["Fallback", "Flow", "Pause", "acquire", "ask"]


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
    while True:
        decision: Decision = yield call
        left = None if timeout is None else timeout - elapsed()
        if decision.allowed:
            if decision.delay_us and left is not None and decision.delay > left:
                yield from _give_back(call, decision, fallback)
                standing: Decision = yield call._replace(cost=0)
                return standing._replace(allowed=False, verdicts=_as_denied(standing, decision))
            if decision.delay_us:
                yield Pause(decision.delay)
            return decision
        wait = decision.retry_after
        if wait is None or (left is not None and wait > left):
            return decision
        yield Pause(wait)


def _give_back(call: Check, decision: Decision, fallback: Fallback) -> Flow:
    """Its turn in the queue would come too late: it does not take the place of another."""
    for key, cost in zip(call.keys, call.costs, strict=True):
        if key.limit.algorithm == "concurrency":
            yield from ask(Leave(key, decision.id or ""), fallback)
        else:
            yield from ask(Refund(key, cost, at_us=decision.at_us or None), fallback)


def _as_denied(standing: Decision, admitted: Decision) -> tuple[Verdict, ...]:
    """How the limits stand without a request that was admitted only to wait too long: its turn is its retry."""
    return tuple(
        (remaining, delay_us, reset_us, 0)
        for (remaining, _, reset_us, _), (_, _, _, delay_us) in zip(standing.verdicts, admitted.verdicts, strict=True)
    )
