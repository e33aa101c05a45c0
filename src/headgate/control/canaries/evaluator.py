"""Automatic rollback and promotion of a canary, by the admin server and by the nodes that apply its candidate.

Any number of evaluators may run: the config store ends a canary once. Without the config store, none of them can end
it, and nodes keep the policy that they have.
"""

from __future__ import annotations

import logging
import threading
import weakref
from contextlib import closing
from random import uniform
from typing import TYPE_CHECKING, Any, Final, Self

from headgate._fork import block_forks
from headgate.clock import SystemClock
from headgate.control.background import BackgroundThreads
from headgate.control.canaries.comparison import compare
from headgate.control.config import ConfigStore, ConfigUnavailable
from headgate.control.config.writing import MAX_REASON_LENGTH
from headgate.errors import HeadgateError, InvalidInput
from headgate.telemetry.fleet.aggregator import FleetAggregator

if TYPE_CHECKING:
    from headgate.clock import Clock
    from headgate.control.canaries.comparison import Comparison
    from headgate.control.config.rows import CanaryRow
    from headgate.gate.base import GateBase
    from headgate.telemetry.fleet.status_store import StatusStore

__all__ = ["AUTHOR", "CanaryEvaluator", "CanaryNodeGuard"]

logger = logging.getLogger("headgate")

AUTHOR: Final = "headgate"
"""The author of automatic rollbacks and promotions in the audit log."""
INTERVAL_S: Final = 1.0
MAX_NODE_INTERVAL_S: Final = 30.0
"""Nodes evaluate less often the more there are, as each of them reads the status of all nodes."""


class CanaryEvaluator:
    """Compares the nodes of the running canary, and ends it when a threshold is exceeded or its time is over."""

    def __init__(self, config: ConfigStore, fleet: FleetAggregator, *, clock: Clock | None = None) -> None:
        self._config = config
        self._fleet = fleet
        self._clock = clock or SystemClock()
        self._is_unavailable = False
        self._threads = BackgroundThreads("headgate-canaries")

    def start(self) -> Self:
        """Evaluate every second in a background thread, until `stop`."""
        self._threads.start(self, (_evaluate_forever, weakref.ref(self)))
        return self

    def stop(self) -> None:
        """Stop the thread."""
        self._threads.stop()

    def evaluate(self) -> Comparison | None:
        """Compare now, and roll back or promote if it is time; None if no canary is running."""
        canary = self._config.canary()
        if canary is None or not canary.is_running:
            return None
        found = compare(canary, self._fleet.gather().canary_nodes)
        if found.must_roll_back:
            self._roll_back(canary, "; ".join(found.reasons))
        elif canary.promotes and found.verdict == "within thresholds" and self._is_over(canary):
            self._promote(canary, found)
        return found

    def try_evaluate(self) -> Comparison | None:
        """Evaluate; log errors instead of raising them, those of the config store once."""
        try:
            with block_forks():
                found = self.evaluate()
        except ConfigUnavailable as error:
            if not self._is_unavailable:
                logger.warning("the canary cannot be evaluated: %s", error)
            self._is_unavailable = True
            return None
        except Exception:  # keep running: the next evaluation may work
            logger.exception("the canary cannot be evaluated")
            return None
        self._is_unavailable = False
        return found

    def _is_over(self, canary: CanaryRow) -> bool:
        return canary.run_us is not None and self._clock.now_us() >= canary.begun_us + canary.run_us

    def _roll_back(self, canary: CanaryRow, reason: str) -> None:
        reason = " ".join(reason.split())[:MAX_REASON_LENGTH]  # one line
        if self._config.rollback_canary(canary.canary, author=AUTHOR, reason=reason) is not None:
            logger.warning("canary of %s rolled back: %s", canary.name, reason)

    def _promote(self, canary: CanaryRow, found: Comparison) -> None:
        count = f"{found.candidate.requests:,} requests in the last {found.seconds} s"
        try:
            if self._config.promote_canary(canary.canary, author=AUTHOR, reason=f"within thresholds: {count}"):
                logger.warning("canary of %s promoted: within thresholds, %s", canary.name, count)
        except InvalidInput as error:  # other rows have changed since its start
            self._roll_back(canary, f"the candidate became invalid: {error}")


class CanaryNodeGuard:
    """Evaluates a canary on a node that applies its candidate, so that a rollback does not depend on an admin server.

    The node needs write access to the config store for this.
    """

    def __init__(self, url: str, gate: GateBase, status_store: StatusStore) -> None:
        self._url = url
        self._gate = weakref.ref(gate)
        self._status_store = status_store
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def check(self) -> None:
        """Start evaluating in a thread if the node has become part of a canary."""
        if self._takes_part() and (self._thread is None or not self._thread.is_alive()):  # not alive after a fork
            self._thread = threading.Thread(target=self._run, name="headgate-canary", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """Stop evaluating."""
        self._stop.set()

    def _takes_part(self) -> bool:
        gate = self._gate()
        part: Any = None if gate is None or gate.is_closed else gate.policy_canary
        return part is not None and (part.role == "candidate" or part.error is not None)

    def _run(self) -> None:
        interval_s = INTERVAL_S
        try:
            with closing(ConfigStore(self._url)) as store:
                evaluator = CanaryEvaluator(store, FleetAggregator(self._status_store))
                while not self._stop.wait(uniform(0.5, 1.5) * interval_s) and self._takes_part():
                    found = evaluator.try_evaluate()
                    nodes = 1 if found is None else found.candidate.nodes
                    interval_s = min(max(nodes, 1) * INTERVAL_S, MAX_NODE_INTERVAL_S)
        except HeadgateError as error:
            logger.warning("this node cannot evaluate the canary that it takes part in: %s", error)
            self._stop.wait(MAX_NODE_INTERVAL_S)


def _evaluate_forever(reference: weakref.ref[CanaryEvaluator], stop: threading.Event) -> None:
    while not stop.wait(INTERVAL_S):
        evaluator = reference()
        if evaluator is None:
            return
        evaluator.try_evaluate()
        del evaluator
