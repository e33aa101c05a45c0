"""The gate that adapters put in front of an app: a policy, a store, and two drivers of the one way of a request."""

from __future__ import annotations

import logging
import os
import secrets
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, ClassVar, Final, TypedDict
from weakref import WeakSet

from headgate.adapters import way
from headgate.adapters.answers import Answers
from headgate.adapters.identities import Identities
from headgate.adapters.way import FREE, Admission, Rules, Shadow
from headgate.clock import SystemClock
from headgate.errors import InvalidConfiguration, StoreError
from headgate.failure import FailurePolicy
from headgate.limiter import AsyncLimiter, Limiter
from headgate.policy.credentials import ApiKeys
from headgate.policy.model import Block, Identity, Policy, Validity
from headgate.policy.snapshot import ALL_API_KEYS, Snapshot
from headgate.policy.watching import Watch
from headgate.stores.calls import Check

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from os import PathLike

    from headgate.adapters.answers import RefusalBody
    from headgate.adapters.identities import IdentityFunction
    from headgate.adapters.way import Arrival
    from headgate.clock import Clock
    from headgate.events import Event
    from headgate.health import Health
    from headgate.policy.snapshot import Resolution
    from headgate.shield.blocks import Blocks
    from headgate.stores.memory import MemoryStore

__all__ = ["AsyncGate", "Gate", "GateOptions"]

logger = logging.getLogger("headgate")

BUILT_IN: Final = ("ip", "subnet", "api_key", "client", "endpoint")
"""The identities that a gate finds out by itself."""

SECRET_VARIABLE: Final = "HEADGATE_SECRET"

_new_check = tuple.__new__


class GateOptions(TypedDict, total=False):
    """What can be said of a gate beside its policy and its store; every adapter takes these."""

    identities: Mapping[str, IdentityFunction] | None
    """Functions that say who sends a request, by kind of identity: {"user": ..., "tenant": ...}."""
    secret: str | bytes | None
    """What API keys are hashed with: 16 bytes or more, the same on all machines. HEADGATE_SECRET, if not given."""
    refusal_body: RefusalBody | None
    """Makes the bodies of refusals."""
    on_decision: Callable[[Arrival, Admission], None] | None
    """Told of every decision as it is made."""
    reload_every: float | None
    """Seconds between looks at the policy file; None never to look again."""
    clock: Clock | None
    namespace: str
    budget: float | None
    """Seconds that the store may take before a route's failure mode answers; None for what the policy says."""
    max_keys: int
    on_event: Callable[[Event], Any] | None
    """Told when the store is lost, and back, and what became of it."""


class _Door:
    """What both gates are made of."""

    _limiter_type: type[Any]

    doors: ClassVar[WeakSet[Any]] = WeakSet()
    """All gates of this process, for tests that take hold of them."""

    newcomers: ClassVar[list[Callable[[Any], None]]] = []
    """Told of each gate as it is made, for the same tests."""

    def __init__(
        self,
        policy: Policy | str | PathLike[str],
        store: Any = "memory://",
        *,
        identities: Mapping[str, IdentityFunction] | None = None,
        secret: str | bytes | None = None,
        refusal_body: RefusalBody | None = None,
        on_decision: Callable[[Arrival, Admission], None] | None = None,
        reload_every: float | None = 1.0,
        clock: Clock | None = None,
        namespace: str = "headgate",
        budget: float | None = None,
        max_keys: int = 1_000_000,
        on_event: Callable[[Event], Any] | None = None,
    ) -> None:
        self._functions = dict(identities or {})
        self._refusal_body = refusal_body
        self.on_decision = on_decision
        """Told of every decision as it is made; those on routes that are exempt are none."""
        self._given_secret = secret if secret is not None else os.environ.get(SECRET_VARIABLE) or None
        self._given_budget = budget
        self.is_on = True
        """Whether requests are counted at all."""
        options = {"namespace": namespace, "budget": budget, "max_keys": max_keys, "on_event": on_event}
        self.use(self._limiter_type(store, clock=clock, **options), clock)
        self._random_secret = secrets.token_bytes(32)
        self._watch: Watch[None] | None = None
        self.rules: Rules
        """What holds for requests that begin now."""
        if isinstance(policy, Policy):
            self._swap(policy)
        else:
            self._watch = Watch(policy, self._swap, every=reload_every)
        self.doors.add(self)
        for tell in self.newcomers:
            tell(self)

    @property
    def policy_version(self) -> str | None:
        """A hash of the policy file's content in force; None for a policy that is no file."""
        return None if self._watch is None else self._watch.version

    @property
    def policy_error(self) -> str | None:
        """Why the newest content of the policy file is not in force; None if it is."""
        return None if self._watch is None or self._watch.error is None else str(self._watch.error)

    def use(self, limiter: Any, clock: Clock | None) -> tuple[Any, Clock | None]:
        """Count with another limiter from now on, by that clock; the ones before."""
        before = getattr(self, "_limiter", None), getattr(self, "_clock", None)
        self._limiter, self._clock = limiter, clock
        self._decide: Callable[..., Any] = limiter._decide  # noqa: SLF001 - as close to the store as the limiters' own way
        self._answer: Callable[..., Any] = limiter._answer  # noqa: SLF001
        self._now_us = (clock or SystemClock()).now_us
        self._memory: MemoryStore | None = limiter._memory  # noqa: SLF001
        fleet = limiter.guard_routes()
        self._fallbacks = {
            mode: FailurePolicy(mode, clock or SystemClock(), fleet) for mode in ("open", "closed", "local")
        }
        self._blocks: Blocks = limiter.live_blocks
        return before

    def use_memory(self, clock: Clock) -> tuple[Any, Clock | None]:
        """Count afresh from now on, in memory and by that clock; what counted before, as `use` takes it."""
        return self.use(self._limiter_type(clock=clock), clock)

    def made(self, policy: Policy) -> Rules:
        """The policy, ready for requests."""
        unknown = {kind for rule in policy.rules for kind in rule.by} - {*BUILT_IN} - {*self._functions}
        if unknown:
            logger.warning(
                "the policy counts by %s, for which no function is given in identities=: such limits see nobody's, "
                "and count by address where nothing else does",
                ", ".join(sorted(unknown)),
            )
        api_keys = ApiKeys(policy.identity, self._secret(policy))
        return Rules(
            Snapshot(policy, api_keys.fingerprint),
            Answers(policy.answers, body=self._refusal_body),
            Identities(policy.identity, api_keys, self._functions),
        )

    def health(self) -> Health:
        """Whether requests are decided by the store, and what is known of its servers."""
        health: Health = self._limiter.health()
        return health

    def _swap(self, policy: Policy) -> None:
        rules = self.made(policy)
        settings = policy.store
        self._limiter.configure(
            budget=settings.budget.total_seconds() if self._given_budget is None else self._given_budget,
            share=settings.share,
            nodes=settings.nodes,
            remember=settings.remember,
            lease_us=settings.lease // timedelta(microseconds=1),
            announced=rules.snapshot.announced(self._now_us()),
            never_leased=rules.snapshot.never_leased,
        )
        self.rules = rules

    def _secret(self, policy: Policy) -> bytes:
        """What API keys are hashed with: the same on all machines that count together."""
        given = self._given_secret
        if given is not None:
            return given.encode() if isinstance(given, str) else given
        if self._memory is None and _counts_api_keys(policy):
            raise InvalidConfiguration(
                "the policy counts by API keys, which are stored as keyed hashes, and there is no secret to key them "
                f"with: give secret=, or set {SECRET_VARIABLE}, to the same 16 or more random bytes on every machine"
            )
        return self._random_secret

    def _live_block(self, met: Resolution) -> Resolution:
        """The same, blocked if somebody has blocked the client since the policy was written."""
        who = met.who
        found = self._blocks.find(who, met.now_us)
        if found is None and ALL_API_KEYS in who:
            keys = who[ALL_API_KEYS].split()
            found = next(filter(None, [self._blocks.find({"api_key": key}, met.now_us) for key in keys]), None)
        if found is None:
            return met
        until = None if found.until_us is None else datetime.fromtimestamp(found.until_us / 1_000_000, UTC)
        return met._replace(block=Block(Identity(found.kind, found.value), Validity(until=until), found.reason))

    def _told(self, arrival: Arrival, admission: Admission) -> Admission:
        if self.on_decision is not None:
            try:
                self.on_decision(arrival, admission)
            except Exception:
                logger.exception("on_decision failed; the request goes on")
        return admission


class Gate(_Door):
    """Lets requests in, or not, for code with threads. Adapters make one from their own arguments."""

    _limiter_type = Limiter

    def admit(self, arrival: Arrival) -> Admission:
        """How the request is let in, or its refusal."""
        if not self.is_on:
            return FREE
        rules = self.rules
        route = rules.snapshot.route(arrival.method, arrival.path)
        if route.is_exempt:
            return FREE
        who = rules.identities.read(arrival, route.kinds | self._blocks.kinds if self._blocks else route.kinds)
        if self._functions:
            for kind in who:
                if type(who[kind]) is not str:
                    raise _asynchronous_function(kind, who[kind])
        met = rules.snapshot.resolve(route, who, self._now_us())
        if self._blocks and met.block is None:
            met = self._live_block(met)
        if met.block is not None or not met.keys:
            return self._told(arrival, rules.unasked(met))
        held: Any = None
        if route.leases:
            try:
                held = self._limiter.hold(*met.keys, cost=met.cost)
                decision = held.__enter__()
            except StoreError as error:
                held, decision = None, self._fallbacks[route.on_failure].decide(Check(met.keys, met.cost), error)
        else:
            decision = self._decide(Check(met.keys, met.cost), self._fallbacks[route.on_failure])
        admission = rules.conclude(met, decision)
        if held is not None:
            if admission.allowed:
                admission.held = held
            else:
                held.__exit__(None, None, None)
        if route.shadows and admission.allowed:
            with suppress(StoreError):  # nothing depends on it
                admission.shadows = [Shadow(one, self._answer(Check((one.key,), one.cost))) for one in met.shadows]
        return admission if self.on_decision is None else self._told(arrival, admission)

    def finish(self, admission: Admission, status: int) -> None:
        """The answer is out: leave what was held, settle what was reserved."""
        if admission.held is not None:
            admission.held.__exit__(None, None, None)
        steps = way.settle(admission, status)
        with suppress(StopIteration):
            step = next(steps)
            while True:
                try:
                    answer = self._answer(step)
                except StoreError as error:
                    step = steps.throw(error)
                else:
                    step = steps.send(answer)

    def close(self) -> None:
        """Close the store, and watch the policy no more."""
        if self._watch is not None:
            self._watch.close()
        self._limiter.close()


class AsyncGate(_Door):
    """The same as `Gate`, with methods to await; nothing in it blocks the event loop."""

    _limiter_type = AsyncLimiter

    async def admit(self, arrival: Arrival, rules: Rules | None = None) -> Admission:
        """How the request is let in, or its refusal: by the policy, or by rules that `made` has made of another."""
        if not self.is_on:
            return FREE
        if rules is None:
            rules = self.rules
        route = rules.snapshot.route(arrival.method, arrival.path)
        if route.is_exempt:
            return FREE
        who = rules.identities.read(arrival, route.kinds | self._blocks.kinds if self._blocks else route.kinds)
        if self._functions:
            for kind in who:
                if type(who[kind]) is not str:
                    who[kind] = await rules.identities.awaited(kind, who[kind])
        met = rules.snapshot.resolve(route, who, self._now_us())
        if self._blocks and met.block is None:
            met = self._live_block(met)
        if met.block is not None or not met.keys:
            return self._told(arrival, rules.unasked(met))
        held: Any = None
        if route.leases:
            try:
                held = self._limiter.hold(*met.keys, cost=met.cost)
                decision = await held.__aenter__()
            except StoreError as error:
                held, decision = None, self._fallbacks[route.on_failure].decide(Check(met.keys, met.cost), error)
        else:
            check = _new_check(Check, (met.keys, met.cost, None))
            if self._memory is not None:
                decision = self._memory.decide(check)
            else:
                decision = await self._decide(check, self._fallbacks[route.on_failure])
        admission = rules.conclude(met, decision)
        if held is not None:
            if admission.allowed:
                admission.held = held
            else:
                await held.__aexit__(None, None, None)
        if route.shadows and admission.allowed:
            with suppress(StoreError):  # nothing depends on it
                admission.shadows = [
                    Shadow(one, await self._answer(Check((one.key,), one.cost))) for one in met.shadows
                ]
        return admission if self.on_decision is None else self._told(arrival, admission)

    async def finish(self, admission: Admission, status: int) -> None:
        """The answer is out: leave what was held, settle what was reserved."""
        if admission.held is not None:
            await admission.held.__aexit__(None, None, None)
        steps = way.settle(admission, status)
        with suppress(StopIteration):
            step = next(steps)
            while True:
                try:
                    answer = await self._answer(step)
                except StoreError as error:
                    step = steps.throw(error)
                else:
                    step = steps.send(answer)

    async def close(self) -> None:
        """Close the store, and watch the policy no more."""
        if self._watch is not None:
            self._watch.close()
        await self._limiter.close()


def _counts_api_keys(policy: Policy) -> bool:
    reads = policy.identity.api_key_header is not None or policy.identity.bearer_token
    return reads and any({"api_key", "client"} & {*rule.by} for rule in policy.rules)


def _asynchronous_function(kind: str, value: Any) -> InvalidConfiguration:
    close = getattr(value, "close", None)
    if close is not None:  # so that nobody is warned of what was never awaited
        close()
    return InvalidConfiguration(
        f"the function for {kind!r} is asynchronous, but this app runs with threads: give a plain function"
    )
