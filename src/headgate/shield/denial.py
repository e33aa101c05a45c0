"""One denial that is remembered, and the counters that it rests on."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

from headgate.algorithms import NEVER

if TYPE_CHECKING:
    from headgate.algorithms import Verdict
    from headgate.decisions import Decision
    from headgate.keys import Key
    from headgate.limits import Limit
    from headgate.stores.calls import Check

__all__ = ["Counter", "CounterName", "Denial", "waits"]

CounterName: TypeAlias = tuple[str, str]
"""The limit's space, and the identity in it."""


class Counter:
    """What a counter stood at when it was last told of."""

    __slots__ = ("charges", "limit", "name", "remaining", "reset_at_us", "told_us", "uses")

    def __init__(self, name: CounterName, limit: Limit) -> None:
        self.name = name
        self.limit: Limit | None = limit
        """None when nothing that rests on it holds any longer."""
        self.charges = 0
        """How many requests were seen to take from it: each makes who is denied here wait for longer."""
        self.uses = 0
        """By how many denials it is met."""
        self.told_us = self.remaining = self.reset_at_us = 0

    def is_of(self, limit: Limit) -> bool:
        return self.limit is limit or self.limit == limit

    def tell(self, verdict: Verdict, asked_us: int) -> None:
        self.told_us, self.remaining, self.reset_at_us = asked_us, verdict[0], asked_us + verdict[2]


class Denial:
    """A request that is denied: for how long by each of its limits, from the instant before the store was asked."""

    __slots__ = ("asked_us", "at_us", "counters", "parts", "until_us")

    def __init__(
        self,
        call: Check,
        counters: list[Counter],
        waits_us: list[int],
        asked_us: int,
        until_us: int,
        at_us: int,
    ) -> None:
        self.counters = counters
        self.parts = [
            (counter, cost, wait_us, counter.charges)
            for counter, cost, wait_us in zip(counters, call.costs, waits_us, strict=True)
        ]
        self.asked_us = asked_us
        self.until_us = until_us
        self.at_us = at_us

    def verdicts(self, keys: tuple[Key, ...], now_us: int, *, exactly: bool) -> tuple[Verdict, ...] | None:
        """What each limit says now; None if something has happened to one of them since.

        Time gives back to limits that deny and to those that don't, so that what remains may be more than was told;
        None also for that, where it has to be told exactly.
        """
        elapsed_us = now_us - self.asked_us
        told: list[Verdict] = []
        for (limit, _, _), (counter, cost, wait_us, charges) in zip(keys, self.parts, strict=True):
            if counter.limit is not limit and counter.limit != limit:
                return None
            if now_us < counter.told_us or (wait_us and counter.charges != charges):
                return None
            remaining, reset_us = counter.remaining, counter.reset_at_us - now_us
            if reset_us < 0:
                reset_us = 0
            # One more would pass; or all of it is there.
            stands_still = (wait_us > elapsed_us and remaining == cost - 1) or remaining == limit.capacity
            if exactly and now_us != counter.told_us and not stands_still:
                return None
            if wait_us > elapsed_us:
                if remaining >= cost:  # somebody, somewhere, has given something back
                    return None
                told.append((remaining, wait_us - elapsed_us, reset_us, 0))
            elif wait_us == NEVER:
                told.append((remaining, NEVER, reset_us, 0))
            elif wait_us or remaining >= cost:
                # It would pass here, and says what a peek says: in a queue, how long the next one waits.
                delay_us = reset_us if limit.algorithm == "leaky_bucket" else 0
                told.append((max(remaining, cost), 0, reset_us, delay_us))
            else:
                return None
        return tuple(told)


def waits(call: Check, decision: Decision) -> list[int] | None:
    """How long each limit denies the same request from now on, 0 where it does not, NEVER for ever; None where that is
    not known.

    A lease ends when its holder likes. An allowed answer knows only the longest wait: so of two limits that
    it has left with too little, nobody knows when the first of them ceases to deny.
    """
    if decision.allowed and not decision.again_us:
        return None
    if "concurrency" in [key.limit.algorithm for key in call.keys]:
        return None
    if not decision.allowed:
        waits_us = [verdict[1] for verdict in decision.verdicts]
    else:
        waits_us = [
            decision.again_us if verdict[0] < cost else 0
            for verdict, cost in zip(decision.verdicts, call.costs, strict=True)
        ]
        if len(waits_us) - waits_us.count(0) != 1:
            return None
    return waits_us
