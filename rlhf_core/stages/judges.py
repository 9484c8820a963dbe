"""The language model that judges, for the stages that ask it."""

from __future__ import annotations

from rlhf_core.config import PipelineConfig
from rlhf_core.evaluation.language_model import LanguageModelJudge
from rlhf_core.pipeline import StageName
from rlhf_core.stages.gates import check_gate
from rlhf_core.types import StageContext


def load_checked_judge(
    config: PipelineConfig, context: StageContext, stage: StageName, prefix: str, device: str
) -> LanguageModelJudge:
    """Return `evaluate.language_model` after its agreement with held-out pairs was measured.

    Args:
        config: Configuration of the run.
        context: Context of the stage.
        stage: The stage that asks it, for the message.
        prefix: Prefix of the metrics in the tracker.
        device: Device of a model that is run here.

    Raises:
        GateFailed: It agrees too little with people.
    """
    judge = LanguageModelJudge(config, context, device)
    metrics = judge.measure_agreement()
    context.metrics.log_metrics({f"{prefix}/{name}": value for name, value in metrics.items()}, 0)
    check_gate(config, stage, metrics)
    return judge
