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
    id = check.id or "" if isinstance(check, IdempotentCheck) else None
    return check._replace(keys=tuple([_shard_key(key, id, pick) for key in check.keys]))


def merge(check: Check, decision: Decision) -> Decision:
    """The decision on a sharded check under the check's own keys.

    If allowed, `remaining` is an estimate, as if all shards were like the one that was checked. A denial is that of the
    shard: its `retry_after` is exact for the shard, and another one may let the request pass earlier.
    """
    if not is_sharded(check):
        return decision
    verdicts = decision.verdicts
    if decision.allowed:
        shards = zip(check.keys, verdicts, strict=True)
        verdicts = tuple([(verdict[0] * key.limit.split, *verdict[1:]) for key, verdict in shards])
    return decision._replace(keys=check.keys, verdicts=verdicts)


def shard_operation(operation: Call, pick: Callable[[int], int]) -> Call:
    """An operation that is not a check, for the store: a reset of all shards, or a refund to one.

    A refund with an id always goes to the same shard, which has its record. What that shard has not charged is dropped
    there, so that no more is returned than was taken.
    """
    if isinstance(operation, Reset) and any(key.limit.split > 1 for key in operation.keys):
        return Reset(tuple([key.part(index) for key in operation.keys for index in range(key.limit.split)]))
    if isinstance(operation, Refund) and operation.key.limit.split > 1:
        return operation._replace(key=_shard_key(operation.key, operation.id, pick))
    return operation


def _shard_key(key: Key, id: str | None, pick: Callable[[int], int]) -> Key:
    if id is not None:
        return key.part(crc32(id.encode("utf-8", "surrogatepass")))
    return key.part(pick(key.limit.split)) if key.limit.split > 1 else key
