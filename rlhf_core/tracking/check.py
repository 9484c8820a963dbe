"""Check of the address and the environment variables of MLflow before anything is started.

The module does not import mlflow.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator

from rlhf_core.config.base import server_problem
from rlhf_core.config.keys import given_tracking_uri, tracking_uri
from rlhf_core.config.pipeline import PipelineConfig
from rlhf_core.config.redact import HIDDEN, shown
from rlhf_core.errors import ConfigError, Finding
from rlhf_core.tracking.also import check_also
from rlhf_core.tracking.database import database_problem
from rlhf_core.tracking.mlflow_client import sqlite_path

_SCHEMES = ("http", "https", "sqlite", "postgresql", "mysql", "mssql")
_NUMBERS = (("MLFLOW_HTTP_REQUEST_TIMEOUT", 1, 3600), ("MLFLOW_HTTP_REQUEST_MAX_RETRIES", 0, 10))
"""Numeric variables of MLflow's client, with their smallest and largest values."""


def tracker_problem(uri: str) -> str | None:
    """Return the reason for which `uri` cannot be MLflow's tracking URI, with a fix, or None."""
    scheme, separator, rest = uri.partition("://")
    kind = scheme.split("+")[0]  # postgresql+psycopg2://
    if not separator or kind not in _SCHEMES:
        got = f"scheme {scheme[:20]}://" if separator else shown(uri)
        return (
            f"must begin with one of {', '.join(_SCHEMES)}; got {got}; use http://host:port or"
            " sqlite:///path/of/a/file.db"
        )
    if kind == "sqlite":
        names_file = rest.startswith("/") and len(rest) > 1
        # `#`, `%` and `?` have a meaning in a URL, so that another file would be opened.
        if not names_file or any(sign in rest for sign in "#%?"):
            return f"must be sqlite:///path/of/a/file.db; got {shown(uri)}; name the file"
    elif not rest.strip("/"):
        return f"must name a host; got {shown(uri)}; use http://host:port"
    elif kind not in ("http", "https"):
        return _driver_problem(uri)
    elif any(sign in rest for sign in "?#"):
        return f"must have no query and no fragment; got {shown(uri)}; use http://host:port"
    # Otherwise only the stage `register` would fail: a run continues without a server that does not answer.
    elif problem := server_problem(uri):
        return f"cannot be the address of a server: {problem}; got {shown(uri)}; correct it"
    return None


def _driver_problem(uri: str) -> str | None:
    """Return the reason for which the database at `uri` cannot be used from this environment, or None."""
    from sqlalchemy.engine import make_url
    from sqlalchemy.exc import SQLAlchemyError

    try:
        make_url(uri).get_dialect().import_dbapi()
    except ImportError as error:
        return (
            f"needs the driver of its database ({error}); got {shown(uri)}; install the package, name another"
            " driver, such as postgresql+psycopg2://, or use the address of an MLflow server, http://host:port"
        )
    except (SQLAlchemyError, ValueError):
        return f"is no address of a database; got {shown(uri)}; use postgresql+psycopg2://user@host:port/name"
    return None


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
