"""`python -m bench.scaling`: compare a sharded store with Redis Cluster, and write the tables of docs/scaling.md.

All servers run on this machine. The load takes turns between the stores, round by round, so that other load affects
them alike. Prepaid tokens and the denial cache are off, so that each check is one of the servers.
"""

import argparse
import asyncio
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing
from datetime import timedelta
from itertools import cycle
from pathlib import Path
from statistics import median
from time import monotonic, perf_counter, process_time
from typing import Any, NamedTuple

from bench import report
from bench.http_load import cpu_seconds
from headgate import AsyncLimiter, Limit, Limiter
from headgate.stores.redis.rendezvous import RendezvousHash

sys.path.append(str(Path(__file__).parents[1] / "tests"))
from support.servers import HOST, RedisCluster, RedisServer, ShardSet, wait_until

PAGE = Path("docs/scaling.md")
PER_KEY, PER_IP = (Limit(1_000_000, timedelta(days=1), name=name) for name in ("per-key", "per-ip"))
CLIENTS = 5_000
TASKS = 192
EXACT: dict[str, Any] = {"remember": 0, "lease": 0}
BUDGET_S = 0.1
"""The budget while a server fails."""
PROBES = 300
"""Keys that are checked again and again while a server fails."""
KILLED_S, RESTARTED_S, END_S = 1.0, 9.0, 13.0
"""Seconds since the begin of the failure experiment."""
GROWN_KEYS = 3_000


class Load(NamedTuple):
    """One measurement of one store."""

    rate: float
    p50_us: float
    p99_us: float
    client_us: float
    server_us: float
    """CPU time of all servers for each check."""


class Loss(NamedTuple):
    """The effect of the loss of one server: times in seconds from its end, shares from 0 to 1."""

    own: float
    """The share of keys of the lost server."""
    others_failed: float
    """The share of checks of other keys that were not exact until the server was back."""
    own_failed: float
    again_s: float
    """Until its keys are decided exactly again: from its end if another server takes over, otherwise from its start."""
    is_taken_over: bool
    kept: float
    """The share of lost keys that kept their counts."""


class Growth(NamedTuple):
    """The effect of an added server."""

    moved: float
    """The share of keys whose server changed."""
    restarted: float
    """The share of keys that started from zero."""
    seconds: float
    failed: int
    """Checks meanwhile that were not exact, of `checks`."""
    checks: int


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.scaling", description=__doc__)
    parser.add_argument("--rounds", type=int, default=5, help="the number of interleaved rounds; default: %(default)s")
    parser.add_argument("--seconds", type=float, default=0.5, help="seconds of a measurement; default: %(default)s")
    parser.add_argument("--dry", action="store_true", help="print the tables, and do not write the page")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # runs the finally blocks that stop child processes
    tables: dict[str, list[str]] = {}
    with ExitStack() as stack:
        single = stack.enter_context(RedisServer())
        cluster, shards = stack.enter_context(RedisCluster()), stack.enter_context(ShardSet())
        with closing(single.client()) as client:
            about = report.environment(
                server=f"Redis {client.info('server')['redis_version']}", loop="asyncio's event loop"
            )
        stores = {
            "one Redis": (single.url, [single]),
            "Redis Cluster, 3 primaries": (cluster.url, cluster.nodes),
            "sharded, 3 deployments": (shards.url, shards.servers),
        }
        tables["load"] = [*_load_rows(stores, options.rounds, options.seconds)]
    losses = {"Redis Cluster, 3 primaries with a replica each": _lose_cluster_node(has_replicas=True)}
    losses["Redis Cluster, 3 primaries without replicas"] = _lose_cluster_node(has_replicas=False)
    losses["sharded, 3 deployments"] = _lose_shard()
    tables["loss"] = [*_loss_rows(losses)]
    tables["growth"] = [*_growth_rows({"Redis Cluster": _grow_cluster(), "sharded": _grow_shards()})]
    conditions = f"Python {about['python']}, {about['server']}, {options.rounds} rounds of {options.seconds:g} s"
    tables["machine"] = [
        f"Measured {about['date']} by `python -m bench.scaling`, with the client and all servers on one machine:",
        f"{about['machine']}; {conditions}.",
    ]
    for name, rows in tables.items():
        print(f"\n{name}\n" + "\n".join(rows))
    if not options.dry:
        write_tables(tables)


def write_tables(tables: dict[str, list[str]]) -> None:
    """Replace the tables of docs/scaling.md that have these names."""
    text = PAGE.read_text("utf-8")
    for name, rows in tables.items():
        pattern = re.compile(rf"(<!-- {name} -->\n).*?(<!-- end -->)", re.DOTALL)
        text, count = pattern.subn(lambda found, rows=rows: found[1] + "\n".join(rows) + "\n" + found[2], text)
        assert count == 1, f"{PAGE} has no place for {name}"
    PAGE.write_text(text, "utf-8")


# ---------------------------------------------------------------------- load


def _load_rows(stores: dict[str, tuple[str, Sequence[RedisServer]]], rounds: int, seconds: float) -> Iterator[str]:
    samples: dict[tuple[str, str], list[Load]] = {}
    for _ in range(rounds):
        for name, (url, servers) in stores.items():
            for kind, limits, tasks in (
                ("sequential", (PER_KEY,), 1),
                ("one limit", (PER_KEY,), TASKS),
                ("two limits", (PER_KEY, PER_IP), TASKS),
            ):
                sample = asyncio.run(_measure(url, servers, limits, tasks, seconds))
                samples.setdefault((name, kind), []).append(sample)

    def middle(name: str, kind: str, field: str) -> float:
        return median(getattr(each, field) for each in samples[name, kind])

    yield f"| | {' | '.join(stores)} |"
    yield "| --- |" + " --: |" * len(stores)
    rows = [
        (f"checks per second, {TASKS} tasks, one limit", "one limit", "rate", ",.0f"),
        (f"checks per second, {TASKS} tasks, two limits", "two limits", "rate", ",.0f"),
        ("CPU of the client per check, one limit (us)", "one limit", "client_us", ".1f"),
        ("CPU of the client per check, two limits (us)", "two limits", "client_us", ".1f"),
        ("CPU of all servers per check, one limit (us)", "one limit", "server_us", ".1f"),
        ("CPU of all servers per check, two limits (us)", "two limits", "server_us", ".1f"),
        ("latency of single checks, median (us)", "sequential", "p50_us", ".0f"),
        ("latency of single checks, 99th percentile (us)", "sequential", "p99_us", ".0f"),
    ]
    for title, kind, field, form in rows:
        yield f"| {title} | {' | '.join(format(middle(name, kind, field), form) for name in stores)} |"


async def _measure(
    url: str, servers: Sequence[RedisServer], limits: Sequence[Limit], tasks: int, seconds: float
) -> Load:
    keys = cycle([tuple(limit.by(f"{limit.name}-{n * 7919 % CLIENTS}") for limit in limits) for n in range(CLIENTS)])
    laps: list[float] = []
    async with AsyncLimiter(url, budget=2.0, **EXACT) as limiter:

        async def run(until: float) -> None:
            while (began := perf_counter()) < until:
                decision = await limiter.check(*next(keys))
                assert decision.allowed
                laps.append(perf_counter() - began)

        await asyncio.gather(*(run(perf_counter() + 0.1) for _ in range(tasks)))
        laps.clear()
        server_s, client_s, began = _cpu_s(servers), process_time(), perf_counter()
        await asyncio.gather(*(run(began + seconds) for _ in range(tasks)))
        spent, client_s, server_s = perf_counter() - began, process_time() - client_s, _cpu_s(servers) - server_s
    laps.sort()
    count = len(laps)
    p50, p99 = laps[count // 2] * 1e6, laps[count * 99 // 100] * 1e6
    return Load(count / spent, p50, p99, client_s / count * 1e6, server_s / count * 1e6)


def _cpu_s(servers: Sequence[RedisServer]) -> float:
    return sum(cpu_seconds(server.pid) for server in servers)


# ------------------------------------------------------------ loss of a server


def _lose_cluster_node(*, has_replicas: bool) -> Loss:
    with RedisCluster() as cluster:
        if not has_replicas:
            for node in cluster.nodes[3:]:
                with closing(node.client()) as client:
                    client.execute_command("CLUSTER", "RESET")
                node.kill()
        server = cluster.nodes[1]
        with closing(cluster.nodes[0].client()) as client:
            slots = client.execute_command("CLUSTER", "SLOTS")
            own = [
                _stored(n)
                for n in range(PROBES)
                if _port_of_slot(slots, client.execute_command("CLUSTER", "KEYSLOT", _stored(n))) == server.port
            ]
        return _lose(cluster.url, server, set(own))


def _port_of_slot(slots: Any, slot: int) -> int | None:
    return next((primary[1] for first, last, primary, *_ in slots if first <= slot <= last), None)


def _lose_shard() -> Loss:
    with ShardSet() as shards:
        owners = RendezvousHash(shards.shards)
        return _lose(
            shards.url, shards.shards["b"], {_stored(n) for n in range(PROBES) if owners.owner(_stored(n)) == "b"}
        )


def _stored(number: int) -> str:
    return f"headgate:{PER_KEY.name}:token_bucket.1:client-{number}"


def _lose(url: str, server: RedisServer, own: set[str]) -> Loss:
    """Check all keys in turn while a server is killed, and later started again."""
    outcomes: list[tuple[float, bool, bool]] = []  # time, is one of the lost keys, is exact
    with Limiter(url, on_failure="open", budget=BUDGET_S, **EXACT) as limiter:
        keys = [PER_KEY.by(f"client-{number}") for number in range(PROBES)]
        for key in keys:
            while limiter.check(key, cost=0).degraded is not None:
                pass
            limiter.check(key, cost=PER_KEY.quota // 2)
        began, is_killed, is_back = monotonic(), False, False
        numbers = cycle(range(PROBES))
        while (now := monotonic() - began) < END_S:
            if now > KILLED_S and not is_killed:
                server.kill()
                is_killed = True
            if now > RESTARTED_S and not is_back:
                server.start()
                is_back = True
            number = next(numbers)
            is_exact = limiter.check(keys[number], cost=0).degraded is None
            outcomes.append((monotonic() - began - KILLED_S, _stored(number) in own, is_exact))
        kept = [
            limiter.check(PER_KEY.by(f"client-{n}"), cost=0).remaining < PER_KEY.quota * 3 // 4
            for n in range(PROBES)
            if _stored(n) in own
        ]
    down_s = RESTARTED_S - KILLED_S
    last_failures = [
        max((at for at, is_own, is_exact in outcomes if is_own and not is_exact and begin < at < end), default=begin)
        for begin, end in ((0.0, down_s), (down_s, END_S))
    ]

    def failed(is_own: bool) -> float:
        found = [is_exact for at, each, is_exact in outcomes if each is is_own and 0 < at < down_s]
        return found.count(False) / len(found)

    has_recovered = last_failures[0] < down_s - 0.5
    return Loss(
        len(own) / PROBES,
        failed(False),
        failed(True),
        last_failures[0] if has_recovered else last_failures[1] - down_s,
        has_recovered,
        sum(kept) / len(kept),
    )


def _loss_rows(losses: dict[str, Loss]) -> Iterator[str]:
    yield "| | keys of the lost server | checks of its keys not exact | of other keys | exact again | counts kept |"
    yield "| --- |" + " --: |" * 5
    for name, loss in losses.items():
        again = f"{loss.again_s:.1f} s after its {'end' if loss.is_taken_over else 'restart'}"
        shares = [f"{share:.0%}" for share in (loss.own, loss.own_failed, loss.others_failed)]
        yield f"| {name} | {' | '.join(shares)} | {again} | {loss.kept:.0%} |".replace("%", " %")


# ------------------------------------------------------------- one more server


def _grow_shards() -> Growth:
    with ShardSet() as shards, RedisServer() as added:
        with Limiter(shards.url, **EXACT, budget=2.0) as limiter:
            _use(limiter)
        began = monotonic()
        with Limiter(f"{shards.url},d={added.url}", **EXACT, budget=2.0) as limiter:
            seconds = monotonic() - began
            restarted = _restarted(limiter)
    return Growth(restarted, restarted, seconds, 0, 0)


def _grow_cluster() -> Growth:
    """What `redis-cli --cluster rebalance` does with an empty primary, under checks."""
    with RedisCluster() as cluster, Limiter(cluster.url, on_failure="open", **EXACT, budget=0.5) as limiter:
        _use(limiter)
        added, seed = cluster.nodes[3], f"{HOST}:{cluster.nodes[0].port}"
        with closing(added.client()) as client:  # a replica becomes the empty primary
            client.execute_command("CLUSTER", "RESET")
            client.execute_command("CLUSTER", "MEET", HOST, cluster.nodes[0].port, cluster.nodes[0].bus_port)
            wait_until(lambda: client.cluster("info")["cluster_state"] == "ok", "the cluster to meet")
        wait_until(lambda: "[OK] All nodes agree" in _redis_cli("check", seed), "the nodes to agree")
        before = _owned_slots(cluster)
        began, failed, checks = monotonic(), 0, 0
        command = ["redis-cli", "--cluster", "rebalance", seed, "--cluster-use-empty-masters"]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        numbers = cycle(range(GROWN_KEYS))
        while process.poll() is None:
            checks += 1
            failed += limiter.check(PER_KEY.by(f"client-{next(numbers)}"), cost=0).degraded is not None
        seconds = monotonic() - began
        assert process.returncode == 0
        after = _owned_slots(cluster)
        moved = sum(before[slot] != after[slot] for slot in before) / len(before)
        return Growth(moved, _restarted(limiter), seconds, failed, checks)


def _redis_cli(verb: str, seed: str) -> str:
    return subprocess.run(["redis-cli", "--cluster", verb, seed], capture_output=True, text=True, check=False).stdout


def _owned_slots(cluster: RedisCluster) -> dict[int, int]:
    """The port of the primary of each slot."""
    with closing(cluster.nodes[0].client()) as client:
        slots = client.execute_command("CLUSTER", "SLOTS")
    return {slot: primary[1] for first, last, primary, *_ in slots for slot in range(first, last + 1)}


def _use(limiter: Limiter) -> None:
    for number in range(GROWN_KEYS):
        limiter.check(PER_KEY.by(f"client-{number}"), cost=PER_KEY.quota // 2)


def _restarted(limiter: Limiter) -> float:
    left = [limiter.check(PER_KEY.by(f"client-{number}"), cost=0).remaining for number in range(GROWN_KEYS)]
    return sum(each > PER_KEY.quota * 3 // 4 for each in left) / GROWN_KEYS


def _growth_rows(growths: dict[str, Growth]) -> Iterator[str]:
    yield "| | keys that moved | counters that started from zero | duration | checks meanwhile that were not exact |"
    yield "| --- |" + " --: |" * 4
    for name, each in growths.items():
        failed = f"{each.failed:,} of {each.checks:,}" if each.checks else "0"
        duration = f"{each.seconds:.1f} s" if each.checks else "a new URL"
        yield f"| {name} | {each.moved:.1%} | {each.restarted:.1%} | {duration} | {failed} |".replace("%", " %")


if __name__ == "__main__":
    main()
