"""Redis URLs: every option is read, and none is ignored."""

from __future__ import annotations

import re
from typing import Any

import pytest

from headgate import InvalidConfiguration, Limiter
from headgate.stores.redis.connection_factory import connection_factory
from headgate.stores.redis.encoding import Node
from headgate.stores.redis.topology import Cluster, Sentinel, ShardedTopology, Topology


@pytest.mark.parametrize(
    "url",
    [
        *["redis://h/?foo=1", "redis://h?foo=1", "redis://h:6379?foo=1", "redis+cluster://h?foo=1"],
        *["unix:///tmp/socket?foo=1", "redis+sentinel://h/name?foo=1"],
    ],
)
def test_unknown_url_option_is_rejected(url: str) -> None:
    option = url.partition("?")[2].partition("=")[0]
    with pytest.raises(InvalidConfiguration, match=f"^unknown option '{option}' in the Redis URL; known are host, "):
        Limiter(url)


@pytest.mark.parametrize(
    ("option", "remedy"),
    [
        ("socket_timeout=5", "leave it out, and give the limiter budget=, the seconds that Redis may take"),
        ("socket_connect_timeout=5", "leave it out, and give the limiter budget=, the seconds that Redis may take"),
        ("max_connections=50", "leave it out: requests share one connection"),
    ],
)
def test_unsupported_url_option_names_the_remedy(option: str, remedy: str) -> None:
    name = option.partition("=")[0]
    with pytest.raises(InvalidConfiguration) as told:
        Limiter(f"redis://h/0?{option}")
    assert str(told.value) == f"unknown option {name!r} in the Redis URL; {remedy}"


@pytest.mark.parametrize(
    "url",
    [
        *["redis://h/x", "redis://h/0x1", "redis://h/-1", "redis://h/?db=x", "redis+sentinel://h/name/x"],
        *["unix://", "rediss://h/?ssl_cert_reqs=bogus", "redis://a..b", "redis+cluster://,"],
    ],
)
def test_invalid_url_is_rejected_when_the_limiter_is_made(url: str) -> None:
    """Or it would lead to another database, another server, or an error that only a request finds."""
    with pytest.raises(InvalidConfiguration):
        Limiter(url)


@pytest.mark.parametrize(
    ("url", "options"),
    [
        ("redis://h:6380?db=3", {"host": "h", "port": 6380, "db": 3}),
        ("redis://h:6380/3", {"host": "h", "port": 6380, "db": 3}),
        ("redis://[::1]:6380/3", {"host": "::1", "port": 6380, "db": 3}),
        ("redis://u:p%40%2F@h", {"host": "h", "username": "u", "password": "p@/"}),
        ("redis://h?client_name=me", {"host": "h", "client_name": "me"}),
        ("redis+cluster://u:p@h:7000,g:7001", {"host": "h", "port": 7000, "username": "u", "password": "p"}),
        ("redis+sentinel://u:p@h/name/3", {"db": 3, "username": "u", "password": "p"}),
        ("unix://u:p@/tmp/socket?db=3", {"path": "/tmp/socket", "db": 3, "username": "u", "password": "p"}),
    ],
)
def test_url_options_reach_the_client(url: str, options: dict[str, Any]) -> None:
    found = Limiter(url).engine.store.factory.options
    assert {name: found.get(name) for name in options} == options


def test_shards_are_named_in_one_url() -> None:
    """Commas between the servers of a cluster do not end its URL."""
    url = "sharded://a=redis://h1:6380/2, b=redis+cluster://h2:7000,h3:7001,c=redis+sentinel://h4,h5/name"
    factory = connection_factory(url, asynchronous=False)
    assert list(factory.shards) == ["a", "b", "c"]
    topology = factory.topology
    assert isinstance(topology, ShardedTopology)
    assert topology.home == "a"
    assert [type(each) for each in topology.parts.values()] == [Topology, Cluster, Sentinel]
    assert factory.address(Node("h1", 6380, shard="a")) == "a (h1:6380)"


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("sharded://", "a sharded URL lists names and URLs: sharded://a=redis://host1/0,b=redis://host2/0"),
        ("sharded://redis://h1,redis://h2", "a sharded URL lists names and URLs"),
        ("sharded://a=redis://h1,a=redis://h2", "two shards are named 'a': give each a name of its own"),
        ("sharded://a b=redis://h1", "shard name 'a b': use 1 to 64 letters, digits"),
        ("sharded://a=redis://h1,b=redis://h2/x", "shard 'b': 'x' is not a database"),
        ("sharded://a=memory://", "shard 'a' needs a URL that starts with one of redis://"),
        ({}, 'no shards: give at least one, like {"a": "redis://host1:6379/0"}'),
        ({"a": "sharded://b=redis://h"}, "shard 'a' needs a URL that starts with one of redis://"),
        ({1: "redis://h"}, "shard name 1: use 1 to 64 letters"),
    ],
)
def test_invalid_shards_are_rejected_with_a_remedy(url: Any, message: str) -> None:
    with pytest.raises(InvalidConfiguration, match=re.escape(message)):
        Limiter(url)
