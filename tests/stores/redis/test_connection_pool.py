"""Lines for threads: an answer that is near is watched for, one that is not is slept for, and either has its budget."""

from __future__ import annotations

import os
import socket
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest

from headgate.errors import StoreTimeout
from headgate.stores.redis import connection_pool as lines
from headgate.stores.redis.batch_protocol import ConnectionLost
from headgate.stores.redis.busy_poll import BUSY_POLL_S, MAX_MISSES, PAUSE_REPLIES
from headgate.stores.redis.connection_pool import SyncConnection

if TYPE_CHECKING:
    from collections.abc import Iterator

BUDGET = 5.0
LATE = 200 * BUSY_POLL_S


class Ends:
    """A line, and the other end of its connection."""

    def __init__(self, kind: type[socket.socket] = socket.socket, **options: Any) -> None:
        ours, self.server = socket.socketpair()
        self._sock = kind(fileno=ours.detach())
        self.line = SyncConnection(self, BUDGET, **options)
        self.looks = 0

    def put(self) -> None:
        """Put the question, and nothing more."""
        self.line.send(b"?")
        self.server.recv(1)

    def ask(self, *, after: float = 0) -> Any:
        """What is received when the answer is sent so many seconds after the question."""
        self.put()
        if after:
            threading.Timer(after, self.server.send, [b":7\r\n"]).start()
        else:
            self.server.send(b":7\r\n")
        return self.line.receive(time.monotonic() + BUDGET)

    def disconnect(self) -> None:
        self._sock.close()


@pytest.fixture
def ends(monkeypatch: pytest.MonkeyPatch) -> Iterator[Ends]:
    ends = Ends(can_busy_poll=True)
    read = os.readv

    def counted(*args: Any) -> int:
        ends.looks += 1
        return read(*args)

    monkeypatch.setattr(os, "readv", counted)
    with ends.server:
        yield ends
        ends.line.close()


def test_answer_that_is_there_is_seen_at_the_first_look(ends: Ends) -> None:
    assert [ends.ask() for _ in range(3)] == [7, 7, 7]
    assert ends.looks == 3


def test_few_fruitless_polls_suspend_polling(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lines, "BUSY_POLL_S", 0.01)  # long enough for two looks on a busy machine
    for late in (LATE, 0, *[LATE] * MAX_MISSES):  # one that came at once begins the count anew
        ends.looks = 0
        assert ends.ask(after=late) == 7
        assert ends.looks > (late > 0)
    ends.looks = 0
    assert [ends.ask() for _ in range(PAUSE_REPLIES)] == [7] * PAUSE_REPLIES
    assert ends.looks == 0
    assert ends.ask() == 7
    assert ends.looks == 1


def test_to_watch_takes_no_longer_than_the_deadline(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lines, "BUSY_POLL_S", 60.0)
    ends.line.set_budget(0.01)
    ends.put()
    with pytest.raises(StoreTimeout, match="Redis did not answer within the budget of 10 ms"):
        ends.line.receive(time.monotonic() + 0.01)


def test_server_that_goes_while_it_is_watched_is_lost(ends: Ends) -> None:
    ends.put()
    ends.server.close()
    with pytest.raises(ConnectionLost, match="closed the connection"):
        ends.line.receive(time.monotonic() + BUDGET)


class Cooperative(socket.socket):
    """As a library for green threads puts it in the place of Python's own."""


@pytest.mark.parametrize(
    "options", [{}, {"can_busy_poll": True, "kind": Cooperative}], ids=["in the background", "green"]
)
def test_busy_poll_runs_only_for_waiting_lone_threads(ends: Ends, options: Any) -> None:
    others = Ends(**options)
    with others.server:
        assert others.ask() == 7
        others.line.close()
    assert ends.looks == 0
