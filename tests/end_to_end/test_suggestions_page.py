"""Suggested limits in a real Chromium and in the API, from a decision log on disk."""

from __future__ import annotations

import json
import time
from contextlib import ExitStack, closing
from itertools import count
from typing import TYPE_CHECKING, Any
from urllib.error import HTTPError
from urllib.parse import quote
from urllib.request import Request, urlopen

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, Page, ViewportSize, expect

from headgate.control.admin.serve import AdminServer
from headgate.control.admin.tokens import Tokens
from headgate.control.config import ConfigStore
from headgate.control.service import AdminService
from headgate.policy import read
from support.decision_logs import write_decision_log

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

DESKTOP: ViewportSize = {"width": 1280, "height": 800}
PHONE: ViewportSize = {"width": 390, "height": 800}
GOAL = "reject at most 1% of requests, total below 100/s"


class Site:
    """An admin server with a decision log of the last days."""

    def __init__(self, place: Path, stack: ExitStack) -> None:
        write_decision_log(place / "decisions.db", until_us=time.time_ns() // 1000)
        url = f"sqlite:///{place}/headgate.db"
        self.store = stack.enter_context(closing(ConfigStore(url)))
        self.store.put_policy("limits: [{name: all, by: tenant, bucket: 5/minute}]", author="ada", reason="first")
        service = AdminService(self.store, log=f"sqlite:///{place}/decisions.db")
        self.tokens = stack.enter_context(closing(Tokens(url)))
        self.server = stack.enter_context(AdminServer(service, self.tokens, port=0))
        self._numbers = count()

    def token(self, role: Any) -> Any:
        return self.tokens.make(f"{role} {next(self._numbers)}", role, by="tests")

    def get(self, path: str, role: Any) -> tuple[int, Any]:
        """The status and the JSON of an answer of the API."""
        authorization = f"Bearer {self.token(role).text}"
        request = Request(f"{self.server.url}/api/v1{path}", headers={"Authorization": authorization})
        try:
            with urlopen(request, timeout=30) as response:
                return response.status, json.load(response)
        except HTTPError as error:
            with error:
                return error.code, json.load(error)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    with ExitStack() as stack:
        yield Site(tmp_path_factory.mktemp("site"), stack)


@pytest.fixture
def visit(site: Site, browser: Browser) -> Iterator[Callable[..., Page]]:
    """Opens the page of the policy as a person of a role. At the end: no error in the console."""
    errors: list[str] = []
    with ExitStack() as stack:

        def opened(*, role: Any = "operator", viewport: ViewportSize = DESKTOP, scheme: Any = "light") -> Page:
            context = browser.new_context(viewport=viewport, color_scheme=scheme)
            stack.callback(context.close)
            context.set_default_timeout(10_000)
            page = context.new_page()
            page.on("console", lambda said: errors.append(said.text) if said.type == "error" else None)
            page.on("pageerror", lambda error: errors.append(f"{error}"))
            page.goto(site.server.link(site.token(role).token))
            page.get_by_role("link", name="Policy", exact=True).click()
            return page

        yield opened
    assert [error for error in errors if "422" not in error and "403" not in error] == []


def suggest(page: Page, goal: str) -> None:
    page.get_by_role("textbox", name="Goal").fill(goal)
    page.get_by_role("button", name="Suggest").click()


def test_suggestion_shows_its_reasons_and_changes_nothing(site: Site, visit: Callable[..., Page]) -> None:
    page = visit()
    page.get_by_role("link", name="Suggested limits").click()
    suggest(page, GOAL)
    expect(page.get_by_text("Nothing is applied: merge what you agree with.")).to_be_visible()
    expect(page.get_by_text("keep the goal in the second", exact=False)).to_be_visible()
    expect(page.get_by_role("listitem").get_by_text("A lower limit would first reject")).to_be_visible()
    expect(page.get_by_role("table", name="Policy document")).to_contain_text("name: per-client")
    clients = page.get_by_role("table", name="Clients that a lower limit would reject first").get_by_role("row")
    expect(clients.nth(1)).to_contain_text("tenant")
    page.get_by_text("Show as table").click()
    expect(page.get_by_role("row", name="(suggested)")).to_be_visible()
    assert site.store.version == 1, "nothing was written"


def test_mistake_in_the_goal_is_explained(visit: Callable[..., Page]) -> None:
    page = visit()
    page.get_by_role("link", name="Suggested limits").click()
    suggest(page, "reject few")
    expect(page.get_by_text("goal 'reject few' is not understood; write")).to_be_visible()
    expect(page.get_by_role("textbox", name="Goal")).to_have_value("reject few")


def test_only_operators_see_the_page(site: Site, visit: Callable[..., Page]) -> None:
    page = visit(role="support")
    expect(page.get_by_role("link", name="Suggested limits")).to_have_count(0)
    page.goto(f"{site.server.url}/policy/suggestions")
    expect(page.get_by_text("Your role (support) can't ask for suggested limits. Ask an operator.")).to_be_visible()


def test_api_returns_the_policy_and_its_reasons(site: Site) -> None:
    status, found = site.get(f"/policy/suggestions?goal={quote(GOAL)}&days=7", "operator")
    assert (status, found["warnings"], found["troubles"]) == (200, [], [])
    assert {rule.name for rule in read(found["policy"]).rules} == {"per-client", "total"}
    assert found["limits"][0]["reasons"]
    assert site.get("/policy/suggestions", "support")[0] == 403
    status, problem = site.get("/policy/suggestions?goal=reject%20few", "operator")
    assert (status, "is not understood" in problem["detail"]) == (422, True)


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("viewport", [DESKTOP, PHONE], ids=["desktop", "phone"])
def test_page_is_accessible_and_fits_the_screen(
    visit: Callable[..., Page], viewport: ViewportSize, scheme: str
) -> None:
    page = visit(viewport=viewport, scheme=scheme)
    page.get_by_role("link", name="Suggested limits").click()
    suggest(page, GOAL)
    expect(page.get_by_role("listitem").get_by_text("A lower limit would first reject")).to_be_visible()
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    problems = Axe().run(page).response["violations"]
    assert [each["id"] for each in problems] == []
