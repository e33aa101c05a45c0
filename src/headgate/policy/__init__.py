"""Policies: limits, routes and clients as data."""

from __future__ import annotations

from headgate.policy.loader import load, read
from headgate.policy.model import Policy

__all__ = ["Policy", "load", "read"]
