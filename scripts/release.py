"""Set the version of the next release, and check that a release is consistent.

python scripts/release.py bump 0.2.0     set the version and date the section of the changelog
python scripts/release.py check v0.2.0   fail unless tag, version and changelog agree
"""

from __future__ import annotations

import argparse
import re
import sys
from datetime import UTC, date, datetime
from pathlib import Path

ROOT = Path(__file__).parents[1]
VERSION = re.compile(r"\d+\.\d+\.\d+(?:(?:a|b|rc)\d+)?")
HEADING = re.compile(r"^## \[(?P<version>[^\]]+)\] - (?P<date>\S+)$", re.MULTILINE)
UNRELEASED = "unreleased"
VERSION_LINES = {
    "pyproject.toml": r'^(version = ")([^"]+)(")$',
    "src/headgate/__init__.py": r'^(__version__ = ")([^"]+)(")$',
    "ops/kubernetes/deployment.yaml": r"^( +image: registry\.example\.com/headgate:)(\S+)()$",
    "ops/kubernetes/sidecar.yaml": r"^( +image: registry\.example\.com/headgate:)(\S+)()$",
}
"""The lines that contain the version."""


class ReleaseError(Exception):
    """The release is not consistent; the message says where, and what to do."""


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/release.py", description=__doc__.partition("\n")[0])
    parser.add_argument("--root", type=Path, default=ROOT, help=argparse.SUPPRESS)
    actions = parser.add_subparsers(dest="action", required=True)
    actions.add_parser("bump", help="set the version").add_argument("version")
    actions.add_parser("check", help="check a release").add_argument("tag")
    options = parser.parse_args()
    try:
        if options.action == "bump":
            bump(options.root, options.version, datetime.now(UTC).date())
        else:
            check(options.root, options.tag)
    except ReleaseError as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 1
    return 0


def bump(root: Path, version: str, today: date) -> None:
    """Write the version to the package, and the version and date to the unreleased section of the changelog."""
    if not VERSION.fullmatch(version):
        raise ReleaseError(f"{version!r} is not a version; write it like 1.2.3 or 1.2.0rc1")
    changelog = root / "CHANGELOG.md"
    text = changelog.read_text("utf-8")
    newest = HEADING.search(text)
    if newest is None or newest["date"] != UNRELEASED:
        raise ReleaseError(
            f"CHANGELOG.md has no section for unreleased changes; begin it with '## [{version}] - {UNRELEASED}'"
        )
    for name, pattern in VERSION_LINES.items():
        file = root / name
        line = rf"\g<1>{version}\g<3>"
        file.write_text(re.sub(pattern, line, file.read_text("utf-8"), count=1, flags=re.MULTILINE), "utf-8")
    heading = f"## [{version}] - {today.isoformat()}"
    changelog.write_text(text[: newest.start()] + heading + text[newest.end() :], "utf-8")


def check(root: Path, tag: str) -> None:
    """Raise ReleaseError unless the tag is the version everywhere, and the changelog says what is new in it."""
    version = tag.removeprefix("v")
    for name, pattern in VERSION_LINES.items():
        found = re.search(pattern, (root / name).read_text("utf-8"), re.MULTILINE)
        if found is None or found[2] != version:
            written = "no version" if found is None else f"version {found[2]}"
            raise ReleaseError(f"{name} has {written}, but the tag is {tag}; run scripts/release.py bump {version}")
    text = (root / "CHANGELOG.md").read_text("utf-8")
    newest = HEADING.search(text)
    if newest is None or newest["version"] != version or newest["date"] == UNRELEASED:
        raise ReleaseError(f"the newest section of CHANGELOG.md is not '## [{version}] - DATE'; run bump {version}")
    following = HEADING.search(text, newest.end())
    if "- " not in text[newest.end() : following.start() if following else len(text)]:
        raise ReleaseError(f"the section {version} of CHANGELOG.md is empty; say what changed for users")


if __name__ == "__main__":
    sys.exit(main())
