"""Size of a stage's checkpoints: the weights that are trained, the optimizer's state and further copies of
the weights (`bytes_per_parameter`).
"""

from __future__ import annotations

from collections.abc import Iterator

from rlhf_core.config import PipelineConfig
from rlhf_core.config.placement import plan
from rlhf_core.config.training import DeepSpeedConfig, RewardConfig
from rlhf_core.models.shape import ModelShape
from rlhf_core.pipeline import StageName
from rlhf_core.planning.loads import PPO, ppo_models, settings_stage, trained_model, training_stages
from rlhf_core.planning.memory import Model, dtype_bytes


def checkpoint_sizes(config: PipelineConfig, shape: ModelShape) -> dict[StageName, int]:
    """Return the bytes of a checkpoint of each training stage."""
    sizes: dict[StageName, int] = {}
    for stage in training_stages(config):
        sizes[stage], _ = checkpoint_bytes(config, shape, stage)
    for name, section in config.training_sections.items():
        if isinstance(section, RewardConfig):
            # With an ensemble, the last member's checkpoints also have the other members, as they are saved.
            model = trained_model(config, shape, name, section.deepspeed)
            sizes[name] += (section.members - 1) * model.size * model.parameters
    return sizes


def _trained(config: PipelineConfig, shape: ModelShape, stage: StageName) -> Iterator[tuple[Model, bool]]:
    """Yield the models that a stage trains, and whether its checkpoints have their best weights so far."""
    if stage == PPO:
        for group in plan(config.ppo).groups:
            for role, model in ppo_models(config, shape, group).items():
                if model.trained:
                    yield model, keeps_best(config, role)
    settings = settings_stage(config, stage)
    for name, section in config.training_sections.items():
        if name == settings:
            yield trained_model(config, shape, name, section.deepspeed), section.early_stop is not None


def bytes_per_parameter(deepspeed: DeepSpeedConfig, *, average: bool = False, best: bool = False) -> int:
    """Return the bytes of a trained parameter in a checkpoint: its weight in the precision of training, the
    optimizer's state, and copies. Weights that are frozen under an adapter are not part of a checkpoint.

    Args:
        deepspeed: Precision and sharding.
        average: Whether a float32 moving average of the weights is kept.
        best: Whether the best weights so far are kept.
    """
    size = dtype_bytes(deepspeed.dtype)
    return size + state_bytes(size, deepspeed.zero_stage) + 4 * average + size * best


def state_bytes(size: int, zero_stage: int) -> int:
    """Return the bytes of a parameter's two moments of Adam, and of its float32 weight if that is separate.

    Without ZeRO, float32 weights have no separate master copy.

    Args:
        size: Bytes of the weight itself.
        zero_stage: The ZeRO stage.
    """
    return 12 if size < 4 or zero_stage else 8


def unsharded_bytes(weights: int, states: int, zero_stage: int) -> int:
    """Return how many bytes of a trained model's checkpoint only rank 0 writes. All ranks write equal parts
    of the others.

    Args:
        weights: Bytes of the weights and of their copies.
        states: Bytes of the optimizer's state.
        zero_stage: The ZeRO stage.
    """
    return (weights + states, weights, weights, 0)[zero_stage]


def checkpoint_bytes(config: PipelineConfig, shape: ModelShape, stage: StageName) -> tuple[int, int]:
    """Return the bytes of a checkpoint that all ranks of a stage write, and those of them that only ranks 0
    write. Both are 0 for a stage without checkpoints.
    """
    every = unsharded = 0
    for model, best in _trained(config, shape, stage):
        size = model.trainable * bytes_per_parameter(model.deepspeed, average=model.average, best=best)
        states = model.trainable * state_bytes(model.size, model.stage)
        every += size
        unsharded += unsharded_bytes(size - states, states, model.stage)
    return every, unsharded


def keeps_best(config: PipelineConfig, role: str) -> bool:
    """Return whether PPO's checkpoints of this role have the best weights so far."""
    return role == "policy" and config.ppo.publish == "best"
