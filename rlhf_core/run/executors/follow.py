"""Runs a stage as a job of a cluster: submits it or finds the one that is running, and follows it.

find       a job of this stage key that was submitted before and has not ended is followed: a flow that
           was killed and is started again continues to wait for its job
submit     `jobs/{key}/{number}/spec.json` is created once. The flow that created it submits the job, the
           others wait; if it was killed before that, one of them submits the job
follow     events and log come from the store, the state from the scheduler. A result, or a manifest in
           the store, is a success; a job that ended without one is an error of rlhf_core.errors
release    a job that has sent its outcome is cancelled if its scheduler keeps the resources of ended jobs
stop       on Ctrl-C, SIGTERM or a cancellation the job is asked to stop through the store, which gives it
           time to save a checkpoint, and is then cancelled. If the flow is killed, the job continues
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from rlhf_core.config.redact import has_credentials
from rlhf_core.errors import InfrastructureError, RLHFError, StageTimedOut, from_record
from rlhf_core.run.child import TERM_SECONDS, OnEvent, log_excerpt
from rlhf_core.run.executors.base import Job, JobStatus, Scheduler
from rlhf_core.run.executors.job_files import JobFiles
from rlhf_core.run.spec import StageSpec
from rlhf_core.storage.artifacts import ArtifactStore
from rlhf_core.storage.s3 import ADDRESS_VARIABLES, s3_endpoint
from rlhf_core.storage.store import open_store
from rlhf_core.types import ArtifactRef

T = TypeVar("T")

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
    unreachable: float = 300.0
    """How long a scheduler may not answer."""
    submit: float = 60.0
    """A job that the scheduler does not know, but whose spec is younger, may be about to be submitted."""
    stop: float = TERM_SECONDS + 25.0
    """Time for a job to see the request, save a checkpoint and end."""


def run_remote(
    scheduler: Scheduler,
    spec: StageSpec,
    log_file: Path,
    timeout: float,
    on_event: OnEvent,
    waits: Waits = Waits(),
) -> ArtifactRef:
    """Run the stage of `spec` as a job and return its artifact.

    Args:
        scheduler: Starts the job and returns its state.
        spec: The stage.
        log_file: Gets a copy of the end of the job's log.
        timeout: Seconds, including the time in queues.
        on_event: Receives the job's events.
        waits: Intervals and limits.

    Raises:
        RLHFError: The error that the stage sent, with its class.
        StageFailed: The job died, was evicted, stopped or deleted.
        StageTimedOut: The job took over `timeout` seconds, or the scheduler ended it at its limit.
        OutOfMemory: The scheduler reports it.
        InfrastructureError: The scheduler or the store did not answer. The job continues.
    """
    return _Follower(scheduler, spec, log_file, timeout, on_event, waits).run()


def shared_environment(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the addresses in the environment that a job on another host needs too, without credentials."""
    values = {name: environ[name] for name in _SHARED_VARIABLES if environ.get(name)}
    return {name: value for name, value in values.items() if not has_credentials(value)}


class _Follower:
    def __init__(
        self,
        scheduler: Scheduler,
        spec: StageSpec,
        log_file: Path,
        timeout: float,
        on_event: OnEvent,
        waits: Waits,
    ) -> None:
        self._scheduler = scheduler
        self._spec = spec
        self._log_file = log_file
        self._deadline = time.monotonic() + timeout
        self._on_event = on_event
        self._waits = waits
        self._store = open_store(spec.config)
        self._answered = time.monotonic()
        """When the scheduler answered last."""
        self._next_event = 1
        self._outcome: ArtifactRef | RLHFError | None = None
        self._reason = ""

    def run(self) -> ArtifactRef:
        files = self._find() or self._submit()
        name = files.submission.job_name
        try:
            status = self._follow(files, name)
        except StageTimedOut:
            self._stop(files, name)
            raise
        except Exception:
            raise  # the job continues, and the next attempt finds it
        except BaseException:
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
            raise status.error(self._what(name), self._ends())
        self._release(name)
        if isinstance(outcome, ArtifactRef):
            return outcome
        raise outcome

    def _find(self) -> JobFiles | None:
        """Return the files of a job of this stage that has not ended."""
        files = JobFiles.newest(self._store, self._spec.key)
        # A scheduler can report a job as active for a while after it has sent its outcome.
        if files is None or files.submission.executor != self._kind or self._has_outcome(files):
            return None
        submission = files.submission
        name = submission.job_name
        status = self._until_answered(name, lambda: self._scheduler.status(name))
        if status.is_active:
            message = f"{self._what(name)} is {status.state} already; following it"
            self._on_event({"event": "warning", "message": message})
            return files
        if status.state == "missing" and time.time() - submission.time < self._waits.submit:
            self._await_submission(files)
            return files
        return None

    def _await_submission(self, files: JobFiles) -> None:
        """Wait for the flow that created these files to submit the job. Submit it if that does not happen.

        Not all schedulers refuse a second job of the same name.
        """
        name = files.submission.job_name
        log.info("%s: waiting for the flow that began to submit it", self._what(name))
        if not self._appears(name) and files.take_over():
            self._start(files)

    def _appears(self, name: str) -> bool:
        """Wait until the scheduler lists the job, and return False if it does not."""
        deadline = time.monotonic() + self._waits.submit
        while time.monotonic() < deadline:
            self._check_deadline(name)
            status = self._poll(name)
            if status is None:
                deadline = time.monotonic() + self._waits.submit
            elif status.state != "missing":
                return True
            time.sleep(self._waits.poll)
        return False

    @property
    def _kind(self) -> str:
        return self._spec.config.run.executor_of(self._spec.stage)

    def _has_outcome(self, files: JobFiles) -> bool:
        number = 1
        while (events := files.read_events(number)) is not None:
            if any(event["event"] in ("result", "error") for event in events):
                return True
            number += 1
        return False

    def _submit(self) -> JobFiles:
        newest = JobFiles.newest(self._store, self._spec.key)
        files = JobFiles(self._store, self._spec.key, 1 if newest is None else newest.number + 1)
        left = max(0.0, self._deadline - time.monotonic())
        executor = self._spec.config.run.executor_of(self._spec.stage)
        if files.create(self._spec, executor, left, shared_environment()):
            self._start(files)
        else:
            self._await_submission(files)
        return files

    def _start(self, files: JobFiles) -> None:
        config, stage = self._spec.config, self._spec.stage
        endpoint = s3_endpoint(config.store.endpoint)
        # Not sys.executable: the image or the batch script of the node has `python` on its PATH.
        command = ["python", "-P", "-m", "rlhf_core.run.remote", config.store_url, self._spec.key]
        command += [str(files.number), *([endpoint] if endpoint else [])]
        name = files.submission.job_name
        job = Job(name, stage, command, config.run.resources.of(stage))
        began = time.monotonic()
        while True:
            try:
                self._scheduler.submit(job)
                break
            except InfrastructureError as error:
                if time.monotonic() - began > self._waits.unreachable:
                    raise
                log.info("%s: %s", self._what(name), error.message)
            # A request without an answer may have arrived, and Slurm can take a while to list the job. It
            # would accept a second one of this name.
            if self._appears(name):
                break
        log.info("%s: submitted", self._what(name))

    def _follow(self, files: JobFiles, name: str) -> JobStatus:
        """Return the last status of the job, which has ended or has sent its outcome."""
        status, looked = JobStatus("pending"), 0.0
        began = log_read = self._answered = time.monotonic()
        while True:
            self._read_events(files)
            now = time.monotonic()
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
            time.sleep(self._waits.poll)

    def _poll(self, name: str) -> JobStatus | None:
        """Return the status of the job, or None if the scheduler does not answer at present.

        Raises InfrastructureError if it has not answered for a long time.
        """
        try:
            status = self._scheduler.status(name)
        except InfrastructureError as error:
            self._no_answer(name, error)
            return None
        self._answered = time.monotonic()
        return status

    def _until_answered(self, name: str, request: Callable[[], T]) -> T:
        """Return the answer to a request, which is repeated while the scheduler does not answer.

        Raises InfrastructureError if it has not answered for a long time.
        """
        while True:
            try:
                answer = request()
            except InfrastructureError as error:
                self._no_answer(name, error)
            else:
                self._answered = time.monotonic()
                return answer
            self._check_deadline(name)
            time.sleep(self._waits.poll)

    def _no_answer(self, name: str, error: InfrastructureError) -> None:
        if time.monotonic() - self._answered > self._waits.unreachable:
            raise error
        log.info("%s: %s", self._what(name), error.message)

    def _check_deadline(self, name: str) -> None:
        if time.monotonic() > self._deadline:
            limit = f"run.stage_timeout={self._spec.config.run.stage_timeout:g}"
            raise StageTimedOut(f"{self._what(name)} is stopped: {limit} is over{self._ends()}")

    def _read_events(self, files: JobFiles) -> None:
        while (events := files.read_events(self._next_event)) is not None:
            self._next_event += 1
            for event in events:
                if event["event"] == "result":
                    self._outcome = ArtifactRef(**event["artifact"])
                elif event["event"] == "error":
                    self._outcome = from_record({"type": event["type"], "message": event["message"]})
                else:
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
            deadline = time.monotonic() + self._waits.stop
            while time.monotonic() < deadline:
                self._read_events(files)
                # A job that still waits in a queue has nothing to save.
                if self._outcome is not None or self._scheduler.status(name).state != "running":
                    break
                time.sleep(self._waits.poll)
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

    def _ends(self) -> str:
        words = log_excerpt(self._log_file)
        return f"; log: {self._log_file}" + (f"; end of the log: {words}" if words else "")
