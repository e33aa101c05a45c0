"""Changes every comparison and constant of the algorithms, one at a time, and sees that a test notices: `make mutate`.

Python's mutants are those of mutmut (its mutator alone: its own runner reads a private field of pytest's that is gone);
Lua's are made here, from its tokens. Each is put into a copy of the package, which the tests then import in place of
the original. Most die in the tests of their own algorithm in test_differential.py; what survives that file is shown to
the wider tests, and what survives those, too, is listed at the end. Mutants that provably change nothing are in
EQUIVALENT, with the proof, and do not count.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING, NamedTuple, Self

from equivalent import EQUIVALENT
from mutmut.mutation.file_mutation import create_mutations, deep_replace

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "headgate"
PYTHON = sorted((PACKAGE / "algorithms").glob("[!_]*.py")) + [PACKAGE / "algorithms" / "_shape.py"]
LUA = sorted(PACKAGE.rglob("*.lua"))

AT_ONCE = 2
PATIENCE = 60
"""Seconds for one test; what hangs counts as noticed."""

NARROW = ["tests/test_differential.py"]
WIDE = ["tests/test_pitfalls.py", "tests/test_properties.py", "-k", "memory or redis"]


class Mutant(NamedTuple):
    file: str
    """As "algorithms/gcra.lua"."""
    line: int
    before: str
    after: str
    text: str
    """The whole file with the change in it."""

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.before}  ->  {self.after}"

    @property
    def why_equivalent(self) -> str | None:
        return EQUIVALENT.get((self.file, self.before, self.after))


def mutants_of(file: Path) -> Iterator[Mutant]:
    original = file.read_text("utf-8")
    for text in (python_mutants if file.suffix == ".py" else lua_mutants)(original):
        line, before, after = difference(original, text)
        if not SAYS_NOTHING.search(before):
            yield Mutant(str(file.relative_to(PACKAGE)), line, before, after, text)


def difference(original: str, text: str) -> tuple[int, str, str]:
    """The first line that differs, and what stands there before and after."""
    before, after = original.splitlines(), text.splitlines()
    start = next(at for at, lines in enumerate(zip(before, after, strict=False)) if lines[0] != lines[1])
    while before[-1] == after[-1] and min(len(before), len(after)) > start + 1:
        before.pop(), after.pop()
    return start + 1, *(" ".join(map(str.strip, lines[start:])) for lines in (before, after))


# ------------------------------------------------------------------- Python

SAYS_NOTHING = re.compile(r"__all__ = |: TypeAlias = |if TYPE_CHECKING|raise AssertionError")
"""Lines that do nothing as long as the program is right."""


def python_mutants(original: str) -> Iterator[str]:
    module, mutations, *_ = create_mutations("", original)
    for mutation in mutations:
        yield deep_replace(module, mutation.original_node, mutation.mutated_node).code


# ---------------------------------------------------------------------- Lua

TOKEN = re.compile(
    r"(?P<skipped>--.*|'(?:\\.|[^'\\])*'|\s+)|(?P<number>\d+)|(?P<word>[A-Za-z_]\w*(?:\.\w+)?)"
    r"|(?P<symbol>\.{2,3}|[<>=~]=|.)"
)

SWAPS = {
    "<": ["<=", ">="],
    "<=": ["<", ">"],
    ">": [">=", "<="],
    ">=": [">", "<"],
    "==": ["~="],
    "~=": ["=="],
    "+": ["-"],
    "-": ["+"],
    "*": ["/"],
    "/": ["*"],
    "%": ["/"],
    "and": ["or"],
    "or": ["and"],
    "not": [""],
    "true": ["false"],
    "false": ["true"],
    "math.min": ["math.max"],
    "math.max": ["math.min"],
}

BEFORE_A_SIGN = re.compile(r"[-+*/%<>=~({\[,]|\b(?:and|or|not|return)$")
"""What a minus follows that is not a subtraction."""


def lua_mutants(original: str) -> Iterator[str]:
    last = ""
    for token in TOKEN.finditer(original):
        if token.lastgroup == "skipped":
            continue
        for replacement in replacements(token, last):
            yield original[: token.start()] + replacement + original[token.end() :]
        last = token[0]


def replacements(token: re.Match[str], last: str) -> list[str]:
    if token.lastgroup == "number":
        number = int(token[0])
        return [str(number + 1), *(["0"] if number == 1 else [])]
    if token[0] == "-" and BEFORE_A_SIGN.search(last[-6:]):
        # The sign of a constant changes with the constant: -1 becomes -2 and -0.
        return [] if token.string[token.end()].isdigit() else [""]
    return SWAPS.get(token[0], [])


# ------------------------------------------------------------------ running


class Workshop:
    """Copies of the package, one for each mutant that is under test, and of the tests: neither the repository nor
    whoever works in it meanwhile is disturbed."""

    def __init__(self) -> None:
        self._temporary = tempfile.TemporaryDirectory(prefix="headgate-mutation-")
        self._place = Path(self._temporary.name)
        self._benches: SimpleQueue[Path] = SimpleQueue()

    def __enter__(self) -> Self:
        litter = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / "tests", self._place / "tests", ignore=litter)
        shutil.copy(ROOT / "pyproject.toml", self._place)
        for number in range(AT_ONCE):
            bench = self._place / f"bench-{number}"
            shutil.copytree(PACKAGE, bench / "headgate", ignore=litter)
            self._benches.put(bench)
        return self

    def __exit__(self, *_: object) -> None:
        self._temporary.cleanup()

    def passes(self, tests: Sequence[str], mutant: Mutant | None = None) -> bool:
        """Whether the tests pass, with the mutant in place of the original."""
        bench = self._benches.get()
        try:
            if mutant is None:
                return self._run(tests, bench, {})
            file = bench / "headgate" / mutant.file
            original = file.rename(file.with_suffix(".original"))
            file.write_text(mutant.text, "utf-8")
            try:
                # The bytecode of a mutant could be taken for the original's, or for that of the next one.
                return self._run(tests, bench, {"PYTHONDONTWRITEBYTECODE": "1"})
            finally:
                original.rename(file)
        finally:
            self._benches.put(bench)

    def _run(self, tests: Sequence[str], bench: Path, settings: dict[str, str]) -> bool:
        options = ["-x", "-q", "--tb=no", "-p", "no:cacheprovider", "-p", "pytest_timeout", f"--timeout={PATIENCE}"]
        environment = {
            **os.environ,
            **settings,
            "PYTHONPATH": str(bench),
            "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",  # half of the time it takes to start
            "HYPOTHESIS_STORAGE_DIRECTORY": str(bench / "hypothesis"),
        }
        command = [sys.executable, "-m", "pytest", *options, *tests]
        silent = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        with subprocess.Popen(command, cwd=self._place, env=environment, **silent) as process:
            try:
                return process.wait(3 * PATIENCE) in (0, 5)  # 5: there is no such test
            except subprocess.TimeoutExpired:
                process.kill()
                return False


def survives(workshop: Workshop, mutant: Mutant) -> bool:
    """Whether no test of the narrow ones notices; those of the mutant's own algorithm are asked first."""
    own = [*NARROW, "-k", Path(mutant.file).stem.strip("_")]
    return workshop.passes(own, mutant) and workshop.passes(NARROW, mutant)


def those_that(
    holds: Callable[[Mutant], bool], mutants: Sequence[Mutant], what: str, *, started: float
) -> list[Mutant]:
    """Those for which it holds, some at the same time, with a line of progress now and then."""
    found = []
    with ThreadPoolExecutor(AT_ONCE) as pool:
        for done, (mutant, held) in enumerate(zip(mutants, pool.map(holds, mutants), strict=True), 1):
            if held:
                found.append(mutant)
                print(f"  survived: {mutant}", flush=True)
            if done % 25 == 0 or done == len(mutants):
                minutes = (time.monotonic() - started) / 60
                print(f"{what}: {done} of {len(mutants)}, {len(found)} survived, {minutes:.1f} min", flush=True)
    return found


def judge(mutants: Sequence[Mutant]) -> list[Mutant]:
    """The survivors."""
    started = time.monotonic()
    with Workshop() as workshop:
        # One after the other on every bench, which also compiles everything there.
        if not all(workshop.passes(NARROW) for _ in range(AT_ONCE)):
            sys.exit(f"{NARROW[0]} fails on the package as it is: mutants cannot be told from it")
        survivors = those_that(lambda mutant: survives(workshop, mutant), mutants, "mutants", started=started)
        if survivors and workshop.passes(WIDE):
            survivors = those_that(
                lambda mutant: workshop.passes(WIDE, mutant), survivors, "wider tests", started=started
            )
        elif survivors:
            print("the wider tests fail on the package as it is: they are left out")
    return survivors


# ---------------------------------------------------------------- reporting


def report(mutants: Sequence[Mutant], survivors: Sequence[Mutant]) -> None:
    total, survived = Counter(mutant.file for mutant in mutants), Counter(mutant.file for mutant in survivors)
    print(f"\n{'file':34}{'mutants':>9}{'killed':>9}{'survived':>10}{'score':>9}")
    for file in [*total, "all"]:
        made = total[file] or len(mutants)
        lived = survived[file] if file in total else len(survivors)
        print(f"{file:34}{made:>9}{made - lived:>9}{lived:>10}{(made - lived) / made:>9.1%}")
    if survivors:
        print("\nsurvivors:", *survivors, sep="\n  ")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--python", action="store_true", help="only Python's mutants")
    parser.add_argument("--lua", action="store_true", help="only Lua's mutants")
    parser.add_argument("--only", metavar="NAME", default="", help='only where this is a part of "file:line: change"')
    parser.add_argument("--list", action="store_true", help="show the mutants, and run nothing")
    return parser.parse_args()


def main() -> int:
    os.chdir(ROOT)  # where mutmut looks for its settings
    asked = arguments()
    files = [*PYTHON] * (asked.python or not asked.lua) + [*LUA] * (asked.lua or not asked.python)
    made = [mutant for file in files for mutant in mutants_of(file) if asked.only in str(mutant)]
    equivalent = [mutant for mutant in made if mutant.why_equivalent]
    mutants = [mutant for mutant in made if not mutant.why_equivalent]
    if asked.list:
        print(*mutants, sep="\n")
    print(f"{len(mutants)} mutants, and {len(equivalent)} that change nothing")
    if asked.list or not mutants:
        return 0
    survivors = judge(mutants)
    report(mutants, survivors)
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main())
