"""Limits of a candidate that are counted apart from those of the other nodes."""

from __future__ import annotations

import pytest

from headgate.control.config.isolation import MAX_NAME_LENGTH, changed_counters, isolate
from headgate.policy import read

SEARCH = """\
limits:
  - {name: search, by: tenant, bucket: 10/minute, tiers: {pro: 20/minute}}
  - {name: all, by: ip, bucket: 9/minute}
"""
OVERRIDES = """\
overrides:
  - {tenant: acme, limit: search, bucket: 5/minute}
  - {ip: 203.0.113.9, limit: all, bucket: 1/day}
"""


@pytest.mark.parametrize(
    ("candidate", "names"),
    [
        (SEARCH, set()),
        (SEARCH + "routes: [{path: /search, cost: 5}]\n", set()),
        (SEARCH.replace("10/minute", "11/minute"), {"search"}),
        (SEARCH.replace("20/minute", "21/minute"), {"search"}),
        (SEARCH.replace("9/minute", "8/minute"), {"all"}),
        (SEARCH.replace("by: tenant", "by: user"), {"search"}),
        (SEARCH + "clients: [{tenant: acme, tier: pro}]\n", {"search"}),
        (SEARCH + "tier: pro\n", {"search"}),
        (SEARCH + "overrides: [{tenant: acme, limit: search, bucket: 5/minute}]\n", {"search"}),
        (SEARCH.replace("name: search", "name: find"), set()),
    ],
)
def test_buckets_with_other_numbers_are_counted_apart(candidate: str, names: set[str]) -> None:
    assert changed_counters(read(SEARCH), read(candidate)) == names


@pytest.mark.parametrize(
    ("candidate", "names"),
    [
        ("6/day, fixed_window", set()),
        ("6/hour, fixed_window", {"all"}),
        ("5/day, token_bucket", {"all"}),
    ],
)
def test_windows_of_the_same_length_are_shared(candidate: str, names: set[str]) -> None:
    texts = [f"limits: [{{name: all, by: ip, bucket: '{bucket}'}}]" for bucket in ("5/day, fixed_window", candidate)]
    assert changed_counters(*map(read, texts)) == names


def test_isolated_limits_have_other_counters_and_the_rest_stays() -> None:
    policy = read(SEARCH + OVERRIDES)
    found = isolate(policy, {"search"})
    assert [rule.name for rule in found.rules] == ["search", "all"]
    assert {limit.name for limit in found.rules[0].limits} == {"search (canary)"}
    assert [limit.quota for limit in found.rules[0].limits] == [10, 20]
    assert [each.limit.name for each in found.overrides] == ["search (canary)", "all"]
    assert found.rules[1] is policy.rules[1]
    assert isolate(policy, ()) is policy


def test_longest_name_still_has_another_one() -> None:
    name = "n" * MAX_NAME_LENGTH
    policy = read(f"limits: [{{name: {name}, by: ip, bucket: 5/day}}]")
    limit = isolate(policy, {name}).rules[0].limit
    assert limit is not None
    assert limit.name != name
    assert len(limit.name) == MAX_NAME_LENGTH
