"""The admin pages, in a real Chromium: each task from its begin to its effect at the gate."""

from __future__ import annotations

import re
import threading
import time
import warnings
from contextlib import ExitStack, closing
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs, urlsplit
from zoneinfo import ZoneInfo

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, BrowserContext, Page, expect
from starlette.responses import Response

from headgate import Limiter
from headgate.adapters.wsgi import HeadgateMiddleware
from headgate.control.admin.app import create_app
from headgate.control.admin.pages import charts, filters
from headgate.control.admin.pages.base import STATIC, local_path
from headgate.control.admin.pages.charts import Band
from headgate.control.admin.serve import AdminServer
from headgate.control.admin.sessions import Sessions
from headgate.control.admin.tokens import Tokens
from headgate.control.config import ConfigStore, OverrideRow, Put
from headgate.control.config.watcher import ConfigSource
from headgate.control.service import Actor, ChangeContext, ClientRef, OverrideSpec
from headgate.control.service.service import AdminService
from headgate.gate.gate import Gate
from headgate.telemetry.decision_log.log import DecisionLog
from headgate.telemetry.fleet.reporter import StatusReporter
from headgate.telemetry.fleet.status_store import MemoryStatusStore
from support.servers import RedisServer, wait_until
from support.traffic import Request

with warnings.catch_warnings(action="ignore"):  # it works as well with httpx as with the newer httpx2
    from starlette.testclient import TestClient

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

SECRET = "for tests only, as long as it has to be"
RAW_KEY = "sk_live_never_to_be_seen_0123456789"
ZONE = "Europe/Berlin"
BERLIN = ZoneInfo(ZONE)
ADA = Actor("ada", "admin")
ROLES = ("admin", "viewer", "support")
POLICY = """\
name: town
tier: free
limits:
  - name: requests
    by: tenant
    bucket: 5/minute
    tiers: {pro: 600/minute}
  - {name: keys, by: api_key, missing: skip, bucket: 100/minute}
clients:
  - {tenant: mallory, label: "<script>document.title='owned'</script>"}
  - {tenant: hooli, label: Hooli, tier: pro}
"""
CONFUSED = ("status of 401", "status of 403", "status of 404", "status of 409", "status of 422")
"""What browsers say of answers that tests ask for."""


class Town:
    """An API behind a gate, the admin server beside it, and some traffic."""

    def __init__(self, place: Path, redis: RedisServer) -> None:
        self.redis, self.place = redis, place
        url = f"sqlite:///{place}/config.db"
        self.config = ConfigStore(url, secret=SECRET)
        self.config.put_policy(POLICY, author="ada", reason="begin")
        log = f"sqlite:///{place}/decisions.db"
        self.log = DecisionLog(log, secret=SECRET, sample=1.0, every=0.1)
        board = MemoryStatusStore()
        self.app = HeadgateMiddleware(
            _welcome,
            ConfigSource(url),
            redis.url,
            secret=SECRET,
            identities={"tenant": lambda request: next(iter(request.header("x-tenant")), None)},
            on_decision=self.log,
            namespace="town",
            budget=0.5,  # other tests may keep this machine busy
        )
        self.reporter = StatusReporter(self.app.gate, board, node="web-1", region="here", log=self.log)
        self.counters = Limiter(redis.url, namespace="town")
        self.service = AdminService(self.config, counters=self.counters, log=log, status_store=board, secret=SECRET)
        self.tokens = Tokens(url)
        self.server = AdminServer(self.service, self.tokens, port=0).start()
        self._keys = {role: self.tokens.make(f"{role} eve", role, by="tests").text for role in ROLES}  # type: ignore[arg-type] # of these
        self._is_over = threading.Event()
        self._traffic = threading.Thread(target=self._drive, daemon=True)
        self._traffic.start()

    def token(self, role: str) -> str:
        return self._keys[role]

    def cookie(self, role: str) -> Any:
        """What a browser has after somebody of that role has signed in."""
        response, token = Response(), self.tokens.check(self.token(role))
        assert token is not None
        Sessions(self.tokens).begin(token, response)
        name, _, value = response.headers["set-cookie"].partition(";")[0].partition("=")
        return {"name": name, "value": value, "url": self.server.url}

    def ask(self, tenant: str = "", *, key: str = "", address: str = "203.0.113.9") -> int:
        """The status of a request to the API."""
        told: list[str] = []
        environ = {"REQUEST_METHOD": "GET", "PATH_INFO": "/items", "QUERY_STRING": "", "REMOTE_ADDR": address}
        environ |= {"HTTP_X_TENANT": tenant} if tenant else {}
        environ |= {"HTTP_X_API_KEY": key} if key else {}
        answer = self.app(environ, lambda status, headers, error=None: told.append(status))
        list(answer)
        if hasattr(answer, "close"):
            answer.close()
        return int(told[0].split()[0])

    def use_up(self, tenant: str) -> None:
        """Ask until it is refused."""
        wait_until(lambda: self.ask(tenant) == 429, "the limit to be met")

    def close(self) -> None:
        self._is_over.set()
        self._traffic.join(5)
        self.server.stop()
        self.reporter.close()
        self.app.gate.close()
        self.log.close()
        self.counters.close()
        self.tokens.close()
        self.config.close()

    def _drive(self) -> None:
        while not self._is_over.wait(0.05):
            for tenant in ("busy", "hooli"):
                self.ask(tenant)


def _welcome(environ: Any, start_response: Any) -> list[bytes]:
    start_response("200 OK", [("Content-Type", "text/plain")])
    return [b"welcome"]


expect.set_options(timeout=10_000)  # other tests may keep this machine busy


@pytest.fixture(scope="module")
def town(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Town]:
    with RedisServer() as redis:
        town = Town(tmp_path_factory.mktemp("town"), redis)
        yield town
        town.close()


class Desks:
    """Browsers at which somebody has signed in. Tests share them, as people keep theirs open."""

    def __init__(self, town: Town, browser: Browser) -> None:
        self._town, self._browser = town, browser
        self._shared: dict[str, Page] = {}
        self.told: list[str] = []
        """What should not have been: errors in the console, requests to other hosts."""

    def shared(self, role: str) -> Page:
        if role not in self._shared:
            self._shared[role] = self.new(role)
        return self._shared[role]

    def new(self, role: str | None, **options: Any) -> Page:
        context: BrowserContext = self._browser.new_context(
            **{"viewport": {"width": 1024, "height": 640}, "timezone_id": ZONE, **options}
        )
        context.set_default_timeout(10_000)
        page, told = context.new_page(), self.told
        page.on("console", lambda said: told.append(said.text) if said.type in ("error", "warning") else None)
        page.on("pageerror", lambda error: told.append(f"{error}"))
        page.on("request", lambda request: None if _is_ours(request.url) else told.append(request.url))
        page.on("dialog", lambda dialog: (told.append("a dialog"), dialog.dismiss()))
        if role is not None:
            url = self._town.server.url
            context.add_cookies([self._town.cookie(role), {"name": "zone", "value": ZONE, "url": url}])
        return page


@pytest.fixture(scope="module")
def desks(town: Town, browser: Browser) -> Desks:
    return Desks(town, browser)


@pytest.fixture
def visit(town: Town, desks: Desks) -> Iterator[Callable[..., Page]]:
    """Opens a page as somebody who has signed in; for one without, or with another browser, in a window of its own. At
    the end: no error in the console, nothing asked of other hosts."""
    with ExitStack() as stack:

        def opened(path: str = "/", *, role: str | None = "admin", **options: Any) -> Page:
            is_shared = role in ROLES and not options
            page = desks.shared(role or "") if is_shared else desks.new(role, **options)
            stack.callback(lambda: page.goto("about:blank") if is_shared else page.context.close())
            page.goto(f"{town.server.url}{path}")
            return page

        yield opened
    told, desks.told[:] = [*desks.told], []
    assert [each for each in told if not any(known in each for known in CONFUSED)] == []


def _is_ours(url: str) -> bool:
    return url.startswith(("http://127.0.0.1:", "data:", "about:"))


def client(tenant: str) -> str:
    return f"/client?kind=tenant&value={tenant}"


def fill(page: Page, action: str, **fields: str) -> None:
    """Open a form of the client page, and fill it in."""
    form = page.locator("details.action", has=page.locator("summary", has_text=action))
    if form.get_attribute("open") is None:
        form.locator("summary").first.click()
    for label, value in fields.items():
        field = form.get_by_label(label.capitalize())
        field.select_option(value) if field.evaluate("e => e.tagName") == "SELECT" else field.fill(value)


# ------------------------------------------------------------------ who comes in


def test_person_signs_in_with_a_token_and_out(town: Town, visit: Callable[..., Page]) -> None:
    page = visit("/overrides?state=active", role=None)
    assert urlsplit(page.url).path == "/login"
    page.get_by_label("Access token").fill("hg_0000000000_wrong")
    page.keyboard.press("Enter")
    expect(page.get_by_role("alert")).to_contain_text("This token isn't valid.")
    token = page.get_by_label("Access token")
    expect(token).to_be_focused()
    assert "token-error" in (token.get_attribute("aria-describedby") or "")
    token.fill(town.token("viewer"))
    page.keyboard.press("Enter")
    page.wait_for_url(f"{town.server.url}/overrides?state=active")  # where they wanted to go
    expect(page.get_by_text(f"Times are in {ZONE}")).to_be_visible()  # as their browser has said
    page.get_by_role("button", name="Sign out").click()
    page.goto(f"{town.server.url}/overrides")
    assert urlsplit(page.url).path == "/login"


def test_link_signs_in_once(town: Town, visit: Callable[..., Page]) -> None:
    link = town.server.link(town.tokens.list()[0])
    page = visit("/login", role=None)
    page.goto(link)
    expect(page.get_by_role("heading", name="Overview")).to_be_visible()
    page.get_by_role("button", name="Sign out").click()
    page.goto(link)
    expect(page.get_by_text("This link has already been used")).to_be_visible()


def test_role_sees_only_what_it_may_do(visit: Callable[..., Page]) -> None:
    page = visit(client("hooli"), role="viewer")
    expect(page.get_by_text("Read-only.")).to_be_visible()
    assert page.locator("details.action").count() == 0
    assert page.get_by_role("link", name="Tokens").count() == 0
    assert page.goto(page.url.split("/client")[0] + "/tokens").status == 403  # type: ignore[union-attr]
    expect(page.get_by_text("Your role (viewer) can't manage tokens. Ask an admin.")).to_be_visible()


def test_form_without_its_token_is_refused(town: Town, visit: Callable[..., Page]) -> None:
    page = visit(client("csrf"))
    form = {"kind": "tenant", "value": "csrf", "reason": "forged"}
    url = f"{town.server.url}/client/block"
    assert page.request.post(url, form=form).status == 403
    assert page.request.post(url, form={**form, "csrf": "guessed"}).status == 403
    csrf = page.locator("input[name=csrf]").first.input_value()
    assert page.request.post(url, form={**form, "csrf": csrf}, headers={"Origin": "https://evil.example"}).status == 403
    assert town.ask("csrf") == 200


@pytest.mark.parametrize("path", ["//evil.example", "/\\evil.example", "https://evil.example", "/ x", "javascript:x"])
def test_login_does_not_redirect_to_other_sites(path: str) -> None:
    assert local_path(path) == "/"
    assert local_path("/client?kind=tenant&value=a%20b") == "/client?kind=tenant&value=a%20b"


# ------------------------------------------------------------------ tasks


def test_override_until_friday_takes_effect(town: Town, visit: Callable[..., Page]) -> None:
    town.use_up("acme")
    page = visit()
    page.get_by_label("Find a client").fill("tenant=acme")
    page.keyboard.press("Enter")
    expect(page.get_by_role("heading", level=1)).to_have_text("acme")
    fill(page, "Override a limit", limit="requests", allow="50/minute", until="friday 18:00", reason="launch")
    page.get_by_role("button", name="Add override").click()
    expect(page.get_by_role("status").first).to_contain_text(
        re.compile("is now allowed 50/minute on requests until Friday .*, 18:00 Europe/Berlin. Version")
    )
    row = page.locator("section", has=page.get_by_role("heading", name="Current limits")).locator("tbody tr").first
    expect(row).to_contain_text("50/minute")
    expect(row).to_contain_text("override")
    ends = datetime.fromisoformat(row.locator("time").get_attribute("datetime") or "").astimezone(BERLIN)
    assert (ends.strftime("%A %H:%M"), ends > datetime.now(UTC)) == ("Friday 18:00", True)
    wait_until(lambda: town.ask("acme") == 200, "the gate to hear of it")


def test_block_acts_at_once_and_can_be_lifted(town: Town, visit: Callable[..., Page]) -> None:
    assert town.ask("leaky") == 200
    page = visit(client("leaky"), role="support")
    fill(page, "Block", reason="key is public")
    page.get_by_role("button", name="Block leaky").click()
    expect(page.get_by_text("This client is blocked.")).to_be_visible()
    wait_until(lambda: town.ask("leaky") == 403, "the gate to hear of it")
    page.goto(f"{town.server.url}/blocks?search=leaky")
    expect(page.locator("tbody tr")).to_have_count(1)
    expect(page.locator("tbody tr")).to_contain_text("key is public")
    page.get_by_role("link", name="leaky").click()
    fill(page, "Unblock", reason="rotated")
    page.get_by_role("button", name="Remove block").click()
    expect(page.get_by_text("Block removed.")).to_be_visible()
    wait_until(lambda: town.ask("leaky") == 200, "the gate to hear of it")


def test_mail_for_the_customer_can_be_copied_without_the_details(town: Town, visit: Callable[..., Page]) -> None:
    town.use_up("curious")
    page = visit(client("curious"))
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])

    def is_answered() -> bool:
        page.goto(f"{town.server.url}{client('curious')}")
        page.get_by_label("Time", exact=True).fill("1 minute ago")
        page.get_by_role("button", name="Explain").click()
        return "exceeded the limit of" in page.locator("#mail").inner_text()

    wait_until(is_answered, "the log to be written")
    mail = page.locator("#mail").inner_text()
    assert "{" not in mail
    page.get_by_text("Internal details, not part of the email").click()
    expect(page.locator("#details")).to_contain_text('{tenant: "curious", limit: "requests", bucket: "6/minute"}')
    page.get_by_role("button", name="Copy text").click()
    expect(page.get_by_role("button", name="Copied")).to_be_visible()
    copied = page.evaluate("navigator.clipboard.readText()")
    assert copied.split() == mail.split()
    page.get_by_label("Time", exact=True).fill("half past never")
    page.get_by_role("button", name="Explain").click()
    expect(page.get_by_label("Time", exact=True)).to_be_focused()
    expect(page.get_by_label("Time", exact=True)).to_have_value("half past never")
    expect(page.locator("#why-error")).to_contain_text("is not a time")


def test_what_is_used_is_shown_and_reset(town: Town, visit: Callable[..., Page]) -> None:
    town.use_up("spent")
    page = visit(client("spent"))
    meter = page.get_by_label("Used of requests")
    assert meter.evaluate("e => [e.value, e.max]") == [5, 5]
    fill(page, "Reset counters", reason="our outage")
    page.get_by_role("button", name="Reset", exact=True).click()
    expect(page.get_by_text("Counters of all limits reset.")).to_be_visible()
    assert meter.evaluate("e => e.value") == 0
    wait_until(lambda: town.ask("spent") == 200, "the gate to hear of it")


def test_tier_is_given(town: Town, visit: Callable[..., Page]) -> None:
    page = visit(client("climber"))
    fill(page, "Tier", tier="pro", name="Climber Inc", reason="paid")
    page.get_by_role("button", name="Set tier").click()
    expect(page.get_by_role("heading", level=1)).to_have_text("Climber Inc")
    expect(page.get_by_text("600/minute", exact=True)).to_be_visible()
    expect(page.get_by_role("cell", name="tier", exact=True)).to_be_visible()
    zone = page.get_by_label("Time zone of its calendar periods")
    fill(page, "Tier", tier="pro", reason="their month", **{"time zone": "Europe/Berlin", "first day": "15"})
    page.get_by_role("button", name="Set tier").click()
    expect(zone).to_have_value("Europe/Berlin")
    fill(page, "Tier", tier="", reason="moved", **{"time zone": "Asia/Tokyo"})
    page.get_by_role("button", name="Set tier").click()
    expect(page.get_by_text("Choose the tier of this client, too.")).to_be_visible()


def test_override_helps_at_once_if_what_was_used_is_reset(town: Town, visit: Callable[..., Page]) -> None:
    town.use_up("hurried")
    page = visit(client("hurried"))
    fill(page, "Override a limit", limit="requests", allow="6/minute", reason="ticket 12")
    page.get_by_label("Also reset the counter").check()
    page.get_by_role("button", name="Add override").click()
    expect(page.get_by_role("status").first).to_contain_text("The counter of requests was reset.")
    assert page.get_by_label("Used of requests").evaluate("e => [e.value, e.max]") == [0, 6]


def test_numbers_of_a_tier_and_costs_of_a_route_are_set_and_taken_back(town: Town, visit: Callable[..., Page]) -> None:
    def pro() -> list[str]:
        return [each.bucket for tier in town.service.policy.tiers() if tier.name == "pro" for each in tier.limits]

    page = visit("/policy")
    tiers = page.locator("section", has=page.get_by_role("heading", name="Tiers"))
    fill(page, "Set a tier limit", tier="pro", limit="requests", allow="9000/minute", reason="big ones")
    page.get_by_role("button", name="Save tier limit").click()
    expect(page.get_by_role("heading", level=1)).to_have_text("Set tier pro to 9000/minute on requests?")
    page.get_by_role("button", name="Confirm").click()
    expect(tiers).to_contain_text("requests: 9000/minute set on this page")
    assert pro() == ["9000/minute"]
    fill(page, "Remove the limit of pro on requests", reason="too much")
    page.get_by_role("button", name="Remove", exact=True).click()
    page.get_by_role("button", name="Confirm").click()  # less than a tenth is a danger, too
    expect(tiers).to_contain_text("requests: 600/minute")
    assert pro() == ["600/minute"]

    fill(page, "Set a route cost", route="POST /exports", cost="many", reason="heavy")
    page.get_by_role("button", name="Save route cost").click()
    expect(page.locator("#route-cost-error")).to_contain_text("a whole number")
    page.get_by_label("Cost").fill("5")
    page.get_by_role("button", name="Save route cost").click()
    expect(page.get_by_text("POST /exports now costs 5.")).to_be_visible()
    assert [(each.path, each.cost) for each in town.service.policy.routes()] == [("POST /exports", 5)]
    fill(page, "Remove the cost of POST /exports", reason="lighter now")
    page.get_by_role("button", name="Remove", exact=True).click()
    expect(page.get_by_text("The value in the policy document applies again.")).to_be_visible()
    assert town.service.policy.routes() == []


def test_what_is_dangerous_is_asked_for_twice(town: Town, visit: Callable[..., Page]) -> None:
    page = visit(client("bold"))
    fill(page, "Override a limit", limit="requests", allow="5000/minute", reason="big launch")
    page.get_by_role("button", name="Add override").click()
    expect(page.get_by_role("heading", level=1)).to_have_text("Allow tenant bold 5000/minute on requests?")
    expect(page.get_by_role("alert")).to_contain_text("1,000 times that")
    assert town.service.overrides.list(search="bold").items == ()
    page.get_by_role("button", name="Back").click()
    expect(page.get_by_label("Allow")).to_have_value("5000/minute")  # and nothing was done
    page.get_by_role("button", name="Add override").click()
    page.get_by_role("button", name="Confirm").click()
    expect(page.get_by_text(re.compile("is now allowed .*/minute on requests, with no end date"))).to_be_visible()
    assert [each.bucket for each in town.service.overrides.list(search="bold").items] == ["5000/minute"]


def test_conflicting_change_is_shown_and_input_is_kept(town: Town, visit: Callable[..., Page]) -> None:
    who = ClientRef("tenant", "contested")
    town.service.overrides.add(ChangeContext(ADA, "first"), who, OverrideSpec("20/minute", limit="requests"))
    id = town.service.overrides.list(client=who).items[0].id
    page = visit(f"/overrides/{id}")
    town.service.overrides.change(
        ChangeContext(Actor("bob", "support"), "was too low"), id, OverrideSpec("30/minute", limit="requests")
    )
    page.get_by_label("Allow").fill("40/minute")
    page.get_by_label("Reason").first.fill("asked again")
    page.get_by_role("button", name="Save changes").click()
    told = page.get_by_role("alert")
    expect(told).to_contain_text("this was changed in the meantime.")
    expect(told).to_contain_text("by bob")
    expect(told).to_contain_text("was too low")
    expect(told).to_be_focused()
    expect(page.get_by_label("Allow")).to_have_value("40/minute")
    page.get_by_role("button", name="Save changes").click()
    expect(page.get_by_text(re.compile("is now allowed .*/minute, with no end date"))).to_be_visible()
    assert town.service.overrides.get(id).bucket == "40/minute"
    page.get_by_role("link", name="Edit").click()
    page.get_by_label("Reason").last.fill("is over")
    page.get_by_role("button", name="Remove override").click()
    expect(page.get_by_text(re.compile("Override of .* removed."))).to_be_visible()
    assert town.service.overrides.list(client=who).items == ()


def test_policy_is_checked_saved_compared_and_rolled_back(town: Town, visit: Callable[..., Page]) -> None:
    before = town.service.version
    page = visit("/policy")
    page.get_by_role("link", name="Edit").click()
    text = page.get_by_label("Document")
    assert text.input_value() == POLICY
    text.fill(POLICY.replace("5/minute", "5/minut"))
    page.get_by_role("button", name="Validate").click()
    expect(page.get_by_role("alert")).to_contain_text("unknown unit 'minut'")
    expect(page.locator("tr.marked th")).to_have_text("6")
    page.get_by_role("button", name="Line 6").click()
    assert text.evaluate("e => e.value.slice(e.selectionStart, e.selectionEnd)") == "    bucket: 5/minut"
    text.fill(POLICY.replace("100/minute", "200/minute"))
    page.get_by_label("Reason").fill("more for keys")
    page.get_by_role("button", name="Save").click()
    expect(page.get_by_text("Policy saved.")).to_be_visible()
    assert "200/minute" in town.service.policy.get().text

    page.get_by_role("link", name=f"Version {before + 1}").click()
    expect(page.locator("tr.minus")).to_contain_text("100/minute")
    expect(page.locator("tr.plus")).to_contain_text("200/minute")
    who = ClientRef("tenant", "bystander")
    town.service.overrides.add(ChangeContext(ADA, "meanwhile"), who, OverrideSpec("20/minute", limit="requests"))
    page.goto(f"{town.server.url}/policy/versions/{before}")
    page.get_by_label("Reason").fill("too much")
    for box in page.get_by_role("checkbox").all():
        if box.get_attribute("value") != "documents":
            box.uncheck()
    page.get_by_role("button", name="Preview rollback").click()
    expect(page.locator("tr.plus")).to_contain_text("100/minute")  # and not the override
    expect(page.get_by_text("Blocks do not change.")).to_be_visible()
    page.get_by_role("button", name="Cancel").click()
    expect(page.get_by_label("Reason")).to_have_value("too much")
    page.get_by_role("button", name="Preview rollback").click()
    assert town.service.policy.get().text != POLICY  # nothing is done yet
    page.get_by_role("button", name="Roll back").click()
    expect(page.get_by_text(f"Document rolled back to version {before}.")).to_be_visible()
    assert town.service.policy.get().text == POLICY
    assert len(town.service.overrides.list(client=who).items) == 1  # only what was chosen goes back


def test_leaked_unknown_key_is_blocked(town: Town, visit: Callable[..., Page]) -> None:
    leaked = "sk_live_aaaa567890abcdef"
    assert town.ask(key=leaked) == 200
    page = visit("/blocks", role="support")
    sent: list[str] = []
    page.on("request", lambda request: sent.append(request.url))
    page.get_by_label("Client", exact=True).fill(leaked)
    page.get_by_label("Until").fill("never ever")
    page.get_by_label("Reason").last.fill("found on a public site")
    page.get_by_role("button", name="Block…", exact=True).click()
    expect(page.locator("#block-until-error")).to_be_visible()
    assert page.get_by_label("Client", exact=True).input_value().startswith("api_key=hmac:")  # hashed
    expect(page.get_by_label("Reason").last).to_have_value("found on a public site")
    page.get_by_label("Until").fill("in 2 days")
    page.get_by_role("button", name="Block…", exact=True).click()
    expect(page.get_by_role("heading", level=1)).to_contain_text("Block API key")
    expect(page.get_by_text("every request with this key (hash hmac:")).to_be_visible()
    assert town.ask(key=leaked) == 200  # nothing is done yet
    page.get_by_role("button", name="Block", exact=True).click()
    expect(page.get_by_role("status").first).to_contain_text("is blocked until")
    wait_until(lambda: town.ask(key=leaked) == 403, "the gate to hear of it")
    assert leaked not in page.content()
    assert [url for url in sent if leaked in url] == []
    page.goto(f"{town.server.url}/audit")
    assert leaked not in page.content()


def test_most_denied_client_is_blocked_from_the_overview_in_two_clicks(town: Town, visit: Callable[..., Page]) -> None:
    def flood() -> bool:
        return [town.ask(address="192.0.2.77") for _ in range(200)][-1] == 429

    wait_until(flood, "the limit to be met")
    feed = ConfigSource(f"sqlite:///{town.place}/config.db")
    with closing(Gate(feed, town.redis.url, namespace="town", secret=SECRET, budget=0.5)) as other:
        page = visit("/", role="support")
        denied = page.locator("section", has=page.get_by_role("heading", name="Most denied"))
        row = denied.locator("li", has_text="192.0.2.*")
        name = row.get_by_role("link").first.inner_text()
        row.get_by_role("link", name="Block").click()
        expect(page.get_by_role("heading", level=1)).to_have_text(f"Block {name}?")
        expect(page.get_by_label("Reason")).to_have_value(re.compile("requests denied in the last minute"))
        assert town.ask(address="192.0.2.77") == 429
        page.get_by_role("button", name="Block", exact=True).click()
        expect(page.get_by_role("status").first).to_contain_text(f"{name} is blocked")
        began = time.monotonic()
        wait_until(lambda: town.ask(address="192.0.2.77") == 403, "the gate to hear of it")
        wait_until(lambda: _status(other, "192.0.2.77") == 403, "the other gate to hear of it")
        assert time.monotonic() - began < 5  # within a second, where the machine has the time
    assert town.ask(address="192.0.2.78") == 200
    page.get_by_role("link", name=name).click()
    expect(page.get_by_role("heading", level=1)).to_have_text(name)
    expect(page.get_by_text("This client is blocked.")).to_be_visible()
    fill(page, "Unblock", reason="enough")
    page.get_by_role("button", name="Remove block").click()
    wait_until(lambda: town.ask(address="192.0.2.77") in (200, 429), "the gate to hear of it")


def _status(gate: Gate, address: str) -> int:
    refusal = gate.admit(Request(peer=address, path="/items")).refusal
    return 200 if refusal is None else refusal.status


def test_rollback_names_what_others_have_changed_and_lifts_their_blocks(town: Town, visit: Callable[..., Page]) -> None:
    hashed = town.service.clients.find(f"api_key={RAW_KEY}")
    town.service.clients.assign_tier(ChangeContext(ADA, "a name"), hashed, "pro", label="Rolled Key")
    before = town.service.version
    bob = Actor("bob", "operator")
    end = datetime(2099, 11, 20, 17, 0, tzinfo=UTC)
    town.service.overrides.add(
        ChangeContext(bob, "launch"), hashed, OverrideSpec("150/minute", limit="keys", valid_until=end)
    )
    town.service.blocks.add(ChangeContext(bob, "unpaid"), ClientRef("tenant", "rolled-back"))
    wait_until(lambda: town.ask("rolled-back") == 403, "the gate to hear of it")
    page = visit(f"/policy/versions/{before}")
    page.get_by_label("Reason").fill("bob was wrong")
    page.get_by_role("button", name="Preview rollback").click()
    expect(page.get_by_role("heading", level=1)).to_have_text(f"Roll back to version {before}?")
    expect(page.get_by_text("2 changes by other people")).to_be_visible()
    expect(page.locator("tr.minus", has_text="Rolled Key")).to_contain_text("20 November 2099, 18:00 Europe/Berlin")
    assert "+00:00" not in page.locator("main").inner_text()
    page.get_by_role("button", name="Roll back").click()
    expect(page.get_by_role("status").first).to_contain_text("Blocks: 1 lifted, 0 active again.")
    wait_until(lambda: town.ask("rolled-back") != 403, "the gate to hear of it")
    for path in ("/policy/versions", "/audit?author=bob"):
        page.goto(f"{town.server.url}{path}")
        shown = page.locator("main").inner_text()
        assert ("Rolled Key" in shown, "hmac:" in shown.partition("Rolled Key")[0], "+00:00" in shown) == (
            True,
            False,
            False,
        )


def test_part_of_a_name_is_found_and_several_are_listed(town: Town, visit: Callable[..., Page]) -> None:
    for number in (1, 2):
        town.service.clients.assign_tier(
            ChangeContext(ADA, "r"), ClientRef("tenant", f"cafe-{number}"), "pro", label=f"Corner Cafe {number}"
        )
    page = visit("/", role="viewer")
    page.get_by_label("Find a client").fill("corner")
    page.keyboard.press("Enter")
    expect(page.get_by_role("heading", level=1)).to_have_text("2 clients match “corner”")
    page.get_by_role("link", name="Corner Cafe 2").click()
    expect(page.get_by_role("heading", level=1)).to_have_text("Corner Cafe 2")
    page.get_by_label("Find a client").fill("afe 1")
    page.keyboard.press("Enter")
    expect(page.get_by_role("heading", level=1)).to_have_text("Corner Cafe 1")  # the only one
    page.get_by_label("Find a client").fill("nobody at all")
    page.keyboard.press("Enter")
    expect(page.get_by_role("heading", level=1)).to_have_text("No client matches “nobody at all”")
    expect(page.get_by_label("Find a client")).to_have_value("nobody at all")
    page.get_by_label("Find a client").fill("sk_live_cccc567890abcdef")
    page.keyboard.press("Enter")
    expect(page.get_by_role("heading", level=1)).to_have_text("No client matches API key sk_live_…cdef")
    assert "sk_live_cccc567890abcdef" not in page.content()


def test_override_form_offers_what_can_be_overridden_with_the_current_limit(visit: Callable[..., Page]) -> None:
    page = visit(client("hooli"), role="support")
    fill(page, "Override a limit")
    form = page.locator("details.action", has_text="Override a limit")
    assert form.get_by_label("Limit").locator("option").all_inner_texts() == ["requests (now 600/minute)"]
    expect(form.get_by_label("Allow")).to_have_value("600/minute")
    page.set_viewport_size({"width": 390, "height": 800})
    above = page.get_by_role("heading", name="Current limits").bounding_box()
    action = form.bounding_box()
    assert above is not None
    assert action is not None
    assert action["y"] < above["y"]  # on a phone, what to do comes first


def test_client_that_was_never_seen_is_flagged(visit: Callable[..., Page]) -> None:
    page = visit(client("hoooli"), role="support")
    expect(page.get_by_text("This tenant has never been seen.")).to_be_visible()


def test_pasted_key_is_shown_masked_before_it_is_blocked(visit: Callable[..., Page]) -> None:
    page = visit("/blocks", role="support")
    page.get_by_label("Client", exact=True).fill("sk_live_bbbb567890abcdef")
    page.get_by_label("Reason").last.fill("leaked")
    page.get_by_role("button", name="Block…", exact=True).click()
    expect(page.get_by_role("heading", level=1)).to_have_text("Block API key sk_live_…cdef?")
    page.get_by_role("button", name="Back").click()
    assert page.get_by_label("Client", exact=True).input_value().startswith("api_key=hmac:")
    assert "sk_live_bbbb567890abcdef" not in page.content()


def test_ambiguous_name_is_blocked_as_what_is_chosen(town: Town, visit: Callable[..., Page]) -> None:
    page = visit("/blocks", role="support")
    page.get_by_label("Client", exact=True).fill("fresh")
    page.get_by_label("Reason").last.fill("scraping")
    page.get_by_role("button", name="Block…", exact=True).click()
    expect(page.get_by_role("heading", level=1)).to_have_text("Which client do you mean?")
    expect(page.get_by_role("radio")).to_have_count(3)  # a tenant, a user, or a key
    page.get_by_label("Tenant fresh").check()
    page.get_by_role("button", name="Block", exact=True).click()
    expect(page.get_by_role("status").first).to_contain_text("Tenant fresh is blocked")
    wait_until(lambda: town.ask("fresh") == 403, "the gate to hear of it")


def test_what_cannot_be_blocked_is_kept_in_the_field(visit: Callable[..., Page]) -> None:
    page = visit("/blocks")
    page.get_by_label("Client", exact=True).fill("0.0.0.0/0")
    page.get_by_label("Reason").last.fill("panic")
    page.get_by_role("button", name="Block…", exact=True).click()
    expect(page.locator("#block-client-error")).to_be_visible()
    expect(page.get_by_label("Client", exact=True)).to_have_value("0.0.0.0/0")


def test_network_is_blocked_after_a_second_look(town: Town, visit: Callable[..., Page]) -> None:
    page = visit("/blocks")
    page.get_by_label("Client", exact=True).fill("198.18.0.0/15")
    page.get_by_label("Reason").last.fill("a flood")
    page.get_by_role("button", name="Block…", exact=True).click()
    expect(page.get_by_role("alert")).to_contain_text("131072 addresses")
    expect(page.get_by_text("every address in 198.18.0.0/15 (131,072 addresses)")).to_be_visible()
    page.get_by_role("button", name="Block", exact=True).click()
    expect(page.get_by_text("Network 198.18.0.0/15 is blocked.")).to_be_visible()
    row = page.locator("tbody tr", has_text="198.18.0.0/15")
    row.locator("summary").click()
    row.get_by_label("Reason").fill("over")
    row.get_by_role("button", name="Remove block").click()
    expect(page.get_by_text("Block removed.")).to_be_visible()


def test_token_is_shown_once_and_ends_with_its_sessions(town: Town, visit: Callable[..., Page]) -> None:
    page = visit("/tokens")
    page.get_by_label("Name", exact=True).fill("newcomer")
    page.get_by_label("Role").select_option("viewer")
    page.get_by_role("button", name="Create token").click()
    token = page.locator("#new-token").inner_text()
    made = town.tokens.check(token)
    assert made is not None
    assert made.role == "viewer"
    page.goto(f"{town.server.url}/tokens")
    assert token not in page.content()
    town._keys["newcomer"] = token
    other = visit("/", role="newcomer")
    page.get_by_role("button", name="Revoke… the token of newcomer").click()
    expect(page.get_by_role("alert")).to_contain_text("This can't be undone.")
    page.get_by_role("button", name="Cancel").click()
    assert town.tokens.check(token) is not None
    page.get_by_role("button", name="Revoke… the token of newcomer").click()
    page.get_by_role("button", name="Revoke token").click()
    expect(page.get_by_text("Token of newcomer revoked.")).to_be_visible()
    other.wait_for_url(f"{town.server.url}/login")  # its live part has noticed


def test_audit_lists_actors_and_actions(town: Town, visit: Callable[..., Page]) -> None:
    town.service.overrides.add(
        ChangeContext(Actor("carol", "support"), "for the record"),
        ClientRef("tenant", "audited"),
        OverrideSpec("9/minute", limit="requests"),
    )
    hashed = f"hmac:{'0' * 32}"
    town.service.blocks.add(ChangeContext(Actor("carol", "support"), "leaked"), ClientRef("api_key", hashed))
    page = visit("/audit?author=carol")
    rows = page.locator("tbody tr")
    expect(rows).to_have_count(2)
    expect(rows.last).to_contain_text("override of tenant audited")
    expect(rows.last).to_contain_text("for the record")
    expect(rows.first.locator("td").nth(2)).to_have_text("Added block of api_key hmac:000000000…")
    assert rows.first.get_by_role("link", name="hmac:").get_attribute("href") == filters.client_url("api_key", hashed)


def test_long_lists_are_paged_searched_and_filtered(town: Town, visit: Callable[..., Page]) -> None:
    over_us = round((datetime.now(UTC) - timedelta(days=1)).timestamp() * 1e6)
    rows = [OverrideRow("tenant", f"paged-{each}", "requests", None, 9, 60_000_000) for each in range(60)]
    over = OverrideRow("tenant", "paged-over", "requests", None, 9, 60_000_000, valid_until_us=over_us)
    town.config.write([Put("overrides", row) for row in (*rows, over)], author="ada", reason="many")
    page = visit("/overrides")
    page.get_by_label("Search").fill("paged-")
    page.get_by_role("button", name="Search").click()
    found = page.locator("tbody tr")
    expect(found).to_have_count(50)
    page.get_by_role("link", name="Next page").click()
    expect(found).to_have_count(11)
    page.get_by_role("link", name="First page").click()
    expect(found).to_have_count(50)
    page.get_by_role("link", name="Expired").click()
    expect(found).to_have_count(1)
    expect(found).to_contain_text("ended 1 day ago")


@pytest.mark.parametrize(
    ("path", "button", "place"),
    [
        ("/clients", "Search", "Clients"),
        ("/overrides", "Search", "Overrides"),
        ("/blocks", "Search", "Blocks"),
        ("/audit", "Search", "Audit log"),
    ],
)
def test_api_key_that_is_searched_for_gets_into_no_address(
    town: Town, visit: Callable[..., Page], path: str, button: str, place: str
) -> None:
    page = visit(path)
    asked: list[str] = []
    page.on("request", lambda request: asked.append(f"{request.url} {request.headers.get('referer', '')}"))
    lists = page.get_by_role("region", name=place)
    lists.get_by_label("Search").fill(RAW_KEY)
    lists.get_by_role("button", name=button).click()
    expect(lists.get_by_text("the text may be an API key")).to_be_visible()
    expect(lists.get_by_label("Search")).to_have_value(town.service.searchable(RAW_KEY))
    assert urlsplit(page.url).path == path
    page.reload()
    expect(lists.get_by_label("Search")).to_have_value(town.service.searchable(RAW_KEY))
    assert not [each for each in asked if RAW_KEY in each]
    lists.get_by_label("Search").fill("hooli")
    lists.get_by_label("Search").press("Enter")
    page.wait_for_url(f"**{path}?search=hooli**")  # names stay, so that what was found can be sent to others
    assert RAW_KEY not in page.content()


# ------------------------------------------------------------------ how they are used


def test_task_by_keyboard_alone(town: Town, visit: Callable[..., Page]) -> None:
    page = visit("/")
    page.keyboard.press("Tab")
    expect(page.get_by_role("link", name="Skip to content")).to_be_focused()

    def tab_to(name: str) -> None:
        for _ in range(60):
            said = page.evaluate("(document.activeElement.labels?.[0] ?? document.activeElement).textContent.trim()")
            if said == name or said.startswith(f"{name} ("):
                return
            page.keyboard.press("Tab")
        raise AssertionError(f"{name} cannot be reached by Tab")

    tab_to("Find a client")
    page.keyboard.type("tenant=typist")
    page.keyboard.press("Enter")
    page.wait_for_url("**/client?*")
    tab_to("Block")
    page.keyboard.press("Enter")
    tab_to("Until")
    page.keyboard.type("in 2 hours")
    tab_to("Reason")
    page.keyboard.type("by keyboard")
    page.keyboard.press("Enter")
    expect(page.get_by_text("This client is blocked.")).to_be_visible()
    assert town.service.clients.get(ClientRef("tenant", "typist")).block is not None


def test_task_without_any_script(town: Town, visit: Callable[..., Page]) -> None:
    page = visit("/", java_script_enabled=False)
    expect(page.get_by_role("link", name="Refresh")).to_be_visible()
    page.get_by_label("Find a client").fill("tenant=plain")
    page.get_by_role("button", name="Find").click()
    fill(page, "Override a limit", allow="nonsense", reason="no script")
    page.get_by_role("button", name="Add override").click()
    field = page.get_by_label("Allow")
    expect(field).to_have_attribute("aria-invalid", "true")
    expect(field).to_be_focused()
    expect(page.get_by_label("Reason").first).to_have_value("no script")
    field.fill("7/minute")
    page.get_by_role("button", name="Add override").click()
    expect(page.get_by_text(re.compile("is now allowed .*/minute on requests, with no end date"))).to_be_visible()
    assert [each.bucket for each in town.service.overrides.list(search="plain").items] == ["7/minute"]


def test_overview_moves_and_keeps_what_is_open_and_focused(town: Town, visit: Callable[..., Page]) -> None:
    page = visit("/")
    expect(page.get_by_role("row", name="web-1")).to_contain_text("ready", timeout=8000)
    link = page.locator("section", has_text="Most denied").last.get_by_role("link", name="busy", exact=True)
    expect(link).to_be_visible()
    page.locator("#t-decisions summary").click()
    link.focus()
    chart = page.locator("#decisions-desc")
    path = page.locator("path.edge.allowed")
    before = path.get_attribute("d")
    wait_until(lambda: path.get_attribute("d") != before, "the chart to move")
    expect(link).to_be_focused()
    assert page.locator("#t-decisions").get_attribute("open") is not None
    assert "Denied: latest" in (chart.text_content() or "")
    page.get_by_role("button", name="Pause").click()
    still = path.get_attribute("d")
    time.sleep(1.6)
    assert path.get_attribute("d") == still


def test_degraded_node_is_said_and_read_out(town: Town, visit: Callable[..., Page]) -> None:
    page = visit("/")
    expect(page.get_by_role("row", name="web-1")).to_contain_text("ready", timeout=8000)
    assert page.locator("#announcer").text_content() == ""
    town.redis.pause()
    try:
        expect(page.get_by_text(re.compile(r"web-1\S* is running without the store"))).to_be_visible(timeout=8000)
        expect(page.locator("#announcer")).to_contain_text("degraded")
        expect(page.get_by_role("row", name="web-1").locator(".badge.degraded")).to_be_visible()
    finally:
        town.redis.resume()
    expect(page.locator("#announcer")).to_contain_text("All nodes are ready", timeout=8000)


DIFFERENT = ("/", client("hooli"), "/blocks", "/blocks/new?kind=ip&value=203.0.113.9", "/policy", "/policy/edit")
"""Pages between which all there is on any of them is seen once."""
PATHS = (
    *DIFFERENT,
    "/clients",
    "/overrides?search=acme",
    "/policy/versions",
    "/policy/versions/1",
    "/actions?state=all",
    "/audit?author=carol",
    "/tokens",
)


def test_every_page_fits_a_phone_and_is_accessible(town: Town, visit: Callable[..., Page]) -> None:
    page = visit("/", viewport={"width": 360, "height": 740})
    for path in PATHS:
        if path != "/":
            page.goto(f"{town.server.url}{path}")
        assert page.evaluate("document.documentElement.scrollWidth") <= 360, path
        assert page.locator("[style], style, script:not([src])").count() == 0, path
        if path in DIFFERENT:
            page.evaluate("document.querySelectorAll('.action').forEach(each => each.open = true)")
            assert page.evaluate("document.documentElement.scrollWidth") <= 360, path
            found = Axe().run(page).response["violations"]
            assert [(each["id"], each["nodes"][0]["html"]) for each in found] == [], path
    for scheme, is_dark in (("light", False), ("dark", True)):
        page.emulate_media(color_scheme=scheme)  # type: ignore[arg-type] # one of these
        ground = page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert (sum(map(int, re.findall(r"\d+", ground))) < 200) == is_dark


def test_pages_say_what_is_missing_where_nothing_stands_behind_them(visit: Callable[..., Page], tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/config.db"
    with closing(ConfigStore(url, secret=SECRET)) as config, closing(Tokens(url)) as tokens:
        token = tokens.make("eve", "admin", by="tests").token
        with AdminServer(AdminService(config, secret=SECRET), tokens, port=0) as server:
            page = visit("/login", role=None)
            page.goto(server.link(token))
            expect(page.get_by_text("No node is reporting, so this page shows no traffic.")).to_be_visible()
            expect(page.get_by_text("No denials")).to_have_count(0)
            expect(page.get_by_text("No clients near a limit.")).to_have_count(0)
            for path in PATHS:
                status = page.request.get(f"{server.url}{path}").status
                assert status == (404 if path.endswith("/1") else 200), path
            page.goto("about:blank")  # before there is nobody to ask


def test_page_says_no_more_than_is_known(town: Town, visit: Callable[..., Page]) -> None:
    page = visit(filters.client_url("tenant", f"hmac:{'7' * 32}"))
    expect(page.get_by_text("Limits unknown.")).to_be_visible()
    expect(page.get_by_text("No limits.")).to_have_count(0)


def test_unknown_page_is_reported_in_plain_words(town: Town, visit: Callable[..., Page]) -> None:
    page = visit("/nothing", role="viewer")
    expect(page.get_by_text("There is no resource at this path.")).to_be_visible()
    expect(page.get_by_role("link", name="Overrides")).to_be_visible()
    headers = {"Accept": "text/html"}
    assert "<h1>" in page.request.get(f"{town.server.url}/blocks/7/remove", headers=headers).text()
    answer = page.request.get(f"{town.server.url}/api/v1/nothing", headers=headers)
    assert answer.headers["content-type"] == "application/problem+json"


# ------------------------------------------------------------------ what they never do


def test_label_with_a_script_in_it_is_shown_as_text(town: Town, visit: Callable[..., Page]) -> None:
    town.use_up("mallory")
    page = visit(client("mallory"))
    name = "<script>document.title='owned'</script>"
    expect(page.get_by_role("heading", level=1)).to_have_text(name)
    for path in ("/clients", client("mallory"), "/"):
        page.goto(f"{town.server.url}{path}")
        assert page.title() != "owned", path
    fill_reason = "\"><img src=x onerror=document.title='owned'>"
    page.goto(f"{town.server.url}{client('mallory')}")
    fill(page, "Override a limit", allow="nonsense", reason=fill_reason)
    page.get_by_role("button", name="Add override").click()
    expect(page.get_by_label("Reason").first).to_have_value(fill_reason)
    assert page.title() != "owned"


def test_raw_api_key_gets_into_no_address_and_no_page(town: Town, visit: Callable[..., Page]) -> None:
    assert town.ask(key=RAW_KEY) == 200
    page = visit("/")
    seen: list[str] = []
    page.on("request", lambda request: seen.append(request.url))
    page.get_by_label("Find a client").fill(f"api_key={RAW_KEY}")
    page.keyboard.press("Enter")
    page.wait_for_url("**/client?*")
    assert parse_qs(urlsplit(page.url).query)["value"][0].startswith("hmac:")
    assert RAW_KEY not in page.content()
    fill(page, "Override a limit", allow="9000/minute", reason="who knows")
    page.get_by_role("button", name="Add override").click()
    assert RAW_KEY not in page.content()
    page.goto(f"{town.server.url}/blocks")
    page.get_by_label("Client", exact=True).fill(RAW_KEY)
    page.get_by_role("button", name="Block…", exact=True).click()  # without a reason: the browser says so, and stays
    page.get_by_label("Until").fill("nonsense")
    page.get_by_label("Reason").last.fill("leaked")
    page.get_by_role("button", name="Block…", exact=True).click()
    expect(page.locator("#block-until-error")).to_be_visible()
    assert RAW_KEY not in page.content()
    assert [url for url in seen if RAW_KEY in url] == []
    answer = page.goto(f"{town.server.url}/client?kind=api_key&value={RAW_KEY}")
    assert answer is not None
    assert answer.status == 422
    assert RAW_KEY not in answer.text()


def test_no_cookie_travels_in_clear_where_browsers_speak_tls(town: Town) -> None:
    with TestClient(create_app(town.service, town.tokens, secure=True), base_url="https://testserver") as browser:
        browser.post("/login", data={"token": town.token("support")}, follow_redirects=False)
        page = browser.get("/blocks").text
        form = {"csrf": re.findall(r'name="csrf" value="(.+?)"', page)[0], "target": "tenant=secure", "reason": "test"}
        done = browser.post("/blocks", data=form, follow_redirects=False)
        shown = browser.get("/blocks")
        for answer in (done, shown):  # it is set, and then taken away
            flash = answer.headers["set-cookie"]
            assert flash.startswith("flash=")
            assert {"Secure", "HttpOnly", "SameSite=strict"} <= {*flash.split("; ")}
        assert "Tenant secure is blocked." in shown.text


# ------------------------------------------------------------------ what they are made of


def test_text_can_be_read_in_both_schemes() -> None:
    light, dark = _schemes()
    assert light["ground"] != dark["ground"]
    for scheme in (light, dark):
        for ground in ("ground", "surface", "raised"):
            for ink in ("ink", "soft", "accent", "denied", "warn", "good", "blocked"):
                assert _contrast(scheme[ink], scheme[ground]) >= 4.5, (ink, ground)
            assert _contrast(scheme["edge"], scheme[ground]) >= 3, ground  # what tells fields and lines apart
        for name in ("denied", "warn", "good", "blocked", "accent"):
            for ink in ("ink", "soft", name):
                assert _contrast(scheme[ink], scheme[f"{name}-tint"]) >= 4.5, (ink, name)
        for name in ("accent", "denied"):
            assert _contrast(scheme[f"on-{name}"], scheme[name]) >= 4.5, name


def _schemes() -> tuple[dict[str, str], dict[str, str]]:
    css = (STATIC / "headgate.css").read_text("utf-8")
    pairs = re.findall(r"--([\w-]+): light-dark\((#[0-9a-f]{6}), (#[0-9a-f]{6})\);", css)
    return {name: light for name, light, _ in pairs}, {name: dark for name, _, dark in pairs}


def _contrast(one: str, other: str) -> float:
    """As WCAG 2 computes it."""

    def luminance(colour: str) -> float:
        parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
        red, green, blue = (each / 12.92 if each <= 0.04045 else ((each + 0.055) / 1.055) ** 2.4 for each in parts)
        return 0.2126 * red + 0.7152 * green + 0.0722 * blue

    dark, light = sorted((luminance(one), luminance(other)))
    return (light + 0.05) / (dark + 0.05)


def test_areas_lie_upon_each_other() -> None:
    chart = charts.stacked([Band("Allowed", "allowed", [0, 10]), Band("Denied", "denied", [0, 10])], id="x", title="T")
    assert chart.ticks == (20, 10, 0)
    assert re.findall(r'class="edge \w+" d="(.*?)"', chart.svg) == ["M600,77h1", "M600,4h1"]  # none where nothing was
    assert re.findall(r'class="band \w+".*? d="(.*?)"', chart.svg) == [
        "M0,150L600,77L600,150L0,150Z",
        "M0,150L600,4L600,77L0,150Z",
    ]
    assert "Denied: latest 10, maximum 10." in chart.svg


def test_band_draws_no_line_upon_the_one_below_where_it_is_nothing() -> None:
    bands = [Band("Allowed", "allowed", [5, 5, 5, 5, 5]), Band("Blocked", "blocked", [5, 5, 0, 0, 5])]
    chart = charts.stacked(bands, id="x", title="T")
    assert re.findall(r'class="edge blocked" d="(.*?)"', chart.svg) == ["M0,4L150,4M600,4h1"]


def test_line_is_broken_where_nothing_is_known() -> None:
    chart = charts.lines([Band("p50", "p50", [100, None, 100, 100])], id="x", title="T")
    assert re.findall(r'class="line p50" d="([^"]+)"', chart.svg) == ["M0,150h1M400,150L600,150"]


def test_one_slow_check_leaves_the_others_their_shape() -> None:
    chart = charts.lines([Band("p99", "p99", [150, 200, 23_000, 0])], id="x", title="T")
    assert chart.ticks == (100_000, 10_000, 1_000, 100)
    assert re.findall(r'class="line p99" d="([^"]+)"', chart.svg) == ["M0,141.4L200,135.3L400,35.1L600,150"]
    assert charts.lines([Band("p99", "p99", [500])], id="x", title="T").ticks == (10_000, 1_000, 100)


def test_chart_of_nothing_is_drawn() -> None:
    assert "no data" in charts.lines([Band("p50", "p50", [None])], id="x", title="T").svg
    assert charts.bars([Band("Allowed", "allowed", [])], [], id="x", title="T").ticks == (1, 0.5, 0)


def test_what_a_chart_is_called_is_escaped() -> None:
    svg = charts.bars([Band("<b>", "denied", [3])], ["<i>"], id="x", title="</title>").svg
    assert "<b>" not in svg
    assert "<i>" not in svg
    assert "&lt;/title&gt;" in svg
    assert 'fill="url(#x-denied)"' in svg


@pytest.mark.parametrize(
    ("ahead_s", "said"),
    [
        (0, "now"),
        (-3, "3 seconds ago"),
        (-60, "1 minute ago"),
        (-7200, "2 hours ago"),
        (86400 * 3, "in 3 days"),
        (86400 * 720, "in 720 days"),
        (86400 * 365 * 70, "in 70 years"),
    ],
)
def test_times_are_relative_to_now(ahead_s: int, said: str) -> None:
    now = datetime(2026, 11, 16, 9, tzinfo=UTC)
    now_us = round(now.timestamp() * 1e6)
    assert filters.relative(now_us + ahead_s * 1_000_000, now_us) == said
    told = filters.time_tag({"now_us": now_us, "zone": BERLIN}, now_us + ahead_s * 1_000_000)
    assert f'datetime="{now + timedelta(seconds=ahead_s):%Y-%m-%dT%H:%M:%SZ}"' in told
    assert "CET (UTC+01:00)" in told


def test_zone_that_is_none_is_utc() -> None:
    for name in (None, "", "Nowhere/Land", "../../etc/passwd", "x" * 500):
        assert filters.parse_zone(name) is UTC
    assert filters.parse_zone(ZONE) == BERLIN
