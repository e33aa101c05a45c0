"""Tokens: who may use the admin server, in which role, and for how long. Only their hashes are kept."""

from __future__ import annotations

import re
import secrets
import threading
import weakref
from hashlib import sha256
from hmac import compare_digest
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from sqlalchemy import delete, func, insert, or_, select, update

from headgate._fork import reinit_after_fork
from headgate.clock import SystemClock
from headgate.control.admin.tables import ANSWERS, CODES, SESSIONS, TOKENS
from headgate.control.config.engine import open_engine, read_transaction, write_transaction
from headgate.control.config.migrations import migrate
from headgate.control.service.errors import NotFound
from headgate.control.service.models import ROLES, Actor
from headgate.errors import InvalidInput

if TYPE_CHECKING:
    from collections.abc import Callable

    from sqlalchemy import Connection, Engine

    from headgate.clock import Clock
    from headgate.control.service.models import Role

__all__ = ["DEFAULT_DAYS", "FIRST_DAYS", "LONGEST_NAME", "MOST_DAYS", "Made", "Token", "Tokens"]

DEFAULT_DAYS: Final = 90
FIRST_DAYS: Final = 7
"""For the token of the first run: long enough to make those that are wanted."""
MOST_DAYS: Final = 3650
LONGEST_NAME: Final = 100
CODE_US: Final = 600_000_000
"""A link to sign in holds for ten minutes."""

DAY_US: Final = 86_400_000_000
USED_EVERY_US: Final = 60_000_000
"""A use is noted once a minute at most: reads stay reads, however many there are."""

_TOKEN: Final = re.compile(r"hg_([0-9a-z]{10})_([A-Za-z0-9]{43})")
_ID: Final = re.compile(r"[0-9a-z]{1,20}")
_ID_LETTERS: Final = "0123456789abcdefghjkmnpqrstvwxyz"
_LETTERS: Final = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
_NAME: Final = re.compile(r"[^\s\x00-\x1f\x7f](?:[^\x00-\x1f\x7f]*[^\s\x00-\x1f\x7f])?")


class Token(NamedTuple):
    """What is known of a token: all but the token itself."""

    id: str
    name: str
    role: Role
    made_us: int
    made_by: str
    expires_us: int
    used_us: int | None = None
    """To the minute."""
    revoked_us: int | None = None
    revoked_by: str | None = None

    @property
    def actor(self) -> Actor:
        """Who acts with it; the name is what changes are signed with."""
        return Actor(self.name, self.role)

    def state(self, now_us: int) -> str:
        """ "active", "expired" or "revoked"."""
        if self.revoked_us is not None:
            return "revoked"
        return "active" if now_us < self.expires_us else "expired"


class Made(NamedTuple):
    """A token that was just made."""

    token: Token
    text: str
    """The token itself, which is shown once and kept nowhere."""

    def __repr__(self) -> str:
        return f"Made({self.token!r}, text=...)"  # it must not get into a log with a value that holds it


class Tokens:
    """The tokens of one config store: made, checked and revoked. Safe for threads, and for several servers at once."""

    def __init__(self, url: str, *, clock: Clock | None = None) -> None:
        """`url` is that of the config store, whose database holds them."""
        self.engine: Engine = open_engine(url, keep=2)
        weakref.finalize(self, self.engine.dispose)
        self.clock = clock or SystemClock()
        self.check_name: Callable[[str], None] = lambda name: None
        """Raises InvalidInput for a name that must not be kept: the service knows which words are API keys."""
        self.changes = 0
        """Rises with each token and session that begins in this process."""
        self._lock = threading.Lock()
        self._noted: dict[str, int] = {}
        with write_transaction(self.engine) as connection:
            migrate(connection)
        reinit_after_fork(self)

    def close(self) -> None:
        """Close the connections that are kept open; the next question opens another."""
        self.engine.dispose()

    def reset_after_fork(self) -> None:
        """Connections stay with the parent."""
        self.engine.dispose(close=False)
        self._lock = threading.Lock()

    def make(self, name: str, role: Role, *, by: str, days: float = DEFAULT_DAYS) -> Made:
        """A new token, for a person or a program. `by` is who makes it."""
        self.check_name(name)
        with write_transaction(self.engine) as connection:
            return self._make(connection, name, role, by, days)

    def first(self) -> Made | None:
        """A token of an admin for seven days, if there never was any token; else None.

        Only one of several servers that start at once gets it.
        """
        with write_transaction(self.engine) as connection:
            if connection.scalar(select(func.count()).select_from(TOKENS)):
                return None
            return self._make(connection, "first-run", "admin", "first run", FIRST_DAYS)

    def check(self, text: str) -> Token | None:
        """The token that this is, if it holds now; None for one that was made up, has expired, or was revoked."""
        match = _TOKEN.fullmatch(text)
        if match is None:
            return None
        with read_transaction(self.engine) as connection:
            row = connection.execute(select(TOKENS).where(TOKENS.c.id == match[1])).one_or_none()
        # Also without a row something is compared, so that the time does not tell which ids there are.
        is_it = compare_digest(_hashed(text), bytes(32) if row is None else bytes(row.hash))
        if row is None or not is_it:
            return None
        return self._holds(_token(row))

    def by_id(self, id: str) -> Token | None:
        """The token behind a session, if it holds now."""
        with read_transaction(self.engine) as connection:
            row = connection.execute(select(TOKENS).where(TOKENS.c.id == id)).one_or_none()
        return None if row is None else self._holds(_token(row))

    def digests(self) -> frozenset[bytes]:
        """The SHA-256 of each token and each session cookie that is valid now."""
        now_us = self.clock.now_us()
        active = select(TOKENS.c.hash).where(TOKENS.c.revoked_us.is_(None), TOKENS.c.expires_us > now_us)
        begun = select(SESSIONS.c.hash).where(SESSIONS.c.expires_us > now_us)
        with read_transaction(self.engine) as connection:
            return frozenset(bytes(row.hash) for query in (active, begun) for row in connection.execute(query))

    def list(self) -> list[Token]:
        """All that ever were, the newest first; revoked ones stay, as versions are signed with their names."""
        with read_transaction(self.engine) as connection:
            rows = connection.execute(select(TOKENS).order_by(TOKENS.c.made_us.desc(), TOKENS.c.id)).all()
        return [_token(row) for row in rows]

    def revoke(self, id: str, *, by: str) -> Token:
        """End a token at once, with all sessions that began with it. NotFound, if there is none of this id."""
        if not _ID.fullmatch(id):
            raise NotFound("there is no such token")
        with write_transaction(self.engine) as connection:
            row = connection.execute(select(TOKENS).where(TOKENS.c.id == id)).one_or_none()
            if row is None:
                raise NotFound("there is no such token")
            token = _token(row)
            if token.revoked_us is None:
                token = token._replace(revoked_us=self.clock.now_us(), revoked_by=by)
                values = {"revoked_us": token.revoked_us, "revoked_by": by}
                connection.execute(update(TOKENS).where(TOKENS.c.id == id).values(values))
            for table in (SESSIONS, CODES, ANSWERS):
                connection.execute(delete(table).where(table.c.token_id == id))
        return token

    def code(self, token: Token) -> str:
        """A code for a link that signs in once with this token, within ten minutes."""
        code = secrets.token_urlsafe(32)
        now_us = self.clock.now_us()
        with write_transaction(self.engine) as connection:
            connection.execute(delete(CODES).where(CODES.c.expires_us <= now_us))
            row = {"hash": _hashed(code), "token_id": token.id, "expires_us": now_us + CODE_US}
            connection.execute(insert(CODES).values(row))
        return code

    def redeem(self, code: str) -> Token | None:
        """The token that a code stands for; None if it was used, has expired, or never was."""
        mine = CODES.c.hash == _hashed(code)
        with read_transaction(self.engine) as connection:
            if connection.execute(select(CODES).where(mine)).one_or_none() is None:
                return None  # made-up codes must not take turns with those who write
        with write_transaction(self.engine) as connection:
            row = connection.execute(select(CODES).where(mine)).one_or_none()
            connection.execute(delete(CODES).where(mine))
        if row is None or row.expires_us <= self.clock.now_us():
            return None
        return self.by_id(row.token_id)

    def _make(self, connection: Connection, name: str, role: Role, by: str, days: float) -> Made:
        if role not in ROLES:
            raise InvalidInput(f"there is no such role; roles are {', '.join(ROLES)}")
        if len(name) > LONGEST_NAME or not name.isprintable() or not _NAME.fullmatch(name):
            raise InvalidInput(
                f"a token's name has 1 to {LONGEST_NAME} characters on one line, like 'ada' or 'deploys'"
            )
        if _TOKEN.search(name):
            raise InvalidInput("that name holds a token; give the name of a person or a program")
        if not 0 < days <= MOST_DAYS:
            raise InvalidInput(f"a token holds for up to {MOST_DAYS} days; give --days 90, or a day more often")
        now_us = self.clock.now_us()
        taken = or_(TOKENS.c.revoked_us.is_(None), TOKENS.c.revoked_us > now_us)
        if connection.scalar(select(TOKENS.c.id).where(TOKENS.c.name == name, taken, TOKENS.c.expires_us > now_us)):
            # Changes are signed with it: two of one name could not be told apart in the audit.
            raise InvalidInput("a token of this name holds already; revoke it first, or take another name")
        id = "".join(secrets.choice(_ID_LETTERS) for _ in range(10))
        text = f"hg_{id}_{_secret()}"
        token = Token(id, name, role, now_us, by, now_us + int(days * DAY_US))
        row = {**token._asdict(), "hash": _hashed(text)}
        connection.execute(insert(TOKENS).values(row))
        self.changes += 1
        return Made(token, text)

    def _holds(self, token: Token) -> Token | None:
        now_us = self.clock.now_us()
        if token.state(now_us) != "active":
            return None
        with self._lock:
            last_us = max(self._noted.get(token.id, 0), token.used_us or 0)
            is_due = now_us - last_us >= USED_EVERY_US
            if is_due:
                self._noted[token.id] = now_us
        if is_due:
            with write_transaction(self.engine) as connection:
                connection.execute(update(TOKENS).where(TOKENS.c.id == token.id).values(used_us=now_us))
        return token


def _hashed(text: str) -> bytes:
    """Plain SHA-256: a slow hash protects what people think up. Of 256 random bits nobody can try any share out, and a
    slow hash on each request would be a way to keep the server busy."""
    return sha256(text.encode()).digest()


def _secret() -> str:
    """256 random bits in letters and digits, so that a double click selects all of it."""
    number, text = secrets.randbits(256), ""
    for _ in range(43):
        number, digit = divmod(number, len(_LETTERS))
        text += _LETTERS[digit]
    return text


def _token(row: Any) -> Token:
    return Token(*(getattr(row, name) for name in Token._fields))
