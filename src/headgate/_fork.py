"""What a forked child must not inherit: locks that nobody is left to release, threads, connections of its parent."""

from __future__ import annotations

import os
import threading
import weakref
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final, Protocol

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["at_work", "reinit_after_fork"]

LONGEST_WAIT: Final = 1.0
"""Seconds that a fork waits for threads that are at work in a library."""


class ForkAware(Protocol):
    def reset_after_fork(self) -> None:
        """Begin anew, in a child that was forked at any moment."""


_inherited: weakref.WeakSet[Any] = weakref.WeakSet()


def reinit_after_fork(inherited: ForkAware) -> None:
    """Call its `reset_after_fork` in every child that is forked while it lives."""
    _inherited.add(inherited)


class _Work:
    """Whether a thread of ours is inside a library that has locks of its own, which a child could never take."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.forking = False

    def rest(self) -> None:
        self.forking = self.lock.acquire(timeout=LONGEST_WAIT)

    def go_on(self) -> None:
        if self.forking:
            self.forking = False
            self.lock.release()

    def begin_anew(self) -> None:
        self.lock, self.forking = threading.Lock(), False


_work = _Work()


@contextmanager
def at_work() -> Iterator[None]:
    """A short while in a library such as SQLite, in a background thread: forks wait until it is over."""
    lock = _work.lock
    with lock:
        yield


def _renew_all() -> None:
    _work.begin_anew()
    for inherited in list(_inherited):
        inherited.reset_after_fork()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_work.rest, after_in_parent=_work.go_on, after_in_child=_renew_all)
