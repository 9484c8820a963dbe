"""The connection of a stage to Ray: a cluster of this host alone, or the one at RAY_ADDRESS."""

from __future__ import annotations

import logging
import os
import secrets

from rlhf_core.cluster.environment import rank_environment
from rlhf_core.cluster.handshake import check_nodes
from rlhf_core.config import PipelineConfig
from rlhf_core.errors import ConfigError
from rlhf_core.types import Nodes


def on_cluster() -> bool:
    """Return whether RAY_ADDRESS names a running cluster. Without it, Ray runs on this host alone."""
    return bool(os.environ.get("RAY_ADDRESS"))


def connect(
    processes: int,
    device: str,
    config: PipelineConfig | None = None,
    nodes: Nodes | None = None,
) -> None:
    """Connect this process to the cluster at RAY_ADDRESS, or start Ray on 127.0.0.1, unless this process has
    started it before and it is still alive.

    `ray.shutdown()` ends the connection, and what was started.

    Args:
        processes: Number of actors that a Ray started here has to hold, one CPU each.
        device: "cpu" or "cuda".
        config: The configuration. If given, all processes on a cluster get its environment, and the nodes are
            checked.
        nodes: The other hosts of the stage.

    Raises:
        ConfigError: The cluster cannot be joined, or its nodes cannot be used (see `check_nodes`).
    """
    import ray
    from ray.job_config import JobConfig

    # No telemetry. Ray leaves CUDA_VISIBLE_DEVICES as it is in processes that have no GPU.
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    # Ray's monitor serves metrics on all interfaces. With an invalid port it only logs an error.
    os.environ.setdefault("AUTOSCALER_METRIC_PORT", "-1")
    # Otherwise Ray puts the working folder first on the search path of its workers, which would import a
    # `queue.py` from there.
    job = JobConfig(_client_job=True)
    if on_cluster():
        # In a submitted job, Ray replaces the environment in `job` by that of the submission. It combines the
        # one that `init` gets with it, and with this variable ours wins.
        os.environ["RAY_OVERRIDE_JOB_RUNTIME_ENV"] = "1"
        variables = {} if config is None else rank_environment(config, device)
        try:
            ray.init(
                log_to_driver=True,
                logging_level=logging.WARNING,
                job_config=job,
                runtime_env={"env_vars": variables},
            )
        except (ConnectionError, RuntimeError) as error:
            # Ray has no class of its own for a cluster with other versions of Ray or Python.
            raise ConfigError(
                f"RAY_ADDRESS: cannot join the cluster at {os.environ['RAY_ADDRESS']}: {error}; use"
                " the same image here and on its nodes, and start Ray on this host with `ray start`"
            ) from error
        if config is not None:
            check_nodes(config, {} if nodes is None else nodes.copies, () if nodes is None else nodes.stages)
        return
    if ray.is_initialized():
        if _is_alive():
            return
        ray.shutdown()
    # Ray's default is a token in a file that every user of this host can read.
    os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
    ray.init(
        address="local",  # without it, Ray joins a cluster that `ray start` has started on this host
        num_cpus=max(os.cpu_count() or 1, processes + 1),
        include_dashboard=False,
        log_to_driver=True,
        logging_level=logging.WARNING,
        object_store_memory=None if device == "cuda" else 256 << 20,
        _node_ip_address="127.0.0.1",
        job_config=job,
    )


def _is_alive() -> bool:
    """Return whether the Ray that this process has started has a node that is alive."""
    import ray

    try:
        return any(node["Alive"] for node in ray.nodes())
    except Exception:  # its server does not answer
        return False
