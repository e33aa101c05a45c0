"""API keys that stand in a policy document: refused, or each replaced by its fingerprint, exactly where it stands."""

from __future__ import annotations

import re
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from headgate.errors import InvalidInput, InvalidPolicy
from headgate.policy import scalars
from headgate.policy.formats import FORMATS
from headgate.policy.formats.document import SourcePosition, place_of
from headgate.policy.source import Source

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from headgate.control.config.rows import PolicyDocument

__all__ = ["hash_raw_keys", "reject_raw_keys"]

FINGERPRINT: Final = "hmac:"
SECTIONS: Final = ("clients", "overrides", "blocked")

SHORTEST_FOUND: Final = 8
"""Characters of a key that is looked for in comments: what is shorter may be any word."""

_DOUBLE: Final = r'"(?:[^"\\]|\\.)*"'
_QUOTED: Final = {
    "yaml": re.compile(rf"{_DOUBLE}|'(?:[^']|'')*'", re.DOTALL),
    "toml": re.compile(rf'"""(?:\\.|[^\\])*?"""|\'\'\'.*?\'\'\'|{_DOUBLE}|\'[^\'\n]*\'', re.DOTALL),
    "json": re.compile(_DOUBLE, re.DOTALL),
}
_BREAK: Final = {
    "yaml": re.compile("\r\n|[\n\r\x85\u2028\u2029]"),
    "toml": re.compile("\n"),
    "json": re.compile("\n"),
}
"""What ends a line, as the places of each format count them."""
ASK_FOR_IT: Final = "its hmac: hash, which `headgate hash-key` prints"
_WORD: Final = re.compile(r"[\w-]+")


class _Raw(NamedTuple):
    """A key as it stands in a document."""

    section: str
    position: int
    key: str

    @property
    def spot(self) -> SourcePosition:
        return SourcePosition((self.section, self.position, "api_key"))

    def __str__(self) -> str:
        return f"{self.section}[{self.position}]"


def reject_raw_keys(document: PolicyDocument, fingerprint: Callable[[str], str] | None) -> None:
    """InvalidPolicy, if there are any; it says what to write, where there is a `fingerprint` to tell it."""
    told = [
        _told(document, raw, f"; write {ASK_FOR_IT if fingerprint is None else fingerprint(raw.key)}")
        for raw in _raw_keys(_value(document))
    ]
    if told:
        raise InvalidPolicy(told)


def hash_raw_keys(document: PolicyDocument, fingerprint: Callable[[str], str]) -> PolicyDocument:
    """The document with the fingerprint in place of each key; all else in it is as it was, down to the last blank."""
    value = _value(document)
    raws = list(_raw_keys(value))
    if not raws:
        return document
    places = FORMATS[document.format](document.text).places([raw.spot for raw in raws])
    starts = _line_starts(document)
    ends = 0
    pieces = []
    for raw in sorted(raws, key=lambda each: places[each.spot]):
        line, column = places[raw.spot]
        start = starts[line - 1] + column - 1
        hashed = fingerprint(raw.key)
        pieces += [document.text[ends:start], f'"{hashed}"']
        ends = _end(document, raw, start, instead=hashed)
        value[raw.section][raw.position]["api_key"] = hashed
    made = document._replace(text="".join([*pieces, document.text[ends:]]))
    if not _says(made, value):  # whatever the reason: a document that says something else is never stored
        reject_raw_keys(document, fingerprint)
    _refuse_remains(made, raws)
    return made


def _value(document: PolicyDocument) -> Any:
    return Source(document.text, document.name, document.format).value


def _says(document: PolicyDocument, value: Any) -> bool:
    with suppress(InvalidPolicy):
        return bool(_value(document) == value)
    return False


def _raw_keys(value: Any) -> Iterator[_Raw]:
    for section in SECTIONS:
        entries = value.get(section) if isinstance(value, dict) else None
        for position, entry in enumerate(entries if isinstance(entries, list) else ()):
            key = entry.get("api_key") if isinstance(entry, dict) else None
            with suppress(InvalidInput):  # what no key can be is told, with its place, by the reader of policies
                if not scalars.api_key(key).startswith(FINGERPRINT):
                    yield _Raw(section, position, str(key))


def _line_starts(document: PolicyDocument) -> list[int]:
    return [0, *(found.end() for found in _BREAK[document.format].finditer(document.text))]


def _end(document: PolicyDocument, raw: _Raw, start: int, *, instead: str) -> int:
    """Where a key ends that starts there: with its quotes; or after its last letter, as a key has no blanks in it."""
    if quoted := _QUOTED[document.format].match(document.text, start):
        return quoted.end()
    if document.text.startswith(raw.key, start):
        return start + len(raw.key)
    raise InvalidPolicy([_told(document, raw, f"; write {instead}")])  # of several lines, or in some other disguise


def _refuse_remains(document: PolicyDocument, raws: list[_Raw]) -> None:
    """A key that a comment still tells is as good as stored."""
    by_word = {max(_WORD.findall(raw.key), key=len, default=""): raw for raw in raws if len(raw.key) >= SHORTEST_FOUND}
    told = {}
    for found in _WORD.finditer(document.text):  # once for all keys: there may be as many as there are words
        raw = by_word.get(found[0])
        if raw is not None and raw not in told:
            start = found.start() - raw.key.index(found[0])
            if document.text.startswith(raw.key, start):
                told[raw] = f"{document.name}:{place_of(document.text, start)}: the API key of {raw} stands here, too"
    if told:
        raise InvalidPolicy([f"{each}; take it out" for each in told.values()])


def _told(document: PolicyDocument, raw: _Raw, remedy: str) -> str:
    return f"{document.name}: {raw}.api_key: a key is stored as its fingerprint{remedy}"
