"""The scheduler of a stage. Only the packages of the one that is used are imported."""

from __future__ import annotations

from rlhf_core.config import PipelineConfig
from rlhf_core.pipeline import StageName
from rlhf_core.run.executors.base import Scheduler


def open_scheduler(config: PipelineConfig, stage: StageName) -> Scheduler:
    """Return the scheduler of `stage`, which must not be local."""
    resources = config.run.resources.of(stage)
    match config.run.executor_of(stage):
        case "ray":
            from rlhf_core.run.executors.ray_job import RayJobs

            return RayJobs()
        case "kuberay":
            from rlhf_core.run.executors.kuberay import KubeRayJobs

            return KubeRayJobs(resources.namespace)
        case "slurm":
            from rlhf_core.run.executors.slurm import SlurmJobs

            return SlurmJobs(log_folder=config.run.home)
        case "local":
            raise AssertionError("a local stage is a child process")
