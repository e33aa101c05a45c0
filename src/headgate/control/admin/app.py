"""The admin server's ASGI app: API, pages and middleware."""

from __future__ import annotations

import logging
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.openapi.utils import get_openapi
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, Response
from starlette.routing import Match

import headgate
from headgate.adapters.asgi import HeadgateMiddleware
from headgate.control.admin.api import PREFIX, ROUTERS, Parts
from headgate.control.admin.idempotency import IdempotencyStore
from headgate.control.admin.middleware import (
    BodyLimit,
    Credentials,
    FailedAttempts,
    HostAndSecurityHeaders,
    access_policy,
    credential_identity,
    security_headers,
    stranger_identity,
)
from headgate.control.admin.problems import MEDIA_TYPE, ProblemDetails, ProblemModel, of_error, of_fields
from headgate.control.admin.sessions import Sessions
from headgate.errors import HeadgateError

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from headgate.control.admin.tokens import Tokens
    from headgate.control.service.service import AdminService

__all__ = ["create_app"]

logger = logging.getLogger("headgate")

DESCRIPTION = """
Operate a running fleet. Reads of the configuration return its version as `ETag`; changes accept it as `If-Match`, and
an `Idempotency-Key` with which they can be retried. Errors are returned as `application/problem+json` and identified by
`type`.
"""


def create_app(
    service: AdminService,
    tokens: Tokens,
    *,
    pages: bool = True,
    secure: bool = False,
    hosts: Collection[str] | None = None,
    proxies: Sequence[str] = (),
    clock: Any = None,
) -> FastAPI:
    """Create an ASGI app that serves the API and pages to callers with a token.

    `secure` is true if browsers reach it by HTTPS only. `hosts` are the accepted host names, None for any. `proxies`
    are the networks whose X-Forwarded-For is trusted. `clock` is for tests of its rate limits.
    """
    app = FastAPI(
        title="Headgate admin API",
        version=headgate.__version__,
        description=DESCRIPTION,
        docs_url=None,  # it loads scripts from other hosts
        redoc_url=None,
        redirect_slashes=False,
    )
    app.state.parts = Parts(service, tokens, IdempotencyStore(tokens))
    app.state.failures = FailedAttempts(proxies, clock=clock)
    app.state.credentials = credentials = Credentials(tokens)
    app.state.sessions = sessions = Sessions(tokens, secure=secure)
    handlers: dict[Any, Any] = {
        HeadgateError: lambda _, error: of_error(error).response(),
        RequestValidationError: lambda _, error: of_fields(error.errors()).response(),
        HTTPException: _handle_http_error,
        Exception: _handle_unexpected_error,
    }
    app.exception_handlers |= handlers
    app.add_api_route("/health", _health, methods=["GET"], summary="Health check", tags=["server"])
    for router in ROUTERS:
        app.include_router(router, prefix=PREFIX)
    if pages:
        from headgate.control.admin.pages import PageRenderer
        from headgate.control.admin.pages import router as pages_router

        tokens.check_name = service.refuse_keys
        app.state.pages = renderer = PageRenderer(service, sessions, tokens)
        app.include_router(pages_router(renderer), include_in_schema=False)
    app.openapi = lambda: _openapi(app)  # type: ignore[method-assign] # as FastAPI's docs want it
    # The last one added runs first.
    app.add_middleware(BodyLimit)
    app.add_middleware(
        HeadgateMiddleware,
        policy=access_policy(proxies),
        identities={"token": credential_identity, "stranger": stranger_identity},
        max_keys=100_000,
        namespace="headgate-admin",
        clock=clock,
    )
    app.add_middleware(HostAndSecurityHeaders, hosts=hosts, credentials=credentials, secure=secure)
    return app


def _health() -> dict[str, str]:
    return {"state": "ready"}


def _openapi(app: FastAPI) -> dict[str, Any]:
    if app.openapi_schema is None:
        found = get_openapi(
            title=app.title,
            version=app.version,
            description=app.description,
            routes=app.routes,
            separate_input_output_schemas=False,
        )
        problem = ProblemModel.model_json_schema(ref_template="#/components/schemas/{model}")
        schemas = found["components"]["schemas"] | problem.pop("$defs") | {"Problem": problem}
        unused = ("HTTPValidationError", "ValidationError")
        found["components"]["schemas"] = {name: each for name, each in schemas.items() if name not in unused}
        app.openapi_schema = found
    return app.openapi_schema


def _handle_http_error(request: Request, error: Exception) -> Response:
    """Handle requests that the framework rejects: unknown paths, wrong methods, unreadable bodies."""
    assert isinstance(error, HTTPException)
    status, headers = error.status_code, dict(error.headers or {})
    if status == 404:
        return _respond(request, ProblemDetails("not-found", "There is no resource at this path.", headers=headers))
    if status == 405:
        headers["Allow"] = allowed = ", ".join(_methods(request))
        detail = f"This path does not support the method. Use {allowed}."
        return _respond(request, ProblemDetails("wrong-method", detail, headers=headers))
    if status == 400:
        return _respond(request, ProblemDetails("bad-request", "The body cannot be parsed.", headers=headers))
    title = HTTPStatus(status).phrase
    problem = {"type": "about:blank", "title": title, "status": status, "detail": title}
    return JSONResponse(problem, status, headers, MEDIA_TYPE)


def _methods(request: Request) -> list[str]:
    """All methods of a path: each is a route of its own, and the framework reports only the first."""
    scopes = {method: {**request.scope, "method": method} for method in ("DELETE", "GET", "HEAD", "POST", "PUT")}
    routes = request.app.routes
    return [name for name, scope in scopes.items() if any(route.matches(scope)[0] is Match.FULL for route in routes)]


def _respond(request: Request, problem: ProblemDetails) -> Response:
    """Respond with a page if a browser asks for one, and with JSON otherwise."""
    pages = getattr(request.app.state, "pages", None)
    wants_json = request.url.path.startswith("/api/") or "text/html" not in request.headers.get("accept", "")
    if pages is None or wants_json:
        return problem.response()
    page: Response = pages.problem(request, problem)
    return page


def _handle_unexpected_error(request: Request, error: Exception) -> Response:
    """Handle an unexpected error. The response bypasses the middleware, so the security headers are added here."""
    # The route template, and not the path, which may contain names of clients.
    route = getattr(request.scope.get("route"), "path", "a path")
    logger.error("unexpected error in the admin server: %s %s", request.method, route, exc_info=error)
    response = ProblemDetails("failed", "See the server's log.").response()
    for name, value in security_headers(request.url.path):
        response.headers[name.decode()] = value.decode()
    return response
