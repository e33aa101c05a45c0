"""`headgate explain`: the limits that apply to a request, and why."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Final

from headgate.cli.check import check_file, print_problems
from headgate.cli.explanation import explain
from headgate.cli.options import POLICY_FILE, add_json_option, add_secret_option
from headgate.cli.request import HypotheticalRequest
from headgate.cli.table import table, titled_table
from headgate.cli.terminal import GREEN, RED, YELLOW
from headgate.errors import InvalidInput
from headgate.policy.snapshot import UNMATCHED

if TYPE_CHECKING:
    from argparse import ArgumentParser, Namespace
    from collections.abc import Iterator

    from headgate.cli.explanation import Explanation
    from headgate.cli.terminal import Terminal

__all__ = ["ABOUT", "EXAMPLES", "add_arguments", "run"]

ABOUT = "show which limits apply to a request, and why"
EXAMPLES = """
    headgate explain policy.yaml GET /api/v1/search --ip 203.0.113.9 --tenant acme
    headgate explain policy.yaml POST /login --user ada --at 2026-05-28T02:00:00Z
    headgate explain policy.yaml GET / --identity device=4711 --json

    exit code: 0 done, 1 invalid policy, 2 invalid call
"""

_MODES: Final = {
    "open": "open: passes uncounted while the store is unavailable",
    "closed": "closed: answered with 503 while the store is unavailable",
    "local": "local: each node enforces its share of the limits while the store is unavailable",
}


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("file", metavar="FILE", help=POLICY_FILE)
    parser.add_argument("method", metavar="METHOD", help="GET, POST, ...")
    parser.add_argument("path", metavar="PATH", help="path of the request; a query string is ignored")
    parser.add_argument("--ip", metavar="ADDRESS", help="address of the client; default: unknown")
    parser.add_argument("--user", metavar="USER", help="user, as the app identifies it")
    parser.add_argument("--tenant", metavar="TENANT", help="tenant, as the app identifies it")
    parser.add_argument("--api-key", metavar="KEY", help="API key; preferably its hash, hmac:...")
    parser.add_argument(
        "--identity", metavar="KIND=VALUE", action="append", default=[], help="any other identity; may be repeated"
    )
    parser.add_argument("--tier", metavar="TIER", help="tier, as the app assigns it")
    parser.add_argument("--at", metavar="TIME", help="time, such as 2026-05-28T02:01:00Z; default: now")
    add_json_option(parser)
    add_secret_option(parser)


def run(arguments: Namespace, out: Terminal, err: Terminal) -> int:
    report = check_file(arguments.file)
    if report.policy is None:
        print_problems(report, err)
        return report.code()
    if "/" in arguments.method:
        raise InvalidInput(f"{arguments.method!r} is not a method; write one first, as in GET {arguments.method}")
    explanation = explain(report.policy, HypotheticalRequest.read(arguments, report.policy))
    out.print(*([json.dumps(_as_dict(explanation), indent=2)] if arguments.json else _lines(explanation, out)))
    return 0


def _lines(found: Explanation, out: Terminal) -> Iterator[str]:
    facts = {
        "request": found.request,
        "sent by": ", ".join(found.sent_by),
        "route": "unmatched: no template matches the path" if found.route == UNMATCHED else found.route,
        "class": found.route_class or "none",
        "cost": f"{found.cost}",
        "tier": found.tier or "none",
        "on failure": _MODES[found.on_failure],
    }
    yield from table([*facts.items()], width=out.width)
    yield ""
    if found.is_exempt:
        yield f"{out.paint('exempt', GREEN)}: the route costs 0, so no limit applies"
    elif found.blocked is not None:
        yield f"{out.paint('blocked', RED)}: {found.blocked}"
        yield "The response is 403, and no limit is checked."
    elif not found.limits:
        yield f"{out.paint('no limit', YELLOW)}: the request passes and is not counted"
    else:
        rows = [
            [each.name, f"{each.limit}", f"{each.by}: {each.identity}", f"{each.cost}", "; ".join(each.why)]
            for each in found.limits
        ]
        yield from titled_table(["limit", "allows", "counted by", "cost", "why"], rows, out)
    if found.left_out:
        yield ""
        yield from titled_table(["skipped", "why"], [[*each] for each in found.left_out], out)
    for note in found.notes:
        yield ""
        yield from table([["note:", note]], width=out.width)


def _as_dict(found: Explanation) -> dict[str, Any]:
    return {
        **found._asdict(),
        "limits": [
            {
                "name": each.name,
                "quota": each.limit.quota,
                "period_us": each.limit.period_us,
                "burst": each.limit.burst,
                "algorithm": each.limit.algorithm,
                "by": each.by,
                "identity": each.identity,
                "cost": each.cost,
                "is_shadow": each.is_shadow,
                "why": each.why,
            }
            for each in found.limits
        ],
        "left_out": [each._asdict() for each in found.left_out],
    }
