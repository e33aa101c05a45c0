"""Guardrails: the risks of a change that is probably a mistake, and the check that each was confirmed.

A risk is a limit of more than ten times or less than a tenth of the current one, a block of a wide network, or a policy
that loses a limit.
"""

from __future__ import annotations

from fractions import Fraction
from typing import TYPE_CHECKING, Any, Final, Literal

from headgate.control.config.rows import BlockRow, OverrideRow, format_bucket
from headgate.control.service.client_lookup import network_of
from headgate.control.service.effective_policy import format_limit
from headgate.control.service.errors import NeedsConfirmation, Risk
from headgate.control.service.models import ClientRef
from headgate.errors import InvalidInput

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator
    from ipaddress import IPv4Network, IPv6Network

    from headgate.control.config.history import Difference
    from headgate.limits import Limit
    from headgate.policy.model import Override, Policy, RouteRule, Rule

__all__ = [
    "MAX_RISKS", "block_risks", "gradual_limit_risks", "gradual_policy_risks", "limit_risks", "policy_risks",
    "require_confirmation", "row_risks",
]  # fmt: skip

FACTOR: Final = 10
WIDEST_PREFIX: Final = {4: 24, 6: 48}
"""The widest network that can be blocked without confirmation, by IP version."""
MAX_RISKS: Final = 20
"""Risks that are reported at once."""

Code = Literal["ten-times", "tenth"]


def require_confirmation(risks: Iterable[Risk], confirmed: Collection[str]) -> None:
    """Raise NeedsConfirmation unless the codes of all risks are confirmed."""
    found = list(dict.fromkeys(risks))
    if {risk.code for risk in found} - {*confirmed}:
        first = {risk.code: risk for risk in reversed(found)}
        others = [risk for risk in found[:MAX_RISKS] if risk is not first[risk.code]]
        # At least one of each code: an actor cannot confirm a risk that was not reported.
        raise NeedsConfirmation(sorted([*first.values(), *others][:MAX_RISKS], key=found.index))


def limit_risks(before: Iterable[Limit], after: Limit, *, whose: str) -> Iterator[Risk]:
    """The risks of replacing limits."""
    for each in dict.fromkeys(before):
        code, factor = _compare(each, after)
        if code is not None:
            yield _limit_risk(code, factor, f"{whose} has {format_limit(each)} on {each.name} now", after)


def gradual_limit_risks(then: Iterable[Limit], before: Iterable[Limit], after: Limit, *, whose: str) -> Iterator[Risk]:
    """The risks of a limit that was reached in several small steps, compared with the limits of an hour ago. Only a
    step further away is reported, not a step back, and not one that is a risk by itself."""
    now = list(before)
    for each in dict.fromkeys(then):
        code, factor = _compare(each, after)
        if code and all(_moves(code, step, after) and _compare(step, after)[0] != code for step in now):
            yield _limit_risk(code, factor, f"{whose} had {format_limit(each)} on {each.name} an hour ago", after)


def _limit_risk(code: Code, factor: Fraction, state: str, after: Limit) -> Risk:
    if code == "tenth":
        return Risk(code, f"{state}; {format_limit(after)} is less than a tenth of that")
    times = f"{float(factor):,.0f}" if factor >= FACTOR + 1 else f"{float(factor):.1f}"
    return Risk(code, f"{state}; {format_limit(after)} is {times} times that")


def _compare(before: Limit, after: Limit) -> tuple[Code | None, Fraction]:
    """Compare two limits by their rate and by their burst."""
    concurrency = {before.algorithm == "concurrency", after.algorithm == "concurrency"}
    if len(concurrency) > 1:
        return None, Fraction(1)  # requests in progress cannot be compared with a rate
    burst = Fraction(after.capacity, before.capacity)
    rate = burst if True in concurrency else Fraction(after.quota * before.period_us, before.quota * after.period_us)
    return next(((code, each) for each in (rate, burst) if (code := _code(each)) is not None), (None, rate))


def _code(factor: Fraction) -> Code | None:
    return "ten-times" if factor > FACTOR else "tenth" if factor * FACTOR < 1 else None


def _moves(code: Code, before: Limit, after: Limit) -> bool:
    """True if a step leads further in the direction of a code."""
    old, new = (
        (Fraction(each.quota, each.period_us), each.capacity)
        for each in ((before, after) if code == "ten-times" else (after, before))
    )
    return new[0] > old[0] or new[1] > old[1]


def block_risks(client: ClientRef) -> Iterator[Risk]:
    """The risks of blocking a client; InvalidInput if that would block all clients."""
    network = network_of(client)
    if network is None:
        return
    if network.prefixlen == 0:
        raise InvalidInput("this would block all clients; block a smaller network")
    yield from _network_risks(network)


def _network_risks(network: IPv4Network | IPv6Network) -> Iterator[Risk]:
    if network.prefixlen < WIDEST_PREFIX[network.version]:
        yield Risk("wildcard-block", f"{network} has {network.num_addresses} addresses, which would all be blocked")


def row_risks(differences: Iterable[Difference]) -> Iterator[Risk]:
    """The risks of changed overrides and restored blocks."""
    for each in differences:
        before, after = each.before, each.after
        if isinstance(after, BlockRow):
            yield from block_risks(ClientRef(after.kind, after.value))
        elif isinstance(before, OverrideRow) and isinstance(after, OverrideRow):
            text = (
                f"override {each.id} of {before.kind} {before.value} is {format_bucket(before)} now, and would be "
                f"{format_bucket(after)}"
            )
            rate = Fraction(after.quota * before.period_us, before.quota * after.period_us)
            burst = Fraction(after.burst or after.quota, before.burst or before.quota)
            for factor in (rate, burst):
                if (code := _code(factor)) is not None:
                    yield Risk(code, text)


def policy_risks(before: Policy, after: Policy, *, is_document: bool = True) -> Iterator[Risk]:
    """The risks of replacing a policy; with `is_document` false, of a change to its tables alone."""
    new = {rule.name: rule for rule in after.rules}
    for rule in before.rules:
        other = new.get(rule.name)
        if other is None or (other.shadow and not rule.shadow):
            if is_document and not rule.shadow:
                yield Risk("policy", f"limit {rule.name} {'is gone' if other is None else 'is only watched'}")
            continue
        yield from _rule_risks(rule, None, other, None, "everybody", "clients without a tier")
        for tier in sorted({*before.tiers, *after.tiers}):
            if tier in rule.tiers or tier in other.tiers or other.limit is None:
                yield from _rule_risks(rule, tier, other, tier, f"tier {tier}")
        if before.default_tier != after.default_tier:
            yield from _rule_risks(rule, before.default_tier, other, after.default_tier, "the default tier")
        if is_document and {*rule.by} != {*other.by}:
            by, instead = ("+".join(each.by) or "global" for each in (rule, other))
            yield Risk("policy", f"limit {rule.name} counts by {by}, and would count by {instead}")
    if is_document:
        yield from _failure_mode_risks(before, after)
        yield from _client_risks(before, after)
    yield from _cost_risks(before, after)
    yield from _class_risks(before, after)


def gradual_policy_risks(then: Policy, before: Policy, after: Policy) -> Iterator[Risk]:
    """The risks of limits and costs that were reached in several small steps, compared with those of an hour ago."""
    rules = [{rule.name: rule for rule in policy.rules} for policy in (then, before, after)]
    for name in rules[2]:
        if all(name in each for each in rules):
            for tier in (None, *sorted({tier for each in rules for tier in each[name].tiers})):
                old, now, new = (_limit_for(each[name], tier) for each in rules)
                if old is not None and now is not None and new is not None and now != new:
                    whose = "everybody" if tier is None else f"tier {tier}"
                    yield from gradual_limit_risks([old], [now], new, whose=whose)
    limits = [_client_limits(policy) for policy in (then, before)]
    for each in after.overrides:
        old, now = (find(each) for find in limits)
        if old is not None and now is not None and now != each.limit:
            yield from gradual_limit_risks([old], [now], each.limit, whose=" ".join(each.identity))
    costs = [_costs(policy) for policy in (then, before)]
    for route in after.routes:
        earlier, current = (each.get(_key(route), 1) for each in costs)
        cost, state = route.cost, f"requests to {_route_name(route)} cost {{}} an hour ago; {route.cost} is"
        if current * FACTOR >= cost > FACTOR * max(1, earlier) and cost > current:
            yield Risk("tenth", f"{state.format(earlier)} more than 10 times that")
        elif 0 < cost * FACTOR < earlier and cost < current <= cost * FACTOR:
            yield Risk("ten-times", f"{state.format(earlier)} less than a tenth of that")


def _rule_risks(
    before: Rule, tier: str | None, after: Rule, new_tier: str | None, whose: str, clients: str | None = None
) -> Iterator[Risk]:
    """The risks of another limit for a tier, or for those that have none."""
    old, new = _limit_for(before, tier), _limit_for(after, new_tier)
    if old is not None and new is not None:
        yield from limit_risks([old], new, whose=whose)
    elif old is not None:
        yield Risk("policy", f"limit {before.name} would no longer apply to {clients or whose}")


def _cost_risks(before: Policy, after: Policy) -> Iterator[Risk]:
    """A higher cost allows fewer requests."""
    costs, new_costs = _costs(before), _costs(after)
    for key, name in {_key(route): _route_name(route) for route in (*before.routes, *after.routes)}.items():
        old, new = costs.get(key, 1), new_costs.get(key, 1)
        now = f"requests to {name} cost {old} now; {new} is"
        if new == 0 and old:
            yield Risk("ten-times", f"requests to {name} would no longer be counted")
        elif new > FACTOR * max(1, old):
            added = f"requests to {name} would cost {new}, not 1"
            yield Risk("tenth", f"{now} more than 10 times that" if key in costs else added)
        elif 0 < new * FACTOR < old:
            yield Risk("ten-times", f"{now} less than a tenth of that")


def _class_risks(before: Policy, after: Policy) -> Iterator[Risk]:
    """Routes that leave their class, and so its limits, also if only some of their methods get an entry."""
    classes = {_key(each): each.route_class for each in before.routes}
    for route in after.routes:
        old = classes.get(_key(route), classes.get((route.template, frozenset())))
        if old is not None and old != route.route_class and any(old in rule.classes for rule in before.rules):
            new = "no class" if route.route_class is None else f"class {route.route_class}"
            yield Risk("policy", f"requests to {_route_name(route)} are of class {old}, and would be of {new}")


def _client_risks(before: Policy, after: Policy) -> Iterator[Risk]:
    """New blocks and overrides in the document."""
    blocked = {block.identity for block in before.blocked}
    for block in after.blocked:
        if block.identity not in blocked and (network := network_of(ClientRef(*block.identity))) is not None:
            yield from _network_risks(network)
    find_limit, overrides = _client_limits(before), {*before.overrides}
    for each in after.overrides:
        now = None if each in overrides else find_limit(each)
        if now is not None:
            yield from limit_risks([now], each.limit, whose=" ".join(each.identity))


def _failure_mode_risks(before: Policy, after: Policy) -> Iterator[Risk]:
    if before.on_failure == "closed" and after.on_failure != "closed":
        yield Risk("policy", f"requests that fail closed without the store would fail {after.on_failure}")
    routes = {_key(route): route.on_failure for route in after.routes}
    rules = {rule.name: rule.on_failure for rule in after.rules}
    changes = [(_route_name(each), each.on_failure, routes.get(_key(each))) for each in before.routes]
    changes += [
        (f"limit {each.name}", each.on_failure, rules[each.name]) for each in before.rules if each.name in rules
    ]
    for name, old, new in changes:
        mode = new or after.on_failure
        if old == "closed" and mode != "closed":
            yield Risk("policy", f"{name} fails closed without the store, and would fail {mode}")


def _client_limits(policy: Policy) -> Callable[[Override], Limit | None]:
    """A function from an override of another document to the limit that its client has in this one."""
    tiers = {client.identity: client.tier for client in policy.clients}
    rules = {rule.name: rule for rule in policy.rules}
    limits = {(each.identity, each.rule, each.route_class): each.limit for each in policy.overrides}

    def find(each: Override) -> Limit | None:
        found = limits.get((each.identity, each.rule, each.route_class))
        if found is None and each.rule in rules:
            found = _limit_for(rules[each.rule], tiers.get(each.identity) or policy.default_tier)
        return found

    return find


def _costs(policy: Policy) -> dict[Any, int]:
    return {_key(route): route.cost for route in policy.routes}


def _key(route: RouteRule) -> tuple[Any, Any]:
    return route.template, route.methods


def _limit_for(rule: Rule, tier: str | None) -> Limit | None:
    return rule.limit if tier is None else rule.tiers.get(tier, rule.limit)


def _route_name(route: RouteRule) -> str:
    return " ".join([*sorted(route.methods), route.template.text])
