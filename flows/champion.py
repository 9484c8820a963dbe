"""The champion in Prefect: flows with a form, for people who do not use the command line."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Annotated, Any

from prefect import flow, runtime
from prefect.artifacts import create_table_artifact
from pydantic import Field

from flows.notify import emit, notify, notify_failure
from rlhf_core.tracking import champion_log, champions
from rlhf_core.tracking.mlflow_client import open_registry

# Prefect's form shows these rules, and a flow run with other values ends before MLflow is asked.
ModelName = Annotated[str, Field(pattern=r"^[\w.-]{1,100}$")]
Version = Annotated[str, Field(pattern=r"^[1-9]\d*$")]
Target = Annotated[str, Field(pattern=r"^([1-9]\d*|none)$")]
Reason = Annotated[str, Field(min_length=3, max_length=1000)]


@flow(
    name="rlhf-rollback",
    flow_run_name="{model}-rollback",
    persist_result=False,
    on_failure=[notify_failure],
    on_crashed=[notify_failure],
)
def rollback(model: ModelName, reason: Reason, to: Target | None = None, home: str = ".rlhf") -> str:
    """Take the champion back: revoke it, and make an earlier version champion.

    Args:
        model: Name of the registered model.
        reason: Why. It is kept in the history of champions.
        to: Version that becomes champion, or `none`; default: the last champion that is not revoked.
        home: Folder with the database of MLflow, as the worker sees it; MLFLOW_TRACKING_URI overrides it.
    """
    mlflow = open_registry(home)
    move, changed = champions.rollback(mlflow, model, reason, to)
    publish_history(model, champions.history(mlflow, model))
    if changed or _is_asked_again(move, "rolled_back", reason):
        target = f"version {move.version}" if move.version else "no champion"
        emit(
            "policy.rolled-back", f"model.{model}", version=move.version or champions.NONE, reason=move.reason
        )
        notify(f"{model} rolled back to {target}", move.reason)
    return move.version or champions.NONE


@flow(
    name="rlhf-promote",
    flow_run_name="{model}-{version}",
    persist_result=False,
    on_failure=[notify_failure],
    on_crashed=[notify_failure],
)
def promote(model: ModelName, version: Version, reason: Reason, home: str = ".rlhf") -> str:
    """Make a version champion by the decision of a person.

    Args:
        model: Name of the registered model.
        version: Number of the version.
        reason: Why. It is kept in the history of champions.
        home: Folder with the database of MLflow, as the worker sees it; MLFLOW_TRACKING_URI overrides it.
    """
    mlflow = open_registry(home)
    move, changed = champions.promote(mlflow, model, version, reason)
    publish_history(model, champions.history(mlflow, model))
    if changed or _is_asked_again(move, "promoted", reason):
        emit("policy.promoted", f"model.{model}", version=version, reason=move.reason)
        notify(f"{model} version {version} promoted", move.reason)
    return version


def _is_asked_again(move: champion_log.Move, action: champion_log.Action, reason: str) -> bool:
    """Return whether a restarted flow run asked for this move. Then it may have been killed between the move
    and the notification.
    """
    return runtime.flow_run.run_count > 1 and (move.action, move.reason) == (action, reason)


def publish_history(model: str, moves: list[champion_log.Move]) -> None:
    """Show the history of champions as a table of the flow run."""
    rows: list[dict[str, Any]] = []
    for move in reversed(moves):
        rows.append(
            {
                "time (UTC)": f"{datetime.fromtimestamp(move.time, UTC):%Y-%m-%d %H:%M}",
                "version": move.version or champions.NONE,
                "action": champion_log.ACTION_NAMES[move.action],
                "previous": move.previous or "",
                "reason": move.reason,
                "state": move.state,
            }
        )
    create_table_artifact(table=rows, key="champions", description=f"Champions of {model}, newest first")
