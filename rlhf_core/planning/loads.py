"""Memory on each device, by phase of a stage.

sft, reward,    one model on `deepspeed.ranks` devices:        load -> backward -> step
judge, dpo
ppo             each group of `config.placement`:              load -> score -> backward -> step
                each GPU of the engines:                       rollout; `colocate: all`: the group's devices
evaluate        one frozen model at a time on `ranks` devices: load -> score; engines as in ppo
                (on the CPU, and without ppo: sample)
sample,         a local language model that labels or judges:  judge
evaluate
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Literal

from rlhf_core.config import PipelineConfig
from rlhf_core.config.address import MODEL_PATH, base_of
from rlhf_core.config.pipeline import TrainingStage
from rlhf_core.config.placement import TRAINED, Group, plan
from rlhf_core.config.placement import plan as plan_placement
from rlhf_core.config.training import DeepSpeedConfig, Packing, RewardConfig, SFTConfig, TrainingSection
from rlhf_core.errors import ModelError
from rlhf_core.models.folder import ModelFolder, config_of_base
from rlhf_core.models.shape import ModelShape, shape_from_config
from rlhf_core.pipeline import STAGES, StageName
from rlhf_core.planning.hardware import GIB, Device
from rlhf_core.planning.memory import (
    ENGINE_CONTEXT,
    NOTHING,
    Bytes,
    EngineMemory,
    ForwardPass,
    Model,
    asleep,
    engine_memory,
)

CONTEXT = {"cuda": 1.2 * GIB, "cpu": 0.8 * GIB}
"""Fixed memory of one process: CUDA's context, cuBLAS and NCCL; on the CPU the interpreter and its libraries.
"""
FRAGMENTATION = 1.05
"""Memory of CUDA's allocator relative to that of the tensors, after some were freed."""

PPO: StageName = "ppo"
EVALUATION: StageName = "evaluate"
"""The loads of all `evaluating_stages` are listed under this one."""
JUDGE = "language model"
"""Name of the load of a local language model that judges."""


@dataclass(frozen=True)
class DeviceLoad:
    """Memory in use on one device at the same time."""

    stage: StageName
    what: str
    """Roles, or `engine`."""
    phase: str
    devices: int
    """Number of devices with this load."""
    trainer: Bytes = NOTHING
    """Memory of the training rank."""
    engine: Bytes = NOTHING
    """Memory of an engine, within its share of the device."""
    device: str = "cuda"
    host: float = 0.0
    """Bytes of host memory for each of the devices (offload)."""

    @property
    def bytes(self) -> Bytes:
        """Memory of rank and engine, by kind."""
        return self.trainer + self.engine

    @cached_property
    def total(self) -> float:
        """All bytes on the device, including the fixed memory of the processes."""
        if self.device == "cpu":
            return self.bytes.total + CONTEXT["cpu"]
        slack = 1.0 if self.phase == "load" else FRAGMENTATION
        # Rank and engine are separate processes, and CUDA has a context for each.
        contexts = 0.0
        if self.trainer.total:
            contexts += CONTEXT["cuda"]
        if self.engine.total:
            contexts += ENGINE_CONTEXT
        return self.trainer.total * slack + contexts + self.engine.total


def evaluating_stages() -> list[StageName]:
    """Return the stages that sample with `evaluate.engines`. Their loads are those of `evaluate`."""
    return [name for name, stage in STAGES.items() if stage.uses_engines and name != PPO]


def stages_on_evaluation_ranks(config: PipelineConfig) -> list[StageName]:
    """Return the stages that compute on `evaluate.ranks`. At its end, PPO loads the files of an adapter
    there.
    """
    stages = evaluating_stages()
    if config.ppo.lora is not None:
        stages.append(PPO)
    return stages


def training_stages(config: PipelineConfig) -> list[StageName]:
    """Return the stages that train."""
    stages: list[StageName] = [*config.training_sections]
    if config.ppo.enabled:
        stages.append(PPO)
    return stages


def sequences_of_step(section: TrainingSection) -> int:
    """Return the sequences of one optimizer step: those of SFT, and two of each pair otherwise."""
    return section.batch_size if isinstance(section, SFTConfig) else 2 * section.batch_size


def device_loads(
    config: PipelineConfig,
    shape: ModelShape,
    device: Device,
    stages: Collection[StageName] = tuple(STAGES),
) -> tuple[DeviceLoad, ...]:
    """Return the memory on each device in each phase of `stages`."""
    loads: list[DeviceLoad] = []
    for stage in config.training_sections:
        if stage in stages:
            loads += stage_loads(config, shape, stage, device.kind)
    if config.ppo.enabled and PPO in stages:
        loads += _ppo(config, shape, device)
    if EVALUATION in stages:
        loads += _evaluate(config, shape, device.kind)
        loads += _engines_of_evaluation(config, shape, device)
    return tuple(loads)


def largest_pass(config: PipelineConfig, stage: TrainingStage) -> ForwardPass:
    """Return the largest micro-batch of one rank in a stage that trains one model.

    It has the configured number of tokens, more if one sequence (or a pair) is longer, and fewer if the
    rank's part of the batch is smaller.
    """
    section = config.training_sections[stage]
    if isinstance(section, SFTConfig):
        longest, budget = _longest_demonstration(config), section.micro_batch_tokens
    else:
        longest = config.limits.prompt + config.limits.response
        budget = max(section.micro_batch_tokens, 2 * longest)  # of a pair
    return _pass(config, longest, sequences_of_step(section) / section.deepspeed.ranks, budget, section.pack)


def largest_pass_of_ppo(
    config: PipelineConfig, *, update: bool = True, ranks: int | None = None
) -> ForwardPass:
    """Return the largest micro-batch of one rank of PPO.

    Args:
        config: Configuration of the pipeline.
        update: False for scoring.
        ranks: Number of ranks of the group; by default that of the policy.
    """
    ppo = config.ppo
    count = ppo.minibatch_size if update else ppo.rollout_batch_size
    share = count / (ranks or ppo.policy_deepspeed.ranks)
    return _pass(config, config.max_sequence_tokens, share, ppo.micro_batch_tokens, ppo.pack)


def _longest_demonstration(config: PipelineConfig) -> int:
    return max(config.limits.prompt + config.limits.response, config.limits.text)


def _pass(config: PipelineConfig, longest: int, share: float, budget: int, pack: Packing) -> ForwardPass:
    """Return a micro-batch of at most `budget` tokens, and no more sequences than the rank's `share`."""
    tokens = max(longest, min(budget, math.ceil(share) * longest))
    # `auto` counts as packed, which needs more memory (`Model._layer`).
    return ForwardPass(tokens, longest, pack is not False, config.model.attention)


def trained_model(
    config: PipelineConfig,
    shape: ModelShape,
    stage: TrainingStage,
    deepspeed: DeepSpeedConfig,
    kind: str = "cuda",
) -> Model:
    """Return the model that a stage trains.

    Args:
        config: Configuration of the pipeline.
        shape: Shape of the policy.
        stage: The stage.
        deepspeed: How the model is sharded.
        kind: "cuda" or "cpu".
    """
    section = config.training_sections[stage]
    return Model(
        shape_of_stage(config, stage, shape),
        deepspeed,
        scores=isinstance(section, RewardConfig),
        lora=section.lora,
        device=kind,
        head=config.model.head_dtype,
    )


def stage_loads(
    config: PipelineConfig, shape: ModelShape, stage: TrainingStage, kind: str
) -> Iterator[DeviceLoad]:
    """Yield the memory of each rank in each phase of a stage that trains one model."""
    model = trained_model(config, shape, stage, config.training_sections[stage].deepspeed, kind)
    what = "reward model" if model.scores else "policy"
    phases = {
        "load": model.loading,
        "backward": model.state + model.backward(largest_pass(config, stage)),
        "step": model.state + model.step,
    }
    for phase, load in phases.items():
        yield DeviceLoad(stage, what, phase, model.deepspeed.ranks, load, device=kind, host=model.host)


def _ppo(config: PipelineConfig, shape: ModelShape, device: Device) -> Iterator[DeviceLoad]:
    placement, engine = plan_placement(config.ppo), config.ppo.engine
    serving = engine_memory(shape, engine, device, config.model.head_dtype).bytes
    shared = placement.colocated and not device.is_cpu
    for group in placement.groups:
        yield from group_loads(config, shape, group, device.kind, serving if shared else None)
    if not shared:
        devices = engine.count * engine.tensor_parallel
        yield DeviceLoad(PPO, "engine", "rollout", devices, engine=serving, device=device.kind)


def group_loads(
    config: PipelineConfig, shape: ModelShape, group: Group, kind: str, serving: Bytes | None = None
) -> Iterator[DeviceLoad]:
    """Yield the memory of one group of PPO's training ranks in each phase.

    Args:
        config: Configuration of the pipeline.
        shape: Shape of all models.
        group: The ranks.
        kind: "cuda" or "cpu".
        serving: Memory of an engine on the same devices; None if there is none.
    """
    models = ppo_models(config, shape, group, kind)
    what = group.name if serving is None else f"{group.name}+engine"
    host = sum(model.host for model in models.values())
    # They use the devices in turns: the memory of both is never in use together.
    if serving is not None and config.ppo.engine.sleep_level:
        yield from _turn_loads(config, group, models, serving)
        return
    for phase, load in _phases(config, models, group.ranks).items():
        yield DeviceLoad(PPO, what, phase, group.ranks, load, serving or NOTHING, kind, host)


def _turn_loads(
    config: PipelineConfig, group: Group, models: dict[str, Model], serving: Bytes
) -> Iterator[DeviceLoad]:
    """Yield the memory of trainers and engines that use the devices in turns (`ppo.fleet.engine_pool`)."""
    engine, what = config.ppo.engine, f"{group.name}+engine"
    state, kept = NOTHING, NOTHING
    for model in models.values():
        state = state + model.state
        kept = kept + model.while_sampling
    host = sum(model.host for model in models.values()) + state.total - kept.total
    # At level 1 the weights of a sleeping engine are in host memory, at level 2 they are dropped.
    if engine.sleep_level == 1:
        host += serving.weights
    sleeping = asleep(engine)
    for phase, load in _phases(config, models, group.ranks).items():
        yield DeviceLoad(PPO, what, phase, group.ranks, load, sleeping, host=host)
    weights = sleeping + Bytes(weights=serving.weights)
    yield DeviceLoad(PPO, what, "sync", group.ranks, state, weights, host=host)
    yield DeviceLoad(PPO, what, "rollout", group.ranks, kept, serving, host=host)


def _evaluate(config: PipelineConfig, shape: ModelShape, kind: str) -> Iterator[DeviceLoad]:
    """Yield the memory of each rank that computes log-probabilities or scores (`evaluation.rank_scoring`).

    Of the policy, the reward model and the judge, that of the largest one.
    """
    ranks, longest = config.evaluate.ranks, config.max_sequence_tokens
    batch = ForwardPass(
        max(longest, config.ppo.micro_batch_tokens), longest, config.ppo.packs, config.model.attention
    )
    trained = {"policy": config.ppo.policy_deepspeed}
    if config.reward.enabled:
        trained["reward model"] = config.reward.deepspeed
    if config.reward.judge is not None:
        trained["judge"] = config.reward.of_judge.deepspeed
    loads_of_models = []
    for what, settings in trained.items():
        stage: Literal[0, 3] = 3 if settings.zero_stage == 3 and ranks > 1 else 0
        deepspeed = DeepSpeedConfig(ranks=ranks, zero_stage=stage, dtype=settings.dtype)
        own = shape_of_stage(config, "judge", shape) if what == "judge" else shape
        scores = what != "policy"
        model = Model(own, deepspeed, trained=False, scores=scores, device=kind, head=config.model.head_dtype)
        load = DeviceLoad(EVALUATION, what, "load", ranks, model.loading, device=kind)
        scoring = model.state + model.scoring(batch)
        loads_of_models.append((load, DeviceLoad(EVALUATION, what, "score", ranks, scoring, device=kind)))
    # Only one of the models is in memory at a time.
    yield from max(loads_of_models, key=lambda loads: max(load.total for load in loads))


def _engines_of_evaluation(config: PipelineConfig, shape: ModelShape, device: Device) -> Iterator[DeviceLoad]:
    engine = config.ppo.engine
    devices = config.evaluate.engines * engine.tensor_parallel
    # A GPU of an engine that samples has the load of PPO's, if there is PPO.
    if device.is_cpu or not config.ppo.enabled:
        serving = engine_memory(shape, engine, device, config.model.head_dtype).bytes
        yield DeviceLoad(EVALUATION, "engine", "sample", devices, engine=serving, device=device.kind)
    judge = judge_memory(config, device)
    if judge is not None:
        for stage in config.judging_stages:
            yield DeviceLoad(stage, JUDGE, "judge", devices, engine=judge.bytes, device=device.kind)


def shape_of_stage(config: PipelineConfig, stage: StageName, shape: ModelShape) -> ModelShape:
    """Return the shape of the model that a stage reads from outside: the base of a judge, or the teacher of
    PPO. It is `shape`, that of the policy, if there is none, or if it cannot be read here.
    """
    base = base_of(config, stage)
    if base is None or base.field == MODEL_PATH:
        return shape
    try:
        return shape_from_config(config_of_base(base, local_only=True))
    except ModelError:
        return shape


def judge_memory(config: PipelineConfig, device: Device) -> EngineMemory | None:
    """Return the memory of an engine with the local language model that judges.

    None if there is none, or if its config.json is not on this machine or has an unknown architecture.
    """
    judge = config.evaluate.language_model
    if judge is None or judge.path is None:
        return None
    try:
        return engine_memory(ModelFolder(judge.path).shape, config.ppo.engine, device)
    except ModelError:
        return None


def ppo_models(
    config: PipelineConfig, shape: ModelShape, group: Group, kind: str = "cuda"
) -> dict[str, Model]:
    """Return the models that a rank of the group holds, by role. The members of an ensemble of reward models
    after the first are `reward member 1` and so on.

    With adapters, the reference is the policy with its adapter off, if both share a process and there is no
    teacher, and the reward model the critic with its adapter off. These roles have no model of their own.
    """
    ppo, models = config.ppo, dict[str, Model]()
    for role in group.roles:
        trained, scores = role in TRAINED, role in ("critic", "reward")
        if group.adapted_from(role, ppo) is not None:
            continue
        average = role == "policy" and ppo.ema_decay is not None
        lora = ppo.lora if trained else None
        own = shape_of_stage(config, "ppo", shape) if role == "reference" else shape
        models[role] = Model(
            own, group.deepspeed(role, ppo), trained, scores, lora, average, kind, config.model.head_dtype
        )
    if "reward" not in group.roles:
        return models
    frozen = partial(Model, deepspeed=group.deepspeed("reward", ppo), trained=False, scores=True, device=kind)
    for number in range(1, config.reward.members):
        models[f"reward member {number}"] = frozen(shape)
    if config.judge_in_ppo:
        models["judge"] = frozen(shape_of_stage(config, "judge", shape))
    return models


def _phases(config: PipelineConfig, models: dict[str, Model], ranks: int) -> dict[str, Bytes]:
    """Return the memory of one group in each phase.

    Its roles are loaded and compute one after the other, and all of them stay in memory.
    """
    resting, loading = NOTHING, NOTHING
    for model in models.values():
        loading = max(loading, resting + model.loading, key=lambda load: load.total)
        resting = resting + model.state
    scoring = largest_pass_of_ppo(config, update=False, ranks=ranks)
    update = largest_pass_of_ppo(config, ranks=ranks)
    updates = dict.fromkeys(models, update)
    ppo = config.ppo
    if ppo.ptx is not None and "policy" in models:
        share = ppo.ptx.batch_size / ppo.policy_deepspeed.ranks
        longest = _longest_demonstration(config)
        demonstrations = _pass(config, longest, share, ppo.micro_batch_tokens, ppo.pack)
        updates["policy"] = max(update, demonstrations, key=lambda batch: batch.tokens)
    trained = {role: model for role, model in models.items() if model.trained}
    computing = {
        "score": [model.scoring(scoring) for model in models.values()],
        "backward": [model.backward(updates[role]) for role, model in trained.items()],
        "step": [model.step for model in trained.values()],
    }
    phases = {"load": loading}
    for phase, loads in computing.items():
        if loads:
            phases[phase] = resting + max(loads, key=lambda load: load.total)
    return phases


# -- size of checkpoints: trained weights, the optimizer's state and copies of the weights --


def checkpoint_sizes(config: PipelineConfig, shape: ModelShape) -> dict[StageName, int]:
    """Return the bytes of a checkpoint of each training stage: of each trained parameter its weight in the
    precision of training, the optimizer's state, and the copies that are kept. Weights that are frozen under
    an adapter are not part of a checkpoint.
    """
    sizes: dict[StageName, int] = {}
    for stage in training_stages(config):
        sizes[stage] = 0
        for model, best in _trained(config, shape, stage):
            each = checkpoint_bytes(model.size, model.stage, average=model.average, best=best)
            sizes[stage] += model.trainable * each
    for name, section in config.training_sections.items():
        if isinstance(section, RewardConfig):
            # With an ensemble, the last member's checkpoints also have the other members, as they are saved.
            model = trained_model(config, shape, name, section.deepspeed)
            sizes[name] += (section.members - 1) * model.size * model.parameters
    return sizes


def checkpoint_bytes(size: int, zero_stage: int, *, average: bool, best: bool) -> int:
    """Return the bytes of a trained parameter of `size` bytes in a checkpoint: its weight, the optimizer's
    state, and if they are kept, a float32 moving average and the best weights so far.
    """
    return size + state_bytes(size, zero_stage) + 4 * average + size * best


def _trained(config: PipelineConfig, shape: ModelShape, stage: StageName) -> Iterator[tuple[Model, bool]]:
    """Yield the models that a stage trains, and whether its checkpoints have their best weights so far."""
    if stage == PPO:
        for group in plan(config.ppo).groups:
            for role, model in ppo_models(config, shape, group).items():
                if model.trained:
                    yield model, role == "policy" and config.ppo.publish == "best"
    for name, section in config.training_sections.items():
        if name == stage:
            yield trained_model(config, shape, name, section.deepspeed), section.early_stop is not None


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
    # ZeRO 0 divides nothing, 1 and 2 divide the optimizer's state, and 3 divides the weights as well.
    return (weights + states, weights, weights, 0)[zero_stage]
