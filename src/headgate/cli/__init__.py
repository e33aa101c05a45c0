"""The `headgate` command: checks and explains policies, and operates a running fleet."""

from __future__ import annotations

import io
import json
import os
import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

import headgate
from headgate import speedups
from headgate.cli.check import EXIT_UNREADABLE
from headgate.cli.options import SECRET_FILE, Parser, add_command, read_api_key, read_secret
from headgate.cli.terminal import RED, Terminal
from headgate.errors import HeadgateError, InvalidInput
from headgate.gate.options import SECRET_VARIABLE

if TYPE_CHECKING:
    from argparse import ArgumentParser, Namespace
    from collections.abc import Sequence

__all__ = ["build_parser", "main"]

EXIT_INTERRUPTED: Final = 130
EXIT_BROKEN_PIPE: Final = 141
"""The exit codes that shells use for SIGINT and SIGPIPE."""

COMMANDS: Final = (
    "check", "explain", "replay", "suggest", "simulate", "why", "who", "override", "block", "actions", "tier", "reset",
    "tail", "top", "regions", "lists", "audit", "policy", "scripts", "ledger", "token", "admin", "serve", "completion",
)  # fmt: skip
"""The commands. The module of each has run() and OPTIONS, or ACTIONS, a table of functions with their options; the
docstrings are the help. Only the module of the command that runs is imported."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code: 0 success, 1 refused or invalid policy, 2 invalid call."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # names may contain characters that the encoding lacks
    try:
        code = _run(argv)
        sys.stdout.flush()
    except BrokenPipeError:
        return _close_stdout(EXIT_BROKEN_PIPE)
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except OSError as error:
        return _close_stdout(_print_error(f"cannot write: {error.strerror}"))
    return code


def _run(argv: Sequence[str] | None) -> int:
    try:
        words = [*(sys.argv[1:] if argv is None else argv)]
        only = words[0] if words and words[0] in (*COMMANDS, *_SIMPLE) else None
        arguments = build_parser(only=only).parse_args(words)
    except SystemExit as ended:  # argparse has printed the reason
        return int(ended.code or 0)
    try:
        code: int = arguments.run(arguments, Terminal(sys.stdout), Terminal(sys.stderr))
    except HeadgateError as error:
        return _print_error(f"{error}", code=getattr(error, "code", EXIT_UNREADABLE))
    return code


def _print_error(message: str, *, code: int = EXIT_UNREADABLE) -> int:
    err = Terminal(sys.stderr)
    err.print(f"{err.paint('headgate:', RED)} {message}")
    return code


def _close_stdout(code: int) -> int:
    """Redirect standard output to /dev/null, so that the interpreter's final flush cannot fail."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return code


def build_parser(*, only: str | None = None) -> ArgumentParser:
    """The argument parser of all commands, or of a single one, which is faster."""
    parser = Parser(
        "headgate",
        allow_abbrev=False,
        description="Check and explain rate limiting policies, and operate a running fleet.",
        epilog="`headgate COMMAND --help` shows the options and examples of a command.",
    )
    version = f"headgate {headgate.__version__} ({speedups.describe()})"
    parser.add_argument("--version", action="version", version=version)
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for name in COMMANDS:
        if only in (None, name):
            module = import_module(f"headgate.cli.{name}")
            run = getattr(module, "run", None)
            command = add_command(commands, name, run, module.__doc__, getattr(module, "OPTIONS", ()))
            if actions := getattr(module, "ACTIONS", {}):
                title, metavar = ("actions", "ACTION") if run is None else ("other actions", "")
                inner = command.add_subparsers(title=title, metavar=metavar, required=run is None)
                for action, (function, *options) in actions.items():
                    add_command(inner, action, function, function.__doc__, options)
                command.actions, command.default_action = [*actions], getattr(module, "DEFAULT_ACTION", None)
    for name, (run, *options) in _SIMPLE.items():
        if only in (None, name):
            add_command(commands, name, run, run.__doc__, options)
    return parser


def _print_schema(arguments: Namespace, out: Terminal, err: Terminal) -> int:
    """Print the JSON Schema of policies, for editors.

    headgate schema > policy.schema.json
    """
    from headgate.policy.schema import json_schema

    out.print(json.dumps(json_schema(), indent=2))
    return 0


def _hash_key(arguments: Namespace, out: Terminal, err: Terminal) -> int:
    """Print the hash of an API key, to use in policies.

    headgate hash-key --secret-file secret.txt < key.txt
    HEADGATE_SECRET=... headgate hash-key
    """
    from headgate.policy.api_keys import ApiKeyHasher

    secret = read_secret(arguments.secret_file)
    if secret is None:
        raise InvalidInput(f"no secret to hash keys with: give --secret-file, or set {SECRET_VARIABLE}, as in the app")
    out.print(ApiKeyHasher(secret).fingerprint(read_api_key()))
    return 0


def _run_demo(arguments: Namespace, out: Terminal, err: Terminal) -> int:
    """Compare the seven algorithms on the same requests.

    headgate demo
    """
    from headgate import demo

    demo.main()
    return 0


_SIMPLE: Final[dict[str, tuple[Any, ...]]] = {
    "schema": (_print_schema,),
    "hash-key": (_hash_key, SECRET_FILE),
    "demo": (_run_demo,),
}
"""The commands without a module, with their options."""
