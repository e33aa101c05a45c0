"""Leases of concurrency limits, on every store."""

from __future__ import annotations

from support.limiter_probe import SECOND, LimiterProbe, limit_of


def test_late_release_frees_no_other_lease(probe: LimiterProbe) -> None:
    """Pitfall 44: an expired lease is over, whoever still believes to hold it."""
    limit = limit_of("concurrency", 1, SECOND)
    place = probe.key(limit)
    assert probe.at(0).enter(place, id="a").allowed
    assert probe.at(999).enter(place, id="b").retry_after_us == 1_000
    assert probe.at(1_000).enter(place, id="b").allowed
    assert not probe.limiter.leave(place, id="a")
    assert not probe.limiter.renew(place, id="a")
    assert not probe.limiter.enter(place, id="c").allowed


def test_expired_lease_can_be_entered_again(probe: LimiterProbe) -> None:
    """Pitfall 44: the same id after its lease expired is a new lease, at its new cost."""
    place = probe.key(limit_of("concurrency", 3, SECOND))
    probe.at(0).enter(place, id="a", cost=2)
    assert probe.at(1_000).enter(place, id="a", cost=3).remaining == 0
    assert probe.at(1_999).peek(place).remaining == 0


def test_lease_is_released_once(probe: LimiterProbe) -> None:
    """Pitfall 44: a second release of the same lease is no second place."""
    place = probe.key(limit_of("concurrency", 2, SECOND))
    probe.at(0).enter(place, id="a")
    probe.limiter.enter(place, id="b")
    assert [probe.limiter.leave(place, id="a") for _ in range(2)] == [True, False]
    assert probe.limiter.peek(place).remaining == 1


def test_renewal_extends_the_lease_from_its_instant(probe: LimiterProbe) -> None:
    """Pitfall 44: renewal counts from its own instant, and entering again renews and counts nobody twice."""
    place = probe.key(limit_of("concurrency", 1, SECOND))
    probe.at(0).enter(place, id="a")
    assert probe.at(900).renew(place, id="a")
    again = probe.at(1_800).enter(place, id="a")
    assert (again.allowed, again.remaining, again.reset_after_us) == (True, 0, 1_000_000)
    assert not probe.at(2_799).enter(place, id="b").allowed
    assert not probe.at(2_800).renew(place, id="a")
    assert probe.limiter.enter(place, id="b").allowed
