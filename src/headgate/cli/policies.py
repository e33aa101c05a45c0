"""`headgate policy`: the policy document in the config store, and its versions."""

from __future__ import annotations

from difflib import unified_diff
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from headgate.cli.admin_client import EXIT_REFUSED, AdminError, build_path
from headgate.cli.context import ask_yes, change, fetch_pages, is_interactive, print_json
from headgate.cli.options import EXIT_CODES, POLICY_FILE, Actions, add_change_options, add_server_options
from headgate.cli.table import titled_table
from headgate.cli.terminal import BOLD, DIM, GREEN, RED, printable
from headgate.errors import InvalidInput
from headgate.policy.loader import decoded, file_content

if TYPE_CHECKING:
    from argparse import ArgumentParser, Namespace
    from collections.abc import Iterable, Iterator

    from headgate.cli.context import CommandContext
    from headgate.cli.terminal import Terminal

__all__ = ["ABOUT", "EXAMPLES", "add_arguments"]

ABOUT = "show, check, change and roll back the policy of the fleet"
EXAMPLES = f"""
    headgate policy show > policy.yaml
    headgate policy check policy.yaml
    headgate policy put policy.yaml --based-on 12 --reason "searches cost 5"
    headgate policy versions
    headgate policy diff 11 12
    headgate policy rollback 11 --reason "searches cost too much"
{EXIT_CODES}"""

MAX_PREVIEWED: Final = 50
SECTIONS: Final = ("documents", "tiers", "routes", "clients", "overrides", "blocked")


def add_arguments(parser: ArgumentParser) -> None:
    actions = Actions(parser)
    showing = actions.add(
        "show",
        show,
        "print the policy document",
        """
        headgate policy show > policy.yaml
        headgate policy show --version 11
        headgate policy show --rules
        """,
    )
    showing.add_argument("--version", metavar="VERSION", type=int, help="default: the current one")
    showing.add_argument("--rules", action="store_true", help="print the effective limits")
    add_server_options(showing)

    checking = actions.add(
        "check", check, "check a policy document without changing anything", "headgate policy check policy.yaml"
    )
    checking.add_argument("file", metavar="FILE", help=POLICY_FILE)
    add_server_options(checking)

    putting = actions.add(
        "put",
        put,
        "replace the policy document",
        """
        headgate policy put policy.yaml --based-on 12 --reason "searches cost 5"

        --based-on is the version that `headgate policy show` printed: the change is
        refused if others have changed the policy since. Without it, a terminal
        shows a diff and asks.
        """,
    )
    putting.add_argument("file", metavar="FILE", help=POLICY_FILE)
    add_change_options(putting)

    listing = actions.add("versions", versions, "list versions, newest first", "headgate policy versions --most 100")
    listing.add_argument("--most", metavar="N", type=int, default=20, help="show at most N; default: %(default)s")
    add_server_options(listing)

    comparing = actions.add(
        "diff", diff, "show the difference between two versions", "headgate policy diff 12\nheadgate policy diff 9 12"
    )
    comparing.add_argument(
        "one", metavar="VERSION", type=int, help="compared with the version before it if given alone"
    )
    comparing.add_argument("other", metavar="VERSION", type=int, nargs="?", help="the newer version")
    add_server_options(comparing)

    returning = actions.add(
        "rollback",
        rollback,
        "restore a version, or some sections of it",
        """
        headgate policy rollback 11 --reason "searches cost too much"
        headgate policy rollback 11 --section documents --reason "only the document"
        """,
    )
    returning.add_argument("version", metavar="VERSION", type=int, help="its number from `versions`")
    returning.add_argument("--yes", action="store_true", help="do not ask after the preview")
    returning.add_argument("--section", choices=SECTIONS, action="append", help="restore only this; may be repeated")
    add_change_options(returning)


def show(arguments: Namespace, context: CommandContext) -> int:
    found = context.api.get("policy", version=arguments.version)
    if arguments.json:
        return print_json(context, found)
    if arguments.rules:
        context.out.print(*_rules(found, context.out))
        return 0
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


def check(arguments: Namespace, context: CommandContext) -> int:
    text, name = _document(arguments.file)
    found = context.api.request("POST", "policy/check", body={"text": text, "file": name}).body
    problems = found["problems"]
    if arguments.json:
        print_json(context, found)
    elif not problems:
        context.out.print(f"{arguments.file}: {context.out.paint('valid', GREEN)}")
    for each in () if arguments.json else problems:
        context.err.print(printable(f"{each}"))
    return EXIT_REFUSED if problems else 0


def put(arguments: Namespace, context: CommandContext) -> int:
    text, name = _document(arguments.file)
    based_on = arguments.based_on
    if based_on is None:
        based_on = _confirmed_version(context, text)
        if based_on is None:
            context.err.print("Nothing was changed.")
            return EXIT_REFUSED
    return change(arguments, context, "PUT", "policy", fields={"text": text, "file": name}, based_on=based_on)


def _confirmed_version(context: CommandContext, text: str) -> int | None:
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
    return version if ask_yes("Replace the policy? Type yes: ") else None


def versions(arguments: Namespace, context: CommandContext) -> int:
    found = fetch_pages(context, "versions", arguments.most, cursor="before")
    if arguments.json:
        return print_json(context, found)
    rows = [
        [
            f"{each['version']}",
            context.time(each["at_us"]),
            each["author"],
            context.local_times(each["what"]),
            each["reason"],
        ]
        for each in found["items"]
    ]
    context.out.print(
        *titled_table(["version", f"when ({context.zone_name})", "who", "what", "why"], rows, context.out)
    )
    return 0


def diff(arguments: Namespace, context: CommandContext) -> int:
    one, other = (arguments.one - 1, arguments.one) if arguments.other is None else (arguments.one, arguments.other)
    found = context.api.get(build_path("versions", other) + "/diff", against=one)
    if arguments.json:
        return print_json(context, found)
    if not found["items"]:
        context.err.print(f"No difference between versions {one} and {other}.")
    for each in found["items"]:
        lines = each["lines"] if each["section"] == "documents" else map(context.local_times, each["lines"])
        title = context.out.paint(printable(context.local_times(each["what"])), BOLD)
        context.out.print(title, *_painted(lines, context.out))
    return 0


def rollback(arguments: Namespace, context: CommandContext) -> int:
    now = context.api.request("GET", "policy").version
    if not _preview(arguments, context, now):
        context.err.print("Nothing was changed.")
        return EXIT_REFUSED
    path = build_path("versions", arguments.version) + "/restore"
    return change(arguments, context, "POST", path, fields={"sections": arguments.section}, based_on=now)


def _preview(arguments: Namespace, context: CommandContext, now: int | None) -> bool:
    """Print what a rollback would change, and ask whether to continue unless --yes is given."""
    found = context.api.get(build_path("versions", arguments.version) + "/diff", against=now)["items"]
    touched = [each for each in found if arguments.section is None or each["section"] in arguments.section]
    title = f"A rollback to version {arguments.version} changes {len(touched)} entries:"
    context.err.print(context.err.paint(title, BOLD))
    for each in touched[:MAX_PREVIEWED]:
        context.err.print(f"  {printable(context.local_times(each['what']))}")
    if len(touched) > MAX_PREVIEWED:
        context.err.print(f"  and {len(touched) - MAX_PREVIEWED} more; see `headgate policy diff`")
    if any(each["section"] == "blocked" for each in touched):
        context.err.print("Blocks in this list are lifted or reactivated on all servers.")
    context.err.print("Live blocks outside the configuration are kept; `headgate block list` shows them as live.")
    if arguments.yes:
        return True
    if not is_interactive(context):
        raise AdminError("not a terminal: give --yes to roll back without a question", code=EXIT_REFUSED)
    return ask_yes("Roll back? Type yes: ")


def _painted(lines: Iterable[str], terminal: Terminal) -> Iterator[str]:
    styles = {"+": GREEN, "-": RED, "@": DIM}
    for line in lines:
        style = styles.get(line[:1])
        yield printable(line) if style is None else terminal.paint(printable(line), style)


def _document(file: str) -> tuple[str, str]:
    """The text of a file, and its name, which determines the format."""
    return decoded(file_content(file), file), Path(file).name
