"""Admission control, shared by every adapter."""

from __future__ import annotations

from headgate.gate.admission import Admission, RequestInfo, current_admission, current_priority
from headgate.gate.gate import AsyncGate, Gate
from headgate.gate.options import GateOptions

__all__ = ["Admission", "AsyncGate", "Gate", "GateOptions", "RequestInfo", "current_admission", "current_priority"]
