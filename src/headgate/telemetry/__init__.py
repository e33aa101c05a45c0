"""What is kept and counted of requests, for those who operate the app: the decision log, and metrics."""

from __future__ import annotations

from headgate.telemetry.decision_log import DecisionLog
from headgate.telemetry.records import Record
from headgate.telemetry.sinks import open_sink

__all__ = ["DecisionLog", "Record", "open_sink"]
