"""`headgate admin`: the admin server, and tokens for it."""

from __future__ import annotations

import getpass
import logging
import os
import signal
import tempfile
from argparse import SUPPRESS
from contextlib import ExitStack, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from headgate.cli.request import given_secret
from headgate.cli.terminal import BOLD, ODD
from headgate.errors import InvalidInput

if TYPE_CHECKING:
    from argparse import ArgumentParser, Namespace

    from headgate.cli.terminal import Terminal
    from headgate.control.admin import Token

__all__ = ["ABOUT", "EXAMPLES", "add_arguments", "run"]

ABOUT = "serve the admin API and its pages, on a port of its own"
EXAMPLES = """
    headgate admin --config sqlite:///headgate.db --store redis://127.0.0.1:6379/0
    headgate admin --config postgresql://db/headgate --log sqlite:///decisions.db --port 8001
    headgate admin --host 0.0.0.0 --cert cert.pem --key key.pem --name admin.example.org
    headgate admin token ada --role support --days 30 --config sqlite:///headgate.db

    The first start prints a token, once, if the output is a terminal. If not,
    it writes the token to a private file and prints the path. If all tokens are
    lost, create another with access to the config store, as in the last example.

    exit code: 0 ended by a signal, 2 it cannot be started so
"""

CONFIG: Final = "sqlite:///headgate.db"
ROLES: Final = ("viewer", "support", "operator", "admin")


def add_arguments(parser: ArgumentParser) -> None:
    """All but --secret-file."""
    _add_config(parser, CONFIG)
    parser.add_argument(
        "--store", metavar="URL", help="where requests are counted, as the gates have it; without it usage is unknown"
    )
    parser.add_argument(
        "--log",
        metavar="URL",
        help="the decision log: sqlite:///decisions.db, clickhouse://host/database; beside --config, if that is SQLite",
    )
    parser.add_argument("--namespace", default="headgate", help="what names in the store begin with; %(default)s")
    parser.add_argument("--host", default="127.0.0.1", help="the address to listen on; %(default)s")
    parser.add_argument("--port", type=int, default=8001, help="%(default)s")
    parser.add_argument(
        "--name", action="append", default=[], help="what browsers call the server, beside --host; may be repeated"
    )
    parser.add_argument("--cert", metavar="FILE", help="a certificate, to speak TLS; with --key")
    parser.add_argument("--key", metavar="FILE", help="its key")
    parser.add_argument("--behind-tls", action="store_true", help="a proxy that speaks TLS stands before this server")
    parser.add_argument(
        "--proxy",
        metavar="NETWORK",
        action="append",
        default=[],
        help="a proxy whose X-Forwarded-For says whose address a request is from; may be repeated",
    )
    parser.add_argument("--webhook", metavar="URL", help="is told when a client does ten times what it usually does")
    parser.add_argument("--webhook-secret-file", metavar="FILE", help="holds what these messages are signed with")
    parser.set_defaults(command_of_admin=None)
    commands = parser.add_subparsers(title="instead of serving", metavar="")
    token = commands.add_parser(
        "token",
        help="make a token, directly in the config store",
        description="Make a token, directly in the config store: for whoever has it, also without any other token.",
        allow_abbrev=False,
    )
    token.add_argument("token_name", metavar="NAME", help="of the person or program that it is for")
    token.add_argument("--role", choices=ROLES, required=True, help="what it may do")
    token.add_argument("--days", type=int, default=90, help="how long it holds; %(default)s")
    token.set_defaults(command_of_admin="token")
    _add_config(token, SUPPRESS)  # a default here would undo what stands before the word


def run(arguments: Namespace, out: Terminal, err: Terminal) -> int:
    """Serve until a signal comes, or make a token."""
    if arguments.command_of_admin == "token":
        return _make_token(arguments, out, err)
    return _serve(arguments, err)


def _add_config(parser: ArgumentParser, default: str) -> None:
    parser.add_argument(
        "--config",
        metavar="URL",
        default=default,
        help=f"the config store: sqlite:///headgate.db, postgresql://host/name; {CONFIG}, if not given",
    )


# ------------------------------------------------------------------ tokens


def _make_token(arguments: Namespace, out: Terminal, err: Terminal) -> int:
    """The token on the output, what there is to know of it beside: so that it can be put into a file as it is."""
    from headgate.control.admin import Tokens
    from headgate.control.config import ConfigStore
    from headgate.control.service.models import Actor
    from headgate.control.service.service import AdminService

    by = f"{_user()} at the command line"
    tokens, store = Tokens(arguments.config), ConfigStore(arguments.config)
    service = AdminService(store, secret=given_secret(arguments.secret_file))
    tokens.check_name = service.refuse_keys
    try:
        token, text = tokens.make(arguments.token_name, arguments.role, by=by, days=arguments.days)
        service.audit.record(Actor(by, "admin"), "made token", f"{token.name} ({token.role}, {token.id})")
    finally:
        tokens.close()
        store.close()
    err.say(f"A token for {token.name}, {token.role} until {_day(token)}. It is shown only now:")
    out.say(text)
    return 0


def _user() -> str:
    try:
        return getpass.getuser()
    except (OSError, KeyError):
        return f"user {os.getuid()}"


def _day(token: Token) -> str:
    return f"{datetime.fromtimestamp(token.expires_us / 1_000_000, UTC):%Y-%m-%d}"


# ------------------------------------------------------------------ the server


def _serve(arguments: Namespace, err: Terminal) -> int:
    from headgate.control.admin import AdminServer, Tokens
    from headgate.control.anomalies.detector import AnomalyLog
    from headgate.control.config import ConfigStore, default_decision_log_url
    from headgate.control.service.service import AdminService

    logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    secret = given_secret(arguments.secret_file)
    with ExitStack() as stack:
        store = ConfigStore(arguments.config, secret=secret)
        stack.callback(store.close)
        tokens = Tokens(arguments.config)
        stack.callback(tokens.close)
        fleet = _fleet(arguments, stack)
        log = arguments.log or default_decision_log_url(arguments.config)
        service = AdminService(store, log=log, secret=secret, anomalies=AnomalyLog(store), **fleet)
        server = AdminServer(
            service,
            tokens,
            host=arguments.host,
            port=arguments.port,
            cert=arguments.cert,
            key=arguments.key,
            behind_tls=arguments.behind_tls,
            names=arguments.name,
            proxies=arguments.proxy,
            watchers=_watchers(arguments, fleet, store),
        )
        if arguments.behind_tls and not arguments.proxy:
            err.say(
                f"{err.paint('note:', ODD)} no --proxy is given: all clients behind the proxy share one address, and "
                "its limits for failed sign-ins; valid tokens are accepted all the same"
            )
        _welcome(server, tokens, err, _directory(arguments.config))
        # uvicorn ends its work on either signal, and then raises it again: so that what is left to close is closed.
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        with suppress(KeyboardInterrupt):
            server.run()
    return 0


def _fleet(arguments: Namespace, stack: ExitStack) -> dict[str, Any]:
    """What is known of the nodes, through the store that they share."""
    if arguments.store is None:
        return {}
    from headgate import Limiter
    from headgate.telemetry.fleet.status_store import open_status_store

    counters = Limiter(arguments.store, namespace=arguments.namespace)
    stack.callback(counters.close)
    status_store = open_status_store(arguments.store, namespace=arguments.namespace)
    stack.callback(status_store.close)
    return {"counters": counters, "status_store": status_store}


def _watchers(arguments: Namespace, fleet: dict[str, Any], store: Any) -> list[Any]:
    """The anomaly detector, if nodes report their status."""
    if (arguments.webhook is None) != (arguments.webhook_secret_file is None):
        raise InvalidInput("--webhook and --webhook-secret-file belong together: who is told must know that it is us")
    if "status_store" not in fleet:
        if arguments.webhook is not None:
            raise InvalidInput("--webhook tells of what nodes do, which is known through --store: give that, too")
        return []
    from headgate.control.anomalies.detector import AnomalyDetector
    from headgate.control.anomalies.webhook import Webhook

    webhook = None
    if arguments.webhook is not None:
        webhook = Webhook(arguments.webhook, _content(arguments.webhook_secret_file))
    return [AnomalyDetector(fleet["status_store"], store, webhook=webhook)]


def _content(file: str) -> bytes:
    try:
        return Path(file).read_bytes().removesuffix(b"\n").removesuffix(b"\r")
    except OSError as error:
        raise InvalidInput(f"--webhook-secret-file {file}: cannot be read: {error.strerror}") from None


def _welcome(server: Any, tokens: Any, err: Terminal, directory: Path) -> None:
    """Say where the server is, and hand over the token of the first start: to a terminal, or in a private file. Other
    outputs end up in logs, which more people can read."""
    made = tokens.first()
    err.say(f"The admin server is at {err.paint(server.url, BOLD)}")
    if made is None:
        err.say("Sign in there with a token. If all are lost: headgate admin token NAME --role admin")
    elif err.is_terminal:
        err.say(
            "",
            f"This is the first start. Here is an admin's token. It is valid until {_day(made.token)} and shown once:",
            "",
            f"    {err.paint(made.text, BOLD)}",
            "",
            "Or sign in with this link, once, in the next ten minutes:",
            "",
            f"    {server.link(made.token)}",
            "",
            NEXT_STEP,
            "",
        )
    else:
        file = _saved(made.text, directory)
        err.say(
            f"This is the first start. An admin's token, valid until {_day(made.token)}, is in {file}"
            if file is not None
            else "This is the first start. Create a token with: headgate admin token NAME --role admin",
            f"{NEXT_STEP} Delete the file." if file is not None else NEXT_STEP,
        )


NEXT_STEP: Final = "Create a token for each person who needs one, with the role they need."


def _saved(token: str, directory: Path) -> str | None:
    """Write a token to a new file that only this user can read. Return its path; None if no file can be written."""
    for place in (directory, Path(tempfile.gettempdir())):
        with suppress(OSError):
            number, file = tempfile.mkstemp(prefix="headgate-admin-token-", dir=place.absolute())  # mode 0600
            with os.fdopen(number, "w") as out:
                out.write(f"{token}\n")
            return file
    return None


def _directory(config: str) -> Path:
    """The directory of a config store in SQLite; the current one, for PostgreSQL."""
    scheme, _, path = config.partition(":///")
    return Path(path).parent if scheme.startswith("sqlite") and path else Path()
