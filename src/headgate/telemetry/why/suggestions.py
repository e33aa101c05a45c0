"""What would have let a client's requests pass: an override, ready to paste into the policy."""

from __future__ import annotations

import json
from datetime import timedelta
from typing import TYPE_CHECKING, Final, NamedTuple

from headgate._limit_syntax import spell
from headgate.algorithms import ALGORITHMS
from headgate.errors import InvalidLimit
from headgate.limits import Limit
from headgate.policy.api_keys import PREFIX
from headgate.policy.model import NET_SUFFIX
from headgate.policy.snapshot import CLIENT_KINDS

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from headgate.telemetry.decision_log.record import DecisionRecord, LimitDenial

__all__ = ["SuggestedOverride", "remedy"]

EXACT_DIGITS: Final = 2
"""Numbers for people are rounded up to so many."""
AWAY: Final = "while the store is available: without it, a node has only a share of the limit"


class SuggestedOverride(NamedTuple):
    """Numbers under which all would have passed, and how to say so in the policy."""

    limit: Limit | None
    """None if no limit can be so large."""
    line: str | None
    """An entry of `overrides:`; None where the limit has no numbers of one client's own."""
    note: str | None
    """What to see to before it is used."""


def remedy(
    denial: LimitDenial,
    peak: int,
    records: Sequence[DecisionRecord],
    identities: Mapping[str, tuple[str, str]],
    *,
    split: int = 1,
) -> SuggestedOverride:
    """What would have let all of the records pass, of which a limit denied up to `peak` in one of its periods.

    What was let in keeps to the limit as it is, and what was denied to one of `peak` per period, `peak` at once: both
    together keep to the sum of the two.
    """
    limit = _sum(denial, peak, split)
    if limit is None:
        return SuggestedOverride(None, None, "no limit can be so large")
    if denial.limit.endswith(NET_SUFFIX):
        unknown = "the limit counts unknown API keys by address; list the key under clients, or add a limit by ip"
        return SuggestedOverride(limit, None, unknown)
    by = denial.by.split("+")
    kinds = CLIENT_KINDS if "client" in by else tuple(each for each in by if each not in ("global", "endpoint"))
    found = _identity(kinds, records, identities)
    if found is None:
        shared = f"the limit counts by {denial.by}, so it cannot be overridden for one client; raise it for everyone"
        return SuggestedOverride(limit, None, shared)
    kind, value, note = found
    if split > 1 and note is None:
        note = f"the limit is split over {split} counters, one of which may deny before the others"
    if any(record.degraded for record in records):
        note = AWAY if note is None else f"{note}; {AWAY}"
    fields = {kind: value, "limit": denial.limit, "bucket": _bucket(limit)}
    line = "{" + ", ".join(f"{name}: {json.dumps(text)}" for name, text in fields.items()) + "}"
    return SuggestedOverride(limit, line, note)


def _sum(denial: LimitDenial, peak: int, split: int) -> Limit | None:
    """The limit with that much more."""
    shapes_burst = ALGORITHMS[denial.algorithm].SHAPES_BURST
    period = timedelta(microseconds=denial.period_us)
    for rounded in (_rounded, int):
        quota = _multiple(rounded(denial.quota + peak), split)
        burst = _multiple(rounded(denial.burst + peak), split) if shapes_burst else None
        try:
            return Limit(quota, period, burst=burst, algorithm=denial.algorithm, name=denial.limit)
        except InvalidLimit:
            continue
    return None


def _identity(
    kinds: Sequence[str], records: Sequence[DecisionRecord], identities: Mapping[str, tuple[str, str]]
) -> tuple[str, str, str | None] | None:
    """Whose override it is: somebody of these kinds who sent all of the requests, and whom we can name."""
    common = set.intersection(*[set(zip(record.kinds, record.clients, strict=True)) for record in records])
    for kind, key in sorted(common):
        if kind in kinds and (key in identities or kind == "api_key") and key.startswith(PREFIX):
            return kind, identities.get(key, (kind, key))[1], None
    for kind in kinds:
        keys = [
            key for record in records for each, key in zip(record.kinds, record.clients, strict=True) if each == kind
        ]
        if keys:
            several = f", once for each of the {len(set(keys))} that were rejected" if len(set(keys)) > 1 else ""
            return kind, "...", f"insert the {kind}, of which the log has only a keyed hash{several}"
    return None


def _bucket(limit: Limit) -> str:
    """The limit in the words of policies."""
    burst = f", burst {limit.burst}" if limit.burst != limit.quota else ""
    algorithm = f", {limit.algorithm}" if limit.algorithm != "token_bucket" else ""
    return f"{limit.quota}/{spell(limit.period)}{burst}{algorithm}"


def _rounded(number: int) -> int:
    """Up to a number that people would say.

    >>> _rounded(7), _rounded(103), _rounded(2001)
    (7, 110, 2100)
    """
    unit: int = 10 ** max(0, len(str(number)) - EXACT_DIGITS)
    return -(number // -unit) * unit


def _multiple(number: int, of: int) -> int:
    return -(number // -of) * of
