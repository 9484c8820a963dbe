"""Fixtures of the unit tests."""

from __future__ import annotations

import gc
import logging
import os
import shutil
import sqlite3
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from rlhf_core.engines.distributed import Rank
from rlhf_core.system import heartbeat
from rlhf_core.tracking import database as databases
from tests.support.file_systems import without_hard_links
from tests.support.rank_threads import RankThreads

# Before Prefect is imported, as `set_up_logging` does: its console handler would keep the stream of the test
# that imports it first.
os.environ.setdefault("PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL", "CRITICAL")

OnTwoRanks = Callable[[Callable[[Any], Any]], Any]


@pytest.fixture(scope="module", autouse=True)
def quick_collections() -> None:
    """Collections leave out what the files before have imported: millions of objects, a second each time."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def no_log_handlers_left() -> Iterator[None]:
    """Remove the handlers of `set_up_logging`, which would write to the streams of a test that has ended."""
    yield
    for name in ("flows", "rlhf_cli", "rlhf_core"):
        logging.getLogger(name).handlers.clear()


@pytest.fixture(autouse=True)
def process_is_no_actor() -> Iterator[None]:
    """Fail if a test leaves this process as that of an actor: registered with a monitor, or with hidden
    packages.
    """
    yield
    registered = heartbeat._registration is not None
    heartbeat.unregister()
    hidden = [name for name, module in sys.modules.items() if module is None]
    for name in hidden:
        del sys.modules[name]
    assert not registered, "the test has to call `unregister`"
    assert not hidden, f"later tests could not import {hidden}"


@pytest.fixture(autouse=True)
def no_sampler_left() -> Iterator[None]:
    """Fail if a test leaves a thread that samples system metrics.

    The thread reads MLflow's database every ten seconds. If a later test forks during such a read, the fork
    inherits the lock of the read, and cannot write to the database.
    """
    yield
    names = [thread.name for thread in threading.enumerate()]
    assert "SystemMetricsMonitor" not in names, "the test has to call `finish` of its stage run"


@pytest.fixture(scope="session", autouse=True)
def migrated_once(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Make each database of MLflow a copy of one, because its migrations take seconds."""
    first = tmp_path_factory.mktemp("migrated") / "mlflow.db"
    create = databases._create

    def copy(file: Path, artifacts: str) -> None:
        if not first.exists():
            create(first, "file:///artifacts")
        shutil.copy(first, file)
        with closing(sqlite3.connect(file)) as made, made:
            made.execute("UPDATE experiments SET artifact_location = ? || '/0'", (artifacts,))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(databases, "_create", copy)
        yield


@pytest.fixture(scope="session")
def database(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A database of MLflow, which all tests of the registry share."""
    return tmp_path_factory.mktemp("mlflow") / "mlflow.db"


@pytest.fixture
def no_hard_links(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the file system one without hard links, as those of some network drives are."""
    without_hard_links(monkeypatch)


@pytest.fixture
def on_two_ranks() -> OnTwoRanks:
    """Call a function on both ranks of a group of two, and return the result of rank 0."""

    def run(call: Callable[[Any], Any]) -> Any:
        with RankThreads(2) as ranks:
            return ranks.run(lambda rank: call(Rank(rank=rank, world_size=2)))[0]

    return run
