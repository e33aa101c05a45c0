"""Explains from the decision log why a client was rejected. See docs/decision-log.md."""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from headgate.errors import InvalidInput
from headgate.gate.options import SECRET_VARIABLE
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
"""Records that are read at most for one report."""
LONGEST_LOSS_US: Final = 86_400_000_000
CHALLENGED: Final = ("challenged", "slowed-down")
OTHER_NOTES: Final = ("blocked", "overloaded")
"""Reasons of records whose note does not explain actions."""
GUESSED: Final = ("tenant", "user", "api_key")
"""Kinds that a single word may name."""


class ClientQuery(NamedTuple):
    """A client, with the keys of its records in the log."""

    shown: str
    """The text that named the client; empty if it may be an API key."""
    keys: tuple[str, ...]
    identities: dict[str, tuple[str, str]]
    """Kind and value by key, as far as known."""

    @classmethod
    def read(cls, written: str, clients: Pseudonymizer | None, policy: Policy | None = None) -> ClientQuery:
        """Parse a label, hash, address, tenant, user or API key; "tenant=acme" names the kind.

        Without `clients`, which has the gate's secret, only labels and hashes are found.
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
    """The denials of one limit."""

    denial: LimitDenial
    """The denial that exceeded the limit most."""
    at_us: int
    """The time of that denial."""
    count: int
    cost: int
    """The total cost of all denials."""
    first_us: int
    last_us: int
    degraded: int
    """Denials that were decided without the store."""
    shadow: int
    """Denials in shadow mode, which were not enforced."""
    peak: int
    """The largest cost that was denied within one period of the limit: see `peak_width_us`."""
    routes: tuple[tuple[str, int], ...]
    """Routes with their number of denials, most first."""
    remedy: SuggestedOverride

    @property
    def over(self) -> int:
        """The excess of the worst request."""
        return self.denial.cost - self.denial.remaining


@dataclass(frozen=True, slots=True)
class RejectionReport:
    """The outcome of a client's requests in a period."""

    asked: str
    span: Span
    labels: tuple[str, ...]
    """Labels of the clients that were found."""
    rejected: int
    denied: int
    blocked: int
    block_notes: tuple[str, ...]
    challenged: int
    """Those of the blocked requests that had to pass a challenge, or could not be held back."""
    action_notes: tuple[str, ...]
    """Explanations of the actions other than blocks that have applied to requests, also to those that passed."""
    unavailable: int
    """Rejections with status 503: on routes that fail closed while the store was unavailable, or shed."""
    overloaded: int
    """Those that were shed because the service was overloaded."""
    overload_notes: tuple[str, ...]
    passed: float
    """Accepted requests, estimated from the sample."""
    degraded: int
    """Rejections that were decided without the store, and how."""
    degraded_by: tuple[str, ...]
    limits: tuple[LimitDenials, ...]
    nodes: tuple[str, ...]
    lost: int
    """Decisions of all clients in this period that could not be logged."""
    is_cut: bool
    """True if there are more records than were read."""
    before_us: int | None
    after_us: int | None
    """The last rejection before the period and the first after it; only if there is none in it."""


def why(
    reader: Reader, asked: ClientQuery, span: Span, *, policy: Policy | None = None, most: int = MOST
) -> RejectionReport:
    """Report on a client in a period. The current policy contains how limits are sharded."""
    since_us, until_us = span.since_us, span.until_us
    records = reader.find(asked.keys, since_us=since_us, until_us=until_us, most=most + 1)
    is_cut, records = len(records) > most, records[:most]
    rejections = [record for record in records if record.is_rejection]
    losses = reader.find((LOST,), since_us=since_us - LONGEST_LOSS_US, until_us=until_us, most=most)
    before_us, after_us = (None, None) if rejections else reader.nearest(asked.keys, at_us=since_us)
    explained = [record for record in records if record.note and record.reason not in OTHER_NOTES]
    counts = Counter(record.outcome for record in rejections)
    splits = {} if policy is None else {rule.name: rule.split for rule in policy.rules}
    return RejectionReport(
        asked=asked.shown,
        span=span,
        labels=tuple(dict.fromkeys(record.label for record in records)),
        rejected=len(rejections),
        denied=counts["denied"],
        blocked=counts["blocked"],
        block_notes=tuple(dict.fromkeys(each.note for each in rejections if each.reason == "blocked" and each.note)),
        challenged=sum(each.reason in CHALLENGED for each in rejections),
        action_notes=tuple(dict.fromkeys(each.note for each in explained)),
        unavailable=counts["unavailable"],
        overloaded=sum(each.reason == "overloaded" for each in rejections),
        overload_notes=tuple(dict.fromkeys(each.note for each in rejections if each.reason == "overloaded")),
        passed=sum(record.weight for record in records if record.outcome == "allowed"),
        degraded=sum(bool(record.degraded) for record in rejections),
        degraded_by=tuple(dict.fromkeys(record.degraded for record in rejections if record.degraded)),
        limits=tuple(_limits(records, asked, splits)),
        nodes=tuple(sorted({record.node for record in rejections})),
        lost=round(sum(each.weight for each in losses if each.at_us + each.period_us >= since_us)),
        is_cut=is_cut,
        before_us=before_us,
        after_us=after_us,
    )


def _limits(records: Sequence[DecisionRecord], asked: ClientQuery, splits: Mapping[str, int]) -> Iterable[LimitDenials]:
    """Denials by limit, most first. Limits of the same name with other numbers are separate."""
    grouped: dict[tuple[Any, ...], list[tuple[DecisionRecord, LimitDenial]]] = {}
    for record in records:
        for denial in record.denials:
            grouped.setdefault((*denial[:-3], record.shadow), []).append((record, denial))
    for found in sorted(grouped.values(), key=len, reverse=True):
        worst_record, worst = max(found, key=lambda each: each[1].cost - each[1].remaining)
        peak = _peak([(record.at_us, denial.cost) for record, denial in found], worst)
        routes = Counter(f"{record.method} {record.route}" for record, _ in found)
        split, rejected = splits.get(worst.limit, 1), [record for record, _ in found]
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
            remedy=remedy(worst, peak, rejected, asked.identities, split=split),
        )


def _peak(costs: Sequence[tuple[int, int]], denial: LimitDenial) -> int:
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
        return None  # not a valid API key
