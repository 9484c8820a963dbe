"""The reward-model loop: Bradley-Terry on pairs, both responses of a pair in the same forward pass.

The loss of one optimizer step is the mean over all its pairs, over every rank and micro-batch.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
import torch.distributed as dist

from rlhf_core.algo.losses import reward_model_loss
from rlhf_core.config.training import RewardConfig
from rlhf_core.errors import NonFiniteError
from rlhf_core.failpoints import failpoint
from rlhf_core.models.batching import TokenSequence, collate, plan_ranks
from rlhf_core.models.score import ScoreStatistics
from rlhf_core.training import checkpointing
from rlhf_core.training.engine import TrainingEngine
from rlhf_core.training.sft import epoch_batches
from rlhf_core.types import PairExample, Services
from rlhf_core.watch import doing


def train_reward(
    engine: TrainingEngine,
    train: Sequence[PairExample],
    config: RewardConfig,
    *,
    seed: int,
    pad_id: int,
    work: Path,
    services: Services | None,
) -> dict[str, float]:
    """Train to the end, from the last checkpoint if there is one; returns `tokens_per_s`."""
    per_epoch = math.ceil(len(train) / config.batch_size)
    total = per_epoch * config.epochs
    state = checkpointing.restore(engine, services) or {"step": 0, "tokens": 0, "seconds": 0.0}
    step, tokens, seconds = int(state["step"]), int(state["tokens"]), float(state["seconds"])
    with checkpointing.stops_after_a_step(services):
        while step < total:
            started = time.monotonic()
            epoch, index = divmod(step, per_epoch)
            batch = [train[i] for i in epoch_batches(len(train), config.batch_size, seed, epoch)[index]]
            metrics = _step(engine, batch, config, total, pad_id)
            failpoint("reward.step")
            step += 1
            tokens += sum(2 * len(p.prompt_ids) + len(p.chosen_ids) + len(p.rejected_ids) for p in batch)
            seconds += time.monotonic() - started
            if services is not None:
                metrics["train/tokens_per_s"] = tokens / seconds
                services.metrics.log_metrics(metrics, step)
                shown = {name: metrics[f"train/{name}"] for name in ("loss", "accuracy") if f"train/{name}" in metrics}
                services.progress("reward", step, total, "steps", **shown)
            checkpointing.after_step(
                engine, services, work, step, every=config.checkpoint_every, total=total,
                state={"tokens": tokens, "seconds": seconds},
            )  # fmt: skip
    return {"tokens_per_s": tokens / max(seconds, 1e-9)}


def _step(
    engine: TrainingEngine, batch: Sequence[PairExample], config: RewardConfig, total: int, pad_id: int
) -> dict[str, float]:
    sums = torch.zeros(3, dtype=torch.float64, device=engine.rank.torch_device)  # loss, right pairs, margin

    def losses() -> Iterator[torch.Tensor]:
        for group in _my_groups(engine, batch, config):
            chosen, rejected = _forward(engine, [batch[i] for i in group], config, pad_id)
            if not group:
                yield 0.0 * chosen.sum()
                continue
            loss = reward_model_loss(chosen, rejected, center=config.center) * (len(group) / len(batch))
            gap = (chosen - rejected).detach()
            sums.add_(torch.stack([loss.detach(), (gap > 0).sum(), gap.sum()]).double())
            yield loss

    norm = engine.train_step(losses(), total)
    dist.all_reduce(sums)
    loss, right, margin = sums.tolist()
    metrics = {
        "train/loss": loss,
        "train/accuracy": right / len(batch),
        "train/margin": margin / len(batch),
        "train/grad_norm": norm,
        "train/learning_rate": engine.optimizer.param_groups[0]["lr"],
        "train/skipped_steps": float(engine.skipped_steps),
    }
    return {name: value for name, value in metrics.items() if math.isfinite(value)}


@torch.no_grad()
def evaluate_reward(
    engine: TrainingEngine, held_out: Sequence[PairExample], config: RewardConfig, pad_id: int
) -> tuple[dict[str, float], ScoreStatistics, torch.Tensor]:
    """Held-out `eval/accuracy` (ties count half), `eval/margin`, `eval/loss`; statistics of the raw scores; and the raw
    scores (pairs, 2), chosen first. A collective."""
    engine.module.eval()
    scores = torch.zeros(len(held_out), 2, dtype=torch.float64)
    for group in _my_groups(engine, held_out, config):
        doing("evaluation")
        chosen, rejected = _forward(engine, [held_out[i] for i in group], config, pad_id)
        for i, c, r in zip(group, chosen.tolist(), rejected.tolist(), strict=False):
            scores[i] = torch.tensor([c, r], dtype=torch.float64)
    scores = scores.to(engine.rank.torch_device)
    dist.all_reduce(scores)
    scores = scores.cpu()
    engine.module.train()
    gap = scores[:, 0] - scores[:, 1]
    metrics = {
        "eval/accuracy": ((gap > 0).double() + 0.5 * (gap == 0).double()).mean().item(),
        "eval/margin": gap.mean().item(),
        "eval/loss": reward_model_loss(scores[:, 0], scores[:, 1], center=config.center).item(),
    }
    std = scores.std().item()
    if not std > 0:
        raise NonFiniteError(f"reward: the scores on held-out pairs have standard deviation {std}; nothing was learned")
    return metrics, ScoreStatistics(scores.mean().item(), std), scores


def _forward(
    engine: TrainingEngine, pairs: Sequence[PairExample], config: RewardConfig, pad_id: int
) -> tuple[torch.Tensor, torch.Tensor]:
    sequences = [TokenSequence.of(p.prompt_ids, p.chosen_ids) for p in pairs]
    sequences += [TokenSequence.of(p.prompt_ids, p.rejected_ids) for p in pairs]
    scores = engine(collate(sequences, pad_id=pad_id, pack=config.pack).to(engine.rank.torch_device), "last")
    return scores[: len(pairs)] if pairs else scores, scores[len(pairs) :]


def _my_groups(engine: TrainingEngine, batch: Sequence[PairExample], config: RewardConfig) -> list[list[int]]:
    rank = engine.rank
    lengths = [2 * (len(p.prompt_ids) + max(len(p.chosen_ids), len(p.rejected_ids))) for p in batch]
    if config.pack:
        lengths = [2 * len(p.prompt_ids) + len(p.chosen_ids) + len(p.rejected_ids) for p in batch]
    return plan_ranks(lengths, rank.world_size, config.micro_batch_tokens, pack=config.pack)[rank.rank]
