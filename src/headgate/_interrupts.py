"""Events and threads that survive exceptions raised by signal handlers.

Python runs signal handlers in the main thread between any two instructions, and their exceptions are raised there. The
classes of `threading` are written in Python: an exception inside `Condition.__enter__` leaves its lock locked for ever,
and one inside `Thread.start` leaves a thread that never runs. Code that the main thread runs for a request must
therefore use only locks, which are written in C, and steps that may be interrupted anywhere.
"""

from __future__ import annotations

import threading
from _thread import start_new_thread
from collections import deque
from contextlib import suppress
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["BackgroundThread", "InterruptSafeEvent", "wake"]


def wake(lock: threading.Lock) -> None:
    """Release a lock unless it is released already."""
    try:  # noqa: SIM105 - several times as fast
        lock.release()
    except RuntimeError:  # released already: the next waiter does not block
        pass


class InterruptSafeEvent:
    """Like `threading.Event`, but each waiter has its own lock, so that an interrupted one does not block others."""

    __slots__ = ("__weakref__", "_is_set", "_waiters")

    def __init__(self) -> None:
        self._is_set = False
        self._waiters: deque[threading.Lock] = deque()

    def is_set(self) -> bool:
        return self._is_set

    def set(self) -> None:
        self._is_set = True
        while self._waiters:
            try:
                waiter = self._waiters.popleft()
            except IndexError:  # another thread was faster
                return
            wake(waiter)

    def clear(self) -> None:
        self._is_set = False

    def wait(self, timeout: float) -> bool:
        """Wait until it is set, or the timeout; True if it is set."""
        if not self._is_set and timeout > 0:
            waiter = threading.Lock()
            waiter.acquire()
            self._waiters.append(waiter)
            if not self._is_set and not waiter.acquire(timeout=timeout):
                with suppress(ValueError):  # woken at the last moment
                    self._waiters.remove(waiter)
        return self._is_set


class BackgroundThread:
    """A daemon thread, started from another thread, in which no signal handler runs.

    Raises RuntimeError if no thread can be started. If that turns out later, `failed` is called with the error.
    """

    def __init__(
        self, name: str, target: Callable[..., Any], *args: Any, failed: Callable[[RuntimeError], Any] | None = None
    ) -> None:
        self.has_failed = False
        self._ended = InterruptSafeEvent()
        self._ident: int | None = None
        self._name, self._target, self._args, self._failed = name, target, args, failed
        start_new_thread(self._launch, ())

    @property
    def is_current(self) -> bool:
        """True if the caller runs in this thread."""
        return self._ident == threading.get_ident()

    @property
    def is_alive(self) -> bool:
        return not self._ended.is_set()

    def _launch(self) -> None:
        try:
            threading.Thread(target=self._run, name=self._name, daemon=True).start()
        except RuntimeError as error:
            self.has_failed = True
            self._ended.set()
            if self._failed is not None:
                self._failed(error)

    def _run(self) -> None:
        self._ident = threading.get_ident()
        try:
            self._target(*self._args)
        finally:
            self._ended.set()
