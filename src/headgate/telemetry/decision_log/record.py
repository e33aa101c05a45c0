"""The record of one decision in the decision log."""

from __future__ import annotations

import json
from datetime import timedelta
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple, TypeAlias

from headgate.calendars import Calendar
from headgate.clock import SECOND_US
from headgate.limits import Limit

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = [
    "ENVOY",
    "ENVOY_METHODS",
    "ENVOY_QUOTA",
    "LOST",
    "REJECTIONS",
    "DecisionRecord",
    "LimitDenial",
    "Outcome",
    "Reason",
    "RecordedCharge",
    "encode_charges",
    "id_prefix",
    "lost_record",
]

Outcome: TypeAlias = Literal["allowed", "denied", "blocked", "unavailable", "lost"]
Reason: TypeAlias = Literal[
    "within-limits",
    "no-limit",
    "over-limit",
    "over-capacity",
    "over-shadow-limit",
    "blocked",
    "challenged",
    "slowed-down",
    "store-away",
    "overloaded",
    "lost",
]

REJECTIONS: Final = ("denied", "blocked", "unavailable")
"""The outcomes of rejected requests."""

LOST: Final = "lost"
"""The outcome of records that stand for lost ones, and the client by which they are found."""

ENVOY: Final = "ENVOY"
"""The method of requests of Envoy's rate limit service, whose route is the domain."""
ENVOY_QUOTA: Final = "ENVOY-QUOTA"
"""The method of requests that a proxy has denied by its quota: one record for a report, whose cost is their number."""
ENVOY_METHODS: Final = frozenset({ENVOY, ENVOY_QUOTA})

_encode: Final = json.JSONEncoder(separators=(",", ":")).encode

FIRST_LIST: Final = -3
"""The index of the first column with a list."""


class LimitDenial(NamedTuple):
    """The denial of a request by one limit."""

    limit: str
    """The name of the limit in the policy."""
    by: str
    """The kinds of identity that the limit counts by, like "tenant+user"; "global" for one counter."""
    quota: int
    period_us: int
    burst: int
    algorithm: str
    """With a calendar period followed by that, like "fixed_window month.15 Europe/Berlin"."""
    origin: str
    """The source of the numbers: "override", "tier", "action" if a scenario has tightened them, or empty for the
    limit's default."""
    cost: int
    remaining: int
    retry_us: int | None
    """The time until the same request passes; None if it never does."""

    @property
    def allows(self) -> Limit:
        """The limit as a value."""
        algorithm, _, calendar = self.algorithm.partition(" ")
        period = Calendar.read_code(calendar) if calendar else timedelta(microseconds=self.period_us)
        return Limit(self.quota, period, burst=self.burst, algorithm=algorithm, name=self.limit)


class RecordedCharge(NamedTuple):
    """The charge of a request to a quota."""

    quota: str
    amount: int
    paid_by: tuple[tuple[str, int], ...]
    """The sources, such as "allowance", with their amounts."""
    id: str
    """The id of the usage record in the ledger."""


class DecisionRecord(NamedTuple):
    """The record of one decision. It identifies the client by a keyed hash, and never contains an API key.

    The fields from `limit` to `retry_us` belong to the decisive limit: of those that denied, the one with the longest
    wait; if none denied, the one with the least share left.
    """

    id: str
    """Unique and ordered by time. Two records with the same id are one decision."""
    at_us: int
    node: str
    region: str
    policy: str
    method: str
    route: str
    """The template, never the path."""
    route_class: str
    tier: str
    outcome: Outcome
    reason: Reason
    limit: str
    by: str
    quota: int
    period_us: int
    burst: int
    algorithm: str
    origin: str
    cost: int
    remaining: int
    retry_us: int | None
    client_kind: str
    """The first of "tenant", "api_key", "user" and "ip" that the request has."""
    client: str
    label: str
    """The client's name for display."""
    degraded: str
    """The reason for a decision without the store; empty for an exact one."""
    shadow: bool
    """True if the request passed, but a limit in shadow mode would have denied it; the fields are that limit's."""
    note: str
    """The reason of a block, the explanations of the actions that have applied, or the priority of a request that was
    shed."""
    quotas: str
    """The charges to the ledger as JSON, see `charges`; empty if there are none."""
    weight: float
    """The number of requests that the record represents: 1 for rejections, 100 for a sample of 1 %."""
    kinds: tuple[str, ...]
    clients: tuple[str, ...]
    """All keys by which the record can be found, of these kinds: keyed hashes of identities, and labels."""
    also: tuple[LimitDenial, ...]
    """The other limits that denied."""

    @property
    def is_rejection(self) -> bool:
        return self.outcome in REJECTIONS

    @property
    def denials(self) -> tuple[LimitDenial, ...]:
        """The denials by all limits, including those in shadow mode."""
        if self.outcome != "denied" and not self.shadow:
            return ()
        return LimitDenial._make(self[FIRST_OF_LIMIT:AFTER_LIMIT]), *self.also

    @property
    def charges(self) -> tuple[RecordedCharge, ...]:
        """The charges to the ledger when the request was admitted: estimates, where the app settles the real amount."""
        if not self.quotas:
            return ()
        return tuple(
            RecordedCharge(quota, amount, tuple((source, part) for source, part in sources), id)
            for quota, amount, sources, id in json.loads(self.quotas)
        )

    @property
    def words(self) -> str:
        """The decision in one line of text."""
        what = f"{self.outcome} {self.method} {self.route} of {self.label or 'unknown client'}"
        if self.outcome == LOST:
            return f"{self.weight:.0f} decisions could not be recorded"
        if self.outcome == "blocked":
            return f"{what}: {self.reason}" + (f": {self.note}" if self.note else "")
        if self.reason == "overloaded":
            return f"{what}: overloaded, {self.note}"
        details = [_describe(denial) for denial in self.denials]
        if self.shadow:
            what = f"{what}, would be denied"
        if self.outcome == "allowed" and self.limit and not details:
            details = [f"{self.remaining} left of {self.limit}", *map(_describe_charge, self.charges)]
        if self.note:
            details.append(self.note)
        text = f"{what}: {'; '.join(details)}" if details else what
        return f"{text} [{self.degraded}]" if self.degraded else text

    def as_dict(self) -> dict[str, Any]:
        """The record for JSON."""
        found: dict[str, Any] = dict(zip(self._fields, self, strict=True))
        if self.also:
            found["also"] = [denial._asdict() for denial in self.also]
        return found

    def as_json(self) -> str:
        return _encode(self.as_dict())

    def as_row(self) -> tuple[Any, ...]:
        """The record for tables without list columns."""
        also = f"[{','.join([_encode_denial(denial) for denial in self.also])}]" if self.also else ""
        return (*self[:FIRST_LIST], *_texts(self.kinds, self.clients), also)

    @classmethod
    def from_dict(cls, found: dict[str, Any]) -> DecisionRecord:
        """The inverse of `as_dict`."""
        lists = {"kinds": tuple(found["kinds"]), "clients": tuple(found["clients"])}
        return cls(**{"quotas": "", **found, **lists, "also": tuple([LimitDenial(**each) for each in found["also"]])})

    @classmethod
    def from_row(cls, row: tuple[Any, ...]) -> DecisionRecord:
        """The inverse of `as_row`; also for tables with list columns."""
        kinds, clients, also = row[FIRST_LIST:]
        kinds = kinds.split() if isinstance(kinds, str) else kinds
        clients = json.loads(clients) if isinstance(clients, str) else clients
        # A denial is a list, or an object if it came to ClickHouse through Kafka.
        also = json.loads(also) if also else ()
        denials = tuple([LimitDenial(**each) if isinstance(each, dict) else LimitDenial(*each) for each in also])
        found = cls._make((*row[:FIRST_LIST], tuple(kinds), tuple(clients), denials))
        return found._replace(shadow=bool(found.shadow))


FIRST_OF_LIMIT: Final = DecisionRecord._fields.index("limit")
AFTER_LIMIT: Final = DecisionRecord._fields.index("retry_us") + 1


def lost_record(id: str, count: int, *, since_us: int, until_us: int, node: str, region: str) -> DecisionRecord:
    """The record that stands for lost ones: their number, the first time (`at_us`) and the duration (`period_us`)."""
    limit = LimitDenial("", "", 0, until_us - since_us, 0, "", "", 0, 0, None)
    about = "", "", "", "", False, "", "", float(count), (LOST,), (LOST,), ()
    return DecisionRecord._make((id, since_us, node, region, "", "", "", "", "", LOST, LOST, *limit, *about))


def id_prefix(at_us: int) -> str:
    """The beginning of the ids of all records of a time. Ids sort by time."""
    return f"{max(0, at_us):014x}"


@lru_cache(maxsize=4096)
def _texts(kinds: tuple[str, ...], clients: tuple[str, ...]) -> tuple[str, str]:
    """The list columns as text, cached for clients with many records."""
    return " ".join(kinds), _encode(clients)


def _encode_denial(denial: LimitDenial) -> str:
    """A denial as a JSON list; all but its last two fields are cached."""
    *same, remaining, retry_us = denial
    return f"{_encode_beginning(*same)},{remaining},{'null' if retry_us is None else retry_us}]"


@lru_cache(maxsize=4096)
def _encode_beginning(*same: Any) -> str:
    return _encode(same)[:-1]


def encode_charges(charges: Sequence[tuple[Any, ...]]) -> str:
    """Charges as the text of `DecisionRecord.quotas`."""
    return _encode(charges) if charges else ""


def _describe_charge(charge: RecordedCharge) -> str:
    sources = " and ".join([source for source, _ in charge.paid_by]) or "nothing"
    return f"{charge.amount} of {charge.quota} paid by {sources}"


def _describe(denial: LimitDenial) -> str:
    us = denial.retry_us
    wait = "more than it can ever allow" if us is None else f"passes in {us / SECOND_US:g} s"
    return f"{denial.limit} ({denial.allows}): cost {denial.cost}, {denial.remaining} left, {wait}"
