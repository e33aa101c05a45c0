"""Malformed gRPC and HTTP requests: no crash, no leak, no 500. HEADGATE_MALFORMED=100000 sends that many."""

from __future__ import annotations

import asyncio
import json
import os
import random
import socket
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import grpc
import httpx
import pytest
from envoy.service.ratelimit.v3 import rls_pb2_grpc

from support.envoy import rate_limit_request
from support.serve import serving

if TYPE_CHECKING:
    from pathlib import Path

COUNT = int(os.environ.get("HEADGATE_MALFORMED", "1000"))
BATCH = 50
TEXT = "domain: shop\ndescriptors: [{key: user, rate_limit: {unit: day, requests_per_unit: 5}}]"
METHODS = (
    "/envoy.service.ratelimit.v3.RateLimitService/ShouldRateLimit",
    "/envoy.service.ratelimit.v3.RateLimitService/Nothing",
    "/nothing/at.all",
)
POLICY = "limits: [{by: ip, bucket: 5/minute}]"


def resident_kb(pid: int) -> int:
    with open(f"/proc/{pid}/status", encoding="ascii") as file:
        return int(next(line for line in file if line.startswith("VmRSS")).split()[1])


def mutate(chance: random.Random, message: bytes) -> bytes:
    """A message with some bytes changed, left out or repeated."""
    content = bytearray(message)
    for _ in range(chance.randint(1, 6)):
        at = chance.randrange(len(content) + 1)
        kind = chance.randrange(3)
        if kind == 0:
            content[at:at] = chance.randbytes(chance.randint(1, 8))
        elif kind == 1:
            del content[at : at + chance.randint(1, 8)]
        elif at < len(content):
            content[at] = chance.randrange(256)
    return bytes(content)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    (tmp_path / "envoy").mkdir()
    (tmp_path / "envoy" / "shop.yaml").write_text(TEXT)
    (tmp_path / "policy.yaml").write_text(POLICY)
    return tmp_path


def test_malformed_requests_neither_crash_nor_leak(directory: Path) -> None:
    chance = random.Random(COUNT)
    policy = str(directory / "policy.yaml")
    with serving(directory / "envoy", "--policy", policy, "--budget", "1") as (process, ports):
        asyncio.run(_send_grpc(chance, ports["grpc"], COUNT // 10))  # what the server caches once
        asyncio.run(_send_http(chance, ports["http"], COUNT // 10))
        before = resident_kb(process.pid)
        asyncio.run(_send_grpc(chance, ports["grpc"], COUNT))
        asyncio.run(_send_http(chance, ports["http"], COUNT))
        _send_raw(chance, ports, COUNT // 100)
        assert process.poll() is None
        assert resident_kb(process.pid) - before < 20_000
        codes = asyncio.run(_valid(ports["grpc"]))
    assert codes == [1, 1, 1, 1, 1, 2]


async def _send_grpc(chance: random.Random, port: int, count: int) -> None:
    valid = rate_limit_request("shop", [("user", "ada"), ("path", "/x")], hits=0).SerializeToString()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:

        async def send() -> None:
            message = chance.randbytes(chance.randint(0, 200)) if chance.random() < 0.3 else mutate(chance, valid)
            with suppress(grpc.aio.AioRpcError):
                await channel.unary_unary(chance.choice(METHODS))(message, timeout=30)

        for _ in range(count // BATCH):
            await asyncio.gather(*[send() for _ in range(BATCH)])


async def _send_http(chance: random.Random, port: int, count: int) -> None:
    good: dict[str, Any] = {"limits": [{"limit": "5/minute", "name": "x", "by": ["y"], "cost": 1}]}
    paths = (
        "/v1/check",
        "/v1/peek",
        "/v1/commit",
        "/v1/hold",
        "/json",
        "/auth",
        "/nothing",
        "/v1/check?%ff",
        "/stats",
    )
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=30) as client:

        async def send() -> None:
            body = mutate(chance, json.dumps(good).encode()) if chance.random() < 0.7 else chance.randbytes(100)
            headers = {"x-original-uri": f"/{chance.getrandbits(64):x}%ff%00", "x-forwarded-for": "999.1.1.1, ::::"}
            method = chance.choice(("POST", "GET", "PUT", "OPTIONS"))
            answer = await client.request(method, chance.choice(paths), content=body, headers=headers)
            assert answer.status_code < 500, (answer.status_code, answer.text)

        for _ in range(count // BATCH):
            await asyncio.gather(*[send() for _ in range(BATCH)])


def _send_raw(chance: random.Random, ports: dict[str, int], count: int) -> None:
    """Bytes that are not even HTTP."""
    for _ in range(count):
        for port in ports.values():
            with socket.create_connection(("127.0.0.1", port), timeout=10) as connection, suppress(OSError):
                connection.sendall(chance.randbytes(chance.randint(1, 500)))
                connection.shutdown(socket.SHUT_WR)


async def _valid(port: int) -> list[int]:
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        stub = rls_pb2_grpc.RateLimitServiceStub(channel)
        request = rate_limit_request("shop", [("user", "a new one")])
        return [(await stub.ShouldRateLimit(request)).overall_code for _ in range(6)]
