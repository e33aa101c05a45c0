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
def script(main: str, algorithms: tuple[str, ...], margin_ms: int) -> Script:
    """The script `main` ("check_one", "check_batch", "check_idempotent", "refund" or "lease") for some algorithms.

    Without algorithms, its keys are not counters. Keys outlive their debt by the margin. "check_batch" and
    "check_idempotent" find the algorithms by name; the others are for one.
    """
    parts = dict.fromkeys(part for name in algorithms for part in (*_NEEDS.get(name, ()), name))
    names = [f"local JUDGE = {name}" for name in algorithms[:1]]
    if main in ("check_batch", "check_idempotent"):
        names = [f"local JUDGES = {{ {', '.join(f'{name} = {name}' for name in algorithms)} }}"]
    elif main == "refund":
        names.append(f"local REFUND = {algorithms[0]}_refund")
    text = "\n".join(
        [
            f"-- headgate: {main} for {', '.join(algorithms) or 'all'}",
            _lua("headgate.algorithms", "_exact"),
            *(_lua("headgate.algorithms", part, whole=main in ("refund", "lease")) for part in parts),
            *names,
            f"local MARGIN = {margin_ms}",
            _lua("headgate.stores.redis.lua", "_prelude"),
            *([_lua("headgate.stores.redis.lua", "_records")] if main in ("check_idempotent", "refund") else []),
            *(_function("decide_batch", "check_batch") if main == "check_idempotent" else []),
            _lua("headgate.stores.redis.lua", main),
        ]
    ).encode()
    return Script(text, sha1(text, usedforsecurity=False).hexdigest().encode())


def _function(name: str, main: str) -> list[str]:
    """A script as a function of the KEYS and ARGV that it reads."""
    return [f"local function {name}(KEYS, ARGV)", _lua("headgate.stores.redis.lua", main), "end"]


@lru_cache(maxsize=64)
def _lua(package: str, name: str, *, whole: bool = True) -> str:
    """A file, or only what stands before the mark: what a script does not define costs it no time."""
    text = files(package).joinpath(f"{name}.lua").read_text("utf-8")
    return text if whole else text.partition("-- >8 --")[0]
