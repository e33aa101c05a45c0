"""External sorting of logged requests by time, in bounded memory.

Servers log a request when its response has been sent, so logs are nearly sorted. A buffer brings neighbours into order.
When it is full, its older half goes to a temporary file: to the end of the last run or, if it is older than that, to a
new one. A log whose disorder is smaller than the buffer makes a single run, which is read back without merging.
"""

from __future__ import annotations

import marshal
import tempfile
from bisect import bisect_left
from itertools import chain
from operator import itemgetter
from typing import TYPE_CHECKING, Any, Final

from headgate.errors import InvalidInput

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from headgate.replay.formats import LoggedRequest

__all__ = ["BUFFER_SIZE", "sort_by_time"]

BUFFER_SIZE: Final = 60_000
"""Requests in memory: about 25 MB."""
BLOCK_SIZE: Final = 2000
"""Requests that are written and read at once."""
FORMAT: Final = 4
"""The marshal format that writes repeated objects once, such as senders."""

_time: Final = itemgetter(0)


def sort_by_time(
    batches: Iterable[list[LoggedRequest]], *, buffer_size: int = BUFFER_SIZE
) -> Iterator[list[LoggedRequest]]:
    """Requests in the order of their times, in batches. Those with equal times keep their order.

    >>> requests = [(at, "GET", f"/{number}", 200, (None, None, ()), None) for number, at in enumerate((3, 1, 2, 1))]
    >>> [[request[2] for request in batch] for batch in sort_by_time([requests])]
    [['/1', '/3', '/2', '/0']]
    """
    buffer: list[LoggedRequest] = []
    spilled: _Runs | None = None
    try:
        for batch in batches:
            buffer += batch
            if len(buffer) >= buffer_size:
                buffer.sort(key=_time)
                spilled = spilled or _Runs()
                half = len(buffer) // 2
                spilled.add(buffer[:half])
                del buffer[:half]
        buffer.sort(key=_time)
        if spilled is None:
            yield from ([buffer] if buffer else [])
            return
        spilled.add(buffer)
        del buffer
        yield from spilled.merged()
    except OSError as error:
        folder = tempfile.gettempdir()
        raise InvalidInput(f"cannot sort the log in {folder}: {error.strerror}; set TMPDIR to another folder") from None
    finally:
        if spilled is not None:
            spilled.close()


class _Runs:
    """Sorted runs of requests in a temporary file, each after the other in the order of the log."""

    def __init__(self) -> None:
        self._file = tempfile.TemporaryFile()  # noqa: SIM115 - closed by close()
        self._runs: list[list[tuple[int, int]]] = []
        """The offsets and lengths of the blocks of each run."""
        self._end_us: int | None = None
        """The last time in the last run."""

    def add(self, requests: list[LoggedRequest]) -> None:
        """Append sorted requests to the last run, or begin another.

        Only the last run grows: so all requests of a run come before those of later runs in the log, if their times
        are equal.
        """
        if not requests:
            return
        if self._end_us is None or requests[0][0] < self._end_us:
            self._runs.append([])
        for start in range(0, len(requests), BLOCK_SIZE):
            block = marshal.dumps(requests[start : start + BLOCK_SIZE], FORMAT)
            self._runs[-1].append((self._file.tell(), len(block)))
            self._file.write(block)
        self._end_us = requests[-1][0]

    def merged(self) -> Iterator[list[LoggedRequest]]:
        self._file.flush()
        if len(self._runs) == 1:
            yield from self._blocks(self._runs[0])
            return
        runs = [self._blocks(run) for run in self._runs]
        heads: list[list[LoggedRequest]] = [next(run) for run in runs]
        is_open = [True] * len(runs)
        while True:
            # Everything before the earliest end of a block is complete, as later blocks of that run start there.
            ends = [head[-1][0] for head, more in zip(heads, is_open, strict=True) if more]
            horizon_us = min(ends, default=None)
            if horizon_us is None:
                yield from _batches(sorted(chain.from_iterable(heads), key=_time))
                return
            ready: list[LoggedRequest] = []
            for index, head in enumerate(heads):
                at = bisect_left(head, horizon_us, key=_time)
                ready += head[:at]
                del head[:at]
                if is_open[index] and head[-1][0] == horizon_us:
                    more = next(runs[index], None)
                    is_open[index] = more is not None
                    head += more or []
            ready.sort(key=_time)
            yield from _batches(ready)

    def close(self) -> None:
        self._file.close()

    def _blocks(self, places: list[tuple[int, int]]) -> Iterator[list[LoggedRequest]]:
        for offset, length in places:
            self._file.seek(offset)
            block: Any = marshal.loads(self._file.read(length))
            yield block


def _batches(requests: list[LoggedRequest]) -> Iterator[list[LoggedRequest]]:
    if requests:
        yield requests
