"""The batch protocol over several shards."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

from headgate import Limit, StoreError, StoreTimeout
from headgate.stores.operations import Check
from headgate.stores.redis.batch_protocol import NotSent, run_batch
from headgate.stores.redis.decoding import accept
from headgate.stores.redis.encoding import Command, CommandEncoder, Keys, Node
from headgate.stores.redis.topology import Cluster

HOUR = timedelta(hours=1)
HERE, THERE = Node("127.0.0.1", 1), Node("127.0.0.1", 2)
ALLOWED, DENIED = [1_000_000, 4, 0], [1_000_000, 0, 0, 7, 0, 0]
GIVEN_BACK = [1, 5, 0, 0, 0]
SLOTS = [(0, 8191, (b"127.0.0.1", 1)), (8192, 16383, (b"127.0.0.1", 2))]


def answer_of_two_shards(here: Any, there: Any, undone: Any = None) -> Any:
    """The answer to a check over two shards that say this, and that to whoever takes a charge back."""
    cluster = Cluster([HERE])
    cluster._learn(SLOTS, HERE)
    by_node: dict[Node, Any] = {}
    wire = CommandEncoder("test", None)
    for number in range(100):
        key = Limit(5, HOUR, name=f"limit-{number}").by("ada")
        command = Command(None, Keys.of(wire.name(key)), ())
        cluster.locate(command)
        by_node.setdefault(command.node, key)  # type: ignore[arg-type] # it was located
    protocol = run_batch([Check((by_node[HERE], by_node[THERE]), 1)], wire, cluster)
    replies = {HERE: here, THERE: there}
    try:
        commands = next(protocol)
        while True:
            for command in commands:
                if not command.calls:
                    reply: Any = SLOTS
                elif isinstance(command.calls[0], Check):
                    reply = replies[command.node]  # type: ignore[index] # it was located
                else:
                    reply = undone
                if isinstance(reply, StoreError):
                    command.reply = reply
                else:
                    accept(command, reply)
            commands = protocol.send(None)
    except StopIteration as end:
        (answer,) = end.value
        return answer


@pytest.mark.parametrize(
    ("here", "there", "undone", "may_have_happened"),
    [
        (NotSent("a"), NotSent("b"), None, False),
        (NotSent("a"), StoreTimeout("b"), None, True),
        (StoreTimeout("a"), NotSent("b"), None, True),
        (NotSent("a"), ALLOWED, GIVEN_BACK, False),
        (NotSent("a"), ALLOWED, StoreTimeout("c"), True),
        (NotSent("a"), ALLOWED, NotSent("c"), True),
        (NotSent("a"), DENIED, None, False),
    ],
)
def test_uncertain_charge_on_one_shard_is_reported(
    here: Any, there: Any, undone: Any, *, may_have_happened: bool
) -> None:
    for first, second in ((here, there), (there, here)):
        answer = answer_of_two_shards(first, second, undone)
        assert isinstance(answer, StoreError)
        assert answer.may_have_happened is may_have_happened
