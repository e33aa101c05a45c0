"""Paths and methods: each request that reaches a handler counts on that handler's route."""

from __future__ import annotations

import itertools
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import pytest
from django.core.handlers.wsgi import WSGIHandler
from django.http import HttpResponse
from django.test import override_settings
from django.urls import re_path
from django.views.decorators.http import require_http_methods

from headgate.policy.loader import read
from headgate.testing import FakeClock
from support.django_project import MIDDLEWARE
from support.sites import (
    AsgiSite,
    WsgiSite,
    fastapi_site,
    flask_site,
    item_request,
    litestar_site,
    policy_json,
    quart_site,
    starlette_site,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from django.http import HttpRequest

    from support.sites import MakeSite, Served, Site


PREFIXES = [
    "/", "//", "", "///", " /", "\n/", "/./", "/x/../", "/x/..;/", "http://evil/", "http:/", "x:/", "http://[/", "/%2f",
    "\\", "/\0",
]  # fmt: skip
SUFFIXES = [
    "", "/", "//", "\n", "\n\n", "/\n", "\n/", "\r\n", "\0", " ", ".", "/.", "/..", ";x", ";x/", "?x", "#x", "%0a",
    "%00", ".json", "/x",
]  # fmt: skip
SPELLINGS = [
    "".join(parts) for parts in itertools.product(PREFIXES, ["login", "LOGIN", "log%69n", "lo\u0261in"], SUFFIXES)
]
EXPORTS = [
    f"/users{slashes}7{slashes}export{after}"
    for slashes in ("/", "//", "/" * 100, "/" * 9000, "/\n/", "/./")
    for after in ("", "/", "\n", "/" * 9000)
]


class DjangoSite(WsgiSite):
    """Django's own middleware, in front of patterns that end in `$`."""

    def __init__(self, served: Served, text: str) -> None:
        def view(name: str) -> Callable[..., HttpResponse]:
            def handle(request: HttpRequest, **more: Any) -> HttpResponse:
                served.append(name)
                return HttpResponse()

            return require_http_methods(["GET", "POST"])(handle)

        patterns = {
            "login": r"^login/?$",
            "export": r"^users/(?P<id>[^/]+)/export/?$",
            "user": r"^users/(?P<id>[^/]+)$",
        }
        urls = type("Urls", (), {"urlpatterns": [re_path(pattern, view(name)) for name, pattern in patterns.items()]})
        headgate = {"policy": read(text), "clock": FakeClock()}
        self._settings = override_settings(HEADGATE=headgate, MIDDLEWARE=[MIDDLEWARE], ROOT_URLCONF=urls)
        self._settings.enable()
        self.app = WSGIHandler()

    def close(self) -> None:
        self._settings.disable()


@pytest.mark.filterwarnings("ignore:coroutine .* was never awaited")  # Quart's own, where it fails on a path
@pytest.mark.parametrize("framework", ["starlette", "fastapi", "litestar", "quart", "flask", "django"])
def test_no_spelling_of_path_or_method_reaches_a_handler_uncounted(framework: str, served: Served) -> None:
    """Frameworks differ in what they forgive. Whatever they do: where the handler runs, its limit was met."""
    text = policy_json(
        {"path": "/login", "methods": ["POST"], "by": "global", "bucket": "1/hour"},
        {"path": "/users/{id}/export", "by": "global", "bucket": "1/hour"},
    )
    sites = {"starlette": starlette_site, "fastapi": fastapi_site, "litestar": litestar_site, "quart": quart_site}
    site: Site
    if framework == "django":
        site = DjangoSite(served, text)
    elif framework == "flask":
        site = WsgiSite(flask_site(served), text, clock=FakeClock())
    else:
        site = AsgiSite(sites[framework](served), text, clock=FakeClock())
    for path in [*SPELLINGS, *EXPORTS]:
        send_ignoring_framework_errors(site, path, "POST")
    for method in ("post", "Post", " POST", "POST ", "POST\n", "PO\0ST"):
        send_ignoring_framework_errors(site, "/login", method)
    site.close()
    assert [served.count(name) for name in ("login", "export")] == [1, 1]


def send_ignoring_framework_errors(site: Site, path: str, method: str) -> None:
    # A framework that fails on a spelling has run no handler, and it is the handlers that are counted.
    with suppress(ValueError, KeyError, AttributeError, IndexError):
        site.ask(path, method=method)


@pytest.mark.parametrize(
    "sent",
    [
        {"headers": [("x-http-method-override", "GET")]},
        {"headers": [("x-method-override", "OPTIONS"), ("x-http-method", "HEAD")]},
        {"query": "_method=GET&cost=0&x-ratelimit-cost=0"},
        {"headers": [("x-original-url", "/health"), ("x-rewrite-url", "/health"), ("x-forwarded-prefix", "/health")]},
        {"headers": [("host", "internal"), ("x-forwarded-host", "internal"), ("upgrade", "websocket")]},
    ],
    ids=["method", "other names", "query", "path", "host"],
)
def test_override_headers_and_query_do_not_change_the_route(make_site: MakeSite, sent: dict[str, Any]) -> None:
    limit = {"path": "/login", "methods": ["POST"], "by": "ip", "bucket": "1/hour"}
    site = make_site(policy_json(limit, routes=[{"path": "/health", "cost": 0}]))
    assert site.statuses(*[{"method": "POST", **sent}] * 2) == [200, 429]


def test_routes_are_counted_by_template_not_by_view_name(make_item_site: MakeSite) -> None:
    """P8: /u/1, /u/2, ... were each a counter of their own, and views of one name shared one."""
    paths = ["/items/{id}", "/admin/items/{id}"]
    site = make_item_site(policy_json({"path": paths, "by": "ip+endpoint", "bucket": "2/minute"}))
    assert site.statuses(*[item_request(number) for number in range(4)]) == [200, 200, 429, 429]
    assert site.statuses(*[{"path": f"/admin/items/{number}"} for number in range(3)]) == [200, 200, 429]


@pytest.mark.parametrize(
    "paths",
    [
        [f"/mounted/items/{number}" for number in range(4)],
        [f"/admin/items/{number}" for number in range(4)],
        [f"/nowhere/{number}" for number in range(4)],
        [f"/mounted/nowhere/{number}" for number in range(4)],
        ["/items/1", "/mounted/items/1", "/nowhere", "/admin/items/1"],
    ],
    ids=["mounted", "router", "404", "404 below a mount", "mixed"],
)
def test_mounts_routers_and_404s_are_counted(make_item_site: MakeSite, paths: list[str]) -> None:
    """P9: mounted apps, included routers and 404s were never counted. What no template fits shares one class."""
    site = make_item_site(policy_json({"by": "ip+endpoint", "bucket": "3/minute"}))
    answers = [site.ask(path) for path in paths]
    assert [answer.status == 429 for answer in answers] == [False, False, False, True]
    assert all("ratelimit" in answer.fields for answer in answers)
