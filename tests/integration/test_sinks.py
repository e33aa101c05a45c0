"""Where records go: SQLite and files that several processes write, real brokers, and ClickHouse's own engine."""

from __future__ import annotations

import fcntl
import json
import logging
import os
import pickle
import sqlite3
import stat
import subprocess
import sys
import threading
import time
from contextlib import closing
from datetime import UTC
from typing import TYPE_CHECKING, Any

import pytest

from headgate import InvalidConfiguration
from headgate.telemetry import DecisionLog, DecisionRecord, open_sink
from headgate.telemetry.decision_log.record import lost_record
from headgate.telemetry.decision_log.sinks import kafka, open_reader, sqlite
from headgate.telemetry.decision_log.sinks.clickhouse import statements
from headgate.telemetry.decision_log.sinks.sqlite import SqliteSink
from headgate.telemetry.decision_log.sinks.text import JsonLinesSink
from headgate.telemetry.human_time import span
from headgate.telemetry.pseudonyms import Pseudonymizer
from headgate.telemetry.why.report import ClientQuery, why
from support.kafka import consume
from support.paths import TESTS
from support.traffic import NOW, SECRET, START_US, Request, Traffic, records_of_all_kinds

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

DAY_US = 86_400_000_000


@pytest.fixture(scope="module")
def records() -> list[DecisionRecord]:
    return records_of_all_kinds()


def at(records: list[DecisionRecord], moved_us: int, token: str = "f" * 10) -> list[DecisionRecord]:
    """The same at another time."""
    return [
        each._replace(id=f"{each.at_us + moved_us:014x}{token}{each.id[24:]}", at_us=each.at_us + moved_us)
        for each in records
    ]


def stored(path: Path) -> list[DecisionRecord]:
    with closing(sqlite3.connect(path)) as connection:
        return [DecisionRecord.from_row(row) for row in connection.execute("SELECT * FROM decisions ORDER BY id")]


# ------------------------------------------------------------------ SQLite


def test_sqlite_keeps_each_record_once(tmp_path: Path, records: list[DecisionRecord]) -> None:
    sink = open_sink(f"sqlite:///{tmp_path}/decisions.db")
    sink.write(records)
    sink.write(records[10:])
    sink.close()
    sink.write(records[:20])  # opens again
    sink.close()
    assert stored(tmp_path / "decisions.db") == sorted(records, key=lambda each: each.id)


def test_sqlite_forgets_what_is_too_old(tmp_path: Path, records: list[DecisionRecord]) -> None:
    sink = SqliteSink(tmp_path / "decisions.db", days=2)
    sink.write(at(records, -3 * DAY_US))
    sink.write(at(records, -1 * DAY_US))
    sink.write(records)
    sink.clean_up()
    assert len(stored(tmp_path / "decisions.db")) == 2 * len(records)
    with closing(sqlite3.connect(tmp_path / "decisions.db")) as connection:
        (indexed,) = connection.execute("SELECT count(*) FROM decisions_of").fetchone()
    assert indexed == 2 * sum(len(each.clients) for each in records)
    sink.close()


def test_record_of_tomorrow_does_not_make_sqlite_forget(tmp_path: Path, records: list[DecisionRecord]) -> None:
    now_us = time.time_ns() // 1000
    sink = SqliteSink(tmp_path / "decisions.db", days=2)
    sink.write(at(records, now_us - START_US - DAY_US))
    sink.write(at(records, now_us - START_US + 300 * DAY_US))
    sink.clean_up()
    assert len(stored(tmp_path / "decisions.db")) == 2 * len(records)
    sink.close()


def test_sqlite_stays_within_its_size(
    tmp_path: Path, records: list[DecisionRecord], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sqlite, "ROWS_PER_DELETE", 100)
    sink = SqliteSink(tmp_path / "decisions.db", days=400, size_mb=0.5)
    for day in range(40):
        sink.write(at(records, day * DAY_US // 24))
    sink.clean_up()
    kept = stored(tmp_path / "decisions.db")
    assert 0 < len(kept) < 40 * len(records)
    assert kept[-1].at_us == records[-1].at_us + 39 * DAY_US // 24  # the newest stay
    sink.close()
    assert (tmp_path / "decisions.db").stat().st_size < 600_000


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.mark.parametrize("journals", [True, False])
def test_deleted_sqlite_file_is_created_again_with_all_that_follows(
    tmp_path: Path, records: list[DecisionRecord], journals: bool
) -> None:
    file = tmp_path / "decisions.db"
    sink = SqliteSink(file)
    sink.write(records)
    for each in [file, *([*tmp_path.glob("decisions.db-*")] if journals else [])]:
        each.unlink()
    later = at(records, DAY_US)
    sink.write(later)
    assert stored(file) == sorted(later, key=lambda each: each.id)
    sink.close()
    assert stored(file) == sorted(later, key=lambda each: each.id)


def test_sqlite_file_that_is_moved_away_is_complete_and_another_begins(
    tmp_path: Path, records: list[DecisionRecord]
) -> None:
    file = tmp_path / "decisions.db"
    sink = SqliteSink(file)
    sink.write(records)
    file.rename(tmp_path / "archive.db")
    sink.write(at(records, DAY_US))
    sink.close()
    assert len(stored(file)) == len(stored(tmp_path / "archive.db")) == len(records)


def test_writers_that_notice_a_deletion_one_after_another_share_the_new_file(
    tmp_path: Path, records: list[DecisionRecord]
) -> None:
    file = tmp_path / "decisions.db"
    first, second, third = SqliteSink(file), SqliteSink(file), SqliteSink(file)
    for number, sink in enumerate((first, second, third)):
        sink.write(at(records, number))
    file.unlink()
    first.write(at(records, DAY_US))
    second.write(at(records, DAY_US + 1))
    third.close()  # it never noticed: the journal of that name is not its own any more
    first.write(at(records, DAY_US + 2))
    second.close()
    assert len(stored(file)) == 3 * len(records)
    first.close()
    assert len(stored(file)) == 3 * len(records)
    with closing(sqlite3.connect(file)) as connection:
        assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)


def test_batch_that_went_into_a_deleted_file_is_not_reported_as_written(
    tmp_path: Path, records: list[DecisionRecord], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "decisions.db"
    sink = SqliteSink(file)
    sink.write(records[:1])
    insert = sqlite._insert

    def insert_and_delete(*given: Any) -> None:
        insert(*given)
        file.unlink()

    monkeypatch.setattr(sqlite, "_insert", insert_and_delete)
    with pytest.raises(sqlite3.OperationalError, match="was deleted or replaced while records were written"):
        sink.write(records)
    monkeypatch.undo()
    sink.write(records)
    sink.close()
    assert len(stored(file)) == len(records)


@pytest.mark.parametrize("writer", ["thread", "process"])
def test_no_record_is_lost_when_the_log_is_deleted_under_a_running_gate(tmp_path: Path, writer: Any) -> None:
    file = tmp_path / "decisions.db"
    log = DecisionLog(f"sqlite:///{file}", secret=SECRET, sample=1, every=0.005, writer=writer)
    traffic = Traffic("limits: [{by: ip, bucket: 1/hour}]", log)
    for _ in range(200):
        traffic.send(Request())
    assert log.flush(20)
    assert len(stored(file)) == 200
    for each in tmp_path.iterdir():
        each.unlink()
    for _ in range(300):
        traffic.send(Request())
    assert log.flush(20)
    assert len(stored(file)) == 300
    assert log.stats[:3] == (500, 0, 0)
    log.close()
    assert len(stored(file)) == 300


def test_files_of_the_log_are_private_and_an_existing_mode_stays(tmp_path: Path, records: list[DecisionRecord]) -> None:
    sink = SqliteSink(tmp_path / "decisions.db")
    sink.write(records)
    assert {each.name: mode(each) for each in tmp_path.iterdir()} == {
        f"decisions.db{suffix}": 0o600 for suffix in ("", "-wal", "-shm")
    }
    sink.close()
    (tmp_path / "decisions.db").chmod(0o640)
    sink.write(at(records, DAY_US))
    assert {mode(each) for each in tmp_path.iterdir()} == {0o640}
    sink.close()


def test_sinks_that_open_a_new_file_at_the_same_moment_all_get_it(
    tmp_path: Path, records: list[DecisionRecord]
) -> None:
    for number in range(20):
        sinks = [SqliteSink(tmp_path / f"{number}.db") for _ in range(8)]
        begin = threading.Barrier(len(sinks))
        failed: list[Exception] = []

        def write(sink: SqliteSink, begin: threading.Barrier = begin, failed: list[Exception] = failed) -> None:
            begin.wait()
            try:
                sink.write(records[:2])
            except Exception as error:
                failed.append(error)
            sink.close()

        threads = [threading.Thread(target=write, args=(sink,)) for sink in sinks]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not failed


def test_batch_is_written_whole_or_not_at_all(tmp_path: Path, records: list[DecisionRecord]) -> None:
    sink = SqliteSink(tmp_path / "decisions.db")
    broken = records[5]._replace(node=None)  # type: ignore[arg-type] # what the table refuses
    with pytest.raises(sqlite3.Error):
        sink.write([*[records[0]] * 300, *at(records, 7), broken._replace(at_us=object())])  # type: ignore[arg-type]
    sink.write(records[:3])
    sink.close()
    assert len(stored(tmp_path / "decisions.db")) == 3


def test_file_of_another_program_is_left_alone(tmp_path: Path, records: list[DecisionRecord]) -> None:
    with closing(sqlite3.connect(tmp_path / "other.db")) as connection:
        connection.execute("PRAGMA user_version = 7")
    with pytest.raises(InvalidConfiguration, match="is not a decision log of this version"):
        SqliteSink(tmp_path / "other.db").write(records)


WORKER = """
import sys
sys.path.insert(0, {tests!r})
from headgate.telemetry import DecisionLog
from support.traffic import SECRET, Traffic
with DecisionLog(sys.argv[1], secret=SECRET, sample=0, every=0.001, batch=20) as log:
    traffic = Traffic("limits: [{{by: ip, bucket: 1/hour}}]", log)
    for _ in range(25):
        traffic.send(times=40)
        log.flush(0.01)
    assert log.flush(20)
    assert log.stats.lost == 0, log.stats
"""


def run_workers(url: str, count: int = 2) -> None:
    command = [sys.executable, "-c", WORKER.format(tests=str(TESTS)), url]
    workers = [subprocess.Popen(command) for _ in range(count)]
    assert [worker.wait(60) for worker in workers] == [0] * count


def test_several_processes_write_into_one_sqlite_file(tmp_path: Path) -> None:
    run_workers(f"sqlite:///{tmp_path}/decisions.db")
    assert len(stored(tmp_path / "decisions.db")) == 2 * 999


# ------------------------------------------------------------------ lines


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for file in folder.iterdir() for line in file.read_text("ascii").splitlines()]


def test_lines_are_records(tmp_path: Path, records: list[DecisionRecord]) -> None:
    sink = open_sink(f"jsonl:///{tmp_path}/decisions.jsonl")
    sink.write(records[:20])
    (tmp_path / "decisions.jsonl").rename(tmp_path / "moved")  # as logrotate does
    sink.write(records[20:])
    sink.close()
    found = [DecisionRecord.from_dict(line) for line in lines(tmp_path)]
    assert sorted(found) == sorted(records)


def test_files_of_lines_are_rotated_by_size(tmp_path: Path, records: list[DecisionRecord]) -> None:
    sink = JsonLinesSink(tmp_path / "d.jsonl", size_mb=0.05, files=2)
    for moved_us in range(12):
        sink.write(at(records, moved_us))
    assert {file.name for file in tmp_path.iterdir()} == {"d.jsonl", "d.jsonl.1", "d.jsonl.2"}
    assert all(file.stat().st_size <= 50_000 for file in tmp_path.iterdir())
    newest = [json.loads(line)["at_us"] for line in (tmp_path / "d.jsonl").read_text().splitlines()]
    assert max(newest) == records[-1].at_us + 11


def test_several_processes_write_into_one_file_of_lines_while_it_is_rotated(tmp_path: Path) -> None:
    run_workers(f"jsonl:///{tmp_path}/decisions.jsonl?size_mb=0.3&files=50")
    found = lines(tmp_path)
    assert len({line["id"] for line in found}) == len(found) == 2 * 999
    assert len([*tmp_path.iterdir()]) > 2


def test_file_that_was_moved_away_while_it_was_waited_for_is_left_alone(
    tmp_path: Path, records: list[DecisionRecord]
) -> None:
    sink = JsonLinesSink(tmp_path / "d.jsonl")
    with open(tmp_path / "d.jsonl", "w") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        writing = threading.Thread(target=sink.write, args=(records,))
        writing.start()
        time.sleep(0.1)
        (tmp_path / "d.jsonl").rename(tmp_path / "moved")
    writing.join()
    assert (tmp_path / "moved").read_text() == ""
    assert len(lines(tmp_path)) == len(records)


def test_half_a_line_is_taken_back(
    tmp_path: Path, records: list[DecisionRecord], monkeypatch: pytest.MonkeyPatch
) -> None:
    sink = JsonLinesSink(tmp_path / "d.jsonl")
    sink.write(records[:2])
    write, left = os.write, [100]

    def full(file: int, data: bytes) -> int:
        if not left:
            raise OSError(28, "No space left on device")
        return write(file, data[: left.pop()])

    monkeypatch.setattr("headgate.telemetry.decision_log.sinks.text.os.write", full)
    with pytest.raises(OSError, match="No space"):
        sink.write(records[2:])
    monkeypatch.undo()
    sink.write(records[2:])
    assert len(lines(tmp_path)) == len(records)


def test_logging_says_it_in_words(records: list[DecisionRecord], caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "shop.decisions")
    open_sink("logging://shop.decisions").write(records)
    open_sink("logging://shop.decisions?level=debug").write(records)
    assert [each.getMessage() for each in caplog.records] == [each.words for each in records]
    assert DecisionRecord.from_dict(caplog.records[0].decision) == records[0]  # type: ignore[attr-defined] # logging's extra


# ------------------------------------------------------------------ Kafka


def test_kafka_gets_each_record_as_a_message_of_its_client(brokers: str, records: list[DecisionRecord]) -> None:
    sink = open_sink(f"kafka://{brokers}/decisions?linger.ms=1")
    sink.write(records[:30])
    sink.write(records[30:])
    sink.close()
    messages = consume(brokers, "decisions", len(records))
    found = [DecisionRecord.from_dict(json.loads(message.value())) for message in messages]
    assert sorted(found) == sorted(records)
    assert all(message.key().decode() == record.client for message, record in zip(messages, found, strict=True))
    partitions = {(message.key(), message.partition()) for message in messages}
    assert len({key for key, _ in partitions}) == len(partitions)  # what is one client's stays in order


def test_kafka_without_brokers_is_a_failure_and_nothing_is_lost(
    brokers: str, records: list[DecisionRecord], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kafka, "TIMEOUT_S", 0.5)
    sink = kafka.KafkaSink("127.0.0.1:1", "later", settings={"message.timeout.ms": 300})
    with pytest.raises(ConnectionError, match=r"Kafka did not accept \d+ of 60 records"):
        sink.write(records)
    sink.close()
    again = kafka.KafkaSink(brokers, "later")
    again.write(records)
    again.close()
    assert len(consume(brokers, "later", len(records))) == len(records)


def test_record_that_kafka_refuses_is_a_failure(brokers: str, records: list[DecisionRecord]) -> None:
    sink = open_sink(f"kafka://{brokers}/small?message.max.bytes=2000")
    sink.write(records)
    with pytest.raises(ConnectionError, match=r"Kafka did not accept 1 of 60 records: .*size too large"):
        sink.write([*records[1:], records[0]._replace(note="x" * 5000)])
    sink.close()


# ------------------------------------------------------------------ ClickHouse


ENGINE = """
import os, pickle, sys
from headgate.telemetry import open_sink
answers = os.fdopen(os.dup(1), "wb")
os.dup2(2, 1)
sink = open_sink("chdb:///")
def command(statement):
    sink._connected().command(statement)
def value(asked):
    return sink._connected().query(asked).result_rows[0][0]
named = {"write": sink.write, "find": sink.find, "nearest": sink.nearest, "command": command, "value": value}
while True:
    try:
        name, given, options = pickle.load(sys.stdin.buffer)
    except EOFError:
        break
    try:
        answer = named[name](*given, **options)
    except Exception as error:
        answer = RuntimeError(f"{type(error).__name__}: {error}")
    pickle.dump(answer, answers)
    answers.flush()
"""


class Engine:
    """ClickHouse's real engine, in a process of its own: its threads and handlers of signals are nothing for others."""

    def __init__(self) -> None:
        self._process = subprocess.Popen([sys.executable, "-c", ENGINE], stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def __getattr__(self, name: str) -> Any:
        def ask(*given: Any, **options: Any) -> Any:
            assert self._process.stdin is not None
            assert self._process.stdout is not None
            pickle.dump((name, given, options), self._process.stdin)
            self._process.stdin.flush()
            answer = pickle.load(self._process.stdout)
            if isinstance(answer, Exception):
                raise answer
            return answer

        return ask

    def close(self) -> None:
        self._process.communicate()


@pytest.fixture(scope="module")
def clickhouse() -> Iterator[Engine]:
    with closing(Engine()) as engine:
        yield engine


def test_clickhouse_keeps_each_record_once(clickhouse: Engine, records: list[DecisionRecord]) -> None:
    clickhouse.write(records)
    clickhouse.write(records[10:])
    everybody = list({key for each in records for key in each.clients})
    found = clickhouse.find(everybody, since_us=0, until_us=START_US * 2, most=1000)
    assert found == sorted(records, key=lambda each: each.id)
    assert clickhouse.value("SELECT count() FROM decisions FINAL") == len(records)


def test_counts_by_minute_do_not_double(clickhouse: Engine, records: list[DecisionRecord]) -> None:
    clickhouse.write(records)
    clickhouse.write(records[5:40])
    for outcome in ("denied", "allowed", "blocked"):
        told = clickhouse.value(f"SELECT sum(requests) FROM decisions_per_minute_read WHERE outcome = '{outcome}'")
        assert told == sum(each.outcome == outcome for each in records)
    assert clickhouse.value("SELECT uniq(minute) FROM decisions_per_minute_read") == 1


def test_why_gets_the_same_from_clickhouse_as_from_sqlite(
    clickhouse: Engine, tmp_path: Path, records: list[DecisionRecord]
) -> None:
    lost = lost_record(f"{START_US:014x}lost", 7, since_us=START_US, until_us=START_US + 5, node="n1", region="")
    sink = open_sink(f"sqlite:///{tmp_path}/decisions.db")
    for each in (sink, clickhouse):
        each.write([*records, lost])
    sink.close()
    clients = Pseudonymizer(SECRET)
    with closing(open_reader(f"sqlite:///{tmp_path}/decisions.db")) as reader:
        for client in ("acme", 'acme, "ltd" ünd söhne', "mallory", "203.0.113.9", "nobody"):
            for when in ("2026-11-15", "2026-11-14", "2026-11-16"):
                question = ClientQuery.read(client, clients), span(when, now=NOW, zone=UTC)
                answer = why(reader, *question)
                assert why(clickhouse, *question) == answer
                assert answer.lost == (7 if when == "2026-11-15" else 0)
                assert bool(answer.rejected) == (client != "nobody" and when == "2026-11-15")


def test_clickhouse_takes_what_kafka_has(clickhouse: Engine, brokers: str, records: list[DecisionRecord]) -> None:
    """By the supplied statements, with another table in the place of the queue: this engine cannot reach brokers."""
    fed = at(records, DAY_US)
    sink = open_sink(f"kafka://{brokers}/feed")
    sink.write(fed)
    sink.close()
    messages = [message.value().decode() for message in consume(brokers, "feed", len(fed))]
    queue, feed = statements("clickhouse_kafka.sql")
    clickhouse.command(f"EXPLAIN AST {queue}")  # it can be read as it stands
    clickhouse.command(f"{queue.partition('ENGINE = Kafka')[0]} ENGINE = Null")
    clickhouse.command(feed)
    for _ in range(2):  # delivered twice
        clickhouse.command("INSERT INTO decisions_queue FORMAT JSONEachRow " + "\n".join(messages))
    everybody = list({key for each in fed for key in each.clients})
    found = clickhouse.find(everybody, since_us=START_US + DAY_US, until_us=START_US + 2 * DAY_US, most=1000)
    assert found == sorted(fed, key=lambda each: each.id)


def test_another_table_has_its_own_statements() -> None:
    text = "\n".join(statements("clickhouse.sql", table="shop_log"))
    assert "CREATE TABLE IF NOT EXISTS shop_log\n" in text
    assert "shop_log_per_minute_feed TO shop_log_per_minute" in text
    assert "decisions" not in text


def test_server_that_is_not_there_is_a_failure(records: list[DecisionRecord]) -> None:
    sink = open_sink("clickhouse://ada:hidden-password@127.0.0.1:1/shop?connect_timeout=1")
    with pytest.raises(Exception, match=r"127\.0\.0\.1") as failure:
        sink.write(records)
    assert "hidden-password" not in str(failure.value)
    sink.close()


# ------------------------------------------------------------------ URLs


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("sqlite://host/file", "write sqlite:///decisions.db, or sqlite:////var/lib/app/decisions.db"),
        ("sqlite:///", "write sqlite:///decisions.db"),
        ("sqlite:///a.db?days=0", "days=0 is not a number above 0"),
        ("sqlite:///a.db?dayz=3", "unknown setting 'dayz'; did you mean 'days'?"),
        ("jsonl:///a?files=x", "files=x is not a number above 0"),
        ("logging://x?level=loud", "unknown level=loud; write debug, info, warning or error"),
        ("kafka://host:9092", "write kafka://host:9092/topic"),
        ("clickhouse://", "write clickhouse://user:password@host:8123/database"),
        ("clickhouse://host/db?table=a-b", "table=a-b is not a valid name; use letters, digits and underscores"),
        ("clickhouse://host/db?create=maybe", "create=maybe is neither yes nor no"),
        ("sqlit:///a.db", "did you mean 'sqlite'?"),
        ("decisions.db", "known are sqlite, jsonl, logging, kafka, clickhouse"),
    ],
)
def test_url_that_means_nothing_says_what_would(url: str, message: str) -> None:
    with pytest.raises(InvalidConfiguration) as refusal:
        open_sink(url)
    assert message in str(refusal.value)


def test_url_is_shown_without_its_secrets() -> None:
    with pytest.raises(InvalidConfiguration) as refusal:
        open_sink("kafka://ada:hidden@host:9092?sasl.password=hidden")
    assert "hidden" not in str(refusal.value)


@pytest.mark.parametrize(
    ("url", "package", "extra"),
    [("kafka://h:1/t", "confluent_kafka", "kafka"), ("clickhouse://h:1/d", "clickhouse_connect", "clickhouse")],
)
def test_what_is_not_installed_is_named_with_its_extra(
    url: str, package: str, extra: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.delitem(sys.modules, f"headgate.telemetry.decision_log.sinks.{extra}", raising=False)
    with pytest.raises(
        InvalidConfiguration, match=rf"needs the package '{package}': pip install 'headgate\[{extra}\]'"
    ):
        open_sink(url)
