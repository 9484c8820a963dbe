"""Log records of another process whose stderr is shown on that of this one, as Ray does for its actors."""

from __future__ import annotations

import logging
from collections.abc import Iterable

_RELAYED = "relayed"


def relay(records: Iterable[logging.LogRecord]) -> None:
    """Log records that another process has already written to its stderr.

    A handler of this process that writes to stderr has `is_own` as a filter, so that no line is there twice.
    """
    for record in records:
        setattr(record, _RELAYED, True)
        logger = logging.getLogger(record.name)
        if logger.isEnabledFor(record.levelno):
            logger.handle(record)


def is_own(record: logging.LogRecord) -> bool:
    """Return whether a record was not given to `relay`."""
    return not hasattr(record, _RELAYED)
