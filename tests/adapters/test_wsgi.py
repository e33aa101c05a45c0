"""The WSGI middleware: who is counted, what is told, what is settled, and that the app's answer stays the app's own."""

from __future__ import annotations

import gc
import io
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from http.client import HTTPConnection
from typing import TYPE_CHECKING, Any
from wsgiref.simple_server import WSGIRequestHandler, make_server
from wsgiref.validate import validator

import pytest
from werkzeug.middleware.dispatcher import DispatcherMiddleware
from werkzeug.test import Client, create_environ

from headgate.adapters.wsgi import HeadgateMiddleware, WsgiRequest
from headgate.gate.admission import UNLIMITED, current_admission
from headgate.gate.gate import Gate
from headgate.policy.loader import read
from headgate.testing import FakeClock

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

Environ = dict[str, Any]

DOWN = "redis://127.0.0.1:1/0"
"""Where nobody listens."""


def app(environ: Environ, start_response: Any) -> Iterable[bytes]:
    """Answers with the status that the query asks for."""
    start_response(f"{environ['QUERY_STRING'] or '200'} Whatever", [("Content-Type", "text/plain"), ("X-App", "yes")])
    return [b"hello"]


def gated(policy: str, inner: Any = app, **options: Any) -> HeadgateMiddleware:
    return HeadgateMiddleware(inner, read(policy), **{"clock": FakeClock(), **options})


class Asking(Client):
    """A client that reads answers to their end, and closes them as servers do."""

    def open(self, *args: Any, **kwargs: Any) -> Any:
        return super().open(*args, buffered=True, **kwargs)


def client(policy: str, inner: Any = app, **options: Any) -> Client:
    """A client of an app that is gated, with the letter of WSGI being watched on both sides of the middleware."""
    return Asking(validator(gated(policy, validator(inner), **options)))


def statuses(asked: Client, *paths: str, **options: Any) -> list[int]:
    return [asked.open(path, **options).status_code for path in paths]


PER_IP = "limits: [{name: per-ip, by: ip, bucket: 2/minute}]"

# ------------------------------------------------------------------ admission


def test_as_many_as_the_limit_says_get_in_whatever_the_threads_do() -> None:
    served: list[str] = []

    def counting(environ: Environ, start_response: Any) -> Iterable[bytes]:
        served.append(environ["PATH_INFO"])
        return app(environ, start_response)

    asked = client("limits: [{by: ip, bucket: 25/minute}]", counting)
    with ThreadPoolExecutor(8) as threads:
        answers = list(threads.map(lambda number: asked.get(f"/{number}").status_code, range(60)))
    assert (answers.count(200), answers.count(429), len(served)) == (25, 35, 25)


@pytest.mark.parametrize("method", ["GET", "HEAD", "POST", "OPTIONS", "BREW"])
@pytest.mark.parametrize("status", [200, 204, 301, 404, 500])
def test_every_request_is_counted_whatever_the_app_answers(method: str, status: int) -> None:
    options = {"method": method, "query_string": str(status)}
    bare = Asking(gated(PER_IP))  # made-up methods and bodies of a 204 are none of the validator's taste
    assert statuses(bare, "/a", "/b", "/c", **options) == [status, status, 429]


def test_allowed_answer_is_the_apps_own_and_says_what_is_left() -> None:
    answer = client(PER_IP).get("/")
    assert (answer.data, answer.headers["x-app"]) == (b"hello", "yes")
    assert {name: value for name, value in answer.headers if "ratelimit" in name} == {
        "x-ratelimit-limit": "2",
        "x-ratelimit-remaining": "1",
        "x-ratelimit-reset": "30",
        "ratelimit-policy": '"per-ip";q=2;w=60',
        "ratelimit": '"per-ip";r=1;t=30',
    }


@pytest.mark.parametrize("method", ["GET", "HEAD"])
def test_refusal_is_a_whole_answer_and_has_no_body_for_head(method: str) -> None:
    asked = client(PER_IP)
    *_, answer = [asked.open("/", method=method) for _ in range(3)]
    assert answer.status == "429 Too Many Requests"
    assert (answer.headers["retry-after"], answer.headers["cache-control"]) == ("30", "no-store")
    assert answer.headers["x-ratelimit-remaining"] == "0"
    assert "x-app" not in answer.headers
    assert int(answer.headers["content-length"]) > 0
    assert len(answer.data) == (0 if method == "HEAD" else int(answer.headers["content-length"]))


def test_exempt_route_gets_the_apps_very_answer() -> None:
    asked = client("{routes: [{path: /health, cost: 0}], limits: [{by: ip, bucket: 1/hour}]}")
    assert statuses(asked, "/health", "/health", "/x", "/health", "/y") == [200, 200, 200, 200, 429]
    assert not [name for name, _ in asked.get("/health").headers if "ratelimit" in name]


def test_blocked_client_is_rejected() -> None:
    asked = client("{limits: [{by: ip, bucket: 9/hour}], blocked: [{ip: 203.0.113.0/24, reason: scraping}]}")
    for address, status in (("203.0.113.9", 403), ("198.51.100.1", 200)):
        answer = asked.get("/", environ_base={"REMOTE_ADDR": address})
        assert answer.status_code == status
        assert b"scraping" not in answer.data


@pytest.mark.parametrize(
    ("mode", "expected"), [("open", [200] * 6), ("closed", [503] * 6), ("local", [200] + [429] * 5)]
)
def test_store_that_is_down_costs_milliseconds_and_the_route_decides(mode: str, expected: list[int]) -> None:
    middleware = gated(f"{{on_failure: {mode}, limits: [{{by: ip, bucket: 5/hour}}]}}", store=DOWN, clock=None)
    asked = Asking(middleware)
    begin = time.perf_counter()
    assert statuses(asked, *["/"] * 6) == expected
    assert time.perf_counter() - begin < 0.5
    middleware.gate.close()


def test_middleware_needs_a_policy_or_a_gate() -> None:
    with pytest.raises(TypeError, match="give a policy"):
        HeadgateMiddleware(app)
    gate = Gate(read(PER_IP))
    assert HeadgateMiddleware(app, gate=gate).gate is gate


# ------------------------------------------------------------------- identity


@pytest.mark.parametrize(
    ("script", "info", "path"),
    [
        ("", "/users/7", "/users/7"),
        ("/shop", "/cart", "/shop/cart"),
        ("/shop", "", "/shop"),
        ("", "", "/"),
        ("", "/caf\xc3\xa9", "/café"),
        ("/\xe2\x82\xac", "/x", "/€/x"),
        ("", "/\xff", "/\ufffd"),
        ("", "/a%2fb", "/a%2fb"),
    ],
)
def test_path_is_read_as_frameworks_route_by_it(script: str, info: str, path: str) -> None:
    assert WsgiRequest({"REQUEST_METHOD": "GET", "SCRIPT_NAME": script, "PATH_INFO": info}).path == path


def test_servers_may_leave_out_what_is_empty() -> None:
    request = WsgiRequest({"REQUEST_METHOD": "GET"})
    assert (request.path, request.peer, request.header("x-api-key")) == ("/", None, [])


def test_headers_are_found_by_their_names() -> None:
    names = {"HTTP_X_API_KEY": "k", "HTTP_USER_AGENT": "a (b, like c)", "CONTENT_TYPE": "text/html", "HTTP_EMPTY": ""}
    request = WsgiRequest({"REQUEST_METHOD": "GET", **names})
    assert [request.header(name) for name in ("x-api-key", "user-agent", "content-type", "empty", "cookie")] == [
        ["k"],
        ["a (b, like c)"],
        ["text/html"],
        [""],
        [],
    ]


POLICY_OF_ALL = """
identity: {proxies: [10.0.0.0/8]}
limits: [{by: [user, api_key, tenant], bucket: 9/hour}, {by: ip, bucket: 9/hour}]
"""


@pytest.mark.parametrize(
    ("environ", "kind", "expected"),
    [
        ({"REMOTE_ADDR": "203.0.113.9"}, "ip", "203.0.113.9"),
        ({"REMOTE_ADDR": "203.0.113.9", "HTTP_X_FORWARDED_FOR": "6.6.6.6"}, "ip", "203.0.113.9"),
        ({"REMOTE_ADDR": "10.0.0.5", "HTTP_X_FORWARDED_FOR": "6.6.6.6, 203.0.113.9,10.0.0.7"}, "ip", "203.0.113.9"),
        ({"REMOTE_ADDR": ""}, "ip", "unknown"),
        ({}, "ip", "unknown"),
        ({"REMOTE_USER": "ada"}, "user", "ada"),
        ({"REMOTE_USER": ""}, "user", None),
        ({"HTTP_REMOTE_USER": "ada"}, "user", None),
        ({"HTTP_X_TENANT": "acme"}, "tenant", "acme"),
        ({"HTTP_X_API_KEY": "one,two"}, "api_key", None),
        ({"HTTP_AUTHORIZATION": "Bearer one,Bearer two"}, "api_key", None),
    ],
)
def test_client_of_a_request(environ: Environ, kind: str, expected: str | None) -> None:
    told: list[Any] = []
    middleware = gated(
        POLICY_OF_ALL,
        identities={"tenant": lambda request: next(iter(request.header("x-tenant")), None)},
        on_decision=lambda request, admission: told.append(admission.resolution.who.get(kind)),
    )
    list(middleware({"REQUEST_METHOD": "GET", "QUERY_STRING": "", **environ}, lambda *_: None))
    assert told == [expected]


def test_api_key_counts_the_same_in_both_of_its_headers() -> None:
    asked = client("limits: [{by: api_key, bucket: 2/hour}]")
    one, other = {"X-API-Key": "sk_1"}, {"Authorization": "Bearer sk_1"}
    assert [asked.get("/", headers=headers).status_code for headers in (one, other, one, other)] == [200, 200, 429, 429]
    assert asked.get("/", headers={"X-API-Key": "sk_2"}).status_code == 200


@pytest.mark.parametrize("outermost", [True, False], ids=["around the mounts", "inside a mount"])
def test_mounted_app_is_counted_by_its_whole_path(outermost: bool) -> None:
    policy = "limits: [{endpoint: '/shop/items/{id}', by: ip, bucket: 1/hour}]"
    if outermost:
        asked = Asking(gated(policy, DispatcherMiddleware(app, {"/shop": app})))
    else:
        asked = Asking(DispatcherMiddleware(app, {"/shop": gated(policy)}))
    assert statuses(asked, "/shop/items/1", "/shop/items/2", "/items/1", "/items/1") == [200, 429, 200, 200]


# ------------------------------------------------------------------- settling

STREAMS = {
    "nothing to settle": "limits: [{by: ip, bucket: 9/hour}]",
    "a cost to settle": "limits: [{by: ip, bucket: 9/hour, count_when: status == 200}]",
    "a lease": "limits: [{name: running, by: ip, limit: 1/minute, algorithm: concurrency}]",
}


class Body:
    """A body that counts how often it is closed."""

    def __init__(self, *chunks: bytes) -> None:
        self.chunks = iter(chunks)
        self.closed = 0

    def __iter__(self) -> Body:
        return self

    def __next__(self) -> bytes:
        return next(self.chunks)

    def close(self) -> None:
        self.closed += 1


LOGIN = "limits: [{name: failures, endpoint: /login, by: ip, bucket: 2/hour, count_when: 'status in [401, 5xx]'}]"


def test_only_failed_logins_count() -> None:
    asked = client(LOGIN)
    answers = [asked.post("/login", query_string=str(status)).status_code for status in (200, 401, 200, 200, 401, 200)]
    assert answers == [200, 401, 200, 200, 401, 429]


def raising(environ: Environ, start_response: Any) -> Iterable[bytes]:
    raise LookupError


def raising_after_start(environ: Environ, start_response: Any) -> Iterable[bytes]:
    start_response("200 OK", [])
    raise LookupError


def raising_while_it_streams(environ: Environ, start_response: Any) -> Iterable[bytes]:
    start_response("200 OK", [])
    yield b"so far"
    raise LookupError


def raising_before_it_streams(environ: Environ, start_response: Any) -> Iterable[bytes]:
    if environ:
        raise LookupError
    yield b""


def starting_again(environ: Environ, start_response: Any) -> Iterable[bytes]:
    start_response("200 OK", [])
    try:
        raise LookupError
    except LookupError:
        start_response("503 Sorry", [], sys.exc_info())
    return [b"sorry"]


def starting_late(environ: Environ, start_response: Any) -> Iterable[bytes]:
    start_response("401 No", [])
    yield b"no"


def never_starting(environ: Environ, start_response: Any) -> Iterable[bytes]:
    return [b"what am I?"]


@pytest.mark.parametrize(
    "inner",
    [
        raising,
        raising_after_start,
        raising_while_it_streams,
        raising_before_it_streams,
        starting_again,
        starting_late,
        never_starting,
    ],
)
def test_app_that_fails_is_settled_as_what_it_answered_or_as_a_500(inner: Any) -> None:
    """All of these count as failures: the limit of two is reached by two of them."""
    asked, refusals = gated(LOGIN, inner), 0
    for _ in range(3):
        answer: Any = None
        with suppress(LookupError):
            answer = asked(create_environ("/login"), lambda status, headers, exc_info=None: None)
            refusals += b"failures" in b"".join(answer)
        with suppress(LookupError):
            getattr(answer, "close", lambda: None)()
    assert refusals == 1


def test_restarted_response_passes_exc_info() -> None:
    told: list[Any] = []
    for policy in STREAMS.values():
        list(gated(policy, starting_again)(create_environ("/"), lambda *args: told.append(args)))
    assert [(args[0], len(args)) for args in told] == [("200 OK", 2), ("503 Sorry", 3)] * len(STREAMS)
    assert all(args[2][0] is LookupError for args in told[1::2])


def test_success_is_refunded_once_also_if_it_is_closed_twice_or_badly() -> None:
    asked = gated(LOGIN, lambda environ, start_response: start_response("200 OK", []) or Failing())

    class Failing(Body):
        def close(self) -> None:
            raise LookupError

    failed = Asking(HeadgateMiddleware(app, gate=asked.gate))
    assert statuses(failed, "/login", query_string="401") == [401]
    answer: Any = asked(create_environ("/login"), lambda *_: None)
    with pytest.raises(LookupError):
        answer.close()
    answer.close()
    assert statuses(failed, *["/login"] * 2, query_string="401") == [401, 429]


TOKENS = "limits: [{name: tokens, endpoint: /ask, by: ip, bucket: 1000/hour, reserve: 500, unit: tokens}]"


@pytest.mark.parametrize(
    ("costs", "expected"),
    [
        ([None, None, None], [200, 200, 429]),  # without a word from the app, the estimate is the cost
        ([0, 0, 0, 0], [200] * 4),
        ([100] * 6, [200] * 6),
        ([800, 10], [200, 429]),
        ([5000, 0], [200, 429]),  # more than there was takes what there was
    ],
)
def test_app_says_what_a_request_has_really_cost(costs: list[int | None], expected: list[int]) -> None:
    waiting = list(costs)

    def telling(environ: Environ, start_response: Any) -> Iterable[bytes]:
        start_response("200 OK", [("Content-Type", "text/plain")])
        cost = waiting.pop(0)
        yield b"thinking"
        if cost is not None:
            current_admission().commit(cost)
        yield b"done"

    asked = client(TOKENS, telling)
    assert statuses(asked, *["/ask"] * len(costs)) == expected


def test_exempt_request_does_not_see_the_admission_of_the_one_before() -> None:
    seen: list[bool] = []

    def looking(environ: Environ, start_response: Any) -> Iterable[bytes]:
        seen.append(current_admission() is UNLIMITED)
        return app(environ, start_response)

    asked = client("{routes: [{path: /health, cost: 0}], limits: [{by: ip, bucket: 9/hour}]}", looking)
    statuses(asked, "/x", "/health")
    assert seen == [False, True]


# -------------------------------------------------------------------- streams


@pytest.mark.parametrize("policy", STREAMS.values(), ids=STREAMS)
@pytest.mark.parametrize("read_whole", [True, False], ids=["read to its end", "left half way"])
def test_body_is_closed_exactly_once(policy: str, read_whole: bool) -> None:
    body = Body(b"a", b"b", b"c")

    def streaming(environ: Environ, start_response: Any) -> Iterable[bytes]:
        start_response("200 OK", [])
        return body

    answer: Any = gated(policy, streaming)(create_environ("/"), lambda *_: None)
    chunks = iter(answer)
    assert next(chunks) == b"a"
    if read_whole:
        assert list(chunks) == [b"b", b"c"]
    answer.close()
    del chunks
    gc.collect()
    assert body.closed == 1


def test_answer_with_nothing_to_settle_is_the_apps_own_object() -> None:
    """So servers may still send files by themselves, or know the length of a list."""
    body = Body()
    assert gated(STREAMS["nothing to settle"], lambda environ, start_response: body)(create_environ("/"), print) is body


def test_lease_is_held_until_the_answer_is_closed() -> None:
    asked = gated(STREAMS["a lease"])

    def ask() -> tuple[str, Any]:
        told: list[str] = []
        answer = asked(create_environ("/"), lambda status, headers, exc_info=None: told.append(status))
        return told[0][:3], answer

    status, first = ask()
    assert (status, ask()[0]) == ("200", "429")
    assert list(first) == [b"hello"]
    assert ask()[0] == "429"
    first.close()
    status, second = ask()
    first.close()
    assert (status, ask()[0]) == ("200", "429"), "what is closed twice frees no place of another"
    second.close()


@pytest.mark.parametrize("policy", STREAMS.values(), ids=STREAMS)
def test_what_the_app_writes_goes_out_at_once(policy: str) -> None:
    out = io.BytesIO()

    def writing(environ: Environ, start_response: Any) -> Iterable[bytes]:
        write = start_response("200 OK", [])
        write(b"first")
        assert out.getvalue() == b"first"
        return [b"second"]

    for chunk in gated(policy, writing)(create_environ("/"), lambda *_: out.write):
        out.write(chunk)
    assert out.getvalue() == b"firstsecond"


class Quiet(WSGIRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        pass


@contextmanager
def serving(application: Any) -> Iterator[Callable[[], HTTPConnection]]:
    """A real server for as long as the block runs; gives what opens a connection to it."""
    with make_server("127.0.0.1", 0, application, handler_class=Quiet) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield lambda: HTTPConnection("127.0.0.1", server.server_port, timeout=10)
        finally:
            server.shutdown()
            thread.join()


@pytest.mark.parametrize("policy", STREAMS.values(), ids=STREAMS)
def test_first_chunk_arrives_before_the_last_is_made(policy: str) -> None:
    arrived = threading.Event()

    def streaming(environ: Environ, start_response: Any) -> Iterable[bytes]:
        start_response("200 OK", [("Content-Type", "text/plain")])
        yield b"first"
        assert arrived.wait(10), "the first chunk was kept back"
        yield b"last"

    with serving(gated(policy, streaming)) as connect:
        for _ in range(2):
            arrived.clear()
            connection = connect()
            connection.request("GET", "/")
            answer = connection.getresponse()
            assert (answer.status, answer.read(5)) == (200, b"first")
            arrived.set()
            assert answer.read() == b"last"
            connection.close()


def test_real_server_sends_refusals_whole() -> None:
    with serving(gated(PER_IP)) as connect:
        told = []
        for method in ("GET", "GET", "GET", "HEAD"):
            connection = connect()
            connection.request(method, "/")
            answer = connection.getresponse()
            told.append((answer.status, len(answer.read()) == int(answer.headers["content-length"])))
            connection.close()
    assert told == [(200, True), (200, True), (429, True), (429, False)]


BEHIND = """
limits: [{by: ip, bucket: 3/hour}]
identity: {proxies: [127.0.0.0/8]%s}
"""


def test_behind_wsgiref_no_client_chooses_its_address_by_an_underscore(caplog: pytest.LogCaptureFixture) -> None:
    """It takes X_Forwarded_For for the same header and joins both: the client's line would be the rightmost hop."""

    def app(environ: Environ, start_response: Any) -> Iterable[bytes]:
        start_response("200 OK", [])
        return []

    def statuses(port: Callable[[], HTTPConnection], *names: str) -> list[int]:
        found = []
        for number in range(5):
            connection = port()
            connection.putrequest("GET", "/")
            for name, value in zip(names, ("203.0.113.9", f"198.51.100.{number}"), strict=False):
                connection.putheader(name, value if name != "Forwarded" else f"for={value}")
            connection.endheaders()
            found.append(connection.getresponse().status)
            connection.close()
        return found

    with serving(HeadgateMiddleware(app, read(BEHIND % ""))) as port:
        assert statuses(port, "X-Forwarded-For", "X_Forwarded_For") == [200, 200, 200, 429, 429]
    assert "X-Forwarded-For is ignored behind wsgiref" in caplog.text
    with serving(HeadgateMiddleware(app, read(BEHIND % ", forwarded_by: forwarded"))) as port:
        assert statuses(port, "Forwarded") == [200, 200, 200, 429, 429]
