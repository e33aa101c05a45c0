"""The interface of algorithms: limits in, verdicts out."""

from __future__ import annotations

from typing import Any, Final, Protocol, TypeAlias

__all__ = ["NEVER", "Algorithm", "LimitNumbers", "Verdict"]

NEVER: Final = -1
"""The retry of a request that can never pass: it costs more than the whole capacity."""

Verdict: TypeAlias = tuple[int, int, int, int]
"""(remaining, retry_after_us, reset_after_us, delay_us). Allowed is retry_after_us == 0: a request that is denied now
waits for at least a microsecond. A plain tuple, as every check creates one."""


class LimitNumbers(Protocol):
    """The numbers of a limit. The rate is `tokens` per `ticks` microseconds, quota / period in lowest terms, and
    `full` is the capacity in 1/ticks of a token."""

    @property
    def quota(self) -> int: ...
    @property
    def capacity(self) -> int: ...
    @property
    def period_us(self) -> int: ...
    @property
    def tokens(self) -> int: ...
    @property
    def ticks(self) -> int: ...
    @property
    def full(self) -> int: ...
    @property
    def calendar(self) -> Any:
        """The `Calendar` of a limit with such a period, else None."""


class Algorithm(Protocol):
    """A module of this package. State is opaque to callers; None is the state of a new key.

    A denied request consumes nothing. But a state may have to be migrated: `adopt` converts it when the limit's numbers
    have changed, and `decide` re-dates it when the clock was set back by more than a period. A store writes a migrated
    state also for a request that is denied (of cost > 0): otherwise each denial would migrate the old state anew, from
    a later instant, and `retry_after` would not be exact."""

    SHAPES_BURST: bool
    """True if `burst` is used."""

    VERSION: int
    """Part of the stored key: a change of the stored form gets a new number, and two versions run side by side."""

    def peak(self, limit: LimitNumbers) -> int:
        """The largest whole number that the arithmetic on this limit can meet; it must stay below 2**53."""

    def decide(self, state: Any, now_us: int, cost: int, limit: LimitNumbers, id: str = "") -> tuple[Any, Verdict]:
        """Return the new state and the verdict.

        A denied request, and one of cost 0, returns the same state object, unless the state lies more than a period in
        the future: then it returns the re-dated state, uncharged. Stores do not write it for cost 0."""

    def refund(self, state: Any, now_us: int, amount: int, limit: LimitNumbers, at_us: int | None = None) -> Any:
        """The state after `amount` was given back; `at_us` is when it was charged, None for "lately"."""

    def adopt(self, state: Any, now_us: int, old: LimitNumbers, new: LimitNumbers) -> Any:
        """Convert a state that was written under the numbers of `old`: `new` applies from this instant on, and what is
        used stays used."""
