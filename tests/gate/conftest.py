"""Sites behind a gate, opened by a test and closed after it."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest

from headgate.testing import FakeClock
from support.sites import AsgiSite, WsgiSite, fastapi_item_app, flask_item_app, flask_site, starlette_site

if TYPE_CHECKING:
    from collections.abc import Iterator

    from support.sites import MakeSite, Served, Site


@contextmanager
def sites_of(kind: type[Site], app: Any, clock: FakeClock) -> Iterator[MakeSite]:
    """A function that opens sites; all of them are closed at the end. The clock is that of stores in memory."""
    sites: list[Site] = []

    def open_site(policy: Any, store: str = "memory://", **options: Any) -> Site:
        if store == "memory://":
            options = {"clock": clock, **options}
        sites.append(kind(app, policy, store, **options))
        return sites[-1]

    yield open_site
    for site in sites:
        site.close()


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock(1_763_251_200_000_000)


@pytest.fixture
def served() -> Served:
    """The names of the handlers that ran."""
    return []


@pytest.fixture(params=["asgi", "wsgi"])
def make_site(request: pytest.FixtureRequest, served: Served) -> Iterator[MakeSite]:
    """Opens the site behind a policy: in Starlette behind the ASGI gate, then in Flask behind the WSGI gate."""
    kind, site = (AsgiSite, starlette_site) if request.param == "asgi" else (WsgiSite, flask_site)
    with sites_of(kind, site(served), FakeClock()) as make:
        yield make


@pytest.fixture
def shown_items() -> list[str]:
    """The items of those requests that reached the app."""
    return []


@pytest.fixture(params=["fastapi", "flask"])
def make_item_site(request: pytest.FixtureRequest, shown_items: list[str], clock: FakeClock) -> Iterator[MakeSite]:
    """Opens the app with items behind a policy, in FastAPI and in Flask."""
    kind, app = (AsgiSite, fastapi_item_app) if request.param == "fastapi" else (WsgiSite, flask_item_app)
    with sites_of(kind, app(shown_items), clock) as make:
        yield make
