"""Litestar behind a policy, in the ways that docs/asgi.md shows: one gate for all routes."""

# No annotations from the future: Litestar reads those of handlers.
from typing import Any

import pytest
from litestar import Litestar, get

from headgate.adapters.asgi import HeadgateMiddleware
from headgate.policy.loader import read
from headgate.testing import FakeClock
from support.asgi_client import ask, statuses


@get("/tea")
async def tea() -> str:
    return "tea"


@get("/cake")
async def cake() -> str:
    return "cake"


def wrapped(app: Litestar, **options: Any) -> Any:
    return HeadgateMiddleware(app, **options)


def inside(app: Litestar, **options: Any) -> Any:
    app.asgi_handler = HeadgateMiddleware(app.asgi_handler, **options)
    return app


@pytest.mark.parametrize("put_before", [wrapped, inside])
def test_all_routes_count_together_and_so_do_requests_that_no_route_fits(put_before: Any) -> None:
    limits = read("limits: [{by: ip, bucket: 4/minute}]")
    app = put_before(Litestar([tea, cake], logging_config=None), policy=limits, clock=FakeClock())
    answers = ask(app, "/tea", "/cake", "/nowhere", "/tea", "/cake")
    assert statuses(answers) == [200, 200, 404, 200, 429]
    assert [answer.headers["x-ratelimit-remaining"] for answer in answers] == ["3", "2", "1", "0", "0"]
