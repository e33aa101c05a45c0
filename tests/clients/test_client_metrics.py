"""Metrics of polite clients in Prometheus."""

from __future__ import annotations

import os

import httpx
import pytest
from prometheus_client import CollectorRegistry

from headgate.clients import PoliteClient
from headgate.clients.httpx import RateLimitTransport
from headgate.telemetry.prometheus import register_client
from headgate.testing import FakeClock

HOST = "https://api.example.com"


@pytest.fixture
def registry() -> CollectorRegistry:
    return CollectorRegistry()


def send(client: PoliteClient, *answers: tuple[int, dict[str, str]], **headers: str) -> None:
    """One request, to a server that gives these answers."""
    waiting = list(answers)

    def api(_: httpx.Request) -> httpx.Response:
        status, fields = waiting.pop(0)
        return httpx.Response(status, headers=fields)

    httpx.Client(transport=RateLimitTransport(httpx.MockTransport(api), client=client)).get(HOST, headers=headers)


def limit(remaining: int, name: str = "default") -> dict[str, str]:
    return {"RateLimit-Policy": f'"{name}";q=100;w=60', "RateLimit": f'"{name}";r={remaining};t=30'}


def test_requests_and_waits_are_counted(registry: CollectorRegistry) -> None:
    client = PoliteClient(clock=FakeClock(1_795_000_000_000_000), random=lambda: 0.0)
    register_client(client, registry, name="tea")
    send(client, (429, {"Retry-After": "7"}), (503, {}), (200, {}))

    def value(name: str) -> float | None:
        return registry.get_sample_value(f"rate_limiter_client_{name}_total", {"client": "tea"})

    names = ("requests", "rejected", "unavailable", "retries", "not_sent", "retries_refused", "wait_seconds")
    assert [value(name) for name in names] == [3, 1, 1, 2, 0, 0, 7]
    assert value("waits") == client.stats.waits


def test_the_tightest_of_several_quotas_is_exported(registry: CollectorRegistry) -> None:
    first, second = (PoliteClient(clock=FakeClock(1_795_000_000_000_000)) for _ in range(2))
    for client in (first, second, first):  # registered twice is counted once
        register_client(client, registry)
    send(first, (200, limit(80)), Authorization="Bearer a")
    send(first, (200, limit(70)), Authorization="Bearer b")
    send(second, (200, limit(90)))
    labels = {"client": "default", "host": HOST, "quota": "default"}
    assert registry.get_sample_value("rate_limiter_client_quota_remaining", labels) == 70
    assert registry.get_sample_value("rate_limiter_client_quota_limit", labels) == 100
    assert registry.get_sample_value("rate_limiter_client_requests_total", {"client": "default"}) == 3


def test_forked_child_starts_at_zero() -> None:
    client = PoliteClient(clock=FakeClock(1_795_000_000_000_000))
    send(client, (200, {}))
    child = os.fork()
    if not child:
        os._exit(client.stats.requests)
    assert os.waitpid(child, 0)[1] == 0
    assert client.stats.requests == 1
