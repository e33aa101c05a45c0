"""The types of the policy schema: each parses a value and generates its JSON Schema.

One table serves both, so that editors and the loader accept the same policies.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import date, datetime, time
from decimal import Decimal
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeAlias

from headgate._limit_syntax import suggest
from headgate.errors import InvalidInput
from headgate.policy.formats.document import Path, Unreadable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from headgate.policy.problems import PolicyProblems

__all__ = [
    "BROKEN",
    "Field",
    "FieldType",
    "LazyList",
    "ListOf",
    "MapOf",
    "OneOf",
    "OneOrMany",
    "Scalar",
    "Struct",
    "StructValue",
    "refusal",
    "show",
]

JsonSchema: TypeAlias = dict[str, Any]


_TYPES: Final = {
    str: "text",
    int: "a number",
    Decimal: "a decimal number",
    bool: "a truth value",
    type(None): "nothing",
}


class _Invalid:
    """The type of `BROKEN`."""


BROKEN: Final = _Invalid()
"""The result for a value with a problem."""


class FieldType(Protocol):
    """A type of values."""

    def read(self, value: object, path: Path, problems: PolicyProblems) -> Any:
        """The parsed value, or BROKEN if a problem was added."""

    def schema(self) -> JsonSchema: ...


@dataclass(frozen=True, slots=True)
class Scalar:
    """A scalar; `convert` parses it or raises InvalidInput."""

    convert: Callable[[Any], object]
    form: Mapping[str, object]
    """Its JSON Schema."""

    def read(self, value: object, path: Path, problems: PolicyProblems) -> object:
        try:
            return self.convert(value)
        except InvalidInput as error:
            problems.add(path, _about(path, str(error)))
            return BROKEN

    def schema(self) -> JsonSchema:
        return dict(self.form)


@dataclass(frozen=True, slots=True)
class ListOf:
    """A tuple of values of one type, without broken ones."""

    inner: FieldType
    example: str

    def read(self, value: object, path: Path, problems: PolicyProblems) -> object:
        if type(value) is not list:
            return _mismatch(value, path, problems, f"a list, like {self.example}")
        read, made = self.inner.read, []
        for index, each in enumerate(value):
            if problems.full:
                break
            if (one := read(each, (*path, index), problems)) is not BROKEN:
                made.append(one)
        return tuple(made)

    def schema(self) -> JsonSchema:
        return {"type": "array", "items": self.inner.schema()}


@dataclass(frozen=True, slots=True)
class LazyList(ListOf):
    """A list of structs that is parsed lazily, as there may be a hundred thousand."""

    inner: Struct

    def read(self, value: object, path: Path, problems: PolicyProblems) -> object:
        if type(value) is not list:
            return ListOf.read(self, value, path, problems)
        return self._entries(value, path, problems)

    def _entries(self, value: list[object], path: Path, problems: PolicyProblems) -> Iterator[StructValue]:
        record = self.inner
        converters = record.converters()
        for index, each in enumerate(value):
            if problems.full:
                break
            where = (*path, index)
            if type(each) is dict:
                # Fast path for valid entries; the others are parsed again to report their problems.
                try:
                    fields = {key: converters[key](content) for key, content in each.items()}
                except (KeyError, InvalidInput):
                    pass
                else:
                    yield StructValue(record, fields, where, each, False)
                    continue
            entry = record.read(each, where, problems)
            if entry is not BROKEN and not entry.broken:
                yield entry


@dataclass(frozen=True, slots=True)
class OneOrMany:
    """A list, or one value as a list of one."""

    inner: FieldType
    example: str

    def read(self, value: object, path: Path, problems: PolicyProblems) -> object:
        if type(value) is list:
            if not value:
                problems.add(path, _about(path, f"the list is empty; write one like {self.example}, or leave it out"))
                return BROKEN
            return ListOf(self.inner, self.example).read(value, path, problems)
        one = self.inner.read(value, path, problems)
        return one if one is BROKEN else (one,)

    def schema(self) -> JsonSchema:
        inner = self.inner.schema()
        return {"anyOf": [inner, {"type": "array", "items": inner, "minItems": 1}]}


@dataclass(frozen=True, slots=True)
class MapOf:
    """A mapping from names to values of one type."""

    name: Scalar
    inner: FieldType
    example: str

    def read(self, value: object, path: Path, problems: PolicyProblems) -> object:
        if type(value) is not dict:
            return _mismatch(value, path, problems, f"a mapping, like {self.example}")
        made = {}
        for key, each in value.items():
            if problems.full:
                break
            inner = (*path, key)
            try:
                name = self.name.convert(key)
            except InvalidInput as error:
                problems.add(inner, str(error), at_key=True)
                continue
            read = self.inner.read(each, inner, problems)
            if read is not BROKEN:
                made[name] = read
        return made

    def schema(self) -> JsonSchema:
        return {"type": "object", "propertyNames": self.name.schema(), "additionalProperties": self.inner.schema()}


@dataclass(frozen=True, slots=True)
class OneOf:
    """A union, distinguished by the Python type of the value."""

    kinds: Mapping[type, FieldType]
    wanted: str

    def read(self, value: object, path: Path, problems: PolicyProblems) -> object:
        kind = self.kinds.get(type(value))
        return _mismatch(value, path, problems, self.wanted) if kind is None else kind.read(value, path, problems)

    def schema(self) -> JsonSchema:
        return {"anyOf": [kind.schema() for kind in self.kinds.values()]}


class StructValue:
    """A parsed mapping: its valid fields by their canonical names."""

    __slots__ = ("broken", "fields", "path", "record", "written")

    def __init__(
        self, record: Struct, fields: dict[str, Any], path: Path, written: Mapping[str, object], broken: bool
    ) -> None:
        self.record = record
        self.fields = fields
        self.path = path
        self.written = written
        self.broken = broken

    @property
    def unread(self) -> set[str]:
        """The fields that were given but are broken."""
        known = self.record.fields
        return {known[word].means or word for word in self.written if word in known} - self.fields.keys()

    def get(self, name: str, default: Any = None) -> Any:
        return self.fields.get(name, default)

    def at(self, name: str) -> Path:
        """The path of a field under the name that was used; that of the mapping if it was not given."""
        given = (key for key in self.written if key in self.record.names(name))
        return next(((*self.path, key) for key in given), self.path)


@dataclass(frozen=True, slots=True)
class Field:
    """A field of a mapping."""

    kind: FieldType
    about: str
    means: str | None = None
    """The canonical name, if this is an alias."""


@dataclass(frozen=True, slots=True)
class Struct:
    """A mapping with a fixed set of fields."""

    what: str
    fields: Mapping[str, Field]
    finish: Callable[[StructValue, PolicyProblems], Any] | None = field(default=None)
    """Converts a valid mapping."""
    others: FieldType | None = None
    """The JSON Schema of fields whose names are defined elsewhere in the policy."""
    example: str | None = None
    remedies: Mapping[str, str] = field(default_factory=dict)
    """The remedies for field names of other limiters."""

    def read(self, value: object, path: Path, problems: PolicyProblems) -> Any:
        if type(value) is not dict:
            form = self.example or f"with fields like {', '.join(list(self.fields)[:3])}"
            wanted = f"{self.what}: a mapping {form}"
            # Not shown, as it could be an API key.
            return _mismatch(value, path, problems, wanted, shown=not isinstance(value, str))
        before = len(problems)
        found: dict[str, Any] = {}
        fields = self.fields
        for key, each in value.items():
            known = fields.get(key)
            if known is None:
                if problems.full:
                    break
                remedy = self.remedies.get(key) or suggest(key[:100], list(fields))
                problems.add((*path, key), f"unknown field {show(key)}; {remedy}", at_key=True)
                continue
            read = known.kind.read(each, (*path, key), problems)
            if read is BROKEN:
                continue
            name = known.means or key
            if name in found:
                twin = next(each for each in value if each != key and each in self.names(name))
                problems.add((*path, key), f"{key} means the same as {twin}; keep one", at_key=True)
            found[name] = read
        entry = StructValue(self, found, path, value, len(problems) > before)
        if self.finish is None:
            return entry
        return BROKEN if entry.broken else self.finish(entry, problems)

    def converters(self) -> dict[str, Callable[[Any], object]]:
        """The parsers of scalar fields by canonical name."""
        leaves = {
            name: each.kind.kinds.get(str) if isinstance(each.kind, OneOf) else each.kind
            for name, each in self.fields.items()
            if each.means is None
        }
        return {name: leaf.convert for name, leaf in leaves.items() if isinstance(leaf, Scalar)}

    def names(self, name: str) -> set[str]:
        """The canonical name of a field and its aliases."""
        return {word for word, each in self.fields.items() if name == (each.means or word)}

    def schema(self) -> JsonSchema:
        properties = {name: {"description": each.about, **each.kind.schema()} for name, each in self.fields.items()}
        others = False if self.others is None else self.others.schema()
        return {"type": "object", "properties": properties, "additionalProperties": others}


def show(value: object) -> str:
    """A value as shown in messages: short, on one line, in the syntax of policies."""
    match value:
        case None:
            return "null"
        case bool():
            return str(value).lower()
        case str():
            return repr(value if len(value) <= 60 else f"{value[:57]}...")
        case dict():
            return "a mapping"
        case list():
            return "a list"
        case datetime() | date() | time():
            return value.isoformat()
    return str(value)


def refusal(value: object, wanted: str) -> InvalidInput:
    """The error for a value of the wrong type."""
    if isinstance(value, Unreadable):
        return InvalidInput(value.remedy)
    if isinstance(value, str) and not value:
        return InvalidInput(f"the text is empty; write {wanted}, or leave the field out")
    if isinstance(value, (dict, list)):
        return InvalidInput(f"{show(value)} is not allowed here; write {wanted}")
    return InvalidInput(f"{show(value)} is {_TYPES.get(type(value), 'a time of day')}; write {wanted}")


def _mismatch(value: object, path: Path, problems: PolicyProblems, wanted: str, *, shown: bool = True) -> _Invalid:
    message = str(refusal(value, wanted)) if shown else f"a text is not allowed here; write {wanted}"
    problems.add(path, _about(path, message))
    return BROKEN


def _about(path: Path, text: str) -> str:
    """The message, prefixed with the name of the field."""
    name = next((step for step in reversed(path) if isinstance(step, str)), None)
    return text if name is None or text.startswith(f"{name} ") else f"{name}: {text}"
