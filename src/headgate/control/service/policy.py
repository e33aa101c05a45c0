"""The policy: its document, tiers, routes, versions and rollback."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from headgate.control.config import queries, raw_keys
from headgate.control.config.history import diff_versions
from headgate.control.config.reading import newest_version
from headgate.control.config.rows import BASE_SECTIONS, SECTIONS, OverrideRow, PolicyDocument, RouteCost, TierLimit
from headgate.control.service import guardrails
from headgate.control.service.changes import attributed, write_confirmed
from headgate.control.service.dependencies import MAX_ID
from headgate.control.service.effective_policy import base_policy_at
from headgate.control.service.errors import NotFound
from headgate.control.service.listing import check_page
from headgate.control.service.models import (
    ClientRef,
    PolicyView,
    RollbackPreview,
    RouteView,
    RuleView,
    TierLimitView,
    TierView,
)
from headgate.control.service.overrides import effective_an_hour_ago, parse_bucket
from headgate.control.service.usage import format_bucket
from headgate.errors import InvalidInput, InvalidPolicy
from headgate.policy import scalars
from headgate.policy.formats import FORMATS

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Sequence

    from headgate.control.config.history import Difference, Version
    from headgate.control.service.blocks import BlockService
    from headgate.control.service.dependencies import ServiceDependencies
    from headgate.control.service.effective_policy import BasePolicy
    from headgate.control.service.errors import Risk
    from headgate.control.service.models import Actor, Change, ChangeContext
    from headgate.control.service.overrides import OverrideService
    from headgate.limits import Limit
    from headgate.policy.model import Policy, Rule

__all__ = ["PolicyService"]

MAX_CHECKED_OVERRIDES: Final = 100
"""Overrides restored by a rollback that are compared with the current limits of their clients."""


class PolicyService:
    """Shows and changes the policy document, tiers and routes; shows versions and rolls back to them."""

    def __init__(self, deps: ServiceDependencies, overrides: OverrideService, blocks: BlockService) -> None:
        self._deps = deps
        self._overrides = overrides
        self._blocks = blocks

    # ------------------------------------------------------------------ views

    def get(self, version: int | None = None) -> PolicyView:
        """The policy document, now or at a version, and the limits that result from it and the tables."""
        if version is not None:
            self._deps.require_version(version)
        with self._deps.reading() as connection:
            at = newest_version(connection) if version is None else version
            base = self._deps.policies.get(connection) if version is None else base_policy_at(connection, at)
        document = base.document
        return PolicyView(
            version=at,
            since=None if document is None else document.since,
            text="" if document is None else document.row.text,
            format="yaml" if document is None else document.row.format,
            name="policy.yaml" if document is None else document.row.name,
            rules=tuple(map(_rule_view, base.policy.rules)),
            warnings=base.problems or base.policy.warnings,
        )

    def tiers(self) -> Sequence[TierView]:
        """All tiers, with their limits and the number of clients in each."""
        with self._deps.reading() as connection:
            base = self._deps.policies.get(connection)
            policy, counts = base.policy, queries.count_assignments(connection)
            by_kind: dict[str, list[str]] = {}
            for client in policy.clients:
                by_kind.setdefault(client.identity.kind, []).append(client.identity.value)
            rows = queries.rows_of_clients(connection, by_kind, ["clients"])["clients"]
        assigned = {(each.row.kind, each.row.value) for each in rows}
        for client in policy.clients:
            if client.tier is not None and client.identity not in assigned:
                counts[client.tier] = counts.get(client.tier, 0) + 1
        default = policy.default_tier
        names = dict.fromkeys([*policy.tiers, *([default] if default else []), *sorted(counts)])
        return [TierView(name, name == default, tuple(_tier_limits(base, name)), counts.get(name, 0)) for name in names]

    def routes(self) -> Sequence[RouteView]:
        """All routes in the document or in a table."""
        base = self._deps.policies.current()
        from_tables = {_route_key(each.row.path): each for each in base.routes}
        views = []
        for route in base.policy.routes:
            methods = tuple(sorted(route.methods))
            row = from_tables.get((methods, route.template))
            views.append(
                RouteView(
                    path=route.template.text if row is None else row.row.path,
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

    def check(self, text: str, *, file: str) -> Sequence[str]:
        """The problems of a document, also in combination with the stored rows; empty if it is valid."""
        try:
            self._parse(text, file)
        except InvalidPolicy as error:
            return list(error.problems)
        except InvalidInput as error:
            return [str(error)]
        return []

    def versions(self, *, before: int | None = None, most: int = 50) -> Sequence[Version]:
        """The versions of the configuration, newest first."""
        check_page("", "all", most)
        return self._deps.config.history(before=None if before is None else min(before, MAX_ID), most=most)

    def diff(self, one: int, other: int) -> Sequence[Difference]:
        """The differences from one version to another."""
        return self._deps.config.diff(self._deps.require_version(one), self._deps.require_version(other))

    # ------------------------------------------------------------------ changes

    def put(self, change: ChangeContext, text: str, *, file: str = "policy.yaml") -> Change:
        """Replace the policy document."""
        change.actor.require("operator", "change the policy")
        with attributed(self._deps, change, file) as attribution:

            def find_risks() -> Iterable[Risk]:
                after = self._parse(text, file)
                self._deps.lookup.refuse_keys_in_document(text)
                before = self._deps.policies.current()
                return () if before.problems else self._risks(before.policy, after.policy)

            return write_confirmed(
                self._deps, change, find_risks, lambda store: store.put_policy(text, file=file, **attribution)
            )

    def set_tier(self, change: ChangeContext, tier: str, limit: str, bucket: str) -> Change:
        """Set the rate of a limit for the clients of a tier."""
        change.actor.require("operator", "change tiers")
        with attributed(self._deps, change, tier, limit, bucket) as attribution:
            row = TierLimit(scalars.name(tier), scalars.name(limit), **parse_bucket(bucket))

            def find_risks() -> Iterable[Risk]:
                base = self._deps.policies.current().require_valid()
                known = dict.fromkeys([each for rule in base.policy.rules for each in (rule.name, *rule.classes)])
                if limit not in known:  # allowed in imported tables; here it is a typing error
                    raise InvalidInput(f"there is no such limit or class; known are {', '.join(known)}")
                others = [each.row for each in base.tiers if (each.row.tier, each.row.limit_name) != (tier, limit)]
                return self._risks(base.policy, base.recompose(tiers=[*others, row]), is_document=False)

            return write_confirmed(
                self._deps, change, find_risks, lambda store: store.set_tier(tier, limit, bucket, **attribution)
            )

    def remove_tier(self, change: ChangeContext, tier: str, limit: str | None = None) -> Change:
        """Remove the rates of a tier from the table, for one limit or all: those in the document apply again."""
        change.actor.require("operator", "change tiers")
        with attributed(self._deps, change, tier, limit) as attribution:

            def find_risks() -> Iterable[Risk]:
                base = self._deps.policies.current().require_valid()
                removed = [
                    each for each in base.tiers if each.row.tier == tier and limit in (None, each.row.limit_name)
                ]
                if not removed:
                    raise NotFound("the tables have no such limit of a tier; edit the policy document instead")
                after = base.recompose(tiers=[each.row for each in base.tiers if each not in removed])
                return self._risks(base.policy, after, is_document=False)

            return write_confirmed(
                self._deps, change, find_risks, lambda store: store.remove_tier(tier, limit, **attribution)
            )

    def set_route(self, change: ChangeContext, path: str, cost: int, *, route_class: str | None = None) -> Change:
        """Set the cost of requests to a route, and optionally its class."""
        change.actor.require("operator", "change routes")
        with attributed(self._deps, change, path, route_class) as attribution:
            checked = scalars.whole(0, 2**53, example=5)(cost)
            row = RouteCost(scalars.text(path), checked, route_class and scalars.name(route_class))

            def find_risks() -> Iterable[Risk]:
                base = self._deps.policies.current().require_valid()
                others = [each.row for each in base.routes if each.row.path != path]
                return self._risks(base.policy, base.recompose(routes=[*others, row]), is_document=False)

            return write_confirmed(
                self._deps,
                change,
                find_risks,
                lambda store: store.set_route(path, cost, route_class=route_class, **attribution),
            )

    def remove_route(self, change: ChangeContext, path: str) -> Change:
        """Remove a route from the table: its entry in the document applies again."""
        change.actor.require("operator", "change routes")
        with attributed(self._deps, change, path) as attribution:

            def find_risks() -> Iterable[Risk]:
                base = self._deps.policies.current().require_valid()
                left = [each.row for each in base.routes if each.row.path != path]
                if len(left) == len(base.routes):
                    raise NotFound("the tables have no such route; edit the policy document instead")
                return self._risks(base.policy, base.recompose(routes=left), is_document=False)

            return write_confirmed(
                self._deps, change, find_risks, lambda store: store.remove_route(path, **attribution)
            )

    # ------------------------------------------------------------------ rollback

    def preview_rollback(
        self, actor: Actor, version: int, *, sections: Collection[str] | None = None
    ) -> RollbackPreview:
        """The differences, risks and live blocks of a rollback, without doing it."""
        actor.require("operator", "roll back")
        self._deps.require_version(version)
        newest, chosen = self._deps.config.version, {*SECTIONS} if sections is None else {*sections}
        risks = list(dict.fromkeys(self._rollback_risks(version, chosen)))
        return RollbackPreview(
            version=newest,
            differences=tuple([each for each in self.diff(newest, version) if each.section in chosen]),
            undone=tuple([each for each in self.versions() if each.number > version]),
            risks=tuple(risks[: guardrails.MAX_RISKS]),
            live=tuple(self._blocks.list_live_only()),
        )

    def rollback(self, change: ChangeContext, version: int, *, sections: Collection[str] | None = None) -> Change:
        """Restore the configuration of a version, or some sections of it, as a new version.

        Live blocks follow: those whose rows are gone are lifted, and restored ones are active again. Live blocks
        outside the configuration are kept, and counted in a note.
        """
        change.actor.require("operator", "roll back")
        self._deps.require_version(version)
        if unknown := {*(sections or ())} - {*SECTIONS}:
            raise InvalidInput(f"there is no section {', '.join(sorted(unknown))}; known are {', '.join(SECTIONS)}")
        with attributed(self._deps, change) as attribution:
            result = write_confirmed(
                self._deps,
                change,
                lambda: self._rollback_risks(version, {*SECTIONS} if sections is None else {*sections}),
                lambda store: store.rollback(version, sections=sections, **attribution),
            )
        if result.version is None:
            return result
        number = result.version.number
        changed = [each for each in self.diff(number - 1, number) if each.section == "blocked"]
        return replace(result, notes=(*result.notes, *self._blocks.apply_differences(changed)))

    # ------------------------------------------------------------------ helpers

    def _parse(self, text: str, file: str) -> BasePolicy:
        """The base policy that would result from another document; InvalidPolicy if it is invalid."""
        suffix = file.rpartition(".")[2].lower()
        format = "yaml" if suffix == "yml" else suffix
        if format not in FORMATS:
            raise InvalidPolicy([f"{file}: cannot tell its format; name the file .yaml, .yml, .toml or .json"])
        document = PolicyDocument(text, format, file)
        raw_keys.reject_raw_keys(document, None)
        with self._deps.reading() as connection:
            base = base_policy_at(connection, newest_version(connection), document).require_valid()
            base.template.compose(queries.sample_rows(connection))
        return base

    def _risks(self, before: Policy, after: Policy, *, is_document: bool = True) -> Iterator[Risk]:
        """The risks of a policy, compared with the current one and with that of an hour ago."""
        yield from guardrails.policy_risks(before, after, is_document=is_document)
        if (earlier := effective_an_hour_ago(self._deps, {})) is not None:
            yield from guardrails.gradual_policy_risks(earlier.base.policy, before, after)

    def _rollback_risks(self, version: int, sections: Collection[str]) -> Iterator[Risk]:
        with self._deps.reading() as connection:
            newest = newest_version(connection)
            now = self._deps.policies.get(connection)
            then = base_policy_at(connection, version)
            changed = [each for each in diff_versions(connection, newest, version) if each.section in sections]
        if {*BASE_SECTIONS} & {*sections}:
            source = {section: then if section in sections else now for section in BASE_SECTIONS}
            mixed = replace(
                now,
                document=source["documents"].document,
                tiers=source["tiers"].tiers,
                routes=source["routes"].routes,
            )
            yield from guardrails.policy_risks(now.policy, mixed.recompose())
        yield from guardrails.row_risks(changed)
        if not now.problems and "documents" not in sections:
            restored = [each.after for each in changed if each.before is None and isinstance(each.after, OverrideRow)]
            for row in restored[:MAX_CHECKED_OVERRIDES]:
                yield from self._overrides.risks(self._deps.resolve(ClientRef(row.kind, row.value)), row)


def _tier_limits(base: BasePolicy, tier: str) -> Iterator[TierLimitView]:
    in_table = {each.row.limit_name: each for each in base.tiers if each.row.tier == tier}
    for rule in base.policy.rules:
        if tier in rule.tiers:
            row = next((in_table[name] for name in (rule.name, *rule.classes) if name in in_table), None)
            bucket = _format_tier_bucket(rule.tiers[tier])
            if row is None:
                yield TierLimitView(rule.name, bucket, "policy")
            else:
                yield TierLimitView(rule.name, bucket, "table", row.id, row.since)


def _rule_view(rule: Rule) -> RuleView:
    return RuleView(
        name=rule.name,
        by="+".join(rule.by) or "global",
        bucket=None if rule.limit is None else format_bucket(rule.limit),
        algorithm=None if not rule.limits else rule.limits[0].algorithm,
        tiers={tier: format_bucket(limit) for tier, limit in rule.tiers.items()},
        routes=tuple(template.text for template in rule.templates),
        classes=rule.classes,
        methods=tuple(sorted(rule.methods)),
        cost=rule.cost,
        on_failure=rule.on_failure,
        shadow=rule.shadow,
        count_when=None if rule.count_when is None else rule.count_when.text,
    )


def _format_tier_bucket(limit: Limit) -> str:
    bucket = format_bucket(limit)
    return bucket if limit.algorithm == "token_bucket" else f"{bucket}, {limit.algorithm}"


def _route_key(path: str) -> tuple[tuple[str, ...], Any]:
    method, template = scalars.route(path)
    return (() if method is None else (method,)), template
