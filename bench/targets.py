"""The performance targets, as ratios to the best peer of the same run."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from bench.apps import BARE_APP
from bench.contenders import HEADGATE, HEADGATE_OBSERVED, HEADGATE_ONE_LIMIT, VARIANTS
from bench.policy_costs import SMALL
from bench.scenarios import (
    CEILING,
    CHECKS_PER_RUN,
    HOT_KEY,
    MANY_KEYS,
    POLICY,
    THREE_LIMITS,
    Results,
    cpu,
    http,
    tasks,
    threads,
)
from bench.timing import Sample, Spread

Reading = Callable[[Sample], float]


@dataclass(frozen=True, slots=True)
class Target:
    what: str
    wanted: float
    at_least: bool
    got: Spread
    against: str
    unit: str = ""  # empty for a ratio

    @property
    def met(self) -> bool:
        return self.got.middle >= self.wanted if self.at_least else self.got.middle <= self.wanted


def rate(sample: Sample) -> float:
    return sample.rate


def time_us(sample: Sample) -> float:
    return sample.time_us


def p50_us(sample: Sample) -> float:
    return sample.p50_us


def p99_us(sample: Sample) -> float:
    return sample.p99_us


def client_us(sample: Sample) -> float:
    return sample.client_us


def server_us(sample: Sample) -> float:
    return sample.server_us


def targets(results: Results) -> list[Target]:
    """The targets for which there are measurements."""
    return list(_targets(results))


def _targets(results: Results) -> Iterator[Target]:
    for scenario, share in ((HOT_KEY, 1 / 4), (MANY_KEYS, 1 / 2)):
        yield from _against(results, scenario, time_us, share, "limits")
        yield from _against(results, scenario, time_us, 1 / 3, "throttled-py")
    yield from _at_least(results, threads(1), rate, 1.5)
    yield from _at_least(results, threads(16), rate, 2)
    yield from _at_most(results, tasks(1), p50_us, 1)
    for callers, wanted in ((64, 6), (256, 9), (1024, 10)):
        yield from _at_least(results, tasks(callers), rate, wanted)
        yield from _at_most(results, tasks(callers), p99_us, 1 / 3)
    yield from _at_least(results, THREE_LIMITS, rate, 6)
    yield from _against(results, THREE_LIMITS, time_us, 1.6, HEADGATE_ONE_LIMIT)
    yield from _share_of_ceiling(results)
    for framework, store, share in (("FastAPI", "memory", 0.85), ("FastAPI", "Redis", 0.8), ("Flask", "memory", 0.9)):
        yield from _kept(results, http(framework, store), share)
    for store, added, observed in (("memory", 0.30, 0.42), ("Redis", 0.72, 0.84)):
        yield from _added(results, cpu(store, 64), added, observed)
    if results.policies:
        loads = Spread.of(sample.load_s for sample in results.policies)
        yield Target(f"{POLICY}: to load", 2, False, loads, "", " s")
        more = Spread.of(sample.more_us for sample in results.policies)
        yield Target(f"{POLICY}: added to a request", 10, False, more, f"one of {SMALL}", " us")


def kept(samples: Sequence[Sample], alone: Sequence[Sample]) -> Spread:
    """The share of the bare app's requests per second, round by round."""
    return Spread.of(with_limits.rate / without.rate for with_limits, without in zip(samples, alone, strict=True))


def kept_by_cpu(samples: Sequence[Sample], alone: Sequence[Sample]) -> Spread:
    """The same in CPU time of the app, which other load on the machine affects less."""
    pairs = zip(samples, alone, strict=True)
    return Spread.of(without.client_us / with_limits.client_us for with_limits, without in pairs)


def added_us(samples: Sequence[Sample], alone: Sequence[Sample]) -> Spread:
    """The CPU time added to the bare app, round by round."""
    pairs = zip(samples, alone, strict=True)
    return Spread.of(with_limits.client_us - without.client_us for with_limits, without in pairs)


def added_share(samples: Sequence[Sample], alone: Sequence[Sample]) -> Spread:
    """The same as a share of the bare app."""
    pairs = zip(samples, alone, strict=True)
    return Spread.of(with_limits.client_us / without.client_us - 1 for with_limits, without in pairs)


def best_peer(results: Results, scenario: str, reading: Reading, *, most: bool) -> str | None:
    seen = results.samples.get(scenario, {})
    peers = {name: Spread.of(map(reading, samples)).middle for name, samples in seen.items() if name not in VARIANTS}
    if HEADGATE not in seen or not peers:
        return None
    return (max if most else min)(peers, key=peers.__getitem__)


def _at_least(results: Results, scenario: str, reading: Reading, wanted: float) -> Iterator[Target]:
    peer = best_peer(results, scenario, reading, most=True)
    if peer is not None:
        yield _compared(results, scenario, reading, wanted, peer, at_least=True)


def _at_most(results: Results, scenario: str, reading: Reading, wanted: float) -> Iterator[Target]:
    peer = best_peer(results, scenario, reading, most=False)
    if peer is not None:
        yield _compared(results, scenario, reading, wanted, peer, at_least=False)


def _against(results: Results, scenario: str, reading: Reading, wanted: float, peer: str) -> Iterator[Target]:
    if {HEADGATE, peer} <= results.samples.get(scenario, {}).keys():
        yield _compared(results, scenario, reading, wanted, peer, at_least=False)


def _compared(results: Results, scenario: str, reading: Reading, wanted: float, peer: str, *, at_least: bool) -> Target:
    """Compare round by round, as other load on the machine affects both alike."""
    seen = results.samples[scenario]
    pairs = zip(seen[HEADGATE], seen[peer], strict=True)
    names: dict[Reading, str] = {rate: "checks/s", time_us: "time", p50_us: "p50", p99_us: "p99"}
    got = Spread.of(reading(ours) / reading(theirs) for ours, theirs in pairs)
    return Target(f"{scenario}: {names[reading]}", wanted, at_least, got, peer)


def _kept(results: Results, scenario: str, wanted: float) -> Iterator[Target]:
    seen = results.samples.get(scenario, {})
    for name in (HEADGATE, HEADGATE_OBSERVED):
        if name in seen:
            observed = ", with metrics and decision log" if name == HEADGATE_OBSERVED else ""
            got = kept(seen[name], seen[BARE_APP])
            yield Target(f"{scenario}: requests/s{observed}", wanted, True, got, BARE_APP)


def _added(results: Results, scenario: str, wanted: float, observed: float) -> Iterator[Target]:
    seen = results.samples.get(scenario, {})
    for name, most, what in ((HEADGATE, wanted, ""), (HEADGATE_OBSERVED, observed, ", with metrics and decision log")):
        if name in seen:
            got = added_share(seen[name], seen[BARE_APP])
            yield Target(f"{scenario}: CPU added{what}", most, False, got, BARE_APP)


def _share_of_ceiling(results: Results) -> Iterator[Target]:
    """Headgate compared with the same script in redis-benchmark, round by round."""
    ours = results.samples.get(CEILING, {}).get(HEADGATE)
    if ours:
        limit = results.ceiling[max(CHECKS_PER_RUN)]
        got = Spread.of(sample.rate / most for sample, most in zip(ours, limit, strict=True))
        yield Target("tasks, many: checks/s", 1 / 2, True, got, CEILING)
