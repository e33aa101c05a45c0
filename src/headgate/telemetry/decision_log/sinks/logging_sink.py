"""The decision log as lines of Python's own logging: for a first look, or where all logs go one way."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from headgate.telemetry.decision_log.record import DecisionRecord

__all__ = ["LoggingSink"]


class LoggingSink:
    """Says each record in words; handlers find all of it as `record.decision`, a dictionary."""

    def __init__(self, name: str = "headgate.decisions", *, level: str = "info") -> None:
        number = logging.getLevelNamesMapping().get(level.upper())
        if number is None:
            raise ValueError(f"level={level} is none of logging's; write debug, info, warning or error")
        self._level = number
        self._logger = logging.getLogger(name)

    def write(self, batch: Sequence[DecisionRecord]) -> None:
        if self._logger.isEnabledFor(self._level):
            for record in batch:
                self._logger.log(self._level, "%s", record.words, extra={"decision": record.as_dict()})

    def close(self) -> None:
        """Handlers are logging's own to close."""
