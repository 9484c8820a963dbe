"""What a job of a Ray cluster reserves.

- CPUs of the stage's own process if they are set, and no memory: ranks and engines reserve none either
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from rlhf_core.config.resources import StageResources
from rlhf_core.run.executors.base import Job
from rlhf_core.run.executors.ray_job import RayJobs


def test_the_stages_process_reserves_cpus_and_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the memory of a whole node, the job would wait for a node that nothing else uses."""
    sent: dict[str, Any] = {}
    monkeypatch.setattr(
        RayJobs, "_client", SimpleNamespace(submit_job=lambda **options: sent.update(options))
    )
    resources = StageResources(cpus_per_node=2, memory_per_node="200Gi", gpus_per_node=8)
    RayJobs().submit(Job("rlhf-sft-1", "sft", ["python", "-m", "x"], resources))
    reserved = {name for name in sent if name.startswith("entrypoint_")}
    assert reserved == {"entrypoint_num_cpus"}
    assert sent["entrypoint_num_cpus"] == 2
