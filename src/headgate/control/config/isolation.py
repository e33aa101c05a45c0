"""Separate counters for the limits that a candidate changes, so that a canary does not affect the other nodes.

A bucket that two versions of a limit charge in turn is converted at each turn, and a conversion to a smaller capacity
forgets what was used beyond it: the nodes with the larger one would then admit without end. So the candidate counts
such a limit under another name, "search (canary)", and also a window of another length. Windows of the same length and
leases keep their counts in a conversion, and are shared, as are all limits that the candidate does not change.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Collection

    from headgate.limits import Limit
    from headgate.policy.model import Policy, Rule

__all__ = ["changed_counters", "isolate"]

SUFFIX: Final = " (canary)"
MAX_NAME_LENGTH: Final = 100
BUCKETS: Final = frozenset({"token_bucket", "gcra", "leaky_bucket"})


def changed_counters(stable: Policy, candidate: Policy) -> frozenset[str]:
    """The names of limits that have different numbers for some client, and whose counters cannot be shared."""
    others = {rule.name: rule for rule in stable.rules}
    # Another tier of a client changes its numbers on all limits with tiers.
    has_same_tiers = stable.default_tier == candidate.default_tier and stable.clients == candidate.clients

    def is_changed(rule: Rule, other: Rule) -> bool:
        if _can_share((*rule.limits, *other.limits)):
            return False
        has_same_overrides = _overrides(stable, rule.name) == _overrides(candidate, rule.name)
        return not (_same_numbers(rule, other) and has_same_overrides and (has_same_tiers or not rule.tiers))

    return frozenset(
        [rule.name for rule in candidate.rules if rule.name in others and is_changed(rule, others[rule.name])]
    )


def isolate(policy: Policy, names: Collection[str]) -> Policy:
    """The policy with other counters for the limits of these names."""
    if not names:
        return policy
    renamed: dict[Limit, Limit] = {}  # a hundred thousand overrides have a handful of different limits

    def rename(limit: Limit) -> Limit:
        if limit not in renamed:
            renamed[limit] = replace(limit, name=limit.name[: MAX_NAME_LENGTH - len(SUFFIX)] + SUFFIX)
        return renamed[limit]

    rules = [
        replace(
            rule,
            limit=None if rule.limit is None else rename(rule.limit),
            tiers={tier: rename(limit) for tier, limit in rule.tiers.items()},
        )
        if rule.name in names
        else rule
        for rule in policy.rules
    ]
    overrides = [replace(each, limit=rename(each.limit)) if each.rule in names else each for each in policy.overrides]
    return replace(policy, rules=tuple(rules), overrides=tuple(overrides))


def _can_share(limits: Collection[Limit]) -> bool:
    """True if counters keep their meaning when these limits charge them in turn."""
    if all(limit.algorithm == "concurrency" for limit in limits):
        return True
    return len({limit.period for limit in limits}) == 1 and not any(limit.algorithm in BUCKETS for limit in limits)


def _same_numbers(rule: Rule, other: Rule) -> bool:
    return (rule.limit, dict(rule.tiers), rule.by) == (other.limit, dict(other.tiers), other.by)


def _overrides(policy: Policy, name: str) -> list[object]:
    return [each for each in policy.overrides if each.rule == name]
