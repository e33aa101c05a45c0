"""The decision log: every rejection, and a sample of what passed. See docs/decision-log.md."""

from __future__ import annotations

from headgate.telemetry.decision_log.log import DecisionLog
from headgate.telemetry.decision_log.record import DecisionRecord

__all__ = ["DecisionLog", "DecisionRecord"]
