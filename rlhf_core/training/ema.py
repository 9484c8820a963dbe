"""An exponential moving average of a model's weights, kept shard by shard: under ZeRO-3 each rank averages what it holds.

    average = decay * average + (1 - decay) * weights        after every optimizer step that was applied

float32, whatever the precision of the model.
"""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from rlhf_core.errors import CorruptArtifact


class WeightAverage:
    """Of the trained parameters of `lm`, under their names there. Tied parameters come once."""

    def __init__(self, lm: nn.Module, decay: float) -> None:
        self._parameters = {name: p for name, p in lm.named_parameters() if p.requires_grad}
        self._decay = decay
        self._shards = {name: _local(p).float().clone() for name, p in self._parameters.items()}

    @torch.no_grad()
    def update(self) -> None:
        for name, shard in self._shards.items():
            shard.lerp_(_local(self._parameters[name]).float(), 1.0 - self._decay)

    def __contains__(self, name: str) -> bool:
        return name in self._shards

    def full(self, name: str) -> torch.Tensor:
        """The whole tensor in the model's dtype; a collective under ZeRO-3."""
        shard, parameter = self._shards[name], self._parameters[name]
        if _is_sharded(parameter):
            parts = [torch.empty_like(shard) for _ in range(dist.get_world_size())]
            dist.all_gather(parts, shard)
            shard = torch.cat(parts)[: parameter.ds_numel].view(parameter.ds_shape)  # type: ignore[attr-defined]
        return shard.to(parameter.dtype)

    def save(self, folder: Path, rank: int) -> None:
        """This rank's shards into one file; without sharding rank 0's are all there is."""
        from safetensors.torch import save_file

        if rank == 0 or self._sharded:
            save_file(self._shards, folder / self._file(rank))

    def load(self, folder: Path, rank: int) -> None:
        from safetensors.torch import load_file

        path = folder / self._file(rank)
        if not path.is_file():
            raise CorruptArtifact(f"the checkpoint folder {folder.name} has no averaged weights ({path.name})")
        for name, tensor in load_file(path).items():
            self._shards[name].copy_(tensor)

    @property
    def _sharded(self) -> bool:
        return any(map(_is_sharded, self._parameters.values()))

    def _file(self, rank: int) -> str:
        return f"ema-rank{rank if self._sharded else 0}.safetensors"


def _is_sharded(parameter: nn.Parameter) -> bool:
    return hasattr(parameter, "ds_tensor")


def _local(parameter: nn.Parameter) -> torch.Tensor:
    local: torch.Tensor = parameter.ds_tensor if _is_sharded(parameter) else parameter  # type: ignore[attr-defined]
    return local.detach()
