"""Blocks: in the configuration, and live on the nodes, which apply them within milliseconds."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Final

from headgate.clock import EPOCH
from headgate.control.config.rows import BlockRow
from headgate.control.config.writing import Remove
from headgate.control.service import listing
from headgate.control.service.client_lookup import CUSTOMER_PREFIX, is_wide_network, network_of
from headgate.control.service.dependencies import TopicService, to_change
from headgate.control.service.errors import NotFound, Risk, log_and_summarize
from headgate.control.service.guardrails import block_risks, require_confirmation
from headgate.control.service.models import BlockView, Change, ChangeContext, ClientRef, Page
from headgate.errors import HeadgateError, InvalidInput

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from headgate.control.config.history import Difference

__all__ = ["BlockService"]

NO_COUNTERS: Final = "the admin server was started without --store, so nodes apply this within a second, not at once"
STORE_UNAVAILABLE: Final = "the store is unavailable, so nodes apply this within a second, not at once"


class BlockService(TopicService):
    """Lists, adds and removes blocks."""

    def list(
        self, *, search: str = "", state: str = "all", after: str | None = None, most: int = 50
    ) -> Page[BlockView]:
        """The blocks in the config store, then those in the policy document, then those that only the nodes have."""
        live, _ = self._deps.live_blocks()
        with listing.open_list(self._deps, search=search, state=state, after=after, most=most) as query:
            found = listing.blocks(query, live)
        return self._deps.lookup.with_pseudonyms(found)

    def list_live_only(self) -> Sequence[BlockView]:
        """The active blocks that only the nodes have."""
        return [each for each in self.list(state="active", most=listing.MAX_PAGE).items if each.source == "live"]

    def risks(self, client: ClientRef) -> Sequence[Risk]:
        """The risks of blocking a client; InvalidInput if it cannot be blocked."""
        _refuse_wildcard(client)
        return tuple(block_risks(_as_address(client)))

    def add(self, change: ChangeContext, client: ClientRef, *, valid_until: datetime | None = None) -> Change:
        """Block a client, in the configuration and live on all nodes."""
        deps = self._deps
        change.actor.require("support", "block clients")
        _refuse_wildcard(client)
        with deps.attributed(change, *client.texts) as attribution:
            client = deps.lookup.canonical(client, texts=[change.reason], allow_hash=True)
            client = _as_address(deps.lookup.reveal(client))
            if is_wide_network(client):
                change.actor.require("operator", "block networks")
            deps.require_future(valid_until)
            require_confirmation(block_risks(client), change.confirmed)
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
                row = deps.find_row(connection, "blocked", "block", block).row
            row_ids, block = [block], ClientRef(row.kind, row.value)
        with deps.attributed(change) as attribution:
            client = _as_address(deps.lookup.canonical(block, texts=[change.reason], allow_hash=True))
            if is_wide_network(client):
                change.actor.require("operator", "end blocks of networks")
            names = (client, *deps.lookup.hashes_of(client))
            row_ids = row_ids or [each.id for name in names for each in deps.config.blocks(who=name)]
            if row_ids:
                version = deps.config.write([Remove("blocked", id) for id in row_ids], **attribution)
                _, notes = self._unblock_live(*names)
                return to_change(version, *notes)
            is_in_document = deps.current_policy().entries.get(client, {}).get("blocked")
            with deps.audited(change.actor, "unblocked", str(client), reason=change.reason):
                was_blocked, notes = self._unblock_live(*names)
                if not was_blocked:
                    why = "the block is in the policy document: remove it there" if is_in_document else "none exists"
                    raise NotFound("".join(notes) or f"there is no block of this client to remove: {why}")
            return Change(None, notes, f"unblocked {client}")

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
                errors |= dict.fromkeys(self._unblock_live(ClientRef(before.kind, before.value))[1])
                lifted += 1
        if lifted or restored:
            yield f"Blocks: {lifted} lifted, {restored} active again."
        yield from errors
        if live := self.list_live_only():
            blocks, are = ("live block", "is") if len(live) == 1 else ("live blocks", "are")
            names = [*(self._deps.lookup.name_of(each.who) for each in live[:5]), *(["…"] if len(live) > 5 else [])]
            yield f"{len(live)} {blocks} outside the configuration {are} kept: {', '.join(names)}."

    def _is_blocked(self, client: ClientRef) -> bool:
        """True if the config store or the nodes have a block of this client, or if the nodes cannot be asked."""
        live, errors = self._deps.live_blocks()
        is_live = any((each.kind, each.value) == client for each in live)
        return is_live or bool(errors or self._deps.config.blocks(who=client)) or self._deps.counters is None

    def _block_live(self, client: ClientRef, until: datetime | None, reason: str) -> tuple[str, ...]:
        """Block a client on the nodes; return a note if that is not possible."""
        if self._deps.counters is None:
            return (NO_COUNTERS,)
        try:
            self._deps.counters.block(*client, until=until, reason=reason)
        except HeadgateError as error:
            return (log_and_summarize(STORE_UNAVAILABLE, error),)
        return ()

    def _unblock_live(self, *names: ClientRef) -> tuple[bool, tuple[str, ...]]:
        """Remove the live blocks of a client under all its names: True if there was one, and a note on failure."""
        if self._deps.counters is None:
            return False, (NO_COUNTERS,)
        try:
            removed = [self._deps.counters.unblock(*name) for name in names]
            return any(removed), ()
        except HeadgateError as error:
            return False, (log_and_summarize("the nodes could not be reached, and may still block this client", error),)


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
