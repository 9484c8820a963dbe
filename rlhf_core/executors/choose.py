"""The scheduler of a stage. Only the packages of the one that is used are imported."""

from __future__ import annotations

from pathlib import Path

from rlhf_core.config import PipelineConfig
from rlhf_core.executors.base import Scheduler
from rlhf_core.pipeline import StageName


def open_scheduler(config: PipelineConfig, stage: StageName) -> Scheduler:
    """Return the scheduler of `stage`, which must not be local."""
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
