"""Reconciled usage: reports in any order, with loss, repetition and changing agents, are applied exactly once."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headgate import Limit
from headgate.regions.reconciled import (
    AdmissionCounter,
    ImportedUsage,
    UsageSlot,
    charged_amount,
    horizon_us,
    parse_field,
    parse_totals,
    slot_us,
)
from headgate.stores.memory import MemoryStore
from headgate.stores.operations import Check
from headgate.testing import FakeClock

SECOND = 1_000_000
MINUTE = timedelta(minutes=1)
HOURLY = Limit(1_000_000, timedelta(hours=1), algorithm="fixed_window", name="hourly")
SLOT = UsageSlot.at(HOURLY.by("ada"), 0)

# ------------------------------------------------------------- slots


@pytest.mark.parametrize(
    ("limit", "slot_s", "horizon_s"),
    [
        (Limit(100, MINUTE, algorithm="fixed_window"), 60, 0),
        (Limit(100, MINUTE, algorithm="sliding_window"), 7.5, 60),
        (Limit(100, MINUTE, algorithm="sliding_log"), 7.5, 60),
        (Limit(100, MINUTE, burst=50), 3.75, 30),
        (Limit(100, MINUTE, burst=200, algorithm="gcra"), 15, 120),
        (Limit(10, timedelta(seconds=1)), 1, 1),
    ],
)
def test_usage_counts_until_it_would_be_forgotten(limit: Limit, slot_s: float, horizon_s: float) -> None:
    assert (slot_us(limit), horizon_us(limit)) == (slot_s * SECOND, horizon_s * SECOND)
    slot = UsageSlot.at(limit.by("ada"), 10**15)
    assert slot.counts_at(10**15)
    assert slot.counts_at(slot.end_us - 1)
    assert not slot.counts_at(slot.end_us)


@given(st.text(max_size=20), st.integers(0, 10**16))
def test_a_slot_survives_its_field(identity: str, at_us: int) -> None:
    slot = UsageSlot.at(Limit(7, MINUTE, burst=3, name="x").by(identity), at_us)
    assert parse_field(slot.field) == slot


@pytest.mark.parametrize(
    "field",
    [
        *["", "x", "[]", "{}", '["a","gcra",1,1,1,"x"]', '["a","nothing",1,1,1,"x",1]', '["a","pool",1,1,1,"x",1]'],
        *['["a","concurrency",1,1,1,"x",1]', '["a","gcra",0,1,1,"x",1]', '["a","gcra",1,1,1,7,1]'],
        *['["a","gcra",1,1,1,"x",-1]', '["a","gcra",1,1,1,"x",1.5]', '["a","gcra",1,1e999,1,"x",1]', "[" * 10_000],
    ],
)
def test_malformed_fields_are_ignored(field: str) -> None:
    assert parse_field(field) is None


@pytest.mark.parametrize("text", ["", "1", "1 2 3", "1 -2", "a b", "1 ٣", "1 99999999999999999", f"1 {2**53}"])
def test_malformed_totals_are_ignored(text: str) -> None:
    assert parse_totals(text) is None


# ------------------------------------------------------------- counting in a process


def test_a_repeated_flush_has_the_same_number_and_content() -> None:
    counter = AdmissionCounter()
    assert counter.begin_flush() == (0, {})
    counter.record(HOURLY.by("ada"), 3, 0)
    counter.record_refund(HOURLY.by("ada"), 1, 0)
    assert counter.begin_flush() == (1, {SLOT: (3, 1)})
    counter.record(HOURLY.by("ada"), 5, 0)
    assert counter.begin_flush() == (1, {SLOT: (3, 1)})
    counter.end_flush()
    assert counter.begin_flush() == (2, {SLOT: (5, 0)})


# ------------------------------------------------------------- exactly once


class Importer:
    """A region that imports the usage of others: its store, the record in it, and the memory of each of two agents."""

    def __init__(self, sources: list[str]) -> None:
        self.store = MemoryStore(FakeClock(0))
        self.recorded = {source: ImportedUsage() for source in sources}
        self.agents = [dict(self.recorded), dict(self.recorded)]

    def deliver(self, agent: int, source: str, totals: tuple[int, int], *, fails_after: str, reloads: bool) -> None:
        """One report reaches an agent, which may have just been started, and may crash at any step."""
        memory = self.agents[agent]
        if reloads:
            memory[source] = self.recorded[source]
        usage = memory[source] = memory[source].merge(*totals)
        if fails_after == "merge":
            return
        step: Any = usage.charge(SLOT, source) or usage.refund(SLOT, source)
        if step is not None:
            answer = self.store.run(step)
            usage = usage.after_charge(charged_amount(answer) or 0) if isinstance(step, Check) else usage.after_refund()
        if fails_after == "apply":
            return
        memory[source] = usage
        merged = map(max, self.recorded[source], usage)
        self.recorded[source] = ImportedUsage(*merged)

    @property
    def used(self) -> int:
        used: int = HOURLY.quota - self.store.run(Check((SLOT.key,), 0)).remaining
        return used


SOURCES = ["eu", "us", "ap"]
EVENT = st.one_of(
    st.tuples(st.just("admit"), st.sampled_from(SOURCES), st.integers(1, 50)),
    st.tuples(
        *[st.just("deliver"), st.sampled_from(SOURCES), st.integers(0, 100), st.integers(0, 1)],
        *[st.sampled_from(["merge", "apply", "save"]), st.booleans()],
    ),
)


@given(st.lists(EVENT, max_size=60))
def test_imported_usage_is_the_sum_of_the_others_and_never_double(events: list[Any]) -> None:
    """Reports are any of those ever sent: late, repeated, reordered. Agents crash before and after they charge, change
    at any time, and two may be active at once."""
    importer = Importer(SOURCES)
    reports: dict[str, list[int]] = {source: [0] for source in SOURCES}
    for what, source, amount, *rest in events:
        history = reports[source]
        if what == "admit":
            history.append(history[-1] + amount)
        else:
            agent, fails_after, reloads = rest
            report = history[amount % len(history)], 0
            importer.deliver(agent, source, report, fails_after=fails_after, reloads=reloads)
            assert importer.used <= sum(history[-1] for history in reports.values())
    for source in SOURCES:  # healed: the last agent hears everything, once for what it repeats and once for the rest
        while importer.agents[0][source].balance or importer.agents[0][source].admitted < reports[source][-1]:
            importer.deliver(0, source, (reports[source][-1], 0), fails_after="save", reloads=False)
    assert importer.used == sum(history[-1] for history in reports.values())


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), min_size=1), st.randoms(use_true_random=False))
def test_refunds_are_returned_once(changes: list[tuple[int, int]], random: Any) -> None:
    admitted = refunded = 0
    reports = []
    for more, less in changes:
        admitted += more
        refunded = min(admitted, refunded + less)
        reports.append((admitted, refunded))
    importer = Importer(["eu"])
    for report in [*random.sample(reports * 2, len(reports)), reports[-1]]:
        importer.deliver(0, "eu", report, fails_after="save", reloads=random.random() < 0.5)
    assert importer.used == admitted - refunded


def test_a_window_is_overdrawn() -> None:
    limit = Limit(5, MINUTE, algorithm="fixed_window")
    store, slot, usage = MemoryStore(FakeClock(0)), UsageSlot.at(limit.by("ada"), 0), ImportedUsage().merge(8, 0)
    charge = usage.charge(slot, "eu")
    assert charge is not None
    assert charged_amount(store.run(charge)) == 8
    assert store.run(Check((limit.by("ada"),), 1)).retry_after == 60


@pytest.mark.parametrize(("algorithm", "wait_s"), [("token_bucket", 48), ("gcra", 48), ("leaky_bucket", 48)])
def test_a_bucket_is_overdrawn_by_up_to_its_capacity(algorithm: str, wait_s: int) -> None:
    limit = Limit(5, MINUTE, algorithm=algorithm)
    store, slot, usage = MemoryStore(FakeClock(0)), UsageSlot.at(limit.by("ada"), 0), ImportedUsage().merge(8, 0)
    for left in (3, 0):
        charge = usage.charge(slot, "eu")
        assert charge is not None
        usage = usage.after_charge(charged_amount(store.run(charge)) or 0)
        assert usage.balance == left
    assert store.run(Check((limit.by("ada"),), 1)).retry_after == wait_s


def test_a_reset_leaves_nothing_owed() -> None:
    assert ImportedUsage(8, 0, 5, 0).settled().balance == 0
    assert ImportedUsage(8, 6, 5, 0).settled().balance == 0


def test_a_malformed_record_is_as_good_as_none() -> None:
    assert ImportedUsage.parse("5 4 3 2") == ImportedUsage(5, 4, 3, 2)
    assert ImportedUsage.parse("nonsense") == ImportedUsage()
