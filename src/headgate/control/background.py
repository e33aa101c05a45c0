"""Background threads of the control plane, which end when their owner is stopped or no longer used."""

from __future__ import annotations

import threading
import weakref
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["BackgroundThreads"]

STOP_TIMEOUT_S: Final = 2.0


class BackgroundThreads:
    """Daemon threads that are started and stopped together."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._stop: threading.Event | None = None
        self._threads: list[threading.Thread] = []

    def start(self, owner: object, *targets: tuple[Callable[..., Any], *tuple[Any, ...]]) -> None:
        """Run each target, a function and its arguments, in a thread, unless they run already.

        The last argument of each function is the event that ends it, which is also set when the owner is freed.
        """
        if self._stop is not None:
            return
        stop = self._stop = threading.Event()
        weakref.finalize(owner, stop.set).atexit = False
        for target, *arguments in targets:
            thread = threading.Thread(target=target, args=(*arguments, stop), name=self._name, daemon=True)
            thread.start()
            self._threads.append(thread)

    def stop(self) -> None:
        """End the threads, and wait for them."""
        if self._stop is not None:
            self._stop.set()
            for thread in self._threads:
                thread.join(STOP_TIMEOUT_S)
            self._stop, self._threads = None, []
