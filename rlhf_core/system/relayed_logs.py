"""Log records of another process whose stderr is shown on that of this one, as Ray does for its actors."""

from __future__ import annotations

import logging
from collections.abc import Iterable

_RELAYED = "relayed"


def relay(records: Iterable[logging.LogRecord], *, shown: bool) -> None:
    """Log records that another process has written to its stderr.

    Args:
        records: Records of the other process.
        shown: Whether its lines will certainly be shown. A handler of this process that writes to stderr has
            `is_from_this_process` as a filter and then leaves them out, so that no line is there twice.
    """
    for record in records:
        if shown:
            setattr(record, _RELAYED, True)
        logger = logging.getLogger(record.name)
        if logger.isEnabledFor(record.levelno):
            logger.handle(record)


def is_from_this_process(record: logging.LogRecord) -> bool:
    """Return whether stderr does not show a record of another process already."""
    return not hasattr(record, _RELAYED)
