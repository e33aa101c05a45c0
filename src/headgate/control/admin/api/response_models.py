"""What answers look like, for OpenAPI: made from the service's own views, so that the description cannot lag behind."""

import types
from dataclasses import is_dataclass
from functools import cache
from typing import Any, Final, Literal, Union, get_args, get_origin, get_type_hints

from pydantic import BaseModel, ConfigDict, Field, create_model

from headgate.control.anomalies.detector import Anomaly
from headgate.control.config.history import Version
from headgate.telemetry.decision_log.record import DecisionRecord

__all__ = ["listed", "shape"]

_NAMES: Final = {"DecisionRecord": DecisionRecord, "Anomaly": Anomaly, "Version": Version}
"""What views name for type checkers alone."""
_ALSO: Final[dict[type, dict[str, Any]]] = {Anomaly: {"text": (str, ...)}}
"""What `as_dict()` tells beside the fields."""
_STRICT: Final = ConfigDict(extra="forbid")


@cache
def shape(view: Any) -> type[BaseModel]:
    """The model of a view, or of any other value with named fields: as its `as_dict()` is."""
    hints = get_type_hints(view, localns=_NAMES)
    names = getattr(view, "_fields", None) or tuple(view.__dataclass_fields__)
    fields: dict[str, Any] = dict(_ALSO.get(view, {}))
    for name in names:
        public = name.rstrip("_")
        fields[name] = (_read(hints[name]), Field(alias=public, title=None) if public != name else Field())
    about = (view.__doc__ or "").strip().partition("\n")[0]
    return create_model(view.__name__, __config__=_STRICT, __doc__=about, **fields)


@cache
def listed(item: Any, *, cursor: Any = str) -> type[BaseModel]:
    """The model of a list of views."""
    inner: Any = item if issubclass(item, BaseModel) else shape(item)
    name = f"{inner.__name__.removesuffix('View').removesuffix('Model')}List"
    following: Any = (cursor | None, Field(description="What to ask for the rest with; null at the end"))
    return create_model(name, __config__=_STRICT, items=(list[inner], ...), next=following)


def _read(hint: Any) -> Any:
    origin, inner = get_origin(hint), get_args(hint)
    if origin is Literal:
        return hint
    if origin in (Union, types.UnionType):
        return Union[tuple(_read(each) for each in inner)]  # noqa: UP007 - the kinds are only known now
    if origin in (tuple, list):
        return list[_read(inner[0])]  # type: ignore[misc]
    if origin is dict:
        return dict[str, _read(inner[1])]  # type: ignore[misc]
    if is_dataclass(hint) or hasattr(hint, "_fields"):
        return shape(hint)
    return hint
