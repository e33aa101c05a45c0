"""The short form of `make chaos`: a fleet under load, real faults, and a judge that notices what is wrong."""

from __future__ import annotations

import math
import socket
import time
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import pytest
from chaos import cascade
from chaos.faults import FAULTS, SECONDS_FOR_A_BYTE, Fault
from chaos.fleet import Fleet
from chaos.judge import judge, quantile
from chaos.load import MODES, TURN_NS, Happening, Kind, Row, Verdict
from chaos.proxy import HOST, Weather
from chaos.rigs import NODES, behind_proxy
from chaos.run import Run, run

if TYPE_CHECKING:
    from collections.abc import Iterator

    from chaos.run import Load

BY_NAME = {fault.name: fault for fault in FAULTS}
SOON_MS = 5_000
"""Far more than it takes, on a machine that has other things to do."""


@pytest.fixture(scope="module")
def fleet() -> Iterator[Fleet]:
    with Fleet(NODES) as fleet:
        yield fleet


def run_once(fleet: Fleet, name: str, load: Load) -> Run:
    fault = BY_NAME[name]
    with fault.rig() as rig:
        return run(fault, load, fleet, rig)


@pytest.mark.parametrize(("name", "load"), [("stopped", "burst"), ("refused", "steady"), ("partition", "burst")])
def test_fleet_bears_it(fleet: Fleet, name: str, load: Load) -> None:
    seen = run_once(fleet, name, load)
    found = judge(seen)
    assert found.wrong == {}
    assert found.answered == found.asked > 800
    assert found.unsettled == 0
    if not seen.lost:
        assert (found.over["closed"], found.over["raise"]) == (0, 0)
    if seen.fault.cut_off:
        assert found.degraded > 100
        assert found.recovered_ms is not None
        assert found.recovered_ms < SOON_MS
        assert found.open_p50_us is not None
        assert found.open_p50_us < 1_000


def test_spike_does_not_become_a_cascade(fleet: Fleet) -> None:
    """Timeouts do not let the spike through, nor do they make it bigger: nobody asks a store that cannot follow."""
    seen = run_once(fleet, "cascade", "burst")
    found = judge(seen)
    assert found.wrong == {}
    assert found.answered == found.asked
    assert (found.over["closed"], found.over["raise"]) == (0, 0)
    assert found.recovered_ms is not None
    assert found.recovered_ms < SOON_MS
    rates = cascade.measure(seen)
    asked, sent = rates.asked, rates.sent
    assert asked[2] > 5 * asked[0]
    bearable = 0.001 / SECONDS_FOR_A_BYTE
    assert sent[2] < 1.5 * bearable
    assert found.wait is not None
    assert found.wait.p50 < 1_000  # without a breaker everybody would wait for the budget


# ------------------------------------------------------------------- the judge

T0 = 1_000 * TURN_NS
MS = 1_000_000


def rows_of(*kinds: Any, mode: Any = "closed", number: int = 0, every_ns: int = MS) -> list[Row]:
    """One check after the other: (kind, verdict, why)."""
    return [
        Row(0, mode, kind, number, T0 + index * every_ns, MS // 10, verdict, why)
        for index, (kind, verdict, why) in enumerate(kinds)
    ]


def run_of(rows: list[Row], *, fault: Fault = BY_NAME["stopped"], **changes: Any) -> Run:
    """A run whose fault lasts from its start to its end; two nodes have seen it."""
    other = [Row(1, "open", Kind.WIDE, 0, T0, MS, Verdict.ALLOWED, None)]
    made = Run(
        fault, "steady", sorted([*rows, *other], key=lambda row: row.start_ns), [], {}, (T0, T0),
        (T0 + 10**10, T0 + 10**10), [], dict.fromkeys(MODES, 10**6), [], [0.0],
    )  # fmt: skip
    return made._replace(**changes)


EXACT, AWAY = None, "Redis did not answer within the budget of # ms"
TURN, WIDE, FLOW = Kind.TURN, Kind.WIDE, Kind.FLOW
DENIED, ALLOWED, RAISED, BROKE = Verdict
WRONG: dict[str, tuple[list[Row], int]] = {
    "an exception reached a caller of closed: boom": (rows_of((WIDE, BROKE, "boom")), 1),
    "an exception reached a caller of open: away": (rows_of((WIDE, RAISED, "away"), mode="open"), 1),
    "open denied without the store": (rows_of((WIDE, DENIED, AWAY), mode="open"), 1),
    "closed allowed without the store": (rows_of((WIDE, ALLOWED, AWAY)), 1),
    "raise allowed without the store": (rows_of((WIDE, ALLOWED, AWAY), mode="raise"), 1),
    "local allowed more than its share of a turn": (rows_of(*[(TURN, ALLOWED, AWAY)] * 4, mode="local"), 2),
    "local allowed more than its share of a flow": (rows_of(*[(FLOW, ALLOWED, AWAY)] * 8, mode="local"), 2),
    "an exact answer denied where nothing was exhausted": (rows_of((WIDE, DENIED, EXACT)), 1),
    "exact answers allowed more than the limit": (rows_of((TURN, DENIED, AWAY), *[(TURN, ALLOWED, EXACT)] * 13), 3),
    "exact answers allowed less than the limit": (rows_of(*[(TURN, ALLOWED, EXACT)] * 7, (TURN, DENIED, EXACT)), 1),
    "exact answers allowed more than has come": (rows_of(*[(FLOW, ALLOWED, EXACT)] * 25), 3),
    "an answer called itself exact while the store could not be reached": (
        rows_of(*[(WIDE, ALLOWED, EXACT)] * 3, every_ns=150 * MS),
        1,
    ),
}


@pytest.mark.parametrize("what", WRONG)
def test_judge_notices(what: str) -> None:
    rows, count = WRONG[what]
    assert judge(run_of(rows)).wrong == {what: count}


@pytest.mark.parametrize(
    "rows",
    [
        rows_of(*[(TURN, ALLOWED, EXACT)] * 10, *[(TURN, DENIED, EXACT)] * 3),
        rows_of(*[(TURN, ALLOWED, EXACT)] * 4),
        rows_of(*[(TURN, ALLOWED, EXACT)] * 4, (TURN, DENIED, AWAY), (TURN, DENIED, EXACT)),
        rows_of(*[(TURN, ALLOWED, AWAY)] * 40, mode="open"),
        rows_of(*[(TURN, ALLOWED, AWAY)] * 2, *[(TURN, DENIED, AWAY)] * 9, mode="local"),
        rows_of(*[(WIDE, RAISED, AWAY)] * 9, mode="raise"),
        rows_of(*[(FLOW, ALLOWED, EXACT)] * 22),
        rows_of(*[(FLOW, ALLOWED, EXACT)] * 100, every_ns=50 * MS),
    ],
)
def test_judge_lets_pass_what_is_right(rows: list[Row]) -> None:
    assert judge(run_of(rows)).wrong == {}


def test_turn_that_the_server_forgot_is_over_admitted_and_not_wrong() -> None:
    rows = rows_of(*[(TURN, ALLOWED, EXACT)] * 15)
    found = judge(run_of(rows, lost=[(T0 + MS, T0 + 2 * MS)]))
    assert (found.wrong, found.over["closed"]) == ({}, 5)


def test_what_passed_without_the_store_is_missed_if_it_is_never_charged() -> None:
    unsent = f"{AWAY} (circuit breaker open)"
    rows = rows_of(
        *[(WIDE, ALLOWED, EXACT)] * 5, *[(WIDE, ALLOWED, AWAY)] * 2, *[(WIDE, ALLOWED, unsent)] * 10, mode="local"
    )
    for counted, missing in ((17, 0), (15, 0), (14, 1), (5, 10)):
        found = judge(run_of(rows, counted=dict.fromkeys(MODES, counted)))
        assert (found.unsettled, found.uncertain) == (missing, 2)
    lost = [Happening(0, "local", "settled", T0, "", uncertain=5), Happening(0, "open", "settled", T0, "", uncertain=1)]
    found = judge(run_of(rows, counted=dict.fromkeys(MODES, 5), happenings=lost))
    assert (found.unsettled, found.uncertain) == (7, 6)


def test_moments_are_measured_from_where_they_should_be() -> None:
    slow, quick = (
        Row(0, "open", WIDE, 0, T0, 5 * MS, ALLOWED, AWAY),
        Row(0, "open", WIDE, 0, T0 + 30 * MS, 20, ALLOWED, AWAY),
    )
    back = Row(0, "open", WIDE, 0, T0 + 220 * MS, MS, ALLOWED, EXACT)
    ended = ((T0 + 100 * MS), (T0 + 120 * MS))
    settled = [Happening(0, "open", "settled", T0 + 150 * MS, "")]
    found = judge(run_of([slow, quick, back], healed_ns=ended, happenings=settled))
    assert (found.detected_ms, found.recovered_ms, found.settled_ms) == (30, 101, 30)
    assert found.open_p50_us == 0.02
    never = judge(run_of([slow, quick], healed_ns=ended))
    assert never.recovered_ms == math.inf


def test_quantiles_are_values_that_were_seen() -> None:
    values = [float(value) for value in range(1, 1001)]
    assert [quantile(values, share) for share in (0.5, 0.99, 0.999, 1.0)] == [500, 990, 999, 1000]


# ------------------------------------------------------------------- the proxy


class Caller:
    """A connection through the proxy, with nothing in between that would try twice."""

    def __init__(self, url: str) -> None:
        self._socket = socket.create_connection((HOST, int(url.rpartition(":")[2].partition("/")[0])))
        self._socket.settimeout(0.25)

    def ping(self) -> bytes:
        self._socket.sendall(b"PING\r\n")
        answer = b""
        while not answer.endswith(b"\n"):
            answer += self._socket.recv(100) or b"(the end)\n"
        return answer

    def __enter__(self) -> Caller:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()


WEATHERS: dict[Weather, tuple[float, type[Exception] | None]] = {
    Weather("fair"): (0.0, None),
    Weather("slow", 0.05): (0.05, None),
    Weather("dripping", 0.01): (0.06, None),  # the seven bytes of the answer
    Weather("crowded", 0.01): (0.06, None),  # the six of the question
    Weather("silent"): (0.25, TimeoutError),
    Weather("refused"): (0.0, ConnectionResetError),
}


@pytest.mark.parametrize("weather", WEATHERS, ids=lambda weather: weather.kind)
def test_weather_is_what_it_is_called(weather: Weather) -> None:
    least, error = WEATHERS[weather]
    with behind_proxy() as rig, Caller(rig.urls[0]) as caller, Caller(rig.urls[1]) as other:
        assert caller.ping() == other.ping() == b"+PONG\r\n"
        rig.proxy.turn(weather, 0)
        start = time.monotonic()
        with pytest.raises(error) if error else nullcontext():
            assert caller.ping() == b"+PONG\r\n"
        assert time.monotonic() - start >= least
        assert other.ping() == b"+PONG\r\n"
        if weather.kind == "refused":
            with pytest.raises(ConnectionRefusedError):
                Caller(rig.urls[0])
        rig.proxy.clear(0)
        with Caller(rig.urls[0]) as later:
            assert later.ping() == b"+PONG\r\n"


def test_proxy_accepts_connections_after_closing_them() -> None:
    with behind_proxy() as rig:
        with Caller(rig.urls[0]) as caller:
            caller.ping()
            rig.proxy.hang_up()
            with pytest.raises(OSError, match=r"reset|Broken"):
                caller.ping()
        with Caller(rig.urls[0]) as caller:
            caller.ping()
        traffic = rig.proxy.traffic()
        assert (sum(each.requests for each in traffic), sum(each.size for each in traffic)) == (2, 12)
