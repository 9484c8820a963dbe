"""Checksums of weights, computed on the device they lie on, the same on sender and receiver.

vLLM's own checksums hash fused parameters after loading; on the CPU those are repacked and hash as empty. So
what is compared is every tensor as it left and as it arrived.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from rlhf_core.errors import WeightSyncError

_CHUNK = 1 << 22
_VIEWS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class Acknowledgement:
    """What one engine says after a sync."""

    engine: int
    version: int
    checksums: Mapping[str, str]
    """Tensor name -> checksum of what arrived."""


def tensor_checksum(tensor: torch.Tensor) -> str:
    """Two 64-bit sums of the elements' bits, the second weighted by odd numbers that depend on the position.

    Any single altered element changes both; swapped elements change the second. Integer arithmetic modulo
    2^64, so the order of summation, and hence the device, does not matter. Needs 8 bytes of scratch for each
    of 4 M elements.
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
    """Raise WeightSyncError, naming engine and tensor, unless every engine has exactly what was sent."""
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
