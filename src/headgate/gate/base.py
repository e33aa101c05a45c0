"""GateBase: admission control without waiting, shared by `Gate` and `AsyncGate`."""

from __future__ import annotations

import importlib
import logging
import os
import secrets
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any, ClassVar, Final, NamedTuple, Never, TypedDict, cast
from uuid import uuid4
from weakref import WeakSet

from headgate._pace import release
from headgate.clock import SystemClock, in_ns
from headgate.engine import SyncEngine
from headgate.errors import InvalidConfiguration, StoreError
from headgate.failure import FailurePolicy
from headgate.gate.active_policy import ActivePolicy
from headgate.gate.admission import UNLIMITED, Admission, Shadow
from headgate.gate.event_stream import EventStream, is_observer
from headgate.gate.identity import IdentityExtractor
from headgate.gate.mounts import unreachable_paths
from headgate.gate.responses import ResponseBuilder, health_response
from headgate.gate.settlement import EnterLease, ExitLease
from headgate.gate.view_limits import view_rules
from headgate.keyed_hashes import is_keyed_hash
from headgate.limiter import Limiter
from headgate.policy.api_keys import ApiKeyHasher, IdentityHashes
from headgate.policy.file_watcher import PolicyWatcher
from headgate.policy.model import Block, Identity, Policy, Validity
from headgate.policy.snapshot import OTHER_API_KEYS, STRICTNESS, Snapshot
from headgate.stores.operations import Check, Leave

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from os import PathLike

    from headgate.clock import Clock
    from headgate.decisions import Decision
    from headgate.events import Event
    from headgate.gate.event_stream import DecisionHook, Observer
    from headgate.gate.identity import AppIdentities, IdentityFunction
    from headgate.gate.mounts import AppRoute
    from headgate.gate.request import RequestInfo
    from headgate.gate.responses import HeaderTemplate, RejectionBody
    from headgate.gate.settlement import Steps
    from headgate.gate.view_limits import LimitDeclaration
    from headgate.health import Health
    from headgate.keys import Key
    from headgate.limits import Limit
    from headgate.local.tier import LocalTier
    from headgate.policy.snapshot import Resolution, RoutePlan
    from headgate.stores.memory import MemoryStore

__all__ = [
    "OPTIONS",
    "SECRET_VARIABLE",
    "GateBase",
    "GateOptions",
    "PendingCheck",
    "PendingIdentities",
    "check_options",
]

logger = logging.getLogger("headgate")

BUILT_IN_KINDS: Final = ("ip", "subnet", "api_key", "client", "endpoint")
"""The identities that a gate extracts by itself."""

SECRET_VARIABLE: Final = "HEADGATE_SECRET"

MAX_LOGGED_WARNINGS: Final = 10

MAX_VIEW_POLICIES: Final = 4096
"""Compiled limits of views that are cached; exceeded only by an app that creates limits for each request."""

INVALID_POLICY: Final = "the newest version of the policy is invalid; the log of this process says why"


class GateOptions(TypedDict, total=False):
    """The options of a gate besides its policy and store; every adapter accepts them."""

    control: Any
    """The control plane: the config store's URL, or a `ControlPlane`. It supplies the policy and connects the decision
    log, node status and metrics."""
    identities: Mapping[str, IdentityFunction] | None
    """Functions that return the identity of a request, by kind: {"user": ..., "tenant": ...}."""
    secret: str | bytes | None
    """Key of the API key hashes: 16 bytes or more, the same on all machines. Defaults to HEADGATE_SECRET."""
    refusal_body: RejectionBody | None
    """Builds the bodies of refusals."""
    on_decision: DecisionHook | Observer | None
    """Called inside each request with its decision; or an observer, such as a `DecisionLog`."""
    reload_every: float | None
    """Seconds between checks of the policy file for changes; None disables reloading."""
    clock: Clock | None
    namespace: str
    budget: float | None
    """Seconds that the store may take before a route's failure mode applies; None for the policy's setting."""
    max_keys: int
    on_event: Callable[[Event], Any] | None
    """Called when the store is lost or recovered."""
    health_path: str | None
    """Path of a health endpoint served by the gate: 200 while the store decides, else 503."""


OPTIONS: Final = ("policy", "store", *GateOptions.__annotations__)
"""The names of all options of a gate, and of every adapter."""


def check_options(owner: str, options: Iterable[str], known: Sequence[str] = (*OPTIONS, "gate")) -> None:
    """Raise InvalidConfiguration for unknown options; `owner` is the class or function that was called.

    >>> check_options("HeadgateMiddleware", ["storage"])
    Traceback (most recent call last):
        ...
    headgate.errors.InvalidConfiguration: HeadgateMiddleware has no option 'storage'; did you mean 'store'?
    """
    for name in options:
        if name not in known:
            near = get_close_matches(name, known, 1)
            remedy = f"did you mean {near[0]!r}?" if near else f"it has {', '.join(sorted(known))}"
            raise InvalidConfiguration(f"{owner} has no option {name!r}; {remedy}")


class PendingCheck:
    """A request whose limits are known, and that waits for the decision of the store."""

    __slots__ = ("check", "header_template", "needs_steps", "policy", "received_us", "request", "resolution")

    def __init__(
        self,
        request: RequestInfo,
        policy: ActivePolicy,
        resolution: Resolution,
        check: Check | None,
        header_template: HeaderTemplate,
        received_us: int,
    ) -> None:
        route = resolution.route
        self.request = request
        self.policy = policy
        self.resolution = resolution
        self.check: Any = check
        """None if only shadow limits apply."""
        self.header_template = header_template
        self.received_us = received_us
        self.needs_steps = route.leases or route.shadows
        """True if more than one operation of the store is needed: see `complete_in_steps`."""


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

    is_closed = False

    instances: ClassVar[WeakSet[Any]] = WeakSet()
    """All gates of this process, for the fixtures of `headgate.testing`."""

    creation_hooks: ClassVar[list[Callable[[Any], None]]] = []
    """Called with each gate when it is created, for the same fixtures."""

    def __init__(
        self,
        policy: Policy | str | PathLike[str] | None = None,
        store: Any = "memory://",
        *,
        control: Any = None,
        identities: Mapping[str, IdentityFunction] | None = None,
        secret: str | bytes | None = None,
        refusal_body: RejectionBody | None = None,
        on_decision: DecisionHook | Observer | None = None,
        reload_every: float | None = 1.0,
        clock: Clock | None = None,
        namespace: str = "headgate",
        budget: float | None = None,
        max_keys: int = 1_000_000,
        on_event: Callable[[Event], Any] | None = None,
        health_path: str | None = None,
        **unknown: Never,
    ) -> None:
        check_options(type(self).__name__, unknown)
        if policy is None and control is None:
            raise TypeError("give a policy (a file's path, or a Policy), or control= (the URL of a config store)")
        self._functions = _checked_functions(identities)
        self._refusal_body = _checked_function("refusal_body", refusal_body)
        self._events = EventStream()
        self._decision_hooks: tuple[DecisionHook, ...] = ()
        self._is_observed = False
        self._on_decision: DecisionHook | Observer | None = None
        self.on_decision = on_decision if is_observer(on_decision) else _checked_function("on_decision", on_decision)
        self._given_secret = secret if secret is not None else os.environ.get(SECRET_VARIABLE) or None
        self._given_budget = budget
        reload_every = _checked_interval(reload_every)
        self._health_path = _checked_path(health_path)
        self.is_on = True
        """Set to False to admit every request without counting it."""
        options = {"namespace": namespace, "budget": budget, "max_keys": max_keys, "on_event": on_event}
        self.replace_limiter(self._limiter_type(self._engine_type(store, clock=clock, **options)), clock)
        self._random_secret = secrets.token_bytes(32)
        key = self.identity_secret
        self._hash_identity = IdentityHashes(key.encode() if isinstance(key, str) else key)
        """Keyed hashes of clients, as in the decision log and the status of the fleet."""
        self.policy_watcher: Any = None
        """Follows the policy file or the config store; None for a fixed policy."""
        self._view_policies: dict[Any, tuple[ActivePolicy, ActivePolicy]] = {}
        """Compiled limits of views by declaration and view, each with the policy that it was compiled for."""
        self.active_policy: ActivePolicy
        """The policy in force for requests that begin now."""
        plane = None if control is None else _control_plane(control)
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
                self.control = plane.connect(self, store=store, namespace=namespace, secret=self._given_secret)
            except BaseException:
                if self.policy_watcher is not None:
                    self.policy_watcher.close()
                raise
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
        kinds, blocks = route.kinds, self._blocks
        if blocks.has_blocks and not blocks.kinds <= kinds:
            kinds = kinds | blocks.kinds
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
        resolution, check, header_template = policy.resolve(route, request, kinds, from_app, now_us)
        if self._blocks.has_blocks and resolution.block is None:
            resolution = self._apply_live_block(resolution, now_us)
        pending = PendingCheck(request, policy, resolution, check, header_template, now_us)
        if resolution.block is not None or (check is None and not route.shadows):
            return self.complete(pending, None)
        if self._memory is not None and not pending.needs_steps:
            return self.complete(pending, self._memory.decide(pending.check))
        return pending

    def complete(
        self, pending: PendingCheck, decision: Decision | None, lease: Any = None, shadows: Sequence[Shadow] = ()
    ) -> Admission:
        """End admission with the decision of the store; None if no check was needed."""
        admission = pending.policy.conclude(pending.resolution, decision, pending.header_template, pending.received_us)
        if lease is not None:
            admission.hold(lease)
        if shadows:
            admission.shadows = shadows
        if self._is_observed:
            self._emit(pending.request, admission)
        return admission

    def complete_in_steps(self, pending: PendingCheck) -> Steps:
        """End admission of a request with concurrency limits or shadow limits, which takes several operations."""
        lease: Any = None
        decision: Decision | None = None
        resolution = pending.resolution
        if resolution.route.leases:
            try:
                lease = self._limiter.hold(*resolution.keys, cost=resolution.cost)
                decision = yield EnterLease(lease)
            except StoreError as error:
                lease, decision = self._hold_without_store(resolution, error)
            if not decision.allowed and lease is not None:
                yield ExitLease(lease)
                lease = None
        elif self._memory is not None and pending.check is not None:
            decision = self._memory.decide(pending.check)
        elif pending.check is not None:
            decision = yield pending
        shadows: list[Shadow] = []
        if resolution.route.shadows and (decision is None or decision.allowed):
            try:
                for applied in resolution.shadows:
                    shadow_decision = yield Check((applied.key,), applied.cost)
                    shadows.append(Shadow(applied, shadow_decision))
            except StoreError:  # nothing depends on them
                shadows = []
        return self.complete(pending, decision, lease, shadows)

    def _emit(self, request: RequestInfo, admission: Admission) -> None:
        """Run the decision hooks, and put the event of the decision into the stream. For use while `_is_observed`."""
        for hook in self._decision_hooks:
            try:
                hook(request, admission)
            except Exception:
                logger.exception("on_decision failed; the request continues")
        if self._events.observers:
            self._events.emit(request, admission, self._time_ns() // 1000)

    def _apply_live_block(self, resolution: Resolution, now_us: int) -> Resolution:
        """Add the block of a client that was blocked on the live block list."""
        who = resolution.who
        found = self._blocks.find(who, now_us, self._hash_identity)
        if found is None and OTHER_API_KEYS in who:
            keys = who[OTHER_API_KEYS].split()
            found = next(filter(None, [self._blocks.find({"api_key": key}, now_us) for key in keys]), None)
        if found is None:
            return resolution
        until = None if found.until_us is None else datetime.fromtimestamp(found.until_us / 1_000_000, UTC)
        return resolution._replace(block=Block(Identity(found.kind, found.value), Validity(until=until), found.reason))

    def _failure_policy(self, pending: PendingCheck) -> FailurePolicy:
        return self._failure_policies[pending.resolution.route.on_failure]

    def _hold_without_store(self, resolution: Resolution, error: StoreError) -> tuple[Any, Decision]:
        """The lease and the decision by the failure mode of the route."""
        failure_policy = self._failure_policies[resolution.route.on_failure]
        check = Check(resolution.keys, resolution.cost, uuid4().hex)
        decision = self._local.decide_without_store(check, error, failure_policy)
        return (_LocalLease(failure_policy, check, error) if decision.allowed else None), decision

    def _defer(self, operation: Any, error: StoreError) -> None:
        """Save an operation of a settlement that failed until the store is back."""
        self._local.defer(operation, error)

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
        for each, is_new in ((previous, False), (hook, True)):
            if is_observer(each):
                (self.add_observer if is_new else self.remove_observer)(cast("Observer", each))
            elif each is not None:
                (self.add_decision_hook if is_new else self.remove_decision_hook)(cast("DecisionHook", each))

    def add_observer(self, observer: Observer) -> None:
        """Deliver the events of all further decisions to an observer, in batches and outside of the requests.

        An exception in `observer.observe(events)` is logged, and affects neither requests nor other observers.
        """
        self._events.add(observer)
        self._is_observed = True

    def remove_observer(self, observer: Observer) -> None:
        """Deliver no further events to an observer; it has received all those so far."""
        self._events.remove(observer)
        self._is_observed = bool(self._decision_hooks or self._events.observers)

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

    def add_decision_hook(self, hook: DecisionHook) -> None:
        """Call a function inside each request, with the request and its decision: for tracing. Others observe."""
        self._decision_hooks = (*self._decision_hooks, hook)
        self._is_observed = True

    def remove_decision_hook(self, hook: DecisionHook) -> None:
        self._decision_hooks = tuple([each for each in self._decision_hooks if each is not hook])
        self._is_observed = bool(self._decision_hooks or self._events.observers)

    # ------------------------------------------------------------------------------------ the policy in force

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
        policy = Policy(
            rules=tuple(rules),
            identity=active.policy.identity,
            answers=active.policy.answers,
            on_failure=active.policy.on_failure,
            name=active.policy.name,
        )
        api_keys = ApiKeyHasher(self._secret(policy))
        snapshot = Snapshot(policy, api_keys.fingerprint, trusts_keys="api_key" in self._functions, view=view)
        snapshot.vouched_keys = active.vouched_keys
        return self._compiled(snapshot, api_keys, {**self._functions, **functions}, active)

    def _compile(self, policy: Policy) -> ActivePolicy:
        counted_by = {kind for rule in policy.rules for kind in rule.by}
        for kind in sorted(counted_by - {*self.identity_kinds}):
            near = get_close_matches(kind, {*self._functions} - counted_by, n=1)
            logger.warning(
                "The policy has limits by %s, but no identities[%r] function was given%s; "
                "those limits will count by IP address instead",
                kind,
                kind,
                f" (is identities[{near[0]!r}] a misspelling?)" if near else "",
            )
        api_keys = ApiKeyHasher(self._secret(policy))
        if self._given_secret is None and any(_is_hashed(each) for each in policy.blocked):
            logger.warning(
                "the policy blocks clients by their keyed hash, which this node can't compute: give secret=, or set %s",
                SECRET_VARIABLE,
            )
        snapshot = Snapshot(policy, api_keys.fingerprint, self._hash_identity, trusts_keys="api_key" in self._functions)
        return self._compiled(snapshot, api_keys, self._functions, snapshot)

    def _compiled(
        self, snapshot: Snapshot, api_keys: ApiKeyHasher, functions: Mapping[str, IdentityFunction], keys: Snapshot
    ) -> ActivePolicy:
        settings = snapshot.policy
        return ActivePolicy(
            snapshot,
            ResponseBuilder(settings.answers, body=self._refusal_body, expected_wait_us=self._expected_wait_us),
            IdentityExtractor(settings.identity, api_keys, functions, keys.api_keys, keys.vouched_keys),
        )

    def _expected_wait_us(self, limit: Limit, places: int) -> int:
        return self._limiter.engine.hold_times.expected_wait_us(limit, places)  # type: ignore[no-any-return]

    def _activate(self, policy: Policy) -> None:
        active = self._compile(policy)
        _log_warnings(policy)
        settings = policy.store
        self._limiter.engine.configure(
            budget=settings.budget.total_seconds() if self._given_budget is None else self._given_budget,
            share=settings.share,
            nodes=settings.nodes,
            remember=settings.remember,
            lease_us=settings.lease // timedelta(microseconds=1),
            announced=active.snapshot.announced_limits(self.now_us()),
            never_leased=active.snapshot.never_leased,
        )
        before = getattr(self, "active_policy", None)
        self.active_policy = active
        if before is not None:
            parts = before.snapshot.parts()
            del before
            release(parts)

    def _secret(self, policy: Policy) -> bytes:
        """The key of API key hashes: the same on all machines that share a store."""
        given = self._given_secret
        if given is not None:
            return given.encode() if isinstance(given, str) else given
        if self._memory is None and _counts_api_keys(policy):
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
        self._decide: Callable[..., Any] = limiter.engine.decide
        self._answer: Callable[..., Any] = limiter.engine.run
        self._time_ns = in_ns(clock)
        self._memory: MemoryStore | None = limiter.engine.memory
        self._local: LocalTier = limiter.engine.local
        self._blocks = self._local.block_list
        fleet = limiter.engine.join_fleet()
        self._failure_policies = {mode: FailurePolicy(mode, clock or SystemClock(), fleet) for mode in STRICTNESS}
        return before

    def use_memory_store(self, clock: Clock) -> tuple[Any, Clock | None]:
        """Use a new memory store from now on; returns the previous limiter and clock."""
        return self.replace_limiter(self._limiter_type(self._engine_type(clock=clock)), clock)

    def use_unavailable_store(self, clock: Clock) -> tuple[Any, Clock | None]:
        """Apply the failure modes of the policy from now on; returns the previous limiter and clock."""
        engine = self._engine_type(clock=clock)
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
        return Limiter(SyncEngine.over_memory(self._memory, self._clock, self._blocks))

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

    def _stop(self) -> None:
        """Stop following the policy and deliver the last events, before the control plane and the store are closed."""
        if self.policy_watcher is not None:
            self.policy_watcher.close()
        self.is_closed = True
        self.flush_events()

    def health(self) -> Health:
        """The state of the store and of its servers."""
        health: Health = self._limiter.health()
        return health


class _LocalLease:
    """Context manager of leases that were granted by a failure mode while the store was unavailable."""

    def __init__(self, failure_policy: FailurePolicy, check: Check, error: StoreError) -> None:
        self._failure_policy = failure_policy
        self._check = check
        self._error = error

    def __exit__(self, *_: object) -> None:
        for key in self._check.keys:
            if key.limit.algorithm == "concurrency":
                self._failure_policy.answer(Leave(key, self._check.id or ""), self._error)

    async def __aexit__(self, *_: object) -> None:
        self.__exit__()


def _control_plane(control: Any) -> Any:
    """The control plane named by the app; imported lazily, as gates work without it."""
    if isinstance(control, str):
        return importlib.import_module("headgate.control.plane").ControlPlane(control)
    if not hasattr(control, "connect"):
        raise InvalidConfiguration(
            f"control {control!r}: give the URL of a config store, like sqlite:///headgate.db, or a ControlPlane"
        )
    return control


def _checked_functions(identities: Mapping[str, IdentityFunction] | None) -> dict[str, IdentityFunction]:
    if not isinstance(identities or {}, Mapping):
        raise InvalidConfiguration(f"identities {identities!r}: give functions by kind, like {{'user': function}}")
    return {kind: _checked_function(f"identities[{kind!r}]", function) for kind, function in (identities or {}).items()}


def _checked_function(name: str, function: Any) -> Any:
    if function is not None and not callable(function):
        raise InvalidConfiguration(f"{name} {function!r} cannot be called: give a function")
    return function


def _checked_interval(seconds: float | None) -> float | None:
    if seconds is not None and (isinstance(seconds, bool) or not isinstance(seconds, int | float) or not seconds > 0):
        raise InvalidConfiguration(f"reload_every {seconds!r}: give seconds above 0, or None to disable reloading")
    return seconds


def _checked_path(path: str | None) -> str | None:
    if path is not None and (not isinstance(path, str) or not path.startswith("/")):
        raise InvalidConfiguration(f"health_path {path!r}: give a path with a leading slash, like '/headgate/health'")
    return path


def _log_warnings(policy: Policy) -> None:
    for warning in policy.warnings[:MAX_LOGGED_WARNINGS]:
        logger.warning("policy %s: %s", policy.name, warning)
    if (more := len(policy.warnings) - MAX_LOGGED_WARNINGS) > 0:
        logger.warning("policy %s: %d more warnings; run headgate check to see them", policy.name, more)


def _is_hashed(block: Block) -> bool:
    return block.identity.kind != "api_key" and is_keyed_hash(block.identity.value)


def _counts_api_keys(policy: Policy) -> bool:
    accepts_keys = policy.identity.api_key_header is not None or policy.identity.bearer_token
    return accepts_keys and any({"api_key", "client"} & {*rule.by} for rule in policy.rules)
