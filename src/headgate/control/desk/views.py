"""What the desk shows: values that pages, programs and tests read alike. `as_dict()` gives each for JSON.

Times are microseconds since 1970 (`*_us`), spans are seconds (`*_s`), limits are written as policies write them. API
keys stand here as keyed hashes only.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeAlias

from headgate.control.desk.basics import ROLES, Actor, Change, Page, Role, View, Who, plain
from headgate.control.desk.fleet import ClientCount, HotKey, Near, NodeView, Overview, Series, Totals

if TYPE_CHECKING:
    from headgate.control.config.history import Difference, Version
    from headgate.control.desk.errors import Danger
    from headgate.telemetry.records import Record

__all__ = [
    "ROLES",
    "Actor",
    "AuditEntry",
    "BlockView",
    "Change",
    "ClientCount",
    "ClientRow",
    "ClientView",
    "HotKey",
    "Near",
    "NodeView",
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
    "Standing",
    "State",
    "TierLimit",
    "TierView",
    "Timeline",
    "Totals",
    "View",
    "Who",
    "plain",
]

State: TypeAlias = Literal["active", "future", "expired"]


# ------------------------------------------------------------------ one client


@dataclass(frozen=True, slots=True)
class Standing(View):
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
    who: Who
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
    who: Who
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

    who: Who
    label: str | None
    tier: str | None
    tier_from: Literal["assigned", "policy", "default"]
    """Where the tier is said: in a row of the config store, in the policy document, or nowhere for this client."""
    limits: tuple[Standing, ...]
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

    who: Who
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
    recent: tuple[Record, ...]
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
    dangers: tuple[Danger, ...]
    live: tuple[BlockView, ...]
    """Live blocks outside the configuration, which a rollback keeps."""

    @property
    def codes(self) -> tuple[str, ...]:
        """The codes that confirm the dangers."""
        return tuple(dict.fromkeys(danger.code for danger in self.dangers))


@dataclass(frozen=True, slots=True)
class TierLimit(View):
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
    limits: tuple[TierLimit, ...]
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
