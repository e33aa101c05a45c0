"""Response models for OpenAPI, derived from the views of the service, so that the two cannot diverge."""

import types
from dataclasses import is_dataclass
from functools import cache
from typing import Any, Final, Literal, Union, get_args, get_origin, get_type_hints

from pydantic import BaseModel, ConfigDict, Field, create_model

from headgate.control.anomalies.detector import Anomaly
from headgate.control.config.history import Version
from headgate.telemetry.decision_log.record import DecisionRecord

__all__ = ["list_model", "view_model"]

_TYPE_CHECKING_NAMES: Final = {"DecisionRecord": DecisionRecord, "Anomaly": Anomaly, "Version": Version}
"""Names that views import for type checkers only."""
_COMPUTED_FIELDS: Final[dict[type, dict[str, Any]]] = {Anomaly: {"text": (str, ...)}}
"""Fields that `as_dict()` adds."""
_STRICT: Final = ConfigDict(extra="forbid")


@cache
def view_model(view: Any) -> type[BaseModel]:
    """The model of what `as_dict()` of a view returns."""
    hints = get_type_hints(view, localns=_TYPE_CHECKING_NAMES)
    names = getattr(view, "_fields", None) or tuple(view.__dataclass_fields__)
    fields: dict[str, Any] = dict(_COMPUTED_FIELDS.get(view, {}))
    for name in names:
        public = name.rstrip("_")
        fields[name] = (_json_type(hints[name]), Field(alias=public, title=None) if public != name else Field())
    summary = (view.__doc__ or "").strip().partition("\n")[0]
    return create_model(view.__name__, __config__=_STRICT, __doc__=summary, **fields)


@cache
def list_model(item: Any, *, cursor: Any = str) -> type[BaseModel]:
    """The model of a page of views."""
    inner: Any = item if issubclass(item, BaseModel) else view_model(item)
    name = f"{inner.__name__.removesuffix('View').removesuffix('Model')}List"
    following: Any = (cursor | None, Field(description="The cursor of the next page; null at the end"))
    return create_model(name, __config__=_STRICT, items=(list[inner], ...), next=following)


def _json_type(hint: Any) -> Any:
    origin, inner = get_origin(hint), get_args(hint)
    if origin is Literal:
        return hint
    if origin in (Union, types.UnionType):
        return Union[tuple(_json_type(each) for each in inner)]  # noqa: UP007 - the types are only known at run time
    if origin in (tuple, list):
        return list[_json_type(inner[0])]  # type: ignore[misc]
    if origin is dict:
        return dict[str, _json_type(inner[1])]  # type: ignore[misc]
    if is_dataclass(hint) or hasattr(hint, "_fields"):
        return view_model(hint)
    return hint
