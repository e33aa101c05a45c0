"""Who is measured, and exactly what is timed for each.

The expressions are written as each library's own documentation writes a check. The loops in `measure` are compiled
around them, so that no wrapper stands between the clock and the library. `key` is the caller's identity: a str, as
requests bring it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from bench import openers
from bench.openers import THREE, Setting

HEADGATE = "headgate"
HEADGATE_ONE = "headgate, one limit"  # beside itself, where it has three


@dataclass(frozen=True, slots=True)
class Contender:
    """One way to ask whether a key may pass."""

    name: str
    algorithm: str
    opened: Callable[[Setting, Any], Any]  # gives the names, or is awaited for them
    one: str
    headers: str = ""  # the check, and what is left until when, as a response's headers say it
    three: str = ""  # three limits on one request
    allowed: str = "answer"  # how the answer is read
    three_allowed: str = ""  # and that of `three`, where it differs
    without_waiting: str = ""  # the same check where `one` would wait for its turn instead of denying
    denies_with: tuple[str, str] | None = None  # the exception that says no: its module and name


def _each(check: str, *, joined: str) -> str:
    """The three limits of a request, as a library asks that takes one limit at a time."""
    return joined.join(check.format(limit=n) for n in THREE)


def _counter_check(prefix: str) -> str:
    return f"await redis.evalsha(sha, 1, f'fastapi-limiter:{prefix}:{{key}}', str(times), str(milliseconds))"


_CHECK_THREE = "limiter.check(" + ", ".join(f"{n}.by(key)" for n in THREE) + ")"
_RATE_LIMIT_EXCEEDED = ("slowapi.errors", "RateLimitExceeded")
_HTTP_EXCEPTION = ("fastapi", "HTTPException")
# Its fastest algorithm, and the one that does what headgate's does: a burst, a steady rate, one atomic script.
_THROTTLED = (("throttled-py", "fixed window", "fixed_window"), ("throttled-py, GCRA", "GCRA", "gcra"))

SYNC = (
    Contender(
        name=HEADGATE,
        algorithm="token bucket",
        opened=openers.headgate,
        one="limiter.check(per_ip.by(key))",
        headers="(d := limiter.check(per_ip.by(key))).allowed, d.remaining, d.retry_after, d.reset_after",
        allowed="answer.allowed",
    ),
    Contender(
        name="limits",
        algorithm="fixed window",
        opened=openers.limits,
        one="limiter.hit(per_ip, key)",
        headers="limiter.hit(per_ip, key), limiter.get_window_stats(per_ip, key)",
    ),
    *(
        Contender(
            name=name,
            algorithm=algorithm,
            opened=partial(openers.throttled_py, using),
            one="per_ip.limit(key)",
            headers="(r := per_ip.limit(key)).limited, r.state",
            allowed="not answer.limited",
        )
        for name, algorithm, using in _THROTTLED
    ),
    Contender(
        name="pyrate-limiter",
        algorithm="GCRA",
        opened=openers.pyrate_limiter,
        one="per_ip.try_acquire(key)",
        without_waiting="per_ip.try_acquire(key, blocking=False)",
    ),
    Contender(
        name="slowapi",
        algorithm="fixed window",
        opened=openers.slowapi,
        one="one(request_of(key))",
        allowed="answer is None",
        denies_with=_RATE_LIMIT_EXCEEDED,
    ),
)

ASYNC = (
    Contender(
        name=HEADGATE,
        algorithm="token bucket",
        opened=openers.headgate_async,
        one="await limiter.check(per_ip.by(key))",
        three=f"await {_CHECK_THREE}",
        allowed="answer.allowed",
    ),
    Contender(
        name="limits",
        algorithm="fixed window",
        opened=openers.limits_async,
        one="await limiter.hit(per_ip, key)",
        three=_each("await limiter.hit({limit}, key)", joined=" and "),
    ),
    *(
        Contender(
            name=name,
            algorithm=algorithm,
            opened=partial(openers.throttled_py_async, using),
            one="await per_ip.limit(key)",
            three=_each("(await {limit}.limit(key)).limited", joined=" or "),
            allowed="not answer.limited",
            three_allowed="not answer",
        )
        for name, algorithm, using in _THROTTLED
    ),
    Contender(
        name="pyrate-limiter",
        algorithm="GCRA",
        opened=openers.pyrate_limiter_async,
        one="await per_ip.try_acquire_async(key, blocking=False)",
        three=_each("await {limit}.try_acquire_async(key, blocking=False)", joined=" and "),
    ),
    Contender(
        name="fastapi-limiter 0.1",
        algorithm="fixed window",
        opened=openers.counter_script,
        one=_counter_check("per_ip"),
        three=" or ".join(_counter_check(n) for n in THREE),
        allowed="answer == 0",
    ),
    Contender(
        name="fastapi-limiter 0.2",
        algorithm="GCRA",
        opened=openers.fastapi_limiter,
        one="await per_ip(request_of(key), response)",
        three=_each("await {limit}(request_of(key), response)", joined=" or "),
        allowed="answer is None",
        denies_with=_HTTP_EXCEPTION,
    ),
    Contender(
        name="slowapi",
        algorithm="fixed window",
        opened=openers.slowapi_async,
        # It never gives the loop away: without this turn, the callers whom it keeps waiting are not seen.
        one="await its_turn(0) or await one(request_of(key))",
        three="await its_turn(0) or await three(request_of(key))",
        allowed="answer is None",
        denies_with=_RATE_LIMIT_EXCEEDED,
    ),
)
