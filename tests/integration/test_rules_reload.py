"""Reloading the rules of `headgate serve` while it is asked."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING
from urllib.request import urlopen

import grpc
from envoy.service.ratelimit.v3 import rls_pb2_grpc

from support.envoy import rate_limit_request
from support.serve import serving
from support.servers import wait_until

if TYPE_CHECKING:
    from pathlib import Path

RULES = 1000
CALLERS = 8
CALL_TIMEOUT_S = 2.0
"""Far more than a call takes on a busy machine; a server that reads files in its event loop would exceed it."""


def text(quota: int) -> str:
    rules = [
        f"  - {{key: user, value: u{number}, rate_limit: {{unit: day, requests_per_unit: {quota}}}}}\n"
        for number in range(RULES)
    ]
    return f"domain: shop\ndescriptors:\n{''.join(rules)}"


def quota_in_force(port: int) -> int:
    with urlopen(f"http://127.0.0.1:{port}/rlconfig", timeout=10) as response:
        return int(response.readline().decode().partition("requests_per_unit=")[2].split(",")[0].split()[0])


def test_no_call_fails_while_a_thousand_rules_are_reloaded(tmp_path: Path) -> None:
    file = tmp_path / "shop.yaml"
    file.write_text(text(100_000))

    def reload(quota: int, port: int) -> None:
        file.write_text(text(quota))
        wait_until(lambda: quota_in_force(port) == quota, "the new rules are used")

    async def main(ports: dict[str, int]) -> tuple[list[int], set[int]]:
        codes: list[int] = []
        quotas: set[int] = set()
        is_done = False

        async def call(first: int) -> None:
            async with grpc.aio.insecure_channel(f"127.0.0.1:{ports['grpc']}") as channel:
                stub = rls_pb2_grpc.RateLimitServiceStub(channel)
                number = first
                while not is_done:
                    request = rate_limit_request("shop", [("user", f"u{number % RULES}")])
                    response = await stub.ShouldRateLimit(request, timeout=CALL_TIMEOUT_S)
                    codes.append(response.overall_code)
                    quotas.add(response.statuses[0].current_limit.requests_per_unit)
                    number += CALLERS

        callers = [asyncio.create_task(call(first)) for first in range(CALLERS)]
        for quota in (200_000, 300_000, 400_000):
            await asyncio.to_thread(reload, quota, ports["http"])
        is_done = True
        await asyncio.gather(*callers)
        return codes, quotas

    with serving(tmp_path, "--budget", "1") as (_, ports):
        codes, quotas = asyncio.run(main(ports))
    assert set(codes) == {1}
    assert quotas >= {100_000, 400_000}
