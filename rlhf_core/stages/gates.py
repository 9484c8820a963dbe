"""What a stage's result must reach for the pipeline to go on, whether it was made now or earlier."""

from __future__ import annotations

from collections.abc import Mapping

from rlhf_core.config import PipelineConfig
from rlhf_core.config.doubts import why_merged
from rlhf_core.errors import GateFailed
from rlhf_core.types import StageName


def check_gate(config: PipelineConfig, stage: StageName, metrics: Mapping[str, float]) -> None:
    """Raises GateFailed with the number, the limit and what may help."""
    if stage == "reward" and metrics["accuracy"] < config.reward.min_accuracy:
        raise GateFailed(
            f"reward: held-out accuracy {metrics['accuracy']:.3f} is below reward.min_accuracy="
            f"{config.reward.min_accuracy}; train longer, raise the learning rate, or look at the pairs in the data card"
        )
    loss, limit = metrics.get("published/loss", 0.0), config.ppo.published_loss_limit
    if stage == "ppo" and config.ppo.lora is not None and not loss <= limit:
        cause, fix = why_merged(config.ppo.lora)
        raise GateFailed(
            f"ppo: merged ({cause}) and rounded to {config.ppo.served_dtype}, the policy lacks {loss:.0%} of what "
            f"training changed, above ppo.published_loss_limit={limit:g}; {fix}, train in float32, or raise the limit: the run "
            "then continues from its last checkpoint"
        )
