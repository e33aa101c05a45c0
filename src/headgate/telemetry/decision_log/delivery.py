"""Delivery of encoded events to a sink: by this process, or by a writer process.

Python runs one thread at a time, so that requests wait while a thread of their process creates records. A writer
process needs nothing from this one but bytes: it reads batches from its standard input, and answers on its standard
output. It ends with its input, at the latest when the other process is gone; batches that it has received by then are
written.
"""

from __future__ import annotations

import logging
import os
import select
import signal
import subprocess
import sys
import time
from contextlib import suppress
from io import FileIO
from marshal import dumps, loads
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias

from headgate._fork import block_forks
from headgate.telemetry.decision_log.codec import FORMAT, EventDecoder
from headgate.telemetry.decision_log.sinks import open_sink
from headgate.telemetry.pseudonyms import Pseudonymizer

if TYPE_CHECKING:
    from collections.abc import Sequence

    from headgate.telemetry.decision_log.codec import EventEncoder
    from headgate.telemetry.decision_log.record import DecisionRecord
    from headgate.telemetry.decision_log.sinks import Sink

__all__ = ["AdaptiveDelivery", "DeliveryResult", "InProcessDelivery", "SubprocessDelivery"]

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

PARENT_CHECK_S: Final = 1.0
"""The interval at which the writer process checks that the other process still exists."""
NICENESS: Final = 10

START: Final = """
import sys
sys.path[:] = sys.argv[1:]
from headgate.telemetry.decision_log.delivery import run_writer_process
run_writer_process()
"""


Failure: TypeAlias = tuple[int, str]
"""The time of an event that could not be decoded, and the error."""


class EventBatch(NamedTuple):
    """Encoded events. The ids of their records consist of the token, and of numbers from `first` on."""

    token: str
    first: int
    events: Sequence[bytes]

    def decode(self, decoder: EventDecoder, start: int, end: int) -> tuple[list[DecisionRecord], list[tuple[int, str]]]:
        """The records of a slice, and the times and errors of events that could not be decoded."""
        records: list[DecisionRecord] = []
        failed: list[Failure] = []
        for number, event in enumerate(self.events[start:end], self.first + start):
            try:
                records.append(decoder.decode(event, self.token, number))
            except Exception as error:
                failed.append((_time_of(event), repr(error)))
        return records, failed


class DeliveryResult(NamedTuple):
    """The result of delivering a batch."""

    done: int
    """The number of events, from the first on, that are finished."""
    failed: Sequence[Failure] = ()
    """Those of them that could not be decoded, and are lost."""
    error: str | None = None
    """The reason for which the others must be sent again."""


class InProcessDelivery:
    """Creates and writes records in this process."""

    is_possible = True
    pid = None

    def __init__(self, sink: Sink, decoder: EventDecoder, encoder: EventEncoder, *, size: int) -> None:
        self._sink = sink
        self._decoder = decoder
        self._encoder = encoder
        self.size = size
        self._slice = MIN_SLICE

    def deliver(self, batch: EventBatch) -> DeliveryResult:
        self._decoder.add_labels(self._encoder.labels_since(self._decoder.newest_edition))
        records: list[DecisionRecord] = []
        failed: list[Failure] = []
        start, size = 0, min(self.size, len(batch.events))
        while start < size:
            if start:
                self._yield()
            end = min(start + self._slice, size)
            some, failed_now = batch.decode(self._decoder, start, end)
            records += some
            failed += failed_now
            start = end
        try:
            with block_forks():  # a child could never release the locks of the sink's library
                self._sink.write(records)
        except Exception as error:
            return DeliveryResult(0, error=_describe(error))
        return DeliveryResult(size, failed)

    def close(self) -> None:
        self._sink.close()

    def _yield(self) -> None:
        """Let other threads run, and adapt the slice to how busy they are."""
        start = time.monotonic()
        time.sleep(YIELD_S)
        is_contended = time.monotonic() - start > CONTENDED_S
        self._slice = min(self._slice * 2, MAX_SLICE) if is_contended else max(self._slice // 2, MIN_SLICE)


class SubprocessDelivery:
    """Sends batches to a writer process, which is started by the first one. A process that dies is replaced, and gets
    the unconfirmed events again, under the same ids."""

    size = PROCESS_BATCH

    def __init__(self, encoder: EventEncoder, *config: Any) -> None:
        """`config` is sent to the process: the sink's URL and batch size, the secret, `show`, node and region."""
        self._encoder = encoder
        self._config = config
        self._process: subprocess.Popen[bytes] | None = None
        self._sent_edition = 0
        """The newest policy whose labels this process knows."""
        self._start_at = 0.0 if _has_interpreter() else float("inf")

    @property
    def is_possible(self) -> bool:
        """False for a while after a start that failed."""
        return time.monotonic() >= self._start_at

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    def deliver(self, batch: EventBatch) -> DeliveryResult:
        answer, reason = None, ""
        try:
            process = self._process or self._start()
            labels = self._encoder.labels_since(self._sent_edition)
            events = list(batch.events)
            write_frame(process.stdin, (batch.token, batch.first, labels, len(events)))
            for start in range(0, len(events), FRAME_EVENTS):
                write_frame(process.stdin, events[start : start + FRAME_EVENTS])
            answer = read_frame(process.stdout)
        except OSError as error:
            reason = f": {_describe(error)}"
        if answer is None:
            status = self.close()
            ended = "has ended" if status is None else f"has ended with {status}"
            return DeliveryResult(0, error=f"the writer process {ended}{reason}")
        self._sent_edition = max([self._sent_edition, *labels])
        return DeliveryResult(*answer)

    def close(self) -> int | None:
        """Let the process close its sink and end. Returns its status, if there was one."""
        process, self._process = self._process, None
        if process is None:
            return None
        _close_pipes(process)
        try:
            return process.wait(EXIT_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            return process.wait()

    def reset_after_fork(self) -> None:
        """Close the pipes of the parent's process, which would not end while a child has them open."""
        process, self._process = self._process, None
        if process is not None:
            _close_pipes(process)
            process.returncode = 0  # so that nothing waits for it here

    def _start(self) -> subprocess.Popen[bytes]:
        self._sent_edition = 0
        self._start_at = time.monotonic() + RESTART_S
        process = self._process = subprocess.Popen(
            [sys.executable, "-c", START, *[each for each in sys.path if isinstance(each, str)]],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
            # Its own group, so that Ctrl-C does not end it before everything is written; but the same session, within
            # which the kernel compares niceness.
            process_group=0,
        )
        _enlarge(process.stdin)
        write_frame(process.stdin, (os.getpid(), *self._config))
        if read_frame(process.stdout) != "ready":
            raise ChildProcessError("it never became ready")
        self._start_at = 0.0
        return process


class AdaptiveDelivery:
    """Delivers in this process, and by a writer process, if there may be one, while there are many events. Only one
    thread calls it at a time."""

    def __init__(self, in_process: InProcessDelivery, subprocess: SubprocessDelivery | None, *, always: bool) -> None:
        self._in_process = in_process
        self._subprocess = subprocess
        self._always = always
        self._begin()

    def _begin(self) -> None:
        self._current: InProcessDelivery | SubprocessDelivery = self._in_process
        if self._always and self._subprocess is not None and self._subprocess.is_possible:
            self._current = self._subprocess
        self._interval_began = self._busy_at = time.monotonic()
        self._count = 0

    @property
    def size(self) -> int:
        """The largest batch."""
        return self._current.size

    def deliver(self, batch: EventBatch) -> DeliveryResult:
        self._adapt(time.monotonic())
        result = self._current.deliver(batch)
        self._count += result.done
        if not self._current.is_possible:
            logger.error("the decision log has no writer process, and is written by this one: %s", result.error)
            self._current = self._in_process
        return result

    def needs_thread(self) -> bool:
        """True if the thread must continue although there is nothing to deliver: it ends the writer process."""
        self._adapt(time.monotonic())
        return self._current.pid is not None

    def close(self) -> None:
        """Release all resources; a later `deliver` acquires them again."""
        self._in_process.close()
        if self._subprocess is not None:
            self._subprocess.close()

    def reset_after_fork(self) -> None:
        if self._subprocess is not None:
            self._subprocess.reset_after_fork()
        self._begin()

    def _adapt(self, now: float) -> None:
        """Choose the delivery by the rate of the last interval."""
        elapsed = now - self._interval_began
        if self._subprocess is None or elapsed < RATE_INTERVAL_S:
            return
        rate = self._count / elapsed
        self._interval_began, self._count = now, 0
        if rate >= BUSY_RATE / 2 or (self._always and rate):
            self._busy_at = now
        if self._current is self._in_process:
            if (rate >= BUSY_RATE or (self._always and rate)) and self._subprocess.is_possible:
                self._in_process.close()
                self._current = self._subprocess
        elif now - self._busy_at > CALM_S:
            self._subprocess.close()
            self._current = self._subprocess if self._always else self._in_process


def run_writer_process() -> None:
    """The main program of the writer process: serves one other process until it ends."""
    for name in ("SIGINT", "SIGTERM", "SIGHUP"):
        # Signals to the process group are meant for the app; this process ends after it.
        with suppress(AttributeError, ValueError):
            signal.signal(getattr(signal, name), signal.SIG_IGN)
    with suppress(AttributeError, OSError):
        os.nice(NICENESS)
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))  # a wakeup preempts no other process
    output = FileIO(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # libraries may print
    source = FileIO(sys.stdin.fileno(), "rb", closefd=False)
    parent, url, size, secret, show, node, region = read_frame(source)
    decoder = EventDecoder(Pseudonymizer(secret, show=show), node=node, region=region)
    sink = open_sink(url)
    with suppress(BrokenPipeError):
        write_frame(output, "ready")
    while (header := _next_header(source, parent)) is not None:
        token, first, labels, count = header
        events: list[bytes] = []
        while len(events) < count and (frame := read_frame(source)) is not None:
            events += frame
        decoder.add_labels(labels)
        with suppress(BrokenPipeError):
            write_frame(output, _write(decoder, sink, EventBatch(token, first, events), size))
    sink.close()


def _next_header(source: Any, parent: int) -> Any:
    """The header of the next batch; None if there will be none."""
    if os.name == "posix":
        while not select.select([source], [], [], PARENT_CHECK_S)[0]:
            # A forked child of the other process keeps the pipe open, but never writes to it.
            if os.getppid() != parent:
                return None
    return read_frame(source)


def _write(decoder: EventDecoder, sink: Sink, batch: EventBatch, size: int) -> tuple[Any, ...]:
    """Write as much as the sink takes. Returns the fields of a `DeliveryResult`: marshal takes no subclass of tuple."""
    failed: list[Failure] = []
    for start in range(0, len(batch.events), size):
        records, failed_now = batch.decode(decoder, start, start + size)
        try:
            sink.write(records)
        except Exception as error:
            return start, failed, _describe(error)
        failed += failed_now
    return len(batch.events), failed, None


def write_frame(pipe: Any, value: Any) -> None:
    """Write a value to an unbuffered pipe, with its length before it."""
    body = dumps(value, FORMAT)
    rest = memoryview(len(body).to_bytes(LENGTH_BYTES, "big") + body)
    while rest:
        rest = rest[pipe.write(rest) :]


def read_frame(pipe: Any) -> Any:
    """The next value from an unbuffered pipe; None at its end."""
    length = _read_exactly(pipe, LENGTH_BYTES)
    body = _read_exactly(pipe, int.from_bytes(length, "big")) if length else b""
    return loads(body) if body else None


def _read_exactly(pipe: Any, size: int) -> bytes:
    parts: list[bytes] = []
    while size and (part := pipe.read(min(size, 1 << 20))):
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


def _enlarge(pipe: Any) -> None:
    with suppress(ImportError, AttributeError, OSError):  # only Linux can, within the limits of its configuration
        from fcntl import F_SETPIPE_SZ, fcntl

        fcntl(pipe, F_SETPIPE_SZ, PIPE_BYTES)


def _close_pipes(process: subprocess.Popen[bytes]) -> None:
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            pipe.close()


def _describe(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
