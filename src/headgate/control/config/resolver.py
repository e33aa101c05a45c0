"""Name resolution with a timeout, which neither the system nor the driver offers."""

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
SOCKET_PREFIXES: Final = ("/", "@")
"""Prefixes of Unix socket paths."""


class Unresolved(Exception):
    """None of the hosts has an address."""


class BoundedResolver:
    """Resolves names in daemon threads; concurrent callers share a lookup.

    Has no lock, which a fork could leave locked: at worst, a name is looked up twice.
    """

    def __init__(self) -> None:
        self._lookups: dict[tuple[str, str], _Lookup] = {}

    def resolve(self, options: Mapping[str, Any], seconds: float) -> dict[str, Any]:
        """Connection options with the addresses of all host names.

        Raises TimeoutError if resolution takes longer than `seconds`, and Unresolved if all names are unknown.
        """
        given = str(options.get("host") or os.environ.get("PGHOST") or "")
        is_resolved = options.get("hostaddr") or os.environ.get("PGHOSTADDR")
        hosts = given.split(",")
        ports = str(options.get("port") or os.environ.get("PGPORT") or "").split(",")
        if is_resolved or not any(map(_is_name, hosts)) or len(ports) not in (1, len(hosts)):
            return dict(options)
        end = time.monotonic() + seconds
        pairs = list(zip(hosts, ports * len(hosts) if len(ports) == 1 else ports, strict=True))
        lookups = {pair: self._lookup(*pair) for pair in pairs if _is_name(pair[0])}  # in parallel
        endpoints: list[tuple[str, str, str]] = []
        for host, port in pairs:
            if _is_name(host):
                lookups[host, port].thread.join(max(0.0, end - time.monotonic()))
                endpoints += [(host, address, port) for address in lookups[host, port].addresses]
            else:
                endpoints.append((host, "" if host.startswith(SOCKET_PREFIXES) else host, port))
        if not endpoints:
            failures = [each.failure for each in lookups.values()]
            if None in failures:
                raise TimeoutError
            raise Unresolved(f"failed to resolve host {given!r}: {failures[-1]}")
        names, addresses, numbers = (",".join(each) for each in zip(*endpoints, strict=True))
        return {**options, "host": names, "hostaddr": addresses, **({"port": numbers} if any(ports) else {})}

    def _lookup(self, host: str, port: str) -> _Lookup:
        lookup = self._lookups.get((host, port))
        if lookup is None or not lookup.thread.is_alive():  # earlier results may be outdated
            lookup = self._lookups[host, port] = _Lookup(host, port)
        return lookup


class _Lookup:
    """A lookup in progress or done."""

    def __init__(self, host: str, port: str) -> None:
        self.addresses: list[str] = []
        self.failure: OSError | None = None
        self.name = host, port
        self.thread = threading.Thread(target=self._run, name=f"headgate-resolve {host}", daemon=True)
        self.thread.start()

    def _run(self) -> None:
        host, port = self.name
        try:
            found = socket.getaddrinfo(host, port or DEFAULT_PORT, proto=socket.IPPROTO_TCP, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError) as error:  # UnicodeError: not a valid host name
            self.failure = error if isinstance(error, OSError) else OSError(str(error))
        else:
            self.addresses = [str(each[4][0]) for each in found]


def _is_name(host: str) -> bool:
    if not host or host.startswith(SOCKET_PREFIXES):
        return False
    try:
        ip_address(host)
    except ValueError:
        return True
    return False
