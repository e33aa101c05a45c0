"""Checks for other languages: the operations behind the JSON API and the gRPC API, and the bounds of both.

Requests beyond the bounds are not queued: they get the answer of the failure mode at once, that of their route if a
policy applies to them, else that of the server.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from datetime import timedelta
from functools import lru_cache
from typing import TYPE_CHECKING, Annotated, Any, Final, TypeVar

from pydantic import BaseModel, ConfigDict, Field, model_validator

from headgate.errors import InvalidInput, StoreError
from headgate.limits import Limit
from headgate.server.call_deadline import CallDeadline, CallTimedOut
from headgate.server.forwarded import DescribedRequest
from headgate.stores.operations import Check, Leave, Refund, Renew, checked, checked_lease, checked_refund

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from headgate.decisions import Decision
    from headgate.gate.admission import Admission, RequestInfo
    from headgate.gate.gate import AsyncGate
    from headgate.keys import Key
    from headgate.limiter import AsyncLimiter
    from headgate.stores.operations import Cost

__all__ = [
    "BatchAnswer",
    "BatchBody",
    "ChangeAnswer",
    "CheckBody",
    "CheckService",
    "CommitBody",
    "DeadlineExceeded",
    "DecisionAnswer",
    "LeaseBody",
    "LimitsBody",
    "RefundBody",
    "ServerOverloaded",
    "header_fields",
]  # fmt: skip

Answer = TypeVar("Answer")

MAX_BATCH: Final = 100
MAX_LIMITS: Final = 20
MAX_ID_LENGTH: Final = 100
MAX_CACHED_LIMITS: Final = 256
MAX_CONCURRENT: Final = 1000
DEADLINE_S: Final = 1.0

UNCHARGED_QUOTA: Final = 2**51
"""Capacity of the counter that records the part of an actual cost that could not be charged."""
COMMIT_ATTEMPTS: Final = 3
"""Attempts to charge the rest of a limit, which others use at the same time."""


class ServerOverloaded(StoreError):
    """Too many requests are in progress, so that the store was not asked."""


class DeadlineExceeded(StoreError):
    """The request took longer than the server allows."""

    may_have_happened = True


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid")


class LimitBody(_Body):
    """A limit with the client that is counted."""

    limit: str = Field(description="The limit in the syntax of policies.", examples=["100/minute, burst 20"])
    name: str = Field(default="default", description="Limits of different names have different counters.")
    by: list[str | int] = Field(default_factory=list, description="The parts of the client's identity.", max_length=10)
    algorithm: str | None = Field(default=None, description='The algorithm; by default, "token_bucket".')
    cost: int = Field(default=1, ge=0, description="The cost of the request on this limit.")

    def key(self) -> Key:
        """The key of the client; raises InvalidLimit if the text is not a limit."""
        return _parse_limit(self.limit, self.name, self.algorithm).by(*self.by)


@lru_cache(MAX_CACHED_LIMITS)
def _parse_limit(text: str, name: str, algorithm: str | None) -> Limit:
    """`Limit.parse`, cached: callers name the same few limits in every request."""
    return Limit.parse(text, name=name, algorithm=algorithm)


class DescribedRequestBody(_Body):
    """A request to which the policy of the server is applied."""

    method: str = "GET"
    path: str
    ip: str | None = Field(default=None, description="The address of the client.")
    headers: dict[str, str] = Field(
        default_factory=dict, description="Headers with API keys, if the policy counts by them."
    )
    identities: dict[str, str] = Field(
        default_factory=dict, description='Other identities: {"user": "ada", "tenant": "acme"}.'
    )


class CheckBody(_Body):
    """A question: by the policy, or by limits that the caller names."""

    request: DescribedRequestBody | None = None
    limits: list[LimitBody] | None = Field(default=None, min_length=1, max_length=MAX_LIMITS)
    id: str | None = Field(default=None, description="An idempotency key: a repeated check is charged once.")

    @model_validator(mode="after")
    def _has_one_subject(self) -> CheckBody:
        if (self.request is None) == (self.limits is None):
            raise ValueError("give either request, for the policy of the server, or limits")
        return self


class BatchBody(_Body):
    """Several independent questions."""

    checks: list[CheckBody] = Field(min_length=1, max_length=MAX_BATCH)


class LimitsBody(_Body):
    """Limits of one client."""

    limits: list[LimitBody] = Field(min_length=1, max_length=MAX_LIMITS)


class LeaseBody(LimitsBody):
    """Limits of one client with the id of a reservation or a lease."""

    id: str = Field(min_length=1, max_length=MAX_ID_LENGTH)


class CommitBody(LeaseBody):
    """The actual cost of a reserved request; `cost` of each limit is what was reserved."""

    actual: int = Field(ge=0)


class RefundBody(_Body):
    """Tokens to return to a limit."""

    limit: LimitBody
    amount: int = Field(ge=0)
    id: str | None = Field(default=None, description="The id of the check: at most what it consumed is returned, once.")


@dataclass(slots=True)
class LimitState:
    """The verdict of one limit."""

    name: str
    allowed: bool
    remaining: int
    retry_after: float | None
    reset_after: float
    uncharged: Annotated[int, Field(description="After a commit: the part of the actual cost that was not left.")] = 0


@dataclass(slots=True)
class DecisionAnswer:
    """The decision on a request."""

    allowed: bool
    reason: str
    remaining: int | None = None
    retry_after: Annotated[float | None, Field(description="Seconds; null if the request can never pass.")] = None
    reset_after: float | None = None
    delay: Annotated[float, Field(description="Seconds to wait before going on, for leaky_bucket.")] = 0
    denied_by: list[str] = field(default_factory=list)
    degraded: Annotated[str | None, Field(description="The failure mode that decided in place of the store.")] = None
    id: str | None = None
    limits: list[LimitState] = field(default_factory=list)
    status: Annotated[int | None, Field(description="The status to answer a rejected request with.")] = None
    headers: Annotated[dict[str, str], Field(description="Header fields for the response of the request.")] = field(
        default_factory=dict
    )


@dataclass(slots=True)
class BatchAnswer:
    """The decisions on several questions, in their order."""

    decisions: list[DecisionAnswer]


@dataclass(slots=True)
class ChangeAnswer:
    """The outcome of a refund, a renewal or a release."""

    changed: bool


class CheckService:
    """Charges, reads, reserves and holds limits for callers in other languages, within bounds."""

    def __init__(
        self,
        limiter: AsyncLimiter,
        gate: AsyncGate | None = None,
        *,
        max_concurrent: int = MAX_CONCURRENT,
        deadline: float = DEADLINE_S,
    ) -> None:
        """Without a gate, there is no policy, and callers name their limits. `deadline` is in seconds."""
        self._limiter = limiter
        self._gate = gate
        self._max_concurrent = self._free = max_concurrent
        self._deadline_s = deadline
        self._deadline = CallDeadline(deadline)
        if gate is not None:  # so that requests that are held back neither time out nor keep others out
            gate.limit_holding(max_concurrent // 4, deadline / 2)

    @property
    def has_policy(self) -> bool:
        return self._gate is not None

    async def check(self, body: CheckBody) -> DecisionAnswer:
        """Charge a request: by the policy, or by the limits that it names."""
        if body.request is None:
            return await self._check(body.limits or [], body.id)
        asked = body.request
        described = DescribedRequest(asked.method, asked.path, asked.ip, asked.headers, asked.identities)
        return _from_admission(await self.admit(described))

    async def check_batch(self, body: BatchBody) -> BatchAnswer:
        """Charge several requests, each on its own."""
        return BatchAnswer(decisions=list(await asyncio.gather(*map(self.check, body.checks))))

    async def peek(self, body: LimitsBody) -> DecisionAnswer:
        """Read the state of limits without charging them."""
        keys = _keys(body.limits)
        return _from_decision(await self._decide(checked(keys, 0, None)))

    async def reserve(self, body: LeaseBody) -> DecisionAnswer:
        """Charge an estimate; `commit` the actual cost under the same id."""
        return await self._check(body.limits, body.id)

    async def commit(self, body: CommitBody) -> DecisionAnswer:
        """Replace the reserved cost by the actual one, once: return the rest, or charge more as far as there is more.

        The answer says for each limit what could not be charged, also when the commit is repeated.
        """
        keys = _keys(body.limits)
        checked(keys, 0, body.id)  # all or none of the keys are valid
        results = await asyncio.gather(
            *[self._commit(key, each.cost, body) for key, each in zip(keys, body.limits, strict=True)]
        )
        answer = _from_decision(await self._decide(checked(keys, 0, None)))
        for state, (uncharged, degraded) in zip(answer.limits, results, strict=True):
            state.uncharged = uncharged
            answer.degraded = answer.degraded or degraded
        short = [state for state in answer.limits if state.uncharged]
        if short:
            answer.allowed = False
            answer.denied_by = [state.name for state in short]
            answer.reason = "; ".join(
                f"{state.uncharged} of the actual cost not charged to {state.name}" for state in short
            )
        return answer

    async def refund(self, body: RefundBody) -> ChangeAnswer:
        """Return unused tokens."""
        return ChangeAnswer(changed=await self._change(checked_refund(body.limit.key(), body.amount, body.id, None)))

    async def hold(self, body: LeaseBody) -> DecisionAnswer:
        """Take a lease on concurrency limits; renew it before it expires, and leave."""
        return await self._check(body.limits, body.id)

    async def renew(self, body: LeaseBody) -> ChangeAnswer:
        """Extend a lease; `changed` is false if it was no longer held."""
        return await self._change_all([Renew(*checked_lease(key, body.id)) for key in _keys(body.limits)])

    async def leave(self, body: LeaseBody) -> ChangeAnswer:
        """End a lease; `changed` is false if it was no longer held."""
        return await self._change_all([Leave(*checked_lease(key, body.id)) for key in _keys(body.limits)])

    async def admit(self, request: RequestInfo) -> Admission:
        """Admit or refuse a request by the policy. It counts as served, as its response is not known here."""
        gate = self._gate
        if gate is None:
            raise InvalidInput("the server has no policy; start it with --policy FILE, or name the limits")

        async def ask() -> Admission:
            admission = await gate.admit(request)
            if admission.needs_finish:
                await gate.finish(admission, 200)
            return admission

        try:
            return await self._bounded(ask)
        except (ServerOverloaded, DeadlineExceeded) as error:
            return gate.admit_without_store(request, error)

    async def _check(self, limits: list[LimitBody], id: str | None) -> DecisionAnswer:
        return _from_decision(await self._decide(checked(_keys(limits), _costs(limits), id)))

    async def _decide(self, check: Check) -> Decision:
        engine = self._limiter.engine
        if engine.memory is not None and self._free:  # decides without waiting
            return engine.memory.decide(check)
        try:
            return await self._bounded(lambda: engine.decide(check, engine.failure))
        except (ServerOverloaded, DeadlineExceeded) as error:
            return engine.failure.decide(check, error)

    async def _change_all(self, operations: list[Any]) -> ChangeAnswer:
        return ChangeAnswer(changed=all(await asyncio.gather(*map(self._change, operations))))

    async def _change(self, operation: Refund | Renew | Leave) -> bool:
        limiter = self._limiter

        async def change() -> bool:
            if isinstance(operation, Refund):
                return await limiter.refund(operation.key, operation.amount, id=operation.id)
            method = limiter.renew if isinstance(operation, Renew) else limiter.leave
            return await method(operation.key, id=operation.id)

        try:
            return await self._bounded(change)
        except (ServerOverloaded, DeadlineExceeded) as error:
            return limiter.engine.failure.answer(operation, error)

    async def _commit(self, key: Key, reserved: int, body: CommitBody) -> tuple[int, str | None]:
        """Settle one limit: what could not be charged, and the failure mode if that decided."""
        extra = body.actual - reserved
        if extra < 0:
            await self._change(checked_refund(key, -extra, body.id, None))
        if extra <= 0:
            return 0, None
        # The record of the id covers both counters: a repeated commit gets the same amount that was not charged.
        period = timedelta(microseconds=key.limit.period_us)
        shortfall = Limit(UNCHARGED_QUOTA, period, algorithm="fixed_window", name=f"{key.limit.name} uncharged")
        keys, id = (key, shortfall.by(*key.parts, body.id)), f"{body.id}:commit"
        part = extra
        for _ in range(COMMIT_ATTEMPTS):
            decision = await self._decide(checked(keys, (part, min(extra - part, UNCHARGED_QUOTA)), id))
            if decision.degraded is not None:
                return (0 if decision.allowed else extra), decision.degraded
            if decision.allowed:
                return UNCHARGED_QUOTA - decision.outcomes[1].remaining, None
            part = min(part, decision.outcomes[0].remaining)
            if not part:
                break
        decision = await self._decide(checked(keys, (0, min(extra, UNCHARGED_QUOTA)), id))
        return extra, decision.degraded

    async def _bounded(self, ask: Callable[[], Coroutine[Any, Any, Answer]]) -> Answer:
        if not self._free:
            raise ServerOverloaded(
                f"{self._max_concurrent} requests are in progress, as many as --max-concurrent allows"
            )
        self._free -= 1
        try:
            return await self._deadline.run(ask())
        except CallTimedOut:
            raise DeadlineExceeded(f"no answer within {self._deadline_s:g} s, the --deadline of a request") from None
        finally:
            self._free += 1


def _keys(limits: list[LimitBody]) -> tuple[Key, ...]:
    return tuple([each.key() for each in limits])


def _costs(limits: list[LimitBody]) -> Cost:
    return limits[0].cost if len(limits) == 1 else tuple([each.cost for each in limits])


def _from_decision(decision: Decision) -> DecisionAnswer:
    return DecisionAnswer(
        allowed=decision.allowed,
        reason=decision.reason,
        remaining=decision.remaining,
        retry_after=0 if decision.allowed else decision.retry_after,
        reset_after=decision.reset_after,
        delay=decision.delay,
        denied_by=[] if decision.allowed else [*decision.denied_by],
        degraded=decision.degraded,
        id=decision.id,
        limits=[
            LimitState(each.limit.name, each.allowed, each.remaining, each.retry_after, each.reset_after)
            for each in decision.outcomes
        ],
    )


def _from_admission(admission: Admission) -> DecisionAnswer:
    if admission.decision is not None:
        answer = _from_decision(admission.decision)
    else:
        answer = DecisionAnswer(allowed=admission.allowed, reason="no limit applies", retry_after=0)
    if admission.refusal is not None:
        answer.allowed = False
        answer.reason = answer.reason if admission.decision is not None else admission.refusal.message
        answer.status = admission.refusal.status
        answer.headers = header_fields(admission.refusal.headers)
    else:
        answer.headers = header_fields(admission.headers)
    return answer


def header_fields(headers: Any) -> dict[str, str]:
    """The headers of an admission or a rejection as text."""
    return {
        name if type(name) is str else str(name, "latin-1"): value if type(value) is str else str(value, "latin-1")
        for name, value in headers
    }
