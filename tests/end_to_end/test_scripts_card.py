"""The versions of the scripts on the policy page, in a real Chromium."""

from __future__ import annotations

import json
from contextlib import ExitStack, closing
from typing import TYPE_CHECKING

import httpx
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, expect

from headgate import Limiter
from headgate.control.admin.serve import AdminServer
from headgate.control.admin.tokens import Tokens
from headgate.control.config import ConfigStore
from headgate.control.service import AdminService
from headgate.stores.redis.rollout import CanaryThresholds, RolloutClient, new_rollout
from headgate.stores.redis.scripts import ScriptSet

if TYPE_CHECKING:
    from pathlib import Path

    from support.servers import RedisServer


def test_policy_page_shows_the_versions_of_a_rollout(
    tmp_path: Path, redis7: RedisServer, browser: Browser, unique: str
) -> None:
    shipped = ScriptSet.shipped()
    candidate = shipped.replace({"gcra": f"-- faster\n{shipped.sources['gcra']}"})
    with ExitStack() as stack:
        url = f"sqlite:///{tmp_path}/config.db"
        store = stack.enter_context(closing(ConfigStore(url)))
        store.put_policy("limits: [{name: all, by: ip, bucket: 10/minute}]", author="ada", reason="first")
        limiter = stack.enter_context(Limiter(redis7.url, namespace=unique))
        client = RolloutClient(stack.enter_context(closing(limiter.engine.store.background_client())))
        tokens = stack.enter_context(closing(Tokens(url)))
        server = stack.enter_context(AdminServer(AdminService(store, counters=limiter), tokens, port=0))
        context = browser.new_context(viewport={"width": 1280, "height": 800})
        stack.callback(context.close)
        page = context.new_page()
        page.goto(server.link(tokens.make("otto", "viewer", by="tests").token))
        for node in ("web-1:7", "web-2:8"):
            client.poll(-1, node, json.dumps({"role": "stable", "digest": shipped.digest}), {})
        page.goto(f"{server.url}/policy")
        expect(page.locator("#scripts")).to_have_count(0)  # all nodes run the same version
        rollout = new_rollout(
            candidate,
            CanaryThresholds(),
            percent=None,
            nodes=("web-2",),
            view=client.read(),
            author="ada",
            reason="why",
        )
        assert client.write(rollout, 0)
        counts = {"runs": 1200, "differences": 1, "errors": 0, "stable_us": 1000, "candidate_us": 1500}
        client.poll(-1, "web-2:8", json.dumps({"role": "canary", "digest": candidate.digest, **counts}), {})
        page.reload()
        card = page.locator("#scripts")
        expect(card).to_contain_text(f"Version {candidate.digest} on nodes web-2, which changes gcra.")
        expect(card.get_by_role("row", name="web-2:8")).to_contain_text("1,200")
        expect(card.get_by_role("row", name="web-2:8")).to_contain_text("1.50×")
        expect(card.get_by_text("Roll back")).to_have_count(0)  # a viewer
        page.goto(server.link(tokens.make("olga", "operator", by="tests").token))
        page.goto(f"{server.url}/policy")
        card.get_by_text("Promote", exact=True).click()
        card.get_by_label("Reason").first.fill("faster")
        card.get_by_role("button", name="Promote to all nodes").click()
        expect(page.get_by_text("runs 1,200, differences 1, errors 0")).to_be_visible()
        page.goto(f"{server.url}/policy")
        card.get_by_text("Roll back", exact=True).click()
        card.get_by_label("Reason").last.fill("difference 1")
        card.get_by_role("button", name="Roll back the scripts").click()
        expect(page.get_by_text("Scripts rolled back")).to_be_visible()
        expect(card).to_contain_text("by olga: “difference 1”")
        for width in (1280, 390):
            page.set_viewport_size({"width": width, "height": 800})
            assert page.evaluate("document.documentElement.scrollWidth") <= width
            assert [each["id"] for each in Axe().run(page).response["violations"]] == []
        token = tokens.make("eve", "viewer", by="tests").text
        found = httpx.get(f"{server.url}/api/v1/scripts", headers={"Authorization": f"Bearer {token}"}).json()
        assert found["rollout"]["state"] == "rolled back"
        assert [(node["name"], node["slowdown"]) for node in found["nodes"]] == [("web-1:7", None), ("web-2:8", 1.5)]


def test_status_says_why_it_shows_no_nodes(tmp_path: Path) -> None:
    with closing(ConfigStore(f"sqlite:///{tmp_path}/config.db")) as store:
        assert "without --store" in AdminService(store).scripts.status().troubles[0]
        with Limiter() as limiter:
            found = AdminService(store, counters=limiter).scripts.status()
            assert found.troubles == ("counters in memory need no scripts",)
        with Limiter("redis://127.0.0.1:1/0") as limiter:
            found = AdminService(store, counters=limiter).scripts.status()
            assert found.troubles == ("the rollout of scripts cannot be read",)
