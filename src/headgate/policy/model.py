"""What a policy says, as values: which limits a request meets, by whom they are counted, and what else holds.

Made by `policy.loading` from a file, and compiled by `policy.snapshot` into what requests are resolved against. All of
it is immutable: a running request keeps the policy that it started with.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from fractions import Fraction
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Mapping

    from headgate.limits import Limit
    from headgate.policy.routes import Template

__all__ = [
    "ADDRESSES",
    "NET_SUFFIX",
    "AnswerSettings",
    "Block",
    "Client",
    "Identity",
    "IdentitySettings",
    "LeaseMode",
    "Override",
    "Policy",
    "RouteMode",
    "RouteRule",
    "Rule",
    "StatusTest",
    "StoreSettings",
    "Validity",
    "net_name",
]

RouteMode: TypeAlias = Literal["open", "closed", "local"]
"""What a route asks for when the store fails."""

LeaseMode: TypeAlias = Literal["auto", "always", "never"]
"""When a limit's tokens are prepaid: where it is found to be busy, always, or never."""

EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)

ADDRESSES: Final = ("ip", "subnet")
"""The identities that every request has, whoever sends it."""

NET_SUFFIX: Final = " (unknown keys)"
LONGEST_NAME: Final = 100


class Identity(NamedTuple):
    """Who somebody is in one respect: ("ip", "203.0.113.9"), ("tenant", "acme")."""

    kind: str
    value: str


@dataclass(frozen=True, slots=True)
class Validity:
    """From when until when something holds; None where it has no end."""

    since: datetime | None = None
    until: datetime | None = None

    def holds_at(self, instant: datetime) -> bool:
        return (self.since is None or self.since <= instant) and (self.until is None or instant < self.until)

    def is_over(self, instant: datetime) -> bool:
        return self.until is not None and self.until <= instant


@dataclass(frozen=True, slots=True)
class StatusTest:
    """Which answers of the app count: `status in [401, 403]`, `status >= 500`."""

    text: str
    """As it was written."""
    statuses: frozenset[int]

    def __call__(self, status: int) -> bool:
        return status in self.statuses


@dataclass(frozen=True, slots=True)
class RouteRule:
    """What holds for the requests of a route, whatever limits they meet."""

    template: Template
    methods: frozenset[str]
    """Empty for all. HEAD counts as GET, a websocket's handshake is a GET."""
    route_class: str | None = None
    cost: int = 1
    """What one request costs on limits that don't say otherwise; 0 exempts the route."""
    on_failure: RouteMode | None = None


@dataclass(frozen=True, slots=True)
class Rule:
    """A named limit, the requests that meet it, and by whom it is counted.

    Tiers and overrides change its numbers for some clients; they never change who is counted or where.
    """

    name: str
    limit: Limit | None
    """For everybody who is in no tier of `tiers`; None where only those tiers meet it."""
    by: tuple[str, ...]
    """Kinds of identity, counted together; empty for one counter for all."""
    tiers: Mapping[str, Limit] = field(default_factory=dict)
    templates: tuple[Template, ...] = ()
    """The routes that meet it; with `classes` also empty, all do."""
    methods: frozenset[str] = frozenset()
    classes: tuple[str, ...] = ()
    cost: int | None = None
    """What a request costs here; None for the route's cost."""
    settled: bool = False
    """The cost is an estimate: it is reserved, and the app says afterwards what it really was."""
    count_when: StatusTest | None = None
    """Counted only if the app answers so; reserved until then."""
    shadow: bool = False
    """Evaluated and reported, but never rejects."""
    on_failure: RouteMode | None = None
    missing: Literal["skip", "ip"] | None = None
    """For requests that lack an identity of `by`: leave the limit out, or count them by address. None: by address,
    unless another limit on the same request counts by address already."""
    unit: str = "requests"
    """What is counted, as the RateLimit-Policy field names it."""
    lease: LeaseMode = "auto"
    split: int = 1
    """Over how many counters it is spread."""
    net_of: str | None = None
    """For the safety net of a limit by API key: the name of that limit. See `policy.snapshot.UnknownKeyNet`."""

    @property
    def limits(self) -> tuple[Limit, ...]:
        """All numbers that it may have, overrides apart."""
        return (*([] if self.limit is None else [self.limit]), *self.tiers.values())


@dataclass(frozen=True, slots=True)
class Client:
    """Somebody whom the policy knows by name."""

    identity: Identity
    tier: str | None = None
    label: str | None = None


@dataclass(frozen=True, slots=True)
class Override:
    """Other numbers for one client on one limit, for a time."""

    identity: Identity
    rule: str
    """The name of the rule whose numbers change."""
    limit: Limit
    route_class: str | None = None
    """Only on routes of this class; None on all."""
    validity: Validity = Validity()
    reason: str | None = None


@dataclass(frozen=True, slots=True)
class Block:
    """Somebody who does not get in at all."""

    identity: Identity
    """An `ip` may be a network: 203.0.113.0/24."""
    validity: Validity = Validity()
    reason: str | None = None


@dataclass(frozen=True, slots=True)
class IdentitySettings:
    """Where identities come from."""

    proxies: tuple[str, ...] = ()
    """Networks whose word on the client's address is taken."""
    forwarded_by: Literal["x-forwarded-for", "forwarded"] = "x-forwarded-for"
    """The one header in which those proxies give it."""
    ipv6_prefix: int = 64
    subnet_ipv4: int = 24
    subnet_ipv6: int = 48
    api_key_header: str | None = "x-api-key"
    """Where an API key stands; None if it is only looked for in a bearer token."""
    bearer_token: bool = True
    """Whether `Authorization: Bearer ...` is an API key, too."""
    known_keys_only: bool = False
    """Whether only keys that the policy names are keys: a request that sends another is one that sends none."""
    unknown_key_factor: int | None = 10
    """Requests with unknown API keys are also counted by address, at this multiple of each limit by API key, unless a
    limit by ip, subnet or global applies to them; None to count them by their keys only."""


@dataclass(frozen=True, slots=True)
class AnswerSettings:
    """How answers look."""

    x_ratelimit: bool = True
    ratelimit: bool = True
    """The IETF's RateLimit and RateLimit-Policy fields."""
    jitter: timedelta = timedelta()
    """Retry-After is spread over so much more, against herds; never earlier than the truth."""
    doc_url: str | None = None
    draft: Literal[6, 11] = 11
    """The version of draft-ietf-httpapi-ratelimit-headers that RateLimit and RateLimit-Policy follow."""


@dataclass(frozen=True, slots=True)
class StoreSettings:
    """How the store is asked, and what holds when it fails."""

    budget: timedelta = timedelta(milliseconds=5)
    """How long it may take for an answer."""
    share: Fraction = Fraction(1, 5)
    """Of each limit, what all live nodes allow together on routes that fail local."""
    nodes: int = 1
    """How many nodes there are, until their heartbeats say so."""
    remember: int = 10_000
    """How many denials each process remembers; 0 for none."""
    lease: timedelta = timedelta(milliseconds=100)
    """For how long prepaid tokens are good; zero for none."""


@dataclass(frozen=True, slots=True)
class Policy:
    """Everything that a policy file says."""

    rules: tuple[Rule, ...] = ()
    routes: tuple[RouteRule, ...] = ()
    tiers: tuple[str, ...] = ()
    default_tier: str | None = None
    clients: tuple[Client, ...] = ()
    overrides: tuple[Override, ...] = ()
    blocked: tuple[Block, ...] = ()
    identity: IdentitySettings = IdentitySettings()
    answers: AnswerSettings = AnswerSettings()
    store: StoreSettings = StoreSettings()
    on_failure: RouteMode = "open"
    """For routes and rules that don't say."""
    name: str = "policy"
    warnings: tuple[str, ...] = ()
    """What is allowed, but probably not meant: `headgate check` prints them."""

    @property
    def api_keys(self) -> list[str]:
        """The API keys that clients, overrides and blocks name, or their hashes. Computed on each access."""
        return [*self.vouched_api_keys, *(each.identity.value for each in self.blocked if _is_api_key(each))]

    @property
    def vouched_api_keys(self) -> list[str]:
        """The API keys that clients and overrides name, or their hashes. Computed on each access."""
        named: list[Client | Override] = [*self.clients, *self.overrides]
        return [each.identity.value for each in named if _is_api_key(each)]

    def parts(self) -> list[Any]:
        """The entries of which there may be many: hold them while the policy is freed, then release them in slices."""
        return [*self.overrides, *self.clients, *self.blocked]

    @property
    def turns(self) -> list[int]:
        """The instants at which an override or a block begins or ends, in order. To be asked once."""
        validities = {each.validity for each in self.overrides} | {each.validity for each in self.blocked}
        ends = {end for validity in validities for end in (validity.since, validity.until) if end is not None}
        return sorted((end - EPOCH) // timedelta(microseconds=1) for end in ends)


def _is_api_key(entry: Client | Override | Block) -> bool:
    return entry.identity.kind == "api_key"


def net_name(name: str) -> str:
    """The name of the safety net of a limit.

    >>> net_name("search")
    'search (unknown keys)'
    """
    most = LONGEST_NAME - len(NET_SUFFIX)
    if len(name) > most:
        digest = blake2b(name.encode(), digest_size=4).hexdigest()
        name = f"{name[: most - len(digest) - 1]}~{digest}"
    return name + NET_SUFFIX
