"""Names for those whom counters count: keyed hashes and labels, of clients and of counters that are no client's own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from headgate.policy.credentials import PREFIX
from headgate.policy.model import NET_SUFFIX
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
        """The client that sent a request. Of an address only the network is shown, which many share: a piece of its
        hash tells them apart."""
        named = self._clients.named((*who, *who.values()), self._policy)
        is_blurred = named.kind == "ip" and named.label.startswith("ip ") and named.label.endswith("*")
        if not is_blurred:
            return named
        return named._replace(label=f"{named.label} ({named.key.removeprefix(PREFIX)[:SHORT]})")

    def hot(self, gate: Door, most: int) -> list[list[Any]]:
        """The counters of a gate whose tokens are prepaid, the busiest first: limit, kind, key, label and how many
        requests a second."""
        purses = gate._limiter._front.purses._purses  # noqa: SLF001 - nobody else knows them
        rates: dict[tuple[str, str, str, str], int] = {}
        for purse in list(purses.values()):
            name = self.counted(purse.key)
            at = purse.limit.name, name.kind, name.key, name.label
            rates[at] = rates.get(at, 0) + purse.per_second
        busiest = sorted(rates.items(), key=lambda item: -item[1])[:most]
        return [[*at, rate] for at, rate in busiest]

    def counted(self, key: Key) -> Named:
        """Whom a counter counts, out of the parts that it is made of."""
        parts = [str(part) for part in key.parts]
        if not parts:
            return EVERYBODY
        by = self._by.get(key.limit.name)
        if key.limit.name.endswith(NET_SUFFIX):  # the address comes first
            return self.of({"address": parts[0], "ip": parts[0]})
        if parts[0] == "" and len(parts) == 3:  # counted by the address, as what the limit counts by was not there
            who = {parts[1]: parts[2]}
        else:
            who = _identities(by or (), parts) or {"other": "|".join(parts)}
        address = who.get("ip", "")
        if any(who.get(kind) for kind in CLIENT_KINDS):
            return self.of({"address": address, "ip": address, **who})
        kind, value = next(iter(who.items()))
        hashed = self._clients.key(kind, value)
        return Named(kind, hashed, value if kind == "endpoint" else f"{kind} {hashed[: 5 + SHORT]}", (), ())


def _identities(by: tuple[str, ...], parts: list[str]) -> dict[str, str]:
    """What stands in the parts of a counter, by kind: a limit by client writes two of them, the kind and the value.
    Nothing, if they are not those of such a limit."""
    kinds = list(by)
    if "client" in by:
        at = kinds.index("client")
        kinds[at : at + 1] = parts[at : at + 1]
        parts = parts[:at] + parts[at + 1 :]
    return dict(zip(kinds, parts, strict=True)) if len(kinds) == len(parts) else {}
