"""What is allowed: a quota per period, the algorithm that counts it, and the name it goes by."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from datetime import timedelta
from functools import partial
from math import gcd, isfinite
from typing import Any, Final

from headgate import _limit_syntax
from headgate.algorithms import ALGORITHMS
from headgate.errors import InvalidLimit
from headgate.keys import LONGEST_IDENTITY, Key, escape, identify

__all__ = ["Limit"]

EXACT: Final = 2**53
"""Beyond this a double, which is all that Redis's Lua has, cannot tell two neighbouring whole numbers apart."""

HORIZON_US: Final = 10 * 366 * 86_400 * 1_000_000
"""Ten years: no debt lasts longer, so that every instant a limit meets stays far below 2**53."""

KEYS_AT_HAND: Final = 256
"""How many clients' keys a limit keeps made: a client that comes again, and most do, gets the one it had."""

EVERYBODY: Final[Any] = object()
"""Where nobody is named."""

_new_key = tuple.__new__


@dataclass(frozen=True, slots=True)
class Limit:
    """So many per period; immutable, so that it can be shared by everything that runs.

    Use `by` to say who is counted, then give the result to a limiter:

    >>> Limit(1000, timedelta(minutes=1), burst=200, name="search").by("tenant-7").identity
    'tenant-7'

    `burst` is the capacity of a bucket or a queue (the quota, if not given). For "concurrency" the quota is how
    many may be inside at the same time, and the period is the lease time after which a crashed holder is forgotten.

    `split` spreads each client's counter over so many, on different servers of a cluster: for a client that is too busy
    for one. A request is counted in one of the parts, each of which allows its share of quota and burst. All of them
    together never allow more than the limit; but a request may be denied by its part while the others have up to
    (split - 1) / split of the capacity left, and one that costs more than a part's capacity never passes.
    """

    quota: int
    period: timedelta
    burst: int | None = field(default=None, kw_only=True)
    algorithm: str = field(default="token_bucket", kw_only=True)
    name: str = field(default="default", kw_only=True)
    split: int = field(default=1, kw_only=True)

    capacity: int = field(init=False, repr=False, compare=False)
    """The most that can pass at once: burst, or the quota."""
    period_us: int = field(init=False, repr=False, compare=False)
    tokens: int = field(init=False, repr=False, compare=False)
    """With `ticks`, the rate in lowest terms: so many tokens per so many microseconds."""
    ticks: int = field(init=False, repr=False, compare=False)
    full: int = field(init=False, repr=False, compare=False)
    """The capacity in 1/ticks of a token, in which a microsecond is worth `tokens`."""
    space: str = field(init=False, repr=False, compare=False)
    """Where its counters live in a store: name, algorithm and the version of the stored form."""
    part: Limit | None = field(init=False, repr=False, compare=False)
    """What each of its parts allows, as a limit of its own; None where it is not split."""
    _at_hand: dict[str, Key] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        _whole("quota", self.quota)
        if self.burst is not None:
            _whole("burst", self.burst)
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
        keep = object.__setattr__  # the one way into a frozen dataclass
        keep(self, "burst", self.quota if self.burst is None else self.burst)
        keep(self, "capacity", self.burst)
        keep(self, "period_us", period_us)
        keep(self, "tokens", self.quota // common)
        keep(self, "ticks", period_us // common)
        keep(self, "full", self.capacity * self.ticks)
        keep(self, "space", f"{escape(self.name)}:{self.algorithm}.{algorithm.VERSION}")
        self._check_exactness(algorithm.peak(self))
        keep(self, "part", self._divided())
        keep(self, "_at_hand", {})

    @classmethod
    def parse(cls, text: str, *, name: str = "default", algorithm: str | None = None) -> Limit:
        """The limit that a text describes, in the words that policies use.

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
        """The limits of a text that may hold several, separated by semicolons.

        A single limit is called `name`; of several, each is called `name` followed by its own text.

        >>> [(limit.name, limit.quota) for limit in Limit.parse_many("5/minute; 100/hour", name="login")]
        [('login 5/minute', 5), ('login 100/hour', 100)]
        """
        texts = _limit_syntax.split(text)
        names = [name] if len(texts) == 1 else [f"{name} {each}" for each in texts]
        return tuple(cls.parse(each, name=own, algorithm=algorithm) for each, own in zip(texts, names, strict=True))

    def by(self, part: str | int = EVERYBODY, /, *more: str | int) -> Key:
        """This limit for one client: `limit.by("tenant-7", user_id)`. Without parts, one counter for everybody."""
        if not more and type(part) is str:
            # The common case by itself, and without a call: this runs on every request.
            at_hand = self._at_hand
            key = at_hand.get(part)
            if key is not None:
                return key
            if len(part) <= LONGEST_IDENTITY and "%" not in part and "|" not in part:
                if len(at_hand) >= KEYS_AT_HAND:
                    at_hand.clear()
                key = at_hand[part] = _new_key(Key, (self, (part,), part))
                return key
        parts = () if part is EVERYBODY else (part, *more)
        return _new_key(Key, (self, parts, identify(parts)))

    def __reduce__(self) -> tuple[Any, ...]:
        """As it was written: a copy in another process counts for others, and makes its own keys."""
        names = {each.name: getattr(self, each.name) for each in fields(self) if each.init}
        return partial(Limit, **names), ()

    def __str__(self) -> str:
        """The limit in words; but for concurrency, they are those that `parse` reads."""
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

    def _divided(self) -> Limit | None:
        """One of its parts; they are all alike."""
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


def _whole(what: str, number: object) -> None:
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
