"""Messages to customers whose traffic has grown, their requests for higher limits, and automatic raises."""

from __future__ import annotations

__all__: list[str] = []
