"""Django middleware, sync and async, configured by `settings.HEADGATE`, and limits on views. See docs/django.md.

In `INSTALLED_APPS`, this module adds system checks of that setting and of the policy to `manage.py check`.
"""

from __future__ import annotations

import asyncio
from functools import partial
from typing import TYPE_CHECKING, Any, Final, TypeVar

from asgiref.sync import async_to_sync, iscoroutinefunction, markcoroutinefunction, sync_to_async
from django import conf
from django.core import checks
from django.core.exceptions import ImproperlyConfigured
from django.http import HttpRequest, HttpResponse
from django.urls import Resolver404, resolve
from django.utils.functional import LazyObject
from django.utils.module_loading import import_string

from headgate.adapters.wsgi import check_settings, header_lines, native_headers
from headgate.engine import SyncEngine
from headgate.errors import InvalidPolicy, Overloaded
from headgate.gate.admission import UNLIMITED, enter_context
from headgate.gate.gate import AsyncGate, Gate
from headgate.gate.view_limits import (
    ViewAdmissions,
    ViewLimit,
    ViewRequest,
    exempt,
    has_exempt_views,
    is_exempt,
    view_name,
)
from headgate.policy.model import Policy

if TYPE_CHECKING:
    from collections.abc import Callable

    from django.http.response import HttpResponseBase

    from headgate.failure import FleetShare
    from headgate.gate.admission import Admission
    from headgate.gate.responses import Rejection
    from headgate.gate.view_limits import LimitDeclaration

__all__ = [
    "DjangoRequest",
    "HeadgateMiddleware",
    "asigned_in_user",
    "check_headgate_settings",
    "exempt",
    "limit",
    "signed_in_user",
]

GateType = TypeVar("GateType", bound="Gate | AsyncGate")

ADMISSIONS: Final = "_headgate_admissions"  # attribute of a request with its `ViewAdmissions`
IMPORTABLE_SETTINGS: Final = ("on_decision", "on_event", "refusal_body")
"""Settings that may be the dotted name of a function."""


class DjangoRequest:
    """A Django request, which is its `native`."""

    __slots__ = ("method", "mounted_path", "native", "path", "peer")

    def __init__(self, request: HttpRequest) -> None:
        self.native = request
        self.method: str = request.method or "GET"
        self.path: str = request.path
        self.mounted_path = request.path_info if request.path_info != request.path else None
        self.peer: str | None = request.META.get("REMOTE_ADDR")

    def header(self, name: str) -> list[str]:
        """The value of a header, given its name in lower case; servers join its lines by commas."""
        return header_lines(self.native.META, name)


class HeadgateMiddleware:
    """Applies the policy of `settings.HEADGATE` to everything after it in `settings.MIDDLEWARE`.

    `request.headgate` is the request's `Admission`. The signed-in user is the identity `user`, unless `identities` has
    a function for it.
    """

    sync_capable = True
    async_capable = True

    def __init__(self, get_response: Callable[[HttpRequest], Any]) -> None:
        self.get_response = get_response
        self._is_async = iscoroutinefunction(get_response)
        if self._is_async:
            markcoroutinefunction(self)
        self.gate: Any = _gate(AsyncGate if self._is_async else Gate)

    def __call__(self, request: HttpRequest) -> Any:
        return self._respond_async(request) if self._is_async else self._respond(request)

    def _respond(self, request: HttpRequest) -> HttpResponseBase:
        admissions = self._enter(request, UNLIMITED if _is_exempt(request) else self.gate.admit(DjangoRequest(request)))
        if admissions.policy.refusal is not None:
            return _refuse(admissions.policy.refusal, request)
        try:
            response: HttpResponseBase = self.get_response(request)
        except BaseException:
            for each in admissions.unfinished():
                self.gate.finish(each, 500)
            raise
        return _leave(response, admissions, self.gate.finish)

    async def _respond_async(self, request: HttpRequest) -> HttpResponseBase:
        admission = UNLIMITED if _is_exempt(request) else await self.gate.admit(DjangoRequest(request))
        admissions = self._enter(request, admission)
        if admission.refusal is not None:
            return _refuse(admission.refusal, request)
        try:
            response: HttpResponseBase = await self.get_response(request)
        except BaseException:  # also if Django cancels the view of a client that has disconnected
            for each in admissions.unfinished():
                await self.gate.finish(each, 500)
            raise
        # In the event loop of the request: Django closes responses in a thread, its test client in the loop.
        finish, loop = self.gate.finish, asyncio.get_running_loop()
        return _leave(response, admissions, lambda *args: asyncio.run_coroutine_threadsafe(finish(*args), loop))

    def process_exception(self, request: HttpRequest, exception: Exception) -> HttpResponse | None:
        """Called by Django if a view raises: the response if a guard has shed a call."""
        return _refuse(self.gate.overloaded(exception), request) if isinstance(exception, Overloaded) else None

    def _enter(self, request: HttpRequest, admission: Admission) -> ViewAdmissions:
        request.headgate = admission  # type: ignore[attr-defined]
        admissions = ViewAdmissions(self.gate, admission)
        setattr(request, ADMISSIONS, admissions)
        enter_context(admission)
        return admissions


class DjangoLimit(ViewLimit):
    """Decorator that limits a view, sync or async, or a class-based view: `@limit("5/minute")`.

    The parameters are those of `ViewLimit`. `settings.MIDDLEWARE` needs `HeadgateMiddleware`. A function given as `by`
    gets the request.
    """

    dispatch_method = "dispatch"

    def guard(self, view: Any, declarations: tuple[LimitDeclaration, ...]) -> Any:
        name = getattr(view, "__qualname__", "view")

        def guard(*args: Any, **kwargs: Any) -> Any:
            if getattr(args[0], "view_is_async", False):  # the method `dispatch` of a class with async handlers
                return guard_async(*args, **kwargs)
            info, admissions = _request_of(args, name)
            gate = admissions.gate
            admit: Any = gate.admit_to_view if isinstance(gate, Gate) else async_to_sync(gate.admit_to_view)
            refusal = admit(info, declarations, admissions).refusal
            return view(*args, **kwargs) if refusal is None else _refuse(refusal, info.view_request, admissions)

        async def guard_async(*args: Any, **kwargs: Any) -> Any:
            info, admissions = _request_of(args, name)
            gate = admissions.gate
            admit: Any = sync_to_async(gate.admit_to_view) if isinstance(gate, Gate) else gate.admit_to_view
            refusal = (await admit(info, declarations, admissions)).refusal
            return await view(*args, **kwargs) if refusal is None else _refuse(refusal, info.view_request, admissions)

        return guard_async if iscoroutinefunction(view) else guard


limit = DjangoLimit


@checks.register("headgate")
def check_headgate_settings(**_: Any) -> list[checks.CheckMessage]:
    """System check of `settings.HEADGATE` and of the policy."""
    is_used = any(map(_is_gate, conf.settings.MIDDLEWARE))
    if not is_used and not hasattr(conf.settings, "HEADGATE"):
        return []
    try:
        trial = _open_gate(_TrialGate, getattr(conf.settings, "HEADGATE", None))
    except ImproperlyConfigured as error:
        hint = "`headgate check FILE` checks a policy file." if isinstance(error.__cause__, InvalidPolicy) else None
        return [checks.Error(str(error), hint=hint, id="headgate.E001")]
    trial.close()
    warnings = trial.active_policy.snapshot.policy.warnings
    messages: list[checks.CheckMessage] = [checks.Warning(text, id="headgate.W002") for text in warnings]
    if not is_used:
        hint = "Add 'headgate.adapters.django.HeadgateMiddleware' to MIDDLEWARE."
        problem = "HEADGATE is set, but its middleware is not used."
        messages.append(checks.Warning(problem, hint=hint, id="headgate.W001"))
    return messages


def signed_in_user(request: DjangoRequest) -> str | None:
    """The primary key of the signed-in user. Without a session, the database is not queried."""
    return _key(getattr(request.native, "user", None))


async def asigned_in_user(request: DjangoRequest) -> str | None:
    """The primary key of the signed-in user, without blocking the event loop."""
    native = request.native
    user = getattr(native, "user", None)
    if not isinstance(user, LazyObject):
        return _key(user)
    if hasattr(native, "auser"):
        return _key(await native.auser())
    return await sync_to_async(_key)(user)


def _key(user: Any) -> str | None:
    return str(user.pk) if getattr(user, "is_authenticated", False) else None


def _request_of(args: tuple[Any, ...], name: str) -> tuple[ViewRequest, ViewAdmissions]:
    """The request in the arguments of a view or of its method, and its admissions so far."""
    request = next((each for each in args[:2] if isinstance(each, HttpRequest)), None)
    if request is None:
        raise ImproperlyConfigured("@limit is for views, whose first argument is the request")
    admissions: ViewAdmissions | None = getattr(request, ADMISSIONS, None)
    if admissions is None:
        raise ImproperlyConfigured(
            "a view has limits, but there is no gate: add 'headgate.adapters.django.HeadgateMiddleware' to MIDDLEWARE"
        )
    view = "" if request.resolver_match is None else view_name(request.resolver_match.func)
    return ViewRequest(DjangoRequest(request), f"{view} {name}", request), admissions


def _is_exempt(request: HttpRequest) -> bool:
    """Return True if the view of a request is exempt from the policy."""
    if not has_exempt_views():
        return False
    try:
        return is_exempt(resolve(request.path_info, getattr(request, "urlconf", None)).func)
    except Resolver404:
        return False


def _refuse(refusal: Rejection, request: HttpRequest, admissions: ViewAdmissions | None = None) -> HttpResponse:
    body = b"" if request.method == "HEAD" else refusal.body
    headers = refusal.headers if admissions is None else admissions.refusal_headers(refusal)
    return HttpResponse(body, status=refusal.status, headers=dict(native_headers(headers)))


def _leave(
    response: HttpResponseBase, admissions: ViewAdmissions, finish: Callable[[Admission, int], object]
) -> HttpResponseBase:
    for name, value in native_headers(admissions.headers()):
        response[name] = value
    for each in admissions.unfinished():
        # Where Django itself puts what ends with a response, streaming or not.
        closers = response._resource_closers  # type: ignore[attr-defined]  # noqa: SLF001 - Django has no hook
        closers.append(partial(finish, each, response.status_code))
    return response


_gates: dict[type, tuple[object, Gate | AsyncGate]] = {}


def _gate(kind: type[Gate | AsyncGate]) -> Gate | AsyncGate:
    """The gate of this process for the settings; Django's test clients create their middleware anew."""
    settings = getattr(conf.settings, "HEADGATE", None)
    known = _gates.get(kind)
    if known is None or known[0] is not settings:
        known = _gates[kind] = settings, _open_gate(kind, settings)
    return known[1]


def _open_gate(kind: type[GateType], settings: Any) -> GateType:
    if not isinstance(settings, dict):
        problem = f"HEADGATE is {settings!r}; give a dict: HEADGATE = {{'policy': BASE_DIR / 'limits.yaml'}}"
        raise ImproperlyConfigured(problem)
    try:
        check_settings(settings, repr)
        options = {**settings, **{name: _imported(settings[name]) for name in IMPORTABLE_SETTINGS if name in settings}}
        options["identities"] = {
            "user": asigned_in_user if kind is AsyncGate else signed_in_user,
            **{name: _imported(function) for name, function in (settings.get("identities") or {}).items()},
        }
        return kind(**options)
    except (AttributeError, ImportError, OSError, TypeError, ValueError) as error:
        raise ImproperlyConfigured(f"HEADGATE: {error}") from error


class _OfflineEngine(SyncEngine):
    """An engine that does not connect to its store."""

    def join_fleet(self) -> FleetShare:
        return self.local.fleet


class _TrialGate(Gate):
    """A gate created only to validate the settings, without a store."""

    _engine_type = _OfflineEngine

    def __init__(self, policy: Any = None, store: Any = "memory://", *, control: Any = None, **options: Any) -> None:
        # The config store may not exist yet, and a check must not create it.
        super().__init__(Policy() if policy is None and control is not None else policy, store, **options)


def _is_gate(middleware: str) -> bool:
    try:
        found = import_string(middleware)
    except ImportError:  # reported by Django at startup
        return False
    return isinstance(found, type) and issubclass(found, HeadgateMiddleware)


def _imported(function: Any) -> Any:
    return import_string(function) if isinstance(function, str) else function
