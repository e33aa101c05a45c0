"""What the size of a policy costs: to load, and for each request that is resolved against it."""

import gc
import json
import random
import subprocess
import sys
from dataclasses import dataclass
from time import process_time
from typing import Any

Request = tuple[str, str]  # a path, and a tenant
REQUESTS = 2_000
NOW_US = 1_750_000_000_000_000


@dataclass(frozen=True, slots=True)
class Size:
    limits: int
    overrides: int

    def __str__(self) -> str:
        return f"{self.limits:,} limits, {self.overrides:,} overrides"


SMALL = Size(10, 1_000)
LARGE = Size(1_000, 100_000)


@dataclass(frozen=True, slots=True)
class PolicySample:
    """One round, in CPU time. The request meets three limits in both policies, one of them with overrides."""

    load_s: float  # the large one, from JSON to what requests are resolved against
    read_s: float  # the part of it that reads, checks and builds the policy
    small_us: float  # to resolve a request against the small one
    large_us: float
    first_us: float  # and against the large one, where its route has never been seen

    @property
    def more_us(self) -> float:
        return self.large_us - self.small_us


def policy_costs() -> PolicySample:
    """Measured in a process of its own, which has nothing else to remember."""
    return PolicySample(**_asked("sizes"))


def yaml_seconds() -> float:
    """How long the large one takes as YAML."""
    seconds: float = _asked("yaml")["read_s"]
    return seconds


def policy(size: Size) -> dict[str, Any]:
    """Two limits on every route and one on each of many routes, with other numbers for many tenants."""
    services = range(size.limits - 2)
    return {
        "limits": [
            {"name": "per-ip", "by": "ip", "limit": "1000/minute"},
            {"name": "everybody", "by": "global", "limit": "100000/second"},
            *(
                {"name": f"service-{n}", "by": "tenant", "path": _route(n, "{id}"), "limit": f"{100 + n % 7}/minute"}
                for n in services
            ),
        ],
        "overrides": [
            {"tenant": _tenant(n), "limit": f"service-{n % len(services)}", "bucket": f"{1000 + n % 50}/minute"}
            for n in range(size.overrides)
        ],
    }


def _asked(question: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "bench.policy_costs", question]
    finished = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    answer: dict[str, Any] = json.loads(finished.stdout)
    return answer


def _sizes() -> dict[str, float]:
    from headgate.policy.loader import read
    from headgate.policy.snapshot import Snapshot

    small, large = (json.dumps(policy(size)) for size in (SMALL, LARGE))
    gc.collect()
    began = process_time()
    values = read(large, file="policy.json")
    read_s = process_time() - began
    snapshot = Snapshot(values)
    load_s = process_time() - began

    beside = Snapshot(read(small, file="policy.json"))
    first_us = _resolve_us(snapshot, _once_everywhere(LARGE))
    _resolve_us(beside, _once_everywhere(SMALL))
    few, many = _requests(SMALL), _requests(LARGE)
    # In turns, so that what slows the machine slows both; their middles, so that a hiccup is neither's.
    turns = [(_resolve_us(beside, few), _resolve_us(snapshot, many)) for _ in range(15)]
    small_us, large_us = (sorted(each)[len(each) // 2] for each in zip(*turns, strict=True))
    return {"load_s": load_s, "read_s": read_s, "small_us": small_us, "large_us": large_us, "first_us": first_us}


def _once_everywhere(size: Size) -> list[Request]:
    return [(_route(n, "1"), _tenant(n)) for n in range(size.limits - 2)]


def _requests(size: Size) -> list[Request]:
    """Requests to all routes; every second one is from a tenant that has numbers of its own on that route."""
    chance = random.Random(size.limits)
    requests = []
    for n in range(REQUESTS):
        tenant = chance.randrange(size.overrides)
        service = (tenant if n % 2 else chance.randrange(size.overrides)) % (size.limits - 2)
        requests.append((_route(service, str(n)), _tenant(tenant)))
    return requests


def _resolve_us(snapshot: Any, requests: list[Request]) -> float:
    began = process_time()
    for path, tenant in requests:
        route = snapshot.route("GET", path)
        snapshot.resolve(route, {"address": "203.0.113.9", "ip": "203.0.113.9", "tenant": tenant}, NOW_US)
    return (process_time() - began) / len(requests) * 1e6


def _yaml() -> dict[str, float]:
    import yaml

    from headgate.policy.loader import read

    text = yaml.dump(policy(LARGE), Dumper=getattr(yaml, "CSafeDumper", yaml.SafeDumper))
    began = process_time()
    read(text, file="policy.yaml")
    return {"read_s": process_time() - began}


def _route(number: int, id: str) -> str:
    return f"/api/service-{number}/items/{id}"


def _tenant(number: int) -> str:
    return f"tenant-{number}"


if __name__ == "__main__":
    print(json.dumps({"sizes": _sizes, "yaml": _yaml}[sys.argv[1]]()))
