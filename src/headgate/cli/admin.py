"""Run the admin server: its API and pages, on a separate port.

headgate admin --config sqlite:///headgate.db --store redis://127.0.0.1:6379/0
headgate admin --config postgresql://db/headgate --log sqlite:///decisions.db --port 8001
headgate admin --host 0.0.0.0 --cert cert.pem --key key.pem --name admin.example.org
headgate admin token ada --role support --days 30 --config sqlite:///headgate.db

The first start prints a token, once, if the output is a terminal. If not,
it writes the token to a private file and prints the path. If all tokens are
lost, create another with access to the config store, as in the last example.

exit code: 0 stopped by a signal, 2 invalid call
"""

from __future__ import annotations

import getpass
import logging
import os
import signal
import tempfile
from argparse import SUPPRESS
from contextlib import ExitStack, closing, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from headgate.cli.options import ROLES, SECRET_FILE, option, read_file, read_secret
from headgate.cli.terminal import BOLD, YELLOW, Terminal
from headgate.errors import InvalidInput

if TYPE_CHECKING:
    from argparse import Namespace

    from headgate.control.admin import Token
    from headgate.quotas import Ledger

__all__ = ["ACTIONS", "OPTIONS", "run"]

DEFAULT_CONFIG: Final = "sqlite:///headgate.db"
CONFIG_HELP: Final = f"the config store: sqlite:///headgate.db, postgresql://host/name; default: {DEFAULT_CONFIG}"
NEXT_STEP: Final = "Create a token for each person who needs one, with the role they need."

OPTIONS = (
    option("--config", metavar="URL", default=DEFAULT_CONFIG, help=CONFIG_HELP),
    option("--store", metavar="URL", help="the store of the gates; without it, usage is unknown"),
    option(
        "--log",
        metavar="URL",
        help="decision log: sqlite:///decisions.db, clickhouse://host/database; default: beside an SQLite --config",
    ),
    option("--ledger", metavar="URL", help="the ledger of quotas; default: the variable HEADGATE_LEDGER, or none"),
    option("--namespace", default="headgate", help="prefix of keys in the store; default: %(default)s"),
    option("--host", default="127.0.0.1", help="address to listen on; default: %(default)s"),
    option("--port", type=int, default=8001, help="default: %(default)s"),
    option("--name", action="append", default=[], help="another host name of the server; may be repeated"),
    option("--cert", metavar="FILE", help="TLS certificate; needs --key"),
    option("--key", metavar="FILE", help="private key of the certificate"),
    option("--behind-tls", action="store_true", help="a proxy in front of this server terminates TLS"),
    option(
        "--proxy",
        metavar="NETWORK",
        action="append",
        default=[],
        help="trust X-Forwarded-For from this network; may be repeated",
    ),
    option(
        "--webhook",
        metavar="URL",
        help="receives anomalies, clients with ten times their usual traffic, and usage alerts of quotas",
    ),
    option("--webhook-secret-file", metavar="FILE", help="file with the secret that signs these messages"),
    option(
        "--customers",
        metavar="FILE",
        help="TOML file of customers to notify of their own anomalies, by email, Slack or webhook",
    ),
    option(
        "--usage-thresholds",
        metavar="PERCENTS",
        help="report accounts that have used so much of their allowance; default: as set before, at first 50,80,100",
    ),
    SECRET_FILE,
)


def create_token(arguments: Namespace, out: Terminal, err: Terminal) -> int:
    """Create a token in the config store.

    headgate admin token ada --role support --days 30 --config sqlite:///headgate.db

    Needs access to the config store, but no other token.
    """
    from headgate.control.admin import Tokens
    from headgate.control.config import ConfigStore
    from headgate.control.service.models import Actor
    from headgate.control.service.service import AdminService

    by = f"{_user()} at the command line"
    with closing(Tokens(arguments.config)) as tokens, closing(ConfigStore(arguments.config)) as store:
        service = AdminService(store, secret=read_secret(arguments.secret_file))
        tokens.check_name = service.refuse_keys
        token, text = tokens.make(arguments.token_name, arguments.role, by=by, days=arguments.days)
        service.audit.record(Actor(by, "admin"), "made token", f"{token.name} ({token.role}, {token.id})")
    # The token alone goes to standard output, so that it can be redirected to a file.
    err.print(f"Token for {token.name}, role {token.role}, valid until {_day(token)}. It is shown once:")
    out.print(text)
    return 0


def _user() -> str:
    try:
        return getpass.getuser()
    except (OSError, KeyError):
        return f"user {os.getuid()}"


def _day(token: Token) -> str:
    return f"{datetime.fromtimestamp(token.expires_us / 1_000_000, UTC):%Y-%m-%d}"


ACTIONS = {
    "token": (
        create_token,
        option("token_name", metavar="NAME", help="person or program that the token is for"),
        option("--role", choices=ROLES, required=True, help="role of the token"),
        option("--days", type=int, default=90, help="validity; default: %(default)s"),
        # A default here would override an option before `token`.
        option("--config", metavar="URL", default=SUPPRESS, help=CONFIG_HELP),
    )
}


def run(arguments: Namespace, out: Terminal, err: Terminal) -> int:
    from headgate.control.admin import AdminServer, Tokens
    from headgate.control.anomalies.detector import AnomalyLog
    from headgate.control.config import ConfigStore, default_decision_log_url
    from headgate.control.service.service import AdminService

    logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    secret = read_secret(arguments.secret_file)
    with ExitStack() as stack:
        store = stack.enter_context(closing(ConfigStore(arguments.config, secret=secret)))
        tokens = stack.enter_context(closing(Tokens(arguments.config)))
        fleet = _fleet(arguments, stack)
        log = arguments.log or default_decision_log_url(arguments.config)
        ledger = _open_ledger(arguments, stack)
        service = AdminService(store, log=log, secret=secret, anomalies=AnomalyLog(store), ledger=ledger, **fleet)
        same = {name: getattr(arguments, name) for name in ("host", "port", "cert", "key", "behind_tls")}
        watchers = [*_watchers(arguments, fleet, store, ledger), *service.watchers()]
        if arguments.customers is not None:
            watchers.append(_customer_notifier(arguments, store, service, secret))
        server = AdminServer(service, tokens, names=arguments.name, proxies=arguments.proxy, watchers=watchers, **same)
        if arguments.behind_tls and not arguments.proxy:
            err.print(
                f"{err.paint('note:', YELLOW)} without --proxy, all clients behind the proxy share one address and its "
                "limits for failed sign-ins; valid tokens are still accepted"
            )
        # The directory of an SQLite config store, else the current one.
        scheme, _, path = arguments.config.partition(":///")
        _welcome(server, tokens, err, Path(path).parent if scheme.startswith("sqlite") and path else Path())
        # uvicorn stops on either signal and raises it again; as KeyboardInterrupt, it lets the stack close everything.
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        with suppress(KeyboardInterrupt):
            server.run()
    return 0


def _open_ledger(arguments: Namespace, stack: ExitStack) -> Ledger | None:
    if not (url := arguments.ledger or os.environ.get("HEADGATE_LEDGER")):
        if arguments.usage_thresholds is not None:
            raise InvalidInput("--usage-thresholds needs --ledger, which has the accounts")
        return None
    from headgate.quotas import Ledger

    ledger = stack.enter_context(closing(Ledger(url, author="admin server")))
    if (text := arguments.usage_thresholds) is not None:
        try:
            percents = [int(part) for part in text.split(",")]
        except ValueError:
            raise InvalidInput(f"--usage-thresholds {text!r}: give percents like 50,80,100") from None
        ledger.set_usage_thresholds(percents)
    return ledger


def _fleet(arguments: Namespace, stack: ExitStack) -> dict[str, Any]:
    """The counters and node statuses in the store of the gates."""
    namespace = arguments.namespace
    if arguments.store is None:
        return {"namespace": namespace}
    from headgate import Limiter
    from headgate.telemetry.fleet.status_store import open_status_store

    counters = stack.enter_context(closing(Limiter(arguments.store, namespace=namespace)))
    status_store = stack.enter_context(closing(open_status_store(arguments.store, namespace=namespace)))
    return {"counters": counters, "status_store": status_store, "namespace": namespace}


def _watchers(arguments: Namespace, fleet: dict[str, Any], store: Any, ledger: Ledger | None) -> list[Any]:
    """The anomaly detector, if there is a store to read node statuses from, and the sender of usage alerts."""
    if (arguments.webhook is None) != (arguments.webhook_secret_file is None):
        raise InvalidInput("--webhook and --webhook-secret-file go together: the receiver verifies the signature")
    has_status_store = "status_store" in fleet
    if arguments.webhook is not None and not has_status_store and ledger is None:
        raise InvalidInput("--webhook needs --store, which has the traffic of the nodes, or --ledger")
    from headgate.control.webhooks import Webhook

    webhook = None
    if arguments.webhook is not None:
        webhook = Webhook(arguments.webhook, read_file("--webhook-secret-file", arguments.webhook_secret_file))
    watchers: list[Any] = []
    if has_status_store:
        from headgate.control.anomalies.detector import AnomalyDetector

        watchers.append(AnomalyDetector(fleet["status_store"], store, webhook=webhook))
    if webhook is not None and ledger is not None:
        from headgate.quotas.usage_alerts import UsageNotifier

        watchers.append(UsageNotifier(ledger, webhook))
    return watchers


def _customer_notifier(arguments: Namespace, store: Any, service: Any, secret: bytes | None) -> Any:
    if arguments.store is None:
        raise InvalidInput("--customers needs --store, which has the traffic of the nodes")
    from headgate.control.customers.notifier import CustomerNotifier
    from headgate.control.customers.settings import read_customers

    return CustomerNotifier(read_customers(arguments.customers), store, service, secret=secret)


def _welcome(server: Any, tokens: Any, err: Terminal, directory: Path) -> None:
    """Print the server's URL, and the first token: to a terminal, or to a private file, as more people read logs."""
    made = tokens.first()
    err.print(f"The admin server is at {err.paint(server.url, BOLD)}")
    if made is None:
        err.print("Sign in there with a token. If all are lost: headgate admin token NAME --role admin")
    elif err.is_terminal:
        first = f"This is the first start. This admin token is valid until {_day(made.token)} and shown once:"
        token, link = f"    {err.paint(made.text, BOLD)}", f"    {server.link(made.token)}"
        err.print("", first, "", token, "", "Or sign in with this link, once, within ten minutes:", "", link)
        err.print("", NEXT_STEP, "")
    else:
        file = _save(made.text, directory)
        if file is None:
            err.print("This is the first start. Create a token with: headgate admin token NAME --role admin", NEXT_STEP)
        else:
            err.print(f"This is the first start. An admin token, valid until {_day(made.token)}, is in {file}")
            err.print(f"{NEXT_STEP} Delete the file.")


def _save(token: str, directory: Path) -> str | None:
    """Write a token to a new private file and return its path; None if no file can be written."""
    for place in (directory, Path(tempfile.gettempdir())):
        with suppress(OSError):
            number, file = tempfile.mkstemp(prefix="headgate-admin-token-", dir=place.absolute())  # mode 0600
            with os.fdopen(number, "w") as out:
                out.write(f"{token}\n")
            return file
    return None
