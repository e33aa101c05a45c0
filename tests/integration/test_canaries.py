"""Canaries on several processes, with a real store and a real config store."""

from __future__ import annotations

import json
import subprocess
import sys
from contextlib import ExitStack, closing
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest

from headgate.control.canaries.evaluator import AUTHOR, CanaryEvaluator
from headgate.control.config import CanarySpec, ConfigStore
from headgate.control.config.watcher import ConfigSource
from headgate.gate.gate import Gate
from headgate.telemetry.fleet.aggregator import FleetAggregator
from headgate.telemetry.fleet.status_store import open_status_store
from headgate.testing import FakeClock, FakeRequest
from support import canary_node
from support.servers import RedisServer, wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from headgate.telemetry.fleet.model import FleetStatus

BY: Any = {"author": "ada", "reason": "test"}
STABLE = "limits: [{name: all, by: ip, bucket: 100000/minute}]\n"
HARMLESS = "limits: [{name: all, by: ip, bucket: 90000/minute}]\n"
STRICT = "limits: [{name: all, by: ip, bucket: 100000/minute}, {name: mistake, by: ip, bucket: 1/minute}]\n"
NODES = ("web-1", "web-2", "web-3")


class Fleet:
    """Nodes as processes; they evaluate a canary by themselves, without an admin server."""

    def __init__(self, config_url: str, store_url: str, namespace: str, stack: ExitStack) -> None:
        self.store = stack.enter_context(closing(ConfigStore(config_url)))
        self.store.put_policy(STABLE, **BY)
        status_store = stack.enter_context(closing(open_status_store(store_url, namespace=namespace)))
        self.aggregator = FleetAggregator(status_store)
        arguments = [config_url, store_url, namespace]
        self._processes = [
            subprocess.Popen(
                [sys.executable, canary_node.__file__, *arguments, node],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            for node in NODES
        ]
        for process in self._processes:
            stack.enter_context(process)
            stack.callback(process.kill)
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"

    def gather(self) -> FleetStatus:
        return self.aggregator.gather()

    @property
    def roles(self) -> dict[str, str | None]:
        return {node.name.partition(":")[0]: node.canary for node in self.gather().nodes}

    @property
    def state(self) -> str:
        row = self.store.canary()
        assert row is not None
        return row.state

    def stop(self) -> dict[str, dict[str, int]]:
        """The outcomes of all requests, by node."""
        outputs = [process.communicate(timeout=20)[0] for process in self._processes]
        return {node: json.loads(output) for node, output in zip(NODES, outputs, strict=True)}


@pytest.fixture
def fleet(config_url: str, redis7: RedisServer, unique: str) -> Iterator[Fleet]:
    with ExitStack() as stack:
        yield Fleet(config_url, redis7.url, unique, stack)


def test_faulty_candidate_is_rolled_back_by_its_node_and_harms_no_other(fleet: Fleet) -> None:
    wait_until(lambda: len(fleet.roles) == 3, "all nodes to report")
    fleet.store.start_canary(STRICT, CanarySpec(percent=10), known_nodes=NODES, **BY)
    wait_until(lambda: fleet.state == "rolled back", "the canary to be rolled back")
    row = fleet.store.canary()
    assert row is not None
    assert row.ended_by == AUTHOR
    assert (row.end_reason or "").startswith("rejections ")
    assert [each.author for each in fleet.store.history()] == [AUTHOR, "ada", "ada"]
    wait_until(lambda: {*fleet.roles.values()} == {None}, "all nodes to learn of the rollback")
    outcomes = fleet.stop()
    (canary,) = [node for node in NODES if row.includes(node)]
    assert outcomes[canary]["candidate denied"] > 100
    for node in NODES:
        denied = {name: count for name, count in outcomes[node].items() if name.endswith("denied")}
        assert (node == canary) or not denied, f"{node}: {denied}"
        assert outcomes[node]["alone allowed"] > 0


def test_harmless_candidate_is_promoted_to_all_nodes(fleet: Fleet) -> None:
    spec = CanarySpec(nodes=("web-2",), run_for=timedelta(seconds=4), promote=True)
    fleet.store.start_canary(HARMLESS, spec, **BY)
    wait_until(lambda: fleet.roles == {"web-1": "stable", "web-2": "candidate", "web-3": "stable"}, "the roles")
    # The evaluators of the node and of an admin server at the same time.
    with closing(ConfigStore(fleet.store.engine.url.render_as_string(hide_password=False))) as other:
        admin = CanaryEvaluator(other, fleet.aggregator).start()
        wait_until(lambda: fleet.state == "promoted", "the canary to be promoted")
        admin.stop()
    document = fleet.store.document()
    assert document is not None
    assert document.text == HARMLESS
    assert [each.author for each in fleet.store.history()] == [AUTHOR, "ada", "ada"]
    wait_until(lambda: {*fleet.roles.values()} == {None}, "all nodes to learn of the promotion")
    for outcomes in fleet.stop().values():
        assert not [name for name in outcomes if name.endswith("denied")]


@pytest.mark.parametrize("algorithm", ["token_bucket", "gcra", "leaky_bucket"])
@pytest.mark.parametrize("quotas", [(10, 9), (10, 2), (9, 10)])
def test_canary_does_not_change_what_other_nodes_admit(
    tmp_path: Path, redis7: RedisServer, unique: str, algorithm: str, quotas: tuple[int, int]
) -> None:
    url, clock = f"sqlite:///{tmp_path}/config.db", FakeClock(1_763_251_200_000_000)
    documents = [f"limits: [{{name: all, by: ip, bucket: '{quota}/day, {algorithm}'}}]" for quota in quotas]
    with ExitStack() as stack:
        store = stack.enter_context(closing(ConfigStore(url)))
        store.put_policy(documents[0], **BY)
        gates = []
        for node in ("web-1", "web-2"):
            source: Any = ConfigSource(url, node=node)
            options: Any = {"clock": clock, "namespace": unique, "budget": 1.0, "reload_every": None}
            gates.append(stack.enter_context(closing(Gate(source, redis7.url, **options))))

        def admitted(requests: int) -> list[int]:
            """The number of requests that each node admits, one after the other."""
            for gate in gates:
                gate.policy_watcher.look()
            admissions = [[gate.admit(FakeRequest()).allowed for gate in gates] for _ in range(requests)]
            return [sum(each) for each in zip(*admissions, strict=True)]

        store.start_canary(documents[1], CanarySpec(nodes=("web-2",)), **BY)
        assert admitted(30) == [*quotas]
        store.rollback_canary(**BY)
        assert admitted(5) == [0, 0]
        store.start_canary(documents[1], CanarySpec(nodes=("web-2",)), **BY)
        store.promote_canary(**BY)
        assert sum(admitted(5)) <= max(0, quotas[1] - quotas[0])  # what was used before is kept
