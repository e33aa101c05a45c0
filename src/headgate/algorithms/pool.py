"""Pool: tokens that were taken from another counter, deposited here in batches, each with an expiry of its own.

Internal: limits of users cannot have it. A region deposits what it has leased from the counter of the home region, and
its requests spend that (see `headgate.regions`).

State: a tuple of batches (expires_us, tokens, spent), the one that expires first at the front. A request takes the
tokens that expire first. A refund returns tokens to batches of which some were spent: all of it, or nothing. So the
tokens of a batch never exceed its deposit. The limit's quota is the most that the pool contains, and its period the
longest lifetime of a batch: one that expires later was deposited before the clock was set back, and does not count.
Tokens that the region has of its own expire at the end of a period, and cannot be taken back.

More tokens may be deposited at any time, so `retry_after` of a denial is an estimate, `RETRY_US`. In place of a delay,
the verdict of an admitted request for several tokens has the time until the first of them expires: prepaid ones are
spent by then. Other requests have none, as stores report verdicts with a delay more slowly.
"""

from __future__ import annotations

from typing import Final, TypeAlias

from headgate.algorithms._interface import NEVER, LimitNumbers, Verdict

Batches: TypeAlias = tuple[tuple[int, int, int], ...]
State: TypeAlias = Batches | None

SHAPES_BURST: Final = False
VERSION: Final = 1

MAX_BATCHES: Final = 16
"""Beyond it, two that expire soon become one, which expires with the earlier of them."""
RETRY_US: Final = 100_000


def peak(limit: LimitNumbers) -> int:
    return 2 * limit.quota + 1


def decide(state: State, now_us: int, cost: int, limit: LimitNumbers, id: str = "") -> tuple[State, Verdict]:
    batches = _live(state, now_us, limit)
    available = sum(tokens for _, tokens, _ in batches)
    retry_us = expires_us = 0
    if cost:
        if cost <= available:
            if cost > 1:
                expires_us = next(expires_us for expires_us, tokens, _ in batches if tokens) - now_us
            state = batches = _spend(batches, cost)
            available -= cost
        else:
            retry_us = NEVER if cost > limit.quota else RETRY_US
    return state, (available, retry_us, batches[-1][0] - now_us if batches else 0, expires_us)


def deposit(state: State, now_us: int, tokens: int, ttl_us: int, limit: LimitNumbers) -> tuple[Batches, int]:
    """The batches with a new one, and the tokens in it: those beyond the quota of the limit are not accepted."""
    batches = _live(state, now_us, limit)
    accepted = min(tokens, limit.quota - sum(tokens for _, tokens, _ in batches))
    if accepted <= 0:
        return batches, 0
    expires_us = expiry(now_us, ttl_us, limit)
    later = [batch for batch in batches if batch[0] > expires_us]
    batches = (*batches[: len(batches) - len(later)], (expires_us, accepted, 0), *later)
    if len(batches) > MAX_BATCHES:
        at = 2 if _is_free(batches[1], limit) else 1 if _is_free(batches[0], limit) else 0
        (first_us, tokens, spent), (_, more, also_spent) = batches[at : at + 2]
        batches = (*batches[:at], (first_us, tokens + more, spent + also_spent), *batches[at + 2 :])
    return batches, accepted


def expiry(now_us: int, ttl_us: int, limit: LimitNumbers) -> int:
    """The instant at which a batch expires; with a lifetime of 0, the end of the limit's period."""
    if not ttl_us:
        return now_us - now_us % limit.period_us + limit.period_us
    return now_us + min(ttl_us, limit.period_us)


def _is_free(batch: tuple[int, int, int], limit: LimitNumbers) -> bool:
    """True if the tokens were not taken from another counter: these expire at the end of a period."""
    return batch[0] % limit.period_us == 0


def take_back(state: State, now_us: int, amount: int, within_us: int, limit: LimitNumbers) -> tuple[Batches, int]:
    """The batches without up to `amount` unspent tokens that expire within that time, and the number taken.

    Unlike spent tokens, these cannot be refunded here."""
    taken, left = [], amount
    for expires_us, tokens, spent in _live(state, now_us, limit):
        is_returnable = expires_us <= now_us + within_us and not _is_free((expires_us, tokens, spent), limit)
        part = min(tokens, left) if is_returnable else 0
        left -= part
        if tokens - part or spent:
            taken.append((expires_us, tokens - part, spent))
    return tuple(taken), amount - left


def refund(state: State, now_us: int, amount: int, limit: LimitNumbers, at_us: int | None = None) -> State:
    """Tokens return to batches of which some were spent, first to those that expire first: so they live no longer than
    they would have. All of them do, or none: then they are returned to where the batches were taken from."""
    left = amount
    refunded = []
    for expires_us, tokens, spent in _live(state, now_us, limit):
        part = min(spent, left)
        left -= part
        refunded.append((expires_us, tokens + part, spent - part))
    return state if left else tuple(refunded)


def adopt(state: Batches, now_us: int, old: LimitNumbers, new: LimitNumbers) -> Batches:
    return state


def _live(state: State, now_us: int, limit: LimitNumbers) -> Batches:
    return tuple(batch for batch in state or () if now_us < batch[0] <= now_us + limit.period_us)


def _spend(batches: Batches, cost: int) -> Batches:
    spent_batches = []
    for expires_us, tokens, spent in batches:
        part = min(tokens, cost)
        cost -= part
        spent_batches.append((expires_us, tokens - part, spent + part))
    return tuple(spent_batches)
