"""Admission: the outcome of admission control for one request, and the context variable that apps read it from."""

from __future__ import annotations

import logging
from contextvars import ContextVar, Token
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from headgate.errors import InvalidCost, InvalidInput

if TYPE_CHECKING:
    from collections.abc import Sequence

    from headgate.decisions import Decision
    from headgate.gate.responses import Header, HeaderTemplate, Rejection
    from headgate.policy.snapshot import AppliedLimit, Resolution

__all__ = ["NOT_SERVED", "UNLIMITED", "Admission", "Shadow", "current_admission", "enter_context", "leave_context"]

logger = logging.getLogger("headgate")

NOT_SERVED: Final = 0
"""Status passed to `finish` for a request that another limit refused after its admission: it costs nothing."""


class Shadow(NamedTuple):
    """The decision of a limit with `shadow: true`, which is evaluated but not enforced."""

    met: AppliedLimit
    decision: Decision


class Admission:
    """The outcome of admission control for one request. Inside the app, use `current_admission()`."""

    __slots__ = (
        "_committed", "_header_template", "_is_settled", "decision", "lease", "needs_finish", "received_us", "refusal",
        "resolution", "shadows",
    )  # fmt: skip

    def __init__(
        self,
        resolution: Resolution | None,
        decision: Decision | None,
        refusal: Rejection | None,
        header_template: HeaderTemplate | None,
        received_us: int,
    ) -> None:
        self.received_us = received_us
        """Arrival time by the gate's clock."""
        self.resolution = resolution
        """The limits that apply; None if the gate is off or the route is exempt."""
        self.decision = decision
        """The decision on these limits; None if no limit was checked."""
        self.refusal = refusal
        """The response to send instead of the app's; None for an allowed request."""
        self.needs_finish = resolution is not None and resolution.route.settles
        """True if the gate's `finish` must be called after the response was sent."""
        self.shadows: Sequence[Shadow] = ()
        """The decisions of shadow limits."""
        self.lease: Any = None
        """The context manager of the concurrency leases of this request."""
        self._committed: dict[str, int] | None = None
        self._is_settled = False
        self._header_template = header_template

    @property
    def allowed(self) -> bool:
        return self.refusal is None

    @property
    def headers(self) -> list[Header]:
        """The RateLimit header fields for the app's response."""
        if self._header_template is None or self.decision is None:
            return []
        return self._header_template.headers(self.decision.verdicts, self.decision.at_us)

    def hold(self, lease: Any) -> None:
        """Keep the context manager of the leases until `finish`."""
        self.lease = lease
        self.needs_finish = True

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
        if self._is_settled and reserved:
            logger.warning("commit(%d) ignored: the response was already sent and the request settled", cost)
            return
        self._committed = (self._committed or {}) | dict.fromkeys(reserved if limit is None else [limit], cost)

    @property
    def is_settled(self) -> bool:
        """True once the final cost is charged; `commit` has no effect any more."""
        return self._is_settled

    def close(self) -> None:
        """Mark the request as settled."""
        self._is_settled = True

    def cost_of(self, applied: AppliedLimit, status: int) -> int:
        """The final cost of the request on a limit, given the status of the response."""
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


def current_admission() -> Admission:
    """The admission of the request that is being served, with its decision; `commit` its actual cost there."""
    return _current.get()
