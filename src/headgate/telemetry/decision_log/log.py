"""The decision log: every rejection, and a sample of what passed, for those who are asked afterwards. See
docs/decision-log.md."""

from __future__ import annotations

import os
import socket
import sys
import weakref
from random import random
from typing import TYPE_CHECKING, Any, Final, Literal, Self, TypeAlias, get_args

from headgate.errors import InvalidConfiguration
from headgate.gate.base import SECRET_VARIABLE
from headgate.gate.event_stream import flush_all
from headgate.telemetry.decision_log.codec import EventDecoder, EventEncoder, pack_denial
from headgate.telemetry.decision_log.delivery import (
    AdaptiveDelivery,
    InProcessDelivery,
    SubprocessDelivery,
    WriterConfig,
)
from headgate.telemetry.decision_log.queue import PATIENCE, LogQueue, LogStats
from headgate.telemetry.decision_log.sinks import open_sink
from headgate.telemetry.pseudonyms import Pseudonymizer

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from headgate.gate.event_stream import DecisionEvent
    from headgate.telemetry.decision_log.sinks import Sink

__all__ = ["DecisionLog"]

By: TypeAlias = Literal["auto", "thread", "process"]

NEEDS_THIS_PROCESS: Final = "logging"
"""The sink whose handlers are here and nowhere else."""


class DecisionLog:
    """Keeps what a gate decides: give it to the gate as `on_decision=`.

    A rejection costs a request no more than to be put into a queue, and what passes costs the throw of a die. Records
    are made and written by a thread of its own, or, while there are many, by a process beside this one; while the sink
    does not take them, up to `most` wait.
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
        writer: By = "auto",
    ) -> None:
        clients = Pseudonymizer(secret, show=show)
        self._sample = _checked_sample(sample)
        self._weight = 1 / sample if sample else 0.0
        self._most = min(_checked_whole("most", most), sys.maxsize)
        self._most_passed = self._most // 2
        """Rejections matter more: of a queue for both, what passed gets half."""
        opened = open_sink(sink) if isinstance(sink, str) else sink
        size = _checked_whole("batch", getattr(opened, "batch", 1000) if batch is None else batch)
        recorder = EventDecoder(clients, node=socket.gethostname() if node is None else node, region=region)
        packer = EventEncoder()
        self._pack, self._places = packer.pack, packer.places
        here = InProcessDelivery(opened, recorder, packer, clients=clients, size=size)
        self._scribe: SubprocessDelivery | None = None
        if _may_be_beside(sink, _checked_writer(writer)) and isinstance(sink, str):
            given = os.environ[SECRET_VARIABLE] if secret is None else secret
            keyed = given.encode() if isinstance(given, str) else bytes(given)
            terms = WriterConfig(sink, size, keyed, tuple(show), recorder.node, region)
            self._scribe = SubprocessDelivery(terms, packer, clients=clients)
        self._writer = LogQueue(
            here if self._scribe is None else AdaptiveDelivery(here, self._scribe, always=writer == "process"),
            most=most,
            every=_checked_every(getattr(opened, "every", 0.2) if every is None else every),
        )
        self._queue = self._writer.queue
        # A log that nobody uses any more writes what it has, and lets its sink go.
        weakref.finalize(self, self._writer.close, PATIENCE, wait=False).atexit = False

    def observe(self, events: Sequence[DecisionEvent]) -> None:
        """Queue the rejections of a batch, and a sample of the requests that passed."""
        for event in events:
            self._keep(event)
        if self._queue and self._writer.thread is None:
            self._writer.ensure()

    def _keep(self, event: DecisionEvent) -> None:
        """Keep a decision, if it is a rejection or drawn for the sample."""
        weight, most = 1.0, self._most
        if event.outcome == "allowed" and not (event.shadows and _would_deny(event)):
            if random() >= self._sample:
                return
            weight, most = self._weight, self._most_passed
        else:
            packed = pack_denial(self._places, event)
            if packed is not None:
                if len(self._queue) >= most:
                    self._writer.lose(event.received_us)
                else:
                    self._queue.append(packed)
                return
        if len(self._queue) >= most:
            self._writer.lose(event.received_us)
            return
        self._queue.append(self._pack(event, weight))

    @property
    def stats(self) -> LogStats:
        """How many records were written, wait, or were lost, and what keeps the sink from taking them."""
        flush_all()
        return self._writer.stats

    @property
    def scribe(self) -> int | None:
        """The id of the process that writes beside this one; None while this one writes itself."""
        return None if self._scribe is None else self._scribe.pid

    def flush(self, timeout: float = 5.0) -> bool:
        """Have all written that was decided until now; whether that was done in so many seconds."""
        flush_all()
        return self._writer.flush(timeout)

    def close(self, timeout: float = 5.0) -> None:
        """Write what there is, as far as that is done in so many seconds, and close the sink. What is decided after
        this is not kept."""
        flush_all()
        self._most = self._most_passed = 0
        self._writer.close(timeout)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()


def _would_deny(event: DecisionEvent) -> bool:
    """True if a limit in shadow mode would have denied the request."""
    return any(not shadow.decision.allowed for shadow in event.shadows)


def _may_be_beside(sink: Sink | str, writer: By) -> bool:
    """Whether another process may write to the sink: one that it can open by its URL."""
    is_possible = isinstance(sink, str) and not sink.startswith(f"{NEEDS_THIS_PROCESS}:")
    if writer == "process" and not is_possible:
        raise InvalidConfiguration(
            "writer 'process': another process can write only to a sink with a URL, and not to logging; give 'thread'"
        )
    return is_possible and writer != "thread"


def _checked_writer(writer: Any) -> By:
    if writer not in get_args(By):
        raise InvalidConfiguration(f"writer {writer!r} is none: give 'auto', 'thread' or 'process'")
    checked: By = writer
    return checked


def _checked_sample(sample: float) -> float:
    if isinstance(sample, bool) or not isinstance(sample, int | float) or not 0 <= sample <= 1:
        raise InvalidConfiguration(f"sample {sample!r}: give the share of requests that pass to keep, from 0 up to 1")
    return float(sample)


def _checked_whole(name: str, number: Any) -> int:
    if type(number) is not int or number < 1:
        raise InvalidConfiguration(f"{name} {number!r} is not a number of records: give a whole number of at least 1")
    return number


def _checked_every(every: Any) -> float:
    if isinstance(every, bool) or not isinstance(every, int | float) or not 0 < every <= 60:
        raise InvalidConfiguration(f"every {every!r}: give the seconds between two batches, above 0 and at most 60")
    return float(every)
