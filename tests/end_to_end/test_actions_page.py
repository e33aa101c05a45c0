"""Actions from end to end: a browser that is challenged, and the people who see what was done and undo it."""

from __future__ import annotations

import json
import threading
import time
from contextlib import ExitStack, closing
from datetime import timedelta
from itertools import count
from socketserver import ThreadingMixIn
from typing import TYPE_CHECKING, Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, Page, ViewportSize, expect

from headgate import Limiter
from headgate.abuse.challenge import COOKIE, ChallengeSigner
from headgate.abuse.model import AbuseScenario, ActionStep, Finding, Threshold
from headgate.adapters.wsgi import HeadgateMiddleware
from headgate.cli import main
from headgate.control.admin.serve import AdminServer
from headgate.control.admin.tokens import Tokens
from headgate.control.config import ConfigStore
from headgate.control.plane import ControlPlane
from headgate.control.service import AdminService
from support.servers import wait_until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from support.servers import RedisServer

SECRET = "sixteen bytes or more"
DESKTOP: ViewportSize = {"width": 1280, "height": 800}
PHONE: ViewportSize = {"width": 390, "height": 800}
EVIDENCE = "45 accounts were tried from {} in one minute"
POLICY = """
limits: [{name: all, by: ip, bucket: 1000/minute}]
abuse:
  scenarios:
    credential-stuffing: {grace: 2 hours}
"""


class Server(ThreadingMixIn, WSGIServer):
    daemon_threads = True


class Quiet(WSGIRequestHandler):
    def log_message(self, *_: Any) -> None:
        """Nothing is printed."""


class Site:
    """An app behind a gate with a control plane, and the admin server beside it."""

    def __init__(self, place: Path, redis: RedisServer, namespace: str, stack: ExitStack) -> None:
        url = f"sqlite:///{place}/config.db"
        self.config = stack.enter_context(closing(ConfigStore(url, secret=SECRET)))
        self.config.put_policy(POLICY, author="ada", reason="first")
        control = ControlPlane(url, log=None, metrics=False)
        self.app = HeadgateMiddleware(_welcome, None, redis.url, control=control, secret=SECRET, namespace=namespace)
        self.gate = self.app.gate
        stack.callback(self.gate.close)
        self.server = make_server("127.0.0.1", 0, self.app, Server, Quiet)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        stack.callback(self.server.server_close)
        stack.callback(self.server.shutdown)
        counters = stack.enter_context(Limiter(redis.url, namespace=namespace))
        self.service = AdminService(self.config, counters=counters, secret=SECRET)
        self.tokens = stack.enter_context(closing(Tokens(url)))
        self.admin = stack.enter_context(AdminServer(self.service, self.tokens, port=0))
        self._numbers = count()

    def token(self, role: Any) -> Any:
        return self.tokens.make(f"{role} {next(self._numbers)}", role, by="tests")

    def act(self, value: str, *, name: str = "credential-stuffing", shadow: bool = False, **step: Any) -> None:
        step = {"action": "block", "duration": timedelta(minutes=10), **step}
        window = timedelta(minutes=1)
        scenario = AbuseScenario(name, "ip", (Threshold("accounts", 20),), window, (ActionStep(**step),), shadow=shadow)
        evidence = EVIDENCE.format(value)
        self.gate.actions.apply(Finding(name, "ip", value, 0, "accounts", 45, 20, evidence), scenario)
        self.gate.actions.flush()

    def ask(self, method: str, path: str, role: Any = "support", reason: str = "") -> tuple[int, Any]:
        """The status and the JSON of an answer of the API."""
        headers = {"Authorization": f"Bearer {self.token(role).text}", "Headgate-Reason": reason}
        headers |= {"Idempotency-Key": f"test-{next(self._numbers)}"} if method == "DELETE" else {}
        request = Request(f"{self.admin.url}/api/v1{path}", method=method, headers=headers)
        try:
            with urlopen(request, timeout=30) as response:
                return response.status, json.load(response)
        except HTTPError as error:
            with error:
                return error.code, json.load(error)

    def active(self) -> dict[str, Any]:
        _, found = self.ask("GET", "/actions?state=active", "viewer")
        return {each["who"]["value"]: each for each in found["items"]}


class Forgetful(ChallengeSigner):
    """Accepts no solution, like the gates of a fleet without a common secret."""

    def is_valid(self, *_: Any, **__: Any) -> bool:
        return False


def _welcome(environ: Any, start_response: Any) -> list[bytes]:
    start_response("200 OK", [("Content-Type", "text/html")])
    return [f"<p>welcome, {environ['REQUEST_METHOD']}</p><form method=post><button>Log in</button></form>".encode()]


@pytest.fixture
def site(tmp_path: Path, redis7: RedisServer, unique: str) -> Iterator[Site]:
    with ExitStack() as stack:
        yield Site(tmp_path, redis7, unique, stack)


@pytest.fixture
def visit(browser: Browser) -> Iterator[Callable[..., Page]]:
    """Opens a URL in a window of its own. At the end: no error in the console but of refused requests."""
    errors: list[str] = []
    with ExitStack() as stack:

        def opened(url: str, viewport: ViewportSize = DESKTOP, scheme: Any = "light") -> Page:
            context = browser.new_context(viewport=viewport, color_scheme=scheme)
            stack.callback(context.close)
            context.set_default_timeout(20_000)
            page = context.new_page()
            page.on("console", lambda said: errors.append(said.text) if said.type == "error" else None)
            page.on("pageerror", lambda error: errors.append(f"{error}"))
            page.goto(url)
            return page

        yield opened
    assert [error for error in errors if "403" not in error and "favicon" not in error] == []


@pytest.mark.parametrize(("viewport", "scheme"), [(DESKTOP, "light"), (PHONE, "dark")], ids=["desktop", "phone"])
def test_browser_solves_the_challenge_and_gets_the_page(
    site: Site, visit: Callable[..., Page], viewport: ViewportSize, scheme: str
) -> None:
    site.act("127.0.0.1", action="challenge", difficulty=12)
    page = visit(f"{site.url}/items?q=1", viewport, scheme)
    expect(page.get_by_text("welcome, GET")).to_be_visible(timeout=20_000)
    assert page.url == f"{site.url}/items?q=1"
    (cookie,) = [each for each in page.context.cookies() if each["name"] == COOKIE]
    assert (cookie["sameSite"], cookie["path"]) == ("Lax", "/")
    assert 3000 < cookie["expires"] - time.time() <= 3600
    page.goto(f"{site.url}/other")
    expect(page.get_by_text("welcome, GET")).to_be_visible()
    page.get_by_role("button", name="Log in").click()
    expect(page.get_by_text("welcome, POST")).to_be_visible()
    assert site.gate.action_counts.challenges["presented"] >= 1
    assert site.gate.action_counts.challenges["failed"] == 0


def test_page_of_the_challenge_fits_a_phone_is_accessible_and_sends_nothing_twice(
    site: Site, visit: Callable[..., Page]
) -> None:
    page = visit(site.url, PHONE)
    expect(page.get_by_text("welcome, GET")).to_be_visible()
    site.act("127.0.0.1", action="challenge", difficulty=24)
    page.get_by_role("button", name="Log in").click()  # half a minute of work, in which the page can be looked at
    expect(page.get_by_role("heading", name="Checking your browser")).to_be_visible()
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    for scheme in ("light", "dark"):
        page.emulate_media(color_scheme=scheme)  # type: ignore[arg-type] # one of these
        context = page.context.browser.new_context(viewport=PHONE, bypass_csp=True, color_scheme=scheme)  # type: ignore[union-attr,arg-type]
        same = context.new_page()
        same.goto(site.url)
        found = Axe().run(same).response["violations"]
        assert [(each["id"], each["nodes"][0]["html"]) for each in found] == []
        context.close()
    page.goto("about:blank")
    (action,) = site.active().values()
    assert site.ask("DELETE", f"/actions/{action['id']}", reason="to be replaced")[0] == 200
    wait_until(lambda: not site.gate._live.restrictions.find({"address": "127.0.0.1"}, site.gate.now_us()), "its end")
    page.goto(site.url)
    expect(page.get_by_text("welcome, GET")).to_be_visible()
    site.act("127.0.0.1", name="scraping", action="challenge", difficulty=8)
    page.get_by_role("button", name="Log in").click()
    expect(page.get_by_text("Continue to send your request again.")).to_be_visible()


def test_browser_whose_solution_does_not_help_stops(site: Site, visit: Callable[..., Page]) -> None:
    site.act("127.0.0.1", action="challenge", difficulty=8)
    actions = site.gate._client_actions
    signer = actions._signer
    actions._signer = Forgetful(b"the secret of this gate")
    page = visit(site.url)
    expect(page.get_by_text("The check did not succeed.")).to_be_visible(timeout=20_000)
    actions._signer = signer
    page.get_by_role("button", name="Try again").click()
    expect(page.get_by_text("welcome, GET")).to_be_visible()


def test_page_explains_actions_and_undoes_them_with_one_click(site: Site, visit: Callable[..., Page]) -> None:
    site.act("198.51.100.7")
    site.act("198.51.100.8", action="delay", delay=timedelta(seconds=2))
    site.act("198.51.100.9", name="scraping", action="tighten", shadow=True)
    page = visit(site.admin.link(site.token("support").token), PHONE)
    page.goto(f"{site.admin.url}/actions")
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    assert Axe().run(page).response["violations"] == []
    page.set_viewport_size(DESKTOP)
    row = page.get_by_role("row", name="198.51.100.7")
    expect(row).to_contain_text(f": {EVIDENCE.format('198.51.100.7')} (credential-stuffing).")
    expect(row).to_contain_text("Blocked until")
    expect(page.get_by_role("row", name="198.51.100.9")).to_have_count(0)
    row.get_by_role("button", name="Undo").click()
    expect(page.get_by_text("Undid block of ip 198.51.100.7.")).to_be_visible()
    expect(page.get_by_role("row", name="198.51.100.7")).to_have_count(0)
    assert not site.service.blocks.list_live_only()
    site.act("198.51.100.7")
    assert "198.51.100.7" not in site.active(), "the grace time"
    page.get_by_role("link", name="Undone").click()
    expect(page.get_by_role("row", name="198.51.100.7")).to_contain_text("undone by support")
    page.get_by_role("link", name="Shadow mode").click()
    expect(page.get_by_role("row", name="198.51.100.9")).to_contain_text("Limits would be divided by 4 until")
    wait_until(lambda: len(site.service.audit.list(search="198.51.100").items) >= 4, "the audit log")
    found = {(each.author.partition(" ")[0], each.what) for each in site.service.audit.list(search="198.51.100").items}
    assert found == {
        ("headgate", "blocked ip 198.51.100.7"),
        ("headgate", "delayed ip 198.51.100.8"),
        ("headgate", "would have tightened ip 198.51.100.9"),
        ("support", "undid block of ip 198.51.100.7"),
    }
    entry = site.service.audit.list(search="198.51.100.8").items[0]
    assert entry.reason.startswith("Delayed by 2 s until ")


def test_roles_of_the_page_and_the_api(site: Site, visit: Callable[..., Page]) -> None:
    site.act("198.51.100.0/24")
    page = visit(site.admin.link(site.token("viewer").token))
    page.get_by_role("link", name="Actions", exact=True).click()
    expect(page.get_by_role("row", name="198.51.100.0/24")).to_be_visible()
    expect(page.get_by_role("button", name="Undo")).to_have_count(0)
    id = site.active()["198.51.100.0/24"]["id"]
    for role, status in (("viewer", 403), ("support", 403), ("operator", 200), ("operator", 200)):
        assert site.ask("DELETE", f"/actions/{id}", role, reason="a partner")[0] == status, role
    assert site.ask("DELETE", f"/actions/{'0' * 16}", reason="a partner")[0] == 404
    assert site.ask("DELETE", "/actions/nothing", reason="a partner")[0] in (400, 404, 422)
    _, found = site.ask("GET", "/actions?state=undone&search=198.51")
    assert found["items"][0]["remembered_until_us"] - found["items"][0]["undone_us"] == 2 * 3600 * 1_000_000


def test_command_lists_and_undoes(site: Site, capsys: pytest.CaptureFixture[str], monkeypatch: Any) -> None:
    site.act("198.51.100.7")
    monkeypatch.setenv("HEADGATE_ADMIN", site.admin.url)
    monkeypatch.setenv("HEADGATE_TOKEN", site.token("support").text)
    assert main(["actions", "list", "--utc"]) == 0
    printed = capsys.readouterr().out
    assert "198.51.100.7" in printed
    assert "45 accounts were tried" in printed
    id = site.active()["198.51.100.7"]["id"]
    assert main(["actions", "undo", id]) == 2
    assert "--reason" in capsys.readouterr().err
    assert main(["actions", "undo", id, "--reason", "a partner's crawler"]) == 0
    assert capsys.readouterr().out.strip() == "undid block of ip 198.51.100.7"
    assert main(["actions", "list"]) == 0
    assert "No actions." in capsys.readouterr().err


def test_server_without_a_store_says_what_is_missing(tmp_path: Path, visit: Callable[..., Page]) -> None:
    url = f"sqlite:///{tmp_path}/config.db"
    with closing(ConfigStore(url)) as config, closing(Tokens(url)) as tokens:
        token = tokens.make("eve", "admin", by="tests").token
        with AdminServer(AdminService(config), tokens, port=0) as server:
            page = visit(server.link(token))
            page.goto(f"{server.url}/actions")
            expect(page.get_by_text("The admin server was started without --store")).to_be_visible()
            page.goto("about:blank")
