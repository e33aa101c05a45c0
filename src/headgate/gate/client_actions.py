"""ClientActions: what the live lists say about the client of a request, and the challenges that it has to pass."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple
from urllib.parse import quote, urlsplit

from headgate.abuse.challenge import BY_APP, COOKIE, COOKIE_LIFETIME_S, Challenge, ChallengeSigner, challenge_page
from headgate.clock import SECOND_US
from headgate.policy.snapshot import OTHER_API_KEYS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from headgate.gate.admission import RequestInfo
    from headgate.gate.responses import Rejection
    from headgate.local.block_list import LiveBlock
    from headgate.local.live_clients import LiveClients
    from headgate.local.restrictions import Restriction
    from headgate.policy.snapshot import Snapshot

    Identities = Mapping[str, str]

__all__ = ["ActionCounts", "ChallengeOutcome", "ClientActions", "ClientState"]

SAFE_METHODS: Final = ("GET", "HEAD", "OPTIONS")


class ClientState(NamedTuple):
    """The live entries for the client of a request."""

    block: LiveBlock | None
    restrictions: tuple[tuple[str, Restriction], ...]
    """Those in force, each with the identity by which it was found."""

    @property
    def factor(self) -> int:
        """The divisor of its limits."""
        return max([each.factor for _, each in self.restrictions], default=1)

    @property
    def delay_us(self) -> int:
        return max([each.delay_us for _, each in self.restrictions], default=0)

    @property
    def challenge(self) -> tuple[str, Restriction] | None:
        """The most difficult challenge; the same for each request of the client."""
        found = [each for each in self.restrictions if each[1].action == "challenge"]
        return max(found, key=lambda each: (each[1].difficulty, each[0], each[1].scenario), default=None)


class ActionCounts(NamedTuple):
    """The actions of one node, and the requests that they have applied to, for metrics."""

    taken: dict[tuple[str, str, bool], int]
    """By scenario, action and whether in shadow mode."""
    dropped: int
    """Findings that could not be applied."""
    challenges: dict[str, int]
    """By outcome: presented, failed or passed."""
    held: int
    found: dict[str, int]
    """The findings by scenario."""


class ChallengeOutcome(NamedTuple):
    """The outcome of a challenge for one request: neither field is set once it was passed."""

    refusal: Rejection | None = None
    challenge: Challenge | None = None
    """To be presented by the app."""


class ClientActions:
    """Finds the live blocks and restrictions of clients, and challenges them."""

    def __init__(self, live: LiveClients, hashes: tuple[Callable[[str, str], str], ...], secret: bytes) -> None:
        """`hashes` are the functions whose keyed hashes may name a client."""
        self._live = live
        self._hashes = hashes
        self._signer = ChallengeSigner(secret)
        self.challenges = {"presented": 0, "failed": 0, "passed": 0}
        """Requests that were challenged: those without a cookie, with one that is not valid, and with a valid one."""
        self.held = 0
        """Requests that were held back."""

    def find(self, who: Identities, snapshot: Snapshot, now_us: int) -> ClientState:
        """The entries for a client. Nothing that a scenario has done applies to one that the policy allows."""
        is_allowed = snapshot.is_allowed(who, now_us)
        block = next((each for each in self._blocks(who, now_us) if not (is_allowed and self._is_action(each))), None)
        if is_allowed or not self._live.restrictions.has_entries:
            return ClientState(block, ())
        records: dict[tuple[str, str], Any] = {}
        for identities, hash_identity in self._lookups(who):
            for record in self._live.restrictions.find_all(identities, now_us, hash_identity):
                records[record.kind, record.value] = record
        found = [
            (f"{record.kind} {record.value}", each)
            for record in records.values()
            for each in record.by_scenario.values()
            if each.applies_at(now_us)
        ]
        return ClientState(block, tuple(found))

    def challenge(
        self, request: RequestInfo, who: Identities, found: tuple[str, Restriction], responses: Any, now_us: int
    ) -> ChallengeOutcome:
        """Challenge a client, unless the request has a cookie that proves that it has passed."""
        identity, restriction = found
        # Also by address: a solution is of no use to the other members of a botnet.
        client = f"{identity} {who['ip']}"
        is_page = restriction.mode == "page"
        difficulty = restriction.difficulty if is_page else BY_APP
        cookies = "; ".join(request.header("cookie"))
        if self._signer.is_valid(cookies, client, difficulty, now_us):
            self.challenges["passed"] += 1
            return ChallengeOutcome()
        self.challenges["failed" if COOKIE in cookies else "presented"] += 1
        token = self._signer.token(client, now_us // SECOND_US + COOKIE_LIFETIME_S, difficulty)
        is_own_page = not is_page and urlsplit(restriction.url).path in (request.path, request.mounted_path)
        if restriction.mode == "app" or is_own_page:
            return ChallengeOutcome(challenge=Challenge(restriction, token))
        if not any("text/html" in line.lower() for line in request.header("accept")):
            return ChallengeOutcome(responses.challenged(_described(restriction, token)))
        if is_page:
            page = challenge_page(token, difficulty, is_safe=request.method in SAFE_METHODS)
            return ChallengeOutcome(responses.challenge_page(page))
        sign = "&" if "?" in restriction.url else "?"
        return ChallengeOutcome(responses.redirect(f"{restriction.url}{sign}return_to={quote(request.path)}"))

    def _blocks(self, who: Identities, now_us: int) -> Iterator[LiveBlock]:
        for identities, hash_identity in self._lookups(who):
            yield from self._live.blocks.find_all(identities, now_us, hash_identity)

    def _lookups(self, who: Identities) -> Iterator[tuple[Identities, Callable[[str, str], str] | None]]:
        for hash_identity in self._hashes:
            yield who, hash_identity
        for key in who.get(OTHER_API_KEYS, "").split():
            yield {"api_key": key}, None

    def _is_action(self, block: LiveBlock) -> bool:
        """True if a scenario has blocked the client, and not a person."""
        record = self._live.restrictions.get(block.kind, block.value)
        found = () if record is None else record.by_scenario.values()
        return any(each.action == "block" and each.until_us == block.until_us for each in found)


def _described(restriction: Restriction, token: str) -> str:
    """The challenge as a header field: clients without a browser can solve a proof of work, too."""
    if restriction.mode == "page":
        return f'sha-256; token="{token}"; difficulty={restriction.difficulty}; cookie={COOKIE}'
    return f'redirect; url="{quote(restriction.url, safe="/:?&=%#")}"'
