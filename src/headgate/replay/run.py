"""Runs a replay: reads the logs, sorts the requests, decides them under one or two policies, and makes the report."""

from __future__ import annotations

import secrets
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

from headgate._limit_syntax import suggest
from headgate._pace import gc_paused
from headgate.errors import InvalidInput
from headgate.policy.api_keys import ApiKeyHasher, IdentityHashes
from headgate.policy.model import ADDRESSES, Identity
from headgate.replay.engine import PolicyReplay
from headgate.replay.formats import ParserSettings
from headgate.replay.identities import PathIdentity, TierTable, used_kinds, watched_kinds
from headgate.replay.obedience import ObedientClients
from headgate.replay.report import compare, make_report
from headgate.replay.sorting import sort_by_time
from headgate.replay.sources import LogReader

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from headgate.policy.model import Policy
    from headgate.replay.formats import LoggedRequest
    from headgate.replay.report import ReplayReport

__all__ = ["LogOptions", "ReplayRun"]

SOURCES: Final = ("header", "path", "field")
BUILT_IN: Final = ("address", "ip", "subnet", "endpoint", "client", "global", "tier")


@dataclass(frozen=True, slots=True)
class LogOptions:
    """The logs to read, and where identities are in them."""

    logs: Sequence[str]
    format: str | None = None
    fields: Sequence[str] = ()
    """Names of fields, as in "path=request.uri"."""
    identities: Sequence[str] = ()
    """Sources of identities, as in "tenant=header:x-tenant" or "tenant=path:/t/{tenant}/*"."""
    tiers: str | None = None
    """A file that maps clients to tiers."""
    secret: bytes | None = None

    def reader(
        self, policies: Sequence[Policy], hasher: ApiKeyHasher, on_progress: Callable[[int, int], None] | None = None
    ) -> LogReader:
        """The reader of the logs, for what these policies distinguish."""
        fields = dict(_pair("--field", text) for text in self.fields)
        for part in fields:
            if part in ("subnet", "endpoint"):
                raise InvalidInput(f"--field {part} cannot be given: it is derived from the {NAMES_OF[part]}")
        headers: dict[str, str] = {}
        for kind, source, value in self._sources():
            if source == "header":
                headers[kind] = value.lower()
            elif source == "field":
                fields[kind] = value
        settings = policies[0].identity
        known = [kinds(policy) for policy in policies for kinds in (used_kinds, watched_kinds)]
        kinds = frozenset().union(*known, fields, headers, self._tier_kinds(policies[0], hasher))
        parsers = ParserSettings(
            hasher,
            reads_forwarded=any(policy.identity.proxies for policy in policies),
            forwarded_by=settings.forwarded_by,
            api_key_header=settings.api_key_header,
            bearer_token=settings.bearer_token,
            kinds=kinds,
            fields=fields,
            headers=headers,
            reads_agents=any(policy.abuse is not None for policy in policies),
        )
        return LogReader(self.logs, parsers, self.format, on_progress)

    def engine(self, policy: Policy, hasher: ApiKeyHasher) -> PolicyReplay:
        """The replay of the requests under a policy."""
        tiers = TierTable() if self.tiers is None else TierTable.read(self.tiers, policy, hasher)
        paths = [PathIdentity(kind, value) for kind, source, value in self._sources() if source == "path"]
        return PolicyReplay(_with_hashes(policy, self.secret), hasher, tiers=tiers, paths=paths)

    def hasher(self) -> ApiKeyHasher:
        """The hasher of API keys; without a secret, hashes differ from those of production."""
        return ApiKeyHasher(self.secret or secrets.token_bytes(32))

    def _tier_kinds(self, policy: Policy, hasher: ApiKeyHasher) -> set[str]:
        if self.tiers is None:
            return set()
        table = TierTable.read(self.tiers, policy, hasher)
        return table.kinds | ({"tenant", "api_key", "user"} if table.has_plain_rows else set())

    def _sources(self) -> Iterator[tuple[str, str, str]]:
        for text in self.identities:
            kind, source = _pair("--identity", text)
            if kind in BUILT_IN:
                raise InvalidInput(
                    f"--identity {kind} cannot be given: name tenant, user, api_key or a kind of your own"
                )
            name, colon, value = source.partition(":")
            if not colon or name not in SOURCES or not value:
                hint = suggest(name, [*SOURCES]) if colon else "write it like tenant=header:x-tenant"
                raise InvalidInput(f"--identity {text!r}: unknown source {source!r}; {hint}")
            yield kind, name, value


NAMES_OF: Final = {"subnet": "address", "endpoint": "path"}


@dataclass(slots=True)
class ReplayRun:
    """A replay of logs under a policy, compared with another one if given."""

    policy: Policy
    policy_file: str
    options: LogOptions
    against: Policy | None = None
    against_file: str = ""
    obey_retry_after: bool = False
    all_clients: bool = False
    on_progress: Callable[[int, int], None] | None = None

    def run(self) -> ReplayReport:
        """Read and decide everything; InvalidInput for logs that cannot be read."""
        hasher = self.options.hasher()
        policies = [self.policy, *([self.against] if self.against is not None else [])]
        reader = self.options.reader(policies, hasher, self.on_progress)
        engines = [self.options.engine(policy, hasher) for policy in policies]
        obedient = [ObedientClients(engine) for engine in engines] if self.obey_retry_after else []
        batches = reader.batches()
        if any(
            limit.algorithm == "concurrency" for policy in policies for rule in policy.rules for limit in rule.limits
        ):
            batches = _at_arrival(batches)
        with gc_paused():
            for batch in sort_by_time(batches):
                for each in obedient or engines:
                    each.replay(batch)
            for each in obedient:
                each.finish()
            for engine in engines:
                engine.finish()
        report = make_report(
            engines[0],
            reader,
            policy_file=self.policy_file,
            all_clients=self.all_clients,
            obedient=obedient[0] if obedient else None,
        )
        if self.against is not None:
            found = compare(engines[0], engines[1], policy_file=self.against_file, all_clients=self.all_clients)
            report.data["against"] = report.parts["against"] = found
        return report


def _at_arrival(batches: Iterator[list[LoggedRequest]]) -> Iterator[list[LoggedRequest]]:
    """Requests at the times of their arrival: servers log them when the response has been sent."""
    for batch in batches:
        yield [(each[0] - (each[5] or 0), *each[1:]) for each in batch]


def _pair(option: str, text: str) -> tuple[str, str]:
    name, sign, value = text.partition("=")
    if not sign or not name or not value:
        raise InvalidInput(f"{option} {text!r} has no value; write it like tenant=...")
    return name, value


def _with_hashes(policy: Policy, secret: bytes | None) -> Policy:
    """The policy with entries for the hashes by which a decision log knows the clients that it names."""
    if secret is None:
        return policy
    hashed = IdentityHashes(secret)

    def doubled(entries: Sequence[Any]) -> tuple[Any, ...]:
        others = [each for each in entries if each.identity.kind not in (*ADDRESSES, "api_key")]
        added = [replace(each, identity=Identity(each.identity.kind, hashed(*each.identity))) for each in others]
        return (*entries, *added)

    return replace(
        policy,
        clients=doubled(policy.clients),
        overrides=doubled(policy.overrides),
        blocked=doubled(policy.blocked),
    )
