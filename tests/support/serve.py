"""`headgate serve` as a child of the test run."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@contextmanager
def serving(directory: Path, *options: str) -> Iterator[tuple[subprocess.Popen[str], dict[str, int]]]:
    """Run the command until the end of the block; yields its process and its ports."""
    addresses = "--grpc", "127.0.0.1:0", "--http", "127.0.0.1:0"
    command = [sys.executable, "-m", "headgate", "serve", "--envoy", str(directory), *addresses, *options]
    with (
        tempfile.TemporaryFile("w+") as errors,  # not a pipe, which would fill up
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True) as process,
    ):
        try:
            assert process.stdout is not None
            lines = [process.stdout.readline() for _ in range(2)]
            yield process, {line.split()[0]: int(line.rpartition(":")[2]) for line in lines}
        finally:
            process.terminate()
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                raise
