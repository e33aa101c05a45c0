"""Runs large work in a background thread without delaying requests.

A thread that computes lets others run only every few milliseconds, and each request waits for that more than once. The
garbage collector stops all threads to traverse new objects, and a large policy has half a million. To free a large
structure at once holds the interpreter lock as well.
"""

from __future__ import annotations

import gc
import sys
import threading
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

from headgate._fork import reinit_after_fork

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["politely", "release"]

RELEASED_AT_ONCE: Final = 1000

INTERVAL: Final = 0.0005
"""Seconds until another thread may run; Python's own is 5 ms. Shorter ones cost more than they give."""


class _Pace:
    """How many work politely now, and what was set before the first of them began."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._workers = 0
        self._interval = INTERVAL
        self._collects = True
        reinit_after_fork(self)

    def enter(self) -> None:
        with self._lock:
            self._workers += 1
            if self._workers == 1:
                self._interval, self._collects = sys.getswitchinterval(), gc.isenabled()
                sys.setswitchinterval(min(INTERVAL, self._interval))
                gc.disable()

    def leave(self) -> None:
        with self._lock:
            self._workers -= 1
            if self._workers == 0:
                self._restore()

    def reset_after_fork(self) -> None:
        """Those who worked are with the parent."""
        self._lock = threading.Lock()
        if self._workers:
            self._workers = 0
            self._restore()

    def _restore(self) -> None:
        if gc.get_freeze_count() == 0:
            # All that is new is old at once, without being looked through: what an app has frozen would be thawed.
            gc.freeze()
            gc.unfreeze()
        sys.setswitchinterval(self._interval)
        if self._collects:
            gc.enable()


_pace: Final = _Pace()


@contextmanager
def politely() -> Iterator[None]:
    """While the block runs, other threads get their turn ten times as often, and no garbage is looked for."""
    _pace.enter()
    try:
        yield
    finally:
        _pace.leave()


def release(container: dict[Any, Any] | list[Any]) -> None:
    """Empty a large container some entries at a time, letting other threads run in between."""
    while container:
        if isinstance(container, list):
            del container[-RELEASED_AT_ONCE:]
        else:
            for _ in range(min(RELEASED_AT_ONCE, len(container))):
                container.popitem()
        time.sleep(0)
