"""What a forked child must not inherit: locks that nobody is left to release, threads, connections of its parent."""

from __future__ import annotations

import os
import weakref
from typing import Any, Protocol

__all__ = ["renew_in_children"]


class Renewable(Protocol):
    def renew_after_fork(self) -> None:
        """Begin anew, in a child that was forked at any moment."""


_inherited: weakref.WeakSet[Any] = weakref.WeakSet()


def renew_in_children(inherited: Renewable) -> None:
    """Call its `renew_after_fork` in every child that is forked while it lives."""
    _inherited.add(inherited)


def _renew_all() -> None:
    for inherited in list(_inherited):
        inherited.renew_after_fork()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew_all)
