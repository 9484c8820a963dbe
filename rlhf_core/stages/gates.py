"""What a stage's result must reach for the pipeline to go on, whether it was made now or earlier."""

from __future__ import annotations

from collections.abc import Mapping

from rlhf_core.config import PipelineConfig
from rlhf_core.errors import GateFailed
from rlhf_core.types import StageName


def check_gate(config: PipelineConfig, stage: StageName, metrics: Mapping[str, float]) -> None:
    """Raises GateFailed with the number, the limit and what may help."""
    if stage == "reward" and metrics["accuracy"] < config.reward.min_accuracy:
        raise GateFailed(
            f"reward: held-out accuracy {metrics['accuracy']:.3f} is below reward.min_accuracy="
            f"{config.reward.min_accuracy}; train longer, raise the learning rate, or look at the pairs in the data card"
        )
