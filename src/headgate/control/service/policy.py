"""The policy: its document, tiers, routes, versions and rollback."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from headgate.control.config import queries, raw_keys
from headgate.control.config.history import Difference, Version, diff_versions
from headgate.control.config.reading import newest_version
from headgate.control.config.rows import (
    BASE_SECTIONS,
    RESTORABLE_SECTIONS,
    OverrideRow,
    PolicyDocument,
    RouteCost,
    TierLimit,
)
from headgate.control.config.store import ConfigStore, document_format
from headgate.control.service import guardrails, models
from headgate.control.service.dependencies import MAX_ID, ServiceDependencies, TopicService
from headgate.control.service.effective_policy import NO_CLIENT, BasePolicy, base_policy_at, format_limit
from headgate.control.service.errors import NotFound, Risk
from headgate.control.service.listing import check_page
from headgate.control.service.overrides import OverrideService, effective_an_hour_ago, parse_bucket
from headgate.errors import InvalidInput, InvalidPolicy
from headgate.limits import DEFAULT_ALGORITHM
from headgate.policy import scalars

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

    from headgate.control.service.blocks import BlockService
    from headgate.control.service.models import Actor, Change, ChangeContext
    from headgate.policy.model import Policy, Rule

    Texts: TypeAlias = Iterable[str | None]
    Writer: TypeAlias = Callable[[ConfigStore, dict[str, Any]], Version | None]

__all__ = ["PolicyService"]

MAX_CHECKED_OVERRIDES: Final = 100
"""Overrides restored by a rollback that are compared with the current limits of their clients."""


class PolicyService(TopicService):
    """Shows and changes the policy document, tiers and routes; shows versions and rolls back to them."""

    def __init__(self, deps: ServiceDependencies, overrides: OverrideService, blocks: BlockService) -> None:
        super().__init__(deps)
        self._overrides = overrides
        self._blocks = blocks

    def get(self, version: int | None = None) -> models.PolicyView:
        """The policy document, now or at a version, and the limits that result from it and the tables."""
        if version is not None:
            self._deps.require_version(version)
        with self._deps.reading() as connection:
            at = newest_version(connection) if version is None else version
            base = self._deps.base_policy(connection) if version is None else base_policy_at(connection, at)
        stored, rules = base.document, tuple(map(_rule_view, base.policy.rules))
        document = PolicyDocument("", "yaml", "policy.yaml") if stored is None else stored.row
        since = None if stored is None else stored.since
        return models.PolicyView(at, since, *document, rules, base.problems or base.policy.warnings)

    def tiers(self) -> Sequence[models.TierView]:
        """All tiers, with their limits and the number of clients in each."""
        with self._deps.reading() as connection:
            base = self._deps.base_policy(connection)
            policy, counts = base.policy, queries.count_assignments(connection)
            by_kind = queries.group_by_kind(client.identity for client in policy.clients)
            rows = queries.rows_of_clients(connection, by_kind, ["clients"])["clients"]
        assigned = {(each.row.kind, each.row.value) for each in rows}
        for client in policy.clients:
            if client.tier is not None and client.identity not in assigned:
                counts[client.tier] = counts.get(client.tier, 0) + 1
        default = policy.default_tier
        names = dict.fromkeys([*policy.tiers, *([default] if default else []), *sorted(counts)])
        tiers = ((name, tuple(_tier_limits(base, name))) for name in names)
        return [models.TierView(name, name == default, limits, counts.get(name, 0)) for name, limits in tiers]

    def routes(self) -> Sequence[models.RouteView]:
        """All routes in the document or in a table."""
        base = self._deps.current_policy()
        from_tables = {_route_key(each.row.path): each for each in base.routes}
        views = []
        for route in base.policy.routes:
            methods = tuple(sorted(route.methods))
            row = from_tables.get((methods, route.template))
            rule = methods, route.cost, route.route_class, route.on_failure
            if row is None:
                views.append(models.RouteView(route.template.text, *rule, "policy"))
            else:
                views.append(models.RouteView(row.row.path, *rule, "table", row.id, row.since))
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

    def put(self, change: ChangeContext, text: str, *, file: str = "policy.yaml") -> Change:
        """Replace the policy document."""
        change.actor.require("operator", "change the policy")
        return self._write(
            change,
            [file],
            lambda: self.document_risks(text, file),
            lambda store, by: store.put_policy(text, file=file, **by),
        )

    def document_risks(self, text: str, file: str) -> Iterable[Risk]:
        """The risks of another document; InvalidPolicy or InvalidInput if it cannot be saved."""
        after = self._parse(text, file)
        self._deps.lookup.refuse_keys_in_document(text)
        before = self._deps.current_policy()
        return () if before.problems else self._risks(before.policy, after.policy)

    def set_tier(self, change: ChangeContext, tier: str, limit: str, bucket: str) -> Change:
        """Set the rate of a limit for the clients of a tier."""

        def edit(base: BasePolicy) -> Policy:
            row = TierLimit(scalars.name(tier), scalars.name(limit), **parse_bucket(bucket))
            known = dict.fromkeys([each for rule in base.policy.rules for each in (rule.name, *rule.classes)])
            if limit not in known:  # allowed in imported tables; here it is a typing error
                raise InvalidInput(f"there is no such limit or class; known are {', '.join(known)}")
            others = [each.row for each in base.tiers if (each.row.tier, each.row.limit_name) != (tier, limit)]
            return base.recompose(tiers=[*others, row])

        texts = [tier, limit, bucket]
        return self._edit_table(
            change, "tiers", texts, edit, lambda store, by: store.set_tier(tier, limit, bucket, **by)
        )

    def remove_tier(self, change: ChangeContext, tier: str, limit: str | None = None) -> Change:
        """Remove the rates of a tier from the table, for one limit or all: those in the document apply again."""

        def edit(base: BasePolicy) -> Policy:
            rows = [each.row for each in base.tiers]
            left = [row for row in rows if row.tier != tier or limit not in (None, row.limit_name)]
            if left == rows:
                raise NotFound("the tables have no such limit of a tier; edit the policy document instead")
            return base.recompose(tiers=left)

        texts = [tier, limit]
        return self._edit_table(change, "tiers", texts, edit, lambda store, by: store.remove_tier(tier, limit, **by))

    def set_route(self, change: ChangeContext, path: str, cost: int, *, route_class: str | None = None) -> Change:
        """Set the cost of requests to a route, and optionally its class."""

        def edit(base: BasePolicy) -> Policy:
            checked = scalars.whole(0, 2**53, example=5)(cost)
            row = RouteCost(scalars.text(path), checked, route_class and scalars.name(route_class))
            return base.recompose(routes=[*(each.row for each in base.routes if each.row.path != path), row])

        def write(store: ConfigStore, by: dict[str, Any]) -> Version | None:
            return store.set_route(path, cost, route_class=route_class, **by)

        return self._edit_table(change, "routes", [path, route_class], edit, write)

    def remove_route(self, change: ChangeContext, path: str) -> Change:
        """Remove a route from the table: its entry in the document applies again."""

        def edit(base: BasePolicy) -> Policy:
            left = [each.row for each in base.routes if each.row.path != path]
            if len(left) == len(base.routes):
                raise NotFound("the tables have no such route; edit the policy document instead")
            return base.recompose(routes=left)

        return self._edit_table(change, "routes", [path], edit, lambda store, by: store.remove_route(path, **by))

    def preview_rollback(
        self, actor: Actor, version: int, *, sections: Collection[str] | None = None
    ) -> models.RollbackPreview:
        """The differences, risks and live blocks of a rollback, without doing it."""
        actor.require("operator", "roll back")
        self._deps.require_version(version)
        newest, chosen = self._deps.config.version, {*RESTORABLE_SECTIONS} if sections is None else {*sections}
        risks = list(dict.fromkeys(self._rollback_risks(version, chosen)))
        return models.RollbackPreview(
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
        if unknown := {*(sections or ())} - {*RESTORABLE_SECTIONS}:
            known = ", ".join(RESTORABLE_SECTIONS)
            raise InvalidInput(f"there is no section {', '.join(sorted(unknown))}; known are {known}")
        result = self._write(
            change,
            [],
            lambda: self._rollback_risks(version, {*RESTORABLE_SECTIONS} if sections is None else {*sections}),
            lambda store, by: store.rollback(version, sections=sections, **by),
        )
        if result.version is None:
            return result
        number = result.version.number
        changed = [each for each in self.diff(number - 1, number) if each.section == "blocked"]
        return replace(result, notes=(*result.notes, *self._blocks.apply_differences(changed)))

    def _parse(self, text: str, file: str) -> BasePolicy:
        """The base policy that would result from another document; InvalidPolicy if it is invalid."""
        document = PolicyDocument(text, document_format(file), file)
        raw_keys.reject_raw_keys(document, None)
        with self._deps.reading() as connection:
            base = base_policy_at(connection, newest_version(connection), document).require_valid()
            base.template.compose(queries.sample_rows(connection))
        return base

    def _write(
        self, change: ChangeContext, texts: Texts, find_risks: Callable[[], Iterable[Risk]], write: Writer
    ) -> Change:
        """Write a change that stores these texts, if its risks are confirmed."""
        with self._deps.attributed(change, *texts) as attribution:
            return self._deps.write_confirmed(change, find_risks, lambda store: write(store, attribution))

    def _edit_table(
        self, change: ChangeContext, table: str, texts: Texts, edit: Callable[[BasePolicy], Policy], write: Writer
    ) -> Change:
        """Write a change of tiers or routes after which the policy is what `edit` returns."""
        change.actor.require("operator", f"change {table}")

        def find_risks() -> Iterable[Risk]:
            base = self._deps.current_policy().require_valid()
            return self._risks(base.policy, edit(base), is_document=False)

        return self._write(change, texts, find_risks, write)

    def _risks(self, before: Policy, after: Policy, *, is_document: bool = True) -> Iterator[Risk]:
        """The risks of a policy, compared with the current one and with that of an hour ago."""
        yield from guardrails.policy_risks(before, after, is_document=is_document)
        if (earlier := effective_an_hour_ago(self._deps, NO_CLIENT)) is not None:
            yield from guardrails.gradual_policy_risks(earlier.base.policy, before, after)

    def _rollback_risks(self, version: int, sections: Collection[str]) -> Iterator[Risk]:
        with self._deps.reading() as connection:
            newest = newest_version(connection)
            now = self._deps.base_policy(connection)
            then = base_policy_at(connection, version)
            changed = [each for each in diff_versions(connection, newest, version) if each.section in sections]
        if {*BASE_SECTIONS} & {*sections}:
            of = {section: then if section in sections else now for section in BASE_SECTIONS}
            mixed = replace(now, document=of["documents"].document, tiers=of["tiers"].tiers, routes=of["routes"].routes)
            yield from guardrails.policy_risks(now.policy, mixed.recompose())
        yield from guardrails.row_risks(changed)
        if not now.problems and "documents" not in sections:
            restored = [each.after for each in changed if each.before is None and isinstance(each.after, OverrideRow)]
            for row in restored[:MAX_CHECKED_OVERRIDES]:
                yield from self._overrides.risks(self._deps.resolve(models.ClientRef(row.kind, row.value)), row)


def _tier_limits(base: BasePolicy, tier: str) -> Iterator[models.TierLimitView]:
    in_table = {each.row.limit_name: each for each in base.tiers if each.row.tier == tier}
    for rule in base.policy.rules:
        if tier in rule.tiers:
            row = next((in_table[name] for name in (rule.name, *rule.classes) if name in in_table), None)
            limit = rule.tiers[tier]
            is_default = limit.algorithm == DEFAULT_ALGORITHM or limit.calendar is not None
            bucket = format_limit(limit) + ("" if is_default else f", {limit.algorithm}")
            if row is None:
                yield models.TierLimitView(rule.name, bucket, "policy")
            else:
                yield models.TierLimitView(rule.name, bucket, "table", row.id, row.since)


def _rule_view(rule: Rule) -> models.RuleView:
    return models.RuleView(
        name=rule.name,
        by="+".join(rule.by) or "global",
        bucket=None if rule.limit is None else format_limit(rule.limit),
        algorithm=None if not rule.limits else rule.limits[0].algorithm,
        tiers={tier: format_limit(limit) for tier, limit in rule.tiers.items()},
        routes=tuple(template.text for template in rule.templates),
        classes=rule.classes,
        methods=tuple(sorted(rule.methods)),
        cost=rule.cost,
        on_failure=rule.on_failure,
        shadow=rule.shadow,
        count_when=None if rule.count_when is None else rule.count_when.text,
    )


def _route_key(path: str) -> tuple[tuple[str, ...], Any]:
    method, template = scalars.route(path)
    return (() if method is None else (method,)), template
