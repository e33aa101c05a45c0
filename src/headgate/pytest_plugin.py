"""Fixtures for suites that use pytest, there as soon as headgate is installed: `headgate_limits` and `headgate_off`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

    from headgate.testing import IsolatedLimits

__all__ = ["headgate_limits", "headgate_off"]

# Every run of pytest imports this file, also where no test needs it: what the fixtures use is imported in them.


@pytest.fixture
def headgate_limits() -> Iterator[IsolatedLimits]:
    """All gates and limiters count from nothing in this test, by a clock of its own, without a store.

    See `headgate.testing.isolated_limits`.
    """
    from headgate.testing import isolated_limits

    with isolated_limits() as limits:
        yield limits


@pytest.fixture
def headgate_off() -> Iterator[None]:
    """All gates and limiters allow everything in this test."""
    from headgate.testing import limits_off

    with limits_off():
        yield
