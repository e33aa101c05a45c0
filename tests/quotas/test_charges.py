"""Charged requests: all of them in the order of their times, each with the sources that the ledger has charged."""

from __future__ import annotations

import json
from collections import Counter
from datetime import UTC
from typing import TYPE_CHECKING

from headgate import Calendar
from headgate.quotas import Ledger, QuotaMeter, QuotaPlan, UsageRecord, charges
from headgate.quotas.charges import explain_charges

if TYPE_CHECKING:
    import pytest

    from headgate.testing import FakeClock

EVER = (0, 2**52)


def paid(ledger: Ledger, account: str) -> dict[str, tuple[tuple[str, int], ...]]:
    return {request.id: request.paid_by for request in ledger.charged_requests(account, *EVER)}


def test_each_request_names_the_sources_that_have_paid_for_it(ledger: Ledger, clock: FakeClock) -> None:
    ledger.grant("acme", 10, id="a", source="allowance", priority=1)
    ledger.grant("acme", 10, id="b", source="credit pack", priority=2)
    ledger.charge("acme", 4, id="single", reference="GET /a")
    clock.advance(1)
    assert ledger.lease("acme", 10, id="lease") is not None
    records = [UsageRecord(f"r{at}", "acme", "lease", 3, clock.now_us() + at, f"GET /{at}") for at in range(3)]
    ledger.record_usage(records[:2])
    expected = {"single": (("allowance", 4),), "r0": (("allowance", 3),), "r1": (("allowance", 3),)}
    assert paid(ledger, "acme") == expected, "of an open lease, by what it holds"
    ledger.record_usage(records[2:])
    ledger.close_lease("lease")
    clock.advance(1)
    ledger.reserve("acme", 7, id="large")
    ledger.commit("large", 12)
    requests = [*ledger.charged_requests("acme", *EVER)]
    assert [request.id for request in requests] == ["single", "r0", "r1", "r2", "large"]
    assert paid(ledger, "acme") == expected | {
        "r2": (("credit pack", 3),),
        "large": (("credit pack", 7), ("not covered", 5)),
    }
    assert [request.reference for request in requests[:2]] == ["GET /a", "GET /0"]
    entries = {entry.number: entry for entry in ledger.entries("acme")}
    assert [entries[request.entry].subject for request in requests] == ["", "lease", "lease", "lease", "large"]


def test_request_over_two_sources_names_both_in_their_order(ledger: Ledger, clock: FakeClock) -> None:
    for at, (source, amount) in enumerate([("allowance", 3), ("credit pack", 3), ("allowance", 3)]):
        ledger.grant("acme", amount, source=source, priority=at)
    ledger.lease("acme", 9, id="lease")
    ledger.record_usage([UsageRecord(f"r{at}", "acme", "lease", 2, clock.now_us()) for at in range(4)])
    ledger.close_lease("lease")
    assert list(paid(ledger, "acme").values()) == [
        (("allowance", 2),),
        (("allowance", 1), ("credit pack", 1)),
        (("credit pack", 2),),
        (("allowance", 2),),
    ]


def test_all_pages_are_read_and_agree_with_the_ledger(ledger: Ledger, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(charges, "PAGE", 7)
    plan = QuotaPlan("exports", 60, Calendar("month"), pay_as_you_go=15)
    with QuotaMeter(ledger, wait_s=20) as meter:
        for at in range(40):
            if at % 5 == 0:
                ledger.charge("exports/acme", 1, id=f"single-{at}")
            assert meter.charge("exports/acme", 1 + at % 2, id=f"leased-{at}", plan=plan)
    requests = [*ledger.charged_requests("exports/acme", *EVER)]
    assert len({request.id for request in requests}) == len(requests) == 40 + 7, "no balance before the first lease"
    assert [request.at_us for request in requests] == sorted(request.at_us for request in requests)
    total: Counter[str] = Counter()
    for request in requests:
        assert sum(amount for _, amount in request.paid_by) == request.amount
        total.update(dict(request.paid_by))
    assert total == {"allowance": 60, "pay as you go": 7}
    assert ledger.summary("exports/acme").charged == 67


def test_period_and_account_are_respected(ledger: Ledger, clock: FakeClock) -> None:
    for account in ("acme", "globex"):
        ledger.grant(account, 10)
    start_us = clock.now_us()
    for at in range(3):
        ledger.charge("acme", 1, id=f"acme-{at}")
        ledger.charge("globex", 1, id=f"globex-{at}")
        clock.advance(1)
    found = [request.id for request in ledger.charged_requests("acme", start_us + 1_000_000, start_us + 2_000_000)]
    assert found == ["acme-1"]


def test_request_without_a_lease_is_not_settled_until_it_is(ledger: Ledger, clock: FakeClock) -> None:
    ledger.grant("acme", 3, source="credit pack")
    record = UsageRecord("r", "acme", "outage-1", 5, clock.now_us())
    ledger.exchange(outages={"outage-1": [record]})
    assert paid(ledger, "acme") == {"r": (("credit pack", 3), ("not covered", 2))}


def test_report_says_what_was_charged_and_when_nothing_was_left(ledger: Ledger, clock: FakeClock) -> None:
    plan = QuotaPlan("exports", 10, Calendar("month"))
    ledger.open_period("exports/acme", plan)
    ledger.grant("exports/other", 1)
    for at in range(4):
        ledger.charge("exports/acme", 3 if at < 3 else 1, id=f"r{at}", reference=f"GET /{at}")
        clock.advance(60)
    ledger.grant("exports/acme", 5, source="credit pack")
    clock.advance(60)
    ledger.charge("exports/acme", 5, id="r4")
    start_us = clock.now_us() - 300 * 1_000_000
    (report,) = explain_charges(ledger, ["acme"], start_us, start_us + 600 * 1_000_000)
    assert report == explain_charges(ledger, ["exports/acme"], start_us, start_us + 600 * 1_000_000)[0]
    assert report.paid_by == (("allowance", 10), ("credit pack", 5))
    assert report.paragraphs(UTC) == [
        "Account exports/acme: 5 requests charged with 15 units, paid by allowance 10, credit pack 5.",
        "Nothing was left from 2026-09-21 14:16:20 UTC, until 2026-09-21 14:17:20 UTC.",
        "Nothing was left from 2026-09-21 14:18:20 UTC, it still is.",
        "\n".join(
            [
                "Charged requests:",
                "  2026-09-21 14:13:20  r0  3  allowance  GET /0",
                "  2026-09-21 14:14:20  r1  3  allowance  GET /1",
                "  2026-09-21 14:15:20  r2  3  allowance  GET /2",
                "  2026-09-21 14:16:20  r3  1  allowance  GET /3",
                "  2026-09-21 14:18:20  r4  5  credit pack",
            ]
        ),
    ]
    assert json.loads(json.dumps(report.as_dict()))["requests"] == 5
    assert explain_charges(ledger, ["cme", "%"], *EVER) == []


def test_long_report_is_cut(ledger: Ledger, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(charges, "MAX_EXPLAINED", 25)
    ledger.grant("acme", 100)
    ledger.lease("acme", 100, id="lease")
    ledger.record_usage([UsageRecord(f"r{at}", "acme", "lease", 1, at) for at in range(30)])
    (report,) = explain_charges(ledger, ["acme"], *EVER)
    assert (report.requests, len(report.last), report.is_cut) == (25, 20, True)
    assert report.paragraphs(UTC)[0].startswith("Account acme: at least 25 requests charged with 25 units")
