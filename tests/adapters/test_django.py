"""The Django middleware, in both of Django's stacks: the same policy, the same answers, and nothing blocks the loop."""

from __future__ import annotations

import asyncio
import json
import re
import secrets
import socket
import threading
import time
from contextlib import closing
from datetime import timedelta
from http.client import HTTPConnection
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from wsgiref.simple_server import WSGIRequestHandler, make_server

import pytest
from asgiref.sync import iscoroutinefunction
from django.conf import settings
from django.contrib.auth import alogin, login
from django.core import checks
from django.core.exceptions import ImproperlyConfigured
from django.core.handlers.asgi import ASGIHandler
from django.core.handlers.wsgi import WSGIHandler
from django.core.management import call_command
from django.core.management.base import SystemCheckError
from django.db import connection
from django.db.backends.utils import CursorWrapper
from django.http import FileResponse, Http404, HttpResponse, StreamingHttpResponse
from django.test import AsyncClient, Client, override_settings
from django.urls import path
from django.utils.decorators import method_decorator
from django.utils.functional import SimpleLazyObject
from django.views import View

from headgate import Limit
from headgate.adapters.django import DjangoRequest, HeadgateMiddleware, _gates, exempt, limit
from headgate.gate.admission import current_admission
from headgate.gate.gate import AsyncGate, Gate
from headgate.gate.options import OPTIONS
from headgate.policy.loader import read
from headgate.testing import FakeClock
from support.django_project import MIDDLEWARE
from support.paths import DOCS

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator
    from pathlib import Path

    from django.http import HttpRequest

    from headgate.gate.responses import RejectionInfo

PAGE = (DOCS / "django.md").read_text("utf-8")
SIGNED_IN = [
    "django.contrib.sessions.middleware.SessionMiddleware",
    "django.contrib.auth.middleware.AuthenticationMiddleware",
    MIDDLEWARE,
]

settings.ROOT_URLCONF = __name__

# ---------------------------------------------------------------------- views


def hello(request: HttpRequest, id: int = 0) -> HttpResponse:
    return HttpResponse(b"hello", status=int(request.GET.get("status", 200)), headers={"X-App": "yes"})


async def ahello(request: HttpRequest) -> HttpResponse:
    return hello(request)


def fail(request: HttpRequest) -> HttpResponse:
    raise LookupError


def ask(request: HttpRequest) -> HttpResponse:
    request.headgate.commit(int(request.GET["cost"]))  # type: ignore[attr-defined]
    assert current_admission() is request.headgate  # type: ignore[attr-defined]
    return HttpResponse(b"done")


arrived = threading.Event()
"""Whether the client has the first chunk of a stream; set for those who do not wait for it."""
arrived.set()


def stream(request: HttpRequest) -> StreamingHttpResponse:
    def chunks() -> Iterator[bytes]:
        yield b"first"
        assert arrived.wait(10), "the first chunk was kept back"
        current_admission().commit(int(request.GET.get("cost", 1)))
        yield b"last"

    return StreamingHttpResponse(chunks())


events: list[bytes] = []
"""What was made and what was sent, in this order."""


async def astream(request: HttpRequest) -> StreamingHttpResponse:
    async def chunks() -> AsyncIterator[bytes]:
        yield b"first"
        events.append(b"the last is made")
        request.headgate.commit(int(request.GET.get("cost", 1)))  # type: ignore[attr-defined]
        yield b"last"

    return StreamingHttpResponse(chunks())


def file(request: HttpRequest) -> FileResponse:
    return FileResponse(open(__file__, "rb"))  # the answer closes it


def sign_in(request: HttpRequest) -> HttpResponse:
    from django.contrib.auth.models import User

    login(request, User.objects.get(username=request.GET["name"]))
    return HttpResponse()


async def asign_in(request: HttpRequest) -> HttpResponse:
    from django.contrib.auth.models import User

    await alogin(request, await User.objects.aget(username=request.GET["name"]))
    return HttpResponse()


is_inside = asyncio.Event()


async def wait(request: HttpRequest) -> HttpResponse:
    is_inside.set()
    await asyncio.get_running_loop().create_future()
    return HttpResponse()


def from_device(request: HttpRequest) -> str | None:
    return request.headers.get("x-device")


@limit("1/minute", by="global")
@limit("5/hour; 9/day", by=from_device)
def limited(request: HttpRequest) -> HttpResponse:
    return HttpResponse(b"here")


@limit("1/minute", by="global")
async def alimited(request: HttpRequest) -> HttpResponse:
    return HttpResponse(b"here")


@limit("2/minute", methods=["POST"], count_when="status == 401")
def login_view(request: HttpRequest) -> HttpResponse:
    if request.GET["status"] == "404":
        raise Http404
    return HttpResponse(status=int(request.GET["status"]))


@limit("1/minute")
class Items(View):
    def get(self, request: HttpRequest) -> HttpResponse:
        return HttpResponse(b"items")

    @method_decorator(limit("1/hour", name="placing"))
    def post(self, request: HttpRequest) -> HttpResponse:
        return HttpResponse(b"placed")


@limit("1/minute")
class AsyncItems(View):
    async def get(self, request: HttpRequest) -> HttpResponse:
        return HttpResponse(b"items")


@method_decorator(limit("1/minute"), name="dispatch")
class Orders(View):
    def get(self, request: HttpRequest) -> HttpResponse:
        return HttpResponse(b"orders")


@method_decorator(limit("1/minute"), name="dispatch")
class Parcels(View):
    def get(self, request: HttpRequest) -> HttpResponse:
        return HttpResponse(b"parcels")


class Plain(View):
    def get(self, request: HttpRequest) -> HttpResponse:
        return HttpResponse(b"plain")


class Exempt(Plain):
    pass


one_at_a_time = limit(Limit(1, timedelta(minutes=1), algorithm="concurrency", name="one"))


urlpatterns = [
    path("limited", limited),
    path("alimited", alimited),
    path("login", login_view),
    path("class/items", Items.as_view()),
    path("class/aitems", AsyncItems.as_view()),
    path("class/orders", Orders.as_view()),
    path("class/parcels", Parcels.as_view()),
    path("class/plain", limit("1/minute")(Plain.as_view())),
    path("health", exempt(lambda request: HttpResponse(b"fine"))),
    path("exempt", exempt(Exempt).as_view()),
    path("one/hello", one_at_a_time(hello)),
    path("one/fail", one_at_a_time(fail)),
    path("one/stream", one_at_a_time(stream)),
    path("one/astream", one_at_a_time(astream)),
    path("hello", hello),
    path("ahello", ahello),
    path("items/<int:id>", hello),
    path("fail", fail),
    path("ask", ask),
    path("stream", stream),
    path("astream", astream),
    path("file", file),
    path("sign-in", sign_in),
    path("asign-in", asign_in),
    path("wait", wait),
]

# --------------------------------------------------------------------- clients

Ask = Any
"""Asks for a path, to the end of the answer, and gives the answer: the same for both stacks."""


def sync_client() -> Ask:
    client = Client(raise_request_exception=False)

    def ask(path: str, method: str = "get", **options: Any) -> Any:
        answer: Any = getattr(client, method)(path, **options)
        answer.whole = b"".join(answer)
        answer.close()
        return answer

    return ask


def async_client(loop: asyncio.AbstractEventLoop) -> Ask:
    client = AsyncClient(raise_request_exception=False)

    async def ask_and_read(path: str, method: str, **options: Any) -> Any:
        answer: Any = await getattr(client, method)(path, **options)
        if answer.streaming:
            answer.whole = b"".join([chunk async for chunk in answer])
        else:
            answer.whole = answer.content
        await asyncio.sleep(0)  # one turn of the loop, in which what is left to be done is begun
        left = [task for task in asyncio.all_tasks() if "AsyncGate.finish" in repr(task.get_coro())]
        await asyncio.gather(*left)
        return answer

    def ask(path: str, method: str = "get", **options: Any) -> Any:
        return loop.run_until_complete(ask_and_read(path, method, **options))

    ask.loop = loop  # type: ignore[attr-defined]
    return ask


@pytest.fixture(params=["sync", "async"])
def make_client(request: pytest.FixtureRequest) -> Iterator[Callable[[], Ask]]:
    """Makes clients of one stack, then of the other."""
    if request.param == "sync":
        yield sync_client
        return
    with closing(asyncio.new_event_loop()) as loop:
        yield lambda: async_client(loop)


def gated(policy: str, *, middleware: list[str] | None = None, **options: Any) -> Any:
    """Settings with this policy."""
    headgate = {"policy": read(policy), "clock": FakeClock(), **options}
    return override_settings(HEADGATE=headgate, MIDDLEWARE=middleware or [MIDDLEWARE])


PER_IP = "limits: [{name: per-ip, by: ip, bucket: 2/hour}]"

other_streams_too = pytest.mark.filterwarnings("ignore:StreamingHttpResponse must consume")
"""Django warns of streams in the other stack, which it reads to their end first: allowed, but not advised."""

# ------------------------------------------------------------------ admission


@pytest.mark.parametrize(
    ("policy", "paths", "expected"),
    [
        (PER_IP, ["/hello", "/ahello", "/hello"], [200, 200, 429]),
        (PER_IP, ["/items/1", "/items/2", "/items/3"], [200, 200, 429]),
        (PER_IP, ["/nowhere", "/items/x", "/hello"], [404, 404, 429]),
        (PER_IP, ["/fail", "/fail", "/fail"], [500, 500, 429]),
        (PER_IP, ["/file", "/stream", "/file"], [200, 200, 429]),
        (
            "limits: [{by: [ip, endpoint], bucket: 1/hour, endpoint: ['/items/{id}', /hello]}]",
            ["/items/1", "/items/2", "/hello", "/hello"],
            [200, 429, 200, 429],
        ),
        ("{routes: [{path: /hello, cost: 0}], limits: [{by: ip, bucket: 1/hour}]}", ["/hello"] * 3, [200] * 3),
        ("{limits: [{by: ip, bucket: 9/hour}], blocked: [{ip: 127.0.0.0/8}]}", ["/hello"], [403]),
    ],
    ids=["views", "one route", "404", "500", "files", "endpoints", "exempt", "blocked"],
)
@other_streams_too
def test_everything_that_django_answers_is_counted(
    policy: str, paths: list[str], expected: list[int], make_client: Callable[[], Ask]
) -> None:
    with gated(policy):
        ask = make_client()
        assert [ask(each).status_code for each in paths] == expected


def test_every_answer_says_what_is_left(make_client: Callable[[], Ask]) -> None:
    with gated(PER_IP):
        ask = make_client()
        answers = [ask("/hello"), ask("/fail"), ask("/hello"), ask("/hello", "head")]
    assert [answer.headers["X-RateLimit-Remaining"] for answer in answers] == ["1", "0", "0", "0"]
    assert [answer.headers.get("Retry-After") for answer in answers] == [None, None, "1800", "1800"]
    assert (answers[0].headers["X-App"], answers[0].whole) == ("yes", b"hello")
    assert json.loads(answers[2].whole)["violated-policies"] == ["per-ip"]
    assert answers[2].headers["Content-Type"] == "application/problem+json"
    assert answers[3].whole == b""
    assert int(answers[3].headers["Content-Length"]) == len(answers[2].whole)


def test_all_handlers_of_a_process_count_together(make_client: Callable[[], Ask]) -> None:
    with gated(PER_IP):
        assert [make_client()("/hello").status_code for _ in range(3)] == [200, 200, 429]
    with gated(PER_IP):
        assert make_client()("/hello").status_code == 200, "other settings, another gate"


@pytest.mark.parametrize(("mode", "status"), [("open", 200), ("closed", 503), ("local", 200)])
def test_store_that_is_down_costs_milliseconds_and_the_route_decides(
    mode: str, status: int, make_client: Callable[[], Ask]
) -> None:
    policy = f"limits: [{{by: ip, bucket: 99/hour, on_failure: {mode}}}]"
    with gated(policy, store="redis://127.0.0.1:1/0", clock=None):
        ask = make_client()
        begin = time.perf_counter()
        assert [ask("/hello").status_code for _ in range(3)] == [status] * 3
        assert time.perf_counter() - begin < 1


def test_async_stack_gets_an_async_gate_and_the_sync_stack_a_sync_one() -> None:
    async def aget_response(request: HttpRequest) -> HttpResponse:
        return HttpResponse()

    with gated(PER_IP):
        one, other = HeadgateMiddleware(lambda request: HttpResponse()), HeadgateMiddleware(aget_response)
    assert (type(one.gate), type(other.gate)) == (Gate, AsyncGate)
    assert (iscoroutinefunction(one), iscoroutinefunction(other)) == (False, True)


# ----------------------------------------------------------------- settlement


@pytest.fixture(params=["memory", "redis7"])
def store(request: pytest.FixtureRequest, make_client: Callable[[], Ask]) -> Iterator[dict[str, Any]]:
    """Options for a store in this process, then for one in Redis, which is closed in the loop that it was used in."""
    if request.param == "memory":
        yield {}
        return
    yield {
        "store": request.getfixturevalue("redis7").url,
        "clock": None,
        "budget": 5,
        "namespace": secrets.token_hex(4),
    }
    client = make_client()
    if hasattr(client, "loop"):
        client.loop.run_until_complete(_gates[AsyncGate][1].close())  # type: ignore[arg-type]
    else:
        _gates[Gate][1].close()


def test_only_failed_logins_count(make_client: Callable[[], Ask], store: dict[str, Any]) -> None:
    with gated("limits: [{endpoint: /hello, by: ip, bucket: 2/hour, count_when: status == 401}]", **store):
        ask = make_client()
        tries = [200, 401, 200, 200, 401, 200]
        answers = [ask("/hello", query_params={"status": status}).status_code for status in tries]
    assert answers == [200, 401, 200, 200, 401, 429]


def test_view_that_fails_is_settled_as_a_500(make_client: Callable[[], Ask]) -> None:
    for propagates in (False, True):
        with (
            gated("limits: [{by: ip, bucket: 2/hour, count_when: status == 200}]"),
            override_settings(DEBUG_PROPAGATE_EXCEPTIONS=propagates),
        ):
            ask = make_client()
            for _ in range(4):
                if propagates:
                    with pytest.raises(LookupError):
                        ask("/fail")
                else:
                    assert ask("/fail").status_code == 500


@pytest.mark.parametrize("path", ["/ask", "/stream", "/astream"])
@other_streams_too
def test_app_says_what_a_request_has_really_cost(path: str, make_client: Callable[[], Ask]) -> None:
    with gated("limits: [{by: ip, bucket: 1000/hour, reserve: 500}]"):
        ask = make_client()
        answers = [ask(path, query_params={"cost": cost}).status_code for cost in (100, 100, 700, 1)]
    assert answers == [200, 200, 200, 429]


LEASE = "limits: [{name: running, by: ip, limit: 1/minute, algorithm: concurrency}]"


def test_lease_is_held_until_the_stream_is_over() -> None:
    with gated(LEASE):
        client = Client()
        first: Any = client.get("/stream")
        chunks = iter(first)
        assert next(chunks) == b"first"
        assert client.get("/hello").status_code == 429
        assert list(chunks) == [b"last"]
        assert client.get("/hello").status_code == 200


async def in_the_async_stack() -> None:
    client = AsyncClient()
    first: Any = await client.get("/astream")
    chunks = aiter(first)
    assert await anext(chunks) == b"first"
    assert (await client.get("/hello")).status_code == 429
    assert [chunk async for chunk in chunks] == [b"last"]
    await asyncio.sleep(0)
    assert (await client.get("/hello")).status_code == 200


def test_lease_is_held_until_the_stream_is_over_in_the_async_stack() -> None:
    with gated(LEASE):
        asyncio.run(in_the_async_stack())


# ------------------------------------------------------------------- identity


@pytest.fixture(scope="module")
def users(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A database with two users; in a file, since the async stack asks from other threads."""
    from django.contrib.auth.models import User

    connection.close()
    connection.settings_dict["NAME"] = str(tmp_path_factory.mktemp("django") / "users.sqlite3")
    call_command("migrate", verbosity=0)
    for name in ("ada", "grace"):
        User.objects.create(username=name)
    yield
    connection.close()


BY_USER = "limits: [{name: per-user, by: user, bucket: 2/hour, endpoint: /hello}]"


@pytest.mark.usefixtures("users")
@pytest.mark.parametrize("sign_in", ["/sign-in", "/asign-in"])
def test_authenticated_client_is_counted_as_its_user(sign_in: str, make_client: Callable[[], Ask]) -> None:
    with gated(BY_USER, middleware=SIGNED_IN):
        for name in ("ada", "grace"):
            ask = make_client()
            assert ask(sign_in, query_params={"name": name}).status_code == 200
            assert [ask("/hello").status_code for _ in range(3)] == [200, 200, 429]
        nobody = make_client()
        assert [nobody("/hello").status_code for _ in range(3)] == [200, 200, 429], "counted by address"


@pytest.mark.usefixtures("users")
@pytest.mark.parametrize(
    ("policy", "middleware"),
    [(BY_USER, SIGNED_IN), (PER_IP, SIGNED_IN), (BY_USER, [MIDDLEWARE])],
    ids=["user", "ip", "bare"],
)
def test_session_is_read_only_when_users_are_counted(
    policy: str, middleware: list[str], make_client: Callable[[], Ask], monkeypatch: pytest.MonkeyPatch
) -> None:
    queries: list[str] = []
    execute = CursorWrapper.execute

    def recording(self: Any, sql: str, params: Any = None) -> Any:
        queries.append(sql)
        return execute(self, sql, params)

    monkeypatch.setattr(CursorWrapper, "execute", recording)
    with gated(policy, middleware=middleware):
        ask = make_client()
        assert ask("/hello").status_code == 200
        assert queries == []
        if middleware is SIGNED_IN:
            ask("/sign-in", query_params={"name": "ada"})
            queries.clear()
            ask("/hello")
            assert bool(queries) is (policy is BY_USER)


def with_user(make: Callable[[], Any]) -> Any:
    """A middleware that sets the user in a way of its own."""

    def middleware(get_response: Any) -> Any:
        def respond(request: Any) -> Any:
            request.user = make()
            return get_response(request)

        return respond

    return middleware


plain = with_user(lambda: SimpleNamespace(is_authenticated=True, pk=7))
lazy = with_user(lambda: SimpleLazyObject(lambda: SimpleNamespace(is_authenticated=True, pk=7)))
anonymous = with_user(lambda: SimpleNamespace(is_authenticated=False, pk=None))


def tell_who(request: DjangoRequest) -> str | None:
    return next(iter(request.header("x-tenant")), None)


@pytest.mark.parametrize(
    ("middleware", "headers", "who"),
    [
        ("plain", {}, {"user": "7"}),
        ("lazy", {}, {"user": "7"}),
        ("anonymous", {}, {}),
        ("anonymous", {"x-tenant": "acme"}, {"tenant": "acme"}),
        ("anonymous", {"x-api-key": "one,two"}, {}),
    ],
)
def test_client_of_a_request(
    middleware: str, headers: dict[str, str], who: dict[str, str], make_client: Callable[[], Ask]
) -> None:
    told: list[Any] = []
    with gated(
        "limits: [{by: [user, tenant, api_key], bucket: 9/hour}]",
        middleware=[f"{__name__}.{middleware}", MIDDLEWARE],
        identities={"tenant": f"{__name__}.tell_who"},
        on_decision=lambda request, admission: told.append((request.path, request.peer, admission.resolution.who)),
    ):
        make_client()("/hello", headers=headers)
    [(path, peer, found)] = told
    assert (path, peer) == ("/hello", "127.0.0.1")
    assert {kind: value for kind, value in found.items() if value and kind not in ("ip", "address")} == who


@pytest.mark.parametrize(
    ("make_client", "path"), [("sync", "/hello"), ("async", "/shop/hello")], indirect=["make_client"]
)
@pytest.mark.parametrize("limited", ["/shop/hello", "/hello"])
@override_settings(FORCE_SCRIPT_NAME="/shop")
def test_mounted_project_is_counted_by_either_name_of_a_path(
    path: str, limited: str, make_client: Callable[[], Ask]
) -> None:
    """WSGI hands a mounted app its path without the mount's, ASGI with it."""
    with gated(f"limits: [{{endpoint: {limited}, by: ip, bucket: 1/hour}}]"):
        ask = make_client()
        assert [ask(path).status_code for _ in range(2)] == [200, 429]


# -------------------------------------------------------------------- settings


def say_no(facts: RejectionInfo) -> tuple[str, None]:
    return f"no: {facts.status}", None


def test_functions_may_be_given_by_name(make_client: Callable[[], Ask]) -> None:
    with gated("limits: [{by: ip, bucket: 1/hour}]", refusal_body=f"{__name__}.say_no"):
        ask = make_client()
        assert [ask("/hello").whole for _ in range(2)] == [b"hello", b"no: 429"]


@pytest.mark.parametrize(
    ("said", "message"),
    [
        (None, "HEADGATE is None; give a dict: HEADGATE = {'policy': BASE_DIR / 'limits.yaml'}"),
        ({}, "HEADGATE: 'policy' is not set; give the path of a policy file"),
        ({"policy": "x", "stroe": "y"}, "HEADGATE: 'stroe' is not a setting; did you mean 'store'?"),
        ({"policy": "nowhere.yaml"}, "HEADGATE: nowhere.yaml: cannot be read: No such file or directory"),
        ({"policy": read(PER_IP), "store": "mysql://"}, "HEADGATE: cannot open the store 'mysql://'"),
        ({"policy": read(PER_IP), "identities": {"user": "no.such"}}, "HEADGATE: No module named 'no'"),
        ({"policy": read(PER_IP), "identities": "user"}, "HEADGATE: 'str' object has no attribute 'items'"),
    ],
)
def test_invalid_settings_are_reported_when_django_starts(said: Any, message: str) -> None:
    with override_settings(HEADGATE=said), pytest.raises(ImproperlyConfigured) as told:
        WSGIHandler()
    assert str(told.value).startswith(message)


def test_invalid_policy_lists_all_problems(tmp_path: Path) -> None:
    file = tmp_path / "limits.yaml"
    file.write_text("limits: [{bukcet: 1/hour}, {by: ip}]")
    with override_settings(HEADGATE={"policy": file}), pytest.raises(ImproperlyConfigured) as told:
        ASGIHandler()
    assert str(told.value).count(f"{file}:1:") >= 2


def told_by_check() -> list[tuple[str, str, str | None]]:
    """What `manage.py check` finds in what is ours."""
    found = checks.run_checks(tags=["headgate"])
    return [(f"{each.id}", each.msg, each.hint) for each in found]


def test_good_setting_passes_djangos_checks_and_no_store_is_asked(capsys: pytest.CaptureFixture[str]) -> None:
    with closing(socket.create_server(("127.0.0.1", 0))) as redis:
        redis.setblocking(False)
        store = f"redis://127.0.0.1:{redis.getsockname()[1]}/0"
        with gated(PER_IP, store=store):
            assert told_by_check() == []
            call_command("check")
        with pytest.raises(BlockingIOError):
            redis.accept()
    assert "no issues" in capsys.readouterr().out


def test_project_without_headgate_hears_nothing_of_it() -> None:
    with override_settings(MIDDLEWARE=SIGNED_IN[:2]):
        assert told_by_check() == []


def test_middleware_without_its_setting_is_an_error_of_djangos_checks() -> None:
    ((id, told, _),) = told_by_check()
    assert (id, told) == (
        "headgate.E001",
        "HEADGATE is None; give a dict: HEADGATE = {'policy': BASE_DIR / 'limits.yaml'}",
    )


def test_what_keeps_the_gate_from_opening_is_an_error_of_djangos_checks(tmp_path: Path) -> None:
    file = tmp_path / "limits.yaml"
    file.write_text("limits: [{by: ip, bukcet: 1/hour}]")
    with override_settings(HEADGATE={"policy": file}):
        message = f"HEADGATE: {file}:1:19: unknown field 'bukcet'; did you mean 'bucket'?"
        assert told_by_check() == [("headgate.E001", message, "`headgate check FILE` checks a policy file.")]
        with pytest.raises(SystemCheckError, match="did you mean 'bucket'"):
            call_command("check")


@pytest.mark.parametrize(
    ("said", "message"),
    [
        (None, "HEADGATE is None; give a dict"),
        ({"policy": read(PER_IP), "stroe": "y"}, "HEADGATE: 'stroe' is not a setting; did you mean 'store'?"),
        ({"policy": read(PER_IP), "store": "mysql://"}, "HEADGATE: cannot open the store 'mysql://'"),
        ({"policy": read(PER_IP), "identities": {"user": "no.such"}}, "HEADGATE: No module named 'no'"),
        (
            {
                "policy": read("limits: [{by: api_key, bucket: 1/hour}, {by: ip, bucket: 1/hour}]"),
                "store": "redis://127.0.0.1:1/0",
            },
            "HEADGATE: the policy counts by API keys, which are stored as keyed hashes, and there is no secret",
        ),
    ],
    ids=["none", "setting", "store", "function", "secret"],
)
def test_bad_settings_are_errors_of_djangos_checks(said: Any, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HEADGATE_SECRET", raising=False)
    with override_settings(HEADGATE=said):
        ((id, told, hint),) = told_by_check()
    assert id == "headgate.E001"
    assert told.startswith(message)
    assert hint is None


def test_djangos_checks_warn_of_what_is_probably_not_meant() -> None:
    with gated("limits: [{by: api_key, bucket: 1/hour}]"):
        ((id, told, _),) = told_by_check()
    assert id == "headgate.W002"
    assert "requests with unknown API keys also count by address" in told
    with gated(PER_IP, middleware=SIGNED_IN[:2]):
        ((id, told, hint),) = told_by_check()
    assert (id, told) == ("headgate.W001", "HEADGATE is set, but its middleware is not used.")
    assert MIDDLEWARE in (hint or "")


class OurOwnGate(HeadgateMiddleware):
    """As a project may have one."""


def test_djangos_checks_know_a_middleware_that_is_made_of_ours() -> None:
    with gated(PER_IP, middleware=["no.such.Middleware", f"{__name__}.OurOwnGate"]):
        assert told_by_check() == []


@pytest.mark.usefixtures("users")
def test_documented_settings_work(tmp_path: Path, make_client: Callable[[], Ask]) -> None:
    documented, policy, *_ = re.findall(r"^```\w+\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    (tmp_path / "limits.yaml").write_text(policy)
    said: dict[str, Any] = {}
    exec(documented, {"BASE_DIR": tmp_path}, said)
    said["HEADGATE"] |= {"clock": FakeClock(), "reload_every": None}
    with override_settings(**said):
        ask = make_client()
        assert [ask("/hello").status_code for _ in range(3)] == [200] * 3
        assert ask("/sign-in", query_params={"name": "ada"}).status_code == 200
        assert [ask("/hello").status_code for _ in range(3)] == [200, 200, 429]


def test_every_setting_is_documented() -> None:
    assert re.findall(r"^\| `(\w+)` \|", PAGE, re.MULTILINE) == list(OPTIONS)


# ---------------------------------------------------------------- real handlers


class Quiet(WSGIRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.mark.parametrize("policy", [PER_IP, LEASE], ids=["nothing to settle", "a lease"])
def test_real_server_gets_the_first_chunk_before_the_last_is_made(policy: str) -> None:
    with gated(policy):
        handler = WSGIHandler()
    with make_server("127.0.0.1", 0, handler, handler_class=Quiet) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            for _ in range(2):
                arrived.clear()
                connection = HTTPConnection("127.0.0.1", server.server_port, timeout=10)
                connection.request("GET", "/stream")
                answer = connection.getresponse()
                assert (answer.status, answer.read(5)) == (200, b"first")
                arrived.set()
                assert answer.read() == b"last"
                connection.close()
        finally:
            arrived.set()
            server.shutdown()
            thread.join()


class Exchange:
    """One request to an ASGI app, as a server would carry it; what the app has sent so far is in `sent`."""

    def __init__(self, handler: Any, path: str, method: str = "GET") -> None:
        self.sent: list[Any] = []
        self.has_left = asyncio.Event()
        self._asked = False
        scope = {
            "type": "http",
            "method": method,
            "path": path,
            "query_string": b"",
            "headers": [],
            "client": ["::1", 1],
        }
        self.task = asyncio.create_task(handler(scope, self.receive, self.send))

    async def receive(self) -> Any:
        if self._asked:
            await self.has_left.wait()
            return {"type": "http.disconnect"}
        self._asked = True
        return {"type": "http.request", "body": b""}

    async def send(self, message: Any) -> None:
        self.sent.append(message)
        events.extend([message["body"]] if message.get("body") else [])

    async def status(self) -> int:
        await self.task
        status: int = self.sent[0]["status"]
        return status


async def leaving_clients_hold_nothing() -> list[int]:
    handler = ASGIHandler()
    left = Exchange(handler, "/wait")
    await is_inside.wait()
    refused = await Exchange(handler, "/hello").status()
    left.has_left.set()
    await left.task
    assert left.sent == []
    return [refused, *[await Exchange(handler, "/ahello").status() for _ in range(2)]]


def test_disconnected_client_holds_no_lease() -> None:
    with gated(LEASE):
        assert asyncio.run(leaving_clients_hold_nothing()) == [429, 200, 200]


async def stream_of_the_handler() -> dict[bytes, bytes]:
    answer = Exchange(ASGIHandler(), "/astream")
    assert await answer.status() == 200
    return dict(answer.sent[0]["headers"])


def test_asgi_handler_sends_the_first_chunk_before_the_last_is_made() -> None:
    events.clear()
    with gated(PER_IP):
        headers = asyncio.run(stream_of_the_handler())
    assert events == [b"first", b"the last is made", b"last"]
    assert headers[b"x-ratelimit-remaining"] == b"1"


async def refusals_of_the_handler() -> list[tuple[int, bool]]:
    handler, told = ASGIHandler(), []
    for method in ("GET", "GET", "GET", "HEAD"):
        answer = Exchange(handler, "/hello", method)
        told.append((await answer.status(), any(message.get("body") for message in answer.sent)))
    return told


def test_refusal_has_no_body_for_head() -> None:
    with gated(PER_IP):
        assert asyncio.run(refusals_of_the_handler()) == [(200, True), (200, True), (429, True), (429, False)]


# ------------------------------------------------------------------ limits on views

NO_LIMITS = "answers: {headers: [x-ratelimit, ratelimit]}"
"""A policy without limits: those of the views are all there are."""


@pytest.mark.parametrize("path", ["/alimited", "/class/items", "/class/aitems", "/class/orders", "/class/plain"])
def test_views_of_every_kind_are_limited(path: str, make_client: Callable[[], Ask]) -> None:
    with gated(NO_LIMITS):
        ask = make_client()
        first, refused = ask(path), ask(path)
    assert (first.status_code, first.headers["X-RateLimit-Remaining"]) == (200, "0")
    assert (refused.status_code, refused.headers["Retry-After"]) == (429, "60")
    assert json.loads(refused.whole)["error"] == "rate_limit_exceeded"


def test_each_class_based_view_has_its_own_count(make_client: Callable[[], Ask]) -> None:
    """Also where the decorated method is inherited, so that its name is the same."""
    with gated(NO_LIMITS):
        ask = make_client()
        paths = ["/class/orders", "/class/items", "/class/plain"]
        assert [ask(path).status_code for path in paths] == [200] * 3
        assert [ask("/class/parcels").status_code for _ in range(2)] == [200, 429]
        assert [ask("/class/items", "post").status_code for _ in range(2)] == [429, 429]
    with gated(NO_LIMITS):
        ask = make_client()
        assert [ask("/class/items", "post").status_code for _ in range(2)] == [200, 429]


def test_refusal_by_a_view_gives_back_what_the_policy_has_charged(make_client: Callable[[], Ask]) -> None:
    with gated("limits: [{name: all, by: ip, bucket: 3/minute}]"):
        ask = make_client()
        answers = [ask("/limited", headers={"x-device": "a"}) for _ in range(4)]
        assert [answer.status_code for answer in answers] == [200, 429, 429, 429]
        assert answers[0].headers["RateLimit-Policy"] == (
            '"all";q=3;w=60, "1/minute by global";q=1;w=60, "5/hour by from_device";q=5;w=3600, '
            '"9/day by from_device";q=9;w=86400'
        )
        assert '"5/hour by from_device";r=4;' in answers[3].headers["RateLimit"], "all or none of the view's own"
        assert ask("/hello").headers["X-RateLimit-Remaining"] == "1"


def test_view_may_count_some_methods_and_answers_only(make_client: Callable[[], Ask]) -> None:
    with gated(NO_LIMITS):
        ask = make_client()
        tries = [200, 401, 404, 200, 401, 200]
        answers = [ask("/login", "post", query_params={"status": status}).status_code for status in tries]
        assert answers == [200, 401, 404, 200, 401, 429]
        assert ask("/login", query_params={"status": 401}).status_code == 401


@other_streams_too
def test_lease_of_a_view_ends_with_its_answer(make_client: Callable[[], Ask]) -> None:
    with gated(NO_LIMITS):
        ask = make_client()
        paths = ["/one/hello", "/one/fail", "/one/stream", "/one/astream", "/one/hello"]
        assert [ask(path).status_code for path in paths] == [200, 500, 200, 200, 200]


def test_exempt_views_are_left_out_of_the_policy(make_client: Callable[[], Ask]) -> None:
    with gated("limits: [{name: all, by: ip, bucket: 1/minute}]"):
        ask = make_client()
        assert [ask(path).status_code for path in ["/health", "/exempt"] * 3] == [200] * 6
        assert [ask(path).status_code for path in ("/class/plain", "/hello", "/nowhere")] == [200, 429, 429]


def test_view_without_the_middleware_says_so() -> None:
    with (
        override_settings(MIDDLEWARE=[]),
        pytest.raises(ImproperlyConfigured, match="HeadgateMiddleware' to MIDDLEWARE"),
    ):
        Client().get("/limited")
