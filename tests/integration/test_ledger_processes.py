"""Several processes on one ledger, killed and restarted at random moments, together with their database."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from typing import TYPE_CHECKING

import pytest

from headgate.quotas import Ledger, QuotaMeter
from support.ledger_worker import cost_of
from support.paths import TESTS
from support.postgres import PostgresServer

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

REQUESTS = int(os.environ.get("HEADGATE_CHARGES", "80"))
WORKERS = 4
KILLS = 4 + REQUESTS // 2000
PAUSES = max(1, REQUESTS // 1000)
"""Factor of the time between two kills."""
TIMEOUT_S = 600 + REQUESTS


def run_with_kills(url: str, break_database: Callable[[], None], *journal: str, requests: int = REQUESTS) -> None:
    """Four workers that share all requests; whichever is killed starts again from the beginning."""

    def start(seed: int) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "support.ledger_worker", url, f"{seed}", "0", f"{requests}", *journal]
        return subprocess.Popen(command, cwd=TESTS, stdout=subprocess.PIPE)

    workers = [start(seed) for seed in range(WORKERS)]
    chance, kills = random.Random(5), 0
    while any(worker.poll() is None for worker in workers):
        time.sleep(chance.uniform(0.1, 0.6) * (PAUSES if kills < KILLS else 1))
        if kills < KILLS:
            kills += 1
            at = chance.randrange(WORKERS)
            workers[at].kill()
            workers[at].communicate()
            if kills % 2 == 0:
                break_database()
            workers[at] = start(100 + kills)
    for worker in workers:
        printed, _ = worker.communicate()
        assert (worker.returncode, printed) == (0, b"done\n")


def check_sums(url: str, granted: int) -> None:
    """Each request was charged once, and what was refused was refused because the balance was too low."""
    ledger = Ledger(url)
    commits = {entry.subject: entry for entry in ledger.entries("acme") if entry.kind == "commit"}
    served = [request for request in range(REQUESTS) if f"request {request}" in commits]
    summary = ledger.summary("acme")
    uncovered = sum(entry.uncovered for entry in commits.values())
    assert summary.charged + uncovered == sum(cost_of(request) for request in served)
    assert summary.held == 0
    assert summary.charged == granted - summary.available <= granted
    assert len(served) == REQUESTS or summary.available < 5
    assert ledger.verify() == []
    ledger.close()


@pytest.mark.parametrize("share", [0.5])
def test_four_processes_charge_each_request_once_on_sqlite(tmp_path: Path, share: float) -> None:
    url = f"sqlite:///{tmp_path}/quota.db"
    granted = int(sum(map(cost_of, range(REQUESTS))) * share)
    Ledger(url).grant("acme", granted)
    run_with_kills(url, lambda: None)
    check_sums(url, granted)


@pytest.mark.timeout(TIMEOUT_S)
def test_four_processes_charge_each_request_once_although_postgresql_crashes() -> None:
    with PostgresServer() as server:
        granted = sum(map(cost_of, range(REQUESTS))) * 2
        Ledger(server.url).grant("acme", granted)

        def crash() -> None:
            server.kill()
            server.start()

        run_with_kills(server.url, crash)
        check_sums(server.url, granted)


@pytest.mark.timeout(TIMEOUT_S)
def test_four_processes_charge_each_request_to_leases_once_although_all_of_them_crash(tmp_path: Path) -> None:
    """What the journals and the ledger know together is what was served, exactly, once they are settled."""
    requests = REQUESTS * 50
    with PostgresServer() as server:
        ledger = Ledger(server.url)
        ledger.grant("acme", requests * 10)

        def crash() -> None:
            server.kill()
            server.start()

        run_with_kills(server.url, crash, f"{tmp_path}", requests=requests)
        with QuotaMeter(ledger, journal=tmp_path) as meter:
            meter.recover()
        assert [*tmp_path.iterdir()] == []
        summary = ledger.summary("acme")
        assert (summary.charged, summary.held) == (sum(map(cost_of, range(requests))), 0)
        assert sum(entry.usage_count for entry in ledger.entries("acme")) == requests
        assert ledger.verify() == []
        assert len(ledger.entries("acme")) < requests / 20
