"""The connection of a stage to Ray: a cluster of this host alone, or the one at RAY_ADDRESS; its check before
the run; and the environment of ranks and engines on other hosts. Importing this module does not import ray.
"""

from __future__ import annotations

import faulthandler
import logging
import os
import re
import secrets
import signal
import socket
import threading
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from typing import Any

from rlhf_core.config import PipelineConfig
from rlhf_core.config.pipeline import RunConfig, runs_on_gpu
from rlhf_core.config.placement import plan
from rlhf_core.config.redact import shown
from rlhf_core.errors import ConfigError, Finding
from rlhf_core.storage.s3 import ADDRESS_VARIABLES
from rlhf_core.system.environment import STAGE_PROCESS, THREAD_VARIABLES, WITH_GPU, WITHOUT_GPU
from rlhf_core.system.machine import machine
from rlhf_core.types import Nodes

_CONNECT_SECONDS = 5.0
_HOST_AND_PORT = re.compile(r"(\[[0-9A-Fa-f:]+\]|[\w.-]+):(\d{1,5})")


def on_cluster() -> bool:
    """Return whether RAY_ADDRESS names a running cluster. Without it, Ray runs on this host alone."""
    return bool(os.environ.get("RAY_ADDRESS"))


def check_cluster(config: PipelineConfig) -> Iterator[Finding]:
    """Check that a server answers at RAY_ADDRESS, or that Ray on this machine requires its token. Otherwise
    the error would only appear when PPO starts, after hours.

    This is the only network connection of the preflight.
    """
    address = os.environ.get("RAY_ADDRESS")
    if not address:
        mode = os.environ.get("RAY_AUTH_MODE", "token")
        # Ray's sockets listen on all interfaces: without a token, whoever reaches them could run code in the
        # stage.
        if mode.lower() != "token":
            yield ConfigError(
                f"RAY_AUTH_MODE: must be token where Ray runs on this machine; got {shown(mode)}; unset it"
            )
        return
    match = _HOST_AND_PORT.fullmatch(address)
    if match is None or int(match[2]) > 65_535:
        yield ConfigError(
            f"RAY_ADDRESS: must be host:port of a running cluster's head; got {shown(address)}; give it (`ray"
            " status` shows it), or unset it to start Ray on this machine"
        )
        return
    host, port = match[1].strip("[]"), int(match[2])
    try:
        with socket.create_connection((host, port), timeout=_CONNECT_SECONDS):
            return
    # A label of the host name that is empty or too long is a UnicodeError, which is a ValueError.
    except (OSError, ValueError, OverflowError) as error:
        yield ConfigError(
            f"RAY_ADDRESS: no Ray cluster answers at {shown(address)} ({error}); start it, or unset it to"
            " start Ray on this machine"
        )


def connect(
    processes: int,
    device: str,
    run: RunConfig | None = None,
    nodes: Nodes | None = None,
) -> None:
    """Connect this process to the cluster at RAY_ADDRESS, or start Ray on 127.0.0.1, unless this process has
    started it before and it is still alive.

    `ray.shutdown()` ends the connection, and what was started.

    Args:
        processes: Number of actors that a Ray started here has to hold, one CPU each.
        device: "cpu" or "cuda".
        run: Section `run`. If given, all processes on a cluster get its environment.
        nodes: The other hosts of the stage, which are checked.

    Raises:
        ConfigError: The cluster cannot be joined, or its nodes cannot be used (see `Nodes.check`).
    """
    # No telemetry. Ray leaves CUDA_VISIBLE_DEVICES as it is in processes that have no GPU.
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    own_handler = signal.getsignal(signal.SIGTERM)
    if not on_cluster():
        _start_on_this_host(processes, device)
    else:
        _join_cluster({} if run is None else rank_environment(run, device))
    # In any other thread, neither Ray nor this process can set a handler.
    if threading.current_thread() is threading.main_thread():
        # Ray replaces the handler by one that ends the process on the spot, with SIGABRT.
        signal.signal(signal.SIGTERM, own_handler)
    if on_cluster() and nodes is not None:
        nodes.check()


_FORWARDED = (*ADDRESS_VARIABLES, "RLHF_FAIL", "RLHF_FAIL_TRACE")
"""Variables of this process that other hosts get: where the store is, and the faults of tests."""


def rank_environment(run: RunConfig, device: str, environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the variables of a rank or engine on a cluster. Ray adds them to those of its node.

    On this host alone, Ray's processes inherit all variables of the stage. On a cluster they inherit those of
    Ray on their node. Added are the settings that numbers and protections depend on, `run.env`, and the
    address of the store.

    Nothing secret is among them: Ray stores the environments of its workers without encryption, and shows
    them in its API and logs. Every node has the credentials of the store itself. Variables of this host such
    as NCCL_SOCKET_IFNAME are not sent either, because they may be wrong on another host.
    """
    environment = dict(STAGE_PROCESS)
    environment |= {name: environ[name] for name in _FORWARDED if name in environ}
    if run.threads:
        environment |= dict.fromkeys(THREAD_VARIABLES, str(run.threads))
    # A node can have GPUs that are not for a run on CPUs.
    environment |= WITHOUT_GPU if device == "cpu" else WITH_GPU
    return environment | run.env


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
        with ExitStack() as failed:
            # What was started. The fleet starts Ray again, and reports what is wrong.
            failed.callback(ray.shutdown)
            connect(plan(config.ppo).cores(gpus=False), "cpu", config.run)
            failed.pop_all()
    finally:
        faulthandler.cancel_dump_traceback_later()


def _join_cluster(variables: Mapping[str, str]) -> None:
    """Connect to the cluster at RAY_ADDRESS. Its processes get `variables` as their environment."""
    import ray

    # In a submitted job, Ray combines the environment of the submission with the one that `init` gets. With
    # this variable, the one of `init` wins. (That of `job_config` would be replaced.)
    os.environ["RAY_OVERRIDE_JOB_RUNTIME_ENV"] = "1"
    try:
        ray.init(
            log_to_driver=True,
            logging_level=logging.WARNING,
            job_config=_job_config(),
            runtime_env={"env_vars": dict(variables)},
        )
    except (ConnectionError, RuntimeError) as error:
        # Ray has no class of its own for a cluster with other versions of Ray or Python.
        raise ConfigError(
            f"RAY_ADDRESS: cannot join the cluster at {os.environ['RAY_ADDRESS']}: {error}; use"
            " the same image here and on its nodes, and start Ray on this host with `ray start`"
        ) from error


def _start_on_this_host(processes: int, device: str) -> None:
    """Start Ray on 127.0.0.1, unless this process has started it before and it is still alive."""
    import ray
    from ray._private.node import Node

    if ray.is_initialized():
        if _is_alive():
            return
        # `ray.init` refuses to start in a process that is still connected, also if the Ray there has died.
        ray.shutdown()
    # Ray's default is a token in a file that every user of this host can read.
    os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
    # The monitor of the autoscaler, and the server of the dashboard, for which `ray.init` waits: half of the
    # CPU time of Ray's own processes. No argument of `ray.init` leaves them out.
    Node.start_monitor = _nothing
    Node.start_api_server = _nothing
    ray.init(
        address="local",  # without it, Ray joins a cluster that `ray start` has started on this host
        # Ray counts CPUs and binds no process to them: more actors than cores share the cores.
        num_cpus=max(machine().cores(), processes + 1),
        include_dashboard=False,
        log_to_driver=True,
        logging_level=logging.WARNING,
        # By default 30 % of the memory, which the models need on a CPU.
        object_store_memory=None if device == "cuda" else 256 << 20,
        _node_ip_address="127.0.0.1",
        job_config=_job_config(),
    )


def _nothing(*_arguments: Any, **_options: Any) -> None:
    pass


def _job_config() -> Any:
    from ray.job_config import JobConfig

    # Otherwise Ray puts the working folder first on the search path of its workers, which would import a
    # `queue.py` from there.
    return JobConfig(_client_job=True)


def _is_alive() -> bool:
    """Return whether the Ray that this process has started has a node that is alive."""
    import ray

    try:
        return any(node["Alive"] for node in ray.nodes())
    except Exception:  # its server does not answer
        return False
