"""Does a configuration fit its devices, and if not, the smallest changes that make it fit."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from rlhf_core.config import PipelineConfig
from rlhf_core.config.load import load_config
from rlhf_core.config.placement import plan
from rlhf_core.config.training import DeepSpeedConfig
from rlhf_core.errors import InputError
from rlhf_core.planning.hardware import GIB, Device
from rlhf_core.planning.memory import DeviceLoad, Part, kv_tokens, model_part
from rlhf_core.planning.shape import ModelShape

_MAX_CHANGES = 3


@dataclass(frozen=True)
class Verdict:
    """What lies on the devices, phase by phase, and what is wrong with it."""

    loads: tuple[DeviceLoad, ...]
    kv_tokens: int
    """Of one engine's KV cache."""
    problems: tuple[str, ...]

    @property
    def fits(self) -> bool:
        return not self.problems


def judge(config: PipelineConfig, shape: ModelShape, gpus: int, device: Device) -> Verdict:
    """Every phase against `gpus` devices."""
    loads = tuple(_loads(config, shape, device))
    engine = config.ppo.engine
    cache = kv_tokens(shape, engine, device.memory)
    problems = [
        f"{load.phase}: {load.what} needs {load.total / GIB:.1f} GiB on each device; {device.name} has "
        f"{device.memory / GIB:.1f}"
        for load in loads
        if load.total > device.memory
    ]
    for phase, needed in _devices(config).items():
        if needed > gpus:
            problems.append(f"{phase}: needs {needed} devices; there are {gpus}")
    if cache < config.max_sequence_tokens:
        problems.append(
            f"ppo: an engine's KV cache holds {cache} tokens, less than one sequence of {config.max_sequence_tokens}"
        )
    return Verdict(loads, cache, tuple(problems))


def _devices(config: PipelineConfig) -> dict[str, int]:
    needed = {"sft": config.sft.deepspeed.ranks, "ppo": plan(config.ppo).devices}
    return needed | ({"reward": config.reward.deepspeed.ranks} if config.reward.enabled else {})


def _loads(config: PipelineConfig, shape: ModelShape, device: Device) -> Iterator[DeviceLoad]:
    sft, reward, ppo = config.sft, config.reward, config.ppo
    longest = max(config.data.max_prompt_tokens + config.data.max_response_tokens, config.data.max_text_tokens)
    tokens = max(sft.micro_batch_tokens, longest)
    part = model_part("policy", shape, sft.deepspeed, tokens, trained=True, scores=False)
    yield DeviceLoad("sft", "policy", sft.deepspeed.ranks, (part,))
    if reward.enabled:
        pair = 2 * (config.data.max_prompt_tokens + config.data.max_response_tokens)
        tokens = max(reward.micro_batch_tokens, pair)
        part = model_part("reward", shape, reward.deepspeed, tokens, trained=True, scores=True)
        yield DeviceLoad("reward", "reward model", reward.deepspeed.ranks, (part,))
    placement = plan(ppo)
    engine_share = ppo.engine.gpu_memory_utilization * device.memory
    tokens = max(ppo.micro_batch_tokens, config.max_sequence_tokens)
    for group in placement.groups:
        # The update of the largest trained role is the peak; the others of the group lie idle beside it.
        at_work = next((role for role in group.roles if role in ("policy", "critic")), group.roles[0])
        parts: list[Part] = []
        for role in group.roles:
            sizes = ppo.policy_deepspeed if role in ("policy", "reference") else ppo.critic_deepspeed
            if sizes.ranks != group.ranks:
                sizes = DeepSpeedConfig(ranks=group.ranks, dtype=sizes.dtype)
            trained, scores = role in ("policy", "critic"), role in ("critic", "reward")
            parts.append(
                model_part(role, shape, sizes, tokens, trained=trained, scores=scores, resident_only=role != at_work)
            )
        reserved = engine_share if placement.together else 0.0
        what = group.name + ("+engine" if placement.together else "")
        yield DeviceLoad("ppo", what, group.ranks, tuple(parts), 2 if placement.together else 1, reserved)
    if not placement.together:
        yield DeviceLoad("ppo", "engine", ppo.engine.count * ppo.engine.tensor_parallel, (), 1, engine_share)


def advise(
    config_path: str,
    overrides: Sequence[str],
    config: PipelineConfig,
    judged: Callable[[PipelineConfig], Verdict],
) -> tuple[str, ...] | None:
    """The fewest overrides, cheapest first, with which the verdict is good; None if none of those tried is enough."""
    candidates = _candidates(config)
    for count in range(1, _MAX_CHANGES + 1):
        for chosen in itertools.combinations(candidates, count):
            if len({text.partition("=")[0] for text in chosen}) < count:
                continue
            try:
                changed = load_config(Path(config_path), [*overrides, *chosen])
            except InputError:
                continue
            if judged(changed).fits:
                return chosen
    return None


def _candidates(config: PipelineConfig) -> list[str]:
    """Single changes, from those that cost nothing but time to those that cost more of it."""
    found: list[str] = []
    trainers = [("sft", config.sft.deepspeed, config.sft.micro_batch_tokens)]
    if config.reward.enabled:
        trainers.append(("reward", config.reward.deepspeed, config.reward.micro_batch_tokens))
    deepspeeds = [(f"{name}.deepspeed", deepspeed) for name, deepspeed, _ in trainers]
    deepspeeds.append(("ppo.policy_deepspeed", config.ppo.policy_deepspeed))
    if config.ppo.uses_critic:
        deepspeeds.append(("ppo.critic_deepspeed", config.ppo.critic_deepspeed))
    for name, _, budget in [*trainers, ("ppo", None, config.ppo.micro_batch_tokens)]:
        found += [f"{name}.micro_batch_tokens={budget // factor}" for factor in (2, 4) if budget // factor >= 512]
    for name, deepspeed in deepspeeds:
        if not deepspeed.gradient_checkpointing:
            found.append(f"{name}.gradient_checkpointing=true")
        found += [f"{name}.zero_stage={stage}" for stage in (2, 3) if stage > deepspeed.zero_stage]
        if deepspeed.offload == "none" and deepspeed.zero_stage >= 1:
            found.append(f"{name}.offload=optimizer")
    if config.ppo.colocate == "all":
        found += [f"ppo.engine.gpu_memory_utilization={share}" for share in (0.4, 0.3, 0.25)]
    return found
