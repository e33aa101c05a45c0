"""What a change would do that is probably a mistake: ten times as much, a tenth, everybody out, a limit gone."""

from __future__ import annotations

from fractions import Fraction
from typing import TYPE_CHECKING, Any, Final

from headgate._limit_syntax import parse
from headgate.control.config.rows import BlockRow, OverrideRow
from headgate.control.config.rows import format_bucket as spelled
from headgate.control.service.client_lookup import network_of
from headgate.control.service.errors import NeedsConfirmation, Risk
from headgate.control.service.models import ClientRef
from headgate.control.service.usage import format_bucket
from headgate.errors import InvalidInput, InvalidLimit

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator
    from ipaddress import IPv4Network, IPv6Network

    from headgate._limit_syntax import Phrase
    from headgate.control.config.history import Difference
    from headgate.limits import Limit
    from headgate.policy.model import Override, Policy, RouteRule, Rule

__all__ = [
    "block_risks",
    "cost_risks",
    "gradual_limit_risks",
    "gradual_policy_risks",
    "limit_risks",
    "parse_rate",
    "policy_risks",
    "require_confirmation",
    "row_risks",
]

TIMES: Final = 10
WIDEST: Final = {4: 24, 6: 48}
"""The widest network whose block needs no second look, by version of the protocol."""
MAX_RISKS: Final = 20
"""Dangers that are told; whoever has seen so many has seen enough."""


def require_confirmation(risks: Iterable[Risk], confirm: Collection[str]) -> None:
    """NeedsConfirmation, unless all of them were."""
    found = list(dict.fromkeys(risks))
    if {risk.code for risk in found} - {*confirm}:
        first = {risk.code: risk for risk in reversed(found)}
        told = [risk for risk in found[:MAX_RISKS] if risk is not first[risk.code]]
        # One of each code in any case: nobody can confirm what they were not told of.
        raise NeedsConfirmation(sorted([*first.values(), *told][:MAX_RISKS], key=found.index))


def parse_rate(bucket: str) -> Phrase:
    """What the text of a limit says; InvalidLimit, if it lets nothing pass."""
    phrase = parse(bucket)
    if phrase.quota == 0:
        raise InvalidLimit("a limit of 0 lets nothing pass; block the client instead")
    return phrase


def limit_risks(before: Iterable[Limit], after: Limit, *, whose: str) -> Iterator[Risk]:
    """Of other numbers in place of those that somebody has now."""
    for each in dict.fromkeys(before):
        code, times = _compared(each, after)
        now = f"{whose} has {format_bucket(each)} on {each.name} now"
        if code == "ten-times":
            yield Risk("ten-times", f"{now}; {format_bucket(after)} is {_spelled(times)} times that")
        elif code == "tenth":
            yield Risk("tenth", f"{now}; {format_bucket(after)} is less than a tenth of that")


def gradual_limit_risks(then: Iterable[Limit], before: Iterable[Limit], after: Limit, *, whose: str) -> Iterator[Risk]:
    """Of numbers that were reached in several steps, each of them small: compared with those of an hour ago. Only the
    last step away from them is reported, and not a step back."""
    now = list(before)
    for each in dict.fromkeys(then):
        code, times = _compared(each, after)
        if code is None or not all(_moves(code, step, after) and _compared(step, after)[0] != code for step in now):
            continue
        had = f"{whose} had {format_bucket(each)} on {each.name} an hour ago"
        if code == "ten-times":
            yield Risk("ten-times", f"{had}; {format_bucket(after)} is {_spelled(times)} times that")
        else:
            yield Risk("tenth", f"{had}; {format_bucket(after)} is less than a tenth of that")


def gradual_policy_risks(then: Policy, before: Policy, after: Policy) -> Iterator[Risk]:
    """The same for all numbers and costs of a policy that would change."""
    rules = [{rule.name: rule for rule in policy.rules} for policy in (then, before, after)]
    for name in rules[2]:
        if not all(name in each for each in rules):
            continue
        tiers = {tier for each in rules for tier in each[name].tiers}
        for tier in (None, *sorted(tiers)):
            old, now, new = (_limit_for(each[name], tier) for each in rules)
            if old is not None and now is not None and new is not None and now != new:
                yield from gradual_limit_risks([old], [now], new, whose="everybody" if tier is None else f"tier {tier}")
    usual = [_client_limits(policy) for policy in (then, before)]
    for each in after.overrides:
        old, now = (numbers(each) for numbers in usual)
        if old is not None and now is not None and now != each.limit:
            yield from gradual_limit_risks([old], [now], each.limit, whose=" ".join(each.identity))
    yield from _gradual_cost_risks(then, before, after)


def block_risks(who: ClientRef) -> Iterator[Risk]:
    """Of keeping somebody out. Nobody can keep everybody out."""
    network = network_of(who)
    if network is None:
        return
    if network.prefixlen == 0:
        raise InvalidInput("that is everybody: nobody would get in; block a network, or take the API down")
    yield from _network_risks(network)


def policy_risks(before: Policy, after: Policy, *, is_document: bool = True) -> Iterator[Risk]:
    """Of one policy in place of another, by what their limits come to for each tier."""
    new = {rule.name: rule for rule in after.rules}
    for rule in before.rules:
        other = new.get(rule.name)
        if other is None or (other.shadow and not rule.shadow):
            gone = "is gone" if other is None else "is only watched"
            if is_document and not rule.shadow:
                yield Risk("policy", f"limit {rule.name} {gone}")
        else:
            yield from _rule_risks(rule, other, {*before.tiers, *after.tiers})
            if before.default_tier != after.default_tier:
                yield from _default_tier_risks(rule, other, before.default_tier, after.default_tier)
            if is_document and {*rule.by} != {*other.by}:
                by, instead = ("+".join(each.by) or "global" for each in (rule, other))
                yield Risk("policy", f"limit {rule.name} counts by {by}, and would count by {instead}")
    if is_document:
        yield from _failure_mode_risks(before, after)
        yield from _client_risks(before, after)
    yield from cost_risks(before, after)


def cost_risks(before: Policy, after: Policy) -> Iterator[Risk]:
    """Of other costs of routes: what costs more gets fewer requests through."""
    new = {(route.template, route.methods): route.cost for route in after.routes}
    for route in before.routes:
        cost = new.get((route.template, route.methods), 1)
        name = _named(route)
        if cost == 0 and route.cost:
            yield Risk("ten-times", f"requests to {name} would not be counted any more")
        elif cost > TIMES * max(1, route.cost):
            yield Risk("tenth", f"requests to {name} cost {route.cost} now; {cost} is more than 10 times that")
        elif cost and cost * TIMES < route.cost:
            yield Risk("ten-times", f"requests to {name} cost {route.cost} now; {cost} is less than a tenth of that")
    known = {(route.template, route.methods) for route in before.routes}
    for route in after.routes:
        if (route.template, route.methods) not in known and (route.cost == 0 or route.cost > TIMES):
            what = "would not be counted any more" if route.cost == 0 else f"would cost {route.cost}, not 1"
            yield Risk("ten-times" if route.cost == 0 else "tenth", f"requests to {_named(route)} {what}")
    yield from _class_risks(before, after)


def row_risks(differences: Iterable[Difference]) -> Iterator[Risk]:
    """Of overrides that get other numbers, and of blocks that come back."""
    for each in differences:
        before, after = each.before, each.after
        if isinstance(after, BlockRow):
            yield from block_risks(ClientRef(after.kind, after.value))
        elif isinstance(before, OverrideRow) and isinstance(after, OverrideRow):
            whose = f"override {each.id} of {before.kind} {before.value}"
            told = f"{whose} is {spelled(before)} now, and would be {spelled(after)}"
            # In the long run, and at once.
            for times in (
                Fraction(after.quota * before.period_us, before.quota * after.period_us),
                Fraction(after.burst or after.quota, before.burst or before.quota),
            ):
                if times > TIMES:
                    yield Risk("ten-times", told)
                elif times * TIMES < 1:
                    yield Risk("tenth", told)


# ------------------------------------------------------------------ within


def _compared(before: Limit, after: Limit) -> tuple[str | None, Fraction]:
    """Whether more than ten times as much, or less than a tenth, would pass: in the long run, or at once."""
    kinds = {before.algorithm == "concurrency", after.algorithm == "concurrency"}
    if len(kinds) > 1:
        return None, Fraction(1)  # the one counts what is inside, the other what passes
    at_once = Fraction(after.capacity, before.capacity)
    rate = at_once if True in kinds else Fraction(after.quota * before.period_us, before.quota * after.period_us)
    for times in (rate, at_once):
        if times > TIMES:
            return "ten-times", times
        if times * TIMES < 1:
            return "tenth", times
    return None, rate


def _moves(code: str, before: Limit, after: Limit) -> bool:
    """True if a step leads further in a direction: up for "ten-times", down for "tenth"."""
    old, new = (
        (Fraction(each.quota, each.period_us), each.capacity)
        for each in ((before, after) if code == "ten-times" else (after, before))
    )
    return new[0] > old[0] or new[1] > old[1]


def _client_limits(policy: Policy) -> Callable[[Override], Limit | None]:
    """A function from an override of one is_document to the numbers that its client has in another."""
    tiers = {client.identity: client.tier for client in policy.clients}
    rules = {rule.name: rule for rule in policy.rules}
    numbers = {(each.identity, each.rule, each.route_class): each.limit for each in policy.overrides}

    def find(each: Override) -> Limit | None:
        found = numbers.get((each.identity, each.rule, each.route_class))
        if found is None and each.rule in rules:
            found = _limit_for(rules[each.rule], tiers.get(each.identity) or policy.default_tier)
        return found

    return find


def _gradual_cost_risks(then: Policy, before: Policy, after: Policy) -> Iterator[Risk]:
    costs = [{(route.template, route.methods): route.cost for route in policy.routes} for policy in (then, before)]
    for route in after.routes:
        old, now = (each.get((route.template, route.methods), 1) for each in costs)
        cost, name = route.cost, _named(route)
        if now * TIMES >= cost > TIMES * max(1, old) and cost > now:
            yield Risk("tenth", f"requests to {name} cost {old} an hour ago; {cost} is more than 10 times that")
        elif 0 < cost * TIMES < old and cost < now <= cost * TIMES:
            yield Risk("ten-times", f"requests to {name} cost {old} an hour ago; {cost} is less than a tenth of that")


def _rule_risks(before: Rule, after: Rule, tiers: Collection[str]) -> Iterator[Risk]:
    for tier in (None, *sorted(tiers)):
        old, new = _limit_for(before, tier), _limit_for(after, tier)
        if (
            old is not None
            and new is not None
            and old != new
            and (tier is None or {tier} & {*before.tiers, *after.tiers})
        ):
            yield from limit_risks([old], new, whose="everybody" if tier is None else f"tier {tier}")
        elif old is not None and new is None:
            whose = "those without a tier" if tier is None else f"tier {tier}"
            yield Risk("policy", f"limit {before.name} would not hold for {whose} any more")


def _default_tier_risks(before: Rule, after: Rule, tier: str | None, other: str | None) -> Iterator[Risk]:
    """Of another tier for everybody whom nobody has put into one."""
    old, new = _limit_for(before, tier), _limit_for(after, other)
    if old is not None and new is not None:
        yield from limit_risks([old], new, whose="everybody in no other tier")
    elif old is not None:
        yield Risk("policy", f"limit {before.name} would not hold for everybody in no other tier any more")


def _limit_for(rule: Rule, tier: str | None) -> Limit | None:
    return rule.limit if tier is None else rule.tiers.get(tier, rule.limit)


def _class_risks(before: Policy, after: Policy) -> Iterator[Risk]:
    """Of routes that leave their class, and so its limits: also if only some of their methods get an entry."""
    classes = {(each.template, each.methods): each.route_class for each in before.routes}
    for route in after.routes:
        was = classes.get((route.template, route.methods), classes.get((route.template, frozenset())))
        if was is not None and was != route.route_class and any(was in rule.classes for rule in before.rules):
            other = "no class" if route.route_class is None else f"class {route.route_class}"
            yield Risk("policy", f"requests to {_named(route)} are of class {was}, and would be of {other}")


def _client_risks(before: Policy, after: Policy) -> Iterator[Risk]:
    """Of what a is_document says of single clients, and did not before: whom it blocks, and its overrides."""
    known = {block.identity for block in before.blocked}
    for block in after.blocked:
        if block.identity not in known and (network := network_of(ClientRef(*block.identity))) is not None:
            yield from _network_risks(network)
    usual = _client_limits(before)
    overrides = {*before.overrides}
    for each in after.overrides:
        now = None if each in overrides else usual(each)
        if now is not None:
            yield from limit_risks([now], each.limit, whose=" ".join(each.identity))


def _network_risks(network: IPv4Network | IPv6Network) -> Iterator[Risk]:
    if network.prefixlen < WIDEST[network.version]:
        yield Risk("wildcard-block", f"{network} has {network.num_addresses} addresses, and all of them are kept out")


def _failure_mode_risks(before: Policy, after: Policy) -> Iterator[Risk]:
    is_closed = after.on_failure == "closed"
    if before.on_failure == "closed" and not is_closed:
        yield Risk("policy", f"what fails closed without the store would fail {after.on_failure}")
    routes = {(route.template, route.methods): route.on_failure for route in after.routes}
    rules: dict[str, Any] = {rule.name: rule.on_failure for rule in after.rules}
    for route in before.routes:
        mode = routes.get((route.template, route.methods)) or after.on_failure
        if route.on_failure == "closed" and mode != "closed":
            yield Risk("policy", f"{_named(route)} fails closed without the store, and would fail {mode}")
    for rule in before.rules:
        mode = rules.get(rule.name) or after.on_failure
        if rule.on_failure == "closed" and rule.name in rules and mode != "closed":
            yield Risk("policy", f"limit {rule.name} fails closed without the store, and would fail {mode}")


def _named(route: RouteRule) -> str:
    return " ".join([*sorted(route.methods), route.template.text])


def _spelled(times: Fraction) -> str:
    return f"{float(times):,.0f}" if times >= TIMES + 1 else f"{float(times):.1f}"
