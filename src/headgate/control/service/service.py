"""The desk: all that people do to a running fleet, from any thread. Pages, API and command line are faces of it."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING, Final

from headgate.control.config import audit_log
from headgate.control.config.engine import write_transaction
from headgate.control.config.queries import find_row
from headgate.control.config.rows import EPOCH, SECTIONS, BlockRow
from headgate.control.config.writing import Remove
from headgate.control.service import guardrails, listing
from headgate.control.service.attribution import checked_reason, done, in_the_past
from headgate.control.service.client_lookup import CUSTOMER_PREFIX, is_wide_network, network_of
from headgate.control.service.commands import ServiceCommands
from headgate.control.service.errors import NotFound, discreet
from headgate.control.service.models import Change, ClientRef, RollbackPreview
from headgate.control.service.redaction import LOOKS_SECRET, looks_secret
from headgate.control.service.usage import faced, rounds
from headgate.errors import HeadgateError, InvalidInput

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Sequence
    from datetime import datetime

    from headgate.control.config.history import Difference
    from headgate.control.service.errors import Risk
    from headgate.control.service.models import Actor
    from headgate.control.service.usage import ApplicableLimit

__all__ = ["AdminService"]

LONGEST_ACTION: Final = 100
LONGEST_ABOUT: Final = 600

WITHIN_A_SECOND: Final = (
    "the admin server was given no counters: nodes hear of it from the config store, within a second"
)
STORE_AWAY: Final = "the store cannot be reached: nodes hear of it from the config store, within a second"


class AdminService(ServiceCommands):
    """The operations behind the admin API, pages and CLI:
    `AdminService(ConfigStore(url), counters=Limiter(url), log=url, board=open_status_store(url))`.

    >>> from headgate.control.config import ConfigStore
    >>> from headgate.control.service import Actor, AdminService, ClientRef
    >>> import tempfile
    >>> directory = tempfile.TemporaryDirectory()
    >>> service = AdminService(ConfigStore(f"sqlite:///{directory.name}/headgate.db"), secret="sixteen bytes or more")
    >>> ada = Actor("ada", "operator")
    >>> service.put_policy(ada, "limits: [{name: all, by: tenant, bucket: 10/minute}]", reason="begin").version.number
    1
    >>> service.add_override(ada, ClientRef("tenant", "acme"), "50/minute", limit="all", reason="launch").what
    'added override of tenant acme on limit all: 50/minute'
    >>> [(each.limit, each.bucket, each.from_) for each in service.client(ClientRef("tenant", "acme")).limits]
    [('all', '50/minute', 'override')]
    >>> directory.cleanup()
    """

    def block(
        self,
        actor: Actor,
        who: ClientRef,
        *,
        valid_until: datetime | None = None,
        reason: str,
        confirm: Collection[str] = (),
        based_on: int | None = None,
    ) -> Change:
        """Keep somebody out: as part of the configuration, and by word to all nodes, which hear it in milliseconds."""
        self._allow(actor, "support", "block clients")
        _refuse_wildcard(who)
        with self._signing(actor, reason, *([] if who[0] == "api_key" else [who[1]])) as by:
            who = _as_ip(self._finder.named(self._finder.checked(who, beside=[reason], by_hash=True)))
            if is_wide_network(who):
                self._allow(actor, "operator", "block networks")
            in_the_past(valid_until, self._now_us())
            guardrails.confirmed(guardrails.of_block(who), confirm)
            if self._is_blocked(who):  # nothing is urgent then, and a conflict must leave it as it is
                version = self._config.block(who, valid_until=valid_until, **by, based_on=based_on)
                return done(version, *self._block_live(who, valid_until, reason), *_neighbours(who))
            # First, as somebody may be at the door right now.
            notes = [*self._block_live(who, valid_until, reason), *_neighbours(who)]
            try:
                return done(self._config.block(who, valid_until=valid_until, **by, based_on=based_on), *notes)
            except BaseException:
                self._unblock_live(who)
                raise

    def block_dangers(self, who: ClientRef) -> list[Risk]:
        """The reasons to think twice before blocking a client, for a preview; InvalidInput if it can't be blocked."""
        _refuse_wildcard(who)
        return list(guardrails.of_block(_as_ip(who)))

    def unblock(
        self,
        actor: Actor,
        id: int | ClientRef,
        *,
        reason: str,
        confirm: Collection[str] = (),
        based_on: int | None = None,
    ) -> Change:
        """Let somebody in again: the row ends, and so does what nodes were told."""
        self._allow(actor, "support", "end blocks")
        found = self._blocked_row(id) if isinstance(id, int) else None
        asked = id if found is None else found[1]
        with self._signing(actor, reason) as by:
            who = _as_ip(self._finder.checked(asked, beside=[reason], by_hash=True))  # type: ignore[arg-type] # an id has given its row's
            if is_wide_network(who):
                self._allow(actor, "operator", "end blocks of networks")
            same = (who, *self._finder.hashes_of(who))
            rows = (
                [found[0]] if found is not None else [each.id for one in same for each in self._config.blocks(who=one)]
            )
            if rows:
                version = self._config.write([Remove("blocked", each) for each in rows], **by, based_on=based_on)
                _, note = self._unblock_live(*same)
                return done(version, *([note] if note else []))
            in_document = self._ground().entries.get(who, {}).get("blocked")
            with self._noted(actor, "unblocked", str(who), reason=reason):
                ended, note = self._unblock_live(*same)
                if not ended:
                    where = (
                        "it stands in the policy document, and is ended there" if in_document else "nobody blocks it"
                    )
                    raise NotFound(note or f"there is no block of this client to end: {where}")
            return Change(None, (note,) if note else (), f"unblocked {who}")

    def reset(self, actor: Actor, who: ClientRef, *, limits: Collection[str] | None = None, reason: str) -> Change:
        """Forget what a client has used: of all limits that count it by itself, or of these."""
        self._allow(actor, "support", "reset clients")
        if self._counters is None:
            raise InvalidInput(
                "the admin server was given no counters, so that nothing can be reset; start it with --store"
            )
        with self._signing(actor, reason, *([] if who[0] == "api_key" else [who[1]])):
            who = self._finder.checked(who, beside=[reason])
            known, holding = self._holding(who)
            if not known.can_count:
                raise InvalidInput("a network is not counted as one; reset one of its addresses")
            _, met = faced(holding, known.values, kind=who.kind, now_us=self._now_us())
            wanted = [each for each in met if limits is None or each.rule.name in limits]
            own = [each for each in wanted if each.own]
            if {*(limits or ())} - {each.rule.name for each in wanted}:
                raise NotFound(f"this client meets no such limit; it meets {_names(met) or 'none'}")
            shared = [each for each in wanted if not each.own]
            if not own:
                others = f": not {_names(shared)}" if shared else ""
                raise NotFound(f"no limit counts this client by itself{others}")
            names = ", ".join(dict.fromkeys(each.rule.name for each in own))
            with self._noted(actor, "reset", f"{who}: {names}", reason=reason):
                for some in rounds([each.key for each in own]):
                    self._counters.reset(*some)
            notes = [f"not reset, as they do not count this client alone: {_names(shared)}"] if shared else []
            return Change(None, tuple(notes), f"reset {who}: {names}")

    def preview_rollback(
        self, actor: Actor, version: int, *, sections: Collection[str] | None = None
    ) -> RollbackPreview:
        """Everything that `rollback` would change, and the blocks that it would keep."""
        self._allow(actor, "operator", "roll back")
        self._existing(version)
        newest, chosen = self.version, {*SECTIONS} if sections is None else {*sections}
        touched = tuple([each for each in self.diff(newest, version) if each.section in chosen])
        undone = tuple([each for each in self.versions() if each.number > version])
        found = list(dict.fromkeys(self._of_rollback(version, chosen)))
        live = [each for each in self.blocks(state="active", most=listing.MOST).items if each.source == "live"]
        return RollbackPreview(newest, touched, undone, tuple(found[: guardrails.MOST]), tuple(live))

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
        """Roll back to a version, and make live blocks follow: those whose rows went are lifted, those whose rows came
        back are active again. Live blocks outside the configuration are kept, and counted in a note."""
        change = super().rollback(actor, version, sections=sections, reason=reason, confirm=confirm, based_on=based_on)
        if change.version is None:
            return change
        number = change.version.number
        notes = self._follow_blocks([each for each in self.diff(number - 1, number) if each.section == "blocked"])
        return replace(change, notes=(*change.notes, *notes))

    def _follow_blocks(self, differences: Sequence[Difference]) -> Iterator[str]:
        """Tell the nodes of blocks that a rollback has ended or brought back; notes on what was done."""
        ended = set_again = 0
        troubles: dict[str, None] = {}
        for each in differences:
            if isinstance(after := each.after, BlockRow):
                end = None if after.valid_until_us is None else EPOCH + timedelta(microseconds=after.valid_until_us)
                if listing.state_of(after, self._now_us()) == "active":
                    troubles |= dict.fromkeys(
                        self._block_live(ClientRef(after.kind, after.value), end, after.reason or "")
                    )
                    set_again += 1
            elif isinstance(before := each.before, BlockRow):
                _, note = self._unblock_live(ClientRef(before.kind, before.value))
                troubles |= {} if note is None else {note: None}
                ended += 1
        if ended or set_again:
            yield f"Blocks: {ended} lifted, {set_again} active again."
        yield from troubles
        live = [each for each in self.blocks(state="active", most=listing.MOST).items if each.source == "live"]
        if live:
            one = len(live) == 1
            yield (
                f"{len(live)} live block{'' if one else 's'} outside the configuration {'is' if one else 'are'} kept: "
                f"{', '.join(self.name_of(each.who) for each in live[:5])}{'' if len(live) <= 5 else ', …'}."
            )

    def note(self, actor: Actor, action: str, about: str, *, reason: str = "") -> None:
        """Keep in the audit what is no version: sign-ins, tokens, resets."""
        with self._noted(actor, action, about, reason=reason):
            pass

    def refuse_keys(self, *texts: str) -> None:
        """InvalidInput, if there is an API key among the words of what somebody wants to be kept."""
        self._finder.refuse_known_keys(*texts)
        if any(looks_secret(text) for text in texts):
            raise InvalidInput(LOOKS_SECRET)

    # ------------------------------------------------------------------ within

    @contextmanager
    def _noted(self, actor: Actor, action: str, about: str, *, reason: str) -> Iterator[None]:
        """While it is done: what cannot be kept in the audit is not done, and what fails is not kept."""
        told = {"action": action[:LONGEST_ACTION], "about": about[:LONGEST_ABOUT], "author": actor.name[:200]}
        if not action or not all(text.isprintable() for text in told.values()):
            raise InvalidInput("what is noted is one line")
        why = checked_reason(reason) if reason else ""
        with write_transaction(self._config.engine) as connection:
            audit_log.record(connection, at_us=self._now_us(), reason=why, **told)
            yield

    def _blocked_row(self, id: int) -> tuple[int, ClientRef]:
        self._possible(id, "block")
        with self._reading() as connection:
            found = find_row(connection, "blocked", id)
        if found is None:
            raise NotFound(f"there is no block {id}")
        return id, ClientRef(found.row.kind, found.row.value)

    def _is_blocked(self, who: ClientRef) -> bool:
        """Whether the tables or the nodes know of a block; also, if the nodes cannot be asked."""
        if self._config.blocks(who=who) or self._counters is None:
            return True
        try:
            return any((each.kind, each.value) == who for each in self._counters.blocked())
        except HeadgateError:
            return True

    def _block_live(self, who: ClientRef, until: datetime | None, reason: str) -> list[str]:
        """Tell the nodes to keep somebody out; what is to know, if they could not be told."""
        if self._counters is None:
            return [WITHIN_A_SECOND]
        try:
            self._counters.block(*who, until=until, reason=reason)
        except HeadgateError as error:
            return [discreet(STORE_AWAY, error)]
        return []

    def _unblock_live(self, *same: ClientRef) -> tuple[bool, str | None]:
        """End the live blocks of a client, by each of its names: whether there was one, and a note on what failed."""
        if self._counters is None:
            return False, WITHIN_A_SECOND
        try:
            ended = [self._counters.unblock(*who) for who in same]
            return any(ended), None
        except HeadgateError as error:
            return False, discreet("nodes could not be told, and may keep it out until they are", error)


def _as_ip(who: ClientRef) -> ClientRef:
    """A network is blocked by its addresses."""
    return ClientRef("ip", who.value) if who.kind == "subnet" else who


def _neighbours(who: ClientRef) -> list[str]:
    """What to know of a block of one IPv6 address: its customer has billions of others."""
    network = network_of(who)
    if network is None or network.version == 4 or network.prefixlen < 128:
        return []
    customer = network.supernet(new_prefix=CUSTOMER_PREFIX)
    return [f"a customer usually has a whole /64 of IPv6: to block all of it, block {customer}"]


def _refuse_wildcard(who: ClientRef) -> None:
    if str(who[1]).strip() == "*":
        raise InvalidInput("* is no client: a block is of one client or one network")


def _names(met: Iterable[ApplicableLimit]) -> str:
    return ", ".join(dict.fromkeys(each.rule.name for each in met))
