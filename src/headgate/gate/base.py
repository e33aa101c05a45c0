"""What both gates are made of: the policy in force, the store, and what they say of themselves."""

from __future__ import annotations

import importlib
import logging
import os
import secrets
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any, ClassVar, Final, Never, TypedDict, cast
from uuid import uuid4
from weakref import WeakSet

from headgate._pace import release
from headgate.clock import SystemClock, in_ns
from headgate.errors import InvalidConfiguration
from headgate.failure import FailurePolicy
from headgate.gate.admission import ActivePolicy, Admission
from headgate.gate.event_stream import EventStream, is_observer
from headgate.gate.identity import IdentityExtractor
from headgate.gate.mounts import unreachable_paths
from headgate.gate.responses import ResponseBuilder, health_response
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
    from headgate.errors import StoreError
    from headgate.events import Event
    from headgate.gate.admission import RequestInfo
    from headgate.gate.event_stream import DecisionHook, Observer
    from headgate.gate.identity import AppIdentities, IdentityFunction
    from headgate.gate.mounts import AppRoute
    from headgate.gate.responses import HeaderTemplate, RejectionBody
    from headgate.health import Health
    from headgate.keys import Key
    from headgate.limits import Limit
    from headgate.local.tier import LocalTier
    from headgate.policy.model import Rule
    from headgate.policy.snapshot import Resolution, RoutePlan
    from headgate.stores.memory import MemoryStore

__all__ = ["OPTIONS", "SECRET_VARIABLE", "GateBase", "GateOptions", "check_options"]

logger = logging.getLogger("headgate")

BUILT_IN: Final = ("ip", "subnet", "api_key", "client", "endpoint")
"""The identities that a gate finds out by itself."""

SECRET_VARIABLE: Final = "HEADGATE_SECRET"

MAX_LOGGED_WARNINGS: Final = 10

INVALID_POLICY: Final = "the newest version of the policy is invalid; the log of this process says why"


class GateOptions(TypedDict, total=False):
    """The options of a gate beside its policy and its store; every adapter takes these."""

    control: Any
    """The control plane: the config store's URL, or a `ControlPlane`. It supplies the policy and connects the decision
    log, node status and metrics."""
    identities: Mapping[str, IdentityFunction] | None
    """Functions that say who sends a request, by kind of identity: {"user": ..., "tenant": ...}."""
    secret: str | bytes | None
    """What API keys are hashed with: 16 bytes or more, the same on all machines. HEADGATE_SECRET, if not given."""
    refusal_body: RejectionBody | None
    """Makes the bodies of refusals."""
    on_decision: DecisionHook | Observer | None
    """Called inside each request with its decision; or an observer, such as a `DecisionLog`."""
    reload_every: float | None
    """Seconds between looks at the policy file; None never to look again."""
    clock: Clock | None
    namespace: str
    budget: float | None
    """Seconds that the store may take before a route's failure mode answers; None for what the policy says."""
    max_keys: int
    on_event: Callable[[Event], Any] | None
    """Told when the store is lost, and back, and what became of it."""
    health_path: str | None
    """A path at which the gate itself says how it is: 200 while requests are decided by the store, 503 while not."""


OPTIONS: Final = ("policy", "store", *GateOptions.__annotations__)
"""The names of all options of a gate, and of every adapter."""


def check_options(owner: str, options: Iterable[str], known: Sequence[str] = (*OPTIONS, "gate")) -> None:
    """Raise InvalidConfiguration for options that no gate has; `owner` is the class or function that was called.

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


class GateBase:
    """What both gates are made of."""

    _limiter_type: type[Any]

    is_closed = False

    doors: ClassVar[WeakSet[Any]] = WeakSet()
    """All gates of this process, for tests that take hold of them."""

    newcomers: ClassVar[list[Callable[[Any], None]]] = []
    """Told of each gate as it is made, for the same tests."""

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
        self.use(self._limiter_type._for_gate(store, clock=clock, **options), clock)  # noqa: SLF001
        self._random_secret = secrets.token_bytes(32)
        given = self._given_secret or self._random_secret
        self._hash_identity = IdentityHashes(given.encode() if isinstance(given, str) else given)
        """Keyed hashes of clients, as the decision log and the status of the fleet have them."""
        self._watch: Any = None
        self.view_rules: dict[Any, tuple[ActivePolicy, ActivePolicy]] = {}
        """Rules of limits that are declared on views, by declaration, each with the policy's rules it was made for."""
        self.rules: ActivePolicy
        """What holds for requests that begin now."""
        plane = None if control is None else _control_plane(control)
        if plane is not None:
            policy = plane.policy_source(policy, secret=self._given_secret)
        if isinstance(policy, Policy):
            self._swap(policy)
        else:
            follow = getattr(policy, "follow", None)  # a source of policies of its own, as the config store has one
            if follow is not None:
                self._watch = follow(self._swap, every=reload_every)
            elif not isinstance(policy, str | os.PathLike):
                raise InvalidConfiguration(
                    f"{type(policy).__name__} is no policy: give a file's path, or what headgate.policy.read makes"
                )
            else:
                self._watch = PolicyWatcher(policy, self._swap, every=reload_every)
        self.control: Any = None
        """The parts of the control plane that are attached to this gate: its decision log and node status."""
        if plane is not None:
            try:
                self.control = plane.connect(self, store=store, namespace=namespace, secret=self._given_secret)
            except BaseException:
                if self._watch is not None:
                    self._watch.close()
                raise
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

    @property
    def policy_age_s(self) -> float | None:
        """Seconds since the policy was last known to be the newest of its config store; None for a policy file."""
        return getattr(self._watch, "age", None)

    @property
    def identity_secret(self) -> str | bytes:
        """The secret that identities are hashed with; without a given one, random and known to this process only."""
        return self._given_secret or self._random_secret

    @property
    def store_stats(self) -> Any:
        """The statistics of the store and the local tier, as `Limiter.stats`."""
        return self._limiter.stats

    def add_store_listener(self, listener: Callable[[Event], Any]) -> None:
        """Call a function with each event of the store: losses, recoveries, moves to other servers."""
        self._front.outage._herald.add_listener(listener)  # noqa: SLF001

    def hot_counters(self) -> list[tuple[Key, int]]:
        """The counters with prepaid tokens, and their requests per second."""
        return [(each.key, each.per_second) for each in list(self._front.purses._purses.values())]  # noqa: SLF001

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

    def now_us(self) -> int:
        """The instant, by the clock that requests are resolved by."""
        return self._time_ns() // 1000

    def use(self, limiter: Any, clock: Clock | None) -> tuple[Any, Clock | None]:
        """Count with another limiter from now on, by that clock; the ones before."""
        before = getattr(self, "_limiter", None), getattr(self, "_clock", None)
        self._limiter, self._clock = limiter, clock
        self._decide: Callable[..., Any] = limiter._decide  # noqa: SLF001 - as close to the store as the limiters' own way
        self._answer: Callable[..., Any] = limiter._answer  # noqa: SLF001
        self._time_ns = in_ns(clock)
        self._memory: MemoryStore | None = limiter._memory  # noqa: SLF001
        self._front: LocalTier = limiter._front  # noqa: SLF001
        self._blocks = self._front.blocks
        fleet = limiter._guard_routes()  # noqa: SLF001
        self._fallbacks = {mode: FailurePolicy(mode, clock or SystemClock(), fleet) for mode in STRICTNESS}
        return before

    def use_memory(self, clock: Clock) -> tuple[Any, Clock | None]:
        """Count afresh from now on, in memory and by that clock; what counted before, as `use` takes it."""
        return self.use(self._limiter_type._for_gate(clock=clock), clock)  # noqa: SLF001

    def use_no_store(self, clock: Clock) -> tuple[Any, Clock | None]:
        """Answer by the failure modes of the policy from now on, as if the store were unavailable: for tests."""
        limiter = self._limiter_type._for_gate(clock=clock)  # noqa: SLF001
        limiter._lose_store()  # noqa: SLF001
        before = self.use(limiter, clock)
        self._front.fleet.share = self.rules.snapshot.policy.store.share
        return before

    def beside(self) -> Limiter:
        """A limiter for threads on the counts and the live blocks of this gate: for who looks after it.

        Counts in memory are reached in no other way. To close it leaves the gate's counts alone.
        """
        if self._memory is None:
            raise InvalidConfiguration("this gate counts in Redis: make a Limiter on the same URL and namespace")
        limiter = Limiter._for_gate(clock=self._clock)  # noqa: SLF001
        limiter._store, limiter._memory = _BorrowedStore(self._memory), self._memory  # noqa: SLF001 - as `use` does
        limiter._front.blocks = self._blocks  # noqa: SLF001
        limiter._make_ready()  # noqa: SLF001
        return limiter

    def warm(self) -> None:
        """Begin to connect, so that the first request need not wait for it; asynchronous gates want a running loop."""
        self._limiter._guard_routes()  # noqa: SLF001

    def made(self, policy: Policy) -> ActivePolicy:
        """The policy, ready for requests."""
        wanted = {kind for rule in policy.rules for kind in rule.by}
        for kind in sorted(wanted - {*self.identity_kinds}):
            near = get_close_matches(kind, {*self._functions} - wanted, n=1)
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
        return ActivePolicy(
            snapshot,
            ResponseBuilder(policy.answers, body=self._refusal_body, expected_wait_us=self._expected_wait_us),
            IdentityExtractor(policy.identity, api_keys, self._functions, snapshot.api_keys, snapshot.vouched_keys),
        )

    @property
    def identity_kinds(self) -> list[str]:
        """The identities that limits can count by here."""
        return [*BUILT_IN, *self._functions]

    def all_view_rules(self) -> list[ActivePolicy]:
        """The rules of all views that requests have reached so far."""
        return [rules for _, rules in self.view_rules.values()]

    def rules_for(self, rules: Sequence[Rule], functions: Mapping[str, IdentityFunction], view: str) -> ActivePolicy:
        """Rules of limits that the app declares on a view, under the settings of the policy in force.

        `functions` supply identities that only these rules count by.
        """
        policy, known = self.rules.snapshot.policy, self.rules.snapshot
        own = Policy(
            rules=tuple(rules),
            identity=policy.identity,
            answers=policy.answers,
            on_failure=policy.on_failure,
            name=policy.name,
        )
        api_keys = ApiKeyHasher(self._secret(own))
        snapshot = Snapshot(own, api_keys.fingerprint, trusts_keys="api_key" in self._functions, view=view)
        snapshot.vouched_keys = known.vouched_keys
        return ActivePolicy(
            snapshot,
            ResponseBuilder(policy.answers, body=self._refusal_body, expected_wait_us=self._expected_wait_us),
            IdentityExtractor(
                policy.identity, api_keys, {**self._functions, **functions}, known.api_keys, known.vouched_keys
            ),
        )

    def _expected_wait_us(self, limit: Limit, places: int) -> int:
        return self._limiter._hold_times.expected_wait_us(limit, places)  # type: ignore[no-any-return] # noqa: SLF001

    def warn_of_mounts(self, routes: Sequence[AppRoute]) -> None:
        """Log the paths of the policy that no request can have, given the app's routes: those of mounted apps."""
        for path, meant in unreachable_paths(self.rules.snapshot.policy, routes):
            logger.warning(
                "the policy names the path %s, which matches nothing: the app serves it below a mount, where requests "
                "have the path %s; write that",
                path,
                meant,
            )

    def health(self) -> Health:
        """Whether requests are decided by the store, and what is known of its servers."""
        health: Health = self._limiter.health()
        return health

    def _say_how_it_is(self) -> Admission:
        """The answer at `health_path`: for load balancers, who take out a node without a store, and for people."""
        # Anybody may ask here. Only the log and `policy_error` say where the config store is, and quote the policy.
        error = self.policy_error and getattr(self._watch.error, "discreet", INVALID_POLICY)
        health = {**self.health().as_dict(), "policy_version": self.policy_version, "policy_error": error}
        page = health_response(health, ready=health["state"] == "ready")
        return Admission(None, None, page, None, 0)

    def _stored(self, kind: str, value: str) -> str:
        """Whom a block is about, as it is stored: of API keys only their hashes."""
        return self.rules.identities.fingerprint(value) if kind == "api_key" else value

    def _swap(self, policy: Policy) -> None:
        rules = self.made(policy)
        _log_warnings(policy)
        settings = policy.store
        self._limiter._configure(  # noqa: SLF001
            budget=settings.budget.total_seconds() if self._given_budget is None else self._given_budget,
            share=settings.share,
            nodes=settings.nodes,
            remember=settings.remember,
            lease_us=settings.lease // timedelta(microseconds=1),
            announced=rules.snapshot.announced(self.now_us()),
            never_leased=rules.snapshot.never_leased,
        )
        before = getattr(self, "rules", None)
        self.rules = rules
        if before is not None:
            parts = before.snapshot.parts()
            del before
            release(parts)

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

    def _held_without_store(self, met: Resolution, error: StoreError) -> tuple[Any, Decision]:
        """What a request that takes leases is told by its route's failure mode, and what it holds then."""
        fallback = self._fallbacks[met.route.on_failure]
        check = Check(met.keys, met.cost, uuid4().hex)
        decision = self._front.without_store(check, error, fallback)
        return (_LocalLease(fallback, check, error) if decision.allowed else None), decision

    def _failed(self, route: RoutePlan, check: Check, error: StoreError) -> Decision:
        """What a request is told by its route's failure mode."""
        return self._front.failed(check, error, self._fallbacks[route.on_failure])

    def _kinds(self, route: RoutePlan) -> frozenset[str]:
        """All kinds of identity that may matter to a request of the route: also those by which somebody is blocked."""
        blocks = self._blocks
        return route.kinds | blocks.kinds if blocks.are_there and not blocks.kinds <= route.kinds else route.kinds

    def _meet(
        self, rules: ActivePolicy, route: RoutePlan, arrival: RequestInfo, kinds: frozenset[str], told: AppIdentities
    ) -> tuple[Resolution, Check | None, HeaderTemplate, int]:
        """What the request meets, what the store is asked, how the client is told, and the instant."""
        now_us = self._time_ns() // 1000
        met, check, described = rules.meet(route, arrival, kinds, told, now_us)
        if self._blocks.are_there and met.block is None:
            met = self._live_block(met, now_us)
        return met, check, described, now_us

    def _live_block(self, met: Resolution, now_us: int) -> Resolution:
        """The same, blocked if somebody has blocked the client since the policy was written."""
        who = met.who
        found = self._blocks.find(who, now_us, self._hash_identity)
        if found is None and OTHER_API_KEYS in who:
            keys = who[OTHER_API_KEYS].split()
            found = next(filter(None, [self._blocks.find({"api_key": key}, now_us) for key in keys]), None)
        if found is None:
            return met
        until = None if found.until_us is None else datetime.fromtimestamp(found.until_us / 1_000_000, UTC)
        return met._replace(block=Block(Identity(found.kind, found.value), Validity(until=until), found.reason))

    def _emit(self, request: RequestInfo, admission: Admission) -> Admission:
        """Run the decision hooks, and put the event of the decision into the stream. For use while `_is_observed`."""
        for hook in self._decision_hooks:
            try:
                hook(request, admission)
            except Exception:
                logger.exception("on_decision failed; the request goes on")
        if self._events.observers:
            self._events.emit(request, admission, self._time_ns() // 1000)
        return admission


class _BorrowedStore:
    """The gate's own store in memory, in the hands of a limiter beside it."""

    def __init__(self, store: MemoryStore) -> None:
        self._store = store

    @property
    def stats(self) -> Any:
        return self._store.stats

    def close(self) -> None:
        """Not theirs to close."""


class _LocalLease:
    """The leases of one request that were taken while the store was away."""

    def __init__(self, fallback: FailurePolicy, check: Check, error: StoreError) -> None:
        self._fallback = fallback
        self._check = check
        self._error = error

    def __exit__(self, *_: object) -> None:
        for key in self._check.keys:
            if key.limit.algorithm == "concurrency":
                self._fallback.tell(Leave(key, self._check.id or ""), self._error)

    async def __aexit__(self, *_: object) -> None:
        self.__exit__()


def _control_plane(control: Any) -> Any:
    """The control plane that an app names. It is loaded by name: gates work without it, and below it."""
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
        raise InvalidConfiguration(f"reload_every {seconds!r} is no number of seconds above 0; None never looks again")
    return seconds


def _checked_path(path: str | None) -> str | None:
    if path is not None and (not isinstance(path, str) or not path.startswith("/")):
        raise InvalidConfiguration(f"health_path {path!r} is no path: it starts with a slash, like '/headgate/health'")
    return path


def _log_warnings(policy: Policy) -> None:
    """Log what `headgate check` warns of, as a gate loads a version of a policy."""
    for warning in policy.warnings[:MAX_LOGGED_WARNINGS]:
        logger.warning("policy %s: %s", policy.name, warning)
    if (more := len(policy.warnings) - MAX_LOGGED_WARNINGS) > 0:
        logger.warning("policy %s: %d more warnings; run headgate check to see them", policy.name, more)


def _is_hashed(block: Block) -> bool:
    return block.identity.kind != "api_key" and is_keyed_hash(block.identity.value)


def _counts_api_keys(policy: Policy) -> bool:
    reads = policy.identity.api_key_header is not None or policy.identity.bearer_token
    return reads and any({"api_key", "client"} & {*rule.by} for rule in policy.rules)
