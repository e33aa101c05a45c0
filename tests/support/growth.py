"""Whether something that is done again and again keeps what it has borrowed."""

from __future__ import annotations

import gc
import tracemalloc
from itertools import pairwise
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable


def assert_nothing_grows(once: Callable[[], None], *, rounds: int = 2000) -> None:
    def kept_after_rounds() -> int:
        for _ in range(rounds):
            once()
        gc.collect()
        return tracemalloc.get_traced_memory()[0]

    tracemalloc.start()
    try:
        kept = [kept_after_rounds() for _ in range(4)]
    finally:
        tracemalloc.stop()
    # A reference that is not given back keeps 16 bytes a round, at least, and in each; others may keep something once.
    assert min(after - before for before, after in pairwise(kept)) < 8 * rounds
