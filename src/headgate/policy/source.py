"""The text of a policy, and messages with line and column."""

from __future__ import annotations

from pathlib import PurePath
from typing import TYPE_CHECKING, Final

from headgate.errors import InvalidPolicy
from headgate.policy.formats import FORMATS, SUFFIXES
from headgate.policy.formats.document import Malformed, NodePosition, SourcePosition

if TYPE_CHECKING:
    from headgate.policy.problems import PolicyProblem, PolicyProblems

__all__ = ["LARGEST", "TOO_LARGE", "Source"]

LARGEST: Final = 24 * 1024 * 1024
"""In bytes, or in characters of a text. 1,000 limits with 100,000 overrides of 200 bytes each fit in it."""
TOO_LARGE: Final = (
    f"larger than {LARGEST >> 20} MB, the most that is read; split off clients and overrides into a config store"
)


class Source:
    """A parsed document; raises InvalidPolicy if the text is malformed."""

    def __init__(self, text: str, file: str, format: str | None) -> None:
        self.file = file
        format = format or SUFFIXES.get(PurePath(file).suffix.lower())
        if format not in FORMATS:
            raise InvalidPolicy(
                [f"{file}: cannot tell its format; name the file .yaml, .yml, .toml or .json, or say format="]
            )
        if len(text) > LARGEST:
            raise InvalidPolicy([f"{file}: {TOO_LARGE}"])
        _check_characters(text, file)
        try:
            self._document = FORMATS[format](text)
        except Malformed as error:
            raise InvalidPolicy([_line(file, error.place, str(error))]) from None
        self.value = self._document.value

    def release(self) -> None:
        """Free the document in slices. Call it last."""
        self._document.release()

    def tell(self, problems: PolicyProblems) -> list[str]:
        """One line per problem, in the order of their positions."""
        spots = {
            each
            for problem in problems.kept
            for each in (problem.spot, problem.other)
            if isinstance(each, SourcePosition)
        }
        around = {SourcePosition(spot.path[:length]) for spot in spots for length in range(len(spot.path))}
        places = self._document.places(spots | around)

        def place(spot: SourcePosition | NodePosition) -> NodePosition:
            """The position, or that of the closest enclosing value."""
            if isinstance(spot, NodePosition):
                return spot
            while spot not in places and spot.path:
                spot = SourcePosition(spot.path[:-1])
            return places.get(spot, NodePosition(1, 1))

        def text(problem: PolicyProblem) -> str:
            other = "" if problem.other is None else str(place(problem.other))
            return f"{problem.before}{other}{problem.after}"

        lines = {(place(problem.spot), text(problem)) for problem in problems.kept}
        return [_line(self.file, where, what) for where, what in sorted(lines)]

    def refusal(self, problems: PolicyProblems) -> InvalidPolicy | None:
        """The error that lists all problems; None if there are none."""
        for where, what in self._document.mistakes:
            problems.add_placed(where, what)
        if not problems:
            return None
        lines = self.tell(problems)
        if problems.full:
            lines.append(f"{self.file}: these are the first {len(lines)} mistakes; there may be more")
        return InvalidPolicy(lines)


def _check_characters(text: str, file: str) -> None:
    if text.startswith("\ufeff"):
        raise InvalidPolicy([f"{file}:1:1: starts with a byte order mark; save the file as UTF-8 without one"])
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidPolicy([f"{file}: incomplete character at offset {error.start}; save the file as UTF-8"]) from None


def _line(file: str, place: NodePosition | None, text: str) -> str:
    return f"{file}: {text}" if place is None else f"{file}:{place}: {text}"
