"""Behaviours of one execution of the pipeline:

- which stages it has, and which artifacts each is given
- keys: another learning rate of PPO changes PPO and what follows, another timeout changes nothing
- `--from` an earlier stage without artifacts is an InputError that names it; an empty range is one too
- the same configuration is the same run; a changed reward file is another
- a run under new settings names the unfinished run that it differs from, and why
- each attempt has a log file of its own
- a process that waits for a stage ends with the run, also if the run fails or is stopped
- a run ends in MLflow with its command, unless another process goes on with the same run
- a flow sits out an outage of its store for `store.retry_seconds`, the command before it does not
- the summary names the tracker without credentials
- a shorter command keeps the summary of a longer one, unless their artifacts differ
- a run in MLflow that lacks the metrics and the report gets them, also if every stage was reused
- files that are only shown end no run; progress of an earlier attempt is not shown
"""

from __future__ import annotations

import contextvars
import errno
import json
import os
import socket
import time
from contextlib import nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from mlflow import MlflowClient

from rlhf_core.config import PipelineConfig
from rlhf_core.config.load import load_config, overrides_of
from rlhf_core.data.sources import source_digests
from rlhf_core.errors import InputError, RLHFError, StageFailed, StageHeld, StoreUnavailable
from rlhf_core.evaluation.report import _PENDING
from rlhf_core.executors.follow import JobFollower
from rlhf_core.executors.spec import StageRecord, StageSpec
from rlhf_core.pipeline import STAGES, StageName, stages_between
from rlhf_core.run import stage_runner
from rlhf_core.run.checks import CheckedConfig, load_and_check, remember_check, reuse_or_check
from rlhf_core.run.pipeline_run import PipelineRun, open_run
from rlhf_core.run.stage_runner import RetryPolicy
from rlhf_core.run.state import describe_runs
from rlhf_core.storage.artifacts import ArtifactCopy, ArtifactStore, Provenance
from rlhf_core.storage.checkpoints import CheckpointStore
from rlhf_core.storage.store import Store
from rlhf_core.system.processes import ProcessId, RecordedProcess, here
from rlhf_core.system.waiting import SYSTEM_CLOCK
from rlhf_core.tracking.champions import REVOKED, WEIGHTS
from rlhf_core.tracking.mlflow_client import ModelVersion
from rlhf_core.types import ArtifactRef
from tests.support.checkpoints import keep
from tests.support.demo_data import GENERATED, with_demo_data
from tests.support.followed_jobs import FAST
from tests.support.toy_stage import toy_environment


def config(home: Path, **sections: Any) -> PipelineConfig:
    tree = {**sections, "run": {"home": str(home), **sections.get("run", {})}}
    return PipelineConfig.model_validate_json(json.dumps(tree))


def pipeline(
    home: Path, start: StageName = "data", until: StageName = "register", **sections: Any
) -> PipelineRun:
    return PipelineRun(config(home, **sections), "demo.yaml", start, until)


def checked_in(home: Path, database: Path, **sections: Any) -> CheckedConfig:
    """Return a configuration that has passed the preflight, with a tracker."""
    tree = {"run": {"home": str(home), "device": "cpu"}, "tracking": {"uri": f"sqlite:///{database}"}}
    file = home / "c.yaml"
    file.write_text(json.dumps(tree | sections))
    return load_and_check(str(file), [])


def tags_of(run: PipelineRun) -> dict[str, str]:
    """Return the tags of a run in MLflow."""
    assert run.parent_run_id is not None
    return run.tracking.mlflow.tags(run.parent_run_id)


def ref(stage: StageName, **metrics: float) -> ArtifactRef:
    return ArtifactRef(stage, "a" * 16, f"digest-{stage}", f"/store/{stage}", metrics)


def keys(run: PipelineRun) -> dict[StageName, str]:
    inputs = {stage: ref(stage) for stage in STAGES}
    return {stage: run.spec(stage, inputs).key for stage in STAGES}


def test_learning_rate_of_ppo_changes_keys_of_ppo_and_of_what_measures_it(
    tmp_path: Path,
) -> None:
    before, after = (
        keys(pipeline(tmp_path)),
        keys(pipeline(tmp_path, ppo={"policy": {"learning_rate": 3e-6}})),
    )
    # `register` follows through the digests of its inputs, which are equal here.
    assert [stage for stage in STAGES if before[stage] != after[stage]] == [
        "ppo",
        "sample",
        "evaluate",
        "benchmark",
    ]


def test_another_timeout_or_retry_count_changes_no_key(tmp_path: Path) -> None:
    run = {"retries": 7, "threads": 1, "timeouts": {"stall": 5.0}}
    other: dict[str, Any] = {"run": run, "ppo": {"engine": {"min_count": 1}, "checkpoint_every": 3}}
    assert keys(pipeline(tmp_path)) == keys(pipeline(tmp_path, **other))
    assert pipeline(tmp_path).key == pipeline(tmp_path / "elsewhere", **other).key


def test_another_seed_or_name_is_another_run(tmp_path: Path) -> None:
    names = {pipeline(tmp_path, run=section).key for section in ({}, {"seed": 1}, {"name": "other"})}
    assert len(names) == 3


def test_disabled_reward_model_is_no_input(tmp_path: Path) -> None:
    run = pipeline(
        tmp_path,
        reward={"enabled": False},
        ppo={"rewards": [{"type": "length", "target": 9, "tolerance": 3}]},
    )
    assert [stage for stage in STAGES if run.includes(stage)] == [
        "data",
        "sft",
        "ppo",
        "evaluate",
        "register",
    ]
    inputs = {stage: ref(stage) for stage in STAGES}
    assert set(run.spec("ppo", inputs).inputs) == {"data", "sft"}


def test_inputs_of_a_stage_are_the_artifacts_that_the_run_has_made(tmp_path: Path) -> None:
    run = pipeline(tmp_path)
    run.records["data"] = StageRecord(ref("data"), 1.0, False)
    assert run.inputs("sft") == {"data": ref("data")}
    with pytest.raises(InputError, match="this run has no artifact of stage sft; run the stage first"):
        run.inputs("reward")
    with pytest.raises(InputError, match=r"has no stage dpo; set dpo\.enabled"):
        run.artifact("dpo")


def test_until_ends_the_run_after_its_stage(tmp_path: Path) -> None:
    run = pipeline(tmp_path, until="reward")
    assert [stage for stage in STAGES if run.includes(stage)] == ["data", "sft", "reward"]


def test_start_names_the_missing_artifact(tmp_path: Path) -> None:
    run = pipeline(tmp_path, start="sft")
    spec = run.spec("data", {})
    with pytest.raises(
        InputError, match=rf"starts at stage sft .* artifact of stage data \(key {spec.key}\)"
    ):
        run.find(spec)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "card.json").write_text("{}")
    store = ArtifactStore(Store(run.config.store_url), tmp_path / "cache")
    made = store.publish("data", spec.key, tmp_path / "out", Provenance(metrics={"rows": 3.0}))
    assert run.find(spec) == made
    assert run.find(run.spec("sft", {"data": made})) is None


def test_leftovers_of_a_killed_attempt_are_removed(tmp_path: Path) -> None:
    run = pipeline(tmp_path)
    spec = run.spec("data", {})
    (tmp_path / "state").mkdir()
    (tmp_path / "state" / "rank0").write_text("moments")
    CheckpointStore(run.store, spec.key, tmp_path / "w", keep(1)).save(3, tmp_path / "state")
    spec.work.mkdir(parents=True)
    assert run.store.list(f"checkpoints/{spec.key}")
    run.remove_leftovers(spec)
    assert not run.store.list(f"checkpoints/{spec.key}")
    assert not spec.work.exists()


def test_empty_range_of_stages_is_refused() -> None:
    assert stages_between("ppo", "ppo") == ("ppo",)
    with pytest.raises(InputError, match="the first stage, ppo "):
        stages_between("ppo", "sft")


def test_new_run_names_the_unfinished_run_that_it_does_not_continue(tmp_path: Path) -> None:
    assert pipeline(tmp_path).unfinished_predecessor() == ""
    first = pipeline(tmp_path)
    first.current_stage = {"stage": "ppo", "log": ""}
    first.save_state("failed", "killed")
    same = pipeline(tmp_path, run={"stage_timeout": 9.0}, tracking={"system_metrics": False})
    assert same.unfinished_predecessor() == "", "it continues that one"
    other = pipeline(tmp_path, run={"seed": 1}, ppo={"kl": {"coef": 0.1}})
    assert (
        other.unfinished_predecessor()
        == "the last run of demo.yaml stopped in ppo; this is another run, because run.seed was 0 and is 1,"
        " ppo.kl.coef was 0.02 and is 0.1. Stages that this does not affect are reused or continued. With the"
        " settings, data and code of that run, all of it continues"
    )
    moved = pipeline(tmp_path, run={"seed": 2})
    moved.sources = {**moved.sources, "data.sft[0]": "abc"}
    assert (
        "because run.seed was 0 and is 2, sources.data.sft[0] was synthetic@"
        in moved.unfinished_predecessor()
    )
    first.sources = {**first.sources, "data.sft[0]": "ab" * 32}
    first.save_state("failed", "killed")
    moved.sources = {**moved.sources, "data.sft[0]": "cd" * 32}
    assert "run.seed was 0 and is 2, the content of data.sft[0] has changed" in moved.unfinished_predecessor()
    file = first.folder / "run.json"
    known = json.loads(file.read_text())
    host, machine = here()
    for process in ([1, 0.0, "another-host", machine, ""], [1, 0.0, host, "another boot", ""]):
        file.write_text(json.dumps({**known, "state": "running", "process": process}))
        assert other.unfinished_predecessor() == "", "it may be running elsewhere"
    file.write_text(json.dumps({**known, "state": "running", "process": [1, 0.0, host, machine, ""]}))
    assert "stopped in ppo" in other.unfinished_predecessor()
    file.write_text(json.dumps({**known, "state": "finished"}))
    assert other.unfinished_predecessor() == ""
    file.write_text(json.dumps({name: value for name, value in known.items() if name != "decided_by"}))
    assert other.unfinished_predecessor() == "", "it does not say why"


def test_each_attempt_has_a_log_file_of_its_own(tmp_path: Path) -> None:
    run = pipeline(tmp_path)
    first, second = run.log_file("ppo"), run.log_file("ppo")
    assert (first.name, second.name) == ("ppo-01.log", "ppo-02.log")
    assert first.exists()
    assert second.exists()


def test_explicit_overrides_win_over_form_parameters() -> None:
    given = {"run.seed": 3, "ppo.kl.coef": 0.0, "ppo.steps": None}
    assert overrides_of(given, ("run.seed=4",)) == ["run.seed=3", "ppo.kl.coef=0.0", "run.seed=4"]


@pytest.mark.parametrize("name", ["2024", "1e3", "0.1", "true", "null", "demo"])
def test_name_parameter_stays_a_text_in_yaml(name: str) -> None:
    assert load_config("deployments/configs/demo.yaml", overrides_of({"run.name": name})).run.name == name


def test_the_summary_names_the_tracker_without_credentials(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    assert pipeline(tmp_path).summary()["tracking_uri"] is None, "the database in run.home can be moved"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://ann:pass@127.0.0.1:9/mlflow")
    assert pipeline(tmp_path).summary()["tracking_uri"] == "http://127.0.0.1:9/mlflow"


@pytest.mark.parametrize("policy", ["dpo", "ppo"])
def test_the_summary_names_the_policy_without_the_stage_register(policy: str, tmp_path: Path) -> None:
    sections: dict[str, Any] = {"dpo": {"enabled": True}, "register": {"policy": policy}}
    assert pipeline(tmp_path, until="evaluate", **sections).summary()["policy"] == policy


@pytest.mark.parametrize("by_file", [True, False], ids=["file", "module on the path"])
def test_edited_reward_function_changes_the_key_of_ppo(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, by_file: bool
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    file = tmp_path / "its_reward.py"
    reward = {"type": "python", "function": "its_reward:score"} | ({"file": str(file)} if by_file else {})

    def with_text(text: str) -> PipelineRun:
        file.write_text(text)
        return pipeline(tmp_path, ppo={"rewards": [reward]})

    before, after = (
        with_text("def score(samples): return [0.0]"),
        with_text("def score(samples): return [1.0]"),
    )
    assert [stage for stage in STAGES if keys(before)[stage] != keys(after)[stage]] == ["ppo"]
    assert before.key != after.key


def test_registration_is_repeated_only_if_mlflow_lost_or_revoked_it(tmp_path: Path) -> None:
    run = pipeline(tmp_path)
    spec = run.spec("register", {stage: ref(stage) for stage in STAGES})
    store = ArtifactStore(Store(run.config.store_url), tmp_path / "cache")
    facts = {"weights_sha256": "w" * 64, "version": "1", "champion": "True", "rule": "first"}

    def published() -> ArtifactRef:
        (tmp_path / "out").mkdir()
        (tmp_path / "out" / "registration.json").write_text("{}")
        return store.publish("register", spec.key, tmp_path / "out", Provenance(attributes=facts))

    made = published()

    def registry(*versions: ModelVersion) -> dict[str, Any]:
        named = {"by_alias": lambda *_: None, "model_tags": lambda _: {}}
        return {"versions": lambda _: versions, **named}

    kept = registry(ModelVersion("1", {WEIGHTS: "w" * 64}))
    revoked = registry(ModelVersion("1", {WEIGHTS: "w" * 64, REVOKED: "bad"}))
    for answer, reason in ((kept, ""), ({}, ""), (registry(), "no such version"), (revoked, "is revoked")):
        scripted: Any = SimpleNamespace(uri="somewhere", **answer)
        run.tracking.mlflow = scripted
        assert run.find(spec) == (None if reason else made)
        records = list((tmp_path / "store").rglob("damaged-*.json"))
        assert bool(records) == bool(reason)
        if reason:
            assert reason in records[0].read_text()
            records[0].unlink()
            made = published()


def test_only_a_flow_without_a_waiting_user_retries_the_store_for_the_configured_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "id")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))  # without `listen`, connections are refused
        endpoint = f"http://127.0.0.1:{unused.getsockname()[1]}"
        store = {"url": "s3://bucket/runs", "endpoint": endpoint, "retry_seconds": 1e-9}
        tracking = {"uri": f"sqlite:///{tmp_path}/mlflow.db"}
        tree = {"run": {"home": str(tmp_path), "device": "cpu"}, "store": store, "tracking": tracking}
        file = tmp_path / "c.yaml"
        file.write_text(json.dumps(tree))
        with pytest.raises(StoreUnavailable, match=r"in ([2-9]|\d\d+) tries over"):
            load_and_check(str(file), [])
        with pytest.raises(StoreUnavailable, match=r"in 1 tries over"):
            reuse_or_check(str(file), [])


def test_flow_reuses_the_check_of_its_command(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    text = f"run: {{home: {tmp_path}, device: cpu}}\n"
    file.write_text(text)

    def command() -> None:
        checked = load_and_check(str(file), ["run.seed=3"])
        remember_check(checked)
        file.unlink()
        assert reuse_or_check(str(file), ["run.seed=3"]) is checked
        file.write_text(text)
        assert reuse_or_check(str(file), ["run.seed=4"]).config.run.seed == 4

    contextvars.copy_context().run(command)


def test_spec_contains_digests_of_external_inputs_and_the_last_stage(tmp_path: Path) -> None:
    rows = tmp_path / "a.jsonl"
    rows.write_text('{"text": "a"}\n')
    run = pipeline(tmp_path, until="reward", data={**GENERATED, "sft": [{"path": str(rows)}]})
    run.spec("data", {}).write(tmp_path / "spec.json")
    spec = StageSpec.read(tmp_path / "spec.json")
    assert spec.sources == source_digests(run.config)
    assert set(spec.sources) >= {"data.sft[0]", "data.prompts[0]"} and spec.until == "reward"


def test_the_spec_of_a_job_has_the_artifact_that_its_base_model_is_a_copy_of(tmp_path: Path) -> None:
    copy = tmp_path / "cache" / f"artifacts-ppo-{'a' * 16}-{'b' * 12}"
    (copy / "policy").mkdir(parents=True)
    (copy / "policy" / "config.json").write_text("{}")
    slurm = {"executor": "slurm", "resources": {"register": {"executor": "local"}}}
    tree = with_demo_data({"model": {"path": str(copy / "policy")}})
    assert pipeline(tmp_path, run=slurm, **tree).spec("data", {}).base_models == {}, "a folder of the user"
    copy.with_name(f"{copy.name}.store").write_text("s3://bucket/models")
    local, jobs = pipeline(tmp_path, **tree), pipeline(tmp_path, run=slurm, **tree)
    assert keys(local) == keys(jobs)
    inputs = {stage: ref(stage) for stage in STAGES}
    assert local.spec("data", {}).base_models == jobs.spec("register", inputs).base_models == {}
    expected = {"model.path": ArtifactCopy("ppo", "a" * 16, "b" * 12, "policy", "s3://bucket/models")}
    assert jobs.spec("data", {}).base_models == jobs.spec("evaluate", inputs).base_models == expected


def test_warnings_are_logged_and_tagged(
    tmp_path: Path, database: Path, caplog: pytest.LogCaptureFixture
) -> None:
    checked = checked_in(tmp_path, database, ppo={"kl": {"estimator": "k3"}})
    with pytest.raises(RuntimeError), open_run(checked, "data", "data") as run:
        run.record_guard("loops", "step 4: guard loops: 30 %")
        raise RuntimeError("asked enough")
    tags = tags_of(run)
    about = {"rlhf.algorithm": "PPO", "rlhf.base_model": "model.tiny", "rlhf.seed": "0"}
    assert about.items() <= tags.items()
    assert "ppo.kl.estimator: k3 in the reward" in tags["rlhf.warnings"]
    assert "ppo.kl.estimator: k3 in the reward" in caplog.text
    assert tags["rlhf.guard.loops"] == "step 4: guard loops: 30 %"


@pytest.mark.parametrize("ending", [RuntimeError, KeyboardInterrupt, SystemExit])
def test_the_end_of_a_run_ends_the_process_that_waits(
    tmp_path: Path, database: Path, ending: type[BaseException]
) -> None:
    checked = checked_in(tmp_path, database)
    environment = toy_environment(tmp_path, "return REF", prepare="time.sleep(600)")
    with pytest.raises(ending), open_run(checked, "data", "sft") as run:
        assert run.stage_after("data") == "sft"
        assert run.stage_after("sft") is None
        log_file = run.log_file("sft")
        run.next_stage.prepare("sft", run.config, environment, log_file)
        [waiting] = _processes_with(log_file.with_suffix(".json"))
        raise ending
    assert not waiting.is_running()
    assert not log_file.exists()


def _processes_with(argument: Path) -> list[psutil.Process]:
    """Return the children of this process that have this argument, when there are any."""
    found: list[psutil.Process] = []
    deadline = time.monotonic() + 10
    # For a moment after its start, the kernel has no arguments of a process.
    while not found and time.monotonic() < deadline:
        for child in psutil.Process().children():
            with suppress(psutil.Error):  # it has ended
                if str(argument) in child.cmdline():
                    found.append(child)
    return found


ENDINGS = {
    StageHeld("stage data is being made"): "FAILED",
    StageFailed("stage data was killed"): "FAILED",
    KeyboardInterrupt(): "KILLED",
    None: "FINISHED",
}


@pytest.mark.parametrize("ending", ENDINGS, ids=repr)
@pytest.mark.parametrize("same_run", [True, False])
def test_a_command_ends_its_run_unless_another_process_goes_on_with_it(
    tmp_path: Path, database: Path, same_run: bool, ending: BaseException | None
) -> None:
    checked = checked_in(tmp_path, database)
    expected = nullcontext() if ending is None else pytest.raises(type(ending))
    with expected, open_run(checked, "data", "data") as run:
        if same_run:
            state = run.folder / "run.json"
            other = ProcessId.of(os.getppid())
            assert other is not None
            process = RecordedProcess.own()._replace(pid=other.pid, started=other.started)
            state.write_text(json.dumps({**json.loads(state.read_text()), "process": process}))
        if ending is not None:
            raise ending
    recorded = MlflowClient(run.tracking.uri).get_run(run.parent_run_id)
    assert recorded.info.status == ("RUNNING" if same_run else ENDINGS[ending])


def test_a_shorter_command_keeps_the_summary_of_a_longer_one(tmp_path: Path, database: Path) -> None:
    checked = checked_in(tmp_path, database)

    def summary_of(until: StageName, **artifacts: str) -> list[str]:
        """Return the artifacts in the file after a command that ends with `until` and has these."""
        with open_run(checked, "data", until) as run:
            for stage in stages_between("data", until):
                found = replace(ref(stage), uri=artifacts.get(stage, f"/store/{stage}"))
                run.records[stage] = StageRecord(found, 1.0, reused=True)
        written = json.loads((run.folder / "summary.json").read_text())
        return [entry["artifact"] for entry in written["stages"].values()]

    assert summary_of("data") == ["/store/data"]
    longer = ["/store/data", "/store/sft"]
    assert summary_of("sft") == summary_of("data") == summary_of("sft") == longer
    assert summary_of("data", data="/store/another") == ["/store/another"]
    assert summary_of("sft") == longer


def test_a_run_without_results_gets_them_also_if_every_stage_was_reused(
    tmp_path: Path, database: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept_tags: dict[str, str] = {}

    def after(until: StageName = "evaluate") -> tuple[str, dict[str, float], list[str]]:
        """Return description, metrics and files of the run in MLflow after a command."""
        report = tmp_path / "report.html"
        report.write_text(f"<html>{_PENDING}")
        with open_run(checked, "data", until) as run:
            for stage in stages_between("data", until):
                run.record_result(stage, StageRecord(ref(stage, accuracy=0.75), 1.0, reused=True))
            monkeypatch.setattr(run.artifacts, "fetch", lambda _: tmp_path)
            run.remarks["drift from demo version 1"] = "lengths 0.3"
        assert run.parent_run_id is not None
        client = MlflowClient(run.tracking.uri)
        files = [file.path for file in client.list_artifacts(run.parent_run_id)]
        data = client.get_run(run.parent_run_id).data
        kept_tags.update(data.tags)
        return data.tags["mlflow.note.content"], data.metrics, files

    # A run in MLflow of its own: the other tests share theirs.
    checked = checked_in(tmp_path, database, run={"home": str(tmp_path), "device": "cpu", "seed": 7})
    text, metrics, files = after("data")
    assert set(metrics) == {"hours"}
    text, metrics, files = after()
    assert metrics["reward_accuracy"] == 0.75 and "report.html" in files
    [page] = tmp_path.glob("runs/*/report.html")
    assert "<span>drift from demo version 1 <b>lengths 0.3</b></span>" in page.read_text()
    again, kept, _ = after("data")
    assert (again, kept) == (text, metrics)
    assert kept_tags["rlhf.data"] == "digest-data"


def test_a_run_that_fails_after_its_data_has_their_digest_in_mlflow(tmp_path: Path, database: Path) -> None:
    checked = checked_in(tmp_path, database, run={"home": str(tmp_path), "device": "cpu", "seed": 8})
    with pytest.raises(RLHFError), open_run(checked, "data", "sft") as run:
        run.record_result("data", StageRecord(ref("data"), 1.0, reused=False))
        raise RLHFError("the stage sft fails")
    assert run.parent_run_id is not None
    assert MlflowClient(run.tracking.uri).get_run(run.parent_run_id).data.tags["rlhf.data"] == "digest-data"


def test_files_that_are_only_shown_end_no_run(
    tmp_path: Path, database: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(_: ArtifactRef) -> Path:
        raise OSError(errno.ENOSPC, "No space left on device")

    with open_run(checked_in(tmp_path, database), "data", "evaluate") as run:
        run.home.progress(run.name).mkdir()  # it cannot be written
        run.record_progress("sft", {"event": "progress", "task": "sft", "done": 1, "total": 4})
        run.records["evaluate"] = StageRecord(ref("evaluate"), 1.0, reused=False)
        monkeypatch.setattr(run.artifacts, "fetch", full)
    assert "MLflow's run has no report.html: " in caplog.text
    assert json.loads((run.folder / "run.json").read_text())["state"] == "finished"


def test_progress_of_an_earlier_attempt_is_not_shown(tmp_path: Path) -> None:
    run = pipeline(tmp_path)
    run.record_start("sft", tmp_path / "sft-01.log")
    task = {"task": "sft", "done": 9, "total": 20, "unit": "steps", "left": None}
    run.record_progress("sft", task)
    assert "sft 45 % (9 of 20 steps)" in "\n".join(describe_runs(run.home))
    run.record_start("sft", tmp_path / "sft-02.log")
    assert "45 %" not in "\n".join(describe_runs(run.home))


def test_progress_of_a_job_that_has_not_changed_is_reported_once(
    tmp_path: Path, database: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scheduler: Any = SimpleNamespace(kind="job")
    files: Any = SimpleNamespace(
        read_events=lambda: (
            [],
            [{"event": "progress", "task": "sft", "done": 0, "total": 4, "unit": "steps"}],
        )
    )

    def job(run: PipelineRun, spec: StageSpec, log_file: Path, on_event: Any, *_: Any) -> ArtifactRef:
        follower = JobFollower(scheduler, spec, log_file, 20.0, on_event, FAST, SYSTEM_CLOCK)
        for _poll in range(3):
            follower._read_events(files)
        return ref(spec.stage)

    monkeypatch.setattr(stage_runner, "_run_stage", job)
    run = PipelineRun(checked_in(tmp_path, database).config, "demo.yaml")
    events: list[dict[str, Any]] = []
    stage_runner.get_or_run_stage(run, "data", {}, RetryPolicy(0), events.append)
    assert [(event["done"], event["left"]) for event in events] == [(0, None)]


def test_rerun_removes_outdated_warning_tags(tmp_path: Path, database: Path) -> None:
    first = PipelineRun(checked_in(tmp_path, database).config, "demo.yaml")
    first.tags = {"rlhf.warnings": "ppo.kl.estimator: k3"}
    first.ensure_parent()
    first.record_guard("loops", "step 4: guard loops: 30 %")
    run = PipelineRun(first.config, "demo.yaml")
    run.ensure_parent()
    assert _warnings_of(run) == {"rlhf.guard.loops"}
    run.record_start("sft", tmp_path / "log")
    assert _warnings_of(run) == {"rlhf.guard.loops"}
    run.record_start("ppo", tmp_path / "log")
    assert _warnings_of(run) == set()
    run.record_guard("loops", "step 5: guard loops: 30 %")
    run.record_start("ppo", tmp_path / "log")  # the second try of the same run
    assert _warnings_of(run) == {"rlhf.guard.loops"}
    again = PipelineRun(first.config, "demo.yaml")
    again.tags = first.tags
    again.ensure_parent()
    assert _warnings_of(again) == {"rlhf.guard.loops", "rlhf.warnings"}


def test_the_report_has_the_guards_of_ppo_that_were_raised_in_this_run(
    tmp_path: Path, database: Path
) -> None:
    run = PipelineRun(checked_in(tmp_path, database).config, "demo.yaml")
    assert run.remarks == {}, "PPO may be reused, and its guards are those of another run"
    run.record_start("ppo", tmp_path / "log")
    assert run.remarks == {"guards raised": "none"}
    run.record_guard("eos_loss", "step 44: guard eos_loss: 0.0% of the responses end with EOS")
    run.record_start("ppo", tmp_path / "log")  # the second try of the same run
    run.record_resumed("ppo", 40)
    run.record_guard("loops", "step 45: guard loops: 98%")
    run.record_guard("loops", "step 60: guard loops: 97%")
    assert run.remarks == {"guards raised": "eos_loss (step 44), loops (step 45)"}


def test_the_report_of_a_run_that_another_process_began_does_not_deny_its_guards(
    tmp_path: Path, database: Path
) -> None:
    run = PipelineRun(checked_in(tmp_path, database).config, "demo.yaml")
    run.record_start("sft", tmp_path / "log")
    run.record_resumed("sft", 10)
    assert run.remarks == {}
    run.record_start("ppo", tmp_path / "log")
    run.record_resumed("ppo", 40)
    assert run.remarks == {"guards raised": "none; not known up to step 40"}
    run.record_guard("loops", "step 45: guard loops: 98%")
    run.record_start("ppo", tmp_path / "log")
    run.record_resumed("ppo", 50)
    assert run.remarks == {"guards raised": "loops (step 45); not known up to step 40"}


def _warnings_of(run: PipelineRun) -> set[str]:
    return {name for name in tags_of(run) if name.startswith(("rlhf.warnings", "rlhf.guard"))}


def test_stages_with_rewards_get_digests_of_their_code(tmp_path: Path) -> None:
    file = tmp_path / "rule.py"
    file.write_text("def f(samples):\n    return [1.0 for _ in samples]\n")
    run = pipeline(tmp_path, ppo={"rewards": [{"type": "python", "function": "rule:f", "file": str(file)}]})
    inputs: Any = {name: ref(name) for name in ("data", "sft", "reward", "ppo", "evaluate")}
    for stage in ("ppo", "evaluate", "register"):
        assert "ppo.rewards.0" in run.spec(stage, inputs).sources


@pytest.mark.parametrize(
    ("judge_of_samples", "changed"), [("reward", {"evaluate"}), ("language_model", {"sample", "evaluate"})]
)
def test_the_files_of_a_language_model_are_in_the_keys_of_the_stages_that_ask_it(
    judge_of_samples: str, changed: set[str], tmp_path: Path
) -> None:
    rubric = tmp_path / "rubric.txt"
    judge = {"url": "http://one/v1", "model": "m", "rubric": str(rubric)}
    inputs: Any = {name: ref(name) for name in ("data", "sft", "reward", "ppo", "sample", "evaluate")}
    keys = []
    for text in ("Shorter is better.", "Longer is better."):
        rubric.write_text(text)
        run = pipeline(tmp_path, evaluate={"language_model": judge}, sample={"judge": judge_of_samples})
        assert "evaluate.language_model.rubric" in run.spec("register", inputs).sources
        keys.append(
            {stage: run.spec(stage, inputs).key for stage in ("ppo", "sample", "evaluate", "register")}
        )
    assert {stage for stage in keys[0] if keys[0][stage] != keys[1][stage]} == changed
