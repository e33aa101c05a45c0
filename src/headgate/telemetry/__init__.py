"""What is kept and counted of requests, for those who operate the app: the decision log, and metrics."""

from __future__ import annotations

from headgate.telemetry.decision_log.log import DecisionLog
from headgate.telemetry.decision_log.record import DecisionRecord
from headgate.telemetry.decision_log.sinks import open_sink

__all__ = ["DecisionLog", "DecisionRecord", "open_sink"]
