"""The state of an account as a pure function of its entries.

`AccountState.apply` is the only place that knows the effect of an entry on the totals, the grants and the
reservations. The ledger applies an entry before it writes it, and `verify` applies all entries again and compares.
"""

from __future__ import annotations

import json
from bisect import bisect_left, insort
from heapq import heapify, heappop, heappush
from typing import TYPE_CHECKING, Final, NamedTuple

from headgate.quotas.entries import (
    DERIVED_PREFIX,
    FIRST_HASH,
    EntryDraft,
    LedgerEntry,
    decode_sources,
    derived_id,
    encode_sources,
)

if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Self

__all__ = ["ALLOWANCE", "NEVER_US", "PERIOD_PREFIX", "AccountState", "Hold", "OpenGrant"]

PERIOD_PREFIX: Final = f"{DERIVED_PREFIX}period:"
"""Starts the ids of the grants that open a period of a plan."""
ALLOWANCE: Final = "allowance"
NEVER_US: Final = 2**62
"""The expiry of grants that do not expire, for sorting."""


class OpenGrant:
    """A grant, or a positive adjustment, of which something is left or held."""

    __slots__ = ("allocated", "expires_us", "id", "order", "priority", "remaining", "source")

    def __init__(
        self, id: str, source: str, priority: int, expires_us: int, order: int, remaining: int, allocated: int = 0
    ) -> None:
        self.id, self.source, self.priority, self.expires_us, self.order = id, source, priority, expires_us, order
        self.remaining = remaining
        """Neither spent nor held."""
        self.allocated = allocated
        """Held by reservations."""

    @property
    def rank(self) -> tuple[int, int, int]:
        """Grants are spent in this order: by priority, then the one that expires first, then the oldest."""
        return self.priority, self.expires_us, self.order

    def expiry_us(self) -> int | None:
        return None if self.expires_us == NEVER_US else self.expires_us

    def dump(self) -> list[object]:
        return [self.id, self.source, self.priority, self.expires_us, self.order, self.remaining, self.allocated]


class Hold(NamedTuple):
    """A reservation that has not ended."""

    id: str
    amount: int
    expires_us: int
    sources: tuple[tuple[str, int], ...]
    is_lease: bool


class _Effects(NamedTuple):
    sources: tuple[tuple[str, int], ...] = ()
    uncovered: int = 0


class AccountState:
    """Totals, open grants and open reservations of one account after its last entry."""

    def __init__(self, account: str) -> None:
        self.account = account
        self.position = self.number = 0
        self.at_us = 0
        self.hash = FIRST_HASH
        self.granted = self.adjusted = self.charged = self.expired = self.held = 0
        self.period_end_us = self.period_allowance = self.period_unused = 0
        """The last period of a plan: its end, the allowance granted for it, and what of that has expired."""
        self.grants: dict[str, OpenGrant] = {}
        self.holds: dict[str, Hold] = {}
        self._order: list[tuple[tuple[int, int, int], str]] = []  # grants with something left, in the order of spending
        self._due: list[tuple[int, str, str]] = []  # a heap of expiries, which may contain ended ones

    @property
    def available(self) -> int:
        return self.granted + self.adjusted - self.charged - self.expired - self.held

    def at(self, now_us: int) -> Self:
        """The state at a later time: what has expired by then is subtracted, although there are no entries for it."""
        if self.next_due_us() > now_us:
            return self
        later = self.load(self.account, self.dump())
        while (draft := later.next_expiry(now_us)) is not None:
            later.append(draft, now_us, later.number + 1)
        later.position = self.position
        return later

    # ------------------------------------------------------------------ periods

    def allowance_used(self, usage: Mapping[str, int]) -> int:
        """The units of the current period's allowance that are charged, with the usage of open leases by their ids."""
        grants = {id: grant for id, grant in self.grants.items() if self._is_allowance(grant)}
        left = sum(grant.remaining + grant.allocated for grant in grants.values())
        used = self.period_allowance - self.period_unused - left
        for lease, amount in usage.items():
            for id, size in self.holds[lease].sources:
                part = min(size, amount)
                amount -= part
                if id in grants:
                    used += part
        return used

    def allowance_taken(self) -> int:
        """The units of the current period's allowance that are charged or held."""
        left = sum(grant.remaining for grant in self.grants.values() if self._is_allowance(grant))
        return self.period_allowance - self.period_unused - left

    def leases(self) -> list[str]:
        """The ids of open leases."""
        return [id for id, hold in self.holds.items() if hold.is_lease]

    def _is_allowance(self, grant: OpenGrant) -> bool:
        """True for the allowance of the current period, in one grant or several."""
        is_current = grant.expires_us == self.period_end_us
        return is_current and grant.source == ALLOWANCE and grant.id.startswith(PERIOD_PREFIX)

    # ------------------------------------------------------------------ expiry

    def next_due_us(self) -> int:
        """When the next grant or reservation expires; NEVER_US if none does."""
        while self._due:
            due_us, kind, id = self._due[0]
            grant = self.grants.get(id)
            is_open = id in self.holds if kind == "hold" else grant is not None and grant.remaining > 0
            if is_open:
                return due_us
            heappop(self._due)
        return NEVER_US

    def next_expiry(self, now_us: int) -> EntryDraft | None:
        """The entry for the first grant or reservation that has expired; None if there is none."""
        if self.next_due_us() > now_us:
            return None
        _, kind, id = self._due[0]
        if kind == "hold":
            hold = self.holds[id]
            return EntryDraft(derived_id("expire", id), "expire", hold.amount, id, is_lease=hold.is_lease)
        grant = self.grants[id]
        return EntryDraft(derived_id("expire", id), "expire", grant.remaining, id, source=grant.source)

    # ------------------------------------------------------------------ entries

    def append(self, draft: EntryDraft, now_us: int, number: int, usage: tuple[int, str] = (0, "")) -> LedgerEntry:
        """The entry for a draft; the state is that after it. An account's entries never go back in time."""
        at_us = max(now_us, self.at_us)
        effects = self._apply(draft, at_us)
        entry = LedgerEntry(
            number,
            self.account,
            self.position + 1,
            draft.id,
            at_us,
            draft.kind,
            draft.amount,
            draft.subject,
            draft.expires_us,
            draft.priority,
            draft.source,
            int(draft.is_lease),
            draft.author,
            draft.reason,
            draft.reference,
            *usage,
            encode_sources(effects.sources),
            effects.uncovered,
            self.granted,
            self.adjusted,
            self.charged,
            self.expired,
            self.held,
            self.hash,
        )
        self._follow(entry)
        return entry

    def replay(self, entry: LedgerEntry) -> LedgerEntry:
        """Apply an entry that was read; returns what it should be."""
        draft = EntryDraft(
            entry.id,
            entry.kind,
            entry.amount,
            entry.subject,
            entry.expires_us,
            entry.priority,
            entry.source,
            bool(entry.is_lease),
            entry.author,
            entry.reason,
            entry.reference,
        )
        return self.append(draft, entry.at_us, entry.number, (entry.usage_count, entry.usage_hash))

    def _follow(self, entry: LedgerEntry) -> None:
        self.position, self.number, self.at_us, self.hash = entry.position, entry.number, entry.at_us, entry.hash

    def _apply(self, draft: EntryDraft, at_us: int) -> _Effects:
        match draft.kind:
            case "grant":
                self.granted += draft.amount
                self._open(draft)
                if draft.source == ALLOWANCE and draft.id.startswith(PERIOD_PREFIX):
                    self._note_allowance(draft)
            case "adjust":
                self.adjusted += draft.amount
                if draft.amount < 0:
                    return _Effects(self._take(-draft.amount))
                if draft.amount:  # nothing may be left of a lease
                    self._open(draft)
            case "reserve":
                sources = self._take(draft.amount, is_held=True)
                self._hold(Hold(draft.id, draft.amount, draft.expires_us or NEVER_US, sources, draft.is_lease))
                self.held += draft.amount
                return _Effects(sources)
            case "commit":
                return self._commit(draft, at_us)
            case "void":
                self._release(self.holds[draft.subject], 0, at_us)
            case "expire":
                return self._expire(draft, at_us)
            case kind:
                raise ValueError(f"unknown kind {kind!r}")
        return _Effects()

    def _commit(self, draft: EntryDraft, at_us: int) -> _Effects:
        hold = self.holds.get(draft.subject)
        if hold is None:  # without a reservation, or after its expiry
            paid: tuple[tuple[str, int], ...] = ()
        else:
            paid = self._release(hold, draft.amount, at_us)
        missing = draft.amount - sum(amount for _, amount in paid)
        self.charged += draft.amount - missing
        more = self._take(min(missing, self.available))
        covered = sum(amount for _, amount in more)
        self.charged += covered
        merged = dict(paid)
        for id, amount in more:
            merged[id] = merged.get(id, 0) + amount
        return _Effects(tuple(merged.items()), missing - covered)

    def _expire(self, draft: EntryDraft, at_us: int) -> _Effects:
        if (hold := self.holds.get(draft.subject)) is not None:
            if hold.is_lease:
                self.charged += hold.amount
                return _Effects(self._release(hold, hold.amount, at_us))
            self._release(hold, 0, at_us)
            return _Effects()
        grant = self.grants[draft.subject]
        self.expired += grant.remaining
        if self._is_allowance(grant):
            self.period_unused += grant.remaining
        self._spend(grant, grant.remaining)
        return _Effects()

    # ------------------------------------------------------------------ grants and holds

    def _open(self, draft: EntryDraft) -> None:
        expires_us = NEVER_US if draft.expires_us is None else draft.expires_us
        grant = OpenGrant(draft.id, draft.source, draft.priority, expires_us, self.position, draft.amount)
        self.grants[grant.id] = grant
        insort(self._order, (grant.rank, grant.id))
        if expires_us != NEVER_US:
            heappush(self._due, (expires_us, "grant", grant.id))

    def _note_allowance(self, draft: EntryDraft) -> None:
        end_us = draft.expires_us or 0
        if end_us != self.period_end_us:
            self.period_end_us, self.period_allowance, self.period_unused = end_us, 0, 0
        self.period_allowance += draft.amount

    def _hold(self, hold: Hold) -> None:
        self.holds[hold.id] = hold
        heappush(self._due, (hold.expires_us, "hold", hold.id))

    def _take(self, amount: int, *, is_held: bool = False) -> tuple[tuple[str, int], ...]:
        """Spend or hold an amount that is available, from the first grants."""
        taken = []
        while amount:
            grant = self.grants[self._order[0][1]]
            part = min(amount, grant.remaining)
            amount -= part
            taken.append((grant.id, part))
            if is_held:
                grant.allocated += part
            self._spend(grant, part)
        return tuple(taken)

    def _spend(self, grant: OpenGrant, amount: int) -> None:
        grant.remaining -= amount
        if amount and not grant.remaining:
            del self._order[bisect_left(self._order, (grant.rank, grant.id))]
            self._close(grant)

    def _release(self, hold: Hold, spent: int, at_us: int) -> tuple[tuple[str, int], ...]:
        """End a reservation of which up to `spent` was used; the rest returns to its grants, or expires with them."""
        del self.holds[hold.id]
        self.held -= hold.amount
        paid = []
        for id, amount in hold.sources:
            grant = self.grants[id]
            grant.allocated -= amount
            part = min(amount, spent)
            spent -= part
            if part:
                paid.append((id, part))
            rest = amount - part
            if rest and grant.expires_us <= at_us:
                self.expired += rest
                if self._is_allowance(grant):
                    self.period_unused += rest
            elif rest:
                if not grant.remaining:
                    insort(self._order, (grant.rank, grant.id))
                    if grant.expires_us != NEVER_US:
                        heappush(self._due, (grant.expires_us, "grant", grant.id))
                grant.remaining += rest
            self._close(grant)
        return tuple(paid)

    def _close(self, grant: OpenGrant) -> None:
        if not grant.remaining and not grant.allocated:
            self.grants.pop(grant.id, None)

    # ------------------------------------------------------------------ checkpoints

    def dump(self) -> str:
        """The state as JSON, for a checkpoint."""
        head = [self.position, self.number, self.at_us, self.hash]
        totals = [self.granted, self.adjusted, self.charged, self.expired, self.held]
        totals += [self.period_end_us, self.period_allowance, self.period_unused]
        grants = [grant.dump() for grant in sorted(self.grants.values(), key=lambda each: each.order)]
        holds = [
            [hold.id, hold.amount, hold.expires_us, encode_sources(hold.sources), hold.is_lease]
            for hold in sorted(self.holds.values())
        ]
        return json.dumps([*head, *totals, grants, holds], separators=(",", ":"))

    @classmethod
    def load(cls, account: str, text: str) -> Self:
        state = cls(account)
        *totals, grants, holds = json.loads(text)
        state.position, state.number, state.at_us, state.hash = totals[:4]
        state.granted, state.adjusted, state.charged, state.expired, state.held = totals[4:9]
        state.period_end_us, state.period_allowance, state.period_unused = totals[9:]
        for fields in grants:
            grant = OpenGrant(*fields)
            state.grants[grant.id] = grant
            if grant.remaining:
                state._order.append((grant.rank, grant.id))
                if grant.expires_us != NEVER_US:
                    state._due.append((grant.expires_us, "grant", grant.id))
        for id, amount, expires_us, sources, is_lease in holds:
            state._hold(Hold(id, amount, expires_us, decode_sources(sources), is_lease))
        state._order.sort()
        heapify(state._due)
        return state
