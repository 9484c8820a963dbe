"""Metrics of a stage are copied to other trackers (`tracking.also`).

- each point is copied once, also by a run that is continued, and only after MLflow has it
- a tracker that fails is named once and left out, and MLflow has everything
- a package that is missing is an error before the run
- TensorBoard, wandb and trackio themselves have the points, where they are installed
"""

from __future__ import annotations

import json
import logging
import sqlite3
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from rlhf_core.config.load import config_from_tree
from rlhf_core.tracking import also
from rlhf_core.tracking.also import Copies
from rlhf_core.tracking.check import check_tracking
from rlhf_core.tracking.mlflow_client import Mlflow, Point
from rlhf_core.tracking.stage_run import Pauses
from rlhf_core.tracking.tracker import Tracking

POINTS = [Point("loss", 0.5, 1, 0), Point("kl", 2.0, 1, 0), Point("loss", 0.25, 2, 0)]


class Recorder:
    """Keeps what is logged, as (name of the run, step, metrics)."""

    def __init__(self, folder: Path, project: str, name: str) -> None:
        self.name, self.place = name, (folder, project)
        self.logged: list[tuple[str, int, dict[str, float]]] = []
        self.is_closed = False
        runs.append(self)

    def log(self, metrics: dict[str, float], step: int) -> None:
        self.logged.append((self.name, step, metrics))

    def close(self) -> None:
        self.is_closed = True


runs: list[Recorder] = []


@pytest.fixture(autouse=True)
def recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    runs.clear()
    monkeypatch.setitem(also._TRACKERS, "recorder", Recorder)


def tracking(tmp_path: Path, *names: str) -> Tracking:
    copies = partial(Copies, names, tmp_path / "also", "rlhf/demo")
    mlflow = Mlflow(f"sqlite:///{tmp_path / 'mlflow.db'}", "rlhf/demo")
    return Tracking(mlflow, tmp_path / "spool", pauses=Pauses(first=0.0), copies=copies)


def test_a_run_that_is_continued_copies_each_point_once(tmp_path: Path) -> None:
    first = tracking(tmp_path, "recorder").stage_run(None, "ppo", "k1", attempt=1)
    first.log_metrics({"loss": 1.0}, 1)
    first.log_metrics({"loss": 0.5, "kl": 3.0}, 2)
    first.flush()
    first.log_metrics({"loss": 9.0}, 3)  # not sent: the process is killed here
    continued = tracking(tmp_path, "recorder").stage_run(None, "ppo", "k1", attempt=2)
    for step in (2, 3, 4):  # from the checkpoint of step 1
        continued.log_metrics({"loss": float(step)}, step)
    continued.finish("FINISHED")
    logged = [entry for run in runs for entry in run.logged]
    assert logged == [
        ("ppo-k1", 1, {"loss": 1.0}),
        ("ppo-k1", 2, {"loss": 0.5, "kl": 3.0}),
        ("ppo-k1", 3, {"loss": 3.0}),
        ("ppo-k1", 4, {"loss": 4.0}),
    ]
    assert runs[-1].is_closed and runs[0].place == (tmp_path / "also", "rlhf-demo")


def test_nothing_is_opened_without_points(tmp_path: Path) -> None:
    tracking(tmp_path, "recorder").stage_run(None, "data", "k1").finish("FINISHED")
    assert runs == []


def test_a_tracker_that_fails_is_left_out_with_one_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Broken(Recorder):
        """Fails at its second step."""

        def log(self, metrics: dict[str, float], step: int) -> None:
            if step == 2:
                raise OSError("disk full")
            super().log(metrics, step)

    monkeypatch.setitem(also._TRACKERS, "broken", Broken)
    copies = Copies(["broken", "missing", "recorder"], tmp_path, "p", "n")
    with caplog.at_level(logging.WARNING):
        copies.log(POINTS)
        copies.log([Point("loss", 0.1, 3, 0)])
        copies.close()
    broken, recorder = runs
    assert [step for _, step, _ in broken.logged] == [1]
    assert [step for _, step, _ in recorder.logged] == [1, 2, 3]
    assert len(caplog.messages) == 2 and "broken gets no more metrics" in caplog.text


def test_a_missing_package_is_an_error_before_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    installed = {"tensorboard": None, "trackio": object()}
    monkeypatch.setattr(also, "find_spec", lambda name: installed[name])
    config = config_from_tree({"tracking": {"also": ["tensorboard", "trackio"]}})
    (finding,) = check_tracking(config)
    assert "tracking.also: tensorboard needs the package tensorboard" in str(finding)


def test_tensorboard_has_the_points(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for points in (POINTS[:2], POINTS[2:]):  # two attempts
        copies = Copies(["tensorboard"], tmp_path, "rlhf/demo", "ppo-k1")
        copies.log(points)
        copies.close()
    found = EventAccumulator(str(tmp_path / "rlhf-demo" / "ppo-k1"))
    found.Reload()
    assert [(each.step, each.value) for each in found.Scalars("loss")] == [(1, 0.5), (2, 0.25)]
    assert [(each.step, each.value) for each in found.Scalars("kl")] == [(1, 2.0)]


def test_wandb_has_the_points(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    copies = Copies(["wandb"], tmp_path, "rlhf/demo", "ppo-k1")
    copies.log(POINTS)
    run: Any = copies._copies["wandb"]
    assert dict(run._run.summary)["loss"] == 0.25
    assert (run._run.id, run._run.project) == ("ppo-k1", "rlhf-demo")
    copies.close()
    assert list(tmp_path.rglob("*.wandb"))


def test_trackio_has_the_points(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path))
    pytest.importorskip("trackio")
    for points in (POINTS[:2], POINTS[2:]):  # two attempts
        copies = Copies(["trackio"], tmp_path, "rlhf/demo", "ppo-k1")
        copies.log(points)
        copies.close()
    (database,) = tmp_path.rglob("*.db")
    with sqlite3.connect(database) as connection:
        rows = connection.execute("select step, metrics from metrics order by step").fetchall()
    found = [(step, json.loads(metrics)) for step, metrics in rows]
    assert found == [(1, {"loss": 0.5, "kl": 2.0}), (2, {"loss": 0.25})]
