"""Names for those whom counters count: keyed hashes and labels, of clients and of counters that are no client's own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from headgate.policy.snapshot import CLIENT_KINDS
from headgate.telemetry.clients import SHORT, Named

if TYPE_CHECKING:
    from headgate.adapters.door import Door
    from headgate.keys import Key
    from headgate.policy.model import Policy
    from headgate.policy.snapshot import Who
    from headgate.telemetry.clients import Clients

__all__ = ["EVERYBODY", "Naming"]

EVERYBODY = Named("global", "", "everybody", (), ())
"""Whom a limit counts that has one counter for all."""


class Naming:
    """Names clients by the policy in force. Belongs to one thread."""

    def __init__(self, clients: Clients) -> None:
        self._clients = clients
        self._policy: Policy | None = None
        self._by: dict[str, tuple[str, ...]] = {}
        """What each limit counts by."""

    def use(self, policy: Policy) -> None:
        """Name them by this policy from now on."""
        if policy is not self._policy:
            self._policy = policy
            self._by = {rule.name: tuple(rule.by) for rule in policy.rules}

    def of(self, who: Who) -> Named:
        """The client that sent a request."""
        return self._clients.named((*who, *who.values()), self._policy)

    def counted(self, limit: str, identity: str, who: Who) -> Named:
        """Whom a limit counted a request as: its client, unless it is one counter for all."""
        return EVERYBODY if self._by.get(limit, (limit,)) == () else self.of(who)

    def hot(self, gate: Door, most: int) -> list[list[Any]]:
        """The counters of a gate whose tokens are prepaid, the busiest first: limit, kind, key, label and how many
        requests a second."""
        purses = gate._limiter._front.purses._purses  # noqa: SLF001 - nobody else knows them
        rates: dict[tuple[str, str, str, str], int] = {}
        for purse in list(purses.values()):
            name = self._counter(purse.key)
            at = purse.limit.name, name.kind, name.key, name.label
            rates[at] = rates.get(at, 0) + purse.per_second
        busiest = sorted(rates.items(), key=lambda item: -item[1])[:most]
        return [[*at, rate] for at, rate in busiest]

    def _counter(self, key: Key) -> Named:
        """Whom a counter counts, out of the parts that it is made of."""
        by = self._by.get(key.limit.name)
        parts = [str(part) for part in key.parts]
        if not parts:
            return EVERYBODY
        if parts[0] == "" and len(parts) == 3:  # counted by the address, as what the limit counts by was not there
            who = {parts[1]: parts[2]}
        elif by == ("client",) and len(parts) == 2:
            who = {parts[0]: parts[1]}
        elif by is not None and "client" not in by and len(by) == len(parts):
            who = dict(zip(by, parts, strict=True))
        else:
            who = {"other": "|".join(parts)}
        address = who.get("ip", "")
        if any(who.get(kind) for kind in CLIENT_KINDS):
            return self.of({"address": address, "ip": address, **who})
        kind, value = next(iter(who.items()))
        hashed = self._clients.key(kind, value)
        return Named(kind, hashed, value if kind == "endpoint" else f"{kind} {hashed[: 5 + SHORT]}", (), ())
