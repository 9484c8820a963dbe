"""One model that DeepSpeed trains on the ranks of this process group.

The result does not depend on how a batch is split. DeepSpeed averages gradients over ranks; here each loss is
a part of one global mean, and is scaled by the world size. Each `step` is an accumulation boundary, so the
number of micro-batches does not matter.
"""

from __future__ import annotations

import gc
import logging
import math
import pickle
import shutil
from collections.abc import Callable, Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from rlhf_core.config.training import DeepSpeedConfig, LoraConfig, OptimizerConfig
from rlhf_core.engines import sharding
from rlhf_core.engines.distributed import Rank, bound_collectives
from rlhf_core.engines.sharding import deepspeed_config
from rlhf_core.errors import CorruptArtifact, NonFiniteError
from rlhf_core.models.adapters import adapter_name, merged, merged_name, save_adapter, trained_head_name
from rlhf_core.models.saving import WeightStream, as_in_checkpoint, unquantized
from rlhf_core.models.weights import dequantized, shape, value_dtype
from rlhf_core.planning.loads import state_bytes, unsharded_bytes
from rlhf_core.system.failpoints import failpoint
from rlhf_core.system.heartbeat import heartbeat

log = logging.getLogger(__name__)

# `OptimizerConfig.constants` has the same number, which is part of stage keys.
ADAM_EPS = 1e-8
MOST_BFLOAT16_SUMS = 128
"""Maximum number of micro-batches per optimizer step for which bfloat16 sums have an error of only a few
percent.
"""

_TAG = "state"
_COUNTERS = "rlhf_counters"
"""Key of our counters in the client state, which also contains those of DeepSpeed."""

_LARGE_SCALE = 8.0
"""A larger loss scale can be halved three times before DeepSpeed reaches 1 and raises an error."""


def learning_rate(config: OptimizerConfig, step: int, total_steps: int) -> float:
    """Return the learning rate of optimizer step `step` (0-based): a linear warm-up, then the schedule down
    to `min_lr_ratio` of the peak.
    """
    warmup = round(config.warmup_ratio * total_steps)
    if step < warmup:
        return config.learning_rate * (step + 1) / warmup
    done = (step - warmup) / max(1, total_steps - warmup)
    if config.schedule == "constant":
        return config.learning_rate
    decay = 0.5 * (1 + math.cos(math.pi * done)) if config.schedule == "cosine" else 1 - done
    return config.learning_rate * (config.min_lr_ratio + (1 - config.min_lr_ratio) * decay)


class TrainingEngine:
    """A model in DeepSpeed.

    Args:
        module: The model.
        config: Precision and sharding.
        optimizer: None for a frozen model, which may be sharded (ZeRO-3).
        rank: This rank.
        ema_decay: If given, an average of the weights is kept for `restore_average`.
        keep_best: Whether `snapshot_best` and `restore_best` are used.
    """

    def __init__(
        self,
        module: nn.Module,
        config: DeepSpeedConfig,
        optimizer: OptimizerConfig | None,
        rank: Rank,
        *,
        ema_decay: float | None = None,
        keep_best: bool = False,
    ) -> None:
        import deepspeed

        self.rank = rank
        self.optimizer_config = optimizer
        self.zero_stage = config.zero_stage
        self.lora: LoraConfig | None = getattr(module, "lora", None)
        self._grad_norm = math.nan
        self.steps_done = 0
        self.skipped_steps = 0
        self._skipped_in_a_row = 0
        self._grad_nonfinite = False
        self._rounded_sums = config.dtype == "bfloat16" and config.grad_accum_dtype is None
        if config.gradient_checkpointing and optimizer is not None:
            # The reentrant kind gives no gradients to an adapter: its inputs come from frozen embeddings.
            module.lm.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})  # type: ignore[operator,union-attr]
        torch_optimizer = None
        if optimizer is not None:
            torch_optimizer = _adamw(module, optimizer)
            module.train()
        else:
            module.requires_grad_(False)
            module.eval()
        self.engine: Any
        self.engine, self.optimizer, _, _ = deepspeed.initialize(
            model=module,
            optimizer=torch_optimizer,
            config=deepspeed_config(
                config,
                trained=sum(math.prod(shape(p)) for p in module.parameters() if p.requires_grad),
                clip=None if optimizer is None else optimizer.max_grad_norm,
                overlap=rank.device == "cuda" and rank.world_size > 1,
            ),
            dist_init_required=False,  # `distributed.join` has done it
        )
        if torch_optimizer is not None and self.zero_stage == 0 and config.dtype != "float32":
            # DeepSpeed allocates Adam's state by a step with zero gradients, which counts as a step and
            # applies weight decay to the float32 weights. Undo both.
            torch_optimizer.state.clear()
            self.optimizer.refresh_fp32_params()
        self._own_clipping = optimizer is not None and self.zero_stage == 0 and config.dtype == "float32"
        if self._own_clipping and torch_optimizer is not None:
            # With ZeRO 0 in float32, DeepSpeed does not return the norm that it clipped. In this hook the
            # gradients are already reduced.
            torch_optimizer.register_step_pre_hook(self._clip)
        lm, device = self.module.lm, rank.torch_device
        self._average = None if ema_decay is None else WeightAverage(lm, ema_decay, rank_device=device)
        self._best = WeightCopy(lm, "best", rank_device=device, device="cpu") if keep_best else None
        # Until here the limit of the start applies. DeepSpeed has created its own groups by now.
        bound_collectives(rank.collective_seconds)

    def close(self) -> None:
        """Free the memory of a trained engine. Without this, DeepSpeed holds it until the process ends.

        The caller must hold no reference to the module.
        """
        self.engine.destroy()
        # Under ZeRO-3 some of DeepSpeed's objects stay referenced; their tensors must not.
        vars(self.optimizer).clear()
        vars(self.engine).clear()
        self.engine = self.optimizer = self._average = self._best = None
        gc.collect()
        if self.rank.device == "cuda":
            torch.cuda.empty_cache()

    @property
    def module(self) -> Any:
        return self.engine.module

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the forward pass through DeepSpeed's hooks."""
        return self.engine(*args, **kwargs)

    def train_step(self, micro_losses: Iterator[torch.Tensor], total_steps: int) -> float:
        """Run the backward pass of all micro-batches and one optimizer step.

        Each loss is a part of one global sum: its denominator counts the whole optimizer step on all ranks.

        A step whose gradient is not finite is skipped and counted in `skipped_steps`. In float16 such steps
        are normal while the loss scale is large, because each of them halves it.

        Args:
            micro_losses: Losses of this rank; every rank must have the same number.
            total_steps: Number of steps of the learning rate schedule.

        Returns:
            The gradient norm before clipping; NaN or infinite for a skipped step.

        Raises:
            NonFiniteError: Three such steps in a row, apart from those that a loss scale explains.
        """
        assert self.optimizer_config is not None
        # Of the losses below: the step may halve it.
        scale = float(self.optimizer.loss_scale) if self.engine.fp16_enabled() else 1.0
        self._grad_nonfinite = False
        count = 0
        for loss in micro_losses:
            heartbeat(f"optimizer step {self.steps_done + 1}")
            count += 1
            if failpoint("train.backward", "nan") == "nan":
                loss = loss * math.nan
            # The denominator of a loss counts all micro-batches: DeepSpeed must not divide again.
            self.engine.backward(loss * self.rank.world_size, scale_wrt_gas=False)
        self._warn_of_sums(count)
        rate = learning_rate(self.optimizer_config, self.steps_done, total_steps)
        for group in self.optimizer.param_groups:
            # From the number of the step: no scheduler has a state that a checkpoint would need.
            group["lr"] = rate
        self.engine.step()
        self.steps_done += 1
        if not self.engine.was_step_applied():
            norm = math.nan
        elif self._own_clipping:
            norm = self._grad_norm
        else:
            norm = float(self.engine.get_global_grad_norm() or 0.0)
        self._grad_nonfinite = not math.isfinite(norm) and scale <= _LARGE_SCALE
        # A step that the loss scale explains adds False, which is 0, and does not end the row either.
        self._skipped_in_a_row = 0 if math.isfinite(norm) else self._skipped_in_a_row + self._grad_nonfinite
        if not math.isfinite(norm):
            self.skipped_steps += 1
            log.warning("optimizer step %d was skipped: its gradient is not finite", self.steps_done)
        elif self._average is not None:
            self._average.update()
        if self._skipped_in_a_row >= 3:
            raise NonFiniteError(
                f"the gradients of optimizer steps {self.steps_done - 2} to {self.steps_done} are not finite;"
                " none of them was applied; lower the learning rate or look at the batches"
            )
        return norm

    def _warn_of_sums(self, count: int) -> None:
        """Warn once if there are more micro-batches than bfloat16 can add up precisely. It has 8 significant
        bits.
        """
        if count <= MOST_BFLOAT16_SUMS or not self._rounded_sums:
            return
        self._rounded_sums = False
        log.warning(
            "the gradients of %d micro-batches are added up in bfloat16, where sums of more than a few"
            " hundred values stop growing; set deepspeed.grad_accum_dtype=float32 (with zero_stage=2), or"
            " raise micro_batch_tokens to have at most %d",
            count,
            MOST_BFLOAT16_SUMS,
        )

    @property
    def grad_nonfinite(self) -> bool:
        """Whether the current or last step was skipped because of a gradient that no loss scale explains."""
        return self._grad_nonfinite

    def _clip(self, optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
        assert self.optimizer_config is not None
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        self._grad_norm = float(nn.utils.clip_grad_norm_(parameters, self.optimizer_config.max_grad_norm))
        if not math.isfinite(self._grad_norm):
            for parameter in parameters:
                parameter.grad = None  # then AdamW changes neither the parameters nor their moments

    def weights(self, *, dtype: torch.dtype | None = None) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (name in the model's files, full tensor), gathering one decoder layer at a time. Adapters are
        merged.

        `dtype` is described in `merged`. Tied parameters are returned once. Under ZeRO-3 this is a collective
        operation: every rank must iterate to the end, in the same order.
        """
        for group in self._weight_groups(dtype=dtype):
            yield from self._in_files(group).items()

    def _in_files(self, group: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return the tensors of a group as they are in the model's files. If these are the same tensors, the
        group is returned in its own order.
        """
        converted = as_in_checkpoint(self._saved_model, group)
        is_same = all(converted.get(name) is tensor for name, tensor in group.items())
        return group if is_same else converted

    @cached_property
    def _saved_model(self) -> Any:
        return unquantized(self.module.lm, self.module.lm.dtype)

    def _weight_groups(self, *, dtype: torch.dtype | None) -> Iterator[dict[str, torch.Tensor]]:
        """Yield the merged tensors by decoder layer, under the names of the model's modules."""
        for group in self._gather_groups():
            with self._gathered([parameter for _, parameter in group]):
                values = {name: dequantized(parameter) for name, parameter in group}
                yield dict(merged(values, self.lora, dtype))

    def _weight_layout(self, dtype: torch.dtype | None) -> list[dict[str, torch.Tensor]]:
        """Return what `_weight_groups` yields, as tensors on `meta`."""
        groups = []
        for group in self._gather_groups():
            layout = {}
            for name, parameter in group:
                if new_name := merged_name(name):
                    kind = dtype or value_dtype(parameter)
                    layout[new_name] = torch.empty(shape(parameter), dtype=kind, device="meta")
            groups.append(layout)
        return groups

    def adapter(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the tensors of the adapter under PEFT's names, in the same way as `weights`."""
        for group in self._gather_groups():
            named = [(name, parameter) for name, parameter in group if adapter_name(name)]
            with self._gathered([parameter for _, parameter in named]):
                for name, parameter in named:
                    yield str(adapter_name(name)), parameter.detach()

    def shapes(self, *, adapter: bool = False) -> list[tuple[str, tuple[int, ...]]]:
        """Return the names and shapes of what `weights` (or `adapter`) yields."""
        shapes: list[tuple[str, tuple[int, ...]]] = []
        if adapter:
            for group in self._gather_groups():
                for name, parameter in group:
                    if new_name := adapter_name(name):
                        shapes.append((new_name, shape(parameter)))
            return shapes
        for layout in self._weight_layout(None):
            for name, tensor in self._in_files(layout).items():
                shapes.append((name, tuple(tensor.shape)))
        return shapes

    def _gather_groups(self) -> list[list[tuple[str, nn.Parameter]]]:
        """Return the parameters by decoder layer, so that gathering holds at most one layer."""
        groups: dict[str, list[tuple[str, nn.Parameter]]] = {}
        for name, parameter in self.module.lm.named_parameters():
            parts = name.split(".")
            number = next((i for i, part in enumerate(parts) if part.isdigit()), None)
            layer = name if number is None else ".".join(parts[: number + 1])
            groups.setdefault(layer, []).append((name, parameter))
        return list(groups.values())

    def _gathered(self, parameters: list[nn.Parameter], *, to_change: bool = False) -> Any:
        from deepspeed.runtime.zero.partition_parameters import GatheredParameters

        enabled = self.zero_stage == 3 and bool(parameters)
        if enabled:
            self._release_prefetched()
        return GatheredParameters(parameters, modifier_rank=0 if to_change else None, enabled=enabled)

    def _release_prefetched(self) -> None:
        """Release the parameters that ZeRO-3 prefetched for a backward pass that does not follow.

        After an evaluation they are being gathered until the next forward pass, and DeepSpeed can neither
        gather nor partition them. The models for which it prefetches have more parameters than it holds
        gathered at a time (1e9).
        """
        # The optimizer of a frozen model is the offload object itself.
        offload = getattr(self.optimizer, "parameter_offload", self.optimizer)
        offload.get_param_coordinator()._clean_inflight_param_registry()

    def snapshot_best(self) -> None:
        """Copy the current weights to host memory for `restore_best`."""
        assert self._best is not None
        self._best.take()

    def restore_best(self) -> None:
        """Restore the weights of the last `snapshot_best`, but not the optimizer's copies. A collective."""
        assert self._best is not None
        self._restore(self._best)

    def restore_average(self) -> None:
        """Replace the weights by their moving average, but not the optimizer's copies. A collective."""
        assert self._average is not None
        self._restore(self._average)

    @torch.no_grad()
    def _restore(self, copy: WeightCopy) -> None:
        for group in self._gather_groups():
            kept = [(name, parameter) for name, parameter in group if name in copy]
            # Under ZeRO-3, DeepSpeed writes back what rank 0 has changed when the context ends.
            with self._gathered([parameter for _, parameter in kept], to_change=True):
                for name, parameter in kept:
                    parameter.copy_(copy.full(name))

    def save_model(
        self,
        folder: Path,
        save: Callable[[Path, WeightStream], None],
        *,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Call `save(folder, weights)` on rank 0, and gather each decoder layer when it is written. This is a
        collective operation.

        Args:
            folder: Is created.
            save: Writes the model and takes all groups of the weights.
            dtype: See `models.adapters.merged`.
        """
        groups = self._weight_groups(dtype=dtype)
        if self.rank.rank == 0:
            folder.mkdir(parents=True, exist_ok=True)
            save(folder, WeightStream(self._weight_layout(dtype), groups))
        else:
            for _ in groups:
                heartbeat("save the model")

    @torch.no_grad()
    def merge_adapter(self) -> None:
        """Add the adapter to the frozen weights, rounded to their precision. This is a collective operation.

        With `adapter_off` the engine then is the model that `save_model` saves without another `dtype`. The
        frozen weights must not be quantized.
        """
        named = dict(self.module.lm.named_parameters())
        for group in self._gather_groups():
            frozen = {merged_name(name): parameter for name, parameter in group}
            with self._gathered([parameter for _, parameter in group], to_change=True):
                values = {name: parameter.detach() for name, parameter in group}
                for name, tensor in merged(values, self.lora):
                    frozen[name].copy_(tensor)
        for name, parameter in named.items():
            if trained := trained_head_name(name):
                with self._gathered([parameter, named[trained]], to_change=True):
                    parameter.copy_(named[trained])

    def save_adapter(self, folder: Path, base: str, revision: str | None = None) -> None:
        """Save the adapter, if there is one, in PEFT's layout. This is a collective operation.

        `base` and `revision` name the model that it belongs to.
        """
        if self.lora is None:
            return
        # Every rank iterates, because each gather is a collective.
        tensors = {name: tensor.cpu().clone() for name, tensor in self.adapter() if self.rank.rank == 0}
        if self.rank.rank == 0:
            save_adapter(folder, self.module.lm, self.lora, tensors, base, revision)

    @property
    def checkpoint_bytes(self) -> tuple[int, int]:
        """Approximate bytes of a checkpoint of all ranks (see `planning.loads`), and those that rank 0
        alone writes. Frozen weights under an adapter are left out.
        """
        copies = sum(copy.bytes_per_parameter for copy in self._copies)
        weights = states = 0
        for p in self.module.parameters():
            if p.requires_grad or self.lora is None:
                weight, size = p.element_size(), getattr(p, "ds_numel", p.numel())
                weights += size * (weight + copies * p.requires_grad)
                states += size * p.requires_grad * state_bytes(weight, self.zero_stage)
        return weights + states, unsharded_bytes(weights, states, self.zero_stage)

    def save_checkpoint(self, folder: Path) -> None:
        """Save trained weights, optimizer and counters to `folder`. This is a collective operation.

        Ranks on several hosts need not share the folder: each has its own part there.
        """
        (folder / _TAG).mkdir(parents=True, exist_ok=True)  # DeepSpeed makes it on rank 0 only
        counters = {
            "steps_done": self.steps_done,
            "skipped_steps": self.skipped_steps,
            "skipped_in_a_row": self._skipped_in_a_row,
        }
        self.engine.save_checkpoint(
            str(folder),
            tag=_TAG,
            client_state={_COUNTERS: counters},
            save_latest=True,
            exclude_frozen_parameters=self.lora is not None,
        )
        for copy in self._copies:
            copy.save(folder, self.rank.rank)
        if self.rank.rank == 0:
            sharding.note_ranks(folder, self.rank.world_size)
        for script in folder.rglob("*.py"):
            # DeepSpeed adds a conversion script to every checkpoint, but stored data must not contain code.
            script.unlink(missing_ok=True)

    def load_checkpoint(self, folder: Path, scratch: Path) -> None:
        """Load what `save_checkpoint` saved. This is a collective operation.

        Args:
            folder: A verified folder, which is not changed. On each host it has the files that its ranks
                need.
            scratch: An unused path for a conversion, which is made once on each host and removed.

        Raises:
            CorruptArtifact: There is no usable state (DeepSpeed alone would start from scratch), or a pickle
                has classes that are not on the list of `distributed.join`. None of them is called.
        """
        ranks = sharding.noted_ranks(folder)
        try:
            path, client = self._load_state(folder, scratch, ranks)
        except pickle.UnpicklingError as error:
            reason = " ".join(str(error).split())[:300]
            raise CorruptArtifact(
                f"The checkpoint {folder} holds what may run code and is not loaded; somebody changed it and"
                f" its manifest: {reason}"
            ) from error
        if path is None:
            raise CorruptArtifact(f"no DeepSpeed state in the checkpoint folder {folder.name}")
        counters = client[_COUNTERS]
        self.steps_done, self.skipped_steps = counters["steps_done"], counters["skipped_steps"]
        self._skipped_in_a_row = counters["skipped_in_a_row"]
        for copy in self._copies:
            copy.load(folder, self.rank.rank, ranks, self.rank.world_size)

    def _load_state(self, folder: Path, scratch: Path, ranks: int) -> tuple[str | None, dict[str, Any]]:
        """Load DeepSpeed's state, and convert it if another number of ranks saved it.

        Returns (path or None, client state).
        """
        if ranks == self.rank.world_size or not sharding.is_sharded(folder / _TAG):
            # With an adapter the checkpoint lacks the frozen weights, which a strict load needs.
            loaded = self.engine.load_checkpoint(str(folder), tag=_TAG, load_module_strict=self.lora is None)
        else:
            log.warning(
                "a checkpoint of %d ranks is converted for %d: the same training up to rounding",
                ranks,
                self.rank.world_size,
            )
            converts = sharding.is_first(scratch)
            if converts:
                sharding.convert(folder / _TAG, scratch / _TAG)
            dist.barrier()
            with sharding.loading_universal(self.engine):
                loaded = self.engine.load_checkpoint(str(scratch), tag=_TAG)
            dist.barrier()
            if converts:
                shutil.rmtree(scratch)
            dist.barrier()  # the next conversion may use the same path
        path, client = loaded
        return path, client

    @property
    def _copies(self) -> list[WeightCopy]:
        return [copy for copy in (self._average, self._best) if copy is not None]


def _adamw(module: nn.Module, config: OptimizerConfig) -> torch.optim.AdamW:
    groups = _decay_groups(module, config.weight_decay)
    return torch.optim.AdamW(groups, lr=config.learning_rate, betas=config.betas, eps=ADAM_EPS, fused=True)


def _decay_groups(module: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Return the parameter groups: matrices with weight decay, norms and biases without."""
    parameters = [p for p in module.parameters() if p.requires_grad]
    # By `shape`: under ZeRO-3 a parameter that was cut is an empty vector.
    groups = [
        {"params": [p for p in parameters if len(shape(p)) >= 2], "weight_decay": weight_decay},
        {"params": [p for p in parameters if len(shape(p)) < 2], "weight_decay": 0.0},
    ]
    # Adapters are matrices only, and DeepSpeed cannot flatten an empty group.
    return [group for group in groups if group["params"]]


def offload_states(engine: Any) -> None:
    """Move the states of a trained DeepSpeed engine to pinned host memory, until `reload_states`.

    DeepSpeed moves them itself, with these limits: under ZeRO-0 nothing; under ZeRO-3 the float32 weights
    only for its own FusedAdam, which is compiled on first use, so that they stay on the device here. The
    weights in the precision of the model stay under every stage, because a sync and a gather need them there.

        ZeRO       moved                                          stays
        1, 2       float32 weights, two moments, gradients        weights
        3          two moments, gradients                         shards of weights, float32 weights
    """
    from deepspeed.runtime.zero.offload_config import OffloadStateTypeEnum as State
    from deepspeed.runtime.zero.offload_states import offload_optimizer_states

    include = [State.lp_grads, State.contiguous_grad_buffer]
    if engine.zero_optimization_partition_weights():
        offload_optimizer_states(engine.optimizer.optimizer, "cpu", pin_memory=True)
    else:
        include += [State.hp_params, State.optim_states]
    engine.offload_states(include=include)


def reload_states(engine: Any) -> None:
    """Move the states back to the device."""
    from deepspeed.accelerator import get_accelerator
    from deepspeed.runtime.zero.offload_states import reload_optimizer_states

    engine.reload_states()
    if engine.zero_optimization_partition_weights():
        device = get_accelerator().current_device_name()
        # Without `non_blocking`, so it returns when all copies have ended.
        reload_optimizer_states(engine.optimizer.optimizer, device)


# -- copies of the trained weights; under ZeRO-3 each rank copies its own shards --


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
            # A copy also where device and type are the same. Otherwise it would be the parameter itself.
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
