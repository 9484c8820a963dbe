"""The flow `rlhf-retrain` runs the pipeline if new data are found, and records its start and end.

- without a record of the start, nothing is trained
- a poll that fails is a notification
"""

from __future__ import annotations

import json
import logging
import shutil
import sqlite3
from pathlib import Path
from typing import Any

import pytest
from prefect.client.schemas.objects import StateType

from flows.notify import notify_failure
from flows.retrain import retrain, retrain_if_due
from rlhf_core.config.load import load_config
from rlhf_core.errors import DataError
from rlhf_core.ops.retraining import Retraining
from rlhf_core.tracking.champions import WEIGHTS
from tests.support.prefect_api import PrefectApi

DEMO = "deployments/configs/demo.yaml"
DIGEST = "a" * 64


@pytest.fixture
def overrides(database: Path, tmp_path: Path) -> tuple[str, ...]:
    """Overrides for a configuration with files of its own, and its own copy of a database of MLflow."""
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps({"prompt": "fox", "completion": "It runs."}) + "\n")
    overrides = (
        "run.name=retrained",
        f"run.home={tmp_path}/home",
        f"store.url={tmp_path}/store",
        f"data.sft=[{{path: {rows}}}]",
    )
    # The migrations of a new database take seconds.
    Retraining(load_config(DEMO, (*overrides, f"tracking.uri=sqlite:///{database}")))
    own = tmp_path / "mlflow.db"
    shutil.copyfile(database, own)
    return (*overrides, f"tracking.uri=sqlite:///{own}")


def test_the_pipeline_runs_if_it_is_due(
    overrides: tuple[str, ...], caplog: pytest.LogCaptureFixture, api: PrefectApi
) -> None:
    config = load_config(DEMO, overrides)
    retraining = Retraining(config)
    decision = retraining.check(min_new_rows=0, min_pause_hours=0)
    assert decision.due
    during: list[str] = []

    def pipeline() -> dict[str, Any]:
        during.append(Retraining(config).check(min_new_rows=0, min_pause_hours=2).message)
        mlflow = retraining._tracking.mlflow
        name = config.registered_model
        mlflow.create_version(name, source="/x", run_id=None, tags={WEIGHTS: DIGEST}, description="")
        return {"weights_sha256": DIGEST, "registration": {"champion": False, "reason": "it lost"}}

    with caplog.at_level(logging.INFO, "flows"):
        made: Any = retrain_if_due(retraining, decision, pipeline)
    assert (made.name, made.message) == ("Completed", "not promoted")
    assert "training begins: no retraining with these settings has finished yet" in caplog.text
    [page] = api.artifacts
    assert page["data"] == "Training began: no retraining with these settings has finished yet"
    assert during == ["0.0 hours since the last start, of 2"], "the start was recorded before"
    state: Any = retrain.fn(DEMO, overrides)
    assert (state.name, state.message) == ("Unchanged", "the sources look as after the last retraining")


def test_nothing_is_trained_without_a_record_of_the_start(overrides: tuple[str, ...], tmp_path: Path) -> None:
    retraining = Retraining(load_config(DEMO, overrides))
    decision = retraining.check(min_new_rows=0, min_pause_hours=0)
    assert decision.due
    with sqlite3.connect(tmp_path / "mlflow.db") as connection:
        connection.execute("DROP TABLE registered_model_tags")
    connection.close()
    state: Any = retrain_if_due(retraining, decision, lambda: pytest.fail("it was trained"))
    assert (state.name, state.type) == ("Waiting", StateType.COMPLETED)


def test_nothing_is_trained_before_it_is_due(overrides: tuple[str, ...], tmp_path: Path) -> None:
    retraining = Retraining(load_config(DEMO, overrides))
    assert retraining.check(min_new_rows=0, min_pause_hours=0).due
    retraining.record_start()
    retraining.record_end(DIGEST)
    with (tmp_path / "rows.jsonl").open("a") as rows:
        rows.write(json.dumps({"prompt": "fox", "completion": "It jumps."}) + "\n")
    changed = Retraining(load_config(DEMO, overrides)).check(min_new_rows=0, min_pause_hours=0)
    assert changed.message == "the sources have changed: data.sft[0] (+1 rows)"
    state: Any = retrain.fn(DEMO, overrides, min_new_rows=5)
    assert (state.name, state.type) == ("Waiting", StateType.COMPLETED)
    assert state.message == "1 new rows, of 5 that are needed"
    state = retrain.fn(DEMO, overrides, min_pause_hours=2.0)
    assert (state.name, state.message) == ("Waiting", "0.0 hours since the last start, of 2")


def test_a_check_that_fails_sends_a_notification(
    overrides: tuple[str, ...], tmp_path: Path, api: PrefectApi
) -> None:
    (tmp_path / "rows.jsonl").unlink()
    with pytest.raises(DataError):
        retrain.fn(DEMO, overrides)
    [(subject, body)] = api.messages
    assert subject == "demo-seed0-a1 failed"
    assert body.startswith("DataError: ") and f"{tmp_path}/rows.jsonl" in body
    assert retrain.on_crashed_hooks == [notify_failure]
