"""Suggested limits: the strictest numbers under which the recorded traffic reaches a goal, and how far to trust them.

Each candidate is decided on the recorded times of each client with the algorithms of production. A client whose busiest
minute is within the quota cannot be rejected, so that only the busiest clients are decided again and again.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections import Counter
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from headgate._limit_syntax import suggest
from headgate.algorithms import ALGORITHMS
from headgate.errors import InvalidInput
from headgate.limits import Limit
from headgate.policy.loader import read
from headgate.policy.routes import decode_path
from headgate.policy.snapshot import client_kind
from headgate.replay.markdown import share as shown_share
from headgate.replay.sorting import sort_by_time
from headgate.replay.times import MINUTE_US, SECOND_US, iso

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from headgate.policy.model import Policy
    from headgate.replay.formats import LoggedRequest
    from headgate.replay.goals import Goals
    from headgate.replay.run import LogOptions

__all__ = ["Suggestion", "SuggestionRun"]

DAY_US: Final = 86_400 * SECOND_US
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
PAYING: Final = "paying"
NO_TIER: Final = "none"


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
    times: array[int]
    busiest_minute: int = 0


@dataclass(slots=True, eq=False)
class _TierTraffic:
    """The clients of one tier."""

    tier: str
    clients: dict[str, _ClientTimes] = field(default_factory=dict)

    def times(self) -> list[int]:
        return sorted(at for client in self.clients.values() for at in client.times)

    def rejected(self, limit: Limit, since_us: int, until_us: int) -> dict[str, list[int]]:
        """The times of rejections by client, if the limit were in force from `since_us` to `until_us`."""
        decide = ALGORITHMS[limit.algorithm].decide
        found: dict[str, list[int]] = {}
        for name, client in self.clients.items():
            if client.busiest_minute <= limit.quota:
                continue
            times = client.times
            state: Any = None
            rejections = []
            for at in range(bisect_left(times, since_us), bisect_left(times, until_us)):
                state, verdict = decide(state, times[at], 1, limit)
                if verdict[1]:
                    rejections.append(times[at])
            if rejections:
                found[name] = rejections
        return found


class _LogPart(NamedTuple):
    """A part of the log, with the number of its requests."""

    since_us: int
    until_us: int
    requests: int


@dataclass(slots=True)
class SuggestedLimit:
    """The numbers for one tier, with what speaks for and against them."""

    tier: str
    limit: Limit
    requests: int
    rejected: int
    curve: list[dict[str, Any]]
    determining: list[dict[str, Any]]
    days: list[dict[str, Any]]
    held_out_share: float | None
    """The share that limits for the first half of the log reject in the second; None if there is too little traffic."""
    is_stable: bool
    is_within_cap: bool

    @property
    def share(self) -> float:
        return self.rejected / self.requests if self.requests else 0.0

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
            "curve": self.curve,
            "determined_by": self.determining,
            "days": self.days,
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
            "first": iso(self.first_us),
            "last": iso(self.last_us),
            "peak_per_minute": self.peak_per_minute,
            "cap_per_minute": self.cap_per_minute,
            "stable": self.is_stable,
            "instabilities": self.instabilities,
            "conflicts": self.conflicts,
            "limits": [each.as_dict() for each in self.limits],
            "total": self.total,
            "policy": "\n".join(self.policy_lines()) + "\n",
        }

    def policy_lines(self) -> list[str]:
        """The lines of a policy with the suggested limits, and the reasons as comments."""
        lines = [
            f"# Suggested from {self.requests:,} requests from {iso(self.first_us)} to {iso(self.last_us)}.",
            *[f"# goal: {text}" for text in self.goals.texts],
            *[f"# warning: {text}" for text in (*self.conflicts, *self.instabilities)],
        ]
        if self.goals.group is not None and all(each.tier == NO_TIER for each in self.limits):
            lines.append(f"# note: no tiers are known, so all clients count as {_comment(self.goals.group)}")
        main = next((each for each in self.limits if each.tier in (self.default_tier, NO_TIER)), None)
        others = [each for each in self.limits if each is not main]
        if self.default_tier is not None:
            lines.append(f"tier: {_quoted(self.default_tier)}")
        lines.append("limits:")
        for each in self.limits:
            lines += [f"  # {text}" for text in _reasons(each)]
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
        hasher = self.options.hasher()
        policy = self.policy or read(f"limits: [{{by: {self.by}, bucket: 1/second, missing: ip}}]")
        reader = self.options.reader([policy], hasher, self.on_progress)
        engine = self.options.engine(policy, hasher)
        snapshot, identities = engine.snapshot, engine.identities
        identities.kinds |= {self.by} if self.by != "client" else {"tenant", "api_key", "user"}
        groups: dict[str, _TierTraffic] = {}
        known: dict[Any, _ClientTimes | None] = {}
        minutes: Counter[int] = Counter()
        total = _Total(self.goals)

        def find(request: LoggedRequest) -> _ClientTimes | None:
            route = snapshot.route(request[1], decode_path(request[2]))
            if route.is_exempt:
                return None
            who = identities.extract(request[4], request[2], route)
            tier = snapshot.resolve(route, who, request[0]).tier or NO_TIER
            kind = client_kind({name: value for name, value in who.items() if name != "tier"})
            name = who.get(self.by) or who[kind]
            group = groups.setdefault(tier, _TierTraffic(tier))
            return group.clients.setdefault(name, _ClientTimes(array("q")))

        depends_on_target = bool(identities.paths) or bool(policy.routes)
        for batch in sort_by_time(reader.batches()):
            for request in batch:
                key = request[4] if not depends_on_target else (request[4], request[1], request[2])
                if key in known:
                    client = known[key]
                else:
                    if len(known) >= MAX_KNOWN:
                        known.clear()
                    client = known[key] = find(request)
                if client is not None:
                    client.times.append(request[0])
                    minutes[request[0] // MINUTE_US] += 1
                    total.add(request[0])
        requests = sum(minutes.values())
        if not requests:
            raise InvalidInput("the log has no requests to learn from")
        for group in groups.values():
            for client in group.clients.values():
                client.busiest_minute = _busiest(client.times)
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
            requests=requests,
            skipped=reader.skipped,
        )

    def _share_of(self, group: _TierTraffic, policy: Policy) -> float:
        """The goal for a group; InvalidInput for the name of an unknown tier."""
        tiers = {*policy.tiers, policy.default_tier} - {None}
        name = self.goals.group
        if name is not None and name != PAYING and name not in tiers:
            hint = suggest(name, sorted([PAYING, *filter(None, tiers)]))
            raise InvalidInput(f"--goal: {name!r} is not a tier of the policy; {hint}")
        return self.goals.share


class _Total:
    """Decides all requests under the limit of the goal on the total."""

    def __init__(self, goals: Goals) -> None:
        self._limit: Limit | None = None
        if goals.total is not None:
            quota, seconds = goals.total
            self._limit = Limit(quota, timedelta(seconds=seconds), algorithm="sliding_window", name="total")
        self._state: Any = None
        self._requests = self._rejected = 0

    def add(self, at_us: int) -> None:
        if self._limit is not None:
            self._requests += 1
            decide = ALGORITHMS[self._limit.algorithm].decide
            self._state, verdict = decide(self._state, at_us, 1, self._limit)
            self._rejected += verdict[1] != 0

    def result(self) -> dict[str, Any] | None:
        if self._limit is None:
            return None
        share = self._rejected / self._requests if self._requests else 0.0
        reason = f"{self._rejected:,} of {self._requests:,} requests are beyond it ({_percent(share)})"
        spelled = _spelled(self._limit)
        return {"limit": spelled, "rejected": self._rejected, "rejected_share": share, "reason": reason}


def _fit(group: _TierTraffic, target: float, cap: float | None) -> SuggestedLimit:
    """The strictest limit under which each half of the log reaches the goal."""
    times = group.times()
    middle = len(times) // 2
    whole = _LogPart(times[0], times[-1] + 1, len(times))
    halves = [
        _LogPart(times[0], times[middle], bisect_left(times, times[middle])),
        _LogPart(times[middle], times[-1] + 1, len(times) - bisect_left(times, times[middle])),
    ]
    halves = [half for half in halves if half.requests]
    found = [
        (candidate, _least_quota(group, candidate, halves, target))
        for candidate in map(_LimitCandidate._make, CANDIDATES)
    ]
    within = [each for each in found if cap is None or each[0].most_per_minute(each[1]) <= cap]
    candidate, quota = min(within or found, key=lambda each: each[0].most_per_hour(each[1]))
    limit = candidate.limit(quota)
    rejections = group.rejected(limit, whole.since_us, whole.until_us)
    held_out: float | None = None
    if len(times) >= MIN_REQUESTS and len(halves) == 2:
        held_out = _held_out(group, times, halves, candidate, target)
    return SuggestedLimit(
        tier=group.tier,
        limit=limit,
        requests=len(times),
        rejected=sum(map(len, rejections.values())),
        curve=_curve(group, candidate, quota, whole),
        determining=_determining(group, candidate, quota, whole),
        days=_days(group, times, rejections),
        held_out_share=held_out,
        is_stable=held_out is not None and held_out <= TOLERANCE * target,
        is_within_cap=bool(within),
    )


def _least_quota(group: _TierTraffic, candidate: _LimitCandidate, parts: Iterable[_LogPart], target: float) -> int:
    """The least round quota that rejects at most the target share in each part."""

    def is_enough(quota: int) -> bool:
        limit = candidate.limit(quota)
        return all(_share(group, limit, part) <= target for part in parts)

    low, high = 0, len(QUOTAS) - 1
    while low < high:
        at = (low + high) // 2
        if is_enough(QUOTAS[at]):
            high = at
        else:
            low = at + 1
    return QUOTAS[low]


def _share(group: _TierTraffic, limit: Limit, part: _LogPart) -> float:
    return sum(map(len, group.rejected(limit, part.since_us, part.until_us).values())) / part.requests


def _held_out(
    group: _TierTraffic, times: list[int], halves: Sequence[_LogPart], candidate: _LimitCandidate, target: float
) -> float:
    """The share that limits fitted to the first half of the log, as to the whole, reject in the second."""
    first, second = halves
    middle = bisect_left(times, second.since_us) // 2
    parts = [
        _LogPart(first.since_us, times[middle], bisect_left(times, times[middle])),
        _LogPart(times[middle], first.until_us, first.requests - bisect_left(times, times[middle])),
    ]
    quota = _least_quota(group, candidate, [part for part in parts if part.requests], target)
    return _share(group, candidate.limit(quota), second)


def _curve(group: _TierTraffic, candidate: _LimitCandidate, quota: int, part: _LogPart) -> list[dict[str, Any]]:
    """The rejected share and the number of rejected clients for quotas around the suggested one."""
    at = QUOTAS.index(quota)
    points = []
    for each in QUOTAS[max(0, at - CURVE_STEPS) : at + CURVE_STEPS + 1]:
        rejections = group.rejected(candidate.limit(each), part.since_us, part.until_us)
        share = sum(map(len, rejections.values())) / part.requests
        points.append({"quota": each, "burst": candidate.limit(each).burst, "share": share, "clients": len(rejections)})
        if not rejections and each >= quota:
            break
    return points


def _determining(group: _TierTraffic, candidate: _LimitCandidate, quota: int, part: _LogPart) -> list[dict[str, Any]]:
    """The clients that would be rejected most under the next lower quota."""
    at = QUOTAS.index(quota)
    rejections = group.rejected(candidate.limit(QUOTAS[max(0, at - 1)]), part.since_us, part.until_us)
    ranked = sorted(rejections.items(), key=lambda each: (-len(each[1]), each[0]))[:MAX_DETERMINING]
    return [
        {
            "client": name,
            "requests": len(group.clients[name].times),
            "rejected": len(times),
            "busiest_minute": group.clients[name].busiest_minute,
            "at": iso(times[0]),
        }
        for name, times in ranked
    ]


def _days(group: _TierTraffic, times: list[int], rejections: dict[str, list[int]]) -> list[dict[str, Any]]:
    """The rejected share of each day (UTC) under the suggested limit."""
    rejected = Counter(at // DAY_US for each in rejections.values() for at in each)
    days = []
    start = 0
    while start < len(times):
        day = times[start] // DAY_US
        end = bisect_right(times, (day + 1) * DAY_US - 1)
        days.append({"day": iso(day * DAY_US)[:10], "requests": end - start, "share": rejected[day] / (end - start)})
        start = end
    return days


def _busiest(times: Sequence[int]) -> int:
    """The most requests within one minute."""
    most = start = 0
    for end, at_us in enumerate(times):
        while times[start] <= at_us - MINUTE_US:
            start += 1
        most = max(most, end - start + 1)
    return most


def _reasons(each: SuggestedLimit) -> list[str]:
    rejected = f"rejects {each.rejected:,} of {each.requests:,} requests ({_percent(each.share)})"
    lines = [f"{_name(each)}: {rejected}"]
    if each.limit.algorithm == "token_bucket" and each.limit.capacity > each.limit.quota:
        lines.append(f"token_bucket: clients send up to {each.limit.capacity:,} at once, but less on average")
    elif each.limit.algorithm == "sliding_window":
        lines.append("sliding_window: the traffic of clients is even, so a burst is not needed")
    if each.days:
        worst = max(each.days, key=lambda day: day["share"])
        lines.append(f"worst of {len(each.days)} days: {worst['day']} with {_percent(worst['share'])}")
    if each.held_out_share is not None:
        lines.append(f"limits for the first half of the log reject {_percent(each.held_out_share)} in the second")
    if each.determining:
        names = ", ".join([_comment(found["client"]) for found in each.determining[:3]])
        lines.append(f"a lower limit would first reject {names}")
    return lines


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
