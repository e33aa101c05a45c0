"""Log formats and sources: each is detected, read from files and pipes, and mistakes are reported."""

from __future__ import annotations

import gzip
import json
import sys
from typing import TYPE_CHECKING, Any

import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from headgate.errors import HeadgateError, InvalidInput
from headgate.policy.api_keys import ApiKeyHasher
from headgate.replay.formats import AGENT, FORMATS, WEIGHT, ParserSettings, detect, make_parser
from headgate.replay.sources import LogReader, expand
from headgate.telemetry.decision_log.record import DecisionRecord, id_prefix
from headgate.telemetry.decision_log.sinks.sqlite import SqliteSink
from headgate.telemetry.decision_log.sinks.text import JsonLinesSink

if TYPE_CHECKING:
    from pathlib import Path

    from headgate.replay.formats import LoggedRequest

HASHER = ApiKeyHasher(b"0123456789abcdef")
SETTINGS = ParserSettings(HASHER, reads_forwarded=True, kinds=frozenset({"user", "tenant", "api_key"}))

COMMON = '192.0.2.1 - - [20/Feb/2026:10:00:45 -0500] "GET /a?b=1 HTTP/1.1" 200 187'
CADDY: dict[str, Any] = {
    "level": "info",
    "ts": 1771599645.25,
    "logger": "http.log.access",
    "request": {
        "remote_ip": "192.0.2.1",
        "client_ip": "192.0.2.1",
        "method": "GET",
        "uri": "/a?b=1",
        "headers": {"X-Forwarded-For": ["192.0.2.7"], "X-Api-Key": ["sk_1"], "Authorization": ["REDACTED"]},
    },
    "user_id": "",
    "duration": 0.25,
    "status": 200,
}
AT_US = 1_771_599_645_000_000

LINES = {
    "common": COMMON,
    "combined": COMMON + ' "-" "Mozilla/5.0 (compatible)"',
    "virtual host": "example.com:443 " + COMMON + ' "-" "Mozilla/5.0"',
    "nginx main": COMMON + ' "-" "Mozilla/5.0" "192.0.2.7"',
    "user": COMMON.replace("- - [", "- ada [") + ' "-" "x"',
    "escaped": COMMON.replace("/a?b=1", r"/a?b=1\"") + ' "-" "say \\"x\\""',
    "spaces": COMMON.replace("/a?b=1", "/a?b=1 2"),
    "old HTTP": COMMON.replace(" HTTP/1.1", ""),
    "caddy": json.dumps(CADDY),
    "nginx JSON": json.dumps(
        {
            "time_iso8601": "2026-02-20T10:00:45-05:00",
            "remote_addr": "192.0.2.1",
            "request": "GET /a?b=1 HTTP/1.1",
            "status": "200",
            "request_time": "0.250",
            "remote_user": "-",
        }
    ),
    "nginx msec": json.dumps({"msec": "1771599645.000", "request_uri": "/a?b=1", "request_method": "GET"}),
    "envoy JSON": json.dumps(
        {
            "start_time": "2026-02-20T15:00:45.000Z",
            "method": "GET",
            "path": "/a?b=1",
            "response_code": 200,
            "downstream_remote_address": "192.0.2.1:4711",
        }
    ),
    "envoy": '[2026-02-20T15:00:45.000Z] "GET /a?b=1 HTTP/2" 200 - 154 0 226 100 "192.0.2.1" "curl" "id" "host" '
    '"tcp://10.0.2.1:80"',
    "istio": '[2026-02-20T15:00:45.000Z] "GET /a?b=1 HTTP/1.1" 200 - via_upstream - "-" 0 178 250 4 "-" "curl/7.64" '
    '"id" "host" "10.1.2.3:80" outbound|80||x 10.1.2.4:5000 10.1.2.3:80 192.0.2.1:5555 - default',
    "alb": "https 2026-02-20T15:00:45.000000Z app/lb/50dc6 192.0.2.1:2817 10.0.0.1:80 0.000 0.250 0.000 200 200 34 366 "
    '"GET https://www.example.com:443/a?b=1 HTTP/1.1" "curl/7.46.0" ECDHE TLSv1.2 arn:aws "Root=1-58" "x" "arn" 0 '
    '2026-02-20T15:00:44.750000Z "forward" "-" "-"',
}


def read(*names: Path | str, format: str | None = None, settings: ParserSettings = SETTINGS) -> tuple[Any, LogReader]:
    reader = LogReader([str(name) for name in names], settings, format)
    return [request for batch in reader.batches() for request in batch], reader


def parse(line: str) -> LoggedRequest:
    found = detect([line], SETTINGS, "log").parse(line)
    assert found is not None
    return found


@pytest.mark.parametrize("name", LINES)
def test_format_is_detected_and_read(name: str) -> None:
    at_us, method, target, status, (peer, _, _), duration_us = parse(LINES[name])
    assert at_us // 1_000_000 == AT_US // 1_000_000
    assert method == "GET"
    assert target.removeprefix("https://www.example.com:443").startswith("/a?b=1")
    assert status in (200, 0)
    assert peer in ("192.0.2.1", None)
    assert duration_us in (None, 250_000, 226_000) or name == "envoy"


@pytest.mark.parametrize(
    ("name", "sender"),
    [
        ("nginx main", ("192.0.2.1", "192.0.2.7", ())),
        ("user", ("192.0.2.1", None, (("user", "ada"),))),
        ("caddy", ("192.0.2.1", "192.0.2.7", (("api_key", HASHER.hashed("sk_1")),))),
        ("nginx JSON", ("192.0.2.1", None, ())),
        ("alb", ("192.0.2.1", None, ())),
        ("istio", ("192.0.2.1", None, ())),
    ],
)
def test_sender_is_read(name: str, sender: Any) -> None:
    assert parse(LINES[name])[4] == sender


@pytest.mark.parametrize(
    ("name", "agent"),
    [
        ("common", None),
        ("combined", "Mozilla/5.0 (compatible)"),
        ("nginx main", "Mozilla/5.0"),
        ("escaped", r"say \"x\""),
        ("caddy", "curl/8"),
        ("envoy", "curl"),
        ("istio", "curl/7.64"),
        ("alb", "curl/7.46.0"),
    ],
)
def test_user_agents_are_read_if_scenarios_may_count_them(name: str, agent: str | None) -> None:
    line = LINES[name].replace('"X-Api-Key"', '"User-Agent": ["curl/8"], "X-Api-Key"')
    for forwards in (True, False):
        settings = SETTINGS._replace(reads_agents=True, reads_forwarded=forwards)
        found = detect([line], settings, "log").parse(line)
        assert found is not None
        assert dict(found[4][2]).get(AGENT) == agent


def test_blocks_and_single_lines_are_read_alike() -> None:
    lines = [LINES[name] for name in ("common", "combined", "nginx main", "user", "escaped", "spaces", "virtual host")]
    lines.insert(3, "not a request")
    for start in range(len(lines)):
        parser = make_parser("common", SETTINGS)
        text = "\n".join(lines[start:])
        each = [make_parser("common", SETTINGS).parse(line) for line in lines[start:]]
        assert parser.parse_block(text) == ([one for one in each if one is not None], len(lines) - start)


@given(st.text(max_size=200), st.sampled_from([*FORMATS]))
def test_no_line_breaks_a_parser(line: str, name: str) -> None:
    found = make_parser(name, SETTINGS).parse(line)
    assert found is None or len(found) == 6


@given(st.sampled_from([*LINES.values()]), st.integers(0, 400), st.characters())
def test_no_damaged_line_breaks_a_parser(line: str, at: int, char: str) -> None:
    for name in FORMATS:
        make_parser(name, SETTINGS).parse(line[:at] + char + line[at + 1 :])


def test_csv_has_a_header_or_numbered_columns(tmp_path: Path) -> None:
    log = tmp_path / "log.csv"
    log.write_text("when,who,path,customer\n1771599645,192.0.2.1,/a,acme\nbroken,192.0.2.1,/a,acme\n")
    named = SETTINGS._replace(fields={"time": "when", "ip": "who", "tenant": "customer"})
    requests, reader = read(log, settings=named)
    assert requests == [(AT_US, "GET", "/a", 0, ("192.0.2.1", None, (("tenant", "acme"),)), None)]
    assert (reader.lines, reader.skipped) == (2, 1)
    log.write_text("1771599645,192.0.2.1,/a\n1771599646,192.0.2.1,/b\n")
    requests, reader = read(log, format="csv", settings=SETTINGS._replace(fields={"time": "1", "ip": "2", "path": "3"}))
    assert [(request[0], request[2]) for request in requests] == [(AT_US, "/a"), (AT_US + 1_000_000, "/b")]
    assert reader.skipped == 0


# ------------------------------------------------------------------ sources


def test_files_are_read_compressed_or_not_and_in_any_number(tmp_path: Path) -> None:
    text = f"{COMMON}\n\nnonsense\n{COMMON}".encode()
    (tmp_path / "access.log").write_bytes(text.replace(b"\n", b"\r\n"))
    (tmp_path / "access.log.1.gz").write_bytes(gzip.compress(text))
    (tmp_path / "access.log.2.zst").write_bytes(zstandard.compress(text))
    requests, reader = read(tmp_path / "access.log*")
    assert (len(requests), reader.lines, reader.skipped) == (6, 9, 3)
    assert reader.bytes_read == reader.total_bytes > 0


def test_missing_zstd_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = tmp_path / "access.log.zst"
    log.write_bytes(zstandard.compress(COMMON.encode()))
    monkeypatch.setitem(sys.modules, "zstandard", None)
    with pytest.raises(HeadgateError, match=r"needs the package 'zstandard': pip install 'headgate\[zstd\]'"):
        read(log)


def test_overlong_line_is_skipped(tmp_path: Path) -> None:
    log = tmp_path / "access.log"
    log.write_text(f"{COMMON}\n{'x' * 3_000_000}\n{COMMON}\n")
    requests, reader = read(log)
    assert (len(requests), reader.skipped) == (2, 1)


@pytest.mark.parametrize(
    ("text", "format", "message"),
    [
        ("hello\nworld\n", None, r"its format is not known, the first line being 'hello'"),
        (f"{COMMON}\n", "json", r"none of its first 1 lines is of the format 'json'"),
        (f"{COMMON}\n", "jsno", r"unknown log format 'jsno'; did you mean 'json'\?"),
    ],
)
def test_unreadable_log_is_an_error(tmp_path: Path, text: str, format: str | None, message: str) -> None:
    log = tmp_path / "access.log"
    log.write_text(text)
    with pytest.raises(InvalidInput, match=message):
        read(log, format=format)


def test_missing_and_damaged_files_are_errors(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="cannot be read: No such file"):
        read(tmp_path / "access.log")
    with pytest.raises(InvalidInput, match=r"no file matches '.*\*\.log'"):
        expand([f"{tmp_path}/*.log"])
    (tmp_path / "access.log.gz").write_bytes(gzip.compress(COMMON.encode() * 100)[:-20])
    with pytest.raises(InvalidInput, match=r"access\.log\.gz: cannot be read"):
        read(tmp_path / "access.log.gz")


# ------------------------------------------------------------------ the decision log


def record(number: int, **changes: Any) -> DecisionRecord:
    at_us = AT_US + number * 1_000_000
    fields = dict.fromkeys(DecisionRecord._fields, "")
    fields |= {"id": f"{id_prefix(at_us)}{number:08x}", "at_us": at_us, "method": "GET", "route": "/users/{id}"}
    fields |= {"outcome": "allowed", "reason": "within-limits", "tier": "pro", "client_kind": "tenant", "shadow": False}
    fields |= dict.fromkeys(("quota", "period_us", "burst", "cost", "remaining"), 1) | {"weight": 1.0, "retry_us": None}
    fields |= {"kinds": ("ip", "tenant", "label"), "clients": ("hmac:a", "hmac:b", "label:acme"), "also": ()}
    return DecisionRecord(**(fields | changes))


@pytest.mark.parametrize("kind", ["sqlite", "sqlite url", "jsonl"])
def test_decision_log_is_read_without_envoys_requests_and_lost_records(kind: str, tmp_path: Path) -> None:
    records = [record(0), record(1, method="ENVOY"), record(2, route="unmatched", weight=100.0)]
    records.append(record(3, outcome="lost", weight=7.0))
    file = tmp_path / "decisions"
    sink = JsonLinesSink(file) if kind == "jsonl" else SqliteSink(file, days=100_000)
    sink.write(records)
    sink.close()
    requests, reader = read(f"sqlite:////{str(file)[1:]}" if kind == "sqlite url" else file)
    identities = (("tier", "pro"), ("tenant", "hmac:b"), ("ip", "hmac:a"))
    assert [(each[0], each[2], each[4]) for each in requests] == [
        (AT_US, "/users/{id}", ("hmac:a", None, identities)),
        (AT_US + 2_000_000, "/~unmatched", ("hmac:a", None, ((WEIGHT, "100"), *identities))),
    ]
    assert (reader.is_decision_log, reader.sampled, reader.lost, reader.skipped) == (True, 1, 7.0, 2)
