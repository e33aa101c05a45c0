"""All that can be looked at."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from headgate.control.config import raw_keys
from headgate.control.config.queries import LabelledRow, find_row, sample_rows
from headgate.control.config.reading import newest_version
from headgate.control.config.rows import PolicyDocument
from headgate.control.service import audit, listing, policy
from headgate.control.service.candidates import noun_of
from headgate.control.service.client_lookup import MAX_MATCHES, is_hash
from headgate.control.service.dependencies import LARGEST, ServiceDependencies
from headgate.control.service.effective_policy import ground_at
from headgate.control.service.errors import NotFound, discreet, without_place
from headgate.control.service.models import ClientRef, ClientView, MinuteTotals, OverrideView, Overview
from headgate.control.service.redaction import discreetly
from headgate.control.service.usage import CounterReading, faced, said_by, standings, uses
from headgate.errors import HeadgateError, InvalidInput, InvalidPolicy
from headgate.policy.formats import FORMATS
from headgate.telemetry.human_time import span
from headgate.telemetry.why.report import ClientQuery

if TYPE_CHECKING:
    from datetime import tzinfo

    from headgate.control.anomalies.detector import Anomaly
    from headgate.control.config.history import Difference, Version
    from headgate.control.config.rows import StoredRow
    from headgate.control.service.candidates import Candidate
    from headgate.control.service.client_lookup import ClientFacts
    from headgate.control.service.effective_policy import BasePolicy, EffectivePolicy
    from headgate.control.service.models import (
        Actor,
        AuditEntry,
        BlockView,
        ClientRow,
        LimitUsage,
        Page,
        PolicyView,
        RouteView,
        TierView,
        Timeline,
    )
    from headgate.policy.model import Block
    from headgate.telemetry.decision_log.record import DecisionRecord
    from headgate.telemetry.fleet.model import NodeStatus
    from headgate.telemetry.why.report import RejectionReport

__all__ = ["ServiceQueries"]

ONLY_A_HASH = "We only store a hash of this {noun}. You can block it. To see its limits, search for the {noun} itself."
A_NETWORK = "A network has no counters of its own. To see what is used, search for one of its addresses."


class ServiceQueries(ServiceDependencies):
    """The questions."""

    @property
    def version(self) -> int:
        """The newest version of the configuration."""
        return self._config.version

    # ------------------------------------------------------------------ the fleet

    def overview(self, actor: Actor | None = None) -> Overview:
        """What the fleet is doing. It never fails: what cannot be found out is told among `troubles`. Where stores are
        is told to operators."""
        knows = actor is not None and actor.may("operator")
        troubles: list[str] = []
        version: int | None = None
        try:
            version = self._config.version
        except HeadgateError as error:
            troubles.append(discreet("the config store cannot be asked", error))
        steps: list[Anomaly] = []
        try:
            steps = self.steps()
        except HeadgateError as error:
            troubles.append(discreet("step changes cannot be read", error))
        if trouble := self._log.trouble:
            troubles.append(trouble)
        if self._beats is None:
            troubles.append("the admin server was started without --store, so it cannot see any node")
            return Overview(
                self._now_us(), version, (), None, MinuteTotals(), (), (), (), tuple(steps), tuple(troubles)
            )
        found = self._beats.gather()
        return Overview(
            found.at_us,
            version,
            found.nodes if knows else tuple([_without_places(node) for node in found.nodes]),
            found.series,
            found.totals,
            found.top_denied,
            found.near,
            found.hot,
            tuple(steps),
            (*troubles, *[each if knows else without_place(each, each.partition(":")[0]) for each in found.troubles]),
        )

    def steps(self, *, most: int = 20) -> list[Anomaly]:
        """The newest step changes, the newest first."""
        return [] if self._steps is None else list(self._steps.recent(most=most))

    # ------------------------------------------------------------------ one client

    def find(self, text: str) -> ClientRef:
        """The client that is meant by a text: "tenant=acme", an address, a label, an API key, a hash."""
        return self._finder.find(text)

    def candidates(self, text: str) -> list[Candidate]:
        """All clients that a text can mean, whether they were ever seen or not; the likeliest first."""
        return self._finder.candidates(text)

    def matches(self, text: str) -> list[Candidate]:
        """The known clients that a text means; or up to 20 whose label, name, tenant or address contains it."""

        def partial(part: str) -> list[ClientRef]:
            if len(part) > listing.LONGEST_SEARCH:
                return []
            return [each.who for each in self.clients(search=part, most=MAX_MATCHES).items]

        return self._finder.matches(text, partial)[:MAX_MATCHES]

    def with_names(self, text: str) -> str:
        """A text of a version or of the audit log, with the names of clients in place of full hashes."""
        return self._finder.with_names(text)

    def label_of(self, who: ClientRef) -> str | None:
        """The name that a client was given, or that the overview shows; None if there is none."""
        return self._finder.label_of(who)

    def name_of(self, who: ClientRef) -> str:
        """The name of a client for people: its label, or its kind and value."""
        return self._finder.name_of(self._finder.checked(who))

    def client(self, who: ClientRef) -> ClientView:
        """A client, with all that holds for it, and what it has used."""
        who = self._finder.named(self._finder.checked(who))
        known, holding = self._holding(who)
        now_us = self._now_us()
        troubles = list(holding.ground.problems)
        tier: str | None = None
        tier_from: Any = "default"
        limits: list[LimitUsage] = []
        if known.values and not holding.ground.problems:
            tier, met = faced(holding, known.values, kind=who.kind, now_us=now_us)
            tier_from = self._tier_from(holding, tier)
            if known.can_count:
                used, trouble = uses(self._counters, met)
                troubles += [] if trouble is None else [trouble]
            else:
                used = {each.key: CounterReading(None, "counted per address") for each in met if not each.lacks}
            limits = list(standings(holding, met, used))
        if not known.can_count:
            troubles.append(ONLY_A_HASH.format(noun=noun_of(who.kind)) if not known.values else A_NETWORK)
        label = self._label(known, holding) or self._finder.pseudonym(who)
        block, trouble = self._block_of(known, holding, label, now_us)
        if trouble is not None:
            troubles.append(trouble)
        own = [each for each in holding.rows["overrides"] if (each.row.kind, each.row.value) == who]
        views = [listing.override_view(_listed(each, label), holding.ground, now_us) for each in reversed(own)]
        keys = known.log_keys or self._finder.label_key_of(label)
        return ClientView(
            who,
            label,
            tier,
            tier_from,
            tuple(limits),
            tuple(views),
            block,
            keys,
            known.can_count,
            self._finder.is_seen(who),
            tuple(troubles),
        )

    def why(
        self, who: ClientRef, *, at: str = "today", until: str | None = None, zone: tzinfo | None = None
    ) -> RejectionReport:
        """What became of a client's requests at a time, by which limits, and what would have helped."""
        who = self._finder.named(self._finder.checked(who))
        known, holding = self._holding(who)
        keys = known.log_keys or self._finder.label_key_of(self._label(known, holding))
        now = datetime.fromtimestamp(self._now_us() / 1_000_000, UTC)
        with discreetly(at, until):
            when = span(at, until, now=now, zone=zone)
        identities = {} if not known.values else dict.fromkeys(keys, (who.kind, who.value))
        asked = ClientQuery("" if who.kind == "api_key" else f"{who.kind}={who.value}", keys, identities)
        return self._log.why(asked, when, policy=holding.policy)

    def timeline(self, who: ClientRef, *, since_us: int, until_us: int, slots: int = 60) -> Timeline:
        """What became of a client's requests, in equal parts of a time."""
        return self._log.timeline(self._keys(who), since_us=since_us, until_us=until_us, slots=slots)

    def decisions(
        self,
        *,
        who: ClientRef | None = None,
        after: str = "",
        before: str = "",
        outcome: str | None = None,
        most: int = 100,
    ) -> list[DecisionRecord]:
        """The newest decisions that were kept, newest last; or the first after that with an id, or the last before it.

        `outcome` is one of those that records have, or "rejected". Nodes write in batches, and clocks differ: a record
        may be written after others that are newer. Who wants all of them asks for those after an older id again, and
        drops what was seen.
        """
        if who is None:
            return self._log.decisions((), after=after, before=before, outcome=outcome, most=most)
        keys = self._keys(who)
        return self._log.decisions(keys, after=after, before=before, outcome=outcome, most=most) if keys else []

    # ------------------------------------------------------------------ lists

    def searchable(self, text: str) -> str:
        """What to search the lists for in place of a text, so that it may stand in an address: itself, or the keyed
        hash of what may be an API key in it."""
        return self._finder.searchable(text, self._is_said)

    def _is_said(self, text: str) -> bool:
        """Whether one of the lists shows this text."""
        if len(text) > listing.LONGEST_SEARCH or "\0" in text:
            return False
        lists = (self.clients, self.overrides, self.blocks, self.audit)
        return any(each(search=text, most=1).items for each in lists)

    def clients(self, *, search: str = "", after: str | None = None, most: int = 50) -> Page[ClientRow]:
        """Everybody of whom the configuration says something."""
        listing.checked_page(search, "all", most)
        hashed = self._finder.hashed(search)
        with self._reading() as connection:
            ground = self._grounds.now(connection)
            question: Any = {"search": search, "hashed": hashed, "after": after, "most": most}
            found = listing.clients(connection, ground, now_us=self._now_us(), **question)
        return self._with_pseudonyms(found)

    def overrides(
        self,
        *,
        search: str = "",
        state: str = "all",
        who: ClientRef | None = None,
        after: str | None = None,
        most: int = 50,
    ) -> Page[OverrideView]:
        """The overrides of the config store, the newest first."""
        listing.checked_page(search, state, most)
        of = None if who is None else self._finder.checked(who)
        question: Any = {"search": search, "hashed": self._finder.hashed(search), "state": state, "who": of}
        with self._reading() as connection:
            ground = self._grounds.now(connection)
            return listing.overrides(connection, ground, now_us=self._now_us(), most=most, after=after, **question)

    def override(self, id: int) -> OverrideView:
        """One of them; NotFound if there is none such now."""
        self._possible(id, "override")
        with self._reading() as connection:
            found = find_row(connection, "overrides", id)
            if found is None:
                raise NotFound(f"there is no override {id}")
            return listing.override_view(found, self._grounds.now(connection), self._now_us())

    def blocks(
        self, *, search: str = "", state: str = "all", after: str | None = None, most: int = 50
    ) -> Page[BlockView]:
        """Who is kept out: by rows of the config store, by the document, and by word to the nodes alone."""
        listing.checked_page(search, state, most)
        live, _ = self._live_blocks()
        question: Any = {"search": search, "hashed": self._finder.hashed(search), "state": state}
        with self._reading() as connection:
            ground = self._grounds.now(connection)
            found = listing.blocks(connection, ground, live, now_us=self._now_us(), most=most, after=after, **question)
        return self._with_pseudonyms(found)

    def tiers(self) -> list[TierView]:
        """All tiers, with their numbers and how many clients are in each."""
        with self._reading() as connection:
            return policy.tiers(connection, self._grounds.now(connection))

    def routes(self) -> list[RouteView]:
        """All routes of which the document or a table says something."""
        return policy.routes(self._ground())

    # ------------------------------------------------------------------ the policy and its past

    def policy(self, version: int | None = None) -> PolicyView:
        """The policy document, now or at a version, and what it comes to with the tables."""
        if version is not None:
            self._existing(version)
        with self._reading() as connection:
            at = newest_version(connection) if version is None else version
            ground = self._grounds.now(connection) if version is None else ground_at(connection, at)
        return policy.policy_view(ground, at)

    def check_policy(self, text: str, *, file: str) -> list[str]:
        """What is wrong with a document, beside the rows that there are; nothing, if it would be taken."""
        try:
            self._checked(text, file)
        except InvalidPolicy as error:
            return list(error.problems)
        except InvalidInput as error:
            return [str(error)]
        return []

    def versions(self, *, before: int | None = None, most: int = 50) -> list[Version]:
        """The versions of the configuration, the newest first."""
        listing.checked_page("", "all", most)
        return self._config.history(before=None if before is None else min(before, LARGEST), most=most)

    def diff(self, one: int, other: int) -> list[Difference]:
        """What is different at the second version from the first."""
        return self._config.diff(self._existing(one), self._existing(other))

    def audit(
        self, *, before: str | None = None, most: int = 50, author: str | None = None, search: str = ""
    ) -> Page[AuditEntry]:
        """Who did what, the newest first."""
        for text in (search, author or ""):
            listing.checked_page(text, "all", most)
        with self._reading() as connection:
            return audit.page(connection, before=before, most=most, author=author, search=search)

    # ------------------------------------------------------------------ within

    def _with_pseudonyms(self, page: Page[Any]) -> Page[Any]:
        """The same page, on which clients of which only a hash is known go by the name that the overview shows."""
        items = [
            each if each.label or each.who.kind == "api_key" else replace(each, label=self._finder.pseudonym(each.who))
            for each in page.items
        ]
        return replace(page, items=tuple(items))

    def _keys(self, who: ClientRef) -> tuple[str, ...]:
        """Under which the log knows somebody."""
        who = self._finder.checked(who)
        known = self._finder.known(who)
        if known.log_keys:
            return known.log_keys
        known, holding = self._holding(who)
        return self._finder.label_key_of(self._label(known, holding))

    def _checked(self, text: str, file: str) -> BasePolicy:
        """What would hold with another document; InvalidPolicy, if it would not."""
        suffix = file.rpartition(".")[2].lower()
        format = "yaml" if suffix == "yml" else suffix
        if format not in FORMATS:
            raise InvalidPolicy([f"{file}: cannot tell its format; name the file .yaml, .yml, .toml or .json"])
        document = PolicyDocument(text, format, file)
        raw_keys.reject_raw_keys(document, None)
        with self._reading() as connection:
            ground = ground_at(connection, newest_version(connection), document)
            if ground.problems:
                raise InvalidPolicy(ground.problems)
            ground.frame.read(sample_rows(connection))
        return ground

    @staticmethod
    def _label(known: ClientFacts, holding: EffectivePolicy) -> str | None:
        """What a client is called: by its own name, or by that of the smallest network that it is in."""
        clients = {(each.identity.kind, each.identity.value): each.label for each in holding.policy.clients}
        found = (clients.get((kind, value)) for kind, values in known.identities.items() for value in values)
        return next((label for label in found if label), None)

    @staticmethod
    def _tier_from(holding: EffectivePolicy, tier: str | None) -> Any:
        saying = [each for each in holding.policy.clients if each.tier == tier and tier is not None]
        if not saying:
            return "default"
        return "assigned" if any(holding.row_of(each) is not None for each in saying) else "policy"

    def _block_of(
        self, known: ClientFacts, holding: EffectivePolicy, label: str | None, now_us: int
    ) -> tuple[BlockView | None, str | None]:
        """Why a client is kept out, if it is."""
        live, trouble = self._live_blocks()
        found: Block | None = None
        if known.values:
            plan = holding.snapshot.route("GET", "/")
            found = holding.snapshot.resolve(plan, said_by(known.values), now_us).block
        if found is not None:
            id = holding.row_of(found)
            kept = next((each for each in holding.rows["blocked"] if each.id == id), None)
            if kept is not None:
                return listing.block_view(_listed(kept, label), holding.ground, now_us), trouble
            return listing.policy_block_view(found, holding.ground, now_us), trouble
        # The snapshot of the desk has no secret to match blocks by hash with; these are all about this client.
        for entry in holding.policy.blocked:
            if is_hash(entry.identity.value) and entry.validity.holds_at(
                datetime.fromtimestamp(now_us / 1_000_000, UTC)
            ):
                id = holding.row_of(entry)
                kept = next((each for each in holding.rows["blocked"] if each.id == id), None)
                if kept is not None:
                    return listing.block_view(_listed(kept, label), holding.ground, now_us), trouble
                return listing.policy_block_view(entry, holding.ground, now_us), trouble
        for block in live:
            if block.value in known.identities.get(block.kind, ()) and block.holds_at(now_us):
                return listing.live_view(block, label, now_us), trouble
        return None, trouble


def _without_places(node: NodeStatus) -> NodeStatus:
    return replace(
        node,
        reason=node.reason and without_place(node.reason, "its store cannot be asked"),
        shards=tuple([(f"server {number}", ready) for number, (_, ready) in enumerate(node.shards, 1)]),
        policy_error=node.policy_error and without_place(node.policy_error, "the config store cannot be asked"),
        log_error=node.log_error and without_place(node.log_error, "it cannot be written"),
    )


def _listed(kept: StoredRow[Any], label: str | None) -> LabelledRow:
    return LabelledRow(kept.id, kept.since, kept.row, label)
