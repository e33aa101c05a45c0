"""The versioned config store: tiers, assignments, overrides, route costs, blocks and the policy document."""

from headgate.errors import InvalidConfiguration

try:
    from headgate.control.config.canary import CanarySpec
    from headgate.control.config.engine import ConfigUnavailable, default_decision_log_url
    from headgate.control.config.history import Difference, Version
    from headgate.control.config.import_tables import ImportedTables, read_tables
    from headgate.control.config.rows import (
        Assignment,
        BlockRow,
        CanaryRow,
        OverrideRow,
        PolicyDocument,
        RouteCost,
        Row,
        StoredRow,
        TierLimit,
    )
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
    "CanaryRow",
    "CanarySpec",
    "ConfigStore",
    "ConfigUnavailable",
    "Conflict",
    "Difference",
    "ImportedTables",
    "OverrideRow",
    "PolicyDocument",
    "Put",
    "Remove",
    "RouteCost",
    "Row",
    "StoredRow",
    "TierLimit",
    "Version",
    "default_decision_log_url",
    "read_tables",
]
