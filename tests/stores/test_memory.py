"""The store in the process: bounded whatever comes, merciful in the right order, and exact without a lock on its short
path. (That it counts exactly under threads is shown in integration/test_concurrency.py.)"""

from __future__ import annotations

import dis
import gc
import itertools
import logging
import signal
import subprocess
import sys
import threading
import tracemalloc
from datetime import timedelta
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headgate import Key, Limit, Limiter
from headgate.stores.memory import MemoryStore
from headgate.stores.operations import Refund
from headgate.testing import FakeClock
from support.servers import wait_until

if TYPE_CHECKING:
    from collections.abc import Callable

HOUR = timedelta(hours=1)
MINUTE = timedelta(minutes=1)
SECOND = timedelta(seconds=1)
ALGORITHMS = ("concurrency", "fixed_window", "gcra", "leaky_bucket", "sliding_log", "sliding_window", "token_bucket")
START_US = 1_763_251_200_000_000


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock(START_US)


@pytest.fixture
def open_limiter(clock: FakeClock) -> Callable[[int], Limiter]:
    return lambda max_keys: Limiter(clock=clock, max_keys=max_keys)


# Bounded


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("step", [0, 0.5, 90], ids=["at once", "in passing", "slowly"])
def test_there_are_never_more_keys_than_allowed(
    open_limiter: Callable[[int], Limiter], clock: FakeClock, algorithm: str, step: float
) -> None:
    limiter, limit = open_limiter(100), Limit(5, MINUTE, algorithm=algorithm)
    for number in range(1_000):
        assert limiter.check(limit.by(number)).allowed
        clock.advance(step)
        assert limiter.stats.keys <= 100


def test_bound_is_on_all_limits_together(open_limiter: Callable[[int], Limiter]) -> None:
    limiter = open_limiter(100)
    limits = [Limit(5, HOUR, algorithm=algorithm, name=f"{number}") for number in range(5) for algorithm in ALGORITHMS]
    for number in range(200):
        limiter.check(*[limit.by(number) for limit in limits])
        assert limiter.stats.keys <= 100


def test_smallest_store_holds_one_key(open_limiter: Callable[[int], Limiter]) -> None:
    limiter, limit = open_limiter(1), Limit(2, HOUR)
    for number in range(10):
        assert limiter.check(limit.by(number)).remaining == 1
        assert limiter.stats.keys == 1
    assert [limiter.check(limit.by(9)).allowed for _ in range(2)] == [True, False]


def test_bound_holds_after_many_resets(open_limiter: Callable[[int], Limiter]) -> None:
    """What was reset must not stand in the way when something has to be forgotten."""
    limiter, limit = open_limiter(100), Limit(5, HOUR)
    for number in range(3_000):
        limiter.check(limit.by("reset", number))
        limiter.reset(limit.by("reset", number))
    for number in range(300):
        limiter.check(limit.by(number), cost=2)
        assert limiter.stats.keys <= 100


def test_reset_key_can_be_evicted_again(open_limiter: Callable[[int], Limiter], clock: FakeClock) -> None:
    """Known twice to the order of forgetting, but only once to be forgotten."""
    limiter, limit = open_limiter(10), Limit(5, SECOND)
    for _ in range(3):
        for number in range(10):
            limiter.check(limit.by(number))
            limiter.reset(limit.by(number))
    for number in range(10):
        limiter.check(limit.by(number))
    clock.advance(3600)
    for number in range(10, 40):
        assert limiter.check(limit.by(number)).allowed
        assert limiter.stats.keys <= 10


def test_key_that_is_reset_again_and_again_costs_no_memory(open_limiter: Callable[[int], Limiter]) -> None:
    limiter, key = open_limiter(1_000), Limit(5, timedelta(days=30)).by("ada")
    limiter.check(key)
    tracemalloc.start()
    try:
        for _ in range(10_000):
            limiter.reset(key)
            limiter.check(key)
        # What the store itself keeps: threads that other tests have left behind take memory, too.
        kept = tracemalloc.take_snapshot().filter_traces(
            [
                tracemalloc.Filter(True, f"*headgate/{place}*")
                for place in ("stores/memory", "stores/_space", "algorithms")
            ]
        )
    finally:
        tracemalloc.stop()
    # Each reset leaves an entry of some 50 bytes, which are swept now and then.
    assert sum(trace.size for trace in kept.traces) < 50_000


def test_refunds_are_remembered_within_bounds(open_limiter: Callable[[int], Limiter]) -> None:
    limiter, key = open_limiter(100), Limit(1_000, HOUR).by("ada")
    limiter.check(key, cost=1_000)
    assert all(limiter.refund(key, 1, id=f"{number}") for number in range(900))
    assert not limiter.refund(key, 1, id="899")
    assert len(limiter.engine.store._ids) <= 100


def test_ids_are_recorded_within_bounds_and_expire(
    open_limiter: Callable[[int], Limiter], clock: FakeClock, caplog: pytest.LogCaptureFixture
) -> None:
    limiter, limit = open_limiter(100), Limit(1_000, HOUR)
    for number in range(300):
        limiter.check(limit.by("ada"), id=f"{number}")
    assert len(limiter.engine.store._ids) == 100
    assert limiter.stats.keys == 1
    assert "full at 100 ids" in caplog.text
    assert limiter.check(limit.by("ada"), id="299").remaining == 700
    for _ in range(1_000):  # what is taken back again and again leaves nothing behind, either
        limiter.acquire(Limit(1, HOUR, burst=9, algorithm="leaky_bucket").by("ada"), id="a", timeout=0)
    assert len(limiter.engine.store._ids._due) < 1_000
    clock.advance(3_600)
    limiter.check(limit.by("bob"), id="300")
    assert len(limiter.engine.store._ids) == 1


def test_closing_forgets_everything(open_limiter: Callable[[int], Limiter]) -> None:
    limiter, key = open_limiter(100), Limit(1, HOUR).by("ada")
    limiter.check(key)
    limiter.close()
    assert limiter.stats.keys == 0


# Who is forgotten


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_what_is_as_new_is_forgotten_in_passing(
    open_limiter: Callable[[int], Limiter], clock: FakeClock, algorithm: str
) -> None:
    """Without a thread that sweeps, and long before the store is full."""
    limiter, limit = open_limiter(100_000), Limit(5, SECOND, algorithm=algorithm)
    for number in range(1_000):
        limiter.check(limit.by(number))
    clock.advance(3_600)
    for number in range(1_000):
        limiter.check(limit.by("later", number))
    assert limiter.stats == (1_000, 0, 0)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_what_is_as_new_goes_before_any_debt(
    open_limiter: Callable[[int], Limiter], clock: FakeClock, algorithm: str
) -> None:
    limiter, brief = open_limiter(100), Limit(5, SECOND, algorithm=algorithm, name="brief")
    debtors = [Limit(1, HOUR, algorithm=algorithm, name="long").by(number) for number in range(50)]
    for number, debtor in enumerate(debtors):
        limiter.check(debtor)
        limiter.check(brief.by(number))
    clock.advance(5)
    for number in range(50):
        limiter.check(Limit(1, HOUR, algorithm=algorithm, name="new").by(number))
    assert [limiter.check(debtor).allowed for debtor in debtors] == [False] * 50
    assert (limiter.stats.keys, limiter.stats.forgiven) == (100, 0)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_least_debt_goes_before_the_greatest(open_limiter: Callable[[int], Limiter], algorithm: str) -> None:
    limiter = open_limiter(100)
    great = [Limit(4, HOUR, algorithm=algorithm, name="great").by(number) for number in range(50)]
    for number, debtor in enumerate(great):
        limiter.check(debtor, cost=3)
        limiter.check(Limit(4, MINUTE, algorithm=algorithm, name="small").by(number))
    for number in range(40):
        limiter.check(Limit(4, HOUR, algorithm=algorithm, name="new").by(number), cost=3)
    assert {limiter.peek(debtor).remaining for debtor in great} == {1}
    assert (limiter.stats.evicted, limiter.stats.forgiven) == (40, 40)


# A flood of new keys: pitfall P12


@pytest.mark.parametrize("seconds", [0, 2, 40])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_flood_of_new_keys_frees_no_client_that_is_blocked(
    open_limiter: Callable[[int], Limiter], clock: FakeClock, algorithm: str, seconds: float
) -> None:
    limiter, limit = open_limiter(1_000), Limit(10, MINUTE, burst=None, algorithm=algorithm)
    flood = Limit(10, HOUR, algorithm=algorithm, name="flood")
    blocked = [limit.by("blocked", number) for number in range(20)]
    for key in blocked:
        limiter.check(key, cost=10)
    clock.advance(seconds)
    still = [key for key in blocked if limiter.peek(key).remaining == 0]
    assert len(still) == (0 if seconds == 40 and algorithm in ("gcra", "leaky_bucket", "token_bucket") else 20)
    for number in range(1_000):
        assert limiter.check(limit.by(number)).allowed
        assert limiter.check(flood.by(number)).allowed
        assert limiter.stats.keys <= 1_000
    assert [key for key in still if limiter.check(key).allowed] == []


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_all_keys_but_one_may_be_blocked(open_limiter: Callable[[int], Limiter], algorithm: str) -> None:
    limiter, limit = open_limiter(1_000), Limit(2, MINUTE, algorithm=algorithm)
    blocked = [limit.by(number) for number in range(999)]
    for key in blocked:
        limiter.check(key, cost=2)
    for number in range(100):
        assert limiter.check(limit.by("new", number)).allowed
    assert [key for key in blocked if limiter.check(key).allowed] == []
    assert limiter.stats == (1_000, 99, 99)


CLIENT_EVENTS = st.tuples(
    st.integers(0, 3), st.sampled_from(["drain", "flood"]), st.sampled_from([0, 0, 0.3, 1, 7, 61])
)


@given(st.sampled_from(ALGORITHMS), st.lists(CLIENT_EVENTS, max_size=30))
def test_no_client_is_let_in_before_the_time_that_its_denial_gave(
    algorithm: str, events: list[tuple[int, str, float]]
) -> None:
    """Whatever else is evicted, while there are fewer clients that use up their limit than keys."""
    clock = FakeClock(START_US)
    limiter, limit = Limiter(clock=clock, max_keys=5), Limit(6, timedelta(seconds=10), algorithm=algorithm)
    denied_until_us: dict[Key, int] = {}
    strangers = itertools.count()
    for client, event, pause in events:
        clock.advance(pause)
        key = limit.by(client)
        if event == "flood":
            for _ in range(20):
                limiter.check(limit.by("stranger", next(strangers)))
        if event == "drain":
            limiter.check(key, cost=max(1, limiter.peek(key).remaining))
            denied_until_us[key] = clock.now_us() + limiter.check(key).retry_after_us
        for blocked, until_us in denied_until_us.items():
            assert clock.now_us() >= until_us or not limiter.check(blocked).allowed
        assert limiter.stats.keys <= 5


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_if_all_keys_are_blocked_new_clients_share_one_counter(
    open_limiter: Callable[[int], Limiter], clock: FakeClock, caplog: pytest.LogCaptureFixture, algorithm: str
) -> None:
    limiter, limit = open_limiter(10), Limit(3, MINUTE, algorithm=algorithm)
    blocked = [limit.by("blocked", number) for number in range(10)]
    for key in blocked:
        limiter.check(key, cost=3)
    assert [limiter.check(limit.by("new", number)).allowed for number in range(5)] == [True] * 3 + [False] * 2
    assert [key for key in blocked if limiter.check(key).allowed] == []
    assert limiter.stats == (10, 0, 0)
    assert caplog.messages == [
        "memory store is full (10 keys), and all keys belong to blocked clients: "
        f"{count} requests of other clients were counted together; raise max_keys"
        for count in (1, 2)
    ]
    clock.advance(120)  # all of them are as new
    for number in range(5):
        assert limiter.check(limit.by("new", number), cost=2).allowed
    assert limiter.stats.keys <= 10
    assert limiter.stats.forgiven == 0


def test_lease_in_a_shared_counter_can_be_renewed_and_left(
    open_limiter: Callable[[int], Limiter], clock: FakeClock
) -> None:
    limiter, limit = open_limiter(1), Limit(1, MINUTE, algorithm="concurrency")
    limiter.enter(limit.by("ada"), id="a")
    assert limiter.enter(limit.by("bob"), id="b").allowed
    assert not limiter.enter(limit.by("eve"), id="e").allowed
    clock.advance(59)
    assert limiter.renew(limit.by("bob"), id="b")
    assert limiter.renew(limit.by("ada"), id="a")
    clock.advance(59)
    assert limiter.leave(limit.by("bob"), id="b")
    assert not limiter.leave(limit.by("bob"), id="b")
    assert limiter.enter(limit.by("eve"), id="e").allowed


def test_shared_counter_is_dropped_when_it_is_as_new(open_limiter: Callable[[int], Limiter], clock: FakeClock) -> None:
    limiter, limit = open_limiter(2), Limit(1, SECOND)
    for number in range(3):
        assert limiter.check(limit.by(number)).allowed
    (space,) = limiter.engine.store._tables.values()
    assert len(space.states) == 3
    for number in range(10):
        clock.advance(120)
        assert limiter.check(limit.by(number)).allowed
    assert len(space.states) == limiter.stats.keys <= 2


def test_eviction_uses_the_current_debt(open_limiter: Callable[[int], Limiter], clock: FakeClock) -> None:
    """A debt that grew after its key was first seen is not mistaken for the small one that it was."""
    limiter, limit = open_limiter(100), Limit(100, HOUR)
    for number in range(100):
        limiter.check(limit.by(number))
    limiter.check(limit.by(0), cost=99)
    clock.advance(60)
    for number in range(100, 199):
        limiter.check(limit.by(number))
    assert not limiter.check(limit.by(0), cost=99).allowed
    assert limiter.stats.forgiven == 0


def test_clock_that_steps_back_finds_what_was_owed(open_limiter: Callable[[int], Limiter], clock: FakeClock) -> None:
    limiter, limit = open_limiter(1_000), Limit(5, timedelta(seconds=10))
    limiter.check(limit.by("ada"), cost=5)
    clock.advance(40)
    for number in range(100):
        limiter.check(limit.by(number))
    clock.advance(-40)
    assert not limiter.check(limit.by("ada")).allowed


def test_forgiven_debt_is_counted_and_said_aloud(
    open_limiter: Callable[[int], Limiter], caplog: pytest.LogCaptureFixture
) -> None:
    limiter, limit = open_limiter(10), Limit(5, HOUR)
    with caplog.at_level(logging.WARNING, "headgate"):
        for number in range(10):
            limiter.check(limit.by(number))
        assert caplog.messages == []
        for number in range(10, 30):
            limiter.check(limit.by(number))
    assert limiter.stats == (10, 20, 20)
    assert caplog.messages == [
        f"memory store is full (10 keys): {forgiven} keys were evicted while in use; raise max_keys"
        for forgiven in (1, 2, 4, 8, 16)
    ]


def test_forgetting_what_is_as_new_is_nothing_to_talk_about(
    open_limiter: Callable[[int], Limiter], clock: FakeClock, caplog: pytest.LogCaptureFixture
) -> None:
    limiter, limit = open_limiter(10), Limit(5, SECOND)
    for number in range(100):
        limiter.check(limit.by(number))
        clock.advance(2)
    assert limiter.stats.forgiven == 0
    assert caplog.messages == []


# Threads of its own


def test_there_is_no_thread_in_the_background() -> None:
    before = set(threading.enumerate())
    limiter, room = Limiter(max_keys=10), Limit(2, HOUR, algorithm="concurrency", name="room").by("ada")
    for number in range(100):
        limiter.check(Limit(5, SECOND).by(number))
    assert set(threading.enumerate()) <= before  # those of other tests may end meanwhile
    with limiter.hold(room), limiter.hold(room):
        assert [thread.name for thread in set(threading.enumerate()) - before] == ["headgate-renewals"]
    wait_until(lambda: set(threading.enumerate()) <= before, "the thread that renews to end with the last hold")
    limiter.close()


# The short path


def test_nothing_that_lets_another_thread_run_stands_between_compare_and_set() -> None:
    """CPython hands over the interpreter at calls, at backward jumps and where a function starts, and nowhere else."""
    code = list(dis.get_instructions(MemoryStore.check))
    (store,) = [index for index, step in enumerate(code) if step.opname == "STORE_SUBSCR"]
    last_look = max(index for index, step in enumerate(code[:store]) if step.argval == "_is_locked")
    between = [step.opname for step in code[last_look + 1 : store]]
    assert between.count("IS_OP") == 1
    harmless = (
        *("LOAD_FAST", "BINARY_SUBSCR", "BINARY_OP", "IS_OP", "POP_JUMP", "TO_BOOL", "UNARY_NOT", "NOT_TAKEN"),
        *("CACHE", "NOP", "EXTENDED_ARG"),
    )
    assert [name for name in between if not name.startswith(harmless)] == []
    assert [step.argval for step in code[last_look + 1 : store] if step.opname == "BINARY_OP"] in ([], [26])


@pytest.mark.parametrize("way", [MemoryStore.check, MemoryStore.decide, MemoryStore.admit])
def test_nothing_that_lets_another_thread_run_stands_between_the_last_look_and_the_compiled_charge(
    way: Callable[..., object],
) -> None:
    code = list(dis.get_instructions(way))
    look = next(index for index, step in enumerate(code) if step.argval == "_is_locked")
    after = [
        step.opname for step in code[look + 1 : look + 4] if step.opname not in ("PRECALL", "CACHE", "EXTENDED_ARG")
    ]
    assert after[0] == "CALL", "`_is_locked` is the last argument, read right before the call"


def test_finalizer_that_asks_is_answered_wherever_it_comes_between() -> None:
    """The collector runs finalizers wherever something is made, also while the store decides."""
    asked, kept = 0, []

    class Asking:
        def __init__(self) -> None:
            self.me = self

        def __del__(self) -> None:
            check()

    class Littering:
        """A clock that leaves something for the collector to find, the last thing before the keys are charged."""

        def now_us(self) -> int:
            if asked < 1000:
                gc.disable()
                Asking()
                gc.enable()
            return START_US

    def check() -> None:
        nonlocal asked
        asked += 1
        # What was made is kept, so that memory is asked for each time: only then the collector may run.
        kept.extend([store.check(*keys), *[space.states["ada"] for space in store._tables.values()]])
        with limiter.hold(room):
            kept.append(store.run(Refund(keys[0], 1, None, START_US)))

    names = [name for name in ALGORITHMS if name != "concurrency"]
    limiter = Limiter(clock=Littering())
    store = limiter.engine.store
    keys = tuple(Limit(10**6, SECOND, name=name, algorithm=name).by("ada") for name in names)
    room = Limit(10**6, HOUR, name="room", algorithm="concurrency").by("ada")
    before = gc.get_threshold()
    gc.set_threshold(1)
    try:
        while asked < 1100:
            check()
    finally:
        gc.set_threshold(*before)
    gc.collect()
    left = {key.limit.name: verdict[0] for key, verdict in zip(keys, store.check(*keys, cost=0).verdicts, strict=True)}
    assert left == {name: 10**6 - (0 if name == names[0] else asked) for name in names}
    assert limiter.peek(room).remaining == 10**6
    limiter.close()


def test_handler_of_a_signal_may_ask() -> None:
    limiter, keys = Limiter(clock=FakeClock(START_US)), tuple(Limit(10**6, HOUR, name=name).by("ada") for name in "abc")
    asked = 0

    def ask(*_: object) -> None:
        nonlocal asked
        asked += 1
        limiter.check(*keys)

    before = signal.signal(signal.SIGVTALRM, ask)
    signal.setitimer(signal.ITIMER_VIRTUAL, 0.0005, 0.0005)
    try:
        while asked < 500:
            limiter.reset(Limit(1, HOUR, name="d").by("bob"))
            limiter.check(Limit(1, HOUR, name="d").by("bob"))
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)
    assert limiter.peek(keys[0]).remaining == 10**6 - asked


class Sneaky(str):
    """A text whose comparison is Python code, in which another thread may run."""

    __slots__ = ()

    def __hash__(self) -> int:
        return super().__hash__()

    def __eq__(self, other: object) -> bool:
        return super().__eq__(other)


@pytest.mark.parametrize("parts", [(Sneaky("a"),), (Sneaky("a"), "b"), (Sneaky("ä"),), (Sneaky("%"),), (5,), ()])
def test_what_is_compared_and_set_is_plain(parts: tuple[str | int, ...]) -> None:
    """Neither the dict nor its keys may run Python code between the two."""
    limiter, limit = Limiter(), Limit(5, HOUR)
    limiter.check(limit.by(*parts))
    (space,) = limiter.engine.store._tables.values()
    assert type(space.states) is dict
    assert [type(identity) for identity in space.states] == [str]


# Memory

MEASURE = """
import gc, resource, sys
from datetime import timedelta
from headgate import Limit, Limiter

def resident():
    gc.collect()
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * resource.getpagesize()

algorithm, number = sys.argv[1], int(sys.argv[2])
limiter, limit = Limiter(max_keys=2 * number), Limit(100, timedelta(minutes=1), algorithm=algorithm)
limiter.check(limit.by("0"))
before = resident()
for client in range(number):
    limiter.check(limit.by(f"10.{client >> 16}.{client >> 8 & 255}.{client & 255}"))
print((resident() - before) / number)
"""


@pytest.mark.parametrize("algorithm", ["token_bucket", "gcra"])
def test_key_takes_at_most_two_hundred_bytes(algorithm: str) -> None:
    """Of what the process takes from the system: the key's name, and all bookkeeping, included."""
    measured = subprocess.run(
        [sys.executable, "-c", MEASURE, algorithm, "200000"], capture_output=True, text=True, check=True
    )
    assert 50 < float(measured.stdout) <= 200
