"""What both limiters are made of: the store, what stands before it, who looks after it, and the door's own checks."""

from __future__ import annotations

import time
from contextlib import closing
from typing import TYPE_CHECKING, Any, ClassVar, Final
from weakref import WeakSet

from headgate.clock import SystemClock
from headgate.errors import InvalidConfiguration, InvalidInput, StoreUnavailable
from headgate.events import EventEmitter
from headgate.failure import FailurePolicy, FleetShare
from headgate.keys import escape
from headgate.leases import HoldTimes
from headgate.local.block_list import LiveBlock, canonical
from headgate.local.maintenance import MaintenanceThread
from headgate.local.tier import LocalTier
from headgate.stores import open_store
from headgate.stores.memory import MemoryStore

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from datetime import datetime
    from fractions import Fraction
    from typing import Self

    from headgate.clock import Clock
    from headgate.events import Event
    from headgate.failure import FailureMode
    from headgate.health import Health
    from headgate.limits import Limit

__all__ = ["FIRST_CONNECTION", "LimiterBase", "checked_timeout"]

PATIENT_BUDGET: Final = 1.0
QUICK_BUDGET: Final = 0.005
FIRST_CONNECTION: Final = 0.25
"""Seconds that whoever makes a limiter may wait for its first connection: so that no request has to."""
USUALLY_REMEMBERED: Final = 10_000
CLOSE_TIMEOUT_S: Final = 0.25
"""Upper bound on how long `close` waits for prepaid tokens to be returned to the store."""
CLOSE_POLL_INTERVAL_S: Final = 0.001


class LimiterBase:
    """All of a limiter but the waiting."""

    _asynchronous: bool

    _limiters: ClassVar[WeakSet[Any]] = WeakSet()
    """All limiters of the process but those of gates. With `_on_created`, for the fixtures of `headgate.testing`."""

    _on_created: ClassVar[list[Callable[[Any], None]]] = []
    """Called with each such limiter when it is created."""

    _belongs_to_gate = False

    def __init__(
        self,
        url: Any = "memory://",
        *,
        clock: Clock | None = None,
        namespace: str = "headgate",
        on_failure: FailureMode = "raise",
        budget: float | None = None,
        max_keys: int = 1_000_000,
        remember: int | None = None,
        lease: float = 0.1,
        share: float = 0.2,
        nodes: int = 1,
        on_event: Callable[[Event], Any] | None = None,
    ) -> None:
        if clock is not None and not callable(getattr(clock, "now_us", None)):
            raise InvalidConfiguration(f"{clock!r} is no clock: it must have a method now_us()")
        default_clock = SystemClock()
        herald = EventEmitter(_checked_listener(on_event))
        fleet = FleetShare(share=share, nodes=nodes)
        self._failure = FailurePolicy(on_failure, clock or default_clock, fleet)
        self._clock = clock
        self._hold_times = HoldTimes()
        self._store = open_store(
            url,
            clock=clock,
            default_clock=default_clock,
            namespace=_checked_namespace(namespace),
            budget=_checked_budget(budget, on_failure),
            max_keys=_checked_max_keys(max_keys),
            asynchronous=self._asynchronous,
        )
        # The memory store answers at once and cannot fail: it is asked without all of this, in a third of the time.
        self._memory: MemoryStore | None = self._store if isinstance(self._store, MemoryStore) else None
        self._front = LocalTier(herald, clock=clock, fleet=fleet)
        self._front.configure(remember=_checked_remember(remember, clock), lease_us=_checked_lease(lease))
        self._keeper: MaintenanceThread | None = None
        if self._memory is None:
            tells = on_failure != "raise" or on_event is not None
            self._keeper = MaintenanceThread(self._front, self._store, herald, beats=tells)
        self._is_quick = self._keeper is not None and on_failure != "raise"
        """Whether its first request shall find a connection, as it would not wait long for one."""
        if self._is_quick:
            self._store.warm(wait=FIRST_CONNECTION)
        self._make_ready()
        if not self._belongs_to_gate:
            self._limiters.add(self)
            for created in self._on_created:
                created(self)

    @classmethod
    def _for_gate(cls, url: Any = "memory://", **options: Any) -> Self:
        """A limiter that belongs to a gate: tests isolate it together with the gate, not by itself."""
        limiter = cls.__new__(cls)
        limiter._belongs_to_gate = True  # noqa: SLF001 - its own
        cls.__init__(limiter, url, **options)
        return limiter

    def _lose_store(self) -> None:
        """Answer by the failure mode from now on, as if the store were unavailable: for tests."""
        self.__dict__.pop("check", None)  # the shortcut of limiters in memory
        self._store, self._memory = _UnavailableStore(), None

    def _make_ready(self) -> None:
        """What one kind of limiter needs beside."""

    def health(self) -> Health:
        """Whether requests are decided by the store, which of its servers are asked, and what is owed to it."""
        return self._front.health() if self._keeper is None else self._keeper.health()

    @property
    def stats(self) -> Any:
        """For memory, its keys and whether it had to forgive any debt. For Redis, how many calls were carried in how
        many round trips, and what was answered without."""
        return self._store.stats if self._memory is not None else {**self._store.stats, **self._front.stats}

    def _guard_routes(self) -> FleetShare:
        """Be one of a fleet, for a gate whose routes have failure modes of their own: how much is this node's part."""
        if self._keeper is not None:
            self._keeper.beats = self._keeper.listens = True
            self._keeper.ensure()
            self._store.warm()
        return self._front.fleet

    def _configure(
        self,
        *,
        budget: float,
        share: Fraction,
        nodes: int,
        remember: int,
        lease_us: int,
        announced: Iterable[Limit],
        never_leased: Iterable[Limit],
    ) -> None:
        """Go by the settings of a policy from now on."""
        front = self._front
        front.fleet.share = share
        if self._keeper is None:
            return
        self._store.set_budget(budget)
        if not self._keeper.has_beaten:
            front.fleet.nodes = nodes
        front.configure(remember=remember, lease_us=lease_us)
        front.purses.announce(announced)
        front.purses.exclude(never_leased)

    def _block(self, block: LiveBlock) -> None:
        """May wait for the store."""
        kind, value, until_us, reason = block
        if self._keeper is not None:
            with closing(self._store.background_client()) as companion:
                companion.block(kind, value, until_us=until_us, reason=reason)
        self._front.blocks.set(*block)

    def _unblock(self, kind: str, value: str) -> bool:
        """May wait for the store."""
        if self._keeper is None:
            return self._front.blocks.drop(kind, value)
        with closing(self._store.background_client()) as companion:
            ended: bool = companion.unblock(kind, value)
        self._front.blocks.drop(kind, value)
        return ended

    def _blocked(self) -> list[LiveBlock]:
        """May wait for the store."""
        if self._keeper is None:
            now_us = (self._clock or SystemClock()).now_us()
            return [block for block in self._front.blocks if block.holds_at(now_us)]
        with closing(self._store.background_client()) as companion:
            return [LiveBlock(*block) for block in companion.blocks()]

    @staticmethod
    def _checked_block(kind: str, value: str, until: datetime | None = None, reason: str | None = None) -> LiveBlock:
        """The block in its one spelling."""
        if not isinstance(kind, str) or not kind.isidentifier():
            raise InvalidInput(f"{kind!r} is no kind of identity: give a word like 'ip', 'user', 'api_key' or 'tenant'")
        if not isinstance(value, str) or not value:
            raise InvalidInput(f"{value!r} is nobody of kind {kind!r}: give a text, as the adapters know it")
        if kind == "api_key" and not value.startswith("hmac:"):
            raise InvalidInput(
                "an API key is blocked by its hash, as nothing else of it is stored: ask a gate, which has the secret, "
                "or give what `headgate hash-key` prints"
            )
        if until is not None and until.tzinfo is None:
            raise InvalidInput(f"until {until!r} has no time zone: give datetime(..., tzinfo=UTC)")
        until_us = None if until is None else round(until.timestamp() * 1_000_000)
        return LiveBlock(kind, canonical(kind, value), until_us, reason)

    def _stop_background_work(self) -> Iterator[float]:
        """Return prepaid tokens and stop the keeper; yields the seconds to sleep before the next step.

        Orders still on their way are awaited first: tokens that arrive after the limiter is closed would stay charged.
        """
        keeper = self._keeper
        if keeper is None:
            return
        deadline = time.monotonic() + CLOSE_TIMEOUT_S
        self._front.stop_prepaying()
        while self._front.purses.pending_orders and time.monotonic() < deadline:
            yield CLOSE_POLL_INTERVAL_S
        keeper.close()
        while keeper.is_parting and time.monotonic() < deadline:
            yield CLOSE_POLL_INTERVAL_S

    def _elapsed(self) -> Callable[[], float]:
        """How many seconds have passed since now, on the clock that this limiter waits by."""
        if self._clock is not None and hasattr(self._clock, "sleep"):
            now_us, start_us = self._clock.now_us, self._clock.now_us()
            return lambda: (now_us() - start_us) / 1_000_000
        start = time.monotonic()
        return lambda: time.monotonic() - start


class _UnavailableStore:
    """A store that fails every call, for tests of what an app does then."""

    budget = QUICK_BUDGET
    stats: Final[dict[str, int]] = {}

    def run(self, call: object) -> Any:
        raise StoreUnavailable("the store is unavailable: store_down() of headgate.testing")

    def close(self) -> None:
        """Nothing to close."""


def checked_timeout(timeout: float | None) -> float | None:
    """Seconds, or None to wait for ever."""
    if timeout is not None and (isinstance(timeout, bool) or not isinstance(timeout, int | float) or not timeout >= 0):
        raise InvalidConfiguration(f"timeout {timeout!r} is not a number of seconds >= 0; None waits for ever")
    return timeout


def _checked_namespace(namespace: str) -> str:
    if not isinstance(namespace, str) or not namespace or not namespace.isprintable() or len(namespace) > 100:
        raise InvalidConfiguration(f"namespace {namespace!r}: use 1 to 100 printable characters")
    return escape(namespace)


def _checked_budget(budget: float | None, on_failure: str) -> float:
    if budget is None:
        return PATIENT_BUDGET if on_failure == "raise" else QUICK_BUDGET
    if isinstance(budget, bool) or not isinstance(budget, int | float) or not 0 < budget <= 60:
        raise InvalidConfiguration(
            f"budget {budget!r}: give the seconds that the store may take, above 0 and at most 60"
        )
    return float(budget)


def _checked_remember(remember: int | None, clock: Clock | None) -> int:
    if remember is None:
        # A clock that somebody sets is for tests, in which nothing but the store shall answer.
        return USUALLY_REMEMBERED if clock is None else 0
    if type(remember) is not int or remember < 0:
        raise InvalidConfiguration(f"remember {remember!r} is not a number of denials: give a whole number, 0 for none")
    return remember


def _checked_lease(lease: float) -> int:
    if isinstance(lease, bool) or not isinstance(lease, int | float) or not 0 <= lease <= 1:
        raise InvalidConfiguration(f"lease {lease!r}: give seconds from 0, which turns prepaying off, up to 1")
    return round(lease * 1_000_000)


def _checked_listener(on_event: Any) -> Any:
    if on_event is not None and not callable(on_event):
        raise InvalidConfiguration(f"on_event {on_event!r} cannot be called: give a function that takes an event")
    return on_event


def _checked_max_keys(max_keys: int) -> int:
    if type(max_keys) is not int or max_keys < 1:
        raise InvalidConfiguration(f"max_keys {max_keys!r} is not a whole number of at least 1")
    return max_keys
