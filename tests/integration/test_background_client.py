"""The store as it is asked from the background: marks, the fleet, blocks, and the news that others hear of at once."""

from __future__ import annotations

import threading
import time
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import pytest
import redis
from redis.crc import key_slot

from headgate import Decision, InvalidInput, Limit, ScriptError, StoreError, StoreTimeout, StoreUnavailable
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
def open_companion(unique: str) -> Iterator[Callable[..., BackgroundClient]]:
    with ExitStack() as stack:

        def opened(url: str, namespace: str = unique, clock: FakeClock | None = None) -> BackgroundClient:
            companion = BackgroundClient(connection_factory(url, asynchronous=False), CommandEncoder(namespace, clock))
            stack.callback(companion.close)
            return companion

        yield opened


@pytest.fixture
def companion(open_companion: Callable[..., BackgroundClient], remote_url: str) -> BackgroundClient:
    return open_companion(remote_url)


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
    companion = BackgroundClient(connection_factory(url, asynchronous=False), CommandEncoder("nobody", None))
    (node,) = companion.find_primaries()
    companion.close()
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


def test_calls_are_answered_in_their_order(companion: BackgroundClient, unique: str) -> None:
    keys = [limit_of(unique).by(number) for number in range(300)]
    assert companion.run_all([]) == []
    answers = companion.run_all([Check((key,), 1 + number % 5) for number, key in enumerate(keys)])
    assert [answer.remaining for answer in answers] == [4 - number % 5 for number in range(300)]
    mixed = companion.run_all([Refund(keys[0], 1), Check((keys[0],), 9), Reset((keys[1],)), Check((keys[2],), 0)])
    assert mixed[0] is True
    assert [mixed[1].allowed, mixed[3].remaining] == [False, 2]
    assert mixed[2] is None


def test_a_call_that_fails_leaves_the_others_alone(companion: BackgroundClient, remote_url: str, unique: str) -> None:
    keys = [limit_of(unique).by(name) for name in ("ada", "bob", "eve")]
    with client_of(remote_url) as client:
        client.set(f"{unique}:{unique}:token_bucket.1:bob", "not a bucket", px=60_000)
    answers = companion.run_all([Check((key,), 1) for key in keys])
    assert [type(answer) for answer in answers] == [Decision, ScriptError, Decision]


def test_calls_to_nobody_are_answered_by_errors(open_companion: Callable[..., BackgroundClient], unique: str) -> None:
    companion = open_companion(f"redis://{HOST}:1/0")
    answers = companion.run_all([Check((limit_of(unique).by("ada"),), 1), Refund(limit_of(unique).by("bob"), 1)])
    assert [type(answer) for answer in answers] == [StoreUnavailable] * 2
    for ask in (companion.blocks, lambda: companion.heartbeat("m", 1), lambda: companion.read_epoch(None, "fresh")):
        assert not refused(ask).may_have_happened


def test_a_server_that_stalls_is_waited_for_but_not_for_ever(
    open_companion: Callable[..., BackgroundClient], server: RedisServer, unique: str
) -> None:
    companion = open_companion(server.url)
    assert companion.heartbeat("m", SECOND) == 1
    with paused(server):
        told = timed(lambda: companion.heartbeat("m", SECOND))
        assert isinstance(told.answer, StoreTimeout)
        assert told.answer.may_have_happened
        assert told.seconds < 2.5
        told = timed(lambda: companion.heartbeat("m", SECOND))
        assert isinstance(told.answer, StoreUnavailable)
        assert told.seconds < 1.5
    assert companion.heartbeat("m", SECOND) == 1


# Which servers there are


def test_the_primaries_are_named(
    open_companion: Callable[..., BackgroundClient], redis7: RedisServer, cluster: RedisCluster, sentinel: SentinelSet
) -> None:
    assert open_companion(redis7.url).find_primaries() == [None]
    assert set(open_companion(cluster.url).find_primaries()) == {Node(HOST, node.port) for node in cluster.nodes[:3]}
    assert open_companion(sentinel.url).find_primaries() == [Node(HOST, sentinel.primary().port)]


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
    open_companion: Callable[..., BackgroundClient], cluster: RedisCluster, unique: str
) -> None:
    companion = open_companion(cluster.url)
    known = companion.find_primaries()
    topology = companion.factory.topology
    topology.forget()
    assert topology.primaries() == known
    assert companion.heartbeat("m", SECOND) == 1


def test_no_server_of_a_cluster_can_tell_its_slots(open_companion: Callable[..., BackgroundClient]) -> None:
    companion = open_companion(f"redis+cluster://{HOST}:1")
    assert "no server of the cluster" in str(refused(companion.find_primaries))
    assert "not a primary" in str(refused(lambda: companion.read_epoch(Node(HOST, 1), "fresh")))


# Marks


def test_a_server_keeps_its_first_mark(companion: BackgroundClient, remote_url: str, unique: str) -> None:
    shards = companion.find_primaries()
    assert [companion.read_epoch(node, f"first {number}") for number, node in enumerate(shards)] == [
        f"first {number}" for number in range(len(shards))
    ]
    assert [companion.read_epoch(node, "second") for node in shards] == [
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
        slots = [key_slot(companion.epoch_key(node).encode()) for node in shards]
        assert [slot * len(shards) // 16384 for slot in slots] == list(range(len(shards)))


def test_all_processes_see_the_same_marks(
    open_companion: Callable[..., BackgroundClient], remote_url: str, unique: str
) -> None:
    one, other = open_companion(remote_url), open_companion(remote_url)
    marks = {node: one.read_epoch(node, f"of {node}") for node in one.find_primaries()}
    assert {node: other.read_epoch(node, "another") for node in other.find_primaries()} == marks


@pytest.mark.parametrize("kind", ["redis", "valkey"])
def test_a_restart_that_lost_everything_is_seen_and_a_flush_of_scripts_is_none(
    open_companion: Callable[..., BackgroundClient], kind: Any
) -> None:
    with RedisServer(kind) as server:
        companion = open_companion(server.url)
        assert companion.read_epoch(None, "first") == "first"
        with server.client() as client:
            client.script_flush()
        assert companion.read_epoch(None, "second") == "first"
        server.kill()
        assert isinstance(refused(lambda: companion.read_epoch(None, "third")), StoreUnavailable)
        server.start()
        assert companion.read_epoch(None, "fourth") == "fourth"
        assert companion.read_epoch(None, "fifth") == "fourth"


@pytest.mark.parametrize(
    ("hurt", "told"),
    [
        (lambda client: client.config_set("maxmemory", 1), "OOM"),
        (lambda client: client.replicaof(HOST, 1), "READONLY"),
        (lambda client: client.config_set("min-replicas-to-write", 3), "NOREPLICAS"),
    ],
    ids=["full", "replica", "alone"],
)
def test_a_server_that_would_serve_no_check_gives_no_mark(
    open_companion: Callable[..., BackgroundClient], server: RedisServer, hurt: Callable[[Any], Any], told: str
) -> None:
    companion = open_companion(server.url)
    assert companion.read_epoch(None, "first") == "first"
    with server.client() as client:
        hurt(client)
    error = refused(lambda: companion.read_epoch(None, "second"))
    assert isinstance(error, StoreUnavailable)
    assert told in str(error)


def test_marks_and_members_outlive_a_failover_under_sentinels(open_companion: Callable[..., BackgroundClient]) -> None:
    with SentinelSet() as sentinels:
        companion = open_companion(sentinels.urls)
        heard = Heard(sentinels.urls, companion.encoder)
        with heard.listening():
            (before,) = companion.find_primaries()
            assert companion.read_epoch(before, "first") == "first"
            companion.heartbeat("m", 600 * SECOND)
            companion.block("user", "ada")
            wait_until(lambda: heard.blocks, "the block to be heard")
            with sentinels.primary().client(socket_timeout=5) as client:
                assert client.wait(2, 4_000) == 2
            sentinels.primary().kill()
            wait_until(lambda: companion.find_primaries(suspects=(before,)) != [before], "another primary")
            (after,) = companion.find_primaries()
            wait_until(lambda: timed(lambda: companion.read_epoch(after, "second")).answer == "first", "the mark, kept")
            assert companion.heartbeat("n", 600 * SECOND) == 2
            wait_until(lambda: heard.connected > 1, "the listener to find the primary")
            companion.block("user", "bob")
            wait_until(lambda: len(heard.blocks) == 2, "news from the new primary")


def test_marks_outlive_a_failover_in_a_cluster_and_news_the_death_of_a_server(
    open_companion: Callable[..., BackgroundClient],
) -> None:
    with RedisCluster() as cluster:
        companion = open_companion(cluster.url)
        heard = Heard(cluster.url, companion.encoder)
        with heard.listening():
            shards = companion.find_primaries()
            marks = [companion.read_epoch(node, f"mark {number}") for number, node in enumerate(shards)]
            dead = heard.listener._node
            assert dead in shards
            primary = next(node for node in cluster.nodes if node.port == dead.port)
            with primary.client(socket_timeout=5) as client:
                assert client.wait(1, 4_000) == 1
            primary.kill()
            wait_until(lambda: heard.connected > 1, "the listener to find another server")
            wait_until(lambda: dead not in companion.find_primaries(suspects=(dead,)), "a replica to take over")
            now = companion.find_primaries()
            assert len(now) == 3
            wait_until(
                lambda: timed(lambda: {companion.read_epoch(node, "new") for node in now}).answer == set(marks),
                "the same marks as before",
            )
            assert "not a primary" in str(refused(lambda: companion.read_epoch(dead, "new")))
            companion.block("user", "ada")
            wait_until(lambda: heard.blocks, "news over the rest of the cluster")


# The fleet


def test_who_is_silent_for_too_long_is_counted_no_more(
    companion: BackgroundClient, remote_url: str, unique: str
) -> None:
    members = [f"member-{number}" for number in range(5)]
    assert [companion.heartbeat(member, 600 * SECOND) for member in members[:3]] == [1, 2, 3]
    assert [companion.heartbeat(member, SECOND // 2) for member in members[3:]] == [4, 5]
    assert companion.heartbeat(members[0], 600 * SECOND) == 5
    time.sleep(0.6)
    assert companion.heartbeat(members[0], 600 * SECOND) == 3
    assert companion.heartbeat(members[4], 600 * SECOND) == 4
    assert companion.leave(members[4]) == 3
    assert companion.leave("nobody") == 3
    with client_of(remote_url) as client:
        assert client.zcard(f"{unique}:%fleet") == 3


def test_a_fleet_without_members_leaves_no_key(companion: BackgroundClient, remote_url: str, unique: str) -> None:
    with client_of(remote_url) as client:
        companion.heartbeat("ada", 60 * SECOND)
        companion.heartbeat("bob", SECOND)
        assert 59_000 < client.pttl(f"{unique}:%fleet") <= 61_000
        assert companion.leave("ada") == 1
        assert 0 < client.pttl(f"{unique}:%fleet") <= 2_000
        assert companion.leave("bob") == 0
        assert not client.exists(f"{unique}:%fleet")


# Blocks


def test_a_block_is_kept_replaced_and_ended(companion: BackgroundClient) -> None:
    assert companion.blocks() == []
    companion.block("ip", "203.0.113.0/24", until_us=2**52, reason='"spam": {until_us:1}')
    companion.block("tenant", "acme")
    companion.block("user", "a:b {c} \ud800 ☂", reason="\N{SNOWMAN} 'x'\n")
    assert sorted(companion.blocks(), key=lambda block: block.kind) == [
        StoredBlock("ip", "203.0.113.0/24", 2**52, '"spam": {until_us:1}'),
        StoredBlock("tenant", "acme", None, None),
        StoredBlock("user", "a:b {c} \ud800 ☂", None, "\N{SNOWMAN} 'x'\n"),
    ]
    companion.block("tenant", "acme", until_us=2**53 - 1, reason="unpaid")
    assert StoredBlock("tenant", "acme", 2**53 - 1, "unpaid") in companion.blocks()
    assert [companion.unblock("tenant", "acme") for _ in range(2)] == [True, False]
    assert not companion.unblock("tenant", "nobody")
    assert {block.kind for block in companion.blocks()} == {"ip", "user"}


@pytest.mark.parametrize("until_us", [-1, 2**53])
def test_an_instant_beyond_exactness_is_refused(companion: BackgroundClient, until_us: int) -> None:
    with pytest.raises(InvalidInput):
        companion.block("user", "ada", until_us=until_us)
    assert companion.blocks() == []


def test_blocks_that_have_ended_are_forgotten(companion: BackgroundClient, remote_url: str, unique: str) -> None:
    with client_of(remote_url) as client:
        start_us = now_us(client)
        companion.block("user", "over", until_us=0)
        companion.block("user", "soon", until_us=start_us + SECOND // 2)
        companion.block("user", "late", until_us=start_us + 600 * SECOND)
        assert {block.value for block in companion.blocks()} == {"soon", "late"}
        assert client.hlen(f"{unique}:%blocks") == 3
        time.sleep(0.6)
        assert {block.value for block in companion.blocks()} == {"late"}
        assert client.hlen(f"{unique}:%blocks") == 2
        assert companion.unblock("user", "late")
        assert not client.exists(f"{unique}:%blocks")
        companion.block("user", "over", until_us=0)
        assert companion.blocks() == []
        assert not client.exists(f"{unique}:%blocks")


def test_many_blocks_are_read_in_parts(companion: BackgroundClient, remote_url: str, unique: str) -> None:
    for number in range(3_000):
        companion.block("user", f"{number}", until_us=2**52 if number % 3 else 0)
    assert sorted(int(block.value) for block in companion.blocks()) == [n for n in range(3_000) if n % 3]
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
def test_the_blocks_live_until_the_last_one_ends_or_would_have(
    companion: BackgroundClient, remote_url: str, unique: str, steps: list[Any], seconds: float | None
) -> None:
    with client_of(remote_url) as client:
        for verb, value, after in steps:
            if verb == "set":
                until_us = None if after is None else int(now_us(client) + after * SECOND)
                companion.block("user", value, until_us=until_us)
            elif verb == "drop":
                assert companion.unblock("user", value)
            else:
                companion.blocks()
        left = client.pttl(f"{unique}:%blocks")
    if seconds is None:
        assert left > 36_000 * DAY_MS
    else:
        assert seconds * 1000 - 2_000 < left <= seconds * 1000 + 1_000


def test_an_injected_clock_rules_the_blocks_too(
    open_companion: Callable[..., BackgroundClient], redis7: RedisServer
) -> None:
    clock = FakeClock(5 * SECOND)
    companion = open_companion(redis7.url, clock=clock)
    companion.block("user", "ada", until_us=6 * SECOND)
    assert len(companion.blocks()) == 1
    clock.set_us(6 * SECOND)
    assert companion.blocks() == []


def test_what_somebody_else_wrote_is_left_out(companion: BackgroundClient, remote_url: str, unique: str) -> None:
    companion.block("user", "ada")
    with client_of(remote_url) as client:
        for number, text in enumerate(("", "{", "[]", "null", '{"kind":1,"value":"x"}', '{"kind":"x"}')):
            client.hset(f"{unique}:%blocks", f"{number}", text)
        client.hset(f"{unique}:%blocks", "7", '{"until_us":"soon","kind":"user","value":"x"}')
    assert companion.blocks() == [StoredBlock("user", "ada", None, None)]


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


def test_others_hear_of_blocks_at_once(companion: BackgroundClient, remote_url: str) -> None:
    companion.block("user", "before")
    heard = Heard(remote_url, companion.encoder)
    with heard.listening():
        heard.lost.clear()  # to connect may take a busy machine longer than one attempt
        assert heard.values() == {"before"}
        companion.block("user", "ada", until_us=2**52, reason="spam \ud800 ☂")
        wait_until(lambda: "ada" in heard.values(), "the block")
        found = heard.blocks.find({"user": "ada"}, 0)
        assert found == ("user", "ada", 2**52, "spam \ud800 ☂")
        companion.unblock("user", "ada")
        companion.unblock("user", "before")
        wait_until(lambda: not heard.blocks, "the end of the blocks")
        # What changes nothing is told all the same: others may know less than the store.
        heard.blocks.set("user", "ghost", None, None)
        assert not companion.unblock("user", "ghost")
        wait_until(lambda: not heard.blocks, "the end of what was no block")
    assert not heard.lost


def test_news_arrive_in_milliseconds(
    companion: BackgroundClient, remote_url: str, record_property: Callable[[str, object], None]
) -> None:
    heard = Heard(remote_url, companion.encoder)
    delays = []
    with heard.listening():
        for number in range(300):
            start = time.perf_counter()
            companion.block("user", f"{number}", until_us=2**52)
            wait_until(lambda name=f"{number}": name in heard.heard_at, "the block")
            delays.append(heard.heard_at[f"{number}"] - start)
    delays.sort()
    told = [f"{what} {delays[int(len(delays) * share)] * 1000:.2f} ms" for what, share in (("p50", 0.5), ("p99", 0.99))]
    record_property("latency", told)
    print(f"block to heard, {remote_url.partition(':')[0]}: {', '.join(told)}, worst {delays[-1] * 1000:.2f} ms")
    assert delays[len(delays) // 2] < 1


REFUNDED = ("fixed_window", "gcra", "leaky_bucket", "sliding_log", "sliding_window", "token_bucket")


@pytest.mark.parametrize("algorithm", REFUNDED)
def test_a_refund_to_a_key_that_had_nothing_left_is_heard_of(
    companion: BackgroundClient, remote_url: str, algorithm: str, unique: str
) -> None:
    key = limit_of(unique, algorithm=algorithm).by("a:b {c}", "\ud800 ☂")
    heard = Heard(remote_url, companion.encoder)
    with heard.listening():
        assert companion.run_all([Check((key,), 4)])[0].remaining == 1
        assert companion.run_all([Refund(key, 1)]) == [True]  # nothing was used up, so nobody need know
        assert companion.run_all([Check((key,), 1)])[0].remaining == 1
        assert companion.run_all([Check((key,), 1)])[0].remaining == 0
        assert companion.run_all([Refund(key, 0)]) == [False]
        assert companion.run_all([Refund(key, 2, "once")]) == [True]
        assert companion.run_all([Refund(key, 2, "once")]) == [False]
        wait_until(lambda: heard.forgotten, "the refund")
        companion.run_all([Reset((key,))])
        wait_until(lambda: len(heard.forgotten) > 1, "the reset")
    assert heard.forgotten == [(key.limit.space, key.identity)] * 2


def test_a_reset_is_heard_of_for_each_key(companion: BackgroundClient, remote_url: str, unique: str) -> None:
    keys = tuple(limit_of(unique).by(number) for number in range(20))
    heard = Heard(remote_url, companion.encoder)
    with heard.listening():
        companion.run_all([Check((keys[0],), 5), Check((keys[1],), 5)])
        companion.run_all([Reset(keys)])
        wait_until(lambda: len(heard.forgotten) >= 20, "all keys")
        assert [answer.remaining for answer in companion.run_all([Check((key,), 0) for key in keys])] == [5] * 20
    assert sorted(heard.forgotten) == sorted((key.limit.space, key.identity) for key in keys)


def test_what_one_shard_gives_back_is_heard_of(
    open_companion: Callable[..., BackgroundClient], cluster: RedisCluster, unique: str
) -> None:
    companion = open_companion(cluster.url)
    taken, full = limit_of(f"{unique}-taken", 1).by("ada"), limit_of(f"{unique}-full", 1).by("ada")
    companion.run_all([Check((full,), 1)])
    heard = Heard(cluster.url, companion.encoder)
    with heard.listening():
        assert not companion.run_all([Check((taken, full), 1)])[0].allowed
        wait_until(lambda: heard.forgotten, "what was taken in vain")
    assert heard.forgotten == [(taken.limit.space, "ada")]


def test_leases_that_are_given_back_are_no_news(
    open_companion: Callable[..., BackgroundClient], cluster: RedisCluster, unique: str
) -> None:
    companion = open_companion(cluster.url)
    lease, full = limit_of(f"{unique}-lease", 1, "concurrency").by("ada"), limit_of(f"{unique}-full", 1).by("ada")
    companion.run_all([Check((full,), 1)])
    heard = Heard(cluster.url, companion.encoder)
    with heard.listening():
        assert not companion.run_all([Check((lease, full), 1, "a")])[0].allowed
        companion.block("user", "last")
        wait_until(lambda: heard.blocks, "what was told after it")
    assert heard.forgotten == []


@pytest.mark.parametrize("kind", ["redis", "valkey"])
def test_who_may_not_publish_may_do_all_else(
    open_companion: Callable[..., BackgroundClient], kind: Any, unique: str
) -> None:
    for rules in ("~* &* +@all -publish", "~* resetchannels +@all"):
        with RedisServer(kind, user=AclUser("gate", "secret", rules)) as server:
            companion = open_companion(server.url)
            key = limit_of(unique).by("ada")
            assert companion.run_all([Check((key,), 5)])[0].allowed
            assert companion.run_all([Refund(key, 5)]) == [True]
            assert companion.run_all([Check((key,), 5), Reset((key,))])[1] is None
            assert companion.run_all([Check((key,), 0)])[0].remaining == 5
            companion.block("user", "ada")
            assert [block.value for block in companion.blocks()] == ["ada"]
            assert companion.unblock("user", "ada")


def test_who_may_not_listen_is_told_once(open_companion: Callable[..., BackgroundClient]) -> None:
    with RedisServer(user=AclUser("gate", "secret", "~* +@all")) as server:
        heard = Heard(server.url, open_companion(server.url).encoder)
        with heard.listening(at_once=False):
            wait_until(lambda: heard.lost, "the refusal")
            time.sleep(0.5)
        assert [type(error) for error in heard.lost] == [StoreUnavailable]
        assert "NOPERM" in str(heard.lost[0])
        assert heard.connected == 0


def test_databases_do_not_hear_each_other(redis7: RedisServer, unique: str) -> None:
    url = redis7.url.removesuffix("/0")
    wires = [CommandEncoder(unique, None, database=database) for database in (0, 3)]
    companions = [
        BackgroundClient(connection_factory(f"{url}/{number}", asynchronous=False), wires[number // 3])
        for number in (0, 3)
    ]
    heard = [Heard(f"{url}/0", wires[0]), Heard(f"{url}/3", wires[1])]
    with heard[0].listening(), heard[1].listening():
        for number, companion in enumerate(companions):
            companion.block("user", f"of {number}")
            wait_until(lambda number=number: heard[number].blocks, "its own block")
            companion.close()
    assert [each.values() for each in heard] == [{"of 0"}, {"of 1"}]


def test_namespaces_do_not_hear_each_other(
    open_companion: Callable[..., BackgroundClient], redis7: RedisServer, unique: str
) -> None:
    one, other = open_companion(redis7.url), open_companion(redis7.url, f"{unique}-other")
    heard = Heard(redis7.url, other.encoder)
    with heard.listening():
        one.block("user", "ada")
        other.block("user", "bob")
        wait_until(lambda: heard.blocks, "its own block")
    assert heard.values() == {"bob"}
    assert [block.value for block in one.blocks()] == ["ada"]


def test_news_come_over_tls(open_companion: Callable[..., BackgroundClient]) -> None:
    with RedisServer(tls=True, password="secret") as server:
        companion = open_companion(server.url)
        heard = Heard(server.url, companion.encoder)
        with heard.listening():
            for number in range(200):
                companion.block("user", f"{number}", reason="x" * 1_000)
            wait_until(lambda: len(heard.blocks) == 200, "all blocks")
            companion.block("user", "y" * 100_000)  # more than TLS sends in one piece
            wait_until(lambda: len(heard.blocks) == 201, "a large one")
        assert not heard.lost


@pytest.fixture
def forge(remote_url: str, companion: BackgroundClient) -> Iterator[Callable[[str | bytes], Any]]:
    """Publish as a client of another database does, where the servers have several."""
    with client_of(remote_url) as client:
        if not isinstance(client, redis.RedisCluster):
            client.select(15)
        yield lambda text: client.publish(companion.encoder.channel, text)


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
    companion: BackgroundClient, remote_url: str, forge: Callable[[str | bytes], Any], text: str
) -> None:
    companion.block("ip", "203.0.113.0/24")
    heard = Heard(remote_url, companion.encoder)
    with heard.listening():
        forge(text)
        companion.block("user", "last")
        wait_until(lambda: "last" in heard.values(), "a genuine message")
        assert heard.values() == {"203.0.113.0/24", "last"}
    assert not heard.lost


def test_a_flood_of_forged_messages_costs_few_reads(
    companion: BackgroundClient, remote_url: str, forge: Callable[[str | bytes], Any]
) -> None:
    companion.block("user", "before")
    heard = Heard(remote_url, companion.encoder)
    with heard.listening():
        start = time.monotonic()
        for number in range(5_000):
            forge('block {"kind":"user","value":"before"}')
            if number % 2:
                forge(f'block {{"kind":"user","value":"{number}"}}')
            forge("forget a:b:c")
        companion.block("user", "genuine")
        wait_until(lambda: "genuine" in heard.values(), "the genuine block", timeout=10)
        seconds = time.monotonic() - start
        assert heard.values() == {"before", "genuine"}
        assert len([read for read in heard.reads if read is not None]) <= seconds / pubsub.READ_INTERVAL_S + 1
        assert heard.reads.count(None) <= seconds / pubsub.READ_ALL_INTERVAL_S + 1
        assert max(len(read or ()) for read in heard.reads) <= pubsub.MAX_READ_AT_ONCE
        assert len(heard.forgotten) <= seconds / pubsub.FORGET_INTERVAL_S + 1
    assert not heard.lost
    assert heard.listener.ignored == 0


def test_malformed_and_oversized_messages_are_ignored_and_counted(
    companion: BackgroundClient, remote_url: str, forge: Callable[[str | bytes], Any], caplog: pytest.LogCaptureFixture
) -> None:
    heard = Heard(remote_url, companion.encoder)
    texts: list[str | bytes] = ["", "nonsense", "block {", b"block \xff", b"forget \xff:a:b", b"\xff", "forget a:b"]
    texts += ["unblock {}", "block " + "[" * 30_000, "block " + "x" * 40_000, b"x" * 3_000_000, b"\r\n" * 70_000]
    with heard.listening():
        for text in texts:
            forge(text)
        companion.block("user", "ada")
        wait_until(lambda: heard.values() == {"ada"}, "the block after all that")
        assert heard.listener.ignored == len(texts)
    assert heard.connected == 1
    assert not heard.lost
    assert caplog.text.count("malformed or oversized") == 1


def test_what_nobody_understands_does_no_harm(
    open_companion: Callable[..., BackgroundClient], redis7: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    companion = open_companion(redis7.url)
    heard = Heard(redis7.url, companion.encoder)
    with heard.listening(), redis7.client() as client:
        for text in ("", "nonsense", "block", "block {", "unblock []", "forget", "forget a:b", b"block \xff", b"\xff"):
            client.publish(companion.encoder.channel, text)
        heard.listener._on_forget = lambda space, identity: 1 / 0
        client.publish(companion.encoder.channel, "forget a:b:c")
        companion.block("user", "ada")
        wait_until(lambda: heard.blocks, "the block after all that")
    assert heard.connected == 1
    assert "ZeroDivisionError" in caplog.text
    assert "malformed or oversized" in caplog.text


def test_a_mistake_of_who_is_told_of_the_connection_is_not_the_end(
    open_companion: Callable[..., BackgroundClient], server: RedisServer
) -> None:
    companion = open_companion(server.url)
    heard = Heard(server.url, companion.encoder)
    heard.listener._on_connect = lambda: 1 / 0
    heard.listener._on_lost = lambda error: 1 / 0
    with heard.listening(at_once=False):
        wait_until(lambda: listeners(server, companion) == 1, "the listener")
        server.restart()
        wait_until(lambda: listeners(server, companion) == 1, "the listener again")
        companion.block("user", "ada")
        wait_until(lambda: heard.blocks, "the block")


def listeners(server: RedisServer, companion: BackgroundClient) -> int:
    with server.client() as client:
        ((_, number),) = client.pubsub_numsub(companion.encoder.channel)
        return int(number)


# News that are lost


@pytest.mark.parametrize("kind", ["redis", "valkey"])
def test_a_listener_outlives_the_server(open_companion: Callable[..., BackgroundClient], kind: Any) -> None:
    with RedisServer(kind) as server:
        companion = open_companion(server.url)
        heard = Heard(server.url, companion.encoder)
        with heard.listening():
            companion.block("user", "ada")
            wait_until(lambda: heard.values() == {"ada"}, "the block")
            server.kill()
            wait_until(lambda: heard.lost, "the loss")
            time.sleep(0.3)
            assert heard.values() == {"ada"}  # the last that is known holds
            server.start()
            companion.block("user", "bob")
            wait_until(lambda: heard.connected == 2, "the connection")
            wait_until(lambda: heard.values() == {"bob"}, "what is blocked now")
        assert len(heard.lost) == 1


def test_a_reload_that_fails_is_tried_again(
    open_companion: Callable[..., BackgroundClient], server: RedisServer
) -> None:
    companion = open_companion(server.url)
    companion.block("user", "ada")
    heard = Heard(server.url, companion.encoder)
    fails = [StoreUnavailable("not now")] * 2

    def reload() -> None:
        if fails:
            raise fails.pop()
        heard._connect()

    heard.listener._on_connect = reload
    with heard.listening():
        assert heard.values() == {"ada"}
    assert [str(error) for error in heard.lost] == ["not now"]


def test_a_connection_that_is_silent_is_lost(
    open_companion: Callable[..., BackgroundClient], server: RedisServer
) -> None:
    companion = open_companion(server.url)
    heard = Heard(server.url, companion.encoder)
    with heard.listening():
        time.sleep(4.5)  # it is asked for a word, and says one
        assert not heard.lost
        with paused(server):
            wait_until(lambda: heard.lost, "the silence to be noticed", timeout=8)
        wait_until(lambda: heard.connected == 2, "the connection", timeout=8)
    assert "did not answer to PING" in str(heard.lost[0])


def test_a_server_that_was_lost_is_not_the_next_to_be_tried(
    open_companion: Callable[..., BackgroundClient], cluster: RedisCluster, redis7: RedisServer
) -> None:
    listener = Heard(cluster.url, open_companion(cluster.url).encoder).listener
    listener._node = Node(HOST, cluster.nodes[1].port)
    chosen = {listener._choose() for _ in range(30)}
    assert chosen == {Node(HOST, cluster.nodes[0].port), Node(HOST, cluster.nodes[2].port)}
    assert Heard(redis7.url, open_companion(redis7.url).encoder).listener._choose() is None


def test_a_server_that_is_no_primary_any_more_is_left(
    open_companion: Callable[..., BackgroundClient], cluster: RedisCluster
) -> None:
    heard = Heard(cluster.url, open_companion(cluster.url).encoder)
    with heard.listening():
        topology = heard.background_client.factory.topology
        assert isinstance(topology, Cluster)
        # As another thread may have learned.
        topology._slots = {slot: Node(HOST, 1) for slot in range(16384)}
        wait_until(lambda: heard.connected == 2, "another connection", timeout=8)
    assert "not a primary" in str(heard.lost[0])


def test_it_stops_while_nobody_answers(open_companion: Callable[..., BackgroundClient], server: RedisServer) -> None:
    heard = Heard(f"redis://{HOST}:1/0", open_companion(server.url).encoder)
    with heard.listening(at_once=False):
        wait_until(lambda: heard.lost, "the refusal")
    assert len(heard.lost) == 1
    heard = Heard(server.url, open_companion(server.url).encoder)
    with paused(server), heard.listening(at_once=False):
        time.sleep(0.1)
    heard = Heard(server.url, open_companion(server.url).encoder)
    with heard.listening():
        server.pause()
    server.resume()


def test_it_may_be_stopped_before_it_starts(
    open_companion: Callable[..., BackgroundClient], redis7: RedisServer
) -> None:
    heard = Heard(redis7.url, open_companion(redis7.url).encoder)
    heard.listener.stop()
    heard.listener.listen()
    heard.listener.stop()
    assert heard.connected == 0


def test_a_forked_child_leaves_its_parents_connections_alone(
    open_companion: Callable[..., BackgroundClient], redis7: RedisServer
) -> None:
    companion = open_companion(redis7.url)
    heard = Heard(redis7.url, companion.encoder)
    with heard.listening():
        companion.heartbeat("parent", 600 * SECOND)
        bell, pool = heard.listener._stop_signal, companion._pool
        for inherited in (heard.listener, companion):  # as fork calls them
            inherited.reset_after_fork()
        heard.listener.stop()
        assert companion.heartbeat("child", 600 * SECOND) == 2
        assert companion._pool is not pool
        companion.block("user", "ada")
        wait_until(lambda: heard.blocks, "the parent to hear it")
        heard.listener._stop_signal = bell
        pool.close()
