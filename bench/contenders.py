"""The libraries that are compared, with the expression that is timed for each.

Each expression is a check as in the library's documentation. The loops in `timing` are compiled around it, so that no
wrapper is measured. `key` is the identity of the client, a str.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from bench import setups
from bench.setups import THREE, Setting

HEADGATE = "headgate"
HEADGATE_ONE_LIMIT = "headgate, one limit"
HEADGATE_OBSERVED = "headgate, with metrics and decision log"
VARIANTS = (HEADGATE, HEADGATE_ONE_LIMIT, HEADGATE_OBSERVED)


@dataclass(frozen=True, slots=True)
class Contender:
    """A library in one configuration."""

    name: str
    algorithm: str
    setup: Callable[[Setting, Any], Any]  # returns the names that the expressions use, or is awaited for them
    one: str
    headers: str = ""  # the check with the numbers for response headers
    three: str = ""  # three limits on one request
    allowed: str = "answer"  # the boolean result
    three_allowed: str = ""  # of `three`, if different
    without_waiting: str = ""  # the check if `one` would wait instead of denying
    denies_with: tuple[str, str] | None = None  # module and name of the exception for a denial


def _each(check: str, *, joined: str) -> str:
    """Three limits for a library that checks one limit per call."""
    return joined.join(check.format(limit=n) for n in THREE)


def _counter_check(prefix: str) -> str:
    return f"await redis.evalsha(sha, 1, f'fastapi-limiter:{prefix}:{{key}}', str(times), str(milliseconds))"


_CHECK_THREE = "limiter.check(" + ", ".join(f"{n}.by(key)" for n in THREE) + ")"
_RATE_LIMIT_EXCEEDED = ("slowapi.errors", "RateLimitExceeded")
_HTTP_EXCEPTION = ("fastapi", "HTTPException")
# Its fastest algorithm, and the one that is comparable to a token bucket: a burst, a rate, one atomic script.
_THROTTLED = (("throttled-py", "fixed window", "fixed_window"), ("throttled-py, GCRA", "GCRA", "gcra"))

SYNC = (
    Contender(
        name=HEADGATE,
        algorithm="token bucket",
        setup=setups.headgate,
        one="limiter.check(per_ip.by(key))",
        headers="(d := limiter.check(per_ip.by(key))).allowed, d.remaining, d.retry_after, d.reset_after",
        allowed="answer.allowed",
    ),
    Contender(
        name="limits",
        algorithm="fixed window",
        setup=setups.limits,
        one="limiter.hit(per_ip, key)",
        headers="limiter.hit(per_ip, key), limiter.get_window_stats(per_ip, key)",
    ),
    *(
        Contender(
            name=name,
            algorithm=algorithm,
            setup=partial(setups.throttled_py, using),
            one="per_ip.limit(key)",
            headers="(r := per_ip.limit(key)).limited, r.state",
            allowed="not answer.limited",
        )
        for name, algorithm, using in _THROTTLED
    ),
    Contender(
        name="pyrate-limiter",
        algorithm="GCRA",
        setup=setups.pyrate_limiter,
        one="per_ip.try_acquire(key)",
        without_waiting="per_ip.try_acquire(key, blocking=False)",
    ),
    Contender(
        name="slowapi",
        algorithm="fixed window",
        setup=setups.slowapi,
        one="one(request_of(key))",
        allowed="answer is None",
        denies_with=_RATE_LIMIT_EXCEEDED,
    ),
)

ASYNC = (
    Contender(
        name=HEADGATE,
        algorithm="token bucket",
        setup=setups.headgate_async,
        one="await limiter.check(per_ip.by(key))",
        three=f"await {_CHECK_THREE}",
        allowed="answer.allowed",
    ),
    Contender(
        name="limits",
        algorithm="fixed window",
        setup=setups.limits_async,
        one="await limiter.hit(per_ip, key)",
        three=_each("await limiter.hit({limit}, key)", joined=" and "),
    ),
    *(
        Contender(
            name=name,
            algorithm=algorithm,
            setup=partial(setups.throttled_py_async, using),
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
        setup=setups.pyrate_limiter_async,
        one="await per_ip.try_acquire_async(key, blocking=False)",
        three=_each("await {limit}.try_acquire_async(key, blocking=False)", joined=" and "),
    ),
    Contender(
        name="fastapi-limiter 0.1",
        algorithm="fixed window",
        setup=setups.counter_script,
        one=_counter_check("per_ip"),
        three=" or ".join(_counter_check(n) for n in THREE),
        allowed="answer == 0",
    ),
    Contender(
        name="fastapi-limiter 0.2",
        algorithm="GCRA",
        setup=setups.fastapi_limiter,
        one="await per_ip(request_of(key), response)",
        three=_each("await {limit}(request_of(key), response)", joined=" or "),
        allowed="answer is None",
        denies_with=_HTTP_EXCEPTION,
    ),
    Contender(
        name="slowapi",
        algorithm="fixed window",
        setup=setups.slowapi_async,
        # It never yields to the event loop; without this sleep(0), waiting callers would not be measured.
        one="await its_turn(0) or await one(request_of(key))",
        three="await its_turn(0) or await three(request_of(key))",
        allowed="answer is None",
        denies_with=_RATE_LIMIT_EXCEEDED,
    ),
)
