"""The policy as immutable values: limits, routes, tiers, clients, overrides, blocks and settings.

`policy.loader` builds it from a file, and `policy.snapshot` compiles it for requests. A running request keeps the
policy that it started with.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime, timedelta
from fractions import Fraction
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple, TypeAlias

from headgate.clock import EPOCH
from headgate.overload.gradient import ConcurrencySettings

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from headgate.abuse.model import AbuseSettings
    from headgate.limits import Limit
    from headgate.overload.load_shedder import Priority
    from headgate.policy.routes import Template

__all__ = [
    "ADDRESSES", "EPOCH", "LIST", "NET_SUFFIX", "URL_SCHEMES", "AllowedClient", "AnswerSettings", "Block", "Client",
    "Identity", "IdentitySettings", "LeaseMode", "LedgerSettings", "ListSource", "OverloadSettings", "Override",
    "Policy", "RegionSettings", "RouteMode", "RouteRule", "Rule", "StatusTest", "StoreSettings", "Validity",
    "net_name",
]  # fmt: skip

RouteMode: TypeAlias = Literal["open", "closed", "local"]
"""The failure mode of a route."""

LeaseMode: TypeAlias = Literal["auto", "always", "never"]
"""When the tokens of a limit are prepaid: for hot keys, always, or never."""


ADDRESSES: Final = ("ip", "subnet")
"""The kinds of identity that every request has."""

LIST: Final = "list"
"""The kind of identity by which a block names a reputation list."""

URL_SCHEMES: Final = ("http://", "https://")

NET_SUFFIX: Final = " (unknown keys)"
LONGEST_NAME: Final = 100
LOCAL_MODES: Final = ("regional", "divided")
"""The region modes in which no identity leaves its region."""


class Identity(NamedTuple):
    """One identity of a client: ("ip", "203.0.113.9"), ("tenant", "acme")."""

    kind: str
    value: str


@dataclass(frozen=True, slots=True)
class Validity:
    """A period of validity; None for an open end."""

    since: datetime | None = None
    until: datetime | None = None

    def holds_at(self, instant: datetime) -> bool:
        return (self.since is None or self.since <= instant) and (self.until is None or instant < self.until)

    def is_over(self, instant: datetime) -> bool:
        return self.until is not None and self.until <= instant


@dataclass(frozen=True, slots=True)
class StatusTest:
    """A condition on the response status: `status in [401, 403]`, `status >= 500`."""

    text: str
    """As written in the policy."""
    statuses: frozenset[int]

    def __call__(self, status: int) -> bool:
        return status in self.statuses


@dataclass(frozen=True, slots=True)
class OverloadSettings:
    """A limit on the requests in progress in one process; see docs/overload.md."""

    concurrency: ConcurrencySettings = field(default_factory=ConcurrencySettings)
    retry_after: timedelta = timedelta(seconds=1)
    """Sent with requests that were shed."""
    fair: bool = True
    """True if a client with more than its share of the requests in progress leaves room to the others."""


@dataclass(frozen=True, slots=True)
class RouteRule:
    """The settings of a route: class, cost, failure mode and priority."""

    template: Template
    methods: frozenset[str]
    """Empty for all. HEAD counts as GET, as does a websocket handshake."""
    route_class: str | None = None
    cost: int = 1
    """The cost of a request on limits without a cost of their own; 0 exempts the route."""
    on_failure: RouteMode | None = None
    priority: Priority = "normal"
    """The order in which requests are shed during overload."""
    overload: OverloadSettings | Literal["none"] | None = None
    """A concurrency limit of its own; "none" for no limit, None for that of the policy."""


@dataclass(frozen=True, slots=True)
class FairShares:
    """The division of a global limit between clients; see docs/fair-sharing.md."""

    between: Literal["tenant", "user", "api_key", "ip", "client"] = "tenant"
    """The kind of identity that has a share."""
    weights: Mapping[str, int] = field(default_factory=dict)
    """By tier; 1 for clients in none of them."""


@dataclass(frozen=True, slots=True)
class Rule:
    """A named limit, the requests that it applies to, and the identities that it counts by.

    Tiers and overrides change only its numbers.
    """

    name: str
    limit: Limit | None
    """For clients in none of `tiers`; None if the rule applies only to those tiers."""
    by: tuple[str, ...]
    """The kinds of identity that form the key; empty for one counter for all requests."""
    tiers: Mapping[str, Limit] = field(default_factory=dict)
    templates: tuple[Template, ...] = ()
    """The routes that it applies to; all, if `classes` is empty, too."""
    methods: frozenset[str] = frozenset()
    classes: tuple[str, ...] = ()
    cost: int | None = None
    """The cost of a request; None for the cost of its route."""
    settled: bool = False
    """The cost is an estimate that is reserved; the app settles the real cost afterwards."""
    count_when: StatusTest | None = None
    """Only responses with such a status are charged; the cost is reserved until then."""
    shadow: bool = False
    """Evaluated and reported, but never rejects."""
    on_failure: RouteMode | None = None
    missing: Literal["skip", "ip"] | None = None
    """For requests that lack an identity of `by`: skip the limit, or count by address. None: by address, unless another
    limit already counts all requests of the route by address."""
    unit: str = "requests"
    """The quota unit in the RateLimit-Policy field."""
    lease: LeaseMode = "auto"
    split: int = 1
    """The number of counters that it is sharded over."""
    region: str = "regional"
    """The region mode; see docs/regions.md."""
    is_quota: bool = False
    """Charged to an account of the ledger."""
    outage_units: int = 0
    """Of a quota: the units of an account that a process admits without a lease while the ledger is unavailable."""
    net_of: str | None = None
    """In the safety net of a limit by API key, the name of that limit; see `policy.snapshot.UnknownKeyNet`."""

    share: FairShares | None = None
    """Of a global limit, how clients share it; None for first come, first served."""
    lists: tuple[str, ...] = ()
    """The reputation lists to whose addresses it applies; empty for all requests."""
    counts: Literal["requests", "messages", "bytes"] = "requests"
    """The unit that it counts: requests, or what their connections carry."""
    direction: Literal["received", "sent", "both"] = "both"
    """Of messages and bytes, those from the client, those to it, or both."""
    on_excess: Literal["wait", "drop", "close"] = "wait"
    """The fate of a message over the limit."""

    @property
    def leaves_region(self) -> bool:
        """True if identities that it counts are known to other regions."""
        return self.region not in LOCAL_MODES

    @property
    def counts_requests(self) -> bool:
        return self.counts == "requests"

    @property
    def limits(self) -> tuple[Limit, ...]:
        """The limits of all tiers, without overrides."""
        return (*([] if self.limit is None else [self.limit]), *self.tiers.values())


@dataclass(frozen=True, slots=True)
class Client:
    """A client that the policy names."""

    identity: Identity
    tier: str | None = None
    label: str | None = None
    timezone: str | None = None
    """The time zone of its calendar periods; None for that of the limit."""
    starts: int | str | None = None
    """The first day of its months (1 to 31) or of its years ("04-01"); None for that of the limit."""
    weight: int | None = None
    """Its weight in limits with fair shares; None for that of its tier."""


@dataclass(frozen=True, slots=True)
class Override:
    """Other numbers for one client on one limit, perhaps for a time."""

    identity: Identity
    rule: str
    limit: Limit
    route_class: str | None = None
    """Only on routes of this class; None on all."""
    validity: Validity = Validity()
    reason: str | None = None
    names_timezone: bool = False
    names_starts: bool = False
    """True if its numbers name a time zone or a first day, which takes precedence over that of the client."""


@dataclass(frozen=True, slots=True)
class Block:
    """A client whose requests are all rejected."""

    identity: Identity
    """An `ip` may be a network: 203.0.113.0/24. A `list` is the name of a reputation list."""
    validity: Validity = Validity()
    reason: str | None = None


class AllowedClient(NamedTuple):
    """A client against whom no action is taken."""

    identity: Identity


@dataclass(frozen=True, slots=True)
class ListSource:
    """A reputation list: networks in a file or at a URL."""

    name: str
    source: str
    format: Literal["plain", "csv", "json", "crowdsec"] = "plain"
    refresh: timedelta = timedelta(hours=1)
    """The time between two checks for a newer version."""
    max_size: int = 64 * 1024 * 1024
    """In bytes, also after decompression."""
    max_networks: int = 2_000_000
    column: str | int | None = None
    """Of CSV, the name of the column, or its number from 1; None for the first, without a header."""
    key: str | None = None
    """Of JSON, the name of the field with the network; None for an array of texts."""
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    """Sent with requests for a URL. ${NAME} in a value stands for an environment variable."""
    secret: str | None = field(default=None, repr=False)
    """${NAME} of the environment variable with the key of its signature, in a file SOURCE.hmac; None if not signed."""
    exempt: tuple[str, ...] = ()
    """Networks that do not count as listed."""

    @property
    def is_url(self) -> bool:
        return self.source.startswith(URL_SCHEMES)


@dataclass(frozen=True, slots=True)
class IdentitySettings:
    """Settings for extracting identities from requests."""

    proxies: tuple[str, ...] = ()
    """The networks of trusted proxies."""
    forwarded_by: Literal["x-forwarded-for", "forwarded"] = "x-forwarded-for"
    """The header in which they pass on the address of the client."""
    ipv6_prefix: int = 64
    subnet_ipv4: int = 24
    subnet_ipv6: int = 48
    api_key_header: str | None = "x-api-key"
    """The header with the API key; None to use only bearer tokens."""
    bearer_token: bool = True
    """True if `Authorization: Bearer ...` is an API key, too."""
    known_keys_only: bool = False
    """True if requests with an API key that the policy does not name count as requests without one."""
    unknown_key_factor: int | None = 10
    """Requests with unknown API keys are also counted by address, at this multiple of each limit by API key, unless a
    limit by ip, subnet or global applies to them; None to count them by their keys only."""


@dataclass(frozen=True, slots=True)
class AnswerSettings:
    """Settings for responses."""

    x_ratelimit: bool = True
    ratelimit: bool = True
    """The IETF's RateLimit and RateLimit-Policy fields."""
    jitter: timedelta = timedelta()
    """The most that is added to Retry-After at random, against thundering herds."""
    doc_url: str | None = None
    draft: Literal[6, 11] = 11
    """The version of draft-ietf-httpapi-ratelimit-headers that RateLimit and RateLimit-Policy follow."""


@dataclass(frozen=True, slots=True)
class StoreSettings:
    """Settings for the store, and for when it fails."""

    budget: timedelta = timedelta(milliseconds=5)
    """The time limit of a call."""
    share: Fraction = Fraction(1, 5)
    """The part of each limit that all live nodes together allow on routes that fail local."""
    nodes: int = 1
    """The number of nodes that is assumed until their heartbeats are known."""
    remember: int = 10_000
    """The size of the denial cache of each process; 0 turns it off."""
    lease: timedelta = timedelta(milliseconds=100)
    """The validity of prepaid tokens; zero turns them off."""


@dataclass(frozen=True, slots=True)
class RegionSettings:
    """The regions of a service: their stores, and what may leave a region."""

    own: str | None = None
    """The region of this process, or ${NAME} for an environment variable; None for HEADGATE_REGION."""
    home: str | None = None
    """The region that decides `central` limits; None if there is only one region."""
    stores: Mapping[str, str] = field(default_factory=dict, repr=False)
    """The URL of the store of each region. ${NAME} in it stands for an environment variable."""
    central_budget: timedelta = timedelta(milliseconds=500)
    """The time limit of a call to the home region."""
    identities: Literal["hashed", "plain"] | None = None
    """The form in which identities leave a region; None for hashed, also if there is no secret to key the hash with."""
    stay: tuple[str, ...] = ()
    """The kinds of identity that do not leave a region in any form."""
    safe_share: Fraction = Fraction(1, 50)
    """The part of reserved limits that regions may spend without the home region, or later than it was charged."""


@dataclass(frozen=True, slots=True)
class LedgerSettings:
    """Settings for quotas, and for the ledger that they are charged to."""

    url: str | None = field(default=None, repr=False)
    """The database. ${NAME} in it stands for an environment variable. None for that of the gate or its config store."""
    journal: str | None = None
    """The directory for the journals of charges that are not yet in the ledger."""
    budget: timedelta = timedelta(seconds=1)
    """The time limit of requests that must wait for the ledger, such as the first one of an account."""
    idempotency_header: str | None = "idempotency-key"
    """The header whose value identifies a request and its repetitions; None for no header."""


@dataclass(frozen=True, slots=True)
class GrowthTerms:
    """The bound within which limits of a tier's clients are raised by themselves; see docs/growth.md."""

    factor: int
    """The highest limit, as a multiple of the tier's."""
    duration: timedelta


@dataclass(frozen=True, slots=True)
class Policy:
    """A whole policy."""

    rules: tuple[Rule, ...] = ()
    routes: tuple[RouteRule, ...] = ()
    tiers: tuple[str, ...] = ()
    default_tier: str | None = None
    clients: tuple[Client, ...] = ()
    overrides: tuple[Override, ...] = ()
    blocked: tuple[Block, ...] = ()
    lists: tuple[ListSource, ...] = ()
    identity: IdentitySettings = IdentitySettings()
    answers: AnswerSettings = AnswerSettings()
    store: StoreSettings = StoreSettings()
    regions: RegionSettings | None = None
    ledger: LedgerSettings = LedgerSettings()
    overload: OverloadSettings | None = None
    """The concurrency limit of each process; None for no limit."""
    abuse: AbuseSettings | None = None
    """The scenarios that detect attacks; None for none."""
    raises: Mapping[str, GrowthTerms] = field(default_factory=dict)
    """By tier; the limits of others are never raised automatically."""
    on_failure: RouteMode = "open"
    """For routes and rules without a failure mode."""
    name: str = "policy"
    warnings: tuple[str, ...] = ()
    """Valid but probably not intended; printed by `headgate check`."""

    @property
    def api_keys(self) -> list[str]:
        """The API keys, or their hashes, of clients, overrides and blocks. Computed on each access."""
        return [*self.vouched_api_keys, *_api_keys(self.blocked)]

    @property
    def vouched_api_keys(self) -> list[str]:
        """The API keys, or their hashes, of clients, overrides and clients that are never acted on. Computed on each
        access."""
        return [*_api_keys(self.clients), *_api_keys(self.overrides), *_api_keys(self.allowed)]

    @property
    def allowed(self) -> tuple[AllowedClient, ...]:
        """The clients against whom no action is taken."""
        return () if self.abuse is None else tuple([AllowedClient(each) for each in self.abuse.allow])

    @property
    def region_limits(self) -> list[Limit]:
        """The limits that several regions share, with those of overrides. Computed on each access."""
        shared = {rule.name: rule for rule in self.rules if rule.region != "regional"}
        overrides = [each.limit for each in self.overrides if each.rule in shared] if shared else []
        return list(dict.fromkeys([*(limit for rule in shared.values() for limit in rule.limits), *overrides]))

    def parts(self) -> list[Any]:
        """The entries of large sections: keep them while the policy is freed, then release them in slices."""
        return [*self.overrides, *self.clients, *self.blocked]

    @property
    def transition_times_us(self) -> list[int]:
        """The times at which an override or a block begins or ends, sorted. Computed on each access."""
        validities = {each.validity for each in self.overrides} | {each.validity for each in self.blocked}
        ends = {end for validity in validities for end in (validity.since, validity.until) if end is not None}
        return sorted((end - EPOCH) // timedelta(microseconds=1) for end in ends)


def _api_keys(entries: Sequence[Client | Override | Block | AllowedClient]) -> list[str]:
    return [each.identity.value for each in entries if each.identity.kind == "api_key"]


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
