"""The same small site in many frameworks, behind its gate, for clients that send what no well-behaved one would.

Requests are made by hand, below every client library: such a library would put right what has to arrive wrong.
"""

from __future__ import annotations

import asyncio
import json
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from io import BytesIO
from typing import TYPE_CHECKING, Any, NamedTuple

import flask
import litestar
import quart
from fastapi import APIRouter, FastAPI
from flask import Blueprint, Flask
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse
from starlette.routing import Route
from werkzeug.middleware.dispatcher import DispatcherMiddleware

from headgate.adapters import asgi, wsgi
from headgate.gate.admission import current_admission
from headgate.policy.loader import read
from support.asgi_client import PEER, scope, talk

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from starlette.requests import Request

    Headers = Iterable[tuple[str, str]]
    MakeSite = Callable[..., "Site"]

END_OF_BODY = {"type": "http.request", "body": b"", "more_body": False}


class Answer(NamedTuple):
    status: int
    lines: list[tuple[str, str]]
    body: bytes

    @property
    def fields(self) -> dict[str, str]:
        """Its header fields, the names in lower case."""
        return {name.lower(): value for name, value in self.lines}


class Site:
    """An app behind its gate. Requests say `path`, `method`, `headers`, `peer` and `query`, as bytes arrive."""

    def __init__(self, app: Any, policy: Any, store: Any = "memory://", **options: Any) -> None:
        policy = read(policy) if isinstance(policy, str) else policy
        self.app = self._gated(app, policy, store, **options)

    @property
    def gate(self) -> Any:
        return self.app.gate

    def ask(self, path: str = "/login", **more: Any) -> Answer:
        return self.ask_all([{"path": path, **more}])[0]

    def statuses(self, *requests: dict[str, Any]) -> list[int]:
        """Of requests that come one after another."""
        return [self.ask(**request).status for request in requests]

    def ask_all(self, requests: Sequence[dict[str, Any]]) -> list[Answer]:
        """The answers to requests that come all at once."""
        raise NotImplementedError

    def close(self) -> None:
        raise NotImplementedError

    def _gated(self, app: Any, policy: Any, store: Any, **options: Any) -> Any:
        raise NotImplementedError


class AsgiSite(Site):
    kind = "asgi"

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.loop = asyncio.new_event_loop()

    def ask_all(self, requests: Sequence[dict[str, Any]]) -> list[Answer]:
        async def all_of_them() -> list[Answer]:
            return await asyncio.gather(*[self.answer(**request) for request in requests])

        return self.loop.run_until_complete(all_of_them())

    async def answer(
        self,
        path: str = "/login",
        method: str = "GET",
        headers: Headers = (),
        peer: str | None = PEER,
        query: str = "",
    ) -> Answer:
        lines = [(b"host", b"test"), *((name.encode(), _bytes(value)) for name, value in headers)]
        told = scope(
            path,
            method=method,
            headers=lines,
            client=peer and (peer, 1),
            query_string=_bytes(query),
            raw_path=_bytes(path),
        )
        sent = await talk(self.app, told, END_OF_BODY)
        fields = [(name.decode("latin-1"), value.decode("latin-1")) for name, value in sent[0].get("headers", ())]
        return Answer(sent[0]["status"], fields, b"".join(message.get("body", b"") for message in sent[1:]))

    def close(self) -> None:
        self.loop.run_until_complete(self.gate.close())
        self.loop.run_until_complete(self.loop.shutdown_asyncgens())
        self.loop.close()

    def _gated(self, app: Any, policy: Any, store: Any, **options: Any) -> Any:
        return asgi.HeadgateMiddleware(app, policy, store, **options)


class WsgiSite(Site):
    kind = "wsgi"

    def ask_all(self, requests: Sequence[dict[str, Any]]) -> list[Answer]:
        if len(requests) == 1:
            return [self.answer(**requests[0])]
        with ThreadPoolExecutor(8) as threads:
            return list(threads.map(lambda request: self.answer(**request), requests))

    def answer(self, **request: Any) -> Answer:
        started: list[Any] = []

        def start_response(status: str, headers: list[tuple[str, str]], exc_info: Any = None) -> Callable[..., None]:
            started[:] = [int(status[:3]), headers]
            return lambda data: None

        body = self.app(environ(**request), start_response)
        try:
            content = b"".join(body)
        finally:
            with suppress(AttributeError):
                body.close()
        return Answer(*started, content)

    def close(self) -> None:
        self.gate.close()

    def _gated(self, app: Any, policy: Any, store: Any, **options: Any) -> Any:
        return wsgi.HeadgateMiddleware(app, policy, store, **options)


def environ(
    path: str = "/login", method: str = "GET", headers: Headers = (), peer: str | None = PEER, query: str = ""
) -> dict[str, Any]:
    """What a WSGI server tells an app: every byte is a character, and the lines of a header are joined."""
    told: dict[str, Any] = {
        "REQUEST_METHOD": method,
        "SCRIPT_NAME": "",
        "PATH_INFO": _bytes(path).decode("latin-1"),
        "QUERY_STRING": query,
        "SERVER_NAME": "test",
        "SERVER_PORT": "80",
        "SERVER_PROTOCOL": "HTTP/1.1",
        "HTTP_HOST": "test",
        "CONTENT_LENGTH": "0",
        "wsgi.version": (1, 0),
        "wsgi.url_scheme": "http",
        "wsgi.input": BytesIO(),
        "wsgi.errors": sys.stderr,
        "wsgi.multithread": True,
        "wsgi.multiprocess": False,
        "wsgi.run_once": False,
    }
    if peer is not None:
        told["REMOTE_ADDR"] = peer
    for name, value in headers:
        variable = "HTTP_" + name.upper().replace("-", "_")
        line = _bytes(value).decode("latin-1")
        told[variable] = f"{told[variable]},{line}" if variable in told else line
    return told


# ------------------------------------------------------------------------------------------------------- the site

Served = list[str]
"""The handlers that have run, one after another."""


def starlette_site(served: Served) -> Any:
    def handler(name: str) -> Any:
        async def handle(request: Request) -> PlainTextResponse:
            served.append(name)
            if name == "broken":
                raise RuntimeError("broken")
            return PlainTextResponse(name)

        return handle

    methods = ["GET", "POST"]
    return Starlette(
        routes=[
            Route("/login", handler("login"), methods=methods),
            Route("/users/{id}/export", handler("export"), methods=methods),
            Route("/users/{id}", handler("user"), methods=methods),
            Route("/health", handler("health")),
            Route("/broken", handler("broken")),
        ]
    )


def fastapi_site(served: Served) -> Any:
    app = FastAPI()
    for name, path in (("login", "/login"), ("export", "/users/{id}/export"), ("user", "/users/{id}")):

        def handle(name: str = name) -> str:
            served.append(name)
            return name

        app.api_route(path, methods=["GET", "POST"])(handle)
    return app


def litestar_site(served: Served) -> Any:
    @litestar.route("/login", http_method=["GET", "POST"])
    async def login() -> str:
        served.append("login")
        return "login"

    @litestar.route("/users/{id:str}/export", http_method=["GET", "POST"])
    async def export() -> str:
        served.append("export")
        return "export"

    @litestar.route("/users/{id:str}", http_method=["GET", "POST"])
    async def user() -> str:
        served.append("user")
        return "user"

    return litestar.Litestar([login, export, user], logging_config=None)


def quart_site(served: Served) -> Any:
    app = quart.Quart("site")

    async def handle(id: str = "") -> str:
        served.append(quart.request.endpoint)
        return "done"

    for name, path in (("login", "/login"), ("export", "/users/<id>/export"), ("user", "/users/<id>")):
        app.add_url_rule(path, name, handle, methods=["GET", "POST"])
    return app


def flask_site(served: Served) -> Any:
    app = Flask("site", static_folder=None)

    def handler(name: str) -> Any:
        def handle(id: str = "") -> str:
            served.append(name)
            if name == "broken":
                raise RuntimeError("broken")
            return name

        return handle

    paths = {
        "login": "/login",
        "export": "/users/<id>/export",
        "user": "/users/<id>",
        "health": "/health",
        "broken": "/broken",
    }
    for name, path in paths.items():
        app.add_url_rule(path, name, handler(name), methods=["GET", "POST"])
    return app


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


def policy_json(*limits: dict[str, Any], **more: Any) -> str:
    return json.dumps({"limits": limits, **more})


async def empty_asgi(scope: Any, receive: Any, send: Any) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body"})


def empty_wsgi(environ: Any, start_response: Any) -> list[bytes]:
    start_response("200 OK", [])
    return []


def fastapi_item_app(shown_items: list[str]) -> FastAPI:
    """Two views of one name, a router, a mounted app, and a view that says what it has cost."""
    app, router, mounted = FastAPI(), APIRouter(prefix="/admin"), FastAPI()

    @app.get("/items/{id}")
    async def show(id: str) -> str:
        shown_items.append(id)
        return id

    @router.get("/items/{id}", name="show")
    async def show_to_admins(id: str) -> str:
        return id

    @mounted.get("/items/{id}")
    async def show_mounted(id: str) -> str:
        return id

    @app.get("/ask")
    async def ask(cost: int) -> int:
        current_admission().commit(cost)
        return cost

    app.include_router(router)
    app.mount("/mounted", mounted)
    return app


def flask_item_app(shown_items: list[str]) -> Any:
    app, admin, mounted = Flask("shop", static_folder=None), Blueprint("admin", "admin"), Flask("mounted")

    @app.get("/items/<id>")
    def show(id: str) -> str:
        shown_items.append(id)
        return id

    @mounted.get("/items/<id>")
    @admin.get("/items/<id>", endpoint="show")
    def show_elsewhere(id: str) -> str:
        return id

    @app.get("/ask")
    def ask() -> str:
        current_admission().commit(int(flask.request.args["cost"]))
        return "done"

    app.register_blueprint(admin, url_prefix="/admin")
    return DispatcherMiddleware(app, {"/mounted": mounted})


def item_request(number: int = 1, **more: Any) -> dict[str, Any]:
    return {"path": f"/items/{number}", **more}


def remaining_quota(answer: Answer) -> list[int]:
    """What is left of each limit, as the answer tells it."""
    return [int(part.split(";r=")[1].split(";")[0]) for part in answer.fields["ratelimit"].split(", ")]
