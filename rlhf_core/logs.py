"""Logging of the commands and of their child processes, and rotation of logs."""

from __future__ import annotations

import logging
import os
import shutil
import sys
from contextlib import suppress
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import TYPE_CHECKING

from rlhf_core.config.redact import LOG_FORMAT, ScrubbingFormatter
from rlhf_core.system.home import Home

if TYPE_CHECKING:
    from rich.console import Console

LOG_BYTES = 10_000_000
"""Maximum size of a log file before it is rotated. One old file is kept, because `rlhf up` may run for
months.
"""


def set_up_logging(home: Home) -> Console:
    """Log to `logs/rlhf.log` and to the terminal, and return the console of the terminal.

    The terminal shows no tracebacks and no lines of Prefect.
    """
    from rich.console import Console
    from rich.logging import RichHandler

    # Prefect and MLflow read these variables when they are imported, which happens later.
    os.environ["PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL"] = "CRITICAL"
    os.environ.setdefault("MLFLOW_LOGGING_LEVEL", "WARNING")
    # Standard output belongs to results that programs read, such as `rlhf plan --json`.
    console = Console(stderr=True)
    home.logs.mkdir(parents=True, exist_ok=True)
    file = RotatingFileHandler(home.logs / "rlhf.log", maxBytes=2_000_000, backupCount=2, encoding="utf-8")
    file.setFormatter(ScrubbingFormatter(LOG_FORMAT))
    terminal: logging.Handler = logging.StreamHandler(sys.stderr)
    if console.is_terminal:
        # No markup: rich takes a list in a message, such as [a, b], for a style, and shows nothing of it.
        terminal = RichHandler(
            console=console, show_time=False, show_level=False, show_path=False, markup=False
        )
    terminal.setFormatter(ScrubbingFormatter())
    # The command prints its error itself.
    terminal.addFilter(lambda record: record.exc_info is None)
    # Not the root logger, to which the lines of all libraries propagate.
    for name in ("flows", "rlhf_cli", "rlhf_core"):
        logger = logging.getLogger(name)
        logger.setLevel(logging.INFO)
        logger.addHandler(file)
        logger.addHandler(terminal)
    return console


def log_to_stderr() -> None:
    """Log to standard error, without secrets. The parent of the process writes it to a file."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(ScrubbingFormatter(LOG_FORMAT))
    logging.basicConfig(level=logging.INFO, handlers=[handler])


def rotate_logs(folder: Path, max_bytes: int = LOG_BYTES) -> None:
    """Rotate the logs in `folder`, and in its folders, that have more than `max_bytes`.

    The content is copied and the file is truncated. Its writer keeps the file open in append mode and
    therefore continues at the beginning. Files that cannot be read or written are not changed.
    """
    with suppress(OSError):  # a folder that is deleted while it is read
        files = list(folder.rglob("*.log"))
        for file in files:
            _rotate(file, max_bytes)


def _rotate(file: Path, max_bytes: int) -> None:
    with suppress(OSError):
        if file.stat().st_size > max_bytes:
            # Lines that are written between the two calls are lost.
            shutil.copyfile(file, file.with_suffix(".log.1"))
            os.truncate(file, 0)
