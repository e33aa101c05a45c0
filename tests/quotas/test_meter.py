"""The quota meter: leases, idempotency, outages, recovery, and the usage records in the ledger."""

from __future__ import annotations

import errno
import gc
import os
import shutil
import sqlite3
import threading
from contextlib import closing
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from prometheus_client import CollectorRegistry

from headgate import Calendar, InvalidConfiguration, InvalidCost, InvalidInput
from headgate.control.config.migrations import VERSION_TABLE
from headgate.quotas import Ledger, LedgerUnavailable, MeterReservation, QuotaMeter, QuotaPlan, UsageRecord
from headgate.quotas.entries import derived_id
from headgate.quotas.journal import UsageJournal, abandoned_journals
from headgate.telemetry.otel import instrument_meter
from headgate.telemetry.prometheus import register_meter
from support.processes import run_in_child

if TYPE_CHECKING:
    from headgate.testing import FakeClock


def charge_all(meter: QuotaMeter, account: str, amount: int) -> int:
    """The number of charges until the first refusal."""
    count = 0
    while meter.charge(account, amount):
        count += 1
    return count


# ------------------------------------------------------------------ meters


@pytest.mark.parametrize(("granted", "amount"), [(0, 1), (1, 1), (57, 1), (57, 5), (250, 7), (1000, 300)])
def test_every_unit_can_be_spent_and_no_more(ledger: Ledger, granted: int, amount: int) -> None:
    if granted:
        ledger.grant("acme", granted)
    with QuotaMeter(ledger, wait_s=20) as meter:
        assert charge_all(meter, "acme", amount) == granted // amount
        assert charge_all(meter, "acme", 1) == granted % amount
    assert ledger.summary("acme").charged == granted
    assert ledger.balance("acme") == 0


def test_several_meters_never_exceed_the_balance(ledger: Ledger) -> None:
    ledger.grant("acme", 500)
    meters = [QuotaMeter(ledger, wait_s=20) for _ in range(3)]
    counts = [0] * 3

    def work(at: int) -> None:
        counts[at] = charge_all(meters[at], "acme", 1)

    threads = [threading.Thread(target=work, args=(at,)) for at in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for meter in meters:
        meter.close()
    with QuotaMeter(ledger, wait_s=20) as last:  # what one of them gave up as unused is there for the next
        rest = charge_all(last, "acme", 1)
    assert sum(counts) + rest == 500
    assert ledger.summary("acme").charged == 500


def test_reservation_settles_the_real_amount(ledger: Ledger) -> None:
    ledger.grant("acme", 100)
    with QuotaMeter(ledger, wait_s=20) as meter:
        one, two, three = (meter.reserve("acme", 30, id=f"r{n}") for n in range(3))
        assert one is not None
        assert two is not None
        assert three is not None
        assert meter.reserve("acme", 30) is None
        one.commit(5)
        two.void()
        three.commit(50)
        three.commit(1)  # ended before: no effect
        four = meter.reserve("acme", 40)
        assert four is not None
        four.commit(45)
    assert ledger.summary("acme").charged == 5 + 50 + 45
    assert ledger.balance("acme") == 0


def test_repeated_id_is_charged_once_in_any_process(ledger: Ledger) -> None:
    ledger.grant("acme", 100)
    with QuotaMeter(ledger, wait_s=20) as one, QuotaMeter(ledger, wait_s=20) as other:
        assert one.charge("acme", 7, id="request 1", reference="GET /export")
        assert one.charge("acme", 7, id="request 1")
        assert other.charge("acme", 7, id="request 1", reference="GET /export")
        assert other.charge("acme", 7, id="request 2")
    with QuotaMeter(ledger, wait_s=20) as later:
        assert later.charge("acme", 7, id="request 2")
    assert ledger.summary("acme").charged == 14
    leases = [entry.id for entry in ledger.entries("acme") if entry.kind == "reserve"]
    records = [record for lease in leases for record in ledger.usage(lease)]
    assert {(record.id, record.amount, record.reference) for record in records} == {
        ("request 1", 7, "GET /export"),
        ("request 2", 7, ""),
    }


def test_retry_of_a_charged_request_passes_although_nothing_is_left(ledger: Ledger) -> None:
    ledger.grant("acme", 1)
    with QuotaMeter(ledger, wait_s=20) as first:
        assert first.charge("acme", 1, id="r1")
    with QuotaMeter(ledger, wait_s=20) as other:
        retry = other.reserve("acme", 1, id="r1", reference="again")
        assert retry is not None
        assert (retry.is_repeated, retry.paid_by, retry.remaining) == (True, (), 0)
        retry.commit(1)
        retry.void()
        assert other.charge("acme", 1, id="r1")
        assert not other.charge("acme", 1, id="r2")
        assert not other.charge("acme", 1)
        assert other.stats().rejections == {("none", "exhausted"): 2}
    assert (ledger.summary("acme").charged, ledger.balance("acme")) == (1, 0)


def test_requests_are_refused_at_once_if_too_many_may_be_retries(
    ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headgate.quotas.meter.MAX_QUESTIONS", 2)
    monkeypatch.setattr("headgate.quotas.meter.REFUSAL_S", 3600)
    release, charged_ids = threading.Event(), ledger.charged_ids

    def hang(ids: Any) -> set[str]:
        release.wait()
        return charged_ids(ids)

    monkeypatch.setattr(ledger, "charged_ids", hang)
    ledger.grant("acme", 1)
    with QuotaMeter(ledger, wait_s=20) as meter:
        assert meter.charge("acme", 1)
        assert not meter.charge("acme", 1)
        refusals = [meter.try_reserve("acme", 1, id=f"{number}") for number in range(4)]
        release.set()
        assert refusals == ["pending", "pending", "exhausted", "exhausted"]
        assert not meter.charge("acme", 1, id="0")


def test_voided_request_can_be_tried_again(ledger: Ledger) -> None:
    ledger.grant("acme", 100)
    with QuotaMeter(ledger, wait_s=20) as meter:
        first = meter.reserve("acme", 7, id="request")
        assert first is not None
        first.void()
        assert meter.charge("acme", 7, id="request")
    assert ledger.summary("acme").charged == 7


def test_many_charges_are_few_writes(ledger: Ledger) -> None:
    ledger.grant("acme", 10**9)
    with QuotaMeter(ledger, wait_s=20) as meter:
        for number in range(10_000):  # enough for leases to grow to the rate, also on a slow machine
            assert meter.charge("acme", 1, id=f"{number}")
        meter.flush()
        stats = meter.stats()
    assert stats.charges == 10_000
    entries = ledger.entries("acme")
    assert len(entries) <= 10_000 / 100
    assert sum(entry.usage_count for entry in entries) == 10_000


def test_refused_request_without_waiting_has_a_lease_later(ledger: Ledger) -> None:
    ledger.grant("acme", 10)
    with QuotaMeter(ledger) as meter:
        assert meter.reserve("acme", 1, wait=False) is None
        assert meter.charge("acme", 1)
        held = meter.reserve("acme", 1, wait=False)
        assert held is not None
        held.void()


def test_larger_refusal_does_not_refuse_smaller_requests(ledger: Ledger) -> None:
    ledger.grant("acme", 10)
    with QuotaMeter(ledger, wait_s=20) as meter:
        assert not meter.charge("acme", 11)
        assert meter.charge("acme", 10)


def test_charge_is_not_to_a_grant_that_has_expired(ledger: Ledger, clock: FakeClock) -> None:
    ledger.grant("acme", 10, expires_at=clock.now_us() + 1_000_000)
    with QuotaMeter(ledger, wait_s=20) as meter:
        assert meter.charge("acme", 1)
        clock.advance(1)
        assert not meter.charge("acme", 1)
        ledger.grant("acme", 5)
    assert ledger.summary("acme").charged == 1
    assert ledger.balance("acme") == 5


@pytest.mark.parametrize("amount", [-1, 1.0, True, "1", 2**53])
def test_impossible_amounts_are_input_errors(ledger: Ledger, amount: Any) -> None:
    with QuotaMeter(ledger) as meter, pytest.raises(InvalidCost, match="amount must be a whole number"):
        meter.charge("acme", amount)


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ({"id": "x" * 201}, "id has 201 characters; use at most 200"),
        ({"id": ""}, "id must not be empty"),
        ({"id": "a\x00b"}, "id contains the control character"),
        ({"id": "\udc80"}, "id contains the control character"),
        ({"id": "headgate:x"}, "must not start with 'headgate:'"),
        ({"id": 7}, "id must be a text, got 7"),
        ({"reference": "r" * 501}, "reference has 501 characters; use at most 500"),
        ({"account": "a" * 201}, "account has 201 characters; use at most 200"),
        ({"account": ""}, "account must not be empty"),
        ({"account": "a\n"}, "account contains the control character"),
    ],
)
def test_what_the_ledger_would_refuse_is_an_input_error_at_once(
    ledger: Ledger, arguments: dict[str, Any], problem: str
) -> None:
    ledger.grant("acme", 10)
    with QuotaMeter(ledger, wait_s=20) as meter:
        with pytest.raises(InvalidInput) as raised:
            meter.charge(**({"account": "acme", "amount": 1} | arguments))
        assert problem in str(raised.value)
        assert meter.charge("acme", 1, id="x" * 200, reference="r" * 500)
        assert meter.flush()
    assert ledger.summary("acme").charged == 1


# ------------------------------------------------------------------ outages, crashes


@pytest.fixture
def outage(ledger: Ledger, monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """While it is set, the database is unavailable to exchanges."""
    is_down, exchange = threading.Event(), ledger.exchange

    def fail(**given: Any) -> Any:
        if is_down.is_set():
            raise LedgerUnavailable("ledger: connection refused")
        return exchange(**given)

    monkeypatch.setattr(ledger, "exchange", fail)
    return is_down


def test_lease_that_is_granted_to_a_closing_meter_is_closed(ledger: Ledger, outage: threading.Event) -> None:
    """It was asked for while the ledger was unavailable, and is granted when the meter writes its last charges."""
    ledger.grant("acme", 100)
    outage.set()
    meter = QuotaMeter(ledger, wait_s=20, write_interval_s=60)
    assert not meter.charge("acme", 1)
    outage.clear()
    meter.close()
    assert ledger.summary("acme").held == 0
    assert ledger.balance("acme") == 100


def test_leases_are_spent_while_the_ledger_is_unavailable(ledger: Ledger, outage: threading.Event) -> None:
    ledger.grant("acme", 400)
    with QuotaMeter(ledger, wait_s=20) as meter:
        assert meter.charge("acme", 1)
        assert meter.flush()
        outage.set()
        left = meter.stats().leased
        assert [meter.charge("acme", 1) for _ in range(left)] == [True] * left
        assert not meter.charge("acme", 1)
        assert not meter.flush()
        assert meter.stats().unwritten == left
        outage.clear()
        assert meter.flush()
        assert meter.stats().unwritten == 0
    assert ledger.summary("acme").charged == left + 1


def test_lost_answer_of_the_ledger_changes_nothing(ledger: Ledger, monkeypatch: pytest.MonkeyPatch) -> None:
    exchange, lost = ledger.exchange, []

    def lose_answer(**given: Any) -> Any:
        answer = exchange(**given)
        if given.get("usage") and len(lost) < 3:
            lost.append(given)
            raise LedgerUnavailable("ledger: connection lost")
        return answer

    monkeypatch.setattr(ledger, "exchange", lose_answer)
    ledger.grant("acme", 60)
    with QuotaMeter(ledger, wait_s=20, write_interval_s=0.001) as meter:
        served = 0
        while served < 60:  # a few are refused while the ledger seems to be unavailable
            served += meter.charge("acme", 1)
    assert lost
    summary = ledger.summary("acme")
    assert (summary.charged, summary.available) == (60, 0)
    assert all(not entry.uncovered for entry in ledger.entries("acme"))


def test_unexpected_error_does_not_end_the_writing_of_charges(
    ledger: Ledger, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    ledger.grant("acme", 60)
    exchange, failures = ledger.exchange, []
    is_written = threading.Event()

    def fail_twice(**given: Any) -> Any:
        if given.get("usage") and len(failures) < 2:
            failures.append(given)
            raise RuntimeError("unexpected")
        answer = exchange(**given)
        if given.get("usage"):
            is_written.set()
        return answer

    monkeypatch.setattr(ledger, "exchange", fail_twice)
    with QuotaMeter(ledger, wait_s=20, write_interval_s=0.001) as meter:
        assert meter.charge("acme", 1)
        assert is_written.wait(20)
    assert len(failures) == 2
    assert "charges are not written to the ledger" in caplog.text
    assert ledger.summary("acme").charged == 1


def test_damaged_account_does_not_affect_others(tmp_path: Path) -> None:
    ledger = Ledger(f"sqlite:///{tmp_path}/quota.db")
    for account in ("acme", "globex"):
        ledger.grant(account, 10)
    with closing(sqlite3.connect(tmp_path / "quota.db")) as connection, connection:
        connection.execute("UPDATE headgate_ledger SET amount = 1000, granted = 1000 WHERE account = 'acme'")
    fresh = Ledger(f"sqlite:///{tmp_path}/quota.db")
    with QuotaMeter(fresh, wait_s=20) as meter:
        assert not meter.charge("acme", 1)
        assert charge_all(meter, "globex", 1) == 10
        assert not meter.charge("acme", 1)
    assert fresh.summary("globex").charged == 10
    ledger.close()
    fresh.close()


def test_outage_units_are_settled_later(ledger: Ledger, outage: threading.Event, tmp_path: Path) -> None:
    ledger.grant("acme", 8)
    with QuotaMeter(ledger, wait_s=20, outage_units=10, journal=tmp_path) as meter:
        assert meter.charge("acme", 2)
        outage.set()
        meter.charge("globex", 1)
        assert charge_all(meter, "globex", 3) == 3, "10 units without a lease"
        assert meter.stats().outage == 10
        outage.clear()
        assert meter.flush()
        assert meter.stats().outage == 0
    summary = ledger.summary("globex")
    assert (summary.charged, summary.available) == (0, 0)
    entries = ledger.entries("globex")  # several, if the meter has tried to write some of the charges meanwhile
    assert sum(entry.amount for entry in entries) == sum(entry.uncovered for entry in entries) == 10
    assert sum(entry.usage_count for entry in entries) == 4
    assert {entry.reason for entry in entries} == {"ledger was unavailable"}


def test_journal_of_a_dead_process_is_settled(ledger: Ledger, tmp_path: Path, config_url: str) -> None:
    ledger.grant("acme", 1000)

    def die() -> None:
        meter = QuotaMeter(Ledger(config_url), wait_s=20, journal=tmp_path, write_interval_s=60)
        for number in range(20):
            assert meter.charge("acme", 3, id=f"request {number}")
        os._exit(0)

    assert run_in_child(die) == 0
    assert ledger.summary("acme").held > 0
    with QuotaMeter(ledger, wait_s=20, journal=tmp_path) as meter:
        assert meter.recover() == 1
        assert meter.recover() == 0
    assert ledger.summary("acme").charged == 60
    assert ledger.balance("acme") == 940
    assert [*tmp_path.glob("*.usage")] == []


def test_journal_is_settled_also_if_its_last_line_was_interrupted(ledger: Ledger, tmp_path: Path) -> None:
    ledger.grant("acme", 1000)
    lease = ledger.lease("acme", 100, id="lease-1")
    assert lease is not None
    lines = '["lease-1"]\n["r1","acme","lease-1",5,1,"",false]\n["r2","acme","lea'
    (tmp_path / "dead.usage").write_text(lines)
    with QuotaMeter(ledger, journal=tmp_path) as meter:
        assert meter.recover() == 1
    assert ledger.summary("acme").charged == 5


def test_forked_child_has_leases_of_its_own(ledger: Ledger, tmp_path: Path) -> None:
    ledger.grant("acme", 1000)
    with QuotaMeter(ledger, wait_s=20, journal=tmp_path) as meter:
        assert meter.charge("acme", 1)

        def work() -> None:
            assert meter.stats().leased == 0
            assert meter.charge("acme", 2)
            meter.close()

        assert run_in_child(work) == 0
        assert meter.charge("acme", 4)
    assert ledger.summary("acme").charged == 7


def test_forked_child_opens_a_journal_with_its_first_charge(
    ledger: Ledger, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the directory that was meant when the meter was made."""
    ledger.grant("acme", 1000)
    monkeypatch.chdir(tmp_path)
    meter = QuotaMeter(ledger, wait_s=20, journal="journal")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")

    def files() -> int:
        assert [*Path().iterdir()] == []
        return len([*(tmp_path / "journal").iterdir()])

    def charge() -> None:
        assert files() == 1
        assert meter.charge("acme", 1)
        assert files() == 2
        meter.close()
        assert files() == 1

    assert run_in_child(charge) == 0
    meter.close()

    def charge_after_close() -> None:
        assert not meter.charge("acme", 1)
        assert files() == 0

    assert run_in_child(charge_after_close) == 0


def test_forked_child_charges_without_a_journal_that_cannot_be_written(
    ledger: Ledger, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ledger.grant("acme", 1000)
    with QuotaMeter(ledger, wait_s=20, journal=tmp_path / "journal") as meter:

        def work() -> None:
            (tmp_path / "journal").rename(tmp_path / "moved")
            (tmp_path / "journal").touch()
            assert meter.charge("acme", 1)
            assert "charges of this process are in no journal" in caplog.text
            meter.close()

        assert run_in_child(work) == 0
        (tmp_path / "journal").unlink()
        (tmp_path / "moved").rename(tmp_path / "journal")
    assert ledger.summary("acme").charged == 1


def test_large_journal_is_replaced_once_it_is_written(
    ledger: Ledger, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headgate.quotas.journal.MAX_SIZE", 100)
    ledger.grant("acme", 1000)
    with QuotaMeter(ledger, wait_s=20, journal=tmp_path, write_interval_s=60) as meter:
        for _ in range(10):
            assert meter.charge("acme", 1)
        (file,) = tmp_path.glob("*.usage")
        meter.flush()
        (other,) = tmp_path.glob("*.usage")
        assert other != file
        assert other.read_text().count("\n") == meter.stats().leases
    assert ledger.summary("acme").charged == 10


def test_journal_that_cannot_be_written_is_named(ledger: Ledger, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(InvalidConfiguration, match="file: cannot be written"):
        QuotaMeter(ledger, journal=tmp_path / "file")


def test_requests_wait_for_an_answer_without_a_thread(ledger: Ledger) -> None:
    ledger.grant("acme", 10)
    with QuotaMeter(ledger, wait_s=20) as meter:
        answered = threading.Event()
        assert meter.try_reserve("acme", 1, waiter=answered.set) == "pending"
        assert answered.wait(20)
        made = meter.try_reserve("acme", 2)
        assert isinstance(made, MeterReservation)
        assert made.paid_by == (("grant", 2),)
        assert meter.try_reserve("globex", 1, waiter=answered.set) == "pending"
        assert meter.reserve("globex", 1) is None
        assert meter.try_reserve("globex", 1) == "exhausted"
        made.commit(1)
        meter.flush()
        assert meter.balance("acme").remaining == 9
        assert meter.balance("globex") == (0, 0)
    assert ledger.balance("acme") == 9


def test_reservation_that_two_requests_share_is_committed_by_either(ledger: Ledger) -> None:
    ledger.grant("acme", 10)
    with QuotaMeter(ledger, wait_s=20) as meter:
        first, second = (meter.reserve("acme", 2, id="r1") for _ in range(2))
        assert first is not None
        assert first is second
        first.void()  # the limits denied one of them
        second.commit(2)  # type: ignore[union-attr]
        third, fourth = (meter.reserve("acme", 2, id="r2") for _ in range(2))
        assert third is not None
        third.commit(2)
        fourth.void()  # type: ignore[union-attr]
        fifth, sixth = (meter.reserve("acme", 2, id="r3") for _ in range(2))
        fifth.void()  # type: ignore[union-attr]
        sixth.void()  # type: ignore[union-attr]
        assert meter.balance("acme").remaining == 6
    assert ledger.summary("acme").charged == 4


def test_meter_reports_when_the_ledger_is_lost_and_back(ledger: Ledger, outage: threading.Event) -> None:
    changes: list[bool] = []
    with QuotaMeter(
        ledger, wait_s=20, write_interval_s=60, on_change=lambda error: changes.append(error is None)
    ) as meter:
        outage.set()
        assert meter.try_reserve("acme", 1) == "pending"
        meter.flush()
        meter.flush()
        assert meter.try_reserve("acme", 1) == "unavailable"
        assert isinstance(meter.try_reserve("acme", 1, outage_units=1), MeterReservation)
        assert meter.try_reserve("acme", 1, outage_units=1) == "unavailable"
        outage.clear()
        meter.flush()
    assert changes == [False, True]


def test_idle_accounts_are_forgotten(ledger: Ledger, monkeypatch: pytest.MonkeyPatch) -> None:
    ledger.grant("acme", 10, source="credit")
    with QuotaMeter(ledger, wait_s=20, write_interval_s=60) as meter:
        assert meter.charge("acme", 1)
        assert not meter.charge("globex", 1)
        monkeypatch.setattr("headgate.quotas.meter.IDLE_S", -1.0)
        meter.flush()
        meter.flush()
        assert meter.balance("acme") == meter.balance("globex") == (0, 0)
        monkeypatch.undo()
        assert meter.charge("acme", 1)
    assert ledger.summary("acme").charged == 2


def test_ledger_connects_when_it_is_used(tmp_path: Path) -> None:
    ledger = Ledger(f"sqlite:///{tmp_path}/quota.db", connect=False)
    assert not (tmp_path / "quota.db").exists()
    ledger.grant("acme", 1)
    assert ledger.balance("acme") == 1
    ledger.close()


# ------------------------------------------------------------------ leases in the ledger


def usage(lease: str, id: str, amount: int) -> UsageRecord:
    return UsageRecord(id, "acme", lease, amount, 1)


def test_lease_is_a_share_of_the_balance(ledger: Ledger) -> None:
    ledger.grant("acme", 100)
    for id, least, amount in (("a", 1, 25), ("b", 1, 18), ("c", 50, 50), ("d", 1, 1), ("e", 7, None)):
        lease = ledger.lease("acme", 1000, id=id, least=least, share=4)
        assert (None if lease is None else lease.amount) == amount
        if lease is not None:
            assert ledger.lease("acme", 1000, id=id, least=least, share=4) == lease


def test_closed_lease_charges_its_usage_and_returns_the_rest(ledger: Ledger) -> None:
    ledger.grant("acme", 100)
    ledger.lease("acme", 50, id="l")
    assert ledger.record_usage([usage("l", "r1", 5), usage("l", "r2", 7), usage("l", "r1", 5)]) == {"r1"}
    assert ledger.record_usage([usage("l", "r2", 7)]) == set(), "the record itself"
    assert ledger.record_usage([usage("l", "r2", 7)._replace(at_us=2)]) == {"r2"}, "a retry of the request"
    entry = ledger.close_lease("l")
    assert entry is not None
    assert (entry.id, entry.amount, entry.usage_count, entry.balance) == (derived_id("commit", "l"), 12, 2, 88)
    assert ledger.close_lease("l") == entry
    assert ledger.record_usage([usage("l", "r1", 5)]) == set(), "a repetition"
    with pytest.raises(InvalidInput, match="lease 'l' was closed before 'r3' was recorded"):
        ledger.record_usage([usage("l", "r3", 5)])
    with pytest.raises(InvalidInput, match="there is no lease 'x'"):
        ledger.record_usage([usage("x", "r4", 5)])
    with pytest.raises(InvalidInput, match="is a lease; end it with close_lease"):
        ledger.commit("l", 5)
    assert ledger.close_lease("x") is None


def test_expired_lease_is_charged_as_a_whole_until_its_usage_is_known(ledger: Ledger, clock: FakeClock) -> None:
    ledger.grant("acme", 100)
    ledger.lease("acme", 50, id="l", ttl=timedelta(seconds=10))
    ledger.record_usage([usage("l", "r1", 5)])
    clock.advance(10)
    assert ledger.balance("acme") == 50
    ledger.expire()
    assert ledger.summary("acme").charged == 50
    ledger.record_usage([usage("l", "r2", 10)])  # a journal that was found later
    entry = ledger.close_lease("l")
    assert entry is not None
    assert (entry.kind, entry.amount, entry.balance, entry.usage_count) == ("adjust", 35, 85, 2)
    assert ledger.close_lease("l") == entry


def test_what_an_expired_lease_returns_expires_with_its_grant(ledger: Ledger, clock: FakeClock) -> None:
    ledger.grant("acme", 100, expires_at=clock.now_us() + 5_000_000)
    ledger.lease("acme", 50, id="l", ttl=timedelta(seconds=10))
    clock.advance(10)
    ledger.expire()
    ledger.close_lease("l")
    assert ledger.balance("acme") == 0


def test_usage_beyond_the_lease_is_charged_as_far_as_possible(ledger: Ledger) -> None:
    ledger.grant("acme", 100)
    ledger.lease("acme", 50, id="l")
    ledger.record_usage([usage("l", "r1", 130)])
    entry = ledger.close_lease("l")
    assert entry is not None
    assert (entry.charged, entry.uncovered, entry.balance) == (100, 30, 0)


def test_change_of_any_usage_record_is_detected(tmp_path: Path) -> None:
    ledger = Ledger(f"sqlite:///{tmp_path}/quota.db")
    ledger.grant("acme", 100)
    for lease in ("one", "two"):
        ledger.lease("acme", 10, id=lease)
    for number in range(3):
        ledger.record_usage([usage("one", f"a{number}", 1), usage("two", f"b{number}", 2)])
    ledger.close_lease("one")  # the other one is open
    assert ledger.verify() == []
    with closing(sqlite3.connect(tmp_path / "quota.db", isolation_level=None)) as connection:
        rows = connection.execute("SELECT * FROM headgate_ledger_usage ORDER BY number").fetchall()
        names = [row[1] for row in connection.execute("PRAGMA table_info(headgate_ledger_usage)")]
        connection.execute("DROP INDEX headgate_ledger_usage_id")
        statements = [
            f"UPDATE headgate_ledger_usage SET {name} = {name} || '1' WHERE number = {row[0]}"
            for row in rows
            for name in names
        ]
        statements += [f"DELETE FROM headgate_ledger_usage WHERE number = {row[0]}" for row in rows]
        statements += [
            f"INSERT INTO headgate_ledger_usage SELECT 7, 'new', account, lease, amount, at_us, '' FROM "
            f"headgate_ledger_usage WHERE number = {row[0]}"
            for row in rows
        ]
        for statement in statements:
            connection.execute(statement)
            assert ledger.verify(), statement
            connection.execute("DELETE FROM headgate_ledger_usage")
            connection.executemany(f"INSERT INTO headgate_ledger_usage VALUES ({', '.join('?' * len(names))})", rows)
        assert ledger.verify() == []
        hashes = connection.execute("SELECT * FROM headgate_ledger_usage_hashes").fetchall()
        for change in (
            "UPDATE headgate_ledger_usage_hashes SET hash = 'x'",
            "DELETE FROM headgate_ledger_usage_hashes",
        ):
            for number, _ in hashes:
                connection.execute(f"{change} WHERE number = {number}")
                assert ledger.verify(), (change, number)
                connection.execute("DELETE FROM headgate_ledger_usage_hashes")
                connection.executemany("INSERT INTO headgate_ledger_usage_hashes VALUES (?, ?)", hashes)
    assert ledger.verify() == []
    ledger.close()


def test_problem_names_the_changed_usage_records(tmp_path: Path) -> None:
    ledger = Ledger(f"sqlite:///{tmp_path}/quota.db")
    ledger.grant("acme", 100)
    ledger.lease("acme", 10, id="one")
    for number in range(3):
        ledger.record_usage([usage("one", f"a{number}", 1), usage("one", f"b{number}", 2)])
    with closing(sqlite3.connect(tmp_path / "quota.db", isolation_level=None)) as connection:
        connection.execute("UPDATE headgate_ledger_usage SET amount = 1 WHERE id = 'b1'")
        assert [*map(str, ledger.verify())] == ["ledger: usage records 3 to 4 do not match their hash"]
        connection.execute("UPDATE headgate_ledger_usage SET amount = 2 WHERE id = 'b1'")
        connection.execute("DELETE FROM headgate_ledger_usage WHERE id = 'b2'")
        assert [*map(str, ledger.verify())] == ["ledger: the last usage record is 5, and the last hash is that of 6"]
    ledger.close()


@pytest.mark.parametrize("has_usage", [True, False])
def test_upgrade_hashes_the_usage_that_exists(config_url: str, has_usage: bool) -> None:
    with closing(Ledger(config_url)) as ledger:
        ledger.grant("acme", 100)
        ledger.lease("acme", 10, id="one")
        if has_usage:
            ledger.record_usage([usage("one", "ä", 1), usage("one", "b", 2)])
        with ledger.engine.begin() as connection:
            connection.exec_driver_sql("DROP TABLE headgate_ledger_usage_hashes")
            connection.exec_driver_sql(f"UPDATE {VERSION_TABLE} SET version_num = '0010'")
    with closing(Ledger(config_url)) as ledger:
        assert ledger.verify() == []
        ledger.record_usage([usage("one", "c", 1)])
        assert ledger.verify() == []


# ------------------------------------------------------------------ journals


def journals(directory: Path) -> list[tuple[list[str], list[str], list[str]]]:
    """The leases, usage and outages of all journals whose owners have ended."""
    found = []
    for journal in abandoned_journals(directory):
        outages = [record.id for records in journal.outages.values() for record in records]
        found.append((journal.leases, [record.id for record in journal.usage], outages))
        journal.release()
    return found


def record_of(number: int, lease: str = "lease") -> UsageRecord:
    return UsageRecord(f'"{number}"\\é', "acme", lease, number, 10**15 + number, "GET /\u2028?\ud800"[: number % 9])


def test_compacted_journal_has_what_is_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headgate.quotas.journal.MAX_SIZE", 2000)
    monkeypatch.setattr("headgate.quotas.journal.MAX_LINE_SIZE", 100)
    journal = UsageJournal(tmp_path)
    journal.add_lease("closed")
    for number in range(40):
        assert not journal.needs_compaction(0) or number > 15
        journal.add_usage(record_of(number), is_outage=number % 10 == 0)
    assert not journal.needs_compaction(1000), "the new file would be as large"
    assert journal.needs_compaction(3)
    journal.compact(["open"], [record_of(37), record_of(38)], [record_of(30, "outage-1")])
    journal.add_usage(record_of(41), is_outage=False)
    journal.abandon()
    assert journals(tmp_path) == [(["open"], [record_of(number).id for number in (37, 38, 41)], [record_of(30).id])]


def test_journal_is_kept_if_there_is_no_room_for_a_new_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journal = UsageJournal(tmp_path)
    journal.add_lease("lease")
    journal.add_usage(record_of(1), is_outage=False)
    write = os.write
    with monkeypatch.context() as full:
        full.setattr(os, "write", lambda file, data: write(file, data[:10]))
        journal.compact(["lease"], [record_of(1)], [])
    with monkeypatch.context() as full:
        full.setattr(os, "open", raise_no_space)
        journal.compact(["lease"], [record_of(1)], [])
    journal.add_usage(record_of(2), is_outage=False)
    journal.abandon()
    assert journals(tmp_path) == [(["lease"], [record_of(1).id, record_of(2).id], [])]


@pytest.mark.parametrize("room", [0, 10, -1])
def test_charges_go_on_without_the_journal_while_the_disk_is_full(
    ledger: Ledger, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, room: int
) -> None:
    """With the bytes for which there is room; -1 if the write fails."""
    ledger.grant("acme", 1000)
    write = os.write

    def fill(file: int, data: bytes) -> int:
        return raise_no_space() if room < 0 else write(file, data[:room])

    meter = QuotaMeter(ledger, journal=tmp_path, wait_s=20, write_interval_s=3600)
    assert meter.charge("acme", 1, id="before")
    with monkeypatch.context() as full:
        full.setattr(os, "write", fill)
        assert [meter.charge("acme", 1, id=f"{number}") for number in range(3)] == [True] * 3
    assert meter.charge("acme", 1, id="after")
    assert [record.levelname for record in caplog.records] == ["ERROR"]
    assert "charges are not in the journal" in caplog.text
    shutil.copytree(tmp_path, tmp_path / "copy")
    ((leases, usage, outages),) = journals(tmp_path / "copy")
    assert (len(leases), usage, outages) == (1, ["before", "after"], [])
    meter.close()
    assert ledger.summary("acme").charged == 5


def raise_no_space(*_: Any) -> int:
    raise OSError(errno.ENOSPC, "no space left")


def test_journal_stays_small_although_there_is_always_something_unwritten(
    ledger: Ledger, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headgate.quotas.journal.MAX_SIZE", 2000)
    monkeypatch.setattr("headgate.quotas.journal.MAX_LINE_SIZE", 100)
    ledger.grant("acme", 10_000)
    exchange = ledger.exchange
    sizes = []
    with QuotaMeter(ledger, journal=tmp_path / "journal", wait_s=20, write_interval_s=3600) as meter:
        assert meter.charge("acme", 1, id="first")

        def charge_meanwhile(**options: Any) -> Any:
            """A request is charged while the ledger is asked by `flush`."""
            is_flush = threading.current_thread() is threading.main_thread()
            reservation = meter.reserve("acme", 1, wait=False) if is_flush else None
            if reservation is not None:
                reservation.commit(1)
            return exchange(**options)

        monkeypatch.setattr(ledger, "exchange", charge_meanwhile)
        for round in range(30):
            for number in range(5):
                assert meter.charge("acme", 1, id=f"{round}-{number}")
            assert meter.flush()
            sizes.append(sum(file.stat().st_size for file in (tmp_path / "journal").iterdir()))
        assert max(sizes) < 5000
        monkeypatch.undo()
        charges = meter.stats().charges
    assert ledger.summary("acme").charged == charges >= 151


# ------------------------------------------------------------------ metrics


def exposed(registry: CollectorRegistry) -> dict[str, float]:
    """The samples of quotas, without their common prefix and label."""
    families = [family for family in registry.collect() if family.name.startswith("rate_limiter_quota_")]
    return {
        " ".join([each.name.removeprefix("rate_limiter_quota_"), *list(each.labels.values())[1:]]): each.value
        for family in families
        for each in family.samples
    }


def test_metrics_are_those_of_the_meter(ledger: Ledger, clock: FakeClock) -> None:
    plan, registry, reader = QuotaPlan("exports", 8, Calendar("month")), CollectorRegistry(), InMemoryMetricReader()
    provider = MeterProvider([reader], shutdown_on_exit=False)
    with QuotaMeter(ledger, wait_s=20, write_interval_s=3600) as meter:
        for _ in range(2):  # a second time has no effect
            register_meter(meter, registry)
            instrument_meter(meter, provider)
        assert meter.charge("exports/acme", 5, plan=plan)
        assert meter.flush()
        assert meter.charge("exports/acme", 2, plan=plan)
        assert not meter.charge("exports/acme", 3, plan=plan)
        assert not meter.charge("globex", 3)
        clock.advance(4.5)
        found = exposed(registry)
        writes = found.pop("ledger_writes_total")
        assert 2 <= writes <= 6
        unwritten = {found.pop("unwritten"): found.pop("unwritten_seconds")}
        assert unwritten.items() <= {2: 4.5, 0: 0.0}.items(), "unless the refused charge has had it written"
        assert found.pop("leased") == found.pop("leases") in (0, 1), "the last unit, unless its lease was returned"
        assert found == {
            "outage": 0,
            "charges_total": 2,
            "rejections_total exports exhausted": 1,
            "rejections_total none exhausted": 1,
            "ledger_unavailable": 0,
        }
        data = reader.get_metrics_data()
        assert data is not None
        (scope,) = data.resource_metrics[0].scope_metrics
        points = {metric.name: list(metric.data.data_points) for metric in scope.metrics}
        assert [point.value for point in points["limiter.quota_charges"]] == [2]
        assert {point.attributes["quota"] for point in points["limiter.quota_rejections"]} == {"exports", "none"}
    del meter
    gc.collect()
    assert exposed(registry) == {
        "charges_total": 2,
        "rejections_total exports exhausted": 1,
        "rejections_total none exhausted": 1,
        "ledger_writes_total": exposed(registry)["ledger_writes_total"],
    }, "counters do not fall when their meter is gone"
