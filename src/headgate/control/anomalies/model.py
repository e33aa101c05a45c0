"""A traffic anomaly as a value, and its classification."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Final, Literal

from headgate.telemetry.fleet.rollups import MINUTE_US

__all__ = ["COOLDOWN_MINUTES", "MIN_BASELINE", "THRESHOLD_FACTOR", "Anomaly", "anomaly_from_row", "classify"]

THRESHOLD_FACTOR: Final = 10
"""A minute is anomalous from this multiple of the baseline."""
MIN_BASELINE: Final = 6
"""The least baseline, in requests per minute, so that ten requests of a rare client are not an anomaly."""
COOLDOWN_MINUTES: Final = 10
"""Minutes below the threshold after which an anomaly is over."""
MIN_DISTINCT: Final = 4
"""Distinct user agents, addresses and paths from which traffic is taken for people."""


@dataclass(frozen=True, slots=True)
class Anomaly:
    """A client whose traffic is at least ten times its baseline for two minutes."""

    id: str
    at_us: int
    """The end of the second minute."""
    kind: str
    key: str
    """The keyed hash of the client."""
    label: str
    count: int
    """Requests in the second minute."""
    before: int
    """Requests in the first minute."""
    usual: int
    """The baseline: the 95th percentile of requests per minute over seven days."""
    times: float
    """`count` as a multiple of the baseline, which is at least 6 requests per minute here."""
    verdict: Literal["one bot", "people"]
    agents: int
    """Distinct user agents among the sampled requests."""
    addresses: int
    paths: int
    looked_at: int
    """The number of sampled requests."""
    over: bool = False
    """True after ten minutes below the threshold."""

    @property
    def text(self) -> str:
        """A description in two sentences."""
        sample = (
            f"{_count(self.agents, 'user agent')}, {_count(self.addresses, 'address', 'addresses')} and "
            f"{_count(self.paths, 'path')} in {_count(self.looked_at, 'sampled request')}"
            if self.looked_at
            else "no requests were sampled"
        )
        usual = max(self.usual, MIN_BASELINE)
        return (
            f"{self.label} sent {self.count:,} requests in a minute and {self.before:,} in the minute before, "
            f"{self.times:,.0f} times its usual {usual:,}. It looks like {self.verdict}: {sample}."
        )

    def as_dict(self) -> dict[str, Any]:
        """All fields and the text, for JSON."""
        return {**asdict(self), "text": self.text}


def anomaly_from_row(row: Any, now_minute: int) -> Anomaly:
    return Anomaly(
        id=row.id,
        at_us=(row.minute + 1) * MINUTE_US,
        kind=row.kind,
        key=row.key,
        label=row.label,
        count=row.requests,
        before=row.requests_before,
        usual=row.usual,
        times=round(row.requests / max(row.usual, MIN_BASELINE), 1),
        verdict=row.verdict,
        agents=row.agents,
        addresses=row.addresses,
        paths=row.paths,
        looked_at=row.looked_at,
        over=now_minute - row.last_over > COOLDOWN_MINUTES,
    )


def classify(kind: str, agents: int, addresses: int, paths: int) -> Literal["one bot", "people"]:
    """Mixed traffic is from people. A client identified by its address has only one of those."""
    distinct = [agents, paths] if kind == "ip" else [agents, addresses, paths]
    return "people" if min(distinct) >= MIN_DISTINCT else "one bot"


def _count(number: int, one: str, many: str | None = None) -> str:
    return f"{number:,} {one if number == 1 else many or one + 's'}"
