"""Small things that broke once, where no server is needed to see it."""

from __future__ import annotations

import os
import signal
import threading
from datetime import timedelta
from itertools import count
from typing import TYPE_CHECKING, Any

import pytest

from headgate import Decision, Limit, StoreError, StoreTimeout
from headgate.events import EventEmitter
from headgate.failure import FleetShare
from headgate.local.block_list import BlockList
from headgate.local.ledger import MAX_BATCH, OutageDebt, OutageLedger, settle
from headgate.local.tier import LocalTier
from headgate.stores.operations import Check, Refund
from headgate.stores.redis import encoding as wire_module
from headgate.stores.redis.background_client import read_block
from headgate.stores.redis.batch_protocol import NotSent, run_batch
from headgate.stores.redis.connection_pool import PendingConnection
from headgate.stores.redis.decoding import accept
from headgate.stores.redis.encoding import NO_KEYS, Command, CommandEncoder, Keys, Node
from headgate.stores.redis.topology import Cluster
from headgate.testing import FakeClock

if TYPE_CHECKING:
    from collections.abc import Callable

HOUR = timedelta(hours=1)
HERE, THERE = Node("127.0.0.1", 1), Node("127.0.0.1", 2)
ALLOWED, DENIED = [1_000_000, 4, 0], [1_000_000, 0, 0, 7, 0, 0]
GIVEN_BACK = [1, 5, 0, 0, 0]
SLOTS = [(0, 8191, (b"127.0.0.1", 1)), (8192, 16383, (b"127.0.0.1", 2))]


def in_a_child(work: Callable[[], None]) -> int:
    """The exit status of a forked child that does the work; killed if it takes longer than anybody would wait."""
    pid = os.fork()
    if not pid:
        signal.alarm(10)
        status = 1
        try:
            work()
            status = 0
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def told_by_two_shards(here: Any, there: Any, undone: Any = None) -> Any:
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
    conversation = run_batch([Check((by_node[HERE], by_node[THERE]), 1)], wire, cluster)
    replies = {HERE: here, THERE: there}
    try:
        commands = next(conversation)
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
            commands = conversation.send(None)
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
def test_what_one_shard_may_have_charged_is_not_charged_again(
    here: Any, there: Any, undone: Any, *, may_have_happened: bool
) -> None:
    for first, second in ((here, there), (there, here)):
        answer = told_by_two_shards(first, second, undone)
        assert isinstance(answer, StoreError)
        assert answer.may_have_happened is may_have_happened


def test_what_is_settled_is_not_more_than_there_is_time_for() -> None:
    """To look at all debts of a long outage took longer than the time to settle them: none ever were."""
    ledger = OutageLedger(FakeClock(10**15))
    for number in range(10 * MAX_BATCH):
        ledger.record(Check((Limit(5, HOUR).by(number),), 2))
    seconds = count()
    looked_at: list[int] = []

    def run_all(checks: list[Check]) -> list[Decision]:
        looked_at.append(10 * MAX_BATCH - ledger.debt.keys)
        return [Decision(True, check.keys, ((3, 0, 0, 0),), None) for check in checks]

    result = settle(ledger, run_all, timeout_s=2.5, now=lambda: float(next(seconds)))
    assert looked_at == [MAX_BATCH, 2 * MAX_BATCH]
    assert (result.charged, result.left, ledger.debt) == (
        4 * MAX_BATCH,
        16 * MAX_BATCH,
        OutageDebt(8 * MAX_BATCH, 16 * MAX_BATCH),
    )


def test_a_server_that_hangs_is_asked_last_where_the_others_are() -> None:
    cluster = Cluster([HERE, THERE])
    cluster.forget([HERE])
    assert next(cluster.discover())[0].node == THERE


def test_connecting_has_an_end_whatever_it_raises() -> None:
    def make() -> Any:
        raise KeyError("the provider of credentials is away")

    with pytest.raises(NotSent, match="the provider of credentials"):
        PendingConnection(make).wait(10)


def test_no_thread_to_be_had_is_a_failure_to_connect(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", start)
    with pytest.raises(NotSent, match="can't start new thread"):
        PendingConnection(lambda: None).wait(10)


def test_numbers_are_made_texts_before_they_are_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    """hiredis crashes if an interrupt comes while it does that itself."""
    packed: list[tuple[Any, ...]] = []

    def pack(words: tuple[Any, ...]) -> bytes:
        packed.append(words)
        return real(words)

    real: Callable[..., bytes] = wire_module.pack_command
    monkeypatch.setattr(wire_module, "pack_command", pack)
    wire = CommandEncoder("test", None)
    key, other = Limit(5, HOUR, name="a").by("ada"), Limit(5, HOUR, name="b").by("ada")
    for command in wire.encode([Check((key, other), 2), Check((key,), 3), Refund(key, 1, "id", 5)]):
        command.pack()
    Command(None, NO_KEYS, ("PING", 1)).pack()
    assert ("PING", "1") in packed
    assert {type(word) for words in packed for word in words} <= {str, bytes}


@pytest.mark.parametrize("until_us", [-1, 2**53, 10**30])
def test_a_block_until_an_instant_that_cannot_be_is_none(until_us: int) -> None:
    assert read_block(b'{"kind":"ip","value":"10.0.0.1","until_us":%d}' % until_us) is None
    assert read_block(b'{"kind":"ip","value":"10.0.0.1","until_us":%d}' % (2**53 - 1)) is not None


def test_a_text_that_nobody_can_read_is_no_block() -> None:
    assert read_block(b"[" * 1_000_000) is None


@pytest.fixture
def local() -> LocalTier:
    return LocalTier(EventEmitter(), clock=None, fleet=FleetShare())


def test_a_child_can_block_though_its_parent_was_about_to() -> None:
    blocks = BlockList()
    with blocks._lock:
        assert in_a_child(lambda: blocks.set("tenant", "acme", None, None)) == 0


def test_a_child_gives_nothing_back_that_its_parent_has_prepaid(local: LocalTier) -> None:
    local.unspent = [Refund(Limit(5, HOUR).by("ada"), 3)]

    def look() -> None:
        assert not local.unspent

    assert in_a_child(look) == 0
    assert len(local.unspent) == 1


def test_a_child_looks_for_what_there_is_to_do_at_its_first_check(local: LocalTier) -> None:
    looks: list[int] = []
    local.ensure = lambda: looks.append(1)
    local.checks, local.is_active = 4, False

    def check() -> None:
        local.checks += 1
        assert local.is_active
        local.try_local(Check((Limit(5, HOUR).by("ada"),), 1))
        assert looks

    assert in_a_child(check) == 0
