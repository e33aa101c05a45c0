"""The sockets of the server."""

from __future__ import annotations

import asyncio
import socket

from headgate.server.run import bind


def test_responses_are_sent_without_waiting_for_acknowledgements() -> None:
    async def ask() -> bytes:
        async def answer(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            connection = writer.get_extra_info("socket")
            writer.write(b"%d" % connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
            writer.close()
            await writer.wait_closed()

        with bind("127.0.0.1:0") as listener:
            async with await asyncio.start_server(answer, sock=listener):
                reader, writer = await asyncio.open_connection(*listener.getsockname())
                answered = await reader.read()
                writer.close()
                await writer.wait_closed()
        return answered

    assert asyncio.run(ask()) == b"1"
