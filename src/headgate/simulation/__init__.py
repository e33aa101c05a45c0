"""Simulation of a fleet in virtual time: the real limiter over a modelled network and modelled servers."""

from __future__ import annotations

__all__: list[str] = []
