"""Quotas in policies: their numbers by limit, tier, override and client, and mistakes in them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from headgate import Calendar, InvalidPolicy, Limit
from headgate.limits import QuotaLimit
from headgate.policy import read
from headgate.policy.snapshot import Snapshot

NOW_US = 1_791_200_000_000_000

BASE = {"allowance": 1000, "per": "month", "starts": 15, "timezone": "Europe/Berlin", "rollover": 200}


def policy(*limits: dict[str, Any], **sections: Any) -> Any:
    return read(json.dumps({"limits": [*limits], **sections}), format="json")


def limit_of(policy: Any, **who: str) -> Limit:
    """The numbers of the only limit, for a client."""
    snapshot = Snapshot(policy)
    who = {"address": "203.0.113.9", "ip": "203.0.113.9", **who}
    (key,) = snapshot.resolve(snapshot.route("GET", "/"), who, NOW_US).keys
    return key.limit


def quota(allowance: int, period: Calendar, **more: int) -> QuotaLimit:
    return QuotaLimit(allowance, period, name="exports", **more)


BERLIN_15 = Calendar("month", starts=15, timezone="Europe/Berlin")


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        ("1000/month", quota(1000, Calendar("month"))),
        ("50/week", quota(50, Calendar("week"))),
        ("5/day", quota(5, Calendar("day"))),
        ("10/year, starts 04-01", quota(10, Calendar("year", starts="04-01"))),
        ("1000/month, starts 15, timezone Europe/Berlin", quota(1000, BERLIN_15)),
        (BASE, quota(1000, BERLIN_15, rollover=200)),
        ({"quota": 7, "period": "day"}, quota(7, Calendar("day"))),
        ({"allowance": 7, "per": "week", "pay_as_you_go": 3}, quota(7, Calendar("week"), pay_as_you_go=3)),
    ],
    ids=str,
)
def test_numbers_of_a_quota(written: Any, expected: QuotaLimit) -> None:
    assert limit_of(policy({"name": "exports", "by": "tenant", "quota": written}), tenant="acme") == expected


@pytest.mark.parametrize(
    ("tier", "expected"),
    [
        ({"allowance": 5}, quota(5, BERLIN_15, rollover=200)),
        ({"rollover": 0, "pay_as_you_go": 9}, quota(1000, BERLIN_15, pay_as_you_go=9)),
        ({"timezone": "Asia/Tokyo"}, quota(1000, Calendar("month", starts=15, timezone="Asia/Tokyo"), rollover=200)),
        ({"timezone": "UTC", "starts": 1}, quota(1000, Calendar("month"), rollover=200)),
        ("5/month", quota(5, BERLIN_15, rollover=200)),
        ("5/month, starts 2", quota(5, Calendar("month", starts=2, timezone="Europe/Berlin"), rollover=200)),
        ("5/day", quota(5, Calendar("day", timezone="Europe/Berlin"), rollover=200)),
        ({"allowance": 5, "per": "week"}, quota(5, Calendar("week", timezone="Europe/Berlin"), rollover=200)),
    ],
    ids=str,
)
@pytest.mark.parametrize("written_in", ["limit", "tiers", "override"])
def test_tiers_and_overrides_change_what_they_name(written_in: str, tier: Any, expected: QuotaLimit) -> None:
    limit: dict[str, Any] = {"name": "exports", "by": "tenant", "quota": BASE}
    sections: dict[str, Any] = {"clients": [{"tenant": "acme", "tier": "pro"}]}
    if written_in == "limit":
        limit["tiers"] = {"pro": tier}
    elif written_in == "tiers":
        sections["tiers"] = {"pro": {"limits": {"exports": tier}}}
    else:
        sections = {"overrides": [{"tenant": "acme", "limit": "exports", "quota": tier}]}
    made = policy(limit, **sections)
    assert limit_of(made, tenant="acme") == expected
    assert limit_of(made, tenant="globex") == quota(1000, BERLIN_15, rollover=200)


def test_quota_only_for_tiers() -> None:
    made = policy({"name": "exports", "by": "tenant", "quota": {"per": "month"}, "tiers": {"pro": {"allowance": 5}}})
    assert made.rules[0].limit is None
    assert made.rules[0].tiers == {"pro": quota(5, Calendar("month"))}


@pytest.mark.parametrize(
    ("limit", "client", "expected"),
    [
        ("9/month", {"timezone": "Asia/Tokyo"}, Calendar("month", timezone="Asia/Tokyo")),
        ("9/month, starts 3", {"timezone": "Asia/Tokyo"}, Calendar("month", starts=3, timezone="Asia/Tokyo")),
        ("9/month", {"starts": 31}, Calendar("month", starts=31)),
        ("9/week", {"starts": 5, "timezone": "Asia/Tokyo"}, Calendar("week", timezone="Asia/Tokyo")),
        ("9/year", {"starts": 5}, Calendar("year")),
        ("9/year", {"starts": "04-01"}, Calendar("year", starts="04-01")),
        ("9/month", {"starts": "04-01"}, Calendar("month")),
        ("9/day, timezone UTC", {"timezone": "Asia/Tokyo"}, Calendar("day", timezone="Asia/Tokyo")),
    ],
    ids=str,
)
@pytest.mark.parametrize("kind", ["quota", "bucket"])
@pytest.mark.parametrize("tier", [None, "pro"])
def test_calendar_of_the_client(kind: str, tier: str | None, limit: str, client: Any, expected: Calendar) -> None:
    entry: dict[str, Any] = {"name": "exports", "by": "tenant", kind: limit}
    if tier is not None:
        entry["tiers"] = {tier: limit}
        client = {**client, "tier": tier}
    made = policy(entry, clients=[{"tenant": "acme", **client}])
    assert limit_of(made, tenant="acme").period == expected
    assert limit_of(made, tenant="globex").period == Limit.parse(limit).period


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("5/month", Calendar("month", starts=15, timezone="Asia/Tokyo")),
        ("5/month, starts 2", Calendar("month", starts=2, timezone="Asia/Tokyo")),
        ({"allowance": 5, "timezone": "UTC"}, Calendar("month", starts=15)),
    ],
    ids=str,
)
def test_override_that_names_a_calendar_takes_precedence_over_the_client(override: Any, expected: Calendar) -> None:
    made = policy(
        {"name": "exports", "by": "tenant", "quota": "9/month"},
        clients=[{"tenant": "acme", "starts": 15, "timezone": "Asia/Tokyo"}],
        overrides=[{"tenant": "acme", "limit": "exports", "quota": override}],
    )
    assert limit_of(made, tenant="acme").period == expected


def test_calendar_of_a_client_applies_only_to_what_counts_it() -> None:
    clients = [{"user": "ada", "timezone": "Asia/Tokyo"}, {"tenant": "acme", "timezone": "Europe/Berlin"}]
    by_address = policy({"name": "exports", "by": "ip", "quota": "9/month"}, clients=clients)
    assert limit_of(by_address, user="ada", tenant="acme").period == Calendar("month")
    by_client = policy({"name": "exports", "quota": "9/month"}, clients=clients)
    assert limit_of(by_client, user="ada").period == Calendar("month", timezone="Asia/Tokyo")
    assert limit_of(by_client, user="ada", tenant="acme").period == Calendar("month", timezone="Europe/Berlin")
    assert limit_of(by_client, user="ada", tenant="globex").period == Calendar("month")


def test_quotas_come_after_limits_and_safety_nets() -> None:
    made = policy({"name": "exports", "by": "api_key", "quota": "9/month"}, {"by": "api_key", "bucket": "5/minute"})
    snapshot = Snapshot(made)
    who = {"address": "203.0.113.9", "ip": "203.0.113.9", "api_key": "invented"}
    resolution = snapshot.resolve(snapshot.route("GET", "/"), who, NOW_US)
    kinds = [type(key.limit) for key in resolution.keys]
    assert kinds == [Limit, Limit, Limit, QuotaLimit], "the nets of both, which the store counts, and the quota"
    assert [rule.rule.is_quota for rule in resolution.rules] == [False, False, False, True]
    assert [each.key for each in resolution.applied_limits] == [*resolution.keys]


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"bucket": "1/minute"}, "a limit is counted in the store or charged to the ledger; keep one"),
        ({"shadow": True}, "a quota in shadow mode would charge nothing"),
        ({"algorithm": "gcra"}, "a quota has no algorithm"),
        ({"split": 2}, "a quota is charged to one account"),
        ({"region": "central"}, "a quota is charged to the same account in every region"),
        ({"lease": "never"}, "a quota is always spent in leases"),
        ({"on_failure": "closed"}, "which does not count quotas; write on_ledger_failure"),
        ({"quota": "1000/hour"}, "a quota is per calendar period (day, week, month, year), not per 1:00:00"),
        ({"quota": "1000/minute, burst 5"}, "burst 5 means nothing to a quota"),
        ({"quota": "1000/day, gcra"}, "algorithm gcra means nothing to a quota"),
        ({"quota": {"allowance": 5}}, "the quota has no period"),
        ({"quota": {"per": "month"}}, "a quota without an allowance"),
        ({"quota": {"allowance": 5, "per": "5 minutes", "rollover": 1}}, "a calendar day, week, month or year"),
        ({"quota": {"allowance": 5, "per": "month", "starts": 32}}, "starts 32 is not a day of a month"),
        ({"quota": {"allowance": 5, "per": "month", "rollover": -1}}, "rollover: -1 is out of bounds"),
        ({"quota": {"allowance": 0, "per": "month"}}, "0 is out of bounds"),
        ({"tiers": {"pro": "5/minute"}}, "a quota is per calendar period"),
        ({"on_ledger_failure": "closed"}, "unknown word 'closed'"),
        ({"on_ledger_failure": {"continue_up_to": -1}}, "-1 is out of bounds"),
        ({"name": "a/b"}, "the name of a quota is the first part of its accounts"),
        ({"name": "x" * 81}, "at most 80"),
    ],
    ids=str,
)
def test_mistakes_in_a_quota(changes: dict[str, Any], problem: str) -> None:
    with pytest.raises(InvalidPolicy) as raised:
        policy({"name": "exports", "by": "tenant", "quota": "1000/month", **changes})
    assert problem in str(raised.value)


@pytest.mark.parametrize(
    ("limit", "problem"),
    [
        (
            {"bucket": {"quota": 5, "period": "month", "rollover": 5}},
            "rollover and pay_as_you_go are numbers of a quota",
        ),
        ({"bucket": {"starts": 5}}, "numbers need bucket_size and refill_rate"),
        ({"bucket": "5/minute", "on_ledger_failure": "lease"}, "only a quota is charged to the ledger"),
        (
            {"bucket": "5/minute", "tiers": {"pro": {"rollover": 5}}},
            "rollover and pay_as_you_go are numbers of a quota",
        ),
    ],
    ids=str,
)
def test_numbers_of_quotas_in_other_limits(limit: dict[str, Any], problem: str) -> None:
    with pytest.raises(InvalidPolicy, match=problem):
        policy({"by": "ip", **limit})


@pytest.mark.parametrize(
    ("section", "problem"),
    [
        ({"ledger": "mysql://host/name"}, "the text is not the URL of a ledger"),
        ({"ledger": "postgresql://user:${hunter 2}@host/name"}, "the text is not the URL of a ledger"),
        ({"budget": "2 minutes"}, "out of bounds"),
        ({"idempotency_header": "no header"}, "cannot name a header"),
    ],
    ids=str,
)
def test_mistakes_in_the_settings(section: dict[str, Any], problem: str) -> None:
    with pytest.raises(InvalidPolicy) as raised:
        policy({"by": "ip", "bucket": "5/minute"}, quotas=section)
    assert problem in str(raised.value)
    assert "hunter" not in str(raised.value)


@pytest.mark.parametrize("starts", [0, 32, "13-01", "soon"])
def test_mistakes_in_the_first_day_of_a_client(starts: object) -> None:
    with pytest.raises(InvalidPolicy, match="neither a day of a month nor of a year"):
        policy({"by": "tenant", "quota": "5/month"}, clients=[{"tenant": "acme", "starts": starts}])
