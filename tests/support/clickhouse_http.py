"""ClickHouse's HTTP interface on a loopback port, in front of its real engine.

No server of today's ClickHouse can be installed with pip, but its engine comes as a library (chdb). This process hands
it the SQL, the parameters and the data that arrive, so that what clients put on the wire is read by ClickHouse itself.
Faults are ordered with POST /fault?next=NAME, for the next insert: "refuse" it with a 500, take it and answer "late" or
with a 500 all the same ("forget"), or "drop" the connection when it is taken.

Run as a program, it prints its port, and ends with its standard input.
"""

from __future__ import annotations

import base64
import gzip
import os
import re
import sys
import tempfile
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qsl, urlsplit

import chdb
import lz4.frame

USER, PASSWORD = "ada", "the-log-s-password"
LATE = 2.5
"""Seconds."""

connection = chdb.connect(":memory:")
lock = threading.Lock()
faults: list[str] = []
inserts: list[int] = []
"""The bytes of each insert that the engine took."""


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self.do_POST()

    def do_POST(self) -> None:
        url = urlsplit(self.path)
        given = dict(parse_qsl(url.query, keep_blank_values=True))
        body = self._body()
        if url.path == "/ping":
            self._answer(200, b"Ok.\n")
        elif url.path == "/fault":
            faults.append(given["next"])
            self._answer(200, b"")
        elif url.path == "/inserts":
            self._answer(200, str(len(inserts)).encode())
        elif not self._is_known():
            message = f"Code: 516. DB::Exception: {USER}: Authentication failed: password is incorrect"
            self._answer(403, f"{message}. (AUTHENTICATION_FAILED)".encode(), code=516)
        else:
            self._run(given, body)

    def _run(self, given: dict[str, str], body: bytes) -> None:
        # What is asked stands in the URL, at the beginning of the body, or in both, one after the other.
        asked = given["query"].encode() + b"\n" + body if given.get("query") else body
        inserted = re.match(rb"\s*(INSERT\b.*?)\s+FORMAT\s+(\w+)[ ]*\n", asked, re.DOTALL | re.IGNORECASE)
        is_insert = inserted is not None
        fault = faults.pop() if is_insert and faults else ""
        if fault == "refuse":
            self._answer(
                500, b"Code: 241. DB::Exception: Memory limit (total) exceeded. (MEMORY_LIMIT_EXCEEDED)", code=241
            )
            return
        try:
            found = query(asked.decode(), given) if inserted is None else insert(inserted, asked[inserted.end() :])
        except Exception as error:
            text = str(error)
            code = re.search(r"Code: (\d+)", text)
            self._answer(500, text.encode(), code=int(code[1]) if code else 1)
            return
        if fault == "drop":
            self.close_connection = True
            return
        if fault == "late":
            time.sleep(LATE)
        if fault == "forget":
            self._answer(500, b"Code: 159. DB::Exception: Timeout exceeded. (TIMEOUT_EXCEEDED)", code=159)
            return
        self._answer(200, found)

    def _is_known(self) -> bool:
        expected = base64.b64encode(f"{USER}:{PASSWORD}".encode()).decode()
        return self.headers.get("Authorization") == f"Basic {expected}"

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") == "chunked":
            parts = []
            while size := int(self.rfile.readline(), 16):
                parts.append(self.rfile.read(size))
                self.rfile.readline()
            self.rfile.readline()
            body = b"".join(parts)
        else:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        match self.headers.get("Content-Encoding"):
            case "lz4":
                return bytes(lz4.frame.decompress(body))
            case "gzip":
                return gzip.decompress(body)
        return body

    def _answer(self, status: int, body: bytes, *, code: int | None = None) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("X-ClickHouse-Server-Display-Name", "test")
        if code is not None:
            self.send_header("X-ClickHouse-Exception-Code", str(code))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        """Nothing: what goes wrong is told to the client."""


def query(sql: str, given: dict[str, str]) -> bytes:
    params = {name.removeprefix("param_"): value for name, value in given.items() if name.startswith("param_")}
    with lock:
        found = connection.query(sql, given.get("default_format", "TabSeparated"), params=params)
        return bytes(found.bytes() or b"")


def insert(asked: re.Match[bytes], data: bytes) -> bytes:
    into, form = asked[1].decode(), asked[2].decode()
    with tempfile.NamedTemporaryFile() as file, lock:
        file.write(data)
        file.flush()
        connection.query(f"{into} FROM INFILE '{file.name}' FORMAT {form}")
        inserts.append(len(data))
    return b""


if __name__ == "__main__":
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    print(server.server_address[1], file=answers, flush=True)
    sys.stdin.read()
    os._exit(0)  # the engine's threads are not waited for
