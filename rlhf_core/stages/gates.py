"""Limits that the results of a stage must meet for the pipeline to continue, also for reused stages."""

from __future__ import annotations

from collections.abc import Mapping

from rlhf_core.config import PipelineConfig
from rlhf_core.config.consistency import why_merged
from rlhf_core.errors import GateFailed
from rlhf_core.pipeline import StageName


def check_gate(config: PipelineConfig, stage: StageName, metrics: Mapping[str, float]) -> None:
    """Raise GateFailed with the value, the limit and a possible fix."""
    if stage in ("reward", "judge") and metrics["accuracy"] < config.reward.min_accuracy:
        raise GateFailed(
            f"{stage}: held-out accuracy {metrics['accuracy']:.3f} is below"
            f" reward.min_accuracy={config.reward.min_accuracy}; train longer, raise the learning rate, or"
            " check the pairs in the data card"
        )
    loss, limit = metrics.get("published/loss", 0.0), config.ppo.published_loss_limit
    if stage == "ppo" and config.ppo.lora is not None and not loss <= limit:
        cause, fix = why_merged(config.ppo.lora)
        raise GateFailed(
            f"ppo: merged ({cause}) and rounded to {config.ppo.served_dtype}, the policy loses {loss:.0%} of"
            f" the change by training, above ppo.published_loss_limit={limit:g}; {fix}, train in float32, or"
            " raise the limit: the run then continues from its last checkpoint"
        )
