"""The admin server under attack: what strangers, viewers and support try on it, and what hostile values do to it."""

from __future__ import annotations

import asyncio
import json
import logging
import shutil
import socket
import ssl
import time
from contextlib import ExitStack, closing, suppress
from dataclasses import replace
from datetime import UTC, datetime, timedelta, timezone
from typing import TYPE_CHECKING, Any
from urllib.parse import quote_plus

import httpx
import pytest
from sqlalchemy import select
from starlette.responses import Response

from headgate import Limiter
from headgate.cli import main
from headgate.control.admin import AdminServer, Tokens, create_app, serve
from headgate.control.admin.middleware import HostAndSecurityHeaders, credential_identity
from headgate.control.admin.sessions import Sessions
from headgate.control.anomalies.detector import ANOMALY_QUEUE, AnomalyDetector
from headgate.control.anomalies.tables import ANOMALIES
from headgate.control.config import ConfigStore, ConfigUnavailable
from headgate.control.config.engine import read_transaction, write_transaction
from headgate.control.config.tables import AUDIT
from headgate.control.service import Actor, AdminService, ChangeContext, ClientRef, OverrideSpec
from headgate.control.service import service as service_module
from headgate.control.service.errors import LogUnavailable, NeedsConfirmation, NotAllowed, NotFound
from headgate.control.service.redaction import words_like_keys
from headgate.control.webhooks import Webhook
from headgate.errors import HeadgateError, InvalidConfiguration, InvalidInput, StoreUnavailable
from headgate.gate.gate import Gate
from headgate.policy import read
from headgate.telemetry.fleet.model import NodeStatus
from headgate.telemetry.fleet.reporter import StatusReporter
from headgate.telemetry.fleet.status_store import MemoryStatusStore
from headgate.testing import FakeClock, FakeRequest
from support.asgi_client import scope, talk
from support.servers import make_certificates

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

POLICY = """
tier: free
routes: [{path: /search, class: search}]
limits:
  - {name: search, class: search, by: client, bucket: 100/minute, tiers: {pro: 5000/minute}}
  - {name: pay, path: /pay, by: ip, bucket: 10/minute}
  - {name: devices, path: /devices, by: device, missing: skip, bucket: 10/minute}
"""
SECRET = "the same sixteen bytes or more"
KEY = "zzKnownKey7Qm2vN8xLpR4"
START_US = 1_794_800_000_000_000
ACME = ClientRef("tenant", "acme")
SUE, OTTO, ADA = Actor("sue", "support"), Actor("otto", "operator"), Actor("ada", "admin")
EVERYBODY = ClientRef("ip", "0.0.0.0/0")


class Place:
    """A service with tokens beside it, and an app that serves them."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.clock = FakeClock(START_US)
        self.config = ConfigStore(url, secret=SECRET, clock=self.clock)
        self.tokens = Tokens(url, clock=self.clock)
        self.counters = Limiter(clock=self.clock)
        self.service = AdminService(self.config, counters=self.counters, secret=SECRET, clock=self.clock)
        if self.config.version == 0:
            self.service.policy.put(ChangeContext(OTTO, "begin"), POLICY)
            self.service.overrides.add(
                ChangeContext(SUE, "known"), ClientRef("api_key", KEY), OverrideSpec("150/minute", limit="search")
            )

    def app(self) -> Any:
        return create_app(self.service, self.tokens, clock=self.clock)

    def close(self) -> None:
        self.counters.close()
        self.tokens.close()
        self.config.close()


@pytest.fixture(scope="module")
def begun(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Stores that are ready: not for each test anew."""
    file = tmp_path_factory.mktemp("begun") / "config.db"
    Place(f"sqlite:///{file}").close()
    return {"file": file}


@pytest.fixture
def place(tmp_path: Path, begun: dict[str, Any]) -> Iterator[Place]:
    shutil.copy(begun["file"], tmp_path / "config.db")
    with closing(Place(f"sqlite:///{tmp_path}/config.db")) as made:
        yield made


@pytest.fixture(params=["sqlite", "postgresql"])
def anywhere(request: pytest.FixtureRequest, begun: dict[str, Any]) -> Iterator[Place]:
    """On each kind of database, for what changes nothing."""
    if request.param == "sqlite":
        url = f"sqlite:///{begun['file']}"
    else:
        url = begun.setdefault("url", request.getfixturevalue("postgres").fresh_url())
    with closing(Place(url)) as made:
        yield made


def ask(app: Any, method: str, path: str, **options: Any) -> httpx.Response:
    async def run() -> httpx.Response:
        transport = httpx.ASGITransport(app, client=("203.0.113.9", 1234), raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as http:
            return await http.request(method, path, **options)

    return asyncio.run(run())


def notes(place: Place) -> list[str]:
    with read_transaction(place.config.engine) as connection:
        return list(connection.scalars(select(AUDIT.c.action)))


# ------------------------------------------------------------------ strangers


def test_cookie_full_of_backslashes_costs_nothing(place: Place) -> None:
    # To read it as cookies are read takes a minute, in which nobody else is answered.
    cookie = 'headgate="' + "\\" * 60_000 + '"'
    app = place.app()
    before = time.process_time()
    answers = [ask(app, "GET", path, headers={"Cookie": cookie}).status_code for path in ("/health", "/")]
    assert answers == [200, 303]
    assert time.process_time() - before < 5.0


@pytest.mark.parametrize(
    ("sent", "seen"),
    [
        (["headgate=abc_-1; other=x; zone=Etc/GMT+5"], "headgate=abc_-1; zone=Etc/GMT+5"),
        (['a="x\\"y; headgate=1'], "headgate=1"),
        (['flash="YWJj=="; headgate=1'], 'flash="YWJj=="; headgate=1'),
        (["__Host-headgate=1", "zone=UTC"], "__Host-headgate=1; zone=UTC"),
        (['headgate="a\\073b"'], None),
        (["xheadgate=1; headgates=2"], None),
    ],
)
def test_no_cookies_but_its_own_reach_the_server(sent: list[str], seen: str | None) -> None:
    found: list[Any] = []

    async def app(scope: Any, _: Any, send: Any) -> None:
        found.extend(value.decode() for name, value in scope["headers"] if name == b"cookie")
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    asyncio.run(talk(HostAndSecurityHeaders(app), scope(headers=[(b"cookie", each.encode()) for each in sent])))
    assert found == ([] if seen is None else [seen])


def test_sessions_have_separate_limits() -> None:
    def asked(cookie: str) -> str | None:
        return credential_identity(FakeRequest(headers={"cookie": cookie}))

    assert asked("zone=UTC; headgate=one") == asked("headgate=one") != asked("headgate=two")
    assert asked("__Host-headgate=one") == asked("headgate=one")
    assert asked("zone=UTC") is None


def received(made: socket.socket) -> bytes:
    """One whole response, in however many pieces it comes."""
    found = b""
    while b"\r\n\r\n" not in found:
        piece = made.recv(65536)
        if not piece:
            return found
        found += piece
    head, _, body = found.partition(b"\r\n\r\n")
    length = next(int(line[15:]) for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:"))
    while len(body) < length:
        body += made.recv(65536)
    return head


def test_idle_connection_is_closed(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve, "HEADERS_TIMEOUT_S", 0.3)
    with AdminServer(place.service, place.tokens, port=0, pages=False) as server, ExitStack() as stack:

        def opened(*sent: bytes) -> socket.socket:
            made = stack.enter_context(socket.create_connection(("127.0.0.1", server.port), timeout=5))
            for each in sent:
                made.sendall(each)
            return made

        whole = b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"
        silent, begun = opened(), opened(b"GET /health HTTP/1.1\r\nHost: 127.0")
        second = opened(whole)
        assert received(second).startswith(b"HTTP/1.1 200")
        second.sendall(whole[:20])
        assert [each.recv(65536) for each in (silent, begun, second)] == [b"", b"", b""]
        answered = opened(whole)
        assert received(answered).startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize("most", [None, 20], ids=["by address", "in all"])
def test_idle_connections_take_no_place_from_others(
    place: Place, monkeypatch: pytest.MonkeyPatch, most: int | None
) -> None:
    if most is not None:
        monkeypatch.setattr(serve, "MAX_CONNECTIONS", most)
    else:
        monkeypatch.setattr(serve, "MAX_CONNECTIONS_PER_ADDRESS", 20)
    token = place.tokens.make("vera", "viewer", by="the test").text
    with AdminServer(place.service, place.tokens, port=0, pages=False) as server, ExitStack() as stack:

        def opened(sent: bytes = b"") -> socket.socket:
            made = stack.enter_context(socket.create_connection(("127.0.0.1", server.port), timeout=10))
            made.sendall(sent)
            return made

        head = f"Host: 127.0.0.1\r\nAuthorization: Bearer {token}\r\n\r\n".encode()
        signed_in = opened(b"GET /api/v1/tiers HTTP/1.1\r\n" + head)
        assert received(signed_in).startswith(b"HTTP/1.1 200")
        slow = b"POST /api/v1/find HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 9\r\n\r\n"
        idle = [opened([b"", b"GET /", slow][number % 3]) for number in range(60)]
        for _ in range(3):
            answer = received(opened(b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"))
            assert answer.startswith(b"HTTP/1.1 200"), answer
        assert idle[0].recv(1) == b"", "the oldest was closed"
        signed_in.sendall(b"GET /api/v1/tiers HTTP/1.1\r\n" + head)
        assert received(signed_in).startswith(b"HTTP/1.1 200"), "a caller with a valid token keeps its connection"


def test_connections_without_a_tls_handshake_take_no_place_from_others(
    place: Place, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(serve, "MAX_CONNECTIONS_PER_ADDRESS", 20)
    make_certificates(tmp_path)
    files = {"cert": tmp_path / "server.pem", "key": tmp_path / "server.key"}
    trusted = ssl.create_default_context(cafile=tmp_path / "ca.pem")
    with AdminServer(place.service, place.tokens, port=0, **files) as server, ExitStack() as stack:
        assert server.url == f"https://127.0.0.1:{server.port}"
        with httpx.Client(base_url=server.url, verify=trusted) as http:
            assert http.get("/health").json() == {"state": "ready"}
            token = place.tokens.make("vera", "viewer", by="the test").text
            headers = {"Authorization": f"Bearer {token}"}
            assert http.get("/api/v1/tiers", headers=headers).status_code == 200
            idle = [
                stack.enter_context(socket.create_connection(("127.0.0.1", server.port), timeout=10)) for _ in range(60)
            ]
            assert httpx.get(f"{server.url}/health", verify=trusted).status_code == 200
            assert idle[0].recv(1) == b"", "the oldest was closed"
            idle[-1].sendall(b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
            with suppress(ConnectionResetError):
                assert not idle[-1].recv(65536).startswith(b"HTTP/"), "nothing is answered in clear"
            assert http.get("/api/v1/tiers", headers=headers).status_code == 200


def test_unreadable_certificate_is_reported_before_the_start(place: Place, tmp_path: Path) -> None:
    (tmp_path / "cert.pem").write_text("no certificate")
    for cert in ("cert.pem", "missing.pem"):
        with pytest.raises(InvalidConfiguration, match=f"cannot read the certificate .*{cert}"):
            AdminServer(place.service, place.tokens, port=0, cert=tmp_path / cert, key=tmp_path / "cert.pem")


def test_proxy_has_as_many_connections_as_all_addresses_together(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve, "MAX_CONNECTIONS_PER_ADDRESS", 2)
    with (
        AdminServer(place.service, place.tokens, port=0, pages=False, proxies=["127.0.0.0/8"]) as server,
        ExitStack() as stack,
    ):
        made = [stack.enter_context(socket.create_connection(("127.0.0.1", server.port), timeout=10)) for _ in range(9)]
        for each in made:
            each.sendall(b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
            assert received(each).startswith(b"HTTP/1.1 200")


def test_valid_token_logs_in_despite_failures_of_its_address(place: Place) -> None:
    app = place.app()
    token = place.tokens.make("vera", "viewer", by="the test")
    for path, options in (
        ("/login", {"method": "POST", "data": {"token": "hg_0000000000_" + "a" * 43}}),
        ("/enter?code=made-up", {"method": "GET"}),
    ):
        place.clock.advance(3600)
        failed = [ask(app, path=path, **options) for _ in range(12)]  # type: ignore[arg-type]
        assert [each.status_code for each in failed] == [401] * 10 + [429] * 2
        assert int(failed[-1].headers["retry-after"]) >= 1
        assert "Try again in 6 seconds." in failed[-1].text
        assert ask(app, "POST", "/login", data={"token": token.text}).status_code == 303
        assert ask(app, "GET", f"/enter?code={place.tokens.create_code(token.token)}").status_code == 303


def test_hsts_is_sent_over_tls(place: Place) -> None:
    def field(app: Any, **options: Any) -> str | None:
        return ask(app, "GET", "/login", **options).headers.get("strict-transport-security")

    secure = create_app(place.service, place.tokens, secure=True, clock=place.clock)
    assert field(secure, headers={"Host": "admin.example.org"}) == "max-age=31536000"
    assert field(secure, headers={"Host": "localhost:8001"}) is None, "it would apply to all ports"
    assert field(place.app(), headers={"Host": "admin.example.org"}) is None


def test_request_has_a_head_of_bounded_size(place: Place) -> None:
    with ExitStack() as stack:
        server = stack.enter_context(AdminServer(place.service, place.tokens, port=0, pages=False))
        made = stack.enter_context(socket.create_connection(("127.0.0.1", server.port), timeout=5))
        made.sendall(b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\nX: " + b"a" * 70_000)
        assert made.recv(65536).startswith(b"HTTP/1.1 400")


def test_path_of_thousands_of_digits_is_no_number(place: Place) -> None:
    app = place.app()
    for path in ("/overrides/", "/policy/versions/", "/api/v1/overrides/"):
        refused = ask(app, "GET", path + "9" * 5000)
        assert (refused.status_code, refused.json()["type"]) == (414, "too-long")


def test_invalid_requests_write_nothing_to_the_log(place: Place, caplog: pytest.LogCaptureFixture) -> None:
    with ExitStack() as stack:
        server = stack.enter_context(AdminServer(place.service, place.tokens, port=0, pages=False))
        for sent in (b"\x16\x03\x01 no HTTP\r\n\r\n", b"GET /health HTTP/1.1\r\nHost\r\n\r\n"):
            made = stack.enter_context(socket.create_connection(("127.0.0.1", server.port), timeout=5))
            made.sendall(sent)
            assert made.recv(65536).startswith(b"HTTP/1.1 400")
    assert [each for each in caplog.records if each.levelno >= logging.WARNING] == []


def test_no_request_hides_in_the_body_of_another(place: Place) -> None:
    inner = b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"
    head = b"POST /health HTTP/1.1\r\nHost: 127.0.0.1\r\nTransfer-Encoding: chunked\r\n"
    with ExitStack() as stack:
        server = stack.enter_context(AdminServer(place.service, place.tokens, port=0, pages=False))
        made = stack.enter_context(socket.create_connection(("127.0.0.1", server.port), timeout=5))
        made.sendall(head + b"Content-Length: %d\r\n\r\n0\r\n\r\n" % (len(inner) + 5) + inner)
        answers = b"".join(iter(lambda: made.recv(65536), b""))
    assert (answers.count(b"HTTP/1.1 "), answers[:12]) == (1, b"HTTP/1.1 400")


def test_reading_policies_is_not_for_ever_and_a_day(place: Place) -> None:
    token = place.tokens.make("vera", "viewer", by="the test").text
    app = place.app()
    headers = {"Authorization": f"Bearer {token}"}
    asked = [
        ask(app, "POST", "/api/v1/policy/check", json={"text": "limits: []"}, headers=headers).status_code
        for _ in range(12)
    ]
    assert asked == [200] * 10 + [429] * 2
    assert ask(app, "GET", "/api/v1/tiers", headers=headers).status_code == 200


# ------------------------------------------------------------------ small steps


def raised_tier(place: Place, number: int, **options: Any) -> Any:
    return place.service.policy.set_tier(ChangeContext(OTTO, "more", **options), "pro", "search", f"{number}/minute")


def raised_policy(place: Place, number: int, **options: Any) -> Any:
    text = POLICY.replace("pro: 5000/minute", f"pro: {number}/minute")
    return place.service.policy.put(ChangeContext(OTTO, "more", **options), text)


def raised_override(place: Place, number: int, **options: Any) -> Any:
    found = place.service.overrides.list(client=ACME).items
    if found:
        return place.service.overrides.change(
            ChangeContext(SUE, "more", **options), found[0].id, OverrideSpec(f"{number}/minute", limit="search")
        )
    return place.service.overrides.add(
        ChangeContext(SUE, "more", **options), ACME, OverrideSpec(f"{number}/minute", limit="search")
    )


def raised_in_document(place: Place, number: int, **options: Any) -> Any:
    line = f"overrides: [{{tenant: acme, limit: search, bucket: {number}/minute}}]\n"
    return place.service.policy.put(ChangeContext(OTTO, "more", **options), POLICY + line)


def raised_cost(place: Place, number: int, **options: Any) -> Any:
    return place.service.policy.set_route(
        ChangeContext(OTTO, "more", **options), "/search", number, route_class="search"
    )


STEPS_UP: dict[str, tuple[Callable[..., Any], list[int], str]] = {
    "tier": (raised_tier, [20_000, 100_000, 600_000], "tier pro had 5000/minute on search an hour ago"),
    "policy": (raised_policy, [20_000, 100_000, 600_000], "tier pro had 5000/minute on search an hour ago"),
    "override": (raised_override, [400, 2000, 9000], "tenant acme had 100/minute on search an hour ago"),
    "document": (raised_in_document, [400, 2000, 9000], "tenant acme had 100/minute on search an hour ago"),
    "cost": (raised_cost, [4, 20, 100], "requests to /search cost 1 an hour ago; 20 is more than 10 times that"),
}


@pytest.mark.parametrize("name", STEPS_UP)
def test_small_steps_within_an_hour_add_up(place: Place, name: str) -> None:
    step, (small, large, larger), told = STEPS_UP[name]
    place.clock.advance(7200)
    step(place, small)
    place.clock.advance(60)
    with pytest.raises(NeedsConfirmation) as found:
        step(place, large)
    assert [told in each.text for each in found.value.risks] == [True]
    assert step(place, large, confirmed=[found.value.risks[0].code]).version
    place.clock.advance(60)
    with pytest.raises(NeedsConfirmation, match="an hour ago"):
        step(place, larger)
    assert step(place, small).version, "a step back needs no confirmation"
    place.clock.advance(3600)
    assert step(place, large).version, "after an hour, it is compared with what holds now"


def test_only_what_a_change_touches_is_compared_with_an_hour_ago(place: Place) -> None:
    place.clock.advance(7200)
    raised_tier(place, 600_000, confirmed=["ten-times"])
    place.clock.advance(60)
    assert place.service.policy.set_tier(ChangeContext(OTTO, "another limit"), "pro", "pay", "20/minute").version
    assert place.service.overrides.add(
        ChangeContext(SUE, "another client"), ACME, OverrideSpec("200/minute", limit="search")
    ).version


# ------------------------------------------------------------------ roles


NETWORKS: dict[str, Callable[[AdminService, Actor, ClientRef], Any]] = {
    "override": lambda service, by, who: service.overrides.add(
        ChangeContext(by, "r"), who, OverrideSpec("90/minute", limit="search")
    ),
    "assign": lambda service, by, who: service.clients.assign_tier(ChangeContext(by, "r"), who, "pro"),
}


@pytest.mark.parametrize("name", NETWORKS)
def test_support_does_nothing_to_networks(place: Place, name: str) -> None:
    for kind, value in (("ip", "0.0.0.0/0"), ("ip", "::/0"), ("ip", "::ffff:0:0/97"), ("subnet", "192.0.2.0/24")):
        with pytest.raises(NotAllowed, match="networks"):
            NETWORKS[name](place.service, SUE, ClientRef(kind, value))
    assert NETWORKS[name](place.service, OTTO, EVERYBODY).version
    assert NETWORKS[name](place.service, SUE, ClientRef("ip", "192.0.2.1")).version


def test_support_blocks_the_ipv6_network_of_a_customer_and_nothing_wider(place: Place) -> None:
    service = place.service
    customer = ClientRef("ip", "2001:db8:1:2::/64")
    assert service.blocks.add(ChangeContext(SUE, "scraping"), customer).version
    assert [each.who for each in service.blocks.list().items] == [customer]
    assert [each.value for each in place.counters.blocked()] == [customer.value]
    assert service.blocks.remove(ChangeContext(SUE, "sorry"), customer).version
    for value in ("2001:db8:1::/63", "2001:db8::/32", "192.0.2.0/31", "::ffff:192.0.2.0/120", "64:ff9b::c000:200/120"):
        for change in (service.blocks.add, service.blocks.remove):
            with pytest.raises(NotAllowed, match="networks"):
                change(ChangeContext(SUE, "r"), ClientRef("ip", value))


def test_block_of_one_ipv6_address_warns_about_its_network(place: Place) -> None:
    blocked = place.service.blocks.add(ChangeContext(SUE, "scraping"), ClientRef("ip", "2001:db8:1:2::77"))
    assert [note for note in blocked.notes if note.endswith("block 2001:db8:1:2::/64")]
    assert place.service.blocks.add(ChangeContext(SUE, "scraping"), ClientRef("ip", "192.0.2.77")).notes == ()


def test_support_does_not_undo_what_was_done_to_networks(place: Place) -> None:
    service = place.service
    (id,) = service.overrides.add(
        ChangeContext(OTTO, "r"), EVERYBODY, OverrideSpec("90/minute", limit="search")
    ).version.ids  # type: ignore[union-attr] # a version
    service.clients.assign_tier(ChangeContext(OTTO, "r"), EVERYBODY, "pro")
    before = service.version
    changes: list[Callable[[], Any]] = [
        lambda: service.overrides.change(ChangeContext(SUE, "r"), id, OverrideSpec("95/minute", limit="search")),
        lambda: service.overrides.remove(ChangeContext(SUE, "r"), id),
        lambda: service.clients.unassign_tier(ChangeContext(SUE, "r"), EVERYBODY),
    ]
    for change in changes:
        with pytest.raises(NotAllowed, match="networks"):
            change()
    assert service.version == before
    service.overrides.remove(ChangeContext(OTTO, "r"), id)


# ------------------------------------------------------------------ dangers


def doubts(change: Callable[[], Any]) -> list[str]:
    with pytest.raises(NeedsConfirmation) as error:
        change()
    return [risk.code for risk in error.value.risks]


def test_block_that_comes_back_with_a_version_is_looked_at_twice(place: Place) -> None:
    service = place.service
    service.blocks.add(ChangeContext(OTTO, "r", confirmed=["wildcard-block"]), ClientRef("ip", "10.0.0.0/9"))
    then = service.version
    service.blocks.remove(ChangeContext(OTTO, "r"), ClientRef("ip", "10.0.0.0/9"))
    assert doubts(lambda: service.policy.rollback(ChangeContext(OTTO, "r"), then)) == ["wildcard-block"]
    assert service.policy.rollback(ChangeContext(OTTO, "r", confirmed=["wildcard-block"]), then).version


def test_override_that_comes_back_with_a_version_is_compared_with_what_holds(place: Place) -> None:
    service = place.service
    service.overrides.add(
        ChangeContext(SUE, "r", confirmed=["ten-times"]), ACME, OverrideSpec("5000/minute", limit="search")
    )
    then = service.version
    service.overrides.remove(ChangeContext(SUE, "r"), 2)
    assert doubts(lambda: service.policy.rollback(ChangeContext(OTTO, "r"), then, sections=["overrides"])) == [
        "ten-times"
    ]
    service.overrides.add(
        ChangeContext(SUE, "r", confirmed=["ten-times"]), ACME, OverrideSpec("100/minute, burst 5000", limit="search")
    )
    after = service.version
    service.overrides.change(
        ChangeContext(SUE, "r", confirmed=["tenth"]), 3, OverrideSpec("100/minute", limit="search")
    )
    assert doubts(lambda: service.policy.rollback(ChangeContext(OTTO, "r"), after)) == ["ten-times"]


def test_every_guardrail_is_reported(place: Place) -> None:
    service = place.service
    many = "".join(f"  - {{name: more{n}, path: /more{n}, by: ip, bucket: 10/minute}}\n" for n in range(30))
    last = "  - {name: last, path: /last, by: ip, bucket: 10/minute}\n"
    service.policy.put(ChangeContext(OTTO, "r"), POLICY + many + last)
    other = POLICY + last.replace("10/", "900/")
    codes = doubts(lambda: service.policy.put(ChangeContext(OTTO, "r"), other))
    assert {*codes} == {"policy", "ten-times"}
    assert len(codes) == 20
    assert {*doubts(lambda: service.policy.put(ChangeContext(OTTO, "r", confirmed=["policy"]), other))} == {
        "policy",
        "ten-times",
    }
    assert service.policy.put(ChangeContext(OTTO, "r", confirmed=["policy", "ten-times"]), other).version


@pytest.mark.parametrize(
    ("text", "codes"),
    [
        (POLICY.replace("tier: free", "tier: pro"), ["ten-times"]),
        (POLICY.replace("path: /pay, by: ip", "path: /pay, by: global"), ["policy"]),
        (POLICY.replace("tier: free", "tier: basic"), []),
    ],
)
def test_global_changes_need_confirmation(place: Place, text: str, codes: list[str]) -> None:
    if codes:
        assert doubts(lambda: place.service.policy.put(ChangeContext(OTTO, "r"), text)) == codes
    assert place.service.policy.put(ChangeContext(OTTO, "r", confirmed=codes), text).version


# ------------------------------------------------------------------ hostile values


HUGE = 10**19
READS: dict[str, Callable[[Place], Any]] = {
    "search of clients": lambda place: place.service.clients.list(search="\0"),
    "search of overrides": lambda place: place.service.overrides.list(search="a\0"),
    "search of blocks": lambda place: place.service.blocks.list(search="\0"),
    "search of the audit": lambda place: place.service.audit.list(search="\0"),
    "author": lambda place: place.service.audit.list(author="\0"),
    "client": lambda place: place.service.clients.find("\0"),
    "label": lambda place: place.service.clients.find("label=a\0"),
    "surrogate": lambda place: place.service.clients.find("\ud800"),
    "number in a cursor": lambda place: place.service.clients.list(after="tables:5"),
    "nothing in a cursor": lambda place: place.service.blocks.list(after="live:null"),
    "object in a cursor": lambda place: place.service.clients.list(after='tables:{"a": 1, "b": 2}'),
    "text in a cursor": lambda place: place.service.clients.list(after='tables:"ab"'),
    "NUL in a cursor": lambda place: place.service.clients.list(after='tables:["a", "\\u0000"]'),
    "deep cursor": lambda place: place.service.clients.list(after="tables:" + "[" * 100_000),
    "override": lambda place: place.service.overrides.get(HUGE),
    "change of an override": lambda place: place.service.overrides.change(
        ChangeContext(SUE, "r"), HUGE, OverrideSpec("1/minute")
    ),
    "block": lambda place: place.service.blocks.remove(ChangeContext(SUE, "r"), HUGE),
    "below": lambda place: place.service.overrides.get(-1),
    "version": lambda place: place.service.policy.get(HUGE),
    "token": lambda place: place.tokens.revoke("\0", by="ada"),
    "end of time": lambda place: place.service.clients.why(ACME, at="9999-12-31", zone=UTC),
    "begin of time": lambda place: place.service.clients.why(ACME, at="0001-01-01", zone=timezone(timedelta(hours=14))),
}


@pytest.mark.parametrize("name", READS)
def test_what_no_database_can_hold_is_refused_and_no_failure(anywhere: Place, name: str) -> None:
    with pytest.raises((InvalidInput, NotFound)):
        READS[name](anywhere)
    assert anywhere.service.policy.versions(before=HUGE, most=1)


def test_values_that_the_database_cannot_represent_are_rejected(anywhere: Place) -> None:
    is_postgres = anywhere.url.startswith("postgresql")  # SQLite can hold any letter
    for asked in [AUDIT.c.number == HUGE, *([AUDIT.c.author == "\0"] if is_postgres else [])]:
        with (
            pytest.raises(InvalidInput, match="cannot represent"),
            read_transaction(anywhere.config.engine) as connection,
        ):
            connection.execute(select(AUDIT).where(asked))


BEYOND = [datetime(2200, 1, 1, tzinfo=UTC), datetime(9999, 12, 31, 23, 59, tzinfo=timezone(timedelta(hours=-14)))]


@pytest.mark.parametrize("end", BEYOND, ids=["2200", "9999"])
def test_end_beyond_the_horizon_is_refused_everywhere_with_a_remedy(place: Place, end: datetime) -> None:
    told = "times are from 1970 to 2199; for no end, leave valid_until out"
    service, before = place.service, place.config.version
    line = f"blocked: [{{tenant: evil, valid_until: {end.isoformat()}}}]\n"
    tries: list[Callable[[], Any]] = [
        lambda: service.overrides.add(
            ChangeContext(SUE, "r"), ACME, OverrideSpec("90/minute", limit="search", valid_until=end)
        ),
        lambda: service.blocks.add(ChangeContext(SUE, "r"), ACME, valid_until=end),
        lambda: service.policy.put(ChangeContext(OTTO, "r"), POLICY + line),
        lambda: place.config.block(tuple(ACME), valid_until=end, author="a", reason="r"),
        lambda: read(json.dumps({"blocked": [{"tenant": "evil", "valid_until": end.isoformat()}]}), format="json"),
    ]
    for each in tries:
        with pytest.raises(InvalidInput, match=told):
            each()
    token = place.tokens.make("sue", "support", by="the test").text
    body = {"who": {"kind": "tenant", "value": "acme"}, "valid_until": end.isoformat(), "reason": "r"}
    headers = {"Authorization": f"Bearer {token}"}
    refused = ask(place.app(), "POST", "/api/v1/blocks", json=body, headers=headers)
    assert refused.status_code == 422
    assert told in refused.json()["detail"]
    assert place.config.version == before


def test_form_refuses_an_end_beyond_the_horizon_beside_its_field(place: Place) -> None:
    session = signed_in(place, "support")
    form = {"csrf": session["csrf"], "kind": "tenant", "value": "acme", "limit": "search", "bucket": "90/minute"}
    form |= {"until": "2300-01-01", "reason": "r"}
    refused = ask(place.app(), "POST", "/client/override", data=form, headers={"cookie": session["cookie"]})
    assert refused.status_code == 422
    assert "The latest possible year is 2199. Leave empty for no end date." in refused.text


def test_last_moment_before_the_horizon_is_kept_as_it_is(place: Place) -> None:
    end = BEYOND[0] - timedelta(microseconds=1)
    place.service.blocks.add(ChangeContext(SUE, "r"), ACME, valid_until=end)
    (block,) = place.service.blocks.list().items
    assert block.valid_until_us == (end - datetime(1970, 1, 1, tzinfo=UTC)) // timedelta(microseconds=1)


@pytest.mark.parametrize("number", ["1_0", "+1", "1.0", "%201", "\u0661"])
@pytest.mark.parametrize("path", ["overrides/{}", "versions?before={}", "clients?most={}", "policy?version={}"])
def test_numbers_in_urls_are_digits(place: Place, path: str, number: str) -> None:
    token = place.tokens.make("vera", "viewer", by="the test").text
    refused = ask(place.app(), "GET", f"/api/v1/{path.format(number)}", headers={"Authorization": f"Bearer {token}"})
    assert (refused.status_code, refused.json()["type"]) == (422, "invalid")


@pytest.mark.parametrize(
    ("body", "name"),
    [
        ('{"who": {"kind": "tenant", "value": "acme"}, "reason": "a", "reason": "b"}', "reason"),
        ('{"who": {"kind": "tenant", "kind": "ip", "value": "acme"}, "reason": "a"}', "kind"),
        (f'{{"{KEY}": 1, "{KEY}": 2}}', "a name"),
    ],
)
def test_name_that_is_given_twice_is_refused(place: Place, body: str, name: str) -> None:
    headers = {"Authorization": f"Bearer {place.tokens.make('sue', 'support', by='the test').text}"}
    json_headers = headers | {"Content-Type": "application/json"}
    refused = ask(place.app(), "POST", "/api/v1/blocks", content=body.encode(), headers=json_headers)
    assert (refused.status_code, refused.json()["type"]) == (422, "invalid")
    assert f"body: {name} occurs twice" in refused.json()["detail"]
    assert KEY not in refused.text


def test_unknown_kind_is_not_echoed(place: Place) -> None:
    for value in ("hmac:" + "a" * 32, "acme"):
        for change in (
            lambda value=value: place.service.clients.reset(ChangeContext(SUE, "r"), ClientRef(KEY, value)),
            lambda value=value: place.service.clients.get(ClientRef(KEY, value)),
            lambda value=value: place.service.blocks.add(ChangeContext(SUE, "r"), ClientRef(KEY, value)),
        ):
            with pytest.raises(InvalidInput) as error:
                change()
            assert KEY not in str(error.value)
            assert "device" in str(error.value)


# ------------------------------------------------------------------ keys in words


JOINTS = [*"/:|&?#@;*+~=()[]{}<>!$%^`'", "://", "... ", "-- "]


def test_key_is_seen_however_it_is_joined_to_other_words(place: Place) -> None:
    for joint in JOINTS:
        for text in (f"see{joint}{KEY}", f"{KEY}{joint}", f"see{joint}{KEY}{joint}x"):
            with pytest.raises(InvalidInput, match="the text contains an API key"):
                place.service.refuse_keys(text)


def test_key_is_seen_behind_any_number_of_words(place: Place) -> None:
    text = " ".join(f"word{n:04}" for n in range(52))
    with pytest.raises(InvalidInput, match="the text contains an API key"):
        place.service.blocks.add(ChangeContext(SUE, f"{text} {KEY}"), ACME)
    place.service.blocks.add(ChangeContext(SUE, text), ACME)


def test_key_with_joints_of_its_own_is_a_word() -> None:
    assert "ab+cd/ef==" in words_like_keys(["key:ab+cd/ef=="])


def test_no_token_is_named_by_a_key_wherever_it_is_made(
    place: Place, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    app = place.app()  # which the pages are a part of
    with pytest.raises(InvalidInput, match="the text contains an API key"):
        place.tokens.make(f"ci/{KEY}", "viewer", by="ada")
    text = place.tokens.make("ada", "admin", by="the test").text
    refused = ask(
        app, "POST", "/api/v1/tokens", json={"name": f"ci/{KEY}", "role": "viewer"},
        headers={"Authorization": f"Bearer {text}"},
    )  # fmt: skip
    assert (refused.status_code, KEY in refused.text) == (422, False)
    monkeypatch.setenv("HEADGATE_SECRET", SECRET)
    assert main(["admin", "token", f"ci/{KEY}", "--role", "viewer", "--config", place.url]) == 2
    assert KEY not in "".join(capsys.readouterr())
    assert [each.name for each in place.tokens.list()] == ["ada"]


@pytest.mark.parametrize("name", ["a\u202eb", "a\ufeffb", "a\u2028b", "a\x85b", "a\ud800b"])
def test_token_whose_name_cannot_be_noted_is_not_made(place: Place, name: str) -> None:
    with pytest.raises(InvalidInput, match="name"):
        place.tokens.make(name, "viewer", by="ada")
    assert not place.tokens.list()


# ------------------------------------------------------------------ halves


class Away:
    """Counters that cannot be reached."""

    def __getattr__(self, _: str) -> Any:
        def fail(*_: Any, **__: Any) -> Any:
            raise StoreUnavailable("away")

        return fail


def test_what_cannot_be_noted_is_not_done(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    place.service.audit.record(ADA, "looked", "around")
    assert notes(place) == ["looked"]

    def away(*_: Any, **__: Any) -> None:
        raise ConfigUnavailable("away")

    monkeypatch.setattr("headgate.control.service.dependencies.record_action", away)
    done: list[Any] = []
    monkeypatch.setattr(place.counters, "reset", lambda *keys: done.append(keys))
    monkeypatch.setattr(place.counters, "unblock", lambda *who: done.append(who))
    changes: list[Callable[[], Any]] = [
        lambda: place.service.clients.reset(ChangeContext(SUE, "r"), ACME),
        lambda: place.service.blocks.remove(ChangeContext(SUE, "r"), ACME),
    ]
    for change in changes:
        with pytest.raises(ConfigUnavailable):
            change()
    assert not done


def test_what_was_not_done_is_not_noted(place: Place) -> None:
    nowhere: Any = Away()
    service = AdminService(place.config, counters=nowhere, secret=SECRET, clock=place.clock)
    changes: list[Callable[[], Any]] = [
        lambda: service.clients.reset(ChangeContext(SUE, "r"), ACME),
        lambda: service.blocks.remove(ChangeContext(SUE, "r"), ACME),
    ]
    for change in changes:
        with pytest.raises(HeadgateError):
            change()
    assert notes(place) == []


# ------------------------------------------------------------------ step changes and webhooks


def test_hostile_status_entries_are_ignored(place: Place, caplog: pytest.LogCaptureFixture) -> None:
    board = MemoryStatusStore()
    minute = START_US // 60_000_000 - 1
    good = {"v": 1, "minute": minute, "at_us": START_US, "clients": [["tenant", "hmac:a", "acme", 10]]}
    words: list[Any] = [
        {**good, "at_us": 10**400},
        {**good, "clients": [["tenant", "hmac:a", "acme", 10, float("inf"), "1", "1", "1"]]},
        {**good, "clients": [["ten\0ant", "\0", "a\0b", 2**90, 2**90, "f" * 50, "1", "1"]]},
        {**good, "minute": 10**30},
        [],
    ]
    for number, each in enumerate([*words, good]):
        board.put(f"minutes/n{number}:{minute}", json.dumps(each).encode(), keep=600)
    place.clock.advance(80)
    watcher = AnomalyDetector(board, place.config, clock=place.clock)
    with caplog.at_level(logging.WARNING, logger="headgate"):
        assert watcher.check() == []
    sums = watcher._read_totals(place.clock.now_us())
    assert {client for each in sums.values() for client in each} == {("tenant", "hmac:a")}
    watcher.stop()


def test_webhooks_answer_writes_no_lines_into_the_log(place: Place, caplog: pytest.LogCaptureFixture) -> None:
    row = {
        "id": "a", "minute": START_US // 60_000_000, "kind": "tenant", "key": "hmac:a", "label": "acme",
        "requests": 100, "requests_before": 100, "usual": 1, "verdict": "one bot", "agents": 1, "addresses": 1,
        "paths": 1, "looked_at": 1, "last_over": 1, "attempts": 0, "next_us": START_US,
    }  # fmt: skip
    with write_transaction(place.config.engine) as connection:
        connection.execute(ANOMALIES.insert().values(row))
    webhook = Webhook("http://127.0.0.1:9/hook", "a secret of 16 bytes or more")

    def answered(*_: Any, **__: Any) -> None:
        raise OSError("HTTP/1.1 200 OK\r\n2026 ERROR headgate: all is lost\0" + "x" * 9000)

    webhook.send = answered  # type: ignore[method-assign] # what the other side says
    with caplog.at_level(logging.WARNING, logger="headgate"):
        assert webhook.deliver(ANOMALY_QUEUE, place.config.engine, place.clock) == 0
    (told,) = caplog.messages
    assert told.isprintable()
    assert len(told) < 400
    with read_transaction(place.config.engine) as connection:
        assert str(connection.scalar(select(ANOMALIES.c.error))).isprintable()


# ------------------------------------------------------------------ addresses


UNKNOWN = "zzUnknownKey5Tb9wQ3hJmX7"
LISTS = ("/clients", "/overrides", "/blocks", "/audit")


def signed_in(place: Place, role: Any = "viewer") -> dict[str, Any]:
    """A session: what a browser sends with each request, and what its forms carry."""
    response = Response()
    session = Sessions(place.tokens).begin(place.tokens.make(f"a {role}", role, by="the test").token, response)
    return {"cookie": response.headers["set-cookie"].partition(";")[0], "csrf": session.csrf}


def test_what_is_searched_for_gets_into_an_address_only_if_it_is_no_key(place: Place) -> None:
    hashed = place.service.clients.find(KEY).value
    place.service.clients.assign_tier(
        ChangeContext(SUE, "named"), ClientRef("tenant", "customer-4711-in-the-north"), None, label="North Ltd."
    )
    searchable = place.service.searchable
    for name in ("", "acme", "contract 4711", "North Ltd.", "customer-4711-in-the-north", "203.0.113.0/24", hashed):
        assert searchable(name) == name
    assert searchable(f"removed override of api_key {hashed}") == f"removed override of api_key {hashed}"
    for text in (KEY, f"key {KEY}", f"api_key={KEY}"):
        assert searchable(text) == hashed, "a key that is known"
    assert [each.who.value for each in place.service.overrides.list(search=hashed).items] == [hashed]
    for text in (UNKNOWN, "sk_live_51H8xkTt", f"his key is {UNKNOWN}"):
        assert searchable(text).startswith("hmac:"), "what looks like a key, or may be one and is said nowhere"
    place.config.assign(("tenant", "acme"), None, author="ada", reason="leaked sk_live_99H8xkTt")
    assert searchable("sk_live_99H8xkTt").startswith("hmac:"), "also if somebody has written it down"
    assert searchable(UNKNOWN[:15]) == UNKNOWN[:15], "so short a word may as well be a name"


def test_without_a_secret_what_may_be_a_key_is_refused_and_not_repeated(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("HEADGATE_SECRET", raising=False)
    service = AdminService(place.config, clock=place.clock)
    with pytest.raises(InvalidInput, match="must not appear in a URL") as refused:
        service.searchable(UNKNOWN)
    assert UNKNOWN not in str(refused.value)
    assert service.searchable("acme") == "acme"


@pytest.mark.parametrize("path", LISTS)
def test_key_in_a_search_form_goes_no_further_than_its_body(place: Place, path: str) -> None:
    app, session = place.app(), signed_in(place)
    hashed = place.service.clients.find(KEY).value
    headers = {"cookie": session["cookie"]}
    shown = ask(app, "GET", path, headers=headers)
    assert 'method="get"' not in shown.text
    form = {"csrf": session["csrf"], "list": path, "search": KEY, "state": "active", "author": UNKNOWN}
    sent = ask(app, "POST", "/search", data=form, headers=headers)
    there = sent.headers["location"]
    assert sent.status_code == 303
    assert there.startswith(f"{path}?search={quote_plus(hashed)}")
    assert KEY not in there
    assert UNKNOWN not in there
    assert ("state=active" in there) == (path in ("/overrides", "/blocks"))
    found = ask(app, "GET", there, headers=headers)
    assert found.status_code == 200
    assert "the text may be an API key" in found.text
    again = ask(app, "GET", f"{path}?search={KEY}&after=", headers=headers)
    assert (again.status_code, again.headers["location"]) == (303, f"{path}?search={quote_plus(hashed)}")
    assert ask(app, "POST", "/search", data={**form, "csrf": "other"}, headers=headers).status_code == 403
    assert ask(app, "POST", "/search", data={**form, "list": "//evil.example"}, headers=headers).status_code == 422
    named = ask(app, "POST", "/search", data={**form, "search": "acme", "author": ""}, headers=headers)
    assert named.headers["location"].startswith(f"{path}?search=acme")


def test_key_where_a_time_belongs_goes_no_further_than_its_body(place: Place) -> None:
    app, session = place.app(), signed_in(place)
    headers = {"cookie": session["cookie"]}
    page = "/client?kind=tenant&value=acme"
    assert 'method="get"' not in ask(app, "GET", page, headers=headers).text
    form = {"csrf": session["csrf"], "kind": "tenant", "value": "acme", "reach": "day"}
    for key in (KEY, UNKNOWN):
        sent = ask(app, "POST", "/client/why", data={**form, "at": key}, headers=headers)
        assert (sent.status_code, sent.headers.get("location")) == (422, None)
        assert 'id="why-error"' in sent.text
        assert key not in sent.text
    unread = ask(app, "POST", "/client/why", data={**form, "at": "at tea time"}, headers=headers)
    assert unread.status_code == 422
    assert 'value="at tea time"' in unread.text, "what was written is kept, to be corrected"
    sent = ask(app, "POST", "/client/why", data={**form, "at": "yesterday 15:00"}, headers=headers)
    assert (sent.status_code, sent.headers["location"]) == (303, f"{page}&reach=day&at=yesterday+15%3A00")
    answer = ask(app, "GET", sent.headers["location"], headers=headers)
    assert 'value="yesterday 15:00"' in answer.text
    assert (
        ask(app, "POST", "/client/why", data={**form, "csrf": "other", "at": "today"}, headers=headers).status_code
        == 403
    )


@pytest.mark.parametrize("path", LISTS)
def test_api_rejects_keys_in_urls_and_names_the_remedy(place: Place, path: str) -> None:
    text = place.tokens.make("program", "viewer", by="the test").text
    headers = {"Authorization": f"Bearer {text}"}
    app = place.app()
    refused = ask(app, "GET", f"/api/v1{path}", params={"search": KEY}, headers=headers)
    assert refused.status_code == 422
    assert KEY not in refused.text
    told = ask(app, "POST", "/api/v1/search", json={"text": KEY}, headers=headers)
    assert told.json() == {"text": place.service.clients.find(KEY).value}
    assert ask(app, "GET", f"/api/v1{path}", params={"search": told.json()["text"]}, headers=headers).status_code == 200
    assert ask(app, "GET", f"/api/v1{path}", params={"search": UNKNOWN}, headers=headers).status_code == 200


def test_command_line_puts_no_key_into_a_url(
    place: Place, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[str] = []
    server = AdminServer(place.service, place.tokens, port=0)
    app: Any = server._server.config.app

    async def listening(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http":
            asked.append(f"{scope['path']}?{scope['query_string'].decode()}")
        await app(scope, receive, send)

    server._server.config.app = listening
    with server:
        monkeypatch.setenv("HEADGATE_ADMIN", server.url)
        monkeypatch.setenv("HEADGATE_TOKEN", place.tokens.make("program", "viewer", by="the test").text)
        for command in (["override", "list", "--search", KEY], ["block", "list", "--search", UNKNOWN]):
            assert main(command) == 0
        assert main(["audit", "--search", UNKNOWN, "--author", KEY]) == 0
        assert main(["override", "list", "--search", "known"]) == 0
    out = capsys.readouterr().out
    assert out.count("150/minute") == 2, "found by the key, and by the reason"
    assert any("search=hmac" in each for each in asked)
    assert not [each for each in asked if KEY in each or UNKNOWN in each]


def test_store_addresses_are_shown_to_operators_only(place: Place, caplog: pytest.LogCaptureFixture) -> None:
    place.tokens.make("op", "operator", by="the test")
    with Limiter("redis://127.0.0.1:1/0", budget=0.05) as away:
        service = AdminService(
            place.config, counters=away, status_store=Unreadable(), log="clickhouse://127.0.0.1:2/d", secret=SECRET
        )
        blocked = service.blocks.add(ChangeContext(SUE, "r"), ClientRef("tenant", "globex"))
        ended = service.blocks.remove(ChangeContext(SUE, "r"), ClientRef("tenant", "globex"))
        view = service.clients.get(ACME)
        overview = service.fleet.overview(SUE)
        said = json.dumps([blocked.notes, ended.notes, view.troubles, view.as_dict(), overview.as_dict()])
        with pytest.raises(LogUnavailable) as unread:
            service.clients.decisions()
        app = create_app(service, place.tokens, clock=place.clock)
        session = signed_in(place, "support")
        form = {"csrf": session["csrf"], "kind": "tenant", "value": "acme", "reason": "r"}
        page = ask(app, "POST", "/client/reset", data=form, headers={"cookie": session["cookie"]})
        client = ask(app, "GET", "/client?kind=tenant&value=acme&at=today", headers={"cookie": session["cookie"]})
    for text in (said, str(unread.value), page.text, client.text):
        assert "127.0.0.1" not in text
    assert "the counters are unavailable" in view.troubles
    assert "The counters are unavailable" in page.text
    assert "the node status cannot be read" in overview.troubles
    assert "127.0.0.1:1" in caplog.text, "the log says it"
    assert "10.9.8.7" in json.dumps(service.fleet.overview(OTTO).as_dict()), "operators may know"


def test_session_survives_a_config_store_outage(place: Place, tmp_path: Path) -> None:
    lost = ConfigStore(f"sqlite:///{tmp_path}/lost.db", secret=SECRET)
    app = create_app(AdminService(lost, secret=SECRET), place.tokens, clock=place.clock)
    (tmp_path / "lost.db").write_bytes(b"no database any more")
    page = ask(app, "GET", "/blocks?state=active", headers={"cookie": signed_in(place)["cookie"]})
    assert (page.status_code, page.headers["Retry-After"]) == (503, "5")
    assert "The config store is unavailable" in page.text
    assert 'href="/blocks?state=active">Try again' in page.text
    assert "Sign out" in page.text
    assert "None" not in page.text, "no version is known"
    assert "lost.db" not in page.text


class Unreadable(MemoryStatusStore):
    """A board on a server that is away."""

    def read(self, prefix: str) -> Any:
        raise StoreUnavailable("Error 111 connecting to 10.9.8.7:6379. Connection refused.")


def test_overview_says_where_stores_are_to_operators_alone(place: Place) -> None:
    board = MemoryStatusStore()
    gate = Gate(read("limits: [{by: ip, bucket: 10/minute}]"), "redis://127.0.0.1:1/0", budget=0.05)
    with closing(gate), closing(StatusReporter(gate, board, secret=SECRET, node="web-1", every=None)) as reporter:
        gate.admit(FakeRequest())
        reporter.report()
        service = AdminService(place.config, status_store=board, secret=SECRET)
        (shown,), (known,), (unsaid,) = (service.fleet.overview(each).nodes for each in (SUE, OTTO, None))
    assert (shown.name, shown.state) == (known.name, known.state)
    assert shown.shards == (("server 1", known.shards[0][1]),)
    assert "127.0.0.1" not in repr(shown)
    assert "127.0.0.1:1" in repr(known)
    assert "127.0.0.1" not in repr(unsaid)


def test_of_a_node_people_see_that_its_store_is_away_and_not_where() -> None:
    node = NodeStatus(
        name="web-1", region="", at_us=0, state="degraded", reason="connecting to 10.9.8.7:6379: refused",
        degraded_for_s=1.0, shards=(("10.9.8.7:6379", False),), policy_version="1",
        policy_error='config store postgresql://db.internal/x: connection to server at "db.internal" failed',
        config_age_s=9.0, allowed=0, denied=0, blocked=0, unavailable=0, degraded=0, p50_us=None, p99_us=None,
        waiting=0, lost=0, log_error="HTTPConnectionPool(host='10.9.8.7', port=8123)",
    )  # fmt: skip
    shown = service_module._without_addresses(node)
    assert not [text for text in ("10.9.8.7", "internal") if text in repr(shown)]
    assert (shown.config_age_s, shown.shards, shown.state) == (9.0, (("server 1", False),), "degraded")
    plain = replace(
        node, reason="Redis did not answer within 5 ms", policy_error="limits[0]: no bucket", log_error=None
    )
    assert service_module._without_addresses(plain) == replace(plain, shards=(("server 1", False),))
