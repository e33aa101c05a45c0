"""Finds out from the decision log why a client was rejected: by which limits, how far over, and what would have helped.
See docs/decision-log.md."""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from headgate.errors import InvalidInput
from headgate.gate.base import SECRET_VARIABLE
from headgate.policy.addresses import canonical
from headgate.policy.api_keys import PREFIX
from headgate.telemetry.decision_log.record import LOST
from headgate.telemetry.pseudonyms import label_key
from headgate.telemetry.why.suggestions import SuggestedOverride, remedy

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from headgate.policy.model import Policy
    from headgate.telemetry.decision_log.record import DecisionRecord, LimitDenial
    from headgate.telemetry.decision_log.sinks import Reader
    from headgate.telemetry.human_time import Span
    from headgate.telemetry.pseudonyms import Pseudonymizer

__all__ = ["ClientQuery", "LimitDenials", "RejectionReport", "peak_width_us", "why"]

MOST: Final = 200_000
"""Records that are looked at; who needs more asks for a shorter time."""
LONGEST_LOSS_US: Final = 86_400_000_000
GUESSED: Final = ("tenant", "user", "api_key")
"""What somebody may be who is given by a single word."""


class ClientQuery(NamedTuple):
    """Whom a question is about: the keys under which that may be found."""

    shown: str
    """What was written, where it is certain to be no API key; else empty."""
    keys: tuple[str, ...]
    identities: dict[str, tuple[str, str]]
    """Kind and value of each key that stands for one, as far as is known."""

    @classmethod
    def read(cls, written: str, clients: Pseudonymizer | None, policy: Policy | None = None) -> ClientQuery:
        """Somebody's label, hash, address, tenant, user or API key; "tenant=acme" says which of these it is.

        Without the gate's secret, which `clients` has, only labels and hashes can be looked for.
        """
        known = clients.known_identities(policy) if clients is not None and policy is not None else {}
        if written.startswith(PREFIX):
            return cls(written.lower(), (written.lower(),), known)
        kind, sign, value = written.partition("=")
        if not (sign and value and kind.isidentifier()):
            kind, value = ("ip", written) if canonical(written) is not None or "/" in written else ("", written)
        if clients is None:
            if kind:
                raise InvalidInput(
                    f"the log names each {kind} by a keyed hash, and there is no secret to make that with: give "
                    f"--secret-file, or set {SECRET_VARIABLE}, to the gate's own"
                )
            return cls("", (label_key(written),), known)
        may_be = {key: each for each in ((kind,) if kind else GUESSED) if (key := _key(clients, each, value))}
        values = {key: (each, key if each == "api_key" else value) for key, each in may_be.items()}
        shown = written if kind not in ("", "api_key") else ""
        return cls(shown, (*may_be, *(() if kind else (label_key(written),))), {**values, **known})


@dataclass(frozen=True, slots=True)
class LimitDenials:
    """What one limit denied."""

    denial: LimitDenial
    """The one that was furthest over."""
    at_us: int
    """When that was."""
    count: int
    cost: int
    """Of all that was denied."""
    first_us: int
    last_us: int
    degraded: int
    """How many were decided without the store."""
    shadow: int
    """How many were not denied, as the limit is only watched."""
    peak: int
    """The largest cost that was denied within one period of the limit: see `peak_width_us`."""
    routes: tuple[tuple[str, int], ...]
    """Where, and how often, the busiest first."""
    remedy: SuggestedOverride

    @property
    def over(self) -> int:
        """By how much the worst request was over the limit."""
        return self.denial.cost - self.denial.remaining


@dataclass(frozen=True, slots=True)
class RejectionReport:
    """What became of a client's requests in a time."""

    asked: str
    span: Span
    labels: tuple[str, ...]
    """What the clients are called that were found."""
    rejected: int
    denied: int
    blocked: int
    block_notes: tuple[str, ...]
    unavailable: int
    """Rejected because the store was away, on routes that fail closed."""
    passed: float
    """About so many got in, by the sample."""
    degraded: int
    """Of those that were rejected, how many were decided without the store, and by what."""
    degraded_by: tuple[str, ...]
    limits: tuple[LimitDenials, ...]
    nodes: tuple[str, ...]
    lost: int
    """Decisions of whatever client that could not be kept in this time: there may have been more."""
    is_cut: bool
    """Whether there were more than could be looked at."""
    before_us: int | None
    after_us: int | None
    """The last rejection before the time, and the first after it; looked for only if there was none in it."""


def why(
    reader: Reader, asked: ClientQuery, span: Span, *, policy: Policy | None = None, most: int = MOST
) -> RejectionReport:
    """What the log says of a client in a time. The policy is that of today; it says how limits are split."""
    since_us, until_us = span.since_us, span.until_us
    records = reader.find(asked.keys, since_us=since_us, until_us=until_us, most=most + 1)
    is_cut, records = len(records) > most, records[:most]
    rejections = [record for record in records if record.is_rejection]
    losses = reader.find((LOST,), since_us=since_us - LONGEST_LOSS_US, until_us=until_us, most=most)
    before_us, after_us = (None, None) if rejections else reader.nearest(asked.keys, at_us=since_us)
    counts = Counter(record.outcome for record in rejections)
    return RejectionReport(
        asked=asked.shown,
        span=span,
        labels=tuple(dict.fromkeys(record.label for record in records)),
        rejected=len(rejections),
        denied=counts["denied"],
        blocked=counts["blocked"],
        block_notes=tuple(dict.fromkeys(each.note for each in rejections if each.outcome == "blocked" and each.note)),
        unavailable=counts["unavailable"],
        passed=sum(record.weight for record in records if record.outcome == "allowed"),
        degraded=sum(bool(record.degraded) for record in rejections),
        degraded_by=tuple(dict.fromkeys(record.degraded for record in rejections if record.degraded)),
        limits=tuple(
            _limits(records, asked, {} if policy is None else {rule.name: rule.split for rule in policy.rules})
        ),
        nodes=tuple(sorted({record.node for record in rejections})),
        lost=round(sum(each.weight for each in losses if each.at_us + each.period_us >= since_us)),
        is_cut=is_cut,
        before_us=before_us,
        after_us=after_us,
    )


def _limits(records: Sequence[DecisionRecord], asked: ClientQuery, splits: Mapping[str, int]) -> Iterable[LimitDenials]:
    """By limit, the one that denied most often first. Other numbers of the same name are another limit."""
    grouped: dict[tuple[Any, ...], list[tuple[DecisionRecord, LimitDenial]]] = {}
    for record in records:
        for denial in record.denials:
            grouped.setdefault((*denial[:-3], record.shadow), []).append((record, denial))
    for found in sorted(grouped.values(), key=len, reverse=True):
        worst_record, worst = max(found, key=lambda each: each[1].cost - each[1].remaining)
        peak = _peak([(record.at_us, denial.cost) for record, denial in found], worst)
        routes = Counter(f"{record.method} {record.route}" for record, _ in found)
        yield LimitDenials(
            denial=worst,
            at_us=worst_record.at_us,
            count=len(found),
            cost=sum(denial.cost for _, denial in found),
            first_us=found[0][0].at_us,
            last_us=found[-1][0].at_us,
            degraded=sum(bool(record.degraded) for record, _ in found),
            shadow=sum(record.shadow for record, _ in found),
            peak=peak,
            routes=tuple(routes.most_common(3)),
            remedy=remedy(
                worst,
                peak,
                [record for record, _ in found],
                asked.identities,
                split=splits.get(worst.limit, 1),
            ),
        )


def _peak(costs: Sequence[tuple[int, int]], denial: LimitDenial) -> int:
    """The largest cost that was denied within `peak_width_us`."""
    width_us = peak_width_us(denial)
    window: deque[tuple[int, int]] = deque()
    total = peak = 0
    for at_us, cost in sorted(costs):
        window.append((at_us, cost))
        total += cost
        while window[0][0] <= at_us - width_us:
            total -= window.popleft()[1]
        peak = max(peak, total)
    return peak


def peak_width_us(denial: LimitDenial) -> int:
    """The time over which excess demand is added up: a period of the limit, or two of an approximate window."""
    return denial.period_us * (2 if denial.algorithm == "sliding_window" else 1)


def _key(clients: Pseudonymizer, kind: str, written: str) -> str | None:
    try:
        return clients.hash_of(kind, written)
    except InvalidInput:
        return None  # it cannot be an API key
