"""Runs large work in a background thread without delaying requests.

A thread that computes lets others run only every few milliseconds, and each request waits for that more than once. The
garbage collector stops all threads to traverse new objects, and a large policy has half a million. Freeing a large
structure at once holds the interpreter lock, too.
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

__all__ = ["gc_paused", "low_priority", "release"]

RELEASE_BATCH: Final = 1000
SWITCH_INTERVAL_S: Final = 0.0005
"""Time after which another thread may run; Python's default is 5 ms. Shorter ones cost more than they gain."""


class _Pace:
    """The number of background workers, and the settings before the first of them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._workers = 0
        self._interval, self._collects = SWITCH_INTERVAL_S, True
        reinit_after_fork(self)

    @contextmanager
    def low_priority(self) -> Iterator[None]:
        """Run a block at low priority: other threads run ten times as often, and garbage collection is off."""
        with self._lock:
            self._workers += 1
            if self._workers == 1:
                self._interval, self._collects = sys.getswitchinterval(), gc.isenabled()
                sys.setswitchinterval(min(SWITCH_INTERVAL_S, self._interval))
                gc.disable()
        try:
            yield
        finally:
            with self._lock:
                self._workers -= 1
                if self._workers == 0:
                    self._restore()

    def reset_after_fork(self) -> None:
        """Restore the settings: the workers are in the parent."""
        self._lock = threading.Lock()
        if self._workers:
            self._workers = 0
            self._restore()

    def _restore(self) -> None:
        if gc.get_freeze_count() == 0:
            # Moves all new objects to the oldest generation without traversing them. Not if the app has frozen objects,
            # which this would unfreeze.
            gc.freeze()
            gc.unfreeze()
        sys.setswitchinterval(self._interval)
        if self._collects:
            gc.enable()


low_priority: Final = _Pace().low_priority


@contextmanager
def gc_paused() -> Iterator[None]:
    """Turn off the garbage collector for a block that creates millions of objects, none of them in cycles.

    For a program that does nothing else, or at a start; `low_priority` does it for background threads.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def release(container: dict[Any, Any] | list[Any]) -> None:
    """Empty a large container in batches, letting other threads run in between."""
    while container:
        if isinstance(container, list):
            del container[-RELEASE_BATCH:]
        else:
            for _ in range(min(RELEASE_BATCH, len(container))):
                container.popitem()
        time.sleep(0)
