"""Grants of tokens to proxies that decide on their own, as in Envoy's rate limit quota service (RLQS).

A proxy reports how many requests of each bucket it allowed and denied. Each report is answered with a grant: tokens
that were charged to the store before, for a limited time. Tokens that a proxy did not use return to the store with its
next report. So all proxies together never use more than the limit, even if one falls silent: a grant that is not
reported back counts as used.

Shares follow demand: a grant covers what the proxy asked for lately, but at most an equal share of what is left, so
that the others find something, too. Near the limit grants become small.

This module knows neither Envoy's messages nor the event loop, so that the simulation of a fleet uses it, too.
"""

from __future__ import annotations

from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from math import ceil
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from headgate.errors import StoreError

if TYPE_CHECKING:
    from contextlib import AbstractAsyncContextManager

    from headgate import AsyncLimiter, Decision, Key, Limit
    from headgate.clock import Clock

__all__ = [
    "FIRST_TTL_S", "IDLE_REPORTS", "MAX_TTL_S", "MIN_TTL_S", "TTL_REPORTS", "BucketName", "HeldTokens", "QuotaGrant",
    "QuotaGrants", "QuotaHolder", "QuotaReport",
]  # fmt: skip

MIN_TTL_S: Final = 1.0
FIRST_TTL_S: Final = 15.0
"""Validity of the first grant, as the interval of the reports is not known yet. Envoy reports every 5 seconds."""
MAX_TTL_S: Final = 60.0
TTL_REPORTS: Final = 3
"""A grant is valid for the time of so many reports, so that a late one does not interrupt the proxy."""

HEADROOM: Final = 1.5
"""Tokens granted per token of recent demand."""

BURST_PART: Final = 4
"""The part of a grant that a proxy may use at once; the rest arrives evenly while the grant is valid."""

MIN_GRANT: Final = 2
"""One token at once and one while the grant is valid, as a token bucket of Envoy always refills."""

IDLE_REPORTS: Final = 12
"""Reports without a request after which a proxy forgets a bucket: a minute at Envoy's interval of 5 seconds."""

BucketName = tuple[tuple[str, str], ...]


class QuotaReport(NamedTuple):
    """The requests of one bucket since the last report of a proxy."""

    allowed: int
    denied: int
    elapsed_s: float
    """0 in the first report, which comes with the first request."""


class QuotaGrant(NamedTuple):
    """Tokens for a limited time."""

    tokens: int
    ttl_s: float
    state: Decision | None = None
    """The state of the limit before the grant."""

    @property
    def burst(self) -> int:
        """The tokens that may be used at once; the others arrive evenly until the grant ends.

        However full the bucket of a proxy is when it gets the grant, it cannot use more than that before it expires.
        """
        return max(1, self.tokens // BURST_PART)


@dataclass(slots=True)
class _Holding:
    """The tokens of one bucket that a proxy holds."""

    key: Key
    granted: int = 0
    decision: Decision | None = None
    """The check that charged them, so that they return to the window that was charged."""
    valid_until_us: int = 0
    valid_us: int = 0
    """The validity of the last grant."""
    idle_reports: int = 0


@dataclass(slots=True, eq=False)
class QuotaHolder:
    """A connected proxy, with the tokens that it holds."""

    domain: str = ""
    holdings: dict[BucketName, _Holding] = field(default_factory=dict)


class HeldTokens(NamedTuple):
    """The valid grants of all proxies for one limit."""

    limit: Limit
    tokens: int
    counters: int
    valid_us: int
    """The longest validity of them."""


class QuotaGrants:
    """Settles the reports of proxies, and grants tokens."""

    def __init__(self, limiter: AsyncLimiter, clock: Clock, lock: AbstractAsyncContextManager[Any]) -> None:
        """With the lock, reports are settled one after the other: the next grant sees returned tokens."""
        self.excess: Counter[str] = Counter()
        """Requests beyond each limit, by its name."""
        self._limiter = limiter
        self._clock = clock
        self._lock = lock
        self._holders: set[QuotaHolder] = set()

    def connect(self, holder: QuotaHolder) -> None:
        self._holders.add(holder)

    def disconnect(self, holder: QuotaHolder) -> None:
        """Forget a proxy. Its last grant counts as used."""
        self._holders.discard(holder)

    def held(self) -> list[HeldTokens]:
        """The tokens that proxies hold of each limit, those with most first."""
        now_us = self._clock.now_us()
        found: dict[str, list[_Holding]] = {}
        for holder in self._holders:
            for holding in holder.holdings.values():
                if holding.granted and now_us < holding.valid_until_us:
                    found.setdefault(holding.key.limit.name, []).append(holding)
        held = [
            HeldTokens(
                valid[-1].key.limit,
                sum([each.granted for each in valid]),
                len({each.key.identity for each in valid}),
                max([each.valid_us for each in valid]),
            )
            for valid in found.values()
        ]
        return sorted(held, key=lambda each: -each.tokens)

    async def is_abandoned(self, holder: QuotaHolder, name: BucketName, report: QuotaReport) -> bool:
        """Count reports without a request; after some, return the tokens, and True: the proxy forgets the bucket."""
        holding = holder.holdings.get(name)
        if holding is None:
            return False
        holding.idle_reports = 0 if report.allowed or report.denied else holding.idle_reports + 1
        if holding.idle_reports < IDLE_REPORTS:
            return False
        async with self._lock:
            with suppress(StoreError):  # what cannot be returned counts as used
                await self._settle(holding, 0)
            del holder.holdings[name]
        return True

    async def grant(
        self, holder: QuotaHolder, name: BucketName, key: Key, report: QuotaReport, window_us: int | None = None
    ) -> QuotaGrant:
        """Settle a report, and charge the next grant, which ends with the window of that length, if there is one."""
        allowed, denied, elapsed_s = report
        async with self._lock:
            holding = holder.holdings.get(name)
            if holding is None:
                holding = holder.holdings[name] = _Holding(key)
            await self._settle(holding, allowed)
            state = await self._limiter.peek(holding.key)
            now_us = state.at_us or self._clock.now_us()
            ttl_s = min(max(elapsed_s * TTL_REPORTS, MIN_TTL_S), MAX_TTL_S) if elapsed_s else FIRST_TTL_S
            if window_us is not None:
                ttl_s = min(ttl_s, (window_us - now_us % window_us) / 1_000_000)
            sharers = self._sharers(holding, now_us)
            if elapsed_s:
                wanted = ceil((allowed + denied) / elapsed_s * ttl_s * HEADROOM)
            else:  # the first report, with the first request of the bucket: the demand is not known yet
                wanted, sharers = state.remaining, sharers + 1
            granted = min(max(wanted, MIN_GRANT), max(-(-state.remaining // sharers), MIN_GRANT))
            if granted <= state.remaining:
                holding.decision = await self._limiter.check(holding.key, cost=granted)
                granted = granted if holding.decision.allowed else 0  # another server was faster
            else:
                granted = 0
            holding.granted, holding.valid_us = granted, round(ttl_s * 1_000_000)
            holding.valid_until_us = now_us + holding.valid_us
            return QuotaGrant(granted, ttl_s, state)

    async def _settle(self, holding: _Holding, allowed: int) -> None:
        """Return tokens of the last grant that were not used; charge what was used beyond it, as far as possible."""
        unused, holding.granted = holding.granted - allowed, 0
        if unused > 0:
            await self._limiter.refund(holding.key, unused, of=holding.decision)
        elif unused < 0:
            within = min(-unused, (await self._limiter.peek(holding.key)).remaining)
            self.excess[holding.key.limit.name] += -unused - within
            if within:
                await self._limiter.check(holding.key, cost=within)

    def _sharers(self, holding: _Holding, now_us: int) -> int:
        """The proxies that share a counter: the one that asks, and all whose grants are still valid."""
        identity = holding.key.limit.space, holding.key.identity
        return 1 + sum(
            other is not holding
            and now_us < other.valid_until_us
            and (other.key.limit.space, other.key.identity) == identity
            for holder in self._holders
            for other in holder.holdings.values()
        )
