"""`headgate policy`: the document of the config store, with its versions."""

from __future__ import annotations

import sys
from difflib import unified_diff
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from headgate.cli.admin_client import REFUSED, AdminError, path_of
from headgate.cli.context import as_json, asked, change, opened, paged, titled
from headgate.cli.options import EXIT_CODES, Actions, add_change, add_server
from headgate.cli.terminal import BAD, BOLD, DIM, GOOD, printable
from headgate.errors import InvalidInput
from headgate.policy.loader import decoded, file_content

if TYPE_CHECKING:
    from argparse import ArgumentParser, Namespace
    from collections.abc import Iterable, Iterator

    from headgate.cli.context import CommandContext
    from headgate.cli.terminal import Terminal

__all__ = ["ABOUT", "EXAMPLES", "add_arguments", "run"]

ABOUT = "show, check and change the policy that the fleet follows, and go back"
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
    showing.add_argument("--version", metavar="VERSION", type=int, help="as it was then; now, if not given")
    showing.add_argument("--rules", action="store_true", help="what it comes to, with all that the tables add")
    add_server(showing)

    checking = actions.add(
        "check", check, "tell whether a document could be put, and change nothing", "headgate policy check policy.yaml"
    )
    checking.add_argument("file", metavar="FILE", help="a policy: .yaml, .yml, .toml or .json")
    add_server(checking)

    putting = actions.add(
        "put",
        put,
        "take another policy document",
        """
        headgate policy put policy.yaml --based-on 12 --reason "searches cost 5"

        --based-on is the version that `headgate policy show` told: what others have
        changed since then is not lost. Without it, you are shown what would change.
        """,
    )
    putting.add_argument("file", metavar="FILE", help="a policy: .yaml, .yml, .toml or .json")
    add_change(putting)

    listing = actions.add(
        "versions", versions, "list versions, the newest first", "headgate policy versions --most 100"
    )
    listing.add_argument("--most", metavar="N", type=int, default=20, help="so many at most; 20, if not given")
    add_server(listing)

    comparing = actions.add(
        "diff", diff, "show what is different in a version", "headgate policy diff 12\nheadgate policy diff 9 12"
    )
    comparing.add_argument("one", metavar="VERSION", type=int, help="against the one before it, if it is alone")
    comparing.add_argument("other", metavar="VERSION", type=int, nargs="?", help="what became of it")
    add_server(comparing)

    returning = actions.add(
        "rollback",
        rollback,
        "undo what was changed since a version, or only some of it",
        """
        headgate policy rollback 11 --reason "searches cost too much"
        headgate policy rollback 11 --section documents --reason "only the document"
        """,
    )
    returning.add_argument("version", metavar="VERSION", type=int, help="which versions shows")
    returning.add_argument("--yes", action="store_true", help="do it without asking, after the preview")
    returning.add_argument("--section", choices=SECTIONS, action="append", help="only this; may be repeated")
    add_change(returning)


def run(arguments: Namespace, out: Terminal, err: Terminal) -> int:
    raise InvalidInput("say what to do: show, check, put, versions, diff or rollback")


def show(arguments: Namespace, out: Terminal, err: Terminal) -> int:
    desk = opened(arguments, out, err)
    found = desk.api.get("policy", version=arguments.version)
    if arguments.json:
        return as_json(desk, found)
    if arguments.rules:
        out.say(*_rules(found, out))
        return 0
    out.write(found["text"])
    if out.is_terminal and not found["text"].endswith("\n"):
        out.say("")
    name = printable(found["name"]) if found.get("since") is not None else "There is no document yet"
    err.say(
        f"{name} at version {found['version']}; to change it: "
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
    yield from titled(["limit", "allows", "counted by", "where", "tiers"], rows, out)


def check(arguments: Namespace, out: Terminal, err: Terminal) -> int:
    desk = opened(arguments, out, err)
    text, name = _document(arguments.file)
    found = desk.api.ask("POST", "policy/check", body={"text": text, "file": name}).body
    problems = found["problems"]
    if arguments.json:
        as_json(desk, found)
    elif not problems:
        out.say(f"{arguments.file}: {out.paint('good', GOOD)}")
    for each in () if arguments.json else problems:
        err.say(printable(f"{each}"))
    return REFUSED if problems else 0


def put(arguments: Namespace, out: Terminal, err: Terminal) -> int:
    desk = opened(arguments, out, err)
    text, name = _document(arguments.file)
    based_on = arguments.based_on
    if based_on is None:
        based_on = _looked_at(desk, text)
        if based_on is None:
            err.say("Nothing was changed.")
            return REFUSED
    return change(arguments, desk, "PUT", "policy", fields={"text": text, "file": name}, based_on=based_on)


def _looked_at(desk: CommandContext, text: str) -> int | None:
    """The version that is in force, once the change to it is confirmed; None, if it is not."""
    found = desk.api.get("policy")
    if not found["version"]:
        return 0  # nothing was ever saved, so that there is nothing to lose
    if not (sys.stdin.isatty() and desk.err.is_terminal):
        raise InvalidInput(
            "say which version this document is made from, so that nothing is lost that others have changed: "
            "--based-on VERSION, which `headgate policy show` tells"
        )
    lines = unified_diff(found["text"].splitlines(), text.splitlines(), "now", "then", lineterm="", n=2)
    desk.err.say(*_painted(lines, desk.err))
    version: int = found["version"]
    return version if asked(desk, "Is that meant? Type yes: ") else None


def versions(arguments: Namespace, out: Terminal, err: Terminal) -> int:
    desk = opened(arguments, out, err)
    found = paged(desk, "versions", arguments.most, cursor="before")
    if arguments.json:
        return as_json(desk, found)
    rows = [
        [
            f"{each['version']}",
            desk.time(each["at_us"]),
            each["author"],
            desk.local_times(each["what"]),
            each["reason"],
        ]
        for each in found["items"]
    ]
    out.say(*titled(["version", f"when ({desk.zone_name})", "who", "what", "why"], rows, out))
    return 0


def diff(arguments: Namespace, out: Terminal, err: Terminal) -> int:
    desk = opened(arguments, out, err)
    one, other = (arguments.one - 1, arguments.one) if arguments.other is None else (arguments.one, arguments.other)
    found = desk.api.get(path_of("versions", other) + "/diff", against=one)
    if arguments.json:
        return as_json(desk, found)
    if not found["items"]:
        err.say(f"Nothing is different between versions {one} and {other}.")
    for each in found["items"]:
        lines = each["lines"] if each["section"] == "documents" else map(desk.local_times, each["lines"])
        out.say(out.paint(printable(desk.local_times(each["what"])), BOLD), *_painted(lines, out))
    return 0


def rollback(arguments: Namespace, out: Terminal, err: Terminal) -> int:
    desk = opened(arguments, out, err)
    now = desk.api.ask("GET", "policy").version
    if not _previewed(arguments, desk, now):
        err.say("Nothing was changed.")
        return REFUSED
    path = path_of("versions", arguments.version) + "/restore"
    return change(arguments, desk, "POST", path, fields={"sections": arguments.section}, based_on=now)


def _previewed(arguments: Namespace, desk: CommandContext, now: int | None) -> bool:
    """Show everything that a rollback changes, and ask whether to go on; --yes answers that before."""
    found = desk.api.get(path_of("versions", arguments.version) + "/diff", against=now)["items"]
    touched = [each for each in found if arguments.section is None or each["section"] in arguments.section]
    desk.err.say(desk.err.paint(f"A rollback to version {arguments.version} changes {len(touched)} entries:", BOLD))
    for each in touched[:MAX_PREVIEWED]:
        desk.err.say(f"  {printable(desk.local_times(each['what']))}")
    if len(touched) > MAX_PREVIEWED:
        desk.err.say(f"  and {len(touched) - MAX_PREVIEWED} more; `headgate policy diff` shows all of them")
    if any(each["section"] == "blocked" for each in touched):
        desk.err.say("Blocks in this list are lifted, or active again, on all servers.")
    desk.err.say("Live blocks outside the configuration are kept: `headgate block list` shows them as live.")
    if arguments.yes:
        return True
    if not (sys.stdin.isatty() and desk.err.is_terminal):
        raise AdminError("nobody can be asked here: give --yes to roll back without a question", code=REFUSED)
    return asked(desk, "Roll back? Type yes: ")


def _painted(lines: Iterable[str], screen: Terminal) -> Iterator[str]:
    styles = {"+": GOOD, "-": BAD, "@": DIM}
    for line in lines:
        style = styles.get(line[:1])
        yield printable(line) if style is None else screen.paint(printable(line), style)


def _document(file: str) -> tuple[str, str]:
    """The text of a file, and its name, which tells the format."""
    return decoded(file_content(file), file), Path(file).name
