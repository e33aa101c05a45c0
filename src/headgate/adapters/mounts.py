"""Where an ASGI app is mounted, and the paths that its requests have from the server's root on, and from there."""

from __future__ import annotations

from typing import Any, Final
from urllib.parse import urlparse

__all__ = ["placed", "root_of"]

MOST_LAYERS: Final = 100
"""Of middleware around an app, each of which calls the next one its `app`."""


def placed(path: str, root: str) -> tuple[str, str | None]:
    """The whole path, and that below the root, if there is one. An app that has a root serves both spellings."""
    path, root = path if path[:1] == "/" else _path_of(path), root.rstrip("/")
    if not root:
        return path, None
    if path.startswith(root) and path[len(root) : len(root) + 1] in ("", "/"):
        return path, path[len(root) :] or "/"
    return root + path, path


def root_of(app: Any) -> str:
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
