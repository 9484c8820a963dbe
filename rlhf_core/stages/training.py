"""The training of `sft`, `reward` and `dpo`: the start of the ranks, and the loop with epochs of shuffled
batches, evaluations and checkpoints.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch

from rlhf_core.config import PipelineConfig
from rlhf_core.config.limits import never_ends
from rlhf_core.config.training import DPOConfig, EarlyStopConfig, RewardConfig, SFTConfig
from rlhf_core.engines import checkpointing
from rlhf_core.engines.checkpointing import log_skipped_batch
from rlhf_core.engines.deepspeed import TrainingEngine
from rlhf_core.pipeline import StageName
from rlhf_core.seeds import epoch_batches
from rlhf_core.system.failpoints import failpoint
from rlhf_core.types import StageContext

log = logging.getLogger(__name__)

T = TypeVar("T")


@dataclass(frozen=True)
class Training:
    """What a training needs besides its model, data and settings."""

    stage: StageName
    """The stage, for progress and failpoints."""
    seed: int
    """Determines the order of the rows."""
    pad_id: int
    """The token that fills rows."""
    work: Path
    """A folder for checkpoints that are not committed yet."""
    context: StageContext | None
    """The stage's context on rank 0, otherwise None."""


@dataclass(frozen=True)
class Trained:
    """A training at its end."""

    steps: int
    """Optimizer steps, also those of earlier attempts."""
    best_step: int | None
    """The step whose weights the engine has with `early_stop`; None without it."""
    tokens_per_s: float

    @property
    def metrics(self) -> dict[str, float]:
        """`tokens_per_s`, and `best_step` with `early_stop`."""
        metrics = {"tokens_per_s": self.tokens_per_s}
        return metrics if self.best_step is None else {**metrics, "best_step": float(self.best_step)}


@dataclass
class EarlyStopping:
    """The evaluation with the lowest held-out loss; the earliest of equal ones."""

    step: int = 0
    """Optimizer steps before it; 0 for none yet."""
    loss: float | None = None
    evaluations_since: int = 0
    """All of them without a lower loss."""

    def add(self, step: int, loss: float) -> bool:
        """Return True if this is the best so far; a loss that is not finite never is."""
        better = math.isfinite(loss) and (self.loss is None or loss < self.loss)
        if better:
            self.step, self.loss, self.evaluations_since = step, loss, 0
        else:
            self.evaluations_since += 1
        return better

    def is_final(self, config: EarlyStopConfig | None) -> bool:
        """Return whether early stopping ends the training: no better evaluation for `patience` times."""
        if config is None or config.patience is None:
            return False
        return self.evaluations_since >= config.patience


def train_on_ranks(
    train: Callable[..., dict[str, float]],
    settings: SFTConfig | RewardConfig | DPOConfig,
    config: PipelineConfig,
    context: StageContext,
    *args: Any,
) -> dict[str, float]:
    """Call `train(rank, config, *args, context)` on every rank, and return the metrics of rank 0. `context`
    is None on the other ranks.

    Args:
        train: The training of a stage. It must be picklable.
        settings: Settings of the stage: ranks and threads.
        config: The configuration.
        context: Context of the stage.
        args: Further arguments of `train`. They must be picklable.
    """
    from rlhf_core.cluster.ranks import run_ranks
    from rlhf_core.engines.distributed import resolve_device

    # The stages that learn from pairs start from the SFT model.
    inputs = {} if context.lineage is None else context.lineage.inputs
    if "sft" in inputs:
        problem = never_ends(inputs["sft"].metrics.get("eos_rate", 1.0), "the SFT model")
        if problem is not None:
            log.warning("%s", problem)
    metrics: dict[str, float] = run_ranks(
        train_with_threads,
        settings.deepspeed.ranks,
        resolve_device(config.run.device),
        train,
        settings.threads,
        config,
        *args,
        context=context,
        config=config,
        monitor=context.monitor,
        neighbours=settings.deepspeed.hpz,
    )
    return metrics


def train_with_threads(rank: Any, train: Callable[..., T], threads: int | None, *args: Any) -> T:
    """Return `train(rank, *args)`, computed with this number of threads; None for that of the process.

    One rank runs in the process of the stage, which continues with its own number.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(threads or before)
    try:
        return train(rank, *args)
    finally:
        torch.set_num_threads(before)


def train_epochs(
    engine: TrainingEngine,
    rows: Sequence[T],
    config: SFTConfig | RewardConfig | DPOConfig,
    training: Training,
    *,
    make_step: Callable[[Sequence[T], int], dict[str, float]],
    evaluate: Callable[[], dict[str, float]],
    evaluate_every: int | None,
    count_tokens: Callable[[T], int],
    table_row: Callable[[T], dict[str, Any]],
    early_stop: EarlyStopConfig | None = None,
) -> Trained:
    """Train to the end, from the last checkpoint if there is one.

    With `early_stop`, the engine has its best weights at the end. It must have been created with `keep_best`.

    Args:
        engine: The model with its optimizer.
        rows: The training set.
        config: Settings of the stage.
        training: Stage, seed, folder and context.
        make_step: Makes one optimizer step with a batch and the total number of steps. Returns its metrics.
        evaluate: Returns metrics of the held-out set with `eval/loss`. The finite ones are logged.
        evaluate_every: Optimizer steps between evaluations, if there is no `early_stop`; None for no
            evaluation. The caller evaluates the weights at the end.
        count_tokens: Returns the number of tokens of a row.
        table_row: Converts a row for the table of a skipped batch.
        early_stop: When the training ends early; None for the last weights of all epochs.
    """
    context = training.context
    per_epoch = math.ceil(len(rows) / config.batch_size)
    total = per_epoch * config.epochs
    state = checkpointing.restore(engine, context) or {"step": 0, "tokens": 0, "seconds": 0.0}
    step, tokens, seconds = int(state["step"]), int(state["tokens"]), float(state["seconds"])
    best = EarlyStopping(**state.get("best", {}))
    every = evaluate_every if early_stop is None else early_stop.every
    if context is not None:  # a stop request waits for the next `after_step`
        context.stop.defer()
    while step < total and not best.is_final(early_stop):
        started = time.monotonic()
        epoch, index = divmod(step, per_epoch)
        batches = epoch_batches(len(rows), config.batch_size, training.seed, epoch)
        batch = [rows[i] for i in batches[index]]
        with log_skipped_batch(engine, context, step + 1, batch, table_row):
            metrics = make_step(batch, total)
        failpoint(f"{training.stage}.step")
        step += 1
        tokens += sum(map(count_tokens, batch))
        # Evaluations and checkpoints do not count.
        seconds += time.monotonic() - started
        evaluation = {}
        if step == total:
            # With early stop the last weights are a candidate too. Without it, the caller evaluates them.
            is_due = early_stop is not None
        else:
            is_due = every is not None and step % every == 0
        if is_due:
            evaluation = evaluate()
            # The loss is a sum over all ranks, so every rank decides the same here and in `is_final`.
            if early_stop is not None and best.add(step, evaluation["eval/loss"]):
                engine.snapshot_best()
            # After `add`, which counts an evaluation whose loss is not finite.
            evaluation = {name: value for name, value in evaluation.items() if math.isfinite(value)}
        if context is not None:
            if step < total and not best.is_final(early_stop):  # at the end those of the best are logged
                metrics |= evaluation
            metrics["train/tokens_per_s"] = tokens / seconds
            context.metrics.log_metrics(metrics, step)
            shown = {
                name: metrics[f"train/{name}"] for name in ("loss", "accuracy") if f"train/{name}" in metrics
            }
            context.progress(training.stage, step, total, "steps", **shown)
        checkpointing.after_step(
            engine, context, training.work, step, every=config.checkpoint_every, total=total,
            state={"tokens": tokens, "seconds": seconds, "best": asdict(best)},
            score=-evaluation["eval/loss"] if "eval/loss" in evaluation else None,
        )  # fmt: skip
    # 0: no early stop, or no finite loss. `step`: the engine has the best weights already.
    if 0 < best.step < step:
        engine.restore_best()
    best_step = None if early_stop is None else best.step or step
    return Trained(step, best_step, tokens / max(seconds, 1e-9))


def step_metrics(engine: TrainingEngine, norm: float, measured: Mapping[str, float]) -> dict[str, float]:
    """Return the finite metrics of the optimizer step that `engine` has just made.

    Args:
        engine: Its learning rate and its number of skipped steps are added.
        norm: Norm of the gradient.
        measured: The metrics of the stage.
    """
    metrics = {
        **measured,
        "train/grad_norm": norm,
        "train/learning_rate": engine.optimizer.param_groups[0]["lr"],
        "train/skipped_steps": float(engine.skipped_steps),
    }
    return {name: value for name, value in metrics.items() if math.isfinite(value)}
