"""What a fault is done to: servers, a proxy where there is one, and the address that each node is given."""

from __future__ import annotations

import multiprocessing
import shutil
import time
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from chaos import proxy
from chaos.load import LIMITS, MODES, Kind, namespace_of
from chaos.proxy import FAIR, HOST, Order, Traffic, Weather
from support.servers import RedisCluster, RedisServer, SentinelSet, ServerError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

NODES: Final = 2
_spawning = multiprocessing.get_context("spawn")


@dataclass
class Rig:
    """Servers that are up, and how the nodes reach them."""

    urls: tuple[str, ...]
    """For each node."""
    store_url: str
    """The URL of the store without a proxy, to read the true counts."""
    server: Any = None
    cluster: Any = None
    sentinels: Any = None
    proxy: Any = None
    clock: Any = None
    namespace: str = ""
    lost: list[tuple[int, int]] = field(default_factory=list)
    """From when to when counts may have been lost: with the server's memory, or because a replica lagged behind."""

    def mark_lost_since(self, start_ns: int) -> None:
        self.lost.append((start_ns, time.monotonic_ns()))


@contextmanager
def alone(*extra: str) -> Iterator[Rig]:
    """One server, and all nodes at it."""
    with RedisServer(extra=extra) as server:
        yield Rig((server.url,) * NODES, server.url, server=server)


@contextmanager
def behind_proxy() -> Iterator[Rig]:
    """One server, with a proxy before it that has a door for each node."""
    with RedisServer() as server, Proxy(server.port, NODES) as between:
        yield Rig(between.urls, server.url, server=server, proxy=between)


@contextmanager
def clustered() -> Iterator[Rig]:
    """Three primaries with a replica each, all of them named in the URL: any may be the one that dies."""
    with RedisCluster() as cluster:
        url = f"redis+cluster://{','.join(f'{HOST}:{node.port}' for node in cluster.nodes)}"
        yield Rig((url,) * NODES, url, cluster=cluster)


@contextmanager
def watched() -> Iterator[Rig]:
    """A primary and two replicas, found through three sentinels."""
    with SentinelSet() as sentinels:
        yield Rig((sentinels.urls,) * NODES, sentinels.urls, sentinels=sentinels)


@contextmanager
def with_a_clock() -> Iterator[Rig]:
    """One Valkey whose clock can be set."""
    with _Misled() as server:
        yield Rig((server.url,) * NODES, server.url, server=server, clock=server.step)


def stored_wide_key(rig: Rig) -> str:
    """The name under which the first wide key of the first mode is stored."""
    key = LIMITS[Kind.WIDE].by("0")
    return f"{namespace_of(rig.namespace, MODES[0])}:{key.limit.space}:{key.identity}"


class Proxy:
    """The process of `chaos.proxy`, and how to tell it what to do."""

    def __init__(self, server_port: int, doors: int) -> None:
        self._start(proxy.serve, server_port, doors)

    def _start(self, serve: Callable[..., None], *args: Any) -> None:
        self._line, far = _spawning.Pipe()
        self._process = _spawning.Process(target=serve, args=(far, *args), daemon=True)
        self._process.start()
        far.close()
        self.urls = tuple(f"redis://{HOST}:{port}/0" for port in self._line.recv())

    def turn(self, weather: Weather, door: int | None = None) -> None:
        self._tell(Order("weather", door, weather))

    def clear(self, door: int | None = None) -> None:
        self.turn(FAIR, door)

    def hang_up(self) -> None:
        """Reset all connections; new ones are welcome."""
        self._tell(Order("hang up"))

    def traffic(self) -> list[Traffic]:
        traffic: list[Traffic] = self._tell(Order("traffic"))
        return traffic

    def __enter__(self) -> Proxy:
        return self

    def __exit__(self, *_: object) -> None:
        self._line.close()
        self._process.join(5)
        if self._process.is_alive():
            self._process.kill()

    def _tell(self, order: Order) -> Any:
        self._line.send(order)
        return self._line.recv()


class Links(Proxy):
    """A proxy with a door in front of each of several servers."""

    def __init__(self, server_ports: Sequence[int]) -> None:
        self._start(proxy.serve_links, server_ports)


class SkewedServer(RedisServer):
    """A Valkey whose clock is off by a constant."""

    def __init__(self, skew_s: float) -> None:
        super().__init__("valkey")
        self.skew_s = skew_s

    def _command(self) -> list[str]:
        environment = [f"LD_PRELOAD={_faketime()}", f"FAKETIME={self.skew_s:+g}", "FAKETIME_DONT_FAKE_MONOTONIC=1"]
        return [shutil.which("env") or "env", *environment, *super()._command()]


class _Misled(RedisServer):
    """A server that takes its time from a file, through libfaketime. Debian's Redis does not bear that; Valkey does."""

    def __init__(self) -> None:
        super().__init__("valkey")
        self._clock = self.directory / "clock"
        self._clock.write_text("+0\n")

    def step(self, seconds: int) -> None:
        """From now on its clock is so far off the true one."""
        new = self._clock.with_suffix(".new")
        new.write_text(f"{seconds:+d}\n")
        new.replace(self._clock)

    def _command(self) -> list[str]:
        environment = [
            f"LD_PRELOAD={_faketime()}",
            f"FAKETIME_TIMESTAMP_FILE={self._clock}",
            "FAKETIME_NO_CACHE=1",
            "FAKETIME_DONT_FAKE_MONOTONIC=1",
        ]
        return [shutil.which("env") or "env", *environment, *super()._command()]


def _faketime() -> Path:
    for found in sorted(Path("/usr/lib").glob("*/faketime/libfaketime.so.1")):
        return found
    raise ServerError("libfaketime is missing: run `make chaos`, which installs it, or `apt install libfaketime`")


__all__ = [
    "NODES", "Links", "Proxy", "Rig", "SkewedServer", "alone", "behind_proxy", "clustered", "stored_wide_key",
    "watched", "with_a_clock",
]  # fmt: skip
