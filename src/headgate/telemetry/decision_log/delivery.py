"""Who carries what was decided to the sink: this process itself, or a scribe beside it.

The interpreter lets one thread compute at a time. What a thread of this process needs to make records of decisions and
to write them, requests wait for. A scribe is a process of its own: all that is left to do here is to hand it bytes.
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import threading
import time
from contextlib import suppress
from marshal import loads
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol

from headgate.telemetry.decision_log.pipe_framing import read_frame, write_frame

if TYPE_CHECKING:
    from collections.abc import Sequence

    from headgate.telemetry.decision_log.codec import EventDecoder, EventEncoder
    from headgate.telemetry.decision_log.record import DecisionRecord
    from headgate.telemetry.decision_log.sinks import Sink
    from headgate.telemetry.pseudonyms import Pseudonymizer

__all__ = [
    "BREATH",
    "AdaptiveDelivery",
    "Delivery",
    "DeliveryResult",
    "EventBatch",
    "FailedEvent",
    "InProcessDelivery",
    "SubprocessDelivery",
    "WriterConfig",
    "made",
]

logger = logging.getLogger("headgate")

SLICE: Final = 20
BREATH: Final = 0.0003
"""After so many records the thread stands back for so many seconds: a thread that computes keeps all others waiting."""
LARGEST_SLICE: Final = 400
CONTENDED: Final = 0.003
"""In a process that never pauses it takes so many seconds to get a turn again. There the thread makes more of each: to
hold up few requests for longer is better than to hold up many."""

BUSY: Final = 1000
"""Records a second from which on requests would feel what this process writes itself, so that a scribe does it."""
GLANCE: Final = 1.0
"""Seconds over which that is counted."""
CALM: Final = 60.0
"""Seconds below half of that after which the scribe is let go."""

MOUTHFUL: Final = 10_000
"""The most decisions that a scribe is handed before it answers."""
PIECE: Final = 128
"""So many of them go into its pipe at once, and in between requests get their turn: it takes 20 µs, and not 2 ms."""
PIPE: Final = 1 << 20
"""Bytes that wait in the pipe, where the kernel allows it: so that this process need not wake up for each piece."""
AGAIN: Final = 60.0
"""Seconds until another one is started, after one that never got ready."""
ENDING: Final = 1.0
"""Seconds for a scribe to end by itself when nothing is left for it."""

START: Final = (
    "import sys; sys.path[:] = sys.argv[1:]; from headgate.telemetry.decision_log.writer_process import main; main()"
)
"""What a scribe runs. It finds what this process finds, wherever that has come from."""


class EventBatch(NamedTuple):
    """Decisions, as they were packed. Their ids come from the token, and from where they stand after the first."""

    token: str
    first: int
    raws: Sequence[bytes]


class FailedEvent(NamedTuple):
    """A decision of which no record could be made."""

    at_us: int
    error: str


class DeliveryResult(NamedTuple):
    """What became of a batch."""

    done: int
    """So many, from its first on, need not come again."""
    unmade: Sequence[FailedEvent] = ()
    """Those of them that are lost."""
    error: str | None = None
    """Why the others have to come again."""


class Delivery(Protocol):
    """Carries batches. Only one thread calls it at a time."""

    @property
    def size(self) -> int:
        """The most that it takes at once."""

    def carry(self, batch: EventBatch) -> DeliveryResult: ...

    def is_needed(self) -> bool:
        """Whether the thread has to live on for it, though there is nothing to carry now."""

    def close(self) -> None:
        """Hold nothing any more; it may be asked again."""

    def stand_still(self, timeout: float) -> bool:
        """Before a fork: be in no library whose locks a child could never take, until `go_on` is called."""

    def go_on(self) -> None: ...

    def reset_after_fork(self) -> None: ...


class InProcessDelivery:
    """Makes records and writes them in this process."""

    def __init__(
        self, sink: Sink, recorder: EventDecoder, packer: EventEncoder, *, clients: Pseudonymizer, size: int
    ) -> None:
        self._sink = sink
        self._recorder = recorder
        self._packer = packer
        self._clients = clients
        self.size = size
        self.reset_after_fork()

    def reset_after_fork(self) -> None:
        self._writing = threading.Lock()
        """Held while the sink is at work."""
        self._slice = SLICE

    def is_needed(self) -> bool:
        return False

    def carry(self, batch: EventBatch) -> DeliveryResult:
        self._recorder.learn(self._packer.labels_since(self._recorder.newest, self._clients))
        records: list[DecisionRecord] = []
        unmade: list[FailedEvent] = []
        start, size = 0, min(self.size, len(batch.raws))
        while start < size:
            if start:
                self._stand_back()
            end = min(start + self._slice, size)
            some = EventBatch(batch.token, batch.first + start, batch.raws[start:end])
            made(self._recorder, some, records, unmade)
            start = end
        try:
            with self._writing:
                self._sink.write(records)
        except Exception as error:
            return DeliveryResult(0, error=_said(error))
        return DeliveryResult(size, unmade)

    def close(self) -> None:
        self._sink.close()

    def stand_still(self, timeout: float) -> bool:
        return self._writing.acquire(timeout=timeout)

    def go_on(self) -> None:
        self._writing.release()

    def _stand_back(self) -> None:
        """Let others run, and learn how much they have to do."""
        start = time.monotonic()
        time.sleep(BREATH)
        is_contended = time.monotonic() - start > CONTENDED
        self._slice = min(self._slice * 2, LARGEST_SLICE) if is_contended else max(self._slice // 2, SLICE)


class WriterConfig(NamedTuple):
    """What a scribe has to know from the beginning."""

    sink: str
    """Its URL."""
    size: int
    """The most records that the sink is given at once."""
    secret: bytes
    show: tuple[str, ...]
    node: str
    region: str


class SubprocessDelivery:
    """Hands batches to a scribe, which is started when there is one to hand over. One that has died is replaced; what
    it had not confirmed, the next one gets, under the same ids."""

    size = MOUTHFUL

    def __init__(self, terms: WriterConfig, packer: EventEncoder, *, clients: Pseudonymizer) -> None:
        self._terms = terms
        self._packer = packer
        self._clients = clients
        self._process: subprocess.Popen[bytes] | None = None
        self._told = 0
        """The newest policy whose labels this scribe knows."""
        self._not_before = 0.0 if _can_start() else float("inf")
        """When it makes sense to start one again, after one that never got ready."""

    def is_needed(self) -> bool:
        return self._process is not None

    @property
    def is_possible(self) -> bool:
        """Whether it makes sense to try."""
        return time.monotonic() >= self._not_before

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process is not None else None

    def carry(self, batch: EventBatch) -> DeliveryResult:
        try:
            process = self._process or self._start()
            labels = self._packer.labels_since(self._told, self._clients)
            pipe, raws = _fd(process.stdin), list(batch.raws)
            write_frame(pipe, (batch.token, batch.first, labels, len(raws)))
            for start in range(0, len(raws), PIECE):
                write_frame(pipe, raws[start : start + PIECE])
            answer = read_frame(_fd(process.stdout))
        except OSError as error:
            answer, trouble = None, f": {_said(error)}"
        else:
            trouble = ""
        if answer is None:
            return DeliveryResult(0, error=f"the scribe has ended{self._ended()}{trouble}")
        self._told = max([self._told, *labels])
        done, unmade, error_ = answer
        return DeliveryResult(done, [FailedEvent(*each) for each in unmade], error_)

    def close(self) -> None:
        """Have the scribe close its sink and end."""
        process, self._process = self._process, None
        if process is None:
            return
        _close_pipes(process)
        try:
            process.wait(ENDING)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def stand_still(self, timeout: float) -> bool:
        """Nothing is done here but to move bytes."""
        return True

    def go_on(self) -> None:
        """It never stood still."""

    def reset_after_fork(self) -> None:
        """A scribe is its parent's. It lives while somebody may write to it: so a child must not."""
        process, self._process = self._process, None
        if process is not None:
            _close_pipes(process)
            process.returncode = 0  # so that nobody here waits for it

    def _start(self) -> subprocess.Popen[bytes]:
        self._told = 0
        self._not_before = time.monotonic() + AGAIN
        process = subprocess.Popen(
            [sys.executable, "-c", START, *[each for each in sys.path if isinstance(each, str)]],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
            # What ends this process from the keyboard must not end the scribe before all is written. It stays in the
            # session, for it is among those of a session that the kernel heeds how polite a process is.
            process_group=0,
        )
        self._process = process
        _widen(_fd(process.stdin))
        write_frame(_fd(process.stdin), (os.getpid(), *self._terms))
        if read_frame(_fd(process.stdout)) != "ready":
            raise ChildProcessError("it never got ready")
        self._not_before = 0.0
        return process

    def _ended(self) -> str:
        """Let go of a scribe that takes nothing any more; how it has ended."""
        process, self._process = self._process, None
        if process is None:
            return ""
        _close_pipes(process)
        with suppress(subprocess.TimeoutExpired):
            process.wait(ENDING)
        process.kill()
        return f" with {process.wait()}"


class AdaptiveDelivery:
    """Carries by itself while there is little to carry, and has a scribe for as long as there is much."""

    def __init__(self, here: InProcessDelivery, beside: SubprocessDelivery, *, always: bool = False) -> None:
        self._here = here
        self.beside = beside
        self._always = always
        self._begin()

    def _begin(self) -> None:
        self._carrier: InProcessDelivery | SubprocessDelivery = (
            self.beside if self._always and self.beside.is_possible else self._here
        )
        self._since = self._busy_at = time.monotonic()
        self._count = 0

    @property
    def size(self) -> int:
        return self._carrier.size

    def carry(self, batch: EventBatch) -> DeliveryResult:
        self._look(time.monotonic())
        carried = self._carrier.carry(batch)
        self._count += carried.done
        if self._carrier is self.beside and not self.beside.is_possible:
            logger.error("the decision log writes in this process: no scribe can be started: %s", carried.error)
            self._carrier = self._here
        return carried

    def is_needed(self) -> bool:
        self._look(time.monotonic())
        return self._carrier.is_needed()

    def close(self) -> None:
        self._here.close()
        self.beside.close()

    def stand_still(self, timeout: float) -> bool:
        return self._here.stand_still(timeout)

    def go_on(self) -> None:
        self._here.go_on()

    def reset_after_fork(self) -> None:
        self._here.reset_after_fork()
        self.beside.reset_after_fork()
        self._begin()

    def _look(self, now: float) -> None:
        """Once in a while: how much is there to carry, and who should?"""
        past = now - self._since
        if past < GLANCE:
            return
        rate = self._count / past
        self._since, self._count = now, 0
        if rate >= BUSY / 2 or (self._always and rate):
            self._busy_at = now
        if self._carrier is self._here and (rate >= BUSY or (self._always and rate)) and self.beside.is_possible:
            self._here.close()
            self._carrier = self.beside
        elif self._carrier is self.beside and now - self._busy_at > CALM:
            self.beside.close()
            self._carrier = self.beside if self._always else self._here


def made(recorder: EventDecoder, batch: EventBatch, records: list[DecisionRecord], unmade: list[FailedEvent]) -> None:
    """Add the records of a batch, and the decisions of which none can be made: a bug costs one record, not the log."""
    token, first, raws = batch
    for number, raw in enumerate(raws, first):
        try:
            records.append(recorder.record(raw, token, number))
        except Exception as error:
            unmade.append(FailedEvent(_when(raw), repr(error)))


def _when(raw: bytes) -> int:
    with suppress(Exception):
        return int(loads(raw)[0])
    return time.time_ns() // 1000


def _can_start() -> bool:
    """Whether this process knows of an interpreter: one that is part of a server or frozen into a program is none."""
    name = os.path.basename(sys.executable or "").lower()
    return name.startswith(("python", "pypy")) and not getattr(sys, "frozen", False)


def _fd(pipe: Any) -> int:
    number: int = pipe.fileno()
    return number


def _widen(pipe: int) -> None:
    """Only Linux can, and not beyond what its operator allows."""
    with suppress(ImportError, AttributeError, OSError):
        from fcntl import F_SETPIPE_SZ, fcntl

        fcntl(pipe, F_SETPIPE_SZ, PIPE)


def _close_pipes(process: subprocess.Popen[bytes]) -> None:
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            pipe.close()


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
