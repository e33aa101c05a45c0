"""The config store: every change a version, nothing half-applied, nothing lost; the same on SQLite and PostgreSQL."""

from __future__ import annotations

import sqlite3
import threading
from contextlib import closing, nullcontext
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import TYPE_CHECKING, Any

import psycopg
import pytest
from alembic.autogenerate import compare_metadata
from alembic.runtime.migration import MigrationContext
from sqlalchemy import event, insert

from headgate import InvalidConfiguration, InvalidInput, InvalidPolicy, Limit
from headgate.control.admin.tables import METADATA as ACCESS
from headgate.control.anomalies.tables import METADATA as ANOMALY_TABLES
from headgate.control.config import (
    Assignment,
    ConfigStore,
    ConfigUnavailable,
    Conflict,
    OverrideRow,
    Put,
    Remove,
    TierLimit,
    queries,
    read_tables,
)
from headgate.control.config.compose import PolicyAssembly
from headgate.control.config.disk_cache import DiskCache
from headgate.control.config.engine import open_engine, read_transaction, write_transaction
from headgate.control.config.migrations import VERSION_TABLE, migrate, newest_revision
from headgate.control.config.reading import VersionStamp, read_changes, read_contents
from headgate.control.config.rows import format_bucket
from headgate.control.config.tables import METADATA, TABLES
from headgate.control.config.watcher import ConfigSource
from headgate.policy.api_keys import ApiKeyHasher
from headgate.policy.model import Policy, Validity
from headgate.policy.snapshot import Snapshot
from headgate.quotas.tables import METADATA as LEDGER_TABLES
from headgate.testing import FakeClock

if TYPE_CHECKING:
    from pathlib import Path

SECRET = b"a secret of thirty-two bytes ..."
KEY = "sk_live_4eC39HqLyjWDarjtT1zdp7dc"
HASH = ApiKeyHasher(SECRET).fingerprint(KEY)
BY = {"author": "ada@example.com", "reason": "contract 4711"}
UNTIL = datetime(2096, 5, 28, 2, 1, tzinfo=UTC)

POLICY = """\
routes:
  - {path: /api/search, class: search}
limits:
  - name: search
    class: search
    by: client
    bucket: 100/minute
    tiers: {pro: 1000/minute}
  - {name: strangers, by: ip, bucket: 1000/minute}
clients:
  - {tenant: acme, tier: pro}
  - {tenant: initech, tier: pro}
"""


@pytest.fixture
def store(empty_store_url: str) -> ConfigStore:
    store = ConfigStore(empty_store_url, secret=SECRET, clock=FakeClock(start_us=1_000_000))
    store.put_policy(POLICY, author="ada@example.com", reason="begin")
    return store


@pytest.fixture(scope="module", params=["sqlite", "postgresql"])
def untouched(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ConfigStore:
    """A store that many tests share, as none of them gets anything written."""
    if request.param == "sqlite":
        store = ConfigStore(f"sqlite:///{tmp_path_factory.mktemp('untouched')}/config.db", secret=SECRET)
    else:
        store = ConfigStore(request.getfixturevalue("postgres").fresh_url(), secret=SECRET)
    store.put_policy(POLICY, **BY)
    return store


def tier_of(policy: Policy, tenant: str) -> str | None:
    return next(client.tier for client in policy.clients if client.identity == ("tenant", tenant))


# ------------------------------------------------------------------ what holds


@pytest.mark.parametrize(
    "bucket",
    [
        "1000/month",
        "50/week",
        "50/week, starts 7",
        "9/day, timezone UTC",
        "10000/year, starts 12-31, timezone America/Argentina/ComodRivadavia",
    ],
)
def test_calendar_periods_are_kept(config_url: str, bucket: str) -> None:
    store = ConfigStore(config_url, secret=SECRET)
    store.put_policy(POLICY, **BY)
    store.set_tier("gold", "search", bucket, **BY)
    store.override(("tenant", "acme"), bucket, limit="search", **BY)
    ((tier,), (override,)) = store.tiers(), store.overrides()
    assert (format_bucket(tier.row), format_bucket(override.row)) == (bucket, bucket)
    policy = store.policy()
    assert [each.limit for each in policy.overrides] == [Limit.parse(bucket, name="search")]


def test_store_that_nothing_was_written_to_has_no_policy(config_url: str) -> None:
    store = ConfigStore(config_url)
    assert (store.version, store.document(), store.history()) == (0, None, [])
    with pytest.raises(InvalidPolicy, match="is empty; a policy has at least limits:"):
        store.policy()


def test_document_is_the_policy_that_it_would_be_in_a_file(store: ConfigStore) -> None:
    policy = store.policy()
    assert [rule.name for rule in policy.rules] == ["search", "strangers"]
    assert tier_of(policy, "acme") == "pro"


def test_every_table_adds_to_the_policy(store: ConfigStore) -> None:
    store.set_tier("gold", "search", "5000/minute, burst 600", **BY)
    store.set_route("GET /api/export", 7, route_class="export", **BY)
    store.assign(("tenant", "hooli"), "gold", label="Hooli Inc.", **BY)
    store.override(("tenant", "hooli"), "7000/hour, sliding_window", limit="search", valid_until=UNTIL, **BY)
    store.block(("ip", "203.0.113.0/24"), valid_until=UNTIL, **BY)
    policy = store.policy()
    gold = policy.rules[0].tiers["gold"]
    assert (gold.quota, gold.period, gold.burst) == (5000, timedelta(minutes=1), 600)
    assert [(route.template.text, route.route_class, route.cost) for route in policy.routes] == [
        ("/api/search", "search", 1),
        ("/api/export", "export", 7),
    ]
    client = policy.clients[-1]
    assert (client.identity, client.tier, client.label) == (("tenant", "hooli"), "gold", "Hooli Inc.")
    (override,) = policy.overrides
    assert (override.identity, override.rule, override.validity) == (
        ("tenant", "hooli"),
        "search",
        Validity(None, UNTIL),
    )
    assert (override.limit.quota, override.limit.algorithm) == (7000, "sliding_window")
    assert (policy.blocked[0].identity, policy.blocked[0].reason) == (("ip", "203.0.113.0/24"), "contract 4711")


def test_tables_go_before_the_document(store: ConfigStore) -> None:
    store.set_tier("pro", "search", "300/minute", **BY)
    store.set_tier("gold", "search", "900/minute", **BY)
    store.assign(("tenant", "acme"), "gold", **BY)
    store.set_route("/api/search/", 5, **BY)
    policy = store.policy()
    assert policy.rules[0].tiers["pro"].quota == 300
    assert [(client.identity.value, client.tier) for client in policy.clients] == [("acme", "gold"), ("initech", "pro")]
    assert [(route.route_class, route.cost) for route in policy.routes] == [("search", 5)]


def test_numbers_of_the_default_tier_are_overridden(config_url: str) -> None:
    store = ConfigStore(config_url)
    store.put_policy("tier: free\nlimits: {search: 10/minute}\n", **BY)
    store.set_tier("free", "search", "20/minute", **BY)
    assert store.policy().rules[0].tiers["free"].quota == 20
    store.put_policy("tiers: {free: {limits: {search: 10/minute}}}\n", **BY)
    assert store.policy().rules[0].tiers["free"].quota == 20


def test_what_is_taken_out_of_a_table_holds_as_the_document_says(store: ConfigStore) -> None:
    store.set_tier("gold", "search", "900/minute", **BY)
    store.assign(("tenant", "acme"), "gold", **BY)
    store.set_route("/api/search", 5, **BY)
    store.block(("user", "7"), **BY)
    added = store.override(("tenant", "acme"), "5/hour", limit="search", **BY)
    assert added is not None
    store.remove_override(added.ids[0], **BY)
    store.unassign(("tenant", "acme"), **BY)
    store.unblock(("user", "7"), **BY)
    store.remove_route("/api/search", **BY)
    store.remove_tier("gold", **BY)
    assert store.policy() == store.policy(1)


@pytest.mark.parametrize(
    ("remove", "told"),
    [
        (lambda store: store.unblock(("user", "7"), **BY), "the tables have no blocked of user 7"),
        (lambda store: store.unblock(("api_key", KEY), **BY), "the tables have no blocked of api_key"),
        (lambda store: store.remove_override(9, **BY), "overrides 9 does not exist"),
        (lambda store: store.remove_tier("pro", "search", **BY), "the tables have no tiers of tier 'pro'"),
        (
            lambda store: store.override(("tenant", "a"), "1/hour", limit="search", id=9, **BY),
            "overrides 9 does not exist",
        ),
        (lambda store: store.policy(2), "version 2 does not exist; the newest is 1"),
        (
            lambda store: store.rollback(1, sections=["overides"], **BY),
            "unknown sections overides; known are",
        ),
        (lambda store: store.block(("global", "x"), **BY), "'global' is not a single kind of identity"),
        (lambda store: store.block(("user", "7"), author="ada", reason=""), "the text is empty"),
    ],
)
def test_what_is_not_there_is_said_so(untouched: ConfigStore, remove: Any, told: str) -> None:
    with pytest.raises(InvalidInput) as refused:
        remove(untouched)
    assert told in str(refused.value)
    assert untouched.version == 1


# ------------------------------------------------------------------ nothing half-applied


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (
            lambda store: store.override(("tenant", "a"), "1/hour", limit="serch", **BY),
            "override of tenant a on limit serch: 1/hour: no limit is called 'serch'; did you mean 'search'?",
        ),
        (
            lambda store: store.override(("subnet", "10.0.0.0/8"), "1/hour", limit="search", **BY),
            'override of subnet 10.0.0.0/8 on limit search: 1/hour: "search" is a per-client limit',
        ),
        (
            lambda store: store.override(
                ("tenant", "a"), "1/hour", limit="search", valid_from=UNTIL, valid_until=UNTIL, **BY
            ),
            "before it starts; put it after valid_from",
        ),
        (
            lambda store: store.assign(("tenant", "a"), "platin", **BY),
            "client tenant a: tier platin: no limit has numbers for tier 'platin'; known are pro",
        ),
        (
            lambda store: store.set_route("/api/search", 101, **BY),
            "policy.yaml:7:13: a request to /api/search costs 101, but limit 'search' allows at most 100 at once",
        ),
        (lambda store: store.set_route("api search", 1, **BY), "route api search: cost 1: path: "),
        (
            lambda store: store.put_policy("limits: [{by: ip, bukcet: 9/hour}]", file="p.yml", **BY),
            "p.yml:1:19: unknown field 'bukcet'; did you mean 'bucket'?",
        ),
        (lambda store: store.put_policy("limits: [", file="p.json", **BY), "p.json:1:1: not JSON"),
        (lambda store: store.put_policy("", **BY), "policy.yaml:1:1: is empty"),
        (
            lambda store: store.put_policy(
                '{"limits": [{"by": "ip", "by": "ip", "bucket": "9/hour"}]}', file="p.json", **BY
            ),
            "'by' is given twice",
        ),
    ],
)
def test_what_would_not_load_is_refused_whole_in_the_loaders_words(
    untouched: ConfigStore, change: Any, told: str
) -> None:
    with pytest.raises(InvalidPolicy) as refused:
        change(untouched)
    assert told in str(refused.value)
    assert untouched.version == 1
    assert untouched.document() is not None
    assert untouched.tiers() + untouched.routes() + untouched.clients() + untouched.overrides() == []


def test_document_is_refused_that_rows_cannot_live_with(store: ConfigStore) -> None:
    store.override(("tenant", "acme"), "5/hour", limit="search", **BY)
    with pytest.raises(InvalidPolicy, match=r"^override of tenant acme on limit search: 5/hour: no limit is called"):
        store.put_policy("limits: [{name: strangers, by: ip, bucket: 9/hour}]", **BY)
    assert store.version == 2


def test_one_bad_change_takes_back_all_that_came_with_it(store: ConfigStore) -> None:
    good = Put("tiers", TierLimit("gold", "search", 900, 60_000_000))
    with pytest.raises(InvalidPolicy):
        store.write([good, Put("clients", Assignment("tenant", "a", "platin"))], **BY)
    assert (store.version, store.tiers()) == (1, [])


def test_same_override_twice_is_refused(store: ConfigStore) -> None:
    store.override(("tenant", "acme"), "5/hour", limit="search", **BY)
    store.override(("tenant", "acme"), "6/hour", limit="search", valid_until=UNTIL, **BY)
    with pytest.raises(
        InvalidPolicy, match="the same client, limit and time as the override at another entry; keep one"
    ):
        store.override(("tenant", "acme"), "7/hour", limit="search", **BY)


def test_many_changes_are_one_version(store: ConfigStore) -> None:
    rows = [OverrideRow("tenant", f"t{number}", "search", None, 5, 60_000_000) for number in range(1200)]
    version = store.write([Put("overrides", row) for row in rows], **BY)
    assert version is not None
    assert (version.number, version.what, len(version.ids)) == (2, "1200 overrides", 1200)
    assert len(store.policy().overrides) == 1200
    store.write([Remove("overrides", id) for id in version.ids], **BY)
    assert store.policy().overrides == ()
    with pytest.raises(InvalidPolicy, match="the first 50 mistakes; there may be more"):
        store.write([Put("overrides", row._replace(limit_name="x")) for row in rows], **BY)


# ------------------------------------------------------------------ versions


def test_every_version_has_author_time_reason_and_changes(store: ConfigStore) -> None:
    made = store.override(("tenant", "acme"), "5/hour", limit="search", valid_until=UNTIL, **BY)
    newest, first = store.history()
    assert made == newest._replace(ids=(1,))
    assert newest.number == 2
    assert newest.at_us == 1_000_000
    assert (newest.author, newest.reason) == ("ada@example.com", "contract 4711")
    assert newest.what == "added override of tenant acme on limit search: 5/hour until 2096-05-28T02:01:00+00:00"
    assert first.what == "added policy document policy.yaml"
    assert store.history(before=2) == [first]
    assert store.history(most=1) == [newest]
    assert store.overrides()[0].row.author == "ada@example.com"


def test_what_changes_nothing_is_no_version(store: ConfigStore) -> None:
    assert store.put_policy(POLICY, author="bob", reason="again") is None
    store.set_tier("pro", "search", "300/minute", **BY)
    assert store.set_tier("pro", "search", "300 per 60 seconds", **BY) is None
    assert store.version == 2


def test_diff_shows_each_row_before_and_after(store: ConfigStore) -> None:
    store.put_policy(POLICY.replace("100/minute\n", "150/minute\n"), **BY)
    store.set_tier("pro", "search", "300/minute", **BY)
    store.block(("user", "7"), **BY)
    store.set_tier("pro", "search", "400/minute", **BY)
    store.unblock(("user", "7"), **BY)
    document, tier = store.diff(1, store.version)
    assert document.lines == ["@@ -5,5 +5,5 @@", "     class: search", "     by: client", "-    bucket: 100/minute",
                              "+    bucket: 150/minute", "     tiers: {pro: 1000/minute}",
                              "   - {name: strangers, by: ip, bucket: 1000/minute}"]  # fmt: skip
    assert (tier.before, tier.what) == (None, "added tier pro, limit search: 400/minute")
    assert [each.what for each in store.diff(4, 5)] == ["changed tier pro, limit search: 400/minute"]
    assert [each.what for each in store.diff(5, 6)] == ["removed block of user 7"]
    assert [each.what for each in store.diff(6, 5)] == ["added block of user 7"]
    assert store.diff(3, 3) == []


def test_rollback_is_a_new_version_with_the_old_contents(store: ConfigStore) -> None:
    store.set_tier("gold", "search", "900/minute", **BY)
    store.assign(("tenant", "acme"), "gold", **BY)
    store.block(("user", "7"), **BY)
    store.unblock(("user", "7"), **BY)
    store.block(("user", "7"), author="bob", reason="again")
    store.put_policy(POLICY.replace("100/minute", "150/minute"), **BY)
    wanted = store.policy(4)
    back = store.rollback(4, author="eve", reason="it was wrong")
    assert back is not None
    assert (back.number, back.restores, back.author) == (8, 4, "eve")
    assert back.what == "rolled back to version 4: 3 changes"
    assert store.policy() == wanted
    assert store.diff(4, 8) == []
    assert store.rollback(7, author="eve", reason="it was right") is not None
    assert store.policy() == store.policy(7)


def test_rollback_may_leave_blocks_alone(store: ConfigStore) -> None:
    store.put_policy(POLICY.replace("100/minute", "150/minute"), **BY)
    store.block(("user", "7"), **BY)
    store.rollback(1, sections=["documents"], **BY)
    assert store.document() == store.document(1)
    assert len(store.blocks()) == 1


def test_what_held_at_a_version_still_can_be_read(store: ConfigStore) -> None:
    store.assign(("tenant", "acme"), None, **BY)
    store.assign(("tenant", "acme"), "pro", label="Acme", **BY)
    assert [tier_of(store.policy(version), "acme") for version in (1, 2, 3)] == ["pro", None, "pro"]
    assert [each.since for each in store.clients(who=("tenant", "acme"))] == [3]
    assert store.clients(1) == []


# ------------------------------------------------------------------ two at once


def test_change_based_on_an_old_version_is_a_conflict(store: ConfigStore) -> None:
    seen = store.version
    store.assign(("tenant", "acme"), None, based_on=seen, **BY)
    store.assign(("tenant", "acme"), "pro", based_on=seen + 1, **BY)
    with pytest.raises(Conflict, match=r"^clients 1 was changed in version 3, after version 2 ") as conflict:
        store.assign(("tenant", "acme"), None, based_on=seen + 1, **BY)
    assert conflict.value.version == store.version == 3


def test_changes_to_other_things_are_no_conflict(store: ConfigStore) -> None:
    seen = store.version
    store.block(("user", "7"), **BY)
    assert store.block(("user", "8"), based_on=seen, **BY) is not None
    with pytest.raises(Conflict):
        store.unblock(("user", "7"), based_on=seen, **BY)
    with pytest.raises(Conflict):
        store.block(("user", "7"), based_on=99, **BY)


def test_concurrently_replaced_document_is_a_conflict(store: ConfigStore) -> None:
    store.put_policy(POLICY.replace("100/minute", "150/minute"), based_on=1, **BY)
    with pytest.raises(Conflict):
        store.put_policy(POLICY.replace("100/minute", "180/minute"), based_on=1, **BY)


def test_override_that_was_removed_meanwhile_is_a_conflict(store: ConfigStore) -> None:
    added = store.override(("tenant", "acme"), "5/hour", limit="search", **BY)
    assert added is not None
    (id,) = added.ids
    store.remove_override(id, **BY)
    for change in (
        lambda: store.override(("tenant", "acme"), "6/hour", limit="search", id=id, based_on=added.number, **BY),
        lambda: store.remove_override(id, based_on=added.number, **BY),
    ):
        with pytest.raises(Conflict):
            change()


def test_of_writers_at_the_same_moment_each_gets_a_version(store: ConfigStore, empty_store_url: str) -> None:
    def write(number: int) -> None:
        own = ConfigStore(empty_store_url, secret=SECRET)
        for _ in range(3):
            own.override(("tenant", f"t{number}"), "5/hour", limit="search", valid_until=_later(own), **BY)

    threads = [threading.Thread(target=write, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert store.version == 13
    assert [version.number for version in store.history()] == [*range(13, 0, -1)]
    assert len({each.id for each in store.overrides()}) == 12


def _later(store: ConfigStore) -> datetime:
    return UNTIL + timedelta(days=len(store.overrides()))


def test_one_of_two_concurrent_changes_wins(store: ConfigStore, empty_store_url: str) -> None:
    outcomes: list[str] = []
    start = threading.Barrier(4)

    def write(number: int) -> None:
        own = ConfigStore(empty_store_url, secret=SECRET)
        start.wait()
        try:
            own.put_policy(POLICY.replace("100/minute", f"{200 + number}/minute"), based_on=1, **BY)
            outcomes.append("won")
        except Conflict:
            outcomes.append("conflict")

    threads = [threading.Thread(target=write, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(outcomes) == ["conflict", "conflict", "conflict", "won"]
    assert store.version == 2


# ------------------------------------------------------------------ API keys


def test_api_keys_are_stored_as_keyed_hashes(store: ConfigStore, empty_store_url: str, tmp_path: Path) -> None:
    who = ("api_key", KEY)
    store.assign(who, "pro", **BY)
    store.override(who, "5/hour", limit="search", **BY)
    store.block(who, **BY)
    assert [each.row.value for each in (*store.clients(), *store.overrides(), *store.blocks())] == [HASH] * 3
    assert len(store.overrides(who=who)) == len(store.overrides(who=("api_key", HASH))) == 1
    everything = [str(store.history()), str(store.diff(0, store.version)), str(store.policy())]
    everything += [str(row) for row in dump(empty_store_url)]
    everything += [file.read_bytes().decode("latin-1") for file in tmp_path.iterdir() if file.is_file()]
    assert not [each for each in everything if KEY in each]
    snapshot = Snapshot(store.policy(), ApiKeyHasher(SECRET).fingerprint)
    met = snapshot.resolve(snapshot.route("GET", "/api/search"), {"api_key": HASH, "ip": "1.2.3.4"}, 0)
    assert met.block is not None


def dump(url: str) -> list[Any]:
    """Every row of every table, read without headgate."""
    names = [table.name for table in METADATA.sorted_tables]
    if url.startswith("sqlite"):
        file = sqlite3.connect(url.removeprefix("sqlite:///"))
        rows = [row for name in names for row in file.execute(f"SELECT * FROM {name}")]
        file.close()
        return rows
    with psycopg.connect(url) as connection:
        return [row for name in names for row in connection.execute(f"SELECT * FROM {name}".encode())]


def test_document_with_keys_in_it_is_refused_and_says_what_to_write(store: ConfigStore) -> None:
    with pytest.raises(InvalidPolicy) as refused:
        store.put_policy(f"{POLICY}  - {{api_key: {KEY}, tier: pro}}\n", **BY)
    assert str(refused.value) == f"policy.yaml: clients[2].api_key: API keys are stored as hashes; write {HASH}"
    assert KEY not in str(dump(store.engine.url.render_as_string(hide_password=False).replace("+psycopg", "")))
    assert store.put_policy(f'{POLICY}  - {{api_key: "{HASH}", tier: pro}}\n', **BY) is not None


def test_without_a_secret_no_key_is_taken(config_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HEADGATE_SECRET", raising=False)
    store = ConfigStore(config_url)
    store.put_policy(POLICY, **BY)
    with pytest.raises(InvalidConfiguration, match="there is no secret to hash with") as refused:
        store.block(("api_key", KEY), **BY)
    assert KEY not in str(refused.value)
    assert store.block(("api_key", HASH), **BY) is not None
    monkeypatch.setenv("HEADGATE_SECRET", SECRET.decode())
    assert ConfigStore(config_url).unblock(("api_key", KEY), **BY) is not None


def test_addresses_have_one_spelling(store: ConfigStore) -> None:
    store.block(("ip", "2001:DB8:0::1/128"), **BY)
    assert store.blocks(who=("ip", "2001:db8::1"))[0].row.value == "2001:db8::1"
    assert store.block(("ip", "2001:db8::1"), **BY) is None


# ------------------------------------------------------------------ from rows to policies


def test_changed_rows_alone_give_the_same_policy_as_all_rows(store: ConfigStore) -> None:
    """What nodes do: they read what has changed, and keep what they have made of the rest."""
    for number in range(6):
        store.override(("tenant", f"t{number}"), "5/hour", limit="search", **BY)
    with read_transaction(store.engine) as connection:
        first = read_contents(connection, VersionStamp(store.version, 1_000_000))
    assembly = PolicyAssembly(first)
    store.override(("tenant", "t2"), "6/hour", limit="search", id=3, **BY)
    store.remove_override(5, **BY)
    store.override(("tenant", "new"), "7/hour", limit="search", **BY)
    store.assign(("tenant", "acme"), None, **BY)
    store.block(("user", "7"), **BY)
    store.unassign(("tenant", "acme"), **BY)
    store.assign(("tenant", "initech"), None, label="Initech", **BY)
    with read_transaction(store.engine) as connection:
        found = read_changes(connection, first.stamp, VersionStamp(store.version, 1_000_000))
    assert found is not None
    assert not found.affects_template
    assert {section: len(rows) for section, rows in found.rows.items() if rows} == {
        "clients": 2, "overrides": 3, "blocked": 1,
    }  # fmt: skip
    after, wanted = assembly.with_changes(found.rows).policy, store.policy()
    assert set(after.overrides) == set(wanted.overrides)
    assert (after.clients, after.blocked, after.rules) == (wanted.clients, wanted.blocked, wanted.rules)
    assert len(assembly.policy.overrides) == 6, "the one before is as it was"


# ------------------------------------------------------------------ tables of other limiters


SEED_TABLES = """
CREATE TABLE rate_limit_tiers (
  tier_name VARCHAR(32) PRIMARY KEY, default_limit INTEGER NOT NULL, window_seconds INTEGER NOT NULL,
  burst_multiplier NUMERIC(3,2) NOT NULL DEFAULT 1.00);
CREATE TABLE rate_limit_overrides (
  api_key VARCHAR(64) NOT NULL, route_class VARCHAR(32) NOT NULL, limit_value INTEGER NOT NULL,
  window_seconds INTEGER NOT NULL, valid_until TIMESTAMPTZ, reason TEXT, PRIMARY KEY (api_key, route_class));
CREATE TABLE rate_limit_route_costs (
  route_pattern VARCHAR(128) NOT NULL, route_class VARCHAR(32) NOT NULL, cost_units INTEGER NOT NULL DEFAULT 1,
  PRIMARY KEY (route_pattern));
INSERT INTO rate_limit_tiers VALUES ('free', 60, 60, 1.00), ('pro', 1000, 60, 1.50);
INSERT INTO rate_limit_overrides VALUES
  ('sk_live_4eC39HqLyjWDarjtT1zdp7dc', 'search', 5000, 60, '2096-05-28 02:01:00+00:00', 'batch'),
  ('sk_live_4eC39HqLyjWDarjtT1zdp7dc', 'default', 70, 1, NULL, NULL),
  ('sk_live_4eC39HqLyjWDarjtT1zdp7dc', 'nowhere', 70, 1, NULL, NULL);
INSERT INTO rate_limit_route_costs VALUES
  ('/api/v1/search', 'search', 50), ('/api/v1/transfer', 'write', 1), ('/health', 'free', 0);
"""


@pytest.fixture
def seeds(config_url: str) -> str:
    run(config_url, SEED_TABLES)
    return config_url


def run(url: str, statements: str) -> None:
    if url.startswith("sqlite"):
        file = sqlite3.connect(url.removeprefix("sqlite:///"))
        file.executescript(statements)
        file.close()
    else:
        with psycopg.connect(url, autocommit=True) as connection:
            for statement in statements.split(";"):
                connection.execute(statement.encode())


def test_three_tables_are_read_as_they_stand(seeds: str, caplog: pytest.LogCaptureFixture) -> None:
    found = read_tables(seeds, fingerprint=ApiKeyHasher(SECRET).fingerprint)
    assert [(row.path, row.route_class, row.cost) for row in found.routes] == [
        ("/api/v1/search", "search", 50), ("/api/v1/transfer", "write", 1), ("/health", "free", 0), ("*", "default", 1),
    ]  # fmt: skip
    assert {(row.tier, row.quota, row.burst) for row in found.tiers} == {("free", 60, None), ("pro", 1000, 1500)}
    default, search = found.overrides
    assert (search.route_class, search.quota, search.reason) == ("search", 5000, "batch")
    assert search.valid_until_us == UNTIL.timestamp() * 1_000_000
    assert (default.valid_until_us, default.value) == (None, HASH)
    assert [row.route_class for row in found.unused] == ["nowhere"]
    assert "1 overrides are on classes without routes: nowhere" in caplog.text
    assert KEY not in caplog.text + str(found)


def test_imported_tables_are_a_policy_that_counts_each_class_by_itself(seeds: str) -> None:
    store = ConfigStore(seeds, secret=SECRET)
    assert store.import_seed_tables(seeds, **BY) is not None
    assert store.import_seed_tables(seeds, **BY) is None, "what is up to date changes nothing"
    policy = store.policy()
    assert policy.default_tier == "free"
    snapshot = Snapshot(policy, trusts_keys=True)

    def met(path: str, **who: str) -> list[tuple[str, int, int | tuple[int, ...]]]:
        found = snapshot.resolve(snapshot.route("GET", path), {"ip": "1.2.3.4", "address": "1.2.3.4", **who}, 0)
        return [(key.limit.name, key.limit.quota, found.cost) for key in found.keys]

    assert met("/api/v1/search", api_key="hmac:x") == [("search", 60, 50)]
    assert met("/api/v1/search", api_key="hmac:x", tier="pro") == [("search", 1000, 50)]
    assert met("/api/v1/search", api_key=HASH, tier="pro") == [("search", 5000, 50)]
    assert met("/api/v1/transfer", api_key=HASH, tier="pro") == [("write", 1000, 1)]
    assert met("/elsewhere", api_key=HASH) == [("default", 70, 1)]
    assert snapshot.route("GET", "/health").is_exempt
    run(seeds, "UPDATE rate_limit_overrides SET limit_value = 6000 WHERE route_class = 'search'")
    again = store.import_seed_tables(seeds, **BY)
    assert again is not None
    assert [each.what.partition(": ")[0] for each in store.diff(1, 2)] == [
        f"changed override of api_key {HASH} on class search"
    ]


def test_tables_that_are_not_there_are_named(config_url: str) -> None:
    with pytest.raises(InvalidConfiguration, match="has no table rate_limit_overrides, rate_limit_route_costs"):
        ConfigStore(config_url).import_seed_tables(config_url, **BY)


# ------------------------------------------------------------------ databases


@pytest.mark.filterwarnings("ignore:Skipped unsupported reflection of expression-based index")
def test_migrations_lead_to_the_tables_that_are_used(store: ConfigStore) -> None:
    def ours(thing: Any, name: str | None, kind: str, *_: Any) -> bool:
        # The index of names is another expression in each database: the test after this one sees that it is used.
        return (kind, name) not in {("table", VERSION_TABLE), ("index", "headgate_clients_label")}

    with read_transaction(store.engine) as connection:
        context = MigrationContext.configure(connection, opts={"compare_type": True, "include_object": ours})
        assert compare_metadata(context, [METADATA, ACCESS, ANOMALY_TABLES, LEDGER_TABLES]) == []


def test_pages_of_names_are_found_by_an_index(store: ConfigStore) -> None:
    """However many there are: nobody waits until all of them are sorted."""
    asked: list[tuple[str, Any]] = []

    def note(_: Any, __: Any, statement: str, parameters: Any, *___: Any) -> None:
        asked.append((statement, parameters))

    names = ("kind", "value", "label")
    engine = store.engine
    is_sqlite = engine.dialect.name == "sqlite"
    with write_transaction(engine) as connection:
        who = [("tenant", f"t{number}", f"Acme {number}") for number in range(5000)]
        rows = [{"id": 1000 + at, "since": 1, **dict(zip(names, each, strict=True))} for at, each in enumerate(who)]
        connection.execute(insert(TABLES["clients"]), rows)
        connection.exec_driver_sql("ANALYZE headgate_clients")
        event.listen(connection, "before_cursor_execute", note)
        first = queries.labelled_clients(connection, after=None, most=10)
        later = queries.labelled_clients(connection, after=("acme 4997", "tenant", "t4997"), most=10)
        found = queries.find_by_label(connection, "aCME 500")
        event.remove(connection, "before_cursor_execute", note)
        how = "EXPLAIN QUERY PLAN" if is_sqlite else "EXPLAIN"
        plans = [
            "\n".join(str(each[-1]) for each in connection.exec_driver_sql(f"{how} {statement}", parameters))
            for statement, parameters in asked
        ]
    assert [each.label for each in first][:4] == ["Acme 0", "Acme 1", "Acme 10", "Acme 100"]
    assert [each.label for each in later][:6] == ["Acme 4998", "Acme 4999", *[f"Acme {n}" for n in (5, 50, 500, 501)]]
    assert found == [("tenant", "t500")]
    for plan in plans[: None if is_sqlite else 2]:  # PostgreSQL finds a single name by looking at all, in no time
        assert "headgate_clients_label" in plan, plan
    assert "SEARCH" in plans[1] or "Index Cond" in plans[1], f"it begins where the other ended:\n{plans[1]}"


def test_migrations_run_once_and_lose_nothing(store: ConfigStore, empty_store_url: str) -> None:
    again = ConfigStore(empty_store_url, secret=SECRET)
    assert again.version == 1
    with write_transaction(open_engine(empty_store_url)) as connection:
        migrate(connection)
        assert connection.exec_driver_sql(f"SELECT version_num FROM {VERSION_TABLE}").scalars().all() == [
            newest_revision()
        ]


def test_tables_of_a_newer_headgate_are_left_alone(store: ConfigStore, empty_store_url: str) -> None:
    run(empty_store_url, f"UPDATE {VERSION_TABLE} SET version_num = '9999'")
    with pytest.raises(InvalidConfiguration, match="schema revision 9999 of a newer headgate version; upgrade"):
        ConfigStore(empty_store_url)
    run(empty_store_url, f"UPDATE {VERSION_TABLE} SET version_num = '{newest_revision()}'")


def test_stores_that_are_opened_at_the_same_moment_make_the_tables_once(config_url: str) -> None:
    failures: list[Exception] = []

    def open_it() -> None:
        try:
            ConfigStore(config_url)
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=open_it) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


class Refusing(sqlite3.Connection):
    """Refuses its first pragmas, as SQLite does while others change the journal of the same new file."""

    refusals: tuple[int, ...] = ()

    def execute(self, sql: str, *args: Any) -> sqlite3.Cursor:
        if sql.startswith("PRAGMA journal_mode") and self.refusals:
            code, *Refusing.refusals = self.refusals  # type: ignore[assignment]
            error = sqlite3.OperationalError("database is locked")
            error.sqlite_errorcode = code
            raise error
        return super().execute(sql, *args)


@pytest.mark.parametrize(
    ("codes", "is_open"),
    [
        ([sqlite3.SQLITE_BUSY] * 3, True),
        ([sqlite3.SQLITE_BUSY_RECOVERY, sqlite3.SQLITE_BUSY_SNAPSHOT], True),
        ([sqlite3.SQLITE_BUSY, sqlite3.SQLITE_IOERR], False),
    ],
)
def test_concurrent_openers_of_a_new_file_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, codes: list[int], is_open: bool
) -> None:
    monkeypatch.setattr(Refusing, "refusals", codes)
    url = f"sqlite:///{tmp_path}/config.db"
    monkeypatch.setattr(sqlite3.dbapi2, "connect", partial(sqlite3.dbapi2.connect, factory=Refusing))
    with nullcontext() if is_open else pytest.raises(ConfigUnavailable, match="database is locked"):
        ConfigStore(url)
    assert not Refusing.refusals


@pytest.mark.parametrize(
    ("url", "told"),
    [
        ("headgate.db", "invalid config store URL"),
        ("mysql://127.0.0.1/x", "unsupported config store database mysql"),
        ("sqlite://", "the config store cannot be in memory; name a file"),
    ],
)
def test_url_that_means_nothing_is_refused(url: str, told: str) -> None:
    with pytest.raises(InvalidConfiguration, match=told):
        ConfigStore(url)


def test_unreachable_store_is_reported_without_its_password(tmp_path: Path) -> None:
    with pytest.raises(ConfigUnavailable) as refused:
        ConfigStore("postgresql://ada:s3cret@127.0.0.1:9/x?connect_timeout=2")
    assert "postgresql://ada:***@127.0.0.1:9/x" in str(refused.value)
    assert "s3cret" not in str(refused.value)
    with pytest.raises(ConfigUnavailable, match="unable to open database file"):
        ConfigStore(f"sqlite:///{tmp_path}/no/such/place.db")


def test_nodes_copy_stays_where_it_was_named(
    untouched: ConfigStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is written in the background, and the process may have moved meanwhile."""
    here, elsewhere = tmp_path / "here", tmp_path / "elsewhere"
    here.mkdir()
    elsewhere.mkdir()
    with read_transaction(untouched.engine) as connection:
        found = read_contents(connection, VersionStamp(untouched.version, 1_000_000))
    monkeypatch.chdir(here)
    copy = DiskCache("copy.db")
    monkeypatch.chdir(elsewhere)
    assert copy.update(found)
    assert "copy.db" in [file.name for file in here.iterdir()]
    assert [*elsewhere.iterdir()] == []


def test_app_started_before_its_config_store_names_the_remedy(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/config.db"
    with pytest.raises(ConfigUnavailable) as missing:
        ConfigSource(url).follow(lambda policy: policy, every=None)
    assert str(missing.value) == (
        f"config store {url}: file does not exist; start `headgate admin --config {url}` first, which creates it, or "
        "give the app a policy file and control=, which creates it with that policy"
    )
    with closing(ConfigStore(url, secret=SECRET)), pytest.raises(InvalidConfiguration) as empty:
        ConfigSource(url).follow(lambda policy: policy, every=None)
    assert str(empty.value) == (
        f"{url} has no policy yet: save one with `headgate policy put FILE`, or give the app a policy file and "
        "control=, which saves it as the first version"
    )


def test_new_config_store_is_private(tmp_path: Path) -> None:
    store = ConfigStore(f"sqlite:///{tmp_path}/config.db", secret=SECRET)
    with read_transaction(store.engine):
        assert {each.name: each.stat().st_mode & 0o777 for each in tmp_path.iterdir()} == {
            f"config.db{suffix}": 0o600 for suffix in ("", "-wal", "-shm")
        }


def test_deleted_config_store_is_reported_and_not_replaced_by_an_empty_one(tmp_path: Path) -> None:
    store = ConfigStore(f"sqlite:///{tmp_path}/config.db", secret=SECRET)
    store.put_policy("limits: [{by: ip, bucket: 1/minute}]", **BY)
    (tmp_path / "config.db").unlink()
    for use in (lambda: store.version, lambda: store.set_route("/a", 2, **BY)):
        with pytest.raises(ConfigUnavailable, match="file does not exist"):
            use()
    assert not (tmp_path / "config.db").exists()


def test_change_to_a_config_store_that_is_deleted_meanwhile_is_not_reported_as_saved(tmp_path: Path) -> None:
    store = ConfigStore(f"sqlite:///{tmp_path}/config.db", secret=SECRET)
    with pytest.raises(ConfigUnavailable, match="the file was deleted or replaced"), write_transaction(store.engine):
        (tmp_path / "config.db").unlink()
