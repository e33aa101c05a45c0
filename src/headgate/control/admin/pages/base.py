"""What every page is made with: who visits, what was sent, the templates, and what is said when something fails."""

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
"""Paths, their names, and the least role that sees them."""

FLASH: Final = "flash"
FLASH_SECONDS: Final = 60
LONGEST_FLASH: Final = 1500
MOST_FIELDS: Final = 100
FORM_TYPE: Final = "application/x-www-form-urlencoded"


class Form(dict[str, str]):
    """What was sent, by name. Surrounding blanks are taken away, lines end as on this machine."""

    def __init__(self, pairs: list[tuple[str, str]]) -> None:
        super().__init__((name, value.replace("\r\n", "\n").strip()) for name, value in pairs)
        self.pairs = pairs
        """All of it, as it came."""

    def all(self, name: str) -> list[str]:
        """Every value of a name that may come several times."""
        return [value for each, value in self.pairs if each == name]

    def put(self, name: str, value: str) -> None:
        """Forget what was sent under this name, for something else."""
        self.pairs = [*((each, sent) for each, sent in self.pairs if each != name), (name, value)]
        self[name] = value

    def number(self, name: str) -> int | None:
        """A whole number, as pages put it into hidden fields; None if there is none."""
        value = self.get(name, "")
        return int(value) if value.isascii() and value.isdigit() and len(value) < 19 else None


class Flash(NamedTuple):
    """What the next page says first."""

    said: str
    notes: tuple[str, ...] = ()


class Visit(NamedTuple):
    """Somebody who has signed in, and what they ask for."""

    frame: PageRenderer
    request: Request
    session: Session
    form: Form

    @property
    def actor(self) -> Actor:
        return self.session.actor

    @property
    def service(self) -> AdminService:
        return self.frame.service

    @property
    def query(self) -> Form:
        return Form(list(self.request.query_params.multi_items()))

    @property
    def zone(self) -> tzinfo:
        """That of the browser, as its script has told it."""
        return filters.zone_named(self.request.cookies.get("zone"))

    @property
    def now_us(self) -> int:
        return self.frame.tokens.clock.now_us()

    def name_of(self, who: ClientRef) -> str:
        """The name of a client for people; a client that can't be read goes by its kind."""
        try:
            return self.service.clients.name_of(who)
        except HeadgateError:
            return f"this {who.kind}"

    def page(self, template: str, *, status: int = 200, here: str = "", **values: Any) -> Response:
        """A whole page. What was to be said since the last one is said now, and not again."""
        return self.frame.page(self, template, status=status, here=here, **values)

    def go(self, path: str, said: str, notes: tuple[str, ...] = ()) -> Response:
        """To another page by GET, which then says what was done."""
        response = RedirectResponse(path, 303)
        written = json.dumps([said[:LONGEST_FLASH], *(note[:300] for note in notes[:3])]).encode()
        said_then = base64.urlsafe_b64encode(written).decode()
        response.set_cookie(FLASH, said_then, max_age=FLASH_SECONDS, **self.frame.cookie)
        return response


Handler: TypeAlias = Callable[[Visit], Response]
Endpoint: TypeAlias = Callable[..., Response]


class PageRenderer:
    """Makes endpoints out of what a page does for somebody who has signed in."""

    def __init__(self, service: AdminService, sessions: Sessions, tokens: Tokens, *, secure: bool = False) -> None:
        self.service = service
        self.sessions = sessions
        self.tokens = tokens
        self.cookie: Final[dict[str, Any]] = {"secure": secure, "httponly": True, "samesite": "strict"}
        """How cookies are kept: as that of the session."""
        self._templates = Environment(
            loader=FileSystemLoader(TEMPLATES),
            autoescape=True,
            undefined=StrictUndefined,
            trim_blocks=True,
            lstrip_blocks=True,
        )
        self._templates.filters |= {
            "amount": filters.amount,
            "end": _end,
            "latency": filters.latency,
            "moment": _moment,
            "pair": lambda word: (word, word),
            "percent": filters.percent,
            "short": filters.short,
            "short_hash": filters.short_hash,
            "told": _told,
            "wait": filters.wait,
        }
        self._templates.globals |= {
            "client_url": filters.client_url,
            "kind_name": kind_name,
            "noun_of": noun_of,
            "per": filters.per,
            "short_label": short_label,
            "query": urlencode,
            "static": _static_url,
        }

    def endpoint(self, handler: Handler) -> Endpoint:
        """What the router calls, in a thread: sends strangers to the door, and checks forms."""
        return self.open(lambda request: self._answer(request, handler))

    def open(self, answer: Endpoint) -> Endpoint:
        """The same for what is open to everybody. What went wrong is told in words."""

        def answered(request: Request) -> Response:
            try:
                return answer(request)
            except HeadgateError as error:
                return self._error(request, error)

        return answered

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
            response.delete_cookie(FLASH, **self.cookie)
        return response

    def render(self, template: str, **values: Any) -> str:
        return self._templates.get_template(template).render(label_of=self._label_of, **values)

    def _answer(self, request: Request, handler: Handler) -> Response:
        if request.method == "POST":
            form = self.form(request)
            return handler(Visit(self, request, self.sessions.check_form(request, form), form))
        session = self.sessions.of(request)
        if session is None:
            there = _there(request)
            asked = "" if there in ("/", "/overview/live") else f"?{urlencode({'next': there})}"
            return RedirectResponse(f"/login{asked}", 303)
        return handler(Visit(self, request, session, Form([])))

    def form(self, request: Request) -> Form:
        """What was sent; nothing else than forms is."""
        if request.headers.get("content-type", "").partition(";")[0].strip().lower() != FORM_TYPE:
            raise FormRefused("expected a form")
        try:
            body = bytes(request.scope[BODY]).decode()
            return Form(parse_qsl(body, keep_blank_values=True, max_num_fields=MOST_FIELDS))
        except ValueError as error:
            raise FormRefused("the form cannot be parsed") from error

    def _error(self, request: Request, error: HeadgateError) -> Response:
        return self.problem(request, of_error(error))

    def problem(self, request: Request, problem: ProblemDetails) -> Response:
        """A page that says what is wrong, with the way on for who has signed in."""
        try:
            session = self.sessions.of(request)
        except HeadgateError:  # the same database is away
            session = None
        is_away = problem.status == 503 and request.method == "GET"
        again = local_path(_there(request)) if is_away else None
        told: dict[str, Any] = {"heading": problem.title, "text": problem.detail, "again": again}
        if session is None:
            response: Response = HTMLResponse(self.render("standalone.html", **told), problem.status)
        else:
            visit = Visit(self, request, session, Form([]))
            response = self.page(visit, "error.html", status=problem.status, **told)
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
            return None  # the page itself says what is away


def _there(request: Request) -> str:
    """What was asked for, as a link leads to it."""
    return request.url.path + (f"?{request.url.query}" if request.url.query else "")


def local_path(path: str) -> str:
    """A path on this server, as it was given; the first page, for what could lead to another one."""
    return path if re.fullmatch(r"/(?![/\\])[^\\\x00-\x20\x7f]*", path) else "/"


@pass_context
def _moment(context: Context, at_us: int | None, never: str = "–") -> str:
    return filters.moment(at_us, now_us=context["now_us"], zone=context["zone"], never=never)


@pass_context
def _told(context: Context, text: str) -> Markup:
    """A text of a version or of the audit log, with the names of clients and with local times."""
    return filters.told(text, context["label_of"], context["zone"])


@pass_context
def _end(context: Context, at_us: int) -> str:
    """The end of a period, after "until": Friday 20 November 2026, 18:00 Europe/Berlin."""
    return filters.end(at_us, zone=context["zone"])


def _flash(request: Request) -> Flash | None:
    try:
        said, *notes = json.loads(base64.urlsafe_b64decode(request.cookies.get(FLASH, "")))
        return Flash(str(said), tuple(map(str, notes)))
    except (ValueError, TypeError, RecursionError):  # whatever a client has put there
        return None


def _static_url(name: str) -> str:
    """The address of a file, with its content in it: browsers keep it until it changes."""
    if name not in _VERSIONS:
        _VERSIONS[name] = sha256((STATIC / name).read_bytes()).hexdigest()[:12]
    return f"/static/{name}?v={_VERSIONS[name]}"


_VERSIONS: Final[dict[str, str]] = {}
