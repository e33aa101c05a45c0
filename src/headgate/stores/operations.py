"""The operations of a store as values, and the validation of what callers pass."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple, TypeAlias
from uuid import uuid4

from headgate.decisions import Decision
from headgate.errors import InvalidCost, InvalidInput, InvalidKey
from headgate.keys import Key
from headgate.limits import Limit

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = [
    "Call", "Check", "Cost", "Deposit", "IdempotentCheck", "Leave", "Overdraw", "Refund", "Renew", "Reset", "TakeBack",
    "Withdraw", "checked", "checked_id", "checked_keys", "checked_lease", "checked_refund", "id_validity_us",
    "joined_costs", "refund_memory_us",
]  # fmt: skip

REFUND_MEMORY_US: Final = 3600 * 1_000_000
MIN_ID_VALIDITY_US: Final = 60 * 1_000_000
MAX_ID_VALIDITY_US: Final = 86_400 * 1_000_000


Cost: TypeAlias = "int | tuple[int, ...]"
"""The cost of a request: one number for all keys, or a tuple with one for each."""

_new_check = tuple.__new__


class Check(NamedTuple):
    """Charge all keys or none. The result is a `Decision`; a cost of 0 changes nothing."""

    keys: tuple[Key, ...]
    cost: Cost
    id: str | None = None

    @property
    def costs(self) -> tuple[int, ...]:
        return self.cost if type(self.cost) is tuple else (self.cost,) * len(self.keys)  # type: ignore[return-value]


class IdempotentCheck(Check):
    """A check with an id of the caller: every key, except those of concurrency limits, is charged at most once for it.

    Generated ids of leases are never repeated, and make an ordinary `Check`.
    """

    __slots__ = ()


class Refund(NamedTuple):
    """Return an amount. The result is True if any was returned."""

    key: Key
    amount: int
    id: str | None = None
    at_us: int | None = None


class Withdraw(Refund):
    """Undo an admitted `IdempotentCheck` on one key, with its record, unless another caller relies on it."""

    __slots__ = ()


class Reset(NamedTuple):
    """Delete the counters of the keys."""

    keys: tuple[Key, ...]


class Renew(NamedTuple):
    """Extend a lease. The result is True if it was still held."""

    key: Key
    id: str


class Leave(NamedTuple):
    """End a lease. The result is True if it was still held."""

    key: Key
    id: str


class Deposit(NamedTuple):
    """Add a batch of tokens to a pool, at most once for the id. The result is the number of tokens that were accepted:
    a pool contains no more than its quota. A repetition gets the result of the first deposit.

    The id is valid for the period of the pool, so that a deposit may be repeated while its tokens are alive.
    """

    key: Key
    tokens: int
    ttl_us: int
    """The lifetime of the batch, at most the period of the pool; 0 until the end of a period."""
    id: str
    since_us: int | None = None
    """The instant at which the lifetime began, by the store's clock; None for now. A deposit that arrives after its end
    adds nothing."""


class TakeBack(NamedTuple):
    """Remove up to an amount of unspent tokens from a pool, those that expire first. The result is their number."""

    key: Key
    amount: int
    within_us: int
    """Only tokens that expire within this time are taken."""


class Overdraw(NamedTuple):
    """Charge a bucket for what was admitted elsewhere, even if that much is not left; at most once for the id.

    The result is the amount: at most the capacity, and for a repetition that of the first call.
    """

    key: Key
    amount: int
    id: str


Call: TypeAlias = Check | Refund | Reset | Renew | Leave | Deposit | TakeBack | Overdraw


def checked(keys: tuple[Key | Limit, ...], cost: Cost, id: str | None) -> Check:
    """Validate the arguments of a check, before anything is changed."""
    if type(cost) is not int:
        cost = _checked_costs(cost, keys)
    elif cost < 0:
        raise InvalidCost(f"cost {cost!r} is not a whole number >= 0")
    if id is not None:
        checked_id("check", id)
    elif len(keys) == 1:
        # The common cases without calls, as this runs on every request.
        if type(keys[0]) is Key and keys[0][0].algorithm != "concurrency":
            return _new_check(Check, (keys, cost, id))
    else:
        spaces = {key[0].space for key in keys if type(key) is Key and key[0].algorithm != "concurrency"}
        if len(spaces) == len(keys) > 0:
            return _new_check(Check, (keys, cost, id))
    made = checked_keys(keys)
    leased = [key.limit.algorithm == "concurrency" for key in made]
    if id is None:
        return _new_check(Check, (made, cost, uuid4().hex if any(leased) else None))
    # A cost of 0 for all keys is a peek, which has no effect to repeat.
    return _new_check(IdempotentCheck if cost and not all(leased) else Check, (made, cost, id))


def _checked_costs(costs: object, keys: tuple[Key | Limit, ...]) -> Cost:
    """Validate a tuple of costs; one number if they are all the same."""
    if type(costs) is not tuple:
        raise InvalidCost(f"cost {costs!r} is not a whole number >= 0")
    for cost in costs:
        if type(cost) is not int or cost < 0:
            raise InvalidCost(f"cost {cost!r} among {costs!r} is not a whole number >= 0")
    if len(costs) != len(keys):
        raise InvalidCost(f"{len(costs)} costs {costs!r} for {len(keys)} keys: give one for all, or one for each")
    return joined_costs(costs)


def joined_costs(costs: Sequence[int]) -> Cost:
    """The costs for all keys as the cost of a check: one number if they are all the same."""
    return costs[0] if len({*costs}) == 1 else tuple(costs)


def checked_refund(key: Key | Limit, amount: int, id: str | None, of: Decision | None) -> Refund:
    """Validate the arguments of a refund; with `of`, at most what that decision consumed on the key is refunded."""
    (checked,) = checked_keys((key,))
    if type(amount) is not int or amount < 0:
        raise InvalidCost(f"amount {amount!r} is not a whole number >= 0")
    if id is not None:
        checked_id("refund", id)
    if checked.limit.algorithm == "concurrency":
        raise InvalidKey(f"limit {checked.limit.name!r} counts leases: give one back with leave(key, id=...)")
    if of is None:
        return Refund(checked, amount, id)
    if not isinstance(of, Decision):
        raise InvalidInput(f"{of!r} is not a decision: of= takes what check returned")
    consumed = of.consumed(checked)
    if consumed is None:
        names = ", ".join(repr(key.limit.name) for key in of.keys)
        raise InvalidInput(
            f"of= is a decision on {names} that does not name this key of {checked.limit.name!r}: "
            "pass the decision of the check that charged it"
        )
    return Refund(checked, min(amount, consumed), id, of.at_us)


def checked_lease(key: Key | Limit, id: str) -> tuple[Key, str]:
    (checked,) = checked_keys((key,))
    if checked.limit.algorithm != "concurrency":
        raise InvalidKey(
            f"limit {checked.limit.name!r} is a {checked.limit.algorithm}: only concurrency limits have leases"
        )
    return checked, checked_id("lease", id)


def checked_id(what: str, id: str) -> str:
    if not isinstance(id, str) or not 1 <= len(id) <= 128 or not id.isprintable():
        raise InvalidKey(f"{what} id {id!r}: use a text of 1 to 128 printable characters")
    return id


def checked_keys(keys: tuple[Key | Limit, ...]) -> tuple[Key, ...]:
    """Validate keys. A bare limit stands for its global counter."""
    if not keys:
        raise InvalidKey("no key given: pass a limit and the client that it counts, like check(limit.by(client))")
    made = tuple([key if type(key) is Key else _key_of(key) for key in keys])
    if len({key.limit.space for key in made}) < len(made) > len({(key.limit.space, key.identity) for key in made}):
        names = ", ".join(repr(key.limit.name) for key in made)
        raise InvalidKey(f"two of the limits {names} would share one counter: give each limit its own name=")
    return made


def _key_of(key: object) -> Key:
    if isinstance(key, Limit):
        return key.by()
    raise InvalidKey(f"{key!r} is not a key: make one with limit.by(...)")


def id_validity_us(keys: tuple[Key, ...]) -> int:
    """The validity of the id of a check: the longest period of its keys, at least a minute, at most a day."""
    longest_us = max([key.limit.period_us for key in keys])
    return min(max(longest_us, MIN_ID_VALIDITY_US), MAX_ID_VALIDITY_US)


def refund_memory_us(key: Key) -> int:
    """The validity of the id of a refund: an hour, or the period of the limit if that is longer."""
    return max(REFUND_MEMORY_US, key.limit.period_us)
