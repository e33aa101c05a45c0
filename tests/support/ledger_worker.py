"""A process that charges a list of requests to a ledger, and repeats what failed, until all are served or refused.

python -m support.ledger_worker URL SEED FIRST LAST
"""

from __future__ import annotations

import random
import sys

from headgate.quotas import Ledger, LedgerUnavailable

__all__ = ["cost_of", "estimate_of", "main"]


def cost_of(request: int) -> int:
    """The amount that a request really uses."""
    return request * 7 % 5 + 1


def estimate_of(request: int) -> int:
    return request % 3 + 3


def main(url: str, seed: int, first: int, last: int) -> None:
    requests = [request for request in range(first, last) for _ in range(1 + request % 2)]  # every other one twice
    random.Random(seed).shuffle(requests)
    ledger = open_ledger(url)
    for request in requests:
        serve(ledger, request)
    print("done", flush=True)


def open_ledger(url: str) -> Ledger:
    while True:
        try:
            return Ledger(url)
        except LedgerUnavailable:
            continue


def serve(ledger: Ledger, request: int) -> None:
    while True:
        try:
            if ledger.reserve("acme", estimate_of(request), id=f"request {request}") is not None:
                ledger.commit(f"request {request}", cost_of(request))
        except LedgerUnavailable:
            continue
        return


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:5]))
