"""The servers that people run, with four workers on one Redis: together they let in what the policy says, no more."""

from __future__ import annotations

from collections import Counter
from contextlib import ExitStack
from http.client import HTTPConnection
from typing import TYPE_CHECKING

import pytest

from support.servers import RedisServer, wait_until
from support.serving import Reply, WebServer

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

LIMIT = 100
WORKERS = 4

POLICY = """\
on_failure: closed
routes:
  - path: /health
    cost: 0
limits:
  - name: {name}
    by: global
    bucket: {quota}/30 days
"""

FASTAPI = """\
import logging
import os
from fastapi import FastAPI
from headgate.adapters.asgi import HeadgateMiddleware

logging.basicConfig(level=logging.INFO)
app = FastAPI()
app.add_middleware(HeadgateMiddleware, policy="policy.yaml", store=os.environ["STORE"], budget=2.0, reload_every=0.05)

@app.get("/health")
async def health():
    return os.getpid()

@app.get("/")
async def index():
    return os.getpid()
"""

FLASK = """\
import logging
import os
from flask import Flask
from headgate.adapters.wsgi import HeadgateMiddleware

logging.basicConfig(level=logging.INFO)
app = Flask(__name__)
app.wsgi_app = HeadgateMiddleware(
    app.wsgi_app, "policy.yaml", os.environ["STORE"], budget=2.0, reload_every=0.05
)

@app.get("/health")
def health():
    return str(os.getpid())

@app.get("/")
def index():
    return str(os.getpid())
"""

SERVERS = {
    "uvicorn": (FASTAPI, f"-m uvicorn app:app --port {{port}} --workers {WORKERS} --no-access-log"),
    "uvicorn-alone": (FASTAPI, "-m uvicorn app:app --port {port} --no-access-log"),
    "gunicorn-uvicorn": (
        FASTAPI,
        f"-m gunicorn app:app -b 127.0.0.1:{{port}} -w {WORKERS} -k uvicorn.workers.UvicornWorker",
    ),
    "gunicorn-sync": (FLASK, f"-m gunicorn app:app -b 127.0.0.1:{{port}} -w {WORKERS}"),
    "gunicorn-gthread": (FLASK, f"-m gunicorn app:app -b 127.0.0.1:{{port}} -w {WORKERS} -k gthread --threads 4"),
    "gunicorn-preload": (FLASK, f"-m gunicorn app:app -b 127.0.0.1:{{port}} -w {WORKERS} -k gthread --preload"),
}


@pytest.fixture
def allow(tmp_path: Path, unique: str) -> Callable[[int], None]:
    """Puts a policy with that limit in place."""
    return lambda quota: (tmp_path / "policy.yaml").write_text(POLICY.format(name=unique, quota=quota)) and None


@pytest.fixture
def serve(tmp_path: Path, redis7: RedisServer, allow: Callable[[int], None]) -> Callable[[str], WebServer]:
    """Makes a server of that kind, in a directory of its own."""

    def make(kind: str) -> WebServer:
        code, command = SERVERS[kind]
        (tmp_path / "app.py").write_text(code)
        allow(LIMIT)
        return WebServer(*command.split(), directory=tmp_path, environment={"STORE": redis7.url})

    return make


def meet_all_workers(server: WebServer) -> None:
    """Return when each of them has answered: a server is up as soon as its first worker is."""
    met: set[str] = set()

    def have_answered() -> bool:
        met.update(reply.body for reply in server.burst(16, clients=8, path="/health"))
        return len(met) == WORKERS

    wait_until(have_answered, f"{WORKERS} workers to answer")


def allowed(replies: list[Reply]) -> list[Reply]:
    return [reply for reply in replies if reply.status == 200]


@pytest.mark.parametrize("kind", [kind for kind in SERVERS if kind != "uvicorn-alone"])
def test_four_workers_let_in_exactly_the_limit(serve: Callable[[str], WebServer], kind: str, unique: str) -> None:
    with serve(kind) as server:
        meet_all_workers(server)
        replies = server.burst(320, clients=16)
        health = server.ask("GET", "/health")
    assert Counter(reply.status for reply in replies) == {200: LIMIT, 429: 320 - LIMIT}
    assert len({reply.body for reply in allowed(replies)}) > 1, "only one worker has served"
    # Each of the hundred was told another number: no two workers have counted the same request.
    assert sorted(int(reply.headers["x-ratelimit-remaining"]) for reply in allowed(replies)) == list(range(LIMIT))
    for reply in replies:
        assert reply.headers["x-ratelimit-limit"] == f"{LIMIT}"
        assert reply.headers["ratelimit-policy"] == f'"{unique}";q={LIMIT};w=2592000'
        assert reply.headers["ratelimit"].startswith(f'"{unique}";r={reply.headers["x-ratelimit-remaining"]};t=')
        if reply.status == 429:
            assert reply.headers["x-ratelimit-remaining"] == "0"
            assert int(reply.headers["retry-after"]) >= 1
            assert reply.headers["cache-control"] == "no-store"
    assert health.status == 200
    assert "x-ratelimit-limit" not in health.headers


@pytest.mark.parametrize("kind", ["uvicorn", "gunicorn-preload"])
def test_changed_policy_holds_without_a_restart_and_a_bad_one_changes_nothing(
    serve: Callable[[str], WebServer], allow: Callable[[int], None], tmp_path: Path, kind: str
) -> None:
    watching = WORKERS + (kind == "gunicorn-preload")  # there the app is made once more, in the parent

    def told() -> set[str]:
        """The limits that the workers tell of; enough connections to meet all of them."""
        return {server.ask("GET", "/").headers["x-ratelimit-limit"] for _ in range(6 * WORKERS)}

    with serve(kind) as server:
        meet_all_workers(server)
        assert told() == {"100"}
        allow(500)
        wait_until(lambda: server.log.count("is in force") == watching, "all workers to read it")
        assert told() == {"500"}
        (tmp_path / "policy.yaml").write_text("limits: [{by: global, bukcet: 7/day}]")
        wait_until(lambda: server.log.count("did you mean 'bucket'?") == watching, "all workers to refuse it")
        assert "policy.yaml: the new version is refused" in server.log
        assert "policy.yaml:1:23: unknown field 'bukcet'; did you mean 'bucket'?" in server.log
        assert told() == {"500"}
        allow(900)
        wait_until(lambda: server.log.count("is in force") == 2 * watching, "all workers to read the next")
        assert told() == {"900"}


PRELOADED = """\
import os
from flask import Flask
from headgate.adapters.flask import Headgate

app = Flask(__name__)
Headgate(app, "policy.yaml", os.environ["STORE"])  # with the budget of 5 ms

@app.get("/health")
def health():
    return "up"

@app.get("/")
def index():
    return "in"

inner = app.wsgi_app

def with_pid(environ, start_response):
    def start(status, headers, *exc_info):
        return start_response(status, [*headers, ("X-Pid", str(os.getpid()))], *exc_info)
    return inner(environ, start)

app.wsgi_app = with_pid
"""


@pytest.mark.parametrize("kind", ["sync", "gthread --threads 4"])
def test_first_request_of_a_preloaded_worker_is_answered_by_the_store(
    tmp_path: Path, redis7: RedisServer, allow: Callable[[int], None], kind: str
) -> None:
    """A forked worker has no connection yet, and needs longer to open one than the budget of a check."""
    (tmp_path / "app.py").write_text(PRELOADED)
    allow(1_000_000)
    command = f"-m gunicorn app:app -b 127.0.0.1:{{port}} -w {WORKERS} --preload -k {kind}"
    for _ in range(2):
        first: dict[str, int] = {}

        def ask(server: WebServer, first: dict[str, int] = first) -> bool:
            for reply in server.burst(16, clients=8):
                first.setdefault(reply.headers["x-pid"], reply.status)
            return len(first) == WORKERS

        with WebServer(*command.split(), directory=tmp_path, environment={"STORE": redis7.url}) as server:
            wait_until(lambda server=server: ask(server), f"{WORKERS} workers to answer")  # type: ignore[misc]
        assert list(first.values()) == [200] * WORKERS


def test_bad_policy_keeps_a_server_from_starting(serve: Callable[[str], WebServer], tmp_path: Path) -> None:
    server = serve("uvicorn-alone")
    (tmp_path / "policy.yaml").write_text("limits: [{by: global, bukcet: 7/day}]")
    try:
        assert server.start().wait() == 3
        assert "policy.yaml:1:23: unknown field 'bukcet'; did you mean 'bucket'?" in server.log
        assert "Traceback" not in server.log
    finally:
        server.stop()


ADMISSIONS = """\
import gc
from fastapi import Depends, FastAPI
from headgate import Limit
from headgate.adapters import Admission
from headgate.adapters.asgi import HeadgateMiddleware
from headgate.adapters.fastapi import FastAPILimits

api = FastAPI()
limits = FastAPILimits()
limits.install(api)
app = HeadgateMiddleware(api, "policy.yaml")

@api.get("/health")
async def health():
    return sum([isinstance(each, Admission) for each in gc.get_objects()])

@api.get("/plain")
async def plain():
    return "served"

@api.get("/settled")
async def settled():
    return "served"

@api.get("/beside", dependencies=[Depends(limits.allow(Limit.parse("1000/day", name="beside")))])
async def beside():
    return "served"
"""

SETTLED = """
limits:
  - {name: all, by: global, bucket: 1000/day}
  - {name: some, path: /settled, by: global, bucket: 1000/day, count_when: "status in [404]"}
routes:
  - {path: /health, cost: 0}
"""


@pytest.mark.parametrize("path", ["/plain", "/settled", "/beside"])
@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
def test_nothing_is_kept_of_an_answered_request_while_its_connection_idles(
    tmp_path: Path, path: str, loop: str
) -> None:
    """A server's timer for such a connection keeps the context in which it was made."""
    (tmp_path / "app.py").write_text(ADMISSIONS)
    (tmp_path / "policy.yaml").write_text(SETTLED)
    command = (
        f"-m uvicorn app:app --port {{port}} --no-access-log --loop {loop} --http httptools --timeout-keep-alive 90"
    )
    with WebServer(*command.split(), directory=tmp_path) as server, ExitStack() as idling:
        for _ in range(8):
            connection = HTTPConnection("127.0.0.1", server.port, timeout=10)
            idling.callback(connection.close)
            connection.request("GET", path)
            assert connection.getresponse().read() == b'"served"'
        # That of requests which meet no limit. What was answered may have to be settled still.
        wait_until(lambda: server.ask("GET", "/health").body == "1", "only one admission to be there")
