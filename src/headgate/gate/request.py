"""RequestInfo: a request as every adapter passes it to the gate."""

from __future__ import annotations

from typing import Any, Protocol

__all__ = ["RequestInfo"]


class RequestInfo(Protocol):
    """A framework-neutral request, also passed to `on_decision` and to the app's identity functions."""

    @property
    def method(self) -> str: ...
    @property
    def path(self) -> str:
        """The decoded path that the framework routes by, from the server's root."""

    @property
    def mounted_path(self) -> str | None:
        """The path relative to the app's mount point; None for an app at the root."""

    @property
    def peer(self) -> str | None:
        """The IP address of the peer; None for Unix sockets."""

    @property
    def native(self) -> Any:
        """The framework's own object: ASGI scope, WSGI environ, Django or aiohttp request, gRPC context."""

    def header(self, name: str) -> list[str]:
        """The values of all lines of a header, given its name in lower case."""
