"""Ledgers on SQLite and PostgreSQL."""

from __future__ import annotations

import shutil
from contextlib import closing
from typing import TYPE_CHECKING

import psycopg
import pytest

from headgate.quotas import Ledger
from headgate.quotas.tables import METADATA
from headgate.testing import FakeClock

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from support.postgres import PostgresServer

START_US = 1_790_000_000_000_000


@pytest.fixture(scope="session")
def migrated_schema(postgres: PostgresServer) -> str:
    url = postgres.fresh_url()
    with closing(Ledger(url)):
        return url


@pytest.fixture(params=["sqlite", "postgresql"])
def config_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The URL of an empty ledger of each kind in turn."""
    if request.param == "sqlite":
        shutil.copy(request.getfixturevalue("migrated_file"), tmp_path / "quota.db")
        return f"sqlite:///{tmp_path}/quota.db"
    url: str = request.getfixturevalue("migrated_schema")
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute(f"TRUNCATE {', '.join(METADATA.tables)}".encode())
    return url


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock(START_US)


@pytest.fixture
def ledger(config_url: str, clock: FakeClock) -> Iterator[Ledger]:
    """An empty ledger of each kind in turn."""
    ledger = Ledger(config_url, clock=clock)
    yield ledger
    assert ledger.verify() == []
    ledger.close()
