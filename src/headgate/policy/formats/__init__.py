"""The file formats of policies. Each parses a text into a `Document`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from headgate.policy.formats import from_json, from_toml
from headgate.policy.formats.document import Malformed

if TYPE_CHECKING:
    from collections.abc import Callable

    from headgate.policy.formats.document import Document

__all__ = ["FORMATS", "SUFFIXES"]


def _from_yaml(text: str) -> Document:
    try:
        from headgate.policy.formats import from_yaml
    except ImportError:
        raise Malformed("reading YAML requires PyYAML: pip install 'headgate[yaml]'; or use JSON or TOML") from None
    return from_yaml.parse(text)


FORMATS: Final[dict[str, Callable[[str], Document]]] = {
    "yaml": _from_yaml,
    "toml": from_toml.parse,
    "json": from_json.parse,
}

SUFFIXES: Final = {".yaml": "yaml", ".yml": "yaml", ".toml": "toml", ".json": "json"}
