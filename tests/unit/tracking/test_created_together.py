"""Two processes that create the same thing in MLflow at the same time. Real MLflow on SQLite.

- two commands of one pipeline have one parent run, with its parameters
- two registrations of a new model have one registered model
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mlflow import MlflowClient
from mlflow.exceptions import MlflowException
from mlflow.protos.databricks_pb2 import RESOURCE_DOES_NOT_EXIST

from rlhf_core.tracking.mlflow_client import Mlflow, RunState
from rlhf_core.tracking.tracker import Tracking


class CreatedTwice(Mlflow):
    """Another process creates each run too, after this one has not found it."""

    def create_run(self, name: str, tags: Mapping[str, str]) -> RunState:
        self.other = super().create_run(name, tags)
        time.sleep(0.01)  # start times are milliseconds
        return super().create_run(name, tags)


class CreatedMeanwhile:
    """MLflow's client. Another process creates each model after this one has not found it."""

    def __init__(self, client: Any) -> None:
        self._client = client

    def get_registered_model(self, name: str) -> None:
        self._client.create_registered_model(name)
        raise MlflowException("no such model", error_code=RESOURCE_DOES_NOT_EXIST)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)


def test_two_commands_of_one_pipeline_have_one_run(tmp_path: Path, database: Path) -> None:
    mlflow = CreatedTwice(f"sqlite:///{database}", "created together")
    parent = Tracking(mlflow, tmp_path / "spool").parent_run("together", "demo", params={"run.seed": 3})
    assert parent == mlflow.other.run_id
    found = MlflowClient(mlflow.uri).search_runs([mlflow.experiment_id])
    assert [(run.info.run_id, run.data.params) for run in found] == [(parent, {"run.seed": "3"})]


def test_two_registrations_of_a_new_model_have_one_model(database: Path) -> None:
    mlflow = Mlflow(f"sqlite:///{database}", "created together")
    mlflow.__dict__["_client"] = CreatedMeanwhile(mlflow._client)
    mlflow.ensure_model("created together", "")
    assert Mlflow(mlflow.uri, "created together").model_tags("created together") == {}
