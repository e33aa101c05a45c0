"""A gate passes the responses of its requests to the detector, and framing others does not work."""

from __future__ import annotations

import asyncio
import json
import random
from typing import TYPE_CHECKING, Any

import pytest

from headgate.adapters.asgi import HeadgateMiddleware
from headgate.adapters.wsgi import HeadgateMiddleware as WsgiMiddleware
from headgate.gate.gate import Gate
from headgate.policy import read
from headgate.telemetry.fleet.abuse_exchange import AbuseExchange
from headgate.telemetry.fleet.status_store import MemoryStatusStore
from headgate.testing import FakeClock, FakeRequest
from support.asgi_client import ask, statuses

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from headgate.policy.model import Policy

START_US = 1_763_251_200_000_000
ATTACKER, VICTIM = "203.0.113.9", "198.51.100.7"


def policy_of(scenarios: Any = None, **sections: Any) -> Policy:
    limits = [{"by": "ip", "bucket": "1000/minute"}]
    abuse = {"scenarios": scenarios or {"credential-stuffing": True}}
    return read(json.dumps({"limits": limits, "abuse": abuse, **sections}), format="json")


@pytest.fixture
def open_gate() -> Iterator[Callable[..., Gate]]:
    gates: list[Gate] = []

    def open_with(policy: Policy, **options: Any) -> Gate:
        gates.append(Gate(policy, **{"clock": FakeClock(START_US), **options}))
        return gates[-1]

    yield open_with
    for gate in gates:
        gate.close()


def found(gate: Any) -> list[tuple[str, str, str]]:
    gate.flush_events()
    return [(finding.scenario, finding.kind, finding.value) for finding in gate.abuse.findings]


def serve(gate: Gate, request: FakeRequest, status: int = 200) -> int:
    """Serve a request by an app that answers with a status; returns the status of the response."""
    admission = gate.admit(request)
    if admission.refusal is not None:
        return admission.refusal.status
    if admission.needs_finish:
        gate.finish(admission, status)
    return status


def test_gate_without_scenarios_has_no_detector(open_gate: Callable[..., Gate]) -> None:
    gate = open_gate(read("limits: [{by: ip, bucket: 10/minute}]"))
    assert gate.abuse is None
    assert not gate.admit(FakeRequest("/login", "POST", peer=ATTACKER)).needs_finish


def test_detector_learns_the_status_of_responses(open_gate: Callable[..., Gate]) -> None:
    gate = open_gate(policy_of())
    for _ in range(20):
        serve(gate, FakeRequest("/login", "POST", peer=ATTACKER), 401)
        serve(gate, FakeRequest("/login", "POST", peer=VICTIM), 200)
    assert found(gate) == [("credential-stuffing", "ip", ATTACKER)]
    assert gate.abuse is not None
    assert gate.abuse.found == gate.action_counts.found == {"credential-stuffing": 1}


def test_routes_that_no_scenario_looks_at_cost_nothing(open_gate: Callable[..., Gate]) -> None:
    gate = open_gate(policy_of())
    assert not gate.admit(FakeRequest("/orders", peer=ATTACKER)).needs_finish


def test_denied_requests_are_observed_at_once(open_gate: Callable[..., Gate]) -> None:
    gate = open_gate(policy_of({"retry-storm": True}, limits=[{"by": "ip", "bucket": "10/minute"}]))
    statuses = [serve(gate, FakeRequest("/", peer=ATTACKER)) for _ in range(200)]
    assert statuses.count(429) == 190
    assert found(gate) == [("retry-storm", "ip", ATTACKER)]


def test_blocked_requests_do_not_feed_the_detector(open_gate: Callable[..., Gate]) -> None:
    probing = {"mine": {"by": "ip", "when": {"requests": 20}, "status": "status == 403"}}
    gate = open_gate(policy_of(probing))
    gate.block("ip", ATTACKER)
    assert {serve(gate, FakeRequest("/", peer=ATTACKER)) for _ in range(50)} == {403}
    assert found(gate) == []


def test_forged_addresses_do_not_frame_their_owner(open_gate: Callable[..., Gate]) -> None:
    gate = open_gate(policy_of(identity={"proxies": ["10.0.0.0/8"]}))
    for _ in range(20):
        forged = {"x-forwarded-for": VICTIM}
        serve(gate, FakeRequest("/login", "POST", peer=ATTACKER, headers=forged), 401)  # not from a trusted proxy
    assert found(gate) == [("credential-stuffing", "ip", ATTACKER)]
    for _ in range(20):
        forged = {"x-forwarded-for": f"{VICTIM}, 192.0.2.1"}
        serve(gate, FakeRequest("/login", "POST", peer="10.0.0.1", headers=forged), 401)  # the proxy added 192.0.2.1
    assert found(gate)[1:] == [("credential-stuffing", "ip", "192.0.2.1")]


def test_invented_keys_are_not_found_and_named_ones_are(open_gate: Callable[..., Gate]) -> None:
    clients = [{"api_key": "sk_named", "tier": "pro"}]
    gate = open_gate(policy_of({"key-leak": True}, tier="pro", clients=clients))
    for number in range(400):
        for key in ("sk_named", "sk_invented"):
            serve(gate, FakeRequest("/", peer=f"192.0.2.{number % 60}", headers={"x-api-key": key}))
    named = gate.active_policy.identities.fingerprint("sk_named")
    assert found(gate) == [("key-leak", "api_key", named)]


def test_accounts_of_logins_are_counted(open_gate: Callable[..., Gate]) -> None:
    stuffing = {"mine": {"path": "/login", "by": "ip", "when": {"accounts": 20}}}
    identities = {"account": lambda request: (request.header("x-account") or [None])[0]}
    gate = open_gate(policy_of(stuffing), identities=identities)
    for number in range(40):
        serve(gate, FakeRequest("/login", "POST", peer=ATTACKER, headers={"x-account": f"user-{number}"}), 401)
        serve(gate, FakeRequest("/login", "POST", peer=VICTIM, headers={"x-account": "ada"}), 401)
    assert found(gate) == [("mine", "ip", ATTACKER)]


def test_expensive_requests_are_found_by_the_time_of_their_responses(open_gate: Callable[..., Gate]) -> None:
    clock = FakeClock(START_US)
    gate = open_gate(policy_of({"mine": {"by": "ip", "when": {"seconds": 20, "requests": 5}}}), clock=clock)
    for _ in range(8):
        for peer, seconds in ((ATTACKER, 4.0), (VICTIM, 0.1)):
            admission = gate.admit(FakeRequest("/search", peer=peer))
            clock.advance(seconds)
            gate.finish(admission, 200)
    assert found(gate) == [("mine", "ip", ATTACKER)]
    assert gate.abuse is not None
    evidence = "203.0.113.9 took 20.0 seconds to answer and sent 6 requests in 5 minutes"
    assert gate.abuse.findings[0].evidence == evidence


def test_new_policy_changes_the_scenarios(open_gate: Callable[..., Gate]) -> None:
    gate = open_gate(policy_of())
    gate._activate(policy_of({"scraping": True}))
    for number in range(400):
        serve(gate, FakeRequest("/login", "POST", peer=ATTACKER), 401)
        serve(gate, FakeRequest(f"/item/{number}", peer=ATTACKER))
    assert found(gate) == [("scraping", "ip", ATTACKER)]


def test_asgi_passes_the_status() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 404, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    middleware = HeadgateMiddleware(app, policy_of({"enumeration": True}))
    assert {*statuses(ask(middleware, *[f"/users/{number}" for number in range(120)], ip=ATTACKER))} == {404}
    assert found(middleware.gate) == [("enumeration", "ip", ATTACKER)]
    asyncio.run(middleware.gate.close())


def test_wsgi_passes_the_status() -> None:
    def app(environ: Any, start_response: Any) -> list[bytes]:
        start_response("404 Not Found", [])
        return [b""]

    middleware = WsgiMiddleware(app, policy_of({"enumeration": True}))
    for number in range(120):
        environ = {"REQUEST_METHOD": "GET", "PATH_INFO": f"/users/{number}", "REMOTE_ADDR": ATTACKER}
        assert middleware(environ, lambda *_: None) == [b""]
    assert found(middleware.gate) == [("enumeration", "ip", ATTACKER)]
    middleware.gate.close()


def test_botnet_is_blocked_within_15_seconds_and_others_with_its_user_agent_are_not(
    open_gate: Callable[..., Gate],
) -> None:
    clock, agent = FakeClock(START_US), {"user-agent": "Mozilla/5.0 (popular)"}
    gate = open_gate(policy_of("on"), clock=clock)
    bots, people = [f"10.0.{bot >> 8}.{bot & 255}" for bot in range(500)], [f"192.0.2.{person}" for person in range(50)]
    passed: list[int] = []
    for second in range(60):
        for bot in bots:
            passed += [second] * (serve(gate, FakeRequest("/api/login", "POST", peer=bot, headers=agent), 401) == 401)
        for person in people[second % 7 :: 7]:
            assert serve(gate, FakeRequest("/api/login", "POST", peer=person, headers=agent)) == 200
        gate.flush_events()
        clock.advance(1)
    assert max(passed) < 15
    blocked = {value for _, kind, value in found(gate) if kind == "ip"}
    assert blocked == {*bots}


def test_allowed_clients_are_found_and_not_acted_against(open_gate: Callable[..., Gate]) -> None:
    settings = {"scenarios": {"credential-stuffing": {"steps": "block for 1 hour"}}, "allow": [{"ip": ATTACKER}]}
    gate = open_gate(policy_of(abuse=settings))
    for _ in range(30):
        assert serve(gate, FakeRequest("/login", "POST", peer=ATTACKER), 401) == 401
        serve(gate, FakeRequest("/login", "POST", peer=VICTIM), 401)
        gate.flush_events()
    assert len(found(gate)) == 2
    assert serve(gate, FakeRequest("/login", "POST", peer=VICTIM), 401) == 403


# ------------------------------------------------------------------ several nodes


def exchange(gates: list[Gate], rounds: int = 2) -> None:
    store = MemoryStatusStore()
    exchanges = [AbuseExchange(gate.abuse, store, f"node-{number}") for number, gate in enumerate(gates) if gate.abuse]
    for _ in range(rounds):
        for gate, each in zip(gates, exchanges, strict=True):
            gate.flush_events()
            each.exchange()


def test_attack_that_is_spread_over_nodes_is_found(open_gate: Callable[..., Gate]) -> None:
    gates = [open_gate(policy_of({"enumeration": True}), secret="s" * 16) for _ in range(4)]
    for number in range(100):
        serve(gates[number % 4], FakeRequest(f"/users/{number}", peer=ATTACKER), 404)
    assert not any(found(gate) for gate in gates)
    exchange(gates)
    assert {finding for gate in gates for finding in found(gate)} == {("enumeration", "ip", ATTACKER)}
    assert "on 4 nodes" in gates[0].abuse.findings[0].evidence  # type: ignore[union-attr]


def test_values_seen_by_several_nodes_count_once(open_gate: Callable[..., Gate]) -> None:
    gates = [open_gate(policy_of({"enumeration": True}), secret="s" * 16) for _ in range(4)]
    for number in range(160):
        for gate in gates:
            serve(gate, FakeRequest(f"/users/{number % 40}", peer=ATTACKER), 404)
    exchange(gates)
    assert not any(found(gate) for gate in gates)


def test_botnet_that_is_spread_over_nodes_is_found(open_gate: Callable[..., Gate]) -> None:
    clocks = [FakeClock(START_US) for _ in range(3)]
    gates = [open_gate(policy_of({"botnet": True}), secret="s" * 16, clock=clock) for clock in clocks]
    for _ in range(12):
        for bot in range(60):  # each bot stays with one node
            headers = {"user-agent": "bot"}
            serve(gates[bot % 3], FakeRequest("/login", "POST", peer=f"192.0.2.{bot}", headers=headers), 401)
        for clock in clocks:
            clock.advance(1)
    assert not any(found(gate) for gate in gates)
    exchange(gates)
    assert len({value for gate in gates for _, _, value in found(gate)}) == 60


def test_botnet_whose_requests_go_to_any_node_is_found(open_gate: Callable[..., Gate]) -> None:
    rng, clocks = random.Random(1), [FakeClock(START_US) for _ in range(3)]
    gates = [open_gate(policy_of({"botnet": True}), secret="s" * 16, clock=clock) for clock in clocks]
    for _ in range(60):
        for bot in range(60):
            headers = {"user-agent": "bot"}
            serve(rng.choice(gates), FakeRequest("/login", "POST", peer=f"192.0.2.{bot}", headers=headers), 401)
        for clock in clocks:
            clock.advance(1)
    exchange(gates)
    assert len({value for gate in gates for _, _, value in found(gate)}) == 60


def test_large_fleets_share_fewer_groups_less_often(open_gate: Callable[..., Gate]) -> None:
    store = MemoryStatusStore()
    gate = open_gate(policy_of({"enumeration": True}), secret="s" * 16)
    watch = gate.abuse
    assert watch is not None
    for client in range(40):
        for number in range(client):
            serve(gate, FakeRequest(f"/users/{number}", peer=f"192.0.2.{client}"), 404)
    gate.flush_events()
    shared = [len(watch.shared_rows(nodes)["enumeration"]) for nodes in (2, 5, 1_000)]
    assert shared[0] < shared[1]  # of 60 paths, 15 and more by one node of two, 6 and more by one of five
    assert shared[2] == 5
    each = AbuseExchange(watch, store, "node")
    each.exchange()
    for number in range(24):
        store.put(f"abuse/other-{number}", b"", keep=60)
    each.exchange()
    store.put("abuse/node", b"", keep=0)
    written = []
    for _ in range(6):  # every third second, with 25 nodes
        each.tick()
        written.append("abuse/node" in store.read("abuse/"))
        store.put("abuse/node", b"", keep=0)
    assert written == [False, False, True, False, False, True]


def test_invalid_documents_and_other_versions_are_ignored(
    open_gate: Callable[..., Gate], caplog: pytest.LogCaptureFixture
) -> None:
    store = MemoryStatusStore()
    gate = open_gate(policy_of({"enumeration": True}), secret="s" * 16)
    assert gate.abuse is not None
    for number, document in enumerate([b"", b"{}", b"\x00" * 99]):
        store.put(f"abuse/bad-{number}", document, keep=60)
    AbuseExchange(gate.abuse, store, "node").exchange()
    assert [record.getMessage() for record in caplog.records].count(
        "ignoring an invalid document in the status store: abuse"
    ) == 3
