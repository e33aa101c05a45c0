"""The front doors: each framework's requests through one shared way."""

from __future__ import annotations

from headgate.gate.admission import Admission, RequestInfo, current_admission

__all__ = ["Admission", "RequestInfo", "current_admission"]
