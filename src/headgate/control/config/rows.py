"""Row types of the config store, one for each table, and their form in a policy document."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final, Generic, NamedTuple, TypeAlias, TypeVar

from headgate import _limit_syntax

if TYPE_CHECKING:
    from collections.abc import Mapping

    from headgate._limit_syntax import Phrase

__all__ = [
    "BASE_SECTIONS",
    "LIST_SECTIONS",
    "SECTIONS",
    "UNIQUE_KEYS",
    "Assignment",
    "BlockRow",
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

EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)


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
    """The tier and label of a client."""

    kind: str
    value: str
    """The keyed hash in case of an API key."""
    tier: str | None = None
    label: str | None = None

    def __str__(self) -> str:
        return f"client {self.kind} {self.value}: {'no tier' if self.tier is None else f'tier {self.tier}'}"


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
        place = "".join(
            f" {word} {name}"
            for word, name in (("on limit", self.limit_name), ("on class", self.route_class))
            if name is not None
        )
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


Row: TypeAlias = PolicyDocument | TierLimit | RouteCost | Assignment | OverrideRow | BlockRow
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

SECTIONS: Final[Mapping[str, type[Any]]] = {**BASE_SECTIONS, **LIST_SECTIONS}

UNIQUE_KEYS: Final[Mapping[str, tuple[str, ...] | None]] = {
    "documents": (),
    "tiers": ("tier", "limit_name"),
    "routes": ("path",),
    "clients": ("kind", "value"),
    "overrides": None,
    "blocked": ("kind", "value"),
}
"""The columns that identify a row: () for a single row, None if rows may repeat."""


def bucket_columns(phrase: Phrase) -> dict[str, Any]:
    """The columns of a limit."""
    period_us = microseconds(EPOCH + phrase.period)
    return {"quota": phrase.quota, "period_us": period_us, "burst": phrase.burst, "algorithm": phrase.algorithm}


def microseconds(instant: datetime) -> int:
    """Microseconds since 1970."""
    return (instant - EPOCH) // timedelta(microseconds=1)


def policy_entry(row: Row) -> dict[str, Any]:
    """The entry of a row in a policy document."""
    match row:
        case Assignment(kind, value, tier, label):
            return {kind: value} | _given({"tier": tier, "label": label})
        case OverrideRow():
            given = {
                "limit": row.limit_name,
                "class": row.route_class,
                "bucket": format_bucket(row),
                "reason": row.reason,
            }
            return {row.kind: row.value} | _given(given) | _validity(row)
        case BlockRow():
            return {row.kind: row.value} | _given({"reason": row.reason}) | _validity(row)
        case RouteCost(path, cost, route_class):
            return {"path": path, "cost": cost} | _given({"class": route_class})
        case TierLimit():
            return {"tiers": {row.tier: {"limits": {row.limit_name: format_bucket(row)}}}}
    raise TypeError(f"a {type(row).__name__} is not an entry of a policy")


def format_bucket(row: TierLimit | OverrideRow) -> str:
    """The limit of a row in policy syntax, like "100/minute, burst 20"."""
    return _phrase(row.quota, row.period_us, row.burst, row.algorithm)


@lru_cache(maxsize=8192)  # a hundred thousand overrides have a handful of different limits
def _phrase(quota: int, period_us: int, burst: int | None, algorithm: str | None) -> str:
    options = f"{'' if burst is None else f', burst {burst}'}{'' if algorithm is None else f', {algorithm}'}"
    return f"{quota}/{_limit_syntax.spell(timedelta(microseconds=period_us))}{options}"


def _validity(row: OverrideRow | BlockRow) -> dict[str, str]:
    return {
        name: _instant(at_us)
        for name, at_us in (("valid_from", row.valid_from_us), ("valid_until", row.valid_until_us))
        if at_us is not None
    }


@lru_cache(maxsize=1024)
def _instant(at_us: int) -> str:
    return (EPOCH + timedelta(microseconds=at_us)).isoformat()


def _ends(row: OverrideRow | BlockRow) -> str:
    validity = _validity(row)
    since, until = validity.get("valid_from"), validity.get("valid_until")
    return f"{'' if since is None else f' from {since}'}{'' if until is None else f' until {until}'}"


def _given(fields: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value is not None}
