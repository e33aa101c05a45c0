"""The writer process of the decision log: creates records from the encoded events of another process.

It reads batches from its standard input, and answers on its standard output. It ends with its input, at the latest when
the other process is gone; batches that it has received by then are written.
"""

from __future__ import annotations

import os
import select
import signal
import sys
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final

from headgate.telemetry.decision_log.codec import EventDecoder
from headgate.telemetry.decision_log.delivery import EventBatch, WriterConfig, decode, read_frame, write_frame
from headgate.telemetry.decision_log.sinks import open_sink
from headgate.telemetry.pseudonyms import Pseudonymizer

if TYPE_CHECKING:
    from headgate.telemetry.decision_log.sinks import Sink

__all__ = ["main"]

PARENT_CHECK_S: Final = 1.0
"""The interval at which it checks that the other process still exists."""
NICENESS: Final = 10


def main() -> None:
    """Serve one other process until it ends."""
    for name in ("SIGINT", "SIGTERM", "SIGHUP"):
        # Signals to the process group are meant for the app; this process ends after it.
        with suppress(AttributeError, ValueError):
            signal.signal(getattr(signal, name), signal.SIG_IGN)
    with suppress(AttributeError, OSError):
        os.nice(NICENESS)
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))  # a wakeup preempts no other process
    output = os.dup(sys.stdout.fileno())
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # libraries may print
    source = sys.stdin.fileno()
    parent, *rest = read_frame(source)
    config = WriterConfig(*rest)
    decoder = EventDecoder(Pseudonymizer(config.secret, show=config.show), node=config.node, region=config.region)
    sink = open_sink(config.sink)
    with suppress(BrokenPipeError):
        write_frame(output, "ready")
    while (header := _next_header(source, parent)) is not None:
        token, first, labels, count = header
        events: list[bytes] = []
        while len(events) < count and (frame := read_frame(source)) is not None:
            events += frame
        decoder.add_labels(labels)
        answer = _write(decoder, sink, EventBatch(token, first, events), config.size)
        with suppress(BrokenPipeError):
            write_frame(output, answer)
    sink.close()


def _next_header(source: int, parent: int) -> Any:
    """The header of the next batch; None if there will be none."""
    if os.name == "posix":
        while not select.select([source], [], [], PARENT_CHECK_S)[0]:
            # A forked child of the other process keeps the pipe open, but never writes to it.
            if os.getppid() != parent:
                return None
    return read_frame(source)


def _write(
    decoder: EventDecoder, sink: Sink, batch: EventBatch, size: int
) -> tuple[int, list[tuple[int, str]], str | None]:
    """Write as much as the sink takes. Returns the fields of a `DeliveryResult`."""
    failed: list[tuple[int, str]] = []
    for start in range(0, len(batch.events), size):
        records, failed_now = decode(decoder, batch.part(start, start + size))
        try:
            sink.write(records)
        except Exception as error:
            return start, failed, f"{type(error).__name__}: {error}"
        failed += [(at_us, error) for at_us, error in failed_now]  # marshal takes no subclass of tuple
    return len(batch.events), failed, None
