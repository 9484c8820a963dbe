"""Size of a stage's checkpoints: the weights that are trained, the optimizer's state and further copies of
the weights (`bytes_per_parameter`).
"""

from __future__ import annotations

from rlhf_core.config import PipelineConfig
from rlhf_core.config.pipeline import TrainingStage
from rlhf_core.config.placement import Group, plan
from rlhf_core.config.training import DeepSpeedConfig
from rlhf_core.models.shape import ModelShape
from rlhf_core.pipeline import StageName
from rlhf_core.planning.loads import PPO, ppo_models, settings_stage, trained_model
from rlhf_core.planning.memory import Model, dtype_bytes


def checkpoint_sizes(config: PipelineConfig, shape: ModelShape) -> dict[StageName, int]:
    """Return the bytes of a checkpoint of each training stage."""
    sizes: dict[StageName, int] = {}
    for stage, section in config.training_sections.items():
        sizes[stage], _ = checkpoint_bytes(config, shape, stage)
        if section is config.reward:
            # With an ensemble, the last member's checkpoints also have the other members, as they are saved.
            model, _ = _saved(config, shape, stage)
            sizes[stage] += (config.reward.members - 1) * model.size * model.parameters
    if config.ppo.enabled:
        sizes[PPO], _ = checkpoint_bytes(config, shape, PPO)
    return sizes


def _saved(config: PipelineConfig, shape: ModelShape, stage: TrainingStage) -> tuple[Model, int]:
    """Return the model that a stage trains, and the bytes of its checkpoint."""
    section = config.training_sections[stage]
    model = trained_model(config, shape, stage, section.deepspeed)
    return model, model_bytes(model, best=getattr(section, "early_stop", None) is not None)


def _saved_by_group(config: PipelineConfig, shape: ModelShape, group: Group) -> list[tuple[Model, int]]:
    """Return the models that a group of PPO trains, each with the bytes of its checkpoint."""
    return [
        (model, model_bytes(model, best=keeps_best(config, role)))
        for role, model in ppo_models(config, shape, group).items()
        if model.trained
    ]


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


def model_bytes(model: Model, *, best: bool = False) -> int:
    """Return the bytes of a trained model's checkpoint. See `bytes_per_parameter`."""
    return model.trainable * bytes_per_parameter(model.deepspeed, average=model.average, best=best)


def unsharded_bytes(weights: int, states: int, zero_stage: int) -> int:
    """Return how many bytes of a trained model's checkpoint only rank 0 writes. All ranks write equal parts
    of the others.

    Args:
        weights: Bytes of the weights and of their copies.
        states: Bytes of the optimizer's state.
        zero_stage: The ZeRO stage.
    """
    return (weights + states, weights, weights, 0)[zero_stage]


def _unsharded(model: Model, size: int) -> int:
    """Return `unsharded_bytes` for the `size` bytes of a trained model's checkpoint."""
    states = model.trainable * state_bytes(model.size, model.stage)
    return unsharded_bytes(size - states, states, model.stage)


def checkpoint_bytes(config: PipelineConfig, shape: ModelShape, stage: StageName) -> tuple[int, int]:
    """Return the bytes of a checkpoint that all ranks of a stage write, and those of them that only ranks 0
    write. Both are 0 for a stage without checkpoints.
    """
    settings = settings_stage(config, stage)
    models = [_saved(config, shape, name) for name in config.training_sections if name == settings]
    if stage == PPO:
        models = [each for group in plan(config.ppo).groups for each in _saved_by_group(config, shape, group)]
    return sum(size for _, size in models), sum(_unsharded(*each) for each in models)


def keeps_best(config: PipelineConfig, role: str) -> bool:
    """Return whether PPO's checkpoints of this role have the best weights so far."""
    return role == "policy" and config.ppo.publish == "best"
