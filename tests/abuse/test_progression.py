"""Progression of actions: an independent model, and what holds whatever is found and whenever."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headgate.abuse.model import AbuseScenario, ActionStep, Threshold
from headgate.abuse.progression import MIN_SETTLE_US, climb, level_at, undo
from headgate.local.restrictions import (
    ClientRestrictions,
    Restriction,
    encode_restrictions,
    read_restrictions,
)

SECOND = 1_000_000
START_US = 1_763_251_200 * SECOND
STEPS = (
    ActionStep("tighten", timedelta(minutes=5)),
    ActionStep("delay", timedelta(minutes=5), delay=timedelta(seconds=2)),
    ActionStep("block", timedelta(minutes=10)),
)


def scenario(**more: Any) -> AbuseScenario:
    settings: Any = {
        "window": timedelta(minutes=1),
        "steps": STEPS,
        "decay": timedelta(hours=1),
        "longest": timedelta(hours=2),
        **more,
    }
    return AbuseScenario("login-botnet", "ip", (Threshold("accounts", 20),), **settings)


def found(previous: Restriction | None, at_s: float, **more: Any) -> Restriction | None:
    return climb(previous, scenario(**more), "45 accounts were tried", START_US + int(at_s * SECOND))


CLIMB: list[tuple[int, str | None, int, int]] = [
    # the second of a finding, the action, the level, and the minutes that it lasts; None if nothing changes
    (0, "tighten", 1, 5),
    (59, None, 0, 0),  # the evidence may still be that of the time before
    (60, "delay", 2, 5),
    (130, "block", 3, 10),
    (729, None, 0, 0),  # blocked
    (730, "block", 4, 20),  # beyond the last step, durations double
    (1930, "block", 5, 40),
    (4330, "block", 6, 80),
    (9130, "block", 7, 120),  # the cap
    (16330, "block", 8, 120),
    (16330 + 7200 + 3599, "block", 9, 120),  # not quiet for long enough
    (16330 + 7200 + 3599 + 7200 + 3 * 3600, "block", 7, 120),  # three levels lost
]


def test_repeated_findings_climb_and_durations_grow() -> None:
    restriction: Restriction | None = None
    for at_s, action, level, minutes in CLIMB:
        after = found(restriction, at_s)
        assert (after is None) == (action is None), at_s
        if after is not None:
            lasts_us = after.until_us - after.at_us
            assert (after.action, after.level, lasts_us) == (action, level, minutes * 60 * SECOND), at_s
            restriction = after


@pytest.mark.parametrize("hours", range(6))
def test_level_decays_after_quiet_time(hours: int) -> None:
    first = found(None, 0)
    second = found(first, 60)
    assert second is not None
    end_us = second.until_us + hours * 3600 * SECOND
    assert level_at(second, scenario(), end_us) == max(0, 2 - hours)
    assert level_at(second, scenario(), end_us - 1) == max(0, 2 - max(0, hours - 1))
    assert (end_us >= second.forget_us) == (hours >= 2)


def test_undo_keeps_the_scenario_from_acting_again_for_a_while() -> None:
    restriction = found(None, 0)
    assert restriction is not None
    undone = undo(restriction, timedelta(hours=1), "ada", START_US + 10 * SECOND)
    assert not undone.applies_at(START_US + 10 * SECOND)
    assert found(undone, 3609) is None
    again = found(undone, 3610)
    assert again is not None
    assert (again.action, again.level) == ("tighten", 1)


def test_enforced_actions_start_at_the_first_step_after_shadow_mode() -> None:
    shadow = found(None, 0, shadow=True)
    assert shadow is not None
    assert shadow.shadow
    assert not shadow.applies_at(START_US)
    assert shadow.sentence.startswith("Limits would be divided by 4 until ")
    second = found(shadow, 60, shadow=True)
    assert second is not None
    assert second.sentence.startswith("Would be delayed by 2 s until ")
    enforced = found(second, 61)
    assert enforced is not None
    assert (enforced.level, enforced.shadow) == (1, False)


def test_record_of_a_wrong_clock_does_not_last() -> None:
    future = found(None, 10 * 86_400)
    assert future is not None
    again = found(future, 0)
    assert again is not None
    assert again.level == 1


@given(
    st.lists(st.tuples(st.integers(0, 4 * 3600), st.integers(0, 3)), max_size=25),
    st.integers(1, 4),
    st.integers(0, 600),
    st.integers(1, 7200),
)
def test_progression_equals_its_model(gaps: list[tuple[int, int]], steps: int, window: int, decay: int) -> None:
    """Findings in any order of nodes: several of one instant count once, and the level follows the model's."""
    rules: Any = {
        "steps": (*STEPS[:2], *STEPS)[-steps:],
        "window": timedelta(seconds=window),
        "decay": timedelta(seconds=decay),
    }
    restriction: Restriction | None = None
    at_s, level, began_s, ends_s = 0, 0, -(10**9), -(10**9)
    for gap, repeats in gaps:
        at_s += gap
        for _ in range(repeats):
            # The model, in seconds: written down, not computed as the code does.
            settle_s = max(MIN_SETTLE_US // SECOND, window)
            is_blocked = restriction is not None and restriction.action == "block" and at_s < ends_s
            after = found(restriction, at_s, **rules)
            if at_s - began_s < settle_s or is_blocked:
                assert after is None
                continue
            for _ in range(level):
                if at_s - ends_s >= decay:
                    level, ends_s = level - 1, ends_s + decay
            level = min(level + 1, steps + 20)
            step = rules["steps"][-1 if level > steps else level - 1]
            lasts_s = step.duration.total_seconds()
            for _ in range(level - steps):
                lasts_s = min(2 * lasts_s, 7200)
            began_s, ends_s = at_s, at_s + int(lasts_s)
            assert after is not None
            assert (after.level, after.action) == (level, step.action)
            assert after.until_us == START_US + ends_s * SECOND
            restriction = after


restrictions = st.builds(
    Restriction,
    scenario=st.text("abc-é", min_size=1, max_size=9),
    action=st.sampled_from(["tighten", "delay", "challenge", "block"]),
    level=st.integers(0, 30),
    at_us=st.integers(0, 2**52),
    until_us=st.integers(0, 2**52),
    forget_us=st.integers(0, 2**53),
    evidence=st.text("abc '\"\\☂", max_size=20),
    factor=st.integers(1, 1000),
    delay_us=st.integers(0, 10_000_000),
    mode=st.sampled_from(["page", "redirect", "app"]),
    difficulty=st.integers(0, 24),
    shadow=st.booleans(),
    undone_us=st.none() | st.integers(0, 2**52),
    undone_by=st.text("ada", max_size=3),
)


@given(st.lists(restrictions, max_size=4), st.text(max_size=8), st.text(max_size=8))
def test_records_survive_the_store(several: list[Restriction], kind: str, value: str) -> None:
    record = ClientRestrictions(kind, value, {each.scenario: each for each in several})
    text = encode_restrictions(record)
    assert text.isascii()
    assert text.startswith('{"until_us":')
    assert read_restrictions(text) == record


MALFORMED = [
    "", "{", "[]", "null", "{}", '{"kind":"ip","value":"x"}', '{"kind":1,"value":"x","restrictions":[]}',
    '{"kind":"ip","value":"x","restrictions":[{}]}', '{"kind":"ip","value":"x","restrictions":3}', "[" * 100_000,
]  # fmt: skip
FORGED: list[dict[str, Any]] = [
    {"action": "erase"}, {"level": -1}, {"level": True}, {"until_us": 2**60}, {"until_us": "soon"},
    {"delay_us": 3_600_000_000}, {"factor": 0}, {"factor": 10**9}, {"difficulty": 64}, {"mode": "dance"},
    {"shadow": 1}, {"evidence": "two\nlines"}, {"evidence": "x" * 2000}, {"scenario": ""}, {"undone_us": -1},
]  # fmt: skip


@pytest.mark.parametrize("text", MALFORMED)
def test_malformed_records_are_ignored(text: str) -> None:
    assert read_restrictions(text) is None


@pytest.mark.parametrize("change", FORGED, ids=repr)
def test_records_out_of_bounds_are_ignored(change: dict[str, Any]) -> None:
    from json import dumps

    valid = {"scenario": "x", "action": "delay", "level": 1, "at_us": 1, "until_us": 2, "forget_us": 3}
    record = {"until_us": 3, "kind": "ip", "value": "192.0.2.1"}
    assert read_restrictions(dumps({**record, "restrictions": [valid]})) is not None
    assert read_restrictions(dumps({**record, "restrictions": [{**valid, "of_a_newer_version": 1}]})) is not None
    assert read_restrictions(dumps({**record, "restrictions": [{**valid, **change}]})) is None
