"""Stage `data`: sources in, token files, tokenizer and data card out."""

from __future__ import annotations

import logging
from dataclasses import replace
from itertools import chain
from pathlib import Path

from rlhf_core.config.address import is_hub_model
from rlhf_core.config.pipeline import PipelineConfig
from rlhf_core.data.card import limits_of
from rlhf_core.data.prepare import FILE_NAMES, prepare
from rlhf_core.data.prompt_sets import read_sets
from rlhf_core.errors import InputError, RewardError
from rlhf_core.models.architectures import architecture_problems, package_problems
from rlhf_core.models.folder import base_model_config
from rlhf_core.planning.check import check_memory
from rlhf_core.stages.gates import check_gate
from rlhf_core.system.home import Home
from rlhf_core.types import StageContext, StageResult

log = logging.getLogger(__name__)


def run(config: PipelineConfig, context: StageContext) -> StageResult:
    """Prepare the three sets into `context.output`; log the data card and samples.

    Reads no input artifact.
    """
    if config.model.path is not None:
        # Before the rows are read. The next stage loads the model itself.
        _check_model(config.model.path, config)

    def report(done: int, total: int) -> None:
        context.progress("data", done, total, "rows")

    # Outside a pipeline nothing is kept.
    parts = None if context.lineage is None else Home.of(config.run.home).parts
    card = prepare(config, context.output, report, context.sources, parts)
    limited = config.with_limits(limits_of(context.output))
    check_evaluation(limited, context)
    # Limits that are given were known to the preflight.
    if None in config.given_limits:
        _check_memory(limited)
    metrics: dict[str, float] = {}
    for name, file_name in FILE_NAMES.items():
        count = card["counts"][name]
        metrics[f"data/{file_name}_read"] = count["read"]
        metrics[f"data/{file_name}_bad"] = count["bad"]
        metrics[f"data/{file_name}_dropped"] = sum(count["dropped"].values())
        metrics[f"data/{file_name}_train"] = count["train"]
        metrics[f"data/{file_name}_eval"] = count["eval"]
    metrics["data/near_overlap"] = card["overlap"]["near"]
    metrics["data/tokens"] = card["tokenizer"]["tokens"]
    metrics = {name: float(value) for name, value in metrics.items()}
    context.metrics.log_metrics(metrics, step=0)
    context.metrics.log_file(context.output / "data_card.md", "data")
    context.metrics.log_file(context.output / "data_card.json", "data")
    if any(count["bad"] for count in card["counts"].values()):
        context.metrics.log_file(context.output / "quarantine.jsonl", "data")
    context.metrics.flush()
    facts = {f"{row['field']}.digest": row["digest"] for row in card["sources"]}
    return StageResult(metrics, facts)


def _check_memory(config: PipelineConfig) -> None:
    """Compare the memory with the measured lengths. Until now they were estimated. Raises ConfigError."""
    for finding in check_memory(config):
        if isinstance(finding, InputError):
            raise finding


def _check_model(path: str, config: PipelineConfig) -> None:
    """Check what the preflight could not: weights against config.json, and the architecture of a hub model.

    Raises ModelError or ConfigError.
    """
    if not is_hub_model(path):
        from rlhf_core.models.weights import check_headers

        check_headers(Path(path), attention=config.model.attention)
        return
    settings = base_model_config(config)
    for finding in chain(
        architecture_problems(path, settings, config), package_problems(path, settings, config)
    ):
        if isinstance(finding, InputError):
            raise finding
        log.warning("%s", finding)


def check_evaluation(config: PipelineConfig, context: StageContext) -> None:
    """Check the rows of regression sets, and the language model that judges, with the data in the output of
    the stage, so that the evaluation does not fail after hours of training.

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
    # A warning only: the judge may be started while the models train.
    except RewardError as error:
        log.warning("the judge cannot be asked yet (%s); the stage %s asks it", error.message, stage)
        return
    check_gate(config, stage, metrics)
