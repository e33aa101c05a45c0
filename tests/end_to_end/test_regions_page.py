"""The page of regions in a real Chromium, on the stores of two regions, one of which fails."""

from __future__ import annotations

import json
import re
from contextlib import ExitStack, closing
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, Page, ViewportSize, expect

from headgate import Limit, Limiter
from headgate.cli import main
from headgate.control.admin.serve import AdminServer
from headgate.control.admin.tokens import Tokens
from headgate.control.config import ConfigStore
from headgate.control.service import Actor, AdminService
from support.servers import RedisServer, wait_until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

HOUR = timedelta(hours=1)
EXCHANGED = Limit(100, HOUR, algorithm="fixed_window", region="reconciled", name="exchanged")
LEASED = Limit(10_000, HOUR, algorithm="fixed_window", region="reserved", name="leased")
POLICY = """
regions: {{home: eu, stores: {{eu: "{eu}", us: "{us}"}}}}
limits:
  - {{name: exchanged, by: global, bucket: "100/hour, fixed_window", region: reconciled}}
  - {{name: leased, by: global, bucket: "10000/hour, fixed_window", region: reserved}}
  - {{name: exact, by: global, bucket: 10/hour, region: central}}
"""
DESKTOP: ViewportSize = {"width": 1280, "height": 800}
PHONE: ViewportSize = {"width": 390, "height": 800}


class Regions:
    """Two regions with a limiter in each, and an admin server that sees both."""

    def __init__(self, place: Path, eu: RedisServer, us: RedisServer, namespace: str, stack: ExitStack) -> None:
        self.us = us
        urls = {"eu": eu.url, "us": us.url}
        options: Any = {"regions": urls, "home": "eu", "namespace": namespace, "budget": 0.5}
        self.limiters = {
            name: stack.enter_context(closing(Limiter(url, region=name, **options))) for name, url in urls.items()
        }
        url = f"sqlite:///{place}/config.db"
        self.store = stack.enter_context(closing(ConfigStore(url)))
        self.put(POLICY.format(**urls))
        self.service = AdminService(self.store, namespace=namespace)
        self.tokens = stack.enter_context(closing(Tokens(url)))
        self.server = stack.enter_context(AdminServer(self.service, self.tokens, port=0))

    def put(self, policy: str) -> None:
        self.store.put_policy(policy, author="ada", reason="tests")

    def use(self, **tokens: int) -> None:
        """Use the exchanged limit, and wait until the other region knows it."""
        for region, cost in tokens.items():
            assert self.limiters[region].check(EXCHANGED.by(), cost=cost).allowed
            self.limiters[region].check(LEASED.by())
        wait_until(self._is_exchanged, "the exchange of usage")

    def _is_exchanged(self) -> bool:
        regions = self.service.regions.overview().regions
        known = {each.region: each.known for region in regions for each in region.imports}
        return known == {region.name: region.shared for region in regions} and regions[0].held > 0


@pytest.fixture
def regions(tmp_path: Path, redis7: RedisServer, server: RedisServer, unique: str) -> Iterator[Regions]:
    with ExitStack() as stack:
        yield Regions(tmp_path, redis7, server, unique, stack)


@pytest.fixture
def visit(regions: Regions, browser: Browser) -> Iterator[Callable[..., Page]]:
    """Opens the page as a person of a role. At the end: no error in the console."""
    errors: list[str] = []
    with ExitStack() as stack:

        def opened(*, role: Any = "operator", viewport: ViewportSize = DESKTOP) -> Page:
            context = browser.new_context(viewport=viewport)
            stack.callback(context.close)
            context.set_default_timeout(10_000)
            page = context.new_page()
            page.on("console", lambda said: errors.append(said.text) if said.type == "error" else None)
            page.on("pageerror", lambda error: errors.append(f"{error}"))
            page.goto(regions.server.link(regions.tokens.make(f"{role} otto", role, by="tests").token))
            page.get_by_role("link", name="Regions").click()
            return page

        yield opened
    assert errors == []


def cells(page: Page, table: str, name: str) -> dict[str, str]:
    """The cells of a row by the heads of their columns."""
    row = page.get_by_role("table", name=table).get_by_role("row", name=re.compile(f"^{name}"))
    found: dict[str, str] = row.locator("td[data-name]").evaluate_all(
        "cells => Object.fromEntries(cells.map(cell => [cell.dataset.name, cell.innerText]))"
    )
    return found


def test_page_follows_usage_and_the_failure_of_a_region(regions: Regions, visit: Callable[..., Page]) -> None:
    regions.use(eu=30, us=12)
    page = visit()
    expect(page.get_by_role("row", name=re.compile("^eu .*home"))).to_contain_text("reachable")
    eu, exchanged = cells(page, "Regions and their state", "eu"), cells(page, "Limits that", "exchanged")
    assert (eu["Used"], eu["Owes"], eu["Unread"], eu["Processes"]) == ("30", "0", "0", "1")
    assert int(eu["Holds"].replace(",", "")) > 0
    assert re.fullmatch(r"[\d.]+ s", eu["Data age"])
    assert exchanged["Used"].split("\n") == ["42", "eu 30, us 12"]
    assert (exchanged["Bound"].split("\n")[0], exchanged["Over now"]) == ("100", "0")
    assert cells(page, "Limits that", "exact")["Latency"] == "1 round trip to eu, within 500 ms"
    assert cells(page, "Limits that", "leased")["Over now"] == "–"
    assert cells(page, "Usage that each", "eu")["Known"] == "12"
    regions.use(eu=50, us=40)  # together more than the limit: each was admitted before it knew of the other
    expect(page.get_by_role("row", name=re.compile("^exchanged"))).to_contain_text("132")
    assert cells(page, "Limits that", "exchanged")["Over now"] == "32"
    regions.us.stop()
    expect(page.get_by_text("us cannot be reached from here.")).to_be_visible()
    expect(page.get_by_role("row", name=re.compile("^us .*unreachable"))).to_contain_text(f"{regions.us.port}")
    assert cells(page, "Regions and their state", "eu")["Unread"] == "unknown"
    watching = visit(role="viewer")
    expect(watching.get_by_role("row", name=re.compile("^us"))).to_have_text(re.compile("its store cannot be read"))
    expect(watching.get_by_text(f"{regions.us.port}")).to_have_count(0)


def test_page_fits_the_screen_and_is_accessible(regions: Regions, visit: Callable[..., Page]) -> None:
    regions.use(eu=3, us=1)
    page = visit()
    page.get_by_text("What the columns mean").click()
    for viewport in (DESKTOP, PHONE):
        page.set_viewport_size(viewport)
        assert page.evaluate("document.documentElement.scrollWidth") <= viewport["width"]
        found = Axe().run(page).response["violations"]
        assert [(each["id"], each["nodes"][0]["html"]) for each in found] == []


def test_page_says_why_there_is_nothing_to_show(regions: Regions, visit: Callable[..., Page]) -> None:
    regions.put("limits: [{by: ip, bucket: 10/hour}]")
    page = visit()
    expect(page.get_by_text("The policy has no regions; add regions: with the stores of all regions.")).to_be_visible()
    regions.put('regions: {home: eu, stores: {eu: "redis://:${NO_SUCH_PASSWORD}@127.0.0.1:1/0"}}\nlimits: []')
    expect(page.get_by_text("needs the environment variable NO_SUCH_PASSWORD, which is not set")).to_be_visible()


def test_command_and_api_show_the_same(
    regions: Regions, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HEADGATE_ADMIN", regions.server.url)
    monkeypatch.setenv("HEADGATE_TOKEN", regions.tokens.make("eve", "viewer", by="tests").text)
    regions.use(eu=1, us=7)
    assert main(["regions", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [(each["name"], each["shared"]) for each in found["regions"]] == [("eu", 1), ("us", 7)]
    assert found["limits"][0]["used"] == {"eu": 1, "us": 7}
    seen = regions.service.regions.overview(Actor("eve", "viewer"))
    assert [each.name for each in seen.limits] == [each["name"] for each in found["limits"]]
    assert main(["regions"]) == 0
    assert capsys.readouterr().out.splitlines()[1].startswith("eu (home)  reachable")
