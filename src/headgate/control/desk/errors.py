"""What the desk refuses beside what cannot be: too low a role, what is not there, and what wants a second look.

HeadgateError
├── NotAllowed                            the role is too low; `needed` is the one that may
├── NotFound                              there is no such client, override, block or version
├── NeedsConfirmation                     it can be done, and is probably a mistake; `dangers` says why
└── LogUnavailable                        the decision log cannot be read now
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, NamedTuple

from headgate.errors import HeadgateError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from headgate.control.desk.views import Role

__all__ = ["Danger", "LogUnavailable", "NeedsConfirmation", "NotAllowed", "NotFound"]


class Danger(NamedTuple):
    """Why a change is probably a mistake."""

    code: Literal["ten-times", "tenth", "wildcard-block", "policy"]
    """What is confirmed."""
    text: str


class NotAllowed(HeadgateError):
    """The role of whoever asked is too low; nothing was done."""

    def __init__(self, what: str, *, role: str, needed: Role) -> None:
        super().__init__(f"a {role} may not {what}; somebody with the role {needed} may")
        self.needed = needed


class NotFound(HeadgateError):
    """There is no such thing."""


class NeedsConfirmation(HeadgateError):
    """A change that is probably a mistake, and was not confirmed; nothing was done."""

    def __init__(self, dangers: Iterable[Danger]) -> None:
        self.dangers = tuple(dangers)
        super().__init__("; ".join(danger.text for danger in self.dangers))


class LogUnavailable(HeadgateError):
    """The decision log cannot be read now."""
