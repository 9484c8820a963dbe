"""The PPO update of one rank. Policy and critic run it at the same time, in different processes.

The losses of the micro-batches of an optimizer step are summed. Their common denominator counts the whole
step on all ranks. The metrics are returned as sums over the tokens of this rank; divided by the tokens of all
ranks they are the means that the loss uses.

Axes: `B` sequences of a micro-batch, `T` longest response among them, `N` response tokens.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence

from rlhf_core.algo.kl import Estimator
from rlhf_core.algo.losses import (
    LossInputs,
    PolicyLoss,
    clipped_weight_loss,
    entropy_bonus,
    kl_loss,
    policy_loss,
    sequence_policy_loss,
    sft_loss,
    value_loss,
)
from rlhf_core.config.base import Aggregation
from rlhf_core.config.ppo import PPOConfig
from rlhf_core.config.ppo_sections import ClippedWeightLoss, PythonLoss, SequenceLoss
from rlhf_core.engines.deepspeed import TrainingEngine
from rlhf_core.errors import InputError
from rlhf_core.models.batching import TokenBatch, TokenSequence, collate, to_device
from rlhf_core.ppo.training.batch import FloatArray
from rlhf_core.ppo.training.experience import load_user_function, padded, with_metrics


def _nothing() -> FloatArray:
    return np.zeros(0, np.float32)


@dataclass(frozen=True)
class TrainSample:
    """One response with everything that the update of a model needs."""

    prompt_ids: tuple[int, ...]
    response_ids: tuple[int, ...]
    old_logprobs: FloatArray = field(default_factory=_nothing)
    """(T,) by the policy before the update."""
    advantages: FloatArray = field(default_factory=_nothing)
    """(T,) whitened if configured."""
    ref_logprobs: FloatArray = field(default_factory=_nothing)
    """(T,) by the reference."""
    returns: FloatArray = field(default_factory=_nothing)
    """(T,) from unwhitened advantages, for the critic."""
    old_values: FloatArray = field(default_factory=_nothing)
    """(T,) by the critic before the update, for the critic."""
    weights: FloatArray = field(default_factory=_nothing)
    """(T,) importance weights for the gap between engine and trainer; ones if none."""


@dataclass(frozen=True)
class OptimizerStep:
    """The part of one rank in one optimizer step."""

    micro_batches: list[list[int]]
    """Indices into the rank's samples.

    Every rank has the same number of micro-batches, so some may be empty.
    """
    denominator: float
    """Tokens or sequences of the WHOLE step, over all ranks (see `losses.step_denominator`)."""
    ptx_micro_batches: list[list[int]] = field(default_factory=list)
    """Indices into the rank's demonstrations in the same form; empty without a pretraining loss."""
    ptx_targets: int = 0
    """Target tokens among the demonstrations of the whole step."""


LossResult = tuple[torch.Tensor, dict[str, torch.Tensor]]
"""A scalar, and means over the tokens of the micro-batch by name."""
Loss = Callable[[LossInputs], LossResult]


@dataclass(frozen=True)
class UpdateSettings:
    """The settings that an update reads."""

    loss: Loss
    """The policy's loss, without entropy bonus, KL and pretraining loss."""
    aggregation: Aggregation
    """How the losses of tokens become a scalar (`losses.aggregate`)."""
    temperature: float
    """Temperature at which the policy was sampled."""
    entropy_coef: float
    kl_estimator: Estimator | None
    """Estimator of the KL loss; None without one."""
    ptx_coef: float | None
    """Coefficient of the pretraining loss; None without one."""
    value_clip: float | None
    """Maximum change of the values; None for no limit."""
    policy_steps: int
    """Optimizer steps of the policy in the whole run, for its learning rate."""
    critic_steps: int
    pack: bool
    """Whether sequences are packed into one row."""

    @classmethod
    def of(cls, ppo: PPOConfig, loss: Loss | None = None) -> UpdateSettings:
        """Return the settings of section `ppo`. `loss` is the loss if it is already loaded."""
        return cls(
            loss=loss or loss_of(ppo),
            aggregation=ppo.loss_sum,
            temperature=ppo.temperature,
            entropy_coef=ppo.entropy_coef,
            kl_estimator=ppo.kl.used_estimator if ppo.kl.place == "loss" else None,
            ptx_coef=None if ppo.ptx is None else ppo.ptx.coef,
            value_clip=ppo.value_clip,
            policy_steps=ppo.policy_optimizer_steps,
            critic_steps=ppo.critic_optimizer_steps,
            pack=ppo.packs,
        )


def loss_of(ppo: PPOConfig, code: bytes | None = None) -> Loss:
    """Return the policy's loss that section `ppo` configures.

    Args:
        ppo: Section `ppo`.
        code: Source of the file of a user's loss, if it was read before.

    Raises:
        ConfigError: The user's loss cannot be loaded.
    """
    if isinstance(ppo.loss, PythonLoss):
        return _checked(load_user_function(ppo.loss, "ppo.loss", code), ppo.loss.function)
    compute: Callable[..., PolicyLoss]
    if isinstance(ppo.loss, SequenceLoss):
        compute = sequence_policy_loss
        bounds = {"clip_low": ppo.loss.clip_low, "clip_high": ppo.loss.clip_high}
    elif isinstance(ppo.loss, ClippedWeightLoss):
        compute = clipped_weight_loss
        bounds = {"clip_low": ppo.loss.clip_low, "clip_high": ppo.loss.clip_high}
    else:
        compute = partial(policy_loss, dual_clip=ppo.dual_clip)
        bounds = {"clip_low": ppo.clip_low, "clip_high": ppo.clip_high}

    def loss(inputs: LossInputs) -> LossResult:
        result = compute(
            inputs.logprobs_BT,
            inputs.old_logprobs_BT,
            inputs.advantages_BT,
            inputs.mask_BT,
            weights=inputs.weights_BT,
            aggregation=inputs.aggregation,
            denominator=inputs.denominator,
            **bounds,
        )
        return result.loss, {"clipped": result.clip_fraction, "approx_kl": result.approx_kl}

    return loss


def _checked(function: Callable[[LossInputs], Any], name: str) -> Loss:
    """Return the user's loss, whose results are checked. Its metrics get names of their own."""

    def loss(inputs: LossInputs) -> LossResult:
        value, metrics = with_metrics(function(inputs), f"ppo.loss: {name} must return a loss")
        if not isinstance(value, torch.Tensor) or value.shape != () or not value.requires_grad:
            found = getattr(value, "shape", value)
            raise InputError(f"ppo.loss: {name} must return a scalar with gradient; got {found!r:.80}")
        # On the device of the loss: `_Sums` stacks the numbers and reads all at once.
        numbers = {each: torch.as_tensor(number).to(value) for each, number in metrics.items()}
        return value, {f"user/{each}": number.reshape(()) for each, number in numbers.items()}

    return loss


def update_policy(
    engine: TrainingEngine,
    samples: Sequence[TrainSample],
    steps: Sequence[OptimizerStep],
    settings: UpdateSettings,
    pad_id: int,
    *,
    kl_coef: float = 0.0,
    demonstrations: Sequence[TokenSequence] = (),
) -> dict[str, float]:
    """Train the policy with the clipped surrogate, and the terms that are configured: entropy bonus, KL loss
    and pretraining loss.

    Args:
        engine: The policy.
        samples: Samples of this rank.
        steps: Optimizer steps with indices into `samples` and `demonstrations`.
        settings: Settings of the update.
        pad_id: Padding token.
        kl_coef: Coefficient of the KL loss, used with `kl.place: loss`.
        demonstrations: Demonstrations for the pretraining loss.

    Returns:
        The sums `loss`, `clipped`, `approx_kl`, `grad_norm`, `skipped` and `grad_nonfinite` (skipped steps
        that no loss scale explains), and `kl_loss` and `ptx_loss` if these losses exist.
    """
    sums = _Sums()

    def losses(step: OptimizerStep) -> Iterator[torch.Tensor]:
        for micro_batch in step.micro_batches:
            yield _policy_part(
                engine, samples, micro_batch, step.denominator, settings, pad_id, kl_coef, sums
            )
        for micro_batch in step.ptx_micro_batches:
            assert settings.ptx_coef is not None
            batch = collate([demonstrations[i] for i in micro_batch], pad_id=pad_id, pack=settings.pack)
            # At temperature 1, as in SFT: demonstrations are not samples of the policy.
            logprobs_N = engine(batch.to(engine.rank.torch_device)).logprobs_N
            # `collate` selects the targets only, so nothing is masked.
            loss = sft_loss(logprobs_N, torch.ones_like(logprobs_N), denominator=step.ptx_targets)
            sums.add("ptx_loss", loss)
            yield settings.ptx_coef * loss

    for step in steps:
        sums.end_step(engine, engine.train_step(losses(step), settings.policy_steps))
    return dict(sums.values)


def _policy_part(
    engine: TrainingEngine,
    samples: Sequence[TrainSample],
    micro_batch: list[int],
    denominator: float,
    settings: UpdateSettings,
    pad_id: int,
    kl_coef: float,
    sums: _Sums,
) -> torch.Tensor:
    """Return the loss of one micro-batch, and add its metrics to `sums`."""
    batch, chosen = _batch(engine, samples, micro_batch, settings, pad_id)
    output = engine(batch, settings.temperature, settings.entropy_coef > 0)
    if not micro_batch:
        # Every rank must take part in the collectives of the backward pass.
        zero: torch.Tensor = 0.0 * output.logprobs_N.sum()
        return zero
    inputs = LossInputs(
        logprobs_BT=_rows(output.logprobs_N, batch),
        old_logprobs_BT=_stack([s.old_logprobs for s in chosen], batch),
        ref_logprobs_BT=_stack([s.ref_logprobs for s in chosen], batch),
        advantages_BT=_stack([s.advantages for s in chosen], batch),
        weights_BT=_stack([s.weights for s in chosen], batch),
        mask_BT=_mask(chosen, batch),
        aggregation=settings.aggregation,
        denominator=denominator,
    )
    mean: dict[str, Any] = {"aggregation": settings.aggregation, "denominator": denominator}
    loss, metrics = settings.loss(inputs)
    sums.add("loss", loss)
    for name, value in metrics.items():
        # Means over the tokens of a micro-batch can be added only with their weights.
        sums.add(name, value, _tokens(chosen))
    if settings.entropy_coef > 0:
        bonus = entropy_bonus(_rows(output.entropy_N, batch), inputs.mask_BT, **mean)
        loss = loss - settings.entropy_coef * bonus
    if settings.kl_estimator is not None:
        kl = kl_loss(
            inputs.logprobs_BT, inputs.ref_logprobs_BT, inputs.mask_BT, settings.kl_estimator, **mean
        )
        sums.add("kl_loss", kl)
        loss = loss + kl_coef * kl
    return loss


def update_critic(
    engine: TrainingEngine,
    samples: Sequence[TrainSample],
    steps: Sequence[OptimizerStep],
    settings: UpdateSettings,
    pad_id: int,
    *,
    clip_values: bool = True,
) -> dict[str, float]:
    """Train the critic with the squared error.

    Args:
        engine: The critic.
        samples: Experience of this rank.
        steps: Optimizer steps, each with micro-batches of indices into `samples`.
        settings: Settings of the update.
        pad_id: The token that fills rows.
        clip_values: Whether a change of the value is clipped by `ppo.value_clip`.

    Returns:
        The sums `loss`, `clipped`, `grad_norm`, `skipped` and `grad_nonfinite`.
    """
    sums = _Sums()

    def losses(step: OptimizerStep) -> Iterator[torch.Tensor]:
        for micro_batch in step.micro_batches:
            batch, chosen = _batch(engine, samples, micro_batch, settings, pad_id)
            values_N = engine(batch, "tokens")
            if not micro_batch:
                # As in `_policy_part`.
                yield 0.0 * values_N.sum()
                continue
            mask_BT = _mask(chosen, batch)
            result = value_loss(
                _rows(values_N, batch),
                _stack([s.old_values for s in chosen], batch),
                _stack([s.returns for s in chosen], batch),
                mask_BT,
                clip=settings.value_clip if clip_values else None,
                aggregation=settings.aggregation,
                denominator=step.denominator,
            )
            sums.add("loss", result.loss)
            sums.add("clipped", result.clip_fraction, _tokens(chosen))
            yield result.loss

    for step in steps:
        sums.end_step(engine, engine.train_step(losses(step), settings.critic_steps))
    return dict(sums.values)


class _Sums:
    """Sums of metrics. Reading a number waits for the GPU, so those of the micro-batches are read at the end
    of the optimizer step.
    """

    def __init__(self) -> None:
        self.values: defaultdict[str, float] = defaultdict(float)
        self._unread: list[tuple[str, torch.Tensor, int]] = []

    def add(self, name: str, value: torch.Tensor, factor: int = 1) -> None:
        """Add a scalar of a micro-batch, times `factor`."""
        self._unread.append((name, value.detach(), factor))

    def end_step(self, engine: TrainingEngine, norm: float) -> None:
        """Add what the micro-batches gave, in their order, and the gradient norm, or count a skipped step."""
        if self._unread:
            names, scalars, factors = zip(*self._unread, strict=True)
            for name, value, factor in zip(names, torch.stack(scalars).tolist(), factors, strict=True):
                self.values[name] += value * factor
        self._unread.clear()
        if math.isfinite(norm):
            self.values["grad_norm"] += norm
        else:
            # A float16 loss scale skips steps on purpose; `grad_nonfinite` counts those that it does not
            # explain.
            self.values["skipped"] += 1
            self.values["grad_nonfinite"] += engine.grad_nonfinite


def _batch(
    engine: TrainingEngine,
    samples: Sequence[TrainSample],
    micro_batch: list[int],
    settings: UpdateSettings,
    pad_id: int,
) -> tuple[TokenBatch, list[TrainSample]]:
    chosen = [samples[i] for i in micro_batch]
    sequences = [TokenSequence.of(s.prompt_ids, s.response_ids) for s in chosen]
    return collate(sequences, pad_id=pad_id, pack=settings.pack).to(engine.rank.torch_device), chosen


def _rows(values_N: torch.Tensor, batch: TokenBatch) -> torch.Tensor:
    """Reshape (N,) to (B, T), with zeros after each response."""
    return pad_sequence(batch.split(values_N), batch_first=True)


def _stack(arrays: Sequence[Any], batch: TokenBatch) -> torch.Tensor:
    return to_device(padded(arrays), batch.input_ids_BL.device)


def _tokens(chosen: Sequence[TrainSample]) -> int:
    return sum(len(sample.response_ids) for sample in chosen)


def _mask(chosen: Sequence[TrainSample], batch: TokenBatch) -> torch.Tensor:
    return _stack([np.ones(len(s.response_ids)) for s in chosen], batch).bool()
