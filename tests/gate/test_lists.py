"""Listed addresses at a gate: blocked or limited more strictly, explained, and never others than the trusted client."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
from prometheus_client import CollectorRegistry

from headgate.gate.gate import Gate
from headgate.policy import read
from headgate.telemetry import prometheus
from headgate.testing import FakeClock, FakeRequest
from support.list_server import ListServer, respond
from support.servers import wait_until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from headgate.events import Event
    from headgate.policy.model import Policy

LISTED, OTHER = "203.0.113.9", "198.51.100.9"


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HEADGATE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def listed(tmp_path: Path) -> Path:
    path = tmp_path / "bad.txt"
    path.write_text("203.0.113.0/24\n2001:db8::/32\n")
    return path


@pytest.fixture
def open_gate() -> Iterator[Callable[..., Gate]]:
    gates: list[Gate] = []

    def open_with(policy: Policy, **options: Any) -> Gate:
        gates.append(Gate(policy, clock=FakeClock(1_763_251_200_000_000), **options))
        return gates[-1]

    yield open_with
    for gate in gates:
        gate.close()


def policy_of(source: object, refresh: str = "1 second", **sections: object) -> Policy:
    lists = {"bad": {"source": str(source), "refresh": refresh}}
    limits = [{"name": "all", "by": "ip", "bucket": "100/minute"}]
    return read(json.dumps({"lists": lists, "limits": limits, **sections}), format="json")


BLOCKED: dict[str, object] = {"blocked": [{"list": "bad", "reason": "attacks"}]}


def is_loaded(gate: Gate) -> bool:
    return all(status.is_loaded for status in gate.list_status)


def status_of(gate: Gate, address: str, **headers: str) -> int:
    admission = gate.admit(FakeRequest(peer=address, headers=headers))
    return 200 if admission.refusal is None else admission.refusal.status


def test_listed_addresses_are_blocked(open_gate: Callable[..., Gate], listed: Path) -> None:
    gate = open_gate(policy_of(listed, **BLOCKED))
    wait_until(lambda: is_loaded(gate), "the list is read")
    assert [status_of(gate, address) for address in (LISTED, OTHER, "2001:db8::1", "2001:db9::1")] == [
        403,
        200,
        403,
        200,
    ]
    block = gate.admit(FakeRequest(peer=LISTED)).resolution.block  # type: ignore[union-attr]
    (status,) = gate.list_status
    assert block is not None
    assert block.reason is not None
    assert block.reason.startswith(f"listed in bad (version {status.version} since ")
    assert block.reason.endswith(" UTC): attacks")


def test_limit_for_listed_addresses(open_gate: Callable[..., Gate], listed: Path) -> None:
    strict = {"name": "strict", "by": "ip", "lists": "bad", "bucket": "2/minute"}
    limits = [{"name": "all", "by": "ip", "bucket": "100/minute"}, strict]
    gate = open_gate(policy_of(listed, limits=limits))
    wait_until(lambda: is_loaded(gate), "the list is read")
    assert [status_of(gate, LISTED) for _ in range(3)] == [200, 200, 429]
    assert [status_of(gate, OTHER) for _ in range(3)] == [200, 200, 200]
    denied = gate.admit(FakeRequest(peer=LISTED)).decision
    assert denied is not None
    assert denied.denied_by == ("strict",)


def test_change_of_a_list_applies_to_known_clients(open_gate: Callable[..., Gate], listed: Path) -> None:
    gate = open_gate(policy_of(listed, **BLOCKED))
    wait_until(lambda: is_loaded(gate), "the list is read")
    assert [status_of(gate, OTHER) for _ in range(2)] == [200, 200]
    new = listed.with_name("new")
    new.write_text(f"{OTHER}\n")
    new.replace(listed)
    wait_until(lambda: status_of(gate, OTHER) == 403, "the new version is in force")
    assert status_of(gate, LISTED) == 200


def test_client_cannot_frame_another(open_gate: Callable[..., Gate], listed: Path) -> None:
    """A forwarding header counts only if a trusted proxy has sent it, and only its last untrusted hop."""
    gate = open_gate(policy_of(listed, **BLOCKED, identity={"proxies": ["10.0.0.0/8"]}))
    wait_until(lambda: is_loaded(gate), "the list is read")
    forged = {"x-forwarded-for": LISTED}
    assert status_of(gate, OTHER, **forged) == 200
    assert status_of(gate, "10.0.0.1", **{"x-forwarded-for": f"{LISTED}, {OTHER}"}) == 200
    assert status_of(gate, "10.0.0.1", **forged) == 403
    assert status_of(gate, LISTED, **{"x-forwarded-for": OTHER}) == 403


def test_failure_is_reported_and_the_last_version_stays(open_gate: Callable[..., Gate], cache: Path) -> None:
    events: list[Event] = []
    with ListServer() as server:
        gate = open_gate(policy_of(f"{server.url}/list", **BLOCKED), on_event=events.append)
        registry = CollectorRegistry()
        prometheus.register(gate, registry)

        def metric(name: str) -> float | None:
            return registry.get_sample_value(f"rate_limiter_list_{name}", {"gate": "default", "list": "bad"})

        wait_until(lambda: bool(events), "the failure is reported")
        assert status_of(gate, LISTED) == 200, (
            "nothing is blocked before the first version, and no request waits for it"
        )
        assert (metric("failed"), metric("networks"), metric("age_seconds")) == (1, 0, None)
        server.pages["/list"] = respond(b"203.0.113.0/24")
        wait_until(lambda: len(events) == 2, "the next event")
        assert status_of(gate, LISTED) == 403
        assert (metric("failed"), metric("networks")) == (0, 1)
        server.pages.clear()
        wait_until(lambda: len(events) == 3, "the next event")
        assert status_of(gate, LISTED) == 403
        assert metric("failed") == 1
        kinds = [(event.kind, event.details["list"]) for event in events]
        assert kinds == [("list-failed", "bad"), ("list-back", "bad"), ("list-failed", "bad")]
        (status,) = gate.list_status
        text = f"list bad: the server responded with status 404; version {status.version} stays in force"
        assert events[2].text == text
    restarted = open_gate(policy_of(f"{server.url}/list", **BLOCKED))
    assert status_of(restarted, LISTED) == 403, "from disk, with the server gone"


def test_policy_without_lists_starts_no_thread_and_reads_nothing(open_gate: Callable[..., Gate], cache: Path) -> None:
    gate = open_gate(read("limits: [{by: ip, bucket: 9/minute}]"))
    assert status_of(gate, LISTED) == 200
    assert gate.list_status == []
    assert not cache.exists()
