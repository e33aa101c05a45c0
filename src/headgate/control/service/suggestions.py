"""Suggested limits, derived from the decision log. Nothing is applied."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from headgate._fork import reinit_after_fork
from headgate.clock import DAY_US
from headgate.control.service.dependencies import ServiceDependencies, TopicService
from headgate.control.service.models import View
from headgate.errors import InvalidInput
from headgate.replay.goals import parse_goals
from headgate.replay.run import LogOptions
from headgate.replay.suggest import CurvePoint, DeterminingClient, SuggestedDay, SuggestionRun

if TYPE_CHECKING:
    from collections.abc import Sequence

    from headgate.control.service.models import Actor
    from headgate.replay.suggest import SuggestedLimit, Suggestion

__all__ = ["DEFAULT_GOAL", "MAX_DAYS", "SuggestedLimitView", "SuggestedTotal", "SuggestionService", "SuggestionView"]

DEFAULT_GOAL: Final = "reject at most 0.1% of requests"
MAX_DAYS: Final = 30
MAX_RECORDS: Final = 100_000
"""Records that are read, the newest ones: some seconds of work, and about 50 MB."""
MAX_AGE_US: Final = 300_000_000
"""Age up to which a suggestion is shown again."""
MAX_KEPT: Final = 8
NO_RECORDS: Final = "the decision log has no requests in this time"


@dataclass(frozen=True, slots=True)
class SuggestedLimitView(View):
    """The suggested numbers of one tier, and the reasons for them."""

    tier: str | None
    allows: str
    """The limit as in a policy."""
    quota: int
    requests: int
    rejected: int
    """The requests that it would have rejected."""
    share: float
    held_out_share: float | None
    """The share that limits for the first half of the requests reject in the second; None for too few requests."""
    is_stable: bool
    is_within_cap: bool
    """False if the goal for the most that one client gets cannot be reached."""
    reasons: tuple[str, ...]
    curve: tuple[CurvePoint, ...]
    determined_by: tuple[DeterminingClient, ...]
    days: tuple[SuggestedDay, ...]


@dataclass(frozen=True, slots=True)
class SuggestedTotal(View):
    """The effect of the goal for all clients together."""

    allows: str
    rejected: int
    share: float


@dataclass(frozen=True, slots=True)
class SuggestionView(View):
    """Suggested limits for a goal, as a policy and with their reasons."""

    goals: tuple[str, ...]
    days: int
    """The days that were asked for."""
    first_us: int | None
    """The time of the first request that was read; None if there is none."""
    last_us: int | None
    requests: int
    limits: tuple[SuggestedLimitView, ...]
    total: SuggestedTotal | None
    policy: str
    """A document to merge."""
    warnings: tuple[str, ...]
    """The reasons not to trust the suggestion."""
    notes: tuple[str, ...]
    """The limits of the data."""
    troubles: tuple[str, ...]
    """The reasons why there is no suggestion."""


class SuggestionService(TopicService):
    """Derives limits from the decision log and a goal."""

    def __init__(self, deps: ServiceDependencies) -> None:
        super().__init__(deps)
        self._kept: dict[tuple[str, int, int], tuple[int, SuggestionView]] = {}
        """By goals, days and version of the configuration: the time, and the view."""
        self.reset_after_fork()
        reinit_after_fork(self)

    def reset_after_fork(self) -> None:
        """Replace the lock, whose owner may not exist in the child."""
        self._lock = threading.Lock()
        """Held while a suggestion is computed, so that several do not compete for the CPU."""

    def suggest(self, actor: Actor, goals: Sequence[str] = (), *, days: int = 7) -> SuggestionView:
        """Suggested limits for the requests of the last days in the decision log. Suggestions are kept for five
        minutes."""
        actor.require("operator", "ask for suggested limits")
        if not 1 <= days <= MAX_DAYS:
            raise InvalidInput(f"days: give 1 to {MAX_DAYS}, not {days}")
        parsed = parse_goals(goals or (DEFAULT_GOAL,))
        key = ", ".join(parsed.texts), days, self._deps.config.version
        with self._lock:
            now_us = self._deps.now_us()
            self._kept = {each: kept for each, kept in self._kept.items() if now_us - kept[0] < MAX_AGE_US}
            if key not in self._kept:
                base = self._deps.current_policy()
                policy = base.policy if base.policy.rules else None
                run = SuggestionRun(parsed, LogOptions(()), policy)
                found = self._deps.log.suggest(run, since_us=now_us - days * DAY_US, most=MAX_RECORDS)
                view = _without_suggestion(run, days, self._deps.log.trouble) if found is None else _view(found, days)
                if len(self._kept) >= MAX_KEPT:
                    self._kept.pop(min(self._kept, key=lambda each: self._kept[each][0]))
                self._kept[key] = now_us, view
            return self._kept[key][1]


def _without_suggestion(run: SuggestionRun, days: int, trouble: str | None) -> SuggestionView:
    goals = tuple(run.goals.texts)
    return SuggestionView(goals, days, None, None, 0, (), None, "", (), (), (trouble or NO_RECORDS,))


def _view(found: Suggestion, days: int) -> SuggestionView:
    total = found.total
    notes = found.notes
    if found.is_cut:
        notes.append(f"only the newest {MAX_RECORDS:,} records of the decision log were read")
    return SuggestionView(
        goals=tuple(found.goals.texts),
        days=days,
        first_us=found.first_us,
        last_us=found.last_us,
        requests=found.requests,
        limits=tuple(map(_limit_view, found.limits)),
        total=None if total is None else SuggestedTotal(total["limit"], total["rejected"], total["rejected_share"]),
        policy="\n".join(found.policy_lines()) + "\n",
        warnings=(*found.conflicts, *found.instabilities),
        notes=tuple(notes),
        troubles=(),
    )


def _limit_view(each: SuggestedLimit) -> SuggestedLimitView:
    return SuggestedLimitView(
        tier=each.known_tier,
        allows=each.spelled,
        quota=each.limit.quota,
        requests=each.requests,
        rejected=each.rejected,
        share=each.share,
        held_out_share=each.held_out_share,
        is_stable=each.is_stable,
        is_within_cap=each.is_within_cap,
        reasons=tuple(each.reasons),
        curve=tuple(each.curve),
        determined_by=tuple(each.determining),
        days=tuple(each.days),
    )
