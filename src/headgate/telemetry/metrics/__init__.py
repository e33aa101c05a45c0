"""Metrics of gates: counters, families and statistics per limit."""

from __future__ import annotations

__all__: list[str] = []
