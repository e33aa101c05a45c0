"""TOML policies, parsed by the standard library; a scanner of keys and headers finds positions."""

from __future__ import annotations

import re
import tomllib
from functools import partial
from typing import TYPE_CHECKING, Final

from headgate.policy.formats.document import Document, Malformed, NodePosition, Path, SourcePosition, decimal, place_of

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["parse"]

DEEPEST: Final = 20
"""The depth up to which positions are recorded."""

_AT: Final = re.compile(r"(.*) \(at (?:line (\d+), column (\d+)|end of document)\)", re.DOTALL)
_BLANKS: Final = re.compile(r"(?:[ \t\r\n]|#[^\n]*)*")
_KEY: Final = re.compile(r"""[ \t]*([A-Za-z0-9_-]+|"(?:[^"\\\n]|\\.)*"|'[^'\n]*')[ \t]*""")
_SCALAR: Final = re.compile(
    r'''"""(?:\\.|[^\\])*?"""+|\'\'\'.*?\'\'\'+|"(?:[^"\\\n]|\\.)*"|'[^'\n]*'|[^,\]}#\n]+''', re.DOTALL
)


def parse(text: str) -> Document:
    try:
        return Document(tomllib.loads(text, parse_float=decimal), partial(_places, text))
    except RecursionError:
        raise Malformed("nested too deep; a policy needs no more than a few levels") from None
    except ValueError as error:  # TOMLDecodeError is one, and so is a number with too many digits
        raise _malformed(text, str(error)) from None


def _places(text: str, spots: Iterable[SourcePosition]) -> dict[SourcePosition, NodePosition]:
    found = _Scan(text).offsets
    return {spot: place_of(text, found[spot]) for spot in spots if spot in found}


def _malformed(text: str, message: str) -> Malformed:
    match = _AT.fullmatch(message)
    if match is None:
        return Malformed(f"not TOML: {message}")
    place = NodePosition(int(match[2]), int(match[3])) if match[2] else place_of(text, len(text))
    if re.match("Cannot (overwrite|declare|mutate)", message):
        lines = text.splitlines(keepends=True)[: place.line]
        read = "".join([*lines[:-1], lines[-1][: place.column]])  # so far it is TOML
        if twice := _Scan(read).twice:
            spot, first, last = twice
            message = f"{spot.path[-1]!r} is given twice, first at {place_of(text, first)}; keep one"
            return Malformed(message, place_of(text, last))
    return Malformed(f"not TOML: {match[1]}", place)


class _Scan:
    """The offsets of all keys and values of a valid TOML text."""

    def __init__(self, text: str) -> None:
        self.offsets: dict[SourcePosition, int] = {}
        self.twice: tuple[SourcePosition, int, int] | None = None
        """The last duplicate key, and its offsets."""
        self._text = text.replace("\r\n", " \n")  # as long as before, and lines end in one way
        self._index = 0
        self._lengths: dict[Path, int] = {}
        table: Path = ()
        self._note((), 0, 0)
        while self._skip_blanks():
            if self._next() == "[":
                table = self._header()
            else:
                self._pair(table)

    def _header(self) -> Path:
        start, is_list = self._index, self._text.startswith("[[", self._index)
        self._index += 2 if is_list else 1
        path: Path = ()
        keys = self._keys()
        for key in keys[:-1]:
            path = self._latest((*path, key))
            self._note(path, start, start)
        path = (*path, keys[-1])
        if not is_list:
            self._see(path, start)
        self._note(path, start, start)
        if is_list:
            self._lengths[path] = self._lengths.get(path, 0) + 1
            path = self._latest(path)
            self._note(path, start, start)
        self._index += 2 if is_list else 1
        return path

    def _pair(self, table: Path) -> None:
        start = self._index
        keys = self._keys()
        self._index += 1
        self._skip_blanks()
        for length in range(1, min(len(keys), DEEPEST)):
            self._note((*table, *keys[:length]), start, self._index)
        path = (*table, *keys)
        self._see(path, start)
        self._note(path, start, self._index)
        self._value(path)

    def _value(self, path: Path) -> None:
        opening = self._next()
        if opening not in ("[", "{"):
            match = _SCALAR.match(self._text, self._index)
            self._index = match.end() if match else len(self._text)
            return
        self._index += 1
        position = 0
        while self._skip_blanks() and self._next() not in ("]", "}"):
            if opening == "{":
                self._pair(path)
            else:
                inner = (*path, position)
                self._note(inner, self._index, self._index)
                self._value(inner)
                position += 1
            if self._skip_blanks() and self._next() == ",":
                self._index += 1
        self._index += 1

    def _keys(self) -> list[str]:
        keys: list[str] = []
        while match := _KEY.match(self._text, self._index):
            quoted = match[1][0] in "\"'"
            keys.append(tomllib.loads(f"key = {match[1]}")["key"] if quoted else match[1])
            self._index = match.end()
            if self._next() != ".":
                break
            self._index += 1
        return keys

    def _latest(self, path: Path) -> Path:
        """The path of the last table, for headers below an array of tables."""
        length = self._lengths.get(path)
        return path if length is None else (*path, length - 1)

    def _see(self, path: Path, offset: int) -> None:
        spot = SourcePosition(path, at_key=True)
        if spot in self.offsets:
            self.twice = (spot, self.offsets[spot], offset)

    def _note(self, path: Path, key: int, value: int) -> None:
        self.offsets.setdefault(SourcePosition(path, at_key=True), key)
        self.offsets.setdefault(SourcePosition(path), value)

    def _skip_blanks(self) -> bool:
        """Skip whitespace and comments; return False at the end of the text."""
        match = _BLANKS.match(self._text, self._index)
        self._index = match.end() if match else len(self._text)
        return self._index < len(self._text)

    def _next(self) -> str:
        return self._text[self._index : self._index + 1]
