"""Stages `reward` and `judge`: SFT model + pairs -> `model/`, a sequence classifier with one label, and its
score statistics; `adapter/` with `reward.lora`. With `reward.ensemble` also the other members, see
`models.scoring`.

The loss is Bradley-Terry on pairs; both responses of a pair are in the same forward pass. The loss of one
optimizer step is the mean over all its pairs, over every rank and micro-batch. With `early_stop`, the
held-out loss decides when the training ends and which weights are its result.
"""

from __future__ import annotations

import json
import logging
import math
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from rlhf_core.algo.losses import reward_model_loss
from rlhf_core.config import PipelineConfig
from rlhf_core.config.address import base_of
from rlhf_core.config.training import EnsembleConfig, RewardConfig
from rlhf_core.data.dataset import load_pairs, require_margins
from rlhf_core.data.tokenizer import load_decoder
from rlhf_core.engines.checkpointing import new_checkpoint
from rlhf_core.engines.deepspeed import TrainingEngine
from rlhf_core.engines.distributed import wait_for_rank_zero
from rlhf_core.evaluation.scoring import exchange_pairs
from rlhf_core.models.batching import TokenSequence, collate, to_device
from rlhf_core.models.score import ScoreStatistics, load_score_model
from rlhf_core.models.scoring import (
    Batches,
    combined,
    deviations,
    member_folder,
    member_folders,
    save_ensemble,
    sequence_scores,
    single_process_batches,
)
from rlhf_core.pipeline import StageName
from rlhf_core.seeds import derive_seed
from rlhf_core.stages.gates import check_gate
from rlhf_core.stages.training import (
    Folders,
    Metrics,
    Objective,
    StageModel,
    Training,
    accuracy_interval,
    fetch_base,
    is_correct,
    load_to_train,
    load_whole,
    micro_batches,
    own_micro_batches,
    pair_tokens,
    require_usable,
    step_metrics,
    table_row,
    train_epochs,
    train_on_ranks,
    training_pairs,
)
from rlhf_core.storage.bundles import on_one_disk
from rlhf_core.system.files import write_json
from rlhf_core.system.heartbeat import heartbeat
from rlhf_core.types import (
    AnsweredPrompt,
    Checkpoints,
    MetricLogger,
    PairExample,
    PromptAndResponse,
    StageContext,
    StageResult,
    prefixed,
)

log = logging.getLogger(__name__)


# -- the members of an ensemble (`reward.ensemble`), trained one after the other --
#
# Each member is trained like a single reward model, with a view of the stage's context. In this view, the
# metrics of member n have the prefix `member_n/`, and its checkpoints have the steps after those of earlier
# members. A checkpoint also contains the output of the finished members, so a stage can continue from any
# checkpoint. The first checkpoint of a member contains nothing else.

_FOLDER, _OUTPUT, _RESULTS = "members", "output", "results.json"


@dataclass(frozen=True)
class Member:
    """What is known of a member at the end of its training."""

    metrics: Metrics
    scores: list[float]
    """(2P,) normalised scores of the held-out pairs, the chosen response of each pair first."""


def train_members(
    ensemble: EnsembleConfig,
    train: Callable[[int, StageContext | None], Member],
    check: Callable[[Metrics], None],
    *,
    held_out: Sequence[PairExample],
    steps: int,
    start_seconds: float,
    out: Path,
    work: Path,
    context: StageContext | None,
) -> Metrics:
    """Train all members, from the last checkpoint if there is one. This is a collective operation.

    Args:
        ensemble: Number of members, and how they are combined.
        train: Trains the member with this number, writes its files to `out`, and returns it.
        check: Raises for metrics that end the stage. It gets those of all members so far, on rank 0.
        held_out: The held-out pairs.
        steps: Optimizer steps of a member, at most.
        start_seconds: Limit for a member to load.
        out: Output folder of the stage.
        work: A folder for checkpoints that are not committed yet.
        context: The stage's context on rank 0, otherwise None.

    Returns:
        The metrics of the first member, those of the others as `member_1/...`, and `ensemble/accuracy`
        with its interval and `ensemble/std` of the combined score. Empty on all ranks but 0.
    """
    first, position, finished = _resume(steps, out, context)
    if finished.members:
        # An earlier attempt may have been killed before this check, or ended by it.
        check(finished.metrics())
    for number in range(first, ensemble.members):
        if context is None:
            heartbeat("wait for rank 0", math.inf)  # it commits, and may evaluate the member before alone
        wait_for_rank_zero(f"reward model {number}")
        heartbeat(f"load reward model {number}", start_seconds)
        member = train(number, _member_context(context, number, ensemble, steps, finished, position))
        position = None  # only the member that was interrupted has a checkpoint
        if context is None:
            continue
        finished.members.append(member)
        if number + 1 < ensemble.members:
            # Committed as step 0 of the next member: only the finished members. Before the check, so that an
            # attempt with a lower limit need not train this member again.
            following = _member_context(context, number + 1, ensemble, steps, finished, None)
            heartbeat("commit", math.inf)  # each request of an upload has its own timeout
            with new_checkpoint(following, work, 0, 0):
                pass
        check(finished.metrics())
    if context is None:
        return {}
    save_ensemble(out / "model", ensemble)
    combined_metrics = _ensemble_metrics(ensemble, finished.members, held_out)
    context.metrics.log_metrics(prefixed("eval/", combined_metrics), steps)
    return finished.metrics() | combined_metrics


def _ensemble_metrics(
    ensemble: EnsembleConfig, members: Sequence[Member], held_out: Sequence[PairExample]
) -> Metrics:
    """Return accuracy (ties count half) and mean standard deviation over the members, on held-out pairs."""
    by_member = [member.scores for member in members]
    scores_P2 = np.array(combined(ensemble, by_member)).reshape(-1, 2)
    gap_P = scores_P2[:, 0] - scores_P2[:, 1]
    bounds = accuracy_interval(torch.from_numpy(gap_P), held_out)
    return {
        "ensemble/accuracy": float(np.heaviside(gap_P, 0.5).mean()),
        **prefixed("ensemble/", bounds),
        "ensemble/std": float(np.mean(deviations(by_member))),
    }


@dataclass
class _Finished:
    """The members whose training has ended. On ranks other than 0 it stays empty."""

    out: Path
    members: list[Member]

    def metrics(self) -> Metrics:
        metrics = dict(self.members[0].metrics)
        for number, member in enumerate(self.members[1:], start=1):
            metrics |= prefixed(_prefix(number), member.metrics)
        return metrics

    def bytes_in(self, folder: Path) -> int:
        """Return the bytes that `save` writes, approximately. Links need none."""
        if on_one_disk(self.out, folder):
            return 0
        return sum(path.stat().st_size for path in self.out.rglob("*") if path.is_file())

    def save(self, folder: Path) -> None:
        # The files of a finished member are never written to again.
        shutil.copytree(self.out, folder / _OUTPUT, copy_function=_link_or_copy)
        results = [{"metrics": member.metrics, "scores": member.scores} for member in self.members]
        (folder / _RESULTS).write_text(json.dumps(results))

    def load(self, folder: Path) -> None:
        shutil.copytree(folder / _OUTPUT, self.out, dirs_exist_ok=True, copy_function=_link_or_copy)
        self.members = [Member(**result) for result in json.loads((folder / _RESULTS).read_text())]


def _link_or_copy(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:  # not on one disk, or the file system has no links
        shutil.copy2(source, target)


def _resume(
    steps: int, out: Path, context: StageContext | None
) -> tuple[int, tuple[int, Path] | None, _Finished]:
    """Return the member to continue with, its checkpoint if it has one, and the finished members."""
    finished = _Finished(out, [])
    found: list[Any] = [(0, None)]
    heartbeat("restore", math.inf)  # rank 0 downloads while the others wait
    if context is not None:
        latest = context.checkpoints.latest()
        if latest is not None:
            # A member has the steps 0 to `steps`, where 0 is the checkpoint that only has the members before
            # it.
            number, step = divmod(latest[0], steps + 1)
            if number:
                finished.load(latest[1] / _FOLDER)
            found = [(number, (step, latest[1]) if step else None)]
    # The broadcast has a time limit, and rank 0 may still download.
    wait_for_rank_zero("restored members")
    dist.broadcast_object_list(found, src=0)
    number, position = found[0]
    return number, position, finished


# -- the context of one member --


def _prefix(number: int) -> str:
    return f"member_{number}/" if number else ""


def _member_context(
    context: StageContext | None,
    number: int,
    ensemble: EnsembleConfig,
    steps: int,
    finished: _Finished,
    position: tuple[int, Path] | None,
) -> StageContext | None:
    """Return the stage's context as the member `number` sees it; None if `context` is None."""
    if context is None:
        return None
    report = context.progress

    def progress(task: str, done: int, total: int, unit: str, **metrics: float) -> None:
        report(task, number * total + done, ensemble.members * total, unit, **metrics)

    return replace(
        context,
        checkpoints=_MemberCheckpoints(context.checkpoints, number * (steps + 1), finished, position),
        metrics=_MemberMetrics(context.metrics, _prefix(number)),
        progress=progress,
    )


@dataclass(frozen=True)
class _MemberCheckpoints(Checkpoints):
    """The checkpoints of the stage, as one member sees them."""

    inner: Checkpoints
    offset: int
    """Step of the stage at which the member begins."""
    finished: _Finished
    position: tuple[int, Path] | None
    """Step and folder that the member continues from."""

    def latest(self) -> tuple[int, Path] | None:
        return self.position

    def prepare(
        self, step: int, folder: Path, size: int, unsharded: int | None = None, *, own: int = 0
    ) -> None:
        """Prepare a checkpoint.

        Args:
            step, folder, size, unsharded, own: See `Checkpoints.prepare`.
        """
        finished = self.finished.bytes_in(folder)
        if unsharded is not None:
            unsharded += finished
        self.inner.prepare(self.offset + step, folder, size + finished, unsharded, own=own)

    def save(self, step: int, folder: Path) -> None:
        if self.finished.members:
            self.finished.save(folder / _FOLDER)
        self.inner.save(self.offset + step, folder)


@dataclass(frozen=True)
class _MemberMetrics(MetricLogger):
    """The metrics of the stage, with a prefix for those of one member."""

    inner: MetricLogger
    prefix: str

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        self.inner.log_metrics(prefixed(self.prefix, metrics), step)

    def flush(self) -> None:
        self.inner.flush()

    def log_table(self, name: str, rows: list[dict[str, Any]]) -> None:
        self.inner.log_table(f"{self.prefix}{name}", rows)

    def log_figure(self, name: str, figure: Any) -> None:
        self.inner.log_figure(f"{self.prefix}{name}", figure)

    def log_answers(self, rows: list[AnsweredPrompt]) -> None:
        self.inner.log_answers(rows)

    def log_file(self, path: Path, folder: str = "") -> None:
        self.inner.log_file(path, f"{self.prefix}{folder}".rstrip("/"))


# -- the stages --

_INTERVAL = ("", "_low", "_high")
"""Suffixes of a mean and the bounds of its interval."""


def run(config: PipelineConfig, context: StageContext) -> StageResult:
    """Train over `reward.deepspeed.ranks` ranks; a model no better than `reward.min_accuracy` fails the
    stage.
    """
    return _run(config, context, "reward")


def run_judge(config: PipelineConfig, context: StageContext) -> StageResult:
    """Train the second reward model of `reward.judge` in the same way, from the other pairs and with another
    seed.
    """
    return _run(config, context, "judge")


def _run(config: PipelineConfig, context: StageContext, stage: StageName) -> StageResult:
    """Train the reward model of either stage, `reward` or `judge`."""
    fetch_base(config, context, stage)
    require_usable(config, context, stage)
    metrics = train_on_ranks(_train, _settings(config, stage), config, context, stage)
    return finish(config, context, stage, metrics)


def _settings(config: PipelineConfig, stage: StageName) -> RewardConfig:
    return config.reward.of_judge if stage == "judge" else config.reward


def finish(
    config: PipelineConfig, context: StageContext, stage: StageName, metrics: dict[str, float]
) -> StageResult:
    """Complete the folders of trained models, and return the result of the stage.

    Raises GateFailed if `metrics` are below the limit of the stage.
    """
    # Every member is a model folder of its own, which later stages load with its tokenizer.
    for folder in member_folders(context.output / "model"):
        shutil.copytree(context.data / "tokenizer", folder, dirs_exist_ok=True)
    # Before the gate, so that the metrics of a model that is refused can be read.
    context.metrics.flush()
    check_gate(config, stage, metrics)
    # Without exchanged prompts it is 0, which is below the bound of every model that has passed the gate.
    exchanged, low = metrics.get("accuracy_exchanged", 0.0), metrics["accuracy_low"]
    if exchanged >= low:
        log.warning(
            "held-out accuracy with exchanged prompts is %.3f, within the interval of that with the right"
            " ones (%.3f [%.3f, %.3f]): the pairs do not show that the model reads the prompt; train it with"
            " more pairs, or hold out more (data.eval_fraction)",
            exchanged,
            metrics["accuracy"],
            low,
            metrics["accuracy_high"],
        )
    return StageResult(metrics)


def _train(
    rank: Any, config: PipelineConfig, folders: Folders, stage: StageName, context: StageContext | None
) -> dict[str, float]:
    """Train the model, or all members of the ensemble."""
    reward = _settings(config, stage)
    train = training_pairs(config, folders.data, stage, folders.work)
    held_out = load_pairs(folders.data, "eval")
    if reward.margin == "field":
        require_margins(train, held_out)
    inputs = _Inputs(config, folders, stage, train, held_out)
    if reward.ensemble is None:
        return _train_member(rank, inputs, 0, context).metrics
    return train_members(
        reward.ensemble,
        lambda number, own: _train_member(rank, inputs, number, own),
        partial(check_gate, config, stage),
        held_out=held_out,
        steps=math.ceil(len(train) / reward.batch_size) * reward.epochs,
        start_seconds=config.run.timeouts.start,
        out=folders.out,
        work=folders.work,
        context=context,
    )


@dataclass(frozen=True)
class _Inputs:
    """What a model is trained with."""

    config: PipelineConfig
    folders: Folders
    stage: StageName
    train: Sequence[PairExample]
    held_out: Sequence[PairExample]

    def seed(self, number: int, *purpose: str) -> int:
        """Return a seed of the member with this number. Those of the first are the ones without ensemble."""
        member = (number,) if number else ()
        return derive_seed(self.config.run.seed, self.stage, *purpose, *member)


def _train_member(rank: Any, inputs: _Inputs, number: int, context: StageContext | None) -> Member:
    """Train, evaluate and save one model."""
    config, held_out, out = inputs.config, inputs.held_out, inputs.folders.out
    folder = member_folder(out / "model", number)
    base = base_of(config, inputs.stage)  # None: the SFT model
    path, revision = (base.path, base.revision) if base is not None else (None, None)
    settings = _settings(config, inputs.stage)
    torch.manual_seed(inputs.seed(number, "init"))  # of the score head and of adapters
    loaded = load_to_train(
        load_score_model, path or inputs.folders.sft_model, rank, config, settings, revision
    )
    model = StageModel(rank, loaded, settings, "reward", context)
    del loaded
    pad_id, engine, reward = load_decoder(inputs.folders.data).pad, model.engine, model.settings
    training = Training(inputs.stage, inputs.seed(number), pad_id, inputs.folders.work, context)
    train_metrics = train_epochs(engine, inputs.train, held_out, reward, training, OBJECTIVE).metrics
    # Both are measured in the same way, also after a merge, because `finish` compares them.
    sets = [held_out]
    if (exchanged := exchange_pairs(held_out)) is not None:
        sets.append(exchanged)
    found = [evaluate_reward(engine, pairs, reward, pad_id) for pairs in sets]
    evaluation, scores = found[0]
    # Before the model is saved, which writes them to its folder.
    statistics = model.loaded.statistics = ScoreStatistics.of(scores)
    model.save(folder, member_folder(out / "adapter", number), path, revision)
    steps_done = engine.steps_done
    as_saved = model.close_and_evaluate(
        lambda: [evaluate_sequences(engine, pairs, reward, pad_id) for pairs in sets],
        lambda: [evaluate_saved(config, folder, pairs, pad_id, rank.torch_device) for pairs in sets],
    )
    if as_saved is not None:
        # The reported numbers are those of the model that later stages load.
        found, trained_scores = as_saved, scores
        evaluation, scores = found[0]
        evaluation["eval/merge_gap"] = (scores - trained_scores).abs().mean().item()
        # Of the merged weights: PPO normalises their scores, not those of the training.
        statistics = ScoreStatistics.of(scores)
        if context is not None:
            statistics.save(folder)
    if exchanged is not None:
        of_exchanged, _ = found[1]
        for part in _INTERVAL:
            evaluation[f"eval/accuracy_exchanged{part}"] = of_exchanged[f"eval/accuracy{part}"]
    if context is not None:
        evaluation |= _examine(held_out, scores.numpy(), member_folder(out, number), context)
        context.metrics.log_metrics(evaluation, steps_done)
        context.metrics.log_table("reward_pairs", _table(inputs.folders.data, held_out, scores))
    metrics = _headline(evaluation, len(held_out), statistics) | train_metrics
    return Member(metrics, statistics.normalize(scores).flatten().tolist())


def _headline(evaluation: Metrics, pairs: int, statistics: ScoreStatistics) -> Metrics:
    """Return the headline metrics of a model from its evaluation on `pairs` held-out pairs."""
    headline: Metrics = {}
    for name in ("accuracy", "accuracy_exchanged"):
        if f"eval/{name}" in evaluation:
            headline |= {f"{name}{part}": evaluation[f"eval/{name}{part}"] for part in _INTERVAL}
    headline["margin"] = evaluation["eval/margin"]
    headline["eval_loss"] = evaluation["eval/loss"]
    headline["pairs"] = float(pairs)
    if "eval/calibration_error" in evaluation:
        headline["calibration_error"] = evaluation["eval/calibration_error"]
    return headline | {"score_mean": statistics.mean, "score_std": statistics.std}


def _examine(
    pairs: Sequence[PairExample], scores_P2: Any, out: Path, context: StageContext
) -> dict[str, float]:
    """Write `examination.json` and a plot, and return metrics: calibration, length bias, accuracy by source
    and length.
    """
    # Here, because only rank 0 draws.
    from rlhf_core.evaluation.plots import reliability
    from rlhf_core.evaluation.statistics import accuracy_by, accuracy_by_length, calibration, length_bias

    lengths = [(len(pair.chosen_ids), len(pair.rejected_ids)) for pair in pairs]
    found, bias = calibration(scores_P2), length_bias(scores_P2, lengths)
    by_source = accuracy_by([pair.source or "unnamed" for pair in pairs], scores_P2)
    out.mkdir(exist_ok=True)
    content = {
        "calibration": asdict(found),
        "length_bias": bias,
        "accuracy_by_source": by_source,
        "accuracy_by_length": accuracy_by_length(scores_P2, lengths),
    }
    write_json(out / "examination.json", content)
    context.metrics.log_file(out / "examination.json")
    context.metrics.log_figure("reliability", reliability(found))
    return {
        "eval/calibration_error": found.error,
        **prefixed("eval/length_", bias),
        **prefixed("eval/accuracy_by_source/", by_source),
    }


def _table(data: Path, pairs: Sequence[PairExample], scores: Any) -> list[dict[str, Any]]:
    """Return twenty held-out pairs with their raw scores, for the table of samples."""
    decode = load_decoder(data)
    rows = []
    for pair, (chosen, rejected) in list(zip(pairs, scores.tolist(), strict=True))[:20]:
        rows.append(
            {
                "prompt": pair.prompt,
                "chosen": decode(pair.chosen_ids),
                "rejected": decode(pair.rejected_ids),
                "score_chosen": chosen,
                "score_rejected": rejected,
            }
        )
    return rows


# -- the loop --


def train_step(
    engine: TrainingEngine, batch: Sequence[PairExample], config: RewardConfig, total: int, pad_id: int
) -> dict[str, float]:
    """Run one optimizer step and return its metrics. Each rank computes its share of `batch`.

    A tie counts half in `train/accuracy`. A step whose gradient is not finite is skipped and counted.

    Args:
        engine: The reward model with its optimizer.
        batch: The pairs of the step, the same on every rank.
        config: Settings of the stage.
        total: Number of steps of the whole training, for the schedule of the learning rate.
        pad_id: The token that fills rows.
    """
    sums = torch.zeros(3, dtype=torch.float64, device=engine.rank.torch_device)  # loss, correct pairs, margin

    def losses() -> Iterator[torch.Tensor]:
        for micro_batch in micro_batches(engine.rank, batch, config):
            pairs = [batch[i] for i in micro_batch]
            chosen, rejected = _forward(engine, pairs, config, pad_id)
            # This rank has no pair left. A loss of 0 with a gradient lets it take part in the collective
            # operations of the backward pass.
            if not micro_batch:
                yield 0.0 * chosen.sum()
                continue
            # `pair_loss` is the mean of the micro-batch. So weighted, the parts add up to that of the batch.
            loss = pair_loss(chosen, rejected, pairs, config) * (len(pairs) / len(batch))
            gap = (chosen - rejected).detach()
            sums.add_(torch.stack([loss.detach(), is_correct(gap).sum(), gap.sum()]).double())
            yield loss

    norm = engine.train_step(losses(), total)
    dist.all_reduce(sums)
    loss, correct, margin = sums.tolist()
    metrics = {
        "train/loss": loss,
        "train/accuracy": correct / len(batch),
        "train/margin": margin / len(batch),
    }
    return step_metrics(engine, norm, metrics)


@torch.no_grad()
def evaluate_reward(
    engine: TrainingEngine, held_out: Sequence[PairExample], config: RewardConfig, pad_id: int
) -> tuple[dict[str, float], torch.Tensor]:
    """Return held-out `eval/accuracy` (ties count half), `eval/margin` and `eval/loss`, and the raw scores
    (pairs, 2), chosen first. This is a collective operation.
    """
    engine.module.eval()
    scores = torch.zeros(len(held_out), 2, dtype=torch.float64)
    for micro_batch in micro_batches(engine.rank, held_out, config):
        heartbeat("evaluation")
        chosen, rejected = _forward(engine, [held_out[i] for i in micro_batch], config, pad_id)
        # Not strict: an empty micro-batch has the scores of its dummy token.
        for i, c, r in zip(micro_batch, chosen.tolist(), rejected.tolist(), strict=False):
            scores[i] = torch.tensor([c, r], dtype=torch.float64)
    # The pairs of other ranks have the score 0 here, so the sum has the scores of all.
    scores = scores.to(engine.rank.torch_device)
    dist.all_reduce(scores)
    scores = scores.cpu()
    engine.module.train()
    return _measures(scores, held_out, config), scores


def evaluate_sequences(
    engine: TrainingEngine, held_out: Sequence[PairExample], config: RewardConfig, pad_id: int
) -> tuple[dict[str, float], torch.Tensor]:
    """Evaluate as `evaluate_reward` does, but in micro-batches as in later stages: the responses of a pair
    can be in different forward passes. This is a collective operation.
    """
    engine.module.eval()
    rank, sequences = engine.rank, _sequences(held_out)
    lengths = [len(prompt) + len(response) for prompt, response in sequences]
    plan = own_micro_batches(rank, lengths, config)
    batches = Batches(sequences, plan, pad_id=pad_id, device=rank.torch_device, pack=config.packs)
    # Statistics with mean 0 and std 1 leave the scores raw. Sequences of other ranks have the score 0.
    own = sequence_scores(engine, ScoreStatistics(), batches)
    flat = torch.tensor(own, dtype=torch.float64, device=rank.torch_device)
    dist.all_reduce(flat)
    engine.module.train()
    scores = flat.cpu().view(len(held_out), 2)
    return _measures(scores, held_out, config), scores


def evaluate_saved(
    config: PipelineConfig, folder: Path, held_out: Sequence[PairExample], pad_id: int, device: str
) -> tuple[dict[str, float], torch.Tensor]:
    """Evaluate the model in `folder` as later stages load it, on one device. See `evaluate_reward`.

    Quantized weights cannot take an adapter (`TrainingEngine.merge_adapter`), so they are evaluated here.

    Args:
        config: The configuration.
        folder: The saved reward model.
        held_out: The pairs to score.
        pad_id: The token that fills rows.
        device: Device of the model.
    """
    reward = config.reward
    heartbeat("load the reward model", config.run.timeouts.start)
    model = load_whole(load_score_model, folder, device, config, reward).eval()
    sequences = _sequences(held_out)
    batches = single_process_batches(model, sequences, reward.micro_batch_tokens, pad_id)
    flat = sequence_scores(model, ScoreStatistics(), batches)
    scores = torch.tensor(flat, dtype=torch.float64).view(len(held_out), 2)
    return _measures(scores, held_out, reward), scores


def _sequences(pairs: Sequence[PairExample]) -> list[PromptAndResponse]:
    sequences: list[PromptAndResponse] = []
    for pair in pairs:
        sequences += [(pair.prompt_ids, pair.chosen_ids), (pair.prompt_ids, pair.rejected_ids)]
    return sequences


def _measures(
    scores_P2: torch.Tensor, held_out: Sequence[PairExample], config: RewardConfig
) -> dict[str, float]:
    gap = scores_P2[:, 0] - scores_P2[:, 1]
    return {
        "eval/accuracy": is_correct(gap).mean().item(),
        "eval/margin": gap.mean().item(),
        "eval/loss": pair_loss(scores_P2[:, 0], scores_P2[:, 1], held_out, config).item(),
        **prefixed("eval/", accuracy_interval(gap, held_out)),
    }


def pair_loss(
    chosen: torch.Tensor, rejected: torch.Tensor, pairs: Sequence[PairExample], config: RewardConfig
) -> torch.Tensor:
    """Return the mean over these pairs, with the configured margin and centring."""
    margins = None
    if config.margin == "constant":
        margins = torch.full_like(chosen, config.margin_value)
    elif config.margin == "field":
        margins = to_device(torch.tensor([pair.margin for pair in pairs], dtype=chosen.dtype), chosen.device)
    return reward_model_loss(chosen, rejected, margins, center=config.center)


def _forward(
    engine: TrainingEngine, pairs: Sequence[PairExample], config: RewardConfig, pad_id: int
) -> tuple[torch.Tensor, torch.Tensor]:
    sequences = [TokenSequence.of(p.prompt_ids, p.chosen_ids) for p in pairs]
    sequences += [TokenSequence.of(p.prompt_ids, p.rejected_ids) for p in pairs]
    scores = engine(collate(sequences, pad_id=pad_id, pack=config.packs).to(engine.rank.torch_device), "last")
    # Without pairs, the batch is one dummy token, whose score keeps the graph for the backward pass.
    if not pairs:
        return scores, scores[:0]
    return scores[: len(pairs)], scores[len(pairs) :]


OBJECTIVE = Objective(
    train_step,
    evaluate=lambda *arguments: evaluate_reward(*arguments)[0],
    count_tokens=pair_tokens,
    table_row=table_row,
)
