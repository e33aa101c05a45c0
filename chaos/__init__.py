"""Headgate under faults that are real: `make chaos`, or `python -m chaos --help`."""

import sys
from pathlib import Path

# The servers that are broken here are those of the tests.
_tests = str(Path(__file__).parents[1] / "tests")
if _tests not in sys.path:
    sys.path.append(_tests)
