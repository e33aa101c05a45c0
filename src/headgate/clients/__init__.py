"""Polite HTTP clients, which read the limits that servers report and pace their requests instead of being rejected."""

from __future__ import annotations

from headgate.clients.client import ClientStats, PoliteClient, WaitEvent, deadline
from headgate.clients.functions import polite
from headgate.clients.quotas import Quota, parse_headers
from headgate.clients.throttle import Throttle
from headgate.errors import WaitTooLong

__all__ = [
    "ClientStats",
    "PoliteClient",
    "Quota",
    "Throttle",
    "WaitEvent",
    "WaitTooLong",
    "deadline",
    "parse_headers",
    "polite",
]
