"""`headgate suggest`: suggested limits reach their goal on later traffic, or the traffic is reported as unstable."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from headgate import cli
from headgate.errors import InvalidInput
from headgate.policy import read
from headgate.replay.goals import parse_goals
from headgate.replay.run import LogOptions, ReplayRun
from headgate.replay.suggest import SuggestionRun
from support.access_logs import write_log

if TYPE_CHECKING:
    from headgate.replay.suggest import Suggestion

REAL_LOG = os.environ.get("HEADGATE_ACCESS_LOG")
FILES = ["generated", *([REAL_LOG] if REAL_LOG else [])]


def suggestion(file: Path, goal: str, **options: Any) -> Suggestion:
    return SuggestionRun(parse_goals([goal]), LogOptions([str(file)], **options)).run()


def rejected_share(policy: str, file: Path) -> float:
    found = ReplayRun(read(policy), "", LogOptions([str(file)])).run().data
    return float(found["rejected"] / found["requests"])


def lines_of(file: Path) -> list[bytes]:
    import gzip

    content = file.read_bytes()
    return (gzip.decompress(content) if file.suffix == ".gz" else content).splitlines(keepends=True)


@pytest.mark.parametrize("percent", [0.1, 1.0, 5.0])
@pytest.mark.parametrize("file", FILES)
def test_promise_of_the_first_half_is_kept_in_the_second(file: str, percent: float, tmp_path: Path) -> None:
    log = tmp_path / "access.log" if file == "generated" else Path(file)
    if file == "generated":
        write_log(log, requests=20_000, hours=40)
    lines = lines_of(log)
    first, second = tmp_path / "first.log", tmp_path / "second.log"
    first.write_bytes(b"".join(lines[: len(lines) // 2]))
    second.write_bytes(b"".join(lines[len(lines) // 2 :]))
    found = suggestion(first, f"reject at most {percent}% of requests")
    policy = "\n".join(found.policy_lines())
    assert rejected_share(policy, first) <= percent / 100
    assert rejected_share(policy, second) <= 1.5 * percent / 100 or not found.is_stable
    assert found.is_stable, "this traffic is stable"


def test_limit_is_the_strictest_of_its_curve(tmp_path: Path) -> None:
    log = tmp_path / "access.log"
    write_log(log, requests=20_000, hours=40)
    [limit] = suggestion(log, "reject at most 0.1% of requests").limits
    shares = [point.share for point in limit.curve]
    assert shares == sorted(shares, reverse=True)
    at = [point.quota for point in limit.curve].index(limit.limit.quota)
    assert limit.share == shares[at] <= 0.001
    assert at > 0
    assert shares[at - 1] > 0.0005, "the next lower limit fails the goal in one half of the log at least"
    assert limit.determining[0].rejected > 0
    assert sum(day.requests for day in limit.days) == 20_000


def common(second: int, client: str) -> str:
    clock = f"{second // 3600:02}:{second // 60 % 60:02}:{second % 60:02}"
    return f'{client} - - [20/Feb/2026:{clock} +0000] "GET / HTTP/1.1" 200 1\n'


def test_unstable_traffic_is_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = tmp_path / "access.log"
    quiet = [common(second * 10, "192.0.2.1") for second in range(1000)]
    wild = [common(20_000 + second // 5, f"192.0.2.{second // 250}") for second in range(1000)]
    log.write_text("".join([*quiet, *wild]))
    assert cli.main(["suggest", str(log), "--goal", "reject at most 1% of requests"]) == 1
    out, err = capsys.readouterr()
    assert "# warning: per-client: too unstable: limits for the first half of the log reject" in out
    assert "too unstable" in err
    assert read(out).rules[0].limit is not None, "and it is still a policy"


def test_few_requests_are_too_few_to_judge(tmp_path: Path) -> None:
    log = tmp_path / "access.log"
    log.write_text("".join(common(second, "192.0.2.1") for second in range(100)))
    found = suggestion(log, "reject at most 1% of requests")
    assert (found.is_stable, "too few" in found.instabilities[0]) == (False, True)


def test_goals_may_conflict(tmp_path: Path) -> None:
    log = tmp_path / "access.log"
    write_log(log, requests=5000)
    found = suggestion(log, "reject at most 0.1% of requests, keep each client below 1/minute")
    assert "lets a client have more than 1 requests in a minute" in found.conflicts[0]
    assert not suggestion(log, "reject at most 0.1% of requests, keep each client below 10000/minute").conflicts


def test_client_stays_below_its_share_of_the_peak(tmp_path: Path) -> None:
    log = tmp_path / "access.log"
    write_log(log, requests=20_000, hours=40)
    free = suggestion(log, "reject at most 2% of requests")
    capped = suggestion(log, "reject at most 2% of requests, keep each client below 60% of the peak")
    assert capped.cap_per_minute == 0.6 * capped.peak_per_minute
    limit = capped.limits[0].limit
    assert limit.capacity + (limit.quota if limit.algorithm == "token_bucket" else 0) <= capped.cap_per_minute
    assert free.limits[0].limit.capacity > capped.cap_per_minute, "otherwise the goal changes nothing"


def test_total_is_counted_exactly(tmp_path: Path) -> None:
    log = tmp_path / "access.log"
    log.write_text("".join(common(0, f"192.0.2.{client}") for client in range(10)))
    found = suggestion(log, "total below 4/s")
    assert found.total is not None
    assert (found.total["rejected"], found.total["limit"]) == (6, "4/second, sliding_window")
    assert rejected_share("\n".join(found.policy_lines()), log) == 0.6


def test_tiers_get_numbers_of_their_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log, policy = tmp_path / "access.log", tmp_path / "policy.yaml"
    rows = [(minute * 60, "192.0.2.1", 3) for minute in range(200)] + [
        (minute * 60, "192.0.2.2", 30) for minute in range(200)
    ]
    log.write_text("".join(common(second, client) for second, client, number in rows for _ in range(number)))
    policy.write_text(
        "tier: free\nlimits: [{name: x, by: ip, bucket: 1/hour, tiers: {pro: 2/hour}}]\n"
        "clients: [{ip: 192.0.2.2, tier: pro}]"
    )
    goal = "reject at most 0.1% of paying clients' requests"
    assert (
        cli.main(["suggest", str(log), "--policy", str(policy), "--goal", goal]) == 1
    )  # the first tier has 600 requests
    suggested = read(capsys.readouterr().out)
    rule = suggested.rules[0]
    assert rule.limit is not None
    assert (rule.limit.quota, rule.tiers["pro"].quota) == (3, 30)
    assert suggested.default_tier == "free"
    assert cli.main(["suggest", str(log), "--policy", str(policy), "--goal", goal.replace("paying", "por")]) == 2
    assert "'por' is not a tier of the policy; did you mean 'pro'?" in capsys.readouterr().err


def test_json_has_the_policy_and_its_reasons(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = tmp_path / "access.log"
    write_log(log, requests=3000)
    assert cli.main(["suggest", str(log), "--json", "--goal", "reject at most 5% of requests"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["stable"] is True
    assert read(found["policy"]).rules[0].name == "per-client"
    assert found["limits"][0]["rejected_share"] <= 0.05
    assert {"quota", "burst", "algorithm", "curve", "determined_by", "days", "held_out_share"} <= found["limits"][
        0
    ].keys()


@pytest.mark.parametrize(
    ("goal", "message"),
    [
        ("reject few", "is not understood; write"),
        ("reject at most 0% of requests", "not a share above 0"),
        ("reject at most 200% of requests", "not a share above 0"),
        ("total below 800/fortnight", "unknown unit 'fortnight'"),
        ("total below 800", "is not understood"),
    ],
)
def test_goal_that_is_not_understood_is_an_error(goal: str, message: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        parse_goals([goal])
    assert message in f"{caught.value}"


@pytest.mark.parametrize(
    ("goal", "fields"),
    [
        ("Reject at most 0.1 % of paying clients' requests", {"share": 0.001, "group": "paying"}),
        ("reject less than 2% of pro requests", {"share": 0.02, "group": "pro"}),
        ("reject at most 1% of the requests", {"share": 0.01, "group": None}),
        ("keep each client below 5 % of the peak", {"cap_share": 0.05}),
        ("and keep every client under 2/s", {"cap_per_minute": 120.0}),
        ("total below 6000 per minute", {"total": (6000, 60)}),
    ],
)
def test_goals_are_read_as_people_write_them(goal: str, fields: dict[str, Any]) -> None:
    goals = parse_goals([goal])
    assert {name: getattr(goals, name) for name in fields} == fields
