"""The reference model: what every decision must be, in exact fractions and in the words of the definitions.

An algorithm says two things of its state: whether a cost `fits` at an instant, and whether the key `is_new`.
All that a decision reports follows from these by search, not by the closed formulas that a limiter uses:
`remaining` is the largest cost that fits, `retry_after` the least wait after which the cost fits,
`reset_after` the least wait after which the key is as new. Clarity is worth more than speed here.

Before it decides, a state is migrated: it is converted to the plan in force (`adopt`), and dated now if it lies further
in the future than one period (`redate`). A migration is kept even if the request that first sees it is denied.
"""

from __future__ import annotations

import math
from collections import Counter
from copy import deepcopy
from dataclasses import dataclass, field
from fractions import Fraction
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

ZERO = Fraction(0)


class Plan(NamedTuple):
    """The numbers of one limit; `capacity` is the burst where the algorithm has one, else the quota."""

    algorithm: str
    quota: int
    period_us: int
    capacity: int
    name: str = "default"

    @property
    def numbers(self) -> tuple[Fraction | int, int]:
        """What a change of plan is a change of: 10 per second and 20 per two seconds fill a bucket alike."""
        refills = self.algorithm in {"token_bucket", "gcra", "leaky_bucket"}
        return (Fraction(self.quota, self.period_us) if refills else self.period_us), self.capacity


class Subject(NamedTuple):
    """One limit as it applies to one identity."""

    plan: Plan
    identity: str = ""


class Outcome(NamedTuple):
    allowed: bool
    remaining: int
    retry_after_us: int | None
    reset_after_us: int
    delay_us: int
    unsatisfiable: bool


class Decision(NamedTuple):
    allowed: bool
    remaining: int
    retry_after_us: int | None
    reset_after_us: int
    delay_us: int
    unsatisfiable: bool
    denied_by: tuple[str, ...]
    outcomes: tuple[Outcome, ...]


def least(holds: Callable[[int], bool]) -> int:
    """The least n >= 0 from which `holds`, a predicate that never turns false again, is true."""
    if holds(0):
        return 0
    high = 1
    while not holds(high):
        high *= 2
    low = high // 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if holds(middle) else (middle, high)
    return high


@dataclass
class State:
    """One key's state under its plan; a new instance is a new key."""

    plan: Plan

    def fits(self, now: int, cost: int) -> bool:
        raise NotImplementedError

    def is_new(self, now: int) -> bool:
        raise NotImplementedError

    def charge(self, now: int, cost: int, id: str | None) -> None:
        raise NotImplementedError

    def refund(self, now: int, amount: int, charged_at: int | None) -> bool:
        raise NotImplementedError

    def adopt(self, now: int, plan: Plan) -> None:
        """Apply another plan from now on. What is used stays used, and what is as new stays as new."""
        self.plan = plan

    def redate(self, now: int) -> None:
        """Date the state now if it lies further in the future than one period."""
        raise NotImplementedError

    def admits(self, now: int, cost: int, id: str | None) -> bool:
        return cost == 0 or (cost <= self.plan.capacity and self.fits(now, cost))

    def remaining(self, now: int) -> int:
        too_much = least(lambda cost: cost > 0 and not self.fits(now, cost))
        return too_much - 1

    def retry_after(self, now: int, cost: int, id: str | None) -> int:
        return least(lambda wait: self.admits(now + wait, cost, id))

    def reset_after(self, now: int) -> int:
        return least(lambda wait: self.is_new(now + wait))

    def delay(self, now: int) -> int:
        return 0


@dataclass
class FixedWindow(State):
    last: int = 0
    used: Counter[int] = field(default_factory=Counter)

    def window(self, now: int) -> int:
        return max(now, self.last) // self.plan.period_us

    def fits(self, now: int, cost: int) -> bool:
        return self.used[self.window(now)] + cost <= self.plan.quota

    def is_new(self, now: int) -> bool:
        return self.used[self.window(now)] == 0

    def charge(self, now: int, cost: int, id: str | None) -> None:
        self.last = max(now, self.last)
        self.used[self.window(now)] += cost

    def refund(self, now: int, amount: int, charged_at: int | None) -> bool:
        window = self.window(now)
        # A charge that lies more than a period in the future was dated now, like the count itself.
        is_dated = charged_at is not None and charged_at <= now + self.plan.period_us
        charged = charged_at // self.plan.period_us if is_dated else window
        if charged != window or self.used[window] == 0:
            return False
        self.used[window] = max(0, self.used[window] - amount)
        return True

    def counting(self, now: int) -> set[int]:
        """The windows whose counts matter at this instant."""
        return {self.window(now)}

    def move(self, last: int, period_us: int) -> None:
        """Date the last charge anew, in windows of that length: its count and the one before go with it."""
        old, new = self.last // self.plan.period_us, last // period_us
        self.used = Counter({new: self.used[old], new - 1: self.used[old - 1]})
        self.last = last

    def adopt(self, now: int, plan: Plan) -> None:
        if plan.period_us != self.plan.period_us:
            counting = self.counting(now)
            self.used = Counter({window: used for window, used in self.used.items() if window in counting})
            self.move(self.last, plan.period_us)
        self.plan = plan

    def redate(self, now: int) -> None:
        if self.last > now + self.plan.period_us:
            self.move(now, self.plan.period_us)


@dataclass
class SlidingWindow(FixedWindow):
    def counting(self, now: int) -> set[int]:
        return {self.window(now), self.window(now) - 1}

    def estimate(self, now: int) -> Fraction:
        window, width = self.window(now), self.plan.period_us
        elapsed = max(now, self.last) - window * width
        return self.used[window] + self.used[window - 1] * Fraction(width - elapsed, width)

    def fits(self, now: int, cost: int) -> bool:
        return self.estimate(now) + cost <= self.plan.quota

    def is_new(self, now: int) -> bool:
        return self.estimate(now) == 0


@dataclass
class SlidingLog(State):
    last: int = 0
    entries: list[tuple[int, int]] = field(default_factory=list)

    def live(self, now: int) -> list[tuple[int, int]]:
        at = max(now, self.last)
        return [(start, cost) for start, cost in self.entries if at - start < self.plan.period_us]

    def fits(self, now: int, cost: int) -> bool:
        return sum(spent for _, spent in self.live(now)) + cost <= self.plan.quota

    def is_new(self, now: int) -> bool:
        return not self.live(now)

    def charge(self, now: int, cost: int, id: str | None) -> None:
        self.last = max(now, self.last)
        self.entries = [*self.live(now), (self.last, cost)]

    def refund(self, now: int, amount: int, charged_at: int | None) -> bool:
        entries = self.live(now)
        # A charge that is dated did not come after its own instant: newer entries are those of others.
        older = [entry for entry in entries if charged_at is None or entry[0] <= charged_at]
        newer = entries[len(older) :]
        if not older:
            return False
        while older and amount > 0:
            start, cost = older.pop()
            if cost > amount:
                older.append((start, cost - amount))
            amount -= cost
        self.entries = [*older, *newer]
        return True

    def adopt(self, now: int, plan: Plan) -> None:
        if plan.period_us != self.plan.period_us:
            # What has ceased to count under one of the two plans is forgotten for good.
            self.entries = self.live(now)
            if now >= self.last + min(self.plan.period_us, plan.period_us):
                self.last, self.entries = 0, []  # like a key that has expired
            self.plan = plan
            self.entries = self.live(now)
        self.plan = plan

    def redate(self, now: int) -> None:
        if self.last > now + self.plan.period_us:
            self.entries = [(now, cost) for _, cost in self.live(now)]
            self.last = now


@dataclass
class TokenBucket(State):
    last: int = 0
    level: Fraction = ZERO

    def __post_init__(self) -> None:
        self.level = Fraction(self.plan.capacity)

    def level_at(self, now: int) -> Fraction:
        elapsed = max(now, self.last) - self.last
        refilled = self.level + elapsed * Fraction(self.plan.quota, self.plan.period_us)
        return min(refilled, Fraction(self.plan.capacity))

    def put(self, now: int, level: Fraction) -> None:
        self.last, self.level = max(now, self.last), min(level, Fraction(self.plan.capacity))

    def fits(self, now: int, cost: int) -> bool:
        return self.level_at(now) >= cost

    def is_new(self, now: int) -> bool:
        return self.level_at(now) == self.plan.capacity

    def charge(self, now: int, cost: int, id: str | None) -> None:
        self.put(now, self.level_at(now) - cost)

    def refund(self, now: int, amount: int, charged_at: int | None) -> bool:
        if self.is_new(now):
            return False
        self.level = min(self.level + amount, Fraction(self.plan.capacity))
        return True

    def adopt(self, now: int, plan: Plan) -> None:
        used = self.plan.capacity - self.level_at(now)
        self.plan = plan
        # Kept in units of the new plan. What is finer no decision of that plan could tell, but a third plan might.
        unit = Fraction(1, Fraction(plan.period_us, plan.quota).numerator)
        self.put(now, max(ZERO, (plan.capacity - used) // unit * unit))

    def redate(self, now: int) -> None:
        if self.last > now + Fraction(self.plan.capacity * self.plan.period_us, self.plan.quota):
            self.last = now


@dataclass
class Gcra(State):
    tat: Fraction = ZERO

    @property
    def interval(self) -> Fraction:
        return Fraction(self.plan.period_us, self.plan.quota)

    def fits(self, now: int, cost: int) -> bool:
        return max(self.tat, now) + cost * self.interval - now <= self.plan.capacity * self.interval

    def is_new(self, now: int) -> bool:
        return self.tat <= now

    def charge(self, now: int, cost: int, id: str | None) -> None:
        self.tat = max(self.tat, now) + cost * self.interval

    def refund(self, now: int, amount: int, charged_at: int | None) -> bool:
        if self.is_new(now):
            return False
        self.tat = max(Fraction(now), self.tat - amount * self.interval)
        return True

    def adopt(self, now: int, plan: Plan) -> None:
        self.plan = plan
        unit = Fraction(1, self.interval.denominator)
        self.tat = min(-(-self.tat // unit) * unit, now + plan.capacity * self.interval)

    def redate(self, now: int) -> None:
        # An empty bucket of now has its tat one period ahead, and one that is dated a period from now has it two ahead.
        period = self.plan.capacity * self.interval
        if self.tat > now + 2 * period:
            self.tat = now + period


@dataclass
class LeakyBucket(Gcra):
    """The queue: `tat` is its tail, the instant at which all that was admitted has drained."""

    def delay(self, now: int) -> int:
        return math.ceil(max(ZERO, self.tat - now))


class Lease(NamedTuple):
    cost: int
    expiry: int
    ttl: int


@dataclass
class Concurrency(State):
    leases: dict[str, Lease] = field(default_factory=dict)

    def held(self, now: int) -> dict[str, Lease]:
        return {id: lease for id, lease in self.leases.items() if now < lease.expiry}

    def fits(self, now: int, cost: int) -> bool:
        return sum(lease.cost for lease in self.held(now).values()) + cost <= self.plan.quota

    def admits(self, now: int, cost: int, id: str | None) -> bool:
        return id in self.held(now) or super().admits(now, cost, id)

    def is_new(self, now: int) -> bool:
        return not self.held(now)

    def charge(self, now: int, cost: int, id: str | None) -> None:
        assert id is not None
        self.leases = self.held(now)
        lease = self.leases.get(id, Lease(cost, 0, 0))
        if now + self.plan.period_us > lease.expiry:
            lease = lease._replace(expiry=now + self.plan.period_us, ttl=self.plan.period_us)
        self.leases[id] = lease

    def redate(self, now: int) -> None:
        for id, lease in self.leases.items():
            taken = lease.expiry - lease.ttl
            if taken > now + lease.ttl:
                self.leases[id] = lease._replace(expiry=now + lease.ttl)

    def leave(self, now: int, id: str) -> None:
        self.leases = self.held(now)
        del self.leases[id]


ALGORITHMS: dict[str, type[State]] = {
    "concurrency": Concurrency,
    "fixed_window": FixedWindow,
    "gcra": Gcra,
    "leaky_bucket": LeakyBucket,
    "sliding_log": SlidingLog,
    "sliding_window": SlidingWindow,
    "token_bucket": TokenBucket,
}


@dataclass
class Record:
    """What an id has done to one key: the check that was admitted under it, or, without an outcome, only a refund."""

    at: int
    ends: int
    cost: int
    outcome: Outcome | None
    is_refunded: bool = False


class Model:
    """A limiter over those states: all or nothing, judged on the state before the request, at one instant."""

    def __init__(self) -> None:
        self.states: dict[tuple[str, str, str], State] = {}
        self.records: dict[tuple[tuple[str, str, str], str], Record] = {}

    def check_once(self, subjects: Sequence[Subject], now: int, cost: int, id: str) -> Decision:
        """A check whose id the caller chose: keys on which it was admitted before are not charged again, and answer as
        then; the others decide, all or nothing. Leases are taken, or renewed, each time."""
        if cost == 0:
            return self.check(subjects, now, 0, id)
        known = {subject: self._record(subject, now, id) for subject in subjects}
        others = [subject for subject in subjects if known[subject] is None]
        decided = self.check(others, now, cost, id) if others else None
        allowed = decided is None or decided.allowed
        answers = dict(zip(others, decided.outcomes if decided else (), strict=True))
        ends = now + min(max(60 * 10**6, *[subject.plan.period_us for subject in subjects]), 86_400 * 10**6)
        for subject in others:
            if allowed and subject.plan.algorithm != "concurrency":
                self.records[_key(subject), id] = Record(now, ends, cost, answers[subject])
        return _combine(subjects, tuple(answers.get(subject) or known[subject].outcome for subject in subjects))

    def check(self, subjects: Sequence[Subject], now: int, cost: int = 1, id: str | None = None) -> Decision:
        states = [self.state(subject, now) for subject in subjects]
        admitted = [state.admits(now, cost, id) for state in states]
        outcomes = tuple(
            self._consume(state, now, cost, id) if all(admitted) else self._refuse(state, now, cost, id, admits)
            for state, admits in zip(states, admitted, strict=True)
        )
        if cost > 0:
            self._keep(subjects, states, charged=all(admitted))
        return _combine(subjects, outcomes)

    def peek(self, subjects: Sequence[Subject], now: int) -> Decision:
        return self.check(subjects, now, cost=0)

    def refund(
        self,
        subject: Subject,
        now: int,
        amount: int,
        id: str | None = None,
        charged_at: int | None = None,
    ) -> bool:
        key = _key(subject)
        record = None if id is None else self.records.get((key, id))
        if record is not None and now < record.ends:
            if record.is_refunded:
                return False
            amount = min(amount, record.cost)
            charged_at = record.at if charged_at is None else charged_at
        state = self.state(subject, now)
        given_back = amount > 0 and state.refund(now, amount, charged_at)
        if key in self.states:
            self.states[key] = state
        if given_back and record is not None and now < record.ends:
            record.is_refunded = True
        elif given_back and id is not None:
            ends = now + max(3_600 * 10**6, subject.plan.period_us)
            self.records[key, id] = Record(now, ends, 0, outcome=None, is_refunded=True)
        return given_back

    def is_forgettable(self, id: str, now: int, latest: int) -> bool:
        """True if a record of that id expired before the clock was set back: a store may have dropped it, or not."""
        return any(now < record.ends <= latest for (_, other), record in self.records.items() if other == id)

    def _record(self, subject: Subject, now: int, id: str) -> Record | None:
        """What is recorded of the check with that id on that key, if it was admitted and is still valid."""
        record = self.records.get((_key(subject), id))
        return record if record is not None and record.outcome is not None and now < record.ends else None

    def reset(self, *subjects: Subject) -> None:
        for subject in subjects:
            self.states.pop(_key(subject), None)

    def renew(self, subject: Subject, now: int, id: str) -> bool:
        return self._lease(subject, now, id, lambda state: state.charge(now, 0, id))

    def leave(self, subject: Subject, now: int, id: str) -> bool:
        return self._lease(subject, now, id, lambda state: state.leave(now, id))

    def state(self, subject: Subject, now: int) -> State:
        """A copy of the key's state, brought under the subject's plan at this instant."""
        stored = self.states.get(_key(subject))
        if stored is None:
            return ALGORITHMS[subject.plan.algorithm](subject.plan)
        state = deepcopy(stored)
        if state.plan.numbers != subject.plan.numbers:
            state.adopt(now, subject.plan)
        state.redate(now)
        return state

    def counted_at(self, subject: Subject) -> int | None:
        """The instant at which the key's last charge counts, for the algorithms that date their charges."""
        return getattr(self.states[_key(subject)], "last", None)

    def _lease(self, subject: Subject, now: int, id: str, change: Callable[[Concurrency], None]) -> bool:
        state = self.state(subject, now)
        assert isinstance(state, Concurrency)
        is_held = id in state.held(now)
        if is_held:
            change(state)
            self.states[_key(subject)] = state
        return is_held

    def _keep(self, subjects: Sequence[Subject], states: Sequence[State], *, charged: bool) -> None:
        # A denial changes no state, so it makes no key; but it is an instant at which a new plan is seen.
        for subject, state in zip(subjects, states, strict=True):
            if charged or _key(subject) in self.states:
                self.states[_key(subject)] = state

    @staticmethod
    def _consume(state: State, now: int, cost: int, id: str | None) -> Outcome:
        delay = state.delay(now)
        if cost > 0:
            state.charge(now, cost, id)
        return Outcome(True, state.remaining(now), 0, state.reset_after(now), delay, False)

    @staticmethod
    def _refuse(state: State, now: int, cost: int, id: str | None, admits: bool) -> Outcome:
        unsatisfiable = cost > state.plan.capacity and not admits
        retry_after = None if unsatisfiable else state.retry_after(now, cost, id)
        delay = state.delay(now) if admits else 0
        return Outcome(admits, state.remaining(now), retry_after, state.reset_after(now), delay, unsatisfiable)


def _key(subject: Subject) -> tuple[str, str, str]:
    return subject.plan.name, subject.plan.algorithm, subject.identity


def _combine(subjects: Sequence[Subject], outcomes: tuple[Outcome, ...]) -> Decision:
    allowed = all(outcome.allowed for outcome in outcomes)
    unsatisfiable = any(outcome.unsatisfiable for outcome in outcomes)
    return Decision(
        allowed=allowed,
        remaining=min(outcome.remaining for outcome in outcomes),
        retry_after_us=None if unsatisfiable else max(outcome.retry_after_us or 0 for outcome in outcomes),
        reset_after_us=max(outcome.reset_after_us for outcome in outcomes),
        delay_us=max(outcome.delay_us for outcome in outcomes) if allowed else 0,
        unsatisfiable=unsatisfiable,
        denied_by=tuple(
            subject.plan.name for subject, outcome in zip(subjects, outcomes, strict=True) if not outcome.allowed
        ),
        outcomes=outcomes,
    )
