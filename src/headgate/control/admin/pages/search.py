"""Searching lists, and clients given in URLs, without ever putting a raw API key into a URL."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlencode

from starlette.responses import RedirectResponse

from headgate.control.service import ClientRef
from headgate.errors import InvalidInput

if TYPE_CHECKING:
    from collections.abc import Mapping

    from starlette.responses import Response

    from headgate.control.admin.pages.base import Form, Visit

__all__ = ["client_from", "list_filter", "redirect_without_key", "search"]

STATES: Final = (("all", "All"), ("active", "Active"), ("future", "Scheduled"), ("expired", "Expired"))
FIELDS: Final = {
    "/clients": ("search",),
    "/overrides": ("search", "state"),
    "/blocks": ("search", "state"),
    "/audit": ("search", "author"),
}
"""The searchable lists and their form fields."""
TEXT_FIELDS: Final = ("search", "author")
"""Fields into which people may paste API keys."""


def search(visit: Visit) -> Response:
    """Redirect a search form to its list. The form is posted because the text may be an API key."""
    path = visit.form.get("list", "")
    if path not in FIELDS:
        raise InvalidInput("unknown list")
    return _redirect(path, {name: visit.form.get(name, "") for name in FIELDS[path]}, _hash_keys(visit, visit.form))


def redirect_without_key(visit: Visit) -> Response | None:
    """A redirect to the same page with API keys in its URL hashed; None if there are none."""
    hashed = _hash_keys(visit, visit.query)
    return _redirect(visit.request.url.path, visit.query, hashed) if hashed else None


def list_filter(visit: Visit) -> dict[str, Any]:
    """The search text, state and page of a list."""
    state = visit.query.get("state", "all")
    return {
        "search": visit.query.get("search", ""),
        "state": state if state in dict(STATES) else "all",
        "after": visit.query.get("after") or None,
    }


def client_from(form: Form) -> ClientRef:
    """The client that a page or form is about."""
    kind, value = form.get("kind", ""), form.get("value", "")
    if not kind or not value:
        raise InvalidInput("no client given: use the search above")
    if kind == "api_key" and not value.startswith("hmac:"):
        # The value is not repeated: URLs are kept in browser histories and logs.
        raise InvalidInput("API keys must not appear in URLs: use the search above, which hashes them")
    return ClientRef(kind, value)


def _hash_keys(visit: Visit, typed: Form) -> dict[str, str]:
    """The hashes of texts that may be API keys, by field."""
    texts = {name: typed[name] for name in TEXT_FIELDS if typed.get(name)}
    return {name: found for name, text in texts.items() if (found := visit.service.searchable(text)) != text}


def _redirect(path: str, query: Mapping[str, str], hashed: Mapping[str, str]) -> Response:
    given = {name: value for name, value in {**query, **hashed}.items() if value}
    return RedirectResponse(f"{path}?{urlencode(given)}" if given else path, 303)
