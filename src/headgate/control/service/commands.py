"""What changes the configuration: by whom, after which second look, and signed. Nothing is done by halves."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from headgate.control.config.history import diff_versions
from headgate.control.config.queries import find_row, rows_of_clients, version_at
from headgate.control.config.reading import newest_version
from headgate.control.config.rows import (
    BASE_SECTIONS,
    SECTIONS,
    OverrideRow,
    RouteCost,
    TierLimit,
    bucket_columns,
    microseconds,
)
from headgate.control.service import guardrails
from headgate.control.service.attribution import done, in_the_past, judged, signed, told_of
from headgate.control.service.candidates import noun_of
from headgate.control.service.client_lookup import is_network
from headgate.control.service.effective_policy import changed, ground_at, held
from headgate.control.service.errors import NotFound
from headgate.control.service.models import Change, ClientRef
from headgate.control.service.queries import ServiceQueries
from headgate.control.service.redaction import discreetly
from headgate.control.service.usage import faced
from headgate.errors import InvalidInput, InvalidPolicy
from headgate.policy import scalars

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping
    from datetime import datetime

    from headgate.control.service.effective_policy import BasePolicy, EffectivePolicy
    from headgate.control.service.errors import Risk
    from headgate.control.service.models import Actor
    from headgate.control.service.usage import ApplicableLimit
    from headgate.limits import Limit
    from headgate.policy.model import Policy

__all__ = ["ServiceCommands"]

MEMORY_US: Final = 3_600_000_000
"""Changes within an hour are judged together: several small steps may be one large one."""
MOST_JUDGED: Final = 100
"""Overrides that come back with a version, and are compared with what their clients have now."""


class ServiceCommands(ServiceQueries):
    """The changes of the configuration.

    Each takes who does it and why, the codes of the dangers that were confirmed, and the version that it is `based_on`.
    NotAllowed, if the role is too low; NeedsConfirmation, if it is probably a mistake; Conflict, if the same was
    changed since that version.
    """

    # ------------------------------------------------------------------ one client

    def add_override(
        self,
        actor: Actor,
        who: ClientRef,
        bucket: str,
        *,
        limit: str | None = None,
        route_class: str | None = None,
        valid_from: datetime | None = None,
        valid_until: datetime | None = None,
        reason: str,
        confirm: Collection[str] = (),
        based_on: int | None = None,
    ) -> Change:
        """Give a client numbers of its own on a limit, perhaps for a time."""
        self._allow(actor, "support", "give overrides")
        given = {"limit": limit, "route_class": route_class, "valid_from": valid_from, "valid_until": valid_until}
        return self._put_override(actor, None, who, bucket, given, reason, confirm, based_on)

    def change_override(
        self,
        actor: Actor,
        id: int,
        bucket: str,
        *,
        limit: str | None = None,
        route_class: str | None = None,
        valid_from: datetime | None = None,
        valid_until: datetime | None = None,
        reason: str,
        confirm: Collection[str] = (),
        based_on: int | None = None,
    ) -> Change:
        """Give an override other numbers, another time, another limit: all of it as it is said here."""
        self._allow(actor, "support", "change overrides")
        self._possible(id, "override")
        with self._reading() as connection:
            found = find_row(connection, "overrides", id)
        if found is None:
            raise NotFound(f"there is no override {id}")
        given = {"limit": limit, "route_class": route_class, "valid_from": valid_from, "valid_until": valid_until}
        who = ClientRef(found.row.kind, found.row.value)
        return self._put_override(actor, id, who, bucket, given, reason, confirm, based_on)

    def remove_override(
        self,
        actor: Actor,
        id: int,
        *,
        reason: str,
        confirm: Collection[str] = (),
        based_on: int | None = None,
    ) -> Change:
        """Let the numbers of its tier hold for a client again."""
        self._allow(actor, "support", "remove overrides")
        self._allow_of(actor, self.override(id).who, "remove overrides")
        with self._signing(actor, reason) as by:
            return done(self._config.remove_override(id, **by, based_on=based_on))

    def assign(
        self,
        actor: Actor,
        who: ClientRef,
        tier: str | None,
        *,
        label: str | None = None,
        reason: str,
        confirm: Collection[str] = (),
        based_on: int | None = None,
    ) -> Change:
        """Put a client into a tier. A name that it has stays, if none is given."""
        self._allow(actor, "support", "assign tiers")
        with self._signing(actor, reason, tier, label, *told_of(who)) as by:
            who = self._finder.checked(who, beside=[reason, label])
            self._allow_of(actor, who, "assign tiers")
            ground = self._ground()
            base = ground.base
            known = dict.fromkeys([*base.tiers, *([base.default_tier] if base.default_tier is not None else [])])
            if tier is not None and tier not in known:
                raise InvalidInput(f"there is no such tier; known are {', '.join(known) or 'none'}")
            before, named = self._config.clients(who=who), {who.kind: (who.value,)}
            names = [each.row.label for each in before] or [each.label for each in ground.entries_of(named, "clients")]
            label = label or next(iter(names), None)
            notes = self._unseen(who)
            return done(self._config.assign(who, tier, label=label, **by, based_on=based_on), *notes)

    def unassign(
        self,
        actor: Actor,
        who: ClientRef,
        *,
        reason: str,
        confirm: Collection[str] = (),
        based_on: int | None = None,
    ) -> Change:
        """Let the document, or the tier of everybody, say again in which tier a client is."""
        self._allow(actor, "support", "assign tiers")
        with self._signing(actor, reason, *told_of(who)) as by:
            who = self._finder.checked(who, beside=[reason])
            self._allow_of(actor, who, "assign tiers")
            if not (before := self._config.clients(who=who)):
                raise NotFound("nothing in the config store says in which tier this client is")
            row, is_named = before[0].row, [*self._ground().entries_of({who.kind: (who.value,)}, "clients")]
            if row.tier is not None and row.label and not is_named:  # else nobody would find it by its name any more
                return done(self._config.assign(who, None, label=row.label, **by, based_on=based_on))
            return done(self._config.unassign(who, **by, based_on=based_on))

    # ------------------------------------------------------------------ everybody

    def set_tier(
        self,
        actor: Actor,
        tier: str,
        limit: str,
        bucket: str,
        *,
        reason: str,
        confirm: Collection[str] = (),
        based_on: int | None = None,
    ) -> Change:
        """Give the clients of a tier these numbers on a limit."""
        self._allow(actor, "operator", "change tiers")
        with self._signing(actor, reason, tier, limit, bucket) as by:
            made = TierLimit(scalars.name(tier), scalars.name(limit), **_numbers(bucket))

            def judge() -> Iterable[Risk]:
                ground = self._readable()
                known = dict.fromkeys([each for rule in ground.base.rules for each in (rule.name, *rule.classes)])
                if limit not in known:  # a table may bring a limit of its own; by hand that is a slip
                    raise InvalidInput(f"there is no such limit, nor such a class; known are {', '.join(known)}")
                others = [each.row for each in ground.tiers if (each.row.tier, each.row.limit_name) != (tier, limit)]
                return self._of_policy(ground.base, changed(ground, tiers=[*others, made]), document=False)

            return judged(
                self._config, judge, confirm, lambda store: store.set_tier(tier, limit, bucket, **by, based_on=based_on)
            )

    def remove_tier(
        self,
        actor: Actor,
        tier: str,
        limit: str | None = None,
        *,
        reason: str,
        confirm: Collection[str] = (),
        based_on: int | None = None,
    ) -> Change:
        """Take the numbers of a tier out of the table, on one limit or on all: those of the document hold again."""
        self._allow(actor, "operator", "change tiers")
        with self._signing(actor, reason, tier, limit) as by:

            def judge() -> Iterable[Risk]:
                ground = self._readable()
                mine = [each for each in ground.tiers if each.row.tier == tier and limit in (None, each.row.limit_name)]
                if not mine:
                    raise NotFound("the tables have no such numbers of a tier; the policy document's are changed there")
                after = changed(ground, tiers=[each.row for each in ground.tiers if each not in mine])
                return self._of_policy(ground.base, after, document=False)

            return judged(
                self._config, judge, confirm, lambda store: store.remove_tier(tier, limit, **by, based_on=based_on)
            )

    def set_route(
        self,
        actor: Actor,
        path: str,
        cost: int,
        *,
        route_class: str | None = None,
        reason: str,
        confirm: Collection[str] = (),
        based_on: int | None = None,
    ) -> Change:
        """Say what a request to a route costs, and perhaps of which class the route is."""
        self._allow(actor, "operator", "change routes")
        with self._signing(actor, reason, path, route_class) as by:
            whole = scalars.whole(0, 2**53, example=5)(cost)
            made = RouteCost(scalars.text(path), whole, route_class and scalars.name(route_class))

            def judge() -> Iterable[Risk]:
                ground = self._readable()
                others = [each.row for each in ground.routes if each.row.path != path]
                return self._of_policy(ground.base, changed(ground, routes=[*others, made]), document=False)

            return judged(
                self._config,
                judge,
                confirm,
                lambda store: store.set_route(path, cost, route_class=route_class, **by, based_on=based_on),
            )

    def remove_route(
        self,
        actor: Actor,
        path: str,
        *,
        reason: str,
        confirm: Collection[str] = (),
        based_on: int | None = None,
    ) -> Change:
        """Let the document say again what a route costs."""
        self._allow(actor, "operator", "change routes")
        with self._signing(actor, reason, path) as by:

            def judge() -> Iterable[Risk]:
                ground = self._readable()
                left = [each.row for each in ground.routes if each.row.path != path]
                if len(left) == len(ground.routes):
                    raise NotFound("the tables have no such route; what the policy document says is changed there")
                return self._of_policy(ground.base, changed(ground, routes=left), document=False)

            return judged(self._config, judge, confirm, lambda store: store.remove_route(path, **by, based_on=based_on))

    def put_policy(
        self,
        actor: Actor,
        text: str,
        *,
        file: str = "policy.yaml",
        reason: str,
        confirm: Collection[str] = (),
        based_on: int | None = None,
    ) -> Change:
        """Take another policy document."""
        self._allow(actor, "operator", "change the policy")
        with self._signing(actor, reason, file) as by:

            def judge() -> Iterable[Risk]:
                after = self._checked(text, file)
                self._finder.refuse_keys_in_document(text)
                before = self._ground()
                return () if before.problems else self._of_policy(before.base, after.base)  # the first drops nothing

            return judged(
                self._config, judge, confirm, lambda store: store.put_policy(text, file=file, **by, based_on=based_on)
            )

    def rollback(
        self,
        actor: Actor,
        version: int,
        *,
        sections: Collection[str] | None = None,
        reason: str,
        confirm: Collection[str] = (),
        based_on: int | None = None,
    ) -> Change:
        """Make everything as it was at a version, or only some sections of it; that is a version of its own."""
        self._allow(actor, "operator", "roll back")
        self._existing(version)
        if unknown := {*(sections or ())} - {*SECTIONS}:
            raise InvalidInput(f"there are no {', '.join(sorted(unknown))}; known are {', '.join(SECTIONS)}")
        with self._signing(actor, reason) as by:
            return judged(
                self._config,
                lambda: self._of_rollback(version, {*SECTIONS} if sections is None else {*sections}),
                confirm,
                lambda store: store.rollback(version, sections=sections, **by, based_on=based_on),
            )

    # ------------------------------------------------------------------ within

    def _put_override(
        self,
        actor: Actor,
        id: int | None,
        who: ClientRef,
        bucket: str,
        given: dict[str, Any],
        reason: str,
        confirm: Collection[str],
        based_on: int | None,
    ) -> Change:
        names = given["limit"], given["route_class"]
        with self._signing(actor, reason, bucket, *names, *told_of(who)) as by:
            who = self._finder.checked(who, beside=[reason, *names])
            self._allow_of(actor, who, "give overrides")
            in_the_past(given["valid_until"], self._now_us())
            since, until = (
                None if each is None else microseconds(scalars.instant(each))
                for each in (given["valid_from"], given["valid_until"])
            )
            limit, route_class = (name and scalars.name(name) for name in names)
            rate = _numbers(bucket)
            made = OverrideRow(*who, limit, route_class, **rate, valid_from_us=since, valid_until_us=until)
            notes = self._unseen(who)
            if same := self._holding(who)[1].same_override(made, but=id):
                raise InvalidInput(f"override {same} is for the same client, limit and time: change it, or remove it")
            change = judged(
                self._config,
                lambda: self._of_override(who, made),
                confirm,
                lambda store: store.override(who, bucket, id=id, **given, **by, based_on=based_on),
            )
            return replace(change, notes=(*notes, *change.notes))

    def _of_override(self, who: ClientRef, made: OverrideRow) -> Iterator[Risk]:
        """Against the numbers that the client has now."""
        known, holding = self._holding(who)
        if holding.ground.problems:
            raise InvalidPolicy(holding.ground.problems)
        (override,) = holding.ground.frame.read({"overrides": [made]}, alone=True).overrides
        now_us = self._now_us()

        def numbers_in(held_then: EffectivePolicy, at_us: int) -> list[Limit]:
            _, met = faced(held_then, known.values, kind=who.kind, now_us=at_us)
            return [
                each.key.limit
                for each in met
                if each.rule.name == override.rule
                and (override.route_class is None or _class_of(each) in (None, override.route_class))
            ]

        now = numbers_in(holding, now_us)
        yield from guardrails.of_numbers(now, override.limit, whose=self._finder.name_of(who))
        if (earlier := self._an_hour_ago(known.identities)) is not None:
            then = numbers_in(earlier, now_us - MEMORY_US)
            yield from guardrails.of_gradual_numbers(then, now, override.limit, whose=self._finder.name_of(who))

    def _of_policy(self, before: Policy, after: Policy, *, document: bool = True) -> Iterator[Risk]:
        """Against the policy of now and that of an hour ago: small steps add up."""
        yield from guardrails.of_policy(before, after, document=document)
        if (earlier := self._an_hour_ago({})) is not None:
            yield from guardrails.of_gradual_policy(earlier.ground.base, before, after)

    def _an_hour_ago(self, identities: Mapping[str, Collection[str]]) -> EffectivePolicy | None:
        """The configuration of an hour ago for whoever has these identities, in the tier that they have now: a tier is
        chosen on purpose. None if it is still the same, or cannot be read."""
        with self._reading() as connection:
            version = version_at(connection, self._now_us() - MEMORY_US)
            if version == newest_version(connection):
                return None
            ground = ground_at(connection, version)
            rows = rows_of_clients(connection, identities, version=version) | rows_of_clients(
                connection, identities, ["clients"]
            )
        return None if ground.problems else held(ground, version, rows, identities)

    def _of_rollback(self, version: int, sections: Collection[str]) -> Iterator[Risk]:
        with self._reading() as connection:
            newest = newest_version(connection)
            now = self._grounds.now(connection)
            then = ground_at(connection, version)
            touched = [each for each in diff_versions(connection, newest, version) if each.section in sections]
        if {*BASE_SECTIONS} & {*sections}:
            parts = {section: then if section in sections else now for section in BASE_SECTIONS}
            mixed = replace(
                now,
                document=parts["documents"].document,
                tiers=parts["tiers"].tiers,
                routes=parts["routes"].routes,
            )
            after = changed(mixed)
            yield from guardrails.of_policy(now.base, after)
        yield from guardrails.of_rows(touched)
        again = [each.after for each in touched if each.before is None and isinstance(each.after, OverrideRow)]
        if not now.problems and "documents" not in sections:
            for made in again[:MOST_JUDGED]:
                yield from self._of_override(ClientRef(made.kind, made.value), made)

    def _allow_of(self, actor: Actor, who: ClientRef, what: str) -> None:
        """A network may be everybody: what is done to one is done by those who may change everybody's limits."""
        if is_network(who):
            self._allow(actor, "operator", f"{what} of networks")

    def _unseen(self, who: ClientRef) -> tuple[str, ...]:
        """A note for a client that was never seen: its name may be mistyped."""
        if self._finder.is_seen(who) is not False:
            return ()
        return (f"No {noun_of(who.kind)} of this name was ever seen. Check the spelling.",)

    def _readable(self) -> BasePolicy:
        ground = self._ground()
        if ground.problems:
            raise InvalidPolicy(ground.problems)
        return ground

    def _signing(self, actor: Actor, reason: str, *texts: str | None) -> Any:
        """While somebody writes: signed, one at a time, and without API keys in what is said."""
        return signed(self._finder, self._writing, actor, reason, texts)


def _class_of(each: ApplicableLimit) -> str | None:
    return getattr(each.origin, "route_class", None)


def _numbers(bucket: str) -> dict[str, Any]:
    """InvalidLimit for what is no limit, or lets nothing pass."""
    with discreetly(bucket):
        return bucket_columns(guardrails.written(bucket))
