"""Where an ASGI app is mounted, and the paths that its requests have from the server's root on, and from there."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple
from urllib.parse import urlparse

from headgate.errors import InvalidInput
from headgate.policy.routes import Matcher, Template

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from headgate.policy.model import Policy

__all__ = ["AppRoute", "asgi_routes", "find_root_path", "split_mount", "unreachable_paths"]

MOST_LAYERS: Final = 100
"""Of middleware around an app, each of which calls the next one its `app`."""


def split_mount(path: str, root: str) -> tuple[str, str | None]:
    """The whole path, and that below the root, if there is one. An app that has a root serves both spellings."""
    path, root = path if path[:1] == "/" else _path_of(path), root.rstrip("/")
    if not root:
        return path, None
    if path.startswith(root) and path[len(root) : len(root) + 1] in ("", "/"):
        return path, path[len(root) :] or "/"
    return root + path, path


def find_root_path(app: Any) -> str:
    """Where the app says it is mounted: FastAPI tells those who stand behind it, but not who stands before."""
    for _ in range(MOST_LAYERS):
        root = getattr(app, "root_path", "")
        if isinstance(root, str) and root:
            return root
        app = getattr(app, "app", None)
    return ""


def _path_of(target: str) -> str:
    """The path of a whole URL, which h11 lets through: what Quart routes by, and others answer with a 404."""
    try:
        return urlparse(target).path
    except ValueError:
        return target


class AppRoute(NamedTuple):
    """A route of an app, with the path that requests have in front of the app."""

    path: str
    mounts: tuple[str, ...] = ()
    """Where the apps are mounted that contain it, the outermost first: ("/api", "/api/v1")."""


def asgi_routes(app: Any) -> list[AppRoute]:
    """The routes of a Starlette or FastAPI app and of those mounted in it; none if one is of an unknown kind."""
    for _ in range(MOST_LAYERS):
        routes = getattr(app, "routes", None)
        if isinstance(routes, list):
            try:
                return list(_flattened(routes, "", ()))
            except (AttributeError, TypeError, RecursionError):
                return []
        app = getattr(app, "app", None)
    return []


def _flattened(routes: Sequence[Any], prefix: str, mounts: tuple[str, ...]) -> Iterator[AppRoute]:
    for route in routes:
        included = getattr(route, "effective_route_contexts", None)  # FastAPI's included routers, in newer versions
        if included is not None:
            yield from (AppRoute(prefix + each.path, mounts) for each in included())
            continue
        inner, path = getattr(route, "routes", None), prefix + route.path
        if isinstance(inner, list) and inner:
            yield from _flattened(inner, path.rstrip("/"), (*mounts, path) if route.path.strip("/") else mounts)
        else:
            yield AppRoute(path, mounts)


def unreachable_paths(policy: Policy, routes: Sequence[AppRoute]) -> list[tuple[str, str]]:
    """Paths of the policy that match routes of a mounted app only without the path of its mount, and so never match.

    Each with the path to write instead.
    """
    named = [template for rule in policy.rules for template in rule.templates]
    templates = list(dict.fromkeys([*named, *(route.template for route in policy.routes)]))
    if not any(route.mounts for route in routes) or not templates:
        return []
    matcher, whole = Matcher(templates), Matcher(list(filter(None, map(_template, routes))))
    reachable = {index for route in routes for index in matcher.match(_sample(route.path))}
    found: dict[str, str] = {}
    for route in routes:
        for mount in route.mounts:
            for index in matcher.match(_sample(route.path[len(mount.rstrip("/")) :])):
                text = templates[index].text
                if index not in reachable and not whole.match(text.removesuffix("*")):
                    found.setdefault(text, mount.rstrip("/") + text)
    return list(found.items())


def _template(route: AppRoute) -> Template | None:
    try:
        return Template.parse(route.path)
    except InvalidInput:
        return None


def _sample(path: str) -> str:
    """A path that the route serves."""
    return "/".join(["~" if "{" in segment else segment for segment in path.split("/")])
