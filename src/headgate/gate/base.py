"""GateBase: admission control without waiting, shared by `Gate` and `AsyncGate`."""

from __future__ import annotations

import importlib
import logging
import os
import secrets
import threading
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from difflib import get_close_matches
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, ClassVar, Final, NamedTuple, TypeAlias, Unpack, cast
from uuid import uuid4
from weakref import WeakSet

from headgate._pace import release
from headgate.abuse.actions import ActionDispatcher
from headgate.clock import SystemClock, in_ns
from headgate.engine import SyncEngine
from headgate.errors import InvalidConfiguration, ScriptError, StoreError
from headgate.failure import FailurePolicy
from headgate.gate.abuse_watch import AbuseWatch, observed_request
from headgate.gate.active_policy import ActivePolicy
from headgate.gate.admission import NOT_SERVED, UNLIMITED, Admission, Shadow
from headgate.gate.client_actions import ActionCounts, ClientActions
from headgate.gate.event_stream import EventStream, is_observer, outcome_of
from headgate.gate.identity import IdentityExtractor
from headgate.gate.messages import MessageMeter
from headgate.gate.metering import QuotaDenial, QuotaMetering, void
from headgate.gate.mounts import unreachable_paths
from headgate.gate.options import (
    ENGINE_OPTIONS,
    SECRET_VARIABLE,
    check_options,
    checked_function,
    checked_functions,
    checked_interval,
    checked_path,
)  # fmt: skip
from headgate.gate.regions import GateRegions
from headgate.gate.responses import ResponseBuilder, health_response
from headgate.gate.view_limits import has_view_limits, view_rules
from headgate.keys import is_keyed_hash
from headgate.limiter import Limiter
from headgate.local.restrictions import MAX_DELAY_US
from headgate.overload.load_shedder import LoadShedder
from headgate.overload.steady_clock import steady_now_us
from headgate.policy.api_keys import ApiKeyHasher, IdentityHashes
from headgate.policy.file_watcher import PolicyWatcher
from headgate.policy.model import Block, Identity, Policy, Validity
from headgate.policy.snapshot import STRICTNESS, Snapshot, concurrency_settings
from headgate.stores.operations import Check, Leave, Refund

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
    from os import PathLike

    from headgate.abuse.actions import ClientAction
    from headgate.abuse.challenge import Challenge
    from headgate.clock import Clock
    from headgate.decisions import Decision
    from headgate.errors import Overloaded
    from headgate.events import Event
    from headgate.gate.active_policy import ResolvedRequest
    from headgate.gate.admission import RequestInfo
    from headgate.gate.client_actions import ClientState
    from headgate.gate.event_stream import DecisionHook, Observer
    from headgate.gate.identity import AppIdentities, IdentityFunction
    from headgate.gate.messages import MessageCounts
    from headgate.gate.metering import QuotaCharge, QuotaRequest
    from headgate.gate.mounts import AppRoute
    from headgate.gate.options import GateOptions
    from headgate.gate.responses import HeaderTemplate, Rejection
    from headgate.gate.view_limits import LimitDeclaration
    from headgate.health import Health
    from headgate.keys import Key
    from headgate.local.restrictions import Restriction
    from headgate.local.tier import LocalTier
    from headgate.overload.guard import Guard
    from headgate.overload.load_shedder import OverloadStats, Permit
    from headgate.policy.lists.list_watcher import ListStatus, ListWatcher, NetworkLists
    from headgate.policy.snapshot import Resolution, RoutePlan
    from headgate.stores.memory import MemoryStore

__all__ = ["GateBase", "PendingIdentities", "Steps"]

logger = logging.getLogger("headgate")

BUILT_IN_KINDS: Final = ("ip", "subnet", "api_key", "client", "endpoint")
"""The identities that a gate extracts by itself."""

MAX_LOGGED_WARNINGS: Final = 10

MAX_VIEW_POLICIES: Final = 4096
"""Compiled limits of views that are cached; exceeded only by an app that creates limits for each request."""

INVALID_POLICY: Final = "the newest version of the policy is invalid; the log of this process says why"

Steps: TypeAlias = "Generator[Any, Any, Any]"
"""Yields functions with their arguments, to be called and perhaps awaited; receives the results, or a StoreError."""


@dataclass(slots=True, eq=False, repr=False)
class PendingCheck:
    """A request whose limits are known, and that waits for the decision of the store."""

    request: RequestInfo
    policy: ActivePolicy
    resolution: Resolution
    check: Any
    """None if only shadow limits apply."""
    header_template: HeaderTemplate
    received_us: int
    needs_steps: object
    """True or not empty if more than one operation of the store is needed: see `complete_in_steps`."""
    quotas: tuple[QuotaRequest, ...] = ()
    permit: Permit | None = None
    """The place of this request among those in progress, if the policy limits them."""
    restrictions: Sequence[Restriction] = ()
    """The actions of scenarios that apply to it."""
    challenge: Challenge | None = None
    held_us: int = 0
    """The time for which it is held back before its limits are checked."""


class PendingIdentities(NamedTuple):
    """A request some of whose identities come from asynchronous functions of the app."""

    request: RequestInfo
    policy: ActivePolicy
    route: RoutePlan
    kinds: frozenset[str]
    identities: AppIdentities
    awaitables: AppIdentities

    async def wait(self) -> tuple[RequestInfo, ActivePolicy, RoutePlan, frozenset[str], AppIdentities]:
        """Await the functions; returns the arguments of `GateBase.resolve`."""
        found = await self.policy.identities.wait_for(self.awaitables)
        return self.request, self.policy, self.route, self.kinds, {**self.identities, **found}

    def cancel(self) -> InvalidConfiguration:
        """Close the coroutines; returns the error for a gate that cannot await them."""
        for awaitable in self.awaitables.values():
            if hasattr(awaitable, "close"):  # avoids "coroutine was never awaited"
                awaitable.close()
        return InvalidConfiguration(
            f"identities[{next(iter(self.awaitables))!r}] is asynchronous, but this app runs with threads: "
            "give a plain function"
        )


class GateBase:
    """Admission control without waiting: what precedes and follows the check of a request, and the policy in force."""

    _engine_type: type[Any]
    _limiter_type: type[Any]
    _enter: Any
    """Enters the context manager of a limiter's `hold`: returns its decision, or an awaitable of it."""
    _exit: Any
    _pause: Any
    """Waits for some seconds: returns None, or an awaitable."""
    _most_held: int
    """Requests that are held back at the same time. Each holds a thread, or a connection."""
    _waiter_type: type[Any]
    """Lets a request wait for another thread: with `wait(seconds)`, and `wake()` for the thread."""

    is_closed = False

    instances: ClassVar[WeakSet[Any]] = WeakSet()
    """All gates of this process, for the fixtures of `headgate.testing`."""

    creation_hooks: ClassVar[list[Callable[[Any], None]]] = []
    """Called with each gate when it is created, for the same fixtures."""

    def __init__(
        self,
        policy: Policy | str | PathLike[str] | None = None,
        store: Any = "memory://",
        **options: Unpack[GateOptions],
    ) -> None:
        check_options(type(self).__name__, options)
        control, secret, on_decision = options.get("control"), options.get("secret"), options.get("on_decision")
        if policy is None and control is None:
            raise TypeError("give a policy (a file's path, or a Policy), or control= (the URL of a config store)")
        self._functions = checked_functions(options.get("identities"))
        self._refusal_body = checked_function("refusal_body", options.get("refusal_body"))
        self._events = EventStream()
        self._decision_hooks: tuple[DecisionHook, ...] = ()
        self._is_observed = False
        self._on_decision: DecisionHook | Observer | None = None
        self.on_decision = on_decision if is_observer(on_decision) else checked_function("on_decision", on_decision)
        self._given_secret = secret if secret is not None else os.environ.get(SECRET_VARIABLE) or None
        self._given_budget = options.get("budget")
        reload_every = checked_interval(options.get("reload_every", 1.0))
        self._health_path = checked_path(options.get("health_path"))
        self.is_on = True
        """Set to False to admit every request without counting it."""
        self.serves_requests = True
        """False if requests are served by another process, so that this one cannot limit those in progress."""
        self._store = store
        self._engine_options: dict[str, Any] = {
            name: value for name, value in options.items() if name in ENGINE_OPTIONS
        }
        self.abuse: AbuseWatch | None = None
        """The detector of abuse; None until a policy has scenarios."""
        self._exchange: Any = None
        """Shares the counts of the detector with other nodes; None without a shared store or with a control plane."""
        self._lists: NetworkLists | None = None
        """The reputation lists; None until a policy has some."""
        self._failed_lists: set[str] = set()
        self._unmetered: set[str] = set()
        """Limits on messages that an adapter has not applied, and that were reported."""
        self._message_counts: MessageCounts = {}
        self._random_secret = secrets.token_bytes(32)
        key = self.identity_secret
        self._hash_identity = IdentityHashes(key.encode() if isinstance(key, str) else key)
        """Keyed hashes of clients, as in the decision log and the status of the fleet."""
        self._regions = GateRegions(options, self._hash_identity, has_secret=self._given_secret is not None)
        self.policy_watcher: Any = None
        """Follows the policy file or the config store; None for a fixed policy."""
        self._held_places = threading.BoundedSemaphore(self._most_held)
        self._longest_hold_us = MAX_DELAY_US
        self._action_listeners: tuple[Callable[[ClientAction], Any], ...] = ()
        self._shedders: dict[str, LoadShedder] = {}
        """The limits on requests in progress by their scope."""
        self._guards: tuple[Guard, ...] = ()
        self._view_policies: dict[Any, tuple[ActivePolicy, ActivePolicy]] = {}
        """Compiled limits of views by declaration and view, each with the policy that it was compiled for."""
        self.active_policy: ActivePolicy
        """The policy in force for requests that begin now."""
        plane = None if control is None else _control_plane(control)
        self._metering = QuotaMetering(
            options.get("ledger"),
            default_url=None if plane is None else plane.url,
            clock=options.get("clock"),
            new_waiter=self._waiter_type,
            on_event=lambda kind, text: self._local.event_emitter.emit(kind, text),
            idempotency_key=checked_function("idempotency_key", options.get("idempotency_key")),
        )
        if plane is not None:
            policy = plane.policy_source(policy, secret=self._given_secret)
        if isinstance(policy, Policy):
            self._activate(policy)
        elif (follow := getattr(policy, "follow", None)) is not None:  # a source of policies, as the config store
            self.policy_watcher = follow(self._activate, every=reload_every)
        elif isinstance(policy, str | os.PathLike):
            self.policy_watcher = PolicyWatcher(policy, self._activate, every=reload_every)
        else:
            raise InvalidConfiguration(f"expected a policy file path or a Policy, got {type(policy).__name__}")
        self.control: Any = None
        """The parts of the control plane that are attached to this gate: its decision log and node status."""
        if plane is not None:
            try:
                namespace = options.get("namespace", "headgate")
                self.control = plane.connect(self, store=self._store, namespace=namespace, secret=self._given_secret)
            except BaseException:
                if self.policy_watcher is not None:
                    self.policy_watcher.close()
                raise
        self._share_counts()
        self.instances.add(self)
        for hook in self.creation_hooks:
            hook(self)

    # ------------------------------------------------------------------------------------ the path of a request

    def prepare(
        self, request: RequestInfo, policy: ActivePolicy | None = None
    ) -> Admission | PendingCheck | PendingIdentities:
        """Begin admission: an Admission if no check is needed, else what the gate must wait for."""
        if not self.is_on:
            return UNLIMITED
        if self._health_path is not None and self._health_path in (request.path, request.mounted_path):
            return self._health_page()
        policy = policy or self.active_policy
        route = policy.snapshot.route(request.method, request.path, request.mounted_path)
        if route.is_exempt:
            return UNLIMITED
        kinds, live = route.kinds, self._live
        if live.is_active and not (wanted := live.kinds | policy.snapshot.allowed_kinds) <= kinds:
            kinds = kinds | wanted
        from_app, awaitables = policy.identities.from_app(request, kinds)
        if awaitables:
            return PendingIdentities(request, policy, route, kinds, from_app, awaitables)
        return self.resolve(request, policy, route, kinds, from_app)

    def resolve(
        self,
        request: RequestInfo,
        policy: ActivePolicy,
        route: RoutePlan,
        kinds: frozenset[str],
        from_app: AppIdentities,
    ) -> Admission | PendingCheck:
        """Continue admission once all identities are known."""
        now_us = self._time_ns() // 1000
        resolved = policy.resolve(route, request, kinds, from_app, now_us)
        found: ClientState | None = None
        if self._live.is_active and resolved.resolution.block is None:
            resolved, found = self._apply_live_entries(policy, resolved, now_us)
        resolution, check, header_template, quotas = resolved
        needs_steps = route.leases or route.shadows or quotas
        pending = PendingCheck(request, policy, resolution, check, header_template, now_us, needs_steps, quotas)
        if found is not None and found.restrictions and resolution.block is None:
            if (refused := self._restrict(pending, found)) is not None:
                return refused
            if pending.held_us:
                return pending
        is_limited = route.concurrency is not None and resolution.block is None
        if is_limited and (refused := self._enter_concurrency(pending)) is not None:
            return refused
        if resolution.block is not None or (check is None and not route.shadows and not quotas):
            return self.complete(pending, None)
        if self._memory is not None and not needs_steps:
            return self.complete(pending, self._memory.decide(pending.check))
        return pending

    def complete(
        self,
        pending: PendingCheck,
        decision: Decision | None,
        lease: Any = None,
        shadows: Sequence[Shadow] = (),
        charges: Sequence[QuotaCharge] = (),
    ) -> Admission:
        """End admission with the decision of the store; None if no check was needed."""
        if charges:
            decision = self._metering.join(pending.resolution, decision, charges)
        admission = pending.policy.conclude(pending.resolution, decision, pending.header_template, pending.received_us)
        if lease is not None:
            admission.lease, admission.needs_finish = lease, True
        if shadows:
            admission.shadows = shadows
        if charges:
            admission.quotas = charges
            self._charge(admission)
        if pending.permit is not None:
            self._keep_permit(admission, pending.permit)
        if pending.restrictions:
            admission.restrictions, admission.challenge = pending.restrictions, pending.challenge
        if self._is_observed:
            self._emit(pending.request, admission)
        return admission

    def complete_in_steps(self, pending: PendingCheck) -> Steps:
        """End admission of a request that takes several operations, or whose permit a failure must not keep."""
        charges: Sequence[QuotaCharge] = ()
        try:
            if pending.held_us and (refused := (yield from self._hold_back(pending))) is not None:
                return refused
            if pending.quotas:
                # First, as it is done in memory: the reservation is voided if a limit denies, and no limit is charged
                # if a quota does.
                reserved = yield from self._metering.reserve_in_steps(pending.request, pending.quotas)
                if isinstance(reserved, QuotaDenial):
                    return self._deny_by_quota(pending, reserved)
                charges = reserved
            return (yield from self._check_in_steps(pending, charges))
        except BaseException:  # also a cancelled request, whose steps are closed
            void(charges)
            if pending.permit is not None:
                pending.permit.release("ignored")
            raise

    def _check_in_steps(self, pending: PendingCheck, charges: Sequence[QuotaCharge]) -> Steps:
        lease: Any = None
        decision: Decision | None = None
        resolution, check = pending.resolution, pending.check
        if check is None:
            pass
        elif resolution.route.leases:
            try:
                lease = self._limiter.hold(*check.keys, cost=check.cost)
                decision = yield self._enter, lease
            except StoreError as error:
                lease, decision = self._hold_without_store(pending, error)
            if not decision.allowed and lease is not None:
                yield self._exit, lease
                lease = None
        elif self._memory is not None:
            decision = self._memory.decide(check)
        else:
            decision = yield self._decide, check, self._failure_policy(pending)
        shadows: list[Shadow] = []
        if resolution.route.shadows and (decision is None or decision.allowed):
            try:
                for applied in resolution.shadows:
                    shadow_decision = yield self._answer, Check((applied.key,), applied.cost)
                    shadows.append(Shadow(applied, shadow_decision))
            except StoreError:  # nothing depends on them
                shadows = []
        return self.complete(pending, decision, lease, shadows, charges)

    def _deny_by_quota(self, pending: PendingCheck, denial: QuotaDenial) -> Admission:
        """The refusal of a request by a quota. No limit was checked, so that it is about that quota alone."""
        quota, decision = denial
        resolution = pending.resolution._replace(keys=(quota.key,), rules=(quota.rule,), cost=quota.cost)
        policy, received_us = pending.policy, pending.received_us
        if decision.degraded is not None:
            admission = policy.conclude_without_ledger(resolution, decision, received_us)
        else:
            admission = policy.conclude(resolution, decision, policy.header_template(resolution), received_us)
        if pending.permit is not None:
            pending.permit.release("ignored")
        if self._is_observed:
            self._emit(pending.request, admission)
        return admission

    def _charge(self, admission: Admission) -> None:
        """Charge what is final; reservations that are settled with the response stay, and those of a denial end."""
        if admission.refusal is not None:
            void(admission.quotas)
            return
        for charge in admission.quotas:
            if charge.is_estimate or has_view_limits():  # the limits of a view may refuse the request later
                admission.needs_finish = True
            else:
                charge.settle(charge.amount)

    def admit_without_store(self, request: RequestInfo, error: StoreError) -> Admission:
        """Admit or refuse a request by the failure mode of its route, without waiting: for overload and deadlines.

        The memory store still decides, as it needs no wait. Raises `error` if the failure mode is "raise".
        """
        pending = self.prepare(request)
        if isinstance(pending, PendingIdentities):
            raise pending.cancel()
        if isinstance(pending, Admission):
            return pending
        if pending.held_us and pending.resolution.route.concurrency is not None:  # not held back, as it must not wait
            refused = self._enter_concurrency(pending)
            if refused is not None:
                return refused
        check, charges = pending.check, cast("Any", ())
        decision = None if check is None else self._failure_policy(pending).decide(check, error)
        if pending.quotas and (decision is None or decision.allowed):
            try:
                next(self._metering.reserve_in_steps(pending.request, pending.quotas, 0))
            except StopIteration as end:  # with a budget of 0, it never waits
                charges = end.value
            if isinstance(charges, QuotaDenial):
                return self._deny_by_quota(pending, charges)
        return self.complete(pending, decision, charges=charges)

    @property
    def limits_messages(self) -> bool:
        """True if the policy has limits on messages or bytes."""
        return self.active_policy.snapshot.limits_messages

    def message_meter(self, admission: Admission) -> MessageMeter | None:
        """The limits on the messages of an admitted connection; None if there are none. For adapters that can wait."""
        resolution = admission.resolution
        if resolution is None or not resolution.route.message_rules or not self.is_on:
            return None
        admission.meters_messages = True
        if not (limits := resolution.message_limits):
            return None
        failure_policy = self._failure_policies[resolution.route.on_failure]
        return MessageMeter(limits, self._limiter.engine, failure_policy, self._message_counts)

    def finish_in_steps(self, admission: Admission, status: int) -> Steps:
        """Release the leases of a request, and settle its cost."""
        if admission.observed is not None:
            self.observe_response(admission, status)
        if admission.permit is not None:
            admission.permit.release(_PERMIT_OUTCOMES.get(status, "ok" if 200 <= status < 400 else "ignored"))
        if admission.resolution is not None and admission.resolution.route.message_rules:
            self._warn_of_unmetered(admission.resolution, is_metered=admission.meters_messages)
        if isinstance(admission.lease, _LocalLease):
            admission.lease.release()
        elif admission.lease is not None:
            yield self._exit, admission.lease
        has_costs = admission.quotas or status == NOT_SERVED
        if has_costs or (admission.resolution is not None and admission.resolution.route.settles):
            yield from self.settle_in_steps(admission, status)

    def settle_in_steps(self, admission: Admission, status: int) -> Steps:
        """Refund or charge the difference between the final cost of a request and what it was charged."""
        resolution, decision = admission.resolution, admission.decision
        if admission.quotas and admission.refusal is None and not admission.is_settled:
            for charge in admission.quotas:
                charge.settle(admission.cost_of(charge, status))
        if resolution is None or decision is None or not decision.allowed or decision.degraded is not None:
            return
        for applied in resolution.applied_limits if not admission.is_settled else ():
            key, excess = applied.key, admission.cost_of(applied, status) - applied.cost
            if key.limit.algorithm == "concurrency" or not excess:  # of a lease, the release is all
                continue
            if applied.rule.is_quota:
                continue
            operation = Refund(key, -excess, None, decision.at_us) if excess < 0 else Check((key,), excess)
            try:
                result = yield self._answer, operation
                if excess > 0 and not result.allowed and result.remaining:
                    operation = Check((key,), result.remaining)
                    yield self._answer, operation
            except StoreError as error:
                self._local.defer(operation, error)
                if error.may_have_happened or isinstance(error, ScriptError):  # such an operation is not deferred
                    logger.warning("the cost of a request on limit %r was not settled: %s", applied.rule.name, error)
        admission.is_settled = True

    def _warn_of_unmetered(self, resolution: Resolution, *, is_metered: bool) -> None:
        for rule in resolution.route.message_rules if not is_metered else ():
            if rule.rule.name not in self._unmetered:
                self._unmetered.add(rule.rule.name)
                logger.warning(
                    "limit %r counts %s, which this adapter does not, so that it has no effect: use ASGI or gRPC",
                    rule.rule.name,
                    rule.rule.counts,
                )

    def _enter_concurrency(self, pending: PendingCheck) -> Admission | None:
        """Take a permit for a request; its refusal if it is shed."""
        scope = pending.resolution.route.concurrency
        shedder = None if scope is None else self._shedders.get(scope.name)
        if scope is None or shedder is None or not self.serves_requests:
            return None
        tenant = pending.policy.snapshot.tenant(pending.resolution.who) if scope.settings.fair else None
        pending.permit = shedder.acquire(scope.priority, tenant)
        if pending.permit is not None:
            pending.needs_steps = True
            return None
        retry_us = scope.settings.retry_after // timedelta(microseconds=1)
        admission = pending.policy.shed(pending.resolution, retry_us, pending.received_us)
        if self._is_observed:
            self._emit(pending.request, admission)
        return admission

    @staticmethod
    def _keep_permit(admission: Admission, permit: Permit) -> None:
        """Keep the permit of an admitted request until it is finished; of a refused one, release it."""
        if admission.refusal is None:
            admission.permit, admission.needs_finish = permit, True
        else:
            permit.release("ignored")

    def overloaded(self, error: Overloaded) -> Rejection:
        """The response to a request whose handler has raised `Overloaded`: 503 and Retry-After."""
        return self.active_policy.overloaded(error)

    def add_guard(self, guard: Guard) -> None:
        """Export the metrics of a guard together with those of this gate."""
        self._guards = (*self._guards, guard)

    def overload_stats(self) -> dict[str, OverloadStats]:
        """The limits on requests in progress by scope, "*" for the whole process; and the guards by name."""
        limited = {name: shedder.stats() for name, shedder in self._shedders.items()}
        return limited | {guard.name: guard.stats() for guard in self._guards}

    def _emit(self, request: RequestInfo, admission: Admission) -> None:
        """Run the decision hooks, and put the event of the decision into the stream. For use while `_is_observed`."""
        for hook in self._decision_hooks:
            try:
                hook(request, admission)
            except Exception:
                logger.exception("on_decision failed; the request continues")
        if self._events.observers:
            self._events.emit(request, admission, self._time_ns() // 1000)
        if admission.resolution is not None and admission.resolution.route.scenarios:
            if admission.refusal is None:
                admission.observed, admission.is_only_observed = request, not admission.needs_finish
                admission.needs_finish = True
            elif outcome_of(admission) != "blocked":  # an action shall not prolong itself
                admission.observed = request
                self.observe_response(admission, admission.refusal.status)

    def observe_response(self, admission: Admission, status: int) -> None:
        """Pass a completed request to the detector of abuse; once, if at all. `finish` does this, too."""
        request, admission.observed = admission.observed, None
        if request is not None and admission.resolution is not None and status != NOT_SERVED:
            received_us = admission.received_us
            duration_us = self._time_ns() // 1000 - received_us
            self._events.complete(observed_request(request, admission.resolution, received_us, status, duration_us))

    def _apply_live_entries(
        self, policy: ActivePolicy, resolved: ResolvedRequest, now_us: int
    ) -> tuple[ResolvedRequest, ClientState]:
        """Add the block of a client on the live block list, or tighten its limits; and all restrictions found."""
        resolution = resolved.resolution
        found = self._client_actions.find(resolution.who, policy.snapshot, now_us)
        if (block := found.block) is not None:
            until = None if block.until_us is None else datetime.fromtimestamp(block.until_us / 1_000_000, UTC)
            live = Block(Identity(block.kind, block.value), Validity(until=until), block.reason)
            return resolved._replace(resolution=resolution._replace(block=live)), found
        return policy.tighten(resolved, found.factor) if found.factor > 1 else resolved, found

    def _restrict(self, pending: PendingCheck, found: ClientState) -> Admission | None:
        """Challenge a request, or plan how long it is held back; its refusal if it has to pass the challenge first.

        Not for the limits of a view: the request was challenged and held back when it came to the app.
        """
        pending.restrictions = tuple([each for _, each in found.restrictions])
        policy = pending.policy
        if policy.snapshot.view is not None:
            return None
        if (asked := found.challenge) is not None:
            who, now_us = pending.resolution.who, pending.received_us
            outcome = self._client_actions.challenge(pending.request, who, asked, policy.responses, now_us)
            pending.challenge = outcome.challenge
            if outcome.refusal is not None:
                return self._refuse_by_action(pending, outcome.refusal, asked[1])
        pending.held_us = min(found.delay_us, self._longest_hold_us)
        if pending.held_us:
            pending.needs_steps = True
        return None

    def _hold_back(self, pending: PendingCheck) -> Steps:
        """Hold a request back, and let it enter afterwards; its refusal if too many are held, or it is shed."""
        if not self._held_places.acquire(blocking=False):
            slowest = max(pending.restrictions, key=lambda each: each.delay_us)
            return self._refuse_by_action(pending, pending.policy.responses.slowed_down(pending.held_us), slowest)
        try:
            self._client_actions.held += 1
            yield self._pause, pending.held_us / 1_000_000
        finally:
            self._held_places.release()
        pending.received_us += pending.held_us  # the decision takes no longer than others
        return self._enter_concurrency(pending) if pending.resolution.route.concurrency is not None else None

    def _refuse_by_action(self, pending: PendingCheck, refusal: Rejection, restriction: Restriction) -> Admission:
        admission = Admission(pending.resolution, None, refusal, None, pending.received_us, restrictions=(restriction,))
        if self._is_observed:
            self._emit(pending.request, admission)
        return admission

    def _failure_policy(self, pending: PendingCheck) -> FailurePolicy:
        return self._failure_policies[pending.resolution.route.on_failure]

    def _hold_without_store(self, pending: PendingCheck, error: StoreError) -> tuple[Any, Decision]:
        failure_policy = self._failure_policy(pending)
        check = Check(pending.check.keys, pending.check.cost, uuid4().hex)
        decision = self._local.decide_without_store(check, error, failure_policy)
        return (_LocalLease(failure_policy, check, error) if decision.allowed else None), decision

    def _health_page(self) -> Admission:
        # Public: details of the config store and the policy go to the log and `policy_error` only.
        error = self.policy_error and getattr(self.policy_watcher.error, "discreet", INVALID_POLICY)
        health = {**self.health().as_dict(), "policy_version": self.policy_version, "policy_error": error}
        return Admission(None, None, health_response(health, ready=health["state"] == "ready"), None, 0)

    # ------------------------------------------------------------------------------------ observers

    @property
    def on_decision(self) -> DecisionHook | Observer | None:
        """The app's hook, called inside each request with its decision; or an observer, such as a `DecisionLog`."""
        return self._on_decision

    @on_decision.setter
    def on_decision(self, hook: DecisionHook | Observer | None) -> None:
        previous, self._on_decision = self._on_decision, hook
        if previous is not None:
            self.remove_observer(previous)
        if hook is not None:
            self.add_observer(hook)

    def add_observer(self, observer: DecisionHook | Observer) -> None:
        """Deliver the events of all further decisions to an observer, in batches and outside of the requests.

        A function is called inside each request instead, with the request and its decision: for tracing. An exception
        in either is logged, and affects neither requests nor other observers.
        """
        if is_observer(observer):
            self._events.add(cast("Observer", observer))
        else:
            self._decision_hooks = (*self._decision_hooks, cast("DecisionHook", observer))
        self._is_observed = True

    def remove_observer(self, observer: DecisionHook | Observer) -> None:
        """Deliver no further events to an observer; it has received all those so far."""
        if is_observer(observer):
            self._events.remove(cast("Observer", observer))
        self._decision_hooks = tuple([each for each in self._decision_hooks if each is not observer])
        self._is_observed = bool(self._decision_hooks or self._events.observers or self.abuse)

    @property
    def observers(self) -> tuple[Observer, ...]:
        return self._events.observers

    @property
    def dropped_events(self) -> int:
        """The number of events that no observer has received, because the buffer was full."""
        return self._events.dropped

    def flush_events(self) -> None:
        """Deliver the events of all decisions so far to the observers, before returning."""
        self._events.flush()

    # ------------------------------------------------------------------------------------ the policy in force

    @property
    def policy(self) -> Policy:
        """The policy in force for requests that begin now."""
        return self.active_policy.snapshot.policy

    @property
    def policy_version(self) -> str | None:
        """Hash of the content of the policy file in force; None for a policy that is not a file."""
        return None if self.policy_watcher is None else self.policy_watcher.version

    @property
    def policy_error(self) -> str | None:
        """The reason why the newest content of the policy file is not in force; None if it is."""
        error = None if self.policy_watcher is None else self.policy_watcher.error
        return None if error is None else str(error)

    @property
    def policy_canary(self) -> tuple[str, str, str | None] | None:
        """The part in a canary of the policy: its id, the role "candidate" or "stable", and the reason why the
        candidate cannot be applied; None while no canary is running."""
        return getattr(self.policy_watcher, "canary", None)

    @property
    def policy_age_s(self) -> float | None:
        """Seconds since the policy was last known to be the newest of its config store; None for a policy file."""
        return getattr(self.policy_watcher, "age", None)

    @property
    def identity_secret(self) -> str | bytes:
        """The secret that identities are hashed with; without a given one, random and known to this process only."""
        return self._given_secret or self._random_secret

    @property
    def identity_kinds(self) -> list[str]:
        """The identities that limits can count by."""
        return [*BUILT_IN_KINDS, *self._functions]

    def view_policy(self, declarations: tuple[LimitDeclaration, ...], view: str) -> ActivePolicy:
        """The compiled limits of a view, cached until the policy in force changes."""
        cached = self._view_policies.get((declarations, view))
        if cached is None or cached[0] is not self.active_policy:
            if len(self._view_policies) >= MAX_VIEW_POLICIES:
                self._view_policies.clear()
            cached = self.active_policy, self.compile_view(declarations, view)
            self._view_policies[declarations, view] = cached
        return cached[1]

    def cached_view_policies(self) -> list[ActivePolicy]:
        """The compiled limits of the views that have received requests."""
        return [policy for _, policy in self._view_policies.values()]

    def compile_view(self, declarations: Iterable[LimitDeclaration], view: str) -> ActivePolicy:
        """Compile the limits declared on a view, with the settings of the policy in force."""
        rules, functions = view_rules(declarations, self.identity_kinds)
        active = self.active_policy.snapshot
        names = ("identity", "answers", "on_failure", "regions", "name", "abuse")
        shared: Any = {name: getattr(active.policy, name) for name in names}
        policy = Policy(rules=tuple(rules), **shared)
        self._regions.check(policy, self._limiter.engine)
        api_keys = ApiKeyHasher(self._secret(policy))
        options: Any = {
            "hash_shared": self._regions.shared_hash(policy, self._limiter.engine),
            "trusts_keys": "api_key" in self._functions,
        }
        snapshot = Snapshot(policy, api_keys.fingerprint, **options, view=view)
        snapshot.vouched_keys = active.vouched_keys
        return self._compiled(snapshot, api_keys, {**self._functions, **functions}, active)

    def _compile(self, policy: Policy) -> ActivePolicy:
        counted_by = {kind for rule in policy.rules for kind in rule.by}
        for kind in sorted(counted_by - {*self.identity_kinds}):
            near = get_close_matches(kind, {*self._functions} - counted_by, n=1)
            misspelling = f" (is identities[{near[0]!r}] a misspelling?)" if near else ""
            logger.warning(
                f"The policy has limits by {kind}, but no identities[{kind!r}] function was given{misspelling}; "
                "those limits will count by IP address instead"
            )
        api_keys = ApiKeyHasher(self._secret(policy))
        scenarios = () if policy.abuse is None else policy.abuse.scenarios
        challenges = any(step.action == "challenge" for each in scenarios for step in each.steps)
        if self._given_secret is None and self._memory is None and challenges:
            logger.warning(
                "the policy challenges clients, and their cookies are signed with a key of this process alone, so that "
                "other nodes will challenge them again: give secret=, or set %s",
                SECRET_VARIABLE,
            )
        blocked = [each.identity for each in policy.blocked]
        if self._given_secret is None and any(kind != "api_key" and is_keyed_hash(value) for kind, value in blocked):
            logger.warning(
                "the policy blocks clients by their keyed hash, which this node can't compute: give secret=, or set %s",
                SECRET_VARIABLE,
            )
        options: Any = {
            "hash_shared": self._regions.shared_hash(policy, self._limiter.engine),
            "trusts_keys": "api_key" in self._functions,
        }
        snapshot = Snapshot(policy, api_keys.fingerprint, self._hash_identity, lists=self._lists, **options)
        return self._compiled(snapshot, api_keys, self._functions, snapshot)

    def _compiled(
        self, snapshot: Snapshot, api_keys: ApiKeyHasher, functions: Mapping[str, IdentityFunction], keys: Snapshot
    ) -> ActivePolicy:
        settings = snapshot.policy
        responses = ResponseBuilder(
            settings.answers,
            body=self._refusal_body,
            expected_wait_us=lambda limit, places: self._limiter.engine.hold_times.expected_wait_us(limit, places),
        )
        identities = IdentityExtractor(settings.identity, api_keys, functions, keys.api_keys, keys.vouched_keys)
        return ActivePolicy(snapshot, responses, identities)

    def _open_limiter(self, policy: Policy) -> None:
        """Create the limiter: its regions may come from the first policy."""
        self._store, region_options = self._regions.open(policy, self._store)
        engine = self._engine_type(self._store, **self._engine_options, **region_options)
        self.replace_limiter(self._limiter_type(engine), self._engine_options.get("clock"))

    def _activate(self, policy: Policy) -> None:
        if not hasattr(self, "_limiter"):
            self._open_limiter(policy)
        self._regions.check(policy, self._limiter.engine)
        if policy.lists and self._lists is None:
            self._lists = _network_lists(self._on_list_change)
        if self._lists is not None:
            self._lists.configure(policy.lists)
        active = self._compile(policy)
        if policy.abuse is not None or self.abuse is not None:
            self._watch(policy)
        if any(rule.is_quota for rule in policy.rules):
            self._metering.configure(policy.ledger)
        for warning in policy.warnings[:MAX_LOGGED_WARNINGS]:
            logger.warning("policy %s: %s", policy.name, warning)
        if (more := len(policy.warnings) - MAX_LOGGED_WARNINGS) > 0:
            logger.warning("policy %s: %d more warnings; run headgate check to see them", policy.name, more)
        settings = policy.store
        self._limiter.engine.configure(
            budget=settings.budget.total_seconds() if self._given_budget is None else self._given_budget,
            share=settings.share,
            nodes=settings.nodes,
            remember=settings.remember,
            lease_us=settings.lease // timedelta(microseconds=1),
            announced=active.snapshot.announced_limits(self.now_us()),
            never_leased=active.snapshot.never_leased,
            central_budget=self._regions.central_budget(policy),
        )
        self._configure_concurrency(policy)
        self._regions.warn_of_change(policy, self._limiter.engine)
        if self._limiter.engine.router is not None:
            self._limiter.engine.router.residency = self._regions.residency(policy)
        before = getattr(self, "active_policy", None)
        self.active_policy = active
        if before is not None:
            parts = before.snapshot.parts()
            del before
            release(parts)

    def _watch(self, policy: Policy) -> None:
        """Evaluate the scenarios of a policy."""
        if self.abuse is None:
            key = self.identity_secret
            self.abuse = AbuseWatch(
                blake2b(key.encode() if isinstance(key, str) else key, person=b"headgate abuse").digest(),
                is_trusted_key=lambda api_key: self.active_policy.snapshot.is_trusted_key(api_key),
                handle=lambda finding, scenario: self.actions.apply(finding, scenario),
            )
            self._events.request_observer = self.abuse
            self._is_observed = True
            self._share_counts()
        self.abuse.configure(policy.abuse)

    def _share_counts(self) -> None:
        """Share what this node counts for scenarios with others, if the control plane does not."""
        is_connected = getattr(self, "control", True)  # the gate is being built, and calls this again at its end
        if self.abuse is None or is_connected or self._memory is not None or self._given_secret is None:
            return
        if self._exchange is None:
            self._exchange = _abuse_exchange(self, self._store, self._engine_options.get("namespace", "headgate"))

    def _on_list_change(self, watcher: ListWatcher) -> None:
        """Apply another version of a list, or report that its newest one cannot be used; in a thread of its own."""
        name, error = watcher.source.name, watcher.error
        if (active := getattr(self, "active_policy", None)) is not None:
            active.forget_clients()
        emitter = self._local.event_emitter
        if error is not None:
            self._failed_lists.add(name)
            stays = f"version {watcher.version} stays in force" if watcher.version else "no address is listed in it"
            emitter.emit("list-failed", f"list {name}: {error}; {stays}", list=name, error=error)
        elif name in self._failed_lists:
            self._failed_lists.discard(name)
            text = f"list {name}: version {watcher.version} is in force after failures"
            emitter.emit("list-back", text, list=name, version=watcher.version)

    @property
    def message_counts(self) -> MessageCounts:
        """Messages that had to wait, were dropped, or have closed their connection, by limit and outcome."""
        return {**self._message_counts}

    @property
    def list_status(self) -> list[ListStatus]:
        """The state of each reputation list."""
        return [] if self._lists is None else self._lists.status

    def _configure_concurrency(self, policy: Policy) -> None:
        """Create the limits on requests in progress; those that were there before keep what they have measured."""
        shedders: dict[str, LoadShedder] = {}
        for name, settings in concurrency_settings(policy).items():
            shedder = self._shedders.get(name)
            if shedder is None:
                now_us = steady_now_us if self._clock is None else self._clock.now_us
                shedder = LoadShedder(settings.concurrency, now_us)
            shedder.configure(settings.concurrency)
            shedders[name] = shedder
        self._shedders = shedders

    def _secret(self, policy: Policy) -> bytes:
        """The key of API key hashes: the same on all machines that share a store."""
        given = self._given_secret
        if given is not None:
            return given.encode() if isinstance(given, str) else given
        accepts_keys = policy.identity.api_key_header is not None or policy.identity.bearer_token
        counts_keys = accepts_keys and any({"api_key", "client"} & {*rule.by} for rule in policy.rules)
        if self._memory is None and counts_keys:
            raise InvalidConfiguration(
                "the policy counts by API keys, which are stored as keyed hashes, and there is no secret to key them "
                f"with: give secret=, or set {SECRET_VARIABLE}, to the same 16 or more random bytes on every machine"
            )
        return self._random_secret

    def _stored_value(self, kind: str, value: str) -> str:
        """The value of a block as it is stored: API keys only as hashes."""
        return self.active_policy.identities.fingerprint(value) if kind == "api_key" else value

    def warn_of_mounts(self, routes: Sequence[AppRoute]) -> None:
        """Log the paths of the policy that match no request, because the app is mounted under a prefix."""
        for path, full_path in unreachable_paths(self.active_policy.snapshot.policy, routes):
            logger.warning(
                "the policy path %s never matches: the app is mounted, and its requests have the path %s; use that",
                path,
                full_path,
            )

    # ------------------------------------------------------------------------------------ the limiter

    def replace_limiter(self, limiter: Any, clock: Clock | None) -> tuple[Any, Clock | None]:
        """Use another limiter and clock from now on; returns the previous ones."""
        before = getattr(self, "_limiter", None), getattr(self, "_clock", None)
        self._limiter, self._clock = limiter, clock
        self._decide, self._answer = limiter.engine.decide, limiter.engine.run
        self._time_ns = in_ns(clock)
        self._memory: MemoryStore | None = limiter.engine.memory
        self._local: LocalTier = limiter.engine.local
        self._live = self._local.live_clients
        hashes = dict.fromkeys([self._hash_identity, self._regions.hash_leaving])  # a block may be of another region
        secret = self.identity_secret
        key = secret.encode() if isinstance(secret, str) else secret
        self._client_actions = ClientActions(self._live, tuple(hashes), key)
        self.actions = ActionDispatcher(
            limiter.engine,
            self.now_us,
            is_allowed=lambda kind, value: self.active_policy.snapshot.allows_client(kind, value),
            on_action=self._on_action,
        )
        """Applies the steps of scenarios to clients that were found."""
        fleet = limiter.engine.join_fleet()
        self._failure_policies = {mode: FailurePolicy(mode, clock or SystemClock(), fleet) for mode in STRICTNESS}
        return before

    def isolate(self, clock: Clock, *, is_down: bool) -> tuple[Any, Clock | None]:
        """Use a new memory store from now on, or one that is unavailable; returns the previous limiter and clock."""
        engine = self._engine_type(clock=clock)
        if is_down:
            engine.disconnect_store()
        before = self.replace_limiter(self._limiter_type(engine), clock)
        self._local.fleet.share = self.active_policy.snapshot.policy.store.share
        return before

    def limiter_view(self) -> Limiter:
        """A limiter for threads that shares the memory store and the block list of this gate. Closing it has no effect.

        For the admin service; a gate on Redis needs none.
        """
        if self._memory is None:
            raise InvalidConfiguration("this gate counts in Redis: create a Limiter with the same URL and namespace")
        return Limiter(SyncEngine.over_memory(self._memory, self._clock, self._live))

    @property
    def store_stats(self) -> Any:
        """The statistics of the store and the local tier, as `Limiter.stats`."""
        return self._limiter.stats

    def add_store_listener(self, listener: Callable[[Event], Any]) -> None:
        """Call a function with each event of the store: losses, recoveries, moves to other servers."""
        self._local.event_emitter.add_listener(listener)

    def hot_counters(self) -> list[tuple[Key, int]]:
        """The counters with prepaid tokens, and their requests per second."""
        return [(counter.key, counter.rate) for counter in self._local.prepaid.hot_counters()]

    def preconnect(self) -> None:
        """Open connections before the first request; an AsyncGate needs a running event loop."""
        self._limiter.engine.join_fleet()

    def now_us(self) -> int:
        """Current time by the gate's clock."""
        return self._time_ns() // 1000

    def limit_holding(self, most: int, longest_s: float) -> None:
        """Hold fewer requests back at the same time, and for a shorter time, than by default; before the first one."""
        self._held_places = threading.BoundedSemaphore(max(1, most))
        self._longest_hold_us = min(MAX_DELAY_US, int(longest_s * 1_000_000))

    def add_action_listener(self, listener: Callable[[ClientAction], Any]) -> None:
        """Call a function with each action that this node takes on a client, outside of requests."""
        self._action_listeners = (*self._action_listeners, listener)

    def _on_action(self, action: ClientAction) -> None:
        for listener in self._action_listeners:
            listener(action)

    @property
    def action_counts(self) -> ActionCounts:
        """The actions of this node, and the requests that they have applied to."""
        own, actions = self._client_actions, self.actions
        found = {} if self.abuse is None else self.abuse.found
        return ActionCounts(dict(actions.counts), actions.dropped, dict(own.challenges), own.held, found)

    def _stop(self) -> None:
        """Stop following the policy and deliver the last events, before the control plane and the store are closed."""
        if self.policy_watcher is not None:
            self.policy_watcher.close()
        if self._lists is not None:
            self._lists.close()
        if self._exchange is not None:
            self._exchange.close()
        self.is_closed = True
        self.flush_events()

    @property
    def quota_meter(self) -> Any:
        """The `QuotaMeter` that spends leases of the ledger; None for a policy without quotas."""
        return self._metering.meter

    def health(self) -> Health:
        """The state of the store and of its servers."""
        return self._limiter.health()  # type: ignore[no-any-return]


_PERMIT_OUTCOMES: Final[Mapping[int, Any]] = {503: "dropped", 504: "dropped"}
"""The outcomes of requests by status. Those of other errors are ignored: their latency says nothing about the load."""


class _LocalLease(NamedTuple):
    """Leases that were granted by a failure mode while the store was unavailable."""

    failure_policy: FailurePolicy
    check: Check
    error: StoreError

    def release(self) -> None:
        for key in self.check.keys:
            if key.limit.algorithm == "concurrency":
                self.failure_policy.answer(Leave(key, self.check.id or ""), self.error)


def _control_plane(control: Any) -> Any:
    """The control plane named by the app; imported lazily, as gates work without it."""
    if isinstance(control, str):
        return importlib.import_module("headgate.control.plane").ControlPlane(control)
    if not hasattr(control, "connect"):
        raise InvalidConfiguration(
            f"control {control!r}: give the URL of a config store, like sqlite:///headgate.db, or a ControlPlane"
        )
    return control


def _abuse_exchange(gate: GateBase, store: Any, namespace: str) -> Any:
    """The thread that shares counts of scenarios; imported lazily, as most policies have none."""
    fleet = importlib.import_module("headgate.telemetry.fleet.abuse_exchange")
    status = importlib.import_module("headgate.telemetry.fleet.status_store")
    try:
        return fleet.ExchangeThread(gate, status.open_status_store(store, namespace=namespace))
    except InvalidConfiguration as error:
        logger.warning("scenarios count the requests of each node alone: %s", error)
        return None


def _network_lists(on_change: Callable[[ListWatcher], None]) -> NetworkLists:
    """The reputation lists of a gate; imported lazily, as most policies have none."""
    found: NetworkLists = importlib.import_module("headgate.policy.lists.list_watcher").NetworkLists(on_change)
    return found
