"""Finds the addresses of the config store's hosts in bounded time: a resolver that hangs would keep everybody waiting,
as neither the system nor the driver puts an end to that."""

from __future__ import annotations

import os
import socket
import threading
import time
from ipaddress import ip_address
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["BoundedResolver", "Unresolved"]

DEFAULT_PORT: Final = "5432"
SOCKETS: Final = ("/", "@")
"""How a host begins that is a socket of this machine."""


class Unresolved(Exception):
    """No host has an address."""


class BoundedResolver:
    """Resolves names, each in a thread that may be left behind; who asks meanwhile waits for the same one."""

    # Without a lock, which a fork could leave taken for ever: at worst two ask where one would do.

    def __init__(self) -> None:
        self._asked: dict[tuple[str, str], _Lookup] = {}

    def found(self, options: Mapping[str, Any], seconds: float) -> dict[str, Any]:
        """The options of a connection, with an address for each host that is a name, or several.

        TimeoutError if the resolver says nothing for so long; Unresolved if it knows none of the names.
        """
        given = str(options.get("host") or os.environ.get("PGHOST") or "")
        is_resolved = options.get("hostaddr") or os.environ.get("PGHOSTADDR")
        hosts = given.split(",")
        ports = str(options.get("port") or os.environ.get("PGPORT") or "").split(",")
        if is_resolved or not any(map(_is_name, hosts)) or len(ports) not in (1, len(hosts)):
            return dict(options)
        end = time.monotonic() + seconds
        pairs = list(zip(hosts, ports * len(hosts) if len(ports) == 1 else ports, strict=True))
        asked = {pair: self._ask(*pair) for pair in pairs if _is_name(pair[0])}  # all of them at once
        ways: list[tuple[str, str, str]] = []
        for host, port in pairs:
            if _is_name(host):
                asked[host, port].thread.join(max(0.0, end - time.monotonic()))
                ways += [(host, address, port) for address in asked[host, port].addresses]
            else:
                ways.append((host, "" if host.startswith(SOCKETS) else host, port))
        if not ways:
            failures = [each.failure for each in asked.values()]
            if None in failures:
                raise TimeoutError
            raise Unresolved(f"failed to resolve host {given!r}: {failures[-1]}")
        names, addresses, numbers = (",".join(each) for each in zip(*ways, strict=True))
        return {**options, "host": names, "hostaddr": addresses, **({"port": numbers} if any(ports) else {})}

    def _ask(self, host: str, port: str) -> _Lookup:
        asked = self._asked.get((host, port))
        if asked is None or not asked.thread.is_alive():  # what was said before may be true no more
            asked = self._asked[host, port] = _Lookup(host, port)
        return asked


class _Lookup:
    """A name whose addresses somebody is asked for."""

    def __init__(self, host: str, port: str) -> None:
        self.addresses: list[str] = []
        self.failure: OSError | None = None
        self.name = host, port
        self.thread = threading.Thread(target=self._ask, name=f"headgate-resolve {host}", daemon=True)
        self.thread.start()

    def _ask(self) -> None:
        host, port = self.name
        try:
            found = socket.getaddrinfo(host, port or DEFAULT_PORT, proto=socket.IPPROTO_TCP, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError) as error:  # a name that cannot be one is a UnicodeError
            self.failure = error if isinstance(error, OSError) else OSError(str(error))
        else:
            self.addresses = [str(each[4][0]) for each in found]


def _is_name(host: str) -> bool:
    if not host or host.startswith(SOCKETS):
        return False
    try:
        ip_address(host)
    except ValueError:
        return True
    return False
