"""The process group of one model's training ranks: join, leave, timeouts, and the layout of rows on which all
ranks agree. Everything that DeepSpeed needs to run on a CPU is here.
"""

from __future__ import annotations

import ctypes
import importlib
import logging
import os
import socket
import time
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import psutil

from rlhf_core.config.pipeline import uses_gpu
from rlhf_core.config.training import Packing
from rlhf_core.errors import ConfigError
from rlhf_core.system.machine import machine

log = logging.getLogger(__name__)

_COLLECTIVE_EXTRA_SECONDS = {"cpu": 3.0, "cuda": 60.0}
"""Seconds that a collective may take beyond the timeout of a rank, so that `rlhf_core.system.heartbeat` finds
the stalled rank first. A gloo collective that times out raises an error. With NCCL the watchdog ends the
process, so the limit is longer: the stage must have ended by then.
"""
_POLL_SECONDS = 0.2

# Of glibc's malloc.h.
_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3

_KEPT_BLOCK = 256 << 20
# Earlier versions refuse a threshold above half of an arena's heap, which has 64 MiB.
_KEPT_BLOCK_BEFORE_GLIBC_235 = 32 << 20


@dataclass(frozen=True)
class Rank:
    """One process of a group of training ranks."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    master_addr: str = "127.0.0.1"
    master_port: int = 0
    """0 selects a free port, for a world of one."""
    device: str = "cpu"
    """"cpu" or "cuda"."""
    start: float = 300.0
    """Timeout of the rendezvous and of every collective until the model is loaded, in seconds."""
    timeout: float = 600.0
    """Seconds without a heartbeat after which a rank is stalled. See `collective_seconds`."""
    listener: socket.socket | None = None
    """Listening socket of rank 0, if `master_port` is already in use by it, so that no other process can take
    the port.
    """

    @property
    def collective_seconds(self) -> float:
        """Timeout of a collective once the model is loaded."""
        return self.timeout + _COLLECTIVE_EXTRA_SECONDS[self.device]

    @property
    def torch_device(self) -> str:
        return f"cuda:{self.local_rank}" if self.device == "cuda" else "cpu"


def resolve_device(wanted: str, setting: str = "run.device") -> str:
    """Return "cuda" or "cpu" for `wanted` (auto, cuda, cpu).

    The decision is the one that keys and precision are based on. Raises ConfigError, which names `setting`,
    if it is a GPU and torch cannot use one. On a Ray cluster the GPUs are those of its nodes.
    """
    if not uses_gpu(wanted):
        return "cpu"
    if os.environ.get("RAY_ADDRESS"):
        return "cuda"
    import torch

    if not torch.cuda.is_available():
        raise ConfigError(
            f"{setting}={wanted} resolves to cuda on this host, but torch.cuda is not available; fix the"
            f" driver (see `nvidia-smi`), or set {setting}=cpu"
        )
    return "cuda"


def rendezvous(
    address: str, port: int, size: int, *, timeout: timedelta, listener: socket.socket | None = None
) -> Any:
    """Return the store through which `size` processes connect.

    Args:
        address: Address of the master.
        port: Port of the master.
        size: Number of processes.
        timeout: Limit of each operation.
        listener: The master's socket on `address` and `port`, which the store takes over. Without it, torch
            would listen on every interface. None means that this process is not the master.
    """
    import torch.distributed as dist

    _choose_gloo_interface(address)
    store = vars(dist)["TCPStore"]  # missing in torch's type stubs
    # The group that uses the store waits for its processes.
    if listener is None:
        return store(address, port, size, False, timeout, wait_for_workers=False)
    # Detached, because the store closes the descriptor itself.
    return store(
        address, port, size, True, timeout, wait_for_workers=False, master_listen_fd=listener.detach()
    )


def join(rank: Rank) -> None:
    """Initialize torch.distributed with the backend of `training_backend`, and DeepSpeed on top of it."""
    listener = rank.listener
    if rank.rank == 0 and listener is None:
        listener = socket.create_server((rank.master_addr, rank.master_port))
    port = rank.master_port if listener is None else listener.getsockname()[1]
    # DeepSpeed requires LOCAL_RANK, and calls `torch.load` with `weights_only=False`, which the last variable
    # overrides.
    os.environ.update(
        RANK=str(rank.rank),
        WORLD_SIZE=str(rank.world_size),
        LOCAL_RANK=str(rank.local_rank),
        MASTER_ADDR=rank.master_addr,
        MASTER_PORT=str(port),
        TORCH_FORCE_WEIGHTS_ONLY_LOAD="1",
    )
    if rank.device == "cpu":
        # Read when DeepSpeed is imported. By default DeepSpeed takes a GPU of this host.
        os.environ["DS_ACCELERATOR"] = "cpu"
        keep_freed_memory()
    import torch

    if rank.device == "cuda":
        torch.cuda.set_device(rank.local_rank)
    import deepspeed

    # The shared-memory op is compiled under a lock without a timeout. gloo works without it.
    importlib.import_module("deepspeed.comm.torch").build_shm_op = lambda: None  # type: ignore[attr-defined]
    # Before the first group is made: the groups of DeepSpeed get the defaults.
    bound_collectives(rank.start)
    limit = timedelta(seconds=rank.start)
    backend = training_backend(rank.device)
    store = rendezvous(rank.master_addr, port, rank.world_size, timeout=limit, listener=listener)
    # The same device as DeepSpeed would choose; it uses a group that already exists.
    device = torch.device(rank.torch_device) if backend == "nccl" and rank.world_size > 1 else None
    torch.distributed.init_process_group(
        backend, store=store, rank=rank.rank, world_size=rank.world_size, timeout=limit, device_id=device
    )
    deepspeed.init_distributed(dist_backend=backend, timeout=limit, verbose=False)
    from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
    from deepspeed.runtime.zero.config import ZeroStageEnum
    from deepspeed.utils.tensor_fragment import fragment_address

    # The classes in its checkpoints. `torch.load` refuses all others.
    torch.serialization.add_safe_globals([LossScaler, DynamicLossScaler, ZeroStageEnum, fragment_address])


def keep_freed_memory() -> None:
    """Let this process reuse the memory of tensors that it has freed.

    By default glibc returns most of it to the system and asks for it again in the next forward pass. The
    system then clears every page, which took a tenth of the time of a PPO step (decision 5).
    """
    if not _set_malloc(_M_MMAP_THRESHOLD, _KEPT_BLOCK):
        _set_malloc(_M_MMAP_THRESHOLD, _KEPT_BLOCK_BEFORE_GLIBC_235)
    _set_malloc(_M_TRIM_THRESHOLD, -1)


def return_freed_memory() -> None:
    """Let this process return each large tensor to the system when it is freed.

    Otherwise small tensors that are allocated inside a freed layer prevent that the next layer fits there. A
    process that gathers the layers of a model in turn would grow to the size of the whole model.
    """
    _set_malloc(_M_MMAP_THRESHOLD, 1 << 20)
    _set_malloc(_M_TRIM_THRESHOLD, 1 << 20)


def _set_malloc(option: int, value: int) -> bool:
    """Call `mallopt`, and return whether it has accepted the value."""
    # Not every C library has it.
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    return mallopt is not None and mallopt(option, value) == 1


def training_backend(device: str) -> str:
    """Return "nccl" for GPUs and "gloo" for the CPU, and for GPUs too if torch was built without NCCL.

    Builds for ROCm have RCCL, which torch calls "nccl".
    """
    if device == "cpu":
        return "gloo"
    if not lacks_nccl():
        return "nccl"
    log.warning(
        "torch was built for GPUs but without NCCL: training ranks use gloo, which copies everything through"
        " host memory; install a build of torch with NCCL (CUDA) or RCCL (ROCm)"
    )
    return "gloo"


def lacks_nccl() -> bool:
    """Return whether this process has a build of torch for GPUs without NCCL. No GPU is initialized."""
    import torch.distributed as dist

    for_gpus = machine().torch_built_with("cuda") or machine().torch_built_with("hip")
    return bool(for_gpus) and not dist.is_nccl_available()


def _choose_gloo_interface(address: str) -> None:
    """Let gloo use the network interface from which `address` is reached, unless GLOO_SOCKET_IFNAME is set.

    By default gloo uses the interface of this host's name, and loopback if the name has no address. Both are
    often wrong in containers, and then the ranks of other hosts cannot connect.
    """
    if "GLOO_SOCKET_IFNAME" in os.environ:
        return
    family, _, _, _, destination = socket.getaddrinfo(address, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(destination)  # selects the route, and sends nothing
        own = probe.getsockname()[0]
    for name, addresses in psutil.net_if_addrs().items():
        # psutil gives link-local addresses with their zone (fe80::1%eth0), and a socket without.
        if any(each.address.partition("%")[0] == own for each in addresses):
            os.environ["GLOO_SOCKET_IFNAME"] = name
            return


def bound_collectives(seconds: float) -> None:
    """Set the timeout of all existing and all later process groups.

    DeepSpeed creates groups for ZeRO without a timeout. The defaults are 30 minutes for gloo and 10 for NCCL.
    """
    c10d: Any = importlib.import_module("torch.distributed.distributed_c10d")
    timeout = timedelta(seconds=seconds)
    # `new_group` reads these names when it is called without a timeout, as DeepSpeed calls it.
    c10d.default_pg_timeout = c10d.default_pg_nccl_timeout = timeout
    for group in list(c10d._world.pg_map):
        c10d._set_pg_timeout(timeout, group)


def wait_for_rank_zero(name: str) -> None:
    """Return on rank 0 at once, and on the other ranks when rank 0 has called this with the same `name`.

    Unlike a collective operation it has no time limit, for work of rank 0 that can take any time. The others
    need a heartbeat without a limit: that of rank 0 shows whether it makes progress. If rank 0 ends, the
    others get an error of the store.

    Args:
        name: Used once in a process group.
    """
    import torch.distributed as dist

    c10d: Any = importlib.import_module("torch.distributed.distributed_c10d")
    store, key = c10d._get_default_store(), f"rank zero/{name}"
    if dist.get_rank() == 0:
        store.set(key, "1")
        return
    # Polled, because `wait` and `get` of a store end with its timeout.
    while not store.check([key]):
        time.sleep(_POLL_SECONDS)


def leave() -> None:
    """Destroy the process group, if there is one. This process may join another one after it."""
    import torch.distributed as dist

    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()
        # DeepSpeed would use its copy of the group that is gone.
        importlib.import_module("deepspeed.utils.groups")._WORLD_GROUP = None  # type: ignore[attr-defined]


def all_ranks_pack(model: Any, pack: Packing, rank: Rank, field: str) -> bool:
    """Return whether all ranks pack rows. This is a collective operation.

    Args:
        model: Its `packs` is the answer of this rank (see `models.selftest`).
        pack: The configured value.
        rank: This rank.
        field: Name of the configuration field of `pack`, for the log.
    """
    import torch
    import torch.distributed as dist

    votes = torch.tensor(int(model.packs), device=rank.torch_device)
    # Each rank plans the micro-batches of all ranks, so one that cannot pack decides for all.
    dist.all_reduce(votes, dist.ReduceOp.MIN)
    packs = bool(votes.item())
    if rank.rank == 0 and pack is not False:
        log_layout(packs, type(model.lm).__name__, field)
    return packs


def log_layout(packs: bool, models: str, field: str) -> None:
    """Log whether rows are packed or padded."""
    if packs:
        log.info("%s: rows are packed; sequences of %s do not influence each other", field, models)
    else:
        log.warning(
            "%s: rows are padded, because packed sequences of %s would influence each other", field, models
        )
