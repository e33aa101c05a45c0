"""Access to the server from other machines: tokens and client certificates."""

from __future__ import annotations

import asyncio
import ssl
from typing import TYPE_CHECKING, Any

import httpx
import pytest
from sqlalchemy import event

from headgate.control.admin import Tokens
from headgate.control.config import ConfigStore
from headgate.errors import InvalidConfiguration
from headgate.server.access import FAILED_TOKENS, AccessControl, AccessDenied, TokenVerifier
from headgate.server.run import ServerOptions
from support.serve import serving
from support.servers import make_certificates

if TYPE_CHECKING:
    from pathlib import Path

PEER = "203.0.113.9"
CHECK = {"limits": [{"limit": "1000/minute"}]}


class Clock:
    """Seconds for the cache of the verifier."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def tokens(tmp_path: Path) -> Tokens:
    return Tokens(f"sqlite:///{tmp_path}/config.db")


async def status(verifier: TokenVerifier, text: str | None, peer: str = PEER) -> int:
    try:
        await verifier.verify(text, peer)
    except AccessDenied as error:
        return error.status
    return 200


def test_only_the_role_check_gives_access_and_only_here(tokens: Tokens) -> None:
    async def test() -> None:
        verifier = TokenVerifier(tokens)
        made = {role: tokens.make(role, role, by="test").text for role in ("viewer", "admin", "check")}  # type: ignore[arg-type]
        answers = {role: await status(verifier, text) for role, text in made.items()}
        assert answers == {"viewer": 401, "admin": 401, "check": 200}
        assert await status(verifier, None) == 401
        assert await status(verifier, made["check"][:-1] + "é") == 401
        assert tokens.check(made["check"]) is None  # no access to the admin server
        assert tokens.by_id(made["check"].split("_")[1]) is None

    asyncio.run(test())


def test_the_database_is_read_every_five_seconds_and_revocation_counts_then(tokens: Tokens) -> None:
    async def test() -> None:
        clock = Clock()
        verifier = TokenVerifier(tokens, time=clock)
        made = tokens.make("gateway", "check", by="test")
        reads: list[str] = []
        event.listen(tokens.engine, "before_cursor_execute", lambda *arguments: reads.append(arguments[2]))
        assert await asyncio.gather(*[status(verifier, made.text) for _ in range(50)]) == [200] * 50
        first = len([each for each in reads if each.startswith("SELECT")])
        assert first == 1
        reads.clear()
        tokens.revoke(made.token.id, by="test")
        reads.clear()
        clock.now = 4.9
        assert await status(verifier, made.text) == 200
        assert not reads
        clock.now = 5.0
        assert await status(verifier, made.text) == 401

    asyncio.run(test())


def test_failed_attempts_are_bounded_by_address(tokens: Tokens) -> None:
    async def test() -> None:
        clock = Clock()
        verifier = TokenVerifier(tokens, time=clock)
        valid = tokens.make("gateway", "check", by="test").text
        assert await status(verifier, valid) == 200
        wrong = [f"hg_{number:010d}_{'x' * 43}" for number in range(FAILED_TOKENS.quota + 5)]
        answers = [await status(verifier, text) for text in wrong]
        assert answers == [401] * FAILED_TOKENS.quota + [429] * 5
        clock.now = 6.0
        assert await status(verifier, valid) == 200  # also after its time in the cache
        assert await status(verifier, wrong[0], "203.0.113.10") == 401

    asyncio.run(test())


def test_requests_that_charge_limits_need_a_token(tokens: Tokens) -> None:
    valid = tokens.make("gateway", "check", by="test").text

    async def app(_: Any, __: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"ok"})

    async def test() -> None:
        transport = httpx.ASGITransport(AccessControl(app, TokenVerifier(tokens)))
        async with httpx.AsyncClient(transport=transport, base_url="http://headgate") as client:
            for path in ("/v1/check", "/v1/peek", "/auth", "/json", "/v1"):
                answer = await client.post(path)
                assert (answer.status_code, answer.json()["error"]) == (401, "unauthorized"), path
                assert answer.headers["www-authenticate"] == "Bearer"
                for headers in ({"authorization": f"Bearer {valid}"}, {"x-headgate-token": valid}):
                    assert (await client.post(path, headers=headers)).status_code == 200, path
            for path in ("/healthcheck", "/metrics", "/stats", "/rlconfig"):
                assert (await client.get(path)).status_code == 200, path

    asyncio.run(test())


@pytest.mark.parametrize("options", [{"http": "0.0.0.0:8080", "policy": "x.yaml"}, {"grpc": "0.0.0.0:8081"}])
def test_addresses_on_the_network_need_access_control(options: dict[str, Any]) -> None:
    with pytest.raises(
        InvalidConfiguration, match=r"--control URL, whose tokens .*--client-ca for client certificates"
    ):
        ServerOptions(**options).check()
    ServerOptions(**options, control="sqlite:///x.db").check()
    ServerOptions(**options, cert="c", key="k", client_ca="a").check()


def test_a_server_on_the_network_asks_for_tokens(
    tmp_path: Path, tokens: Tokens, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HEADGATE_SECRET", "a secret of sixteen bytes or more")
    url = f"sqlite:///{tmp_path}/config.db"
    ConfigStore(url).put_policy("limits: [{by: ip, bucket: 5/minute}]", author="test", reason="first")
    headers = {"x-headgate-token": tokens.make("gateway", "check", by="test").text}
    (tmp_path / "envoy").mkdir()
    (tmp_path / "envoy" / "a.yaml").write_text("domain: shop")
    options = "--control", url, "--http", "0.0.0.0:0"
    with (
        serving(tmp_path / "envoy", *options) as (_, ports),
        httpx.Client(base_url=f"http://127.0.0.1:{ports['http']}") as client,
    ):
        assert client.get("/healthcheck").status_code == 200
        assert client.get("/auth").status_code == 401
        assert client.get("/auth", headers=headers).status_code == 200
        assert client.post("/v1/check", json=CHECK).status_code == 401
        assert client.post("/v1/check", json=CHECK, headers=headers).json()["allowed"]


def test_client_certificates_give_access_and_new_ones_are_used(tmp_path: Path) -> None:
    first, second, current = tmp_path / "first", tmp_path / "second", tmp_path / "current"
    for each in (first, second):
        each.mkdir()
        make_certificates(each)
    current.symlink_to("first")
    (tmp_path / "envoy").mkdir()
    files = ("server.pem", "server.key", "ca.pem")
    options = [
        word
        for name, file in zip(("--cert", "--key", "--client-ca"), files, strict=True)
        for word in (name, str(current / file))
    ]

    def post(port: int, directory: Path, *, with_certificate: bool = True) -> int:
        context = ssl.create_default_context(cafile=str(directory / "ca.pem"))
        if with_certificate:
            context.load_cert_chain(directory / "server.pem", directory / "server.key")
        with httpx.Client(verify=context, base_url=f"https://127.0.0.1:{port}") as client:
            assert client.get("/healthcheck").status_code == 200
            return client.post("/v1/check", json=CHECK).status_code

    with serving(tmp_path / "envoy", *options) as (_, ports):
        assert post(ports["http"], first) == 200
        assert post(ports["http"], first, with_certificate=False) == 401
        with pytest.raises(httpx.ConnectError):
            post(ports["http"], second)
        current.unlink()
        current.symlink_to("second")
        assert post(ports["http"], second) == 200
