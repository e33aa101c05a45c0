"""What `make` does first, on machines where not everything is as it should be."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import venv
from typing import TYPE_CHECKING

import pytest

from support.paths import ROOT

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """A folder with a blank in its name, where `make` has not run yet."""
    folder = tmp_path / "head gate"
    folder.mkdir()
    shutil.copy(ROOT / "Makefile", folder)
    return folder


def make(clone: Path, target: str, python: str = sys.executable, **environ: str) -> subprocess.CompletedProcess[str]:
    # The tests may run under a `make` of their own, whose options are not meant for this one.
    own = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    command = ["make", target, f"PYTHON={python}"]
    return subprocess.run(command, cwd=clone, env=own | environ, capture_output=True, text=True, timeout=100)


def test_python_that_is_too_old_is_named_and_leaves_nothing_behind(clone: Path, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("import sys\nsys.version_info = (3, 10, 13, 'final', 0)\n")
    done = make(clone, "run", PYTHONPATH=str(tmp_path))
    assert done.returncode == 2
    assert done.stderr.startswith(f"headgate needs Python 3.11 or newer, and {sys.executable} is not: name another")
    assert "make run PYTHON=python3.12" in done.stderr
    assert not (clone / ".venv").exists()


@pytest.mark.parametrize("with_pip", [False, True])
def test_venv_that_was_left_without_pip_is_finished(clone: Path, tmp_path: Path, with_pip: bool) -> None:
    venv.create(clone / ".venv", symlinks=True)
    if with_pip:
        (packages,) = (clone / ".venv" / "lib").glob("python*/site-packages")
        (packages / "pip.py").touch()
    python = tmp_path / "python"  # the real one, but that it only says which venvs it is asked to make
    python.write_text(f'#!/bin/sh\n[ "$1 $2" = "-m venv" ] && echo "asked for $3" || exec "{sys.executable}" "$@"\n')
    python.chmod(0o700)
    done = make(clone, ".venv/.made", str(python))
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ([] if with_pip else ["making .venv", "asked for .venv"])
