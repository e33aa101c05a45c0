"""Rollouts of scripts over several processes, with a real store."""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import sys
import time
from contextlib import ExitStack, closing
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest

from headgate import Limit, Limiter
from headgate.cli import main
from headgate.errors import StoreUnavailable
from headgate.local import maintenance
from headgate.stores.redis.rollout import RolloutClient, RolloutView
from headgate.stores.redis.scripts import ScriptSet, StoredFormat
from support import script_node
from support.servers import RedisServer, wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

NODES = ("web-1", "web-2", "web-3")
NEED = "local need, retry = cost * ticks, 0"
WRONG = "if (level - level % ticks) / ticks == 500 then need = level + 1 end"
"""Denies one request in a thousand of each client, which must pass."""
DENIED = "difference 1: answer for limit per-client"
SLOW = "for _ = 1, 20000 do end"
MAX_ROLLBACK_S = 10
LIMIT = Limit(5, timedelta(minutes=1), name="per-client")


class ScriptFleet:
    """Nodes as processes."""

    def __init__(self, url: str, stack: ExitStack) -> None:
        namespace = secrets.token_hex(4)
        self.arguments = ["--store", url, "--namespace", namespace]
        limiter = stack.enter_context(Limiter(url, namespace=namespace))
        self.client = RolloutClient(stack.enter_context(closing(limiter.engine.store.background_client())))
        self._processes = [
            subprocess.Popen(
                [sys.executable, script_node.__file__, url, namespace],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env={**os.environ, "HEADGATE_NODE": node},
            )
            for node in NODES
        ]
        for process in self._processes:
            stack.enter_context(process)
            stack.callback(process.kill)
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
        wait_until(lambda: len(self.view.nodes) == len(NODES), "all nodes to report")

    @property
    def view(self) -> RolloutView:
        return self.client.read()

    @property
    def state(self) -> str:
        rollout = self.view.rollout
        assert rollout is not None
        return rollout.state

    @property
    def roles(self) -> list[str]:
        return sorted([each.status["role"] for each in self.view.nodes])

    def call(self, *words: str) -> int:
        return main(["scripts", *words, *self.arguments])

    def stop(self) -> list[dict[str, Any]]:
        """The counts of each node."""
        return [json.loads(process.communicate(timeout=20)[0]) for process in self._processes]


@pytest.fixture
def fleet(request: pytest.FixtureRequest) -> Iterator[ScriptFleet]:
    """Nodes on one server, or on the deployment that a test asks for."""
    with ExitStack() as stack:
        yield ScriptFleet(request.getfixturevalue(getattr(request, "param", "redis7")).url, stack)


def write_candidate(directory: Path, addition: str) -> str:
    """A directory with a changed script."""
    text = ScriptSet.shipped().sources["token_bucket"]
    assert text.count(NEED) == 1
    (directory / "token_bucket.lua").write_text(text.replace(NEED, f"{NEED} {addition}"))
    return str(directory)


@pytest.mark.parametrize(
    ("fleet", "fault", "reason"),
    [
        ("redis7", SLOW, "slow: "),
        *((name, WRONG, DENIED) for name in ("redis7", "cluster", "sentinel", "sharded")),
    ],
    indirect=["fleet"],
)
def test_faulty_script_is_rolled_back_within_ten_seconds(
    fleet: ScriptFleet, tmp_path: Path, fault: str, reason: str
) -> None:
    begin = time.monotonic()
    assert fleet.call("canary", write_candidate(tmp_path, fault), "--percent", "30") == 0
    wait_until(lambda: fleet.state == "rolled back", "the canary to be rolled back", timeout=MAX_ROLLBACK_S + 10)
    assert time.monotonic() - begin < MAX_ROLLBACK_S
    rollout = fleet.view.rollout
    assert rollout is not None
    (canary,) = [node for node in NODES if rollout.includes(node)]
    assert rollout.ended_by == f"node {canary}"
    assert rollout.reason.startswith(f"{canary}: {reason}")
    wait_until(lambda: fleet.roles == ["stable"] * 3, "all nodes to use the stable version")
    counts = fleet.stop()
    assert min(each["checks"] for each in counts) > 100
    # Not even the canary has answered wrongly: where both versions differ, the answer of the stable one applies.
    assert [(each["wrong"], each["failed"]) for each in counts] == [(0, 0)] * 3


def test_tolerated_faults_are_wrong_answers_on_the_canary_only(fleet: ScriptFleet, tmp_path: Path) -> None:
    """The nodes of these tests judge their answers: they report wrong ones where there are some."""
    tolerant = ["--max-differences", "1000000", "--max-slowdown", "1000"]
    assert fleet.call("canary", write_candidate(tmp_path, WRONG), "--nodes", "web-2", *tolerant) == 0
    wait_until(lambda: max(each.status["differences"] for each in fleet.view.nodes) > 0, "a difference")
    assert fleet.state == "canary"
    assert [each["wrong"] > 0 for each in fleet.stop()] == [False, True, False]


def test_equal_script_is_promoted_and_rolled_back(
    fleet: ScriptFleet, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--nodes", "web-2,web-9", "--max-slowdown", "20", "--reason", "a faster script"]
    assert fleet.call("canary", write_candidate(tmp_path, "-- faster"), *words) == 0
    shown, notes = capsys.readouterr()
    assert notes.splitlines() == ["note: candidate on web-2: 1 of 3 nodes", "note: not reporting: web-9"]
    assert shown.splitlines()[2].endswith(": a faster script")
    wait_until(lambda: fleet.roles == ["canary", "stable", "stable"], "the canary")
    assert fleet.call("canary", str(tmp_path), "--percent", "30") == 1
    assert "is running: promote it or roll it back first" in capsys.readouterr().err
    wait_until(lambda: max(each.status["runs"] for each in fleet.view.nodes) > 100, "comparisons")
    assert fleet.call("promote", "--reason", "no differences") == 0
    wait_until(lambda: fleet.roles == ["promoted"] * 3, "all nodes to use the candidate")
    assert {each.status["digest"] for each in fleet.view.nodes} == {ScriptSet.read(tmp_path).digest}
    assert fleet.call("rollback", "--reason", "enough") == 0
    wait_until(lambda: fleet.roles == ["stable"] * 3, "all nodes to use the stable version")
    capsys.readouterr()
    assert fleet.call("--json") == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["rollout"]["state"] == "rolled back"
    assert shown["rollout"]["reason"] == "enough"
    assert [node["differences"] for node in shown["nodes"]] == [0, 0, 0]
    assert fleet.call() == 0
    assert "token_bucket.lua" in capsys.readouterr().out
    assert [(each["wrong"], each["failed"]) for each in fleet.stop()] == [(0, 0)] * 3


def test_limiter_without_a_gate_takes_part(
    redis7: RedisServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HEADGATE_NODE", "job-1")
    namespace, limit = secrets.token_hex(4), Limit(10**6, timedelta(days=1), burst=1000, name="per-client")
    with ExitStack() as stack:
        one, two = [stack.enter_context(Limiter(redis7.url, namespace=namespace)) for _ in range(2)]
        client = RolloutClient(stack.enter_context(closing(one.engine.store.background_client())))

        def use(limiter: Limiter, reached: Any) -> bool:
            assert limiter.check(limit.by("ada"), cost=0).allowed
            return bool(reached())

        def roles() -> dict[str, str]:
            return {each.node.removeprefix("job-1:"): each.status["role"] for each in client.read().nodes}

        pid = str(os.getpid())
        one.check(limit.by("ada"))
        assert roles() == {}, "a limiter that is used for a moment needs no thread"
        wait_until(lambda: use(one, roles), "the limiter to report")
        (first,) = roles()
        assert first.startswith(pid)
        wait_until(lambda: use(two, lambda: len(roles()) == 2), "the other one to report")
        words = ["--store", redis7.url, "--namespace", namespace]
        assert main(["scripts", "canary", write_candidate(tmp_path, WRONG), "--nodes", "job-1", *words]) == 0
        wait_until(lambda: use(one, lambda: roles()[first] == "canary"), "the canary")

        def is_rolled_back() -> bool:
            rollout = client.read().rollout
            return rollout is not None and rollout.state == "rolled back"

        wait_until(lambda: one.check(limit.by("bob")).allowed and is_rolled_back(), "the rollback", timeout=20)


def test_unused_limiter_stops_to_follow_rollouts(redis7: RedisServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(maintenance, "FIRST_ROLLOUT_POLL_S", 0.0)
    monkeypatch.setattr(maintenance, "ROLLOUT_POLL_S", 0.02)
    with Limiter(redis7.url, namespace=secrets.token_hex(4)) as limiter:
        thread = limiter.engine.maintenance
        assert thread is not None
        limiter.check(LIMIT.by("ada"))
        assert thread._thread is not None
        wait_until(lambda: thread._thread is None, "the end of its thread")
        for _ in range(64):
            limiter.check(LIMIT.by("ada"))
        assert thread._thread is not None


def test_invalid_candidate_is_refused(redis7: RedisServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "gcra.lua").write_text("this is not Lua")
    words = ["--store", redis7.url, "--namespace", secrets.token_hex(4)]
    assert main(["scripts", "canary", str(tmp_path), "--percent", "5", *words]) == 2
    assert "the candidate is not valid: check_one with gcra" in capsys.readouterr().err
    assert main(["scripts", "promote", *words]) == 1
    assert "there is no rollout of scripts" in capsys.readouterr().err
    assert main(["scripts", "export", str(tmp_path)]) == 0
    assert main(["scripts", "canary", str(tmp_path), "--percent", "5", *words]) == 2
    assert "contains the current version" in capsys.readouterr().err


def test_store_of_a_newer_version_is_refused_until_the_downgrade_is_accepted(
    remote_url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    namespace = secrets.token_hex(4)
    with ExitStack() as stack:
        limiter = stack.enter_context(Limiter(remote_url, namespace=namespace, on_failure="closed", budget=1))
        newer = RolloutClient(stack.enter_context(closing(limiter.engine.store.background_client())))
        newer.poll(-1, "new-1", "{}", {"gcra": StoredFormat(9, (9,))})
        limiter.engine.join_fleet()
        wait_until(lambda: "format 9, written by a newer headgate" in (limiter.health().reason or ""), "the refusal")
        assert not limiter.check(LIMIT.by("ada")).allowed
        assert main(["scripts", "downgrade", "--store", remote_url, "--namespace", namespace]) == 0
        assert "forgot the formats gcra.9" in capsys.readouterr().out
        wait_until(lambda: all(shard.ready for shard in limiter.health().shards), "the store to be used")
        assert limiter.check(LIMIT.by("ada")).allowed


def test_limiter_without_a_gate_refuses_a_store_of_a_newer_version(
    redis7: RedisServer, capsys: pytest.CaptureFixture[str]
) -> None:
    namespace = secrets.token_hex(4)
    with (
        Limiter(redis7.url, namespace=namespace) as limiter,
        closing(limiter.engine.store.background_client()) as client,
    ):
        RolloutClient(client).poll(-1, "new-1", "{}", {"gcra": StoredFormat(9, (9,))})

        def refusal() -> str:
            try:
                limiter.check(LIMIT.by("ada"))
            except StoreUnavailable as error:
                return str(error)
            return ""

        wait_until(lambda: "format 9, written by a newer headgate" in refusal(), "the refusal")
        assert main(["scripts", "downgrade", "--store", redis7.url, "--namespace", namespace]) == 0
        assert "forgot the formats gcra.9" in capsys.readouterr().out
        wait_until(lambda: not refusal(), "the store to be used")
