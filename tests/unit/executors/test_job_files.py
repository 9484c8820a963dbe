"""The objects of a job in the store, with a store that counts its operations.

- a flow that is started again reads each event once, and events are one object, however long the job runs
- jobs are found without listing their events; a job without a spec was deleted, and its number is not used
  again
- a job that was cancelled in a queue is not submitted again
- an outcome before other events is that of a start that was preempted
- all jobs of a stage key are deleted when its artifact exists, and not before
- a job that is being deleted is not submitted again
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rlhf_core.config import PipelineConfig
from rlhf_core.errors import ConfigError, StageFailed, StoreError
from rlhf_core.executors.base import Job, JobStatus
from rlhf_core.executors.follow import JobFollower, Waits
from rlhf_core.executors.job_files import JobFiles, delete_jobs
from rlhf_core.executors.remote import _Reporter
from rlhf_core.executors.spec import StageSpec
from rlhf_core.storage.artifacts import ArtifactStore, Provenance
from tests.support.followed_jobs import add_events
from tests.support.scripted_machine import ManualClock
from tests.support.scripted_store import ScriptedStore

KEY = "0" * 16


class OneState:
    """A scheduler whose jobs are always in one state."""

    title = "job"
    holds_resources = False

    def __init__(self, state: Any) -> None:
        self.status_of_all = JobStatus(state)
        self.submitted: list[str] = []
        self.cancelled: list[str] = []

    def submit(self, job: Job) -> None:
        self.submitted.append(job.name)

    def status(self, name: str) -> JobStatus:
        return self.status_of_all

    def cancel(self, name: str) -> None:
        self.cancelled.append(name)

    def log_tail(self, name: str) -> str:
        return ""


@pytest.fixture
def spec(tmp_path: Path) -> StageSpec:
    run = {"home": str(tmp_path / "home"), "executor": "slurm"}
    return StageSpec("data", KEY, PipelineConfig.model_validate({"run": run}))


@pytest.fixture
def store(spec: StageSpec) -> ScriptedStore:
    return ScriptedStore(spec.home.store)


def follower(
    spec: StageSpec,
    store: ScriptedStore,
    scheduler: OneState,
    events: list[dict[str, Any]],
    clock: ManualClock | None = None,
) -> JobFollower:
    log_file = spec.home.make().path / "data-01.log"
    follower = JobFollower(scheduler, spec, log_file, 1e6, events.append, Waits(), clock or ManualClock())
    follower._store = store
    return follower


def publish(spec: StageSpec, store: ScriptedStore, tmp_path: Path) -> None:
    output = tmp_path / "output"
    output.mkdir()
    (output / "rows.jsonl").write_text("{}\n")
    ArtifactStore(store, spec.home.cache).publish("data", KEY, output, Provenance())


def test_a_flow_that_is_started_again_reads_a_long_job_with_few_requests(
    spec: StageSpec, store: ScriptedStore, tmp_path: Path
) -> None:
    files = JobFiles(store, KEY, 1)
    assert files.create(spec, "slurm", 1e6, {})
    reporter = _Reporter(files, tmp_path / "log")
    for second in range(300):
        reporter.send({"event": "progress", "task": "sft", "done": second})
        if second % 100 == 0:
            reporter.send({"event": "checkpoint", "step": second})
        reporter._write_events()
    assert len(store.list(files.folder)) == 2, "spec and events"
    store.calls.clear()
    events: list[dict[str, Any]] = []
    again = follower(spec, store, OneState("running"), events)
    found = again._find()
    assert found is not None
    again._read_events(found)
    again._read_events(found)
    assert [event.get("step", event.get("done")) for event in events] == [None, 0, 100, 200, 299]
    assert len(store.calls) < 15


def test_jobs_are_found_without_listing_their_events(spec: StageSpec, store: ScriptedStore) -> None:
    for number in (1, 2):
        assert JobFiles(store, KEY, number).create(spec, "slurm", 1.0, {})
    store.before("sizes", StoreError("it lists more than 100000 objects"), lasting=True)
    newest = JobFiles.newest(store, KEY)
    assert newest is not None and newest.number == 2 and newest.read_submission()
    assert JobFiles.newest(store, "1" * 16) is None


@pytest.mark.parametrize("outcome", ["error", "result"])
def test_the_outcome_is_read_from_the_last_event(spec: StageSpec, store: ScriptedStore, outcome: str) -> None:
    files = JobFiles(store, KEY, 1)
    assert files.create(spec, "slurm", 1.0, {})
    add_events(files, [{"event": "checkpoint", "step": number} for number in range(1, 50)])
    add_events(files, [{"event": outcome}])
    store.calls.clear()
    assert follower(spec, store, OneState("running"), [])._find() is None
    assert len(store.calls) < 10


def test_a_preempted_job_that_waits_to_be_resumed_is_cancelled(spec: StageSpec, store: ScriptedStore) -> None:
    files = JobFiles(store, KEY, 1)
    assert files.create(spec, "slurm", 1.0, {})
    add_events(files, [{"event": "error", "type": "StageFailed", "message": "evicted"}])
    scheduler = OneState("pending")
    assert follower(spec, store, scheduler, [])._find() is None
    assert scheduler.cancelled == [files.submission.job_name], "otherwise two jobs of the stage could run"


def test_a_number_is_not_used_again_after_its_job_was_deleted(spec: StageSpec, store: ScriptedStore) -> None:
    """A job can write its last object once more after the flow has deleted the others."""
    add_events(JobFiles(store, KEY, 4), [{"event": "result"}])
    flow = follower(spec, store, OneState("running"), [])
    assert flow._find() is None
    assert flow._submit().number == 5


def test_a_folder_whose_spec_is_being_written_keeps_its_number(spec: StageSpec, store: ScriptedStore) -> None:
    """A local store creates the folder before the file."""
    path = store.local_path(JobFiles(store, KEY, 1).folder)
    assert path is not None
    path.mkdir(parents=True)
    flow = follower(spec, store, OneState("running"), [])
    assert flow._find() is None
    assert flow._submit().number == 1


def test_two_flows_that_find_no_job_create_one(spec: StageSpec, store: ScriptedStore) -> None:
    scheduler = OneState("running")
    flows = [follower(spec, store, scheduler, []) for _ in "ab"]
    assert [flow._find() for flow in flows] == [None, None]
    assert [flow._submit().number for flow in flows] == [1, 1]
    assert len(scheduler.submitted) == 1


def test_a_job_that_was_cancelled_in_a_queue_is_not_submitted_again(
    spec: StageSpec, store: ScriptedStore
) -> None:
    """It would read the request to stop of the flow that has cancelled it, and end."""
    files = JobFiles(store, KEY, 1)
    assert files.create(spec, "slurm", 1.0, {})
    follower(spec, store, OneState("pending"), [])._stop(files, files.submission.job_name)
    scheduler = OneState("missing")
    again = follower(spec, store, scheduler, [])
    assert again._find() is None
    new = again._submit()
    assert new.number == 2 and not new.is_asked_to_stop()
    assert scheduler.submitted == [new.submission.job_name]


def test_an_outcome_before_other_events_is_not_that_of_the_job(spec: StageSpec, store: ScriptedStore) -> None:
    """The job was preempted while no flow followed it, and its scheduler has started it again."""
    files = JobFiles(store, KEY, 1)
    assert files.create(spec, "slurm", 1.0, {})
    evicted = {"event": "error", "type": "StageFailed", "message": "asked to stop, or evicted"}
    for event in ({"event": "started"}, evicted, {"event": "started"}):
        add_events(files, [event])
    flow = follower(spec, store, OneState("running"), [])
    found = flow._find()
    assert found is not None
    flow._read_events(found)
    assert flow._outcome is None
    add_events(files, [evicted])
    flow._read_events(found)
    assert isinstance(flow._outcome, StageFailed)


def test_jobs_are_deleted_when_the_artifact_exists(
    spec: StageSpec, store: ScriptedStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = JobFiles(store, KEY, 1)
    assert files.create(spec, "slurm", 1.0, {})
    error = {"event": "error", "type": "StageFailed", "message": "rank 1 died"}
    add_events(files, [error])
    files.write_log(b"step 5\n")
    flow = follower(spec, store, OneState("failed"), [])
    monkeypatch.setattr(flow, "_find", lambda: files)
    with pytest.raises(StageFailed):
        flow.run()
    delete_jobs(store, spec)
    assert files.read_log() == b"step 5\n", "kept for people"
    publish(spec, store, tmp_path)
    flow.run()
    assert store.list(f"jobs/{KEY}") == []


def test_a_job_that_is_being_deleted_is_not_submitted_again(
    spec: StageSpec, store: ScriptedStore, tmp_path: Path
) -> None:
    """Without its events, it looks as if it had not been submitted yet."""
    files = JobFiles(store, KEY, 1)
    assert files.create(spec, "slurm", 1.0, {})
    add_events(files, [{"event": "result"}])
    files.write_log(b"step 5\n")
    scheduler = OneState("missing")
    found: list[JobFiles | None] = []
    other = follower(spec, store, scheduler, [])
    store.before("delete", lambda: found.append(other._find()), key="log.txt")
    publish(spec, store, tmp_path)
    delete_jobs(store, spec)
    assert found == [None]
    assert scheduler.submitted == []


def test_a_job_that_is_deleted_while_a_flow_finds_it_is_not_an_error(
    spec: StageSpec, store: ScriptedStore
) -> None:
    files = JobFiles(store, KEY, 1)
    assert files.create(spec, "slurm", 1.0, {})
    store.before("read_bytes", lambda: store.delete_prefix(files.folder), key="spec.json", call=2)
    scheduler = OneState("missing")
    assert follower(spec, store, scheduler, [])._find() is None
    assert scheduler.submitted == []


def test_a_job_of_another_release_is_refused_with_what_to_delete(
    spec: StageSpec, store: ScriptedStore
) -> None:
    files = JobFiles(store, KEY, 1)
    files.create(spec, "slurm", 20.0, {})
    text = store.read_bytes(f"{files.folder}/spec.json")
    assert text is not None
    content = json.loads(text)
    content["spec"]["config"]["ppo"]["engine"]["dispatch"] = "queue"
    store.put_bytes(f"{files.folder}/spec.json", json.dumps(content).encode())
    with pytest.raises(ConfigError, match=r"spec\.json is of another release; delete this folder"):
        JobFiles(store, KEY, 1).read_submission()
