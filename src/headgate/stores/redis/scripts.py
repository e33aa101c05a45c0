"""The Lua that Redis runs, put together from the files beside the algorithms and beside this one.

A script carries only the algorithms that it is asked for: what is not there costs no time on the server. It is
named by its hash, so that two versions of headgate run side by side on one server; the version of what is stored is
part of the stored key.
"""

from __future__ import annotations

from functools import lru_cache
from hashlib import sha1
from importlib.resources import files
from typing import Final, NamedTuple

__all__ = ["Script", "script"]

_NEEDS: Final = {"leaky_bucket": ("gcra",)}
"""Algorithms whose Lua builds on that of another."""


class Script(NamedTuple):
    text: bytes
    sha: bytes


@lru_cache(maxsize=256)
def script(main: str, algorithms: tuple[str, ...]) -> Script:
    """The script of that name ("check", "refund" or "lease") for those algorithms."""
    parts = dict.fromkeys(part for name in algorithms for part in (*_NEEDS.get(name, ()), name))
    tables = [f"local JUDGE = {{ {', '.join(f'{name} = {name}' for name in algorithms)} }}"]
    if main == "refund":
        tables.append(f"local REFUND = {{ {', '.join(f'{name} = {name}_refund' for name in algorithms)} }}")
    text = "\n".join(
        [
            f"-- headgate: {main} for {', '.join(algorithms)}",
            _lua("headgate.algorithms", "_exact"),
            *(_lua("headgate.algorithms", part, whole=main != "check") for part in parts),
            *tables,
            _lua("headgate.stores.redis", "_script"),
            _lua("headgate.stores.redis", main),
        ]
    ).encode()
    return Script(text, sha1(text, usedforsecurity=False).hexdigest().encode())


@lru_cache(maxsize=64)
def _lua(package: str, name: str, *, whole: bool = True) -> str:
    """A file, or only what stands before the mark: what a script does not define costs it no time."""
    text = files(package).joinpath(f"{name}.lua").read_text("utf-8")
    return text if whole else text.partition("-- >8 --")[0]
