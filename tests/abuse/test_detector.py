"""The detector finds clients that match a scenario, only them, in bounded memory."""

from __future__ import annotations

import random
import re
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headgate.abuse.detector import CELLS, MAX_MEMBERS, MAX_RECORDS, AbuseDetector, ObservedRequest
from headgate.abuse.signals import SeenAddresses, ValueHashes, bits_for, common_interval, distinct
from headgate.policy import read
from headgate.policy.shipped_scenarios import SHIPPED

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from headgate.abuse.model import AbuseScenario, Finding

SECOND_US = 1_000_000
MINUTE_US = 60 * SECOND_US
START_US = 1_763_251_200 * SECOND_US


class Watch:
    """A detector, and all that it has found."""

    def __init__(self, text: str = "on", **options: Any) -> None:
        self.found: list[Finding] = []
        settings = read(f"limits: [{{by: ip, bucket: 10/minute}}]\nabuse: {text}").abuse
        assert settings is not None
        self.names = tuple(scenario.name for scenario in settings.scenarios)
        self.detector = AbuseDetector(self._handle, b"key", **options)
        self.detector.configure(settings.scenarios)

    def _handle(self, finding: Finding, scenario: AbuseScenario) -> None:
        assert finding.scenario == scenario.name
        self.found.append(finding)

    def send(self, at_us: int, address: str, path: str = "/", status: int = 200, agent: str = "x", **who: str) -> None:
        identities = {"address": address, "ip": address, **who}
        self.detector.observe([ObservedRequest(at_us, self.names, identities, agent, path, status, path)])

    @property
    def values(self) -> set[tuple[str, str]]:
        return {(finding.kind, finding.value) for finding in self.found}


def scenario(text: str) -> Watch:
    return Watch(f"{{scenarios: {{mine: {text}}}}}")


def shipped(name: str, **options: Any) -> Watch:
    return Watch(f"{{scenarios: [{name}]}}", **options)


# ------------------------------------------------------------------ shipped scenarios


def test_credential_stuffing_is_found_by_refused_logins() -> None:
    watch = shipped("credential-stuffing")
    for number in range(12):
        watch.send(START_US + number * SECOND_US, "203.0.113.9", "/login", 401)
    (finding,) = watch.found
    assert (finding.kind, finding.value, finding.signal, finding.observed) == ("ip", "203.0.113.9", "requests", 10)
    assert finding.at_us == START_US + 9 * SECOND_US
    text = "203.0.113.9 sent 10 requests in 5 minutes; 100% of its 10 requests were refused (401 or 403)"
    assert finding.evidence == text


def test_office_with_some_wrong_passwords_is_not_found() -> None:
    watch = shipped("credential-stuffing")
    for number in range(300):
        watch.send(START_US + number * SECOND_US, "203.0.113.9", "/login", 401 if number % 3 == 0 else 200)
    assert not watch.found


def test_scraping_counts_distinct_paths() -> None:
    watch = shipped("scraping")
    for number in range(2_000):
        watch.send(START_US + number * 100_000, "203.0.113.9", f"/item/{number}")
        watch.send(START_US + number * 100_000, "198.51.100.7", f"/item/{number % 50}")
    assert watch.values == {("ip", "203.0.113.9")}
    assert watch.found[0].evidence == f"203.0.113.9 requested {watch.found[0].observed} paths in 10 minutes"
    assert 250 <= watch.found[0].observed < 260


def test_enumeration_counts_only_what_is_not_there() -> None:
    watch = shipped("enumeration")
    for number in range(200):
        watch.send(START_US + number * SECOND_US, "203.0.113.9", f"/users/{number}", 404)
        watch.send(START_US + number * SECOND_US, "198.51.100.7", f"/users/{number}", 200)
        watch.send(START_US + number * SECOND_US, "198.51.100.8", f"/users/{number % 9}", 404)
    assert watch.values == {("ip", "203.0.113.9")}


def test_leaked_key_is_found_by_its_addresses() -> None:
    watch = shipped("key-leak")
    for number in range(400):
        watch.send(START_US + number * SECOND_US, f"203.0.113.{number % 60}", api_key="hmac:1")
        watch.send(START_US + number * SECOND_US, f"198.51.100.{number % 6}", api_key="hmac:2")
    assert watch.values == {("api_key", "hmac:1")}


def test_retry_storm_is_found_by_denied_requests() -> None:
    watch = shipped("retry-storm")
    for number in range(400):
        watch.send(START_US + number * 100_000, "203.0.113.9", status=429)
        watch.send(START_US + number * 100_000, "198.51.100.7", status=200)
    assert watch.values == {("ip", "203.0.113.9")}


def bots(rng: random.Random, count: int, seconds: int, jitter_us: int = 2_000) -> list[tuple[int, str]]:
    """The times and addresses of bots that send a request every second."""
    phases = [rng.randrange(SECOND_US) for _ in range(count)]
    rows = [
        (
            START_US + second * SECOND_US + phase + rng.randrange(jitter_us),
            f"10.{bot >> 16}.{bot >> 8 & 255}.{bot & 255}",
        )
        for second in range(seconds)
        for bot, phase in enumerate(phases)
    ]
    return sorted(rows)


def test_botnet_of_10000_addresses_is_found_whole_within_15_seconds_and_nobody_else() -> None:
    rng, watch = random.Random(1), shipped("botnet")
    legitimate = [f"192.0.2.{number}" for number in range(100)]
    for number, (at_us, address) in enumerate(bots(rng, 10_000, 13)):
        watch.send(at_us, address, "/api/login", 401, "Mozilla/5.0 (popular)")
        if number % 20 == 0:  # 70 sign-ins by each person at random times, with the same user agent
            watch.send(at_us, rng.choice(legitimate), "/api/login", 200, "Mozilla/5.0 (popular)")
    assert len(watch.found) == len(watch.values) == 10_000
    assert not watch.values & {("ip", address) for address in legitimate}
    assert max(finding.at_us for finding in watch.found) < START_US + 15 * SECOND_US
    pattern = (
        r"10\.0\.\d+\.\d+ sent 1[0-9] requests in 10 minutes, one every [\d.]+ s, as did [\d,]+ other addresses with "
    )
    pattern += (
        r"the same user agent \(Mozilla/5.0 \(popular\)\); \d+% of its 1[0-9] requests came at the same interval .*"
    )
    assert all(re.fullmatch(pattern, finding.evidence) for finding in watch.found)


def test_too_few_regular_clients_are_no_botnet() -> None:
    watch = shipped("botnet")
    for at_us, address in bots(random.Random(1), 49, 60):
        watch.send(at_us, address, "/login", 401)
    assert not watch.found


# ------------------------------------------------------------------ framing


def test_invented_api_keys_are_never_found() -> None:
    watch = shipped("key-leak", is_trusted_key=lambda key: key == "hmac:known")
    for number in range(400):
        for key in ("hmac:invented", "hmac:known"):
            watch.send(START_US + number * SECOND_US, f"203.0.113.{number % 60}", api_key=key)
    assert watch.values == {("api_key", "hmac:known")}


def test_attempted_accounts_are_counted_and_never_found() -> None:
    watch = scenario("{by: ip, when: {accounts: 20}, steps: block for 1 hour}")
    for number in range(100):
        watch.send(START_US + number * SECOND_US, "203.0.113.9", "/login", 401, account=f"victim-{number}")
        watch.send(START_US + number * SECOND_US, "198.51.100.7", "/login", 401, account="victim-0")
    assert watch.values == {("ip", "203.0.113.9")}
    assert watch.found[0].evidence == f"203.0.113.9 tried {watch.found[0].observed} accounts in 5 minutes"
    assert 20 <= watch.found[0].observed < 25


def test_groups_that_are_no_client_are_only_reported() -> None:
    for by in ("agent", "endpoint", "global"):
        watch = scenario(f"{{by: {by}, when: {{requests: 50}}}}")
        for number in range(60):
            watch.send(START_US + number * SECOND_US, f"203.0.113.{number}")
        assert {finding.kind for finding in watch.found} == {by}


def test_subnet_is_found_as_a_network() -> None:
    watch = scenario("{by: subnet, when: {addresses: 30}, steps: block for 1 hour}")
    for number in range(200):  # one host that rotates through its /48
        watch.send(START_US + number * SECOND_US, f"2001:db8:0:{number:x}::/64", subnet="2001:db8::/48")
    assert watch.values == {("ip", "2001:db8::/48")}


# ------------------------------------------------------------------ windows


def test_window_never_covers_more_than_its_length() -> None:
    watch = scenario("{by: ip, when: {requests: 20}, window: 1 minute}")
    for number in range(200):  # 19 in any minute
        watch.send(START_US + number * MINUTE_US // 19, "203.0.113.9")
    assert not watch.found


def test_half_a_window_is_always_covered_but_for_the_requests_before_a_record() -> None:
    for offset in range(0, 60, 7):
        watch = scenario("{by: ip, when: {requests: 20}, window: 1 minute}")
        for number in range(20 + 4):
            watch.send(START_US + offset * SECOND_US + number * SECOND_US, "203.0.113.9")
        assert len(watch.found) == 1, offset


def test_client_is_found_again_after_the_window() -> None:
    watch = scenario("{by: ip, when: {requests: 20}, window: 1 minute}")
    for number in range(600):
        watch.send(START_US + number * SECOND_US, "203.0.113.9")
    times = [finding.at_us for finding in watch.found]
    gaps = [after - before for before, after in pairwise(times)]
    assert 8 <= len(times) <= 12
    assert min(gaps) >= MINUTE_US // 2


def test_clock_that_is_set_back_does_not_stop_detection() -> None:
    watch = scenario("{by: ip, when: {requests: 20}, window: 1 minute}")
    for number in range(10):
        watch.send(START_US + number, "203.0.113.9")
    for number in range(40):
        watch.send(START_US - 86_400 * SECOND_US + number * SECOND_US, "198.51.100.7")
    assert watch.values == {("ip", "198.51.100.7")}


def test_delayed_requests_count_for_the_current_pane() -> None:
    watch = scenario("{by: ip, when: {requests: 20}, window: 1 minute}")
    for number in range(30):
        watch.send(START_US + (number % 2) * 29 * SECOND_US, "203.0.113.9")
    assert len(watch.found) == 1


def test_scenarios_that_have_not_changed_keep_their_counts() -> None:
    watch = scenario("{by: ip, when: {requests: 20}}")
    other = scenario("{by: ip, when: {requests: 21}}")
    for number in range(15):
        watch.send(START_US + number, "203.0.113.9")
    watch.detector.configure([table.scenario for table in watch.detector.tables.values()])
    for number in range(5):
        watch.send(START_US + 20 + number, "203.0.113.9")
    assert len(watch.found) == 1
    watch.detector.configure([table.scenario for table in other.detector.tables.values()])
    for number in range(20):
        watch.send(START_US + 40 + number, "203.0.113.9")
    assert len(watch.found) == 1


# ------------------------------------------------------------------ memory


def identities(rng: random.Random, count: int) -> Iterator[str]:
    return (f"{rng.getrandbits(32):x}" for _ in range(count))


@pytest.mark.parametrize("name", ["enumeration", "botnet"])
def test_random_identities_neither_fill_memory_nor_displace_an_offender(name: str) -> None:
    rng, watch = random.Random(1), shipped(name)
    path, status = ("/login", 401) if name == "botnet" else ("/users", 404)
    for number, identity in enumerate(identities(rng, 40_000)):  # each sends some requests at once
        for _ in range(3 if name == "botnet" else 16):
            watch.send(START_US + number * 1_000, identity, path, status)
        if number % 2_000 == 0:
            for bot in range(60 if name == "botnet" else 1):
                for step in range(1 if name == "botnet" else 4):
                    watch.send(START_US + number * 1_000, f"10.0.0.{bot}", f"{path}/{number}/{step}", status)
    for table in watch.detector.tables.values():
        assert len(table.records) <= (MAX_MEMBERS if name == "botnet" else MAX_RECORDS)
    assert {value for _, value in watch.values} == {f"10.0.0.{bot}" for bot in range(60 if name == "botnet" else 1)}


def test_clients_with_few_requests_have_no_record() -> None:
    watch = shipped("scraping")
    for number, identity in enumerate(identities(random.Random(1), 20_000)):
        watch.send(START_US + number, identity)
    (table,) = watch.detector.tables.values()
    assert not table.records
    assert CELLS == 1 << 20


# ------------------------------------------------------------------ signals


@given(st.sets(st.text(min_size=1, max_size=20), min_size=20, max_size=200))
def test_distinct_values_are_counted_with_a_small_error(values: set[str]) -> None:
    hashes, size, bits = ValueHashes(b"key"), bits_for(200), 0
    for value in [*values, *values]:
        bits |= 1 << (hashes(value) & (size - 1))
    assert abs(distinct(bits, size) - len(values)) <= max(3, len(values) * 0.12)


def test_hashes_depend_on_the_key() -> None:
    assert ValueHashes(b"one")("x") == ValueHashes(b"one")("x") != ValueHashes(b"other")("x")


@pytest.mark.parametrize(
    ("interval_us", "base_us", "common_us"),
    [
        (1_000_000, 1_000_000, 1_000_000), (1_049_000, 1_000_000, 1_049_000), (1_051_000, 1_000_000, 0),
        (119_000, 100_000, 119_000), (121_000, 100_000, 0), (0, 0, 0), (1_000_000, 0, 0), (-1_000_000, 1_000_000, 0),
        (2_040_000, 1_000_000, 1_020_000), (2_041_000, 1_000_000, 0), (1_000_000, 2_040_000, 1_000_000),
        (7_120_000, 1_000_000, 1_017_142), (7_130_000, 1_000_000, 0), (1_500_000, 1_000_000, 0),
        (212_000, 100_000, 106_000), (213_000, 100_000, 0),
    ],
)  # fmt: skip
def test_intervals_are_the_same_or_multiples_within_a_tolerance(interval_us: int, base_us: int, common_us: int) -> None:
    assert common_interval(interval_us, base_us) == common_us


def test_random_intervals_are_not_regular() -> None:
    rng, watch = random.Random(1), scenario("{by: agent, when: {addresses: 1}, each: {requests: 10, regular: 80%}}")
    for person in range(200):
        at_us = START_US
        for _ in range(100):
            at_us += int(rng.expovariate(1 / 4) * SECOND_US)
            watch.send(at_us, f"192.0.2.{person}", "/login", 401)
    assert not watch.found


def test_newcomers_are_those_not_seen_in_the_last_hour() -> None:
    seen = SeenAddresses(ValueHashes(b"key"))
    ticks: Iterable[int] = range(0, 65, 5)
    assert not any(seen.is_new(f"192.0.2.{minute % 4}", START_US + minute * MINUTE_US) for minute in ticks)
    now_us = START_US + 65 * MINUTE_US
    assert not seen.is_new("192.0.2.1", now_us)
    assert seen.is_new("203.0.113.9", now_us)
    assert not seen.is_new("203.0.113.9", now_us + MINUTE_US)


def test_flood_of_new_clients_is_reported() -> None:
    watch = scenario("{by: global, when: {newcomers: 200}, window: 1 minute}")
    for minute in range(70):
        for number in range(10):
            watch.send(START_US + minute * MINUTE_US, f"192.0.2.{number}")
    assert not watch.found
    for number in range(300):
        watch.send(START_US + 70 * MINUTE_US + number, f"10.0.{number >> 8}.{number & 255}")
    assert watch.found[0].evidence == f"all clients had {watch.found[0].observed} new addresses in 1 minute"


def test_every_shipped_scenario_has_a_test_above() -> None:
    assert set(SHIPPED) == {"credential-stuffing", "botnet", "scraping", "enumeration", "key-leak", "retry-storm"}
