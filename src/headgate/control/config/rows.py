"""Row types of the config store, one for each table, and their form in a policy document."""

from __future__ import annotations

from datetime import datetime, timedelta
from functools import lru_cache
from hashlib import sha256
from typing import TYPE_CHECKING, Any, Final, Generic, NamedTuple, TypeAlias, TypeVar

from headgate import _limit_syntax
from headgate.calendars import Calendar
from headgate.clock import EPOCH

if TYPE_CHECKING:
    from collections.abc import Mapping

    from headgate._limit_syntax import Phrase

__all__ = [
    "BASE_SECTIONS",
    "LIST_SECTIONS",
    "RESTORABLE_SECTIONS",
    "SECTIONS",
    "UNIQUE_KEYS",
    "Assignment",
    "BlockRow",
    "CanaryRow",
    "OverrideRow",
    "PolicyDocument",
    "RouteCost",
    "Row",
    "StoredRow",
    "TierLimit",
    "bucket_columns",
    "format_bucket",
    "microseconds",
    "policy_entry",
]


class PolicyDocument(NamedTuple):
    """The policy document as written; the other tables add to it."""

    text: str
    format: str
    """"yaml", "toml" or "json"."""
    name: str
    """The file name shown in error messages."""

    def __str__(self) -> str:
        return f"policy document {self.name}"


class TierLimit(NamedTuple):
    """A limit of one tier."""

    tier: str
    limit_name: str
    """The name of a limit or of a route class."""
    quota: int
    period_us: int
    burst: int | None = None
    algorithm: str | None = None

    def __str__(self) -> str:
        return f"tier {self.tier}, limit {self.limit_name}: {format_bucket(self)}"


class RouteCost(NamedTuple):
    """The cost and class of a route."""

    path: str
    """A template, optionally after a method: "GET /search"."""
    cost: int
    route_class: str | None = None

    def __str__(self) -> str:
        of_class = "" if self.route_class is None else f", class {self.route_class}"
        return f"route {self.path}: cost {self.cost}{of_class}"


class Assignment(NamedTuple):
    """The tier, label and calendar of a client."""

    kind: str
    value: str
    """The keyed hash in case of an API key."""
    tier: str | None = None
    label: str | None = None
    timezone: str | None = None
    """That of its calendar periods; None for that of the limit."""
    starts: str | None = None
    """The first day of its months, "15", or years, "04-01"."""

    def __str__(self) -> str:
        tier = "no tier" if self.tier is None else f"tier {self.tier}"
        calendar = "".join(f", {word} {text}" for word, text in self.calendar().items())
        return f"client {self.kind} {self.value}: {tier}{calendar}"

    def calendar(self) -> dict[str, int | str]:
        """The fields of a policy about its calendar."""
        starts = None if self.starts is None else int(self.starts) if self.starts.isdecimal() else self.starts
        return _given({"timezone": self.timezone, "starts": starts})


class OverrideRow(NamedTuple):
    """An override of a limit for one client, optionally limited in time."""

    kind: str
    value: str
    limit_name: str | None
    route_class: str | None
    quota: int
    period_us: int
    burst: int | None = None
    algorithm: str | None = None
    valid_from_us: int | None = None
    valid_until_us: int | None = None
    reason: str | None = None
    author: str | None = None

    def __str__(self) -> str:
        names = {"limit": self.limit_name, "class": self.route_class}
        place = "".join(f" on {word} {name}" for word, name in _given(names).items())
        return f"override of {self.kind} {self.value}{place}: {format_bucket(self)}{_ends(self)}"


class BlockRow(NamedTuple):
    """A blocked client."""

    kind: str
    value: str
    valid_from_us: int | None = None
    valid_until_us: int | None = None
    reason: str | None = None
    author: str | None = None

    def __str__(self) -> str:
        return f"block of {self.kind} {self.value}{_ends(self)}"


class CanaryRow(NamedTuple):
    """A candidate policy document that a share of the nodes applies, and its end."""

    canary: str
    """Identifies the canary, and seeds the choice of its nodes."""
    state: str
    """"running", "promoted" or "rolled back"."""
    text: str
    format: str
    name: str
    percent: int | None
    """The share of the nodes; None if `nodes` names them."""
    nodes: str | None
    """Names of nodes, separated by commas."""
    max_rejections_bp: int
    """The permitted increase of the share of rejections, in hundredths of a percentage point."""
    max_errors_bp: int
    """The permitted increase of the share of requests that a failure mode answered."""
    max_latency_percent: int
    """The permitted 99th percentile of latency, in percent of that of the other nodes."""
    run_us: int | None
    """The time of observation; None without a limit."""
    promotes: int
    """1 if the candidate is promoted after that time."""
    begun_us: int
    author: str
    reason: str
    ended_us: int | None = None
    ended_by: str | None = None
    end_reason: str | None = None

    @property
    def is_running(self) -> bool:
        return self.state == "running"

    @property
    def document(self) -> PolicyDocument:
        """The candidate."""
        return PolicyDocument(self.text, self.format, self.name)

    @property
    def share(self) -> str:
        """The nodes that apply the candidate, in words."""
        return f"{self.percent} % of nodes" if self.nodes is None else f"nodes {self.nodes.replace(',', ', ')}"

    def includes(self, node: str) -> bool:
        """True if a node applies the candidate. The answer for a name never changes while the canary runs."""
        if self.nodes is not None:
            return node in self.nodes.split(",")
        digest = sha256(f"{self.canary}/{node}".encode()).digest()
        return int.from_bytes(digest[:8]) * 100 < (self.percent or 0) << 64

    def __str__(self) -> str:
        return f"canary of {self.name} on {self.share}"


Row: TypeAlias = PolicyDocument | TierLimit | RouteCost | Assignment | OverrideRow | BlockRow | CanaryRow
AnyRow = TypeVar("AnyRow", bound=Row)


class StoredRow(NamedTuple, Generic[AnyRow]):
    """A row with its id, which is stable across changes, and the version that wrote it."""

    id: int
    since: int
    row: AnyRow


BASE_SECTIONS: Final[Mapping[str, type[Any]]] = {"documents": PolicyDocument, "tiers": TierLimit, "routes": RouteCost}
"""Small sections that all others are validated against."""

LIST_SECTIONS: Final[Mapping[str, type[Any]]] = {"clients": Assignment, "overrides": OverrideRow, "blocked": BlockRow}
"""Lists of up to hundreds of thousands of rows that are independent of each other."""

RESTORABLE_SECTIONS: Final[Mapping[str, type[Any]]] = {**BASE_SECTIONS, **LIST_SECTIONS}
"""Sections that a rollback to an earlier version can restore. A canary is never restarted by one."""

SECTIONS: Final[Mapping[str, type[Any]]] = {**RESTORABLE_SECTIONS, "canaries": CanaryRow}

UNIQUE_KEYS: Final[Mapping[str, tuple[str, ...] | None]] = {
    "documents": (),
    "tiers": ("tier", "limit_name"),
    "routes": ("path",),
    "clients": ("kind", "value"),
    "overrides": None,
    "blocked": ("kind", "value"),
    "canaries": (),
}
"""The columns that identify a row: () for a single row, None if rows may repeat."""


def bucket_columns(phrase: Phrase) -> dict[str, Any]:
    """The columns of a limit."""
    period = phrase.period_for(phrase.algorithm)
    if isinstance(period, Calendar):
        # In the column of the algorithm, as only one can count a calendar.
        return {"quota": phrase.quota, "period_us": period.length_us, "burst": phrase.burst, "algorithm": period.code}
    period_us = microseconds(EPOCH + period)
    return {"quota": phrase.quota, "period_us": period_us, "burst": phrase.burst, "algorithm": phrase.algorithm}


def microseconds(instant: datetime) -> int:
    """Microseconds since 1970."""
    return (instant - EPOCH) // timedelta(microseconds=1)


def policy_entry(row: Row) -> dict[str, Any]:
    """The entry of a row in a policy document."""
    match row:
        case Assignment(kind, value, tier, label):
            return {kind: value} | _given({"tier": tier, "label": label}) | row.calendar()
        case OverrideRow():
            place = _given({"limit": row.limit_name, "class": row.route_class})
            own = {row.kind: row.value, **place, "bucket": format_bucket(row)}
            return own | _given({"reason": row.reason}) | _validity(row)
        case BlockRow():
            return {row.kind: row.value} | _given({"reason": row.reason}) | _validity(row)
        case RouteCost(path, cost, route_class):
            return {"path": path, "cost": cost} | _given({"class": route_class})
    raise TypeError(f"a {type(row).__name__} is not an entry of a policy")


def format_bucket(row: TierLimit | OverrideRow) -> str:
    """The limit of a row in policy syntax, like "100/minute, burst 20"."""
    return _phrase(row.quota, row.period_us, row.burst, row.algorithm)


@lru_cache(maxsize=8192)  # a hundred thousand overrides have a handful of different limits
def _phrase(quota: int, period_us: int, burst: int | None, algorithm: str | None) -> str:
    if algorithm is not None and " " in algorithm:
        return f"{quota}/{Calendar.read_code(algorithm)}"
    options = f"{'' if burst is None else f', burst {burst}'}{'' if algorithm is None else f', {algorithm}'}"
    return f"{quota}/{_limit_syntax.spell(timedelta(microseconds=period_us))}{options}"


def _validity(row: OverrideRow | BlockRow) -> dict[str, str]:
    given = _given({"valid_from": row.valid_from_us, "valid_until": row.valid_until_us})
    return {name: _instant(at_us) for name, at_us in given.items()}


@lru_cache(maxsize=1024)
def _instant(at_us: int) -> str:
    return (EPOCH + timedelta(microseconds=at_us)).isoformat()


def _ends(row: OverrideRow | BlockRow) -> str:
    return "".join(f" {name.removeprefix('valid_')} {at}" for name, at in _validity(row).items())


def _given(fields: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value is not None}
