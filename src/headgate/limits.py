"""Limits: a quota per period, the algorithm that counts it, and a name."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from datetime import timedelta
from functools import partial
from math import gcd, isfinite
from typing import Any, ClassVar, Final
from weakref import WeakSet

from headgate import _limit_syntax
from headgate.algorithms import ALGORITHMS, INTERNAL_ALGORITHMS, Algorithm, fair_share
from headgate.calendars import Calendar
from headgate.errors import InvalidLimit
from headgate.keys import GLOBAL_IDENTITY, MAX_IDENTITY_LENGTH, Key, escape, identify

__all__ = ["DEFAULT_ALGORITHM", "REGION_MODES", "FairLimit", "Limit", "QuotaLimit"]

REGION_MODES: Final = ("regional", "divided", "reserved", "reconciled", "central")
"""The ways in which the regions of a limiter share a limit; see docs/regions.md."""


class _DefaultAlgorithm(str):
    """The name of the algorithm of limits that name none; those with a calendar have another."""

    __slots__ = ()


DEFAULT_ALGORITHM: Final = _DefaultAlgorithm("token_bucket")
"""The algorithm of limits that name none: "fixed_window" for a calendar, else "token_bucket"."""

EXACT: Final = 2**53  # upper bound on all numbers: beyond it, the doubles of Redis's Lua are not exact
HORIZON_US: Final = 10 * 366 * 86_400 * 1_000_000
"""Ten years: the longest period, so that all instants stay far below 2**53."""

_LENGTHS: Final = {"day": "24 hours", "week": "7 days", "month": "30 days", "year": "365 days"}
"""Lengths of time to suggest in place of a calendar period."""

MAX_CACHED_KEYS: Final = 256  # keys that a limit caches, as most clients return
MAX_CACHED_TENANTS: Final = 4096
"""The same for a fair limit: a tenant takes longer to create, and is one of few."""
_NO_PART: Final[Any] = object()

_new_key = tuple.__new__


@dataclass(frozen=True, slots=True)
class Limit:
    """A limit: immutable, so that it can be shared by threads and tasks.

    Use `by` to name the client that is counted, and pass the result to a limiter:

    >>> Limit(1000, timedelta(minutes=1), burst=200, name="search").by("tenant-7").identity
    'tenant-7'

    The period is a length of time, counted by "token_bucket" unless another algorithm is given, or a `Calendar`: a day,
    week, month or year of a time zone, counted by "fixed_window".

    `burst` is the capacity of a bucket or a queue, by default the quota. For "concurrency", the quota is the number of
    leases at the same time, and the period is the lease time after which the lease of a crashed holder expires.

    `split` shards each counter, over the servers of a cluster, for clients that are too busy for one server. A request
    is counted in one of the shards, each of which allows its share of quota and burst. All of them together never allow
    more than the limit; but a request may be denied by its shard while the others have up to (split - 1) / split of the
    capacity left, and one that costs more than the capacity of a shard never passes.

    `region` says how the regions of a limiter share the limit: "regional" (each has its own), "divided" (each has an
    equal part), "reserved" (each leases tokens from the home region in advance), "reconciled" (each counts for itself,
    and learns what the others have admitted) or "central" (the home region decides). See docs/regions.md.
    """

    quota: int
    period: timedelta | Calendar
    burst: int | None = field(default=None, kw_only=True)
    algorithm: str = field(default=DEFAULT_ALGORITHM, kw_only=True)
    name: str = field(default="default", kw_only=True)
    split: int = field(default=1, kw_only=True)
    region: str = field(default="regional", kw_only=True)

    algorithms: ClassVar[dict[str, Algorithm]] = ALGORITHMS
    """Those that a limit of this class can have."""

    capacity: int = field(init=False, repr=False, compare=False)
    """The largest cost that can pass at once: the burst, or the quota."""
    period_us: int = field(init=False, repr=False, compare=False)
    """The length of the period; that of the longest one for a calendar."""
    calendar: Calendar | None = field(init=False, repr=False, compare=False)
    """The period, if it is a calendar; None for a length of time."""
    counter_algorithm: str = field(init=False, repr=False, compare=False)
    """The algorithm of its counters: "calendar_window" with a calendar."""
    tokens: int = field(init=False, repr=False, compare=False)
    """With `ticks`, the rate in lowest terms: `tokens` per `ticks` microseconds."""
    ticks: int = field(init=False, repr=False, compare=False)
    full: int = field(init=False, repr=False, compare=False)
    """The capacity in 1/ticks of a token, the unit in which a microsecond refills `tokens`."""
    space: str = field(init=False, repr=False, compare=False)
    """The prefix of its counters in a store: name, algorithm and version of the stored form."""
    part: Limit | None = field(init=False, repr=False, compare=False)
    """The limit of each shard; None without `split`."""
    is_composite: bool = field(init=False, repr=False, compare=False)
    """True if other keys are counted than the caller's: those of shards or regions."""
    _keys: dict[Any, Key] = field(init=False, repr=False, compare=False)
    _hash: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        _check_whole("quota", self.quota)
        if self.burst is not None:
            _check_whole("burst", self.burst)
        set_field = partial(object.__setattr__, self)  # the dataclass is frozen
        calendar = self.period if isinstance(self.period, Calendar) else None
        if isinstance(self.algorithm, _DefaultAlgorithm):
            set_field("algorithm", "token_bucket" if calendar is None else "fixed_window")
        if not isinstance(self.algorithm, str) or self.algorithm not in self.algorithms:
            hint = _limit_syntax.suggest(str(self.algorithm), list(self.algorithms))
            raise InvalidLimit(f"unknown algorithm {self.algorithm!r}; {hint}")
        if calendar is not None and self.algorithm != "fixed_window":
            raise InvalidLimit(
                f"{self.algorithm} cannot count a calendar {calendar.unit}, only fixed_window can; leave the algorithm "
                f"out, or use a length of time, such as {_LENGTHS[calendar.unit]}"
            )
        set_field("calendar", calendar)
        set_field("counter_algorithm", self.algorithm if calendar is None else "calendar_window")
        algorithm = self.implementation
        if not algorithm.SHAPES_BURST and self.burst not in (None, self.quota):
            raise InvalidLimit(
                f"burst {self.burst} means nothing to {self.algorithm}, which lets {self.quota} pass at once; "
                "leave it out, or use token_bucket, gcra or leaky_bucket"
            )
        _check_name(self.name)
        period_us = _microseconds(self.period) if calendar is None else calendar.length_us
        common = gcd(self.quota, period_us)
        capacity, ticks = self.quota if self.burst is None else self.burst, period_us // common
        rate = {"period_us": period_us, "tokens": self.quota // common, "ticks": ticks, "full": capacity * ticks}
        space = f"{escape(self.name)}:{self.counter_algorithm}.{algorithm.VERSION}"
        for name, value in {"burst": capacity, "capacity": capacity, **rate, "space": space, "_keys": {}}.items():
            set_field(name, value)
        self._check_exactness(algorithm.peak(self))
        set_field("part", self._make_shard())
        self._check_region()
        set_field("is_composite", self.split > 1 or self.region != "regional")
        # Computed once, as keys of limits with regions are looked up on every request.
        set_field("_hash", hash(tuple([getattr(self, each.name) for each in fields(self) if each.compare])))

    @classmethod
    def parse(cls, text: str, *, name: str = "default", algorithm: str | None = None) -> Limit:
        """Parse a limit in the syntax of policies.

        >>> Limit.parse("100/second, burst 50", name="posts")
        Limit(quota=100, period=datetime.timedelta(seconds=1), burst=50, algorithm='token_bucket', name='posts')
        >>> Limit.parse("5 per 30 seconds, sliding_window").algorithm
        'sliding_window'
        >>> Limit.parse("1000/month, starts 15, timezone Europe/Berlin").period
        Calendar('month', starts=15, timezone='Europe/Berlin')
        """
        phrase = _limit_syntax.parse(text)
        if algorithm is not None and phrase.algorithm not in (None, algorithm):
            raise InvalidLimit(f"{text!r} names {phrase.algorithm!r}, the caller {algorithm!r}; keep one")
        algorithm = phrase.algorithm or algorithm
        period, algorithm = phrase.period_for(algorithm), algorithm or DEFAULT_ALGORITHM
        return cls(phrase.quota, period, burst=phrase.burst, algorithm=algorithm, name=name)

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

    def __hash__(self) -> int:
        return self._hash

    @property
    def implementation(self) -> Algorithm:
        """The algorithm of its counters."""
        return self.algorithms[self.algorithm] if self.calendar is None else INTERNAL_ALGORITHMS["calendar_window"]

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the arguments only: a copy computes the rest, and has its own cache of keys."""
        names = {each.name: getattr(self, each.name) for each in fields(self) if each.init}
        return partial(type(self), **names), ()

    def __str__(self) -> str:
        """The limit in the syntax of `parse`, except for concurrency."""
        length = _limit_syntax.spell(self.period)
        if self.algorithm == "concurrency":
            return f"{self.quota} at once, leases of {length if length[0].isdigit() else f'1 {length}'}"
        burst = f", burst {self.burst}" if self.burst != self.quota else ""
        return f"{self.quota} per {length}{burst}, {self.algorithm}"

    def __repr__(self) -> str:
        numbers = f"quota={self.quota}, period={self.period!r}, burst={self.burst}"
        split = f", split={self.split}" if self.split != 1 else ""
        region = f", region={self.region!r}" if self.region != "regional" else ""
        return f"Limit({numbers}, algorithm={self.algorithm!r}, name={self.name!r}{split}{region})"

    def _make_shard(self) -> Limit | None:
        if type(self.split) is not int or self.split < 1:
            raise InvalidLimit(f"split {self.split!r} is not a whole number of at least 1")
        if self.split == 1 or self.algorithm == "fair_share":
            return None
        if self.algorithm == "concurrency":
            problem = f"split {self.split} means nothing to concurrency, which finds a lease by its id"
            raise InvalidLimit(f"{problem}; leave it out")
        for what, number in (("quota", self.quota), ("burst", self.capacity)):
            if rest := number % self.split:
                near = " or ".join([str(each) for each in (number - rest, number - rest + self.split) if each])
                problem = f"{what} {number} cannot be split over {self.split} counters evenly"
                raise InvalidLimit(f"{problem}; write {near}, or another split")
        burst = self.capacity // self.split
        return Limit(self.quota // self.split, self.period, burst=burst, algorithm=self.algorithm, name=self.name)

    def _check_region(self) -> None:
        if self.region not in REGION_MODES:
            hint = _limit_syntax.suggest(str(self.region), list(REGION_MODES))
            raise InvalidLimit(f"unknown region mode {self.region!r}; {hint}")
        if self.calendar is not None and self.region in ("reserved", "reconciled"):
            problem = f"region {self.region!r} cannot share a calendar {self.calendar.unit}"
            remedy = f"use 'central' or 'divided', or a length of time, such as {_LENGTHS[self.calendar.unit]}"
            raise InvalidLimit(f"{problem}; {remedy}")
        if self.region != "regional" and self.split > 1:
            raise InvalidLimit(f"split {self.split} and region {self.region!r} cannot be combined; leave one out")
        if self.region == "reconciled":
            ReconciledLimits.announce()

    def _check_exactness(self, peak: int) -> None:
        if peak >= EXACT:
            raise InvalidLimit(
                f"limit {self.name!r} ({self}) needs numbers up to {peak}, beyond 2**53, where they stop being exact; "
                "use a smaller quota or burst, or a quota that divides the period's microseconds"
            )
        if self.full > HORIZON_US * self.tokens and self.implementation.SHAPES_BURST:
            remedy = "use a smaller burst or a faster rate"
            raise InvalidLimit(f"limit {self.name!r} ({self}) takes more than ten years to fill; {remedy}")


class ReconciledLimits:
    """The first reconciled limit of the process, announced to limiters over several regions.

    A region that has no requests yet must know what the others have admitted when the first one comes. Without such a
    limit, nothing has to be exchanged.
    """

    _exist: ClassVar[bool] = False
    _listeners: ClassVar[WeakSet[Any]] = WeakSet()

    @classmethod
    def listen(cls, listener: Any) -> None:
        """Call `listener.ensure_exchange()` as soon as there is a reconciled limit; the listener is not kept alive."""
        cls._listeners.add(listener)
        if cls._exist:
            listener.ensure_exchange()

    @classmethod
    def announce(cls) -> None:
        if not cls._exist:
            cls._exist = True
            for listener in list(cls._listeners):
                listener.ensure_exchange()


@dataclass(frozen=True, slots=True)
class PoolLimit(Limit):
    """A pool of tokens that were taken from another counter: at most `quota`, each for at most the period.

    Internal: for counters that headgate creates for itself, in a store that it reaches without the local tier's caches.
    """

    algorithm: str = field(default="pool", kw_only=True)

    algorithms: ClassVar[dict[str, Algorithm]] = INTERNAL_ALGORITHMS

    __hash__ = Limit.__hash__


@dataclass(frozen=True, slots=True)
class FairLimit(Limit):
    """One limit for all tenants together, in which each can rely on its share, and use what the others leave.

    `by` names the tenant, whose share is in proportion to its weight:

    >>> api = FairLimit(1000, timedelta(minutes=1), name="api")
    >>> str(api.by("tenant-7", weight=3).limit)
    '1000 per minute, shared fairly'

    All tenants are charged to the same counter. `burst` is its capacity, half of which is kept for the shares of the
    tenants that send requests. See docs/fair-sharing.md.
    """

    algorithm: str = field(default="fair_share", kw_only=True)
    member: str = field(default=GLOBAL_IDENTITY, kw_only=True)
    """The identity of the tenant, in a key that `by` has created."""
    weight: int = field(default=1, kw_only=True)

    algorithms: ClassVar[dict[str, Algorithm]] = INTERNAL_ALGORITHMS

    __hash__ = Limit.__hash__

    def __post_init__(self) -> None:
        Limit.__post_init__(self)
        if self.split > 1 or self.region != "regional":
            given = f"split {self.split}" if self.split > 1 else f"region {self.region!r}"
            raise InvalidLimit(f"a fair limit has one counter, and {given} would divide it; leave it out")

    def by(self, part: str | int = _NO_PART, /, *more: str | int, weight: int = 1) -> Key:
        """The key of one tenant. Without parts, that of all requests which belong to none."""
        cached = part, more, weight
        key = self._keys.get(cached)
        if key is None:
            if type(weight) is not int or not 1 <= weight <= fair_share.MAX_WEIGHT:
                raise InvalidLimit(f"weight {weight!r} is not a whole number from 1 to {fair_share.MAX_WEIGHT}")
            parts = () if part is _NO_PART else (part, *more)
            key = _new_key(Key, (replace(self, member=identify(parts), weight=weight), parts, GLOBAL_IDENTITY))
            if len(self._keys) >= MAX_CACHED_TENANTS:
                self._keys.clear()
            self._keys[cached] = key
        return key

    def __str__(self) -> str:
        return Limit.__str__(self).replace(", fair_share", ", shared fairly")

    def __repr__(self) -> str:
        who = f", member={self.member!r}, weight={self.weight}" if self.member != GLOBAL_IDENTITY else ""
        numbers = f"quota={self.quota}, period={self.period!r}, burst={self.burst}"
        return f"FairLimit({numbers}, name={self.name!r}{who})"


@dataclass(frozen=True, slots=True)
class QuotaLimit(Limit):
    """A limit of a policy that is charged to accounts of a ledger instead of counters in the store.

    Its quota is the allowance of a calendar period. An account can also spend up to `rollover` units that were left of
    the allowance of the last period, then other grants, then `pay_as_you_go` units.
    """

    rollover: int = field(default=0, kw_only=True)
    pay_as_you_go: int = field(default=0, kw_only=True)

    __hash__ = Limit.__hash__

    def __str__(self) -> str:
        """The waterfall without other grants, like "1000 per month, rollover 200, pay as you go 500"."""
        more = {"rollover": self.rollover, "pay as you go": self.pay_as_you_go}
        options = "".join(f", {name} {amount}" for name, amount in more.items() if amount)
        return f"{self.quota} per {_limit_syntax.spell(self.period)}{options}"


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
    if isinstance(period, str) and period.strip().lower().removesuffix("s") in ("month", "year"):
        unit = period.strip().lower().removesuffix("s")
        return f'write Calendar("{unit}"), or the whole limit in words: Limit.parse("10/{unit}")'
    if isinstance(period, str) and not period.isdecimal():
        unit = f"{period.strip().lower().removesuffix('s')}s"
        if unit in ("microseconds", "milliseconds", "seconds", "minutes", "hours", "days", "weeks"):
            return f'write timedelta({unit}=1), or the whole limit in words: Limit.parse("10/{unit[:-1]}")'
        return 'write it like timedelta(minutes=1), or the whole limit in words: Limit.parse("10/minute")'
    if isinstance(period, str | int | float) and not isinstance(period, bool) and isfinite(float(period)):
        return f"write timedelta(seconds={period}) if it is seconds"
    return "write it like timedelta(minutes=1)"
