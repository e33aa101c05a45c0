"""A statement as an HTML page for printing: one file without scripts or references to others."""

from __future__ import annotations

from datetime import timedelta, tzinfo
from html import escape
from typing import TYPE_CHECKING, Final

from headgate.clock import EPOCH
from headgate.quotas.entries import request_id

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from headgate.quotas.statement import Statement, StatementLine

__all__ = ["line_cells", "local_text", "statement_page", "statement_sums"]

KIND_NAMES: Final = {
    "grant": "Grant",
    "commit": "Charge",
    "expire": "Expired",
    "adjust": "Adjustment",
    "void": "Expired",
    "reserve": "Reservation",
}
"""The names of lines. A void has a line only if it returns units to a grant that has expired."""

STYLE: Final = """
:root { color-scheme: light; font: 14px/1.45 system-ui, sans-serif; color: #1a1a1a; background: #fff }
body { max-width: 60rem; margin: 2rem auto; padding: 0 1.5rem }
h1 { font-size: 1.5rem; margin: 0 } h2 { font-size: 1.1rem; margin: 2rem 0 .5rem }
p { margin: .25rem 0; color: #555 }
table { border-collapse: collapse; width: 100% }
th { text-align: left; border-bottom: 2px solid #1a1a1a; padding: .3rem .6rem .3rem 0 }
td { border-bottom: 1px solid #ddd; padding: .25rem .6rem .25rem 0; vertical-align: top; overflow-wrap: anywhere }
th.n, td.n { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap }
.sums { width: auto } .sums td { padding-right: 2rem } .sums tr:last-child td { font-weight: 600; border-bottom: 0 }
svg { width: 100%; height: 7rem } rect { fill: #3b6ea5 }
footer { margin-top: 2rem; font-size: .8rem; color: #555; overflow-wrap: anywhere }
thead { display: table-header-group } tr { break-inside: avoid }
@media print { body { margin: 0; max-width: none; padding: 0 } }
"""


def local_text(at_us: int, zone: tzinfo) -> str:
    """An instant in a time zone, to the second."""
    return f"{(EPOCH + timedelta(microseconds=at_us)).astimezone(zone):%Y-%m-%d %H:%M:%S}"


def line_cells(line: StatementLine, zone: tzinfo) -> tuple[str, ...]:
    """Time, kind, description, amount and balance of a line for people."""
    numbers = (f"{line.amount:+,}", f"{line.owned:,}")
    return local_text(line.at_us, zone), KIND_NAMES[line.kind], _description(line), *numbers


def _description(line: StatementLine) -> str:
    source = line.source if line.kind == "grant" else ""
    uncovered = f"{line.uncovered:,} beyond the balance, not charged" if line.uncovered else ""
    return "; ".join([part for part in (source, line.reason, line.reference, uncovered) if part]) or request_id(line.id)


def statement_page(
    statement: Statement, lines: Iterable[StatementLine], *, period: str, zone: tzinfo, zone_name: str
) -> Iterator[str]:
    """The parts of the page, with all given lines."""
    title = f"Statement of {statement.account}, {period}"
    yield f'<!doctype html>\n<html lang="en">\n<meta charset="utf-8">\n<title>{escape(title)}</title>\n'
    yield f'<meta name="viewport" content="width=device-width">\n<style>{STYLE}</style>\n'
    yield f"<h1>{escape(title)}</h1>\n"
    since, until = local_text(statement.since_us, zone), local_text(statement.until_us, zone)
    yield f"<p>From {since} to before {until}, {escape(zone_name)}</p>\n"
    yield '<h2>Summary</h2>\n<table class="sums">\n'
    for name, amount in statement_sums(statement):
        yield f'<tr><td>{name}<td class="n">{amount}\n'
    yield "</table>\n"
    if len(statement.days) > 1:
        yield f"<h2>Charged by day</h2>\n{_chart(statement)}\n"
    yield '<h2>Lines</h2>\n<table>\n<thead><tr><th>Time<th>Kind<th>Description<th class="n">Amount<th class="n">Balance'
    yield "</thead>\n"
    for line in lines:
        *texts, amount, balance = map(escape, line_cells(line, zone))
        cells = "".join([f"<td>{text}" for text in texts])
        yield f'<tr>{cells}<td class="n">{amount}<td class="n">{balance}\n'
    yield f"</table>\n<footer>{statement.entries:,} entries; SHA-256 of the last: {statement.last_hash or 'none'}"
    yield "</footer>\n"


def statement_sums(statement: Statement) -> list[tuple[str, str]]:
    """The rows of the summary."""
    changes = (
        ("Granted", statement.granted),
        ("Adjusted", statement.adjusted),
        ("Charged", -statement.charged),
        ("Expired", -statement.expired),
    )
    rows = [("Opening balance", f"{statement.opening:,}")]
    rows += [(name, f"{amount:+,}" if amount else "0") for name, amount in changes]
    if statement.uncovered:
        rows.append(("Used beyond the balance, not charged", f"{statement.uncovered:,}"))
    if statement.held:
        rows.append(("Held for reservations", f"{statement.held:,}"))
    return [*rows, ("Closing balance", f"{statement.closing:,}")]


def _chart(statement: Statement) -> str:
    most = max(1, *(day.charged for day in statement.days))
    bars = []
    for at, day in enumerate(statement.days):
        height = 60 * day.charged / most
        box = f'x="{at * 10}" y="{60 - height:.2f}" width="8" height="{height:.2f}"'
        bars.append(f"<rect {box}><title>{day.day}: {day.charged:,}</title></rect>")
    box = f"0 0 {10 * len(statement.days)} 60"
    start = f'<svg viewBox="{box}" preserveAspectRatio="none" role="img" aria-label="Charged by day">'
    return f"{start}{''.join(bars)}</svg>"
