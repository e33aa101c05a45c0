"""`python -m bench.quotas`: charges per second of one process with SQLite and PostgreSQL, and reads of a large ledger.

It also compares requests through a gate with a limit in Redis, and with a quota besides, by CPU time of their thread.

Each measurement reports the rate by the clock, the rate by CPU time of this process, and the charges per transaction of
the ledger. Exit code 1 if a target is missed; on a busy machine, only the CPU time means something.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from contextlib import ExitStack, closing
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from headgate import Calendar
from headgate.control.config.engine import write_transaction
from headgate.gate import Gate
from headgate.policy import read
from headgate.quotas import Ledger, QuotaMeter, QuotaPlan
from headgate.quotas.entries import EntryDraft
from headgate.quotas.ledger import WRITE_LOCK
from headgate.quotas.storage import StateCache, WriteBatch
from headgate.quotas.usage_alerts import UsageMonitor
from headgate.testing import FakeRequest

sys.path.append(str(Path(__file__).parents[1] / "tests"))
from support.postgres import PostgresServer
from support.servers import RedisServer

if TYPE_CHECKING:
    from collections.abc import Callable

MIN_CHARGES_PER_S: Final = 20_000
MIN_CHARGES_PER_WRITE: Final = 100
MAX_VERIFY_S: Final = 20.0
MAX_STATEMENT_S: Final = 1.0
MAX_RATIO: Final = 1.5
"""Of a check with a quota to one without."""
ROUNDS: Final = 60
ACCOUNTS: Final = 20
MICROSECONDS_PER_DAY: Final = 86_400_000_000
BATCH: Final = 10_000


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.quotas", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a fifth of everything, for a first look")
    share = 5 if parser.parse_args().quick else 1
    is_met = True
    with ExitStack() as stack:
        directory = stack.enter_context(tempfile.TemporaryDirectory(prefix="headgate-bench-"))
        postgres = stack.enter_context(PostgresServer())
        urls = {"SQLite": f"sqlite:///{directory}/quota.db", "PostgreSQL": postgres.url}
        print("| ledger | journal | charges/s | charges/s of CPU | charges per transaction |")
        print("| --- | --- | ---: | ---: | ---: |", flush=True)
        for name, url in urls.items():
            with closing(Ledger(url)) as ledger:
                for journal in (None, directory):
                    is_met &= _charges(name, ledger, journal, 400_000 // share)
        print("\n| ledger | entries | verify | CPU | statement of one account | of a month |")
        print("| --- | ---: | ---: | ---: | ---: | ---: |", flush=True)
        for name, url in {**urls, "SQLite": f"sqlite:///{directory}/large.db"}.items():
            with closing(Ledger(url)) as ledger:
                is_met &= _reads(name, ledger, 1_000_000 // share)
        redis = stack.enter_context(RedisServer())
        print("\n| request through a gate | CPU of its thread |")
        print("| --- | ---: |", flush=True)
        is_met &= _gates(redis.url, f"sqlite:///{directory}/gate.db", 500 // share)
    print("\nall targets met" if is_met else "\na target is missed")
    return 0 if is_met else 1


def _charges(name: str, ledger: Ledger, journal: str | None, count: int) -> bool:
    """Charge requests with an id each to some accounts with a plan, as fast as one thread can."""
    plan = QuotaPlan(f"bench {os.urandom(4).hex()}", 10**9, Calendar("month"))
    accounts = [plan.account(f"client-{number}") for number in range(ACCOUNTS)]
    with QuotaMeter(ledger, journal=journal, wait_s=10) as meter:
        for account in accounts:
            assert meter.charge(account, 1, plan=plan)
        writes = meter.stats().ledger_writes
        began_s, began_cpu_s = time.perf_counter(), time.process_time()
        for number in range(count):
            assert meter.charge(accounts[number % ACCOUNTS], 1, id=f"{plan.name}/{number}", plan=plan)
        while meter.stats().unwritten:
            meter.flush()
        wall_s, cpu_s = time.perf_counter() - began_s, time.process_time() - began_cpu_s
        per_write = count / max(1, meter.stats().ledger_writes - writes)
    kept = "no" if journal is None else "yes"
    print(f"| {name} | {kept} | {count / wall_s:,.0f} | {count / cpu_s:,.0f} | {per_write:,.0f} |", flush=True)
    return count / wall_s >= MIN_CHARGES_PER_S and per_write >= MIN_CHARGES_PER_WRITE


def _gates(store: str, ledger: str, count: int) -> bool:
    """Requests through a gate, with and without a quota, in turns: the CPU time of the thread that serves them. That of
    the thread that writes charges is in the charges per second of CPU."""
    burst = {"name": "burst", "by": "tenant", "bucket": "1000000000/minute"}
    quota = {"name": "exports", "by": "tenant", "quota": "1000000000/month"}
    policies: dict[str, dict[str, Any]] = {
        "with a limit in Redis": {"limits": [burst]},
        "with a quota besides": {"limits": [burst, quota], "quotas": {"ledger": ledger, "budget": "60 s"}},
    }
    settings = {"store": {"budget": "5 s"}}
    requests = [FakeRequest("/exports", headers={"x-tenant": f"client-{number}"}) for number in range(ACCOUNTS)]
    identities = {"tenant": lambda request: request.header("x-tenant")[0]}
    times: dict[str, list[float]] = {name: [] for name in policies}
    with ExitStack() as stack:
        gates = {
            name: stack.enter_context(
                closing(Gate(read(json.dumps(policy | settings), format="json"), store, identities=identities))
            )
            for name, policy in policies.items()
        }
        for _ in range(ROUNDS):
            for name, gate in gates.items():
                began_s = time.thread_time()
                for number in range(count):
                    assert gate.admit(requests[number % ACCOUNTS]).allowed
                times[name].append((time.thread_time() - began_s) / count * 1e6)
    for name, each in times.items():
        print(f"| {name} | {min(each):.1f} us |", flush=True)
    without, with_quota = (min(each) for each in times.values())
    print(f"\na quota costs {with_quota / without:.2f} times a check without one")
    return with_quota <= MAX_RATIO * without


def _reads(name: str, ledger: Ledger, count: int) -> bool:
    """Verify a ledger, and open statements of an account with most of its entries."""
    _fill(ledger, count)
    began_s, began_cpu_s = time.perf_counter(), time.process_time()
    calls: list[int] = []
    problems = ledger.verify(progress=lambda done, total: calls.append(done))
    verify_s, cpu_s = time.perf_counter() - began_s, time.process_time() - began_cpu_s
    assert problems == [], problems[:3]
    assert len(calls) > 10, "progress is reported"
    now_us = ledger.clock.now_us()
    whole_s = _time(lambda: ledger.statement("large", 0, now_us + 1))
    month_s = _time(lambda: ledger.statement("large", now_us - 31 * MICROSECONDS_PER_DAY, now_us + 1))
    entries = ledger.newest_number()
    print(
        f"| {name} | {entries:,} | {verify_s:.1f} s | {cpu_s:.1f} s | {whole_s:.3f} s | {month_s:.3f} s |", flush=True
    )
    return verify_s * 1_000_000 / entries <= MAX_VERIFY_S and max(whole_s, month_s) <= MAX_STATEMENT_S


def _time(call: Callable[[], object]) -> float:
    began_s = time.perf_counter()
    call()
    return time.perf_counter() - began_s


def _fill(ledger: Ledger, count: int) -> None:
    """Charge one account until the ledger has so many entries, in large transactions."""
    ledger.grant("large", 10**12)
    cache, monitor = StateCache(), UsageMonitor()
    for start in range(ledger.newest_number(), count, BATCH):
        with write_transaction(ledger.engine, lock=WRITE_LOCK) as connection:
            batch = WriteBatch(connection, cache, monitor, ledger.clock.now_us())
            state = batch.state("large")
            for at in range(start, min(start + BATCH, count)):
                batch.append(state, EntryDraft(f"fill-{at}", "commit", 1, reference=f"GET /{at}"))
            batch.write()
            batch.keep_states()


if __name__ == "__main__":
    raise SystemExit(main())
