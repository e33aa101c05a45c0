"""Assembly of the Lua scripts from the files in `algorithms` and `stores/redis/lua`.

A script contains only the algorithms that it needs, as definitions cost time on the server. It is addressed by its
hash, so that two versions of headgate can share a server.
"""

from __future__ import annotations

from functools import lru_cache
from hashlib import sha1
from importlib.resources import files
from typing import Final, NamedTuple

__all__ = ["Script", "script"]

_REQUIRED: Final = {"leaky_bucket": ("gcra",)}
"""Algorithms whose Lua needs that of another."""


class Script(NamedTuple):
    text: bytes
    sha: bytes


@lru_cache(maxsize=256)
def script(main: str, algorithms: tuple[str, ...], margin_ms: int) -> Script:
    """The script `main` ("check_one", "check_batch", "check_idempotent", "refund" or "lease") for some algorithms.

    Scripts without algorithms are for other data than counters. Keys outlive their debt by the margin. "check_batch"
    and "check_idempotent" find algorithms by name; the others are for one.
    """
    parts = dict.fromkeys(part for name in algorithms for part in (*_REQUIRED.get(name, ()), name))
    names = [f"local DECIDE = {name}" for name in algorithms[:1]]
    if main in ("check_batch", "check_idempotent"):
        names = [f"local ALGORITHMS = {{ {', '.join(f'{name} = {name}' for name in algorithms)} }}"]
    elif main == "refund":
        names.append(f"local REFUND = {algorithms[0]}_refund")
    text = "\n".join(
        [
            f"-- headgate: {main} for {', '.join(algorithms) or 'all'}",
            _lua("headgate.algorithms", "_exact"),
            *(_lua("headgate.algorithms", part, whole=main in ("refund", "lease")) for part in parts),
            *names,
            f"local MARGIN_MS = {margin_ms}",
            _lua("headgate.stores.redis.lua", "_prelude"),
            *([_lua("headgate.stores.redis.lua", "_records")] if main in ("check_idempotent", "refund") else []),
            *(_function("decide_batch", "check_batch") if main == "check_idempotent" else []),
            _lua("headgate.stores.redis.lua", main),
        ]
    ).encode()
    return Script(text, sha1(text, usedforsecurity=False).hexdigest().encode())


def _function(name: str, main: str) -> list[str]:
    """A script as a function of KEYS and ARGV."""
    return [f"local function {name}(KEYS, ARGV)", _lua("headgate.stores.redis.lua", main), "end"]


@lru_cache(maxsize=64)
def _lua(package: str, name: str, *, whole: bool = True) -> str:
    """A file, or only the part before the mark, which is all that scripts need which only decide."""
    text = files(package).joinpath(f"{name}.lua").read_text("utf-8")
    return text if whole else text.partition("-- >8 --")[0]
