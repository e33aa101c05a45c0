"""What the nodes ask: which keys, how often, and what there is to know of each answer."""

from __future__ import annotations

from datetime import timedelta
from enum import IntEnum
from fractions import Fraction
from typing import TYPE_CHECKING, Final, Literal, NamedTuple, TypeAlias

from headgate import Limit

if TYPE_CHECKING:
    from collections.abc import Iterator

Mode: TypeAlias = Literal["open", "closed", "local", "raise"]
MODES: Final[tuple[Mode, ...]] = ("open", "closed", "local", "raise")

BUDGET: Final = 0.005
SHARE: Final = Fraction(1, 5)
LEASE: Final = 0.1
STEADY: Final = 40.0
"""Checks in a second, of each mode on each node."""
SPIKE: Final = 10.0
"""How much more there is of it in a burst."""

_LONG: Final = timedelta(days=30)


class Kind(IntEnum):
    """What a key is there to show."""

    WIDE = 0
    """Never exhausted: each check asks the store, and in the end the store's count must be the number that passed."""
    TURN = 1
    """Exhausted again and again: every half second a new key, of which the whole fleet passes exactly ten."""
    FLOW = 2
    """Refills as it is spent: in any interval no more may pass than the burst and what has come since."""


LIMITS: Final = {
    Kind.WIDE: Limit(10_000_000, _LONG, algorithm="fixed_window", name="wide"),
    Kind.TURN: Limit(10, _LONG, name="turn"),
    Kind.FLOW: Limit(20, timedelta(seconds=1), name="flow"),
}
IDENTITIES: Final = 4
"""Wide keys of each mode: enough to lie on several shards of a cluster."""
TURN_NS: Final = 500_000_000

ORDER: Final = (Kind.WIDE, Kind.TURN, Kind.TURN, Kind.WIDE, Kind.TURN, Kind.WIDE, Kind.FLOW, Kind.TURN)
"""The kinds of a worker's checks, over and over."""


class Verdict(IntEnum):
    """How a check ended for its caller."""

    DENIED = 0
    ALLOWED = 1
    RAISED = 2
    """A StoreError, which only the mode "raise" may let through."""
    BROKE = 3
    """Any other exception."""


class Row(NamedTuple):
    """One check."""

    node: int
    mode: Mode
    kind: Kind
    number: int
    """Which key of its kind: the turn, or the wide key's number."""
    start_ns: int
    """On the clock that all processes of this machine share."""
    took_ns: int
    verdict: Verdict
    why: str | None
    """What was said of the store's failure; None where the answer is exact."""

    @property
    def end_ns(self) -> int:
        return self.start_ns + self.took_ns

    @property
    def exact(self) -> bool:
        return self.why is None

    @property
    def admitted(self) -> bool:
        return self.verdict == Verdict.ALLOWED


class Happening(NamedTuple):
    """An event that a limiter told of."""

    node: int
    mode: Mode
    kind: str
    at_ns: int
    text: str
    uncertain: int = 0
    """Tokens of requests and of charges that were sent and not answered."""


class Orders(NamedTuple):
    """What a node is to do in one run."""

    node: int
    url: str
    asynchronous: bool
    namespace: str
    fleet: int
    """How many nodes there are."""
    retries: int = 0
    """How often a client asks again, at once, when it was not let in by the store itself."""


class Witness(NamedTuple):
    """What a node has seen in one run."""

    rows: list[Row]
    happenings: list[Happening]
    states: dict[Mode, str]
    """What each limiter says of its own health when the load is over."""


def keys_of(worker: int) -> Iterator[tuple[Kind, int]]:
    """The kinds and wide keys that one worker asks for; the number of a turn comes from the clock."""
    number = worker
    while True:
        for kind in ORDER:
            number += 1
            yield kind, number % IDENTITIES if kind == Kind.WIDE else 0


def namespace_of(run: str, mode: Mode) -> str:
    """Each mode counts for itself, as in four fleets that know nothing of each other."""
    return f"{run}-{mode}"
