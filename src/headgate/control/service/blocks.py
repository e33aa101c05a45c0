"""Blocks: in the configuration, and live on the nodes, which apply them within milliseconds."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final

from headgate.control.config.rows import EPOCH, BlockRow
from headgate.control.config.writing import Remove
from headgate.control.service import guardrails, listing
from headgate.control.service.changes import attributed, audited, require_future, to_change
from headgate.control.service.client_lookup import CUSTOMER_PREFIX, is_wide_network, network_of
from headgate.control.service.errors import NotFound, log_and_summarize
from headgate.control.service.models import Change, ClientRef
from headgate.errors import HeadgateError, InvalidInput

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from datetime import datetime

    from headgate.control.config.history import Difference
    from headgate.control.service.dependencies import ServiceDependencies
    from headgate.control.service.errors import Risk
    from headgate.control.service.models import BlockView, ChangeContext, Page

__all__ = ["BlockService"]

NO_COUNTERS: Final = "the admin server was started without --store, so nodes apply this within a second, not at once"
STORE_UNAVAILABLE: Final = "the store is unavailable, so nodes apply this within a second, not at once"


class BlockService:
    """Lists, adds and removes blocks."""

    def __init__(self, deps: ServiceDependencies) -> None:
        self._deps = deps

    def list(
        self, *, search: str = "", state: str = "all", after: str | None = None, most: int = 50
    ) -> Page[BlockView]:
        """The blocks in the config store, then those in the policy document, then those that only the nodes have."""
        deps = self._deps
        listing.check_page(search, state, most)
        live, _ = deps.live_blocks()
        filters: Any = {"search": search, "hashed": deps.lookup.hash_as_key(search), "state": state}
        with deps.reading() as connection:
            base = deps.policies.get(connection)
            found = listing.blocks(connection, base, live, now_us=deps.now_us(), most=most, after=after, **filters)
        return deps.lookup.with_pseudonyms(found)

    def list_live_only(self) -> Sequence[BlockView]:
        """The active blocks that only the nodes have."""
        return [each for each in self.list(state="active", most=listing.MAX_PAGE).items if each.source == "live"]

    def risks(self, client: ClientRef) -> Sequence[Risk]:
        """The risks of blocking a client; InvalidInput if it cannot be blocked."""
        _refuse_wildcard(client)
        return tuple(guardrails.block_risks(_as_address(client)))

    def add(self, change: ChangeContext, client: ClientRef, *, valid_until: datetime | None = None) -> Change:
        """Block a client, in the configuration and live on all nodes."""
        deps = self._deps
        change.actor.require("support", "block clients")
        _refuse_wildcard(client)
        with attributed(deps, change, *client.texts) as attribution:
            client = _as_address(deps.lookup.resolve(client, texts=[change.reason], allow_hash=True))
            if is_wide_network(client):
                change.actor.require("operator", "block networks")
            require_future(valid_until, deps.now_us())
            guardrails.require_confirmation(guardrails.block_risks(client), change.confirmed)
            if self._is_blocked(client):  # not urgent, and a conflict must leave the live block as it is
                version = deps.config.block(client, valid_until=valid_until, **attribution)
                return to_change(version, *self._block_live(client, valid_until, change.reason), *_ipv6_note(client))
            # Live first: the client may be attacking right now.
            notes = [*self._block_live(client, valid_until, change.reason), *_ipv6_note(client)]
            try:
                return to_change(deps.config.block(client, valid_until=valid_until, **attribution), *notes)
            except BaseException:
                self._unblock_live(client)
                raise

    def remove(self, change: ChangeContext, block: int | ClientRef) -> Change:
        """Remove a block by the id of its row, or all blocks of a client, live ones included."""
        deps = self._deps
        change.actor.require("support", "end blocks")
        row_ids: Sequence[int] = ()
        if isinstance(block, int):
            with deps.reading() as connection:
                found = deps.find_row(connection, "blocked", "block", block)
            row_ids, block = [block], ClientRef(found.row.kind, found.row.value)
        with attributed(deps, change) as attribution:
            client = _as_address(deps.lookup.canonical(block, texts=[change.reason], allow_hash=True))
            if is_wide_network(client):
                change.actor.require("operator", "end blocks of networks")
            names = (client, *deps.lookup.hashes_of(client))
            row_ids = row_ids or [each.id for name in names for each in deps.config.blocks(who=name)]
            if row_ids:
                version = deps.config.write([Remove("blocked", id) for id in row_ids], **attribution)
                _, note = self._unblock_live(*names)
                return to_change(version, *([note] if note else []))
            is_in_document = deps.policies.current().entries.get(client, {}).get("blocked")
            with audited(deps, change.actor, "unblocked", str(client), reason=change.reason):
                was_blocked, note = self._unblock_live(*names)
                if not was_blocked:
                    why = "the block is in the policy document: remove it there" if is_in_document else "none exists"
                    raise NotFound(note or f"there is no block of this client to remove: {why}")
            return Change(None, (note,) if note else (), f"unblocked {client}")

    def apply_differences(self, differences: Sequence[Difference]) -> Iterator[str]:
        """Make live blocks follow the rows that a rollback has removed or restored; yield notes for the actor."""
        lifted = restored = 0
        errors: dict[str, None] = {}
        for each in differences:
            if isinstance(after := each.after, BlockRow):
                end = None if after.valid_until_us is None else EPOCH + timedelta(microseconds=after.valid_until_us)
                if listing.state_of(after, self._deps.now_us()) == "active":
                    notes = self._block_live(ClientRef(after.kind, after.value), end, after.reason or "")
                    errors |= dict.fromkeys(notes)
                    restored += 1
            elif isinstance(before := each.before, BlockRow):
                _, note = self._unblock_live(ClientRef(before.kind, before.value))
                errors |= {} if note is None else {note: None}
                lifted += 1
        if lifted or restored:
            yield f"Blocks: {lifted} lifted, {restored} active again."
        yield from errors
        if live := self.list_live_only():
            one = len(live) == 1
            names = ", ".join(self._deps.lookup.name_of(each.who) for each in live[:5])
            yield (
                f"{len(live)} live block{'' if one else 's'} outside the configuration {'is' if one else 'are'} kept: "
                f"{names}{'' if len(live) <= 5 else ', …'}."
            )

    def _is_blocked(self, client: ClientRef) -> bool:
        """True if the config store or the nodes have a block of this client, or if the nodes cannot be asked."""
        if self._deps.config.blocks(who=client) or self._deps.counters is None:
            return True
        try:
            return any((each.kind, each.value) == client for each in self._deps.counters.blocked())
        except HeadgateError:
            return True

    def _block_live(self, client: ClientRef, until: datetime | None, reason: str) -> Sequence[str]:
        """Block a client on the nodes; return a note if that is not possible."""
        if self._deps.counters is None:
            return [NO_COUNTERS]
        try:
            self._deps.counters.block(*client, until=until, reason=reason)
        except HeadgateError as error:
            return [log_and_summarize(STORE_UNAVAILABLE, error)]
        return []

    def _unblock_live(self, *names: ClientRef) -> tuple[bool, str | None]:
        """Remove the live blocks of a client under all its names: True if there was one, and a note on failure."""
        if self._deps.counters is None:
            return False, NO_COUNTERS
        try:
            removed = [self._deps.counters.unblock(*name) for name in names]
            return any(removed), None
        except HeadgateError as error:
            return False, log_and_summarize("the nodes could not be reached, and may still block this client", error)


def _as_address(client: ClientRef) -> ClientRef:
    """A network is blocked by its addresses."""
    return ClientRef("ip", client.value) if client.kind == "subnet" else client


def _ipv6_note(client: ClientRef) -> list[str]:
    """A note on blocking a single IPv6 address, as its customer usually has a whole /64."""
    network = network_of(client)
    if network is None or network.version == 4 or network.prefixlen < 128:
        return []
    customer = network.supernet(new_prefix=CUSTOMER_PREFIX)
    return [f"a customer usually has a whole /64 of IPv6: to block all of it, block {customer}"]


def _refuse_wildcard(client: ClientRef) -> None:
    if str(client[1]).strip() == "*":
        raise InvalidInput("* is not a client: block one client or one network")
