"""Scenarios: the file that describes a fleet, its traffic and its faults."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from datetime import timedelta
from decimal import Decimal
from fractions import Fraction
from typing import TYPE_CHECKING, Any, Final

from headgate.calendars import Calendar
from headgate.errors import InvalidInput, InvalidPolicy
from headgate.limits import DEFAULT_ALGORITHM, REGION_MODES, Limit
from headgate.policy import scalars
from headgate.policy.loader import PolicyProblems, Source, decoded, file_content
from headgate.policy.schema import NAME, NUMBERS, Field, ListOf, MapOf, OneOf, Scalar, Struct, StructValue
from headgate.regions.cost import region_cost
from headgate.regions.model import Regions
from headgate.regions.routing import counted_limit

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from os import PathLike

    from headgate.failure import FailureMode
    from headgate.regions.cost import RegionCost

__all__ = [
    "Fault", "GatewaySettings", "NetworkModel", "NodeSettings", "Prices", "RegionLayout", "Retries", "Scenario",
    "ServerModel", "TrafficSource", "load_scenario", "read_scenario",
]  # fmt: skip

MAX_REQUESTS: Final = 200_000_000
MAX_NODES: Final = 2_000
MAX_CLIENTS: Final = 10_000_000


@dataclass(frozen=True, slots=True)
class NodeSettings:
    """The processes of the fleet, and the settings of their limiters."""

    count: int = 1
    on_failure: FailureMode = "open"
    budget_s: float = 0.005
    lease_us: int = 100_000
    remember: int = 10_000
    share: Fraction = Fraction(1, 5)
    local_ns: int = 5_000
    """CPU time of an answer without the store."""
    call_ns: int = 60_000
    """CPU time of a node for a store call."""


@dataclass(frozen=True, slots=True)
class ServerModel:
    """The servers of the store. The CPU times are those of docs/benchmarks.md."""

    shards: int = 1
    call_ns: int = 5_500
    batch_ns: int = 34_500


@dataclass(frozen=True, slots=True)
class NetworkModel:
    """The network between nodes and servers."""

    round_trip_ns: int = 500_000
    jitter: float = 0.1
    """The standard deviation of the logarithm of a message's time."""
    loss: float = 0.0
    """The share of messages that are lost, and sent again after 200 ms."""


@dataclass(frozen=True, slots=True)
class RegionLayout:
    """The regions of the fleet. Nodes are spread over them evenly, and each has as many servers."""

    names: tuple[str, ...] = ("",)
    home: str = ""
    round_trip_ns: int = 80_000_000
    """The time of a round trip to another region."""
    central_budget_s: float = 0.5


@dataclass(frozen=True, slots=True)
class GatewaySettings:
    """Gateways that clients reach instead of nodes, such as Envoy in front of `headgate serve`."""

    count: int = 1
    has_quotas: bool = False
    """True if they decide within quotas that nodes grant (RLQS); otherwise they call a node for each request."""
    round_trip_ns: int = 500_000
    timeout_s: float = 0.02
    """The time that a call may take."""
    allows_on_failure: bool = True
    """True if a request without an answer in time passes."""
    allows_without_quota: bool = True
    """True if requests pass before the first grant, or after the end of one."""
    report_s: float = 5.0


@dataclass(frozen=True, slots=True)
class Retries:
    """Clients that send a denied request again."""

    share: float = 1.0
    after_ns: int | None = None
    """None for the time that the response names."""
    times: int = 3


@dataclass(frozen=True, slots=True)
class TrafficSource:
    """Clients of one kind."""

    name: str
    limits: tuple[str, ...]
    rate: float
    """Requests per second of all of them together."""
    clients: int = 1
    zipf: float = 0.0
    """The exponent of their popularity; 0 for equal clients."""
    is_sticky: bool = False
    """True if a client always reaches the same node."""
    region: str | None = None
    """The region whose nodes it reaches; None for all."""
    start_s: float = 0.0
    end_s: float | None = None
    cycle_s: float | None = None
    """The period in which the rate rises and falls."""
    low: float = 0.0
    """The least rate of a cycle, as a share of the highest."""
    cost: int = 1
    retries: Retries | None = None
    log: str | None = None
    """The file of a log of requests, with the columns time and client, instead of a rate."""


@dataclass(frozen=True, slots=True)
class Fault:
    """Something that fails for a while."""

    kind: str
    at_s: float
    for_s: float = 0.0
    shard: int | None = None
    """None for all shards."""
    region: str | None = None
    """None for all regions."""
    nodes: float = 1.0
    """The share of the nodes that it concerns."""
    how: str = "hang"
    factor: float = 10.0
    by_s: float = 0.0
    loses_data: bool = False


@dataclass(frozen=True, slots=True)
class Prices:
    """Prices per month."""

    node: float = 0.0
    shard: float = 0.0
    million_calls: float = 0.0
    currency: str = "USD"


@dataclass(frozen=True, slots=True)
class Scenario:
    """A fleet, its traffic and its faults."""

    name: str
    duration_s: float
    limits: Mapping[str, Limit]
    traffic: tuple[TrafficSource, ...]
    seed: int = 1
    nodes: NodeSettings = field(default_factory=NodeSettings)
    store: ServerModel = field(default_factory=ServerModel)
    network: NetworkModel = field(default_factory=NetworkModel)
    regions: RegionLayout = field(default_factory=RegionLayout)
    gateways: GatewaySettings | None = None
    faults: tuple[Fault, ...] = ()
    prices: Prices | None = None
    scale: int = 1
    """The factor by which everything is smaller than described."""
    described_shards: int = 1
    announced: frozenset[str] = frozenset()
    """The limits whose tokens are prepaid from the first request on."""
    never_leased: frozenset[str] = frozenset()
    """The limits whose tokens are never prepaid."""

    def scaled(self, factor: int) -> Scenario:
        """The same at one part in `factor`: of the nodes, shards and clients, and of the limits of single clients.

        Each node, and each client that remains, sends as many requests as before. Of many clients, every `factor`-th in
        the order of popularity remains.
        """
        if factor == 1:
            return self
        for source in self.traffic:
            if 1 < source.clients < factor:
                raise InvalidInput(f"scale {factor} leaves none of the {source.clients} clients of {source.name!r}")
            if source.log is not None:
                raise InvalidInput(f"scale {factor} cannot be applied to the log of {source.name!r}; write scale: 1")
        nodes = self.nodes.count // factor
        if nodes < len(self.regions.names) or nodes * factor != self.nodes.count:
            raise InvalidInput(f"scale {factor} does not divide the {self.nodes.count} nodes; give a divisor of it")
        single = {limit for source in self.traffic if source.clients == 1 for limit in source.limits}
        several = {limit for source in self.traffic if source.clients > 1 for limit in source.limits}
        if single & several:
            both = sorted(single & several)
            remedy = "give the single client a limit of its own"
            raise InvalidInput(f"limit {both[0]!r} is of one client and of many, so it cannot be scaled; {remedy}")
        gateways = self.gateways
        if gateways is not None:
            if gateways.count % factor:
                problem = f"scale {factor} does not divide the {gateways.count} gateways"
                raise InvalidInput(f"{problem}; give a divisor of it")
            gateways = replace(gateways, count=gateways.count // factor)
        limits = {name: _divided(limit, factor) if name in single else limit for name, limit in self.limits.items()}
        return replace(
            self,
            limits=limits,
            nodes=replace(self.nodes, count=nodes),
            gateways=gateways,
            # Fewer shards that are as busy, or slower ones.
            store=_scaled_store(self.store, factor),
            faults=tuple(
                [replace(fault, shard=_scaled_shard(fault.shard, self.store, factor)) for fault in self.faults]
            ),
            scale=self.scale * factor,
        )


def _divided(limit: Limit, factor: int) -> Limit:
    burst = limit.capacity
    if limit.quota % factor or burst % factor:
        raise InvalidInput(f"scale {factor} does not divide the limit {limit.name!r} of {limit}; give a divisor of it")
    quota = limit.quota // factor
    return Limit(
        quota,
        limit.period,
        burst=None if limit.burst == limit.quota else burst // factor,
        algorithm=limit.algorithm,
        name=limit.name,
        split=limit.split,
        region=limit.region,
    )


def _scaled_store(store: ServerModel, factor: int) -> ServerModel:
    shards = max(1, store.shards // factor)
    slower = shards * factor / store.shards
    return replace(store, shards=shards, call_ns=round(store.call_ns * slower), batch_ns=round(store.batch_ns * slower))


def _scaled_shard(shard: int | None, store: ServerModel, factor: int) -> int | None:
    return None if shard is None else shard % max(1, store.shards // factor)


# ------------------------------------------------------------------ reading


def load_scenario(path: str | PathLike[str], *, scale: int | None = None) -> Scenario:
    """Load a scenario file (.yaml, .yml, .toml or .json); raise InvalidPolicy, with all mistakes and their places."""
    return read_scenario(decoded(file_content(path), path), file=str(path), scale=scale)


def read_scenario(text: str, *, file: str = "scenario.yaml", scale: int | None = None) -> Scenario:
    """Parse the text of a scenario. `scale` replaces that of the text.

    >>> read_scenario("{duration: 1 s, limits: {api: 10/minute}, traffic: [{limits: api, rat: 5/second}]}")
    Traceback (most recent call last):
        ...
    headgate.errors.InvalidPolicy: scenario.yaml:1:67: unknown field 'rat'; did you mean 'rate'?
    """
    source = Source(text, file, None)
    problems = PolicyProblems()
    found = _SCENARIO.read(source.value, (), problems)
    scenario = _built(found, problems, scale) if not problems else None
    if refusal := source.refusal(problems):
        raise refusal
    if scenario is None:
        raise InvalidPolicy([f"{file}: is empty; a scenario has at least duration:, limits: and traffic:"])
    return scenario


def _seconds(value: object) -> float:
    return scalars.duration(value).total_seconds()


def _short_seconds(value: object) -> float:
    """A duration, or 0."""
    return 0.0 if value == 0 and not isinstance(value, bool) else _seconds(value)


def _nanoseconds(value: object) -> int:
    return scalars.duration(value) // timedelta(microseconds=1) * 1000


def _per_second(value: object) -> float:
    if type(value) is not str:
        raise scalars.refusal(value, 'a rate like "300000/second"')
    rate = scalars.numbers(value)
    if isinstance(rate.period, Calendar):
        raise InvalidInput(f"{scalars.show(value)} is not a rate; write one like 300000/second")
    return rate.quota / rate.period.total_seconds()


def _part(value: object) -> float:
    """A share that may be small."""
    wanted = "a share from 0% to 100%, like 0.1%"
    text = value.strip().removesuffix("%").strip() if type(value) is str and value.strip().endswith("%") else ""
    try:
        found = float(Decimal(text)) / 100 if text and len(text) < 20 else None
    except ArithmeticError:
        found = None
    if found is None or not 0 <= found <= 1:
        raise (
            scalars.refusal(value, wanted)
            if type(value) is not str
            else InvalidInput(f"cannot read {scalars.show(value)}; write {wanted}")
        )
    return found


def _number(least: float, most: float, *, example: str) -> Callable[[object], float]:
    wanted = f"a number from {least:g} to {most:,g}, like {example}"

    def read(value: object) -> float:
        if isinstance(value, bool) or not isinstance(value, int | Decimal):
            raise scalars.refusal(value, wanted)
        if not least <= value <= most:
            raise InvalidInput(f"{value} is out of bounds; write {wanted}")
        return float(value)

    return read


def _signed_seconds(value: object) -> float:
    if type(value) is str and value.lstrip().startswith("-"):
        return -_seconds(value.lstrip()[1:])
    return _seconds(value)


def _text(value: object) -> str:
    return scalars.text(value)


def _scalar(convert: Callable[[Any], object]) -> Scalar:
    return Scalar(convert, {})


def _whole(least: int, most: int, example: int) -> Scalar:
    return Scalar(scalars.whole(least, most, example=example), {})


_SHORTEST_LEASE: Final = timedelta(milliseconds=1)
_SECONDS: Final = _scalar(_seconds)
_MOMENT: Final = _scalar(_short_seconds)
_TIME_NS: Final = _scalar(_nanoseconds)
_PRICE: Final = _scalar(_number(0, 1e9, example="60"))
_PART: Final = _scalar(_part)
_FAULTS: Final = ("store_down", "slow_shard", "partition", "clock_step", "restart", "deploy")

_LIMIT: Final = Struct(
    "a limit",
    {
        "allows": Field(NUMBERS, "Its numbers."),
        "lease": Field(_scalar(scalars.choice("auto", "always", "never")), "When its tokens are prepaid."),
        "split": Field(_whole(1, 1000, 4), "The number of counters that it is spread over."),
        "region": Field(_scalar(scalars.choice(*REGION_MODES)), "How the regions share it."),
    },
)
_LIMITS: Final = MapOf(
    NAME,
    OneOf({str: NUMBERS, dict: _LIMIT}, 'a limit like "100/minute", or a mapping with allows:'),
    '{api: "100/minute"}',
)
_NODES: Final = Struct(
    "nodes",
    {
        "count": Field(_whole(1, MAX_NODES, 200), "Processes with a limiter."),
        "on_failure": Field(_scalar(scalars.choice("open", "closed", "local")), "Their failure mode."),
        "budget": Field(_SECONDS, "The time that the store may take."),
        "lease": Field(
            _scalar(
                scalars.duration_between(timedelta(milliseconds=1), timedelta(seconds=1), example="100 ms", or_off=True)
            ),
            "The lifetime of prepaid tokens.",
        ),
        "remember": Field(_whole(0, 10_000_000, 10_000), "The size of the denial cache."),
        "share": Field(_scalar(scalars.share), "The part of each limit for mode local."),
        "cpu_local": Field(_TIME_NS, "CPU time of an answer without the store."),
        "cpu_call": Field(_TIME_NS, "CPU time of a node for a store call."),
    },
)
_STORE: Final = Struct(
    "the store",
    {
        "shards": Field(_whole(1, 1000, 6), "Servers."),
        "cpu_call": Field(_TIME_NS, "CPU time of a server for a call."),
        "cpu_batch": Field(_TIME_NS, "CPU time of a server for a round trip, in addition."),
    },
)
_NETWORK: Final = Struct(
    "the network",
    {
        "round_trip": Field(_TIME_NS, "The time of a round trip."),
        "jitter": Field(_PART, "The variation of it."),
        "loss": Field(_PART, "Lost messages."),
    },
)
_REGIONS: Final = Struct(
    "regions",
    {
        "names": Field(ListOf(NAME, "[eu, us]"), "Their names."),
        "home": Field(NAME, "The one whose store decides central limits."),
        "round_trip": Field(_TIME_NS, "The time of a round trip to another region."),
        "central_budget": Field(_SECONDS, "The time that the home region may take."),
    },
)
_GATEWAYS: Final = Struct(
    "gateways",
    {
        "count": Field(_whole(1, MAX_NODES, 20), "Gateways, which clients reach at random."),
        "mode": Field(_scalar(scalars.choice("calls", "quotas")), "A call for each request, or quotas."),
        "round_trip": Field(_TIME_NS, "The time of a round trip to a node."),
        "timeout": Field(_SECONDS, "The time that a call may take."),
        "on_failure": Field(_scalar(scalars.choice("allow", "deny")), "What they do without an answer in time."),
        "without_quota": Field(_scalar(scalars.choice("allow", "deny")), "What they do without a valid grant."),
        "report": Field(_SECONDS, "The interval of the reports on quotas."),
    },
)
_RETRY: Final = Struct(
    "retries",
    {
        "share": Field(_PART, "The part of the denied requests that is sent again."),
        "after": Field(_scalar(lambda value: None if value == "retry-after" else _nanoseconds(value)), "When."),
        "times": Field(_whole(1, 100, 3), "How often."),
    },
)
_CYCLE: Final = Struct(
    "a cycle",
    {"period": Field(_SECONDS, "The time from peak to peak."), "low": Field(_PART, "The least rate.")},
)
_TRAFFIC: Final = Struct(
    "a source of traffic",
    {
        "name": Field(NAME, "Its name."),
        "limits": Field(ListOf(NAME, "[per-key, global]", or_one=True), "The limits of each request."),
        "rate": Field(_scalar(_per_second), "Requests of all its clients together."),
        "clients": Field(_whole(1, MAX_CLIENTS, 100_000), "The number of clients."),
        "zipf": Field(_scalar(_number(0, 5, example="1.1")), "The exponent of their popularity."),
        "region": Field(NAME, "The region that it reaches; all, if not given."),
        "routing": Field(_scalar(scalars.choice("random", "sticky")), "The node that a request reaches."),
        "start": Field(_MOMENT, "When it begins."),
        "end": Field(_SECONDS, "When it ends."),
        "cycle": Field(_CYCLE, "A rate that rises and falls."),
        "cost": Field(_whole(1, 1_000_000, 1), "The cost of a request."),
        "retry": Field(_RETRY, "Clients that send a denied request again."),
        "log": Field(_scalar(_text), "A CSV file with the columns time and client, instead of a rate."),
    },
)
_FAULT: Final = Struct(
    "a fault",
    {
        "kind": Field(_scalar(scalars.choice(*_FAULTS)), "What fails."),
        "at": Field(_MOMENT, "When."),
        "for": Field(_SECONDS, "For how long."),
        "shard": Field(_whole(0, 999, 0), "The shard; all, if not given."),
        "region": Field(NAME, "The region; all, if not given."),
        "nodes": Field(_PART, "The part of the nodes."),
        "how": Field(_scalar(scalars.choice("hang", "refuse")), "How a store is down."),
        "factor": Field(_scalar(_number(1, 1e6, example="10")), "How much slower a slow shard is."),
        "by": Field(_scalar(_signed_seconds), "How far a clock steps."),
        "loses_data": Field(_scalar(scalars.flag), "If the store has lost its counters afterwards."),
    },
)
_PRICES: Final = Struct(
    "prices",
    {
        "node": Field(_PRICE, "A node for a month."),
        "shard": Field(_PRICE, "A shard for a month."),
        "million_calls": Field(_PRICE, "A million store calls."),
        "currency": Field(_scalar(_text), "The currency."),
    },
)
_SCENARIO: Final = Struct(
    "a scenario",
    {
        "name": Field(_scalar(_text), "Its name."),
        "seed": Field(_whole(0, 2**53, 1), "Equal seeds give equal results."),
        "duration": Field(_SECONDS, "Virtual time."),
        "scale": Field(_whole(1, 1000, 10), "The factor by which everything is smaller than described."),
        "nodes": Field(_NODES, "The processes."),
        "store": Field(_STORE, "The servers."),
        "network": Field(_NETWORK, "The network."),
        "regions": Field(_REGIONS, "The regions."),
        "gateways": Field(_GATEWAYS, "The gateways that call the nodes; none, if not given."),
        "limits": Field(_LIMITS, "The limits."),
        "traffic": Field(ListOf(_TRAFFIC, "[{limits: per-key, rate: 100/second}]"), "The clients."),
        "faults": Field(ListOf(_FAULT, "[{kind: store_down, at: 3 s, for: 2 s}]"), "What fails."),
        "prices": Field(_PRICES, "Prices per month."),
    },
)


def _built(found: StructValue, problems: PolicyProblems, scale: int | None) -> Scenario | None:
    for name in ("duration", "limits", "traffic"):
        if not found.get(name):
            problems.add((), f"{name}: is missing; a scenario has at least duration:, limits: and traffic:")
    if problems:
        return None
    limits = {}
    leases: dict[str, set[str]] = {"always": set(), "auto": set(), "never": set()}
    for name, given in found.get("limits").items():
        options = _fields(given) if isinstance(given, StructValue) else {"allows": given}
        leases[options.get("lease", "auto")].add(name)
        if (numbers := options.get("allows")) is None:
            problems.add(("limits", name), "allows: is missing; write one like 100/minute")
            continue
        try:
            limit = Limit(
                numbers.quota,
                numbers.period,
                burst=numbers.burst,
                algorithm=numbers.algorithm or DEFAULT_ALGORITHM,
                name=name,
                split=options.get("split", 1),
                region=options.get("region", "regional"),
            )
        except InvalidInput as error:
            problems.add(("limits", name), str(error))
            continue
        if limit.algorithm == "concurrency":
            problems.add(("limits", name), "a simulation has no durations of requests: leave concurrency limits out")
        if limit.calendar is not None:
            problems.add(("limits", name), "a simulation is shorter than a calendar period: write one like 1000/hour")
        limits[name] = limit
    duration_s = found.get("duration")
    regions = _region_layout(found.get("regions"), limits)
    traffic = tuple([_source(each, number, limits, regions) for number, each in enumerate(found.get("traffic"), 1)])
    nodes, store, network = (_fields(found.get(name)) for name in ("nodes", "store", "network"))
    shards = store.get("shards", 1)
    faults = tuple([_fault(each, shards, duration_s, regions) for each in found.get("faults", ())])
    gateways = _gateways(found.get("gateways"), traffic, regions)
    if nodes.get("count", 1) < len(regions.names):
        problems.add(("nodes",), f"count: give at least {len(regions.names)} nodes, one for each region")
    if sum(source.rate for source in traffic) * duration_s > MAX_REQUESTS:
        problems.add(("duration",), f"more than {MAX_REQUESTS:,} requests; shorten the duration or lower the rates")
    if problems:
        return None
    prices = found.get("prices")
    scenario = Scenario(
        name=found.get("name", "scenario"),
        seed=found.get("seed", 1),
        duration_s=duration_s,
        limits=limits,
        traffic=traffic,
        nodes=NodeSettings(
            **_renamed(nodes, budget="budget_s", cpu_local="local_ns", cpu_call="call_ns", lease="lease_us")
        ),
        described_shards=shards,
        announced=frozenset(leases["always"]),
        never_leased=frozenset(leases["never"]),
        store=ServerModel(**_renamed(store, cpu_call="call_ns", cpu_batch="batch_ns")),
        network=NetworkModel(**_renamed(network, round_trip="round_trip_ns")),
        regions=regions,
        gateways=gateways,
        faults=faults,
        prices=None if prices is None else Prices(**prices.fields),
    )
    try:
        return scenario.scaled(scale or found.get("scale", 1))
    except InvalidInput as error:
        problems.add(("scale",), str(error))
        return None


def _fields(value: StructValue | None) -> dict[str, Any]:
    return {} if value is None else dict(value.fields)


def _renamed(fields: dict[str, Any], **names: str) -> dict[str, Any]:
    made = {names.get(name, name): value for name, value in fields.items()}
    if isinstance(lease := made.get("lease_us"), timedelta):
        made["lease_us"] = lease // timedelta(microseconds=1)
    return made


def _gateways(
    found: StructValue | None, traffic: tuple[TrafficSource, ...], regions: RegionLayout
) -> GatewaySettings | None:
    if found is None:
        return None
    has_quotas = found.get("mode") == "quotas"
    for name in ("report", "without_quota") if not has_quotas else ("timeout", "on_failure"):
        if name in found.fields:
            found.report(name, f"{name}: means nothing in mode {'quotas' if has_quotas else 'calls'}; leave it out")
    if has_quotas:
        if len(regions.names) > 1:
            found.report("mode", "mode: quotas are simulated in one region; leave regions out, or write mode: calls")
        if any(len(source.limits) > 1 for source in traffic):
            found.report("mode", "mode: quotas have one bucket for each request; give each traffic one limit")
    return GatewaySettings(
        count=found.get("count", 1),
        has_quotas=has_quotas,
        round_trip_ns=found.get("round_trip", 500_000),
        timeout_s=found.get("timeout", 0.02),
        allows_on_failure=found.get("on_failure", "allow") == "allow",
        allows_without_quota=found.get("without_quota", "allow") == "allow",
        report_s=found.get("report", 5.0),
    )


def _region_layout(found: StructValue | None, limits: Mapping[str, Limit]) -> RegionLayout:
    if found is None:
        return RegionLayout()
    names = tuple(found.get("names", ()))
    if len(names) < 2 or len({*names}) < len(names):
        found.report("names", "names: give at least two regions, each with another name")
        return RegionLayout()
    home = found.get("home", names[0])
    if home not in names:
        found.report("home", f"home: {home!r} is not one of the regions: {', '.join(names)}")
    layout = RegionLayout(names, home, found.get("round_trip", 80_000_000), found.get("central_budget", 0.5))
    for limit in limits.values():
        try:
            region_cost_of(limit, layout)
        except InvalidInput as error:
            found.report("names", str(error))
    return layout


def region_cost_of(limit: Limit, layout: RegionLayout) -> RegionCost:
    """The cost of a limit over these regions; raises InvalidLimit if they cannot count it."""
    regions = Regions(layout.home, layout.home, tuple([(name, "") for name in sorted(layout.names)]))
    counted_limit(limit, regions)
    return region_cost(limit, len(layout.names))


def _source(found: StructValue, number: int, limits: Mapping[str, Limit], regions: RegionLayout) -> TrafficSource:
    _check_region(found, regions)
    names = found.get("limits", ())
    if not names:
        found.report("limits", "limits: is missing; name at least one of the scenario's limits")
    for name in names:
        if name not in limits:
            found.report("limits", f"limits: {name!r} is not one of the limits: {', '.join(sorted(limits))}")
    if ("rate" in found.fields) == ("log" in found.fields):
        found.report("rate", "rate: give either a rate or a log")
    cost = found.get("cost", 1)
    for name in names:
        if name in limits and cost > limits[name].capacity:
            found.report("cost", f"cost: {cost} exceeds the capacity of limit {name!r}, {limits[name].capacity}")
    cycle, retry = found.get("cycle"), found.get("retry")
    end_s = found.get("end")
    if end_s is not None and end_s <= found.get("start", 0.0):
        found.report("end", "end: is not after its start")
    return TrafficSource(
        name=found.get("name", f"traffic-{number}"),
        limits=tuple(names),
        rate=found.get("rate", 0.0),
        clients=found.get("clients", 1),
        zipf=found.get("zipf", 0.0),
        is_sticky=found.get("routing") == "sticky",
        region=found.get("region"),
        start_s=found.get("start", 0.0),
        end_s=end_s,
        cycle_s=None if cycle is None else cycle.get("period", 86_400.0),
        low=0.0 if cycle is None else cycle.get("low", 0.0),
        cost=cost,
        retries=None if retry is None else Retries(retry.get("share", 1.0), retry.get("after"), retry.get("times", 3)),
        log=found.get("log"),
    )


def _check_region(found: StructValue, regions: RegionLayout) -> None:
    region = found.get("region")
    if region is not None and region not in regions.names:
        known = ", ".join(regions.names) or "none; write regions: {names: [eu, us]}"
        found.report("region", f"region: {region!r} is not one of the regions: {known}")


def _fault(found: StructValue, shards: int, duration_s: float, regions: RegionLayout) -> Fault:
    _check_region(found, regions)
    kind, at_s = found.get("kind"), found.get("at")
    if kind is None or at_s is None:
        found.report("kind", "a fault has at least kind: and at:")
    elif at_s >= duration_s:
        found.report("at", "at: is after the end of the simulation")
    if kind in ("store_down", "slow_shard", "partition", "deploy") and "for" not in found.fields:
        found.report("kind", f"{kind} needs for:, how long it lasts")
    if kind == "clock_step" and "by" not in found.fields:
        found.report("kind", "clock_step needs by:, how far the clock steps, like 5 s or -5 s")
    if (shard := found.get("shard")) is not None and shard >= shards:
        found.report("shard", f"shard: there are {shards} shards, counted from 0")
    return Fault(
        kind=kind or "",
        at_s=at_s or 0.0,
        for_s=found.get("for", 0.0),
        shard=found.get("shard"),
        region=found.get("region"),
        nodes=found.get("nodes", 1.0),
        how=found.get("how", "hang"),
        factor=found.get("factor", 10.0),
        by_s=found.get("by", 0.0),
        loses_data=found.get("loses_data", False),
    )
