"""Structured field values (RFC 9651): the lists and dictionaries that rate limit fields use.

Inner lists, dates and display strings do not occur in these fields; a value that contains one is invalid here. The
tests compare the parser with http-sf, which supports everything.
"""

from __future__ import annotations

import re
from base64 import b64decode
from binascii import Error
from typing import TYPE_CHECKING, Final, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["BareItem", "FieldToken", "Item", "parse_dictionary", "parse_list"]


class FieldToken(str):
    """A token, such as `sliding`, as opposed to a string in quotes."""

    __slots__ = ()


BareItem: TypeAlias = int | float | str | bytes | bool
Item: TypeAlias = "tuple[BareItem, Mapping[str, BareItem]]"

_BARE: Final = re.compile(
    r'"(?P<string>(?:[ !#-\[\]-~]|\\["\\])*)"'
    r"|(?P<decimal>-?[0-9]{1,12}\.[0-9]{1,3})(?![0-9.])|(?P<integer>-?[0-9]{1,15})(?![0-9.])"
    r"|(?P<token>[A-Za-z*][A-Za-z0-9!#$%&'*+.^_`|~:/-]*)"
    r"|:(?P<binary>[A-Za-z0-9+/=]*):"
    r"|\?(?P<boolean>[01])"
)
_KEY: Final = re.compile(r"[a-z*][a-z0-9_.*-]*")
_PARAMETER: Final = re.compile(r"; *")
_SEPARATOR: Final = re.compile(r"[ \t]*(?:,[ \t]*|$)")


class _InvalidField(ValueError):
    pass


def parse_list(text: str) -> list[Item] | None:
    """The members of a list; None if the field is invalid and must be ignored as a whole.

    >>> parse_list('"burst";q=100;w=60, 5;w=1')
    [('burst', {'q': 100, 'w': 60}), (5, {'w': 1})]
    """
    items: list[Item] = []
    text, at = text.strip(" "), 0
    try:
        while at < len(text):
            value, at = _bare_item(text, at)
            parameters, at = _parameters(text, at)
            items.append((value, parameters))
            at = _next_member(text, at)
    except _InvalidField:
        return None
    return items


def parse_dictionary(text: str) -> dict[str, Item] | None:
    """The members of a dictionary; None if the field is invalid and must be ignored as a whole.

    >>> parse_dictionary("limit=100, remaining=50, reset=7")
    {'limit': (100, {}), 'remaining': (50, {}), 'reset': (7, {})}
    """
    members: dict[str, Item] = {}
    text, at = text.strip(" "), 0
    try:
        while at < len(text):
            key, at = _key(text, at)
            value, at = _value(text, at)
            parameters, at = _parameters(text, at)
            members.pop(key, None)  # a repeated key takes the last position
            members[key] = value, parameters
            at = _next_member(text, at)
    except _InvalidField:
        return None
    return members


def _next_member(text: str, at: int) -> int:
    separator = _SEPARATOR.match(text, at)
    if separator is None or (separator.end() == len(text) and "," in separator[0]):  # garbage, or a trailing comma
        raise _InvalidField
    return separator.end()


def _parameters(text: str, at: int) -> tuple[dict[str, BareItem], int]:
    parameters: dict[str, BareItem] = {}
    while mark := _PARAMETER.match(text, at):
        key, at = _key(text, mark.end())
        value, at = _value(text, at)
        parameters.pop(key, None)
        parameters[key] = value
    return parameters, at


def _value(text: str, at: int) -> tuple[BareItem, int]:
    return _bare_item(text, at + 1) if text.startswith("=", at) else (True, at)


def _key(text: str, at: int) -> tuple[str, int]:
    if (match := _KEY.match(text, at)) is None:
        raise _InvalidField
    return match[0], match.end()


def _bare_item(text: str, at: int) -> tuple[BareItem, int]:
    if (match := _BARE.match(text, at)) is None:
        raise _InvalidField
    value, found = match[match.lastgroup or 0], match.end()
    match match.lastgroup:
        case "string":
            return re.sub(r"\\(.)", r"\1", value), found
        case "integer":
            return int(value), found
        case "decimal":
            return float(value), found
        case "token":
            return FieldToken(value), found
        case "boolean":
            return value == "1", found
    try:
        return b64decode(value + "=" * (-len(value) % 4)), found
    except Error:
        raise _InvalidField from None
