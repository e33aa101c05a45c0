"""The front doors: each framework's requests through one shared way."""

from __future__ import annotations

from headgate.adapters.way import Admission, Arrival, current_admission

__all__ = ["Admission", "Arrival", "current_admission"]
