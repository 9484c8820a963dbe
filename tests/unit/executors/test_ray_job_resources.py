"""What a job of a Ray cluster reserves.

- CPUs of the stage's own process if they are set, and no memory: ranks and engines reserve none either
"""

from __future__ import annotations

from rlhf_core.config.pipeline import StageResources
from rlhf_core.executors.base import Job
from rlhf_core.executors.ray_job import RayJobs
from tests.support.scripted_ray_jobs import ScriptedRayJobs


def test_the_stages_process_reserves_cpus_and_no_memory(ray_cluster: ScriptedRayJobs) -> None:
    """With the memory of a whole node, the job would wait for a node that nothing else uses."""
    resources = StageResources(cpus_per_node=2, memory_per_node="200Gi", gpus_per_node=8)
    RayJobs().submit(Job("rlhf-sft-1", "sft", ["python", "-m", "x"], resources))
    [sent] = ray_cluster.submitted
    assert (sent["submission_id"], sent["entrypoint"]) == ("rlhf-sft-1", "python -m x")
    reserved = {name: sent[name] for name in sent if name.startswith("entrypoint_")}
    assert reserved == {"entrypoint_num_cpus": 2}
