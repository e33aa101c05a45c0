"""Runs the tour in the terminal, then shows what to try."""

from __future__ import annotations

import os
import select
import signal
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from examples.shop import tour
from examples.shop.decision_printer import BOLD, DIM, RED, paint

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable

__all__ = ["REDIS", "Guide"]

REDIS = "redis://127.0.0.1:6379/0"
WHO = "192.0.2.77 is refused all the time, Corner Cafe has too little, Lantern Festival comes in waves"


class Guide(threading.Thread):
    """Runs the tour once the shop accepts requests. `link` creates links that sign in to the admin pages."""

    def __init__(self, host: str, port: int, link: Callable[[], str], options: argparse.Namespace) -> None:
        super().__init__(name="guide", daemon=True)
        self.status = 0
        self._host, self._port = host, port
        self._link = link
        self._options = options

    def run(self) -> None:
        try:
            tour.wait_until_ready(self._host, self._port)
            where = "in memory" if self._options.store == "memory://" else "in Redis"
            print(f"\n  {paint('The shop is open', BOLD)} at http://{self._host}:{self._port}, and counts {where}.")
            if not self._options.demo:
                print(f"  Its admin pages, by a link that signs you in once:\n  {self._link()}")
            tour.run(self._host, self._port)
            if not self._options.demo:
                self._hand_over()
                self._wait_for_enter()
        except Exception as error:
            self.status = 1
            print(paint(f"the tour has failed: {error!r}", RED), file=sys.stderr)
        if self._options.demo:
            os.kill(os.getpid(), signal.SIGINT)

    def _hand_over(self) -> None:
        policy, headgate = _from_here(self._options.policy), _from_here(Path(sys.executable).with_name("headgate"))
        link = self._link()
        print(f"\n  {paint('Now it is yours.', BOLD)} The tour has used up nothing of what you have.")
        ideas: list[tuple[str, str | None]] = [
            ("Look at the admin pages, by another link that signs you in once:", link),
            ("Or look at the command line, with a token of your own:", self._command_line(headgate, link)),
            ("Repeat a line of the tour: what you send appears here.", None),
            ("Change the policy: a good version holds within a second, a bad one never.", f"edit {policy}"),
            ("Ask which limits a request meets, and why:", f"{headgate} explain {policy} GET /search"),
            ("Count in a Redis, from four processes:", f"make run RUN_ARGS='--store {REDIS} --workers 4'"),
        ]
        if self._options.traffic:
            ideas.insert(1, ("Visitors come and go by themselves. Search the pages for one of them, and ask why:", WHO))
        for idea, how in ideas:
            print(f"\n     {idea}")
            if how is not None:
                print(paint(f"     {how}", DIM))
        more = "Enter makes another link. " if _has_somebody() else ""
        print(paint(f"\n  {more}Ctrl-C closes the shop.\n", DIM), flush=True)

    def _command_line(self, headgate: Path, link: str) -> str:
        there = urlsplit(link)
        config = f"sqlite:///{_from_here(self._options.data / 'config.db')}"
        lines = [
            f"export HEADGATE_ADMIN={there.scheme}://{there.netloc}",
            f"export HEADGATE_TOKEN=$({headgate} admin token me --role operator --config {config})",
            f"{headgate} top",
        ]
        return "\n     ".join(lines)

    def _wait_for_enter(self) -> None:
        """Print a new link when Enter is pressed, as each works once and for ten minutes."""
        while _has_somebody():
            # With a short timeout, as a thread that waits for input cannot be stopped.
            if select.select([sys.stdin], [], [], 0.5)[0]:
                if not os.read(sys.stdin.fileno(), 4096):
                    return
                print(f"  {self._link()}", flush=True)


def _has_somebody() -> bool:
    """True in the foreground of an interactive terminal."""
    return sys.stdin.isatty() and sys.stdout.isatty() and os.tcgetpgrp(sys.stdin.fileno()) == os.getpgrp()


def _from_here(path: Path) -> Path:
    """The command as typed in this directory."""
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path
