"""Names of metrics: MLflow refuses a whole batch for one name. Real MLflow on SQLite.

Locks: every name is accepted, long names stay different, a run that accepts nothing loses nothing.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from mlflow.tracking import MlflowClient

from rlhf_core.tracking.mlflow_client import Mlflow, clean_name
from rlhf_core.tracking.tracker import StageRun, Tracking


@pytest.fixture
def client(database: Path) -> MlflowClient:
    return MlflowClient(f"sqlite:///{database}")


@pytest.fixture
def run(database: Path, tmp_path: Path) -> StageRun:
    tracking = Tracking(Mlflow(f"sqlite:///{database}", "names"), tmp_path / "spool")
    return tracking.stage_run(None, "ppo", tmp_path.name)


@pytest.mark.parametrize(
    "name",
    [".", "..", "/", "a/.", "./a", "a//b", "/a", "a/", "a/../b", "../a", "a/ ", "", "\udce9\n", "é" * 300],
)  # fmt: skip
def test_every_name_is_accepted(run: StageRun, client: MlflowClient, name: str) -> None:
    run.log_metrics({name: 1.0, f"eval/accuracy_by_source/{name}": 2.0, "loss": 3.0}, 1)
    run.finish("FINISHED")
    assert run.unsent == 0
    assert sorted(client.get_run(run.run_id).data.metrics.values()) == [1.0, 2.0, 3.0]


def test_long_names_with_the_same_beginning_stay_different(run: StageRun, client: MlflowClient) -> None:
    assert clean_name("a" * 250) == "a" * 250
    run.log_metrics({f"by_source/{'x' * 240}/{name}": 1.0 for name in ("win_rate", "kl", "length")}, 1)
    run.flush()
    names = client.get_run(run.run_id).data.metrics
    assert len(names) == 3 and {len(name) for name in names} == {250}
    assert all(clean_name(name) == name for name in names), "a name that was cleaned stays the same"


def test_a_run_that_accepts_nothing_loses_nothing(run: StageRun, client: MlflowClient) -> None:
    client.delete_run(run.run_id)
    run.log_metrics({"loss": 2.0, "kl": 3.0}, 1)
    run.flush()
    assert run.unsent == 2
    client.restore_run(run.run_id)
    run.finish("FINISHED")
    assert run.unsent == 0
    assert client.get_run(run.run_id).data.metrics == {"loss": 2.0, "kl": 3.0}
