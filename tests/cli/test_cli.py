"""The command line: what it says, where it says it, and with which exit code it ends."""

from __future__ import annotations

import io
import json
import os
import re
import shlex
import signal
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import headgate
from headgate import cli
from headgate.cli.explain import HypotheticalRequest, explain
from headgate.cli.terminal import GAP, MIN_COLUMN_WIDTH, table
from headgate.errors import InvalidPolicy
from headgate.policy.api_keys import ApiKeyHasher
from headgate.policy.loader import read
from headgate.policy.model import net_name
from headgate.policy.schema import json_schema
from headgate.policy.snapshot import Snapshot
from support.paths import DOCS
from support.policy_strategies import policies, requests
from support.terminals import COMMAND, ESCAPE, PLAIN, SETTINGS, PseudoTerminal

if TYPE_CHECKING:
    from argparse import ArgumentParser
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from headgate.policy.model import Policy

PAGE = (DOCS / "cli.md").read_text("utf-8")

SECRET = "thirty-two bytes, kept elsewhere"
KEY = "sk_live_4f9a"
HASH = ApiKeyHasher(SECRET.encode()).fingerprint(KEY)

SHOP = f"""\
tier: free
routes:
  - {{path: /health, cost: 0}}
  - {{path: /search, class: search, cost: 5}}
  - {{path: "/orders/{{id}}", class: orders, on_failure: closed}}
limits:
  - {{name: per-ip, by: ip, bucket: "1000/minute, burst 200"}}
  - {{name: login-ip, path: POST /login, by: ip, bucket: 10/minute, count_when: "status in [401, 403]"}}
  - {{name: login-user, path: POST /login, by: user, bucket: 5/minute, algorithm: sliding_log}}
  - {{name: search, class: search, method: GET, by: tenant, missing: ip, bucket: 100/minute,
     tiers: {{pro: 1000/minute}}}}
  - {{name: pro-search, class: search, by: user, missing: skip, tiers: {{pro: 50/minute, gold: 500/minute}}}}
  - {{name: orders, class: orders, by: client, bucket: 60/minute, reserve: 3}}
  - {{name: reports, path: /reports, by: tenant+device, bucket: 5/minute, algorithm: concurrency}}
  - {{name: everything, by: global, bucket: 50000/second, shadow: true}}
clients:
  - {{tenant: acme, tier: pro}}
  - {{api_key: {KEY}, tier: gold}}
overrides:
  - {{tenant: acme, limit: search, bucket: 3000/minute, valid_from: 2098-01-01T00:00:00Z, reason: sale}}
  - {{tenant: acme, limit: search, bucket: 5000/minute, valid_until: 2099-01-01T00:00:00Z, reason: contract 4711}}
  - {{api_key: {KEY}, limit: orders, bucket: 600/minute}}
blocked:
  - {{ip: 203.0.113.0/24, reason: scraping, valid_until: 2098-05-28T02:01:00+02:00}}
  - {{api_key: stolen-key, reason: stolen}}
"""

NOTES = [
    (
        "limits count by tenant, device, which the app must supply: "
        'identities={"tenant": function, "device": function}; otherwise requests are counted by IP address'
    ),
    "3 API keys in plain text: write their hashes instead; see `headgate hash-key`",
]

SLIPS = """\
limits:
  - {by: ip, bukcet: 10/minute}
  - {name: exports, by: user, bucket: 1000/2 months}
"""
ODD = "limits: [{name: keys, by: api_key, bucket: 10/minute}]"
KNOWN = f"identity: {{api_key: {{known_only: true}}}}\nclients: [{{api_key: {KEY}}}]\n{ODD}"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the commands run."""
    folder = tmp_path_factory.mktemp("policies")
    for name, text in {
        "shop.yaml": SHOP,
        "slips.yaml": SLIPS,
        "odd.yaml": ODD,
        "known.yaml": KNOWN,
        "secret.txt": f"{SECRET}\n",
        "short.txt": "guess me\n",
        "key.txt": f"{KEY}\n",
        "latin.yaml": "name: caf\xe9",
    }.items():
        (folder / name).write_text(text, "latin-1")
    (folder / "folder.yaml").mkdir()
    return folder


@pytest.fixture
def run(folder: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    def run(*arguments: str, command: Sequence[str] = COMMAND, **settings: str) -> Any:
        line = [*command, *arguments]
        return subprocess.run(
            line, env=PLAIN | settings, cwd=folder, capture_output=True, text=True, timeout=30, check=False
        )

    return run


@pytest.fixture
def call(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, str, str]]:
    """The same in this process: the exit code, what was printed, and what was complained about."""
    monkeypatch.chdir(folder)
    for name in SETTINGS:
        monkeypatch.delenv(name, raising=False)

    def call(*arguments: str) -> tuple[int, str, str]:
        code = cli.main(arguments)
        return (code, *capsys.readouterr())

    return call


# ------------------------------------------------------------------ exit codes and streams


@pytest.mark.parametrize(
    ("line", "code", "out", "err"),
    [
        ("--version", 0, f"headgate {headgate.__version__} (speedups: active)\n", ""),
        ("", 2, "", "required: COMMAND"),
        ("chek shop.yaml", 2, "", "invalid choice: 'chek'"),
        ("check", 2, "", "required: FILE"),
        ("check --stric shop.yaml", 2, "", "unrecognized arguments: --stric"),
        ("check shop.yaml", 0, "shop.yaml: valid: 8 limits, 3 routes, 3 tiers, 2 clients, 3 overrides, 2 blocks\n", ""),
        ("check slips.yaml", 1, "", "slips.yaml:2:14: unknown field 'bukcet'; did you mean 'bucket'?\n"),
        ("check nowhere.yaml", 2, "", "nowhere.yaml: cannot be read: No such file or directory\n"),
        ("check folder.yaml", 2, "", "folder.yaml: cannot be read: Is a directory\n"),
        ("check latin.yaml", 1, "", "latin.yaml: not UTF-8 at byte 9; save the file as UTF-8\n"),
        ("check secret.txt", 1, "", "secret.txt: cannot tell its format"),
        (
            "check odd.yaml",
            0,
            "odd.yaml: valid: 1 limit\n",
            "odd.yaml:1:10: warning: limit 'keys' is counted by api_key",
        ),
        ("check --strict odd.yaml", 1, "odd.yaml: invalid: 1 warning with --strict\n", "odd.yaml:1:10: warning:"),
        ("explain shop.yaml GET /health", 0, "exempt: the route costs 0, so no limit applies\n", ""),
        ("explain slips.yaml GET /health", 1, "", "slips.yaml:3:39: "),
        ("explain nowhere.yaml GET /", 2, "", "nowhere.yaml: cannot be read"),
        ("explain shop.yaml GET", 2, "", "required: PATH"),
        ("explain shop.yaml /search GET", 2, "", "headgate: '/search' is not a method; write one first, as in GET"),
        (
            "explain shop.yaml GET / --ip 203.0.113",
            2,
            "",
            "--ip '203.0.113' is not an address; write it like",
        ),
        ("explain shop.yaml GET / --tier por", 2, "", "--tier 'por' is not a tier of the policy; did you mean 'pro'?"),
        ("explain odd.yaml GET / --tier pro", 2, "", "--tier 'pro' is not a tier of the policy; it has no tiers"),
        (
            "explain shop.yaml GET / --at 2026-05-28",
            2,
            "",
            "is a date without a time; write it like 2026-05-28T00:00:00Z",
        ),
        ("explain shop.yaml GET / --identity device", 2, "", "--identity 'device' has no value; write it like"),
        ("explain shop.yaml GET / --identity ip=::1", 2, "", "--identity ip cannot be given; give --ip"),
        ("explain shop.yaml GET / --user= ", 2, "", "the user is empty; omit it for a request that has none"),
        ("explain shop.yaml GET / --user a --identity user=b", 2, "", "the user is given twice; keep one"),
        ("explain shop.yaml GET / --secret-file no.txt", 2, "", "--secret-file no.txt: cannot be read: No such file"),
        ("hash-key --secret-file secret.txt", 2, "", "an API key of 0 characters is not valid"),
        ("hash-key --secret-file short.txt", 2, "", "the secret for API keys has 8 bytes and can be guessed"),
        ("hash-key", 2, "", "give --secret-file, or set HEADGATE_SECRET, as in the app"),
        (f"hash-key {KEY}", 2, "", "unrecognized arguments"),
    ],
)
def test_command_ends_with_its_code_and_keeps_the_streams_apart(
    call: Callable[..., tuple[int, str, str]],
    monkeypatch: pytest.MonkeyPatch,
    line: str,
    code: int,
    out: str,
    err: str,
) -> None:
    with open(os.devnull) as nothing:
        monkeypatch.setattr(sys, "stdin", nothing)
        ended, printed, complained = call(*line.split())
    assert (ended, out in printed, err in complained) == (code, True, True), printed + complained
    assert bool(printed) is bool(out)
    assert bool(complained) is bool(err)


@pytest.mark.parametrize(
    ("arguments", "code", "has_answer"),
    [
        (["check", "shop.yaml"], 0, True),
        (["check", "slips.yaml"], 1, False),
        (["check", "nowhere.yaml"], 2, False),
        (["explain", "shop.yaml", "GET", "/", "--ip", "nobody"], 2, False),
        (["teach"], 2, False),
        (["schema"], 0, True),
    ],
)
def test_process_ends_likewise_and_without_a_traceback(
    run: Callable[..., Any], arguments: list[str], code: int, has_answer: bool
) -> None:
    ended = run(*arguments)
    assert (ended.returncode, bool(ended.stdout), bool(ended.stderr)) == (code, has_answer, not has_answer)
    assert "Traceback" not in ended.stderr


def test_it_is_known_by_three_names(run: Callable[..., Any]) -> None:
    names = [COMMAND, [sys.executable, "-m", "headgate"], [sys.executable, "-c", "import headgate.cli as c; c.main()"]]
    expected = f"headgate {headgate.__version__} (speedups: active)\n"
    assert {run("--version", command=name).stdout for name in names} == {expected}


def test_several_files_end_with_the_highest_code(call: Callable[..., tuple[int, str, str]]) -> None:
    assert call("check", "shop.yaml", "slips.yaml")[0] == 1
    code, printed, complained = call("check", "slips.yaml", "nowhere.yaml", "shop.yaml")
    assert code == 2
    assert printed.startswith("shop.yaml: valid")
    assert [line.partition(":")[0] for line in complained.splitlines()] == ["slips.yaml"] * 2 + ["nowhere.yaml"]


def test_broken_pipe_prints_no_traceback(folder: Path) -> None:
    with subprocess.Popen(
        [*COMMAND, "schema"], env=PLAIN, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait(timeout=30) == 141


def test_full_disk_is_reported(folder: Path) -> None:
    with open("/dev/full", "w") as full:
        ended = subprocess.run(
            [*COMMAND, "schema"], env=PLAIN, cwd=folder, stdout=full, stderr=subprocess.PIPE, timeout=30, check=False
        )
    assert (ended.returncode, ended.stderr) == (2, b"headgate: cannot write: No space left on device\n")


def test_letters_that_a_stream_cannot_say_are_spelled_out(run: Callable[..., Any]) -> None:
    ended = run("explain", "shop.yaml", "GET", "/", "--tenant", "café", PYTHONIOENCODING="ascii")
    assert ended.returncode == 0
    assert "tenant caf\\xe9" in ended.stdout


# ------------------------------------------------------------------ check


def test_every_mistake_has_its_line(call: Callable[..., tuple[int, str, str]]) -> None:
    with pytest.raises(InvalidPolicy) as refusal:
        read(SLIPS, file="slips.yaml")
    assert len(refusal.value.problems) == 2
    assert call("check", "slips.yaml") == (1, "", f"{refusal.value}\n")


def test_what_a_policy_expects_of_the_app_is_noted(call: Callable[..., tuple[int, str, str]]) -> None:
    """Neither is a mistake, so that neither fails a strict check."""
    code, printed, complained = call("check", "--strict", "shop.yaml")
    first, *others = printed.splitlines()
    assert (code, complained, first.startswith("shop.yaml: valid")) == (0, "", True)
    assert others == [f"shop.yaml: note: {note}" for note in NOTES]
    assert "note" not in call("check", "odd.yaml")[1]


def test_check_notes_missing_regions_and_plain_passwords(
    call: Callable[..., tuple[int, str, str]], tmp_path: Path
) -> None:
    file = tmp_path / "regions.yaml"
    limits = "limits: [{by: global, bucket: 10/minute, region: central}]\n"
    file.write_text(limits)
    (note,) = json.loads(call("check", "--json", str(file))[1])[0]["notes"]
    assert note == "limits are central, and the policy has no regions: the app must give region=, regions= and home="
    file.write_text("regions: {home: eu, stores: {eu: 'redis://:${PASSWORD}@eu', us: 'redis://:sesame@us'}}\n" + limits)
    (note,) = json.loads(call("check", "--json", str(file))[1])[0]["notes"]
    assert note == "a password in plain text under regions: write an environment variable, like ${EU_PASSWORD}"


def test_programs_get_a_list(call: Callable[..., tuple[int, str, str]]) -> None:
    code, printed, complained = call("check", "--json", "shop.yaml", "slips.yaml", "odd.yaml", "nowhere.yaml")
    shop, slips, odd, nowhere = json.loads(printed)
    assert (code, complained) == (2, "")
    counts = {"limits": 8, "routes": 3, "tiers": 3, "clients": 2, "overrides": 3, "blocks": 2}
    assert shop == {"file": "shop.yaml", "good": True, "counts": counts, "problems": [], "notes": NOTES}
    assert slips["notes"] == []
    assert (slips["good"], slips["counts"], len(slips["problems"])) == (False, {}, 2)
    message = "unknown field 'bukcet'; did you mean 'bucket'?"
    assert slips["problems"][0] == {"message": message, "line": 2, "column": 14, "is_warning": False}
    assert (odd["good"], [each["is_warning"] for each in odd["problems"]]) == (True, [True])
    message = "cannot be read: No such file or directory"
    assert nowhere["problems"] == [{"message": message, "line": None, "column": None, "is_warning": False}]
    assert not json.loads(call("check", "--json", "--strict", "odd.yaml")[1])[0]["good"]


# ------------------------------------------------------------------ explain


def explained(call: Callable[..., tuple[int, str, str]], line: str) -> dict[str, Any]:
    code, printed, complained = call("explain", "shop.yaml", *line.split(), "--json")
    assert (code, complained) == (0, "")
    answer: dict[str, Any] = json.loads(printed)
    return answer


@pytest.mark.parametrize("command", ["check", "explain", "policy check"])
def test_what_is_not_a_regular_file_is_refused_at_once(run: Callable[..., Any], folder: Path, command: str) -> None:
    pipe = folder / "pipe.yaml"
    if not pipe.exists():
        os.mkfifo(pipe)
    more = ["GET", "/"] if command == "explain" else []
    ended = run(*command.split(), str(pipe), *more, HEADGATE_TOKEN="hg_x", HEADGATE_ADMIN_URL="http://127.0.0.1:1")
    assert ended.returncode == 2
    assert "not a regular file; write the policy to one" in ended.stderr


def test_explain_shows_the_price_of_region_modes(call: Callable[..., tuple[int, str, str]], tmp_path: Path) -> None:
    file = tmp_path / "regions.yaml"
    limits = """limits:
  - {name: exports, by: tenant, bucket: 10/hour, region: central}
  - {name: contract, by: tenant, bucket: 90/hour, region: divided}
  - {name: per-ip, by: ip, bucket: "1000/minute, fixed_window"}
"""
    stores = "{eu: redis://eu, us: redis://us, asia: redis://asia}"
    file.write_text(f"regions: {{home: eu, stores: {stores}, central_budget: 250 ms}}\n{limits}")
    code, printed, _ = call("explain", str(file), "GET", "/", "--tenant", "acme")
    assert code == 0
    assert [re.split(r"  +", line.strip()) for line in printed.splitlines()[-3:]] == [
        ["exports", "central", "at most 0 over the limit", "1 round trip to eu, within 250 ms", "100.0%"],
        ["contract", "divided", "at most 0 over the limit", "no wait for another region", "33.3%"],
        ["per-ip", "regional", "at most 2,000 over the limit", "no wait for another region", "100.0%"],
    ]
    exports, *_ = json.loads(call("explain", str(file), "GET", "/", "--tenant", "acme", "--json")[1])["limits"]
    numbers = ("mode", "bound", "round_trips", "usable", "budget_ms")
    assert [exports["region"][name] for name in numbers] == ["central", 0, 1, 1.0, 250.0]
    file.write_text(limits)
    unknown = call("explain", str(file), "GET", "/", "--tenant", "acme")[1]
    assert "depends on the regions, which the policy does not name" in unknown
    file.write_text("limits: [{by: ip, bucket: 10/minute}]")
    assert "region" not in call("explain", str(file), "GET", "/")[1]


def test_explain_notes_a_limit_that_matches_only_the_end_of_a_path(
    call: Callable[..., tuple[int, str, str]], tmp_path: Path
) -> None:
    file = tmp_path / "mounted.yaml"
    file.write_text('limits: [{name: items, path: "/items/{id}", by: ip, bucket: 5/hour}, {by: ip, bucket: 9/hour}]')
    [note] = json.loads(call("explain", str(file), "GET", "/sub/items/7", "--json")[1])["notes"]
    assert note == (
        "items applies to /items/{id}, which matches only the end of this path: if an app is mounted at /sub and the "
        "gate is in front of it, write /sub/items/{id}"
    )
    assert json.loads(call("explain", str(file), "GET", "/items/7", "--json")[1])["notes"] == []


def test_explain_shows_the_net_for_unknown_keys(call: Callable[..., tuple[int, str, str]], tmp_path: Path) -> None:
    file = tmp_path / "keys.yaml"
    for factor, named in ((10, ""), (3, "identity: {api_key: {unknown_factor: 3}}")):
        file.write_text(f"{named}\nlimits: {{default: 5/hour}}")
        code, printed, _ = call("explain", str(file), "GET", "/", "--ip", "198.51.100.7", "--api-key", "made-up")
        line = next(line for line in printed.splitlines() if line.startswith("default (unknown keys)"))
        assert code == 0
        assert f"{5 * factor} per hour, token_bucket  ip: 198.51.100.7" in line
        assert line.endswith(f"unknown API key: also counted by address, at {factor} times default")
    file.write_text("limits: {default: 5/hour}\nclients: [{api_key: known}]")
    assert "(unknown keys)" not in call("explain", str(file), "GET", "/", "--api-key", "known")[1]


GOLDEN = {
    "GET /search?q=7 --ip 198.51.100.7 --tenant acme --at 2097-12-31T00:00:00Z": """\
request     GET /search
sent by     198.51.100.7, tenant acme
route       /search
class       search
cost        5
tier        pro
on failure  open: passes uncounted while the store is unavailable

limit       allows                                    counted by        cost  why
per-ip      1000 per minute, burst 200, token_bucket  ip: 198.51.100.7     5  every request
search      5000 per minute, token_bucket             tenant: acme         5  class search, GET only; override until 2099-01-01T00:00:00Z: contract 4711
everything  50000 per second, token_bucket            global: %all         5  every request; shadow: never rejects

limit   decided locally                all nodes together
per-ip  prepaid tokens, within 100 ms  at most 2 over the limit
search  prepaid tokens, within 100 ms  at most 9 over the limit

skipped     why
pro-search  no user, and the limit has missing: skip
search      the override for tenant acme starts 2098-01-01T00:00:00Z
""",  # noqa: E501 - as wide as it is printed
    "POST /login --ip ::ffff:198.51.100.7": """\
request     POST /login
sent by     198.51.100.7
route       /login
class       none
cost        1
tier        free
on failure  open: passes uncounted while the store is unavailable

limit       allows                                    counted by        cost  why
per-ip      1000 per minute, burst 200, token_bucket  ip: 198.51.100.7     1  every request
login-ip    10 per minute, token_bucket               ip: 198.51.100.7     1  route /login, POST only; counted if status in [401, 403]
everything  50000 per second, token_bucket            global: %all         1  every request; shadow: never rejects

limit   decided locally                all nodes together
per-ip  prepaid tokens, within 100 ms  at most 2 over the limit

skipped     why
login-user  no user, and per-ip counts by address
""",  # noqa: E501 - as wide as it is printed
    "DELETE /orders/7 --ip 2001:db8:1:2::7 --secret-file secret.txt --api-key " + KEY: f"""\
request     DELETE /orders/7
sent by     2001:db8:1:2::7 (counted as 2001:db8:1:2::/64), api_key {HASH}
route       /orders/{{id}}
class       orders
cost        1
tier        gold
on failure  closed: answered with 503 while the store is unavailable

limit       allows                                    counted by                                             cost  why
per-ip      1000 per minute, burst 200, token_bucket  ip: 2001:db8:1:2::/64                                     1  every request
orders      600 per minute, token_bucket              client: api_key|{HASH}     3  class orders; override; reserved: the app settles the actual cost
everything  50000 per second, token_bucket            global: %all                                              1  every request; shadow: never rejects

limit   decided locally                all nodes together
per-ip  prepaid tokens, within 100 ms  at most 2 over the limit
orders  prepaid tokens, within 100 ms  at most 1 over the limit
""",  # noqa: E501 - as wide as it is printed
    "head /search --tier free": """\
request     head /search (as GET)
sent by     unknown
route       /search
class       search
cost        5
tier        free
on failure  open: passes uncounted while the store is unavailable

limit       allows                                    counted by           cost  why
per-ip      1000 per minute, burst 200, token_bucket  ip: unknown             5  every request
search      100 per minute, token_bucket              tenant: |ip|unknown     5  class search, GET only; no tenant: counted by address
everything  50000 per second, token_bucket            global: %all            5  every request; shadow: never rejects

limit   decided locally                all nodes together
per-ip  prepaid tokens, within 100 ms  at most 2 over the limit
search  prepaid tokens, within 100 ms  at most 1 over the limit

skipped     why
pro-search  only for tiers pro, gold; this client has tier free
""",  # noqa: E501 - as wide as it is printed
    "PUT /reports --tenant acme --identity device=4711": """\
request     PUT /reports
sent by     unknown, tenant acme, device 4711
route       /reports
class       none
cost        1
tier        pro
on failure  open: passes uncounted while the store is unavailable

limit       allows                                    counted by                cost  why
per-ip      1000 per minute, burst 200, token_bucket  ip: unknown                  1  every request
reports     5 at once, leases of 1 minute             tenant+device: acme|4711     1  route /reports
everything  50000 per second, token_bucket            global: %all                 1  every request; shadow: never rejects

limit   decided locally                all nodes together
per-ip  prepaid tokens, within 100 ms  at most 2 over the limit
""",  # noqa: E501 - as wide as it is printed
    "GET /nowhere --ip 203.0.113.9": """\
request     GET /nowhere
sent by     203.0.113.9
route       unmatched: no template matches the path
class       none
cost        1
tier        free
on failure  open: passes uncounted while the store is unavailable

blocked: ip 203.0.113.0/24 until 2098-05-28T00:01:00Z: scraping
The response is 403, and no limit is checked.
""",
    "GET /health --ip 203.0.113.9": """\
request     GET /health
sent by     203.0.113.9
route       /health
class       none
cost        0
tier        free
on failure  open: passes uncounted while the store is unavailable

exempt: the route costs 0, so no limit applies
""",
}


@pytest.mark.parametrize("line", GOLDEN)
def test_explanation_reads_so(call: Callable[..., tuple[int, str, str]], line: str) -> None:
    assert call("explain", "shop.yaml", *line.split()) == (0, GOLDEN[line], "")


def test_api_key_that_is_not_known_is_none_where_only_known_ones_count(
    call: Callable[..., tuple[int, str, str]],
) -> None:
    asked = ("explain", "known.yaml", "GET", "/", "--secret-file", "secret.txt", "--json", "--api-key")
    _, known, _ = call(*asked, KEY)
    _, unknown, _ = call(*asked, "made-up")
    assert [(each["identity"], each["why"]) for each in json.loads(known)["limits"]] == [(HASH, ["every request"])]
    assert [(each["identity"], each["why"]) for each in json.loads(unknown)["limits"]] == [
        ("|ip|unknown", ["every request", "no api_key: counted by address"])
    ]
    (note,) = json.loads(unknown)["notes"]
    assert note.startswith("the policy does not list this API key and accepts only known ones")
    assert json.loads(known)["notes"] == []


def test_programs_get_the_same_explanation(call: Callable[..., tuple[int, str, str]]) -> None:
    answer = explained(call, "POST /login --ip 198.51.100.7 --user ada")
    assert [limit["name"] for limit in answer["limits"]] == ["per-ip", "login-ip", "login-user", "everything"]
    assert answer["limits"][2] == {
        "name": "login-user",
        "quota": 5,
        "period_us": 60_000_000,
        "burst": 5,
        "algorithm": "sliding_log",
        "by": "user",
        "identity": "ada",
        "cost": 1,
        "is_shadow": False,
        "bounds": [],
        "why": ["route /login, POST only"],
    }
    assert (answer["left_out"], answer["blocked"], answer["is_exempt"], answer["on_failure"]) == (
        [],
        None,
        False,
        "open",
    )


def test_moment_decides_on_overrides_and_blocks(call: Callable[..., tuple[int, str, str]]) -> None:
    def numbers(at: str) -> int:
        return int(explained(call, f"GET /search --tenant acme --at {at}")["limits"][1]["quota"])

    assert numbers("2097-12-31T23:59:59.999999Z") == 5000
    assert numbers("2098-01-01T00:00:00Z") == 3000
    assert numbers("2098-01-01T00:59:59.999999+01:00") == 5000
    blocked = "GET / --ip 203.0.113.9 --at 2098-05-28T00:0{}Z"
    assert explained(call, blocked.format("0:59.999999"))["blocked"]
    assert not explained(call, blocked.format("1:00"))["blocked"]


def test_ignored_override_is_reported(call: Callable[..., tuple[int, str, str]]) -> None:
    told = explained(call, "GET /search --tenant acme --user ada --at 2098-06-01T00:00:00Z")["left_out"]
    assert told == [{"name": "search", "why": "the override for tenant acme is superseded by another one"}]
    told = explained(call, "GET /search --tenant acme --user ada --at 2099-01-01T00:00:00Z")["left_out"]
    assert told == [{"name": "search", "why": "the override for tenant acme ended 2099-01-01T00:00:00Z"}]


def test_explain_reports_a_request_without_limits(call: Callable[..., tuple[int, str, str]], folder: Path) -> None:
    (folder / "few.yaml").write_text("limits: [{path: /a, by: ip, bucket: 1/second}]")
    assert call("explain", "few.yaml", "GET", "/b")[1].endswith("\nno limit: the request passes and is not counted\n")


@given(policy=policies(), asked=requests())
def test_every_limit_of_a_route_is_explained_once(policy: Policy, asked: Any) -> None:
    api_keys = ApiKeyHasher(SECRET.encode())
    who = {kind: value for kind, value in asked.who.items() if value}
    found = explain(policy, HypotheticalRequest(asked.method, asked.path, who, asked.at, api_keys, True))
    snapshot = Snapshot(policy, api_keys.fingerprint)
    resolution = snapshot.resolve(snapshot.route(asked.method, asked.path), who, asked.now_us)
    met = [] if found.blocked or found.is_exempt else [*resolution.applied_limits, *resolution.shadows]
    assert [(each.name, each.limit, each.identity) for each in found.limits] == [
        (each.rule.name, each.key.limit, each.key.identity) for each in met
    ]
    left_out = [each.name for each in found.left_out if not each.why.startswith("the override for ")]
    if not found.blocked:
        on_route = [each.rule.name for each in (*resolution.route.rules, *resolution.route.shadows)]
        nets = [net_name(name) for name in on_route]
        assert sorted([*left_out, *(each.name for each in found.limits if each.name not in nets)]) == sorted(on_route)


# ------------------------------------------------------------------ keys and secrets


@pytest.mark.parametrize("form", [[], ["--json"]])
@pytest.mark.parametrize("key", [KEY, "stolen-key"])
def test_no_key_is_ever_shown(call: Callable[..., tuple[int, str, str]], key: str, form: list[str]) -> None:
    for path in ("/", "/orders/7"):
        _, printed, complained = call("explain", "shop.yaml", "GET", path, "--api-key", key, *form)
        assert key not in printed + complained
        assert "hmac:" in printed


def test_without_the_secret_hashes_are_said_to_differ(
    call: Callable[..., tuple[int, str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    question = f"GET /orders/7 --api-key {KEY}"
    alone = explained(call, question)
    assert alone["tier"] == "gold"
    assert HASH not in f"{alone}"
    assert ["HEADGATE_SECRET" in note for note in alone["notes"]] == [True]
    assert "\nnote:  the API key is hashed with" in call("explain", "shop.yaml", *question.split())[1]
    by_file = explained(call, f"{question} --secret-file secret.txt")
    by_hash = explained(call, f"GET /orders/7 --identity api_key={HASH} --secret-file secret.txt")
    monkeypatch.setenv("HEADGATE_SECRET", SECRET)
    assert explained(call, question) == by_file == by_hash
    assert f"api_key {HASH}" in by_file["sent_by"]
    assert by_file["notes"] == []


@pytest.mark.parametrize(
    ("text", "arguments", "settings"),
    [
        (f"{KEY}\n", ["--secret-file", "secret.txt"], {}),
        (KEY, [], {"HEADGATE_SECRET": SECRET}),
        (f"{KEY}\r\n", ["--secret-file", "secret.txt"], {"HEADGATE_SECRET": "something else entirely"}),
        (f"{HASH}\n", ["--secret-file", "secret.txt"], {}),
    ],
)
def test_key_is_hashed_as_the_app_does(
    call: Callable[..., tuple[int, str, str]],
    monkeypatch: pytest.MonkeyPatch,
    text: str,
    arguments: list[str],
    settings: dict[str, str],
) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text.encode())))
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    assert call("hash-key", *arguments) == (0, f"{HASH}\n", "")


@pytest.mark.parametrize("text", ["", "two words", "caf\xe9", "x" * 4097, "\x1b[2J"])
def test_what_can_be_no_key_is_refused_and_not_shown(
    call: Callable[..., tuple[int, str, str]], monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text.encode())))
    code, printed, complained = call("hash-key", "--secret-file", "secret.txt")
    assert (code, printed) == (2, "")
    assert re.fullmatch(r"headgate: an API key of \d+ characters is not valid; .*\n", complained)


# ------------------------------------------------------------------ the other commands


def test_schema_is_the_loaders_own(call: Callable[..., tuple[int, str, str]]) -> None:
    assert json.loads(call("schema")[1]) == json_schema()


def test_demonstration_is_the_same(run: Callable[..., Any]) -> None:
    def settled(shown: str) -> str:
        return re.sub(r"passes in [\d.]+ s", "passes in a while", shown)

    ours, its = run("demo"), run(command=[sys.executable, "-m", "headgate.demo"])
    assert settled(ours.stdout) == settled(its.stdout)
    assert "token_bucket" in ours.stdout


def commands() -> dict[str, ArgumentParser]:
    (group,) = [action for action in cli.build_parser()._actions if action.choices]
    assert isinstance(group.choices, dict)
    return group.choices


@pytest.mark.parametrize("name", commands())
def test_help_has_examples_that_could_be_typed(call: Callable[..., tuple[int, str, str]], name: str) -> None:
    code, printed, _ = call(name, "--help")
    examples = [shlex.split(line) for line in printed.partition("examples:\n")[2].splitlines() if "headgate " in line]
    assert code == 0
    assert examples
    for words in examples:
        typed = words[words.index("headgate") + 1 :]
        end = next((place for place, word in enumerate(typed) if word in ("<", ">", "|")), len(typed))
        cli.build_parser().parse_args(typed[:end])  # ends the test, if it cannot be


# ------------------------------------------------------------------ terminals


def shown(folder: Path, *arguments: str, code: int = 0, columns: int = 100, **settings: str) -> str:
    with PseudoTerminal(folder, *arguments, columns=columns, **settings) as terminal:
        assert terminal.end() == code
        return terminal.shown


def test_colours_are_for_terminals_that_want_them(folder: Path, run: Callable[..., Any]) -> None:
    question = ("explain", "shop.yaml", "GET", "/orders/7")
    plain = run(*question).stdout
    assert "\x1b" not in plain
    painted = shown(folder, *question, columns=200)
    assert "\x1b[1mlimit" in painted
    assert ESCAPE.sub("", painted) == plain
    assert shown(folder, *question, columns=200, NO_COLOR="1") == plain
    assert shown(folder, *question, columns=200, TERM="dumb") == plain
    assert run(*question, FORCE_COLOR="1").stdout == painted
    assert run(*question, FORCE_COLOR="1", NO_COLOR="1").stdout == plain


def test_terminal_shows_the_place_of_a_mistake(folder: Path) -> None:
    told = shown(folder, "check", "slips.yaml", code=1)
    assert "\x1b[31m" in told
    first, *lines = ESCAPE.sub("", told).splitlines()
    second = lines.pop(2)
    assert [first[:17], second[:17]] == ["slips.yaml:2:14: ", "slips.yaml:3:39: "]
    assert lines == [
        "  2 |   - {by: ip, bukcet: 10/minute}",
        "                   ^",
        "  3 |   - {name: exports, by: user, bucket: 1000/2 months}",
        "                                            ^",
    ]


def test_terminal_shows_the_place_of_a_warning(folder: Path) -> None:
    told = shown(folder, "check", "odd.yaml", NO_COLOR="1").splitlines()
    assert told[-3:] == [f"  1 | {ODD}", "               ^", "odd.yaml: valid: 1 limit"]


@pytest.mark.parametrize("column", [30, 990])
def test_of_a_long_line_the_part_around_the_mistake_is_shown(folder: Path, column: int) -> None:
    entries = ["1"] * 1000
    entries[column] = "x"
    (folder / "long.json").write_text('{"answers": [' + ",".join(entries) + ']}\n{"\x1b[2J"')
    told = shown(folder, "check", "long.json", code=1, columns=60, NO_COLOR="1")
    first, line, caret = told.splitlines()[:3]
    place = re.match(r"long\.json:(\d+):(\d+): ", first)
    assert place is not None
    source = (folder / "long.json").read_text().splitlines()[int(place[1]) - 1]
    assert len(line) <= 60
    assert line[caret.index("^") :] in source[int(place[2]) - 1 :].replace("\x1b", " ")
    assert "\x1b" not in told


@pytest.mark.parametrize(
    "text",
    [
        f"clients: [{{api_key: {KEY}, teir: pro}}]",
        f"clients:\n  - api_key:\n      [{KEY}]",
        f"blocked:\n  - api_key: {KEY} {KEY}",
        f'{{"clients": [{{"api_key": "{KEY}", "tier": 7}}]}}',
    ],
)
def test_no_key_is_shown_beside_a_mistake(folder: Path, text: str) -> None:
    (folder / "key.yaml").write_text(text)
    told = shown(folder, "check", "key.yaml", code=1, NO_COLOR="1")
    assert "key.yaml:" in told
    assert KEY not in told


@pytest.mark.parametrize("columns", [60, 80, 100])
def test_table_keeps_to_the_window(folder: Path, run: Callable[..., Any], columns: int) -> None:
    question = ("explain", "shop.yaml", "GET", "/search", "--tenant", "acme", "--at", "2097-01-01T00:00:00Z")
    wrapped = shown(folder, *question, columns=columns, NO_COLOR="1")
    assert max(map(len, wrapped.splitlines())) <= columns
    assert sorted("".join(wrapped.split())) == sorted("".join(run(*question).stdout.split()))


def test_what_a_terminal_would_obey_is_spelled_out(folder: Path) -> None:
    told = shown(folder, "explain", "shop.yaml", "GET", "/%1b%5b2J/%0d", "--user", "a\x07b", NO_COLOR="1")
    assert not set(told) & {"\x1b", "\x07", "\r"}
    assert "GET /\\x1b[2J/\\r" in told
    assert "user a\\x07b" in told


def test_key_is_asked_for_and_not_echoed(folder: Path) -> None:
    with PseudoTerminal(folder, "hash-key", "--secret-file", "secret.txt") as terminal:
        terminal.until("API key: ")
        terminal.type(f"{KEY}\n")
        assert terminal.end() == 0
        assert HASH in terminal.shown
        assert KEY not in terminal.shown


@pytest.mark.parametrize(("key", "code"), [("\x03", 130), ("\x04", 2)], ids=["interrupt", "end of input"])
def test_missing_key_prints_no_traceback(folder: Path, key: str, code: int) -> None:
    with PseudoTerminal(folder, "hash-key", "--secret-file", "secret.txt") as terminal:
        terminal.until("API key: ")
        if key == "\x03":
            terminal.process.send_signal(signal.SIGINT)
        else:
            terminal.type(key)
        assert terminal.end() == code
        assert "Traceback" not in terminal.shown


# ------------------------------------------------------------------ tables

words = st.text(st.characters(codec="ascii", categories=["L", "N", "P"]), min_size=1, max_size=20)
cells = st.lists(words, max_size=6).map(" ".join)


@given(
    rows=st.integers(1, 4).flatmap(
        lambda count: st.lists(st.lists(cells, min_size=count, max_size=count), min_size=1, max_size=5)
    ),
    width=st.none() | st.integers(1, 120),
)
def test_table_loses_nothing_and_is_as_narrow_as_it_can_be(rows: list[list[str]], width: int | None) -> None:
    lines = table(rows, width=width)
    count = len(rows[0])
    assert sorted("".join(lines).replace(" ", "")) == sorted("".join(map("".join, rows)).replace(" ", ""))
    assert all(line == line.rstrip() for line in lines)
    if width is None:
        assert len(lines) == len(rows)
    elif width >= count * MIN_COLUMN_WIDTH + (count - 1) * len(GAP):
        assert all(len(line) <= width for line in lines)


# ------------------------------------------------------------------ docs


def documented(kind: str) -> Iterator[str]:
    yield from re.findall(rf"^```{kind}\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)


def transcripts() -> list[tuple[str, str]]:
    entries = [entry for text in documented("console") for entry in re.split(r"^\$ ", text, flags=re.MULTILINE)[1:]]
    return [(command, shown) for command, _, shown in (entry.partition("\n") for entry in entries)]


@pytest.mark.parametrize(("command", "shown"), transcripts(), ids=[command for command, _ in transcripts()])
def test_page_shows_what_is_printed(folder: Path, tmp_path: Path, command: str, shown: str) -> None:
    for text in (*documented("yaml"), *documented("text")):
        if name := re.match(r"# (\w+\.yaml)\n", text):
            (tmp_path / name[1]).write_text(text)
    for name in ("key.txt", "secret.txt"):
        (tmp_path / name).write_bytes((folder / name).read_bytes())
    line = command.replace("headgate", f"{sys.executable} -m headgate", 1)
    ended = subprocess.run(
        line, shell=True, cwd=tmp_path, env=PLAIN, capture_output=True, text=True, timeout=30, check=False
    )
    assert ended.stderr + ended.stdout == shown


@pytest.mark.parametrize("name", commands())
def test_every_command_and_option_is_documented(name: str) -> None:
    assert f"\n## {name}\n" in PAGE
    for action in commands()[name]._actions:
        assert all(f"`{option}" in PAGE for option in action.option_strings if option not in ("-h", "--help"))
