"""Decision logs with generated traffic."""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING, Any

from headgate.telemetry.decision_log.record import DecisionRecord, id_prefix
from headgate.telemetry.decision_log.sinks.sqlite import SqliteSink

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["decision_record", "write_decision_log"]

MINUTE_US = 60_000_000


def decision_record(number: int, at_us: int, client: str, **changes: Any) -> DecisionRecord:
    """An admitted request of a tenant, whose keyed hash is made up."""
    fields: dict[str, Any] = dict.fromkeys(DecisionRecord._fields, "")
    fields |= {"id": f"{id_prefix(at_us)}{number:08x}", "at_us": at_us, "method": "GET", "route": "/users/{id}"}
    fields |= {"outcome": "allowed", "reason": "within-limits", "client_kind": "tenant", "shadow": False}
    fields |= dict.fromkeys(("quota", "period_us", "burst", "cost", "remaining"), 1) | {"weight": 1.0, "retry_us": None}
    fields |= {"kinds": ("ip", "tenant"), "clients": (f"hmac:{number:032x}", client), "also": ()}
    return DecisionRecord(**(fields | changes))


def write_decision_log(
    file: Path, *, until_us: int, hours: int = 30, tenants: int = 10, seed: int = 1, **changes: Any
) -> list[DecisionRecord]:
    """A decision log in which tenant n sends about n requests in a minute of each hour."""
    random, records = Random(seed), []
    for hour in range(hours):
        for tenant in range(1, tenants + 1):
            start_us = until_us - (hour + 1) * 60 * MINUTE_US + tenant * MINUTE_US
            for _ in range(tenant + random.randrange(3)):
                at_us, label = start_us + random.randrange(MINUTE_US), f"tenant t{tenant}"
                records.append(decision_record(len(records), at_us, f"hmac:{tenant:032x}", label=label, **changes))
    records.sort(key=lambda record: record.id)
    sink = SqliteSink(file, days=100_000)
    for start in range(0, len(records), 1000):
        sink.write(records[start : start + 1000])
    sink.close()
    return records
