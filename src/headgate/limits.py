"""Limits: a quota per period, the algorithm that counts it, and a name."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from datetime import timedelta
from functools import partial
from math import gcd, isfinite
from typing import Any, Final

from headgate import _limit_syntax
from headgate.algorithms import ALGORITHMS
from headgate.errors import InvalidLimit
from headgate.keys import MAX_IDENTITY_LENGTH, Key, escape, identify

__all__ = ["Limit"]

EXACT: Final = 2**53
"""Upper bound on all numbers: beyond it, the doubles of Redis's Lua are not exact."""

HORIZON_US: Final = 10 * 366 * 86_400 * 1_000_000
"""Ten years: the longest period, so that all instants stay far below 2**53."""

MAX_CACHED_KEYS: Final = 256
"""Keys that a limit caches, as most clients return."""

_NO_PART: Final[Any] = object()

_new_key = tuple.__new__


@dataclass(frozen=True, slots=True)
class Limit:
    """A limit: immutable, so that it can be shared by threads and tasks.

    Use `by` to name the client that is counted, and pass the result to a limiter:

    >>> Limit(1000, timedelta(minutes=1), burst=200, name="search").by("tenant-7").identity
    'tenant-7'

    `burst` is the capacity of a bucket or a queue, by default the quota. For "concurrency", the quota is the number of
    leases at the same time, and the period is the lease time after which the lease of a crashed holder expires.

    `split` shards each counter, over the servers of a cluster, for clients that are too busy for one server. A request
    is counted in one of the shards, each of which allows its share of quota and burst. All of them together never allow
    more than the limit; but a request may be denied by its shard while the others have up to (split - 1) / split of the
    capacity left, and one that costs more than the capacity of a shard never passes.
    """

    quota: int
    period: timedelta
    burst: int | None = field(default=None, kw_only=True)
    algorithm: str = field(default="token_bucket", kw_only=True)
    name: str = field(default="default", kw_only=True)
    split: int = field(default=1, kw_only=True)

    capacity: int = field(init=False, repr=False, compare=False)
    """The largest cost that can pass at once: the burst, or the quota."""
    period_us: int = field(init=False, repr=False, compare=False)
    tokens: int = field(init=False, repr=False, compare=False)
    """With `ticks`, the rate in lowest terms: `tokens` per `ticks` microseconds."""
    ticks: int = field(init=False, repr=False, compare=False)
    full: int = field(init=False, repr=False, compare=False)
    """The capacity in 1/ticks of a token, the unit in which a microsecond refills `tokens`."""
    space: str = field(init=False, repr=False, compare=False)
    """The prefix of its counters in a store: name, algorithm and version of the stored form."""
    part: Limit | None = field(init=False, repr=False, compare=False)
    """The limit of each shard; None without `split`."""
    _keys: dict[str, Key] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        _check_whole("quota", self.quota)
        if self.burst is not None:
            _check_whole("burst", self.burst)
        if not isinstance(self.algorithm, str) or self.algorithm not in ALGORITHMS:
            hint = _limit_syntax.suggest(str(self.algorithm), list(ALGORITHMS))
            raise InvalidLimit(f"unknown algorithm {self.algorithm!r}; {hint}")
        algorithm = ALGORITHMS[self.algorithm]
        if not algorithm.SHAPES_BURST and self.burst not in (None, self.quota):
            raise InvalidLimit(
                f"burst {self.burst} means nothing to {self.algorithm}, which lets {self.quota} pass at once; "
                "leave it out, or use token_bucket, gcra or leaky_bucket"
            )
        _check_name(self.name)
        period_us = _microseconds(self.period)
        common = gcd(self.quota, period_us)
        set_field = object.__setattr__  # the dataclass is frozen
        set_field(self, "burst", self.quota if self.burst is None else self.burst)
        set_field(self, "capacity", self.burst)
        set_field(self, "period_us", period_us)
        set_field(self, "tokens", self.quota // common)
        set_field(self, "ticks", period_us // common)
        set_field(self, "full", self.capacity * self.ticks)
        set_field(self, "space", f"{escape(self.name)}:{self.algorithm}.{algorithm.VERSION}")
        self._check_exactness(algorithm.peak(self))
        set_field(self, "part", self._make_shard())
        set_field(self, "_keys", {})

    @classmethod
    def parse(cls, text: str, *, name: str = "default", algorithm: str | None = None) -> Limit:
        """Parse a limit in the syntax of policies.

        >>> Limit.parse("100/second, burst 50", name="posts")
        Limit(quota=100, period=datetime.timedelta(seconds=1), burst=50, algorithm='token_bucket', name='posts')
        >>> Limit.parse("5 per 30 seconds, sliding_window").algorithm
        'sliding_window'
        """
        phrase = _limit_syntax.parse(text)
        if algorithm is not None and phrase.algorithm not in (None, algorithm):
            raise InvalidLimit(f"{text!r} names {phrase.algorithm!r}, the caller {algorithm!r}; keep one")
        return cls(
            phrase.quota,
            phrase.period,
            burst=phrase.burst,
            algorithm=phrase.algorithm or algorithm or "token_bucket",
            name=name,
        )

    @classmethod
    def parse_many(cls, text: str, *, name: str = "default", algorithm: str | None = None) -> tuple[Limit, ...]:
        """Parse several limits, separated by semicolons.

        A single limit is named `name`; each of several is named `name` followed by its own text.

        >>> [(limit.name, limit.quota) for limit in Limit.parse_many("5/minute; 100/hour", name="login")]
        [('login 5/minute', 5), ('login 100/hour', 100)]
        """
        texts = _limit_syntax.split(text)
        names = [name] if len(texts) == 1 else [f"{name} {each}" for each in texts]
        return tuple(cls.parse(each, name=own, algorithm=algorithm) for each, own in zip(texts, names, strict=True))

    def by(self, part: str | int = _NO_PART, /, *more: str | int) -> Key:
        """The key of one client: `limit.by("tenant-7", user_id)`. Without parts, the global counter of the limit."""
        if not more and type(part) is str:
            # The common case without calls, as this runs on every request.
            keys = self._keys
            key = keys.get(part)
            if key is not None:
                return key
            if len(part) <= MAX_IDENTITY_LENGTH and "%" not in part and "|" not in part:
                if len(keys) >= MAX_CACHED_KEYS:
                    keys.clear()
                key = keys[part] = _new_key(Key, (self, (part,), part))
                return key
        parts = () if part is _NO_PART else (part, *more)
        return _new_key(Key, (self, parts, identify(parts)))

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the arguments only: a copy computes the rest, and has its own cache of keys."""
        names = {each.name: getattr(self, each.name) for each in fields(self) if each.init}
        return partial(Limit, **names), ()

    def __str__(self) -> str:
        """The limit in the syntax of `parse`, except for concurrency."""
        length = _limit_syntax.spell(self.period)
        if self.algorithm == "concurrency":
            return f"{self.quota} at once, leases of {length if length[0].isdigit() else f'1 {length}'}"
        burst = f", burst {self.burst}" if self.burst != self.quota else ""
        return f"{self.quota} per {length}{burst}, {self.algorithm}"

    def __repr__(self) -> str:
        split = f", split={self.split}" if self.split != 1 else ""
        return (
            f"Limit(quota={self.quota}, period={self.period!r}, burst={self.burst}, algorithm={self.algorithm!r}, "
            f"name={self.name!r}{split})"
        )

    def _make_shard(self) -> Limit | None:
        """The limit of each shard."""
        if type(self.split) is not int or self.split < 1:
            raise InvalidLimit(f"split {self.split!r} is not a whole number of at least 1")
        if self.split == 1:
            return None
        if self.algorithm == "concurrency":
            raise InvalidLimit(
                f"split {self.split} means nothing to concurrency, which finds a lease by its id; leave it out"
            )
        for what, number in (("quota", self.quota), ("burst", self.capacity)):
            if rest := number % self.split:
                near = " or ".join([str(each) for each in (number - rest, number - rest + self.split) if each])
                raise InvalidLimit(
                    f"{what} {number} cannot be split over {self.split} counters evenly; write {near}, or another split"
                )
        burst = self.capacity // self.split
        return Limit(self.quota // self.split, self.period, burst=burst, algorithm=self.algorithm, name=self.name)

    def _check_exactness(self, peak: int) -> None:
        if peak >= EXACT:
            raise InvalidLimit(
                f"limit {self.name!r} ({self}) needs numbers up to {peak}, beyond 2**53, where they stop being exact; "
                "use a smaller quota or burst, or a quota that divides the period's microseconds"
            )
        if self.full > HORIZON_US * self.tokens and ALGORITHMS[self.algorithm].SHAPES_BURST:
            raise InvalidLimit(
                f"limit {self.name!r} ({self}) takes more than ten years to fill; use a smaller burst or a faster rate"
            )


def _check_whole(what: str, number: object) -> None:
    if type(number) is not int:
        raise InvalidLimit(f"{what} {number!r} is not a whole number; give an int of at least 1")
    if number < 1:
        raise InvalidLimit(f"{what} {number} lets nothing pass; it must be at least 1")


def _check_name(name: object) -> None:
    if not isinstance(name, str) or not (1 <= len(name) <= 100 and name.isascii() and name.isprintable()):
        raise InvalidLimit(f"limit name {name!r}: use 1 to 100 printable ASCII characters, as it appears in headers")


def _microseconds(period: object) -> int:
    if not isinstance(period, timedelta):
        raise InvalidLimit(f"period {period!r} is not a timedelta; {_period_remedy(period)}")
    period_us = period // timedelta(microseconds=1)
    if period_us < 1:
        raise InvalidLimit(f"period {period} is not positive; the shortest is one microsecond")
    if period_us > HORIZON_US:
        raise InvalidLimit(f"period {period} is longer than ten years, the longest that is counted exactly")
    return period_us


def _period_remedy(period: object) -> str:
    if isinstance(period, str) and not period.isdecimal():
        unit = f"{period.strip().lower().removesuffix('s')}s"
        if unit in ("microseconds", "milliseconds", "seconds", "minutes", "hours", "days", "weeks"):
            return f'write timedelta({unit}=1), or the whole limit in words: Limit.parse("10/{unit[:-1]}")'
        return 'write it like timedelta(minutes=1), or the whole limit in words: Limit.parse("10/minute")'
    if isinstance(period, str | int | float) and not isinstance(period, bool) and isfinite(float(period)):
        return f"write timedelta(seconds={period}) if it is seconds"
    return "write it like timedelta(minutes=1)"
