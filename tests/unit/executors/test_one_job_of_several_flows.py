"""Submitting the job of a stage, with a real store and a scheduler that accepts a name twice.

- two flows submit and follow one name, of which the scheduler runs one job at a time
- files of a flow that has not submitted its job, or was killed before, are submitted under the name in them
- a scheduler that does not answer for a while changes nothing when the job is submitted or looked up
"""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

from rlhf_core.errors import (
    InfrastructureError,
    StageTimedOut,
)
from rlhf_core.executors import base
from rlhf_core.executors.follow import JobFollower
from rlhf_core.executors.job_files import JobFiles
from rlhf_core.executors.kuberay import KubeRayJobs
from rlhf_core.executors.spec import StageSpec
from rlhf_core.storage.store import Store
from rlhf_core.types import ArtifactRef
from tests.support.followed_jobs import FAST, KEY, REF, RESULT, Job, add_events, follower


class AcceptsNamesTwice(KubeRayJobs):
    """As Slurm: a second job of the same name is accepted, and a job is not seen at once."""

    def __init__(self) -> None:
        super().__init__(None)
        self.submitted: list[str] = []

    def submit(self, job: base.Job) -> None:
        time.sleep(0.1)
        self.submitted.append(job.name)

    def status(self, name: str) -> base.JobStatus:
        return base.JobStatus("running" if name in self.submitted else "missing")


def test_two_flows_follow_one_job(spec: StageSpec, store: Store, tmp_path: Path) -> None:
    scheduler = AcceptsNamesTwice()

    def work(files: JobFiles) -> None:
        time.sleep(0.5)
        add_events(files, [RESULT])

    Job(store, work)
    results: list[ArtifactRef] = []
    start = threading.Barrier(2)

    def flow(log_file: Path) -> None:
        start.wait()
        results.append(JobFollower(scheduler, spec, log_file, 20.0, lambda event: None, FAST).run())

    flows = [threading.Thread(target=flow, args=[tmp_path / f"{name}.log"], daemon=True) for name in "ab"]
    for each in flows:
        each.start()
    for each in flows:
        each.join(timeout=20.0)
    assert results == [REF, REF]
    assert len(set(scheduler.submitted)) == 1


class Unsteady(AcceptsNamesTwice):
    """Does not answer the first questions."""

    def __init__(self, silent: int = 2) -> None:
        super().__init__()
        self.asked = 0
        self._silent = silent

    def status(self, name: str) -> base.JobStatus:
        self.asked += 1
        if self.asked <= self._silent:
            raise InfrastructureError("the scheduler does not answer")
        return super().status(name)


def not_submitted(store: Store, spec: StageSpec) -> JobFiles:
    """Return the files of a flow that was killed before it submitted the job, or is about to submit it."""
    files = JobFiles(store, KEY, 1)
    assert files.create(spec, "kuberay", 20.0, {})
    return files


def test_a_job_that_was_not_submitted_is_submitted_under_its_name(
    spec: StageSpec, store: Store, tmp_path: Path
) -> None:
    files = not_submitted(store, spec)
    scheduler = AcceptsNamesTwice()
    found = follower(scheduler, spec, tmp_path / "a.log")._find()
    assert found is not None and found.folder == files.folder
    assert scheduler.submitted == [files.submission.job_name]


def test_other_settings_are_a_new_job(spec: StageSpec, store: Store, tmp_path: Path) -> None:
    run = spec.config.run.model_copy(update={"stage_timeout": 5.0})
    old = spec.config.model_copy(update={"run": run})
    files = not_submitted(store, replace(spec, config=old))
    scheduler = AcceptsNamesTwice()
    waiting = follower(scheduler, spec, tmp_path / "a.log")
    assert waiting._find() is None
    assert waiting._submit().number == 2
    assert files.submission.job_name not in scheduler.submitted


def test_a_job_that_the_scheduler_has_forgotten_is_followed_by_another(
    spec: StageSpec, store: Store, tmp_path: Path
) -> None:
    add_events(not_submitted(store, spec), [{"event": "started"}])
    waiting = follower(AcceptsNamesTwice(), spec, tmp_path / "a.log")
    assert waiting._find() is None


def test_looking_for_a_job_has_the_same_limits_as_following(
    spec: StageSpec, store: Store, tmp_path: Path
) -> None:
    not_submitted(store, spec)
    late = follower(Unsteady(), spec, tmp_path / "b.log", timeout=-1.0)
    with pytest.raises(StageTimedOut, match=r"run\.stage_timeout"):
        late._find()


class Refuses(Unsteady):
    """Does not answer the first two submissions either. With `arrives`, the first one arrives."""

    def __init__(self, arrives: bool) -> None:
        super().__init__()
        self.requests = 0
        self._arrives = arrives

    def submit(self, job: base.Job) -> None:
        self.requests += 1
        if (self._arrives or self.requests > 2) and job.name not in self.submitted:
            self.submitted.append(job.name)
        if self.requests <= 2:
            raise InfrastructureError("the scheduler does not answer")


@pytest.mark.parametrize("arrives", [False, True])
def test_a_job_is_submitted_when_the_scheduler_answers_again(
    spec: StageSpec, store: Store, tmp_path: Path, arrives: bool
) -> None:
    scheduler = Refuses(arrives)

    def work(files: JobFiles) -> None:
        while not scheduler.submitted:
            time.sleep(0.01)
        add_events(files, [RESULT])

    Job(store, work)
    assert JobFollower(scheduler, spec, tmp_path / "data-01.log", 20.0, lambda event: None, FAST).run() == REF
    assert len(scheduler.submitted) == 1


def test_a_job_is_looked_up_until_the_scheduler_answers(
    spec: StageSpec, store: Store, tmp_path: Path
) -> None:
    files = JobFiles(store, KEY, 1)
    assert files.create(spec, "kuberay", 20.0, {})
    scheduler = Unsteady()
    scheduler.submitted.append(files.submission.job_name)
    found = follower(scheduler, spec, tmp_path / "a.log")._find()
    assert found is not None and found.folder == files.folder and scheduler.asked == 3
    impatient = follower(Unsteady(), spec, tmp_path / "b.log", waits=replace(FAST, unreachable=0.0))
    with pytest.raises(InfrastructureError, match="does not answer"):
        impatient._find()
