"""`verify` detects every single change that was not made through the ledger."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from datetime import timedelta
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import pytest

from headgate.quotas import Ledger, LedgerEntry
from headgate.quotas.storage import LedgerDamaged
from headgate.quotas.tables import ACCOUNTS, CHECKPOINTS
from headgate.testing import FakeClock

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

START_US = 1_790_000_000_000_000
FIELDS = LedgerEntry._fields


@pytest.fixture(scope="module")
def tampered(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tampering]:
    """A ledger with entries of every kind in two accounts, and a checkpoint."""
    file = tmp_path_factory.mktemp("verify") / "quota.db"
    clock = FakeClock(START_US)
    ledger = Ledger(f"sqlite:///{file}", clock=clock)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("headgate.quotas.storage.CHECKPOINT_INTERVAL", 7)
        for account in ("acme", "globex"):
            ledger.grant(account, 50, expires_at=clock.now_us() + 10_000_000, reference="contract")
            ledger.grant(account, 50, priority=3)
        for number in range(4):
            ledger.reserve("acme", 5, id=f"r{number}", ttl=timedelta(seconds=5), reason="estimate")
        ledger.commit("r0", 3)
        ledger.void("r1")
        ledger.adjust("acme", -2, reason="duplicate")
        ledger.adjust("acme", 2, reason="goodwill")
        ledger.charge("globex", 1, id="last of globex")
        clock.advance(6)
        ledger.expire()
        ledger.reserve("acme", 60, id="over two grants")
        ledger.commit("over two grants", 70)
        clock.advance(6)
        ledger.expire()
        ledger.reserve("acme", 1, id="open")
    assert ledger.verify() == []
    with closing(sqlite3.connect(file, isolation_level=None)) as connection:
        yield Tampering(ledger, connection)


class Tampering:
    """Changes rows behind the back of a ledger, for the time of one look."""

    def __init__(self, ledger: Ledger, connection: sqlite3.Connection) -> None:
        self.ledger, self.connection = ledger, connection
        # The unique indexes would refuse some of the changes that a tamperer, who can drop them, could make.
        for index in ("headgate_ledger_id", "headgate_ledger_account"):
            connection.execute(f"DROP INDEX {index}")

    def problems(self, *statements: str, values: tuple[Any, ...] = ()) -> list[str]:
        rows = {name: self.rows(name) for name in ("headgate_ledger", ACCOUNTS.name, CHECKPOINTS.name)}
        for statement in statements:
            assert self.connection.execute(statement, values if "?" in statement else ()).rowcount > 0, statement
        assert rows != {name: self.rows(name) for name in rows}, "nothing was changed"
        found = [str(problem) for problem in self.ledger.verify()]
        self.connection.execute("BEGIN")
        for name, before in rows.items():
            self.connection.execute(f"DELETE FROM {name}")
            marks = ", ".join("?" * len(before[0]))
            self.connection.executemany(f"INSERT INTO {name} VALUES ({marks})", before)
        self.connection.execute("COMMIT")
        return found

    def rows(self, name: str) -> list[tuple[Any, ...]]:
        return self.connection.execute(f"SELECT * FROM {name} ORDER BY 1").fetchall()

    @property
    def numbers(self) -> list[int]:
        return [row[0] for row in self.rows("headgate_ledger")]


def other(value: Any) -> Any:
    """Another value of a plausible type."""
    if value is None:
        return START_US
    return value + 1 if isinstance(value, int) else f"{value}x" if len(value) != 64 else f"{value[:-1]}x"


@pytest.mark.parametrize("field", FIELDS)
def test_change_of_any_field_of_any_entry_is_detected(tampered: Tampering, field: str) -> None:
    column = FIELDS.index(field)
    for row in tampered.rows("headgate_ledger"):
        statement = f"UPDATE headgate_ledger SET {field} = ? WHERE number = {row[0]}"
        value = 1_000_000 if field == "number" else other(row[column])
        assert tampered.problems(statement, values=(value,)), f"{field} of entry {row[0]}"


def test_deletion_of_any_entry_is_detected(tampered: Tampering) -> None:
    for number in tampered.numbers:
        assert tampered.problems(f"DELETE FROM headgate_ledger WHERE number = {number}"), number


def test_deletion_of_the_last_entry_with_its_account_is_detected(tampered: Tampering) -> None:
    last = tampered.rows("headgate_ledger")[-1]
    assert tampered.problems(
        f"DELETE FROM headgate_ledger WHERE account = '{last[1]}'",
        f"DELETE FROM headgate_ledger_accounts WHERE account = '{last[1]}'",
    )


@pytest.mark.parametrize("with_positions", [False, True])
def test_swap_of_any_two_neighbours_is_detected(tampered: Tampering, with_positions: bool) -> None:
    rows = tampered.rows("headgate_ledger")
    for one, two in pairwise(rows):
        swaps = [
            f"UPDATE headgate_ledger SET number = 1000 WHERE number = {one[0]}",
            f"UPDATE headgate_ledger SET number = {one[0]} WHERE number = {two[0]}",
            f"UPDATE headgate_ledger SET number = {two[0]} WHERE number = 1000",
        ]
        if with_positions:
            swaps += [
                f"UPDATE headgate_ledger SET position = {one[2]} WHERE number = {one[0]}",
                f"UPDATE headgate_ledger SET position = {two[2]} WHERE number = {two[0]}",
            ]
        assert tampered.problems(*swaps), one[0]


@pytest.mark.parametrize("account", ["acme", "globex", "new"])
@pytest.mark.parametrize("is_renumbered", [False, True])
def test_insertion_of_an_entry_is_detected(tampered: Tampering, account: str, is_renumbered: bool) -> None:
    last = LedgerEntry(*tampered.rows("headgate_ledger")[-1])
    columns = ", ".join(FIELDS)
    for number in tampered.numbers:
        row = LedgerEntry(*tampered.rows("headgate_ledger")[number - 1])._replace(
            number=0.5 + number if not is_renumbered else last.number + 1,  # type: ignore[arg-type]
            account=account,
            position=1 if account == "new" else row_position(tampered, account) + 1,
            id="inserted",
        )
        marks = ", ".join("?" * len(FIELDS))
        statement = f"INSERT INTO headgate_ledger ({columns}) VALUES ({marks})"
        assert tampered.problems(statement, values=tuple(row)), number


def row_position(tampered: Tampering, account: str) -> int:
    return max(row[2] for row in tampered.rows("headgate_ledger") if row[1] == account)


@pytest.mark.parametrize(
    ("table", "field"),
    [(table.name, name) for table in (ACCOUNTS, CHECKPOINTS) for name in table.columns.keys()],  # noqa: SIM118 - no dict
)
def test_change_of_a_derived_row_is_detected(tampered: Tampering, table: str, field: str) -> None:
    rows = tampered.rows(table)
    names = [row[1] for row in tampered.connection.execute(f"PRAGMA table_info({table})")]
    for row in rows:
        value = other(row[names.index(field)])
        statement = f"UPDATE {table} SET {field} = ? WHERE account = '{row[0]}'"
        assert tampered.problems(statement, values=(value,)), row[0]
    assert tampered.problems(f"DELETE FROM {table} WHERE account = '{rows[0][0]}'") or table == CHECKPOINTS.name


def test_problem_names_entry_account_and_fields(tampered: Tampering) -> None:
    assert tampered.problems("UPDATE headgate_ledger SET charged = 7 WHERE number = 3") == [
        "entry 3 of account 'globex': charged do not follow from the entries before it"
    ]
    assert tampered.problems("UPDATE headgate_ledger SET reason = 'x' WHERE number = 1") == [
        "entry 2 of account 'acme': the hash of the previous entry does not match: that entry or this one was changed"
    ]
    assert tampered.problems("DELETE FROM headgate_ledger WHERE number = 3") == [
        "ledger: no entry has the number 3",
        "entry 4 of account 'globex': its position is 2, expected 1: entries are missing or moved",
    ]


def test_progress_is_reported(tampered: Tampering, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headgate.quotas.verify.PAGE", 8)
    total = tampered.numbers[-1]
    seen: list[tuple[int, int]] = []
    tampered.ledger.verify(progress=lambda done, total: seen.append((done, total)))
    assert seen == [*[(done, total) for done in range(0, total, 8)], (total, total)]


def test_tampered_account_is_not_changed_any_more_but_others_are(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/quota.db"
    ledger = Ledger(url)
    ledger.grant("acme", 10)
    ledger.grant("globex", 10)
    with closing(sqlite3.connect(tmp_path / "quota.db")) as connection, connection:
        connection.execute("UPDATE headgate_ledger SET amount = 1000, granted = 1000 WHERE account = 'acme'")
    fresh = Ledger(url)
    with pytest.raises(LedgerDamaged, match="contradict its last state; run `headgate ledger verify`"):
        fresh.charge("acme", 100)
    assert fresh.charge("globex", 10) is not None
    ledger.close()
    fresh.close()
