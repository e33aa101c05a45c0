"""`python -m bench.serve`: measure `headgate serve` next to an echo in the same process, and write docs/sizing.md.

All servers run at the same time, and all kinds of calls take turns, round by round, so that other load on the machine
affects them alike. Rates are those of a closed loop, in which a client sends the next call when it has the answer to
the last. Latency is also measured at a fixed rate, the same for the echo and the calls compared with it.
"""

import argparse
import asyncio
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import grpc
import redis
from envoy.service.rate_limit_quota.v3 import rlqs_pb2, rlqs_pb2_grpc
from envoy.service.ratelimit.v3 import rls_pb2

from bench import report
from bench.http_load import cpu_seconds
from bench.progress import Progress
from bench.redis_server import running_redis
from bench.serve_load import Load, run_load
from bench.serve_report import AUTH, CHECK, ECHO, GRPC_ECHO, POLICY_CHECK, RATE_LIMIT, ServeSample, render
from bench.serve_worker import ECHO_METHOD, ECHO_PATH

RESULTS = Path("bench/serve_results.json")
PAGE = Path("docs/sizing.md")
METHOD = "/envoy.service.ratelimit.v3.RateLimitService/ShouldRateLimit"
CONCURRENT = 64
"""Calls in progress where the server is compared with the echo."""
OTHER_CONCURRENT = (1, 256)
PACED_SHARE = 0.4
"""The fixed rate, as a share of the median rate of all kinds of calls of the protocol in the warm-up."""
SECRET = "thirty-two bytes, kept elsewhere"
CLIENTS = 1000
BUCKETS = 100
"""Quota buckets of a proxy."""
PACKAGES = ("headgate", "grpcio", "protobuf", "uvicorn", "httptools", "fastapi", "starlette", "pydantic", "redis")

RULES = "domain: shop\ndescriptors: [{key: user, rate_limit: {unit: day, requests_per_unit: 100000000}}]\n"
POLICY = "identity: {proxies: [127.0.0.0/8]}\nlimits: [{name: per-ip, by: ip, bucket: 10000000/minute}]\n"


@dataclass(frozen=True, slots=True)
class Server:
    """A running server, and the calls that it gets."""

    store: str
    workers: int
    pid: int
    ports: dict[str, int]


@dataclass(frozen=True, slots=True)
class Call:
    """A kind of call: `method` is that of gRPC, and `messages` are the calls of different clients."""

    messages: list[bytes]
    method: str | None = None


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.serve", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one short round, to see that everything works")
    parser.add_argument("--rounds", type=int, default=7, help="the number of interleaved rounds; default: %(default)s")
    parser.add_argument("--seconds", type=float, default=0.3, help="seconds of a measurement; default: %(default)s")
    parser.add_argument("--note", help="a condition of this run to record, such as other load on the machine")
    parser.add_argument("--render", action="store_true", help="write the page again from the recorded results")
    options = parser.parse_args()
    if options.render:
        PAGE.write_text(render(json.loads(RESULTS.read_text("utf-8"))), "utf-8")
        return
    rounds, seconds = (1, 0.2) if options.quick else (options.rounds, options.seconds)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # runs the finally blocks that stop child processes
    recorded = {**_measure_all(rounds, seconds), "note": options.note}
    build = Path(".build/bench")
    build.mkdir(parents=True, exist_ok=True)
    results, page = (build / RESULTS.name, build / PAGE.name) if options.quick else (RESULTS, PAGE)
    results.write_text(json.dumps(recorded, indent=1) + "\n", "utf-8")
    page.write_text(render(recorded), "utf-8")
    print(page, results, sep="\n")


def _measure_all(rounds: int, seconds: float) -> dict[str, Any]:
    progress = Progress()
    with ExitStack() as stack:
        url = stack.enter_context(running_redis())
        client = stack.enter_context(redis.Redis.from_url(url))
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        servers = [
            stack.enter_context(_serve(directory, store, workers, url))
            for store, workers in (("memory", 1), ("Redis", 1), ("Redis", 2))
        ]
        about = report.environment(
            server=f"Redis {client.info('server')['redis_version']}", loop="asyncio's event loop"
        )
        about["versions"] = {package: version(package) for package in PACKAGES}
        idle = {f"{each.store} {each.workers}": _resident_bytes(each) for each in servers}
        samples = list(_measure(servers, client, rounds, seconds, progress))
        quotas = [asyncio.run(_measure_quotas(each, client, seconds)) for _ in range(rounds) for each in servers[:2]]
        used = {f"{each.store} {each.workers}": _resident_bytes(each) for each in servers}
    return {
        "rounds": rounds,
        "seconds": seconds,
        "elapsed_s": progress.done(),
        "environment": about,
        "resident_bytes": {"idle": idle, "used": used},
        "quotas": quotas,
        "samples": [asdict(each) for each in samples],
    }


def _measure(
    servers: list[Server], client: Any, rounds: int, seconds: float, progress: Progress
) -> Iterator[ServeSample]:
    calls = _calls()
    rates: dict[tuple[str, bool], list[float]] = {}
    for round_ in range(-1, rounds):
        progress.say("warm-up" if round_ < 0 else f"round {round_ + 1} of {rounds}", "")
        for server in servers:
            for kind, call in calls.items():
                sample = _sample(server, kind, call, client, seconds, round_, concurrent=CONCURRENT)
                if round_ >= 0:
                    yield sample
                elif server.workers == 1:
                    rates.setdefault((server.store, call.method is None), []).append(sample.rate)
        if round_ < 0:
            continue
        for server in servers:
            if server.workers > 1:
                continue
            for concurrent in OTHER_CONCURRENT:
                for kind, call in calls.items():
                    yield _sample(server, kind, call, client, seconds, round_, concurrent=concurrent)
            for kind, call in calls.items():
                rate = PACED_SHARE * median(rates[server.store, call.method is None])
                yield _sample(server, kind, call, client, seconds, round_, concurrent=CONCURRENT, rate=rate)


def _sample(
    server: Server,
    kind: str,
    call: Call,
    client: Any,
    seconds: float,
    round_: int,
    *,
    concurrent: int,
    rate: float | None = None,
) -> ServeSample:
    port = server.ports["http" if call.method is None else "grpc"]
    load = Load(("127.0.0.1", port), call.messages, concurrent, seconds, path=call.method, rate=rate, seed=round_)
    cpu, redis_cpu, commands = cpu_seconds(server.pid), *_redis_usage(client)
    result = run_load(load)
    cpu_after, redis_cpu_after, commands_after = cpu_seconds(server.pid), *_redis_usage(client)
    count = len(result.laps)
    return ServeSample(
        store=server.store,
        workers=server.workers,
        kind=kind,
        concurrent=concurrent,
        round=round_,
        paced=rate,
        rate=result.rate,
        p50_us=result.percentile_us(50),
        p99_us=result.percentile_us(99),
        cpu_us=(cpu_after - cpu) / count * 1e6,
        client_us=result.cpu_s / count * 1e6,
        redis_us=(redis_cpu_after - redis_cpu) / count * 1e6,
        redis_scripts=(commands_after - commands) / count,
    )


async def _measure_quotas(server: Server, client: Any, seconds: float) -> dict[str, float | str]:
    """CPU time for the report of a bucket by a proxy that reports as fast as it gets answers."""
    report_ = rlqs_pb2.RateLimitQuotaUsageReports(domain="shop")
    for index in range(BUCKETS):
        usage = report_.bucket_quota_usages.add(num_requests_allowed=10)
        usage.bucket_id.bucket["user"] = f"quota-{index}"
        usage.time_elapsed.FromMilliseconds(1000)
    async with grpc.aio.insecure_channel(f"127.0.0.1:{server.ports['grpc']}") as channel:
        stream = rlqs_pb2_grpc.RateLimitQuotaServiceStub(channel).StreamRateLimitQuotas()
        await stream.write(report_)
        await stream.read()
        cpu, redis_cpu, _ = cpu_seconds(server.pid), *_redis_usage(client)
        began, count = perf_counter(), 0
        while perf_counter() < began + seconds:
            await stream.write(report_)
            count += len((await stream.read()).bucket_action)
        spent = perf_counter() - began
        cpu_us = (cpu_seconds(server.pid) - cpu) / count * 1e6
        redis_us = (_redis_usage(client)[0] - redis_cpu) / count * 1e6
        await stream.done_writing()
    return {"store": server.store, "rate": count / spent, "cpu_us": cpu_us, "redis_us": redis_us}


@contextmanager
def _serve(directory: Path, store: str, workers: int, url: str) -> Iterator[Server]:
    """Run a server with its echoes."""
    rules = directory / "rules"
    rules.mkdir(exist_ok=True)
    (rules / "shop.yaml").write_text(RULES)
    (directory / "policy.yaml").write_text(POLICY)
    options = {
        "envoy": str(rules),
        "policy": str(directory / "policy.yaml"),
        "grpc": "127.0.0.1:0",
        "http": "127.0.0.1:0",
        "workers": workers,
        "store": "memory://" if store == "memory" else url,
        "namespace": f"workers-{workers}",
        "log": f"sqlite:///{directory}/decisions-{store}-{workers}.db",
        "budget": 1.0,  # the default of 5 ms is too short on a machine that also runs the clients
        "deadline": 10.0,
    }
    command = [sys.executable, "-m", "bench.serve_worker", json.dumps(options)]
    with tempfile.TemporaryFile("w+") as errors:
        environment = {**os.environ, "HEADGATE_SECRET": SECRET}
        process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=errors, text=True)
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            if not line:
                errors.seek(0)
                raise SystemExit(f"the server with {store} did not start:\n{errors.read()}")
            yield Server(store, workers, process.pid, json.loads(line))
        finally:
            process.terminate()
            process.wait(30)


def _calls() -> dict[str, Call]:
    """All kinds of calls, those of one protocol after their echo."""
    descriptors = [_rate_limit_request(f"user-{index}") for index in range(CLIENTS)]
    limits = '{{"limits": [{{"limit": "10000000/minute", "name": "search", "by": ["tenant-{}"]}}]}}'
    addresses = [f"10.1.{index // 250}.{index % 250}" for index in range(CLIENTS)]
    bodies = [limits.format(index) for index in range(CLIENTS)]
    described = [f'{{"request": {{"path": "/items", "ip": "{address}"}}}}' for address in addresses]
    headers = "X-Original-URI: /items\r\nX-Original-Method: GET\r\nX-Forwarded-For: {}\r\n"
    return {
        GRPC_ECHO: Call(descriptors, ECHO_METHOD),
        RATE_LIMIT: Call(descriptors, METHOD),
        ECHO: Call([_http_request("POST", ECHO_PATH, body) for body in bodies]),
        CHECK: Call([_http_request("POST", "/v1/check", body) for body in bodies]),
        POLICY_CHECK: Call([_http_request("POST", "/v1/check", body) for body in described]),
        AUTH: Call([_http_request("GET", "/auth", "", headers.format(address)) for address in addresses]),
    }


def _rate_limit_request(user: str) -> bytes:
    request = rls_pb2.RateLimitRequest(domain="shop")
    request.descriptors.add().entries.add(key="user", value=user)
    content: bytes = request.SerializeToString()
    return content


def _http_request(method: str, path: str, body: str, headers: str = "") -> bytes:
    if body:
        headers += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n"
    return f"{method} {path} HTTP/1.1\r\nHost: 127.0.0.1\r\n{headers}\r\n{body}".encode("ascii")


def _resident_bytes(server: Server) -> int:
    """The largest resident memory of a worker."""
    children = Path(f"/proc/{server.pid}/task/{server.pid}/children").read_text().split()
    workers = [int(child) for child in children] if server.workers > 1 else [server.pid]
    pages = [int(Path(f"/proc/{pid}/statm").read_text().split()[1]) for pid in workers]
    return max(pages) * os.sysconf("SC_PAGE_SIZE")


def _redis_usage(client: Any) -> tuple[float, int]:
    """CPU seconds of the server, and scripts that it has run."""
    cpu, commands = client.info("cpu"), client.info("commandstats")
    scripts = sum(commands[name]["calls"] for name in ("cmdstat_evalsha", "cmdstat_fcall") if name in commands)
    return cpu["used_cpu_user"] + cpu["used_cpu_sys"], scripts


if __name__ == "__main__":
    main()
