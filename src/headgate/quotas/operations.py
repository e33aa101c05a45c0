"""The operations of the ledger: which entries each of them appends, if any.

Each runs inside a transaction that excludes all other writers. An operation whose id is known appends nothing: with the
same content it has the first result, with other content it is an error.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, Protocol

from headgate.errors import InvalidInput
from headgate.quotas.entries import EntryDraft, LeaseAnswer, LedgerEntry, QuotaReservation, decode_sources, derived_id

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from headgate.quotas.account import AccountState
    from headgate.quotas.entries import UsageRecord
    from headgate.quotas.plans import QuotaPlan

__all__ = [
    "Charge",
    "CloseLease",
    "EndReservation",
    "LedgerTransaction",
    "OpenPeriod",
    "Operation",
    "Post",
    "RecordUsage",
    "Reserve",
    "SettleOutage",
    "TakeLease",
    "WriteExpired",
]

MAX_TOTAL: Final = 2**62
_AMOUNTS: Final = ("kind", "amount", "expires_us", "priority", "source", "is_lease")


class LedgerTransaction(Protocol):
    """The view that an operation has of the ledger."""

    now_us: int

    def find(self, id: str) -> LedgerEntry | None:
        """The entry with this id."""

    def state(self, account: str) -> AccountState:
        """The state of an account, after the entries for everything that has expired."""

    def append(self, state: AccountState, draft: EntryDraft, usage: tuple[int, str] = (0, "")) -> LedgerEntry: ...

    def known_usage(self, ids: Collection[str]) -> dict[str, tuple[str, int]]:
        """The lease and the time of those ids of which there is a usage record."""

    def add_usage(self, records: Sequence[UsageRecord]) -> set[str]:
        """Write the usage records of new ids; returns the ids that another record, of another time, has charged."""

    def usage_of(self, lease: str) -> tuple[int, int, str]:
        """The number, the sum and the hash of the usage records of a lease."""


class Operation:
    """One call of the ledger."""

    def __init__(self, *, account: str | None = None, ids: Collection[str] = ()) -> None:
        self.account = account
        """The account, unless it is that of an entry yet to be found."""
        self.ids = ids
        """Ids of entries that the operation looks up."""
        self.result: Any = None
        self.error: Exception | None = None
        self.is_done = False

    def run(self, ledger: LedgerTransaction) -> Any:
        raise NotImplementedError


class Post(Operation):
    """A grant or an adjustment."""

    def __init__(self, account: str, draft: EntryDraft) -> None:
        super().__init__(account=account, ids=(draft.id,))
        self.posted_to, self.draft = account, draft

    def run(self, ledger: LedgerTransaction) -> LedgerEntry | None:
        draft = self.draft
        if (found := ledger.find(draft.id)) is not None:
            return check_repetition(found, self.posted_to, draft)
        return self.post(ledger, ledger.state(self.posted_to))

    def post(self, ledger: LedgerTransaction, state: AccountState) -> LedgerEntry | None:
        draft = self.draft
        if draft.expires_us is not None and draft.expires_us <= max(ledger.now_us, state.at_us):
            raise InvalidInput(f"expires_at of grant {draft.id!r} is in the past; give a later time, or None for never")
        if draft.amount < 0 and state.available < -draft.amount:
            problem = f"cannot take {-draft.amount} from account {state.account!r}: its balance is {state.available}"
            raise InvalidInput(f"{problem}; adjust by at most that")
        if state.granted + abs(state.adjusted) + draft.amount > MAX_TOTAL:
            raise InvalidInput(
                f"account {state.account!r} would exceed {MAX_TOTAL} units in total; use another account"
            )
        return ledger.append(state, draft)


class Reserve(Post):
    """A reservation, or None if the balance is too low."""

    def run(self, ledger: LedgerTransaction) -> Any:
        entry = super().run(ledger)
        return None if entry is None else reservation_of(entry)

    def post(self, ledger: LedgerTransaction, state: AccountState) -> LedgerEntry | None:
        return ledger.append(state, self.draft) if self.draft.amount <= state.available else None


class TakeLease(Reserve):
    """A reservation whose amount depends on the balance: a share of it, so that leases shrink near the end.

    The result is a `LeaseAnswer`.
    """

    def __init__(
        self, account: str, draft: EntryDraft, *, least: int, share: int, plan: QuotaPlan | None = None
    ) -> None:
        super().__init__(account, draft)
        self.least, self.share, self.plan = least, share, plan

    def run(self, ledger: LedgerTransaction) -> Any:
        found = ledger.find(self.draft.id)
        if found is not None:  # repeated: the amount was chosen the first time
            self.draft = self.draft._replace(amount=found.amount)
        lease: QuotaReservation | None = super().run(ledger)
        state = ledger.state(self.posted_to)
        if lease is None:
            return LeaseAnswer(None, state.available, state.period_end_us)
        grants = {id: ledger.find(id) for id, _ in lease.sources}
        ends = [grant.expires_us for grant in grants.values() if grant is not None and grant.expires_us is not None]
        names = [(grants[id], amount) for id, amount in lease.sources]
        paid_by = tuple((grant.source, amount) for grant, amount in names if grant is not None)
        lease = lease._replace(valid_until_us=min(ends, default=0), paid_by=paid_by)
        return LeaseAnswer(lease, state.available, state.period_end_us)

    def post(self, ledger: LedgerTransaction, state: AccountState) -> LedgerEntry | None:
        if self.plan is not None:
            open_period(ledger, state, self.plan)
        amount = min(self.draft.amount, max(self.least, state.available // self.share))
        self.draft = self.draft._replace(amount=amount)
        return super().post(ledger, state) if amount else None


class Charge(Post):
    """A charge without a reservation, or None if the balance is too low."""

    def post(self, ledger: LedgerTransaction, state: AccountState) -> LedgerEntry | None:
        return ledger.append(state, self.draft) if self.draft.amount <= state.available else None


class EndReservation(Operation):
    """The commit or void of a reservation."""

    def __init__(self, draft: EntryDraft) -> None:
        self.draft = draft
        """Its subject is the reservation."""
        self.others = {kind: derived_id(kind, draft.subject) for kind in ("commit", "void", "expire")}
        super().__init__(ids=(draft.subject, *self.others.values()))

    def run(self, ledger: LedgerTransaction) -> LedgerEntry:
        draft, id = self.draft, self.draft.subject
        reservation = ledger.find(id)
        if reservation is None or reservation.kind != "reserve":
            raise InvalidInput(f"there is no reservation {id!r}; use the id of one that reserve() has returned")
        if reservation.is_lease:
            raise InvalidInput(f"{id!r} is a lease; end it with close_lease()")
        state = ledger.state(reservation.account)
        if (found := ledger.find(draft.id)) is not None:
            if found.amount != draft.amount and draft.kind == "commit":
                problem = f"reservation {id!r} was committed before with the amount {found.amount}, not {draft.amount}"
                raise InvalidInput(f"{problem}; correct it with adjust()")
            return found
        committed, voided, expired = (ledger.find(self.others[kind]) for kind in ("commit", "void", "expire"))
        if draft.kind == "commit":
            if voided is not None:
                raise InvalidInput(f"reservation {id!r} was voided before; use charge() for its amount")
            return ledger.append(state, draft)
        if committed is not None:
            problem = f"reservation {id!r} was committed before with the amount {committed.amount}"
            raise InvalidInput(f"{problem}; correct it with adjust()")
        return expired or ledger.append(state, draft._replace(amount=reservation.amount))


class RecordUsage(Operation):
    """Usage records of open leases; the result is the ids that other records have charged."""

    def __init__(self, records: Sequence[UsageRecord]) -> None:
        self.records = records
        leases = {record.lease for record in records}
        super().__init__(ids=[id for lease in leases for id in (lease, *_lease_ends(lease))])

    def run(self, ledger: LedgerTransaction) -> set[str]:
        for account, lease in {(record.account, record.lease) for record in self.records}:
            entry = ledger.find(lease)
            if entry is None or not entry.is_lease or entry.account != account:
                raise InvalidInput(f"there is no lease {lease!r} of account {account!r}")
        leases = {record.lease for record in self.records}
        closed = {lease for lease in leases if any(ledger.find(id) is not None for id in _lease_ends(lease))}
        late = {record.id: record.lease for record in self.records if record.lease in closed}
        known = ledger.known_usage(late)  # a repetition by a process that does not know that its lease was closed
        if missing := sorted(late.keys() - known.keys()):
            raise InvalidInput(f"lease {late[missing[0]]!r} was closed before {missing[0]!r} was recorded")
        return ledger.add_usage(self.records)


class CloseLease(Operation):
    """The end of a lease: charges the sum of its usage records.

    An expired lease was charged as a whole: what its records do not account for is returned.
    """

    def __init__(self, lease: str, draft: EntryDraft) -> None:
        self.lease, self.draft = lease, draft
        super().__init__(ids=(lease, derived_id("expire", lease), *_lease_ends(lease)))

    def run(self, ledger: LedgerTransaction) -> LedgerEntry | None:
        lease = ledger.find(self.lease)
        if lease is None or not lease.is_lease:
            return None  # it was refused
        state = ledger.state(lease.account)
        for id in _lease_ends(self.lease):
            if (found := ledger.find(id)) is not None:
                return found
        count, amount, hash = ledger.usage_of(self.lease)
        if ledger.find(derived_id("expire", self.lease)) is None:
            draft = self.draft._replace(id=derived_id("commit", self.lease), kind="commit", amount=amount)
            return ledger.append(state, draft, (count, hash))
        unused = max(-state.available, lease.amount - amount)
        grants = [ledger.find(id) for id, _ in decode_sources(lease.sources)]
        ends = [grant.expires_us for grant in grants if grant is not None]
        draft = self.draft._replace(
            id=derived_id("adjust", self.lease),
            kind="adjust",
            amount=unused,
            # Returned units expire with the grants that they came from.
            expires_us=None if not ends or None in ends else max(end for end in ends if end is not None),
            source="returned lease",
        )
        return ledger.append(state, draft, (count, hash))


class SettleOutage(Operation):
    """A charge for requests that were admitted while the ledger was unavailable, as far as the balance allows."""

    def __init__(
        self, account: str, draft: EntryDraft, records: Sequence[UsageRecord], *, plan: QuotaPlan | None = None
    ) -> None:
        """`draft` is a commit whose subject is the lease of the records, which is not in the ledger."""
        super().__init__(account=account, ids=(draft.id,))
        self.of, self.draft, self.records, self.plan = account, draft, records, plan

    def run(self, ledger: LedgerTransaction) -> LedgerEntry:
        if (found := ledger.find(self.draft.id)) is not None:
            return found
        ledger.add_usage(self.records)
        count, amount, hash = ledger.usage_of(self.draft.subject)
        state = ledger.state(self.of)
        if self.plan is not None:
            open_period(ledger, state, self.plan)
        return ledger.append(state, self.draft._replace(amount=amount), (count, hash))


def _lease_ends(lease: str) -> tuple[str, str]:
    return derived_id("commit", lease), derived_id("adjust", lease)


class OpenPeriod(Operation):
    """The grants of the current period of a plan; the result is those that were missing."""

    def __init__(self, account: str, plan: QuotaPlan) -> None:
        super().__init__(account=account)
        self.of, self.plan = account, plan

    def run(self, ledger: LedgerTransaction) -> list[LedgerEntry]:
        return open_period(ledger, ledger.state(self.of), self.plan)


def open_period(ledger: LedgerTransaction, state: AccountState, plan: QuotaPlan) -> list[LedgerEntry]:
    now_us = max(ledger.now_us, state.at_us)
    return [ledger.append(state, draft) for draft in [*plan.grants_due(state, now_us)] if ledger.find(draft.id) is None]


class WriteExpired(Operation):
    """Entries for everything that has expired in an account."""

    def __init__(self, account: str) -> None:
        super().__init__(account=account)
        self.of = account

    def run(self, ledger: LedgerTransaction) -> None:
        ledger.state(self.of)


def reservation_of(entry: LedgerEntry) -> QuotaReservation:
    """The reservation that an entry has made."""
    sources = decode_sources(entry.sources)
    return QuotaReservation(entry.id, entry.account, entry.amount, entry.expires_us or 0, sources)


def check_repetition(found: LedgerEntry, account: str, draft: EntryDraft) -> LedgerEntry:
    """The first result of a repeated operation; raises InvalidInput if the content differs.

    A reservation that is repeated expires when the first one does. Author, reason and reference may differ.
    """
    given = {name: getattr(draft, name) for name in _AMOUNTS} | {"account": account}
    first = {name: getattr(found, name) for name in _AMOUNTS} | {"account": found.account}
    if draft.kind == "reserve":
        given["expires_us"] = first["expires_us"]
    differences = [
        f"{name.removesuffix('_us')} {first[name]!r}, not {given[name]!r}"
        for name in first
        if first[name] != given[name]
    ]
    if differences:
        raise InvalidInput(f"id {draft.id!r} was used before with {', '.join(differences)}; use a new id")
    return found
