"""Reputation lists: networks from files and URLs, kept up to date in the background and matched by address."""

from __future__ import annotations

__all__: list[str] = []
