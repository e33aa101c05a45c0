"""Build the documentation site into .build/site: `make docs`, or `make docs DOCS_ARGS=--serve` to read it.

The pages are those of docs/ and of the top folder, which stay readable without the site. They are staged in
.build/site-pages, with their links adapted, next to pages of API reference that are made from docstrings. The
generator, MkDocs with the Material theme, then checks every link and anchor, and fails if one leads nowhere. Each
version has a folder of its own, and stays when another is built. Nothing is loaded from the network, neither here nor
by the site.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from posixpath import normpath, relpath

ROOT = Path(__file__).parents[1]
TOP_PAGES = {
    "README.md": "index.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
}
TUTORIAL = ["tutorial", "operating"]
HOW_TO = {
    "Frameworks": ["asgi", "flask", "django", "aiohttp", "grpc", "functions", "view-limits", "messages"],
    "Gateways": ["gateways", "serve", "moving-from-ratelimit"],
    "Clients": ["clients"],
    "Operation": [
        "config-store",
        "admin",
        "rollouts",
        "blocks",
        "lists",
        "abuse",
        "actions",
        "overload",
        "fair-sharing",
        "metrics",
        "decision-log",
        "anomalies",
        "growth",
    ],
    "Quotas": ["quotas", "ledger"],
    "Capacity planning": ["sizing", "simulate", "replay"],
    "Development": ["testing", "migrating", "contributing"],
}
REFERENCE = [
    "policies", "routes", "identity", "limits", "algorithms", "decision", "http", "cli", "redis", "memory", "errors",
    "glossary", "changelog", "security",
]  # fmt: skip
EXPLANATION = ["outages", "hot-keys", "regions", "bounds", "scaling", "chaos", "benchmarks", "threat-model"]
API = {
    "Limiters and limits": ["headgate"],
    "Clients": ["headgate.clients", "headgate.clients.httpx", "headgate.clients.requests", "headgate.clients.aiohttp"],
    "Policies": ["headgate.policy"],
    "Testing": ["headgate.testing"],
    "Adapters": [
        f"headgate.adapters.{name}" for name in ("asgi", "wsgi", "fastapi", "flask", "django", "aiohttp", "functions")
    ],
    "Telemetry": ["headgate.telemetry.prometheus", "headgate.telemetry.otel"],
}
"""Pages of the API reference, and the modules that each describes."""
SEARCH_BOOSTS = {
    "http.md": 2, "clients.md": 2, "outages.md": 2, "hot-keys.md": 2,
    "errors.md": 0.3, "decisions": 0.2, "api": 0.4, "changelog.md": 0.2, "contributing.md": 0.2, "index.md": 0.5,
}  # fmt: skip
"""The weight of a page, or of a folder, in the results of a search."""
LINK = re.compile(r"(?<!!)\[(?P<text>[^\]]*)\]\((?P<target>[^)\s]+)\)")
PICTURE = re.compile(r"(?<=!)\[(?P<text>[^\]]*)\]\((?P<target>[^)\s]+)\)")
CODE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)


def main() -> int:
    parser = argparse.ArgumentParser(prog="make docs", description=__doc__)
    parser.add_argument("--serve", action="store_true", help="then serve the site on http://127.0.0.1:8000/")
    parser.add_argument("--dir", type=Path, default=ROOT / ".build", help="where to build (default: .build)")
    options = parser.parse_args()
    version = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["version"]
    site = build(options.dir, version)
    print(f"built {site}")
    if options.serve:
        handler = partial(SimpleHTTPRequestHandler, directory=str(site.parent))
        print("read it on http://127.0.0.1:8000/, and stop with Ctrl-C")
        ThreadingHTTPServer(("127.0.0.1", 8000), handler).serve_forever()
    return 0


def build(directory: Path, version: str) -> Path:
    """Build the site of one version; returns its folder."""
    pages, target = directory / "site-pages", directory / "site" / version
    shutil.rmtree(pages, ignore_errors=True)
    stage(pages)
    config = directory / "mkdocs.json"  # MkDocs reads YAML, of which JSON is a part
    base = {"INHERIT": str(ROOT / "mkdocs.yml"), "docs_dir": str(pages), "site_dir": str(target), "nav": navigation()}
    config.write_text(json.dumps(base), "utf-8")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--config-file", str(config)]
    quiet = os.environ | {"NO_MKDOCS_2_WARNING": "1"}  # an announcement of the theme's authors
    done = subprocess.run(command, cwd=ROOT, env=quiet, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        sys.exit(f"the site could not be built:\n{done.stdout}")
    list_versions(target.parent)
    return target


def list_versions(site: Path) -> None:
    """Write the list of all versions that the site has, for the selector, and lead readers to the newest."""
    found = sorted(
        (each.name for each in site.iterdir() if (each / "index.html").exists()), key=_by_number, reverse=True
    )
    versions = [{"version": name, "title": name, "aliases": ["latest"] if name == found[0] else []} for name in found]
    (site / "versions.json").write_text(json.dumps(versions), "utf-8")
    (site / "index.html").write_text(f'<meta http-equiv="refresh" content="0; url={found[0]}/">\n', "utf-8")


def _by_number(version: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", version)]


def navigation() -> list[object]:
    decisions = [f"decisions/{page.name}" for page in sorted((ROOT / "docs" / "decisions").glob("*.md"))]
    listed = {*TUTORIAL, *REFERENCE, *EXPLANATION, *(name for names in HOW_TO.values() for name in names)}
    others = [page.stem for page in sorted((ROOT / "docs").glob("*.md")) if page.stem not in listed]
    how_to: list[object] = [{topic: pages(names)} for topic, names in HOW_TO.items()]
    return [
        {"Home": "index.md"},
        {"Tutorial": pages(TUTORIAL)},
        {"How-to guides": [*how_to, *pages(others)]},
        {"Reference": [*pages(REFERENCE), {"API": [f"api/{_slug(title)}.md" for title in API]}]},
        {"Explanation": [*pages(EXPLANATION), {"Decision records": decisions}]},
    ]


def pages(names: list[str]) -> list[object]:
    return [f"{name}.md" for name in names]


def stage(target: Path) -> None:
    """Copy all pages, with links that fit their new places, and write the pages of the API reference."""
    sources = {page: page.relative_to(ROOT / "docs") for page in sorted((ROOT / "docs").rglob("*.md"))}
    sources |= {ROOT / name: Path(page) for name, page in TOP_PAGES.items()}
    places = {page.relative_to(ROOT).as_posix(): place.as_posix() for page, place in sources.items()}
    shutil.copytree(ROOT / "docs" / "pictures", target / "pictures")
    for page, place in sources.items():
        (target / place).parent.mkdir(parents=True, exist_ok=True)
        adapted = adapt_links(page.read_text("utf-8"), page.relative_to(ROOT).as_posix(), places, target)
        boost = SEARCH_BOOSTS.get(place.as_posix(), SEARCH_BOOSTS.get(place.parts[0], 1))
        (target / place).write_text(f"---\nsearch:\n  boost: {boost}\n---\n\n{adapted}", "utf-8")
    (target / "api").mkdir()
    for title, modules in API.items():
        entries = "\n\n".join(f"::: {module}" for module in modules)
        text = f"---\nsearch:\n  boost: {SEARCH_BOOSTS['api']}\n---\n\n# {title}\n\n{entries}\n"
        (target / "api" / f"{_slug(title)}.md").write_text(text, "utf-8")


def adapt_links(text: str, page: str, places: dict[str, str], target: Path) -> str:
    """Rewrite the links of a page outside its code blocks."""

    def adapt(match: re.Match[str]) -> str:
        path, hash_sign, anchor = match["target"].partition("#")
        if not path or re.match(r"[a-z]+:", path):
            return match[0]
        linked = normpath(f"{page.rpartition('/')[0]}/{path}".lstrip("/"))
        here = places[page].rpartition("/")[0]
        if linked in places:
            place = places[linked]
        elif (ROOT / linked).is_file():
            place = linked.removeprefix("docs/") if linked.startswith("docs/pictures/") else f"files/{linked}"
            if place.startswith("files/"):
                (target / place).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(ROOT / linked, target / place)
        else:
            return match["text"]  # a folder of the repository
        return f"[{match['text']}]({relpath(place, here or '.')}{hash_sign}{anchor})"

    parts, end = [], 0
    for block in [*CODE.finditer(text), None]:
        prose = text[end : block.start() if block else len(text)]
        parts.append(PICTURE.sub(adapt, LINK.sub(adapt, prose)))
        if block:
            parts.append(block[0])
            end = block.end()
    return "".join(parts)


def _slug(title: str) -> str:
    return title.lower().replace(" ", "-")


if __name__ == "__main__":
    sys.exit(main())
