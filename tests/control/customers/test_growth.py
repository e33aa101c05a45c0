"""Customers are told of their own anomalies, get more within the bound of their tier, and request more than that."""

from __future__ import annotations

import json
import shutil
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from sqlalchemy import select

from headgate.control.anomalies.tables import NOTICES
from headgate.control.config.engine import read_transaction
from headgate.control.customers.notifier import QUEUE, CustomerNotifier
from headgate.control.customers.settings import Customer, CustomerSettings, SmtpSettings, read_customers
from headgate.control.service import Actor, ChangeContext, ClientRef, NotFound, OverrideSpec
from headgate.control.service.errors import NotAllowed
from headgate.control.service.request_links import LIFETIME_US
from headgate.control.service.service import AdminService
from headgate.control.webhooks import verify
from headgate.errors import InvalidConfiguration, InvalidInput
from headgate.telemetry.pseudonyms import Pseudonymizer
from support.anomaly_fleet import AnomalyFleet
from support.smtp_server import SmtpServer
from support.webhook_receiver import WebhookReceiver

if TYPE_CHECKING:
    from collections.abc import Iterator

SECRET = "sixteen bytes or more"
ACME = ClientRef("tenant", "acme")
LEARNED_MINUTES = 1_500
SUPPORT = Actor("sue", "support")
PEOPLE, BOT = (300, 31, 44, 18), (300, 1, 44, 18)
POLICY = """
tier: free
tiers:
  pro: {limits: {calls: "100/minute, burst 300"}, raise: {factor: 3, for: 24 hours}}
limits:
  - {name: calls, by: tenant, bucket: 10/minute}
  - {name: exports, by: client, bucket: 5/hour}
  - {name: everything, by: global, bucket: 10000/minute}
clients:
  - {tenant: acme, tier: pro}
"""


class Customers(ExitStack):
    """A fleet whose anomalies are those of one customer, with the servers that receive the messages."""

    def __init__(self, learned: Path, place: Path, policy: str = POLICY) -> None:
        super().__init__()
        shutil.copy(learned, place / "config.db")
        self.fleet = AnomalyFleet(f"sqlite:///{place}/config.db")
        self.fleet.clock.advance(60 * LEARNED_MINUTES)
        self.fleet.store.put_policy(policy, author="ada", reason="begin")
        self.callback(self.fleet.store.close)
        self.service = AdminService(self.fleet.store, secret=SECRET, clock=self.fleet.clock)
        self.mail, self.hooks = self.enter_context(SmtpServer()), self.enter_context(WebhookReceiver())
        self.slack = self.enter_context(WebhookReceiver())
        acme = Customer(ACME, "Acme", ("ops@acme.example",), self.slack.url, self.hooks.url, "sixteen bytes too")
        smtp = SmtpSettings("127.0.0.1", "limits@example.com", self.mail.port, "none")
        self.settings = CustomerSettings("https://limits.example.com", smtp, (acme,))
        self.notifier = self.make()

    def make(self) -> CustomerNotifier:
        store, clock = self.fleet.store, self.fleet.clock
        return CustomerNotifier(self.settings, store, self.service, secret=SECRET, clock=clock)

    def grow(self, look: Any = PEOPLE, *, name: str = "acme") -> None:
        """Two minutes of much more traffic than usual, and what the admin server does then."""
        client = _client(name)
        for _ in range(2):
            self.fleet.tell({client: 1_000}, look=look)
            self.fleet.clock.set_us((self.fleet.minute + 1) * 60_000_000 + 20_000_000)
            self.fleet.watcher.check()
        self.notifier.check()

    def deliver(self) -> int:
        return self.notifier.deliver(QUEUE, self.fleet.store.engine, self.fleet.clock)

    def limits(self) -> dict[str, str]:
        return {each.limit: each.bucket for each in self.service.clients.get(ACME).limits}

    def token(self) -> str:
        link: str = json.loads(self.hooks.calls[-1].body)["link"]
        return link.rpartition("/")[2]


def _client(name: str) -> tuple[str, str]:
    return "tenant", Pseudonymizer(SECRET).hash_of("tenant", name)


@pytest.fixture(scope="module")
def learned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A config store with the usual traffic of two clients: learning it takes seconds."""
    place = tmp_path_factory.mktemp("learned")
    for name in ("acme", "umbrella"):
        fleet = AnomalyFleet(f"sqlite:///{place}/config.db")
        fleet.learn({60: 1_400}, minutes=LEARNED_MINUTES, client=_client(name))
        fleet.store.close()
    return place / "config.db"


@pytest.fixture
def customers(learned: Path, tmp_path: Path) -> Iterator[Customers]:
    with Customers(learned, tmp_path) as made:
        yield made


def test_customer_gets_the_message_on_each_channel(customers: Customers) -> None:
    customers.grow()
    assert customers.deliver() == 3
    (email,) = customers.mail.emails
    assert (email.sender, email.to) == ("limits@example.com", ["ops@acme.example"])
    assert email.message["Subject"] == "Traffic of Acme: 16 times the usual"
    text = email.message.get_content()
    assert "Acme sent 1,000 requests in a minute and 1,000 in the minute before. Usually it is 63 at most." in text
    assert "calls: 300/minute, burst 900 until" in text
    assert "https://limits.example.com/limit-request/" in text
    (call,) = customers.hooks.calls
    at = customers.fleet.clock.now_us() / 1_000_000
    assert verify(call.body, call.headers["headgate-signature"], "sixteen bytes too", now=at)
    message = json.loads(call.body)
    assert message["type"] == "traffic-growth"
    assert message["step"]["verdict"] == "people"
    assert "hmac:" not in call.body.decode()
    assert json.loads(customers.slack.calls[0].body)["text"].startswith("Acme sent 1,000 requests")
    # Nothing is sent twice, also by another admin server.
    assert customers.make().check() == customers.notifier.check() == customers.deliver() == 0


def test_what_is_not_accepted_is_sent_again(customers: Customers) -> None:
    customers.mail.answers = ["451 try later"]
    customers.slack.answers = [(500, {})]
    customers.grow()
    assert customers.deliver() == 1
    customers.fleet.clock.advance(60)
    assert customers.deliver() == 2
    assert len(customers.mail.emails) == 1
    with read_transaction(customers.fleet.store.engine) as connection:
        rows = connection.execute(select(NOTICES).where(NOTICES.c.channel != "")).all()
    assert [(row.error, row.next_us) for row in rows] == [(None, None)] * 3


def test_limits_of_a_paid_account_are_raised_for_a_time(customers: Customers) -> None:
    before = customers.limits()
    customers.grow()
    assert customers.limits() == {**before, "calls": "300/minute, burst 900", "exports": "15/hour"}
    entry = customers.service.audit.list().items[0]
    assert entry.author == "automatic raise"
    assert "tier pro allows 3 times; anomaly " in entry.reason
    (override,) = [each for each in customers.service.clients.get(ACME).overrides if each.limit == "calls"]
    assert override.valid_until_us is not None
    customers.fleet.clock.advance(86_400)
    assert customers.limits() == before


def test_a_raise_is_never_above_the_bound(customers: Customers) -> None:
    customers.grow()
    raised = customers.limits()
    customers.fleet.clock.advance(3_600)  # the first anomaly is over, and traffic grows again
    customers.grow()
    assert customers.limits() == raised
    newer, first = customers.fleet.log.recent()
    assert customers.service.growth.raise_limits(newer, ACME) == []
    # Another admin server that handles the same anomaly reports the same, and raises nothing.
    assert len(customers.service.growth.raise_limits(first, ACME)) == 2
    assert customers.limits() == raised


@pytest.mark.parametrize(
    ("look", "policy"),
    [
        (BOT, POLICY),
        (PEOPLE, POLICY.replace(", raise: {factor: 3, for: 24 hours}", "")),
        (PEOPLE, POLICY.replace("acme, tier: pro", "other")),
    ],
    ids=["one bot", "tier without a bound", "unpaid"],
)
def test_other_limits_are_not_raised(learned: Path, tmp_path: Path, look: Any, policy: str) -> None:
    with Customers(learned, tmp_path, policy) as customers:
        before = customers.limits()
        customers.grow(look)
        assert customers.limits() == before
        assert customers.deliver() == 3
        assert "We have raised" not in customers.mail.emails[0].message.get_content()


def test_an_override_is_left_as_it_is(customers: Customers) -> None:
    change = ChangeContext(SUPPORT, "contract")
    customers.service.overrides.add(change, ACME, OverrideSpec("120/minute", limit="calls"))
    customers.grow()
    assert customers.limits()["calls"] == "120/minute"
    assert customers.limits()["exports"] == "15/hour"


def test_clients_that_are_not_in_the_file_get_no_message(customers: Customers) -> None:
    customers.grow(name="umbrella")
    assert customers.fleet.log.recent()
    assert customers.deliver() == 0


def test_customer_requests_and_support_approves(customers: Customers) -> None:
    customers.grow()
    customers.deliver()
    growth = customers.service.growth
    link = growth.open_link(customers.token())
    assert (link.client, link.name) == (ACME, "Acme")
    assert [each.limit for each in growth.limits_of(ACME)] == ["calls", "exports"]
    growth.submit(link, limit="calls", wanted="5,000", message="launch")
    request = growth.submit(link, limit="calls", wanted="900", message="launch\n until friday")
    assert [each.id for each in growth.list()] == [request.id]  # the second one replaces the first
    assert (request.current, request.wanted, request.message) == (
        "300/minute, burst 900",
        "900/minute",
        "launch until friday",
    )
    with pytest.raises(NotAllowed):
        growth.approve(ChangeContext(Actor("vic", "viewer"), "launch"), request.id)
    growth.approve(ChangeContext(SUPPORT, "launch"), request.id)
    assert customers.limits()["calls"] == "900/minute"
    assert (growth.get(request.id).state, growth.get(request.id).decided_by) == ("approved", "sue")
    with pytest.raises(InvalidInput, match="approved by sue already"):
        growth.decline(ChangeContext(SUPPORT, "no"), request.id)


def test_support_declines(customers: Customers) -> None:
    customers.grow()
    customers.deliver()
    growth = customers.service.growth
    link = growth.open_link(customers.token())
    request = growth.submit(link, limit="exports", wanted="50/hour", message="")
    growth.decline(ChangeContext(SUPPORT, "ask sales"), request.id)
    assert growth.get(request.id).state == "declined"
    entries = [(entry.author, entry.action, entry.reason) for entry in customers.service.audit.list().items]
    assert ("sue", "declined", "ask sales") in entries
    with pytest.raises(NotFound):
        growth.get("other")


def test_links_expire_and_cannot_be_changed(customers: Customers) -> None:
    customers.grow()
    customers.deliver()
    token, growth = customers.token(), customers.service.growth
    body, _, signature = token.partition(".")
    for forged in (
        "",
        ".",
        body,
        f"{body}.",
        f"{body[:-1]}A.{signature}",
        f"{body}.{signature[:-1]}",
        "ä.ü",
        "x" * 5_000,
    ):
        with pytest.raises(InvalidInput, match="expired or is incomplete"):
            growth.open_link(forged)
    customers.fleet.clock.advance(LIFETIME_US / 1_000_000)
    with pytest.raises(InvalidInput, match="expired"):
        growth.open_link(token)


@pytest.mark.parametrize(
    ("limit", "wanted", "message", "error"),
    [
        ("everything", "5", "", "choose one of your limits"),
        ("calls", "many", "", "many"),
        ("calls", "0", "", "0 allows nothing"),
        ("calls", "100", "x" * 501, "at most 500"),
        ("calls", "100", "our key is sk_live_0123456789abcdef0123456789abcdef", "API key"),
    ],
)
def test_invalid_requests_are_refused(customers: Customers, limit: str, wanted: str, message: str, error: str) -> None:
    customers.grow()
    customers.deliver()
    link = customers.service.growth.open_link(customers.token())
    with pytest.raises(InvalidInput, match=error):
        customers.service.growth.submit(link, limit=limit, wanted=wanted, message=message)
    assert customers.service.growth.list() == []


FILE = """
link = "https://limits.example.com/"

[smtp]
host = "smtp.example.com"
sender = "limits@example.com"
user = "headgate"
password = "${SMTP_PASSWORD}"

[[customers]]
tenant = "acme"
name = "Acme"
email = ["ops@acme.example", "cto@acme.example"]
slack = "https://hooks.slack.com/services/T0/B0/x"
"""


def test_file_of_customers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SMTP_PASSWORD", "hunter2")
    (tmp_path / "customers.toml").write_text(FILE)
    found = read_customers(tmp_path / "customers.toml")
    assert found.link == "https://limits.example.com"
    assert found.smtp == SmtpSettings("smtp.example.com", "limits@example.com", 587, "starttls", "headgate", "hunter2")
    (customer,) = found.customers
    assert (customer.client, customer.email) == (ACME, ("ops@acme.example", "cto@acme.example"))


@pytest.mark.parametrize(
    ("old", "new", "error"),
    [
        ("sender =", "from =", r"smtp: unknown field 'from'"),
        ('"limits@example.com"', '"limits"', "sender 'limits' is not an email address"),
        ('user = "headgate"', 'security = "ssl"', "unknown security 'ssl'"),
        ('tenant = "acme"', "", "exactly one of tenant, user, api_key, ip"),
        ('tenant = "acme"', 'api_key = "sk_live_1"', "give the keyed hash"),
        ('"ops@acme.example"', '"acme"', "email 'acme' is not an email address"),
        ('"https://hooks', '"hooks', "slack must be a URL"),
        ("[smtp]", "[smtp]\nport = 'x'", "port must be a whole number"),
        ("${SMTP_PASSWORD}", "${OTHER}", "needs the environment variable OTHER"),
        ("[[customers]]", "[customers", "is not TOML"),
        ('name = "Acme"', 'webhook = "https://acme.example"', "webhook needs webhook_secret"),
    ],
)
def test_mistakes_in_the_file_are_explained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, old: str, new: str, error: str
) -> None:
    monkeypatch.setenv("SMTP_PASSWORD", "hunter2")
    assert old in FILE
    (tmp_path / "customers.toml").write_text(FILE.replace(old, new, 1))
    with pytest.raises(InvalidConfiguration, match=error) as found:
        read_customers(tmp_path / "customers.toml")
    assert "sk_live" not in f"{found.value}"


def test_smtp_without_tls_is_chosen_deliberately() -> None:
    assert SmtpSettings("h", "a@b").security == "starttls"
    assert timedelta(microseconds=LIFETIME_US) == timedelta(days=7)


def test_the_file_in_the_docs_is_valid(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = (Path(__file__).parents[3] / "docs" / "growth.md").read_text("utf-8")
    (tmp_path / "customers.toml").write_text(page.partition("```text\n")[2].partition("```")[0])
    for name in ("SMTP_PASSWORD", "ACME_SECRET"):
        monkeypatch.setenv(name, "sixteen bytes or more")
    monkeypatch.setenv("ACME_SLACK_URL", "https://hooks.slack.example/services/x")
    assert read_customers(tmp_path / "customers.toml").customers[0].name == "Acme"
