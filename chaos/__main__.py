"""`python -m chaos`: break the store in every way, and leave a table and a picture in .build/chaos/."""

from __future__ import annotations

import argparse
import json
import signal
import sys
from typing import TYPE_CHECKING

from bench.progress import Progress

from chaos import cascade, report
from chaos.faults import FAULTS
from chaos.fleet import Fleet
from chaos.judge import judge
from chaos.regions import report as regions_report
from chaos.regions.__main__ import OUTPUT, experiment
from chaos.rigs import NODES
from chaos.run import LOADS, run

if TYPE_CHECKING:
    from chaos.judge import Finding
    from chaos.run import Run


def main() -> None:
    options = _options()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the servers are stopped then, too
    progress = Progress()
    results = _everything(options, progress)
    has_regions = not options.load and (not options.only or "regions" in options.only)
    across = experiment(["three", "ten"], progress) if has_regions else []
    seconds = progress.done()
    if results:
        _report(results, seconds)
    if across:
        print(*regions_report.verdict(across), "", *regions_report.table(across), "", OUTPUT / "regions.md", sep="\n")
    is_wrong = any(finding.wrong for _, finding in results)
    if is_wrong or any(outcome.wrong for result in across for outcome in result.outcomes):
        sys.exit(1)


def _report(results: list[tuple[Run, Finding]], seconds: float) -> None:
    OUTPUT.mkdir(parents=True, exist_ok=True)
    words, numbers, picture = OUTPUT / "report.md", OUTPUT / "report.json", OUTPUT / "outage.png"
    notes = [line for each, _ in results if each.fault.is_spike for line in ("", *cascade.measure(each).lines())]
    words.write_text(report.document(results, seconds=seconds, notes=notes), "utf-8")
    numbers.write_text(json.dumps([_as_numbers(*result) for result in results], indent=1), "utf-8")
    print(*report.verdict(results), *notes, "", *report.table(results), "", sep="\n")
    drawn = next((each for each, _ in results if (each.fault.name, each.load) == ("stopped", "burst")), None)
    if drawn is not None:
        from chaos import plot

        plot.draw(picture, drawn)
    print(*[str(path) for path in (words, numbers, *[picture] * (drawn is not None))], sep="\n")


def _everything(options: argparse.Namespace, progress: Progress) -> list[tuple[Run, Finding]]:
    results = []
    with Fleet(NODES) as fleet:
        for fault in FAULTS:
            if options.only and fault.name not in options.only:
                continue
            for load in LOADS:
                if (options.load and load != options.load) or (fault.is_spike and load != "burst"):
                    continue
                progress.say(f"{fault.name}, {load}", fault.what)
                with fault.rig() as rig:
                    seen = run(fault, load, fleet, rig)
                results.append((seen, judge(seen)))
    return results


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m chaos", description=__doc__)
    names = [fault.name for fault in FAULTS]
    what = "this fault, or the experiments over regions (may be given again)"
    parser.add_argument("--only", choices=[*names, "regions"], action="append", help=what)
    parser.add_argument("--load", choices=LOADS, help="only under this load")
    return parser.parse_args()


def _as_numbers(run: Run, finding: Finding) -> dict[str, object]:
    named = {"fault": run.fault.name, "load": run.load}
    events = [
        (happening.node, happening.mode, happening.kind, (happening.at_ns - run.struck_ns[0]) / 1e6, happening.text)
        for happening in run.happenings
    ]
    return named | finding._asdict() | {"events": events, "counted": run.counted}


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
