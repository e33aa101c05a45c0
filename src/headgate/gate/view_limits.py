"""Limits declared on views with `@limit` and `@exempt`: the part that all frameworks share.

Limits are parsed when a view is defined and compiled for a gate on its first request, with the identities, responses
and failure mode of the gate's policy. All limits of a view are charged together or not at all; a refusal also refunds
what the policy has charged before.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial, wraps
from typing import TYPE_CHECKING, Any, ClassVar, Final, NamedTuple, TypeAlias, TypeVar
from weakref import WeakSet

from headgate import _limit_syntax
from headgate._limit_syntax import suggest
from headgate.errors import InvalidConfiguration, InvalidCost
from headgate.gate.admission import UNLIMITED, current_admission, enter_context
from headgate.limits import Limit
from headgate.policy import scalars
from headgate.policy.model import Rule
from headgate.policy.snapshot import STRICTNESS

if TYPE_CHECKING:
    from collections.abc import Iterable

    from headgate.gate.admission import Admission, RequestInfo
    from headgate.gate.responses import Header, Rejection
    from headgate.policy.model import RouteMode

__all__ = [
    "RATELIMIT_PREFIXES", "LimitDeclaration", "ViewAdmissions", "ViewLimit", "ViewRequest", "exempt",
    "has_exempt_views", "has_view_limits", "is_exempt", "view_name", "view_rules",
]  # fmt: skip

By: TypeAlias = str | Callable[[Any], Any]
"""A kind of identity, or a function of the framework's request."""

View = TypeVar("View")

CALLER: Final = "headgate:caller"
"""Placeholder in `Rule.by` for the kind of identity that the declaration's function returns."""

RATELIMIT_PREFIXES: Final = (b"x-ratelimit-", b"ratelimit")
"""Prefixes of the header fields that are merged over all limits of a request."""

DECLARED: Final = "__headgate_limits__"
EXEMPT: Final = "__headgate_exempt__"

_exempt_views: WeakSet[Any] = WeakSet()
_limited_views: WeakSet[Any] = WeakSet()


class LimitDeclaration:
    """The limits of one `@limit(...)` or dependency, as rules that are not yet compiled for a gate."""

    def __init__(
        self,
        *limits: str | Limit,
        by: By = "ip",
        name: str | None = None,
        cost: int = 1,
        count_when: str | None = None,
        on_failure: RouteMode | None = None,
        methods: str | Iterable[str] = (),
    ) -> None:
        if type(cost) is not int or cost < 1:
            raise InvalidCost(f"cost {cost!r} is not a whole number >= 1; a route that costs nothing needs no limit")
        if on_failure not in (None, *STRICTNESS):
            remedy = suggest(str(on_failure), list(STRICTNESS))
            raise InvalidConfiguration(f"on_failure={on_failure!r} is unknown; {remedy}")
        if not isinstance(by, str) and not callable(by):
            raise InvalidConfiguration(
                f"by={by!r}: give a kind of identity like 'ip' or 'user', or a function of the request"
            )
        self.caller = None if isinstance(by, str) else by
        self.caller_kind = by if isinstance(by, str) else _kind_of(by)
        kinds = scalars.by(by) if isinstance(by, str) else (CALLER,)
        only = frozenset(scalars.method(each) for each in ([methods] if isinstance(methods, str) else methods))
        prefix = f"{'|'.join(sorted(only))} " if only else ""
        test = None if count_when is None else scalars.status_test(count_when)
        parts = [[each] if isinstance(each, Limit) else _limit_syntax.split(each) for each in limits]
        declared: list[str | Limit] = [limit for part in parts for limit in part]
        rules = []
        for limit in declared:
            rule_kinds = kinds
            if not isinstance(limit, Limit):
                if name is None:
                    limit_name = f"{prefix}{limit} by {self.caller_kind}"
                    rule_kinds = ("endpoint", *[kind for kind in kinds if kind != "endpoint"])
                else:
                    limit_name = name if len(declared) == 1 else f"{name} {limit}"
                limit = Limit.parse(limit, name=limit_name)
            if limit.algorithm == "concurrency" and test is not None:
                message = f"limit {limit.name!r} counts leases, which end with the response: no count_when"
                raise InvalidConfiguration(message)
            settings: Any = {"methods": only, "cost": cost, "count_when": test, "on_failure": on_failure}
            settings |= {"split": limit.split, "region": limit.region}
            rules.append(Rule(limit.name, limit, rule_kinds, **settings))
        _check_names(rules)
        self.rules = tuple(rules)


def view_rules(
    declarations: Iterable[LimitDeclaration], known_kinds: list[str]
) -> tuple[list[Rule], dict[str, Callable[[Any], Any]]]:
    """The rules of one view, and the identity functions that they need; raises InvalidConfiguration if an identity is
    not among `known_kinds`."""
    rules: list[Rule] = []
    functions: dict[str, Callable[[Any], Any]] = {}
    for each in declarations:
        kind = each.caller_kind
        if each.caller is not None:
            while kind in functions or kind in (*known_kinds, *scalars.IDENTITIES, "tier"):
                kind += "_"  # distinct from all identities of the policy
            functions[kind] = partial(_call_with_view_request, each.caller)
        for rule in each.rules:
            for by in rule.by:
                if by != CALLER and by not in known_kinds:
                    raise InvalidConfiguration(
                        f"no function returns the {by!r} of a request: give identities={{{by!r}: function}}, "
                        f"or {suggest(by, known_kinds)}"
                    )
            rules.append(replace(rule, by=tuple(kind if by == CALLER else by for by in rule.by)))
    _check_names(rules)
    return rules, functions


class ViewRequest:
    """A request at a view: the adapter's RequestInfo, with the name of the view and the framework's request."""

    __slots__ = ("_request", "view", "view_request")

    def __init__(self, request: RequestInfo, view: str, view_request: Any) -> None:
        self._request = request
        self.view = view
        self.view_request = view_request

    def __getattr__(self, name: str) -> Any:
        return getattr(self._request, name)


class ViewAdmissions:
    """The admissions of one request: by the policy, and by the limits of its views."""

    __slots__ = ("_reported", "gate", "granted", "policy")

    def __init__(self, gate: Any, policy: Admission) -> None:
        self.gate = gate
        self.policy = policy
        self.granted: list[Admission] = []
        """Allowed by the limits of views."""
        self._reported = [policy]

    def add(self, admission: Admission) -> list[Admission]:
        """Add an admission by the limits of a view; if it is a refusal, returns the earlier admissions to refund."""
        if admission.refusal is not None:
            self._reported = [admission]
            return [each for each in (self.policy, *self.granted) if each is not UNLIMITED]
        if admission is not UNLIMITED:
            self.granted.append(admission)
            self._reported.append(admission)
            if current_admission().decision is None:  # no limit of the policy applies
                enter_context(admission)
        return []

    def refusal_headers(self, refusal: Rejection) -> list[Header]:
        """The header fields of a refusal, except those that `headers` returns."""
        return [field for field in refusal.headers if not field[0].startswith(RATELIMIT_PREFIXES)]

    def headers(self) -> list[Header]:
        """The RateLimit header fields of all admissions, merged."""
        return self.gate.active_policy.headers_of(self._reported)  # type: ignore[no-any-return]

    def unfinished(self) -> list[Admission]:
        """The admissions that need `finish` after the response was sent."""
        return [each for each in (self.policy, *self.granted) if each.needs_finish]


class _GuardedView(NamedTuple):
    """A view wrapped by `@limit`, so that another `@limit` directly above joins its declarations."""

    guard: Any
    function: Any
    declarations: tuple[LimitDeclaration, ...]


class ViewLimit(LimitDeclaration):
    """Base of the frameworks' `@limit` decorators.

    `limits` are strings like "5/minute" or "5/minute; 100/hour", or `Limit`s. `by` is a kind of identity ("ip", "user",
    "tenant+user", "global"), or a function of the request. A string counts each view separately; with a `name`, or as a
    `Limit`, which has one, all views with that name share a counter. `methods` restricts the limits to some methods.
    """

    dispatch_method: ClassVar[str]
    """The method of a class-based view that handles requests."""

    def __call__(self, view: View) -> View:
        """Wrap a view, so that it handles only requests that all of its limits allow."""
        function: Any = view
        if isinstance(function, type):
            setattr(function, self.dispatch_method, self(getattr(function, self.dispatch_method)))
            return view
        if not callable(function):
            raise InvalidConfiguration(f"{view!r} is not a view: put @limit right above a function or a class")
        wrapped: _GuardedView | None = getattr(function, DECLARED, None)
        declarations: tuple[LimitDeclaration, ...] = (self,)
        if wrapped is not None and wrapped.guard is function:
            function, declarations = wrapped.function, (self, *wrapped.declarations)
            _check_names([rule for each in declarations for rule in each.rules])
        guard: Any = wraps(function)(self.guard(function, declarations))
        setattr(guard, DECLARED, _GuardedView(guard, function, declarations))
        _limited_views.add(guard)
        return guard  # type: ignore[no-any-return]

    def guard(self, view: Any, declarations: tuple[LimitDeclaration, ...]) -> Any:
        """Return a function that calls the view after the gate has admitted the request."""
        raise NotImplementedError


def exempt(view: View) -> View:
    """Exempt a view from the limits of the policy, as `cost: 0` does for a route. Its own `@limit` still applies."""
    try:
        setattr(view, EXEMPT, True)
    except AttributeError:
        raise InvalidConfiguration(f"{view!r} cannot be exempt: put @exempt above a function or a class") from None
    _exempt_views.add(view)
    return view


def has_exempt_views() -> bool:
    """Return True if any view of the process is exempt; otherwise adapters need not look up the view."""
    return bool(_exempt_views)


def has_view_limits() -> bool:
    """Return True if any view of the process has limits of its own, which may refuse a request after the policy."""
    return bool(_limited_views)


def is_exempt(view: Any) -> bool:
    """Return True for an exempt view, and for one made from an exempt class. Subclasses of the class are not exempt."""
    if not _exempt_views:
        return False
    return any(EXEMPT in getattr(each, "__dict__", ()) for each in (view, getattr(view, "view_class", None)))


def view_name(view: Any) -> str:
    """The qualified name of a function or class, with its module."""
    found = getattr(view, "view_class", view)
    name = getattr(found, "__qualname__", None) or type(found).__qualname__
    return f"{getattr(found, '__module__', '')}.{name}"


def _check_names(rules: list[Rule]) -> None:
    names = [rule.name for rule in rules]
    if not names or len(set(names)) < len(names):
        raise InvalidConfiguration(f"give one or more limits with distinct names, not {names}")


def _kind_of(function: Any) -> str:
    name = getattr(function, "__name__", "")
    return name if name.isidentifier() and name.isascii() and len(name) <= 50 else "caller"


def _call_with_view_request(function: Callable[[Any], Any], request: ViewRequest) -> Any:
    return function(request.view_request)
