"""Progression of actions: a client that is found again climbs the steps of a scenario, and quiet time takes it down.

Pure functions of the stored record, so that all nodes come to the same result. `headgate.abuse.actions` applies them
to the store, where only one of several concurrent changes succeeds; the others are computed again.
"""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING, Final

from headgate.local.restrictions import MAX_DELAY_US, MAX_DIFFICULTY, MAX_FACTOR, Restriction

if TYPE_CHECKING:
    from headgate.abuse.model import AbuseScenario

__all__ = ["MIN_SETTLE_US", "climb", "level_at", "undo"]

MICROSECOND: Final = timedelta(microseconds=1)
MIN_SETTLE_US: Final = 10_000_000
"""The shortest time that an action has to take effect: findings within it count once, whichever node reports them."""
MAX_DOUBLINGS: Final = 20
"""Levels beyond the last step; durations have reached their cap long before."""
MAX_TEXT: Final = 500


def climb(previous: Restriction | None, scenario: AbuseScenario, evidence: str, now_us: int) -> Restriction | None:
    """The restriction of a client that was found now; None if the finding changes nothing.

    That is so within the window of the scenario after an action has begun, as the evidence is then still that of the
    time before; while the client is blocked; and within the grace time after an undo.
    """
    longest_us = scenario.longest // MICROSECOND
    level = 0
    if previous is not None and not _is_of_the_future(previous, longest_us, now_us):
        if previous.undone_us is not None and now_us < previous.forget_us:
            return None
        if previous.shadow == scenario.shadow and previous.undone_us is None:
            if now_us < previous.at_us + max(MIN_SETTLE_US, scenario.window // MICROSECOND):
                return None
            if previous.action == "block" and now_us < previous.until_us:
                return None
            level = level_at(previous, scenario, now_us)
    steps = scenario.steps
    level = min(level + 1, len(steps) + MAX_DOUBLINGS)
    step = steps[min(level, len(steps)) - 1]
    duration_us = step.duration // MICROSECOND << max(0, level - len(steps))
    until_us = now_us + max(1, min(duration_us, longest_us))
    return Restriction(
        scenario.name,
        step.action,
        level,
        now_us,
        until_us,
        until_us + level * (scenario.decay // MICROSECOND),
        evidence=_one_line(evidence),
        factor=min(step.factor, MAX_FACTOR) if step.action == "tighten" else 1,
        delay_us=min(step.delay // MICROSECOND, MAX_DELAY_US) if step.action == "delay" else 0,
        mode=step.mode if step.action == "challenge" else "page",
        url=(step.url or "") if step.action == "challenge" else "",
        difficulty=min(step.difficulty, MAX_DIFFICULTY) if step.action == "challenge" else 0,
        shadow=scenario.shadow,
    )


def level_at(previous: Restriction, scenario: AbuseScenario, now_us: int) -> int:
    """The level of a client: one is lost for each quiet time after the end of its last action."""
    quiet_us = max(0, now_us - previous.until_us)
    return max(0, previous.level - quiet_us // max(1, scenario.decay // MICROSECOND))


def undo(restriction: Restriction, grace: timedelta, by: str, now_us: int) -> Restriction:
    """The restriction after a person has ended it: the scenario does not act on the client during the grace time."""
    forget_us = now_us + grace // MICROSECOND
    return replace(restriction, level=0, undone_us=now_us, undone_by=_one_line(by), forget_us=forget_us)


def _is_of_the_future(restriction: Restriction, longest_us: int, now_us: int) -> bool:
    """True if it has begun further in the future than clocks differ: a clock was wrong, which must not last."""
    return restriction.at_us > now_us + longest_us


def _one_line(text: str) -> str:
    """The text in printable characters, of bounded length."""
    printable = "".join([char if char.isprintable() else "?" for char in text[: MAX_TEXT + 1]])
    return printable if len(printable) <= MAX_TEXT else f"{printable[: MAX_TEXT - 1]}…"
