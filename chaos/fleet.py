"""The nodes as processes: told what to do, how fast, and when to stop."""

from __future__ import annotations

import multiprocessing
from typing import TYPE_CHECKING, Any, Self

from chaos import node
from chaos.load import Orders

if TYPE_CHECKING:
    from chaos.load import Witness
    from chaos.rigs import Rig

_spawning = multiprocessing.get_context("spawn")


class Fleet:
    """Nodes, in turn one with threads and one with asyncio; `with Fleet(2) as fleet:` starts them and ends them."""

    def __init__(self, size: int) -> None:
        self._pace = _spawning.RawValue("d", 0.0)
        self._lines: list[Any] = []
        self._processes: list[Any] = []
        for _ in range(size):
            line, far = _spawning.Pipe()
            process = _spawning.Process(target=node.serve, args=(far, self._pace), daemon=True)
            process.start()
            far.close()
            self._lines.append(line)
            self._processes.append(process)

    def begin(self, rig: Rig, *, retries: int = 0) -> None:
        """Open the limiters, and ask at the steady rate as soon as all nodes are ready."""
        self.ask_times(1.0)
        for number, line in enumerate(self._lines):
            orders = Orders(number, rig.urls[number], number % 2 == 1, rig.namespace, len(self._lines), retries)
            line.send(orders)
        for line in self._lines:
            line.recv()
        for line in self._lines:
            line.send("go")

    def ask_times(self, pace: float) -> None:
        """From now on, so many times the steady rate."""
        self._pace.value = pace

    def end(self) -> list[Witness]:
        """No more checks; what each node has seen. The limiters stay open, and go on settling."""
        self.ask_times(0.0)
        return [line.recv() for line in self._lines]

    def close(self) -> None:
        """Close the limiters."""
        for line in self._lines:
            line.send("close")
        for line in self._lines:
            line.recv()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.ask_times(0.0)
        for line in self._lines:
            line.close()
        for process in self._processes:
            process.join(5)
            if process.is_alive():
                process.kill()
