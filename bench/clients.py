"""Polite clients next to two usual ways to retry: `python -m bench.clients` prints the tables of docs/clients.md.

1,000 clients in virtual time: the flow of `headgate.clients` on one side, the middleware with a real limiter on the
other, both on one `FakeClock`. 50 clients in real time: processes that use httpx, and a server under uvicorn. All share
a limit of 100 per second, want to send without a pause, and know nothing of each other.
"""

from __future__ import annotations

import argparse
import heapq
import multiprocessing
import random
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count
from math import inf
from typing import TYPE_CHECKING, Any, Final

import httpx
from urllib3 import HTTPResponse
from urllib3.exceptions import MaxRetryError
from urllib3.util import Retry

from bench.redis_server import free_port, running_redis
from headgate import Limiter
from headgate.adapters.wsgi import HeadgateMiddleware
from headgate.clients import deadline
from headgate.clients.client import Attempt, Discard, Outgoing, PoliteClient, Question, Reply
from headgate.clients.httpx import RateLimitTransport
from headgate.errors import WaitTooLong
from headgate.flow import Pause
from headgate.policy import read
from headgate.testing import FakeClock

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator

__all__ = ["KINDS", "Result", "simulate"]

QUOTA: Final = 100  # per second, and the burst
START_US: Final = 1_795_000_000_000_000
LATENCY_S: Final = 0.02
HOST: Final = "https://api.example.com"
ENVIRON: Final = {
    "REQUEST_METHOD": "GET",
    "PATH_INFO": "/",
    "REMOTE_ADDR": "203.0.113.9",
    "SERVER_PROTOCOL": "HTTP/1.1",
}
POLICY: Final = f"limits: [{{name: api, by: ip, bucket: {QUOTA}/second}}]"
BACKOFF_S: Final = 0.5
RETRIES: Final = 5
START_S: Final = 2.0
"""The time in which all processes get ready to begin at the same instant."""


@dataclass
class Result:
    """The requests of one run, as the server has seen them."""

    kind: str
    clients: int
    seconds: float
    admitted: int = 0
    rejected: int = 0
    per_client: list[int] = field(default_factory=list)

    @property
    def used(self) -> float:
        """The part of what the limit allows in that time, its burst included."""
        return self.admitted / (QUOTA * self.seconds + QUOTA)

    @property
    def rejection_rate(self) -> float:
        return self.rejected / max(1, self.admitted + self.rejected)

    @property
    def fairness(self) -> float:
        """Jain's index: 1 if all clients have sent the same number, 1 / clients if only one has."""
        squares = sum(number * number for number in self.per_client)
        return sum(self.per_client) ** 2 / (len(self.per_client) * squares) if squares else 0.0

    def row(self) -> str:
        return (
            f"| {self.kind} | {self.used:.1%} | {self.rejection_rate:.2%} | {self.rejected:,} | {self.fairness:.2f} |"
        )


# ---------------------------------------------------------------- ways to send requests, as flows


def polite(client: PoliteClient) -> Iterator[Any]:
    """Requests one after the other, as a script sends them."""
    while True:
        try:
            yield from client.send(Outgoing("GET", HOST))
        except WaitTooLong:
            yield Pause(1.0)


def naive() -> Generator[Any, Any, None]:
    """Retries after 0.5, 1, 2 ... seconds."""
    while True:
        for attempt in range(RETRIES + 1):
            reply: Reply = yield Attempt()
            if reply.status != 429:
                break
            yield Pause(BACKOFF_S * 2**attempt)


def urllib3_retry() -> Generator[Any, Any, None]:
    """urllib3's own `Retry`, which requests and others use: it honours Retry-After."""
    while True:
        retry = Retry(total=RETRIES, status_forcelist=[429, 503], backoff_factor=BACKOFF_S, backoff_jitter=BACKOFF_S)
        while True:
            reply: Reply = yield Attempt()
            if reply.status != 429:
                break
            response = HTTPResponse(headers=dict(reply.headers), status=reply.status)  # type: ignore[arg-type]
            try:
                retry = retry.increment("GET", "/", response=response)
            except MaxRetryError:
                break
            yield Pause(retry.get_retry_after(response) or retry.get_backoff_time())


KINDS: Final = ("headgate.clients", "headgate.clients, shared store", "urllib3 Retry", "naive backoff")


def flow(kind: str, clock: FakeClock, generator: random.Random, store: Limiter) -> Iterator[Any]:
    if kind == "naive backoff":
        return naive()
    if kind == "urllib3 Retry":
        return urllib3_retry()
    shared = store if "shared" in kind else None
    return polite(PoliteClient(clock=clock, random=generator.random, shared=shared))


# ---------------------------------------------------------------- virtual time


def simulate(kind: str, clients: int, seconds: float, *, start_within: float, seed: int = 1) -> Result:
    """Run clients of one kind against a real limiter in virtual time; they start at random in the first seconds."""
    clock, generator, order = FakeClock(START_US), random.Random(seed), count()
    server = HeadgateMiddleware(lambda _, start: start("200 OK", []) or [b""], read(POLICY), clock=clock)  # type: ignore[func-returns-value]
    result = Result(kind, clients, seconds, per_client=[0] * clients)
    with Limiter(clock=clock) as store:
        flows: list[Any] = [flow(kind, clock, generator, store) for _ in range(clients)]
        events = [(generator.random() * start_within, next(order), index, None) for index in range(clients)]
        heapq.heapify(events)
        while events and events[0][0] < seconds:
            now, _, index, value = heapq.heappop(events)
            clock.set_us(START_US + round(now * 1_000_000))
            delay, answer = _next_wait(flows[index], value, lambda index=index: _ask(server, result, index))
            if answer is not None:
                delay = LATENCY_S * (0.5 + generator.random())
            heapq.heappush(events, (now + delay, next(order), index, answer))
    return result


def _next_wait(steps: Any, value: Any, send: Any) -> tuple[float, Any]:
    """Run the flow of a client up to its next wait: its length, and the reply that arrives at its end."""
    while True:
        step = steps.send(value)
        match step:
            case Pause(seconds):
                return max(seconds, 1e-6), None
            case Attempt():
                return 0.0, send()
            case Discard():
                value = None
            case Question():
                value = step.limiter.check(*step.keys, cost=step.cost)


def _ask(server: HeadgateMiddleware, result: Result, index: int) -> Reply:
    answer: list[Any] = []
    for _ in server(dict(ENVIRON), lambda status, headers, *_: answer.extend((status, headers))):  # type: ignore[arg-type, return-value]
        pass
    status, headers = answer
    if status.startswith("200"):
        result.admitted += 1
        result.per_client[index] += 1
    else:
        result.rejected += 1
    return Reply(int(status[:3]), headers)


# ---------------------------------------------------------------- real time


def run_processes(kind: str, clients: int, seconds: float, store: str) -> Result:
    """Run processes of one kind against a real server on this machine, and a store that they may share."""
    port = free_port()
    server = subprocess.Popen([sys.executable, "-m", "bench.clients", "--serve", f"{port}"])
    url = f"http://127.0.0.1:{port}/"
    try:
        _wait_for(url)
        context = multiprocessing.get_context("fork")  # as interpreters that all start at once would be the load
        begin, queue = context.Value("d"), context.Queue()
        barrier = context.Barrier(clients, lambda: setattr(begin, "value", time.time() + START_S))
        processes = [
            context.Process(target=_run_client, args=(kind, url, seconds, store, barrier, begin, queue), daemon=True)
            for _ in range(clients)
        ]
        for process in processes:
            process.start()
        counts = [queue.get(timeout=seconds + 120) for _ in processes]
        for process in processes:
            process.join(10)
    finally:
        server.terminate()
        server.wait(10)
    return Result(
        kind,
        clients,
        seconds,
        sum(each["admitted"] for each in counts),
        sum(each["rejected"] for each in counts),
        [each["admitted"] for each in counts],
    )


def _wait_for(url: str) -> None:
    for _ in range(300):
        try:
            httpx.get(f"{url}ready")
        except httpx.TransportError:
            time.sleep(0.1)
        else:
            return
    raise RuntimeError("the server did not start")


def _serve(port: int) -> None:
    import uvicorn

    from headgate.adapters.asgi import HeadgateMiddleware as Middleware  # not needed by the clients

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"tea"})

    policy = read(f"routes: [{{path: /ready, cost: 0}}]\n{POLICY}")
    uvicorn.run(Middleware(app, policy), port=port, log_level="error", lifespan="off")


def _run_client(kind: str, url: str, seconds: float, store: str, barrier: Any, begin: Any, queue: Any) -> None:
    """Send requests for so long from a common instant on, and report the counts."""
    counts, until = {"admitted": 0, "rejected": 0}, inf

    class CountingTransport(httpx.HTTPTransport):
        def handle_request(self, request: httpx.Request) -> httpx.Response:
            response = super().handle_request(request)
            if time.time() <= until:
                counts["admitted" if response.status_code == 200 else "rejected"] += 1
            return response

    plain = CountingTransport()
    is_polite = kind in KINDS[:2]
    shared = Limiter(store) if kind == KINDS[1] else None
    client = httpx.Client(transport=RateLimitTransport(plain, shared=shared) if is_polite else plain, timeout=30)
    barrier.wait()
    time.sleep(max(0.0, begin.value - time.time()))
    until = begin.value + seconds
    if is_polite:
        with deadline(until - time.time()), suppress(WaitTooLong):  # a wait beyond the end is not waited for
            while time.time() < until:
                client.get(url)
    else:
        steps, value = flow(kind, FakeClock(), random.Random(), Limiter()), None
        while time.time() < until:
            step = steps.send(value)  # type: ignore[attr-defined]
            value = None
            if isinstance(step, Pause):
                time.sleep(max(0.0, min(step.seconds, until - time.time())))
            else:
                response = client.get(url)
                value = Reply(response.status_code, response.headers)
    queue.put(counts)


HEADER: Final = "| clients | limit used | rejected | rejections | fairness |\n| --- | --: | --: | --: | --: |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--serve", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--seconds", type=float, default=600, help="virtual time of the simulation")
    parser.add_argument("--real-seconds", type=float, default=60, help="time of the runs with processes; 0 for none")
    options = parser.parse_args()
    if options.serve:
        _serve(options.serve)
    else:
        if options.real_seconds:
            print(f"50 processes, for {options.real_seconds:.0f} s:\n\n{HEADER}")
            with running_redis() as store:
                for kind in KINDS:
                    print(run_processes(kind, 50, options.real_seconds, store).row(), flush=True)
        print(f"\n1,000 simulated clients, started within a minute, for {options.seconds:.0f} s:\n\n{HEADER}")
        for kind in KINDS:
            print(simulate(kind, 1000, options.seconds, start_within=60).row(), flush=True)
        print(f"\n1,000 simulated clients, started at the same instant, for {options.seconds:.0f} s:\n\n{HEADER}")
        print(simulate(KINDS[0], 1000, options.seconds, start_within=0).row(), flush=True)


if __name__ == "__main__":
    main()
