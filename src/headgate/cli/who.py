"""`headgate who`: what holds for a client now: its tier, its limits and where they come from, and what is used."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from headgate.cli.context import as_json, client_of, opened, titled
from headgate.cli.options import CLIENT, add_server
from headgate.cli.sparklines import bar, duration
from headgate.cli.table import table
from headgate.cli.terminal import BAD, GOOD, ODD, printable

if TYPE_CHECKING:
    from argparse import ArgumentParser, Namespace
    from collections.abc import Iterator

    from headgate.cli.context import ClientArgument, CommandContext
    from headgate.cli.terminal import Terminal

__all__ = ["ABOUT", "EXAMPLES", "add_arguments", "override_cells", "run"]

ABOUT = "show what holds for a client now, and how much of it is used"
EXAMPLES = """
    headgate who acme
    headgate who ip=203.0.113.9 --json
    headgate who - < key.txt

    exit code: 0 here is the answer, 1 refused, 2 it cannot be asked
"""

TIER_FROM = {"assigned": "assigned", "policy": "by the policy", "default": "the tier of everybody else"}


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("client", metavar="CLIENT", help=CLIENT)
    add_server(parser)


def run(arguments: Namespace, out: Terminal, err: Terminal) -> int:
    desk = opened(arguments, out, err)
    who = client_of(desk, arguments.client)
    found = desk.api.get("client", kind=who.kind, value=who.value)
    if arguments.json:
        return as_json(desk, found)
    out.say(*_shown(found, who, desk))
    return 0


def _shown(found: dict[str, Any], who: ClientArgument, desk: CommandContext) -> Iterator[str]:
    out, block = desk.out, found.get("block")
    tier = found.get("tier")
    facts = [["client", f"{who._replace(label=found.get('label') or who.label)}"]]
    facts.append(["tier", f"{tier}, {TIER_FROM.get(found['tier_from'], found['tier_from'])}" if tier else "none"])
    if found.get("troubles"):
        facts += [["trouble", f"{each}"] for each in found["troubles"]]
    yield from table(facts, width=out.width)
    if block is not None:
        until = f" until {desk.time(block['valid_until_us'])}" if block.get("valid_until_us") else ""
        by = f", by {block['author']}" if block.get("author") else ""
        yield out.paint(printable(f"blocked{until}: {block.get('reason') or 'no reason is given'}{by}"), BAD)
    yield ""
    yield from _limits(found, desk)
    if found.get("overrides"):
        yield ""
        yield from titled(
            ["override", "of", "bucket", f"from ({desk.zone_name})", "until", "state", "reason", "by"],
            [[f"{each['id']}", *override_cells(each, desk)] for each in found["overrides"]],
            out,
        )


def _limits(found: dict[str, Any], desk: CommandContext) -> Iterator[str]:
    out = desk.out
    if not found["limits"] and found.get("troubles"):
        yield out.paint("Which limits it meets is not known.", ODD)
        return
    if not found["limits"]:
        yield out.paint("no limit", ODD) + ": its requests pass, and nothing is counted"
        return
    rows = [
        [
            each["limit"] + (" (shadow)" if each.get("shadow") else ""),
            each["bucket"],
            each["by"],
            _source(each, desk),
            *_usage(each),
        ]
        for each in found["limits"]
    ]
    titles = ["limit", "allows", "counted by", "from", "used", ""]
    first, *lines = titled(titles, rows, out)
    yield first
    for line in lines:
        # The colour of a bar tells at a glance whom a limit is about to stop.
        yield _painted(line, out)


def _painted(line: str, out: Terminal) -> str:
    start = next((place for place, sign in enumerate(line) if sign in "█▏▎▍▌▋▊▉░"), None)
    if start is None:
        return line
    drawn = line[start:].split(" ", 1)[0]
    share = drawn.count("█") / len(drawn)
    style = BAD if share >= 0.9 else ODD if share >= 0.7 else GOOD
    return line[:start] + out.paint(drawn, style) + line[start + len(drawn) :]


def _usage(each: dict[str, Any]) -> tuple[str, str]:
    if each.get("unknown") is not None:
        return "unknown", f"{each['unknown']}"
    used, capacity = each.get("used"), each.get("capacity")
    if used is None or not capacity:
        return "", ""
    wait = f", passes in {duration(each['retry_s'])}" if each.get("retry_s") else ""
    full = f", resets in {duration(each['reset_s'])}" if each.get("reset_s") and not wait else ""
    return bar(used / capacity, 16), f"{used} of {capacity}{wait}{full}"


def _source(each: dict[str, Any], desk: CommandContext) -> str:
    source = f"{each.get('from') or each.get('from_') or 'policy'}"
    if each.get("override_id") is not None:
        source = f"{source} {each['override_id']}"
    if each.get("valid_until_us") is not None:
        source = f"{source} until {desk.time(each['valid_until_us'])}"
    return source


def override_cells(each: dict[str, Any], desk: CommandContext) -> list[str]:
    """What an override says, from where it holds to who gave it."""
    return [
        _place_of(each),
        each["bucket"],
        desk.time(each.get("valid_from_us"), none="-"),
        desk.time(each.get("valid_until_us"), none="no end"),
        each["state"],
        each.get("reason") or "",
        each.get("author") or ("policy" if each.get("source") == "policy" else ""),
    ]


def _place_of(each: dict[str, Any]) -> str:
    """On which limits an override holds."""
    route_class = each.get("route_class") or each.get("class")
    limit = f"limit {each['limit']}" if each.get("limit") else ""
    return " ".join(filter(None, (limit, f"class {route_class}" if route_class else ""))) or "all limits"
