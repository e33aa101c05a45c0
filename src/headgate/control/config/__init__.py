"""The config store: tiers, assignments, overrides, route costs, blocks and the policy itself, each change a version."""

from headgate.errors import InvalidConfiguration

try:
    from headgate.control.config.database import ConfigUnavailable, decision_log_beside
    from headgate.control.config.history import Difference, Version
    from headgate.control.config.rows import (
        Assignment,
        BlockRow,
        Document,
        Kept,
        OverrideRow,
        RouteCost,
        Row,
        TierNumbers,
    )
    from headgate.control.config.seeds import SeedTables, read_seed_tables
    from headgate.control.config.store import ConfigStore
    from headgate.control.config.writing import Conflict, Put, Remove
except ModuleNotFoundError as missing:
    if missing.name is None or missing.name.partition(".")[0] not in ("sqlalchemy", "alembic"):
        raise
    raise InvalidConfiguration(
        f"the config store needs the package {missing.name!r}: pip install 'headgate[config]'"
    ) from None

__all__ = [
    "Assignment",
    "BlockRow",
    "ConfigStore",
    "ConfigUnavailable",
    "Conflict",
    "Difference",
    "Document",
    "Kept",
    "OverrideRow",
    "Put",
    "Remove",
    "RouteCost",
    "Row",
    "SeedTables",
    "TierNumbers",
    "Version",
    "decision_log_beside",
    "read_seed_tables",
]
