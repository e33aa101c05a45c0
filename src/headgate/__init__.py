"""Headgate: a distributed rate limiter for APIs. Exact decisions, one answer for the whole fleet, and it can say why.

>>> from datetime import timedelta
>>> from headgate import Limit, Limiter
>>> limiter = Limiter()  # or Limiter("redis://127.0.0.1:6379/0"): the same answers, for the whole fleet
>>> login = Limit(5, timedelta(minutes=1), name="login")
>>> limiter.check(login.by("203.0.113.9")).remaining
4
"""

from __future__ import annotations

from headgate.calendars import Calendar
from headgate.clock import Clock
from headgate.decisions import Decision, Outcome
from headgate.errors import (
    HeadgateError,
    InvalidConfiguration,
    InvalidCost,
    InvalidInput,
    InvalidKey,
    InvalidLimit,
    InvalidPolicy,
    RequestDenied,
    ScriptError,
    StoreError,
    StoreTimeout,
    StoreUnavailable,
)
from headgate.keys import Key
from headgate.limiter import AsyncLimiter, Limiter
from headgate.limits import FairLimit, Limit

__all__ = [
    "AsyncLimiter",
    "Calendar",
    "Clock",
    "Decision",
    "FairLimit",
    "HeadgateError",
    "InvalidConfiguration",
    "InvalidCost",
    "InvalidInput",
    "InvalidKey",
    "InvalidLimit",
    "InvalidPolicy",
    "Key",
    "Limit",
    "Limiter",
    "Outcome",
    "RequestDenied",
    "ScriptError",
    "StoreError",
    "StoreTimeout",
    "StoreUnavailable",
    "__version__",
]

__version__ = "0.1.0"
