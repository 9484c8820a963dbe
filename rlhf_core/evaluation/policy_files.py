"""Selects the files of the policy that is evaluated.

If a merge of weights and adapter is loaded in bfloat16, it is rounded, and changes that are smaller than half
of a weight's rounding step are lost. Outside float32, the policy therefore consists of the base model and a
separate adapter, as in its rollouts (`PPOConfig.syncs_adapter`).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from rlhf_core.config.base import Section
from rlhf_core.config.engine import MAX_ENGINE_RANK, EngineConfig, WeightSyncConfig
from rlhf_core.config.ppo import PPOConfig
from rlhf_core.config.training import DeepSpeedConfig, DPOConfig, LoraConfig
from rlhf_core.errors import CorruptArtifact


@dataclass(frozen=True)
class PolicyFiles:
    """Files from which a policy is loaded."""

    model: Path
    """Model folder in Hugging Face layout."""
    adapter: Path | None = None
    """Folder of an adapter in PEFT's layout, or None for the model alone."""


def policy_files(ppo: PPOConfig, artifact: Path, sft: Callable[[], Path]) -> PolicyFiles:
    """Return the files of a `ppo` artifact that was created with the settings `ppo`.

    `sft` returns the SFT artifact that the policy started from. It is only called if it is needed.
    """
    if ppo.syncs_adapter and (artifact / "adapter").is_dir():
        return PolicyFiles(sft() / "model", artifact / "adapter")
    return PolicyFiles(artifact / "policy")


def dpo_files(dpo: DPOConfig, ppo: PPOConfig, artifact: Path, sft: Path) -> PolicyFiles:
    """Return the files of a `dpo` artifact that was created from the SFT artifact `sft`.

    They have a separate adapter as those of PPO do. The evaluation samples and scores with the precisions of
    `ppo`.
    """
    lora = dpo.lora
    if lora is None or lora.quantize is not None or lora.r > MAX_ENGINE_RANK:
        return PolicyFiles(artifact / "policy")
    if {dpo.deepspeed.dtype, ppo.engine.dtype, ppo.policy_deepspeed.dtype} == {"float32"}:
        return PolicyFiles(artifact / "policy")
    return PolicyFiles(sft / "model", artifact / "adapter")


def made_with(ppo: Mapping[str, Any]) -> PPOConfig:
    """Return the settings that `policy_files` uses, from the section `ppo` of an artifact's configuration.

    Other fields get their defaults, because another version may have had different rules for them. Raises
    CorruptArtifact.
    """
    kinds: dict[str, type[Section]] = {
        "lora": LoraConfig,
        "weight_sync": WeightSyncConfig,
        "engine": EngineConfig,
        "policy_deepspeed": DeepSpeedConfig,
    }
    try:
        parts = {
            # As JSON, because strict validation of Python objects would refuse a list in place of a tuple.
            name: kind.model_validate_json(json.dumps(ppo[name]))
            for name, kind in kinds.items()
            if ppo.get(name) is not None
        }
    except ValidationError as error:
        raise CorruptArtifact(f"its settings cannot be read: {error}") from error
    return PPOConfig().model_copy(update=parts)


def adapter_rank(folder: Path) -> int:
    """Return the rank of the adapter in `folder`."""
    return int(json.loads((folder / "adapter_config.json").read_text(encoding="utf-8"))["r"])
