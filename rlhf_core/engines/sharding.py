"""ZeRO-3's shards of parameters that are cut while a model is loaded (`models.sharded`)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from rlhf_core.config.training import DeepSpeedConfig
from rlhf_core.engines.deepspeed import deepspeed_config
from rlhf_core.engines.distributed import return_freed_memory


def shards_of(config: DeepSpeedConfig) -> Zero3Shards | None:
    """Return what cuts parameters with ZeRO-3, or None for other stages. The process group must exist."""
    return Zero3Shards(config) if config.zero_stage == 3 else None


class Zero3Shards:
    """Implements `models.sharded.Shards`. DeepSpeed later uses the same shards."""

    def __init__(self, config: DeepSpeedConfig) -> None:
        import deepspeed
        from deepspeed.utils import groups

        class LocalInit(deepspeed.zero.Init):  # type: ignore[misc]  # deepspeed has no types
            def _zero_init_param(self, parameter: Any) -> None:
                # DeepSpeed broadcasts the values of rank 0 first. Here every rank has read the same files.
                self._convert_to_deepspeed_param(parameter)
                parameter.partition()

        # The group of an earlier model. DeepSpeed refuses to create it again.
        group = groups._get_zero_param_intra_parallel_group() if config.hpz > 1 else None
        # `trained` sets the size of the buckets of gradients only, which are not allocated here.
        settings = deepspeed_config(config, trained=1, clip=None)
        self._init: Any = LocalInit(config_dict_or_path=settings, zero_param_parallel_group=group)
        self._gathered: list[Any] = []
        if self._init.local_device.type == "cpu":
            return_freed_memory()

    def cut(self, parameter: nn.Parameter) -> None:
        """Replace the values of a parameter by the shard of this rank, in place. No rank waits for others."""
        self._init._convert_to_zero_parameters([parameter])

    @contextmanager
    def gathered_in_turn(self, model: nn.Module) -> Iterator[None]:
        """Gather the parameters of a decoder layer, or of another module, when it is called and when its
        backward pass begins, until it is the turn of the next one. This is a collective operation.

        DeepSpeed's own hooks need an engine and cannot be removed from a model.
        """
        handles = []
        for part in _parts(model):
            handles += [part.register_forward_pre_hook(self._before), part.register_forward_hook(self._after)]
        try:
            yield
        finally:
            self._gather([])
            for handle in handles:
                handle.remove()

    def _before(self, part: nn.Module, _inputs: Any) -> None:
        self._gather([p for p in part.parameters() if hasattr(p, "ds_id")])

    def _after(self, part: nn.Module, inputs: Any, output: Any) -> None:
        # The gradient of its output arrives before the backward pass of the part begins.
        for value in output if isinstance(output, tuple | list) else [output]:
            if isinstance(value, torch.Tensor) and value.requires_grad:
                value.register_hook(lambda _gradient: self._before(part, inputs))

    def _gather(self, parameters: list[Any]) -> None:
        # DeepSpeed adds `partition` and `all_gather` to each sharded parameter. Both take the whole list.
        if self._gathered:
            self._gathered[0].partition(param_list=self._gathered)
        if parameters:
            parameters[0].all_gather(param_list=parameters)
        self._gathered = parameters


def _parts(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the modules that are gathered as a whole: decoder layers, and others with own parameters."""
    for child in module.children():
        if isinstance(module, nn.ModuleList) or any(True for _ in child.parameters(recurse=False)):
            yield child
        else:
            yield from _parts(child)
