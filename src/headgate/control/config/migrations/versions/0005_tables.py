"""Create all tables: this is the schema of the first release."""

from __future__ import annotations

from functools import partial
from typing import Any

import sqlalchemy as sa
from alembic import op

__all__ = ["branch_labels", "depends_on", "down_revision", "revision", "upgrade"]

revision = "0005"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    _create_versioned_tables()
    _create_admin_tables()
    _create_anomaly_tables()


def _create_versioned_tables() -> None:
    author, reason, client = _text("author", 200), _text("reason", 500), (_text("kind", 50), _text("value", 500))
    bucket = _number("quota"), _number("period_us"), _number("burst", null=True), _text("algorithm", 50, null=True)
    validity = _number("valid_from_us", null=True), _number("valid_until_us", null=True)
    optional_attribution = _text("reason", 500, null=True), _text("author", 200, null=True)
    place = _text("limit_name", 100, null=True), _text("route_class", 100, null=True)
    row_number = _key("number", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), autoincrement=True)
    version = _key("version", sa.BigInteger)
    _table("versions", version, _number("at_us"), author, reason, _text("what"), _number("restores", null=True))
    _table("audit", row_number, _number("at_us"), author, _text("action", 100), _text("about", 600), reason)
    _index("versions", "at", ["at_us", "version"])
    _index("audit", "at", ["at_us", "number"])
    for section, key, columns in (
        ("documents", (), (_text("text"), _text("format", 10), _text("name", 500))),
        ("tiers", ("tier", "limit_name"), (_text("tier", 100), _text("limit_name", 100), *bucket)),
        ("routes", ("path",), (_text("path", 1100), _number("cost"), place[1])),
        ("clients", ("kind", "value"), (*client, _text("tier", 100, null=True), _text("label", 500, null=True))),
        ("overrides", ("kind", "value"), (*client, *place, *bucket, *validity, *optional_attribution)),
        ("blocked", ("kind", "value"), (*client, *validity, *optional_attribution)),
    ):
        _table(section, row_number, _number("id"), _number("since"), _number("until_version", null=True), *columns)
        _index(section, "id", ["id"], where="until_version IS NULL", unique=True)
        _index(section, "since", ["since"])
        # Without current rows: SQLite would use it for every query on those, and sort all of them for one page.
        _index(section, "until", ["until_version"], where="until_version IS NOT NULL")
        if key:
            _index(section, "key", list(key), where="until_version IS NULL", unique=section != "overrides")
    # Pages of clients by label. It must equal the ORDER BY expression of the queries to be used, and is on the label
    # alone: with the value, the longest rows would exceed the size limit of PostgreSQL indexes.
    is_sqlite = op.get_context().dialect.name == "sqlite"
    label = sa.text("lower(label)" if is_sqlite else 'lower(label COLLATE "C") COLLATE "C"')
    _index("clients", "label", [label], where="until_version IS NULL AND label IS NOT NULL")


def _create_admin_tables() -> None:
    hashed, made, expires = _key("hash", sa.LargeBinary(32)), _number("made_us"), _number("expires_us")
    _table(
        "tokens",
        _key("id", sa.String(20)),
        partial(sa.Column, "hash", sa.LargeBinary(32), nullable=False),
        *(_text("name", 100), _text("role", 20), made, _text("made_by", 200), expires),
        *(_number("used_us", null=True), _number("revoked_us", null=True), _text("revoked_by", 200, null=True)),
    )
    indexed = partial(_text("token_id", 20), index=True), partial(expires, index=True)
    _table("sessions", hashed, indexed[0], _text("csrf", 64), made, indexed[1])
    _table("codes", hashed, _text("token_id", 20), expires)
    _table(
        "answers",
        *(_key("token_id", sa.String(20)), _key("key", sa.String(255))),
        partial(sa.Column, "fingerprint", sa.LargeBinary(32), nullable=False),
        partial(_number("at_us"), index=True),
        partial(sa.Column, "status", sa.Integer, nullable=True),
        *(_number("etag", null=True), _text("body", null=True)),
    )


def _create_anomaly_tables() -> None:
    day, client = _key("day", sa.BigInteger), (_key("kind", sa.String(50)), _key("key", sa.String(100)))
    _table("minutes", day, *client, _number("missing"), _text("counts"))
    _index("minutes", "client", ["kind", "key"])
    _table("watch", day, _number("minutes"), _number("last_minute"))
    _table(
        "steps",
        *(_key("id", sa.String(40)), _number("minute")),
        *(_text("kind", 50), _text("key", 100), _text("label", 200)),
        *map(_number, ("requests", "requests_before", "usual")),
        _text("verdict", 20),
        *map(_number, ("agents", "addresses", "paths", "looked_at", "last_over", "attempts")),
        *(_number("next_us", null=True), _number("delivered_us", null=True), _text("error", 500, null=True)),
    )
    _index("steps", "client", ["kind", "key", "minute"], unique=True)
    _index("steps", "minute", ["minute"])
    _index("steps", "next", ["next_us"])


def _table(name: str, *columns: partial[sa.Column[Any]]) -> None:
    op.create_table(f"headgate_{name}", *[make_column() for make_column in columns])


def _number(name: str, *, null: bool = False) -> partial[sa.Column[Any]]:
    return partial(sa.Column, name, sa.BigInteger, nullable=null)


def _text(name: str, length: int | None = None, *, null: bool = False) -> partial[sa.Column[Any]]:
    return partial(sa.Column, name, sa.Text() if length is None else sa.String(length), nullable=null)


def _key(name: str, kind: Any, *, autoincrement: bool = False) -> partial[sa.Column[Any]]:
    return partial(sa.Column, name, kind, primary_key=True, autoincrement=autoincrement)


def _index(table: str, name: str, columns: list[Any], *, where: str | None = None, unique: bool = False) -> None:
    only: dict[str, Any] = {} if where is None else dict.fromkeys(("sqlite_where", "postgresql_where"), sa.text(where))
    op.create_index(f"headgate_{table}_{name}", f"headgate_{table}", columns, unique=unique, **only)
