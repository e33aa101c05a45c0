"""Traffic anomalies: clients whose traffic rises far above their own baseline."""

from __future__ import annotations

__all__: list[str] = []
