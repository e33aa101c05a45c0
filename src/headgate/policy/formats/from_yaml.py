"""YAML policies, parsed strictly: values that YAML parsers disagree on are refused, and tags are not supported.

Works on parser events, which contain tags, anchors and the style of each scalar. Scalars are typed as in JSON.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Final

import yaml

from headgate.policy.formats.document import (
    Document,
    Malformed,
    NodePosition,
    SourcePosition,
    Unreadable,
    decimal,
    whole,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

__all__ = ["parse"]

DEEPEST: Final = 20

LONGEST_LINE: Final = 1000
"""Characters of a line that are searched for the cause of a syntax error."""

_CONSTANTS: Final[dict[str, object]] = {"true": True, "false": False, "null": None, "": None}
_WHOLE: Final = re.compile(r"-?(?:0|[1-9][0-9]*)")
_DECIMAL: Final = re.compile(r"-?(?:0|[1-9][0-9]*)\.[0-9]+")
_BARE_PATH: Final = re.compile(r"""(?<![\w"'/{}])/[^\s"',]*\{\w+(?::\w+)?\}[^\s"',{}\]]*""")
"""An unquoted path with a parameter, which is invalid inside a flow mapping."""
_TRUTH: Final = re.compile(r"(?i:y|yes|n|no|on|off|true|false)")
_NOTHING: Final = re.compile(r"~|(?i:null)")
_NUMBER: Final = re.compile(
    r"""[-+]?(?:
        0[xXoObB][0-9a-fA-F_]+                              # 0x10, 0o17
        | [0-9][0-9_]*(?::[0-9_]+)+(?:\.[0-9_]*)?           # 1:30, which is 90 to some
        | (?:[0-9][0-9_]*(?:\.[0-9_]*)?|\.[0-9][0-9_]*)(?:[eE][-+]?[0-9]+)?
        | \.(?i:inf|nan)
    )""",
    re.VERBOSE,
)


def parse(text: str) -> Document:
    # Only the events of the parser are used.
    events = yaml.parse(text, Loader=getattr(yaml, "CBaseLoader", yaml.BaseLoader))
    try:
        return _Reading(events).document()
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        what = " ".join(filter(None, (error.context, error.problem)))
        hint = _hint(text, error)
        raise Malformed(f"not YAML: {what}{hint}", _place(mark) if mark else None) from None
    except yaml.YAMLError as error:
        raise Malformed(f"not YAML: {' '.join(str(error).split())}") from None


def _hint(text: str, error: yaml.MarkedYAMLError) -> str:
    """The remedy for a syntax error with a common cause."""
    lines = text.split("\n")
    marks = [mark for mark in (error.problem_mark, error.context_mark) if mark is not None]
    shown = text.splitlines()
    if marks and "\t" in "".join(shown[marks[0].line : marks[0].line + 1]):
        return "; indent with spaces, not with tabs"
    for mark in marks:
        path = _BARE_PATH.search(lines[mark.line][:LONGEST_LINE]) if mark.line < len(lines) else None
        if path is not None:
            return f'; put paths with {{ }} in quotes: "{path[0]}"'
    return ""


class _Reading:
    """Builds a document from parser events."""

    def __init__(self, events: Iterator[yaml.Event]) -> None:
        self._events = events
        self._mistakes: list[tuple[NodePosition, str]] = []
        self._marks: dict[int, dict[Any, tuple[NodePosition, NodePosition]]] = {}
        self._root: object = None
        self._top = NodePosition(1, 1)

    def document(self) -> Document:
        next(self._events)  # the start of the stream
        if isinstance(next(self._events), yaml.StreamEndEvent):
            return Document(None, self._places)
        first = next(self._events)
        self._top = _place(first.start_mark)
        self._root = self._value(first, depth=0)
        for event in self._events:
            if isinstance(event, yaml.DocumentStartEvent):
                raise Malformed("a second document starts here; a policy is one", _place(event.start_mark))
        return Document(self._root, self._places, self._mistakes, self._marks)

    def _places(self, spots: Iterable[SourcePosition]) -> dict[SourcePosition, NodePosition]:
        return {spot: place for spot in spots if (place := self._find(spot)) is not None}

    def _find(self, spot: SourcePosition) -> NodePosition | None:
        container, places = self._root, (self._top, self._top)
        for step in spot.path:
            entries = self._marks.get(id(container), {})
            if step not in entries:
                return None
            places = entries[step]
            container = container[step]  # type: ignore[index]  # what has marks is a dict or a list
        return places[0 if spot.at_key else 1]

    def _value(self, event: Any, depth: int) -> object:
        if isinstance(event, yaml.AliasEvent):
            return Unreadable(f"*{event.anchor} is an alias; a policy has none: write it out")
        if event.anchor is not None:
            self._mistake(event, f"&{event.anchor} is an anchor; a policy has none: remove it")
        if event.tag is not None:
            self._mistake(event, f"{event.tag!r} is a tag; a policy has none: remove it")
        if isinstance(event, yaml.ScalarEvent):
            return _plain(event.value) if event.style in (None, "") else event.value
        if depth == DEEPEST:
            raise Malformed("nested too deep; a policy needs no more than a few levels", _place(event.start_mark))
        return self._list(depth) if isinstance(event, yaml.SequenceStartEvent) else self._mapping(depth)

    def _list(self, depth: int) -> list[object]:
        made: list[object] = []
        marks = self._marks[id(made)] = {}
        while not isinstance(event := next(self._events), yaml.SequenceEndEvent):
            place = _place(event.start_mark)
            marks[len(made)] = (place, place)
            made.append(self._value(event, depth + 1))
        return made

    def _mapping(self, depth: int) -> dict[str, object]:
        made: dict[str, object] = {}
        marks = self._marks[id(made)] = {}
        while not isinstance(event := next(self._events), yaml.MappingEndEvent):
            key = self._key(event, self._value(event, depth + 1))
            content = next(self._events)
            value = self._value(content, depth + 1)
            if key is None:
                continue
            if key in made:
                self._mistake(event, f"{key!r} is given twice, first at {marks[key][0]}; keep one")
            marks[key] = (_place(event.start_mark), _place(content.start_mark))
            made[key] = value
        return made

    def _key(self, event: Any, value: object) -> str | None:
        if value == "<<" and not event.style:
            self._mistake(event, "<< merges mappings in some YAML parsers only; write the fields out")
            return None
        if isinstance(value, str):
            return value
        if isinstance(value, Unreadable):
            self._mistake(event, value.remedy)
        elif isinstance(value, (dict, list)) or not event.value:
            self._mistake(event, "a key must be text")
        else:
            self._mistake(event, f'the key {event.value} is not text; write it in quotes: "{event.value}"')
        return None

    def _mistake(self, event: Any, text: str) -> None:
        self._mistakes.append((_place(event.start_mark), text))


def _plain(text: str) -> object:
    """The value of an unquoted scalar: as in JSON, or text, or Unreadable if YAML parsers disagree."""
    if text in _CONSTANTS:
        return _CONSTANTS[text]
    if text[0].isalpha():
        return Unreadable(_disagreement(text, "true or false"), text) if _TRUTH.fullmatch(text) else _nothing(text)
    if _WHOLE.fullmatch(text):
        return whole(text)
    if _DECIMAL.fullmatch(text):
        return decimal(text)
    return Unreadable(_disagreement(text, "a plain number")) if _NUMBER.fullmatch(text) else _nothing(text)


def _nothing(text: str) -> str | Unreadable:
    return Unreadable(_disagreement(text, "null")) if _NOTHING.fullmatch(text) else text


def _disagreement(text: str, plain: str) -> str:
    return f'{text} is read differently by different YAML parsers; write {plain}, or text as "{text}"'


def _place(mark: Any) -> NodePosition:
    return NodePosition(mark.line + 1, mark.column + 1)
