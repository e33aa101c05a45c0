"""Every way to a Redis: by URL with TLS, a password, an ACL or a socket file, or by a client that one has already."""

from __future__ import annotations

import asyncio
import inspect
import threading
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest
import redis
import redis.asyncio
import redis.asyncio.sentinel
import redis.sentinel

from headgate import AsyncLimiter, InvalidConfiguration, Key, Limit, Limiter, StoreError, StoreUnavailable
from headgate.stores.redis.batch_protocol import NotSent
from headgate.stores.redis.connection_pool import PendingConnection
from support.servers import HOST, AclUser, RedisServer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from support.servers import RedisCluster, SentinelSet

HOUR = timedelta(hours=1)
ALGORITHMS = ("concurrency", "fixed_window", "gcra", "leaky_bucket", "sliding_log", "sliding_window", "token_bucket")


def keys_of(name: str) -> list[Key]:
    return [Limit(5, HOUR, algorithm=algorithm, name=name).by("ada") for algorithm in ALGORITHMS]


def exercise(limiter: Limiter, name: str) -> None:
    """Every kind of call on every algorithm, so that no command is missing from an ACL."""
    keys = keys_of(name)
    assert limiter.check(*keys, id="a").remaining == 4
    assert not limiter.check(*keys, cost=5, id="b").allowed
    assert limiter.renew(keys[0], id="a")
    assert limiter.leave(keys[0], id="a")
    assert [limiter.refund(key, 1, id="r") for key in keys[1:]] == [True] * 6
    limiter.reset(*keys)
    assert limiter.peek(*keys).remaining == 5


async def exercise_async(limiter: AsyncLimiter, name: str) -> None:
    keys = keys_of(name)
    assert (await limiter.check(*keys, id="a")).remaining == 4
    assert not (await limiter.check(*keys, cost=5, id="b")).allowed
    assert await limiter.renew(keys[0], id="a")
    assert await limiter.leave(keys[0], id="a")
    assert await asyncio.gather(*[limiter.refund(key, 1, id="r") for key in keys[1:]]) == [True] * 6
    await limiter.reset(*keys)
    assert (await limiter.peek(*keys)).remaining == 5


def use(where: str, name: str, **options: Any) -> None:
    """Both kinds of limiter at that URL."""
    with Limiter(where, **options) as limiter:
        exercise(limiter, f"{name}-sync")

    async def main() -> None:
        async with AsyncLimiter(where, **options) as limiter:
            await exercise_async(limiter, f"{name}-async")

    asyncio.run(main())


def errors_at(where: str, name: str) -> list[str]:
    """What both kinds of limiter say of a server that does not let them in."""
    key = Limit(5, HOUR, name=name).by("ada")
    with Limiter(where) as limiter, pytest.raises(StoreError) as told:
        limiter.check(key)
    said = [str(told.value)]

    async def main() -> None:
        async with AsyncLimiter(where) as limiter:
            with pytest.raises(StoreError) as told:
                await asyncio.wait_for(limiter.check(key), 5)
            said.append(str(told.value))

    asyncio.run(main())
    return said


# URLs


@pytest.fixture(scope="module")
def tls() -> Iterator[RedisServer]:
    with RedisServer(tls=True, password="secret") as server:
        yield server


def test_tls(tls: RedisServer, unique: str) -> None:
    use(tls.url, unique)


def test_untrusted_certificate_is_rejected(tls: RedisServer, unique: str) -> None:
    for told in errors_at(tls.url.partition("?")[0], unique):
        assert "certificate verify failed" in told
        assert "secret" not in told


def test_plain_connection_to_a_tls_server_fails_soon(tls: RedisServer, unique: str) -> None:
    for told in errors_at(tls.url.partition("?")[0].replace("rediss://", "redis://"), unique):
        assert "secret" not in told


def test_a_password(unique: str) -> None:
    with RedisServer(password="correct-horse") as server:
        use(server.url, unique)
        use(server.url.replace("horse", "%68orse"), f"{unique}-escaped")
        for url in (server.url.replace("horse", "cow"), server.url.replace(":correct-horse@", "")):
            for told in errors_at(url, unique):
                assert "correct" not in told


QUICKER = ("mget", "mset", "pexpireat", "info", "setrange")
NEEDED = (
    *("eval", "evalsha", "unlink", "time", "get", "set", "del", "pttl", "pexpire", *QUICKER),
    *("hgetall", "hset", "hdel", "zadd", "zcard", "zrange", "zrangebyscore", "zrank", "zrem", "zremrangebyscore"),
    "zrevrange",
)


@pytest.mark.parametrize("kind", ["redis", "valkey"])
def test_acl_user_with_minimal_permissions(kind: Any, unique: str) -> None:
    rules = "-@all ~headgate:* ~{headgate:* " + " ".join(f"+{command}" for command in NEEDED)
    with RedisServer(kind, user=AclUser("gate", "secret", rules)) as server:
        use(server.url, unique)
        with Limiter(server.url, namespace="elsewhere") as limiter, pytest.raises(StoreUnavailable) as told:
            limiter.check(Limit(5, HOUR, name=unique).by("ada"))
        assert "secret" not in str(told.value)


@pytest.mark.parametrize("refused", [*[(each,) for each in QUICKER], QUICKER])
def test_acl_user_without_optional_commands(refused: tuple[str, ...], unique: str) -> None:
    """Such as one who was let in for an earlier version."""
    rules = "-@all ~headgate:* ~{headgate:* " + " ".join(f"+{command}" for command in NEEDED if command not in refused)
    with RedisServer(user=AclUser("gate", "secret", rules)) as server, server.client() as client:
        use(server.url, unique)
        with Limiter(server.url) as limiter:
            keys = [Limit(quota, HOUR, name=f"{unique}-{quota}").by("ada") for quota in (2, 3)]
            assert [limiter.check(*keys).verdicts[1][0] for _ in range(2)] == [2, 1]
            assert limiter.check(*keys).denied_by == (keys[0].limit.name,)
            assert [limiter.peek(key).remaining for key in keys] == [0, 1]
        lives_ms = [client.pttl(name) for name in client.scan_iter(f"*{unique}-[23]*")]
        assert len(lives_ms) == 2
        assert all(1_190_000 < life_ms <= 3_602_000 for life_ms in lives_ms)


def test_socket_file(unique: str) -> None:
    with RedisServer(unix=True, password="secret") as server:
        use(server.url, unique)
        use(f"{server.url}?db=3", unique)
        with server.client() as client:
            assert set(client.info("keyspace")) == {"db0", "db3"}


def test_another_database(redis7: RedisServer, unique: str) -> None:
    key = Limit(1, HOUR, name=unique).by("ada")
    address = f"redis://{HOST}:{redis7.port}"
    for url in (f"{address}/0", f"{address}/3", f"{address}/?db=4", f"{address}?db=5"):
        with Limiter(url) as limiter:
            assert [limiter.check(key).allowed for _ in range(2)] == [True, False]


def test_any_node_of_a_cluster_will_do_and_a_dead_one_among_them(cluster: RedisCluster, unique: str) -> None:
    nodes = [f"{HOST}:{node.port}" for node in cluster.nodes]
    for number, hosts in enumerate((nodes[1], nodes[5], ",".join(nodes), f"{HOST}:1,{nodes[2]}")):
        use(f"redis+cluster://{hosts}", f"{unique}-{number}")


def test_any_sentinel_will_do_and_a_dead_one_among_them(sentinel: SentinelSet, unique: str) -> None:
    watchers = [f"{HOST}:{each.port}" for each in sentinel.sentinels]
    for number, hosts in enumerate((watchers[1], ",".join(watchers), f"{HOST}:1,{watchers[2]}")):
        use(f"redis+sentinel://{hosts}/{sentinel.name}", f"{unique}-{number}")
    use(f"redis+sentinel://{watchers[0]}/{sentinel.name}/2", unique)


def test_primary_that_no_sentinel_knows_is_named_in_the_error(sentinel: SentinelSet, unique: str) -> None:
    for told in errors_at(sentinel.url.replace(sentinel.name, "nobody"), unique):
        assert "'nobody'" in told


def test_cluster_url_of_a_single_server_is_an_error(redis7: RedisServer, unique: str) -> None:
    for told in errors_at(f"redis+cluster://{HOST}:{redis7.port}", unique):
        assert "cluster" in told


# Clients


@contextmanager
def opened(client: Any) -> Iterator[Any]:
    try:
        yield client
    finally:
        client.close()


CLIENTS: dict[str, Callable[[RedisServer], redis.Redis]] = {
    "plain": lambda server: redis.Redis(host=HOST, port=server.port),
    "from a URL": lambda server: redis.Redis.from_url(server.url),
    "with texts": lambda server: redis.Redis(host=HOST, port=server.port, decode_responses=True),
    "of RESP3": lambda server: redis.Redis(host=HOST, port=server.port, protocol=3),
    "with a database": lambda server: redis.Redis(host=HOST, port=server.port, db=3),
    "with a pool": lambda server: redis.Redis(
        connection_pool=redis.BlockingConnectionPool(host=HOST, port=server.port, max_connections=1)
    ),
}


@pytest.mark.parametrize("make", CLIENTS.values(), ids=CLIENTS)
def test_a_client(redis7: RedisServer, unique: str, make: Callable[[RedisServer], redis.Redis]) -> None:
    with opened(make(redis7)) as client:
        with Limiter(client) as limiter:
            exercise(limiter, unique)
            limiter.check(*keys_of(unique))
        # What is counted is where the client looks, and the limiter's end is not the client's.
        assert client.exists(f"headgate:{unique}:token_bucket.1:ada") == 1


ASYNC_CLIENTS: dict[str, Callable[[RedisServer], redis.asyncio.Redis]] = {
    "plain": lambda server: redis.asyncio.Redis(host=HOST, port=server.port),
    "from a URL": lambda server: redis.asyncio.Redis.from_url(server.url),
    "with texts": lambda server: redis.asyncio.Redis(host=HOST, port=server.port, decode_responses=True),
    "of RESP3": lambda server: redis.asyncio.Redis(host=HOST, port=server.port, protocol=3),
    "with a database": lambda server: redis.asyncio.Redis(host=HOST, port=server.port, db=3),
}


@pytest.mark.parametrize("make", ASYNC_CLIENTS.values(), ids=ASYNC_CLIENTS)
def test_client_of_asyncio(
    redis7: RedisServer, unique: str, make: Callable[[RedisServer], redis.asyncio.Redis]
) -> None:
    async def main() -> None:
        client = make(redis7)
        async with AsyncLimiter(client) as limiter:
            await exercise_async(limiter, unique)
            await limiter.check(*keys_of(unique))
        assert await client.exists(f"headgate:{unique}:token_bucket.1:ada") == 1
        await client.aclose()

    asyncio.run(main())


def test_client_with_tls(tls: RedisServer, unique: str) -> None:
    options: dict[str, Any] = {"host": HOST, "port": tls.port, "password": "secret", "ssl": True}
    options["ssl_ca_certs"] = f"{tls.directory}/ca.pem"
    with opened(redis.Redis(**options)) as client, Limiter(client) as limiter:
        exercise(limiter, f"{unique}-sync")

    async def main() -> None:
        client = redis.asyncio.Redis(**options)
        async with AsyncLimiter(client) as limiter:
            await exercise_async(limiter, f"{unique}-async")
        await client.aclose()

    asyncio.run(main())


def test_client_with_a_socket_file(unique: str) -> None:
    with RedisServer(unix=True, user=AclUser("gate", "secret", "~* +@all")) as server:
        options = {"unix_socket_path": f"{server.directory}/socket", "username": "gate", "password": "secret"}
        with opened(redis.Redis(**options)) as client, Limiter(client) as limiter:
            exercise(limiter, unique)


def test_client_of_a_cluster(cluster: RedisCluster, unique: str) -> None:
    with opened(redis.RedisCluster(host=HOST, port=cluster.nodes[0].port)) as client:
        with Limiter(client) as limiter:
            exercise(limiter, f"{unique}-sync")
        assert client.ping()

    async def main() -> None:
        client = redis.asyncio.RedisCluster(host=HOST, port=cluster.nodes[0].port)
        async with AsyncLimiter(client) as limiter:
            await exercise_async(limiter, f"{unique}-async")
        await client.aclose()

    asyncio.run(main())


def test_client_of_a_sentinels_primary(sentinel: SentinelSet, unique: str) -> None:
    watchers = [(HOST, each.port) for each in sentinel.sentinels]
    known = redis.sentinel.Sentinel(watchers)
    with opened(known.master_for(sentinel.name)) as client, Limiter(client) as limiter:
        exercise(limiter, f"{unique}-sync")
    for each in known.sentinels:
        each.close()

    async def main() -> None:
        known = redis.asyncio.sentinel.Sentinel(watchers)
        client = known.master_for(sentinel.name)
        async with AsyncLimiter(client) as limiter:
            await exercise_async(limiter, f"{unique}-async")
        for each in (client, *known.sentinels):
            await each.aclose()

    asyncio.run(main())


def test_client_of_the_other_kind_is_refused() -> None:
    plain, of_asyncio = redis.Redis(), redis.asyncio.Redis()
    with pytest.raises(InvalidConfiguration, match=r"neither a URL nor a redis\.Redis or RedisCluster client"):
        Limiter(of_asyncio)
    with pytest.raises(InvalidConfiguration, match=r"neither a URL nor a redis\.asyncio\.Redis or RedisCluster client"):
        AsyncLimiter(plain)


def test_options_that_are_passed_on_are_options_that_redis_py_has() -> None:
    """A name that redis-py gives up would be a TypeError at the first connection of whoever uses it."""
    from headgate.stores.redis.connection_factory import _HANDSHAKE

    taken: set[str] = set()
    for kind in (redis.Connection, redis.SSLConnection, redis.UnixDomainSocketConnection):
        for base in kind.__mro__:
            if "__init__" in vars(base):
                taken |= set(inspect.signature(vars(base)["__init__"]).parameters)
    assert set(_HANDSHAKE) <= taken


def test_any_error_while_connecting_is_a_store_error() -> None:
    def make() -> Any:
        raise KeyError("the provider of credentials is away")

    with pytest.raises(NotSent, match="the provider of credentials"):
        PendingConnection(make).wait(10)


def test_thread_start_failure_is_a_connection_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", start)
    with pytest.raises(NotSent, match="can't start new thread"):
        PendingConnection(lambda: None).wait(10)
