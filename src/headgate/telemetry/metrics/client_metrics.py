"""Metrics of polite clients: what they have sent, how long they have waited, and the quotas that hosts report."""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING, Final

from headgate.telemetry.metrics.families import CLIENT_FAMILIES, MAX_SERIES, Sample

if TYPE_CHECKING:
    from headgate.clients.client import PoliteClient
    from headgate.clients.quotas import Quota
    from headgate.telemetry.metrics.families import Family, Labels

__all__ = ["ClientMetrics"]

_COUNTERS: Final = {
    "requests": "requests",
    "rejected": "rejected",
    "unavailable": "unavailable",
    "retries": "retries",
    "waits": "waits",
    "wait_seconds": "waited_s",
    "not_sent": "too_long",
    "retries_refused": "out_of_budget",
}
"""For each counter, the attribute of `ClientStats`."""


class ClientMetrics:
    """The metrics of one client, or of several that are exported under one name.

    >>> from headgate.clients import PoliteClient
    >>> metrics = ClientMetrics()
    >>> metrics.watch(PoliteClient())
    >>> metrics.read()[0].family.name, metrics.read()[0].value
    ('rate_limiter_client_requests', 0)
    """

    def __init__(self) -> None:
        self._clients: list[PoliteClient] = []

    def watch(self, client: PoliteClient) -> None:
        """Add a client. It is kept for as long as the metrics are, as counters must not decrease."""
        if all(client is not each for each in self._clients):
            self._clients.append(client)

    def read(self) -> list[Sample]:
        """All metrics at this moment."""
        counters = [
            Sample(_family(name), (), sum(getattr(client.stats, attribute) for client in self._clients))
            for name, attribute in _COUNTERS.items()
        ]
        return [*counters, *self._quota_samples()]

    def _quota_samples(self) -> list[Sample]:
        """The limit and the rest of each quota; of several with the same name, those of the one with the least left."""
        tightest: dict[Labels, Quota] = {}
        for client in self._clients:
            for host in client.hosts():
                for quota in client.quotas(host):
                    labels: Labels = host, quota.name or "none"
                    if quota.remaining is not None and _share(quota) < _share(tightest.get(labels)):
                        tightest[labels] = quota
        samples = []
        for labels, quota in islice(tightest.items(), MAX_SERIES):
            if quota.limit is not None:
                samples.append(Sample(_family("quota_limit"), labels, quota.limit))
            samples.append(Sample(_family("quota_remaining"), labels, quota.remaining or 0))
        return samples


def _family(name: str) -> Family:
    return CLIENT_FAMILIES[f"rate_limiter_client_{name}"]


def _share(quota: Quota | None) -> float:
    """The part of a quota that is left; above 1 if there is no such quota, or its size is unknown."""
    if quota is None:
        return 3.0
    return (quota.remaining or 0) / quota.limit if quota.limit else 2.0
