"""Guard: an adaptive concurrency limit around calls to a database or another service, for threads and asyncio."""

from __future__ import annotations

from functools import wraps
from inspect import isasyncgenfunction, iscoroutinefunction, isgeneratorfunction
from typing import TYPE_CHECKING, Any, Final, ParamSpec, TypeAlias, TypeVar

from headgate.errors import InvalidConfiguration, Overloaded
from headgate.overload.gradient import ConcurrencySettings
from headgate.overload.load_shedder import LoadShedder, checked_priority
from headgate.overload.steady_clock import steady_now_us

if TYPE_CHECKING:
    from collections.abc import Callable

    from headgate.clock import Clock
    from headgate.overload.load_shedder import OverloadStats, Permit, Priority

__all__ = ["Guard", "GuardedCall", "PrioritySource"]

P = ParamSpec("P")
R = TypeVar("R")
PrioritySource: TypeAlias = "Priority | Callable[[], Priority]"
"""A priority, or a function that returns that of the current request, such as `headgate.gate.current_priority`."""

RETRY_AFTER_S: Final = 1.0


class Guard:
    """Sheds calls to a resource while it is overloaded, by raising `Overloaded` before the call.

    >>> database = Guard("database")
    >>> with database.call("critical"):
    ...     pass  # use it
    >>> @database.call("background", tenant="acme")
    ... def clean_up():
    ...     return "done"
    >>> clean_up(), database.stats().admitted
    ('done', 2)

    Calls in progress are limited. The limit follows latency: it rises while latency is as low as without a queue, and
    falls when calls begin to wait. `minimum` and `maximum` bound it; if they are equal, it is fixed. `tolerance` is the
    latency that is accepted, as a multiple of that without a queue. A call that raises one of `drops` lowers the limit;
    the latency of calls that raise anything else is ignored. `retry_after` is that of `Overloaded`, in seconds. See
    docs/overload.md.
    """

    def __init__(
        self,
        name: str,
        *,
        minimum: int = 4,
        maximum: int = 1000,
        initial: int = 20,
        tolerance: float = 1.25,
        drops: tuple[type[BaseException], ...] = (TimeoutError,),
        retry_after: float = RETRY_AFTER_S,
        clock: Clock | None = None,
    ) -> None:
        if not isinstance(name, str) or not name:
            raise InvalidConfiguration(f"guard name {name!r}: give the name of the resource, like 'database'")
        if isinstance(retry_after, bool) or not isinstance(retry_after, int | float) or not retry_after > 0:
            raise InvalidConfiguration(f"retry_after {retry_after!r} is not a number of seconds above 0")
        self.name = name
        self.retry_after = float(retry_after)
        self.drops = drops
        settings = ConcurrencySettings(minimum, maximum, initial, tolerance)
        self._shedder = LoadShedder(settings, steady_now_us if clock is None else clock.now_us)

    def call(self, priority: PrioritySource = "normal", *, tenant: str | None = None) -> GuardedCall:
        """A context manager for one call, `with` or `async with`; or a decorator of functions, asynchronous or not.

        With `tenant`, calls are shed fairly: a tenant with more than its share of the calls in progress leaves room to
        the others.
        """
        if not callable(priority):
            checked_priority(priority)
        return GuardedCall(self, priority, tenant)

    def acquire(self, priority: PrioritySource = "normal", *, tenant: str | None = None) -> Permit:
        """Begin a call, for code that cannot use `call`: release the permit when it has ended. Raises `Overloaded`."""
        wanted = priority() if callable(priority) else priority
        permit = self._shedder.acquire(wanted, tenant)
        if permit is None:
            raise Overloaded(self.name, wanted, self.retry_after)
        return permit

    def release(
        self, permit: Permit, error: BaseException | None = None, *, drops: tuple[type[BaseException], ...] = ()
    ) -> None:
        """End a call, with the exception that it has raised; `drops` are further ones that lower the limit."""
        is_drop = isinstance(error, (*self.drops, *drops))
        permit.release("ok" if error is None else "dropped" if is_drop else "ignored")

    def stats(self) -> OverloadStats:
        """The limit, the calls in progress, latencies, and the calls that were shed."""
        return self._shedder.stats()


class GuardedCall:
    """A call that a guard admits or sheds, as a context manager or a decorator; created by `Guard.call`."""

    __slots__ = ("_guard", "_permit", "_priority", "_tenant")

    def __init__(self, guard: Guard, priority: PrioritySource, tenant: str | None) -> None:
        self._guard, self._priority, self._tenant = guard, priority, tenant
        self._permit: Permit | None = None

    def __enter__(self) -> None:
        if self._permit is not None:
            raise InvalidConfiguration(f"a call of guard {self._guard.name!r} was entered twice: create one for each")
        self._permit = self._guard.acquire(self._priority, tenant=self._tenant)

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        permit, self._permit = self._permit, None
        if permit is not None:
            self._guard.release(permit, error)

    async def __aenter__(self) -> None:
        self.__enter__()

    async def __aexit__(self, _: object, error: BaseException | None, __: object) -> None:
        self.__exit__(_, error, __)

    def __call__(self, function: Callable[P, R]) -> Callable[P, R]:
        if isgeneratorfunction(function) or isasyncgenfunction(function):
            raise InvalidConfiguration(f"{function!r} is a generator: use `with guard.call()` inside it")
        run: Any = function

        def call(*args: Any, **kwargs: Any) -> Any:
            with GuardedCall(self._guard, self._priority, self._tenant):
                return run(*args, **kwargs)

        async def call_async(*args: Any, **kwargs: Any) -> Any:
            with GuardedCall(self._guard, self._priority, self._tenant):
                return await run(*args, **kwargs)

        wrapper: Any = call_async if iscoroutinefunction(function) else call
        return wraps(function)(wrapper)
