"""Checks of a whole policy: contradictions between its parts, and limits that are probably not meant as written."""

from __future__ import annotations

from collections import defaultdict
from difflib import get_close_matches
from typing import TYPE_CHECKING, Final

from headgate.policy.routes import Template
from headgate.policy.rules import RuleMatcher
from headgate.policy.scalars import IDENTITIES
from headgate.policy.snapshot import guards

if TYPE_CHECKING:
    from collections.abc import Collection

    from headgate.limits import Limit
    from headgate.policy import model
    from headgate.policy.formats.document import Path
    from headgate.policy.loader import PolicyProblems
    from headgate.policy.rules import RuleDraft

__all__ = [
    "RouteCosts",
    "check_costs",
    "check_limits",
    "check_routes_given_twice",
    "check_unknown_keys",
    "check_unused_tier",
]

EVERYWHERE: Final = Template.parse("*")


def check_routes_given_twice(routes: list[tuple[model.RouteRule, Path]], problems: PolicyProblems) -> None:
    """Report routes with conflicting settings. Settings for a method may differ from those for all methods."""

    def answer(route: model.RouteRule) -> object:
        return route.route_class, route.cost, route.on_failure

    by_template: dict[Template, list[tuple[model.RouteRule, Path]]] = {}
    for route, path in routes:
        for other, place in by_template.setdefault(route.template, []):
            overlap = route.methods & other.methods or route.methods == other.methods
            if overlap and answer(route) != answer(other):
                before = f"{route.template.text} is declared twice, first at "
                problems.add(path, before, other=place, after="; keep one, or give them methods that differ")
                break
        by_template[route.template].append((route, path))


class RouteCosts:
    """The highest cost of a request on each rule."""

    def __init__(self, drafts: Collection[RuleDraft], routes: list[model.RouteRule], matcher: RuleMatcher) -> None:
        self._dearest: dict[tuple[str, str | None], tuple[int, str]] = {}
        for route in sorted(routes, key=lambda route: -route.cost):
            cost = (route.cost, f"a request to {route.template.text}")
            for draft in matcher.find(route.template, route.methods, route.route_class) if route.cost > 1 else ():
                self._dearest.setdefault((draft.name, None), cost)
                self._dearest.setdefault((draft.name, route.route_class), cost)
        self._own = {draft.name: draft.entry.get("cost", draft.entry.get("reserve")) for draft in drafts}

    def objection(self, draft: RuleDraft, limit: Limit, route_class: str | None = None) -> str | None:
        """The reason why some request is always denied; None if there is none."""
        cost, what = self._own[draft.name], "a request"
        if draft.counts != "requests":
            return None if (cost or 1) <= limit.capacity // draft.split else _too_dear(draft, cost, limit)
        if cost is None:
            cost, what = self._dearest.get((draft.name, route_class), (1, what))
        if draft.quota is not None:
            return None  # other grants may pay for it
        at_once = limit.capacity // draft.split
        where = f" in each of its {draft.split} parts" if draft.split > 1 else ""
        if cost <= at_once:
            return None
        return (
            f"{what} costs {cost}, but limit {draft.name!r} allows at most {at_once} at once{where}: "
            "such a request is always denied; lower the cost, or allow more at once"
        )


def _too_dear(draft: RuleDraft, cost: int, limit: Limit) -> str:
    return (
        f"each of the {draft.counts} costs {cost}, but limit {draft.name!r} allows at most {limit.capacity} at once; "
        "lower the cost, or allow more at once"
    )


def check_costs(drafts: list[RuleDraft], known: RouteCosts, problems: PolicyProblems) -> None:
    for draft in drafts:
        for tier, limit in draft.limits.items():
            if (cannot := known.objection(draft, limit)) is not None:
                problems.add(draft.numbers[tier][1], cannot)


def check_unknown_keys(
    drafts: list[RuleDraft],
    routes: list[model.RouteRule],
    factor: int | None,
    default_tier: str | None,
    warnings: PolicyProblems,
) -> None:
    """Warn of limits by API key without a limit by address: a client can send a new key with each request."""
    rules = {draft.name: draft.rule() for draft in drafts}
    general = [draft for draft in drafts if not {None, default_tier}.isdisjoint(draft.limits)]
    matcher = RuleMatcher([draft for draft in general if guards(rules[draft.name], rules[draft.name])])
    effect = "a client that sends a new key with each request is never denied; add a limit by ip"
    if factor is not None:
        effect = f"requests with unknown API keys also count by address, at {factor} times its numbers"
        effect = f"{effect}; add a limit by ip to set other numbers"
    by_class: dict[str | None, list[model.RouteRule]] = defaultdict(list)
    for route in routes:
        by_class[route.route_class].append(route)
    for draft in drafts:
        kind = next((kind for kind in ("api_key", "client") if kind in draft.by), None)
        if kind is None or draft.entry.get("shadow") or draft.counts != "requests":
            continue
        places: list[tuple[Template, str | None]] = [
            *((template, None) for template in draft.templates),
            *((route.template, name) for name in draft.classes for route in by_class[name]),
        ]
        for template, route_class in places or [(EVERYWHERE, None)]:
            found = matcher.find(template, draft.methods, route_class)
            covering = [each for each in found if not each.methods or (draft.methods and draft.methods <= each.methods)]
            if not any(guards(rules[each.name], rules[draft.name]) for each in covering):
                counted = f"limit {draft.name!r} is counted by {kind}, and no limit by ip, subnet or global applies to"
                warnings.add(draft.entry.path, f"{counted} all of its routes: {effect}")
                break


def check_limits(drafts: list[RuleDraft], warnings: PolicyProblems, *, has_paths: bool) -> None:
    """Warn of limits that are probably not meant as they are written."""
    for draft in drafts:
        limit = f"limit {draft.name!r}"
        if "endpoint" in draft.by and not has_paths:
            message = "is counted by endpoint, but the policy names no paths, so that all requests go to one endpoint"
            warnings.add(draft.entry.path, f"{limit} {message}; name them under routes, as {{path: /users/{{id}}}}")
        for kind in draft.by:
            near = get_close_matches(kind.lower(), IDENTITIES, n=1, cutoff=0.75)
            if kind not in IDENTITIES and near:
                message = f"{kind!r} is an identity that the app has to supply; did you mean {near[0]!r}?"
                warnings.add(draft.entry.at("by"), message)
        if draft.counts == "requests" and any(each.algorithm == "leaky_bucket" for each in draft.limits.values()):
            warnings.add(
                draft.entry.path,
                f"{limit} is a leaky_bucket, which assigns each request a delay, but a gate never waits: let the app "
                "wait for current_admission().decision.delay, or write gcra, which allows the same requests",
            )
        if draft.entry.get("cost") == 0:
            warnings.add(
                draft.entry.at("cost"),
                f"{limit} never counts anything, as its cost is 0; leave cost out, or leave out the limit. To exempt "
                "a route from all limits, write its cost under routes",
            )


def check_unused_tier(tier: str | None, drafts: list[RuleDraft], path: Path, warnings: PolicyProblems) -> None:
    if tier is not None and not any(each is not None for draft in drafts for each in (*draft.numbers, *draft.weights)):
        warnings.add(
            path,
            f"tier {tier!r} changes nothing, as no limit has numbers for any tier; add some, like "
            f"tiers: {{{tier}: 100/minute}} in a limit, or leave it out",
        )
