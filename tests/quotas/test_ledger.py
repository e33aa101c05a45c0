"""The ledger: grants, reservations, charges, expiry and idempotency."""

from __future__ import annotations

import re
import threading
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import pytest
from sqlalchemy import event

from headgate import InvalidConfiguration, InvalidCost, InvalidInput
from headgate.control.config import ConfigStore
from headgate.quotas import Ledger, LedgerUnavailable

if TYPE_CHECKING:
    from pathlib import Path

    from headgate.testing import FakeClock

DAY = timedelta(days=1)


def in_days(clock: FakeClock, days: float) -> datetime:
    return datetime.fromtimestamp(clock.now_us() // 1_000_000, UTC) + timedelta(days=days)


def reserved(ledger: Ledger, account: str, amount: int, **options: Any) -> str:
    reservation = ledger.reserve(account, amount, **options)
    assert reservation is not None
    return reservation.id


# ------------------------------------------------------------------ balances


def test_balance_is_granted_less_held_and_charged(ledger: Ledger) -> None:
    assert ledger.balance("acme") == 0
    ledger.grant("acme", 100, id="g")
    reservation = ledger.reserve("acme", 30, id="r")
    assert reservation is not None
    assert (reservation.id, reservation.account, reservation.amount) == ("r", "acme", 30)
    assert reservation.sources == (("g", 30),)
    assert ledger.balance("acme") == 70
    entry = ledger.commit("r", 20)
    assert (entry.amount, entry.uncovered, entry.balance, entry.sources) == (20, 0, 80, '[["g",20]]')
    assert ledger.balance("acme") == 80
    assert ledger.balance("globex") == 0


def test_void_returns_the_whole_reservation(ledger: Ledger) -> None:
    ledger.grant("acme", 100)
    ledger.void(reserved(ledger, "acme", 100))
    assert ledger.balance("acme") == 100


def test_reservation_over_the_balance_is_refused_without_an_entry(ledger: Ledger) -> None:
    ledger.grant("acme", 10)
    assert ledger.reserve("acme", 11, id="r") is None
    assert ledger.reserve("globex", 1) is None
    assert len(ledger.entries("acme")) == 1
    ledger.grant("acme", 1)
    assert ledger.reserve("acme", 11, id="r") is not None, "a refusal does not use up the id"


def test_charge_without_reservation_is_all_or_nothing(ledger: Ledger) -> None:
    ledger.grant("acme", 10)
    assert ledger.charge("acme", 11) is None
    first = ledger.charge("acme", 7, id="c", reference="req-1")
    assert first is not None
    assert (first.balance, first.reference) == (3, "req-1")
    assert ledger.charge("acme", 7, id="c") == first
    assert ledger.balance("acme") == 3


@pytest.mark.parametrize(
    ("balance", "reserve", "used", "charged", "uncovered"),
    [
        (10, 4, 0, 0, 0),
        (10, 4, 4, 4, 0),
        (10, 4, 10, 10, 0),
        (10, 4, 11, 10, 1),
        (10, 10, 25, 10, 15),
        (10, 0, 3, 3, 0),
    ],
)
def test_commit_of_more_than_reserved_charges_what_the_balance_covers(
    ledger: Ledger, balance: int, reserve: int, used: int, charged: int, uncovered: int
) -> None:
    ledger.grant("acme", balance)
    entry = ledger.commit(reserved(ledger, "acme", reserve), used)
    assert (entry.amount, entry.charged, entry.uncovered, entry.held) == (used, charged, uncovered, 0)
    assert ledger.balance("acme") == balance - charged


def test_adjustments_go_both_ways_but_not_below_zero(ledger: Ledger) -> None:
    ledger.grant("acme", 10)
    assert ledger.adjust("acme", -4, reason="duplicate", author="bob").balance == 6
    assert ledger.adjust("acme", 3, reason="goodwill").balance == 9
    with pytest.raises(InvalidInput, match="its balance is 9; adjust by at most that"):
        ledger.adjust("acme", -10, reason="too much")
    with pytest.raises(InvalidInput, match="needs a reason"):
        ledger.adjust("acme", 1, reason="")
    assert [(entry.author, entry.reason) for entry in ledger.entries("acme")][1:] == [
        ("bob", "duplicate"),
        ("app", "goodwill"),
    ]


# ------------------------------------------------------------------ order of grants, expiry


def test_grants_are_spent_by_priority_then_expiry_then_age(ledger: Ledger, clock: FakeClock) -> None:
    ledger.grant("acme", 1, id="never")
    ledger.grant("acme", 1, id="late", expires_at=in_days(clock, 9))
    ledger.grant("acme", 1, id="soon", expires_at=in_days(clock, 2))
    ledger.grant("acme", 1, id="soon too", expires_at=in_days(clock, 2))
    ledger.grant("acme", 1, id="first", priority=0)
    ledger.grant("acme", 1, id="last", priority=200, expires_at=in_days(clock, 1))
    reservation = ledger.reserve("acme", 6)
    assert reservation is not None
    assert [id for id, _ in reservation.sources] == ["first", "soon", "soon too", "late", "never", "last"]


def test_grant_expires_at_its_instant(ledger: Ledger, clock: FakeClock) -> None:
    ledger.grant("acme", 5, expires_at=clock.now_us() + 1_000_000, id="g")
    ledger.grant("acme", 2)
    clock.advance(0.999999)
    assert ledger.balance("acme") == 7
    clock.advance(0.000001)
    assert ledger.balance("acme") == 2
    assert ledger.summary("acme").expired == 5
    assert len(ledger.entries("acme")) == 2, "reads write nothing"
    assert ledger.expire() == 1
    assert ledger.expire() == 0
    expiry = ledger.entries("acme")[-1]
    assert (expiry.kind, expiry.amount, expiry.subject, expiry.balance) == ("expire", 5, "g", 2)


def test_reservation_outlives_its_grant_but_what_it_returns_has_expired(ledger: Ledger, clock: FakeClock) -> None:
    ledger.grant("acme", 10, expires_at=clock.now_us() + 1_000_000)
    id = reserved(ledger, "acme", 8)
    clock.advance(1)
    assert ledger.balance("acme") == 0
    entry = ledger.commit(id, 5)
    assert (entry.charged, entry.expired, entry.uncovered, entry.balance) == (5, 5, 0, 0)


def test_reservation_expires_and_a_late_commit_is_charged_as_far_as_possible(ledger: Ledger, clock: FakeClock) -> None:
    ledger.grant("acme", 10)
    id = reserved(ledger, "acme", 8, ttl=timedelta(seconds=1))
    clock.advance(1)
    assert ledger.balance("acme") == 10
    reserved(ledger, "acme", 7)
    entry = ledger.commit(id, 8)
    assert (entry.charged, entry.uncovered, entry.balance) == (3, 5, 0)
    assert ledger.commit(id, 8) == entry
    with pytest.raises(InvalidInput, match="was committed before with the amount 8"):
        ledger.void(id)


def test_void_of_an_expired_reservation_is_its_expiry(ledger: Ledger, clock: FakeClock) -> None:
    ledger.grant("acme", 10)
    id = reserved(ledger, "acme", 8, ttl=timedelta(seconds=1))
    clock.advance(1)
    assert ledger.void(id).kind == "expire"
    assert ledger.balance("acme") == 10


def test_clock_that_is_set_back_does_not_reorder_entries(ledger: Ledger, clock: FakeClock) -> None:
    first = ledger.grant("acme", 10)
    clock.set_us(first.at_us - 5_000_000)
    assert ledger.grant("acme", 10).at_us == first.at_us


# ------------------------------------------------------------------ idempotency


def test_repetition_returns_the_first_result(ledger: Ledger, clock: FakeClock, config_url: str) -> None:
    until = clock.now_us() + 1_000_000
    grant = ledger.grant("acme", 10, id="g", expires_at=until)
    reservation = ledger.reserve("acme", 3, id="r")
    other = Ledger(config_url, clock=clock)  # another process, or the same one after a restart
    clock.advance(0.5)
    assert other.reserve("acme", 3, id="r") == reservation
    commit = other.commit("r", 2)
    clock.advance(0.5)
    assert ledger.grant("acme", 10, id="g", expires_at=until) == grant
    assert ledger.reserve("acme", 3, id="r") == reservation
    assert ledger.commit("r", 2, author="somebody else", reason="retry") == commit
    assert ledger.balance("acme") == other.balance("acme") == 0
    other.close()


def test_id_with_other_content_is_an_error_that_names_it(ledger: Ledger, clock: FakeClock) -> None:
    ledger.grant("acme", 10, id="g")
    reserved(ledger, "acme", 3, id="r")
    ledger.commit("r", 2)
    for call, text in (
        (lambda: ledger.grant("acme", 11, id="g"), "id 'g' was used before with amount 10, not 11; use a new id"),
        (lambda: ledger.grant("globex", 10, id="g"), "id 'g' was used before with account 'acme', not 'globex'"),
        (lambda: ledger.grant("acme", 10, id="g", priority=5), "with priority 100, not 5"),
        (lambda: ledger.grant("acme", 10, id="g", expires_at=in_days(clock, 1)), "with expires None, not"),
        (lambda: ledger.reserve("acme", 10, id="g"), "with kind 'grant', not 'reserve'"),
        (lambda: ledger.reserve("acme", 4, id="r"), "with amount 3, not 4"),
        (lambda: ledger.commit("r", 3), "reservation 'r' was committed before with the amount 2, not 3"),
        (lambda: ledger.commit("g", 3), "there is no reservation 'g'"),
        (lambda: ledger.void("x"), "there is no reservation 'x'"),
    ):
        with pytest.raises(InvalidInput, match=re.escape(text)):
            call()
    assert len(ledger.entries("acme")) == 3


def test_voided_reservation_cannot_be_committed(ledger: Ledger) -> None:
    ledger.grant("acme", 10)
    first = ledger.void(id := reserved(ledger, "acme", 3))
    assert ledger.void(id) == first
    with pytest.raises(InvalidInput, match="was voided before; use charge"):
        ledger.commit(id, 3)


def test_failed_transaction_leaves_nothing_behind(ledger: Ledger) -> None:
    ledger.grant("acme", 10)

    def crash(_: Any) -> None:
        raise OSError("crash")

    event.listen(ledger._engine, "commit", crash)
    with pytest.raises(OSError, match="crash"):
        ledger.reserve("acme", 10, id="r")
    event.remove(ledger._engine, "commit", crash)
    assert ledger.balance("acme") == 10
    assert reserved(ledger, "acme", 10, id="r") == "r"


# ------------------------------------------------------------------ input


@pytest.mark.parametrize("amount", [-1, 1.0, 0.5, True, "1", None, 2**53, 10**400, float("nan"), float("inf")])
def test_impossible_amounts_are_input_errors(ledger: Ledger, amount: Any) -> None:
    ledger.grant("acme", 10)
    reserved(ledger, "acme", 1, id="r")
    for call in (
        lambda: ledger.grant("acme", amount),
        lambda: ledger.reserve("acme", amount),
        lambda: ledger.charge("acme", amount),
        lambda: ledger.commit("r", amount),
    ):
        with pytest.raises(InvalidCost, match="amount must be a whole number from"):
            call()
    assert ledger.balance("acme") == 9


def test_other_arguments_are_checked(ledger: Ledger, clock: FakeClock) -> None:
    with pytest.raises(InvalidInput, match="needs a time zone"):
        ledger.grant("acme", 1, expires_at=datetime(2030, 1, 1))  # noqa: DTZ001 - the mistake under test
    with pytest.raises(InvalidInput, match=r"whole microseconds since the epoch, got 1\.5"):
        ledger.grant("acme", 1, expires_at=1.5)  # type: ignore[arg-type]
    with pytest.raises(InvalidInput, match="is in the past"):
        ledger.grant("acme", 1, expires_at=clock.now_us())
    for account in ("", "a" * 201, "a\nb", "\ud800", None, 5):
        with pytest.raises(InvalidInput, match="account"):
            ledger.grant(account, 1)  # type: ignore[arg-type]
    with pytest.raises(InvalidInput, match="must not start with 'headgate:'"):
        ledger.grant("acme", 1, id="headgate:commit:r")
    with pytest.raises(InvalidInput, match="ttl must be a timedelta"):
        ledger.reserve("acme", 1, ttl=timedelta(0))
    with pytest.raises(InvalidInput, match="priority must be a whole number"):
        ledger.grant("acme", 1, priority=-1)
    assert ledger.accounts() == []


def test_totals_stay_representable(ledger: Ledger, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headgate.quotas.operations.MAX_TOTAL", 2**55)  # reached by fewer grants
    for _ in range(4):
        ledger.grant("acme", 2**53 - 1)
    with pytest.raises(InvalidInput, match=f"would exceed {2**55} units in total"):
        ledger.grant("acme", 2**53 - 1)


def test_database_that_does_not_work_is_named(tmp_path: Path) -> None:
    with pytest.raises(LedgerUnavailable, match=r"ledger sqlite:////nowhere/at/all\.db"):
        Ledger("sqlite:////nowhere/at/all.db")
    with pytest.raises(InvalidConfiguration, match="unsupported ledger database mysql"):
        Ledger("mysql://host/name")
    ledger = Ledger(f"sqlite:///{tmp_path}/quota.db")
    ledger.grant("acme", 1)
    (tmp_path / "quota.db").unlink()
    with pytest.raises(LedgerUnavailable, match="file does not exist"):
        ledger.balance("acme")


# ------------------------------------------------------------------ reads


def test_entries_of_a_period(ledger: Ledger, clock: FakeClock) -> None:
    times = []
    for _ in range(3):
        times.append(ledger.grant("acme", 1).at_us)
        clock.advance(1)
    ledger.grant("globex", 1)
    assert [entry.at_us for entry in ledger.entries("acme", times[1], times[2])] == [times[1]]
    assert [entry.at_us for entry in ledger.entries("acme", times[1])] == times[1:]
    assert [entry.number for entry in ledger.entries("acme")] == [1, 2, 3]


def test_entries_are_chained_by_hashes(ledger: Ledger) -> None:
    entries = [ledger.grant("acme", amount) for amount in (1, 2, 3)]
    assert [each.previous_hash for each in entries[1:]] == [each.hash for each in entries[:-1]]
    assert ledger.entries("acme") == entries


def test_summary_lists_open_grants_in_the_order_of_spending(ledger: Ledger) -> None:
    ledger.grant("acme", 5, id="pack", source="credit pack")
    ledger.grant("acme", 10, id="plan", source="allowance", priority=0)
    reserved(ledger, "acme", 12)
    summary = ledger.summary("acme")
    assert [(each.source, each.remaining, each.held) for each in summary.grants] == [
        ("allowance", 0, 10),
        ("credit pack", 3, 2),
    ]
    assert (summary.available, summary.held, summary.granted, summary.reservations) == (3, 12, 15, 1)


def test_accounts_are_listed_by_page(ledger: Ledger) -> None:
    for name in ("globex", "acme", "initech"):
        ledger.grant(name, 1)
    assert ledger.accounts(most=2) == ["acme", "globex"]
    assert ledger.accounts(after="globex") == ["initech"]


def test_account_is_replayed_from_its_checkpoint(
    ledger: Ledger, config_url: str, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headgate.quotas.storage.CHECKPOINT_INTERVAL", 5)
    for number in range(23):
        ledger.grant("acme", 10, id=f"g{number}", expires_at=clock.now_us() + 5_000_000 + number)
        reserved(ledger, "acme", 3, id=f"r{number}")
    fresh = Ledger(config_url, clock=clock)
    assert fresh.summary("acme") == ledger.summary("acme")
    fresh.commit("r22", 1)
    assert ledger.balance("acme") == 230 - 22 * 3 - 1
    fresh.close()


def test_ledger_shares_a_database_with_the_config_store(config_url: str) -> None:
    ledger = Ledger(config_url)
    ledger.grant("acme", 1)
    assert ConfigStore(config_url).version == 0
    assert ledger.balance("acme") == 1


def test_threads_share_transactions_and_never_overspend(ledger: Ledger) -> None:
    ledger.grant("acme", 100)
    served: list[int] = []

    def work(worker: int) -> None:
        for number in range(10):
            reservation = ledger.reserve("acme", 2, id=f"{worker}-{number}")
            if reservation is not None:
                served.append(ledger.commit(reservation.id, 2 if number % 2 else 1).amount)

    threads = [threading.Thread(target=work, args=(worker,)) for worker in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert ledger.summary("acme").charged == sum(served)
    assert ledger.balance("acme") == 100 - sum(served) in (0, 1)
