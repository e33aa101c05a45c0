"""Usage alerts: each threshold once per account and period, whichever process writes the usage, and their webhook."""

from __future__ import annotations

import json
from contextlib import closing
from datetime import UTC, datetime
from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headgate import Calendar, InvalidInput
from headgate.control import webhooks
from headgate.control.webhooks import Webhook, verify
from headgate.quotas import Ledger, QuotaMeter, QuotaPlan, UsageRecord
from headgate.quotas.account import AccountState
from headgate.quotas.entries import EntryDraft
from headgate.quotas.usage_alerts import USAGE_QUEUE, UsageNotifier
from support.servers import wait_until
from support.webhook_receiver import WebhookReceiver

if TYPE_CHECKING:
    from collections.abc import Iterator

    from headgate.testing import FakeClock

SECRET = "a secret that both sides have"
PLAN = QuotaPlan("exports", 100, Calendar("month"))
ACCOUNT = PLAN.account("acme")


@pytest.fixture
def receiver() -> Iterator[WebhookReceiver]:
    with WebhookReceiver() as made:
        yield made


def reached(ledger: Ledger, account: str = ACCOUNT) -> list[int]:
    """The thresholds of the newest period, in the order in which they are recorded."""
    alerts = ledger.usage_alerts(account)
    newest = max((alert.period_end_us for alert in alerts), default=0)
    return [alert.percent for alert in reversed(alerts) if alert.period_end_us == newest]


# ------------------------------------------------------------------ detection


def test_each_threshold_is_recorded_once_when_it_is_reached(ledger: Ledger) -> None:
    ledger.open_period(ACCOUNT, PLAN)
    found = []
    for _ in range(100):
        ledger.charge(ACCOUNT, 1)
        found.append(len(ledger.usage_alerts(ACCOUNT)))
    assert [found.index(count) + 1 for count in (1, 2, 3)] == [50, 80, 100]
    assert [(alert.percent, alert.used, alert.allowance) for alert in ledger.usage_alerts(ACCOUNT)] == [
        (100, 100, 100),
        (80, 80, 100),
        (50, 50, 100),
    ]


def test_usage_of_an_open_lease_counts_and_what_it_holds_does_not(ledger: Ledger, clock: FakeClock) -> None:
    ledger.open_period(ACCOUNT, PLAN)
    lease = ledger.lease(ACCOUNT, 90, id="lease")
    assert lease is not None
    assert reached(ledger) == []
    for at in range(0, 90, 10):
        ledger.record_usage([UsageRecord(f"r{at}", ACCOUNT, lease.id, 10, clock.now_us())])
        assert reached(ledger) == [percent for percent in (50, 80) if at + 10 >= percent]
    ledger.close_lease(lease.id)
    ledger.charge(ACCOUNT, 10)
    assert reached(ledger) == [50, 80, 100]


def test_two_processes_record_a_threshold_once(ledger: Ledger, config_url: str, clock: FakeClock) -> None:
    ledger.open_period(ACCOUNT, PLAN)
    with closing(Ledger(config_url, clock=clock)) as other:
        for one in (ledger, other):
            one.charge(ACCOUNT, 25)
        assert reached(other) == [50]
        other.charge(ACCOUNT, 30)
        ledger.charge(ACCOUNT, 15)  # does not know yet that the other one has recorded 80
        ledger.charge(ACCOUNT, 5)
    with closing(Ledger(config_url, clock=clock)) as restarted:
        restarted.adjust(ACCOUNT, 10, reason="test")
        restarted.charge(ACCOUNT, 10)
        assert reached(restarted) == [50, 80, 100]


def test_leases_of_several_processes_count_together(ledger: Ledger, config_url: str, clock: FakeClock) -> None:
    ledger.open_period(ACCOUNT, PLAN)
    with closing(Ledger(config_url, clock=clock)) as other:
        for name, one in (("a", ledger), ("b", other)):
            assert one.lease(ACCOUNT, 40, id=name) is not None
        for name, one in (("a", ledger), ("b", other)):
            one.record_usage([UsageRecord(name, ACCOUNT, name, 25, clock.now_us())])
    assert reached(ledger) == [50]


def test_jump_records_all_thresholds_and_a_new_period_begins_anew(ledger: Ledger, clock: FakeClock) -> None:
    ledger.open_period(ACCOUNT, PLAN)
    ledger.charge(ACCOUNT, 100)
    assert reached(ledger) == [50, 80, 100]
    clock.advance(32 * 86_400)
    ledger.open_period(ACCOUNT, PLAN)
    ledger.charge(ACCOUNT, 60)
    assert reached(ledger) == [50]
    assert len(ledger.usage_alerts(ACCOUNT)) == 4


def test_grants_rollover_and_pay_as_you_go_are_not_the_allowance(ledger: Ledger, clock: FakeClock) -> None:
    plan = QuotaPlan("exports", 100, Calendar("month"), rollover=40, pay_as_you_go=1000)
    ledger.open_period(ACCOUNT, plan)
    clock.advance(32 * 86_400)
    ledger.open_period(ACCOUNT, plan)
    ledger.grant(ACCOUNT, 500)
    ledger.charge(ACCOUNT, 40 + 49)
    assert reached(ledger) == []
    ledger.charge(ACCOUNT, 1)
    assert reached(ledger) == [50]
    ledger.charge(ACCOUNT, 600)
    assert [alert.used for alert in ledger.usage_alerts(ACCOUNT)] == [100, 100, 50]


def test_larger_allowance_moves_the_thresholds(ledger: Ledger) -> None:
    ledger.open_period(ACCOUNT, PLAN)
    ledger.charge(ACCOUNT, 60)
    ledger.open_period(ACCOUNT, QuotaPlan("exports", 200, Calendar("month")))
    ledger.charge(ACCOUNT, 60)
    assert reached(ledger) == [50], "50 % are reported once"
    ledger.charge(ACCOUNT, 40)
    newest = ledger.usage_alerts(ACCOUNT)[0]
    assert (newest.percent, newest.used, newest.allowance) == (80, 160, 200)


def test_accounts_without_a_plan_have_no_thresholds(ledger: Ledger) -> None:
    ledger.grant("acme", 100, source="allowance")
    ledger.charge("acme", 100)
    assert ledger.usage_alerts("acme") == []


def test_failed_transaction_records_nothing(ledger: Ledger, config_url: str, clock: FakeClock) -> None:
    ledger.open_period(ACCOUNT, PLAN)
    ledger.usage_alerts(ACCOUNT)
    with pytest.raises(InvalidInput):
        ledger.commit("unknown", 80)
    with pytest.raises(InvalidInput):
        ledger.adjust(ACCOUNT, -101, reason="too much")
    assert reached(ledger) == []


def test_meter_reports_thresholds_while_its_leases_are_open(ledger: Ledger) -> None:
    with QuotaMeter(ledger, wait_s=20) as meter:
        for _ in range(80):
            assert meter.charge(ACCOUNT, 1, plan=PLAN)
        assert meter.flush()
        assert reached(ledger) == [50, 80]


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from(["charge", "lease", "grant", "expire"]), st.integers(1, 40)), max_size=25),
)
def test_allowance_used_is_what_charges_have_taken_from_it(steps: list[tuple[str, int]]) -> None:
    """Against a model that knows only which grants each charge was paid by."""
    state, used, now_us = AccountState(ACCOUNT), 0, 1_790_000_000_000_000
    for draft in PLAN.grants_due(state, now_us):
        state.append(draft, now_us, 1)
    allowance = next(iter(state.grants))
    for number, (step, amount) in enumerate(steps, 2):
        id = f"step-{number}"
        if step == "grant":
            state.append(EntryDraft(id, "grant", amount, priority=amount % 3), now_us, number)
        elif step == "expire":
            now_us += amount * 3_600_000_000
            while (due := state.next_expiry(now_us)) is not None:
                state.append(due, now_us, number)
        elif amount <= state.available and step == "charge":
            entry = state.append(EntryDraft(id, "commit", amount), now_us, number)
            used += dict(json.loads(entry.sources)).get(allowance, 0)
        elif amount <= state.available:
            expires_us = now_us + 10**15
            state.append(EntryDraft(id, "reserve", amount, expires_us=expires_us, is_lease=True), now_us, number)
        leases = {lease: hold.amount // 2 for lease, hold in state.holds.items()}
        in_leases = 0
        for lease, half in leases.items():
            rest = half
            for grant, size in state.holds[lease].sources:
                in_leases += min(size, rest) * (grant == allowance)
                rest -= min(size, rest)
        assert state.allowance_used({}) == used
        assert state.allowance_used(leases) == used + in_leases <= state.allowance_taken() <= 100


# ------------------------------------------------------------------ thresholds


def test_thresholds_are_those_of_the_database(ledger: Ledger, config_url: str, clock: FakeClock) -> None:
    assert ledger.usage_thresholds() == (50, 80, 100)
    with closing(Ledger(config_url, clock=clock)) as admin:
        admin.set_usage_thresholds([90, 25])
    ledger.open_period(ACCOUNT, PLAN)
    ledger.charge(ACCOUNT, 90)
    assert reached(ledger) == [25, 90]
    ledger.set_usage_thresholds([50, 80, 100])
    ledger.charge(ACCOUNT, 1)
    assert reached(ledger) == [25, 50, 80, 90]


@pytest.mark.parametrize("percents", [[], [0], [101], [-5], [True], ["50"], [50.0], range(1, 30)])
def test_invalid_thresholds_are_refused(ledger: Ledger, percents: list[int]) -> None:
    with pytest.raises(InvalidInput, match="threshold"):
        ledger.set_usage_thresholds(percents)
    assert ledger.usage_thresholds() == (50, 80, 100)


# ------------------------------------------------------------------ webhooks


def test_alert_is_sent_once_signed_with_its_content(
    ledger: Ledger, clock: FakeClock, receiver: WebhookReceiver
) -> None:
    ledger.open_period(ACCOUNT, PLAN)
    ledger.charge(ACCOUNT, 55)
    webhook = Webhook(receiver.url, SECRET)
    receiver.answers = [(503, {})]
    assert webhook.deliver(USAGE_QUEUE, ledger.engine, clock) == 0
    assert ledger.usage_alerts(ACCOUNT)[0].error == "HTTP status 503"
    clock.advance(10)
    assert webhook.deliver(USAGE_QUEUE, ledger.engine, clock) == 1
    assert webhook.deliver(USAGE_QUEUE, ledger.engine, clock) == 0
    assert len(receiver.calls) == 2
    call = receiver.calls[1]
    assert verify(call.body, call.headers["headgate-signature"], SECRET, now=clock.now_us() / 1e6)
    (alert,) = ledger.usage_alerts(ACCOUNT)
    assert (alert.delivered_us, alert.error) == (clock.now_us(), None)
    assert json.loads(call.body) == {
        "type": "quota-usage",
        "id": alert.id,
        "at": datetime.fromtimestamp(alert.at_us / 1e6, UTC).isoformat(),
        "usage": {
            "account": "exports/acme",
            "percent": 50,
            "period_end_us": 1_790_812_800_000_000,
            "used": 55,
            "allowance": 100,
            "text": "exports/acme has used 55 of 100 units, 50 % of the allowance of the period that ends at "
            "2026-10-01 00:00 UTC.",
        },
    }


def test_notifier_sends_in_the_background_until_it_is_stopped(
    ledger: Ledger, receiver: WebhookReceiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(webhooks, "CHECK_INTERVAL_S", 0.01)
    ledger.open_period(ACCOUNT, PLAN)
    with closing(UsageNotifier(ledger, Webhook(receiver.url, SECRET)).start()):
        ledger.charge(ACCOUNT, 80)
        wait_until(lambda: len(receiver.calls) == 2, "both alerts are sent")
    assert {json.loads(call.body)["usage"]["percent"] for call in receiver.calls} == {50, 80}
