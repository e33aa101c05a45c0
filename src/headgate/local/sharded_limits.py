"""Sharded counters: a limit with `split` counts each request in one of several shards of its counter.

Each of n shards allows 1/n of quota and burst, so that all of them together never allow more than the limit. A request
is checked against one shard only: it may be denied while the others have up to (n - 1)/n of the capacity left.
"""

from __future__ import annotations

from typing import TYPE_CHECKING
from zlib import crc32

from headgate.stores.operations import Check, IdempotentCheck, Refund, Reset

if TYPE_CHECKING:
    from collections.abc import Callable

    from headgate.decisions import Decision
    from headgate.keys import Key
    from headgate.stores.operations import Call

__all__ = ["is_sharded", "merge", "shard", "shard_operation"]


def is_sharded(check: Check) -> bool:
    return any(key.limit.split > 1 for key in check.keys)


def shard(check: Check, pick: Callable[[int], int]) -> Check:
    """The check for the store: the key of each sharded limit is replaced by that of one shard.

    `pick` takes the number of shards and returns the index of one. An id always goes to the same shard.
    """
    if not is_sharded(check):
        return check
    if isinstance(check, IdempotentCheck):
        index = _shard_of_id(check.id or "")
        return check._replace(keys=tuple([key.part(index) for key in check.keys]))
    return check._replace(keys=tuple([_pick_shard(key, pick) for key in check.keys]))


def merge(check: Check, decision: Decision) -> Decision:
    """The decision on a sharded check under the check's own keys.

    If allowed, `remaining` is an estimate, as if all shards were like the one that was checked. A denial is that of the
    shard: its `retry_after` is exact for the shard, and another one may let the request pass earlier.
    """
    if not is_sharded(check):
        return decision
    verdicts = decision.verdicts
    if decision.allowed:
        verdicts = tuple(
            [(verdict[0] * key.limit.split, *verdict[1:]) for key, verdict in zip(check.keys, verdicts, strict=True)]
        )
    return decision._replace(keys=check.keys, verdicts=verdicts)


def shard_operation(operation: Call, pick: Callable[[int], int]) -> Call:
    """An operation that is not a check, for the store: a reset of all shards, or a refund to one.

    A refund with an id always goes to the same shard, which has its record. What that shard has not charged is dropped
    there, so that no more is returned than was taken.
    """
    if isinstance(operation, Reset) and any(key.limit.split > 1 for key in operation.keys):
        return Reset(tuple([key.part(index) for key in operation.keys for index in range(key.limit.split)]))
    if isinstance(operation, Refund) and operation.key.limit.split > 1:
        if operation.id is None:
            return operation._replace(key=_pick_shard(operation.key, pick))
        return operation._replace(key=operation.key.part(_shard_of_id(operation.id)))
    return operation


def _shard_of_id(id: str) -> int:
    return crc32(id.encode("utf-8", "surrogatepass"))


def _pick_shard(key: Key, pick: Callable[[int], int]) -> Key:
    return key.part(pick(key.limit.split)) if key.limit.split > 1 else key
