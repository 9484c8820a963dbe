"""Many tensors as few messages: cut the same way on both sides from names, dtypes and shapes alone."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class TensorSpec:
    """One tensor on the wire."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def cut(specs: Sequence[TensorSpec], limit: int) -> list[list[TensorSpec]]:
    """Consecutive specs into buckets of at most `limit` bytes; a larger tensor has a bucket of its own."""
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
    """(bytes,) uint8: the tensors' bytes one after the other."""
    return torch.cat([tensor.detach().contiguous().flatten().view(torch.uint8) for tensor in tensors])


def unpack(buffer: torch.Tensor, specs: Sequence[TensorSpec]) -> list[torch.Tensor]:
    """Tensors with the bytes of `buffer`; each copied, so alignment and lifetime are its own."""
    tensors = []
    offset = 0
    for spec in specs:
        part = buffer[offset : offset + spec.bytes].clone()
        tensors.append(part.view(spec.dtype).view(spec.shape))
        offset += spec.bytes
    return tensors
