"""MLflow's SQLite file, whole or not at all.

MLflow makes its tables in about fifty migrations. A kill in the middle, or two processes at it at once, would leave a
file that no later MLflow can use. So it is made under another name, by one process at a time, and then renamed.
"""

from __future__ import annotations

from pathlib import Path

from filelock import FileLock

from rlhf_core.failpoints import failpoint


def ensure_database(file: Path) -> None:
    """Make the absolute `file` unless it is there; takes seconds then. Raises what MLflow and the disk raise."""
    if file.exists():
        return
    file.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(file.with_name(f".{file.name}.lock")):
        if file.exists():
            return
        part = file.with_name(f".{file.name}.part")
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
