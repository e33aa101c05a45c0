"""Validation of the limiters' options and calls, before the store is used.

Each row of a table is a call and its whole error message.
"""

from __future__ import annotations

import asyncio
import inspect
import math
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest

from headgate import AsyncLimiter, InvalidConfiguration, InvalidCost, InvalidInput, InvalidKey, Limit, Limiter
from headgate.testing import FakeClock

if TYPE_CHECKING:
    from collections.abc import Callable


SECOND = timedelta(seconds=1)
HOUR = timedelta(hours=1)
UNREACHABLE = "redis://127.0.0.1:1/0"
"""No server listens there: an attempt to connect raises a StoreError instead of an InvalidInput."""
rate = Limit(5, HOUR, name="rate")
room = Limit(5, HOUR, algorithm="concurrency", name="room")
ada, seat = rate.by("ada"), room.by("ada")
SCHEMES = (
    "memory://, redis://, rediss://, unix://, redis+cluster://, rediss+cluster://, "
    "redis+sentinel://, rediss+sentinel://, sharded://"
)
NO_KEY = "no key given: pass a limit and the client that it counts, like check(limit.by(client))"
AN_ID = "use a text of 1 to 128 printable characters"
NO_LEASES = "limit 'rate' is a token_bucket: only concurrency limits have leases"
COSTS: list[Any] = [-1, -(10**30), 1.0, 1.5, True, False, None, "1", b"1", math.nan, math.inf, -math.inf, [1]]
INVALID_CALLS: list[tuple[Callable[[Any], Any], type[InvalidInput], str]] = [
    *[
        (lambda it, cost=cost: it.check(ada, cost=cost), InvalidCost, f"cost {cost!r} is not a whole number >= 0")
        for cost in COSTS
    ],
    *[
        (lambda it, cost=cost: it.refund(ada, cost), InvalidCost, f"amount {cost!r} is not a whole number >= 0")
        for cost in COSTS
    ],
    (lambda it: it.check(ada, seat, cost=-1), InvalidCost, "cost -1 is not a whole number >= 0"),
    (lambda it: it.check(rate, cost=-1), InvalidCost, "cost -1 is not a whole number >= 0"),
    (
        lambda it: it.check(ada, seat, cost=(1, -1)),
        InvalidCost,
        "cost -1 among (1, -1) is not a whole number >= 0",
    ),
    (
        lambda it: it.check(ada, seat, cost=(1, 2.0)),
        InvalidCost,
        "cost 2.0 among (1, 2.0) is not a whole number >= 0",
    ),
    (
        lambda it: it.check(ada, seat, cost=(1, 2, 3)),
        InvalidCost,
        "3 costs (1, 2, 3) for 2 keys: give one for all, or one for each",
    ),
    (lambda it: it.check(ada, cost=()), InvalidCost, "0 costs () for 1 keys: give one for all, or one for each"),
    (lambda it: it.acquire(ada, cost=1.5), InvalidCost, "cost 1.5 is not a whole number >= 0"),
    (lambda it: it.enter(seat, cost=True), InvalidCost, "cost True is not a whole number >= 0"),
    *[
        (lambda it, method=method: getattr(it, method)(), InvalidKey, NO_KEY)
        for method in ("check", "peek", "acquire", "enter", "reset")
    ],
    *[
        (
            lambda it, method=method, key=key: getattr(it, method)(key),
            InvalidKey,
            f"{key!r} is not a key: make one with limit.by(...)",
        )
        for method in ("check", "peek", "acquire", "enter", "reset")
        for key in ("ada", None, 5, ("a", "b"))
    ],
    (lambda it: it.check(ada, "bob"), InvalidKey, "'bob' is not a key: make one with limit.by(...)"),
    (lambda it: it.refund("ada", 1), InvalidKey, "'ada' is not a key: make one with limit.by(...)"),
    (lambda it: it.renew("ada", id="a"), InvalidKey, "'ada' is not a key: make one with limit.by(...)"),
    (lambda it: it.leave(None, id="a"), InvalidKey, "None is not a key: make one with limit.by(...)"),
    *[
        (
            lambda it, method=method, keys=keys: getattr(it, method)(*keys),
            InvalidKey,
            f"two of the limits {names} would share one counter: give each limit its own name=",
        )
        for method in ("check", "peek", "acquire")
        for keys, names in (
            ((ada, ada), "'rate', 'rate'"),
            ((ada, seat, rate.by("ada")), "'rate', 'room', 'rate'"),
            ((ada, Limit(9, SECOND, name="rate").by("ada")), "'rate', 'rate'"),
            ((rate, rate.by()), "'rate', 'rate'"),
        )
    ],
    *[
        (lambda it, call=call, bad=bad: call(it, bad), InvalidKey, f"{what} id {bad!r}: {AN_ID}")
        for what, call in (
            ("check", lambda it, bad: it.enter(seat, id=bad)),
            ("check", lambda it, bad: it.check(ada, seat, id=bad)),
            ("check", lambda it, bad: it.check(ada, id=bad)),
            ("lease", lambda it, bad: it.renew(seat, id=bad)),
            ("lease", lambda it, bad: it.leave(seat, id=bad)),
            ("refund", lambda it, bad: it.refund(ada, 1, id=bad)),
        )
        for bad in ("", "x" * 129, "a\n", "\0", "\ud800", 5, b"a")
    ],
    (lambda it: it.renew(ada, id="a"), InvalidKey, NO_LEASES),
    (lambda it: it.leave(ada, id="a"), InvalidKey, NO_LEASES),
    (
        lambda it: it.refund(seat, 1),
        InvalidKey,
        "limit 'room' counts leases: give one back with leave(key, id=...)",
    ),
    *[
        (
            lambda it, timeout=timeout: it.acquire(ada, timeout=timeout),
            InvalidConfiguration,
            f"timeout {timeout!r} is not a number of seconds >= 0; None waits for ever",
        )
        for timeout in (-1, -0.1, math.nan, -math.inf, "1", [], True)
    ],
]
CALL_IDS = [f"{number}: {message!a}" for number, (_, _, message) in enumerate(INVALID_CALLS)]


def run_call(call: Callable[[Any], Any], limiter: Limiter | AsyncLimiter) -> Any:
    """The call's answer, for both kinds of limiter; one that waits for a store for too long fails."""

    async def awaited() -> Any:
        async with asyncio.timeout(5):
            answer = call(limiter)
            return await answer if inspect.isawaitable(answer) else answer

    return call(limiter) if isinstance(limiter, Limiter) else asyncio.run(awaited())


@pytest.mark.parametrize(("call", "error", "message"), INVALID_CALLS, ids=CALL_IDS)
@pytest.mark.parametrize("url", ["memory://", UNREACHABLE], ids=["memory", "redis"])
@pytest.mark.parametrize("kind", [Limiter, AsyncLimiter])
def test_invalid_call_is_rejected_before_the_store_is_used(
    kind: type[Limiter | AsyncLimiter], url: str, call: Callable[[Any], Any], error: type[InvalidInput], message: str
) -> None:
    limiter = kind(url, clock=FakeClock())
    with pytest.raises(error) as raised:
        run_call(call, limiter)
    assert str(raised.value) == message
    if url == "memory://":
        assert limiter.stats.keys == 0


@pytest.mark.parametrize("kind", [Limiter, AsyncLimiter])
def test_hold_validates_like_enter(kind: type[Limiter | AsyncLimiter]) -> None:
    async def hold(limiter: AsyncLimiter) -> None:
        async with limiter.hold(seat, cost=-1):
            raise AssertionError("the block must not run")

    def hold_sync(limiter: Limiter) -> None:
        with limiter.hold(seat, cost=-1):
            raise AssertionError("the block must not run")

    with pytest.raises(InvalidCost, match=r"^cost -1 is not a whole number >= 0$"):
        run_call(hold if kind is AsyncLimiter else hold_sync, kind(UNREACHABLE))


def test_refund_of_must_be_a_decision() -> None:
    with pytest.raises(InvalidInput, match="5"):
        Limiter().refund(ada, 1, of=5)  # type: ignore[arg-type]


def test_invalid_call_changes_no_state() -> None:
    limiter = Limiter(clock=FakeClock())
    limiter.check(ada, cost=2)
    limiter.enter(seat, id="a")
    before = limiter.peek(ada, seat).verdicts, limiter.stats
    for call, error, _ in INVALID_CALLS:
        with pytest.raises(error):
            call(limiter)
    assert (limiter.peek(ada, seat).verdicts, limiter.stats) == before


BUDGET = "give the seconds that the store may take, above 0 and at most 60"
INVALID_LIMITERS: list[tuple[Any, dict[str, Any], str]] = [
    *[
        (url, {}, f"cannot open the store {url!r}: the URL must start with one of {SCHEMES}")
        for url in ("", "memory", "memory://x", "mem://", "redis", "redis:/", "http://h", "REDIS://h", "redis+x://h")
    ],
    (
        "postgres://user:secret@h/db",
        {},
        f"cannot open the store 'postgres://***@h/db': the URL must start with one of {SCHEMES}",
    ),
    ("redis://h:p", {}, "'h:p' is not a host and port: write host:6379"),
    ("redis://user:secret@h:99999", {}, "'h:99999' is not a host and port: write host:6379"),
    ("redis+cluster://h:7000,h:x", {}, "'h:x' is not a host and port: write host:6379"),
    ("redis+cluster://h/1", {}, "a Redis Cluster has only database 0, not 1"),
    *[
        (url, {}, "a Sentinel URL ends with the name of its primary: redis+sentinel://host:26379/NAME, or /NAME/DB")
        for url in ("redis+sentinel://h", "redis+sentinel://h/", "redis+sentinel://h/?db=1")
    ],
    ("redis://a,b/0", {}, "several hosts in one URL: use redis+cluster:// or redis+sentinel://"),
    *[
        ("memory://", {"namespace": namespace}, f"namespace {namespace!r}: use 1 to 100 printable characters")
        for namespace in ("", "x" * 101, "a\n", "\ud800", None, 5)
    ],
    *[
        ("memory://", {"on_failure": mode}, f"on_failure={mode!r} is unknown; use 'raise', 'open', 'closed' or 'local'")
        for mode in ("opne", "OPEN", "", None, True, ["open"])
    ],
    *[
        (url, {"budget": budget}, f"budget {budget!r}: {BUDGET}")
        for url in ("memory://", UNREACHABLE)
        for budget in (0, -1, 61, math.nan, math.inf, True, "1")
    ],
    *[
        ("memory://", {"max_keys": number}, f"max_keys {number!r} is not a whole number of at least 1")
        for number in (0, -1, 1.5, True, None, "5")
    ],
]


@pytest.mark.parametrize(("url", "options", "message"), INVALID_LIMITERS, ids=[row[2] for row in INVALID_LIMITERS])
@pytest.mark.parametrize("kind", [Limiter, AsyncLimiter])
def test_invalid_limiter_options_are_rejected(
    kind: type[Limiter | AsyncLimiter], url: Any, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(InvalidConfiguration) as raised:
        kind(url, **options)
    assert str(raised.value) == message


@pytest.mark.parametrize("url", [None, 5, b"memory://", object()])
def test_store_must_be_a_url_or_a_client_of_the_same_kind(url: Any) -> None:
    with pytest.raises(InvalidConfiguration) as raised:
        Limiter(url)
    assert str(raised.value) == f"{url!r} is neither a URL nor a redis.Redis or RedisCluster client"
    with pytest.raises(InvalidConfiguration) as raised:
        AsyncLimiter(url)
    assert str(raised.value) == f"{url!r} is neither a URL nor a redis.asyncio.Redis or RedisCluster client"


@pytest.mark.parametrize("url", ["memory://", UNREACHABLE], ids=["memory", "redis"])
@pytest.mark.parametrize("clock", [5, "now", lambda: 0])
def test_invalid_clock_is_rejected(url: str, clock: Any) -> None:
    with pytest.raises(InvalidConfiguration, match="clock"):
        Limiter(url, clock=clock)
