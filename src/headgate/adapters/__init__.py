"""Adapters: one module per framework."""

from __future__ import annotations

from headgate.gate.admission import Admission, current_admission
from headgate.gate.request import RequestInfo

__all__ = ["Admission", "RequestInfo", "current_admission"]
