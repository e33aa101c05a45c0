"""The documentation site is built without warnings, and its search finds the right page."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import threading
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING

import pytest

from support.chromium import chromium_browser
from support.paths import ROOT

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from playwright.sync_api import Browser


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, str(ROOT / "scripts" / "site.py"), "--dir", str(folder)]
    built = subprocess.run(command, capture_output=True, text=True, timeout=110)
    assert built.returncode == 0, built.stdout + built.stderr
    (version,) = json.loads((folder / "site" / "versions.json").read_text("utf-8"))
    return folder / "site" / str(version["version"])


@pytest.fixture(scope="module")
def url(site: Path) -> Iterator[str]:
    class Quiet(SimpleHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(site.parent))) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/{site.name}/"
        server.shutdown()


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium_browser() as found:
        yield found


def test_every_page_is_on_the_site(site: Path) -> None:
    pages = {page.relative_to(ROOT / "docs").with_suffix(".html") for page in (ROOT / "docs").rglob("*.md")}
    built = {page.relative_to(site) for page in site.rglob("*.html")}
    assert pages <= built
    assert {"index.html", "changelog.html", "security.html"} <= {str(page) for page in built}


def test_the_reference_describes_the_public_api(site: Path) -> None:
    reference = "".join(page.read_text("utf-8") for page in site.glob("api/*.html"))
    for name in ("headgate.Limiter.check", "headgate.clients.parse_headers", "headgate.testing.FakeClock"):
        assert f'id="{name}"' in reference, name


def test_nothing_is_loaded_from_other_servers(site: Path) -> None:
    for page in site.rglob("*.html"):
        text = page.read_text("utf-8")
        loaded = re.findall(r'<(?:script|img|iframe)[^>]*src="(https?:[^"]+)', text)
        loaded += re.findall(r'<link[^>]*rel="(?:stylesheet|preconnect)"[^>]*href="(https?:[^"]+)', text)
        assert not loaded, page.name


@pytest.mark.parametrize(
    ("words", "pages"),
    [
        ("retry after", {"http.html", "clients.html"}),
        ("circuit breaker", {"outages.html"}),
        ("prepaid", {"hot-keys.html"}),
    ],
)
def test_search_finds_the_right_page_first(browser: Browser, url: str, words: str, pages: set[str]) -> None:
    page = browser.new_page()
    try:
        page.goto(f"{url}index.html?q={words.replace(' ', '%20')}")
        first = page.locator(".md-search-result__item a").first
        first.wait_for(timeout=30_000)
        found = first.get_attribute("href") or ""
        assert found.partition("?")[0].partition("#")[0].rpartition("/")[2] in pages, found
    finally:
        page.close()


def test_versions_can_be_selected(browser: Browser, url: str) -> None:
    page = browser.new_page()
    try:
        page.goto(url)
        page.wait_for_selector(".md-version__current", timeout=20_000)
        assert re.fullmatch(r"\d+\.\d+\.\d+", page.locator(".md-version__current").inner_text())
    finally:
        page.close()
