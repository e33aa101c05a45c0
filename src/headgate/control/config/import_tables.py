"""Reads tables that other limiters keep: rate_limit_tiers, rate_limit_overrides and rate_limit_route_costs.

They are read as they stand, and never written. What they mean: a client has one counter for each class of routes, by
the numbers of its tier, unless there is an override for its key on that class.
"""

from __future__ import annotations

import json
import logging
from datetime import UTC, datetime
from decimal import Decimal
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from sqlalchemy import column, inspect, select, table

from headgate.control.config.engine import display_url, open_engine, read_transaction
from headgate.control.config.rows import OverrideRow, PolicyDocument, RouteCost, TierLimit, microseconds
from headgate.errors import InvalidConfiguration, InvalidInput
from headgate.policy import scalars

if TYPE_CHECKING:
    from collections.abc import Callable

    from sqlalchemy import Connection

__all__ = ["ImportedTables", "read_tables"]

logger = logging.getLogger("headgate")

DEFAULT_CLASS: Final = "default"
"""The class of routes that no row names."""

SECOND_US: Final = 1_000_000

TIERS: Final = table(
    "rate_limit_tiers", *map(column, ("tier_name", "default_limit", "window_seconds", "burst_multiplier"))
)
OVERRIDES: Final = table(
    "rate_limit_overrides",
    *map(column, ("api_key", "route_class", "limit_value", "window_seconds", "valid_until", "reason")),
)
ROUTES: Final = table("rate_limit_route_costs", *map(column, ("route_pattern", "route_class", "cost_units")))


class ImportedTables(NamedTuple):
    """What the three tables say, as rows of the config store, and the document that the rows belong to."""

    document: PolicyDocument
    tiers: tuple[TierLimit, ...]
    routes: tuple[RouteCost, ...]
    overrides: tuple[OverrideRow, ...]
    unused: tuple[OverrideRow, ...]
    """Overrides on classes that no route has: they would never be met."""


def read_tables(
    url: str, *, fingerprint: Callable[[str], str], default_tier: str | None = None, author: str | None = None
) -> ImportedTables:
    """The three tables, in the database that a URL names.

    `fingerprint` makes keyed hashes of the API keys, which are kept nowhere else. Clients of whom no tier is known are
    in `default_tier`: that of the fewest per second, if not given.
    """
    engine = open_engine(url, create=False)
    with read_transaction(engine) as connection:
        missing = {each.name for each in (TIERS, OVERRIDES, ROUTES)} - set(inspect(connection).get_table_names())
        if missing:
            raise InvalidConfiguration(f"{display_url(engine)} has no table {', '.join(sorted(missing))}")
        routes = _routes(connection)
        numbers = _numbers(connection)
        found = _overrides(connection, fingerprint, author)
    classes = {route.route_class: None for route in routes}
    unused = tuple(override for override in found if override.route_class not in classes)
    if unused:
        names = sorted({str(override.route_class) for override in unused})
        logger.warning("%d overrides are on classes that no route has: %s", len(unused), ", ".join(names))
    tiers = [TierLimit(name, str(each), *rate) for each in classes for name, rate in numbers.items()]
    slowest = min(numbers, key=lambda name: numbers[name][0] / numbers[name][1], default=None)
    is_window = all(burst is None for _, _, burst in numbers.values())
    document = {
        "name": "rate_limit tables",
        **({} if slowest is None else {"tier": default_tier or slowest}),
        "limits": [
            {
                "name": each,
                "class": each,
                "by": "client",
                # Without bursts, the window that slides is what such tables are made for.
                "algorithm": "sliding_window" if is_window else "token_bucket",
            }
            for each in classes
        ],
    }
    return ImportedTables(
        PolicyDocument(json.dumps(document, indent=2), "json", "rate_limit tables"),
        tuple(tiers),
        tuple(routes),
        tuple(override for override in found if override.route_class in classes),
        unused,
    )


def _routes(connection: Connection) -> list[RouteCost]:
    rows = connection.execute(select(ROUTES).order_by(ROUTES.c.route_pattern))
    routes = [RouteCost(pattern, cost, route_class) for pattern, route_class, cost in rows]
    if not any(route.path.strip() in ("*", "/*") for route in routes):
        routes.append(RouteCost("*", 1, DEFAULT_CLASS))
    return routes


def _numbers(connection: Connection) -> dict[str, tuple[int, int, int | None]]:
    """Quota, period and burst by tier."""
    made: dict[str, tuple[int, int, int | None]] = {}
    for name, quota, seconds, multiplier in connection.execute(select(TIERS).order_by(TIERS.c.tier_name)):
        times = Decimal(str(multiplier))
        made[name] = (quota, seconds * SECOND_US, None if times == 1 else int(quota * times))
    return made


def _overrides(connection: Connection, fingerprint: Callable[[str], str], author: str | None) -> list[OverrideRow]:
    made = []
    query = select(OVERRIDES).order_by(OVERRIDES.c.api_key, OVERRIDES.c.route_class)
    for number, (key, route_class, quota, seconds, until, reason) in enumerate(connection.execute(query), start=1):
        try:
            value = fingerprint(key)
        except InvalidInput as error:
            raise InvalidInput(f"rate_limit_overrides, row {number}: {error}") from None
        # Tables that cannot say "for ever" say it with a year like 9999.
        ends = None if until is None or _moment(until) >= scalars.HORIZON else microseconds(_moment(until))
        made.append(
            OverrideRow(
                "api_key",
                value,
                None,
                route_class,
                quota,
                seconds * SECOND_US,
                valid_until_us=ends,
                reason=reason or None,
                author=author,
            )
        )
    return made


def _moment(value: Any) -> datetime:
    """SQLite has no times: what stands there is text, UTC if it names no zone, as with SQLite's functions."""
    moment = datetime.fromisoformat(value) if isinstance(value, str) else value
    if not isinstance(moment, datetime):
        raise InvalidInput(f"rate_limit_overrides: valid_until {value!r} is no time; write it like 2026-05-28 02:01:00")
    return moment if moment.tzinfo is not None else moment.replace(tzinfo=UTC)
