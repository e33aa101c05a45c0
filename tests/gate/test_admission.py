"""Admission through a gate: which requests pass and what they are charged."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING

import pytest

from headgate import Limit
from headgate.errors import InvalidCost
from headgate.policy.loader import read
from headgate.policy.model import Identity, Override
from support.sites import item_request, policy_json, remaining_quota

if TYPE_CHECKING:
    from headgate.testing import FakeClock
    from support.servers import RedisServer
    from support.sites import MakeSite


def test_denied_requests_do_not_use_up_the_longer_limit(make_item_site: MakeSite) -> None:
    """P2: two of a short limit, a hundred of a long one, six requests of which four are rejected: 98 are left."""
    limits = [{"name": name, "by": "ip", "bucket": name} for name in ("2/second", "100/day")]
    site = make_item_site(policy_json(*limits))
    answers = [site.ask("/items/1") for _ in range(6)]
    assert [answer.status for answer in answers] == [200, 200, 429, 429, 429, 429]
    assert remaining_quota(answers[-1]) == [0, 98]
    assert json.loads(answers[-1].body)["violated-policies"] == ["2/second"]


def test_denied_cost_is_not_charged(make_item_site: MakeSite) -> None:
    """P3, rows 11 and 33: ten in a window, costs of 8, 5 and 1: the 1 passes, also right after the denial."""
    routes = [{"path": path, "cost": cost} for path, cost in (("/items/8", 8), ("/items/5", 5), ("/items/1", 1))]
    site = make_item_site(policy_json({"by": "ip", "bucket": "10/minute", "algorithm": "fixed_window"}, routes=routes))
    assert site.statuses(
        item_request(8), item_request(5), item_request(5), item_request(1), item_request(1), item_request(1)
    ) == [200, 429, 429, 200, 200, 429]


def test_layered_limits_charge_all_or_nothing(make_item_site: MakeSite) -> None:
    """Row 12: 10 by address, 5 by user, 3 by key. A fourth request is denied by the key, and takes nothing."""
    kinds = {"ip": 10, "user": 5, "api_key": 3}
    site = make_item_site(
        policy_json(*[{"name": kind, "by": kind, "bucket": f"{quota}/hour"} for kind, quota in kinds.items()]),
        identities={"user": lambda request: "ada"},
    )
    answers = [site.ask("/items/1", headers=[("x-api-key", "k")]) for _ in range(5)]
    assert [(answer.status, remaining_quota(answer)) for answer in answers[2:]] == [(200, [7, 2, 0])] + [
        (429, [7, 2, 0])
    ] * 2
    assert remaining_quota(site.ask("/items/1", headers=[("x-api-key", "another")])) == [6, 1, 2]


def test_concurrent_requests_pass_a_limit_of_one_once(
    make_item_site: MakeSite, redis7: RedisServer, unique: str
) -> None:
    """Row 13: 1000 by address and 1 by user, in one step on the server: 1 passes, and 1 of the 1000 is used."""
    site = make_item_site(
        policy_json(
            {"name": "ip", "by": "ip", "bucket": "1000/day"}, {"name": "user", "by": "user", "bucket": "1/day"}
        ),
        redis7.url,
        identities={"user": lambda request: "ada"},
        namespace=unique,
        budget=5.0,
    )
    answers = site.ask_all([item_request()] * 100)
    assert [answer.status for answer in answers].count(200) == 1
    assert {tuple(remaining_quota(answer)) for answer in answers} == {(999, 0)}


def test_concurrent_requests_pass_exactly_the_limit(make_item_site: MakeSite, redis7: RedisServer, unique: str) -> None:
    """Row 46 and P18: `if n > 100: 429; n += 1` lets 101 pass, and what is read and written apart even more."""
    site = make_item_site(policy_json({"by": "ip", "bucket": "100/day"}), redis7.url, namespace=unique, budget=5.0)
    got = [answer.status for answer in site.ask_all([item_request()] * 150)]
    assert (got.count(200), got.count(429)) == (100, 50)


def test_token_bucket_admits_burst_plus_refill(make_item_site: MakeSite, clock: FakeClock) -> None:
    """Row 47: 1000 a minute with a burst of 200 lets 1200 pass in the first 60 seconds, and says 1000."""
    site = make_item_site(policy_json({"by": "ip", "bucket": "1000/minute, burst 200"}))
    passed = site.statuses(*[item_request()] * 201).count(200)
    for _ in range(60):
        clock.advance(1)
        passed += site.statuses(*[item_request()] * 18).count(200)
    assert passed == 1200
    assert site.ask("/items/1").fields["x-ratelimit-limit"] == "1000"


def test_cost_above_capacity_is_denied_without_retry_after(make_item_site: MakeSite) -> None:
    """Row 7: a wait of 50 minutes was told for what never passes. Nothing is consumed, and there is no Retry-After."""
    text = policy_json({"name": "a", "by": "user", "bucket": "100/hour"}, routes=[{"path": "/items/6", "cost": 6}])
    bob = Override(Identity("user", "bob"), "a", Limit(5, timedelta(hours=1), name="a"))  # a file is checked for it
    site = make_item_site(
        replace(read(text), overrides=(bob,)), identities={"user": lambda request: request.header("x-user")[0]}
    )
    refused, allowed = (site.ask(f"/items/{number}", headers=[("x-user", "bob")]) for number in (6, 1))
    assert (refused.status, allowed.status) == (429, 200)
    assert "retry-after" not in refused.fields
    assert json.loads(refused.body)["retry_after_seconds"] is None
    assert (remaining_quota(refused), remaining_quota(allowed)) == ([5], [4])
    assert site.ask("/items/6", headers=[("x-user", "ada")]).status == 200


def test_zero_cost_passes_an_exhausted_limit(make_item_site: MakeSite) -> None:
    """Row 8: and takes nothing from it."""
    site = make_item_site(policy_json({"by": "ip", "bucket": "1/hour"}, routes=[{"path": "/items/0", "cost": 0}]))
    assert site.statuses(item_request(0), item_request(1), item_request(0), item_request(1), item_request(0)) == [
        200,
        200,
        200,
        429,
        200,
    ]
    assert "ratelimit" not in site.ask("/items/0").fields


def test_negative_cost_from_the_app_is_rejected(make_item_site: MakeSite) -> None:
    """Row 9 and P13: a negative cost is the app's mistake, and no gift. What was reserved stays charged."""
    site = make_item_site(policy_json({"path": "/ask", "by": "ip", "bucket": "10/hour", "reserve": 4}))
    if site.kind == "asgi":
        with pytest.raises(InvalidCost, match="cost -5 is not a whole number >= 0"):
            site.ask("/ask", query="cost=-5")
    else:
        assert site.ask("/ask", query="cost=-5").status == 500
    assert remaining_quota(site.ask("/ask", query="cost=0")) == [2]
    assert remaining_quota(site.ask("/ask", query="cost=0")) == [2]  # the 0 before was settled: 6 - 4


def test_denied_request_never_reaches_the_app(make_item_site: MakeSite, shown_items: list[str]) -> None:
    """P11: the call was made all the same, and its result thrown away."""
    site = make_item_site(policy_json({"by": "ip", "bucket": "2/minute"}))
    site.statuses(*[item_request(number) for number in range(5)])
    assert shown_items == ["0", "1"]
