"""Whatever happens to a key, on every store: each field of each decision is what the reference model says.

The machines below draw nasty limits, costs and steps of time (to the promised instant, just before it, back
into the past) and compare the limiter with `model.Model` after every call. The promises are then probed
without the model: a microsecond before `retry_after` the request is still denied, and at it, it passes.
"""

from __future__ import annotations

import itertools
import math
from datetime import timedelta
from typing import TYPE_CHECKING, Any, ClassVar

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from headgate import Decision, Key, Limit, Limiter
from headgate.testing import FakeClock
from support import model
from support.model import ALGORITHMS, Model, Plan, Subject

if TYPE_CHECKING:
    from collections.abc import Sequence

SECOND = 1_000_000
DAY = 86_400 * SECOND
NOW = 1_763_251_200 * SECOND
LATEST = 2**52 - 1
EXAMPLES = settings().max_examples
serial = itertools.count()

REFILLED = {"token_bucket", "gcra", "leaky_bucket"}


def is_exact(plan: Plan) -> bool:
    """Whether the numbers stay below 2**53 and it fills within ten years; other limits are refused."""
    if plan.algorithm not in REFILLED:
        return True
    shared = math.gcd(plan.quota, plan.period_us)
    peak = plan.capacity * (plan.period_us // shared) + plan.quota // shared
    return peak < 2**53 and plan.capacity * plan.period_us <= 3_660 * DAY * plan.quota


quotas = st.integers(1, 12) | st.sampled_from([97, 1_000, 10_007, 1_000_003, 2**31 - 1])
periods = st.integers(1, 12) | st.sampled_from([97, 1_000, 999_983, SECOND, 60 * SECOND, 3_600 * SECOND, DAY, 30 * DAY])


@st.composite
def plans(draw: st.DrawFn, algorithm: str, name: str = "x") -> Plan:
    quota, period_us = draw(quotas), draw(periods)
    burst = draw(st.just(quota) | quotas) if algorithm in REFILLED else quota
    return Plan(algorithm, quota, period_us, burst, name)


def exact_plans(algorithm: str, name: str = "x") -> st.SearchStrategy[Plan]:
    return plans(algorithm, name).filter(is_exact)


def key(subject: Subject) -> Key:
    plan = subject.plan
    limit = Limit(
        plan.quota,
        timedelta(microseconds=plan.period_us),
        burst=plan.capacity if plan.algorithm in REFILLED else None,
        algorithm=plan.algorithm,
        name=plan.name,
    )
    return limit.by(subject.identity)


def observed(decision: Decision) -> model.Decision:
    """The limiter's decision in the model's words."""
    fields = ("allowed", "remaining", "retry_after_us", "reset_after_us", "delay_us", "unsatisfiable")
    return model.Decision(
        *(getattr(decision, field) for field in fields),
        denied_by=decision.denied_by,
        outcomes=tuple(model.Outcome(*(getattr(outcome, field) for field in fields)) for outcome in decision.outcomes),
    )


# A step leads from the last decision, or from the present, to the instant of the next call.
STEPS = {
    "stay": lambda m: m.now,
    "tick": lambda m: m.now + 1,
    "just before the retry": lambda m: m.decided_at + (m.decision.retry_after_us or 1) - 1,
    "to the retry": lambda m: m.decided_at + (m.decision.retry_after_us or 0),
    "just before the reset": lambda m: m.decided_at + m.decision.reset_after_us - 1,
    "to the reset": lambda m: m.decided_at + m.decision.reset_after_us,
    "half a period": lambda m: m.now + m.plans[0].period_us // 2,
    "one period": lambda m: m.now + m.plans[0].period_us,
    "to the boundary": lambda m: (m.now // m.plans[0].period_us + 1) * m.plans[0].period_us,
    "back a tick": lambda m: m.now - 1,
    "back a period": lambda m: m.now - m.plans[0].period_us,
    "far back": lambda m: m.now - 3 * m.plans[0].period_us - 1,
    "back as long as it fills": lambda m: m.now - m.plans[0].capacity * m.plans[0].period_us // m.plans[0].quota,
    "back a tick longer": lambda m: m.now - m.plans[0].capacity * m.plans[0].period_us // m.plans[0].quota - 1,
    "back twice as long": lambda m: m.now - 2 * m.plans[0].capacity * m.plans[0].period_us // m.plans[0].quota - 1,
    "back an hour": lambda m: m.now - 3_600 * SECOND,
}
COSTS = {
    "one": lambda m: 1,
    "nothing": lambda m: 0,
    "two": lambda m: 2,
    "half": lambda m: (m.plans[0].capacity + 1) // 2,
    "all that remains": lambda m: m.decision.remaining,
    "one too many": lambda m: m.decision.remaining + 1,
    "everything": lambda m: m.plans[0].capacity,
    "more than everything": lambda m: m.plans[0].capacity + 1,
    "the absurd": lambda m: 2**60,
}
steps = st.sampled_from(list(STEPS)) | st.integers(-20, 20)
costs = st.sampled_from(list(COSTS))
amounts = st.sampled_from([1, 2, 5, 1_000, 2**60])
masks = st.integers(1, 7)
ids = st.sampled_from(["a", "b"])


class LimiterBesideModel(RuleBasedStateMachine):
    """Every call goes to the limiter and to the model, at one instant; subclasses say on what."""

    algorithms: ClassVar[Sequence[str]]
    limiter: ClassVar[Limiter]
    clock: ClassVar[FakeClock]

    @initialize(start=st.sampled_from([0, 1, NOW, LATEST // 2]), data=st.data())
    def open_keys(self, start: int, data: st.DataObject) -> None:
        self.identity = str(next(serial))
        self.plans = [
            data.draw(exact_plans(algorithm, f"{algorithm}-{place}")) for place, algorithm in enumerate(self.algorithms)
        ]
        self.model = Model()
        self.charges: dict[str, Decision | None] = {}
        self.fresh_ids = (f"nobody-{number}" for number in itertools.count())
        self.now = self.latest = self.decided_at = start
        self.clock.set_us(start)

    @rule(step=steps, cost=costs, mask=masks, id=st.none() | ids)
    def check(self, step: str | int, cost: str, mask: int, id: str | None) -> None:
        self.move(step)
        id = self.remembered(id)
        subjects, units = self.subjects(mask), COSTS[cost](self)
        decision = self.limiter.check(*map(key, subjects), cost=units, id=id)
        if id is not None:
            self.compare(decision, self.model.check_once(subjects, self.now, units, id))
            return
        self.compare(decision, self.model.check(subjects, self.now, units, decision.id or next(self.fresh_ids)))
        if decision.allowed and units > 0:
            self.charges.update((subject.plan.name, self.dated(subject, decision)) for subject in subjects)

    @rule()
    def use_up(self) -> None:
        self.check(step="stay", cost="all that remains", mask=7, id=None)

    @precondition(lambda self: set(self.algorithms) - {"concurrency"})
    @rule(step=steps, mask=masks, amount=amounts, id=st.none() | ids | st.sampled_from("xyz"), of_last=st.booleans())
    def refund(self, step: str | int, mask: int, amount: int, id: str | None, of_last: bool) -> None:
        self.move(step)
        id = self.remembered(id)
        for subject in self.subjects(mask):
            if subject.plan.algorithm == "concurrency":
                continue
            of = self.charges.get(subject.plan.name) if of_last else None
            given_back = self.limiter.refund(key(subject), amount, id=id, of=of)
            charged_at = of.at_us if of else None
            most = amount if of is None else min(amount, of.consumed(key(subject)) or 0)
            assert given_back == self.model.refund(subject, self.now, most, id, charged_at)

    @rule(step=steps, mask=masks)
    def reset(self, step: str | int, mask: int) -> None:
        self.move(step)
        subjects = self.subjects(mask)
        self.limiter.reset(*map(key, subjects))
        self.model.reset(*subjects)

    @rule(mask=masks, data=st.data())
    def change_the_plan(self, mask: int, data: st.DataObject) -> None:
        for subject in self.subjects(mask):
            place = self.plans.index(subject.plan)
            self.plans[place] = data.draw(exact_plans(subject.plan.algorithm, subject.plan.name))

    @precondition(lambda self: "concurrency" in self.algorithms)
    @rule(step=steps, id=ids)
    def renew(self, step: str | int, id: str) -> None:
        self.move(step)
        for subject in self.leased():
            assert self.limiter.renew(key(subject), id=id) == self.model.renew(subject, self.now, id)

    @precondition(lambda self: "concurrency" in self.algorithms)
    @rule(step=steps, id=ids)
    def leave(self, step: str | int, id: str) -> None:
        self.move(step)
        for subject in self.leased():
            assert self.limiter.leave(key(subject), id=id) == self.model.leave(subject, self.now, id)

    @invariant()
    def all_limits_stand_where_the_model_does(self) -> None:
        subjects = self.subjects(7)
        self.compare(self.limiter.peek(*map(key, subjects)), self.model.peek(subjects, self.now))

    def move(self, step: str | int) -> None:
        target = self.now + step if isinstance(step, int) else STEPS[step](self)
        self.now = min(max(0, target), LATEST)
        self.latest = max(self.latest, self.now)
        self.clock.set_us(self.now)

    def remembered(self, id: str | None) -> str | None:
        """The id; None if stores may have dropped it: the clock was set back after its record expired."""
        return None if id is None or self.model.is_forgettable(id, self.now, self.latest) else id

    def subjects(self, mask: int) -> list[Subject]:
        chosen = [plan for place, plan in enumerate(self.plans) if mask >> place & 1]
        return [Subject(plan, self.identity) for plan in chosen or self.plans]

    def dated(self, subject: Subject, decision: Decision) -> Decision | None:
        # A decision carries one instant; a charge made while the clock was back is counted at a later one.
        return decision if self.model.counted_at(subject) == self.now else None

    def leased(self) -> list[Subject]:
        return [subject for subject in self.subjects(7) if subject.plan.algorithm == "concurrency"]

    def compare(self, decision: Decision, expected: model.Decision) -> None:
        assert observed(decision) == expected
        self.decision, self.decided_at = expected, self.now


SHRINKING = 400  # seconds: a run takes two, but a failure is worth the wait for its shortest form
MACHINES: dict[str, Sequence[str]] = {
    **{algorithm: (algorithm,) for algorithm in sorted(ALGORITHMS)},
    "several at once": ("token_bucket", "sliding_window", "concurrency"),
    "several more": ("leaky_bucket", "fixed_window", "gcra"),
}


def run(url: str, algorithms: Sequence[str], examples: int) -> None:
    clock = FakeClock()
    with Limiter(url, clock=clock) as limiter:
        members = {"algorithms": algorithms, "limiter": limiter, "clock": clock}
        machine = type("Machine", (LimiterBesideModel,), members)
        run_state_machine_as_test(machine, settings=settings(max_examples=examples, stateful_step_count=20))


@pytest.mark.timeout(SHRINKING)
@pytest.mark.parametrize("algorithms", MACHINES.values(), ids=MACHINES)
def test_every_decision_in_memory_is_the_models(algorithms: Sequence[str]) -> None:
    run("memory://", algorithms, examples=EXAMPLES)


@pytest.mark.timeout(SHRINKING)
@pytest.mark.parametrize("algorithms", MACHINES.values(), ids=MACHINES)
def test_every_decision_on_redis_is_the_models(redis7: Any, algorithms: Sequence[str]) -> None:
    run(redis7.url, algorithms, examples=EXAMPLES // 2)


traffic = st.lists(st.tuples(st.integers(0, 2_000), st.integers(1, 5)), min_size=1, max_size=12)


@pytest.mark.parametrize("algorithm", sorted(ALGORITHMS))
def test_retry_and_reset_are_exact_to_the_microsecond(store_url: str, algorithm: str) -> None:
    clock = FakeClock()
    with Limiter(store_url, clock=clock) as limiter:

        @given(exact_plans(algorithm), traffic)
        def probe(plan: Plan, events: list[tuple[int, int]]) -> None:
            subject = key(Subject(plan, str(next(serial))))
            now = NOW
            for pause, cost in events:
                now += pause
                clock.set_us(now)
                decision = limiter.check(subject, cost=min(cost, plan.capacity))
                if not decision:
                    clock.set_us(now + decision.retry_after_us - 1)
                    assert not limiter.check(subject, cost=min(cost, plan.capacity))
                    now += decision.retry_after_us
                    clock.set_us(now)
                    decision = limiter.check(subject, cost=min(cost, plan.capacity))
                    assert decision.allowed
            assume(now + decision.reset_after_us <= LATEST)
            clock.set_us(now + decision.reset_after_us - 1)
            assert limiter.peek(subject).reset_after_us == 1
            clock.set_us(now + decision.reset_after_us)
            as_new = limiter.peek(subject)
            assert (as_new.remaining, as_new.reset_after_us, as_new.delay_us) == (plan.capacity, 0, 0)
            assert limiter.check(subject, cost=plan.capacity)

        probe()
