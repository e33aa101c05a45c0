"""Imports the tables rate_limit_tiers, rate_limit_overrides and rate_limit_route_costs of another limiter.

The tables are only read. A client has one counter per route class, with the limit of its tier unless its API key has an
override on that class.
"""

from __future__ import annotations

import json
import logging
from datetime import UTC, datetime
from decimal import Decimal
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from sqlalchemy import column, inspect, select, table

from headgate.clock import SECOND_US
from headgate.control.config.engine import display_url, open_engine, read_transaction
from headgate.control.config.rows import OverrideRow, PolicyDocument, RouteCost, TierLimit, microseconds
from headgate.errors import InvalidConfiguration, InvalidInput
from headgate.policy import scalars

if TYPE_CHECKING:
    from collections.abc import Callable

    from sqlalchemy import Connection

__all__ = ["ImportedTables", "read_tables"]

logger = logging.getLogger("headgate")

DEFAULT_CLASS: Final = "default"  # the class of all other routes

TIERS, OVERRIDES, ROUTES = (
    table(f"rate_limit_{name}", *map(column, columns.split()))
    for name, columns in (
        ("tiers", "tier_name default_limit window_seconds burst_multiplier"),
        ("overrides", "api_key route_class limit_value window_seconds valid_until reason"),
        ("route_costs", "route_pattern route_class cost_units"),
    )
)


class ImportedTables(NamedTuple):
    """The three tables as rows of the config store, and a document for them."""

    document: PolicyDocument
    tiers: tuple[TierLimit, ...]
    routes: tuple[RouteCost, ...]
    overrides: tuple[OverrideRow, ...]
    unused: tuple[OverrideRow, ...]
    """Overrides on classes without routes, which would never apply."""


def read_tables(
    url: str, *, fingerprint: Callable[[str], str], default_tier: str | None = None, author: str | None = None
) -> ImportedTables:
    """Read the three tables from the database at a URL.

    `fingerprint` hashes API keys. Clients without a tier get `default_tier`, or else the slowest one.
    """
    engine = open_engine(url, create=False)
    with read_transaction(engine) as connection:
        missing = {each.name for each in (TIERS, OVERRIDES, ROUTES)} - set(inspect(connection).get_table_names())
        if missing:
            raise InvalidConfiguration(f"{display_url(engine)} has no table {', '.join(sorted(missing))}")
        rows = connection.execute(select(ROUTES).order_by(ROUTES.c.route_pattern))
        routes = [RouteCost(pattern, cost, route_class) for pattern, route_class, cost in rows]
        limits: dict[str, tuple[int, int, int | None]] = {}  # quota, period and burst by tier
        for name, quota, seconds, multiplier in connection.execute(select(TIERS).order_by(TIERS.c.tier_name)):
            times = Decimal(str(multiplier))
            limits[name] = quota, seconds * SECOND_US, None if times == 1 else int(quota * times)
        found = _overrides(connection, fingerprint, author)
    if not any(route.path.strip() in ("*", "/*") for route in routes):
        routes.append(RouteCost("*", 1, DEFAULT_CLASS))
    classes = {route.route_class: None for route in routes}
    unused = tuple(override for override in found if override.route_class not in classes)
    if unused:
        names = sorted({str(override.route_class) for override in unused})
        logger.warning("%d overrides are on classes without routes: %s", len(unused), ", ".join(names))
    tiers = [TierLimit(name, str(each), *rate) for each in classes for name, rate in limits.items()]
    slowest = min(limits, key=lambda name: limits[name][0] / limits[name][1], default=None)
    # Without bursts, these tables describe a sliding window.
    algorithm = "sliding_window" if all(burst is None for *_, burst in limits.values()) else "token_bucket"
    document = {
        "name": "rate_limit tables",
        **({} if slowest is None else {"tier": default_tier or slowest}),
        "limits": [{"name": each, "class": each, "by": "client", "algorithm": algorithm} for each in classes],
    }
    return ImportedTables(
        PolicyDocument(json.dumps(document, indent=2), "json", "rate_limit tables"),
        tuple(tiers),
        tuple(routes),
        tuple(override for override in found if override.route_class in classes),
        unused,
    )


def _overrides(connection: Connection, fingerprint: Callable[[str], str], author: str | None) -> list[OverrideRow]:
    rows = []
    query = select(OVERRIDES).order_by(OVERRIDES.c.api_key, OVERRIDES.c.route_class)
    for number, (key, route_class, quota, seconds, until, reason) in enumerate(connection.execute(query), start=1):
        try:
            value = fingerprint(key)
        except InvalidInput as error:
            raise InvalidInput(f"rate_limit_overrides, row {number}: {error}") from None
        # Tables without NULL use a year like 9999 for "no end".
        ends = None if until is None or _moment(until) >= scalars.HORIZON else microseconds(_moment(until))
        by: dict[str, Any] = {"valid_until_us": ends, "reason": reason or None, "author": author}
        rows.append(OverrideRow("api_key", value, None, route_class, quota, seconds * SECOND_US, **by))
    return rows


def _moment(value: Any) -> datetime:
    """A time; text in SQLite, which means UTC without a zone, as in SQLite's functions."""
    moment = datetime.fromisoformat(value) if isinstance(value, str) else value
    if not isinstance(moment, datetime):
        raise InvalidInput(f"rate_limit_overrides: valid_until {value!r} is not a time like 2026-05-28 02:01:00")
    return moment if moment.tzinfo is not None else moment.replace(tzinfo=UTC)
