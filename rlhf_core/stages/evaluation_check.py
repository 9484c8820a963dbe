"""What the stage `data` checks of the evaluation, so that it does not fail after hours of training."""

from __future__ import annotations

import logging
from dataclasses import replace

from rlhf_core.config import PipelineConfig
from rlhf_core.data.prompt_sets import read_sets
from rlhf_core.errors import RewardError
from rlhf_core.stages.gates import check_gate
from rlhf_core.types import StageContext

log = logging.getLogger(__name__)


def check_evaluation(config: PipelineConfig, context: StageContext) -> None:
    """Check the rows of regression sets, and the language model that judges, with the data in the output of
    the stage.

    A model at an address is asked about the held-out pairs. Its replies are kept, so the stages `sample` and
    `evaluate` do not ask again. A local model needs the engines of the evaluation; only the lengths of its
    questions are checked here.

    Raises:
        DataError: A row cannot be used, or there are no held-out pairs.
        ModelError: A local model cannot be asked the questions.
        GateFailed: The model agrees too little with the held-out pairs.
    """
    executor = config.run.executor_of("data")
    # Other hosts can have other files, keys and networks.
    if config.run.executor_of("evaluate") == executor:
        read_sets(config, context.output)
    judge = config.evaluate.language_model
    judging_here = [stage for stage in config.judging_stages if config.run.executor_of(stage) == executor]
    if judge is None or not judging_here:
        return
    from rlhf_core.evaluation.language_model import LanguageModelJudge, check_questions

    check_questions(config, context.output)
    if judge.url is None:
        return
    stage = config.judging_stages[0]
    inputs = {"data": context.output}
    try:
        metrics = LanguageModelJudge(config, replace(context, inputs=inputs), "cpu").measure_agreement()
    except RewardError as error:
        log.warning("the judge cannot be asked yet (%s); the stage %s asks it", error.message, stage)
        return
    check_gate(config, stage, metrics)
