"""Settlement: release the leases of a request and charge its final cost, after the response was sent.

Generators that yield store operations; `gate.py` runs them with threads or asyncio.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from headgate.errors import ScriptError, StoreError
from headgate.stores.operations import Check, Refund

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

    from headgate.gate.admission import Admission

__all__ = ["EnterLease", "ExitLease", "Steps", "finish", "settle"]

logger = logging.getLogger("headgate")

Steps: TypeAlias = "Generator[Any, Any, Any]"
"""Yields store operations; receives their results, or the StoreError that they raised."""


class EnterLease(NamedTuple):
    """Operation: enter the context manager of a limiter's `hold`. The result is its decision."""

    hold: Any


class ExitLease(NamedTuple):
    """Operation: exit the context manager of a limiter's `hold`."""

    hold: Any


def finish(admission: Admission, status: int, defer: Callable[[Any, StoreError], None]) -> Steps:
    """Release the leases of a request and settle its cost. `defer` saves an operation that failed for later."""
    if admission.lease is not None:
        yield ExitLease(admission.lease)
    yield from settle(admission, status, defer)


def settle(admission: Admission, status: int, defer: Callable[[Any, StoreError], None]) -> Steps:
    """Refund or charge the difference between the final cost of a request and what it was charged."""
    resolution, decision = admission.resolution, admission.decision
    if resolution is None or decision is None or not decision.allowed or decision.degraded is not None:
        return
    if admission.is_settled:
        return
    for applied in resolution.applied_limits:
        if applied.key.limit.algorithm == "concurrency":  # releasing the lease is all
            continue
        excess = admission.cost_of(applied, status) - applied.cost
        if not excess:
            continue
        key = applied.key
        operation = Refund(key, -excess, None, decision.at_us) if excess < 0 else Check((key,), excess)
        try:
            result = yield operation
            if excess > 0 and not result.allowed and result.remaining:
                operation = Check((key,), result.remaining)
                yield operation
        except StoreError as error:
            defer(operation, error)
            if error.may_have_happened or isinstance(error, ScriptError):  # such an operation is not deferred
                logger.warning("the cost of a request on limit %r was not settled: %s", applied.rule.name, error)
    admission.close()
