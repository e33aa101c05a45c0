"""One counter over several: requests of a split limit are each counted in one of its parts, and answered as if in one.

The bound. Each part allows 1/n of the quota and of the burst, so that all n together never allow more than the whole
limit. A request meets one part only: it may be denied while the others have up to (n - 1)/n of the capacity left.
"""

from __future__ import annotations

from typing import TYPE_CHECKING
from zlib import crc32

from headgate.stores.operations import Check, IdempotentCheck, Refund, Reset

if TYPE_CHECKING:
    from collections.abc import Callable

    from headgate.algorithms import Verdict
    from headgate.decisions import Decision
    from headgate.keys import Key
    from headgate.stores.operations import Call

__all__ = ["gathered", "is_split", "spread", "spread_change", "spread_refund", "spread_reset"]


def is_split(call: Check) -> bool:
    """Whether any of its limits is."""
    return any(key.limit.split > 1 for key in call.keys)


def spread(call: Check, pick: Callable[[int], int]) -> Check:
    """The check as the store gets it: each split limit's key is replaced by that of one part. `pick` takes the number
    of parts and gives the index of one; a node may always give the same. An id is always met by the same part."""
    if not is_split(call):
        return call
    if isinstance(call, IdempotentCheck):
        part = _part_of_id(call.id or "")
        return call._replace(keys=tuple([key.part(part) for key in call.keys]))
    return call._replace(keys=tuple([_picked(key, pick) for key in call.keys]))


def gathered(call: Check, decision: Decision) -> Decision:
    """The decision on a check that was spread, under the check's own keys.

    On a request that passed, `remaining` is an estimate: as if all parts were like the one that was met. On a denial
    all is that part's own: its `retry_after` is exact for that part, and another may let the request pass earlier.
    """
    if not is_split(call):
        return decision
    whole = _estimate if decision.allowed else _own
    verdicts = [whole(key.limit.split, verdict) for key, verdict in zip(call.keys, decision.verdicts, strict=True)]
    return decision._replace(keys=call.keys, verdicts=tuple(verdicts))


def spread_change(call: Call, pick: Callable[[int], int]) -> Call:
    """A call that is no check, as the store gets it."""
    if isinstance(call, Reset) and any(key.limit.split > 1 for key in call.keys):
        return spread_reset(call)
    if isinstance(call, Refund) and call.key.limit.split > 1:
        return spread_refund(call, pick)
    return call


def spread_refund(refund: Refund, pick: Callable[[int], int]) -> Refund:
    """The refund, to one part: with an id always to the same, which remembers it. What that part has not charged is
    dropped there, so that no more comes back than was taken."""
    if refund.id is None:
        return refund._replace(key=_picked(refund.key, pick))
    return refund._replace(key=refund.key.part(_part_of_id(refund.id)))


def spread_reset(reset: Reset) -> Reset:
    """The reset, of all parts."""
    return Reset(tuple([key.part(index) for key in reset.keys for index in range(key.limit.split)]))


def _part_of_id(id: str) -> int:
    return crc32(id.encode("utf-8", "surrogatepass"))


def _picked(key: Key, pick: Callable[[int], int]) -> Key:
    return key.part(pick(key.limit.split)) if key.limit.split > 1 else key


def _estimate(parts: int, verdict: Verdict) -> Verdict:
    remaining, retry_us, reset_us, delay_us = verdict
    return remaining * parts, retry_us, reset_us, delay_us


def _own(_: int, verdict: Verdict) -> Verdict:
    return verdict
