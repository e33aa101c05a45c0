"""How changes reach nodes: within a second, by polling at the latest, and not at all while the config store is down."""

from __future__ import annotations

import gc
import logging
import os
import shutil
import sqlite3
import sys
import threading
import time
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from headgate._pace import low_priority
from headgate.control.config import ConfigStore, ConfigUnavailable, OverrideRow, Put, watcher
from headgate.control.config.watcher import ConfigSource, ConfigWatcher
from headgate.errors import InvalidConfiguration, InvalidPolicy
from headgate.gate.gate import Gate
from headgate.policy import read
from headgate.testing import FakeRequest
from support.postgres import PostgresServer
from support.servers import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator

    from headgate.policy.model import Policy

BY = {"author": "ada", "reason": "test"}
POLICY = "limits: [{name: search, by: tenant, bucket: 10/minute}, {name: strangers, by: ip, bucket: 100/minute}]\n"


def quota(policy: Policy) -> int:
    assert policy.rules[0].limit is not None
    return policy.rules[0].limit.quota


def overridden(policy: Policy) -> dict[str, int]:
    return {override.identity.value: override.limit.quota for override in policy.overrides}


@pytest.fixture
def store(config_url: str) -> Iterator[ConfigStore]:
    store = ConfigStore(config_url)
    store.put_policy(POLICY, **BY)
    yield store
    store.close()


@pytest.fixture
def files(tmp_path: Path) -> ConfigStore:
    """A store in a file, for what does not depend on the kind of store."""
    store = ConfigStore(f"sqlite:///{tmp_path}/config.db")
    store.put_policy(POLICY, **BY)
    return store


def url_of(store: ConfigStore) -> str:
    return store.engine.url.render_as_string(hide_password=False).replace("+psycopg", "")


def follow(store: ConfigStore, make: Any = overridden, **options: Any) -> ConfigWatcher[Any]:
    return ConfigWatcher(url_of(store), make, **{"every": None, **options})


def threads_of(store: ConfigStore) -> list[threading.Thread]:
    return [each for each in threading.enumerate() if url_of(store).partition("?")[0] in each.name]


# ------------------------------------------------------------------ changes arrive


def test_change_arrives_within_a_second(store: ConfigStore) -> None:
    following = follow(store, every=1.0)
    took = []
    for number in range(3):
        store.override(("tenant", f"t{number}"), "5/hour", limit="search", **BY)
        began = time.monotonic()
        wait_until(lambda number=number: f"t{number}" in following.current, "the override to arrive")  # type: ignore[misc]
        took.append(time.monotonic() - began)
    following.close()
    assert min(took) < 1.0, took  # the others may have met a busy machine
    assert following.version == "4"


def test_missed_notifications_are_found_by_polling(
    postgres: PostgresServer,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(watcher, "NOTIFY_CHANNEL", "elsewhere")
    monkeypatch.setattr(watcher, "POLL_INTERVAL_S", 0.3)
    store = ConfigStore(postgres.fresh_url())
    store.put_policy(POLICY, **BY)
    following = follow(store, quota, every=1.0)
    store.put_policy(POLICY.replace("10/", "20/"), **BY)
    wait_until(lambda: following.current == 20, "the next poll")
    following.close()
    store.close()


def test_waiting_node_is_up_to_date(store: ConfigStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watcher, "VERSION_CHECK_INTERVAL_S", 0.1)
    following = follow(store, every=1.0)
    looks: list[int] = []
    monkeypatch.setattr(following, "look", lambda: looks.append(following.checked_us))
    for _ in range(3):
        before_us = following.checked_us
        wait_until(
            lambda before_us=before_us: following.checked_us > before_us, "the store to be known to have nothing newer"
        )
    assert len(looks) <= 1, "only who has just begun to listen looks"
    following.error = ConfigUnavailable("away")
    before_us = following.checked_us
    time.sleep(0.5)
    assert following.checked_us == before_us, "who could not look does not know what is newest"
    following.close()


def test_missed_postgresql_notifications_are_polled(
    postgres: PostgresServer,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(watcher, "NOTIFY_CHANNEL", "elsewhere")
    monkeypatch.setattr(watcher, "VERSION_CHECK_INTERVAL_S", 0.1)
    store = ConfigStore(postgres.fresh_url())
    store.put_policy(POLICY, **BY)
    following = follow(store, quota, every=1.0)
    time.sleep(0.5)
    store.put_policy(POLICY.replace("10/", "20/"), **BY)
    wait_until(lambda: following.current == 20, "the next question")
    following.close()
    store.close()


def test_another_file_in_the_place_of_a_store_is_noticed(files: ConfigStore, tmp_path: Path) -> None:
    other = tmp_path / "backup.db"
    following = follow(files, quota, every=1.0)
    with closing(ConfigStore(f"sqlite:///{other}")) as backup:
        backup.put_policy(POLICY.replace("10/", "30/"), **BY)
    with closing(sqlite3.connect(other)) as connection:
        connection.execute("PRAGMA journal_mode = delete")  # all of it is in one file
    time.sleep(0.5)
    other.replace(Path(url_of(files).removeprefix("sqlite:///")))
    wait_until(lambda: following.current == 30, "the file that was put back")
    following.close()


@pytest.mark.parametrize("is_whole", [False, True])
def test_node_holds_what_the_store_would_compile(store: ConfigStore, is_whole: bool) -> None:
    following = follow(store, lambda policy: policy)
    store.override(("tenant", "acme"), "5/hour", limit="search", **BY)
    store.override(("tenant", "hooli"), "6/hour", limit="search", **BY)
    store.block(("ip", "203.0.113.0/24"), **BY)
    assert following.look()
    store.remove_override(1, **BY)
    store.unblock(("ip", "203.0.113.0/24"), **BY)
    store.override(("tenant", "hooli"), "7/hour", limit="search", id=2, **BY)
    if is_whole:
        store.set_tier("pro", "search", "500/minute", **BY)
        store.assign(("tenant", "hooli"), "pro", **BY)
    assert following.look()
    assert following.current == store.policy()
    assert not following.look()


def test_gate_lives_by_the_store(files: ConfigStore) -> None:
    gate = Gate(read("limits: [{by: ip, bucket: 1/hour}]"), identities={"tenant": lambda _: "acme"})
    following = ConfigSource(url_of(files)).follow(gate._activate, every=None)

    def passes() -> bool:
        return gate.admit(FakeRequest(peer="192.0.2.7")).allowed

    assert [passes() for _ in range(11)] == [True] * 10 + [False]
    files.override(("tenant", "acme"), "12/minute", limit="search", **BY)
    following.look()
    assert [limit.quota for limit in (each.limit for each in gate.active_policy.snapshot.policy.overrides)] == [12]
    files.block(("ip", "192.0.2.0/24"), **BY)
    following.look()
    assert not passes()
    gate.close()


def test_what_a_gate_cannot_use_changes_nothing(files: ConfigStore, caplog: pytest.LogCaptureFixture) -> None:
    def made(policy: Policy) -> int:
        if quota(policy) == 20:
            raise InvalidPolicy(["twenty is too many"])
        return quota(policy)

    following = follow(files, made)
    files.put_policy(POLICY.replace("10/", "20/"), **BY)
    for _ in range(3):
        assert not following.look()
    assert (following.current, following.version, str(following.error)) == (10, "1", "twenty is too many")
    errors = [record.getMessage() for record in caplog.records if record.levelno == logging.ERROR]
    assert len(errors) == 1
    assert "version 2 is invalid, 1 stays in force:\ntwenty is too many" in errors[0]
    files.override(("tenant", "acme"), "5/hour", limit="search", **BY)
    assert not following.look()
    files.put_policy(POLICY.replace("10/", "30/"), **BY)
    assert following.look()
    assert (following.current, following.version, following.error) == (30, "4", None)


@pytest.mark.parametrize("is_noticed_at_once", [True, False])
def test_store_that_was_set_back_is_followed(files: ConfigStore, tmp_path: Path, is_noticed_at_once: bool) -> None:
    """As from a backup: version 3 is another version 3 now."""
    backup = tmp_path / "backup.db"
    shutil.copy(tmp_path / "config.db", backup)
    following = follow(files)
    files.override(("tenant", "acme"), "5/hour", limit="search", **BY)
    files.override(("tenant", "hooli"), "6/hour", limit="search", **BY)
    following.look()
    for leftover in tmp_path.glob("config.db-*"):
        leftover.unlink()
    shutil.copy(backup, tmp_path / "config.db")
    if is_noticed_at_once:
        assert following.look()
        assert (following.current, following.version) == ({}, "1")
    for number, tenant in enumerate(("umbrella", "stark", "wayne"), start=7):
        files.override(("tenant", tenant), f"{number}/hour", limit="search", **BY)
    assert following.look()
    assert (following.current, following.version) == ({"umbrella": 7, "stark": 8, "wayne": 9}, "4")


# ------------------------------------------------------------------ the store is down


def test_while_the_store_is_down_the_last_version_holds_and_says_how_old_it_is(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with PostgresServer() as server:
        store = ConfigStore(server.fresh_url())
        store.put_policy(POLICY, **BY)
        copy = tmp_path / "copy.db"
        following = follow(store, quota, cache=copy, every=1.0)
        wait_until(lambda: copy.exists() and following.age < 1 and following._uncached is None, "the copy to be kept")
        server.kill()
        assert not following.look()
        assert (following.current, following.version) == (10, "1")
        assert isinstance(following.error, ConfigUnavailable)
        time.sleep(1.2)
        assert following.age > 1
        os.utime(copy, (time.time() - 7200, time.time() - 7200))

        again = follow(store, quota, cache=copy)  # a node that starts now
        assert (again.current, again.version, again.source) == (10, "1", "copy")
        assert 7199 < again.age < 7300
        assert "running on version 1 from the local cache, 2:00:0" in caplog.text
        assert isinstance(again.error, ConfigUnavailable)
        with pytest.raises(ConfigUnavailable):
            follow(store, quota)
        with pytest.raises(ConfigUnavailable):
            follow(store, quota, cache=tmp_path / "another.db")

        server.start()
        store.put_policy(POLICY.replace("10/", "20/"), **BY)
        wait_until(lambda: following.current == 20, "the node to be in touch again")
        assert following.error is None
        assert again.look()
        assert (again.current, again.source, again.error) == (20, "store", None)
        assert again.age < 10
        following.close()
        store.close()


def test_node_is_in_touch_again_also_when_nothing_has_changed(
    files: ConfigStore, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    following = follow(files, quota)
    (tmp_path / "config.db").rename(tmp_path / "away")
    for _ in range(3):
        assert not following.look()
    assert "file does not exist" in str(following.error)
    assert not (tmp_path / "config.db").exists(), "who only reads makes no file"
    (tmp_path / "away").rename(tmp_path / "config.db")
    assert not following.look()
    assert following.error is None
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == 2
    assert "version 1 stays in force" in told[0]
    assert "is available again" in told[1]


def test_copy_holds_every_version_and_the_workers_of_a_machine_share_it(files: ConfigStore, tmp_path: Path) -> None:
    copy = tmp_path / "copy.db"
    nodes = [follow(files, lambda policy: policy, cache=copy) for _ in range(2)]
    for change in (
        lambda: files.override(("tenant", "acme"), "5/hour", limit="search", **BY),
        lambda: files.override(("tenant", "hooli"), "6/hour", limit="search", **BY),
        lambda: files.put_policy(POLICY.replace("10/", "20/"), **BY),
        lambda: files.remove_override(1, **BY),
        lambda: files.rollback(2, **BY),
    ):
        change()
        nodes[0].look()
        assert started_from(copy) == files.policy()
    nodes[1].look()
    assert started_from(copy) == files.policy()
    assert copy.stat().st_mode & 0o777 == 0o600


def test_copy_that_was_deleted_is_written_again_though_nothing_has_changed(files: ConfigStore, tmp_path: Path) -> None:
    copy = tmp_path / "copy.db"
    node = follow(files, lambda policy: policy, cache=copy)
    node.look()
    copy.unlink()
    assert not node.look()
    assert started_from(copy) == files.policy()
    node.close()


def started_from(copy: Path) -> Policy:
    """What a node has that starts with nothing but the copy."""
    following: ConfigWatcher[Policy] = ConfigWatcher(
        f"sqlite:///{copy.parent}/nowhere.db", lambda policy: policy, cache=copy, every=None
    )
    return following.current


def test_copy_that_was_left_behind_is_made_anew(files: ConfigStore, tmp_path: Path) -> None:
    copy = tmp_path / "copy.db"
    following = follow(files, cache=copy)
    behind = copy.read_bytes()
    for number in range(2):
        files.override(("tenant", f"t{number}"), "5/hour", limit="search", **BY)
        following.look()
    copy.write_bytes(behind)
    files.override(("tenant", "t2"), "5/hour", limit="search", **BY)
    following.look()
    assert len(started_from(copy).overrides) == 3


def test_copy_that_is_no_database_any_more_is_made_anew(
    files: ConfigStore, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    copy = tmp_path / "copy.db"
    copy.write_bytes(b"what is this?" * 1000)
    with pytest.raises(ConfigUnavailable):
        ConfigWatcher(f"sqlite:///{tmp_path}/nowhere.db", quota, cache=copy, every=None)
    assert "the local cache cannot be read" in caplog.text
    follow(files, cache=copy)
    assert started_from(copy) == files.policy()


def test_unwritable_cache_is_logged_and_ignored(
    files: ConfigStore, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    following = follow(files, quota, cache=tmp_path / "no" / "such" / "copy.db")
    assert following.current == 10
    assert "version 1 is in force, but could not be cached" in caplog.text


# ------------------------------------------------------------------ threads, children, pace


def test_no_thread_keeps_what_is_forgotten(store: ConfigStore) -> None:
    following = follow(store, every=1.0)
    assert threads_of(store)
    del following
    gc.collect()
    wait_until(lambda: not threads_of(store), "the thread to end")


def test_closed_source_stops_watching(store: ConfigStore) -> None:
    following = follow(store, quota, every=1.0)
    following.close()
    wait_until(lambda: not threads_of(store), "the thread to end")
    store.put_policy(POLICY.replace("10/", "20/"), **BY)
    assert following.current == 10


def test_forked_child_follows_by_itself(store: ConfigStore) -> None:
    following = follow(store, quota, every=1.0)
    child = os.fork()
    if child == 0:
        status = 1
        try:
            wait_until(lambda: following.current == 20, "the change to arrive in the child")
            status = 0
        finally:
            os._exit(status)
    store.put_policy(POLICY.replace("10/", "20/"), **BY)
    wait_until(lambda: following.current == 20, "the change to arrive in the parent")
    assert os.waitpid(child, 0)[1] == 0
    following.close()


def test_store_may_be_used_on_both_sides_of_a_fork(store: ConfigStore) -> None:
    child = os.fork()
    if child == 0:
        status = 1
        try:
            for number in range(5):
                store.override(("tenant", f"child{number}"), "5/hour", limit="search", **BY)
            status = 0
        finally:
            os._exit(status)
    for number in range(5):
        store.override(("tenant", f"parent{number}"), "5/hour", limit="search", **BY)
    assert os.waitpid(child, 0)[1] == 0
    assert store.version == 11


def test_feed_that_means_nothing_is_refused_where_it_is_written() -> None:
    with pytest.raises(InvalidConfiguration):
        ConfigSource("policy.yaml")


def test_work_is_polite_and_leaves_all_as_it_was() -> None:
    before = sys.getswitchinterval()
    with low_priority():
        with low_priority():
            assert sys.getswitchinterval() == pytest.approx(0.0005)
            assert not gc.isenabled()
        assert not gc.isenabled()
        child = os.fork()
        if child == 0:
            os._exit(0 if gc.isenabled() and sys.getswitchinterval() == before else 1)
        assert os.waitpid(child, 0)[1] == 0
    assert gc.isenabled()
    assert sys.getswitchinterval() == before
    gc.disable()
    try:
        with low_priority():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_one_change_among_many_rows_reads_one_row(files: ConfigStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that it takes milliseconds where all would take seconds."""
    rows = [OverrideRow("tenant", f"t{number}", "search", None, 5, 60_000_000) for number in range(3000)]
    files.write([Put("overrides", row) for row in rows], **BY)
    following = follow(files)
    files.override(("tenant", "acme"), "6/hour", limit="search", **BY)
    made: list[int] = []
    whole = watcher.PolicyAssembly.with_changes

    def counted(self: Any, changed: Any) -> Any:
        made.append(sum(len(each) for each in changed.values()))
        return whole(self, changed)

    monkeypatch.setattr(watcher.PolicyAssembly, "with_changes", counted)
    assert following.look()
    assert made == [1]
    assert len(following.current) == 3001
