"""Flask: an extension that stands in front of the whole app, so that no request gets past it. See docs/flask.md."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from headgate.adapters.wsgi import HeadgateMiddleware, WsgiArrival, check_settings
from headgate.errors import InvalidConfiguration

if TYPE_CHECKING:
    from os import PathLike

    from flask import Flask, Request
    from flask.sessions import SessionMixin

    from headgate.policy.model import Policy

__all__ = ["FlaskArrival", "Headgate"]


class FlaskArrival(WsgiArrival):
    """A request that Flask has not seen yet. `native` is its environ."""

    __slots__ = ("_app",)

    def __init__(self, app: Flask, environ: dict[str, Any]) -> None:
        super().__init__(environ)
        self._app = app

    @property
    def request(self) -> Request:
        """Its cookies, headers and arguments, as Flask gives them. Not its body: that is left for the view."""
        return self._app.request_class(self.native, populate_request=False, shallow=True)

    @property
    def session(self) -> SessionMixin:
        """Its session, to read from."""
        sessions = self._app.session_interface
        session = sessions.open_session(self._app, self.request)
        return sessions.make_null_session(self._app) if session is None else session


class Headgate:
    """Puts a policy in front of a Flask app: `Headgate(app, "limits.yaml")`, or `init_app` in an app's factory.

    The options are those of `Gate`. The app's config has the last word on each of them, as HEADGATE_POLICY,
    HEADGATE_STORE and so on. `app.extensions["headgate"]` is the middleware that is put around the app.
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
        """Put the policy in front of this app."""
        if "headgate" in app.extensions:
            raise InvalidConfiguration(f"{app.name!r} would count every request twice: call init_app once for each app")
        options = self._options | app.config.get_namespace("HEADGATE_")
        check_settings(options, lambda name: f"HEADGATE_{name.upper()}")
        middleware = HeadgateMiddleware(app.wsgi_app, arrival=partial(FlaskArrival, app), **options)
        app.wsgi_app = middleware  # type: ignore[method-assign]  # Flask's own way to put a middleware around an app
        app.extensions["headgate"] = middleware
