"""Parts that are compiled, where they could be: the common check of the memory store, a batch for Redis and its reply,
what every request needs of ASGI, its way through the gate, the header fields, and how a rejection is kept for the
decision log.

Each does what its form in Python does, only quicker, and is held to it by the tests. Where it was not built, for want
of a compiler, or where `HEADGATE_PLAIN` is set, Python does it.
"""

from __future__ import annotations

import os
from importlib import import_module
from typing import Any

__all__ = ["speedup"]


def speedup(name: str) -> Any:
    """The compiled module of that name, or None."""
    if os.environ.get("HEADGATE_PLAIN", "0") != "0":
        return None
    try:
        return import_module(name)
    except ImportError:
        return None
