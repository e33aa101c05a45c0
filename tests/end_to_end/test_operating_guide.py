"""The guide "From a policy file to an operated fleet" works: its files are written and its commands run, in order."""

from __future__ import annotations

import doctest
import os
import re
import signal
import socket
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from support.paths import DOCS
from support.servers import HOST, _port_of, _reserve_port, wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator

from support.servers import RedisServer

GUIDE = DOCS / "operating.md"
MATCHES = doctest.OutputChecker().check_output
LOOSELY = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


class Shell:
    """One bash that runs commands in turn, as a reader's does; what it leaves in the background is ended with it."""

    def __init__(self, directory: Path) -> None:
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        self._process = subprocess.Popen(
            ["bash", "--noprofile", "--norc"],
            cwd=directory,
            env={**os.environ, "PATH": path, "TZ": "UTC", "PYTHONUNBUFFERED": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def run(self, command: str) -> str:
        """What the command prints; its exit status must be 0."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        if command.endswith("&"):  # its output may come at any time
            command = f"{command.removesuffix('&')} > background-$RANDOM.log 2>&1 &"
        self._process.stdin.write(f"{command}\necho; echo ended $?\n")
        self._process.stdin.flush()
        lines: list[str] = []
        for line in self._process.stdout:
            if match := re.fullmatch(r"ended (\d+)\n", line):
                printed = "".join(lines)
                assert match[1] == "0", f"{command} ended with {match[1]}:\n{printed}"
                return printed
            lines.append(line)
        raise AssertionError(f"the shell ended during {command}:\n{''.join(lines)}")

    def close(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGTERM)
        self._process.communicate(timeout=20)


@pytest.fixture
def shell(tmp_path: Path) -> Iterator[Shell]:
    shell = Shell(tmp_path)
    try:
        yield shell
    finally:
        shell.close()


def is_listening(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex((HOST, port)) == 0


def test_guide_works_from_the_first_command_to_the_last(
    shell: Shell, server: RedisServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reservations = [_reserve_port(), _reserve_port()]
    app_port, admin_port = map(_port_of, reservations)
    for reservation in reservations:
        reservation.close()
    ports = {"6379": f"{server.port}", "8000": f"{app_port}", "8001": f"{admin_port}"}

    def localized(text: str) -> str:
        return re.sub(r"\b(6379|8000|8001)\b", lambda match: ports[match[1]], text)

    commands = 0
    for language, text in re.findall(r"^```(\w+)\n(.*?)^```$", GUIDE.read_text("utf-8"), re.MULTILINE | re.DOTALL):
        text = localized(text)
        if name := re.match(r"# (\w+\.\w+)\n", text):
            # Redis may outlast the default budget on a busy machine, and a request would pass by its failure mode.
            budget = "store: {budget: 2 s}\n" if name[1] == "limits.yaml" else ""
            (tmp_path / name[1]).write_text(text + budget, "utf-8")
        if language != "console":
            continue
        for entry in re.split(r"^\$ ", text, flags=re.MULTILINE)[1:]:
            command, _, shown = entry.partition("\n")
            if "headgate top" in command:
                wait_until(lambda top=command: "1 denied" in shell.run(top), "the nodes' status to arrive")
            printed = shell.run(command)
            assert not shown or MATCHES(shown, printed, LOOSELY), f"{command} printed:\n{printed}\ninstead of:\n{shown}"
            if command.endswith("&"):
                port = app_port if "uvicorn" in command else admin_port
                wait_until(lambda port=port: is_listening(port), f"{command} to listen")
            commands += 1
    assert commands >= 12
