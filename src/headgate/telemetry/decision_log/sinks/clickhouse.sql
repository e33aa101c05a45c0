-- The decision log in ClickHouse. The sink makes these tables if they are missing; or run this file yourself, and give
-- the sink create=no. Columns are those of headgate.telemetry.Record.

CREATE TABLE IF NOT EXISTS decisions
(
    id          String,
    at_us       Int64 CODEC(DoubleDelta, ZSTD),
    node        LowCardinality(String),
    region      LowCardinality(String),
    policy      LowCardinality(String),
    method      LowCardinality(String),
    route       LowCardinality(String),
    route_class LowCardinality(String),
    tier        LowCardinality(String),
    outcome     LowCardinality(String),
    reason      LowCardinality(String),
    "limit"     LowCardinality(String),
    "by"        LowCardinality(String),
    quota       Int64,
    period_us   Int64,
    burst       Int64,
    algorithm   LowCardinality(String),
    origin      LowCardinality(String),
    cost        Int64,
    remaining   Int64,
    retry_us    Nullable(Int64),
    client_kind LowCardinality(String),
    client      String,
    label       String,
    degraded    String,
    shadow      Bool,
    note        String,
    quotas      String,
    weight      Float64,
    kinds       Array(LowCardinality(String)),
    clients     Array(String),
    also        String,
    at          DateTime64(6, 'UTC') MATERIALIZED fromUnixTimestamp64Micro(at_us, 'UTC'),
    INDEX by_client clients TYPE bloom_filter(0.001) GRANULARITY 1,
    INDEX by_time at_us TYPE minmax GRANULARITY 1
)
-- Written twice is written once: rows with the same key, which contains the id, become one when parts are merged, and
-- for readers that say FINAL at once.
ENGINE = ReplacingMergeTree
PARTITION BY toYYYYMM(at)
ORDER BY (client, at_us, id)
TTL toDateTime(at) + INTERVAL 90 DAY;

-- For tables that were created before requests were charged to quotas.
ALTER TABLE decisions ADD COLUMN IF NOT EXISTS quotas String AFTER note;

-- Counts by minute, for charts. Ids are counted, not rows, so that replays don't double here either:
--   SELECT minute, sum(requests) FROM decisions_per_minute_read WHERE outcome = 'denied' GROUP BY minute
CREATE TABLE IF NOT EXISTS decisions_per_minute
(
    minute      DateTime('UTC'),
    region      LowCardinality(String),
    policy      LowCardinality(String),
    route       LowCardinality(String),
    route_class LowCardinality(String),
    tier        LowCardinality(String),
    "limit"     LowCardinality(String),
    outcome     LowCardinality(String),
    shadow      Bool,
    weight      Float64,
    ids         AggregateFunction(uniqExact, String)
)
ENGINE = AggregatingMergeTree
PARTITION BY toYYYYMM(minute)
ORDER BY (minute, region, policy, route, route_class, tier, "limit", outcome, shadow, weight)
TTL minute + INTERVAL 400 DAY;

CREATE MATERIALIZED VIEW IF NOT EXISTS decisions_per_minute_feed TO decisions_per_minute AS
SELECT
    toStartOfMinute(fromUnixTimestamp64Micro(at_us, 'UTC')) AS minute,
    region, policy, route, route_class, tier, "limit", outcome, shadow, weight,
    uniqExactState(id) AS ids
FROM decisions
GROUP BY minute, region, policy, route, route_class, tier, "limit", outcome, shadow, weight;

CREATE VIEW IF NOT EXISTS decisions_per_minute_read AS
SELECT
    minute, region, policy, route, route_class, tier, "limit", outcome, shadow,
    uniqExactMerge(ids) * weight AS requests
FROM decisions_per_minute
GROUP BY minute, region, policy, route, route_class, tier, "limit", outcome, shadow, weight;
