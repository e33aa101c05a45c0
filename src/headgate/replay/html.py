"""The report of a replay as one HTML page, with plots, without scripts and without requests to other servers."""

from __future__ import annotations

from html import escape
from importlib.resources import files
from typing import TYPE_CHECKING, Any, Final

from headgate.replay.markdown import share

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

__all__ = ["html_page", "plot"]

WIDTH: Final = 960
HEIGHT: Final = 140
MAX_COLUMNS: Final = 240
MAX_ROUTES: Final = 20


def html_page(data: dict[str, Any]) -> str:
    """The page for a report as JSON."""
    style = (files("headgate.replay") / "html.css").read_text("utf-8")
    title = f"Replay of {data['requests']:,} requests under {data['policy']}"
    return "\n".join(
        [
            "<!doctype html>",
            '<html lang="en"><head><meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">",
            f"<title>{escape(title)}</title><style>{style}</style></head><body>",
            *_head(data),
            *_comparison(data),
            *_timeline(data),
            *_limits(data),
            *_parts(data),
            *_clients(data),
            *_scenarios(data),
            *_close(data),
            *_notes(data),
            "</body></html>\n",
        ]
    )


def plot(requests: Sequence[float], rejected: Sequence[float], *, title: str) -> str:
    """Columns of requests, with the rejected part at the bottom, as an SVG image with a description."""
    top = max([*requests, 1])
    columns = len(requests)
    step = WIDTH / max(1, columns)
    shapes = []
    for name, values in (("requests", requests), ("rejected", rejected)):
        bars = [
            f"M{at * step:.2f} {HEIGHT}v{-max(1.0, value / top * HEIGHT):.2f}h{max(step - 0.4, 0.4):.2f}V{HEIGHT}z"
            for at, value in enumerate(values)
            if value
        ]
        shapes.append(f'<path class="{name}" d="{"".join(bars)}"/>')
    return (
        f'<svg class="plot" viewBox="0 0 {WIDTH} {HEIGHT}" preserveAspectRatio="none" role="img" '
        f'aria-label="{escape(title, quote=True)}"><title>{escape(title)}</title>'
        f'{"".join(shapes)}<path class="axis" d="M0 {HEIGHT}H{WIDTH}"/></svg>'
    )


def condensed(numbers: Sequence[int], columns: int) -> list[int]:
    """At most so many sums of equally many neighbours.

    >>> condensed([1, 2, 3, 4, 5], 3)
    [3, 7, 5]
    """
    each = -(-len(numbers) // columns)
    return [sum(numbers[at : at + each]) for at in range(0, len(numbers), max(1, each))]


def _head(data: dict[str, Any]) -> Iterator[str]:
    yield f"<h1>Replay under {escape(data['policy'])}</h1>"
    logs = ", ".join(data["logs"][:5]) + (f" and {len(data['logs']) - 5} more" if len(data["logs"]) > 5 else "")
    if data["first"]:
        yield f'<p class="soft">{escape(logs)}: {data["first"]} to {data["last"]}</p>'
    else:
        yield f'<p class="soft">{escape(logs)}: no requests</p>'
    figures = [
        ("requests", f"{data['requests']:,}"),
        ("rejected", f"{data['rejected']:,}"),
        ("share", share(data["rejected"], data["requests"])),
        ("clients rejected", f"{data['rejected_clients']:,} of {data['clients']:,}"),
    ]
    if data["blocked"]:
        figures.append(("blocked", f"{data['blocked']:,}"))
    if data["skipped"]:
        figures.append(("unreadable lines", f"{data['skipped']:,}"))
    if (retries := data["retries"]) is not None:
        figures.append(("postponed", f"{retries['postponed']:,}"))
        figures.append(("longest delay", f"{retries['longest_delay_s']:,.0f} s"))
    yield '<dl class="figures">'
    yield from (f"<div><dt>{name}</dt><dd>{value}</dd></div>" for name, value in figures)
    yield "</dl>"
    for text in data.get("failed", ()):
        yield f'<section class="failed"><strong>Failed:</strong> <code>{escape(text)}</code></section>'


def _timeline(data: dict[str, Any]) -> Iterator[str]:
    timeline = data["timeline"]
    if timeline is None:
        return
    requests = condensed(timeline["requests"], MAX_COLUMNS)
    rejected = condensed(timeline["rejected"], MAX_COLUMNS)
    minutes = timeline["minutes_per_slot"] * -(-len(timeline["requests"]) // MAX_COLUMNS)
    width = f"{minutes:,} minutes" if minutes > 1 else "minute"
    worst, busiest = data["worst_minute"], data["busiest_minute"]
    yield "<section><h2>Requests over time</h2>"
    yield plot(requests, rejected, title=f"Requests and rejections in columns of {width}")
    yield f'<div class="labels"><span>{data["first"]}</span><span>{data["last"]}</span></div>'
    yield '<p class="soft"><span class="key a">requests</span> &ensp; <span class="key d">rejected</span> &ensp; '
    yield f"each column is {width}; the highest has {max(requests):,} requests</p>"
    if worst is not None:
        rejections = f"<strong>{worst['rejected']:,} of {worst['requests']:,}</strong> requests rejected"
        yield f"<p>Worst minute: {worst['at']}, {rejections}. "
        yield f"Busiest minute: {busiest['at']}, {busiest['requests']:,} requests.</p>"
    yield "</section>"


def _limits(data: dict[str, Any]) -> Iterator[str]:
    rows = []
    for name, each in data["by_limit"].items():
        label = f"{escape(name)}{' <span class=soft>(shadow)</span>' if each['shadow'] else ''}"
        part = each["rejected"] / each["requests"] if each["requests"] else 0
        rows.append(
            [
                f"{label}<br><span class=soft>{escape(each['limit'] or 'by tier')}, by {escape(each['by'])}</span>",
                each["requests"],
                each["rejected"],
                f"{share(each['rejected'], each['requests'])}{_bar(part)}",
                each["clients_rejected"],
                f"{each['longest_wait_s']:,.1f} s" if each["longest_wait_s"] else "",
                each["peak_per_minute"],
            ]
        )
    titles = ["limit", "requests", "rejected", "share", "clients rejected", "longest wait", "admitted in peak minute"]
    yield from _section("By limit", titles, rows, is_html=True)


def _parts(data: dict[str, Any]) -> Iterator[str]:
    for title, name in (("By tier", "by_tier"), ("By class", "by_class"), ("By route", "by_route")):
        rows = [
            [part, each["requests"], each["rejected"], share(each["rejected"], each["requests"])]
            for part, each in [*data[name].items()][:MAX_ROUTES]
        ]
        yield from _section(title, [title.removeprefix("By "), "requests", "rejected", "share"], rows)


def _clients(data: dict[str, Any]) -> Iterator[str]:
    rows = [
        [
            each["client"],
            each["tier"] or "",
            each["requests"],
            each["rejected"],
            ", ".join([f"{name} ({number:,})" for name, number in each.get("by_limit", {}).items()])
            + (f" blocked ({each['blocked']:,})" if each.get("blocked") else ""),
            each.get("first_rejected", ""),
            each.get("episodes", 0),
            f"{each.get('longest_s', 0):,.0f} s",
        ]
        for each in data["by_client"]
    ]
    titles = ["client", "tier", "requests", "rejected", "limits", "first rejection", "episodes", "longest"]
    yield from _section("Most rejected clients", titles, rows, empty="No client would have been rejected.")


def _scenarios(data: dict[str, Any]) -> Iterator[str]:
    rows = [
        [
            f"{name} (shadow)" if each["shadow"] else name,
            each["clients"],
            ", ".join([f"{count:,} {action}" for action, count in each["actions"].items()]),
            each["affected"],
        ]
        for name, each in data["by_scenario"].items()
    ]
    yield from _section("By scenario", ["scenario", "clients found", "actions", "requests affected"], rows)
    found = [
        [name, each["at"], each["evidence"], ", ".join(each["actions"]) or ("allowed" if each["allowed"] else "")]
        for name, scenario in data["by_scenario"].items()
        for each in scenario["found"]
    ]
    yield from _section("Clients found", ["scenario", "at", "evidence", "actions"], found)


def _close(data: dict[str, Any]) -> Iterator[str]:
    rows = [
        [each["client"], each["limit"], f"{each['remaining']:,} of {each['capacity']:,}", each["at"], each["requests"]]
        for each in data["came_close"]
    ]
    yield from _section("Came close", ["client", "limit", "least left", "at", "requests"], rows)


def _comparison(data: dict[str, Any]) -> Iterator[str]:
    against = data.get("against")
    if against is None:
        return
    yield f"<section><h2>Compared with {escape(against['policy'])}</h2>"
    yield f"<p>It rejects {against['rejected']:,} requests, this policy {data['rejected']:,}: "
    yield f"{against['newly_rejected_clients']:,} clients are newly rejected, "
    yield f"{against['newly_allowed_clients']:,} newly allowed, "
    yield f"and {against['changed_clients']:,} have other numbers.</p>"
    for title, name in (("newly rejected", "newly_rejected"), ("newly allowed", "newly_allowed")):
        rows = [
            [each["client"], each["tier"] or "", each["requests"], each["rejected_before"], each["rejected"]]
            for each in against[name]
        ]
        yield from _table([title, "tier", "requests", "rejected before", "rejected"], rows) if rows else ()
    yield "</section>"


def _notes(data: dict[str, Any]) -> Iterator[str]:
    yield "<section><h2>What this log cannot show</h2><ul>"
    yield from (f"<li>{escape(note)}</li>" for note in data["notes"])
    yield "</ul></section>"


def _section(
    title: str, titles: Sequence[str], rows: Sequence[Sequence[Any]], *, empty: str = "", is_html: bool = False
) -> Iterator[str]:
    if not rows and not empty:
        return
    yield f"<section><h2>{title}</h2>"
    yield from _table(titles, rows, is_html=is_html) if rows else [f"<p>{empty}</p>"]
    yield "</section>"


def _table(titles: Sequence[str], rows: Sequence[Sequence[Any]], *, is_html: bool = False) -> Iterator[str]:
    numbers = [all(_is_number(row[at]) for row in rows) for at in range(len(titles))]
    yield '<div class="scroll"><table><thead><tr>'
    for title, is_number in zip(titles, numbers, strict=True):
        yield f"<th{' class=number' if is_number else ''}>{escape(title)}</th>"
    yield "</tr></thead><tbody>"
    for row in rows:
        yield "<tr>"
        for cell, is_number in zip(row, numbers, strict=True):
            shown = f"{cell:,}" if isinstance(cell, int) else cell if is_html else escape(_printable(cell))
            yield f"<td{' class=number' if is_number else ''}>{shown}</td>"
        yield "</tr>"
    yield "</tbody></table></div>"


def _is_number(cell: Any) -> bool:
    return isinstance(cell, int) or (cell[:1].isdigit() and cell.endswith(("%", " s")))


def _bar(part: float) -> str:
    width = min(100.0, max(1.0, 100 * part)) if part else 0.0
    shape = f'<rect class="rejected" width="{width:.1f}" height="8"/>'
    return (
        f'<div class="bar"><svg viewBox="0 0 100 8" preserveAspectRatio="none" aria-hidden="true">{shape}</svg></div>'
    )


def _printable(text: str) -> str:
    return "".join([char if char.isprintable() else "?" for char in text])
