"""MLflow's SQLite file: creates it atomically, follows a move of its folder, and names the command that shows
it.

MLflow creates its tables in about fifty migrations. A kill in between, or two processes at once, would leave
a file that MLflow cannot use any more. The file is therefore created under another name, by one process at a
time, and then renamed.
"""

from __future__ import annotations

import logging
import os
import shlex
import sqlite3
import sys
from contextlib import closing
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import url2pathname

from filelock import FileLock, Timeout

from rlhf_core.config.base import server_problem
from rlhf_core.config.redact import shown
from rlhf_core.errors import ConfigError, InfrastructureError
from rlhf_core.system.failpoints import failpoint
from rlhf_core.system.files import TEMPORARY, unfit
from rlhf_core.system.home import mlflow_artifacts_of

log = logging.getLogger(__name__)

_ADDRESSES = (
    ("experiments", "artifact_location"),
    ("runs", "artifact_uri"),
    ("logged_models", "artifact_location"),
)
"""Tables and columns of MLflow with addresses of artifacts."""
MACHINE_LEARNING = "workflowType=machine_learning"
"""Query of a page of MLflow in its view for training."""
_SCHEMES = ("http", "https", "sqlite", "postgresql", "mysql", "mssql")
LOCK_SECONDS = 120.0
"""Migrations take a few seconds, a minute on a busy machine."""


def ensure_database(file: Path) -> None:
    """Create the absolute `file` unless it exists, which takes seconds. If its folder was moved or copied,
    correct the addresses of the artifacts in it.

    Raises ConfigError if it is not a regular file, InfrastructureError if another process creates it for too
    long, and the errors of MLflow and the disk.
    """
    if problem := database_problem(file):
        raise ConfigError(f"tracking.uri (or MLFLOW_TRACKING_URI): {problem}")
    if file.exists():
        _follow_artifacts(file)
        return
    file.parent.mkdir(parents=True, exist_ok=True)
    lock = file.with_name(f".{file.name}.lock")
    try:
        # By flock, which the kernel releases if the process is killed: no stale lock is left.
        with FileLock(lock, timeout=LOCK_SECONDS):
            if not file.exists():
                _make(file)
    except Timeout as error:
        raise InfrastructureError(
            f"another process has held {lock} for {LOCK_SECONDS:g} s to make {file.name}; wait for it, or"
            " end it"
        ) from error


def database_problem(file: Path) -> str | None:
    """Return the reason for which `file` cannot be a database, with a fix, or None. It may be missing.

    SQLite would wait for the writer of a FIFO.
    """
    problem = unfit(file)
    if problem is None or isinstance(problem, FileNotFoundError):
        return None
    return f"{problem}; remove it, or name another file"


def _make(file: Path) -> None:
    # A fixed name, so that a new attempt deletes what a killed one left, with SQLite's own journal files.
    temporary = file.with_name(f"{TEMPORARY}{file.name}")
    for leftover in temporary.parent.glob(f"{temporary.name}*"):
        leftover.unlink()
    _create(temporary, artifacts_of(file))
    failpoint("mlflow.created")
    temporary.replace(file)


def _follow_artifacts(file: Path) -> None:
    """Correct the addresses of the artifacts if they are those of another folder.

    MLflow stores absolute addresses. After the folder of a database was moved or copied, it would write to
    the old place. The experiment 0, which every database has, tells the old place. Addresses of a database
    that was not created here, and artifacts that were not moved with it, stay as they are.
    """
    folder = mlflow_artifacts_of(file)
    if not folder.is_dir() or not os.access(file, os.W_OK):
        return
    try:
        with closing(sqlite3.connect(f"{file.as_uri()}?mode=ro", uri=True)) as database:
            query = "SELECT artifact_location FROM experiments WHERE experiment_id = 0"
            [location] = database.execute(query).fetchone() or [""]
        address = str(location).removesuffix("/0")
        before = Path(url2pathname(urlsplit(address).path))
        if not address.startswith("file:///") or before.name != folder.name:
            return
        if before == folder or (before.exists() and before.samefile(folder)):  # the second through a link
            return
        with closing(sqlite3.connect(file, timeout=LOCK_SECONDS)) as database, database:
            # MLflow's server writes paths in place of addresses.
            for old, new in ((address, folder.as_uri()), (str(before), str(folder))):
                for table, column in _ADDRESSES:
                    database.execute(
                        # `substr` and not LIKE, for which `_` and `%` in a path are wildcards.
                        f"UPDATE {table} SET {column} = :new || substr({column}, length(:old) + 1)"
                        f" WHERE {column} = :old OR substr({column}, 1, length(:old) + 1) = :old || '/'",
                        {"old": old, "new": new},
                    )
    except sqlite3.Error:
        return  # MLflow opens it next, and says what is wrong
    log.warning("%s was moved: its artifacts are in %s now, and no longer in %s", file, folder, before)


def artifacts_of(file: Path) -> str:
    """Return the address of the artifacts of a tracker whose database is `file`."""
    return mlflow_artifacts_of(file).as_uri()


def _create(file: Path, artifacts: str) -> None:
    from mlflow.store.tracking.sqlalchemy_store import SqlAlchemyStore

    store = SqlAlchemyStore(f"sqlite:///{file}", artifacts)
    # `_make` renames the file next. SQLite can corrupt a database that is renamed under an open connection.
    store.engine.dispose()


def training_page(server: str) -> str:
    """Return the page of an MLflow server with the runs of trainings. Its default page has prompts and
    traces.
    """
    return f"{server.rstrip('/')}/#/experiments?{MACHINE_LEARNING}"


def ui_command(uri: str) -> str:
    """Return the command, for a shell, that shows a database in MLflow's UI."""
    mlflow = Path(sys.executable).parent / "mlflow"
    here = mlflow.relative_to(Path.cwd()) if mlflow.is_relative_to(Path.cwd()) else mlflow
    return shlex.join([str(here), "ui", "--backend-store-uri", uri])


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


if __name__ == "__main__":
    ensure_database(Path(sys.argv[1]))
