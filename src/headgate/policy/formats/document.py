"""What a format makes of a text: plain values, and on demand the place where each of them stands."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from decimal import Decimal, InvalidOperation
from typing import TYPE_CHECKING, Final, NamedTuple, TypeAlias

from headgate._pace import release

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = [
    "Document",
    "Malformed",
    "NodePosition",
    "Path",
    "SourcePosition",
    "Unreadable",
    "decimal",
    "place_of",
    "whole",
]

Path: TypeAlias = tuple[str | int, ...]
"""The way from the top to a value: ("limits", 0, "by")."""

LONGEST_NUMBER: Final = 40
"""In characters. Nothing that is counted has more, and longer ones are a way to make a reader work."""


class NodePosition(NamedTuple):
    """Where something stands, as editors count: from 1."""

    line: int
    column: int

    def __str__(self) -> str:
        return f"{self.line}:{self.column}"


class SourcePosition(NamedTuple):
    """Something that has a place: a value, or the key in front of it."""

    path: Path
    at_key: bool = False


@dataclass(frozen=True, slots=True)
class Unreadable:
    """Stands in for a value that other readers may take for something else, or that no policy can hold."""

    remedy: str
    word: str | None = None
    """What was written, where it is a word for true or false."""


class Malformed(Exception):
    """The text is not of its format; there are no values."""

    def __init__(self, text: str, place: NodePosition | None = None) -> None:
        super().__init__(text)
        self.place = place


@dataclass(slots=True)
class Document(ABC):
    """The values of a text: dict, list, str, int, bool, None, Decimal, datetime, date, time and `Unreadable`."""

    value: object
    mistakes: list[tuple[NodePosition, str]] = field(default_factory=list)
    """What the format's own grammar forgives and a policy does not, like a key that is given twice."""

    @abstractmethod
    def places(self, spots: Iterable[SourcePosition]) -> dict[SourcePosition, NodePosition]:
        """Where these stand. Asked for only when there is something to say, so it may take its time."""

    def release(self) -> None:
        """Empty the sections of the document, some entries at a time: to free all at once delays other threads."""
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
    """The number as it was written: 16.67 stays 1667/100, which no float is."""
    if len(digits) > LONGEST_NUMBER:
        return Unreadable(f"a number of {len(digits)} characters is more exact than a limit can be")
    try:
        number = Decimal(digits)
    except InvalidOperation:
        return Unreadable(f"{digits} is out of all bounds; write a plain number, like 16.67")
    if re.search("[einEIN]", digits):
        return Unreadable(f"{digits}: write a plain number, like 1000 or 16.67")
    return number
