"""Requests that demonstrate the policy, each with the curl command to repeat it."""

from __future__ import annotations

import json
import sys
import time
from base64 import b64encode
from contextlib import suppress
from http.client import HTTPConnection, HTTPException
from typing import NamedTuple

from examples.shop.decision_printer import BOLD, DIM, paint

__all__ = ["STEPS", "Ask", "Reply", "Step", "run", "wait_until_ready"]

VISITOR = "203.0.113.9"
"""The client address of the tour, sent like a proxy on loopback does, so that your own limits are not used."""


class Ask(NamedTuple):
    """A request that curl can send."""

    method: str
    path: str
    key: str | None = None
    login: str | None = None
    json: str | None = None
    visitor: str = VISITOR
    """The client address; $i is the number of the request."""
    once: str | None = None
    """The Idempotency-Key."""

    def curl(self, base: str) -> str:
        words = ["curl -i"]
        words += ["-X POST"] if self.method == "POST" and self.json is None else []
        words += [f'-H "X-Forwarded-For: {self.visitor}"'] if self.visitor != VISITOR else []
        words += [f"-H 'X-API-Key: {self.key}'"] if self.key else []
        words += [f"-H 'Idempotency-Key: {self.once}'"] if self.once else []
        words += [f"-u {self.login}"] if self.login else []
        words += [f"--json '{self.json}'"] if self.json else []
        return " ".join([*words, f"'{base}{self.path}'" if "?" in self.path else f"{base}{self.path}"])

    def headers(self, count: int) -> dict[str, str]:
        sent = {
            "X-Forwarded-For": self.visitor.replace("$i", str(count)),
            "X-API-Key": self.key,
            "Idempotency-Key": self.once,
            "Authorization": self.login and f"Basic {b64encode(self.login.encode()).decode()}",
            "Content-Type": self.json and "application/json",
        }
        return {name: value for name, value in sent.items() if value}


class Reply(NamedTuple):
    """The response."""

    status: int
    headers: dict[str, str]
    body: str


class Step(NamedTuple):
    """A step of the tour."""

    title: str
    asks: tuple[Ask, ...]
    times: int = 1
    shows: tuple[str, ...] = ()
    """Header fields of the last response to show."""
    pause: float = 0
    """Seconds between the requests."""
    has_body: bool = False
    """True to show the response."""


SEARCH = Ask("GET", "/search?q=tea")
COMPLETE = Ask("POST", "/complete", key="demo-free-key")

STEPS = (
    Step(
        "Every answer says what is left. A search costs 5 of your 60 a minute:",
        (SEARCH,),
        shows=("x-ratelimit-limit", "x-ratelimit-remaining", "ratelimit"),
    ),
    Step("Twelve more are too many, and the refusal says when to come back:", (SEARCH,), 12, ("retry-after",)),
    Step(
        "Keys have tiers, and one of them has an override for its launch:",
        (
            SEARCH._replace(key="demo-pro-key"),
            SEARCH._replace(key="demo-enterprise-key"),
            SEARCH._replace(key="demo-launch-key"),
        ),
    ),
    Step(
        "Five wrong passwords for one account are enough, from wherever they come:",
        (Ask("POST", "/login", login="ada:guess", visitor="203.0.113.$i"),),
        6,
    ),
    Step("A model's answer reserves 500 tokens, and then pays the 14 it took:", (COMPLETE,), 2, pause=0.3),
    Step(
        "A plan has exports per month, and an export costs one, however often it is sent:",
        (Ask("POST", "/exports", key="demo-pro-key", once="export-1"),),
        2,
        has_body=True,
    ),
    Step(
        "What exceeds the plan is paid by credits, of which each order counts once:",
        (
            Ask("POST", "/credits", key="demo-pro-key", once="order-1"),
            Ask("GET", "/plan", key="demo-pro-key"),
        ),
        has_body=True,
    ),
    Step(
        "A shadow only watches: a fourth post passes, and is reported:",
        (Ask("POST", "/posts", key="demo-pro-key", json='{"text": "hello"}'),),
        4,
    ),
    Step("A key that leaked is blocked:", (SEARCH._replace(key="demo-leaked-key"),)),
)


def run(host: str, port: int) -> list[Reply]:
    """Run all steps; returns the last response of each."""
    base = f"http://{host}:{port}"
    connection = HTTPConnection(host, port, timeout=10)
    replies = []
    for number, step in enumerate(STEPS, 1):
        print(f"\n  {paint(f'{number}. {step.title}', BOLD)}")
        for ask in step.asks:
            curl = ask.curl(base)
            print(paint(f"     {curl if step.times == 1 else f'for i in $(seq {step.times}); do {curl}; done'}", DIM))
            sys.stdout.flush()
            for count in range(1, step.times + 1):
                reply = _send(connection, ask, count)
                time.sleep(step.pause)
        replies.append(reply)
        for name in step.shows:
            if name in reply.headers:  # absent while the store is unavailable
                print(f"     {name}: {reply.headers[name]}")
        if step.has_body:
            print(f"     {reply.body}")
        if reply.headers.get("content-type") == "application/problem+json":
            print(f"     {json.loads(reply.body)['message']}")
        if sys.stdout.isatty():
            time.sleep(0.5)  # slow enough to follow
    connection.close()
    return replies


def wait_until_ready(host: str, port: int, *, timeout: float = 60) -> None:
    """Wait until the shop accepts requests."""
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        with suppress(OSError, HTTPException):
            connection = HTTPConnection(host, port, timeout=1)
            _send(connection, Ask("GET", "/health"))
            connection.close()
            return
        time.sleep(0.02)
    raise TimeoutError(f"the shop has not opened at {host}:{port} for {timeout:g} s")


def _send(connection: HTTPConnection, ask: Ask, count: int = 1) -> Reply:
    connection.request(ask.method, ask.path, body=ask.json, headers=ask.headers(count))
    answer = connection.getresponse()
    body = answer.read().decode()
    return Reply(answer.status, {name.lower(): value for name, value in answer.getheaders()}, body)
