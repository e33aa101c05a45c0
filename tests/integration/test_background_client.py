"""The store as it is asked from the background: marks, the fleet, blocks, and the news that others hear of at once."""

from __future__ import annotations

import threading
import time
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import pytest
import redis
from redis.crc import key_slot

from headgate import Decision, InvalidInput, Limit, Limiter, ScriptError, StoreError, StoreTimeout, StoreUnavailable
from headgate.local.block_list import BlockList
from headgate.stores.operations import Check, Refund, Reset
from headgate.stores.redis import pubsub
from headgate.stores.redis.background_client import BackgroundClient, StoredBlock
from headgate.stores.redis.connection_factory import connection_factory
from headgate.stores.redis.encoding import CommandEncoder, Node
from headgate.stores.redis.pubsub import Subscriber
from headgate.stores.redis.topology import Cluster, Sentinel
from headgate.testing import FakeClock
from support.faults import LONG, paused, timed
from support.servers import HOST, AclUser, RedisCluster, RedisServer, SentinelSet, wait_until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

pytestmark = pytest.mark.usefixtures("nothing_is_left_open")

SECOND = 1_000_000
DAY_MS = 86_400_000


@pytest.fixture
def open_background(unique: str) -> Iterator[Callable[..., BackgroundClient]]:
    with ExitStack() as stack:

        def opened(url: str, namespace: str = unique, clock: FakeClock | None = None) -> BackgroundClient:
            background = BackgroundClient(connection_factory(url, asynchronous=False), CommandEncoder(namespace, clock))
            stack.callback(background.close)
            return background

        yield opened


@pytest.fixture
def remote_url(deployment_url: str) -> str:
    return deployment_url


@pytest.fixture
def background(open_background: Callable[..., BackgroundClient], remote_url: str) -> BackgroundClient:
    return open_background(remote_url)


@contextmanager
def client_of(url: str) -> Iterator[Any]:
    """One that finds every key, wherever it lives."""
    client: Any
    if "cluster" in url:
        client = redis.RedisCluster.from_url(url.replace("redis+cluster", "redis"), decode_responses=True)
    elif "sentinel" in url:
        client = redis.Redis(host=HOST, port=primary_port(url), decode_responses=True)
    else:
        client = redis.Redis.from_url(url, decode_responses=True)
    with client:
        yield client
        if isinstance(client, redis.RedisCluster):
            client.disconnect_connection_pools()  # its own close forgets them


def primary_port(url: str) -> int:
    background = BackgroundClient(connection_factory(url, asynchronous=False), CommandEncoder("nobody", None))
    (node,) = background.find_primaries()
    background.close()
    assert node is not None
    return node.port


def now_us(client: Any) -> int:
    told = client.time() if not isinstance(client, redis.RedisCluster) else client.time(target_nodes="random")
    seconds, microseconds = told
    return int(seconds * SECOND + microseconds)


def limit_of(name: str, quota: int = 5, algorithm: str = "token_bucket") -> Limit:
    return Limit(quota, LONG, algorithm=algorithm, name=name)


def refused(call: Callable[[], Any]) -> StoreError:
    with pytest.raises(StoreError) as told:
        call()
    return told.value


# Calls


def test_calls_are_answered_in_their_order(background: BackgroundClient, unique: str) -> None:
    keys = [limit_of(unique).by(number) for number in range(300)]
    assert background.run_all([]) == []
    answers = background.run_all([Check((key,), 1 + number % 5) for number, key in enumerate(keys)])
    assert [answer.remaining for answer in answers] == [4 - number % 5 for number in range(300)]
    mixed = background.run_all([Refund(keys[0], 1), Check((keys[0],), 9), Reset((keys[1],)), Check((keys[2],), 0)])
    assert mixed[0] is True
    assert [mixed[1].allowed, mixed[3].remaining] == [False, 2]
    assert mixed[2] is None


def test_call_that_fails_leaves_the_others_alone(background: BackgroundClient, remote_url: str, unique: str) -> None:
    keys = [limit_of(unique).by(name) for name in ("ada", "bob", "eve")]
    with client_of(remote_url) as client:
        client.set(f"{unique}:{unique}:token_bucket.1:bob", "not a bucket", px=60_000)
    answers = background.run_all([Check((key,), 1) for key in keys])
    assert [type(answer) for answer in answers] == [Decision, ScriptError, Decision]


def test_operations_on_an_unreachable_server_are_errors(
    open_background: Callable[..., BackgroundClient], unique: str
) -> None:
    background = open_background(f"redis://{HOST}:1/0")
    answers = background.run_all([Check((limit_of(unique).by("ada"),), 1), Refund(limit_of(unique).by("bob"), 1)])
    assert [type(answer) for answer in answers] == [StoreUnavailable] * 2
    for ask in (background.blocks, lambda: background.heartbeat("m", 1), lambda: background.read_epoch(None, "fresh")):
        assert not refused(ask).may_have_happened


def test_server_that_stalls_is_waited_for_but_not_for_ever(
    open_background: Callable[..., BackgroundClient], server: RedisServer, unique: str
) -> None:
    background = open_background(server.url)
    assert background.heartbeat("m", SECOND) == 1
    with paused(server):
        told = timed(lambda: background.heartbeat("m", SECOND))
        assert isinstance(told.answer, StoreTimeout)
        assert told.answer.may_have_happened
        assert told.seconds < 2.5
        told = timed(lambda: background.heartbeat("m", SECOND))
        assert isinstance(told.answer, StoreUnavailable)
        assert told.seconds < 1.5
    assert background.heartbeat("m", SECOND) == 1


# Which servers there are


def test_primaries_are_named(
    open_background: Callable[..., BackgroundClient], redis7: RedisServer, cluster: RedisCluster, sentinel: SentinelSet
) -> None:
    assert open_background(redis7.url).find_primaries() == [None]
    assert set(open_background(cluster.url).find_primaries()) == {Node(HOST, node.port) for node in cluster.nodes[:3]}
    assert open_background(sentinel.url).find_primaries() == [Node(HOST, sentinel.primary().port)]


@pytest.mark.parametrize("topology", [Cluster, lambda nodes: Sentinel(nodes, "primary")], ids=["cluster", "sentinel"])
def test_suspects_are_asked_last(topology: Callable[[list[Node]], Any]) -> None:
    nodes = [Node("a", 1), Node("b", 2), Node("c", 3), Node("d", 4)]
    asked = []

    def ask() -> None:
        for (command,) in topology(nodes).refresh(suspects={nodes[0], nodes[2]}):
            command.reply = StoreUnavailable("nobody is there")
            asked.append(command.node.host)

    assert isinstance(refused(ask), StoreUnavailable)
    assert asked == ["b", "d", "a", "c"]


def test_what_was_known_stays_in_use_until_more_is(
    open_background: Callable[..., BackgroundClient], cluster: RedisCluster, unique: str
) -> None:
    background = open_background(cluster.url)
    known = background.find_primaries()
    topology = background.factory.topology
    topology.forget()
    assert topology.primaries() == known
    assert background.heartbeat("m", SECOND) == 1


def test_unreachable_cluster_is_an_error(open_background: Callable[..., BackgroundClient]) -> None:
    background = open_background(f"redis+cluster://{HOST}:1")
    assert "no server of the cluster" in str(refused(background.find_primaries))
    assert "not a primary" in str(refused(lambda: background.read_epoch(Node(HOST, 1), "fresh")))


# Marks


def test_server_keeps_its_first_epoch(background: BackgroundClient, remote_url: str, unique: str) -> None:
    shards = background.find_primaries()
    assert [background.read_epoch(node, f"first {number}") for number, node in enumerate(shards)] == [
        f"first {number}" for number in range(len(shards))
    ]
    assert [background.read_epoch(node, "second") for node in shards] == [
        f"first {number}" for number in range(len(shards))
    ]
    with client_of(remote_url) as client:
        names = sorted(client.scan_iter(match=f"{unique}:*"))
        assert len(names) == len(shards)
        for name in names:
            assert name.startswith(f"{unique}:%mark")
            assert DAY_MS - 60_000 < client.pttl(name) <= DAY_MS
    if len(shards) > 1:
        # Each lives on the server that it is the mark of.
        slots = [key_slot(background.epoch_key(node).encode()) for node in shards]
        assert [slot * len(shards) // 16384 for slot in slots] == list(range(len(shards)))


def test_all_processes_read_the_same_epochs(
    open_background: Callable[..., BackgroundClient], remote_url: str, unique: str
) -> None:
    one, other = open_background(remote_url), open_background(remote_url)
    marks = {node: one.read_epoch(node, f"of {node}") for node in one.find_primaries()}
    assert {node: other.read_epoch(node, "another") for node in other.find_primaries()} == marks


@pytest.mark.parametrize("kind", ["redis", "valkey"])
def test_data_loss_changes_the_epoch_and_script_flush_does_not(
    open_background: Callable[..., BackgroundClient], kind: Any
) -> None:
    with RedisServer(kind) as server:
        background = open_background(server.url)
        assert background.read_epoch(None, "first") == "first"
        with server.client() as client:
            client.script_flush()
        assert background.read_epoch(None, "second") == "first"
        server.kill()
        assert isinstance(refused(lambda: background.read_epoch(None, "third")), StoreUnavailable)
        server.start()
        assert background.read_epoch(None, "fourth") == "fourth"
        assert background.read_epoch(None, "fifth") == "fourth"


@pytest.mark.parametrize(
    ("hurt", "told"),
    [
        (lambda client: client.config_set("maxmemory", 1), "OOM"),
        (lambda client: client.replicaof(HOST, 1), "READONLY"),
        (lambda client: client.config_set("min-replicas-to-write", 3), "NOREPLICAS"),
    ],
    ids=["full", "replica", "alone"],
)
def test_server_that_rejects_checks_gives_no_epoch(
    open_background: Callable[..., BackgroundClient], server: RedisServer, hurt: Callable[[Any], Any], told: str
) -> None:
    background = open_background(server.url)
    assert background.read_epoch(None, "first") == "first"
    with server.client() as client:
        hurt(client)
    error = refused(lambda: background.read_epoch(None, "second"))
    assert isinstance(error, StoreUnavailable)
    assert told in str(error)


def test_epochs_and_members_survive_a_sentinel_failover(open_background: Callable[..., BackgroundClient]) -> None:
    with SentinelSet() as sentinels:
        background = open_background(sentinels.urls)
        heard = Heard(sentinels.urls, background.encoder)
        with heard.listening():
            (before,) = background.find_primaries()
            assert background.read_epoch(before, "first") == "first"
            background.heartbeat("m", 600 * SECOND)
            background.block("user", "ada")
            wait_until(lambda: heard.blocks, "the block to be heard")
            with sentinels.primary().client(socket_timeout=5) as client:
                assert client.wait(2, 4_000) == 2
            sentinels.primary().kill()
            wait_until(lambda: background.find_primaries(suspects=(before,)) != [before], "another primary")
            (after,) = background.find_primaries()
            wait_until(
                lambda: timed(lambda: background.read_epoch(after, "second")).answer == "first", "the mark, kept"
            )
            assert background.heartbeat("n", 600 * SECOND) == 2
            wait_until(lambda: heard.connected > 1, "the listener to find the primary")
            background.block("user", "bob")
            wait_until(lambda: len(heard.blocks) == 2, "news from the new primary")


def test_epochs_survive_a_cluster_failover_and_pubsub_a_dead_server(
    open_background: Callable[..., BackgroundClient],
) -> None:
    with RedisCluster() as cluster:
        background = open_background(cluster.url)
        heard = Heard(cluster.url, background.encoder)
        with heard.listening():
            shards = background.find_primaries()
            marks = [background.read_epoch(node, f"mark {number}") for number, node in enumerate(shards)]
            dead = heard.listener._node
            assert dead in shards
            primary = next(node for node in cluster.nodes if node.port == dead.port)
            with primary.client(socket_timeout=5) as client:
                assert client.wait(1, 4_000) == 1
            primary.kill()
            wait_until(lambda: heard.connected > 1, "the listener to find another server")
            wait_until(lambda: dead not in background.find_primaries(suspects=(dead,)), "a replica to take over")
            now = background.find_primaries()
            assert len(now) == 3
            wait_until(
                lambda: timed(lambda: {background.read_epoch(node, "new") for node in now}).answer == set(marks),
                "the same marks as before",
            )
            assert "not a primary" in str(refused(lambda: background.read_epoch(dead, "new")))
            background.block("user", "ada")
            wait_until(lambda: heard.blocks, "news over the rest of the cluster")


# The fleet


def test_silent_node_is_removed_from_the_fleet(background: BackgroundClient, remote_url: str, unique: str) -> None:
    members = [f"member-{number}" for number in range(5)]
    assert [background.heartbeat(member, 600 * SECOND) for member in members[:3]] == [1, 2, 3]
    assert [background.heartbeat(member, SECOND // 2) for member in members[3:]] == [4, 5]
    assert background.heartbeat(members[0], 600 * SECOND) == 5
    time.sleep(0.6)
    assert background.heartbeat(members[0], 600 * SECOND) == 3
    assert background.heartbeat(members[4], 600 * SECOND) == 4
    assert background.leave(members[4]) == 3
    assert background.leave("nobody") == 3
    with client_of(remote_url) as client:
        assert client.zcard(f"{unique}:%fleet") == 3


def test_fleet_without_members_leaves_no_key(background: BackgroundClient, remote_url: str, unique: str) -> None:
    with client_of(remote_url) as client:
        background.heartbeat("ada", 60 * SECOND)
        background.heartbeat("bob", SECOND)
        assert 59_000 < client.pttl(f"{unique}:%fleet") <= 61_000
        assert background.leave("ada") == 1
        assert 0 < client.pttl(f"{unique}:%fleet") <= 2_000
        assert background.leave("bob") == 0
        assert not client.exists(f"{unique}:%fleet")


# Blocks


def test_block_is_kept_replaced_and_ended(background: BackgroundClient) -> None:
    assert background.blocks() == []
    background.block("ip", "203.0.113.0/24", until_us=2**52, reason='"spam": {until_us:1}')
    background.block("tenant", "acme")
    background.block("user", "a:b {c} \ud800 ☂", reason="\N{SNOWMAN} 'x'\n")
    assert sorted(background.blocks(), key=lambda block: block.kind) == [
        StoredBlock("ip", "203.0.113.0/24", 2**52, '"spam": {until_us:1}'),
        StoredBlock("tenant", "acme", None, None),
        StoredBlock("user", "a:b {c} \ud800 ☂", None, "\N{SNOWMAN} 'x'\n"),
    ]
    background.block("tenant", "acme", until_us=2**53 - 1, reason="unpaid")
    assert StoredBlock("tenant", "acme", 2**53 - 1, "unpaid") in background.blocks()
    assert [background.unblock("tenant", "acme") for _ in range(2)] == [True, False]
    assert not background.unblock("tenant", "nobody")
    assert {block.kind for block in background.blocks()} == {"ip", "user"}


@pytest.mark.parametrize("until_us", [-1, 2**53])
def test_instant_beyond_exactness_is_refused(background: BackgroundClient, until_us: int) -> None:
    with pytest.raises(InvalidInput):
        background.block("user", "ada", until_us=until_us)
    assert background.blocks() == []


def test_blocks_that_have_ended_are_forgotten(background: BackgroundClient, remote_url: str, unique: str) -> None:
    with client_of(remote_url) as client:
        start_us = now_us(client)
        background.block("user", "over", until_us=0)
        background.block("user", "soon", until_us=start_us + SECOND // 2)
        background.block("user", "late", until_us=start_us + 600 * SECOND)
        assert {block.value for block in background.blocks()} == {"soon", "late"}
        assert client.hlen(f"{unique}:%blocks") == 3
        time.sleep(0.6)
        assert {block.value for block in background.blocks()} == {"late"}
        assert client.hlen(f"{unique}:%blocks") == 2
        assert background.unblock("user", "late")
        assert not client.exists(f"{unique}:%blocks")
        background.block("user", "over", until_us=0)
        assert background.blocks() == []
        assert not client.exists(f"{unique}:%blocks")


def test_many_blocks_are_read_in_parts(background: BackgroundClient, remote_url: str, unique: str) -> None:
    for number in range(3_000):
        background.block("user", f"{number}", until_us=2**52 if number % 3 else 0)
    assert sorted(int(block.value) for block in background.blocks()) == [n for n in range(3_000) if n % 3]
    with client_of(remote_url) as client:
        assert client.hlen(f"{unique}:%blocks") == 2_001


ENDS: list[tuple[list[tuple[str, str, float | None]], float | None]] = [
    ([("set", "ada", 100)], 100),
    ([("set", "ada", 100), ("set", "bob", 10)], 100),
    ([("set", "ada", 10), ("set", "bob", 100)], 100),
    ([("set", "ada", -100)], 0),
    ([("set", "ada", None)], None),
    ([("set", "ada", 100), ("set", "bob", None)], None),
    ([("set", "bob", None), ("set", "ada", 100)], None),
    ([("set", "bob", None), ("set", "ada", 100), ("drop", "bob", None)], 100),
    ([("set", "bob", None), ("set", "ada", 100), ("set", "bob", 10)], 100),
    ([("set", "bob", None), ("set", "eve", None), ("drop", "bob", None)], None),
    ([("set", "ada", 100), ("set", "bob", 10), ("drop", "ada", None), ("list", "", None)], 100),
    ([("set", "bob", None), ("set", "bob", 10)], 10),
]


@pytest.mark.parametrize(("steps", "seconds"), ENDS)
def test_blocks_live_until_the_last_one_ends_or_would_have(
    background: BackgroundClient, remote_url: str, unique: str, steps: list[Any], seconds: float | None
) -> None:
    with client_of(remote_url) as client:
        for verb, value, after in steps:
            if verb == "set":
                until_us = None if after is None else int(now_us(client) + after * SECOND)
                background.block("user", value, until_us=until_us)
            elif verb == "drop":
                assert background.unblock("user", value)
            else:
                background.blocks()
        left = client.pttl(f"{unique}:%blocks")
    if seconds is None:
        assert left > 36_000 * DAY_MS
    else:
        assert seconds * 1000 - 2_000 < left <= seconds * 1000 + 1_000


def test_injected_clock_rules_the_blocks_too(
    open_background: Callable[..., BackgroundClient], redis7: RedisServer
) -> None:
    clock = FakeClock(5 * SECOND)
    background = open_background(redis7.url, clock=clock)
    background.block("user", "ada", until_us=6 * SECOND)
    assert len(background.blocks()) == 1
    clock.set_us(6 * SECOND)
    assert background.blocks() == []


def test_foreign_entries_are_ignored(background: BackgroundClient, remote_url: str, unique: str) -> None:
    background.block("user", "ada")
    with client_of(remote_url) as client:
        for number, text in enumerate(("", "{", "[]", "null", '{"kind":1,"value":"x"}', '{"kind":"x"}')):
            client.hset(f"{unique}:%blocks", f"{number}", text)
        client.hset(f"{unique}:%blocks", "7", '{"until_us":"soon","kind":"user","value":"x"}')
    assert background.blocks() == [StoredBlock("user", "ada", None, None)]


# News


class Heard:
    """A listener, and what it has heard."""

    def __init__(self, url: str, wire: CommandEncoder) -> None:
        self.blocks = BlockList()
        self.forgotten: list[tuple[str, str]] = []
        self.heard_at: dict[str, float] = {}
        self.reads: list[list[tuple[str, str]] | None] = []
        """The identities of blocks that were read again, None for all of them."""
        self.connected = 0
        self.lost: list[StoreError] = []
        place = connection_factory(url, asynchronous=False)
        self.background_client = BackgroundClient(place, wire)
        self.listener = Subscriber(
            place,
            wire,
            on_blocks_changed=self._refresh,
            on_forget=lambda space, identity: self.forgotten.append((space, identity)),
            on_connect=self._connect,
            on_lost=self.lost.append,
        )

    def _refresh(self, changed: list[tuple[str, str]] | None) -> None:
        self.reads.append(changed)
        if changed is None:
            self.blocks.reload(self.background_client.blocks)
        else:
            self.blocks.refresh(changed, self.background_client.find_blocks)
            self.heard_at.update({value: time.perf_counter() for _, value in changed})

    def _connect(self) -> None:
        self._refresh(None)
        self.reads.clear()
        self.connected += 1

    @contextmanager
    def listening(self, *, at_once: bool = True) -> Iterator[None]:
        """Until the end of the block; it must then stop, whatever the server does."""
        thread = threading.Thread(target=self.listener.listen, daemon=True)
        thread.start()
        try:
            if at_once:
                wait_until(lambda: self.connected, "the listener to be connected")
            yield
        finally:
            start = time.monotonic()
            self.listener.stop()
            thread.join(5)
            took = time.monotonic() - start
            self.background_client.close()
        assert not thread.is_alive()
        assert took < 1

    def values(self) -> set[str]:
        return {block.value for block in self.blocks}


def test_blocks_are_published_at_once(background: BackgroundClient, remote_url: str) -> None:
    background.block("user", "before")
    heard = Heard(remote_url, background.encoder)
    with heard.listening():
        heard.lost.clear()  # to connect may take a busy machine longer than one attempt
        assert heard.values() == {"before"}
        background.block("user", "ada", until_us=2**52, reason="spam \ud800 ☂")
        wait_until(lambda: "ada" in heard.values(), "the block")
        found = heard.blocks.find({"user": "ada"}, 0)
        assert found == ("user", "ada", 2**52, "spam \ud800 ☂")
        background.unblock("user", "ada")
        background.unblock("user", "before")
        wait_until(lambda: not heard.blocks, "the end of the blocks")
        # What changes nothing is told all the same: others may know less than the store.
        heard.blocks.set("user", "ghost", None, None)
        assert not background.unblock("user", "ghost")
        wait_until(lambda: not heard.blocks, "the end of what was no block")
    assert not heard.lost


def test_messages_arrive_in_milliseconds(
    background: BackgroundClient, remote_url: str, record_property: Callable[[str, object], None]
) -> None:
    heard = Heard(remote_url, background.encoder)
    delays = []
    with heard.listening():
        for number in range(300):
            start = time.perf_counter()
            background.block("user", f"{number}", until_us=2**52)
            wait_until(lambda name=f"{number}": name in heard.heard_at, "the block")
            delays.append(heard.heard_at[f"{number}"] - start)
    delays.sort()
    told = [f"{what} {delays[int(len(delays) * share)] * 1000:.2f} ms" for what, share in (("p50", 0.5), ("p99", 0.99))]
    record_property("latency", told)
    print(f"block to heard, {remote_url.partition(':')[0]}: {', '.join(told)}, worst {delays[-1] * 1000:.2f} ms")
    assert delays[len(delays) // 2] < 1


REFUNDED = ("fixed_window", "gcra", "leaky_bucket", "sliding_log", "sliding_window", "token_bucket")


@pytest.mark.parametrize("algorithm", REFUNDED)
def test_refund_of_an_exhausted_key_is_published(
    background: BackgroundClient, remote_url: str, algorithm: str, unique: str
) -> None:
    key = limit_of(unique, algorithm=algorithm).by("a:b {c}", "\ud800 ☂")
    heard = Heard(remote_url, background.encoder)
    with heard.listening():
        assert background.run_all([Check((key,), 4)])[0].remaining == 1
        assert background.run_all([Refund(key, 1)]) == [True]  # nothing was used up, so nobody need know
        assert background.run_all([Check((key,), 1)])[0].remaining == 1
        assert background.run_all([Check((key,), 1)])[0].remaining == 0
        assert background.run_all([Refund(key, 0)]) == [False]
        assert background.run_all([Refund(key, 2, "once")]) == [True]
        assert background.run_all([Refund(key, 2, "once")]) == [False]
        wait_until(lambda: heard.forgotten, "the refund")
        background.run_all([Reset((key,))])
        wait_until(lambda: len(heard.forgotten) > 1, "the reset")
    assert heard.forgotten == [(key.limit.space, key.identity)] * 2


def test_reset_is_published_for_each_key(background: BackgroundClient, remote_url: str, unique: str) -> None:
    keys = tuple(limit_of(unique).by(number) for number in range(20))
    heard = Heard(remote_url, background.encoder)
    with heard.listening():
        background.run_all([Check((keys[0],), 5), Check((keys[1],), 5)])
        background.run_all([Reset(keys)])
        wait_until(lambda: len(heard.forgotten) >= 20, "all keys")
        assert [answer.remaining for answer in background.run_all([Check((key,), 0) for key in keys])] == [5] * 20
    assert sorted(heard.forgotten) == sorted((key.limit.space, key.identity) for key in keys)


def test_refund_on_one_shard_is_published(
    open_background: Callable[..., BackgroundClient], cluster: RedisCluster, unique: str
) -> None:
    background = open_background(cluster.url)
    taken, full = limit_of(f"{unique}-taken", 1).by("ada"), limit_of(f"{unique}-full", 1).by("ada")
    background.run_all([Check((full,), 1)])
    heard = Heard(cluster.url, background.encoder)
    with heard.listening():
        assert not background.run_all([Check((taken, full), 1)])[0].allowed
        wait_until(lambda: heard.forgotten, "what was taken in vain")
    assert heard.forgotten == [(taken.limit.space, "ada")]


def test_released_leases_are_not_published(
    open_background: Callable[..., BackgroundClient], cluster: RedisCluster, unique: str
) -> None:
    background = open_background(cluster.url)
    lease, full = limit_of(f"{unique}-lease", 1, "concurrency").by("ada"), limit_of(f"{unique}-full", 1).by("ada")
    background.run_all([Check((full,), 1)])
    heard = Heard(cluster.url, background.encoder)
    with heard.listening():
        assert not background.run_all([Check((lease, full), 1, "a")])[0].allowed
        background.block("user", "last")
        wait_until(lambda: heard.blocks, "what was told after it")
    assert heard.forgotten == []


@pytest.mark.parametrize("kind", ["redis", "valkey"])
def test_missing_publish_permission_affects_notifications_only(
    open_background: Callable[..., BackgroundClient], kind: Any, unique: str
) -> None:
    for rules in ("~* &* +@all -publish", "~* resetchannels +@all"):
        with RedisServer(kind, user=AclUser("gate", "secret", rules)) as server:
            background = open_background(server.url)
            key = limit_of(unique).by("ada")
            assert background.run_all([Check((key,), 5)])[0].allowed
            assert background.run_all([Refund(key, 5)]) == [True]
            assert background.run_all([Check((key,), 5), Reset((key,))])[1] is None
            assert background.run_all([Check((key,), 0)])[0].remaining == 5
            background.block("user", "ada")
            assert [block.value for block in background.blocks()] == ["ada"]
            assert background.unblock("user", "ada")


def test_missing_subscribe_permission_is_logged_once(open_background: Callable[..., BackgroundClient]) -> None:
    with RedisServer(user=AclUser("gate", "secret", "~* +@all")) as server:
        heard = Heard(server.url, open_background(server.url).encoder)
        with heard.listening(at_once=False):
            wait_until(lambda: heard.lost, "the refusal")
            time.sleep(0.5)
        assert [type(error) for error in heard.lost] == [StoreUnavailable]
        assert "NOPERM" in str(heard.lost[0])
        assert heard.connected == 0


def test_databases_have_separate_channels(redis7: RedisServer, unique: str) -> None:
    url = redis7.url.removesuffix("/0")
    wires = [CommandEncoder(unique, None, database=database) for database in (0, 3)]
    backgrounds = [
        BackgroundClient(connection_factory(f"{url}/{number}", asynchronous=False), wires[number // 3])
        for number in (0, 3)
    ]
    heard = [Heard(f"{url}/0", wires[0]), Heard(f"{url}/3", wires[1])]
    with heard[0].listening(), heard[1].listening():
        for number, background in enumerate(backgrounds):
            background.block("user", f"of {number}")
            wait_until(lambda number=number: heard[number].blocks, "its own block")
            background.close()
    assert [each.values() for each in heard] == [{"of 0"}, {"of 1"}]


def test_namespaces_have_separate_channels(
    open_background: Callable[..., BackgroundClient], redis7: RedisServer, unique: str
) -> None:
    one, other = open_background(redis7.url), open_background(redis7.url, f"{unique}-other")
    heard = Heard(redis7.url, other.encoder)
    with heard.listening():
        one.block("user", "ada")
        other.block("user", "bob")
        wait_until(lambda: heard.blocks, "its own block")
    assert heard.values() == {"bob"}
    assert [block.value for block in one.blocks()] == ["ada"]


def test_pubsub_works_over_tls(open_background: Callable[..., BackgroundClient]) -> None:
    with RedisServer(tls=True, password="secret") as server:
        background = open_background(server.url)
        heard = Heard(server.url, background.encoder)
        with heard.listening():
            for number in range(200):
                background.block("user", f"{number}", reason="x" * 1_000)
            wait_until(lambda: len(heard.blocks) == 200, "all blocks")
            background.block("user", "y" * 100_000)  # more than TLS sends in one piece
            wait_until(lambda: len(heard.blocks) == 201, "a large one")
        assert not heard.lost


@pytest.fixture
def forge(remote_url: str, background: BackgroundClient) -> Iterator[Callable[[str | bytes], Any]]:
    """Publish as a client of another database does, where the servers have several."""
    with client_of(remote_url) as client:
        if not isinstance(client, redis.RedisCluster):
            client.select(15)
        yield lambda text: client.publish(background.encoder.channel, text)


FORGED = [
    'block {"until_us":null,"kind":"ip","value":"0.0.0.0/0","reason":null}',
    'block {"kind":"ip","value":"0.0.0.0/0"}',
    'unblock {"kind":"ip","value":"203.0.113.0/24"}',
    'block {"kind":"ip","value":"203.0.113.0/24"}',
    'block {"kind":"ip","value":"203.0.113.9/24"}',
    'block {"until_us":0,"kind":"ip","value":"203.0.113.0/24","reason":null}',
    'block {"kind":"ip","value":"nonsense"}',
    "block",
]


@pytest.mark.parametrize("text", FORGED)
def test_forged_messages_neither_block_nor_unblock(
    background: BackgroundClient, remote_url: str, forge: Callable[[str | bytes], Any], text: str
) -> None:
    background.block("ip", "203.0.113.0/24")
    heard = Heard(remote_url, background.encoder)
    with heard.listening():
        forge(text)
        background.block("user", "last")
        wait_until(lambda: "last" in heard.values(), "a genuine message")
        assert heard.values() == {"203.0.113.0/24", "last"}
    assert not heard.lost


def test_flood_of_forged_messages_costs_few_reads(
    background: BackgroundClient, remote_url: str, forge: Callable[[str | bytes], Any]
) -> None:
    background.block("user", "before")
    heard = Heard(remote_url, background.encoder)
    with heard.listening():
        start = time.monotonic()
        for number in range(5_000):
            forge('block {"kind":"user","value":"before"}')
            if number % 2:
                forge(f'block {{"kind":"user","value":"{number}"}}')
            forge("forget a:b:c")
        background.block("user", "genuine")
        wait_until(lambda: "genuine" in heard.values(), "the genuine block")
        seconds = time.monotonic() - start
        assert heard.values() == {"before", "genuine"}
        assert len([read for read in heard.reads if read is not None]) <= seconds / pubsub.READ_INTERVAL_S + 1
        assert heard.reads.count(None) <= seconds / pubsub.READ_ALL_INTERVAL_S + 1
        assert max(len(read or ()) for read in heard.reads) <= pubsub.MAX_READ_AT_ONCE
        assert len(heard.forgotten) <= seconds / pubsub.FORGET_INTERVAL_S + 1
    assert not heard.lost
    assert heard.listener.ignored == 0


def test_burst_of_changes_is_read_within_a_second() -> None:
    pending, reads = pubsub._Pending(), []
    for number in range(20_000):
        pending.add(b'block {"kind":"ip","value":"%d"}' % number)
    while (due := pending.due()) is not None:
        reads.append(len(pending.take_blocks(due)))
    assert sum(reads) == 20_000
    assert not pending.all_changed
    assert max(reads) <= pubsub.MAX_READ_AT_ONCE
    assert len(reads) * pubsub.READ_INTERVAL_S < 1


def test_malformed_and_oversized_messages_are_ignored_and_counted(
    background: BackgroundClient, remote_url: str, forge: Callable[[str | bytes], Any], caplog: pytest.LogCaptureFixture
) -> None:
    heard = Heard(remote_url, background.encoder)
    texts: list[str | bytes] = ["", "nonsense", "block {", b"block \xff", b"forget \xff:a:b", b"\xff", "forget a:b"]
    texts += ["unblock {}", "block " + "[" * 30_000, "block " + "x" * 40_000, b"x" * 3_000_000, b"\r\n" * 70_000]
    with heard.listening():
        for text in texts:
            forge(text)
        background.block("user", "ada")
        wait_until(lambda: heard.values() == {"ada"}, "the block after all that")
        assert heard.listener.ignored == len(texts)
    assert heard.connected == 1
    assert not heard.lost
    assert caplog.text.count("malformed or oversized") == 1


def test_unknown_messages_are_ignored(
    open_background: Callable[..., BackgroundClient], redis7: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    background = open_background(redis7.url)
    heard = Heard(redis7.url, background.encoder)
    with heard.listening(), redis7.client() as client:
        for text in ("", "nonsense", "block", "block {", "unblock []", "forget", "forget a:b", b"block \xff", b"\xff"):
            client.publish(background.encoder.channel, text)
        heard.listener._on_forget = lambda space, identity: 1 / 0
        client.publish(background.encoder.channel, "forget a:b:c")
        background.block("user", "ada")
        wait_until(lambda: heard.blocks, "the block after all that")
    assert heard.connected == 1
    assert "ZeroDivisionError" in caplog.text
    assert "malformed or oversized" in caplog.text


def test_failing_connection_callback_does_not_stop_pubsub(
    open_background: Callable[..., BackgroundClient], server: RedisServer
) -> None:
    background = open_background(server.url)
    heard = Heard(server.url, background.encoder)
    heard.listener._on_connect = lambda: 1 / 0
    heard.listener._on_lost = lambda error: 1 / 0
    with heard.listening(at_once=False):
        wait_until(lambda: listeners(server, background) == 1, "the listener")
        server.restart()
        wait_until(lambda: listeners(server, background) == 1, "the listener again")
        background.block("user", "ada")
        wait_until(lambda: heard.blocks, "the block")


def listeners(server: RedisServer, background: BackgroundClient) -> int:
    with server.client() as client:
        ((_, number),) = client.pubsub_numsub(background.encoder.channel)
        return int(number)


# News that are lost


@pytest.mark.parametrize("kind", ["redis", "valkey"])
def test_listener_outlives_the_server(open_background: Callable[..., BackgroundClient], kind: Any) -> None:
    with RedisServer(kind) as server:
        background = open_background(server.url)
        heard = Heard(server.url, background.encoder)
        with heard.listening():
            background.block("user", "ada")
            wait_until(lambda: heard.values() == {"ada"}, "the block")
            server.kill()
            wait_until(lambda: heard.lost, "the loss")
            time.sleep(0.3)
            assert heard.values() == {"ada"}  # the last that is known holds
            server.start()
            background.block("user", "bob")
            wait_until(lambda: heard.connected == 2, "the connection")
            wait_until(lambda: heard.values() == {"bob"}, "what is blocked now")
        assert len(heard.lost) == 1


def test_reload_that_fails_is_tried_again(
    open_background: Callable[..., BackgroundClient], server: RedisServer
) -> None:
    background = open_background(server.url)
    background.block("user", "ada")
    heard = Heard(server.url, background.encoder)
    fails = [StoreUnavailable("not now")] * 2

    def reload() -> None:
        if fails:
            raise fails.pop()
        heard._connect()

    heard.listener._on_connect = reload
    with heard.listening():
        assert heard.values() == {"ada"}
    assert [str(error) for error in heard.lost] == ["not now"]


def test_connection_that_is_silent_is_lost(
    open_background: Callable[..., BackgroundClient], server: RedisServer
) -> None:
    background = open_background(server.url)
    heard = Heard(server.url, background.encoder)
    with heard.listening():
        time.sleep(4.5)  # it is asked for a word, and says one
        assert not heard.lost
        with paused(server):
            wait_until(lambda: heard.lost, "the silence to be noticed")
        wait_until(lambda: heard.connected == 2, "the connection")
    assert "did not answer to PING" in str(heard.lost[0])


def test_server_that_was_lost_is_not_the_next_to_be_tried(
    open_background: Callable[..., BackgroundClient], cluster: RedisCluster, redis7: RedisServer
) -> None:
    listener = Heard(cluster.url, open_background(cluster.url).encoder).listener
    listener._node = Node(HOST, cluster.nodes[1].port)
    chosen = {listener._choose() for _ in range(30)}
    assert chosen == {Node(HOST, cluster.nodes[0].port), Node(HOST, cluster.nodes[2].port)}
    assert Heard(redis7.url, open_background(redis7.url).encoder).listener._choose() is None


def test_server_that_is_no_primary_any_more_is_left(
    open_background: Callable[..., BackgroundClient], cluster: RedisCluster
) -> None:
    heard = Heard(cluster.url, open_background(cluster.url).encoder)
    with heard.listening():
        topology = heard.background_client.factory.topology
        assert isinstance(topology, Cluster)
        # As another thread may have learned.
        topology._slots = {slot: Node(HOST, 1) for slot in range(16384)}
        wait_until(lambda: heard.connected == 2, "another connection")
    assert "not a primary" in str(heard.lost[0])


def test_listener_stops_while_the_server_hangs(
    open_background: Callable[..., BackgroundClient], server: RedisServer
) -> None:
    heard = Heard(f"redis://{HOST}:1/0", open_background(server.url).encoder)
    with heard.listening(at_once=False):
        wait_until(lambda: heard.lost, "the refusal")
    assert len(heard.lost) == 1
    heard = Heard(server.url, open_background(server.url).encoder)
    with paused(server), heard.listening(at_once=False):
        time.sleep(0.1)
    heard = Heard(server.url, open_background(server.url).encoder)
    with heard.listening():
        server.pause()
    server.resume()


def test_it_may_be_stopped_before_it_starts(
    open_background: Callable[..., BackgroundClient], redis7: RedisServer
) -> None:
    heard = Heard(redis7.url, open_background(redis7.url).encoder)
    heard.listener.stop()
    heard.listener.listen()
    heard.listener.stop()
    assert heard.connected == 0


def test_forked_child_leaves_its_parents_connections_alone(
    open_background: Callable[..., BackgroundClient], redis7: RedisServer
) -> None:
    background = open_background(redis7.url)
    heard = Heard(redis7.url, background.encoder)
    with heard.listening():
        background.heartbeat("parent", 600 * SECOND)
        bell, pool = heard.listener._socket, background._pool
        for inherited in (heard.listener, background):  # as fork calls them
            inherited.reset_after_fork()
        heard.listener.stop()
        assert background.heartbeat("child", 600 * SECOND) == 2
        assert background._pool is not pool
        background.block("user", "ada")
        wait_until(lambda: heard.blocks, "the parent to hear it")
        heard.listener._socket = bell
        pool.close()


BUDGET = 0.05
"""Seconds: a machine that is busy with other things takes longer than a healthy one to open a connection."""


@pytest.mark.parametrize("said", [b"forget \xff:a:b", b"block " + b"[" * 200_000, b"\x00", b"block {}"])
def test_pubsub_survives_invalid_messages(server: RedisServer, said: bytes) -> None:
    with Limiter(server.url, on_failure="open", budget=BUDGET) as limiter, Limiter(server.url) as other:
        limiter.engine.maintenance.needs_block_list = True  # type: ignore[union-attr] # as behind a gate
        limiter.engine.maintenance.ensure()  # type: ignore[union-attr]
        with server.client() as client:
            wait_until(lambda: client.publish("headgate:%news", b"forget a:b:c") == 1, "somebody to listen")
            client.publish("headgate:%news", said)
        other.block("tenant", "acme")
        blocks = limiter.engine.local.live_clients.blocks
        wait_until(lambda: [block.value for block in blocks] == ["acme"], "the block", timeout=5)


def test_messages_of_another_database_are_ignored(server: RedisServer) -> None:
    with Limiter(server.url, on_failure="open", budget=BUDGET) as limiter, Limiter(server.url) as other:
        limiter.engine.maintenance.needs_block_list = True  # type: ignore[union-attr] # as behind a gate
        limiter.engine.maintenance.ensure()  # type: ignore[union-attr]
        other.block("user", "eve")
        wait_until(lambda: len(limiter.engine.local.live_clients.blocks) == 1, "the block")
        with server.client(db=15) as client:
            client.publish("headgate:%news", 'block {"until_us":null,"kind":"ip","value":"0.0.0.0/0","reason":null}')
            client.publish("headgate:%news", 'unblock {"kind":"user","value":"eve"}')
            client.publish("headgate:%news", 'block {"kind":"user","value":"eve"}')
        other.block("user", "last")
        wait_until(lambda: limiter.engine.local.live_clients.blocks.find({"user": "last"}, 0), "a genuine message")
        assert limiter.engine.local.live_clients.blocks.find({"ip": "203.0.113.9"}, 0) is None
        assert limiter.engine.local.live_clients.blocks.find({"user": "eve"}, 0) is not None
        assert limiter.stats["ignored_messages"] == 1
