"""The supervised fine-tuning loop: forward, sum of token losses over the step's own count, step, log,
checkpoint.

The loss of one optimizer step is the mean over ALL target tokens of its batch, over every rank and
micro-batch.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from rlhf_core.algo.losses import sft_loss
from rlhf_core.config import PipelineConfig
from rlhf_core.config.training import SFTConfig
from rlhf_core.engines import checkpointing
from rlhf_core.engines.checkpointing import log_skipped_batch
from rlhf_core.engines.deepspeed import TrainingEngine
from rlhf_core.models.batching import TokenSequence, collate
from rlhf_core.models.packing import plan_ranks
from rlhf_core.models.policy import load_policy
from rlhf_core.seeds import epoch_batches
from rlhf_core.system.failpoints import failpoint
from rlhf_core.system.heartbeat import heartbeat
from rlhf_core.types import StageContext


def train_sft(
    engine: TrainingEngine,
    train: Sequence[TokenSequence],
    held_out: Sequence[TokenSequence],
    config: SFTConfig,
    *,
    seed: int,
    pad_id: int,
    work: Path,
    context: StageContext | None,
) -> dict[str, float]:
    """Train to the end, from the last checkpoint if there is one; returns `eval_loss`, `perplexity`,
    `tokens_per_s`.
    """
    per_epoch = math.ceil(len(train) / config.batch_size)
    total = per_epoch * config.epochs
    state = checkpointing.restore(engine, context) or {"step": 0, "tokens": 0, "seconds": 0.0}
    step, tokens, seconds = int(state["step"]), int(state["tokens"]), float(state["seconds"])
    with checkpointing.defer_stop(context):
        while step < total:
            started = time.monotonic()
            epoch, index = divmod(step, per_epoch)
            batch = [train[i] for i in epoch_batches(len(train), config.batch_size, seed, epoch)[index]]
            with log_skipped_batch(engine, context, step + 1, batch, _table_row):
                metrics = train_step(engine, batch, config, total, pad_id)
            failpoint("sft.step")
            step += 1
            tokens += sum(map(len, batch))
            seconds += time.monotonic() - started
            if step % config.eval_every == 0 and step < total:
                metrics |= evaluate_sft(engine, held_out, config, pad_id)
            if context is not None:
                metrics["train/tokens_per_s"] = tokens / seconds
                context.metrics.log_metrics(metrics, step)
                context.progress(
                    "sft",
                    step,
                    total,
                    "steps",
                    **({"loss": metrics["train/loss"]} if "train/loss" in metrics else {}),
                )
            checkpointing.after_step(
                engine, context, work, step, every=config.checkpoint_every, total=total,
                state={"tokens": tokens, "seconds": seconds},
                score=-metrics["eval/loss"] if "eval/loss" in metrics else None,
            )  # fmt: skip
    final = evaluate_sft(engine, held_out, config, pad_id)
    if context is not None:
        context.metrics.log_metrics(final, total)
    return {
        "eval_loss": final["eval/loss"],
        "perplexity": final["eval/perplexity"],
        "tokens_per_s": tokens / max(seconds, 1e-9),
    }


def train_step(
    engine: TrainingEngine, batch: Sequence[TokenSequence], config: SFTConfig, total: int, pad_id: int
) -> dict[str, float]:
    """One optimizer step of `total` on a batch that all ranks know; each takes its share. Returns the step's
    metrics.

    A step whose gradient is not finite is skipped and counted, and tells no loss.
    """
    targets = sum(sequence.targets for sequence in batch)
    loss_sum = torch.zeros((), device=engine.rank.torch_device)

    def losses() -> Iterator[torch.Tensor]:
        for micro_batch in _my_micro_batches(engine, batch, config):
            tensors = collate([batch[i] for i in micro_batch], pad_id=pad_id, pack=config.packs).to(
                engine.rank.torch_device
            )
            logprobs_N = engine(tensors).logprobs_N
            loss = sft_loss(logprobs_N, torch.ones_like(logprobs_N), denominator=targets)
            loss_sum.add_(loss.detach())
            yield loss

    norm = engine.train_step(losses(), total)
    dist.all_reduce(loss_sum)
    metrics = {"train/loss": loss_sum.item(), "train/grad_norm": norm}
    return {
        **{name: value for name, value in metrics.items() if math.isfinite(value)},
        "train/learning_rate": engine.optimizer.param_groups[0]["lr"],
        "train/skipped_steps": float(engine.skipped_steps),
    }


@torch.no_grad()
def evaluate_sft(
    engine: TrainingEngine, held_out: Sequence[TokenSequence], config: SFTConfig, pad_id: int
) -> dict[str, float]:
    """Mean loss per target token over the held-out set, in nats, and its exponential. A collective."""
    engine.module.eval()
    micro_batches = _my_micro_batches(engine, held_out, config)
    sums = _loss_and_count(engine, held_out, micro_batches, config.packs, pad_id, engine.rank.torch_device)
    dist.all_reduce(sums)
    engine.module.train()
    return _measures(sums)


def evaluate_saved(
    config: PipelineConfig, folder: Path, held_out: Sequence[TokenSequence], pad_id: int, device: str
) -> dict[str, float]:
    """Evaluate the model in `folder` as later stages load it, on one device. See `evaluate_sft`."""
    sft = config.sft
    heartbeat("load the model", config.run.timeouts.start)
    model = load_policy(
        folder,
        dtype=sft.deepspeed.dtype,
        attention=config.model.attention,
        device=device,
        pack=sft.pack,
        head_dtype=config.model.head_dtype,
    ).eval()
    (micro_batches,) = plan_ranks(list(map(len, held_out)), 1, sft.micro_batch_tokens, pack=model.packs)
    with torch.no_grad():
        return _measures(_loss_and_count(model, held_out, micro_batches, model.packs, pad_id, device))


def _loss_and_count(
    model: Any,
    held_out: Sequence[TokenSequence],
    micro_batches: Sequence[Sequence[int]],
    pack: bool,
    pad_id: int,
    device: str,
) -> torch.Tensor:
    """(2,) float64: the sum of the losses in nats, and the number of target tokens."""
    sums = torch.zeros(2, dtype=torch.float64, device=device)
    for micro_batch in micro_batches:
        heartbeat("evaluation")
        tensors = collate([held_out[i] for i in micro_batch], pad_id=pad_id, pack=pack).to(device)
        logprobs_N = model(tensors).logprobs_N
        sums[0] -= logprobs_N.double().sum()
        sums[1] += logprobs_N.numel()
    return sums


def _measures(sums: torch.Tensor) -> dict[str, float]:
    loss = (sums[0] / sums[1]).item()
    return {"eval/loss": loss, "eval/perplexity": math.exp(min(loss, 50.0))}


def _table_row(row: TokenSequence) -> dict[str, Any]:
    return {"tokens": len(row), "targets": row.targets, "input_ids": str(list(row.input_ids))}


def _my_micro_batches(engine: TrainingEngine, batch: Sequence[Any], config: SFTConfig) -> list[list[int]]:
    rank = engine.rank
    lengths = [len(sequence) for sequence in batch]
    return plan_ranks(lengths, rank.world_size, config.micro_batch_tokens, pack=config.packs)[rank.rank]
