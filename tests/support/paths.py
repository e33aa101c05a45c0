"""Directories of the repository."""

from pathlib import Path

TESTS = Path(__file__).parents[1]
ROOT = TESTS.parent
DOCS = ROOT / "docs"
SOURCE = ROOT / "src" / "headgate"
