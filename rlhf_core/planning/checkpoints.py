"""Size of a stage's checkpoints, and the time that each host needs to hash and to upload its part.

A checkpoint has the weights, and with all parameters trained also the optimizer's state, 12 bytes for each
trained parameter. With ZeRO, every rank writes its part, and each host hashes and uploads those of its ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from rlhf_core.config import PipelineConfig
from rlhf_core.config.placement import plan
from rlhf_core.models.shape import ModelShape
from rlhf_core.planning.hardware import Hardware
from rlhf_core.planning.layout import arrange
from rlhf_core.planning.loads import ppo_models
from rlhf_core.planning.memory import Model

HASH_BYTES = 1.5e9
"""Bytes of a host that one thread hashes in a second (sha256 with the instructions of the CPU, measured)."""
UPLOAD_BYTES = 0.3e9
"""Bytes a second that one host uploads to a bucket (assumed)."""


@dataclass(frozen=True)
class CheckpointSize:
    """A checkpoint of one stage."""

    stage: str
    bytes: float
    per_host: float
    """Bytes of the host with the largest part."""

    @property
    def hash_seconds(self) -> float:
        return self.per_host / HASH_BYTES

    @property
    def upload_seconds(self) -> float:
        return self.per_host / UPLOAD_BYTES


def checkpoint_sizes(
    config: PipelineConfig, shape: ModelShape, hardware: Hardware
) -> Iterator[CheckpointSize]:
    """Yield the checkpoint of each training stage."""
    sft = Model(shape, config.sft.deepspeed, lora=config.sft.lora)
    yield _size("sft", [(sft, 0)], [sft.deepspeed.ranks], hardware)
    if config.reward.enabled:
        reward = Model(shape, config.reward.deepspeed, scores=True, lora=config.reward.lora)
        yield _size("reward", [(reward, 0)], [reward.deepspeed.ranks], hardware)
    groups = plan(config.ppo).groups
    models = [
        (model, index)
        for index, group in enumerate(groups)
        for model in ppo_models(config, shape, group).values()
        if model.trained
    ]
    yield _size("ppo", models, [group.ranks for group in groups], hardware)


def model_bytes(model: Model) -> float:
    """Return the bytes of a trained model's checkpoint: weights in the precision of training, and 12 bytes of
    state for each trained parameter. With adapters, the frozen weights are not part of it.
    """
    state = 12 if model.size == 2 or model.stage else 8
    average = 4 * model.parameters if model.average else 0
    return (model.size + state) * model.trainable + average


def _size(
    stage: str, models: list[tuple[Model, int]], ranks: list[int], hardware: Hardware
) -> CheckpointSize:
    groups, _ = arrange(ranks, hardware)
    total, parts = 0.0, dict[int, float]()
    first = 0
    starts = []
    for count in ranks:
        starts.append(first)
        first += count
    for model, index in models:
        size = model_bytes(model)
        total += size
        for host in groups[index]:
            begin = max(starts[index], host * hardware.per_host)
            end = min(starts[index] + ranks[index], (host + 1) * hardware.per_host)
            # Without ZeRO, rank 0 writes everything.
            share = (end - begin) / ranks[index] if model.stage else float(begin == starts[index])
            parts[host] = parts.get(host, 0.0) + share * size
    return CheckpointSize(stage, total, max(parts.values(), default=0.0))
