"""Loads policies. Parsing is strict, and all mistakes are reported at once with their positions."""

from __future__ import annotations

import os
import stat
from dataclasses import replace
from pathlib import PurePath
from typing import TYPE_CHECKING, Final, NamedTuple

from headgate._pace import gc_paused
from headgate.errors import InvalidInput, InvalidPolicy
from headgate.policy import scalars, schema
from headgate.policy.builder import Builder
from headgate.policy.formats import FORMATS, SUFFIXES
from headgate.policy.formats.document import Malformed, NodePosition, Path, SourcePosition
from headgate.policy.model import Policy
from headgate.policy.schema import StructValue

if TYPE_CHECKING:
    from os import PathLike

__all__ = [
    "LARGEST", "TOO_LARGE", "PolicyProblem", "PolicyProblems", "Source", "UnreadablePolicy", "build", "decoded",
    "file_content", "load", "read",
]  # fmt: skip

MOST_PROBLEMS: Final = 50
LARGEST: Final = 24 * 1024 * 1024
"""In bytes, or in characters of a text. 1,000 limits with 100,000 overrides of 200 bytes each fit in it."""
TOO_LARGE: Final = (
    f"larger than {LARGEST >> 20} MB, the most that is read; split off clients and overrides into a config store"
)


class UnreadablePolicy(InvalidPolicy):
    """A policy file that cannot be opened, or that is not a regular file."""


def load(path: str | PathLike[str]) -> Policy:
    """Load a policy file (.yaml, .yml, .toml or .json); raise InvalidPolicy if it has mistakes."""
    return read(decoded(file_content(path), path), file=str(path))


def read(text: str, *, file: str = "policy.yaml", format: str | None = None) -> Policy:
    """Parse the text of a policy; raise InvalidPolicy if it has mistakes. `file` is the file name in messages.

    `format` is "yaml", "toml" or "json"; the default depends on the file name.

    >>> read("limits: [{by: ip, bucket: 10/minute}]").rules[0].name
    'every route by ip'
    >>> read("limits: [{by: ip, bukcet: 10/minute}]")
    Traceback (most recent call last):
        ...
    headgate.errors.InvalidPolicy: policy.yaml:1:19: unknown field 'bukcet'; did you mean 'bucket'?
    """
    with gc_paused():
        source = Source(text, file, format)
        try:
            problems, warnings = PolicyProblems(), PolicyProblems()
            policy = build(source.value, problems, warnings)
            if refusal := source.refusal(problems):
                raise refusal
            return replace(policy, warnings=tuple(source.tell(warnings))) if warnings else policy
        finally:
            source.release()


def file_content(path: str | PathLike[str]) -> bytes:
    """Read a policy file without blocking: only regular files of limited size are read."""
    try:
        with open(path, "rb", opener=_open_nonblocking) as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise UnreadablePolicy([f"{path}: not a regular file; write the policy to one"])
            if status.st_size > LARGEST:
                raise InvalidPolicy([f"{path}: {TOO_LARGE}"])
            return file.read(status.st_size)  # not more, even if the file grows
    except OSError as error:
        raise UnreadablePolicy([f"{path}: cannot be read: {error.strerror}"]) from None


def decoded(content: bytes, path: str | PathLike[str]) -> str:
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise InvalidPolicy([f"{path}: not UTF-8 at byte {error.start}; save the file as UTF-8"]) from None


def _open_nonblocking(path: str, flags: int) -> int:
    return os.open(path, flags | getattr(os, "O_NONBLOCK", 0))


def build(value: object, problems: PolicyProblems, warnings: PolicyProblems) -> Policy:
    """Build the policy; it is only valid if no problem was added."""
    if value in (None, {}):
        # An empty file may be one that is being written; it must not remove all limits.
        problems.add((), "is empty; a policy has at least limits:")
        return Policy()
    kinds = _custom_kinds(value)
    entry = schema.policy(kinds).read(value, (), problems)
    if not isinstance(entry, StructValue) or problems.full:
        return Policy()
    return Builder(entry, kinds, problems, warnings).policy()


def _custom_kinds(value: object) -> list[str]:
    """The custom kinds of identity in `by`, which clients and overrides may use, too."""
    limits = value.get("limits") if isinstance(value, dict) else None
    kinds: dict[str, None] = {}
    for limit in limits if isinstance(limits, list) else ():
        try:
            kinds.update(dict.fromkeys(scalars.by(limit.get("by"))) if isinstance(limit, dict) else {})
        except InvalidInput:
            continue  # reported when the limit is parsed
    return [kind for kind in kinds if kind not in scalars.IDENTITIES]


class PolicyProblem(NamedTuple):
    """A message about a position. With `other`, it consists of `before`, the other position and `after`."""

    spot: SourcePosition | NodePosition
    before: str
    other: SourcePosition | None = None
    after: str = ""


class PolicyProblems(list[PolicyProblem]):
    """A list of problems; checks stop when it is `full`."""

    @property
    def full(self) -> bool:
        return len(self) >= MOST_PROBLEMS

    def add(self, path: Path, before: str, *, at_key: bool = False, other: Path | None = None, after: str = "") -> None:
        if not self.full:
            second = None if other is None else SourcePosition(other)
            self.append(PolicyProblem(SourcePosition(path, at_key), before, second, after))


class Source:
    """A parsed document; raises InvalidPolicy if the text is malformed."""

    def __init__(self, text: str, file: str, format: str | None) -> None:
        self.file = file
        format = format or SUFFIXES.get(PurePath(file).suffix.lower())
        if format not in FORMATS:
            remedy = "name the file .yaml, .yml, .toml or .json, or say format="
            raise InvalidPolicy([f"{file}: cannot tell its format; {remedy}"])
        if len(text) > LARGEST:
            raise InvalidPolicy([f"{file}: {TOO_LARGE}"])
        if text.startswith("\ufeff"):
            raise InvalidPolicy([f"{file}:1:1: starts with a byte order mark; save the file as UTF-8 without one"])
        try:
            text.encode()
            self._document = FORMATS[format](text)
        except UnicodeEncodeError as error:
            message = f"{file}: incomplete character at offset {error.start}; save the file as UTF-8"
            raise InvalidPolicy([message]) from None
        except Malformed as error:
            raise InvalidPolicy([_line(file, error.place, str(error))]) from None
        self.value = self._document.value

    def release(self) -> None:
        """Free the document in slices. Call it last."""
        self._document.release()

    def tell(self, problems: PolicyProblems) -> list[str]:
        """One line per problem, in the order of their positions."""
        named = [each for problem in problems for each in (problem.spot, problem.other)]
        spots = {each for each in named if isinstance(each, SourcePosition)}
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

        lines = {(place(problem.spot), text(problem)) for problem in problems}
        return [_line(self.file, where, what) for where, what in sorted(lines)]

    def refusal(self, problems: PolicyProblems) -> InvalidPolicy | None:
        """The error that lists all problems; None if there are none."""
        problems += [PolicyProblem(*each) for each in self._document.mistakes][: MOST_PROBLEMS - len(problems)]
        if not problems:
            return None
        lines = self.tell(problems)
        if problems.full:
            lines.append(f"{self.file}: these are the first {len(lines)} mistakes; there may be more")
        return InvalidPolicy(lines)


def _line(file: str, place: NodePosition | None, text: str) -> str:
    return f"{file}: {text}" if place is None else f"{file}:{place}: {text}"
