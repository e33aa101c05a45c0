"""Replays: results equal an independent count, identities follow production's rules, and costs are bounded."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headgate.limiter import Limiter
from headgate.policy import read
from headgate.replay.engine import PolicyReplay
from headgate.replay.identities import TierTable
from headgate.replay.run import LogOptions, ReplayRun
from headgate.replay.sorting import sort_by_time
from headgate.testing import FakeClock
from support.access_logs import WindowLimit, count_rejections, policy_text, read_log, write_log

if TYPE_CHECKING:
    from headgate.policy.model import Policy

REAL_LOG = os.environ.get("HEADGATE_ACCESS_LOG")
"""A real log in the common format, which is replayed beside a generated one."""

POLICIES = {
    "fixed": [
        WindowLimit("minute", "fixed_window", 20, 60),
        WindowLimit("hour", "fixed_window", 60, 3600),
        WindowLimit("all", "fixed_window", 25, 60, by="global"),
    ],
    "sliding": [
        WindowLimit("minute", "sliding_window", 15, 60),
        WindowLimit("robots", "sliding_window", 8, 900, path="/robots.txt", cost=2),
        WindowLimit("all", "sliding_window", 25, 60, by="global"),
    ],
    "log": [
        WindowLimit("minute", "sliding_log", 20, 60),
        WindowLimit("feed", "sliding_log", 5, 300, path="/feed"),
        WindowLimit("hour", "fixed_window", 60, 3600),
    ],
}


def replay(policy: Policy | str, *logs: Path | str, **options: Any) -> dict[str, Any]:
    policy = read(policy) if isinstance(policy, str) else policy
    run = {name: options.pop(name) for name in ("against", "obey_retry_after") if name in options}
    log_options = LogOptions([str(log) for log in logs], secret=b"0123456789abcdef", **options)
    return ReplayRun(policy, "policy.yaml", log_options, all_clients=True, **run).run().data


def common(at: int, client: str = "192.0.2.1", request: str = "GET /", status: int = 200, more: str = "") -> str:
    clock = f"{at // 3600:02}:{at // 60 % 60:02}:{at % 60:02}"
    return f'{client} - - [20/Feb/2026:{clock} +0000] "{request} HTTP/1.1" {status} 512 "-" "curl"{more}\n'


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("logs") / "access.log"
    write_log(file, requests=6000)
    return file


@pytest.mark.parametrize("file", ["generated", *([REAL_LOG] if REAL_LOG else [])])
@pytest.mark.parametrize("name", POLICIES)
def test_replay_equals_an_independent_count(name: str, file: str | Path, log: Path) -> None:
    limits, file = POLICIES[name], log if file == "generated" else Path(file)
    lines = read_log(file)
    found, expected = replay(policy_text(limits), file), count_rejections(lines, limits)
    assert (found["requests"], found["rejected"], found["skipped"]) == (len(lines), expected.rejected, 0)
    by_limit = {limit: (each["requests"], each["rejected"]) for limit, each in found["by_limit"].items()}
    assert by_limit == expected.by_limit
    assert all(expected.by_limit[limit.name][1] for limit in limits), "a limit that never rejects shows nothing"
    by_client = {each["client"]: (each["requests"], each["rejected"]) for each in found["by_client"]}
    assert by_client == expected.by_client
    rejections = [each["rejected"] for each in found["by_client"]]
    assert rejections == sorted(rejections, reverse=True)


def test_bounded_caches_change_no_result(log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    policy = policy_text(POLICIES["sliding"])
    expected = replay(policy, log)
    for name, size in (("MAX_ENTRIES", 7), ("MAX_TARGETS", 3), ("KEPT_COUNTERS", 0)):
        monkeypatch.setattr(f"headgate.replay.engine.{name}", size)
    assert replay(policy, log) == expected


ALL_ALGORITHMS = ("token_bucket", "gcra", "leaky_bucket", "fixed_window", "sliding_window", "sliding_log")


@given(
    st.lists(
        st.tuples(st.integers(0, 400), st.sampled_from(["192.0.2.1", "192.0.2.2"]), st.sampled_from(["/", "/x"])),
        max_size=60,
    ),
    st.lists(
        st.tuples(st.sampled_from(ALL_ALGORITHMS), st.integers(1, 12), st.sampled_from([7, 60, 300])),
        min_size=1,
        max_size=3,
    ),
)
def test_replay_decides_as_a_limiter_at_these_times(
    requests: list[tuple[int, str, str]], limits: list[tuple[str, int, int]]
) -> None:
    text = "limits:\n" + "".join(
        f"  - {{name: l{number}, by: ip, bucket: {quota}/{seconds} seconds, algorithm: {algorithm}}}\n"
        for number, (algorithm, quota, seconds) in enumerate(limits)
    )
    policy, options = read(text), LogOptions([])
    engine = options.engine(policy, options.hasher())
    logged = [(at * 1_000_000, "GET", path, 200, (peer, None, ()), None) for at, peer, path in requests]
    for batch in sort_by_time([logged]):  # type: ignore[list-item]
        engine.replay(batch)
    engine.finish()
    clock = FakeClock()
    expected = 0
    with Limiter("memory://", clock=clock) as limiter:
        for at, peer, _ in sorted(requests, key=lambda each: each[0]):
            clock.set_us(at * 1_000_000)
            keys = [rule.limit.by(peer) for rule in policy.rules if rule.limit is not None]
            expected += not limiter.check(*keys)
    assert (engine.requests, engine.rejected) == (len(requests), expected)


# ------------------------------------------------------------------ identities


def test_address_comes_from_trusted_proxies_only(tmp_path: Path) -> None:
    log = tmp_path / "main.log"
    log.write_text(
        common(0, "10.0.0.1", more=' "6.6.6.6, 192.0.2.7"')
        + common(1, "10.0.0.1", more=' "192.0.2.7"')
        + common(2, "203.0.113.5", more=' "192.0.2.7"')
        + common(3, "2001:db8::1")
        + common(4, "2001:db8::2")
    )
    found = replay("identity: {proxies: [10.0.0.0/8]}\nlimits: [{by: ip, bucket: 1/hour}]", log)
    clients = {each["client"]: (each["requests"], each["rejected"]) for each in found["by_client"]}
    assert clients == {"192.0.2.7": (2, 1), "203.0.113.5": (1, 0), "2001:db8::/64": (2, 1)}


def test_routes_costs_overrides_blocks_and_exemptions_apply(tmp_path: Path) -> None:
    log = tmp_path / "access.log"
    lines = [common(at, request="GET /search?q=1") for at in range(3)]
    lines += [common(10 + at, "192.0.2.2", "GET /search/") for at in range(3)]
    lines += [common(20, "192.0.2.3"), common(21, "192.0.2.3", "GET /health"), common(22, request="GET /%73earch")]
    log.write_text("".join(lines))
    policy = """
routes: [{path: /health, cost: 0}, {path: /search, cost: 5}]
limits: [{name: per-ip, by: ip, bucket: 10/hour, algorithm: fixed_window}]
overrides: [{ip: 192.0.2.2, limit: per-ip, bucket: 100/hour}]
blocked: [{ip: 192.0.2.3}]
"""
    found = replay(policy, log)
    clients = {each["client"]: (each["requests"], each["rejected"]) for each in found["by_client"]}
    assert clients == {"192.0.2.1": (4, 2), "192.0.2.2": (3, 0), "192.0.2.3": (2, 1)}
    assert (found["rejected"], found["blocked"]) == (3, 1)
    assert found["by_limit"]["per-ip"]["requests"] == 7, "neither the blocked request nor the exempt one"
    assert found["by_route"]["/search"] == {"requests": 7, "rejected": 2, "blocked": 0}


def test_temporary_override_applies_in_its_time(tmp_path: Path) -> None:
    log = tmp_path / "access.log"
    log.write_text("".join(common(at) for at in (0, 1, 3600, 3601, 3602, 7200, 7201)))
    policy = """
limits: [{name: per-ip, by: ip, bucket: 1/hour, algorithm: fixed_window}]
overrides:
  - {ip: 192.0.2.1, limit: per-ip, bucket: 2/hour, valid_from: 2026-02-20T01:00:00Z, valid_until: 2026-02-20T02:00:00Z}
"""
    assert replay(policy, log)["by_client"][0]["rejected"] == 1 + 1 + 1


def test_shadow_limits_report_and_never_reject(tmp_path: Path) -> None:
    log = tmp_path / "access.log"
    log.write_text("".join(common(0) for _ in range(5)))
    policy = "limits: [{name: strict, by: ip, bucket: 2/hour, shadow: true}, {name: real, by: global, bucket: 4/hour}]"
    found = replay(policy, log)
    assert found["rejected"] == 1
    assert (found["by_limit"]["strict"]["requests"], found["by_limit"]["strict"]["rejected"]) == (4, 2)
    assert found["by_client"][0]["shadow_rejected"] == 2


def test_limit_counts_only_responses_that_it_names(tmp_path: Path) -> None:
    log = tmp_path / "access.log"
    statuses = (200, 200, 401, 401, 401, 200)
    log.write_text("".join(common(at, request="POST /login", status=status) for at, status in enumerate(statuses)))
    policy = "limits: [{path: /login, by: ip, bucket: 2/hour, algorithm: sliding_window, count_when: status == 401}]"
    assert replay(policy, log)["rejected"] == 2


def test_concurrency_uses_durations_and_arrival_times(tmp_path: Path) -> None:
    log = tmp_path / "access.json"
    rows = [(10, 10), (11, 10), (12, 10), (13, 1), (25, 1)]  # the end of each request, and its duration
    log.write_text(
        "".join(f'{{"time": {end}, "ip": "192.0.2.1", "path": "/", "request_time": {took}}}\n' for end, took in rows)
    )
    policy = "limits: [{by: ip, bucket: {algorithm: concurrency, quota: 2, period: 4 seconds}}]"
    found = replay(policy, log)  # arrivals at 0, 1, 2, 12 and 24
    assert (found["rejected"], found["first"]) == (1, "1970-01-01T00:00:00Z")


def test_tiers_come_from_a_file_and_tenants_from_paths_and_headers(tmp_path: Path) -> None:
    log, tiers = tmp_path / "access.log", tmp_path / "tiers.csv"
    requests = [("GET /t/acme/orders", 3), ("GET /t/globex/orders", 3), ("GET /status", 3)]
    log.write_text("".join(common(0, request=request) for request, number in requests for _ in range(number)))
    tiers.write_text("client,tier\ntenant=acme,pro\n# a comment\n")
    policy = """
tier: free
limits: [{name: api, by: tenant, missing: ip, bucket: 1/hour, tiers: {pro: 2/hour}}]
"""
    found = replay(policy, log, identities=["tenant=path:/t/{tenant}/*"], tiers=str(tiers))
    assert {each["client"]: each["rejected"] for each in found["by_client"]} == {"acme": 1, "globex": 2, "192.0.2.1": 2}
    assert found["by_tier"] == {
        "free": {"requests": 6, "rejected": 4, "blocked": 0},
        "pro": {"requests": 3, "rejected": 1, "blocked": 0},
    }
    assert any("no tenant" in note for note in found["notes"])


def test_api_keys_are_counted_by_hash_and_never_shown(tmp_path: Path) -> None:
    log, tiers = tmp_path / "access.json", tmp_path / "tiers.json"
    log.write_text(
        '{"time": 1, "request": "GET / HTTP/1.1", "remote_addr": "192.0.2.1", "http_x_api_key": "sk_live_1"}\n' * 3
        + '{"time": 2, "request": "GET / HTTP/1.1", "remote_addr": "192.0.2.1", "http_authorization": "Bearer b"}\n'
    )
    tiers.write_text('{"sk_live_1": "pro"}')
    policy = "tier: free\nlimits: [{by: api_key, bucket: 1/hour, tiers: {pro: 2/hour}}]"
    found = replay(policy, log, tiers=str(tiers))
    assert [(each["kind"], each["requests"], each["rejected"]) for each in found["by_client"]] == [
        ("api_key", 3, 1),
        ("api_key", 1, 0),
    ]
    assert "sk_live_1" not in str(found)


# ------------------------------------------------------------------ reports


def test_report_has_the_bound_of_each_limit_in_production(tmp_path: Path) -> None:
    file = tmp_path / "access.log"
    file.write_text(common(1))
    policy = (
        "on_failure: local\nlimits: [{name: a, by: ip, bucket: 1000/second}, {name: b, by: ip, bucket: 9/minute, %s}]"
    )
    found = replay(policy % "algorithm: fixed_window", file)
    assert {name: each["bound"] for name, each in found["by_limit"].items()} == {"a": 500, "b": 1}
    assert any("at most 500 tokens more, on 'a'" in note for note in found["notes"])
    found = replay(policy % "shadow: true", file)
    assert found["by_limit"]["b"]["bound"] == 0, "it rejects nothing"


def test_report_says_when_and_for_how_long(tmp_path: Path) -> None:
    log = tmp_path / "access.log"
    log.write_text("".join(common(at) for at in (0, 1, 2, 50, 600, 3700, 3701)))
    client = replay("limits: [{name: per-ip, by: ip, bucket: 1/hour, algorithm: fixed_window}]", log)["by_client"][0]
    assert client["rejected"] == 5
    assert (client["first_rejected"], client["last_rejected"]) == ("2026-02-20T00:00:01Z", "2026-02-20T01:01:41Z")
    assert (client["episodes"], client["longest_s"], client["by_limit"]) == (3, 49.0, {"per-ip": 5})


def test_report_has_the_worst_minute_the_peak_and_who_came_close(tmp_path: Path) -> None:
    log = tmp_path / "access.log"
    lines = [common(0)] * 7 + [common(60)] * 3 + [common(120, "192.0.2.2")] * 4
    log.write_text("".join(lines))
    found = replay("limits: [{name: per-ip, by: ip, bucket: 5/minute, algorithm: fixed_window}]", log)
    assert found["worst_minute"] == {"at": "2026-02-20T00:00:00Z", "requests": 7, "rejected": 2}
    assert (found["by_limit"]["per-ip"]["peak_per_minute"], found["by_limit"]["per-ip"]["peak_at"]) == (
        5,
        "2026-02-20T00:00:00Z",
    )
    close = [(each["client"], each["limit"], each["remaining"], each["capacity"]) for each in found["came_close"]]
    assert close == [("192.0.2.2", "per-ip", 1, 5)]


def test_obedient_clients_wait_as_told(tmp_path: Path) -> None:
    log = tmp_path / "access.log"
    log.write_text("".join(common(at) for at in (0, 1, 2, 3)) + common(3, "192.0.2.2"))
    policy = "limits: [{by: ip, bucket: 1/10 seconds, algorithm: sliding_log}]"
    found = replay(policy, log, obey_retry_after=True)
    # The requests pass at 0, 10, 20 and 30; the last two are rejected once more each.
    assert found["retries"] == {"postponed": 3, "retries": 3, "mean_delay_s": 18.0, "longest_delay_s": 27.0}
    assert found["rejected"] == 3
    assert replay(policy, log)["rejected"] == 3


def test_two_policies_are_compared_on_the_same_requests(tmp_path: Path) -> None:
    log = tmp_path / "access.log"
    log.write_text("".join(common(0, f"192.0.2.{client}") for client in (1, 1, 1, 2, 2, 3)))
    old = read("limits: [{by: ip, bucket: 2/hour}]\nblocked: [{ip: 192.0.2.3}]")
    found = replay("limits: [{by: ip, bucket: 1/hour}]", log, against=old)["against"]
    assert found["rejected"] == 2
    assert [(each["client"], each["rejected_before"], each["rejected"]) for each in found["newly_rejected"]] == [
        ("192.0.2.2", 0, 1)
    ]
    assert [each["client"] for each in found["newly_allowed"]] == ["192.0.2.3"]
    assert [each["client"] for each in found["changed"]] == ["192.0.2.1"]


def test_memory_of_counters_is_bounded_and_forgotten_ones_are_reported() -> None:
    options = LogOptions([])
    hasher = options.hasher()
    engine = PolicyReplay(read("limits: [{by: ip, bucket: 5/day}]"), hasher, tiers=TierTable(), max_counters=10)
    engine.replay([(0, "GET", "/", 200, (f"192.0.2.{number}", None, ()), None) for number in range(100)])
    assert engine.store.stats.keys == 10
    engine.finish()
    assert engine.store.stats.forgiven == 90
    assert engine.store.stats.keys == 0, "the report needs the memory of the counters"
