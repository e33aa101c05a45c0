"""What a key costs to remember: the growth of a fresh process that has seen a number of keys once each."""

import gc
import os
import subprocess
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

from bench.contenders import SYNC, Contender
from bench.correctness import WrongAnswerError
from bench.expressions import open_contender, verdict
from bench.setups import Setting

# One check of ten a day is not forgiven for hours: a store cannot look small by forgetting it.
QUOTA = 10
SAMPLED = 100


def bytes_per_key(contender: Contender, keys: int) -> float:
    command = [sys.executable, "-m", "bench.memory_footprint", contender.name, str(keys)]
    finished = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    return float(finished.stdout)


def _measured(contender: Contender, keys: int) -> float:
    with open_contender(contender, Setting("memory://", QUOTA, timedelta(days=1), keys=keys + 1)) as names:
        passes = verdict(contender, names, contender.without_waiting or contender.one)
        passes("the first")
        gc.collect()
        before = _resident_bytes()
        for number in range(keys):
            passes(f"user-{number:09}")  # made here and dropped: what is kept of it is the store's to pay
        gc.collect()
        grown = _resident_bytes() - before
        _expect_remembered(contender, passes, keys)
    return grown / keys


def _resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def _expect_remembered(contender: Contender, passes: Callable[[str], bool], keys: int) -> None:
    for number in range(0, keys, max(1, keys // SAMPLED)):
        left = [passes(f"user-{number:09}") for _ in range(QUOTA)]
        if left != [True] * (QUOTA - 1) + [False]:
            raise WrongAnswerError(f"{contender.name} forgot the check of key {number}")


if __name__ == "__main__":
    name, count = sys.argv[1:]
    chosen = next(contender for contender in SYNC if contender.name == name)
    print(_measured(chosen, int(count)))
