"""The docs are true: examples run and say what they show, links lead somewhere, and nothing public is missing."""

from __future__ import annotations

import doctest
import importlib
import inspect
import io
import pkgutil
import re
import shlex
import subprocess
from contextlib import closing, redirect_stdout
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
from flask import Flask

import headgate
from headgate import _limit_syntax
from headgate.adapters.flask import Headgate
from headgate.algorithms import ALGORITHMS
from headgate.cli import main
from headgate.policy import read
from headgate.server.check_api import CheckBody
from headgate.server.envoy.config import load
from headgate.simulation.scenario import read_scenario
from support.paths import ROOT
from support.servers import AclUser, RedisServer, wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator

SOURCE = ROOT / "src" / "headgate"
PAGES = (*(ROOT / f"{name}.md" for name in ("README", "CONTRIBUTING", "CHANGELOG")), *sorted(ROOT.glob("docs/**/*.md")))
ALL_TEXT = "\n".join(page.read_text("utf-8") for page in PAGES)

GATEWAY_FILES = [file for file in (ROOT / "examples" / "gateways").rglob("*") if file.is_file()]

DOCUMENTED_URL = "redis://127.0.0.1:6379/0"
DATABASE = 9
"""Examples use plain names, so they get a database where no other test is."""

every_page = pytest.mark.parametrize("page", PAGES, ids=[str(page.relative_to(ROOT)) for page in PAGES])


class Block(NamedTuple):
    """A fenced block of a page."""

    language: str
    text: str
    line: int
    follows_directly: bool
    """Whether at most one paragraph stands between it and the block before."""


def blocks(page: Path) -> list[Block]:
    text, found, end = page.read_text("utf-8"), [], 0
    for match in re.finditer(r"^```(\w*)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
        between = text[end : match.start()].strip()
        line = text.count("\n", 0, match.start()) + 1
        found.append(Block(match[1], match[2], line, "\n\n" not in between and not between.startswith("#")))
        end = match.end()
    return found


@pytest.fixture
def server(redis7: RedisServer) -> Iterator[RedisServer]:
    with redis7.client(db=DATABASE) as client:
        client.flushdb()
        yield redis7
        client.flushdb()


@every_page
def test_every_example_runs_and_says_what_it_shows(
    page: Path, server: RedisServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    for block, after in pairwise([*blocks(page), Block("", "", 0, False)]):
        text = block.text.replace(DOCUMENTED_URL, f"redis://127.0.0.1:{server.port}/{DATABASE}")
        where = f"{page.name}, line {block.line}"
        if block.language == "python" and ">>>" in text:
            run_session(text, names, where)
        elif block.language == "python":
            printed = run_script(text, names, where)
            if printed:
                assert after.language == "text", f"{where} prints, but no text block shows what"
                assert after.follows_directly
                assert without_fractions(printed) == without_fractions(after.text), where
        elif block.language == "console":
            for command, shown in transcript(text):
                if command.startswith("redis-cli "):
                    assert redis_cli(command, server) == shown, f"{where}: {command}"
                elif command.startswith(("headgate explain ", "headgate replay ", "headgate suggest ")):
                    assert printed_by(command) == shown, f"{where}: {command}"
        elif page.name == "gateways.md" and block.language != "console":
            assert any(unindented(text) in unindented(file.read_text("utf-8")) for file in GATEWAY_FILES), where
        elif block.language == "yaml" and text.startswith("domain:"):
            assert load([(where, text)]).domains, where
        elif block.language == "yaml" and "\ntraffic:" in text:
            assert read_scenario(text, file=where + ".yaml").traffic
            Path("fleet.yaml").write_text(text, "utf-8")
        elif block.language == "json" and page.name == "serve.md":
            assert CheckBody.model_validate_json(text), where
        elif block.language in ("yaml", "toml", "json"):
            assert read(text, file=where, format=block.language).warnings == (), where
            if name := re.match(r"# (\w+\.\w+)\n", text):  # a file that the examples below it open
                Path(name[1]).write_text(text, "utf-8")
        else:
            assert block.language == "text", f"{where}: a block in {block.language!r} is run by nobody"


def unindented(text: str) -> str:
    return "".join(f"{line.strip()}\n" for line in text.splitlines())


def run_session(text: str, names: dict[str, Any], where: str) -> None:
    test = doctest.DocTestParser().get_doctest(text, names, where, None, None)
    told = io.StringIO()
    runner = doctest.DocTestRunner(verbose=False, optionflags=doctest.ELLIPSIS)
    runner.run(test, out=told.write, clear_globs=False)
    names.update(test.globs)
    assert not runner.summarize(verbose=False).failed, told.getvalue()


def run_script(text: str, names: dict[str, Any], where: str) -> str:
    printed = io.StringIO()
    with redirect_stdout(printed):
        exec(compile(text, where, "exec"), names)
    return printed.getvalue()


def without_fractions(text: str) -> list[str]:
    """Lines as they are but for fractions of a second, which pass while an example runs, and blanks at their ends."""
    return [
        re.sub(r"\d+\.\d{3,}(?= s)", lambda time: f"{float(time[0]):.0f}", line.rstrip()) for line in text.splitlines()
    ]


def transcript(text: str) -> Iterator[tuple[str, str]]:
    for entry in re.split(r"^\$ ", text, flags=re.MULTILINE)[1:]:
        command, _, shown = entry.partition("\n")
        yield command, shown.strip()


def printed_by(command: str) -> str:
    printed = io.StringIO()
    with redirect_stdout(printed):
        main(shlex.split(command)[1:])
    return printed.getvalue().strip()


def redis_cli(command: str, server: RedisServer) -> str:
    """What the command shows to somebody at a terminal."""
    _, *words = command.split()
    arguments = ["redis-cli", "-p", f"{server.port}", "-n", f"{DATABASE}", "--no-raw", *words]
    return subprocess.run(arguments, capture_output=True, text=True, check=True, timeout=10).stdout.strip()


@every_page
def test_every_link_leads_somewhere(page: Path) -> None:
    text = re.sub(r"^```.*?^```$", "", page.read_text("utf-8"), flags=re.MULTILINE | re.DOTALL)
    for target in re.findall(r"\]\(([^)]+)\)", text):
        if target.startswith("https://"):
            continue
        path, _, anchor = target.partition("#")
        linked = (page.parent / path).resolve() if path else page
        assert linked.exists(), f"{page.name} links to {target}"
        assert not anchor or anchor in anchors(linked), f"{page.name} links to {target}"


def anchors(page: Path) -> set[str]:
    """The anchors that GitHub makes of a page's headings."""
    text = re.sub(r"^```.*?^```$", "", page.read_text("utf-8"), flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_readme_leads_to_every_page() -> None:
    readme = (ROOT / "README.md").read_text("utf-8")
    for page in ROOT.glob("docs/*.md"):
        assert f"(docs/{page.name})" in readme, page.name


@pytest.mark.parametrize("file", sorted(SOURCE.rglob("*.py")), ids=lambda file: str(file.relative_to(SOURCE)))
def test_every_page_that_the_source_names_exists(file: Path) -> None:
    for named in re.findall(r"docs/[\w/-]+\.md", file.read_text("utf-8")):
        assert (ROOT / named).exists(), named


@pytest.mark.parametrize("name", headgate.__all__)
def test_every_public_name_is_documented(name: str) -> None:
    assert re.search(rf"\b{name}\b", ALL_TEXT)


QUESTIONS = [name for name in dir(headgate.Limiter) if not name.startswith("_")]


@pytest.mark.parametrize("name", QUESTIONS)
def test_every_method_is_documented_with_its_parameters(name: str) -> None:
    method = getattr(headgate.Limiter, name)
    shown = f"{name}{signature(method)}" if callable(method) else name
    assert f"| `{shown}` |" in page("decision")


def test_every_parameter_of_the_constructors_is_documented() -> None:
    constructor = inspect.signature(headgate.AsyncLimiter)
    assert f"`Limiter{signature(headgate.AsyncLimiter)}`" in page("decision")
    assert f"`Limit{signature(headgate.Limit)}`" in page("limits")
    assert f"`Limit.parse{signature(headgate.Limit.parse)}`" in page("limits")
    for name in constructor.parameters:
        assert f"| `{name}` |" in page("decision")
    for name in inspect.signature(headgate.Limit).parameters:
        assert f"| `{name}` |" in page("limits")


def signature(function: Any) -> str:
    """The parameters with their defaults, as a page shows them."""
    shape = inspect.signature(function)
    bare = [each.replace(annotation=each.empty) for each in shape.parameters.values() if each.name != "self"]
    return str(shape.replace(parameters=bare, return_annotation=shape.empty)).replace("'", '"')


def page(name: str) -> str:
    return (ROOT / "docs" / f"{name}.md").read_text("utf-8")


@pytest.mark.parametrize("kind", [headgate.Decision, headgate.Outcome])
def test_every_field_of_an_answer_is_documented(kind: type) -> None:
    for name in set(dir(kind)) - set(dir(tuple)):
        assert name.startswith("_") or f"`{name}`" in page("decision"), name


def test_every_word_for_a_unit_is_documented() -> None:
    for word in _limit_syntax._UNITS:
        assert f"`{word}`" in page("limits")


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_every_algorithm_is_described(algorithm: str) -> None:
    assert f"## {algorithm}\n" in page("algorithms")
    assert f"docs/algorithms.md#{algorithm}" in (ROOT / "README.md").read_text("utf-8")


MODULES = ["headgate", *(module.name for module in pkgutil.walk_packages(headgate.__path__, "headgate."))]


@pytest.mark.parametrize("name", MODULES)
def test_every_example_in_a_docstring_runs(name: str) -> None:
    told = io.StringIO()
    with redirect_stdout(told):
        failed, _ = doctest.testmod(importlib.import_module(name))
    assert not failed, told.getvalue()


def test_every_make_command_exists() -> None:
    targets = set(re.findall(r"^(\w+):", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE))
    assert set(re.findall(r"\bmake ([a-z]+)`", ALL_TEXT)) | {"run", "test"} <= targets


def test_changelog_speaks_of_this_version() -> None:
    assert f"## [{headgate.__version__}]" in (ROOT / "CHANGELOG.md").read_text("utf-8")


def test_documented_rights_are_those_that_the_scripts_need() -> None:
    lua = "".join(file.read_text("utf-8") for file in SOURCE.rglob("*.lua"))
    words = set(re.findall(r"'([A-Z]{3,})'", lua)) - {"COUNT", "KEEPTTL", "LIMIT", "WITHSCORES"}
    assert set(documented_user().rules.upper().split()) == {
        "~HEADGATE:*",
        "~{HEADGATE:*",
        "&HEADGATE:*",
        *(f"+{word}" for word in ("EVALSHA", "EVAL", "SUBSCRIBE", "PING", *words)),
    }


def test_documented_rights_suffice() -> None:
    with RedisServer(user=documented_user()) as server, headgate.Limiter(server.url) as limiter:
        for algorithm in ALGORITHMS:
            key = headgate.Limit(2, timedelta(minutes=1), algorithm=algorithm).by("ada")
            assert [limiter.check(key).allowed for _ in range(3)] == [True, True, False]
            assert limiter.peek(key).remaining == 0
            if algorithm != "concurrency":
                assert limiter.refund(key, 1, id="once")
            limiter.reset(key)
            assert [limiter.enter(key, id="a").allowed for _ in range(3)] == [True] * 3
            if algorithm == "concurrency":
                assert limiter.renew(key, id="a")
                assert limiter.leave(key, id="a")


def test_documented_rights_suffice_for_what_is_done_in_the_background() -> None:
    app = Flask("shop")
    with RedisServer(user=documented_user()) as server, headgate.Limiter(server.url) as limiter:
        Headgate(app, read("limits: [{by: ip, bucket: 100000/minute}]"), server.url)
        with closing(app.extensions["headgate"].gate), server.client() as admin:
            wait_until(lambda: admin.exists("headgate:%fleet", "headgate:%mark") == 2, "a heartbeat and a mark")
            wait_until(lambda: admin.pubsub_numsub("headgate:%news")[0][1], "somebody who listens")
            limiter.block("ip", "127.0.0.1", until=datetime.now(UTC) + timedelta(hours=1))
            wait_until(lambda: app.test_client().get("/").status_code == 403, "the block")
            assert [block.value for block in limiter.blocked()] == ["127.0.0.1"]
            limiter.block("ip", "127.0.0.1")
            assert limiter.unblock("ip", "127.0.0.1")
            wait_until(lambda: app.test_client().get("/").status_code == 404, "its end")


def documented_user() -> AclUser:
    line = re.search(r"^user (\S+) on >(\S+) (.+)$", page("redis"), re.MULTILINE)
    assert line is not None
    return AclUser(*line.groups())
