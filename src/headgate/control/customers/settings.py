"""The file of customers: who is notified of an anomaly, and how. See docs/growth.md."""

from __future__ import annotations

import os
import re
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple
from urllib.parse import urlsplit

from headgate._limit_syntax import suggest
from headgate.control.service.models import ClientRef
from headgate.errors import InvalidConfiguration

__all__ = ["Customer", "CustomerSettings", "SmtpSettings", "read_customers"]

KINDS: Final = ("tenant", "user", "api_key", "ip")
SECURITIES: Final = ("starttls", "tls", "none")
_VARIABLE: Final = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)\}")
_ADDRESS: Final = re.compile(r"[^\s@<>,;:\"]{1,64}@[^\s@<>,;:\"]{1,255}")
_FIELDS: Final[dict[str, dict[str, Any]]] = {
    "": {"link": str, "smtp": dict, "customers": list},
    "smtp": {"host": str, "port": int, "security": str, "user": str, "password": str, "sender": str},
    "customers": {
        **dict.fromkeys(KINDS, str),
        "name": str,
        "email": list,
        "slack": str,
        "webhook": str,
        "webhook_secret": str,
    },
}


class SmtpSettings(NamedTuple):
    host: str
    sender: str
    port: int = 587
    security: Literal["starttls", "tls", "none"] = "starttls"
    user: str = ""
    password: str = ""


class Customer(NamedTuple):
    """A client whose owner can be reached."""

    client: ClientRef
    name: str
    email: tuple[str, ...] = ()
    slack: str = ""
    """The URL of a webhook that takes Slack's messages."""
    webhook: str = ""
    webhook_secret: str = ""


@dataclass(frozen=True, slots=True)
class CustomerSettings:
    link: str = ""
    """The URL under which customers reach the admin server; without it, messages have no link."""
    smtp: SmtpSettings | None = None
    customers: tuple[Customer, ...] = ()


def read_customers(file: str | os.PathLike[str]) -> CustomerSettings:
    """Read a TOML file; ${NAME} stands for an environment variable. Raises InvalidConfiguration."""
    try:
        document = tomllib.loads(Path(file).read_text("utf-8"))
    except OSError as error:
        raise InvalidConfiguration(f"cannot read {file}: {error.strerror or error}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InvalidConfiguration(f"{file} is not TOML: {error}") from None
    return _settings(_Section(document, "", f"{file}"))


class _Section:
    """A table of the file, with checked access to its fields."""

    def __init__(self, fields: Any, schema: str, where: str) -> None:
        self.where = where
        if not isinstance(fields, dict):
            raise InvalidConfiguration(f"{where}: expected a table with fields like {', '.join(_FIELDS[schema])}")
        for name, value in fields.items():
            expected = _FIELDS[schema].get(name)
            if expected is None:
                raise InvalidConfiguration(f"{where}: unknown field {name!r}; {suggest(name, list(_FIELDS[schema]))}")
            if type(value) is not expected and not (expected is list and type(value) is str):
                raise InvalidConfiguration(f"{where}: {name} must be {_WORDS[expected]}")
        self._fields = fields

    def __contains__(self, name: str) -> bool:
        return name in self._fields

    def get(self, name: str, default: Any = "") -> Any:
        value = self._fields.get(name, default)
        return self._expand(name, value) if isinstance(value, str) else value

    def url(self, name: str) -> str:
        value = str(self.get(name))
        parts = urlsplit(value)
        if value and not (parts.scheme in ("http", "https") and parts.hostname and value.isprintable()):
            # Not shown: the URLs of Slack are secrets.
            raise InvalidConfiguration(f"{self.where}: {name} must be a URL that starts with https:// or http://")
        return value

    def _expand(self, name: str, value: str) -> str:
        def look_up(found: re.Match[str]) -> str:
            if (text := os.environ.get(found[1])) is None:
                raise InvalidConfiguration(f"{self.where}: {name} needs the environment variable {found[1]}")
            return text

        return _VARIABLE.sub(look_up, value)


_WORDS: Final[dict[Any, str]] = {str: "a text", int: "a whole number", dict: "a table", list: "a list"}


def _settings(section: _Section) -> CustomerSettings:
    smtp = _smtp(_Section(section.get("smtp"), "smtp", f"{section.where}: smtp")) if "smtp" in section else None
    tables = section.get("customers", [])
    customers = [
        _customer(_Section(each, "customers", f"{section.where}: customer {number}"), smtp)
        for number, each in enumerate(tables, 1)
    ]
    twins = {each.client for each in customers if [other.client for other in customers].count(each.client) > 1}
    if twins:
        raise InvalidConfiguration(f"{section.where}: {min(twins)} occurs twice; keep one")
    return CustomerSettings(section.url("link").rstrip("/"), smtp, tuple(customers))


def _smtp(section: _Section) -> SmtpSettings:
    for name in ("host", "sender"):
        if not section.get(name):
            raise InvalidConfiguration(f"{section.where}: {name} is missing")
    sender, security = section.get("sender"), section.get("security", "starttls")
    if not _ADDRESS.fullmatch(sender):
        raise InvalidConfiguration(f"{section.where}: sender {sender!r} is not an email address")
    if security not in SECURITIES:
        raise InvalidConfiguration(
            f"{section.where}: unknown security {security!r}; {suggest(security, [*SECURITIES])}"
        )
    port = section.get("port", 465 if security == "tls" else 587)
    return SmtpSettings(section.get("host"), sender, port, security, section.get("user"), section.get("password"))


def _customer(section: _Section, smtp: SmtpSettings | None) -> Customer:
    kinds = [kind for kind in KINDS if kind in section]
    if len(kinds) != 1:
        raise InvalidConfiguration(f"{section.where}: name the client by exactly one of {', '.join(KINDS)}")
    value = section.get(kinds[0])
    if kinds[0] == "api_key" and not value.startswith("hmac:"):
        raise InvalidConfiguration(f"{section.where}: give the keyed hash of the API key, hmac:..., not the key")
    given = section.get("email", [])
    email = (given,) if isinstance(given, str) else tuple(given)
    for address in email:
        if not isinstance(address, str) or not _ADDRESS.fullmatch(address):
            raise InvalidConfiguration(f"{section.where}: email {address!r} is not an email address")
    if email and smtp is None:
        raise InvalidConfiguration(f"{section.where}: email needs a table [smtp] with host and sender")
    if "webhook" in section and not section.get("webhook_secret"):
        raise InvalidConfiguration(f"{section.where}: webhook needs webhook_secret, which signs the requests")
    more = section.url("slack"), section.url("webhook"), section.get("webhook_secret")
    return Customer(ClientRef(kinds[0], value), section.get("name") or value, email, *more)
