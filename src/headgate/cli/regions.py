"""Show the state of all regions, and the limits that they share.

headgate regions
headgate regions --policy policy.yaml
headgate regions --policy policy.yaml --json

With --policy, the stores of its regions are read directly. Otherwise, the
admin server is asked.

exit code: 0 done, 1 invalid policy or refused, 2 invalid call or no answer
"""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from headgate.cli.check import check_file, print_problems
from headgate.cli.options import SERVER, option
from headgate.cli.terminal import GREEN, RED, YELLOW, Terminal, titled_table
from headgate.telemetry.region_overview import read_region_overview

if TYPE_CHECKING:
    from collections.abc import Iterator

    from headgate.cli.context import CommandContext

__all__ = ["OPTIONS", "run"]

OPTIONS = (
    option("--policy", metavar="FILE", help="read the stores of this policy's regions, without an admin server"),
    option("--namespace", default="headgate", help="with --policy: prefix of keys in the stores; default: %(default)s"),
    *SERVER,
)


def run(context: CommandContext) -> int:
    given = context.arguments
    if given.policy is None:
        return context.show(found := context.api.get("regions"), _lines(found, context.out))
    report = check_file(given.policy)
    if report.policy is None:
        print_problems(report, context.err)
        return report.code()
    found = json.loads(json.dumps(asdict(read_region_overview(report.policy, namespace=given.namespace))))
    return context.show(found, _lines(found, context.out))


def _lines(found: dict[str, Any], out: Terminal) -> Iterator[str]:
    for trouble in found["troubles"]:
        yield out.paint(trouble, YELLOW)
    if found["regions"]:
        yield from titled_table(
            ["region", "store", "round trip", "used", "holds", "owes", "unread", "data age", "processes"],
            [[*_cells(each, out)] for each in found["regions"]],
            out,
        )
    if found["limits"]:
        yield ""
        heads = ["limit", "region", "allows", "all regions together", "latency", "used", "held", "over now"]
        rows = [
            [each["name"], each["mode"], each["allows"], each["overshoot"], each["latency"], *_totals(each)]
            for each in found["limits"]
        ]
        yield from titled_table(heads, rows, out)


def _cells(region: dict[str, Any], out: Terminal) -> Iterator[str]:
    yield f"{region['name']} (home)" if region["is_home"] else region["name"]
    if region["error"] is not None:
        yield from (out.paint(f"unreachable: {region['error']}", RED), *[""] * 7)
        return
    unread = [each["unread"] for each in region["imports"]]
    age = region["age_s"]
    yield out.paint("reachable", GREEN)
    yield f"{region['round_trip_ms']:.1f} ms"
    yield from (f"{region['shared']:,}", f"{region['held']:,}", f"{region['owed']:,}")
    yield "unknown" if None in unread else f"{sum(unread):,}"
    yield "unknown" if age is None and unread else f"{age or 0:.1f} s"
    yield f"{region['processes']}"


def _totals(limit: dict[str, Any]) -> Iterator[str]:
    yield f"{sum(limit['used'].values()):,}" if limit["used"] else "-"
    yield f"{sum(limit['held'].values()):,}" if limit["held"] else "-"
    yield "-" if limit["over"] is None else f"{limit['over']:,}"
