"""`headgate`: check and explain policies before they meet a request."""

from __future__ import annotations

import io
import json
import os
import sys
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from getpass import getpass
from textwrap import dedent, indent
from typing import TYPE_CHECKING, Final

import headgate
from headgate.adapters.door import SECRET_VARIABLE
from headgate.cli import check, explain, why
from headgate.cli.request import given_secret
from headgate.cli.screen import BAD, Screen
from headgate.errors import HeadgateError, InvalidInput
from headgate.policy.credentials import LONGEST_KEY, ApiKeys
from headgate.policy.model import IdentitySettings
from headgate.policy.schema import json_schema

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = ["main"]

INTERRUPTED: Final = 130
UNHEARD: Final = 141
"""Exit codes, as shells give them for what a signal ends: SIGINT, SIGPIPE."""


def main(argv: Sequence[str] | None = None) -> int:
    """Carry out a command; its exit code: 0 for good, 1 for mistakes in a policy, 2 for a call that cannot be."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # a name must not fail where its letters are unknown
    try:
        code = _run(argv)
        sys.stdout.flush()
    except BrokenPipeError:
        return _hushed(UNHEARD)
    except KeyboardInterrupt:
        return INTERRUPTED
    except OSError as error:
        return _hushed(_complain(f"cannot write: {error.strerror}"))
    return code


def _run(argv: Sequence[str] | None) -> int:
    try:
        arguments = _parser().parse_args(argv)
    except SystemExit as ended:  # argparse has said all there is to say
        return int(ended.code or 0)
    try:
        code: int = arguments.run(arguments, Screen(sys.stdout), Screen(sys.stderr))
    except HeadgateError as error:
        return _complain(f"{error}")
    return code


def _complain(what: str) -> int:
    screen = Screen(sys.stderr)
    screen.say(f"{screen.paint('headgate:', BAD)} {what}")
    return check.UNREADABLE


def _hushed(code: int) -> int:
    """The same code, once the interpreter's own last flush has nowhere to fail."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return code


# ------------------------------------------------------------------ commands


def _check(arguments: Namespace, out: Screen, err: Screen) -> int:
    return check.check(arguments.files, out, err, strict=arguments.strict, as_json=arguments.json)


def _schema(arguments: Namespace, out: Screen, err: Screen) -> int:
    out.say(json.dumps(json_schema(), indent=2))
    return 0


def _hash_key(arguments: Namespace, out: Screen, err: Screen) -> int:
    secret = given_secret(arguments.secret_file)
    if secret is None:
        raise InvalidInput(
            f"there is no secret to hash keys with: give --secret-file, or set {SECRET_VARIABLE}, to the app's own"
        )
    api_keys = ApiKeys(IdentitySettings(), secret)
    out.say(api_keys.fingerprint(_read_key()))
    return 0


def _read_key() -> str:
    """The key that stands on the first line of the input; at a terminal it is not echoed."""
    if sys.stdin.isatty():
        try:
            return getpass("API key: ")
        except EOFError:
            return ""
    return sys.stdin.buffer.readline(2 * LONGEST_KEY).decode("ascii", "replace").rstrip("\r\n")


def _demo(arguments: Namespace, out: Screen, err: Screen) -> int:
    from headgate import demo

    demo.main()
    return 0


# ------------------------------------------------------------------ arguments


def _parser() -> ArgumentParser:
    parser = ArgumentParser(
        "headgate",
        allow_abbrev=False,
        description="Check and explain rate limiting policies before they meet a request.",
        epilog="`headgate COMMAND --help` shows each command with examples.",
    )
    parser.add_argument("--version", action="version", version=f"headgate {headgate.__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)

    def command(
        name: str, run: Callable[[Namespace, Screen, Screen], int], about: str, examples: str
    ) -> ArgumentParser:
        made = commands.add_parser(
            name,
            help=about,
            description=f"{about[0].upper()}{about[1:]}.",
            epilog=f"examples:\n{indent(dedent(examples).strip(), '  ')}",
            formatter_class=RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        made.set_defaults(run=run)
        return made

    checking = command(
        "check",
        _check,
        "tell whether policy files are good, and where they are not",
        """
        headgate check policy.yaml
        headgate check --strict policies/*.yaml
        headgate check --json policy.yaml

        exit code: 0 all are good, 1 mistakes in a policy, 2 a file cannot be read
        """,
    )
    checking.add_argument("files", nargs="+", metavar="FILE", help="a policy: .yaml, .yml, .toml or .json")
    checking.add_argument("--strict", action="store_true", help="warnings are mistakes, too")
    checking.add_argument("--json", action="store_true", help="a list for programs")

    explaining = command(
        "explain",
        explain.run,
        "show which limits a request would meet, and why",
        """
        headgate explain policy.yaml GET /api/v1/search --ip 203.0.113.9 --tenant acme
        headgate explain policy.yaml POST /login --user ada --at 2026-05-28T02:00:00Z
        headgate explain policy.yaml GET / --identity device=4711 --json

        exit code: 0 here is the answer, 1 mistakes in the policy,
        2 a question that cannot be asked
        """,
    )
    explaining.add_argument("file", metavar="FILE", help="a policy: .yaml, .yml, .toml or .json")
    explaining.add_argument("method", metavar="METHOD", help="GET, POST, ...")
    explaining.add_argument("path", metavar="PATH", help="the target of the request; what follows ? is ignored")
    explaining.add_argument("--ip", metavar="ADDRESS", help="the client's address; unknown, if not given")
    explaining.add_argument("--user", metavar="USER", help="who the app says it is")
    explaining.add_argument("--tenant", metavar="TENANT", help="whom the app says it belongs to")
    explaining.add_argument("--api-key", metavar="KEY", help="its API key, or better hmac: and the key's hash")
    explaining.add_argument(
        "--identity", metavar="KIND=VALUE", action="append", default=[], help="any other identity; may be repeated"
    )
    explaining.add_argument("--tier", metavar="TIER", help="the tier that the app says it is in")
    explaining.add_argument("--at", metavar="TIME", help="when: 2026-05-28T02:01:00Z; now, if not given")
    explaining.add_argument("--json", action="store_true", help="an object for programs")
    _add_secret(explaining)
    asking = command("why", why.run, why.ABOUT, why.EXAMPLES)
    why.add_arguments(asking)
    _add_secret(asking)

    command("schema", _schema, "print the JSON Schema of policies, for editors", "headgate schema > policy.schema.json")

    hashing = command(
        "hash-key",
        _hash_key,
        "print the hash of an API key, to name it by in policies",
        """
        headgate hash-key --secret-file secret.txt < key.txt
        HEADGATE_SECRET=... headgate hash-key
        """,
    )
    _add_secret(hashing)

    command("demo", _demo, "let the seven algorithms answer the same requests, side by side", "headgate demo")
    return parser


def _add_secret(parser: ArgumentParser) -> None:
    told = f"holds what API keys are hashed with; the variable {SECRET_VARIABLE}, if not given"
    parser.add_argument("--secret-file", metavar="FILE", help=told)
