"""Show, correct, verify and export the accounts of the ledger.

headgate ledger balance ACME --ledger sqlite:///quota.db
headgate ledger statement ACME --period 2026-10
headgate ledger statement ACME --period 2026-10 --format html > acme.html
headgate ledger usage ACME --period 2026-10-31
headgate ledger adjust ACME 50 --reason "ticket 4711"
headgate ledger verify
headgate ledger export --output events.jsonl

exit code: 0 done, 1 refused or problems found, 2 invalid call or no answer
"""

from __future__ import annotations

import getpass
import json
import os
import re
from contextlib import closing, contextmanager
from datetime import UTC, datetime, timedelta, tzinfo
from typing import TYPE_CHECKING, Any, Final, NamedTuple
from zoneinfo import ZoneInfo

from headgate.cli.options import JSON, option
from headgate.cli.terminal import BOLD, GREEN, RED, Terminal, bar, printable, titled_table
from headgate.errors import InvalidInput

if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import Iterator

    from headgate.quotas import Ledger, LedgerEntry
    from headgate.quotas.statement import Statement, StatementLine
    from headgate.quotas.usage_alerts import UsageAlert

__all__ = ["ACTIONS"]

VARIABLE: Final = "HEADGATE_LEDGER"
LEDGER: Final = option("--ledger", metavar="URL", help=f"the ledger's database; default: the variable {VARIABLE}")
ACCOUNT: Final = option("account", metavar="ACCOUNT", help="name of the account")
AMOUNT: Final = option("amount", metavar="AMOUNT", type=int, help="whole units")
ID: Final = option("--id", metavar="ID", help="idempotency key: a repetition with the same ID changes nothing")
REFERENCE: Final = option("--reference", metavar="TEXT", default="", help="reference to a document, for the statement")
TIMEZONE: Final = option(
    "--timezone", metavar="NAME", default="UTC", help="time zone of the period; default: %(default)s"
)

_PERIOD: Final = re.compile(r"(\d{4})(?:-(\d\d))?(?:-(\d\d))?")
_PERIOD_HELP: Final = "a year, month or day: 2026, 2026-10 or 2026-10-31; or two of them: 2026-10-01..2026-10-15"


class _Period(NamedTuple):
    name: str
    since: datetime
    until: datetime
    """Exclusive."""
    zone: tzinfo
    zone_name: str


def _balance(arguments: Namespace, out: Terminal, err: Terminal) -> int:
    """Show the balance of an account and its open grants, in the order in which they are spent.

    headgate ledger balance ACME
    headgate ledger balance ACME --json
    """
    with _open(arguments) as ledger:
        found, alerts = ledger.summary(arguments.account), ledger.usage_alerts(arguments.account)
    if arguments.json:
        lists = {
            "grants": [grant._asdict() for grant in found.grants],
            "alerts": [alert._asdict() for alert in alerts],
        }
        out.print(json.dumps(found._asdict() | lists, indent=2))
        return 0
    held = f", {found.held:,} held for {found.reservations:,} reservations" if found.held else ""
    out.print(f"{printable(found.account)}: {out.paint(f'{found.available:,}', BOLD)} available{held}")
    out.print(
        f"{found.granted:,} granted, {found.adjusted:+,} adjusted, {found.charged:,} charged, {found.expired:,} expired"
    )
    if found.grants:
        rows = [
            [each.id, each.source, f"{each.priority}", _time(each.expires_us), f"{each.remaining}", f"{each.held}"]
            for each in found.grants
        ]
        out.print("", *titled_table(("grant", "source", "priority", "expires (UTC)", "left", "held"), rows, out))
    if alerts:
        rows = [_alert_cells(each) for each in alerts]
        titles = ("allowance used", "reached (UTC)", "units", "of", "period ends (UTC)", "webhook")
        out.print("", *titled_table(titles, rows, out))
    return 0


def _alert_cells(alert: UsageAlert) -> list[str]:
    delivery = "not sent" if alert.error is None else f"failed: {alert.error}"
    if alert.delivered_us is not None:
        delivery = f"accepted {_time(alert.delivered_us)}"
    units = (f"{alert.used}", f"{alert.allowance}")
    return [f"{alert.percent} %", _time(alert.at_us), *units, _time(alert.period_end_us), delivery]


def _thresholds(arguments: Namespace, out: Terminal, err: Terminal) -> int:
    """Show or set the thresholds of usage alerts, in percent of the allowance of a plan.

    headgate ledger thresholds
    headgate ledger thresholds 50 90 100
    """
    with _open(arguments) as ledger:
        if arguments.percent:
            ledger.set_usage_thresholds(arguments.percent)
        found = ledger.usage_thresholds()
    out.print(json.dumps(found) if arguments.json else " ".join([f"{percent} %" for percent in found]))
    return 0


def _statement(arguments: Namespace, out: Terminal, err: Terminal) -> int:
    """Show what an account was granted and charged in a period.

    headgate ledger statement ACME --period 2026-10
    headgate ledger statement ACME --period 2026-10 --timezone Europe/Berlin
    headgate ledger statement ACME --period 2026-10 --format csv > acme.csv
    headgate ledger statement ACME --period 2026-10 --format html > acme.html
    """
    period = _parse_period(arguments.period, arguments.timezone)
    if arguments.lines < 0:
        raise InvalidInput(f"--lines {arguments.lines}: give a number of at least 0")
    with _open(arguments) as ledger:
        account = arguments.account
        found = ledger.statement(account, period.since, period.until, most=arguments.lines, zone=period.zone)
        lines = ledger.statement_lines(account, period.since, period.until)
        _PRINTERS["json" if arguments.json else arguments.format](found, lines, period, out)
    return 0


def _grant(arguments: Namespace, out: Terminal, err: Terminal) -> int:
    """Add to the balance of an account.

    headgate ledger grant ACME 1000 --source "credit pack" --id invoice-4711
    headgate ledger grant ACME 1000 --expires 2027-01-01T00:00:00Z --priority 50
    """
    expires_at = None if arguments.expires is None else _parse_instant(arguments.expires)
    with _open(arguments, create=True) as ledger:
        entry = ledger.grant(
            arguments.account,
            arguments.amount,
            id=arguments.id,
            expires_at=expires_at,
            priority=arguments.priority,
            source=arguments.source,
            reason=arguments.reason,
            reference=arguments.reference,
        )
    return _print_entry(entry, arguments, out)


def _adjust(arguments: Namespace, out: Terminal, err: Terminal) -> int:
    """Correct the balance of an account, up or down. The reason appears on the statement.

    headgate ledger adjust ACME 50 --reason "goodwill, ticket 4711"
    headgate ledger adjust ACME -50 --reason "granted twice" --id correction-12
    """
    with _open(arguments) as ledger:
        entry = ledger.adjust(
            arguments.account,
            arguments.amount,
            reason=arguments.reason,
            id=arguments.id,
            reference=arguments.reference,
        )
    return _print_entry(entry, arguments, out)


def _usage(arguments: Namespace, out: Terminal, err: Terminal) -> int:
    """List the requests that were charged to an account in a period, and the sources that have paid for each.

    headgate ledger usage ACME --period 2026-10-31
    headgate ledger usage ACME --period 2026-10 --timezone Europe/Berlin --format csv > acme.csv
    """
    from headgate.quotas.charges import usage_cells
    from headgate.quotas.export import csv_text, utc_text

    period = _parse_period(arguments.period, arguments.timezone)
    format = "json" if arguments.json else arguments.format
    if arguments.lines < 1:
        raise InvalidInput(f"--lines {arguments.lines}: give a number of at least 1")
    if format == "csv":
        out.print("at,id,amount,paid_by,reference,entry")
    rows: list[list[str]] = []
    with _open(arguments) as ledger:
        for each in ledger.charged_requests(arguments.account, period.since, period.until):
            if format == "csv":
                paid = json.dumps(each.paid_by, separators=(",", ":"))
                out.print(csv_text([utc_text(each.at_us), each.id, each.amount, paid, each.reference, each.entry]))
            elif format == "json":
                out.print(json.dumps(each._asdict()))
            elif len(rows) < arguments.lines:
                rows.append([*usage_cells(each, period.zone)])
            else:
                err.print("There are more requests: give --lines, or --format csv for all of them.")
                break
    if rows:
        out.print(*titled_table(("time", "request", "units", "paid by", "reference"), rows, out))
    elif format == "table":
        out.print(f"{printable(arguments.account)}: no charged requests in {period.name}")
    return 0


def _verify(arguments: Namespace, out: Terminal, err: Terminal) -> int:
    """Recompute all entries: hashes, sums, sources, gaps. Exit code 1 if anything does not match.

    headgate ledger verify
    headgate ledger verify --json
    """

    def show_progress(done: int, total: int) -> None:
        if err.is_terminal:
            err.write(f"\r{bar(done / total if total else 1)} {done:,} of {total:,} entries\x1b[K")

    with _open(arguments) as ledger:
        problems = ledger.verify(progress=show_progress)
        newest = ledger.newest_number()
    if err.is_terminal:
        err.write("\r\x1b[K")
    if arguments.json:
        out.print(json.dumps({"entries": newest, "problems": [each._asdict() for each in problems]}, indent=2))
    elif problems:
        out.print(*[f"{out.paint('problem:', RED)} {printable(str(each))}" for each in problems])
        out.print(f"{len(problems):,} problems in {newest:,} entries")
    else:
        out.print(f"{out.paint('verified:', GREEN)} {newest:,} entries")
    return 1 if problems else 0


def _export(arguments: Namespace, out: Terminal, err: Terminal) -> int:
    """Export entries as CloudEvents or CSV. A file is continued after its last entry: each entry is in it once.

    headgate ledger export --output events.jsonl
    headgate ledger export --format csv --account ACME
    headgate ledger export --after 4711
    """
    from headgate.quotas.export import export_lines, export_to_file

    if arguments.output is not None and arguments.after is not None:
        raise InvalidInput("--after: a file is continued after its last entry; omit it, or omit --output")
    with _open(arguments) as ledger:
        if arguments.output is not None:
            written, last = export_to_file(ledger, arguments.output, arguments.format, account=arguments.account)
            err.print(f"appended {written:,} entries to {arguments.output}; the last is {last}")
            return 0
        for line in export_lines(ledger, arguments.format, after=arguments.after or 0, account=arguments.account):
            out.print(line.rstrip("\n"))
    return 0


ACTIONS = {
    "balance": (_balance, ACCOUNT, LEDGER, JSON),
    "statement": (
        _statement,
        ACCOUNT,
        option("--period", metavar="PERIOD", required=True, help=_PERIOD_HELP),
        TIMEZONE,
        option("--format", choices=("table", "csv", "json", "html"), default="table", help="default: %(default)s"),
        option("--lines", metavar="N", type=int, default=50, help="lines of a table; default: %(default)s"),
        LEDGER,
        JSON,
    ),
    "usage": (
        _usage,
        ACCOUNT,
        option("--period", metavar="PERIOD", required=True, help=_PERIOD_HELP),
        TIMEZONE,
        option("--format", choices=("table", "csv", "json"), default="table", help="default: %(default)s"),
        option("--lines", metavar="N", type=int, default=50, help="lines of a table; default: %(default)s"),
        LEDGER,
        JSON,
    ),
    "grant": (
        _grant,
        ACCOUNT,
        AMOUNT,
        ID,
        option("--expires", metavar="TIME", help="end of the grant, such as 2027-01-01T00:00:00Z; default: never"),
        option(
            "--priority", metavar="N", type=int, default=100, help="lower ones are spent first; default: %(default)s"
        ),
        option("--source", metavar="NAME", default="grant", help="origin, for the statement; default: %(default)s"),
        option("--reason", metavar="TEXT", default="", help="reason, for the statement"),
        REFERENCE,
        LEDGER,
        JSON,
    ),
    "adjust": (
        _adjust,
        ACCOUNT,
        AMOUNT,
        option("--reason", metavar="TEXT", required=True, help="reason, for the statement"),
        ID,
        REFERENCE,
        LEDGER,
        JSON,
    ),
    "thresholds": (
        _thresholds,
        option("percent", metavar="PERCENT", type=int, nargs="*", help="1 to 100; default: show the present ones"),
        LEDGER,
        JSON,
    ),
    "verify": (_verify, LEDGER, JSON),
    "export": (
        _export,
        option("--format", choices=("cloudevents", "csv"), default="cloudevents", help="default: %(default)s"),
        option("--output", metavar="FILE", help="file to continue; default: standard output"),
        option("--after", metavar="NUMBER", type=int, help="only entries after this number; default: all"),
        option("--account", metavar="ACCOUNT", help="only entries of this account"),
        LEDGER,
    ),
}


@contextmanager
def _open(arguments: Namespace, *, create: bool = False) -> Iterator[Ledger]:
    url = arguments.ledger or os.environ.get(VARIABLE) or ""
    if not url:
        raise InvalidInput(f"no ledger: give --ledger sqlite:///quota.db, or set {VARIABLE}")
    from headgate.quotas import Ledger

    with closing(Ledger(url, author=_author(), create=create)) as ledger:
        yield ledger


def _author() -> str:
    try:
        return getpass.getuser()
    except (OSError, KeyError):
        return "headgate ledger"


def _print_entry(entry: LedgerEntry, arguments: Namespace, out: Terminal) -> int:
    if arguments.json:
        out.print(json.dumps(entry._asdict() | {"balance": entry.balance, "hash": entry.hash}, indent=2))
    else:
        balance = f"{printable(entry.account)} had {entry.balance:,} available after it"
        out.print(f"entry {entry.number}, {entry.kind} {entry.amount:+,}: {balance}; id {printable(entry.id)}")
    return 0


# ------------------------------------------------------------------ statements


def _print_table(found: Statement, lines: Iterator[StatementLine], period: _Period, out: Terminal) -> None:
    from headgate.quotas.statement_page import line_cells, statement_sums

    out.print(out.paint(f"Statement of {printable(found.account)}, {period.name}, {period.zone_name}", BOLD), "")
    sums = statement_sums(found)
    width = max(len(amount) for _, amount in sums)
    out.print(*[f"{name:<37} {amount:>{width}}" for name, amount in sums])
    if found.lines:
        rows = [[*line_cells(line, period.zone)] for line in found.lines]
        out.print("", *titled_table(("time", "kind", "description", "amount", "balance"), rows, out))
    if found.has_more:
        out.print(f"There are more lines: give --lines, or --format csv for all of the {found.entries:,} entries.")


def _print_json(found: Statement, lines: Iterator[StatementLine], period: _Period, out: Terminal) -> None:
    document: dict[str, Any] = found._asdict()
    document |= {"days": [day._asdict() for day in found.days], "lines": [line._asdict() for line in lines]}
    del document["has_more"]
    out.print(json.dumps({"period": period.name, "timezone": period.zone_name, **document}, indent=2))


def _print_csv(found: Statement, lines: Iterator[StatementLine], period: _Period, out: Terminal) -> None:
    from headgate.quotas.export import csv_text, utc_text
    from headgate.quotas.statement import StatementLine

    out.print(",".join(["at", *StatementLine._fields]))
    for line in lines:
        out.print(csv_text([utc_text(line.at_us), *line]))


def _print_html(found: Statement, lines: Iterator[StatementLine], period: _Period, out: Terminal) -> None:
    from headgate.quotas.statement_page import statement_page

    page = statement_page(found, lines, period=period.name, zone=period.zone, zone_name=period.zone_name)
    for part in page:
        out.write(part)


_PRINTERS: Final = {"table": _print_table, "csv": _print_csv, "json": _print_json, "html": _print_html}


# ------------------------------------------------------------------ times


def _parse_period(text: str, zone_name: str) -> _Period:
    try:
        zone = ZoneInfo(zone_name)
    except (ValueError, OSError, KeyError):
        raise InvalidInput(f"--timezone {zone_name!r}: unknown; give a name like Europe/Berlin") from None
    first, has_two, last = text.partition("..")
    since, until = _parse_day(text, first, zone)
    if has_two:
        until = _parse_day(text, last, zone)[1]
    if until <= since:
        raise InvalidInput(f"--period {text}: the end is before the beginning")
    return _Period(text, since, until, zone, zone_name)


def _parse_day(period: str, text: str, zone: tzinfo) -> tuple[datetime, datetime]:
    """The beginning and the end of a year, month or day. A midnight that is skipped is the instant after the gap."""
    try:
        if (match := _PERIOD.fullmatch(text)) is None:
            raise ValueError(text)
        year, month, day = (None if part is None else int(part) for part in match.groups())
        assert year is not None
        since = datetime(year, month or 1, day or 1, tzinfo=zone)
        if day is not None:
            following = since.date() + timedelta(days=1)
            until = datetime(following.year, following.month, following.day, tzinfo=zone)
        elif month is not None:
            until = datetime(year + month // 12, month % 12 + 1, 1, tzinfo=zone)
        else:
            until = datetime(year + 1, 1, 1, tzinfo=zone)
        return since.astimezone(UTC), until.astimezone(UTC)
    except (ValueError, OverflowError):
        raise InvalidInput(f"--period {period!r}: give {_PERIOD_HELP}") from None


def _parse_instant(text: str) -> datetime:
    try:
        found = datetime.fromisoformat(text)
    except ValueError:
        raise InvalidInput(f"--expires {text!r}: give a time like 2027-01-01T00:00:00Z") from None
    return found if found.tzinfo is not None else found.replace(tzinfo=UTC)


def _time(at_us: int | None) -> str:
    from headgate.quotas.export import utc_text

    return "never" if at_us is None else utc_text(at_us)
