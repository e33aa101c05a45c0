"""What has to happen without a request: servers are looked after, members counted, debts settled, leftovers returned.

One thread does it, which lives while there is something to do, and asks the store through connections of its own. News
of other processes are heard in a second thread. Neither keeps a limiter alive that nobody uses any more.
"""

from __future__ import annotations

import logging
import random
import threading
import time
import weakref
from contextlib import closing
from typing import TYPE_CHECKING, Any, Final, Protocol
from uuid import uuid4

from headgate._fork import reinit_after_fork
from headgate._interrupts import BackgroundThread, InterruptSafeEvent
from headgate.errors import StoreError, StoreTimeout
from headgate.health import Health, Shard
from headgate.local.ledger import settle

if TYPE_CHECKING:
    from collections.abc import Callable

    from headgate.events import EventEmitter
    from headgate.local.block_list import BlockList
    from headgate.local.tier import LocalTier

__all__ = ["MaintenanceThread"]

logger = logging.getLogger("headgate")

_chance = random.Random()
"""Our own: who seeds the common one, in tests for instance, does not want to share it with other threads."""

FIRST_PROBE: Final = 0.02
LONGEST_PROBE: Final = 0.4
"""Seconds between two looks at a server that does not serve; they double from the one to the other."""
BEAT: Final = 2.0
"""Seconds between two heartbeats."""
LIVES: Final = 3
"""A member who misses so many is dead."""
MARKS_EVERY: Final = 5
"""Of so many heartbeats, one looks whether the servers have forgotten anything."""
RETURNS: Final = 0.05
"""Seconds between two looks for prepaid tokens that nobody spent."""
SETTLES: Final = 0.1
"""Seconds between two attempts to settle what is owed."""
LOOKING, RETURNING, OWING = 1, 2, 4
"""Kinds of work: servers to look at, tokens to give back, debts to settle."""
CALM: Final = 0.3
"""Seconds since the last failure before debts are settled: else the charges themselves might be lost."""
LOOK: Final = 0.1
"""Seconds that each answer may take when servers are looked at that do not serve: others wait to be looked at, too."""
PREPARES: Final = 0.1
"""Seconds that requests are kept waiting for the connection to a server that serves again."""
FIRST_BEATS: Final = 3
"""At first, and after an outage, so many are quick, and the fleet is not believed to be smaller than it was: not all
have been heard yet."""
SETTLING: Final = 0.3
"""Seconds that requests may wait longer for an exact answer, so that debts are charged before it."""


class MaintainedStore(Protocol):
    """What a shared store has to offer to be looked after."""

    breakers: Any
    budget: float
    """Seconds that a call may take."""

    def background_client(self) -> Any:
        """The same store, for a thread in the background."""

    def subscriber(self, **callbacks: Any) -> Any:
        """The news of other processes."""

    def preconnect(self, node: Any, *, wait: float) -> None:
        """Connect to a server before requests go there."""

    def drop_preconnected(self, node: Any) -> None:
        """Nobody needs that connection any more."""

    def nodes(self) -> list[Any]:
        """The servers that have keys, as far as they are known."""

    def address(self, node: Any) -> str:
        """A server's name, for people."""


class MaintenanceThread:
    """Looks after one limiter's store."""

    def __init__(self, front: LocalTier, store: MaintainedStore, herald: EventEmitter, *, beats: bool) -> None:
        self.beats = beats
        """Whether this process tells the fleet that it lives."""
        self.listens = False
        """Whether it wants to hear the news from the beginning; else as soon as it remembers denials."""
        self._front = front
        self._store = store
        self._herald = herald
        self._companion = store.background_client()
        # Also where it is dropped before its thread comes to part from the store.
        weakref.finalize(self, self._companion.close).atexit = False
        self._closed = False
        self._begin()
        keeper = weakref.ref(self)  # weakly: a limiter that nobody uses any more goes at once, with its connections
        store.breakers.on_open = lambda node: _with(keeper, lambda kept: kept._look_after(node))  # noqa: SLF001 - its own
        front.ensure = lambda: _with(keeper, MaintenanceThread.ensure)
        front.breaker = store.breakers[None] if store.nodes() == [None] else None
        reinit_after_fork(self)

    def _begin(self) -> None:
        self._member = uuid4().hex
        self._lock = threading.RLock()
        self._bell = InterruptSafeEvent()
        self._farewell = weakref.finalize(self, self._bell.set)
        self._thread: BackgroundThread | None = None
        self._workers: dict[int, object] = {}
        """The thread that works, if one does: `setdefault` finds it or sets it, in one step."""
        self._listener: Any = None
        self._probes: dict[Any, tuple[float, float]] = {}
        """Servers that do not serve: when to look at them, and how long to wait after that."""
        self._planned = 0  # the work that the thread wakes up for by itself
        self._next_beat = self._next_return = self._next_settling = 0.0
        self._beaten = 0
        self._unsure = FIRST_BEATS
        """Beats until the fleet is believed to be smaller than it was."""
        self._marks: dict[str, str] = {}
        self._settled = [0, 0, 0, 0]

    def reset_after_fork(self) -> None:
        """A child is a member of its own, and has no threads yet."""
        self._farewell.detach()  # its parent's thread may have held the bell at that moment
        self._begin()

    def ensure(self) -> None:
        """Have the threads run that are needed: cheap enough to be called now and then by requests."""
        if self._closed:
            return
        thread = self._thread
        if (thread is None or thread.has_failed) and (self.beats or self._at_hand()):
            with self._lock:
                if self._thread is thread:
                    self._thread = _started("headgate-keeper", _work_for, weakref.ref(self), self._bell)
        elif self._at_hand() & ~self._planned:  # else it wakes up by itself, and not for every request of an outage
            self._bell.set()
        if self._listener is None and (self.listens or self._front.denials):
            self._listen()

    @property
    def has_beaten(self) -> bool:
        """Whether the size of the fleet is known."""
        return self._beaten > 0

    @property
    def is_parting(self) -> bool:
        """True after `close`, while the background thread still returns prepaid tokens and leaves the fleet."""
        thread = self._thread
        # A listener of events may close the limiter from that thread, which cannot wait for itself.
        return self._closed and thread is not None and thread.is_alive and not thread.is_current

    def close(self) -> None:
        """Stop. The background thread first returns what was prepaid and leaves the fleet; see `is_parting`."""
        self._front.stop_prepaying()
        self.ensure()
        with self._lock:
            self._closed = True
            thread, listener = self._thread, self._listener
        if listener is not None:
            listener.stop()
        if thread is None:
            self._companion.close()
        else:
            self._bell.set()

    def health(self) -> Health:
        """How the limiter is, and each of its servers that is known."""
        store, now = self._store, time.monotonic()
        down = store.breakers.open_breakers()
        shards = [
            Shard(store.address(node), False, now - down[node].opened_at, down[node].reason)
            if node in down
            else Shard(store.address(node), True)
            for node in dict.fromkeys((*store.nodes(), *down))
        ]
        return self._front.health(tuple(shards))

    def _look_after(self, node: Any) -> None:
        """A breaker has opened."""
        if self._closed:  # nobody will look at the server any more, so that those who still come must do it themselves
            self._store.breakers[node].close()
            return
        self._probes[node] = time.monotonic() + FIRST_PROBE, FIRST_PROBE
        self.ensure()
        self._bell.set()

    def _at_hand(self) -> int:
        """What there is to do, a bit for each kind of it."""
        front = self._front
        returning, owing = bool(front.purses.has_refunds or front.unspent), not front.ledger.is_empty
        return LOOKING * bool(self._probes) | RETURNING * returning | OWING * owing

    def _work(self) -> float | None:
        """Do what is due; how many seconds until something is, None to end the thread."""
        now = time.monotonic()
        if self._closed:
            self._part()
            return None
        for node, (due, _) in list(self._probes.items()):
            if due <= now:
                self._probe(node)
        if self.beats and self._next_beat <= now:
            self._beat()
        if self._next_return <= now and (self._front.purses.has_refunds or self._front.unspent):
            self._next_return = now + RETURNS
            self._return_unspent()
        if self._next_settling <= now and not self._front.ledger.is_empty:
            self._next_settling = now + SETTLES
            if not self._probes and self._front.outage.is_calm(CALM):
                self._settle()
        now = time.monotonic()
        self._planned = work = self._at_hand()
        dues = [due for due, _ in self._probes.values()]
        dues += [self._next_beat] if self.beats else []
        dues += [self._next_return] if work & RETURNING else []
        dues += [self._next_settling] if work & OWING else []
        with self._lock:
            if not dues and not self._at_hand() and not self._closed:  # nothing has come in since, either
                self._workers.clear()
                self._thread = None
                return None
        return max(min(dues, default=now) - now, 0.001)

    def _part(self) -> None:
        """The last things that a limiter does."""
        try:
            if not self._store.breakers.open_breakers():
                self._return_unspent()
                if self.beats:
                    self._companion.leave(self._member)
        except StoreError:
            pass  # what it held ends by itself
        finally:
            self._companion.close()

    def _probe(self, node: Any) -> None:
        """Look at a server whose breaker is open, and close it if all is well."""
        breaker, timeout_s = self._store.breakers[node], max(LOOK, self._store.budget)
        try:
            suspects = self._store.breakers.open_breakers()
            primaries = self._companion.find_primaries(suspects, timeout_s=timeout_s)
            if node in primaries:
                self._learn_mark(node, timeout_s=timeout_s)
                self._see_that_it_is_quick(node)
                # It may have been woken from a long sleep, in which another has taken its place.
                primaries = self._companion.find_primaries(suspects, timeout_s=timeout_s)
            if node in primaries:
                self._settle()
                self._store.preconnect(node, wait=PREPARES)
                if self._closed:  # meanwhile, so that nobody is left to close what was opened
                    self._store.drop_preconnected(node)
            else:
                self._herald.tell(
                    "moved",
                    f"{self._store.address(node)} is no primary any more; requests go to "
                    + ", ".join(map(self._store.address, primaries)),
                    server=self._store.address(node),
                )
        except StoreError as error:
            breaker.reason = str(error)
            _, pause = self._probes[node]
            pause = min(pause * 2, LONGEST_PROBE)
            # Not all processes of a fleet at the same moment.
            self._probes[node] = time.monotonic() + pause * _chance.uniform(0.5, 1.0), pause
            return
        del self._probes[node]
        breaker.close()
        if not self._probes:
            self._front.outage.end()

    def _see_that_it_is_quick(self, node: Any) -> None:
        """A server that takes longer than requests wait for it does not serve them, though it answers."""
        try:
            self._companion.read_epoch(node, uuid4().hex, timeout_s=self._store.budget)
        except StoreTimeout as error:
            told = f"Redis answers, but not within the budget of {self._store.budget * 1000:g} ms"
            raise StoreTimeout(told) from error

    def _learn_mark(self, node: Any, *, timeout_s: float = 1.0) -> None:
        """See that a server serves, and whether it still knows what it knew."""
        mark = self._companion.read_epoch(node, uuid4().hex, timeout_s=timeout_s)
        name = self._companion.epoch_key(node)  # the same on a replica that takes over
        known = self._marks.get(name)
        self._marks[name] = mark
        if known is not None and known != mark:
            self._front.denials.clear()
            self._herald.tell(
                "state-lost",
                f"{self._store.address(node)} has forgotten its counts: its limits begin anew",
                server=self._store.address(node),
            )

    def _beat(self) -> None:
        front, is_unsure = self._front, self._unsure > 0
        self._next_beat = time.monotonic() + (BEAT / 8 if is_unsure else BEAT) * _chance.uniform(0.8, 1.0)
        if self._store.breakers.open_breakers():
            self._unsure = FIRST_BEATS  # nor do the others tell that they live: the fleet stays as it was known
            return
        try:
            front.blocks.sweep(time.time_ns() // 1000)
            living = self._companion.heartbeat(self._member, int(BEAT * LIVES * 1_000_000))
            front.fleet.nodes = max(living, front.fleet.nodes) if is_unsure else living
            if self._beaten % MARKS_EVERY == 0:
                for node in self._companion.find_primaries():
                    self._learn_mark(node)
            self._beaten += 1
            self._unsure -= is_unsure
            if front.outage.failures:  # a node that gets no requests, as it is not ready, must become so by itself
                front.outage.note_answer()
        except StoreError:
            self._unsure = FIRST_BEATS  # requests will notice, if it lasts

    def _return_unspent(self) -> None:
        front = self._front
        unspent = front.purses.overdue()
        while front.unspent:  # this thread alone takes from it
            unspent.append(front.unspent.popleft())
        if unspent and not self._store.breakers.open_breakers():
            self._companion.run_all(unspent)  # what fails is lost to this process only

    def _settle(self) -> None:
        """Charge what was admitted without the store."""
        if self._front.ledger.is_empty:
            return
        told = settle(self._front.ledger, self._companion.run_all, most_seconds=SETTLING, now=time.monotonic)
        for index, number in enumerate(told[:4]):
            self._settled[index] += number
        if not told.left and any(self._settled):
            (keys, charged, forgiven, uncertain), self._settled = self._settled, [0, 0, 0, 0]
            self._herald.tell(
                "settled",
                f"what was allowed without the store is settled: {charged} charged to {keys} counters, "
                f"{forgiven} beyond their limits, {uncertain} uncertain",
                keys=keys,
                charged=charged,
                forgiven=forgiven,
                uncertain=uncertain,
            )

    def _listen(self) -> None:
        with self._lock:
            if self._listener is not None or self._closed:
                return
            blocks, denials, purses = self._front.blocks, self._front.denials, self._front.purses
            companion = self._store.background_client() if self.listens else None

            def forget(space: str, identity: str) -> None:
                denials.forget(space, identity)
                purses.awaken(space, identity)

            def refresh(changed: list[tuple[str, str]] | None) -> None:
                if companion is not None:
                    _refresh(blocks, changed, companion)

            def connected() -> None:
                denials.clear()
                refresh(None)

            listener = self._store.subscriber(
                on_blocks_changed=refresh,
                on_forget=forget,
                on_connect=connected,
                on_lost=lambda _: denials.clear(),
            )
            self._front.listener = listener
            weakref.finalize(self, listener.stop)
            if _started("headgate-news", listener.listen) is not None:
                self._listener = listener  # last: an interrupt before this lets another try


def _refresh(blocks: BlockList, changed: list[tuple[str, str]] | None, companion: Any) -> None:
    """Read the blocks of these identities from the store, or all of them for None."""
    with closing(companion):
        if changed is None:
            blocks.reload(companion.blocks)
        else:
            blocks.refresh(changed, companion.find_blocks)


def _with(reference: weakref.ref[MaintenanceThread], do: Callable[[MaintenanceThread], None]) -> None:
    keeper = reference()
    if keeper is not None:
        do(keeper)


def _work_for(reference: weakref.ref[MaintenanceThread], bell: InterruptSafeEvent) -> None:
    me = object()
    while (keeper := reference()) is not None:
        if keeper._workers.setdefault(0, me) is not me:  # noqa: SLF001 - the keeper's own thread
            return  # whoever started this one was interrupted before it could note it, and there is another
        try:
            wait = keeper._work()  # noqa: SLF001
        except Exception:
            logger.exception("the store could not be looked after; it is tried again")
            wait = BEAT
        if wait is None:
            return
        del keeper
        bell.wait(wait)
        bell.clear()


def _started(name: str, target: Callable[..., None], *args: Any) -> BackgroundThread | None:
    """The thread; None if there can be none: there are too many, or the interpreter is about to end."""
    try:
        return BackgroundThread(name, target, *args)
    except RuntimeError:
        return None
