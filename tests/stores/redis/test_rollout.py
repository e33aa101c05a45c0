"""Rollouts of scripts: both versions of a canary, compared on real servers."""

from __future__ import annotations

import random
import secrets
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest

from headgate import Calendar, Limit, Limiter, ScriptError
from headgate.errors import InvalidInput, StoreUnavailable
from headgate.stores.operations import Overdraw
from headgate.stores.redis.encoding import NO_KEYS, Command
from headgate.stores.redis.rollout import (
    CanaryMonitor,
    CanaryThresholds,
    RolloutClient,
    ScriptDifference,
    ScriptRollout,
    check_formats,
)
from headgate.stores.redis.scripts import ScriptSet, StoredFormat
from headgate.testing import FakeClock

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from support.servers import RedisServer

MINUTE = timedelta(minutes=1)
ALGORITHMS = (
    "fixed_window",
    "sliding_window",
    "sliding_log",
    "token_bucket",
    "gcra",
    "leaky_bucket",
    "concurrency",
)
SHIPPED = ScriptSet.shipped()


def new_rollout(changes: Mapping[str, str], **fields: Any) -> ScriptRollout:
    candidate = SHIPPED.replace(changes)
    fields = {"percent": 100, "thresholds": CanaryThresholds(), **fields}
    return ScriptRollout("r1", SHIPPED.digest, candidate.digest, changes, {}, **fields)


class Canary:
    """A limiter that decides with a candidate."""

    def __init__(self, limiter: Limiter, changes: Mapping[str, str], **fields: Any) -> None:
        self.limiter = limiter
        self.rejections: list[str] = []
        self.differences: list[ScriptDifference] = []
        rollout = new_rollout(changes, **fields)
        candidate = rollout.scripts(SHIPPED)
        encoder = limiter.engine.store.encoder

        def reject(reason: str) -> None:
            self.rejections.append(reason)
            encoder.use_scripts(SHIPPED.script)

        self.monitor = CanaryMonitor(rollout, SHIPPED, candidate, reject, self.differences.append)
        encoder.use_scripts(self.monitor.script, is_canary=True)


def changed(name: str, old: str, new: str) -> dict[str, str]:
    text = SHIPPED.sources[name]
    assert text.count(old) == 1
    return {name: text.replace(old, new)}


def equal_changes() -> dict[str, str]:
    """Sources that differ in a comment only."""
    return {name: f"-- candidate\n{text}" for name, text in SHIPPED.decision_sources.items()}


def operate(limiter: Limiter, clock: FakeClock, seed: int) -> list[Any]:
    """The answers to random operations on all algorithms."""
    chance = random.Random(seed)
    limits = [Limit(5, MINUTE, algorithm=name, name=name) for name in ALGORITHMS]
    limits.append(Limit(5, Calendar("day", timezone="Europe/Berlin"), name="daily"))
    answers: list[Any] = []
    for number in range(150):
        clock.advance(chance.choice((0, 0, 0.5, 7, 61)))
        chosen = chance.sample(limits, chance.choice((1, 1, 2, 4)))
        keys = [limit.by(chance.choice("ab")) for limit in chosen]
        has_leases = any(limit.algorithm == "concurrency" for limit in chosen)
        id = f"{seed}-{chance.randrange(8)}" if has_leases or chance.random() < 0.3 else None
        verb = chance.randrange(6)
        if verb == 0 and chosen[0].algorithm != "concurrency":
            answers.append(limiter.refund(keys[0], 1, id=id))
        elif verb == 1:
            lease = Limit(5, MINUTE, algorithm="concurrency", name="concurrency").by("a")
            answers.append(chance.choice((limiter.renew, limiter.leave))(lease, id=f"{seed}-{number % 8}"))
        elif verb == 2 and chosen[0].algorithm in ("token_bucket", "gcra"):
            answers.append(limiter.engine.store.run(Overdraw(keys[0], 2, f"o{number}")))
        else:
            decision = limiter.check(*keys, cost=chance.choice((0, 1, 1, 2)), id=id)
            answers.append((decision.allowed, decision.verdicts, decision.next_allowed_us, decision.cost))
    return answers


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("server_name", ["redis7", "valkey9"])
def test_equal_versions_never_differ_and_answer_as_one_version(
    server_name: str, seed: int, request: pytest.FixtureRequest
) -> None:
    url = request.getfixturevalue(server_name).url
    answers = []
    for version in ("stable", "canary"):
        namespace = f"{version}-{secrets.token_hex(4)}"
        clock = FakeClock(1_800_000_000_000_000)
        with Limiter(url, clock=clock, namespace=namespace) as limiter:
            canary = Canary(limiter, equal_changes()) if version == "canary" else None
            answers.append(operate(limiter, clock, seed))
            if canary is not None:
                assert canary.differences == []
                assert canary.rejections == []
                assert canary.monitor.runs >= 150
    assert answers[0] == answers[1]


PER_CLIENT = Limit(1000, MINUTE, name="per-client")
WRONG_ANSWER = (
    "token_bucket",
    "return (level - level % ticks) / ticks, retry",
    "return (level - level % ticks) / ticks + 1, retry",
)
WRONG_STATE = ("token_bucket", "state = format(limit.text, level)", "state = format(limit.text, level + 1)")
SHORT_TTL = ("_prelude", "ceil_div(reset, 1000) + MARGIN_MS)\n  end", "ceil_div(reset, 2000) + MARGIN_MS)\n  end")
FAILING = ("token_bucket", "local need, retry = cost * ticks, 0", "local need, retry = cost * missing, 0")
SLOW = (
    "token_bucket",
    "local need, retry = cost * ticks, 0",
    "for _ = 1, 20000 do end local need, retry = cost * ticks, 0",
)


@pytest.fixture
def limiter(redis7: RedisServer) -> Iterator[Limiter]:
    with Limiter(redis7.url, namespace=secrets.token_hex(4)) as limiter:
        yield limiter


@pytest.mark.parametrize(
    ("fault", "what"), [(WRONG_ANSWER, "answer"), (WRONG_STATE, "state"), (SHORT_TTL, "expiry"), (FAILING, "error")]
)
def test_difference_rejects_the_candidate_and_the_stable_version_answers(
    limiter: Limiter, fault: tuple[str, str, str], what: str
) -> None:
    canary = Canary(limiter, changed(*fault))
    assert [limiter.check(PER_CLIENT.by("198.51.100.7")).remaining for _ in range(3)] == [999, 998, 997]
    assert [difference.what for difference in canary.differences] == [what]
    (difference,) = canary.differences
    assert difference.limit == "per-client"
    assert "198.51.100.7" not in str(difference)
    assert len(canary.rejections) == 1


def test_tolerated_differences_let_the_candidate_answer(limiter: Limiter) -> None:
    canary = Canary(limiter, changed(*WRONG_ANSWER), thresholds=CanaryThresholds(max_differences=1))
    assert [limiter.check(PER_CLIENT.by("x")).remaining for _ in range(3)] == [1000, 999, 997]
    assert len(canary.rejections) == 1
    assert canary.monitor.differences == 2


def test_slow_candidate_is_rejected(limiter: Limiter) -> None:
    canary = Canary(limiter, changed(*SLOW))
    for number in range(5000):  # the more other programs disturb the times, the more runs it takes
        limiter.check(PER_CLIENT.by(f"{number}"))
        if canary.rejections:
            break
    assert canary.rejections[0].startswith("slow")


@pytest.mark.parametrize(
    ("times_us", "rejected_after"),
    [
        ([(60, 150)] * 200, 100),
        ([(60, 110)] * 1000, None),
        ([(60, 90)] * 50 + [(60, 30_000)] + [(60, 90)] * 500, None),
        ([(60, 90), (60, 30_000)] * 100, 12),
        ([(1000, 60_000)] * 5, 3),
        ([(1000, 2_000_000)] + [(1000, 1000)] * 20, None),
    ],
    ids=["slow", "somewhat slow", "one interruption", "often slow", "very slow", "one long interruption"],
)
def test_slow_candidate_is_rejected_and_an_interrupted_one_is_not(
    times_us: list[tuple[int, int]], rejected_after: int | None
) -> None:
    rejections: list[int] = []
    rollout = new_rollout(equal_changes())
    monitor = CanaryMonitor(rollout, SHIPPED, rollout.scripts(SHIPPED), lambda reason: rejections.append(monitor.runs))
    command = Command(None, NO_KEYS, ("EVALSHA",))
    for times in times_us:
        assert monitor.take(command, [b"reply", *times]) == b"reply"
    assert rejections == ([] if rejected_after is None else [rejected_after])


def test_candidate_that_is_no_lua_is_rejected(limiter: Limiter) -> None:
    canary = Canary(limiter, {"token_bucket": "this is not Lua"})
    for _ in range(3):
        with suppress(ScriptError):
            limiter.check(PER_CLIENT.by("x"))
    assert canary.rejections
    assert limiter.check(PER_CLIENT.by("x")).allowed


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_concurrent_checks_of_one_key_do_not_differ(limiter: Limiter, algorithm: str) -> None:
    canary = Canary(limiter, equal_changes(), thresholds=CanaryThresholds(max_slowdown=1000))
    limit = Limit(50, MINUTE, algorithm=algorithm, name="shared")
    with ThreadPoolExecutor(16) as pool:
        allowed = [*pool.map(lambda _: limiter.check(limit.by("x")).allowed, range(160))]
    assert sum(allowed) in range(50, 53)  # buckets refill meanwhile
    assert canary.differences == []
    assert canary.rejections == []


def test_copies_of_keys_are_removed(limiter: Limiter, redis7: RedisServer) -> None:
    Canary(limiter, equal_changes())
    reports = Limit(5, MINUTE, algorithm="concurrency", name="reports").by("x")
    limiter.enter(reports, id="a")
    assert limiter.renew(reports, id="a")
    namespace = limiter.engine.store.encoder.own_name("").partition(":")[0]
    assert [key for key in redis7.client().keys(f"*{namespace}*") if "}:" in key] == []


def test_stored_record_is_read_back(limiter: Limiter) -> None:
    with closing(limiter.engine.store.background_client()) as background:
        client = RolloutClient(background)
        assert client.read().rollout is None
        rollout = new_rollout(changed(*WRONG_ANSWER), author="ada")
        assert client.write(rollout, 0)
        assert not client.write(rollout, 0)
        assert client.read().rollout == rollout
        ended = client.end("r1", "rolled back", by="node a", reason="a difference")
        assert ended is not None
        assert (ended.state, ended.ended_by, ended.reason) == ("rolled back", "node a", "a difference")
        assert client.end("r1", "promoted", by="ada", reason="") == ended


def test_damaged_record_is_refused() -> None:
    rollout = new_rollout(changed(*WRONG_ANSWER))
    damaged = ScriptRollout.from_json(rollout.to_json().replace("ticks + 1", "ticks + 2"))
    with pytest.raises(InvalidInput, match="damaged"):
        damaged.scripts(SHIPPED)
    with pytest.raises(InvalidInput, match="malformed"):
        ScriptRollout.from_json(b"[]")


def test_share_of_nodes_is_stable_and_near_the_percentage() -> None:
    rollout = new_rollout(changed(*WRONG_ANSWER), percent=5)
    chosen = [node for node in range(2000) if rollout.includes(f"web-{node}")]
    assert 60 <= len(chosen) <= 140
    assert chosen == [node for node in range(2000) if rollout.includes(f"web-{node}")]
    named = new_rollout(changed(*WRONG_ANSWER), percent=None, nodes=("web-1",))
    assert [named.includes(node) for node in ("web-1", "web-2")] == [True, False]


def test_directory_overrides_sources(tmp_path: Path) -> None:
    (tmp_path / "gcra.lua").write_text("-- another\n" + SHIPPED.sources["gcra"])
    candidate = ScriptSet.read(tmp_path)
    assert list(candidate.changes_from(SHIPPED)) == ["gcra"]
    assert candidate.digest != SHIPPED.digest
    SHIPPED.check_compatible(candidate)
    (tmp_path / "grca.lua").write_text("")
    with pytest.raises(InvalidInput, match=r"grca\.lua is not a script of headgate"):
        ScriptSet.read(tmp_path)


def test_candidate_in_an_unreadable_format_is_refused(tmp_path: Path) -> None:
    (tmp_path / "gcra.lua").write_text(SHIPPED.sources["gcra"])
    (tmp_path / "formats.json").write_text('{"gcra": {"writes": 9, "reads": [1, 9]}}')
    with pytest.raises(
        InvalidInput, match="the candidate writes gcra in format 9, which the other version cannot read"
    ):
        SHIPPED.check_compatible(ScriptSet.read(tmp_path))
    (tmp_path / "formats.json").write_text('{"gcra": 9}')
    with pytest.raises(InvalidInput, match=r"formats\.json must name algorithms"):
        ScriptSet.read(tmp_path)


NOW = 1_800_000_000_000_000


@pytest.mark.parametrize(
    ("used", "is_refused"),
    [
        ({}, False),
        ({"gcra.1": NOW}, False),
        ({"gcra.2": NOW}, True),
        ({"gcra.2": NOW, "gcra.1": NOW - 1_000_000}, False),
        ({"gcra.2": NOW, "gcra.1": NOW - 100_000_000}, True),
        ({"gcra.0": NOW}, False),
        ({"unknown.7": NOW}, False),
    ],
)
def test_newer_format_is_refused_unless_other_nodes_use_the_older_one(used: dict[str, int], is_refused: bool) -> None:
    formats = {"gcra": StoredFormat(1, (1,))}
    if is_refused:
        with pytest.raises(StoreUnavailable, match="counters of gcra in format 2, written by a newer headgate"):
            check_formats(formats, used, NOW, "127.0.0.1:6379")
    else:
        check_formats(formats, used, NOW, "127.0.0.1:6379")
