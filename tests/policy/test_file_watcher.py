"""Hot reload: a good version replaces the one before it whole, a bad one changes nothing and is told loudly."""

from __future__ import annotations

import gc
import logging
import os
import threading
from typing import TYPE_CHECKING

import pytest

from headgate.errors import InvalidPolicy
from headgate.policy.file_watcher import PolicyWatcher, summarize_changes
from headgate.policy.loader import read
from support.servers import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from headgate.policy.model import Policy


def policy_of(quota: int) -> str:
    return f"limits: [{{name: a, by: ip, bucket: {quota}/minute}}]\n"


def quota_of(policy: Policy) -> int:
    assert policy.rules[0].limit is not None
    return policy.rules[0].limit.quota


def is_watched(file: Path) -> bool:
    return any(thread.name == f"headgate-policy {file}" for thread in threading.enumerate())


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "policy.yaml"
    path.write_text(policy_of(10))
    return path


@pytest.fixture
def watch(file: Path) -> Iterator[PolicyWatcher[int]]:
    watch = PolicyWatcher(file, quota_of, every=None)
    yield watch
    watch.close()


def test_first_version_has_to_be_good(file: Path) -> None:
    file.write_text("limits: [{by: ip}]\n")
    with pytest.raises(InvalidPolicy, match=r"policy\.yaml:1:"):
        PolicyWatcher(file, quota_of, every=None)


def test_file_that_is_not_there_is_said_so(tmp_path: Path) -> None:
    with pytest.raises(InvalidPolicy, match=r"nowhere\.yaml: cannot be read: No such file"):
        PolicyWatcher(tmp_path / "nowhere.yaml", quota_of, every=None)


def test_what_has_not_changed_is_not_made_again(file: Path, watch: PolicyWatcher[int]) -> None:
    before = watch.version
    os.utime(file, (1, 1))
    assert not watch.look()
    assert (watch.current, watch.version) == (10, before)


def test_good_version_is_in_force_at_once(
    file: Path, watch: PolicyWatcher[int], caplog: pytest.LogCaptureFixture
) -> None:
    before = watch.version
    caplog.set_level(logging.INFO, "headgate")
    file.write_text(policy_of(20))
    assert watch.look()
    assert (watch.current, watch.error) == (20, None)
    assert watch.version != before
    ((_, level, told),) = caplog.record_tuples
    assert (level, told) == (
        logging.INFO,
        f"policy {file}: version {watch.version} is in force: limits: 1 changed",
    )


@pytest.mark.parametrize(
    ("before", "after", "summary"),
    [
        ("", "", "no entry changed"),
        ("", "clients: [{tenant: a, tier: pro}]", "clients: 1 added"),
        ("clients: [{tenant: a, tier: pro}, {tenant: b}]", "clients: [{tenant: a}]", "clients: 1 changed, 1 removed"),
        ("blocked: [{ip: 192.0.2.1}]", "blocked: [{ip: 192.0.2.2}]", "blocks: 1 added, 1 removed"),
        ("routes: [{path: /a}]", "routes: [{path: /a, cost: 2}]", "routes: 1 changed"),
        (
            "overrides: [{tenant: a, limit: b, bucket: 9/day}]",
            "overrides: [{tenant: a, limit: b, bucket: 8/day}]\non_failure: local",
            "overrides: 1 changed; settings: on_failure",
        ),
    ],
)
def test_new_version_is_summarized_by_what_changed(before: str, after: str, summary: str) -> None:
    common = "limits: [{name: b, by: tenant, bucket: 9/hour, tiers: {pro: 99/hour}}]\n"
    assert summarize_changes(read(common + before), read(common + after)) == summary


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (b"limits: [{by: ip, bukcet: 5/minute}]\n", ":1:19: unknown field 'bukcet'; did you mean 'bucket'?"),
        (b"limits: [{by: ip, bucket: 5/minute}\n", ":2:1: "),
        (b"", ": is empty"),
        (b"limits: [{by: ip, bucket: \xff}]\n", ": not UTF-8 at byte 26"),
    ],
)
def test_invalid_version_keeps_the_last_good_one_and_is_logged_once(
    file: Path, watch: PolicyWatcher[int], caplog: pytest.LogCaptureFixture, content: bytes, told: str
) -> None:
    good = watch.version
    file.write_bytes(content)
    for _ in range(3):
        assert not watch.look()
    assert (watch.current, watch.version) == (10, good)
    assert told in str(watch.error)
    errors = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert [told in error.getMessage() and f"{good} stays in force" in error.getMessage() for error in errors] == [True]
    file.write_text(policy_of(30))
    assert watch.look()
    assert (watch.current, watch.error) == (30, None)


def test_bad_version_that_is_taken_back_is_forgotten(
    file: Path, watch: PolicyWatcher[int], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "headgate")
    file.write_text("limits: what?\n")
    watch.look()
    file.write_text(policy_of(10))
    watch.look()
    assert (watch.current, watch.error) == (10, None)
    assert f"version {watch.version} is in force again" in caplog.text


def test_file_that_goes_missing_keeps_the_last_good_one(
    file: Path, watch: PolicyWatcher[int], caplog: pytest.LogCaptureFixture
) -> None:
    file.unlink()
    for _ in range(3):
        assert not watch.look()
    assert watch.current == 10
    assert "cannot be read: No such file" in str(watch.error)
    assert len(caplog.records) == 1
    file.write_text(policy_of(10))
    watch.look()
    assert watch.error is None


def test_link_that_is_moved_to_another_file_is_noticed(tmp_path: Path) -> None:
    """As Kubernetes swaps a mounted ConfigMap."""
    for quota in (1, 2):
        (tmp_path / f"{quota}.yaml").write_text(policy_of(quota))
    link = tmp_path / "policy.yaml"
    link.symlink_to(tmp_path / "1.yaml")
    watch = PolicyWatcher(link, quota_of, every=None)
    (tmp_path / "next").symlink_to(tmp_path / "2.yaml")
    (tmp_path / "next").replace(link)
    assert watch.look()
    assert watch.current == 2


def test_what_cannot_be_made_ready_is_refused_too(file: Path) -> None:
    """A policy may be good by itself, but not for this gate."""

    def made(policy: Policy) -> int:
        if quota_of(policy) > 10:
            raise InvalidPolicy(["too much for this gate"])
        return quota_of(policy)

    watch = PolicyWatcher(file, made, every=None)
    file.write_text(policy_of(11))
    assert not watch.look()
    assert (watch.current, str(watch.error)) == (10, "too much for this gate")


def test_file_is_looked_at_by_itself_until_the_watch_is_closed(file: Path) -> None:
    watch = PolicyWatcher(file, quota_of, every=0.01)
    file.write_text(policy_of(20))
    wait_until(lambda: watch.current == 20, "the new version is in force")
    watch.close()
    wait_until(lambda: not is_watched(file), "the thread has ended")


def test_unreferenced_watcher_ends(file: Path) -> None:
    watch = PolicyWatcher(file, quota_of, every=0.01)
    assert is_watched(file)
    del watch
    gc.collect()
    wait_until(lambda: not is_watched(file), "the thread has ended")


def test_forked_child_watches_by_itself(file: Path) -> None:
    watch = PolicyWatcher(file, quota_of, every=0.01)
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        file.write_text(policy_of(50))
        wait_until(lambda: watch.current == 50, "the child sees the new version")
        os.write(writer, b"seen")
        os._exit(0)
    os.waitpid(child, 0)
    os.close(writer)
    assert os.read(reader, 10) == b"seen"
    os.close(reader)
    watch.close()
