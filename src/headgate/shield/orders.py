"""What a request takes out of purses, or orders for them, and the decisions that are made of what they hold."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headgate.decisions import Decision
from headgate.stores.calls import Check

if TYPE_CHECKING:
    from headgate.shield.purse import Batch, Purse

__all__ = ["Item", "Order", "denial", "standing"]


class Order(Check):
    """A check that is good for many requests: where a process is behind, it does not wait for all that came before."""

    __slots__ = ()

    goes_first = True


class Item:
    """One key of a request that is under way to the store."""

    __slots__ = ("cost", "extra", "purse", "taken", "wanted")

    def __init__(self, purse: Purse, cost: int, extra: int | None, wanted: int) -> None:
        self.purse = purse
        self.cost = cost
        self.extra = extra
        """What is ordered beside the cost; None where the cost is paid out of the purse."""
        self.wanted = wanted
        self.taken: list[Batch] = purse.take(cost) if extra is None else []
        """What was set aside for it, and counts as spent since then, unless the request is denied."""


def standing(call: Check, purses: list[Purse], now_us: int) -> Decision:
    """A request passes without the store: what that said last, with what is held beside."""
    verdicts = []
    at_us = purses[0].at_us + now_us - purses[0].said_us
    for purse in purses:
        since_us = now_us - purse.said_us
        reset_us = purse.reset_us - since_us
        held = purse.held(now_us) if purse.later else purse.tokens
        verdicts.append(((purse.left or 0) + held, 0, max(0, reset_us), 0))
        # The earliest: what a window charged must not seem to belong to the next one.
        at_us = min(at_us, purse.at_us + since_us)
    return Decision(True, call.keys, tuple(verdicts), call.id, None, at_us, 0, call.cost)


def denial(call: Check, found: list[tuple[Purse, int]], now_us: int) -> Decision:
    """A request is denied without the store, by those that have not enough and rest."""
    verdicts = []
    for purse, cost in found:
        held = purse.held(now_us)
        reset_us = max(0, purse.reset_us - (now_us - purse.said_us))
        if held < cost and purse.rests(cost, now_us):
            wait_us = purse.wait_us(cost, now_us)
            verdicts.append((held, wait_us, max(reset_us, wait_us), 0))
        else:
            verdicts.append((held + (purse.left or 0), 0, reset_us, 0))
    at_us = min([purse.at_us + now_us - purse.said_us for purse, _ in found])
    return Decision(False, call.keys, tuple(verdicts), call.id, None, at_us, 0, call.cost)
