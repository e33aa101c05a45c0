"""Every exception that headgate raises, as one tree.

    HeadgateError
    ├── InvalidInput (also a ValueError)      you passed something that cannot mean anything; nothing was touched
    │   ├── InvalidLimit                      a limit that cannot exist, or a text that is not a limit
    │   ├── InvalidKey                        an identity that cannot be counted by
    │   ├── InvalidCost                       a cost or amount that is not a whole number >= 0
    │   ├── InvalidConfiguration              a URL or an option of a limiter
    │   └── InvalidPolicy                     a policy file with mistakes in it, all of them listed with their places
    ├── RequestDenied                         a function that is limited may not run now; carries the decision
    └── StoreError                            the shared store could not answer
        ├── StoreUnavailable                  it could not be reached, or it refused
        ├── StoreTimeout                      it did not answer within the budget; what was asked may have happened
        └── ScriptError                       it answered with an error of the script: a bug, or a foreign value

To a limiter, a denied request is not an exception: it is a `Decision` whose `allowed` is false.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = [
    "HeadgateError",
    "InvalidConfiguration",
    "InvalidCost",
    "InvalidInput",
    "InvalidKey",
    "InvalidLimit",
    "InvalidPolicy",
    "RequestDenied",
    "ScriptError",
    "StoreError",
    "StoreTimeout",
    "StoreUnavailable",
]


class HeadgateError(Exception):
    """The root: `except HeadgateError` catches everything that headgate raises on purpose."""


class InvalidInput(HeadgateError, ValueError):
    """A value that was refused before anything was touched; the message names the value and the remedy."""


class InvalidLimit(InvalidInput):
    """A limit that cannot exist: quota 0, an unknown algorithm, numbers beyond exactness."""


class InvalidKey(InvalidInput):
    """An identity that cannot be counted by: None, a float, two limits that would share one counter."""


class InvalidCost(InvalidInput):
    """A cost or an amount that is not a whole number >= 0."""


class InvalidConfiguration(InvalidInput):
    """A store's URL or an option of a limiter that means nothing."""


class InvalidPolicy(InvalidInput):
    """A policy with mistakes in it. None of it was applied; `problems` lists each mistake with its place."""

    def __init__(self, problems: Sequence[str]) -> None:
        super().__init__("\n".join(problems))
        self.problems = tuple(problems)


class RequestDenied(HeadgateError):
    """A function behind `limited` was not run, because a limit denied; `decision` says which, and when to come back."""

    def __init__(self, decision: Any) -> None:
        super().__init__(decision)
        self.decision = decision
        """The `Decision`, which errors, standing below everything, cannot know by its type."""

    def __str__(self) -> str:
        return str(self.decision.reason)


class StoreError(HeadgateError):
    """The shared store could not answer, and `on_failure="raise"` asked to be told."""

    may_have_happened = False
    """Whether what was asked may have been carried out all the same: then it must not be asked twice."""


class StoreUnavailable(StoreError):
    """The store could not be reached, or it refused to serve (loading, read-only, out of memory)."""


class StoreTimeout(StoreError):
    """The store did not answer within the budget. `may_have_happened` says whether it had been asked at all."""

    may_have_happened = True


class ScriptError(StoreError):
    """The store ran the script and answered with an error: a bug of ours, or a foreign value in a key."""
