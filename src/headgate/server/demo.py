"""`headgate serve --demo`: a server on free ports of this machine, and a caller that asks it over gRPC."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import grpc
from envoy.service.ratelimit.v3 import rls_pb2, rls_pb2_grpc  # type: ignore[import-untyped]

from headgate.limiter import AsyncLimiter
from headgate.server.envoy.quota_service import QuotaService
from headgate.server.envoy.service import OVER_LIMIT, AsyncRateLimitService
from headgate.server.grpc_server import GrpcServer

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["play"]

CONFIGURATION: Final = """\
domain: shop
descriptors:
  - key: user
    rate_limit: {unit: hour, requests_per_unit: 3}
  - key: path
    value: /search*
    rate_limit: {unit: hour, requests_per_unit: 100}
"""
REQUESTS: Final = (("ada", "/cart"), ("ada", "/search?q=tea"), ("ada", "/cart"), ("ada", "/cart"), ("bob", "/cart"))


async def play(show: Callable[[str], None]) -> None:
    """Start the server, send the requests of the demo, and show each with its answer."""
    async with AsyncLimiter() as limiter:
        service = AsyncRateLimitService.from_texts([("shop.yaml", CONFIGURATION)], limiter, env={})
        server = GrpcServer(service, QuotaService(limiter, service), "127.0.0.1:0")
        await server.start()
        show(f"# shop.yaml, served on 127.0.0.1:{server.port}\n{CONFIGURATION}")
        try:
            async with grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel:
                stub = rls_pb2_grpc.RateLimitServiceStub(channel)
                for user, path in REQUESTS:
                    show(await _ask(stub, user, path))
        finally:
            await server.drain(1)
    show("\nYour own files: headgate serve --envoy DIR --grpc 127.0.0.1:8081 --http 127.0.0.1:8080")


async def _ask(stub: rls_pb2_grpc.RateLimitServiceStub, user: str, path: str) -> str:
    request = rls_pb2.RateLimitRequest(domain="shop")
    for key, value in (("user", user), ("path", path)):
        request.descriptors.add().entries.add(key=key, value=value)
    response = await stub.ShouldRateLimit(request)
    by_user, by_path = response.statuses
    answer = "OVER_LIMIT" if response.overall_code == OVER_LIMIT else "OK"
    left = f"{by_user.limit_remaining} left for user"
    if by_path.HasField("current_limit"):
        left += f", {by_path.limit_remaining} for path"
    return f"user={user} path={path:14} {answer:10} {left}, resets in {by_user.duration_until_reset.seconds} s"
