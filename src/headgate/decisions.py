"""Decisions: whether a request may pass, and everything that clients, headers and operators need to know about it."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from headgate.algorithms import NEVER

if TYPE_CHECKING:
    from headgate.algorithms import Verdict
    from headgate.keys import Key
    from headgate.limits import Limit

__all__ = ["Decision", "Outcome"]


class Outcome(NamedTuple):
    """The verdict of one limit. In a denial, limits that would have let the request pass are allowed and uncharged."""

    limit: Limit
    key: Key
    allowed: bool
    remaining: int
    """The largest cost that would pass now."""
    retry_after_us: int | None
    """0 if allowed; otherwise the exact time until the same request passes, None if it never will."""
    reset_after_us: int
    """The time until the counter is as new, if nothing else happens."""
    delay_us: int
    """The delay of an admitted request in a leaky bucket; 0 elsewhere."""

    @property
    def unsatisfiable(self) -> bool:
        """True if the request costs more than the whole limit, so that waiting does not help."""
        return self.retry_after_us is None

    @property
    def retry_after(self) -> float | None:
        return None if self.retry_after_us is None else self.retry_after_us / 1_000_000

    @property
    def reset_after(self) -> float:
        return self.reset_after_us / 1_000_000

    @property
    def delay(self) -> float:
        return self.delay_us / 1_000_000


class Decision(NamedTuple):
    """The decision on a request over all its limits; true in an `if` exactly when it is allowed.

    Times are seconds as floats, and exact integers in microseconds with the suffix `_us`; `outcomes` has the verdict of
    each limit.
    """

    allowed: bool
    keys: tuple[Key, ...]
    verdicts: tuple[Verdict, ...]
    id: str | None = None
    """The id of the request. Concurrency limits hold a lease under it, and generate one if none is given."""
    degraded: str | None = None
    """The failure mode that decided in place of the store, and the error; None for an exact decision of the store."""
    at_us: int = 0
    """The instant of the decision by the store's clock."""
    next_allowed_us: int = 0
    """The time until the same request would pass again, if the store reports it; 0: at once, or not reported.

    Redis reports it for an allowed request that leaves one of its limits with less than it costs: exactly, if nothing
    else happens, and never for a lease. The memory store does not, as asking it costs no more than a cache.
    """
    cost: int | tuple[int, ...] = 0
    """The cost of the request: one number for all keys, or one for each."""

    def __bool__(self) -> bool:
        return self.allowed

    @property
    def outcomes(self) -> tuple[Outcome, ...]:
        """The verdict of each limit, in the order of the keys."""
        return tuple(
            [
                Outcome(
                    key.limit,
                    key,
                    retry_us == 0,
                    remaining,
                    None if retry_us == NEVER else retry_us,
                    reset_us,
                    delay_us,
                )
                for key, (remaining, retry_us, reset_us, delay_us) in zip(self.keys, self.verdicts, strict=True)
            ]
        )

    def consumed(self, key: Key) -> int | None:
        """The amount charged to a key: 0 if the request was denied, None if the key is not one of its keys."""
        counter = key.limit.space, key.identity
        for index, each in enumerate(self.keys):
            if (each.limit.space, each.identity) == counter:
                cost = self.cost[index] if isinstance(self.cost, tuple) else self.cost
                return cost if self.allowed else 0
        return None

    @property
    def remaining(self) -> int:
        """The largest cost that would pass now under all limits."""
        return min([verdict[0] for verdict in self.verdicts])

    @property
    def retry_after_us(self) -> int | None:
        """0 if allowed; otherwise the exact time until the same request passes; None if it never will."""
        waits = [verdict[1] for verdict in self.verdicts]
        return None if NEVER in waits else max(waits)

    @property
    def reset_after_us(self) -> int:
        """The time until every counter is as new, if nothing else happens."""
        return max([verdict[2] for verdict in self.verdicts])

    @property
    def delay_us(self) -> int:
        """The time to wait before going on, if a leaky bucket shapes the traffic; 0 elsewhere and for denials."""
        return max([verdict[3] for verdict in self.verdicts]) if self.allowed else 0

    @property
    def retry_after(self) -> float | None:
        wait_us = self.retry_after_us
        return None if wait_us is None else wait_us / 1_000_000

    @property
    def reset_after(self) -> float:
        return self.reset_after_us / 1_000_000

    @property
    def delay(self) -> float:
        return self.delay_us / 1_000_000

    @property
    def unsatisfiable(self) -> bool:
        """True if the request costs more than one of its limits can ever allow."""
        return self.retry_after_us is None

    @property
    def denied_by(self) -> tuple[str, ...]:
        """The names of all limits that denied, in the order of the keys."""
        return tuple([key.limit.name for key, verdict in zip(self.keys, self.verdicts, strict=True) if verdict[1]])

    @property
    def reason(self) -> str:
        """The reason as a text for logs and mails.

        >>> from datetime import timedelta
        >>> from headgate import Limit, Limiter
        >>> from headgate.testing import FakeClock
        >>> limiter, login = Limiter(clock=FakeClock()), Limit(1, timedelta(minutes=1), name="login")
        >>> limiter.check(login.by("ada")).reason
        'allowed: 0 left of login (1 per minute, token_bucket)'
        >>> limiter.check(login.by("ada")).reason
        'denied by login (1 per minute, token_bucket): 0 left, passes in 60 s'
        """
        if self.allowed:
            remaining = [verdict[0] for verdict in self.verdicts]
            least = min(remaining)
            tightest = self.keys[remaining.index(least)].limit
            answer = f"allowed: {least} left of {tightest.name} ({tightest})"
        else:
            answer = "; ".join([_denial(outcome) for outcome in self.outcomes if not outcome.allowed]) or "denied"
        return f"{answer} [{self.degraded}]" if self.degraded else answer


def _denial(outcome: Outcome) -> str:
    limit = outcome.limit
    if outcome.retry_after_us is None:
        fate = f"it costs more than the whole capacity of {limit.capacity}, so it can never pass"
    else:
        seconds = f"{outcome.retry_after_us / 1_000_000:.6f}".rstrip("0").rstrip(".")
        fate = f"{outcome.remaining} left, passes in {seconds} s"
    return f"denied by {limit.name} ({limit}): {fate}"
