"""Policy reload under traffic: the last good version stays, and each request sees one version."""

from __future__ import annotations

import json
import os
import random
import threading
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import pytest

from headgate.errors import HeadgateError
from headgate.policy.loader import load
from support.asgi_client import PEER
from support.servers import wait_until
from support.sites import item_request, policy_json, remaining_quota

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from support.sites import Answer, MakeSite, Site


MEGABYTE = 2**20


def replace_file(kind: str, path: Path) -> None:
    """What somebody puts in the place of a policy file."""
    new = path.with_name("new")
    if kind == "directory":
        path.unlink()
        path.mkdir()
        return
    if kind == "pipe":
        os.mkfifo(new)
    elif kind == "device":
        new.symlink_to("/dev/zero")
    elif kind == "100 MB":
        with new.open("wb") as file:
            file.truncate(100 * MEGABYTE)
    else:
        new.write_bytes({"noise": random.Random(7).randbytes(10_000), "depth": b"[" * 100_000, "nothing": b""}[kind])
    new.replace(path)


def test_health_path_quotes_nothing_of_an_invalid_policy(make_site: MakeSite, tmp_path: Path) -> None:
    """Nor of another file that a symlink leads to."""
    path, other = tmp_path / "policy.json", tmp_path / "shadow"
    path.write_text(policy_json({"by": "ip", "bucket": "2/hour"}))
    site = make_site(path, reload_every=None, health_path="/health")
    other.write_text('{"limits": [{"by": "ip", "bucket": "root:$6$secret"}], "blocked": [{"ip": "sk_live_secret"}]}')
    path.unlink()
    path.symlink_to(other)
    assert not site.gate.policy_watcher.look()
    assert "secret" in site.gate.policy_error
    answer = site.ask("/health")
    assert b"secret" not in answer.body
    told = "the newest version of the policy is invalid; the log of this process says why"
    assert json.loads(answer.body)["policy_error"] == told


@pytest.mark.parametrize(
    ("kind", "told"),
    [
        ("directory", "Is a directory"),
        ("pipe", "not a regular file"),
        ("device", "not a regular file"),
        ("100 MB", "larger than 24 MB"),
        ("noise", "not UTF-8"),
        ("depth", "nested too deep"),
        ("nothing", "not JSON"),
    ],
)
def test_invalid_replacement_keeps_the_last_good_policy(
    make_site: MakeSite, tmp_path: Path, kind: str, told: str
) -> None:
    path = tmp_path / "policy.json"
    path.write_text(policy_json({"by": "ip", "bucket": "2/hour"}))
    site = make_site(path, reload_every=0.005)
    assert site.ask().status == 200
    tracemalloc.start()
    replace_file(kind, path)
    wait_until(lambda: told in (site.gate.policy_error or ""), f"{told!r} is told of the change")
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 4 * MEGABYTE
    assert site.statuses({}, {}) == [200, 429]
    with pytest.raises(HeadgateError, match=told):
        load(path)
    if path.is_dir():
        path.rmdir()
    (tmp_path / "good").write_text(policy_json({"by": "ip", "bucket": "1/hour"}, blocked=[{"ip": PEER}]))
    (tmp_path / "good").replace(path)
    wait_until(lambda: site.gate.policy_error is None, "the watch goes on")
    assert site.ask().status == 403


def test_limit_is_exact_while_the_policy_is_reloaded_200_times(make_site: MakeSite, tmp_path: Path) -> None:
    path = tmp_path / "policy.json"

    def version(number: int) -> str:
        return policy_json({"name": "a", "by": "ip", "bucket": "300/hour"}, name=f"version {number}")

    path.write_text(version(0))
    site = make_site(path, reload_every=None)
    got = ask_during_changes(site, 600, lambda number: swap(site, path, version(number)))
    assert (got.count(200), got.count(429)) == (300, 300)


def test_each_request_sees_one_policy_version(make_site: MakeSite, tmp_path: Path) -> None:
    path = tmp_path / "policy.json"

    def version(number: int) -> str:
        quota = (1000, 5000, 200)[number % 3]
        limits = [
            {"name": name, "by": "ip", "bucket": f"{quota}/hour", "reserve": 2} for name in ("a", f"b{number % 2}")
        ]
        return policy_json(
            *limits,
            {"name": "c", "by": "ip", "bucket": {"algorithm": "concurrency", "quota": quota, "period": "1 hour"}},
        )

    path.write_text(version(0))
    answers: list[Answer] = []
    site = make_site(path, reload_every=None)
    ask_during_changes(site, 400, lambda number: swap(site, path, version(number)), answers)
    for answer in answers:
        assert answer.status in (200, 429)
        quotas = {part.split(";")[1] for part in answer.fields["ratelimit-policy"].split(", ")}
        assert quotas == {f"q={answer.fields['x-ratelimit-limit']}"}  # never those of two versions
    assert site.gate.policy_error is None


def swap(site: Site, path: Path, text: str) -> None:
    new = path.with_name("new")
    new.write_text(text)
    new.replace(path)
    assert site.gate.policy_watcher.look()


def ask_during_changes(
    site: Site, requests: int, change: Callable[[int], None], answers: list[Answer] | None = None
) -> list[int]:
    """The statuses of requests that come from all sides while the policy changes 200 times."""
    kept: list[Answer] = [] if answers is None else answers
    is_over = threading.Event()

    def change_often() -> None:
        for number in range(1, 201):
            change(number)
        is_over.set()

    with ThreadPoolExecutor(1) as side:
        changing = side.submit(change_often)
        kept += site.ask_all([{"path": f"/users/{number}"} for number in range(requests // 2)])
        while not is_over.is_set() and not changing.done() and len(kept) < requests - 8:
            kept += site.ask_all([{"path": "/users/1"}] * 8)
        changing.result()
    kept += site.ask_all([{"path": "/users/1"}] * (requests - len(kept)))
    return [answer.status for answer in kept]


def test_quota_change_keeps_the_used_amount(make_item_site: MakeSite, tmp_path: Path) -> None:
    """Row 30: of 100, 60 are used. A plan of 80 leaves 20, and a plan of 200 as many more as it has more."""
    path = tmp_path / "policy.json"

    def plan(quota: int) -> None:
        path.write_text(policy_json({"name": "plan", "by": "ip", "bucket": f"{quota}/day"}))

    plan(100)
    site = make_item_site(path, reload_every=None)
    site.statuses(*[item_request()] * 59)
    assert remaining_quota(site.ask("/items/1")) == [40]
    for quota, expected in ((80, 19), (200, 138)):
        plan(quota)
        assert site.gate.policy_watcher.look()
        assert remaining_quota(site.ask("/items/1")) == [expected]
