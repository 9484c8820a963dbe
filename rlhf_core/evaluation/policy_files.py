"""Which files are the policy that is judged.

A merge of weights and adapter that is loaded in bfloat16 is rounded to bfloat16: the weights of the base model lie on its
grid, so each change below half a step of it is lost. Outside float32 the policy is therefore the base model with the
adapter beside it, as in its rollouts (`PPOConfig.syncs_adapter`).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from rlhf_core.config.base import Section
from rlhf_core.config.ppo import EngineConfig, PPOConfig, WeightSyncConfig
from rlhf_core.config.training import DeepSpeedConfig, LoraConfig
from rlhf_core.errors import CorruptArtifact


@dataclass(frozen=True)
class PolicyFiles:
    """A policy as it is loaded."""

    model: Path
    """Hugging Face folder."""
    adapter: Path | None = None
    """Folder of an adapter on top of it, in PEFT's layout; None: the model alone."""


def policy_files(ppo: PPOConfig, artifact: Path, sft: Callable[[], Path]) -> PolicyFiles:
    """Of the artifact of stage `ppo` that was made with the settings `ppo`. `sft`: gives the SFT artifact it started from,
    which is asked for only where it is needed."""
    if ppo.syncs_adapter and (artifact / "adapter").is_dir():
        return PolicyFiles(sft() / "model", artifact / "adapter")
    return PolicyFiles(artifact / "policy")


def made_with(ppo: Mapping[str, Any]) -> PPOConfig:
    """What `policy_files` reads, from the section `ppo` in the configuration of an artifact; the other fields have defaults,
    since another version may have had other rules for them. Raises CorruptArtifact."""
    kinds: dict[str, type[Section]] = {
        "lora": LoraConfig,
        "weight_sync": WeightSyncConfig,
        "engine": EngineConfig,
        "policy_deepspeed": DeepSpeedConfig,
    }
    try:
        parts = {
            name: kind.model_validate_json(json.dumps(ppo[name]))
            for name, kind in kinds.items()
            if ppo.get(name) is not None
        }
    except ValidationError as error:
        raise CorruptArtifact(f"its settings cannot be read: {error}") from error
    return PPOConfig().model_copy(update=parts)


def adapter_rank(folder: Path) -> int:
    """The rank of the adapter in `folder`."""
    return int(json.loads((folder / "adapter_config.json").read_text(encoding="utf-8"))["r"])
