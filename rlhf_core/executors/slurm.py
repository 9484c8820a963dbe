"""A stage as a batch job of Slurm, by its commands `sbatch`, `squeue`, `sacct` and `scancel`.

The batch script starts Ray on all nodes of the job with `ray symmetric-run` and runs the stage on the first.
The job is found again by its name, which no other stage or attempt has. Slurm accepts a name twice, but with
`--dependency=singleton` it starts the second job after the end of the first one.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from rlhf_core.config.redact import printable, scrubbed
from rlhf_core.errors import ConfigError, InfrastructureError
from rlhf_core.executors.base import TEMPLATES, Job, JobState, JobStatus
from rlhf_core.system.files import read_end, shipped

_COMMAND_SECONDS = 60.0
_LOG_BYTES = 2**16
_PENDING = (
    "PENDING", "CONFIGURING", "POWER_UP_NODE", "EXPEDITING", "SUSPENDED", "STOPPED",
    "REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "RESV_DEL_HOLD", "SPECIAL_EXIT",
)  # fmt: skip
_FAILED = ("FAILED", "NODE_FAIL", "BOOT_FAIL", "OUT_OF_MEMORY", "LAUNCH_FAILED", "RECONFIG_FAIL")
_STATES: dict[str, JobState] = {
    **dict.fromkeys(_PENDING, "pending"),
    "COMPLETED": "succeeded",
    **dict.fromkeys(("TIMEOUT", "DEADLINE"), "timed out"),
    **dict.fromkeys(("CANCELLED", "PREEMPTED", "REVOKED"), "stopped"),
    **dict.fromkeys(_FAILED, "failed"),
}
"""All others are states of a job that runs: RUNNING, COMPLETING, RESIZING, SIGNALING, STAGE_OUT, UPDATE_DB,
and those of later versions. If such a job counted as ended, a second one would be submitted.
"""

# By their texts: the exit code of these commands is the same for what a later try changes and what it does
# not.
_TEMPORARY = (
    "unable to contact", "timed out", "temporarily", "try again", "standby mode", "zero bytes",
    "configuration source",
)  # fmt: skip
"""In messages of a controller that is down, busy or changing places with its backup."""
_FILTERS = ("SQUEUE_", "SACCT_", "SCANCEL_")
"""Prefixes of variables that hide jobs of other partitions, users or states from these commands."""
# These name the cluster and the user. All others with the prefix describe the job in which the flow itself
# runs.
_OF_THE_USER = {"SLURM_CONF", "SLURM_CONF_SERVER", "SLURM_CLUSTERS", "SLURM_JWT"}


class SlurmJobs:
    """Batch jobs of Slurm."""

    title = "Slurm job"
    holds_resources = False

    def __init__(self, logs: Path, *, are_logs_shared: bool = True) -> None:
        """Jobs whose output goes to `{logs}/{name}.out`. The nodes must have this folder: Slurm does not
        create it, and a job whose output cannot be opened ends at once.

        Args:
            logs: The folder.
            are_logs_shared: Whether this host sees what the nodes write to it.
        """
        self._logs = logs
        self._are_logs_shared = are_logs_shared

    def submit(self, job: Job) -> None:
        """Start `job`, unless a job of this name exists already."""
        if self.status(job.name).state != "missing":
            return
        resources = job.resources
        script = shipped(resources.template or TEMPLATES["slurm"])
        if not script.is_file():
            raise ConfigError(
                f"run.resources.{job.stage}.template: must be a batch script; {script} does not exist;"
                " name one"
            )
        self._logs.mkdir(parents=True, exist_ok=True)
        options = {
            "--job-name": job.name,
            # squeue can take a while to list a job, and another flow may submit it at the same moment.
            "--dependency": "singleton",
            "--nodes": resources.nodes or 1,
            "--gpus-per-node": resources.gpus_per_node or None,
            "--cpus-per-task": resources.cpus_per_node,
            # Slurm's K, M, G and T are powers of 1024.
            "--mem": resources.memory_per_node and resources.memory_per_node.removesuffix("i"),
            "--partition": resources.queue,
            "--qos": resources.priority,
            "--account": resources.account,
            "--time": resources.time_limit and max(1, resources.time_limit // 60),  # minutes; 0 is no limit
            # Slurm replaces `%j` and others in this path.
            "--output": str(self._logs / f"{job.name}.out").replace("%", "%%"),
        }
        flags = [f"{name}={value}" for name, value in options.items() if value is not None]
        self._run(["sbatch", "--parsable", *flags, str(script), *job.command], refused=ConfigError)

    def status(self, name: str) -> JobStatus:
        """Return the status of a job: from the queue, or from accounting if it has left the queue."""
        # Also jobs that ended a short time ago, because a cluster may have no accounting, and those of hidden
        # partitions.
        queue = ["squeue", "--noheader", "--states=all", "--all", f"--name={name}"]
        lines = self._lines([*queue, "--format=%T|%r"])
        if not lines:
            # By default, sacct looks for jobs of the current day.
            accounting = ["sacct", "--noheader", "--parsable2", "--allocations", "--starttime=now-7days"]
            accounting += [f"--name={name}", "--format=State,Reason"]
            # A cluster without accounting has no sacct, or one that fails: what is not in the queue is
            # missing then.
            lines = self._lines(accounting, without="")
        if not lines:
            return JobStatus("missing")
        # Of several jobs with this name, all but one wait (`--dependency=singleton`) or have ended.
        statuses = [_status(line) for line in lines]
        return next((status for status in statuses if status.is_active), statuses[-1])

    def cancel(self, name: str) -> None:
        """End a job. A job that has ended or does not exist is ignored."""
        self._run(["scancel", f"--name={name}"])

    def log_tail(self, name: str) -> str:
        """Return the end of the job's output; empty if it is not on a folder that this host shares."""
        return read_end(self._logs / f"{name}.out", _LOG_BYTES) if self._are_logs_shared else ""

    def _lines(self, command: Sequence[str], without: str | None = None) -> list[str]:
        """Return a line for each job. With SLURM_CLUSTERS, squeue also prints the names of clusters."""
        return [line for line in self._run(command, without=without).splitlines() if "|" in line]

    def _run(
        self,
        command: Sequence[str],
        refused: type[ConfigError | InfrastructureError] = InfrastructureError,
        without: str | None = None,
    ) -> str:
        """Return the output of a command.

        Args:
            command: Program and arguments.
            refused: Error of a command that Slurm refuses.
            without: The output if the program is not installed; None: an error.
        """
        try:
            done = subprocess.run(
                command,
                capture_output=True,
                text=True,
                timeout=_COMMAND_SECONDS,
                check=False,
                stdin=subprocess.DEVNULL,
                env=_environment(os.environ),
            )
        except FileNotFoundError as error:
            if without is not None:
                return without
            raise ConfigError(
                f"run.executor: slurm needs the command {command[0]} on PATH; install Slurm's client commands"
            ) from error
        except (OSError, subprocess.TimeoutExpired) as error:
            raise InfrastructureError(f"{command[0]}: {error}") from error
        words = printable(scrubbed(" ".join((done.stderr or done.stdout).split())))[:500]
        if done.returncode == 0:
            return done.stdout
        if without is not None:
            return without
        kind = InfrastructureError if any(text in words.lower() for text in _TEMPORARY) else refused
        raise kind(f"{command[0]} failed with exit code {done.returncode}: {words}")


def _environment(variables: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a command of Slurm.

    A flow can itself be in a job of Slurm. A job that it submits would inherit that job's `SLURM_` variables,
    and `srun` takes options from them, such as the binding to cores of a small job.
    """
    kept = {}
    for name, value in variables.items():
        if name in _OF_THE_USER or not name.startswith(("SLURM_", *_FILTERS)):
            kept[name] = value
    return kept


def _status(line: str) -> JobStatus:
    state, _, reason = line.strip().partition("|")
    word = state.split()[0] if state else ""  # CANCELLED by 1000
    message = f"{state} ({reason})" if reason and reason != "None" else state
    return JobStatus(_STATES.get(word, "running"), message)
