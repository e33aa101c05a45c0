"""The HTTP API for any language."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import httpx
import pytest
from fastapi import FastAPI

from headgate import AsyncLimiter
from headgate.gate.gate import AsyncGate
from headgate.policy import read
from headgate.server.check_api import BodySizeLimit, add_auth_route, add_check_routes, add_error_handlers
from headgate.server.check_service import CheckService
from headgate.server.forwarded import identity_functions
from headgate.testing import FakeClock

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

POLICY = """
identity: {proxies: [127.0.0.0/8]}
routes: [{path: /health, cost: 0}]
limits:
  - {name: per-ip, by: ip, bucket: 3/minute}
  - {name: per-user, path: POST /login, by: user, bucket: 1/minute}
blocked: [{ip: 203.0.113.66, reason: scraping}]
"""
LIMIT = {"limit": "2/minute", "name": "api", "by": ["ada"]}


class Api:
    """The app with a clock of its own."""

    def __init__(self, *, max_concurrent: int = 1000) -> None:
        self.clock = FakeClock(1_700_000_000_000_000)
        self.limiter = AsyncLimiter(clock=self.clock)
        functions = identity_functions(("user", "tenant"))
        gate = AsyncGate(read(POLICY), clock=self.clock, identities=functions)
        self.app = FastAPI()
        self.app.add_middleware(BodySizeLimit)
        add_error_handlers(self.app)
        service = CheckService(self.limiter, gate, max_concurrent=max_concurrent)
        add_auth_route(self.app.router, service)
        add_check_routes(self.app.router, service)

    def request(self, method: str, path: str, **options: Any) -> httpx.Response:
        async def send() -> httpx.Response:
            transport = httpx.ASGITransport(self.app, client=("127.0.0.1", 1234), raise_app_exceptions=False)
            async with httpx.AsyncClient(transport=transport, base_url="http://headgate") as client:
                return await client.request(method, path, **options)

        return asyncio.run(send())

    def post(self, path: str, **body: Any) -> dict[str, Any]:
        answer = self.request("POST", path, json=body)
        assert answer.status_code == 200, answer.text
        result: dict[str, Any] = answer.json()
        return result


def test_named_limits_are_charged_and_explained() -> None:
    api = Api()
    answers = [api.post("/v1/check", limits=[LIMIT]) for _ in range(3)]
    assert [(each["allowed"], each["remaining"]) for each in answers] == [(True, 1), (True, 0), (False, 0)]
    assert answers[2]["denied_by"] == ["api"]
    assert answers[2]["retry_after"] == 30.0
    assert answers[2]["reason"] == "denied by api (2 per minute, token_bucket): 0 left, passes in 30 s"
    assert api.post("/v1/peek", limits=[LIMIT])["limits"][0]["remaining"] == 0


def test_an_id_makes_a_check_idempotent() -> None:
    api = Api()
    assert [api.post("/v1/check", limits=[LIMIT], id="r-1")["remaining"] for _ in range(2)] == [1, 1]


def test_a_batch_has_independent_decisions() -> None:
    api = Api()
    answer = api.post("/v1/check", checks=[{"limits": [LIMIT]}, {"limits": [{**LIMIT, "cost": 5}]}])
    assert [each["allowed"] for each in answer["decisions"]] == [True, False]


def test_the_policy_decides_about_a_described_request() -> None:
    api = Api()
    request = {"method": "POST", "path": "/login", "ip": "203.0.113.9", "identities": {"user": "ada"}}
    answers = [api.post("/v1/check", request=request) for _ in range(2)]
    assert [each["allowed"] for each in answers] == [True, False]
    assert answers[0]["headers"]["ratelimit-policy"].startswith('"per-ip"')
    assert (answers[1]["status"], answers[1]["denied_by"]) == (429, ["per-user"])
    assert answers[1]["headers"]["retry-after"] == "60"
    assert api.post("/v1/check", request={"path": "/health", "ip": "203.0.113.9"})["allowed"]
    blocked = api.post("/v1/check", request={"path": "/", "ip": "203.0.113.66"})
    assert (blocked["allowed"], blocked["status"]) == (False, 403)


def test_an_estimate_is_reserved_and_the_actual_cost_committed() -> None:
    api = Api()
    limits = [{"limit": "1000/hour", "name": "tokens", "by": ["ada"], "cost": 400, "algorithm": "fixed_window"}]
    assert api.post("/v1/reserve", limits=limits, id="r-1")["remaining"] == 600
    assert api.post("/v1/commit", limits=limits, id="r-1", actual=150)["remaining"] == 850
    assert api.post("/v1/commit", limits=limits, id="r-1", actual=150)["remaining"] == 850
    assert api.post("/v1/reserve", limits=limits, id="r-2")["remaining"] == 450
    assert api.post("/v1/commit", limits=limits, id="r-2", actual=500)["remaining"] == 350


def test_tokens_are_refunded() -> None:
    api = Api()
    api.post("/v1/check", limits=[{**LIMIT, "cost": 2}])
    assert api.post("/v1/refund", limit=LIMIT, amount=1) == {"changed": True}
    assert api.post("/v1/peek", limits=[LIMIT])["remaining"] == 1


def test_leases_are_held_renewed_and_left() -> None:
    api = Api()
    limits = [{"limit": "1/minute", "name": "jobs", "algorithm": "concurrency"}]
    assert api.post("/v1/hold", limits=limits, id="a")["allowed"]
    assert not api.post("/v1/hold", limits=limits, id="b")["allowed"]
    assert api.post("/v1/renew", limits=limits, id="a") == {"changed": True}
    assert api.post("/v1/leave", limits=limits, id="a") == {"changed": True}
    assert api.post("/v1/leave", limits=limits, id="a") == {"changed": False}
    assert api.post("/v1/hold", limits=limits, id="b")["allowed"]


@pytest.mark.parametrize(
    ("body", "status", "text"),
    [
        ({}, 422, "give either request"),
        ({"limits": []}, 422, "at least 1 item"),
        ({"limits": [LIMIT], "request": {"path": "/"}}, 422, "give either request"),
        ({"limits": [{"limit": "many"}]}, 400, "many"),
        ({"limits": [{**LIMIT, "cost": -1}]}, 422, "greater than or equal to 0"),
        ({"limits": [LIMIT, LIMIT]}, 400, "api"),
        ({"limits": [LIMIT], "nonsense": 1}, 422, "nonsense"),
        ({"checks": [{"limits": [LIMIT]}] * 101}, 422, "at most 100 items"),
    ],
)
def test_invalid_questions_are_named(body: dict[str, Any], status: int, text: str) -> None:
    answer = Api().request("POST", "/v1/check", json=body)
    assert (answer.status_code, text in answer.text) == (status, True), answer.text


def test_overload_is_answered_at_once() -> None:
    answer = Api(max_concurrent=0).request("POST", "/v1/check", json={"limits": [LIMIT]})
    assert (answer.status_code, answer.json()["error"]) == (503, "overloaded")


@pytest.mark.parametrize(
    "headers",
    [
        {"x-original-method": "POST", "x-original-uri": "/log%69n?next=/"},
        {"x-forwarded-method": "POST", "x-forwarded-uri": "/login"},
    ],
)
def test_subrequests_are_about_the_original_request(headers: dict[str, str]) -> None:
    api = Api()
    headers = {**headers, "x-forwarded-for": "203.0.113.9"}
    answers = [api.request("GET", "/auth", headers=headers) for _ in range(4)]
    assert [each.status_code for each in answers] == [200, 200, 200, 429]
    assert answers[0].headers["ratelimit"].startswith('"per-ip";r=2')
    assert answers[3].headers["retry-after"] == "20"
    assert answers[3].json()["error"] == "rate_limit_exceeded"
    denied = api.request("GET", "/auth?denied=403", headers=headers)
    assert (denied.status_code, denied.headers["retry-after"]) == (403, "20")


@pytest.mark.parametrize("denied", ["200", "600", "x", "40\u0663", "4030", ""])
def test_a_status_that_is_no_rejection_is_invalid(denied: str) -> None:
    answer = Api().request("GET", "/auth", params={"denied": denied})
    assert (answer.status_code, answer.json()["message"]) == (422, "query.denied: use a status from 400 to 599")


def test_openapi_describes_every_operation() -> None:
    paths = Api().request("GET", "/openapi.json").json()["paths"]
    names = {"check", "peek", "reserve", "commit", "refund", "hold", "renew", "leave"}
    assert {path.removeprefix("/v1/") for path in paths if path.startswith("/v1/")} == names
    assert all(paths[f"/v1/{name}"]["post"]["description"] for name in names)


def test_bodies_are_bounded() -> None:
    async def parts() -> AsyncIterator[bytes]:
        for _ in range(3):
            yield b" " * 400_000

    answer = Api().request("POST", "/v1/check", content=parts())
    assert (answer.status_code, answer.json()) == (
        413,
        {"error": "too_large", "message": "the body is larger than 1,000,000 bytes"},
    )
