"""The writer: what is written by a process beside the app's, whatever becomes of either."""

from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import sys
import time
from contextlib import closing
from typing import TYPE_CHECKING, Any

import pytest

from headgate import InvalidConfiguration
from headgate.policy import read
from headgate.telemetry import DecisionLog, DecisionRecord
from headgate.telemetry.decision_log import delivery
from headgate.telemetry.decision_log.sinks.sqlite import SqliteSink
from support.paths import TESTS
from support.servers import wait_until
from support.traffic import SECRET, Kept, Request, Traffic

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

ONE_AN_HOUR = "limits: [{by: ip, bucket: 1/hour}]"

POLICY = """
name: shop
tier: free
routes: [{path: "/orders/{id}", class: orders, cost: 2}]
limits:
  - {name: per-client, by: client, bucket: 3/minute, tiers: {pro: 5/minute}}
  - {name: orders, class: orders, by: tenant, missing: skip, bucket: 8/minute}
  - {name: per-user, path: /search, by: user, missing: skip, bucket: 100/minute}
  - {name: soon, by: ip, bucket: 2/minute, shadow: true}
clients: [{tenant: acme, tier: pro, label: Acme Corp}, {api_key: sk_labelled, label: The partner}]
overrides: [{tenant: globex, limit: orders, bucket: 2/minute}]
blocked: [{user: mallory, reason: "it's scraping"}]
"""


REQUESTS = [
    Request("/orders/7", tenant="acme"),
    Request("/orders/7", tenant="globex"),
    Request("/orders/7", user="carol"),
    Request(user="mallory"),
    Request(user="ada\udc80"),
    Request(api_key="sk_labelled"),
    Request(method="MADEUP", peer="2001:db8::7"),
]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "decisions.db"


@pytest.fixture
def open_log(file: Path) -> Iterator[Callable[..., DecisionLog]]:
    opened: list[DecisionLog] = []

    def open_one(where: Any = None, **options: Any) -> DecisionLog:
        options = {"secret": SECRET, "node": "n1", "sample": 0, "every": 0.005, "writer": "process", **options}
        opened.append(DecisionLog(where or f"sqlite:///{file}", **options))
        return opened[-1]

    yield open_one
    for log in opened:
        log.close(0.2)


def stored(file: Path) -> list[DecisionRecord]:
    with closing(sqlite3.connect(file)) as connection:
        return [DecisionRecord.from_row(row) for row in connection.execute("SELECT * FROM decisions ORDER BY id")]


def is_running(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def pid_of(log: DecisionLog) -> int:
    assert log.writer_pid is not None
    return log.writer_pid


# ------------------------------------------------------------------ the same, from elsewhere


def test_writer_process_writes_the_same_records(file: Path, open_log: Callable[..., DecisionLog]) -> None:
    kept = Kept()
    beside, here = open_log(sample=1), open_log(kept, sample=1, writer="thread")
    for log in (beside, here):
        traffic = Traffic(POLICY, log)
        for request in REQUESTS * 6:
            traffic.send(request)
            traffic.clock.advance(1)
        assert log.flush(30)
    assert beside.writer_pid not in (None, os.getpid())
    assert here.writer_pid is None
    found = stored(file)
    assert [each._replace(id="") for each in found] == [each._replace(id="") for each in kept.records]
    assert {each.outcome for each in found} == {"allowed", "denied", "blocked"}
    assert {"Acme Corp", "The partner"} <= {each.label for each in found}
    assert any(each.also for each in found)
    assert any(each.shadow for each in found)
    assert {each.origin for each in found} >= {"override", "tier", ""}


def test_writer_process_uses_labels_of_the_new_policy(file: Path, open_log: Callable[..., DecisionLog]) -> None:
    log = open_log(sample=1)
    traffic = Traffic(POLICY, log)
    for name in ("Acme Corp", "Acme Ltd", "Acme SE"):
        traffic.gate._activate(read(POLICY.replace("Acme Corp", name)))
        traffic.send(tenant="acme")
        traffic.clock.advance(1)
        assert log.flush(30)
    assert [each.label for each in stored(file)] == ["Acme Corp", "Acme Ltd", "Acme SE"]


def test_writer_process_gets_no_secret_on_its_command_line(open_log: Callable[..., DecisionLog]) -> None:
    log = open_log()
    Traffic(POLICY, log).send(user="mallory")
    assert log.flush(30)
    with open(f"/proc/{log.writer_pid}/cmdline", "rb") as shown:
        assert SECRET.encode() not in shown.read()


# ------------------------------------------------------------------ ends


def test_unconfirmed_batch_of_a_killed_writer_is_written_once(file: Path, open_log: Callable[..., DecisionLog]) -> None:
    log = open_log()
    traffic = Traffic(ONE_AN_HOUR, log)
    traffic.send(times=2)
    assert log.flush(30)
    first = pid_of(log)
    with closing(sqlite3.connect(file, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")  # so that the writer process is in the middle of writing
        traffic.send(times=500)
        assert not log.flush(0.3)
        os.kill(first, signal.SIGKILL)
        wait_until(lambda: log.stats.failures, "a failure")
        assert log.stats.error == "the writer process has ended with -9"
        traffic.send(times=500)
        other.execute("ROLLBACK")
    assert log.flush(30)
    assert log.writer_pid != first
    assert not is_running(first)
    found = stored(file)
    assert len({each.id for each in found}) == len(found) == 1001
    assert log.stats[:3] == (1001, 0, 0)


def test_repeatedly_killed_writer_processes_lose_nothing(file: Path, open_log: Callable[..., DecisionLog]) -> None:
    log = open_log()
    traffic = Traffic(ONE_AN_HOUR, log)
    traffic.send()
    for count in range(3):
        for _ in range(20):
            traffic.send(times=100)
            time.sleep(0.001)
        some = count * 2000
        wait_until(lambda some=some: log.stats.written > some and log.writer_pid, "a writer that writes")  # type: ignore[misc]
        os.kill(pid_of(log), signal.SIGKILL)
    assert log.flush(30)
    assert log.stats[:3] == (6000, 0, 0)
    assert len(stored(file)) == 6000
    assert len({each.id for each in stored(file)}) == 6000


def test_signals_of_the_app_do_not_end_its_writer(file: Path, open_log: Callable[..., DecisionLog]) -> None:
    log = open_log()
    traffic = Traffic(ONE_AN_HOUR, log)
    traffic.send(times=2)
    assert log.flush(30)
    writer = pid_of(log)
    for each in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        os.kill(writer, each)
    traffic.send(times=5)
    assert log.flush(30)
    assert log.writer_pid == writer
    assert len(stored(file)) == 6
    log.close()
    assert log.writer_pid is None
    assert not is_running(writer)


def test_with_a_dead_sink_what_is_above_the_bound_is_lost_and_counted(
    tmp_path: Path, open_log: Callable[..., DecisionLog], caplog: pytest.LogCaptureFixture
) -> None:
    log = open_log(f"sqlite:///{tmp_path}/missing/decisions.db", most=200)
    traffic = Traffic(ONE_AN_HOUR, log)
    traffic.send(times=101)
    wait_until(lambda: log.stats.failures, "a failure")
    assert log.stats.error == "OperationalError: unable to open database file"
    traffic.send(times=1000)
    waiting = log.stats.waiting
    assert 200 <= waiting <= 300
    assert log.stats.lost == 1100 - waiting
    assert "the decision log is losing records, as its sink is too slow: 1 lost" in caplog.text
    (tmp_path / "missing").mkdir()
    assert log.flush(30)
    found = stored(tmp_path / "missing" / "decisions.db")
    assert log.stats[:3] == (len(found), 0, 1100 - waiting)
    assert [each.weight for each in found if each.outcome == "lost"] == [1100 - waiting]
    assert sum(each.outcome == "denied" for each in found) == waiting


def test_with_a_slow_sink_nothing_below_the_bound_is_lost(file: Path, open_log: Callable[..., DecisionLog]) -> None:
    log = open_log(most=10_000)
    traffic = Traffic(ONE_AN_HOUR, log)
    traffic.send(times=2)
    assert log.flush(30)
    with closing(sqlite3.connect(file, isolation_level=None)) as other:
        for _ in range(5):
            other.execute("BEGIN IMMEDIATE")
            traffic.send(times=1900)
            time.sleep(0.1)
            other.execute("ROLLBACK")
    assert log.flush(30)
    assert log.stats[:3] == (9501, 0, 0)
    assert len(stored(file)) == 9501


PROCESS = """
import os, signal, sys, time
sys.path.insert(0, {tests!r})
from headgate.telemetry import DecisionLog
from headgate.telemetry.decision_log import delivery, queue
from support.traffic import SECRET, Traffic
queue.EXIT_TIMEOUT_S = delivery.EXIT_TIMEOUT_S = 60  # a busy machine must not cut short what ends by itself
log = DecisionLog("sqlite:///decisions.db", secret=SECRET, sample=0, every=30, writer="process")
traffic = Traffic("limits: [{{by: ip, bucket: 1/hour}}]", log)
traffic.send(times=41)
{then}
"""


def run_process(folder: Path, then: str, code: int = 0) -> list[int]:
    """What a process of its own has printed."""
    command = [sys.executable, "-c", PROCESS.format(tests=str(TESTS), then=then)]
    done = subprocess.run(command, cwd=folder, timeout=100, stdout=subprocess.PIPE, text=True)
    assert done.returncode == code
    return [int(each) for each in done.stdout.split()]


def test_writer_process_writes_the_rest_when_its_app_ends(file: Path) -> None:
    (writer,) = run_process(file.parent, "log.flush(30); print(log.writer_pid, flush=True); traffic.send(times=5000)")
    assert len(stored(file)) == 5040
    assert not is_running(writer)


def test_records_sent_to_the_writer_survive_a_killed_process(file: Path) -> None:
    then = """
log.flush(30)
print(log.writer_pid, flush=True)
other = __import__("sqlite3").connect("decisions.db", isolation_level=None)
other.execute("BEGIN IMMEDIATE")
traffic.send(times=5000)
log.flush(0.3)
assert log.stats.waiting == 5000 and not len(log._queue.events)
os.kill(os.getpid(), signal.SIGKILL)
"""
    (writer,) = run_process(file.parent, then, -signal.SIGKILL)
    wait_until(lambda: not is_running(writer), "the end of the writer process")
    assert len(stored(file)) == 5040


def test_forked_child_has_its_own_writer_process(file: Path) -> None:
    then = """
assert log.flush(30)
mine = log.writer_pid
reading, writing = os.pipe()
if not os.fork():
    assert log.writer_pid is None
    traffic.send(times=7)
    assert log.flush(30)
    assert log.writer_pid not in (None, mine)
    os.close(writing)
    os.read(reading, 1)  # until its parent is done
    traffic.send(times=3)
    sys.exit()
os.close(reading)
traffic.send(times=2)
process = log._subprocess._process
log.close(60)
assert process.returncode == 0  # it has ended by itself, though the child lives
os.close(writing)
assert os.wait()[1] == 0
"""
    assert run_process(file.parent, then) == []
    found = stored(file)
    assert len(found) == 40 + 7 + 3 + 2
    assert len({each.id for each in found}) == len(found)
    assert len({each.id[14:24] for each in found}) == 2


# ------------------------------------------------------------------ when there is one


def test_writer_process_runs_only_under_load(
    file: Path, open_log: Callable[..., DecisionLog], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"RATE_INTERVAL_S": 0.05, "CALM_S": 1.0, "BUSY_RATE": 2000}.items():
        monkeypatch.setattr(delivery, name, value)
    log = open_log(writer="auto")
    traffic = Traffic(ONE_AN_HOUR, log)
    sent = 0

    def send(count: int) -> bool:
        nonlocal sent
        traffic.send(times=count)
        sent += count
        time.sleep(0.01)
        return False

    for _ in range(20):
        send(1)
    assert log.flush(30)
    assert log.writer_pid is None
    wait_until(lambda: log.writer_pid or send(400), "a writer")
    writer = pid_of(log)
    wait_until(lambda: not is_running(writer) or send(1), "the end of the writer process")
    send(1)
    assert log.flush(30)
    assert log._queue._delivery.size == SqliteSink.batch  # it is this process that writes again
    assert len(stored(file)) == sent - 1
    assert log.stats.lost == 0


def test_idle_writer_process_ends(
    file: Path, open_log: Callable[..., DecisionLog], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(delivery, "RATE_INTERVAL_S", 0.01)
    monkeypatch.setattr(delivery, "CALM_S", 0.1)
    log = open_log()
    traffic = Traffic(ONE_AN_HOUR, log)
    traffic.send(times=2)
    assert log.flush(30)
    wait_until(lambda: log.writer_pid is None, "the end of the writer process")
    traffic.send(times=2)
    assert log.flush(30)
    assert log.writer_pid is not None
    assert len(stored(file)) == 3


@pytest.mark.parametrize("program", ["#!/bin/sh\nexit 3\n", None])
def test_app_writes_itself_when_no_writer_can_start(
    tmp_path: Path,
    file: Path,
    open_log: Callable[..., DecisionLog],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    program: str | None,
) -> None:
    broken = tmp_path / "python-broken"
    if program is not None:
        broken.write_text(program)
        broken.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(broken))
    log = open_log()
    Traffic(ONE_AN_HOUR, log).send(times=5)
    assert log.flush(30)
    assert len(stored(file)) == 4
    assert log.stats[:3] == (4, 0, 0)
    assert "the decision log has no writer process, and is written by this one" in caplog.text


def test_server_with_python_inside_is_no_interpreter(
    file: Path, open_log: Callable[..., DecisionLog], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", "/usr/bin/uwsgi")
    log = open_log()
    Traffic(ONE_AN_HOUR, log).send(times=5)
    assert log.flush(30)
    assert (len(stored(file)), log.stats.failures, log.writer_pid) == (4, 0, None)


@pytest.mark.parametrize(
    ("where", "writer", "message"),
    [
        (Kept(), "process", "another process can write only to a sink with a URL, and not to logging; give 'thread'"),
        ("logging://x", "process", "another process can write only to a sink with a URL"),
        ("logging://x", "proces", "unknown writer 'proces': give 'auto', 'thread' or 'process'"),
    ],
)
def test_writer_that_cannot_be_is_refused(where: Any, writer: str, message: str) -> None:
    with pytest.raises(InvalidConfiguration, match=message):
        DecisionLog(where, secret=SECRET, writer=writer)  # type: ignore[arg-type]
