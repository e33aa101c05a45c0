"""Statistics under the names of envoyproxy/ratelimit, on which dashboards depend."""

from __future__ import annotations

import re
from bisect import bisect_left
from collections import Counter
from functools import lru_cache
from struct import pack, unpack
from threading import Lock
from typing import Final

from headgate.telemetry.metrics.families import LATENCY_US

__all__ = ["LIMIT_COUNTERS", "RESPONSE_TIME", "TOTAL_REQUESTS", "ServiceStats", "near_limit_threshold", "sanitize"]

LIMIT_COUNTERS: Final = (
    "total_hits",
    "over_limit",
    "near_limit",
    "over_limit_with_local_cache",
    "within_limit",
    "shadow_mode",
    "total_negative_hits",
)

SERVICE_COUNTERS: Final = (
    "config_load_success",
    "config_load_error",
    "global_shadow_mode",
    "call.should_rate_limit.redis_error",
    "call.should_rate_limit.service_error",
)
MAX_NAMES: Final = 100_000
"""Names of counters that contain values of clients, beyond which new ones are counted together."""
OTHER: Final = "other"

_LIMIT_PREFIX: Final = "ratelimit.service.rate_limit."
_SERVICE_PREFIX: Final = "ratelimit.service."
TOTAL_REQUESTS: Final = "ratelimit_server.ShouldRateLimit.total_requests"
RESPONSE_TIME: Final = "ratelimit_server.ShouldRateLimit.response_time"
"""The prefix of the histogram of response times: `count`, `sum_us`, and `le_50_us` to `le_inf`, not cumulative."""
_IPV4: Final = re.compile(r"\d{1,3}(?:\.\d{1,3}){3}")


class ServiceStats:
    """Counters of a service; safe to use from several threads."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._limits: dict[str, Counter[str]] = {}
        self._service: Counter[str] = Counter(dict.fromkeys(SERVICE_COUNTERS, 0))
        self._unknown_domains: Counter[str] = Counter()
        self._times = [0] * (len(LATENCY_US) + 1)
        self._time_us = 0

    def record_call(self, duration_us: int) -> None:
        """Count a call of the service, whatever its answer, and the time that it has taken."""
        with self._lock:
            self._times[bisect_left(LATENCY_US, duration_us)] += 1
            self._time_us += duration_us

    def response_times(self) -> dict[str, int]:
        """The histogram of response times, as counters."""
        with self._lock:
            times, time_us = [*self._times], self._time_us
        names = [f"{RESPONSE_TIME}.le_{bound}_us" for bound in LATENCY_US] + [f"{RESPONSE_TIME}.le_inf"]
        counters = dict(zip(names, times, strict=True))
        return {**counters, f"{RESPONSE_TIME}.count": sum(times), f"{RESPONSE_TIME}.sum_us": time_us}

    def declare(self, key: str) -> None:
        """Make the counters of a rule visible before its first request."""
        with self._lock:
            self._limits.setdefault(key, Counter())

    def count_limit(self, key: str, amounts: dict[str, int]) -> None:
        """Add to counters of the rule with this full key."""
        with self._lock:
            counters = self._limits.get(key)
            if counters is None:
                if len(self._limits) >= MAX_NAMES:
                    key = f"{key.partition('.')[0]}.{OTHER}"
                counters = self._limits.setdefault(key, Counter())
            for name, amount in amounts.items():
                counters[name] += amount

    def count(self, name: str) -> None:
        """Add one to a counter of the service, named without the prefix "ratelimit.service."."""
        with self._lock:
            self._service[name] += 1

    def count_unknown_domain(self, domain: str) -> None:
        """Count a descriptor of a domain without rules."""
        with self._lock:
            if domain not in self._unknown_domains and len(self._unknown_domains) >= MAX_NAMES:
                domain = OTHER
            self._unknown_domains[domain] += 1

    def snapshot(self) -> dict[str, int]:
        """All counters by their full names."""
        with self._lock:
            limits = {key: dict(counters) for key, counters in self._limits.items()}
            service, requests = dict(self._service), sum(self._times)
            unknown_domains = dict(self._unknown_domains)
        result: Counter[str] = Counter({TOTAL_REQUESTS: requests})
        for key, counters in limits.items():
            prefix = _LIMIT_PREFIX + sanitize(key)
            for name in LIMIT_COUNTERS:
                result[f"{prefix}.{name}"] += counters.get(name, 0)
        for domain, number in unknown_domains.items():
            result[f"{_LIMIT_PREFIX}{sanitize(domain)}.domain_not_found"] += number
        for name, number in service.items():
            result[_SERVICE_PREFIX + name] += number
        return dict(result)


def sanitize(key: str) -> str:
    """A full key as part of a statsd name: colons, bars and the dots of IPv4 addresses become underscores."""
    key = key.replace(":", "_").replace("|", "_")
    return _IPV4.sub(lambda found: found[0].replace(".", "_"), key)


@lru_cache(maxsize=1000)
def near_limit_threshold(limit: int, ratio: float) -> int:
    """The usage above which requests count as near the limit, in the 32-bit floats of envoyproxy/ratelimit."""
    single = _to_float32(_to_float32(float(limit)) * _to_float32(ratio))
    return int(single)


def _to_float32(number: float) -> float:
    result: float = unpack("f", pack("f", number))[0]
    return result
