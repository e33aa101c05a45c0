"""`python -m chaos.regions`: the experiments over three and ten regions; a table and plots in .build/chaos/."""

from __future__ import annotations

import argparse
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from bench.progress import Progress

from chaos.regions import report
from chaos.regions.experiment import run
from chaos.regions.plan import SHORT, TEN, THREE

if TYPE_CHECKING:
    from chaos.regions.experiment import Result

OUTPUT = Path(".build/chaos")
PLANS = {"short": SHORT, "three": THREE, "ten": TEN}


def experiment(names: list[str], progress: Progress) -> list[Result]:
    """Run the plans of these names, and leave a table and plots."""
    from chaos.regions import plot

    results = []
    OUTPUT.mkdir(parents=True, exist_ok=True)
    for name in names:
        plan = PLANS[name]
        progress.say(f"{plan.regions} regions", "servers start")
        result = run(plan, lambda step, plan=plan: progress.say(f"{plan.regions} regions", step))
        plot.draw(OUTPUT / f"regions-{name}.png", result)
        results.append(result)
    (OUTPUT / "regions.md").write_text(report.document(results), "utf-8")
    return results


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m chaos.regions", description=__doc__)
    parser.add_argument("plans", nargs="*", choices=[*PLANS, []], default=["three", "ten"], help="which of them")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the servers are stopped then, too
    progress = Progress()
    results = experiment(parser.parse_args().plans, progress)
    progress.done()
    print(*report.verdict(results), "", *report.table(results), "", sep="\n")
    if any(outcome.wrong for result in results for outcome in result.outcomes):
        sys.exit(1)


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
