"""`headgate replay`: exit codes, streams, and the report in a browser."""

from __future__ import annotations

import json
import os
import subprocess
import threading
from typing import TYPE_CHECKING, Any

import pytest

from headgate import cli
from support.chromium import chromium_browser
from support.terminals import COMMAND, PLAIN, PseudoTerminal

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

POLICY = """
tier: free
limits:
  - {name: per-ip, by: ip, bucket: 2/hour, algorithm: fixed_window, tiers: {pro: 3/hour}}
clients: [{ip: 192.0.2.2, tier: pro}]
"""
EVIL = "<script>alert(1)</script>|`x`"


def line(second: int, client: str, path: str = "/") -> str:
    return f'{client} - - [20/Feb/2026:10:00:{second:02} +0000] "GET {path} HTTP/1.1" 200 1 "-" "curl"\n'


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "policy.yaml").write_text(POLICY)
    (tmp_path / "loose.yaml").write_text("limits: [{name: per-ip, by: ip, bucket: 100/hour}]")
    (tmp_path / "wrong.yaml").write_text("limits: [{by: ip, bukcet: 100/hour}]")
    (tmp_path / "access.log").write_text("".join(line(at, f"192.0.2.{at % 3}") for at in range(12)) + "nonsense\n")
    (tmp_path / "other.log").write_text("hello\n")
    (tmp_path / "tiers.csv").write_text("acme,gold\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def call(folder: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    def call(*arguments: str) -> tuple[int, str, str]:
        code = cli.main(["replay", *arguments])
        return (code, *capsys.readouterr())

    return call


def test_programs_get_the_agreed_fields(call: Callable[..., tuple[int, str, str]]) -> None:
    code, out, err = call("policy.yaml", "access.log", "--json", "--all-clients")
    found = json.loads(out)
    assert (code, err) == (0, "")
    assert {name: found[name] for name in ("requests", "rejected", "skipped", "first", "last")} == {
        "requests": 12,
        "rejected": 5,
        "skipped": 1,
        "first": "2026-02-20T10:00:00Z",
        "last": "2026-02-20T10:00:11Z",
    }
    assert {name: found["by_limit"]["per-ip"][name] for name in ("requests", "rejected")} == {
        "requests": 12,
        "rejected": 5,
    }
    clients = [(each["client"], each["requests"], each["rejected"]) for each in found["by_client"]]
    assert clients == [("192.0.2.0", 4, 2), ("192.0.2.1", 4, 2), ("192.0.2.2", 4, 1)]


@pytest.mark.parametrize(
    ("arguments", "code", "err"),
    [
        (["policy.yaml", "access.log"], 0, ""),
        (["policy.yaml", "access.log", "--fail-if", "rejected.paying > 1"], 0, ""),
        (["policy.yaml", "access.log", "--fail-if", "rejected.paying > 0"], 1, "rejected.paying is 1"),
        (["policy.yaml", "access.log", "--against", "loose.yaml", "--fail-if", "newly_rejected > 2"], 1, "is 3"),
        (["policy.yaml", "access.log", "--fail-if", "rejected"], 2, "'rejected' is not a comparison"),
        (["policy.yaml", "access.log", "--fail-if", "rejected.por > 0"], 2, "did you mean 'pro'?"),
        (["wrong.yaml", "access.log"], 2, "unknown field 'bukcet'"),
        (["policy.yaml", "access.log", "--against", "wrong.yaml"], 2, "unknown field 'bukcet'"),
        (["nowhere.yaml", "access.log"], 2, "nowhere.yaml: cannot be read"),
        (["policy.yaml", "nowhere.log"], 2, "nowhere.log: cannot be read: No such file"),
        (["policy.yaml", "other.log"], 2, "its format is not known"),
        (["policy.yaml", "sqlite:///nowhere.db"], 2, "there is no decision log at nowhere.db"),
        (["policy.yaml", "access.log", "--tiers", "tiers.csv"], 2, "'gold' is not a tier of the policy: free, pro"),
        (["policy.yaml", "access.log", "--identity", "tenant=x-tenant"], 2, "write it like tenant=header:x-tenant"),
        (["policy.yaml", "access.log", "--identity", "ip=header:x"], 2, "--identity ip cannot be given"),
        (["policy.yaml", "access.log", "--identity", "tenant=path:/a"], 2, "names no single segment"),
        (["policy.yaml", "access.log", "--html", "no/where.html"], 2, "cannot be written: No such file"),
        (["policy.yaml", "access.log", "--json", "--markdown"], 2, "keep one"),
    ],
)
def test_command_ends_with_its_code(
    call: Callable[..., tuple[int, str, str]], arguments: list[str], code: int, err: str
) -> None:
    found, _, printed = call(*arguments)
    assert (found, err in printed) == (code, True), printed
    assert bool(err) == bool(printed)


def test_log_comes_from_a_pipe(folder: Path) -> None:
    ended = subprocess.run(
        [*COMMAND, "replay", "policy.yaml", "-", "--json"],
        input=(folder / "access.log").read_bytes(),
        env=PLAIN,
        cwd=folder,
        capture_output=True,
        timeout=30,
        check=True,
    )
    assert json.loads(ended.stdout)["rejected"] == 5


def test_terminal_shows_progress_only_while_it_lasts(folder: Path) -> None:
    os.mkfifo(folder / "endless.log")
    is_shown = threading.Event()

    def write_log() -> None:
        with (folder / "endless.log").open("w") as log:
            while not is_shown.is_set():
                log.writelines(line(at % 60, f"10.0.{at % 200}.{at % 7}") for at in range(100))

    writer = threading.Thread(target=write_log)
    writer.start()
    with PseudoTerminal(folder, "replay", "policy.yaml", "endless.log") as terminal:
        terminal.until("replaying")
        is_shown.set()
        assert terminal.end() == 0
    writer.join()
    assert terminal.shown.rindex("\x1b[K") < terminal.shown.index("rejected")


def test_empty_log_is_no_error(call: Callable[..., tuple[int, str, str]], folder: Path) -> None:
    (folder / "empty.log").write_text("")
    code, out, _ = call("policy.yaml", "empty.log", "--json", "--html", "empty.html")
    found = json.loads(out)
    assert (code, found["requests"], found["first"], found["by_client"]) == (0, 0, None, [])


def test_markdown_and_html_show_hostile_names_as_text(call: Callable[..., tuple[int, str, str]], folder: Path) -> None:
    (folder / "evil.json").write_text(
        "".join(json.dumps({"time": at, "path": "/", "ip": "192.0.2.1", "user": EVIL}) + "\n" for at in range(5))
    )
    (folder / "users.yaml").write_text("limits: [{by: user, bucket: 1/hour}]")
    code, out, _ = call("users.yaml", "evil.json", "--markdown", "--html", "evil.html")
    assert code == 0
    assert "&lt;script&gt;alert(1)&lt;/script&gt;\\|\\`x\\`" in out
    assert "<script" not in out + (folder / "evil.html").read_text()


def test_html_report_fits_every_screen_and_asks_no_other_server(
    call: Callable[..., tuple[int, str, str]], folder: Path
) -> None:
    assert call("policy.yaml", "access.log", "--against", "loose.yaml", "--html", "report.html")[0] == 0
    with chromium_browser() as browser:
        for width, scheme in ((1280, "light"), (1280, "dark"), (360, "light")):
            asked: list[str] = []
            problems: list[Any] = []
            options: Any = {"viewport": {"width": width, "height": 800}, "color_scheme": scheme}
            page = browser.new_page(**options)
            page.on("request", lambda request, asked=asked: asked.append(request.url))
            page.on("console", lambda message, problems=problems: problems.append(message.text))
            page.goto((folder / "report.html").as_uri())
            assert len(asked) == 1
            assert not problems
            assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
            assert page.locator("svg.plot").bounding_box()["height"] > 100  # type: ignore[index]
            assert page.get_by_text("newly rejected").first.is_visible()
            ground = page.evaluate("getComputedStyle(document.body).backgroundColor")
            assert ("14, 20, 19" in ground) == (scheme == "dark")
