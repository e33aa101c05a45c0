"""The page of a customer, and the page on which support decides, in a real Chromium on a desktop and on a phone."""

from __future__ import annotations

from contextlib import ExitStack, closing
from typing import TYPE_CHECKING
from urllib.error import HTTPError
from urllib.request import urlopen

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, Page, ViewportSize, expect

from headgate.control.admin.serve import AdminServer
from headgate.control.admin.tokens import Tokens
from headgate.control.config import ConfigStore
from headgate.control.service import AdminService, ClientRef
from headgate.control.service.request_links import LIFETIME_US, Link

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

DESKTOP: ViewportSize = {"width": 1280, "height": 800}
PHONE: ViewportSize = {"width": 390, "height": 800}
POLICY = "limits: [{name: calls, by: tenant, bucket: 100/minute}, {name: all, by: global, bucket: 9000/minute}]"
ACME = ClientRef("tenant", "acme")


class RequestSite:
    def __init__(self, place: Path, stack: ExitStack) -> None:
        url = f"sqlite:///{place}/headgate.db"
        store = stack.enter_context(closing(ConfigStore(url)))
        store.put_policy(POLICY, author="ada", reason="begin")
        self.service = AdminService(store, secret="sixteen bytes or more")
        self.tokens = stack.enter_context(closing(Tokens(url)))
        self.server = stack.enter_context(AdminServer(self.service, self.tokens, port=0))

    def link(self, lifetime_us: int = LIFETIME_US) -> str:
        assert self.service.growth.signer is not None
        until_us = self.tokens.clock.now_us() + lifetime_us
        token = self.service.growth.signer.sign(Link(ACME, "Acme <Inc.>", "4b1f", until_us))
        return f"{self.server.url}/limit-request/{token}"


@pytest.fixture
def site(tmp_path: Path) -> Iterator[RequestSite]:
    with ExitStack() as stack:
        yield RequestSite(tmp_path, stack)


def check_page(page: Page) -> None:
    """Nothing is wider than the window, and no rule of accessibility is violated."""
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    assert Axe().run(page).response["violations"] == []


@pytest.mark.parametrize("viewport", [DESKTOP, PHONE], ids=["desktop", "phone"])
def test_customer_requests_and_support_approves(site: RequestSite, browser: Browser, viewport: ViewportSize) -> None:
    customer, support = browser.new_context(viewport=viewport), browser.new_context(viewport=viewport)
    with ExitStack() as stack:
        for context in (customer, support):
            stack.callback(context.close)
        page = customer.new_page()
        page.goto(site.link())
        expect(page.get_by_role("heading", name="Limits of Acme <Inc.>")).to_be_visible()
        expect(page.get_by_role("row", name="calls 100/minute")).to_be_visible()
        expect(page.get_by_text("9000")).to_have_count(0)  # only limits of its own
        page.get_by_label("You need").fill("lots")
        page.get_by_role("button", name="Send request").click()
        expect(page.get_by_role("alert")).to_contain_text("Not sent.")
        check_page(page)
        page.get_by_label("You need").fill("400")
        page.get_by_label("Why").fill("launch <b>friday</b>")
        page.get_by_role("button", name="Send request").click()
        expect(page.get_by_text("400/minute on calls, instead of 100/minute")).to_be_visible()
        check_page(page)

        desk = support.new_page()
        desk.goto(site.server.link(site.tokens.make("sue", "support", by="tests").token))
        desk.get_by_role("link", name="Requests").click()
        expect(desk.get_by_text("launch <b>friday</b>")).to_be_visible()
        check_page(desk)
        desk.locator("summary", has_text="Approve").click()
        desk.get_by_label("Reason").first.fill("known customer")
        check_page(desk)
        desk.get_by_role("button", name="Approve", exact=True).click()
        expect(desk.get_by_text("Request approved: the override applies now.")).to_be_visible()
        check_page(desk)
        (override,) = site.service.overrides.list().items
        assert (override.who, override.bucket, override.reason) == (ACME, "400/minute", "known customer")
        assert override.valid_until_us is not None
        page.reload()
        expect(page.get_by_text("approved")).to_be_visible()
        expect(page.get_by_role("row", name="calls 400/minute")).to_be_visible()


def test_support_declines_and_viewers_only_look(site: RequestSite, browser: Browser) -> None:
    growth = site.service.growth
    link = growth.open_link(site.link().rpartition("/")[2])
    request = growth.submit(link, limit="calls", wanted="400", message="")
    for role in ("viewer", "support"):
        context = browser.new_context(viewport=DESKTOP)
        page = context.new_page()
        page.goto(site.server.link(site.tokens.make(f"{role} sue", role, by="tests").token))  # type: ignore[arg-type] # of these
        page.get_by_role("link", name="Requests").click()
        if role == "viewer":
            expect(page.get_by_text("400/minute")).to_be_visible()
            expect(page.get_by_text("Decline")).to_have_count(0)
        else:
            page.locator("summary", has_text="Decline").click()
            page.locator(f"#decline-{request.id}-reason").fill("ask sales")
            page.get_by_role("button", name="Decline", exact=True).click()
            expect(page.get_by_text("Request declined.")).to_be_visible()
        context.close()
    assert growth.get(request.id).state == "declined"
    assert site.service.overrides.list().items == ()


def test_links_that_are_over_or_forged_say_so(site: RequestSite) -> None:
    for url in (site.link(lifetime_us=-1), site.link()[:-2], f"{site.server.url}/limit-request/x"):
        with pytest.raises(HTTPError) as refused:
            urlopen(url, timeout=10)
        with refused.value as answer:
            assert answer.code == 422
            assert "expired or is incomplete" in answer.read().decode()
