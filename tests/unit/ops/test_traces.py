"""What `rlhf prune --also` deletes outside the store, and of artifacts without weights.

- nothing without `--also`; with it, what is older than the age of its kind, and of no run that is kept
- a run is kept if its policy is, while it is young or unfinished, or if people have voted
- runs in MLflow are deleted for good, also after a kill, and not if they ran again; nothing else in its trash
"""

from __future__ import annotations

import json
import os
import shutil
import sqlite3
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from rlhf_cli import main as cli
from rlhf_core.errors import InputError
from rlhf_core.ops.prune import (
    DAY,
    Pruning,
    parse_kinds,
    remove_from_home,
    remove_from_mlflow,
    traces_of_home,
    traces_of_mlflow,
)
from rlhf_core.ops.retention import KINDS, Reason, Trace
from rlhf_core.storage.store import Store
from rlhf_core.system.home import Home
from rlhf_core.tracking.mlflow_client import Mlflow
from rlhf_core.tracking.tracker import PARENT, PIPELINE_KEY, STAGE, STAGE_KEY
from rlhf_core.types import ArtifactRef
from tests.support.old_runs import INPUTS, OldRuns, names

ALL = dict.fromkeys(KINDS, 30 * DAY)
NOT_TRAINED = {"data", "evaluate", "register"}


@pytest.fixture
def home(new_home: Callable[[Path], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    return new_home(tmp_path / "home")


@pytest.fixture
def mlflow(home: Path) -> Mlflow:
    return Mlflow(f"sqlite:///{home}/mlflow.db", "pruned")


@pytest.fixture
def runs(home: Path, mlflow: Mlflow, tmp_path: Path) -> OldRuns:
    return OldRuns(Store(home / "store"), tmp_path / "work", mlflow)


def leave_traces(
    home: Path, mlflow: Mlflow, run: str, made: Mapping[Any, ArtifactRef], **changes: Any
) -> None:
    """Leave what a run leaves outside the store."""
    folder, logs = home / "runs" / run, home / "logs" / run
    for each in (folder, logs):
        each.mkdir(parents=True)
    stages = {stage: {"key": ref.key} for stage, ref in made.items()}
    state = {"state": "finished", "config": "c.yaml", "updated": time.time(), "stages": stages, **changes}
    (folder / "run.json").write_text(json.dumps(state))
    (logs / "ppo-01.log").write_text("step 1")
    pipeline = mlflow.create_run(run, {PIPELINE_KEY: run}).run_id
    (logs / "notes.txt").write_text(run)
    mlflow.log_file(pipeline, logs / "notes.txt", "")
    for stage, ref in made.items():
        tags = {PARENT: pipeline, STAGE: stage, STAGE_KEY: ref.key}
        mlflow.terminate(mlflow.create_run(stage, tags).run_id, "FINISHED")
    if state["state"] == "finished":
        mlflow.terminate(pipeline, "FINISHED")


def pruning(runs: OldRuns, mlflow: Mlflow, home: Path, also: Mapping[str, float]) -> Pruning:
    """The command, a hundred days from now."""
    return Pruning(
        runs.store, mlflow, Home.of(home), 90 * DAY, also=also, now=lambda: time.time() + 100 * DAY
    )


def left(home: Path, mlflow: Mlflow) -> dict[str, set[str]]:
    """Return the names of the runs that have traces of each kind."""
    found: dict[str, set[str]] = {"mlflow": set(), "runs": set(), "logs": set()}
    for trace in [*traces_of_home(Home.of(home)), *traces_of_mlflow(mlflow, Home.of(home), KINDS)]:
        found[trace.kind].add(trace.name)
    return found


def test_only_kinds_that_are_named_are_deleted_and_only_of_runs_that_are_not_kept(
    runs: OldRuns, home: Path, mlflow: Mlflow
) -> None:
    made = {name: runs.run(name) for name in ("champion", "refused", "stopped", "voted", "young", "newest")}
    for name, artifacts in made.items():
        changes: dict[str, Any] = {}
        if name == "stopped":
            changes = {"state": "failed"}
        elif name == "young":
            changes = {"updated": time.time() + 80 * DAY}
        leave_traces(home, mlflow, name, artifacts, **changes)
        version = runs.register(name, artifacts)
        if name == "champion":
            runs.crown(version)
    (home / "runs" / "voted" / "review").mkdir()
    database = (home / "mlflow.db").stat().st_size

    def delete(also: Mapping[str, float]) -> None:
        command = pruning(runs, mlflow, home, also)
        for _ in command.delete(command.plan()):
            pass

    delete({})
    weights = {"refused", "stopped", "voted", "young"}
    # The run `young` has reused its artifacts: they are as old as the others, and kept with it.
    gone = {name for run in weights - {"young"} for name in names(made[run], "sft", "reward", "ppo")}
    everything = {name for artifacts in made.values() for name in names(artifacts)}
    assert runs.present() == everything - gone
    assert all(names_left == set(made) for names_left in left(home, mlflow).values())

    # Younger than the ages of these kinds.
    delete(dict.fromkeys(KINDS, 200 * DAY))
    assert runs.present() == everything - gone
    delete({"logs": 30 * DAY})
    kept = set(made) - {"refused"}
    assert left(home, mlflow) == {"mlflow": set(made), "runs": set(made), "logs": kept}
    assert runs.present() == everything - gone
    delete(ALL)
    assert left(home, mlflow) == {"mlflow": kept, "runs": kept, "logs": kept}
    assert runs.present() == everything - gone - {
        each for each in names(made["refused"]) if each.stage in NOT_TRAINED
    }
    with sqlite3.connect(home / "mlflow.db") as connection:
        assert connection.execute("SELECT count(*) FROM runs").fetchone() == (len(kept) * (1 + len(INPUTS)),)
    files = {file.read_text() for file in (home / "mlartifacts").rglob("notes.txt")}
    assert files == kept and (home / "mlflow.db").stat().st_size <= database


def test_a_run_of_another_store_is_kept(runs: OldRuns, home: Path, mlflow: Mlflow, tmp_path: Path) -> None:
    runs.run("here")
    # The same data give the same key in both stores.
    runs.publish("there", "data")
    made = OldRuns(Store(tmp_path / "other"), tmp_path / "work").run("there")
    leave_traces(home, mlflow, "there", made)
    plan = pruning(runs, mlflow, home, ALL).plan()
    for kind in ("mlflow", "runs", "logs"):
        assert len(plan.groups()[kind, Reason.OTHER_STORE]) == 1


def test_artifacts_of_a_run_that_only_mlflow_knows_are_kept_with_it(
    runs: OldRuns, home: Path, mlflow: Mlflow
) -> None:
    made = {name: runs.run(name) for name in ("old", "on another host", "champion")}
    for name, artifacts in made.items():
        state = "running" if name == "on another host" else "finished"
        leave_traces(home, mlflow, name, artifacts, state=state)
        version = runs.register(name, artifacts)
    runs.crown(version)
    for folder in ("runs", "logs"):
        shutil.rmtree(home / folder)
    command = pruning(runs, mlflow, home, {"data": 30 * DAY, "evaluations": 30 * DAY})
    for _ in command.delete(command.plan()):
        pass
    expected = names(made["champion"]) | names(made["on another host"], "data", "evaluate", "register")
    assert runs.present() == expected and len(left(home, mlflow)["mlflow"]) == 3


def test_a_run_whose_policy_is_deleted_is_not_kept_by_a_model_that_it_shares(
    runs: OldRuns, home: Path, mlflow: Mlflow
) -> None:
    made = {"old": runs.run("old")}
    made["champion"] = runs.run("champion", shared={stage: made["old"][stage] for stage in ("data", "sft")})
    for name, artifacts in made.items():
        leave_traces(home, mlflow, name, artifacts)
        version = runs.register(name, artifacts)
    runs.crown(version)
    for also in ({}, ALL):
        command = pruning(runs, mlflow, home, also)
        for _ in command.delete(command.plan()):
            pass
    assert left(home, mlflow) == {"mlflow": {"champion"}, "runs": {"champion"}, "logs": {"champion"}}
    assert runs.present() == names(made["champion"])


def test_runs_that_a_kill_left_are_deleted_by_the_next_command(
    runs: OldRuns, home: Path, mlflow: Mlflow
) -> None:
    leave_traces(home, mlflow, "old", {"data": runs.publish("old", "data")})
    mlflow.create_run("of another program", {})
    client = mlflow._client
    trashed = client.create_experiment("of another program")
    client.create_run(trashed)
    client.delete_experiment(trashed)
    for step in ("delete_for_good", "delete_run"):
        command = pruning(runs, mlflow, home, {"mlflow": 30 * DAY})
        plan, done = command.plan(), getattr(mlflow, step)

        def kill(run_id: str, done: Callable[[str], None] = done) -> None:
            done(run_id)
            raise KeyboardInterrupt

        with patch.object(mlflow, step, kill), pytest.raises(KeyboardInterrupt):
            list(command.delete(plan))
    assert len(mlflow.past_runs()) == 2, "the stage is gone, and the pipeline is in the trash"
    again = pruning(runs, mlflow, home, {"mlflow": 30 * DAY})
    assert [deleted for _, deleted in again.delete(again.plan())] == [True]
    assert [run.name for run in mlflow.past_runs()] == ["of another program"]
    # `mlflow gc` would delete it.
    assert client.get_experiment(trashed).lifecycle_stage == "deleted"


def test_a_pipeline_that_ran_again_in_the_meantime_is_kept(runs: OldRuns, home: Path, mlflow: Mlflow) -> None:
    leave_traces(home, mlflow, "old", {"data": runs.publish("old", "data")})
    plan = pruning(runs, mlflow, home, ALL).plan()
    traces: Sequence[Trace] = [each.subject for each in plan.deleted if isinstance(each.subject, Trace)]
    # The folder of a run, which says how old its logs are, is deleted after them.
    assert [trace.kind for trace in traces] == ["mlflow", "logs", "runs"]
    state = home / "runs" / "old" / "run.json"
    state.write_text(state.read_text().replace("finished", "running"))
    for trace in traces:
        if trace.kind == "mlflow":
            mlflow.reopen(trace.where[0])
            assert not remove_from_mlflow(mlflow, trace)
        else:
            assert not remove_from_home(Home.of(home), trace)
    assert state.exists() and len(mlflow.past_runs()) == 2


def test_logs_of_no_run_are_as_old_as_their_files(home: Path) -> None:
    place = Home.of(home)
    job = place.run_logs("jobs") / "rlhf-sft.log"
    for file in (job, place.stacks("sft", "1" * 16, 1) / "1.txt", place.run_logs("gone") / "sft-01.log"):
        file.parent.mkdir(parents=True)
        file.write_text("x")
        for path in (file, file.parent):
            os.utime(path, (0, 1e9))
    traces = traces_of_home(place)
    assert [(each.kind, each.updated, each.size) for each in traces] == [("logs", 1e9, 1)] * 3
    assert all(remove_from_home(place, trace) for trace in traces)
    assert not job.exists() and traces_of_home(place) == []


def test_kinds_are_named_with_their_ages(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert parse_kinds(["data=365d", "logs=30"]) == {"data": 365 * DAY, "logs": 30 * DAY}
    for text, message in (
        ("weights=3d", "--also weights=3d: name KIND=DAYS with one of data, evaluations, mlflow"),
        ("data", "--also data must be a number of days, such as 90d; got ''"),
    ):
        with pytest.raises(InputError, match=message):
            parse_kinds([text])
        assert cli.main(["prune", "--home", str(home), "--also", text]) == 2
        assert message in capsys.readouterr().err
