"""The physical limit: how often the server itself can run headgate's script, with a client written in C."""

import subprocess
from datetime import timedelta
from typing import Any
from urllib.parse import urlsplit

import redis

CLIENTS = 8
PIPELINED = 16


def headgate_batch_command(limit: Any, checks: int) -> tuple[str, list[str]]:
    """The script and the arguments after its hash with which headgate sends a batch of `checks` checks.

    redis-benchmark replaces `__rand_int__` with a number of its own in every place and every run.
    """
    from headgate.stores.operations import checked
    from headgate.stores.redis.encoding import CommandEncoder

    wire = CommandEncoder("headgate", None)
    # The command of different clients: one that meets the same key again and again says so, and is run another way.
    command = wire.encode_checks([checked((limit.by(f"user-{number}"),), 1, None) for number in range(checks)])
    assert command.script is not None
    keys = [wire.name(limit.by("user-__rand_int__"))] * checks
    return command.script.text.decode(), [str(checks), *map(str, [*keys, *command.args])]


def script_rate(url: str, checks: int, keys: int, seconds: float) -> float:
    """Checks a second of runs with `checks` checks each, over so many keys, pipelined."""
    from headgate import Limit

    limit = Limit(100_000, timedelta(hours=1), name="per_ip")
    script, arguments = headgate_batch_command(limit, checks)
    with redis.Redis.from_url(url) as client:
        sha = client.script_load(script)
    command = ["EVALSHA", sha, *arguments]
    few = 20_000 // checks
    rate = _benchmark(url, command, few, keys)
    return checks * _benchmark(url, command, max(few, int(rate * seconds)), keys)


def _benchmark(url: str, command: list[str], runs: int, keys: int) -> float:
    """Runs of the command a second."""
    at = urlsplit(url)
    asked = ["redis-benchmark", "-h", str(at.hostname), "-p", str(at.port), "--csv", "-r", str(keys)]
    asked += ["-c", str(CLIENTS), "-P", str(PIPELINED), "-n", str(runs), *command]
    # It hangs for ever on a server that is gone.
    finished = subprocess.run(asked, check=True, capture_output=True, text=True, timeout=120)
    heading, row = finished.stdout.strip().splitlines()[-2:]
    return float(row.split('","')[heading.split('","').index("rps")])
