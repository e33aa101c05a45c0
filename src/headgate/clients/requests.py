"""requests: an adapter that paces and retries requests."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from headgate.clients.client import Outgoing, PoliteClient, Reply
from headgate.clients.drivers import run
from headgate.errors import name_missing_extra

with name_missing_extra("headgate.clients.requests needs", "requests", "requests"):
    from requests.adapters import HTTPAdapter

if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Unpack

    import requests

    from headgate.clients.client import ClientOptions

__all__ = ["RateLimitAdapter"]


class RateLimitAdapter(HTTPAdapter):
    """An adapter for `requests.Session` that keeps to the rate limits that servers report.

    >>> import requests
    >>> session = requests.Session()
    >>> session.mount("https://", RateLimitAdapter(retries=3))

    `options` are those of `PoliteClient`; give `client` instead to share its state with other adapters. `adapter` holds
    options of requests' own adapter, such as {"pool_maxsize": 50}.
    """

    def __init__(
        self,
        *,
        client: PoliteClient | None = None,
        adapter: Mapping[str, Any] | None = None,
        **options: Unpack[ClientOptions],
    ) -> None:
        self.client = PoliteClient(**options) if client is None else client
        super().__init__(**(adapter or {}))

    def send(
        self,
        request: requests.PreparedRequest,
        stream: bool = False,
        timeout: Any = None,
        verify: Any = True,
        cert: Any = None,
        proxies: Any = None,
    ) -> requests.Response:
        forward = super().send

        def attempt() -> Reply:
            response = forward(request, stream=stream, timeout=timeout, verify=verify, cert=cert, proxies=proxies)
            return Reply(response.status_code, list(response.raw.headers.items()), response)

        reply = run(self.client, self.client.send(_outgoing(request)), attempt, lambda response: response.close())
        response: requests.Response = reply.native
        return response


def _outgoing(request: requests.PreparedRequest) -> Outgoing:
    url = urlsplit(request.url or "")
    can_replay = request.body is None or isinstance(request.body, str | bytes)
    host = f"{url.scheme}://{url.netloc.rpartition('@')[2]}"
    return Outgoing(request.method or "GET", host, url.path or "/", request.headers, can_replay, request)
