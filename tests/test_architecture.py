"""Architecture: exports, import direction, and rules that every source file follows."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import sys
import tomllib
from collections import Counter
from importlib.resources import files
from types import ModuleType
from typing import TYPE_CHECKING, Any

import pytest

import headgate
from headgate import AsyncLimiter, Limiter
from headgate.algorithms import ALGORITHMS, INTERNAL_ALGORITHMS
from headgate.stores.redis.scripts import script
from support.paths import ROOT, SOURCE, TESTS

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))

EXPORTS = [
    "AsyncLimiter",
    "Calendar",
    "Clock",
    "Decision",
    "FairLimit",
    "HeadgateError",
    "InvalidConfiguration",
    "InvalidCost",
    "InvalidInput",
    "InvalidKey",
    "InvalidLimit",
    "InvalidPolicy",
    "Key",
    "Limit",
    "Limiter",
    "Outcome",
    "RequestDenied",
    "ScriptError",
    "StoreError",
    "StoreTimeout",
    "StoreUnavailable",
    "__version__",
]

LAYERS = (
    {"__main__", "cli", "demo", "pytest_plugin", "testing"},
    {"simulation"},
    {"server"},
    {"control", "quotas"},
    {"replay"},
    {"telemetry"},
    {"adapters", "clients"},
    {"gate"},
    {"abuse", "policy"},
    {"__init__"},
    {"limiter"},
    {"engine"},
    {"flow"},
    {"regions"},
    {"bounds", "local"},
    {"failure", "leases", "overload"},
    {"stores"},
    {"_limit_syntax", "calendars", "clock", "decisions", "events", "health", "keys", "limits", "runtime", "speedups"},
    {"_fork", "_interrupts", "_node", "_pace", "_sqlite", "algorithms", "errors"},
)
"""Packages and modules from top to bottom. A module imports only from its own layer and from lower ones."""

MAY_AWAIT = {
    "engine.py",
    "limiter.py",
    "leases.py",
    "stores/redis/async_store.py",
    *(f"adapters/{name}.py" for name in ("aiohttp", "asgi", "django", "fastapi", "functions", "grpc")),
    *(f"clients/{name}.py" for name in ("aiohttp", "drivers", "functions", "httpx")),
    *(f"overload/{name}.py" for name in ("guard", "httpx", "psycopg")),
    "gate/identity.py",
    "gate/base.py",
    "gate/gate.py",
    "control/admin/middleware.py",
    "simulation/simulated_gateways.py",
    "server/access.py",
    "server/check_api.py",
    "server/call_deadline.py",
    "server/check_service.py",
    "server/demo.py",
    "server/envoy/config_directory.py",
    "server/envoy/http_api.py",
    "server/envoy/quota_service.py",
    "server/envoy/service.py",
    "server/grpc_api.py",
    "server/grpc_server.py",
    "server/health.py",
    "server/json_route.py",
    "server/quota_grants.py",
    "server/run.py",
    "server/worker_stats.py",
}

DEPENDENCIES = {
    "redis": "stores.redis",
    "hiredis": "stores.redis",
    "yaml": ("policy.formats.from_yaml", "server.envoy"),
    "starlette": ("adapters.fastapi", "control.admin", "server"),
    "fastapi": ("adapters.fastapi", "control.admin", "server"),
    "pydantic": ("control.admin", "server"),
    "uvicorn": ("control.admin.serve", "server"),
    "h11": "control.admin.serve",
    "jinja2": "control.admin.pages",
    "markupsafe": "control.admin.pages",
    "flask": "adapters.flask",
    "werkzeug": "adapters.flask",
    "django": "adapters.django",
    "asgiref": "adapters.django",
    "aiohttp": ("adapters.aiohttp", "clients.aiohttp"),
    "httpx": ("clients.httpx", "overload.httpx"),
    "requests": "clients.requests",
    "grpc": ("adapters.grpc", "server"),
    "grpc_health": "server",
    "grpc_reflection": "server",
    "grpc_status": "adapters.grpc",
    "google": ("adapters.grpc", "server"),
    "envoy": "server",
    "alembic": "control.config.migrations",
    "clickhouse_connect": "telemetry.decision_log.sinks.clickhouse",
    "confluent_kafka": "telemetry.decision_log.sinks.kafka",
    "opentelemetry": "telemetry.otel",
    "prometheus_client": "telemetry.prometheus",
    "pytest": "pytest_plugin",
    "psycopg_pool": "overload.psycopg",
    "sqlalchemy": ("control", "overload.sqlalchemy", "quotas"),
    "zstandard": "replay.sources",
}
"""Third-party packages, and the only modules that may import each of them."""

SHARED_CLASS_NAMES = {"HeadgateMiddleware"}
"""Class names that are used more than once: public names that each framework's adapter defines."""

MAX_PRIVATE_ACCESSES = 15


def module_name(file: Path) -> str:
    """The module's dotted name inside the package, such as "stores.redis.encoding"; "__init__" for the package."""
    return ".".join(file.relative_to(SOURCE).with_suffix("").parts).removesuffix(".__init__")


MODULES = {module_name(file): file for file in sorted(SOURCE.rglob("*.py"))}
LUA = sorted(SOURCE.rglob("*.lua"))
TEST_FILES = sorted(TESTS.rglob("test_*.py"))
C = sorted([*SOURCE.rglob("*.c"), *SOURCE.rglob("*.h")])

every_module = pytest.mark.parametrize("name", MODULES)
every_lua_file = pytest.mark.parametrize("file", LUA, ids=lambda file: file.name)


def syntax(name: str) -> ast.Module:
    return ast.parse(MODULES[name].read_text("utf-8"))


def imports(name: str) -> Iterator[str]:
    """The full names of all imported modules, including those imported for type checking only."""
    return imports_of(syntax(name))


def imports_of(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            # `from headgate import flow` imports a module, `from headgate.flow import check` a name out of one.
            submodules = [alias.name for alias in node.names if f"{node.module}.{alias.name}" in ours()]
            yield from [f"{node.module}.{module}" for module in submodules] or [node.module]


def ours() -> set[str]:
    return {"headgate" if name == "__init__" else f"headgate.{name}" for name in MODULES}


def imports_of_ours(name: str) -> set[str]:
    found = {imported.removeprefix("headgate.") for imported in imports(name) if imported in ours()}
    return {"__init__" if imported == "headgate" else imported for imported in found}


def layer(name: str) -> int:
    package = name.partition(".")[0]
    for height, packages in enumerate(reversed(LAYERS)):
        if package in packages:
            return height
    raise AssertionError(f"{package!r} belongs to no layer: add it to LAYERS")


# ------------------------------------------------------------------ exports


def test_package_exports_exactly_the_listed_names() -> None:
    assert headgate.__all__ == EXPORTS
    public = {name for name, value in vars(headgate).items() if not name.startswith("_") and not is_incidental(value)}
    assert public == set(EXPORTS) - {"__version__"}


def is_incidental(value: Any) -> bool:
    return isinstance(value, ModuleType) or type(value).__name__ == "_Feature"


@every_module
def test_all_is_sorted_and_every_name_exists(name: str) -> None:
    module = importlib.import_module("headgate" if name == "__init__" else f"headgate.{name}")
    exported = getattr(module, "__all__", None)
    if exported is None:
        assert name.startswith("algorithms."), "only algorithm modules, which share one interface, have no __all__"
        return
    assert exported == sorted(exported, key=constants_then_classes_then_functions)
    assert all(hasattr(module, each) for each in exported)


def constants_then_classes_then_functions(name: str) -> tuple[int, str]:
    return (0 if name.isupper() else 1 if name[0].isupper() else 2), name


# ------------------------------------------------------------------ imports


@every_module
def test_imports_point_down(name: str) -> None:
    for imported in imports_of_ours(name):
        assert layer(imported) <= layer(name), f"{name} imports {imported}, which is in a higher layer"


@pytest.mark.parametrize("name", [name for name in MODULES if name.startswith("algorithms")])
def test_algorithms_are_pure(name: str) -> None:
    assert {imported.partition(".")[0] for imported in imports_of_ours(name)} <= {"algorithms"}
    assert not set(imports(name)) & {"asyncio", "datetime", "logging", "random", "redis", "threading", "time"}


def test_flow_imports_no_store() -> None:
    assert {imported for imported in imports_of_ours("flow") if imported.startswith("stores")} == {"stores.operations"}


def test_only_the_command_line_imports_the_demo() -> None:
    assert [name for name in MODULES if "demo" in imports_of_ours(name)] == ["cli"]


@pytest.mark.parametrize("name", [name for name in MODULES if name.startswith("control.")])
def test_admin_api_and_pages_use_the_service(name: str) -> None:
    """The service does not know the web, and the web does not know the stores: no role check, guardrail or audit entry
    can be bypassed."""
    found = {each.removeprefix("headgate.") for each in imports(name) if each.startswith("headgate.")}
    if not name.startswith("control.admin"):
        assert not [each for each in found if each.startswith("control.admin")]
    if name.startswith(("control.admin.api", "control.admin.pages")):
        behind = (
            "control.config.store",
            "control.config.writing",
            "limiter",
            "stores",
            "local",
            "telemetry.decision_log.sinks",
        )
        assert not [each for each in found if each.startswith(behind)]


@every_module
def test_third_party_packages_are_imported_only_where_listed(name: str) -> None:
    foreign = {each.partition(".")[0] for each in imports(name)} - sys.stdlib_module_names - {"headgate"}
    assert all(name.startswith(DEPENDENCIES.get(each, "(not listed)")) for each in foreign), foreign


def test_core_has_no_dependencies() -> None:
    assert PROJECT["project"]["dependencies"] == []


@every_module
def test_only_listed_modules_await(name: str) -> None:
    waiting = (ast.AsyncFunctionDef, ast.Await, ast.AsyncFor, ast.AsyncWith)
    awaits = any(isinstance(node, waiting) for node in ast.walk(syntax(name)))
    assert not awaits or str(MODULES[name].relative_to(SOURCE)) in MAY_AWAIT


def test_no_test_sleeps_or_is_skipped() -> None:
    forbidden = re.compile(r"time\.sle[e]p|pytest\.sk[i]p|mark\.sk[i]p|importorsk[i]p|mark\.xf[a]il")
    files = [file for file in TEST_FILES if file.relative_to(TESTS).parts[0] not in ("integration", "end_to_end")]
    assert not [file.name for file in files if forbidden.search(file.read_text("utf-8"))]


def test_no_test_imports_another() -> None:
    """Shared code goes to tests/support."""
    stems = {file.stem for file in TEST_FILES} | {"conftest", "tests"}
    for file in (*TEST_FILES, *TESTS.glob("support/*.py")):
        imported = imports_of(ast.parse(file.read_text("utf-8")))
        assert not {part for name in imported for part in name.split(".")} & stems, file


def test_pitfall_index_names_existing_tests() -> None:
    rows = [line.split("|")[1:4] for line in (TESTS / "pitfalls.md").read_text("utf-8").splitlines() if "::" in line]
    assert [row[0].strip() for row in rows] == [*map(str, range(1, 48)), *[f"P{number}" for number in range(1, 20)]]
    defined = {file: set(re.findall(r"^def (test_\w+)", file.read_text("utf-8"), re.MULTILINE)) for file in TEST_FILES}
    for number, _, tests in rows:
        named = re.findall(r"`([\w/.]+)::(\w+)`", tests)
        assert named, f"no test for pitfall {number}"
        assert not [(file, name) for file, name in named if name not in defined.get(TESTS / file, ())]


# ------------------------------------------------------------------ naming, prose, privacy


def test_class_names_are_unique() -> None:
    names = Counter(node.name for name in MODULES for node in ast.walk(syntax(name)) if isinstance(node, ast.ClassDef))
    assert {name for name, count in names.items() if count > 1} <= SHARED_CLASS_NAMES


def test_private_attributes_of_other_objects_are_rarely_used() -> None:
    suppressions = [
        line for file in MODULES.values() for line in file.read_text("utf-8").splitlines() if "noqa: SLF001" in line
    ]
    assert len(suppressions) <= MAX_PRIVATE_ACCESSES
    assert not [line for line in suppressions if not re.search(r"noqa: SLF001 - \w", line)], "give the reason after it"


def docstrings(tree: ast.Module) -> Iterator[str]:
    """All docstrings of a module, including those of attributes and constants."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            for statement in node.body:
                match statement:
                    case ast.Expr(ast.Constant(str(text))):
                        yield text


def test_docstrings_name_their_subject() -> None:
    indirect = [
        f"{name}: {text.splitlines()[0]}"
        for name in MODULES
        for text in docstrings(syntax(name))
        if text.split(maxsplit=1)[0] in ("What", "Who", "Whether")
    ]
    assert not indirect, "\n".join(indirect)


# ------------------------------------------------------------- Python and Lua


def test_every_algorithm_has_a_python_and_a_lua_file_of_its_name() -> None:
    for kind in ("py", "lua"):
        found = {file.stem for file in (SOURCE / "algorithms").glob(f"*.{kind}") if not file.stem.startswith("_")}
        assert found == {*ALGORITHMS, *INTERNAL_ALGORITHMS}
    for name, module in (ALGORITHMS | INTERNAL_ALGORITHMS).items():
        assert isinstance(module, ModuleType)
        assert module.__name__ == f"headgate.algorithms.{name}"


@pytest.mark.parametrize("name", ALGORITHMS | INTERNAL_ALGORITHMS)
def test_lua_header_names_the_python_module(name: str) -> None:
    header = (SOURCE / "algorithms" / f"{name}.lua").read_text("utf-8")
    assert header.startswith(f"-- Mirrors {name}.py")


@every_lua_file
def test_lua_converts_numbers_to_text_only_with_format(file: Path) -> None:
    code = re.sub(r"--.*", "", file.read_text("utf-8")).replace("...", "")
    assert "tostring" not in code
    # Text: literals, constants, results of format and instant, and the lower-case names, set from ARGV or by format.
    names = r"(?:limit\.)?(?:signature|separator|period_suffix)\b|\b(?:[A-Z_]+|tokens|ticks|capacity|after|document)\b"
    texts = rf"'[^'\n]*'|(?:format|instant)\([^)\n]*\)|{names}"
    marked = re.sub(texts, "TEXT", code)
    assert not re.findall(r".*(?:(?<!TEXT )\.\.|\.\.(?! TEXT)).*", marked)


def test_script_contains_only_the_requested_algorithms() -> None:
    text = script("check_batch", ("fixed_window", "gcra"), 1000).text.decode()
    contained = {name for name in ALGORITHMS if f"Mirrors {name}.py" in text}
    assert contained == {"fixed_window", "gcra"}


# ------------------------------------------------------------- sync and async limiter


def public_members(kind: type) -> dict[str, Any]:
    return {name: member for name, member in inspect.getmembers(kind) if not name.startswith("_")}


def test_both_limiters_have_the_same_methods() -> None:
    assert public_members(Limiter).keys() == public_members(AsyncLimiter).keys()


@pytest.mark.parametrize("name", public_members(Limiter))
def test_method_has_the_same_signature_and_docs_in_both_limiters(name: str) -> None:
    one, other = public_members(Limiter)[name], public_members(AsyncLimiter)[name]
    assert inspect.getdoc(one)
    assert inspect.getdoc(one) == inspect.getdoc(other)
    if callable(one):
        assert inspect.signature(one).parameters == inspect.signature(other).parameters


def test_both_limiters_have_the_same_constructor() -> None:
    assert inspect.signature(Limiter) == inspect.signature(AsyncLimiter)


# ------------------------------------------------------------------ distribution


def test_license_is_apache_2() -> None:
    license = (ROOT / "LICENSE").read_text("utf-8")
    assert re.search(r"Apache License\s+Version 2\.0, January 2004", license)
    assert PROJECT["project"]["license"] == "Apache-2.0"
    assert PROJECT["project"]["license-files"] == ["LICENSE"]


def test_version_matches_the_project_metadata() -> None:
    assert PROJECT["project"]["version"] == headgate.__version__


def test_wheel_contains_the_whole_package() -> None:
    """Including types, Lua and pages: the build takes the whole directory, and .gitignore excludes none of it."""
    assert PROJECT["tool"]["setuptools"] == {"packages": {"find": {"where": ["src"]}}}
    assert "graft src/headgate" in (ROOT / "MANIFEST.in").read_text("utf-8").splitlines()
    ignored = (ROOT / ".gitignore").read_text("utf-8").split()
    shipped = [file.relative_to(ROOT) for file in (*LUA, *C, SOURCE / "py.typed", *MODULES.values())]
    assert not [(file, pattern) for file in shipped for pattern in ignored if file.match(pattern.strip("/"))]


def test_installed_package_contains_types_and_lua() -> None:
    assert (files("headgate") / "py.typed").is_file()
    for file in LUA:
        assert files("headgate").joinpath(*file.relative_to(SOURCE).parts).is_file()
