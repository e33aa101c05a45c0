"""The command line as it operates a fleet: against a real admin server, with a real service, gate and log behind it."""

from __future__ import annotations

import io
import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
from argparse import Namespace
from contextlib import ExitStack, closing
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple
from zoneinfo import ZoneInfo

import pytest

from headgate import InvalidInput, Limiter, cli
from headgate.cli import admin_client, context
from headgate.cli import tail as tails
from headgate.cli.admin_client import AdminClient, AdminError, ConfirmationRequired, is_loopback
from headgate.cli.completion import SCRIPTS, completion_points
from headgate.cli.terminal import Terminal
from headgate.control.admin import AdminServer, Tokens
from headgate.control.config import ConfigStore
from headgate.control.config.watcher import ConfigSource
from headgate.control.service.service import AdminService
from headgate.gate.gate import Gate
from headgate.policy.api_keys import ApiKeyHasher
from headgate.telemetry import DecisionLog
from headgate.telemetry.decision_log.record import DecisionRecord, id_prefix, lost_record
from headgate.telemetry.decision_log.sinks import open_reader, open_sink
from headgate.telemetry.fleet.reporter import StatusReporter
from headgate.telemetry.fleet.status_store import MemoryStatusStore
from headgate.telemetry.human_time import coming, microseconds
from support.paths import DOCS
from support.servers import RedisServer, wait_until
from support.terminals import ESCAPE, PLAIN, PseudoTerminal
from support.traffic import SECRET, Request

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

PAGE = (DOCS / "cli.md").read_text("utf-8")
KEY = "sk_live_4f9a1c77"
HASH = ApiKeyHasher(SECRET.encode()).fingerprint(KEY)
POLICY = """\
tier: free
routes:
  - {path: /search, class: search, cost: 5}
limits:
  - {name: per-ip, by: ip, bucket: 10000/minute}
  - {name: search, class: search, by: tenant, missing: ip, bucket: 100/day, tiers: {pro: 1000/day}}
  - {name: keys, path: /keys, by: api_key, missing: skip, bucket: 10/minute}
"""
VARIABLES = ("HEADGATE_ADMIN", "HEADGATE_TOKEN", "HEADGATE_SECRET", "FORCE_COLOR", "NO_COLOR", "TZ", "http_proxy")


class Fleet(NamedTuple):
    """A gate, and the admin server that looks at it."""

    url: str
    store: ConfigStore
    gate: Gate
    log: DecisionLog
    reporter: StatusReporter
    tokens: dict[str, str]
    """By role."""
    log_file: Path

    def follow(self) -> None:
        """Wait until the gate has heard of what was changed."""
        wait_until(lambda: self.gate.policy_version == f"{self.store.version}", "the gate to follow")

    def send(self, times: int = 1, **said: Any) -> list[int]:
        """The statuses of so many requests; 200 for those that got in."""
        admissions = [self.gate.admit(Request(**said)) for _ in range(times)]
        return [200 if each.refusal is None else each.refusal.status for each in admissions]


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory, redis7: RedisServer) -> Iterator[Fleet]:
    """One for all tests, each of which is about clients of its own."""
    tmp_path = tmp_path_factory.mktemp("fleet")
    config, log_url = f"sqlite:///{tmp_path}/config.db", f"sqlite:///{tmp_path}/decisions.db"
    identities = {"user": lambda request: request.user, "tenant": lambda request: request.tenant}
    with ExitStack() as stack:
        store = stack.enter_context(closing(ConfigStore(config, secret=SECRET)))
        store.put_policy(POLICY, author="ada", reason="the first")
        log = stack.enter_context(
            closing(DecisionLog(log_url, secret=SECRET, sample=1.0, node="api-1", writer="thread"))
        )
        counting = {"store": redis7.url, "namespace": "cli-admin"}
        source: Any = ConfigSource(config, node="api-1")
        gate = Gate(source, secret=SECRET, on_decision=log, identities=identities, budget=1.0, **counting)
        stack.enter_context(closing(gate))
        board = MemoryStatusStore()
        reporter = stack.enter_context(closing(StatusReporter(gate, board, secret=SECRET, node="api-1", every=None)))
        tokens = stack.enter_context(closing(Tokens(config)))
        made = {
            role: tokens.make(f"{role}-bob", role, by="test").text
            for role in ("viewer", "support", "operator", "admin")
        }
        counters = stack.enter_context(closing(Limiter(redis7.url, namespace="cli-admin", budget=1.0)))
        service = AdminService(store, counters=counters, log=log_url, status_store=board, secret=SECRET)
        server = stack.enter_context(AdminServer(service, tokens, port=0, pages=False))
        yield Fleet(server.url, store, gate, log, reporter, made, tmp_path / "decisions.db")


@pytest.fixture
def call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], fleet: Fleet
) -> Callable[..., tuple[int, str, str]]:
    """A command in this process: the exit code, what was printed, and what was complained about."""
    monkeypatch.chdir(tmp_path)
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HEADGATE_ADMIN", fleet.url)

    def call(line: str, *, role: str = "operator", given: str = "") -> tuple[int, str, str]:
        monkeypatch.setenv("HEADGATE_TOKEN", fleet.tokens[role])
        (tmp_path / "given.txt").write_text(given)
        with open(tmp_path / "given.txt") as stdin:
            monkeypatch.setattr(sys, "stdin", stdin)
            code = cli.main(shlex.split(line))
        return (code, *capsys.readouterr())

    return call


def rows(printed: str) -> list[list[str]]:
    return [re.split(r"  +", line.strip()) for line in printed.splitlines()]


# ------------------------------------------------------------------ one client


def test_who_command_shows_limits_and_usage(call: Callable[..., tuple[int, str, str]], fleet: Fleet) -> None:
    assert call("tier assign tenant=initech pro --label 'Initech Ltd' --reason 'has paid'")[0] == 0
    assert call("override add tenant=initech 2000/day --limit search --until friday --reason 'contract 1'")[0] == 0
    (kept,) = fleet.store.overrides(who=("tenant", "initech"))
    end_of_friday = coming("friday", now=datetime.now(UTC), at_its_end=True)
    assert kept.row.valid_until_us == microseconds(end_of_friday)
    fleet.follow()
    fleet.send(8, tenant="initech")
    code, printed, _ = call("who initech --utc", role="viewer")
    assert code == 0
    assert "tenant initech (Initech Ltd)" in printed
    assert ["tier", "pro, assigned"] in rows(printed)
    assert re.search(r"search +2000/day +tenant +override \d+ until [\d-]+ 00:00:00 +▍░+ +40 of 2000", printed), printed
    assert re.search(r"\d+ +limit search +2000/day .* active +contract 1 +operator-bob", printed), printed
    code, plain, _ = call("who tenant=initech --json", role="viewer")
    assert {each["limit"]: each["used"] for each in json.loads(plain)["limits"]}["search"] == 40


def test_override_is_made_changed_listed_and_ended(call: Callable[..., tuple[int, str, str]], fleet: Fleet) -> None:
    assert fleet.send(21, tenant="hooli's neighbour").count(429) == 1
    code, printed, told = call(
        "override add tenant=hooli 500/day --limit search --until 'in 2 hours' --reason 'a trial'"
    )
    assert code == 0
    assert re.fullmatch(
        r"added override of tenant hooli on limit search: 500/day until [\w ,:()+/-]+ \(version \d+\)\n", printed
    )
    number = re.search(r"override remove (\d+)", told)
    assert number is not None
    fleet.follow()
    assert fleet.send(21, tenant="hooli") == [200] * 21

    code, printed, _ = call("override list hooli --state active", role="viewer")
    assert [number[1], "tenant hooli", "limit search", "500/day"] == rows(printed)[1][:4]
    assert call(f"override change {number[1]} 600/day --reason 'more of it'")[0] == 0
    (kept,) = fleet.store.overrides(who=("tenant", "hooli"))
    assert (kept.row.quota, kept.row.limit_name, kept.row.reason) == (600, "search", "more of it")
    assert kept.row.valid_until_us is not None, "what was not said has stayed"
    assert call(f"override remove {number[1]} --reason 'over'")[0] == 0
    assert call("override list tenant=hooli --json")[1].strip() == json.dumps({"items": [], "next": None}, indent=2)
    assert call("override list tenant=hooli")[1:] == ("", "No overrides.\n")


def test_block_acts_on_nodes_until_it_is_removed(call: Callable[..., tuple[int, str, str]], fleet: Fleet) -> None:
    assert fleet.send(tenant="mallory-inc") == [200]
    assert call("block tenant=mallory-inc --reason scraping --until 'in 2 hours'", role="support")[0] == 0
    # Nodes are notified by pub/sub. Another path than that of the limit, which the requests of the wait would use up.
    wait_until(lambda: fleet.send(tenant="mallory-inc", path="/") == [403], "the block to act")
    assert fleet.send(tenant="mallory-inc") == [403]
    assert "mallory-inc" in call("block list --search mallory", role="viewer")[1]
    assert "blocked until" in call("who tenant=mallory-inc", role="viewer")[1]
    assert call("block remove tenant=mallory-inc --reason 'a mistake'", role="support")[0] == 0
    wait_until(lambda: fleet.send(tenant="mallory-inc") == [200], "the end of the block")


def test_leaked_unknown_key_is_blocked(call: Callable[..., tuple[int, str, str]], fleet: Fleet) -> None:
    leaked = "9f86d081884c7d659a2feaa0c55ad015"
    assert fleet.send(api_key=leaked) == [200]
    code, _, told = call("block - --reason leaked", role="support", given=leaked)
    assert (code, "API key 9f86d081…d015: blocks every request with this key" in told) == (0, True)
    wait_until(lambda: fleet.send(api_key=leaked) == [403], "the block to act")
    assert leaked not in "".join(call("block list")[1:] + call("audit")[1:])


def test_text_that_can_mean_several_clients_is_not_blocked_unseen(
    call: Callable[..., tuple[int, str, str]], fleet: Fleet
) -> None:
    code, _, told = call("block newcomer --reason x")
    assert code == 1
    assert "tenant=newcomer" in told
    assert "user=newcomer" in told
    assert fleet.store.blocks(who=("tenant", "newcomer")) == []
    code, _, told = call("block tenant=newcomer --reason x")
    assert (code, "this tenant has never been seen" in told) == (0, True)


def test_rollback_shows_what_it_changes_and_wants_a_yes(
    call: Callable[..., tuple[int, str, str]], fleet: Fleet
) -> None:
    assert call("tier assign tenant=rolled pro --label 'Rolled Inc' --reason x")[0] == 0
    before = fleet.store.version
    assert call("override add 'Rolled Inc' 5000/day --limit search --until friday --reason x")[0] == 0
    code, printed, told = call(f"policy rollback {before} --reason back")
    assert (code, printed, fleet.store.version) == (1, "", before + 1)
    assert "removed override of tenant rolled on limit search: 5000/day until the end of Friday" in told
    assert "Live blocks outside the configuration are kept" in told
    assert "give --yes" in told
    assert call(f"policy rollback {before} --reason back --yes")[0] == 0
    assert fleet.store.overrides(who=("tenant", "rolled")) == []


def test_part_of_a_name_lists_the_clients_that_contain_it(call: Callable[..., tuple[int, str, str]]) -> None:
    for number in (1, 2):
        assert call(f"tier assign tenant=bakery-{number} pro --label 'Bakery {number}' --reason x")[0] == 0
    code, _, told = call("who bakery", role="viewer")
    assert (code, "tenant=bakery-1" in told, "tenant=bakery-2" in told) == (1, True, True)
    code, _, told = call("who 'kery 2'", role="viewer")
    assert (code, "did you mean this client?" in told, "tenant=bakery-2" in told) == (1, True, True)


def test_block_is_ended_by_its_number(call: Callable[..., tuple[int, str, str]], fleet: Fleet) -> None:
    assert call("block add 198.51.100.77 --reason scraping")[0] == 0
    (kept,) = fleet.store.blocks(who=("ip", "198.51.100.77"))
    assert call(f"block remove {kept.id} --reason 'a mistake'")[0] == 0
    assert fleet.store.blocks(who=("ip", "198.51.100.77")) == []


def test_reset_lets_a_client_begin_anew(call: Callable[..., tuple[int, str, str]], fleet: Fleet) -> None:
    assert 429 in fleet.send(30, tenant="umbrella")
    code, printed, _ = call("reset tenant=umbrella --limit search --reason 'their job ran twice'", role="support")
    assert code == 0
    assert "umbrella" in printed
    wait_until(lambda: fleet.send(tenant="umbrella") == [200], "the gate to hear of it")
    assert "their job ran twice" in call("audit --search umbrella", role="viewer")[1]


def test_tiers_are_set_assigned_and_given_back(call: Callable[..., tuple[int, str, str]], fleet: Fleet) -> None:
    assert call("tier set pro search 3000/day --reason 'price list'")[0] == 0
    assert ["search", "3000/day", "table"] in [row[-3:] for row in rows(call("tier list")[1])]
    zone = "--timezone Europe/Berlin --starts 04-01"
    assert call(f"tier assign tenant=wayne pro {zone} --reason 'has paid'", role="support")[0] == 0
    shown = call("who tenant=wayne")[1]
    assert "pro, assigned" in shown
    assert "timezone Europe/Berlin, starts 04-01" in shown
    assert call("tier unassign tenant=wayne --reason 'has not'", role="support")[0] == 0
    assert "free, the default tier" in call("who tenant=wayne")[1]
    assert call("tier remove pro search --reason 'as before'")[0] == 0
    assert ["search", "1000/day", "policy"] in [row[-3:] for row in rows(call("tier list")[1])]


def test_key_is_never_shown_and_warned_about(
    call: Callable[..., tuple[int, str, str]], fleet: Fleet, tmp_path: Path
) -> None:
    fleet.send(12, api_key=KEY, path="/keys")
    assert fleet.log.flush()
    lines = [
        "who {}", "why {} --at today", "override add {} 50/minute --limit keys --reason x", "override list {}",
        "tier assign {} pro --reason x", "reset {} --reason x", "block {} --reason x", "block remove {} --reason x",
        "tier unassign {} --reason x", "tail {} --no-follow --json",
    ]  # fmt: skip
    for line in lines:
        code, printed, complained = call(line.format("-"), given=f"{KEY}\n")
        assert (code, complained.count("warning")) == (0, 0), complained
        assert KEY not in printed + complained
        code, printed, complained = call(line.format(f"api_key={KEY}"))
        assert "stays in the shell's history" in complained
        assert KEY not in printed + complained
        assert "warning" not in call(line.format(f"api_key={HASH}"))[2]
    assert HASH in call(f"who api_key={HASH}")[1]
    files = [*fleet.log_file.parent.iterdir()]
    assert files
    for file in files:
        assert KEY.encode() not in file.read_bytes(), file


def test_name_is_no_key(call: Callable[..., tuple[int, str, str]], fleet: Fleet) -> None:
    key = "sk_live_of_the_corner_cafe"
    assert call("tier assign - pro --label 'Corner Cafe' --reason paid", given=f"{key}\n")[0] == 0
    fleet.follow()
    fleet.send(api_key=key, path="/keys")
    assert fleet.log.flush()
    for name in ("Corner Cafe", "corner cafe"):
        code, printed, complained = call(f"who '{name}'")
        assert (code, "Corner Cafe" in printed, complained) == (0, True, "")
    assert call("tier unassign 'Corner Cafe' --reason left")[0] == 0
    assert call("tier unassign 'Corner Cafe' --reason 'nor its name'")[0] == 0
    assert call("who 'Corner Cafe'")[2] == "", "the log knows it by that"


def test_override_is_of_some_limit(call: Callable[..., tuple[int, str, str]]) -> None:
    code, _, complained = call("override add tenant=acme 10/minute --reason x")
    assert code == 2
    assert "name a limit with --limit LIMIT (see `headgate who`), or a class with --class CLASS" in complained


def test_address_with_prefix_differs_from_a_network(call: Callable[..., tuple[int, str, str]]) -> None:
    code, _, complained = call("block ip=198.51.100.7/24 --reason scraping")
    assert (code, "write 198.51.100.0/24, or the address alone" in complained) == (1, True)
    code, _, complained = call("block 198.51.100.7/24 --reason scraping")
    assert (code, "ip=198.51.100.0/24" in complained, "ip=198.51.100.7" in complained) == (1, True, True)


def test_why_uses_the_server_with_a_token(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)

    def told() -> str:
        assert cli.main(["why", "Acme", "--at", "today"]) == 2
        return capsys.readouterr().err

    assert "decisions.db" in told(), "a log here"
    monkeypatch.setenv("HEADGATE_TOKEN", "not one")
    assert "HEADGATE_TOKEN contains no token" in told()


def test_why_says_the_same_through_the_server_as_from_the_log(
    call: Callable[..., tuple[int, str, str]], fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    denied = fleet.send(30, tenant="cyberdyne").count(429)
    assert fleet.log.flush()
    code, printed, _ = call("why tenant=cyberdyne --at today --utc", role="viewer")
    assert code == 0
    assert f"We rejected {denied} of them" in printed
    assert "---- For colleagues, not part of the mail ----" in printed
    parts = [call(f"why tenant=cyberdyne --at today --utc --only {part}")[1] for part in ("mail", "details")]
    assert printed == "\n---- For colleagues, not part of the mail ----\n\n".join(parts)
    found = json.loads(call("why tenant=cyberdyne --at today --json", role="viewer")[1])
    assert (found["rejected"], found["limits"][0]["name"]) == (denied, "search")

    monkeypatch.setenv("HEADGATE_SECRET", SECRET)
    log = f"sqlite:///{fleet.log_file}"
    assert call(f"why tenant=cyberdyne --at today --utc --log {log}")[1] == printed


def test_why_asks_the_server_in_the_zone_of_this_machine(
    call: Callable[..., tuple[int, str, str]], fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TZ", "Asia/Tokyo")
    assert "JST (UTC+09:00)" in call("why tenant=nobody --at yesterday")[1]
    monkeypatch.setenv("TZ", "nowhere")
    code, printed, told = call("why tenant=nobody --at yesterday")
    assert (code, "UTC" in printed, "times are UTC" in told) == (0, True, True)


# ------------------------------------------------------------------ all clients


def test_tail_shows_decisions_and_follows_them(fleet: Fleet, tmp_path: Path) -> None:
    fleet.send(22, tenant="tyrell")
    assert fleet.log.flush()
    settings = {"HEADGATE_ADMIN": fleet.url, "HEADGATE_TOKEN": fleet.tokens["viewer"], "TZ": "UTC"}
    with PseudoTerminal(tmp_path, "tail", "tenant=tyrell", "--outcome", "denied", columns=200, **settings) as terminal:
        terminal.until("@api-1")
        fleet.send(tenant="tyrell", method="PUT")
        assert fleet.log.flush()
        terminal.until("PUT /search of tenant tyrell")
        fleet.send(tenant="tyrell", method="DELETE")
        assert fleet.log.flush()
        terminal.until("DELETE /search of tenant tyrell")
        with closing(open_reader(f"sqlite:///{fleet.log_file}")) as reader:
            earlier = next(each for each in reader.recent(most=100) if each.method == "PUT")
        late = earlier._replace(id=id_prefix(earlier.at_us + 1) + earlier.id[14:], method="PATCH")
        with closing(open_sink(f"sqlite:///{fleet.log_file}")) as another_node:
            another_node.write([late])
        terminal.until("PATCH /search of tenant tyrell")
        terminal.process.send_signal(signal.SIGINT)
        assert terminal.end() == 0
    lines = ESCAPE.sub("", terminal.shown).splitlines()
    assert re.fullmatch(
        r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d denied   GET /search of tenant tyrell: search .* @api-1", lines[0]
    )
    assert sum("denied   " in line for line in lines) == 5, "each is shown once"
    assert "Traceback" not in terminal.shown


class Log:
    """A decision log in a file, asked as the server is."""

    def __init__(self, folder: Path) -> None:
        self.sink = open_sink(f"sqlite:///{folder}/decisions.db")
        self._url = f"sqlite:///{folder}/decisions.db"

    def write(self, *at_us: int, by: str = "a") -> None:
        for some in range(0, len(at_us), 500):
            self.sink.write([_record(each, by) for each in at_us[some : some + 500]])

    def ask(self, *, after: str = "", most: int = 100, outcome: str | None = None) -> dict[str, Any]:
        with closing(open_reader(self._url)) as reader:
            found = reader.recent(after=after, most=most, outcome=outcome)
        return {"items": [{"id": each.id, "at_us": each.at_us} for each in found]}


def _record(at_us: int, by: str) -> DecisionRecord:
    return lost_record(f"{id_prefix(at_us)}{by}", 1, since_us=at_us, until_us=at_us, node=by, region="")


def test_what_is_written_late_is_shown_once_and_nothing_twice(tmp_path: Path) -> None:
    now_us = time.time_ns() // 1000 - 1_000_000
    log = Log(tmp_path)
    log.write(*range(now_us, now_us + 3_000, 1))
    shown = log.ask(most=10)["items"]
    tail = tails.LogTail(log.ask, shown)

    def new() -> list[int]:
        return [each["at_us"] - now_us for some in tail.more() for each in some]

    assert new() == []
    log.write(now_us + 5_000)
    assert new() == [5_000]
    log.write(now_us + 4_000, by="b")
    assert new() == [4_000], "also what was written after newer ones"
    log.write(now_us + 10, by="b")
    assert new() == [], "that was before the first that is shown"
    log.write(now_us + 7_200_000_000, by="c")
    assert new() == [7_200_000_000]
    log.write(now_us + 6_000)
    assert new() == [6_000], "one clock that is ahead hides nobody"
    log.write(*range(now_us + 100_000, now_us + 105_000))
    assert len(new()) == 5_000
    assert len(tail._seen) <= tails.MAX_REREAD
    log.write(now_us + 104_500, by="b")
    log.write(now_us + 100_500, by="b")
    assert new() == [104_500], "what is looked at again is bounded"
    assert new() == []
    log.sink.close()


def test_who_command_shows_known_facts_only(call: Callable[..., tuple[int, str, str]]) -> None:
    """Of a network nothing is counted, and of a hash no limit can be told."""
    network = call("who 203.0.113.0/24", role="viewer")[1]
    assert "A network has no counters of its own" in network
    assert "counted per address" in network
    assert "hash" not in network
    hashed = call(f"who tenant=hmac:{'7' * 32}", role="viewer")[1]
    assert "We only store a hash of this tenant" in hashed
    assert "Its limits are unknown." in hashed
    assert "pass" not in hashed


def test_time_on_the_other_side_of_a_change_of_clocks_says_its_zone() -> None:
    service = context.CommandContext(Namespace(utc=False), Terminal(io.StringIO()), Terminal(io.StringIO()))
    service.zone = BERLIN
    shown = {service.time(microseconds(datetime(2096, month, 1, tzinfo=BERLIN))) for month in (1, 7)}
    is_winter = service.zone_name == "UTC+01:00"
    assert shown == {
        "2096-01-01 00:00:00" + ("" if is_winter else " UTC+01:00"),
        "2096-07-01 00:00:00" + (" UTC+02:00" if is_winter else ""),
    }


def test_rare_outcome_is_found_among_all_that_has_come_since(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headgate.telemetry.decision_log.sinks.sqlite.MAX_SCANNED", 100)
    now_us = time.time_ns() // 1000 - 1_000_000
    log = Log(tmp_path)
    blocked = _record(now_us, "b")._replace(outcome="blocked")
    log.sink.write([blocked._replace(id=id_prefix(now_us - 3_600_000_000))])
    log.write(*range(now_us - 3_000_000_000, now_us - 3_000_000_000 + 200))
    ask = partial(log.ask, outcome="blocked")
    assert ask()["items"] == []
    tail = tails.LogTail(ask, [], lambda: log.ask(most=1)["items"][0]["at_us"])
    assert [*tail.more()] == [[]], "what is long past is not new"
    log.sink.write([blocked])
    assert [each["id"] for some in tail.more() for each in some] == [blocked.id]
    assert [*tail.more()] == [[]]
    log.sink.close()


def test_tail_starts_with_the_given_number(
    call: Callable[..., tuple[int, str, str]], fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tails, "PAGE_SIZE", 8)
    fleet.send(21, tenant="virtucon")
    assert fleet.log.flush()
    for lines, expected in ((8, 8), (20, 20), (21, 21), (1000, 21)):
        printed = call(f"tail tenant=virtucon --json --no-follow --lines {lines}", role="viewer")[1]
        ids = [json.loads(line)["id"] for line in printed.splitlines()]
        assert (len(ids), ids) == (expected, sorted({*ids}))


def test_tail_gives_programs_a_line_for_each(call: Callable[..., tuple[int, str, str]], fleet: Fleet) -> None:
    fleet.send(25, tenant="soylent")
    assert fleet.log.flush()
    code, printed, _ = call("tail tenant=soylent --json --no-follow --lines 7", role="viewer")
    records = [json.loads(line) for line in printed.splitlines()]
    assert (code, len(records), {each["label"] for each in records}) == (0, 7, {"tenant soylent"})
    assert records == sorted(records, key=lambda each: each["id"])
    passed = call("tail tenant=soylent --outcome allowed --no-follow --lines 100", role="viewer")[1]
    assert passed.count("allowed") == 20
    assert call("tail --lines -1")[0] == 2


def test_top_shows_the_fleet_once_in_a_pipe(call: Callable[..., tuple[int, str, str]], fleet: Fleet) -> None:
    fleet.send(100, tenant="stark")
    fleet.reporter.report()
    code, printed, _ = call("top --utc", role="viewer")
    assert code == 0
    assert "\x1b" not in printed
    assert rows(printed.partition("nodes\n")[2])[1][:3] == [f"api-1:{os.getpid()}", "-", "ready"]
    assert re.search(r"near their limit\n(.*\n)+ +tenant stark +search +█+ +0 of 100\n", printed), printed
    assert json.loads(call("top --json", role="viewer")[1])["nodes"][0]["state"] == "ready"
    assert call("top --every 0")[0] == 2


def test_top_shows_quotas_that_proxies_hold(
    call: Callable[..., tuple[int, str, str]], fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fleet.gate, "quota_holdings", lambda: [("shop.user", 3, 450, 1000, 7, 20)], raising=False)
    fleet.reporter.report()
    printed = call("top --utc", role="viewer")[1]
    expected = [["limit", "counters", "held", "of each", "over the limit", "bound"]]
    expected.append(["shop.user", "3", "450", "1.0k", "7", "20"])
    assert rows(printed.partition("quotas held by proxies\n")[2])[:2] == expected


def test_top_says_when_no_node_is_reporting(call: Callable[..., tuple[int, str, str]], fleet: Fleet) -> None:
    fleet.send(100, tenant="stark")
    for prefix in ("beats", "past"):  # until its next report
        fleet.reporter._store.put(f"{prefix}/{fleet.reporter._run}", b"", keep=0)
    code, printed, _ = call("top --utc", role="viewer")
    assert code == 0
    assert "No node is reporting, so no traffic is shown." in printed
    assert "control=" in printed
    assert "0 denied" not in printed


@pytest.mark.parametrize("by", ["q", "Ctrl-C"])
def test_top_is_redrawn_in_a_screen_of_its_own(fleet: Fleet, tmp_path: Path, by: str) -> None:
    fleet.reporter.report()
    settings = {"HEADGATE_ADMIN": fleet.url, "HEADGATE_TOKEN": fleet.tokens["viewer"]}
    with PseudoTerminal(tmp_path, "top", "--every", "0.2", columns=60, **settings) as terminal:
        terminal.until("\x1b[?1049h")
        while terminal.shown.count("allowed/s") < 3:
            terminal.shown += os.read(terminal._ours, 65536).decode()
        if by == "q":
            terminal.type("q")
        else:
            terminal.process.send_signal(signal.SIGINT)
        assert terminal.end() == 0
    assert terminal.shown.endswith("\x1b[?25h\x1b[?1049l")
    assert "\x1b[2J" not in terminal.shown, "what is wiped before it is drawn flickers"
    frames = terminal.shown.split("\x1b[H")[1:]
    assert len(frames) >= 3
    assert all(
        len(ESCAPE.sub("", line).replace("\x1b[?2026l", "")) < 60 for frame in frames for line in frame.split("\n")
    )


# ------------------------------------------------------------------ policies, audit, tokens


def test_policy_is_shown_checked_put_compared_and_rolled_back(
    call: Callable[..., tuple[int, str, str]], fleet: Fleet, tmp_path: Path
) -> None:
    before = fleet.store.version
    code, text, told = call("policy show", role="viewer")
    assert (code, text) == (0, POLICY)
    assert f"--based-on {before} " in told
    (tmp_path / "policy.yaml").write_text(text.replace("cost: 5", "cost: 7"))
    (tmp_path / "slip.yaml").write_text(text.replace("by: ip, bucket", "by: ip, bukcet"))

    assert call("policy check policy.yaml", role="viewer")[:2] == (0, "policy.yaml: valid\n")
    code, printed, complained = call("policy check slip.yaml", role="viewer")
    assert (code, printed) == (1, "")
    assert "slip.yaml:5:28: unknown field 'bukcet'; did you mean 'bucket'?" in complained
    assert json.loads(call("policy check slip.yaml --json", role="viewer")[1])["problems"]

    code, _, complained = call("policy put policy.yaml --reason 'searches cost 7'")
    assert (code, "--based-on VERSION, which `headgate policy show` prints" in complained) == (2, True)
    assert call(f"policy put policy.yaml --based-on {before} --reason 'searches cost 7'")[0] == 0
    assert call(f"policy put policy.yaml --based-on {before} --reason 'again'")[0] in (0, 1)
    (tmp_path / "policy.yaml").write_text(text.replace("cost: 5", "cost: 8"))
    code, _, complained = call(f"policy put policy.yaml --based-on {before} --reason 'again'")
    assert (code, "nothing was changed; check" in complained) == (1, True)

    after = fleet.store.version
    assert [row[-1] for row in rows(call("policy versions --most 1", role="viewer")[1])[1:]] == ["searches cost 7"]
    code, printed, _ = call(f"policy diff {after}", role="viewer")
    assert (code, "-  - {path: /search, class: search, cost: 5}" in printed) == (0, True)
    assert call(f"policy diff {before} {after}", role="viewer")[1] == printed
    assert "+  - {path: /search, class: search, cost: 5}" in call(f"policy diff {after} {before}", role="viewer")[1]
    assert call(f"policy rollback {before} --section documents --yes --reason 'too much'")[0] == 0
    assert call("policy show", role="viewer")[1] == POLICY
    assert "cost: 7" in call(f"policy show --version {after}", role="viewer")[1]
    assert ["search", "100/day", "tenant", "class search", "pro: 1000/day"] in rows(call("policy show --rules")[1])


def test_canary_is_started_compared_promoted_and_rolled_back(
    call: Callable[..., tuple[int, str, str]], fleet: Fleet, tmp_path: Path
) -> None:
    assert call("policy status", role="viewer")[2] == "No canary was ever started.\n"
    assert json.loads(call("policy status --json", role="viewer")[1])["canary"] is None
    (tmp_path / "policy.yaml").write_text(POLICY.replace("cost: 5", "cost: 7"))
    before, why = fleet.store.version, "--reason 'searches cost 7'"
    assert call(f"policy canary policy.yaml --percent 10 {why}")[0] == 2  # without --based-on
    fleet.reporter.report()
    code, printed, told = call(
        f"policy canary policy.yaml --nodes api-1 --max-rejections '+2.5 %' --max-latency 3x --for 10m --promote "
        f"--based-on {before} {why}"
    )
    assert (code, printed) == (0, f"started canary of policy.yaml on nodes api-1 (version {before + 1})\n")
    assert "note: Candidate on api-1: 1 of 1 nodes." in told
    assert call(f"policy put policy.yaml --based-on {before} {why}")[0] == 1
    fleet.follow()
    fleet.send(3, tenant="canary bird")
    fleet.reporter.report()
    code, printed, _ = call("policy status", role="viewer")
    assert code == 0
    assert printed.startswith("Canary of policy.yaml on nodes api-1: running\nstarted ")
    assert re.search(r"^observed until .*, then promoted$", printed, re.MULTILINE), printed
    assert re.search(r"^latency \(p99\) .* too few requests$", printed, re.MULTILINE), printed
    assert "no other nodes" in printed.splitlines()
    assert re.search(r"^api-1:\d+ +ready +candidate ", printed, re.MULTILINE), printed
    found = json.loads(call("policy status --json", role="viewer")[1])["canary"]
    assert (found["max_rejections"], found["max_errors"], found["max_latency"], found["for_s"]) == (2.5, 1, 3, 600)
    code, _, told = call("policy promote --reason 'it is fine'")
    assert (code, "canary: the candidate was not compared: no other nodes" in told) == (3, True)
    assert call("policy promote --reason 'it is fine'", role="support")[0] == 1
    assert call("policy promote --reason 'it is fine' --confirm canary")[0] == 0
    assert "cost: 7" in call("policy show", role="viewer")[1]
    code, printed, _ = call("policy status", role="viewer")
    assert re.search(r"^promoted .* by operator-bob: it is fine$", printed, re.MULTILINE), printed

    (tmp_path / "policy.yaml").write_text(POLICY)
    assert call(f"policy canary policy.yaml --percent 10 --based-on {fleet.store.version} {why}")[0] == 0
    code, printed, _ = call("policy rollback --reason 'rather not'")
    assert (code, "rolled back canary of policy.yaml on 10 % of nodes" in printed) == (0, True)
    assert call("policy rollback --reason again")[0] == 1
    assert call(f"policy rollback {before} --section documents --yes --reason 'as before'")[0] == 0
    for line in (
        "policy canary policy.yaml --based-on 1 --reason x",
        "policy canary policy.yaml --percent 10 --nodes a --based-on 1 --reason x",
        "policy canary policy.yaml --percent 10 --max-errors many --based-on 1 --reason x",
        "policy canary policy.yaml --percent 10 --for soon --based-on 1 --reason x",
        "policy rollback --section tiers --reason x",
    ):
        assert call(line)[0] == 2, line


def test_audit_lists_actors_actions_and_reasons(call: Callable[..., tuple[int, str, str]], fleet: Fleet) -> None:
    assert call("tier assign tenant=vandelay pro --reason 'imports'", role="support")[0] == 0
    assert call("tier unassign tenant=vandelay --reason 'exports'", role="operator")[0] == 0
    first, second = rows(call("audit --search vandelay", role="viewer")[1])[1:]
    assert (first[1], first[-1], second[1], second[-1]) == ("operator-bob", "exports", "support-bob", "imports")
    found = json.loads(call("audit --author support-bob --most 1 --json", role="viewer")[1])
    assert [each["author"] for each in found["items"]] == ["support-bob"]
    assert "More than these 1 exist" in call("audit --most 1", role="viewer")[2]
    assert call("audit --most 0")[0] == 2


def test_token_is_made_used_and_revoked(
    call: Callable[..., tuple[int, str, str]], fleet: Fleet, tmp_path: Path
) -> None:
    code, token, told = call("token make ci --role viewer --days 1", role="admin")
    assert (code, "It is shown once" in told) == (0, True)
    assert re.fullmatch(r"hg_\w+_\w+\n", token)
    (tmp_path / "token.txt").write_text(token)
    assert call("tier list --token-file token.txt")[0] == 0
    id = token.split("_")[1]
    assert [id, "ci", "viewer", "active"] in [row[:4] for row in rows(call("token list", role="admin")[1])]
    assert call(f"token revoke {id}", role="admin")[0] == 0
    code, _, complained = call("tier list --token-file token.txt")
    assert (code, "creates a valid token" in complained) == (2, True)
    assert token.strip() not in call("token list --json", role="admin")[1]


# ------------------------------------------------------------------ what is refused


def test_change_needs_a_reason(call: Callable[..., tuple[int, str, str]], fleet: Fleet) -> None:
    before = fleet.store.version
    for line in (
        "block 198.51.100.9",
        "tier set pro search 1/minute",
        "override remove 1 --reason ' '",
        "reset tenant=x",
    ):
        code, printed, complained = call(line)
        assert (code, printed) == (2, "")
        assert 'a change needs a reason for the audit log: add --reason "' in complained
    assert fleet.store.version == before


def test_danger_is_confirmed_by_an_option(call: Callable[..., tuple[int, str, str]], fleet: Fleet) -> None:
    before = fleet.store.version
    line = "override add tenant=massive 100000/minute --limit search --reason 'a sale'"
    code, printed, complained = call(line)
    assert (code, printed, fleet.store.version) == (3, "", before)
    assert "ten-times: " in complained
    assert complained.endswith("To confirm it, add: --confirm ten-times\n")
    assert call(f"{line} --confirm tenth")[0] == 3
    assert call(f"{line} --confirm ten-times")[0] == 0
    assert fleet.store.version == before + 1


@pytest.mark.parametrize(("typed", "code"), [("yes", 0), ("y", 3), ("no", 3)])
def test_danger_is_confirmed_at_a_terminal(fleet: Fleet, tmp_path: Path, typed: str, code: int) -> None:
    before = fleet.store.version
    settings = {"HEADGATE_ADMIN": fleet.url, "HEADGATE_TOKEN": fleet.tokens["operator"], "NO_COLOR": "1"}
    line = ["override", "add", f"tenant=big-{typed}", "99999/minute", "--limit", "search", "--reason", "a sale"]
    with PseudoTerminal(tmp_path, *line, **settings) as terminal:
        terminal.until("Continue? Type yes: ")
        assert "Careful: " in terminal.shown
        assert fleet.store.version == before
        terminal.type(f"{typed}\n")
        assert terminal.end() == code
    assert fleet.store.version - before == (code == 0)


def test_first_document_of_a_store_is_based_on_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "policy.yaml").write_text(POLICY)
    config = f"sqlite:///{tmp_path}/config.db"
    with closing(ConfigStore(config, secret=SECRET)) as store, closing(Tokens(config)) as tokens:
        token = tokens.make("ada", "operator", by="test").text
        with AdminServer(AdminService(store, secret=SECRET), tokens, port=0, pages=False) as server:
            monkeypatch.setenv("HEADGATE_ADMIN", server.url)
            monkeypatch.setenv("HEADGATE_TOKEN", token)
            assert cli.main(["policy", "put", "policy.yaml", "--reason", "first"]) == 0, capsys.readouterr()
        assert (store.version, store.document().text) == (1, POLICY)  # type: ignore[union-attr]


def test_document_is_looked_at_before_it_is_put(fleet: Fleet, tmp_path: Path) -> None:
    (tmp_path / "policy.yaml").write_text(POLICY.replace("cost: 5", "cost: 6"))
    before = fleet.store.version
    settings = {"HEADGATE_ADMIN": fleet.url, "HEADGATE_TOKEN": fleet.tokens["operator"], "NO_COLOR": "1"}
    with PseudoTerminal(tmp_path, "policy", "put", "policy.yaml", "--reason", "x", **settings) as terminal:
        terminal.until("Type yes: ")
        assert "+  - {path: /search, class: search, cost: 6}" in terminal.shown
        terminal.type("no\n")
        assert terminal.end() == 1
    assert fleet.store.version == before


@pytest.mark.parametrize(
    ("line", "role", "code", "complaint"),
    [
        ("tier set pro search 2000/minute --reason x", "support", 1, "operator"),
        ("block tenant=x --reason x", "viewer", 1, "support"),
        ("token list", "operator", 1, "admin"),
        ("override remove 999999 --reason x", "operator", 1, "999999"),
        ("override add tenant=x 5/fortnight --limit search --reason x", "operator", 1, "unknown unit 'fortnight'"),
        ("override add tenant=x 50/day --limit serch --reason x", "operator", 1, "did you mean 'search'?"),
        ("override add tenant=x 0/minute --limit search --reason x", "operator", 1, "block"),
        (
            "override add tenant=x 5/day --limit search --until yesterday --reason x",
            "operator",
            2,
            "'yesterday' is not a time",
        ),
        ("block '*' --reason x", "operator", 1, ""),
        ("policy rollback 999999 --reason x", "operator", 1, "999999"),
        ("policy put nowhere.yaml --reason x", "operator", 2, "nowhere.yaml: cannot be read: No such file"),
        ("override", "operator", 2, "required: ACTION"),
        ("tail --outcome lots", "viewer", 2, "invalid choice: 'lots'"),
    ],
)
def test_refusal_ends_with_its_code(
    call: Callable[..., tuple[int, str, str]], fleet: Fleet, line: str, role: str, code: int, complaint: str
) -> None:
    before = fleet.store.version
    ended, printed, complained = call(line, role=role)
    assert (ended, printed) == (code, ""), complained
    assert complaint in complained
    assert fleet.store.version == before


def test_missing_token_or_server_names_the_remedy(
    call: Callable[..., tuple[int, str, str]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, fleet: Fleet
) -> None:
    (tmp_path / "empty.txt").write_text("\n")
    (tmp_path / "prose.txt").write_text("my token is secret\n")
    free = socket.create_server(("127.0.0.1", 0))
    port = free.getsockname()[1]
    free.close()
    for line, told in {
        "tier list --token-file empty.txt": "no token: set HEADGATE_TOKEN, or give --token-file",
        "tier list --token-file prose.txt": "contains no token: tokens start with hg_",
        "tier list --token-file no.txt": "--token-file no.txt: cannot be read: No such file",
        f"tier list --admin http://127.0.0.1:{port}": "Connection refused. Start one with `headgate admin`",
        "tier list --admin http://no.invalid": "no admin server at http://no.invalid",
        "tier list --admin nonsense": "write it like http://127.0.0.1:8001",
    }.items():
        code, printed, complained = call(line)
        assert (code, printed) == (2, "")
        assert told in complained
    monkeypatch.setitem(fleet.tokens, "none", "hg_0000000000_" + "x" * 43)
    code, _, complained = call("tier list", role="none")
    assert (
        code,
        "set HEADGATE_TOKEN, or give --token-file; `headgate admin token NAME` creates a valid token" in complained,
    ) == (2, True)


def test_token_that_travels_in_clear_is_warned_about(call: Callable[..., tuple[int, str, str]]) -> None:
    assert "the token is sent unencrypted to http://no.invalid; use https" in call("top --admin http://no.invalid")[2]


def test_what_others_have_changed_meanwhile_is_not_written_over(
    call: Callable[..., tuple[int, str, str]], fleet: Fleet
) -> None:
    assert call("tier assign tenant=acid pro --reason x")[0] == 0
    seen = fleet.store.version
    assert call("tier assign tenant=acid free --reason y")[0] == 0
    code, _, complained = call(f"tier assign tenant=acid pro --label Acid --based-on {seen - 1} --reason z")
    assert (code, "check the current state and try again" in complained) == (1, True)


# ------------------------------------------------------------------ what it costs


def test_command_costs_only_itself(tmp_path: Path) -> None:
    (tmp_path / "policy.yaml").write_text(POLICY)
    loaded = called(["check", "policy.yaml"], folder=tmp_path).splitlines()[-1].split()
    for module in (
        "urllib.request",
        "headgate.cli.top",
        "headgate.cli.admin_client",
        "headgate.telemetry",
        "sqlalchemy",
        "fastapi",
    ):
        assert module not in loaded


def test_all_commands_are_there_without_what_the_server_needs(tmp_path: Path) -> None:
    without = ("fastapi", "sqlalchemy", "uvicorn", "jinja2", "alembic", "redis")
    lines = (["--help"], ["completion", "bash"], ["admin", "--help"], ["override", "add", "--help"])
    printed = called(*lines, folder=tmp_path, without=without)
    assert "complete -F _headgate headgate" in printed
    assert "usage: headgate admin" in printed
    assert "usage: headgate override add" in printed


def called(*lines: list[str], folder: Path, without: Sequence[str] = ()) -> str:
    """What these commands print in one new process, and then the modules that they have needed."""
    code = f"""
import sys
sys.modules.update(dict.fromkeys({without!r}))
from headgate.cli import main
assert not any([main(line) for line in {lines!r}])
print(*sys.modules)
"""
    ended = subprocess.run(
        [sys.executable, "-c", code], env=PLAIN, cwd=folder, capture_output=True, text=True, timeout=30, check=False
    )
    assert (ended.returncode, ended.stderr) == (0, "")
    return ended.stdout


def test_page_shows_what_could_be_typed() -> None:
    shown = [line[2:] for line in PAGE.splitlines() if line.startswith("$ headgate ")]
    assert len(shown) > 30
    parser = cli.build_parser()
    for line in shown:
        words = shlex.split(line)[1:]
        end = next((place for place, word in enumerate(words) if word in ("<", ">")), len(words))
        parser.parse_args(words[:end])  # ends the test, if it cannot be


def test_every_option_of_an_action_is_documented() -> None:
    for place in completion_points(cli.build_parser()):
        for option in place.options:
            assert option.name in ("-h", "--help") or f"`{option.name}" in PAGE, (place.path, option.name)


# ------------------------------------------------------------------ times ahead

MONDAY = datetime(2026, 11, 16, 8, 40, tzinfo=UTC)
BERLIN = ZoneInfo("Europe/Berlin")


@pytest.mark.parametrize(
    ("written", "begins", "ends"),
    [
        ("friday", "2026-11-20 00:00", "2026-11-21 00:00"),
        ("fri 18:00", "2026-11-20 18:00", "2026-11-20 18:00"),
        ("18:00 on friday", "2026-11-20 18:00", "2026-11-20 18:00"),
        ("monday", "2026-11-23 00:00", "2026-11-17 00:00"),
        ("monday 8:00", "2026-11-23 08:00", "2026-11-23 08:00"),
        ("monday 9:50", "2026-11-16 09:50", "2026-11-16 09:50"),
        ("18:00", "2026-11-16 18:00", "2026-11-16 18:00"),
        ("8am", "2026-11-17 08:00", "2026-11-17 08:00"),
        ("noon", "2026-11-16 12:00", "2026-11-16 12:00"),
        ("tomorrow", "2026-11-17 00:00", "2026-11-18 00:00"),
        ("tomorrow 3pm", "2026-11-17 15:00", "2026-11-17 15:00"),
        ("in 2 hours", "2026-11-16 10:40", "2026-11-16 10:40"),
        ("30m", "2026-11-16 09:10", "2026-11-16 09:10"),
        ("an hour", "2026-11-16 09:40", "2026-11-16 09:40"),
        ("in 2 weeks", "2026-11-30 08:40", "2026-11-30 08:40"),
        ("2026-11-20", "2026-11-20 00:00", "2026-11-21 00:00"),
        ("2026-11-20 6pm", "2026-11-20 18:00", "2026-11-20 18:00"),
        ("2026-11-20T18:00:00Z", "2026-11-20 18:00", "2026-11-20 18:00"),
    ],
)
def test_time_ahead_is_the_first_that_is_meant(written: str, begins: str, ends: str) -> None:
    for at_its_end, expected in ((False, begins), (True, ends)):
        moment = coming(written, now=MONDAY.replace(microsecond=7), zone=UTC, at_its_end=at_its_end)
        assert (f"{moment:%Y-%m-%d %H:%M}", moment.microsecond) == (expected, 0)


@pytest.mark.parametrize(
    ("written", "complaint"),
    [
        ("yesterday", "is not a time"),
        ("next friday", "is not a time"),
        ("friday friday week", "is not a time"),
        ("", "is not a time"),
        ("in 2 months", "is not a time"),
        ("2026-11-10", "2026-11-11 00:00:00 UTC, is over"),
        ("2026-11-10 3pm", "is over"),
        ("today 3:00", "is over"),
        ("2026-13-40 3pm", "is not a time"),
        ("in 999999 weeks", "is too far ahead"),
    ],
)
def test_what_is_over_or_no_time_is_refused_with_examples(written: str, complaint: str) -> None:
    with pytest.raises(InvalidInput, match=f"{complaint}.*write it like") as refused:
        coming(written, now=MONDAY, zone=UTC, at_its_end=True)
    assert repr(written) in str(refused.value)


def test_day_ends_where_the_next_begins_though_the_clocks_change() -> None:
    before_summer_ends = datetime(2026, 10, 24, 12, tzinfo=BERLIN)
    until = coming("sunday", now=before_summer_ends, zone=BERLIN, at_its_end=True)
    assert until.astimezone(UTC) - coming("sunday", now=before_summer_ends, zone=BERLIN).astimezone(UTC) == timedelta(
        hours=25
    )
    assert until == datetime(2026, 10, 26, tzinfo=BERLIN)


# ------------------------------------------------------------------ completion


@pytest.fixture(scope="module")
def scripts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("completion")
    made = {shell: folder / f"headgate.{shell}" for shell in ("bash", "zsh", "fish")}
    found = [*completion_points(cli.build_parser())]
    for shell, file in made.items():
        file.write_text(SCRIPTS[shell](found))
    return made


def completed(script: Path, *lines: str) -> list[list[str]]:
    """What a real bash proposes for the last word of each line; a blank at the end begins another."""
    asked = "".join(f"ask {line.replace('=', ' = ')}{' ' + repr('') if line[-1] in ' =' else ''}\n" for line in lines)
    ask = 'ask() { COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); COMPREPLY=(); "$ours"; echo "${COMPREPLY[*]}"; }'
    finding = "ours=$(complete -p headgate | sed -E 's/.*-F ([^ ]+) headgate/\\1/')"
    ended = subprocess.run(
        ["bash", "--norc", "-c", f"source {script}\n{finding}\n{ask}\n{asked}"],
        capture_output=True, text=True, timeout=30, check=True, cwd=script.parent,
    )  # fmt: skip
    assert ended.stderr == ""
    return [line.split() for line in ended.stdout.splitlines()]


def test_shell_completes_what_the_parser_knows(scripts: dict[str, Path]) -> None:
    found = {place.path: place for place in completion_points(cli.build_parser())}
    assert {("override", "add"), ("block", "list"), ("policy", "rollback"), ("admin", "token")} <= found.keys()
    lines = [" ".join(("headgate", *path)) + " " for path in found]
    for place, words in zip(found.values(), completed(scripts["bash"], *lines), strict=True):
        expected = {*place.commands, *place.arguments, *(option.name for option in place.options)}
        files = {file.name for file in scripts["bash"].parent.iterdir()} if place.takes_files else set()
        assert {*words} == expected | files, place.path


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("headgate ov", ["override"]),
        ("headgate override add acme --re", ["--reason"]),
        ("headgate who override ", ["-h", "--help", "--admin", "--token-file", "--json", "--utc"]),
        ("headgate token make ada --role o", ["operator"]),
        ("headgate token make ada --role=o", ["operator"]),
        ("headgate override list --state=", ["all", "active", "future", "expired"]),
        ("headgate why acme --at ", []),
        ("headgate why acme --policy headgate.b", ["headgate.bash"]),
        ("headgate completion z", ["zsh"]),
        ("headgate nothing ", None),
    ],
)
def test_bash_proposes(scripts: dict[str, Path], line: str, words: list[str] | None) -> None:
    (proposed,) = completed(scripts["bash"], line)
    assert proposed == (words if words is not None else completed(scripts["bash"], "headgate ")[0])


def test_scripts_quote_what_helps_say(scripts: dict[str, Path]) -> None:
    """Texts of help hold signs that shells obey: the scripts define functions, and do nothing else."""
    ended = subprocess.run(["bash", "-n", str(scripts["bash"])], capture_output=True, timeout=30, check=False)
    assert (ended.returncode, ended.stderr) == (0, b"")
    for place in completion_points(cli.build_parser()):
        for name, about in place.commands.items():
            assert f"{name}:{about}".replace("'", "'\"'\"'") in scripts["zsh"].read_text()
            assert about.replace("\\", "\\\\").replace("'", "\\'") in scripts["fish"].read_text()


# ------------------------------------------------------------------ servers that fail


class Scripted:
    """A server that answers each connection with what it was told to, byte by byte, and keeps what it was asked."""

    def __init__(self, *answers: bytes) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self.asked: list[bytes] = []
        self._thread = threading.Thread(target=self._serve, args=(answers,), daemon=True)
        self._thread.start()

    def _serve(self, answers: Sequence[bytes]) -> None:
        for answer in answers:
            connection, _ = self._listener.accept()
            with connection:
                self.asked.append(connection.recv(65536))
                connection.sendall(answer)

    def __enter__(self) -> Scripted:
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.close()
        self._thread.join(5)


def answer(status: str, body: Any = None, *fields: str) -> bytes:
    text = json.dumps(body).encode()
    head = "\r\n".join([f"HTTP/1.1 {status}", f"Content-Length: {len(text)}", "Connection: close", *fields])
    return head.encode() + b"\r\n\r\n" + text


@pytest.fixture
def naps(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """How long was waited, without waiting."""
    taken: list[float] = []
    monkeypatch.setattr(admin_client.time, "sleep", taken.append)
    return taken


def test_write_whose_connection_breaks_is_asked_again_under_the_same_key(naps: list[float]) -> None:
    with Scripted(b"", answer("200 OK", {"version": 2}, 'ETag: "2"')) as server:
        reply = AdminClient(server.url, "hg_x").request("POST", "blocks", body={"reason": "x"}, based_on=1)
    keys = [re.search(rb"(?i)idempotency-key: (\S+)", each) for each in server.asked]
    assert reply == ({"version": 2}, 2)
    assert [key[1] for key in keys if key] == [keys[0][1]] * 2 if keys[0] else False
    assert all(b'If-Match: "1"' in each and b"Bearer hg_x" in each for each in server.asked)
    assert naps == [admin_client.RETRY_DELAY_S]


def test_write_that_is_still_in_progress_is_waited_for(naps: list[float]) -> None:
    in_progress = {"type": "in-progress", "title": "The same request is at work", "status": 409, "detail": "Wait."}
    with Scripted(answer("409 Conflict", in_progress), answer("200 OK", {"version": 2})) as server:
        assert AdminClient(server.url, "hg_x").request("POST", "blocks", body={}).body == {"version": 2}


def test_other_writes_have_other_keys(naps: list[float]) -> None:
    with Scripted(*[answer("200 OK", {})] * 2) as server:
        for _ in range(2):
            AdminClient(server.url, "hg_x").request("POST", "blocks", body={})
    assert len({re.search(rb"(?i)idempotency-key: (\S+)", each)[1] for each in server.asked}) == 2  # type: ignore[index]


def test_retry_after_is_waited_for_once(naps: list[float]) -> None:
    busy = answer("429 Too Many Requests", {"detail": "slow"}, "Retry-After: 7")
    with Scripted(busy, answer("200 OK", {"items": []})) as server:
        assert AdminClient(server.url, "hg_x").get("audit") == {"items": []}
    assert naps == [7.0]
    with (
        Scripted(busy, busy) as server,
        pytest.raises(AdminError, match="too many requests") as refused,
    ):
        AdminClient(server.url, "hg_x").get("audit")
    assert (refused.value.code, naps) == (2, [7.0, 7.0])


def test_long_retry_after_is_not_waited_for(naps: list[float]) -> None:
    with (
        Scripted(answer("429 Too Many Requests", None, "Retry-After: 3600")) as server,
        pytest.raises(AdminError, match="too many requests"),
    ):
        AdminClient(server.url, "hg_x").get("audit")
    assert naps == []


def test_token_follows_no_redirect(naps: list[float]) -> None:
    with Scripted() as elsewhere, Scripted(answer("302 Found", None, f"Location: {elsewhere.url}/api")) as server:
        with pytest.raises(AdminError, match="answers 302, and not like an admin server"):
            AdminClient(server.url, "hg_x").get("audit")
        assert elsewhere.asked == []


def test_stranger_is_no_admin_server(naps: list[float]) -> None:
    page = b"HTTP/1.1 200 OK\r\nContent-Length: 6\r\nConnection: close\r\n\r\n<html>"
    with Scripted(page) as server, pytest.raises(AdminError, match="does not answer like an admin server"):
        AdminClient(server.url, "hg_x").get("audit")


@pytest.mark.parametrize(
    ("problem", "code", "told"),
    [
        ({"type": "config-away", "status": 503, "detail": "The config store is away."}, 2, "away: try again later"),
        (
            {"type": "failed", "status": 500, "detail": "The log says more."},
            2,
            "more: this is a bug of the server",
        ),
        (
            {"type": "changed-meanwhile", "status": 412, "detail": "It has changed."},
            1,
            "changed: nothing was changed; check",
        ),
        ({"type": "invalid", "status": 422, "detail": "a; b", "problems": ["a", "b"]}, 1, "refused:\n  a\n  b"),
        ({"type": "invalid", "status": 422, "detail": "a", "problems": ["a"]}, 1, "a"),
        (
            {"type": "role-too-low", "status": 403, "detail": "for operators, and you are support."},
            1,
            "you are support",
        ),
    ],
)
def test_rejection_names_the_remedy(naps: list[float], problem: dict[str, Any], code: int, told: str) -> None:
    status = f"{problem['status']} No"
    with Scripted(answer(status, {"title": "No", **problem})) as server, pytest.raises(AdminError) as refused:
        AdminClient(server.url, "hg_x").get("audit")
    assert (refused.value.code, refused.value.status) == (code, problem["status"])
    assert str(refused.value).endswith(told) or told in str(refused.value)
    assert naps == []


def test_guardrails_say_how_to_confirm(naps: list[float]) -> None:
    dangers = [{"code": "ten-times", "text": "100 times as much."}, {"code": "policy", "text": "A limit is gone."}]
    problem = {"type": "confirmation-needed", "title": "Sure?", "status": 409, "detail": "", "dangers": dangers}
    with Scripted(answer("409 Conflict", problem)) as server, pytest.raises(ConfirmationRequired) as refused:
        AdminClient(server.url, "hg_x").request("PUT", "policy", body={})
    assert refused.value.code == 3
    assert "ten-times: 100 times as much.\n  policy: A limit is gone." in str(refused.value)
    assert str(refused.value).endswith("--confirm ten-times --confirm policy")


@pytest.mark.parametrize(
    "url", ["127.0.0.1:8001", "ftp://x", "http://", "http://u:p@h", "http://h/?token=x", "http://h:x"]
)
def test_what_is_no_url_of_a_server_is_refused(url: str) -> None:
    with pytest.raises(InvalidInput, match="admin server"):
        AdminClient(url, "hg_x")


@pytest.mark.parametrize(
    ("url", "stays"),
    [
        ("http://127.0.0.1:1", True),
        ("http://[::1]:1", True),
        ("http://localhost", True),
        ("http://10.0.0.1", False),
        ("http://localhost.example.org", False),
    ],
)
def test_what_stays_on_this_machine_is_known(url: str, stays: bool) -> None:
    assert is_loopback(url) is stays


def test_proxy_is_not_asked_for_what_is_on_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    with Scripted() as proxy, Scripted(answer("200 OK", {})) as server:
        monkeypatch.setenv("http_proxy", proxy.url)
        assert AdminClient(server.url, "hg_x").get("audit") == {}
        assert proxy.asked == []
