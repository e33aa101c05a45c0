"""Closing a limiter during requests, twice, and from its own event listener; and forgetting to close it."""

from __future__ import annotations

import gc
import sys
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest

from headgate import Limiter
from support.faults import key_of, open_breaker, paused, reach
from support.servers import wait_until

if TYPE_CHECKING:
    from support.servers import RedisServer

pytestmark = pytest.mark.usefixtures("nothing_is_left_open")

BUDGET = 0.05
"""Seconds: a machine that is busy with other things takes longer than a healthy one to open a connection."""


def test_close_during_requests_raises_no_error(server: RedisServer, unique: str) -> None:
    key, failed = key_of(unique), []
    for attempt in range(60):
        limiter, stopped = Limiter(server.url, on_failure="open", budget=BUDGET, lease=0), threading.Event()

        def keep_asking(limiter: Limiter = limiter, stopped: threading.Event = stopped) -> None:
            while not stopped.is_set():
                try:
                    limiter.check(key)
                except Exception as error:
                    failed.append(error)

        threads = [threading.Thread(target=keep_asking) for _ in range(3)]
        for thread in threads:
            thread.start()
        time.sleep(0.001 * (attempt % 7))
        limiter.close()
        time.sleep(0.002)
        stopped.set()
        for thread in threads:
            thread.join()
        limiter.close()
    assert not failed


def test_closed_limiter_recovers_without_a_breaker(server: RedisServer, unique: str) -> None:
    limiter, key = Limiter(server.url, on_failure="open", budget=BUDGET), key_of(unique)
    reach(limiter, key)
    limiter.close()
    with paused(server):
        for _ in range(8):
            limiter.check(key)
    reach(limiter, key)
    limiter.close()


def test_event_listener_may_close_the_limiter(server: RedisServer, unique: str) -> None:
    told, key = [], key_of(unique)

    def on_event(event: Any) -> None:
        told.append(event.kind)
        if event.kind == "store-back":
            limiter.close()
            told.append("closed")

    limiter = Limiter(server.url, on_failure="open", budget=BUDGET, on_event=on_event)
    with paused(server):
        open_breaker(limiter, key)
    wait_until(lambda: "closed" in told, "the limiter to be closed")


def test_forgotten_limiter_closes_its_connections(
    server: RedisServer, unique: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    warned: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", warned.append)
    gc.collect()
    warned.clear()  # of earlier tests
    for _ in range(200):  # the order in which a cycle is finalized varies
        limiter = Limiter(server.url, budget=2)
        limiter.check(key_of(unique))
        (connection,) = next(iter(limiter.engine.store._pool._idle.values()))
        connection._connection.cycle = connection
        del limiter, connection
    with server.client() as client:

        def are_closed() -> bool:
            gc.collect()
            return len(client.client_list()) == 1

        wait_until(are_closed, "the connections to be closed")
    assert [str(each.exc_value) for each in warned] == []
