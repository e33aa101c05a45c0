"""`python -m headgate.cli`: the same as `headgate`."""

from __future__ import annotations

import sys

from headgate.cli import main

__all__: list[str] = []

if __name__ == "__main__":
    sys.exit(main())
