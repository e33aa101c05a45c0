"""Every exception that headgate raises, as one tree.

    HeadgateError
    ├── InvalidInput (also a ValueError)      an invalid argument; nothing was changed
    │   ├── InvalidLimit                      an impossible limit, or a text that is not a limit
    │   ├── InvalidKey                        an invalid identity, or limits that share a counter
    │   ├── InvalidCost                       a cost or amount that is not a whole number >= 0
    │   ├── InvalidConfiguration              a URL or an option of a limiter
    │   └── InvalidPolicy                     an invalid policy; lists all mistakes with their places
    ├── RequestDenied                         a limited function may not run now; has the decision
    ├── WaitTooLong                           a client's request was not sent: its quota is exhausted for too long
    ├── Overloaded                            a guarded call was shed, as the resource is overloaded
    └── StoreError                            the shared store could not answer
        ├── StoreUnavailable                  it could not be reached, or refused to serve
        ├── StoreTimeout                      it did not answer within the budget; the operation may have run
        └── ScriptError                       a script failed: a bug, or a foreign value in a key

To a limiter, a denied request is not an exception: it is a `Decision` whose `allowed` is false.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

__all__ = [
    "HeadgateError",
    "InvalidConfiguration",
    "InvalidCost",
    "InvalidInput",
    "InvalidKey",
    "InvalidLimit",
    "InvalidPolicy",
    "Overloaded",
    "RequestDenied",
    "ScriptError",
    "StoreError",
    "StoreTimeout",
    "StoreUnavailable",
    "WaitTooLong",
    "name_missing_extra",
]


class HeadgateError(Exception):
    """The base class of all errors that headgate raises on purpose."""


class InvalidInput(HeadgateError, ValueError):
    """An invalid argument, rejected before anything was changed; the message names the value and the remedy."""


class InvalidLimit(InvalidInput):
    """An impossible limit: quota 0, an unknown algorithm, numbers that cannot be exact."""


class InvalidKey(InvalidInput):
    """An invalid identity (None, a float), or two limits that would share one counter."""


class InvalidCost(InvalidInput):
    """A cost or an amount that is not a whole number >= 0."""


class InvalidConfiguration(InvalidInput):
    """An invalid store URL or option."""


class InvalidPolicy(InvalidInput):
    """An invalid policy, of which nothing was applied; `problems` lists each mistake with its place."""

    def __init__(self, problems: Sequence[str]) -> None:
        super().__init__("\n".join(problems))
        self.problems = tuple(problems)


class RequestDenied(HeadgateError):
    """A function with `limited` was not run because a limit denied it; `decision` has the limit and the retry time."""

    def __init__(self, decision: Any) -> None:
        super().__init__(decision)
        self.decision = decision
        """The `Decision`; untyped, as this module imports nothing."""

    def __str__(self) -> str:
        return str(self.decision.reason)


class WaitTooLong(HeadgateError):
    """A client did not send a request, as it would have to wait longer than it may; see docs/clients.md."""

    def __init__(self, method: str, host: str, seconds: float | None, allowed_s: float, cause: str) -> None:
        super().__init__(method, host, seconds, allowed_s, cause)
        self.seconds = seconds
        """The time that it would have to wait; None if waiting does not help."""
        self.cause = cause

    def __str__(self) -> str:
        method, host, seconds, allowed_s, cause = self.args
        wait = "would never be allowed" if seconds is None else f"would have to wait {seconds:.3g} s"
        return f"{method} {host} was not sent: it {wait}, and may wait {allowed_s:.3g} s ({cause})"


class Overloaded(HeadgateError):
    """A guard has shed a call before it began, because the resource is overloaded; see docs/overload.md.

    Adapters answer a request whose handler raises it with 503 and Retry-After.
    """

    def __init__(self, guard: str, priority: str, retry_after: float) -> None:
        super().__init__(guard, priority, retry_after)
        self.guard = guard
        """The name of the guard."""
        self.priority = priority
        self.retry_after = retry_after
        """Seconds after which the call may be tried again."""

    def __str__(self) -> str:
        return f"{self.guard} is overloaded: a {self.priority} call was shed; try again in {self.retry_after:g} s"


class StoreError(HeadgateError):
    """The store failed, with `on_failure="raise"`."""

    may_have_happened = False
    """True if the operation may have been carried out, so that it must not be repeated."""


class StoreUnavailable(StoreError):
    """The store could not be reached, or it refused to serve (loading, read-only, out of memory)."""


class StoreTimeout(StoreError):
    """The store did not answer within the budget; `may_have_happened` is False if the operation was not sent."""

    may_have_happened = True


class ScriptError(StoreError):
    """A script failed in the store: a bug of headgate, or a foreign value in a key."""


@contextmanager
def name_missing_extra(feature: str, extra: str, *packages: str) -> Iterator[None]:
    """Around imports for a feature: if a package is not installed, name the extra that installs it."""
    try:
        yield
    except ModuleNotFoundError as missing:
        package = (missing.name or "").partition(".")[0]
        if package not in packages:
            raise
        raise InvalidConfiguration(f"{feature} the package {package!r}: pip install 'headgate[{extra}]'") from None
