"""The bounds of a policy's limits: how far over a limit all nodes together may go, by the modes that apply to it."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING

from headgate.bounds import policy_bounds

if TYPE_CHECKING:
    from headgate.bounds import Bound
    from headgate.limits import Limit
    from headgate.policy.model import Policy, Rule

__all__ = ["largest_bound", "rule_bounds"]


def rule_bounds(policy: Policy, rule: Rule, limit: Limit, *, fails_local: bool, nodes: int) -> tuple[Bound, ...]:
    """The bounds of one limit of a rule; `fails_local` is the failure mode of the route."""
    lease_us = 0 if rule.lease == "never" else policy.store.lease // timedelta(microseconds=1)
    return policy_bounds(limit, lease_us=lease_us, fails_local=fails_local, share=policy.store.share, nodes=nodes)


def largest_bound(policy: Policy, rule: Rule, nodes: int) -> int:
    """The most tokens beyond any of the rule's limits, on any route: 0 if the store is asked for each request.

    >>> from headgate.policy import read
    >>> policy = read("on_failure: local\\nlimits: [{name: api, by: ip, bucket: 1000/second}]")
    >>> largest_bound(policy, policy.rules[0], nodes=4)
    500
    """
    modes = {policy.on_failure, rule.on_failure, *[route.on_failure for route in policy.routes]}
    return max(
        [
            sum(bound.over for bound in rule_bounds(policy, rule, limit, fails_local="local" in modes, nodes=nodes))
            for limit in rule.limits
        ],
        default=0,
    )
