"""Forked child processes of tests."""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable


def run_in_child(work: Callable[[], None]) -> int:
    """The exit status of a forked child that runs `work`; killed after ten seconds."""
    pid = os.fork()
    if not pid:
        signal.alarm(10)
        status = 1
        try:
            work()
            status = 0
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
