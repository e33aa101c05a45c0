"""Check policy files, and show where they are wrong.

headgate check policy.yaml
headgate check --strict policies/*.yaml
headgate check --json policy.yaml
headgate check --envoy ratelimit/

exit code: 0 all valid, 1 invalid policy, 2 unreadable file
"""

from __future__ import annotations

import json
import os
import re
import secrets
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Final

from headgate.cli.options import JSON, POLICY_FILE, option
from headgate.cli.terminal import BOLD, DIM, GREEN, RED, YELLOW, Terminal
from headgate.errors import InvalidInput, InvalidPolicy
from headgate.policy.api_keys import ApiKeyHasher
from headgate.policy.lists.list_watcher import stored_lists
from headgate.policy.loader import UnreadablePolicy, decoded, file_content, load
from headgate.policy.region_settings import has_plain_password
from headgate.policy.snapshot import Snapshot

if TYPE_CHECKING:
    from argparse import Namespace

    from headgate.policy.model import Policy

__all__ = ["EXIT_UNREADABLE", "OPTIONS", "CheckReport", "check_file", "print_problems", "run"]

OPTIONS = (
    option("files", nargs="+", metavar="FILE", help=POLICY_FILE),
    option("--strict", action="store_true", help="treat warnings as errors"),
    option(
        "--envoy",
        action="store_true",
        help="the files, or directories, are those of envoyproxy/ratelimit, checked together",
    ),
    JSON,
)
EXIT_INVALID: Final = 1
EXIT_UNREADABLE: Final = 2

_LOCATION: Final = re.compile(r":(\d+):(\d+): (.*)", re.DOTALL)
_HAS_SECRET: Final = re.compile(r"""api_key["']?\s*[:=]|://[^/\s]*@""")
_SUPPLIED: Final = frozenset({"ip", "subnet", "api_key", "client", "endpoint", "user"})
"""Identities that adapters extract without the app's help; users, where the framework authenticates them."""

_SECTIONS: Final = ("limits", "routes", "tiers", "clients", "overrides", "blocks")


@dataclass(frozen=True, slots=True)
class CheckProblem:
    """An error or warning, with its position in the file if known."""

    message: str
    line: int | None = None
    column: int | None = None
    is_warning: bool = False

    @classmethod
    def read(cls, text: str, file: str, *, is_warning: bool = False) -> CheckProblem:
        """Parse `file:line:column: message`."""
        rest = text.removeprefix(file)
        placed = _LOCATION.fullmatch(rest)
        if placed is None:
            return cls(rest.removeprefix(": "), is_warning=is_warning)
        return cls(placed[3], int(placed[1]), int(placed[2]), is_warning)


@dataclass(frozen=True, slots=True)
class CheckReport:
    file: str
    problems: tuple[CheckProblem, ...] = ()
    policy: Policy | None = None
    """None if the file is invalid."""
    was_read: bool = True

    def code(self, *, strict: bool = False) -> int:
        if not self.was_read:
            return EXIT_UNREADABLE
        return EXIT_INVALID if self.policy is None or (strict and self.problems) else 0

    @property
    def notes(self) -> list[str]:
        """Requirements of the policy on the app and its operators; `--strict` ignores them."""
        if self.policy is None:
            return []
        notes = []
        kinds = dict.fromkeys(kind for rule in self.policy.rules for kind in rule.by if kind not in _SUPPLIED)
        if kinds:
            functions = ", ".join(f'"{kind}": function' for kind in kinds)
            notes.append(
                f"limits count by {', '.join(kinds)}, which the app must supply: identities={{{functions}}}; "
                "otherwise requests are counted by IP address"
            )
        plain = sum(not key.startswith("hmac:") for key in self.policy.api_keys)
        if plain:
            notes.append(
                f"{_count(plain, 'API key')} in plain text: write {'its hash' if plain == 1 else 'their hashes'} "
                "instead; see `headgate hash-key`"
            )
        settings = self.policy.regions
        shared = sorted({limit.region for limit in self.policy.region_limits})
        if shared and (settings is None or not settings.stores):
            notes.append(
                f"limits are {' or '.join(shared)}, and the policy has no regions: the app must give region=, regions= "
                "and home="
            )
        if any("${" not in value for each in self.policy.lists for value in each.headers.values()):
            notes.append("headers of a list in plain text: write an environment variable, like ${LIST_TOKEN}")
        if settings is not None and any(map(has_plain_password, settings.stores.values())):
            notes.append("a password in plain text under regions: write an environment variable, like ${EU_PASSWORD}")
        return notes

    @property
    def counts(self) -> dict[str, int]:
        policy = self.policy
        if policy is None:
            return {}
        sections = (policy.rules, policy.routes, policy.tiers, policy.clients, policy.overrides, policy.blocked)
        counts = dict(zip(_SECTIONS, map(len, sections), strict=True))
        return {**counts, "lists": len(policy.lists)} if policy.lists else counts


def run(arguments: Namespace, out: Terminal, err: Terminal) -> int:
    if arguments.envoy:
        return _check_envoy(arguments, out, err)
    reports, strict = [_with_lists(check_file(file)) for file in arguments.files], arguments.strict
    if arguments.json:
        out.print(json.dumps([_as_dict(report, strict=strict) for report in reports], indent=2))
    else:
        for report in reports:
            print_problems(report, err)
            if report.policy is not None:
                notes = [f"{report.file}: note: {note}" for note in report.notes]
                out.print(_verdict(report, strict=strict, out=out), *notes)
    return max(report.code(strict=strict) for report in reports)


def _check_envoy(arguments: Namespace, out: Terminal, err: Terminal) -> int:
    """Check configuration files of envoyproxy/ratelimit as `headgate serve` reads them: the first problem ends it."""
    from headgate.server.envoy.config import ConfigError, load
    from headgate.server.envoy.settings import ServiceSettings

    problem, rules, domains = None, 0, 0
    try:
        texts = [text for file in arguments.files for text in _envoy_texts(file)]
        configuration = load(texts, merge_domains=ServiceSettings.from_env(os.environ).merge_domain_config)
        rules, domains = len([*configuration.rules()]), len(configuration.domains)
    except UnreadablePolicy as error:
        err.print(f"{error}")
        return EXIT_UNREADABLE
    except ConfigError as error:
        problem = f"{error}"
    if arguments.json:
        out.print(json.dumps({"good": problem is None, "rules": rules, "domains": domains, "problem": problem}))
    elif problem is not None:
        err.print(problem)
    else:
        out.print(f"{out.paint('valid', GREEN)}: {_count(rules, 'rule')} in {_count(domains, 'domain')}")
    return EXIT_INVALID if problem is not None else 0


def _envoy_texts(file: str) -> list[tuple[str, str]]:
    """The name and the text of a file, or of all files of a directory."""
    from headgate.server.envoy.config_directory import ConfigDirectory

    if os.path.isdir(file):
        return ConfigDirectory(file).read()
    return [(file, decoded(file_content(file), file))]


def check_file(file: str) -> CheckReport:
    try:
        policy = load(file)
        # A gate also builds a snapshot, which can find further problems.
        Snapshot(policy, ApiKeyHasher(secrets.token_bytes(32)).fingerprint)
    except InvalidPolicy as error:
        problems = tuple([CheckProblem.read(text, file) for text in error.problems])
        return CheckReport(file, problems, was_read=not isinstance(error, UnreadablePolicy))
    except InvalidInput as error:
        return CheckReport(file, (CheckProblem(f"{error}"),))
    warnings = tuple([CheckProblem.read(text, file, is_warning=True) for text in policy.warnings])
    return CheckReport(file, warnings, policy)


def _with_lists(report: CheckReport) -> CheckReport:
    """The report with warnings of reputation lists that this machine cannot read."""
    lists = None if report.policy is None else stored_lists(report.policy)
    if lists is None:
        return report
    problems = []
    for status in lists.status:
        stays = f"version {status.version} stays in force" if status.is_loaded else "no address is listed in it"
        if status.error is not None:
            problems.append(CheckProblem(f"list {status.name}: {status.error}; {stays}", is_warning=True))
        elif status.invalid:
            message = f"list {status.name}: {status.invalid:,} of its entries are not networks and are skipped"
            problems.append(CheckProblem(message, is_warning=True))
    return replace(report, problems=(*report.problems, *problems))


def print_problems(report: CheckReport, err: Terminal) -> None:
    """Print one line per problem; at a terminal, with an excerpt of the file."""
    lines: list[str] = []
    if err.is_terminal and report.problems:
        with suppress(InvalidPolicy):
            lines = decoded(file_content(report.file), report.file).split("\n")
    for problem in report.problems:
        place = report.file if problem.line is None else f"{report.file}:{problem.line}:{problem.column}"
        kind = err.paint("warning: ", YELLOW) if problem.is_warning else ""
        err.print(f"{err.paint(f'{place}:', BOLD)} {kind}{problem.message}")
        err.print(*_excerpt(lines, problem, err))


def _excerpt(lines: list[str], problem: CheckProblem, err: Terminal) -> list[str]:
    """The line of a problem, with a caret below its position."""
    if problem.line is None or problem.column is None or not 0 < problem.line <= len(lines) or err.width is None:
        return []
    line = lines[problem.line - 1]
    if any(map(_HAS_SECRET.search, lines[max(0, problem.line - 2) : problem.line])):
        return []  # never print an API key or the password in a URL
    room = max(20, err.width - len(f"{problem.line}") - 5)
    start = max(0, problem.column - room // 2) if len(line) > room else 0
    shown = "".join([char if char.isprintable() else " " for char in line[start : start + room]])
    margin = f"  {problem.line} | "
    caret = " " * (len(margin) + problem.column - 1 - start) + "^"
    return [err.paint(margin, DIM) + shown.rstrip(), err.paint(caret, YELLOW if problem.is_warning else RED)]


def _verdict(report: CheckReport, *, strict: bool, out: Terminal) -> str:
    if report.code(strict=strict):
        return f"{report.file}: {out.paint('invalid', RED)}: {_count(len(report.problems), 'warning')} with --strict"
    counts = [_count(count, section[:-1]) for section, count in report.counts.items() if count or section == "limits"]
    return f"{report.file}: {out.paint('valid', GREEN)}: {', '.join(counts)}"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _as_dict(report: CheckReport, *, strict: bool) -> dict[str, object]:
    is_valid = report.code(strict=strict) == 0
    problems = [asdict(problem) for problem in report.problems]
    return {"file": report.file, "good": is_valid, "counts": report.counts, "problems": problems, "notes": report.notes}
