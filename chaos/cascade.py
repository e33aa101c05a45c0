"""What became of a cascade: the load on the store, beside what the clients asked for."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from chaos.load import MODES

if TYPE_CHECKING:
    from chaos.load import Mode
    from chaos.run import Run


class Cascade(NamedTuple):
    """Rates in a second, before the spike, in its first tenth, in the rest of it, and after it."""

    asked: tuple[float, ...]
    """Checks that clients made, retries included."""
    requested: tuple[float, ...]
    """Round trips that reached the store."""
    sent: tuple[float, ...]
    """Kilobytes that they brought."""
    admitted: dict[Mode, tuple[float, ...]]

    def lines(self) -> list[str]:
        words = ("before the spike", "its first 0.2 s", "the rest of it", "after it")
        rows = {
            "checks asked for, a second": self.asked,
            "round trips to the store, a second": self.requested,
            "kilobytes to the store, a second": self.sent,
            **{f"admitted, a second: {mode}": self.admitted[mode] for mode in MODES},
        }
        return [
            f"| cascade | {' | '.join(words)} |",
            f"| --- |{' ---: |' * len(words)}",
            *[f"| {name} | {' | '.join(f'{value:,.0f}' for value in values)} |" for name, values in rows.items()],
        ]


def measure(run: Run) -> Cascade:
    """The four phases of a run whose fault is the spike itself."""
    start_ns, end_ns = run.struck_ns[1], run.healed_ns[0]
    # What is left of the spike in the first half second after it is neither of the one nor of the other.
    phases = (
        (start_ns - 700_000_000, start_ns),
        (start_ns, start_ns + 200_000_000),
        (start_ns + 200_000_000, end_ns),
        (end_ns + 500_000_000, end_ns + 1_400_000_000),
    )

    def rates(events: list[tuple[int, float]]) -> tuple[float, ...]:
        return tuple(
            sum(weight for at_ns, weight in events if begin <= at_ns < end) / ((end - begin) / 1e9)
            for begin, end in phases
        )

    return Cascade(
        rates([(row.start_ns, 1) for row in run.rows]),
        rates([(traffic.at_ns, traffic.requests) for traffic in run.traffic]),
        rates([(traffic.at_ns, traffic.size / 1000) for traffic in run.traffic]),
        {mode: rates([(row.start_ns, 1) for row in run.rows if row.mode == mode and row.admitted]) for mode in MODES},
    )
