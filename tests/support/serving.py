"""Web servers as children of the test run, on ports of their own, and clients that come all at once."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Self

from support.paths import ROOT
from support.servers import HOST, ServerError, _port_of, _reserve_port, _spawn, wait_until

if TYPE_CHECKING:
    from collections.abc import Mapping

SECRET = "for tests only, as long as it has to be"


class Reply(NamedTuple):
    """What a server answered."""

    status: int
    headers: Mapping[str, str]
    """By names in lower case."""
    body: str


class WebServer:
    """`with WebServer("-m", "uvicorn", ..., "{port}") as server:` runs Python so, until the end of the block."""

    def __init__(self, *arguments: str, directory: Path = ROOT, environment: Mapping[str, str] | None = None) -> None:
        self._reservation = _reserve_port()
        self.port = _port_of(self._reservation)
        self._arguments = [argument.replace("{port}", f"{self.port}") for argument in arguments]
        self._directory = directory
        self._environment = {"HEADGATE_SECRET": SECRET, "PYTHONUNBUFFERED": "1"} | dict(environment or {})
        self._log = tempfile.NamedTemporaryFile(prefix="headgate-web-")  # noqa: SIM115 - it is closed by stop()
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def log(self) -> str:
        """All that it has printed so far."""
        return Path(self._log.name).read_text("utf-8", errors="replace")

    def ask(self, method: str, path: str, **headers: str) -> Reply:
        """One request, on a connection of its own: the kernel picks the worker."""
        connection = HTTPConnection(HOST, self.port, timeout=10)
        try:
            connection.request(method, path, headers={name.replace("_", "-"): value for name, value in headers.items()})
            answer = connection.getresponse()
            headers = {name.lower(): value for name, value in answer.getheaders()}
            return Reply(answer.status, headers, answer.read().decode())
        finally:
            connection.close()

    def burst(self, requests: int, *, clients: int, method: str = "GET", path: str = "/") -> list[Reply]:
        """So many requests, from clients that all begin at the same moment."""
        start = threading.Barrier(clients)

        def visit(_: int) -> list[Reply]:
            start.wait(10)
            return [self.ask(method, path) for _ in range(requests // clients)]

        with ThreadPoolExecutor(clients) as pool:
            return [reply for replies in pool.map(visit, range(clients)) for reply in replies]

    def interrupt(self) -> int:
        """Ctrl-C; its exit status."""
        return self._end(signal.SIGINT)

    def wait(self) -> int:
        """Let it come to its own end; its exit status."""
        assert self._process is not None
        return self._process.wait(30)

    def stop(self) -> None:
        """End it, and leave nothing behind."""
        if self._process is not None:
            try:
                self._end(signal.SIGTERM)
            except subprocess.TimeoutExpired:
                os.killpg(self._process.pid, signal.SIGKILL)  # it leads a session of its own: its workers, nobody else
                self._process.wait(5)
        self._reservation.close()
        self._log.close()

    def start(self) -> Self:
        # Through `env`, as the child's environment is this process's own but for a few names.
        settings = [f"{name}={value}" for name, value in self._environment.items()]
        command = ["env", "-C", f"{self._directory}", *settings, sys.executable, *self._arguments]
        self._process = _spawn(command, self._log.fileno())
        return self

    def __enter__(self) -> Self:
        try:
            self.start()
            wait_until(self._is_up_or_ended, "a web server to answer")
            if self._process is not None and (status := self._process.poll()) is not None:
                raise ServerError(f"it ended with status {status} as it started; its log:\n{self.log}")
        except TimeoutError as late:
            log = self.log
            self.stop()
            raise ServerError(f"{late}; its log:\n{log}") from None
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _end(self, how: signal.Signals) -> int:
        assert self._process is not None
        if self._process.poll() is None:
            self._process.send_signal(how)
        return self._process.wait(15)

    def _is_up_or_ended(self) -> bool:
        if self._process is not None and self._process.poll() is not None:
            return True
        with suppress(OSError, HTTPException):
            return self.ask("GET", "/health").status == 200
        return False
