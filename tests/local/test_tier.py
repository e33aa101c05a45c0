"""The local tier in forked children."""

from __future__ import annotations

from datetime import timedelta

import pytest

from headgate import Limit
from headgate.events import EventEmitter
from headgate.failure import FleetShare
from headgate.local.tier import LocalTier
from headgate.stores.operations import Check, Refund
from support.processes import run_in_child

HOUR = timedelta(hours=1)


@pytest.fixture
def local() -> LocalTier:
    return LocalTier(EventEmitter(), clock=None, fleet=FleetShare())


def test_forked_child_returns_no_tokens_of_its_parent(local: LocalTier) -> None:
    local.unspent = [Refund(Limit(5, HOUR).by("ada"), 3)]

    def look() -> None:
        assert not local.unspent

    assert run_in_child(look) == 0
    assert len(local.unspent) == 1


def test_forked_child_starts_maintenance_at_its_first_check(local: LocalTier) -> None:
    looks: list[int] = []
    local.ensure = lambda: looks.append(1)
    local.checks, local.is_active = 4, False

    def check() -> None:
        local.checks += 1
        assert local.is_active
        local.try_local(Check((Limit(5, HOUR).by("ada"),), 1))
        assert looks

    assert run_in_child(check) == 0
