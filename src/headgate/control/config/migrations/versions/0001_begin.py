"""Create the versioned tables."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

__all__ = ["branch_labels", "depends_on", "down_revision", "revision", "upgrade"]

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None

KEYS = {
    "documents": (),
    "tiers": ("tier", "limit_name"),
    "routes": ("path",),
    "clients": ("kind", "value"),
    "overrides": ("kind", "value"),
    "blocked": ("kind", "value"),
}


def upgrade() -> None:
    op.create_table(
        "headgate_versions",
        sa.Column("version", sa.BigInteger, primary_key=True, autoincrement=False),
        _number("at_us"),
        _text("author", 200),
        _text("reason", 500),
        _text("what"),
        _number("restores", nullable=True),
    )
    _table("documents", [_text("text"), _text("format", 10), _text("name", 500)])
    _table("tiers", [_text("tier", 100), _text("limit_name", 100), *_numbers()])
    _table("routes", [_text("path", 1100), _number("cost"), _text("route_class", 100, nullable=True)])
    _table("clients", [*_who(), _text("tier", 100, nullable=True), _text("label", 500, nullable=True)])
    names = [_text("limit_name", 100, nullable=True), _text("route_class", 100, nullable=True)]
    _table("overrides", [*_who(), *names, *_numbers(), *_while()])
    _table("blocked", [*_who(), *_while()])


def _table(section: str, columns: list[sa.Column[str] | sa.Column[int]]) -> None:
    name = f"headgate_{section}"
    op.create_table(
        name,
        sa.Column("number", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), primary_key=True, autoincrement=True),
        _number("id"),
        _number("since"),
        _number("until_version", nullable=True),
        *columns,
    )
    in_force = sa.text("until_version IS NULL")
    op.create_index(f"{name}_id", name, ["id"], unique=True, sqlite_where=in_force, postgresql_where=in_force)
    op.create_index(f"{name}_since", name, ["since"])
    op.create_index(f"{name}_until", name, ["until_version"])
    if key := KEYS[section]:
        unique = section != "overrides"
        op.create_index(f"{name}_key", name, list(key), unique=unique, sqlite_where=in_force, postgresql_where=in_force)


def _text(name: str, length: int | None = None, *, nullable: bool = False) -> sa.Column[str]:
    return sa.Column(name, sa.Text() if length is None else sa.String(length), nullable=nullable)


def _number(name: str, *, nullable: bool = False) -> sa.Column[int]:
    return sa.Column(name, sa.BigInteger, nullable=nullable)


def _numbers() -> list[sa.Column[str] | sa.Column[int]]:
    return [
        _number("quota"),
        _number("period_us"),
        _number("burst", nullable=True),
        _text("algorithm", 50, nullable=True),
    ]


def _who() -> list[sa.Column[str]]:
    return [_text("kind", 50), _text("value", 500)]


def _while() -> list[sa.Column[str] | sa.Column[int]]:
    return [
        _number("valid_from_us", nullable=True),
        _number("valid_until_us", nullable=True),
        _text("reason", 500, nullable=True),
        _text("author", 200, nullable=True),
    ]
