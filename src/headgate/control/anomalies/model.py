"""A step change, as a value: what it is, what it looks like, and how that is said."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Final, Literal

from headgate.telemetry.fleet.rollups import MINUTE_US

__all__ = ["BELOW", "FLOOR", "TIMES", "Anomaly", "step_of_row", "verdict_on"]

TIMES: Final = 10
"""How many times the usual a minute must have."""
FLOOR: Final = 6
"""Requests a minute that are usual for everybody: whoever sends one a day does not alarm with ten."""
BELOW: Final = 10
"""Minutes for which a client is back below before it can alarm again."""
MANY: Final = 4
"""Different user agents, paths and addresses that one program does not have."""


@dataclass(frozen=True, slots=True)
class Anomaly:
    """A client that does ten times what it usually does at most."""

    id: str
    at_us: int
    """The end of the second minute."""
    kind: str
    key: str
    """Its keyed hash."""
    label: str
    count: int
    """Requests in the second of the two minutes."""
    before: int
    """Requests in the first of them."""
    usual: int
    """What 95 of 100 of its minutes had at most, in the seven days before."""
    times: float
    """How many times that `count` is; at least 6 a minute are taken as usual for everybody."""
    verdict: Literal["one bot", "people"]
    """What it looks like."""
    agents: int
    """Different user agents among the requests that were looked at."""
    addresses: int
    paths: int
    looked_at: int
    """How many requests these numbers are from."""
    over: bool = False
    """Whether it has been back below for ten minutes."""

    @property
    def text(self) -> str:
        """The same in words."""
        if self.looked_at:
            seen = (
                f"{_of(self.agents, 'user agent')}, {_of(self.addresses, 'address', 'addresses')} and "
                f"{_of(self.paths, 'path')} in {_of(self.looked_at, 'request')} that {_were(self.looked_at)} looked at"
            )
        else:
            seen = "none of its requests were looked at"
        return (
            f"{self.label} sent {self.count:,} requests in a minute, and {self.before:,} in the one before: "
            f"{self.times:,.0f} times its usual {max(self.usual, FLOOR):,}. It looks like {self.verdict}: {seen}."
        )

    def as_dict(self) -> dict[str, Any]:
        """The same for JSON."""
        return {**asdict(self), "text": self.text}


def step_of_row(row: Any, now_minute: int) -> Anomaly:
    """A step change as it is kept."""
    return Anomaly(
        id=row.id,
        at_us=(row.minute + 1) * MINUTE_US,
        kind=row.kind,
        key=row.key,
        label=row.label,
        count=row.requests,
        before=row.requests_before,
        usual=row.usual,
        times=round(row.requests / max(row.usual, FLOOR), 1),
        verdict=row.verdict,
        agents=row.agents,
        addresses=row.addresses,
        paths=row.paths,
        looked_at=row.looked_at,
        over=now_minute - row.last_over > BELOW,
    )


def verdict_on(kind: str, agents: int, addresses: int, paths: int) -> Literal["one bot", "people"]:
    """Many programs, from many places, that want different things, are people. Whoever is known by its address has one
    in any case."""
    mixed = [agents, paths] if kind == "ip" else [agents, addresses, paths]
    return "people" if min(mixed) >= MANY else "one bot"


def _of(number: int, one: str, many: str | None = None) -> str:
    return f"{number:,} {one if number == 1 else many or one + 's'}"


def _were(number: int) -> str:
    return "was" if number == 1 else "were"
