"""JSON policies, parsed by the standard library; positions are only computed to report problems."""

from __future__ import annotations

import re
from functools import partial
from json import JSONDecodeError, JSONDecoder
from typing import TYPE_CHECKING, Any, Final

from headgate.policy.formats.document import (
    Document,
    Malformed,
    NodePosition,
    Path,
    SourcePosition,
    Unreadable,
    decimal,
    place_of,
    whole,
)

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator

__all__ = ["parse"]

_BLANKS: Final = re.compile(r"[ \t\n\r]*")


def parse(text: str) -> Document:
    doubled: list[dict[str, Any]] = []

    def mapping(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        made = dict(pairs)
        if len(made) != len(pairs):
            doubled.append(made)
        return made

    def constant(word: str) -> Unreadable:
        return Unreadable(f"{word} is not JSON; write a plain number, like 16.67")

    decoder = JSONDecoder(object_pairs_hook=mapping, parse_float=decimal, parse_int=whole, parse_constant=constant)
    try:
        document = Document(decoder.decode(text), partial(_places, text))
    except JSONDecodeError as error:
        raise Malformed(f"not JSON: {error.msg}", NodePosition(error.lineno, error.colno)) from None
    except RecursionError:
        raise Malformed("nested too deep; a policy needs no more than a few levels") from None
    if doubled:
        document.mistakes += _given_twice(text, document.value, {id(each) for each in doubled})
    return document


def _places(text: str, spots: Iterable[SourcePosition]) -> dict[SourcePosition, NodePosition]:
    found = _offsets(text, {spot.path for spot in spots})
    return {spot: place_of(text, offsets[-1]) for spot, offsets in found.items()}


def _given_twice(text: str, value: object, doubled: Collection[int]) -> Iterator[tuple[NodePosition, str]]:
    """Each key that occurs twice in one of these mappings, at the position of the last one."""
    keys = {(*path, key) for path, mapping in _mappings(value, ()) if id(mapping) in doubled for key in mapping}
    for spot, offsets in _offsets(text, keys).items():
        if spot.at_key and len(offsets) > 1:
            first = place_of(text, offsets[0])
            yield place_of(text, offsets[-1]), f"{spot.path[-1]!r} is given twice, first at {first}; keep one"


def _mappings(value: object, path: Path) -> Iterator[tuple[Path, dict[str, Any]]]:
    if isinstance(value, dict):
        yield path, value
        for key, each in value.items():
            yield from _mappings(each, (*path, key))
    elif isinstance(value, list):
        for index, each in enumerate(value):
            yield from _mappings(each, (*path, index))


def _offsets(text: str, wanted: Collection[Path]) -> dict[SourcePosition, list[int]]:
    """Where these values and their keys start in a text that is known to be JSON, and where else they do.

    Only what leads to them is walked through: the rest is skipped by the standard library's scanner.
    """
    scan = JSONDecoder(parse_float=str, parse_int=str).raw_decode
    on_the_way = {path[:length] for path in wanted for length in range(len(path))}
    found: dict[SourcePosition, list[int]] = {}

    def blanks(index: int) -> int:
        return _BLANKS.match(text, index).end()  # type: ignore[union-attr]  # it matches nothing, too

    def walk(index: int, path: Path) -> int:
        """Where the value that starts here ends."""
        if path in wanted:
            found.setdefault(SourcePosition(path), []).append(index)
        if path not in on_the_way or text[index] not in "{[":
            return scan(text, index)[1]
        is_mapping, position = text[index] == "{", 0
        index = blanks(index + 1)
        while text[index] not in "}]":
            if is_mapping:
                key, after = scan(text, index)
                inner = (*path, key)
                if inner in wanted:
                    found.setdefault(SourcePosition(inner, at_key=True), []).append(index)
                index = blanks(blanks(after) + 1)
            else:
                inner = (*path, position)
                position += 1
            index = blanks(walk(index, inner))
            if text[index] == ",":
                index = blanks(index + 1)
        return index + 1

    walk(blanks(0), ())
    return found
