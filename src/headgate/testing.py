"""Tools for tests of apps: a clock that you move, and limits that count from nothing, are off, or lose their store."""

from __future__ import annotations

import time
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from math import isfinite
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from headgate.clock import DAY_US
from headgate.errors import InvalidInput
from headgate.limiter import AsyncLimiter, Limiter, creation_hooks, limiters
from headgate.stores.memory import MemoryStore
from headgate.stores.operations import Check, checked

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from headgate.decisions import Decision
    from headgate.gate.admission import Admission, RequestInfo
    from headgate.stores.operations import Cost

    Undo: TypeAlias = Callable[[], object]

__all__ = ["FakeClock", "FakeRequest", "IsolatedLimits", "RecordedRequest", "isolated_limits", "limits_off"]


@contextmanager
def isolated_limits(*, start_us: int | None = None) -> Iterator[IsolatedLimits]:
    """Give all gates and limiters of this process empty counters in memory and a fake clock.

    This includes those created inside the block. Afterwards, everything is as before. The clock starts at `start_us`,
    by default at the last midnight (UTC), so that windows of up to a day start there and dates in the policy apply.
    """
    limits = IsolatedLimits(FakeClock(time.time_ns() // 1000 // DAY_US * DAY_US if start_us is None else start_us))
    with _everywhere(limits.take, limits.take_limiter):
        yield limits


@contextmanager
def limits_off() -> Iterator[None]:
    """Let all gates and limiters of this process, including new ones, allow everything and count nothing."""

    def turn_off(gate: Any) -> Undo:
        was_on, gate.is_on = gate.is_on, False
        return lambda: setattr(gate, "is_on", was_on)

    def turn_off_limiter(limiter: Any) -> Undo:
        clock = FakeClock()
        return _use_engine(limiter, type(limiter.engine).over_memory(_UnlimitedStore(clock), clock))

    with _everywhere(turn_off, turn_off_limiter):
        yield


@contextmanager
def _everywhere(change_gate: Callable[[Any], Undo], change_limiter: Callable[[Any], Undo]) -> Iterator[None]:
    """Change all gates and limiters, including new ones."""
    from headgate.gate.gate import Gate  # imported late: FakeClock alone needs no gate

    with ExitStack() as undoing:
        for change, existing, hooks in (
            (change_gate, Gate.instances, Gate.creation_hooks),
            (change_limiter, limiters, creation_hooks),
        ):

            def take(each: Any, change: Callable[[Any], Undo] = change) -> None:
                undoing.callback(change(each))

            for each in list(existing):
                take(each)
            hooks.append(take)
            undoing.callback(hooks.remove, take)
        yield


def _use_engine(limiter: Any, engine: Any) -> Undo:
    """Replace the state of a limiter by that of one with another engine."""
    fresh = AsyncLimiter(engine) if engine.is_async else Limiter(engine)
    before, limiter.__dict__ = limiter.__dict__, fresh.__dict__
    return lambda: setattr(limiter, "__dict__", before)


class _UnlimitedStore(MemoryStore):
    """Answers each check as one of cost 0, so that everything passes and nothing is counted."""

    __slots__ = ()

    def check(self, *keys: Any, cost: Cost = 1, id: str | None = None) -> Decision:
        return self.decide(checked(keys, cost, id))

    def decide(self, call: Check) -> Decision:
        return super().decide(Check(call.keys, 0))


@dataclass(frozen=True, slots=True)
class FakeRequest:
    """A `RequestInfo` without a framework, for tests of identity functions and of `gate.admit()`.

    >>> FakeRequest("/search", headers={"x-tenant": "acme"}).header("x-tenant")
    ['acme']
    """

    path: str = "/"
    method: str = "GET"
    peer: str | None = "203.0.113.9"
    headers: Mapping[str, str | Sequence[str]] = field(default_factory=dict)
    """By name in lower case: the value, or the values of several lines."""
    native: Any = None
    mounted_path: str | None = None

    def header(self, name: str) -> list[str]:
        values = self.headers.get(name, ())
        return [values] if isinstance(values, str) else list(values)


class RecordedRequest(NamedTuple):
    """A request and its outcome; `str()` explains it."""

    method: str
    path: str
    admission: Admission

    @property
    def allowed(self) -> bool:
        return self.admission.allowed

    @property
    def blocked(self) -> bool:
        """True if a block rejected it."""
        return self.admission.resolution is not None and self.admission.resolution.block is not None

    @property
    def denied_by(self) -> tuple[str, ...]:
        """The names of the limits that denied it."""
        decision = self.admission.decision
        return () if self.allowed or decision is None else decision.denied_by

    @property
    def would_be_denied_by(self) -> tuple[str, ...]:
        """The names of the limits with `shadow: true` that would have denied it."""
        return tuple(shadow.applied.rule.name for shadow in self.admission.shadows if not shadow.decision.allowed)

    def __str__(self) -> str:
        decision = self.admission.decision
        undecided = "blocked" if self.blocked else "allowed: no limit applies to it"
        return f"{self.method} {self.path} was {undecided if decision is None else decision.reason}"


class IsolatedLimits:
    """The result of `isolated_limits()`: a clock, the recorded decisions, and assertions."""

    def __init__(self, clock: FakeClock) -> None:
        self.clock = clock
        self.decisions: list[RecordedRequest] = []
        """All requests that gates decided on, newest last. Routes of cost 0 are not recorded."""
        self._gates: list[Any] = []
        self._use_fresh_counts: list[Callable[[bool], Undo]] = []
        """For each isolated gate and limiter; the argument is True for an unavailable store."""
        self._is_down = False

    def reset(self) -> None:
        """Forget all counts and decisions; the clock keeps its time."""
        self.decisions.clear()
        for use_fresh_counts in self._use_fresh_counts:
            use_fresh_counts(self._is_down)

    @contextmanager
    def store_down(self) -> Iterator[None]:
        """Make the store unavailable inside the block: routes and limiters use their `on_failure`.

        After the block, all counts are as they were before.
        """
        earlier = list(self._use_fresh_counts)
        with ExitStack() as undoing:
            for use_fresh_counts in earlier:
                undoing.callback(use_fresh_counts(True))
            self._is_down = True
            try:
                yield
            finally:
                self._is_down = False
                for use_fresh_counts in self._use_fresh_counts[len(earlier) :]:  # created in the block
                    use_fresh_counts(False)

    def assert_allowed(self, on: str | None = None) -> None:
        """Assert that the last request was allowed; `on` selects a route: "/login" or "POST /login"."""
        __tracebackhide__ = True
        if not (last := self._last(on)).allowed:
            raise AssertionError(f"not allowed: {last}")

    def assert_denied_by(self, *names: str, on: str | None = None) -> None:
        """Assert that the last request was denied by each of these limits, and possibly by others."""
        __tracebackhide__ = True
        last = self._last(on)
        for name in [name for name in names if name not in last.denied_by]:
            told = f"not denied by {name!r}: {last}"
            if name in last.would_be_denied_by:
                told += f"; {name!r} would deny it, but is a shadow"
            elif name not in (known := self._names()):
                told += f"; no limit is called {name!r}, only {', '.join(map(repr, known)) or 'none at all'}"
            raise AssertionError(told)
        if last.allowed or last.blocked:
            raise AssertionError(f"not denied: {last}")

    def assert_blocked(self, on: str | None = None) -> None:
        """Assert that the last request was blocked."""
        __tracebackhide__ = True
        if not (last := self._last(on)).blocked:
            raise AssertionError(f"not blocked: {last}")

    def take_limiter(self, limiter: Any) -> Undo:
        """Isolate one more limiter; returns the function that ends it."""

        def use_fresh_counts(is_down: bool) -> Undo:
            engine = type(limiter.engine)(clock=self.clock, on_failure=limiter.engine.failure.mode)
            if is_down:
                engine.disconnect_store()
            return _use_engine(limiter, engine)

        self._use_fresh_counts.append(use_fresh_counts)
        return use_fresh_counts(self._is_down)

    def take(self, gate: Any) -> Undo:
        """Isolate and watch one more gate; returns the function that ends it."""

        def use_fresh_counts(is_down: bool) -> Undo:
            return partial(gate.replace_limiter, *gate.isolate(self.clock, is_down=is_down))

        def record(request: RequestInfo, admission: Admission) -> None:
            self.decisions.append(RecordedRequest(request.method, request.path, admission))

        undo = use_fresh_counts(self._is_down)
        gate.add_observer(record)
        self._gates.append(gate)
        self._use_fresh_counts.append(use_fresh_counts)
        return lambda: (undo(), gate.remove_observer(record))

    def _last(self, on: str | None) -> RecordedRequest:
        __tracebackhide__ = True
        method, _, path = (on or "").rpartition(" ")
        for request in reversed(self.decisions):
            if path in ("", request.path) and method in ("", request.method):
                return request
        seen = ", ".join(dict.fromkeys(f"{request.method} {request.path}" for request in self.decisions))
        nothing = "were none at all" if self._gates else "is not a single gate in this process"
        raise AssertionError(
            f"no request{f' to {on}' if on else ''} was decided on; there {f'were: {seen}' if seen else nothing}. "
            "Requests to routes of cost 0 and to exempt views are not recorded"
        )

    def _names(self) -> list[str]:
        """The names of all limits, including those of views that were called."""
        policies = [each for gate in self._gates for each in (gate.active_policy, *gate.cached_view_policies())]
        return list(dict.fromkeys(rule.name for policy in policies for rule in policy.snapshot.policy.rules))


class FakeClock:
    """A clock that only `advance` and `set_us` move; give it to a limiter on any store and nothing has to sleep.

    >>> from datetime import timedelta
    >>> from headgate import Limit, Limiter
    >>> clock = FakeClock()
    >>> limiter = Limiter(clock=clock)
    >>> login = Limit(1, timedelta(minutes=1), name="login").by("ada")
    >>> limiter.check(login).allowed, limiter.check(login).retry_after
    (True, 60.0)
    >>> clock.advance(60)
    >>> limiter.check(login).allowed
    True
    """

    __slots__ = ("_now_us",)

    def __init__(self, start_us: int = 0) -> None:
        self.set_us(start_us)

    def now_us(self) -> int:
        return self._now_us

    def advance(self, seconds: float | timedelta) -> None:
        """Move by `seconds`, rounded to whole microseconds; a negative number moves the clock back."""
        if isinstance(seconds, timedelta):
            self.set_us(self._now_us + seconds // timedelta(microseconds=1))
        elif isinstance(seconds, int | float) and not isinstance(seconds, bool) and isfinite(seconds):
            self.set_us(self._now_us + round(seconds * 1_000_000))
        else:
            raise InvalidInput(f"a clock cannot move by {seconds!r}: give seconds, or a timedelta")

    def set_us(self, now_us: int) -> None:
        """Jump to an instant, also backwards, as real clocks do."""
        if type(now_us) is not int or not 0 <= now_us < 2**52:
            raise InvalidInput(f"a clock cannot stand at {now_us!r}: give whole microseconds from 0 to 2**52")
        self._now_us = now_us

    def sleep(self, seconds: float) -> None:
        """Advance the clock; `acquire` calls this instead of waiting."""
        self.advance(seconds)

    def __repr__(self) -> str:
        return f"FakeClock(start_us={self._now_us})"
