"""Limits over several regions: each region has a store of its own, and each limit says how they share it."""

from __future__ import annotations

__all__: list[str] = []
