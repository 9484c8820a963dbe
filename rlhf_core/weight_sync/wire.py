"""How weights travel: tensors packed into buckets, sent through a gloo group, and checked by checksums.

    sender (policy rank 0)                       receivers (one per engine worker)
      pack bucket k+1  |  broadcast bucket k  ->   unpack, checksum, load bucket k

Both sides cut the same buckets from names, dtypes and shapes alone. The gloo group is for CPUs and for
hardware without NCCL. It is separate from the training group, and each of its operations has a timeout.
"""

from __future__ import annotations

import math
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as _dist

from rlhf_core.engines.distributed import rendezvous
from rlhf_core.errors import WeightSyncError

dist: Any = _dist
"""torch's type stubs lack the stores and the operations of a separate process group."""

_CHUNK = 1 << 22
_VIEWS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


# -- buckets --


@dataclass(frozen=True)
class TensorSpec:
    """Name, dtype and shape of a tensor."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def cut(specs: Sequence[TensorSpec], limit: int) -> list[list[TensorSpec]]:
    """Group consecutive specs into buckets of at most `limit` bytes.

    A larger tensor is a bucket of its own.
    """
    buckets: list[list[TensorSpec]] = []
    used = 0
    for spec in specs:
        if not buckets or used + spec.bytes > limit:
            buckets.append([])
            used = 0
        buckets[-1].append(spec)
        used += spec.bytes
    return buckets


def pack(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Concatenate the bytes of tensors to one tensor of shape (bytes,) and dtype uint8."""
    return torch.cat([tensor.detach().contiguous().flatten().view(torch.uint8) for tensor in tensors])


def unpack(buffer: torch.Tensor, specs: Sequence[TensorSpec]) -> list[torch.Tensor]:
    """Return the tensors in `buffer`. They are copies, because a view may be misaligned for its dtype."""
    tensors = []
    offset = 0
    for spec in specs:
        part = buffer[offset : offset + spec.bytes].clone()
        tensors.append(part.view(spec.dtype).view(spec.shape))
        offset += spec.bytes
    return tensors


# -- checksums --


@dataclass(frozen=True)
class Acknowledgement:
    """The answer of one engine after a sync."""

    engine: int
    version: int
    checksums: Mapping[str, str]
    """Checksums of the received tensors by name."""


def tensor_checksum(tensor: torch.Tensor) -> str:
    """Return two 64-bit sums of the elements' bits, the second with odd weights that depend on the position.

    Any single altered element changes both sums, and swapped elements change the second. The arithmetic is
    modulo 2^64, so the result does not depend on the order of summation and on the device. It needs 8 bytes
    of memory for each of 4 M elements. vLLM's own checksums hash the fused parameters, which are empty on the
    CPU.
    """
    bits = tensor.detach().contiguous().flatten()
    bits = bits.view(_VIEWS[bits.element_size()])
    plain = weighted = 0
    for start in range(0, bits.numel(), _CHUNK):
        part = bits[start : start + _CHUNK].long()
        index = torch.arange(start, start + part.numel(), device=part.device)
        plain += int(part.sum())
        weighted += int((part * (index * 2654435761 * 2 + 1)).sum())
    return f"{plain & (2**64 - 1):016x}{weighted & (2**64 - 1):016x}"


def verify(sent: Mapping[str, str], version: int, acknowledgements: Sequence[Acknowledgement]) -> None:
    """Raise a WeightSyncError that names engine and tensor unless every engine has exactly what was sent."""
    for ack in acknowledgements:
        if ack.version != version:
            raise WeightSyncError(
                f"engine {ack.engine} acknowledged policy version {ack.version}, but {version} was sent; the"
                " run stops so that nothing is sampled from unknown weights"
            )
        wrong = [name for name in sent if ack.checksums.get(name) != sent[name]]
        extra = [name for name in ack.checksums if name not in sent]
        if wrong or extra:
            names = ", ".join((wrong + extra)[:3])
            raise WeightSyncError(
                f"engine {ack.engine} received other weights than version {version} sent:"
                f" {len(wrong) + len(extra)} of {len(sent)} tensors differ ({names}); the run stops, nothing"
                " was sampled from them"
            )


# -- transport --


class GlooGroup:
    """A process group in which rank 0 sends and the others receive."""

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
        """Start to broadcast a buffer (bytes,) of uint8 from rank 0.

        Call `wait()` on the result before the buffer is used again.
        """
        return self._group.broadcast(buffer, 0)

    def receive(self, size: int) -> torch.Tensor:
        """Receive a buffer (size,) of uint8 from rank 0."""
        buffer = torch.empty(size, dtype=torch.uint8)
        self._group.broadcast(buffer, 0).wait()
        return buffer
