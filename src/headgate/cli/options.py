"""Building blocks of commands: descriptions, subcommands, and options that several commands share."""

from __future__ import annotations

from argparse import ArgumentParser, RawDescriptionHelpFormatter
from textwrap import dedent, indent
from typing import TYPE_CHECKING, Any, Final

from headgate.gate.base import SECRET_VARIABLE

if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import Callable, Sequence

    from headgate.cli.context import CommandContext
    from headgate.cli.terminal import Terminal

__all__ = [
    "CLIENT",
    "EXIT_CODES",
    "POLICY_FILE",
    "ROLES",
    "Actions",
    "Parser",
    "add_change_options",
    "add_json_option",
    "add_page_options",
    "add_secret_option",
    "add_server_options",
    "describe",
]

CLIENT: Final = "label, tenant, user, address, hmac: hash or KIND=VALUE; - reads an API key from standard input"
POLICY_FILE: Final = "policy file: .yaml, .yml, .toml or .json"
ROLES: Final = ("viewer", "support", "operator", "admin")
EXIT_CODES: Final = """
    exit code: 0 done, 1 refused, 2 invalid call or no answer, 3 needs --confirm
"""


class Parser(ArgumentParser):
    """A parser with an optional default action: `headgate block acme` is `headgate block add acme`."""

    default_action: str | None = None
    actions: Sequence[str] = ()

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        if self.default_action is not None and args and args[0] not in (*self.actions, "-h", "--help"):
            args = [self.default_action, *args]
        return super().parse_known_args(args, namespace)


class Actions:
    """The actions of a command that talks to an admin server, such as `headgate override add`."""

    def __init__(self, parser: ArgumentParser, *, default: str | None = None) -> None:
        self._parsers = parser.add_subparsers(title="actions", metavar="ACTION", required=True)
        if isinstance(parser, Parser):
            parser.default_action = default
            parser.actions = self._parsers.choices.keys()  # type: ignore[assignment] # a view: includes later actions

    def add(
        self, name: str, run: Callable[[Namespace, CommandContext], int], about: str, examples: str
    ) -> ArgumentParser:
        def open_and_run(arguments: Namespace, out: Terminal, err: Terminal) -> int:
            from headgate.cli.context import open_context

            return run(arguments, open_context(arguments, out, err))

        parser: ArgumentParser = self._parsers.add_parser(name, **describe(about, examples))
        parser.set_defaults(run=open_and_run)
        return parser


def describe(about: str, examples: str) -> dict[str, Any]:
    """The arguments of `add_parser` that describe a command."""
    return {
        "help": about,
        "description": f"{about[0].upper()}{about[1:]}.",
        "epilog": f"examples:\n{indent(dedent(examples).strip(), '  ')}",
        "formatter_class": RawDescriptionHelpFormatter,
        "allow_abbrev": False,
    }


def add_secret_option(parser: ArgumentParser) -> None:
    about = f"file with the secret that API keys are hashed with; default: the variable {SECRET_VARIABLE}"
    parser.add_argument("--secret-file", metavar="FILE", help=about)


def add_json_option(parser: ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON")


def add_server_options(parser: ArgumentParser) -> None:
    """The admin server and the token. A token is never an argument: other users could see it."""
    parser.add_argument(
        "--admin",
        metavar="URL",
        help="the admin server; default: the variable HEADGATE_ADMIN, or http://127.0.0.1:8001",
    )
    parser.add_argument(
        "--token-file", metavar="FILE", help="file with your token; default: the variable HEADGATE_TOKEN"
    )
    add_json_option(parser)
    parser.add_argument("--utc", action="store_true", help="use UTC instead of the local time zone")


def add_change_options(parser: ArgumentParser) -> None:
    parser.add_argument("--reason", metavar="TEXT", help="reason for the audit log; every change needs one")
    parser.add_argument(
        "--confirm",
        metavar="DANGER",
        action="append",
        help="confirm a dangerous change: ten-times, tenth, ...; may be repeated",
    )
    parser.add_argument(
        "--based-on", metavar="VERSION", type=int, help="refuse the change if its subject has changed since VERSION"
    )
    add_server_options(parser)


def add_page_options(parser: ArgumentParser, *, most: int = 50) -> None:
    parser.add_argument("--search", metavar="TEXT", help="show only entries that contain TEXT")
    parser.add_argument("--most", metavar="N", type=int, default=most, help="show at most N; default: %(default)s")
