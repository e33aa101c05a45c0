"""What commands are made of: how they are described, and the options that several of them have."""

from __future__ import annotations

from argparse import ArgumentParser, RawDescriptionHelpFormatter
from textwrap import dedent, indent
from typing import TYPE_CHECKING, Any, Final

from headgate.gate.base import SECRET_VARIABLE

if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import Callable, Sequence

    from headgate.cli.terminal import Terminal

__all__ = [
    "CLIENT",
    "Actions",
    "Parser",
    "add_change",
    "add_json",
    "add_page",
    "add_secret",
    "add_server",
    "add_utc",
    "described",
]

CLIENT: Final = "its label, tenant, user, address or hmac: hash, or KIND=VALUE; - reads an API key from the input"

EXIT_CODES: Final = """
    exit code: 0 done, 1 refused, 2 it cannot be asked, 3 it needs --confirm
"""


class Parser(ArgumentParser):
    """A parser of which one action may be left out: `headgate block acme` is `headgate block add acme`."""

    implied: str | None = None
    actions: Sequence[str] = ()

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        if self.implied is not None and args and args[0] not in (*self.actions, "-h", "--help"):
            args = [self.implied, *args]
        return super().parse_known_args(args, namespace)


class Actions:
    """The actions of a command, as in `headgate override add`."""

    def __init__(self, parser: ArgumentParser, *, implied: str | None = None) -> None:
        self._parsers = parser.add_subparsers(title="actions", metavar="ACTION", required=True)
        if isinstance(parser, Parser):
            parser.implied = implied
            parser.actions = self._parsers.choices.keys()  # type: ignore[assignment] # a view, which sees those to come

    def add(
        self, name: str, run: Callable[[Namespace, Terminal, Terminal], int], about: str, examples: str
    ) -> ArgumentParser:
        made: ArgumentParser = self._parsers.add_parser(name, **described(about, examples))
        made.set_defaults(run=run)
        return made


def described(about: str, examples: str) -> dict[str, Any]:
    """How a command introduces itself."""
    return {
        "help": about,
        "description": f"{about[0].upper()}{about[1:]}.",
        "epilog": f"examples:\n{indent(dedent(examples).strip(), '  ')}",
        "formatter_class": RawDescriptionHelpFormatter,
        "allow_abbrev": False,
    }


def add_secret(parser: ArgumentParser) -> None:
    told = f"holds what API keys are hashed with; the variable {SECRET_VARIABLE}, if not given"
    parser.add_argument("--secret-file", metavar="FILE", help=told)


def add_json(parser: ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="an object for programs")


def add_utc(parser: ArgumentParser) -> None:
    parser.add_argument("--utc", action="store_true", help="times are UTC, not of this machine's zone")


def add_server(parser: ArgumentParser) -> None:
    """Which admin server is asked, and with which token, which is never an argument: arguments are seen by others."""
    parser.add_argument(
        "--admin",
        metavar="URL",
        help="the admin server; the variable HEADGATE_ADMIN, if not given, or http://127.0.0.1:8001",
    )
    parser.add_argument(
        "--token-file", metavar="FILE", help="holds your token; the variable HEADGATE_TOKEN, if not given"
    )
    add_json(parser)
    add_utc(parser)


def add_change(parser: ArgumentParser) -> None:
    """What every change takes."""
    parser.add_argument("--reason", metavar="TEXT", help="why, for those who look at it later; every change needs one")
    parser.add_argument(
        "--confirm",
        metavar="DANGER",
        action="append",
        help="what is dangerous here and yet meant: ten-times, tenth, ...",
    )
    parser.add_argument(
        "--based-on", metavar="VERSION", type=int, help="refuse, if the same has changed since this version"
    )
    add_server(parser)


def add_page(parser: ArgumentParser, *, most: int = 50) -> None:
    parser.add_argument("--search", metavar="TEXT", help="only what has this in it")
    parser.add_argument("--most", metavar="N", type=int, default=most, help=f"so many at most; {most}, if not given")
