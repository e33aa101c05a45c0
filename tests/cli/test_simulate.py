"""`headgate simulate`: JSON, the page with plots, exit codes and errors."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from headgate import cli
from support.chromium import chromium_browser

if TYPE_CHECKING:
    from pathlib import Path

SCENARIO = """
name: <small>
duration: 1 s
nodes: {count: 2, on_failure: local}
limits: {api: 100/second, all: 5000/second}
traffic: [{name: ada, limits: [api, all], rate: 300/second}]
faults: [{kind: store_down, at: 300 ms, for: 200 ms}]
prices: {node: 10}
"""


@pytest.fixture
def scenario(tmp_path: Path) -> Path:
    file = tmp_path / "small.yaml"
    file.write_text(SCENARIO)
    return file


def test_json_has_the_numbers_that_programs_use(scenario: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["simulate", str(scenario), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["requests"] == found["admitted"] + found["denied"]
    assert 0 < found["store_calls"] <= found["requests"]
    assert [limit["limit"] for limit in found["limits"]] == ["api", "all"]
    for limit in found["limits"]:
        assert 0 <= limit["largest_overshoot"] <= limit["bound"]
    assert found["cost"]["total"] == 20


def test_equal_seeds_give_equal_json_in_every_process(scenario: Path) -> None:
    def run(hash_seed: str, *options: str) -> str:
        command = [sys.executable, "-m", "headgate", "simulate", str(scenario), "--json", *options]
        environment = {"PYTHONHASHSEED": hash_seed, "PYTHONPATH": ":".join(sys.path)}
        return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=True).stdout

    assert run("1") == run("2") != run("1", "--seed", "9")


def test_page_is_self_contained(scenario: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "page.html"
    assert cli.main(["simulate", str(scenario), "--html", str(page)]) == 0
    assert "largest overshoot" in capsys.readouterr().out
    text = page.read_text("utf-8")
    assert "<h1>&lt;small&gt;</h1>" in text
    assert not re.search("<script|<link|https?://|url", text)
    requested: list[str] = []
    with chromium_browser() as browser:
        window = browser.new_page(viewport={"width": 390, "height": 800})
        window.on("request", lambda request: requested.append(request.url))
        window.goto(page.as_uri())
        assert window.locator("svg").count() == 4
        assert window.evaluate("document.documentElement.scrollWidth") <= 390
    assert requested == [page.as_uri()]


def test_mistakes_end_with_code_2(scenario: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    scenario.write_text(SCENARIO.replace("rate: 300/second", "rate: fast"))
    assert cli.main(["simulate", str(scenario)]) == 2
    assert "small.yaml:6:" in capsys.readouterr().err
    scenario.write_text(SCENARIO)
    assert cli.main(["simulate", str(scenario), "--scale", "3"]) == 2
    assert "scale 3 does not divide the 2 nodes" in capsys.readouterr().err
    assert cli.main(["simulate", str(scenario), "--scale", "0"]) == 2
    assert cli.main(["simulate", str(scenario), "--html", str(tmp_path / "no" / "page.html")]) == 2
    assert "cannot be written: No such file" in capsys.readouterr().err
    assert cli.main(["simulate", str(tmp_path / "none.yaml")]) == 2
