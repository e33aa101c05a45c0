"""The shop of `make run`: its tour shows what it says, its pages show who comes, its policy does what it promises, it
opens and closes well."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import shutil
import stat
import struct
import subprocess
import sys
import termios
import time
import warnings
from collections import Counter
from contextlib import closing, suppress
from http.client import HTTPConnection
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.error import HTTPError
from urllib.parse import urlsplit
from urllib.request import Request, urlopen

import pytest
from examples.shop import simulated_clients, tour
from examples.shop.__main__ import main
from examples.shop.app import app
from examples.shop.data_directory import DataDirectory
from examples.shop.gate import ledger
from examples.shop.policy_file import PolicyFile

from headgate.control.admin.tokens import Tokens
from headgate.control.config import ConfigStore
from headgate.policy.loader import load
from headgate.testing import isolated_limits
from support.paths import ROOT
from support.servers import HOST, wait_until
from support.serving import WebServer

with warnings.catch_warnings(action="ignore"):  # it works as well with httpx as with the newer httpx2
    from starlette.testclient import TestClient

if TYPE_CHECKING:
    from collections.abc import Iterator

    from headgate.testing import IsolatedLimits
    from support.servers import RedisServer

POLICY = ROOT / "examples" / "shop" / "policy.yaml"
SHOP = ("-m", "examples.shop", "--port", "{port}")
LEFT_OUT = {"NO_COLOR", "HEADGATE_SECRET", "COLUMNS", "LINES"}
"""What whoever runs the tests has set, and a terminal says by itself."""
PLAIN = {name: value for name, value in os.environ.items() if name not in LEFT_OUT}

Asked = tuple[str, str, dict[str, str]]


def decided(log: str) -> list[tuple[str, str, str]]:
    """What was answered, on which route, and what is left, of each decision that was printed."""
    rows = re.findall(r"^\d\d:\d\d:\d\d  (\S.*?)  +(\w+ +/\S+)  .*?(\d+ left of \S+)?$", log, re.MULTILINE)
    return [(answer, re.sub(" +", " ", route), left) for answer, route, left in rows]


def opened(log: str) -> int:
    """At which port it says that it is open."""
    found = re.search(rf"open at http://{HOST}:(\d+)", log)
    assert found is not None, log
    return int(found[1])


def running(*words: str) -> list[str]:
    """The command lines of all processes that have these words among their arguments."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            arguments = (process / "cmdline").read_bytes().decode(errors="replace").split("\0")
            if {*words} <= {*arguments}:
                found.append(" ".join(arguments))
    return found


# ------------------------------------------------------------------ the tour


def check_tour(log: str, *, retry_after: str = "5") -> None:
    """It shows what it says."""
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
    assert [(answer, route) for answer, route, _ in rows[24:27]] == [
        *[("allowed", "POST /exports")] * 2,
        ("allowed", "POST /credits"),
    ]
    assert [answer for answer, _, _ in rows[27:]] == [*["allowed"] * 3, "allowed, not by writes", "403 blocked"]
    assert re.search(r'"paid_by":\["allowance"\]', log)
    assert re.search(r'"account":"exports/tea-house","left":\{"allowance":\d+,"credits":10,"pay as you go":50\}', log)
    assert re.search(rf"retry-after: {retry_after}$", log, re.MULTILINE)
    assert "Traceback" not in log
    assert not [key for key in re.findall(r"key (\w+)", log) if key.startswith("demo")], "a key is shown"
    for step in tour.STEPS:
        assert step.title in log


def test_curl_lines_are_what_the_tour_sends() -> None:
    lines = [ask.curl("http://shop") for step in tour.STEPS for ask in step.asks]
    assert lines[0] == "curl -i 'http://shop/search?q=tea'"
    assert 'curl -i -X POST -H "X-Forwarded-For: 203.0.113.$i" -u ada:guess http://shop/login' in lines
    assert "curl -i -H 'X-API-Key: demo-pro-key' --json '{\"text\": \"hello\"}' http://shop/posts" in lines
    login = tour.Ask("POST", "/login", login="ada:guess", visitor="203.0.113.$i")
    assert login.headers(4) == {"X-Forwarded-For": "203.0.113.4", "Authorization": "Basic YWRhOmd1ZXNz"}


# ------------------------------------------------------------------ the pages beside it


class Shop(WebServer):
    """A shop that is open, with its admin pages."""

    def __init__(self, folder: Path) -> None:
        self.policy = Path(shutil.copy(POLICY, folder))
        self.data = folder / "data"
        super().__init__(*SHOP, "--policy", f"{self.policy}", "--data", f"{self.data}")

    @property
    def links(self) -> list[str]:
        return re.findall(r"http://\S+/enter\?code=\S+", self.log)

    def overview(self) -> dict[str, Any]:
        """What the admin API says to somebody who may look."""
        if not hasattr(self, "_token"):
            with closing(Tokens(f"sqlite:///{self.data / 'config.db'}")) as tokens:
                self._token = tokens.make("a test", "viewer", by="a test").text
        asked = Request(f"{self.pages}/api/v1/overview", headers={"Authorization": f"Bearer {self._token}"})
        try:
            with urlopen(asked, timeout=10) as answer:
                found: dict[str, Any] = json.load(answer)
                return found
        except HTTPError as error:  # whoever asks all the time is limited there, too
            if error.code != 429:
                raise
            time.sleep(int(error.headers["Retry-After"]))
            return self.overview()

    @property
    def pages(self) -> str:
        parts = urlsplit(self.links[0])
        return f"{parts.scheme}://{parts.netloc}"


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shop]:
    with Shop(tmp_path_factory.mktemp("shop")) as shop:
        wait_until(lambda: "Ctrl-C closes the shop" in shop.log, "the tour to end")
        check_tour(shop.log)
        assert "\x1b" not in shop.log, "colour is for terminals"
        yield shop


def test_overview_moves(shop: Shop) -> None:
    def clients_of(part: str) -> set[str]:
        return {each["label"] for each in shop.overview()[part]}

    wait_until(
        lambda: any(each.startswith("ip 192.0.2.*") for each in clients_of("top_denied")), "the scraper's denial"
    )
    wait_until(lambda: "Corner Cafe" in clients_of("near"), "a client to be near its limit")
    first = shop.overview()
    assert [node["state"] for node in first["nodes"]] == ["ready"]
    assert first["troubles"] == []
    assert sum(first["series"]["allowed"]) > 20
    wait_until(lambda: sum(shop.overview()["series"]["allowed"]) > sum(first["series"]["allowed"]), "it to move")


def test_crowd_is_not_in_the_terminal(shop: Shop) -> None:
    tour_lines = sum(len(step.asks) * step.times for step in tour.STEPS)
    before = len(decided(shop.log))
    shop.ask("GET", "/posts", X_Forwarded_For="203.0.113.200")
    wait_until(lambda: len(decided(shop.log)) > before, "a line for what somebody sends")
    assert len(decided(shop.log)) <= tour_lines + 10, "lines of the tour, and of these tests"


def test_link_signs_in_once(shop: Shop) -> None:
    def follow(link: str) -> tuple[int, str]:
        parts = urlsplit(link)
        with closing(HTTPConnection(HOST, parts.port, timeout=10)) as connection:
            connection.request("GET", f"{parts.path}?{parts.query}")
            answer = connection.getresponse()
            answer.read()
            return answer.status, answer.getheader("set-cookie", "")

    first, second = shop.links
    assert first != second, "one before the tour, and one after it"
    status, cookie = follow(first)
    assert (status, "HttpOnly" in cookie) == (303, True)
    with urlopen(Request(f"{shop.pages}/", headers={"Cookie": cookie.partition(";")[0]}), timeout=10) as page:
        assert "Overview" in page.read().decode()
    assert follow(first) == (401, "")


def test_policy_can_be_edited_while_it_runs(shop: Shop) -> None:
    def allowed_at_once() -> str:
        return shop.ask("GET", "/search?q=tea", X_Forwarded_For="203.0.113.201").headers["x-ratelimit-limit"]

    text = POLICY.read_text("utf-8")
    assert allowed_at_once() == "60"
    shop.policy.write_text(text.replace("bucket: 60/minute", "bucket: 30/minute"))
    wait_until(lambda: allowed_at_once() == "30", "the new version to hold")
    wait_until(lambda: "in force: changed policy document policy.yaml" in shop.log, "the shop to tell of it")
    shop.policy.write_text(text.replace("bucket: 60/minute", "bukcet: 60/minute"))
    wait_until(lambda: "did you mean 'bucket'?" in shop.log, "the shop to refuse it")
    line = text[: text.index("bucket: 60/minute")].count("\n") + 1
    assert f"{shop.policy}:{line}:5: unknown field 'bukcet'" in shop.log
    assert allowed_at_once() == "30"
    assert "Traceback" not in shop.log


def test_no_key_is_in_the_files_of_the_example(shop: Shop) -> None:
    kept = b"".join(file.read_bytes() for file in shop.data.rglob("*") if file.is_file() and file.name != "lock")
    assert b"Tea House" in kept
    assert not re.findall(rb"(?:demo|crowd)-(?:pro|free|enterprise|launch|leaked|key)-\w+", kept)


# ------------------------------------------------------------------ opening and closing


def test_second_example_with_two_workers_runs_beside_the_first(shop: Shop, redis7: RedisServer, tmp_path: Path) -> None:
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 50, 120, 0, 0))
    policy = tmp_path / "policy.yaml"
    # This is about what is shown, and a machine that is busy with other tests may take longer than 5 ms, and longer for
    # the tour, which goes at the pace of a reader here, than the second after which a token is back.
    text = POLICY.read_text("utf-8").replace("budget: 5 ms", "budget: 2 s")
    policy.write_text(text.replace("bucket: 60/minute", "bucket: 60/hour"))
    command = [sys.executable, "-m", "examples.shop", "--demo", "--port", f"{shop.port}", "--data", f"{shop.data}"]
    command += ["--store", redis7.url, "--workers", "2", "--policy", f"{policy}"]
    environment = PLAIN | {"TERM": "xterm-256color"}
    with subprocess.Popen(command, cwd=ROOT, env=environment, stdin=theirs, stdout=theirs, stderr=theirs) as process:
        os.close(theirs)
        shown = b""
        with suppress(OSError):  # how Linux says that the other end of a terminal is closed
            while chunk := os.read(ours, 65536):
                shown += chunk
        assert process.wait(60) == 0
    os.close(ours)
    assert b"\x1b[32mallowed" in shown
    assert b"\x1b[31m429 requests" in shown
    log = re.sub(r"\x1b\[\d*m|\r", "", shown.decode())
    check_tour(log, retry_after=r"(29\d|300)")
    assert opened(log) > shop.port, "the port was taken"
    assert running("examples.shop.simulated_clients", f"{opened(log)}") == [], "the simulated clients have ended"
    beside = shop.data.with_name(f"{shop.data.name}-2")
    assert stat.S_IMODE((beside / "secret").stat().st_mode) == 0o600, "without HEADGATE_SECRET it has one of its own"


def test_ctrl_c_stops_the_example(shop: Shop) -> None:
    """The last test with this shop."""
    assert len(running("examples.shop.simulated_clients", f"{shop.port}")) == 1
    mine = shop.ask("GET", "/posts").headers
    assert int(mine["x-ratelimit-remaining"]) == int(mine["x-ratelimit-limit"]) - 1, "somebody took of what is yours"
    assert shop.interrupt() == 0
    assert "Traceback" not in shop.log
    assert running("examples.shop.simulated_clients", f"{shop.port}") == []


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--workers", "4"], "4 workers would count apart from each other in memory; give them a store to share"),
        (["--policy", "/nowhere/policy.yaml"], "/nowhere/policy.yaml: cannot be read"),
    ],
    ids=["workers without Redis", "no policy"],
)
def test_what_cannot_work_is_said_before_it_opens(
    options: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        status: Any = main(options)
    except SystemExit as ended:
        status = ended.code
    said = capsys.readouterr()
    assert (status, said.out) == (2, "")
    assert told in said.err


def test_each_route_fails_in_its_own_way_when_the_store_is_away(tmp_path: Path) -> None:
    with WebServer(*SHOP, "--no-traffic", "--store", f"redis://{HOST}:1/0", "--data", f"{tmp_path}") as shop:
        assert [shop.ask("POST", "/login").status, shop.ask("GET", "/search?q=tea").status] == [503, 200]
        webhooks = Counter(reply.status for reply in shop.burst(30, clients=6, method="POST", path="/webhooks/git"))
        assert 6 <= webhooks[202] < 30, "a fifth of 30 a second is counted in the process"
        assert webhooks[429] == 30 - webhooks[202]


# ------------------------------------------------------------------ the file and the store


def test_only_a_change_of_the_file_puts_it_into_the_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HEADGATE_SECRET", "for tests only, as long as it has to be")
    policy = tmp_path / "policy.yaml"

    def limit() -> int:
        return config.policy().rules[0].limit.quota

    with closing(ConfigStore(f"sqlite:///{tmp_path}/config.db")) as config:
        file = PolicyFile(policy, config)
        policy.write_text("limits: [{name: all, by: ip, bucket: 1/minute}]")
        file.begin()
        policy.write_text("limits: [{name: all, by: ip, bucket: 2/minute}]")
        file.check()
        assert (config.version, limit()) == (2, 2)
        config.rollback(1, author="ada", reason="too much")
        file.check()
        assert (config.version, limit()) == (3, 1), "what was taken back on the pages stays so"
        policy.write_text("limits: [{name: all, by: ip, bukcet: 3/minute}]")
        file.check()
        policy.unlink()
        file.check()
        assert config.version == 3
        policy.write_text("limits: [{name: all, by: ip, bucket: 3/minute}]")
        file.check()
        assert (config.version, limit()) == (4, 3)
        told = capsys.readouterr()
        assert told.err.count(f"{policy}:1:30: unknown field 'bukcet'") == 1
        assert re.findall(r"version (\d) in force: .* \((.*): (.*)\)", told.out) == [
            ("2", "policy.yaml", "the file was changed"),
            ("3", "ada", "too much"),
            ("4", "policy.yaml", "the file was changed"),
        ]


def test_example_home_is_exclusive_and_keeps_its_secret(tmp_path: Path) -> None:
    with closing(DataDirectory(tmp_path / "shop")) as first, closing(DataDirectory(tmp_path / "shop")) as second:
        assert (first.folder.name, second.folder.name) == ("shop", "shop-2")
        secret = first.secret()
        assert len(secret) == 64
        assert secret != second.secret()
    with closing(DataDirectory(tmp_path / "shop")) as again:
        assert again.folder == first.folder
        assert again.secret() == secret


# ------------------------------------------------------------------ the crowd


def visits_of(seconds: float, seed: int = 1) -> list[simulated_clients.Visit]:
    return list(takewhile(lambda visit: visit.at < seconds, simulated_clients.visits(seed)))


def test_seed_always_sends_the_same_crowd() -> None:
    assert visits_of(30) == visits_of(30)
    assert visits_of(30) != visits_of(30, seed=2)


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_simulated_traffic_is_bounded_and_covers_all_clients(seed: int) -> None:
    found = visits_of(300, seed)
    times = [visit.at for visit in found]
    assert times == sorted(times)
    seconds = Counter(int(at) for at in times)
    assert len(seconds) == 300
    assert max(seconds.values()) == simulated_clients.MOST_A_SECOND, "a launch comes up to it"
    assert min(seconds.values()) < 25, "there are waves"
    assert {visit.habit for visit in found if visit.at < 25} == {habit.name for habit in simulated_clients.HABITS}


def test_crowd_takes_nothing_of_what_the_tour_and_you_have() -> None:
    theirs = {(ask.key, ask.login) for step in tour.STEPS for ask in step.asks} - {("demo-leaked-key", None)}
    for visit in visits_of(60):
        assert visit.headers["x-crowd"] == visit.habit
        assert not visit.ask.visitor.startswith("203.0.113.")
        assert (visit.ask.key, visit.ask.login) == (None, None) or (visit.ask.key, visit.ask.login) not in theirs


def test_simulated_traffic_ends_with_its_parent() -> None:
    command = [sys.executable, "-m", "examples.shop.simulated_clients", "--port", "1"]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE) as process:
        assert process.stdin is not None
        process.stdin.close()
        assert process.wait(10) == 0


# ------------------------------------------------------------------ the policy, request by request


@pytest.fixture
def limits() -> Iterator[IsolatedLimits]:
    with isolated_limits() as limits:
        yield limits


@pytest.fixture
def client(limits: IsolatedLimits) -> Iterator[TestClient]:
    with TestClient(app, client=(HOST, 50000)) as client:
        yield client


def test_policy_has_nothing_to_complain_about() -> None:
    assert load(POLICY).warnings == ()


@pytest.mark.parametrize(
    ("key", "quota"),
    [(None, 60), ("demo-free-key", 60), ("unknown", 60), ("demo-pro-key", 600), ("demo-launch-key", 1200)],
)
def test_key_has_the_numbers_of_its_tier(client: TestClient, key: str | None, quota: int) -> None:
    answer = client.get("/posts", headers={"X-API-Key": key} if key else {})
    assert answer.headers["ratelimit-policy"].startswith(f'"requests";q={quota};w=60')


def test_exports_are_paid_by_the_plan_then_by_credits(client: TestClient) -> None:
    ledger.newest_number()  # creates its tables, which can take longer than the gate waits for it

    def export(key: str) -> Any:
        return client.post("/exports", headers={"X-API-Key": "demo-free-key", "Idempotency-Key": key})

    first, retry, *others = (export(key) for key in ("1", "1", "2", "3", "4", "5"))
    assert (first.status_code, first.json()) == (retry.status_code, retry.json()) == (201, first.json())
    assert [answer.json()["paid_by"] for answer in (first, *others)] == [["allowance"]] * 5
    refused = export("6")
    assert (refused.status_code, refused.json()["violated-policies"]) == (429, ["exports"])
    for _ in range(2):
        headers = {"X-API-Key": "demo-free-key", "Idempotency-Key": "order"}
        assert client.post("/credits", headers=headers).status_code == 201
    wait_until(lambda: export("6").status_code == 201, "the credits to be noticed")
    assert export("6").json()["paid_by"] == ["credits"]
    assert export("1").json() == first.json()
    plan = client.get("/plan", headers={"X-API-Key": "demo-free-key"}).json()
    assert plan["account"] == "exports/pocket-zine"
    assert 9 <= plan["left"]["credits"] <= 10, "one may not be written yet"


@pytest.mark.parametrize("key", [None, "unknown", "demo-leaked-key"])
def test_only_customers_export(client: TestClient, key: str | None) -> None:
    for path in ("/exports", "/credits"):
        answer = client.post(path, headers={"X-API-Key": key} if key else {})
        assert answer.status_code == (403 if key == "demo-leaked-key" else 401)


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


def test_printed_address_opens_the_page_of_the_example(
    client: TestClient, limits: IsolatedLimits, monkeypatch: pytest.MonkeyPatch
) -> None:
    without = client.get("/")
    monkeypatch.setenv("SHOP_ADMIN", "http://127.0.0.1:8001")
    page = client.get("/")
    assert (page.status_code, page.headers["content-type"]) == (200, "text/html; charset=utf-8")
    assert '<a class="button" href="http://127.0.0.1:8001">' in page.text
    assert "Admin pages" not in without.text
    for step in tour.STEPS:
        assert step.title.replace("'", "&#x27;") in page.text
        assert f"/{step.asks[0].path.split('?')[0].strip('/')}" in page.text
    assert limits.decisions == [], "it costs nothing"
