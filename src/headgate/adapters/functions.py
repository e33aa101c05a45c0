"""Limits on plain functions and blocks: queue tasks, scripts, clients of other APIs."""

from __future__ import annotations

from contextlib import aclosing, asynccontextmanager, contextmanager, nullcontext
from functools import wraps
from inspect import isasyncgenfunction, iscoroutinefunction, isgeneratorfunction
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from headgate import _limit_syntax
from headgate.errors import InvalidConfiguration, InvalidCost, InvalidLimit, RequestDenied
from headgate.leases import leased_keys
from headgate.limiter import AsyncLimiter, Limiter
from headgate.limits import Limit

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator
    from typing import TypeAlias

    from headgate.decisions import Decision
    from headgate.keys import Key

    IdentityParts: TypeAlias = str | int | tuple[str | int, ...]

__all__ = ["limited"]

P = ParamSpec("P")
R = TypeVar("R")


class limited:  # noqa: N801 - a decorator, and used as one
    """Runs a function or a block if its limits allow it; otherwise raises `RequestDenied`.

    As a decorator, for functions and generators, asynchronous or not; leases are held until they end:

    >>> from headgate import Limiter
    >>> from headgate.testing import FakeClock
    >>> limiter = Limiter(clock=FakeClock())
    >>> @limited("2/minute", by=lambda recipient: recipient, name="mail", limiter=limiter)
    ... def send_mail(recipient):
    ...     return f"sent to {recipient}"
    >>> [send_mail("ada"), send_mail("ada"), send_mail("bob")]
    ['sent to ada', 'sent to ada', 'sent to bob']
    >>> send_mail("ada")
    Traceback (most recent call last):
        ...
    headgate.errors.RequestDenied: denied by mail (2 per minute, token_bucket): 0 left, passes in 30 s

    As a block, `with limited(exports, by="tenant-7", limiter=limiter) as decision:`, or `async with`.

    `by` identifies the counter: a string, an integer, a tuple of these, or a function of the call's arguments that
    returns one; None for a single counter. A limit given as a string is named after the function, or by `name`; a
    string may contain several limits, "5/minute; 100/hour". `limiter` is a `Limiter`, or an `AsyncLimiter` for
    asynchronous functions. With `wait`, a call waits at most so many seconds until it is allowed.
    """

    def __init__(
        self,
        *limits: str | Limit,
        limiter: Limiter | AsyncLimiter,
        by: IdentityParts | Callable[..., IdentityParts] | None = None,
        cost: int = 1,
        name: str | None = None,
        wait: float | None = None,
    ) -> None:
        if not limits:
            raise InvalidConfiguration('no limit given: write it like limited("10/minute", limiter=limiter)')
        if type(cost) is not int or cost < 0:
            raise InvalidCost(f"cost {cost!r} is not a whole number >= 0")
        if wait is not None and (isinstance(wait, bool) or not isinstance(wait, int | float) or not wait >= 0):
            raise InvalidConfiguration(f"wait {wait!r} is not a number of seconds >= 0, or None")
        self._limits: list[str | Limit] = []
        for each in limits:
            self._limits += [each] if isinstance(each, Limit) else _limit_syntax.split(each)
        self._limiter: Any = limiter
        self._by, self._cost, self._name, self._wait = by, cost, name, wait
        self._blocks: list[Any] = []
        """The entered blocks. All have the same keys, so their order of exit does not matter."""
        for limit in self._parse_limits("some name"):
            if limit.algorithm == "leaky_bucket" and wait is None:
                raise InvalidConfiguration(f"the limit {limit} delays calls: give wait=, the longest delay in seconds")

    def __call__(self, function: Callable[P, R]) -> Callable[P, R]:
        if isinstance(function, classmethod | staticmethod):
            return type(function)(self(function.__func__))
        if not callable(function):
            raise InvalidConfiguration(f"{function!r} is not callable: decorate a function")
        name: str | None = getattr(function, "__qualname__", None)
        is_asynchronous = _is(iscoroutinefunction, function) or _is(isasyncgenfunction, function)
        self._check_limiter(is_asynchronous, name or repr(function))
        try:
            limits = self._parse_limits(self._name or (name and f"{function.__module__}.{name}"))
        except InvalidLimit as error:
            raise InvalidLimit(f"{error}; give name=") from None
        run: Any = function

        def call(*args: Any, **kwargs: Any) -> Any:
            with self._admit(self._keys(limits, args, kwargs)):
                return run(*args, **kwargs)

        def iterate(*args: Any, **kwargs: Any) -> Any:
            with self._admit(self._keys(limits, args, kwargs)):
                return (yield from run(*args, **kwargs))

        async def call_async(*args: Any, **kwargs: Any) -> Any:
            async with self._admit_async(self._keys(limits, args, kwargs)):
                return await run(*args, **kwargs)

        async def iterate_async(*args: Any, **kwargs: Any) -> Any:
            async with self._admit_async(self._keys(limits, args, kwargs)), aclosing(run(*args, **kwargs)) as values:
                step = values.asend(None)
                while True:  # as `yield from` does, which asynchronous generators lack
                    try:
                        value = await step
                    except StopAsyncIteration:
                        return
                    try:
                        step = values.asend((yield value))
                    except GeneratorExit:
                        raise
                    except BaseException as error:
                        step = values.athrow(error)

        kinds = {isgeneratorfunction: iterate, iscoroutinefunction: call_async, isasyncgenfunction: iterate_async}
        wrapper: Any = next((wrapper for kind, wrapper in kinds.items() if _is(kind, function)), call)
        return wraps(function)(wrapper)

    def __enter__(self) -> Decision:
        self._check_limiter(False, "a block of `with`")
        block = self._admit(self._keys(self._parse_limits(self._name), None, {}))
        decision = block.__enter__()
        self._blocks.append(block)
        return decision

    def __exit__(self, *_: object) -> None:
        self._blocks.pop().__exit__(None, None, None)

    async def __aenter__(self) -> Decision:
        self._check_limiter(True, "a block of `async with`")
        block = self._admit_async(self._keys(self._parse_limits(self._name), None, {}))
        decision = await block.__aenter__()
        self._blocks.append(block)
        return decision

    async def __aexit__(self, *_: object) -> None:
        await self._blocks.pop().__aexit__(None, None, None)

    @contextmanager
    def _admit(self, keys: list[Key]) -> Iterator[Decision]:
        waited = None if self._wait is None else self._limiter.acquire(*keys, cost=self._cost, timeout=self._wait)
        with self._hold(keys, waited) as decision:
            yield _raise_if_denied(waited or decision)

    @asynccontextmanager
    async def _admit_async(self, keys: list[Key]) -> AsyncIterator[Decision]:
        wait = self._wait
        waited = None if wait is None else await self._limiter.acquire(*keys, cost=self._cost, timeout=wait)
        async with self._hold(keys, waited) as decision:
            yield _raise_if_denied(waited or decision)

    def _hold(self, keys: list[Key], waited: Decision | None) -> Any:
        """A context manager that holds the leases of a call; entering a lease of `waited` again costs nothing."""
        if waited is None:
            return self._limiter.hold(*keys, cost=self._cost)
        leased = leased_keys(waited)
        return self._limiter.hold(*leased, cost=self._cost, id=waited.id) if leased else nullcontext(waited)

    def _parse_limits(self, name: str | None) -> list[Limit]:
        """The limits; strings are parsed and get the name, with their text if there are several."""
        texts = [limit for limit in self._limits if not isinstance(limit, Limit)]
        if texts and name is None:
            raise InvalidConfiguration(f"the limit {texts[0]!r} has no name: give name=")
        names = {text: f"{name}" if len(texts) == 1 else f"{name} {text}" for text in texts}
        return [each if isinstance(each, Limit) else Limit.parse(each, name=names[each]) for each in self._limits]

    def _keys(self, limits: list[Limit], args: tuple[Any, ...] | None, kwargs: dict[str, Any]) -> list[Key]:
        identity: Any = self._by
        if identity is None:
            return [limit.by() for limit in limits]
        if callable(identity):
            if args is None:
                raise InvalidConfiguration("a block has no arguments for the function by=: give the identity itself")
            identity = identity(*args, **kwargs)
        return [limit.by(*identity) if isinstance(identity, tuple) else limit.by(identity) for limit in limits]

    def _check_limiter(self, is_asynchronous: bool, what: str) -> None:
        needed = AsyncLimiter if is_asynchronous else Limiter
        if not isinstance(self._limiter, needed):
            raise InvalidConfiguration(f"{what} needs limiter= to be a {needed.__name__}, not {self._limiter!r}")


def _is(kind: Callable[[Any], bool], function: Any) -> bool:
    """Return True if a function, or the `__call__` of an object, is of that kind."""
    return kind(function) or kind(type(function).__call__)


def _raise_if_denied(decision: Decision) -> Decision:
    if not decision.allowed:
        raise RequestDenied(decision)
    return decision
