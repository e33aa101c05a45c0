"""Delivery of encoded events to a sink: by this process, or by a writer process.

Python runs one thread at a time, so that requests wait while a thread of their process creates records. A writer
process needs nothing from this one but bytes.
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import threading
import time
from contextlib import suppress
from marshal import dumps, loads
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol

from headgate.telemetry.decision_log.codec import FORMAT

if TYPE_CHECKING:
    from collections.abc import Sequence

    from headgate.telemetry.decision_log.codec import EventDecoder, EventEncoder
    from headgate.telemetry.decision_log.record import DecisionRecord
    from headgate.telemetry.decision_log.sinks import Sink

__all__ = [
    "YIELD_S",
    "AdaptiveDelivery",
    "Delivery",
    "DeliveryResult",
    "EventBatch",
    "FailedEvent",
    "InProcessDelivery",
    "SubprocessDelivery",
    "WriterConfig",
    "decode",
    "read_frame",
    "write_frame",
]

logger = logging.getLogger("headgate")

MIN_SLICE: Final = 20
MAX_SLICE: Final = 400
"""Records that the thread creates between two pauses, in which requests run."""
YIELD_S: Final = 0.0003
CONTENDED_S: Final = 0.003
"""A pause that takes this long means that the process is busy: larger slices then delay fewer requests, for longer."""

BUSY_RATE: Final = 1000
"""Records per second from which on a writer process is worth its while."""
RATE_INTERVAL_S: Final = 1.0
CALM_S: Final = 60.0
"""The writer process ends after this time below half of that rate."""

PROCESS_BATCH: Final = 10_000
"""Events that the writer process is sent before it answers."""
FRAME_EVENTS: Final = 128
"""Events per frame: other threads run between two frames, each of which takes about 20 µs."""
PIPE_BYTES: Final = 1 << 20
LENGTH_BYTES: Final = 8
RESTART_S: Final = 60.0
"""The time until another start, after a writer process that never became ready."""
EXIT_TIMEOUT_S: Final = 2.0

START: Final = (
    "import sys; sys.path[:] = sys.argv[1:]; from headgate.telemetry.decision_log.writer_process import main; main()"
)


class EventBatch(NamedTuple):
    """Encoded events. The ids of their records consist of the token, and of numbers from `first` on."""

    token: str
    first: int
    events: Sequence[bytes]

    def part(self, start: int, end: int) -> EventBatch:
        return EventBatch(self.token, self.first + start, self.events[start:end])


class FailedEvent(NamedTuple):
    """An event that could not be made into a record."""

    at_us: int
    error: str


class DeliveryResult(NamedTuple):
    """The result of delivering a batch."""

    done: int
    """The number of events, from the first on, that are finished."""
    failed: Sequence[FailedEvent] = ()
    """Those of them that are lost."""
    error: str | None = None
    """The reason for which the others must be sent again."""


class Delivery(Protocol):
    """Delivers batches. Only one thread calls it at a time."""

    @property
    def size(self) -> int:
        """The largest batch."""

    def deliver(self, batch: EventBatch) -> DeliveryResult: ...

    def needs_thread(self) -> bool:
        """True if the thread must continue although there is nothing to deliver."""

    def close(self) -> None:
        """Release all resources; a later `deliver` acquires them again."""

    def suspend(self, timeout: float) -> bool:
        """Before a fork: leave all libraries with locks until `resume`; False if that takes too long."""

    def resume(self) -> None: ...

    def reset_after_fork(self) -> None: ...


class InProcessDelivery:
    """Creates and writes records in this process."""

    def __init__(self, sink: Sink, decoder: EventDecoder, encoder: EventEncoder, *, size: int) -> None:
        self._sink = sink
        self._decoder = decoder
        self._encoder = encoder
        self.size = size
        self.reset_after_fork()

    def reset_after_fork(self) -> None:
        self._writing = threading.Lock()
        self._slice = MIN_SLICE

    def needs_thread(self) -> bool:
        return False

    def deliver(self, batch: EventBatch) -> DeliveryResult:
        self._decoder.add_labels(self._encoder.labels_since(self._decoder.newest_edition))
        records: list[DecisionRecord] = []
        failed: list[FailedEvent] = []
        start, size = 0, min(self.size, len(batch.events))
        while start < size:
            if start:
                self._yield()
            end = min(start + self._slice, size)
            some, failed_now = decode(self._decoder, batch.part(start, end))
            records += some
            failed += failed_now
            start = end
        try:
            with self._writing:
                self._sink.write(records)
        except Exception as error:
            return DeliveryResult(0, error=_describe(error))
        return DeliveryResult(size, failed)

    def close(self) -> None:
        self._sink.close()

    def suspend(self, timeout: float) -> bool:
        return self._writing.acquire(timeout=timeout)

    def resume(self) -> None:
        self._writing.release()

    def _yield(self) -> None:
        """Let other threads run, and adapt the slice to how busy they are."""
        start = time.monotonic()
        time.sleep(YIELD_S)
        is_contended = time.monotonic() - start > CONTENDED_S
        self._slice = min(self._slice * 2, MAX_SLICE) if is_contended else max(self._slice // 2, MIN_SLICE)


class WriterConfig(NamedTuple):
    """The configuration of a writer process."""

    sink: str
    size: int
    """The largest batch for the sink."""
    secret: bytes
    show: tuple[str, ...]
    node: str
    region: str


class SubprocessDelivery:
    """Sends batches to a writer process, which is started by the first one. A process that dies is replaced, and gets
    the unconfirmed events again, under the same ids."""

    size = PROCESS_BATCH

    def __init__(self, config: WriterConfig, encoder: EventEncoder) -> None:
        self._config = config
        self._encoder = encoder
        self._process: subprocess.Popen[bytes] | None = None
        self._sent_edition = 0
        """The newest policy whose labels this process knows."""
        self._start_at = 0.0 if _has_interpreter() else float("inf")

    def needs_thread(self) -> bool:
        return self._process is not None

    @property
    def is_possible(self) -> bool:
        """False for a while after a start that failed."""
        return time.monotonic() >= self._start_at

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process is not None else None

    def deliver(self, batch: EventBatch) -> DeliveryResult:
        try:
            process = self._process or self._start()
            labels = self._encoder.labels_since(self._sent_edition)
            pipe, events = _fd(process.stdin), list(batch.events)
            write_frame(pipe, (batch.token, batch.first, labels, len(events)))
            for start in range(0, len(events), FRAME_EVENTS):
                write_frame(pipe, events[start : start + FRAME_EVENTS])
            answer = read_frame(_fd(process.stdout))
        except OSError as error:
            answer, reason = None, f": {_describe(error)}"
        else:
            reason = ""
        if answer is None:
            return DeliveryResult(0, error=f"the writer process has ended{self._reap()}{reason}")
        self._sent_edition = max([self._sent_edition, *labels])
        done, failed, sink_error = answer
        return DeliveryResult(done, [FailedEvent(*each) for each in failed], sink_error)

    def close(self) -> None:
        """Let the process close its sink and end."""
        process, self._process = self._process, None
        if process is None:
            return
        _close_pipes(process)
        try:
            process.wait(EXIT_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def suspend(self, timeout: float) -> bool:
        return True  # it only moves bytes

    def resume(self) -> None:
        pass

    def reset_after_fork(self) -> None:
        """Close the pipes of the parent's process, which would not end while a child has them open."""
        process, self._process = self._process, None
        if process is not None:
            _close_pipes(process)
            process.returncode = 0  # so that nothing waits for it here

    def _start(self) -> subprocess.Popen[bytes]:
        self._sent_edition = 0
        self._start_at = time.monotonic() + RESTART_S
        process = subprocess.Popen(
            [sys.executable, "-c", START, *[each for each in sys.path if isinstance(each, str)]],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
            # Its own group, so that Ctrl-C does not end it before everything is written; but the same session, within
            # which the kernel compares niceness.
            process_group=0,
        )
        self._process = process
        _enlarge(_fd(process.stdin))
        write_frame(_fd(process.stdin), (os.getpid(), *self._config))
        if read_frame(_fd(process.stdout)) != "ready":
            raise ChildProcessError("it never became ready")
        self._start_at = 0.0
        return process

    def _reap(self) -> str:
        """Remove a process that has ended; returns its status as text."""
        process, self._process = self._process, None
        if process is None:
            return ""
        _close_pipes(process)
        with suppress(subprocess.TimeoutExpired):
            process.wait(EXIT_TIMEOUT_S)
        process.kill()
        return f" with {process.wait()}"


class AdaptiveDelivery:
    """Delivers in this process, and by a writer process while there are many events."""

    def __init__(self, in_process: InProcessDelivery, subprocess: SubprocessDelivery, *, always: bool = False) -> None:
        self._in_process = in_process
        self._subprocess = subprocess
        self._always = always
        self._begin()

    def _begin(self) -> None:
        self._current: InProcessDelivery | SubprocessDelivery = (
            self._subprocess if self._always and self._subprocess.is_possible else self._in_process
        )
        self._interval_began = self._busy_at = time.monotonic()
        self._count = 0

    @property
    def size(self) -> int:
        return self._current.size

    def deliver(self, batch: EventBatch) -> DeliveryResult:
        self._adapt(time.monotonic())
        result = self._current.deliver(batch)
        self._count += result.done
        if self._current is self._subprocess and not self._subprocess.is_possible:
            logger.error("the decision log has no writer process, and is written by this one: %s", result.error)
            self._current = self._in_process
        return result

    def needs_thread(self) -> bool:
        self._adapt(time.monotonic())
        return self._current.needs_thread()

    def close(self) -> None:
        self._in_process.close()
        self._subprocess.close()

    def suspend(self, timeout: float) -> bool:
        return self._in_process.suspend(timeout)

    def resume(self) -> None:
        self._in_process.resume()

    def reset_after_fork(self) -> None:
        self._in_process.reset_after_fork()
        self._subprocess.reset_after_fork()
        self._begin()

    def _adapt(self, now: float) -> None:
        """Choose the delivery by the rate of the last interval."""
        elapsed = now - self._interval_began
        if elapsed < RATE_INTERVAL_S:
            return
        rate = self._count / elapsed
        self._interval_began, self._count = now, 0
        if rate >= BUSY_RATE / 2 or (self._always and rate):
            self._busy_at = now
        is_busy = rate >= BUSY_RATE or (self._always and rate)
        if self._current is self._in_process and is_busy and self._subprocess.is_possible:
            self._in_process.close()
            self._current = self._subprocess
        elif self._current is self._subprocess and now - self._busy_at > CALM_S:
            self._subprocess.close()
            self._current = self._subprocess if self._always else self._in_process


def decode(decoder: EventDecoder, batch: EventBatch) -> tuple[list[DecisionRecord], list[FailedEvent]]:
    """The records of a batch, and the events that could not be decoded."""
    records: list[DecisionRecord] = []
    failed: list[FailedEvent] = []
    for number, event in enumerate(batch.events, batch.first):
        try:
            records.append(decoder.decode(event, batch.token, number))
        except Exception as error:
            failed.append(FailedEvent(_time_of(event), repr(error)))
    return records, failed


def write_frame(pipe: int, value: Any) -> None:
    """Write a value to a pipe, with its length before it."""
    body = dumps(value, FORMAT)
    rest = memoryview(len(body).to_bytes(LENGTH_BYTES, "big") + body)
    while rest:
        rest = rest[os.write(pipe, rest) :]


def read_frame(pipe: int) -> Any:
    """The next value from a pipe; None at its end."""
    length = _read_exactly(pipe, LENGTH_BYTES)
    body = _read_exactly(pipe, int.from_bytes(length, "big")) if length else b""
    return loads(body) if body else None


def _read_exactly(pipe: int, size: int) -> bytes:
    parts: list[bytes] = []
    while size and (part := os.read(pipe, min(size, 1 << 20))):
        parts.append(part)
        size -= len(part)
    return b"" if size else b"".join(parts)


def _time_of(event: bytes) -> int:
    with suppress(Exception):
        return int(loads(event)[0])
    return time.time_ns() // 1000


def _has_interpreter() -> bool:
    """False if `sys.executable` is a server or a frozen program, and not a Python interpreter."""
    name = os.path.basename(sys.executable or "").lower()
    return name.startswith(("python", "pypy")) and not getattr(sys, "frozen", False)


def _fd(pipe: Any) -> int:
    number: int = pipe.fileno()
    return number


def _enlarge(pipe: int) -> None:
    with suppress(ImportError, AttributeError, OSError):  # only Linux can, within the limits of its configuration
        from fcntl import F_SETPIPE_SZ, fcntl

        fcntl(pipe, F_SETPIPE_SZ, PIPE_BYTES)


def _close_pipes(process: subprocess.Popen[bytes]) -> None:
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            pipe.close()


def _describe(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
