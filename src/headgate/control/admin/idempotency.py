"""Writes that may be sent again: the first answer to each Idempotency-Key, kept for a day."""

from __future__ import annotations

from hashlib import blake2b
from typing import TYPE_CHECKING, Final, NamedTuple

from sqlalchemy import delete, insert, select, update

from headgate.control.admin.problems import ProblemDetails, RequestRejected
from headgate.control.admin.tables import ANSWERS
from headgate.control.config.engine import ConfigUnavailable, read_transaction, write_transaction
from headgate.errors import HeadgateError

if TYPE_CHECKING:
    from collections.abc import Callable

    from headgate.control.admin.tokens import Tokens

__all__ = ["IdempotencyStore", "RecordedResponse", "fingerprint"]

KEPT_US: Final = 24 * 3_600_000_000
LONGEST_WORK_US: Final = 60_000_000
"""Who is at work for longer has died."""


class RecordedResponse(NamedTuple):
    """What a write was answered."""

    status: int
    body: str
    etag: int | None = None
    is_replayed: bool = False


class IdempotencyStore:
    """The answers of a server's writes, in the database that they went to: for all servers that share it."""

    def __init__(self, tokens: Tokens) -> None:
        self._tokens = tokens

    def once(
        self,
        token_id: str,
        key: str,
        *,
        print: bytes,
        work: Callable[[], RecordedResponse],
        kept: Callable[[RecordedResponse], RecordedResponse] = lambda answered: answered,
    ) -> RecordedResponse:
        """What `work` answers, or has answered before under this key; it is done once, however often it is asked for.

        `print` tells whether it is the same request. `kept` is what may be kept of an answer. An error is not kept:
        nothing was done then, and the key is free again; unless it is not known whether something was.
        """
        before = self._claim(token_id, key, print)
        if before is not None:
            return before
        try:
            answered = work()
        except ConfigUnavailable:
            raise  # it may have been done: the key stays taken
        except HeadgateError:
            self._forget(token_id, key)
            raise
        self._keep(token_id, key, kept(answered))
        return answered

    def _claim(self, token_id: str, key: str, print: bytes) -> RecordedResponse | None:
        """The answer before; None if the key is ours now."""
        now_us = self._tokens.clock.now_us()
        mine = (ANSWERS.c.token_id == token_id, ANSWERS.c.key == key)
        with read_transaction(self._tokens.engine) as connection:
            row = connection.execute(select(ANSWERS).where(*mine)).one_or_none()
        if row is None or row.at_us <= now_us - KEPT_US:
            with write_transaction(
                self._tokens.engine
            ) as connection:  # one writer at a time: who comes second finds the row
                connection.execute(delete(ANSWERS).where(ANSWERS.c.at_us <= now_us - KEPT_US))
                row = connection.execute(select(ANSWERS).where(*mine)).one_or_none()
                if row is None:
                    values = {"token_id": token_id, "key": key, "fingerprint": print, "at_us": now_us}
                    connection.execute(insert(ANSWERS).values(values))
                    return None
        if bytes(row.fingerprint) != print:
            raise RequestRejected(
                ProblemDetails("key-reused", "This Idempotency-Key came with another request; make up a new one.")
            )
        if row.status is not None:
            return RecordedResponse(row.status, row.body, row.etag, is_replayed=True)
        if now_us - row.at_us < LONGEST_WORK_US:
            raise RequestRejected(
                ProblemDetails("in-progress", "The same request is at work; ask again.", headers={"Retry-After": "1"})
            )
        raise RequestRejected(
            ProblemDetails(
                "outcome-unknown",
                "The server ended, or lost the config store, while it did this. Look into the audit whether it was "
                "done; if not, send it with a new Idempotency-Key.",
            )
        )

    def _keep(self, token_id: str, key: str, answered: RecordedResponse) -> None:
        mine = (ANSWERS.c.token_id == token_id, ANSWERS.c.key == key)
        values = {"status": answered.status, "body": answered.body, "etag": answered.etag}
        with write_transaction(self._tokens.engine) as connection:
            connection.execute(update(ANSWERS).where(*mine).values(values))

    def _forget(self, token_id: str, key: str) -> None:
        with write_transaction(self._tokens.engine) as connection:
            connection.execute(delete(ANSWERS).where(ANSWERS.c.token_id == token_id, ANSWERS.c.key == key))


def fingerprint(*parts: bytes, secret: bytes) -> bytes:
    """What tells two requests apart. Keyed by the token, which is kept nowhere: a body may hold an API key, and who
    gets hold of the database must not be able to try keys out."""
    made = blake2b(digest_size=32, key=blake2b(secret).digest(), person=b"headgate replay")
    for part in parts:
        made.update(b"%d:" % len(part))
        made.update(part)
    return made.digest()
