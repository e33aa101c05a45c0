"""Requests that a gateway asks about, in place of the request that arrives at this server."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final
from urllib.parse import unquote, urlsplit

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from starlette.datastructures import Headers

__all__ = ["TOKEN_HEADER", "DescribedRequest", "ForwardedRequest", "identity_functions"]

METHOD_HEADERS: Final = ("x-forwarded-method", "x-original-method")
URI_HEADERS: Final = ("x-forwarded-uri", "x-original-uri", "x-original-url")
"""The headers with method and target of the original request: of Traefik, Caddy and HAProxy, and of nginx."""


TOKEN_HEADER: Final = "x-headgate-token"
"""Carries the token of the gateway itself; no identity of the original request, whose Authorization is its own."""


class DescribedRequest:
    """A request that a caller describes in JSON."""

    __slots__ = ("_headers", "identities", "method", "mounted_path", "native", "path", "peer")

    def __init__(
        self,
        method: str,
        path: str,
        peer: str | None,
        headers: Mapping[str, str] | None = None,
        identities: Mapping[str, str] | None = None,
    ) -> None:
        self.method = method
        self.path = path
        self.mounted_path: str | None = None
        self.peer = peer
        self.native: Any = self
        self.identities = identities or {}
        self._headers = {name.lower(): value for name, value in (headers or {}).items()}

    def header(self, name: str) -> list[str]:
        """The values of all lines of a header, given its name in lower case."""
        return [self._headers[name]] if name in self._headers else []


class ForwardedRequest:
    """The request for which a gateway asks permission; all of its headers are passed on."""

    __slots__ = ("_headers", "method", "mounted_path", "native", "path", "peer")

    identities: Final[Mapping[str, str]] = {}

    def __init__(self, headers: Headers, peer: str | None) -> None:
        self._headers = headers
        self.method = next((headers[name] for name in METHOD_HEADERS if name in headers), "GET")
        target = next((headers[name] for name in URI_HEADERS if name in headers), "/")
        self.path = unquote(urlsplit(target).path) or "/"
        self.mounted_path: str | None = None
        self.peer = peer
        self.native: Any = headers

    def header(self, name: str) -> list[str]:
        """The values of all lines of a header, given its name in lower case."""
        return [] if name == TOKEN_HEADER else self._headers.getlist(name)


def identity_functions(kinds: Iterable[str]) -> dict[str, Any]:
    """Functions that return the identities of a `DescribedRequest`, by kind."""

    def function(kind: str) -> Any:
        return lambda request: request.identities.get(kind)

    return {kind: function(kind) for kind in kinds}
