"""Which files are the policy that is judged.

A merge of weights and adapter that is loaded in bfloat16 is rounded to bfloat16: the weights of the base model lie on its
grid, so each change below half a step of it is lost. Outside float32 the policy is therefore the base model with the
adapter beside it, as in its rollouts (`PPOConfig.syncs_adapter`).
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from rlhf_core.config import PipelineConfig


@dataclass(frozen=True)
class PolicyFiles:
    """A policy as it is loaded."""

    model: Path
    """Hugging Face folder."""
    adapter: Path | None = None
    """Folder of an adapter on top of it, in PEFT's layout; None: the model alone."""


def policy_files(config: PipelineConfig, ppo: Path, sft: Path) -> PolicyFiles:
    """Of the artifacts `ppo` and `sft`, one made from the other."""
    if config.ppo.syncs_adapter and (ppo / "adapter").is_dir():
        return PolicyFiles(sft / "model", ppo / "adapter")
    return PolicyFiles(ppo / "policy")


def adapter_rank(folder: Path) -> int:
    """The rank of the adapter in `folder`."""
    return int(json.loads((folder / "adapter_config.json").read_text(encoding="utf-8"))["r"])
