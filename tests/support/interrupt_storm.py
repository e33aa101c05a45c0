"""A program: signal handlers raise in the middle of checks, again and again, while other threads check as well.

Run by test_interrupts.py, in a process of its own: what the handlers raise must not hit the test runner.
Prints one line of JSON.
"""

from __future__ import annotations

import json
import signal
import sys
import threading
import time
from datetime import timedelta
from typing import Any

from headgate import Limit, Limiter, StoreError


class Interrupted(BaseException):
    pass


armed = [False]
"""Whether the handler raises: only in a check, as this program itself would not survive it elsewhere."""


def interrupt(*_: object) -> None:
    if armed[0]:
        raise Interrupted


def main(url: str, name: str, mode: Any, every: float, budget: float, seconds: float, front: bool) -> dict[str, Any]:
    limit = Limit(10**9, timedelta(days=300), algorithm="fixed_window", name=name)
    options: dict[str, Any] = {} if front else {"lease": 0, "remember": 0}
    limiter = Limiter(url, on_failure=mode, budget=budget, **options)
    mine, keys = limit.by("main"), [limit.by(str(number)) for number in range(3)]
    for key in (mine, *keys):
        limiter.check(key)
    # When each check began, how long it took, and whether it was exact.
    told: list[list[tuple[float, float, bool]]] = [[] for _ in keys]
    stopped: list[bool] = []

    def work(index: int) -> None:
        while not stopped:
            began = time.monotonic()
            try:
                exact = limiter.check(keys[index]).degraded is None
            except StoreError:
                exact = False
            told[index].append((began, time.monotonic() - began, exact))
            time.sleep(0.0005)

    threads = [threading.Thread(target=work, args=(index,), daemon=True) for index in range(len(keys))]
    for thread in threads:
        thread.start()
    interrupts, end = 0, time.monotonic() + seconds
    signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, every, every)
    while time.monotonic() < end:
        try:
            armed[0] = True
            limiter.check(mine)
            armed[0] = False
        except (Interrupted, StoreError):
            armed[0] = False  # no signal is handled before this, as there is no call
            interrupts += 1
    signal.setitimer(signal.ITIMER_REAL, 0)
    over = time.monotonic()
    mine_first = limiter.check(mine).degraded
    time.sleep(1.5)
    stopped.append(True)
    for thread in threads:
        thread.join(10)
    alive = sum(thread.is_alive() for thread in threads)
    time.sleep(0.5)  # what was prepaid is given back
    counted = []
    for key in (mine, *keys):
        before = limiter.check(key, cost=0).remaining
        began = time.monotonic()
        decision = limiter.check(key)
        counted.append((decision.degraded is None, before - decision.remaining, time.monotonic() - began))
    during = [row for rows in told for row in rows if row[0] < over]
    after = [row for rows in told for row in rows if row[0] > over + 0.5]
    return {
        "alive": alive,
        "interrupts": interrupts,
        "mine_first": mine_first,
        "counted": counted,
        "during": len(during),
        "exact_during": sum(exact for *_, exact in during),
        "slowest_during": max(seconds for _, seconds, _ in during),
        "after": [sum(row[0] > over + 0.5 for row in rows) for rows in told],
        "inexact_after": [row for row in after if not row[2]][:5],
        "slowest_after": max(seconds for _, seconds, _ in after),
        "threads": threading.active_count(),
    }


if __name__ == "__main__":
    url, name, mode, every, budget, seconds, front = sys.argv[1:]
    print(json.dumps(main(url, name, mode, float(every), float(budget), float(seconds), front == "front")))
