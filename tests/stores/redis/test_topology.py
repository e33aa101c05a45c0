"""Discovery of the slot map of a cluster."""

from __future__ import annotations

from headgate.stores.redis.encoding import Node
from headgate.stores.redis.topology import Cluster

HERE, THERE = Node("127.0.0.1", 1), Node("127.0.0.1", 2)


def test_failed_node_is_asked_last_for_the_slot_map() -> None:
    cluster = Cluster([HERE, THERE])
    cluster.forget([HERE])
    assert next(cluster.discover())[0].node == THERE
