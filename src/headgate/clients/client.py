"""The order of a request, written once: throttle, pace, send, learn, retry. Integrations only send and wait."""

from __future__ import annotations

import logging
import random as _random
import threading
import time
from collections import OrderedDict
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from hashlib import blake2b
from math import inf
from secrets import token_bytes
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple, NoReturn, TypeAlias, TypedDict

from headgate._fork import reinit_after_fork
from headgate.clients.quotas import RETRY_AFTER, parse_headers, server_time
from headgate.clients.scope import Scope
from headgate.clients.throttle import Throttle
from headgate.errors import InvalidConfiguration, InvalidLimit, StoreError, WaitTooLong
from headgate.flow import Pause
from headgate.limiter import AsyncLimiter, Limiter
from headgate.limits import Limit

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Generator, Hashable, Iterator, Mapping

    from headgate.clients.quotas import HeaderSource, Quota
    from headgate.clock import Clock
    from headgate.decisions import Decision
    from headgate.keys import Key

__all__ = [
    "IDEMPOTENT_METHODS",
    "Attempt",
    "ClientOptions",
    "ClientStats",
    "Discard",
    "Outgoing",
    "PoliteClient",
    "Question",
    "Reply",
    "Steps",
    "WaitEvent",
    "deadline",
]

logger = logging.getLogger("headgate.clients")

IDEMPOTENT_METHODS: Final = frozenset({"GET", "HEAD", "OPTIONS", "PUT", "DELETE", "TRACE"})
RETRY_STATUSES: Final = (429, 503)
BACKOFF_S: Final = 1.0
"""The upper bound of the random time before the first retry; it doubles with each further one."""
MAX_BACKOFF_S: Final = 30.0
MAX_SCOPES: Final = 256
CREDENTIALS: Final = ("authorization", "x-api-key", "api-key", "private-token")
_PROCESS_KEY: Final = token_bytes(16)  # credentials are kept as keyed hashes only
QUEUE_S: Final = 60.0
"""The longest queue of a shared quota."""


class Outgoing(NamedTuple):
    """A request, as far as the client needs to know it."""

    method: str
    host: str
    """Scheme, name and port."""
    path: str = "/"
    headers: Mapping[str, Any] = {}
    can_replay: bool = True
    """False if the body can be sent only once."""
    native: Any = None
    """The request of the library, for `partition=`."""


class Reply(NamedTuple):
    """A response, as far as the client needs to know it; status 0 is a result without a status."""

    status: int
    headers: HeaderSource
    native: Any = None


class Attempt(NamedTuple):
    """Send the request, and continue the flow with the `Reply`."""


class Discard(NamedTuple):
    """Close a response that is not returned to the caller."""

    reply: Reply


class Question(NamedTuple):
    """Check the keys at the limiter, and continue the flow with the decision; or refund an earlier one."""

    limiter: Any
    keys: tuple[Key, ...]
    cost: int
    refund: Decision | None = None


Steps: TypeAlias = "Generator[Pause | Attempt | Discard | Question, Any, Reply]"


WaitReason: TypeAlias = Literal["pace", "exhausted", "concurrency", "first", "throttle", "shared", "retry"]


class WaitEvent(NamedTuple):
    """A wait before a request is sent."""

    host: str
    method: str
    seconds: float
    """The expected time; waits for a turn are reported once, when they begin."""
    reason: WaitReason
    quota: Quota | None = None
    """The quota that causes it, if a server has reported one."""
    status: int | None = None
    """The status that is retried."""


@dataclass(slots=True)
class ClientStats:
    """Counters of a client since it was created."""

    requests: int = 0
    """Requests sent, retries included."""
    rejected: int = 0
    """Responses 429."""
    unavailable: int = 0
    """Responses 503."""
    retries: int = 0
    waits: int = 0
    waited_s: float = 0.0
    too_long: int = 0
    """Requests that were not sent because they would have waited too long."""
    out_of_budget: int = 0
    """Retries that the retry budget did not allow."""


class ClientOptions(TypedDict, total=False):
    """The options of `PoliteClient`, which all integrations accept."""

    retries: int
    max_wait: float
    retry_methods: Collection[str]
    retry_budget: Limit | str
    throttle: Throttle | None
    shared: Limiter | AsyncLimiter | None
    partition: Callable[[Any], Hashable] | None
    clock: Clock | None
    on_wait: Callable[[WaitEvent], Any] | None
    random: Callable[[], float]


class _Deadline:
    def __init__(self, seconds: float, now_s: Callable[[], float]) -> None:
        self._now_s, self._ends_at = now_s, now_s() + seconds

    def left(self) -> float:
        return self._ends_at - self._now_s()


_deadlines: Final[ContextVar[tuple[_Deadline, ...]]] = ContextVar("headgate_deadlines", default=())


@contextmanager
def deadline(seconds: float | timedelta, *, clock: Clock | None = None) -> Iterator[None]:
    """Limit the waits of all requests in a block, so that they end before a deadline.

    A request that would have to wait longer raises `WaitTooLong`, or returns the response that it would have retried.
    """
    length = seconds if isinstance(seconds, int | float) else seconds.total_seconds()
    token = _deadlines.set((*_deadlines.get(), _Deadline(length, _monotonic(clock))))
    try:
        yield
    finally:
        _deadlines.reset(token)


def _monotonic(clock: Clock | None) -> Callable[[], float]:
    return time.monotonic if clock is None else lambda: clock.now_us() / 1_000_000


class PoliteClient:
    """The state of a polite client, which its integrations share: learned quotas, retry budget, statistics.

    `retries` is the number of retries of a request answered with 429 or 503, if its method is idempotent, in
    `retry_methods`, or if it has an Idempotency-Key; `retry_budget` limits the retries of all requests together.
    `max_wait` is the time in seconds that a request may wait in total. `throttle` adds limits that responses do not
    report. `shared` is a limiter on a store through which all processes share the quotas that they learn. `partition`
    is a function of the request for hosts that count by something else than the credentials. `on_wait` is called with
    a `WaitEvent` when a request begins to wait.

    See docs/clients.md.
    """

    def __init__(
        self,
        *,
        retries: int = 3,
        max_wait: float = 60.0,
        retry_methods: Collection[str] = IDEMPOTENT_METHODS,
        retry_budget: Limit | str = "5/second, burst 20",
        throttle: Throttle | None = None,
        shared: Limiter | AsyncLimiter | None = None,
        partition: Callable[[Any], Hashable] | None = None,
        clock: Clock | None = None,
        on_wait: Callable[[WaitEvent], Any] | None = None,
        random: Callable[[], float] = _random.random,
    ) -> None:
        if type(retries) is not int or retries < 0:
            raise InvalidConfiguration(f"retries {retries!r} is not a whole number >= 0")
        if isinstance(max_wait, bool) or not isinstance(max_wait, int | float) or not 0 <= max_wait < inf:
            raise InvalidConfiguration(f"max_wait {max_wait!r} is not a number of seconds >= 0")
        if isinstance(retry_methods, str):
            raise InvalidConfiguration(f'retry_methods {retry_methods!r} is a text: write {{"GET", "POST"}}')
        if throttle is not None and not isinstance(throttle, Throttle):
            raise InvalidConfiguration(f'throttle {throttle!r} is not a Throttle: write Throttle("100/minute")')
        if shared is not None and not isinstance(shared, Limiter | AsyncLimiter):
            raise InvalidConfiguration(f"shared {shared!r} is not a Limiter or an AsyncLimiter")
        self.stats = ClientStats()
        self.clock = clock
        self._retries, self._max_wait = retries, max_wait
        self._retry_methods = frozenset(method.upper() for method in retry_methods)
        budget = retry_budget if isinstance(retry_budget, Limit) else Limit.parse(retry_budget, name="retries")
        self._budget, self._budget_limiter = budget.by(), Limiter(clock=clock)
        self._throttle, self._shared, self._partition, self._on_wait = throttle, shared, partition, on_wait
        self._random = random
        self._now_s = _monotonic(clock)
        self._scopes: OrderedDict[Hashable, Scope] = OrderedDict()
        self._lock = threading.Lock()
        reinit_after_fork(self)

    def reset_after_fork(self) -> None:
        """Forget requests in flight and statistics, which are the parent's."""
        self._lock = threading.Lock()
        self.stats = ClientStats()
        for scope in list(self._scopes.values()):
            scope.in_flight = 0

    def hosts(self) -> list[str]:
        """The hosts of which quotas are known."""
        with self._lock:
            return list(dict.fromkeys(key[0] for key in self._scopes if isinstance(key, tuple)))

    def quotas(self, host: str) -> list[Quota]:
        """The quotas that a host has last reported: quotas("https://api.example.com")."""
        with self._lock:
            scopes = [scope for key, scope in self._scopes.items() if isinstance(key, tuple) and key[0] == host]
            return [quota for scope in scopes for quota in scope.quotas.values() if quota.name != RETRY_AFTER]

    # ------------------------------------------------------------ the flow

    def send(self, request: Outgoing) -> Steps:
        """Send a request politely: a generator of steps that returns the reply."""
        started, attempt = self._now_s(), 0
        key = (request.host, self._partition_of(request))
        while True:
            is_queued = yield from self._wait_for_limits(request, key, started)
            scope, ahead = yield from self._wait_for_turn(request, key, started)
            reply: Reply | None = None
            try:
                if ahead > 0:
                    yield Pause(ahead)
                reply = yield Attempt()
            finally:  # also if sending fails or is cancelled
                with self._lock:
                    scope.finish()
                    quotas = self._learn(scope, request, reply) if reply is not None else []
            if not is_queued and not _is_rejection(reply, quotas):
                yield from self._queue_afterwards(request, key)
            delay = self._retry_delay(request, reply, quotas, attempt, started)
            if delay is None:
                return reply
            attempt += 1
            yield Discard(reply)
            yield self._pause(request, delay, "retry", status=reply.status)

    def _learn(self, scope: Scope, request: Outgoing, reply: Reply) -> list[Quota]:
        self.stats.requests += 1
        self.stats.rejected += reply.status == 429
        self.stats.unavailable += reply.status == 503
        quotas = parse_headers(reply.headers, self._received_at(reply.headers))
        scope.learn(request.path, quotas, self._now_s(), is_rejection=_is_rejection(reply, quotas))
        return quotas

    def _received_at(self, headers: HeaderSource) -> datetime:
        """The time by the server's clock, if it says it, as resets are given by that clock."""
        if self.clock is not None:
            return datetime.fromtimestamp(self.clock.now_us() / 1_000_000, UTC)
        return server_time(headers) or datetime.now(UTC)

    def _retry_delay(
        self, request: Outgoing, reply: Reply, quotas: list[Quota], attempt: int, started: float
    ) -> float | None:
        """The time to wait before the next attempt; None to return the reply."""
        if attempt >= self._retries or not _is_rejection(reply, quotas) or not self._may_repeat(request):
            return None
        told = [quota.reset_after or 0.0 for quota in quotas if quota.name == RETRY_AFTER]
        exhausted = [quota.reset_after or 0.0 for quota in quotas if quota.remaining == 0]
        delay = max(told or exhausted or [0.0]) + self._random() * min(BACKOFF_S * 2.0**attempt, MAX_BACKOFF_S)
        if delay > self._left(started):
            return None
        if not self._budget_limiter.check(self._budget):
            self.stats.out_of_budget += 1
            return None
        self.stats.retries += 1
        return delay

    def _may_repeat(self, request: Outgoing) -> bool:
        has_key = any(name.lower() == "idempotency-key" for name in request.headers)
        return request.can_replay and (has_key or request.method.upper() in self._retry_methods)

    # ------------------------------------------------------------ waiting

    def _wait_for_turn(
        self, request: Outgoing, key: Hashable, started: float
    ) -> Generator[Pause, Any, tuple[Scope, float]]:
        """Count the request as sent as soon as the learned quotas allow it, at most a moment ahead."""
        reported = None
        while True:
            with self._lock:
                scope = self._scope(key)
                turn = scope.take_turn(request.path, self._now_s(), is_paced=self._shared is None)
            if not turn.is_taken and turn.seconds > self._left(started):
                self._give_up(request, turn.seconds, started, f"quota {turn.quota}" if turn.quota else turn.reason)
            if turn.seconds > 0 and turn.reason != reported:
                self._report(request, turn.seconds, turn.reason, turn.quota)
                reported = turn.reason
            if turn.seconds > 0:
                self.stats.waited_s += turn.seconds
            if turn.is_taken:
                return scope, turn.seconds
            yield Pause(turn.seconds)

    def _wait_for_limits(
        self, request: Outgoing, key: Hashable, started: float
    ) -> Generator[Pause | Question, Any, bool]:
        """Wait for the throttle, and for the queue of the quotas that are shared with other processes.

        False if there is a shared store, but no quota is known yet.
        """
        if self._throttle is not None:
            weight = self._throttle.weight(request.method.upper(), request.path.partition("?")[0])
            keys = self._throttle.keys(request.host)
            yield from self._wait_for_limiter(
                request, Question(self._throttle.limiter, keys, weight), "throttle", started
            )
        if self._shared is None:
            return True
        with self._lock:
            keys = self._shared_keys(request, key)
        if keys:
            try:
                yield from self._wait_for_limiter(request, Question(self._shared, keys, 1), "shared", started)
            except StoreError as error:
                logger.warning("the store of shared= failed, the request is sent without it: %s", error)
        return bool(keys)

    def _queue_afterwards(self, request: Outgoing, key: Hashable) -> Generator[Question, Any, None]:
        """Take a place in the shared queue for a request that was sent before its quotas were known.

        Otherwise processes that start add their first requests to a queue that uses the whole quota.
        """
        with self._lock:
            keys = self._shared_keys(request, key)
        if keys:
            try:
                yield Question(self._shared, keys, 1)
            except StoreError as error:
                logger.warning("the store of shared= failed: %s", error)

    def _wait_for_limiter(
        self, request: Outgoing, question: Question, reason: WaitReason, started: float
    ) -> Generator[Pause | Question, Any, None]:
        while True:
            decision: Decision = yield question
            wait = decision.delay if decision.allowed else decision.retry_after
            if wait is None or wait > self._left(started):
                if decision.allowed:
                    yield question._replace(refund=decision)
                self._give_up(request, wait, started, decision.reason)
            if wait:
                yield self._pause(request, wait, reason)
            if decision.allowed:
                return

    def _pause(self, request: Outgoing, seconds: float, reason: WaitReason, *, status: int | None = None) -> Pause:
        self._report(request, seconds, reason, status=status)
        self.stats.waited_s += seconds
        return Pause(seconds)

    def _report(
        self,
        request: Outgoing,
        seconds: float,
        reason: WaitReason,
        quota: Quota | None = None,
        *,
        status: int | None = None,
    ) -> None:
        self.stats.waits += 1
        if self._on_wait is not None:
            try:
                self._on_wait(WaitEvent(request.host, request.method, seconds, reason, quota, status))
            except Exception:
                logger.exception("on_wait failed")

    def _left(self, started: float) -> float:
        """The time that a request may still wait."""
        left = started + self._max_wait - self._now_s()
        return min([left, *[each.left() for each in _deadlines.get()]])

    def _give_up(self, request: Outgoing, seconds: float | None, started: float, cause: str) -> NoReturn:
        self.stats.too_long += 1
        raise WaitTooLong(request.method, request.host, seconds, max(0.0, self._left(started)), cause)

    # ------------------------------------------------------------ state

    def _partition_of(self, request: Outgoing) -> Hashable:
        """The part of a host's clients to which the request belongs: by default, one for each set of credentials."""
        if self._partition is not None:
            return self._partition(request.native)
        credentials = [str(value) for name, value in request.headers.items() if name.lower() in CREDENTIALS]
        return (
            blake2b("\n".join(credentials).encode(), digest_size=16, key=_PROCESS_KEY).digest() if credentials else None
        )

    def _scope(self, key: Hashable) -> Scope:
        scope = self._scopes.get(key)
        if scope is None:
            scope = self._scopes[key] = Scope(self._random)
            while len(self._scopes) > MAX_SCOPES:
                self._scopes.popitem(last=False)
        self._scopes.move_to_end(key)
        return scope

    def _shared_keys(self, request: Outgoing, key: Hashable) -> tuple[Key, ...]:
        """The counters in the shared store, one for each learned quota that has a rate."""
        scope = self._scope(key)
        part = repr(self._partition(request.native)) if self._partition is not None else ""
        keys = []
        for each in scope.keys_for(request.path):
            quota = scope.quotas[each]
            if quota.limit and quota.window and quota.unit == "requests":
                limit = _queue(quota.name or f"{quota.limit}", quota.limit, quota.window)
                if limit is not None:
                    keys.append(limit.by(request.host, part, repr(quota.partition or "")))
        return tuple(dict.fromkeys(keys))


@lru_cache(maxsize=256)
def _queue(name: str, quota: int, window: int) -> Limit | None:
    """A limit that lets requests leave one by one, at the rate of a learned quota."""
    label = "".join(letter if letter.isascii() and letter.isprintable() else "?" for letter in name)[:100]
    burst = max(1, min(int(quota * QUEUE_S / window), 1_000_000))
    try:
        return Limit(quota, timedelta(seconds=window), burst=burst, algorithm="leaky_bucket", name=label)
    except InvalidLimit:  # numbers that no server means
        return None


def _is_rejection(reply: Reply, quotas: list[Quota]) -> bool:
    """True for 429 and 503, and for 403 with Retry-After, as GitHub answers to secondary limits."""
    is_told = any(quota.name == RETRY_AFTER for quota in quotas)
    return reply.status in RETRY_STATUSES or (reply.status == 403 and is_told)
