"""The training of `sft`, `reward`, `judge` and `dpo`.

    train_on_ranks            starts the ranks of a stage; on each of them:
      StageModel              adds the adapter and starts the engine
        train_epochs          epochs of shuffled batches, with evaluations and checkpoints
        .save                 writes the model and the adapter
        .close_and_evaluate   measures the model that was saved

A stage provides the model and the rows. Its `Objective` has the loss and the measures. The end of this file
is about the pairs of `reward`, `judge` and `dpo`.
"""

from __future__ import annotations

import math
import time
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch

from rlhf_core.config import PipelineConfig
from rlhf_core.config.address import base_of
from rlhf_core.config.training import DPOConfig, EarlyStopConfig, RewardConfig, SFTConfig, TrainingSection
from rlhf_core.data.card import sources_of_models
from rlhf_core.data.dataset import Rows, open_pairs, read_pair_groups
from rlhf_core.data.hub import fetch_model
from rlhf_core.data.sources import model_digest, require_unchanged
from rlhf_core.data.tokenizer import require_same_tokens
from rlhf_core.engines import checkpointing
from rlhf_core.engines.checkpointing import log_skipped_batch
from rlhf_core.engines.deepspeed import TrainingEngine
from rlhf_core.engines.distributed import Rank, all_ranks_pack, resolve_device
from rlhf_core.engines.sharding import shards_of
from rlhf_core.errors import DataError
from rlhf_core.evaluation.statistics import group_of, win_rate
from rlhf_core.models.adapters import adapter_off, add_adapter
from rlhf_core.models.batching import plan_ranks
from rlhf_core.models.check import further_length_problems
from rlhf_core.pipeline import StageName
from rlhf_core.seeds import derive_seed, epoch_batch
from rlhf_core.system.failpoints import failpoint
from rlhf_core.types import PairExample, StageContext, finite

T = TypeVar("T")
Row = TypeVar("Row")
Settings = TypeVar("Settings", SFTConfig, RewardConfig, DPOConfig)

Metrics = dict[str, float]


@dataclass(frozen=True)
class Objective(Generic[Row, Settings]):
    """What a stage computes with its rows. `Settings` is the section of the stage."""

    train_step: Callable[[TrainingEngine, Sequence[Row], Settings, int, int], Metrics]
    """Makes one optimizer step with a batch, the total number of steps and the padding token."""
    evaluate: Callable[[TrainingEngine, Sequence[Row], Settings, int], Metrics]
    """Returns metrics of the held-out rows, with the padding token. One of them is `eval/loss`."""
    count_tokens: Callable[[Row], int]
    """Returns the number of tokens of a row."""
    table_row: Callable[[Row], dict[str, Any]]
    """Converts a row for the table of a skipped batch."""


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


def fetch_base(config: PipelineConfig, context: StageContext, stage: StageName) -> None:
    """Download the base model that a stage starts from, if it is one of the hub.

    Raises DataError if it is not that of the run. On a cluster, `Nodes.join` does this on each host that has
    ranks.
    """
    base = base_of(config, stage)
    if base is None or context.nodes is not None:
        return
    # Before the ranks start: a download, and reading all files, can take longer than their time limits.
    if base.is_hub:
        fetch_model(base.path, base.revision)
    digest = model_digest(base.path, base.revision, config.run.home)
    require_unchanged({base.digest_name: digest}, context.sources, config)


def require_usable(config: PipelineConfig, context: StageContext, stage: StageName) -> None:
    """Raise ModelError or ConfigError if the judge's base model or the teacher cannot read the data: it has
    other tokens than the policy, or too few positions.
    """
    base = base_of(config, stage)
    if base is None:
        return
    # Responses and pairs are stored as tokens, so another vocabulary would be other texts to this model.
    require_same_tokens(base, context.data / "tokenizer")
    for problem in further_length_problems(config, base):
        raise problem


@dataclass(frozen=True)
class Folders:
    """The folders of an attempt, for its ranks, which have no context. They are the same on all hosts."""

    inputs: Mapping[str, Path]
    work: Path
    out: Path

    @classmethod
    def of(cls, context: StageContext) -> Folders:
        """Return those of a stage."""
        return cls(context.inputs, context.scratch, context.output)

    @property
    def data(self) -> Path:
        """Folder of the data artifact."""
        return self.inputs["data"]

    @property
    def sft_model(self) -> Path:
        """The model of the stage `sft`."""
        return self.inputs["sft"] / "model"


def train_on_ranks(
    train: Callable[..., dict[str, float]],
    settings: TrainingSection,
    config: PipelineConfig,
    context: StageContext,
    *args: Any,
) -> dict[str, float]:
    """Call `train(rank, config, folders, *args, context)` on every rank, and return the metrics of rank 0.
    `context` is None on the other ranks.

    Args:
        train: The training of a stage. It must be picklable.
        settings: Settings of the stage: ranks and threads.
        config: The configuration.
        context: Context of the stage.
        args: Further arguments of `train`. They must be picklable.
    """
    from rlhf_core.cluster.ranks import run_ranks

    metrics: dict[str, float] = run_ranks(
        train_with_threads,
        settings.deepspeed.ranks,
        resolve_device(config.run.device),
        train,
        settings.threads,
        config,
        Folders.of(context),
        *args,
        context=context,
        run=config.run,
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


def load_to_train(
    load: Callable[..., T],
    folder: Path | str,
    rank: Rank,
    config: PipelineConfig,
    settings: TrainingSection,
    revision: str | None = None,
    **options: Any,
) -> T:
    """Return the model that a stage starts from. It has no adapter yet.

    Args:
        load: `load_policy` or `load_score_model`.
        folder: Folder of the model, or its name on the hub.
        rank: This rank.
        config: The configuration.
        settings: Settings of the stage.
        revision: Commit of a model of the hub.
        options: Further arguments of `load`.
    """
    own = {
        "revision": revision,
        "quantize": settings.lora and settings.lora.quantize,
        "shards": shards_of(settings.deepspeed),
    }
    return load_whole(load, folder, rank.torch_device, config, settings, **own, **options)


def load_whole(
    load: Callable[..., T],
    folder: Path | str,
    device: str,
    config: PipelineConfig,
    settings: TrainingSection,
    **options: Any,
) -> T:
    """Return a model on one device, as later stages load it.

    Args:
        load: `load_policy` or `load_score_model`.
        folder: Folder of the model.
        device: The device.
        config: The configuration.
        settings: Settings of the stage.
        options: Further arguments of `load`.
    """
    return load(
        folder,
        dtype=settings.deepspeed.dtype,
        attention=config.model.attention,
        device=device,
        pack=settings.pack,
        **options,
    )


class StageModel(Generic[Settings]):
    """The model that a stage trains, on each rank. All methods are collective operations.

    The caller keeps no reference to the model, so that `close` frees its memory.

    Args:
        rank: This rank.
        model: The loaded `Policy` or `ScoreModel`. It gets the adapter of the settings; seed torch first.
        settings: Settings of the stage.
        section: Section of the configuration with the settings, for the log.
        context: The stage's context on rank 0, otherwise None.
    """

    def __init__(
        self, rank: Rank, model: Any, settings: Settings, section: str, context: StageContext | None
    ) -> None:
        # Each rank plans the micro-batches of all ranks, so all must use the same layout.
        pack = all_ranks_pack(model, settings.pack, rank, f"{section}.pack")
        self.settings: Settings = settings.model_copy(update={"pack": pack})
        self.loaded = add_adapter(model, settings.lora)
        self._context = context
        self.engine = TrainingEngine(
            model, settings.deepspeed, settings.optimizer, rank, keep_best=settings.early_stop is not None
        )

    def save(
        self,
        folder: Path,
        adapter: Path,
        base: str | None,
        revision: str | None = None,
        *,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Save the model, with the adapter merged into it, and the adapter.

        Args:
            folder: Folder of the model.
            adapter: Folder of the adapter, if there is one.
            base, revision: The model that the adapter belongs to; None: that of the stage `sft`.
            dtype: Precision of the merge, if it is not that of the model.
        """
        self.engine.save_model(folder, self.loaded.save, dtype=dtype)
        if base is None and self._context is not None:
            base = f"{self._context.artifact_name('sft')}/model"
        # Rank 0 alone writes the name, and it alone has the context.
        self.engine.save_adapter(adapter, base or "", revision)

    def close_and_evaluate(self, merged: Callable[[], T], from_files: Callable[[], T]) -> T | None:
        """Free the model, and return the measures of the saved one if they differ: later stages load the
        merge of weights and adapter, rounded to `dtype`.

        Call it after `save`, which merges by itself and would add the adapter a second time.

        Args:
            merged: Measures the engine, whose weights are those of the saved model.
            from_files: Measures the saved files on one device. Quantized weights cannot take an adapter.

        Returns:
            None without an adapter, and for quantized weights on all ranks but 0.
        """
        lora, found = self.settings.lora, None
        # Without an adapter the engine has exactly what was saved.
        if lora is not None and lora.quantize is None:
            self.engine.merge_adapter()
            with adapter_off(self.engine.module):
                found = merged()
        self.close()
        if lora is not None and lora.quantize is not None and self._context is not None:
            found = from_files()
        return found

    def close(self) -> None:
        """Free the memory of the model: rank 0 can go on with another copy."""
        del self.loaded
        self.engine.close()


def rows_of_step(count: int, batch_size: int, seed: int, step: int) -> tuple[int, ...]:
    """Return the rows of step `step`, from 0, of a training with `count` rows."""
    epoch, index = divmod(step, math.ceil(count / batch_size))
    return epoch_batch(count, batch_size, seed, epoch, index)


def train_epochs(
    engine: TrainingEngine,
    train: Sequence[Row],
    held_out: Sequence[Row],
    config: Settings,
    training: Training,
    objective: Objective[Row, Settings],
) -> Trained:
    """Train to the end, from the last checkpoint if there is one.

    With `early_stop`, the engine has its best weights at the end. It must have been created with `keep_best`.

    Args:
        engine: The model with its optimizer.
        train: The training set.
        held_out: The set that is evaluated on. The finite metrics are logged.
        config: Settings of the stage.
        training: Stage, seed, padding, folder and context.
        objective: The loss and the measures.
    """
    context = training.context
    early_stop = config.early_stop
    per_epoch = math.ceil(len(train) / config.batch_size)
    total = per_epoch * config.epochs
    state = checkpointing.restore(engine, context) or {"step": 0, "tokens": 0, "seconds": 0.0}
    step, tokens, seconds = int(state["step"]), int(state["tokens"]), float(state["seconds"])
    # Part of the checkpoint, so that an attempt that continues does not wait for `patience` from the
    # beginning.
    best = EarlyStopping(**state.get("best", {}))
    # The reward model is evaluated at its end, and where early stopping needs it.
    every = None if isinstance(config, RewardConfig) else config.eval_every
    if early_stop is not None:
        every = early_stop.every
    if context is not None:  # a stop request waits for the next `after_step`
        context.stop.defer()
    while step < total and not best.is_final(early_stop):
        started = time.monotonic()
        # From the step alone, so that a continued training has the batches of an uninterrupted one.
        batch = [train[i] for i in rows_of_step(len(train), config.batch_size, training.seed, step)]
        with log_skipped_batch(engine, context, step + 1, batch, objective.table_row):
            metrics = objective.train_step(engine, batch, config, total, training.pad_id)
        failpoint(f"{training.stage}.step")
        step += 1
        tokens += sum(map(objective.count_tokens, batch))
        # Evaluations and checkpoints do not count.
        seconds += time.monotonic() - started
        evaluation = {}
        if step == total:
            # With early stop the last weights are a candidate too. Without it, the caller evaluates them.
            is_due = early_stop is not None
        else:
            is_due = every is not None and step % every == 0
        if is_due:
            evaluation = objective.evaluate(engine, held_out, config, training.pad_id)
            # The loss is a sum over all ranks, so every rank decides the same here and in `is_final`.
            if early_stop is not None and best.add(step, evaluation["eval/loss"]):
                engine.snapshot_best()
            # After `add`, which counts an evaluation whose loss is not finite.
            evaluation = finite(evaluation)
        if context is not None:
            if step < total and not best.is_final(early_stop):  # at the end those of the best are logged
                metrics |= evaluation
            metrics["train/tokens_per_s"] = tokens / seconds
            context.metrics.log_metrics(metrics, step)
            shown = {}
            for name in ("loss", "accuracy"):
                if f"train/{name}" in metrics:
                    shown[name] = metrics[f"train/{name}"]
            context.progress(training.stage, step, total, "steps", **shown)
        checkpointing.after_step(
            engine, context, training.work, step, every=config.checkpoint_every, total=total,
            state={"tokens": tokens, "seconds": seconds, "best": asdict(best)},
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
    return finite(
        {
            **measured,
            "train/grad_norm": norm,
            # All groups of parameters have the same one; they differ in their weight decay.
            "train/learning_rate": engine.optimizer.param_groups[0]["lr"],
            "train/skipped_steps": float(engine.skipped_steps),
        }
    )


# -- pairs: those of a stage, and how ranks share them --


def training_pairs(config: PipelineConfig, data: Path, stage: StageName, work: Path) -> Sequence[PairExample]:
    """Return the pairs that train the model of `stage`, `reward`, `judge` or `dpo`.

    With `reward.judge`, the pairs of the judge are disjoint from those of the other stages: all pairs of a
    group train the same models, for every seed. Only the other stages have the pairs that a model has
    labelled (`labelled_by` of their source). The held-out pairs are the same for all. `work` is a folder of
    this host, as in `open_pairs`. Raises DataError if nothing is left.
    """
    pairs = open_pairs(data, "train", work)
    judge = config.reward.judge
    if judge is None:
        return pairs
    labelled = sources_of_models(data)
    # 8 bytes for each pair: a list of Python integers would be several times as large, on every rank.
    chosen, of_people = array("q"), False
    for index, (source, _, group) in enumerate(read_pair_groups(data, "train")):
        of_judge = source not in labelled and _is_of_judge(group, judge.fraction)
        of_people |= source not in labelled
        if of_judge == (stage == "judge"):
            chosen.append(index)
    if not chosen and stage == "judge" and not of_people:
        raise DataError(
            "reward.judge needs pairs that no model has labelled, but all sources have `labelled_by`; add"
            " pairs of people, or leave reward.judge out"
        )
    if not chosen:
        raise DataError(
            f"reward.judge.fraction={judge.fraction:g} leaves none of the {len(pairs)} pairs for the stage"
            f" {stage}; add pairs, or leave reward.judge out"
        )
    # By their index: a list of the pairs would be a copy in every process.
    return Rows(len(chosen), lambda index: pairs[chosen[index]])


def _is_of_judge(group: str, fraction: float) -> bool:
    # A seed has 63 bits, so the quotient is uniform in [0, 1].
    return derive_seed(0, "judge", group) / 2.0**63 < fraction


def micro_batches(
    rank: Rank, pairs: Sequence[PairExample], config: RewardConfig | DPOConfig
) -> list[list[int]]:
    """Return the micro-batches of `rank`, as indices of `pairs`. Both responses of a pair are in the same
    one.
    """
    if config.packs:
        lengths = list(map(pair_tokens, pairs))
    else:
        # Padded: two rows for each pair, both as wide as the longer of the two sequences.
        lengths = [2 * (len(p.prompt_ids) + max(len(p.chosen_ids), len(p.rejected_ids))) for p in pairs]
    return own_micro_batches(rank, lengths, config)


def own_micro_batches(
    rank: Rank, lengths: Sequence[int], config: SFTConfig | RewardConfig | DPOConfig
) -> list[list[int]]:
    """Return the micro-batches of `rank`, as indices of sequences, or of what else has these lengths."""
    return plan_ranks(lengths, rank.world_size, config.micro_batch_tokens, pack=config.packs)[rank.rank]


def pair_tokens(pair: PairExample) -> int:
    """Return the tokens of both sequences of a pair."""
    return 2 * len(pair.prompt_ids) + len(pair.chosen_ids) + len(pair.rejected_ids)


def is_correct(gap_B: torch.Tensor) -> torch.Tensor:
    """Return 1 where the chosen response has the higher score, one half where both have the same."""
    return torch.heaviside(gap_B, torch.full_like(gap_B, 0.5))


def accuracy_interval(gap_P: torch.Tensor, pairs: Sequence[PairExample]) -> dict[str, float]:
    """Return the bounds `accuracy_low` and `accuracy_high` (95 %, Wilson, over groups of prompts) of the
    share of pairs whose chosen response has the higher score.

    `gap_P` are the scores of the chosen responses minus those of the rejected ones. Without pairs, both are
    NaN.
    """
    if not pairs:
        return {"accuracy_low": math.nan, "accuracy_high": math.nan}
    correct = is_correct(gap_P).tolist()
    found = win_rate(correct, confidence=0.95, groups=list(map(group_of, pairs)))
    return {"accuracy_low": found.low, "accuracy_high": found.high}


def table_row(pair: PairExample) -> dict[str, Any]:
    """Return a pair as a row of the table of a skipped batch."""
    return {
        "prompt": pair.prompt,
        "source": pair.source,
        "margin": pair.margin,
        "prompt_ids": str(list(pair.prompt_ids)),
        "chosen_ids": str(list(pair.chosen_ids)),
        "rejected_ids": str(list(pair.rejected_ids)),
    }
