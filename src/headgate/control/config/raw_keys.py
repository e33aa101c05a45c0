"""Secrets in a policy document: raw API keys are rejected or replaced by their hashes, passwords are rejected."""

from __future__ import annotations

import re
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from headgate.errors import InvalidInput, InvalidPolicy
from headgate.policy import scalars
from headgate.policy.formats import FORMATS
from headgate.policy.formats.document import SourcePosition, place_of
from headgate.policy.loader import Source
from headgate.policy.region_settings import has_plain_password

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from headgate.control.config.rows import PolicyDocument

__all__ = ["hash_raw_keys", "reject_raw_keys"]

FINGERPRINT: Final = "hmac:"
SECTIONS: Final = ("clients", "overrides", "blocked")
MIN_SEARCHED_LENGTH: Final = 8  # keys at least this long are searched in comments; a shorter one may be any word
_DOUBLE: Final = r'"(?:[^"\\]|\\.)*"'
_QUOTED: Final = {
    "yaml": re.compile(rf"{_DOUBLE}|'(?:[^']|'')*'", re.DOTALL),
    "toml": re.compile(rf'"""(?:\\.|[^\\])*?"""|\'\'\'.*?\'\'\'|{_DOUBLE}|\'[^\'\n]*\'', re.DOTALL),
    "json": re.compile(_DOUBLE, re.DOTALL),
}
_LINE_BREAK: Final = {
    "yaml": re.compile("\r\n|[\n\r\x85\u2028\u2029]"),
    "toml": re.compile("\n"),
    "json": re.compile("\n"),
}
"""Line breaks as counted by the positions of each format."""
HASH_HINT: Final = "its hmac: hash, which `headgate hash-key` prints"
_WORD: Final = re.compile(r"[\w-]+")


class _RawKey(NamedTuple):
    """A raw key in a document."""

    section: str
    position: int
    key: str

    @property
    def spot(self) -> SourcePosition:
        return SourcePosition((self.section, self.position, "api_key"))

    def __str__(self) -> str:
        return f"{self.section}[{self.position}]"


def reject_raw_keys(document: PolicyDocument, fingerprint: Callable[[str], str] | None) -> None:
    """Raise InvalidPolicy for raw keys, with the hash to write instead if there is a `fingerprint` function, and for
    passwords in the URLs of regions."""
    value = _value(document)
    problems = [
        _problem(document, raw, f"; write {HASH_HINT if fingerprint is None else fingerprint(raw.key)}")
        for raw in _raw_keys(value)
    ]
    problems += [
        f"{document.name}: regions.{place}: passwords are not stored; write one like ${{EU_PASSWORD}}, and set this "
        "environment variable for the app"
        for place in _passwords(value)
    ]
    if problems:
        raise InvalidPolicy(problems)


def hash_raw_keys(document: PolicyDocument, fingerprint: Callable[[str], str]) -> PolicyDocument:
    """The document with each raw key replaced by its hash and all other text unchanged."""
    value = _value(document)
    raws = list(_raw_keys(value))
    if not raws:
        return document
    places = FORMATS[document.format](document.text).places([raw.spot for raw in raws])
    starts = [0, *(found.end() for found in _LINE_BREAK[document.format].finditer(document.text))]
    ends = 0
    pieces = []
    for raw in sorted(raws, key=lambda each: places[each.spot]):
        line, column = places[raw.spot]
        start = starts[line - 1] + column - 1
        hashed = fingerprint(raw.key)
        pieces += [document.text[ends:start], f'"{hashed}"']
        ends = _end(document, raw, start, instead=hashed)
        value[raw.section][raw.position]["api_key"] = hashed
    hashed_document = document._replace(text="".join([*pieces, document.text[ends:]]))
    has_same_meaning = False
    with suppress(InvalidPolicy):
        has_same_meaning = _value(hashed_document) == value
    if not has_same_meaning:
        reject_raw_keys(document, fingerprint)
    _reject_remains(hashed_document, raws)
    return hashed_document


def _value(document: PolicyDocument) -> Any:
    return Source(document.text, document.name, document.format).value


def _raw_keys(value: Any) -> Iterator[_RawKey]:
    for section in SECTIONS:
        entries = value.get(section) if isinstance(value, dict) else None
        for position, entry in enumerate(entries if isinstance(entries, list) else ()):
            key = entry.get("api_key") if isinstance(entry, dict) else None
            with suppress(InvalidInput):  # invalid keys are reported by the policy loader
                if not scalars.api_key(key).startswith(FINGERPRINT):
                    yield _RawKey(section, position, str(key))


def _passwords(value: Any) -> Iterator[str]:
    """The places of URLs with passwords."""
    section = value.get("regions") if isinstance(value, dict) else None
    for field in ("stores", "regions"):
        urls = section.get(field) if isinstance(section, dict) else None
        for name, url in urls.items() if isinstance(urls, dict) else ():
            if isinstance(url, str) and has_plain_password(url):
                yield f"{field}.{name}"


def _end(document: PolicyDocument, raw: _RawKey, start: int, *, instead: str) -> int:
    """The end of the key at `start`, including its quotes."""
    if quoted := _QUOTED[document.format].match(document.text, start):
        return quoted.end()
    if document.text.startswith(raw.key, start):
        return start + len(raw.key)
    raise InvalidPolicy([_problem(document, raw, f"; write {instead}")])  # for example a multi-line scalar


def _reject_remains(document: PolicyDocument, raws: list[_RawKey]) -> None:
    """Raise InvalidPolicy if a comment still contains a key."""
    searched = [raw for raw in raws if len(raw.key) >= MIN_SEARCHED_LENGTH]
    by_word = {max(_WORD.findall(raw.key), key=len, default=""): raw for raw in searched}
    problems = {}
    for found in _WORD.finditer(document.text):  # one pass for all keys: there may be many
        raw = by_word.get(found[0])
        if raw is not None and raw not in problems:
            start = found.start() - raw.key.index(found[0])
            if document.text.startswith(raw.key, start):
                place = f"{document.name}:{place_of(document.text, start)}"
                problems[raw] = f"{place}: the API key of {raw} appears here too; remove it"
    if problems:
        raise InvalidPolicy(list(problems.values()))


def _problem(document: PolicyDocument, raw: _RawKey, remedy: str) -> str:
    return f"{document.name}: {raw}.api_key: API keys are stored as hashes{remedy}"
