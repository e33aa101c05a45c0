"""Two regions with real servers, and every byte that passes between them: none of them contains a raw identity."""

from __future__ import annotations

from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

from headgate.gate import Gate
from headgate.keys import identify
from headgate.policy import read
from headgate.policy.api_keys import IdentityHashes
from headgate.testing import FakeRequest
from support.faults import RelayProxy
from support.servers import RedisServer, wait_until

if TYPE_CHECKING:
    import socket
    import threading
    from collections.abc import Iterator

    import pytest

SECRET = b"a secret of thirty-two bytes ..."
HASHES = IdentityHashes(SECRET)
TENANTS = ["tenant-amber", "tenant-basil"]
USERS = ["user-cedar", "user-dahlia"]
ADDRESSES = ["198.51.100.71", "2001:db8:feed:77::9"]
BLOCKED = {"ip": "198.51.100.99", "tenant": "tenant-elder", "user": "user-fern"}
IDENTITIES = [*TENANTS, *USERS, *ADDRESSES, *BLOCKED.values(), "198.51.100", "2001:db8:feed"]

LIMITS = """
limits:
  - {name: home-decides, by: tenant, bucket: 1000/hour, region: central}
  - {name: leased, by: user, bucket: "10000/hour, fixed_window", region: reserved}
  - {name: exchanged, by: tenant+user, bucket: 1000/hour, region: reconciled}
  - {name: exchanged-ip, by: ip, bucket: 1000/hour, region: reconciled}
  - {name: equal, by: tenant, bucket: 1000/hour, region: divided}
  - {name: own, by: ip, bucket: 1000/hour}
"""


class RecordingProxy(RelayProxy):
    """Passes everything between two regions, and keeps it."""

    def __init__(self, server: RedisServer) -> None:
        super().__init__(server, b"EVALSHA")
        self.seen = bytearray()

    def _pass_requests(self, caller: socket.socket, server: socket.socket, was_sent: threading.Event) -> None:
        while data := caller.recv(65536):
            self.seen += data
            server.sendall(data)

    def _reply(self, caller: socket.socket, data: bytes, was_sent: bool) -> None:
        self.seen += data
        caller.sendall(data)


class Planet:
    """A gate in each of two regions. They reach each other's store through proxies only."""

    def __init__(self, policy: str, servers: dict[str, RedisServer], stack: ExitStack, **options: Any) -> None:
        self.servers = servers
        self.proxies = {name: stack.enter_context(RecordingProxy(server)) for name, server in servers.items()}
        self.gates: dict[str, Gate] = {}
        for own in servers:
            urls = {name: servers[name].url if name == own else self.proxies[name].url for name in servers}
            gate = Gate(
                read(policy),
                urls[own],
                region=own,
                regions=urls,
                home="eu",
                budget=5.0,
                central_budget=5.0,
                identities={"tenant": lambda request: request.native[0], "user": lambda request: request.native[1]},
                **options,
            )
            self.gates[own] = gate
            stack.callback(gate.close)

    @property
    def crossed(self) -> str:
        return "".join([bytes(proxy.seen).decode("latin-1") for proxy in self.proxies.values()])

    def ask_all(self) -> None:
        for gate in self.gates.values():
            for tenant, user, address in zip(TENANTS, USERS, ADDRESSES, strict=True):
                request = FakeRequest(peer=address, native=(tenant, user))
                admission = gate.admit(request)
                assert admission.allowed
                gate.finish(admission, 200)

    def is_blocked(self, region: str, kind: str, value: str) -> bool:
        names = {"tenant": "tenant-gorse", "user": "user-hazel", "ip": "192.0.2.7", kind: value}
        admission = self.gates[region].admit(FakeRequest(peer=names["ip"], native=(names["tenant"], names["user"])))
        return admission.resolution is not None and admission.resolution.block is not None

    def used(self, region: str, name: str, tenant: int) -> bool:
        """True if the counter of a limit knows more than the region's own request."""
        gate = self.gates[region]
        (key,) = [key for key in resolved(gate, tenant) if key.limit.name == name]
        return gate._limiter.peek(key).remaining == key.limit.capacity - len(self.gates)


@contextmanager
def planet(settings: str, limits: str = LIMITS, **options: Any) -> Iterator[Planet]:
    with ExitStack() as stack:
        servers = {name: stack.enter_context(RedisServer()) for name in ("eu", "us")}
        yield Planet(f"regions: {settings}\n{limits}", servers, stack, **options)


def exercise(world: Planet) -> None:
    """Requests in both regions until each knows of those in the other; a reset; and blocks that apply in both."""
    world.ask_all()
    for region in world.gates:
        for name in ("exchanged", "home-decides"):
            wait_until(lambda region=region, name=name: world.used(region, name, 0), f"{name} in {region}")
    (key,) = [key for key in resolved(world.gates["eu"], 1) if key.limit.name == "exchanged"]
    world.gates["eu"]._limiter.reset(key)
    for kind, value in BLOCKED.items():
        world.gates["us"].block(kind, value, reason=f"{value} scrapes")
    for kind, value in BLOCKED.items():
        wait_until(lambda kind=kind, value=value: world.is_blocked("eu", kind, value), f"{kind} blocked")


def resolved(gate: Gate, tenant: int) -> Any:
    pending: Any = gate.prepare(FakeRequest(peer=ADDRESSES[tenant], native=(TENANTS[tenant], USERS[tenant])))
    return pending.check.keys


def leaked(text: str) -> list[str]:
    return [identity for identity in IDENTITIES if identity in text]


def test_no_raw_identity_leaves_its_region() -> None:
    with planet("{identities: hashed}", secret=SECRET) as world:
        exercise(world)
        crossed = world.crossed
    assert leaked(crossed) == []
    assert HASHES("counter", TENANTS[0]) in crossed
    assert HASHES("counter", identify((TENANTS[0], USERS[0]))) in crossed
    assert HASHES("ip", BLOCKED["ip"]) in crossed


def test_without_a_secret_identities_are_hashed_with_a_public_key(caplog: pytest.LogCaptureFixture) -> None:
    with planet("{central_budget: 1 second}") as world:
        exercise(world)
        crossed = world.crossed
    assert leaked(crossed) == []
    assert "there is no secret to key them with, so that they can be guessed" in caplog.text


def test_plain_identities_are_seen_by_these_tests() -> None:
    with planet("{identities: plain}", secret=SECRET) as world:
        exercise(world)
        crossed = world.crossed
    assert {TENANTS[0], USERS[0], *BLOCKED.values()} <= {*leaked(crossed)}


def test_identities_that_stay_do_not_leave_in_any_form() -> None:
    limits = """
limits:
  - {name: exchanged, by: tenant, bucket: 1000/hour, region: reconciled, missing: skip}
  - {name: equal, by: ip, bucket: 1000/hour, region: divided}
"""
    with planet("{stay: [ip]}", limits, secret=SECRET) as world:
        world.ask_all()
        world.gates["us"].block("ip", BLOCKED["ip"])
        world.gates["us"].block("tenant", BLOCKED["tenant"])
        wait_until(lambda: world.is_blocked("eu", "tenant", BLOCKED["tenant"]), "the tenant to be blocked")
        assert world.is_blocked("us", "ip", BLOCKED["ip"])
        assert not world.is_blocked("eu", "ip", BLOCKED["ip"])
        crossed = world.crossed
    assert leaked(crossed) == []
    addresses = [BLOCKED["ip"], *ADDRESSES, "2001:db8:feed:77::/64"]
    assert not [value for value in addresses for kind in ("ip", "counter") if HASHES(kind, value) in crossed]
    assert HASHES("tenant", BLOCKED["tenant"]) in crossed
