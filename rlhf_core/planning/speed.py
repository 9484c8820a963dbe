"""Estimated seconds of each phase of a PPO step, and of an optimizer step of SFT and reward model.

Arithmetic, memory and links reach an assumed share of the figures in the data sheets. Every sequence has the
maximum length.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from rlhf_core.config import PipelineConfig
from rlhf_core.config.placement import plan
from rlhf_core.models.shape import ModelShape
from rlhf_core.planning.hardware import Device
from rlhf_core.planning.loads import largest_pass, ppo_models
from rlhf_core.planning.memory import Model, engine_memory

TRAINING_MFU = 0.35
SCORING_MFU = 0.45
DECODE_BANDWIDTH = 0.6
LINK = 0.5
"""Assumed shares of the data sheet's figures."""
LAUNCH = 0.3e-3
"""Seconds to launch the kernels of one layer for one token, without CUDA graphs."""
OFFLOAD_BYTES = 12e9
"""Bytes a second between device and host memory, for offloaded optimizer state."""


@dataclass(frozen=True)
class StepTime:
    """Seconds of each phase of a PPO step."""

    rollout: float
    scoring: float
    training: float
    sync: float

    @property
    def total(self) -> float:
        return self.rollout + self.scoring + self.training + self.sync


def step_time(config: PipelineConfig, shape: ModelShape, device: Device) -> StepTime:
    """Return the time of one PPO step.

    The groups compute at the same time, and the roles of one group one after the other.
    """
    ppo, length = config.ppo, config.max_sequence_tokens
    count, optimizer_steps = ppo.rollout_batch_size, ppo.epochs * ppo.minibatches
    budget = largest_pass(config, "ppo").tokens
    scoring, training = [], []
    for group in plan(ppo).groups:
        models = ppo_models(config, shape, group)
        # With adapters, a role without a model of its own also makes a forward pass.
        model = models.get("policy") or next(iter(models.values()))
        forward = _seconds(_forward(shape, count, length), group.ranks, device, SCORING_MFU)
        gathering = _gathering(model, count * length, budget, device)
        scoring.append(len(group.roles) * forward + len(group.roles) * gathering)
        seconds = 0.0
        for model in models.values():
            if model.trained:
                step = optimizer_step_time(model, ppo.minibatch_size, length, budget, device)
                seconds += optimizer_steps * step
        training.append(seconds)
    return StepTime(
        _rollout(config, shape, device), max(scoring), max(training), _sync(config, shape, device)
    )


def optimizer_step_time(model: Model, sequences: int, length: int, budget: int, device: Device) -> float:
    """Return the time of forward and backward passes over `sequences`, of communication, and of the step.

    Args:
        model: The trained model.
        sequences: Number of sequences over all ranks.
        length: Tokens of each sequence.
        budget: Tokens of a micro-batch.
        device: Device of each rank.
    """
    n, deepspeed = model.deepspeed.ranks, model.deepspeed
    # The backward pass costs two forward passes, one of them for the gradients of weights, which adapters do
    # not need.
    passes = (3.0 if model.lora is None else 2.0) + deepspeed.gradient_checkpointing
    seconds = passes * _seconds(_forward(model.shape, sequences, length), n, device, TRAINING_MFU)
    micro_batches = math.ceil(sequences * length / n / budget)
    if n > 1:
        # Reduced after every micro-batch; ZeRO-1 and 2 then gather the weights that each rank has updated.
        reduced = (2.0 if deepspeed.zero_stage < 2 else 1.0) * micro_batches
        if deepspeed.zero_stage in (1, 2):
            reduced += 1.0
        seconds += reduced * model.size * model.trainable * (n - 1) / n / (device.link * LINK)
        seconds += 2 * _gathering(model, sequences * length, budget, device)
    # Offloaded weights are copied to the device for each forward and each backward pass. With an offloaded
    # optimizer, gradients are copied to the host and new weights to the device once.
    if model.weights_offloaded:
        seconds += micro_batches * 2 * model.size * model.parameters / n / OFFLOAD_BYTES
    if model.offloaded:
        seconds += 2 * 4.0 * model.trainable / n / OFFLOAD_BYTES
    return seconds


def _forward(shape: ModelShape, sequences: int, length: int) -> float:
    """Return the operations of a forward pass: two for each weight and token, and causal attention."""
    attention = 2.0 * sequences * length**2 * shape.query * shape.layers
    return 2.0 * shape.parameters * sequences * length + attention


def _seconds(flops: float, ranks: int, device: Device, utilisation: float) -> float:
    return flops / (ranks * device.flops * utilisation)


def _gathering(model: Model, tokens: int, budget: int, device: Device) -> float:
    """Return the seconds in which ZeRO-3 gathers all weights for every micro-batch."""
    n = model.deepspeed.ranks
    if model.stage < 3 or n == 1:
        return 0.0
    return math.ceil(tokens / n / budget) * model.size * model.parameters * (n - 1) / n / (device.link * LINK)


def _sync(config: PipelineConfig, shape: ModelShape, device: Device) -> float:
    """Return the seconds to send the weights, or the adapter alone, over the link to the engines."""
    ppo = config.ppo
    parameters = shape.parameters
    if ppo.lora is not None and ppo.syncs_adapter:
        parameters = shape.adapter_parameters(ppo.lora.r, ppo.lora.targets)
    return parameters * (4 if ppo.engine.dtype == "float32" else 2) / (device.link * LINK)


def _rollout(config: PipelineConfig, shape: ModelShape, device: Device) -> float:
    """Return the seconds of generating all responses of a step.

    Prefill is limited by arithmetic. Decoding reads the weights and the KV cache once per token, for as many
    sequences at a time as the cache holds.
    """
    ppo, engine = config.ppo, config.ppo.engine
    size = 4 if engine.dtype == "float32" else 2
    per_engine = math.ceil(ppo.rollout_batch_size / engine.count)
    capacity = (
        engine_memory(shape, engine, device, config.model.head_dtype).tokens // config.max_sequence_tokens
    )
    waves = math.ceil(per_engine / max(1, min(engine.max_num_seqs, capacity)))
    concurrent = math.ceil(per_engine / waves)
    prefill = _forward(shape, per_engine, config.data.max_prompt_tokens)
    mean_context = config.data.max_prompt_tokens + ppo.max_new_tokens / 2
    read = shape.parameters * size + concurrent * mean_context * 2 * shape.layers * shape.kv * size
    bandwidth = device.bandwidth * engine.tensor_parallel * DECODE_BANDWIDTH
    arithmetic = 2.0 * shape.parameters * concurrent / (device.flops * engine.tensor_parallel * SCORING_MFU)
    token = max(read / bandwidth, arithmetic)
    if engine.enforce_eager:
        token += LAUNCH * shape.layers
    return _seconds(prefill, engine.tensor_parallel, device, SCORING_MFU) + waves * ppo.max_new_tokens * token
