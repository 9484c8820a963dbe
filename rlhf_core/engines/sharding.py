"""How DeepSpeed shards a model: its configuration, and two things that it does not do by itself.

- With ZeRO-3, parameters are cut while a model is loaded (`models.sharded`).
- A checkpoint is continued on another number of ranks, through DeepSpeed's universal format:

      shards of all ranks -> one file per parameter and state -> each rank reads its own part

  A checkpoint without shards (ZeRO 0 in float32) needs no conversion.
"""

from __future__ import annotations

import contextlib
import io
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from rlhf_core.config.base import REDUCE_BUCKET
from rlhf_core.config.training import DeepSpeedConfig
from rlhf_core.engines.distributed import return_freed_memory


def deepspeed_config(
    config: DeepSpeedConfig, *, trained: int, clip: float | None, overlap: bool = False
) -> dict[str, Any]:
    """Return DeepSpeed's own configuration.

    Args:
        config: Precision and sharding.
        trained: Number of trained parameters.
        clip: Maximum norm of a gradient; None for a frozen model.
        overlap: Reduce gradients while the backward pass computes, with ZeRO 2 and 3. DeepSpeed cannot do it
            with ZeRO 1 where every backward pass may be the last of a step.
    """
    # Without an optimizer only ZeRO-3 has an effect: it shards the parameters.
    stage = config.zero_stage if clip is not None or config.zero_stage == 3 else 0
    ds: dict[str, Any] = {
        # A required field. The batches are made here, and DeepSpeed never sees their size.
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "managed_gradient_accumulation": False,  # every `step` is a boundary
        # Without ZeRO in float32, `TrainingEngine` clips, because DeepSpeed does not tell the norm.
        "gradient_clipping": 0.0 if stage == 0 and config.dtype == "float32" else clip or 0.0,
        "steps_per_print": 10**9,
        "zero_optimization": {
            "stage": stage,
            "overlap_comm": overlap and stage >= 2,
            # The whole buffer is allocated, and adapters have far fewer parameters than the default of 5e8.
            "reduce_bucket_size": min(REDUCE_BUCKET, max(1, trained)),
            "zero_hpz_partition_size": config.hpz if stage == 3 else 1,
        },
        "zero_force_ds_cpu_optimizer": False,  # otherwise offloading needs an optimizer of DeepSpeed
    }
    if config.offload != "none" and stage > 0:
        ds["zero_optimization"]["offload_optimizer"] = {"device": "cpu", "pin_memory": True}
    if config.offload == "all" and stage == 3:
        ds["zero_optimization"]["offload_param"] = {"device": "cpu", "pin_memory": True}
    if config.dtype != "float32":
        ds["bf16" if config.dtype == "bfloat16" else "fp16"] = {"enabled": True}
    if config.grad_accum_dtype is not None and config.dtype != "float32":
        ds["data_types"] = {"grad_accum_dtype": "fp32"}
    return ds


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
            # The layer of the last call is still gathered, also after an error.
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


_RANKS = "ranks"


def note_ranks(folder: Path, ranks: int) -> None:
    """Write the number of ranks to the folder of a checkpoint."""
    (folder / _RANKS).write_text(f"{ranks}\n")


def noted_ranks(folder: Path) -> int:
    """Return the number of ranks that saved a checkpoint."""
    return int((folder / _RANKS).read_text())


def is_sharded(state: Path) -> bool:
    """Return whether each rank saved its own part of the optimizer's state."""
    return any(state.glob("*zero_pp_rank_*_optim_states.pt"))


def is_first(scratch: Path) -> bool:
    """Create the folder `scratch`; return False if another rank that shares it has."""
    try:
        # Creating a folder fails if it exists, so of the ranks that share a disk exactly one is the first.
        scratch.mkdir(parents=True)
    except FileExistsError:
        return False
    return True


def convert(state: Path, target: Path) -> None:
    """Convert DeepSpeed's folder `state` to a universal one at `target`.

    It runs in this process and not as DeepSpeed's script, so that the allow-list of `distributed.join`
    applies to its pickles.
    """
    from deepspeed.checkpoint import ds_to_universal

    options = Namespace(
        input_folder=str(state),
        output_folder=str(target),
        # With more, DeepSpeed starts processes for the work.
        num_extract_workers=1,
        num_merge_workers=1,
        keep_temp_folder=False,
        strict=True,
        # The version of the format, which DeepSpeed's own checkpoints lack and the conversion requires.
        inject_missing_state=True,
    )
    # DeepSpeed prints its arguments and progress bars to the log of the rank.
    output = io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
        ds_to_universal.main(options)


@contextlib.contextmanager
def loading_universal(engine: Any) -> Any:
    """Let the DeepSpeed engine read universal checkpoints in this context.

    Afterwards, correct the parameter groups and step counts, which DeepSpeed 0.19 restores wrongly.
    """
    own_settings = [dict(group) for group in engine.optimizer.param_groups]
    for settings in own_settings:
        del settings["params"]
    engine._config.load_universal_checkpoint = True
    try:
        yield
    finally:
        engine._config.load_universal_checkpoint = False
    # Under ZeRO-3 every group has got the settings of the first one, so that norms would have weight decay.
    for group, settings in zip(engine.optimizer.param_groups, own_settings, strict=True):
        group.update(settings)
    # All parameters share one step count, which AdamW would increment once per parameter. It is on the CPU,
    # which a fused AdamW does not support.
    for parameter, state in engine.optimizer.optimizer.state.items():
        if torch.is_tensor(state.get("step")):
            state["step"] = state["step"].to(parameter.device, copy=True)
