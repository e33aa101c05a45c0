"""Overrides: custom limits for single clients."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any, Final

from headgate._limit_syntax import parse
from headgate.control.config.queries import rows_of_clients, version_at
from headgate.control.config.reading import newest_version
from headgate.control.config.rows import OverrideRow, bucket_columns
from headgate.control.config.store import optional_microseconds
from headgate.control.service import guardrails, listing
from headgate.control.service.client_lookup import require_network_role
from headgate.control.service.dependencies import ServiceDependencies, TopicService, to_change
from headgate.control.service.effective_policy import applicable_limits, base_policy_at, effective_policy
from headgate.control.service.redaction import redact_errors
from headgate.errors import InvalidInput, InvalidLimit
from headgate.policy import scalars

if TYPE_CHECKING:
    from collections.abc import Iterator

    from headgate.control.service.effective_policy import ClientFacts, EffectivePolicy
    from headgate.control.service.errors import Risk
    from headgate.control.service.models import Change, ChangeContext, ClientRef, OverrideSpec, OverrideView, Page
    from headgate.limits import Limit

__all__ = ["OverrideService", "effective_an_hour_ago", "parse_bucket"]

GRADUAL_WINDOW_US: Final = 3_600_000_000
"""Changes within an hour are compared as one, so that a large change in small steps is still noticed."""


class OverrideService(TopicService):
    """Lists, adds, changes and removes overrides."""

    def list(
        self,
        *,
        search: str = "",
        state: str = "all",
        client: ClientRef | None = None,
        after: str | None = None,
        most: int = 50,
    ) -> Page[OverrideView]:
        """The overrides in the config store, newest first, then those in the policy document."""
        with listing.open_list(self._deps, search=search, state=state, who=client, after=after, most=most) as query:
            return listing.overrides(query)

    def get(self, id: int) -> OverrideView:
        """One override in the config store; NotFound if there is none with this id."""
        with self._deps.reading() as connection:
            found = self._deps.find_row(connection, "overrides", "override", id)
            return listing.override_view(found, self._deps.base_policy(connection), self._deps.now_us())

    def add(self, change: ChangeContext, client: ClientRef, spec: OverrideSpec) -> Change:
        """Give a client a custom limit."""
        change.actor.require("support", "give overrides")
        return self._put(change, None, client, spec)

    def change(self, change: ChangeContext, id: int, spec: OverrideSpec) -> Change:
        """Replace an override of a client with another one of the same client."""
        change.actor.require("support", "change overrides")
        return self._put(change, id, self.get(id).who, spec)

    def remove(self, change: ChangeContext, id: int) -> Change:
        """Remove an override: the limits of the client's tier apply again."""
        change.actor.require("support", "remove overrides")
        require_network_role(change.actor, self.get(id).who, "remove overrides")
        with self._deps.attributed(change) as attribution:
            return to_change(self._deps.config.remove_override(id, **attribution))

    def risks(self, effective: EffectivePolicy, row: OverrideRow) -> Iterator[Risk]:
        """The risks of an override, compared with the limits that the client has now and had an hour ago."""
        base, client = effective.base.require_valid(), effective.facts.who
        (override,) = base.template.compose({"overrides": [row]}, rows_only=True).overrides
        now_us = self._deps.now_us()

        def replaced_limits(policy: EffectivePolicy, at_us: int) -> list[Limit]:
            _, applicable = applicable_limits(policy, at_us)
            same = [each for each in applicable if each.rule.name == override.rule]
            classes = None, override.route_class  # an override of another class stays
            if override.route_class is not None:
                same = [each for each in same if getattr(each.origin, "route_class", None) in classes]
            return [each.key.limit for each in same]

        now = replaced_limits(effective, now_us)
        name = self._deps.lookup.name_of(client)
        yield from guardrails.limit_risks(now, override.limit, whose=name)
        if (earlier := effective_an_hour_ago(self._deps, effective.facts)) is not None:
            then = replaced_limits(earlier, now_us - GRADUAL_WINDOW_US)
            yield from guardrails.gradual_limit_risks(then, now, override.limit, whose=name)

    def _put(self, change: ChangeContext, id: int | None, client: ClientRef, spec: OverrideSpec) -> Change:
        deps = self._deps
        names = spec.limit, spec.route_class
        with deps.attributed(change, spec.bucket, *names, *client.texts) as attribution:
            client = deps.lookup.canonical(client, texts=[change.reason, *names])
            require_network_role(change.actor, client, "give overrides")
            deps.require_future(spec.valid_until)
            limit, route_class = (name and scalars.name(name) for name in names)
            start_us, end_us = map(optional_microseconds, (spec.valid_from, spec.valid_until))
            rate = parse_bucket(spec.bucket)
            row = OverrideRow(*client, limit, route_class, **rate, valid_from_us=start_us, valid_until_us=end_us)
            notes = deps.lookup.unseen_note(client)
            if duplicate := deps.resolve(client).find_duplicate(row, ignore=id):
                raise InvalidInput(
                    f"override {duplicate} is for the same client, limit and time: change it, or remove it"
                )
            result = deps.write_confirmed(
                change,
                lambda: self.risks(deps.resolve(client), row),
                lambda store: store.override(client, id=id, **asdict(spec), **attribution),
            )
            return replace(result, notes=(*notes, *result.notes))


def effective_an_hour_ago(deps: ServiceDependencies, facts: ClientFacts) -> EffectivePolicy | None:
    """The effective policy of a client an hour ago, but in the tier that it has now, as a tier is chosen deliberately.
    None if nothing has changed since, or if the policy was invalid."""
    with deps.reading() as connection:
        version = version_at(connection, deps.now_us() - GRADUAL_WINDOW_US)
        if version == newest_version(connection):
            return None
        base = base_policy_at(connection, version)
        rows = rows_of_clients(connection, facts.identities, version=version)
        rows |= rows_of_clients(connection, facts.identities, ["clients"])
    return None if base.problems else effective_policy(base, facts, rows)


def parse_bucket(bucket: str) -> dict[str, Any]:
    """The columns of a rate; InvalidLimit if it cannot be parsed, or allows nothing."""
    with redact_errors(bucket):
        phrase = parse(bucket)
        if phrase.quota == 0:
            raise InvalidLimit("a limit of 0 allows nothing; block the client instead")
        return bucket_columns(phrase)
