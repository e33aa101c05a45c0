"""External sorting: any order of requests, in bounded memory, with equal times in the order of the log."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from headgate.replay import sorting
from headgate.replay.sorting import sort_by_time


@given(st.lists(st.integers(0, 50), max_size=200), st.integers(2, 30), st.integers(1, 40))
def test_sorting_is_stable_whatever_the_size_of_the_buffer(times: list[int], buffer_size: int, batch_size: int) -> None:
    requests = [(at, "GET", f"/{number}", 200, ("192.0.2.1", None, ()), None) for number, at in enumerate(times)]
    batches = [requests[start : start + batch_size] for start in range(0, len(requests), batch_size)]
    block_size, sorting.BLOCK_SIZE = sorting.BLOCK_SIZE, 3  # type: ignore[misc]
    try:
        found = [request for batch in sort_by_time(iter(batches), buffer_size=buffer_size) for request in batch]
    finally:
        sorting.BLOCK_SIZE = block_size  # type: ignore[misc]
    assert found == sorted(requests, key=lambda request: request[0])
