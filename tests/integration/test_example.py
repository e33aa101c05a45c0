"""The shop of `make run`: its tour shows what it says, its policy does what it promises, it opens and closes well."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import shutil
import struct
import subprocess
import sys
import termios
import warnings
from contextlib import suppress
from typing import TYPE_CHECKING

import pytest
from examples.shop import tour
from examples.shop.app import app

from headgate.policy.loading import load
from headgate.testing import isolated_limits
from servers import HOST, wait_until
from serving import ROOT, WebServer

with warnings.catch_warnings(action="ignore"):  # it works as well with httpx as with the newer httpx2
    from starlette.testclient import TestClient

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from headgate.testing import IsolatedLimits
    from servers import RedisServer

POLICY = ROOT / "examples" / "shop" / "policy.yaml"
SHOP = ("-m", "examples.shop", "--port", "{port}")
PLAIN = {name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "HEADGATE_SECRET")}

Asked = tuple[str, str, dict[str, str]]


def decided(log: str) -> list[tuple[str, str, str]]:
    """What was answered, on which route, and what is left, of each decision that was printed."""
    rows = re.findall(r"^\d\d:\d\d:\d\d  (\S.*?)  +(\w+ +/\S+)  .*?(\d+ left of \S+)?$", log, re.MULTILINE)
    return [(answer, re.sub(" +", " ", route), left) for answer, route, left in rows]


def run_tour(*arguments: str) -> str:
    """All that it prints, from the opening to its own end."""
    shop = WebServer(*arguments)
    try:
        assert shop.start().wait() == 0, shop.log
        return shop.log
    finally:
        shop.stop()


# ------------------------------------------------------------------ the tour


@pytest.mark.parametrize("workers", [1, 2])
def test_the_tour_shows_what_it_says(redis7: RedisServer, workers: int) -> None:
    store = "memory://" if workers == 1 else redis7.url
    log = run_tour(*SHOP, "--demo", "--store", store, "--workers", f"{workers}")
    rows = decided(log)
    search = "GET /search"
    assert rows[:13] == [
        *[("allowed", search, f"{left} left of requests") for left in range(55, -1, -5)],
        ("429 requests", search, "0 left of requests"),
    ]
    assert [left for _, _, left in rows[13:16]] == [f"{left} left of requests" for left in (595, 995, 1195)]
    assert [(answer, left) for answer, _, left in rows[16:22]] == [
        *[("allowed", f"{left} left of login-failures") for left in range(4, -1, -1)],
        ("429 login-failures", "0 left of login-failures"),
    ]
    assert [left for _, _, left in rows[22:24]] == ["9500 left of tokens", "9486 left of tokens"]
    assert [answer for answer, _, _ in rows[24:]] == [*["allowed"] * 3, "allowed, not by writes", "403 blocked"]
    assert "retry-after: 5" in log
    assert "Traceback" not in log
    assert "\x1b" not in log, "colour is for terminals"
    assert not [key for key in re.findall(r"key (\w+)", log) if key.startswith("demo")], "a key is shown"
    for step in tour.STEPS:
        assert step.title in log


def test_a_terminal_gets_colour() -> None:
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 50, 120, 0, 0))
    command = [sys.executable, "-m", "examples.shop", "--demo", "--port", "18000"]
    environment = PLAIN | {"TERM": "xterm-256color"}
    with subprocess.Popen(command, cwd=ROOT, env=environment, stdin=theirs, stdout=theirs, stderr=theirs) as process:
        os.close(theirs)
        shown = b""
        with suppress(OSError):  # how Linux says that the other end of a terminal is closed
            while chunk := os.read(ours, 65536):
                shown += chunk
        assert process.wait(30) == 0
    os.close(ours)
    assert b"\x1b[32mallowed" in shown
    assert b"\x1b[31m429 requests" in shown


def test_curl_lines_are_what_the_tour_sends() -> None:
    lines = [ask.curl("http://shop") for step in tour.STEPS for ask in step.asks]
    assert lines[0] == "curl -i 'http://shop/search?q=tea'"
    assert 'curl -i -X POST -H "X-Forwarded-For: 203.0.113.$i" -u ada:guess http://shop/login' in lines
    assert "curl -i -H 'X-API-Key: demo-pro-key' --json '{\"text\": \"hello\"}' http://shop/posts" in lines
    login = tour.Ask("POST", "/login", login="ada:guess", visitor="203.0.113.$i")
    assert login.headers(4) == {"X-Forwarded-For": "203.0.113.4", "Authorization": "Basic YWRhOmd1ZXNz"}


# ------------------------------------------------------------------ opening and closing


def test_ctrl_c_closes_the_shop() -> None:
    with WebServer(*SHOP) as shop:
        wait_until(lambda: "Ctrl-C closes the shop" in shop.log, "the tour to end")
        assert shop.ask("GET", "/search?q=tea").headers["x-ratelimit-remaining"] == "55", "the tour took of it"
        assert shop.interrupt() == 0
        assert "Traceback" not in shop.log


def test_a_port_that_is_taken_is_left_alone() -> None:
    with WebServer(*SHOP) as first:
        log = run_tour("-m", "examples.shop", "--port", f"{first.port}", "--demo")
    port = re.search(rf"open at http://{HOST}:(\d+)", log)
    assert port is not None
    assert int(port[1]) > first.port


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--workers", "4"], "4 workers would count apart from each other in memory; give them a store to share"),
        (["--policy", "/nowhere/policy.yaml"], "/nowhere/policy.yaml: cannot be read"),
    ],
    ids=["workers without Redis", "no policy"],
)
def test_what_cannot_work_is_said_before_it_opens(options: list[str], told: str) -> None:
    command = [sys.executable, "-m", "examples.shop", *options]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=20, check=False)
    assert (ended.returncode, ended.stdout) == (2, "")
    assert told in ended.stderr
    assert "Traceback" not in ended.stderr


def test_the_policy_can_be_edited_while_it_runs(tmp_path: Path) -> None:
    policy = shutil.copy(POLICY, tmp_path)
    with WebServer(*SHOP, "--policy", policy) as shop:
        wait_until(lambda: "Ctrl-C closes the shop" in shop.log, "the tour to end")
        text = POLICY.read_text("utf-8")
        (tmp_path / "policy.yaml").write_text(text.replace("bucket: 60/minute", "bucket: 30/minute"))
        wait_until(lambda: "is in force" in shop.log, "the shop to read it")
        assert shop.ask("GET", "/search?q=tea").headers["x-ratelimit-limit"] == "30"
        (tmp_path / "policy.yaml").write_text(text.replace("bucket: 60/minute", "bukcet: 60/minute"))
        wait_until(lambda: "did you mean 'bucket'?" in shop.log, "the shop to refuse it")
        assert shop.ask("GET", "/search?q=tea").headers["x-ratelimit-limit"] == "30"


def test_each_route_fails_in_its_own_way_when_the_store_is_away() -> None:
    with WebServer(*SHOP, "--store", f"redis://{HOST}:1/0") as shop:
        assert [shop.ask("POST", "/login").status, shop.ask("GET", "/search?q=tea").status] == [503, 200]
        webhooks = [shop.ask("POST", "/webhooks/git").status for _ in range(7)]
        assert webhooks == [*[202] * 6, 429], "a fifth of 30 is counted in the process"


# ------------------------------------------------------------------ the policy, request by request


@pytest.fixture
def limits() -> Iterator[IsolatedLimits]:
    with isolated_limits() as limits:
        yield limits


@pytest.fixture
def client(limits: IsolatedLimits) -> Iterator[TestClient]:
    with TestClient(app, client=(HOST, 50000)) as client:
        yield client


def test_the_policy_has_nothing_to_complain_about() -> None:
    assert load(POLICY).warnings == ()


@pytest.mark.parametrize(
    ("key", "quota"),
    [(None, 60), ("demo-free-key", 60), ("unknown", 60), ("demo-pro-key", 600), ("demo-launch-key", 1200)],
)
def test_a_key_has_the_numbers_of_its_tier(client: TestClient, key: str | None, quota: int) -> None:
    answer = client.get("/posts", headers={"X-API-Key": key} if key else {})
    assert answer.headers["ratelimit-policy"].startswith(f'"requests";q={quota};w=60')


def test_right_passwords_never_count(client: TestClient, limits: IsolatedLimits) -> None:
    for minute in range(3):
        assert [client.post("/login", auth=("ada", "analytical")).status_code for _ in range(10)] == [200] * 10, minute
        client.post("/login", auth=("ada", "analytical"))
        limits.assert_denied_by("login-ip")
        limits.clock.advance(60)
    assert [client.post("/login", auth=("ada", "guess")).status_code for _ in range(6)] == [*[401] * 5, 429]
    limits.assert_denied_by("login-failures", on="POST /login")


@pytest.mark.parametrize(
    ("sent", "limit"),
    [
        ("Basic ?", "login-ip"),
        ("Basic /w==", "login-ip"),
        ("Basic", "login-ip"),
        ("Bearer x", "login-ip"),
        ("Basic bm9ib2R5Og==", "login-failures"),  # "nobody", with an empty password
    ],
)
def test_every_failed_login_is_counted(client: TestClient, limits: IsolatedLimits, sent: str, limit: str) -> None:
    answers = {client.post("/login", headers={"Authorization": sent}).status_code for _ in range(11)}
    assert answers == {401, 429}
    limits.assert_denied_by(limit)


def left(limits: IsolatedLimits, name: str) -> int:
    """What the last request has left of a limit."""
    decision = limits.decisions[-1].admission.decision
    assert decision is not None
    return next(outcome.remaining for outcome in decision.outcomes if outcome.limit.name == name)


def test_only_the_words_that_were_spoken_are_paid_for(client: TestClient, limits: IsolatedLimits) -> None:
    for asked in range(3):
        assert client.post("/complete").text.startswith("Warm the pot.")
        assert left(limits, "tokens") == 9500 - 14 * asked


def test_made_up_keys_are_counted_by_their_address(client: TestClient, limits: IsolatedLimits) -> None:
    for number in range(1, 4):
        client.get("/posts", headers={"X-API-Key": f"made-up-{number}"})
        assert (left(limits, "requests"), left(limits, "addresses")) == (59, 6000 - number)


def test_health_is_never_counted(client: TestClient, limits: IsolatedLimits) -> None:
    assert {client.get("/health").status_code for _ in range(100)} == {200}
    assert limits.decisions == []
