"""Clients that share a limit and know nothing of each other use it fully, and are hardly ever rejected."""

from __future__ import annotations

import pytest
from bench.clients import KINDS, simulate

from headgate.clients import Quota
from headgate.clients.pacing import QuotaPacer

POLITE, SHARED, URLLIB3, NAIVE = KINDS


def test_fifty_clients_use_the_limit_without_rejections() -> None:
    result = simulate(POLITE, 50, 30, start_within=2)
    assert result.used >= 0.97
    assert result.rejection_rate < 0.01


def test_clients_that_share_a_store_use_the_limit_exactly() -> None:
    result = simulate(SHARED, 50, 20, start_within=2)
    assert result.used >= 0.94  # the burst of the server is left to it
    assert result.rejection_rate < 0.01


def test_first_requests_of_clients_with_a_store_are_taken_from_the_shared_queue() -> None:
    """They are sent before the limit is known, and would come on top of a queue that uses all of it."""
    result = simulate(SHARED, 250, 40, start_within=20)
    assert result.used >= 0.94
    assert result.rejection_rate < 0.01


def test_many_clients_settle() -> None:
    """The long form, with a thousand of them and the numbers of docs/clients.md, is `make bench-clients`."""
    result = simulate(POLITE, 200, 40, start_within=20)
    assert result.used >= 0.9
    assert result.rejection_rate < 0.05


def test_a_response_changes_the_time_of_the_next_request() -> None:
    """Otherwise clients that send rarely react to what the last but one response said, and overshoot together."""

    def next_at(remaining: int) -> float:
        pacer = QuotaPacer(random=lambda: 0.5)
        for number, left in enumerate((100, 60, remaining)):
            pacer.take(10.0 * number)
            pacer.learn(Quota(None, 100, left, 1, 1), 10.0 * number + 0.1)
        return pacer.next_at(20.1)

    assert next_at(5) > next_at(50) > next_at(95)


@pytest.mark.parametrize("kind", [URLLIB3, NAIVE])
def test_usual_retries_are_rejected_often(kind: str) -> None:
    """Otherwise the simulation would not be hard enough to show anything."""
    assert simulate(kind, 50, 10, start_within=2).rejection_rate > 0.05
