"""A node as a process: `python canary_node.py CONFIG_URL STORE_URL NAMESPACE NODE` sends itself 200 requests per second
until its standard input ends, and then prints the outcomes by the role that the node had in a canary."""

from __future__ import annotations

import json
import sys
import threading
import time
from collections import Counter
from contextlib import closing

from headgate.control.plane import ControlPlane
from headgate.gate.gate import Gate
from headgate.testing import FakeRequest

SECRET = "for tests only, as long as it has to be"
CLIENTS = 50
PAUSE_S = 0.005


def main(config_url: str, store_url: str, namespace: str, node: str) -> None:
    plane = ControlPlane(config_url, log=None, node=node, metrics=False)
    over = threading.Event()
    threading.Thread(target=lambda: (sys.stdin.read(), over.set()), daemon=True).start()
    outcomes: Counter[str] = Counter()
    with closing(Gate(control=plane, store=store_url, namespace=namespace, secret=SECRET, budget=1.0)) as gate:
        print("ready", flush=True)
        number = 0
        while not over.is_set():
            before = gate.policy_canary
            admission = gate.admit(FakeRequest(peer=f"203.0.113.{number % CLIENTS}"))
            after = gate.policy_canary
            if before == after:  # otherwise the role is not known
                role = "alone" if after is None else after[1]
                outcomes[f"{role} {'allowed' if admission.allowed else 'denied'}"] += 1
            number += 1
            time.sleep(PAUSE_S)
    print(json.dumps(outcomes), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
