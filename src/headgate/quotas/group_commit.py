"""Group commit: operations of concurrent threads share one transaction.

A transaction costs much more than an operation in it. So operations queue up while a transaction runs, and the first
thread to find the ledger free runs all that are waiting, its own among them.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from headgate.quotas.operations import Operation

__all__ = ["GroupCommit"]

MAX_BATCH: Final = 2000


class GroupCommit:
    """Runs operations in batches. Thread-safe."""

    def __init__(self, execute: Callable[[list[Operation]], None]) -> None:
        """`execute` runs a batch, and sets `result` or `error` of each; if it raises, none was carried out."""
        self._execute = execute
        self.reset()

    def reset(self) -> None:
        """New locks, for a forked child: those of the parent may be held by threads that the child does not have."""
        self._queue: list[Operation] = []
        self._lock = threading.Lock()

    def run(self, operation: Operation) -> Any:
        """The result of the operation, once it is durable."""
        return self.run_all([operation])[0]

    def run_all(self, operations: Sequence[Operation]) -> list[Any]:
        """The results of several operations in one or more transactions; raises the first error."""
        self._queue += operations  # atomic
        with self._lock:
            while any(not each.is_done for each in operations):
                batch, self._queue[:MAX_BATCH] = self._queue[:MAX_BATCH], []
                self._run_batch(batch)
        for each in operations:
            if each.error is not None:
                raise each.error
        return [each.result for each in operations]

    def _run_batch(self, batch: list[Operation]) -> None:
        try:
            self._execute(batch)
        except Exception as error:
            for each in batch:
                each.error = error
        finally:
            for each in batch:
                each.is_done = True
