"""Overload protection: an adaptive concurrency limit with load shedding by priority. See docs/overload.md."""

from __future__ import annotations

from headgate.errors import Overloaded
from headgate.overload.guard import Guard, GuardedCall
from headgate.overload.load_shedder import OverloadStats, Priority

__all__ = ["Guard", "GuardedCall", "OverloadStats", "Overloaded", "Priority"]
