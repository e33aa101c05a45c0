"""The policy as it is shown: tiers, routes, limits, and the document itself."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from headgate.control.config import queries
from headgate.control.service.models import PolicyView, RouteView, RuleView, TierLimit, TierView
from headgate.control.service.usage import bucket_of
from headgate.policy import scalars

if TYPE_CHECKING:
    from sqlalchemy import Connection

    from headgate.control.service.effective_policy import BasePolicy
    from headgate.limits import Limit
    from headgate.policy.model import Rule

__all__ = ["policy_view", "routes", "tiers"]


def tiers(connection: Connection, ground: BasePolicy) -> list[TierView]:
    """All tiers, with their numbers."""
    base, counts = ground.base, queries.count_assignments(connection)
    in_table = {(each.row.tier, each.row.limit_name): each for each in ground.tiers}
    by_kind: dict[str, list[str]] = {}
    for client in base.clients:
        by_kind.setdefault(client.identity.kind, []).append(client.identity.value)
    replaced = {
        (each.row.kind, each.row.value) for each in queries.rows_of_clients(connection, by_kind, ["clients"])["clients"]
    }
    for client in base.clients:
        if client.tier is not None and client.identity not in replaced:
            counts[client.tier] = counts.get(client.tier, 0) + 1
    names = dict.fromkeys([*base.tiers, *([base.default_tier] if base.default_tier else []), *sorted(counts)])
    views = []
    for name in names:
        limits = []
        for rule in base.rules:
            if name in rule.tiers:
                row = in_table.get((name, rule.name)) or next(
                    (in_table[name, each] for each in rule.classes if (name, each) in in_table), None
                )
                limits.append(
                    TierLimit(rule.name, _whole(rule.tiers[name]), "policy")
                    if row is None
                    else TierLimit(rule.name, _whole(rule.tiers[name]), "table", row.id, row.since)
                )
        views.append(TierView(name, name == base.default_tier, tuple(limits), counts.get(name, 0)))
    return views


def routes(ground: BasePolicy) -> list[RouteView]:
    """All routes of which something is said."""
    from_tables = {_route_name(each.row.path): each for each in ground.routes}
    views = []
    for route in ground.base.routes:
        methods = tuple(sorted(route.methods))
        row = from_tables.get((methods, route.template))
        views.append(
            RouteView(
                path=row.row.path if row is not None else route.template.text,
                methods=methods,
                cost=route.cost,
                route_class=route.route_class,
                on_failure=route.on_failure,
                from_="policy" if row is None else "table",
                id=None if row is None else row.id,
                since=None if row is None else row.since,
            )
        )
    return views


def policy_view(ground: BasePolicy, version: int) -> PolicyView:
    """The document, and what it comes to."""
    kept = ground.document
    return PolicyView(
        version=version,
        since=None if kept is None else kept.since,
        text="" if kept is None else kept.row.text,
        format="yaml" if kept is None else kept.row.format,
        name="policy.yaml" if kept is None else kept.row.name,
        rules=tuple(map(_rule_view, ground.base.rules)),
        warnings=ground.base.warnings if not ground.problems else ground.problems,
    )


def _rule_view(rule: Rule) -> RuleView:
    return RuleView(
        name=rule.name,
        by="+".join(rule.by) or "global",
        bucket=None if rule.limit is None else bucket_of(rule.limit),
        algorithm=None if not rule.limits else rule.limits[0].algorithm,
        tiers={tier: bucket_of(limit) for tier, limit in rule.tiers.items()},
        routes=tuple(template.text for template in rule.templates),
        classes=rule.classes,
        methods=tuple(sorted(rule.methods)),
        cost=rule.cost,
        on_failure=rule.on_failure,
        shadow=rule.shadow,
        count_when=None if rule.count_when is None else rule.count_when.text,
    )


def _whole(limit: Limit) -> str:
    return bucket_of(limit) if limit.algorithm == "token_bucket" else f"{bucket_of(limit)}, {limit.algorithm}"


def _route_name(path: str) -> Any:
    method, template = scalars.route(path)
    return (() if method is None else (method,)), template
