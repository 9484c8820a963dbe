"""Checks of the adapters' settings, before anything heavy starts."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path

from rlhf_core.config.checkfiles import Finding, guarded, is_local, tensors
from rlhf_core.config.devices import runs_on_gpu
from rlhf_core.config.pipeline import PipelineConfig
from rlhf_core.errors import ConfigError, ModelError

_TINY_LAYERS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def check_adapters(config: PipelineConfig) -> Iterator[Finding]:
    """Targets that the model does not have, and quantization that this machine or the other settings do not
    allow.
    """
    ppo = config.ppo
    for field, lora, trainers in (
        ("sft", config.sft.lora, (config.sft.deepspeed,)),
        ("reward", config.reward.lora, (config.reward.deepspeed,)),
        ("ppo", ppo.lora, (ppo.policy_deepspeed, ppo.critic_deepspeed)),
    ):
        if lora is None:
            continue
        if lora.targets is not None:
            yield from guarded(f"{field}.lora.targets", _targets(field, lora.targets, config.model.path))
        if lora.quantize is None:
            continue
        what = f"{field}.lora.quantize: {lora.quantize}"
        if not runs_on_gpu(config):
            yield ConfigError(f"{what} needs a GPU; got 0 visible; leave it out")
        elif importlib.util.find_spec("bitsandbytes") is None:
            yield ConfigError(
                f"{what} needs bitsandbytes, which is not installed; install it, or leave quantize out"
            )
        if any(deepspeed.zero_stage == 3 for deepspeed in trainers):
            yield ConfigError(
                f"{what} needs zero_stage 0, 1 or 2: ZeRO cannot shard packed weights; got 3; use 2"
            )
        if field == "ppo" and (
            ppo.weight_sync.lora == "adapter" or ppo.colocate in ("none", "critic_reward")
        ):
            yield ConfigError(
                f"{what} needs ppo.weight_sync.lora=merged and ppo.colocate=pairs, policy_reference or all,"
                " so that engines and reference have the policy's rounded weights; got"
                f" {ppo.weight_sync.lora or 'merged'} and {ppo.colocate}"
            )


def _targets(field: str, targets: tuple[str, ...], path: str | None) -> Iterator[Finding]:
    """Return the names of the layers of a local model, derived from the names of its weights.

    For example, a weight is named `model.layers.0.self_attn.q_proj.weight`.
    """
    if path is None:
        where, have = "the model from scratch", set(_TINY_LAYERS)
    elif is_local(path):
        where, names = path, [name.split(".") for name in tensors(Path(path))]
        have = {name[-2] for name in names if len(name) > 2 and any(part.isdigit() for part in name)}
    else:
        return
    if have and (unknown := sorted(set(targets) - have)):
        yield ModelError(
            f"{field}.lora.targets: {where} has no {', '.join(unknown)} in its layers; it has"
            f" {', '.join(sorted(have))}; name linear layers among them, or leave targets out"
        )
