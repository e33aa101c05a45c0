"""The command `headgate lists`, and what `check` and `explain` say about lists."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from headgate import cli
from support.list_server import ListServer, respond

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

POLICY = """\
lists:
  bad: {{source: {file}, except: 203.0.113.7}}
  worse: {url}/list
limits:
  - {{name: all, by: ip, bucket: 100/minute}}
  - {{name: strict, by: ip, bucket: 5/minute, lists: bad}}
blocked:
  - {{list: worse, reason: attacks}}
"""


@pytest.fixture(scope="module")
def server() -> Iterator[ListServer]:
    with ListServer() as server:
        yield server


@pytest.fixture
def call(
    tmp_path: Path, server: ListServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, str, str]]:
    """Runs a command in a folder with a policy whose lists are a file and a URL."""
    server.pages = {"/list": respond(b"198.51.100.0/24")}
    monkeypatch.setenv("HEADGATE_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bad.txt").write_text("203.0.113.0/24\n")
    (tmp_path / "policy.yaml").write_text(POLICY.format(file=tmp_path / "bad.txt", url=server.url))

    def call(*arguments: str) -> tuple[int, str, str]:
        code = cli.main(arguments)
        return (code, *capsys.readouterr())

    return call


def statuses(call: Callable[..., tuple[int, str, str]], *arguments: str) -> tuple[int, dict[str, Any]]:
    code, out, _ = call("lists", *arguments, "--json")
    return code, {each["name"]: each for each in json.loads(out)["lists"]}


def test_lists_are_shown_as_this_machine_has_them(
    call: Callable[..., tuple[int, str, str]], server: ListServer
) -> None:
    code, found = statuses(call)
    assert code == 0
    assert (found["bad"]["networks"], found["worse"]["version"]) == (1, "")
    code, found = statuses(call, "refresh")
    assert (code, found["worse"]["networks"], found["worse"]["error"]) == (0, 1, None)
    server.pages.clear()
    code, out, _ = call("lists", "refresh")
    assert code == 1
    assert "failed: the server responded with status 404" in out
    code, found = statuses(call, "show")
    assert (code, found["worse"]["networks"]) == (1, 1), "the failure is stored next to the last good version"
    code, _, err = call("check", "--strict", "policy.yaml")
    assert code == 1
    assert f"list worse: the server responded with status 404; version {found['worse']['version']} stays" in err


def test_address_is_found(call: Callable[..., tuple[int, str, str]]) -> None:
    code, out, err = call("lists", "find", "203.0.113.9")
    assert (code, err) == (0, "never read: worse; run headgate lists refresh\n")
    assert out.startswith("203.0.113.9 is listed in bad (version ")
    call("lists", "refresh")
    assert call("lists", "find", "198.51.100.1")[1].startswith("198.51.100.1 is listed in worse (version ")
    assert call("lists", "find", "203.0.113.7") == (0, "203.0.113.7 is in none of the lists\n", "")
    code, out, _ = call("lists", "find", "::ffff:203.0.113.9", "--json")
    assert json.loads(out) == {"address": "203.0.113.9", "lists": ["bad"], "unread": []}
    assert call("lists", "find", "nowhere")[0] == 2


def test_explain_names_the_list(call: Callable[..., tuple[int, str, str]]) -> None:
    call("lists", "refresh")
    assert "listed in bad" in call("explain", "policy.yaml", "GET", "/", "--ip", "203.0.113.9")[1]
    assert "only for addresses in bad" in call("explain", "policy.yaml", "GET", "/", "--ip", "192.0.2.1")[1]
    blocked = call("explain", "policy.yaml", "GET", "/", "--ip", "198.51.100.1")[1]
    assert "198.51.100.1 is listed in worse (version " in blocked
    assert "UTC): attacks" in blocked


def test_policy_without_lists(call: Callable[..., tuple[int, str, str]], tmp_path: Path) -> None:
    (tmp_path / "other.yaml").write_text("limits: [{by: ip, bucket: 5/minute}]")
    assert call("lists", "--policy", "other.yaml") == (2, "", "other.yaml has no lists\n")
    (tmp_path / "other.yaml").write_text("lists: 3")
    assert call("lists", "--policy", "other.yaml")[0] == 1
