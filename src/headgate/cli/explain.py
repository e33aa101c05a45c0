"""`headgate explain`: which limits would this request meet, and why these?"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Final

from headgate.cli.check import examine, tell
from headgate.cli.explanation import explain
from headgate.cli.request import Request
from headgate.cli.table import table
from headgate.cli.terminal import BAD, BOLD, GOOD, ODD
from headgate.errors import InvalidInput
from headgate.policy.snapshot import UNMATCHED

if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import Iterator

    from headgate.cli.explanation import Explanation
    from headgate.cli.terminal import Terminal

__all__ = ["plain", "run", "show"]

_MODES: Final = {
    "open": "open: it passes uncounted while the store is away",
    "closed": "closed: it is answered 503 while the store is away",
    "local": "local: each node counts its part of a share of each limit while the store is away",
}


def run(arguments: Namespace, out: Terminal, err: Terminal) -> int:
    """Answer the question; the exit code tells whether it could be asked."""
    report = examine(arguments.file)
    if report.policy is None:
        tell(report, err)
        return report.code()
    if "/" in arguments.method:
        raise InvalidInput(f"{arguments.method!r} is no method; write the method first, as in GET {arguments.method}")
    explanation = explain(report.policy, Request.read(arguments, report.policy))
    out.say(*([json.dumps(plain(explanation), indent=2)] if arguments.json else show(explanation, out)))
    return 0


def show(found: Explanation, out: Terminal) -> Iterator[str]:
    """The explanation for people, line by line."""
    facts = {
        "request": found.request,
        "sent by": ", ".join(found.sent_by),
        "route": "unmatched: no template fits the path" if found.route == UNMATCHED else found.route,
        "class": found.route_class or "none",
        "cost": f"{found.cost}",
        "tier": found.tier or "none",
        "on failure": _MODES[found.on_failure],
    }
    yield from table([*facts.items()], width=out.width)
    yield ""
    if found.is_exempt:
        yield f"{out.paint('exempt', GOOD)}: a request here costs 0, so nothing is looked at"
    elif found.blocked is not None:
        yield f"{out.paint('blocked', BAD)}: {found.blocked}"
        yield "It is answered 403, and no limit is looked at."
    elif not found.limits:
        yield f"{out.paint('no limit', ODD)}: it passes, and nothing is counted"
    else:
        yield from _titled(["limit", "allows", "counted by", "cost", "why"], _rows(found), out)
    if found.left_out:
        yield ""
        yield from _titled(["left out", "why"], [[*each] for each in found.left_out], out)
    for note in found.notes:
        yield ""
        yield from table([["note:", note]], width=out.width)


def plain(found: Explanation) -> dict[str, Any]:
    """The explanation for programs."""
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


def _rows(found: Explanation) -> list[list[str]]:
    return [
        [each.name, f"{each.limit}", f"{each.by}: {each.identity}", f"{each.cost}", "; ".join(each.why)]
        for each in found.limits
    ]


def _titled(titles: list[str], rows: list[list[str]], out: Terminal) -> Iterator[str]:
    first, *lines = table([titles, *rows], width=out.width)
    yield out.paint(first, BOLD)
    yield from lines
