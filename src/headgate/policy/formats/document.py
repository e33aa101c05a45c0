"""A parsed document: plain values and, on demand, their positions."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from decimal import Decimal, InvalidOperation
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias

from headgate._pace import release

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

__all__ = [
    "Document", "Malformed", "NodePosition", "Path", "SourcePosition", "Unreadable", "decimal", "place_of", "whole",
]  # fmt: skip

Path: TypeAlias = tuple[str | int, ...]
"""The keys and indices that lead to a value: ("limits", 0, "by")."""

LONGEST_NUMBER: Final = 40
"""In characters; parsing longer ones is expensive."""


class NodePosition(NamedTuple):
    """Line and column, counted from 1."""

    line: int
    column: int

    def __str__(self) -> str:
        return f"{self.line}:{self.column}"


class SourcePosition(NamedTuple):
    """The path of a value, or of its key."""

    path: Path
    at_key: bool = False


@dataclass(frozen=True, slots=True)
class Unreadable:
    """A placeholder for a value that is ambiguous or not allowed in policies."""

    remedy: str
    word: str | None = None
    """The original text, if it is a word for true or false."""


class Malformed(Exception):
    """The text is not valid in its format."""

    def __init__(self, text: str, place: NodePosition | None = None) -> None:
        super().__init__(text)
        self.place = place


@dataclass(slots=True)
class Document:
    """The values of a text: dict, list, str, int, bool, None, Decimal, datetime, date, time and `Unreadable`."""

    value: object
    places: Callable[[Iterable[SourcePosition]], dict[SourcePosition, NodePosition]]
    """Finds the positions of values. Only called to report problems, so it may be slow."""
    mistakes: list[tuple[NodePosition, str]] = field(default_factory=list)
    """Problems that the format permits but policies do not, like duplicate keys."""
    marks: dict[int, dict[Any, tuple[NodePosition, NodePosition]]] = field(default_factory=dict)
    """By id of a container, the positions of key and value of each entry, if the parser keeps them."""

    def release(self) -> None:
        """Free the sections in slices, as freeing all at once would delay other threads."""
        release(self.marks)
        for section in self.value.values() if isinstance(self.value, dict) else ():
            if isinstance(section, list | dict):
                release(section)


def place_of(text: str, offset: int) -> NodePosition:
    return NodePosition(text.count("\n", 0, offset) + 1, offset - text.rfind("\n", 0, offset))


def whole(digits: str) -> int | Unreadable:
    if len(digits) > LONGEST_NUMBER:
        return Unreadable(f"a number of {len(digits)} characters is beyond 2**53, where counting stops being exact")
    return int(digits)


def decimal(digits: str) -> Decimal | Unreadable:
    """The exact number: 16.67 is 1667/100, unlike a float."""
    if len(digits) > LONGEST_NUMBER:
        return Unreadable(f"a number of {len(digits)} characters is more exact than a limit can be")
    try:
        number = Decimal(digits)
    except InvalidOperation:
        return Unreadable(f"{digits} is out of bounds; write a plain number, like 16.67")
    if re.search("[einEIN]", digits):
        return Unreadable(f"{digits}: write a plain number, like 1000 or 16.67")
    return number
