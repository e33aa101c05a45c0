"""The problems of a policy, with their positions."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

from headgate.policy.formats.document import SourcePosition

if TYPE_CHECKING:
    from headgate.policy.formats.document import NodePosition, Path

__all__ = ["PolicyProblem", "PolicyProblems"]

MOST_PROBLEMS: Final = 50
"""The number of problems that are reported at once."""


class PolicyProblem(NamedTuple):
    """A message about a position. With `other`, it consists of `before`, the other position and `after`."""

    spot: SourcePosition | NodePosition
    before: str
    other: SourcePosition | None = None
    after: str = ""


class PolicyProblems:
    """A list of problems; checks stop when it is `full`."""

    def __init__(self) -> None:
        self.kept: list[PolicyProblem] = []
        self.full = False

    def add(self, path: Path, before: str, *, at_key: bool = False, other: Path | None = None, after: str = "") -> None:
        self._keep(
            PolicyProblem(SourcePosition(path, at_key), before, None if other is None else SourcePosition(other), after)
        )

    def add_placed(self, place: NodePosition, text: str) -> None:
        """Add a problem that the parser of the format found."""
        self._keep(PolicyProblem(place, text))

    def __len__(self) -> int:
        return len(self.kept)

    def _keep(self, problem: PolicyProblem) -> None:
        if not self.full:
            self.kept.append(problem)
            self.full = len(self.kept) == MOST_PROBLEMS
