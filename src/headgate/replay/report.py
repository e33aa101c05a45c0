"""The report of a replay as a dict for JSON, from which the terminal, Markdown and HTML are rendered."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from heapq import nsmallest
from typing import TYPE_CHECKING, Any, Final

from headgate.clock import MINUTE_US, SECOND_US
from headgate.policy.rule_bounds import largest_bound
from headgate.policy.snapshot import NO_TIER
from headgate.replay.times import iso
from headgate.telemetry.decision_log.sinks import without_password

if TYPE_CHECKING:
    from collections.abc import Iterator

    from headgate.replay.engine import PolicyReplay
    from headgate.replay.obedience import ObedientClients
    from headgate.replay.sources import LogReader
    from headgate.replay.statistics import ClientTotals

__all__ = ["MAX_CLIENTS", "ReplayReport", "compare", "make_report"]

MAX_CLIENTS: Final = 20
"""Clients that are listed without --all-clients."""


@dataclass(frozen=True, slots=True)
class ReplayReport:
    """The result of a replay."""

    data: dict[str, Any]
    """As printed with --json."""
    parts: dict[str, Any]
    """The same with all clients by name, for conditions."""


def make_report(
    engine: PolicyReplay,
    reader: LogReader,
    *,
    policy_file: str,
    all_clients: bool = False,
    obedient: ObedientClients | None = None,
) -> ReplayReport:
    """The report of a finished replay."""
    clients = engine.clients
    rejected = [each for each in clients.items() if each[1].rejected]
    shown = sorted(clients.items(), key=_rank) if all_clients else nsmallest(MAX_CLIENTS, rejected, key=_rank)
    groups = _groups(engine)
    data: dict[str, Any] = {
        "policy": policy_file,
        "logs": [without_password(name) if "://" in name else name for name in reader.names],
        "requests": engine.requests,
        "rejected": engine.rejected,
        "blocked": engine.blocked,
        "first": None if engine.first_us is None else iso(engine.first_us),
        "last": None if engine.last_us is None else iso(engine.last_us),
        "skipped": reader.skipped,
        "clients": len(clients),
        "rejected_clients": len(rejected),
        "found_clients": 0 if engine.scenarios is None else engine.scenarios.found_clients,
        "by_limit": {name: _limit(engine, name) for name in engine.rules},
        **groups,
        "default_tier": engine.policy.default_tier,
        "by_client": [_client(name, totals) for name, totals in shown],
        "came_close": _came_close(clients),
        "worst_minute": _minute(engine.worst_minute),
        "busiest_minute": None
        if engine.busiest_minute is None
        else {"at": iso(engine.busiest_minute[0]), "requests": engine.busiest_minute[1]},
        "timeline": _timeline(engine),
        "retries": None if obedient is None else _retries(obedient),
        "by_scenario": {} if engine.scenarios is None else engine.scenarios.report(all_clients=all_clients),
        "notes": _notes(engine, reader, obedient),
    }
    return ReplayReport(data, {**data, "all_clients": _ClientCounts(clients)})


class _ClientCounts(Mapping[str, dict[str, int]]):
    """The requests and rejections of all clients by name, made on demand, as there may be a million."""

    def __init__(self, clients: Mapping[tuple[str, str], ClientTotals]) -> None:
        self._clients = clients
        self._kinds = sorted({kind for kind, _ in clients})

    def __getitem__(self, name: str) -> dict[str, int]:
        for kind in self._kinds:
            if (totals := self._clients.get((kind, name))) is not None:
                return {"requests": totals.requests, "rejected": totals.rejected}
        raise KeyError(name)

    def __iter__(self) -> Iterator[str]:
        return (name for _, name in self._clients)

    def __len__(self) -> int:
        return len(self._clients)


def _rank(client: tuple[tuple[str, str], ClientTotals]) -> tuple[int, int, str]:
    """The order of clients: the most rejected ones first, then those with most requests."""
    name, totals = client
    return -totals.rejected, -totals.requests, name[1]


def compare(
    engine: PolicyReplay, other: PolicyReplay, *, policy_file: str, all_clients: bool = False
) -> dict[str, Any]:
    """The differences to another policy, which decided the same requests before."""
    newly_rejected: list[dict[str, Any]] = []
    newly_allowed: list[dict[str, Any]] = []
    changed: list[dict[str, Any]] = []
    before = _by_name(other)
    for (kind, value), totals in engine.clients.items():
        old = before.get(value)
        rejected_before = old.rejected if old is not None else 0
        if totals.rejected == rejected_before:
            continue
        row = {
            "client": value,
            "kind": kind,
            "tier": totals.tier,
            "requests": totals.requests,
            "rejected": totals.rejected,
            "rejected_before": rejected_before,
        }
        rows = newly_rejected if not rejected_before else newly_allowed if not totals.rejected else changed
        rows.append(row)
    for rows in (newly_rejected, newly_allowed, changed):
        rows.sort(key=lambda row: (-abs(row["rejected"] - row["rejected_before"]), row["client"]))
    most = None if all_clients else MAX_CLIENTS
    return {
        "policy": policy_file,
        "rejected": other.rejected,
        "by_limit": {
            name: {"requests": totals.requests, "rejected": totals.rejected} for name, totals in other.rules.items()
        },
        "newly_rejected_clients": len(newly_rejected),
        "newly_allowed_clients": len(newly_allowed),
        "changed_clients": len(changed),
        "newly_rejected": newly_rejected[:most],
        "newly_allowed": newly_allowed[:most],
        "changed": changed[:most],
    }


def _by_name(engine: PolicyReplay) -> dict[str, ClientTotals]:
    return {value: totals for (_, value), totals in engine.clients.items()}


def _limit(engine: PolicyReplay, name: str) -> dict[str, Any]:
    totals = engine.rules[name]
    rejected_clients = sum(
        1 for each in engine.clients.values() if each.rejections is not None and name in each.rejections.by_rule
    )
    limit = totals.rule.limit
    return {
        "requests": totals.requests,
        "rejected": totals.rejected,
        "limit": None if limit is None else f"{limit}",
        "by": "+".join(totals.rule.by) or "global",
        "shadow": totals.rule.shadow,
        "bound": 0 if totals.rule.shadow else largest_bound(engine.policy, totals.rule, engine.policy.store.nodes),
        "clients_rejected": rejected_clients,
        "longest_wait_s": totals.longest_wait_us / SECOND_US,
        "unsatisfiable": totals.unsatisfiable,
        "peak_per_minute": totals.peak_admitted,
        "peak_at": None if totals.peak_minute_us is None else iso(totals.peak_minute_us),
    }


def _groups(engine: PolicyReplay) -> dict[str, Any]:
    by_route: dict[str, dict[str, int]] = {}
    by_tier: dict[str, dict[str, int]] = {tier: _zero() for tier in sorted(filter(None, engine.snapshot.tiers))}
    by_class: dict[str, dict[str, int]] = {}
    for totals in engine.routes.values():
        tables = [(by_route, totals.endpoint), (by_tier, totals.tier or NO_TIER)]
        if totals.route_class is not None:
            tables.append((by_class, totals.route_class))
        for table, name in tables:
            row = table.setdefault(name, _zero())
            row["requests"] += totals.requests
            row["rejected"] += totals.rejected
            row["blocked"] += totals.blocked
    if not engine.snapshot.tiers:
        by_tier = {}
    by_rejections = sorted(by_route.items(), key=lambda each: (-each[1]["rejected"], -each[1]["requests"], each[0]))
    return {"by_tier": by_tier, "by_class": by_class, "by_route": dict(by_rejections)}


def _zero() -> dict[str, int]:
    return {"requests": 0, "rejected": 0, "blocked": 0}


def _client(name: tuple[str, str], totals: ClientTotals) -> dict[str, Any]:
    row: dict[str, Any] = {
        "client": name[1],
        "kind": name[0],
        "tier": totals.tier,
        "requests": totals.requests,
        "rejected": totals.rejected,
    }
    if (rejections := totals.rejections) is not None:
        row |= {
            "by_limit": dict(sorted(rejections.by_rule.items(), key=lambda each: (-each[1], each[0]))),
            "blocked": rejections.blocked,
            "first_rejected": iso(rejections.first_us),
            "last_rejected": iso(rejections.last_us),
            "episodes": rejections.episodes,
            "longest_s": rejections.longest_us / SECOND_US,
        }
    if totals.shadow_rejections:
        row["shadow_rejected"] = totals.shadow_rejections
    return row


def _came_close(clients: Mapping[tuple[str, str], ClientTotals]) -> list[dict[str, Any]]:
    """Clients that no limit rejected, but that used most of one."""
    near = (
        (remaining / capacity, name, rule, remaining, capacity, at_us, totals)
        for name, totals in clients.items()
        if not totals.rejected and totals.near
        for rule, (remaining, capacity, at_us) in totals.near.items()
    )
    found = nsmallest(MAX_CLIENTS, near, key=lambda each: (each[0], -each[6].requests, each[1]))
    return [
        {
            "client": name[1],
            "kind": name[0],
            "limit": rule,
            "remaining": remaining,
            "capacity": capacity,
            "at": iso(at_us),
            "requests": totals.requests,
        }
        for _, name, rule, remaining, capacity, at_us, totals in found
    ]


def _minute(found: tuple[int, int, int] | None) -> dict[str, Any] | None:
    return None if found is None else {"at": iso(found[0]), "requests": found[1], "rejected": found[2]}


def _timeline(engine: PolicyReplay) -> dict[str, Any] | None:
    timeline = engine.timeline
    if timeline is None:
        return None
    return {
        "start": iso(timeline.start_us),
        "minutes_per_slot": timeline.width_us // MINUTE_US,
        "requests": timeline.requests,
        "rejected": timeline.rejected,
    }


def _retries(obedient: ObedientClients) -> dict[str, Any]:
    mean_us = obedient.total_delay_us / obedient.postponed if obedient.postponed else 0
    return {
        "postponed": obedient.postponed,
        "retries": obedient.retries,
        "mean_delay_s": round(mean_us / SECOND_US, 3),
        "longest_delay_s": obedient.longest_delay_us / SECOND_US,
    }


def _notes(engine: PolicyReplay, reader: LogReader, obedient: ObedientClients | None) -> list[str]:
    """The reasons why production may have decided differently, as far as the log and the policy show them."""
    notes: list[str] = []
    rules = engine.policy.rules
    if obedient is None and engine.rejected:
        notes.append(
            "Clients react to rejections, and the log cannot show how: each request is replayed at its own time, "
            "without further retries. --obey-retry-after replays clients that wait."
        )
    if engine.rejected_in_log:
        notes.append(
            f"{_count(engine.rejected_in_log, 'request')} with status 429 in the log: clients were being limited "
            "already, and may send more without it."
        )
    notes.append("All counters are empty at the start of the log; long windows and daily quotas fill up only later.")
    reserved = [rule.name for rule in rules if rule.settled]
    if reserved:
        notes.append(f"The log has no actual costs: {_list(reserved)} charged the reserved cost of each request.")
    conditional = [rule.name for rule in rules if rule.count_when is not None]
    if conditional:
        notes.append(
            f"{_list(conditional)} count by the status in the log, at the time of the request; between request and "
            "response, a gate has reserved the cost."
        )
    concurrent = [rule.name for rule in rules if any(limit.algorithm == "concurrency" for limit in rule.limits)]
    if concurrent and engine.unmeasured:
        notes.append(
            f"{_count(engine.unmeasured, 'request')} without a duration in the log: {_list(concurrent)} counted each "
            "of them as ended at once."
        )
    for kind, senders in sorted(engine.missing_identities.items()):
        remedy = "--identity" if kind != "api_key" else "a log with the header of the key"
        notes.append(
            f"The log has no {kind} for {_count(senders, 'sender')}, so limits by {kind} counted them "
            f"as requests without one; see {remedy}."
        )
    if (scenarios := engine.scenarios) is not None:
        notes.append(
            "Actions of scenarios are counted, and limits are not divided nor requests delayed by them. A challenged "
            "client is taken for one that does not pass."
        )
        by_agent = [each.name for each in scenarios.settings.scenarios if each.looks_at_agents]
        if by_agent and not scenarios.has_agents:
            notes.append(f"The log has no user agents, so {_list(by_agent)} could not find anything.")
        if not scenarios.has_status:
            notes.append("The log has no response statuses, so scenarios saw neither refused nor missing requests.")
    if engine.unknown_addresses:
        notes.append(
            f"{_count(engine.unknown_addresses, 'sender')} without a valid address: all were counted as one client."
        )
    bounds = {rule.name: largest_bound(engine.policy, rule, engine.policy.store.nodes) for rule in rules}
    if largest := max(bounds.values(), default=0):
        name = max(bounds, key=lambda each: bounds[each])
        notes.append(
            "Requests were decided by an exact store. Where nodes decide on their own (prepaid tokens, failure mode "
            f"local), all of them together admit at most {_count(largest, 'token')} more, on {name!r}."
        )
    if any(rule.split > 1 for rule in rules):
        notes.append("Limits with split: were replayed as one counter; their shards may reject a little earlier.")
    if any(rule.region != "regional" for rule in rules):
        notes.append("Limits over several regions were replayed as one counter, as if the log had all regions.")
    if reader.sampled:
        notes.append(
            f"{_count(reader.sampled, 'record')} of the decision log stand for several requests, as samples. Each was "
            "replayed as one, so rejections are underestimated. Log all decisions for an exact replay."
        )
    if reader.lost:
        notes.append(f"The decision log lacks {reader.lost:,.0f} decisions that could not be recorded.")
    if engine.store.stats.forgiven:
        notes.append(
            f"{_count(engine.store.stats.forgiven, 'counter')} in use evicted for lack of memory: rejections are "
            "underestimated."
        )
    return notes


def _list(names: list[str]) -> str:
    return ", ".join([repr(name) for name in names])


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"
