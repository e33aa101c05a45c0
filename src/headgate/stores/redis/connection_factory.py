"""From a URL, or a client that the user has already, to connections: addresses, credentials and TLS stay redis-py's
job.

redis-py opens a connection and does the handshake; what travels on it afterwards is ours
(docs/decisions/0003-transport.md).
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Final, NamedTuple
from urllib.parse import parse_qs, unquote, urlsplit

import redis
import redis.asyncio
import redis.asyncio.connection
import redis.backoff
import redis.retry

from headgate.errors import InvalidConfiguration
from headgate.stores.redis.encoding import Node
from headgate.stores.redis.topology import Cluster, Sentinel, Standalone

if TYPE_CHECKING:
    from headgate.stores.redis.topology import Topology

__all__ = ["ConnectionFactory", "connection_factory"]

_BUDGET: Final = "leave it out, and give the limiter budget=, the seconds that Redis may take"
_REMEDIES: Final = {
    "socket_timeout": _BUDGET,
    "socket_connect_timeout": _BUDGET,
    "timeout": _BUDGET,
    "max_connections": "leave it out: requests share one connection",
}
"""What is said elsewhere, of what people write for other clients."""

_HANDSHAKE: Final = [
    "host",
    "port",
    "path",
    "db",
    "username",
    "password",
    "credential_provider",
    "client_name",
    "encoding",
    "socket_keepalive",
    "socket_keepalive_options",
    "socket_type",
    "ssl_keyfile",
    "ssl_certfile",
    "ssl_cert_reqs",
    "ssl_ca_certs",
    "ssl_ca_data",
    "ssl_ca_path",
    "ssl_check_hostname",
    "ssl_password",
    "ssl_min_version",
    "ssl_ciphers",
    "ssl_validate_ocsp",
    "ssl_validate_ocsp_stapled",
    "ssl_ocsp_context",
    "ssl_ocsp_expected_cert",
    "ssl_include_verify_flags",
    "ssl_exclude_verify_flags",
]
"""The options of a redis-py connection that say where to and as whom; all others are ours to set."""


LONGEST_CONNECT: Final = 1.0
"""Seconds that opening a connection may take. No request waits for that long: only the connection is given up then."""

_AUTHORITY: Final = re.compile(r"([^/?]*)(.*)", re.DOTALL)
_DIGITS: Final = re.compile(r"[0-9]{1,5}")


class ConnectionFactory(NamedTuple):
    """What is needed to open connections: to the server of the URL, or to any node of its topology."""

    options: dict[str, Any]
    sentinel_options: dict[str, Any]
    tls: bool
    topology: Topology

    def connection(self, node: Node | None, *, asynchronous: bool, timeout: float = LONGEST_CONNECT) -> Any:
        """A redis-py connection, not yet connected."""
        options = dict(self.options)
        if node is not None:
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


def connection_factory(where: Any, *, asynchronous: bool) -> ConnectionFactory:
    """The place that a URL or a client names."""
    return _place_of_url(where) if isinstance(where, str) else _place_of_client(where, asynchronous=asynchronous)


def _place_of_url(url: str) -> ConnectionFactory:
    scheme, _, rest = url.partition("://")
    transport, _, kind = scheme.partition("+")
    if transport == "unix":
        options = _options_of_url(url)
        if not options.get("path"):
            raise InvalidConfiguration("a unix URL names the socket's file: unix:///path/to/redis.sock")
        return _tried(ConnectionFactory(options, {}, False, Standalone()))
    # A comma list of hosts is no URL to the standard library: the first host stands for it, the others are seeds.
    authority, tail = _AUTHORITY.fullmatch(rest).groups()  # type: ignore[union-attr] # it matches any text
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
        raise InvalidConfiguration(f"{database!r} is no database: give its number, like redis://host:6379/0")
    host = f"[{nodes[0].host}]" if ":" in nodes[0].host else nodes[0].host
    options = _options_of_url(f"{transport}://{credentials}{at}{host}:{nodes[0].port}/{database}{question}{query}")
    tls = transport == "rediss"
    if kind == "sentinel":
        return _tried(ConnectionFactory(options, _sentinel_options(query, options), tls, Sentinel(nodes, service)))
    if kind == "cluster":
        if options.get("db"):
            raise InvalidConfiguration(f"a Redis Cluster has only database 0, not {options['db']}")
        return _tried(ConnectionFactory(options, {}, tls, Cluster(nodes)))
    if len(nodes) > 1:
        raise InvalidConfiguration("several hosts in one URL: use redis+cluster:// or redis+sentinel://")
    return _tried(ConnectionFactory(options, {}, tls, Standalone()))


def _tried(place: ConnectionFactory) -> ConnectionFactory:
    """The place, once redis-py has taken its options: what it refuses is better known now than at the first request."""
    try:
        place.connection(None, asynchronous=False)
    except (redis.RedisError, TypeError, ValueError) as error:
        raise InvalidConfiguration(f"cannot read the Redis URL: {error}") from None
    return place


def _node(text: str, kind: str) -> Node:
    parts = urlsplit(f"//{text}")
    try:
        port = parts.port
    except ValueError:
        raise InvalidConfiguration(f"{text!r} is no host and port: write host:6379") from None
    try:
        (parts.hostname or "localhost").encode("idna")
    except UnicodeError:
        raise InvalidConfiguration(f"{text!r} is no host and port: write host:6379") from None
    default, role = (26379, "sentinel") if kind == "sentinel" else (6379, "server")
    return Node(parts.hostname or "localhost", default if port is None else port, role)


def _options_of_url(url: str) -> dict[str, Any]:
    try:
        parsed: dict[str, Any] = dict(redis.connection.parse_url(url))  # type: ignore[no-untyped-call] # redis-py has none
    except ValueError as error:
        raise InvalidConfiguration(f"cannot read the Redis URL: {error}") from None
    if "db" in parsed and not isinstance(parsed["db"], int):
        raise InvalidConfiguration(f"{parsed['db']!r} is no database: give its number, like redis://host:6379/0")
    known = _handshake(parsed)
    ours = {"connection_class", "sentinel_username", "sentinel_password"}
    unknown = sorted(set(parsed) - set(known) - ours)
    if unknown:
        remedy = _REMEDIES.get(unknown[0], f"known are {', '.join(_HANDSHAKE)}")
        raise InvalidConfiguration(f"unknown option {unknown[0]!r} in the Redis URL; {remedy}")
    return known


def _sentinel_options(query: str, options: dict[str, Any]) -> dict[str, Any]:
    """The sentinels' own credentials, which are seldom those of the servers; TLS is the same for both."""
    asked = {name: values[0] for name, values in parse_qs(query).items()}
    made = {name: value for name, value in options.items() if name.startswith("ssl_")}
    for name in ("username", "password"):
        if f"sentinel_{name}" in asked:
            made[name] = asked[f"sentinel_{name}"]
    return made


def _place_of_client(client: Any, *, asynchronous: bool) -> ConnectionFactory:
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
        return ConnectionFactory(options, {}, tls, Standalone())
    kwargs = [sentinel.connection_pool.connection_kwargs for sentinel in manager.sentinels]
    sentinels = [Node(one["host"], int(one["port"]), "sentinel") for one in kwargs]
    return ConnectionFactory(options, _handshake(kwargs[0]), tls, Sentinel(sentinels, pool.service_name))


def _handshake(options: dict[str, Any]) -> dict[str, Any]:
    return {name: options[name] for name in _HANDSHAKE if options.get(name) is not None}


def _is_tls(connection_class: Any) -> bool:
    return isinstance(connection_class, type) and issubclass(
        connection_class, redis.connection.SSLConnection | redis.asyncio.connection.SSLConnection
    )
