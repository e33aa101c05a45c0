"""A server that takes emails, and answers as a test says."""

from __future__ import annotations

import socketserver
import threading
from email import message_from_bytes
from email.policy import default
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from typing import Self

__all__ = ["ReceivedEmail", "SmtpServer"]


class ReceivedEmail(NamedTuple):
    sender: str
    to: list[str]
    message: Any


class SmtpServer:
    """Speaks SMTP (RFC 5321) as far as one message needs it. `answers` replace the next answers to its content."""

    def __init__(self) -> None:
        self.emails: list[ReceivedEmail] = []
        self.answers: list[str] = []
        server = self

        class Handler(socketserver.StreamRequestHandler):
            def handle(self) -> None:
                self._say("220 mail.example ESMTP")
                sender, to = "", []
                while line := self.rfile.readline():
                    verb, _, rest = line.decode().strip().partition(" ")
                    if verb.upper() == "EHLO":
                        self._say("250-mail.example", "250 SIZE 1000000")
                    elif verb.upper() == "MAIL":
                        sender = rest.partition("<")[2].partition(">")[0]
                        self._say("250 ok")
                    elif verb.upper() == "RCPT":
                        to.append(rest.partition("<")[2].partition(">")[0])
                        self._say("250 ok")
                    elif verb.upper() == "DATA":
                        self._say("354 go on")
                        content = b""
                        while (line := self.rfile.readline()) not in (b".\r\n", b""):
                            content += line.removeprefix(b".") if line.startswith(b"..") else line
                        answer = server.answers.pop(0) if server.answers else "250 taken"
                        if answer.startswith("250"):
                            message = message_from_bytes(content, policy=default)
                            server.emails.append(ReceivedEmail(sender, to, message))
                        self._say(answer)
                    elif verb.upper() == "QUIT":
                        self._say("221 bye")
                        return
                    else:
                        self._say("500 unknown")

            def _say(self, *lines: str) -> None:
                self.wfile.write("".join(f"{line}\r\n" for line in lines).encode())

        class Server(socketserver.ThreadingTCPServer):
            allow_reuse_address = True
            daemon_threads = True

        self.server = Server(("127.0.0.1", 0), Handler)
        self.port = self.server.server_address[1]
        self._thread = threading.Thread(target=self.server.serve_forever, args=(0.01,))

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.server.shutdown()
        self._thread.join()
        self.server.server_close()
