"""MessageMeter: charges what a connection carries, messages or bytes, to the limits that count it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple, TypeAlias

from headgate import flow
from headgate.errors import StoreError
from headgate.stores.operations import Check

if TYPE_CHECKING:
    from collections.abc import Generator, Sequence

    from headgate.decisions import Decision
    from headgate.failure import FailurePolicy
    from headgate.policy.snapshot import AppliedLimit

__all__ = ["PASSED", "Direction", "MessageCounts", "MessageMeter", "MessageVerdict"]

MAX_WAIT_S: Final = 60.0
"""A connection is closed if a part of a message would have to wait longer: its client may be gone."""
PARTS: Final = 8
"""The part of a limit that a message takes at once while it waits: a whole limit may never be free at once, if other
connections of the client use it."""

Direction: TypeAlias = Literal["received", "sent"]
MessageOutcome: TypeAlias = Literal["delayed", "dropped", "closed"]
MessageCounts: TypeAlias = "dict[tuple[str, MessageOutcome], int]"
"""Messages that did not pass at once, by limit and outcome."""


class MessageVerdict(NamedTuple):
    """The fate of a message."""

    action: Literal["pass", "drop", "close"]
    reason: str = ""
    """For the client, in English."""
    is_final: bool = False
    """True if the message can never pass, however long the client waits."""


PASSED: Final = MessageVerdict("pass")


class MessageMeter:
    """The limits on the messages of one connection. Its driver runs `charge_in_steps` before it passes a message on."""

    __slots__ = ("_counts", "_engine", "_failure_policy", "_limits")

    def __init__(
        self, limits: Sequence[AppliedLimit], engine: Any, failure_policy: FailurePolicy, counts: MessageCounts
    ) -> None:
        # Those that may turn a message away come first, so that it is not charged where it waits.
        self._limits = sorted(limits, key=lambda each: each.rule.on_excess == "wait")
        self._engine = engine
        self._failure_policy = failure_policy
        self._counts = counts

    def charge_in_steps(
        self, direction: Direction, messages: int, size: int, *, can_end: bool = True
    ) -> Generator[Any, Any, MessageVerdict]:
        """Charge messages of so many bytes in total; wait until they may pass, or turn them away.

        Without `can_end`, they always wait: for a part of a body, which cannot be left out.
        """
        for applied in self._limits:
            rule = applied.rule
            if rule.direction not in ("both", direction):
                continue
            cost = applied.cost * (messages if rule.counts == "messages" else size)
            if cost:
                verdict = yield from self._charge(applied, cost, can_end=can_end)
                if verdict is not PASSED:
                    return verdict
        return PASSED

    def _charge(self, applied: AppliedLimit, cost: int, *, can_end: bool) -> Generator[Any, Any, MessageVerdict]:
        rule, key = applied.rule, applied.key
        at_once = key.limit.capacity // key.limit.split
        if cost <= at_once:
            decision = yield from self._ask(Check((key,), cost))
            if decision is None or decision.allowed:
                return PASSED
        if can_end and rule.on_excess == "drop":
            return self._turn_away(applied, "drop", is_final=cost > at_once)
        if can_end and rule.on_excess == "close":
            return self._turn_away(applied, "close", is_final=cost > at_once)
        self._count(applied, "delayed")
        part = max(1, at_once // PARTS)
        while cost > 0:
            decision = yield from self._wait(Check((key,), min(part, cost)))
            if decision is not None and not decision.allowed:
                return self._turn_away(applied, "close", is_final=False)
            cost -= part
        return PASSED

    def _ask(self, check: Check) -> Generator[Any, Any, Decision | None]:
        """The decision on a check; None if the store has failed and the failure mode does not answer."""
        try:
            return (yield self._engine.run, check, self._failure_policy)  # type: ignore[no-any-return]
        except StoreError:
            return None

    def _wait(self, check: Check) -> Generator[Any, Any, Decision | None]:
        engine = self._engine
        times: dict[str, Any] = {"timeout": MAX_WAIT_S, "elapsed": engine.stopwatch()}
        steps = flow.acquire(check, engine.tier, self._failure_policy, **times, router=engine.router)
        try:
            return (yield engine.drive, steps)  # type: ignore[no-any-return]
        except StoreError:
            return None

    def _turn_away(self, applied: AppliedLimit, action: Literal["drop", "close"], *, is_final: bool) -> MessageVerdict:
        self._count(applied, "dropped" if action == "drop" else "closed")
        name = applied.rule.name
        if is_final:
            return MessageVerdict(action, f'A message is larger than the limit "{name}" allows.', is_final=True)
        return MessageVerdict(action, f'The limit "{name}" has been reached. Try again later.')

    def _count(self, applied: AppliedLimit, outcome: MessageOutcome) -> None:
        counted = applied.rule.name, outcome
        self._counts[counted] = self._counts.get(counted, 0) + 1
