"""The base of all pages: the visit, form data, templates, flash messages and error pages."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias
from urllib.parse import parse_qsl, urlencode

from jinja2 import Environment, FileSystemLoader, StrictUndefined, pass_context
from markupsafe import Markup
from starlette.responses import HTMLResponse, RedirectResponse, Response

from headgate.control.admin.middleware import BODY
from headgate.control.admin.pages import filters
from headgate.control.admin.problems import of_error
from headgate.control.admin.sessions import CSRF_FIELD, FormRefused
from headgate.control.service import ClientRef
from headgate.control.service.candidates import kind_name, noun_of, short_label
from headgate.errors import HeadgateError

if TYPE_CHECKING:
    from datetime import tzinfo

    from jinja2.runtime import Context
    from starlette.requests import Request

    from headgate.control.admin.problems import ProblemDetails
    from headgate.control.admin.sessions import Session, Sessions
    from headgate.control.admin.tokens import Tokens
    from headgate.control.service import Actor
    from headgate.control.service.service import AdminService

__all__ = ["Form", "Handler", "PageRenderer", "Visit", "local_path"]

HERE: Final = Path(__file__).parent
STATIC: Final = HERE / "static"
TEMPLATES: Final = HERE / "templates"

MENU: Final = (
    ("/", "Overview", "viewer"),
    ("/clients", "Clients", "viewer"),
    ("/overrides", "Overrides", "viewer"),
    ("/blocks", "Blocks", "viewer"),
    ("/policy", "Policy", "viewer"),
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


class Flash(NamedTuple):
    """A message shown once, on the next page."""

    message: str
    notes: tuple[str, ...] = ()


class Visit(NamedTuple):
    """A request by a signed-in user."""

    renderer: PageRenderer
    request: Request
    session: Session
    form: Form

    @property
    def actor(self) -> Actor:
        return self.session.actor

    @property
    def service(self) -> AdminService:
        return self.renderer.service

    @property
    def query(self) -> Form:
        return Form(list(self.request.query_params.multi_items()))

    @property
    def zone(self) -> tzinfo:
        """The time zone of the browser, from a cookie set by the script."""
        return filters.parse_zone(self.request.cookies.get("zone"))

    @property
    def now_us(self) -> int:
        return self.renderer.tokens.clock.now_us()

    @property
    def id(self) -> int:
        """The numeric id in the path."""
        id: int = self.request.path_params["id"]
        return id

    def name_of(self, who: ClientRef) -> str:
        """The display name of a client."""
        try:
            return self.service.clients.name_of(who)
        except HeadgateError:
            return f"this {who.kind}"

    def page(self, template: str, *, status: int | None = None, here: str = "", **values: Any) -> Response:
        """A page, with the status of its `submission` unless another is given."""
        if status is None:
            status = values["submission"].status if values.get("submission") else 200
        return self.renderer.page(self, template, status=status, here=here, **values)

    def redirect(self, path: str, message: str, notes: tuple[str, ...] = ()) -> Response:
        """Redirect to another page, which shows the message."""
        response = RedirectResponse(path, 303)
        flash = json.dumps([message[:MAX_FLASH_LENGTH], *(note[:300] for note in notes[:3])]).encode()
        value = base64.urlsafe_b64encode(flash).decode()
        response.set_cookie(FLASH_COOKIE, value, max_age=FLASH_LIFETIME_S, **self.renderer.cookie)
        return response


Handler: TypeAlias = Callable[[Visit], Response]
Endpoint: TypeAlias = Callable[..., Response]


class PageRenderer:
    """Renders templates, and wraps page handlers into endpoints that require a session."""

    def __init__(self, service: AdminService, sessions: Sessions, tokens: Tokens, *, secure: bool = False) -> None:
        self.service = service
        self.sessions = sessions
        self.tokens = tokens
        self.cookie: Final[dict[str, Any]] = {"secure": secure, "httponly": True, "samesite": "strict"}
        """Cookie attributes, as for the session cookie."""
        self._templates = Environment(
            loader=FileSystemLoader(TEMPLATES),
            autoescape=True,
            undefined=StrictUndefined,
            trim_blocks=True,
            lstrip_blocks=True,
        )
        self._templates.filters |= {
            "annotate": _annotate,
            "duration": filters.duration,
            "end_time": _end_time,
            "latency": filters.latency,
            "number": filters.number,
            "option": lambda value: (value, value),
            "percent": filters.percent,
            "short_hash": filters.short_hash,
            "tick": filters.tick,
            "time": _time,
        }
        self._templates.globals |= {
            "client_url": filters.client_url,
            "kind_name": kind_name,
            "noun_of": noun_of,
            "query": urlencode,
            "scope": filters.scope,
            "short_label": short_label,
            "static": _static_url,
        }

    def endpoint(self, handler: Handler) -> Endpoint:
        """An endpoint that requires a session and checks submitted forms."""
        return self.public_endpoint(lambda request: self._handle(request, handler))

    def public_endpoint(self, handler: Endpoint) -> Endpoint:
        """An endpoint without a session; errors become error pages."""

        def endpoint(request: Request) -> Response:
            try:
                return handler(request)
            except HeadgateError as error:
                return self.problem(request, of_error(error))

        return endpoint

    def page(self, visit: Visit, template: str, *, status: int = 200, here: str = "", **values: Any) -> Response:
        flash = _flash(visit.request)
        text = self.render(
            template,
            actor=visit.actor,
            csrf=Markup('<input type="hidden" name="{}" value="{}">').format(CSRF_FIELD, visit.session.csrf),
            flash=flash,
            here=here,
            menu=[(path, name) for path, name, role in MENU if visit.actor.may(role)],  # type: ignore[arg-type] # of MENU
            now_us=visit.now_us,
            version=self._version(),
            zone=visit.zone,
            **values,
        )
        response = HTMLResponse(text, status)
        if flash is not None:
            response.delete_cookie(FLASH_COOKIE, **self.cookie)
        return response

    def render(self, template: str, **values: Any) -> str:
        return self._templates.get_template(template).render(label_of=self._label_of, **values)

    def _handle(self, request: Request, handler: Handler) -> Response:
        if request.method == "POST":
            form = self.form(request)
            return handler(Visit(self, request, self.sessions.check_form(request, form), form))
        session = self.sessions.find(request)
        if session is None:
            target = _path_and_query(request)
            query = "" if target in ("/", "/overview/live") else f"?{urlencode({'next': target})}"
            return RedirectResponse(f"/login{query}", 303)
        return handler(Visit(self, request, session, Form([])))

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
            visit = Visit(self, request, session, Form([]))
            response = self.page(visit, "error.html", status=problem.status, **texts)
        response.headers.update(problem.headers)
        return response

    def _label_of(self, kind: str, value: str) -> str | None:
        try:
            return self.service.clients.label_of(ClientRef(kind, value))
        except HeadgateError:
            return None

    def _version(self) -> int | None:
        try:
            return self.service.version
        except HeadgateError:
            return None  # the page itself reports the outage


def _path_and_query(request: Request) -> str:
    return request.url.path + (f"?{request.url.query}" if request.url.query else "")


def local_path(path: str) -> str:
    """The path if it stays on this server, otherwise "/"."""
    return path if re.fullmatch(r"/(?![/\\])[^\\\x00-\x20\x7f]*", path) else "/"


@pass_context
def _time(context: Context, at_us: int | None, never: str = "–") -> str:
    return filters.time_tag(at_us, now_us=context["now_us"], zone=context["zone"], never=never)


@pass_context
def _annotate(context: Context, text: str) -> Markup:
    return filters.annotate(text, context["label_of"], context["zone"])


@pass_context
def _end_time(context: Context, at_us: int) -> str:
    return filters.end_time(at_us, zone=context["zone"])


def _flash(request: Request) -> Flash | None:
    try:
        message, *notes = json.loads(base64.urlsafe_b64decode(request.cookies.get(FLASH_COOKIE, "")))
        return Flash(str(message), tuple(map(str, notes)))
    except (ValueError, TypeError, RecursionError):  # not set by this server
        return None


def _static_url(name: str) -> str:
    """The URL of a static file with a hash of its content, for caching."""
    if name not in _STATIC_HASHES:
        _STATIC_HASHES[name] = sha256((STATIC / name).read_bytes()).hexdigest()[:12]
    return f"/static/{name}?v={_STATIC_HASHES[name]}"


_STATIC_HASHES: Final[dict[str, str]] = {}
