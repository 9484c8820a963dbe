"""MLflow's SQLite file is whole or not there.

- killed at any moment while it is made, the next attempt makes it
- several processes at once make it once, and all can use it
"""

from __future__ import annotations

import os
import sqlite3
import subprocess
import sys
import time
from pathlib import Path

import pytest

MAKE = [sys.executable, "-m", "rlhf_core.tracking.database"]


def _tables(file: Path) -> set[str]:
    connection = sqlite3.connect(f"file:{file}?mode=ro", uri=True)
    try:
        return {name for (name,) in connection.execute("select name from sqlite_master where type = 'table'")}
    finally:
        connection.close()


def _usable(file: Path) -> bool:
    return {"runs", "experiments", "registered_models"} <= _tables(file) and not any(
        name.startswith("_alembic_tmp") for name in _tables(file)
    )


@pytest.mark.parametrize("moment", ["half way", "before the rename"])
def test_killed_creation_is_repeated(tmp_path: Path, moment: str) -> None:
    file, part = tmp_path / "new" / "mlflow.db", tmp_path / "new" / ".tmp-mlflow.db"
    fail = {"RLHF_FAIL": "mlflow.created:1:kill"} if moment == "before the rename" else {}
    maker = subprocess.Popen([*MAKE, str(file)], env={**os.environ, **fail}, stderr=subprocess.DEVNULL)
    enough = 200_000 if moment == "half way" else 2**40
    while maker.poll() is None and not (part.exists() and part.stat().st_size >= enough):
        time.sleep(0.002)
    maker.kill()
    maker.wait()
    assert not file.exists() and part.exists()
    subprocess.run([*MAKE, str(file)], check=True, stderr=subprocess.DEVNULL)
    assert _usable(file) and not part.exists()


def test_concurrent_processes_create_it_once(tmp_path: Path) -> None:
    file = tmp_path / "mlflow.db"
    environment = {**os.environ, "MLFLOW_LOGGING_LEVEL": "INFO"}
    makers = [
        subprocess.Popen([*MAKE, str(file)], env=environment, stderr=subprocess.PIPE, text=True)
        for _ in range(3)
    ]
    errors = [maker.communicate()[1] for maker in makers]
    assert [maker.returncode for maker in makers] == [0, 0, 0], errors
    assert sum("Creating initial MLflow database tables" in text for text in errors) == 1
    assert _usable(file)
