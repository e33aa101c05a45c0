"""Policies: which limits a request meets, as data."""

from __future__ import annotations

__all__: list[str] = []
