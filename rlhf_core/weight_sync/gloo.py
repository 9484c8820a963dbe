"""The transport for CPUs and for hardware without NCCL: a gloo group of one sender and all engines' workers.

    sender (policy rank 0)                       receivers (one per engine worker)
      pack bucket k+1  |  broadcast bucket k  ->   unpack, checksum, load bucket k

The group is its own: it shares nothing with the ranks' training group, and every operation has a timeout.
"""

from __future__ import annotations

import socket
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as _dist

from rlhf_core.engines.distributed import rendezvous

dist: Any = _dist
"""torch's stubs know neither the stores nor the operations of a process group of one's own."""


class GlooGroup:
    """Rank 0 sends, the others receive."""

    def __init__(
        self,
        address: str,
        port: int,
        rank: int,
        size: int,
        timeout: float,
        listener: socket.socket | None = None,
    ) -> None:
        """`listener` is the socket of rank 0 on `address` and `port`."""
        wait = timedelta(seconds=timeout)
        self._store = rendezvous(address, port, size, timeout=wait, listener=listener)
        self._group = dist.ProcessGroupGloo(dist.PrefixStore("weights", self._store), rank, size, wait)

    def send(self, buffer: torch.Tensor) -> Any:
        """Start broadcasting (bytes,) uint8 from rank 0; `wait()` on what it returns before reusing the
        buffer.
        """
        return self._group.broadcast(buffer, 0)

    def receive(self, size: int) -> torch.Tensor:
        """(size,) uint8 from rank 0."""
        buffer = torch.empty(size, dtype=torch.uint8)
        self._group.broadcast(buffer, 0).wait()
        return buffer
