"""Real gateways in front of a real service, with the configurations of examples/gateways."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from contextlib import ExitStack
from dataclasses import dataclass, field
from http.client import HTTPConnection, HTTPException
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import TYPE_CHECKING, Self

from support.paths import ROOT
from support.servers import HOST, ServerError, _port_of, _reserve_port, _spawn, wait_until

if TYPE_CHECKING:
    from collections.abc import Mapping

EXAMPLES = ROOT / "examples" / "gateways"

COMMANDS = {
    "envoy": ["envoy", "-c", "envoy/envoy.yaml", "--use-dynamic-base-id", "--log-level", "error"],
    "envoy quota": ["envoy", "-c", "envoy/quota.yaml", "--use-dynamic-base-id", "--log-level", "error"],
    "nginx": ["nginx", "-p", ".", "-c", "nginx.conf", "-g", "daemon off;"],
    "traefik": ["traefik", "--configFile=traefik/traefik.yaml"],
    "caddy": ["caddy", "run", "--config", "Caddyfile", "--adapter", "caddyfile"],
    "haproxy": ["haproxy", "-f", "haproxy/haproxy.cfg"],
}


def gateway_program(name: str) -> str:
    """The path of a gateway: Envoy, Caddy and Traefik have an environment of their own, the others are Debian's."""
    own = Path(sys.prefix, "gateways", "bin", name)
    found = str(own) if own.exists() else shutil.which(name, path=f"{os.environ['PATH']}:/usr/sbin")
    if found is None:
        raise ServerError(f"{name} is missing; run `make test`, which installs what the tests need")
    return found


class _App(BaseHTTPRequestHandler):
    """The service behind the gateway."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("content-length", "2")
        self.end_headers()
        self.wfile.write(b"ok")

    def log_message(self, *_: object) -> None:
        """Print nothing."""


@dataclass
class Answer:
    """The response of a gateway."""

    status: int
    headers: Mapping[str, str] = field(default_factory=dict)


class Gateway:
    """`with Gateway("nginx") as gateway:` runs a gateway, Headgate and a service, until the end of the block."""

    def __init__(self, name: str, *, store: str = "memory://") -> None:
        self._name = name
        self._store = store
        self._reservations = [_reserve_port() for _ in range(2)]
        self.port, self._headgate_port = map(_port_of, self._reservations)
        self._stack = ExitStack()
        self.headgate: subprocess.Popen[bytes]

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            for each in self._reservations:
                stack.enter_context(each)
            app = ThreadingHTTPServer((HOST, 0), _App)
            stack.callback(app.server_close)
            thread = threading.Thread(target=app.serve_forever, daemon=True)
            thread.start()
            stack.callback(app.shutdown)
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="headgate-gateway-")))
            self._copy_examples(folder / "gateways", app.server_port)
            self._log = stack.enter_context(open(folder / "log", "wb"))
            self._start_headgate(stack, folder / "gateways")
            program, *arguments = COMMANDS[self._name]
            self._start(stack, folder / "gateways", [gateway_program(program), *arguments])
            wait_until(self._is_ready, f"{self._name} passes requests on")
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def get(self, path: str, *, timeout: float = 10) -> Answer:
        """One request on a connection of its own."""
        connection = HTTPConnection(HOST, self.port, timeout=timeout)
        try:
            connection.request("GET", path)
            response = connection.getresponse()
            response.read()
            return Answer(response.status, {name.lower(): value for name, value in response.getheaders()})
        finally:
            connection.close()

    def _is_ready(self) -> bool:
        """True if requests are passed on; Traefik listens before it knows its routes."""
        return self._is_listening(self.port) and (self._name.startswith("envoy") or self.get("/health").status == 200)

    def _copy_examples(self, folder: Path, app_port: int) -> None:
        shutil.copytree(EXAMPLES, folder)
        ports = {"8000": self.port, "8080": self._headgate_port, "8081": self._headgate_port, "9000": app_port}
        for file in folder.rglob("*"):
            if file.is_file():
                text = file.read_text("utf-8")
                for old, new in ports.items():
                    text = text.replace(f"127.0.0.1:{old}", f"127.0.0.1:{new}")
                    text = text.replace(f"port_value: {old}", f"port_value: {new}")
                text = re.sub(r"/(?:minute|hour)\b|unit: (?:minute|hour)\b", _per_day, text)
                file.write_text(text.replace("lua-load ", f"lua-load {folder}/haproxy/"), "utf-8")

    def _start_headgate(self, stack: ExitStack, folder: Path) -> None:
        address = f"{HOST}:{self._headgate_port}"
        options = ["--http", address, "--policy", str(folder / "limits.yaml")]
        if self._name.startswith("envoy"):
            options = ["--grpc", address, "--envoy", str(folder / "envoy" / "ratelimit")]
        command = [sys.executable, "-m", "headgate", "serve", *options, "--store", self._store, "--budget", "0.02"]
        self.headgate = self._start(stack, folder, command)
        wait_until(lambda: self._is_listening(self._headgate_port), "headgate serve listens")

    def _start(self, stack: ExitStack, folder: Path, command: list[str]) -> subprocess.Popen[bytes]:
        previous = Path.cwd()
        os.environ["HEADGATE_URL"] = f"http://{HOST}:{self._headgate_port}/auth"  # read by the script for HAProxy
        os.chdir(folder)
        try:
            process = _spawn(command, self._log.fileno())
        finally:
            os.chdir(previous)
        stack.callback(_end, process)
        return process

    def _is_listening(self, port: int) -> bool:
        connection = HTTPConnection(HOST, port, timeout=1)
        try:
            connection.connect()
        except (OSError, HTTPException):
            return False
        finally:
            connection.close()
        return True


def _per_day(unit: re.Match[str]) -> str:
    """Limits per day instead of per minute and hour, so that no window ends during a test."""
    return re.sub("minute|hour", "day", unit[0])


def _end(process: subprocess.Popen[bytes]) -> None:
    process.send_signal(signal.SIGCONT)
    process.terminate()
    try:
        process.wait(10)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
