"""`headgate ledger`: balances, statements, corrections, verification and exports."""

from __future__ import annotations

import csv
import io
import json
import shutil
import sqlite3
from contextlib import closing
from datetime import datetime
from html.parser import HTMLParser
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import pytest

from headgate import Calendar, cli
from headgate.quotas import Ledger, QuotaPlan
from headgate.testing import FakeClock

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path


def at(text: str) -> int:
    return int(datetime.fromisoformat(text).timestamp()) * 1_000_000


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A ledger with two accounts over a month; midnight in Berlin is 22:00 UTC."""
    file = tmp_path_factory.mktemp("ledger") / "quota.db"
    clock = FakeClock(at("2026-09-30T21:00:00+00:00"))
    with closing(Ledger(f"sqlite:///{file}", clock=clock)) as ledger:
        ledger.grant("ACME", 1000, id="plan", source="allowance", expires_at=at("2026-11-01T00:00:00+00:00"))
        ledger.grant("ACME", 500, id="pack", source="=credit pack", priority=200)
        clock.set_us(at("2026-09-30T22:00:00+00:00"))
        ledger.charge("ACME", 100, id="c1", reference="request <1>")
        clock.set_us(at("2026-10-15T12:00:00+00:00"))
        ledger.reserve("ACME", 30, id="r1")
        ledger.commit("r1", 20)
        ledger.reserve("ACME", 5, id="r2")
        ledger.commit("r2", 2000, reason="report")
        ledger.adjust("ACME", 7, reason="goodwill", author="bob")
        ledger.reserve("ACME", 2, id="r3")
        ledger.grant("globex", 1)
    return file


@pytest.fixture
def ledger(template: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Ledger]:
    shutil.copy(template, tmp_path / "quota.db")
    monkeypatch.setenv("HEADGATE_LEDGER", url := f"sqlite:///{tmp_path}/quota.db")
    with closing(Ledger(url)) as ledger:
        yield ledger


@pytest.fixture
def run(ledger: Ledger, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    def run(*arguments: str) -> tuple[int, str, str]:
        code = cli.main(["ledger", *arguments])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


Run = Any


def test_statement_shows_sums_and_lines(run: Run) -> None:
    code, printed, _ = run("statement", "ACME", "--period", "2026-10")
    assert code == 0
    assert printed.splitlines() == [
        "Statement of ACME, 2026-10, UTC",
        "",
        "Opening balance                        1,400",
        "Granted                                    0",
        "Adjusted                                  +7",
        "Charged                               -1,400",
        "Expired                                    0",
        "Used beyond the balance, not charged     620",
        "Held for reservations                      2",
        "Closing balance                            7",
        "",
        "time                 kind        description                                  amount  balance",
        "2026-10-15 12:00:00  Charge      r1                                           -20     1,380",
        "2026-10-15 12:00:00  Charge      report; 620 beyond the balance, not charged  -1,380  0",
        "2026-10-15 12:00:00  Adjustment  goodwill                                     +7      7",
    ]


@pytest.mark.parametrize(
    ("period", "zone", "opening", "charged"),
    [
        ("2026-09", "UTC", 0, 100),
        ("2026-10", "UTC", 1400, 1400),
        ("2026-10", "Europe/Berlin", 1500, 1500),
        ("2026-09", "Europe/Berlin", 0, 0),
        ("2026-09-30", "UTC", 0, 100),
        ("2026-10-01", "Europe/Berlin", 1500, 100),
        ("2026-10-01..2026-10-15", "UTC", 1400, 1400),
        ("2026-10-01..2026-10-14", "UTC", 1400, 0),
        ("2026", "UTC", 0, 1500),
        ("2025..2027", "UTC", 0, 1500),
        ("2027", "UTC", 7, 0),
    ],
)
def test_period_is_that_of_the_time_zone(run: Run, period: str, zone: str, opening: int, charged: int) -> None:
    _, printed, _ = run("statement", "ACME", "--period", period, "--timezone", zone, "--json")
    found = json.loads(printed)
    assert (found["opening"], found["charged"]) == (opening, charged)
    assert (
        found["opening"] + found["granted"] + found["adjusted"] - found["charged"] - found["expired"]
        == found["closing"]
    )
    assert found["opening"] + sum(line["amount"] for line in found["lines"]) == found["closing"]
    assert sum(day["charged"] for day in found["days"]) == (charged if found["days"] else 0)


def test_table_is_cut_and_csv_is_complete(run: Run) -> None:
    _, printed, _ = run("statement", "ACME", "--period", "2026", "--lines", "1")
    assert printed.count("\n2026-") == 1
    assert "There are more lines: give --lines, or --format csv for all of the 9 entries." in printed
    _, printed, _ = run("statement", "ACME", "--period", "2026", "--format", "csv")
    rows = [*csv.DictReader(io.StringIO(printed))]
    assert [int(row["amount"]) for row in rows] == [1000, 500, -100, -20, -1380, 7]
    assert rows[1]["source"] == "'=credit pack", "not a formula"


def test_html_is_a_complete_page_with_escaped_texts(run: Run) -> None:
    _, printed, _ = run("statement", "ACME", "--period", "2026-09", "--format", "html")
    texts: list[str] = []

    class Reader(HTMLParser):
        def handle_data(self, data: str) -> None:
            texts.append(data.strip())

        def handle_starttag(self, tag: str, attrs: Any) -> None:
            assert tag != "script"
            assert not {name for name, _ in attrs} & {"src", "href"}

    Reader().feed(printed)
    assert "request <1>" in texts
    assert "2026-09-30: 100" in texts
    assert "Statement of ACME, 2026-09" in texts


def test_lines_are_read_in_pages(run: Run, ledger: Ledger, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headgate.quotas.ledger.LINES_PAGE", 2)
    monkeypatch.setattr("headgate.quotas.statement.PAGE", 3)
    _, printed, _ = run("statement", "ACME", "--period", "2026", "--format", "csv")
    assert len(printed.splitlines()) == 1 + 6


def test_balance_lists_grants(run: Run) -> None:
    # The clock of the command is that of the machine: the allowance has expired.
    code, printed, _ = run("balance", "globex")
    assert (code, printed.splitlines()[0]) == (0, "globex: 1 available")
    assert json.loads(run("balance", "globex", "--json")[1])["available"] == 1
    assert run("balance", "nobody")[1].startswith("nobody: 0 available\n")


def test_grants_and_adjustments_are_idempotent(run: Run, ledger: Ledger) -> None:
    for _ in range(2):
        code, printed, _ = run("grant", "new", "10", "--id", "g", "--source", "pack", "--expires", "2099-01-01T00:00Z")
        assert (code, printed) == (0, "entry 11, grant +10: new had 10 available after it; id g\n")
    code, printed, _ = run("adjust", "new", "-4", "--reason", "ticket 4711", "--id", "a", "--json")
    assert (code, json.loads(printed)["balance"], json.loads(printed)["reason"]) == (0, 6, "ticket 4711")
    code, _, problem = run("grant", "new", "11", "--id", "g")
    assert code == 2
    assert "id 'g' was used before with amount 10, not 11" in problem
    assert run("adjust", "new", "-7", "--reason", "x")[0] == 2
    assert ledger.verify() == []


def test_verify_has_an_exit_code(run: Run, ledger: Ledger, tmp_path: Path) -> None:
    assert run("verify") == (0, "verified: 10 entries\n", "")
    with closing(sqlite3.connect(tmp_path / "quota.db")) as connection, connection:
        connection.execute("UPDATE headgate_ledger SET amount = 7 WHERE number = 10")
    code, printed, _ = run("verify")
    assert code == 1
    assert printed.splitlines() == [
        "problem: entry 10 of account 'globex': granted do not follow from the entries before it",
        "1 problems in 10 entries",
    ]
    code, printed, _ = run("verify", "--json")
    assert (code, json.loads(printed)["problems"][0]["number"]) == (1, 10)


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["statement", "ACME", "--period", "2026-13"], "--period '2026-13': give a year, month or day"),
        (["statement", "ACME", "--period", "2026-10..2026-09"], "the end is before the beginning"),
        (["statement", "ACME", "--period", "9999"], "--period '9999'"),
        (["statement", "ACME", "--period", "2026", "--timezone", "Mars/Base"], "--timezone 'Mars/Base': unknown"),
        (["statement", "ACME", "--period", "2026", "--lines", "-1"], "--lines -1"),
        (["grant", "ACME", "5", "--expires", "soon"], "--expires 'soon': give a time like"),
        (["grant", "ACME", "0"], "amount must be a whole number from 1"),
        (["balance", "ACME", "--ledger", "sqlite:////nowhere/x.db"], "file does not exist"),
        (["export", "--output", "x", "--after", "3"], "--after: a file is continued"),
        (["export", "--output", "/nowhere/x"], "/nowhere/x: cannot be written"),
    ],
)
def test_mistakes_are_named(run: Run, arguments: list[str], problem: str) -> None:
    code, _, printed = run(*arguments)
    assert code == 2
    assert problem in printed


def test_no_ledger_is_named(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HEADGATE_LEDGER")
    assert run("verify") == (2, "", "headgate: no ledger: give --ledger sqlite:///quota.db, or set HEADGATE_LEDGER\n")


# ------------------------------------------------------------------ exports


@pytest.mark.parametrize("format", ["cloudevents", "csv"])
def test_interrupted_export_is_continued_with_each_entry_once(
    run: Run, ledger: Ledger, tmp_path: Path, format: str
) -> None:
    file = tmp_path / "export"
    run("export", "--format", format, "--output", f"{file}")
    complete = file.read_bytes()
    ends = [length for length in range(1, len(complete) + 1) if complete[length - 1 : length] == b"\n"]
    for length in (0, 1, *[cut for end in ends for cut in (end - 1, end, end + 30)]):
        file.write_bytes(complete[:length])
        assert run("export", "--format", format, "--output", f"{file}")[0] == 0
        assert file.read_bytes() == complete, length
    ledger.charge("globex", 1)
    assert "appended 1 entries" in run("export", "--format", format, "--output", f"{file}")[2]
    assert file.read_bytes().startswith(complete)


def test_cloud_events_have_the_required_attributes(run: Run, ledger: Ledger) -> None:
    events = [json.loads(line) for line in run("export")[1].splitlines()]
    assert [event["data"]["number"] for event in events] == [*range(1, 11)]
    assert len({event["id"] for event in events}) == 10
    first = events[0]
    assert (first["specversion"], first["source"], first["subject"]) == ("1.0", "/headgate/ledger", "ACME")
    assert (first["type"], first["time"]) == ("headgate.ledger.grant", "2026-09-30T21:00:00Z")
    for event, following in pairwise(events[:-1]):
        assert following["data"]["previous_hash"] == event["data"]["hash"]


def test_export_of_an_account_after_a_number(run: Run) -> None:
    _, printed, _ = run("export", "--account", "ACME", "--after", "7", "--format", "csv")
    assert [line.split(",")[0] for line in printed.splitlines()] == ["8", "9"]


def test_export_does_not_continue_a_foreign_file(run: Run, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("dear diary\n")
    code, _, problem = run("export", "--output", f"{tmp_path}/notes.txt")
    assert (code, (tmp_path / "notes.txt").read_text()) == (2, "dear diary\n")
    assert "its last line is not from an export as cloudevents" in problem


def test_names_with_control_characters_are_refused(run: Run, ledger: Ledger) -> None:
    assert run("balance", "a\x1b[2J")[0] == 2


def test_balance_shows_the_thresholds_that_were_reached(run: Run, tmp_path: Path) -> None:
    plan = QuotaPlan("exports", 100, Calendar("month"))
    with closing(Ledger(f"sqlite:///{tmp_path}/quota.db", clock=FakeClock(at("2026-10-05T00:00:00+00:00")))) as ledger:
        ledger.open_period("exports/acme", plan)
        ledger.charge("exports/acme", 60)
    code, printed, _ = run("balance", "exports/acme")
    assert code == 0
    assert printed.splitlines()[-2:] == [
        "allowance used  reached (UTC)         units   of  period ends (UTC)     webhook",
        "50 %            2026-10-05T00:00:00Z     60  100  2026-11-01T00:00:00Z  not sent",
    ]
    alert = json.loads(run("balance", "exports/acme", "--json")[1])["alerts"][0]
    assert (alert["percent"], alert["used"], alert["allowance"]) == (50, 60, 100)


def test_thresholds_are_shown_and_set(run: Run, ledger: Ledger) -> None:
    assert run("thresholds")[1] == "50 % 80 % 100 %\n"
    assert run("thresholds", "90", "75")[1] == "75 % 90 %\n"
    assert json.loads(run("thresholds", "--json")[1]) == [75, 90]
    code, _, problem = run("thresholds", "0")
    assert code == 2
    assert "from 1 to 100, got 0" in problem
    assert ledger.usage_thresholds() == (75, 90)


def test_usage_lists_each_request_with_its_sources(run: Run) -> None:
    code, printed, _ = run("usage", "ACME", "--period", "2026-10")
    assert code == 0
    assert [line.rstrip() for line in printed.splitlines()] == [
        "time                 request  units  paid by                                           reference",
        "2026-10-15 12:00:00  r1       20     allowance",
        "2026-10-15 12:00:00  r2       2,000  allowance 880, =credit pack 500, not covered 620",
    ]
    assert run("usage", "ACME", "--period", "2025")[1] == "ACME: no charged requests in 2025\n"
    cut = run("usage", "ACME", "--period", "2026", "--lines", "1")
    assert "There are more requests" in cut[2]
    rows = [json.loads(line) for line in run("usage", "ACME", "--period", "2026", "--json")[1].splitlines()]
    assert [(row["id"], row["amount"]) for row in rows] == [("c1", 100), ("r1", 20), ("r2", 2000)]
    assert sum(amount for row in rows for name, amount in row["paid_by"] if name != "not covered") == 1500
    lines = list(csv.reader(io.StringIO(run("usage", "ACME", "--period", "2026", "--format", "csv")[1])))
    assert lines[0] == ["at", "id", "amount", "paid_by", "reference", "entry"]
    assert [line[1:3] for line in lines[1:]] == [["c1", "100"], ["r1", "20"], ["r2", "2000"]]
    assert json.loads(lines[1][3]) == [["allowance", 100]]
    assert lines[1][4] == "request <1>"
