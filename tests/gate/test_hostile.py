"""The hostile client: whatever it sends, it gets no free requests, nobody else's quota, no memory and no secrets."""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import os
import random
import threading
import time
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest
from django.core.handlers.wsgi import WSGIHandler
from django.http import HttpResponse
from django.test import override_settings
from django.urls import re_path
from django.views.decorators.http import require_http_methods

from headgate import Limit
from headgate.adapters.asgi import HeadgateMiddleware
from headgate.errors import HeadgateError, InvalidConfiguration
from headgate.gate.admission import current_admission
from headgate.policy.api_keys import ApiKeyHasher
from headgate.policy.loader import load, read
from headgate.policy.model import Policy, Rule
from headgate.testing import FakeClock
from support.asgi_client import PEER, scope, talk
from support.django_project import MIDDLEWARE
from support.servers import wait_until
from support.sites import (
    END_OF_BODY,
    AsgiSite,
    WsgiSite,
    environ,
    fastapi_site,
    flask_site,
    litestar_site,
    quart_site,
    starlette_site,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from django.http import HttpRequest

    from support.servers import RedisServer
    from support.sites import Answer, Served, Site

    Make = Callable[..., Site]

MEGABYTE = 2**20


@pytest.fixture
def served() -> Served:
    return []


@pytest.fixture(params=["asgi", "wsgi"])
def make(request: pytest.FixtureRequest, served: Served) -> Iterator[Make]:
    """Opens the site behind a policy: Starlette's behind the ASGI gate, then Flask's behind that for WSGI."""
    sites: list[Site] = []

    def opened(policy: Any, store: str = "memory://", app: Any = None, **options: Any) -> Site:
        if store == "memory://":
            options = {"clock": FakeClock(), **options}
        kind, site = (AsgiSite, starlette_site) if request.param == "asgi" else (WsgiSite, flask_site)
        sites.append(kind(app or site(served), policy, store, **options))
        return sites[-1]

    yield opened
    for site in sites:
        site.close()


def policy(*limits: dict[str, Any], **more: Any) -> str:
    return json.dumps({"limits": limits, **more})


PER_IP = policy({"by": "ip", "bucket": "1/hour"})
BY_KEY = policy({"by": "api_key", "bucket": "1/hour"})
BEHIND = policy({"by": "ip", "bucket": "1/hour"}, identity={"proxies": ["10.0.0.0/8"]})
FORWARDED = BEHIND.replace('["10.0.0.0/8"]', '["10.0.0.0/8"], "forwarded_by": "forwarded"')

HOPS = "10.0.0.2, " * 100_000 + "10.0.0.3"

# ------------------------------------------------------------------------------------------ who somebody claims to be


def lines(name: str, *values: str) -> list[list[tuple[str, str]]]:
    """A request for each value of a header."""
    return [[(name, value)] for value in values]


@pytest.mark.parametrize(
    ("text", "peer", "attempts"),
    [
        (PER_IP, PEER, lines("x-forwarded-for", "1.1.1.1", "1.1.1.2", "unknown")),
        (BEHIND, PEER, lines("x-forwarded-for", "1.1.1.1", "1.1.1.2", "10.0.0.9")),
        (BEHIND, "10.0.0.1", lines("x-forwarded-for", *[f"1.1.1.{n}, 6.6.6.6" for n in range(3)])),
        (BEHIND, "10.0.0.1", [[("x-forwarded-for", f"1.1.1.{n}"), ("x-forwarded-for", PEER)] for n in range(3)]),
        (BEHIND, "10.0.0.1", [[("forwarded", f"for=1.1.1.{n}"), ("x-forwarded-for", PEER)] for n in range(3)]),
        (FORWARDED, "10.0.0.1", [[("x-forwarded-for", f"1.1.1.{n}"), ("forwarded", "for=6.6.6.6")] for n in range(3)]),
        (FORWARDED, "10.0.0.1", lines("forwarded", *[f'for=1.1.1.{n};host=", for=6.6.6.6' for n in range(3)])),
        (BEHIND, "10.0.0.1", lines("x-forwarded-for", *[f"1.1.1.{n}, {HOPS}" for n in range(3)])),
        (BEHIND, "10.0.0.1", lines("x-forwarded-for", *[f"1.1.1.{n}, " + "x" * 10 * MEGABYTE for n in range(3)])),
        (BEHIND, "10.0.0.1", lines("x-forwarded-for", *[f"1.1.1.{n}," + "," * 100_000 for n in range(3)])),
        (BEHIND, "10.0.0.1", lines("x-forwarded-for", "1.1.1.1, ", "1.1.1.2, 1.1.1.300", "1.1.1.3, \0")),
        (BEHIND, "10.0.0.1", lines("x-forwarded-for", "6.6.6.6", "::ffff:6.6.6.6", "[::FFFF:606:606]:443")),
        (BEHIND, "10.0.0.1", lines("x-forwarded-for", *[f"2001:db8::{n}%eth{n}" for n in range(3)])),
        (BEHIND, "::ffff:10.0.0.1", lines("x-forwarded-for", "6.6.6.6", "6.6.6.6:1", "6.6.6.6:65535")),
        (BEHIND, None, lines("x-forwarded-for", "1.1.1.1", "1.1.1.2", "1.1.1.3")),
        (PER_IP, "not an address", lines("x-real-ip", "1.1.1.1", "1.1.1.2", "1.1.1.3")),
        (BY_KEY, PEER, lines("x-api-key", *[f"{n}" + "k" * MEGABYTE for n in range(3)])),
        (BY_KEY, PEER, lines("x-api-key", "a\r\nx: y", "b\0", "c d")),
        (BY_KEY, PEER, lines("x-api-key", "schlüssel", "鍵", "\ud800")),
        (BY_KEY, PEER, [[("x-api-key", f"a{n}"), ("x-api-key", "b")] for n in range(3)]),
        (BY_KEY, PEER, [[("authorization", f"Bearer a{n}"), ("authorization", "Bearer b")] for n in range(3)]),
        (BY_KEY, PEER, lines("authorization", "Bearer", "Basic YTpi", "Bearer  ")),
        (PER_IP, PEER, [[("x-ratelimit-cost", "0")], [("cost", "-5")], [("x-ratelimit-remaining", "99")]]),
    ],
    ids=[
        "no proxies", "not from a proxy", "left of the client", "two lines", "the other header", "the other way round",
        "a quoted comma", "100,000 hops", "10 MB", "100,000 commas", "no address", "mapped", "zones", "mapped proxy",
        "no peer", "odd peer", "megabyte keys", "control characters", "unicode", "two keys", "two tokens", "no keys",
        "costs",
    ],
)  # fmt: skip
def test_nobody_gets_a_fresh_counter_by_what_they_send(
    make: Make, text: str, peer: str | None, attempts: list[list[tuple[str, str]]]
) -> None:
    site = make(text)
    assert site.statuses(*[{"headers": headers, "peer": peer} for headers in attempts]) == [200, 429, 429]


LOOSE_BESIDE = policy(
    {"by": "api_key", "bucket": "1/hour"}, {"by": "ip", "bucket": "100/hour"}, blocked=[{"api_key": "stolen"}]
)


@pytest.mark.parametrize("spoiling", ["", " ", "a b", ",", "\0", "k" * 5000], ids=repr)
def test_a_spoiled_header_does_not_hide_the_token_beside_it(make: Make, spoiling: str) -> None:
    """Else the limit by key would be left out for a client whose token the app takes, and a block would not hold."""
    site = make(LOOSE_BESIDE)
    for token, expected in (("valid", [200, 429, 429]), ("stolen", [403, 403, 403])):
        headers = [("x-api-key", spoiling), ("authorization", f"Bearer {token}")]
        assert site.statuses(*[{"headers": headers}] * 3) == expected


def test_several_keys_share_one_counter_and_leave_no_limit_out(make: Make) -> None:
    """The app may believe one of them: from however many addresses they come, there is one quota for all of them."""
    site = make(LOOSE_BESIDE)
    sent = [("x-api-key", "valid"), ("x-api-key", "b")]
    got = site.statuses(*[{"headers": sent, "peer": f"198.51.100.{number}"} for number in range(3)])
    # WSGI servers join the lines, and an app there gets no valid key at all.
    assert got == ([200, 429, 429] if site.kind == "asgi" else [200, 200, 200])


@pytest.mark.parametrize("name", ["x-api-key", "authorization"])
@pytest.mark.parametrize("place", [0, 1, 2])
def test_a_blocked_key_among_several_lines_is_blocked(make: Make, name: str, place: int) -> None:
    """Where lines reach the app one by one, it may believe any of them; where they are joined, it gets no key."""
    keys = ["first", "second"]
    keys.insert(place, "leaked")
    sent = [(name, f"Bearer {key}" if name == "authorization" else key) for key in keys]
    site = make(policy({"by": "ip", "bucket": "9/hour"}, blocked=[{"api_key": "leaked"}]))
    assert site.ask(headers=sent).status == (403 if site.kind == "asgi" else 200)
    assert site.ask(headers=[each for each in sent if "leaked" not in each[1]]).status == 200


NAMES = [
    "a", "b", "a|b", "a%7Cb", "|", "||", "%", "%all", "%25all", "%hash-00", "{a}", "{", "a:b", "a/b", "a b", "A",
    "a\r\nset-cookie: x=1", "\0", "ä", "a\u0308", "鍵", "\ud800", "ip", "|ip|203.0.113.9", "unknown", "ambiguous",
    "hmac:00112233445566778899aabbccddeeff", "x" * MEGABYTE, "x" * MEGABYTE + "y", "0", "-1", "None",
]  # fmt: skip


@pytest.mark.parametrize("place", ["memory", "redis"])
def test_no_name_is_anybody_elses_and_none_is_told(make: Make, place: str, redis7: RedisServer, unique: str) -> None:
    store = redis7.url if place == "redis" else "memory://"
    site = make(
        policy({"by": "tenant", "bucket": "1/hour"}, {"by": "tenant+user", "bucket": "1/hour"}),
        store,
        namespace=unique,
        budget=5.0,
        identities={
            "tenant": lambda arrival: NAMES[int(arrival.header("x-number")[0])],
            "user": lambda arrival: NAMES[-int(arrival.header("x-number")[0])],
        },
    )  # fmt: skip
    for expected in (200, 429):
        for number, name in enumerate(NAMES):
            answer = site.ask(headers=[("x-number", str(number))])
            assert (answer.status, name) == (expected, name)
            assert_tells_nothing(answer, name)
    if place == "redis":
        with redis7.client() as redis:
            keys = list(redis.scan_iter(match=f"{unique}:[^%]*", count=1000))
            assert len(keys) == 2 * len(NAMES)
            assert all(redis.pttl(key) > 0 and len(key) < 300 for key in keys)


def assert_tells_nothing(answer: Answer, secret: str) -> None:
    told = " ".join(itertools.chain(*answer.lines)) + answer.body.decode()
    assert len(secret) < 6 or secret not in told
    assert not [value for _, value in answer.lines if not value.isprintable() or not value.isascii()]


# --------------------------------------------------------------------------------- functions that say who somebody is


class Shouting(str):
    """As Django's safe strings and enums of text: what `str` makes of it is not its text."""

    def __str__(self) -> str:
        return self


class Unequal:
    def __eq__(self, other: object) -> bool:
        raise RuntimeError("sk_live_secret")

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return "sk_live_secret"


def failing(arrival: Any) -> str:
    raise LookupError("no such session")


@pytest.mark.parametrize(
    "value",
    [b"sk_live_secret", Unequal(), 10**5000, 1.5, True, ["sk_live_secret"], {"sk_live_secret"}, failing, ""],
    ids=lambda value: getattr(value, "__name__", type(value).__name__),
)
def test_who_cannot_be_told_is_counted_by_address_and_not_shown(
    make: Make, value: Any, caplog: pytest.LogCaptureFixture
) -> None:
    function = value if callable(value) else lambda arrival: value
    site = make(policy({"by": "tenant", "bucket": "1/hour"}), identities={"tenant": function})
    assert site.statuses(*[{}] * 3, {"peer": "198.51.100.1"}) == [200, 429, 429, 200]
    assert "sk_live_secret" not in caplog.text
    assert ("identities['tenant']" in caplog.text) == (not isinstance(value, str))


def test_text_of_any_type_is_the_text(make: Make) -> None:
    names = iter([Shouting("a"), "a", Shouting("b"), 7, "7"])
    site = make(policy({"by": "tenant", "bucket": "1/hour"}), identities={"tenant": lambda arrival: next(names)})
    assert site.statuses(*[{}] * 5) == [200, 429, 200, 200, 429]


def test_a_function_that_fails_on_every_request_does_not_fill_the_log(
    make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    site = make(policy({"by": "tenant", "bucket": "1/hour"}), identities={"tenant": failing})
    start = time.monotonic()
    site.statuses(*[{}] * 200)
    assert 1 <= len(caplog.records) <= 2 + time.monotonic() - start


@pytest.mark.parametrize("kind", ["ip", "subnet", "address", "endpoint", "client", "global"])
def test_no_function_can_take_the_place_of_an_address(make: Make, kind: str) -> None:
    with pytest.raises(InvalidConfiguration, match=rf"identities\['{kind}'\]: this kind is built in"):
        make(PER_IP, identities={kind: failing})


def test_a_function_that_never_returns_holds_up_its_own_request_only() -> None:
    async def tenant(arrival: Any) -> str:
        if arrival.path == "/slow":
            await asyncio.get_running_loop().create_future()
        return "acme"

    async def run() -> list[Any]:
        app = HeadgateMiddleware(starlette_site([]), read(policy({"by": "tenant", "bucket": "1/hour"})),
                                 clock=FakeClock(), identities={"tenant": tenant})  # fmt: skip
        stuck = asyncio.create_task(talk(app, scope("/slow"), END_OF_BODY))
        got = [(await talk(app, scope("/login"), END_OF_BODY))[0]["status"] for _ in range(2)]
        stuck.cancel()
        return [*got, *await asyncio.gather(stuck, return_exceptions=True)]

    first, second, stuck = asyncio.run(run())
    assert (first, second, type(stuck)) == (200, 429, asyncio.CancelledError)


# ------------------------------------------------------------------------------------------------- paths and methods

BEFORE = [
    "/", "//", "", "///", " /", "\n/", "/./", "/x/../", "/x/..;/", "http://evil/", "http:/", "x:/", "http://[/", "/%2f",
    "\\", "/\0",
]  # fmt: skip
AFTER = [
    "", "/", "//", "\n", "\n\n", "/\n", "\n/", "\r\n", "\0", " ", ".", "/.", "/..", ";x", ";x/", "?x", "#x", "%0a",
    "%00", ".json", "/x",
]  # fmt: skip
SPELLINGS = ["".join(parts) for parts in itertools.product(BEFORE, ["login", "LOGIN", "log%69n", "lo\u0261in"], AFTER)]
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
def test_no_spelling_of_a_path_or_method_runs_a_handler_uncounted(framework: str, served: Served) -> None:
    """Frameworks differ in what they forgive. Whatever they do: where the handler runs, its limit was met."""
    text = policy(
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
        try_to(site, path, "POST")
    for method in ("post", "Post", " POST", "POST ", "POST\n", "PO\0ST"):
        try_to(site, "/login", method)
    site.close()
    assert [served.count(name) for name in ("login", "export")] == [1, 1]


def try_to(site: Site, path: str, method: str) -> None:
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
def test_what_a_request_says_beside_its_method_and_path_changes_nothing(make: Make, sent: dict[str, Any]) -> None:
    limit = {"path": "/login", "methods": ["POST"], "by": "ip", "bucket": "1/hour"}
    site = make(policy(limit, routes=[{"path": "/health", "cost": 0}]))
    assert site.statuses(*[{"method": "POST", **sent}] * 2) == [200, 429]


def test_paths_and_methods_that_are_made_up_share_counters_and_take_no_memory(make: Make) -> None:
    site = make(
        policy({"by": "ip+endpoint", "bucket": "5/hour"}, {"path": "/users/{id}", "by": "ip", "bucket": "9/hour"})
    )
    requests = [{"path": f"/{number}é" * 9, "method": f"M{number}"} for number in range(10_000)]
    requests += [{"path": "/x" * 5000, "method": "M" * 5000}, {"path": "/" + "\0" * 1000}]
    app, site.app.app = site.app.app, nothing_asgi if site.kind == "asgi" else nothing_wsgi
    got = site.statuses(*requests)
    site.app.app = app
    assert (got.count(200), got.count(429)) == (5, len(requests) - 5)
    snapshot = site.gate.active_policy.snapshot
    assert len(snapshot._routes) < 10
    assert len(snapshot._matcher._states) < 10
    assert site.gate._limiter.stats.keys < 3


def test_keys_that_are_made_up_have_no_counters_where_only_known_ones_count(make: Make) -> None:
    """Nor does anybody learn from the answer which keys there are: they count like none at all."""
    site = make(
        policy(
            {"name": "keys", "by": "api_key", "bucket": "3/hour", "missing": "ip"},
            identity={"api_key": {"known_only": True}},
            clients=[{"api_key": "sk_real"}, {"api_key": ApiKeyHasher(b"x" * 16).fingerprint("sk_other")}],
            blocked=[{"api_key": "sk_stolen"}],
        ),
        secret=b"x" * 16,
    )
    real, other = {"headers": [("x-api-key", "sk_real")]}, {"headers": [("authorization", "Bearer sk_other")]}
    made_up = [{"headers": [("x-api-key", f"sk_{number}")]} for number in range(1000)]
    assert site.statuses(*made_up)[:4] == [200, 200, 200, 429]
    assert site.statuses({}, {"headers": [("x-api-key", "sk_1")]}) == [429, 429]
    assert site.statuses(*[real] * 4, *[other] * 4) == [200, 200, 200, 429] * 2
    assert site.statuses({"headers": [("x-api-key", "sk_stolen")]}) == [403]
    assert site.statuses({"headers": [("x-api-key", "sk_1"), ("authorization", "Bearer sk_other")]}) == [429]
    assert site.gate._limiter.stats.keys == 3
    assert len(site.gate.active_policy.cached_clients) <= 3, "nor are they remembered as clients"


SECRET = b"sixteen bytes or more"


def requests_with_new_keys(number: int) -> list[dict[str, Any]]:
    """Requests from one address, each with a key of its own, in either header."""
    keys = [f"sk_{random.getrandbits(64):x}" for _ in range(number)]
    named = [("x-api-key", key) if index % 2 else ("authorization", f"Bearer {key}") for index, key in enumerate(keys)]
    return [{"headers": [each]} for each in named]


@pytest.mark.parametrize(
    "limits",
    [
        {"default": "5/day"},
        [{"name": "default", "bucket": "5/day"}],
        [{"name": "default", "by": "client", "bucket": "5/day", "algorithm": "sliding_window"}],
        [{"name": "default", "by": "api_key", "bucket": "5/day", "algorithm": "fixed_window"}],
        [{"name": "default", "by": ["api_key", "endpoint"], "bucket": "5/day", "algorithm": "gcra"}],
        [{"name": "default", "by": ["ip", "api_key"], "bucket": "5/day"}],
    ],
)
def test_a_new_key_with_each_request_passes_at_most_ten_times_the_limit(
    make: Make, limits: Any, store_url: str, unique: str
) -> None:
    site = make(json.dumps({"limits": limits}), store_url, namespace=unique, secret=SECRET, budget=10)
    elsewhere = [{**each, "peer": "198.51.100.7"} for each in requests_with_new_keys(60)]
    assert site.statuses(*requests_with_new_keys(200)) == [200] * 50 + [429] * 150
    assert site.statuses(*elsewhere) == [200] * 50 + [429] * 10, "another address has a counter of its own"


def test_known_keys_are_not_affected_by_unknown_ones_from_the_same_address(make: Make) -> None:
    known = {"clients": [{"api_key": "sk_acme"}], "limits": {"default": "5/day"}}
    known["overrides"] = [
        {"api_key": ApiKeyHasher(SECRET).fingerprint("sk_big"), "limit": "default", "bucket": "99/day"}
    ]
    site = make(json.dumps(known), secret=SECRET)
    assert site.statuses(*requests_with_new_keys(60)) == [200] * 50 + [429] * 10
    acme, big = {"headers": [("x-api-key", "sk_acme")]}, {"headers": [("authorization", "bearer sk_big")]}
    assert site.statuses(*[acme] * 6) == [200] * 5 + [429]
    assert site.statuses(*[big] * 100) == [200] * 99 + [429]


def test_a_made_up_key_beside_a_known_one_makes_no_new_client(make: Make) -> None:
    site = make(json.dumps({"clients": [{"api_key": "sk_acme"}], "limits": {"default": "5/day"}}), secret=SECRET)
    known = ("authorization", "Bearer sk_acme")
    both = [{"headers": [*each["headers"], known]} for each in requests_with_new_keys(40)[1::2]]
    assert site.statuses({"headers": [known]}, *both) == [200] * 5 + [429] * 16
    assert site.statuses({"headers": [known]}) == [429]


@pytest.mark.parametrize("first", [("x-api-key", "sk_new"), ("x-api-key", "sk_acme")])
def test_a_blocked_key_stays_blocked_beside_another(make: Make, first: tuple[str, str]) -> None:
    named = {"clients": [{"api_key": "sk_acme"}], "blocked": [{"api_key": "sk_stolen"}]}
    site = make(json.dumps({**named, "limits": {"default": "5/day"}}), secret=SECRET)
    both = [first, ("authorization", "Bearer sk_stolen")]
    assert site.statuses({"headers": [first]}, {"headers": both}) == [200, 403]


def test_the_net_for_unknown_keys_is_named_in_headers_refusals_and_decisions(make: Make) -> None:
    admissions: list[Any] = []
    site = make('{"limits": {"default": "5/day"}}', on_decision=lambda _, admission: admissions.append(admission))
    *_, last, refused = [site.ask(**each) for each in requests_with_new_keys(51)]
    told = '"default";q=5;w=86400, "default (unknown keys)";q=50;w=86400'
    assert (last.fields["ratelimit-policy"], last.fields["x-ratelimit-remaining"]) == (told, "0")
    assert json.loads(refused.body)["violated-policies"] == ["default (unknown keys)"]
    assert admissions[-1].decision.denied_by == ("default (unknown keys)",)
    assert [(each.rule.net_of, each.key.identity) for each in admissions[-1].resolution.applied_limits][1] == (
        "default",
        PEER,
    )


@pytest.mark.parametrize(
    ("more", "functions"),
    [
        ({"identity": {"api_key": {"unknown_factor": "off"}}}, {}),
        ({}, {"api_key": lambda arrival: arrival.header("x-api-key")[0]}),
        ({}, {"tenant": lambda _: str(random.random())}),
    ],
    ids=["turned off", "keys of the app", "tenants of the app"],
)
def test_keys_that_the_app_vouches_for_or_wants_to_have_no_net(
    make: Make, more: dict[str, Any], functions: dict[str, Any]
) -> None:
    site = make(json.dumps({"limits": {"default": "5/day"}, **more}), identities=functions, secret=SECRET)
    assert site.statuses(*[{"headers": [("x-api-key", f"k{number}")]} for number in range(60)]) == [200] * 60


def test_a_limit_by_address_replaces_the_net(make: Make) -> None:
    site = make(policy({"name": "keys", "by": "api_key", "bucket": "5/day"}, {"by": "subnet", "bucket": "70/day"}))
    assert site.statuses(*requests_with_new_keys(80)) == [200] * 70 + [429] * 10


@pytest.mark.parametrize(
    "guard",
    [
        {"by": "ip", "bucket": "70/day", "count_when": "status == 401"},
        {"by": "ip", "bucket": "70/day", "shadow": True},
        {"by": "ip", "bucket": "70/day", "cost": 0},
        {"by": ["ip", "api_key"], "bucket": "70/day"},
        {"by": "ip", "bucket": "70/hour, concurrency"},
        {"by": "ip", "tiers": {"pro": "70/day"}},
        {"by": "ip", "path": "/elsewhere", "bucket": "70/day"},
    ],
)
def test_a_limit_that_does_not_count_every_request_by_address_replaces_no_net(
    make: Make, guard: dict[str, Any]
) -> None:
    site = make(policy({"name": "keys", "by": "api_key", "bucket": "5/day"}, guard))
    assert site.statuses(*requests_with_new_keys(80)) == [200] * 50 + [429] * 30


def test_made_up_keys_leave_no_more_state_than_the_net_admits(make: Make) -> None:
    site = make('{"limits": {"default": "5/day"}}')
    app, site.app.app = site.app.app, nothing_asgi if site.kind == "asgi" else nothing_wsgi
    assert site.statuses(*requests_with_new_keys(6_000)).count(200) == 50
    site.app.app = app
    assert site.gate._limiter.stats.keys == 51
    assert len(site.gate.active_policy.cached_clients) <= 4096
    assert len(site.gate.active_policy._header_templates) == 1


def test_what_unknown_keys_reserve_is_settled_on_the_net_as_well(make: Make, served: Served) -> None:
    """Ten requests that reserve 10 of 20, and cost 1 in the end: the net, of 200, has 190 left."""
    limit = {"name": "tokens", "by": "api_key", "bucket": "20/day", "reserve": 10}
    seen: list[Any] = []

    def commit(_: Any, admission: Any) -> None:
        seen.append(admission)
        admission.commit(1)

    site = make(policy(limit), on_decision=commit)
    assert site.statuses(*requests_with_new_keys(30)) == [200] * 30
    net = seen[-1].resolution.keys[1]
    assert site.gate.limiter_view().peek(net).remaining == 170


def test_a_gate_logs_the_warnings_of_each_version_that_it_loads(
    make: Make, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "policy.json"
    file.write_text('{"limits": {"default": "5/day"}}')
    site = make(file, reload_every=None)
    warned = [record for record in caplog.records if "unknown API keys also count by address" in record.getMessage()]
    assert [(record.levelname, record.name) for record in warned] == [("WARNING", "headgate")]
    site.statuses({}, {})
    file.write_text('{"limits": {"default": "6/day"}}')
    assert site.gate.policy_watcher.look()
    assert sum("unknown API keys also count by address" in record.getMessage() for record in caplog.records) == 2


async def nothing_asgi(scope: Any, receive: Any, send: Any) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body"})


def nothing_wsgi(environ: Any, start_response: Any) -> list[bytes]:
    start_response("200 OK", [])
    return []


# ------------------------------------------------------------------------------------------------- memory and time


def flood(site: Site, keys: list[str]) -> None:
    """A request with each key, each from an address of its own, without the cost of a framework."""
    if site.kind == "wsgi":
        for number, key in enumerate(keys):
            told = {"REQUEST_METHOD": "GET", "PATH_INFO": "/", "HTTP_X_API_KEY": key}
            site.app({**told, "REMOTE_ADDR": f"10.{number >> 16}.{number >> 8 & 255}.{number & 255}"}, lambda *_: None)
        return

    async def send(message: Any) -> None:
        pass

    async def run() -> None:
        for number, key in enumerate(keys):
            told = {"type": "http", "method": "GET", "path": "/", "headers": [(b"x-api-key", key.encode())]}
            address = f"10.{number >> 16}.{number >> 8 & 255}.{number & 255}"
            await site.app({**told, "client": (address, 1)}, None, send)

    site.loop.run_until_complete(run())  # type: ignore[attr-defined]


def random_keys(number: int) -> list[str]:
    source = random.Random(7)
    return [f"{source.getrandbits(64):x}" for _ in range(number)]


def test_a_hundred_thousand_keys_fill_no_memory_and_free_nobody(make: Make) -> None:
    """Who owes most is forgotten last: a flood does not bring back who has used up a limit."""
    site = make(policy({"by": "api_key", "bucket": "5/hour"}), max_keys=95_000)
    site.app.app = nothing_asgi if site.kind == "asgi" else nothing_wsgi
    debtor = {"path": "/", "headers": [("x-api-key", "mine")]}
    assert site.statuses(*[debtor] * 6) == [200] * 5 + [429]
    flood(site, random_keys(100_000))
    assert site.gate._limiter.stats.keys == 95_000
    assert site.ask(**debtor).status == 429


def test_every_key_that_a_flood_leaves_in_redis_ends(make: Make, redis7: RedisServer, unique: str) -> None:
    limits = {"by": "api_key", "bucket": "5/minute"}, {"by": "ip", "bucket": "5/minute"}
    site = make(policy(*limits), redis7.url, namespace=unique, budget=5.0, secret="sixteen bytes or more")
    site.app.app = nothing_asgi if site.kind == "asgi" else nothing_wsgi
    flood(site, random_keys(3000))
    with redis7.client() as redis:
        keys = list(redis.scan_iter(match=f"{unique}:[^%]*", count=10_000))
        pipeline = redis.pipeline(transaction=False)
        for key in keys:
            pipeline.pttl(key)
        lives = pipeline.execute()
    assert len(keys) == 6000
    assert 0 < min(lives) <= max(lives) <= 3 * 60_000


def test_who_is_refused_leaves_nothing_behind(make: Make) -> None:
    """One address, a new key each time: the limit by address is all that its requests are counted on."""
    site = make(policy({"by": "api_key", "bucket": "5/hour"}, {"by": "ip", "bucket": "5/hour"}))
    got = site.statuses(*[{"headers": [("x-api-key", key)]} for key in random_keys(300)])
    assert (got.count(200), got.count(429)) == (5, 295)
    assert site.gate._limiter.stats.keys == 6


LARGE = 2**18


@pytest.mark.parametrize(
    "hostile",
    [
        lambda size: {"headers": [("x-forwarded-for", "1.1.1.1," * (size // 8))]},
        lambda size: {"headers": [("x-forwarded-for", "," * size)]},
        lambda size: {"headers": [("x-forwarded-for", "")] * (size // 16)},
        lambda size: {"headers": [("x-api-key", "k" * size)]},
        lambda size: {"headers": [("authorization", "Bearer" + " " * size + "x")]},
        lambda size: {"path": "/" * size},
        lambda size: {"path": "/a" * (size // 2)},
        lambda size: {"path": "a//" * (size // 3) + "/" * size},
        lambda size: {"path": "/.." * (size // 3)},
        lambda size: {"path": "x:" * (size // 2)},
        lambda size: {"method": "M" * size},
        lambda size: {"headers": [("x-tenant", "|" * size)]},
    ],
    ids=[
        "hops", "commas", "lines", "key", "blanks", "slashes", "segments", "doubled", "dots", "no slash", "method",
        "tenant",
    ],
)  # fmt: skip
def test_what_a_refusal_costs_grows_no_faster_than_what_was_sent(make: Make, hostile: Callable[[int], Any]) -> None:
    limits = [{"by": kind, "bucket": "1/hour"} for kind in ("global", "api_key", "tenant")]
    more = {"identity": {"proxies": ["10.0.0.0/8", "1.1.1.1"]}, "routes": [{"path": "/a/{b}/{c}/*", "class": "deep"}]}
    tenant = {"tenant": lambda arrival: (arrival.header("x-tenant") or [None])[0]}
    site = make(policy(*limits, **more), identities=tenant)
    site.ask()

    def seconds(size: int) -> float:
        """Of admission alone, at its best: what the test itself does with the request is none of it."""
        request = {"peer": "10.0.0.1", **hostile(size)}
        if site.kind == "wsgi":
            arrival = site.app._make_request(environ(**request))
            return min(timed(lambda: site.gate.admit(arrival)) for _ in range(5))
        headers = [(name.encode(), value.encode()) for name, value in request.get("headers", ())]
        path, method = request.get("path", "/login"), request.get("method", "GET")
        told = scope(path, method=method, headers=headers, client=("10.0.0.1", 1))

        async def refuse() -> None:
            await site.app(told, None, swallow)

        loop = site.loop  # type: ignore[attr-defined]
        return min(timed(lambda: loop.run_until_complete(refuse())) for _ in range(5))

    # A machine that is busy with something else may slow one of the two; what grows too fast does so every time.
    assert any(seconds(4 * LARGE) < 10 * seconds(LARGE) + 0.005 for _ in range(5))
    assert seconds(2**16) < 0.05  # what servers let through at most


async def swallow(message: Any) -> None:
    pass


def timed(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


# ------------------------------------------------------------------------------------------------- what is told


def test_no_limit_name_gets_out_of_its_header(make: Make) -> None:
    for name in ("a\r\nset-cookie: x=1", "a\nb", "\0", "ä", ""):
        with pytest.raises(HeadgateError):
            Limit(1, timedelta(hours=1), name=name)
        with pytest.raises(HeadgateError):
            read(policy({"name": name, "by": "ip", "bucket": "1/hour"}))
    name = 'a", "b";q=9\\ %d %s %'
    site = make(Policy((Rule(name, Limit(1, timedelta(hours=1), name=name), ("ip",)),)))
    for status in (200, 429):
        answer = site.ask()
        assert answer.status == status
        assert answer.fields["ratelimit-policy"] == r'"a\", \"b\";q=9\\ %d %s %";q=1;w=3600'
        assert answer.fields["ratelimit"] == r'"a\", \"b\";q=9\\ %d %s %";r=0;t=3600'
    assert json.loads(answer.body)["violated-policies"] == [name]


SECRETS = ["sk_live_secret", "contract 4711", "Ada's label", "scraping", "127.0.0.1", "redis", "Traceback", "hmac:"]


@pytest.mark.parametrize(
    ("more", "store", "expected"),
    [
        ({}, "memory://", [200, 429]),
        ({"blocked": [{"api_key": "sk_live_secret", "reason": "scraping"}]}, "memory://", [403, 403]),
        ({"clients": [{"api_key": "sk_live_secret", "tier": "pro", "label": "Ada's label"}]}, "memory://", [200, 429]),
        (
            {"overrides": [{"api_key": "sk_live_secret", "limit": "a", "bucket": "1/day", "reason": "contract 4711"}]},
            "memory://",
            [200, 429],
        ),
        ({"on_failure": "closed"}, "redis://:sk_live_secret@127.0.0.1:1/0", [503, 503]),
        ({"on_failure": "open"}, "redis://:sk_live_secret@127.0.0.1:1/0", [200, 200]),
    ],
    ids=["denied", "blocked", "client", "override", "closed", "open"],
)
def test_neither_keys_nor_reasons_nor_insides_are_told(
    make: Make, more: dict[str, Any], store: str, expected: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    limit = {"name": "a", "by": "api_key", "bucket": "1/hour", "tiers": {"pro": "1/minute"}}
    site = make(policy(limit, **more), store, secret="sixteen bytes or more")
    answers = [site.ask(headers=[("x-api-key", "sk_live_secret")]) for _ in range(2)]
    assert [answer.status for answer in answers] == expected
    for answer in answers:
        told = " ".join(itertools.chain(*answer.lines)) + answer.body.decode()
        assert not [secret for secret in SECRETS if secret in told]
    assert "sk_live_secret" not in caplog.text


# ---------------------------------------------------------------------------------- apps that fail, clients that leave

ONE_AT_ONCE = policy(
    {"name": "one", "by": "ip", "bucket": {"algorithm": "concurrency", "quota": 1, "period": "1 hour"}},
    {"name": "failures", "by": "ip", "bucket": "10/hour", "count_when": "status >= 500"},
)


@pytest.mark.parametrize("is_started", [False, True], ids=["before", "after"])
def test_an_app_that_fails_holds_nothing_and_is_counted(make: Make, is_started: bool) -> None:
    async def asgi(scope: Any, receive: Any, send: Any) -> None:
        if is_started:
            await send({"type": "http.response.start", "status": 500, "headers": []})
            await send({"type": "http.response.body", "body": b"half", "more_body": True})
        raise RuntimeError("broken")

    def wsgi(environ: Any, start_response: Any) -> Iterator[bytes]:
        if not is_started:
            raise RuntimeError("broken")
        start_response("500 Whatever", [])
        return half()

    def half() -> Iterator[bytes]:
        yield b"half"
        raise RuntimeError("broken")

    site = make(ONE_AT_ONCE)
    site.app.app = asgi if site.kind == "asgi" else wsgi
    for _ in range(10):
        with pytest.raises(RuntimeError, match="broken"):
            site.ask()
    assert site.ask().status == 429  # by the limit that counts failures, and not for want of a place


def test_a_client_that_leaves_holds_nothing(make: Make) -> None:
    site = make(ONE_AT_ONCE)
    if site.kind == "wsgi":
        for _ in range(3):
            started: list[str] = []
            body = site.app(environ("/login"), lambda status, headers, started=started: started.append(status))
            assert started == ["200 OK"]
            body.close()  # as servers do, without having read a chunk
        return

    async def leave() -> None:
        inside = asyncio.Event()

        async def app(scope: Any, receive: Any, send: Any) -> None:
            assert current_admission().allowed
            inside.set()
            await asyncio.get_running_loop().create_future()

        site.app.app = app
        for _ in range(3):
            task = asyncio.create_task(site.answer())  # type: ignore[attr-defined]
            await asyncio.wait_for(inside.wait(), 5)
            inside.clear()
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    site.loop.run_until_complete(leave())  # type: ignore[attr-defined]


# ------------------------------------------------------------------------------------------- policies while serving


def replaced_by(kind: str, path: Path) -> None:
    """What somebody puts in the place of a policy file."""
    new = path.with_name("new")
    if kind == "directory":
        path.unlink()
        path.mkdir()
        return
    if kind == "pipe":
        os.mkfifo(new)
    elif kind == "device":
        new.symlink_to("/dev/zero")
    elif kind == "100 MB":
        with new.open("wb") as file:
            file.truncate(100 * MEGABYTE)
    else:
        new.write_bytes({"noise": random.Random(7).randbytes(10_000), "depth": b"[" * 100_000, "nothing": b""}[kind])
    new.replace(path)


def test_the_health_path_quotes_nothing_of_an_invalid_policy(make: Make, tmp_path: Path) -> None:
    """Nor of another file that a symlink leads to."""
    path, other = tmp_path / "policy.json", tmp_path / "shadow"
    path.write_text(policy({"by": "ip", "bucket": "2/hour"}))
    site = make(path, reload_every=None, health_path="/health")
    other.write_text('{"limits": [{"by": "ip", "bucket": "root:$6$secret"}], "blocked": [{"ip": "sk_live_secret"}]}')
    path.unlink()
    path.symlink_to(other)
    assert not site.gate.policy_watcher.look()
    assert "secret" in site.gate.policy_error
    answer = site.ask("/health")
    assert b"secret" not in answer.body
    told = "the newest version of the policy is invalid; the log of this process says why"
    assert json.loads(answer.body)["policy_error"] == told


@pytest.mark.parametrize(
    ("kind", "told"),
    [
        ("directory", "Is a directory"),
        ("pipe", "not a regular file"),
        ("device", "not a regular file"),
        ("100 MB", "larger than 24 MB"),
        ("noise", "not UTF-8"),
        ("depth", "nested too deep"),
        ("nothing", "not JSON"),
    ],
)
def test_whatever_takes_the_place_of_a_policy_the_last_good_one_stays(
    make: Make, tmp_path: Path, kind: str, told: str
) -> None:
    path = tmp_path / "policy.json"
    path.write_text(policy({"by": "ip", "bucket": "2/hour"}))
    site = make(path, reload_every=0.005)
    assert site.ask().status == 200
    tracemalloc.start()
    replaced_by(kind, path)
    wait_until(lambda: told in (site.gate.policy_error or ""), f"{told!r} is told of the change")
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 4 * MEGABYTE
    assert site.statuses({}, {}) == [200, 429]
    with pytest.raises(HeadgateError, match=told):
        load(path)
    if path.is_dir():
        path.rmdir()
    (tmp_path / "good").write_text(policy({"by": "ip", "bucket": "1/hour"}, blocked=[{"ip": PEER}]))
    (tmp_path / "good").replace(path)
    wait_until(lambda: site.gate.policy_error is None, "the watch goes on")
    assert site.ask().status == 403


@pytest.mark.parametrize(
    ("format", "text"),
    [
        ("yaml", "limits: " + "9" * MEGABYTE + "x"),
        ("yaml", "limits: " + "1:" * MEGABYTE + "x"),
        ("yaml", "limits: " + "1_" * MEGABYTE + ".x"),
        ("yaml", "limits: " + "[" * MEGABYTE),
        ("yaml", "limits: [{by: ip, bucket: " + "9" * MEGABYTE + "/minute}]"),
        ("yaml", "limits: [{by: ip, bucket: 5/minute" + " " * MEGABYTE + "x}]"),
        ("json", '{"limits": ' + "9" * MEGABYTE + "}"),
        ("json", '{"limits": ' * MEGABYTE),
        ("toml", "limits = " + "9" * MEGABYTE),
        ("toml", "limits = " + "[" * MEGABYTE),
    ],
    ids=lambda value: value[:4] + value[-12:],
)
def test_no_text_in_the_place_of_a_policy_holds_up_the_process(format: str, text: str) -> None:
    """It is read beside the requests, and a pattern that goes back and forth would stop them all."""

    def refuse() -> None:
        with pytest.raises(HeadgateError):
            read(text, format=format)

    assert timed(refuse) < 5


def test_exactly_the_limit_is_admitted_while_the_policy_is_swapped_200_times(make: Make, tmp_path: Path) -> None:
    path = tmp_path / "policy.json"

    def version(number: int) -> str:
        return policy({"name": "a", "by": "ip", "bucket": "300/hour"}, name=f"version {number}")

    path.write_text(version(0))
    site = make(path, reload_every=None)
    got = asked_during(site, 600, lambda number: swap(site, path, version(number)))
    assert (got.count(200), got.count(429)) == (300, 300)


def test_each_request_keeps_its_numbers_while_they_change_200_times(make: Make, tmp_path: Path) -> None:
    path = tmp_path / "policy.json"

    def version(number: int) -> str:
        quota = (1000, 5000, 200)[number % 3]
        limits = [
            {"name": name, "by": "ip", "bucket": f"{quota}/hour", "reserve": 2} for name in ("a", f"b{number % 2}")
        ]
        return policy(
            *limits,
            {"name": "c", "by": "ip", "bucket": {"algorithm": "concurrency", "quota": quota, "period": "1 hour"}},
        )

    path.write_text(version(0))
    answers: list[Answer] = []
    site = make(path, reload_every=None)
    asked_during(site, 400, lambda number: swap(site, path, version(number)), answers)
    for answer in answers:
        assert answer.status in (200, 429)
        quotas = {part.split(";")[1] for part in answer.fields["ratelimit-policy"].split(", ")}
        assert quotas == {f"q={answer.fields['x-ratelimit-limit']}"}  # never those of two versions
    assert site.gate.policy_error is None


def swap(site: Site, path: Path, text: str) -> None:
    new = path.with_name("new")
    new.write_text(text)
    new.replace(path)
    assert site.gate.policy_watcher.look()


def asked_during(
    site: Site, requests: int, change: Callable[[int], None], answers: list[Answer] | None = None
) -> list[int]:
    """The statuses of requests that come from all sides while the policy changes 200 times."""
    kept: list[Answer] = [] if answers is None else answers
    is_over = threading.Event()

    def change_often() -> None:
        for number in range(1, 201):
            change(number)
        is_over.set()

    with ThreadPoolExecutor(1) as side:
        changing = side.submit(change_often)
        kept += site.ask_all([{"path": f"/users/{number}"} for number in range(requests // 2)])
        while not is_over.is_set() and not changing.done() and len(kept) < requests - 8:
            kept += site.ask_all([{"path": "/users/1"}] * 8)
        changing.result()
    kept += site.ask_all([{"path": "/users/1"}] * (requests - len(kept)))
    return [answer.status for answer in kept]
