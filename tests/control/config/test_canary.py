"""Canaries in the config store: one at a time, on a stable share of nodes, ended once by promotion or rollback."""

from __future__ import annotations

from collections import Counter
from contextlib import closing
from datetime import timedelta
from threading import Barrier, Thread
from typing import TYPE_CHECKING, Any

import pytest
from sqlalchemy import create_engine, inspect

from headgate.control.config import CanaryRow, CanarySpec, ConfigStore, Conflict
from headgate.control.config.canary import CanaryPart, canary_row
from headgate.control.config.engine import write_transaction
from headgate.control.config.migrations import VERSION_TABLE, migrate
from headgate.control.config.rows import PolicyDocument
from headgate.control.config.watcher import ConfigWatcher
from headgate.errors import InvalidConfiguration, InvalidInput, InvalidPolicy

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from sqlalchemy.engine import Connection

    from headgate.policy.model import Policy

BY: Any = {"author": "ada", "reason": "test"}
STABLE = "limits: [{name: search, by: tenant, bucket: 10/minute}]\n"
CANDIDATE = "limits: [{name: search, by: tenant, bucket: 5/minute}]\n"
ON_WEB_1 = CanarySpec(nodes=("web-1",))


@pytest.fixture
def store(empty_store_url: str) -> Iterator[ConfigStore]:
    store = ConfigStore(empty_store_url)
    store.put_policy(STABLE, **BY)
    yield store
    store.close()


@pytest.fixture
def file_store(tmp_path: Path) -> Iterator[ConfigStore]:
    """A store in a file, for what does not depend on the database."""
    store = ConfigStore(f"sqlite:///{tmp_path}/config.db")
    store.put_policy(STABLE, **BY)
    yield store
    store.close()


def quota(policy: Policy) -> int:
    assert policy.rules[0].limit is not None
    return policy.rules[0].limit.quota


def watch(store: ConfigStore, node: str, **options: Any) -> ConfigWatcher[int]:
    url = store.engine.url.render_as_string(hide_password=False)
    return ConfigWatcher(url, quota, node=node, every=None, **options)


def state(store: ConfigStore) -> str:
    row = store.canary()
    assert row is not None
    return row.state


def test_only_nodes_of_the_canary_apply_the_candidate(store: ConfigStore) -> None:
    one, two = watch(store, "web-1"), watch(store, "web-2")
    version = store.start_canary(CANDIDATE, ON_WEB_1, **BY)
    assert version is not None
    assert version.what == "started canary of policy.yaml on nodes web-1"
    assert (one.look(), two.look()) == (True, True)
    row = store.canary()
    assert row is not None
    assert (one.current, one.canary) == (5, CanaryPart(row.canary, "candidate"))
    assert (two.current, two.canary) == (10, CanaryPart(row.canary, "stable"))
    assert one.version == two.version == "2"
    assert quota(store.policy()) == 10


def test_promotion_makes_the_candidate_the_document_of_all_nodes(store: ConfigStore) -> None:
    store.start_canary(CANDIDATE, ON_WEB_1, **BY)
    one, two = watch(store, "web-1"), watch(store, "web-2")
    promoted = store.promote_canary(author="eve", reason="it works")
    assert promoted is not None
    one.look()
    two.look()
    assert (one.current, two.current) == (5, 5)
    assert (one.canary, two.canary) == (None, None)
    row = store.canary()
    assert row is not None
    assert (row.state, row.ended_by, row.end_reason) == ("promoted", "eve", "it works")
    assert store.document() == PolicyDocument(CANDIDATE, "yaml", "policy.yaml")


def test_rollback_returns_all_nodes_to_the_document(store: ConfigStore) -> None:
    store.start_canary(CANDIDATE, ON_WEB_1, **BY)
    one, two = watch(store, "web-1"), watch(store, "web-2")
    assert (one.current, two.current) == (5, 10)
    assert store.rollback_canary(author="eve", reason="too strict") is not None
    one.look()
    two.look()
    assert (one.current, two.current) == (10, 10)
    assert (one.canary, state(store)) == (None, "rolled back")


def test_difference_of_a_canary_shows_its_candidate_and_its_end(file_store: ConfigStore) -> None:
    file_store.start_canary(CANDIDATE, ON_WEB_1, **BY)
    file_store.rollback_canary(**BY)
    (started,), (ended,) = file_store.diff(1, 2), file_store.diff(2, 3)
    assert started.lines[1:] == ["+canary of policy.yaml on nodes web-1: running", f"+{CANDIDATE.strip()}"]
    assert ended.what == "rolled back canary of policy.yaml on nodes web-1"
    assert ended.lines[1:3] == [
        "-canary of policy.yaml on nodes web-1: running", "+canary of policy.yaml on nodes web-1: rolled back",
    ]  # fmt: skip


def test_canary_ends_once(store: ConfigStore) -> None:
    store.start_canary(CANDIDATE, ON_WEB_1, **BY)
    row, barrier = store.canary(), Barrier(4)
    assert row is not None
    results: list[Any] = []

    def end() -> None:
        barrier.wait()
        results.append(store.rollback_canary(row.canary, **BY))

    threads = [Thread(target=end) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert Counter(each is None for each in results) == {True: 3, False: 1}
    assert store.version == 3
    assert store.promote_canary(**BY) is None
    assert quota(store.policy()) == 10


def test_end_of_another_canary_has_no_effect(file_store: ConfigStore) -> None:
    file_store.start_canary(CANDIDATE, ON_WEB_1, **BY)
    assert file_store.rollback_canary("another", **BY) is None
    assert state(file_store) == "running"


def test_only_one_canary_runs_at_a_time(store: ConfigStore) -> None:
    store.start_canary(CANDIDATE, ON_WEB_1, **BY)
    with pytest.raises(InvalidInput, match=r"a canary of policy\.yaml is running; promote it or roll it back first"):
        store.start_canary(CANDIDATE + "# 2\n", ON_WEB_1, **BY)
    store.rollback_canary(**BY)
    assert store.start_canary(CANDIDATE, CanarySpec(percent=10), **BY) is not None


def test_document_does_not_change_under_a_canary(file_store: ConfigStore) -> None:
    file_store.start_canary(CANDIDATE, ON_WEB_1, **BY)
    with pytest.raises(InvalidInput, match=r"a canary of .* is running"):
        file_store.put_policy(STABLE + "# changed\n", **BY)
    assert file_store.override(("tenant", "acme"), "50/minute", limit="search", **BY) is not None


def test_invalid_candidate_is_refused(file_store: ConfigStore) -> None:
    file_store.override(("tenant", "acme"), "50/minute", limit="search", **BY)
    for text in ("limits: [{bucket: none}]", CANDIDATE.replace("search", "find")):  # the override is on "search"
        with pytest.raises(InvalidPolicy):
            file_store.start_canary(text, ON_WEB_1, **BY)
    assert file_store.canary() is None
    with pytest.raises(InvalidInput, match="is the current policy document"):
        file_store.start_canary(STABLE, ON_WEB_1, **BY)


def test_candidate_with_a_raw_api_key_is_refused(file_store: ConfigStore) -> None:
    with pytest.raises(InvalidInput):
        file_store.start_canary(STABLE + "clients: [{api_key: sk_live_0123456789abcdef}]\n", ON_WEB_1, **BY)


def test_candidate_based_on_another_document_conflicts(file_store: ConfigStore) -> None:
    file_store.put_policy(STABLE + "# changed\n", **BY)
    with pytest.raises(Conflict, match="was changed in version 2"):
        file_store.start_canary(CANDIDATE, ON_WEB_1, based_on=1, **BY)


def test_canary_needs_a_document(empty_store_url: str) -> None:
    store = ConfigStore(empty_store_url)
    with pytest.raises(InvalidInput, match="there is no policy document"):
        store.start_canary(CANDIDATE, ON_WEB_1, **BY)
    store.close()


def test_rollback_to_a_version_ends_a_canary_and_restarts_none(store: ConfigStore) -> None:
    store.start_canary(CANDIDATE, ON_WEB_1, **BY)
    store.rollback(1, **BY)
    assert state(store) == "rolled back"
    store.rollback(2, **BY)
    assert state(store) == "rolled back"
    store.start_canary(CANDIDATE, ON_WEB_1, **BY)
    store.set_tier("pro", "search", "20/minute", **BY)
    store.rollback(1, sections=["tiers"], **BY)
    assert state(store) == "running"
    with pytest.raises(InvalidInput, match="unknown sections canaries"):
        store.rollback(1, sections=["canaries"], **BY)


def test_other_changes_reach_nodes_of_both_roles(file_store: ConfigStore) -> None:
    file_store.start_canary(CANDIDATE, ON_WEB_1, **BY)
    url = file_store.engine.url.render_as_string()
    nodes = [ConfigWatcher(url, len_overrides, node=node, every=None) for node in ("web-1", "web-2")]
    file_store.override(("tenant", "acme"), "50/minute", limit="search", **BY)
    for node in nodes:
        node.look()
    assert [node.current for node in nodes] == [(5, 1), (10, 1)]


def len_overrides(policy: Policy) -> tuple[int, int]:
    return quota(policy), len(policy.overrides)


def test_candidate_that_a_node_cannot_apply_is_reported_and_the_document_stays(file_store: ConfigStore) -> None:
    def make(policy: Policy) -> int:
        if quota(policy) == 5:
            raise InvalidConfiguration("no secret")
        return quota(policy)

    watcher = ConfigWatcher(file_store.engine.url.render_as_string(), make, node="web-1", every=None)
    file_store.start_canary(CANDIDATE, ON_WEB_1, **BY)
    watcher.look()
    row = file_store.canary()
    assert row is not None
    assert (watcher.current, watcher.error) == (10, None)
    assert watcher.canary == CanaryPart(row.canary, "stable", "no secret")
    file_store.set_tier("pro", "search", "20/minute", **BY)  # the whole policy is composed again
    assert watcher.look()
    assert watcher.canary == CanaryPart(row.canary, "stable", "no secret")


def test_candidate_that_another_change_makes_invalid_is_left(file_store: ConfigStore) -> None:
    file_store.start_canary(CANDIDATE.replace("search", "find"), ON_WEB_1, **BY)
    watcher = watch(file_store, "web-1")
    assert watcher.current == 5
    file_store.override(("tenant", "acme"), "50/minute", limit="search", **BY)
    assert watcher.look()
    assert watcher.current == 10
    assert watcher.canary is not None
    assert watcher.canary.role == "stable"
    assert "search" in (watcher.canary.error or "")


def test_node_keeps_its_role_without_the_config_store(file_store: ConfigStore, tmp_path: Path) -> None:
    file_store.start_canary(CANDIDATE, ON_WEB_1, **BY)
    before = watch(file_store, "web-1", cache=tmp_path / "copy.db")
    (tmp_path / "config.db").rename(tmp_path / "away.db")
    before.look()
    assert (before.current, before.canary and before.canary.role) == (5, "candidate")
    after = watch(file_store, "web-1", cache=tmp_path / "copy.db")
    assert (after.source, after.current, after.canary and after.canary.role) == ("copy", 5, "candidate")


def columns_by_table(connection: Connection) -> dict[str, set[str]]:
    found = inspect(connection)
    names = [name for name in found.get_table_names() if name.startswith("headgate_")]
    return {name: {column["name"] for column in found.get_columns(name)} for name in names}


def test_store_of_an_earlier_revision_is_upgraded(store: ConfigStore) -> None:
    with create_engine("sqlite://").begin() as first:
        migrate(first, "0005")
        earlier = columns_by_table(first)
    with write_transaction(store.engine) as connection:
        for table, columns in columns_by_table(connection).items():
            if table not in earlier:
                connection.exec_driver_sql(f"DROP TABLE {table}")
                continue
            for column in columns - earlier[table]:
                connection.exec_driver_sql(f"ALTER TABLE {table} DROP COLUMN {column}")
        connection.exec_driver_sql(f"UPDATE {VERSION_TABLE} SET version_num = '0005'")
    with closing(ConfigStore(store.engine.url.render_as_string(hide_password=False))) as upgraded:
        assert quota(upgraded.policy()) == 10
        assert upgraded.start_canary(CANDIDATE, ON_WEB_1, **BY) is not None


# -------------------------------------------------------------------------------------------- shares


def started(spec: CanarySpec, *known: str) -> CanaryRow:
    document = PolicyDocument(CANDIDATE, "yaml", "policy.yaml")
    return canary_row(document, spec, known, begun_us=0, author="ada", reason="test")


@pytest.mark.parametrize(
    ("nodes", "percent", "chosen"), [(3, 10, 1), (2, 90, 1), (1, 10, 1), (40, 25, 10), (4, 100, 4)]
)
def test_share_of_the_known_nodes_is_as_near_as_possible(nodes: int, percent: int, chosen: int) -> None:
    names = [f"web-{number}" for number in range(nodes)]
    row = started(CanarySpec(percent=percent), *names)
    assert sum(map(row.includes, names)) == chosen


def test_share_of_unknown_nodes_is_near_the_percentage() -> None:
    row = started(CanarySpec(percent=30))._replace(canary="0badcafe")
    names = [f"node-{number}" for number in range(10_000)]
    chosen = [name for name in names if row.includes(name)]
    assert 2_850 <= len(chosen) <= 3_150
    wider = row._replace(percent=60)
    assert all(map(wider.includes, chosen))


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"percent": 10, "nodes": ("a",)},
        {"percent": 0},
        {"percent": 101},
        {"percent": True},
        {"nodes": ("a,b",)},
        {"nodes": ("",)},
        {"percent": 5, "max_rejections": -1},
        {"percent": 5, "max_errors": float("nan")},
        {"percent": 5, "max_latency": 0.5},
        {"percent": 5, "promote": True},
        {"percent": 5, "run_for": timedelta(0)},
        {"percent": 5, "run_for": timedelta(days=31)},
    ],
)
def test_impossible_canary_is_refused(given: dict[str, Any]) -> None:
    with pytest.raises(InvalidInput):
        CanarySpec(**given)
