"""The faults. Each is a generator: it strikes, yields for as long as the fault lasts, and heals."""

from __future__ import annotations

import threading
import time
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import redis

from chaos.proxy import Weather
from chaos.rigs import alone, behind_proxy, clustered, stored_wide_key, watched, with_a_clock
from support.servers import wait_until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager

    from chaos.rigs import Rig
    from support.servers import RedisServer


SECONDS_FOR_A_BYTE: Final = 6e-6
"""What a store takes that is slow enough to be overrun: a check is about two hundred of them."""


class Fault(NamedTuple):
    """Something that goes wrong with the store, or on the way to it."""

    name: str
    what: str
    """In words, for the report."""
    rig: Callable[[], AbstractContextManager[Rig]]
    strike: Callable[[Rig], Iterator[None]]
    lasts: float = 1.5
    """Seconds for which it is held once it is there."""
    cut_off: tuple[int, ...] = ()
    """Nodes that cannot reach the store while it lasts: no answer of theirs can be exact then."""
    clock_steps: bool = False
    """Whether the store's clock jumps, so that it may refill what time alone would not have."""
    retries: int = 0
    """How often clients ask again, at once, when they were not let in."""
    is_spike: bool = False
    """Whether it is the burst itself that does the harm: it begins with the fault, and ends it."""


def refused(rig: Rig) -> Iterator[None]:
    start_ns = time.monotonic_ns()
    rig.server.kill()
    yield
    rig.server.start()
    rig.mark_lost_since(start_ns)


def stopped(rig: Rig) -> Iterator[None]:
    rig.server.pause()
    yield
    rig.server.resume()


def killed_and_restarted(rig: Rig) -> Iterator[None]:
    start_ns = time.monotonic_ns()
    rig.server.restart()
    rig.mark_lost_since(start_ns)
    yield


def shut_down_and_restarted(rig: Rig) -> Iterator[None]:
    start_ns = time.monotonic_ns()
    with rig.server.client() as client, suppress(redis.ConnectionError):
        client.shutdown(nosave=True)
    time.sleep(0.3)
    rig.server.restart()
    rig.mark_lost_since(start_ns)
    yield


def weather(kind: Any, amount: float = 0.0, *, door: int | None = None) -> Callable[[Rig], Iterator[None]]:
    def strike(rig: Rig) -> Iterator[None]:
        rig.proxy.turn(Weather(kind, amount), door)
        yield
        rig.proxy.clear(door)

    return strike


def crowded(rig: Rig) -> Iterator[None]:
    """The store bears three times the steady load, before, in and after a burst of ten times and more."""
    rig.proxy.turn(Weather("crowded", SECONDS_FOR_A_BYTE))
    yield


def dropped(rig: Rig) -> Iterator[None]:
    with _over_and_over(rig.proxy.hang_up, every=0.2):
        yield


def scripts_flushed(rig: Rig) -> Iterator[None]:
    with rig.server.client() as client, _over_and_over(client.script_flush, every=0.05):
        yield


def out_of_memory(rig: Rig) -> Iterator[None]:
    with rig.server.client() as client:
        client.config_set("maxmemory-policy", "noeviction")
        client.config_set("maxmemory", 1)
        yield
        client.config_set("maxmemory", 0)


def clock_stepped(seconds: int) -> Callable[[Rig], Iterator[None]]:
    def strike(rig: Rig) -> Iterator[None]:
        rig.clock(seconds)
        yield
        rig.clock(0)

    return strike


def shard_failed_over(rig: Rig) -> Iterator[None]:
    """A primary of the cluster dies, and its replica takes over."""
    key = stored_wide_key(rig)
    gone = rig.cluster.primary_for(key)
    start_ns = time.monotonic_ns()
    gone.kill()
    yield
    wait_until(lambda: _or_none(lambda: rig.cluster.primary_for(key)) not in (None, gone), "a replica to take over")
    wait_until(lambda: _leads(rig.cluster.primary_for(key)), "the new primary to serve")
    rig.mark_lost_since(start_ns)


def primary_failed_over(rig: Rig) -> Iterator[None]:
    """The primary dies, and the sentinels promote another."""
    gone = rig.sentinels.primary()
    start_ns = time.monotonic_ns()
    gone.kill()
    yield
    _await_promotion(rig, gone)
    rig.mark_lost_since(start_ns)


def brain_split(rig: Rig) -> Iterator[None]:
    """The primary stands still, the sentinels promote another, and the old one comes back believing to be it."""
    old = rig.sentinels.primary()
    start_ns = time.monotonic_ns()
    old.pause()
    yield
    _await_promotion(rig, old)
    rig.mark_lost_since(start_ns)
    old.resume()


def _await_promotion(rig: Rig, gone: RedisServer) -> None:
    wait_until(lambda: _or_none(rig.sentinels.primary) not in (None, gone), "the sentinels to promote another")
    wait_until(lambda: _leads(rig.sentinels.primary()), "the new primary to serve")


def _leads(server: RedisServer) -> bool:
    """Whether the server itself believes to be a primary: before that it refuses what changes anything."""
    with suppress(redis.RedisError), server.client() as client:
        return bool(client.execute_command("ROLE")[0] == "master")
    return False


def _or_none(ask: Callable[[], Any]) -> Any:
    with suppress(Exception):
        return ask()
    return None


@contextmanager
def _over_and_over(act: Callable[[], object], *, every: float) -> Iterator[None]:
    over = threading.Event()

    def repeat() -> None:
        while not over.wait(every):
            act()

    thread = threading.Thread(target=repeat)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


ALL: Final = (0, 1)

FAULTS: Final = (
    Fault("refused", "the server is killed, and its port refuses", alone, refused, cut_off=ALL),
    Fault("stopped", "SIGSTOP: connections stay open, without answers", alone, stopped, cut_off=ALL),
    Fault("killed", "kill -9 and started again at once, its memory lost", alone, killed_and_restarted, 0.5),
    Fault("restarted", "SHUTDOWN, started again 0.3 s later, its memory lost", alone, shut_down_and_restarted, 0.5),
    Fault("slow", "answers take 1 ms longer: within the budget", behind_proxy, weather("slow", 0.001)),
    Fault("too slow", "answers take 20 ms longer: beyond the budget", behind_proxy, weather("slow", 0.020)),
    Fault("dropped", "all connections are reset, five times a second", behind_proxy, dropped),
    Fault("half-open", "connections are taken, and nothing comes back", behind_proxy, weather("silent"), cut_off=ALL),
    Fault("dripping", "answers come byte by byte, 1 ms apart", behind_proxy, weather("dripping", 0.001)),
    Fault("partition", "one of two nodes is cut off", behind_proxy, weather("refused", door=0), cut_off=(0,)),
    Fault("script flush", "SCRIPT FLUSH, twenty times a second", alone, scripts_flushed),
    Fault("out of memory", "maxmemory is reached, with noeviction", alone, out_of_memory, cut_off=ALL),
    Fault("clock ahead", "the server's clock steps 30 s ahead, and back", with_a_clock,
          clock_stepped(30), clock_steps=True),
    Fault("clock behind", "the server's clock steps 30 s back, and ahead", with_a_clock,
          clock_stepped(-30), clock_steps=True),
    Fault("shard failover", "a primary of a cluster dies, its replica takes over", clustered, shard_failed_over, 0.2),
    Fault("sentinel failover", "the primary dies, the sentinels promote another", watched, primary_failed_over, 0.2),
    Fault("split brain", "the primary stands still, another is promoted, the old one wakes up", watched,
          brain_split, 0.2),
    Fault("cascade", "the store slows down as it is asked more, and clients retry", behind_proxy,
          crowded, 2.0, retries=2, is_spike=True),
)  # fmt: skip
