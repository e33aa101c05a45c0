"""The rate at which Redis itself can run Headgate's script, measured with redis-benchmark."""

import subprocess
from datetime import timedelta
from typing import Any
from urllib.parse import urlsplit

import redis

CLIENTS = 8
PIPELINED = 16


def headgate_batch_command(limit: Any, checks: int) -> tuple[str, list[str]]:
    """The script of a batch of checks, and its arguments. redis-benchmark fills in each `__rand_int__`."""
    from headgate.stores.operations import checked
    from headgate.stores.redis.encoding import CommandEncoder

    wire = CommandEncoder("headgate", None)
    # Different clients: a batch with duplicate keys is encoded differently.
    command = wire.encode_checks([checked((limit.by(f"user-{number}"),), 1, None) for number in range(checks)])
    assert command.script is not None
    keys = [wire.name(limit.by("user-__rand_int__"))] * checks
    return command.script.text.decode(), [str(checks), *map(str, [*keys, *command.args])]


def script_rate(url: str, checks: int, keys: int, seconds: float) -> float:
    """Checks per second, in pipelined runs of `checks` checks each over `keys` keys."""
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
    """Runs of the command per second."""
    at = urlsplit(url)
    arguments = ["redis-benchmark", "-h", str(at.hostname), "-p", str(at.port), "--csv", "-r", str(keys)]
    arguments += ["-c", str(CLIENTS), "-P", str(PIPELINED), "-n", str(runs), *command]
    # It hangs if the server is gone.
    finished = subprocess.run(arguments, check=True, capture_output=True, text=True, timeout=120)
    heading, row = finished.stdout.strip().splitlines()[-2:]
    return float(row.split('","')[heading.split('","').index("rps")])
