"""What the desk's words have in common: who acts, who is meant, and values that become JSON."""

from __future__ import annotations

from dataclasses import dataclass, fields, is_dataclass
from typing import TYPE_CHECKING, Any, Final, Generic, Literal, NamedTuple, TypeAlias, TypeVar

from headgate.control.service.errors import NotAllowed
from headgate.telemetry.fleet.model import ClientCount, HotKey, MinuteTotals, NearLimit, Series
from headgate.telemetry.fleet.model import NodeStatus as NodeView

if TYPE_CHECKING:
    from collections.abc import Collection
    from datetime import datetime

    from headgate.control.anomalies.detector import Anomaly
    from headgate.control.config.history import Difference, Version
    from headgate.control.service.errors import Risk
    from headgate.telemetry.decision_log.record import DecisionRecord

__all__ = [
    "ROLES",
    "Actor",
    "AuditEntry",
    "BlockView",
    "Change",
    "ChangeContext",
    "ClientCount",
    "ClientRef",
    "ClientRow",
    "ClientView",
    "HotKey",
    "LimitUsage",
    "MinuteTotals",
    "NearLimit",
    "NodeView",
    "OverrideSpec",
    "OverrideView",
    "Overview",
    "Page",
    "PolicyView",
    "Role",
    "RollbackPreview",
    "RouteView",
    "RuleView",
    "Series",
    "Slot",
    "State",
    "TierLimitView",
    "TierView",
    "Timeline",
    "View",
    "plain",
]

Role: TypeAlias = Literal["viewer", "support", "operator", "admin"]

ROLES: Final[tuple[Role, ...]] = ("viewer", "support", "operator", "admin")
"""Each may do what those before it may."""

Item = TypeVar("Item")


class Actor(NamedTuple):
    """The author of a change, and the role that decides what they may do."""

    name: str
    role: Role

    def may(self, role: Role) -> bool:
        """True if the actor's role includes this one."""
        return ROLES.index(self.role) >= ROLES.index(role)

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
    """What all views have."""

    __slots__ = ()

    def as_dict(self) -> dict[str, Any]:
        """The same for JSON."""
        return {
            field.name.rstrip("_"): plain(getattr(self, field.name))
            for field in fields(self)  # type: ignore[arg-type] # each view is a dataclass
        }


def plain(value: Any) -> Any:
    """A value for JSON: views as objects, tuples as lists."""
    if value is None or isinstance(value, str | int | float):
        return value
    if hasattr(value, "as_dict"):
        return value.as_dict()
    if hasattr(value, "_asdict"):
        return {name: plain(each) for name, each in value._asdict().items()}
    if is_dataclass(value):
        return {field.name: plain(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, dict):
        return {str(name): plain(each) for name, each in value.items()}
    return [plain(each) for each in value]


@dataclass(frozen=True, slots=True)
class Page(View, Generic[Item]):
    """Some of many."""

    items: tuple[Item, ...]
    next: str | None = None
    """What to ask for the rest with; None if this is the end."""


@dataclass(frozen=True, slots=True)
class Change(View):
    """What was done."""

    version: Version | None
    """None, if all was so already, or if what was done is no change of the configuration."""
    notes: tuple[str, ...] = ()
    """What is to know beside."""
    what: str = ""

    def as_dict(self) -> dict[str, Any]:
        number = None if self.version is None else self.version.number
        return {"version": number, "notes": list(self.notes), "what": self.what}


State: TypeAlias = Literal["active", "future", "expired"]


# ------------------------------------------------------------------ one client


@dataclass(frozen=True, slots=True)
class LimitUsage(View):
    """A limit that a client meets, and where it stands there."""

    limit: str
    by: str
    """The kinds of identity that it counts by: "tenant+user"; "global" for one counter for all."""
    bucket: str
    algorithm: str
    from_: Literal["override", "tier", "policy"]
    override_id: int | None
    """None also for an override that stands in the policy document."""
    valid_until_us: int | None
    reason: str | None
    routes: tuple[str, ...]
    used: int | None
    remaining: int | None
    capacity: int
    reset_s: float | None
    """Until the counter is as new."""
    retry_s: float | None
    """Until a request that costs 1 passes; None where that cannot be told."""
    unknown: str | None
    """Why it is not known how much is used."""
    shadow: bool
    """Only watched."""
    own: bool
    """Whether it counts this client by itself, so that it can be reset."""
    can_override: bool
    """True if the client can have a limit of its own here: the limit counts clients of its kind."""


@dataclass(frozen=True, slots=True)
class OverrideView(View):
    """A custom limit for one client."""

    id: int | None
    """Of its row in the config store; None for an override in the policy document."""
    since: int | None
    """The version that it is from."""
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
    """A row of the config store, or a line of the policy document, which is changed there."""


@dataclass(frozen=True, slots=True)
class BlockView(View):
    """Somebody who does not get in."""

    id: int | None
    """Of its row in the config store."""
    since: int | None
    who: ClientRef
    label: str | None
    valid_from_us: int | None
    valid_until_us: int | None
    reason: str | None
    author: str | None
    state: State
    source: Literal["config", "live", "policy"]
    """A row of the config store; told to the nodes alone; or a line of the policy document."""


@dataclass(frozen=True, slots=True)
class ClientView(View):
    """A client, with all that holds for it now."""

    who: ClientRef
    label: str | None
    tier: str | None
    tier_from: Literal["assigned", "policy", "default"]
    """Where the tier is said: in a row of the config store, in the policy document, or nowhere for this client."""
    limits: tuple[LimitUsage, ...]
    overrides: tuple[OverrideView, ...]
    block: BlockView | None
    log_keys: tuple[str, ...]
    can_count: bool
    """False if only a hash is known, by which nobody is counted: the client itself must be given."""
    is_seen: bool | None
    """False if neither the configuration nor the decision log knows a client of this name; None if that can't be told.
    """
    troubles: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ClientRow(View):
    """A client of whom the configuration says something."""

    who: ClientRef
    label: str | None
    tier: str | None
    overrides: int
    blocked: bool


@dataclass(frozen=True, slots=True)
class Slot(View):
    """What became of a client's requests in one part of a time."""

    at_us: int
    allowed: int
    """By the sample that is kept of those."""
    denied: int
    blocked: int
    unavailable: int
    degraded: int


@dataclass(frozen=True, slots=True)
class Timeline(View):
    """What became of a client's requests."""

    since_us: int
    until_us: int
    slots: tuple[Slot, ...]
    recent: tuple[DecisionRecord, ...]
    """At most 50, the newest first."""
    troubles: tuple[str, ...] = ()


# ------------------------------------------------------------------ the policy


@dataclass(frozen=True, slots=True)
class RollbackPreview(View):
    """Everything that a rollback would change, before it does."""

    version: int
    """The newest version, which the preview is of."""
    differences: tuple[Difference, ...]
    undone: tuple[Version, ...]
    """The versions since then, the newest first; at most 50."""
    risks: tuple[Risk, ...]
    live: tuple[BlockView, ...]
    """Live blocks outside the configuration, which a rollback keeps."""

    @property
    def codes(self) -> tuple[str, ...]:
        """The codes that confirm the risks."""
        return tuple(dict.fromkeys(risk.code for risk in self.risks))


@dataclass(frozen=True, slots=True)
class TierLimitView(View):
    """The numbers of a tier on one limit."""

    limit: str
    bucket: str
    from_: Literal["table", "policy"]
    id: int | None = None
    since: int | None = None


@dataclass(frozen=True, slots=True)
class TierView(View):
    """A tier."""

    name: str
    is_default: bool
    limits: tuple[TierLimitView, ...]
    clients: int
    """How many are assigned to it."""


@dataclass(frozen=True, slots=True)
class RouteView(View):
    """What is said of a route."""

    path: str
    methods: tuple[str, ...]
    """Empty for all."""
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
    """For everybody who is in no tier that has numbers of its own; None where only those meet it."""
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
    """The policy document, and what it comes to with the tables."""

    version: int
    """The version that was asked for, or the newest."""
    since: int | None
    """The version that brought the document; None while there is none."""
    text: str
    format: str
    name: str
    rules: tuple[RuleView, ...]
    warnings: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class AuditEntry(View):
    """What somebody did."""

    id: str
    """Sorts by time; to page on."""
    at_us: int
    author: str
    action: str
    about: str
    what: str
    reason: str
    version: int | None
    """The version that it made; None for what is no change of the configuration."""


@dataclass(frozen=True, slots=True)
class Overview(View):
    """What the fleet is doing."""

    at_us: int
    version: int | None
    """The newest of the configuration; None if the config store cannot be asked."""
    nodes: tuple[NodeView, ...]
    series: Series | None
    """None if there is no board to read it from."""
    totals: MinuteTotals
    top_denied: tuple[ClientCount, ...]
    near: tuple[NearLimit, ...]
    hot: tuple[HotKey, ...]
    steps: tuple[Anomaly, ...]
    troubles: tuple[str, ...]
    """What could not be found out, and why."""
