"""Telemetry: the decision log, metrics, and the status of the fleet."""

from __future__ import annotations

from headgate.telemetry.decision_log.log import DecisionLog
from headgate.telemetry.decision_log.record import DecisionRecord
from headgate.telemetry.decision_log.sinks import open_sink

__all__ = ["DecisionLog", "DecisionRecord", "open_sink"]
