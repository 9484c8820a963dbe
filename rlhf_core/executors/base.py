"""What all executors have in common: a job, its status, and what a scheduler must do with it."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from rlhf_core.config.pipeline import Executor, StageResources
from rlhf_core.errors import ConfigError, OutOfMemory, RLHFError, StageFailed, StageTimedOut
from rlhf_core.pipeline import StageName

JobState = Literal["pending", "running", "succeeded", "failed", "stopped", "timed out", "refused", "missing"]

TEMPLATES: Mapping[Executor, str] = {
    "kuberay": "deployments/kubernetes/rayjob.yaml",
    "slurm": "deployments/slurm/rlhf.sbatch",
}
"""Where the template of a job is if `run.resources` names none."""
_OUT_OF_MEMORY = re.compile(r"OOMKilled|OUT_OF_MEMORY|out of memory", re.IGNORECASE)


@dataclass(frozen=True)
class Job:
    """What a scheduler starts."""

    # 47 is the limit of KubeRay for the name of a RayJob.
    name: str
    """Unique in the cluster, at most 47 characters: a-z, 0-9 and `-`."""
    stage: StageName
    command: Sequence[str]
    resources: StageResources


@dataclass(frozen=True)
class JobStatus:
    """State of a job in its scheduler."""

    state: JobState
    message: str = ""
    """The reason that the scheduler gives."""

    @property
    def is_active(self) -> bool:
        return self.state in ("pending", "running")

    def error(self, what: str, ends: str) -> RLHFError:
        """Return the error of a job that ended without a result.

        Args:
            what: The stage and the job.
            ends: Address and end of the log, for the message.
        """
        reason = f": {self.message}" if self.message else ""
        # By the text and before the state, which is just `failed` with Kubernetes and Slurm.
        if _OUT_OF_MEMORY.search(self.message):
            return OutOfMemory(f"{what} ran out of memory{reason}{ends}")
        if self.state == "timed out":
            limit = "the scheduler's time limit (run.resources.*.time_limit)"
            return StageTimedOut(f"{what} was ended at {limit}{reason}{ends}")
        if self.state == "refused":
            return ConfigError(f"{what} was refused{reason}; correct the template or run.resources{ends}")
        how = {
            "succeeded": "ended without a result",
            "failed": "failed",
            "stopped": "was stopped or evicted",
            "missing": "does not exist any more",
        }[self.state]
        return StageFailed(f"{what} {how}{reason}{ends}")


class Scheduler(Protocol):
    """Submits jobs and finds them by their names.

    Methods raise ConfigError for what only the user can correct (rights, addresses, names), and
    InfrastructureError for a failure that may be temporary.
    """

    @property
    def title(self) -> str:
        """The kind of job, for messages."""

    @property
    def holds_resources(self) -> bool:
        """Whether a job that has ended holds its resources until it is cancelled."""

    def submit(self, job: Job) -> None:
        """Start `job`, unless a job of this name exists already. Two of one name never run at the same
        time.
        """

    def status(self, name: str) -> JobStatus:
        """Return the status of a job."""

    def cancel(self, name: str) -> None:
        """End a job and free its resources. A job that does not exist is ignored."""

    def log_tail(self, name: str) -> str:
        """Return the end of the job's output; empty if there is none."""
