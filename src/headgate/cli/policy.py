"""Show, check, change and roll back the policy of the fleet.

headgate policy show > policy.yaml
headgate policy check policy.yaml
headgate policy put policy.yaml --based-on 12 --reason "searches cost 5"
headgate policy canary policy.yaml --percent 10 --based-on 12 --reason "searches cost 5"
headgate policy status
headgate policy promote --reason "no more rejections than before"
headgate policy versions
headgate policy diff 11 12
headgate policy rollback 11 --reason "searches cost too much"

exit code: 0 done, 1 refused, 2 invalid call or no answer, 3 needs --confirm
"""

from __future__ import annotations

import re
from difflib import unified_diff
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from headgate.cli.admin_client import EXIT_REFUSED, AdminError, build_path
from headgate.cli.context import CommandContext, ask_yes, change, fetch_pages, is_interactive
from headgate.cli.options import CHANGE, POLICY_FILE, SERVER, option
from headgate.cli.terminal import BOLD, DIM, GREEN, RED, YELLOW, Terminal, printable, titled_table
from headgate.errors import InvalidInput
from headgate.policy.loader import decoded, file_content
from headgate.policy.scalars import duration

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

__all__ = ["ACTIONS"]

MAX_PREVIEWED: Final = 50
_AMOUNT: Final = re.compile(r"\s*\+?([0-9]{1,4}(?:\.[0-9]{1,2})?)\s*(?:%|x|points)?\s*")
SECTIONS: Final = ("documents", "tiers", "routes", "clients", "overrides", "blocked")


def show(context: CommandContext) -> int:
    """Print the policy document.

    headgate policy show > policy.yaml
    headgate policy show --version 11
    headgate policy show --rules
    """
    found = context.api.get("policy", version=context.arguments.version)
    if context.arguments.json or context.arguments.rules:
        return context.show(found, _rules(found, context.out))
    context.out.write(found["text"])
    if context.out.is_terminal and not found["text"].endswith("\n"):
        context.out.print("")
    name = printable(found["name"]) if found.get("since") is not None else "No document"
    context.err.print(
        f"{name}, version {found['version']}. To change it: "
        f"headgate policy put FILE --based-on {found['version']} --reason ..."
    )
    return 0


def _rules(found: dict[str, Any], out: Terminal) -> Iterator[str]:
    rows = []
    for each in found["rules"]:
        where = [*each["routes"], *(f"class {name}" for name in each["classes"])] or ["all requests"]
        tiers = ", ".join(f"{tier}: {bucket}" for tier, bucket in each["tiers"].items())
        name = each["name"] + (" (shadow)" if each["shadow"] else "")
        rows.append([name, each["bucket"] or "-", each["by"], " ".join((*each["methods"], ", ".join(where))), tiers])
    yield from titled_table(["limit", "allows", "counted by", "where", "tiers"], rows, out)


def check(context: CommandContext) -> int:
    """Check a policy document without changing anything.

    headgate policy check policy.yaml
    """
    file, out = context.arguments.file, context.out
    found = context.api.request("POST", "policy/check", body=_document(file)).body
    if context.arguments.json or not found["problems"]:
        context.show(found, [f"{file}: {out.paint('valid', GREEN)}"])
    else:
        context.err.print(*[printable(f"{each}") for each in found["problems"]])
    return EXIT_REFUSED if found["problems"] else 0


def put(context: CommandContext) -> int:
    """Replace the policy document.

    headgate policy put policy.yaml --based-on 12 --reason "searches cost 5"

    --based-on is the version that `headgate policy show` printed: the change is
    refused if others have changed the policy since. Without it, a terminal
    shows a diff and asks.
    """
    fields, based_on = _document(context.arguments.file), context.arguments.based_on
    if based_on is None and (based_on := _confirmed_version(context, fields["text"])) is None:
        return _refused(context)
    return change(context, "PUT", "policy", fields=fields, based_on=based_on)


def _refused(context: CommandContext) -> int:
    context.err.print("Nothing was changed.")
    return EXIT_REFUSED


def _confirmed_version(context: CommandContext, text: str, question: str = "Replace the policy?") -> int | None:
    """The current version, after the user has confirmed the diff to it; None if they did not."""
    found = context.api.get("policy")
    if not found["version"]:
        return 0  # nothing was saved yet, so nothing can be overwritten
    if not is_interactive(context):
        raise InvalidInput(
            "give the version that this document is based on, so that no change of others is overwritten: "
            "--based-on VERSION, which `headgate policy show` prints"
        )
    lines = unified_diff(found["text"].splitlines(), text.splitlines(), "current", "new", lineterm="", n=2)
    context.err.print(*_painted(lines, context.err))
    version: int = found["version"]
    return version if ask_yes(f"{question} Type yes: ") else None


def canary(context: CommandContext) -> int:
    """Apply a policy document on some of the nodes, and compare them with the others.

    headgate policy canary policy.yaml --percent 10 --based-on 12 --reason "searches cost 5"
    headgate policy canary policy.yaml --nodes web-1,web-2 --max-rejections +2 --reason "..."
    headgate policy canary policy.yaml --percent 10 --for 10m --promote --reason "..."

    It is rolled back by itself when a threshold is exceeded, and ended with
    `headgate policy promote` or `headgate policy rollback`.
    """
    given = context.arguments
    if (given.percent is None) == (given.nodes is None):
        raise InvalidInput("give either --percent N or --nodes NAME,NAME")
    fields, based_on = _document(given.file), given.based_on
    if based_on is None and (based_on := _confirmed_version(context, fields["text"], "Start a canary?")) is None:
        return _refused(context)
    spec = {
        "percent": given.percent,
        "nodes": None if given.nodes is None else [name.strip() for name in given.nodes.split(",") if name.strip()],
        "max_rejections": _amount("--max-rejections", given.max_rejections),
        "max_errors": _amount("--max-errors", given.max_errors),
        "max_latency": _amount("--max-latency", given.max_latency),
        "for_s": None if given.duration is None else duration(given.duration).total_seconds(),
        "promote": given.promote,
    }
    return change(context, "POST", "policy/canary", fields={**fields, **spec}, based_on=based_on)


def _amount(option: str, text: str) -> float:
    """A threshold: "+5", "5 %", "1.5x" or a plain number."""
    match = _AMOUNT.fullmatch(text)
    if match is None:
        raise InvalidInput(f"{option} {text}: give a number, like +5 for percentage points or 1.5 for a multiple")
    return float(match[1])


def status(context: CommandContext) -> int:
    """Show the canary and the comparison of its nodes.

    headgate policy status
    """
    found = context.api.get("policy/canary")
    if found["canary"] is None and not context.arguments.json:
        context.err.print("No canary was ever started.")
        return 0
    return context.show(found, _status(found, context))


def _status(found: dict[str, Any], context: CommandContext) -> Iterator[str]:
    out, row = context.out, found["canary"]
    style = {"running": YELLOW, "promoted": GREEN, "rolled back": RED}[row["state"]]
    title = f"Canary of {printable(row['name'])} on {printable(row['share'])}: {out.paint(row['state'], style)}"
    yield out.paint(title, BOLD)
    yield printable(f"started {context.time(row['begun_us'])} by {row['author']}: {row['reason']}")
    if row["ended_us"] is not None:
        yield printable(f"{row['state']} {context.time(row['ended_us'])} by {row['ended_by']}: {row['end_reason']}")
    elif row["for_s"] is not None:
        end = context.time(row["begun_us"] + round(row["for_s"] * 1_000_000))
        yield f"observed until {end}" + (", then promoted" if row["promote"] else "")
    yield from [printable(each) for each in found["troubles"]]
    if (comparison := found["comparison"]) is not None:
        yield ""
        yield from _comparison(comparison, out)
    if found["nodes"]:
        yield ""
        titles = ["node", "state", "applies", "allowed", "rejections", "errors", "p99"]
        yield from titled_table(titles, map(_canary_node, found["nodes"]), out)


def _comparison(found: dict[str, Any], out: Terminal) -> Iterator[str]:
    candidate, stable = found["candidate"], found["stable"]
    rows = [[name, f"{candidate[name]}", f"{stable[name]}", "", ""] for name in ("nodes", "requests")]
    for each in found["measures"]:
        values = [_measured(each["name"], each[key]) for key in ("candidate", "stable", "permitted")]
        rows.append(["latency (p99)" if each["name"] == "latency" else each["name"], *values, each["verdict"]])
    yield from titled_table([f"last {found['seconds']} s", "candidate", "other nodes", "permitted", ""], rows, out)
    yield out.paint(found["verdict"], GREEN if found["verdict"] == "within thresholds" else YELLOW)
    yield from [printable(f"  {reason}") for reason in found["reasons"]]


def _measured(name: str, value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value / 1000:.3g} ms" if name == "latency" else f"{value:.1f} %"


def _canary_node(each: dict[str, Any]) -> list[str]:
    role = each["role"] if each["role"] == each["wanted"] else f"{each['role']}, should apply {each['wanted']}"
    counts = [f"{each[name]}" for name in ("allowed", "rejections", "errors")]
    return [each["name"], each["state"], each["error"] or role, *counts, _measured("latency", each["p99_us"])]


def promote(context: CommandContext) -> int:
    """Make the candidate of the canary the policy of all nodes.

    headgate policy promote --reason "no more rejections than before"
    """
    return change(context, "POST", "policy/canary/promote")


def versions(context: CommandContext) -> int:
    """List versions, newest first.

    headgate policy versions --most 100
    """
    found = fetch_pages(context, "versions", context.arguments.most, cursor="before")
    titles = ["version", f"when ({context.zone_name})", "who", "what", "why"]

    def row(each: dict[str, Any]) -> list[str]:
        what = context.local_times(each["what"])
        return [f"{each['version']}", context.time(each["at_us"]), each["author"], what, each["reason"]]

    return context.show(found, titled_table(titles, map(row, found["items"]), context.out))


def diff(context: CommandContext) -> int:
    """Show the difference between two versions.

    headgate policy diff 12
    headgate policy diff 9 12
    """
    one, other = context.arguments.one, context.arguments.other
    one, other = (one - 1, one) if other is None else (one, other)
    found = context.api.get(build_path("versions", other) + "/diff", against=one)
    if not found["items"] and not context.arguments.json:
        context.err.print(f"No difference between versions {one} and {other}.")
    return context.show(found, _differences(found["items"], context))


def _differences(found: list[dict[str, Any]], context: CommandContext) -> Iterator[str]:
    for each in found:
        lines = (
            each["lines"] if each["section"] in ("documents", "canaries") else map(context.local_times, each["lines"])
        )
        yield context.out.paint(printable(context.local_times(each["what"])), BOLD)
        yield from _painted(lines, context.out)


def rollback(context: CommandContext) -> int:
    """Restore a version, or some sections of it; without a version, end the canary.

    headgate policy rollback --reason "the candidate rejects too much"
    headgate policy rollback 11 --reason "searches cost too much"
    headgate policy rollback 11 --section documents --reason "only the document"
    """
    if context.arguments.version is None:
        if context.arguments.section is not None:
            raise InvalidInput("--section needs the VERSION to restore it from")
        return change(context, "POST", "policy/canary/rollback")
    now = context.api.request("GET", "policy").version
    if not _preview(context, now):
        return _refused(context)
    path = build_path("versions", context.arguments.version) + "/restore"
    return change(context, "POST", path, fields={"sections": context.arguments.section}, based_on=now)


def _preview(context: CommandContext, now: int | None) -> bool:
    """Print what a rollback would change, and ask whether to continue unless --yes is given."""
    version, sections, err = context.arguments.version, context.arguments.section, context.err
    found = context.api.get(build_path("versions", version) + "/diff", against=now)["items"]
    touched = [each for each in found if sections is None or each["section"] in sections]
    err.print(err.paint(f"A rollback to version {version} changes {len(touched)} entries:", BOLD))
    err.print(*[f"  {printable(context.local_times(each['what']))}" for each in touched[:MAX_PREVIEWED]])
    if len(touched) > MAX_PREVIEWED:
        err.print(f"  and {len(touched) - MAX_PREVIEWED} more; see `headgate policy diff`")
    if any(each["section"] == "blocked" for each in touched):
        err.print("Blocks in this list are lifted or reactivated on all servers.")
    err.print("Live blocks outside the configuration are kept; `headgate block list` shows them as live.")
    if context.arguments.yes:
        return True
    if not is_interactive(context):
        raise AdminError("not a terminal: give --yes to roll back without a question", code=EXIT_REFUSED)
    return ask_yes("Roll back? Type yes: ")


def _painted(lines: Iterable[str], terminal: Terminal) -> Iterator[str]:
    styles = {"+": GREEN, "-": RED, "@": DIM}
    for line in lines:
        style = styles.get(line[:1])
        yield printable(line) if style is None else terminal.paint(printable(line), style)


def _document(file: str) -> dict[str, str]:
    """The text of a file, and its name, which determines the format."""
    return {"text": decoded(file_content(file), file), "file": Path(file).name}


_FILE = option("file", metavar="FILE", help=POLICY_FILE)

ACTIONS = {
    "show": (
        show,
        option("--version", metavar="VERSION", type=int, help="default: the current one"),
        option("--rules", action="store_true", help="print the effective limits"),
        *SERVER,
    ),
    "check": (check, _FILE, *SERVER),
    "put": (put, _FILE, *CHANGE),
    "canary": (
        canary,
        _FILE,
        option("--percent", metavar="N", type=int, help="share of the nodes, at least one of those that report"),
        option("--nodes", metavar="NAMES", help="names of nodes, separated by commas"),
        option(
            "--max-rejections",
            metavar="POINTS",
            default="5",
            help="roll back above this many percentage points more rejections; default: %(default)s",
        ),
        option(
            "--max-errors",
            metavar="POINTS",
            default="1",
            help="the same for answers of the failure mode; default: %(default)s",
        ),
        option(
            "--max-latency",
            metavar="TIMES",
            default="2",
            help="roll back above this multiple of the 99th percentile; default: %(default)s",
        ),
        option("--for", dest="duration", metavar="TIME", help="time of observation, like 10m"),
        option("--promote", action="store_true", help="promote after --for if no threshold was exceeded"),
        *CHANGE,
    ),
    "status": (status, *SERVER),
    "promote": (promote, *CHANGE),
    "versions": (
        versions,
        option("--most", metavar="N", type=int, default=20, help="show at most N; default: %(default)s"),
        *SERVER,
    ),
    "diff": (
        diff,
        option("one", metavar="VERSION", type=int, help="compared with the version before it if given alone"),
        option("other", metavar="VERSION", type=int, nargs="?", help="the newer version"),
        *SERVER,
    ),
    "rollback": (
        rollback,
        option("version", metavar="VERSION", type=int, nargs="?", help="its number from `versions`"),
        option("--yes", action="store_true", help="do not ask after the preview"),
        option("--section", choices=SECTIONS, action="append", help="restore only this; may be repeated"),
        *CHANGE,
    ),
}
