"""ClickHouse as most have it, over HTTP: what the client puts on the wire is read by ClickHouse's own engine."""

from __future__ import annotations

import json
from collections import Counter
from contextlib import closing
from typing import TYPE_CHECKING
from urllib.request import Request as Call
from urllib.request import urlopen

import pytest

from headgate import cli
from headgate.replay import sources
from headgate.telemetry import DecisionLog, DecisionRecord, open_sink
from headgate.telemetry.decision_log.sinks import open_reader
from headgate.telemetry.pseudonyms import Pseudonymizer
from support.clickhouse import PASSWORD, USER
from support.servers import wait_until
from support.traffic import SECRET, START_US, Request, Traffic, records_of_all_kinds

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def url(clickhouse: str, request: pytest.FixtureRequest) -> str:
    table = f"t{abs(hash(request.node.name))}"
    return f"clickhouse://{USER}:{PASSWORD}@{clickhouse}/default?table={table}&send_receive_timeout=1"


@pytest.fixture(scope="module")
def records() -> list[DecisionRecord]:
    found = records_of_all_kinds()
    found[7] = found[7]._replace(retry_us=None)
    return sorted(found, key=lambda each: each.id)


def order(clickhouse: str, fault: str) -> None:
    with urlopen(Call(f"http://{clickhouse}/fault?next={fault}", method="POST")) as answer:
        assert answer.status == 200


def inserts(clickhouse: str) -> int:
    with urlopen(f"http://{clickhouse}/inserts") as answer:
        return int(answer.read())


def found(url: str, keys: set[str]) -> list[DecisionRecord]:
    with closing(open_reader(url)) as reader:
        return reader.find([*keys], since_us=0, until_us=START_US * 2, most=100_000)


def everybody(records: list[DecisionRecord]) -> set[str]:
    return {key for each in records for key in each.clients}


def test_records_come_back_over_http_as_they_went(url: str, records: list[DecisionRecord]) -> None:
    with closing(open_sink(url)) as sink:
        sink.write(records[:25])
        sink.write(records[25:])
    assert found(url, everybody(records)) == records
    with closing(open_reader(url)) as reader:
        middle = records[30].at_us
        rejected = [each.at_us for each in records if each.is_rejection]
        nearest = reader.nearest([*everybody(records)], at_us=middle)
    assert nearest == (max(at for at in rejected if at < middle), min(at for at in rejected if at >= middle))


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("refuse", "Memory limit"),
        ("forget", "Timeout exceeded"),  # it was taken all the same
        ("late", "timed out"),
    ],
)
def test_uncertain_batch_is_resent_and_stored_once(
    clickhouse: str, url: str, records: list[DecisionRecord], fault: str, message: str
) -> None:
    before = inserts(clickhouse)
    with closing(open_sink(url)) as sink:
        order(clickhouse, fault)
        with pytest.raises(Exception, match=message) as failure:
            sink.write(records)
        assert PASSWORD not in str(failure.value)
        wait_until(lambda: inserts(clickhouse) - before == (fault != "refuse"), "the engine to be done")
        sink.write(records)
    assert inserts(clickhouse) - before == 1 + (fault != "refuse")
    assert found(url, everybody(records)) == records


def test_what_the_client_itself_sends_again_is_there_once(
    clickhouse: str, url: str, records: list[DecisionRecord]
) -> None:
    before = inserts(clickhouse)
    with closing(open_sink(url)) as sink:
        order(clickhouse, "drop")
        sink.write(records)
    assert inserts(clickhouse) - before == 2
    assert found(url, everybody(records)) == records


@pytest.mark.parametrize("writer", ["thread", "process"])
def test_log_gets_all_of_it_there_in_spite_of_faults(clickhouse: str, url: str, writer: str) -> None:
    with DecisionLog(url, secret=SECRET, sample=0, every=0.01, batch=200, writer=writer) as log:  # type: ignore[arg-type]
        traffic = Traffic("limits: [{by: ip, bucket: 1/hour}]", log)
        traffic.send(times=2)
        assert log.flush(30)
        for fault in ("refuse", "drop", "forget"):
            order(clickhouse, fault)
            traffic.send(times=300)
            assert log.flush(30)
        assert log.stats[:4] == (901, 0, 0, 2)  # of the connection that broke, the client took care itself
    assert len(found(url, {Pseudonymizer(SECRET).key("ip", "203.0.113.9")})) == 901


def test_replay_of_the_log_decides_as_the_gate_did(
    url: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Through the command, over several pages of records."""
    limits = (
        "{name: ip, by: ip, bucket: 5/minute, algorithm: sliding_window}, {name: all, by: global, bucket: 20/minute}"
    )
    text = f"limits: [{limits}]"
    monkeypatch.setattr(sources, "RECORDS_PER_PAGE", 70)
    rejected: Counter[str] = Counter()
    with DecisionLog(url, secret=SECRET, sample=1, every=0.01, batch=100) as log:
        traffic = Traffic(text, log)
        for number in range(300):
            peer = f"203.0.113.{number % 7}"
            [admission] = traffic.send(Request(peer=peer))
            rejected[Pseudonymizer(SECRET).key("ip", peer)] += not admission.allowed
            traffic.clock.advance(2)
        assert log.flush(30)
    (tmp_path / "policy.yaml").write_text(text)
    (tmp_path / "secret").write_text(SECRET)
    arguments = ["--json", "--all-clients", "--secret-file", f"{tmp_path / 'secret'}"]
    assert cli.main(["replay", f"{tmp_path / 'policy.yaml'}", url, *arguments]) == 0
    printed = capsys.readouterr()
    report = json.loads(printed.out)
    assert (report["requests"], report["rejected"], report["skipped"]) == (300, rejected.total(), 0)
    assert 0 < rejected.total() < 300
    assert {each["client"]: each["rejected"] for each in report["by_client"]} == rejected
    assert PASSWORD not in printed.out + printed.err


def test_wrong_password_is_reported_and_not_shown(clickhouse: str, records: list[DecisionRecord]) -> None:
    with closing(open_sink(f"clickhouse://{USER}:another-password@{clickhouse}/default")) as sink:
        with pytest.raises(Exception, match="Authentication failed") as failure:
            sink.write(records)
        assert "another-password" not in str(failure.value)


def test_missing_table_is_reported(url: str, records: list[DecisionRecord]) -> None:
    with closing(open_sink(f"{url}&create=no")) as sink, pytest.raises(Exception, match=r"(?i)unknown.table|not exist"):
        sink.write(records)
