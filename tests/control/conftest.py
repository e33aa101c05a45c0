"""Config stores whose tables are made once for each test module."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING

import pytest
from sqlalchemy import text

from headgate.control.config import ConfigStore
from headgate.control.config.engine import write_transaction
from headgate.control.config.tables import METADATA

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture(scope="module")
def migrated(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The URLs of stores with tables, by kind, and the directory of those that tests copy."""
    return {"directory": str(tmp_path_factory.mktemp("migrated"))}


@pytest.fixture(params=["sqlite", "postgresql"])
def empty_store_url(request: pytest.FixtureRequest, tmp_path: Path, migrated: dict[str, str]) -> str:
    """The URL of an empty config store of each kind in turn."""
    kind: str = request.param
    if kind not in migrated:
        file = f"sqlite:///{migrated['directory']}/config.db"
        migrated[kind] = file if kind == "sqlite" else request.getfixturevalue("postgres").fresh_url()
        ConfigStore(migrated[kind]).close()
    if kind == "sqlite":
        shutil.copy(migrated[kind].removeprefix("sqlite:///"), tmp_path / "config.db")
        return f"sqlite:///{tmp_path}/config.db"
    store = ConfigStore(migrated[kind])
    with write_transaction(store.engine) as connection:
        names = ", ".join(table.name for table in METADATA.sorted_tables)
        connection.execute(text(f"TRUNCATE {names} RESTART IDENTITY"))
    store.close()
    return migrated[kind]
