"""Copies of the trained weights of a model. Under ZeRO-3 each rank copies its own shards."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from rlhf_core.errors import CorruptArtifact


class WeightCopy:
    """A copy of the trained parameters of `lm`, under their names. Tied parameters occur once.

    Args:
        lm: The model.
        name: Name of the files in a checkpoint.
        rank_device: Device of the collectives.
        dtype: Data type of the copy; None for that of the weights.
        device: Device of the copy; None for that of the weights.
    """

    def __init__(
        self,
        lm: nn.Module,
        name: str,
        *,
        rank_device: str,
        dtype: torch.dtype | None = None,
        device: str | None = None,
    ) -> None:
        self._parameters = {n: p for n, p in lm.named_parameters() if p.requires_grad}
        self._name = name
        self._rank_device = rank_device
        self._shards: dict[str, torch.Tensor] = {}
        for n, p in self._parameters.items():
            shard = _local(p)
            self._shards[n] = shard.to(device or shard.device, dtype or shard.dtype, copy=True)

    def take(self) -> None:
        """Copy the current weights."""
        for name, shard in self._shards.items():
            shard.copy_(_local(self._parameters[name]))

    def __contains__(self, name: str) -> bool:
        return name in self._shards

    def full(self, name: str) -> torch.Tensor:
        """Return the whole tensor in the model's dtype on the rank's device.

        Under ZeRO-3 this is a collective.
        """
        parameter = self._parameters[name]
        # Offloaded weights and their copies are in host memory, and NCCL gathers only from devices.
        shard = self._shards[name].to(self._rank_device)
        if _is_sharded(parameter):
            parts = [torch.empty_like(shard) for _ in range(dist.get_world_size())]
            dist.all_gather(parts, shard)
            shard = torch.cat(parts)[: parameter.ds_numel].view(parameter.ds_shape)  # type: ignore[attr-defined]
        return shard.to(parameter.dtype)

    @property
    def bytes_per_parameter(self) -> int:
        return next(iter(self._shards.values())).element_size()

    def save(self, folder: Path, rank: int) -> None:
        """Save the shards of this rank to one file. Without sharding, only rank 0 saves."""
        from safetensors.torch import save_file

        if rank == 0 or self._sharded:
            save_file(self._shards, folder / self._file(rank))

    def load(self, folder: Path, rank: int, saved_ranks: int, ranks: int) -> None:
        """Load what `saved_ranks` ranks saved. Raises CorruptArtifact if a file is missing."""
        if saved_ranks == ranks or not self._sharded:
            file = self._open(folder, rank)
            for name in file.keys():  # noqa: SIM118
                self._shards[name].copy_(file.get_tensor(name))
            return
        files = [self._open(folder, saved) for saved in range(saved_ranks)]
        for name, shard in self._shards.items():
            # The last shards are padded beyond the end of the tensor.
            whole = torch.cat([file.get_tensor(name) for file in files])
            whole = whole[: self._parameters[name].ds_numel]  # type: ignore[attr-defined]
            part = whole[rank * shard.numel() : (rank + 1) * shard.numel()]
            shard[: part.numel()].copy_(part)

    def _open(self, folder: Path, rank: int) -> Any:
        """Return an open file, which reads one tensor at a time."""
        from safetensors import safe_open

        path = folder / self._file(rank)
        if not path.is_file():
            raise CorruptArtifact(f"the checkpoint folder {folder.name} has no {path.name}")
        return safe_open(path, framework="pt", backend="pread")

    @property
    def _sharded(self) -> bool:
        return any(map(_is_sharded, self._parameters.values()))

    def _file(self, rank: int) -> str:
        return f"{self._name}-rank{rank if self._sharded else 0}.safetensors"


class WeightAverage(WeightCopy):
    """An exponential moving average in float32, for every precision of the model.

    average = decay * average + (1 - decay) * weights        after every optimizer step that was not skipped
    """

    def __init__(self, lm: nn.Module, decay: float, *, rank_device: str) -> None:
        super().__init__(lm, "ema", rank_device=rank_device, dtype=torch.float32)
        self._decay = decay

    @torch.no_grad()
    def update(self) -> None:
        for name, shard in self._shards.items():
            # In float32: in bfloat16, a step of the average is smaller than its rounding.
            shard.lerp_(_local(self._parameters[name]).float(), 1.0 - self._decay)


def _is_sharded(parameter: nn.Parameter) -> bool:
    return hasattr(parameter, "ds_tensor")


def _local(parameter: nn.Parameter) -> torch.Tensor:
    """Return the part of `parameter` on this rank: its shard under ZeRO-3, otherwise the whole."""
    local: torch.Tensor = parameter.ds_tensor if _is_sharded(parameter) else parameter  # type: ignore[attr-defined]
    return local.detach()
