"""Entries of the ledger, and the hash that chains them.

An entry is a fact that is never changed. Its first fields were decided by the caller; the last ones follow from the
entries before it, so that any program can recompute and verify them. The hash of an entry is the SHA-256 of all its
fields as a JSON array, which contains the hash of the previous entry of the account.
"""

from __future__ import annotations

import json
from hashlib import sha256
from typing import TYPE_CHECKING, Final, Literal, NamedTuple, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Iterable
    from hashlib import _Hash as HASH

__all__ = [
    "DERIVED_PREFIX",
    "FIRST_HASH",
    "EntryDraft",
    "Kind",
    "LeaseAnswer",
    "LedgerEntry",
    "LedgerProblem",
    "QuotaReservation",
    "UsageRecord",
    "chain_usage",
    "decode_sources",
    "derived_id",
    "encode_sources",
    "encode_usage",
    "hash_usage",
    "request_id",
    "slice_sources",
]

Kind: TypeAlias = Literal["grant", "reserve", "commit", "void", "expire", "adjust"]
Sources: TypeAlias = tuple[tuple[str, int], ...]
"""The ids of grants, and the amount that each of them contributes."""

FIRST_HASH: Final = "0" * 64
"""The previous hash of an account's first entry."""
DERIVED_PREFIX: Final = "headgate:"
"""Starts the ids of entries that follow from others, such as the expiry of a grant. Callers cannot choose such ids."""

_encode = json.JSONEncoder(separators=(",", ":")).encode


class EntryDraft(NamedTuple):
    """The fields of an entry that do not depend on earlier entries."""

    id: str
    kind: Kind
    amount: int
    subject: str = ""
    """The id of the reservation or grant that the entry is about."""
    expires_us: int | None = None
    priority: int = 0
    source: str = ""
    """A name for the origin of a grant, such as "allowance"."""
    is_lease: bool = False
    author: str = ""
    reason: str = ""
    reference: str = ""


class LedgerEntry(NamedTuple):
    """One entry of an account. `amount` is positive, except in adjustments that take from the balance."""

    number: int
    """Counts all entries of the ledger from 1, without gaps."""
    account: str
    position: int
    """Counts the entries of the account from 1, without gaps."""
    id: str
    """The idempotency key, unique in the ledger."""
    at_us: int
    kind: Kind
    amount: int
    """Granted, reserved, used, returned, expired or adjusted."""
    subject: str
    expires_us: int | None
    priority: int
    source: str
    is_lease: int
    author: str
    reason: str
    reference: str
    """A reference to the request or document behind the entry, chosen by the caller."""
    usage_count: int
    usage_hash: str
    """The number of usage records that a commit of a lease sums up, and the hash of them."""
    sources: str
    """A JSON array of the grants that a reservation or charge draws on, each with its amount."""
    uncovered: int
    """The part of `amount` that the balance did not cover, and that was not charged."""
    granted: int
    adjusted: int
    charged: int
    expired: int
    held: int
    """Totals of the account after this entry."""
    previous_hash: str

    @property
    def balance(self) -> int:
        """Available units of the account after this entry."""
        return self.granted + self.adjusted - self.charged - self.expired - self.held

    @property
    def hash(self) -> str:
        """The SHA-256 of all fields, in hexadecimal digits."""
        return sha256(_encode(self).encode()).hexdigest()


class QuotaReservation(NamedTuple):
    """An amount that is held for a request until it is committed, voided or expires."""

    id: str
    account: str
    amount: int
    expires_us: int
    sources: Sources
    """The grants that it draws on, in the order in which they are spent."""
    valid_until_us: int = 0
    """Of a lease: when the first of these grants expires; 0 for never."""
    paid_by: Sources = ()
    """Of a lease: the names of the sources of these grants, such as "allowance", with their amounts."""


class LeaseAnswer(NamedTuple):
    """The answer to a process that has asked for a lease."""

    lease: QuotaReservation | None
    """None if the balance is too low."""
    balance: int
    """The units that the account has left besides the lease."""
    period_end_us: int
    """The end of the account's current period; 0 without a plan."""


class UsageRecord(NamedTuple):
    """One request that was charged to a lease."""

    id: str
    """The idempotency key of the request: a second record with it is not charged."""
    account: str
    lease: str
    amount: int
    at_us: int
    reference: str = ""


class LedgerProblem(NamedTuple):
    """A contradiction that `Ledger.verify()` has found."""

    account: str
    number: int
    """The number of the entry, 0 if the problem is not in a single entry."""
    text: str

    def __str__(self) -> str:
        place = f"entry {self.number}" if self.number else "ledger"
        return f"{place}{f' of account {self.account!r}' if self.account else ''}: {self.text}"


def encode_usage(row: Iterable[object]) -> bytes:
    """A usage record with its number, as a line of JSON."""
    return _encode([*row]).encode() + b"\n"


def hash_usage(rows: Iterable[tuple[object, ...]]) -> str:
    """The SHA-256 of usage records, in hexadecimal digits."""
    return sha256(b"".join(map(encode_usage, rows))).hexdigest()


def chain_usage(previous_hash: str) -> HASH:
    """The hash of a batch of usage records before its first one; it begins with the hash of the previous batch."""
    return sha256(previous_hash.encode())


def derived_id(kind: str, id: str) -> str:
    """The id of the entry that ends a reservation or a grant: a repetition has the same id.

    >>> derived_id("commit", "r-1")
    'headgate:commit:r-1'
    """
    return f"{DERIVED_PREFIX}{kind}:{id}"


def request_id(id: str) -> str:
    """The caller's id behind that of an entry.

    >>> request_id("headgate:commit:r-1"), request_id("r-1")
    ('r-1', 'r-1')
    """
    return id.split(":", 2)[2] if id.startswith(DERIVED_PREFIX) else id


def encode_sources(sources: Iterable[tuple[str, int]]) -> str:
    """Grants and amounts as JSON; empty for none."""
    found = [*sources]
    return _encode(found) if found else ""


def decode_sources(text: str) -> Sources:
    return tuple((id, amount) for id, amount in json.loads(text)) if text else ()


def slice_sources(sources: Sources, start: int, amount: int) -> Sources:
    """The sources of a part of an amount.

    >>> slice_sources((("allowance", 5), ("grant", 10)), 3, 4)
    (('allowance', 2), ('grant', 2))
    """
    found: dict[str, int] = {}
    for name, size in sources:
        part = min(size - start, amount)
        if part > 0:
            found[name] = found.get(name, 0) + part
            amount -= part
        start = max(0, start - size)
    return tuple(found.items())
