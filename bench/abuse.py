"""Quality of the detection of abuse: `python -m bench.abuse` writes the tables of docs/abuse.md.

Attacks of six kinds, at three intensities each, are mixed into a background: an access log (`--log FILE`, in the
combined format), or a generated one. Legitimate clients that resemble attackers are added to both: offices behind one
address, crawlers, monitors, integrations. All requests pass the detector at default settings, and a plain limit by
address next to it.
"""

from __future__ import annotations

import argparse
import gzip
import random
import re
from collections import Counter, defaultdict
from datetime import datetime
from heapq import merge
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple, TypeAlias

from bench.abuse_costs import measure
from headgate.abuse.detector import AbuseDetector, ObservedRequest
from headgate.limiter import Limiter
from headgate.limits import Limit
from headgate.policy import read
from headgate.policy.snapshot import Snapshot
from headgate.testing import FakeClock

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from bench.abuse_costs import Costs
    from headgate.abuse.model import AbuseScenario, Finding

DOCS: Final = Path(__file__).parents[1] / "docs"
TABLE: Final = re.compile(r"(<!-- abuse table -->\n).*?(<!-- end -->)", re.DOTALL)
LOG_LINE: Final = re.compile(r'(\S+) \S+ \S+ \[([^\]]+)\] "(\S+) (\S+)[^"]*" (\d{3}) \S+(?: "[^"]*" "([^"]*)")?')
SECOND_US: Final = 1_000_000
MINUTE_US: Final = 60 * SECOND_US
START_US: Final = 1_456_000_000 * SECOND_US
ATTACK_US: Final = 10 * MINUTE_US
PER_ADDRESS: Final = "60/minute"
KNOWN_KEYS: Final = 40
POLICY: Final = "limits: [{by: ip, bucket: 100/minute}]\ntier: free\nabuse: on\nclients:\n" + "".join(
    f"  - {{api_key: key-{number}, tier: free}}\n" for number in range(KNOWN_KEYS + 120)
)
ATTACKERS: Final = 40
"""Of each kind and intensity; botnets have 100 addresses."""
INTENSITIES: Final = ("low", "medium", "high")
SPREAD: Final = (30, 100, 250)
"""The addresses that use a leaked key."""
MAX_REQUESTS: Final = 1_200
BOT: Final = "python-requests/2.31"
AGENTS: Final = [f"Mozilla/5.0 (browser {number})" for number in range(12)]
ATTACK_PATHS: Final = re.compile(
    r"/(wp-login|xmlrpc|wp-admin|administrator|admin|user/register|register)", re.IGNORECASE
)
MIN_PROBES: Final = 20
KNOWN: Final = "in the log"
"""The label of attackers in the log."""


class LabelledRequest(NamedTuple):
    """A request, and the attack that it belongs to; None for legitimate traffic."""

    at_us: int
    client: str
    """The entity to be found: an address, or an API key."""
    address: str
    agent: str
    method: str
    path: str
    status: int
    label: str | None
    api_key: str | None = None


Traffic: TypeAlias = "Iterable[LabelledRequest]"


# ------------------------------------------------------------------ background


def read_log(file: Path) -> list[LabelledRequest]:
    """The requests of an access log in the combined format."""
    found, times = [], {}
    with gzip.open(file, "rt", errors="replace") if file.suffix == ".gz" else file.open(errors="replace") as lines:
        for line in lines:
            match = LOG_LINE.match(line)
            if match is None:
                continue
            address, moment, method, target, status, agent = match.groups("")
            at_us = times.get(moment)
            if at_us is None:
                at_us = int(datetime.strptime(moment, "%d/%b/%Y:%H:%M:%S %z").timestamp()) * SECOND_US
                times = {moment: at_us}
            path = target.partition("?")[0]
            found.append(LabelledRequest(at_us, address, address, agent, method, path, int(status), None))
    return sorted(found, key=lambda request: request.at_us)


def attackers_in(log: Sequence[LabelledRequest]) -> dict[str, str]:
    """The clients of a log that are attackers, by rules that know the site: it is a blog with one author."""
    probes, strange, missing = Counter[str](), Counter[str](), defaultdict[str, set[str]](set)
    for request in log:
        if request.method == "POST" and ATTACK_PATHS.match(request.path):
            probes[request.address] += 1
        if ".php" in request.path or ".." in request.path:
            strange[request.address] += request.status >= 400
        if request.status in (401, 403, 404):
            missing[request.address].add(request.path)
    found = {address: "login attempts" for address, count in probes.items() if count >= MIN_PROBES}
    found |= {address: "probes for scripts" for address, count in strange.items() if count >= MIN_PROBES}
    return found


def legitimate(rng: random.Random, start_us: int) -> Iterator[list[LabelledRequest]]:
    """Clients that are not attackers, in 40 minutes; some of them resemble one."""
    length_us = 4 * ATTACK_US

    def request(at_us: float, address: str, agent: str, method: str, path: str, status: int, key: str | None = None):  # type: ignore[no-untyped-def]
        return LabelledRequest(start_us + int(at_us), key or address, address, agent, method, path, status, None, key)

    for person in range(600):  # people read pages with their assets, and some sign in
        address, agent, at, rows = f"172.16.{person // 200}.{person % 200}", rng.choice(AGENTS), 0.0, []
        at = rng.random() * length_us
        failed = [at + attempt * 9e6 * rng.random() for attempt in range(rng.choice([0, 0, 1, 1, 1, 2, 3]))]
        rows += [request(failed_us, address, agent, "POST", "/login", 401) for failed_us in failed]
        rows.append(request(at + 3e7, address, agent, "POST", "/login", 200))
        for _ in range(int(rng.expovariate(1 / 25))):
            at += rng.expovariate(1 / 20e6)
            rows.append(request(at, address, agent, "GET", f"/item/{rng.randrange(3000)}", 200))
            for asset in range(rng.randrange(6)):
                status = 404 if rng.random() < 0.02 else 200
                rows.append(request(at + asset * 5e4, address, agent, "GET", f"/static/{rng.randrange(40)}", status))
        yield rows
    for office in range(10):  # 40 to 120 people behind one address
        rows = []
        for _ in range(rng.randrange(40, 120)):
            agent, at = rng.choice(AGENTS), rng.random() * length_us
            failures = 1 if rng.random() < 0.2 else 0
            rows += [request(at, f"192.0.2.{office}", agent, "POST", "/login", 401)] * failures
            rows.append(request(at + 8e6, f"192.0.2.{office}", agent, "POST", "/login", 200))
            for _ in range(rng.randrange(8)):
                at += rng.expovariate(1 / 40e6)
                rows.append(request(at, f"192.0.2.{office}", agent, "GET", f"/item/{rng.randrange(3000)}", 200))
        yield rows
    for crawler in range(4):  # polite crawlers: a page every five seconds, a tenth of them gone
        rows = [
            request(
                at,
                f"198.51.100.{crawler}",
                "Crawler/2",
                "GET",
                f"/item/{rng.randrange(9000)}",
                rng.choice([200] * 9 + [404]),
            )
            for at in range(0, length_us, 5 * SECOND_US)
        ]
        yield rows
    for monitor in range(20):  # monitors ask at exact intervals, also for the sign-in page
        path = "/login" if monitor % 2 else "/"
        ticks = range(monitor * 12345, length_us, 10 * SECOND_US)
        yield [request(at, f"198.51.101.{monitor}", "Monitor/1", "GET", path, 200) for at in ticks]
    for client in range(150):  # apps that renew their tokens at exact intervals
        ticks = range(rng.randrange(MINUTE_US), length_us, 5 * MINUTE_US)
        yield [request(at, f"172.17.0.{client}", "App/3", "POST", "/oauth/token", 200) for at in ticks]
    for key in range(KNOWN_KEYS):  # integrations, from one to eight servers each, some of them busy
        servers, rate = rng.randrange(1, 9), rng.choice([0.1, 1, 4])
        rows = []
        for _ in range(int(rate * length_us / SECOND_US)):
            at, server = rng.random() * length_us, rng.randrange(servers)
            address = f"203.0.{key}.{server}"
            rows.append(request(at, address, "sdk/1", "GET", "/api/orders", 200, f"key-{key}"))
        yield rows


# ------------------------------------------------------------------ attacks


def attacks(rng: random.Random, start_us: int) -> Iterator[list[LabelledRequest]]:
    """Attacks of six kinds at three intensities: 40 attackers of each kind, and botnets of 100 addresses."""
    steady = {
        "credential stuffing": ((0.05, 0.5, 10.0), "POST", "/login", (401,) * 49 + (200,)),
        "scraping": ((0.75, 3.0, 20.0), "GET", "/item/{page}", (200,) * 30 + (404,)),
        "enumeration": ((0.3, 5.0, 50.0), "GET", "/users/{number}", (404,) * 19 + (200,)),
        "key leak": ((0.3, 3.0, 20.0), "GET", "/api/orders", (200,)),
        "retry storm": ((2.0, 10.0, 100.0), "GET", "/api/orders", (429,) * 9 + (200,)),
    }
    for kind_number, (kind, (rates, method, template, statuses)) in enumerate(steady.items()):
        for level, rate in enumerate(rates):
            for number in range(ATTACKERS):
                rows, agent, at_us = [], rng.choice(AGENTS), float(start_us)
                client = address = f"10.{200 + kind_number}.{level}.{number}"
                key = f"key-{KNOWN_KEYS + ATTACKERS * level + number}" if kind == "key leak" else None
                end_us = start_us + min(ATTACK_US, max(MAX_REQUESTS / rate, 60) * SECOND_US)
                while (at_us := at_us + rng.expovariate(rate) * SECOND_US) < end_us:
                    path = template.format(page=rng.randrange(20_000), number=100_000 + len(rows))
                    if key is not None:
                        client, address = key, f"100.{number}.{level}.{rng.randrange(SPREAD[level])}"
                    status, label = rng.choice(statuses), f"{kind}, {INTENSITIES[level]}"
                    row = LabelledRequest(int(at_us), client, address, agent, method, path, status, label, key)
                    rows.append(row)
                yield rows
    for level, (interval_s, jitter) in enumerate(((25.0, 0.03), (5.0, 0.01), (1.0, 0.0))):
        for number in range(100):
            label, address = f"botnet, {INTENSITIES[level]}", f"10.210.{level}.{number}"
            yield bot(rng, start_us, label, address, interval_s, jitter, min(600.0, 60 * interval_s))


def bot(
    rng: random.Random, start_us: int, label: str, address: str, interval_s: float, jitter: float, length_s: float
) -> list[LabelledRequest]:
    """The requests of one bot: at exact intervals or nearly so, with the delays of a network."""
    at_us, rows = start_us + rng.random() * interval_s * SECOND_US, []
    while at_us < start_us + length_s * SECOND_US:
        arrived_us = int(at_us + rng.expovariate(1 / 1000))
        rows.append(LabelledRequest(arrived_us, address, address, BOT, "POST", "/api/login", 401, label))
        at_us += interval_s * SECOND_US * (1 + jitter * (2 * rng.random() - 1))
    return rows


# ------------------------------------------------------------------ evaluation


class Evaluation(NamedTuple):
    """The clients that were found among those that exist."""

    labels: dict[str, str | None]
    """The attack of each client; None for a legitimate one."""
    found: dict[str, tuple[str, float]]
    """The scenario by which a client was found first, and the seconds since its first request."""
    over_limit: set[str]
    """The addresses that a plain limit has denied."""

    def rows(self) -> list[tuple[str, int, int, int, float]]:
        """By attack: clients, those found, those over the limit, and the median seconds until they were found."""
        rows = []
        for label in dict.fromkeys(each for each in self.labels.values() if each is not None):
            clients = [client for client, attack in self.labels.items() if attack == label]
            found = [self.found[client][1] for client in clients if client in self.found]
            median = sorted(found)[len(found) // 2] if found else 0.0
            rows.append((label, len(clients), len(found), len(self.over_limit.intersection(clients)), median))
        return rows

    def quality(self, found: set[str]) -> tuple[int, int, int, int, float, float]:
        """True and false positives, false and true negatives, precision and recall over clients."""
        attackers = {client for client, attack in self.labels.items() if attack is not None}
        legitimate = self.labels.keys() - attackers
        true, false = len(attackers & found), len(legitimate & found)
        numbers = true, false, len(attackers) - true, len(legitimate) - false
        return *numbers, true / max(true + false, 1), true / max(len(attackers), 1)


def evaluate(traffic: Traffic, *, per_address: str = PER_ADDRESS, policy: str = POLICY) -> Evaluation:
    """Pass labelled requests, in the order of their times, to the detector and to a limit by address."""
    labels: dict[str, str | None] = {}
    first_us: dict[str, int] = {}
    found: dict[str, tuple[str, float]] = {}
    over_limit: set[str] = set()

    def handle(finding: Finding, scenario: AbuseScenario) -> None:
        seconds = (finding.at_us - first_us.get(finding.value, finding.at_us)) / SECOND_US
        found.setdefault(finding.value, (scenario.name, seconds))

    parsed = read(policy)
    snapshot = Snapshot(parsed)
    detector = AbuseDetector(handle, b"key", is_trusted_key=snapshot.is_trusted_key)
    assert parsed.abuse is not None
    detector.configure(parsed.abuse.scenarios)
    clock = FakeClock()
    limiter, limit = Limiter("memory://", clock=clock, max_keys=1_000_000), Limit.parse(per_address)
    for at_us, client, address, agent, method, path, status, label, api_key in traffic:
        labels[client] = labels.get(client) or label
        first_us.setdefault(client, at_us)
        route = snapshot.route(method, path)
        who = {"address": address, "ip": address} | ({} if api_key is None else {"api_key": api_key})
        detector.observe([ObservedRequest(at_us, route.scenarios, who, agent, path, status, route.endpoint)])
        clock.set_us(max(at_us, clock.now_us()))
        if not limiter.check(limit.by(address)).allowed:
            over_limit.add(client)
    return Evaluation(labels, found, over_limit)


def mixed(background: Sequence[LabelledRequest], seed: int = 1) -> Traffic:
    """The background with attacks, and with clients that resemble attackers, in the middle of it."""
    rng = random.Random(seed)
    start_us = background[len(background) // 2].at_us if background else START_US
    added = [*legitimate(rng, start_us), *attacks(rng, start_us + ATTACK_US)]
    rows = sorted([row for each in added for row in each], key=lambda request: request.at_us)
    return merge(background, rows, key=lambda request: request.at_us)


def rows(found: Evaluation, costs: Costs) -> list[list[str]]:
    """The tables of docs/abuse.md."""
    by_attack: dict[str, dict[str, tuple[int, int, int, float]]] = defaultdict(dict)
    for label, *numbers in found.rows():
        attack, _, intensity = label.partition(", ")
        by_attack[attack][intensity] = tuple(numbers)  # type: ignore[assignment]
    attacks = ["| attack | found: low | medium | high | median time | over the limit by IP: low | medium | high |"]
    attacks.append("| --- | --- | --- | --- | --- | --- | --- | --- |")
    for attack in sorted(by_attack.keys() - {KNOWN}):
        cells = [by_attack[attack][intensity] for intensity in INTENSITIES]
        share = [f"{number} of {clients}" for clients, number, _, _ in cells]
        times = ", ".join([f"{seconds:.0f} s" for *_, seconds in cells])
        limited = [f"{number}" for _, _, number, _ in cells]
        attacks.append(f"| {' | '.join([attack, *share, times, *limited])} |")
    if KNOWN in by_attack:
        clients, number, limited_number, _ = by_attack[KNOWN][""]
        attacks.append(f"| in the log itself | {number} of {clients} | | | | {limited_number} | | |")
    confusion = ["| | attackers found | missed | others found | others left alone | precision | recall |"]
    confusion.append("| --- | --- | --- | --- | --- | --- | --- |")
    for name, clients_found in (("`abuse: on`", {*found.found}), (f"limit of {PER_ADDRESS} by IP", found.over_limit)):
        true, false, missed, left, precision, recall = found.quality(clients_found)
        confusion.append(f"| {name} | {true} | {missed} | {false} | {left:,} | {precision:.3f} | {recall:.3f} |")
    without_us, with_us = costs.requests_us
    measured = ["| | |", "| --- | --- |"]
    measured.append(
        f"| CPU time of a request with all scenarios | {costs.request_us:.1f} us more: {with_us:.1f} us instead "
        f"of {without_us:.1f} us |"
    )
    measured.append(f"| memory with 1,000,000 active clients in ten minutes | {costs.clients_mb:.0f} MB |")
    measured.append(f"| memory after 1,000,000 invented addresses, keys, users and agents | {costs.forged_mb:.0f} MB |")
    return [confusion, attacks, measured]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.abuse", description=__doc__)
    parser.add_argument("--log", type=Path, help="an access log as background")
    options = parser.parse_args()
    background = [] if options.log is None else read_log(options.log)
    known = attackers_in(background)
    found = evaluate(mixed([row._replace(label=KNOWN) if row.address in known else row for row in background]))
    costs = measure()
    if costs.is_victim_found or not costs.is_offender_found:
        raise SystemExit(f"invented identities hide an offender, or frame a victim: {costs}")
    tables = rows(found, costs)
    page = (DOCS / "abuse.md").read_text("utf-8")
    for table in tables:
        print(*table, "", sep="\n")
    text = iter(["\n".join(table) for table in tables])
    (DOCS / "abuse.md").write_text(TABLE.sub(lambda place: f"{place[1]}{next(text)}\n{place[2]}", page), "utf-8")
    others = [client for client in found.found if found.labels[client] is None]
    print("others found:", [(client, *found.found[client]) for client in others])


if __name__ == "__main__":
    main()
