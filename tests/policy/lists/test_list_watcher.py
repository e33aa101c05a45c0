"""Reputation lists from a real web server and from files: the last good version stays, whatever comes after it."""

from __future__ import annotations

import gzip
import hashlib
import hmac
import json
import os
import socket
from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest

from headgate.policy.lists import list_download
from headgate.policy.lists.list_cache import ListCache
from headgate.policy.lists.list_watcher import ListWatcher, NetworkLists
from headgate.policy.model import ListSource
from headgate.testing import FakeClock
from support.list_server import ListServer, redirect, respond

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from http.server import BaseHTTPRequestHandler
    from pathlib import Path

GOOD = b"203.0.113.0/24\n2001:db8::/32\n"
BETTER = b"198.51.100.0/24\n"
HOUR_US = 3_600_000_000


@pytest.fixture(scope="module")
def shared_server() -> Iterator[ListServer]:
    with ListServer() as server:
        yield server


@pytest.fixture
def server(shared_server: ListServer) -> ListServer:
    shared_server.pages.clear()
    shared_server.requests.clear()
    return shared_server


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock(1_763_251_200_000_000)


@pytest.fixture
def cache(tmp_path: Path) -> ListCache:
    return ListCache(tmp_path / "cache")


def watcher_of(source: ListSource, cache: ListCache, clock: FakeClock) -> ListWatcher:
    return ListWatcher(source, cache, now_us=clock.now_us)


def lists(watcher: ListWatcher, address: str) -> bool:
    return watcher.contains_packed(socket.inet_aton(address))


def slow(handler: BaseHTTPRequestHandler) -> None:
    """One byte, and then nothing until the client goes away."""
    handler.send_response(200)
    handler.send_header("Content-Length", "100")
    handler.end_headers()
    handler.wfile.write(b"2")
    handler.wfile.flush()
    handler.rfile.read(1)


def steady(handler: BaseHTTPRequestHandler) -> None:
    """A response without an end, whose parts are never late."""
    handler.send_response(200)
    handler.end_headers()
    while True:
        handler.wfile.write(GOOD)


def silent(handler: BaseHTTPRequestHandler) -> None:
    """Closes the connection."""


def bomb() -> bytes:
    """A gzip file of a few kilobytes, and of 100 MB when it is unpacked."""
    return gzip.compress(bytes(100_000_000), 9)


def too_long(server: ListServer) -> None:
    for number in range(20):
        server.pages[f"/{number}"] = redirect(f"/{number + 1}")


HOSTILE: dict[str, tuple[Callable[[ListServer], Any], str]] = {
    "missing": (lambda server: respond(b"", 404), "the server responded with status 404"),
    "error": (lambda server: respond(GOOD, 500), "the server responded with status 500"),
    "unasked 304": (lambda server: respond(b"", 304), "the server responded with status 304|has no networks"),
    "half": (lambda server: respond(GOOD, length=1000), "the response ended after 29 of 1,000 bytes"),
    "huge": (lambda server: respond(bytes(70_000)), "is larger than 65,536 bytes; raise max_size"),
    "binary": (lambda server: respond(bytes(range(256)) * 100), "invalid entries and 0 networks"),
    "page": (lambda server: respond(b"<html>\nPlease log in\n</html>"), "3 invalid entries and 0 networks"),
    "empty": (lambda server: respond(b""), "has no networks"),
    "bomb": (lambda server: respond(bomb()), "larger than 65,536 bytes"),
    "half gzip": (lambda server: respond(gzip.compress(GOOD)[:-9]), "the gzip file ends too early"),
    "broken gzip": (
        lambda server: respond(b"\x1f\x8b\x08" + bytes(100)),
        "invalid entries|is not valid gzip|too early",
    ),
    "loop": (lambda server: redirect("/list"), "redirect"),
    "long chain": (lambda server: too_long(server) or redirect("/0"), "redirect"),
    "file": (lambda server: redirect("file:///etc/passwd"), "redirect"),
    "slow": (lambda server: slow, "the server is too slow"),
    "endless": (lambda server: steady, "is larger than 65,536 bytes"),
    "silent": (lambda server: silent, "cannot be read|cannot be reached"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_server_changes_nothing(
    case: str, server: ListServer, cache: ListCache, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.pages["/list"] = respond(GOOD)
    watcher = watcher_of(ListSource("bad", f"{server.url}/list", max_size=65_536), cache, clock)
    assert watcher.refresh()
    before = watcher.current
    make, message = HOSTILE[case]
    server.pages["/list"] = make(server)
    clock.advance(7200)
    with monkeypatch.context() as patch:
        patch.setattr(list_download, "READ_TIMEOUT_S", 0.2 if case == "slow" else 20.0)
        assert not watcher.refresh()
    assert watcher.error is not None
    assert any(part in watcher.error for part in message.split("|")), watcher.error
    assert watcher.current is before
    assert lists(watcher, "203.0.113.9")
    assert watcher_of(watcher.source, cache, clock).current == before, "also on disk"
    server.pages["/list"] = respond(BETTER)
    clock.advance(7200)
    assert watcher.refresh_if_due()
    assert watcher.error is None
    assert not lists(watcher, "203.0.113.9")
    assert lists(watcher, "198.51.100.9")


def test_unreachable_server_does_not_delay_the_start(cache: ListCache, clock: FakeClock) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        source = ListSource("bad", f"http://127.0.0.1:{unused.getsockname()[1]}/list")
        watcher = watcher_of(source, cache, clock)
        assert not watcher.refresh()
    assert "cannot be reached" in (watcher.error or "")
    assert watcher.status.failed_us == clock.now_us()
    assert not watcher.status.is_loaded
    assert not lists(watcher, "203.0.113.9")


def test_failed_refresh_is_repeated_sooner(server: ListServer, cache: ListCache, clock: FakeClock) -> None:
    watcher = watcher_of(ListSource("bad", f"{server.url}/list"), cache, clock)
    assert not watcher.refresh_if_due()
    clock.advance(299)
    watcher.refresh_if_due()
    assert len(server.requests) == 1
    clock.advance(1)
    server.pages["/list"] = respond(GOOD)
    assert watcher.refresh_if_due()
    clock.advance(3599)
    watcher.refresh_if_due()
    assert len(server.requests) == 2
    clock.advance(1)
    watcher.refresh_if_due()
    assert len(server.requests) == 3


@pytest.mark.parametrize("fields", [{"ETag": '"v1"'}, {}])
def test_unchanged_list_keeps_its_version(
    fields: dict[str, str], server: ListServer, cache: ListCache, clock: FakeClock
) -> None:
    server.pages["/list"] = respond(GOOD, **fields)
    watcher = watcher_of(ListSource("bad", f"{server.url}/list"), cache, clock)
    watcher.refresh()
    before = watcher.status
    clock.advance(3600)
    assert not watcher.refresh_if_due()
    assert watcher.status == before._replace(checked_us=before.checked_us + HOUR_US)
    assert server.requests[1][1].get("if-none-match") == fields.get("ETag")


def test_processes_of_a_machine_share_what_one_has_read(server: ListServer, cache: ListCache, clock: FakeClock) -> None:
    server.pages["/list"] = respond(GOOD)
    source = ListSource("bad", f"{server.url}/list")
    first, second = watcher_of(source, cache, clock), watcher_of(source, cache, clock)
    assert first.refresh_if_due()
    assert second.refresh_if_due()
    assert lists(second, "203.0.113.9")
    assert len(server.requests) == 1
    third = watcher_of(source, cache, clock)
    assert lists(third, "203.0.113.9"), "known before the first refresh"
    with cache.lock(source):
        clock.advance(3600)
        assert not third.refresh_if_due()
    assert len(server.requests) == 1
    assert not third.refresh(force=True)
    assert len(server.requests) == 2


def test_redirect_to_another_host_gets_no_password(
    server: ListServer, cache: ListCache, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LIST_TOKEN", "s3cret")
    server.pages["/list"] = redirect(f"http://localhost:{server.port}/other")
    server.pages["/other"] = respond(GOOD)
    source = ListSource("bad", f"{server.url}/list", headers={"Authorization": "Bearer ${LIST_TOKEN}"})
    assert watcher_of(source, cache, clock).refresh()
    assert [(path, fields.get("authorization")) for path, fields in server.requests] == [
        ("/list", "Bearer s3cret"),
        ("/other", None),
    ]
    monkeypatch.delenv("LIST_TOKEN")
    failing = watcher_of(source, cache, clock)
    failing.refresh(force=True)
    assert failing.error == "needs the environment variable LIST_TOKEN, which is not set"
    assert "s3cret" not in repr(source)


def test_compressed_list(server: ListServer, cache: ListCache, clock: FakeClock) -> None:
    server.pages["/list"] = respond(gzip.compress(GOOD) + gzip.compress(BETTER) + bytes(8))
    watcher = watcher_of(ListSource("bad", f"{server.url}/list"), cache, clock)
    assert watcher.refresh()
    assert watcher.status.networks == 3


@pytest.mark.parametrize("origin", ["url", "file"])
def test_signed_list(
    origin: str, server: ListServer, cache: ListCache, clock: FakeClock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LIST_SECRET", "a secret of 16 bytes")
    at = f"{server.url}/list" if origin == "url" else str(tmp_path / "list")
    watcher = watcher_of(ListSource("bad", at, secret="${LIST_SECRET}"), cache, clock)

    def publish(content: bytes, signature: str | None) -> None:
        for path, body in (("list", content), ("list.hmac", None if signature is None else f"{signature}\n".encode())):
            if body is not None:
                server.pages[f"/{path}"] = respond(body)
                (tmp_path / path).write_bytes(body)

    def sign(content: bytes, secret: bytes = b"a secret of 16 bytes") -> str:
        return hmac.new(secret, content, hashlib.sha256).hexdigest()

    publish(GOOD, None)
    assert not watcher.refresh()
    publish(GOOD, sign(GOOD, b"another secret of 16 bytes"))
    assert not watcher.refresh()
    assert watcher.error == "its signature list.hmac is wrong"
    publish(GOOD, f"{sign(GOOD)}  list")  # as of openssl or sha256sum
    assert watcher.refresh()
    publish(BETTER + b"\n", sign(BETTER))
    assert not watcher.refresh(force=True)
    assert lists(watcher, "203.0.113.9")
    publish(BETTER, "é" * 30)
    assert not watcher.refresh(force=True)


def test_file_is_read_again_only_if_it_has_changed(tmp_path: Path, cache: ListCache, clock: FakeClock) -> None:
    path = tmp_path / "bad.txt"
    path.write_bytes(GOOD)
    source = ListSource("bad", str(path), refresh=timedelta(seconds=10))
    watcher = watcher_of(source, cache, clock)
    assert watcher.refresh_if_due()
    changed_us = watcher.status.changed_us
    clock.advance(10)
    assert not watcher.refresh_if_due()
    assert watcher.status.changed_us == changed_us
    replacement = tmp_path / "new"
    replacement.write_bytes(BETTER)
    replacement.replace(path)
    clock.advance(10)
    assert watcher.refresh_if_due()
    assert lists(watcher, "198.51.100.9")
    path.unlink()
    clock.advance(10)
    assert not watcher.refresh_if_due()
    assert watcher.error == "cannot be read: No such file or directory"
    assert lists(watcher_of(source, cache, clock), "198.51.100.9"), "the last good version survives a restart"


@pytest.mark.parametrize("kind", ["directory", "pipe", "device", "large"])
def test_what_is_no_regular_file_does_not_block(kind: str, tmp_path: Path, cache: ListCache, clock: FakeClock) -> None:
    path = tmp_path / "bad.txt"
    if kind == "directory":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    else:
        with path.open("wb") as file:
            file.truncate(100 * 2**20)
    watcher = watcher_of(ListSource("bad", str(path)), cache, clock)
    assert not watcher.refresh()
    assert any(part in (watcher.error or "") for part in ("regular file", "Is a directory", "larger than"))


def test_stored_version_that_is_incomplete_or_changed_is_ignored(
    tmp_path: Path, cache: ListCache, clock: FakeClock
) -> None:
    path = tmp_path / "bad.txt"
    path.write_bytes(GOOD)
    source = ListSource("bad", str(path))
    watcher_of(source, cache, clock).refresh()
    assert watcher_of(replace(source, source="other.txt"), cache, clock).current is None
    assert cache.directory is not None
    (stored,) = cache.directory.glob("bad-*.ranges")
    content = stored.read_bytes()
    assert stat_mode(cache.directory) == 0o700
    for damaged in (b"", content[:-1], content[: len(content) // 2], content.replace(b"networks", b"netwerks")):
        stored.write_bytes(damaged)
        assert watcher_of(source, cache, clock).current is None
    stored.write_bytes(content)
    assert watcher_of(source, cache, clock).current is not None


def stat_mode(path: Path) -> int:
    return path.stat().st_mode & 0o777


def test_without_a_writable_directory_lists_are_in_memory(
    tmp_path: Path, clock: FakeClock, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "bad.txt"
    path.write_bytes(GOOD)
    (tmp_path / "taken").write_text("")
    watcher = watcher_of(ListSource("bad", str(path)), ListCache(tmp_path / "taken"), clock)
    assert watcher.refresh()
    assert lists(watcher, "203.0.113.9")
    assert "set HEADGATE_CACHE to a writable directory" in caplog.text


def test_error_is_known_to_other_processes(server: ListServer, cache: ListCache, clock: FakeClock) -> None:
    watcher = watcher_of(ListSource("bad", f"{server.url}/list"), cache, clock)
    watcher.refresh()
    other = watcher_of(watcher.source, cache, clock)
    other.restore_error()
    assert (other.error, other.failed_us) == ("the server responded with status 404", clock.now_us())
    assert cache.directory is not None
    (stored,) = cache.directory.glob("bad-*.error")
    assert json.loads(stored.read_text()) == {"error": other.error, "at_us": other.failed_us}
    server.pages["/list"] = respond(GOOD)
    watcher.refresh()
    assert cache.read_error(watcher.source) is None


def test_exceptions_do_not_count_as_listed(tmp_path: Path, cache: ListCache, clock: FakeClock) -> None:
    path = tmp_path / "bad.txt"
    path.write_bytes(b"10.0.0.0/8\n203.0.113.0/24\n")
    watcher = watcher_of(ListSource("bad", str(path), exempt=("10.1.0.0/16", "203.0.113.9")), cache, clock)
    watcher.refresh()
    assert not lists(watcher, "10.1.2.3")
    assert lists(watcher, "10.2.0.0")
    assert not lists(watcher, "203.0.113.9")
    assert lists(watcher, "203.0.113.10")


def test_new_policy_keeps_the_lists_that_it_does_not_change(tmp_path: Path, cache: ListCache) -> None:
    for name in ("a", "b"):
        (tmp_path / name).write_bytes(GOOD)
    a, b = (ListSource(name, str(tmp_path / name)) for name in ("a", "b"))
    networks = NetworkLists(cache=cache, in_background=False)
    networks.configure([a, b])
    first, second = networks.watchers
    first.refresh()
    second.refresh()
    assert networks.find("203.0.113.9") == ["a", "b"]
    assert networks.find("::ffff:203.0.113.9") == ["a", "b"]
    assert networks.find("x" * 100) == []
    networks.configure([replace(a, refresh=timedelta(seconds=5)), b])
    changed, kept = networks.watchers
    assert kept is second
    assert changed is not first
    assert networks.find("203.0.113.9") == ["a", "b"], "read from disk at once"
    networks.configure([b])
    assert networks.find("203.0.113.9") == ["b"]
    assert networks.describe("b").startswith(f"b (version {kept.version} since ")
