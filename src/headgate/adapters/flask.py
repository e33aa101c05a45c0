"""Flask extension that applies a policy to the whole app, and limits on views. See docs/flask.md."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, Final

from flask import Blueprint, Response, after_this_request, current_app, request
from werkzeug.exceptions import HTTPException

from headgate.adapters.wsgi import HeadgateMiddleware, WsgiRequest, check_settings, native_headers
from headgate.errors import InvalidConfiguration, Overloaded
from headgate.gate.admission import current_admission
from headgate.gate.view_limits import ViewAdmissions, ViewLimit, ViewRequest, exempt, has_exempt_views, is_exempt

if TYPE_CHECKING:
    from os import PathLike

    from flask import Flask, Request
    from flask.sessions import SessionMixin

    from headgate.gate.admission import Admission
    from headgate.gate.view_limits import LimitDeclaration, View
    from headgate.policy.model import Policy

__all__ = ["FlaskRequest", "Headgate", "exempt", "limit"]

ADMISSIONS: Final = "headgate.admissions"  # the key under which a request's environ keeps its `ViewAdmissions`


class FlaskRequest(WsgiRequest):
    """A request before Flask handles it. `native` is its environ."""

    __slots__ = ("_app",)

    def __init__(self, app: Flask, environ: dict[str, Any]) -> None:
        super().__init__(environ)
        self._app = app

    @property
    def request(self) -> Request:
        """Its cookies, headers and arguments. The body is left for the view."""
        return self._app.request_class(self.native, populate_request=False, shallow=True)

    @property
    def session(self) -> SessionMixin:
        """Its session, read-only."""
        sessions = self._app.session_interface
        session = sessions.open_session(self._app, self.request)
        return sessions.make_null_session(self._app) if session is None else session


class Headgate:
    """Applies a policy to a Flask app: `Headgate(app, "limits.yaml")`, or `init_app` in an app factory.

    The options are those of `Gate`; the app's config overrides them, as HEADGATE_POLICY, HEADGATE_STORE and so on.
    `app.extensions["headgate"]` is the middleware around the app.
    """

    def __init__(
        self,
        app: Flask | None = None,
        policy: Policy | str | PathLike[str] | None = None,
        store: Any = "memory://",
        **options: Any,
    ) -> None:
        self._options = {"policy": policy, "store": store, **options}
        if app is not None:
            self.init_app(app)

    def init_app(self, app: Flask) -> None:
        """Apply the policy to this app."""
        if "headgate" in app.extensions:
            raise InvalidConfiguration(f"{app.name!r} would count every request twice: call init_app once for each app")
        options = self._options | app.config.get_namespace("HEADGATE_")
        check_settings(options, lambda name: f"HEADGATE_{name.upper()}")
        middleware = HeadgateMiddleware(
            app.wsgi_app, make_request=partial(FlaskRequest, app), is_exempt=partial(_is_exempt, app), **options
        )
        app.wsgi_app = middleware  # type: ignore[method-assign]  # as the docs of Flask say
        app.extensions["headgate"] = middleware
        app.teardown_request(_finish_unanswered)
        app.register_error_handler(Overloaded, partial(_answer_overload, middleware.gate))


class FlaskLimit(ViewLimit):
    """Decorator of a view, a class-based view or a blueprint: `@limit("5/minute")`, below `@app.route(...)`.

    The parameters are those of `ViewLimit`. The app needs the extension: `Headgate(app, policy)`. A function given as
    `by` gets `flask.request`.
    """

    dispatch_method = "dispatch_request"

    def __call__(self, view: View) -> View:
        if isinstance(view, Blueprint):
            view.before_request(partial(_admit, (self,), f"blueprint {view.name}"))
            return view
        return super().__call__(view)

    def guard(self, view: Any, declarations: tuple[LimitDeclaration, ...]) -> Any:
        name = getattr(view, "__qualname__", "view").rpartition("<locals>.")[2]

        def guard(*args: Any, **kwargs: Any) -> Any:
            refusal = _admit(declarations, name)
            return current_app.ensure_sync(view)(*args, **kwargs) if refusal is None else refusal

        return guard


limit = FlaskLimit


def _admit(declarations: tuple[LimitDeclaration, ...], name: str) -> Response | None:
    """Admit the current request by the limits of its view; returns the refusal, if any."""
    middleware: HeadgateMiddleware | None = current_app.extensions.get("headgate")
    if middleware is None:
        raise InvalidConfiguration(
            f"{current_app.name!r} has limits on its views, but no gate: call Headgate(app, policy), "
            "with Policy() from headgate.policy if there are no others"
        )
    environ, gate = request.environ, middleware.gate
    admissions: ViewAdmissions | None = environ.get(ADMISSIONS)
    if admissions is None:
        admissions = environ[ADMISSIONS] = ViewAdmissions(gate, current_admission())
        after_this_request(partial(_report, admissions))
    app: Any = current_app
    view = name if request.endpoint in (None, name) else f"{request.endpoint} {name}"
    info = ViewRequest(FlaskRequest(app, environ), view, request)
    refusal = gate.admit_to_view(info, declarations, admissions).refusal
    if refusal is None:
        return None
    body = b"" if request.method == "HEAD" else refusal.body
    return Response(body, refusal.status, native_headers(admissions.refusal_headers(refusal)))


def _answer_overload(gate: Any, error: Overloaded) -> Response:
    refusal = gate.overloaded(error)
    body = b"" if request.method == "HEAD" else refusal.body
    return Response(body, refusal.status, native_headers(refusal.headers))


def _report(admissions: ViewAdmissions, response: Response) -> Response:
    """Add the header fields to the response, and finish the admissions when it is closed."""
    for name, value in native_headers(admissions.headers()):
        response.headers[name] = value
    admissions.policy.suppress_headers()  # else the middleware would add them again
    if admissions.granted:
        response.call_on_close(partial(_finish, admissions.gate, admissions.granted, response.status_code))
        admissions.granted = []
    return response


def _finish_unanswered(error: BaseException | None) -> None:
    """Finish the admissions of a request whose view failed without a response."""
    admissions: ViewAdmissions | None = request.environ.get(ADMISSIONS)
    if admissions is not None:
        granted, admissions.granted = admissions.granted, []
        _finish(admissions.gate, granted, 500)


def _finish(gate: Any, admissions: list[Admission], status: int) -> None:
    for each in admissions:
        if each.needs_finish:
            gate.finish(each, status)


def _is_exempt(app: Flask, environ: dict[str, Any]) -> bool:
    """Return True if the view of a request is exempt from the policy."""
    if not has_exempt_views():
        return False
    try:
        adapter = app.create_url_adapter(app.request_class(environ, populate_request=False))
        endpoint = None if adapter is None else adapter.match()[0]
    except HTTPException:  # no view, or a redirect to one
        return False
    if endpoint is None:
        return False
    names = endpoint.split(".")[:-1]
    blueprints = [app.blueprints.get(".".join(names[: end + 1])) for end in range(len(names))]
    return any(map(is_exempt, (app.view_functions.get(endpoint), *blueprints)))
