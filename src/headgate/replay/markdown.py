"""The report of a replay as Markdown, for the summary of a pull request."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

__all__ = ["markdown_lines", "share"]

MAX_ROWS: Final = 10
_ESCAPES: Final = str.maketrans({"<": "&lt;", ">": "&gt;", "&": "&amp;", **{char: f"\\{char}" for char in "\\|`*_[]"}})


def markdown_lines(data: dict[str, Any]) -> Iterator[str]:
    """The lines of the summary."""
    rejected, requests = data["rejected"], data["requests"]
    yield f"### Replay of {requests:,} requests under {_plain(data['policy'])}"
    yield ""
    period = f" from {data['first']} to {data['last']}" if data["first"] else ""
    affected = f"{data['rejected_clients']:,} of {data['clients']:,} clients"
    yield f"**{rejected:,} rejected** ({share(rejected, requests)}), {affected}{period}."
    for text in data.get("failed", ()):
        yield ""
        yield f"**Failed:** `{text}`"
    if (against := data.get("against")) is not None:
        yield ""
        yield (
            f"Compared with {_plain(against['policy'])}, which rejects {against['rejected']:,}: "
            f"{against['newly_rejected_clients']:,} clients newly rejected, "
            f"{against['newly_allowed_clients']:,} newly allowed, {against['changed_clients']:,} with other numbers."
        )
        for title, name in (("Newly rejected", "newly_rejected"), ("Newly allowed", "newly_allowed")):
            rows = [
                [each["client"], each["tier"] or "", each["requests"], each["rejected_before"], each["rejected"]]
                for each in against[name][:MAX_ROWS]
            ]
            yield from _table([title, "tier", "requests", "rejected before", "rejected"], rows, numbers=3)
    limits = [
        [name, each["limit"] or "", each["requests"], each["rejected"], share(each["rejected"], each["requests"])]
        for name, each in data["by_limit"].items()
    ]
    yield from _table(["limit", "allows", "requests", "rejected", "share"], limits, numbers=3)
    tiers = [
        [name, each["requests"], each["rejected"], share(each["rejected"], each["requests"])]
        for name, each in data["by_tier"].items()
    ]
    yield from _table(["tier", "requests", "rejected", "share"], tiers, numbers=3)
    scenarios = [[name, each["clients"], each["affected"]] for name, each in data["by_scenario"].items()]
    yield from _table(["scenario", "clients found", "requests affected"], scenarios, numbers=2)
    clients = [
        [each["client"], each["tier"] or "", each["requests"], each["rejected"], ", ".join(each.get("by_limit", ()))]
        for each in data["by_client"][:MAX_ROWS]
        if each["rejected"]
    ]
    yield from _table(["client", "tier", "requests", "rejected", "limits"], clients)
    yield ""
    yield "<details><summary>What this log cannot show</summary>"
    yield ""
    yield from (f"- {_plain(note)}" for note in data["notes"])
    yield ""
    yield "</details>"


def share(part: float, whole: float) -> str:
    """A share in percent, with enough digits to distinguish it from zero.

    >>> share(1, 4), share(1, 100_000), share(0, 5), share(0, 0)
    ('25.00 %', '0.0010 %', '0 %', '0 %')
    """
    if not part or not whole:
        return "0 %"
    percent = 100 * part / whole
    return f"{percent:.2f} %" if percent >= 0.01 else f"{percent:.4f} %"


def _table(titles: Sequence[str], rows: Sequence[Sequence[Any]], *, numbers: int = 0) -> Iterator[str]:
    if not rows:
        return
    aligned = len(titles) - numbers
    yield ""
    yield f"| {' | '.join(titles)} |"
    yield f"| {' | '.join(['---' if at < aligned else '--:' for at in range(len(titles))])} |"
    for row in rows:
        cells = [f"{cell:,}" if isinstance(cell, int) else _plain(cell) for cell in row]
        yield f"| {' | '.join(cells)} |"


def _plain(text: str) -> str:
    """A text without characters that Markdown or HTML would interpret."""
    return "".join([char if char.isprintable() else "?" for char in text]).translate(_ESCAPES)
