"""Replay of recorded traffic: log formats, sorting, decisions under virtual time, reports and suggestions."""

from __future__ import annotations

__all__: list[str] = []
