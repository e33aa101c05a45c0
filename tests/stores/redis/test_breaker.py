"""When a server is not asked any more: after failures in a row, or when most fail; never for one moment's trouble."""

from __future__ import annotations

import pytest
from hiredis import ReplyError

from headgate import StoreTimeout, StoreUnavailable
from headgate.stores.redis.batch_protocol import ConnectionLost, NotSent, public, refusal
from headgate.stores.redis.breaker import (
    FAILURE_SPACING_S,
    MAX_FAILURES,
    MIN_INCIDENTS,
    WINDOW_S,
    CircuitBreaker,
    CircuitBreakers,
    CircuitOpen,
)
from headgate.stores.redis.encoding import Node

GONE = StoreUnavailable("nobody is there")


class Stopwatch:
    def __init__(self) -> None:
        self.seconds = 1_000.0

    def __call__(self) -> float:
        return self.seconds


class Watched(CircuitBreaker):
    """A breaker on a clock that stands still, which counts how often it opened."""

    def __init__(self) -> None:
        self.clock = Stopwatch()
        self.times_opened = 0
        super().__init__(self._count, self.clock)

    def _count(self) -> None:
        self.times_opened += 1

    def fail_after(self, seconds: float) -> bool:
        self.clock.seconds += seconds
        self.fail(GONE)
        return self.is_open


@pytest.fixture
def breaker() -> Watched:
    return Watched()


def test_failures_in_a_row_open_it_at_the_fifth(breaker: Watched) -> None:
    assert MAX_FAILURES == 5
    assert [breaker.fail_after(2 * FAILURE_SPACING_S) for _ in range(6)] == [False] * 4 + [True] * 2
    assert breaker.times_opened == 1
    assert (breaker.opened_at, breaker.reason) == (pytest.approx(1_000 + 10 * FAILURE_SPACING_S), "nobody is there")


def test_what_breaks_in_one_moment_is_one_failure(breaker: Watched) -> None:
    assert not any(breaker.fail_after(FAILURE_SPACING_S / 1_000) for _ in range(900))
    assert [breaker.fail_after(2 * FAILURE_SPACING_S) for _ in range(4)] == [False] * 3 + [True]


def test_answer_in_between_begins_the_row_anew(breaker: Watched) -> None:
    for _ in range(3):
        assert [breaker.fail_after(1) for _ in range(3)] == [False] * 3
        for _ in range(100):
            breaker.succeed()
    assert not breaker.is_open


def test_where_half_of_all_fails_it_opens_though_the_other_half_is_answered(breaker: Watched) -> None:
    opened = []
    for _ in range(MIN_INCIDENTS):
        breaker.succeed()
        opened.append(breaker.fail_after(0.1))
    assert opened == [False] * (MIN_INCIDENTS - 1) + [True]


def test_where_most_is_answered_it_stays_closed(breaker: Watched) -> None:
    for _ in range(200):
        breaker.succeed()
        breaker.succeed()
        assert not breaker.fail_after(0.1)


def test_failures_of_long_ago_do_not_count(breaker: Watched) -> None:
    for _ in range(50):
        breaker.succeed()
        assert not breaker.fail_after(WINDOW_S / (MIN_INCIDENTS - 1) + 0.01)


def test_it_opens_anew_only_after_a_row_of_its_own(breaker: Watched) -> None:
    for _ in range(5):
        breaker.fail_after(1)
    breaker.close()
    assert not breaker.is_open
    assert [breaker.fail_after(1) for _ in range(5)] == [False] * 4 + [True]
    assert breaker.times_opened == 2


def test_open_breaker_reports_the_reason_and_no_charge(breaker: Watched) -> None:
    for _ in range(5):
        breaker.fail_after(1)
    told = public(breaker.refusal())
    assert type(told) is StoreUnavailable
    assert str(told) == "nobody is there (circuit breaker open)"
    assert not told.may_have_happened


def test_each_server_has_its_own_and_sentinels_have_none() -> None:
    breakers, opened = CircuitBreakers(), []
    breakers.on_open = opened.append
    one, other, sentinel = Node("a", 1), Node("b", 2), Node("c", 3, "sentinel")
    clock = Stopwatch()
    for node in (one, other, sentinel):
        breakers[node].now = clock
    for _ in range(9):
        clock.seconds += 1
        breakers.fail(one, GONE)
        breakers.fail(sentinel, GONE)
        breakers.succeed(other)
    assert opened == [one]
    assert list(breakers.open_breakers()) == [one]
    breakers.reset()
    assert not breakers.open_breakers()


@pytest.mark.parametrize(
    ("error", "may_have_happened"),
    [
        (NotSent("not sent"), False),
        (ConnectionLost("lost on the way"), True),
        (CircuitOpen("not asked"), False),
        (StoreTimeout("late"), True),
        (StoreUnavailable("refused"), False),
    ],
)
def test_error_says_whether_a_request_may_have_been_counted(error: StoreUnavailable, may_have_happened: bool) -> None:
    assert public(error).may_have_happened is may_have_happened
    assert type(public(error)) in (StoreUnavailable, StoreTimeout)


REFUSALS = [
    *("BUSY", "CLUSTERDOWN", "LOADING", "MASTERDOWN", "MISCONF", "NOAUTH", "NOPERM", "NOREPLICAS", "OOM", "READONLY"),
    "WRONGPASS",
]


@pytest.mark.parametrize("word", REFUSALS)
def test_server_that_says_it_does_not_serve_has_failed(word: str) -> None:
    assert isinstance(refusal(ReplyError(f"{word} for some reason")), StoreUnavailable)


@pytest.mark.parametrize("word", ["NOSCRIPT", "MOVED 1 a:1", "ASK 1 a:1", "TRYAGAIN", "WRONGTYPE", "ERR syntax"])
def test_server_that_says_something_else_serves(word: str) -> None:
    assert refusal(ReplyError(f"{word} and so on")) is None
    assert refusal([1, 2, 3]) is None
