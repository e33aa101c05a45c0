"""Every value that cannot mean anything is refused before anything is touched, by a message that names the value and
the remedy. Each row of the tables is a call and the whole message that it gets."""

from __future__ import annotations

import asyncio
import inspect
import math
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest

import headgate
from headgate import (
    AsyncLimiter,
    HeadgateError,
    InvalidConfiguration,
    InvalidCost,
    InvalidInput,
    InvalidKey,
    InvalidLimit,
    Limit,
    Limiter,
)
from headgate.testing import FakeClock

if TYPE_CHECKING:
    from collections.abc import Callable

SECOND = timedelta(seconds=1)
HOUR = timedelta(hours=1)
NOBODY = "redis://127.0.0.1:1/0"
"""Nobody listens there: whoever so much as tries to connect gets a StoreError instead of an InvalidInput."""

rate = Limit(5, HOUR, name="rate")
room = Limit(5, HOUR, algorithm="concurrency", name="room")
ada, seat = rate.by("ada"), room.by("ada")

ALGORITHMS = "token_bucket, gcra, leaky_bucket, fixed_window, sliding_window, sliding_log, concurrency"
SCHEMES = "memory://, redis://, rediss://, unix://, redis+cluster://, rediss+cluster://, redis+sentinel://, rediss+sentinel://"


def message_of(refused: pytest.ExceptionInfo[BaseException]) -> str:
    return str(refused.value)


# Limits

WHOLE = "is not a whole number; give an int of at least 1"
NOTHING = "lets nothing pass; it must be at least 1"
NAME = "use 1 to 100 printable ASCII characters, as it appears in headers"
INEXACT = (
    "beyond 2**53, where they stop being exact; use a smaller quota or burst, or a quota that divides the period's "
    "microseconds"
)

IMPOSSIBLE_LIMITS: list[tuple[Callable[[], Limit], str]] = [
    *[
        (lambda quota=quota: Limit(quota, SECOND), f"quota {quota!r} {WHOLE}")
        for quota in (1.0, 1.5, True, None, "5", b"5", math.nan, math.inf, [5])
    ],
    *[(lambda quota=quota: Limit(quota, SECOND), f"quota {quota} {NOTHING}") for quota in (0, -1, -(10**30))],
    *[
        (lambda burst=burst: Limit(5, SECOND, burst=burst), f"burst {burst!r} {WHOLE}")
        for burst in (1.0, True, "5", math.nan)
    ],
    *[(lambda burst=burst: Limit(5, SECOND, burst=burst), f"burst {burst} {NOTHING}") for burst in (0, -1)],
    *[
        (
            lambda period=period: Limit(5, period),
            f"period {period!r} is not a timedelta; {remedy}",
        )
        for period, remedy in (
            (60, "write timedelta(seconds=60) if it is seconds"),
            (60.0, "write timedelta(seconds=60.0) if it is seconds"),
            ("60", "write timedelta(seconds=60) if it is seconds"),
            ("minute", 'write timedelta(minutes=1), or the whole limit in words: Limit.parse("10/minute")'),
            ("Hours", 'write timedelta(hours=1), or the whole limit in words: Limit.parse("10/hour")'),
            ("fortnight", 'write it like timedelta(minutes=1), or the whole limit in words: Limit.parse("10/minute")'),
            (True, "write it like timedelta(minutes=1)"),
            (math.nan, "write it like timedelta(minutes=1)"),
            (None, "write it like timedelta(minutes=1)"),
        )
    ],
    (lambda: Limit(5, timedelta(0)), "period 0:00:00 is not positive; the shortest is one microsecond"),
    (
        lambda: Limit(5, timedelta(seconds=-1)),
        "period -1 day, 23:59:59 is not positive; the shortest is one microsecond",
    ),
    (
        lambda: Limit(5, timedelta(days=3661)),
        "period 3661 days, 0:00:00 is longer than ten years, the longest that is counted exactly",
    ),
    *[
        (
            lambda algorithm=algorithm: Limit(5, SECOND, algorithm=algorithm),
            f"unknown algorithm {algorithm!r}; did you mean {meant!r}?",
        )
        for algorithm, meant in (
            ("token-bucket", "token_bucket"),
            ("TOKEN_BUCKET", "token_bucket"),
            ("gcraa", "gcra"),
            ("slidingwindow", "sliding_window"),
        )
    ],
    *[
        (
            lambda algorithm=algorithm: Limit(5, SECOND, algorithm=algorithm),
            f"unknown algorithm {algorithm!r}; known are {ALGORITHMS}",
        )
        for algorithm in ("", "xyz", None, 5)
    ],
    (
        lambda: Limit(5, SECOND, burst=6, algorithm="fixed_window"),
        (
            "burst 6 means nothing to fixed_window, which lets 5 pass at once; leave it out, "
            "or use token_bucket, gcra or leaky_bucket"
        ),
    ),
    *[
        (lambda name=name: Limit(5, SECOND, name=name), f"limit name {name!r}: {NAME}")
        for name in ("", "x" * 101, "ü", "a\n", "\0", "\ud800", None, 5)
    ],
]


@pytest.mark.parametrize(("make", "message"), IMPOSSIBLE_LIMITS, ids=[message for _, message in IMPOSSIBLE_LIMITS])
def test_a_limit_that_cannot_be_is_refused_when_it_is_made(make: Callable[[], Limit], message: str) -> None:
    with pytest.raises(InvalidLimit) as refused:
        make()
    assert message_of(refused) == message


@pytest.mark.parametrize("algorithm", ALGORITHMS.split(", "))
def test_a_limit_beyond_exactness_is_refused_and_says_how_to_come_back(algorithm: str) -> None:
    with pytest.raises(InvalidLimit) as refused:
        Limit(2**53, timedelta(hours=1), algorithm=algorithm, name="wide")
    assert message_of(refused).startswith("limit 'wide' (9007199254740992 ")
    assert message_of(refused).endswith(INEXACT)


def test_a_limit_that_takes_for_ever_to_fill_is_refused() -> None:
    with pytest.raises(InvalidLimit) as refused:
        Limit(1, timedelta(days=365), burst=11, name="slow")
    assert message_of(refused).endswith("takes more than ten years to fill; use a smaller burst or a faster rate")
    assert Limit(1, timedelta(days=365), burst=10).capacity == 10


# The grammar

FORM = 'write it like "10/minute", "5 per 30 seconds", "1000/minute, burst 200" or "3/2h, sliding_window"'
UNITS = "microsecond, millisecond, second, minute, hour, day, week"
SEVERAL = "where one is expected; Limit.parse_many reads several, separated by semicolons"
READABLE: dict[str, tuple[int, timedelta, int, str]] = {
    "10/minute": (10, timedelta(minutes=1), 10, "token_bucket"),
    "10/m": (10, timedelta(minutes=1), 10, "token_bucket"),
    " 10 / MINUTE ": (10, timedelta(minutes=1), 10, "token_bucket"),
    "10\n/\tminutes\n": (10, timedelta(minutes=1), 10, "token_bucket"),
    "10 per minute": (10, timedelta(minutes=1), 10, "token_bucket"),
    "10 Per Min": (10, timedelta(minutes=1), 10, "token_bucket"),
    "5 per 30 seconds": (5, timedelta(seconds=30), 5, "token_bucket"),
    "3/2h": (3, timedelta(hours=2), 3, "token_bucket"),
    "3/2 hrs": (3, timedelta(hours=2), 3, "token_bucket"),
    "1/us": (1, timedelta(microseconds=1), 1, "token_bucket"),
    "5/100ms": (5, timedelta(milliseconds=100), 5, "token_bucket"),
    "5/sec": (5, timedelta(seconds=1), 5, "token_bucket"),
    "5/d": (5, timedelta(days=1), 5, "token_bucket"),
    "5/2 weeks": (5, timedelta(weeks=2), 5, "token_bucket"),
    "1_000_000/day": (1_000_000, timedelta(days=1), 1_000_000, "token_bucket"),
    "1000/minute, burst 200": (1000, timedelta(minutes=1), 200, "token_bucket"),
    "1000/minute burst 1_000": (1000, timedelta(minutes=1), 1000, "token_bucket"),
    "1000/minute,BURST 2000": (1000, timedelta(minutes=1), 2000, "token_bucket"),
    "10/minute, sliding_window": (10, timedelta(minutes=1), 10, "sliding_window"),
    "10/minute Fixed_Window": (10, timedelta(minutes=1), 10, "fixed_window"),
    "10/minute, gcra, burst 5": (10, timedelta(minutes=1), 5, "gcra"),
    "10/minute, burst 5, leaky_bucket": (10, timedelta(minutes=1), 5, "leaky_bucket"),
    "10 per day, sliding_log": (10, timedelta(days=1), 10, "sliding_log"),
    "5/60s, concurrency": (5, timedelta(minutes=1), 5, "concurrency"),
}
UNREADABLE: dict[Any, str] = {
    **{
        text: f"cannot read the limit {text!r}: {FORM}"
        for text in ("", " ", "10", "/minute", "10/", "minute", "ten/minute", "10 perminute", "10per minute")
    },
    **{
        text: f"cannot read the limit {text!r}: {FORM}"
        for text in ("-1/minute", "+1/minute", "1.5/minute", "1e3/minute", "10//minute", "0x10/minute")
    },
    **{text: f"{text!r} is not the text of a limit: {FORM}" for text in (None, 5, b"10/minute", 1.5)},
    **{
        f"{digits}/minute": f"'{digits}/minute': {digits!r} is not a plain number; write it like 1000 or 1_000"
        for digits in ("010", "1_00", "_1", "1__000", "1_0000", "٣")
    },
    "1,000/minute": "cannot read the limit '1,000/minute': write the number without commas, \"1000/minute\"",
    "5/minute; 100/hour": f"'5/minute; 100/hour' holds 2 limits {SEVERAL}: \"5/minute; 100/hour\"",
    "5/minute, burst 2, 9/hour": f"'5/minute, burst 2, 9/hour': cannot read '9/hour'; {FORM}",
    "5/minute, 100/hour": f"'5/minute, 100/hour' holds 2 limits {SEVERAL}: \"5/minute; 100/hour\"",
    "5/minute|100 per day|9/s": f"'5/minute|100 per day|9/s' holds 3 limits {SEVERAL}: \"5/minute; 100 per day; 9/s\"",
    "10/fortnight": f"'10/fortnight': unknown unit 'fortnight'; known are {UNITS}",
    "10/minit": "'10/minit': unknown unit 'minit'; did you mean 'minute'?",
    "10/dya": "'10/dya': unknown unit 'dya'; did you mean 'day'?",
    "10/month": "'10/month': a month has no fixed length; say how many days, like \"1000/30 days\"",
    "10/2 years": "'10/2 years': a years has no fixed length; say how many days, like \"1000/30 days\"",
    "10/1.5h": "'10/1.5h': a period is a whole number of units; write 1.5 h in a smaller unit",
    "10/9999999999 weeks": "'10/9999999999 weeks': the period 9999999999 weeks is too long; at most ten years",
    "10/0 minutes": "period 0:00:00 is not positive; the shortest is one microsecond",
    "0/minute": "quota 0 lets nothing pass; it must be at least 1",
    "10/minute, burst 0": "burst 0 lets nothing pass; it must be at least 1",
    "10/minute/second": f"'10/minute/second': cannot read '/second'; {FORM}",
    "10/minute; burst 5": f"'10/minute; burst 5': cannot read '; burst 5'; {FORM}",
    "10/minute, burst": f"'10/minute, burst': cannot read 'burst'; {FORM}",
    "10/minute, burst x": f"'10/minute, burst x': cannot read 'burst x'; {FORM}",
    "10/minute, burst -5": f"'10/minute, burst -5': cannot read 'burst -5'; {FORM}",
    "10/minute, burst=5": f"'10/minute, burst=5': cannot read 'burst=5'; {FORM}",
    "10/minute\0": f"'10/minute\\x00': cannot read '\\x00'; {FORM}",
    "10/minute,": f"'10/minute,': cannot read ','; {FORM}",
    "10/minute, burst 5 burst 6": "'10/minute, burst 5 burst 6': burst is given twice; keep one",
    "10/minute, gcra, gcra": "'10/minute, gcra, gcra': two algorithms, 'gcra' and 'gcra'; keep one",
    "10/minute, sliding_windw": "unknown algorithm 'sliding_windw'; did you mean 'sliding_window'?",
    "10/minute, foo": f"unknown algorithm 'foo'; known are {ALGORITHMS}",
    f"{'9' * 30}/s": f"'{'9' * 30}/s': {'9' * 30} is beyond 2**53, where counting stops being exact",
}


@pytest.mark.parametrize(("text", "meaning"), READABLE.items(), ids=READABLE)
def test_a_limit_is_read_as_it_is_meant(text: str, meaning: tuple[int, timedelta, int, str]) -> None:
    limit = Limit.parse(text, name="x")
    assert (limit.quota, limit.period, limit.burst, limit.algorithm) == meaning
    assert limit.name == "x"


@pytest.mark.parametrize(("text", "message"), UNREADABLE.items(), ids=map(ascii, UNREADABLE))
def test_a_text_that_is_no_limit_is_told_what_is(text: Any, message: str) -> None:
    with pytest.raises(InvalidLimit) as refused:
        Limit.parse(text)
    assert message_of(refused) == message


def test_several_limits_are_read_from_one_text() -> None:
    assert Limit.parse_many("5/minute; 100/hour, burst 20; 1000/day", name="login") == (
        Limit(5, timedelta(minutes=1), name="login 5/minute"),
        Limit(100, timedelta(hours=1), burst=20, name="login 100/hour, burst 20"),
        Limit(1000, timedelta(days=1), name="login 1000/day"),
    )
    assert Limit.parse_many("5/minute;", name="login", algorithm="gcra") == (
        Limit(5, timedelta(minutes=1), algorithm="gcra", name="login"),
    )


@pytest.mark.parametrize("text", [";", "5/minute;;9/hour", "; 5/minute"])
def test_an_empty_limit_among_several_is_refused(text: str) -> None:
    with pytest.raises(InvalidLimit, match="there is no limit between two semicolons"):
        Limit.parse_many(text)


@pytest.mark.parametrize("text", [None, 5, ["5/minute"]])
def test_several_limits_are_read_from_text_only(text: Any) -> None:
    with pytest.raises(InvalidLimit, match="is not the text of a limit"):
        Limit.parse_many(text)


@pytest.mark.parametrize("digits", [30, 5_000])
@pytest.mark.parametrize("text", ["{}/s", "1/{} s", "1/s, burst {}"], ids=["quota", "period", "burst"])
def test_no_number_is_too_long_to_be_refused_properly(text: str, digits: int) -> None:
    """Python itself refuses to read 5,000 digits, with an error that is none of ours."""
    with pytest.raises(InvalidLimit):
        Limit.parse(text.format("9" * digits))


def test_the_digits_of_a_period_are_plain_ones_too() -> None:
    with pytest.raises(InvalidLimit):
        Limit.parse("10/\uff11minute")


def test_an_algorithm_is_said_once() -> None:
    assert Limit.parse("10/minute", algorithm="gcra") == Limit.parse("10/minute, GCRA", algorithm="gcra")
    with pytest.raises(InvalidLimit) as refused:
        Limit.parse("10/minute, gcra", algorithm="sliding_log")
    assert message_of(refused) == "'10/minute, gcra' names 'gcra', the caller 'sliding_log'; keep one"


# Identities


@pytest.mark.parametrize("part", [1.5, True, b"x", (), ["ada"], math.nan, object])
def test_what_is_neither_text_nor_number_identifies_nobody(part: Any) -> None:
    message = f"{part!r} cannot identify a client: by() takes text and whole numbers"
    for parts in ((part,), ("tenant", part), (part, "user")):
        with pytest.raises(InvalidKey) as refused:
            rate.by(*parts)
        assert message_of(refused) == message


def test_nobody_is_not_an_identity() -> None:
    """The commonest mistake of all: a user who is not logged in, counted together with all others like them."""
    with pytest.raises(InvalidKey) as refused:
        rate.by(None)  # type: ignore[arg-type]
    assert message_of(refused) == (
        "None cannot identify a client: by() takes text and whole numbers; "
        "decide what callers without an identity are counted by"
    )


# Calls

NO_KEY = "no key given: pass a limit and the client that it counts, like check(limit.by(client))"
AN_ID = "use a text of 1 to 128 printable characters"
NO_LEASES = "limit 'rate' is a token_bucket: only concurrency limits have leases"
COSTS: list[Any] = [-1, -(10**30), 1.0, 1.5, True, False, None, "1", b"1", math.nan, math.inf, -math.inf, [1]]
REFUSED_CALLS: list[tuple[Callable[[Any], Any], type[InvalidInput], str]] = [
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
CALL_IDS = [f"{number}: {message!a}" for number, (_, _, message) in enumerate(REFUSED_CALLS)]


def carry_out(call: Callable[[Any], Any], limiter: Limiter | AsyncLimiter) -> Any:
    """The call's answer, for both kinds of limiter; one that waits for a store for too long fails."""

    async def awaited() -> Any:
        async with asyncio.timeout(5):
            answer = call(limiter)
            return await answer if inspect.isawaitable(answer) else answer

    return call(limiter) if isinstance(limiter, Limiter) else asyncio.run(awaited())


@pytest.mark.parametrize(("call", "error", "message"), REFUSED_CALLS, ids=CALL_IDS)
@pytest.mark.parametrize("url", ["memory://", NOBODY], ids=["memory", "redis"])
@pytest.mark.parametrize("kind", [Limiter, AsyncLimiter])
def test_a_call_that_cannot_mean_anything_is_refused_before_anything_is_touched(
    kind: type[Limiter | AsyncLimiter], url: str, call: Callable[[Any], Any], error: type[InvalidInput], message: str
) -> None:
    limiter = kind(url, clock=FakeClock())
    with pytest.raises(error) as refused:
        carry_out(call, limiter)
    assert message_of(refused) == message
    if url == "memory://":
        assert limiter.stats.keys == 0


@pytest.mark.parametrize("kind", [Limiter, AsyncLimiter])
def test_a_hold_is_refused_like_the_entering_that_it_is(kind: type[Limiter | AsyncLimiter]) -> None:
    async def hold(limiter: AsyncLimiter) -> None:
        async with limiter.hold(seat, cost=-1):
            raise AssertionError("the block must not run")

    def hold_sync(limiter: Limiter) -> None:
        with limiter.hold(seat, cost=-1):
            raise AssertionError("the block must not run")

    with pytest.raises(InvalidCost, match=r"^cost -1 is not a whole number >= 0$"):
        carry_out(hold if kind is AsyncLimiter else hold_sync, kind(NOBODY))


def test_a_decision_is_what_a_refund_is_of() -> None:
    with pytest.raises(InvalidInput, match="5"):
        Limiter().refund(ada, 1, of=5)  # type: ignore[arg-type]


def test_a_refused_call_changes_nothing_that_was_there() -> None:
    limiter = Limiter(clock=FakeClock())
    limiter.check(ada, cost=2)
    limiter.enter(seat, id="a")
    before = limiter.peek(ada, seat).verdicts, limiter.stats
    for call, error, _ in REFUSED_CALLS:
        with pytest.raises(error):
            call(limiter)
    assert (limiter.peek(ada, seat).verdicts, limiter.stats) == before


# Limiters

BUDGET = "give the seconds that the store may take, above 0 and at most 60"
REFUSED_LIMITERS: list[tuple[Any, dict[str, Any], str]] = [
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
        for url in ("memory://", NOBODY)
        for budget in (0, -1, 61, math.nan, math.inf, True, "1")
    ],
    *[
        ("memory://", {"max_keys": number}, f"max_keys {number!r} is not a whole number of at least 1")
        for number in (0, -1, 1.5, True, None, "5")
    ],
]


@pytest.mark.parametrize(("url", "options", "message"), REFUSED_LIMITERS, ids=[row[2] for row in REFUSED_LIMITERS])
@pytest.mark.parametrize("kind", [Limiter, AsyncLimiter])
def test_a_limiter_that_cannot_be_is_refused_when_it_is_made(
    kind: type[Limiter | AsyncLimiter], url: Any, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(InvalidConfiguration) as refused:
        kind(url, **options)
    assert message_of(refused) == message


@pytest.mark.parametrize("url", [None, 5, b"memory://", object()])
def test_a_store_is_a_url_or_a_client_of_the_right_kind(url: Any) -> None:
    with pytest.raises(InvalidConfiguration) as refused:
        Limiter(url)
    assert message_of(refused) == f"{url!r} is neither a URL nor a redis.Redis or RedisCluster client"
    with pytest.raises(InvalidConfiguration) as refused:
        AsyncLimiter(url)
    assert message_of(refused) == f"{url!r} is neither a URL nor a redis.asyncio.Redis or RedisCluster client"


@pytest.mark.parametrize("url", ["memory://", NOBODY], ids=["memory", "redis"])
@pytest.mark.parametrize("clock", [5, "now", lambda: 0])
def test_what_tells_no_time_is_no_clock(url: str, clock: Any) -> None:
    with pytest.raises(InvalidConfiguration, match="clock"):
        Limiter(url, clock=clock)


@pytest.mark.parametrize(
    "url",
    [
        *["redis://h/?foo=1", "redis://h?foo=1", "redis://h:6379?foo=1", "redis+cluster://h?foo=1"],
        *["unix:///tmp/socket?foo=1", "redis+sentinel://h/name?foo=1"],
    ],
)
def test_an_option_that_is_not_known_is_not_ignored(url: str) -> None:
    option = url.partition("?")[2].partition("=")[0]
    with pytest.raises(InvalidConfiguration, match=f"^unknown option '{option}' in the Redis URL; known are host, "):
        Limiter(url)


@pytest.mark.parametrize(
    ("option", "remedy"),
    [
        ("socket_timeout=5", "leave it out, and give the limiter budget=, the seconds that Redis may take"),
        ("socket_connect_timeout=5", "leave it out, and give the limiter budget=, the seconds that Redis may take"),
        ("max_connections=50", "leave it out: requests share one connection"),
    ],
)
def test_an_option_of_other_clients_is_told_its_place_here(option: str, remedy: str) -> None:
    name = option.partition("=")[0]
    with pytest.raises(InvalidConfiguration) as told:
        Limiter(f"redis://h/0?{option}")
    assert str(told.value) == f"unknown option {name!r} in the Redis URL; {remedy}"


@pytest.mark.parametrize(
    "url",
    [
        *["redis://h/x", "redis://h/0x1", "redis://h/-1", "redis://h/?db=x", "redis+sentinel://h/name/x"],
        *["unix://", "rediss://h/?ssl_cert_reqs=bogus", "redis://a..b", "redis+cluster://,"],
    ],
)
def test_a_url_that_leads_nowhere_is_refused_when_it_is_read(url: str) -> None:
    """Or it would lead to another database, another server, or an error that only a request finds."""
    with pytest.raises(InvalidConfiguration):
        Limiter(url)


@pytest.mark.parametrize(
    ("url", "options"),
    [
        ("redis://h:6380?db=3", {"host": "h", "port": 6380, "db": 3}),
        ("redis://h:6380/3", {"host": "h", "port": 6380, "db": 3}),
        ("redis://[::1]:6380/3", {"host": "::1", "port": 6380, "db": 3}),
        ("redis://u:p%40%2F@h", {"host": "h", "username": "u", "password": "p@/"}),
        ("redis://h?client_name=me", {"host": "h", "client_name": "me"}),
        ("redis+cluster://u:p@h:7000,g:7001", {"host": "h", "port": 7000, "username": "u", "password": "p"}),
        ("redis+sentinel://u:p@h/name/3", {"db": 3, "username": "u", "password": "p"}),
        ("unix://u:p@/tmp/socket?db=3", {"path": "/tmp/socket", "db": 3, "username": "u", "password": "p"}),
    ],
)
def test_a_url_is_read_in_full(url: str, options: dict[str, Any]) -> None:
    found = Limiter(url).engine.store.factory.options
    assert {name: found.get(name) for name in options} == options


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: FakeClock(-1), "a clock cannot stand at -1: give whole microseconds from 0 to 2**52"),
        (lambda: FakeClock(2**52), f"a clock cannot stand at {2**52}: give whole microseconds from 0 to 2**52"),
        (lambda: FakeClock(1.5), "a clock cannot stand at 1.5: give whole microseconds from 0 to 2**52"),
        (lambda: FakeClock().advance(-1), "a clock cannot stand at -1000000: give whole microseconds from 0 to 2**52"),
        (lambda: FakeClock().advance("60"), "a clock cannot move by '60': give seconds, or a timedelta"),  # type: ignore[arg-type]
        (lambda: FakeClock().advance(math.inf), "a clock cannot move by inf: give seconds, or a timedelta"),
        (lambda: FakeClock().advance(True), "a clock cannot move by True: give seconds, or a timedelta"),
        (lambda: FakeClock().set_us(True), "a clock cannot stand at True: give whole microseconds from 0 to 2**52"),
    ],
)
def test_a_fake_clock_shows_only_times_that_can_be(call: Callable[[], Any], message: str) -> None:
    with pytest.raises(InvalidInput) as refused:
        call()
    assert message_of(refused) == message


# The tree


def test_all_refusals_are_value_errors_and_all_errors_are_headgates() -> None:
    errors = [made for name in headgate.__all__ if isinstance(made := getattr(headgate, name), type)]
    errors = [made for made in errors if issubclass(made, Exception)]
    assert len(errors) == 12
    assert all(issubclass(made, HeadgateError) for made in errors)
    assert all(issubclass(made, ValueError) == issubclass(made, InvalidInput) for made in errors)
    assert all(made.__doc__ for made in errors)
