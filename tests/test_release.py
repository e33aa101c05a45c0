"""Release: version, changelog, licences and workflows."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from importlib.util import module_from_spec, spec_from_file_location
from typing import TYPE_CHECKING, Any

import pytest

import headgate
from support.paths import ROOT

if TYPE_CHECKING:
    from pathlib import Path

WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
MANIFESTS = ("ops/kubernetes/deployment.yaml", "ops/kubernetes/sidecar.yaml")
FILES = ("pyproject.toml", "CHANGELOG.md", "src/headgate/__init__.py", *MANIFESTS)


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """The files that a release changes, as they are now, with a section for unreleased changes."""
    for name in FILES:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    changelog = tmp_path / "CHANGELOG.md"
    text = changelog.read_text("utf-8")
    changelog.write_text(text.replace("\n## [", "\n## [9.9.9] - unreleased\n\n- A change.\n\n## [", 1), "utf-8")
    return tmp_path


def release(project: Path, *arguments: str) -> tuple[int, str]:
    command = [sys.executable, ROOT / "scripts" / "release.py", "--root", project, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    return done.returncode, done.stderr


def test_bumped_version_can_be_released(project: Path) -> None:
    assert release(project, "bump", "1.2.3") == (0, "")
    assert release(project, "check", "v1.2.3") == (0, "")
    for name in FILES:
        assert "1.2.3" in (project / name).read_text("utf-8")


@pytest.mark.parametrize("name", [name for name in FILES if name != "CHANGELOG.md"])
def test_file_with_another_version_is_named(project: Path, name: str) -> None:
    release(project, "bump", "1.2.3")
    file = project / name
    file.write_text(file.read_text("utf-8").replace("1.2.3", "1.2.2"), "utf-8")
    code, error = release(project, "check", "v1.2.3")
    assert code == 1
    problem = f"{name} has version 1.2.2, but the tag is v1.2.3; run scripts/release.py bump 1.2.3"
    assert error == f"scripts/release.py: {problem}\n"


def test_unreleased_changelog_cannot_be_released(project: Path) -> None:
    code, error = release(project, "check", f"v{headgate.__version__}")
    assert code == 1
    assert f"the newest section of CHANGELOG.md is not '## [{headgate.__version__}] - DATE'" in error


def test_empty_section_cannot_be_released(project: Path) -> None:
    changelog = project / "CHANGELOG.md"
    changelog.write_text(changelog.read_text("utf-8").replace("- A change.\n", ""), "utf-8")
    release(project, "bump", "1.2.3")
    assert "the section 1.2.3 of CHANGELOG.md is empty" in release(project, "check", "v1.2.3")[1]


@pytest.mark.parametrize("version", ["1.2", "v1.2.3", "1.2.3.4", "next"])
def test_malformed_version_changes_nothing(project: Path, version: str) -> None:
    before = [(project / name).read_bytes() for name in FILES]
    code, error = release(project, "bump", version)
    assert (code, error) == (1, f"scripts/release.py: '{version}' is not a version; write it like 1.2.3 or 1.2.0rc1\n")
    assert [(project / name).read_bytes() for name in FILES] == before


def test_changes_need_a_section_before_a_release(project: Path) -> None:
    release(project, "bump", "1.2.3")
    code, error = release(project, "bump", "1.2.4")
    assert code == 1
    assert "begin it with '## [1.2.4] - unreleased'" in error


def test_workflows_are_valid() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.github-workflows", *WORKFLOWS],
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout


def test_workflows_have_no_known_weakness() -> None:
    zizmor = shutil.which("zizmor", path=str(ROOT / ".venv" / "bin")) or "zizmor"
    done = subprocess.run(
        [zizmor, "--offline", "--no-progress", *WORKFLOWS], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stdout


def test_licences_of_all_dependencies_may_be_used() -> None:
    done = subprocess.run(
        [sys.executable, ROOT / "scripts" / "audit.py", "--licences-only"], capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stderr) == (0, "")


SAFE = {"name": "safe", "version": "1.0", "vulns": []}
UNSAFE = {"name": "unsafe", "version": "2.0", "vulns": [{"id": "CVE-2026-1"}]}
UNKNOWN = {"name": "unknown", "skip_reason": "not found"}


@pytest.mark.parametrize(
    ("packages", "strict", "is_failure", "summary"),
    [
        ([SAFE], True, False, "0 known in 1 packages"),
        ([SAFE, UNSAFE], False, True, "1 known in 2 packages"),
        ([SAFE, UNKNOWN], False, False, "0 known in 1 packages; 1 not checked, as the database does not know them"),
        ([SAFE, UNKNOWN], True, True, "0 known in 1 packages; 1 not checked, as the database does not know them"),
    ],
)
def test_audit_counts_vulnerabilities_and_packages_that_were_not_checked(
    packages: list[Any], strict: bool, is_failure: bool, summary: str, capsys: pytest.CaptureFixture[str]
) -> None:
    report = json.dumps({"dependencies": packages, "fixes": []})
    assert load_audit().report_vulnerabilities(report, "", strict=strict) is is_failure
    assert capsys.readouterr().out == f"vulnerabilities: {summary}\n"


@pytest.mark.parametrize(
    ("errors", "strict", "is_failure"),
    [("Max retries exceeded", False, False), ("Max retries exceeded", True, True), ("a bug", False, True)],
)
def test_audit_without_a_report_fails_unless_there_is_no_connection(
    errors: str, strict: bool, is_failure: bool
) -> None:
    assert load_audit().report_vulnerabilities("", errors, strict=strict) is is_failure


def load_audit() -> Any:
    spec = spec_from_file_location("audit", ROOT / "scripts" / "audit.py")
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_distribution_is_complete_and_installs_without_a_compiler(tmp_path: Path) -> None:
    dist, target = tmp_path / "dist", tmp_path / "installed"
    command = [sys.executable, ROOT / "scripts" / "dist.py", "--no-tests", "--no-isolation", "--dir", dist]
    done = subprocess.run(command, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stdout + done.stderr
    (pure,) = dist.glob("*-none-any.whl")
    install = ["-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target", target, pure]
    subprocess.run([sys.executable, *install], check=True, timeout=60)
    check = "headgate.Limiter().check(headgate.Limit.parse('1/day').by('a')).allowed"
    program = f"import headgate; print(headgate.__file__, headgate.speedups.active, {check})"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, env={"PYTHONPATH": str(target)}
    )
    assert done.stdout.split() == [str(target / "headgate" / "__init__.py"), "False", "True"], done.stderr
