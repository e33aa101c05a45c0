"""What is compiled does what Python does: answer by answer, field by field, and nothing where it is not sure."""

from __future__ import annotations

import os
import re
import shutil
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
from headgate import Decision, InvalidLimit, Key, Limit, speedups
from headgate.algorithms import NEVER
from headgate.gate import headers
from headgate.regions import reconciled, routing
from headgate.regions.model import Regions
from headgate.regions.reserved import HomeState, KeyDemand
from headgate.regions.routing import RegionRouter
from headgate.regions.worker import RegionWorker
from headgate.stores.memory import MemoryStore
from headgate.stores.operations import Check, IdempotentCheck, Refund, Reset
from headgate.stores.redis import decoding, encoding
from headgate.testing import FakeClock
from support.growth import assert_nothing_grows
from support.paths import ROOT

if TYPE_CHECKING:
    from headgate.algorithms import Verdict

NOW = 1_763_251_200_000_000
MINUTE = timedelta(minutes=1)

METERED = ("token_bucket", "gcra", "leaky_bucket", "fixed_window", "sliding_window")


@pytest.fixture
def native() -> Any:
    return import_module("headgate._native")


def test_extension_is_built_where_the_tests_run(native: Any) -> None:
    """Else these tests would compare Python with itself. If this fails: `scripts/install-packages compiler`, then
    remove .venv/.test and run `make test` again."""
    built, package = Path(native.__file__), Path(headgate.__file__).parent
    assert built.suffix == ".so"
    sources = [*package.rglob("*.[ch]")]
    assert all(built.stat().st_mtime >= file.stat().st_mtime for file in sources), "older than its sources"


def test_compiled_functions_are_used(native: Any) -> None:
    assert speedups.active
    assert speedups.reason == ""
    assert all(hasattr(native, name) for name in speedups.functions)
    assert headers.RateLimitHeaders is native.RateLimitHeaders
    assert encoding.pack_keys is native.pack_keys
    assert decoding.answers is native.decode_allowed
    assert routing.replace_fields is native.replace_fields
    assert routing.translate_check is native.translate_check
    assert reconciled.add_usage is native.add_usage
    assert routing.finish_check is native.finish_check
    store = MemoryStore(FakeClock())
    store.check(Limit(3, MINUTE).by("ada"))
    assert [type(meter) for meter in store._meters.values()] == [native.Meter]


def test_tuples_have_the_layout_that_the_extension_reads() -> None:
    assert Key._fields == ("limit", "parts", "identity")
    assert Check._fields == ("keys", "cost", "id")
    assert len(headgate.Decision._fields) == 8
    assert headgate.Decision._fields[:6] == ("allowed", "keys", "verdicts", "id", "degraded", "at_us")
    assert headgate.Decision._fields[7] == "cost"


def test_only_the_public_api_of_python_is_used() -> None:
    for file in Path(headgate.__file__).parent.rglob("*.[ch]"):
        assert not re.findall(r"\b_Py\w+|ob_digit|structmember|PyCapsule", file.read_text("ascii")), file


def test_each_algorithm_in_c_is_next_to_its_python_version(native: Any) -> None:
    assert [*METERED] == native.ALGORITHMS
    assert {file.stem for file in Path(headgate.__file__).parent.glob("algorithms/[!_]*.h")} == {*METERED}


@pytest.mark.parametrize("replace", [routing.replace_fields, routing.plain_replace_fields])
def test_fields_of_a_named_tuple_are_replaced(replace: Any) -> None:
    check = Check((), 2, "id")
    assert replace(check, 0, ("key",)) == Check(("key",), 2, "id")
    assert replace(check, 1, 3, None) == Check((), 3, None)
    assert type(replace(check, 0)) is Check
    assert check == Check((), 2, "id")


def test_replacing_fields_that_a_tuple_does_not_have_is_an_error(native: Any) -> None:
    for args in ((), (Check((), 1),), ([], 0), (Check((), 1), "0")):
        with pytest.raises(TypeError):
            native.replace_fields(*args)
    for start in (-1, 2, 4, sys.maxsize):
        with pytest.raises(IndexError):
            native.replace_fields(Check((), 1), start, "a", "b")


@settings(max_examples=50)
@given(
    st.lists(st.sampled_from(["same", "other", "new"]), max_size=4),
    st.sampled_from([Check, IdempotentCheck]),
    st.data(),
)
def test_checks_are_translated_as_in_python(kinds: list[str], kind: type[Check], data: st.DataObject) -> None:
    limits = {name: Limit(5, MINUTE, name=name) for name in ("same", "other", "new")}
    counted = {limits["same"]: limits["same"], limits["other"]: Limit(2, MINUTE, name="other")}
    keys = tuple(limits[name].by(data.draw(st.sampled_from(["ada", "bob"]))) for name in kinds)
    check = kind(keys, data.draw(st.integers(0, 3)), data.draw(st.none() | st.just("id")))
    native = import_module("headgate._native").translate_check(check, counted)
    python = routing.plain_translate_check(check, counted)
    assert native == python
    assert type(native) is type(python)
    if python is None:
        assert "new" in kinds
    else:
        assert (native is check) == (python is check) == ("other" not in kinds)
        assert [type(key) for key in native.keys] == [Key] * len(keys)


def test_translating_what_is_no_check_is_an_error(native: Any) -> None:
    for args in ((), (Check((), 1),), (Check((), 1), []), ([], {}), (KEY, {})):
        with pytest.raises(TypeError):
            native.translate_check(*args)
    with pytest.raises(TypeError, match="unhashable"):
        native.translate_check(Check((([], (), ""),), 1), {})  # type: ignore[arg-type]
    assert native.translate_check(Check(("ada",), 1), {}) is None  # type: ignore[arg-type]


@settings(max_examples=100)
@given(
    st.lists(st.tuples(st.sampled_from(["ada", "bob"]), st.integers(0, 9) | st.just(2**62), st.integers(-1, 12))),
    st.integers(0, 2**62),
)
def test_usage_is_added_as_in_python(events: list[tuple[str, int, int]], admitted: int) -> None:
    native = import_module("headgate._native").add_usage
    slots = [{"ada": [0, 0, 10, admitted], "text": [0, 0, 10, "x"]} for _ in range(2)]
    for key, cost, at_us in events:
        added = native(slots[0], key, cost, at_us)
        if not added and slots[0].get(key, [0, 0, 0, 0])[3] > 2**62:
            break  # beyond what is exact: Python goes on
        assert added is reconciled.plain_add_usage(slots[1], key, cost, at_us)  # type: ignore[arg-type]
        assert slots[0] == slots[1]


@pytest.mark.parametrize("cost", [True, 1.0, -1, 2**63, "1", None, (1,)], ids=repr)
def test_unusual_usage_is_left_to_python(native: Any, cost: Any) -> None:
    slots: dict[Any, Any] = {"ada": [0, 0, 10, 5], "short": [0, 0, 10], "text": [0, 0, 10, "5"], "none": None}
    assert not native.add_usage(slots, "ada", cost, 5)
    assert not any(native.add_usage(slots, key, 1, 5) for key in ("short", "text", "none", "missing"))
    assert slots["ada"] == [0, 0, 10, 5]
    for args in ((), ({},), ([], "ada", 1, 5), ({}, [], 1, 5)):
        with pytest.raises(TypeError):
            native.add_usage(*args)


class IdleWorker(RegionWorker):
    """A worker that exchanges and leases nothing, so that what is recorded stays there."""

    def ensure_exchange(self) -> Any:
        return None

    def ensure_agent(self) -> None:
        return None


def region_router() -> RegionRouter:
    regions = Regions("us", "eu", (("ap", ""), ("eu", ""), ("us", "")))
    return RegionRouter(regions, IdleWorker(regions, pytest.fail), lambda: 0)


@settings(max_examples=100)
@given(
    modes=st.lists(st.sampled_from(["regional", "divided", "reserved", "reconciled"]), min_size=1, max_size=3),
    is_known=st.booleans(),
    is_allowed=st.booleans(),
    degraded=st.sampled_from([None, "open"]),
    cost=st.integers(0, 5) | st.just(2**63),
    at_us=st.integers(0, 90_000_000),
    numbers=st.tuples(st.integers(0, 200), st.integers(0, 90_000_000)),
    home=st.tuples(st.integers(0, 150), st.integers(0, 90_000_000)),
)
def test_decisions_of_a_region_are_finished_as_in_python(
    modes: list[Any], is_known: bool, is_allowed: bool, degraded: str | None, cost: int, at_us: int,
    numbers: tuple[int, int], home: tuple[int, int],
) -> None:  # fmt: skip
    limits = [Limit(100, MINUTE, algorithm="fixed_window", region=mode, name=mode) for mode in modes]
    check = Check(tuple(limit.by("ada") for limit in limits), cost)
    records, finished = [], []
    for is_native in (True, False):
        router = region_router()
        counted = router.own_check(check)
        slots, demands = router.worker.counter.open_slots, router.worker.demand.keys
        for mode, key in zip(modes, counted.keys, strict=True):
            if is_known and mode == "reconciled":
                slots[key] = [0, 0, 60_000_000, 7]
            elif is_known and mode == "reserved":
                demands[key] = KeyDemand(key, router.reservation(check.keys[modes.index(mode)].limit), HomeState(*home))
        verdicts = tuple((numbers[0], 0 if is_allowed else 9, numbers[1], 0) for _ in modes)
        decision = Decision(is_allowed, counted.keys, verdicts, None, degraded, at_us, 0, cost)
        known = router.finish_known(check, counted, decision) if is_native else None
        if is_native:
            recorded = sum(mode in ("reserved", "reconciled") for mode in modes)
            if not is_allowed or degraded or recorded > 1 or (recorded and not is_known):
                assert known is None
            elif cost < 2**62 and (at_us < 60_000_000 or "reconciled" not in modes):
                assert known is not None or counted is check
        finished.append(known or router.finish(check, counted, decision))
        usage = router.worker.counter.begin_flush()[1]
        records.append((dict(usage), {key: (*demand, demand.denied) for key, demand in demands.items()}))
    assert finished[0] == finished[1]
    assert type(finished[0]) is Decision
    assert finished[0].keys is check.keys
    assert records[0] == records[1]


def test_finishing_what_is_no_decision_is_an_error(native: Any) -> None:
    check, decision = Check((KEY,), 1), Decision(True, (KEY,), ((1, 0, 1, 0),))
    for args in (
        (), ([], {}, check, check, decision), ({}, [], check, check, decision), ({}, {}, (), check, decision),
        ({}, {}, check, KEY, decision), ({}, {}, check, check, (1, 2)),
    ):  # fmt: skip
        with pytest.raises(TypeError):
            native.finish_check(*args)
    for other in (Check((), 1), Check(("ada",), 1), Check(((1, 2, 3),), 1)):  # type: ignore[arg-type]
        assert native.finish_check({}, {}, check, other, decision) in (None, decision)


@pytest.mark.parametrize("is_compiled", [True, False])
def test_threads_lose_no_usage_while_it_is_flushed(is_compiled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not is_compiled:
        monkeypatch.setattr(reconciled, "add_usage", None)
    counter = reconciled.AdmissionCounter()
    keys = [Limit(5, MINUTE, algorithm="fixed_window", name="usage").by(str(number)) for number in range(3)]
    start, flushed = threading.Barrier(5), 0

    def count() -> None:
        start.wait()
        for number in range(3000):
            key, at_us = keys[number % 3], number // 1000 * 60_000_000
            if not counter.add(key, 1, at_us):
                counter.record(key, 1, at_us)

    threads = [threading.Thread(target=count) for _ in range(4)]
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for thread in threads:
            thread.start()
        start.wait()
        while any(thread.is_alive() for thread in threads):
            flushed += sum(admitted for admitted, _ in counter.begin_flush()[1].values())
            counter.end_flush()
    finally:
        sys.setswitchinterval(before)
    flushed += sum(admitted for admitted, _ in counter.begin_flush()[1].values())
    assert flushed == 4 * 3000


@pytest.mark.parametrize("switch", ["1", "yes"])
def test_speedups_can_be_turned_off(switch: str) -> None:
    program = (
        "from headgate import speedups; from headgate.gate.headers import RateLimitHeaders;"
        "from headgate.stores.redis.encoding import pack_keys;"
        "print(speedups.active, speedups.functions, speedups.reason, RateLimitHeaders.__module__, pack_keys.__module__)"
    )
    off = "False () turned off by HEADGATE_PLAIN headgate.gate.headers headgate.stores.redis.encoding"
    assert printed(program, HEADGATE_PLAIN=switch) == off
    on = f"True {speedups.functions}  headgate._native headgate._native"
    assert printed(program, HEADGATE_PLAIN="0") == on


def test_reason_says_whether_the_extension_is_missing_or_broken() -> None:
    program = (
        "import sys; sys.modules['headgate._native'] = None; from headgate import speedups; print(speedups.reason)"
    )
    assert printed(program).startswith("not built: install a C compiler")
    program = (
        "import importlib\n"
        "def fail(name): raise ImportError('undefined symbol')\n"
        "importlib.import_module = fail\n"
        "from headgate import speedups; print(speedups.reason)"
    )
    assert printed(program) == "cannot be loaded: undefined symbol"


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, "speedups: active"),
        ({"HEADGATE_PLAIN": "1"}, "speedups: turned off by HEADGATE_PLAIN"),
    ],
)
def test_version_says_whether_speedups_are_active(environment: dict[str, str], expected: str) -> None:
    program = "import sys; sys.argv = ['headgate', '--version']; from headgate.cli import main; main()"
    assert printed(program, COLUMNS="200", **environment) == f"headgate {headgate.__version__} ({expected})"


def test_failed_build_names_the_error_and_what_is_lost(tmp_path: Path) -> None:
    shutil.copytree(ROOT, tmp_path / "source", ignore=shutil.ignore_patterns(".git", ".venv", "*.so", "build", ".*"))
    done = subprocess.run(
        [sys.executable, "setup.py", "build_ext", "--inplace"], cwd=tmp_path / "source",
        env={**os.environ, "CC": "no-such-compiler"}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "WARNING: the C extension headgate._native was not built" in done.stderr
    assert "no-such-compiler" in done.stderr
    assert "takes about three times as long" in done.stderr


def printed(program: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", program], env={**os.environ, **environment}, capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


DECISION_TABLES = (
    "concurrency", "costs", "exactness", "layered_limits", "limit_changes", "refunds", "sliding_window", "time",
)  # fmt: skip


@pytest.mark.parametrize(
    "files",
    [
        "adapters/test_asgi.py",
        "algorithms/test_differential.py",
        " ".join(f"algorithms/test_{name}.py" for name in DECISION_TABLES),
        "gate/test_responses.py",
        "regions/test_reconciled.py",
        "stores/test_conformance.py",
        "stores/test_memory.py",
        "telemetry/decision_log/test_log.py",
    ],
)
def test_plain_python_passes_the_tests_of_the_c_extension(files: str) -> None:
    """The same tests without the C extension; those on Redis servers do not use it."""
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *[f"tests/{file}" for file in files.split()],
         "-k", "not redis and not Redis and not valkey and not cluster and not sentinel and not sharded and not lua"],
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
        self.stores[1]._is_locked = self.stores[1]._always_locks = True

    def now_us(self) -> int:
        """Their clock, which has no bounds."""
        return self.instant_us

    def run(self, call: Any, now_us: int) -> Any:
        self.instant_us = now_us
        answers = [store.run(call) for store in self.stores]
        assert answers[0] == answers[1]
        assert type(answers[0]) is type(answers[1])
        held = [{name: space.states for name, space in store._tables.items()} for store in self.stores]
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
def test_charge_in_c_is_one_in_python(these: list[Limit], steps: list[int], now_us: int, data: st.DataObject) -> None:
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


@settings(max_examples=150)
@given(st.lists(limits(), min_size=1, max_size=4, unique_by=lambda limit: limit.name), times, st.data())
def test_requests_are_admitted_in_c_as_they_are_decided(
    these: list[Limit], steps: list[int], data: st.DataObject
) -> None:
    pair, now_us = Pair(), NOW
    fast, plain = pair.stores
    for step in steps:
        now_us += step
        keys = tuple(limit.by(data.draw(st.sampled_from(["ada", "bob"]))) for limit in these)
        check = Check(keys, data.draw(st.integers(0, 5)), None)
        floors = tuple(data.draw(st.integers(0, 30)) for _ in keys)
        pair.instant_us = now_us
        admitted, decision = fast.admit(check, floors), plain.decide(check)
        leaves = [verdict[0] >= floor for verdict, floor in zip(decision.verdicts, floors, strict=True)]
        if admitted:
            assert decision.allowed
            assert all(leaves)
        else:
            assert fast.decide(check) == decision
        held = [{name: table.states for name, table in store._tables.items()} for store in pair.stores]
        assert held[0] == held[1]


def test_request_is_admitted_only_above_the_floor_of_each_limit() -> None:
    store = MemoryStore(FakeClock(NOW))
    wide, narrow = Limit(10, MINUTE, name="wide"), Limit(3, MINUTE, name="narrow")
    check = Check((wide.by("ada"), narrow.by("ada")), 1, None)
    assert not store.admit(check, (0, 0)), "new counters are left to Python"
    store.decide(check)
    assert store.admit(check, (8, 1))
    assert not store.admit(check, (0, 1))
    assert store.admit(check, (0, 0)), "nothing was charged"
    assert not store.admit(check, (0, 0))
    assert not store.admit(check, (0,))


def test_denied_request_spends_nothing_and_hears_what_a_peek_says() -> None:
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
    ("keys", "cost", "now_us", "is_is_locked"),
    [
        pytest.param((KEY,), 1, NOW, True, id="busy"),
        pytest.param((KEY,), 1, NOW, None, id="busy or not"),
        pytest.param((), 1, NOW, False, id="no keys"),
        pytest.param((LIMIT.by("bob"),), 1, NOW, False, id="a new key"),
        pytest.param((KEY, LIMIT.by("bob")), 1, NOW, False, id="one known, one new"),
        pytest.param((Limit(3, MINUTE).by("ada"),), 1, NOW, False, id="another limit of that name"),
        pytest.param((Limit(3, MINUTE, name="else").by("ada"),), 1, NOW, False, id="another name"),
        pytest.param((KEY,) * 17, 0, NOW, False, id="many keys"),
        pytest.param((KEY, KEY), 1, NOW, False, id="the same key twice"),
        pytest.param(((LIMIT, ("ada",), "ada"),), 1, NOW, False, id="a tuple for a key"),
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
def test_what_is_unusual_is_left_to_python(native: Any, keys: Any, cost: Any, now_us: Any, is_is_locked: Any) -> None:
    store = MemoryStore(FakeClock(NOW))
    store.check(KEY)
    before = {name: {**space.states} for name, space in store._tables.items()}
    assert native.charge(store._meters, keys, cost, now_us * 1000, is_is_locked) is None
    assert not native.admit(store._meters, keys, cost, now_us * 1000, (0,) * len(keys), is_is_locked)
    assert {name: space.states for name, space in store._tables.items()} == before
    assert native.charge(store._meters, (KEY,), 1, NOW * 1000, False).allowed


@pytest.mark.parametrize("state", ["text", None, 1.5, (1,), (1, 2, 3), 2**130], ids=repr)
def test_state_of_another_kind_is_left_to_python(native: Any, state: Any) -> None:
    store = MemoryStore(FakeClock(NOW))
    store.check(KEY)
    store._tables[LIMIT.space].states["ada"] = state
    assert native.charge(store._meters, (KEY,), 1, NOW * 1000, False) is None


@pytest.mark.parametrize("args", [(), ({},), ([], (KEY,), 1, NOW, False), ({}, [KEY], 1, NOW, False)], ids=len)
def test_invalid_arguments_are_rejected(native: Any, args: Any) -> None:
    with pytest.raises(TypeError, match="charge"):
        native.charge(*args)
    with pytest.raises(TypeError, match="admit"):
        native.admit(*args[:4], (0,), *args[4:])
    with pytest.raises(TypeError, match="admit"):
        native.admit({}, (KEY,), 1, NOW, [0], False)


def test_only_its_own_algorithms_have_meters(native: Any) -> None:
    with pytest.raises(LookupError, match="concurrency"):
        native.Meter(Limit(3, MINUTE, algorithm="concurrency"), {})
    with pytest.raises(AttributeError):
        native.Meter(object(), {})
    with pytest.raises(TypeError):
        native.Meter(LIMIT, [])


HOSTILE = {
    "a meter of a limit whose numbers are 0": """
from headgate import _native

class Zeros:
    def __init__(self, algorithm):
        self.algorithm = algorithm
        self.quota = self.period_us = self.tokens = self.ticks = self.full = 0

for algorithm in _native.ALGORITHMS:
    for name in ("quota", "period_us", "tokens", "ticks", "full"):
        limit = Zeros(algorithm)
        vars(limit).update(quota=1, period_us=1, tokens=1, ticks=1, full=1)
        setattr(limit, name, 0)
        try:
            _native.Meter(limit, {})
        except OverflowError as error:
            assert "is not a positive integer" in str(error)
        else:
            raise AssertionError("it was taken")
""",
    "a cost that changes the requests while they are compared": """
from datetime import timedelta
from headgate import Limit
from headgate.stores.operations import Check
from headgate._native import pack_keys

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
    with pytest.raises(TypeError, match="not a verdict"):
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


def test_sources_in_c_keep_to_the_form_of_the_house() -> None:
    for file in sorted(Path(headgate.__file__).parent.rglob("*.[ch]")):
        text = file.read_text("ascii")
        assert text.startswith("/* "), file
        assert max(map(len, text.splitlines())) <= 120, file
        assert not any(one == other == "" for one, other in pairwise(text.splitlines())), file
