"""A guard that sheds a call of a handler: each framework answers 503 with Retry-After."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import django.test
import flask
import grpc
import httpx
import pytest
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer
from django.http import HttpRequest, HttpResponse
from django.urls import path
from fastapi import Depends, FastAPI

from headgate.adapters import aiohttp as headgate_aiohttp
from headgate.adapters import asgi, wsgi
from headgate.adapters.fastapi import FastAPILimits
from headgate.adapters.flask import Headgate
from headgate.adapters.grpc import AsyncHeadgateInterceptor, HeadgateInterceptor
from headgate.overload import Guard
from headgate.policy import read
from support.asgi_client import ask
from support.django_project import MIDDLEWARE

POLICIES = {
    "unlimited": "limits: []",
    "counted": "limits: [{name: all, by: ip, bucket: 100/hour}]",
    "in progress": "overload: adaptive",
}
every_policy = pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)

guard = Guard("database", minimum=1, maximum=1, retry_after=7)


def query() -> None:
    """Two calls at once, of which the second is shed."""
    with guard.call(), guard.call():
        pass


def check(status: int, headers: Any, body: bytes) -> None:
    problem = json.loads(body)
    assert (status, headers["retry-after"], headers["headgate-shed"]) == (503, "7", "normal")
    assert (problem["error"], problem["retry_after_seconds"]) == ("overloaded", 7)


@every_policy
def test_asgi(policy: str) -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        query()

    (answer,) = ask(asgi.HeadgateMiddleware(app, read(policy)), "/")
    check(answer.status_code, answer.headers, answer.content)


def test_asgi_response_that_has_begun_fails_as_before() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"half", "more_body": True})
        query()

    transport = httpx.ASGITransport(asgi.HeadgateMiddleware(app, read(POLICIES["counted"])))

    async def run() -> None:
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            await client.get("/")

    with pytest.raises(Exception, match="database is overloaded"):
        asyncio.run(run())


@every_policy
def test_fastapi(policy: str) -> None:
    app = FastAPI()
    app.add_middleware(asgi.HeadgateMiddleware, policy=read(policy))  # type: ignore[arg-type]
    app.get("/")(query)
    (answer,) = ask(app, "/")
    check(answer.status_code, answer.headers, answer.content)


def test_fastapi_dependencies() -> None:
    app, limits = FastAPI(), FastAPILimits()
    limits.install(app)
    app.get("/", dependencies=[Depends(limits.allow("10/minute"))])(query)
    (answer,) = ask(app, "/")
    check(answer.status_code, answer.headers, answer.content)


@every_policy
def test_wsgi(policy: str) -> None:
    def app(environ: Any, start_response: Any) -> list[bytes]:
        query()
        return []

    with httpx.Client(
        transport=httpx.WSGITransport(wsgi.HeadgateMiddleware(app, read(policy)), raise_app_exceptions=False)
    ) as client:
        answer = client.get("http://test/")
    check(answer.status_code, answer.headers, answer.content)


@every_policy
def test_flask(policy: str) -> None:
    app = flask.Flask(__name__)
    Headgate(app, read(policy))
    app.route("/")(lambda: query() or "done")
    answer = app.test_client().get("/")
    check(answer.status_code, answer.headers, answer.data)


def view(request: HttpRequest) -> HttpResponse:
    query()
    return HttpResponse()


async def async_view(request: HttpRequest) -> HttpResponse:
    return view(request)


urlpatterns = [path("sync", view), path("async", async_view)]


@every_policy
def test_django(policy: str) -> None:
    settings = {"policy": read(policy)}
    with django.test.override_settings(HEADGATE=settings, ROOT_URLCONF=__name__, MIDDLEWARE=[MIDDLEWARE]):
        answer = django.test.Client().get("/sync")
        check(answer.status_code, answer.headers, answer.content)

        async def run() -> Any:
            return await django.test.AsyncClient().get("/async")

        answer = asyncio.run(run())
        check(answer.status_code, answer.headers, answer.content)


@every_policy
def test_aiohttp(policy: str) -> None:
    async def handler(request: web.Request) -> web.Response:
        query()
        return web.Response()

    app = web.Application()
    app.add_routes([web.get("/", handler)])
    headgate_aiohttp.setup(app, read(policy))

    async def run() -> None:
        async with TestClient(TestServer(app)) as client:
            for _ in range(2):
                answer = await client.get("/")
                check(answer.status, answer.headers, await answer.read())

    asyncio.run(run())


def service(behavior: Any) -> Any:
    return grpc.method_handlers_generic_handler("test.Echo", {"query": grpc.unary_unary_rpc_method_handler(behavior)})


def assert_unavailable(error: grpc.RpcError) -> None:
    assert dict(error.trailing_metadata())["headgate-shed"] == "normal"  # type: ignore[attr-defined]
    assert error.code() is grpc.StatusCode.UNAVAILABLE  # type: ignore[attr-defined]
    assert error.details() == "The service is overloaded. Try again in 7 seconds."  # type: ignore[attr-defined]


@every_policy
def test_grpc(policy: str) -> None:
    from concurrent.futures import ThreadPoolExecutor

    interceptor = HeadgateInterceptor(read(policy))
    server = grpc.server(ThreadPoolExecutor(2), interceptors=[interceptor])
    server.add_generic_rpc_handlers([service(lambda request, context: query())])
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel, pytest.raises(grpc.RpcError) as failed:
        channel.unary_unary("/test.Echo/query")(b"", timeout=30)
    assert_unavailable(failed.value)
    server.stop(None).wait()
    interceptor.close()


@every_policy
def test_grpc_asyncio(policy: str) -> None:
    async def behavior(request: bytes, context: Any) -> bytes:
        query()
        return b""

    async def run() -> None:
        interceptor = AsyncHeadgateInterceptor(read(policy))
        server = grpc.aio.server(interceptors=[interceptor])
        server.add_generic_rpc_handlers([service(behavior)])
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            with pytest.raises(grpc.RpcError) as failed:
                await channel.unary_unary("/test.Echo/query")(b"", timeout=30)
        assert_unavailable(failed.value)
        await server.stop(None)
        await interceptor.close()

    asyncio.run(run())
