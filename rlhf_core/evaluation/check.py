"""Checks of judges and of `register.votes` before anything is started. Nothing is asked."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from rlhf_core.config.pipeline import PipelineConfig
from rlhf_core.errors import ConfigError, Finding, ModelError, guarded
from rlhf_core.evaluation.votes import read_vote_files
from rlhf_core.models.folder import ModelFolder
from rlhf_core.pipeline import STAGES, StageName
from rlhf_core.rewards.check import check_chat_service
from rlhf_core.rewards.questions import FIELD, rubric_text


def check_evaluation(
    config: PipelineConfig, stages: Collection[StageName] = tuple(STAGES)
) -> Iterator[Finding]:
    """Check the judges, and the votes of people."""
    yield from guarded("evaluate.language_model", check_language_model(config))
    yield from guarded("evaluate.judge", check_judge(config, stages))
    yield from guarded("register.votes", check_votes(config))


def check_votes(config: PipelineConfig) -> Iterator[Finding]:
    """Check the files of `register.votes`."""
    try:
        files = read_vote_files(config)
    except ConfigError as error:
        yield error
        return
    for file in files.values():
        if file.is_empty:
            yield f"{file.name} has no vote and does not count; vote on its page and save again"


def check_judge(config: PipelineConfig, stages: Collection[StageName] = tuple(STAGES)) -> Iterator[Finding]:
    """Check that `evaluate.judge: auto` finds a judge, if the evaluation is one of `stages`. Other values are
    checked by `check_consistency`. Warn if `register.independent_judge` refuses every policy.
    """
    from rlhf_core.evaluation import scoring  # here, because it imports a client for HTTP

    try:
        judge = scoring.choose_measure(config, gold_known=config.generates_prompts)
    except ConfigError:
        if config.evaluate.judge == "auto" and "evaluate" in stages:
            yield ConfigError(
                "evaluate.judge: auto finds no judge, because this run has no reward model and no rule of"
                " some weight in ppo.rewards; set reward.enabled=true, or add evaluate.language_model or a"
                " rule"
            )
        return
    is_refused = scoring.policy_trained_on(config, config.register_.policy, judge)
    if config.register_.independent_judge and is_refused:
        yield (
            f"register.independent_judge is true, but the policy is trained on the judge of its evaluation"
            f" ({scoring.judge_name(config, judge)}): no candidate can become champion; add reward.judge={{}}"
            " or evaluate.language_model, or leave independent_judge out"
        )


def check_language_model(config: PipelineConfig) -> Iterator[Finding]:
    """Check the rubric, the folder of the model, and the address and key of the server."""
    settings = config.evaluate.language_model
    if settings is None:
        return
    try:
        rubric_text(settings.rubric)
    except ConfigError as error:
        yield error
    if settings.url is not None:
        yield from check_chat_service(config, settings, FIELD)
    elif not ModelFolder(str(settings.path)).has_config:
        yield ModelError(
            f"{FIELD}.path: must be a folder with config.json, a tokenizer and *.safetensors; got"
            f" {settings.path}; correct it"
        )
