"""HTTP load: apps behind a real server in a child process, and wrk as the client."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import AsyncExitStack, contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any
from urllib.request import urlopen

from bench.apps import FASTAPI, FLASK, AppContender
from bench.correctness import WrongAnswerError
from bench.redis_server import free_port
from bench.setups import Setting
from bench.timing import Sample, redis_cpu_seconds

CONNECTIONS = 64
SCRIPT = Path(__file__).with_name("wrk.lua")
LISTS = {"FastAPI": FASTAPI, "Flask": FLASK}
TICKS = os.sysconf("SC_CLK_TCK")
_RESOURCES = AsyncExitStack()  # of the served app; kept until the process ends


def under_load(framework: str, contender: AppContender, setting: Setting, redis_url: str, seconds: float) -> Sample:
    """Measure a contender's app behind one worker of its server with wrk, after a warm-up."""
    with _serve(framework, contender, setting) as (address, pid):
        _wrk(contender, address, max(0.3, seconds / 4))
        app_before, redis_before = cpu_seconds(pid), redis_cpu_seconds(redis_url)
        seen = _wrk(contender, address, seconds)
        app_after, redis_after = cpu_seconds(pid), redis_cpu_seconds(redis_url)
    requests = seen["requests"]
    return Sample(
        rate=requests / seen["duration_us"] * 1e6,
        p50_us=seen["p50_us"],
        p99_us=seen["p99_us"],
        client_us=(app_after - app_before) / requests * 1e6,
        server_us=(redis_after - redis_before) / requests * 1e6,
    )


def make_app(framework: str, name: str, url: str, quota: int, seconds: int) -> Any:
    """The app of a contender, for servers."""
    contender = next(each for each in LISTS[framework] if each.name == name)
    return contender.setup(Setting(url, quota, timedelta(seconds=seconds)), _RESOURCES)


@contextmanager
def _serve(framework: str, contender: AppContender, setting: Setting) -> Iterator[tuple[str, int]]:
    """Serve the app; yield its address and the process ID of the server."""
    port = free_port()
    given = (framework, contender.name, setting.url, setting.quota, setting.seconds)
    if framework == "FastAPI":
        command = ["bench.http_load", str(port), *map(str, given)]
    else:
        options = ["--workers", "1", "--worker-class", "sync", "--log-level", "warning", "--no-control-socket"]
        command = ["gunicorn", *options, "--bind", f"127.0.0.1:{port}", f"bench.http_load:make_app{given!r}"]
    with tempfile.TemporaryFile("w+") as said:
        server = subprocess.Popen([sys.executable, "-m", *command], stdout=said, stderr=said)
        try:
            address = f"http://127.0.0.1:{port}"
            if not _wait_until_ready(address, server):
                said.seek(0)
                raise SystemExit(f"the server of {contender.name} did not start:\n{said.read()}")
            yield address, server.pid
        finally:
            server.terminate()
            try:
                server.wait(10)
            except subprocess.TimeoutExpired:
                server.kill()
                server.wait()


def _wait_until_ready(address: str, server: subprocess.Popen[bytes]) -> bool:
    """Wait for the first response; False if the server ended or takes too long."""
    give_up_at = time.monotonic() + 30
    while server.poll() is None and time.monotonic() < give_up_at:
        with suppress(OSError):
            urlopen(f"{address}/items/1", timeout=10).close()
            return True
        time.sleep(0.02)
    return False


def _wrk(contender: AppContender, address: str, seconds: float) -> dict[str, int]:
    program = shutil.which("wrk")
    if program is None:
        raise SystemExit("wrk is not on PATH: run scripts/install-packages servers wrk first")
    # wrk takes whole seconds.
    options = ["--threads", "1", "--connections", str(CONNECTIONS), "--duration", f"{max(1, round(seconds))}s"]
    command = [program, *options, "--script", str(SCRIPT), address]
    finished = subprocess.run(command, check=True, capture_output=True, text=True, timeout=60 + seconds)
    seen: dict[str, int] = json.loads(finished.stdout.strip().splitlines()[-1])
    if seen["refused"] or seen["broken"] or not seen["requests"]:
        raise WrongAnswerError(f"{contender.name}: not every request was served: {seen}")
    return seen


def cpu_seconds(pid: int) -> float:
    """The CPU time of a process and its children; gunicorn serves in a child."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    user, system = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]
    return (int(user) + int(system)) / TICKS + sum(cpu_seconds(int(child)) for child in children)


if __name__ == "__main__":
    import uvicorn

    port, framework, name, url, quota, period = sys.argv[1:]
    app = make_app(framework, name, url, int(quota), int(period))
    uvicorn.run(
        app, host="127.0.0.1", port=int(port), loop="uvloop", http="httptools", log_level="warning", access_log=False
    )
