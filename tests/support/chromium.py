"""A real Chromium, driven by Playwright."""

from __future__ import annotations

import shutil
from contextlib import contextmanager
from typing import TYPE_CHECKING

from playwright.sync_api import Browser, sync_playwright

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextmanager
def chromium_browser() -> Iterator[Browser]:
    chromium = shutil.which("chromium")
    assert chromium is not None, "these tests need Chromium: scripts/install-packages servers installs it"
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        yield browser
        browser.close()
