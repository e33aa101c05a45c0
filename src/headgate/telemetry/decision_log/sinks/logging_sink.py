"""The decision log as messages of Python's logging."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from headgate.telemetry.decision_log.record import DecisionRecord

__all__ = ["LoggingSink"]


class LoggingSink:
    """Logs one message per record; handlers find all fields in the dictionary `record.decision`."""

    def __init__(self, name: str = "headgate.decisions", *, level: str = "info") -> None:
        number = logging.getLevelNamesMapping().get(level.upper())
        if number is None:
            raise ValueError(f"unknown level={level}; write debug, info, warning or error")
        self._level = number
        self._logger = logging.getLogger(name)

    def write(self, batch: Sequence[DecisionRecord]) -> None:
        if self._logger.isEnabledFor(self._level):
            for record in batch:
                self._logger.log(self._level, "%s", record.words, extra={"decision": record.as_dict()})

    def close(self) -> None:
        """No effect: handlers belong to logging."""
