"""A Redis of the bench's own: a child process on a free loopback port that writes nothing to disk."""

import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager

import redis


@contextmanager
def running_redis() -> Iterator[str]:
    """The URL of a fresh server, which is gone when the block ends, also on Ctrl-C."""
    port = free_port()
    server = start_redis(port)
    try:
        yield f"redis://127.0.0.1:{port}/0"
    finally:
        server.terminate()
        server.wait(10)


def start_redis(port: int) -> subprocess.Popen[bytes]:
    """A server on that port that answers; whoever started it stops it."""
    program = shutil.which("redis-server")
    if program is None:
        raise SystemExit("redis-server is not on PATH: run scripts/install-packages servers first")
    options = ["--port", str(port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no"]
    # Nothing is written: any directory will do.
    server = subprocess.Popen([program, *options, "--dir", tempfile.gettempdir()], stdout=subprocess.DEVNULL)
    _wait_until_it_answers(f"redis://127.0.0.1:{port}/0", server)
    return server


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _wait_until_it_answers(url: str, server: subprocess.Popen[bytes]) -> None:
    give_up_at = time.monotonic() + 10
    with redis.Redis.from_url(url) as client:
        while server.poll() is None and time.monotonic() < give_up_at:
            try:
                client.ping()
            except redis.ConnectionError:
                time.sleep(0.01)
            else:
                return
    raise SystemExit(f"redis-server did not answer at {url}")
