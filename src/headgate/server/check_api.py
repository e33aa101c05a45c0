"""The HTTP API for any language: questions in JSON, and the subrequests of gateways."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Annotated, Any, Final

from fastapi import APIRouter, HTTPException, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import Field
from starlette.routing import Route

from headgate.errors import InvalidInput, StoreError
from headgate.server.check_service import (
    BatchAnswer,
    BatchBody,
    CheckBody,
    DeadlineExceeded,
    DecisionAnswer,
    ServerOverloaded,
    header_fields,
)
from headgate.server.forwarded import ForwardedRequest
from headgate.server.json_route import JsonRoute

if TYPE_CHECKING:
    from headgate.adapters.asgi import App, Message, Receive, Scope, Send
    from headgate.server.check_service import CheckService

__all__ = ["BodySizeLimit", "add_auth_route", "add_check_routes", "add_error_handlers"]

MAX_BODY_BYTES: Final = 1_000_000
BODY_TIMEOUT_S: Final = 10.0
"""Time for a body to arrive, so that a client that sends it byte by byte cannot hold the connection."""
MAX_PROBLEMS: Final = 10
"""Problems of an invalid question that are listed."""
AUTH_METHODS: Final = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS")
"""Some gateways ask with the method of the original request."""


def add_check_routes(router: APIRouter, service: CheckService) -> None:
    """Add the routes of the API. FastAPI would search routes of an included router twice for each request."""

    # From left to right, as validating a single question also as a batch takes as long as the check itself.
    async def check(
        body: Annotated[CheckBody | BatchBody, Field(union_mode="left_to_right")],
    ) -> DecisionAnswer | BatchAnswer:
        """Charge a request, or each of several."""
        return await (service.check_batch(body) if isinstance(body, BatchBody) else service.check(body))

    for operation in (
        check,
        service.peek,
        service.reserve,
        service.commit,
        service.refund,
        service.hold,
        service.renew,
        service.leave,
    ):
        path = f"/v1/{operation.__name__}"
        router.add_api_route(path, operation, methods=["POST"], tags=["checks"], route_class_override=JsonRoute)


def add_auth_route(router: APIRouter, service: CheckService) -> None:
    """Add /auth, which gateways ask about every request before they pass it on.

    A route of Starlette, as the parameters of FastAPI's take as long as the check itself.
    """

    async def auth(request: Request) -> Response:
        """Answer a subrequest of nginx, or the forward authentication of Traefik, Caddy or HAProxy."""
        peer = request.client.host if request.client is not None else None
        denied = _denied_status(request) if request.scope["query_string"] else 0
        admission = await service.admit(ForwardedRequest(request.headers, peer))
        if admission.refusal is None:
            return Response(status_code=200, headers=header_fields(admission.headers))
        refusal = admission.refusal
        return Response(refusal.body, denied or refusal.status, header_fields(refusal.headers))

    router.routes.append(Route("/auth", auth, methods=[*AUTH_METHODS], include_in_schema=False))


def _denied_status(request: Request) -> int:
    """The status of rejections that the gateway needs, such as 403 for nginx; 0 for that of the rejection."""
    text = request.query_params.get("denied", "0")
    if text == "0":
        return 0
    if not (text.isascii() and text.isdigit() and len(text) == len("403") and 400 <= int(text) <= 599):
        problem = {"loc": ("query", "denied"), "msg": "use a status from 400 to 599", "type": "value_error"}
        raise RequestValidationError([problem])
    return int(text)


class BodySizeLimit:
    """ASGI middleware that bounds the bodies of all requests, however they are sent, and the time they take."""

    def __init__(self, app: App) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        lengths = [value for name, value in scope["headers"] if name == b"content-length"]
        size = 0
        is_answered = False
        deadline = asyncio.get_running_loop().time() + BODY_TIMEOUT_S

        async def receive_bounded() -> Message:
            nonlocal size
            try:
                async with asyncio.timeout_at(None if is_answered else deadline):
                    message = await receive()
            except TimeoutError:
                raise _BodyRejected(408, "too_slow", f"the body took longer than {BODY_TIMEOUT_S:g} s") from None
            size += len(message.get("body", b""))
            if size > MAX_BODY_BYTES:
                raise _too_large()
            return message

        async def send_noted(message: Message) -> None:
            nonlocal is_answered
            is_answered = True
            await send(message)

        if any(value.isdigit() and (len(value) > 20 or int(value) > MAX_BODY_BYTES) for value in lengths):
            await _too_large().response()(scope, receive, send)
            return
        await self._app(scope, receive_bounded, send_noted)


class _BodyRejected(HTTPException):
    """A body that is too large or too slow. FastAPI would replace other exceptions while it reads a body."""

    def __init__(self, status: int, error: str, message: str) -> None:
        super().__init__(status, message)
        self.error = error

    def response(self) -> Response:
        return _problem(self.status_code, self.error, self.detail, {"connection": "close"})


def _too_large() -> _BodyRejected:
    return _BodyRejected(413, "too_large", f"the body is larger than {MAX_BODY_BYTES:,} bytes")


def add_error_handlers(app: Any) -> None:
    """Answer invalid questions with 400, 413 or 422, an unavailable store and overload with 503."""

    def malformed(_: Request, error: Any) -> Response:
        # Without the input, which FastAPI would repeat, and which may not even be text.
        problems = [f"{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in error.errors()[:MAX_PROBLEMS]]
        return _problem(422, "invalid_request", "; ".join(problems))

    app.add_exception_handler(RequestValidationError, malformed)
    app.add_exception_handler(_BodyRejected, lambda _, error: error.response())
    for kind, status, name in (
        (InvalidInput, 400, "invalid_request"),
        (StoreError, 503, "store_unavailable"),
        (ServerOverloaded, 503, "overloaded"),
        (DeadlineExceeded, 503, "deadline_exceeded"),
    ):
        app.add_exception_handler(kind, _handler(status, name))


def _handler(status: int, name: str) -> Any:
    return lambda _, error: _problem(status, name, str(error))


def _problem(status: int, name: str, message: str, headers: dict[str, str] | None = None) -> Response:
    return JSONResponse({"error": name, "message": message}, status, headers)
