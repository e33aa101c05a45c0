"""Billing-grade quotas: a durable ledger of grants and charges, beside the hot path. See docs/ledger.md."""

from headgate.errors import name_missing_extra

with name_missing_extra("the ledger needs", "config", "sqlalchemy", "alembic"):
    from headgate.quotas.entries import LedgerEntry, LedgerProblem, QuotaReservation, UsageRecord
    from headgate.quotas.ledger import AccountSummary, Ledger, LedgerUnavailable
    from headgate.quotas.meter import MeterReservation, MeterStats, QuotaMeter
    from headgate.quotas.plans import QuotaPlan

__all__ = [
    "AccountSummary",
    "Ledger",
    "LedgerEntry",
    "LedgerProblem",
    "LedgerUnavailable",
    "MeterReservation",
    "MeterStats",
    "QuotaMeter",
    "QuotaPlan",
    "QuotaReservation",
    "UsageRecord",
]
