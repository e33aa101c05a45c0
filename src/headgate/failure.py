"""What a limiter answers when its store cannot: raise, open, closed or local."""

from __future__ import annotations

from contextlib import suppress
from datetime import timedelta
from functools import lru_cache
from typing import TYPE_CHECKING, Final, Literal, TypeAlias, get_args

from headgate.algorithms import ALGORITHMS
from headgate.decisions import Decision
from headgate.errors import InvalidConfiguration, InvalidLimit
from headgate.limits import Limit
from headgate.stores.memory import MemoryStore

if TYPE_CHECKING:
    from headgate.clock import Clock
    from headgate.errors import StoreError
    from headgate.keys import Key
    from headgate.stores.calls import Check, Leave, Refund, Renew

__all__ = ["FailureMode", "FailurePolicy"]

FailureMode: TypeAlias = Literal["raise", "open", "closed", "local"]

LOCAL_SHARE: Final = 5
"""One fifth of the limit is what a process allows by itself while the store is away."""
CLOSED_RETRY_US: Final = 1_000_000
"""When to come back to a limiter that fails closed: nobody knows, so soon, but not at once."""


class FailurePolicy:
    """The agreed answer for when the store fails."""

    def __init__(self, mode: FailureMode, clock: Clock) -> None:
        if mode not in get_args(FailureMode):
            raise InvalidConfiguration(f"on_failure={mode!r} is unknown; use 'raise', 'open', 'closed' or 'local'")
        self._mode = mode
        self._local = MemoryStore(clock, max_keys=100_000)

    def decide(self, call: Check, error: StoreError) -> Decision:
        if self._mode == "raise":
            raise error
        why = f"{self._mode}: {error}"
        if self._mode == "local":
            keys = tuple(_local_key(key) for key in call.keys)
            return self._local.decide(call._replace(keys=keys))._replace(keys=call.keys, degraded=why)
        wait_us = CLOSED_RETRY_US if self._mode == "closed" and any(call.costs) else 0
        verdicts = tuple((0, wait_us, wait_us, 0) for _ in call.keys)
        return Decision(not wait_us, call.keys, verdicts, call.id, why)

    def tell(self, call: Refund | Renew | Leave, error: StoreError) -> bool:
        if self._mode == "raise":
            raise error
        return False


def _local_key(key: Key) -> Key:
    return key._replace(limit=_local_limit(key.limit))


@lru_cache(maxsize=1024)
def _local_limit(limit: Limit) -> Limit:
    """A fifth of the limit, in the same shape, and never less than one at a time."""
    burst = max(1, limit.capacity // LOCAL_SHARE)
    slower = timedelta(microseconds=limit.period_us * LOCAL_SHARE)
    shapes = [(limit.quota, slower), (max(1, limit.quota // LOCAL_SHARE), limit.period), (1, limit.period)]
    if not ALGORITHMS[limit.algorithm].SHAPES_BURST:
        return Limit(*shapes[1], algorithm=limit.algorithm, name=limit.name)
    for quota, period in shapes:
        with suppress(InvalidLimit):  # its numbers may leave exactness where those of the whole limit did not
            return Limit(quota, period, burst=burst, algorithm=limit.algorithm, name=limit.name)
    return Limit(1, limit.period, algorithm=limit.algorithm, name=limit.name)
