"""Access tokens of the admin server, each with a role and an expiry. Only their hashes are stored."""

from __future__ import annotations

import re
import secrets
import string
import threading
import weakref
from hashlib import sha256
from hmac import compare_digest
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from sqlalchemy import delete, func, insert, or_, select, update

from headgate._fork import reinit_after_fork
from headgate.clock import DAY_US, SystemClock
from headgate.control.admin.tables import ANSWERS, CODES, SESSIONS, TOKENS
from headgate.control.config.engine import open_engine, read_transaction, write_transaction
from headgate.control.config.migrations import migrate
from headgate.control.service.errors import NotFound
from headgate.control.service.models import ROLES, TOKEN_ROLES, Actor
from headgate.errors import InvalidInput

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from sqlalchemy import Connection, Engine

    from headgate.clock import Clock
    from headgate.control.service.models import Role

__all__ = ["DEFAULT_DAYS", "FIRST_DAYS", "MAX_DAYS", "MAX_NAME_LENGTH", "NewToken", "Token", "Tokens", "digest"]

DEFAULT_DAYS: Final = 90
FIRST_DAYS: Final = 7
"""The lifetime of the token of the first run, with which others are created."""
MAX_DAYS: Final = 3650
MAX_NAME_LENGTH: Final = 100
CODE_LIFETIME_US: Final = 600_000_000

USE_INTERVAL_US: Final = 60_000_000
"""The last use is recorded at most once a minute, so that most reads cause no write."""

_TOKEN: Final = re.compile(r"hg_([0-9a-z]{10})_([A-Za-z0-9]{43})")
_ID: Final = re.compile(r"[0-9a-z]{1,20}")
_ID_LETTERS: Final = "0123456789abcdefghjkmnpqrstvwxyz"
_LETTERS: Final = string.digits + string.ascii_letters
_NAME: Final = re.compile(r"[^\s\x00-\x1f\x7f](?:[^\x00-\x1f\x7f]*[^\s\x00-\x1f\x7f])?")


class Token(NamedTuple):
    """A token without its secret."""

    id: str
    name: str
    role: Role
    made_us: int
    made_by: str
    expires_us: int
    used_us: int | None = None
    revoked_us: int | None = None
    revoked_by: str | None = None

    @property
    def actor(self) -> Actor:
        """The actor of changes made with the token."""
        return Actor(self.name, self.role)

    def state(self, now_us: int) -> str:
        """ "active", "expired" or "revoked"."""
        if self.revoked_us is not None:
            return "revoked"
        return "active" if now_us < self.expires_us else "expired"


class NewToken(NamedTuple):
    """A new token with its secret."""

    token: Token
    text: str
    """The token itself, which is shown once and not stored."""

    def __repr__(self) -> str:
        return f"NewToken({self.token!r}, text=...)"  # must not be logged


class Tokens:
    """Creates, checks and revokes the tokens of a config store. Thread-safe, also with several servers."""

    def __init__(self, url: str, *, clock: Clock | None = None) -> None:
        """`url` is the URL of the config store."""
        self.engine: Engine = open_engine(url, keep=2)
        weakref.finalize(self, self.engine.dispose)
        self.clock = clock or SystemClock()
        self.check_name: Callable[[str], None] = lambda name: None
        """Raises InvalidInput for a name that must not be stored, such as an API key."""
        self.changes = 0
        """Counts the tokens and sessions that were created in this process."""
        self._lock = threading.Lock()
        self._last_used: dict[str, int] = {}
        with write_transaction(self.engine) as connection:
            migrate(connection)
        reinit_after_fork(self)

    def close(self) -> None:
        """Close the pooled connections; the next query opens a new one."""
        self.engine.dispose()

    def reset_after_fork(self) -> None:
        """Leave the connections to the parent process."""
        self.engine.dispose(close=False)
        self._lock = threading.Lock()

    def make(self, name: str, role: Role, *, by: str, days: float = DEFAULT_DAYS) -> NewToken:
        """Create a token for a person or a program. `by` is the name of the creator."""
        self.check_name(name)
        with write_transaction(self.engine) as connection:
            return self._make(connection, name, role, by, days)

    def first(self) -> NewToken | None:
        """Create an admin token for seven days if there never was a token for this server, in only one of several."""
        with write_transaction(self.engine) as connection:
            if connection.scalar(select(func.count()).select_from(TOKENS).where(TOKENS.c.role.in_(ROLES))):
                return None
            return self._make(connection, "first-run", "admin", "first run", FIRST_DAYS)

    def check(self, text: str, *, roles: Collection[Role] = ROLES) -> Token | None:
        """The token with this secret; None if it is unknown, expired or revoked, or has none of these roles."""
        match = _TOKEN.fullmatch(text)
        if match is None:
            return None
        row = self._find(match[1])
        # Compare also without a row, so that the timing does not reveal which ids exist.
        is_equal = compare_digest(digest(text), bytes(32) if row is None else bytes(row.hash))
        return self._if_active(row, roles) if is_equal else None

    def by_id(self, id: str) -> Token | None:
        """The token with this id; None if it is unknown, expired or revoked, or has no role on the admin server."""
        return self._if_active(self._find(id), ROLES)

    def digests(self) -> frozenset[bytes]:
        """The SHA-256 digests of all valid tokens and session cookies of the admin server."""
        now_us = self.clock.now_us()
        is_active = TOKENS.c.revoked_us.is_(None) & (TOKENS.c.expires_us > now_us)
        active = select(TOKENS.c.hash).where(is_active, TOKENS.c.role.in_(ROLES))
        begun = select(SESSIONS.c.hash).where(SESSIONS.c.expires_us > now_us)
        with read_transaction(self.engine) as connection:
            return frozenset(map(bytes, connection.scalars(active.union(begun))))

    def list(self) -> list[Token]:
        """All tokens, newest first, including revoked ones, whose names are in the audit log."""
        with read_transaction(self.engine) as connection:
            rows = connection.execute(select(TOKENS).order_by(TOKENS.c.made_us.desc(), TOKENS.c.id)).all()
        return [_token(row) for row in rows]

    def revoke(self, id: str, *, by: str) -> Token:
        """Revoke a token, and end its sessions. NotFound if there is none with this id."""
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

    def create_code(self, token: Token) -> str:
        """Create a code for a link that signs in once with this token, within ten minutes."""
        code = secrets.token_urlsafe(32)
        now_us = self.clock.now_us()
        with write_transaction(self.engine) as connection:
            connection.execute(delete(CODES).where(CODES.c.expires_us <= now_us))
            row = {"hash": digest(code), "token_id": token.id, "expires_us": now_us + CODE_LIFETIME_US}
            connection.execute(insert(CODES).values(row))
        return code

    def redeem(self, code: str) -> Token | None:
        """The token of a code; None if the code is unknown, used or expired."""
        mine = CODES.c.hash == digest(code)
        with read_transaction(self.engine) as connection:
            if connection.execute(select(CODES).where(mine)).one_or_none() is None:
                return None  # without a write transaction, so that invalid codes cannot block writers
        with write_transaction(self.engine) as connection:
            row = connection.execute(select(CODES).where(mine)).one_or_none()
            connection.execute(delete(CODES).where(mine))
        if row is None or row.expires_us <= self.clock.now_us():
            return None
        return self.by_id(row.token_id)

    def _make(self, connection: Connection, name: str, role: Role, by: str, days: float) -> NewToken:
        if role not in TOKEN_ROLES:
            raise InvalidInput(f"there is no such role; the roles are {', '.join(TOKEN_ROLES)}")
        if len(name) > MAX_NAME_LENGTH or not name.isprintable() or not _NAME.fullmatch(name):
            raise InvalidInput(
                f"a token's name has 1 to {MAX_NAME_LENGTH} characters on one line, like 'ada' or 'deploys'"
            )
        if _TOKEN.search(name):
            raise InvalidInput("the name contains a token; give the name of a person or a program")
        if not 0 < days <= MAX_DAYS:
            raise InvalidInput(f"a token is valid for up to {MAX_DAYS} days; give --days 90, for example")
        now_us = self.clock.now_us()
        is_valid = or_(TOKENS.c.revoked_us.is_(None), TOKENS.c.revoked_us > now_us) & (TOKENS.c.expires_us > now_us)
        if connection.scalar(select(TOKENS.c.id).where(TOKENS.c.name == name, is_valid)):
            # The audit log identifies actors by this name.
            raise InvalidInput("an active token has this name; revoke it first, or choose another name")
        id = "".join(secrets.choice(_ID_LETTERS) for _ in range(10))
        # 256 random bits as letters and digits, which a double click selects.
        text = f"hg_{id}_{''.join(secrets.choice(_LETTERS) for _ in range(43))}"
        token = Token(id, name, role, now_us, by, now_us + int(days * DAY_US))
        connection.execute(insert(TOKENS).values({**token._asdict(), "hash": digest(text)}))
        self.changes += 1
        return NewToken(token, text)

    def _find(self, id: str) -> Any:
        with read_transaction(self.engine) as connection:
            return connection.execute(select(TOKENS).where(TOKENS.c.id == id)).one_or_none()

    def _if_active(self, row: Any, roles: Collection[Role]) -> Token | None:
        now_us = self.clock.now_us()
        if row is None or row.role not in roles or (token := _token(row)).state(now_us) != "active":
            return None
        with self._lock:
            last_us = max(self._last_used.get(token.id, 0), token.used_us or 0)
            is_due = now_us - last_us >= USE_INTERVAL_US
            if is_due:
                self._last_used[token.id] = now_us
        if is_due:
            with write_transaction(self.engine) as connection:
                connection.execute(update(TOKENS).where(TOKENS.c.id == token.id).values(used_us=now_us))
        return token


def digest(text: str) -> bytes:
    """The stored hash of a token, code or cookie.

    Plain SHA-256: 256 random bits cannot be guessed, and a slow hash would allow denial-of-service attacks."""
    return sha256(text.encode()).digest()


def _token(row: Any) -> Token:
    return Token(*(getattr(row, name) for name in Token._fields))
