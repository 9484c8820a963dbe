"""Seconds of one PPO step, phase by phase, from arithmetic and bandwidth at an assumed utilisation."""

from __future__ import annotations

import math
from dataclasses import dataclass

from rlhf_core.config import PipelineConfig
from rlhf_core.config.placement import plan
from rlhf_core.planning.hardware import Device
from rlhf_core.planning.shape import ModelShape

TRAINING_MFU = 0.35
SCORING_MFU = 0.45
DECODE_BANDWIDTH = 0.6
LINK = 0.5
"""Shares of the data sheet's figures that are assumed to be reached."""
OFFLOAD_BYTES = 12e9
"""Bytes a second between device and host memory, for offloaded optimizer state."""


@dataclass(frozen=True)
class StepTime:
    """Seconds."""

    rollout: float
    scoring: float
    training: float
    sync: float

    @property
    def total(self) -> float:
        return self.rollout + self.scoring + self.training + self.sync


def step_time(config: PipelineConfig, shape: ModelShape, device: Device) -> StepTime:
    """Of one PPO iteration with every sequence at its length limit."""
    ppo = config.ppo
    sequences, length = ppo.rollout_batch_size, config.max_sequence_tokens
    tokens = sequences * length
    forward = 2.0 * shape.parameters * tokens + _attention_flops(shape, sequences, length)
    groups = plan(ppo).groups
    roles = {role: group.ranks for group in groups for role in group.roles}

    def seconds(flops: float, ranks: int, utilisation: float) -> float:
        return flops / (ranks * device.flops * utilisation)

    # Groups work at the same time; roles of one group one after the other.
    scoring = max(len(group.roles) * seconds(forward, group.ranks, SCORING_MFU) for group in groups)
    passes = ppo.epochs * (4.0 if ppo.policy_deepspeed.gradient_checkpointing else 3.0)
    trained = ["policy", *(["critic"] if ppo.uses_critic else [])]
    per_role = []
    for role in trained:
        deepspeed = ppo.policy_deepspeed if role == "policy" else ppo.critic_deepspeed
        steps = ppo.epochs * ppo.minibatches
        moved = 2.0 * 4.0 * shape.parameters / deepspeed.ranks * steps / OFFLOAD_BYTES
        per_role.append(
            seconds(passes * forward, roles[role], TRAINING_MFU)  # type: ignore[index]
            + (moved if deepspeed.offload == "optimizer" else 0.0)
        )
    training = sum(per_role) if ppo.colocate == "all" else max(per_role)
    weight_bytes = shape.parameters * (4 if ppo.engine.dtype == "float32" else 2)
    return StepTime(_rollout(config, shape, device), scoring, training, weight_bytes / (device.link * LINK))


def _attention_flops(shape: ModelShape, sequences: int, length: int) -> float:
    """Causal scores and their sum over values, forward."""
    return 2.0 * sequences * length**2 * shape.heads * shape.head_dim * shape.layers


def _rollout(config: PipelineConfig, shape: ModelShape, device: Device) -> float:
    """Prefill by arithmetic, decoding by reading weights and KV cache once a token."""
    ppo, engine = config.ppo, config.ppo.engine
    size = 4 if engine.dtype == "float32" else 2
    per_engine = math.ceil(ppo.rollout_batch_size / engine.count)
    waves = math.ceil(per_engine / engine.max_num_seqs)
    at_once = math.ceil(per_engine / waves)
    prefill = 2.0 * shape.parameters * per_engine * config.data.max_prompt_tokens
    mean_context = config.data.max_prompt_tokens + ppo.max_new_tokens / 2
    read = shape.parameters * size + at_once * mean_context * shape.kv_width * size
    bandwidth = device.bandwidth * engine.tensor_parallel * DECODE_BANDWIDTH
    decode = waves * ppo.max_new_tokens * read / bandwidth
    return prefill / (device.flops * engine.tensor_parallel * SCORING_MFU) + decode
