"""The values that the admin service takes and returns: actors, clients, changes and views."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, is_dataclass
from typing import TYPE_CHECKING, Any, Final, Generic, Literal, NamedTuple, TypeAlias, TypeVar

from headgate.control.service.errors import NotAllowed, Risk
from headgate.telemetry.fleet.model import (
    ClientCount,
    HotKey,
    MinuteTotals,
    NearLimit,
    NodeStatus,
    QuotaHolding,
    Series,
)

if TYPE_CHECKING:
    from collections.abc import Collection
    from datetime import datetime

    from headgate.control.anomalies.detector import Anomaly
    from headgate.control.canaries.comparison import Comparison
    from headgate.control.config.history import Difference, Version
    from headgate.telemetry.decision_log.record import DecisionRecord

__all__ = [
    "CHECK_ROLE", "ROLES", "TOKEN_ROLES", "Actor", "AuditEntry", "BlockView", "CanaryNodeView", "CanaryStatus",
    "CanaryView", "Change", "ChangeContext", "ClientCount", "ClientRef", "ClientRow", "ClientView", "HotKey",
    "LimitUsage", "MinuteTotals", "NearLimit", "NodeStatus", "OverrideSpec", "OverrideView", "Overview", "Page",
    "PolicyView", "Role", "RollbackPreview", "RouteView", "RuleView", "ScriptNodeView", "ScriptRolloutView",
    "ScriptStatus", "Series", "Slot", "State", "TierLimitView", "TierView", "Timeline", "View", "plain",
]  # fmt: skip

Role: TypeAlias = Literal["viewer", "support", "operator", "admin", "check"]

ROLES: Final[tuple[Role, ...]] = ("viewer", "support", "operator", "admin")
"""Roles of the admin server, lowest first. Each includes the rights of those before it."""

CHECK_ROLE: Final[Role] = "check"
"""The role of programs that ask `headgate serve`. It gives no access to the admin server, nor do others to that one."""

TOKEN_ROLES: Final[tuple[Role, ...]] = (*ROLES, CHECK_ROLE)

Item = TypeVar("Item")


class Actor(NamedTuple):
    """The author of a change, and the role that decides what they may do."""

    name: str
    role: Role

    def may(self, role: Role) -> bool:
        """True if the actor's role includes this one."""
        return self.role in ROLES and ROLES.index(self.role) >= ROLES.index(role)

    def require(self, role: Role, action: str) -> None:
        """Raise NotAllowed if the actor's role does not include this one: `require("operator", "roll back")`."""
        if not self.may(role):
            raise NotAllowed(action, role=self.role, needed=role)


class ClientRef(NamedTuple):
    """A client by one of its identities: ClientRef("tenant", "acme"). An API key is identified by its keyed hash."""

    kind: str
    value: str

    def __str__(self) -> str:
        return f"{self.kind} {self.value}"

    @property
    def texts(self) -> tuple[str, ...]:
        """The texts that are stored as they are: the value, unless it is an API key, which is hashed."""
        return () if self.kind == "api_key" else (str(self.value),)


@dataclass(frozen=True, slots=True)
class ChangeContext:
    """The part that all changes have in common."""

    actor: Actor
    reason: str
    confirmed: Collection[str] = ()
    """The codes of the risks that the actor has confirmed."""
    based_on: int | None = None
    """The version that the actor has seen; the change fails with Conflict if its target changed since. None skips the
    check."""


@dataclass(frozen=True, slots=True)
class OverrideSpec:
    """A custom limit: the rate of an override, the limit or route class that it replaces, and its validity."""

    bucket: str
    """The rate in the syntax of policies: "1000/minute, burst 200"."""
    limit: str | None = None
    route_class: str | None = None
    valid_from: datetime | None = None
    valid_until: datetime | None = None


class View:
    """Base class of views: dataclasses that can be serialized as JSON."""

    __slots__ = ()

    def as_dict(self) -> dict[str, Any]:
        """The fields as JSON values."""
        return _plain_fields(self)


def plain(value: Any) -> Any:
    """A value as JSON: views as objects, tuples as lists."""
    if value is None or isinstance(value, str | int | float):
        return value
    if hasattr(value, "as_dict"):
        return value.as_dict()
    if hasattr(value, "_asdict"):
        return {name: plain(each) for name, each in value._asdict().items()}
    if is_dataclass(value):
        return _plain_fields(value)
    if isinstance(value, dict):
        return {str(name): plain(each) for name, each in value.items()}
    return [plain(each) for each in value]


def _plain_fields(value: Any) -> dict[str, Any]:
    return {each.name.rstrip("_"): plain(getattr(value, each.name)) for each in fields(value)}


@dataclass(frozen=True, slots=True)
class Page(View, Generic[Item]):
    """A page of a list."""

    items: tuple[Item, ...]
    next: str | None = None
    """The cursor of the next page; None at the end."""


@dataclass(frozen=True, slots=True)
class Change(View):
    """The result of a change."""

    version: Version | None
    """The version that was created; None if nothing changed, or if it was not a change of the configuration."""
    notes: tuple[str, ...] = ()
    what: str = ""

    def as_dict(self) -> dict[str, Any]:
        number = None if self.version is None else self.version.number
        return {"version": number, "notes": list(self.notes), "what": self.what}


State: TypeAlias = Literal["active", "future", "expired"]


@dataclass(frozen=True, slots=True)
class LimitUsage(View):
    """A limit that applies to a client, and how much of it is used."""

    limit: str
    by: str
    """The kinds of identity that the limit counts by: "tenant+user"; "global" for one counter for all clients."""
    bucket: str
    algorithm: str
    from_: Literal["override", "tier", "policy"]
    override_id: int | None
    """None also for an override in the policy document."""
    valid_until_us: int | None
    reason: str | None
    routes: tuple[str, ...]
    used: int | None
    remaining: int | None
    capacity: int
    reset_s: float | None
    """Seconds until the counter is full again."""
    retry_s: float | None
    """Seconds until a request of cost 1 is allowed; None if the algorithm does not predict it."""
    unknown: str | None
    """The reason why usage is unknown."""
    shadow: bool
    own: bool
    """True if the counter counts this client alone, so that it can be reset."""
    can_override: bool
    """True if the limit counts clients of this kind, so that the client can have an override."""


@dataclass(frozen=True, slots=True)
class OverrideView(View):
    """A custom limit for one client."""

    id: int | None
    """The id of the row in the config store; None for an override in the policy document."""
    since: int | None
    """The version that added it."""
    who: ClientRef
    label: str | None
    limit: str | None
    route_class: str | None
    bucket: str
    valid_from_us: int | None
    valid_until_us: int | None
    reason: str | None
    author: str | None
    state: State
    source: Literal["config", "policy"]
    """An override in the policy document can only be changed there."""


@dataclass(frozen=True, slots=True)
class BlockView(View):
    """A blocked client."""

    id: int | None
    since: int | None
    who: ClientRef
    label: str | None
    valid_from_us: int | None
    valid_until_us: int | None
    reason: str | None
    author: str | None
    state: State
    source: Literal["config", "live", "policy"]
    """A live block is on the nodes, and not in the configuration."""


@dataclass(frozen=True, slots=True)
class ClientView(View):
    """A client with its tier, limits, usage, overrides and block."""

    who: ClientRef
    label: str | None
    tier: str | None
    tier_from: Literal["assigned", "policy", "default"]
    """Assigned in the config store, set in the policy document, or the default tier."""
    timezone: str | None
    """That of its calendar periods; None for that of the limits."""
    starts: int | str | None
    """The first day of its months, or of its years; None for that of the limits."""
    limits: tuple[LimitUsage, ...]
    overrides: tuple[OverrideView, ...]
    block: BlockView | None
    log_keys: tuple[str, ...]
    can_count: bool
    """False for a hash or a network, which have no counters."""
    is_seen: bool | None
    """False if neither the configuration, the decision log nor a node knows the client; None if that is unknown."""
    troubles: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ClientRow(View):
    """A client that has an entry in the configuration."""

    who: ClientRef
    label: str | None
    tier: str | None
    overrides: int
    blocked: bool


@dataclass(frozen=True, slots=True)
class Slot(View):
    """Outcomes of a client's requests in one time slot."""

    at_us: int
    allowed: int
    """Estimated from the sample that the log stores."""
    denied: int
    blocked: int
    unavailable: int
    degraded: int


@dataclass(frozen=True, slots=True)
class Timeline(View):
    """Outcomes of a client's requests over time."""

    since_us: int
    until_us: int
    slots: tuple[Slot, ...]
    recent: tuple[DecisionRecord, ...]
    """At most 50 records, newest first."""
    troubles: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class RollbackPreview(View):
    """The changes, risks and live blocks of a rollback."""

    version: int
    """The newest version, from which the differences are."""
    differences: tuple[Difference, ...]
    undone: tuple[Version, ...]
    """The versions since then, newest first; at most 50."""
    risks: tuple[Risk, ...]
    live: tuple[BlockView, ...]
    """Live blocks outside the configuration, which the rollback keeps."""

    @property
    def codes(self) -> tuple[str, ...]:
        """The codes with which the risks are confirmed."""
        return tuple(dict.fromkeys(risk.code for risk in self.risks))


@dataclass(frozen=True, slots=True)
class TierLimitView(View):
    """The rate of a limit for a tier."""

    limit: str
    bucket: str
    from_: Literal["table", "policy"]
    id: int | None = None
    since: int | None = None


@dataclass(frozen=True, slots=True)
class TierView(View):
    """A tier with its limits."""

    name: str
    is_default: bool
    limits: tuple[TierLimitView, ...]
    clients: int
    """The number of clients in the tier."""


@dataclass(frozen=True, slots=True)
class RouteView(View):
    """The cost and class of a route."""

    path: str
    methods: tuple[str, ...]
    """Empty for all methods."""
    cost: int
    route_class: str | None
    on_failure: str | None
    from_: Literal["table", "policy"]
    id: int | None = None
    since: int | None = None


@dataclass(frozen=True, slots=True)
class RuleView(View):
    """A limit of the policy."""

    name: str
    by: str
    bucket: str | None
    """The rate outside the tiers below; None if the limit applies to those tiers only."""
    algorithm: str | None
    tiers: dict[str, str]
    routes: tuple[str, ...]
    classes: tuple[str, ...]
    methods: tuple[str, ...]
    cost: int | None
    on_failure: str | None
    shadow: bool
    count_when: str | None


@dataclass(frozen=True, slots=True)
class PolicyView(View):
    """The policy document, and the limits that result from it and the tables."""

    version: int
    """The requested version, or the newest."""
    since: int | None
    """The version that saved the document; None if there is none."""
    text: str
    format: str
    name: str
    rules: tuple[RuleView, ...]
    warnings: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class CanaryView(View):
    """A canary of the policy."""

    id: str
    state: Literal["running", "promoted", "rolled back"]
    name: str
    """The file name of the candidate."""
    format: str
    text: str
    share: str
    """The nodes that apply the candidate, in words."""
    percent: int | None
    nodes: tuple[str, ...]
    """The names of the nodes; empty with a percentage."""
    max_rejections: float
    """Percentage points by which the share of rejections may exceed that of the other nodes."""
    max_errors: float
    max_latency: float
    """The permitted 99th percentile of latency, as a multiple of that of the other nodes."""
    for_s: float | None
    """The time of observation; None without a limit."""
    promote: bool
    """True if the candidate is promoted after that time."""
    begun_us: int
    author: str
    reason: str
    ended_us: int | None
    ended_by: str | None
    end_reason: str | None

    @property
    def ready_us(self) -> int | None:
        """The end of the observation; None without one."""
        return None if self.for_s is None else self.begun_us + round(self.for_s * 1_000_000)


@dataclass(frozen=True, slots=True)
class CanaryNodeView(View):
    """A node while a canary is running."""

    name: str
    state: Literal["ready", "degraded", "silent"]
    wanted: Literal["candidate", "stable"]
    """The document that it should apply."""
    role: Literal["candidate", "stable", "unknown"]
    """The one that it applies; unknown while it has not learned of the canary."""
    error: str | None
    """The reason why it cannot apply the candidate."""
    allowed: int
    """In the last minute, like the following numbers."""
    rejections: int
    errors: int
    p99_us: int | None


@dataclass(frozen=True, slots=True)
class CanaryStatus(View):
    """The last canary of the policy, and the comparison of its nodes while it runs."""

    canary: CanaryView | None
    comparison: Comparison | None = None
    nodes: tuple[CanaryNodeView, ...] = ()
    troubles: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ScriptRolloutView(View):
    """The last rollout of scripts."""

    version: str
    """The digest of the candidate."""
    stable: str
    state: Literal["canary", "promoted", "rolled back"]
    share: str
    changes: tuple[str, ...]
    """The names of the scripts that differ from the stable version."""
    begun_us: int
    author: str
    ended_us: int | None
    ended_by: str | None
    reason: str
    """The reason for its start, then for its end."""


@dataclass(frozen=True, slots=True)
class ScriptNodeView(View):
    """A process, and the version of the scripts that it runs."""

    name: str
    age_s: float
    """Seconds since its last report."""
    version: str
    role: str
    problem: str | None
    """The reason why it cannot use the candidate."""
    runs: int
    """Runs of both versions in the last canary of this node, and how many of them differed or failed."""
    differences: int
    errors: int
    slowdown: float | None
    """The candidate's time in Redis as a multiple of that of the stable version."""


@dataclass(frozen=True, slots=True)
class ScriptStatus(View):
    """The last rollout of scripts, and the nodes with their versions."""

    rollout: ScriptRolloutView | None = None
    nodes: tuple[ScriptNodeView, ...] = ()
    troubles: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class AuditEntry(View):
    """An entry of the audit log."""

    id: str
    """Sorts by time, and serves as the cursor."""
    at_us: int
    author: str
    action: str
    about: str
    what: str
    reason: str
    version: int | None
    """The version that it created; None if it was not a change of the configuration."""


@dataclass(frozen=True, slots=True)
class Overview(View):
    """The state of the fleet."""

    at_us: int
    version: int | None
    """The newest version of the configuration; None if the config store is unavailable."""
    nodes: tuple[NodeStatus, ...] = ()
    series: Series | None = None
    """None without a status store."""
    totals: MinuteTotals = field(default_factory=MinuteTotals)
    top_denied: tuple[ClientCount, ...] = ()
    near: tuple[NearLimit, ...] = ()
    hot: tuple[HotKey, ...] = ()
    quotas: tuple[QuotaHolding, ...] = ()
    """Tokens that Envoy proxies hold by the quota protocol."""
    steps: tuple[Anomaly, ...] = ()
    troubles: tuple[str, ...] = ()
    """Messages about what could not be read."""
