"""Decisions without the store: denial cache, prepaid tokens, block list, and what happens during outages.

Nothing in here depends on a particular store.
"""

from __future__ import annotations

__all__: list[str] = []
