"""Changes every comparison and constant of the algorithms, one at a time, and sees that a test notices: `make mutate`.

Python's mutants are those of mutmut (only its mutator: its runner reads a private field of pytest's that is gone);
those of Lua and C are made here, from their tokens. Each is put into a copy of the package, which the tests then import
instead of the original. Most die in the tests of their own algorithm in test_differential.py; what survives that file
is shown to the wider tests, and what survives those, too, is listed at the end. Mutants that provably change nothing
stand in EQUIVALENT, with the proof, and do not count.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from fnmatch import fnmatch
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple, TypeVar

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

ROOT: Final = Path(__file__).parents[2]
PACKAGE: Final = ROOT / "src" / "headgate"
PYTHON: Final = [*sorted((PACKAGE / "algorithms").glob("[!_]*.py")), PACKAGE / "algorithms" / "_interface.py"]
LUA: Final = sorted(PACKAGE.rglob("*.lua"))
C: Final = [*sorted((PACKAGE / "algorithms").glob("[!_]*.h")), PACKAGE / "algorithms" / "_exact.h"]

NARROW: Final = ["tests/algorithms/test_differential.py", "tests/stores/redis/test_ttl.py"]
WIDE: Final = ["tests/algorithms", "-k", "(memory or redis) and not differential and not lua and not model"]
AT_ONCE: Final = 2
PATIENCE: Final = 60
"""Seconds for one test; what hangs counts as noticed."""
OPTIONS: Final = ["-x", "-q", "--tb=no", "-p", "no:cacheprovider", "-p", "pytest_timeout", f"--timeout={PATIENCE}"]
FINE: Final = (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED)

EQUIVALENT: Final = [  # in the files, what stands there, what it becomes, and why nothing changes
    ("*.py", 'id: str = ""', 'id: str = "XXXX"', "whoever takes a lease gives it an id"),
    ("*.py", "BURST: Final = False", "BURST: Final = None", "it is only asked whether it is true"),
    ("*/fixed_window.py", "used < limit.quota", "used <= limit.quota", "the difference is 0 there"),
    ("*/gcra.py", "state > now", "state >= now", "the difference is 0 there"),
    ("*/gcra.py", "debt < full", "debt <= full", "the difference is 0 there"),
    ("*/gcra.py", "state <= now", "state < now", "what is due now cannot be brought forward"),
    ("*/sliding_log.py", "live and not log[-1][2]", "(live and not log[-1][2]) and False", "0 weighs nothing anywhere"),
    ("*/sliding_log.py", "lo=first, ", "", "what is sought is larger than all totals before"),
    ("*/sliding_log.py", "total = 0", "total = 1", "totals count by their differences"),
    ("*/token_bucket.py", "ahead_us < 0", "ahead_us <= 0", "in no time, nothing is added"),
    ("*/token_bucket.py", "ahead_us < 0", "ahead_us < 1", "in no time, nothing is added"),
    ("*/token_bucket.py", "level > full", "level >= full", "it becomes what it is"),
    ("*/token_bucket.h", "ahead_us < 0", "ahead_us <= 0", "in no time, nothing is added"),
    ("*/token_bucket.h", "ahead_us < 0", "ahead_us < 1", "in no time, nothing is added"),
    ("*/*_window.h", "now_us > limit->period_us", "now_us >= limit->period_us", "Python decides then, only slower"),
    ("*/gcra.h", "tokens > 2 *", "tokens >= 2 *", "Python decides then, only slower"),
    ("*/token_bucket.h", "tokens > limit->full", "tokens >= limit->full", "Python decides then, only slower"),
    ("*/_exact.h", "one > other", "one >= other", "they are the same then"),
    ("*/_exact.h", "one < other", "one <= other", "they are the same then"),
    ("*/_exact.lua", "4503599627370497)", "4503599627370498)", "the other form is as exact, only slower"),
    ("*/_exact.lua", "~= '4503599627370497'", "== '4503599627370497'", "the other form is as exact, only slower"),
    ("*/_exact.lua", "first + 0", "first - 0", "either makes the same number of the digits"),
    ("*/_exact.lua", "second + 0", "second - 0", "either makes the same number of the digits"),
    ("*/_exact.lua", "9007199254740992", "9007199254740993", "to Lua, the same number"),
    ("*/_exact.lua", "suffix_at, true", "suffix_at, false", "a signature means itself as a pattern, too"),
    ("*/_exact.lua", "sub(text, 1, 17", "sub(text, 0, 17", "there is no place before the first"),
    ("*/_exact.lua", "sub(text, 1, 17", "sub(text, 1, 16", "without the blank behind it the number is the same"),
    ("*/_exact.lua", "sub(text, 1, 17", "sub(text, 1, 18", "what is none then the pattern reads, only slower"),
    ("*/_exact.lua", "sub(text, 18", "sub(text, 17", "a number may have blanks around it"),
    ("*/_exact.lua", "first ~= last_prefix", "first == last_prefix", "then the pattern reads all, only more slowly"),
    ("*/_exact.lua", "first + 0 or tonumber", "first + 0 and tonumber", "then the pattern reads it, only more slowly"),
    ("*/_exact.lua", "second + 0 or tonumber", "second + 0 and tonumber", "then the pattern reads it, only slower"),
    ("*/_exact.lua", "signature_at - 1", "signature_at + 1", "then the pattern reads it, only more slowly"),
    ("*/_exact.lua", "signature_at - 1", "signature_at - 0", "a number may have blanks around it"),
    ("*/concurrency.lua", "first + 999", "first + 1000", "some ids are named twice"),
    ("*/concurrency.lua", "before > at", "before >= at", "where they are equal, the lease has been given up already"),
    ("*/fixed_window.lua", "now > ts and div", "now >= ts and div", "an instant lies in its own window"),
    ("*/sliding_window.lua", "now > ts and div", "now >= ts and div", "an instant lies in its own window"),
    ("*/gcra.lua", "tokens > limit.full and", "tokens >= limit.full and", "it is only looked at more closely then"),
    ("*/gcra.lua", "rest >= limit.tokens", "rest > limit.tokens", "tokens/tokens are a microsecond in either form"),
    ("*/gcra.lua", "rest < 0", "rest <= 0", "tokens/tokens are a microsecond in either form"),
    ("*/gcra.lua", "rest < 0", "rest < 1", "tokens/tokens are a microsecond in either form"),
    ("*/gcra.lua", "rest > limit.full", "rest >= limit.full", "it becomes what it is"),
    ("*/gcra.lua", "room > 0", "room >= 0", "0 has room for 0"),
    ("*/sliding_log.lua", "'ZCARD', key) - 1", "'ZCARD', key) - 0", "the last always suffices"),
    ("*/sliding_log.lua", "0, 1, 'WITHSCORES'", "0, 2, 'WITHSCORES'", "the third is not looked at"),
    ("*/sliding_log.lua", "'LIMIT', 0, 1)", "'LIMIT', 0, 2)", "the second is not looked at"),
    ("*/sliding_log.lua", "= now, 0, 0, now", "= now, 1, 0, now", "totals count by their differences"),
    ("*/sliding_log.lua", "{ { 'DEL', key } }, 0", "{ { 'DEL', key } }, 1", "totals count by their differences"),
    ("*/sliding_log.lua", "if newest[1]", "if newest[2]", "each member has a score"),
    ("*/sliding_log.lua", "commands[1] =", "commands[2] =", "it may be done in any order"),
    ("*/sliding_log.lua", "+ 1] = { 'ZREM', key", "- 1] = { 'ZREM', key", "0 weighs nothing anywhere"),
    ("*/sliding_log.lua", "+ 1] = { 'ZREM', key", "+ 2] = { 'ZREM', key", "0 weighs nothing anywhere"),
    ("*/sliding_log.lua", "+ 1] = { 'ZREM', key", "+ 0] = { 'ZREM', key", "0 weighs nothing, nor what has expired"),
    ("*/sliding_log.lua", "'ZREM', key, newest[1]", "'ZREM', key, newest[2]", "0 weighs nothing anywhere"),
    ("*/sliding_log.lua", "#log - 1, 1, -2", "#log - 1, 0, -2", "only odd places are visited"),
    ("*/sliding_window.lua", "or 2", "or 3", "all that is older than the window before is alike"),
    ("*/token_bucket.lua", "now > te", "now >= te", "in no time, nothing is added"),
    ("*/_prelude.lua", "capacity + 0", "capacity - 0", "either makes the same number of the digits"),
    ("*/_prelude.lua", "tokens + 0", "tokens - 0", "either makes the same number of the digits"),
    ("*/_prelude.lua", "ticks + 0", "ticks - 0", "either makes the same number of the digits"),
    ("*/_prelude.lua", "3] + 0", "3] - 0", "either makes the same number of the digits"),
    ("*/_prelude.lua", "-1 - #signature", "-2 - #signature", "to begin to look earlier finds the same ending"),
    ("*/_prelude.lua", "-1 - #signature", "-1 + #signature", "what stands before the ending is longer than that"),
    ("*/check_one.lua", "or 1) + 0", "or 1) - 0", "either makes the same number of the digits"),
    ("*/check_one.lua", "if remaining < cost and", "if remaining <= cost and", "just enough passes again after 0 us"),
    ("*/token_bucket.lua", "gained < full", "gained <= full", "full either way"),
    ("*/check_batch.lua", "ARGV[2] ~= ''", "ARGV[3] ~= ''", "to keep what nobody else meets is only slower"),
    ("*/check_batch.lua", "AT_ONCE = 3000", "AT_ONCE = 3001", "few enough in either form"),
    ("*/check_batch.lua", "<= MAX_KEYS_AT_ONCE", "< MAX_KEYS_AT_ONCE", "to read or write one by one is only slower"),
    ("*/check_batch.lua", "> MAX_KEYS_AT_ONCE", ">= MAX_KEYS_AT_ONCE", "to read or write one by one is only slower"),
    ("*/check_batch.lua", "reply.err and texts", "reply.err or texts", "to read one by one is only slower"),
    ("*/check_batch.lua", "= true, false, nil", "= true, true, nil", "after 0 us: as if it were unsaid"),
    ("*/check_batch.lua", "concurrency = true", "concurrency = false", "MSET refuses it: it is written by itself then"),
    ("*/check_batch.lua", "4, false", "4, true", "to look whether all are numbers is only slower"),
    (
        "*/check_batch.lua",
        "skip_validation = true",
        "skip_validation = false",
        "to look whether all are numbers is only slower",
    ),
    ("*/check_batch.lua", "at = 1, #KEYS", "at = 0, #KEYS", "place 0 has no state"),
    (
        "*/check_batch.lua",
        "last > MAX_KEYS_AT_ONCE * 2",
        "last > MAX_KEYS_AT_ONCE / 2",
        "to write one by one is only slower",
    ),
    (
        "*/check_batch.lua",
        "last > MAX_KEYS_AT_ONCE * 2",
        "last > MAX_KEYS_AT_ONCE * 3",
        "MSET fails then: it is written one by one",
    ),
    (
        "*/check_batch.lua",
        "limit.decide, cost > 0",
        "limit.decide, cost > 1",
        "to keep it as what is not plain is only slower",
    ),
    (
        "*/check_batch.lua",
        "costs[index] > 0 and not",
        "costs[index] > 1 and not",
        "to keep it as what is not plain is slower",
    ),
    (
        "*/check_batch.lua",
        "not limit.is_collection",
        " limit.is_collection",
        "MSET refuses collections: one by one then",
    ),
    (
        "*/check_batch.lua",
        "not request_limits[index].is_collection",
        " request_limits[index].is_collection",
        "MSET refuses collections: one by one then",
    ),
    ("*/check_batch.lua", "last > 0", "last >= 0", "MSET of nothing fails: one by one, nothing is written either"),
    ("*/check_batch.lua", "last > 0", "last > 1", "keys and states come in pairs"),
    ("*/check_batch.lua", "index = 1, #costs", "index = 0, #costs", "place 0 has no state"),
    ("*/check_batch.lua", "or remaining < cost or", "or remaining <= cost or", "the longer way says the same"),
    (
        "*/check_batch.lua",
        "if remaining < cost then",
        "if remaining <= cost then",
        "just enough passes again after 0 us",
    ),
    (
        "*/check_batch.lua",
        "for number = 1, #request_limits",
        "for number = 0, #request_limits",
        "nothing is kept of a limit before the first",
    ),
    ("*/check_batch.lua", "longest = 0", "longest = 1", "what has run out takes at least 1 us"),
    ("*/check_batch.lua", "2 - 1] < cost", "2 - 1] <= cost", "what is just enough passes again after 0 us"),
    ("*/check_batch.lua", "if remaining < cost and", "if remaining <= cost and", "just enough passes again after 0 us"),
    ("*/check_batch.lua", "position <= #ARGV", "position < #ARGV", "a group has more than one argument"),
    ("*/check_batch.lua", "limit_count == 1", "limit_count == 0", "one by itself is only quicker"),
    ("*/check_batch.lua", "index = 1, limit_count", "index = 0, limit_count", "place 0 is not visited"),
    (
        "*/lease.lua",
        "not concurrency(KEYS[1], now, 0",
        "not concurrency(KEYS[1], now, 1",
        "it is only tried to read it",
    ),
]


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

    def is_equivalent_by(self, files: str, was: str, becomes: str, _: str) -> bool:
        places = [found.start() for found in re.finditer(re.escape(was), self.before)]
        changed = [self.before[:place] + becomes + self.before[place + len(was) :] for place in places]
        return fnmatch(self.file, files) and self.after in changed


AnyMutant = TypeVar("AnyMutant", bound=Mutant | None)


def mutants_of(file: Path) -> Iterator[Mutant]:
    original = file.read_text("utf-8")
    made = python_mutants(original) if file.suffix == ".py" else token_mutants(SYNTAXES[file.suffix], original)
    for text in made:
        line, before, after = difference(original, text)
        if not SAYS_NOTHING.search(before):
            yield Mutant(str(file.relative_to(PACKAGE)), line, before, after, text)


def difference(original: str, text: str) -> tuple[int, str, str]:
    """The first line that differs, and what stands there before and after."""
    before, after = original.splitlines(), text.splitlines()
    start = next(at for at, (one, other) in enumerate(zip(before, after, strict=False)) if one != other)
    while before[-1] == after[-1] and min(len(before), len(after)) > start + 1:
        del before[-1], after[-1]
    return start + 1, " ".join(map(str.strip, before[start:])), " ".join(map(str.strip, after[start:]))


# ------------------------------------------------------------------- Python

SAYS_NOTHING: Final = re.compile(r"__all__ = |: TypeAlias = |if TYPE_CHECKING|raise AssertionError")
"""Lines of Python that do nothing while the program is right."""


def python_mutants(original: str) -> Iterator[str]:
    # Here, as every test run imports this module, and only this needs mutmut.
    from mutmut.mutation.file_mutation import create_mutations, deep_replace

    module, mutations, *_ = create_mutations("", original)
    for mutation in mutations:
        yield deep_replace(module, mutation.original_node, mutation.mutated_node).code


# ---------------------------------------------------------------- Lua and C


class Syntax(NamedTuple):
    token: re.Pattern[str]
    swaps: dict[str, list[str]]


ARITHMETIC: Final = {
    "<": ["<=", ">="],
    "<=": ["<", ">"],
    ">": [">=", "<="],
    ">=": [">", "<"],
    "+": ["-"],
    "-": ["+"],
    "*": ["/"],
    "/": ["*"],
    "%": ["/"],
    "true": ["false"],
    "false": ["true"],
}
SYNTAXES: Final = {
    ".lua": Syntax(
        re.compile(
            r"(?P<skipped>--.*|'(?:\\.|[^'\\])*'|\s+)|(?P<number>\d+)|(?P<word>[A-Za-z_]\w*(?:\.\w+)?)"
            r"|(?P<symbol>\.{2,3}|[<>=~]=|.)"
        ),
        {
            **ARITHMETIC,
            "==": ["~="],
            "~=": ["=="],
            "and": ["or"],
            "or": ["and"],
            "not": [""],
            "math.min": ["math.max"],
            "math.max": ["math.min"],
        },
    ),
    ".h": Syntax(
        # A star with nothing behind it multiplies; else it points.
        re.compile(
            r"(?P<skipped>/\*(?s:.*?)\*/|(?m:^#.*)|\"[^\"]*\"|\*(?=\w)|->|\s+)|(?P<number>\d+)|(?P<word>[A-Za-z_]\w*)"
            r"|(?P<symbol><<|>>|&&|\|\||[<>=!+*/-]=|.)"
        ),
        {
            **ARITHMETIC,
            "==": ["!="],
            "!=": ["=="],
            "&&": ["||"],
            "||": ["&&"],
            "!": [""],
            "+=": ["-="],
            "-=": ["+="],
            "larger": ["smaller"],
            "smaller": ["larger"],
            "floor_div": ["ceil_div"],
            "ceil_div": ["floor_div"],
        },
    ),
}
BEFORE_A_SIGN: Final = re.compile(r"[-+*/%<>=~({\[,]|and|or|not|return")
"""What stands before a minus that subtracts nothing."""


def token_mutants(syntax: Syntax, original: str) -> Iterator[str]:
    last = ""
    for token in syntax.token.finditer(original):
        if token.lastgroup == "skipped" or original[token.start() - 1] == "\n":  # a name that is given
            continue
        for replacement in replacements(syntax, token, last):
            yield original[: token.start()] + replacement + original[token.end() :]
        last = token[0]


def replacements(syntax: Syntax, token: re.Match[str], last: str) -> list[str]:
    if token.lastgroup == "number":
        number = int(token[0])
        return [str(number + 1), "0"] if number == 1 else [str(number + 1)]
    if token[0] == "-" and BEFORE_A_SIGN.fullmatch(last):
        # A constant's sign goes with the constant: -1 becomes -2 and -0.
        return [] if token.string[token.end()].isdigit() else [""]
    return syntax.swaps.get(token[0], [])


# ------------------------------------------------------------------ running


def judge(mutants: Sequence[Mutant]) -> list[Mutant]:
    """The survivors. All runs in copies of the package and of the tests, so that nobody who works on them is
    disturbed, nor disturbs."""
    with tempfile.TemporaryDirectory(prefix="headgate-mutation-") as temporary:
        place = Path(temporary)
        for directory in (PACKAGE, ROOT / "tests"):
            copy = place / directory.relative_to(ROOT)
            shutil.copytree(directory, copy, ignore=shutil.ignore_patterns("__pycache__"))
        for name in ("pyproject.toml", "setup.py"):
            shutil.copy(ROOT / name, place)
        if not passing(place, NARROW, [None]):
            sys.exit(f"{NARROW[0]} fails on the package as it is: no mutant can be told from it")
        survivors = passing(place, NARROW, mutants)
        if survivors and not passing(place, WIDE, [None]):
            print("the wider tests fail on the package as it is, and are left out")
            return survivors
        return passing(place, WIDE, survivors)


def passing(place: Path, tests: list[str], mutants: Sequence[AnyMutant]) -> list[AnyMutant]:
    """Those that the tests do not notice; None stands for the package as it is."""
    # Each test run is a fork of a process that has done the slow imports, and sees one mutant only.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["__main__", "hiredis", "hypothesis.stateful", "pytest", "redis.asyncio"])
    found, started = [], time.monotonic()
    with context.Pool(AT_ONCE, maxtasksperchild=1) as pool:
        results = pool.imap(partial(passes, place, tests), mutants)
        for done, (mutant, passed) in enumerate(zip(mutants, results, strict=True), 1):
            if passed:
                found.append(mutant)
                if mutant is not None:
                    print(f"  not noticed: {mutant}", flush=True)
            if mutant is not None and (done % 50 == 0 or done == len(mutants)):
                minutes = (time.monotonic() - started) / 60
                print(f"{tests[0]}: {done} of {len(mutants)}, {len(found)} survive, {minutes:.1f} min", flush=True)
    return found


def passes(place: Path, tests: list[str], mutant: Mutant | None) -> bool:
    """Whether the tests pass with the mutant in place of the original. Leaves this process unfit for another."""
    os.chdir(place)
    os.environ["HYPOTHESIS_STORAGE_DIRECTORY"] = str(place / "hypothesis")
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # it would take longer than most of the tests
    silence = os.open(os.devnull, os.O_WRONLY)
    for output in (1, 2):
        os.dup2(silence, output)
    if mutant is None:
        sys.dont_write_bytecode = False
        sys.path.insert(0, str(place / "src"))
        return run(tests)
    with tempfile.TemporaryDirectory(dir=place) as bench:
        package = shutil.copytree(place / "src" / PACKAGE.name, Path(bench) / "src" / PACKAGE.name)
        (package / mutant.file).write_text(mutant.text, "utf-8")
        sys.path.insert(0, str(package.parent))
        # The tests of its own algorithm are the likeliest to notice.
        likeliest = [*NARROW, "-k", Path(mutant.file).stem.strip("_")]
        if mutant.file.endswith(".h"):
            is_built = compiles(Path(bench), place / "setup.py")
            return is_built and all(runs_apart(package, each) for each in (likeliest, tests))
        os.environ["HEADGATE_PLAIN"] = "1"  # else C would answer where Python has the mutant
        return run(likeliest) and run(tests)


def compiles(bench: Path, setup: Path) -> bool:
    """Compile the parts in C anew, in their place. What cannot be built is only left out, whatever setup.py says."""
    built = [*bench.rglob("*.so")]
    for library in built:
        library.unlink()
    subprocess.run([sys.executable, setup, "-q", "build_ext", "--build-lib", "src"], cwd=bench, check=False)
    return all(library.exists() for library in built)


def runs_apart(package: Path, tests: list[str]) -> bool:
    """The same in a process of its own: what divides by zero in C takes its process with it, and nobody interrupts
    what never ends there."""
    environment = {**os.environ, "PYTHONPATH": str(package.parent)}
    command = [sys.executable, "-m", "pytest", *OPTIONS, *tests]
    try:
        return subprocess.run(command, env=environment, check=False, timeout=PATIENCE).returncode in FINE
    except subprocess.TimeoutExpired:
        return False


def run(tests: list[str]) -> bool:
    return pytest.main([*OPTIONS, *tests]) in FINE


# ---------------------------------------------------------------- reporting


def report(mutants: Sequence[Mutant], survivors: Sequence[Mutant]) -> None:
    made, lived = Counter(mutant.file for mutant in mutants), Counter(mutant.file for mutant in survivors)
    print(f"\n{'file':34}{'mutants':>9}{'killed':>9}{'survived':>10}{'score':>9}")
    rows = [(file, made[file], lived[file]) for file in made]
    for file, total, survived in [*rows, ("all", len(mutants), len(survivors))]:
        print(f"{file:34}{total:>9}{total - survived:>9}{survived:>10}{(total - survived) / total:>9.1%}")
    if survivors:
        print("\nsurvivors:", *survivors, sep="\n  ")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--python", action="store_true", help="only Python's mutants")
    parser.add_argument("--lua", action="store_true", help="only Lua's mutants")
    parser.add_argument("--c", action="store_true", help="only C's mutants")
    parser.add_argument("--only", metavar="NAME", default="", help='only where this is a part of "file:line: change"')
    parser.add_argument("--list", action="store_true", help="show the mutants, and run nothing")
    return parser.parse_args()


def main() -> int:
    os.chdir(ROOT)  # where mutmut looks for its settings
    asked = arguments()
    is_all = not (asked.python or asked.lua or asked.c)
    files = PYTHON * (asked.python or is_all) + LUA * (asked.lua or is_all) + C * (asked.c or is_all)
    made = [mutant for file in files for mutant in mutants_of(file) if asked.only in str(mutant)]
    mutants = [mutant for mutant in made if not any(mutant.is_equivalent_by(*row) for row in EQUIVALENT)]
    if asked.list:
        print(*mutants, sep="\n")
    print(f"{len(mutants)} mutants, beside {len(made) - len(mutants)} that change nothing", flush=True)
    if is_all and not asked.only:
        for row in EQUIVALENT:
            if not any(mutant.is_equivalent_by(*row) for mutant in made):
                print("  no such mutant any more, strike it from EQUIVALENT:", *row[:3], flush=True)
    if asked.list or not mutants:
        return 0
    survivors = judge(mutants)
    report(mutants, survivors)
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main())
