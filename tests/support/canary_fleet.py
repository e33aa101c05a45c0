"""A fleet that follows one config store with a fake clock: each node is a gate with a memory store of its own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from headgate.control.canaries.evaluator import CanaryEvaluator
from headgate.control.config import ConfigStore
from headgate.control.config.watcher import ConfigSource
from headgate.gate.gate import Gate
from headgate.telemetry.fleet.aggregator import FleetAggregator
from headgate.telemetry.fleet.reporter import StatusReporter
from headgate.telemetry.fleet.status_store import MemoryStatusStore
from headgate.testing import FakeClock, FakeRequest

if TYPE_CHECKING:
    from headgate.control.canaries.comparison import Comparison

START_US = 1_763_251_200_000_000
BY: Any = {"author": "ada", "reason": "test"}
SECRET = "for tests only, as long as it has to be"


class CanaryFleet:
    """Nodes by name, and an evaluator of their canary. Time passes in `run` only."""

    def __init__(self, url: str, policy: str, *nodes: str, start_us: int = START_US) -> None:
        self.clock = FakeClock(start_us)
        self.store = ConfigStore(url, secret=SECRET, clock=self.clock)
        self.store.put_policy(policy, **BY)
        self.status_store = MemoryStatusStore(monotonic=lambda: self.clock.now_us() / 1_000_000)
        self.aggregator = FleetAggregator(self.status_store, clock=self.clock)
        self.evaluator = CanaryEvaluator(self.store, self.aggregator, clock=self.clock)
        self.gates = {name: self._gate(url, name) for name in nodes}
        self._reporters = [
            StatusReporter(gate, self.status_store, node=name, every=None) for name, gate in self.gates.items()
        ]

    def run(self, seconds: int, *, requests: int = 100) -> None:
        """Let seconds pass in which each node gets requests of as many clients."""
        for _ in range(seconds):
            for gate in self.gates.values():
                gate.policy_watcher.look()
                for number in range(requests):
                    gate.admit(FakeRequest(peer=f"203.0.113.{number}"))
            self.clock.advance(1)
            for reporter in self._reporters:
                reporter.report()

    def compare(self) -> Comparison:
        """Evaluate the running canary."""
        found = self.evaluator.evaluate()
        assert found is not None, "no canary is running"
        return found

    @property
    def state(self) -> str:
        row = self.store.canary()
        assert row is not None, "there was no canary"
        return row.state

    def close(self) -> None:
        for reporter in self._reporters:
            reporter.close()
        for gate in self.gates.values():
            gate.close()
        self.store.close()

    def _gate(self, url: str, node: str) -> Gate:
        source: Any = ConfigSource(url, node=node)
        return Gate(source, clock=self.clock, secret=SECRET, reload_every=None)
