"""The options of a gate, which all adapters accept, and the errors for wrong ones."""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any, Final, TypedDict

from headgate.errors import InvalidConfiguration

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from headgate.clock import Clock
    from headgate.events import Event
    from headgate.gate.admission import RequestInfo
    from headgate.gate.event_stream import DecisionHook, Observer
    from headgate.gate.identity import IdentityFunction
    from headgate.gate.responses import RejectionBody

__all__ = [
    "ENGINE_OPTIONS", "OPTIONS", "SECRET_VARIABLE", "GateOptions", "check_options", "checked_function",
    "checked_functions", "checked_interval", "checked_path",
]  # fmt: skip

SECRET_VARIABLE: Final = "HEADGATE_SECRET"


class GateOptions(TypedDict, total=False):
    """The options of a gate besides its policy and store; every adapter accepts them."""

    control: Any
    """The control plane: the config store's URL, or a `ControlPlane`. It supplies the policy and connects the decision
    log, node status and metrics."""
    identities: Mapping[str, IdentityFunction] | None
    """Functions that return the identity of a request, by kind: {"user": ..., "tenant": ...}."""
    secret: str | bytes | None
    """Key of the API key hashes: 16 bytes or more, the same on all machines. Defaults to HEADGATE_SECRET."""
    refusal_body: RejectionBody | None
    """Builds the bodies of refusals."""
    on_decision: DecisionHook | Observer | None
    """Called inside each request with its decision; or an observer, such as a `DecisionLog`."""
    reload_every: float | None
    """Seconds between checks of the policy file for changes; None disables reloading."""
    clock: Clock | None
    namespace: str
    budget: float | None
    """Seconds that the store may take before a route's failure mode applies; None for the policy's setting."""
    max_keys: int
    on_event: Callable[[Event], Any] | None
    """Called when the store is lost or recovered."""
    region: str | None
    """The region in which this process runs; None for that of the policy, or of HEADGATE_REGION."""
    regions: Mapping[str, Any] | None
    """The stores of all regions by name; None for those of the policy. See docs/regions.md."""
    home: str | None
    """The region that decides central limits; None for that of the policy."""
    central_budget: float | None
    """Seconds that the home region may take; None for the policy's setting."""
    ledger: Any
    """The ledger that quotas are charged to: a URL, or a `headgate.quotas.Ledger`. None for that of the policy, or for
    the config store's database."""
    idempotency_key: Callable[[RequestInfo], str | None] | None
    """Returns the id of a request and of its repetitions, which quotas charge once; None to use the header."""
    health_path: str | None
    """Path of a health endpoint served by the gate: 200 while the store decides, else 503."""


OPTIONS: Final = ("policy", "store", *GateOptions.__annotations__)
"""The names of all options of a gate, and of every adapter."""

ENGINE_OPTIONS: Final = ("clock", "namespace", "budget", "max_keys", "on_event")
"""Those that are passed on to the engine of the gate's limiter."""


def check_options(owner: str, options: Iterable[str], known: Sequence[str] = (*OPTIONS, "gate")) -> None:
    """Raise InvalidConfiguration for unknown options; `owner` is the class or function that was called.

    >>> check_options("HeadgateMiddleware", ["storage"])
    Traceback (most recent call last):
        ...
    headgate.errors.InvalidConfiguration: HeadgateMiddleware has no option 'storage'; did you mean 'store'?
    """
    for name in options:
        if name not in known:
            near = get_close_matches(name, known, 1)
            remedy = f"did you mean {near[0]!r}?" if near else f"it has {', '.join(sorted(known))}"
            raise InvalidConfiguration(f"{owner} has no option {name!r}; {remedy}")


def checked_functions(identities: Mapping[str, IdentityFunction] | None) -> dict[str, IdentityFunction]:
    if not isinstance(identities or {}, Mapping):
        raise InvalidConfiguration(f"identities {identities!r}: give functions by kind, like {{'user': function}}")
    return {kind: checked_function(f"identities[{kind!r}]", function) for kind, function in (identities or {}).items()}


def checked_function(name: str, function: Any) -> Any:
    if function is not None and not callable(function):
        raise InvalidConfiguration(f"{name} {function!r} cannot be called: give a function")
    return function


def checked_interval(seconds: float | None) -> float | None:
    if seconds is not None and (isinstance(seconds, bool) or not isinstance(seconds, int | float) or not seconds > 0):
        raise InvalidConfiguration(f"reload_every {seconds!r}: give seconds above 0, or None to disable reloading")
    return seconds


def checked_path(path: str | None) -> str | None:
    if path is not None and (not isinstance(path, str) or not path.startswith("/")):
        raise InvalidConfiguration(f"health_path {path!r}: give a path with a leading slash, like '/headgate/health'")
    return path
