"""The gRPC API for any language."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from importlib.resources import files
from typing import TYPE_CHECKING, Any

import grpc
import pytest
from google.protobuf import descriptor_pb2
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase
from grpc_tools import protoc

from headgate import AsyncLimiter
from headgate.control.admin import Tokens
from headgate.gate.gate import AsyncGate
from headgate.policy import read
from headgate.server.access import TokenVerifier
from headgate.server.check_service import CheckService
from headgate.server.envoy import AsyncRateLimitService
from headgate.server.envoy.quota_service import QuotaService
from headgate.server.forwarded import identity_functions
from headgate.server.grpc_api import api_handler
from headgate.server.grpc_messages import FILE, METHODS, message_class
from headgate.server.grpc_server import GrpcServer
from headgate.testing import FakeClock

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Coroutine
    from pathlib import Path

    from headgate.failure import FailureMode
    from support.servers import RedisServer

POLICY = "limits: [{name: per-user, by: user, bucket: 1/minute}]"
LIMIT = {"limit": "2/minute", "name": "api", "by": ["ada"]}


class Client:
    """Calls of the API with plain dicts."""

    def __init__(self, channel: Any) -> None:
        self._channel = channel

    async def call(self, name: str, metadata: Any = None, **fields: Any) -> Any:
        request, response = METHODS[name]
        call = self._channel.unary_unary(
            f"/headgate.v1.RateLimiter/{name}",
            request_serializer=message_class(request).SerializeToString,
            response_deserializer=message_class(response).FromString,
        )
        return await call(message_class(request)(**fields), metadata=metadata, timeout=20)

    async def status(self, name: str, metadata: Any = None, **fields: Any) -> grpc.StatusCode:
        try:
            await self.call(name, metadata, **fields)
        except grpc.aio.AioRpcError as error:
            return error.code()
        return grpc.StatusCode.OK


@asynccontextmanager
async def serving(
    url: str = "memory://", *, mode: FailureMode = "raise", verifier: TokenVerifier | None = None, **bounds: Any
) -> AsyncIterator[tuple[Client, int]]:
    clock = FakeClock(1_700_000_000_000_000)
    async with AsyncLimiter(url, clock=clock, on_failure=mode, budget=30) as limiter:
        gate = AsyncGate(read(POLICY), clock=clock, identities=identity_functions(("user",)))
        service = AsyncRateLimitService(limiter)
        api = api_handler(CheckService(limiter, gate, **bounds), verifier)
        server = GrpcServer(service, QuotaService(limiter, service), "127.0.0.1:0", api=api)
        await server.start()
        try:
            async with grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel:
                yield Client(channel), server.port
        finally:
            await server.drain(0)
            await gate.close()


def run(test: Callable[[], Coroutine[Any, Any, None]]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(60):
            await test()

    asyncio.run(bounded())


def test_the_messages_are_those_of_the_proto_file(tmp_path: Path) -> None:
    directory = files("headgate.server")
    out = tmp_path / "descriptors"
    assert protoc.main(["protoc", f"-I{directory}", f"--descriptor_set_out={out}", "headgate.proto"]) == 0
    compiled = descriptor_pb2.FileDescriptorSet.FromString(out.read_bytes()).file[0]
    assert compiled == FILE


def test_limits_and_the_policy_are_checked() -> None:
    async def test() -> None:
        async with serving() as (client, _):
            answers = [await client.call("Check", limits=[LIMIT]) for _ in range(3)]
            assert [(each.allowed, each.remaining) for each in answers] == [(True, 1), (True, 0), (False, 0)]
            assert (answers[2].retry_after, [*answers[2].denied_by]) == (30, ["api"])
            assert not answers[0].HasField("degraded")
            assert (await client.call("Peek", limits=[LIMIT])).limits[0].remaining == 0
            request = {"path": "/", "identities": {"user": "ada"}}
            first, second = [await client.call("Check", request=request) for _ in range(2)]
            assert (first.allowed, second.allowed, second.status) == (True, False, 429)
            assert second.headers["retry-after"] == "60"

    run(test)


def test_reservations_refunds_and_leases() -> None:
    limits = [{"limit": "100/hour", "name": "tokens", "cost": 80}]
    jobs = [{"limit": "1/minute", "name": "jobs", "algorithm": "concurrency"}]

    async def test() -> None:
        async with serving() as (client, _):
            assert (await client.call("Reserve", limits=limits, id="r-1")).remaining == 20
            for _ in range(2):
                commit = await client.call("Commit", limits=limits, id="r-1", actual=130)
                assert (commit.allowed, commit.limits[0].uncharged) == (False, 30)
            assert (await client.call("Refund", limit=limits[0], amount=10, id="r-1")).changed
            assert (await client.call("Hold", limits=jobs, id="a")).allowed
            assert not (await client.call("Hold", limits=jobs, id="b")).allowed
            assert (await client.call("Renew", limits=jobs, id="a")).changed
            assert (await client.call("Leave", limits=jobs, id="a")).changed
            assert not (await client.call("Leave", limits=jobs, id="a")).changed

    run(test)


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("Check", {}),
        ("Check", {"limits": [{"limit": "many"}]}),
        ("Commit", {"limits": [LIMIT], "id": "x"}),
        ("Refund", {"amount": 1}),
        ("Reserve", {"limits": [LIMIT]}),
        ("Check", {"limits": [LIMIT] * 21}),
    ],
)
def test_invalid_calls_are_named(name: str, fields: dict[str, Any]) -> None:
    async def test() -> None:
        async with serving() as (client, _):
            assert await client.status(name, **fields) is grpc.StatusCode.INVALID_ARGUMENT

    run(test)


def test_calls_need_a_token_where_access_is_controlled(tmp_path: Path) -> None:
    tokens = Tokens(f"sqlite:///{tmp_path}/config.db")
    valid, admin = [tokens.make(role, role, by="test").text for role in ("check", "admin")]  # type: ignore[arg-type]

    async def test() -> None:
        async with serving(verifier=TokenVerifier(tokens)) as (client, _):
            results = [
                await client.status("Check", metadata, limits=[LIMIT])
                for metadata in (
                    None,
                    (("authorization", f"Bearer {admin}"),),
                    (("authorization", f"Bearer {valid}"),),
                )
            ]
            refused = grpc.StatusCode.UNAUTHENTICATED
            assert results == [refused, refused, grpc.StatusCode.OK]

    run(test)


def test_reflection_lists_the_service() -> None:
    async def test() -> None:
        async with serving() as (_, port):
            assert "headgate.v1.RateLimiter" in await asyncio.to_thread(_list_services, port)

    run(test)


def _list_services(port: int) -> list[str]:
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        return [*ProtoReflectionDescriptorDatabase(channel).get_services()]


@pytest.mark.parametrize("mode", ["open", "raise"])
def test_overload_is_answered_by_the_failure_mode(server: RedisServer, mode: FailureMode) -> None:
    async def test() -> None:
        async with serving(server.url, mode=mode, max_concurrent=5, deadline=2) as (client, _):
            await client.call("Peek", limits=[LIMIT])
            server.pause()
            try:
                calls = [client.status("Check", limits=[LIMIT]) for _ in range(25)]
                statuses = await asyncio.gather(*calls)
            finally:
                server.resume()
            if mode == "open":
                assert statuses == [grpc.StatusCode.OK] * 25
            else:
                assert statuses.count(grpc.StatusCode.RESOURCE_EXHAUSTED) == 20
                assert statuses.count(grpc.StatusCode.DEADLINE_EXCEEDED) == 5

    run(test)
