"""MLflow's SQLite file, whole or not at all.

MLflow makes its tables in about fifty migrations. A kill in the middle, or two processes at it at once, would
leave a file that no later MLflow can use. So it is made under another name, by one process at a time, and
then renamed.
"""

from __future__ import annotations

from pathlib import Path

from filelock import FileLock, Timeout

from rlhf_core.errors import InfrastructureError
from rlhf_core.system.failpoints import failpoint
from rlhf_core.system.files import TEMPORARY

LOCK_SECONDS = 120.0
"""Migrations take a few seconds, a minute on a busy machine."""


def ensure_database(file: Path) -> None:
    """Make the absolute `file` unless it is there; takes seconds then. Raises InfrastructureError where
    another process is at it and does not end, and what MLflow and the disk raise.
    """
    if file.exists():
        return
    file.parent.mkdir(parents=True, exist_ok=True)
    lock = file.with_name(f".{file.name}.lock")
    try:
        with FileLock(lock, timeout=LOCK_SECONDS):
            if not file.exists():
                _make(file)
    except Timeout as error:
        raise InfrastructureError(
            f"another process has held {lock} for {LOCK_SECONDS:g} s to make {file.name}; wait for it, or"
            " end it"
        ) from error


def _make(file: Path) -> None:
    part = file.with_name(f"{TEMPORARY}{file.name}")
    for left in part.parent.glob(f"{part.name}*"):
        left.unlink()
    _create(part, artifacts_of(file))
    failpoint("mlflow.created")
    part.replace(file)


def artifacts_of(file: Path) -> str:
    """Where a tracker whose database is `file` keeps artifacts."""
    return (file.parent / "mlartifacts").as_uri()


def _create(file: Path, artifacts: str) -> None:
    from mlflow.store.tracking.sqlalchemy_store import SqlAlchemyStore

    store = SqlAlchemyStore(f"sqlite:///{file}", artifacts)
    store.engine.dispose()


if __name__ == "__main__":
    import sys

    ensure_database(Path(sys.argv[1]))
