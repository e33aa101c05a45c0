"""Requests through a real gate, one after another, for tests of what is kept of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from headgate.adapters.gate import Gate
from headgate.policy import read
from headgate.testing import FakeClock

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from headgate.adapters import Admission
    from headgate.telemetry import Record

START_US = 1_794_754_800 * 1_000_000
"""2026-11-15 15:00:00 UTC."""

SECRET = "thirty-two bytes, kept elsewhere"


class Request(NamedTuple):
    """An arrival, as adapters make them."""

    path: str = "/search"
    method: str = "GET"
    peer: str | None = "203.0.113.9"
    api_key: str | None = None
    user: str | None = None
    tenant: str | None = None
    native: Any = None

    def header(self, name: str) -> list[str]:
        return [self.api_key] if name == "x-api-key" and self.api_key is not None else []


class Traffic:
    """A gate on a clock of its own, whose decisions are told to a log."""

    def __init__(
        self, policy: str, log: Callable[..., None] | None, *, start_us: int = START_US, **options: Any
    ) -> None:
        self.clock = FakeClock(start_us)
        identities = {"user": lambda arrival: arrival.user, "tenant": lambda arrival: arrival.tenant}
        self.gate = Gate(
            read(policy), clock=self.clock, secret=SECRET, on_decision=log, identities=identities, **options
        )

    def send(self, request: Request | None = None, times: int = 1, **more: Any) -> list[Admission]:
        return [self.gate.admit(request or Request(**more)) for _ in range(times)]


class Kept:
    """A sink that keeps records in a list, and refuses when it is told to."""

    def __init__(self) -> None:
        self.records: list[Record] = []
        self.batches: list[int] = []
        self.refuses: Exception | None = None
        self.attempts = 0
        self.is_closed = False

    def write(self, batch: Sequence[Record]) -> None:
        self.attempts += 1
        if self.refuses is not None:
            raise self.refuses
        self.batches.append(len(batch))
        self.records += batch

    def close(self) -> None:
        self.is_closed = True
