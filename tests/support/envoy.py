"""Requests to Envoy's rate limit service, a proxy with quotas, and an independent model of envoyproxy/ratelimit."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from envoy.service.rate_limit_quota.v3 import rlqs_pb2
from envoy.service.ratelimit.v3 import rls_pb2

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from headgate.server.envoy.quota_service import QuotaService

Entries = list[tuple[str, str]]


def rate_limit_request(domain: str, *descriptors: Entries, hits: int = 0) -> Any:
    """A request with one descriptor for each list of entries."""
    request = rls_pb2.RateLimitRequest(domain=domain, hits_addend=hits)
    for entries in descriptors:
        descriptor = request.descriptors.add()
        for key, value in entries:
            descriptor.entries.add(key=key, value=value)
    return request


@dataclass
class UpstreamModel:
    """Fixed windows as envoyproxy/ratelimit counts them: every descriptor on its own, rejected ones included.

    Written from the description of its behaviour, with plain numbers, and without any code of Headgate.
    """

    limits: dict[str, tuple[int, int]]
    """By key of a single-entry descriptor: requests per unit, and seconds of the unit."""
    near_ratio: float = 0.8
    counters: dict[tuple[str, str, int], int] = field(default_factory=dict)
    stats: dict[str, int] = field(default_factory=dict)

    def decide(self, now: int, descriptors: list[tuple[str, str, int]]) -> list[tuple[int, int, int]]:
        """Code, remaining and seconds until the reset for each (key, value, hits)."""
        answers = []
        for key, value, hits in descriptors:
            if key not in self.limits:
                answers.append((1, 0, 0))
                continue
            limit, seconds = self.limits[key]
            counter = key, value, now // seconds
            before = self.counters.get(counter, 0)
            after = self.counters[counter] = before + hits
            is_over = after > limit
            self._count(key, hits, before, after, limit)
            answers.append((2 if is_over else 1, 0 if is_over else limit - after, seconds - now % seconds))
        return answers

    def _count(self, key: str, hits: int, before: int, after: int, limit: int) -> None:
        near = int(limit * self.near_ratio + 1e-9)
        total = {"total_hits": hits}
        if after > limit:
            total["over_limit"] = hits if before >= limit else after - limit
            total["near_limit"] = 0 if before >= limit else limit - max(near, before)
        else:
            total["within_limit"] = hits
            if after > near:
                total["near_limit"] = hits if before >= near else after - near
        for name, amount in total.items():
            self.stats[f"{key}.{name}"] = self.stats.get(f"{key}.{name}", 0) + amount


ADA = {"user": "ada", "group": "api"}


class ProxyClient:
    """A proxy that spends its tokens as told, and never more than it was granted."""

    def __init__(self, service: QuotaService, domain: str = "shop") -> None:
        self._queue: asyncio.Queue[Any] = asyncio.Queue()
        self._responses = service.stream(self._reports())
        self._domain = domain
        self.tokens = 0
        self.is_abandoned = False

    async def _reports(self) -> AsyncIterator[Any]:
        while (report := await self._queue.get()) is not None:
            yield report

    async def report(self, allowed: int, denied: int = 0, *, seconds: float = 1, bucket: dict[str, str] = ADA) -> Any:
        """Send a report; the action for the bucket."""
        report = rlqs_pb2.RateLimitQuotaUsageReports(domain=self._domain)
        usage = report.bucket_quota_usages.add(num_requests_allowed=allowed, num_requests_denied=denied)
        usage.bucket_id.bucket.update(bucket)
        usage.time_elapsed.FromMilliseconds(round(seconds * 1000))
        self._queue.put_nowait(report)
        action = (await anext(self._responses)).bucket_action[0]
        assert dict(action.bucket_id.bucket) == bucket
        self.is_abandoned = action.HasField("abandon_action")
        bucket = action.quota_assignment_action.rate_limit_strategy.token_bucket
        self.tokens = bucket.max_tokens + bucket.tokens_per_fill.value
        return action.quota_assignment_action

    async def demand(self, requests: int, *, seconds: float = 1) -> int:
        """Serve requests as far as there are tokens, and report them; how many were served."""
        served = min(requests, self.tokens)
        await self.report(served, requests - served, seconds=seconds)
        return served

    async def disconnect(self) -> None:
        self._queue.put_nowait(None)
        assert [each async for each in self._responses] == []
