"""The front doors: each framework's requests through one shared way."""

from __future__ import annotations

__all__: list[str] = []
