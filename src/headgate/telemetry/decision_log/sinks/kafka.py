"""The decision log in a Kafka topic: one JSON message per record, with its client as the key."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import unquote

from confluent_kafka import Producer

from headgate.telemetry.decision_log.sinks import ConnectedSink

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from urllib.parse import SplitResult

    from headgate.telemetry.decision_log.record import DecisionRecord

__all__ = ["KafkaSink", "open_sink"]

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


def open_sink(parts: SplitResult, settings: dict[str, str]) -> KafkaSink:
    topic = unquote(parts.path.removeprefix("/"))
    if not parts.netloc or not topic:
        raise ValueError("write kafka://host:9092/topic")
    return KafkaSink(parts.netloc, topic, settings=settings)


class KafkaSink(ConnectedSink):
    """Writes to a topic, and waits until the brokers have confirmed the batch."""

    def __init__(self, brokers: str, topic: str, *, settings: Mapping[str, Any] | None = None) -> None:
        super().__init__()
        self._topic = topic
        self._settings = {**DEFAULTS, **(settings or {}), "bootstrap.servers": brokers}

    def write(self, batch: Sequence[DecisionRecord]) -> None:
        producer = self._connection = self._connection or Producer(self._settings)
        unsent, failed = len(batch), []

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
        if self._connection is not None:
            self._connection.flush(TIMEOUT_S)
            self._connection = None
