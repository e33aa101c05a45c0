"""Actions that scenarios have taken on clients: their list, and their undo."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Final, Literal

from headgate.abuse.actions import list_actions, undo_action
from headgate.control.service.client_lookup import is_wide_network
from headgate.control.service.dependencies import TopicService
from headgate.control.service.errors import NotFound, log_and_summarize
from headgate.control.service.listing import check_page
from headgate.control.service.models import Change, ChangeContext, ClientRef, Page, View
from headgate.errors import HeadgateError, InvalidInput
from headgate.local.restrictions import ActionKind  # noqa: TC001 - resolved for the response model

if TYPE_CHECKING:
    from headgate.abuse.actions import ClientAction
    from headgate.limiter import Limiter
    from headgate.local.restrictions import Restriction

__all__ = ["NO_STORE", "ActionService", "ActionState", "ActionView"]

ActionState = Literal["active", "shadow", "undone", "ended"]

NO_STORE: Final = "the admin server was started without --store, so it cannot see actions"


@dataclass(frozen=True, slots=True)
class ActionView(View):
    """An action of a scenario on a client."""

    id: str
    who: ClientRef
    label: str | None
    scenario: str
    action: ActionKind
    state: ActionState
    """Ended actions are listed until the level of the client has decayed, and undone ones in their grace time."""
    level: int
    """The number of findings that have led here, less those that have decayed."""
    at_us: int
    until_us: int
    explanation: str
    undone_us: int | None
    undone_by: str | None
    remembered_until_us: int
    """The time at which the level has decayed, or the grace time after the undo is over."""


class ActionService(TopicService):
    """Lists actions, and ends them."""

    def list(
        self, *, search: str = "", state: str = "all", after: str | None = None, most: int = 50
    ) -> Page[ActionView]:
        """The actions on all nodes, newest first."""
        check_page(search, "all", most)
        now_us, text = self._deps.now_us(), search.casefold()
        found = [_view(each, now_us) for each in list_actions(self._counters.engine, now_us)]
        found = [each for each in found if state in ("all", each.state)]
        found = list(self._deps.lookup.with_pseudonyms(Page(tuple(found))).items)
        if text:
            found = [each for each in found if any(text in part.casefold() for part in _searched(each))]
        start = next((number for number, each in enumerate(found, 1) if each.id == after), 0) if after else 0
        page = found[start : start + most]
        return Page(tuple(page), page[-1].id if start + most < len(found) else None)

    def trouble(self) -> str | None:
        """The reason why actions cannot be listed; None if they can."""
        if self._deps.counters is None:
            return NO_STORE
        try:
            list_actions(self._deps.counters.engine, self._deps.now_us())
        except HeadgateError as error:
            return log_and_summarize("actions cannot be read", error)
        return None

    def undo(self, change: ChangeContext, id: str) -> Change:
        """End an action. Its scenario does not act on the client again before the grace time is over."""
        deps = self._deps
        change.actor.require("support", "undo actions")
        now_us, engine = deps.now_us(), self._counters.engine
        found = next((each for each in list_actions(engine, now_us) if each.id == id), None)
        if found is None:
            raise NotFound(f"there is no action {id!r}; it may have ended")
        client, restriction = ClientRef(found.kind, found.value), found.restriction
        if is_wide_network(client):
            change.actor.require("operator", "undo actions on networks")
        if restriction.undone_us is not None:
            return Change(None, (), "nothing to change: it was undone before")
        deps.lookup.refuse_keys(change.reason)
        with deps.audited(change.actor, "undid", f"{restriction.action} of {client}", reason=change.reason):
            grace = self._grace(restriction)
            after = undo_action(engine, found, grace=grace, by=change.actor.name, now_us=now_us)
        if after is None:
            raise NotFound(f"there is no action {id!r}; it has ended meanwhile")
        return Change(None, (), f"undid {restriction.action} of {client}")

    @property
    def _counters(self) -> Limiter:
        if self._deps.counters is None:
            raise InvalidInput(NO_STORE)
        return self._deps.counters

    def _grace(self, restriction: Restriction) -> timedelta:
        """The grace time of the scenario in the current policy; the usual one if it has none any more."""
        with suppress(HeadgateError):
            abuse = self._deps.current_policy().policy.abuse
            for scenario in () if abuse is None else abuse.scenarios:
                if scenario.name == restriction.scenario:
                    return scenario.grace
        return DEFAULT_GRACE


DEFAULT_GRACE: Final = timedelta(hours=1)
"""Of scenarios that the policy does not have any more; as in `AbuseScenario`."""


def _view(action: ClientAction, now_us: int) -> ActionView:
    kind, value, restriction = action
    return ActionView(
        id=action.id,
        who=ClientRef(kind, value),
        label=None,
        scenario=restriction.scenario,
        action=restriction.action,
        state=_state(restriction, now_us),
        level=restriction.level,
        at_us=restriction.at_us,
        until_us=restriction.until_us,
        explanation=restriction.sentence,
        undone_us=restriction.undone_us,
        undone_by=restriction.undone_by or None,
        remembered_until_us=restriction.forget_us,
    )


def _state(restriction: Restriction, now_us: int) -> ActionState:
    if restriction.undone_us is not None:
        return "undone"
    if now_us >= restriction.until_us:
        return "ended"
    return "shadow" if restriction.shadow else "active"


def _searched(each: ActionView) -> tuple[str, ...]:
    return each.who.value, each.label or "", each.explanation, each.undone_by or ""
