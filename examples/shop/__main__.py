"""`python -m examples.shop`, or `make run`: opens the shop, shows what its policy does, and then it is yours to try."""

from __future__ import annotations

import argparse
import errno
import os
import secrets
import signal
import socket
import sys
import threading
from pathlib import Path

from examples.shop import tour
from examples.shop.live import BOLD, DIM, RED, paint
from headgate.errors import HeadgateError
from headgate.policy import load

HOST = "127.0.0.1"
POLICY = Path(__file__).with_name("policy.yaml")
REDIS = "redis://127.0.0.1:6379/0"


def main(argv: list[str] | None = None) -> int:
    """Serve until Ctrl-C, or with --demo until the tour is over; the exit status."""
    options = _options(argv)
    try:
        load(options.policy)
        import fastapi  # noqa: F401 - the app's own, asked for here to say kindly where it comes from
        import uvicorn
    except HeadgateError as error:
        print(error, file=sys.stderr)
        return 2
    except ModuleNotFoundError as missing:
        print(f"the shop needs {missing.name!r}: pip install 'headgate[fastapi,redis,yaml]' uvicorn", file=sys.stderr)
        return 2
    port = _free_port(options.port)
    # By the environment, as workers are processes of their own.
    os.environ |= {"SHOP_STORE": options.store, "SHOP_POLICY": str(options.policy)}
    os.environ.setdefault("HEADGATE_SECRET", secrets.token_hex(32))  # yours is the same on all machines
    guide = Guide(port, options)
    guide.start()
    uvicorn.run(
        "examples.shop.app:app", host=HOST, port=port, workers=options.workers, log_level="warning", access_log=False
    )
    return guide.status


class Guide(threading.Thread):
    """Shows visitors around as soon as the shop is open."""

    def __init__(self, port: int, options: argparse.Namespace) -> None:
        super().__init__(name="guide", daemon=True)
        self.status = 0
        self._port = port
        self._options = options

    def run(self) -> None:
        try:
            tour.wait_until_ready(HOST, self._port)
            where = "in memory" if self._options.store == "memory://" else "in Redis"
            print(f"\n  {paint('The shop is open', BOLD)} at http://{HOST}:{self._port}, and counts {where}.")
            tour.run(HOST, self._port)
            if not self._options.demo:
                self._hand_over()
        except Exception as error:
            self.status = 1
            print(paint(f"the tour has failed: {error!r}", RED), file=sys.stderr)
        if self._options.demo:
            os.kill(os.getpid(), signal.SIGINT)

    def _hand_over(self) -> None:
        policy, headgate = _from_here(self._options.policy), _from_here(Path(sys.executable).with_name("headgate"))
        print(f"\n  {paint('Now it is yours.', BOLD)} The tour has used up nothing of what you have.")
        for idea, how in (
            ("Repeat a line of the tour: each decision appears here.", None),
            ("Change the policy: a good version holds within a second, a bad one never.", f"edit {policy}"),
            ("Ask which limits a request meets, and why:", f"{headgate} explain {policy} GET /search"),
            ("Count in a Redis, from four processes:", f"make run RUN_ARGS='--store {REDIS} --workers 4'"),
        ):
            print(f"\n     {idea}")
            if how is not None:
                print(paint(f"     {how}", DIM))
        print(paint("\n  Ctrl-C closes the shop.\n", DIM), flush=True)


def _options(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser("python -m examples.shop", description="A shop's API behind a policy, to try out.")
    parser.add_argument("--store", default="memory://", help=f"where to count, like {REDIS}")
    parser.add_argument("--workers", type=int, default=1, help="processes to serve with; several need a Redis store")
    parser.add_argument("--port", type=int, default=8000, help="the port, or the next free one after it")
    parser.add_argument("--policy", type=Path, default=POLICY, help="another policy file")
    parser.add_argument("--demo", action="store_true", help="only show the tour, and end")
    options = parser.parse_args(argv)
    options.policy = options.policy.resolve()
    if options.workers > 1 and options.store.startswith("memory:"):
        parser.error(
            f"{options.workers} workers would count apart from each other in memory; "
            f"give them a store to share: --store {REDIS}"
        )
    return options


def _from_here(path: Path) -> Path:
    """As somebody in this folder would type it."""
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path


def _free_port(first: int) -> int:
    for port in range(first, 65536):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((HOST, port))
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    raise
            else:
                free: int = probe.getsockname()[1]
                return free
    raise SystemExit(f"no port from {first} on is free")


if __name__ == "__main__":
    sys.exit(main())
