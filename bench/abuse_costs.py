"""Costs of the detection of abuse: CPU time for each request, and memory with a million clients, real or invented.

Each measurement runs in a process of its own: `python -m bench.abuse_costs cpu`, `clients` or `forged`.
"""

from __future__ import annotations

import gc
import json
import os
import random
import subprocess
import sys
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from time import process_time
from typing import TYPE_CHECKING, Any, Final

from headgate.abuse.detector import AbuseDetector, ObservedRequest
from headgate.gate.gate import Gate
from headgate.policy import read
from headgate.policy.snapshot import Snapshot
from headgate.testing import FakeRequest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from headgate.abuse.model import Finding

LIMITS: Final = "limits: [{by: ip, bucket: 1000000/minute}]\n"
ON: Final = f"{LIMITS}abuse: on"
CLIENTS: Final = 1_000_000
SECOND_US: Final = 1_000_000
START_US: Final = 1_763_251_200 * SECOND_US
ROUNDS: Final = 15
BATCH: Final = 20_000
PAGES: Final = 3_000
VICTIM, OFFENDER = "198.51.100.7", "203.0.113.9"


@dataclass(frozen=True, slots=True)
class Costs:
    """The results of one run."""

    request_us: float
    """CPU time of a request with all shipped scenarios, beyond one without."""
    requests_us: tuple[float, float]
    """CPU time of a request through a gate: without scenarios, and with them."""
    clients_mb: float
    """Memory of the detector after ten minutes with a million active clients."""
    forged_mb: float
    """The same after a million invented identities."""
    is_offender_found: bool
    """True if the one real attacker among the invented identities is found."""
    is_victim_found: bool
    """True if the client in whose name requests were sent is found."""


def measure() -> Costs:
    found: dict[str, Any] = {}
    for name in MEASUREMENTS:
        command = [sys.executable, "-m", "bench.abuse_costs", name]
        found |= json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)
    return Costs(**{**found, "requests_us": tuple(found["requests_us"])})


def _cpu() -> dict[str, Any]:
    """The same requests through two gates in turn; the least time of many rounds, with the work of the threads."""
    rng, status = random.Random(1), 200
    gates = [Gate(read(text), max_keys=1_000_000) for text in (LIMITS, ON)]
    best = [float("inf")] * 2
    kinds = [("GET", f"/item/{number}", 200) for number in range(PAGES)]
    for _ in range(ROUNDS):
        requests = []
        for _ in range(BATCH):
            method, path, status = rng.choice(kinds)
            if rng.random() < 0.1:
                method, path, status = "POST", "/login", 401 if rng.random() < 0.1 else 200
            elif rng.random() < 0.05:
                status = 404
            address = f"10.{rng.randrange(4)}.{rng.randrange(250)}.{rng.randrange(250)}"
            headers = {"user-agent": f"Mozilla/5.0 ({rng.randrange(50)})"}
            requests.append((FakeRequest(path, method, peer=address, headers=headers), status))
        for index, gate in enumerate(gates):
            gc.collect()
            begin = process_time()
            for request, status in requests:
                admission = gate.admit(request)
                if admission.is_only_observed:  # as the adapters do
                    gate.observe_response(admission, status)
                elif admission.needs_finish:
                    gate.finish(admission, status)
            gate.flush_events()
            best[index] = min(best[index], (process_time() - begin) / BATCH * 1e6)
    for gate in gates:
        gate.close()
    return {"requests_us": best, "request_us": best[1] - best[0]}


def _detector(handle: Callable[[Finding, Any], None]) -> tuple[AbuseDetector, Snapshot]:
    parsed = read(ON)
    snapshot = Snapshot(parsed)
    assert parsed.abuse is not None
    detector = AbuseDetector(handle, b"key", is_trusted_key=snapshot.is_trusted_key)
    detector.configure(parsed.abuse.scenarios)
    return detector, snapshot


def _observed(
    snapshot: Snapshot, at_us: int, method: str, path: str, status: int, agent: str, who: dict[str, str]
) -> ObservedRequest:
    route = snapshot.route(method, path)
    return ObservedRequest(at_us, route.scenarios, who, agent, path, status, route.endpoint)


def _grown_mb(feed: Callable[[], None]) -> float:
    gc.collect()
    before = _resident_bytes()
    feed()
    gc.collect()
    return (_resident_bytes() - before) / 1e6


def _clients() -> dict[str, Any]:
    """A million clients in ten minutes, each with five requests on average, some of them many more."""
    rng = random.Random(1)

    def requests(snapshot: Snapshot) -> Iterator[ObservedRequest]:
        for number in range(5 * CLIENTS):
            client = rng.randrange(CLIENTS) if number % 5 else int(rng.paretovariate(0.5)) % CLIENTS
            address = f"10.{client >> 16}.{client >> 8 & 255}.{client & 255}"
            method, path, status = "GET", f"/item/{rng.randrange(50_000)}", 404 if rng.random() < 0.05 else 200
            if rng.random() < 0.2:
                method, path, status = "POST", "/login", 401 if rng.random() < 0.2 else 200
            who = {"address": address, "ip": address, "api_key": f"hmac:{client % 100_000}"}
            yield _observed(snapshot, START_US + number * 120, method, path, status, f"agent {client % 500}", who)

    def feed() -> None:
        batch: deque[ObservedRequest] = deque()
        for request in requests(snapshot):
            batch.append(request)
            if len(batch) == 1_000:
                detector.observe(batch)
                batch.clear()

    detector, snapshot = _detector(lambda finding, scenario: None)
    return {"clients_mb": _grown_mb(feed)}


def _forged() -> dict[str, Any]:
    """A million invented addresses, accounts, keys and agents from one attacker, who also names a victim.

    Forwarding headers of clients that are no trusted proxy do not count, so the gate reports the address of the
    attacker itself; behind a botnet, addresses are as random as here.
    """
    rng, names = random.Random(1), set[str]()

    def feed() -> None:
        for number in range(CLIENTS):
            address = f"10.{rng.randrange(256)}.{rng.randrange(256)}.{rng.randrange(256)}"
            who = {"address": address, "ip": address, "api_key": f"hmac:{rng.random()}", "user": f"{rng.random()}"}
            path, agent = f"/users/{rng.random()}", f"agent {rng.random()}"
            batch = [_observed(snapshot, START_US + number * 300, "POST", "/login", 401, agent, who)]
            batch.append(_observed(snapshot, START_US + number * 300, "GET", path, 404, agent, who))
            if number % 1_000 == 0:  # the attacker's own address: one login every 0.3 s, in the name of the victim
                who = {"address": OFFENDER, "ip": OFFENDER, "user": VICTIM, "account": VICTIM}
                batch.append(_observed(snapshot, START_US + number * 300, "POST", "/login", 401, agent, who))
            detector.observe(batch)

    detector, snapshot = _detector(lambda finding, scenario: names.add(finding.value))
    return {"forged_mb": _grown_mb(feed), "is_offender_found": OFFENDER in names, "is_victim_found": VICTIM in names}


def _resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


MEASUREMENTS: Final = {"cpu": _cpu, "clients": _clients, "forged": _forged}

if __name__ == "__main__":
    print(json.dumps(MEASUREMENTS[sys.argv[1]]()))
