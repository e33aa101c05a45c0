"""Requests as adapters pass them to the gate, and their admission, which apps read from a context variable."""

from __future__ import annotations

import logging
from contextvars import ContextVar, Token
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol

from headgate.errors import InvalidCost, InvalidInput

if TYPE_CHECKING:
    from collections.abc import Sequence

    from headgate.abuse.challenge import Challenge
    from headgate.decisions import Decision
    from headgate.gate.metering import QuotaCharge
    from headgate.gate.responses import Header, HeaderTemplate, Rejection
    from headgate.local.restrictions import Restriction
    from headgate.overload.load_shedder import Permit, Priority
    from headgate.policy.snapshot import AppliedLimit, Resolution

__all__ = [
    "NOT_SERVED", "UNLIMITED", "Admission", "RequestInfo", "Shadow", "current_admission", "current_priority",
    "enter_context", "leave_context",
]  # fmt: skip

logger = logging.getLogger("headgate")

CHALLENGE_REQUIRED: Final = (b"headgate-challenge", b"required")
"""The header field of responses to clients that the app has to challenge."""

NOT_SERVED: Final = 0
"""Status passed to `finish` for a request that another limit refused after its admission: it costs nothing."""


class RequestInfo(Protocol):
    """A framework-neutral request, also passed to `on_decision` and to the app's identity functions."""

    @property
    def method(self) -> str: ...
    @property
    def path(self) -> str:
        """The decoded path that the framework routes by, from the server's root."""

    @property
    def mounted_path(self) -> str | None:
        """The path relative to the app's mount point; None for an app at the root."""

    @property
    def peer(self) -> str | None:
        """The IP address of the peer; None for Unix sockets."""

    @property
    def native(self) -> Any:
        """The framework's own object: ASGI scope, WSGI environ, Django or aiohttp request, gRPC context."""

    def header(self, name: str) -> list[str]:
        """The values of all lines of a header, given its name in lower case."""


class Shadow(NamedTuple):
    """The decision of a limit with `shadow: true`, which is evaluated but not enforced."""

    applied: AppliedLimit
    decision: Decision


@dataclass(slots=True, eq=False, repr=False)
class Admission:
    """The outcome of admission control for one request. Inside the app, use `current_admission()`."""

    resolution: Resolution | None
    """The limits that apply; None if the gate is off or the route is exempt."""
    decision: Decision | None
    """The decision on these limits; None if no limit was checked."""
    refusal: Rejection | None
    """The response to send instead of the app's; None for an allowed request."""
    _header_template: HeaderTemplate | None
    received_us: int
    """Arrival time by the gate's clock."""
    needs_finish: bool = False
    """True if the gate's `finish` must be called after the response was sent."""
    shadows: Sequence[Shadow] = ()
    """The decisions of shadow limits."""
    lease: Any = None
    """The context manager of the concurrency leases of this request."""
    quotas: Sequence[QuotaCharge] = ()
    """The charges on quotas, with the sources that pay for them."""
    meters_messages: bool = False
    """True if the adapter applies the limits on messages."""
    permit: Permit | None = None
    """The place of this request among those in progress, if the policy limits them."""
    restrictions: Sequence[Restriction] = ()
    """The actions of scenarios that have applied to it. Of a request that one of them has refused, only that one."""
    challenge: Challenge | None = None
    """A challenge that the app has to present to the client, which has not passed it yet."""
    observed: RequestInfo | None = None
    """The request, if scenarios of abuse look at it once its response is known."""
    is_only_observed: bool = False
    """True if `finish` would only pass on the status, for which the gate's `observe_response` needs no wait."""
    is_settled: bool = False
    """True once the final cost is charged; `commit` has no effect any more."""
    _committed: dict[str, int] | None = None

    @property
    def allowed(self) -> bool:
        return self.refusal is None

    @property
    def headers(self) -> list[Header]:
        """The RateLimit header fields for the app's response."""
        own = [] if self.challenge is None else [CHALLENGE_REQUIRED]
        if self._header_template is None or self.decision is None:
            return own
        return [*self._header_template.headers(self.decision.verdicts, self.decision.at_us), *own]

    def suppress_headers(self) -> None:
        """Leave `headers` empty, because they are sent together with those of a view's limits."""
        if self is not UNLIMITED:  # shared by all requests
            self._header_template = None

    def commit(self, cost: int, limit: str | None = None) -> None:
        """Set the actual cost of the request on limits with `reserve:`, which were charged an estimate.

        The difference is refunded, or charged as far as the limit has tokens left, after the response was sent. `limit`
        names one limit if several reserve.
        """
        if type(cost) is not int or cost < 0:
            raise InvalidCost(f"cost {cost!r} is not a whole number >= 0")
        if self.resolution is None:  # nothing was reserved: the gate is off or the route exempt
            return
        # Including limits that do not apply to this client: the app need not know which ones do.
        reserved = [each.rule.name for each in self.resolution.route.rules if each.rule.settled]
        if limit is not None and limit not in reserved:
            raise InvalidInput(f"no limit {limit!r} with reserve: applies to this route; these do: {reserved}")
        if self.is_settled and reserved:
            logger.warning("commit(%d) ignored: the response was already sent and the request settled", cost)
            return
        self._committed = (self._committed or {}) | dict.fromkeys(reserved if limit is None else [limit], cost)

    def cost_of(self, applied: AppliedLimit | QuotaCharge, status: int) -> int:
        """The final cost of the request on a limit or quota, given the status of the response."""
        rule = applied.rule
        if status == NOT_SERVED or (rule.count_when is not None and not rule.count_when(status)):
            return 0
        return (self._committed or {}).get(rule.net_of or rule.name, applied.cost)


UNLIMITED: Final = Admission(None, None, None, None, 0)
"""The admission of all requests to which no limit applies."""

_current: ContextVar[Admission] = ContextVar("headgate_admission", default=UNLIMITED)
enter_context: Final = _current.set


def leave_context(token: Token[Admission]) -> None:
    """Undo `enter_context`."""
    try:
        _current.reset(token)
    except (ValueError, RuntimeError):  # another task's context, or already left
        _current.set(UNLIMITED)


def current_priority() -> Priority:
    """The priority of the request that is being served, for guards: `guard.call(current_priority)`."""
    resolution = _current.get().resolution
    return "normal" if resolution is None else resolution.route.priority


def current_admission() -> Admission:
    """The admission of the request that is being served, with its decision; `commit` its actual cost there."""
    return _current.get()
