"""Limits declared on views, `@limit` and `@exempt`: the part that is the same in every framework.

Limits are parsed when a view is defined, and bound to a gate by its first request: identities, answers and the failure
mode are those of the gate's policy. All limits of a view are charged together, or none of them; a refusal also gives
back what the policy in front has charged.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import wraps
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

    from headgate.gate.admission import ActivePolicy, Admission, RequestInfo
    from headgate.gate.base import GateBase
    from headgate.gate.responses import Header, Rejection
    from headgate.policy.model import RouteMode

__all__ = [
    "LimitDeclaration",
    "ViewAdmissions",
    "ViewArrival",
    "ViewLimit",
    "bind",
    "bound",
    "exempt",
    "has_exempt_views",
    "is_exempt",
    "view_name",
]

By: TypeAlias = str | Callable[[Any], Any]
"""A kind of identity, or a function of the framework's request."""

View = TypeVar("View")

CALLER: Final = "headgate:caller"
"""Stands in rules for the identity that a function of the declaration returns; replaced when they are bound."""

REPORTED_ONCE: Final = (b"x-ratelimit-", b"ratelimit")
"""Prefixes of the fields that are reported once for all limits of a request."""

DECLARED: Final = "__headgate_limits__"
EXEMPT: Final = "__headgate_exempt__"

MAX_BOUND: Final = 4096
"""Bound declarations that a gate keeps. A module declares a few; only limits that are made anew for every request
could be more, and those are bound anew each time."""

_exempt_views: WeakSet[Any] = WeakSet()


class LimitDeclaration:
    """The limits of one `@limit(...)` or one dependency, as rules that are not bound to a gate yet."""

    __slots__ = ("caller", "caller_kind", "rules")

    def __init__(
        self,
        limits: Iterable[str | Limit],
        *,
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
            raise InvalidConfiguration(
                f"on_failure={on_failure!r} is unknown; {suggest(str(on_failure), list(STRICTNESS))}"
            )
        if not isinstance(by, str) and not callable(by):
            raise InvalidConfiguration(
                f"by={by!r}: give a kind of identity like 'ip' or 'user', or a function of the request"
            )
        self.caller = None if isinstance(by, str) else by
        word = by if isinstance(by, str) else _name_of(by)
        self.caller_kind = word
        kinds = scalars.by(by) if isinstance(by, str) else (CALLER,)
        only = frozenset(scalars.method(each) for each in ([methods] if isinstance(methods, str) else methods))
        prefix = f"{'|'.join(sorted(only))} " if only else ""
        test = None if count_when is None else scalars.status_test(count_when)
        given: list[str | Limit] = []
        for each in limits:
            given += [each] if isinstance(each, Limit) else _limit_syntax.split(each)
        rules = []
        for limit in given:
            counted = kinds
            if not isinstance(limit, Limit):
                if name is None:
                    own, counted = (
                        f"{prefix}{limit} by {word}",
                        ("endpoint", *[kind for kind in kinds if kind != "endpoint"]),
                    )
                else:
                    own = name if len(given) == 1 else f"{name} {limit}"
                limit = Limit.parse(limit, name=own)
            if limit.algorithm == "concurrency" and test is not None:
                raise InvalidConfiguration(
                    f"limit {limit.name!r} counts leases, which end with the answer: no count_when"
                )
            rules.append(
                Rule(limit.name, limit, counted, methods=only, cost=cost, count_when=test, on_failure=on_failure)
            )
        _check_names(rules)
        self.rules = tuple(rules)


def bind(gate: GateBase, declarations: Iterable[LimitDeclaration], view: str) -> ActivePolicy:
    """The limits of one view as rules of a gate; InvalidConfiguration, if they need an identity that it lacks."""
    rules: list[Rule] = []
    functions: dict[str, Callable[[Any], Any]] = {}
    known = gate.identity_kinds
    for each in declarations:
        caller = each.caller_kind
        while each.caller is not None and (caller in functions or caller in (*known, *scalars.IDENTITIES, "tier")):
            caller += "_"  # so that it is never mistaken for an identity of the policy
        if each.caller is not None:
            functions[caller] = _calling(each.caller)
        for rule in each.rules:
            for kind in rule.by:
                if kind != CALLER and kind not in known:
                    raise InvalidConfiguration(
                        f"nobody says who the {kind!r} of a request is: give identities={{{kind!r}: function}}, "
                        f"or {suggest(kind, known)}"
                    )
            rules.append(replace(rule, by=tuple(caller if kind == CALLER else kind for kind in rule.by)))
    _check_names(rules)
    return gate.rules_for(rules, functions, view)


def bound(gate: GateBase, declarations: tuple[LimitDeclaration, ...], view: str) -> ActivePolicy:
    """The same, kept for as long as the gate's policy stays."""
    kept = gate.view_rules.get((declarations, view))
    if kept is None or kept[0] is not gate.rules:
        if len(gate.view_rules) >= MAX_BOUND:
            gate.view_rules.clear()
        kept = gate.view_rules[declarations, view] = gate.rules, bind(gate, declarations, view)
    return kept[1]


class ViewArrival:
    """A request on its way to a view: the adapter's arrival, with the view's name and the framework's request."""

    __slots__ = ("_arrival", "view", "view_request")

    def __init__(self, arrival: RequestInfo, view: str, request: Any) -> None:
        self._arrival = arrival
        self.view = view
        self.view_request = request

    def __getattr__(self, name: str) -> Any:
        return getattr(self._arrival, name)


class ViewAdmissions:
    """The admissions of one request: the policy's, and those by the limits of its view."""

    __slots__ = ("_reported", "gate", "granted", "policy")

    def __init__(self, gate: Any, policy: Admission) -> None:
        self.gate = gate
        self.policy = policy
        self.granted: list[Admission] = []
        """To be finished when the answer is out."""
        self._reported = [policy]

    def refusal_headers(self, refusal: Rejection) -> list[Header]:
        """The fields of a refusal by the view's limits, but for those that `headers` has."""
        return [field for field in refusal.headers if not field[0].startswith(REPORTED_ONCE)]

    def grant(self, admission: Admission) -> None:
        """The view's limits allow the request."""
        if admission is UNLIMITED:
            return
        self.granted.append(admission)
        self._reported.append(admission)
        if current_admission().decision is None:  # the policy has no limits for this request
            enter_context(admission)

    def refuse(self, admission: Admission) -> list[Admission]:
        """The view's limits refuse the request: the admissions whose charges are to be given back."""
        earlier = [each for each in (self.policy, *self.granted) if each is not UNLIMITED]
        self._reported = [admission]
        return earlier

    def headers(self) -> list[Header]:
        """The header fields of all admissions, as if they were one."""
        headers: list[Header] = self.gate.rules.headers_of(self._reported)
        return headers

    def unfinished(self) -> list[Admission]:
        """Those that have something to settle, or a lease to leave, when the answer is out."""
        return [each for each in (self.policy, *self.granted) if not each.is_over]


class _Declared(NamedTuple):
    """The limits of a view that `@limit` has wrapped: another `@limit` right above joins them."""

    guard: Any
    function: Any
    declarations: tuple[LimitDeclaration, ...]


class ViewLimit:
    """Base of the frameworks' `@limit` decorators.

    `limits` are texts like "5/minute" or "5/minute; 100/hour", or `Limit`s. `by` is a kind of identity ("ip", "user",
    "tenant+user", "global"), or a function of the request. A text counts each view for itself; with a `name`, or as a
    `Limit`, which has one, it counts all views together that use the name. `methods` restricts it to some methods.
    """

    dispatch: ClassVar[str]
    """The method of a class-based view that answers requests."""

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
        self.declaration = LimitDeclaration(
            limits, by=by, name=name, cost=cost, count_when=count_when, on_failure=on_failure, methods=methods
        )

    def __call__(self, view: View) -> View:
        """The view, which answers only requests that all of its limits allow."""
        function: Any = view
        if isinstance(function, type):
            setattr(function, self.dispatch, self(getattr(function, self.dispatch)))
            return view
        if not callable(function):
            raise InvalidConfiguration(f"{view!r} is not a view: put @limit right above a function or a class")
        declared: _Declared | None = getattr(function, DECLARED, None)
        declarations: tuple[LimitDeclaration, ...] = (self.declaration,)
        if declared is not None and declared.guard is function:
            function, declarations = declared.function, (self.declaration, *declared.declarations)
            _check_names([rule for each in declarations for rule in each.rules])
        guard: Any = wraps(function)(self.guarded(function, declarations))
        setattr(guard, DECLARED, _Declared(guard, function, declarations))
        return guard  # type: ignore[no-any-return]

    def guarded(self, view: Any, declarations: tuple[LimitDeclaration, ...]) -> Any:
        """A function that asks the gate, and then the view."""
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
    """Return True if any view of the process is exempt; else no adapter needs to find the view before the policy."""
    return bool(_exempt_views)


def is_exempt(view: Any) -> bool:
    """Return True for an exempt view, and for one made from an exempt class. Subclasses of the class are not exempt."""
    return any(EXEMPT in getattr(each, "__dict__", ()) for each in (view, getattr(view, "view_class", None)))


def view_name(view: Any) -> str:
    """The name of a function or class, with that of its module."""
    found = getattr(view, "view_class", view)
    name = getattr(found, "__qualname__", None) or type(found).__qualname__
    return f"{getattr(found, '__module__', '')}.{name}"


def _check_names(rules: list[Rule]) -> None:
    names = [rule.name for rule in rules]
    if not names or len(set(names)) < len(names):
        raise InvalidConfiguration(f"give one or more limits, each of its own name, not {names}")


def _name_of(function: Any) -> str:
    name = getattr(function, "__name__", "")
    return name if name.isidentifier() and name.isascii() and len(name) <= 50 else "caller"


def _calling(function: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda arrival: function(arrival.view_request)
