"""Envoy's rate limit service, with the configuration files of envoyproxy/ratelimit. See docs/serve.md."""

from __future__ import annotations

from headgate.server.envoy.config import ConfigError
from headgate.server.envoy.service import AsyncRateLimitService, RateLimitService, ServiceError

__all__ = ["AsyncRateLimitService", "ConfigError", "RateLimitService", "ServiceError"]
