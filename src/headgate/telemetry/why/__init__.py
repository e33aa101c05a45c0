"""Explains what became of a client's requests, from the decision log."""

from __future__ import annotations

__all__: list[str] = []
