"""The event stream of gates: every decision reaches every observer once, in order, and outside of the request."""

from __future__ import annotations

import asyncio
import gc
import os
import threading
import weakref
from typing import TYPE_CHECKING, Any

import pytest

from headgate.gate import event_stream
from headgate.gate.event_stream import DecisionEvent, flush_all
from headgate.gate.gate import AsyncGate, Gate
from headgate.policy import read
from headgate.telemetry.metrics.counters import Metrics
from headgate.testing import FakeClock
from support.servers import wait_until
from support.traffic import Request

if TYPE_CHECKING:
    from collections.abc import Sequence

POLICY = "limits: [{name: a, by: ip, bucket: 3/hour}]"


class Recorder:
    """An observer that keeps all events, and the threads that delivered them."""

    def __init__(self) -> None:
        self.events: list[DecisionEvent] = []
        self.batches: list[int] = []
        self.threads: set[str] = set()

    def observe(self, events: Sequence[DecisionEvent]) -> None:
        self.events += events
        self.batches.append(len(events))
        self.threads.add(threading.current_thread().name)


@pytest.fixture
def recorder() -> Recorder:
    return Recorder()


@pytest.fixture
def manual(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let nothing but `flush` deliver events."""
    monkeypatch.setattr(event_stream.EventStream, "_start", lambda _: None)


def gate_with(*observers: Any, **options: Any) -> Gate:
    gate = Gate(read(POLICY), **options)
    for each in observers:
        gate.add_observer(each)
    return gate


def test_event_has_what_was_decided(recorder: Recorder) -> None:
    clock = FakeClock(start_us=7_000_000)
    gate = gate_with(recorder, clock=clock, on_decision=lambda *_: clock.advance(0.002))
    admissions = [gate.admit(Request(method="PUT")) for _ in range(4)]
    gate.flush_events()
    assert [event.outcome for event in recorder.events] == ["allowed"] * 3 + ["denied"]
    event = recorder.events[0]
    assert (event.received_us, event.duration_us, event.method) == (7_000_000, 2_000, "PUT")
    assert (event.resolution, event.decision) == (admissions[0].resolution, admissions[0].decision)
    assert event.sample is None


def test_request_to_an_exempt_route_has_no_event(recorder: Recorder) -> None:
    gate = Gate(read('{"routes": [{"path": "/health", "cost": 0}], "limits": {"default": "5/day"}}'))
    gate.add_observer(recorder)
    gate.admit(Request(path="/health"))
    gate.flush_events()
    assert recorder.events == []


def test_thread_delivers_in_order_and_outside_of_the_request(recorder: Recorder) -> None:
    clock = FakeClock()
    gate = gate_with(recorder, clock=clock)
    for _ in range(1_000):
        gate.admit(Request())
        clock.advance(0.001)
    wait_until(lambda: len(recorder.events) == 1_000, "all events")
    assert [event.received_us for event in recorder.events] == [number * 1_000 for number in range(1_000)]
    assert recorder.threads == {"headgate-events"}
    assert max(recorder.batches) <= event_stream.BATCH_SIZE


@pytest.mark.usefixtures("manual")
def test_observer_that_fails_is_logged_and_affects_no_other(
    recorder: Recorder, caplog: pytest.LogCaptureFixture
) -> None:
    class Failing:
        def observe(self, events: Sequence[DecisionEvent]) -> None:
            raise ValueError(f"{len(events)}")

    gate = gate_with(Failing(), recorder)
    assert gate.admit(Request()).allowed
    gate.flush_events()
    assert len(recorder.events) == 1
    assert "an observer of the gate failed on 1 events" in caplog.text


@pytest.mark.usefixtures("manual")
def test_observer_receives_the_events_between_its_addition_and_its_removal(recorder: Recorder) -> None:
    gate = gate_with(Recorder())
    gate.admit(Request())
    gate.add_observer(recorder)
    gate.add_observer(recorder)  # once is enough
    gate.admit(Request())
    gate.remove_observer(recorder)
    gate.admit(Request())
    gate.flush_events()
    assert len(recorder.events) == 1
    assert recorder not in gate.observers


@pytest.mark.usefixtures("manual")
def test_events_beyond_the_bound_are_dropped_and_counted(
    recorder: Recorder, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(event_stream, "MAX_EVENTS", 10)
    gate, metrics = gate_with(recorder), Metrics()
    metrics.watch(gate)
    for _ in range(13):
        gate.admit(Request())
    read = {sample.family.name: sample.value for sample in metrics.read()}
    assert gate.dropped_events == read["rate_limiter_events_dropped"] == 3
    assert len(recorder.events) == 10
    assert "2 events dropped" in caplog.text
    gate.admit(Request())
    gate.flush_events()
    assert len(recorder.events) == 11


def test_observer_may_be_given_as_on_decision(recorder: Recorder) -> None:
    gate = Gate(read(POLICY), on_decision=recorder)
    gate.admit(Request())
    assert gate.on_decision is recorder
    gate.on_decision = None
    gate.admit(Request())
    flush_all()
    assert len(recorder.events) == 1


def test_hooks_run_inside_the_request_until_they_are_removed() -> None:
    called: list[str] = []
    gate = Gate(read(POLICY), on_decision=lambda *_: called.append("app"))

    def trace(*_: Any) -> None:
        called.append("trace")

    gate.add_observer(trace)
    gate.admit(Request())
    assert called == ["app", "trace"]
    gate.remove_observer(trace)
    gate.on_decision = None
    gate.admit(Request())
    assert called == ["app", "trace"]


def test_observer_may_flush(recorder: Recorder) -> None:
    gate = Gate(read(POLICY))

    class Flushing:
        def observe(self, _: Sequence[DecisionEvent]) -> None:
            gate.flush_events()

    gate.add_observer(Flushing())
    gate.add_observer(recorder)
    gate.admit(Request())
    gate.flush_events()
    assert len(recorder.events) == 1


@pytest.mark.usefixtures("manual")
def test_closing_a_gate_delivers_its_last_events(recorder: Recorder) -> None:
    async def serve() -> None:
        gate = AsyncGate(read(POLICY), on_decision=recorder)
        await gate.admit(Request())
        await gate.close()

    asyncio.run(serve())
    other = gate_with(recorder)
    other.admit(Request())
    other.close()
    assert len(recorder.events) == 2


def test_gate_that_is_gone_has_delivered_its_last_events(recorder: Recorder) -> None:
    gate = gate_with(recorder)
    there = weakref.ref(gate)
    gate.admit(Request())
    del gate
    gc.collect()
    assert there() is None
    wait_until(lambda: recorder.events, "the last event")


def test_forked_child_leaves_the_events_of_its_parent_to_it(recorder: Recorder) -> None:
    gate = gate_with(recorder)
    gate.admit(Request())
    readable, writable = os.pipe()
    child = os.fork()
    if child == 0:
        counts = b"?"
        try:
            recorder.events.clear()
            gate.admit(Request())
            wait_until(lambda: recorder.events, "the thread of the child")
            counts = b"%d" % len(recorder.events)
        finally:
            os.write(writable, counts)
            os._exit(0)
    os.waitpid(child, 0)
    gate.flush_events()
    assert (os.read(readable, 9), len(recorder.events)) == (b"1", 1)


def test_thread_ends_when_idle_and_another_one_starts(recorder: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_stream, "INTERVAL_S", 0.005)
    gate = gate_with(recorder)
    for number in range(1, 4):
        gate.admit(Request())
        wait_until(lambda number=number: len(recorder.events) == number, "the event")  # type: ignore[misc]
        wait_until(lambda: gate._events._thread is None, "the end of the thread")


def test_no_event_is_lost_or_delivered_twice_under_load(recorder: Recorder) -> None:
    gate = gate_with(recorder)
    start = threading.Barrier(5)

    def send() -> None:
        start.wait()
        for _ in range(500):
            gate.admit(Request())

    def flush() -> None:
        start.wait()
        for _ in range(50):
            gate.flush_events()

    threads = [threading.Thread(target=each) for each in (send, send, send, flush, flush)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    gate.flush_events()
    assert len(recorder.events) == len({id(event) for event in recorder.events}) == 1_500
