"""A limit of a hundred is a hundred, from however many threads, tasks, processes and event loops it is asked."""

from __future__ import annotations

import asyncio
import gc
import multiprocessing
import os
import random
import signal
import sys
import threading
import traceback
import warnings
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest

from headgate import AsyncLimiter, Decision, Key, Limit, Limiter
from support.servers import RedisServer, wait_until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from multiprocessing.pool import Pool

LONG = timedelta(days=30)
"""Nothing refills while a test runs."""
ALGORITHMS = ("concurrency", "fixed_window", "gcra", "leaky_bucket", "sliding_log", "sliding_window", "token_bucket")


def key_of(name: str, quota: int = 100, algorithm: str = "token_bucket") -> Key:
    return Limit(quota, LONG, algorithm=algorithm, name=name).by("ada")


@pytest.fixture
def restless() -> Iterator[None]:
    """Threads change places a thousand times as often as they usually do."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def ask_from_threads(limiter: Limiter, *keys: Key, requests: int, threads: int) -> list[Decision]:
    gate = threading.Barrier(threads)

    def work(_: int) -> list[Decision]:
        gate.wait()
        return [limiter.check(*keys) for _ in range(requests // threads)]

    with ThreadPoolExecutor(threads) as pool:
        return [decision for decisions in pool.map(work, range(threads)) for decision in decisions]


async def ask_from_tasks(limiter: AsyncLimiter, *keys: Key, requests: int) -> list[Decision]:
    return await asyncio.gather(*[limiter.check(*keys) for _ in range(requests)])


def passed(decisions: list[Decision]) -> int:
    return sum(decision.allowed for decision in decisions)


# One limit


@pytest.mark.parametrize("algorithm", ["concurrency", "sliding_log", "token_bucket"])
def test_thousand_requests_from_sixteen_threads(store_url: str, unique: str, algorithm: str) -> None:
    key = key_of(unique, algorithm=algorithm)
    with Limiter(store_url) as limiter:
        decisions = ask_from_threads(limiter, key, requests=1_000, threads=16)
        assert (len(decisions), passed(decisions)) == (992, 100)
        assert sorted(decision.remaining for decision in decisions if decision) == list(range(100))
        assert limiter.peek(key).remaining == 0


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_thousand_requests_from_as_many_tasks(store_url: str, unique: str, algorithm: str) -> None:
    async def main() -> None:
        key = key_of(unique, algorithm=algorithm)
        async with AsyncLimiter(store_url, budget=20) as limiter:
            decisions = await ask_from_tasks(limiter, key, requests=1_000)
            assert passed(decisions) == 100
            assert sorted(decision.remaining for decision in decisions if decision) == list(range(100))
            assert (await limiter.peek(key)).remaining == 0

    asyncio.run(main())


def count_in_a_process(url: str, name: str, requests: int) -> int:
    with Limiter(url) as limiter:
        return passed([limiter.check(key_of(name)) for _ in range(requests)])


@pytest.fixture(scope="module")
def four_processes() -> Iterator[Pool]:
    with multiprocessing.get_context("spawn").Pool(4) as pool:
        yield pool


def test_thousand_requests_from_four_processes(four_processes: Pool, remote_url: str, unique: str) -> None:
    counts = four_processes.starmap(count_in_a_process, [(remote_url, unique, 250)] * 4, chunksize=1)
    assert sum(counts) == 100


# Forks


def in_children(number: int, work: Callable[[int], int]) -> list[int]:
    """What each of so many forked children answers; one that does not within five seconds, or fails, is -1."""

    def start(child: int) -> tuple[int, int]:
        reading, writing = os.pipe()
        pid = os.fork()
        if pid:
            os.close(writing)
            return pid, reading
        try:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(5)
            os.write(writing, str(int(work(child))).encode())
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(0)

    def finish(pid: int, reading: int) -> int:
        with open(reading) as pipe:
            answer = pipe.read()
        os.waitpid(pid, 0)
        return int(answer or -1)

    return [finish(*started) for started in [start(child) for child in range(number)]]


# Python 3.12 warns of forks beside threads, which is what these tests are about.
forking = pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")


@forking
def test_limiter_that_was_used_before_the_fork_is_used_after_it(remote_url: str, unique: str) -> None:
    key = key_of(unique)
    with Limiter(remote_url) as limiter:
        assert limiter.check(key).allowed
        counts = in_children(4, lambda _: passed([limiter.check(key) for _ in range(250)]))
        assert sum(counts) == 99
        assert limiter.peek(key).remaining == 0


@forking
def test_first_answer_in_a_child_is_the_stores(remote_url: str, unique: str) -> None:
    """Though a connection takes longer than the budget of a check: the limiter was connected before the fork."""
    key = key_of(unique)
    with Limiter(remote_url, on_failure="closed", budget=0.005) as limiter:
        wait_until(lambda: limiter.check(key, cost=0).degraded is None, "a connection")
        told = [in_children(1, lambda _: limiter.check(key).degraded is None) for _ in range(4)]
    assert told == [[True]] * 4


@forking
def test_first_answer_in_a_child_with_an_event_loop_is_the_stores(remote_url: str, unique: str) -> None:
    key, limiter = key_of(unique), AsyncLimiter(remote_url, on_failure="closed", budget=0.005)

    async def become_exact() -> None:
        async with asyncio.timeout(20):
            while (await limiter.check(key, cost=0)).degraded is not None:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        await limiter.close()

    async def ask() -> bool:
        decision = await limiter.check(key)
        await limiter.close()
        return decision.degraded is None

    asyncio.run(become_exact())
    assert [in_children(1, lambda _: asyncio.run(ask())) for _ in range(4)] == [[True]] * 4


@forking
def test_parent_and_children_may_talk_at_the_same_time(remote_url: str, unique: str) -> None:
    """Each on a connection of its own: on a shared one, somebody would get the answer to another's question."""
    keys = [key_of(f"{unique}-{number}", quota=1_000) for number in range(5)]

    def work(child: int) -> int:
        answers = [limiter.check(keys[child], cost=child + 1) for _ in range(100)]
        return len([decision for decision in answers if decision.keys != (keys[child],)]) + answers[-1].remaining

    with Limiter(remote_url) as limiter:
        limiter.check(key_of(unique))
        with ThreadPoolExecutor(1) as pool:
            parent = pool.submit(work, 4)
            assert in_children(4, work) == [900, 800, 700, 600]
            assert parent.result() == 500


@forking
def test_async_limiter_that_was_used_before_the_fork_is_used_after_it(remote_url: str, unique: str) -> None:
    key, limiter = key_of(unique), AsyncLimiter(remote_url)

    async def count(requests: int) -> int:
        answer = passed(await ask_from_tasks(limiter, key, requests=requests))
        await limiter.close()
        return answer

    assert asyncio.run(count(1)) == 1
    counts = in_children(4, lambda _: asyncio.run(count(250)))
    assert sum(counts) == 99


@forking
@pytest.mark.parametrize("store", ["memory", "redis7"])
def test_child_that_is_forked_in_the_middle_of_calls_does_not_hang(
    request: pytest.FixtureRequest, store: str, unique: str, restless: None
) -> None:
    """Whatever lock another thread held at that moment, nobody is left in the child to let go of it."""
    url = "memory://" if store == "memory" else request.getfixturevalue(store).url
    first, second = key_of(f"{unique}-1", quota=10**6), key_of(f"{unique}-2", quota=10**6)
    stopped = threading.Event()
    with Limiter(url) as limiter:

        def talk() -> None:
            while not stopped.is_set():
                limiter.check(first, second)

        with ThreadPoolExecutor(4) as pool:
            talking = [pool.submit(talk) for _ in range(4)]
            try:
                answers = in_children(25, lambda _: limiter.check(first, second).allowed)
            finally:
                stopped.set()
            for one in talking:
                one.result()
    assert answers == [1] * 25


@forking
def test_lease_is_renewed_in_a_child_as_it_is_in_its_parent(remote_url: str, unique: str) -> None:
    """Threads are not inherited: who was forked while the parent held a lease needs a thread of its own."""
    room = Limit(9, timedelta(milliseconds=400), algorithm="concurrency", name=unique).by("ada")

    def work(_: int) -> int:
        with limiter.hold(room) as decision:
            threading.Event().wait(0.9)
            return int(limiter.renew(room, id=decision.id or ""))

    with Limiter(remote_url) as limiter, limiter.hold(room):
        assert in_children(1, work) == [1]


# The memory store's short path


def test_hot_key_in_memory_counts_exactly_under_restless_threads(restless: None) -> None:
    with Limiter() as limiter:
        for turn in range(40):
            key = key_of("hot", quota=333).limit.by(turn)
            limiter.check(key, cost=0)
            assert passed(ask_from_threads(limiter, key, requests=800, threads=8)) == 333


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_hot_key_in_memory_counts_exactly_whatever_else_goes_on(restless: None, algorithm: str) -> None:
    """Checks of one limit and of several, refunds, resets and plan changes of other keys, and a store that is full."""
    quota, threads, turns = 300, 8, 5
    hot = Limit(quota, LONG, algorithm=algorithm, name="hot")
    beside, crowd = Limit(10**6, LONG, name="beside"), Limit(5, timedelta(milliseconds=1), name="crowd")

    def work(limiter: Limiter, key: Key, number: int) -> int:
        rng = random.Random(number)
        count = 0
        for step in range(100):
            other = beside.by(number, step % 7)
            match rng.randrange(6):
                case 0 | 1:
                    count += limiter.check(key).allowed
                case 2:
                    count += limiter.check(other, key).allowed
                case 3:
                    count += limiter.check(key).allowed
                    limiter.reset(other)
                case 4:
                    count += limiter.check(key, crowd.by(rng.random().hex())).allowed
                case 5:
                    count += limiter.check(key).allowed
                    limiter.check(crowd.by(rng.random().hex()))
                    limiter.check(Limit(rng.randint(1, 9), LONG, name="beside").by(number, step % 7))
        return count

    for turn in range(turns):
        with Limiter(max_keys=60) as limiter, ThreadPoolExecutor(threads) as pool:
            key = hot.by(turn)
            counts = list(pool.map(lambda number: work(limiter, key, number), range(threads)))  # noqa: B023
            assert sum(counts) == quota
            assert limiter.peek(key).remaining == 0
            assert limiter.stats.evicted > 0


def test_hot_key_and_its_refunds_balance_under_restless_threads(restless: None) -> None:
    key = key_of("hot", quota=50)
    with Limiter() as limiter, ThreadPoolExecutor(8) as pool:

        def borrow(_: int) -> bool:
            return all(limiter.refund(key, 1) for _ in range(200) if limiter.check(key))

        assert all(pool.map(borrow, range(8)))
        assert limiter.peek(key).remaining == 50


# Several limits


def test_hundred_at_once_pass_a_narrow_limit_once_and_charge_the_wide_one_once(store_url: str, unique: str) -> None:
    wide, narrow = key_of(f"{unique}-ip", quota=1_000), key_of(f"{unique}-user", quota=1)
    with Limiter(store_url) as limiter:
        assert passed(ask_from_threads(limiter, wide, narrow, requests=100, threads=20)) == 1
        assert [outcome.remaining for outcome in limiter.peek(wide, narrow).outcomes] == [999, 0]

    async def main() -> None:
        wide, narrow = key_of(f"{unique}-ip-2", quota=1_000), key_of(f"{unique}-user-2", quota=1)
        async with AsyncLimiter(store_url) as limiter:
            assert passed(await ask_from_tasks(limiter, wide, narrow, requests=100)) == 1
            assert [outcome.remaining for outcome in (await limiter.peek(wide, narrow)).outcomes] == [999, 0]

    asyncio.run(main())


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_nothing_leaks_where_shards_contend(cluster: Any, unique: str, algorithm: str) -> None:
    """Two scarce limits, on different servers as likely as not: each may take one and give it back for the other."""
    pairs = [
        [key_of(f"{unique}-{turn}-{name}", quota=3, algorithm=algorithm) for name in ("one", "two", "three")]
        for turn in range(4)
    ]
    for keys in pairs:
        with Limiter(cluster.url) as first, Limiter(cluster.url) as second, ThreadPoolExecutor(2) as pool:
            asking = [
                pool.submit(ask_from_threads, limiter, *order, requests=40, threads=4)
                for limiter, order in ((first, keys), (second, keys[::-1]))
            ]
            count = sum(passed(asked.result()) for asked in asking)
            assert count <= 3
            assert [outcome.remaining for outcome in first.peek(*keys).outcomes] == [3 - count] * 3


# Tasks that give up


@pytest.mark.parametrize("give_up", ["before a turn", "after a turn", "on the way"])
def test_cancelled_task_does_not_affect_others(store_url: str, unique: str, give_up: str) -> None:
    key = key_of(unique, quota=1_000)

    async def main() -> None:
        async with AsyncLimiter(store_url) as limiter:
            for _ in range(5):
                tasks = [asyncio.create_task(limiter.check(key)) for _ in range(100)]
                for _ in range({"before a turn": 0, "after a turn": 1, "on the way": 3}[give_up]):
                    await asyncio.sleep(0)
                for task in tasks[::2]:
                    task.cancel()
                answers = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 10)
                assert passed(answers[1::2]) == 50
                assert all(isinstance(answer, asyncio.CancelledError | Decision) for answer in answers[::2])
            # Who was cancelled may have been counted, once; who was not, has been.
            assert 250 <= 1_000 - (await limiter.peek(key)).remaining <= 500

    asyncio.run(main())


def test_timed_out_task_does_not_affect_others(store_url: str, unique: str) -> None:
    key = key_of(unique, quota=1_000)

    async def impatient(limiter: AsyncLimiter, seconds: float) -> Decision | None:
        try:
            return await asyncio.wait_for(limiter.check(key), seconds)
        except TimeoutError:
            return None

    async def main() -> None:
        async with AsyncLimiter(store_url) as limiter:
            for seconds in (0, 0.000_1, 0.001):
                answers = await asyncio.gather(
                    *[impatient(limiter, seconds if number % 2 else 10) for number in range(100)]
                )
                assert all(answer is not None and answer.allowed for answer in answers[::2])
            assert (await limiter.check(key)).allowed

    asyncio.run(main())


def test_waiting_task_that_is_cancelled_has_taken_nothing(store_url: str, unique: str) -> None:
    key = key_of(unique, quota=5)

    async def main() -> None:
        async with AsyncLimiter(store_url) as limiter:
            await limiter.check(key, cost=4)
            waiting = asyncio.create_task(limiter.acquire(key, cost=3))
            await asyncio.sleep(0.02)
            waiting.cancel()
            await asyncio.wait([waiting])
            assert waiting.cancelled()
            assert (await limiter.peek(key)).remaining == 1

    asyncio.run(main())


def test_hold_whose_task_is_cancelled_is_left(store_url: str, unique: str) -> None:
    room = key_of(unique, quota=1, algorithm="concurrency")

    async def main() -> None:
        async with AsyncLimiter(store_url) as limiter:
            held = asyncio.Event()

            async def work() -> None:
                async with limiter.hold(room):
                    held.set()
                    await asyncio.sleep(60)

            working = asyncio.create_task(work())
            await held.wait()
            assert (await limiter.peek(room)).remaining == 0
            working.cancel()
            await asyncio.wait([working])
            assert (await limiter.peek(room)).remaining == 1

    asyncio.run(main())


# Event loops


def test_one_limiter_serves_one_loop_after_the_other(remote_url: str, unique: str) -> None:
    key, limiter = key_of(unique), AsyncLimiter(remote_url)

    async def count() -> int:
        answer = passed(await ask_from_tasks(limiter, key, requests=30))
        await limiter.close()
        return answer

    assert [asyncio.run(count()) for _ in range(4)] == [30, 30, 30, 10]


@pytest.fixture
def unclosed_is_fine(recwarn: pytest.WarningsRecorder) -> Iterator[None]:
    """What a loop that ended has left open is closed, with Python's own warning, inside the test that left it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        yield
        gc.collect()


def test_loop_that_ended_without_a_word_leaves_the_limiter_usable(
    remote_url: str, unique: str, unclosed_is_fine: None
) -> None:
    key, limiter = key_of(unique), AsyncLimiter(remote_url)

    async def count_and_leave_calls_behind() -> int:
        answer = passed(await ask_from_tasks(limiter, key, requests=30))
        asyncio.create_task(limiter.check(key, cost=0))  # noqa: RUF006 - nobody will ever ask for its answer
        await asyncio.sleep(0)
        return answer

    assert [asyncio.run(count_and_leave_calls_behind()) for _ in range(4)] == [30, 30, 30, 10]


def test_one_limiter_serves_two_loops_at_the_same_time(store_url: str, unique: str, unclosed_is_fine: None) -> None:
    """Each loop has connections of its own: nobody in one of them waits for ever because of the other."""
    key, limiter = key_of(unique, quota=1_000), AsyncLimiter(store_url)
    together = threading.Barrier(2, timeout=5)

    async def work() -> int:
        count = 0
        async with asyncio.timeout(5):
            for _ in range(40):
                together.wait()
                count += passed(await ask_from_tasks(limiter, key, requests=5))
        return count

    with ThreadPoolExecutor(2) as pool:
        running = [pool.submit(asyncio.run, work()) for _ in range(2)]
        assert [one.result() for one in running] == [200, 200]


def test_loop_may_go_on_in_another_thread_while_others_run(store_url: str, unique: str) -> None:
    """Whose loop it is is seen by the thread that it runs in, at that moment."""
    key, limiter = key_of(unique, quota=1_000), AsyncLimiter(store_url)
    together = threading.Barrier(2, timeout=5)

    async def count(times: int) -> int:
        async with asyncio.timeout(5):
            together.wait()
            return sum([passed(await ask_from_tasks(limiter, key, requests=5)) for _ in range(times)])

    with ThreadPoolExecutor(1) as one, ThreadPoolExecutor(1) as other:
        loops = [asyncio.new_event_loop() for _ in range(2)]
        for threads in ((one, other), (other, one), (one, other)):
            running = [
                thread.submit(loop.run_until_complete, count(10)) for thread, loop in zip(threads, loops, strict=True)
            ]
            assert [each.result() for each in running] == [50, 50]
        for loop in loops:
            loop.run_until_complete(limiter.close())
            loop.close()


@contextmanager
def blocked_for_at_most(seconds: float) -> Iterator[list[float]]:
    """Measures by how much the running loop's own ticks came late."""
    loop, late, ticking = asyncio.get_running_loop(), [0.0], True

    def tick(due: float) -> None:
        late.append(loop.time() - due)
        if ticking:
            loop.call_later(0.001, tick, loop.time() + 0.001)

    loop.call_soon(tick, loop.time())
    yield late
    ticking = False
    assert max(late) < seconds


def test_no_call_blocks_the_loop(remote_url: str, unique: str) -> None:
    """Pitfall P15: connecting, asking and waiting happen beside everything else that the loop has to do."""
    slow = Limit(20, timedelta(seconds=1), name=unique).by("ada")

    async def main() -> None:
        with blocked_for_at_most(0.1):
            async with AsyncLimiter(remote_url) as limiter:
                await limiter.check(slow, cost=20)
                await limiter.acquire(slow, cost=4)

    asyncio.run(main())


@pytest.mark.usefixtures("nothing_is_left_open")
def test_child_forked_during_a_request_works_and_ends(server: RedisServer, unique: str) -> None:
    key = key_of(unique)
    with Limiter(server.url, on_failure="local", budget=1.0) as limiter:
        limiter.check(key)
        front, kept = limiter.engine.local, limiter.engine.maintenance
        assert kept is not None
        wait_until(lambda: kept._thread is not None and kept.knows_fleet_size, "the keeper")
        farewell = kept._finalizer
        locks = [front.live_clients.blocks._lock, front.denial_cache._lock, front.prepaid._lock, front.ledger._lock]
        locks += [kept._lock, kept._client._lock]
        for lock in locks:
            with lock:
                pid = os.fork()
                if not pid:
                    status = 1
                    try:
                        signal.alarm(10)
                        front.live_clients.blocks.set("tenant", "acme", None, None)
                        status = 0 if limiter.check(key).degraded is None else 2
                        farewell()  # what is done at the end must not wait, either
                    finally:
                        os._exit(status)
            assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0, lock
