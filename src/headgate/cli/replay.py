"""Replay an access log under a policy, and show who would have been rejected.

headgate replay policy.yaml access.log
headgate replay policy.yaml "/var/log/nginx/access.log*" --html report.html
zcat access.log.gz | headgate replay policy.yaml -
headgate replay new.yaml access.log --against policy.yaml --fail-if "rejected.paying > 0"
headgate replay policy.yaml events.json --field path=route --identity tenant=header:x-tenant
headgate replay policy.yaml sqlite:///decisions.db --json

exit code: 0 done, 1 a condition of --fail-if holds, 2 invalid call, policy or log
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from headgate.cli.check import EXIT_UNREADABLE, check_file, print_problems
from headgate.cli.options import JSON, POLICY_FILE, SECRET_FILE, option, read_secret
from headgate.cli.progress import ProgressLine
from headgate.cli.terminal import BOLD, DIM, GREEN, RED, condense, duration, sparkline, table, titled_table
from headgate.errors import InvalidInput
from headgate.replay.conditions import parse_condition
from headgate.replay.formats import FORMATS
from headgate.replay.html import html_page
from headgate.replay.markdown import markdown_lines, share
from headgate.replay.run import LogOptions, ReplayRun

if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import Iterator

    from headgate.cli.terminal import Terminal
    from headgate.policy.model import Policy

__all__ = ["LOG_OPTIONS", "OPTIONS", "log_options", "read_policy", "run"]

EXIT_FAILED: Final = 1
MAX_ROUTES: Final = 10
MAX_CLOSE: Final = 10
MAX_FOUND: Final = 5
"""Clients of each scenario."""
MAX_SPARKS: Final = 60

LOG_OPTIONS = (
    option("logs", nargs="+", metavar="LOG", help="file, glob, URL of a decision log, or - for standard input"),
    option("--format", metavar="FORMAT", help=f"{', '.join(FORMATS)}; default: detected for each log"),
    option(
        "--field",
        metavar="PART=FIELD",
        action="append",
        default=[],
        help="the field of JSON or CSV with the time, method, path, status, ip, ...; may be repeated",
    ),
    option(
        "--identity",
        metavar="KIND=SOURCE",
        action="append",
        default=[],
        help="where an identity is: header:NAME, field:NAME or path:TEMPLATE; may be repeated",
    ),
    option("--tiers", metavar="FILE", help="file with the tiers of clients: lines like tenant=acme,pro"),
    SECRET_FILE,
)
OPTIONS = (
    option("policy", metavar="POLICY", help=POLICY_FILE),
    *LOG_OPTIONS,
    option("--against", metavar="POLICY", help="compare with this policy: clients newly rejected and newly allowed"),
    option(
        "--fail-if",
        metavar="CONDITION",
        action="append",
        default=[],
        help='exit with 1 if it holds, as in "rejected.pro > 0.1%%"; may be repeated',
    ),
    option("--obey-retry-after", action="store_true", help="model clients that wait as long as Retry-After says"),
    option("--all-clients", action="store_true", help="list all clients, not only the most rejected ones"),
    option("--html", metavar="FILE", help="also write a report with plots"),
    option("--markdown", action="store_true", help="print a summary for pull requests"),
    JSON,
)


def run(arguments: Namespace, out: Terminal, err: Terminal) -> int:
    if arguments.json and arguments.markdown:
        raise InvalidInput("--json and --markdown print different reports; keep one")
    conditions = [parse_condition(text) for text in arguments.fail_if]
    policy = read_policy(arguments.policy, err)
    against = None if arguments.against is None else read_policy(arguments.against, err)
    if policy is None or (against is None and arguments.against is not None):
        return EXIT_UNREADABLE
    with ProgressLine(err, "replaying") as progress:
        report = ReplayRun(
            policy,
            arguments.policy,
            log_options(arguments),
            against,
            arguments.against or "",
            arguments.obey_retry_after,
            arguments.all_clients,
            progress.update,
        ).run()
    failed = [condition for condition in conditions if condition.holds(report.parts)]
    report.data["failed"] = [condition.text for condition in failed]
    if arguments.html is not None:
        try:
            Path(arguments.html).write_text(html_page(report.data), "utf-8")
        except OSError as error:
            raise InvalidInput(f"--html {arguments.html}: cannot be written: {error.strerror}") from None
    if arguments.json:
        out.print(json.dumps(report.data, indent=2))
    elif arguments.markdown:
        out.print(*markdown_lines(report.data))
    else:
        out.print(*text_lines(report.data, out))
    for condition in failed:
        err.print(f"{err.paint('failed:', RED)} {condition.explain(report.parts)}")
    return EXIT_FAILED if failed else 0


def log_options(arguments: Namespace) -> LogOptions:
    return LogOptions(
        arguments.logs,
        arguments.format,
        arguments.field,
        arguments.identity,
        arguments.tiers,
        read_secret(arguments.secret_file),
    )


def read_policy(file: str, err: Terminal) -> Policy | None:
    """The policy of a file; None after its problems were printed."""
    report = check_file(file)
    if report.policy is None:
        print_problems(report, err)
    return report.policy


def text_lines(data: dict[str, Any], out: Terminal) -> Iterator[str]:
    """The report for a terminal."""
    style = RED if data["rejected"] else GREEN
    rejected = out.paint(f"{data['rejected']:,} ({share(data['rejected'], data['requests'])})", style)
    blocked = f", {data['blocked']:,} of them blocked" if data["blocked"] else ""
    facts = {
        "requests": f"{data['requests']:,}" + (f" from {data['first']} to {data['last']}" if data["first"] else ""),
        "unreadable": f"{data['skipped']:,} lines" if data["skipped"] else "",
        "rejected": f"{rejected}{blocked}",
        "clients": f"{data['rejected_clients']:,} of {data['clients']:,} rejected",
        "worst minute": _worst(data),
        "over time": _over_time(data, out),
        "waiting": _waiting(data),
    }
    name_width = max(map(len, facts))
    yield from (f"{name:{name_width}}  {text}" for name, text in facts.items() if text)
    yield from _comparison_lines(data, out)
    rows = [
        [
            f"{name} (shadow)" if each["shadow"] else name,
            each["limit"] or "by tier",
            f"{each['requests']}",
            f"{each['rejected']}",
            f"{each['clients_rejected']}",
            duration(each["longest_wait_s"]) if each["longest_wait_s"] else "",
            f"{each['peak_per_minute']}",
        ]
        for name, each in data["by_limit"].items()
    ]
    titles = ["limit", "allows", "requests", "rejected", "clients", "longest wait", "peak per minute"]
    yield from _section(titles, rows, out)
    for title, name in (("tier", "by_tier"), ("class", "by_class"), ("route", "by_route")):
        parts = [
            [part, f"{each['requests']}", f"{each['rejected']}", share(each["rejected"], each["requests"])]
            for part, each in [*data[name].items()][:MAX_ROUTES]
        ]
        yield from _section([title, "requests", "rejected", "share"], parts, out)
    clients = [
        [
            each["client"],
            f"{each['requests']}",
            f"{each['rejected']}",
            ", ".join(each.get("by_limit", ())) or ("blocked" if each.get("blocked") else ""),
            each.get("first_rejected", ""),
            f"{each.get('episodes', 0)}",
            duration(each.get("longest_s", 0)),
        ]
        for each in data["by_client"]
    ]
    titles = ["client", "requests", "rejected", "limits", "first rejection", "episodes", "longest"]
    yield from _section(titles, clients, out)
    yield from _scenario_lines(data, out)
    close = [
        [each["client"], each["limit"], f"{each['remaining']} of {each['capacity']}", each["at"]]
        for each in data["came_close"][:MAX_CLOSE]
    ]
    yield from _section(["came close", "limit", "least left", "at"], close, out)
    for note in data["notes"]:
        yield ""
        yield from table([["note:", note]], width=out.width)


def _scenario_lines(data: dict[str, Any], out: Terminal) -> Iterator[str]:
    by_scenario = data["by_scenario"]
    if not by_scenario:
        return
    rows = [
        [
            f"{name} (shadow)" if each["shadow"] else name,
            f"{each['clients']}",
            ", ".join([f"{count} {action}" for action, count in each["actions"].items()]),
            f"{each['affected']}",
        ]
        for name, each in by_scenario.items()
    ]
    yield from _section(["scenario", "clients found", "actions", "requests affected"], rows, out)
    found = [
        [each["at"], name, f"{each['evidence']}{' (in allow)' if each['allowed'] else ''}"]
        for name, scenario in by_scenario.items()
        for each in scenario["found"][:MAX_FOUND]
    ]
    yield from _section(["found at", "scenario", "evidence"], found, out)


def _section(titles: list[str], rows: list[list[str]], out: Terminal) -> Iterator[str]:
    if rows:
        yield ""
        yield from titled_table(titles, rows, out)


def _worst(data: dict[str, Any]) -> str:
    worst = data["worst_minute"]
    return f"{worst['at']}: {worst['rejected']:,} of {worst['requests']:,} rejected" if worst else ""


def _over_time(data: dict[str, Any], out: Terminal) -> str:
    timeline = data["timeline"]
    if timeline is None or not data["rejected"]:
        return ""
    room = min(MAX_SPARKS, (out.width or 80) - 16)
    return out.paint(sparkline(condense(timeline["rejected"], room)), RED) + out.paint(" rejections", DIM)


def _waiting(data: dict[str, Any]) -> str:
    retries = data["retries"]
    if retries is None:
        return ""
    delays = f"{duration(retries['mean_delay_s'])} on average, {duration(retries['longest_delay_s'])} at most"
    return f"{retries['postponed']:,} requests were sent later: {delays}"


def _comparison_lines(data: dict[str, Any], out: Terminal) -> Iterator[str]:
    against = data.get("against")
    if against is None:
        return
    yield ""
    yield out.paint(f"compared with {against['policy']}, which rejects {against['rejected']:,}:", BOLD)
    yield (
        f"{against['newly_rejected_clients']:,} clients newly rejected, {against['newly_allowed_clients']:,} newly "
        f"allowed, {against['changed_clients']:,} with other numbers"
    )
    for title, name in (("newly rejected", "newly_rejected"), ("newly allowed", "newly_allowed")):
        rows = [
            [each["client"], f"{each['requests']}", f"{each['rejected_before']}", f"{each['rejected']}"]
            for each in against[name]
        ]
        yield from _section([title, "requests", "before", "now"], rows, out)
