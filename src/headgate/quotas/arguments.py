"""Validation of the arguments of ledger and meter."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta
from typing import Any, Final
from uuid import uuid4

from headgate.errors import InvalidCost, InvalidInput
from headgate.quotas.entries import DERIVED_PREFIX

__all__ = [
    "MAX_AMOUNT",
    "MAX_REFERENCE",
    "check_account",
    "check_amount",
    "check_id",
    "check_priority",
    "check_text",
    "instant_us",
]

MAX_AMOUNT: Final = 2**53 - 1
MAX_PRIORITY: Final = 1_000_000
MAX_REFERENCE: Final = 500

_CONTROL: Final = re.compile(r"[\x00-\x1f\x7f-\x9f\ud800-\udfff]")


def instant_us(name: str, value: datetime | int) -> int:
    """An instant in microseconds since the epoch."""
    if isinstance(value, datetime):
        if value.tzinfo is None:
            raise InvalidInput(f"{name} needs a time zone: datetime(..., tzinfo=UTC), got {value!r}")
        return (value - datetime(1970, 1, 1, tzinfo=UTC)) // timedelta(microseconds=1)
    if type(value) is not int or abs(value) > MAX_AMOUNT:
        raise InvalidInput(f"{name} must be a datetime or whole microseconds since the epoch, got {value!r}")
    return value


def check_amount(value: Any, *, least: int = 0) -> int:
    if type(value) is not int or not least <= value <= MAX_AMOUNT:
        raise InvalidCost(f"amount must be a whole number from {least} to {MAX_AMOUNT}, got {value!r:.100}")
    return value


def check_priority(value: Any) -> int:
    if type(value) is not int or not 0 <= value <= MAX_PRIORITY:
        raise InvalidInput(f"priority must be a whole number from 0 to {MAX_PRIORITY}, got {value!r:.100}")
    return value


def check_account(value: Any) -> str:
    return check_text("account", value, 200, needs_text=True)


def check_id(value: Any) -> str:
    if value is None:
        return uuid4().hex
    id = check_text("id", value, 200, needs_text=True)
    if id.startswith(DERIVED_PREFIX):
        raise InvalidInput(f"id {id!r} must not start with {DERIVED_PREFIX!r}, which headgate uses itself")
    return id


def check_text(name: str, value: Any, most: int, *, needs_text: bool = False) -> str:
    if not isinstance(value, str):
        raise InvalidInput(f"{name} must be a text, got {value!r:.100}")
    if needs_text and not value:
        raise InvalidInput(f"{name} must not be empty")
    if len(value) > most:
        raise InvalidInput(f"{name} has {len(value)} characters; use at most {most}")
    if not value.isprintable() and (found := _CONTROL.search(value)) is not None:
        raise InvalidInput(f"{name} contains the control character {found[0]!r}; remove it")
    return value
