"""WSGI middleware: Flask, Pyramid, Bottle, Falcon and other apps. Streams, files and `write()` are passed through."""

from __future__ import annotations

import logging
import sys
from difflib import get_close_matches
from functools import lru_cache, partial
from http.client import responses
from typing import TYPE_CHECKING, Any, Final, TypeAlias, Unpack

from headgate.errors import InvalidConfiguration, Overloaded
from headgate.gate.admission import UNLIMITED, enter_context
from headgate.gate.gate import Gate
from headgate.gate.options import OPTIONS, check_options

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping
    from os import PathLike

    from headgate.gate.admission import Admission, RequestInfo
    from headgate.gate.options import GateOptions
    from headgate.gate.responses import Header, Rejection
    from headgate.policy.model import Policy

    Environ: TypeAlias = dict[str, Any]
    StartResponse: TypeAlias = Callable[..., Callable[[bytes], object]]
    App: TypeAlias = Callable[[Environ, StartResponse], Iterable[bytes]]

__all__ = ["HeadgateMiddleware", "WsgiRequest", "check_settings", "header_lines", "native_headers", "signed_in_user"]


logger = logging.getLogger("headgate")

FORWARDED_FOR: Final = "x-forwarded-for"
WSGIREF: Final = "WSGIServer/"  # prefix of SERVER_SOFTWARE of the standard library's server, and of servers based on it

_warned: list[bool] = []  # not empty once the log has the warning that X-Forwarded-For is ignored


class WsgiRequest:
    """A WSGI request. `native` is its environ."""

    __slots__ = ("method", "mounted_path", "native", "path", "peer")

    def __init__(self, environ: Environ) -> None:
        self.native = environ
        self.method: str = environ["REQUEST_METHOD"]
        root, path = environ.get("SCRIPT_NAME"), environ.get("PATH_INFO", "")
        self.path = _decoded(root + path if root else path) or "/"
        self.mounted_path = _decoded(path) or "/" if root else None
        self.peer: str | None = environ.get("REMOTE_ADDR")

    def header(self, name: str) -> list[str]:
        """The value of a header, given its name in lower case; servers join its lines by commas."""
        return header_lines(self.native, name)


class HeadgateMiddleware:
    """Applies a policy to a WSGI app. Make it the outermost middleware that may refuse requests.

    `policy` is a file path or a `Policy`; `store` and all other options are those of `Gate`. `REMOTE_USER` is the
    identity `user`, unless `identities` has a function for it. `make_request` creates the RequestInfo of an environ;
    `is_exempt` returns True for requests that the policy does not apply to.
    """

    def __init__(
        self,
        app: App,
        policy: Policy | str | PathLike[str] | None = None,
        store: Any = "memory://",
        *,
        gate: Gate | None = None,
        make_request: Callable[[Environ], RequestInfo] = WsgiRequest,
        is_exempt: Callable[[Environ], bool] | None = None,
        **options: Unpack[GateOptions],
    ) -> None:
        self.app, self._make_request, self._is_exempt = app, make_request, is_exempt
        check_options(type(self).__name__, options)
        if gate is None:
            options["identities"] = {"user": signed_in_user, **(options.get("identities") or {})}
            gate = Gate(policy, store, **options)
        self.gate = gate

    def __call__(self, environ: Environ, start_response: StartResponse) -> Iterable[bytes]:
        is_exempt = self._is_exempt is not None and self._is_exempt(environ)
        admission = UNLIMITED if is_exempt else self.gate.admit(self._make_request(environ))
        # Also without limits: the thread may still have the admission of its previous request.
        enter_context(admission)
        if admission.refusal is not None:
            return _refuse(admission.refusal, environ, start_response)
        try:
            if admission is UNLIMITED:
                return self.app(environ, start_response)
            if admission.is_only_observed:
                return self.app(environ, partial(_start_observed, self.gate, start_response, admission))
            if not admission.needs_finish:
                return self.app(environ, partial(_start, start_response, admission))
            response = _ResponseBody(self.gate, admission, start_response)
            try:
                response.body = self.app(environ, response.start)
            except BaseException:
                self.gate.finish(admission, 500)
                raise
            return response
        except Overloaded as error:
            return _refuse(self.gate.overloaded(error), environ, partial(start_response, exc_info=sys.exc_info()))


def _refuse(refusal: Rejection, environ: Environ, start_response: StartResponse) -> Iterable[bytes]:
    start_response(f"{refusal.status} {responses[refusal.status]}", native_headers(refusal.headers))
    return [] if environ["REQUEST_METHOD"] == "HEAD" else [refusal.body]


def _start(
    start_response: StartResponse,
    admission: Admission,
    status: str,
    headers: list[tuple[str, str]],
    exc_info: Any = None,
) -> Callable[[bytes], object]:
    """The `start_response` of an admitted request. Apps may call it again if they fail before the body is sent."""
    headers = [*headers, *native_headers(admission.headers)]
    return start_response(status, headers) if exc_info is None else start_response(status, headers, exc_info)


def _start_observed(
    gate: Gate, start_response: StartResponse, admission: Admission, status: str, *headers: Any
) -> Callable[[bytes], object]:
    """The `start_response` of a request whose status the gate passes on."""
    gate.observe_response(admission, int(status[:3]))
    return _start(start_response, admission, status, *headers)


class _ResponseBody:
    """The body of a response, which finishes the admission when the server closes it."""

    __slots__ = ("_admission", "_gate", "_is_closed", "_start_response", "_status", "body")

    def __init__(self, gate: Gate, admission: Admission, start_response: StartResponse) -> None:
        self._gate = gate
        self._admission = admission
        self._start_response = start_response
        self._status = 500
        self._is_closed = False
        self.body: Iterable[bytes] = ()

    def start(self, status: str, headers: list[tuple[str, str]], exc_info: Any = None) -> Callable[[bytes], object]:
        """`start_response` that records the status."""
        self._status = int(status[:3])
        return _start(self._start_response, self._admission, status, headers, exc_info)

    def __iter__(self) -> Iterator[bytes]:
        try:
            # `yield from` would close the body if the iteration is abandoned, and `close` a second time.
            for chunk in self.body:  # noqa: UP028
                yield chunk
        except Exception:
            self._status = 500
            raise

    def close(self) -> None:
        """Called by the server after the response was sent or the client has disconnected."""
        if self._is_closed:
            return
        self._is_closed = True
        try:
            if hasattr(self.body, "close"):
                self.body.close()
        finally:
            self._gate.finish(self._admission, self._status)


def signed_in_user(request: Any) -> str | None:
    """The user that the server, or a middleware further out, has authenticated."""
    user: str | None = request.native.get("REMOTE_USER")
    return user


def header_lines(environ: Mapping[str, Any], name: str) -> list[str]:
    """The value of a header as a list of at most one, given its name in lower case.

    WSGI cannot tell X-Forwarded-For from X_Forwarded_For, and the standard library's server joins both into one value,
    so that a client could append an address of its choice to the one that a proxy has added.
    """
    value = environ.get(_variable(name))
    if value is None or (name == FORWARDED_FOR and not _filters_underscores(environ)):
        return []
    return [value]


def _filters_underscores(environ: Mapping[str, Any]) -> bool:
    """Return True if the server drops header names with underscores, judging by its name."""
    if not str(environ.get("SERVER_SOFTWARE", "")).startswith(WSGIREF):
        return True
    if not _warned:
        _warned.append(True)
        logger.warning(
            "X-Forwarded-For is ignored behind wsgiref, which confuses it with X_Forwarded_For, so that clients could "
            "choose their address: use another server, or identity: {forwarded_by: forwarded}"
        )
    return False


def native_headers(headers: list[Header], /) -> list[tuple[str, str]]:
    """Header fields as text, as WSGI and Django expect them."""
    return [(name.decode(), value.decode()) for name, value in headers]


def check_settings(settings: Mapping[Any, Any], spelled: Callable[[Any], str]) -> None:
    """Raise InvalidConfiguration for settings of a framework that are not options of a gate.

    >>> check_settings({"policy": "limits.yaml", "stroe": "memory://"}, lambda name: f"HEADGATE_{name.upper()}")
    Traceback (most recent call last):
        ...
    headgate.errors.InvalidConfiguration: HEADGATE_STROE is not a setting; did you mean HEADGATE_STORE?
    """
    for name in settings:
        if name not in OPTIONS:
            near = get_close_matches(str(name), OPTIONS, 1)
            remedy = f"did you mean {spelled(near[0])}?" if near else f"there are {', '.join(map(spelled, OPTIONS))}"
            raise InvalidConfiguration(f"{spelled(name)} is not a setting; {remedy}")
    if settings.get("policy") is None and settings.get("control") is None:
        raise InvalidConfiguration(
            f"{spelled('policy')} is not set; give the path of a policy file, a config store as {spelled('control')}, "
            "or Policy() of headgate.policy if all limits are on views"
        )


def _decoded(path: str) -> str:
    """A path as frameworks route by it: WSGI strings contain one byte of UTF-8 in each character."""
    return path if path.isascii() else path.encode("latin-1").decode("utf-8", "replace")


@lru_cache(maxsize=64)
def _variable(name: str) -> str:
    variable = name.upper().replace("-", "_")
    return variable if variable in ("CONTENT_LENGTH", "CONTENT_TYPE") else f"HTTP_{variable}"
