"""Growth: automatic raises of limits within the bound of a tier, and requests of customers for higher limits.

A raise is an override with an end, in the name of an actor of its own: it is in the audit log, on the pages of the
client, and can be removed like any other. It is a multiple of the tier's own numbers, so however often traffic grows,
they never exceed the bound. The limits of one bot, and those of a client with an override, are not raised.
"""

from __future__ import annotations

import logging
import secrets
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final

from sqlalchemy import func, insert, select, update

from headgate.control.anomalies.tables import LIMIT_REQUESTS
from headgate.control.config.engine import read_transaction, write_transaction
from headgate.control.service.dependencies import ServiceDependencies, TopicService
from headgate.control.service.effective_policy import format_limit
from headgate.control.service.errors import NotFound
from headgate.control.service.models import Actor, Change, ChangeContext, ClientRef, OverrideSpec, View
from headgate.control.service.overrides import parse_bucket
from headgate.control.service.request_links import Link, LinkSigner
from headgate.errors import HeadgateError, InvalidConfiguration, InvalidInput, InvalidLimit
from headgate.limits import Limit
from headgate.telemetry.pseudonyms import checked_secret

if TYPE_CHECKING:
    from collections.abc import Iterator

    from headgate.control.anomalies.detector import Anomaly
    from headgate.control.service.clients import ClientService
    from headgate.control.service.models import LimitUsage
    from headgate.control.service.overrides import OverrideService
    from headgate.policy.model import GrowthTerms

__all__ = ["GrowthService", "LimitRequest"]

logger = logging.getLogger("headgate")

RAISER: Final = Actor("automatic raise", "support")
UNCHANGED: Final = ("concurrency", "fair_share")
"""Algorithms of limits that are not raised and cannot be requested."""
MAX_OPEN: Final = 5
"""Open requests of one client: a new one replaces that for the same limit."""
MAX_MESSAGE_LENGTH: Final = 500
MAX_LISTED: Final = 200


@dataclass(frozen=True, slots=True)
class LimitRequest(View):
    """A customer's request for a higher limit."""

    id: str
    anomaly: str
    who: ClientRef
    limit: str
    current: str
    """The limit when it was requested."""
    wanted: str
    message: str
    at_us: int
    state: str
    """"open", "approved" or "declined"."""
    decided_by: str | None
    decided_us: int | None


class GrowthService(TopicService):
    """Raises limits automatically, and takes, lists and decides requests for higher limits."""

    def __init__(
        self, deps: ServiceDependencies, clients: ClientService, overrides: OverrideService, secret: str | bytes | None
    ) -> None:
        super().__init__(deps)
        self._clients, self._overrides = clients, overrides
        self.signer: LinkSigner | None = None
        """Signs links to the page of a customer; None without the secret of the gates."""
        try:
            self.signer = LinkSigner(checked_secret(secret))
        except InvalidConfiguration:
            if secret is not None:
                raise

    def raise_limits(self, anomaly: Anomaly, client: ClientRef) -> list[str]:
        """Raise the limits of a client whose traffic has grown; a sentence for each. Repeating it changes nothing."""
        if anomaly.verdict != "people":
            return []
        view = self._clients.get(client)
        terms = self._deps.current_policy().policy.raises.get(view.tier or "")
        if terms is None:
            return []
        end = datetime.fromtimestamp(anomaly.at_us // 1_000_000, UTC) + terms.duration
        marker = f"anomaly {anomaly.id}"
        reason = f"traffic {anomaly.times:,.0f} times its usual; tier {view.tier} allows {terms.factor} times; {marker}"
        done = [each for each in view.limits if each.from_ == "override" and marker in (each.reason or "")]
        found = [_sentence(each.limit, each.bucket, end) for each in done]
        for usage, limit in _raised(client, view.limits, terms):
            spec = OverrideSpec(format_limit(limit), limit=usage.limit, valid_until=end)
            try:
                self._overrides.add(ChangeContext(RAISER, reason), client, spec)
            except HeadgateError as error:  # such as a policy that has changed meanwhile
                logger.warning("limit %s of %s was not raised: %s", usage.limit, anomaly.label, error)
            else:
                found.append(_sentence(usage.limit, spec.bucket, end))
        return found

    def open_link(self, token: str) -> Link:
        """The content of a customer's link; InvalidInput if it is not valid any more."""
        if self.signer is None:
            raise InvalidInput("this server has no secret, so it cannot check links")
        return self.signer.read(token, now_us=self._deps.now_us())

    def limits_of(self, client: ClientRef) -> list[LimitUsage]:
        """The limits of a client alone, which it can request to be raised."""
        return [each for each in self._clients.get(client).limits if _is_own(client, each)]

    def submit(self, link: Link, *, limit: str, wanted: str, message: str) -> LimitRequest:
        """Record a request. It replaces an open one of the same client for the same limit."""
        deps, now_us = self._deps, self._deps.now_us()
        usage = next((each for each in self.limits_of(link.client) if each.limit == limit), None)
        if usage is None:
            raise InvalidInput("choose one of your limits")
        bucket = _checked_bucket(wanted, usage)
        message = " ".join(message.split())
        if len(message) > MAX_MESSAGE_LENGTH or not message.isprintable():
            raise InvalidInput(f"a message has at most {MAX_MESSAGE_LENGTH} printable characters")
        deps.lookup.refuse_keys(message)
        table = LIMIT_REQUESTS
        is_theirs = (table.c.kind == link.client.kind) & (table.c.value == link.client.value)
        is_open = is_theirs & (table.c.state == "open")
        row = {"id": secrets.token_hex(12), "anomaly": link.anomaly, "kind": link.client.kind}
        row |= {"value": link.client.value, "limit_name": limit, "current": usage.bucket, "wanted": bucket}
        with write_transaction(deps.config.engine) as connection:
            connection.execute(table.delete().where(is_open & (table.c.limit_name == limit)))
            if (connection.scalar(select(func.count()).select_from(table).where(is_open)) or 0) >= MAX_OPEN:
                raise InvalidInput("you have several open requests; support will decide them first")
            connection.execute(insert(table).values({**row, "message": message, "at_us": now_us, "state": "open"}))
        return self.get(row["id"])

    def get(self, id: str) -> LimitRequest:
        found = self.list(id=id)
        if not found:
            raise NotFound(f"there is no limit request {id[:40]}")
        return found[0]

    def list(self, *, client: ClientRef | None = None, id: str | None = None) -> list[LimitRequest]:
        """Requests: the open ones first, then the newest."""
        table = LIMIT_REQUESTS
        query = select(table).order_by((table.c.state != "open"), table.c.at_us.desc(), table.c.id).limit(MAX_LISTED)
        if client is not None:
            query = query.where(table.c.kind == client.kind, table.c.value == client.value)
        if id is not None:
            query = query.where(table.c.id == id)
        with read_transaction(self._deps.config.engine) as connection:
            return [_request(row) for row in connection.execute(query)]

    def approve(
        self, change: ChangeContext, id: str, *, bucket: str = "", valid_until: datetime | None = None
    ) -> Change:
        """Give the client what it has requested, or another rate, as an override."""
        change.actor.require("support", "approve limit requests")
        request = self._open_request(id)
        own = next((each for each in self._clients.get(request.who).overrides if each.limit == request.limit), None)
        spec = OverrideSpec(bucket or request.wanted, limit=request.limit, valid_until=valid_until)
        if own is not None and own.id is not None and own.route_class is None:
            result = self._overrides.change(change, own.id, spec)
        else:
            result = self._overrides.add(change, request.who, spec)
        self._decide(change.actor, id, "approved")
        return result

    def decline(self, change: ChangeContext, id: str) -> Change:
        """Decline a request; the reason is in the audit log."""
        change.actor.require("support", "decline limit requests")
        request = self._open_request(id)
        subject = f"request of {self._deps.lookup.name_of(request.who)} for {request.wanted} on limit {request.limit}"
        with self._deps.audited(change.actor, "declined", subject, reason=change.reason):
            pass
        self._decide(change.actor, id, "declined")
        return Change(None, (), f"declined {subject}")

    def _open_request(self, id: str) -> LimitRequest:
        request = self.get(id)
        if request.state != "open":
            raise InvalidInput(f"this request was {request.state} by {request.decided_by} already")
        return request

    def _decide(self, actor: Actor, id: str, state: str) -> None:
        values = {"state": state, "decided_by": actor.name, "decided_us": self._deps.now_us()}
        with write_transaction(self._deps.config.engine) as connection:
            connection.execute(update(LIMIT_REQUESTS).where(LIMIT_REQUESTS.c.id == id).values(values))


def _is_own(client: ClientRef, usage: LimitUsage) -> bool:
    """True for a limit that counts this client alone."""
    return usage.by in (client.kind, "client") and not usage.shadow and usage.algorithm not in UNCHANGED


def _raised(
    client: ClientRef, limits: tuple[LimitUsage, ...], terms: GrowthTerms
) -> Iterator[tuple[LimitUsage, Limit]]:
    """The limits with the numbers of the tier or the policy, each with its raised form."""
    for usage in limits:
        if not _is_own(client, usage) or usage.from_ == "override":
            continue
        try:
            limit = Limit.parse(usage.bucket)
            burst = None if limit.burst == limit.quota else limit.capacity * terms.factor
            yield usage, replace(limit, quota=limit.quota * terms.factor, burst=burst)
        except InvalidLimit as error:
            logger.warning("limit %s cannot be raised: %s", usage.limit, error)


def _checked_bucket(wanted: str, usage: LimitUsage) -> str:
    """The wanted rate: a number of requests in the period of the limit, or a rate."""
    digits = wanted.strip().replace(",", "").replace("_", "")
    text = wanted.strip()
    if digits.isascii() and digits.isdigit() and len(digits) <= 12:
        text = f"{int(digits)}/{usage.bucket.partition('/')[2].partition(',')[0]}"
    parse_bucket(text)
    return format_limit(Limit.parse(text))


def _request(row: Any) -> LimitRequest:
    same = {name: getattr(row, name) for name in ("id", "anomaly", "current", "wanted", "message", "at_us", "state")}
    who = ClientRef(row.kind, row.value)
    return LimitRequest(**same, who=who, limit=row.limit_name, decided_by=row.decided_by, decided_us=row.decided_us)


def _sentence(limit: str, bucket: str, end: datetime) -> str:
    return f"{limit}: {bucket} until {end:%Y-%m-%d %H:%M} UTC."
