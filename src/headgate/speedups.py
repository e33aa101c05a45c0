"""Compiled speedups: reports whether the C extension is in use, and why if it is not.

>>> from headgate import speedups
>>> speedups.active
True

The extension replaces a few pure functions on the path of every request; the Python versions give the same results. It
is optional: `pip install` skips it if there is no C compiler, and the environment variable HEADGATE_PLAIN=1 turns it
off. `headgate --version` prints `describe()`.
"""

from __future__ import annotations

import os
from importlib import import_module
from typing import Any, Final

__all__ = ["active", "describe", "functions", "pick", "reason"]

FUNCTIONS: Final = (
    "charge",
    "admit",
    "pack_keys",
    "decode_allowed",
    "translate_check",
    "replace_fields",
    "add_usage",
    "finish_check",
    "RateLimitHeaders",
)


def _load() -> tuple[Any, str]:
    """The extension module and an empty string, or None and the reason."""
    if os.environ.get("HEADGATE_PLAIN", "0") != "0":
        return None, "turned off by HEADGATE_PLAIN"
    try:
        return import_module("headgate._native"), ""
    except ModuleNotFoundError:
        return None, "not built: install a C compiler and the Python headers, then reinstall headgate"
    except ImportError as error:
        return None, f"cannot be loaded: {error}"


_native, reason = _load()
"""`reason`: why the speedups are not in use; empty if they are."""

active: Final[bool] = _native is not None
"""True if the compiled functions are in use."""

functions: Final[tuple[str, ...]] = FUNCTIONS if active else ()
"""The functions that are compiled."""


def pick(name: str, fallback: Any = None) -> Any:
    """Return the compiled version of a function or class, or the fallback if there is none."""
    return getattr(_native, name, fallback)


def describe() -> str:
    """Return "speedups: active", or the reason why they are not, for people."""
    return "speedups: active" if active else f"speedups: {reason}"
