"""`headgate why`: explains rejections in a mail for the customer, with details for colleagues."""

from __future__ import annotations

import json
import os
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path
from textwrap import wrap
from typing import TYPE_CHECKING
from zoneinfo import ZoneInfo

from headgate.cli.check import examine, tell
from headgate.cli.context import as_json, client_of, opened, read_key
from headgate.cli.options import add_server
from headgate.cli.request import given_secret
from headgate.cli.terminal import BOLD, printable
from headgate.errors import InvalidInput
from headgate.telemetry.decision_log.sinks import open_reader
from headgate.telemetry.human_time import span
from headgate.telemetry.pseudonyms import Pseudonymizer
from headgate.telemetry.why.render import DETAILS_TITLE, details, mail, plain
from headgate.telemetry.why.report import ClientQuery, why

if TYPE_CHECKING:
    from argparse import ArgumentParser, Namespace
    from collections.abc import Iterator

    from headgate.cli.terminal import Terminal
    from headgate.policy.model import Policy

__all__ = ["ABOUT", "EXAMPLES", "add_arguments", "run"]

ABOUT = "explain why a client was rejected: a mail for the customer, and details"
EXAMPLES = """
    headgate why acme --at "yesterday 15:00" --log sqlite:///decisions.db
    headgate why tenant=acme --at "2026-11-15 14:00" --until 16:00
    headgate why 203.0.113.9 --at "10 minutes ago" --utc --json
    headgate why - --at today < key.txt
    headgate why acme --at "yesterday 15:00" --only mail | mail -s "Rate limit" dev@acme.example
    headgate why acme --at "yesterday 15:00" --admin http://127.0.0.1:8001

    exit code: 0 here is the answer, 1 mistakes in the policy,
    2 a question that cannot be asked
"""


DEFAULT_LOG = "sqlite:///decisions.db"


def add_arguments(parser: ArgumentParser) -> None:
    """All but --secret-file."""
    parser.add_argument(
        "client", metavar="CLIENT", help="its label, tenant, user, address or hmac: hash, or KIND=VALUE; - reads a key"
    )
    parser.add_argument(
        "--at", metavar="TIME", default="today", help='"yesterday 15:00", "3pm", "10 minutes ago"; today, if not given'
    )
    parser.add_argument("--until", metavar="TIME", help="the end of a longer time, which begins at --at")
    parser.add_argument(
        "--log",
        metavar="URL",
        help="sqlite:///decisions.db, clickhouse://host/database; without it an admin server is asked, if there is a "
        "token for one or its URL is given",
    )
    parser.add_argument(
        "--only", choices=("mail", "details"), help="print only the mail, or only the details for colleagues"
    )
    parser.add_argument("--policy", metavar="FILE", help="today's policy: with it, the log's hashes get their names")
    add_server(parser)


def run(arguments: Namespace, out: Terminal, err: Terminal) -> int:
    """Answer the question; the exit code tells whether it could be asked."""
    if arguments.log is None and _knows_server(arguments):
        return _ask_server(arguments, out, err)
    policy: Policy | None = None
    if arguments.policy is not None:
        report = examine(arguments.policy)
        if report.policy is None:
            tell(report, err)
            return report.code()
        policy = report.policy
    zone = UTC if arguments.utc else None
    when = span(arguments.at, arguments.until, now=datetime.now(UTC), zone=zone)
    secret = given_secret(arguments.secret_file)
    clients = None if secret is None else Pseudonymizer(secret)
    client = f"api_key={read_key()}" if arguments.client == "-" else arguments.client
    asked = ClientQuery.read(client, clients, policy)
    with closing(open_reader(arguments.log or DEFAULT_LOG)) as reader:
        try:
            answer = why(reader, asked, when, policy=policy)
        except Exception as error:  # of SQLite, or of ClickHouse's client
            raise InvalidInput(f"the decision log cannot be read: {error}") from error
    if arguments.json:
        out.say(json.dumps(plain(answer), indent=2))
        return 0
    _print(arguments, mail(answer, zone=zone), details(answer, zone=zone), out)
    if clients is None and not (answer.rejected or answer.passed):
        err.say(_NO_SECRET)
    return 0


_NO_SECRET = (
    "Without a secret only labels and hashes can be looked for: give --secret-file, or set HEADGATE_SECRET, "
    "to look for a tenant, user, address or API key."
)


def _print(arguments: Namespace, to_customer: list[str], for_colleagues: list[str], out: Terminal) -> None:
    """Print both parts, the mail first, or only one."""
    if arguments.only != "details":
        out.say(*_wrapped(to_customer, out))
    if arguments.only is None and for_colleagues:
        out.say("", out.paint(f"---- {DETAILS_TITLE} ----", BOLD), "")
    if arguments.only != "mail":
        out.say(*_wrapped(for_colleagues, out))


def _wrapped(paragraphs: list[str], out: Terminal) -> Iterator[str]:
    """Paragraphs with blank lines between them; lines that are to be pasted stay whole."""
    for index, paragraph in enumerate(paragraphs):
        if index:
            yield ""
        for line in paragraph.split("\n"):
            text = printable(line)
            is_whole = line.startswith("  ") or out.width is None
            yield from [text] if is_whole else wrap(text, out.width or 80, break_on_hyphens=False)


# ------------------------------------------------------------------ through an admin server


def _knows_server(arguments: Namespace) -> bool:
    """Whether somebody has said anything of an admin server: who has a token means to ask one."""
    given = arguments.admin or arguments.token_file
    return bool(given or os.environ.get("HEADGATE_ADMIN") or os.environ.get("HEADGATE_TOKEN"))


def _ask_server(arguments: Namespace, out: Terminal, err: Terminal) -> int:
    if arguments.policy is not None:
        raise InvalidInput("an admin server knows the policy: leave out --policy, or give --log")
    desk = opened(arguments, out, err)
    zone = "UTC" if arguments.utc else local_zone()
    if zone is None:
        err.say("note: the name of this machine's zone is not known, so that times are UTC")
    who = client_of(desk, arguments.client)
    asked = {"at": arguments.at, "until": arguments.until, "zone": zone or "UTC"}
    found = desk.api.get("client/why", **who.plain, **asked)
    if arguments.json:
        return as_json(desk, found["answer"])
    _print(arguments, found["mail"], found["details"], out)
    return 0


def local_zone() -> str | None:
    """The name of this machine's zone, for a server that may stand in another; None, if it has none that is known."""
    named = os.environ.get("TZ", "").removeprefix(":")
    if not named:
        link = os.path.realpath("/etc/localtime")
        named = link.partition("/zoneinfo/")[2] or _read("/etc/timezone") or "UTC"
    try:
        ZoneInfo(named)
    except (KeyError, OSError, ValueError):
        return None
    return named


def _read(file: str) -> str:
    try:
        return Path(file).read_text("ascii").strip()
    except (OSError, ValueError):
        return ""
