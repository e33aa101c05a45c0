"""Envoy's rate limit quota service (RLQS): proxies decide on their own, within tokens that they are granted.

A proxy reports how many requests of each bucket it allowed and denied. Each report is answered with a grant: tokens
that were charged to the store before, for a limited time. Tokens that a proxy did not use return to the store with its
next report. So all proxies together never use more than the limit, even if one falls silent: a grant that is not
reported back counts as used.

Shares follow demand: a grant covers what the proxy asked for lately, but at most an equal share of what is left, so
that the others find something, too. Near the limit grants become small.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from math import ceil
from typing import TYPE_CHECKING, Any, Final

from envoy.service.rate_limit_quota.v3 import rlqs_pb2  # type: ignore[import-untyped]
from envoy.type.v3 import ratelimit_strategy_pb2  # type: ignore[import-untyped]

from headgate.bounds import quota_grants
from headgate.clock import SystemClock
from headgate.errors import StoreError
from headgate.server.envoy.config import UNIT_SECONDS
from headgate.server.envoy.descriptor_decisions import HeldQuota

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from headgate import AsyncLimiter, Decision, Key
    from headgate.server.envoy.service import AsyncRateLimitService, Match

__all__ = ["QuotaService"]

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

ALLOW_ALL: Final = ratelimit_strategy_pb2.RateLimitStrategy.ALLOW_ALL
DENY_ALL: Final = ratelimit_strategy_pb2.RateLimitStrategy.DENY_ALL

BucketName = tuple[tuple[str, str], ...]


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
class _Proxy:
    """A proxy with an open stream."""

    domain: str = ""
    holdings: dict[BucketName, _Holding] = field(default_factory=dict)


class QuotaService:
    """Answers the reports of proxies with grants."""

    def __init__(self, limiter: AsyncLimiter, service: AsyncRateLimitService) -> None:
        self._limiter = limiter
        self._service = service
        self._clock = limiter.engine.clock or SystemClock()
        self._proxies: set[_Proxy] = set()
        self._excess: Counter[str] = Counter()
        """Requests beyond each limit, by its name."""
        service.decisions.quota_holdings = self.holdings
        self.decisions = service.decisions
        self._lock = asyncio.Lock()
        """Reports are settled one after the other, so that returned tokens are seen by the next grant."""

    async def stream(self, reports: AsyncIterator[Any]) -> AsyncIterator[Any]:
        """Answer each report of a proxy until it disconnects."""
        proxy = _Proxy()
        self._proxies.add(proxy)
        try:
            async for report in reports:
                proxy.domain = report.domain or proxy.domain
                response = rlqs_pb2.RateLimitQuotaResponse()
                for usage in report.bucket_quota_usages:
                    action = response.bucket_action.add()
                    action.bucket_id.CopyFrom(usage.bucket_id)
                    await self._answer(proxy, usage, action)
                yield response
        finally:
            self._proxies.discard(proxy)

    def holdings(self) -> list[HeldQuota]:
        """The tokens that proxies hold of each limit, those with most first."""
        now_us = self._clock.now_us()
        held: Counter[str] = Counter()
        counters: dict[str, set[str]] = {}
        limits = {}
        valid_us: Counter[str] = Counter()
        for proxy in self._proxies:
            for holding in proxy.holdings.values():
                if holding.granted and now_us < holding.valid_until_us:
                    limit = holding.key.limit
                    limits[limit.name] = limit
                    valid_us[limit.name] = max(valid_us[limit.name], holding.valid_us)
                    held[limit.name] += holding.granted
                    counters.setdefault(limit.name, set()).add(holding.key.identity)
        return [
            HeldQuota(
                name,
                len(counters[name]),
                tokens,
                limits[name].capacity,
                self._excess[name],
                quota_grants(limits[name], valid_us[name]),
            )
            for name, tokens in held.most_common()
        ]

    async def _answer(self, proxy: _Proxy, usage: Any, action: Any) -> None:
        name: BucketName = tuple(sorted(usage.bucket_id.bucket.items()))
        match = self._service.find_bucket(proxy.domain, name)
        if await self._is_abandoned(proxy, name, usage):
            action.abandon_action.SetInParent()
            return
        assignment = action.quota_assignment_action
        if match is None or match.rule.unlimited:
            assignment.assignment_time_to_live.FromMilliseconds(round(MAX_TTL_S * 1000))
            assignment.rate_limit_strategy.blanket_rule = ALLOW_ALL
            return
        try:
            granted, ttl_s = await self._grant(proxy, name, match, usage)
        except StoreError:
            granted, ttl_s = 0, MIN_TTL_S  # nothing can be charged; the proxy asks again soon
        assignment.assignment_time_to_live.FromMilliseconds(round(ttl_s * 1000))
        if not granted:
            assignment.rate_limit_strategy.blanket_rule = DENY_ALL
            return
        # However full Envoy's bucket is when it gets this, it cannot use more than the grant before that expires.
        bucket = assignment.rate_limit_strategy.token_bucket
        bucket.max_tokens = max(1, granted // BURST_PART)
        bucket.tokens_per_fill.value = granted - bucket.max_tokens
        bucket.fill_interval.FromMilliseconds(round(ttl_s * 1000))

    async def _is_abandoned(self, proxy: _Proxy, name: BucketName, usage: Any) -> bool:
        """Count reports without a request; after some, return the tokens, and True: the proxy forgets the bucket."""
        holding = proxy.holdings.get(name)
        if holding is None:
            return False
        is_idle = not (usage.num_requests_allowed or usage.num_requests_denied)
        holding.idle_reports = holding.idle_reports + 1 if is_idle else 0
        if holding.idle_reports < IDLE_REPORTS:
            return False
        async with self._lock:
            with suppress(StoreError):  # what cannot be returned counts as used
                await self._settle(holding, 0)
            del proxy.holdings[name]
        return True

    async def _grant(self, proxy: _Proxy, name: BucketName, match: Match, usage: Any) -> tuple[int, float]:
        """Settle a report, and charge the next grant: its tokens, and its validity in seconds."""
        rule = match.rule
        if rule.limit is None:
            return 0, MAX_TTL_S
        elapsed_s = usage.time_elapsed.ToMilliseconds() / 1000
        allowed, denied = usage.num_requests_allowed, usage.num_requests_denied
        async with self._lock:
            holding = proxy.holdings.get(name)
            if holding is None:
                holding = proxy.holdings[name] = _Holding(rule.limit.by(*match.parts))
            await self._settle(holding, allowed)
            decision = await self._limiter.peek(holding.key)
            if denied:
                self._service.decisions.emit_denials(proxy.domain, name, match, count=denied, decision=decision)
            now_us = decision.at_us or self._clock.now_us()
            ttl_s = min(max(elapsed_s * TTL_REPORTS, MIN_TTL_S), MAX_TTL_S) if elapsed_s else FIRST_TTL_S
            if rule.unit and rule.limit.algorithm == "fixed_window":
                window_us = UNIT_SECONDS[rule.unit] * 1_000_000
                ttl_s = min(ttl_s, (window_us - now_us % window_us) / 1_000_000)
            sharers = self._sharers(holding, now_us)
            if elapsed_s:
                wanted = ceil((allowed + denied) / elapsed_s * ttl_s * HEADROOM)
            else:  # the first report, with the first request of the bucket: the demand is not known yet
                wanted, sharers = decision.remaining, sharers + 1
            granted = min(max(wanted, MIN_GRANT), max(-(-decision.remaining // sharers), MIN_GRANT))
            if granted <= decision.remaining:
                holding.decision = await self._limiter.check(holding.key, cost=granted)
                granted = granted if holding.decision.allowed else 0  # another server was faster
            else:
                granted = 0
            holding.granted, holding.valid_us = granted, round(ttl_s * 1_000_000)
            holding.valid_until_us = now_us + holding.valid_us
            return granted, ttl_s

    async def _settle(self, holding: _Holding, allowed: int) -> None:
        """Return tokens of the last grant that were not used; charge what was used beyond it, as far as possible."""
        unused, holding.granted = holding.granted - allowed, 0
        if unused > 0:
            await self._limiter.refund(holding.key, unused, of=holding.decision)
        elif unused < 0:
            within = min(-unused, (await self._limiter.peek(holding.key)).remaining)
            self._excess[holding.key.limit.name] += -unused - within
            if within:
                await self._limiter.check(holding.key, cost=within)

    def _sharers(self, holding: _Holding, now_us: int) -> int:
        """The proxies that share a counter: the one that asks, and all whose grants are still valid."""
        identity = holding.key.limit.space, holding.key.identity
        return 1 + sum(
            other is not holding
            and now_us < other.valid_until_us
            and (other.key.limit.space, other.key.identity) == identity
            for proxy in self._proxies
            for other in proxy.holdings.values()
        )
