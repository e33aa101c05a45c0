"""The decision log: a record of every rejection, and of a sample of other requests. See docs/decision-log.md."""

from __future__ import annotations

import os
import socket
import sys
import weakref
from random import random
from typing import TYPE_CHECKING, Any, Final, Literal, Self, TypeAlias, get_args

from headgate.errors import InvalidConfiguration
from headgate.gate.base import SECRET_VARIABLE
from headgate.gate.event_stream import DecisionEvent, flush_all
from headgate.telemetry.decision_log.codec import EventDecoder, EventEncoder
from headgate.telemetry.decision_log.delivery import (
    AdaptiveDelivery,
    InProcessDelivery,
    SubprocessDelivery,
    WriterConfig,
)
from headgate.telemetry.decision_log.queue import EXIT_TIMEOUT_S, LogQueue, LogStats
from headgate.telemetry.decision_log.sinks import open_sink
from headgate.telemetry.pseudonyms import Pseudonymizer

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from headgate.gate.admission import Admission
    from headgate.gate.request import RequestInfo
    from headgate.telemetry.decision_log.sinks import Sink

__all__ = ["DecisionLog"]

Writer: TypeAlias = Literal["auto", "thread", "process"]

IN_PROCESS_SCHEME: Final = "logging"
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
        clients = Pseudonymizer(secret, show=show)
        self._sample = _checked_sample(sample)
        self._weight = 1 / sample if sample else 0.0
        self._max_queued = min(_checked_count("most", most), sys.maxsize)
        opened = open_sink(sink) if isinstance(sink, str) else sink
        size = _checked_count("batch", getattr(opened, "batch", 1000) if batch is None else batch)
        decoder = EventDecoder(clients, node=socket.gethostname() if node is None else node, region=region)
        self._encoder = EventEncoder(clients)
        in_process = InProcessDelivery(opened, decoder, self._encoder, size=size)
        self._subprocess: SubprocessDelivery | None = None
        if _can_use_process(sink, _checked_writer(writer)) and isinstance(sink, str):
            given = os.environ[SECRET_VARIABLE] if secret is None else secret
            key = given.encode() if isinstance(given, str) else bytes(given)
            config = WriterConfig(sink, size, key, tuple(show), decoder.node, region)
            self._subprocess = SubprocessDelivery(config, self._encoder)
        self._queue = LogQueue(
            in_process
            if self._subprocess is None
            else AdaptiveDelivery(in_process, self._subprocess, always=writer == "process"),
            max_waiting=most,
            every=_checked_interval(getattr(opened, "every", 0.2) if every is None else every),
        )
        # A log that is garbage-collected still writes its records, and closes its sink.
        weakref.finalize(self, self._queue.close, EXIT_TIMEOUT_S, wait=False).atexit = False

    def observe(self, events: Sequence[DecisionEvent]) -> None:
        """Queue the rejections of a batch, and a sample of the requests that passed."""
        for event in events:
            weight, max_queued = 1.0, self._max_queued
            if event.outcome == "allowed" and not (event.shadows and _would_be_denied(event)):
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


def _would_be_denied(event: DecisionEvent) -> bool:
    """True if a limit in shadow mode would have denied the request."""
    return any(not shadow.decision.allowed for shadow in event.shadows)


def _can_use_process(sink: Sink | str, writer: Writer) -> bool:
    """True if another process can open the sink, by its URL."""
    is_possible = isinstance(sink, str) and not sink.startswith(f"{IN_PROCESS_SCHEME}:")
    if writer == "process" and not is_possible:
        raise InvalidConfiguration(
            "writer 'process': another process can write only to a sink with a URL, and not to logging; give 'thread'"
        )
    return is_possible and writer != "thread"


def _checked_writer(writer: Any) -> Writer:
    if writer not in get_args(Writer):
        raise InvalidConfiguration(f"unknown writer {writer!r}: give 'auto', 'thread' or 'process'")
    checked: Writer = writer
    return checked


def _checked_sample(sample: float) -> float:
    if isinstance(sample, bool) or not isinstance(sample, int | float) or not 0 <= sample <= 1:
        raise InvalidConfiguration(f"sample {sample!r}: give the share of passed requests to log, from 0 to 1")
    return float(sample)


def _checked_count(name: str, number: Any) -> int:
    if type(number) is not int or number < 1:
        raise InvalidConfiguration(f"{name} {number!r}: give a number of records, at least 1")
    return number


def _checked_interval(every: Any) -> float:
    if isinstance(every, bool) or not isinstance(every, int | float) or not 0 < every <= 60:
        raise InvalidConfiguration(f"every {every!r}: give the seconds between two batches, above 0 and at most 60")
    return float(every)
