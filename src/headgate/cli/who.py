"""Show the tier, limits and current usage of a client.

headgate who acme
headgate who ip=203.0.113.9 --json
headgate who - < key.txt

exit code: 0 done, 1 refused, 2 invalid call or no answer
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from headgate.cli.context import ClientArgument, CommandContext, resolve_client
from headgate.cli.options import CLIENT, SERVER
from headgate.cli.terminal import GREEN, RED, YELLOW, Terminal, bar, duration, printable, table, titled_table

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["OPTIONS", "override_cells", "run"]

OPTIONS = (CLIENT, *SERVER)
TIER_FROM = {"assigned": "assigned", "policy": "from the policy", "default": "the default tier"}


def run(context: CommandContext) -> int:
    who = resolve_client(context, context.arguments.client)
    found = context.api.get("client", kind=who.kind, value=who.value)
    return context.show(found, _lines(found, who, context))


def _lines(found: dict[str, Any], who: ClientArgument, context: CommandContext) -> Iterator[str]:
    out, block = context.out, found.get("block")
    tier = found.get("tier")
    facts = [["client", f"{who._replace(label=found.get('label') or who.label)}"]]
    facts.append(["tier", f"{tier}, {TIER_FROM.get(found['tier_from'], found['tier_from'])}" if tier else "none"])
    calendar = [f"{word} {found[word]}" for word in ("timezone", "starts") if found.get(word) is not None]
    facts += [["periods", ", ".join(calendar)]] if calendar else []
    facts += [["problem", f"{each}"] for each in found.get("troubles") or ()]
    yield from table(facts, width=out.width)
    if block is not None:
        until = f" until {context.time(block['valid_until_us'])}" if block.get("valid_until_us") else ""
        by = f", by {block['author']}" if block.get("author") else ""
        yield out.paint(printable(f"blocked{until}: {block.get('reason') or 'no reason given'}{by}"), RED)
    yield ""
    yield from _limits(found, context)
    if found.get("overrides"):
        yield ""
        yield from titled_table(
            ["override", "of", "bucket", f"from ({context.zone_name})", "until", "state", "reason", "by"],
            [[f"{each['id']}", *override_cells(each, context)] for each in found["overrides"]],
            out,
        )


def _limits(found: dict[str, Any], context: CommandContext) -> Iterator[str]:
    out = context.out
    if not found["limits"] and found.get("troubles"):
        yield out.paint("Its limits are unknown.", YELLOW)
        return
    if not found["limits"]:
        yield out.paint("no limit", YELLOW) + ": its requests pass and are not counted"
        return
    rows = []
    for each in found["limits"]:
        name = each["limit"] + (" (shadow)" if each.get("shadow") else "")
        rows.append([name, each["bucket"], each["by"], _source(each, context), *_usage(each)])
    first, *lines = titled_table(["limit", "allows", "counted by", "from", "used", ""], rows, out)
    yield first
    yield from [_paint_bar(line, out) for line in lines]


def _paint_bar(line: str, out: Terminal) -> str:
    start = next((place for place, char in enumerate(line) if char in "█▏▎▍▌▋▊▉░"), None)
    if start is None:
        return line
    drawn = line[start:].split(" ", 1)[0]
    share = drawn.count("█") / len(drawn)
    style = RED if share >= 0.9 else YELLOW if share >= 0.7 else GREEN
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


def _source(each: dict[str, Any], context: CommandContext) -> str:
    source = f"{each.get('from') or each.get('from_') or 'policy'}"
    if each.get("override_id") is not None:
        source = f"{source} {each['override_id']}"
    if each.get("valid_until_us") is not None:
        source = f"{source} until {context.time(each['valid_until_us'])}"
    return source


def override_cells(each: dict[str, Any], context: CommandContext) -> list[str]:
    author = each.get("author") or ("policy" if each.get("source") == "policy" else "")
    return [_scope(each), each["bucket"], *context.validity(each), each["state"], each.get("reason") or "", author]


def _scope(each: dict[str, Any]) -> str:
    route_class = each.get("route_class") or each.get("class")
    limit = f"limit {each['limit']}" if each.get("limit") else ""
    return " ".join(filter(None, (limit, f"class {route_class}" if route_class else ""))) or "all limits"
