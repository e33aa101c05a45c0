"""The ledger in a real Chromium and in the API: accounts, grants, adjustments and statements."""

from __future__ import annotations

import json
from contextlib import ExitStack, closing
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, Page, ViewportSize, expect

from headgate import Calendar
from headgate.control.admin.serve import AdminServer
from headgate.control.admin.tokens import Tokens
from headgate.control.config import ConfigStore
from headgate.control.service import AdminService
from headgate.quotas import Ledger, QuotaPlan

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

DESKTOP: ViewportSize = {"width": 1280, "height": 800}
PHONE: ViewportSize = {"width": 390, "height": 800}


class LedgerSite:
    """An admin server with a ledger in the SQLite file of its config store."""

    def __init__(self, place: Path, stack: ExitStack, *, has_ledger: bool = True) -> None:
        url = f"sqlite:///{place}/headgate.db"
        self.ledger = stack.enter_context(closing(Ledger(url)))
        store = stack.enter_context(closing(ConfigStore(url)))
        self.service = AdminService(store, ledger=self.ledger if has_ledger else None)
        self.tokens = stack.enter_context(closing(Tokens(url)))
        self.server = stack.enter_context(AdminServer(self.service, self.tokens, port=0))
        self.api_tokens: dict[str, str] = {}

    def call(self, method: str, path: str, body: Any = None, *, role: Any = "operator", **headers: str) -> Any:
        """The status and the JSON of an answer of the API."""
        if role not in self.api_tokens:
            self.api_tokens[role] = self.tokens.make(f"{role} api", role, by="tests").text
        token = self.api_tokens[role]
        request = Request(
            f"{self.server.url}/api/v1{path}",
            None if body is None else json.dumps(body).encode(),
            {"Authorization": f"Bearer {token}", "Content-Type": "application/json", **headers},
            method=method,
        )
        try:
            with urlopen(request, timeout=10) as response:
                return response.status, json.load(response)
        except HTTPError as error:
            with error:
                return error.code, json.load(error)


@pytest.fixture
def site(tmp_path: Path) -> Iterator[LedgerSite]:
    with ExitStack() as stack:
        yield LedgerSite(tmp_path, stack)


@pytest.fixture
def visit(site: LedgerSite, browser: Browser) -> Iterator[Callable[..., Page]]:
    """Opens the list of accounts as a person of a role. At the end: no error in the console."""
    errors: list[str] = []
    with ExitStack() as stack:

        def opened(*, role: Any = "operator", viewport: ViewportSize = DESKTOP) -> Page:
            context = browser.new_context(viewport=viewport)
            stack.callback(context.close)
            context.set_default_timeout(10_000)
            page = context.new_page()
            page.on("console", lambda said: errors.append(said.text) if said.type == "error" else None)
            page.on("pageerror", lambda error: errors.append(f"{error}"))
            page.goto(site.server.link(site.tokens.make(f"{role} otto", role, by="tests").token))
            page.get_by_role("link", name="Ledger").click()
            return page

        yield opened
    assert [error for error in errors if "422" not in error] == []


def submit(page: Page, form: str, button: str, **fields: str) -> None:
    for name, text in fields.items():
        page.locator(f"#{form}-{name}").fill(text)
    page.get_by_role("button", name=button, exact=True).click()


def adjust(page: Page, amount: str) -> None:
    page.get_by_text("Adjust", exact=True).first.click()
    submit(page, "adjust", "Adjust", amount=amount, reason="ticket 4711")


def test_account_is_granted_adjusted_and_explained(site: LedgerSite, visit: Callable[..., Page]) -> None:
    page = visit()
    expect(page.get_by_text("No accounts yet.")).to_be_visible()
    submit(page, "grant", "Grant", account="acme", amount="1,000", source="credit pack", reason="invoice 2026-118")
    expect(page.get_by_role("heading", name="acme")).to_be_visible()
    expect(page.get_by_text("Granted 1,000 to acme.")).to_be_visible()
    site.ledger.charge("acme", 250, reference="req-1")
    adjust(page, "-50")
    expect(page.get_by_text("700 available")).to_be_visible()
    rows = page.get_by_role("table", name="Lines of the statement").get_by_role("row")
    expect(rows).to_have_count(4)
    expect(rows.nth(1)).to_contain_text("credit pack; invoice 2026-118")
    expect(rows.nth(3)).to_contain_text("ticket 4711")
    expect(page.get_by_text("at 250 a day, the rate of the last 1 day")).to_be_visible()
    actions = [(entry.author, entry.action) for entry in site.service.audit.list().items[:2]]
    assert actions == [("operator otto", "adjusted"), ("operator otto", "granted")]
    assert [(each.kind, each.author) for each in site.ledger.entries("acme")][::2] == [
        ("grant", "operator otto"),
        ("adjust", "operator otto"),
    ]


def test_account_shows_the_thresholds_that_it_has_reached(site: LedgerSite, visit: Callable[..., Page]) -> None:
    site.ledger.open_period("exports/acme", QuotaPlan("exports", 100, Calendar("month")))
    site.ledger.charge("exports/acme", 85)
    page = visit(role="viewer")
    page.get_by_role("link", name="exports/acme").click()
    rows = page.get_by_role("table", name="Usage alerts").get_by_role("row")
    expect(rows).to_have_count(3)
    expect(rows.nth(1)).to_contain_text("80 %")
    expect(rows.nth(1)).to_contain_text("85 of 100")
    expect(rows.nth(1)).to_contain_text("not sent")


def test_mistakes_are_explained_next_to_their_field(site: LedgerSite, visit: Callable[..., Page]) -> None:
    site.ledger.grant("acme", 10)
    page = visit()
    page.get_by_role("link", name="acme").click()
    adjust(page, "five")
    expect(page.get_by_text("Enter a whole number.")).to_be_visible()
    page.locator("#adjust-amount").fill("-11")
    page.get_by_role("button", name="Adjust", exact=True).click()
    expect(page.get_by_text("Not saved.")).to_be_visible()
    assert site.ledger.balance("acme") == 10


def test_double_click_adjusts_once(site: LedgerSite, visit: Callable[..., Page]) -> None:
    site.ledger.grant("acme", 10)
    page = visit()
    page.get_by_role("link", name="acme").click()
    page.get_by_text("Adjust", exact=True).first.click()
    page.locator("#adjust-amount").fill("5")
    page.locator("#adjust-reason").fill("ticket 4711")
    page.evaluate(
        """async () => {
            const form = document.querySelector("form[action='/ledger/adjustments']");
            const send = () => fetch(form.action, {method: "POST", body: new URLSearchParams(new FormData(form))});
            await Promise.all([send(), send()]);
        }"""
    )
    page.reload()
    expect(page.get_by_text("15 available")).to_be_visible()


def test_viewer_cannot_change_anything(site: LedgerSite, visit: Callable[..., Page]) -> None:
    site.ledger.grant("acme", 10)
    page = visit(role="viewer")
    expect(page.get_by_role("button", name="Grant")).to_have_count(0)
    page.get_by_role("link", name="acme").click()
    expect(page.get_by_text("Read-only.")).to_be_visible()
    body = {"account": "acme", "amount": 5, "reason": "mine"}
    for path in ("/ledger/grants", "/ledger/adjustments"):
        status, problem = site.call("POST", path, body, role="support")
        assert (status, problem["type"]) == (403, "role-too-low")
    assert site.ledger.balance("acme") == 10


@pytest.mark.parametrize("viewport", [DESKTOP, PHONE], ids=["desktop", "phone"])
def test_pages_fit_the_screen_and_are_accessible(
    site: LedgerSite, visit: Callable[..., Page], viewport: ViewportSize
) -> None:
    for number in range(3):
        site.ledger.grant(
            f"customer-{number}", 1_000_000, source="allowance", expires_at=datetime(2099, 1, 1, tzinfo=UTC)
        )
        site.ledger.charge(f"customer-{number}", 12_345)
    page = visit(viewport=viewport)
    for _ in range(2):
        assert page.evaluate("document.documentElement.scrollWidth") <= viewport["width"]
        found = Axe().run(page, options={"resultTypes": ["violations"]})
        assert found.violations_count == 0, found.generate_report()
        page.get_by_role("link", name="customer-1").first.click() if page.url.endswith("/ledger") else None
        expect(page.get_by_role("heading", name="customer-1")).to_be_visible()


def test_api_grants_once_and_lists_accounts(site: LedgerSite) -> None:
    body = {"account": "acme/eu", "amount": 100, "id": "invoice-1", "source": "credit pack", "reason": "invoice"}
    for _ in range(2):
        status, answer = site.call("POST", "/ledger/grants", body)
        assert (status, answer["what"]) == (200, "granted 100 to account acme/eu")
    status, problem = site.call("POST", "/ledger/grants", {**body, "amount": 200})
    assert (status, problem["type"]) == (422, "invalid")
    site.call("POST", "/ledger/grants", {**body, "account": "zeta", "id": None})
    assert site.call("POST", "/ledger/adjustments", {"account": "acme/eu", "amount": -30, "reason": "ticket"})[0] == 200
    assert site.call("GET", "/ledger/accounts?search=acme")[1]["items"] == [
        {"account": "acme/eu", "available": 70, "held": 0, "charged": 0}
    ]
    first = site.call("GET", "/ledger/accounts?most=1")[1]
    assert first["next"] == "acme/eu"
    assert [each["account"] for each in site.call("GET", f"/ledger/accounts?after={first['next']}")[1]["items"]] == [
        "zeta"
    ]
    view = site.call("GET", "/ledger/account?account=acme/eu")[1]
    assert (view["summary"]["available"], view["forecast"]["exhausted_us"]) == (70, None)
    assert [grant["source"] for grant in view["summary"]["grants"]] == ["credit pack"]


def test_statement_has_sums_and_lines(site: LedgerSite) -> None:
    site.ledger.grant("acme", 100)
    site.ledger.charge("acme", 40, reference="req-1")
    period = "since=2020-01-01T00:00:00Z&until=2120-01-01T00:00:00Z"
    status, found = site.call("GET", f"/ledger/statement?account=acme&{period}", role="viewer")
    assert (status, found["granted"], found["charged"], found["closing"]) == (200, 100, 40, 60)
    assert [(line["kind"], line["amount"]) for line in found["lines"]] == [("grant", 100), ("commit", -40)]
    assert site.call("GET", f"/ledger/statement?account=acme&{period}&zone=Mars/Base")[0] == 422


@pytest.mark.parametrize("path", ["/ledger/account?account=nobody", "/ledger/adjustments"])
def test_unknown_account_is_not_created(site: LedgerSite, path: str) -> None:
    body = {"account": "nobody", "amount": 1, "reason": "mistyped"} if "adjust" in path else None
    status, problem = site.call("POST" if body else "GET", path, body)
    assert (status, problem["detail"]) == (404, "there is no such account; the first grant creates one")
    assert site.ledger.accounts() == []


def test_server_without_a_ledger_says_so(tmp_path: Path) -> None:
    with ExitStack() as stack:
        site = LedgerSite(tmp_path, stack, has_ledger=False)
        status, problem = site.call("GET", "/ledger/accounts")
        assert (status, problem["detail"]) == (404, "the admin server was started without --ledger")
