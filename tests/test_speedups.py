"""What is compiled does what Python does: answer by answer, field by field, and nothing where it is not sure."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from datetime import timedelta
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import headgate
from headgate import InvalidLimit, Key, Limit
from headgate.adapters import wsgi
from headgate.algorithms import NEVER
from headgate.gate import headers
from headgate.stores.memory import MemoryStore
from headgate.stores.operations import Check, Refund, Reset
from headgate.stores.redis import decoding, encoding
from headgate.testing import FakeClock
from support.growth import assert_nothing_grows
from support.paths import ROOT

if TYPE_CHECKING:
    from collections.abc import Callable

    from headgate.algorithms import Verdict

NOW = 1_763_251_200_000_000
MINUTE = timedelta(minutes=1)

COMPILED = {
    *("headgate.adapters._fields", "headgate.stores._meter", "headgate.stores.redis._wire"),
}
METERED = ("token_bucket", "gcra", "leaky_bucket", "fixed_window", "sliding_window")


@pytest.fixture
def meter() -> Any:
    return import_module("headgate.stores._meter")


@pytest.mark.parametrize("name", sorted(COMPILED))
def test_the_parts_in_c_are_built_where_the_tests_run(name: str) -> None:
    """Else these tests would compare Python with itself. If this fails: `scripts/install-packages compiler`, then
    remove .venv/.test and run `make test` again."""
    built = Path(import_module(name).__file__ or "")
    package = Path(headgate.__file__).parent
    source = package.parent.joinpath(*name.split(".")).with_suffix(".c")
    assert built.suffix == ".so"
    assert all(built.stat().st_mtime >= file.stat().st_mtime for file in (source, *package.rglob("*.h"))), "older"


def test_all_are_listed_here() -> None:
    package = Path(headgate.__file__).parent
    files = [file.relative_to(package.parent).with_suffix("") for file in package.rglob("_*.c")]
    assert {".".join(file.parts) for file in files} == COMPILED


def test_they_are_what_runs(meter: Any) -> None:
    assert headers.RateLimitHeaders.__module__ == "headgate.adapters._fields"
    assert {encoding.pack_keys.__module__, decoding.answers.__module__} == {"headgate.stores.redis._wire"}  # type: ignore[attr-defined]
    store = MemoryStore(FakeClock())
    store.check(Limit(3, MINUTE).by("ada"))
    assert [type(space.meter) for space in store._spaces.values()] == [meter.Meter]


def test_each_formula_in_c_stands_beside_its_namesake(meter: Any) -> None:
    assert meter.METERED == METERED
    here = {file.stem for file in Path(headgate.__file__).parent.glob("algorithms/[!_]*.h")}
    assert here == {*METERED}


@pytest.mark.parametrize("switch", ["1", "yes"])
def test_plain_python_can_be_asked_for(switch: str) -> None:
    program = (
        "from headgate.gate import headers; from headgate.stores import _counter_table;"
        "from headgate.stores.redis.encoding import pack_keys;"
        "print([each.__module__ for each in (headers.RateLimitHeaders, pack_keys)], _counter_table._meter is None)"
    )
    modules = ["headgate.gate.headers", "headgate.stores.redis.encoding"]
    assert printed(program, HEADGATE_PLAIN=switch) == f"{modules} True"
    modules = ["headgate.adapters._fields", "headgate.stores.redis._wire"]
    assert printed(program, HEADGATE_PLAIN="0") == f"{modules} False"


def printed(program: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", program], env={**os.environ, **environment}, capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


@pytest.mark.parametrize(
    "file",
    [
        "adapters/test_asgi.py",
        "algorithms/test_differential.py",
        "algorithms/test_pitfalls.py",
        "gate/test_responses.py",
        "stores/test_conformance.py",
        "stores/test_memory.py",
        "telemetry/decision_log/test_log.py",
    ],
)
def test_what_holds_for_c_holds_for_plain_python(file: str) -> None:
    """The same tests once more, with nothing compiled; Redis was asked already."""
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"tests/{file}", "-k",
         "not redis and not Redis and not valkey and not cluster and not sentinel and not lua"],
        cwd=ROOT, env={**os.environ, "HEADGATE_PLAIN": "1"}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-4000:]


# ------------------------------------------------------------------ charge


@st.composite
def limits(draw: st.DrawFn) -> Limit:
    algorithm = draw(st.sampled_from(METERED))
    quota = draw(st.integers(1, 20) | st.integers(1, 2**40))
    period = timedelta(microseconds=draw(st.integers(1, 1000) | st.integers(1, 10**12)))
    burst = draw(st.none() | st.integers(1, 50)) if algorithm in METERED[:3] else None
    try:
        return Limit(quota, period, burst=burst, algorithm=algorithm, name=draw(st.sampled_from("abc")))
    except InvalidLimit:
        return Limit(draw(st.integers(1, 9)), MINUTE, algorithm=algorithm, name="d")


class Pair:
    """The same calls on a store in C and on one in Python, which is always too busy for C."""

    def __init__(self) -> None:
        self.instant_us = 0
        self.stores = MemoryStore(self), MemoryStore(self)
        self.stores[1]._busy = self.stores[1]._locks_always = True

    def now_us(self) -> int:
        """Their clock, which has no bounds."""
        return self.instant_us

    def run(self, call: Any, now_us: int) -> Any:
        self.instant_us = now_us
        answers = [store.run(call) for store in self.stores]
        assert answers[0] == answers[1]
        assert type(answers[0]) is type(answers[1])
        held = [{name: space.states for name, space in store._spaces.items()} for store in self.stores]
        assert held[0] == held[1]
        return answers[0]


times = st.lists(st.integers(-5_000_000, 90_000_000) | st.integers(0, 50) | st.just(0), min_size=3, max_size=12)


@settings(max_examples=300)
@given(
    st.lists(limits(), min_size=1, max_size=4, unique_by=lambda limit: limit.name),
    times,
    st.sampled_from([NOW, 0, -NOW, 2**62 - 100_000_000]),
    st.data(),
)
def test_a_charge_in_c_is_one_in_python(these: list[Limit], steps: list[int], now_us: int, data: st.DataObject) -> None:
    pair = Pair()
    others = [Limit(5, MINUTE, algorithm=limit.algorithm, name=limit.name) for limit in these]
    for step in steps:
        now_us += step
        some = data.draw(st.permutations(these))[: 1 + step % len(these)]
        keys = tuple(limit.by(data.draw(st.sampled_from(["ada", "bob"]))) for limit in some)
        small = st.sampled_from([0, 1, 1, 1, 2, 3, 7])
        cost = data.draw(small | st.tuples(*[small for _ in keys]) | st.integers(0, 2**63))
        pair.run(Check(keys, cost, None), now_us)
        match data.draw(st.integers(0, 9)):
            case 0:
                pair.run(Refund(keys[0], 1, None, None), now_us)
            case 1:
                pair.run(Reset(keys), now_us)
            case 2:  # the same counters under other numbers, and under the old ones again
                pair.run(Check((others[these.index(some[0])].by("ada"),), 1, None), now_us)


def test_a_denied_request_spends_nothing_and_hears_what_a_peek_says() -> None:
    pair = Pair()
    wide, narrow = Limit(10, MINUTE, name="wide"), Limit(1, MINUTE, name="narrow", algorithm="gcra")
    keys = wide.by("ada"), narrow.by("ada")
    first = pair.run(Check(keys, 1, None), NOW)
    second = pair.run(Check(keys, 1, None), NOW)
    assert first.allowed
    assert not second.allowed
    assert [verdict[0] for verdict in second.verdicts] == [9, 0]


LIMIT = Limit(3, MINUTE)
KEY = LIMIT.by("ada")


class Text(str):
    __slots__ = ()


@pytest.mark.parametrize(
    ("keys", "cost", "now_us", "is_busy"),
    [
        pytest.param((KEY,), 1, NOW, True, id="busy"),
        pytest.param((KEY,), 1, NOW, None, id="busy or not"),
        pytest.param((), 1, NOW, False, id="no keys"),
        pytest.param((LIMIT.by("bob"),), 1, NOW, False, id="a new key"),
        pytest.param((KEY, LIMIT.by("bob")), 1, NOW, False, id="one known, one new"),
        pytest.param((Limit(3, MINUTE).by("ada"),), 1, NOW, False, id="another limit of that name"),
        pytest.param((Limit(3, MINUTE, name="else").by("ada"),), 1, NOW, False, id="another name"),
        pytest.param((KEY,) * 17, 0, NOW, False, id="many keys"),
        pytest.param((Key(LIMIT, ("ada",), Text("ada")),), 1, NOW, False, id="text of another type"),
        pytest.param((Key(LIMIT, ("ada",), 7),), 1, NOW, False, id="a number for text"),  # type: ignore[arg-type]
        pytest.param(("ada",), 1, NOW, False, id="no key at all"),
        pytest.param((("limit", (), "ada"),), 1, NOW, False, id="no limit at all"),
        pytest.param((KEY,), -1, NOW, False, id="a negative cost"),
        pytest.param((KEY,), True, NOW, False, id="a boolean cost"),
        pytest.param((KEY,), 1.0, NOW, False, id="a float cost"),
        pytest.param((KEY,), 2**63, NOW, False, id="a cost beyond all limits"),
        pytest.param((KEY,), 2**200, NOW, False, id="a cost beyond 128 bits"),
        pytest.param((KEY,), (1, 1), NOW, False, id="more costs than keys"),
        pytest.param((KEY,), ("1",), NOW, False, id="a text for a cost"),
        pytest.param((KEY,), 1, 2**63, False, id="a far future"),
        pytest.param((KEY,), 1, -(2**200), False, id="a far past"),
        pytest.param((KEY,), 1, 1.5, False, id="half an instant"),
    ],
)
def test_what_is_unusual_is_left_to_python(meter: Any, keys: Any, cost: Any, now_us: Any, is_busy: Any) -> None:
    store = MemoryStore(FakeClock(NOW))
    store.check(KEY)
    before = {name: {**space.states} for name, space in store._spaces.items()}
    assert meter.charge(store._spaces, keys, cost, None, now_us, is_busy) is None
    assert {name: space.states for name, space in store._spaces.items()} == before
    assert meter.charge(store._spaces, (KEY,), 1, None, NOW, False).allowed


@pytest.mark.parametrize("state", ["text", None, 1.5, (1,), (1, 2, 3), 2**130], ids=repr)
def test_a_state_of_another_kind_is_left_to_python(meter: Any, state: Any) -> None:
    store = MemoryStore(FakeClock(NOW))
    store.check(KEY)
    store._spaces[LIMIT.space].states["ada"] = state
    assert meter.charge(store._spaces, (KEY,), 1, None, NOW, False) is None


@pytest.mark.parametrize(
    "args", [(), ({},), ([], (KEY,), 1, None, NOW, False), ({}, [KEY], 1, None, NOW, False)], ids=len
)
def test_a_wrong_call_is_told_so(meter: Any, args: Any) -> None:
    with pytest.raises(TypeError, match="charge"):
        meter.charge(*args)


def test_only_its_own_algorithms_have_meters(meter: Any) -> None:
    with pytest.raises(LookupError, match="concurrency"):
        meter.Meter(Limit(3, MINUTE, algorithm="concurrency"), {})
    with pytest.raises(AttributeError):
        meter.Meter(object(), {})
    with pytest.raises(TypeError):
        meter.Meter(LIMIT, [])


HOSTILE = {
    "a meter of a limit whose numbers are 0": """
from headgate.stores import _meter

class Zeros:
    def __init__(self, algorithm):
        self.algorithm = algorithm
        self.quota = self.period_us = self.tokens = self.ticks = self.full = 0

for algorithm in _meter.METERED:
    for name in ("quota", "period_us", "tokens", "ticks", "full"):
        limit = Zeros(algorithm)
        vars(limit).update(quota=1, period_us=1, tokens=1, ticks=1, full=1)
        setattr(limit, name, 0)
        try:
            _meter.Meter(limit, {})
        except OverflowError as error:
            assert "is not a whole number from 1" in str(error)
        else:
            raise AssertionError("it was taken")
""",
    "a cost that changes the requests while they are compared": """
from datetime import timedelta
from headgate import Limit
from headgate.stores.operations import Check
from headgate.stores.redis._wire import pack_keys

limit = Limit(5, timedelta(hours=1))
short, long = limit.by("a"), limit.by("b" * 40_000)

class Cost(int):
    def __eq__(self, other):
        checks[:] = [Check((long,), 1)] * len(checks)
        return True
    __hash__ = int.__hash__

for costs in ([1, Cost(1), 1], [Cost(1), Cost(1), 1], [(1,), (Cost(1),), (1,)]):
    checks = [Check((short,), cost) for cost in costs]
    packed = pack_keys(checks, (limit,), ("headgate:x:",))
    assert packed is None, "it is left to Python"
""",
}
"""Programs whose objects are not what their types promise."""


@pytest.mark.parametrize("program", HOSTILE.values(), ids=HOSTILE)
def test_hostile_objects_do_not_crash_the_interpreter(program: str) -> None:
    """Each in a process of its own, which a crash would end."""
    assert printed(program + "\nprint('alive')") == "alive"


def test_threads_lose_nothing() -> None:
    store = MemoryStore(FakeClock(NOW))
    keys = tuple(Limit(10**6, MINUTE, name=name, algorithm=name).by("ada") for name in METERED)
    start = threading.Barrier(8)

    def ask() -> None:
        start.wait()
        for number in range(2000):
            store.check(*keys[: 1 + number % 5])
            if number % 100 == 0:
                store.check(Limit(5, MINUTE, name="new").by(f"{threading.get_ident()} {number}"))

    threads = [threading.Thread(target=ask) for _ in range(8)]
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(before)
    left = [verdict[0] for verdict in store.check(*keys, cost=0).verdicts]
    assert left == [10**6 - 8 * 2000 * part // 5 for part in (5, 4, 3, 2, 1)]


def test_nothing_is_kept_of_what_has_passed() -> None:
    store = MemoryStore(FakeClock(NOW))
    tell = headers.RateLimitHeaders(
        (b'"a"',), ((b"x-ratelimit-limit", b"3"),), (0,), (1,), (PACE,), (b"ratelimit-policy", b"p"), True, True
    )
    keys = tuple(Limit(10**9, MINUTE, name=name, algorithm=name).by("ada") for name in METERED)
    denied = Limit(1, MINUTE, name="denied").by("ada")

    def once() -> None:
        answer = store.check(*keys)
        store.check(denied)
        tell.headers(answer.verdicts[:1], answer.at_us)
        with pytest.raises(IndexError):
            tell.headers(answer.verdicts, answer.at_us)

    assert_nothing_grows(once)


# ----------------------------------------------------------- header fields

PACE = headers.Pace(3, 60, ends_at_once=False)


def one_limit() -> headers.PlainRateLimitHeaders:
    quota, policy = (b"x-ratelimit-limit", b"3"), (b"ratelimit-policy", b"p")
    return headers.RateLimitHeaders((b'"a"',), (quota,), (0,), (1,), (PACE,), policy, True, True)


numbers = st.integers(0, 5) | st.integers(0, 2**53) | st.sampled_from([999_999, 1_000_000, 1_000_001, 10**15])
verdicts = st.tuples(numbers, st.just(0) | st.just(NEVER) | numbers, numbers, st.just(0))


paces = st.builds(
    headers.Pace, st.integers(1, 5) | st.just(headers.LARGEST), st.integers(0, 9) | st.just(10**9), st.booleans()
)


@given(
    st.lists(st.tuples(verdicts, st.text('ab%\\" ;,', max_size=9), st.just(0) | numbers, numbers, paces), max_size=6),
    st.integers(-(2**60), 2**60) | st.just(NOW),
    st.booleans(),
    st.booleans(),
)
@example([((2**70, 2**71, 2**72, 0), "a", 0, 1, PACE)], 2**80, True, True)
@example([((1, 0, 0, 0), "a" * 2000, 0, 1, PACE), ((0, 0, 5, 0), "b", 3, 0, PACE)], NOW, True, True)
def test_fields_in_c_are_those_in_python(
    those: list[tuple[Verdict, str, int, int, headers.Pace]], now_us: int, x_ratelimit: bool, ratelimit: bool
) -> None:
    names = tuple(name.encode() for _, name, *_ in those)
    quotas = tuple((b"x-ratelimit-limit", b"%d" % number) for number in range(len(those)))
    filling, costs, paces = (tuple(each[index] for each in those) for index in (2, 3, 4))
    given: Any = names, quotas, filling, costs, paces, (b"ratelimit-policy", b"p"), x_ratelimit, ratelimit
    said = [verdict for verdict, *_ in those]
    in_c, in_python = headers.RateLimitHeaders(*given), headers.PlainRateLimitHeaders(*given)
    for told in (said, tuple(said)):
        assert in_c.headers(told, now_us) == in_python.headers(told, now_us)


@pytest.mark.parametrize("verdict", [(1, 2, 3), (1, 0, "0", 0), "1000", None, (2**200, 0, 0, 0)], ids=repr)
def test_what_is_no_verdict_is_refused(verdict: Any) -> None:
    tell = headers.RateLimitHeaders(
        (b'"a"',), ((b"x-ratelimit-limit", b"3"),), (0,), (1,), (PACE,), (b"ratelimit-policy", b"p"), True, True
    )
    with pytest.raises(TypeError, match="no verdict"):
        tell.headers([verdict], NOW)
    with pytest.raises(TypeError):
        tell.headers([(1, 0, 0, 0)], "now")  # type: ignore[arg-type]


def test_fields_of_different_lengths_are_refused() -> None:
    with pytest.raises(ValueError, match="lengths"):
        headers.RateLimitHeaders((b"a", b"b"), ((b"x", b"1"),), (0, 0), (1, 1), (PACE, PACE), (b"p", b"p"), True, True)
    with pytest.raises(TypeError, match="bytes"):
        headers.RateLimitHeaders(("a",), ((b"x", b"1"),), (0,), (1,), (PACE,), (b"p", b"p"), True, True)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="paces"):
        headers.RateLimitHeaders((b"a",), ((b"x", b"1"),), (0,), (1,), ((0, 1, True),), (b"p", b"p"), True, True)  # type: ignore[arg-type]


@given(st.lists(st.tuples(st.binary(max_size=9), st.binary(max_size=9) | st.just(b"\xc3\xa9")), max_size=6))
def test_header_fields_as_text_are_those_of_python(those: list[tuple[bytes, bytes]]) -> None:
    def told(how: Callable[[list[tuple[bytes, bytes]]], Any]) -> Any:
        try:
            return how(those)
        except UnicodeDecodeError as error:
            return error.object, error.reason

    assert wsgi.native_headers is not wsgi.plain_native_headers
    assert told(wsgi.native_headers) == told(wsgi.plain_native_headers)


@pytest.mark.parametrize("headers", [None, "", [b"a"], [(b"a",)], [("a", b"b")], [(b"a", "b")], ((b"a", b"b"),)])
def test_what_is_no_list_of_header_fields_has_no_text(headers: Any) -> None:
    with pytest.raises(TypeError):
        wsgi.native_headers(headers)


def test_the_sources_in_c_keep_to_the_form_of_the_house() -> None:
    for file in sorted(Path(headgate.__file__).parent.rglob("*.[ch]")):
        text = file.read_text("ascii")
        assert text.startswith("/* "), file
        assert max(map(len, text.splitlines())) <= 120, file
        assert not any(one == other == "" for one, other in pairwise(text.splitlines())), file
