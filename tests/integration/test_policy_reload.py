"""Reloading a large policy file while requests are served."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Any

from headgate.gate.gate import Gate
from headgate.testing import FakeRequest

if TYPE_CHECKING:
    from pathlib import Path

OVERRIDES = 30_000
LONGEST_HOLD_S = 0.1
"""Before documents and old policies were released in slices, 30,000 overrides held up requests for 0.3 s."""


def large_policy(bucket: str) -> str:
    limits = "".join([f"  - {{name: r{each}, path: /r{each}, by: tenant, bucket: {bucket}}}\n" for each in range(1000)])
    rows = [f"  - {{tenant: t{each}, limit: r{each % 1000}, bucket: {each + 1}/hour}}\n" for each in range(OVERRIDES)]
    return f"limits:\n{limits}overrides:\n{''.join(rows)}"


def test_requests_are_not_held_up_by_the_reload_of_a_large_file(tmp_path: Path) -> None:
    """Measured in CPU time of this process, which a busy machine does not change."""
    file = tmp_path / "policy.yaml"
    file.write_text("limits: [{by: ip, bucket: 10/minute}]")
    gate = Gate(file, reload_every=None)
    looked: list[Any] = []

    def reload() -> None:
        for bucket in ("10/minute", "11/minute"):
            file.write_text(large_policy(bucket))
            looked.append(gate.policy_watcher.look())

    thread = threading.Thread(target=reload)
    thread.start()
    longest, before, cpu_before = 0.0, time.perf_counter(), time.process_time()
    while thread.is_alive():
        time.sleep(0.002)
        gate.admit(FakeRequest())
        now, cpu = time.perf_counter(), time.process_time()
        longest, before, cpu_before = max(longest, min(now - before, cpu - cpu_before)), now, cpu
    assert looked == [True, True]
    assert longest < LONGEST_HOLD_S
    gate.close()
