"""The decision log in a Kafka topic: one message of JSON for each record, with its client as the key."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, Final

from confluent_kafka import Producer

from headgate._fork import reinit_after_fork

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from headgate.telemetry.decision_log.record import DecisionRecord

__all__ = ["KafkaSink"]

PATIENCE: Final = 10.0
"""Seconds until a message that no broker has confirmed counts as not written."""

DEFAULTS: Final[Mapping[str, Any]] = {
    "acks": "all",
    "enable.idempotence": True,
    "linger.ms": 5,
    "compression.type": "lz4",
    "message.timeout.ms": int(PATIENCE * 1000),
    "queue.buffering.max.messages": 100_000,
    "client.id": "headgate",
    "log_level": 0,
}
"""What the URL does not set; its settings are librdkafka's own."""


class KafkaSink:
    """Writes into a topic. A batch is written when brokers have confirmed all of it."""

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
        refused = [message["_error"] for message in messages if "_error" in message]
        end = time.monotonic() + PATIENCE + 1
        while unsent > len(refused) and time.monotonic() < end:
            producer.flush(0.2)
        if failed or refused or unsent:
            # What is still on its way is not waited for: all of the batch comes again, under the same ids.
            producer.purge()
            producer.flush(0)
            reason = (*failed, *refused, "no broker has answered in time")[0]
            raise ConnectionError(f"Kafka has not taken {len(failed) or unsent} of {len(batch)} records: {reason}")

    def close(self) -> None:
        if self._producer is not None:
            self._producer.flush(PATIENCE)
            self._producer = None

    def reset_after_fork(self) -> None:
        """A producer's threads stay with the process that made it: here it is neither used nor ended."""
        if self._producer is not None:
            _inherited.append(self._producer)
            self._producer = None


_inherited: list[Any] = []
"""Producers of parents, kept so that they are never ended."""
