"""Any order of operations, retries, expiries and crashes, compared with an independent model of single units."""

from __future__ import annotations

import shutil
import tempfile
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from hypothesis import given, settings
from hypothesis import strategies as st
from sqlalchemy import event

from headgate import InvalidInput
from headgate.quotas import Ledger
from headgate.testing import FakeClock

if TYPE_CHECKING:
    from pathlib import Path

START_US = 1_790_000_000_000_000
SECOND_US = 1_000_000


@dataclass
class Unit:
    """One unit of one grant. The ledger knows amounts; the model knows units."""

    rank: tuple[int, float, int]
    expires: float
    holder: str | None = None
    is_spent: bool = False

    def is_free(self, now: float) -> bool:
        return not self.is_spent and self.holder is None and now < self.expires


@dataclass
class Model:
    now: int = 0
    units: list[Unit] = field(default_factory=list)
    deadlines: dict[str, int] = field(default_factory=dict)
    sizes: dict[str, int] = field(default_factory=dict)
    results: dict[str, Any] = field(default_factory=dict)
    grants: int = 0

    def free(self) -> list[Unit]:
        for unit in self.units:
            if unit.holder is not None and self.deadlines[unit.holder] <= self.now:
                unit.holder = None
        return sorted((unit for unit in self.units if unit.is_free(self.now)), key=lambda unit: unit.rank)

    def balance(self) -> int:
        return len(self.free())

    def grant(self, id: str, amount: int, life: int | None, priority: int) -> None:
        if id in self.results:
            return
        self.results[id] = amount
        self.grants += 1
        expires = float("inf") if life is None else self.now + life
        self.units += [Unit((priority, expires, self.grants), expires) for _ in range(amount)]

    def reserve(self, id: str, amount: int, ttl: int) -> bool:
        if id not in self.sizes:
            free = self.free()
            if len(free) < amount:
                return False
            for unit in free[:amount]:
                unit.holder = id
            self.sizes[id], self.deadlines[id] = amount, self.now + ttl
        return True

    def end(self, id: str, used: int | None) -> tuple[str, int] | None:
        """The units charged; None if there is no such reservation or it ended in another way."""
        if id not in self.sizes:
            return None
        self.free()
        done = self.results.get(f"end {id}")
        if done is not None:
            return done if done[0] == ("void" if used is None else "commit") and done[2] == used else None
        held = sorted((unit for unit in self.units if unit.holder == id), key=lambda unit: unit.rank)
        for unit in held:
            unit.holder = None
        charged = 0
        if used is not None:
            for unit in held[:used]:
                unit.is_spent = True
            charged = min(used, len(held))
            more = self.free()[: used - charged]
            for unit in more:
                unit.is_spent = True
            charged += len(more)
        elif self.deadlines[id] <= self.now:
            return ("void", 0)  # had expired: it can still be committed
        self.results[f"end {id}"] = ("void" if used is None else "commit", charged, used)
        return self.results[f"end {id}"]


ids = st.integers(0, 3)
amounts = st.integers(0, 6)
seconds = st.integers(1, 4)
operations = st.one_of(
    st.tuples(st.just("grant"), ids, st.integers(1, 6), st.one_of(st.none(), seconds), st.integers(0, 1)),
    st.tuples(st.just("reserve"), ids, amounts, seconds),
    st.tuples(st.just("commit"), ids, amounts),
    st.tuples(st.just("void"), ids),
    st.tuples(st.just("wait"), st.integers(1, 3)),
    st.tuples(st.just("expire")),
    st.tuples(st.just("restart")),
)
faults = st.sampled_from(["", "", "crash", "lost answer", "other process"])


@settings(max_examples=30)
@given(steps=st.lists(st.tuples(operations, faults), max_size=25))
def test_ledger_agrees_with_the_model(migrated_file: Path, steps: list[tuple[tuple[Any, ...], str]]) -> None:
    with tempfile.TemporaryDirectory() as directory:
        shutil.copy(migrated_file, f"{directory}/quota.db")
        clock, model = FakeClock(START_US), Model()
        url = f"sqlite:///{directory}/quota.db"
        ledger, other = Ledger(url, clock=clock), Ledger(url, clock=clock)
        for step, fault in steps:
            name, *arguments = step
            if name == "wait":
                model.now += arguments[0]
                clock.advance(arguments[0])
            elif name == "restart":
                ledger.close()
                ledger = Ledger(url, clock=clock)
            elif name == "expire":
                ledger.expire()
            else:
                if fault == "crash":
                    with suppress(OSError):
                        crash_in_commit(ledger, lambda ledger=ledger, step=step: apply(ledger, model, step, clock))
                expected = apply_to_model(model, step)
                if fault == "lost answer":
                    apply(ledger, model, step, clock)
                assert apply(other if fault == "other process" else ledger, model, step, clock) == expected, step
            assert ledger.balance("acme") == other.balance("acme") == model.balance()
        spent = sum(unit.is_spent for unit in model.units)
        assert ledger.summary("acme").charged == spent
        assert other.verify() == []
        ledger.close()
        other.close()


def crash_in_commit(ledger: Ledger, call: Any) -> None:
    """Run a call whose transaction fails, if there is one, after everything was written."""

    def crash(_: Any) -> None:
        raise OSError

    event.listen(ledger._engine, "commit", crash)
    try:
        call()
    finally:
        event.remove(ledger._engine, "commit", crash)


def apply(ledger: Ledger, model: Model, step: tuple[Any, ...], clock: FakeClock) -> Any:
    """The result of the ledger in the terms of the model."""
    match step:
        case ("grant", id, amount, life, priority):
            # The id contains the content: a repetition with other content is an error, tested elsewhere.
            name = f"g{id} {amount} {life} {priority} {model.now // 5}"
            begin = model.now // 5 * 5
            expires_us = None if life is None else START_US + (begin + life + 5) * SECOND_US
            ledger.grant("acme", amount, id=name, expires_at=expires_us, priority=priority)
            return None
        case ("reserve", id, amount, ttl):
            made = ledger.reserve("acme", amount, id=f"r{id} {amount}", ttl=timedelta(seconds=ttl))
            return made is not None
        case ("commit", id, amount):
            return end(ledger, model, f"r{id}", amount)
        case ("void", id):
            return end(ledger, model, f"r{id}", None)
    raise AssertionError(step)


def apply_to_model(model: Model, step: tuple[Any, ...]) -> Any:
    match step:
        case ("grant", id, amount, life, priority):
            begin = model.now // 5 * 5
            name = f"g{id} {amount} {life} {priority} {model.now // 5}"
            model.grant(name, amount, None if life is None else begin + life + 5 - model.now, priority)
            return None
        case ("reserve", id, amount, ttl):
            return model.reserve(f"r{id} {amount}", amount, ttl)
        case ("commit", id, amount):
            return [model.end(each, amount) for each in reservations(model, f"r{id}")]
        case ("void", id):
            return [model.end(each, None) for each in reservations(model, f"r{id}")]
    raise AssertionError(step)


def reservations(model: Model, prefix: str) -> list[str]:
    return sorted(id for id in model.sizes if id.startswith(f"{prefix} "))


def end(ledger: Ledger, model: Model, prefix: str, used: int | None) -> list[Any]:
    found: list[Any] = []
    for id in reservations(model, prefix):
        try:
            entry = ledger.void(id) if used is None else ledger.commit(id, used)
        except InvalidInput:
            found.append(None)
        else:
            if entry.kind == "expire":
                found.append(("void", 0))
            else:
                found.append((entry.kind, entry.amount - entry.uncovered if entry.kind == "commit" else 0, used))
    return found
