"""A web server with reputation lists, which answers as a test says."""

from __future__ import annotations

import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Self

__all__ = ["ListServer", "redirect", "respond"]


def respond(
    body: bytes, status: int = 200, *, length: int | None = None, **fields: str
) -> Callable[[BaseHTTPRequestHandler], None]:
    """An answer with this body; `length` is another Content-Length than its own."""

    def answer(handler: BaseHTTPRequestHandler) -> None:
        etag = fields.get("ETag")
        if etag is not None and handler.headers.get("If-None-Match") == etag:
            handler.send_response(304)
            handler.end_headers()
            return
        handler.send_response(status)
        handler.send_header("Content-Length", str(len(body) if length is None else length))
        for name, value in fields.items():
            handler.send_header(name, value)
        handler.end_headers()
        handler.wfile.write(body)

    return answer


def redirect(location: str) -> Callable[[BaseHTTPRequestHandler], None]:
    return respond(b"", 302, Location=location)


class ListServer:
    """Serves the answers in `pages` by path; 404 for all other paths."""

    def __init__(self) -> None:
        self.pages: dict[str, Callable[[BaseHTTPRequestHandler], None]] = {}
        self.requests: list[tuple[str, dict[str, str]]] = []
        """The path and the header fields of each request."""
        served = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                served.requests.append((self.path, {name.lower(): value for name, value in self.headers.items()}))
                served.pages.get(self.path, respond(b"not here", 404))(self)

            def log_message(self, *_: Any) -> None: ...

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.port = self._server.server_port
        self.url = f"http://127.0.0.1:{self.port}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,))

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()
