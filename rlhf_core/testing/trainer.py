"""A training engine whose model is scripted, and a process group of one rank.

from rlhf_core.testing.trainer import ScriptedTrainer, single_rank

context = stage_context(tmp_path)
trainer = ScriptedTrainer(forward=lambda batch: TokenOutputs(-batch.labels_N / 10.0, None))
with single_rank():
    metrics = train_sft(trainer, rows, held_out, config, Training("sft", 0, 0, tmp_path, context))
assert trainer.steps_done == 3

with scripted_trainers() as trainers:
    sft.run(config, context)
assert trainers[0].steps_done == 3
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from typing_extensions import override

from rlhf_core.config.training import DeepSpeedConfig, OptimizerConfig
from rlhf_core.engines.deepspeed import TrainingEngine, learning_rate
from rlhf_core.engines.distributed import Rank

_FILE = "scripted_trainer.json"


class ScriptedTrainer(TrainingEngine):
    """An engine that counts steps and changes no weights. DeepSpeed is not started.

    It has the parameters of `TrainingEngine`, so that it can also replace that class. What it saves as a
    model or adapter are the weights of `module`.

    Args:
        module: The model. Only `save_model` and `save_adapter` need a real one.
        deepspeed_config: Not used.
        optimizer: Settings of the learning rate.
        rank: Default: the only rank.
        ema_decay: Not used.
        keep_best: Not used.
        forward: Called in place of the model.
    """

    def __init__(
        self,
        module: nn.Module | None = None,
        deepspeed_config: DeepSpeedConfig | None = None,
        optimizer: OptimizerConfig | None = None,
        rank: Rank | None = None,
        *,
        ema_decay: float | None = None,
        keep_best: bool = False,
        forward: Callable[..., Any] | None = None,
    ) -> None:
        # Not the constructor of the base class, which starts DeepSpeed.
        self._module = module if module is not None else nn.Module()
        self._forward = forward
        self.rank = rank or Rank()
        self._schedule = optimizer or OptimizerConfig()
        self.optimizer_config = self._schedule
        self.optimizer = SimpleNamespace(param_groups=[{"lr": self._schedule.learning_rate}])
        self.lora = getattr(module, "lora", None)
        self.zero_stage = 0
        self.steps_done = 0
        self.skipped_steps = 0
        # Methods of the base class that are not replaced read these two.
        self._average = None
        self._best = None
        self.losses: list[float] = []
        """Sum of the micro-batch losses of each step."""
        self.best_step: int | None = None
        """Step of the last `snapshot_best`."""
        self.restored_best = False
        self.is_closed = False

    @property
    @override
    def module(self) -> Any:
        return self._module

    @override
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._forward is not None:
            return self._forward(*args, **kwargs)
        return self._module(*args, **kwargs)

    @override
    def train_step(self, micro_losses: Iterator[torch.Tensor], total_steps: int) -> float:
        """Add up the losses. The gradient norm is 1, or NaN if the sum is not finite."""
        self.losses.append(sum(float(loss.detach()) for loss in micro_losses))
        rate = learning_rate(self._schedule, self.steps_done, total_steps)
        self.optimizer.param_groups[0]["lr"] = rate
        self.steps_done += 1
        if self.grad_nonfinite:
            self.skipped_steps += 1
            return math.nan
        return 1.0

    @property
    @override
    def grad_nonfinite(self) -> bool:
        return bool(self.losses) and not math.isfinite(self.losses[-1])

    @override
    def snapshot_best(self) -> None:
        self.best_step = self.steps_done

    @override
    def restore_best(self) -> None:
        self.restored_best = True

    @override
    def restore_average(self) -> None:
        """Do nothing: the weights never change, so they are their own average."""

    @override
    def save_checkpoint(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        state = {"steps_done": self.steps_done, "skipped_steps": self.skipped_steps}
        (folder / _FILE).write_text(json.dumps(state))

    @override
    def load_checkpoint(self, folder: Path, scratch: Path) -> None:
        state = json.loads((folder / _FILE).read_text())
        self.steps_done, self.skipped_steps = state["steps_done"], state["skipped_steps"]

    @override
    def close(self) -> None:
        self.is_closed = True

    @override
    def _gathered(self, parameters: list[nn.Parameter], *, to_change: bool = False) -> Any:
        return nullcontext()  # every parameter is whole, because nothing is sharded


@contextmanager
def scripted_trainers(kind: type[ScriptedTrainer] = ScriptedTrainer) -> Iterator[list[ScriptedTrainer]]:
    """Replace the DeepSpeed engine of the stages `sft`, `reward`, `judge` and `dpo`.

    Yields the trainers in the order in which they are started.

    Args:
        kind: Class of the trainers.
    """
    started: list[ScriptedTrainer] = []

    def start(*args: Any, **options: Any) -> ScriptedTrainer:
        started.append(kind(*args, **options))
        return started[-1]

    # In the module that uses it, which imports the class when it is loaded itself.
    with mock.patch("rlhf_core.stages.training.TrainingEngine", start):
        yield started


@contextmanager
def single_rank() -> Iterator[None]:
    """Start a process group of this process alone, for loops that call collective operations."""
    # In this process, so that no port is needed.
    store = dist.HashStore()  # type: ignore[attr-defined]  # public, but not in the list of exports
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()
