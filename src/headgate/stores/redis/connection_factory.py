"""A factory of redis-py connections from a URL, an existing client, or several of these by name.

redis-py parses addresses, opens connections, and does TLS, authentication and the handshake; what is sent afterwards
is ours (docs/decisions/0003-transport.md).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final, NamedTuple
from urllib.parse import parse_qs, unquote, urlsplit

import redis
import redis.asyncio
import redis.asyncio.connection
import redis.backoff
import redis.retry

from headgate.errors import InvalidConfiguration
from headgate.stores.redis.encoding import Node
from headgate.stores.redis.rendezvous import MAX_NAME_LENGTH
from headgate.stores.redis.topology import Cluster, Sentinel, ShardedTopology, Topology

__all__ = ["ConnectionFactory", "connection_factory"]

URL_SCHEMES: Final = (
    "redis", "rediss", "unix", "redis+cluster", "rediss+cluster", "redis+sentinel", "rediss+sentinel",
)  # fmt: skip
"""The schemes of one deployment."""

_BUDGET: Final = "leave it out, and give the limiter budget=, the seconds that Redis may take"
_REMEDIES: Final = {
    "socket_timeout": _BUDGET,
    "socket_connect_timeout": _BUDGET,
    "timeout": _BUDGET,
    "max_connections": "leave it out: requests share one connection",
}
"""Remedies for options of other clients."""

_HANDSHAKE: Final = [
    "host", "port", "path", "db", "username", "password", "credential_provider", "client_name", "encoding",
    "socket_keepalive", "socket_keepalive_options", "socket_type",
    "ssl_keyfile", "ssl_certfile", "ssl_cert_reqs", "ssl_ca_certs", "ssl_ca_data", "ssl_ca_path", "ssl_check_hostname",
    "ssl_password", "ssl_min_version", "ssl_ciphers", "ssl_validate_ocsp", "ssl_validate_ocsp_stapled",
    "ssl_ocsp_context", "ssl_ocsp_expected_cert", "ssl_include_verify_flags", "ssl_exclude_verify_flags",
]  # fmt: skip
"""The options of a redis-py connection that users may set: address, credentials and TLS."""

CONNECT_TIMEOUT_S: Final = 1.0
"""No request waits that long: it only bounds the life of the attempt."""

_AUTHORITY: Final = re.compile(r"([^/?]*)(.*)", re.DOTALL)
_DIGITS: Final = re.compile(r"[0-9]{1,5}")

_SHARD_NAME: Final = re.compile(rf"[A-Za-z0-9_.-]{{1,{MAX_NAME_LENGTH}}}")
_NEXT_SHARD: Final = re.compile(r"\s*,\s*(?=[^\s,=:/@?]*=(?:redis|rediss|unix)(?:\+[a-z]+)?://)")
"""The comma before NAME=URL. Commas between the hosts of one URL are not followed by that."""


class ConnectionFactory(NamedTuple):
    """Options of the connections to a server, or to all nodes of a topology; for shards, their factories."""

    options: dict[str, Any]
    sentinel_options: dict[str, Any]
    tls: bool
    topology: Topology
    shards: Mapping[str, ConnectionFactory] = {}
    """The factories of a sharded store, by name; each server says to which one it belongs."""

    @property
    def database(self) -> int:
        """The database; of a sharded store, if it is the same everywhere."""
        databases = {factory.database for factory in self.shards.values()} or {self.options.get("db") or 0}
        return databases.pop() if len(databases) == 1 else 0

    def address(self, node: Node | None) -> str:
        """The address of a server, for operators."""
        if node is not None and node.shard in self.shards:
            return f"{node.shard} ({self.shards[node.shard].address(node)})"
        options = self.options
        if node is not None and "path" not in options:
            return f"{node.host}:{node.port}"
        return str(options.get("path") or f"{options.get('host', 'localhost')}:{options.get('port', 6379)}")

    def connection(self, node: Node | None, *, asynchronous: bool, timeout: float = CONNECT_TIMEOUT_S) -> Any:
        """A redis-py connection, not yet connected."""
        if node is not None and node.shard in self.shards:
            return self.shards[node.shard].connection(node, asynchronous=asynchronous, timeout=timeout)
        options = dict(self.options)
        if node is not None and "path" not in options:
            options.update(host=node.host, port=node.port)
            if node.role == "sentinel":
                options = {**self.sentinel_options, "host": node.host, "port": node.port}
        module: Any = redis.asyncio.connection if asynchronous else redis.connection
        kind = module.Connection
        if "path" in options:
            kind = module.UnixDomainSocketConnection
        elif self.tls:
            kind = module.SSLConnection
        retry: Any = (redis.asyncio.retry if asynchronous else redis.retry).Retry(redis.backoff.NoBackoff(), 0)
        return kind(**options, protocol=2, retry=retry, socket_timeout=timeout, socket_connect_timeout=timeout)


def connection_factory(url: Any, *, asynchronous: bool) -> ConnectionFactory:
    """The factory for a URL, for the servers of a redis-py client, or for several of these by name."""
    if isinstance(url, str) and url.startswith("sharded://"):
        url = _parse_shards(url)
    if isinstance(url, Mapping):
        return _from_shards(url, asynchronous=asynchronous)
    return _from_one(url, asynchronous=asynchronous)


def _parse_shards(url: str) -> dict[str, str]:
    """The URLs of sharded://NAME=URL,NAME=URL by name."""
    shards: dict[str, str] = {}
    for entry in _NEXT_SHARD.split(url.removeprefix("sharded://").strip()):
        name, separator, where = entry.partition("=")
        if not separator or "://" in name:
            raise InvalidConfiguration(
                "a sharded URL lists names and URLs: sharded://a=redis://host1/0,b=redis://host2/0"
            )
        if name in shards:
            raise InvalidConfiguration(f"two shards are named {name!r}: give each a name of its own")
        shards[name] = where
    return shards


def _from_shards(shards: Mapping[Any, Any], *, asynchronous: bool) -> ConnectionFactory:
    if not shards:
        raise InvalidConfiguration('no shards: give at least one, like {"a": "redis://host1:6379/0"}')
    factories: dict[str, ConnectionFactory] = {}
    for name, where in shards.items():
        if not isinstance(name, str) or not _SHARD_NAME.fullmatch(name):
            raise InvalidConfiguration(
                f"shard name {name!r}: use 1 to {MAX_NAME_LENGTH} letters, digits, dots, hyphens and underscores"
            )
        if isinstance(where, str) and where.partition("://")[0] not in URL_SCHEMES:
            raise InvalidConfiguration(
                f"shard {name!r} needs a URL that starts with one of {', '.join(f'{each}://' for each in URL_SCHEMES)}"
            )
        try:
            factories[name] = _name_nodes(_from_one(where, asynchronous=asynchronous), name)
        except InvalidConfiguration as error:
            raise InvalidConfiguration(f"shard {name!r}: {error}") from None
    topology = ShardedTopology({name: factory.topology for name, factory in factories.items()})
    return ConnectionFactory({}, {}, False, topology, factories)


def _name_nodes(factory: ConnectionFactory, shard: str) -> ConnectionFactory:
    """The factory with servers that know the name of their deployment."""
    if isinstance(factory.topology, Cluster | Sentinel):
        factory.topology.name_nodes(shard)
        return factory
    options = factory.options
    node = Node(options.get("host", "localhost"), int(options.get("port", 6379)), shard=shard)
    return factory._replace(topology=Topology(node))


def _from_one(url: Any, *, asynchronous: bool) -> ConnectionFactory:
    if not isinstance(url, str):
        return _from_client(url, asynchronous=asynchronous)
    factory = _from_url(url)
    try:  # report options that redis-py refuses now, and not with the first request
        factory.connection(None, asynchronous=False)
    except (redis.RedisError, TypeError, ValueError) as error:
        raise InvalidConfiguration(f"cannot read the Redis URL: {error}") from None
    return factory


def _from_url(url: str) -> ConnectionFactory:
    scheme, _, rest = url.partition("://")
    transport, _, kind = scheme.partition("+")
    if transport == "unix":
        options = _parse_options(url)
        if not options.get("path"):
            raise InvalidConfiguration("a unix URL needs the path of the socket: unix:///path/to/redis.sock")
        return ConnectionFactory(options, {}, False, Topology())
    # The standard library cannot parse a list of hosts: it gets the first, the others are seeds.
    authority, tail = _AUTHORITY.fullmatch(rest).groups()  # type: ignore[union-attr] # matches any text
    credentials, at, hosts = authority.rpartition("@")
    if "," in hosts and not all(hosts.split(",")):
        raise InvalidConfiguration(f"a host is missing in {hosts!r}: write host:6379,host:6380")
    nodes = [_node(host, kind) for host in hosts.split(",")]
    path, question, query = tail.partition("?")
    service, _, database = unquote(path.strip("/")).rpartition("/") if kind == "sentinel" else ("", "", path.strip("/"))
    if kind == "sentinel" and not service:
        service, database = database, ""
    if kind == "sentinel" and not service:
        raise InvalidConfiguration(
            "a Sentinel URL ends with the name of its primary: redis+sentinel://host:26379/NAME, or /NAME/DB"
        )
    if database and not _DIGITS.fullmatch(database):
        raise InvalidConfiguration(f"{database!r} is not a database: give its number, like redis://host:6379/0")
    host = f"[{nodes[0].host}]" if ":" in nodes[0].host else nodes[0].host
    options = _parse_options(f"{transport}://{credentials}{at}{host}:{nodes[0].port}/{database}{question}{query}")
    tls = transport == "rediss"
    if kind == "sentinel":
        return ConnectionFactory(options, _sentinel_options(query, options), tls, Sentinel(nodes, service))
    if kind == "cluster":
        if options.get("db"):
            raise InvalidConfiguration(f"a Redis Cluster has only database 0, not {options['db']}")
        return ConnectionFactory(options, {}, tls, Cluster(nodes))
    if len(nodes) > 1:
        raise InvalidConfiguration("several hosts in one URL: use redis+cluster:// or redis+sentinel://")
    return ConnectionFactory(options, {}, tls, Topology())


def _node(text: str, kind: str) -> Node:
    parts = urlsplit(f"//{text}")
    try:
        port = parts.port
        (parts.hostname or "localhost").encode("idna")
    except ValueError:  # UnicodeError included
        raise InvalidConfiguration(f"{text!r} is not a host and port: write host:6379") from None
    default, role = (26379, "sentinel") if kind == "sentinel" else (6379, "server")
    return Node(parts.hostname or "localhost", default if port is None else port, role)


def _parse_options(url: str) -> dict[str, Any]:
    try:
        parsed: dict[str, Any] = dict(redis.connection.parse_url(url))  # type: ignore[no-untyped-call] # redis-py has none
    except ValueError as error:
        raise InvalidConfiguration(f"cannot read the Redis URL: {error}") from None
    if "db" in parsed and not isinstance(parsed["db"], int):
        raise InvalidConfiguration(f"{parsed['db']!r} is not a database: give its number, like redis://host:6379/0")
    known = _handshake(parsed)
    ours = {"connection_class", "sentinel_username", "sentinel_password"}
    unknown = sorted(set(parsed) - set(known) - ours)
    if unknown:
        remedy = _REMEDIES.get(unknown[0], f"known are {', '.join(_HANDSHAKE)}")
        raise InvalidConfiguration(f"unknown option {unknown[0]!r} in the Redis URL; {remedy}")
    return known


def _sentinel_options(query: str, options: dict[str, Any]) -> dict[str, Any]:
    """The options of the sentinels: they have credentials of their own, but the same TLS."""
    given = parse_qs(query)
    names = [name for name in ("username", "password") if f"sentinel_{name}" in given]
    return {name: value for name, value in options.items() if name.startswith("ssl_")} | {
        name: given[f"sentinel_{name}"][0] for name in names
    }


def _from_client(client: Any, *, asynchronous: bool) -> ConnectionFactory:
    plain, cluster = (
        (redis.asyncio.Redis, redis.asyncio.RedisCluster) if asynchronous else (redis.Redis, redis.RedisCluster)
    )
    wanted = "redis.asyncio.Redis or RedisCluster" if asynchronous else "redis.Redis or RedisCluster"
    if isinstance(client, cluster):
        options = client.get_connection_kwargs()
        seeds = [Node(node.host, int(node.port)) for node in client.nodes_manager.startup_nodes.values()]
        tls = _is_tls(options.get("connection_class")) or bool(options.get("ssl"))
        return ConnectionFactory(_handshake(options), {}, tls, Cluster(seeds))
    if not isinstance(client, plain):
        raise InvalidConfiguration(f"{client!r} is neither a URL nor a {wanted} client")
    pool: Any = client.connection_pool
    options, tls = _handshake(pool.connection_kwargs), _is_tls(pool.connection_class)
    manager = getattr(pool, "sentinel_manager", None)
    if manager is None:
        return ConnectionFactory(options, {}, tls, Topology())
    kwargs = [sentinel.connection_pool.connection_kwargs for sentinel in manager.sentinels]
    sentinels = [Node(one["host"], int(one["port"]), "sentinel") for one in kwargs]
    return ConnectionFactory(options, _handshake(kwargs[0]), tls, Sentinel(sentinels, pool.service_name))


def _handshake(options: dict[str, Any]) -> dict[str, Any]:
    return {name: options[name] for name in _HANDSHAKE if options.get(name) is not None}


def _is_tls(connection_class: Any) -> bool:
    return isinstance(connection_class, type) and issubclass(
        connection_class, redis.connection.SSLConnection | redis.asyncio.connection.SSLConnection
    )
