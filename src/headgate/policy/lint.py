"""Checks of a policy as a whole: conflicts, limits that deny everything, and probable mistakes."""

from __future__ import annotations

from collections import defaultdict
from difflib import get_close_matches
from typing import TYPE_CHECKING, Final

from headgate.policy.model import ADDRESSES
from headgate.policy.routes import Template
from headgate.policy.rules import RuleMatcher
from headgate.policy.scalars import IDENTITIES

if TYPE_CHECKING:
    from collections.abc import Collection

    from headgate.limits import Limit
    from headgate.policy.formats.document import Path
    from headgate.policy.model import RouteRule
    from headgate.policy.problems import PolicyProblems
    from headgate.policy.rules import RuleDraft

__all__ = [
    "RouteCosts",
    "costs",
    "endpoints",
    "free_limits",
    "identities",
    "queues",
    "routes_given_twice",
    "unknown_keys",
    "unused_tier",
]

EVERYWHERE: Final = Template.parse("*")


def routes_given_twice(routes: list[tuple[RouteRule, Path]], problems: PolicyProblems) -> None:
    """Report routes with conflicting settings. Settings for a method may differ from those for all methods."""

    def answer(route: RouteRule) -> object:
        return route.route_class, route.cost, route.on_failure

    by_template: dict[Template, list[tuple[RouteRule, Path]]] = {}
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

    def __init__(self, drafts: Collection[RuleDraft], routes: list[RouteRule], matcher: RuleMatcher) -> None:
        self._dearest: dict[tuple[str, str | None], tuple[int, str]] = {}
        for route in sorted(routes, key=lambda route: -route.cost):
            cost = (route.cost, f"a request to {route.template.text}")
            for draft in matcher.find(route.template, route.methods, route.route_class) if route.cost > 1 else ():
                self._dearest.setdefault((draft.name, None), cost)
                self._dearest.setdefault((draft.name, route.route_class), cost)
        self._own = {draft.name: draft.get("cost", draft.get("reserve")) for draft in drafts}

    def objection(self, draft: RuleDraft, limit: Limit, route_class: str | None = None) -> str | None:
        """The reason why some request is always denied; None if there is none."""
        cost, what = self._own[draft.name], "a request"
        if cost is None:
            cost, what = self._dearest.get((draft.name, route_class), (1, what))
        at_once, where = (
            limit.capacity // draft.split,
            f" in each of its {draft.split} parts" if draft.split > 1 else "",
        )
        if cost <= at_once:
            return None
        return (
            f"{what} costs {cost}, but limit {draft.name!r} allows at most {at_once} at once{where}: "
            "such a request is always denied; lower the cost, or allow more at once"
        )


def costs(drafts: list[RuleDraft], known: RouteCosts, problems: PolicyProblems) -> None:
    for draft in drafts:
        for tier, limit in draft.limits.items():
            if (cannot := known.objection(draft, limit)) is not None:
                problems.add(draft.numbers[tier][1], cannot)


def unknown_keys(
    drafts: list[RuleDraft],
    routes: list[RouteRule],
    factor: int | None,
    default_tier: str | None,
    warnings: PolicyProblems,
) -> None:
    """Warn of limits by API key without a limit by address: a client can send a new key with each request."""
    guards = RuleMatcher([each for each in drafts if _is_guard(each, default_tier)])
    by_class: dict[str | None, list[RouteRule]] = defaultdict(list)
    for route in routes:
        by_class[route.route_class].append(route)
    for draft in drafts:
        kind = next((kind for kind in ("api_key", "client") if kind in draft.by), None)
        if kind is None or draft.get("shadow"):
            continue
        met: list[tuple[Template, str | None]] = [
            *((template, None) for template in draft.templates),
            *((route.template, name) for name in draft.classes for route in by_class[name]),
        ]
        for template, route_class in met or [(EVERYWHERE, None)]:
            if not any(_guards(guard, draft) for guard in guards.find(template, draft.methods, route_class)):
                message = (
                    "a client that sends a new key with each request is never denied; add a limit by ip"
                    if factor is None
                    else f"requests with unknown API keys also count by address, at {factor} times its numbers; "
                    "add a limit by ip to set other numbers"
                )
                warnings.add(
                    draft.path,
                    f"limit {draft.name!r} is counted by {kind}, and no limit by ip, subnet or global applies to all "
                    f"of its routes: {message}",
                )
                break


def queues(drafts: list[RuleDraft], warnings: PolicyProblems) -> None:
    """Warn of leaky buckets: a gate does not apply their delays."""
    for draft in drafts:
        if any(limit.algorithm == "leaky_bucket" for limit in draft.limits.values()):
            warnings.add(
                draft.path,
                f"limit {draft.name!r} is a leaky_bucket, which assigns each request a delay, but a gate never waits: "
                "let the app wait for current_admission().decision.delay, or write gcra, which allows the same "
                "requests",
            )


def endpoints(drafts: list[RuleDraft], routes: list[RouteRule], warnings: PolicyProblems) -> None:
    """Warn of limits by endpoint in a policy without paths."""
    if routes or any(draft.templates for draft in drafts):
        return
    for draft in drafts:
        if "endpoint" in draft.by:
            warnings.add(
                draft.path,
                f"limit {draft.name!r} is counted by endpoint, but the policy names no paths, so that all requests go "
                "to one endpoint; name them under routes, as {path: /users/{id}}",
            )


def identities(drafts: list[RuleDraft], warnings: PolicyProblems) -> None:
    """Warn of custom kinds of identity that look like misspelled built-in ones."""
    for draft in drafts:
        for kind in draft.by:
            near = get_close_matches(kind.lower(), IDENTITIES, n=1, cutoff=0.75)
            if kind not in IDENTITIES and near:
                message = f"{kind!r} is an identity that the app has to supply; did you mean {near[0]!r}?"
                warnings.add(draft.at("by"), message)


def free_limits(drafts: list[RuleDraft], warnings: PolicyProblems) -> None:
    """Warn of limits with cost 0."""
    for draft in drafts:
        if draft.get("cost") == 0:
            warnings.add(
                draft.at("cost"),
                f"limit {draft.name!r} never counts anything, as its cost is 0; leave cost out, or leave out the "
                "limit. To exempt a route from all limits, write its cost under routes",
            )


def unused_tier(tier: str | None, drafts: list[RuleDraft], path: Path, warnings: PolicyProblems) -> None:
    """Warn of a default tier if no limit has numbers for tiers."""
    if tier is not None and not any(each is not None for draft in drafts for each in draft.numbers):
        warnings.add(
            path,
            f"tier {tier!r} changes nothing, as no limit has numbers for any tier; add some, like "
            f"tiers: {{{tier}: 100/minute}} in a limit, or leave it out",
        )


def _is_guard(draft: RuleDraft, default_tier: str | None) -> bool:
    """True if a limit counts every request by address or globally."""
    return (
        {*ADDRESSES, "endpoint"}.issuperset(draft.by)
        and not draft.get("shadow")
        and draft.get("cost") != 0
        and draft.get("count_when") is None
        and not {None, default_tier}.isdisjoint(draft.limits)
    )


def _guards(guard: RuleDraft, draft: RuleDraft) -> bool:
    """True if the guard covers all methods of the limit. A concurrency limit does not bound a rate."""
    has_methods = not guard.methods or (bool(draft.methods) and draft.methods <= guard.methods)
    return has_methods and (not guard.is_concurrency or draft.is_concurrency)
