"""What is counted of requests, for those who operate the app."""

from __future__ import annotations

__all__: list[str] = []
