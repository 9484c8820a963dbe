"""Who lies on which device in each phase of a stage, and how much of it that takes.

sft, reward     one model on `deepspeed.ranks` devices:        load -> backward -> step
ppo             each group of `config.placement`:              load -> score -> backward -> step
                each GPU of the engines:                       rollout; with `colocate: all` beside the group
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from rlhf_core.config import PipelineConfig
from rlhf_core.config.placement import Group, Role
from rlhf_core.config.placement import plan as place
from rlhf_core.models.shape import ModelShape
from rlhf_core.pipeline import StageName
from rlhf_core.planning.hardware import GIB, Device
from rlhf_core.planning.memory import ENGINE_CONTEXT, NOTHING, Bytes, ForwardPass, Model, engine_memory

CONTEXT = {"cuda": 1.2 * GIB, "cpu": 0.8 * GIB}
"""Of one process, whatever it computes: CUDA's context, cuBLAS and NCCL; on the CPU the interpreter and its
libraries.
"""
FRAGMENTATION = 1.05
"""What CUDA's allocator holds beyond what tensors need, once they come and go."""


@dataclass(frozen=True)
class DeviceLoad:
    """All that lies on one device at the same time."""

    stage: StageName
    what: str
    """Roles, or `engine`."""
    phase: str
    devices: int
    """How many devices look like this."""
    trainer: Bytes = NOTHING
    """Of the training rank."""
    engine: Bytes = NOTHING
    """Of an engine, whose share has room for all it needs."""
    device: str = "cuda"
    host: float = 0.0
    """Bytes in host memory for each of them (offload)."""

    @property
    def bytes(self) -> Bytes:
        """What lies there, by kind."""
        return self.trainer + self.engine

    @property
    def total(self) -> float:
        """With the processes themselves."""
        if self.device == "cpu":
            return self.bytes.total + CONTEXT["cpu"]
        slack = 1.0 if self.phase == "load" else FRAGMENTATION
        contexts = (CONTEXT["cuda"] if self.trainer.total else 0.0) + (
            ENGINE_CONTEXT if self.engine.total else 0.0
        )
        return self.trainer.total * slack + contexts + self.engine.total


def device_loads(config: PipelineConfig, shape: ModelShape, device: Device) -> tuple[DeviceLoad, ...]:
    """Of all stages, phase by phase."""
    kind = "cpu" if device.is_cpu else "cuda"
    return (*_sft(config, shape, kind), *_reward(config, shape, kind), *_ppo(config, shape, device, kind))


def largest_pass(config: PipelineConfig, stage: str, *, update: bool = True) -> ForwardPass:
    """The most tokens that one rank computes on at a time: the budget, or one sequence (a pair) that is
    longer, or fewer where the whole batch is smaller. `update` False: PPO's scoring.
    """
    data, ppo = config.data, config.ppo
    if stage == "sft":
        longest = max(data.max_prompt_tokens + data.max_response_tokens, data.max_text_tokens or 0)
        count, ranks, budget = (
            config.sft.batch_size,
            config.sft.deepspeed.ranks,
            config.sft.micro_batch_tokens,
        )
        packed = config.sft.pack is not False
    elif stage == "reward":
        longest = data.max_prompt_tokens + data.max_response_tokens
        count, ranks = 2 * config.reward.batch_size, config.reward.deepspeed.ranks
        budget, packed = max(config.reward.micro_batch_tokens, 2 * longest), config.reward.pack is not False
    else:
        longest, packed, budget = config.max_sequence_tokens, ppo.pack is not False, ppo.micro_batch_tokens
        count, ranks = ppo.minibatch_size if update else ppo.rollout_batch_size, ppo.policy_deepspeed.ranks
    tokens = max(longest, min(budget, -(-count // ranks) * longest))
    return ForwardPass(tokens, longest, packed, config.model.attention)


def _sft(config: PipelineConfig, shape: ModelShape, kind: str) -> Iterator[DeviceLoad]:
    model = Model(
        shape, config.sft.deepspeed, lora=config.sft.lora, device=kind, head=config.model.head_dtype
    )
    yield from _training("sft", "policy", model, largest_pass(config, "sft"), kind)


def _reward(config: PipelineConfig, shape: ModelShape, kind: str) -> Iterator[DeviceLoad]:
    if config.reward.enabled:
        model = Model(shape, config.reward.deepspeed, scores=True, lora=config.reward.lora, device=kind)
        yield from _training("reward", "reward model", model, largest_pass(config, "reward"), kind)


def _training(
    stage: StageName, what: str, model: Model, batch: ForwardPass, kind: str
) -> Iterator[DeviceLoad]:
    ranks, host = model.deepspeed.ranks, model.host
    yield DeviceLoad(stage, what, "load", ranks, model.loading, device=kind, host=host)
    yield DeviceLoad(
        stage, what, "backward", ranks, model.state + model.backward(batch), device=kind, host=host
    )
    yield DeviceLoad(stage, what, "step", ranks, model.state + model.step, device=kind, host=host)


def _ppo(config: PipelineConfig, shape: ModelShape, device: Device, kind: str) -> Iterator[DeviceLoad]:
    placement, engine = place(config.ppo), config.ppo.engine
    serving = engine_memory(shape, engine, device, config.model.head_dtype).bytes
    shared = placement.colocated and not device.is_cpu
    for group in placement.groups:
        models = ppo_models(config, shape, group, kind)
        beside = serving if shared else NOTHING
        what, host = group.name + ("+engine" if shared else ""), sum(model.host for model in models.values())
        for phase, load in _phases(config, models).items():
            yield DeviceLoad("ppo", what, phase, group.ranks, load, beside, kind, host)
    if not shared:
        yield DeviceLoad(
            "ppo", "engine", "rollout", engine.count * engine.tensor_parallel, engine=serving, device=kind
        )


def ppo_models(
    config: PipelineConfig, shape: ModelShape, group: Group, kind: str = "cuda"
) -> dict[Role, Model]:
    """What a rank of the group holds. With adapters, the reference is the policy without its own and the
    reward model the critic without its own, where they share a process.
    """
    ppo, models = config.ppo, dict[Role, Model]()
    for role in group.roles:
        trained, scores = role in ("policy", "critic"), role in ("critic", "reward")
        if group.adapted_from(role, ppo) is not None:
            continue
        average = role == "policy" and ppo.ema_decay is not None
        lora = ppo.lora if trained else None
        models[role] = Model(
            shape, group.deepspeed(role, ppo), trained, scores, lora, average, kind, config.model.head_dtype
        )
    return models


def _phases(config: PipelineConfig, models: dict[Role, Model]) -> dict[str, Bytes]:
    """Of one group: its roles are loaded and compute one after the other; all of them stay."""
    resting, loading = NOTHING, NOTHING
    for model in models.values():
        loading = max(loading, resting + model.loading, key=lambda load: load.total)
        resting = resting + model.state
    scoring, update = largest_pass(config, "ppo", update=False), largest_pass(config, "ppo")
    if config.ppo.ptx is not None:
        update = max(update, largest_pass(config, "sft"), key=lambda batch: batch.tokens)
    trained = [model for model in models.values() if model.trained]
    works = {
        "score": [model.scoring(scoring) for model in models.values()],
        "backward": [model.backward(update) for model in trained],
        "step": [model.step for model in trained],
    }
    return {"load": loading} | {
        phase: resting + max(work, key=lambda load: load.total) for phase, work in works.items() if work
    }
