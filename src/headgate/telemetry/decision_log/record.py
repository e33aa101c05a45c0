"""What became of one request, as a value: what the decision log keeps of it, and what it says in words."""

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
"""The outcomes of requests that did not get in."""

LOST: Final = "lost"
"""The outcome of records that stand for others which could not be kept, and the client under whom they are found."""

_encode: Final = json.JSONEncoder(separators=(",", ":")).encode

SECOND_US: Final = 1_000_000
FIRST_LISTED: Final = -3
"""Where the columns begin that hold lists."""


class LimitDenial(NamedTuple):
    """One limit's No."""

    limit: str
    """Its name in the policy."""
    by: str
    """The kinds of identity that it counts by: "tenant+user"; "global" for one counter for all."""
    quota: int
    period_us: int
    burst: int
    algorithm: str
    origin: str
    """Why these numbers: "override", "tier", or empty for those of everybody."""
    cost: int
    remaining: int
    retry_us: int | None
    """How long until the same request passes; None if it never does."""

    @property
    def allows(self) -> Limit:
        """The limit with its numbers."""
        period = timedelta(microseconds=self.period_us)
        return Limit(self.quota, period, burst=self.burst, algorithm=self.algorithm, name=self.limit)


class DecisionRecord(NamedTuple):
    """What the decision log keeps of one request. The client stands here as a keyed hash, and never by its API key.

    The fields from `limit` to `retry_us` are those of the limit that decided: of several that denied, the one with the
    longest wait; of several that let it pass, the one with the least share left.
    """

    id: str
    """Unique, and in the order of time: what is written twice under the same id has happened once."""
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
    """What the client is known by: "tenant", "api_key", "user" or "ip", the first of these that there is."""
    client: str
    label: str
    """Who that is, as may be shown."""
    degraded: str
    """Why this is not the store's own answer; empty for an exact one."""
    shadow: bool
    """It passed, and would not have, if a limit that is only watched were enforced: the limit's numbers stand here."""
    note: str
    """The reason that was written beside a block."""
    weight: float
    """For how many requests it stands: 1 for rejections, 100 for each that passed if 1% of those are kept."""
    kinds: tuple[str, ...]
    clients: tuple[str, ...]
    """All keys under which it can be found, of these kinds: keyed hashes of its identities, and labels."""
    also: tuple[LimitDenial, ...]
    """The other limits that denied."""

    @property
    def is_rejection(self) -> bool:
        return self.outcome in REJECTIONS

    @property
    def denials(self) -> tuple[LimitDenial, ...]:
        """All limits that denied, or would have."""
        if self.outcome != "denied" and not self.shadow:
            return ()
        return LimitDenial._make(self[FIRST_OF_LIMIT:AFTER_LIMIT]), *self.also

    @property
    def words(self) -> str:
        """What happened, in one line for people."""
        who = self.label or "somebody"
        what = f"{self.outcome} {self.method} {self.route} of {who}"
        if self.outcome == LOST:
            return f"{self.weight:.0f} decisions could not be kept"
        if self.outcome == "blocked":
            return f"{what}: blocked" + (f": {self.note}" if self.note else "")
        told = [_said(denial) for denial in self.denials]
        if self.shadow:
            what = f"{what}, would be denied"
        if self.outcome == "allowed" and self.limit and not told:
            told = [f"{self.remaining} left of {self.limit}"]
        answer = f"{what}: {'; '.join(told)}" if told else what
        return f"{answer} [{self.degraded}]" if self.degraded else answer

    def as_dict(self) -> dict[str, Any]:
        """The same for JSON."""
        found: dict[str, Any] = dict(zip(_NAMES, self, strict=True))
        if self.also:
            found["also"] = [denial._asdict() for denial in self.also]
        return found

    def as_json(self) -> str:
        return _encode(self.as_dict())

    def as_row(self) -> tuple[Any, ...]:
        """The same for tables without lists."""
        also = f"[{','.join([_written(denial) for denial in self.also])}]" if self.also else ""
        return (*self[:FIRST_LISTED], *_texts(self.kinds, self.clients), also)

    @classmethod
    def from_dict(cls, found: dict[str, Any]) -> DecisionRecord:
        """The record that `as_dict` has described."""
        lists = {"kinds": tuple(found["kinds"]), "clients": tuple(found["clients"])}
        return cls(**{**found, **lists, "also": tuple([LimitDenial(**each) for each in found["also"]])})

    @classmethod
    def from_row(cls, row: tuple[Any, ...]) -> DecisionRecord:
        """The record that `as_row` has laid out, or a table with lists."""
        kinds, clients, also = row[FIRST_LISTED:]
        found = cls._make(
            (
                *row[:FIRST_LISTED],
                tuple(kinds.split() if isinstance(kinds, str) else kinds),
                tuple(json.loads(clients) if isinstance(clients, str) else clients),
                tuple([_denial(each) for each in json.loads(also)]) if also else (),
            )
        )
        return found._replace(shadow=bool(found.shadow))


_NAMES: Final = DecisionRecord._fields
FIRST_OF_LIMIT: Final = DecisionRecord._fields.index("limit")
AFTER_LIMIT: Final = DecisionRecord._fields.index("retry_us") + 1


def lost_record(id: str, count: int, *, since_us: int, until_us: int, node: str, region: str) -> DecisionRecord:
    """What is kept of records that could not be: how many, and from when (`at_us`) for how long (`period_us`)."""
    blank = dict.fromkeys(DecisionRecord._fields, "")
    numbers = {"quota": 0, "period_us": until_us - since_us, "burst": 0, "cost": 0, "remaining": 0, "retry_us": None}
    lists = {"kinds": (LOST,), "clients": (LOST,), "also": ()}
    what = {"id": id, "at_us": since_us, "node": node, "region": region, "outcome": LOST, "reason": LOST}
    return DecisionRecord(**{**blank, **numbers, **lists, **what, "shadow": False, "weight": float(count)})  # type: ignore[arg-type] # a table of columns


def id_prefix(at_us: int) -> str:
    """What the ids of all records of that moment begin with; they sort as times do."""
    return f"{max(0, at_us):014x}"


@lru_cache(maxsize=4096)
def _texts(kinds: tuple[str, ...], clients: tuple[str, ...]) -> tuple[str, str]:
    """The lists of one client, as text: busy clients have many records."""
    return " ".join(kinds), _encode(clients)


def _written(denial: LimitDenial) -> str:
    """A denial in JSON, as a list: all but the last two of its fields are the same again and again."""
    *same, remaining, retry_us = denial
    return f"{_beginning(*same)},{remaining},{'null' if retry_us is None else retry_us}]"


@lru_cache(maxsize=4096)
def _beginning(*same: Any) -> str:
    return _encode(same)[:-1]


def _denial(written: list[Any] | dict[str, Any]) -> LimitDenial:
    """A denial out of JSON: ClickHouse writes those that came through Kafka with their names."""
    return LimitDenial(**written) if isinstance(written, dict) else LimitDenial._make(written)


def _said(denial: LimitDenial) -> str:
    numbers = f"cost {denial.cost}, {denial.remaining} left"
    if denial.retry_us is None:
        return f"{denial.limit} ({denial.allows}): {numbers}, more than it can ever allow"
    return f"{denial.limit} ({denial.allows}): {numbers}, passes in {denial.retry_us / SECOND_US:g} s"
