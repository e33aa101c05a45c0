"""The gRPC server for Envoy."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import grpc
import pytest
from envoy.service.ratelimit.v3 import rls_pb2_grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

from headgate import AsyncLimiter
from headgate.errors import InvalidConfiguration
from headgate.server.envoy import AsyncRateLimitService
from headgate.server.envoy.quota_service import QuotaService
from headgate.server.grpc_server import GrpcServer, TlsFiles
from headgate.testing import FakeClock
from support.envoy import rate_limit_request
from support.servers import make_certificates

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Coroutine
    from pathlib import Path

TEXT = "domain: shop\ndescriptors: [{key: user, rate_limit: {unit: minute, requests_per_unit: 2}}]"
REQUEST = rate_limit_request("shop", [("user", "ada")])


@asynccontextmanager
async def serving(tls: TlsFiles | None = None) -> AsyncIterator[GrpcServer]:
    async with AsyncLimiter(clock=FakeClock()) as limiter:
        service = AsyncRateLimitService.from_texts([("a.yaml", TEXT)], limiter, env={})
        server = GrpcServer(service, QuotaService(limiter, service), "127.0.0.1:0", tls=tls)
        await server.start()
        try:
            yield server
        finally:
            await server.drain(0)


def run(test: Callable[[], Coroutine[Any, Any, None]]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(30):
            await test()

    asyncio.run(bounded())


def test_requests_are_answered_and_errors_have_the_text_of_the_original() -> None:
    async def test() -> None:
        async with serving() as server, grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel:
            stub = rls_pb2_grpc.RateLimitServiceStub(channel)
            assert [(await stub.ShouldRateLimit(REQUEST)).overall_code for _ in range(3)] == [1, 1, 2]
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await stub.ShouldRateLimit(rate_limit_request(""))
            assert caught.value.code() is grpc.StatusCode.UNKNOWN
            assert caught.value.details() == "rate limit domain must not be empty"

    run(test)


@pytest.mark.parametrize("message", [b"\xff", b"\x0a\xff\xff\xff\xff\x0f", b"\x12\x02\x0a\x50", b"\0" * 100])
def test_bytes_that_are_no_request_fail_alone(message: bytes) -> None:
    async def test() -> None:
        async with serving() as server, grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel:
            call = channel.unary_unary("/envoy.service.ratelimit.v3.RateLimitService/ShouldRateLimit")
            with pytest.raises(grpc.aio.AioRpcError):
                await call(message)
            answer = await rls_pb2_grpc.RateLimitServiceStub(channel).ShouldRateLimit(REQUEST)
            assert answer.overall_code == 1

    run(test)


def test_health_is_reported_until_the_server_drains() -> None:
    async def test() -> None:
        async with serving() as server, grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            for name in ("", "ratelimit", "envoy.service.ratelimit.v3.RateLimitService"):
                answer = await stub.Check(health_pb2.HealthCheckRequest(service=name))
                assert answer.status == health_pb2.HealthCheckResponse.SERVING
            watch = stub.Watch(health_pb2.HealthCheckRequest(service="ratelimit"))
            assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
            draining = asyncio.create_task(server.drain(5))
            assert (await watch.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
            watch.cancel()
            await draining

    run(test)


def test_services_can_be_listed_by_reflection() -> None:
    async def test() -> None:
        async with serving() as server:
            names = await asyncio.to_thread(_list_services, server.port)
            assert "envoy.service.ratelimit.v3.RateLimitService" in names

    run(test)


def _list_services(port: int) -> list[str]:
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        return [*ProtoReflectionDescriptorDatabase(channel).get_services()]


def test_mutual_tls_follows_new_certificates(tmp_path: Path) -> None:
    first, second, current = tmp_path / "first", tmp_path / "second", tmp_path / "current"
    for each in (first, second):
        each.mkdir()
        make_certificates(each)
    current.symlink_to("first")
    files = TlsFiles(str(current / "server.pem"), str(current / "server.key"), str(current / "ca.pem"))

    async def call(port: int, directory: Path, *, with_certificate: bool = True) -> int:
        # The authority signed one certificate, which serves for both sides.
        names = ("server.key", "server.pem") if with_certificate else ()
        pair = [(directory / name).read_bytes() for name in names]
        credentials = grpc.ssl_channel_credentials((directory / "ca.pem").read_bytes(), *pair)
        async with grpc.aio.secure_channel(f"127.0.0.1:{port}", credentials) as channel:
            answer = await rls_pb2_grpc.RateLimitServiceStub(channel).ShouldRateLimit(REQUEST, timeout=5)
            return int(answer.overall_code)

    async def test() -> None:
        async with serving(files) as server:
            assert await call(server.port, first) == 1
            with pytest.raises(grpc.aio.AioRpcError):
                await call(server.port, first, with_certificate=False)
            with pytest.raises(grpc.aio.AioRpcError):
                await call(server.port, second)
            current.unlink()
            current.symlink_to("second")
            assert await call(server.port, second) == 1

    run(test)


def test_missing_certificates_and_ports_in_use_are_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidConfiguration, match=r"cannot read .*missing.crt: No such file"):
        TlsFiles(str(tmp_path / "missing.crt"), str(tmp_path / "missing.key"))

    async def test() -> None:
        limiter = AsyncLimiter()
        service = AsyncRateLimitService(limiter)
        with pytest.raises(InvalidConfiguration, match=r"cannot listen on 203.0.113.1:1"):
            GrpcServer(service, QuotaService(limiter, service), "203.0.113.1:1")

    run(test)
