"""Scenarios of abuse as data: the requests they look at, the signals, and the steps against the clients they find."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Final, Literal, NamedTuple, Protocol, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Callable

    from headgate.policy.model import Identity
    from headgate.policy.routes import Template

__all__ = [
    "ADDRESS_GROUPS", "COUNT_SIGNALS", "SHARE_SIGNALS", "AbuseAction", "AbuseScenario", "AbuseSettings", "ActionStep",
    "Finding", "FindingHandler", "Threshold",
]  # fmt: skip

AbuseAction: TypeAlias = Literal["tighten", "delay", "challenge", "block"]

COUNT_SIGNALS: Final = ("requests", "accounts", "addresses", "agents", "paths", "newcomers", "seconds")
"""Signals that are numbers per window: requests, distinct values among them, or the seconds that their responses took.
Newcomers are addresses that were not seen in the last hour."""

SHARE_SIGNALS: Final = ("refused", "missing", "limited", "regular")
"""Signals that are shares of the requests: answered with 401 or 403, with 404 or 410, with 429 or 503; and those that
follow the one before of their address after the same interval, or a multiple of it."""

ADDRESS_GROUPS: Final = ("agent", "asn", "endpoint", "global")
"""Kinds of groups that do not identify a client: in them, the addresses that took part are found."""


@dataclass(frozen=True, slots=True)
class Threshold:
    """A condition on a signal: it holds from this value on."""

    signal: str
    value: float
    """A number per window for one of `COUNT_SIGNALS`, a share from 0 to 1 for one of `SHARE_SIGNALS`."""

    @property
    def text(self) -> str:
        """As written in policies.

        >>> Threshold("refused", 0.5).text, Threshold("accounts", 20).text
        ('refused: 50%', 'accounts: 20')
        """
        return (
            f"{self.signal}: {self.value:.4g}"
            if self.signal in COUNT_SIGNALS
            else f"{self.signal}: {100 * self.value:.4g}%"
        )


@dataclass(frozen=True, slots=True)
class ActionStep:
    """An action against a client that was found, and its duration."""

    action: AbuseAction
    duration: timedelta
    factor: int = 4
    """Of tighten: limits are divided by it."""
    delay: timedelta = timedelta(seconds=2)
    """Of delay: added to each request."""
    mode: Literal["page", "redirect", "app"] = "page"
    """Of challenge: a page with a proof of work, a redirect to `url`, or a header for the app."""
    url: str | None = None
    difficulty: int = 17
    """Of challenge: the bits of its proof of work."""


@dataclass(frozen=True, slots=True)
class AbuseScenario:
    """A kind of attack: the requests to look at, the signal that reveals it, and the steps against those found."""

    name: str
    by: str
    """The group whose requests are taken together: a kind of identity, "agent", "asn", "endpoint" or "global"."""
    when: tuple[Threshold, ...]
    """All must hold of a group within the window. The first one is named in findings."""
    window: timedelta
    steps: tuple[ActionStep, ...] = ()
    """The first one applies to a client that is found, the next to one that is found again. Empty to report only."""
    templates: tuple[Template, ...] = ()
    """The routes that it looks at; all, if `classes` is empty, too."""
    methods: frozenset[str] = frozenset()
    classes: tuple[str, ...] = ()
    status: Callable[[int], bool] | None = None
    """A condition on the response status: only requests that are answered so are counted."""
    each: tuple[Threshold, ...] = ()
    """Only the addresses to which these apply are counted and found, in a group that does not identify a client."""
    account: str = "account"
    """The kind of identity that `accounts` counts; that of requests without one is the user, or the API key."""
    shadow: bool = False
    """Reported only: no step applies."""
    decay: timedelta = timedelta(hours=1)
    """The quiet time after which a client loses one of its steps."""
    longest: timedelta = timedelta(days=1)
    """The longest duration to which repeated actions grow."""
    grace: timedelta = timedelta(hours=1)
    """The time after an operator has undone an action in which the client gets no other."""

    @property
    def names_clients(self) -> bool:
        """True if what it finds are clients, against whom steps can be taken, and not groups."""
        return self.by not in ADDRESS_GROUPS or bool(self.each)

    @property
    def looks_at_agents(self) -> bool:
        return self.by == "agent" or any(each.signal == "agents" for each in (*self.when, *self.each))

    @property
    def kinds(self) -> frozenset[str]:
        """The kinds of identity that it needs."""
        groups = {self.by} - {*ADDRESS_GROUPS}
        counts_accounts = any(each.signal == "accounts" for each in (*self.when, *self.each))
        return frozenset({"ip", *groups, *((self.account, "user", "api_key") if counts_accounts else ())})


@dataclass(frozen=True, slots=True)
class AbuseSettings:
    """The section `abuse:` of a policy."""

    scenarios: tuple[AbuseScenario, ...] = ()
    allow: tuple[Identity, ...] = ()
    """Clients against whom no action is taken. An `ip` may be a network."""
    networks: str | None = None
    """A MaxMind DB file with the autonomous systems of addresses, for scenarios by asn."""


class Finding(NamedTuple):
    """A client whose requests match a scenario."""

    scenario: str
    kind: str
    """The kind of identity, as for blocks: an "ip" may be a network, an "api_key" is its keyed hash. Only identities
    that a client cannot choose are found, except "global" and "endpoint", which name no client."""
    value: str
    at_us: int
    signal: str
    observed: float
    """The value of the first signal of the scenario; at least `threshold`."""
    threshold: float
    evidence: str
    """One clause, without a period: "203.0.113.9 tried 27 accounts in 5 minutes; 96% of 31 requests were refused"."""


class FindingHandler(Protocol):
    """Applies the steps of a scenario to a client that was found. Called outside of requests, and never raises."""

    def __call__(self, finding: Finding, scenario: AbuseScenario) -> object: ...
