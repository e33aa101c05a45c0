"""Suggested limits: the strictest numbers under which the recorded traffic reaches a goal, and how far to trust them.

Each candidate is decided on the recorded times of each client with the algorithms of production. A client whose busiest
minute is within the quota cannot be rejected, so that only the busiest clients are decided again and again.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections import Counter
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import repeat
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from headgate._limit_syntax import suggest
from headgate.algorithms import ALGORITHMS
from headgate.clock import DAY_US, MINUTE_US, SECOND_US
from headgate.errors import InvalidInput
from headgate.limits import Limit
from headgate.policy.api_keys import PREFIX
from headgate.policy.loader import read
from headgate.policy.routes import decode_path
from headgate.policy.snapshot import NO_TIER, client_kind
from headgate.replay.conditions import PAYING
from headgate.replay.formats import WEIGHT
from headgate.replay.markdown import share as shown_share
from headgate.replay.sorting import sort_by_time
from headgate.replay.times import iso

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from headgate.policy.api_keys import ApiKeyHasher
    from headgate.policy.model import Policy
    from headgate.replay.engine import PolicyReplay
    from headgate.replay.formats import LoggedRequest
    from headgate.replay.goals import Goals
    from headgate.replay.run import LogOptions
    from headgate.replay.sources import DecisionRecords, LogReader

__all__ = ["CurvePoint", "DeterminingClient", "SuggestedDay", "Suggestion", "SuggestionRun"]

TOLERANCE: Final = 1.5
"""Traffic is unstable if limits for a part of it reject more than this multiple of the goal in the rest."""
MIN_REQUESTS: Final = 1000
"""Fewer requests are too few to judge stability."""
CANDIDATES: Final = (
    ("sliding_window", 1),
    ("token_bucket", 1),
    ("token_bucket", 2),
    ("token_bucket", 5),
    ("token_bucket", 10),
)
"""Algorithms, and the bursts as multiples of the quota."""
QUOTAS: Final = tuple(
    sorted({int(digits * 10**power / 10) for power in range(7) for digits in (10, 12, 15, 20, 25, 30, 40, 50, 60, 80)})
)
"""Round numbers per minute."""
CURVE_STEPS: Final = 8
"""Points of the curve on each side of the suggested quota."""
MAX_DETERMINING: Final = 5
MAX_KNOWN: Final = 100_000
"""Bounds the cache of senders."""


class _LimitCandidate(NamedTuple):
    algorithm: str
    ratio: int

    def limit(self, quota: int) -> Limit:
        burst = quota * self.ratio if ALGORITHMS[self.algorithm].SHAPES_BURST else None
        return Limit(quota, timedelta(minutes=1), burst=burst, algorithm=self.algorithm, name="per-client")

    def most_per_minute(self, quota: int) -> int:
        """The most that a client gets in its best minute."""
        return quota * (1 + self.ratio) if ALGORITHMS[self.algorithm].SHAPES_BURST else quota

    def most_per_hour(self, quota: int) -> int:
        return quota * (60 + self.ratio) if ALGORITHMS[self.algorithm].SHAPES_BURST else quota * 60


@dataclass(slots=True, eq=False)
class _ClientTimes:
    kind: str
    times: array[int]
    weights: array[int] | None = None
    """The number of requests that each record represents; None while it is 1 for all of them."""
    busiest_minute: int = 0

    def add(self, at_us: int, weight: int) -> None:
        if weight != 1 and self.weights is None:
            self.weights = array("q", repeat(1, len(self.times)))
        self.times.append(at_us)
        if self.weights is not None:
            self.weights.append(weight)

    @property
    def requests(self) -> int:
        return len(self.times) if self.weights is None else sum(self.weights)

    def between(self, since_us: int, until_us: int) -> Iterator[tuple[int, int]]:
        """The times in a part of the log, with the number of requests that each stands for."""
        start, end = bisect_left(self.times, since_us), bisect_left(self.times, until_us)
        times = self.times[start:end]
        return zip(times, repeat(1) if self.weights is None else self.weights[start:end], strict=False)

    def find_busiest_minute(self) -> None:
        """Set the most requests within one minute."""
        most = total = start = 0
        weights = self.weights
        for end, at_us in enumerate(self.times):
            total += 1 if weights is None else weights[end]
            while self.times[start] <= at_us - MINUTE_US:
                total -= 1 if weights is None else weights[start]
                start += 1
            most = max(most, total)
        self.busiest_minute = most


@dataclass(slots=True, eq=False)
class _TierTraffic:
    """The clients of one tier."""

    tier: str
    clients: dict[str, _ClientTimes] = field(default_factory=dict)
    minutes: Counter[int] = field(default_factory=Counter)
    """Requests by minute."""

    def part(self, since_us: int, until_us: int) -> _LogPart:
        """The part of the log between two whole minutes."""
        minutes = range(since_us // MINUTE_US, until_us // MINUTE_US)
        counts = [number for minute, number in self.minutes.items() if minute in minutes]
        return _LogPart(since_us, until_us, sum(counts))

    def whole(self) -> _LogPart:
        return self.part(min(self.minutes) * MINUTE_US, (max(self.minutes) + 1) * MINUTE_US)

    def halves(self, part: _LogPart) -> list[_LogPart]:
        """Two parts with about as many requests; only one if all requests are in one minute."""
        counted = 0
        for minute in sorted(self.minutes):
            if part.since_us <= minute * MINUTE_US < part.until_us:
                counted += self.minutes[minute]
                if counted * 2 >= part.requests:
                    middle_us = (minute + 1) * MINUTE_US
                    halves = [self.part(part.since_us, middle_us), self.part(middle_us, part.until_us)]
                    return [half for half in halves if half.requests]
        return [part]

    def rejections(self, limit: Limit, part: _LogPart) -> Iterator[tuple[str, int, int]]:
        """Client, time and number of the requests that are rejected if the limit is in force in a part of the log."""
        decide = ALGORITHMS[limit.algorithm].decide
        for name, client in self.clients.items():
            if client.busiest_minute <= limit.quota:
                continue
            state: Any = None
            for at_us, weight in client.between(part.since_us, part.until_us):
                state, verdict = decide(state, at_us, weight, limit)
                if verdict[1]:
                    yield name, at_us, weight

    def rejected_share(self, limit: Limit, part: _LogPart) -> float:
        return sum(weight for _, _, weight in self.rejections(limit, part)) / part.requests


class _LogPart(NamedTuple):
    """A part of the log, with the number of its requests."""

    since_us: int
    until_us: int
    requests: int


class CurvePoint(NamedTuple):
    """The effect of one quota."""

    quota: int
    burst: int | None
    share: float
    """The share of requests that it rejects."""
    clients: int
    """The number of clients that it rejects."""


class DeterminingClient(NamedTuple):
    """A client that the next lower limit would reject."""

    client: str
    kind: str
    """The kind of its identity."""
    requests: int
    rejected: int
    busiest_minute: int
    """The most requests that it sent within one minute."""
    at: str
    """The time of its first rejection."""

    def __str__(self) -> str:
        return f"{self.kind} {self.client}" if self.client.startswith(PREFIX) else self.client


class SuggestedDay(NamedTuple):
    """The effect of a suggested limit on one day (UTC)."""

    day: str
    requests: int
    share: float
    """The rejected share."""


@dataclass(slots=True)
class SuggestedLimit:
    """The numbers for one tier, with what speaks for and against them."""

    tier: str
    limit: Limit
    requests: int
    rejected: int
    curve: list[CurvePoint]
    determining: list[DeterminingClient]
    days: list[SuggestedDay]
    held_out_share: float | None
    """The share that limits for the first half of the log reject in the second; None if there is too little traffic."""
    is_stable: bool
    is_within_cap: bool

    @property
    def share(self) -> float:
        return self.rejected / self.requests if self.requests else 0.0

    @property
    def reasons(self) -> list[str]:
        """The reasons for these numbers, as lines of text."""
        limit, days, names = self.limit, self.days, [_comment(f"{each}") for each in self.determining[:3]]
        lines = [f"{_name(self)}: rejects {self.rejected:,} of {self.requests:,} requests ({_percent(self.share)})"]
        if limit.algorithm == "token_bucket" and limit.capacity > limit.quota:
            lines.append(f"token_bucket: clients send up to {limit.capacity:,} at once, but less on average")
        elif limit.algorithm == "sliding_window":
            lines.append("sliding_window: the traffic of clients is even, so a burst is not needed")
        if days:
            worst = max(days, key=lambda day: day.share)
            lines.append(f"worst of {len(days)} days: {worst.day} with {_percent(worst.share)}")
        if self.held_out_share is not None:
            lines.append(f"limits for the first half of the log reject {_percent(self.held_out_share)} in the second")
        if names:
            lines.append(f"a lower limit would first reject {', '.join(names)}")
        return lines

    @property
    def known_tier(self) -> str | None:
        """The tier; None if no tiers are known."""
        return None if self.tier == NO_TIER else self.tier

    @property
    def spelled(self) -> str:
        """The numbers as in a policy."""
        return _spelled(self.limit)

    def as_dict(self) -> dict[str, Any]:
        limit = self.limit
        return {
            "tier": self.tier,
            "quota": limit.quota,
            "period_s": limit.period_us // SECOND_US,
            "burst": limit.burst,
            "algorithm": limit.algorithm,
            "requests": self.requests,
            "rejected": self.rejected,
            "rejected_share": self.share,
            "held_out_share": self.held_out_share,
            "stable": self.is_stable,
            "within_cap": self.is_within_cap,
            "curve": [point._asdict() for point in self.curve],
            "determined_by": [client._asdict() for client in self.determining],
            "days": [day._asdict() for day in self.days],
        }


@dataclass(slots=True)
class Suggestion:
    """Suggested limits for all tiers, as a policy and as data."""

    goals: Goals
    by: str
    limits: list[SuggestedLimit]
    default_tier: str | None
    peak_per_minute: int
    cap_per_minute: float | None
    total: dict[str, Any] | None
    first_us: int
    last_us: int
    requests: int
    skipped: int
    sampled: int = 0
    """Records of a decision log that represent several requests."""
    is_cut: bool = False
    """True if older records of a decision log were not read, because there are too many."""

    @property
    def is_stable(self) -> bool:
        return all(each.is_stable for each in self.limits)

    @property
    def conflicts(self) -> list[str]:
        """Goals that cannot be reached together."""
        return [
            f"{_name(each)}: every limit that rejects at most {_percent(self.goals.share)} lets a client have more "
            f"than {self.cap_per_minute:,.0f} requests in a minute"
            for each in self.limits
            if not each.is_within_cap and self.cap_per_minute is not None
        ]

    @property
    def instabilities(self) -> list[str]:
        """The reasons why the suggestion may not be trusted."""
        found = []
        for each in self.limits:
            if each.held_out_share is None:
                found.append(f"{_name(each)}: {each.requests:,} requests are too few to tell how stable the traffic is")
            elif not each.is_stable:
                found.append(
                    f"{_name(each)}: too unstable: limits for the first half of the log reject "
                    f"{_percent(each.held_out_share)} in the second, and the goal is {_percent(self.goals.share)}"
                )
        return found

    def as_dict(self) -> dict[str, Any]:
        return {
            "goals": self.goals.texts,
            "requests": self.requests,
            "skipped": self.skipped,
            "sampled": self.sampled,
            "first": iso(self.first_us),
            "last": iso(self.last_us),
            "peak_per_minute": self.peak_per_minute,
            "cap_per_minute": self.cap_per_minute,
            "stable": self.is_stable,
            "instabilities": self.instabilities,
            "conflicts": self.conflicts,
            "notes": self.notes,
            "limits": [each.as_dict() for each in self.limits],
            "total": self.total,
            "policy": "\n".join(self.policy_lines()) + "\n",
        }

    @property
    def notes(self) -> list[str]:
        """The limits of the data."""
        notes = []
        if self.goals.group is not None and all(each.tier == NO_TIER for each in self.limits):
            notes.append(f"no tiers are known, so all clients count as {_comment(self.goals.group)}")
        if self.sampled:
            notes.append(
                f"{self.sampled:,} records represent several requests each, which count as a burst: the limits are "
                "higher than necessary. Record all requests with sample=1"
            )
        return notes

    def policy_lines(self) -> list[str]:
        """The lines of a policy with the suggested limits, and the reasons as comments."""
        lines = [
            f"# Suggested from {self.requests:,} requests from {iso(self.first_us)} to {iso(self.last_us)}.",
            *[f"# goal: {text}" for text in self.goals.texts],
            *[f"# warning: {text}" for text in (*self.conflicts, *self.instabilities)],
            *[f"# note: {text}" for text in self.notes],
        ]
        main = next((each for each in self.limits if each.tier in (self.default_tier, NO_TIER)), None)
        others = [each for each in self.limits if each is not main]
        if self.default_tier is not None:
            lines.append(f"tier: {_quoted(self.default_tier)}")
        lines.append("limits:")
        for each in self.limits:
            lines += [f"  # {text}" for text in each.reasons]
        lines.append("  - name: per-client")
        lines.append(f"    by: {self.by}")
        if main is not None:
            lines.append(f'    bucket: "{_spelled(main.limit)}"')
        if others:
            lines.append("    tiers:")
            lines += [f'      {_quoted(each.tier)}: "{_spelled(each.limit)}"' for each in others]
        if self.total is not None:
            lines.append(f"  # all clients: {self.total['reason']}")
            lines.append("  - name: total")
            lines.append("    by: global")
            lines.append(f'    bucket: "{self.total["limit"]}"')
        return lines


@dataclass(slots=True)
class SuggestionRun:
    """Reads logs, and suggests limits for a goal."""

    goals: Goals
    options: LogOptions
    policy: Policy | None = None
    """For identities, tiers and exempt routes."""
    by: str = "client"
    on_progress: Callable[[int, int], None] | None = None

    def run(self) -> Suggestion:
        """Read the logs of the options; InvalidInput for logs that cannot be read."""
        hasher = self.options.hasher()
        found = self.learn(self.options.reader([self._policy], hasher, self.on_progress), hasher)
        if found is None:
            raise InvalidInput("the log has no requests to learn from")
        return found

    def learn(self, reader: LogReader | DecisionRecords, hasher: ApiKeyHasher) -> Suggestion | None:
        """Suggested limits for the requests of a reader; None if no limit applies to any of them."""
        policy, total = self._policy, _Total(self.goals)
        traffic = _TrafficReader(self.options.engine(policy, hasher), self.by)
        for batch in sort_by_time(reader.batches()):
            for request in batch:
                if weight := traffic.add(request):
                    total.add(request[0], weight)
        groups = traffic.groups
        if not groups:
            return None
        minutes: Counter[int] = Counter()
        for group in groups.values():
            minutes.update(group.minutes)
            for client in group.clients.values():
                client.find_busiest_minute()
        peak = max(minutes.values())
        cap = self.goals.cap_per_minute if self.goals.cap_share is None else self.goals.cap_share * peak
        limits = [_fit(group, self._share_of(group, policy), cap) for _, group in sorted(groups.items())]
        times = [client.times for group in groups.values() for client in group.clients.values()]
        return Suggestion(
            goals=self.goals,
            by=self.by,
            limits=limits,
            default_tier=policy.default_tier if self.policy is not None else None,
            peak_per_minute=peak,
            cap_per_minute=cap,
            total=total.result(),
            first_us=min(each[0] for each in times),
            last_us=max(each[-1] for each in times),
            requests=minutes.total(),
            skipped=reader.skipped,
            sampled=reader.sampled,
            is_cut=reader.is_cut,
        )

    @property
    def _policy(self) -> Policy:
        return self.policy or read(f"limits: [{{by: {self.by}, bucket: 1/second, missing: ip}}]")

    def _share_of(self, group: _TierTraffic, policy: Policy) -> float:
        """The goal for a group; InvalidInput for the name of an unknown tier."""
        tiers = {*policy.tiers, policy.default_tier} - {None}
        name = self.goals.group
        if name is not None and name != PAYING and name not in tiers:
            hint = suggest(name, sorted([PAYING, *filter(None, tiers)]))
            raise InvalidInput(f"goal: {name!r} is not a tier of the policy; {hint}")
        return self.goals.share


class _TrafficReader:
    """Groups requests by tier and client."""

    def __init__(self, engine: PolicyReplay, by: str) -> None:
        self.groups: dict[str, _TierTraffic] = {}
        self._by = by
        self._snapshot, self._identities = engine.snapshot, engine.identities
        self._identities.kinds |= {by} if by != "client" else {"tenant", "api_key", "user"}
        self._depends_on_target = bool(self._identities.paths) or bool(engine.policy.routes)
        self._known: dict[Any, tuple[_TierTraffic, _ClientTimes, int] | None] = {}

    def add(self, request: LoggedRequest) -> int:
        """Add a request; the number of requests that it represents, or 0 if no limit applies to it."""
        key = (request[4], request[1], request[2]) if self._depends_on_target else request[4]
        if key in self._known:
            found = self._known[key]
        else:
            if len(self._known) >= MAX_KNOWN:
                self._known.clear()
            found = self._known[key] = self._find(request)
        if found is None:
            return 0
        group, client, weight = found
        client.add(request[0], weight)
        group.minutes[request[0] // MINUTE_US] += weight
        return weight

    def _find(self, request: LoggedRequest) -> tuple[_TierTraffic, _ClientTimes, int] | None:
        """The tier and the client of a request, and its weight; None on exempt routes and for blocked clients."""
        weight = int(dict(request[4][2]).get(WEIGHT, 1))
        route = self._snapshot.route(request[1], decode_path(request[2]))
        who = self._identities.extract(request[4], request[2], route)
        resolution = self._snapshot.resolve(route, who, request[0])
        if route.is_exempt or resolution.block is not None or not weight:
            return None
        tier = resolution.tier or NO_TIER
        kind = self._by if self._by in who else client_kind({name: who[name] for name in who if name != "tier"})
        group = self.groups.setdefault(tier, _TierTraffic(tier))
        client = group.clients.setdefault(who[kind], _ClientTimes(kind, array("q")))
        return group, client, weight


class _Total:
    """Decides all requests under the limit of the goal on the total."""

    def __init__(self, goals: Goals) -> None:
        self._limit: Limit | None = None
        if goals.total is not None:
            quota, seconds = goals.total
            self._limit = Limit(quota, timedelta(seconds=seconds), algorithm="sliding_window", name="total")
        self._state: Any = None
        self._requests = self._rejected = 0

    def add(self, at_us: int, weight: int) -> None:
        if self._limit is not None:
            self._requests += weight
            decide = ALGORITHMS[self._limit.algorithm].decide
            self._state, verdict = decide(self._state, at_us, weight, self._limit)
            self._rejected += weight * (verdict[1] != 0)

    def result(self) -> dict[str, Any] | None:
        if self._limit is None:
            return None
        share = self._rejected / self._requests if self._requests else 0.0
        reason = f"{self._rejected:,} of {self._requests:,} requests are beyond it ({_percent(share)})"
        spelled = _spelled(self._limit)
        return {"limit": spelled, "rejected": self._rejected, "rejected_share": share, "reason": reason}


def _fit(group: _TierTraffic, target: float, cap: float | None) -> SuggestedLimit:
    """The strictest limit under which each half of the log reaches the goal."""
    whole = group.whole()
    halves = group.halves(whole)
    found = [
        (candidate, _least_quota(group, candidate, halves, target))
        for candidate in map(_LimitCandidate._make, CANDIDATES)
    ]
    within = [each for each in found if cap is None or each[0].most_per_minute(each[1]) <= cap]
    candidate, quota = min(within or found, key=lambda each: each[0].most_per_hour(each[1]))
    limit = candidate.limit(quota)
    rejected: Counter[int] = Counter()
    for _, at_us, weight in group.rejections(limit, whole):
        rejected[at_us // DAY_US] += weight
    held_out: float | None = None
    if len(halves) == 2 and sum(len(client.times) for client in group.clients.values()) >= MIN_REQUESTS:
        # The share that limits fitted to the first half of the log, as to the whole, reject in the second.
        first = _least_quota(group, candidate, group.halves(halves[0]), target)
        held_out = group.rejected_share(candidate.limit(first), halves[1])
    return SuggestedLimit(
        tier=group.tier,
        limit=limit,
        requests=whole.requests,
        rejected=rejected.total(),
        curve=_curve(group, candidate, quota, whole),
        determining=_determining(group, candidate, quota, whole),
        days=_days(group, rejected),
        held_out_share=held_out,
        is_stable=held_out is not None and held_out <= TOLERANCE * target,
        is_within_cap=bool(within),
    )


def _least_quota(group: _TierTraffic, candidate: _LimitCandidate, parts: Iterable[_LogPart], target: float) -> int:
    """The least round quota that rejects at most the target share in each part."""

    def is_enough(quota: int) -> bool:
        limit = candidate.limit(quota)
        return all(group.rejected_share(limit, part) <= target for part in parts)

    low, high = 0, len(QUOTAS) - 1
    while low < high:
        at = (low + high) // 2
        if is_enough(QUOTAS[at]):
            high = at
        else:
            low = at + 1
    return QUOTAS[low]


def _curve(group: _TierTraffic, candidate: _LimitCandidate, quota: int, part: _LogPart) -> list[CurvePoint]:
    """The rejected share and the number of rejected clients for quotas around the suggested one."""
    at = QUOTAS.index(quota)
    points = []
    for each in QUOTAS[max(0, at - CURVE_STEPS) : at + CURVE_STEPS + 1]:
        limit, rejected = candidate.limit(each), Counter[str]()
        for name, _, weight in group.rejections(limit, part):
            rejected[name] += weight
        share = rejected.total() / part.requests
        points.append(CurvePoint(each, limit.burst, share, len(rejected)))
        if not rejected and each >= quota:
            break
    return points


def _determining(
    group: _TierTraffic, candidate: _LimitCandidate, quota: int, part: _LogPart
) -> list[DeterminingClient]:
    """The clients that would be rejected most under the next lower quota."""
    at = QUOTAS.index(quota)
    rejected: Counter[str] = Counter()
    first_us: dict[str, int] = {}
    for name, at_us, weight in group.rejections(candidate.limit(QUOTAS[max(0, at - 1)]), part):
        rejected[name] += weight
        first_us.setdefault(name, at_us)
    ranked = sorted(rejected.items(), key=lambda each: (-each[1], each[0]))[:MAX_DETERMINING]
    found = []
    for name, number in ranked:
        client, first = group.clients[name], iso(first_us[name])
        found.append(DeterminingClient(name, client.kind, client.requests, number, client.busiest_minute, first))
    return found


def _days(group: _TierTraffic, rejected: Mapping[int, int]) -> list[SuggestedDay]:
    """The rejected share of each day (UTC) under the suggested limit."""
    requests: Counter[int] = Counter()
    for minute, number in group.minutes.items():
        requests[minute * MINUTE_US // DAY_US] += number
    return [
        SuggestedDay(iso(day * DAY_US)[:10], number, rejected.get(day, 0) / number)
        for day, number in sorted(requests.items())
    ]


def _name(each: SuggestedLimit) -> str:
    return "per-client" if each.tier == NO_TIER else f"tier {_comment(each.tier)}"


def _percent(share: float) -> str:
    return shown_share(share, 1)


def _spelled(limit: Limit) -> str:
    seconds = limit.period_us // SECOND_US
    period = {1: "second", 60: "minute", 3600: "hour"}[seconds]
    burst = f", burst {limit.burst}" if limit.burst != limit.quota else ""
    return f"{limit.quota}/{period}{burst}, {limit.algorithm}"


def _comment(text: str) -> str:
    """A text that cannot end a comment."""
    return "".join([char if char.isprintable() else "?" for char in text[:60]])


def _quoted(text: str) -> str:
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'
