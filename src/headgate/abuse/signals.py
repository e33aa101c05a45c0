"""Signals of a group of requests, counted in bounded memory over a window of two panes.

A window consists of the current pane, half a window long, and the one before. It covers between half of the window and
all of it, never more.

Distinct values are counted by linear counting: each value sets one of the bits of an integer. At the thresholds of
scenarios the error is a few percent. Values are hashed with a key, so that clients cannot choose ones that collide;
with the same key on all nodes, bits of several nodes can be joined.
"""

from __future__ import annotations

from hashlib import blake2b
from math import ceil, log
from typing import TYPE_CHECKING, Final, NamedTuple

from headgate.abuse.model import COUNT_SIGNALS

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from headgate.abuse.model import Threshold

__all__ = [
    "FAILURES",
    "GroupRecord",
    "SeenAddresses",
    "SharedRecord",
    "SignalPlan",
    "ValueHashes",
    "common_interval",
    "distinct",
]

FAILURES: Final = {
    "refused": frozenset({401, 403}),
    "missing": frozenset({404, 410}),
    "limited": frozenset({429, 503}),
}
"""The response statuses whose shares are signals."""
MIN_FOR_SHARES: Final = 5
"""Requests below which no share counts."""
SEEN_US: Final = 3_600_000_000
SEEN_BITS: Final = 1 << 23
MAX_BITS: Final = 1 << 16
MAX_CACHED: Final = 16_384
LONGEST_VALUE: Final = 1_000
MIN_TOLERANCE_US: Final = 20_000
TOLERANCE: Final = 20
"""Intervals are the same if they differ by at most a twentieth, or 20 ms."""
MULTIPLE_TOLERANCE: Final = 8
"""Multiples of an interval differ from it by at most an eighth of it: one in four random intervals is one."""


class ValueHashes:
    """Keyed hashes of values, from which bits are chosen."""

    __slots__ = ("_cache", "_keyed")

    def __init__(self, key: bytes) -> None:
        self._keyed = blake2b(digest_size=8, key=key[:64])
        self._cache: dict[str, int] = {}

    def __call__(self, value: str) -> int:
        found = self._cache.get(value)
        if found is None:
            keyed = self._keyed.copy()
            keyed.update(value[:LONGEST_VALUE].encode("utf-8", "surrogatepass"))
            found = int.from_bytes(keyed.digest(), "little")
            if len(self._cache) >= MAX_CACHED:
                self._cache.clear()
            self._cache[value] = found
        return found


def distinct(bits: int, size: int) -> int:
    """The number of distinct values that have set these bits of `size`.

    >>> distinct(0b1011, 64)
    3
    """
    free = size - bits.bit_count()
    return round(-size * log(max(free, 1) / size))


def common_interval(interval_us: int, base_us: int) -> int:
    """The interval of which both are multiples, but for the delays of a network; 0 if there is none.

    A node sees some requests of a client that asks every second, after 1, 3 or 2 seconds: the others see the rest.

    >>> common_interval(3_010_000, 1_000_000), common_interval(1_000_000, 3_010_000)
    (1003333, 1000000)
    >>> common_interval(1_400_000, 1_000_000)
    0
    """
    if interval_us <= 0:
        return 0
    if abs(interval_us - base_us) <= max(MIN_TOLERANCE_US, base_us // TOLERANCE):
        return interval_us
    if base_us <= 0:
        return 0
    longer, shorter = (interval_us, base_us) if interval_us > base_us else (base_us, interval_us)
    times = (longer + shorter // 2) // shorter
    if times > 1 and abs(longer - times * shorter) <= min(MIN_TOLERANCE_US * times, shorter // MULTIPLE_TOLERANCE):
        return longer // times if longer == interval_us else shorter
    return 0


class GroupRecord:
    """The signals of one group, or of one address in it."""

    __slots__ = (
        "bits", "check_at", "early", "hits", "interval_us", "is_found", "last_us", "name_hash", "pane", "past_bits",
        "past_early", "past_hits", "past_requests", "quiet_pane", "requests",
    )  # fmt: skip

    def __init__(self, pane: int, early: int, shares: int, sets: int) -> None:
        self.pane = pane
        self.early, self.past_early = early, 0
        """Requests before this record was created, of which only the number is known."""
        self.requests = self.past_requests = 0
        self.hits, self.past_hits = [0] * shares, [0] * shares
        self.bits, self.past_bits = [0] * sets, [0] * sets
        self.check_at = 0
        """The number of requests in this pane from which thresholds may be reached."""
        self.quiet_pane = 0
        """The pane from which the group may be found again."""
        self.is_found = False
        self.last_us = self.interval_us = 0
        self.name_hash = 0
        """The keyed hash of the group, by which other nodes know it; 0 until it is needed."""

    @property
    def total(self) -> int:
        """All requests in the window."""
        return self.requests + self.past_requests + self.early + self.past_early

    @property
    def progress(self) -> int:
        """The distinct values of the first signal that counts some, else the requests."""
        return (self.bits[0] | self.past_bits[0]).bit_count() if self.bits else self.total

    def turn(self, pane: int) -> None:
        """Begin another pane."""
        if pane == self.pane + 1:
            self.past_requests, self.past_hits, self.past_bits = self.requests, self.hits, self.bits
            self.past_early = self.early
        else:
            self.past_requests = self.past_early = 0
            self.past_hits, self.past_bits = [0] * len(self.hits), [0] * len(self.bits)
        self.requests = self.early = self.check_at = 0
        self.hits, self.bits = [0] * len(self.hits), [0] * len(self.bits)
        self.pane = pane
        self.is_found = self.is_found and pane < self.quiet_pane

    def window(self, pane: int) -> SharedRecord | None:
        """The signals in the window that ends with a pane; None if the record is older."""
        if pane == self.pane:
            hits = [sum(pair) for pair in zip(self.hits, self.past_hits, strict=True)]
            bits = [now | past for now, past in zip(self.bits, self.past_bits, strict=True)]
            return SharedRecord(self.total, self.requests + self.past_requests, hits, bits)
        if pane == self.pane + 1:
            return SharedRecord(self.requests + self.early, self.requests, self.hits, self.bits)
        return None


class SeenAddresses:
    """The addresses of the last hour or so, in two bit tables of half an hour each.

    For an hour after the first request no address is new, as earlier ones are not known.
    """

    __slots__ = ("_generations", "_hashes", "_ready_us", "_turn_us")

    def __init__(self, hashes: ValueHashes) -> None:
        self._hashes = hashes
        self._generations = [bytearray(SEEN_BITS >> 3), bytearray(SEEN_BITS >> 3)]
        self._turn_us = self._ready_us = 0

    def is_new(self, address: str, now_us: int) -> bool:
        """True for the first request of an address."""
        if now_us >= self._turn_us:
            if not self._ready_us:
                self._ready_us = now_us + SEEN_US
            self._turn_us = now_us + SEEN_US // 2
            self._generations = [bytearray(SEEN_BITS >> 3), self._generations[0]]
        found = self._hashes(address)
        places = [(at >> 3, 1 << (at & 7)) for at in (found % SEEN_BITS, (found >> 32) % SEEN_BITS)]
        now, before = self._generations
        is_known = any(all(table[byte] & bit for byte, bit in places) for table in (now, before))
        for byte, bit in places:
            now[byte] |= bit
        return not is_known and now_us >= self._ready_us


class SharedRecord(NamedTuple):
    """The signals of a group in a window, as nodes share them."""

    requests: int
    looked_at: int
    """The requests of which more than the number is known."""
    hits: Sequence[int]
    bits: Sequence[int]


class SignalPlan:
    """The signals that some thresholds need, with their places in a `GroupRecord`."""

    __slots__ = ("duration_index", "failures", "interval_index", "is_failure", "sets", "shares", "sizes", "thresholds")

    def __init__(self, thresholds: Sequence[Threshold]) -> None:
        self.thresholds = tuple(thresholds)
        named = [each.signal for each in thresholds]
        self.shares = tuple(name for name in named if name not in COUNT_SIGNALS or name == "seconds")
        self.sets = tuple(name for name in named if name in COUNT_SIGNALS and name not in ("requests", "seconds"))
        self.sizes = tuple(bits_for(each.value) for each in thresholds if each.signal in self.sets)
        self.failures = tuple((index, FAILURES[name]) for index, name in enumerate(self.shares) if name in FAILURES)
        self.is_failure = frozenset[int]().union(*[statuses for _, statuses in self.failures])
        self.duration_index = self.shares.index("seconds") if "seconds" in self.shares else None
        self.interval_index = self.shares.index("regular") if "regular" in self.shares else None

    def new_record(self, pane: int, early: int) -> GroupRecord:
        return GroupRecord(pane, early, len(self.shares), len(self.sets))

    @property
    def goal(self) -> float:
        """The threshold that the `progress` of a record is compared with."""
        first = next((each for each in self.thresholds if each.signal in self.sets), None)
        return self.least_requests if first is None else first.value

    @property
    def least_requests(self) -> int:
        """The requests without which no group reaches the thresholds."""
        counts = [each for each in self.thresholds if each.signal in COUNT_SIGNALS and each.signal != "seconds"]
        return max([ceil(each.value) for each in counts], default=1)

    def values(self, records: Iterable[SharedRecord]) -> dict[str, float]:
        """The signals of a group, from its records on all nodes."""
        requests = looked_at = 0
        hits, bits = [0] * len(self.shares), [0] * len(self.sets)
        for each in records:
            requests += each.requests
            looked_at += each.looked_at
            hits = [sum(pair) for pair in zip(hits, each.hits, strict=True)]
            bits = [own | added for own, added in zip(bits, each.bits, strict=True)]
        found: dict[str, float] = {"requests": requests}
        for name, hit in zip(self.shares, hits, strict=True):
            if name == "seconds":
                found[name] = round(hit / 1_000_000, 1)
            else:
                found[name] = hit / looked_at if looked_at >= MIN_FOR_SHARES else 0.0
        for name, own, size in zip(self.sets, bits, self.sizes, strict=True):
            found[name] = min(distinct(own, size), requests)
        return found

    def missing_requests(self, values: dict[str, float]) -> int:
        """0 if all thresholds are reached, else the least number of requests until they may be."""
        missing = 0
        for each in self.thresholds:
            value = values[each.signal]
            if value < each.value:
                is_count = each.signal in COUNT_SIGNALS and each.signal != "seconds"
                missing = max(missing, int(each.value - value) if is_count else int(values["requests"]) >> 4, 1)
        return missing


def bits_for(threshold: float) -> int:
    """The size of a set that counts so many values with an error of a few percent."""
    return min(max(64, 1 << (4 * ceil(threshold) - 1).bit_length()), MAX_BITS)
