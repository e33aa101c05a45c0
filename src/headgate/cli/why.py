"""`headgate why`: explains rejections, as an email to the customer and details for colleagues."""

from __future__ import annotations

import json
import os
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path
from textwrap import wrap
from typing import TYPE_CHECKING
from zoneinfo import ZoneInfo

from headgate.cli.check import check_file, print_problems
from headgate.cli.context import open_context, print_json, resolve_client
from headgate.cli.options import CLIENT, add_secret_option, add_server_options
from headgate.cli.request import read_api_key, read_secret
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

ABOUT = "explain why a client was rejected: an email to the customer, and details"
EXAMPLES = """
    headgate why acme --at "yesterday 15:00" --log sqlite:///decisions.db
    headgate why tenant=acme --at "2026-11-15 14:00" --until 16:00
    headgate why 203.0.113.9 --at "10 minutes ago" --utc --json
    headgate why - --at today < key.txt
    headgate why acme --at "yesterday 15:00" --only mail | mail -s "Rate limit" dev@acme.example
    headgate why acme --at "yesterday 15:00" --admin http://127.0.0.1:8001

    exit code: 0 done, 1 invalid policy, 2 invalid call or no answer
"""

DEFAULT_LOG = "sqlite:///decisions.db"


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("client", metavar="CLIENT", help=CLIENT)
    parser.add_argument(
        "--at", metavar="TIME", default="today", help='"yesterday 15:00", "3pm", "10 minutes ago"; default: today'
    )
    parser.add_argument("--until", metavar="TIME", help="end of the period that starts at --at")
    parser.add_argument(
        "--log",
        metavar="URL",
        help="the decision log: sqlite:///decisions.db, clickhouse://host/database; default: that of the admin server, "
        "if there is a token or a URL of one",
    )
    parser.add_argument("--only", choices=("mail", "details"), help="print only the email, or only the details")
    parser.add_argument("--policy", metavar="FILE", help="the current policy, to resolve hashes in the log")
    add_server_options(parser)
    add_secret_option(parser)


def run(arguments: Namespace, out: Terminal, err: Terminal) -> int:
    if arguments.log is None and _has_server(arguments):
        return _run_on_server(arguments, out, err)
    policy: Policy | None = None
    if arguments.policy is not None:
        report = check_file(arguments.policy)
        if report.policy is None:
            print_problems(report, err)
            return report.code()
        policy = report.policy
    zone = UTC if arguments.utc else None
    when = span(arguments.at, arguments.until, now=datetime.now(UTC), zone=zone)
    secret = read_secret(arguments.secret_file)
    clients = None if secret is None else Pseudonymizer(secret)
    client = f"api_key={read_api_key()}" if arguments.client == "-" else arguments.client
    query = ClientQuery.read(client, clients, policy)
    with closing(open_reader(arguments.log or DEFAULT_LOG)) as reader:
        try:
            answer = why(reader, query, when, policy=policy)
        except Exception as error:  # of SQLite, or of the ClickHouse client
            raise InvalidInput(f"the decision log cannot be read: {error}") from error
    if arguments.json:
        out.print(json.dumps(plain(answer), indent=2))
        return 0
    _print(arguments, mail(answer, zone=zone), details(answer, zone=zone), out)
    if clients is None and not (answer.rejected or answer.passed):
        err.print(_NO_SECRET)
    return 0


_NO_SECRET = (
    "Without a secret, only labels and hashes are found: give --secret-file, or set HEADGATE_SECRET, to search for a "
    "tenant, user, address or API key."
)


def _print(arguments: Namespace, email: list[str], details: list[str], out: Terminal) -> None:
    """Print the email and the details, or one of them."""
    if arguments.only != "details":
        out.print(*_wrap(email, out))
    if arguments.only is None and details:
        out.print("", out.paint(f"---- {DETAILS_TITLE} ----", BOLD), "")
    if arguments.only != "mail":
        out.print(*_wrap(details, out))


def _wrap(paragraphs: list[str], out: Terminal) -> Iterator[str]:
    """Wrapped paragraphs, separated by blank lines; indented lines are not wrapped."""
    for index, paragraph in enumerate(paragraphs):
        if index:
            yield ""
        for line in paragraph.split("\n"):
            text = printable(line)
            is_verbatim = line.startswith("  ") or out.width is None
            yield from [text] if is_verbatim else wrap(text, out.width or 80, break_on_hyphens=False)


# ------------------------------------------------------------------ through an admin server


def _has_server(arguments: Namespace) -> bool:
    return bool(
        arguments.admin or arguments.token_file or os.environ.get("HEADGATE_ADMIN") or os.environ.get("HEADGATE_TOKEN")
    )


def _run_on_server(arguments: Namespace, out: Terminal, err: Terminal) -> int:
    if arguments.policy is not None:
        raise InvalidInput("--policy needs --log: an admin server uses its own policy")
    context = open_context(arguments, out, err)
    zone = "UTC" if arguments.utc else local_zone()
    if zone is None:
        err.print("note: the local time zone is unknown, so times are UTC")
    who = resolve_client(context, arguments.client)
    period = {"at": arguments.at, "until": arguments.until, "zone": zone or "UTC"}
    found = context.api.get("client/why", **who.fields, **period)
    if arguments.json:
        return print_json(context, found["answer"])
    _print(arguments, found["mail"], found["details"], out)
    return 0


def local_zone() -> str | None:
    """The IANA name of the local time zone; None if unknown."""
    name = os.environ.get("TZ", "").removeprefix(":")
    if not name:
        link = os.path.realpath("/etc/localtime")
        name = link.partition("/zoneinfo/")[2] or _read("/etc/timezone") or "UTC"
    try:
        ZoneInfo(name)
    except (KeyError, OSError, ValueError):
        return None
    return name


def _read(file: str) -> str:
    try:
        return Path(file).read_text("ascii").strip()
    except (OSError, ValueError):
        return ""
