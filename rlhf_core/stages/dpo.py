"""Stage `dpo`: SFT model + pairs -> `policy/` (Hugging Face layout, with the tokenizer), and `adapter/` with
`dpo.lora`.

Direct preference optimisation (Rafailov et al. 2023), with the loss `dpo.loss`. The reference is the SFT
model. Its log-probabilities of all pairs are computed before the first step, so no second model is in memory.
The loss of one optimizer step is the mean over all its pairs, over every rank and micro-batch. With
`early_stop`, the held-out loss decides when the training ends and which weights are its result.

Axes: `P` pairs; the size 2 is for the chosen and the rejected response.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from rlhf_core.algo.losses import dpo_loss, ipo_loss, robust_dpo_loss
from rlhf_core.config import PipelineConfig
from rlhf_core.config.training import DPOConfig
from rlhf_core.data.dataset import Rows, load_pairs
from rlhf_core.data.tokenizer import load_decoder
from rlhf_core.engines.deepspeed import TrainingEngine
from rlhf_core.models.batching import TokenSequence, collate, to_device
from rlhf_core.models.policy import load_policy
from rlhf_core.seeds import derive_seed
from rlhf_core.stages.training import (
    Folders,
    Objective,
    StageModel,
    Training,
    accuracy_interval,
    is_correct,
    load_to_train,
    micro_batches,
    pair_tokens,
    step_metrics,
    table_row,
    train_epochs,
    train_on_ranks,
    training_pairs,
)
from rlhf_core.storage.bundles import weights_sha256
from rlhf_core.system.heartbeat import heartbeat
from rlhf_core.types import PairExample, StageContext, StageResult, prefixed

_METRICS = ("loss", "accuracy", "rewards/chosen", "rewards/rejected")


@dataclass(frozen=True)
class ReferencedPair:
    """A pair with its log-probabilities under the reference."""

    pair: PairExample
    reference: tuple[float, float]
    """Log-probabilities of the chosen and of the rejected response: sums, or means over their tokens with
    `dpo.length_normalised`.
    """


def run(config: PipelineConfig, context: StageContext) -> StageResult:
    """Train over `dpo.deepspeed.ranks` ranks."""
    metrics = train_on_ranks(_train, config.dpo, config, context)
    policy = context.output / "policy"
    shutil.copytree(context.data / "tokenizer", policy, dirs_exist_ok=True)
    context.metrics.flush()
    # For the registration, whose host need not have the weights.
    return StageResult(metrics, {"weights_sha256": weights_sha256(policy, context.stored_in(policy))})


def _train(
    rank: Any, config: PipelineConfig, folders: Folders, context: StageContext | None
) -> dict[str, float]:
    """Train and save the policy on each rank, and return the metrics."""
    dpo, data, out = config.dpo, folders.data, folders.out
    torch.manual_seed(derive_seed(config.run.seed, "dpo", "init"))  # of adapters
    policy = load_to_train(
        load_policy, folders.sft_model, rank, config, dpo, head_dtype=config.model.head_dtype
    )
    model = StageModel(rank, policy, dpo, "dpo", context)
    del policy
    train, held_out = training_pairs(config, data, "dpo", folders.work), load_pairs(data, "eval")
    training = Training(
        "dpo", derive_seed(config.run.seed, "dpo"), load_decoder(data).pad, folders.work, context
    )
    metrics = train_dpo(model.engine, train, held_out, model.settings, training)
    # Rounding a merged adapter would lose a part of a small update, as in PPO.
    precision = None if dpo.lora is None else torch.float32
    model.save(out / "policy", out / "adapter", None, dtype=precision)
    model.close()
    return metrics


# -- the loop --


def train_dpo(
    engine: TrainingEngine,
    train: Sequence[PairExample],
    held_out: Sequence[PairExample],
    config: DPOConfig,
    training: Training,
) -> dict[str, float]:
    """Train to the end (`train_epochs`), and evaluate.

    Args:
        engine: The SFT model with its optimizer.
        train: The training set.
        held_out: The set that is evaluated on.
        config: Settings of the stage.
        training: Stage, seed, padding, folder and context.

    Returns:
        Held-out `accuracy` with `accuracy_low` and `accuracy_high`, `margin`, `eval_loss`, `rewards/chosen`
        and `rewards/rejected`, the number of held-out `pairs`, `tokens_per_s`, and `best_step` with
        `early_stop`.
    """
    pad_id = training.pad_id
    # Before a checkpoint is loaded: the engine still is the reference.
    referenced = with_reference(engine, train, config, pad_id)
    held_out_referenced = with_reference(engine, held_out, config, pad_id)
    trained = train_epochs(engine, referenced, held_out_referenced, config, training, OBJECTIVE)
    final = evaluate_dpo(engine, held_out_referenced, config, pad_id)
    if training.context is not None:
        training.context.metrics.log_metrics(final, trained.steps)
    measures = {name.removeprefix("eval/"): value for name, value in final.items()}
    return {"eval_loss": measures.pop("loss"), **measures, "pairs": float(len(held_out)), **trained.metrics}


def with_reference(
    engine: TrainingEngine, pairs: Sequence[PairExample], config: DPOConfig, pad_id: int
) -> Rows[ReferencedPair]:
    """Return the pairs with the log-probabilities of the present weights. This is a collective operation."""
    # To the host: they are needed pair by pair, and reading one from a GPU waits for it.
    logprobs_P2 = pair_logprobs(engine, pairs, config, pad_id).cpu()

    def referenced(index: int) -> ReferencedPair:
        chosen, rejected = logprobs_P2[index].tolist()
        return ReferencedPair(pairs[index], (chosen, rejected))

    return Rows(len(pairs), referenced)


def train_step(
    engine: TrainingEngine, batch: Sequence[ReferencedPair], config: DPOConfig, total: int, pad_id: int
) -> dict[str, float]:
    """Run one optimizer step and return its metrics. Each rank computes its share of `batch`.

    A step whose gradient is not finite is skipped and counted.

    Args:
        engine: The policy with its optimizer.
        batch: The pairs of the step, the same on every rank.
        config: Settings of the stage.
        total: Number of steps of the whole training, for the schedule of the learning rate.
        pad_id: The token that fills rows.
    """
    pairs = [row.pair for row in batch]
    sums = torch.zeros(len(_METRICS), dtype=torch.float64, device=engine.rank.torch_device)

    def losses() -> Iterator[torch.Tensor]:
        for micro_batch in micro_batches(engine.rank, pairs, config):
            rows = [batch[i] for i in micro_batch]
            part = _sums(_forward(engine, [row.pair for row in rows], config, pad_id), rows, config)
            sums.add_(part.detach())
            yield part[0] / len(batch)

    norm = engine.train_step(losses(), total)
    dist.all_reduce(sums)
    return step_metrics(engine, norm, _means("train", sums, len(batch)))


def evaluate_dpo(
    engine: TrainingEngine, held_out: Sequence[ReferencedPair], config: DPOConfig, pad_id: int
) -> dict[str, float]:
    """Return `eval/loss`, `eval/accuracy` (ties count half) with the bounds of its interval, `eval/margin`,
    `eval/rewards/chosen` and `eval/rewards/rejected`. This is a collective operation.
    """
    policy_P2 = pair_logprobs(engine, [row.pair for row in held_out], config, pad_id)
    found = _means("eval", _sums(policy_P2, held_out, config), len(held_out))
    ratios_P2 = policy_P2.cpu() - _references(held_out, policy_P2.dtype)
    bounds = accuracy_interval(ratios_P2[:, 0] - ratios_P2[:, 1], [row.pair for row in held_out])
    return found | prefixed("eval/", bounds)


@torch.no_grad()
def pair_logprobs(
    engine: TrainingEngine, pairs: Sequence[PairExample], config: DPOConfig, pad_id: int
) -> torch.Tensor:
    """Return the log-probabilities of both responses of each pair as in `ReferencedPair`, (P, 2), on every
    rank.

    This is a collective operation.
    """
    engine.module.eval()
    # The rows of other ranks stay 0, so the sum has the rows of all.
    found_P2 = torch.zeros(len(pairs), 2, dtype=torch.float64, device=engine.rank.torch_device)
    plan = micro_batches(engine.rank, pairs, config)
    for number, micro_batch in enumerate(plan, start=1):
        heartbeat(f"pass {number} of {len(plan)} over pairs")
        found_P2[micro_batch] = _forward(engine, [pairs[i] for i in micro_batch], config, pad_id)
    dist.all_reduce(found_P2)
    engine.module.train()
    return found_P2


def _sums(policy_P2: torch.Tensor, rows: Sequence[ReferencedPair], config: DPOConfig) -> torch.Tensor:
    """Return the sums over the pairs of `_METRICS`, (4,); the first one has a gradient.

    The implicit reward of a response is beta times the logarithm of policy over reference, for every loss.
    """
    reference_P2 = to_device(_references(rows, policy_P2.dtype), policy_P2.device)
    columns = (policy_P2[:, 0], policy_P2[:, 1], reference_P2[:, 0], reference_P2[:, 1])
    match config.loss:
        case "sigmoid":
            # The denominator 1 gives sums: micro-batches are added, and `train_step` divides by the pairs of
            # the step.
            loss = dpo_loss(*columns, config.beta, config.label_smoothing, denominator=1.0)
        case "robust":
            loss = robust_dpo_loss(*columns, config.beta, config.label_smoothing, denominator=1.0)
        case "ipo":
            loss = ipo_loss(*columns, config.beta, denominator=1.0)
    rewards_P2 = config.beta * (policy_P2 - reference_P2).detach()
    correct = is_correct(rewards_P2[:, 0] - rewards_P2[:, 1]).sum()
    return torch.stack([loss, correct, *rewards_P2.sum(0)])


def _references(rows: Sequence[ReferencedPair], dtype: torch.dtype) -> torch.Tensor:
    """Return the log-probabilities of both responses under the reference, (P, 2)."""
    # `view`, because the empty list of an empty micro-batch has one axis only.
    return torch.tensor([row.reference for row in rows], dtype=dtype).view(len(rows), 2)


def _means(split: str, sums: torch.Tensor, count: int) -> dict[str, float]:
    means = dict(zip(_METRICS, (sums / count).tolist(), strict=True))
    means["margin"] = means["rewards/chosen"] - means["rewards/rejected"]
    return prefixed(f"{split}/", means)


def _forward(
    engine: TrainingEngine, pairs: Sequence[PairExample], config: DPOConfig, pad_id: int
) -> torch.Tensor:
    """Return the log-probabilities of both responses of each pair as in `ReferencedPair`, (P, 2)."""
    sequences: list[TokenSequence] = []
    for pair in pairs:
        sequences.append(TokenSequence.of(pair.prompt_ids, pair.chosen_ids))
        sequences.append(TokenSequence.of(pair.prompt_ids, pair.rejected_ids))
    batch = collate(sequences, pad_id=pad_id, pack=config.packs).to(engine.rank.torch_device)
    values = []
    # In float64: the loss reads a small difference of sums over whole responses.
    for part in batch.split(engine(batch).logprobs_N.double()):
        # Without pairs, the batch is one token that no part of the result depends on, but the graph does.
        count = max(1, part.numel())
        values.append(part.sum() / count if config.length_normalised else part.sum())
    return torch.stack(values)[: len(sequences)].view(len(pairs), 2)


OBJECTIVE = Objective(
    train_step,
    evaluate_dpo,
    count_tokens=lambda row: pair_tokens(row.pair),
    table_row=lambda row: table_row(row.pair),
)
