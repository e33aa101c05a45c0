"""Hypothesis strategies for policies and for the requests that they apply to."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from ipaddress import ip_address, ip_network
from typing import TYPE_CHECKING, Any, NamedTuple

from hypothesis import strategies as st

from headgate import Limit
from headgate.policy.model import Block, Client, Identity, Override, Policy, RouteRule, Rule, Validity
from headgate.policy.routes import Template

if TYPE_CHECKING:
    from collections.abc import Mapping


START = datetime(2026, 5, 28, tzinfo=UTC)


def fingerprint(key: str) -> str:
    return f"hash of {key}"


class Request(NamedTuple):
    method: str
    path: str
    who: Mapping[str, str]
    at: datetime

    @property
    def now_us(self) -> int:
        return (self.at - datetime(1970, 1, 1, tzinfo=UTC)) // timedelta(microseconds=1)


def sender(address: str = "unknown", **others: Any) -> dict[str, Any]:
    """The identities of a request, as adapters read them."""
    if address == "unknown":
        return {"address": address, "ip": address, "subnet": address, **others}
    single, wide = (32, 24) if ip_address(address).version == 4 else (64, 48)
    ip = address if single == 32 else str(ip_network(f"{address}/{single}", strict=False))
    return {"address": address, "ip": ip, "subnet": str(ip_network(f"{address}/{wide}", strict=False)), **others}


TEMPLATES = [Template.parse(text) for text in ("*", "/", "/a", "/a/{x}", "/a/{y}", "/{x}/b", "/a/*", "/a/b", "/{x}/*")]


PATHS = ["/", "/a", "/a/", "/a/b", "//a//b", "/a/c", "/x/b", "/x/y", "/a/b/c", "/A", "/a/../b", "/b"]


METHODS = ["GET", "HEAD", "get", "Head", "POST", "post", "PURGE", "MADE-UP", "OPTIONS"]


ADDRESSES = ["unknown", "198.51.100.7", "198.51.100.8", "203.0.113.9", "2001:db8::7", "2001:db8:0:1::7"]


NETWORKS = ["198.51.100.7", "198.51.100.0/24", "198.51.0.0/16", "2001:db8::7", "2001:db8::/64", "2001:db8::/32"]


INSTANTS = [START + timedelta(hours=hour) for hour in range(3)]


KINDS = ["ip", "subnet", "user", "api_key", "tenant", "endpoint", "client", "device"]


BY_KEYS = [("client",), ("api_key",), ("api_key", "endpoint"), ("tenant", "api_key"), ("ip", "client")]


VALUES = ["ada", "bob"]


modes = st.sampled_from([None, "open", "local", "closed"])


classes = st.sampled_from(["search", "orders"])


method_sets = st.frozensets(st.sampled_from(["GET", "HEAD", "POST", "PURGE"]), max_size=2)


tiers = st.sampled_from(["free", "pro", "gold"])


validities = st.builds(Validity, st.sampled_from([None, *INSTANTS]), st.sampled_from([None, *INSTANTS]))


identities = st.one_of(
    st.builds(Identity, st.just("ip"), st.sampled_from(NETWORKS)),
    st.builds(Identity, st.just("subnet"), st.sampled_from(["198.51.100.0/24", "2001:db8::/48"])),
    st.builds(Identity, st.sampled_from(["user", "tenant", "api_key", "device"]), st.sampled_from(VALUES)),
)


routes = st.builds(
    RouteRule, st.sampled_from(TEMPLATES), method_sets, st.none() | classes, st.sampled_from([1, 1, 5, 0]), modes
)


def limits(name: str) -> st.SearchStrategy[Limit]:
    algorithms = st.sampled_from(["token_bucket", "sliding_log", "concurrency"])
    return st.builds(
        lambda quota, algorithm: Limit(quota, timedelta(minutes=1), algorithm=algorithm, name=name),
        st.integers(10, 20),
        algorithms,
    )


@st.composite
def rules(draw: st.DrawFn, name: str) -> Rule:
    places = draw(st.sampled_from(["everywhere", "templates", "classes", "both"]))
    numbers = draw(st.none() | limits(name))
    return Rule(
        name,
        numbers,
        draw(st.lists(st.sampled_from(KINDS), max_size=3, unique=True).map(tuple) | st.sampled_from(BY_KEYS)),
        draw(st.dictionaries(tiers, limits(name), min_size=numbers is None, max_size=2)),
        tuple(draw(st.lists(st.sampled_from(TEMPLATES), min_size=1, max_size=2)))
        if places in ("templates", "both")
        else (),
        draw(method_sets),
        tuple(draw(st.lists(classes, min_size=1, max_size=2))) if places in ("classes", "both") else (),
        draw(st.sampled_from([None, None, 0, 3])),
        shadow=draw(st.booleans()),
        on_failure=draw(modes),
        missing=draw(st.sampled_from([None, None, "skip", "ip"])),
    )


@st.composite
def policies(draw: st.DrawFn) -> Policy:
    names = [f"rule-{number}" for number in range(draw(st.integers(0, 4)))]
    return Policy(
        rules=tuple(draw(rules(name)) for name in names),
        routes=tuple(draw(st.lists(routes, max_size=4))),
        tiers=draw(st.sampled_from([(), ("free", "pro", "gold"), ("pro",)])),
        default_tier=draw(st.sampled_from([None, "free"])),
        clients=tuple(draw(st.lists(st.builds(Client, identities, st.none() | tiers), max_size=4))),
        overrides=tuple(
            Override(draw(identities), name, draw(limits(name)), draw(st.none() | classes), draw(validities))
            for name in (draw(st.lists(st.sampled_from(names), max_size=4)) if names else ())
        ),
        blocked=tuple(draw(st.lists(st.builds(Block, identities, validities), max_size=3))),
        on_failure=draw(st.sampled_from(["open", "closed"])),
    )


@st.composite
def requests(draw: st.DrawFn) -> Request:
    said: dict[str, Any] = draw(
        st.fixed_dictionaries(
            {},
            optional={kind: st.sampled_from([*VALUES, "", None]) for kind in ("user", "tenant", "device")}
            | {
                "api_key": st.sampled_from([fingerprint(value) for value in (*VALUES, "stranger")]),
                "tier": tiers | st.just("none such"),
            },
        )
    )
    moment = draw(st.sampled_from(INSTANTS)) + timedelta(microseconds=draw(st.integers(-1, 1)))
    who = sender(draw(st.sampled_from(ADDRESSES)), **said)
    return Request(draw(st.sampled_from(METHODS)), draw(st.sampled_from(PATHS)), who, moment)
