"""YAML as Go's yaml.v2 reads it: the same values, the same errors.

Configuration files of envoyproxy/ratelimit depend on it: `value: 010` is the text "010", but `requests_per_unit: 010`
is eight. Parsers for other versions of YAML, PyYAML's own included, decide differently.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Final

import yaml
from yaml.composer import Composer, ComposerError
from yaml.resolver import BaseResolver

if TYPE_CHECKING:
    from collections.abc import Collection

__all__ = ["YamlError", "fields", "load", "plain", "position", "tag_of"]

MAX_NODES: Final = 1_000_000
"""Nodes of a file after its aliases are expanded; protects against exponential expansion."""

MAX_DEPTH: Final = 100

_BOOLS: Final[dict[str, bool]] = {
    **dict.fromkeys(("y", "Y", "yes", "Yes", "YES", "true", "True", "TRUE", "on", "On", "ON"), True),
    **dict.fromkeys(("n", "N", "no", "No", "NO", "false", "False", "FALSE", "off", "Off", "OFF"), False),
}
_NULLS: Final = frozenset(("", "~", "null", "Null", "NULL"))
_OCTAL: Final = re.compile(r"([-+]?)0([0-7]+)")
_WHOLE: Final = re.compile(r"[-+]?(?:0[xX][0-9a-fA-F]+|0[oO][0-7]+|0[bB][01]+|0|[1-9][0-9]*)")
_FLOAT: Final = re.compile(r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?")
_NO_NUMBER: Final = re.compile(r"[-+]?\.(?i:inf)|\.(?i:nan)")
_MERGE_KEY: Final = "<<"
_UNKNOWN_ALIAS: Final = re.compile("found undefined alias ('.*')")
_BASE_LOADER: Final[Any] = getattr(yaml, "CBaseLoader", yaml.BaseLoader)
_PARSER: Final[Any] = getattr(yaml.cyaml, "CParser", None) if hasattr(yaml, "cyaml") else None


def _sliced_loader() -> Any:
    """A loader that composes in Python the events of the parser in C.

    The composer in C does not let other threads run before the whole text is read.
    """
    if _PARSER is None:
        return _BASE_LOADER

    class SlicedLoader(Composer, _PARSER, BaseResolver):  # type: ignore[misc]
        def __init__(self, text: str) -> None:
            _PARSER.__init__(self, text)
            Composer.__init__(self)
            BaseResolver.__init__(self)

        def compose_node(self, parent: Any, index: Any) -> yaml.Node | None:
            event: Any = self.peek_event()
            if isinstance(event, yaml.NodeEvent) and not isinstance(event, yaml.AliasEvent):
                self.anchors.pop(event.anchor, None)  # may be used again, for another value
            return super().compose_node(parent, index)

    return SlicedLoader


_SLICED_LOADER: Final[Any] = _sliced_loader()


class YamlError(Exception):
    """The text is not YAML, or has a value of the wrong type. The message is that of yaml.v2."""


def load(text: str) -> yaml.Node | None:
    """The root node of the first document; None if there is none."""
    try:
        try:
            root = _compose(_SLICED_LOADER, text)
        except (ComposerError, RecursionError) as error:
            if isinstance(error, ComposerError) and (found := _UNKNOWN_ALIAS.match(f"{error.problem}")):
                raise YamlError(f"yaml: unknown anchor {found[1]} referenced") from None
            root = _compose(_BASE_LOADER, text)  # for its error, whose text is that of libyaml
    except yaml.MarkedYAMLError as error:
        raise YamlError(f"yaml: {_describe(error)}") from None
    except yaml.reader.ReaderError as error:
        raise YamlError(f"yaml: {error.reason}") from None
    except yaml.YAMLError as error:
        raise YamlError(f"yaml: {' '.join(str(error).split())}") from None
    except RecursionError:
        raise YamlError("yaml: exceeded max depth of 10000") from None
    if root is not None:
        _check_expansion(root)
    return root


def _compose(loader_type: Any, text: str) -> yaml.Node | None:
    loader = loader_type(text)
    try:
        root: yaml.Node | None = loader.get_node() if loader.check_node() else None
        return root
    finally:
        loader.dispose()


def _describe(error: yaml.MarkedYAMLError) -> str:
    """The problem with its line, which yaml.v2 counts from 1 for the scanner and from 0 for the parser."""
    problem, context = error.problem_mark, error.context_mark
    line = 0
    if problem is not None and problem.line:
        line = problem.line + isinstance(error, yaml.scanner.ScannerError)
    elif context is not None:
        line = context.line
    return f"{f'line {line}: ' if line else ''}{error.problem or 'unknown problem parsing YAML content'}"


def _check_expansion(root: yaml.Node) -> None:
    """Reject aliases that contain themselves or expand to a huge document."""
    sizes: dict[int, int] = {}
    open_nodes: set[int] = set()

    def size(node: yaml.Node, depth: int) -> int:
        if id(node) in sizes:
            return sizes[id(node)]
        if id(node) in open_nodes:
            raise YamlError("yaml: an anchor contains itself")
        if depth > MAX_DEPTH:
            raise YamlError(f"yaml: line {node.start_mark.line + 1}: nested more than {MAX_DEPTH} levels deep")
        open_nodes.add(id(node))
        if isinstance(node, yaml.MappingNode):
            total = 1 + sum(size(key, depth + 1) + size(value, depth + 1) for key, value in node.value)
        elif isinstance(node, yaml.SequenceNode):
            total = 1 + sum(size(each, depth + 1) for each in node.value)
        else:
            total = 1
        open_nodes.discard(id(node))
        sizes[id(node)] = total
        return total

    if size(root, 0) > MAX_NODES:
        raise YamlError("yaml: document contains excessive aliasing")


def fields(node: yaml.MappingNode, joined: Collection[str] = ()) -> dict[Any, tuple[yaml.Node, yaml.Node]]:
    """The entries of a mapping by key, as nodes of key and value.

    The last of equal keys wins, and those of a merge (`<<`) count where it is, so that it replaces the keys before it.
    Mappings below a key in `joined` are joined instead: yaml.v2 decodes all of them into the same value of Go.
    """
    found: dict[Any, tuple[yaml.Node, yaml.Node]] = {}
    for key, value in node.value:
        if not isinstance(key, yaml.ScalarNode):
            raise YamlError(f"yaml: invalid map key: {plain(key)!r}")
        if key.value != _MERGE_KEY or key.style:
            _add(found, _scalar(key), (key, value), joined)
            continue
        # The first mapping of a list wins.
        for each in reversed(value.value) if isinstance(value, yaml.SequenceNode) else [value]:
            if not isinstance(each, yaml.MappingNode):
                raise YamlError("yaml: map merge requires map or sequence of maps as the value")
            for name, entry in fields(each, joined).items():
                _add(found, name, entry, joined)
    return found


def _add(found: dict[Any, Any], name: Any, entry: tuple[yaml.Node, yaml.Node], joined: Collection[str]) -> None:
    key, value = entry
    if name in joined and name in found:
        before = found[name][1]
        if isinstance(before, yaml.MappingNode) and isinstance(value, yaml.MappingNode):
            value = yaml.MappingNode(value.tag, before.value + value.value, value.start_mark, value.end_mark)
    found[name] = key, value


def plain(node: yaml.Node) -> Any:
    """The value of a node: dict, list, str, int, bool, float or None. Whole numbers beyond 64 bits are floats."""
    if isinstance(node, yaml.SequenceNode):
        return [plain(each) for each in node.value]
    if isinstance(node, yaml.MappingNode):
        return {key: plain(value) for key, (_, value) in fields(node).items()}
    return _scalar(node)


def _scalar(node: yaml.Node) -> Any:
    text: str = node.value
    if getattr(node, "style", None) or node.tag == "!":
        return text
    if text in _NULLS:
        return None
    if text in _BOOLS:
        return _BOOLS[text]
    if text[0] in "+-.0123456789":
        return _number(text)
    return text


def _number(text: str) -> int | float | str:
    digits = text.replace("_", "")
    if octal := _OCTAL.fullmatch(digits):
        number = int(octal[1] + octal[2], 8)
    elif _WHOLE.fullmatch(digits):
        number = int(digits, 0)
    elif _FLOAT.fullmatch(digits):
        return float(digits)
    elif _NO_NUMBER.fullmatch(text):
        return float(text.replace(".", ""))
    else:
        return text
    return number if -(2**63) <= number < 2**63 else float(number)


def tag_of(node: yaml.Node) -> str:
    """The short tag of a node, as in the errors of yaml.v2."""
    if isinstance(node, yaml.MappingNode):
        return "!!map"
    if isinstance(node, yaml.SequenceNode):
        return "!!seq"
    value = _scalar(node)
    if value is None:
        return "!!null"
    return {bool: "!!bool", int: "!!int", float: "!!float"}.get(type(value), "!!str")


def position(node: yaml.Node) -> str:
    """The place of a node, for errors that yaml.v2 does not have."""
    return f"line {node.start_mark.line + 1}, column {node.start_mark.column + 1}"
