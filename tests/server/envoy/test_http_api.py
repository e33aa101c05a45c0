"""The HTTP endpoints of envoyproxy/ratelimit."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette

from headgate import AsyncLimiter
from headgate.server.envoy import AsyncRateLimitService
from headgate.server.envoy.http_api import envoy_routes, prometheus_text
from headgate.server.worker_stats import WorkerStats
from headgate.testing import FakeClock

TEXT = """
domain: shop
descriptors: [{key: user, rate_limit: {unit: minute, requests_per_unit: 1}}]
"""
BODY: dict[str, Any] = {"domain": "shop", "descriptors": [{"entries": [{"key": "user", "value": "ada"}]}]}


class Healthy:
    value = True


class AppClient:
    """Sends requests to the app itself, one at a time."""

    def __init__(self, app: Starlette) -> None:
        self._transport = httpx.ASGITransport(app)

    def request(self, method: str, path: str, **options: Any) -> httpx.Response:
        async def send() -> httpx.Response:
            async with httpx.AsyncClient(transport=self._transport, base_url="http://headgate") as client:
                return await client.request(method, path, **options)

        return asyncio.run(send())

    def get(self, path: str) -> httpx.Response:
        return self.request("GET", path)

    def post(self, path: str, **options: Any) -> httpx.Response:
        return self.request("POST", path, **options)


@pytest.fixture
def client() -> AppClient:
    service = AsyncRateLimitService.from_texts([("a.yaml", TEXT)], AsyncLimiter(clock=FakeClock()), env={})
    return AppClient(Starlette(routes=envoy_routes(service, WorkerStats(service.stats), lambda: Healthy.value)))


def test_json_answers_with_the_status_of_the_decision(client: AppClient) -> None:
    answers = [client.post("/json", json=BODY) for _ in range(2)]
    assert [each.status_code for each in answers] == [200, 429]
    assert answers[1].json() == {
        "overallCode": "OVER_LIMIT",
        "statuses": [
            {
                "code": "OVER_LIMIT",
                "currentLimit": {"requestsPerUnit": 1, "unit": "MINUTE"},
                "durationUntilReset": "60s",
            }
        ],
    }


@pytest.mark.parametrize(
    ("body", "status", "text"),
    [
        (b"nonsense", 400, "Failed to load JSON"),
        (b'{"unknown": 1}', 400, "unknown"),
        (b'{"domain": "shop"}', 400, "rate limit descriptor list must not be empty"),
        (b"\xff\xfe", 400, "utf-8"),
        (b"[" * 100_000, 400, "recursion"),
    ],
)
def test_malformed_requests_fail_alone(client: AppClient, body: bytes, status: int, text: str) -> None:
    answer = client.post("/json", content=body)
    assert (answer.status_code, text in answer.text) == (status, True), answer.text
    assert client.post("/json", json=BODY).status_code == 200


def test_the_health_check_follows_the_state(client: AppClient, monkeypatch: pytest.MonkeyPatch) -> None:
    answer = client.get("/healthcheck")
    assert (answer.status_code, answer.text) == (200, "OK")
    monkeypatch.setattr(Healthy, "value", False)
    assert client.get("/healthcheck").status_code == 500


def test_configuration_and_statistics_are_shown(client: AppClient) -> None:
    client.post("/json", json=BODY)
    shown = "shop.user: unit=MINUTE requests_per_unit=1, shadow_mode: false, quota_mode: false\n"
    assert client.get("/rlconfig").text == shown
    assert "ratelimit.service.rate_limit.shop.user.total_hits: 1\n" in client.get("/stats").text
    assert client.get("/stats?format=json").json()["ratelimit.service.config_load_success"] == 1
    assert 'ratelimit_service_rate_limit_total_hits{domain="shop",key1="user"} 1\n' in client.get("/metrics").text
    assert 'ratelimit_service_total_requests{grpc_method="ShouldRateLimit"} 1\n' in client.get("/metrics").text


def test_prometheus_labels_are_escaped() -> None:
    text = prometheus_text({'ratelimit.service.rate_limit.d.k_"x\n.total_hits': 1})
    assert r'{domain="d",key1="k_\"x\n"} 1' in text
