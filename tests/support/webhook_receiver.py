"""A server that receives webhooks, and answers as a test says."""

from __future__ import annotations

import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from typing import Self

__all__ = ["WebhookReceiver"]


class WebhookCall(NamedTuple):
    path: str
    headers: dict[str, str]
    body: bytes


class WebhookReceiver:
    """Accepts requests, or gives the next of `answers`: status and headers; status 0 closes the connection."""

    def __init__(self) -> None:
        self.calls: list[WebhookCall] = []
        self.answers: list[tuple[int, dict[str, str]]] = []
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                headers = {name.lower(): value for name, value in self.headers.items()}
                receiver.calls.append(WebhookCall(self.path, headers, body))
                status, headers = receiver.answers.pop(0) if receiver.answers else (204, {})
                if status == 0:
                    return  # closes the connection without an answer
                self.send_response(status)
                for name, value in headers.items():
                    self.send_header(name, value)
                self.end_headers()

            do_GET = do_POST  # noqa: N815 - as the library names it

            def log_message(self, *_: Any) -> None: ...

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}/hook"
        self._thread = threading.Thread(target=self.server.serve_forever, args=(0.01,))

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.server.shutdown()
        self._thread.join()
        self.server.server_close()
