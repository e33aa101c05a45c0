"""Kafka brokers for tests: librdkafka's own mock cluster, on real sockets."""

from __future__ import annotations

import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from confluent_kafka import OFFSET_BEGINNING, Consumer, Producer, TopicPartition

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextmanager
def mock_brokers() -> Iterator[str]:
    """The addresses of three brokers."""
    cluster = Producer({"bootstrap.servers": "mock", "test.mock.num.brokers": 3})
    found = cluster.list_topics(timeout=10).brokers.values()
    yield ",".join(f"{each.host}:{each.port}" for each in found)
    cluster.flush(0)


def consume(brokers: str, topic: str, count: int) -> list[Any]:
    """The messages of a topic: at least `count`, unless they take longer than 20 seconds."""
    consumer = Consumer({"bootstrap.servers": brokers, "group.id": topic, "log_level": 0})
    partitions = consumer.list_topics(topic, timeout=10).topics[topic].partitions
    consumer.assign([TopicPartition(topic, partition, OFFSET_BEGINNING) for partition in partitions])
    found: list[Any] = []
    end = time.monotonic() + 20
    while len(found) < count and time.monotonic() < end:
        found += [each for each in consumer.consume(500, timeout=0.2) if each.error() is None]
    found += consumer.consume(500, timeout=0.2)
    consumer.close()
    return found
