"""Runs a stage as a job of a cluster: submits it or finds the one that is running, and follows it.

find       a job of this stage key that was submitted before and has not ended is followed: a flow that
           was killed and is started again continues to wait for its job
submit     `jobs/{key}/{number}/spec.json` is created once. Every flow that finds it and no job submits the
           job under the name in it: no scheduler runs two jobs of one name at the same time
follow     events and log come from the store, the state from the scheduler. A result, or a manifest in
           the store, is a success; a job that ended without one is an error of rlhf_core.errors
release    a job that has sent its outcome is cancelled if its scheduler keeps the resources of ended jobs.
           After a success, the objects of all jobs of the stage key are deleted (job_files.py)
stop       on Ctrl-C, SIGTERM or a cancellation the job is asked to stop through the store, which gives it
           time to save a checkpoint, and is then cancelled. If the flow is killed, the job continues
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from rlhf_core.config import PipelineConfig
from rlhf_core.config.pipeline import Executor
from rlhf_core.config.redact import has_credentials
from rlhf_core.errors import InfrastructureError, RLHFError, StageTimedOut
from rlhf_core.executors.base import Job, JobStatus, Scheduler
from rlhf_core.executors.child import TERM_SECONDS, OnEvent, log_reference
from rlhf_core.executors.events import outcome_of
from rlhf_core.executors.job_files import Event, JobFiles, delete_jobs
from rlhf_core.executors.spec import StageSpec
from rlhf_core.pipeline import StageName
from rlhf_core.storage.artifacts import ArtifactStore
from rlhf_core.storage.s3 import ADDRESS_VARIABLES, s3_endpoint
from rlhf_core.storage.store import open_store
from rlhf_core.system.waiting import SYSTEM_CLOCK, Clock
from rlhf_core.types import ArtifactRef

log = logging.getLogger(__name__)

_SHARED_VARIABLES = (*ADDRESS_VARIABLES, "MLFLOW_TRACKING_URI")
"""Addresses that a job gets from the flow. Secrets come from the cluster."""


@dataclass(frozen=True)
class Waits:
    """Intervals and limits of following a job, in seconds."""

    poll: float = 2.0
    """Between two requests for events."""
    status: float = 5.0
    """Between two requests for the job's status."""
    log: float = 30.0
    """Between two reads of the job's log."""
    # Less than `ttlSecondsAfterFinished` of deployments/kubernetes/rayjob.yaml: a flow that reaches the
    # scheduler again still finds the RayJob.
    unreachable: float = 300.0
    """How long a scheduler may not answer."""
    # The job looks for the request every 5 s (`remote`), and its reaper may need 10 s more than the stage
    # (`child`). `reconcile.FLOW_STOP_SECONDS` must be longer.
    stop: float = TERM_SECONDS + 25.0
    """Time for a job to see the request, save a checkpoint and end."""


def open_scheduler(config: PipelineConfig, stage: StageName) -> Scheduler:
    """Return the scheduler of `stage`, which must not be local. Only its packages are imported."""
    resources = config.run.resources.of(stage)
    match config.run.executor_of(stage):
        case "ray":
            from rlhf_core.executors.ray_job import RayJobs

            return RayJobs()
        case "kuberay":
            from rlhf_core.executors.kuberay import KubeRayJobs

            return KubeRayJobs(resources.namespace)
        case "slurm":
            from rlhf_core.executors.slurm import SlurmJobs

            # `run.home` of the flow's host is not that of the nodes. Every node has /tmp, each its own.
            store = config.store_folder
            if store is None:
                return SlurmJobs(Path("/tmp"), are_logs_shared=False)
            return SlurmJobs(store / "jobs" / "slurm")
        case "local":
            raise AssertionError("a local stage is a child process")


def shared_environment(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the addresses in the environment that a job on another host needs too, without credentials."""
    values = {name: environ[name] for name in _SHARED_VARIABLES if environ.get(name)}
    # An address can contain user and password, which must not get into the store with `spec.json`.
    return {name: value for name, value in values.items() if not has_credentials(value)}


class JobFollower:
    """Submits the job of one stage, or finds the one that runs, and waits for its outcome.

    Args:
        scheduler: Starts the job and returns its state.
        spec: The stage.
        log_file: Gets a copy of the end of the job's log.
        timeout: Seconds, including the time in queues.
        on_event: Receives the job's events.
        waits: Intervals and limits.
        clock: For all waits.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        spec: StageSpec,
        log_file: Path,
        timeout: float,
        on_event: OnEvent,
        waits: Waits = Waits(),
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self._scheduler = scheduler
        self._spec = spec
        self._log_file = log_file
        self._clock = clock
        self._deadline = clock.monotonic() + timeout
        self._on_event = on_event
        self._waits = waits
        self._store = open_store(spec.config)
        self._answered = self._clock.monotonic()
        """When the scheduler answered last."""
        self._next_number = 1
        """The number of a job that this flow submits. Another flow may create it first."""
        self._read = 0
        """Number of the events that were read."""
        self._progress: list[Event] = []
        """The progress that was read last."""
        self._outcome: ArtifactRef | RLHFError | None = None
        self._reason = ""

    def run(self) -> ArtifactRef:
        """Run the stage as a job and return its artifact.

        Raises:
            RLHFError: The error that the stage sent, with its class.
            ConfigError: The scheduler refused the job.
            StageFailed: The job died, was evicted, stopped or deleted.
            StageTimedOut: The job took longer than the timeout, or the scheduler ended it at its limit.
            OutOfMemory: The scheduler reports it.
            InfrastructureError: The scheduler or the store did not answer. The job continues.
        """
        files = self._find() or self._submit()
        name = files.submission.job_name
        try:
            status = self._follow(files, name)
        except BaseException as error:
            # After another error the job continues, and the next attempt finds it.
            if isinstance(error, StageTimedOut) or not isinstance(error, Exception):
                self._stop(files, name)
            raise
        self._fetch_log(files, name)
        outcome = self._outcome
        if not isinstance(outcome, ArtifactRef):
            # The manifest decides. A job can end after it has published, and before its last event.
            artifacts = ArtifactStore(self._store, self._spec.home.cache)
            outcome = artifacts.find(self._spec.stage, self._spec.key) or outcome
        if outcome is None:
            # The job is not deleted: `_find` would take it for one that is about to be submitted.
            raise status.error(self._what(name), log_reference(self._log_file))
        self._release(name)
        if isinstance(outcome, ArtifactRef):
            try:
                delete_jobs(self._store, self._spec)
            except RLHFError as error:  # nothing depends on it
                log.warning("stage %s: objects of old jobs remain: %s", self._spec.stage, error.message)
            return outcome
        raise outcome

    def _find(self) -> JobFiles | None:
        """Return the files of a job of this stage that has not ended."""
        files = JobFiles.newest(self._store, self._spec.key)
        if files is None:
            return None
        submission = files.read_submission()
        if submission is None:
            self._next_number = files.number + files.has_remains
            return None
        self._next_number = files.number + 1
        # That scheduler cannot be asked from here. If its job still runs, it holds the lease of the stage
        # key, and the new job waits for it.
        if submission.executor != self._executor:
            return None
        events, _ = files.read_events()
        # A scheduler can report a job as active for a while after it has sent its outcome, its last event.
        name = submission.job_name
        if events and events[-1]["event"] in ("result", "error"):
            self._release(name)  # a scheduler that has preempted it would start it again
            return None
        while (status := self._poll(name)) is None:
            self._check_deadline(name)
            self._clock.sleep(self._waits.poll)
        if status.is_active:
            message = f"{self._what(name)} is {status.state} already; following it"
            self._on_event({"event": "warning", "message": message})
            return files
        # A job that has written events was submitted, and its scheduler has forgotten it. One that was asked
        # to stop was cancelled.
        if status.state != "missing" or events or files.is_asked_to_stop():
            return None
        # Again, because the files are deleted when the stage has its artifact.
        submission = files.read_submission()
        if submission is None or submission.spec.config != self._spec.config:
            return None
        # The flow that created the files is about to submit the job, or was killed before.
        self._start(files)
        return files

    @property
    def _executor(self) -> Executor:
        return self._spec.config.run.executor_of(self._spec.stage)

    def _submit(self) -> JobFiles:
        while True:
            files = JobFiles(self._store, self._spec.key, self._next_number)
            left = max(0.0, self._deadline - self._clock.monotonic())
            if files.create(self._spec, self._executor, left, shared_environment()):
                self._start(files)
                return files
            found = self._find()
            if found is not None:
                return found

    def _start(self, files: JobFiles) -> None:
        config, stage = self._spec.config, self._spec.stage
        endpoint = s3_endpoint(config.store.endpoint)
        # Not sys.executable: the image or the batch script of the node has `python` on its PATH.
        command = ["python", "-P", "-m", "rlhf_core.executors.remote", config.store_url, self._spec.key]
        command += [str(files.number), *([endpoint] if endpoint else [])]
        name = files.submission.job_name
        job = Job(name, stage, command, config.run.resources.of(stage))
        began = self._clock.monotonic()
        while True:
            try:
                self._scheduler.submit(job)
                break
            except InfrastructureError as error:
                if self._clock.monotonic() - began > self._waits.unreachable:
                    raise
                log.info("%s: %s", self._what(name), error.message)
            self._check_deadline(name)
            self._clock.sleep(self._waits.poll)
        log.info("%s: submitted", self._what(name))

    def _follow(self, files: JobFiles, name: str) -> JobStatus:
        """Return the last status of the job, which has ended or has sent its outcome."""
        status, looked = JobStatus("pending"), 0.0
        began = log_read = self._answered = self._clock.monotonic()
        while True:
            self._read_events(files)
            now = self._clock.monotonic()
            if self._outcome is not None:
                return status
            self._check_deadline(name)
            if now - looked > self._waits.status:
                looked = now
                status = self._poll(name) or status
            if not status.is_active:
                self._read_events(files)  # what it wrote before it ended
                return status
            if status.state == "pending" and now - began > 2 * self._waits.log:
                self._tell_reason(name, status.message)
            if now - log_read > self._waits.log:
                log_read = now
                self._fetch_log(files, "")
            self._clock.sleep(self._waits.poll)

    def _poll(self, name: str) -> JobStatus | None:
        """Return the status of the job, or None if the scheduler does not answer at present.

        Raises InfrastructureError if it has not answered for a long time.
        """
        try:
            status = self._scheduler.status(name)
        except InfrastructureError as error:
            if self._clock.monotonic() - self._answered > self._waits.unreachable:
                raise
            log.info("%s: %s", self._what(name), error.message)
            return None
        self._answered = self._clock.monotonic()
        return status

    def _check_deadline(self, name: str) -> None:
        if self._clock.monotonic() > self._deadline:
            limit = f"run.stage_timeout={self._spec.config.run.stage_timeout:g}"
            ends = log_reference(self._log_file)
            raise StageTimedOut(f"{self._what(name)} is stopped: {limit} is over{ends}")

    def _read_events(self, files: JobFiles) -> None:
        events, progress = files.read_events()
        for event in events[self._read :]:
            self._read += 1  # before the call: one that raises must not be called again while the job stops
            # None after an outcome: the scheduler has started the job again.
            self._outcome = outcome_of(event)
            if self._outcome is None:
                self._on_event(event)
        known, self._progress = self._progress, progress  # before the calls, as above
        for event in progress:
            if event not in known:
                self._on_event(event)

    def _tell_reason(self, name: str, reason: str) -> None:
        if reason and reason != self._reason:
            self._reason = reason
            self._on_event({"event": "warning", "message": f"{self._what(name)} waits: {reason}"})

    def _fetch_log(self, files: JobFiles, name: str) -> None:
        """Write the end of the stage's log, or that of the job `name` if the stage has written none."""
        tail = files.read_log()
        if not tail and name:
            try:
                tail = self._scheduler.log_tail(name).encode()
            except RLHFError as error:
                log.info("%s: no log: %s", self._what(name), error.message)
        if tail:
            self._log_file.write_bytes(tail)

    def _stop(self, files: JobFiles, name: str) -> None:
        """Ask the job to stop, wait until it has, and cancel it; cancel it at once if this is interrupted."""
        try:
            log.info("%s: asked to stop", self._what(name))
            files.ask_to_stop()
            deadline = self._clock.monotonic() + self._waits.stop
            while self._clock.monotonic() < deadline:
                self._read_events(files)
                # A job that still waits in a queue has nothing to save.
                if self._outcome is not None or self._scheduler.status(name).state != "running":
                    break
                self._clock.sleep(self._waits.poll)
            self._fetch_log(files, "")
        except RLHFError as error:
            log.warning("%s: %s", self._what(name), error.message)
        finally:
            try:
                self._scheduler.cancel(name)
            except RLHFError as error:
                log.warning("%s may still run, cancel it by hand: %s", self._what(name), error.message)

    def _release(self, name: str) -> None:
        """Cancel a job whose outcome is known, if it holds resources or waits to be resumed."""
        try:
            if self._scheduler.holds_resources or self._scheduler.status(name).state == "pending":
                self._scheduler.cancel(name)
        except RLHFError as error:
            log.warning("%s: %s", self._what(name), error.message)

    def _what(self, name: str) -> str:
        return f"stage {self._spec.stage}, {self._scheduler.title} {name}"
