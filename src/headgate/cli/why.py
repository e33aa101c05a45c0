"""Explain why a client was rejected, and what it was charged: an email to the customer, and details.

headgate why acme --at "yesterday 15:00" --log sqlite:///decisions.db
headgate why tenant=acme --at "2026-11-15 14:00" --until 16:00
headgate why 203.0.113.9 --at "10 minutes ago" --utc --json
headgate why - --at today < key.txt
headgate why acme --at "yesterday 15:00" --only mail | mail -s "Rate limit" dev@acme.example
headgate why acme --at "yesterday 15:00" --admin http://127.0.0.1:8001
headgate why acme --at "yesterday 15:00" --ledger sqlite:///quota.db

exit code: 0 done, 1 invalid policy, 2 invalid call or no answer
"""

from __future__ import annotations

import os
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path
from textwrap import wrap
from typing import TYPE_CHECKING
from zoneinfo import ZoneInfo

from headgate.cli.check import check_file, print_problems
from headgate.cli.context import CommandContext, read_client, resolve_client
from headgate.cli.options import CLIENT, SECRET_FILE, SERVER, option, read_secret
from headgate.cli.terminal import BOLD, Terminal, printable
from headgate.errors import InvalidInput
from headgate.telemetry.decision_log.sinks import open_reader
from headgate.telemetry.human_time import span
from headgate.telemetry.pseudonyms import Pseudonymizer
from headgate.telemetry.why.render import DETAILS_TITLE, details, mail, plain
from headgate.telemetry.why.report import ClientQuery, why

if TYPE_CHECKING:
    from collections.abc import Iterator
    from datetime import tzinfo

    from headgate.policy.model import Policy
    from headgate.quotas.charges import ChargeReport
    from headgate.telemetry.human_time import Span

__all__ = ["OPTIONS", "run"]

OPTIONS = (
    CLIENT,
    option("--at", metavar="TIME", default="today", help='"yesterday 15:00", "3pm", "10 minutes ago"; default: today'),
    option("--until", metavar="TIME", help="end of the period that starts at --at"),
    option(
        "--log",
        metavar="URL",
        help="the decision log: sqlite:///decisions.db, clickhouse://host/database; default: that of the admin server, "
        "if there is a token or a URL of one",
    ),
    option(
        "--ledger",
        metavar="URL",
        help="the ledger of quotas, to list charged requests; default: the variable HEADGATE_LEDGER, or none",
    ),
    option("--only", choices=("mail", "details"), help="print only the email, or only the details"),
    option("--policy", metavar="FILE", help="the current policy, to resolve hashes in the log"),
    *SERVER,
    SECRET_FILE,
)
DEFAULT_LOG = "sqlite:///decisions.db"


def run(context: CommandContext) -> int:
    given = context.arguments
    variables = os.environ.get("HEADGATE_ADMIN") or os.environ.get("HEADGATE_TOKEN")
    if given.log is None and (given.admin or given.token_file or variables):
        return _run_on_server(context)
    policy: Policy | None = None
    if given.policy is not None:
        report = check_file(given.policy)
        if report.policy is None:
            print_problems(report, context.err)
            return report.code()
        policy = report.policy
    when = span(given.at, given.until, now=datetime.now(UTC), zone=context.zone)
    secret = read_secret(given.secret_file)
    clients = None if secret is None else Pseudonymizer(secret)
    client, ledger = read_client(given.client), given.ledger or os.environ.get("HEADGATE_LEDGER")
    has_log = given.log is not None or not ledger or Path(DEFAULT_LOG.removeprefix("sqlite:///")).exists()
    query = ClientQuery.read(client, clients, policy) if has_log or clients is not None else None
    charges = _charges(ledger, client, query, when) if ledger else []
    if query is None or not has_log:
        paragraphs = _paragraphs(charges, context.zone) or [f"No account of this client in {printable(ledger or '')}."]
        return context.show({"charges": [report.as_dict() for report in charges]}, _wrap(paragraphs, context.out))
    with closing(open_reader(given.log or DEFAULT_LOG)) as reader:
        try:
            answer = why(reader, query, when, policy=policy)
        except Exception as error:  # of SQLite, or of the ClickHouse client
            raise InvalidInput(f"the decision log cannot be read: {error}") from error
    if given.json:
        return context.show(plain(answer) | {"charges": [report.as_dict() for report in charges]})
    about = [*details(answer, zone=context.zone), *_paragraphs(charges, context.zone)]
    _print(context, mail(answer, zone=context.zone), about)
    if clients is None and not (answer.rejected or answer.passed):
        context.err.print(_NO_SECRET)
    return 0


_NO_SECRET = (
    "Without a secret, only labels and hashes are found: give --secret-file, or set HEADGATE_SECRET, to search for a "
    "tenant, user, address or API key."
)


def _charges(url: str, client: str, query: ClientQuery | None, when: Span) -> list[ChargeReport]:
    """Reports on the accounts of a client in the ledger."""
    from headgate.quotas import Ledger
    from headgate.quotas.charges import explain_charges

    kind, sign, value = client.partition("=")
    names = {client, value} if sign and kind.isidentifier() else {client}
    if query is not None:
        names.update(query.keys)
    with closing(Ledger(url, create=False)) as ledger:
        return explain_charges(ledger, names - {""}, when.since_us, when.until_us)


def _paragraphs(charges: list[ChargeReport], zone: tzinfo | None) -> list[str]:
    return [paragraph for report in charges for paragraph in report.paragraphs(zone)]


def _print(context: CommandContext, email: list[str], details: list[str]) -> None:
    only, out = context.arguments.only, context.out
    if only != "details":
        out.print(*_wrap(email, out))
    if only is None and details:
        out.print("", out.paint(f"---- {DETAILS_TITLE} ----", BOLD), "")
    if only != "mail":
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


def _run_on_server(context: CommandContext) -> int:
    given = context.arguments
    if given.policy is not None:
        raise InvalidInput("--policy needs --log: an admin server uses its own policy")
    zone = "UTC" if given.utc else local_zone()
    if zone is None:
        context.err.print("note: the local time zone is unknown, so times are UTC")
    who = resolve_client(context, given.client)
    found = context.api.get("client/why", **who.fields, at=given.at, until=given.until, zone=zone or "UTC")
    if given.json:
        return context.show(found["answer"])
    _print(context, found["mail"], found["details"])
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
