"""Changes of a configuration as overrides that can be pasted."""

from __future__ import annotations

from rlhf_core.config import PipelineConfig
from rlhf_core.config.load import config_from_tree
from rlhf_core.config.pipeline import TrainingStage
from rlhf_core.config.training import TrainingSection
from rlhf_core.planning.fit import Changes


def changed_fields(config: PipelineConfig, fields: Changes) -> Changes:
    """Return the fields whose value differs from that of the configuration."""
    tree = config.model_dump(mode="json", by_alias=True)
    changes = {}
    for name, value in fields.items():
        now: object = tree
        for part in name.split("."):
            now = now[part] if isinstance(now, dict) else None
        same = str(now).lower() == value.lower()
        # The search writes numbers with two decimals, 0.30 for 0.3.
        if isinstance(now, float):
            same = now == float(value)
        if not same:
            changes[name] = value
    return changes


def with_changes(config: PipelineConfig, changes: Changes) -> PipelineConfig:
    """Return the configuration with these fields changed. Raises ConfigError."""
    tree = config.model_dump(mode="json", by_alias=True)
    return config_from_tree(tree, "plan", [f"{name}={value}" for name, value in changes.items()])


def with_section(config: PipelineConfig, stage: TrainingStage, section: TrainingSection) -> PipelineConfig:
    """Return the configuration with other settings of a stage that trains one model."""
    if stage != "judge":
        return config.model_copy(update={stage: section})
    assert config.reward.judge is not None
    own = {"deepspeed": section.deepspeed, "micro_batch_tokens": section.micro_batch_tokens}
    judge = config.reward.judge.model_copy(update=own)
    return config.model_copy(update={"reward": config.reward.model_copy(update={"judge": judge})})
