"""A node in a process of its own, for tests of rollouts of scripts: checks without pause, and judges every answer.

Arguments: the store and the namespace. The name of the node is in HEADGATE_NODE. It ends with its standard input, and
prints its counts as JSON.
"""

from __future__ import annotations

import itertools
import json
import sys
import threading
import time
from datetime import timedelta

from headgate import Limit, Limiter
from headgate.errors import StoreError

QUOTA = 1000


def main(url: str, namespace: str) -> None:
    limit = Limit(QUOTA, timedelta(days=30), name="per-client")  # so long that nothing is refilled
    counts = {"checks": 0, "wrong": 0, "failed": 0}
    is_over = threading.Event()
    threading.Thread(target=lambda: (sys.stdin.read(), is_over.set()), daemon=True).start()
    with Limiter(url, namespace=namespace, remember=0, lease=0, budget=2.0) as limiter:
        limiter.engine.join_fleet()
        print("ready", flush=True)
        node = f"{time.monotonic_ns()}"
        for client in itertools.count():
            for before in range(QUOTA):
                if is_over.is_set():
                    print(json.dumps(counts), flush=True)
                    return
                counts["checks"] += 1
                try:
                    decision = limiter.check(limit.by(f"{node}-{client}"))
                    counts["wrong"] += (decision.allowed, decision.remaining) != (True, QUOTA - 1 - before)
                except StoreError:
                    counts["failed"] += 1
                    break  # it is unknown what was charged
                time.sleep(0.0005)


if __name__ == "__main__":
    main(*sys.argv[1:])
