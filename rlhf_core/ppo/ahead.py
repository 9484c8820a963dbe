"""What PPO can start before the stage has its inputs: Ray on this host."""

from __future__ import annotations

from rlhf_core.cluster.connect import connect, on_cluster
from rlhf_core.config import PipelineConfig
from rlhf_core.config.devices import runs_on_gpu
from rlhf_core.config.placement import plan


def start_ahead(config: PipelineConfig) -> None:
    """Start Ray on this host, to which the fleet connects later.

    Does nothing if the fleet runs on a cluster.
    """
    if on_cluster():
        return
    import ray

    device = "cuda" if runs_on_gpu(config) else "cpu"
    try:
        connect(plan(config.ppo).cores(gpus=device == "cuda"), device, config)
    except Exception:
        ray.shutdown()  # what was started; the fleet starts Ray again, and reports what is wrong
        raise
