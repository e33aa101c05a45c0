"""One request's way through the gate, written once: who is it, what does it meet, what is it told, what did it cost?

Nothing here waits. `gate.py` asks these questions in their order, and knows how to wait for a store between them.
"""

from __future__ import annotations

import logging
import sys
from bisect import bisect_right
from contextvars import ContextVar, Token
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol, TypeAlias

from headgate.errors import InvalidCost, InvalidInput, ScriptError, StoreError
from headgate.stores.operations import Check, Refund

if TYPE_CHECKING:
    from collections.abc import Generator, Iterable, Sequence

    from headgate.decisions import Decision
    from headgate.gate.identity import AppIdentities, IdentityExtractor, RawIdentity
    from headgate.gate.responses import Header, HeaderTemplate, Rejection, ResponseBuilder
    from headgate.policy.model import Block
    from headgate.policy.snapshot import AppliedLimit, Resolution, RoutePlan, Snapshot

__all__ = [
    "NOT_SERVED",
    "UNLIMITED",
    "ActivePolicy",
    "Admission",
    "ClientCache",
    "RequestInfo",
    "Settling",
    "Shadow",
    "current_admission",
    "enter_context",
    "leave_context",
    "settle",
]

logger = logging.getLogger("headgate")

MOST_KNOWN: Final = 4096
PATIENCE: Final = 16 * MOST_KNOWN
"""How many strangers are let go while no more are kept: a flood of them makes requests no dearer than they would be
if nobody was kept, and who is busy is kept after the next start."""

LONGEST_KNOWN: Final = 512
"""In characters of all identities and of what they were read from: seven megabytes of known clients at most, whoever
comes."""

NOT_SERVED: Final = 0
"""The status of a request that another limit refused after its admission: no answer has it, and it costs nothing."""

SETTLED: Final[dict[str, int]] = {}
"""What was committed, once nothing more can be."""


class RequestInfo(Protocol):
    """A request as adapters hand it in, the same for every framework. Functions that identify clients get it, too."""

    @property
    def method(self) -> str: ...
    @property
    def path(self) -> str:
        """Decoded, as the framework routes by it, from the server's root on."""

    @property
    def below(self) -> str | None:
        """The same from where the app is mounted, if that is not the root."""

    @property
    def peer(self) -> str | None:
        """The address of whoever opened the connection."""

    @property
    def native(self) -> Any:
        """The framework's own: an ASGI scope, a WSGI environ, a Django or aiohttp request, a gRPC context."""

    def header(self, name: str) -> list[str]:
        """The values of all lines of a header; the name in lower case."""


class Shadow(NamedTuple):
    """What a limit that is only watched would have said."""

    met: AppliedLimit
    decision: Decision


Settling: TypeAlias = "Generator[Check | Refund, Any, None]"

ResolvedRequest: TypeAlias = "tuple[Resolution, Check | None, HeaderTemplate]"
"""What a request meets, what the store is asked, and how the client is told; None where the store is not asked."""


class Admission:
    """How a request was let in, or not. The app finds its own with `current_admission()`."""

    __slots__ = (
        *("_committed", "_description", "came_us", "decision", "held", "is_over", "refusal", "resolution", "shadows"),
    )
    came_us: int
    """The instant at which the request came, by the gate's own clock."""
    resolution: Resolution | None
    """The limits that it meets; None where no limit is looked at."""
    decision: Decision | None
    """What the limits said; None where none is met."""
    refusal: Rejection | None
    """The answer to send instead of the app's own; None for a request that may pass."""
    is_over: bool
    """Whether nothing is left to do when the answer is out."""
    shadows: Sequence[Shadow]
    """What limits that are only watched would have said."""
    held: Any
    """The block that holds its leases."""

    def __init__(
        self,
        resolution: Resolution | None,
        decision: Decision | None,
        refusal: Rejection | None,
        description: HeaderTemplate | None,
        came_us: int,
    ) -> None:
        self.came_us = came_us
        self.resolution = resolution
        self.decision = decision
        self.refusal = refusal
        self.is_over = resolution is None or not resolution.route.settles
        self.shadows = ()
        self.held = None
        self._committed: dict[str, int] | None = None
        self._description = description
        """The header template of its limits; None where the client gets no headers."""

    @property
    def allowed(self) -> bool:
        return self.refusal is None

    @property
    def headers(self) -> list[Header]:
        """The fields for the app's answer."""
        if self._description is None or self.decision is None:
            return []
        return self._description.headers(self.decision.verdicts, self.decision.at_us)

    def hold(self, held: Any) -> None:
        """Keep the block that holds its leases, until the answer is out."""
        self.held = held
        self.is_over = False

    def hush(self) -> None:
        """Report no header fields any more, as they are reported together with those of a view's limits."""
        if self is not UNLIMITED:  # which all requests share
            self._description = None

    def commit(self, cost: int, limit: str | None = None) -> None:
        """Say what the request has really cost, on limits that had only reserved an estimate (`reserve:`).

        It is settled when the answer is out: what was too much is given back, what was too little is charged as far
        as the limit has it. `limit` names one, where several are reserved.
        """
        if type(cost) is not int or cost < 0:
            raise InvalidCost(f"cost {cost!r} is not a whole number >= 0")
        if self.resolution is None:  # the gate is off, or the route exempt: nothing was reserved, nothing is to settle
            return
        # Also those that only other clients meet: the app need not know whom a limit leaves out.
        reserved = [each.rule.name for each in self.resolution.route.rules if each.rule.settled]
        if limit is not None and limit not in reserved:
            raise InvalidInput(f"requests to this route reserve nothing on a limit {limit!r}; they do on: {reserved}")
        if self._committed is SETTLED and reserved:
            logger.warning("commit(%d) comes too late: the answer was out, and the cost of its request settled", cost)
            return
        self._committed = (self._committed or {}) | dict.fromkeys(reserved if limit is None else [limit], cost)

    @property
    def is_settled(self) -> bool:
        """True once the final cost is known: nothing can be committed any more."""
        return self._committed is SETTLED

    def close(self) -> None:
        """Take nothing more: it is settled."""
        self._committed = SETTLED

    def cost_of(self, met: AppliedLimit, status: int) -> int:
        """What the request has cost on a limit in the end, given the app's answer."""
        if status == NOT_SERVED:
            return 0
        if met.rule.count_when is not None and not met.rule.count_when(status):
            return 0
        name = met.rule.net_of or met.rule.name
        return met.cost if self._committed is None else self._committed.get(name, met.cost)


UNLIMITED: Final = Admission(None, None, None, None, 0)
"""For requests that meet no limit at all."""

_current: ContextVar[Admission] = ContextVar("headgate_admission", default=UNLIMITED)
enter_context: Final = _current.set


def leave_context(token: Token[Admission]) -> None:
    """Make it current no more."""
    try:
        _current.reset(token)
    except (ValueError, RuntimeError):  # in a task that has a context of its own, or left once already
        _current.set(UNLIMITED)


def current_admission() -> Admission:
    """How the request that is being served was let in: its decision, and where to `commit` its real cost."""
    return _current.get()


class ClientCache(dict[Any, ResolvedRequest]):
    """What was worked out for clients that come often: a dict that nobody writes to before `has_room`."""

    __slots__ = ("_strangers",)

    def __init__(self) -> None:
        super().__init__()
        self._strangers = 0

    def has_room(self) -> bool:
        """Whether a stranger can be kept; to be asked once for each. After many who could not, all start anew."""
        if len(self) < MOST_KNOWN:
            return True
        self._strangers += 1
        if self._strangers >= PATIENCE:
            self._strangers = 0
            self.clear()
        return False


class ActivePolicy:
    """All that holds for the requests that begin now; swapped whole when the policy changes."""

    __slots__ = ("_answers", "_descriptions", "_period", "_turns", "identities", "snapshot")

    def __init__(self, snapshot: Snapshot, answers: ResponseBuilder, identities: IdentityExtractor) -> None:
        self.snapshot = snapshot
        self.identities = identities
        self._answers = answers
        self._descriptions: dict[Any, HeaderTemplate] = {}
        """Of the limits that requests have met so far; the snapshot keeps those alive whose ids stand here."""
        self._turns = [-sys.maxsize, *snapshot.policy.turns, sys.maxsize]
        self._period: tuple[int, int, ClientCache] = (0, 0, ClientCache())
        """From when until when nothing in the policy begins or ends, and what busy clients meet in that time: by the
        route, what they send, and what the app says of them."""

    def meet(
        self, route: RoutePlan, arrival: RequestInfo, kinds: frozenset[str], told: AppIdentities, now_us: int
    ) -> ResolvedRequest:
        """What the request meets; `kinds` are the identities that matter, and `told` those that the app has told.

        Most clients have been here before, and meet what they met then, until something in the policy begins or ends.
        """
        since_us, until_us, known = self._period
        if not since_us <= now_us < until_us:
            known = self._turn(now_us)
        sent = self.identities.sent(arrival, route, kinds)
        asked = (sent, *told.items()) if told else sent
        found = known.get(asked)
        if found is not None:
            return found
        who, is_all_sent = self.identities.read(arrival, kinds)
        met = self.snapshot.resolve(route, {**who, **told}, now_us)
        meeting = self._meeting(met)
        if sent is not None and is_all_sent and meeting[1] is not None and known.has_room() and _is_short(sent, met):
            known[asked] = meeting
        return meeting

    def unasked(self, resolution: Resolution, now_us: int) -> Admission:
        """How a request is let in that is blocked, or meets no limit: the store need not be asked."""
        block = resolution.block
        refusal = None if block is None else self._answers.blocked(_time_left(block, now_us))
        return Admission(resolution, None, refusal, None, now_us)

    def conclude(
        self, resolution: Resolution, decision: Decision, description: HeaderTemplate, now_us: int
    ) -> Admission:
        """How the request is let in, or its refusal."""
        if decision.degraded is not None and resolution.route.on_failure != "local":
            # Nothing is known of the limits: the client is told no numbers.
            refusal = None if decision.allowed else self._answers.unavailable(decision)
            return Admission(resolution, decision, refusal, None, now_us)
        refusal = None if decision.allowed else self._answers.denied(decision, description)
        return Admission(resolution, decision, refusal, description, now_us)

    def headers_of(self, admissions: Iterable[Admission]) -> list[Header]:
        """The header fields of several admissions of one request, as if they were one."""
        found = [(each, headers) for each in admissions if (headers := each.headers)]
        if len(found) < 2:
            return found[0][1] if found else []
        decisions = [each.decision for each, _ in found if each.decision is not None]
        rules = [rule for each, _ in found if each.resolution is not None for rule in each.resolution.rules]
        description = self._answers.describe(
            [key.limit for decision in decisions for key in decision.keys],
            [rule.rule.unit for rule in rules],
            [rule.cost for rule in rules],
        )
        return description.headers([each for decision in decisions for each in decision.verdicts], decisions[-1].at_us)

    def _meeting(self, met: Resolution) -> ResolvedRequest:
        is_asked = met.block is None and met.keys
        return met, Check(met.keys, met.cost) if is_asked else None, self._described(met)

    def _described(self, met: Resolution) -> HeaderTemplate:
        # What the numbers depend on: the tier, or, where rules are left out or overridden, the very limits.
        if met.rules is met.route.rules and not met.route.has_overrides:
            shape: Any = met.route, met.tier
        else:
            shape = met.cost, *[id(key.limit) for key in met.keys]
        description = self._descriptions.get(shape)
        if description is None:
            description = self._descriptions[shape] = self._answers.describe(
                [key.limit for key in met.keys],
                [rule.rule.unit for rule in met.rules],
                [rule.cost for rule in met.rules],
            )
        return description

    def _turn(self, now_us: int) -> ClientCache:
        """Begin the period that the instant is in: nothing is known of it yet."""
        index = bisect_right(self._turns, now_us)
        known = ClientCache()
        self._period = self._turns[index - 1], self._turns[index], known
        return known


def settle(admission: Admission, status: int) -> Settling:
    """Give back, or charge beside, what the request has really cost. The answer is out already: nobody waits for it."""
    resolution, decision = admission.resolution, admission.decision
    if resolution is None or decision is None or not decision.allowed or decision.degraded is not None:
        return
    if admission.is_settled:
        return
    for met in resolution.met:
        if met.key.limit.algorithm == "concurrency":  # its lease is left, and nothing else is charged
            continue
        cost = admission.cost_of(met, status)
        if cost == met.cost:
            continue
        try:
            if cost < met.cost:
                yield Refund(met.key, met.cost - cost, None, decision.at_us)
            else:
                beside: Decision = yield Check((met.key,), cost - met.cost)
                if not beside.allowed and beside.remaining:
                    yield Check((met.key,), beside.remaining)
        except StoreError as error:
            if error.may_have_happened or isinstance(error, ScriptError):  # else the gate keeps it for later
                logger.warning("the cost of a request on limit %r could not be settled: %s", met.rule.name, error)
    admission.close()


def _is_short(sent: RawIdentity, met: Resolution) -> bool:
    """Whether it takes no more memory to know a client than it may."""
    _, _, peer, forwarded, _, _ = sent
    return sum([len(text) for text in (peer, *forwarded, *met.who.values()) if text]) <= LONGEST_KNOWN


def _time_left(block: Block, now_us: int) -> int | None:
    until = block.validity.until
    return None if until is None else max(0, int(until.timestamp() * 1_000_000) - now_us)
