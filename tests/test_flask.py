"""The Flask extension: nothing that Flask serves gets past it, and the app's config has the last word."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from http.client import HTTPConnection
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from flask import Blueprint, Flask, Response, request, session

from headgate.adapters.flask import Headgate
from headgate.adapters.way import current_admission
from headgate.errors import InvalidConfiguration, InvalidPolicy
from headgate.policy.loading import read
from headgate.testing import FakeClock

if TYPE_CHECKING:
    from collections.abc import Iterator

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
def test_a_store_that_is_down_leaves_it_to_the_route(mode: str, status: int) -> None:
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


def test_a_stream_says_what_it_has_cost() -> None:
    client = make_app("limits: [{endpoint: /ask, by: ip, bucket: 1000/hour, reserve: 500}]").test_client()
    answers = [client.get("/ask", query_string={"cost": cost}, buffered=True) for cost in (100, 100, 700, 1)]
    assert [answer.status_code for answer in answers] == [200, 200, 200, 429]
    assert answers[0].data == b"thinkingdone"


# ------------------------------------------------------------------- identity


def test_a_function_may_read_the_session() -> None:
    app = make_app(
        "limits: [{by: user, bucket: 2/hour, endpoint: '/items/{id}'}]",
        identities={"user": lambda arrival: arrival.session.get("user")},
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


def test_an_app_without_a_secret_has_an_empty_session() -> None:
    app = make_app(PER_IP, identities={"user": lambda arrival: arrival.session.get("user")})
    app.secret_key = None
    assert app.test_client().get("/items/1").status_code == 200


def test_a_function_may_read_the_request_but_not_the_body_that_the_view_needs() -> None:
    def name(arrival: Any) -> str | None:
        with pytest.raises(RuntimeError):
            arrival.request.get_data()
        told: str | None = arrival.request.cookies.get("name")
        return told

    app = make_app("limits: [{by: user, bucket: 1/hour}]", identities={"user": name})
    client = app.test_client()
    for user in ("ada", "grace"):
        client.set_cookie("name", user)
        answers = [client.post("/login", data={"name": user, "password": "right"}) for _ in range(2)]
        assert [answer.status_code for answer in answers] == [200, 429]


# -------------------------------------------------------------- configuration


def test_the_config_has_the_last_word() -> None:
    headgate = Headgate(policy=read("limits: [{by: ip, bucket: 1/hour}]"), namespace="shop")
    plain, other = Flask("plain"), Flask("other")
    clock = FakeClock()
    other.config.update(HEADGATE_POLICY=read("limits: [{by: ip, bucket: 3/hour}]"), HEADGATE_CLOCK=clock)
    for app, limit in ((plain, 1), (other, 3)):
        headgate.init_app(app)
        client = app.test_client()
        assert [client.get("/").status_code for _ in range(limit + 1)] == [404] * limit + [429]
    clock.advance(3600)
    assert client.get("/").status_code == 404


def test_a_policy_file_is_watched(tmp_path: Path) -> None:
    file = tmp_path / "limits.yaml"
    file.write_text(PER_IP)
    app = Flask("shop")
    app.config["HEADGATE_POLICY"] = file
    Headgate(app)
    assert app.test_client().get("/").headers["ratelimit-policy"] == '"per-ip";q=2;w=3600'
    app.extensions["headgate"].gate.close()


PAGE = (Path(__file__).parents[1] / "docs" / "flask.md").read_text("utf-8")
SETTINGS = re.findall(r"^\| `(HEADGATE_\w+)` \|", PAGE, re.MULTILINE)
"""All that are documented."""


@pytest.mark.parametrize(
    ("config", "error", "message"),
    [
        (
            {},
            InvalidConfiguration,
            "HEADGATE_POLICY is not set; give the path of a policy file, or a config store as HEADGATE_CONTROL",
        ),
        (
            {"HEADGATE_POLICY": "p.yaml", "HEADGATE_STROE": "x"},
            InvalidConfiguration,
            "HEADGATE_STROE is no setting; did you mean HEADGATE_STORE?",
        ),
        (
            {"HEADGATE_POLICY": "p.yaml", "HEADGATE_": "x"},
            InvalidConfiguration,
            f"HEADGATE_ is no setting; there are {', '.join(SETTINGS)}",
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
def test_a_bad_config_is_told_when_the_app_is_made(
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
