"""Headgate under faults that are real: `make chaos`, or `python -m chaos --help`."""

import sys
from pathlib import Path

# The Redis servers come from tests/support.
_tests = str(Path(__file__).parents[1] / "tests")
if _tests not in sys.path:
    sys.path.append(_tests)
