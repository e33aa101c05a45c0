"""Runs the admin server, in the foreground or in a thread."""

from __future__ import annotations

import ipaddress
import logging
import socket
import ssl
import threading
import time
from collections import Counter
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.protocols.utils import get_remote_addr

from headgate.control.admin.app import create_app
from headgate.control.admin.middleware import LOOPBACK, VERIFIED, access_policy
from headgate.errors import InvalidConfiguration
from headgate.policy.addresses import Addresses

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable, Sequence
    from os import PathLike
    from typing import Self

    from headgate.control.admin.tokens import Token, Tokens
    from headgate.control.service.service import AdminService

__all__ = ["AdminServer"]

logger = logging.getLogger("headgate")

errors_only = logging.getLogger("uvicorn.error.headgate")
"""Without warnings, which any client can cause with invalid requests."""
errors_only.setLevel(logging.ERROR)

START_TIMEOUT_S: Final = 10.0
STOP_TIMEOUT_S: Final = 5.0
HEADERS_TIMEOUT_S: Final = 10.0
"""Time for the headers of a request to arrive."""
HANDSHAKE_TIMEOUT_S: Final = 10.0
MAX_CONNECTIONS: Final = 500
MAX_CONNECTIONS_PER_ADDRESS: Final = 100
"""Beyond these, a new connection replaces an idle one."""


class AdminServer:
    """The admin server.

    It listens on loopback by default. On any other address it requires a certificate (`cert` and `key`), or
    `behind_tls` if a proxy terminates TLS: tokens must not be sent unencrypted. `names` are the host names of the
    server besides `host` and the loopback names. `proxies` are the networks whose X-Forwarded-For is trusted; the limit
    of connections per address does not apply to them.
    """

    def __init__(
        self,
        service: AdminService,
        tokens: Tokens,
        *,
        host: str = "127.0.0.1",
        port: int = 8001,
        cert: str | PathLike[str] | None = None,
        key: str | PathLike[str] | None = None,
        behind_tls: bool = False,
        names: Sequence[str] = (),
        proxies: Sequence[str] = (),
        pages: bool = True,
        watchers: Sequence[Any] = (),
    ) -> None:
        """`port` 0 chooses a free one. `watchers`, such as an `AnomalyDetector`, start and stop with the server."""
        if (cert is None) != (key is None):
            raise InvalidConfiguration("a certificate and its key belong together; give both, or neither")
        if not (_is_loopback(host) or cert is not None or behind_tls):
            raise InvalidConfiguration(
                f"on {host} tokens would be sent unencrypted; give --cert and --key, or --behind-tls if a proxy "
                "terminates TLS, or listen on 127.0.0.1"
            )
        context = None if cert is None or key is None else _tls_context(cert, key)
        self._is_tls = context is not None
        self._host = host
        self._tokens = tokens
        self._watchers = watchers
        self._names = names
        self._socket = _bind(host, port)
        self.port: int = self._socket.getsockname()[1]
        # Without --name, the names under which a proxy forwards requests are unknown.
        hosts = None if not (_is_loopback(host) or names) else {*LOOPBACK, _url_host(host), *names}
        app = create_app(service, tokens, pages=pages, secure=self._is_tls or behind_tls, hosts=hosts, proxies=proxies)
        # Behind a proxy that is not listed, all connections come from one address.
        per_address = None if behind_tls and not proxies else MAX_CONNECTIONS_PER_ADDRESS
        registry = _Connections(proxies, most=MAX_CONNECTIONS, per_address=per_address)
        protocol: Any = partial(_Connection, registry, context)
        self._server = uvicorn.Server(
            uvicorn.Config(
                app,
                log_config=None,
                access_log=False,  # URLs contain names of clients; changes are in the audit log
                proxy_headers=False,  # `proxies` decides which are trusted
                server_header=False,
                timeout_graceful_shutdown=int(STOP_TIMEOUT_S),
                timeout_keep_alive=20,
                loop="asyncio",  # uvloop cannot pause a transport before its first byte, as TLS needs it
                http=protocol,
                h11_max_incomplete_event_size=64 * 1024,
                ws="none",
            )
        )
        self._thread: threading.Thread | None = None

    @property
    def url(self) -> str:
        """The URL of the server by its first name, or on this machine."""
        own_name = "localhost" if self._host in ("0.0.0.0", "::") else _url_host(self._host)
        host = self._names[0] if self._names else own_name
        return f"{'https' if self._is_tls else 'http'}://{host}:{self.port}"

    def link(self, token: Token) -> str:
        """A link that signs a person in with this token, once, within ten minutes."""
        return f"{self.url}/enter?code={self._tokens.create_code(token)}"

    def run(self) -> None:
        """Serve in the foreground until a signal ends the process."""
        self._start_watchers()
        try:
            self._server.run([self._socket])
        finally:
            self._clean_up()

    def start(self) -> Self:
        """Serve in a thread; return when the server accepts requests."""
        self._start_watchers()
        target = partial(self._server.run, [self._socket])
        self._thread = threading.Thread(target=target, name="headgate-admin", daemon=True)
        self._thread.start()
        deadline = time.monotonic() + START_TIMEOUT_S
        while not self._server.started:
            if time.monotonic() > deadline or not self._thread.is_alive():
                self.stop()
                raise InvalidConfiguration(f"the admin server did not start on {self._host}:{self.port}; see the log")
            time.sleep(0.01)
        return self

    def stop(self) -> None:
        """Finish requests in progress, and stop."""
        self._server.should_exit = True
        if self._thread is not None:
            self._thread.join(STOP_TIMEOUT_S + 1)
            self._thread = None
            self._clean_up()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _start_watchers(self) -> None:
        for watcher in self._watchers:
            watcher.start()

    def _clean_up(self) -> None:
        self._socket.close()
        for watcher in self._watchers:
            watcher.stop()


class _Connection(H11Protocol):
    """A connection that counts from before its TLS handshake, and is closed if no request arrives in time."""

    _timeout: asyncio.TimerHandle | None = None
    _handshake: asyncio.Task[Any] | None = None
    _is_ready = False
    _early_data = b""

    def __init__(self, registry: _Connections, tls: ssl.SSLContext | None, **options: Any) -> None:
        super().__init__(**options)
        self._registry = registry
        self._tls = tls
        self.logger = errors_only

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override] # as in uvicorn
        self.transport, self.client = transport, get_remote_addr(transport)
        if not self._registry.add(self):
            transport.abort()
        elif self._tls is None:
            self._accept_requests(transport)
        else:
            # Not by the event loop's server, which would not count the connection before the handshake is done.
            transport.pause_reading()
            options: Any = {"server_side": True, "ssl_handshake_timeout": HANDSHAKE_TIMEOUT_S}
            self._handshake = self.loop.create_task(self.loop.start_tls(transport, self, self._tls, **options))
            self._handshake.add_done_callback(self._on_handshake)

    def _on_handshake(self, handshake: asyncio.Task[asyncio.Transport | None]) -> None:
        self._handshake = None
        has_failed = handshake.cancelled() or handshake.exception() is not None
        if has_failed or self.transport.is_closing() or (encrypted := handshake.result()) is None:
            self._registry.discard(self)
            self.transport.abort()
        else:
            self._accept_requests(encrypted)

    def _accept_requests(self, transport: Any) -> None:
        """Accept requests, starting with data that arrived during the handshake."""
        super().connection_made(transport)
        self._is_ready = True
        early, self._early_data = self._early_data, b""
        if early:
            super().data_received(early)
        self._update_timeout()

    def data_received(self, data: bytes) -> None:
        if not self._is_ready:  # it arrived with the end of the handshake
            self._early_data += data
            return
        super().data_received(data)
        self._update_timeout()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._registry.discard(self)
        self._update_timeout(is_closed=True)

    @property
    def is_verified(self) -> bool:
        """True if the last request had a valid token or session."""
        scope: Any = self.scope
        return scope is not None and bool(scope.get(VERIFIED))

    @property
    def is_idle(self) -> bool:
        """True if no request is being answered."""
        return self.cycle is None or self.cycle.response_complete

    @property
    def is_incomplete(self) -> bool:
        """True if the client has yet to send a request, or the rest of one."""
        return self.is_idle or self.cycle.more_body

    def _update_timeout(self, *, is_closed: bool = False) -> None:
        if is_closed or self.conn.their_state is not h11.IDLE:
            if self._timeout is not None:
                self._timeout.cancel()
                self._timeout = None
        elif self._timeout is None:  # not restarted by each byte of the headers
            self._timeout = self.loop.call_later(HEADERS_TIMEOUT_S, self.transport.close)


class _Connections:
    """The open connections of a server. When there are too many, incomplete requests without valid credentials are
    closed first, then idle connections; requests in progress are never interrupted."""

    def __init__(self, proxies: Sequence[str], *, most: int, per_address: int | None) -> None:
        self._addresses = Addresses(access_policy(proxies).identity)
        self._proxies = [ipaddress.ip_network(each, strict=False) for each in proxies]
        self._most = most
        self._per_address = per_address
        self._open: dict[_Connection, str] = {}
        """Connections with their addresses, oldest first."""
        self._counts: Counter[str] = Counter()

    def add(self, connection: _Connection) -> bool:
        """Add a connection, replacing another one if necessary. Return False if there is no room."""
        peer = connection.client[0] if connection.client else None
        address = self._addresses.identity(self._addresses.client(peer))
        is_capped = self._per_address is not None and not self._is_proxy(peer)
        if is_capped and self._counts[address] >= (self._per_address or 0):
            has_room = self._evict(lambda other: self._open[other] == address)
        else:
            has_room = len(self._open) < self._most or self._evict(lambda _: True)
        if has_room:
            self._open[connection] = address
            self._counts[address] += 1
        return has_room

    def discard(self, connection: _Connection) -> None:
        address = self._open.pop(connection, None)
        if address is not None:
            self._counts[address] -= 1
            if not self._counts[address]:
                del self._counts[address]

    def _evict(self, is_candidate: Callable[[_Connection], bool]) -> bool:
        """Close the least important candidate. Return False if all of them have requests in progress."""
        candidates = [each for each in self._open if is_candidate(each)]
        incomplete = [each for each in candidates if each.is_incomplete and not each.is_verified]
        for found in incomplete or [each for each in candidates if each.is_idle]:
            self.discard(found)
            found.transport.abort()
            return True
        return False

    def _is_proxy(self, peer: str | None) -> bool:
        try:
            address = ipaddress.ip_address(peer or "")
        except ValueError:
            return False
        mapped = getattr(address, "ipv4_mapped", None)
        return any((mapped or address) in network for network in self._proxies)


def _tls_context(cert: str | PathLike[str], key: str | PathLike[str]) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(cert, key)
    except OSError as error:  # ssl.SSLError is one, too
        raise InvalidConfiguration(
            f"cannot read the certificate {cert} with the key {key}: {error.strerror or error}"
        ) from None
    return context


def _bind(host: str, port: int) -> socket.socket:
    """Bind the port now, so that a port in use is reported before anything starts."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        found = socket.socket(family)
        try:
            found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            found.bind(address)
        except BaseException:
            found.close()
            raise
    except OSError as error:
        why = error.strerror or str(error)
        raise InvalidConfiguration(f"cannot listen on {host} port {port}: {why}; choose another --port") from None
    return found


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _url_host(host: str) -> str:
    return f"[{host}]" if ":" in host else host
