"""Identities of logged requests: by production's rules for addresses, and from headers, paths and a file of tiers."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from headgate.errors import InvalidInput
from headgate.gate.identity import IdentityExtractor
from headgate.policy.model import LIST
from headgate.policy.routes import Template, decode_path, normalize_path

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from headgate.policy.api_keys import ApiKeyHasher
    from headgate.policy.model import Policy
    from headgate.policy.snapshot import RoutePlan, Snapshot
    from headgate.replay.formats import Sender

__all__ = ["LogIdentities", "PathIdentity", "TierTable", "used_kinds", "watched_kinds"]

NO_KINDS: Final[frozenset[str]] = frozenset()


class PathIdentity:
    """An identity that is a segment of the path.

    >>> PathIdentity("tenant", "/t/{tenant}/*").find("/t/acme/orders?page=2")
    'acme'
    """

    def __init__(self, kind: str, template: str) -> None:
        self.kind = kind
        parsed = Template.parse(template)
        words = [word for word in template.split("/") if word][: len(parsed.segments)]
        parameters = [at for at, segment in enumerate(parsed.segments) if segment is None]
        named = [at for at in parameters if words[at].strip("{}") == kind]
        if len(named or parameters) != 1:
            raise InvalidInput(
                f"--identity {kind}=path:{template} names no single segment; write it as {{{kind}}}, as in "
                f"'/api/{{{kind}}}/*'"
            )
        self._at = (named or parameters)[0]
        self._segments = parsed.segments
        self._open_ended = parsed.open_ended

    def find(self, target: str) -> str | None:
        """The segment of a raw target; None if the template does not match."""
        words = normalize_path(decode_path(target))[1:].split("/")
        if len(words) < len(self._segments) or (len(words) > len(self._segments) and not self._open_ended):
            return None
        if all(segment in (None, word) for segment, word in zip(self._segments, words, strict=False)):
            return words[self._at] or None
        return None


class TierTable:
    """The tiers of clients from a file, by any of their identities.

    CSV with lines like `acme,pro` or `tenant=acme,pro`, or a JSON object with such keys. API keys may be raw or hashed.
    """

    def __init__(self, rows: Iterable[tuple[str, str]] = (), hasher: ApiKeyHasher | None = None) -> None:
        self._tiers: dict[tuple[str | None, str], str] = {}
        self.kinds: set[str] = set()
        """The kinds that rows name."""
        self.has_plain_rows = False
        """True if a row does not name the kind of its identity."""
        for key, tier in rows:
            kind, sign, value = key.partition("=")
            if not sign or not kind.isidentifier():
                self.has_plain_rows = True
                self._tiers[None, key] = tier
                if hasher is not None and (hashed := hasher.hashed(key)) is not None:
                    self._tiers["api_key", hashed] = tier
            else:
                self.kinds.add(kind)
                if kind == "api_key" and hasher is not None:
                    value = hasher.fingerprint(value)
                self._tiers[kind, value] = tier

    def __bool__(self) -> bool:
        return bool(self._tiers)

    @classmethod
    def read(cls, file: str, policy: Policy, hasher: ApiKeyHasher) -> TierTable:
        """Read a file; InvalidInput names the first mistake."""
        try:
            text = Path(file).read_text("utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise InvalidInput(f"--tiers {file}: cannot be read: {error}") from None
        rows = _json_rows(text, file) if text.lstrip()[:1] == "{" else _csv_rows(text, file)
        known = {*policy.tiers, *([policy.default_tier] if policy.default_tier else [])}
        for number, (_, tier) in enumerate(rows, start=1):
            if tier not in known:
                names = ", ".join(sorted(known)) or "none"
                raise InvalidInput(f"--tiers {file}: entry {number}: {tier!r} is not a tier of the policy: {names}")
        return cls(rows, hasher)

    def find(self, who: Mapping[str, str]) -> str | None:
        """The tier of a request; entries with a kind of identity take precedence."""
        for item in who.items():
            if (tier := self._tiers.get(item)) is not None:
                return tier
        if self.has_plain_rows:
            for value in who.values():
                if (tier := self._tiers.get((None, value))) is not None:
                    return tier
        return None


def _csv_rows(text: str, file: str) -> list[tuple[str, str]]:
    rows: list[tuple[str, str]] = []
    for number, row in enumerate(csv.reader(text.splitlines()), start=1):
        cells = [cell.strip() for cell in row]
        if not any(cells) or cells[0].startswith("#") or (number == 1 and cells[-1] == "tier"):
            continue
        if len(cells) != 2 or not all(cells):
            raise InvalidInput(f"--tiers {file}:{number}: expected a client and its tier, as in tenant=acme,pro")
        rows.append((cells[0], cells[1]))
    return rows


def _json_rows(text: str, file: str) -> list[tuple[str, str]]:
    try:
        found = json.loads(text)
    except ValueError as error:
        raise InvalidInput(f"--tiers {file}: not valid JSON: {error}") from None
    for key, tier in found.items():
        if not isinstance(tier, str):
            raise InvalidInput(f"--tiers {file}: the tier of {key!r} is not a text")
    return [*found.items()]


class LogIdentities:
    """The identities of logged requests under a policy."""

    def __init__(
        self, snapshot: Snapshot, hasher: ApiKeyHasher, *, tiers: TierTable, paths: Iterable[PathIdentity] = ()
    ) -> None:
        policy = snapshot.policy
        self._extractor = IdentityExtractor(policy.identity, hasher)
        self._known_keys = snapshot.api_keys
        self._tiers = tiers
        self.paths = tuple(paths)
        self.kinds = used_kinds(policy) | tiers.kinds
        self.only_watched = watched_kinds(policy) - self.kinds - {"ip", "subnet"}
        """Kinds that only scenarios count by: they do not name clients in reports."""

    def extract(self, sender: Sender, target: str, route: RoutePlan) -> dict[str, str]:
        """The identities of a request by kind, as a gate would know them."""
        peer, forwarded, identities = sender
        who, _ = self._extractor.extract(_SentHeaders(peer, forwarded), route.kinds - {"api_key"})
        for kind, value in identities:
            if kind == "api_key" and self._known_keys is not None and value not in self._known_keys:
                continue
            if kind == "ip":  # of a decision log: a keyed hash
                who["address"] = value
            who[kind] = value
        for path in self.paths:
            if (segment := path.find(target)) is not None:
                who[path.kind] = segment
        if self._tiers and (tier := self._tiers.find(who)) is not None:
            who["tier"] = tier
        kept = {*self.kinds, *self.only_watched, "address", "ip", "subnet", "tier"}
        return {kind: value for kind, value in who.items() if kind in kept}


def used_kinds(policy: Policy) -> frozenset[str]:
    """The kinds of identity that a policy distinguishes clients by."""
    kinds = {kind for rule in policy.rules for kind in rule.by}
    kinds |= {each.identity.kind for each in policy.clients}
    kinds |= {each.identity.kind for each in policy.overrides}
    kinds |= {each.identity.kind for each in policy.blocked} - {LIST}
    if "client" in kinds:
        kinds |= {"tenant", "api_key", "user", "ip"}
    return frozenset(kinds)


def watched_kinds(policy: Policy) -> frozenset[str]:
    """The kinds of identity that the scenarios of a policy count by."""
    return frozenset[str]().union(*[each.kinds for each in policy.abuse.scenarios]) if policy.abuse else NO_KINDS


class _SentHeaders:
    """The part of a request that the address is extracted from."""

    method = path = ""
    mounted_path: str | None = None
    native: Any = None

    def __init__(self, peer: str | None, forwarded: str | None) -> None:
        self.peer = peer
        self._forwarded = forwarded

    def header(self, name: str) -> list[str]:
        return [self._forwarded] if self._forwarded is not None and name in ("x-forwarded-for", "forwarded") else []
