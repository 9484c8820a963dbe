"""A process group of two ranks: this process, and a fork of it."""

from __future__ import annotations

import os
import signal
import socket
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch.distributed as dist

_SECONDS = timedelta(seconds=60)


@contextmanager
def as_rank_one(rank_zero: Callable[[], object]) -> Iterator[None]:
    """Join a group of two as rank 1, while rank 0 calls `rank_zero` in the forked process.

    At the end, rank 0 must have ended without an error. If it ends before, the store of the group is gone,
    and waiting for it is an error.
    """
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    child = os.fork()
    if child == 0:
        try:
            _join(port, 0, listener.detach())
            rank_zero()
            dist.barrier()
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    listener.close()
    try:
        _join(port, 1)
        yield
        dist.barrier()
    except BaseException:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        raise
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
    _, status = os.waitpid(child, 0)
    assert status == 0, "rank 0 failed"


def _join(port: int, rank: int, listener: int | None = None) -> None:
    is_master = listener is not None
    store = dist.TCPStore("127.0.0.1", port, 2, is_master, _SECONDS, master_listen_fd=listener)  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=_SECONDS)
