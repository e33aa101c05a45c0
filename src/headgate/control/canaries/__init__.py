"""Canaries of the policy: the comparison of its nodes with the others, and automatic rollback and promotion."""

from __future__ import annotations

__all__: list[str] = []
