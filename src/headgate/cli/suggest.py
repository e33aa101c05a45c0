"""Suggest limits from an access log and a goal, as a policy.

headgate suggest access.log --goal "reject at most 0.1% of requests"
headgate suggest "access.log*" --goal "keep each client below 5% of the peak, total below 800/s" > suggested.yaml
headgate suggest access.log --policy policy.yaml --goal "reject at most 0.1% of paying clients' requests" --json

exit code: 0 done, 1 the goals conflict or the traffic is too unstable, 2 invalid call, policy or log
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Final

from headgate._pace import gc_paused
from headgate.cli.check import EXIT_UNREADABLE
from headgate.cli.options import JSON, option
from headgate.cli.progress import ProgressLine
from headgate.cli.replay import LOG_OPTIONS, log_options, read_policy
from headgate.cli.terminal import YELLOW, bar, sparkline, titled_table
from headgate.replay.goals import parse_goals
from headgate.replay.markdown import share
from headgate.replay.suggest import SuggestionRun

if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import Iterator

    from headgate.cli.terminal import Terminal
    from headgate.replay.suggest import Suggestion

__all__ = ["OPTIONS", "run"]

EXIT_DOUBTFUL: Final = 1

OPTIONS = (
    *LOG_OPTIONS,
    option(
        "--goal",
        metavar="GOAL",
        action="append",
        default=[],
        help='as in "reject at most 0.1%% of requests", "keep each client below 5%% of the peak", "total below 800/s"; '
        "may be repeated",
    ),
    option("--policy", metavar="FILE", help="policy with the settings for identities, tiers and exempt routes"),
    option(
        "--by", metavar="KIND", default="client", help="identity that is counted; default: the best of each request"
    ),
    JSON,
)


def run(arguments: Namespace, out: Terminal, err: Terminal) -> int:
    goals = parse_goals(arguments.goal)
    policy = None
    if arguments.policy is not None:
        policy = read_policy(arguments.policy, err)
        if policy is None:
            return EXIT_UNREADABLE
    with ProgressLine(err, "reading") as progress, gc_paused():
        found = SuggestionRun(goals, log_options(arguments), policy, arguments.by, progress.update).run()
    if arguments.json:
        out.print(json.dumps(found.as_dict(), indent=2))
    else:
        out.print(*found.policy_lines())
        err.print(*_details(found, err))
    doubts = [*found.conflicts, *(text for text in found.instabilities)]
    for text in doubts:
        err.print(f"{err.paint('warning:', YELLOW)} {text}")
    return EXIT_DOUBTFUL if doubts else 0


def _details(found: Suggestion, err: Terminal) -> Iterator[str]:
    """The curve of each limit, its days, and the clients that determine it."""
    for each in found.limits:
        name = "" if each.tier == "none" else f" of tier {each.tier}"
        rows = [
            [
                ("* " if point.quota == each.limit.quota else "  ") + f"{point.quota}/minute, burst {point.burst}",
                share(point.share, 1),
                bar(min(1, point.share * 10), 10),
                f"{point.clients}",
            ]
            for point in each.curve
        ]
        yield from titled_table([f"limit{name}", "rejected", "up to 10 %", "clients"], rows, err)
        yield ""
        clients = [[row.client, f"{row.requests}", f"{row.busiest_minute}", row.at] for row in each.determining]
        if clients:
            titles = ["rejected first below it", "requests", "busiest minute", "at"]
            yield from titled_table(titles, clients, err)
            yield ""
        if len(each.days) > 1:
            yield f"rejected by day: {sparkline([day.share for day in each.days])}"
            yield ""
