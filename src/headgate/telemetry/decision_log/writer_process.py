"""The scribe: a process that makes records of what another has decided, and writes them.

It is told what to write over its standard input, and says on its standard output what became of it. It ends when nobody
can tell it anything any more, which is at the latest when the other process is gone; what it was told by then, it
writes.
"""

from __future__ import annotations

import os
import select
import signal
import sys
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final

from headgate.telemetry.decision_log.codec import EventDecoder
from headgate.telemetry.decision_log.delivery import EventBatch, FailedEvent, WriterConfig, made
from headgate.telemetry.decision_log.pipe_framing import read_frame, write_frame
from headgate.telemetry.decision_log.sinks import open_sink
from headgate.telemetry.pseudonyms import Pseudonymizer

if TYPE_CHECKING:
    from headgate.telemetry.decision_log.record import DecisionRecord
    from headgate.telemetry.decision_log.sinks import Sink

__all__ = ["main"]

LOOKS: Final = 1.0
"""Seconds between two looks whether the other process is still there."""
POLITENESS: Final = 10
"""How much later than others it gets its turn, where there are not enough processors for all: requests go first."""


def main() -> None:
    """Serve one other process, until it ends."""
    for name in ("SIGINT", "SIGTERM", "SIGHUP"):
        # Whoever ends all processes at once means the other one: this one ends after it, when all is written.
        with suppress(AttributeError, ValueError):
            signal.signal(getattr(signal, name), signal.SIG_IGN)
    with suppress(AttributeError, OSError):
        os.nice(POLITENESS)
        # And that it wakes up is no reason to take the processor from anybody.
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    answers = os.dup(sys.stdout.fileno())
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what libraries print is no answer
    questions = sys.stdin.fileno()
    parent, *rest = read_frame(questions)
    terms = WriterConfig(*rest)
    recorder = EventDecoder(Pseudonymizer(terms.secret, show=terms.show), node=terms.node, region=terms.region)
    sink = open_sink(terms.sink)
    with suppress(BrokenPipeError):
        write_frame(answers, "ready")
    while (asked := _next(questions, parent)) is not None:
        token, first, labels, count = asked
        raws: list[bytes] = []
        while len(raws) < count and (piece := read_frame(questions)) is not None:
            raws += piece
        recorder.learn(labels)
        answer = _written(recorder, sink, EventBatch(token, first, raws), terms.size)
        with suppress(BrokenPipeError):
            write_frame(answers, answer)
    sink.close()


def _next(questions: int, parent: int) -> Any:
    """What is asked next; None if nothing will be."""
    if os.name == "posix":
        while not select.select([questions], [], [], LOOKS)[0]:
            # A pipe stays open while a child of the other process has it, too; that one asks nothing.
            if os.getppid() != parent:
                return None
    return read_frame(questions)


def _written(
    recorder: EventDecoder, sink: Sink, batch: EventBatch, size: int
) -> tuple[int, list[FailedEvent], str | None]:
    """Write as much as the sink takes; how much that was, what could not be made, and why no more."""
    token, first, raws = batch
    unmade: list[FailedEvent] = []
    for start in range(0, len(raws), size):
        records: list[DecisionRecord] = []
        some: list[FailedEvent] = []
        made(recorder, EventBatch(token, first + start, raws[start : start + size]), records, some)
        try:
            sink.write(records)
        except Exception as error:
            return start, _plain(unmade), f"{type(error).__name__}: {error}"
        unmade += some
    return len(raws), _plain(unmade), None


def _plain(unmade: list[FailedEvent]) -> Any:
    """As pipes take it."""
    return [tuple(each) for each in unmade]
