"""Pytest plugin with the fixtures `headgate_limits` and `headgate_off`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

    from headgate.testing import IsolatedLimits

__all__ = ["headgate_limits", "headgate_off"]

# Every run of pytest imports this file, so the fixtures import what they need.


@pytest.fixture
def headgate_limits() -> Iterator[IsolatedLimits]:
    """Empty counters in memory and a fake clock for all gates and limiters in this test.

    See `headgate.testing.isolated_limits`.
    """
    from headgate.testing import isolated_limits

    with isolated_limits() as limits:
        yield limits


@pytest.fixture
def headgate_off() -> Iterator[None]:
    """Let all gates and limiters allow everything in this test."""
    from headgate.testing import limits_off

    with limits_off():
        yield
