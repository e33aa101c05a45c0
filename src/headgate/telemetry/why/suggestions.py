"""Suggests an override that would have admitted the rejected requests, ready to paste into the policy."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Final, NamedTuple

from headgate._limit_syntax import spell
from headgate.errors import InvalidLimit
from headgate.limits import DEFAULT_ALGORITHM, Limit
from headgate.policy.api_keys import PREFIX
from headgate.policy.model import NET_SUFFIX
from headgate.policy.snapshot import CLIENT_KINDS
from headgate.telemetry.decision_log.record import ENVOY_METHODS

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from headgate.telemetry.decision_log.record import DecisionRecord, LimitDenial

__all__ = ["SuggestedOverride", "remedy"]

EXACT_DIGITS: Final = 2
"""Significant digits of suggested numbers."""
ENVOY_FILES: Final = "its number is in the configuration files of Envoy: raise it there, or for one value in overrides"
AWAY: Final = "while the store is available: without it, a node has only a share of the limit"


class SuggestedOverride(NamedTuple):
    """A limit that would have admitted all requests, and its entry in the policy."""

    limit: Limit | None
    """None if no valid limit is large enough."""
    line: str | None
    """An entry of `overrides:`; None if the limit cannot be overridden for one client."""
    note: str | None
    """A caveat to check before using it."""


def remedy(
    denial: LimitDenial,
    peak: int,
    records: Sequence[DecisionRecord],
    identities: Mapping[str, tuple[str, str]],
    *,
    split: int,
) -> SuggestedOverride:
    """Suggest a limit that admits all of the records, of which at most `peak` were denied in one period.

    The admitted requests obey the current limit, and the denied ones a limit of `peak` per period with a burst of
    `peak`; together they obey the sum of both.
    """
    limit = _sum(denial, peak, split)
    if limit is None:
        return SuggestedOverride(None, None, "no limit can be so large")
    if denial.limit.endswith(NET_SUFFIX):
        unknown = "the limit counts unknown API keys by address; list the key under clients, or add a limit by ip"
        return SuggestedOverride(limit, None, unknown)
    if records[0].method in ENVOY_METHODS:
        return SuggestedOverride(limit, None, ENVOY_FILES)
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
    limit = denial.allows
    shapes_burst = limit.implementation.SHAPES_BURST
    for rounded in (_rounded, int):
        quota = _multiple(rounded(denial.quota + peak), split)
        burst = _multiple(rounded(denial.burst + peak), split) if shapes_burst else None
        try:
            return Limit(quota, limit.period, burst=burst, algorithm=limit.algorithm, name=denial.limit)
        except InvalidLimit:
            continue
    return None


def _identity(
    kinds: Sequence[str], records: Sequence[DecisionRecord], identities: Mapping[str, tuple[str, str]]
) -> tuple[str, str, str | None] | None:
    """The client of the override: of one of these kinds, the sender of all requests, and known by name."""
    keyed = [[*zip(record.kinds, record.clients, strict=True)] for record in records]
    for kind, key in sorted(set.intersection(*map(set, keyed))):
        if kind in kinds and (key in identities or kind == "api_key") and key.startswith(PREFIX):
            return kind, identities.get(key, (kind, key))[1], None
    for kind in kinds:
        keys = {key for pairs in keyed for each, key in pairs if each == kind}
        if keys:
            several = f", once for each of the {len(keys)} that were rejected" if len(keys) > 1 else ""
            return kind, "...", f"insert the {kind}, of which the log has only a keyed hash{several}"
    return None


def _bucket(limit: Limit) -> str:
    burst = f", burst {limit.burst}" if limit.burst != limit.quota else ""
    algorithm = f", {limit.algorithm}" if limit.algorithm != DEFAULT_ALGORITHM and limit.calendar is None else ""
    return f"{limit.quota}/{spell(limit.period)}{burst}{algorithm}"


def _rounded(number: int) -> int:
    """Round up to two significant digits.

    >>> _rounded(7), _rounded(103), _rounded(2001)
    (7, 110, 2100)
    """
    unit: int = 10 ** max(0, len(str(number)) - EXACT_DIGITS)
    return -(number // -unit) * unit


def _multiple(number: int, of: int) -> int:
    return -(number // -of) * of
