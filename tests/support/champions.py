"""Candidates and champions of a registered model, for tests of the registry."""

from __future__ import annotations

import os
import sqlite3
import traceback
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

from mlflow.store.model_registry.sqlalchemy_store import SqlAlchemyStore as Registry
from mlflow.store.tracking.sqlalchemy_store import SqlAlchemyStore as Tracking

from rlhf_core.tracking.champion_log import Move, log_of, read_log
from rlhf_core.tracking.champions import REVOKED, WEIGHTS, move_champion
from rlhf_core.tracking.gate import Evaluation, Gate, Match, log_evidence
from rlhf_core.tracking.mlflow_client import Mlflow
from rlhf_core.tracking.registry import Candidate, register

OUTCOMES = [-1] * 10 + [1] * 90


def forked(action: Callable[[], object]) -> int:
    """Call `action` in a fork of this process, and return its ID. Its exit code is 1 after an error."""
    # A connection of SQLite must not be used in a fork of the process that opened it, and a fork inherits the
    # locks of open ones. No other thread may use the database meanwhile; see `no_sampler_left`.
    for store in (Registry, Tracking):
        for engine in store._engine_map.values():
            engine.dispose()
    child = os.fork()
    if child == 0:
        try:
            action()
            os._exit(0)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
    return child


def match_of(outcomes: list[int]) -> Match:
    wins = outcomes.count(1)
    return Match(
        wins / 100, 0.0, 1.0, 100, wins, 100 - wins,
        log_evidence=log_evidence(outcomes), outcomes=tuple(map(str, outcomes)),
    )  # fmt: skip


def enter(
    mlflow: Mlflow, model: str, digest: str, weights: str | None = None, outcomes: list[int] = OUTCOMES
) -> Any:
    met = []

    def run_match(tags: Any) -> Match:
        met.append(tags[WEIGHTS])
        return match_of(outcomes)

    record = Evaluation(0.8, 80, 20)
    tags = {WEIGHTS: weights or f"weights of {digest}"}
    done = register(
        mlflow,
        model,
        Candidate(f"/{digest}", digest, None, tags, record),
        gate=Gate(0.5),
        run_match=run_match,
    )
    return done, met


def make_champion(mlflow: Mlflow, model: str, move: Move) -> Move:
    """Make a move after all others."""
    return move_champion(mlflow, model, move, read_log(mlflow, model).last)


def copy_model(database: Path, model: str, name: str) -> None:
    """Add a registered model with the versions, tags, aliases and log of `model`."""
    _copy(database, model, name)
    _copy(database, log_of(model), log_of(name))


def _copy(database: Path, model: str, name: str) -> None:
    tables = ("registered_models", "model_versions", "registered_model_tags", "model_version_tags")
    with closing(sqlite3.connect(database, timeout=60.0)) as connection, connection:
        for table in (*tables, "registered_model_aliases"):
            columns = [column for _, column, *_ in connection.execute(f"pragma table_info({table})")]
            values = ", ".join("?" if column == "name" else column for column in columns)
            connection.execute(
                f"insert into {table} select {values} from {table} where name = ?", (name, model)
            )


def champion(mlflow: Mlflow, model: str) -> str | None:
    found = mlflow.by_alias(model, "champion")
    return found.version if found else None


def revoked(mlflow: Mlflow, model: str) -> dict[str, str]:
    return {each.version: each.tags[REVOKED] for each in mlflow.versions(model) if REVOKED in each.tags}
