"""Counters of several workers."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from headgate.server.worker_stats import WorkerStats

if TYPE_CHECKING:
    from pathlib import Path


def test_counters_of_all_workers_are_added_up(tmp_path: Path) -> None:
    (tmp_path / "stats-1.json").write_text(json.dumps({"a": 1, "b": 5}))
    stats = WorkerStats(lambda: {"a": 2}, str(tmp_path))
    stats.write()
    assert stats.totals() == {"a": 3, "b": 5}
    assert len([*tmp_path.iterdir()]) == 2


def test_a_single_worker_needs_no_directory() -> None:
    stats = WorkerStats(lambda: {"a": 2})
    stats.write()
    assert stats.totals() == {"a": 2}
