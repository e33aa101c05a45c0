"""Mounted apps: root paths of ASGI apps, and policy paths that never match because an app is mounted."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple
from urllib.parse import urlparse

from headgate.errors import InvalidInput
from headgate.policy.routes import Matcher, Template

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from headgate.policy.model import Policy

__all__ = ["AppRoute", "asgi_routes", "find_root_path", "split_mount", "unreachable_paths"]

MAX_MIDDLEWARE: Final = 100
"""Layers of middleware that are searched for the app, by their attribute `app`."""


def split_mount(path: str, root: str) -> tuple[str, str | None]:
    """The full path, and the path relative to the root path, if any: such an app serves both."""
    path, root = path if path[:1] == "/" else _path_of(path), root.rstrip("/")
    if not root:
        return path, None
    if path.startswith(root) and path[len(root) : len(root) + 1] in ("", "/"):
        return path, path[len(root) :] or "/"
    return root + path, path


def find_root_path(app: Any) -> str:
    """The root path that an app declares itself, as FastAPI does, of which outer middleware is not informed."""
    roots = [getattr(layer, "root_path", "") for layer in _layers(app)]
    return next((root for root in roots if isinstance(root, str) and root), "")


def _path_of(target: str) -> str:
    """The path of an absolute URL, which h11 accepts as a target and Quart routes by."""
    try:
        return urlparse(target).path
    except ValueError:
        return target


class AppRoute(NamedTuple):
    """A route of an app, with its full path."""

    path: str
    mounts: tuple[str, ...] = ()
    """The mount points of the apps that contain it, the outermost first: ("/api", "/api/v1")."""


def asgi_routes(app: Any) -> list[AppRoute]:
    """The routes of a Starlette or FastAPI app and of apps mounted in it; none if any is of an unknown kind."""
    found = [getattr(layer, "routes", None) for layer in _layers(app)]
    try:
        return list(_flatten(next((routes for routes in found if isinstance(routes, list)), []), "", ()))
    except (AttributeError, TypeError, RecursionError):
        return []


def _layers(app: Any) -> Iterator[Any]:
    """The app, and the apps inside it, if it is middleware."""
    for _ in range(MAX_MIDDLEWARE):
        yield app
        app = getattr(app, "app", None)


def _flatten(routes: Sequence[Any], prefix: str, mounts: tuple[str, ...]) -> Iterator[AppRoute]:
    for route in routes:
        included = getattr(route, "effective_route_contexts", None)  # FastAPI's included routers, in newer versions
        if included is not None:
            yield from (AppRoute(prefix + each.path, mounts) for each in included())
            continue
        inner, path = getattr(route, "routes", None), prefix + route.path
        if isinstance(inner, list) and inner:
            yield from _flatten(inner, path.rstrip("/"), (*mounts, path) if route.path.strip("/") else mounts)
        else:
            yield AppRoute(path, mounts)


def unreachable_paths(policy: Policy, routes: Sequence[AppRoute]) -> list[tuple[str, str]]:
    """Policy paths that lack the mount point of an app and so never match, each with the correct path."""
    in_rules = [template for rule in policy.rules for template in rule.templates]
    templates = list(dict.fromkeys([*in_rules, *(route.template for route in policy.routes)]))
    if not any(route.mounts for route in routes) or not templates:
        return []
    matcher, app_matcher = Matcher(templates), Matcher(list(filter(None, map(_template, routes))))
    reachable = {index for route in routes for index in matcher.match(_sample(route.path))}
    found: dict[str, str] = {}
    for route in routes:
        for mount in route.mounts:
            for index in matcher.match(_sample(route.path[len(mount.rstrip("/")) :])):
                text = templates[index].text
                if index not in reachable and not app_matcher.match(text.removesuffix("*")):
                    found.setdefault(text, mount.rstrip("/") + text)
    return list(found.items())


def _template(route: AppRoute) -> Template | None:
    try:
        return Template.parse(route.path)
    except InvalidInput:
        return None


def _sample(path: str) -> str:
    return "/".join(["~" if "{" in segment else segment for segment in path.split("/")])
