"""The decision log in a Kafka topic: one JSON message per record, with its client as the key."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, Final

from confluent_kafka import Producer

from headgate._fork import reinit_after_fork

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from headgate.telemetry.decision_log.record import DecisionRecord

__all__ = ["KafkaSink"]

TIMEOUT_S: Final = 10.0
"""The time for brokers to confirm a message."""

DEFAULTS: Final[Mapping[str, Any]] = {
    "acks": "all",
    "enable.idempotence": True,
    "linger.ms": 5,
    "compression.type": "lz4",
    "message.timeout.ms": int(TIMEOUT_S * 1000),
    "queue.buffering.max.messages": 100_000,
    "client.id": "headgate",
    "log_level": 0,
}
"""Default settings of librdkafka, which a URL can override."""


class KafkaSink:
    """Writes to a topic, and waits until the brokers have confirmed the batch."""

    def __init__(self, brokers: str, topic: str, *, settings: Mapping[str, Any] | None = None) -> None:
        self._topic = topic
        self._settings = {**DEFAULTS, **(settings or {}), "bootstrap.servers": brokers}
        self._producer: Producer | None = None
        reinit_after_fork(self)

    def write(self, batch: Sequence[DecisionRecord]) -> None:
        if self._producer is None:
            self._producer = Producer(self._settings)
        producer, unsent, failed = self._producer, len(batch), []

        def delivered(error: Any, message: Any) -> None:
            nonlocal unsent
            unsent -= 1
            if error is not None:
                failed.append(error)

        messages = [{"key": record.client, "value": record.as_json()} for record in batch]
        producer.produce_batch(self._topic, messages, on_delivery=delivered)
        rejected = [message["_error"] for message in messages if "_error" in message]
        end = time.monotonic() + TIMEOUT_S + 1
        while unsent > len(rejected) and time.monotonic() < end:
            producer.flush(0.2)
        if failed or rejected or unsent:
            # Do not wait for the rest: the whole batch is sent again, with the same ids.
            producer.purge()
            producer.flush(0)
            reason = (*failed, *rejected, "no broker answered in time")[0]
            raise ConnectionError(f"Kafka did not accept {len(failed) or unsent} of {len(batch)} records: {reason}")

    def close(self) -> None:
        if self._producer is not None:
            self._producer.flush(TIMEOUT_S)
            self._producer = None

    def reset_after_fork(self) -> None:
        """Drop the parent's producer, whose threads do not exist here, without closing it."""
        if self._producer is not None:
            _inherited.append(self._producer)
            self._producer = None


_inherited: list[Any] = []
"""Producers of parents, kept alive so that they are never closed."""
