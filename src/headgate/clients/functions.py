"""Functions that call an API with any library: a decorator that paces and retries them."""

from __future__ import annotations

from functools import wraps
from inspect import iscoroutinefunction
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from headgate.clients.client import Outgoing, PoliteClient, Reply
from headgate.clients.drivers import run, run_async
from headgate.errors import InvalidConfiguration

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Unpack

    from headgate.clients.client import ClientOptions

__all__ = ["polite", "read_response"]

P = ParamSpec("P")
R = TypeVar("R")


def polite(
    host: str,
    *,
    method: str = "POST",
    path: str = "/",
    read: Callable[[Any], tuple[int, Any] | None] | None = None,
    client: PoliteClient | None = None,
    **options: Unpack[ClientOptions],
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """A decorator for functions that send one request to `host`, synchronous or not.

    Results and exceptions that look like responses, with a status and headers, are read as such; `read` extracts both
    from anything else, and returns None if there is nothing to read. Only calls with an idempotent `method` are
    repeated: the default, POST, is not.

    >>> from headgate.clients import Throttle
    >>> from headgate.testing import FakeClock
    >>> clock = FakeClock()
    >>> @polite("geocoder", clock=clock, throttle=Throttle("1/second", clock=clock))
    ... def locate(place):
    ...     return f"{place} at {clock.now_us() // 1_000_000} s"
    >>> locate("Berlin"), locate("Paris")
    ('Berlin at 0 s', 'Paris at 1 s')
    """
    if not isinstance(host, str):
        raise InvalidConfiguration(f'host {host!r} is not a text: write @polite("api.example.com")')
    state = PoliteClient(**options) if client is None else client
    outgoing = Outgoing(method, host, path)
    read = read_response if read is None else read

    def reply_to(result: Any) -> Reply:
        status, headers = read(result) or (0, ())
        return Reply(status, headers, result)

    def reply_to_error(error: Exception) -> Reply:
        reply = reply_to(error)
        if reply.status == 0:
            raise error
        return reply._replace(native=_Raised(error))

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        call: Any = function

        @wraps(function)
        def wrapper(*args: P.args, **kwargs: P.kwargs) -> Any:
            def send() -> Reply:
                try:
                    return reply_to(call(*args, **kwargs))
                except Exception as error:
                    return reply_to_error(error)

            return _unwrap(run(state, state.send(outgoing), send, _close))

        @wraps(function)
        async def async_wrapper(*args: P.args, **kwargs: P.kwargs) -> Any:
            async def send() -> Reply:
                try:
                    return reply_to(await call(*args, **kwargs))
                except Exception as error:
                    return reply_to_error(error)

            return _unwrap(await run_async(state, state.send(outgoing), send, _close))

        chosen: Any = async_wrapper if iscoroutinefunction(function) else wrapper
        return chosen  # type: ignore[no-any-return]

    return decorate


def read_response(result: Any) -> tuple[int, Any] | None:
    """The status and headers of a response of any library, or of an exception that has one; None for anything else."""
    response = getattr(result, "response", None)
    result = result if response is None else response  # those of requests are false if they report an error
    for name in ("status_code", "status", "code"):
        status = getattr(result, name, None)
        headers = getattr(result, "headers", None)
        if isinstance(status, int) and not isinstance(status, bool) and hasattr(headers, "items"):
            return status, headers
    return None


class _Raised:
    """An exception that is a response, kept until the flow has decided whether the call is repeated."""

    def __init__(self, error: Exception) -> None:
        self.error = error

    def close(self) -> None:
        _close(getattr(self.error, "response", None) or self.error)


def _unwrap(reply: Reply) -> Any:
    if isinstance(reply.native, _Raised):
        raise reply.native.error
    return reply.native


def _close(native: Any) -> Any:
    close = getattr(native, "close", None)
    return close() if callable(close) else None
