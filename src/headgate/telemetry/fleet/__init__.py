"""Node status: reported by each gate, stored beside the counters, aggregated for operators."""

from __future__ import annotations

__all__: list[str] = []
