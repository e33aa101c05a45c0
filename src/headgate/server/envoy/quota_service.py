"""Envoy's rate limit quota service (RLQS): proxies decide on their own, within tokens that they are granted.

The messages of the protocol; `quota_grants` says how many tokens a proxy gets, and for how long.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from envoy.service.rate_limit_quota.v3 import rlqs_pb2  # type: ignore[import-untyped]
from envoy.type.v3 import ratelimit_strategy_pb2  # type: ignore[import-untyped]

from headgate.bounds import quota_grants
from headgate.clock import SystemClock
from headgate.errors import StoreError
from headgate.server.envoy.config import UNIT_SECONDS
from headgate.server.envoy.descriptor_decisions import HeldQuota
from headgate.server.quota_grants import MAX_TTL_S, MIN_TTL_S, QuotaGrant, QuotaGrants, QuotaHolder, QuotaReport

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from headgate import AsyncLimiter
    from headgate.server.envoy.service import AsyncRateLimitService, Match
    from headgate.server.quota_grants import BucketName

__all__ = ["QuotaService"]

ALLOW_ALL = ratelimit_strategy_pb2.RateLimitStrategy.ALLOW_ALL
DENY_ALL = ratelimit_strategy_pb2.RateLimitStrategy.DENY_ALL


class QuotaService:
    """Answers the reports of proxies with grants."""

    def __init__(self, limiter: AsyncLimiter, service: AsyncRateLimitService) -> None:
        self._service = service
        self._grants = QuotaGrants(limiter, limiter.engine.clock or SystemClock(), asyncio.Lock())
        service.decisions.quota_holdings = self.holdings
        self.decisions = service.decisions

    async def stream(self, reports: AsyncIterator[Any]) -> AsyncIterator[Any]:
        """Answer each report of a proxy until it disconnects."""
        holder = QuotaHolder()
        self._grants.connect(holder)
        try:
            async for report in reports:
                holder.domain = report.domain or holder.domain
                response = rlqs_pb2.RateLimitQuotaResponse()
                for usage in report.bucket_quota_usages:
                    action = response.bucket_action.add()
                    action.bucket_id.CopyFrom(usage.bucket_id)
                    await self._answer(holder, usage, action)
                yield response
        finally:
            self._grants.disconnect(holder)

    def holdings(self) -> list[HeldQuota]:
        """The tokens that proxies hold of each limit, those with most first."""
        excess = self._grants.excess
        return [
            HeldQuota(
                each.limit.name,
                each.counters,
                each.tokens,
                each.limit.capacity,
                excess[each.limit.name],
                quota_grants(each.limit, each.valid_us),
            )
            for each in self._grants.held()
        ]

    async def _answer(self, holder: QuotaHolder, usage: Any, action: Any) -> None:
        name: BucketName = tuple(sorted(usage.bucket_id.bucket.items()))
        match = self._service.find_bucket(holder.domain, name)
        elapsed_s = usage.time_elapsed.ToMilliseconds() / 1000
        report = QuotaReport(usage.num_requests_allowed, usage.num_requests_denied, elapsed_s)
        if await self._grants.is_abandoned(holder, name, report):
            action.abandon_action.SetInParent()
            return
        assignment = action.quota_assignment_action
        if match is None or match.rule.unlimited:
            assignment.assignment_time_to_live.FromMilliseconds(round(MAX_TTL_S * 1000))
            assignment.rate_limit_strategy.blanket_rule = ALLOW_ALL
            return
        try:
            grant = await self._grant(holder, name, match, report)
        except StoreError:
            grant = QuotaGrant(0, MIN_TTL_S)  # nothing can be charged; the proxy asks again soon
        assignment.assignment_time_to_live.FromMilliseconds(round(grant.ttl_s * 1000))
        if not grant.tokens:
            assignment.rate_limit_strategy.blanket_rule = DENY_ALL
            return
        bucket = assignment.rate_limit_strategy.token_bucket
        bucket.max_tokens = grant.burst
        bucket.tokens_per_fill.value = grant.tokens - grant.burst
        bucket.fill_interval.FromMilliseconds(round(grant.ttl_s * 1000))

    async def _grant(self, holder: QuotaHolder, name: BucketName, match: Match, report: QuotaReport) -> QuotaGrant:
        rule = match.rule
        if rule.limit is None:
            return QuotaGrant(0, MAX_TTL_S)
        has_window = rule.unit and rule.limit.algorithm == "fixed_window"
        window_us = UNIT_SECONDS[rule.unit] * 1_000_000 if has_window else None
        key = rule.limit.by(*match.parts)
        grant = await self._grants.grant(holder, name, key, report, window_us)
        if report.denied and grant.state is not None:
            self._service.decisions.emit_denials(holder.domain, name, match, count=report.denied, decision=grant.state)
        return grant
