"""Assembly of the Lua scripts from the files in `algorithms` and `stores/redis/lua`.

A script contains only the algorithms that it needs, as definitions cost time on the server. It is addressed by its
hash, so that two versions of headgate can share a server.
"""

from __future__ import annotations

import json
from functools import cache, lru_cache
from hashlib import sha1, sha256
from importlib.resources import files
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from headgate.algorithms import ALGORITHMS, INTERNAL_ALGORITHMS
from headgate.errors import InvalidInput

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["Script", "ScriptSet", "StoredFormat", "make_script", "script"]

_REQUIRED: Final = {"leaky_bucket": ("gcra",)}
"""Algorithms whose Lua needs that of another."""
_RECORDING: Final = ("check_idempotent", "deposit", "overdraw", "refund")
"""Scripts that read or write idempotency records."""
_WHOLE: Final = ("deposit", "lease", "overdraw", "refund")
"""Scripts that do not only decide, and need all of an algorithm."""
_DECIDING: Final = ("check_batch", "check_idempotent", "check_one", "deposit", "lease", "overdraw", "refund")
"""Scripts on counters. The others administrate headgate's own data and are not part of a rollout."""
_PACKAGES: Final = ("headgate.algorithms", "headgate.stores.redis.lua")
MAX_SOURCE_BYTES: Final = 200_000


class Script(NamedTuple):
    text: bytes
    sha: bytes
    observer: Any = None
    """The monitor that takes the replies of a canary; None for the scripts of one version."""


class StoredFormat(NamedTuple):
    """The version of an algorithm's stored format that scripts write, and those that they read."""

    writes: int
    reads: tuple[int, ...]


class ScriptSet:
    """A version of the Lua scripts: their sources by file name and the stored formats, identified by a digest."""

    def __init__(self, sources: Mapping[str, str], formats: Mapping[str, StoredFormat] | None = None) -> None:
        self.sources: Final = MappingProxyType(dict(sources))
        self.formats: Final = MappingProxyType({**_shipped_formats(), **(formats or {})})
        content = "".join([f"{name}\n{len(text)}\n{text}" for name, text in sorted(sources.items())])
        content += "".join([f"{name} {format}\n" for name, format in sorted((formats or {}).items())])
        self.digest: Final = sha256(content.encode()).hexdigest()[:12]
        self.script: Final = lru_cache(maxsize=256)(self._assemble)

    @staticmethod
    @cache
    def shipped() -> ScriptSet:
        """The version that this library contains."""
        found = {
            file.name.removesuffix(".lua"): file.read_text("utf-8")
            for package in _PACKAGES
            for file in files(package).iterdir()
            if file.name.endswith(".lua")
        }
        return ScriptSet(found)

    @classmethod
    def read(cls, directory: str | Path) -> ScriptSet:
        """The shipped version with the Lua files of a directory in place of its own.

        A file formats.json states stored formats that differ: {"gcra": {"writes": 2, "reads": [1, 2]}}.
        """
        try:
            found = {file.stem: file.read_text("utf-8") for file in sorted(Path(directory).glob("*.lua"))}
            stated = Path(directory, "formats.json")
            formats = json.loads(stated.read_bytes()) if stated.exists() else {}
        except (OSError, ValueError) as error:
            raise InvalidInput(f"{directory}: cannot be read: {error}") from None
        if not found:
            raise InvalidInput(
                f"{directory} contains no .lua file: `headgate scripts export DIR` writes the current ones"
            )
        return cls.shipped().replace(found, read_formats(formats))

    def replace(self, changed: Mapping[str, str], formats: Mapping[str, StoredFormat] | None = None) -> ScriptSet:
        """This version with some sources replaced."""
        replaceable = self.decision_sources
        for name, text in changed.items():
            if name not in replaceable:
                raise InvalidInput(f"{name}.lua is not a script of headgate: expected one of {', '.join(replaceable)}")
            if len(text) > MAX_SOURCE_BYTES:
                raise InvalidInput(f"{name}.lua has {len(text)} characters; the maximum is {MAX_SOURCE_BYTES}")
        return ScriptSet({**self.sources, **changed}, formats)

    def check_compatible(self, candidate: ScriptSet) -> None:
        """Raise InvalidInput if this version and the candidate cannot read each other's counters."""
        for name, stable in self.formats.items():
            other = candidate.formats[name]
            for writer, reader, what in ((other, stable, "the candidate"), (stable, other, "the stable version")):
                if writer.writes not in reader.reads:
                    reads = ", ".join(map(str, reader.reads))
                    raise InvalidInput(
                        f"{what} writes {name} in format {writer.writes}, which the other version cannot read (only "
                        f"{reads}): first release a version that reads both formats and writes the old one"
                    )

    @property
    def decision_sources(self) -> dict[str, str]:
        """The sources of the scripts that decide and change counters, which a rollout may replace."""
        algorithms = {file.name.removesuffix(".lua") for file in files(_PACKAGES[0]).iterdir()}
        names = sorted((algorithms | {"_prelude", "_records", *_DECIDING}) & self.sources.keys())
        return {name: self.sources[name] for name in names}

    def changes_from(self, other: ScriptSet) -> dict[str, str]:
        """The sources that differ from another version."""
        return {name: text for name, text in self.sources.items() if other.sources.get(name) != text}

    def assemble(self, main: str, algorithms: tuple[str, ...], margin_ms: int) -> str:
        """The text of a script; see `script`."""
        parts = dict.fromkeys(part for name in algorithms for part in (*_REQUIRED.get(name, ()), name))
        names = [f"local DECIDE = {name}" for name in algorithms[:1]]
        if main in ("check_batch", "check_idempotent"):
            names = [f"local ALGORITHMS = {{ {', '.join(f'{name} = {name}' for name in algorithms)} }}"]
        elif main == "refund":
            names.append(f"local REFUND = {algorithms[0]}_refund")
        elif main == "overdraw":
            names.append(f"local OVERDRAW = {algorithms[0]}_overdraw")
        source = self.sources
        return "\n".join(
            [
                f"-- headgate: {main} for {', '.join(algorithms) or 'all'}",
                source["_exact"],
                # Only the part before the mark, which is all that scripts need which only decide.
                *(source[part] if main in _WHOLE else source[part].partition("-- >8 --")[0] for part in parts),
                *names,
                f"local MARGIN_MS = {margin_ms}",
                source["_prelude"],
                *([source["_records"]] if main in _RECORDING else []),
                *(_function("decide_batch", source["check_batch"]) if main == "check_idempotent" else []),
                source[main],
            ]
        )

    def _assemble(self, main: str, algorithms: tuple[str, ...], margin_ms: int) -> Script:
        return make_script(self.assemble(main, algorithms, margin_ms))


def make_script(text: str, observer: Any = None) -> Script:
    encoded = text.encode()
    return Script(encoded, sha1(encoded, usedforsecurity=False).hexdigest().encode(), observer)


@cache
def _shipped_formats() -> dict[str, StoredFormat]:
    algorithms = {**ALGORITHMS, **INTERNAL_ALGORITHMS}
    return {name: StoredFormat(each.VERSION, (each.VERSION,)) for name, each in algorithms.items()}


def read_formats(stated: Any) -> dict[str, StoredFormat]:
    """Validate stated formats, as in formats.json."""
    try:
        formats = {name: StoredFormat(each["writes"], (*each["reads"],)) for name, each in stated.items()}
    except (AttributeError, KeyError, TypeError):
        formats = {"": StoredFormat(0, ())}
    for name, (writes, reads) in formats.items():
        if name not in _shipped_formats() or {type(number) for number in (writes, *reads)} != {int}:
            raise InvalidInput(
                'formats.json must name algorithms with their formats: {"gcra": {"writes": 2, "reads": [1, 2]}}'
            )
    return formats


def _function(name: str, text: str) -> list[str]:
    """A script as a function of KEYS and ARGV."""
    return [f"local function {name}(KEYS, ARGV)", text, "end"]


def script(main: str, algorithms: tuple[str, ...], margin_ms: int) -> Script:
    """The shipped script `main` ("check_one", "check_batch", "check_idempotent", "refund", "lease", "deposit" or
    "overdraw") for some algorithms.

    Scripts without algorithms are for other data than counters. Keys outlive their debt by the margin. "check_batch"
    and "check_idempotent" find algorithms by name; the others are for one.
    """
    return ScriptSet.shipped().script(main, algorithms, margin_ms)
