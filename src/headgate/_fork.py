"""Hooks for forked children, which must not inherit held locks, threads or connections of the parent."""

from __future__ import annotations

import os
import threading
import weakref
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, Final, Protocol

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["block_forks", "reinit_after_fork"]

MAX_FORK_DELAY_S: Final = 1.0  # upper bound on how long a fork waits for `block_forks`


class ForkAware(Protocol):
    def reset_after_fork(self) -> None:
        """Reset the object in a child, which may have been forked at any moment."""


_objects: weakref.WeakSet[Any] = weakref.WeakSet()


def reinit_after_fork(instance: ForkAware) -> None:
    """Call `reset_after_fork` of an object in every child that is forked during its lifetime."""
    _objects.add(instance)


class _ForkGuard:
    """Delays forks while threads are inside libraries whose own locks a child could never acquire."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.changed = threading.Condition()
        self.inside: set[object] = set()

    def before_fork(self) -> None:
        if self.changed.acquire(timeout=MAX_FORK_DELAY_S):
            self.changed.wait_for(lambda: not self.inside, MAX_FORK_DELAY_S)

    def after_in_parent(self) -> None:
        with suppress(RuntimeError):  # this thread could not acquire it in time
            self.changed.release()


_guard = _ForkGuard()


@contextmanager
def block_forks() -> Iterator[None]:
    """Delay forks while a background thread is inside a library such as SQLite."""
    changed, inside, token = _guard.changed, _guard.inside, object()
    with changed:
        inside.add(token)
    try:
        yield
    finally:
        with changed:
            inside.remove(token)
            changed.notify_all()


def _reset_all() -> None:
    _guard.reset()
    for instance in list(_objects):
        instance.reset_after_fork()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_guard.before_fork, after_in_parent=_guard.after_in_parent, after_in_child=_reset_all)
