"""The directory of configuration files."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

import pytest

from headgate.server.envoy import config_directory
from headgate.server.envoy.config import ConfigError, load
from headgate.server.envoy.config_directory import ConfigDirectory, runtime_directory
from support.servers import wait_until

if TYPE_CHECKING:
    from pathlib import Path


def test_all_files_are_read_except_hidden_ones(tmp_path: Path) -> None:
    for name in ("b.yaml", "a", ".hidden", "sub/c.yaml", "..data/b.yaml"):
        file = tmp_path / name
        file.parent.mkdir(exist_ok=True)
        file.write_text(f"# {name}")
    assert [name for name, _ in ConfigDirectory(tmp_path).read()] == ["a", "b.yaml", "sub/c.yaml"]


def test_files_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="missing: not a directory"):
        ConfigDirectory(tmp_path / "missing").read()
    (tmp_path / "a.yaml").write_bytes(b"\xff")
    with pytest.raises(ConfigError, match=r"^a.yaml: not UTF-8 text: invalid start byte at byte 0$"):
        ConfigDirectory(tmp_path).read()
    (tmp_path / "a.yaml").write_bytes(b" " * 10_000_001)
    with pytest.raises(ConfigError, match=r"^a.yaml: larger than 10,000,000 bytes"):
        ConfigDirectory(tmp_path).read()


def test_changes_are_noticed_however_they_are_made(tmp_path: Path) -> None:
    for version in ("v1", "v2"):
        (tmp_path / version).mkdir()
        (tmp_path / version / "a.yaml").write_text(version)
    mounted = tmp_path / "config"
    mounted.symlink_to("v1")
    directory = ConfigDirectory(mounted)
    directory.read()
    assert not directory.has_changed()
    (tmp_path / "v1" / "a.yaml").write_text("longer text")
    assert directory.has_changed()
    directory.read()
    (tmp_path / "new").symlink_to("v2")
    (tmp_path / "new").replace(mounted)
    assert directory.has_changed()
    assert directory.read() == [("a.yaml", "v2")]
    (tmp_path / "v2" / "b.yaml").touch()
    assert directory.has_changed()


def test_the_watcher_reloads_and_reports_invalid_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(config_directory, "POLL_INTERVAL_S", 0.01)
    file = tmp_path / "a.yaml"
    file.write_text("domain: a")
    directory, loaded = ConfigDirectory(tmp_path), []
    directory.read()

    async def reload(texts: list[tuple[str, str]]) -> None:
        loaded.append([*load(texts).domains])

    async def main() -> None:
        watcher = asyncio.create_task(directory.watch(reload))
        async with asyncio.timeout(30):
            file.write_text("nonsense: 1")
            await asyncio.to_thread(wait_until, lambda: "not reloaded" in caplog.text, "the file is rejected")
            file.write_text("domain: b-2")
            await asyncio.to_thread(wait_until, lambda: loaded, "the file is loaded")
        watcher.cancel()

    with caplog.at_level(logging.INFO, "headgate"):
        asyncio.run(main())
    assert loaded == [["b-2"]]
    assert "a.yaml: config error, unknown key 'nonsense'" in caplog.text


def test_the_variables_of_the_original_name_the_directory() -> None:
    assert runtime_directory({}) is None
    env = {"RUNTIME_ROOT": "/data", "RUNTIME_SUBDIRECTORY": "ratelimit"}
    assert str(runtime_directory(env)) == "/data/ratelimit/config"
    assert str(runtime_directory({**env, "RUNTIME_APPDIRECTORY": "limits"})) == "/data/ratelimit/limits"
