"""`headgate serve`: real processes, real ports."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from typing import TYPE_CHECKING
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import grpc
import pytest
from envoy.service.ratelimit.v3 import rls_pb2_grpc

from headgate.cli import main
from support.envoy import rate_limit_request
from support.serve import serving
from support.servers import RedisServer, wait_until
from support.serving import SECRET

if TYPE_CHECKING:
    from pathlib import Path

TEXT = "domain: shop\ndescriptors: [{key: user, rate_limit: {unit: day, requests_per_unit: 50}}]"


def get(port: int, path: str) -> str:
    with urlopen(f"http://127.0.0.1:{port}{path}", timeout=10) as response:
        text: str = response.read().decode()
    return text


def overall_codes(port: int, count: int, user: str) -> list[int]:
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        stub = rls_pb2_grpc.RateLimitServiceStub(channel)
        request = rate_limit_request("shop", [("user", user)])
        return [stub.ShouldRateLimit(request, timeout=10).overall_code for _ in range(count)]


def test_one_process_serves_both_protocols_and_reloads(tmp_path: Path) -> None:
    file = tmp_path / "shop.yaml"
    file.write_text(TEXT)
    with serving(tmp_path, "--budget", "1") as (process, ports):
        assert overall_codes(ports["grpc"], 51, "ada") == [1] * 50 + [2]
        body = json.dumps({"domain": "shop", "descriptors": [{"entries": [{"key": "user", "value": "ada"}]}]})
        with pytest.raises(HTTPError) as caught:
            urlopen(Request(f"http://127.0.0.1:{ports['http']}/json", body.encode()), timeout=10)
        assert caught.value.code == 429
        caught.value.close()
        assert get(ports["http"], "/healthcheck") == "OK"
        file.write_text(TEXT.replace("50", "60"))
        wait_until(lambda: "requests_per_unit=60" in get(ports["http"], "/rlconfig"), "the new configuration is used")
        assert overall_codes(ports["grpc"], 11, "ada") == [1] * 10 + [2]
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0


def test_workers_share_ports_counters_and_statistics(tmp_path: Path, server: RedisServer) -> None:
    (tmp_path / "shop.yaml").write_text(TEXT)
    options = "--store", server.url, "--workers", "2", "--budget", "1", "--namespace", f"serve-{os.getpid()}"
    with serving(tmp_path, *options) as (process, ports):
        codes = [code for _ in range(6) for code in overall_codes(ports["grpc"], 10, "bob")]
        assert (codes.count(1), codes.count(2)) == (50, 10)
        name = "ratelimit.service.rate_limit.shop.user.total_hits: 60\n"
        wait_until(lambda: name in get(ports["http"], "/stats"), "the statistics of both workers are added up")
        process.send_signal(signal.SIGINT)
        assert process.wait(20) == 0


def test_worker_that_dies_is_replaced(tmp_path: Path, server: RedisServer) -> None:
    (tmp_path / "shop.yaml").write_text(TEXT)
    options = "--store", server.url, "--workers", "2", "--budget", "1", "--namespace", f"dies-{os.getpid()}"
    with serving(tmp_path, *options) as (process, ports):
        before = _children(process.pid)
        os.kill(min(before), signal.SIGKILL)
        wait_until(lambda: len(_children(process.pid) - before) == 1, "another worker is started")
        wait_until(lambda: overall_codes(ports["grpc"], 1, "eve") == [1], "requests are answered")


def health_status(port: int) -> int:
    try:
        get(port, "/healthcheck")
    except HTTPError as error:
        error.close()
        return error.code
    return 200


def test_health_follows_the_store_without_requests(tmp_path: Path) -> None:
    (tmp_path / "shop.yaml").write_text(TEXT)
    with RedisServer() as own, serving(tmp_path, "--store", own.url) as (_, ports):
        wait_until(lambda: health_status(ports["http"]) == 200, "the server is ready")
        own.kill()
        wait_until(lambda: health_status(ports["http"]) == 500, "the outage is noticed")
        own.restart()
        wait_until(lambda: health_status(ports["http"]) == 200, "the server is ready again")
        assert overall_codes(ports["grpc"], 1, "ada") == [1]


def why(capsys: pytest.CaptureFixture[str], client: str, log: str) -> str:
    """The answer of `headgate why`."""
    assert main(["why", client, "--log", log, "--utc"]) == 0
    return " ".join(capsys.readouterr().out.split())


def test_rejections_are_explained_from_the_log(
    tmp_path: Path, server: RedisServer, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HEADGATE_SECRET", SECRET)
    files = tmp_path / "envoy"
    files.mkdir()
    (files / "shop.yaml").write_text(TEXT)
    policy = tmp_path / "limits.yaml"
    policy.write_text("limits: [{name: search, path: /search, by: user, bucket: 1/day}]")
    log = f"sqlite:///{tmp_path / 'decisions.db'}"
    store = "--store", server.url, "--budget", "1", "--namespace", f"log-{os.getpid()}"
    with serving(files, *store, "--log", log, "--policy", str(policy), "--show", "user") as (process, ports):
        assert overall_codes(ports["grpc"], 52, "ada") == [1] * 50 + [2] * 2
        body = json.dumps({"request": {"path": "/search", "ip": "203.0.113.9", "identities": {"user": "bob"}}})
        headers = {"content-type": "application/json"}
        for _ in range(2):
            urlopen(Request(f"http://127.0.0.1:{ports['http']}/v1/check", body.encode(), headers), timeout=10).close()
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0
    answer = why(capsys, "user=ada", log)
    assert "We rejected 2 of them" in answer
    assert "exceeded the limit of 50 requests per day for each user" in answer
    assert 'Limit "shop.user" (50 per day, fixed_window, by user) denied 2 requests' in answer
    assert "on ENVOY shop (2). Furthest over: cost 1, 0 left, 1 over, passes after" in answer
    assert "Client: user ada (asked for: user=ada)." in answer
    answer = why(capsys, "user=bob", log)
    assert 'Limit "search" (1 per day, token_bucket, by user) denied 1 request' in answer
    assert "on GET /search (1)." in answer


def _children(pid: int) -> set[int]:
    with open(f"/proc/{pid}/task/{pid}/children", encoding="ascii") as file:
        return {int(each) for each in file.read().split()}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "nothing to serve; give --grpc ADDRESS, --http ADDRESS, or both"),
        (["--grpc", "0.0.0.0:0"], "would let anyone on the network charge the limits of others"),
        (["--http", "nowhere"], "address 'nowhere': use HOST:PORT"),
        (["--http", "127.0.0.1:0", "--workers", "2"], "would count in each worker on its own"),
        (["--http", "127.0.0.1:0", "--workers", "0"], "--workers 0: give at least 1"),
        (["--http", "unix:/tmp/x", "--workers", "2"], "unix:/tmp/x cannot be shared by 2 workers"),
        (["--http", "127.0.0.1:0", "--cert", "x"], "--cert and --key belong together"),
        (["--http", "127.0.0.1:0", "--envoy", "/nowhere"], "/nowhere: not a directory"),
        (
            ["--http", "127.0.0.1:0", "--envoy", "/nowhere", "--workers", "2", "--store", "redis://127.0.0.1"],
            "/nowhere",
        ),
    ],
)
def test_invalid_call_says_what_to_do(options: list[str], message: str) -> None:
    ended = subprocess.run(
        [sys.executable, "-m", "headgate", "serve", *options], capture_output=True, text=True, timeout=60, check=False
    )
    assert (ended.returncode, message in ended.stderr) == (2, True), ended.stderr


@pytest.mark.parametrize(
    ("text", "code", "shown"),
    [
        (TEXT, 0, "valid: 1 rule in 1 domain\n"),
        ("domain: shop\nunit: day", 1, "misplaced key 'unit' at line 2, column 1"),
        (None, 2, "missing.yaml"),
    ],
)
def test_configuration_files_can_be_checked(
    text: str | None, code: int, shown: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / ("missing.yaml" if text is None else "shop.yaml")
    if text is not None:
        file.write_text(text)
    assert main(["check", "--envoy", str(file)]) == code
    captured = capsys.readouterr()
    assert shown in captured.out + captured.err
    if code < 2:
        assert main(["check", "--envoy", "--json", str(file)]) == code
        assert json.loads(capsys.readouterr().out)["good"] == (code == 0)
        assert main(["check", "--envoy", str(tmp_path)]) == code  # all files of the directory
        assert shown in "".join(capsys.readouterr())


def test_demo_shows_decisions(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--demo"]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines() if line.startswith("user=")]
    assert [(user, answer) for user, _, answer, *_ in lines] == [
        ("user=ada", "OK"),
        ("user=ada", "OK"),
        ("user=ada", "OK"),
        ("user=ada", "OVER_LIMIT"),
        ("user=bob", "OK"),
    ]
