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
from headgate.control.service.usage import bucket_of
from headgate.errors import InvalidInput, InvalidLimit

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator
    from ipaddress import IPv4Network, IPv6Network

    from headgate._limit_syntax import Phrase
    from headgate.control.config.history import Difference
    from headgate.limits import Limit
    from headgate.policy.model import Override, Policy, RouteRule, Rule

__all__ = [
    "confirmed",
    "of_block",
    "of_costs",
    "of_gradual_numbers",
    "of_gradual_policy",
    "of_numbers",
    "of_policy",
    "of_rows",
    "written",
]

TIMES: Final = 10
WIDEST: Final = {4: 24, 6: 48}
"""The widest network whose block needs no second look, by version of the protocol."""
MOST: Final = 20
"""Dangers that are told; whoever has seen so many has seen enough."""


def confirmed(dangers: Iterable[Risk], confirm: Collection[str]) -> None:
    """NeedsConfirmation, unless all of them were."""
    found = list(dict.fromkeys(dangers))
    if {danger.code for danger in found} - {*confirm}:
        first = {danger.code: danger for danger in reversed(found)}
        told = [danger for danger in found[:MOST] if danger is not first[danger.code]]
        # One of each code in any case: nobody can confirm what they were not told of.
        raise NeedsConfirmation(sorted([*first.values(), *told][:MOST], key=found.index))


def written(bucket: str) -> Phrase:
    """What the text of a limit says; InvalidLimit, if it lets nothing pass."""
    phrase = parse(bucket)
    if phrase.quota == 0:
        raise InvalidLimit("a limit of 0 lets nothing pass; block the client instead")
    return phrase


def of_numbers(before: Iterable[Limit], after: Limit, *, whose: str) -> Iterator[Risk]:
    """Of other numbers in place of those that somebody has now."""
    for each in dict.fromkeys(before):
        code, times = _compared(each, after)
        now = f"{whose} has {bucket_of(each)} on {each.name} now"
        if code == "ten-times":
            yield Risk("ten-times", f"{now}; {bucket_of(after)} is {_spelled(times)} times that")
        elif code == "tenth":
            yield Risk("tenth", f"{now}; {bucket_of(after)} is less than a tenth of that")


def of_gradual_numbers(then: Iterable[Limit], before: Iterable[Limit], after: Limit, *, whose: str) -> Iterator[Risk]:
    """Of numbers that were reached in several steps, each of them small: compared with those of an hour ago. Only the
    last step away from them is reported, and not a step back."""
    now = list(before)
    for each in dict.fromkeys(then):
        code, times = _compared(each, after)
        if code is None or not all(_moves(code, step, after) and _compared(step, after)[0] != code for step in now):
            continue
        had = f"{whose} had {bucket_of(each)} on {each.name} an hour ago"
        if code == "ten-times":
            yield Risk("ten-times", f"{had}; {bucket_of(after)} is {_spelled(times)} times that")
        else:
            yield Risk("tenth", f"{had}; {bucket_of(after)} is less than a tenth of that")


def of_gradual_policy(then: Policy, before: Policy, after: Policy) -> Iterator[Risk]:
    """The same for all numbers and costs of a policy that would change."""
    rules = [{rule.name: rule for rule in policy.rules} for policy in (then, before, after)]
    for name in rules[2]:
        if not all(name in each for each in rules):
            continue
        tiers = {tier for each in rules for tier in each[name].tiers}
        for tier in (None, *sorted(tiers)):
            old, now, new = (_numbers(each[name], tier) for each in rules)
            if old is not None and now is not None and new is not None and now != new:
                yield from of_gradual_numbers([old], [now], new, whose="everybody" if tier is None else f"tier {tier}")
    usual = [_client_numbers(policy) for policy in (then, before)]
    for each in after.overrides:
        old, now = (numbers(each) for numbers in usual)
        if old is not None and now is not None and now != each.limit:
            yield from of_gradual_numbers([old], [now], each.limit, whose=" ".join(each.identity))
    yield from _of_gradual_costs(then, before, after)


def of_block(who: ClientRef) -> Iterator[Risk]:
    """Of keeping somebody out. Nobody can keep everybody out."""
    network = network_of(who)
    if network is None:
        return
    if network.prefixlen == 0:
        raise InvalidInput("that is everybody: nobody would get in; block a network, or take the API down")
    yield from _of_network(network)


def of_policy(before: Policy, after: Policy, *, document: bool = True) -> Iterator[Risk]:
    """Of one policy in place of another, by what their limits come to for each tier."""
    new = {rule.name: rule for rule in after.rules}
    for rule in before.rules:
        other = new.get(rule.name)
        if other is None or (other.shadow and not rule.shadow):
            gone = "is gone" if other is None else "is only watched"
            if document and not rule.shadow:
                yield Risk("policy", f"limit {rule.name} {gone}")
        else:
            yield from _of_rule(rule, other, {*before.tiers, *after.tiers})
            if before.default_tier != after.default_tier:
                yield from _of_default(rule, other, before.default_tier, after.default_tier)
            if document and {*rule.by} != {*other.by}:
                by, instead = ("+".join(each.by) or "global" for each in (rule, other))
                yield Risk("policy", f"limit {rule.name} counts by {by}, and would count by {instead}")
    if document:
        yield from _no_longer_closed(before, after)
        yield from _of_clients(before, after)
    yield from of_costs(before, after)


def of_costs(before: Policy, after: Policy) -> Iterator[Risk]:
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
    yield from _of_classes(before, after)


def of_rows(differences: Iterable[Difference]) -> Iterator[Risk]:
    """Of overrides that get other numbers, and of blocks that come back."""
    for each in differences:
        before, after = each.before, each.after
        if isinstance(after, BlockRow):
            yield from of_block(ClientRef(after.kind, after.value))
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


def _client_numbers(policy: Policy) -> Callable[[Override], Limit | None]:
    """A function from an override of one document to the numbers that its client has in another."""
    tiers = {client.identity: client.tier for client in policy.clients}
    rules = {rule.name: rule for rule in policy.rules}
    numbers = {(each.identity, each.rule, each.route_class): each.limit for each in policy.overrides}

    def find(each: Override) -> Limit | None:
        found = numbers.get((each.identity, each.rule, each.route_class))
        if found is None and each.rule in rules:
            found = _numbers(rules[each.rule], tiers.get(each.identity) or policy.default_tier)
        return found

    return find


def _of_gradual_costs(then: Policy, before: Policy, after: Policy) -> Iterator[Risk]:
    costs = [{(route.template, route.methods): route.cost for route in policy.routes} for policy in (then, before)]
    for route in after.routes:
        old, now = (each.get((route.template, route.methods), 1) for each in costs)
        cost, name = route.cost, _named(route)
        if now * TIMES >= cost > TIMES * max(1, old) and cost > now:
            yield Risk("tenth", f"requests to {name} cost {old} an hour ago; {cost} is more than 10 times that")
        elif 0 < cost * TIMES < old and cost < now <= cost * TIMES:
            yield Risk("ten-times", f"requests to {name} cost {old} an hour ago; {cost} is less than a tenth of that")


def _of_rule(before: Rule, after: Rule, tiers: Collection[str]) -> Iterator[Risk]:
    for tier in (None, *sorted(tiers)):
        old, new = _numbers(before, tier), _numbers(after, tier)
        if (
            old is not None
            and new is not None
            and old != new
            and (tier is None or {tier} & {*before.tiers, *after.tiers})
        ):
            yield from of_numbers([old], new, whose="everybody" if tier is None else f"tier {tier}")
        elif old is not None and new is None:
            whose = "those without a tier" if tier is None else f"tier {tier}"
            yield Risk("policy", f"limit {before.name} would not hold for {whose} any more")


def _of_default(before: Rule, after: Rule, tier: str | None, other: str | None) -> Iterator[Risk]:
    """Of another tier for everybody whom nobody has put into one."""
    old, new = _numbers(before, tier), _numbers(after, other)
    if old is not None and new is not None:
        yield from of_numbers([old], new, whose="everybody in no other tier")
    elif old is not None:
        yield Risk("policy", f"limit {before.name} would not hold for everybody in no other tier any more")


def _numbers(rule: Rule, tier: str | None) -> Limit | None:
    return rule.limit if tier is None else rule.tiers.get(tier, rule.limit)


def _of_classes(before: Policy, after: Policy) -> Iterator[Risk]:
    """Of routes that leave their class, and so its limits: also if only some of their methods get an entry."""
    classes = {(each.template, each.methods): each.route_class for each in before.routes}
    for route in after.routes:
        was = classes.get((route.template, route.methods), classes.get((route.template, frozenset())))
        if was is not None and was != route.route_class and any(was in rule.classes for rule in before.rules):
            other = "no class" if route.route_class is None else f"class {route.route_class}"
            yield Risk("policy", f"requests to {_named(route)} are of class {was}, and would be of {other}")


def _of_clients(before: Policy, after: Policy) -> Iterator[Risk]:
    """Of what a document says of single clients, and did not before: whom it blocks, and its overrides."""
    known = {block.identity for block in before.blocked}
    for block in after.blocked:
        if block.identity not in known and (network := network_of(ClientRef(*block.identity))) is not None:
            yield from _of_network(network)
    usual = _client_numbers(before)
    overrides = {*before.overrides}
    for each in after.overrides:
        now = None if each in overrides else usual(each)
        if now is not None:
            yield from of_numbers([now], each.limit, whose=" ".join(each.identity))


def _of_network(network: IPv4Network | IPv6Network) -> Iterator[Risk]:
    if network.prefixlen < WIDEST[network.version]:
        yield Risk("wildcard-block", f"{network} has {network.num_addresses} addresses, and all of them are kept out")


def _no_longer_closed(before: Policy, after: Policy) -> Iterator[Risk]:
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
