"""Requests through a real gate, one after another, for tests of what is kept of them."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from headgate.gate.gate import Gate
from headgate.policy import read
from headgate.telemetry import DecisionLog
from headgate.testing import FakeClock, FakeRequest

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from headgate.adapters import Admission
    from headgate.telemetry import DecisionRecord

START_US = 1_794_754_800 * 1_000_000
"""2026-11-15 15:00:00 UTC."""
NOW = datetime(2026, 11, 16, 10, 30, tzinfo=UTC)
"""The next morning."""

SECRET = "thirty-two bytes, kept elsewhere"


@dataclass(frozen=True, slots=True)
class Request(FakeRequest):
    """A request with identities, as `Traffic` and other gates of tests read them."""

    path: str = "/search"
    api_key: str | None = None
    user: str | None = None
    tenant: str | None = None

    def header(self, name: str) -> list[str]:
        return [self.api_key] if name == "x-api-key" and self.api_key is not None else []


class Traffic:
    """A gate on a clock of its own, whose decisions are told to a log."""

    def __init__(
        self, policy: str, log: Callable[..., None] | None, *, start_us: int = START_US, **options: Any
    ) -> None:
        self.clock = FakeClock(start_us)
        identities = {"user": lambda request: request.user, "tenant": lambda request: request.tenant}
        self.gate = Gate(
            read(policy), clock=self.clock, secret=SECRET, on_decision=log, identities=identities, **options
        )

    def send(self, request: Request | None = None, times: int = 1, **more: Any) -> list[Admission]:
        return [self.gate.admit(request or Request(**more)) for _ in range(times)]


class Kept:
    """A sink that keeps records in a list, and refuses when it is told to."""

    def __init__(self) -> None:
        self.records: list[DecisionRecord] = []
        self.batches: list[int] = []
        self.refuses: Exception | None = None
        self.attempts = 0
        self.is_closed = False

    def write(self, batch: Sequence[DecisionRecord]) -> None:
        self.attempts += 1
        if self.refuses is not None:
            raise self.refuses
        self.batches.append(len(batch))
        self.records += batch

    def close(self) -> None:
        self.is_closed = True


ALL_KINDS = """
name: shop
limits:
  - {name: it, by: client, bucket: 3/minute}
  - {name: per-ip, by: ip, bucket: 4/minute}
  - {name: soon, by: ip, bucket: 2/minute, shadow: true}
clients: [{tenant: acme, label: "Acme, \\"Ltd\\" ünd Söhne"}]
blocked: [{user: mallory, reason: "it's scraping"}]
"""


def records_of_all_kinds() -> list[DecisionRecord]:
    """Allowed, denied by one limit and by two, only watched, and blocked; with signs that want to be escaped."""
    kept = Kept()
    with DecisionLog(kept, secret=SECRET, sample=1, node="n1", every=0.005) as log:
        traffic = Traffic(ALL_KINDS, log)
        for number in range(60):
            traffic.send(Request(tenant="acme" if number % 2 else None, user=None if number % 3 else "mallory"))
            traffic.clock.advance(1)
        assert log.flush()
    assert {each.outcome for each in kept.records} == {"allowed", "denied", "blocked"}
    assert any(each.also for each in kept.records)
    assert any(each.shadow for each in kept.records)
    assert {each.retry_us is None for each in kept.records} == {False}
    return kept.records
