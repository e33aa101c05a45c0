"""Several processes on one ledger, killed and restarted at random moments, together with their database."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from contextlib import closing
from typing import TYPE_CHECKING

import psycopg
import pytest

from headgate.quotas import Ledger, QuotaMeter
from headgate.quotas.meter import FIRST_LEASE
from support import ledger_worker
from support.gate_worker import COST, account_of, allowances_of, cost_of, served_requests
from support.paths import TESTS
from support.postgres import PostgresServer
from support.servers import RedisServer

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

REQUESTS = int(os.environ.get("HEADGATE_CHARGES", "80"))
WORKERS = 4
KILLS = 4 + REQUESTS // 2000
PAUSES = max(1, REQUESTS // 1000)
"""Factor of the time between two kills."""
TIMEOUT_S = 600 + REQUESTS


def run_with_kills(url: str, break_database: Callable[[], None]) -> None:
    """Four workers that share all requests; whichever is killed starts again from the beginning."""

    def start(seed: int) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "support.ledger_worker", url, f"{seed}", "0", f"{REQUESTS}"]
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
    assert summary.charged + uncovered == sum(ledger_worker.cost_of(request) for request in served)
    assert summary.held == 0
    assert summary.charged == granted - summary.available <= granted
    assert len(served) == REQUESTS or summary.available < 5
    assert ledger.verify() == []
    ledger.close()


@pytest.mark.parametrize("share", [0.5])
def test_four_processes_charge_each_request_once_on_sqlite(tmp_path: Path, share: float) -> None:
    url = f"sqlite:///{tmp_path}/quota.db"
    granted = int(sum(map(ledger_worker.cost_of, range(REQUESTS))) * share)
    Ledger(url).grant("acme", granted)
    run_with_kills(url, lambda: None)
    check_sums(url, granted)


@pytest.mark.timeout(TIMEOUT_S)
def test_four_processes_charge_each_request_once_although_postgresql_crashes() -> None:
    with PostgresServer() as server:
        granted = sum(map(ledger_worker.cost_of, range(REQUESTS))) * 2
        Ledger(server.url).grant("acme", granted)

        def crash() -> None:
            server.kill()
            server.start()

        run_with_kills(server.url, crash)
        check_sums(server.url, granted)


@pytest.mark.timeout(TIMEOUT_S)
def test_requests_are_charged_as_they_were_served_although_everything_crashes(tmp_path: Path) -> None:
    """Gates with a limit in Redis and a quota in PostgreSQL, in four processes. What the workers have noted themselves
    and what is in the ledger are the same, except for requests that were in progress when a worker was killed."""
    requests = REQUESTS * 25
    with PostgresServer() as postgres, RedisServer() as redis:
        kills = serve_with_kills(postgres, redis, tmp_path, requests)
        with closing(Ledger(postgres.url)) as ledger:
            with QuotaMeter(ledger, journal=tmp_path / "journal") as meter:
                meter.recover()
            assert [*(tmp_path / "journal").iterdir()] == []
            served = {*served_requests(tmp_path)}
            charged = charged_requests(postgres.url)
            assert served <= {*charged}, "nothing was served without a charge"
            assert len(charged) - len(served) <= kills
            assert all(amount == cost_of(request) for request, amount in charged.items())
            for account in ("rich", "poor"):
                summary = ledger.summary(f"units/{account}")
                amount = sum(cost_of(request) for request in charged if account_of(request) == account)
                assert (summary.charged, summary.held) == (amount, 0)
                assert amount <= summary.granted == allowances_of(requests)[account]
                assert all(entry.uncovered == 0 for entry in ledger.entries(summary.account))
            assert {request for request in range(requests) if account_of(request) == "rich"} <= served
            assert ledger.summary("units/poor").available < COST * WORKERS + FIRST_LEASE * WORKERS
            entries = ledger.newest_number()
            assert entries < requests / 20 + 500
            assert ledger.verify() == []
            check_tampering(ledger, postgres.url, entries)


def serve_with_kills(postgres: PostgresServer, redis: RedisServer, directory: Path, requests: int) -> int:
    """Run the workers until all requests are served or refused; returns how many of them were killed."""

    def start(worker: int) -> subprocess.Popen[bytes]:
        where = (postgres.url, redis.url, f"{directory}", f"{worker}", f"{WORKERS}", f"{requests}")
        command = [sys.executable, "-m", "support.gate_worker", *where]
        return subprocess.Popen(command, cwd=TESTS, stdout=subprocess.PIPE)

    workers = [start(worker) for worker in range(WORKERS)]
    chance, kills = random.Random(5), 0
    while any(worker.poll() is None for worker in workers):
        time.sleep(chance.uniform(0.1, 0.6) * (PAUSES if kills < KILLS else 1))
        if kills < KILLS:
            kills += 1
            at = chance.randrange(WORKERS)
            workers[at].kill()
            if kills % 2:
                redis.kill()
            if kills % 3 != 1:
                postgres.kill()
            workers[at].communicate()
            workers[at] = start(at)
            if kills % 3 != 1:
                postgres.start()
            if kills % 2:
                redis.start()
    for worker in workers:
        printed, _ = worker.communicate()
        assert (worker.returncode, printed) == (0, b"done\n")
    return kills


def charged_requests(url: str) -> dict[int, int]:
    """The amounts of all usage records by the number of the request; their ids are unique in the ledger."""
    with psycopg.connect(url) as connection:
        rows = connection.execute("SELECT reference, amount FROM headgate_ledger_usage").fetchall()
    found = {int(reference.split()[-1]): amount for reference, amount in rows}
    assert len(found) == len(rows), "each request has one record"
    return found


def check_tampering(ledger: Ledger, url: str, entries: int) -> None:
    """A change of a single row is found, wherever it is."""
    chance = random.Random(7)
    with psycopg.connect(url, autocommit=True) as connection:
        (records,) = connection.execute("SELECT max(number) FROM headgate_ledger_usage").fetchone() or (0,)
        for table, most in (("headgate_ledger", entries), ("headgate_ledger_usage", records)):
            number = chance.randint(1, most)
            change = f"UPDATE {table} SET amount = amount + %s WHERE number = %s"
            connection.execute(change.encode(), (1, number))
            assert ledger.verify() != []
            connection.execute(change.encode(), (-1, number))
    assert ledger.verify() == []
