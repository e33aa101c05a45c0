"""The Flask extension: nothing that Flask serves gets past it, and the app's config has the last word."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, nullcontext
from datetime import timedelta
from http.client import HTTPConnection
from typing import TYPE_CHECKING, Any, ClassVar

import pytest
from flask import Blueprint, Flask, Response, abort, request, session
from flask.views import MethodView

from headgate import Limit
from headgate.adapters.flask import Headgate, exempt, limit
from headgate.errors import InvalidConfiguration, InvalidInput, InvalidPolicy
from headgate.gate.admission import Admission, current_admission
from headgate.policy.loader import read
from headgate.policy.model import Policy
from headgate.testing import FakeClock
from support.paths import DOCS

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from support.servers import RedisServer

PER_IP = "limits: [{name: per-ip, by: ip, bucket: 2/hour}]"


def make_app(policy: str, **options: Any) -> Flask:
    app = Flask("shop", static_folder=None)
    app.secret_key = "for tests only"
    Headgate(app, read(policy), **{"clock": FakeClock(), **options})

    @app.route("/items/<int:id>", methods=["GET", "POST"])
    def show(id: int) -> str:
        return f"item {id}"

    blueprint = Blueprint("admin", "admin")

    @blueprint.get("/items/<int:id>", endpoint="show")
    def show_to_admins(id: int) -> str:
        return f"item {id}, for admins"

    app.register_blueprint(blueprint, url_prefix="/admin")

    @app.post("/login")
    def login() -> Any:
        if request.form["password"] != "right":
            return "no", 401
        session["user"] = request.form["name"]
        return "yes"

    @app.get("/fail")
    def fail() -> str:
        raise LookupError

    @app.get("/ask")
    def ask() -> Response:
        def answer() -> Iterator[bytes]:
            yield b"thinking"
            current_admission().commit(int(request_cost))
            yield b"done"

        request_cost = request.args["cost"]
        return Response(answer())

    return app


# ------------------------------------------------------------------ admission


@pytest.mark.parametrize(
    ("policy", "paths", "expected"),
    [
        # Views of one name in two blueprints are two endpoints, and one template is one.
        (
            "limits: [{by: [ip, endpoint], bucket: 1/hour, endpoint: ['/items/{id}', '/admin/items/{id}']}]",
            ["/items/1", "/items/2", "/admin/items/1", "/admin/items/2"],
            [200, 429, 200, 429],
        ),
        (PER_IP, ["/admin/items/1", "/items/1", "/items/1"], [200, 200, 429]),
        (PER_IP, ["/nowhere", "/items/x", "/items/1"], [404, 404, 429]),
        (PER_IP, ["/fail", "/fail", "/fail"], [500, 500, 429]),
        (PER_IP, ["/login", "/login", "/login"], [405, 405, 429]),
        ("{routes: [{path: '/items/*', cost: 0}], limits: [{by: ip, bucket: 1/hour}]}", ["/items/1"] * 3, [200] * 3),
        ("{limits: [{by: ip, bucket: 1/hour}], blocked: [{ip: 127.0.0.0/8}]}", ["/items/1"], [403]),
    ],
    ids=["same names", "blueprints", "404", "500", "405", "exempt", "blocked"],
)
def test_everything_that_flask_answers_is_counted(policy: str, paths: list[str], expected: list[int]) -> None:
    client = make_app(policy).test_client()
    assert [client.get(path).status_code for path in paths] == expected


def test_static_files_are_counted(tmp_path: Path) -> None:
    (tmp_path / "site.css").write_text("body {}")
    app = Flask("shop", static_folder=str(tmp_path), static_url_path="/static")
    Headgate(app, read(PER_IP))
    client = app.test_client()
    answers = [client.get("/static/site.css", buffered=True) for _ in range(3)]
    assert [answer.status_code for answer in answers] == [200, 200, 429]
    assert answers[0].data == b"body {}"


def test_every_answer_says_what_is_left() -> None:
    client = make_app(PER_IP).test_client()
    answers = [client.get("/items/1"), client.get("/fail"), client.get("/items/1"), client.head("/items/1")]
    assert [answer.headers["x-ratelimit-remaining"] for answer in answers] == ["1", "0", "0", "0"]
    assert [answer.headers.get("retry-after") for answer in answers] == [None, None, "1800", "1800"]
    assert answers[2].get_json()["violated-policies"] == ["per-ip"]
    assert answers[3].data == b""


@pytest.mark.parametrize(("mode", "status"), [("open", 200), ("closed", 503), ("local", 200)])
def test_store_that_is_down_leaves_it_to_the_route(mode: str, status: int) -> None:
    app = make_app(
        f"limits: [{{by: ip, bucket: 9/hour, on_failure: {mode}}}]", store="redis://127.0.0.1:1/0", clock=None
    )
    assert app.test_client().get("/items/1").status_code == status
    app.extensions["headgate"].gate.close()


# ----------------------------------------------------------------- settlement


def test_only_failed_logins_count() -> None:
    client = make_app("limits: [{endpoint: /login, by: ip, bucket: 2/hour, count_when: status == 401}]").test_client()
    tries = ["right", "wrong", "right", "right", "wrong", "right"]
    # As servers do, a client that buffers closes the answers: only then is known what counts.
    answers = [client.post("/login", data={"name": "ada", "password": word}, buffered=True) for word in tries]
    assert [answer.status_code for answer in answers] == [200, 401, 200, 200, 401, 429]


def test_stream_says_what_it_has_cost() -> None:
    client = make_app("limits: [{endpoint: /ask, by: ip, bucket: 1000/hour, reserve: 500}]").test_client()
    answers = [client.get("/ask", query_string={"cost": cost}, buffered=True) for cost in (100, 100, 700, 1)]
    assert [answer.status_code for answer in answers] == [200, 200, 200, 429]
    assert answers[0].data == b"thinkingdone"


# ------------------------------------------------------------------- identity


def test_function_may_read_the_session() -> None:
    app = make_app(
        "limits: [{by: user, bucket: 2/hour, endpoint: '/items/{id}'}]",
        identities={"user": lambda request: request.session.get("user")},
    )
    for name in ("ada", "grace"):
        client = app.test_client()
        assert client.post("/login", data={"name": name, "password": "right"}).status_code == 200
        assert [client.get("/items/1").status_code for _ in range(3)] == [200, 200, 429]
        with client.session_transaction() as kept:
            assert kept["user"] == name
    nobody = app.test_client()
    nobody.set_cookie("session", "forged")
    assert [nobody.get("/items/1").status_code for _ in range(3)] == [200, 200, 429], "counted by address"


def test_app_without_a_secret_has_an_empty_session() -> None:
    app = make_app(PER_IP, identities={"user": lambda request: request.session.get("user")})
    app.secret_key = None
    assert app.test_client().get("/items/1").status_code == 200


def test_function_may_read_the_request_but_not_the_body_that_the_view_needs() -> None:
    def name(request: Any) -> str | None:
        with pytest.raises(RuntimeError):
            request.request.get_data()
        told: str | None = request.request.cookies.get("name")
        return told

    app = make_app("limits: [{by: user, bucket: 1/hour}]", identities={"user": name})
    client = app.test_client()
    for user in ("ada", "grace"):
        client.set_cookie("name", user)
        answers = [client.post("/login", data={"name": user, "password": "right"}) for _ in range(2)]
        assert [answer.status_code for answer in answers] == [200, 429]


# -------------------------------------------------------------- configuration


def test_config_has_the_last_word() -> None:
    headgate = Headgate(policy=read("limits: [{by: ip, bucket: 1/hour}]"), namespace="shop")
    plain, other = Flask("plain"), Flask("other")
    clock = FakeClock()
    other.config.update(HEADGATE_POLICY=read("limits: [{by: ip, bucket: 3/hour}]"), HEADGATE_CLOCK=clock)
    for app, quota in ((plain, 1), (other, 3)):
        headgate.init_app(app)
        client = app.test_client()
        assert [client.get("/").status_code for _ in range(quota + 1)] == [404] * quota + [429]
    clock.advance(3600)
    assert client.get("/").status_code == 404


def test_policy_file_is_watched(tmp_path: Path) -> None:
    file = tmp_path / "limits.yaml"
    file.write_text(PER_IP)
    app = Flask("shop")
    app.config["HEADGATE_POLICY"] = file
    Headgate(app)
    assert app.test_client().get("/").headers["ratelimit-policy"] == '"per-ip";q=2;w=3600'
    app.extensions["headgate"].gate.close()


PAGE = (DOCS / "flask.md").read_text("utf-8")
SETTINGS = re.findall(r"^\| `(HEADGATE_\w+)` \|", PAGE, re.MULTILINE)
"""All that are documented."""


@pytest.mark.parametrize(
    ("config", "error", "message"),
    [
        (
            {},
            InvalidConfiguration,
            (
                "HEADGATE_POLICY is not set; give the path of a policy file, a config store as HEADGATE_CONTROL, "
                "or Policy() of headgate.policy if all limits are on views"
            ),
        ),
        (
            {"HEADGATE_POLICY": "p.yaml", "HEADGATE_STROE": "x"},
            InvalidConfiguration,
            "HEADGATE_STROE is not a setting; did you mean HEADGATE_STORE?",
        ),
        (
            {"HEADGATE_POLICY": "p.yaml", "HEADGATE_": "x"},
            InvalidConfiguration,
            f"HEADGATE_ is not a setting; there are {', '.join(SETTINGS)}",
        ),
        (
            {"HEADGATE_POLICY": read(PER_IP), "HEADGATE_BUDGET": 0},
            InvalidConfiguration,
            "budget 0: give the seconds that the store may take, above 0 and at most 60",
        ),
        (
            {"HEADGATE_POLICY": "bad.yaml"},
            InvalidPolicy,
            "bad.yaml:1:11: unknown field 'bukcet'; did you mean 'bucket'?",
        ),
    ],
)
def test_invalid_config_is_rejected_when_the_app_is_created(
    config: dict[str, Any], error: type[Exception], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bad.yaml").write_text("limits: [{bukcet: 1/hour}]")
    app = Flask("shop")
    app.config.update(config)
    with pytest.raises(error) as told:
        Headgate(app)
    assert str(told.value).splitlines()[0] == message
    assert "headgate" not in app.extensions


def test_one_app_is_gated_once() -> None:
    app = Flask("shop")
    headgate = Headgate(app, read(PER_IP))
    with pytest.raises(InvalidConfiguration, match="'shop' would count every request twice"):
        headgate.init_app(app)


# -------------------------------------------------------------- a real server

SHOP = """
import sys
from flask import Flask, Response
from headgate.adapters.flask import Headgate

app = Flask("shop")
Headgate(app, "limits.yaml")

@app.get("/hello")
def hello():
    return "hello"

@app.get("/stream")
def stream():
    def chunks():
        yield b"first"
        # The test sends this file only when the first chunk has arrived.
        with open("arrived") as pipe:
            yield pipe.read().encode()
    return Response(chunks())
"""


@contextmanager
def gunicorn(directory: Path) -> Iterator[int]:
    """The port of a server with threads, which ends with the block, or with this process."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        number = listener.fileno()
        arguments = ["--bind", f"fd://{number}", "--threads", "4", "--log-level", "error", "shop:app"]
        command = ["setpriv", "--pdeathsig", "KILL", "--", sys.executable, "-m", "gunicorn", *arguments]
        process = subprocess.Popen(command, cwd=directory, pass_fds=[number])
        try:
            yield listener.getsockname()[1]
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(20)


def test_gunicorn_admits_exactly_as_many_and_streams(tmp_path: Path) -> None:
    (tmp_path / "shop.py").write_text(SHOP)
    (tmp_path / "limits.yaml").write_text(
        "limits: [{endpoint: /hello, by: ip, bucket: 20/hour}, {endpoint: /stream, by: ip, limit: 1/minute, "
        "algorithm: concurrency}]"
    )
    os.mkfifo(tmp_path / "arrived")
    with gunicorn(tmp_path) as port:

        def ask(path: str) -> int:
            connection = HTTPConnection("127.0.0.1", port, timeout=20)
            connection.request("GET", path)
            status = connection.getresponse().status
            connection.close()
            return status

        with ThreadPoolExecutor(4) as threads:
            answers = list(threads.map(ask, ["/hello"] * 40))
        assert (answers.count(200), answers.count(429)) == (20, 20)

        connection = HTTPConnection("127.0.0.1", port, timeout=20)
        connection.request("GET", "/stream")
        streamed = connection.getresponse()
        assert (streamed.status, streamed.read(5)) == (200, b"first")
        assert ask("/stream") == 429, "the lease is held while the stream runs"
        (tmp_path / "arrived").write_text("last")
        assert streamed.read() == b"last"
        connection.close()


# ------------------------------------------------------------------ limits on views


def shop(policy: Policy | None = None, **options: Any) -> Flask:
    app = Flask("shop", static_folder=None)
    app.secret_key = "for tests only"
    Headgate(app, Policy() if policy is None else policy, **{"clock": FakeClock(), **options})
    return app


def statuses(app: Flask, *paths: str, **options: Any) -> list[int]:
    client = app.test_client()
    asked = [path.rpartition(" ") for path in paths]
    return [
        client.open(path, method=method or "GET", buffered=True, **options).status_code for method, _, path in asked
    ]


def from_device(request: Any) -> str | None:
    device: str | None = request.headers.get("x-device")
    return device


def test_view_is_limited_and_refuses_as_the_policy_does() -> None:
    app = shop()

    @app.get("/reports/<id>")
    @limit("2/minute")
    def report(id: str) -> str:
        return id

    client = app.test_client()
    first, second, refused = [client.get(f"/reports/{id}") for id in (1, 2, 3)]
    assert [first.text, second.headers["x-ratelimit-remaining"]] == ["1", "0"]
    assert first.headers["ratelimit-policy"] == '"2/minute by ip";q=2;w=60'
    assert (refused.status_code, refused.headers["retry-after"]) == (429, "30")
    same = make_app("limits: [{name: 2/minute by ip, by: ip, bucket: 2/minute}]").test_client()
    expected = [same.get("/items/1") for _ in range(3)][2]
    both = [sorted((name.lower(), value) for name, value in answer.headers) for answer in (refused, expected)]
    assert (both[0], refused.data) == (both[1], expected.data)
    head = client.head("/reports/1")
    assert (head.status_code, head.data) == (429, b"")
    assert statuses(app, "/reports/1", environ_overrides={"REMOTE_ADDR": "203.0.113.10"}) == [200]


def test_view_of_several_urls_has_one_count_and_each_view_its_own() -> None:
    app = shop()
    once = limit("1/minute")
    for endpoint, paths in {"a": ["/a/<id>", "/b"], "c": ["/c"]}.items():
        for path in paths:
            app.add_url_rule(path, endpoint, once(lambda **values: "here") if path == paths[0] else None)
    app.view_functions["c"] = once(lambda: "here")
    assert statuses(app, "/a/1", "/a/2", "/b", "/c", "/c") == [200, 429, 429, 200, 429]


def test_views_that_share_a_name_share_a_limit() -> None:
    app = shop()
    exports = Limit(2, timedelta(days=1), name="exports")
    for path in ("a", "b"):
        app.get(f"/{path}", endpoint=path)(limit("2/minute", name="shared")(lambda: "here"))
        app.get(f"/{path}/export", endpoint=f"{path}-export")(limit(exports)(lambda: "here"))
    assert statuses(app, "/a", "/b", "/a", "/b") == [200, 200, 429, 429]
    assert statuses(app, "/a/export", "/b/export", "/a/export") == [200, 200, 429]


@pytest.mark.parametrize("is_stacked", [True, False])
def test_all_limits_of_a_view_are_charged_or_none(is_stacked: bool) -> None:
    app = shop()
    both = [limit("1/minute"), limit("5/day", by="global")] if is_stacked else [limit("1/minute; 5/day")]

    @app.get("/")
    def index() -> str:
        return "here"

    view: Any = index
    for each in reversed(both):
        view = each(view)
    app.view_functions["index"] = view
    client = app.test_client()
    refused = [client.get("/") for _ in range(3)][2]
    second = "5/day by global" if is_stacked else "5/day by ip"
    assert refused.headers["ratelimit"].split(", ")[1].startswith(f'"{second}";r=4;')
    assert refused.get_json()["violated-policies"] == ["1/minute by ip"]


def test_decisions_name_the_view_and_its_identities() -> None:
    seen: list[Admission] = []
    app = shop(on_decision=lambda request, admission: seen.append(admission))

    @app.get("/reports/<id>")
    @limit("2/minute", by=from_device)
    @limit("9/minute", by="user")
    def report(id: str) -> str:
        return id

    statuses(app, "/reports/1")
    resolution = seen[-1].resolution
    assert resolution is not None
    names = {each.rule.name: each.rule.by for each in resolution.applied_limits}
    assert resolution.route.endpoint == "report"
    assert names == {"2/minute by from_device": ("endpoint", "from_device"), "9/minute by user": ("endpoint", "user")}


def test_function_never_passes_for_an_identity_of_the_policy() -> None:
    def ip(request: Any) -> str:
        return "somebody"

    seen: list[Admission] = []
    app = shop(on_decision=lambda request, admission: seen.append(admission))
    app.get("/")(limit("2/minute", by=ip)(lambda: "here"))
    statuses(app, "/")
    resolution = seen[-1].resolution
    assert resolution is not None
    assert (resolution.applied_limits[0].rule.by, resolution.who["ip"]) == (("endpoint", "ip_"), "127.0.0.1")


def test_views_and_policy_are_charged_all_or_none_in_redis(redis7: RedisServer, unique: str) -> None:
    policy = read(f"limits: [{{name: {unique}, by: ip, bucket: 3/hour}}]")
    app = shop(policy, store=redis7.url, namespace=unique, clock=None, budget=5)

    @app.get("/")
    @limit("1/hour; 5/day", name=unique + "-view")
    def index() -> str:
        return "here"

    app.get("/other")(lambda: "there")
    with closing(app.extensions["headgate"].gate):
        assert statuses(app, "/", "/", "/", "/", "/other", "/other", "/other") == [200, 429, 429, 429, 200, 200, 429]


def test_refusal_by_a_view_gives_back_what_the_policy_has_charged() -> None:
    app = shop(
        read("limits: [{name: all, by: ip, bucket: 3/minute}, {name: fails, by: ip, bucket: 9/hour, reserve: 2}]")
    )

    @app.get("/")
    @limit("1/minute")
    def index() -> str:
        return "here"

    app.get("/other")(lambda: "there")
    client = app.test_client()
    first, *refused = [client.get("/", buffered=True) for _ in range(4)]
    assert [first.status_code, *(each.status_code for each in refused)] == [200, 429, 429, 429]
    assert first.headers["ratelimit-policy"].count(";q=") == 3, "both are reported as one"
    assert first.headers.getlist("x-ratelimit-limit") == ["1"]
    assert refused[0].headers["ratelimit-policy"] == '"1/minute by ip";q=1;w=60'
    told = client.get("/other", buffered=True).headers["ratelimit"]
    assert re.findall(r'"(\w+)";r=(\d)', told) == [("all", "1"), ("fails", "5")], "that of the first, and of this one"


def test_identity_counted_by_a_view() -> None:
    app = shop(identities={"device": lambda request: from_device(request.request)})
    for path, by in {"/a": from_device, "/b": "device", "/c": "device+ip", "/d": "global", "/e": "endpoint"}.items():
        app.get(path, endpoint=path[1:])(limit("1/minute", by=by)(lambda: "here"))
    for path in ("/a", "/b", "/c"):
        answers = [statuses(app, path, headers={"x-device": device})[0] for device in ("x", "y", "x")]
        assert answers == [200, 200, 429], path
    assert statuses(app, "/d", "/d", "/e", "/e") == [200, 429, 200, 429]


def test_view_limit_falls_back_to_the_address() -> None:
    app = shop()
    for path in ("a", "b"):
        app.get(f"/{path}", endpoint=path)(limit("1/minute", by=from_device)(lambda: "here"))
    assert statuses(app, "/a", "/a", "/b", "/b") == [200, 429, 200, 429]


def test_limit_may_be_for_some_methods_only() -> None:
    app = shop()

    @app.route("/", methods=["GET", "POST", "PUT"])
    @limit("1/minute", methods=["POST", "PUT"])
    @limit("2/minute", methods="GET")
    def index() -> str:
        return "here"

    assert statuses(app, "POST /", "PUT /", "GET /", "GET /", "HEAD /") == [200, 429, 200, 200, 429]


def test_only_the_answers_that_count_are_counted_by_a_view() -> None:
    app = shop()

    @app.get("/<int:status>")
    @limit("2/minute", count_when="status in [401]")
    def login(status: int) -> Any:
        if status == 401:
            abort(401)
        return "welcome", status

    assert statuses(app, *[f"/{status}" for status in (200, 401, 200, 200, 401, 200)]) == [200, 401, 200, 200, 401, 429]


@pytest.mark.parametrize("propagates", [True, False])
def test_lease_of_a_view_ends_with_its_answer(propagates: bool) -> None:
    app = shop()
    app.config["PROPAGATE_EXCEPTIONS"] = propagates
    one = Limit(1, timedelta(minutes=1), algorithm="concurrency", name="one")

    @app.get("/<how>")
    @limit(one)
    def show(how: str) -> Any:
        if how == "fail":
            raise LookupError
        return Response(iter(["a", "b"]))

    client = app.test_client()
    streaming = client.get("/stream", buffered=False)
    assert statuses(app, "/stream") == [429], "it is still streaming"
    streaming.close()
    with pytest.raises(LookupError) if propagates else nullcontext():
        client.get("/fail", buffered=True)
    assert statuses(app, "/stream", "/stream") == [200, 200]


def test_async_views_are_limited() -> None:
    app = shop()

    @app.get("/")
    @limit("1/minute")
    async def index() -> str:
        return "here"

    assert statuses(app, "/", "/") == [200, 429]


class Items(MethodView):
    decorators: ClassVar[list[Any]] = [limit("1/minute")]

    def get(self) -> str:
        return "items"


@limit("1/minute")
class Orders(MethodView):
    def get(self) -> str:
        return "orders"

    @limit("1/minute", name="placing")
    def post(self) -> str:
        return "placed"


def test_class_based_views_are_limited() -> None:
    app = shop()
    app.add_url_rule("/items", view_func=Items.as_view("items"))
    app.add_url_rule("/orders", view_func=Orders.as_view("orders"))
    app.add_url_rule("/more", view_func=limit("1/hour")(Items.as_view("more")))
    assert statuses(app, "/items", "/items", "/orders", "/orders", "/more", "/more") == [200, 429, 200, 429, 200, 429]
    later = shop()
    later.add_url_rule("/orders", view_func=Orders.as_view("orders"))
    assert statuses(later, "POST /orders", "POST /orders", "GET /orders") == [200, 429, 429]


def test_each_view_of_a_blueprint_is_limited() -> None:
    app, admin = shop(), Blueprint("admin", "admin")
    limit("1/minute")(admin)
    limit("2/minute", name="all of admin", by="global")(admin)
    for path in ("a", "b"):
        admin.get(f"/{path}", endpoint=path)(lambda: "here")
    app.register_blueprint(admin, url_prefix="/admin")
    app.get("/a", endpoint="a")(lambda: "here")
    assert statuses(app, "/admin/a", "/admin/a", "/admin/b", "/admin/b", "/a", "/a") == [200, 429, 200, 429, 200, 200]


def test_exempt_views_are_left_out_of_the_policy() -> None:
    app = shop(read(PER_IP))
    inner, outer = Blueprint("inner", "inner"), Blueprint("outer", "outer")

    @app.get("/health")
    @exempt
    def health() -> str:
        return "fine"

    @app.get("/own")
    @exempt
    @limit("1/minute")
    def own() -> str:
        return "here"

    exempt(outer)
    inner.get("/x")(lambda: "here")
    outer.register_blueprint(inner, url_prefix="/inner")
    app.register_blueprint(outer, url_prefix="/outer")
    app.add_url_rule("/class", view_func=exempt(Items).as_view("class"))
    app.get("/")(lambda: "here")
    assert statuses(app, *["/health"] * 4, *["/outer/inner/x"] * 4) == [200] * 8
    assert statuses(app, "/own", "/own", "/class", "/class") == [200, 429, 200, 429]
    assert statuses(app, "/", "/nowhere", "/health/", "POST /health", "/") == [200, 404, 429, 429, 429]
    assert "x-ratelimit-limit" not in app.test_client().get("/health").headers


def test_limits_of_views_go_by_the_policy_in_force(tmp_path: Path) -> None:
    file = tmp_path / "policy.yaml"
    file.write_text("{answers: {headers: [ratelimit]}, limits: [{name: all, by: ip, bucket: 9/minute}]}")
    app = Flask("shop", static_folder=None)
    Headgate(app, file, clock=FakeClock(), reload_every=None)
    app.get("/")(limit("5/minute")(lambda: "here"))
    client = app.test_client()
    assert "x-ratelimit-limit" not in client.get("/").headers
    gate = app.extensions["headgate"].gate
    gate._activate(read("{identity: {proxies: [127.0.0.0/8]}, limits: [{name: all, by: ip, bucket: 9/minute}]}"))
    answer = client.get("/", headers={"x-forwarded-for": "203.0.113.7"})
    assert answer.headers["x-ratelimit-remaining"] == "4", "a new address, and fields as the new policy wants them"


@pytest.mark.parametrize(("mode", "expected"), [("open", [200] * 3), ("closed", [503] * 3), ("local", [200, 429, 429])])
def test_view_says_what_holds_without_the_store(mode: Any, expected: list[int]) -> None:
    app = shop(store="redis://127.0.0.1:1/0", clock=None)
    app.get("/")(limit("5/minute", on_failure=mode)(lambda: "here"))
    assert statuses(app, "/", "/", "/") == expected


def test_view_whose_app_has_no_gate_says_so() -> None:
    app = Flask("shop")
    app.testing = True
    app.get("/")(limit("5/minute")(lambda: "here"))
    with pytest.raises(InvalidConfiguration, match=r"call Headgate\(app, policy\), with Policy\(\)"):
        app.test_client().get("/")


def test_view_that_counts_by_an_unknown_identity_says_so() -> None:
    app = shop()
    app.testing = True
    app.get("/")(limit("5/minute", by="usr")(lambda: "here"))
    with pytest.raises(InvalidConfiguration, match="did you mean 'user'"):
        app.test_client().get("/")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: limit()(len), "one or more limits"),
        (lambda: limit("1/minute")(limit("1/minute")(lambda: "here")), "limits with distinct names"),
        (lambda: limit("1/minute", cost=0), "needs no limit"),
        (lambda: limit("1/minute", on_failure="opne"), "did you mean 'open'"),  # type: ignore[arg-type]
        (lambda: limit("1/minute", by=7), "give a kind of identity"),  # type: ignore[arg-type]
        (lambda: limit("1/minute", methods="POSTS"), "POST"),
        (lambda: limit("1/minute")("view"), "not a view"),
        (lambda: exempt("view"), "cannot be exempt"),
    ],
)
def test_mistakes_are_reported_when_the_view_is_defined(make: Any, message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        make()
