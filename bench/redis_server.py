"""A Redis server for benchmarks: a child process on a free loopback port, without persistence."""

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
    """Start a server and yield its URL; stop it on exit."""
    port = free_port()
    server = start_redis(port)
    try:
        yield f"redis://127.0.0.1:{port}/0"
    finally:
        server.terminate()
        server.wait(10)


def start_redis(port: int) -> subprocess.Popen[bytes]:
    """Start a server and wait until it answers; the caller stops it."""
    program = shutil.which("redis-server")
    if program is None:
        raise SystemExit("redis-server is not on PATH: run scripts/install-packages servers first")
    options = ["--port", str(port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no"]
    # Nothing is written to the directory.
    server = subprocess.Popen([program, *options, "--dir", tempfile.gettempdir()], stdout=subprocess.DEVNULL)
    _wait_until_ready(f"redis://127.0.0.1:{port}/0", server)
    return server


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _wait_until_ready(url: str, server: subprocess.Popen[bytes]) -> None:
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
