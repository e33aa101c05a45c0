"""What there is to tell about a policy, and where."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

from headgate.policy.formats.document import SourcePosition

if TYPE_CHECKING:
    from headgate.policy.formats.document import NodePosition, Path

__all__ = ["PolicyProblem", "PolicyProblems"]

MOST_PROBLEMS: Final = 50
"""So many are told of; who has more wants to mend these first."""


class PolicyProblem(NamedTuple):
    """Something to tell about a place, and perhaps about another: `before`, the other place, `after`."""

    spot: SourcePosition | NodePosition
    before: str
    other: SourcePosition | None = None
    after: str = ""


class PolicyProblems:
    """Gathers what there is to tell; once it is `full`, there is no use in looking for more."""

    def __init__(self) -> None:
        self.kept: list[PolicyProblem] = []
        self.full = False

    def add(self, path: Path, before: str, *, at_key: bool = False, other: Path | None = None, after: str = "") -> None:
        self._keep(
            PolicyProblem(SourcePosition(path, at_key), before, None if other is None else SourcePosition(other), after)
        )

    def add_placed(self, place: NodePosition, text: str) -> None:
        """For what the format itself has found."""
        self._keep(PolicyProblem(place, text))

    def __len__(self) -> int:
        return len(self.kept)

    def _keep(self, problem: PolicyProblem) -> None:
        if not self.full:
            self.kept.append(problem)
            self.full = len(self.kept) == MOST_PROBLEMS
