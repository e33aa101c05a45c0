"""Signal handlers that raise in the middle of a check, again and again: no other thread is held up, and afterwards
everything works as before."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest

from headgate import Limit, Limiter
from headgate._interrupts import BackgroundThread, InterruptSafeEvent
from support.faults import SLACK, key_of, timed
from support.paths import TESTS
from support.servers import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import FrameType

    from support.servers import RedisServer


class Interrupted(BaseException):
    pass


@contextmanager
def storm(seconds: float) -> Iterator[None]:
    """A signal whose handler raises, every so many seconds."""

    def interrupt(*_: object) -> None:
        raise Interrupted

    before = signal.signal(signal.SIGALRM, signal.SIG_IGN)
    try:
        signal.signal(signal.SIGALRM, interrupt)
        signal.setitimer(signal.ITIMER_REAL, seconds, seconds)
        yield
    finally:
        _calm(before)


def _calm(before: Any) -> None:
    """Stop the storm, whatever it does to this."""
    while True:
        try:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)
        except Interrupted:
            continue
        return


@pytest.mark.parametrize("every", [0.001, 0.0002], ids=["1 ms", "0.2 ms"])
@pytest.mark.parametrize("mode", ["raise", "open", "closed", "local"])
def test_frequent_interrupts_delay_no_request_and_corrupt_nothing(
    server: RedisServer, unique: str, mode: str, every: float
) -> None:
    """Each interrupt cuts off what the one before has begun to clean up."""
    budget, front = 1.0, "front" if every < 0.001 else "store"
    storm = [sys.executable, str(TESTS / "support" / "interrupt_storm.py"), server.url, unique, mode]
    ended = subprocess.run(
        [*storm, str(every), str(budget), "3", front], capture_output=True, text=True, timeout=60, check=False
    )
    assert ended.returncode == 0, ended.stderr
    told = json.loads(ended.stdout)
    assert told["interrupts"] > 100
    assert told["alive"] == 0, "a thread hangs in check()"
    assert told["during"] > 100
    assert told["slowest_during"] < budget + SLACK
    # All is mended at once: every thread is answered exactly, in time, and counted by Redis.
    assert told["mine_first"] is None
    assert told["inexact_after"] == []
    assert min(told["after"]) > 20
    assert told["slowest_after"] < budget
    assert [(exact, used) for exact, used, _ in told["counted"]] == [(True, 1)] * 4
    assert told["threads"] < 12


def test_leader_that_vanishes_without_cleaning_up_is_replaced(
    server: RedisServer, unique: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = key_of(unique)
    with Limiter(server.url, lease=0, remember=0, budget=1.0) as limiter:
        limiter.check(key)
        store = limiter.engine.store
        monkeypatch.setattr(store, "_leave", lambda *_: None)

        def vanish(*_: object) -> Any:
            """Once the others wait for this thread."""
            wait_until(lambda: len(store.lanes.default.next.waiters) == 2, "two who wait")
            raise Interrupted

        def lead() -> None:
            with pytest.raises(Interrupted):
                limiter.check(key)

        with monkeypatch.context() as patch:
            patch.setattr(store, "_run_lone", vanish)
            leading = threading.Thread(target=lead)
            leading.start()
            wait_until(lambda: store.lanes.default.leader, "a leader")
        told: list[Any] = []
        others = [threading.Thread(target=lambda: told.append(timed(lambda: limiter.check(key)))) for _ in range(2)]
        for thread in others:
            thread.start()
        for thread in (leading, *others):
            thread.join(5)
            assert not thread.is_alive()
        assert [each.answer.allowed for each in told] == [True, True]
        assert max(each.seconds for each in told) < 1.0
        assert limiter.peek(key).remaining == 97


def test_event_that_a_waiter_was_cut_off_from_wakes_the_others() -> None:
    event = InterruptSafeEvent()
    with pytest.raises(Interrupted), storm(0.02):
        event.wait(5)
    woken: list[bool] = []
    waiting = threading.Thread(target=lambda: woken.append(event.wait(10)))
    waiting.start()
    wait_until(lambda: len(event._waiters) == 2, "who waits")
    event.set()
    waiting.join(5)
    assert woken == [True]
    event.clear()
    assert not event.wait(0.01)


def test_threads_are_started_in_spite_of_interrupts() -> None:
    """One that is half started by `threading` never runs."""
    ran: list[int] = []
    began = 0
    for number in range(300):
        try:
            with storm(0.0003):
                BackgroundThread("test", ran.append, number)
                began += 1
                time.sleep(0.0001 * (number % 5))
        except Interrupted:
            pass
    wait_until(lambda: len(ran) >= began, "all threads to run")


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # finalizers are interrupted, too
def test_interrupted_checks_of_a_hot_key_charge_no_more_than_was_requested(server: RedisServer, unique: str) -> None:
    limit = Limit(10_000_000, timedelta(days=30), name=unique, algorithm="fixed_window")
    key = limit.by("everybody")
    requested = admitted = interrupted = 0
    with Limiter(server.url) as limiter:
        limiter.engine.local.prepaid.announce([limit])
        limiter.check(limit.by("first"))
        end = time.monotonic() + 60
        while interrupted < 100 and time.monotonic() < end:
            try:
                with storm(0.0007 + 0.00001 * (interrupted % 100)):
                    for _ in range(1_000):
                        requested += 1
                        admitted += limiter.check(key).allowed
            except Interrupted:
                interrupted += 1
            except RuntimeError:  # contextlib's, where the storm interrupts its own beginning or end
                pass
        assert interrupted == 100
        assert limiter.stats["prepaid"] > 0
    with Limiter(server.url) as other:
        charged = limit.capacity - other.peek(key).remaining
    assert admitted <= charged <= requested


FINALIZER = """
import sys, threading, time
from datetime import timedelta
from headgate import Limit, Limiter

limiter = Limiter(sys.argv[1], on_failure="open", budget=0.2, lease=0)
key = Limit(10**6, timedelta(days=1), name=sys.argv[2]).by("x")
limiter.check(key)

class Late:
    def __del__(self):
        print("asked", limiter.check(key).allowed, flush=True)

def work():
    while True:
        limiter.check(key)

for _ in range(4):
    threading.Thread(target=work, daemon=True).start()
late = Late()
time.sleep(0.3)
sys.exitfunc = late
"""


def test_check_in_a_finalizer_does_not_wait_for_threads_that_have_ended(server: RedisServer, unique: str) -> None:
    for number in range(5):
        command = [sys.executable, "-c", FINALIZER, server.url, f"{unique}-{number}"]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
        assert ended.returncode == 0, ended.stderr


@contextmanager
def interrupted_at(step: int, interrupts: list[int]) -> Iterator[None]:
    """Raise at the given moment of those at which Python looks for signals while the store's own code runs."""
    left = step

    def look(frame: FrameType, event: str, _: object) -> None:
        nonlocal left
        if event in ("call", "c_return") and frame.f_code.co_filename.endswith("redis/sync_store.py"):
            left -= 1
            if not left:
                sys.setprofile(None)
                interrupts.append(step)
                raise Interrupted

    sys.setprofile(look)
    try:
        yield
    except Interrupted:
        pass
    finally:
        sys.setprofile(None)


@pytest.mark.usefixtures("nothing_is_left_open")
def test_interrupt_at_any_step_leaves_no_request_waiting(server: RedisServer, unique: str) -> None:
    key = key_of(unique, quota=10**9)
    with Limiter(server.url, lease=0, remember=0) as limiter:
        limiter.check(key)
        counts, stopped = [0, 0], threading.Event()
        interrupts: list[int] = []

        def keep_asking(index: int) -> None:
            while not stopped.is_set():
                timed(lambda: limiter.check(key))
                counts[index] += 1

        threads = [threading.Thread(target=keep_asking, args=(index,), daemon=True) for index in range(2)]
        for thread in threads:
            thread.start()
        try:
            for step in range(1, 60):
                for _ in range(3):
                    with interrupted_at(step, interrupts):
                        limiter.check(key, cost=1 + step % 2)
                before = list(counts)
                wait_until(
                    lambda before=before: all(now > then for now, then in zip(counts, before, strict=True)),  # type: ignore[misc]
                    f"the others, after an interrupt at step {step}",
                    timeout=5,
                )
        finally:
            stopped.set()
        assert len(interrupts) > 20
        for thread in threads:
            thread.join(5)
            assert not thread.is_alive()
