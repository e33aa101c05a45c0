"""Leases and costs after the response: failing apps and disconnected clients."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

from headgate.gate.admission import current_admission
from support.sites import environ, policy_json

if TYPE_CHECKING:
    from collections.abc import Iterator

    from support.sites import MakeSite


ONE_AT_ONCE = policy_json(
    {"name": "one", "by": "ip", "bucket": {"algorithm": "concurrency", "quota": 1, "period": "1 hour"}},
    {"name": "failures", "by": "ip", "bucket": "10/hour", "count_when": "status >= 500"},
)


@pytest.mark.parametrize("is_started", [False, True], ids=["before", "after"])
def test_failing_app_releases_its_lease_and_is_counted(make_site: MakeSite, is_started: bool) -> None:
    async def asgi(scope: Any, receive: Any, send: Any) -> None:
        if is_started:
            await send({"type": "http.response.start", "status": 500, "headers": []})
            await send({"type": "http.response.body", "body": b"half", "more_body": True})
        raise RuntimeError("broken")

    def wsgi(environ: Any, start_response: Any) -> Iterator[bytes]:
        if not is_started:
            raise RuntimeError("broken")
        start_response("500 Whatever", [])
        return half()

    def half() -> Iterator[bytes]:
        yield b"half"
        raise RuntimeError("broken")

    site = make_site(ONE_AT_ONCE)
    site.app.app = asgi if site.kind == "asgi" else wsgi
    for _ in range(10):
        with pytest.raises(RuntimeError, match="broken"):
            site.ask()
    assert site.ask().status == 429  # by the limit that counts failures, and not for want of a place


def test_disconnected_client_releases_its_lease(make_site: MakeSite) -> None:
    site = make_site(ONE_AT_ONCE)
    if site.kind == "wsgi":
        for _ in range(3):
            started: list[str] = []
            body = site.app(environ("/login"), lambda status, headers, started=started: started.append(status))
            assert started == ["200 OK"]
            body.close()  # as servers do, without having read a chunk
        return

    async def leave() -> None:
        inside = asyncio.Event()

        async def app(scope: Any, receive: Any, send: Any) -> None:
            assert current_admission().allowed
            inside.set()
            await asyncio.get_running_loop().create_future()

        site.app.app = app
        for _ in range(3):
            task = asyncio.create_task(site.answer())  # type: ignore[attr-defined]
            await asyncio.wait_for(inside.wait(), 5)
            inside.clear()
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    site.loop.run_until_complete(leave())  # type: ignore[attr-defined]
