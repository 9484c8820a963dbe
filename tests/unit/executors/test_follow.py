"""A stage as a job: `JobFollower`, with a real store, KubeRay's executor and a scripted API server.

- events, log and result of the job reach the flow in order
- a job that ends without a result ends in an error that says why and quotes its log; the manifest decides
- a flow that is started again follows the job that runs, and starts no second one
- a scheduler that does not answer for a while changes nothing
- a cancellation or the time limit asks the job to stop, and deletes it
- a job that has sent its outcome is deleted with its Ray cluster, after its log has been read
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from rlhf_core.config import PipelineConfig
from rlhf_core.errors import (
    ConfigError,
    DataError,
    InfrastructureError,
    OutOfMemory,
    RLHFError,
    StageFailed,
    StageTimedOut,
)
from rlhf_core.executors.follow import JobFollower, Waits, shared_environment
from rlhf_core.executors.job_files import JobFiles
from rlhf_core.executors.kuberay import KubeRayJobs
from rlhf_core.executors.spec import StageSpec, config_from_json
from rlhf_core.storage.artifacts import ArtifactStore, Provenance
from rlhf_core.storage.store import Store, open_store
from rlhf_core.types import ArtifactRef
from tests.support.followed_jobs import FAST, KEY, REF, RESULT, Job, add_events, follower
from tests.support.scripted_kubernetes import ScriptedKubernetes

RUNNING = {"jobDeploymentStatus": "Running", "jobStatus": "RUNNING", "rayClusterName": "c1"}


def following(
    spec: StageSpec,
    tmp_path: Path,
    on_event: Callable[[dict[str, Any]], None] = lambda event: None,
    waits: Waits = FAST,
) -> ArtifactRef:
    jobs = KubeRayJobs(None)
    return JobFollower(jobs, spec, tmp_path / "data-01.log", 20.0, on_event, waits).run()


def test_events_log_and_result_reach_the_flow(
    api: ScriptedKubernetes, spec: StageSpec, store: Store, tmp_path: Path
) -> None:
    def work(files: JobFiles) -> None:
        add_events(files, [{"event": "started", "attempt": 1}, {"event": "checkpoint", "step": 5}])
        files.write_log(b"step 5\nstep 6\n")
        time.sleep(0.1)
        add_events(files, [{"event": "checkpoint", "step": 6}, RESULT])

    Job(store, work)
    events: list[dict[str, Any]] = []
    assert following(spec, tmp_path, events.append) == REF
    assert [event.get("step") for event in events] == [None, 5, 6]
    assert (tmp_path / "data-01.log").read_text() == "step 5\nstep 6\n"
    [body] = api.created
    words = body["spec"]["entrypoint"].split()
    assert words == ["python", "-P", "-m", "rlhf_core.executors.remote", spec.config.store_url, KEY, "1"]
    submission = JobFiles(store, KEY, 1).submission
    assert submission.spec == spec
    assert submission.job_name == body["metadata"]["name"]
    key = f"jobs/{KEY}/000001/spec.json"
    written = json.loads(store.read_bytes(key) or b"")
    del written["spec"]["until"], written["spec"]["base_models"]
    store.put_bytes(key, json.dumps(written).encode())
    old = JobFiles(store, KEY, 1).submission.spec
    assert (old.until, old.base_models) == ("register", {}), "of an earlier release"


def test_only_what_is_stored_may_have_fields_of_an_earlier_release() -> None:
    tree = PipelineConfig().model_dump(mode="json", by_alias=True)
    tree["sft"]["deepspeed"]["allow_other_ranks"] = True
    assert PipelineConfig.of_any_release(tree) == PipelineConfig()
    with pytest.raises(ValidationError, match="allow_other_ranks"):
        config_from_json(tree)


def test_an_error_of_the_stage_keeps_its_class_and_message(
    api: ScriptedKubernetes, spec: StageSpec, store: Store, tmp_path: Path
) -> None:
    error = {"event": "error", "type": "DataError", "message": "rows.jsonl:3: no prompt; add one"}
    Job(store, lambda files: add_events(files, [error]))
    with pytest.raises(DataError, match=r"^rows\.jsonl:3: no prompt; add one$"):
        following(spec, tmp_path)


def test_a_job_that_has_sent_its_result_is_deleted_after_its_log_was_read(
    api: ScriptedKubernetes, spec: StageSpec, store: Store, tmp_path: Path
) -> None:
    """Its pods hold GPUs until the RayJob is deleted."""

    def work(files: JobFiles) -> None:
        files.write_log(b"step 6\n")
        add_events(files, [RESULT])

    Job(store, work)
    assert following(spec, tmp_path) == REF
    assert api.objects == {}
    assert (tmp_path / "data-01.log").read_text() == "step 6\n"


def test_after_an_error_the_job_is_deleted_and_the_next_attempt_starts_another_at_once(
    api: ScriptedKubernetes, spec: StageSpec, store: Store, tmp_path: Path
) -> None:
    error = {"event": "error", "type": "StageFailed", "message": "rank 1 died"}
    Job(store, lambda files: add_events(files, [error]))
    with pytest.raises(StageFailed, match="rank 1 died"):
        following(spec, tmp_path)
    assert api.objects == {}
    Job(store, lambda files: add_events(files, [RESULT]), number=2)
    assert following(spec, tmp_path) == REF
    assert len(api.created) == 2


def test_a_job_that_was_preempted_is_deleted_and_submitted_again(
    api: ScriptedKubernetes, spec: StageSpec, store: Store, tmp_path: Path
) -> None:
    """Kueue would resume it, and two jobs would work at one stage."""

    def work(files: JobFiles) -> None:
        api.statuses = [{"jobDeploymentStatus": "Suspended"}]
        evicted = {"event": "error", "type": "StageFailed", "message": "asked to stop, or evicted"}
        add_events(files, [evicted])

    Job(store, work)
    with pytest.raises(StageFailed, match="evicted"):
        following(spec, tmp_path)
    assert api.objects == {}
    api.statuses = [RUNNING]
    Job(store, lambda files: add_events(files, [RESULT]), number=2)
    assert following(spec, tmp_path) == REF


@pytest.mark.parametrize(
    ("status", "error", "words"),
    [
        ({"jobDeploymentStatus": "Failed", "reason": "AppFailed"}, StageFailed, "failed: Failed, AppFailed"),
        (
            {"jobDeploymentStatus": "Failed", "message": "head pod evicted: low on ephemeral-storage"},
            StageFailed,
            "evicted: low on ephemeral-storage",
        ),
        ({"jobDeploymentStatus": "Failed", "message": "OOMKilled"}, OutOfMemory, "ran out of memory"),
        ({"jobDeploymentStatus": "Failed", "reason": "DeadlineExceeded"}, StageTimedOut, "time_limit"),
        ({"jobDeploymentStatus": "Complete", "jobStatus": "STOPPED"}, StageFailed, "was stopped or evicted"),
        ({"jobDeploymentStatus": "Complete", "jobStatus": "SUCCEEDED"}, StageFailed, "without a result"),
    ],
)
def test_a_job_that_ends_without_a_result_gives_the_reason(
    api: ScriptedKubernetes,
    spec: StageSpec,
    store: Store,
    tmp_path: Path,
    status: dict[str, str],
    error: type[RLHFError],
    words: str,
) -> None:
    def work(files: JobFiles) -> None:
        files.write_log(b"starting\nRuntimeError: bad wheel\n")
        api.statuses = [{**status, "rayClusterName": "c1"}]

    api.statuses = [RUNNING]
    Job(store, work)
    with pytest.raises(error) as raised:
        following(spec, tmp_path)
    assert type(raised.value) is error
    message = str(raised.value)
    assert message.startswith("stage data, RayJob rlhf-data-")
    assert words in message
    assert message.endswith("end of the log: RuntimeError: bad wheel")
    assert (tmp_path / "data-01.log").read_text() == "starting\nRuntimeError: bad wheel\n"


def test_a_job_that_the_operator_finds_invalid_is_an_error_of_the_user(
    api: ScriptedKubernetes, spec: StageSpec, tmp_path: Path
) -> None:
    api.statuses = [{"jobDeploymentStatus": "ValidationFailed", "message": "no rayVersion"}]
    with pytest.raises(ConfigError, match=r"was refused: ValidationFailed, no rayVersion; correct the templ"):
        following(spec, tmp_path)


def test_a_job_that_is_deleted_is_a_failure(
    api: ScriptedKubernetes, spec: StageSpec, store: Store, tmp_path: Path
) -> None:
    def work(files: JobFiles) -> None:
        while not api.objects:
            time.sleep(0.01)
        time.sleep(0.2)
        api.objects.clear()

    Job(store, work)
    with pytest.raises(StageFailed, match="does not exist any more"):
        following(spec, tmp_path)


def test_the_manifest_decides(api: ScriptedKubernetes, spec: StageSpec, store: Store, tmp_path: Path) -> None:
    """The node is lost after the job has published its artifact and before its last event."""
    output = tmp_path / "output"
    output.mkdir()
    (output / "rows.jsonl").write_text("{}\n")
    published = ArtifactStore(store, spec.home.cache).publish("data", KEY, output, Provenance())
    api.statuses = [RUNNING, {"jobDeploymentStatus": "Failed"}]
    assert following(spec, tmp_path) == published


def test_a_flow_that_is_started_again_follows_the_same_job(
    api: ScriptedKubernetes, spec: StageSpec, store: Store, tmp_path: Path
) -> None:
    lost = _killed_flow(api, spec, tmp_path)

    def work(files: JobFiles) -> None:
        while not api.count("GET"):  # the flow looks for the job
            time.sleep(0.01)
        time.sleep(0.1)
        add_events(files, [RESULT])

    Job(store, work)
    events: list[dict[str, Any]] = []
    assert following(spec, tmp_path, events.append) == REF
    assert api.count("POST") == 1
    assert [event["event"] for event in events] == ["warning", "checkpoint"]
    assert f"RayJob {lost} is running already; following it" in events[0]["message"]


def test_a_flow_killed_before_it_submitted_submits_under_the_same_name(
    api: ScriptedKubernetes,
    spec: StageSpec,
    store: Store,
    tmp_path: Path,
) -> None:
    files = JobFiles(store, KEY, 1)
    assert files.create(spec, "kuberay", 20.0, {})

    def work(files: JobFiles) -> None:
        while not api.objects:
            time.sleep(0.01)
        add_events(files, [RESULT])

    Job(store, work)
    assert following(spec, tmp_path, waits=FAST) == REF
    assert [body["metadata"]["name"] for body in api.created] == [files.submission.job_name]


def test_after_a_job_that_has_ended_the_next_attempt_starts_another(
    api: ScriptedKubernetes, spec: StageSpec, store: Store, tmp_path: Path
) -> None:
    api.statuses = [{"jobDeploymentStatus": "Failed"}]
    with pytest.raises(StageFailed):
        following(spec, tmp_path)
    api.statuses = [{"jobDeploymentStatus": "Failed"}, RUNNING]
    Job(store, lambda files: add_events(files, [RESULT]), number=2)
    assert following(spec, tmp_path) == REF
    assert api.count("POST") == 2
    assert len({body["metadata"]["name"].rsplit("-", 2)[1] for body in api.created}) == 2


def test_a_scheduler_that_does_not_answer_for_a_while_changes_nothing(
    api: ScriptedKubernetes, spec: StageSpec, store: Store, tmp_path: Path
) -> None:
    def work(files: JobFiles) -> None:
        api.failures = [500, "drop", 410, 503]
        while api.failures:
            time.sleep(0.01)
        add_events(files, [RESULT])

    Job(store, work)
    assert following(spec, tmp_path, waits=FAST) == REF


def test_a_scheduler_that_does_not_answer_at_all_is_a_fault_and_the_job_continues(
    api: ScriptedKubernetes,
    spec: StageSpec,
    store: Store,
    tmp_path: Path,
) -> None:
    Job(store, lambda files: api.failures.extend([503] * 10_000))
    with pytest.raises(InfrastructureError, match="answers 503"):
        following(spec, tmp_path, waits=replace(FAST, unreachable=0.2))
    assert api.count("DELETE") == 0


def test_a_cancelled_flow_asks_the_job_to_stop_and_deletes_it(
    api: ScriptedKubernetes, spec: StageSpec, store: Store, tmp_path: Path
) -> None:
    seen: list[str] = []

    def work(files: JobFiles) -> None:
        add_events(files, [{"event": "progress"}])
        while not files.is_asked_to_stop():
            time.sleep(0.01)
        seen.extend(api.requests)
        add_events(files, [{"event": "error", "type": "StageFailed", "message": "asked to stop"}])

    def interrupt(event: dict[str, Any]) -> None:
        raise KeyboardInterrupt

    Job(store, work)
    with pytest.raises(KeyboardInterrupt):
        following(spec, tmp_path, interrupt)
    assert not any(request.startswith("DELETE") for request in seen), "it is asked before it is deleted"
    assert api.objects == {}


def test_a_job_that_does_not_stop_is_deleted(
    api: ScriptedKubernetes, spec: StageSpec, tmp_path: Path, store: Store
) -> None:
    with pytest.raises(StageTimedOut, match=r"run\.stage_timeout=604800 is over"):
        jobs = KubeRayJobs(None)
        JobFollower(
            jobs, spec, tmp_path / "data-01.log", 0.2, lambda event: None, replace(FAST, stop=0.1)
        ).run()
    assert store.exists(f"jobs/{KEY}/000001/stop")
    assert api.objects == {}


def test_the_reason_for_waiting_is_logged_once(
    api: ScriptedKubernetes, spec: StageSpec, store: Store, tmp_path: Path
) -> None:
    waiting = {"jobDeploymentStatus": "Suspended", "message": "queue is full"}
    api.statuses = [waiting] * 30 + [RUNNING]

    def work(files: JobFiles) -> None:
        while len(api.statuses) > 1:
            time.sleep(0.01)
        add_events(files, [RESULT])

    Job(store, work)
    events: list[dict[str, Any]] = []
    following(spec, tmp_path, events.append)
    assert [event["message"].partition(" waits: ")[2] for event in events] == ["Suspended, queue is full"]


def test_addresses_are_shared_and_secrets_are_not() -> None:
    environ = {
        "MLFLOW_TRACKING_URI": "http://mlflow:5000",
        "AWS_ENDPOINT_URL_S3": "http://user:secret@s3:9000",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "HF_TOKEN": "secret",
    }
    assert shared_environment(environ) == {"MLFLOW_TRACKING_URI": "http://mlflow:5000"}


def _killed_flow(api: ScriptedKubernetes, spec: StageSpec, tmp_path: Path) -> str:
    """Leave what a flow leaves that was killed while its job ran; the name of the job."""
    files = JobFiles(open_store(spec.config), KEY, 1)
    files.create(spec, "kuberay", 20.0, {})
    name = files.submission.job_name
    follower(KubeRayJobs(None), spec, tmp_path / "data-00.log")._start(files)
    add_events(files, [{"event": "checkpoint", "step": 5}])
    return name
