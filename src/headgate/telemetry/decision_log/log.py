"""The decision log: a record of every rejection, and of a sample of other requests. See docs/decision-log.md."""

from __future__ import annotations

import sys
import weakref
from random import random
from typing import TYPE_CHECKING, Any, Final, Literal, Self, TypeAlias, get_args

from headgate._node import node_name
from headgate.errors import InvalidConfiguration
from headgate.gate.event_stream import DecisionEvent, flush_all
from headgate.telemetry.decision_log.codec import EventDecoder, EventEncoder
from headgate.telemetry.decision_log.delivery import AdaptiveDelivery, InProcessDelivery, SubprocessDelivery
from headgate.telemetry.decision_log.queue import EXIT_TIMEOUT_S, LogQueue, LogStats
from headgate.telemetry.decision_log.sinks import open_sink
from headgate.telemetry.pseudonyms import Pseudonymizer, checked_secret

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from headgate.gate.admission import Admission, RequestInfo
    from headgate.telemetry.decision_log.sinks import Sink

__all__ = ["DecisionLog"]

Writer: TypeAlias = Literal["auto", "thread", "process"]

IN_PROCESS_SCHEME: Final = "logging:"
"""The sink whose handlers exist in this process only."""


class DecisionLog:
    """Logs the decisions of gates: pass it to a gate as `on_decision=`, or to `gate.add_observer`.

    Records are created and written in the background: by a thread, or, while there are many, by a separate process.
    While the sink is unavailable, up to `most` records wait.
    """

    def __init__(
        self,
        sink: Sink | str = "sqlite:///decisions.db",
        *,
        secret: str | bytes | None = None,
        node: str | None = None,
        region: str = "",
        sample: float = 0.01,
        show: Collection[str] = ("tenant",),
        most: int = 100_000,
        batch: int | None = None,
        every: float | None = None,
        writer: Writer = "auto",
    ) -> None:
        key = checked_secret(secret)
        clients = Pseudonymizer(key, show=show)
        if not is_number(sample) or not 0 <= sample <= 1:
            raise InvalidConfiguration(f"sample {sample!r}: give the share of passed requests to log, from 0 to 1")
        self._sample = float(sample)
        self._weight = 1 / sample if sample else 0.0
        opened = open_sink(sink) if isinstance(sink, str) else sink
        size = getattr(opened, "batch", 1000) if batch is None else batch
        for name, count in (("most", most), ("batch", size)):
            if type(count) is not int or count < 1:
                raise InvalidConfiguration(f"{name} {count!r}: give a number of records, at least 1")
        self._max_queued = min(most, sys.maxsize)
        every = getattr(opened, "every", 0.2) if every is None else every
        if not is_number(every) or not 0 < every <= 60:
            raise InvalidConfiguration(f"every {every!r}: give the seconds between two batches, above 0 and at most 60")
        if writer not in get_args(Writer):
            raise InvalidConfiguration(f"unknown writer {writer!r}: give 'auto', 'thread' or 'process'")
        decoder = EventDecoder(clients, node=node_name(node), region=region)
        self._encoder = EventEncoder(clients)
        self._subprocess: SubprocessDelivery | None = None
        if isinstance(sink, str) and not sink.startswith(IN_PROCESS_SCHEME):
            if writer != "thread":
                config = sink, size, key, tuple(show), decoder.node, region
                self._subprocess = SubprocessDelivery(self._encoder, *config)
        elif writer == "process":
            possible = "another process can write only to a sink with a URL, and not to logging"
            raise InvalidConfiguration(f"writer 'process': {possible}; give 'thread'")
        in_process = InProcessDelivery(opened, decoder, self._encoder, size=size)
        delivery = AdaptiveDelivery(in_process, self._subprocess, always=writer == "process")
        self._queue = LogQueue(delivery, max_waiting=most, every=float(every))
        # A log that is garbage-collected still writes its records, and closes its sink.
        weakref.finalize(self, self._queue.close, EXIT_TIMEOUT_S, wait=False).atexit = False

    def observe(self, events: Sequence[DecisionEvent]) -> None:
        """Queue the rejections of a batch, and a sample of the requests that passed."""
        for event in events:
            weight, max_queued = 1.0, self._max_queued
            would_deny = event.shadows and any(not shadow.decision.allowed for shadow in event.shadows)
            if event.outcome == "allowed" and not would_deny:
                if random() >= self._sample:
                    continue
                weight, max_queued = self._weight, max_queued // 2  # half of the queue is reserved for rejections
            if len(self._queue.events) < max_queued:
                self._queue.events.append(self._encoder.encode(event, weight))
            else:
                self._queue.lose(event.received_us)
        self._queue.ensure_thread()

    def __call__(self, request: RequestInfo, admission: Admission) -> None:
        """Record one decision, for an `on_decision` function of the app that passes it on."""
        if admission.resolution is not None:
            self.observe([DecisionEvent.of(request, admission, admission.received_us)])

    @property
    def stats(self) -> LogStats:
        """The numbers of records written, waiting and lost, and the error of the sink."""
        flush_all()
        return self._queue.stats

    @property
    def writer_pid(self) -> int | None:
        """The id of the process that writes the log; None while this process writes it."""
        return None if self._subprocess is None else self._subprocess.pid

    def flush(self, timeout: float = 5.0) -> bool:
        """Write the records of all decisions so far; False if that takes longer than `timeout` seconds."""
        flush_all()
        return self._queue.flush(timeout)

    def close(self, timeout: float = 5.0) -> None:
        """Write the waiting records, for `timeout` seconds at most, and close the sink. Later decisions are ignored."""
        flush_all()
        self._max_queued = 0
        self._queue.close(timeout)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()


def is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
