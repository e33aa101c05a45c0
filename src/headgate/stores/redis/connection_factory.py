"""A factory of redis-py connections from a URL or an existing client.

redis-py parses addresses, opens connections, and does TLS, authentication and the handshake; what is sent afterwards
is ours (docs/decisions/0003-transport.md).
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


class ConnectionFactory(NamedTuple):
    """Options of the connections to a server, or to all nodes of a topology."""

    options: dict[str, Any]
    sentinel_options: dict[str, Any]
    tls: bool
    topology: Topology

    def connection(self, node: Node | None, *, asynchronous: bool, timeout: float = CONNECT_TIMEOUT_S) -> Any:
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


def connection_factory(url: Any, *, asynchronous: bool) -> ConnectionFactory:
    """The factory for a URL, or for the servers of a redis-py client."""
    return _from_url(url) if isinstance(url, str) else _from_client(url, asynchronous=asynchronous)


def _from_url(url: str) -> ConnectionFactory:
    scheme, _, rest = url.partition("://")
    transport, _, kind = scheme.partition("+")
    if transport == "unix":
        options = _parse_options(url)
        if not options.get("path"):
            raise InvalidConfiguration("a unix URL needs the path of the socket: unix:///path/to/redis.sock")
        return _validated(ConnectionFactory(options, {}, False, Standalone()))
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
        return _validated(ConnectionFactory(options, _sentinel_options(query, options), tls, Sentinel(nodes, service)))
    if kind == "cluster":
        if options.get("db"):
            raise InvalidConfiguration(f"a Redis Cluster has only database 0, not {options['db']}")
        return _validated(ConnectionFactory(options, {}, tls, Cluster(nodes)))
    if len(nodes) > 1:
        raise InvalidConfiguration("several hosts in one URL: use redis+cluster:// or redis+sentinel://")
    return _validated(ConnectionFactory(options, {}, tls, Standalone()))


def _validated(factory: ConnectionFactory) -> ConnectionFactory:
    """Report options that redis-py refuses now, and not with the first request."""
    try:
        factory.connection(None, asynchronous=False)
    except (redis.RedisError, TypeError, ValueError) as error:
        raise InvalidConfiguration(f"cannot read the Redis URL: {error}") from None
    return factory


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
