"""Environment variables of PPO's ranks and engines."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from rlhf_core.cluster.connect import on_cluster
from rlhf_core.config import PipelineConfig
from rlhf_core.config.placement import PlacementPlan
from rlhf_core.system.environment import THREAD_VARIABLES
from rlhf_core.system.machine import machine


def actor_environment(
    config: PipelineConfig, plan: PlacementPlan, device: str, *, shares_weights: bool = False
) -> dict[str, dict[str, str]]:
    """Return the variables of a "worker" and of an "engine".

    On a CPU the trainers share all cores, and so do the engines, because trainers and engines compute in
    turns. With `ppo.staleness` they compute at the same time.

    Args:
        config: The whole configuration.
        plan: All processes.
        device: "cpu" or "cuda".
        shares_weights: Whether the engines get the weights over CUDA IPC.
    """
    if device == "cuda":
        return _on_gpus(config, plan, shares_weights=shares_weights)
    threads = config.run.threads or machine().cores()
    ranks = max(1, plan.processes - plan.engines)
    return {
        "worker": _threads(max(1, threads // ranks)) | {"DS_ACCELERATOR": "cpu"},
        "engine": _threads(max(1, threads // plan.engines)),
    }


def _on_gpus(
    config: PipelineConfig, plan: PlacementPlan, *, shares_weights: bool
) -> dict[str, dict[str, str]]:
    # On a cluster, the cores of other hosts are not known; `rank_environment` has `run.threads`.
    threads: dict[str, str] = {}
    if not on_cluster():
        cores = config.run.threads or machine().cores()
        threads = _threads(max(1, cores // plan.processes))
    # Weights in expandable segments cannot be shared, and vLLM allocates engines that sleep otherwise.
    fixed = {"PYTORCH_ALLOC_CONF": "expandable_segments:False"}
    return {"worker": threads | fixed if shares_weights else threads, "engine": threads | fixed}


def _threads(count: int) -> dict[str, str]:
    return dict.fromkeys(THREAD_VARIABLES, str(count))


def environment_option(variables: Mapping[str, str]) -> dict[str, Any]:
    """Return Ray's option for the variables of an actor; none if every process of Ray has them, because this
    process has them and has started Ray.

    For an actor with the option, Ray starts a new process, which starts Python twice. An actor without it
    gets a process that Ray has already started, if there is one.
    """
    if not on_cluster() and variables.items() <= os.environ.items():
        return {}
    return {"runtime_env": {"env_vars": dict(variables)}}
