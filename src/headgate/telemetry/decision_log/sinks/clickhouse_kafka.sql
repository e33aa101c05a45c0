-- Feeds the tables of clickhouse.sql, which come first, from the topic that the Kafka sink writes. Put your brokers in.

CREATE TABLE IF NOT EXISTS decisions_queue
(
    id          String,
    at_us       Int64,
    node        String,
    region      String,
    policy      String,
    method      String,
    route       String,
    route_class String,
    tier        String,
    outcome     String,
    reason      String,
    "limit"     String,
    "by"        String,
    quota       Int64,
    period_us   Int64,
    burst       Int64,
    algorithm   String,
    origin      String,
    cost        Int64,
    remaining   Int64,
    retry_us    Nullable(Int64),
    client_kind String,
    client      String,
    label       String,
    degraded    String,
    shadow      Bool,
    note        String,
    quotas      String,
    weight      Float64,
    kinds       Array(String),
    clients     Array(String),
    also        Array(Tuple(
        "limit" String, "by" String, quota Int64, period_us Int64, burst Int64, algorithm String, origin String,
        cost Int64, remaining Int64, retry_us Nullable(Int64)))
)
ENGINE = Kafka
SETTINGS
    kafka_broker_list = '127.0.0.1:9092',
    kafka_topic_list = 'headgate.decisions',
    kafka_group_name = 'clickhouse',
    kafka_format = 'JSONEachRow',
    -- One message that cannot be read must not hold up all that come after it.
    kafka_skip_broken_messages = 100;

CREATE MATERIALIZED VIEW IF NOT EXISTS decisions_feed TO decisions AS
SELECT
    id, at_us, node, region, policy, method, route, route_class, tier, outcome, reason, "limit", "by", quota, period_us,
    burst, algorithm, origin, cost, remaining, retry_us, client_kind, client, label, degraded, shadow, note, quotas,
    weight, kinds, clients,
    if(empty(also), '', toJSONString(also)) AS also
FROM decisions_queue;
