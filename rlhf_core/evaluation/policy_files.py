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

from rlhf_core.config import PipelineConfig
from rlhf_core.config.consistency import evaluates_adapter
from rlhf_core.config.evaluate import SampledStage
from rlhf_core.config.ppo import PPOConfig
from rlhf_core.config.training import DPOConfig
from rlhf_core.errors import CorruptArtifact
from rlhf_core.pipeline import POLICIES, PolicyStage, StageName

POLICY_STAGE = "rlhf.policy_stage"
"""Tag of a version: the stage that trained it. Versions of PPO have no such tag."""
CONFIGURED_BY: Mapping[PolicyStage, StageName] = {"ppo": "ppo", "dpo": "evaluate"}
"""The stage whose artifact has the configuration that decides about the files of a policy. That of `dpo` can
have another section `ppo` than the run that evaluated and registered the policy.
"""


def policy_stage(tags: Mapping[str, str]) -> PolicyStage:
    """Return the stage that trained the version with these tags. Raises CorruptArtifact if it is unknown."""
    stage = tags.get(POLICY_STAGE, "ppo")
    if stage not in POLICIES:
        raise CorruptArtifact(f"its tag {POLICY_STAGE} must be {' or '.join(POLICIES)}; got {stage}")
    return stage


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


def dpo_files(dpo: DPOConfig, ppo: PPOConfig, artifact: Path, sft: Callable[[], Path]) -> PolicyFiles:
    """Return the files of a `dpo` artifact. `sft` returns the SFT artifact that it was created from.

    They have a separate adapter as those of PPO do. The evaluation samples and scores with the precisions of
    `ppo`.
    """
    if evaluates_adapter(dpo, ppo):
        return PolicyFiles(sft() / "model", artifact / "adapter")
    return PolicyFiles(artifact / "policy")


def trained_files(config: PipelineConfig, stage: SampledStage, inputs: Mapping[str, Path]) -> PolicyFiles:
    """Return the files of the model that `stage` trained, from the artifacts of the stages."""

    def sft() -> Path:
        return inputs["sft"]

    if stage == "sft":
        return PolicyFiles(sft() / "model")
    if stage == "dpo":
        return dpo_files(config.dpo, config.ppo, inputs["dpo"], sft)
    return policy_files(config.ppo, inputs["ppo"], sft)


def files_made_with(
    made: Mapping[str, Any], stage: PolicyStage, artifact: Path, sft: Callable[[], Path]
) -> PolicyFiles:
    """Return the files of the artifact of a policy, by the configuration of the run that evaluated it.

    Args:
        made: The configuration.
        stage: The stage that trained the policy.
        artifact: Its artifact.
        sft: Returns the SFT artifact that the policy started from. It is only called if it is needed.

    Raises:
        CorruptArtifact: The settings cannot be read.
    """
    try:
        # Each section alone: other ones, and what they have in common, may have had other rules then.
        ppo = PPOConfig.of_any_release(made["ppo"])
        if stage == "ppo":
            return policy_files(ppo, artifact, sft)
        return dpo_files(DPOConfig.of_any_release(made["dpo"]), ppo, artifact, sft)
    except ValidationError as error:
        raise CorruptArtifact(f"its settings cannot be read: {error}") from error


def adapter_rank(folder: Path) -> int:
    """Return the rank of the adapter in `folder`."""
    return int(json.loads((folder / "adapter_config.json").read_text(encoding="utf-8"))["r"])
