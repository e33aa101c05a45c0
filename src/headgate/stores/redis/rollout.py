"""Rollouts of scripts: the shared record, its client, and the monitor that judges the candidate on a canary node."""

from __future__ import annotations

import json
import secrets
import threading
from dataclasses import asdict, dataclass, field, replace
from functools import lru_cache
from hashlib import blake2b, sha256
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from hiredis import ReplyError

from headgate.algorithms import ALGORITHMS
from headgate.errors import InvalidInput, ScriptError, StoreError, StoreTimeout, StoreUnavailable
from headgate.stores.redis.encoding import NO_KEYS, Command, Keys
from headgate.stores.redis.scripts import Script, ScriptSet, StoredFormat, make_script, read_formats

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from headgate.stores.redis.background_client import BackgroundClient

__all__ = [
    "CanaryMonitor", "CanaryThresholds", "NodeScripts", "RolloutClient", "RolloutView", "ScriptDifference",
    "ScriptRollout", "check_formats", "new_rollout",
]  # fmt: skip

MIN_RUNS: Final = 100
"""Runs before shares of errors and times mean anything."""
MIN_SLOW_RUNS: Final = 3
"""Runs before a candidate is too slow, however long they take: one may have been interrupted."""
STANDARD_ERRORS: Final = 3
"""Standard errors by which the time has to exceed its threshold, so that a few interrupted runs are not enough."""
MAX_LOST_US: Final = 50_000
"""Time that a slow candidate may cost in total before it is judged, however few runs there were."""
FORMAT_USE_US: Final = 60_000_000
"""A stored format that was used within this time is in use by live nodes."""
MAX_SILENCE_S: Final = 10.0
"""Time after its last report for which a node counts as live."""
MAX_SEEDS: Final = 300
CANARY, PROMOTED, ROLLED_BACK = "canary", "promoted", "rolled back"


@dataclass(frozen=True, slots=True)
class CanaryThresholds:
    """The limits beyond which a node rolls the candidate back."""

    max_differences: int = 0
    """Differences from the stable version on one node. Up to this number, the answers of the candidate apply."""
    max_errors: float = 1.0
    """Percent of runs that fail or time out."""
    max_slowdown: float = 2.0
    """The permitted time in Redis, as a multiple of that of the stable version."""

    def __post_init__(self) -> None:
        is_number = all(isinstance(number, int | float) for number in (self.max_errors, self.max_slowdown))
        if type(self.max_differences) is not int or not is_number or self.max_differences < 0:
            raise InvalidInput(f"max_differences {self.max_differences}: give a whole number from 0")
        if not 0 <= self.max_errors <= 100:
            raise InvalidInput(f"max_errors {self.max_errors}: give a percentage from 0 to 100")
        if not 1 <= self.max_slowdown <= 1000:
            raise InvalidInput(f"max_slowdown {self.max_slowdown}: give a factor from 1 to 1000")


@dataclass(frozen=True, slots=True)
class ScriptRollout:
    """A candidate version of the scripts, the nodes that try it, and its end."""

    id: str
    """Identifies the rollout, and seeds the choice of its nodes."""
    stable: str
    """The digest of the version that the candidate replaces; nodes with another one are not affected."""
    candidate: str
    changes: Mapping[str, str]
    """The sources that differ from the stable version."""
    formats: Mapping[str, StoredFormat]
    thresholds: CanaryThresholds
    percent: int | None = None
    nodes: tuple[str, ...] = ()
    state: str = CANARY
    author: str = ""
    begun_us: int = 0
    ended_by: str = ""
    ended_us: int | None = None
    reason: str = ""
    """The reason for its start, then for its end."""

    def __post_init__(self) -> None:
        if (self.percent is None) == (not self.nodes):
            raise InvalidInput("give either a percentage of nodes or the names of nodes")
        if self.percent is not None and (type(self.percent) is not int or not 1 <= self.percent <= 100):
            raise InvalidInput(f"percent {self.percent}: give a whole number from 1 to 100")

    @property
    def share(self) -> str:
        """The nodes that try the candidate, in words."""
        return f"nodes {', '.join(self.nodes)}" if self.nodes else f"{self.percent} % of nodes"

    def includes(self, node: str) -> bool:
        """True if a node tries the candidate. The answer for a name never changes while the canary runs."""
        if self.nodes:
            return node in self.nodes
        digest = sha256(f"{self.id}/{node}".encode()).digest()
        return int.from_bytes(digest[:8]) * 100 < (self.percent or 0) << 64

    def scripts(self, stable: ScriptSet) -> ScriptSet:
        """The candidate version; InvalidInput if it does not fit the stable one."""
        candidate = stable.replace(self.changes, self.formats)
        if candidate.digest != self.candidate:
            raise InvalidInput(
                f"the record of candidate {self.candidate} is damaged: its sources are {candidate.digest}"
            )
        stable.check_compatible(candidate)
        return candidate

    def end(self, state: str, *, by: str, at_us: int, reason: str) -> ScriptRollout:
        return replace(self, state=state, ended_by=by, ended_us=at_us, reason=reason)

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: bytes | str) -> ScriptRollout:
        """Parse a record; InvalidInput if it is malformed."""
        try:
            fields = json.loads(text)
            fields["thresholds"] = CanaryThresholds(**fields["thresholds"])
            formats = {name: StoredFormat(writes, (*reads,)) for name, (writes, reads) in fields["formats"].items()}
            fields |= {"nodes": (*fields["nodes"],), "formats": formats}
            read_formats({name: each._asdict() for name, each in formats.items()})
            return cls(**fields)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise InvalidInput(f"the record of the rollout of scripts is malformed: {error}") from None


def new_rollout(
    candidate: ScriptSet,
    thresholds: CanaryThresholds,
    *,
    percent: int | None,
    nodes: tuple[str, ...],
    view: RolloutView,
    author: str,
    reason: str = "",
) -> ScriptRollout:
    """A canary that starts now. A percentage selects at least one of the nodes that report."""
    stable = ScriptSet.shipped()
    formats = {name: each for name, each in candidate.formats.items() if each != stable.formats[name]}
    rollout = ScriptRollout(
        secrets.token_hex(4), stable.digest, candidate.digest, candidate.changes_from(stable), formats, thresholds,
        percent=percent, nodes=nodes, author=author, begun_us=view.at_us, reason=reason,
    )  # fmt: skip
    known = view.live_nodes
    if percent in (None, 100) or not known:
        return rollout
    # A hash alone would select none of a few nodes in most cases: choose the seed with the nearest share.
    wanted = max(round(len(known) * (percent or 0) / 100), 1)
    rollouts = [rollout, *[replace(rollout, id=secrets.token_hex(4)) for _ in range(MAX_SEEDS)]]
    return min(rollouts, key=lambda each: abs(sum(map(each.includes, known)) - wanted))


class ScriptDifference(NamedTuple):
    """A difference between the two versions, without identities."""

    what: str
    """ "answer", "state", "expiry" or "error"."""
    limit: str
    client: str
    """A hash of the identity, keyed with the id of the rollout."""
    stable: str
    candidate: str
    before: str
    """The stored text before, if it is a string."""

    def __str__(self) -> str:
        return (
            f"{self.what} for limit {self.limit or '?'}, client {self.client or '?'}: stable {self.stable or '-'}, "
            f"candidate {self.candidate or '-'}, state before {self.before or '-'}"
        )


@dataclass(eq=False)
class CanaryMonitor:
    """Takes the replies of a canary's scripts, counts differences and errors, and rejects the candidate."""

    rollout: ScriptRollout
    stable: ScriptSet
    candidate: ScriptSet
    on_reject: Callable[[str], None]
    """Called once, with the reason, in the thread that found it."""
    on_difference: Callable[[ScriptDifference], None] = lambda difference: None
    runs: int = 0
    differences: int = 0
    errors: int = 0
    stable_us: int = 0
    candidate_us: int = 0
    lost_squared: float = 0.0
    """The sum of the squares of the time that each run took beyond the threshold (us^2)."""
    rejection: str | None = None
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        self.script = lru_cache(maxsize=256)(self._script)

    def _script(self, main: str, algorithms: tuple[str, ...], margin_ms: int) -> Script:
        """A script that runs both versions; see _canary.lua."""
        tolerates = "true" if self.rollout.thresholds.max_differences else "false"
        parts = [
            f"-- headgate: canary of {main} for {', '.join(algorithms)}",
            "local function run_stable(redis, KEYS, ARGV)",
            self.stable.assemble(main, algorithms, margin_ms),
            "end",
            "local function run_candidate(redis, KEYS, ARGV)",
            self.candidate.assemble(main, algorithms, margin_ms),
            "end",
            f"local TOLERATES_DIFFERENCES = {tolerates}",
            ScriptSet.shipped().sources["_canary"],
        ]
        return make_script("\n".join(parts), self)

    def take(self, command: Command, reply: Any) -> Any:
        """The reply to the command itself."""
        if isinstance(reply, ReplyError):
            if str(reply).startswith(("ERR", "BUSY", "WRONGTYPE", "NOPERM")):
                self._count(errors=1, error=f"Redis answered: {str(reply)[:200]}")
            return reply
        is_report = type(reply) is list and len(reply) in (3, 8) and type(reply[1]) is type(reply[2]) is int
        if not is_report:
            return reply  # which decoding rejects
        is_error = len(reply) == 8 and reply[3] == b"error"
        difference = None
        if len(reply) == 8:
            difference = self._difference(command, *reply[3:])
        self._count(reply[1], reply[2], errors=int(is_error), difference=difference)
        return reply[0]

    def fail(self, error: StoreError) -> None:
        """Count a run that was not answered in time. Other failures are those of the connection."""
        if isinstance(error, StoreTimeout):
            self._count(errors=1, error=str(error))

    def _count(
        self,
        stable_us: int = 0,
        candidate_us: int = 0,
        *,
        errors: int = 0,
        difference: ScriptDifference | None = None,
        error: str = "",
    ) -> None:
        with self._lock:
            self.runs += 1
            self.stable_us += stable_us
            self.candidate_us += candidate_us
            self.lost_squared += (candidate_us - self.rollout.thresholds.max_slowdown * stable_us) ** 2
            self.errors += errors
            self.differences += difference is not None
            reason = None if self.rejection is not None else self._judge(difference, error)
            if reason is not None:
                self.rejection = reason
        if difference is not None:
            self.on_difference(difference)
        if reason is not None:
            self.on_reject(reason)

    def _judge(self, difference: ScriptDifference | None, error: str) -> str | None:
        """The reason to reject the candidate, if there is one."""
        limits = self.rollout.thresholds
        if self.differences > limits.max_differences and difference is not None:
            return f"difference {self.differences}: {difference}"
        share = 100 * self.errors / max(self.runs, MIN_RUNS)
        if share > limits.max_errors:
            return f"{self.errors} of {self.runs} runs failed: {error or difference}"
        lost_us = self.candidate_us - limits.max_slowdown * self.stable_us
        if lost_us > (0 if self.runs >= MIN_RUNS else MAX_LOST_US) and self._is_significant(lost_us):
            return (
                f"slow: {self.candidate_us / self.runs:.0f} us per run in Redis instead of "
                f"{self.stable_us / self.runs:.0f} us, over {self.runs} runs"
            )
        return None

    def _is_significant(self, lost_us: float) -> bool:
        """True if a total is not explained by a few runs that were interrupted, as on a busy machine."""
        variance = max(0.0, self.lost_squared - lost_us**2 / self.runs) * self.runs / max(1, self.runs - 1)
        return self.runs >= MIN_SLOW_RUNS and lost_us**2 > STANDARD_ERRORS**2 * variance

    def _difference(self, command: Command, *report: Any) -> ScriptDifference:
        what, index, *values = report
        keys = [key for call in command.calls for key in getattr(call, "keys", None) or (call.key,)]
        key = keys[index - 1] if type(index) is int and 0 < index <= len(keys) else None
        if key is None and len({key.limit.name for key in keys}) == 1 and len(keys) == 1:
            key = keys[0]
        seed = self.rollout.id.encode()[:64]
        client = "" if key is None else blake2b(str(key.identity).encode(), key=seed, digest_size=6).hexdigest()
        texts = [each.decode("utf-8", "replace")[:200] for each in (what, *values)]
        return ScriptDifference(texts[0], "" if key is None else key.limit.name, client, *texts[1:])


RUNS: Final = (
    *((main, (*ALGORITHMS,)) for main in ("check_one", "check_batch", "check_idempotent")),
    ("refund", (*ALGORITHMS,)),
    ("lease", ("concurrency",)),
    ("overdraw", ("token_bucket", "gcra", "leaky_bucket")),
)
"""The scripts and their algorithms that are compiled before a canary starts."""


class NodeScripts(NamedTuple):
    """The scripts of one node, as it last reported."""

    node: str
    age_s: float
    status: Mapping[str, Any]


class RolloutView(NamedTuple):
    """The rollout as stored, with the nodes that follow it."""

    at_us: int
    revision: int
    rollout: ScriptRollout | None
    nodes: tuple[NodeScripts, ...]

    @property
    def live_nodes(self) -> list[str]:
        """The names of the nodes that report, without their processes."""
        return sorted({each.node.rpartition(":")[0] for each in self.nodes if each.age_s < MAX_SILENCE_S})


class RolloutClient:
    """Blocking client of the shared record. Every method may raise a StoreError."""

    def __init__(self, client: BackgroundClient) -> None:
        self._client = client
        name = client.encoder.own_name("scripts")
        self._keys = Keys.of(name, f"{{{name}}}:nodes")

    def formats(self) -> tuple[int, dict[str, int]]:
        """The time, and the stored formats with the instants of their last use."""
        now, *pairs = self._execute(list, "join")
        return int(now), {name.decode(): int(at) for name, at in zip(pairs[::2], pairs[1::2], strict=True)}

    def poll(self, revision: int, node: str, status: str, formats: Mapping[str, StoredFormat]) -> tuple[int, bytes]:
        """Report the status of a node; returns the revision, and the record if the revision is not the known one."""
        names = [f"{name}.{each.writes}" for name, each in formats.items()]
        found, record = self._execute(list, "poll", revision, node, status, *names)
        return int(found), record

    def read(self) -> RolloutView:
        now, revision, record, *rows = self._execute(list, "read")
        nodes = []
        for node, at, status in zip(rows[::3], rows[1::3], rows[2::3], strict=True):
            try:
                fields = json.loads(status)
            except ValueError:
                continue
            age_s = (int(now) - int(at)) / 1_000_000
            nodes.append(NodeScripts(node.decode("utf-8", "replace"), age_s, fields))
        rollout = ScriptRollout.from_json(record) if record else None
        return RolloutView(int(now), int(revision), rollout, tuple(sorted(nodes)))

    def write(self, rollout: ScriptRollout, revision: int) -> bool:
        """Replace the record; False if it is not of that revision any more."""
        return bool(self._execute(int, "set", revision, rollout.to_json()) >= 0)

    def end(self, id: str, state: str, *, by: str, reason: str) -> ScriptRollout | None:
        """End a rollout, unless it has ended already; returns the record as it is then."""
        while True:
            view = self.read()
            if view.rollout is None or view.rollout.id != id or view.rollout.state == state:
                return view.rollout
            if view.rollout.state == ROLLED_BACK or (state == PROMOTED and view.rollout.state != CANARY):
                return view.rollout
            ended = view.rollout.end(state, by=by, at_us=view.at_us, reason=reason)
            if self.write(ended, view.revision):
                return ended

    def check_syntax(self, rollout: ScriptRollout) -> None:
        """Compile the scripts of a canary on the server; InvalidInput if it refuses one."""
        stable = ScriptSet.shipped()
        monitor = CanaryMonitor(rollout, stable, rollout.scripts(stable), lambda reason: None)
        for main, algorithms in RUNS:
            for algorithm in algorithms:
                text = monitor.script(main, (algorithm,), 1000).text
                try:
                    self._client.execute(Command(None, NO_KEYS, ("SCRIPT", "LOAD", text), expects=bytes))
                except ScriptError as error:
                    raise InvalidInput(f"the candidate is not valid: {main} with {algorithm}: {error}") from None

    def forget_formats(self, names: list[str]) -> int:
        return int(self._execute(int, "forget", *names))

    def _execute(self, expects: type, *args: Any) -> Any:
        command = Command(self._client.encoder.own_script("rollout"), self._keys, args, expects=expects)
        return self._client.execute(command)


def check_formats(own: Mapping[str, StoredFormat], used: Mapping[str, int], now_us: int, where: str) -> None:
    """Raise StoreUnavailable if the store was written in a newer format that this library cannot read, unless other
    nodes still use the format of this one: then both count side by side, as during an upgrade."""
    for name, at_us in used.items():
        algorithm, _, version = name.partition(".")
        if algorithm not in own or int(version) <= own[algorithm].writes or int(version) in own[algorithm].reads:
            continue
        mine = used.get(f"{algorithm}.{own[algorithm].writes}")
        if mine is None or at_us - mine > FORMAT_USE_US or now_us - mine > FORMAT_USE_US:
            raise StoreUnavailable(
                f"{where} has counters of {algorithm} in format {version}, written by a newer headgate; this one reads "
                f"format {', '.join(map(str, own[algorithm].reads))}, and its limits would start from zero. Upgrade "
                "this node, use another namespace, or accept that with `headgate scripts downgrade`"
            )
