"""Counters of several worker processes, as one."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Final, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["WorkerStats"]

WRITE_INTERVAL_S: Final = 1.0

Number = TypeVar("Number", int, float)


class WorkerStats(Generic[Number]):
    """Adds up the counters of all workers of a server, each of which writes its own to a shared directory.

    A worker that ends leaves its file, so that counters never decrease. Without a directory, there is one worker.
    """

    def __init__(
        self,
        own: Callable[[], dict[str, Number]],
        directory: str | None = None,
        *,
        name: str = "stats",
        is_maximum: Callable[[str], bool] | None = None,
    ) -> None:
        """`name` distinguishes the files of several sets. The values for which `is_maximum` is true are not added."""
        self._own: Callable[[], dict[str, Number]] = own
        self._name = name
        self._is_maximum = is_maximum
        self._file = None if directory is None else Path(directory, f"{name}-{os.getpid()}.json")

    def totals(self) -> dict[str, Number]:
        """The sum over all workers; those of others are up to a second old."""
        totals = self._own()
        if self._file is None:
            return totals
        for file in self._file.parent.glob(f"{self._name}-*.json"):
            if file == self._file:
                continue
            for name, value in json.loads(file.read_text("utf-8")).items():
                if self._is_maximum is not None and self._is_maximum(name):
                    totals[name] = max(totals.get(name, value), value)
                else:
                    totals[name] = totals.get(name, 0) + value
        return totals

    async def write_regularly(self) -> None:
        """Write the counters of this worker until cancelled, and once more then."""
        try:
            while self._file is not None:
                self.write()
                await asyncio.sleep(WRITE_INTERVAL_S)
        finally:
            self.write()

    def write(self) -> None:
        """Replace the file of this worker at once, so that readers never see a part of it."""
        if self._file is not None:
            new = self._file.with_suffix(".new")
            new.write_text(json.dumps(self._own()), "utf-8")
            new.replace(self._file)
