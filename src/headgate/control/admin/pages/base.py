"""The base of all pages: the visit, form data, templates, flash messages and error pages."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Callable
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeAlias
from urllib.parse import parse_qsl, urlencode

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup
from starlette.responses import HTMLResponse, RedirectResponse, Response

from headgate.control.admin.middleware import BODY
from headgate.control.admin.pages import filters
from headgate.control.admin.problems import of_error
from headgate.control.admin.sessions import CSRF_FIELD, FormRefused
from headgate.control.service import ClientRef
from headgate.control.service.client_lookup import kind_name, noun_of, short_label
from headgate.errors import HeadgateError

if TYPE_CHECKING:
    from starlette.requests import Request

    from headgate.control.admin.pages.forms import Submission
    from headgate.control.admin.problems import ProblemDetails
    from headgate.control.admin.sessions import Session, Sessions
    from headgate.control.admin.tokens import Tokens
    from headgate.control.service.models import Role
    from headgate.control.service.service import AdminService

__all__ = ["Form", "Handler", "PageRenderer", "Visit", "local_path"]

HERE: Final = Path(__file__).parent
STATIC: Final = HERE / "static"

MENU: Final[tuple[tuple[str, str, Role], ...]] = (
    ("/", "Overview", "viewer"),
    ("/clients", "Clients", "viewer"),
    ("/overrides", "Overrides", "viewer"),
    ("/blocks", "Blocks", "viewer"),
    ("/requests", "Requests", "viewer"),
    ("/actions", "Actions", "viewer"),
    ("/policy", "Policy", "viewer"),
    ("/regions", "Regions", "viewer"),
    ("/ledger", "Ledger", "viewer"),
    ("/audit", "Audit", "viewer"),
    ("/tokens", "Tokens", "admin"),
)
"""Paths, titles, and the least role that sees them."""

FLASH_COOKIE: Final = "flash"
FLASH_LIFETIME_S: Final = 60
MAX_FLASH_LENGTH: Final = 1500
MAX_FIELDS: Final = 100
FORM_TYPE: Final = "application/x-www-form-urlencoded"


class Form(dict[str, str]):
    """Form data by field name, stripped and with normalized line ends."""

    def __init__(self, pairs: list[tuple[str, str]]) -> None:
        super().__init__((name, value.replace("\r\n", "\n").strip()) for name, value in pairs)
        self.pairs = pairs
        """The raw fields."""

    def all(self, name: str) -> list[str]:
        """All values of a repeated field."""
        return [value for each, value in self.pairs if each == name]

    def put(self, name: str, value: str) -> None:
        """Replace all values of a field."""
        self.pairs = [*((each, old) for each, old in self.pairs if each != name), (name, value)]
        self[name] = value

    def number(self, name: str) -> int | None:
        """A whole number, or None if the field is missing or invalid."""
        value = self.get(name, "")
        return int(value) if value.isascii() and value.isdigit() and len(value) < 19 else None


class Visit:
    """A request by a signed-in user."""

    def __init__(self, renderer: PageRenderer, request: Request, session: Session, form: Form | None = None) -> None:
        self.renderer = renderer
        self.request = request
        self.session = session
        self.form = form or Form([])
        self.query = Form(request.query_params.multi_items())
        self.actor = session.actor
        self.service = renderer.service
        self.now_us = renderer.tokens.clock.now_us()
        self.zone = filters.parse_zone(request.cookies.get("zone"))
        """The time zone of the browser, from a cookie set by the script."""
        self.id: int = request.path_params.get("id", 0)
        """The numeric id in the path."""

    def name_of(self, who: ClientRef) -> str:
        """The display name of a client."""
        try:
            return self.service.clients.name_of(who)
        except HeadgateError:
            return f"this {who.kind}"

    def page(
        self,
        template: str,
        here: str = "",
        *,
        submission: Submission | None = None,
        status: int | None = None,
        **values: Any,
    ) -> Response:
        """A page, with the status of its submission unless another is given. `here` is its entry in the menu."""
        flash = _flash(self.request)
        text = self.renderer.render(
            template,
            actor=self.actor,
            csrf=Markup('<input type="hidden" name="{}" value="{}">').format(CSRF_FIELD, self.session.csrf),
            flash=flash,
            here=here,
            menu=[(path, name) for path, name, role in MENU if self.actor.may(role) and self._has(path)],
            now_us=self.now_us,
            submission=submission,
            version=self._version(),
            zone=self.zone,
            **values,
        )
        response = HTMLResponse(text, status or (200 if submission is None else submission.status))
        if flash:
            response.delete_cookie(FLASH_COOKIE, **self.renderer.sessions.cookie_options)
        return response

    def redirect(self, path: str, message: str, notes: tuple[str, ...] = ()) -> Response:
        """Redirect to another page, which shows the message and the notes once."""
        response = RedirectResponse(path, 303)
        flash = json.dumps([message[:MAX_FLASH_LENGTH], *(note[:300] for note in notes[:3])]).encode()
        value = base64.urlsafe_b64encode(flash).decode()
        response.set_cookie(FLASH_COOKIE, value, max_age=FLASH_LIFETIME_S, **self.renderer.sessions.cookie_options)
        return response

    def _has(self, path: str) -> bool:
        """False for pages about a component that this server does not have."""
        return path != "/ledger" or self.service.ledger.is_available

    def _version(self) -> int | None:
        try:
            return self.service.version
        except HeadgateError:
            return None  # the page itself reports the outage


Handler: TypeAlias = Callable[[Visit], Response]
PublicHandler: TypeAlias = "Callable[[PageRenderer, Request], Response]"


class PageRenderer:
    """Renders templates, and wraps page handlers into endpoints that require a session."""

    def __init__(self, service: AdminService, sessions: Sessions, tokens: Tokens) -> None:
        self.service = service
        self.sessions = sessions
        self.tokens = tokens
        self._templates = Environment(
            loader=FileSystemLoader(HERE / "templates"),
            autoescape=True,
            undefined=StrictUndefined,
            trim_blocks=True,
            lstrip_blocks=True,
        )
        self._templates.filters |= filters.FILTERS
        self._templates.globals |= {
            "client_url": filters.client_url,
            "count": filters.count,
            "kind_name": kind_name,
            "label_of": self._label_of,
            "noun_of": noun_of,
            "query": urlencode,
            "scope": filters.scope,
            "short_label": short_label,
            "static": _static_url,
        }

    def endpoint(self, handler: Handler) -> Callable[[Request], Response]:
        """An endpoint that requires a session and checks submitted forms."""
        return self.public_endpoint(lambda _, request: self._handle(request, handler))

    def public_endpoint(self, handler: PublicHandler) -> Callable[[Request], Response]:
        """An endpoint without a session; errors become error pages."""

        def endpoint(request: Request) -> Response:
            try:
                return handler(self, request)
            except HeadgateError as error:
                return self.problem(request, of_error(error))

        return endpoint

    def render(self, template: str, **values: Any) -> str:
        return self._templates.get_template(template).render(**values)

    def _handle(self, request: Request, handler: Handler) -> Response:
        if request.method == "POST":
            form = self.form(request)
            return handler(Visit(self, request, self.sessions.check_form(request, form), form))
        session = self.sessions.find(request)
        if session is None:
            target = _path_and_query(request)
            query = "" if target in ("/", "/overview/live") else f"?{urlencode({'next': target})}"
            return RedirectResponse(f"/login{query}", 303)
        return handler(Visit(self, request, session))

    def form(self, request: Request) -> Form:
        """The form in the body of a request."""
        if request.headers.get("content-type", "").partition(";")[0].strip().lower() != FORM_TYPE:
            raise FormRefused("expected a form")
        try:
            body = bytes(request.scope[BODY]).decode()
            return Form(parse_qsl(body, keep_blank_values=True, max_num_fields=MAX_FIELDS))
        except ValueError as error:
            raise FormRefused("the form cannot be parsed") from error

    def problem(self, request: Request, problem: ProblemDetails) -> Response:
        """An error page, with navigation for signed-in users."""
        try:
            session = self.sessions.find(request)
        except HeadgateError:  # sessions are in the same database
            session = None
        can_retry = problem.status == 503 and request.method == "GET"
        retry = local_path(_path_and_query(request)) if can_retry else None
        texts: dict[str, Any] = {"heading": problem.title, "text": problem.detail, "retry": retry}
        if session is None:
            response: Response = HTMLResponse(self.render("standalone.html", **texts), problem.status)
        else:
            response = Visit(self, request, session).page("error.html", status=problem.status, **texts)
        response.headers.update(problem.headers)
        return response

    def _label_of(self, kind: str, value: str) -> str | None:
        try:
            return self.service.clients.label_of(ClientRef(kind, value))
        except HeadgateError:
            return None


def _path_and_query(request: Request) -> str:
    return request.url.path + (f"?{request.url.query}" if request.url.query else "")


def local_path(path: str) -> str:
    """The path if it stays on this server, otherwise "/"."""
    return path if re.fullmatch(r"/(?![/\\])[^\\\x00-\x20\x7f]*", path) else "/"


def _flash(request: Request) -> list[str]:
    """The message and notes of the previous page; empty if there are none."""
    try:
        message, *notes = json.loads(base64.urlsafe_b64decode(request.cookies.get(FLASH_COOKIE, "")))
        return [str(message), *map(str, notes)]
    except (ValueError, TypeError, RecursionError):  # not set by this server
        return []


@cache
def _static_url(name: str) -> str:
    """The URL of a static file with a hash of its content, for caching."""
    return f"/static/{name}?v={sha256((STATIC / name).read_bytes()).hexdigest()[:12]}"
