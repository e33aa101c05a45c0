"""`headgate check`: is this policy good, and if not, what is wrong where?"""

from __future__ import annotations

import json
import re
import secrets
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Final

from headgate.cli.terminal import BAD, BOLD, DIM, GOOD, ODD
from headgate.errors import InvalidInput, InvalidPolicy
from headgate.policy.api_keys import ApiKeyHasher
from headgate.policy.loader import UnreadablePolicy, decoded, file_content, load
from headgate.policy.snapshot import Snapshot

if TYPE_CHECKING:
    from collections.abc import Sequence

    from headgate.cli.terminal import Terminal
    from headgate.policy.model import Policy

__all__ = ["MISTAKES", "UNREADABLE", "CheckProblem", "Report", "check", "examine", "tell"]

MISTAKES: Final = 1
UNREADABLE: Final = 2
"""Exit codes: what is wrong with the policy, and what is wrong with the call."""

_PLACED: Final = re.compile(r":(\d+):(\d+): (.*)", re.DOTALL)
_NAMES_KEY: Final = re.compile(r"""api_key["']?\s*[:=]""")
_SUPPLIED: Final = frozenset({"ip", "subnet", "api_key", "client", "endpoint", "user"})
"""The identities that adapters know without a function of the app's; users, where the framework signs them in."""

_SECTIONS: Final = {
    "limits": "rules",
    "routes": "routes",
    "tiers": "tiers",
    "clients": "clients",
    "overrides": "overrides",
    "blocks": "blocked",
}


@dataclass(frozen=True, slots=True)
class CheckProblem:
    """One thing to say about a file, with its place in it, if it has one."""

    message: str
    line: int | None = None
    column: int | None = None
    is_warning: bool = False

    @classmethod
    def read(cls, text: str, file: str, *, is_warning: bool = False) -> CheckProblem:
        """The parts of `file:line:column: message`."""
        rest = text.removeprefix(file)
        placed = _PLACED.fullmatch(rest)
        if placed is None:
            return cls(rest.removeprefix(": "), is_warning=is_warning)
        return cls(placed[3], int(placed[1]), int(placed[2]), is_warning)


@dataclass(frozen=True, slots=True)
class Report:
    """All that there is to say about a file."""

    file: str
    problems: tuple[CheckProblem, ...] = ()
    policy: Policy | None = None
    """What the file says, if it is good."""
    was_read: bool = True

    def code(self, *, strict: bool = False) -> int:
        """The exit code."""
        if not self.was_read:
            return UNREADABLE
        return MISTAKES if self.policy is None or (strict and self.problems) else 0

    @property
    def notes(self) -> list[str]:
        """What the policy expects of the app and its operators. Not a mistake: `--strict` ignores it."""
        if self.policy is None:
            return []
        notes = []
        kinds = dict.fromkeys(kind for rule in self.policy.rules for kind in rule.by if kind not in _SUPPLIED)
        if kinds:
            it = "it" if len(kinds) == 1 else "them"
            functions = ", ".join(f'"{kind}": function' for kind in kinds)
            notes.append(
                f"limits count by {', '.join(kinds)}: the app has to supply {it}, identities={{{functions}}}; "
                f"without {it}, requests are counted by IP address"
            )
        plain = sum(not key.startswith("hmac:") for key in self.policy.api_keys)
        if plain:
            notes.append(
                f"{_many(plain, 'API key')} in plain text: write {'its hash' if plain == 1 else 'their hashes'} "
                "instead, which `headgate hash-key` prints"
            )
        return notes

    @property
    def counts(self) -> dict[str, int]:
        """How many entries the policy has, by section."""
        return {section: len(getattr(self.policy, name)) for section, name in _SECTIONS.items() if self.policy}


def check(files: Sequence[str], out: Terminal, err: Terminal, *, strict: bool, as_json: bool) -> int:
    """Report on each file; the highest exit code of all."""
    reports = [examine(file) for file in files]
    if as_json:
        out.say(json.dumps([_plain(report, strict=strict) for report in reports], indent=2))
    else:
        for report in reports:
            tell(report, err)
            verdict = _verdict(report, strict=strict, out=out)
            if verdict is not None:
                out.say(verdict, *[f"{report.file}: note: {note}" for note in report.notes])
    return max(report.code(strict=strict) for report in reports)


def examine(file: str) -> Report:
    """Read a policy file, and see what there is to say about it."""
    try:
        policy = load(file)
        # What is good here has to be good in a gate, which hashes API keys and makes tables of it all.
        Snapshot(policy, ApiKeyHasher(secrets.token_bytes(32)).fingerprint)
    except InvalidPolicy as error:
        problems = tuple([CheckProblem.read(text, file) for text in error.problems])
        return Report(file, problems, was_read=not isinstance(error, UnreadablePolicy))
    except InvalidInput as error:
        return Report(file, (CheckProblem(f"{error}"),))
    return Report(file, tuple([CheckProblem.read(text, file, is_warning=True) for text in policy.warnings]), policy)


def tell(report: Report, err: Terminal) -> None:
    """Say what is wrong, one line for each; at a terminal with the place as it looks in the file."""
    lines: list[str] = []
    if err.is_terminal and report.problems:
        with suppress(InvalidPolicy):
            lines = decoded(file_content(report.file), report.file).split("\n")
    for problem in report.problems:
        place = report.file if problem.line is None else f"{report.file}:{problem.line}:{problem.column}"
        kind = err.paint("warning: ", ODD) if problem.is_warning else ""
        err.say(f"{err.paint(f'{place}:', BOLD)} {kind}{problem.message}")
        err.say(*_excerpt(lines, problem, err))


def _excerpt(lines: list[str], problem: CheckProblem, err: Terminal) -> list[str]:
    """The line of the file that a problem is about, and a caret below the place."""
    if problem.line is None or problem.column is None or not 0 < problem.line <= len(lines) or err.width is None:
        return []
    line = lines[problem.line - 1]
    if any(map(_NAMES_KEY.search, lines[max(0, problem.line - 2) : problem.line])):
        return []  # no key is shown, not even to those who could open the file
    room = max(20, err.width - len(f"{problem.line}") - 5)
    start = max(0, problem.column - room // 2) if len(line) > room else 0
    shown = "".join([sign if sign.isprintable() else " " for sign in line[start : start + room]])
    margin = f"  {problem.line} | "
    caret = " " * (len(margin) + problem.column - 1 - start) + "^"
    return [err.paint(margin, DIM) + shown.rstrip(), err.paint(caret, ODD if problem.is_warning else BAD)]


def _verdict(report: Report, *, strict: bool, out: Terminal) -> str | None:
    if report.policy is None:
        return None
    if report.code(strict=strict):
        return f"{report.file}: {out.paint('not good', BAD)}: {_many(len(report.problems), 'warning')}, and --strict"
    told = [_many(count, section[:-1]) for section, count in report.counts.items() if count or section == "limits"]
    return f"{report.file}: {out.paint('good', GOOD)}: {', '.join(told)}"


def _many(count: int, what: str) -> str:
    return f"{count} {what}" if count == 1 else f"{count} {what}s"


def _plain(report: Report, *, strict: bool) -> dict[str, object]:
    good = report.code(strict=strict) == 0
    problems = [asdict(problem) for problem in report.problems]
    return {"file": report.file, "good": good, "counts": report.counts, "problems": problems, "notes": report.notes}
