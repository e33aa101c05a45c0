"""Idempotency keys: the first response to each Idempotency-Key, stored for a day."""

from __future__ import annotations

from hashlib import blake2b
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from sqlalchemy import delete, insert, select, update

from headgate.control.admin.problems import ProblemDetails, RequestRejected
from headgate.control.admin.tables import ANSWERS
from headgate.control.config.engine import ConfigUnavailable, read_transaction, write_transaction
from headgate.errors import HeadgateError

if TYPE_CHECKING:
    from collections.abc import Callable

    from headgate.control.admin.tokens import Tokens

__all__ = ["IdempotencyStore", "RecordedResponse", "fingerprint"]

RETENTION_US: Final = 24 * 3_600_000_000
WORK_TIMEOUT_US: Final = 60_000_000
"""After this time, the server that carried out a request is taken to have died."""


class RecordedResponse(NamedTuple):
    """A response to a change, as it is stored."""

    status: int
    body: str
    etag: int | None = None
    is_replayed: bool = False


class IdempotencyStore:
    """Stores responses in the config store's database, for all servers that share it."""

    def __init__(self, tokens: Tokens) -> None:
        self._tokens = tokens

    def once(
        self,
        token_id: str,
        key: str,
        *,
        fingerprint: bytes,
        work: Callable[[], RecordedResponse],
        redact: Callable[[RecordedResponse], RecordedResponse] = lambda response: response,
    ) -> RecordedResponse:
        """Carry out the work, or return the response that was recorded under this key.

        `fingerprint` identifies the request: another request with the same key is rejected. `redact` returns the
        response to store. An error releases the key, because nothing was done; unless the outcome is unknown.
        """
        if (recorded := self._claim(token_id, key, fingerprint)) is not None:
            return recorded
        row = (ANSWERS.c.token_id == token_id, ANSWERS.c.key == key)
        try:
            response = work()
        except ConfigUnavailable:
            raise  # the change may have been written: the key stays claimed
        except HeadgateError:
            self._write(delete(ANSWERS).where(*row))
            raise
        stored = redact(response)
        values = {"status": stored.status, "body": stored.body, "etag": stored.etag}
        self._write(update(ANSWERS).where(*row).values(values))
        return response

    def _claim(self, token_id: str, key: str, fingerprint: bytes) -> RecordedResponse | None:
        """Claim a key, and return None; or return the recorded response."""
        now_us = self._tokens.clock.now_us()
        find = select(ANSWERS).where(ANSWERS.c.token_id == token_id, ANSWERS.c.key == key)
        with read_transaction(self._tokens.engine) as connection:
            row = connection.execute(find).one_or_none()
        if row is None or row.at_us <= now_us - RETENTION_US:
            # There is one writer at a time: the second one finds the row.
            with write_transaction(self._tokens.engine) as connection:
                connection.execute(delete(ANSWERS).where(ANSWERS.c.at_us <= now_us - RETENTION_US))
                row = connection.execute(find).one_or_none()
                if row is None:
                    values = {"token_id": token_id, "key": key, "fingerprint": fingerprint, "at_us": now_us}
                    connection.execute(insert(ANSWERS).values(values))
                    return None
        if bytes(row.fingerprint) != fingerprint:
            detail = "This Idempotency-Key was used for another request; choose a new one."
            raise RequestRejected(ProblemDetails("key-reused", detail))
        if row.status is not None:
            return RecordedResponse(row.status, row.body, row.etag, is_replayed=True)
        if now_us - row.at_us < WORK_TIMEOUT_US:
            detail = "The same request is in progress; try again."
            raise RequestRejected(ProblemDetails("in-progress", detail, headers={"Retry-After": "1"}))
        detail = (
            "The server stopped, or lost the config store, while it carried out this request. Check the audit log for "
            "the change; if it is missing, send it again with a new Idempotency-Key."
        )
        raise RequestRejected(ProblemDetails("outcome-unknown", detail))

    def _write(self, statement: Any) -> None:
        with write_transaction(self._tokens.engine) as connection:
            connection.execute(statement)


def fingerprint(*parts: bytes, secret: bytes) -> bytes:
    """The fingerprint of a request. Keyed by the token, which is not stored: a body may contain an API key, which a
    copy of the database must not allow to guess."""
    digest = blake2b(digest_size=32, key=blake2b(secret).digest(), person=b"headgate replay")
    for part in parts:
        digest.update(b"%d:" % len(part))
        digest.update(part)
    return digest.digest()
