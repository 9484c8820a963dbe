"""What PPO can start before the stage has its inputs: Ray on this host."""

from __future__ import annotations

import faulthandler

from rlhf_core.cluster.connect import connect, on_cluster
from rlhf_core.config import PipelineConfig
from rlhf_core.config.pipeline import runs_on_gpu
from rlhf_core.config.placement import plan

_STDERR = 2


def start_ray(config: PipelineConfig) -> None:
    """Start Ray on this host, to which the fleet connects later.

    Does nothing if the fleet runs on a cluster or on GPUs. If Ray has not started within
    `run.timeouts.start`, this writes the stacks to stderr and exits with code 1.
    """
    # With GPUs, Ray takes its object store from the host memory that is free when it starts, and the stage
    # before still uses some.
    if on_cluster() or runs_on_gpu(config):
        return
    import ray

    # Also works if `ray.init` hangs in C++ and holds Python's lock.
    faulthandler.dump_traceback_later(config.run.timeouts.start, exit=True, file=_STDERR)
    try:
        connect(plan(config.ppo).cores(gpus=False), "cpu", config)
    except Exception:
        ray.shutdown()  # what was started; the fleet starts Ray again, and reports what is wrong
        raise
    finally:
        faulthandler.cancel_dump_traceback_later()
