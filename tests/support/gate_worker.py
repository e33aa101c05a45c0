"""A process that serves requests through a gate, with a limit in Redis and quotas in a ledger.

python -m support.gate_worker LEDGER REDIS DIRECTORY NUMBER WORKERS REQUESTS

Each request reaches one or two workers, in any order. What was served is written to a file of this worker, after the
request: nothing that headgate knows is in it. A worker that is started again repeats what is not in its file, and some
of what is: retries of clients which have not received the response.
"""

from __future__ import annotations

import json
import os
import random
import sys
from pathlib import Path
from typing import Any

from headgate.gate import Gate
from headgate.policy import read
from headgate.testing import FakeRequest

__all__ = ["COST", "account_of", "allowances_of", "cost_of", "main", "served_requests"]

COST = 5
"""The estimate, and the largest cost of a request."""


def cost_of(request: int) -> int:
    """The amount that a request really uses."""
    return request * 7 % COST + 1


def account_of(request: int) -> str:
    """One account has enough for all of its requests, the other one for nine of ten."""
    return "rich" if request % 3 else "poor"


def policy(ledger: str, directory: Path, allowances: dict[str, int]) -> Any:
    units = {
        "name": "units",
        "by": "tenant",
        "quota": {"allowance": allowances["rich"], "per": "year"},
        "reserve": COST,
        "tiers": {"poor": {"allowance": allowances["poor"]}},
    }
    sections = {
        "limits": [{"name": "burst", "by": "tenant", "bucket": "1000000000/minute"}, units],
        "clients": [{"tenant": "poor", "tier": "poor"}],
        "quotas": {"ledger": ledger, "journal": f"{directory}/journal", "budget": "20 s"},
        "on_failure": "open",
    }
    return read(json.dumps(sections), format="json")


def allowances_of(requests: int) -> dict[str, int]:
    totals = {"rich": 0, "poor": 0}
    for request in range(requests):
        totals[account_of(request)] += cost_of(request)
    return {"rich": totals["rich"] * 10, "poor": totals["poor"] * 9 // 10}


def requests_of(worker: int, workers: int, requests: int) -> list[int]:
    """Every other request reaches two workers."""
    return [
        request
        for request in range(requests)
        if worker == request % workers or (request // workers % 2 and worker == (request + 1) % workers)
    ]


def served_requests(directory: Path) -> list[int]:
    """All lines of the files of all workers."""
    lines = [line for file in directory.glob("served-*") for line in file.read_bytes().split(b"\n")[:-1]]
    return [int(line) for line in lines]


def main(ledger: str, redis: str, directory: Path, worker: int, workers: int, requests: int) -> None:
    chance = random.Random()
    path = directory / f"served-{worker}"
    done = {int(line) for line in path.read_bytes().split(b"\n")[:-1]} if path.exists() else set()
    todo = [each for each in requests_of(worker, workers, requests) if each not in done or chance.random() < 0.1]
    chance.shuffle(todo)
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    identities = {"tenant": lambda request: request.header("x-tenant")[0]}
    gate = Gate(policy(ledger, directory, allowances_of(requests)), redis, identities=identities)
    for request in todo:
        if serve(gate, request):
            os.write(file, b"%d\n" % request)
    gate.close()
    print("done", flush=True)


def serve(gate: Gate, request: int) -> bool:
    """Repeat a request until it is served, or refused because nothing is left."""
    headers = {"x-tenant": account_of(request), "idempotency-key": f"{request}"}
    while True:
        admission = gate.admit(FakeRequest("/", method="POST", headers=headers))
        if admission.allowed:
            admission.commit(cost_of(request))
            gate.finish(admission, 200)
            return True
        if admission.refusal is not None and admission.refusal.status == 429:
            return False


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]), *map(int, sys.argv[4:7]))
