"""The models from outside the pipeline that a training starts from: `model.path` and `reward.judge.path`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from rlhf_core.config.address import is_hub_model
from rlhf_core.config.pipeline import PipelineConfig
from rlhf_core.pipeline import StageName

MODEL_PATH = "model.path"
JUDGE_PATH = "reward.judge.path"
BASE_STAGES: tuple[StageName, ...] = ("sft", "judge")
"""The stages that start from such a model, if it is configured."""


@dataclass(frozen=True)
class BaseModelAddress:
    """Where a base model is."""

    field: str
    """Its field of the configuration."""
    path: str
    """Folder or hub id; a reference in a configuration whose references are not resolved."""
    revision: str | None
    """Commit or branch of a hub id."""

    @property
    def is_hub(self) -> bool:
        return is_hub_model(self.path)

    @property
    def digest_name(self) -> str:
        """Name of its digest among the sources of a stage."""
        return "model" if self.field == MODEL_PATH else self.field

    def unpinned(self) -> Iterator[str]:
        """Yield a warning if it is a hub model without a revision."""
        if self.is_hub and self.revision is None:
            revision = self.field.replace(".path", ".revision")
            yield (
                f"{self.field}: {self.path} is no local folder, so it is read from the Hugging Face hub; "
                f"pin {revision} to a commit, or a later run may read another one"
            )


def base_of(config: PipelineConfig, stage: StageName) -> BaseModelAddress | None:
    """Return the base model from outside that a stage starts from; None if it starts from another artifact or
    from random weights.
    """
    judge = config.reward.judge
    if stage == "judge" and judge is not None and judge.path is not None:
        return BaseModelAddress(JUDGE_PATH, judge.path, judge.revision)
    if stage == "sft" and config.model.path is not None:
        return BaseModelAddress(MODEL_PATH, config.model.path, config.model.revision)
    return None


def with_base_paths(config: PipelineConfig, paths: Mapping[str, str]) -> PipelineConfig:
    """Return `config` with other paths of base models, by their fields. Fields without one keep theirs."""
    model = config.model.model_copy(update={"path": paths.get(MODEL_PATH, config.model.path)})
    reward = config.reward
    if reward.judge is not None:
        judge = reward.judge.model_copy(update={"path": paths.get(JUDGE_PATH, reward.judge.path)})
        reward = reward.model_copy(update={"judge": judge})
    return config.model_copy(update={"model": model, "reward": reward})
