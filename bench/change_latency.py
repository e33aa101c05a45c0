"""`python -m bench.change_latency`: time from a change to its effect on every worker.

A real Redis counts, a real PostgreSQL has the config, the admin server takes the changes over HTTP, and four processes
with a gate each send requests of one client in a loop. What is measured: how long after the change was sent each of
them decides by it. Everybody looks at the one clock of this machine.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import secrets
import statistics
import sys
import time
import urllib.request
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.progress import Progress
from bench.redis_server import free_port, running_redis

if TYPE_CHECKING:
    from collections.abc import Callable

WORKERS = 4
PAUSE = 0.001
"""Seconds between two knocks of a worker: so exact are the numbers."""
AIM_OVERRIDE_S, AIM_BLOCK_S = 1.0, 0.050
POLICY = (
    "limits: [{name: requests, by: tenant, bucket: 100/minute}, {name: strangers, by: ip, bucket: 1000000/second}]\n"
)


def main() -> None:
    options = _options()
    sys.path.append(str(Path(__file__).parents[1] / "tests"))
    from support.postgres import PostgresServer

    progress = Progress()
    with running_redis() as redis_url, PostgresServer() as postgres:
        config_url = postgres.fresh_url()
        took = measure(config_url, redis_url, changes=options.changes, tell=progress.say)
    progress.done()
    print(
        f"\n{WORKERS} workers, {options.changes} changes of each kind by the admin API, until a worker decides by it\n"
    )
    print("| change | p50 | p99 | longest | aim |")
    print("| --- | --: | --: | --: | --: |")
    for kind, aim in (("override", AIM_OVERRIDE_S), ("block", AIM_BLOCK_S), ("unblock", AIM_BLOCK_S)):
        found = sorted(took[kind])
        p99 = found[min(len(found) - 1, int(len(found) * 0.99))]
        print(f"| {kind} | {_ms(statistics.median(found))} | {_ms(p99)} | {_ms(found[-1])} | p99 below {_ms(aim)} |")


def measure(
    config_url: str, redis_url: str, *, changes: int, tell: Callable[[str, str], None]
) -> dict[str, list[float]]:
    """Seconds from each change to its effect on each worker, by the kind of change."""
    from headgate.control.admin import AdminServer, Tokens
    from headgate.control.config import ConfigStore
    from headgate.control.service import AdminService
    from headgate.limiter import Limiter

    secret = secrets.token_hex(16)
    config = ConfigStore(config_url, secret=secret)
    config.put_policy(POLICY, author="bench", reason="to begin with")
    counters = Limiter(redis_url)
    tokens = Tokens(config_url)
    token = tokens.make("bench", "admin", by="bench").text
    server = AdminServer(AdminService(config, counters=counters, secret=secret), tokens, port=free_port())
    server.start()
    send = _Admin(server.url, token)
    fleet = _Fleet(config_url, redis_url, secret)
    took: dict[str, list[float]] = {"override": [], "block": [], "unblock": []}
    try:
        for number in range(changes):
            tell("changes", f"{number + 1} of {changes}")
            tenant = f"t{number}"
            who = {"kind": "tenant", "value": tenant}
            override = {"who": who, "bucket": "500/minute", "limit": "requests", "reason": "bench"}
            query = f"/blocks?kind=tenant&value={tenant}&reason=bench"
            took["override"] += fleet.times(tenant, "override", partial(send, "POST", "/overrides", override))
            took["block"] += fleet.times(
                tenant, "block", partial(send, "POST", "/blocks", {"who": who, "reason": "bench"})
            )
            took["unblock"] += fleet.times(tenant, "unblock", partial(send, "DELETE", query, None))
    finally:
        fleet.stop()
        server.stop()
        counters.close()
        config.close()
    return took


class _Admin:
    """Sends changes as anybody would."""

    def __init__(self, url: str, token: str) -> None:
        self._url = f"{url}/api/v1"
        self._headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}

    def __call__(self, method: str, path: str, body: dict[str, Any] | None) -> None:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self._url + path, data=data, method=method, headers=self._headers)
        with urllib.request.urlopen(request, timeout=10) as answer:
            answer.read()


class _Fleet:
    """Processes that send requests until they see a change."""

    def __init__(self, config_url: str, redis_url: str, secret: str) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipes = []
        self._processes = []
        for _ in range(WORKERS):
            here, there = context.Pipe()
            process = context.Process(target=_work, args=(there, config_url, redis_url, secret), daemon=True)
            process.start()
            self._pipes.append(here)
            self._processes.append(process)
        for pipe in self._pipes:
            pipe.recv()  # its gate is up

    def times(self, tenant: str, kind: str, change: Callable[[], None]) -> list[float]:
        """How long after the change was sent each of them has decided by it."""
        for pipe in self._pipes:
            pipe.send((tenant, kind))
        for pipe in self._pipes:
            pipe.recv()  # it knocks
        began = time.monotonic()
        change()
        return [pipe.recv() - began for pipe in self._pipes]

    def stop(self) -> None:
        for pipe in self._pipes:
            pipe.send(None)
        for process in self._processes:
            process.join(10)


def _work(pipe: Any, config_url: str, redis_url: str, secret: str) -> None:
    from headgate.adapters.asgi import AsgiRequest
    from headgate.control.config.watcher import ConfigSource
    from headgate.gate.gate import Gate

    def tenant_of(request: Any) -> str:
        return str(request.header("x-tenant")[0])

    gate = Gate(ConfigSource(config_url), redis_url, identities={"tenant": tenant_of}, secret=secret)
    gate.warm()
    time.sleep(1.0)  # it has heard of all that was before
    pipe.send(None)
    while (asked := pipe.recv()) is not None:
        tenant, kind = asked
        scope = {
            "type": "http", "method": "GET", "path": "/", "raw_path": b"/", "query_string": b"",
            "headers": [(b"x-tenant", tenant.encode())], "client": ("203.0.113.9", 1),
        }  # fmt: skip
        knocks = 0
        while True:
            admission = gate.admit(AsgiRequest(scope))
            seen = time.monotonic()
            blocked = admission.resolution.block is not None
            quota = (
                0
                if blocked
                else next(key.limit.quota for key in admission.resolution.keys if key.limit.name == "requests")
            )
            is_in_effect = {"override": quota == 500, "block": blocked, "unblock": not blocked}[kind]
            if knocks and is_in_effect:
                break
            if not knocks:
                pipe.send(None)
            knocks += 1
            time.sleep(PAUSE)
        pipe.send(seen)
    gate.close()


def _ms(seconds: float) -> str:
    return f"{seconds * 1000:.1f} ms"


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser("python -m bench.change_latency", description=__doc__.splitlines()[0])
    parser.add_argument("--changes", type=int, default=50, help="of each kind")
    return parser.parse_args()


if __name__ == "__main__":
    main()
