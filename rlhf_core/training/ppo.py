"""The PPO update of one rank: policy and critic each run this in their own process, at the same time.

Each optimizer step sums its micro-batches' parts of one loss whose denominator counts the whole step on all ranks.
Metrics come back as sums over this rank's tokens; divided by the tokens of all ranks they are the loss's own means.

Axes: `S` sequences of a micro-batch, `T` longest response among them, `N` response tokens.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence

from rlhf_core.algo.losses import entropy_bonus, policy_loss, value_loss
from rlhf_core.config.ppo import PPOConfig
from rlhf_core.models.batching import TokenBatch, TokenSequence, collate
from rlhf_core.training.engine import TrainingEngine


class Sample(Protocol):
    """Structural view of `cluster.records.TrainSample`."""

    @property
    def prompt_ids(self) -> tuple[int, ...]: ...
    @property
    def response_ids(self) -> tuple[int, ...]: ...
    @property
    def old_logprobs(self) -> Any: ...
    @property
    def advantages(self) -> Any: ...
    @property
    def returns(self) -> Any: ...
    @property
    def old_values(self) -> Any: ...
    @property
    def weights(self) -> Any: ...


class Step(Protocol):
    """Structural view of `cluster.records.OptimizerStep`."""

    @property
    def micro_batches(self) -> list[list[int]]: ...
    @property
    def denominator(self) -> float: ...


def total_optimizer_steps(ppo: PPOConfig) -> int:
    """Epochs x minibatches x iterations, whatever the number of micro-batches."""
    return ppo.steps * ppo.epochs * ppo.minibatches


def update_policy(
    engine: TrainingEngine, samples: Sequence[Sample], steps: Sequence[Step], ppo: PPOConfig, pad_id: int
) -> dict[str, float]:
    """Clipped surrogate, with the entropy bonus if configured. Sums: `loss`, `clipped`, `approx_kl`, `grad_norm`."""
    sums: defaultdict[str, float] = defaultdict(float)

    def losses(step: Step) -> Iterator[torch.Tensor]:
        for group in step.micro_batches:
            batch, chosen = _batch(engine, samples, group, pad_id)
            output = engine(batch, ppo.temperature, ppo.entropy_coef > 0)
            if not group:
                yield 0.0 * output.logprobs_N.sum()
                continue
            mask_ST = _mask(chosen, batch)
            result = policy_loss(
                _rows(output.logprobs_N, batch),
                _stack([s.old_logprobs for s in chosen], batch),
                _stack([s.advantages for s in chosen], batch),
                mask_ST,
                clip_low=ppo.clip_low,
                clip_high=ppo.clip_high,
                dual_clip=ppo.dual_clip,
                weights=_stack([s.weights for s in chosen], batch),
                aggregation=ppo.aggregation,
                denominator=step.denominator,
            )
            loss = result.loss
            if ppo.entropy_coef > 0:
                entropy_ST = _rows(output.entropy_N, batch)
                loss = loss - ppo.entropy_coef * entropy_bonus(
                    entropy_ST, mask_ST, aggregation=ppo.aggregation, denominator=step.denominator
                )
            tokens = int(mask_ST.sum())
            sums["loss"] += loss.item()
            sums["clipped"] += result.clip_fraction.item() * tokens
            sums["approx_kl"] += result.approx_kl.item() * tokens
            yield loss

    for step in steps:
        sums["grad_norm"] += engine.train_step(losses(step), total_optimizer_steps(ppo))
    return dict(sums)


def update_critic(
    engine: TrainingEngine, samples: Sequence[Sample], steps: Sequence[Step], ppo: PPOConfig, pad_id: int
) -> dict[str, float]:
    """Clipped squared error. Sums: `loss`, `clipped`, `grad_norm`."""
    sums: defaultdict[str, float] = defaultdict(float)

    def losses(step: Step) -> Iterator[torch.Tensor]:
        for group in step.micro_batches:
            batch, chosen = _batch(engine, samples, group, pad_id)
            values_N = engine(batch, "tokens")
            if not group:
                yield 0.0 * values_N.sum()
                continue
            mask_ST = _mask(chosen, batch)
            result = value_loss(
                _rows(values_N, batch),
                _stack([s.old_values for s in chosen], batch),
                _stack([s.returns for s in chosen], batch),
                mask_ST,
                clip=ppo.value_clip,
                aggregation=ppo.aggregation,
                denominator=step.denominator,
            )
            sums["loss"] += result.loss.item()
            sums["clipped"] += result.clip_fraction.item() * int(mask_ST.sum())
            yield result.loss

    for step in steps:
        sums["grad_norm"] += engine.train_step(losses(step), total_optimizer_steps(ppo))
    return dict(sums)


def _batch(
    engine: TrainingEngine, samples: Sequence[Sample], group: list[int], pad_id: int
) -> tuple[TokenBatch, list[Sample]]:
    chosen = [samples[i] for i in group]
    batch = collate([TokenSequence.of(s.prompt_ids, s.response_ids) for s in chosen], pad_id=pad_id)
    return batch.to(engine.rank.torch_device), chosen


def _rows(values_N: torch.Tensor, batch: TokenBatch) -> torch.Tensor:
    """(N,) -> (S, T), zeros beyond each response."""
    return pad_sequence(batch.split(values_N), batch_first=True)


def _stack(arrays: Sequence[Any], batch: TokenBatch) -> torch.Tensor:
    tensors = [torch.from_numpy(np.array(array, dtype=np.float32)) for array in arrays]
    return pad_sequence(tensors, batch_first=True).to(batch.input_ids_BL.device)


def _mask(chosen: Sequence[Sample], batch: TokenBatch) -> torch.Tensor:
    return _stack([np.ones(len(s.response_ids)) for s in chosen], batch).bool()
