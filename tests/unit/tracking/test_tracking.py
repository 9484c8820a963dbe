"""Tracking logs everything exactly once and never stops a pipeline. Real MLflow on SQLite; one server that
is down.

Locks: runs found again, nesting, parameters once, every point once over crashes and replays, deterministic
times, spool over outages and attempts, a silent tracker at the end, tables, figures and files, reused stages,
statuses, addresses, also of a folder that was moved. A pipe in place of the database is refused and not
waited for.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import socket
import sqlite3
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from mlflow.exceptions import MlflowException
from mlflow.protos.databricks_pb2 import TEMPORARILY_UNAVAILABLE, UNAUTHENTICATED
from mlflow.tracking._tracking_service.utils import _artifact_repos_cache

from rlhf_core.config import PipelineConfig
from rlhf_core.errors import ConfigError, InputError
from rlhf_core.pipeline import StageName
from rlhf_core.run.external_inputs import data_sets
from rlhf_core.tracking import stage_run
from rlhf_core.tracking.database import artifacts_of, ensure_database, ui_command
from rlhf_core.tracking.mlflow_client import Mlflow, Point, is_unreachable
from rlhf_core.tracking.stage_run import Pauses, Spool, next_attempt
from rlhf_core.tracking.tracker import StageRun, Tracking, open_tracking, origin_tags
from rlhf_core.types import AnsweredPrompt, ArtifactRef

Row = tuple[str, float, int]


@pytest.fixture(scope="module")
def database(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One database for all tests: MLflow takes a second to make one."""
    return tmp_path_factory.mktemp("mlflow") / "mlflow.db"


class Tracker:
    """The folder of a database of MLflow, which cannot be reached while it is down."""

    def __init__(self, database: Path, link: Path) -> None:
        self._folder = database.parent
        self._link = link
        link.symlink_to(self._folder)
        self.uri = f"sqlite:///{link / database.name}"

    def stop(self) -> None:
        self._link.unlink()
        self._link.symlink_to("/proc/nowhere")

    def start(self) -> None:
        self._link.unlink()
        self._link.symlink_to(self._folder)


@pytest.fixture
def tracker(database: Path, tmp_path: Path) -> Tracker:
    return Tracker(database, tmp_path / "tracker")


@pytest.fixture
def tracking(tracker: Tracker, tmp_path: Path, request: pytest.FixtureRequest) -> Tracking:
    mlflow = Mlflow(tracker.uri, request.node.name)
    return Tracking(mlflow, tmp_path / "spool", pauses=Pauses(first=0.0))


def stage(tracking: Tracking, parent: str | None, key: str = "k1", **more: Any) -> StageRun:
    return tracking.stage_run(parent, "ppo", key, **more)


def rows(database: Path, run_id: str | None) -> list[Row]:
    """(metric, value, step) of a run, as the database has them."""
    with sqlite3.connect(database) as connection:
        query = "select key, value, step from metrics where run_uuid = ? order by key, step, value"
        return [tuple(row) for row in connection.execute(query, (run_id,))]


def run_of(database: Path, run_id: str | None) -> dict[str, Any]:
    from mlflow.tracking import MlflowClient

    run = MlflowClient(f"sqlite:///{database}").get_run(run_id)
    return {
        "status": run.info.status,
        "name": run.info.run_name,
        "tags": run.data.tags,
        "params": run.data.params,
        "artifacts": run.info.artifact_uri,
    }


def test_continued_pipeline_writes_to_the_same_runs(tracking: Tracking, database: Path) -> None:
    parent = tracking.parent_run("p1", "demo", {"a": "1"}, {"seed": 0, "none": None})
    run = stage(tracking, parent, params={"ppo.steps": 3})
    assert stage(tracking, parent, params={"ppo.steps": 3}).run_id == run.run_id
    assert tracking.parent_run("p1", "demo", {"a": "2"}, {"seed": 0, "new": 1}) == parent
    assert tracking.parent_run("p2", "demo") not in (parent, None)
    assert stage(tracking, tracking.parent_run("p2", "demo")).run_id != run.run_id
    assert stage(tracking, parent, "k2").run_id != run.run_id
    top, nested = run_of(database, parent), run_of(database, run.run_id)
    assert top["params"] == {"seed": "0", "new": "1"} and top["tags"]["a"] == "2"
    assert nested["tags"]["mlflow.parentRunId"] == parent
    assert nested["params"] == {"ppo.steps": "3"}


def test_stage_without_a_parent_finds_its_pipeline(tracking: Tracking, database: Path) -> None:
    run = tracking.stage_run(None, "sft", "k1", pipeline=("p1", "demo"))
    run_id = run.run_id
    parent = tracking.parent_run("p1", "demo", {"a": "1"}, {"seed": 0})
    assert run_of(database, run_id)["tags"]["mlflow.parentRunId"] == parent
    assert run_of(database, parent)["params"] == {"seed": "0"}
    assert tracking.stage_run(parent, "sft", "k1").run_id == run_id
    assert run_of(database, run_id)["name"] == "sft · demo"


def test_many_long_and_oddly_named_parameters_are_taken(tracking: Tracking, database: Path) -> None:
    params = {f"a(b)[{n}]": "x" * 7000 for n in range(120)}
    run = stage(tracking, None, params=params)
    assert len(run_of(database, run.run_id)["params"]) == 120


def test_points_reach_the_tracker_at_flush_and_not_before(tracking: Tracking, database: Path) -> None:
    run = stage(tracking, None)
    run.log_metrics({"loss/policy": 0.5, "odd (name)": 1.0}, 0)
    run.log_metrics({"loss/policy": 0.25}, 1)
    assert rows(database, run.run_id) == [] and run.unsent == 3
    run.flush()
    assert rows(database, run.run_id) == [
        ("loss/policy", 0.5, 0),
        ("loss/policy", 0.25, 1),
        ("odd _name_", 1.0, 0),
    ]
    run.flush()
    assert len(rows(database, run.run_id)) == 3 and run.unsent == 0


def test_many_points_go_in_several_calls(tracking: Tracking, database: Path) -> None:
    run = stage(tracking, None)
    for step in range(250):
        run.log_metrics({f"m{n}": float(step) for n in range(9)}, step)
    run.flush()
    assert len(rows(database, run.run_id)) == 2250


def test_replayed_point_adds_no_second_row(tracking: Tracking, database: Path) -> None:
    run = stage(tracking, None)
    for step in range(4):
        run.log_metrics({"loss": 1.0 / (1 + step), "timing/step": 0.1 * step}, step)
    run.flush()
    again = stage(tracking, None)
    assert again.run_id == run.run_id
    for step in range(2, 6):
        again.log_metrics({"loss": 1.0 / (1 + step), "timing/step": 0.7}, step)
    again.flush()
    found = rows(database, run.run_id)
    assert [(key, step) for key, _, step in found] == [
        (key, s) for key in ("loss", "timing/step") for s in range(6)
    ]
    assert found[6 + 5] == ("timing/step", 0.7, 5)


def test_a_batch_that_was_sent_but_not_acknowledged_is_not_doubled(
    tracker: Tracker, database: Path, tmp_path: Path
) -> None:
    class LosesTheFirstAnswer(Mlflow):
        calls = 0

        def log_points(self, run_id: str, points: Sequence[Point]) -> None:
            super().log_points(run_id, points)
            self.calls += 1
            if self.calls == 1:
                raise TimeoutError

    mlflow = LosesTheFirstAnswer(tracker.uri, "lost answers")
    run = stage(Tracking(mlflow, tmp_path / "spool", pauses=Pauses(first=0.0)), None)
    run.log_metrics({"loss": 0.5, "nan": float("nan")}, 3)
    run.flush()
    assert run.unsent == 2
    run.flush()
    assert run.unsent == 0
    assert [(key, step) for key, _, step in rows(database, run.run_id)] == [("loss", 3), ("nan", 3)]


def test_times_follow_from_the_runs_start_and_the_step_alone(tracking: Tracking, database: Path) -> None:
    run = stage(tracking, None)
    run.log_metrics({"a": 1.0}, 7)
    run.flush()
    with sqlite3.connect(database) as connection:
        [(start, stamp)] = connection.execute(
            "select start_time, timestamp from runs join metrics using (run_uuid) where run_uuid = ?",
            (run.run_id,),
        )
    assert stamp == start + 7000


def test_next_attempt_sends_the_spool_of_a_killed_one(tracking: Tracking, database: Path) -> None:
    run = stage(tracking, None)
    run.log_metrics({"loss": 1.0}, 0)
    run.flush()
    run.log_metrics({"loss": 2.0}, 1)
    run.log_metrics({"loss": 3.0}, 2)
    with (tracking.spool / "ppo-k1" / "attempt-000000" / "points.jsonl").open("a") as file:
        file.write('{"step": 3, "met')  # the kill came in the middle of a line
    again = stage(tracking, None, attempt=1)
    again.log_metrics({"loss": 2.5}, 1)
    again.flush()
    assert rows(database, run.run_id) == [("loss", 1.0, 0), ("loss", 2.5, 1), ("loss", 3.0, 2)]


def test_superseded_attempt_adds_nothing_to_the_spool(
    tracking: Tracking, database: Path, tmp_path: Path
) -> None:
    (tmp_path / "card.md").write_text("old")
    stale = stage(tracking, None, attempt=1)
    stale.log_metrics({"loss": 1.0}, 0)
    stale.log_file(tmp_path / "card.md")
    successor = stage(tracking, None, attempt=2)
    with pytest.raises(FileNotFoundError):
        stale.log_metrics({"loss": 9.0}, 1)
    with pytest.raises(FileNotFoundError):
        stale.log_file(tmp_path / "card.md")
    successor.log_metrics({"loss": 2.0}, 1)
    successor.finish("FINISHED")
    assert rows(database, successor.run_id) == [("loss", 1.0, 0), ("loss", 2.0, 1)]
    assert list(tracking.spool.iterdir()) == []


def test_spools_of_dead_attempts_are_merged(tmp_path: Path) -> None:
    for attempt, value in ((1, 1.0), (2, 2.0)):
        spool = Spool(tmp_path / f"alone{attempt}", attempt)
        spool.add({"loss": value, f"only/{attempt}": value}, 0)
        spool.add_bytes(str(attempt).encode(), "same.txt")
        spool.add_bytes(str(attempt).encode(), f"only/{attempt}.txt")
        spool.folder.rename(tmp_path / f"attempt-{attempt:06d}")
    merged = Spool(tmp_path, 7)
    assert merged.pending == {("only/1", 0): 1.0, ("loss", 0): 2.0, ("only/2", 0): 2.0}
    assert {name: path.read_text() for path, name in merged.files()} == {
        "same.txt": "2", "only/1.txt": "1", "only/2.txt": "2",
    }  # fmt: skip
    assert next_attempt(tmp_path) == 8


def test_a_tracker_that_is_down_loses_nothing_and_stops_nothing(
    tracking: Tracking,
    tracker: Tracker,
    database: Path,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    tracker.stop()
    parent = tracking.parent_run("p1", "demo")
    assert parent is None
    run = stage(tracking, parent, params={"a": 1})
    (tmp_path / "card.md").write_text("data card")
    for step in range(3):
        run.log_metrics({"loss": float(step)}, step)
        run.log_table("samples", [{"prompt": f"p{step}"}])
        run.log_file(tmp_path / "card.md", "data")
        run.flush()
    assert run.run_id is None and run.unsent == 5
    assert len([record for record in caplog.records if "does not answer" in record.message]) == 2, (
        "one per object"
    )
    tracker.start()
    run.flush()
    assert run.unsent == 0
    assert [step for _, _, step in rows(database, run.run_id)] == [0, 1, 2]
    assert run_of(database, run.run_id)["params"] == {"a": "1"}


def test_unsent_data_is_sent_when_the_stage_is_reused(
    tracking: Tracking, tracker: Tracker, database: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tracker.stop()
    run = stage(tracking, None)
    run.log_metrics({"loss": 1.0, "kl": 2.0}, 0)
    run.set_tags({"rlhf.record": "rlhf inspect demo"})
    run.set_tags({"rlhf.artifact": "/x"})
    run.finish("FINISHED")
    assert "3 points and files could not be sent" in caplog.text
    tracker.start()
    parent = tracking.parent_run("p1", "demo")
    tracking.link_reused(parent, "ppo", ArtifactRef("ppo", "k1", "d", "/x", {"kl": 2.0}))
    sent = stage(tracking, parent)
    assert rows(database, sent.run_id) == [("kl", 2.0, 0), ("loss", 1.0, 0)]
    tags = run_of(database, sent.run_id)["tags"]
    assert (tags["rlhf.artifact"], tags["rlhf.record"]) == ("/x", "rlhf inspect demo")
    assert list(tracking.spool.rglob("points.jsonl")) == []


def test_after_a_failure_flush_does_not_try_again_at_once(tracking: Tracking, tracker: Tracker) -> None:
    tracker.stop()
    run = stage(replace(tracking, pauses=Pauses(first=60.0)), None)
    tracker.start()
    run.log_metrics({"loss": 1.0}, 0)
    run.flush()
    assert run.unsent == 1, "still in the pause"
    run.finish("FINISHED")
    assert run.unsent == 0, "the end always tries"


def test_tables_figures_and_files_are_seen_by_the_ui(
    tracking: Tracking, database: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from matplotlib.figure import Figure

    monkeypatch.setenv("MY_TOKEN", "correct horse")
    run = stage(tracking, None)
    run.log_table("samples/step-1", [{"prompt": "a\u00df", "score": 0.5}, {"prompt": "b", "more": [1]}])
    run.log_table("samples/step-1", [{"prompt": "c, correct horse", "score": 1.0}])
    run.log_figure("reward", Figure())
    (tmp_path / "report.html").write_text("<p>")
    run.log_file(tmp_path / "report.html", "report")
    run.log_file(tmp_path / "report.html")
    run.flush()
    state = run_of(database, run.run_id)
    root = Path(state["artifacts"].removeprefix("file://"))
    assert {p.relative_to(root).as_posix() for p in root.rglob("*") if p.is_file()} == {
        "tables/samples/step-1.json", "plots/reward.png", "report/report.html", "report.html",
    }  # fmt: skip
    table = json.loads((root / "tables/samples/step-1.json").read_text())
    assert table == {"columns": ["prompt", "score"], "data": [["c, (hidden)", 1.0]]}, (
        "replaced, as a replay would"
    )
    assert json.loads(state["tags"]["mlflow.loggedArtifacts"]) == [
        {"path": "tables/samples/step-1.json", "type": "table"}
    ]
    assert (root / "plots/reward.png").read_bytes().startswith(b"\x89PNG")
    assert run.unsent == 0


def test_more_tables_than_fit_into_a_tag_do_not_stop_the_run(tracking: Tracking, database: Path) -> None:
    run = stage(tracking, None, "many tables")
    for step in range(10, 1010, 10):
        run.log_table(f"samples/step_{step:06d}", [{"prompt": "a"}])
    run.flush()
    run.log_table("samples/step_001010", [{"prompt": "a"}])
    run.finish("FINISHED")
    state = run_of(database, run.run_id)
    assert (state["status"], run.unsent) == ("FINISHED", 0)
    paths = [entry["path"] for entry in json.loads(state["tags"]["mlflow.loggedArtifacts"])]
    assert len(paths) > 50
    assert paths == [f"tables/samples/step_{step:06d}.json" for step in range(10, 1020, 10)][-len(paths) :]


def test_artifacts_of_the_default_are_next_to_its_database(tracking: Tracking, database: Path) -> None:
    run = stage(tracking, None)
    folder = Path(run_of(database, run.run_id)["artifacts"].removeprefix("file://"))
    assert folder.resolve().is_relative_to(database.parent / "mlartifacts")


def test_artifacts_follow_a_database_whose_folder_was_moved(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    old, new, note = tmp_path / "a b", tmp_path / "c d", tmp_path / "note.txt"
    note.write_text("x")
    before = Mlflow(f"sqlite:///{old}/mlflow.db", "moved")
    first = before.create_run("first", {}).run_id
    before.log_file(first, note, "")
    old.rename(new)
    _artifact_repos_cache.clear()  # of this process; a run after the move is another one
    after = Mlflow(f"sqlite:///{new}/mlflow.db", "moved")
    second = after.create_run("second", {}).run_id
    for run_id in (first, second):
        after.log_file(run_id, note, "texts")
    assert not old.exists()
    assert len(list((new / "mlartifacts").rglob("note.txt"))) == 3
    assert [entry.path for entry in after._client.list_artifacts(first)] == ["note.txt", "texts"]
    folders = f"its artifacts are in {new / 'mlartifacts'} now, and no longer in {old / 'mlartifacts'}"
    assert f"{new / 'mlflow.db'} was moved: {folders}" in caplog.text
    caplog.clear()
    alone = tmp_path / "mlflow.db"
    shutil.copy(new / "mlflow.db", alone)
    for file in (new / "mlflow.db", alone):
        same = Mlflow(f"sqlite:///{file}", "moved")
        # A copy of the file alone: the artifacts are where they were.
        assert same._client.get_experiment(same.experiment_id).artifact_location == artifacts_of(
            new / "mlflow.db"
        )
    assert "was moved" not in caplog.text


def test_a_moved_database_of_an_earlier_mlflow_is_left_to_mlflow(tmp_path: Path) -> None:
    file = tmp_path / "new" / "mlflow.db"
    ensure_database(tmp_path / "old" / "mlflow.db")
    (tmp_path / "old" / "mlartifacts").mkdir(exist_ok=True)
    with closing(sqlite3.connect(tmp_path / "old" / "mlflow.db")) as database, database:
        database.execute("ALTER TABLE logged_models RENAME TO other_models")
    (tmp_path / "old").rename(tmp_path / "new")
    ensure_database(file)
    with closing(sqlite3.connect(file)) as database:
        [address] = database.execute("SELECT artifact_location FROM experiments").fetchone()
    assert address == f"{(tmp_path / 'old' / 'mlartifacts').as_uri()}/0"


@pytest.mark.parametrize("status", ["FINISHED", "FAILED", "KILLED"])
def test_run_ends_with_its_status_and_resumes_as_running(
    tracking: Tracking, database: Path, status: str
) -> None:
    run = stage(tracking, None)
    run.finish(status)
    assert run_of(database, run.run_id)["status"] == status
    stage(tracking, None)
    assert run_of(database, run.run_id)["status"] == "RUNNING"


def test_run_of_a_dead_stage_can_be_ended(tracking: Tracking, database: Path) -> None:
    parent = tracking.parent_run("p1", "demo")
    run = stage(tracking, parent)
    tracking.finish_stage(parent, "k1", "KILLED")
    assert run_of(database, run.run_id)["status"] == "KILLED"
    tracking.finish_stage(parent, "k1", "FAILED")
    assert run_of(database, run.run_id)["status"] == "KILLED", "an ended run keeps its status"
    tracking.finish(parent, "FINISHED")
    assert run_of(database, parent)["status"] == "FINISHED"


def test_reused_run_keeps_its_description_and_end(tracking: Tracking, database: Path) -> None:
    from mlflow.tracking import MlflowClient

    client = MlflowClient(f"sqlite:///{database}")

    def typed(text: str) -> tuple[str, int]:
        run_id = tracking.parent_run("p1", "demo")
        if text:
            tracking.describe(run_id, text)
        tracking.finish(run_id, "FINISHED", reused=not text)
        run = client.get_run(run_id)
        assert run.info.status == "FINISHED"
        return run.data.tags["mlflow.note.content"], run.info.end_time

    first, ended = typed("# Pipeline finished in 7 min 12 s")
    assert first == "# Pipeline finished in 7 min 12 s"
    assert typed("") == (first, ended)
    text, again = typed("# Pipeline finished in 1 s")
    assert text == "# Pipeline finished in 1 s" and again > ended, "something was made"


def test_a_reused_stage_shows_its_numbers_and_the_run_that_made_it(
    tracking: Tracking, database: Path
) -> None:
    first = tracking.parent_run("p1", "demo")
    made = stage(tracking, first)
    made.finish("FINISHED")
    ref = ArtifactRef("ppo", "k1", "d" * 64, "/store/x", {"kl": 2.0}, mlflow_run_id=made.run_id)
    tracking.link_reused(first, "ppo", ref)
    second = tracking.parent_run("p2", "demo")
    tracking.link_reused(second, "ppo", ref, "demo-2")
    tracking.link_reused(second, "ppo", ref, "demo-2")
    with sqlite3.connect(database) as connection:
        query = "select run_uuid from tags where key = 'mlflow.parentRunId' and value = ?"
        linked = [run_id for (run_id,) in connection.execute(query, (second,))]
        assert [run_id for (run_id,) in connection.execute(query, (first,))] == [made.run_id]
    assert len(linked) == 1
    state = run_of(database, linked[0])
    assert state["status"] == "FINISHED" and state["tags"]["rlhf.producer_run_id"] == made.run_id
    assert rows(database, linked[0]) == [("kl", 2.0, 0)]
    assert state["name"] == "ppo · demo-2 (reused)"


def test_the_result_of_a_later_command_replaces_that_of_an_earlier_one(
    tracking: Tracking, database: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mlflow.tracking import MlflowClient

    run_id = tracking.parent_run("p1", "demo")
    for seconds, champion in ((2e9, 1.0), (3e9, 0.0)):
        monkeypatch.setattr(time, "time", lambda seconds=seconds: seconds)
        tracking.log_results("p1", {"champion": champion})
    assert MlflowClient(f"sqlite:///{database}").get_run(run_id).data.metrics == {"champion": 0.0}


def test_links_lead_to_the_version_and_to_the_runs_of_the_stages(tracking: Tracking) -> None:
    made = stage(tracking, tracking.parent_run("p1", "demo"))
    refs: dict[StageName, ArtifactRef] = {
        "ppo": ArtifactRef("ppo", "k1", "d", "/x", {}, mlflow_run_id=made.run_id),
        "sft": ArtifactRef("sft", "k2", "d", "/x", {}),
    }
    text = tracking.links(refs, ("my model", "3"))
    page = f"#/experiments/{tracking.mlflow.experiment_id}/runs/{made.run_id}?workflowType=machine_learning"
    assert text == f"Pages: [my model version 3](#/models/my%20model/versions/3), [ppo]({page})"
    assert tracking.links({}, None) == ""


def test_the_list_of_runs_has_the_columns_of_the_main_metrics(tracking: Tracking, database: Path) -> None:
    from mlflow.tracking import MlflowClient

    client = MlflowClient(f"sqlite:///{database}")
    identity = tracking.mlflow.experiment_id
    client.delete_experiment_tag(identity, "mlflow.sharedViewState.rlhf")  # as in an earlier release
    del tracking.mlflow.experiment_id
    assert tracking.runs_url() == (
        f"http://127.0.0.1:5000/#/experiments/{identity}/runs?workflowType=machine_learning&viewStateShareKey=rlhf"
    )
    columns = json.loads(client.get_experiment(identity).tags["mlflow.sharedViewState.rlhf"])
    assert columns["selectedColumns"][:2] == ["metrics.`win_rate`", "metrics.`win_rate_low`"]
    assert {"tags.`rlhf.algorithm`", "tags.`rlhf.data`"} <= set(columns["selectedColumns"])


def test_the_data_artifact_is_an_input_of_the_run_once(tracking: Tracking, database: Path) -> None:
    inputs = {"data": ArtifactRef("data", "dk", "e" * 64, "/store/data", {"data/sft_train": 3.0})}
    run = stage(tracking, None, inputs=inputs)
    stage(tracking, None, inputs=inputs)
    from mlflow.tracking import MlflowClient

    [entry] = MlflowClient(f"sqlite:///{database}").get_run(run.run_id).inputs.dataset_inputs
    assert (entry.dataset.name, entry.dataset.digest) == ("data-dk", "e" * 36)
    assert (entry.dataset.source_type, json.loads(entry.dataset.source)) == ("local", {"uri": "/store/data"})
    assert json.loads(entry.dataset.profile) == {"sft_train": 3.0}


def test_data_sets_are_inputs_of_the_run(tracking: Tracking, database: Path, tmp_path: Path) -> None:
    import mlflow.data
    from mlflow.tracking import MlflowClient

    sources = [
        {"path": path} for path in (f"{tmp_path}/a.jsonl", "s3://bucket/b.parquet", "owner/name", "synthetic")
    ]
    data = {name: ({"path": "synthetic"},) for name in ("preference", "prompts")}
    config = PipelineConfig.model_validate(
        {"run": {"home": str(tmp_path)}, "data": {**data, "sft": tuple(sources)}}
    )
    digests = {f"data.sft[{i}]": str(i) * 64 for i in (0, 1)} | {
        "data.sft[2]": "hub:owner/name@c",
        "data.sft[3]": "synthetic@1",
    }
    digests |= {f"data.{name}[0]": "synthetic@1" for name in ("preference", "prompts")}
    parent = tracking.parent_run("p1", "demo")
    for _ in range(2):
        tracking.log_datasets(parent, data_sets(config, digests))
    entries = MlflowClient(f"sqlite:///{database}").get_run(parent).inputs.dataset_inputs
    found = {entry.dataset.name: entry.dataset for entry in entries}
    assert set(found) == {
        "data.sft[0] a.jsonl", "data.sft[1] b.parquet", "data.sft[2] owner/name", "data.sft[3] synthetic",
        "data.preference[0] synthetic", "data.prompts[0] synthetic",
    }  # fmt: skip
    assert (
        found["data.sft[0] a.jsonl"].digest == "0" * 36 and len(found["data.sft[2] owner/name"].digest) == 36
    )
    kinds = [type(mlflow.data.get_source(found[name])).__name__ for name in sorted(found) if "sft" in name]
    assert kinds == [
        "LocalArtifactDatasetSource",
        "S3ArtifactDatasetSource",
        "HuggingFaceDatasetSource",
        "CodeDatasetSource",
    ]


def test_a_run_has_tags_of_user_and_source(
    tracking: Tracking, database: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOGNAME", "ada")
    parent = tracking.parent_run("p1", "demo", origin_tags("configs/demo.yaml", {"git": "c0ffee-dirty"}))
    monkeypatch.setenv("LOGNAME", "bob")
    tracking.parent_run("p1", "demo", origin_tags("configs/demo.yaml", {"git": "c0ffee"}))
    tags = run_of(database, parent)["tags"]
    assert tags["mlflow.user"] == "ada", "who made it, not who typed it again"
    assert (tags["mlflow.source.name"], tags["mlflow.source.type"]) == ("configs/demo.yaml", "LOCAL")
    assert (tags["mlflow.source.git.commit"], tags["mlflow.source.git.dirty"]) == ("c0ffee", "false")
    assert origin_tags("x", {"git": "c0ffee-dirty"})["mlflow.source.git.dirty"] == "true"


def test_versions_of_the_gpus_software_have_tags_of_their_own() -> None:
    software = {"torch": "2.13.0", "cuda": "13.0", "nccl": "2.29.7", "gpu_driver": "NVIDIA 580.95.05"}
    tags = origin_tags("x", software)
    assert json.loads(tags["rlhf.versions"]) == software
    assert {name: tags[f"rlhf.{name}"] for name in ("cuda", "nccl", "gpu_driver")} == {
        name: software[name] for name in ("cuda", "nccl", "gpu_driver")
    }
    assert "rlhf.torch" not in tags and "rlhf.rocm" not in tags


def test_silent_tracker_delays_the_end_only_briefly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "MLFLOW_HTTP_REQUEST_TIMEOUT"):
        monkeypatch.setenv(name, "5")
    with socket.create_server(("127.0.0.1", 0)) as silent:
        tracking = Tracking(Mlflow(f"http://127.0.0.1:{silent.getsockname()[1]}", "e"), tmp_path / "spool")
        started = time.monotonic()
        tracking.finish("0" * 32, "KILLED")
    assert 2.9 < time.monotonic() - started < 20


@pytest.mark.parametrize("last", [True, MlflowException("who?", error_code=UNAUTHENTICATED)])
def test_wait_ends_with_any_answer(last: bool | Exception, tmp_path: Path) -> None:
    answers: Iterator[bool | Exception] = iter(
        [ConnectionError("down"), MlflowException("502 of a proxy"), last]
    )

    class Scripted(Mlflow):
        def ping(self) -> bool:
            if isinstance(answer := next(answers), Exception):
                raise answer
            return answer

    mlflow = Scripted("http://127.0.0.1:9", "e")
    Tracking(mlflow, tmp_path / "spool", pauses=Pauses(wait=0.01)).wait(60.0)
    assert not list(answers)


def test_system_metrics_are_sampled_where_asked_for(
    tracking: Tracking, database: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_SYSTEM_METRICS_SAMPLING_INTERVAL", "0.1")
    tracking.system_metrics = True
    run = stage(tracking, None)
    deadline = time.monotonic() + 20
    while not rows(database, run.run_id) and time.monotonic() < deadline:
        time.sleep(0.1)
    run.finish("FINISHED")
    assert any(key.startswith("system/cpu") for key, _, _ in rows(database, run.run_id))


def test_an_artifact_name_stays_inside_the_run(tracking: Tracking, tmp_path: Path) -> None:
    run = stage(tracking, None)
    (tmp_path / "x").write_text("")
    with pytest.raises(InputError, match="relative"):
        run.log_table("../../x", [])
    with pytest.raises(InputError, match="relative"):
        run.log_file(tmp_path / "x", "/etc")
    assert run.unsent == 0


def test_address_is_config_then_environment_then_home(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = {"run": {"home": str(tmp_path)}}
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    assert open_tracking(PipelineConfig.model_validate(home)).uri == f"sqlite:///{tmp_path}/mlflow.db"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://user:hunter2@h:5000")
    tracking = open_tracking(PipelineConfig.model_validate(home))
    assert tracking.uri == "http://h:5000" == tracking.url(None)
    config = PipelineConfig.model_validate({**home, "tracking": {"uri": f"sqlite:///{tmp_path}/other.db"}})
    shown = open_tracking(config).url("r")
    assert shown.endswith(f"bin/mlflow ui --backend-store-uri sqlite:///{tmp_path}/other.db")


def test_the_command_that_shows_a_database_is_for_a_shell() -> None:
    words = shlex.split(ui_command("sqlite:////data/my models/mlflow.db"))
    assert words[1:] == ["ui", "--backend-store-uri", "sqlite:////data/my models/mlflow.db"]


@pytest.mark.parametrize(
    "uri",
    [
        "mlruns",
        "htp://x",
        "file:///x",
        "sqlite:///:memory:?x",
        "http://u:hunter2@h",
        "http://h:5000?api_key=hunter2",
    ],
)
def test_an_address_that_cannot_be_a_tracker_is_a_config_error(tmp_path: Path, uri: str) -> None:
    config = PipelineConfig.model_validate({"run": {"home": str(tmp_path)}, "tracking": {"uri": uri}})
    with pytest.raises(ConfigError, match=r"tracking\.uri") as caught:
        open_tracking(config)
    assert "hunter2" not in str(caught.value)


def test_tags_of_a_prefix_are_removed_and_no_others(tracking: Tracking) -> None:
    run_id = tracking.parent_run(
        "p", "n", {"rlhf.guard.loops": "step 4", "rlhf.guard.empty": "step 5", "kept": "yes"}
    )
    assert run_id is not None
    tracking.remove_tags(run_id, "rlhf.guard.")
    tags = tracking.mlflow.tags(run_id)
    assert tags["kept"] == "yes" and not [name for name in tags if name.startswith("rlhf.guard.")]


def test_a_pipe_in_place_of_the_database_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "mlflow.db")
    with pytest.raises(ConfigError, match=r"mlflow\.db is a pipe \(FIFO\), not a regular file; remove it"):
        ensure_database(tmp_path / "mlflow.db")


def answered(number: int) -> AnsweredPrompt:
    measures: dict[str, float | str] = {"winner": "PPO", "gold": number / 2}
    return AnsweredPrompt(f"prompt {number}", {"PPO": f"answer {number}", "SFT": "no"}, measures, "gold")


def traces_of(tracker: Tracker, tracking: Tracking, run_id: str | None) -> list[Any]:
    from mlflow.tracing.client import TracingClient

    return list(
        TracingClient(tracker.uri).search_traces(
            locations=[tracking.mlflow.experiment_id],
            filter_string=f"request_metadata.`mlflow.sourceRun` = '{run_id}'",
        )
    )


def test_answered_prompts_are_traces_with_assessments_also_if_they_are_sent_twice(
    tracking: Tracking, tracker: Tracker, database: Path
) -> None:
    run = stage(tracking, None)
    for _ in range(2):
        run.log_answers([answered(0), answered(1)])
        run.flush()
    first, second = traces_of(tracker, tracking, run.run_id)
    assert [trace.info.request_preview for trace in (first, second)] == ["prompt 0", "prompt 1"]
    assert {a.name: a.value for a in second.info.assessments} == {"winner": "PPO", "gold": 0.5}
    assert {a.source.source_id for a in second.info.assessments} == {"gold"}
    root, *below = second.data.spans
    assert (root.inputs, root.outputs) == ("prompt 1", {"PPO": "answer 1", "SFT": "no"})
    assert {span.name: span.outputs for span in below} == {"PPO": "answer 1", "SFT": "no"}
    assert run.unsent == 0
    assert not Path(run_of(database, run.run_id)["artifacts"].removeprefix("file://"), "traces").exists()


def test_answers_wait_for_a_tracker_that_is_down(tracking: Tracking, tracker: Tracker) -> None:
    tracker.stop()
    run = stage(tracking, None)
    run.log_answers([answered(0)])
    run.flush()
    assert run.unsent == 1
    tracker.start()
    run.finish("FINISHED")
    assert len(traces_of(tracker, tracking, run.run_id)) == 1


def test_answers_stay_if_the_tracker_stops_while_they_are_sent(
    tracking: Tracking, tracker: Tracker, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mlflow.tracing.client import TracingClient

    start_trace = TracingClient.start_trace
    started: list[Any] = []

    def stop_after_one(self: TracingClient, trace_info: Any) -> Any:
        if started:
            raise MlflowException("the database is gone", error_code=TEMPORARILY_UNAVAILABLE)
        started.append(trace_info)
        return start_trace(self, trace_info)

    run = stage(tracking, None)
    run.log_answers([answered(0), answered(1)])
    with monkeypatch.context() as patched:
        patched.setattr(TracingClient, "start_trace", stop_after_one)
        run.flush()
    assert run.unsent == 1
    run.finish("FINISHED")
    assert len(traces_of(tracker, tracking, run.run_id)) == 2 and run.unsent == 0


@pytest.mark.parametrize("listens", [False, True])
def test_a_server_that_refuses_or_is_silent_is_unreachable(
    listens: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "1")
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        if listens:
            server.listen()
        with pytest.raises(MlflowException) as caught:
            Mlflow(f"http://127.0.0.1:{server.getsockname()[1]}", "e").ping()
    assert is_unreachable(caught.value) and not is_unreachable(MlflowException("no such endpoint"))


def test_half_a_character_in_an_answer_does_not_keep_the_traces(tracking: Tracking, tracker: Tracker) -> None:
    run = stage(tracking, None)
    run.log_answers([replace(answered(0), prompt="a \ud800", answers={"PPO": "\udfff b"}), answered(1)])
    run.flush()
    first, _ = traces_of(tracker, tracking, run.run_id)
    assert (first.info.request_preview, first.info.response_preview) == ("a ?", "? b")


def test_a_tracker_without_traces_ends_the_run_with_one_warning(
    tracking: Tracking, database: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from mlflow.tracing.client import TracingClient

    def refuse(self: object, trace_info: object) -> None:
        raise MlflowException("no such endpoint")

    monkeypatch.setattr(TracingClient, "start_trace", refuse)
    run = stage(tracking, None)
    run.log_answers([answered(0)])
    run.finish("FINISHED")
    assert run_of(database, run.run_id)["status"] == "FINISHED"
    assert "it has no traces" in caplog.text and run.unsent == 0


def test_traces_end_with_their_time(
    tracking: Tracking, tracker: Tracker, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(stage_run, "MOST_SECONDS", -1.0)
    run = stage(tracking, None)
    run.log_answers([answered(0)])
    run.flush()
    assert "traces of 0 of 1 prompts" in caplog.text
    assert traces_of(tracker, tracking, run.run_id) == [] and run.unsent == 0
