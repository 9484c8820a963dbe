"""Joining the process group of one model's training ranks. The only place that knows how DeepSpeed is tamed
on a CPU.
"""

from __future__ import annotations

import importlib
import os
import socket
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

_WATCH_FIRST_SECONDS = {"cpu": 3.0, "cuda": 60.0}
"""What a collective has beyond a rank's timeout: `rlhf_core.system.heartbeat` is to see the ranks as they wait for each
other. A broken one of gloo raises; NCCL's own watchdog takes the process down, so the stage is to be ended
before.
"""


@dataclass(frozen=True)
class Rank:
    """This process's place among the ranks that train together."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    master_addr: str = "127.0.0.1"
    master_port: int = 0
    """0: a free port, for a world of one."""
    device: str = "cpu"
    """"cpu" or "cuda"."""
    start: float = 300.0
    """Seconds for the rendezvous and every collective until the model is loaded."""
    timeout: float = 600.0
    """Seconds that a rank may stand still from then on; a collective gets a little more
    (`bound_collectives`).
    """
    listener: socket.socket | None = None
    """Listening socket of rank 0, if `master_port` is already in use by it, so that no other process can take
    the port.
    """

    @property
    def collective_seconds(self) -> float:
        """How long a collective may take once the model is loaded."""
        return self.timeout + _WATCH_FIRST_SECONDS[self.device]

    @property
    def torch_device(self) -> str:
        return f"cuda:{self.local_rank}" if self.device == "cuda" else "cpu"

    @staticmethod
    def from_environment(device: str) -> Rank:
        """What torchrun sets; a world of one without it."""
        env = os.environ
        if "RANK" not in env:
            return Rank(device=device)
        return Rank(
            int(env["RANK"]),
            int(env["WORLD_SIZE"]),
            int(env["LOCAL_RANK"]),
            env["MASTER_ADDR"],
            int(env["MASTER_PORT"]),
            device,
        )


def rendezvous(
    address: str, port: int, size: int, *, timeout: timedelta, listener: socket.socket | None = None
) -> Any:
    """Return the store through which `size` processes connect.

    `listener` is the master's socket on `address` and `port`, which the store takes over. Without it, torch
    would listen on every interface. None means that this process is not the master.
    """
    import torch.distributed as dist

    store = vars(dist)["TCPStore"]  # torch's stubs do not know it
    if listener is None:
        return store(address, port, size, False, timeout, wait_for_workers=False)
    return store(
        address, port, size, True, timeout, wait_for_workers=False, master_listen_fd=listener.detach()
    )


def join(rank: Rank) -> None:
    """Initialise torch.distributed and DeepSpeed's view of it; gloo on the CPU, NCCL on GPUs."""
    hosted = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"  # torchrun already listens there
    listener = rank.listener
    if rank.rank == 0 and listener is None and not hosted:
        listener = socket.create_server((rank.master_addr, rank.master_port))
    port = rank.master_port if listener is None else listener.getsockname()[1]
    os.environ.update(
        RANK=str(rank.rank),
        WORLD_SIZE=str(rank.world_size),
        LOCAL_RANK=str(rank.local_rank),
        MASTER_ADDR=rank.master_addr,
        MASTER_PORT=str(port),
        TORCH_FORCE_WEIGHTS_ONLY_LOAD="1",
    )
    if rank.device == "cpu":
        os.environ["DS_ACCELERATOR"] = "cpu"
        if rank.master_addr == "127.0.0.1":
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    import torch

    if rank.device == "cuda":
        torch.cuda.set_device(rank.local_rank)
    import deepspeed

    # The shared-memory op is compiled under a lock without a timeout; gloo alone serves, so it is never
    # built.
    importlib.import_module("deepspeed.comm.torch").build_shm_op = lambda: None  # type: ignore[attr-defined]
    bound_collectives(rank.start)
    limit = timedelta(seconds=rank.start)
    backend = "nccl" if rank.device == "cuda" else "gloo"
    store = rendezvous(rank.master_addr, port, rank.world_size, timeout=limit, listener=listener)
    # As DeepSpeed would, which takes over the group that it finds.
    device = torch.device(rank.torch_device) if rank.device == "cuda" and rank.world_size > 1 else None
    torch.distributed.init_process_group(
        backend, store=store, rank=rank.rank, world_size=rank.world_size, timeout=limit, device_id=device
    )
    deepspeed.init_distributed(dist_backend=backend, timeout=limit, verbose=False)
    from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
    from deepspeed.runtime.zero.config import ZeroStageEnum
    from deepspeed.utils.tensor_fragment import fragment_address

    torch.serialization.add_safe_globals([LossScaler, DynamicLossScaler, ZeroStageEnum, fragment_address])


def bound_collectives(seconds: float) -> None:
    """In all groups there are and will be: DeepSpeed makes some of its own for ZeRO and passes them no
    timeout. By default gloo waits 30 minutes for a rank that hangs, NCCL 10.
    """
    c10d: Any = importlib.import_module("torch.distributed.distributed_c10d")
    timeout = timedelta(seconds=seconds)
    c10d.default_pg_timeout = c10d.default_pg_nccl_timeout = timeout
    for group in list(c10d._world.pg_map):
        c10d._set_pg_timeout(timeout, group)


def leave() -> None:
    """Destroy the process group, if there is one."""
    import torch.distributed as dist

    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()
