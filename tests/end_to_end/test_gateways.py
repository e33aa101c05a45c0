"""The examples for gateways: real binaries in front of a real service, while Headgate and its store work or fail."""

from __future__ import annotations

import os
import signal
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import pytest

from support.gateways import COMMANDS, Gateway
from support.servers import RedisServer, wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator

GATEWAYS = [name for name in COMMANDS if name != "envoy quota"]

every_gateway = pytest.mark.parametrize("name", GATEWAYS)

WHEN_HEADGATE_FAILS = {"envoy": 200, "nginx": 503, "traefik": 500, "caddy": 502, "haproxy": 200}
"""The status of requests while Headgate does not answer, as examples/gateways/README.md says."""


@pytest.fixture
def own_redis() -> Iterator[RedisServer]:
    with RedisServer() as server:
        yield server


@every_gateway
def test_the_right_request_is_rejected(name: str) -> None:
    with Gateway(name) as gateway:
        assert [gateway.get("/export").status for _ in range(10)] == [200] * 10
        assert gateway.get("/export").status == 429
        answers = [gateway.get("/") for _ in range(11)]
        assert [answer.status for answer in answers] == [200] * 10 + [429]
        if name != "envoy":  # Envoy's own response has no such headers unless the service is told to send them
            assert answers[10].headers["ratelimit"].startswith('"per-minute";r=0')
            assert int(answers[10].headers["retry-after"]) <= 86_400
        if name in ("nginx", "haproxy"):
            assert answers[0].headers["ratelimit"].startswith('"per-minute";r=9')


@every_gateway
def test_concurrent_requests_share_one_limit(name: str, own_redis: RedisServer) -> None:
    with Gateway(name, store=own_redis.url) as gateway, ThreadPoolExecutor(8) as pool:
        gateway.get("/")  # connects Headgate to its store
        statuses = Counter(pool.map(lambda _: gateway.get("/").status, range(60)))
    assert statuses == {200: 19, 429: 41}


@every_gateway
def test_requests_are_answered_while_headgate_is_dead(name: str) -> None:
    with Gateway(name) as gateway:
        assert gateway.get("/").status == 200
        gateway.headgate.kill()
        gateway.headgate.wait()
        wait_until(lambda: gateway.get("/").status == WHEN_HEADGATE_FAILS[name], "the gateway notices")


@pytest.mark.parametrize("name", [name for name in GATEWAYS if name != "traefik"])
def test_requests_are_answered_in_time_while_headgate_is_frozen(name: str) -> None:
    with Gateway(name) as gateway:
        assert gateway.get("/").status == 200
        os.kill(gateway.headgate.pid, signal.SIGSTOP)
        expected = 504 if name == "caddy" else WHEN_HEADGATE_FAILS[name]
        assert [gateway.get("/", timeout=5).status for _ in range(3)] == [expected] * 3
        os.kill(gateway.headgate.pid, signal.SIGCONT)
        wait_until(lambda: gateway.get("/").status == 200, "requests are decided again")


@every_gateway
def test_requests_pass_by_the_failure_mode_while_redis_is_frozen(name: str, own_redis: RedisServer) -> None:
    with Gateway(name, store=own_redis.url) as gateway:
        wait_until(lambda: gateway.get("/").status == 200, "Headgate is connected")
        own_redis.pause()
        try:
            assert [gateway.get("/", timeout=5).status for _ in range(3)] == [200] * 3
        finally:
            own_redis.resume()


def test_envoy_spends_its_quota_within_the_limit() -> None:
    passed: list[float] = []

    def ask(gateway: Gateway) -> int:
        status = gateway.get("/").status
        if status == 200:
            passed.append(time.time())
        return status

    with Gateway("envoy quota") as gateway:
        for grant in ("first", "second"):
            wait_until(lambda: ask(gateway) == 200, f"tokens of the {grant} grant")
            wait_until(lambda: ask(gateway) == 429, f"the {grant} grant is used up")
    # Requests that Envoy passed before its first grant arrived, which takes a while on a busy machine, are reported and
    # charged then. The limit is 20 for each minute.
    before_first_grant = sum(at < passed[0] + 1 for at in passed)
    minutes = len({at // 60 for at in passed})
    assert 2 <= len(passed) <= 20 * minutes + before_first_grant
