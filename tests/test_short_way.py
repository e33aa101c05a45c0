"""The short way through the gate, in C, lets in whom the long way lets in, and tells them the same."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from growth import assert_nothing_grows
from headgate.adapters import door
from headgate.adapters.asgi import AsgiArrival
from headgate.adapters.gate import AsyncGate, Gate
from headgate.adapters.way import FREE
from headgate.policy.loading import read
from headgate.testing import FakeClock

if TYPE_CHECKING:
    from collections.abc import Callable

    from headgate.adapters.way import Admission

POLICY = """
tier: free
identity:
  proxies: [10.0.0.0/8]
  api_key: {header: X-API-Key, bearer: true}
clients: [{api_key: two, tier: pro}]
blocked: [{ip: 192.0.2.66, reason: abuse}]
routes:
  - {path: /health, cost: 0}
  - {path: /search, cost: 3}
limits:
  - {name: each, by: ip, bucket: 6/minute}
  - {name: key, path: "/keys/{id}", by: api_key, bucket: "4/minute, burst 2"}
  - {name: user, path: /users, by: user, bucket: 2/minute, tiers: {pro: 4/minute}}
  - {name: failed, path: /login, by: ip, bucket: 3/minute, count_when: status == 401}
  - {name: held, path: /jobs, by: ip, bucket: {algorithm: concurrency, quota: 2, period: 1 minute}}
  - {name: watched, path: /new, by: ip, bucket: 1/minute, shadow: true}
  - {name: everybody, path: /search, by: global, bucket: 40/minute, algorithm: gcra}
"""
PATHS = ["/", "/health", "/search", "/keys/1", "/keys/2", "/users", "/login", "/jobs", "/new", "/nowhere//"]


class Arrival(NamedTuple):
    path: str = "/"
    sent: dict[str, list[str]] = {}  # noqa: RUF012 - nobody changes it
    peer: str | None = "203.0.113.9"
    native: Any = None
    method: str = "GET"
    below: str | None = None

    def header(self, name: str) -> list[str]:
        return list(self.sent.get(name, []))


def gates(policy: str = POLICY, kind: Callable[..., Any] = Gate, **options: Any) -> tuple[Any, Any, FakeClock]:
    """One with a short way, one that has only the long one, and their clock."""
    clock = FakeClock()
    both = [kind(read(policy), clock=clock, secret=bytes(16), **options) for _ in range(2)]
    assert both[0].short_way or both[0]._way
    both[1].short_way = both[1]._way = None
    return both[0], both[1], clock


def told(admission: Admission) -> Any:
    refusal, resolution, decision = admission.refusal, admission.resolution, admission.decision
    return (
        None if decision is None else decision._replace(id=None),  # a lease's own
        *(admission.allowed, admission.headers, admission.is_over, admission.came_us),
        resolution and (resolution.keys, resolution.cost, resolution.who, resolution.tier, resolution.block),
        refusal and (refusal.status, refusal.headers, refusal.body),
        [shadow.decision for shadow in admission.shadows],
    )


def some(*lines: str) -> st.SearchStrategy[list[str]]:
    return st.lists(st.sampled_from(lines), max_size=2)


arrivals = st.builds(
    Arrival,
    st.sampled_from(PATHS),
    st.fixed_dictionaries(
        {},
        optional={
            "x-api-key": some("one", "two", ""),
            "authorization": some("Bearer one", "Basic two"),
            "x-forwarded-for": some("198.51.100.1", "198.51.100.2, 10.0.0.2", "x"),
        },
    ),
    st.sampled_from(["203.0.113.9", "10.0.0.1", "2001:db8::1", "192.0.2.66", "x", None]),
    st.sampled_from(["ada", "bob", None]),
    st.sampled_from(["GET", "GET", "HEAD", "POST", "get", "ODD"]),
    st.sampled_from([None, None, "/users"]),
)
steps = st.lists(st.tuples(arrivals, st.sampled_from([0, 0, 1, 20_000_000])), min_size=5, max_size=40)


def in_asgi(arrival: Arrival, **odd: Any) -> Any:
    """The same request, as a server of ASGI hands it over."""
    lines = [(name.encode(), line.encode()) for name, lines in arrival.sent.items() for line in lines]
    client = None if arrival.peer is None else (arrival.peer, 1)
    scope = {"path": arrival.path, "method": arrival.method, "client": client, "headers": lines, "user": arrival.native}
    return AsgiArrival({**scope, **odd})


def user_of(arrival: Any) -> Any:
    return arrival.native["user"] if isinstance(arrival.native, dict) else arrival.native


@given(steps, st.sampled_from([None, lambda *_: None]), st.sampled_from([None, in_asgi]))
def test_it_leads_where_the_long_one_leads(steps: list[Any], on_decision: Any, made: Any) -> None:
    """Where somebody is told of decisions, only what is met is found in C."""
    short, long, clock = gates(identities={"user": user_of}, on_decision=on_decision)
    for arrival, later_us in (*steps, *steps):  # who has come once is known
        arrival = arrival if made is None else made(arrival)
        clock.advance(timedelta(microseconds=later_us))
        in_c, in_python = short.admit(arrival), long.admit(arrival)
        assert told(in_c) == told(in_python)
        for gate, admission in ((short, in_c), (long, in_python)):
            if not admission.is_over:
                gate.finish(admission, 401)


@pytest.mark.parametrize("kind", [Gate, AsyncGate])
def test_who_comes_again_takes_it(kind: Callable[..., Any]) -> None:
    gate, _, _ = gates(kind=kind, identities={"user": lambda _: "ada"})
    again, other = Arrival("/keys/1", {"x-api-key": ["one"]}), Arrival("/keys/1", {"x-api-key": ["two"]})
    assert gate.short_way(again) is None
    first = read_by_the_long_way(gate, again)
    second = gate.short_way(again)
    assert (first.decision.remaining, second.decision.remaining, second.allowed) == (1, 0, True)
    assert gate.short_way(again).refusal.status == 429
    assert gate.short_way(other) is None
    read_by_the_long_way(gate, Arrival("/health"))
    assert gate.short_way(Arrival("/health")) is FREE


@pytest.mark.parametrize("key", ["one", ""])
def test_what_comes_from_asgi_is_read_without_asking_and_known_all_the_same(key: str) -> None:
    """By whichever way it came before: the hash of a line is that of its bytes."""
    gate, _, _ = gates(identities={"user": lambda _: "ada"})
    first = Arrival("/keys/1", {"x-api-key": [key]})
    line = (b"x-api-key", key.encode("latin-1"))
    gate.admit(first)
    assert (gate.short_way(in_asgi(first, headers=[(b"host", b"x"), line])) is None) is not bool(key)
    for headers in ([line, line], [line, (b"authorization", b"Bearer one")], [[*line]], (line,), [(*line, b"")]):
        arrival = in_asgi(first, headers=headers)
        with suppress(TypeError):  # of what is no header the long way says the same
            gate.short_way(arrival)
    assert gate.short_way(in_asgi(Arrival("/keys/1"), headers=[(b"x-api-keys", b"one")])) is None
    assert all(hash(text) == hash(text.encode("latin-1")) for text in ("", "one", "\x00é"))


def read_by_the_long_way(gate: Any, arrival: Any) -> Any:
    if isinstance(gate, AsyncGate):
        return asyncio.run(gate.admit(arrival))
    way, gate.short_way = gate.short_way, None
    admission: Any = gate.admit(arrival)
    gate.short_way = way
    return admission


def test_where_the_app_is_asked_or_leases_are_held_or_somebody_watches_there_is_none() -> None:
    gate, _, _ = gates(identities={"user": lambda _: "ada"})
    for path in ("/users", "/jobs", "/new"):
        for _ in range(2):
            admission = gate.admit(Arrival(path))
            if not admission.is_over:
                gate.finish(admission, 200)
        assert gate.short_way(Arrival(path)) is None


def test_it_is_closed_while_a_gate_is_off_or_has_somebody_to_tell_and_open_again_afterwards() -> None:
    gate, _, _ = gates()
    gate.is_on = False
    assert gate.short_way is None
    assert gate.admit(Arrival()) is FREE
    gate.is_on = True
    seen: list[Any] = []
    gate.on_decision = lambda _, admission: seen.append(admission)
    assert gate.short_way is None
    assert [gate.admit(Arrival()) for _ in range(2)] == seen
    gate.on_decision = None
    assert gate.short_way(Arrival()).decision.remaining == 3
    assert gate._way is None
    before = gate.use_memory(FakeClock())
    assert gate.short_way(Arrival()) is None, "no counts yet: a key that is new takes the long way"
    gate.use(*before)


@pytest.mark.parametrize(
    "options",
    [{"health_path": "/headgate"}, {"identities": {"tier": lambda _: "pro"}}],
    ids=lambda options: next(iter(options)),
)
def test_there_is_none_where_every_request_is_special(options: dict[str, Any]) -> None:
    gate = Gate(read(POLICY), clock=FakeClock(), secret=bytes(16), **options)
    assert gate.short_way is gate._way is None


def test_what_a_request_meets_is_recognized_for_those_who_ask_elsewhere() -> None:
    gate, _, clock = gates(on_decision=lambda *_: None)
    clock.set_us(77)
    jobs, unknown = Arrival("/jobs"), Arrival("/jobs", peer="203.0.113.10")
    assert gate._way.recognize(jobs) is None
    admission = gate.admit(jobs)
    gate.finish(admission, 200)
    plan, met, check, _, now_us = gate._way.recognize(jobs)
    assert (plan, met, check.keys, now_us) == (met.route, admission.resolution, met.keys, 77)
    assert gate._way.recognize(unknown) is None
    gate.block("ip", "198.51.100.1")
    assert gate._way.recognize(jobs) is None
    assert gate.admit(Arrival("/health")) is FREE


def test_it_is_no_way_around_a_block() -> None:
    gate, _, _ = gates()
    assert [gate.admit(Arrival()).allowed for _ in range(2)] == [True, True]
    gate.block("ip", "203.0.113.9")
    assert gate.short_way(Arrival()) is None
    assert gate.admit(Arrival()).refusal.status == 403
    gate.unblock("ip", "203.0.113.9")
    assert gate.short_way(Arrival()).allowed


def test_what_begins_or_ends_in_the_policy_is_seen_there_too() -> None:
    policy = """
limits: [{name: each, by: ip, bucket: 5/minute}]
overrides:
  - {ip: 203.0.113.9, limit: each, bucket: 9/minute, valid_until: 2096-01-01T00:00:10Z, reason: a launch}
"""
    gate, _, clock = gates(policy)
    clock.set_us(3_976_214_400_000_000)
    gate.admit(Arrival())
    assert gate.short_way(Arrival()).decision.remaining == 7
    clock.advance(timedelta(seconds=10))
    assert gate.short_way(Arrival()) is None
    assert gate.admit(Arrival()).decision.remaining < 5


class Odd:
    """An arrival that has everything, but for what is said."""

    def __init__(self, **odd: Any) -> None:
        self._odd = odd

    def __getattr__(self, name: str) -> Any:
        value = self._odd.get(name, getattr(Arrival("/keys/1", {"x-api-key": ["one"]}), name))
        if isinstance(value, type):
            raise value
        return value


@pytest.mark.parametrize("name", ["method", "path", "below", "peer", "header"])
def test_what_goes_wrong_there_is_the_callers_to_hear(name: str) -> None:
    gate, _, _ = gates()
    gate.admit(Arrival("/keys/1", {"x-api-key": ["one"]}))
    assert gate.short_way(Odd()).allowed
    for way in (gate.short_way, gate.short_way.recognize):
        with pytest.raises(ZeroDivisionError):
            way(Odd(**{name: ZeroDivisionError}))


def test_what_is_unusual_is_left_to_the_long_one() -> None:
    gate, _, _ = gates()
    gate.admit(Arrival("/keys/1", {"x-api-key": ["one"]}))
    for odd in ({"header": lambda _: ("one",)}, {"header": lambda _: ["one", "one"]}, {"path": "/elsewhere"}):
        assert gate.short_way(Odd(**odd)) is None
    with pytest.raises(TypeError):
        gate.short_way(Odd(path=["/"]))  # the long way says the same of it
    with pytest.raises(TypeError):
        gate.short_way(Odd(header=lambda _: [[]]))
    for wrong in ((), (Arrival(), Arrival())):
        with pytest.raises(TypeError, match="arrival"):
            gate.short_way(*wrong)
    with pytest.raises(TypeError):
        door._ShortWay(gate.rules, [], None, (), (), None, None, {}, None)


def test_it_gives_back_all_that_it_has_borrowed() -> None:
    gate, _, _ = gates(POLICY.replace("6/minute", "10000000/minute"))
    usual, denied = Arrival("/"), Arrival("/keys/1", {"x-api-key": ["one"], "x-forwarded-for": ["198.51.100.1"]})
    arrivals = [usual, denied, Arrival("/health"), Arrival("/login"), Arrival("/elsewhere")]
    failing = [Odd(peer=ValueError), Odd(header=lambda _: [[]]), Odd(path=[])]
    for arrival in (*arrivals, denied, denied):
        gate.admit(arrival)

    def once() -> None:
        for arrival in arrivals:
            gate.short_way(arrival)
            gate.short_way.recognize(arrival)
        for arrival in failing:
            with suppress(TypeError, ValueError):
                gate.short_way(arrival)
        gate._find_short_way()

    assert_nothing_grows(once)
