"""Automatic rollback and promotion, from the requests of nodes to the version in the config store."""

from __future__ import annotations

import logging
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest

from headgate.control.canaries.evaluator import AUTHOR
from headgate.control.config import CanarySpec
from headgate.testing import FakeRequest
from support.canary_fleet import BY, CanaryFleet

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

STABLE = "limits: [{name: all, by: ip, bucket: 1000/minute}]\n"
SAME = "limits: [{name: all, by: ip, bucket: 900/minute}]\n"
STRICT = "limits: [{name: all, by: ip, bucket: 2/minute}]\n"
ON_WEB_1 = CanarySpec(nodes=("web-1",))


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[CanaryFleet]:
    fleet = CanaryFleet(f"sqlite:///{tmp_path}/config.db", STABLE, "web-1", "web-2", "web-3")
    yield fleet
    fleet.close()


def test_candidate_that_rejects_more_is_rolled_back(fleet: CanaryFleet, caplog: pytest.LogCaptureFixture) -> None:
    fleet.run(3)
    fleet.store.start_canary(STRICT, ON_WEB_1, **BY)
    with caplog.at_level(logging.WARNING):
        for _ in range(12):
            fleet.run(1)
            if fleet.evaluator.evaluate() is None:
                break
    row = fleet.store.canary()
    assert row is not None
    assert (row.state, row.ended_by) == ("rolled back", AUTHOR)
    assert (row.end_reason or "").startswith("rejections ")
    assert row.ended_us is not None
    assert row.ended_us - row.begun_us <= 8_000_000
    assert "canary of policy.yaml rolled back: rejections" in caplog.text
    assert [each.author for each in fleet.store.history()] == [AUTHOR, "ada", "ada"]
    fleet.run(1)
    assert [gate.policy_canary for gate in fleet.gates.values()] == [None] * 3
    gate = fleet.gates["web-1"].active_policy.snapshot.policy.rules[0]
    assert gate.limit is not None
    assert gate.limit.quota == 1000


@pytest.mark.parametrize(
    ("stable", "candidate", "with_candidate", "afterwards"),
    [
        # A window with other numbers, and a bucket with the same: usage is kept.
        ("5/day, fixed_window", "3/day, fixed_window", [False], [True, True, False]),
        ("5/day", "5/day, token_bucket", [True, True, False], [False]),
        # A bucket with other numbers has counters of its own while the canary runs.
        ("5/day", "3/day", [True, True, True, False], [True, True, False]),
    ],
)
def test_usage_is_kept_unless_a_bucket_changes(
    fleet: CanaryFleet, stable: str, candidate: str, with_candidate: list[bool], afterwards: list[bool]
) -> None:
    gate = fleet.gates["web-1"]

    def admitted(requests: int) -> list[bool]:
        gate.policy_watcher.look()
        return [gate.admit(FakeRequest()).allowed for _ in range(requests)]

    fleet.store.put_policy(f"limits: [{{name: all, by: ip, bucket: '{stable}'}}]", **BY)
    assert admitted(3) == [True] * 3
    fleet.store.start_canary(f"limits: [{{name: all, by: ip, bucket: '{candidate}'}}]", ON_WEB_1, **BY)
    assert admitted(len(with_candidate)) == with_candidate
    fleet.store.rollback_canary(**BY)
    assert admitted(len(afterwards)) == afterwards


def test_harmless_candidate_keeps_running(fleet: CanaryFleet) -> None:
    fleet.store.start_canary(SAME, ON_WEB_1, **BY)
    fleet.run(6)
    found = fleet.compare()
    assert found.verdict == "within thresholds"
    assert (found.candidate.nodes, found.stable.nodes) == (1, 2)
    assert found.candidate.requests == 100 * found.seconds
    assert found.stable.requests == 200 * found.seconds
    assert fleet.state == "running"


def test_too_few_requests_neither_roll_back_nor_promote(fleet: CanaryFleet) -> None:
    spec = CanarySpec(nodes=("web-1",), run_for=timedelta(seconds=5), promote=True)
    fleet.store.start_canary(SAME, spec, **BY)
    fleet.run(20, requests=1)
    assert fleet.compare().verdict == "too few requests"
    assert fleet.state == "running"
    fleet.run(5)
    fleet.compare()
    assert fleet.state == "promoted"


def test_candidate_is_promoted_after_its_time_if_asked(fleet: CanaryFleet) -> None:
    spec = CanarySpec(percent=10, run_for=timedelta(seconds=10), promote=True)
    fleet.store.start_canary(SAME, spec, known_nodes=[*fleet.gates], **BY)
    fleet.run(8)
    assert fleet.compare().verdict == "within thresholds"
    assert fleet.state == "running"
    fleet.run(2)
    fleet.compare()
    row = fleet.store.canary()
    assert row is not None
    assert (row.state, row.ended_by) == ("promoted", AUTHOR)
    document = fleet.store.document()
    assert document is not None
    assert document.text == SAME


def test_canary_without_promotion_runs_on_after_its_time(fleet: CanaryFleet) -> None:
    fleet.store.start_canary(SAME, CanarySpec(nodes=("web-1",), run_for=timedelta(seconds=3)), **BY)
    fleet.run(8)
    assert fleet.compare().verdict == "within thresholds"
    assert fleet.state == "running"


def test_candidate_that_became_invalid_is_rolled_back_instead_of_promoted(fleet: CanaryFleet) -> None:
    spec = CanarySpec(nodes=("web-1",), run_for=timedelta(seconds=5), promote=True)
    fleet.store.start_canary(SAME.replace("all", "every"), spec, **BY)
    fleet.run(6)
    fleet.store.override(("ip", "203.0.113.9"), "5/minute", limit="all", **BY)  # the candidate has no such limit
    fleet.compare()
    row = fleet.store.canary()
    assert row is not None
    assert row.state == "rolled back"
    assert "the candidate became invalid" in (row.end_reason or "")


def test_candidate_that_a_node_cannot_apply_is_rolled_back(fleet: CanaryFleet, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(policy: Any) -> None:
        if policy.rules[0].limit.quota == 900:
            raise KeyError("an old library")

    watcher = fleet.gates["web-1"].policy_watcher
    activate = watcher._make
    monkeypatch.setattr(watcher, "_make", lambda policy: (fail(policy), activate(policy))[1])
    fleet.store.start_canary(SAME, ON_WEB_1, **BY)
    fleet.run(2)
    found = fleet.compare()
    assert found.verdict == "invalid candidate"
    assert fleet.state == "rolled back"
    assert fleet.evaluator.evaluate() is None


def test_nodes_report_their_role(fleet: CanaryFleet) -> None:
    fleet.run(1)
    assert {node.canary for node in fleet.aggregator.gather().nodes} == {None}
    assert fleet.aggregator.gather().canary_nodes == ()
    fleet.store.start_canary(SAME, ON_WEB_1, **BY)
    fleet.run(5)
    roles = {node.name.partition(":")[0]: node.canary for node in fleet.aggregator.gather().nodes}
    assert roles == {"web-1": "candidate", "web-2": "stable", "web-3": "stable"}
    # The second in which the candidate was applied is not compared.
    assert {len(node.seconds) for node in fleet.aggregator.gather().canary_nodes} == {2}


def test_evaluator_survives_an_unavailable_config_store(
    fleet: CanaryFleet, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    fleet.store.start_canary(SAME, ON_WEB_1, **BY)
    (tmp_path / "config.db").rename(tmp_path / "away.db")
    with caplog.at_level(logging.WARNING):
        assert fleet.evaluator.try_evaluate() is None
        assert fleet.evaluator.try_evaluate() is None
    assert caplog.text.count("the canary cannot be evaluated") == 1
    (tmp_path / "away.db").rename(tmp_path / "config.db")
    assert fleet.evaluator.try_evaluate() is not None
