"""Adapters: one module per framework."""

from __future__ import annotations

from headgate.gate.admission import Admission, RequestInfo, current_admission

__all__ = ["Admission", "RequestInfo", "current_admission"]
