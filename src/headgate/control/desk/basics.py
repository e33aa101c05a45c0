"""What the desk's words have in common: who acts, who is meant, and values that become JSON."""

from __future__ import annotations

from dataclasses import dataclass, fields, is_dataclass
from typing import TYPE_CHECKING, Any, Final, Generic, Literal, NamedTuple, TypeAlias, TypeVar

if TYPE_CHECKING:
    from headgate.control.config.history import Version

__all__ = ["ROLES", "Actor", "Change", "Page", "Role", "View", "Who", "plain"]

Role: TypeAlias = Literal["viewer", "support", "operator", "admin"]

ROLES: Final[tuple[Role, ...]] = ("viewer", "support", "operator", "admin")
"""Each may do what those before it may."""

Item = TypeVar("Item")


class Actor(NamedTuple):
    """Who does something."""

    name: str
    """What versions are signed with."""
    role: Role

    def may(self, role: Role) -> bool:
        """Whether this one may do what somebody of that role may."""
        return ROLES.index(self.role) >= ROLES.index(role)


class Who(NamedTuple):
    """A client, by one of its identities: Who("tenant", "acme"). An API key is named by its keyed hash."""

    kind: str
    value: str

    def __str__(self) -> str:
        return f"{self.kind} {self.value}"


class View:
    """What all views have."""

    __slots__ = ()

    def as_dict(self) -> dict[str, Any]:
        """The same for JSON."""
        return {
            field.name.rstrip("_"): plain(getattr(self, field.name))
            for field in fields(self)  # type: ignore[arg-type] # each view is a dataclass
        }


def plain(value: Any) -> Any:
    """A value for JSON: views as objects, tuples as lists."""
    if value is None or isinstance(value, str | int | float):
        return value
    if hasattr(value, "as_dict"):
        return value.as_dict()
    if hasattr(value, "_asdict"):
        return {name: plain(each) for name, each in value._asdict().items()}
    if is_dataclass(value):
        return {field.name: plain(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, dict):
        return {str(name): plain(each) for name, each in value.items()}
    return [plain(each) for each in value]


@dataclass(frozen=True, slots=True)
class Page(View, Generic[Item]):
    """Some of many."""

    items: tuple[Item, ...]
    next: str | None = None
    """What to ask for the rest with; None if this is the end."""


@dataclass(frozen=True, slots=True)
class Change(View):
    """What was done."""

    version: Version | None
    """None, if all was so already, or if what was done is no change of the configuration."""
    notes: tuple[str, ...] = ()
    """What is to know beside."""
    what: str = ""

    def as_dict(self) -> dict[str, Any]:
        number = None if self.version is None else self.version.number
        return {"version": number, "notes": list(self.notes), "what": self.what}
