"""Hooks for forked children, which must not inherit held locks, threads or connections of the parent."""

from __future__ import annotations

import os
import threading
import weakref
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final, Protocol

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["block_forks", "reinit_after_fork"]

MAX_FORK_DELAY_S: Final = 1.0
"""Upper bound on how long a fork waits for `block_forks`."""


class ForkAware(Protocol):
    def reset_after_fork(self) -> None:
        """Reset the object in a child, which may have been forked at any moment."""


_objects: weakref.WeakSet[Any] = weakref.WeakSet()


def reinit_after_fork(instance: ForkAware) -> None:
    """Call `reset_after_fork` of an object in every child that is forked during its lifetime."""
    _objects.add(instance)


class _ForkGuard:
    """A lock that delays forks while a thread is inside a library whose own locks a child could never acquire."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.is_forking = False

    def before_fork(self) -> None:
        self.is_forking = self.lock.acquire(timeout=MAX_FORK_DELAY_S)

    def after_in_parent(self) -> None:
        if self.is_forking:
            self.is_forking = False
            self.lock.release()

    def after_in_child(self) -> None:
        self.lock, self.is_forking = threading.Lock(), False


_guard = _ForkGuard()


@contextmanager
def block_forks() -> Iterator[None]:
    """Delay forks while a background thread is inside a library such as SQLite."""
    lock = _guard.lock
    with lock:
        yield


def _reset_all() -> None:
    _guard.after_in_child()
    for instance in list(_objects):
        instance.reset_after_fork()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_guard.before_fork, after_in_parent=_guard.after_in_parent, after_in_child=_reset_all)
