"""Check of the address and the environment variables of MLflow before anything is started.

The module does not import mlflow.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator

from rlhf_core.config.keys import given_tracking_uri, tracking_uri
from rlhf_core.config.pipeline import PipelineConfig
from rlhf_core.config.redact import HIDDEN, shown
from rlhf_core.errors import ConfigError, Finding
from rlhf_core.tracking.also import check_also
from rlhf_core.tracking.database import database_problem, tracker_problem
from rlhf_core.tracking.mlflow_client import sqlite_path

_NUMBERS = (("MLFLOW_HTTP_REQUEST_TIMEOUT", 1, 3600), ("MLFLOW_HTTP_REQUEST_MAX_RETRIES", 0, 10))
"""Numeric variables of MLflow's client, with their smallest and largest values."""


def check_tracking(config: PipelineConfig) -> Iterator[Finding]:
    """Check the tracking URI, its file if it is a database in a file, and variables of MLflow's client."""
    uri = given_tracking_uri(config)
    problem = None
    if uri is not None:
        problem = tracker_problem(uri)
    if problem is None and (database := sqlite_path(tracking_uri(config))):
        problem = database_problem(database)
    if problem is not None:
        yield ConfigError(f"tracking.uri (or MLFLOW_TRACKING_URI): {problem}")
    # Variables with which every call fails. Otherwise only the stage `register` would, at the end of the run.
    token = os.environ.get("MLFLOW_TRACKING_TOKEN", "")
    if token and not (token.isascii() and token.isprintable() and token == token.strip()):
        yield ConfigError(
            "MLFLOW_TRACKING_TOKEN: must be printable ASCII characters without blanks or line breaks around"
            f" them; got {HIDDEN}; take them off (a file read into a variable keeps its last line break in"
            " some shells)"
        )
    yield from check_also(config)
    for name, low, high in _NUMBERS:
        value = os.environ.get(name)
        if value is None:
            continue
        if re.fullmatch("[0-9]{1,4}", value) is None or not low <= int(value) <= high:
            yield ConfigError(
                f"{name}: must be a whole number from {low} to {high}; got {shown(value)}; correct or"
                " unset it"
            )
