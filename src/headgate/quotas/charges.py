"""Charged requests: which requests an account has paid for in a period, and by which sources.

A lease is paid by its grants in their order, and so are its usage records, in the order in which they were written.
"""

from __future__ import annotations

from collections import Counter
from datetime import timedelta
from itertools import islice, pairwise
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias

from sqlalchemy import func, or_, select, tuple_

from headgate.clock import EPOCH
from headgate.quotas.entries import LedgerEntry, decode_sources, derived_id, request_id, slice_sources
from headgate.quotas.storage import find_entries
from headgate.quotas.tables import ACCOUNTS, ENTRIES, USAGE
from headgate.telemetry.human_time import shown

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
    from datetime import tzinfo

    from sqlalchemy import Connection

    from headgate.quotas.entries import Sources
    from headgate.quotas.ledger import Ledger

__all__ = [
    "ChargeReport",
    "ChargedRequest",
    "explain_charges",
    "find_accounts",
    "read_exhausted",
    "read_single_charges",
    "read_usage",
    "usage_cells",
]

Cursor: TypeAlias = tuple[int, int]
"""The time of the last row of a page, and its number or position."""

PAGE: Final = 2000
MAX_EXPLAINED: Final = 10_000
"""Requests, and entries, that are read for one report."""
MAX_SHOWN: Final = 20
UNCOVERED: Final = "not covered"
"""The source of units that were used beyond the balance, and not charged."""
UNSETTLED: Final = "not settled"
"""The source of units that were admitted without a lease, before they are settled."""


class ChargedRequest(NamedTuple):
    """A request that was charged."""

    at_us: int
    id: str
    """The idempotency key of the request."""
    amount: int
    paid_by: tuple[tuple[str, int], ...]
    """The sources that paid, such as "allowance", with their amounts."""
    reference: str
    lease: str
    """The lease that it was charged to; empty for a charge of its own."""
    entry: int
    """The number of the entry that charges it; 0 while its lease is open."""


class ChargeReport(NamedTuple):
    """The charged requests of an account in a period."""

    account: str
    since_us: int
    until_us: int
    requests: int
    amount: int
    paid_by: tuple[tuple[str, int], ...]
    last: tuple[ChargedRequest, ...]
    """The last requests."""
    exhausted: tuple[tuple[int, int | None], ...]
    """The times in which nothing was left, each with its beginning and end; None if it has not ended."""
    is_cut: bool
    """True if there are more requests than were read."""

    def as_dict(self) -> dict[str, Any]:
        """All fields, for JSON."""
        return self._asdict() | {"last": [request._asdict() for request in self.last]}

    def paragraphs(self, zone: tzinfo | None) -> list[str]:
        """The report for people."""
        least = "at least " if self.is_cut else ""
        paid = ", ".join([f"{name} {amount:,}" for name, amount in self.paid_by])
        count = f"{self.requests:,} request{'' if self.requests == 1 else 's'}"
        found = [
            f"Account {self.account}: {least}{count} charged with {self.amount:,} units"
            + (f", paid by {paid}." if paid else ".")
        ]
        for begin_us, end_us in self.exhausted:
            end = "it still is" if end_us is None else f"until {_shown(end_us, zone)}"
            found.append(f"Nothing was left from {_shown(begin_us, zone)}, {end}.")
        if self.last:
            title = "Charged requests" if len(self.last) == self.requests else f"The last {len(self.last)} requests"
            lines = ["  " + "  ".join([cell for cell in usage_cells(each, zone) if cell]) for each in self.last]
            found.append("\n".join([f"{title}:", *lines]))
        return found


def explain_charges(ledger: Ledger, names: Collection[str], since_us: int, until_us: int) -> list[ChargeReport]:
    """Report on the accounts of a client in a period. `names` are its identities, or names of accounts."""
    return [_explain(ledger, account, since_us, until_us) for account in ledger.find_accounts(names)]


def _explain(ledger: Ledger, account: str, since_us: int, until_us: int) -> ChargeReport:
    requests = [*islice(ledger.charged_requests(account, since_us, until_us), MAX_EXPLAINED + 1)]
    is_cut, requests = len(requests) > MAX_EXPLAINED, requests[:MAX_EXPLAINED]
    paid_by: Counter[str] = Counter()
    for request in requests:
        paid_by.update(dict(request.paid_by))
    return ChargeReport(
        account,
        since_us,
        until_us,
        len(requests),
        sum(request.amount for request in requests),
        tuple(paid_by.items()),
        tuple(requests[-MAX_SHOWN:]),
        tuple(ledger.exhausted_times(account, since_us, until_us)),
        is_cut,
    )


def usage_cells(request: ChargedRequest, zone: tzinfo | None) -> tuple[str, ...]:
    """Time, id, amount, sources and reference of a request for people."""
    paid = ", ".join([name if amount == request.amount else f"{name} {amount:,}" for name, amount in request.paid_by])
    at = shown(EPOCH + timedelta(microseconds=request.at_us), zone, with_zone=False)
    return at, request.id, f"{request.amount:,}", paid, request.reference


def _shown(at_us: int, zone: tzinfo | None) -> str:
    return shown(EPOCH + timedelta(microseconds=at_us), zone)


# ------------------------------------------------------------------ reads


def find_accounts(connection: Connection, names: Collection[str], most: int) -> list[str]:
    """The accounts with one of these names, and those of clients with one of them, in any plan."""
    is_client = [ACCOUNTS.c.account.endswith(f"/{name}", autoescape=True) for name in names]
    query = select(ACCOUNTS.c.account).where(or_(ACCOUNTS.c.account.in_([*names]), *is_client))
    return [*connection.scalars(query.order_by(ACCOUNTS.c.account).limit(most))]


def read_usage(
    connection: Connection, account: str, since_us: int, until_us: int, *, after: Cursor | None
) -> tuple[list[ChargedRequest], Cursor | None]:
    """A page of the requests that were charged to leases, and the cursor after it; None at the end."""
    columns = [USAGE.c[name] for name in ("at_us", "id", "amount", "reference", "lease", "number")]
    query = select(*columns).where(USAGE.c.account == account, USAGE.c.at_us >= since_us, USAGE.c.at_us < until_us)
    if after is not None:
        query = query.where(tuple_(USAGE.c.at_us, USAGE.c.number) > after)
    rows = connection.execute(query.order_by(USAGE.c.at_us, USAGE.c.number).limit(PAGE)).all()
    sources = _LeaseSources(connection, rows)
    found = [
        ChargedRequest(at_us, id, amount, sources.paid_by(number), reference, lease, sources.entry(lease))
        for at_us, id, amount, reference, lease, number in rows
    ]
    return found, (rows[-1].at_us, rows[-1].number) if len(rows) == PAGE else None


def read_single_charges(
    connection: Connection, account: str, since_us: int, until_us: int, *, after: Cursor | None
) -> tuple[list[ChargedRequest], Cursor | None]:
    """A page of the requests that have an entry of their own, and the cursor after it; None at the end."""
    query = select(ENTRIES).where(
        *(ENTRIES.c.account == account, ENTRIES.c.at_us >= since_us, ENTRIES.c.at_us < until_us),
        *(ENTRIES.c.kind == "commit", ENTRIES.c.usage_count == 0, ENTRIES.c.is_lease == 0),
    )
    if after is not None:
        query = query.where(tuple_(ENTRIES.c.at_us, ENTRIES.c.position) > after)
    rows = connection.execute(query.order_by(ENTRIES.c.at_us, ENTRIES.c.position).limit(PAGE)).all()
    entries = [LedgerEntry(*row) for row in rows]
    names = _grant_names(connection, entries)
    found = [
        ChargedRequest(
            entry.at_us,
            request_id(entry.id),
            entry.amount,
            slice_sources(_sources_of(entry, names), 0, entry.amount),
            entry.reference,
            "",
            entry.number,
        )
        for entry in entries
    ]
    return found, (rows[-1].at_us, rows[-1].position) if len(rows) == PAGE else None


def _grant_names(connection: Connection, entries: Iterable[LedgerEntry]) -> dict[str, str]:
    grants = {id for entry in entries for id, _ in decode_sources(entry.sources)}
    return {id: entry.source for id, entry in find_entries(connection, grants).items()}


def _sources_of(entry: LedgerEntry, names: Mapping[str, str]) -> Sources:
    """The names of the sources of an entry, in the order in which they pay."""
    found = tuple((names.get(id, id), amount) for id, amount in decode_sources(entry.sources))
    return (*found, (UNCOVERED, entry.uncovered)) if entry.uncovered else found


class _LeaseSources:
    """The sources that have paid for usage records."""

    def __init__(self, connection: Connection, rows: Sequence[Any]) -> None:
        leases = {row.lease for row in rows}
        ids = [id for lease in leases for id in (lease, derived_id("commit", lease), derived_id("expire", lease))]
        self._entries = find_entries(connection, ids)
        self._names = _grant_names(connection, self._entries.values())
        self._paid_by: dict[int, Sources] = {}
        for lease in leases:
            self._divide(connection, lease, [row.number for row in rows if row.lease == lease])

    def entry(self, lease: str) -> int:
        """The number of the entry that charges the records of a lease; 0 while it is open."""
        ends = [self._entries.get(derived_id(kind, lease)) for kind in ("commit", "expire")]
        return next((entry.number for entry in ends if entry is not None), 0)

    def paid_by(self, number: int) -> Sources:
        return self._paid_by[number]

    def _divide(self, connection: Connection, lease: str, numbers: Sequence[int]) -> None:
        """Divide the sources of a lease among its records: each pays for what those before it have left."""
        first, last = min(numbers), max(numbers)
        before = select(func.sum(USAGE.c.amount)).where(USAGE.c.lease == lease, USAGE.c.number < first)
        start = int(connection.scalar(before) or 0)
        query = select(USAGE.c.number, USAGE.c.amount).where(
            USAGE.c.lease == lease, USAGE.c.number >= first, USAGE.c.number <= last
        )
        ends = (derived_id("commit", lease), derived_id("expire", lease), lease)
        paying = next((entry for id in ends if (entry := self._entries.get(id)) is not None), None)
        sources = () if paying is None else _sources_of(paying, self._names)
        rest = UNSETTLED if paying is None else UNCOVERED
        for number, amount in connection.execute(query.order_by(USAGE.c.number)):
            found = slice_sources(sources, start, amount)
            covered = sum(size for _, size in found)
            self._paid_by[number] = (*found, (rest, amount - covered)) if covered < amount else found
            start += amount


def read_exhausted(
    connection: Connection, account: str, since_us: int, until_us: int
) -> Iterator[tuple[int, int | None]]:
    """The times in a period in which the balance was 0."""
    query = select(ENTRIES).where(ENTRIES.c.account == account)
    earlier = query.where(ENTRIES.c.at_us < since_us).order_by(ENTRIES.c.at_us.desc(), ENTRIES.c.position.desc())
    later = query.where(ENTRIES.c.at_us >= since_us, ENTRIES.c.at_us < until_us).order_by(ENTRIES.c.position)
    rows = [*connection.execute(earlier.limit(1)), *connection.execute(later.limit(MAX_EXPLAINED))]
    entries = [LedgerEntry(*row) for row in rows]
    begin_us = None
    for entry, following in pairwise([*entries, None]):
        if entry is None or (following is not None and following.at_us == entry.at_us):
            continue
        if entry.balance == 0 and begin_us is None:
            begin_us = max(entry.at_us, since_us)
        elif entry.balance > 0 and begin_us is not None:
            yield begin_us, entry.at_us
            begin_us = None
    if begin_us is not None:
        yield begin_us, None
