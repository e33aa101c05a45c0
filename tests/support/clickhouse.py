"""ClickHouse over HTTP: its own engine behind a small server, in a process of its own."""

from __future__ import annotations

import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator


SERVER = Path(__file__).with_name("clickhouse_http.py")


USER, PASSWORD = "ada", "the-log-s-password"


@contextmanager
def clickhouse_server() -> Iterator[str]:
    """The address of a server: HOST:PORT."""
    process = subprocess.Popen([sys.executable, str(SERVER)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    port = process.stdout.readline().strip()
    assert port, "the server has not started"
    yield f"127.0.0.1:{port}"
    process.communicate()
