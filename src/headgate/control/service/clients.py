"""Clients: search, current limits and usage, decision history, tiers and counter resets."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from headgate.control.config.queries import LabelledRow
from headgate.control.service import listing
from headgate.control.service.client_lookup import MAX_MATCHES, is_hash, label_keys, noun_of, require_network_role
from headgate.control.service.dependencies import ServiceDependencies, TopicService, to_change
from headgate.control.service.effective_policy import applicable_limits, key_batches, limit_usages, read_counters
from headgate.control.service.errors import NotFound
from headgate.control.service.models import Change, ClientRef, ClientView
from headgate.control.service.redaction import redact_errors
from headgate.errors import InvalidInput
from headgate.telemetry.human_time import span
from headgate.telemetry.why.report import ClientQuery, RejectionReport

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence
    from datetime import tzinfo

    from headgate.control.service.client_lookup import Candidate
    from headgate.control.service.effective_policy import ApplicableLimit, EffectivePolicy
    from headgate.control.service.models import BlockView, ChangeContext, ClientRow, LimitUsage, Page, Timeline
    from headgate.telemetry.decision_log.record import DecisionRecord

__all__ = ["ClientService"]

ONLY_A_HASH = "We only store a hash of this {noun}. You can block it. To see its limits, search for the {noun} itself."
A_NETWORK = "A network has no counters of its own. To see what is used, search for one of its addresses."


class ClientService(TopicService):
    """Finds clients, shows their limits and decisions, assigns tiers and resets counters."""

    def __init__(self, deps: ServiceDependencies) -> None:
        super().__init__(deps)
        lookup = deps.lookup
        self.find, self.candidates = lookup.find, lookup.candidates
        self.label_of, self.insert_names = lookup.label_of, lookup.insert_names

    def name_of(self, client: ClientRef) -> str:
        """The name of a client in a sentence: its label, or its kind and value."""
        return self._deps.lookup.name_of(self._deps.lookup.canonical(client))

    def matches(self, text: str) -> Sequence[Candidate]:
        """The known clients that a text identifies, or up to 20 whose label or identity contains it."""
        lookup, text = self._deps.lookup, text.strip()
        found = lookup.candidates(text)
        if is_hash(text) or "=" in text or found[0].who.kind in ("ip", "subnet"):
            return found[:1]
        if known := [each for each in found if each.is_known]:
            return known[:MAX_MATCHES]
        listed = [] if len(text) > listing.MAX_SEARCH_LENGTH else self.list(search=text, most=MAX_MATCHES).items
        others = dict.fromkeys([*(each.who for each in listed), *lookup.search_log(text)])
        return [lookup.describe(each) for each in others][:MAX_MATCHES]

    def list(self, *, search: str = "", after: str | None = None, most: int = 50) -> Page[ClientRow]:
        """The clients that the configuration has an entry for."""
        with listing.open_list(self._deps, search=search, after=after, most=most) as query:
            found = listing.clients(query)
        return self._deps.lookup.with_pseudonyms(found)

    def get(self, client: ClientRef) -> ClientView:
        """A client with its tier, limits, usage, overrides and block."""
        deps = self._deps
        client = deps.lookup.resolve(client)
        effective, now_us = deps.resolve(client), deps.now_us()
        facts = effective.facts
        troubles = [*effective.base.problems]
        tier: str | None = None
        tier_from: Any = "default"
        limits: tuple[LimitUsage, ...] = ()
        if facts.values and not effective.base.problems:
            tier, applicable = applicable_limits(effective, now_us)
            tier_from = _tier_source(effective, tier)
            used: Any = {each.key: "counted per address" for each in applicable if not each.missing}
            if facts.can_count:
                used, errors = read_counters(deps.counters, applicable)
                troubles += errors
            limits = tuple(limit_usages(effective, applicable, used))
        if not facts.can_count:
            troubles.append(ONLY_A_HASH.format(noun=noun_of(client.kind)) if not facts.values else A_NETWORK)
        label = effective.label or deps.lookup.pseudonym(client)
        entry = effective.client_entry(client)
        live, errors = deps.live_blocks()
        own = [each for each in effective.rows["overrides"] if (each.row.kind, each.row.value) == client]
        views = [listing.override_view(LabelledRow(*each, label), effective.base, now_us) for each in own[::-1]]
        is_live = (
            listing.live_view(each, label, now_us)
            for each in live
            if each.value in facts.identities.get(each.kind, ()) and each.applies_at(now_us)
        )
        return ClientView(
            who=client,
            label=label,
            tier=tier,
            tier_from=tier_from,
            timezone=None if entry is None else entry.timezone,
            starts=None if entry is None else entry.starts,
            limits=limits,
            overrides=tuple(views),
            block=_block_view(effective, label, now_us) or next(is_live, None),
            log_keys=facts.log_keys or label_keys(label),
            can_count=facts.can_count,
            is_seen=deps.lookup.is_seen(client),
            troubles=(*troubles, *errors),
        )

    def why(
        self, client: ClientRef, *, at: str = "today", until: str | None = None, zone: tzinfo | None = None
    ) -> RejectionReport:
        """A report on the rejected requests of a client at a time: which limits, and what would have helped."""
        client = self._deps.lookup.resolve(client)
        effective = self._deps.resolve(client)
        keys = effective.facts.log_keys or label_keys(effective.label)
        with redact_errors(at, until):
            when = span(at, until, now=self._deps.now(), zone=zone)
        identities = dict.fromkeys(keys, (client.kind, client.value)) if effective.facts.values else {}
        asked = ClientQuery("" if client.kind == "api_key" else f"{client.kind}={client.value}", keys, identities)
        return self._deps.log.why(asked, when, policy=effective.policy)

    def timeline(self, client: ClientRef, *, since_us: int, until_us: int, slots: int = 60) -> Timeline:
        """The outcomes of a client's requests in equal time slots."""
        return self._deps.log.timeline(self._log_keys(client), since_us=since_us, until_us=until_us, slots=slots)

    def decisions(
        self,
        *,
        client: ClientRef | None = None,
        after: str = "",
        before: str = "",
        outcome: str | None = None,
        most: int = 100,
    ) -> Sequence[DecisionRecord]:
        """Records of the decision log, newest last: the newest, the first ones after an id, or the last before one.

        `outcome` is an outcome of records, or "rejected". Nodes write in batches and clocks differ, so a record may be
        written after newer ones: to get all of them, ask again from an older id and drop duplicates.
        """
        keys = () if client is None else self._log_keys(client)
        if client is not None and not keys:
            return []
        return self._deps.log.decisions(keys, after=after, before=before, outcome=outcome, most=most)

    def _log_keys(self, client: ClientRef) -> tuple[str, ...]:
        """The keys under which the decision log records a client."""
        client = self._deps.lookup.canonical(client)
        if keys := self._deps.lookup.facts(client).log_keys:  # without the config store, which may be unavailable
            return keys
        return label_keys(self._deps.resolve(client).label)

    def assign_tier(
        self,
        change: ChangeContext,
        client: ClientRef,
        tier: str | None,
        *,
        label: str | None = None,
        timezone: str | None = None,
        starts: int | str | None = None,
    ) -> Change:
        """Assign a client to a tier, and optionally give it a label, a time zone or a first day of its periods.

        Without these, it keeps those that it has. An empty text restores the time zone or first day of the limits.
        """
        deps = self._deps
        change.actor.require("support", "assign tiers")
        with deps.attributed(change, tier, label, timezone, f"{starts}", *client.texts) as attribution:
            client = deps.lookup.canonical(client, texts=[change.reason, label])
            require_network_role(change.actor, client, "assign tiers")
            base = deps.current_policy()
            default = base.policy.default_tier
            known = dict.fromkeys([*base.policy.tiers, *([] if default is None else [default])])
            if tier is not None and tier not in known:
                raise InvalidInput(f"there is no such tier; the tiers are {', '.join(known) or 'none'}")
            assigned = deps.config.clients(who=client)
            entry = assigned[0].row if assigned else base.client_entry(client)
            if entry is not None:
                label = label or entry.label
                timezone = entry.timezone if timezone is None else timezone
                starts = entry.starts if starts is None else starts
            notes = deps.lookup.unseen_note(client)
            version = deps.config.assign(
                client,
                tier,
                label=label,
                timezone=timezone or None,
                starts=None if starts == "" else starts,
                **attribution,
            )
            return to_change(version, *notes)

    def unassign_tier(self, change: ChangeContext, client: ClientRef) -> Change:
        """Remove a client's tier assignment: the tier in the policy document, or the default tier, applies again."""
        deps = self._deps
        change.actor.require("support", "assign tiers")
        with deps.attributed(change, *client.texts) as attribution:
            client = deps.lookup.canonical(client, texts=[change.reason])
            require_network_role(change.actor, client, "assign tiers")
            if not (assigned := deps.config.clients(who=client)):
                raise NotFound("this client has no tier assignment in the config store")
            row, is_in_document = assigned[0].row, deps.current_policy().entries.get(client, {}).get("clients")
            is_kept = row.label or row.calendar()  # so that it can be found, and counts as before
            if row.tier is not None and is_kept and not is_in_document:
                version = deps.config.assign(
                    client, None, label=row.label, timezone=row.timezone, starts=row.starts, **attribution
                )
                return to_change(version)
            return to_change(deps.config.unassign(client, **attribution))

    def reset(self, change: ChangeContext, client: ClientRef, *, limits: Collection[str] | None = None) -> Change:
        """Reset the client's own counters: of all limits, or of these."""
        deps = self._deps
        change.actor.require("support", "reset clients")
        if deps.counters is None:
            raise InvalidInput("the admin server cannot reset counters without a store; start it with --store")
        with deps.attributed(change, *client.texts):
            client = deps.lookup.canonical(client, texts=[change.reason])
            effective = deps.resolve(client)
            if not effective.facts.can_count:
                raise InvalidInput("a network has no counters of its own; reset one of its addresses")
            _, applicable = applicable_limits(effective, deps.now_us())
            chosen = [each for each in applicable if limits is None or each.rule.name in limits]
            if {*(limits or ())} - {each.rule.name for each in chosen}:
                raise NotFound(f"no such limit applies to this client; its limits are {_names(applicable) or 'none'}")
            shared = _names(each for each in chosen if not each.own)
            own = [each for each in chosen if each.own]
            if not own:
                raise NotFound(f"this client has no counter of its own{f' in {shared}' if shared else ''}")
            with deps.audited(change.actor, "reset", f"{client}: {_names(own)}", reason=change.reason):
                for batch in key_batches([each.key for each in own]):
                    deps.counters.reset(*batch)
            notes = (f"not reset, because other clients share the counter: {shared}",) if shared else ()
            return Change(None, notes, f"reset {client}: {_names(own)}")


def _tier_source(effective: EffectivePolicy, tier: str | None) -> str:
    sources = [each for each in effective.policy.clients if each.tier == tier and tier is not None]
    if not sources:
        return "default"
    return "assigned" if any(effective.row_of(each) is not None for each in sources) else "policy"


def _block_view(effective: EffectivePolicy, label: str | None, now_us: int) -> BlockView | None:
    """The block of a client in the config store or the policy document."""
    if (found := effective.block_at(now_us)) is None:
        return None
    row_id = effective.row_of(found)
    row = next((each for each in effective.rows["blocked"] if each.id == row_id), None)
    if row is None:
        return listing.policy_block_view(found, effective.base, now_us)
    return listing.block_view(LabelledRow(*row, label), effective.base, now_us)


def _names(limits: Iterable[ApplicableLimit]) -> str:
    return ", ".join(dict.fromkeys(each.rule.name for each in limits))
