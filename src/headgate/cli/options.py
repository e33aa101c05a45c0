"""Options that commands share, the files that they name, and the parsers of commands and actions."""

from __future__ import annotations

import os
import sys
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from getpass import getpass
from inspect import cleandoc
from pathlib import Path
from textwrap import indent
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from headgate.errors import InvalidInput
from headgate.gate.options import SECRET_VARIABLE
from headgate.policy.api_keys import LONGEST_KEY

if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import Callable, Iterable, Sequence

    from headgate.cli.terminal import Terminal

__all__ = [
    "CHANGE", "CLIENT", "CLIENT_HELP", "JSON", "POLICY_FILE", "ROLES", "SECRET_FILE", "SERVER", "Parser", "add_command",
    "option", "page_options", "read_api_key", "read_file", "read_secret",
]  # fmt: skip

Option: TypeAlias = tuple[tuple[str, ...], dict[str, Any]]


def option(*names: str, **settings: Any) -> Option:
    """An option or argument of a command; the parameters are those of `ArgumentParser.add_argument`."""
    return names, settings


CLIENT_HELP: Final = "label, tenant, user, address, hmac: hash or KIND=VALUE; - reads an API key from standard input"
POLICY_FILE: Final = "policy file: .yaml, .yml, .toml or .json"
ROLES: Final = ("viewer", "support", "operator", "admin", "check")

CLIENT: Final = option("client", metavar="CLIENT", help=CLIENT_HELP)
JSON: Final = option("--json", action="store_true", help="print JSON")
SECRET_FILE: Final = option(
    "--secret-file",
    metavar="FILE",
    help=f"file with the secret that API keys are hashed with; default: the variable {SECRET_VARIABLE}",
)
SERVER: Final = (
    option(
        "--admin",
        metavar="URL",
        help="the admin server; default: the variable HEADGATE_ADMIN, or http://127.0.0.1:8001",
    ),
    # A token is never an argument: other users could see it.
    option("--token-file", metavar="FILE", help="file with your token; default: the variable HEADGATE_TOKEN"),
    JSON,
    option("--utc", action="store_true", help="use UTC instead of the local time zone"),
)
"""The options of commands that talk to an admin server. Such a command runs with a `CommandContext`."""
CHANGE: Final = (
    option("--reason", metavar="TEXT", help="reason for the audit log; every change needs one"),
    option(
        "--confirm",
        metavar="DANGER",
        action="append",
        help="confirm a dangerous change: ten-times, tenth, ...; may be repeated",
    ),
    option(
        "--based-on", metavar="VERSION", type=int, help="refuse the change if its subject has changed since VERSION"
    ),
    *SERVER,
)


def page_options(most: int) -> tuple[Option, ...]:
    return (
        option("--search", metavar="TEXT", help="show only entries that contain TEXT"),
        option("--most", metavar="N", type=int, default=most, help="show at most N; default: %(default)s"),
        *SERVER,
    )


class Parser(ArgumentParser):
    """A parser with an optional default action: `headgate block acme` is `headgate block add acme`."""

    default_action: str | None = None
    actions: Sequence[str] = ()

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        if self.default_action is not None and args and args[0] not in (*self.actions, "-h", "--help"):
            args = [self.default_action, *args]
        return super().parse_known_args(args, namespace)


def add_command(
    parsers: Any, name: str, run: Callable[..., int] | None, doc: str | None, options: Iterable[Option] = ()
) -> Parser:
    """Add a command or an action. Its docstring is its help: a sentence, and examples."""
    about, _, examples = cleandoc(doc or "").partition("\n\n")
    parser: Parser = parsers.add_parser(
        name,
        help=about[:1].lower() + about[1:].removesuffix("."),
        description=about,
        epilog=f"examples:\n{indent(examples, '  ')}",
        formatter_class=RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    options = tuple(options)
    for names, settings in options:
        parser.add_argument(*names, **settings)
    parser.set_defaults(run=_run_with_server(run) if run is not None and SERVER[0] in options else run)
    return parser


def _run_with_server(run: Callable[..., int]) -> Callable[[Namespace, Terminal, Terminal], int]:
    def open_and_run(arguments: Namespace, out: Terminal, err: Terminal) -> int:
        from headgate.cli.context import CommandContext

        return run(CommandContext(arguments, out, err))

    return open_and_run


def read_secret(file: str | None) -> bytes | None:
    """The secret that API keys are hashed with: from the file, else from the variable, else None."""
    if file is None:
        return os.environ.get(SECRET_VARIABLE, "").encode() or None
    return read_file("--secret-file", file)


def read_file(option: str, file: str) -> bytes:
    """The content of an option's file, without the final line end."""
    try:
        return Path(file).read_bytes().removesuffix(b"\n").removesuffix(b"\r")
    except OSError as error:
        raise InvalidInput(f"{option} {file}: cannot be read: {error.strerror}") from None


def read_api_key() -> str:
    """The API key on the first line of standard input; not echoed at a terminal."""
    if sys.stdin.isatty():
        try:
            return getpass("API key: ")
        except EOFError:
            return ""
    return sys.stdin.buffer.readline(2 * LONGEST_KEY).decode("ascii", "replace").rstrip("\r\n")
