"""The record of one decision in the decision log."""

from __future__ import annotations

import json
from datetime import timedelta
from functools import lru_cache
from typing import Any, Final, Literal, NamedTuple, TypeAlias

from headgate.limits import Limit

__all__ = ["LOST", "REJECTIONS", "DecisionRecord", "LimitDenial", "Outcome", "Reason", "id_prefix", "lost_record"]

Outcome: TypeAlias = Literal["allowed", "denied", "blocked", "unavailable", "lost"]
Reason: TypeAlias = Literal[
    "within-limits", "no-limit", "over-limit", "over-capacity", "over-shadow-limit", "blocked", "store-away", "lost"
]

REJECTIONS: Final = ("denied", "blocked", "unavailable")
"""The outcomes of rejected requests."""

LOST: Final = "lost"
"""The outcome of records that stand for lost ones, and the client by which they are found."""

_encode: Final = json.JSONEncoder(separators=(",", ":")).encode

SECOND_US: Final = 1_000_000
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
    origin: str
    """The source of the numbers: "override", "tier", or empty for the limit's default."""
    cost: int
    remaining: int
    retry_us: int | None
    """The time until the same request passes; None if it never does."""

    @property
    def allows(self) -> Limit:
        """The limit as a value."""
        period = timedelta(microseconds=self.period_us)
        return Limit(self.quota, period, burst=self.burst, algorithm=self.algorithm, name=self.limit)


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
    """The reason of a block."""
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
    def words(self) -> str:
        """The decision in one line of text."""
        who = self.label or "unknown client"
        what = f"{self.outcome} {self.method} {self.route} of {who}"
        if self.outcome == LOST:
            return f"{self.weight:.0f} decisions could not be recorded"
        if self.outcome == "blocked":
            return f"{what}: blocked" + (f": {self.note}" if self.note else "")
        details = [_describe(denial) for denial in self.denials]
        if self.shadow:
            what = f"{what}, would be denied"
        if self.outcome == "allowed" and self.limit and not details:
            details = [f"{self.remaining} left of {self.limit}"]
        text = f"{what}: {'; '.join(details)}" if details else what
        return f"{text} [{self.degraded}]" if self.degraded else text

    def as_dict(self) -> dict[str, Any]:
        """The record for JSON."""
        found: dict[str, Any] = dict(zip(_NAMES, self, strict=True))
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
        return cls(**{**found, **lists, "also": tuple([LimitDenial(**each) for each in found["also"]])})

    @classmethod
    def from_row(cls, row: tuple[Any, ...]) -> DecisionRecord:
        """The inverse of `as_row`; also for tables with list columns."""
        kinds, clients, also = row[FIRST_LIST:]
        found = cls._make(
            (
                *row[:FIRST_LIST],
                tuple(kinds.split() if isinstance(kinds, str) else kinds),
                tuple(json.loads(clients) if isinstance(clients, str) else clients),
                tuple([_decode_denial(each) for each in json.loads(also)]) if also else (),
            )
        )
        return found._replace(shadow=bool(found.shadow))


_NAMES: Final = DecisionRecord._fields
FIRST_OF_LIMIT: Final = DecisionRecord._fields.index("limit")
AFTER_LIMIT: Final = DecisionRecord._fields.index("retry_us") + 1


def lost_record(id: str, count: int, *, since_us: int, until_us: int, node: str, region: str) -> DecisionRecord:
    """The record that stands for lost ones: their number, the first time (`at_us`) and the duration (`period_us`)."""
    blank = dict.fromkeys(DecisionRecord._fields, "")
    numbers = {"quota": 0, "period_us": until_us - since_us, "burst": 0, "cost": 0, "remaining": 0, "retry_us": None}
    lists = {"kinds": (LOST,), "clients": (LOST,), "also": ()}
    what = {"id": id, "at_us": since_us, "node": node, "region": region, "outcome": LOST, "reason": LOST}
    return DecisionRecord(**{**blank, **numbers, **lists, **what, "shadow": False, "weight": float(count)})  # type: ignore[arg-type] # a table of columns


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


def _decode_denial(written: list[Any] | dict[str, Any]) -> LimitDenial:
    """A denial from JSON: a list, or an object if it came to ClickHouse through Kafka."""
    return LimitDenial(**written) if isinstance(written, dict) else LimitDenial._make(written)


def _describe(denial: LimitDenial) -> str:
    numbers = f"cost {denial.cost}, {denial.remaining} left"
    if denial.retry_us is None:
        return f"{denial.limit} ({denial.allows}): {numbers}, more than it can ever allow"
    return f"{denial.limit} ({denial.allows}): {numbers}, passes in {denial.retry_us / SECOND_US:g} s"
