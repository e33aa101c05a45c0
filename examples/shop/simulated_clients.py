"""Simulated clients with different habits. The same seed sends the same requests.

`python -m examples.shop.simulated_clients --port 8000` runs until its standard input is closed.
"""

from __future__ import annotations

import argparse
import math
import os
import queue
import signal
import sys
import threading
import time
from contextlib import suppress
from heapq import merge
from http.client import HTTPConnection, HTTPException
from random import Random
from typing import TYPE_CHECKING, NamedTuple

from examples.shop.decision_printer import MARK
from examples.shop.tour import Ask, wait_until_ready

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = ["CLIENTS", "HABITS", "MOST_A_SECOND", "Client", "Habit", "Visit", "visits"]

MOST_A_SECOND = 60
"""Upper bound on the requests of all clients together."""

SENDERS = 8
"""Connections open at the same time."""
REQUESTS_ON_ONE = 40
"""Requests per connection; the next connection may reach another worker."""

PHONE = "Mozilla/5.0 (iPhone; CPU iPhone OS 19_0 like Mac OS X) Safari/605.1"
LAPTOP = "Mozilla/5.0 (X11; Linux x86_64; rv:151.0) Firefox/151.0"
DESKTOP = "Mozilla/5.0 (Windows NT 10.0; Win64; x64) Chrome/149.0"
PEOPLE = (PHONE, LAPTOP, DESKTOP)


class Client(NamedTuple):
    """A customer with an API key."""

    key: str
    tier: str
    label: str
    address: str


FREE = (
    Client("crowd-key-paper-boat", "free", "Paper Boat", "198.51.100.101"),
    Client("crowd-key-tin-whistle", "free", "Tin Whistle", "198.51.100.102"),
    Client("crowd-key-little-atlas", "free", "Little Atlas", "198.51.100.103"),
    Client("crowd-key-night-owl", "free", "Night Owl", "198.51.100.104"),
)
PRO = (
    Client("crowd-key-harbor-market", "pro", "Harbor Market", "198.51.100.111"),
    Client("crowd-key-green-grocer", "pro", "Green Grocer", "198.51.100.112"),
    Client("crowd-key-north-star", "pro", "North Star Books", "198.51.100.113"),
)
ENTERPRISE = (
    Client("crowd-key-globex", "enterprise", "Globex", "198.51.100.121"),
    Client("crowd-key-meridian", "enterprise", "Meridian Air", "198.51.100.122"),
)
CAFE = Client("crowd-key-corner-cafe", "free", "Corner Cafe", "198.51.100.131")
FESTIVAL = Client("crowd-key-lantern-festival", "free", "Lantern Festival", "198.51.100.132")

CLIENTS = (*FREE, *PRO, *ENTERPRISE, CAFE, FESTIVAL)
STRANGERS = tuple(f"198.51.100.{number}" for number in range(1, 41))
# Each in another network, as pages show only the networks of addresses.
SCRAPER, GUESSER, FORGE, FINDER = "192.0.2.77", "198.18.66.6", "198.18.10.1", "198.18.5.5"

POSTS = Ask("GET", "/posts")
SEARCH = Ask("GET", "/search?q=tea")
WRITE = Ask("POST", "/posts", json='{"text": "hello"}')
COMPLETE = Ask("POST", "/complete")
PAY = Ask("POST", "/pay")
EXPORT = Ask("POST", "/exports")
CREDITS = Ask("POST", "/credits")


class Habit(NamedTuple):
    """The behaviour of a group of clients."""

    name: str
    rate: Callable[[float], float]
    """Requests per second of the group, given the seconds since the start."""
    most: float
    """Upper bound on the rate."""
    asks: tuple[Ask, ...]
    """The requests to choose from; one that is listed twice is sent twice as often."""
    clients: tuple[Client, ...] = ()
    addresses: tuple[str, ...] = ()
    """Addresses of clients without a key."""
    agents: tuple[str, ...] = PEOPLE
    even: bool = False
    """True for requests at equal intervals, as programs send them."""


class Visit(NamedTuple):
    """One request, and the seconds since the start at which it is sent."""

    at: float
    habit: str
    ask: Ask
    agent: str

    @property
    def headers(self) -> dict[str, str]:
        return {**self.ask.headers(0), "User-Agent": self.agent, MARK: self.habit}


def wave(low: float, high: float, seconds: float, *, begins: float = 0.0) -> Callable[[float], float]:
    """A rate that rises and falls with this period in seconds."""
    return lambda at: low + (high - low) * (1 - math.cos(2 * math.pi * (at - begins) / seconds)) / 2


def now_and_then(rate: float, *, first: float, lasts: float, every: float) -> Callable[[float], float]:
    """A rate that is zero except for some seconds of each period."""
    return lambda at: rate if at >= first and (at - first) % every < lasts else 0.0


def full_at_once(rate: float, *, at_first: float, lasts: float) -> Callable[[float], float]:
    """A burst in the first seconds, then the rate at which the limit refills."""
    return lambda at: at_first if at < lasts else rate


HABITS = (
    Habit("strangers", wave(3, 9, 90), 9, (POSTS, POSTS, POSTS, SEARCH), addresses=STRANGERS),
    Habit("free", wave(0.8, 2.2, 120, begins=30), 2.2, (POSTS, POSTS, SEARCH), FREE),
    Habit("pro", wave(3, 8, 70), 8, (POSTS, POSTS, SEARCH, SEARCH, WRITE), PRO),
    Habit("writers", wave(0.1, 0.5, 50), 0.5, (COMPLETE,), PRO, agents=("assistant/2.1",)),
    Habit("enterprise", wave(6, 14, 150, begins=60), 14, (POSTS, SEARCH), ENTERPRISE, agents=("globex-sync/4.2",)),
    Habit("launch", now_and_then(22, first=18, lasts=16, every=80), 22, (POSTS, POSTS, SEARCH), (FESTIVAL,)),
    # It has 60 per minute and sends 61, so it is always near its limit.
    Habit("at its limit", full_at_once(61 / 60, at_first=10, lasts=6.5), 10, (POSTS,), (CAFE,), even=True),
    Habit("exports", wave(0.1, 0.6, 80), 0.6, (*[EXPORT] * 14, CREDITS), (*PRO, *ENTERPRISE), agents=("export/3.0",)),
    Habit("payments", lambda _: 9.5 / 60, 9.5 / 60, (PAY,), PRO[:1], agents=("till/1.0",), even=True),
    Habit("webhooks", wave(0.5, 2, 40), 2, (Ask("POST", "/webhooks/git"),), addresses=(FORGE,), agents=("forge/8",)),
    Habit(
        "guesser",
        now_and_then(1.5, first=5, lasts=45, every=100),
        1.5,
        tuple(Ask("POST", "/login", login=f"{name}:guess") for name in ("grace", "root", "alan")),
        addresses=(GUESSER,),
        agents=("python-requests/2.34",),
        even=True,
    ),
    Habit("scraper", wave(1.5, 4, 35), 4, (SEARCH,), addresses=(SCRAPER,), agents=("curl/9.1",)),
    Habit("leaked", lambda _: 0.1, 0.1, (SEARCH._replace(key="demo-leaked-key"),), addresses=(FINDER,)),
)


def visits(seed: int = 1) -> Iterator[Visit]:
    """All requests in the order of their times, without end; at most `MOST_A_SECOND` in any second."""
    second, sent = 0, 0
    for visit in merge(*(_visits_of(habit, seed) for habit in HABITS), key=lambda each: each.at):
        if int(visit.at) != second:
            second, sent = int(visit.at), 0
        sent += 1
        if sent <= MOST_A_SECOND:
            yield visit


def _visits_of(habit: Habit, seed: int) -> Iterator[Visit]:
    """A Poisson process with a changing rate, by thinning; or even intervals."""
    dice = Random(f"{seed} {habit.name}")
    at = dice.random() / habit.most
    while True:
        rate = habit.rate(at)
        if rate > 0 and (habit.even or dice.random() * habit.most < rate):
            ask = dice.choice(habit.asks)
            if habit.clients:
                client = dice.choice(habit.clients)
                ask = ask._replace(key=client.key, visitor=client.address)
            else:
                ask = ask._replace(visitor=dice.choice(habit.addresses))
            yield Visit(at, habit.name, ask, dice.choice(habit.agents))
        at += 1 / (rate or habit.most) if habit.even else dice.expovariate(habit.most)


class Crowd:
    """Sends requests at their times. Those that the shop does not accept in time are dropped instead of queued."""

    def __init__(self, host: str, port: int, *, seed: int) -> None:
        self._address = host, port
        self._plan = visits(seed)
        self._waiting: queue.Queue[Visit] = queue.Queue(maxsize=2 * MOST_A_SECOND)

    def start(self) -> None:
        for work in (self._lead, *[self._send] * SENDERS):
            threading.Thread(target=work, name="crowd", daemon=True).start()

    def _lead(self) -> None:
        opened = time.monotonic()
        for visit in self._plan:
            early = opened + visit.at - time.monotonic()
            if early > 0:
                time.sleep(early)
            elif early < -1:
                opened -= early  # the machine was suspended: skip what was missed
            with suppress(queue.Full):
                self._waiting.put_nowait(visit)

    def _send(self) -> None:
        connection = HTTPConnection(*self._address, timeout=10)
        sent = 0
        while True:
            visit = self._waiting.get()
            try:
                ask = visit.ask
                connection.request(ask.method, ask.path, body=ask.json, headers=visit.headers)
                connection.getresponse().read()
                sent += 1
                if not sent % REQUESTS_ON_ONE:
                    connection.close()
            except (OSError, HTTPException):
                connection.close()  # the next request opens another


def main(argv: list[str] | None = None) -> int:
    """Send requests until standard input is closed."""
    parser = argparse.ArgumentParser(
        "python -m examples.shop.simulated_clients", description="Send simulated traffic to the example shop."
    )
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args(argv)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the shop, which ends this process
    threading.Thread(target=_visit, args=(options.host, options.port, options.seed), daemon=True).start()
    while os.read(sys.stdin.fileno(), 1024):
        pass
    return 0


def _visit(host: str, port: int, seed: int) -> None:
    wait_until_ready(host, port, timeout=math.inf)
    Crowd(host, port, seed=seed).start()


if __name__ == "__main__":
    sys.exit(main())
