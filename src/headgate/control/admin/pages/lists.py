"""The searchable lists, and clients given in URLs, without ever putting a raw API key into a URL."""

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
    from headgate.control.admin.pages.forms import Submission

__all__ = ["client_from", "search", "show_list"]

STATES: Final = (("all", "All"), ("active", "Active"), ("future", "Scheduled"), ("expired", "Expired"))
LISTS: Final[dict[str, tuple[str, ...]]] = {
    "/clients": ("search", "after"),
    "/overrides": ("search", "state", "after"),
    "/blocks": ("search", "state", "after"),
    "/ledger": ("search", "after"),
    "/audit": ("search", "author", "before"),
}
"""The lists and their query fields. Service and template have the name of the list."""
DEFAULTS: Final[dict[str, Any]] = {"search": "", "state": "all", "after": None, "author": None, "before": None}
TEXT_FIELDS: Final = ("search", "author")
"""Fields into which people may paste API keys."""


def show_list(visit: Visit, submission: Submission | None = None) -> Response:
    """A page of a list. API keys in its URL are hashed by a redirect."""
    name = visit.request.url.path.split("/")[1]
    query, path = visit.query, f"/{name}"
    if hashed := _hash_keys(visit, query):
        return _redirect(path, query, hashed)
    if query.get("state") not in dict(STATES):
        query["state"] = "all"
    values: dict[str, Any] = {field: query.get(field) or DEFAULTS[field] for field in LISTS[path]}
    found = getattr(visit.service, name).list(**values)
    return visit.page(f"{name}.html", path, submission=submission, found=found, states=STATES, **values)


def search(visit: Visit) -> Response:
    """Redirect a search form to its list. The form is posted because the text may be an API key."""
    path = visit.form.get("list", "")
    if path not in LISTS:
        raise InvalidInput("unknown list")
    query = {name: visit.form.get(name, "") for name in LISTS[path] if name not in ("after", "before")}
    return _redirect(path, query, _hash_keys(visit, visit.form))


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
