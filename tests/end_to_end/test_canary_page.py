"""Canaries on the policy pages, in a real Chromium: start, comparison, promotion and rollback."""

from __future__ import annotations

import re
import time
from contextlib import ExitStack, closing
from typing import TYPE_CHECKING, Any

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, Page, expect

from headgate.control.admin.serve import AdminServer
from headgate.control.admin.tokens import Tokens
from headgate.control.config import CanarySpec
from headgate.control.service.service import AdminService
from support.canary_fleet import BY, SECRET, CanaryFleet

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

STABLE = "limits:\n  - {name: all, by: ip, bucket: 1000/minute}\n"
CANDIDATE = STABLE.replace("1000", "900")
STRICT = STABLE + "  - {name: mistake, by: ip, bucket: 1/minute}\n"
DESKTOP = {"width": 1280, "height": 800}
PHONE = {"width": 360, "height": 740}


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[CanaryFleet]:
    # The pages compare the times of the fleet with that of the browser.
    start_us = time.time_ns() // 1000 - 60_000_000
    fleet = CanaryFleet(f"sqlite:///{tmp_path}/config.db", STABLE, "web-1", "web-2", "web-3", start_us=start_us)
    fleet.run(3)
    yield fleet
    fleet.close()


@pytest.fixture
def visit(fleet: CanaryFleet, tmp_path: Path, browser: Browser) -> Iterator[Callable[..., Page]]:
    """Opens a page as a person of a role. At the end: no error in the console."""
    errors: list[str] = []
    with ExitStack() as stack:
        service = AdminService(fleet.store, status_store=fleet.status_store, secret=SECRET, clock=fleet.clock)
        tokens = stack.enter_context(closing(Tokens(f"sqlite:///{tmp_path}/config.db")))
        server = stack.enter_context(AdminServer(service, tokens, port=0))

        def opened(path: str, *, role: Any = "operator", viewport: Any = DESKTOP) -> Page:
            context = browser.new_context(viewport=viewport)
            stack.callback(context.close)
            context.set_default_timeout(10_000)
            page = context.new_page()
            page.on("console", lambda said: errors.append(said.text) if said.type == "error" else None)
            page.on("pageerror", lambda error: errors.append(f"{error}"))
            page.goto(server.link(tokens.make(f"{role} otto", role, by="tests").token))
            page.goto(f"{server.url}{path}")
            return page

        yield opened
    assert [each for each in errors if "status of 409" not in each and "status of 422" not in each] == []


def start(page: Page, text: str, **fields: str) -> None:
    """Fill in the form of a canary on the page that edits the policy, and send it."""
    page.get_by_label("Document").fill(text)
    page.get_by_label("Reason").fill("less load")
    details = page.locator("details", has_text="Apply on some nodes first")
    if details.get_attribute("open") is None:
        details.locator("summary").click()
    for label, value in fields.items():
        page.get_by_label(label.replace("_", " ")).fill(value)
    page.get_by_role("button", name="Start canary").click()


def end(page: Page, action: str, button: str) -> None:
    page.locator("#canary summary", has_text=re.compile(f"^{action}$")).click()
    form = page.locator("#canary details[open]", has_text=button)
    form.get_by_label("Reason").fill("as the comparison says")
    form.get_by_role("button", name=button).click()


def row(page: Page, name: str) -> Any:
    return page.locator("#canary").get_by_role("row", name=re.compile(f"^{name}"))


def test_canary_is_started_compared_and_promoted(fleet: CanaryFleet, visit: Callable[..., Page]) -> None:
    page = visit("/policy/edit")
    start(page, CANDIDATE, Or_names_of_nodes="web-1", Observe_for="10m")
    expect(page.get_by_text("Canary started. Version 2.")).to_be_visible()
    expect(page.get_by_text("Candidate on web-1: 1 of 3 nodes.")).to_be_visible()
    canary = page.locator("#canary")
    expect(canary.locator(".badge", has_text="running")).to_be_visible()
    expect(canary).to_contain_text("No candidate nodes.")
    fleet.run(8)
    page.reload()
    expect(canary).to_contain_text("Within thresholds.")
    expect(canary).to_contain_text("Observed until")
    expect(row(page, "Rejections")).to_contain_text("0.0 %")
    expect(row(page, "Rejections").locator(".badge.good")).to_be_visible()
    expect(row(page, "Requests")).to_contain_text("2 processes")
    canary.locator("summary", has_text="Changes of the candidate").click()
    expect(canary.locator("tr.plus")).to_contain_text("900/minute")
    end(page, "Promote", "Promote to all nodes")
    expect(page.get_by_text("Candidate promoted. All servers use it within a second.")).to_be_visible()
    expect(canary.locator(".badge", has_text="promoted")).to_be_visible()
    expect(canary.get_by_role("button")).to_have_count(0)
    document = fleet.store.document()
    assert document is not None
    assert document.text == CANDIDATE


def test_canary_is_rolled_back_on_the_page_of_versions(fleet: CanaryFleet, visit: Callable[..., Page]) -> None:
    fleet.store.start_canary(STRICT, CanarySpec(nodes=("web-2",)), **BY)
    fleet.run(8)
    page = visit("/policy/versions", viewport=PHONE)
    canary = page.locator("#canary")
    expect(canary).to_contain_text("Threshold exceeded.")
    expect(canary).to_contain_text(re.compile(r"Rejections \d+\.\d % of requests with the candidate"))
    expect(row(page, "Rejections").locator(".badge.denied")).to_have_text("exceeded")
    end(page, "Roll back", "Roll back the canary")
    expect(page.get_by_text("Canary rolled back.")).to_be_visible()
    expect(canary).to_contain_text("Rolled back")
    assert fleet.state == "rolled back"
    fleet.run(1)
    assert fleet.gates["web-2"].policy_canary is None


def test_promotion_against_the_comparison_is_confirmed(fleet: CanaryFleet, visit: Callable[..., Page]) -> None:
    fleet.store.start_canary(STRICT, CanarySpec(nodes=("web-2",)), **BY)
    fleet.run(8)
    page = visit("/policy")
    end(page, "Promote", "Promote to all nodes")
    expect(page.get_by_role("heading", name="Promote the candidate?")).to_be_visible()
    expect(page.get_by_role("alert")).to_contain_text("Rejections")
    assert fleet.state == "running"
    page.get_by_role("button", name="Confirm").click()
    expect(page.get_by_text("Candidate promoted.")).to_be_visible()
    assert fleet.state == "promoted"


def test_errors_in_the_form_are_shown_next_to_their_fields(fleet: CanaryFleet, visit: Callable[..., Page]) -> None:
    page = visit("/policy/edit")
    start(page, CANDIDATE, Share_of_nodes="0")
    expect(page.get_by_text("Enter a whole number from 1 to 100.")).to_be_visible()
    start(page, CANDIDATE, Share_of_nodes="10", Observe_for="soon")
    expect(page.get_by_text(re.compile("cannot read .*soon"))).to_be_visible()
    assert page.get_by_label("Document").input_value() == CANDIDATE
    page.get_by_label("Promote after this time").check()
    start(page, CANDIDATE, Observe_for="")
    expect(page.get_by_text("Enter the time after which the candidate is promoted.")).to_be_visible()
    expect(page.get_by_label("Promote after this time")).to_be_checked()
    start(page, "limits: [{}]", Observe_for="10m")
    expect(page.get_by_role("alert")).to_contain_text("Not saved.")
    assert fleet.store.canary() is None
    start(page, CANDIDATE, Observe_for="10m")
    expect(page.get_by_text("Canary started.")).to_be_visible()
    page.goto(page.url.replace("/policy", "/policy/edit"))
    page.get_by_label("Document").fill(STRICT)
    page.get_by_label("Reason").fill("impatience")
    page.get_by_role("button", name="Save").click()
    expect(page.get_by_role("alert")).to_contain_text("a canary of policy.yaml is running")


@pytest.mark.parametrize("viewport", [DESKTOP, PHONE], ids=["desktop", "phone"])
def test_canary_fits_the_screen_and_is_accessible(
    fleet: CanaryFleet, visit: Callable[..., Page], viewport: dict[str, int]
) -> None:
    fleet.store.start_canary(STRICT, CanarySpec(nodes=("web-2",)), **BY)
    fleet.run(8)
    page = visit("/policy", viewport=viewport)
    for path in ("/policy", "/policy/versions", "/policy/versions/2", "/policy/edit", "/"):
        page.goto(f"{page.url.partition('/policy')[0]}{path}")
        page.evaluate("document.querySelectorAll('details').forEach(each => each.open = true)")
        assert page.evaluate("document.documentElement.scrollWidth") <= viewport["width"], path
        found = Axe().run(page).response["violations"]
        assert [(each["id"], each["nodes"][0]["html"]) for each in found] == [], path
    expect(page.get_by_role("row", name="web-2").locator(".badge", has_text="canary")).to_be_visible()


def test_viewer_sees_the_comparison_and_no_buttons(fleet: CanaryFleet, visit: Callable[..., Page]) -> None:
    fleet.store.start_canary(CANDIDATE, CanarySpec(nodes=("web-2",)), **BY)
    fleet.run(8)
    page = visit("/policy", role="viewer")
    expect(page.locator("#canary")).to_contain_text("Within thresholds.")
    expect(page.locator("#canary").get_by_text("Promote")).to_have_count(0)
    expect(page.locator("#canary").get_by_text("Roll back")).to_have_count(0)
