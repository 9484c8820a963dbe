"""Limits that the results of a stage must meet for the pipeline to continue, also for reused stages."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping

from rlhf_core.config import PipelineConfig
from rlhf_core.config.consistency import why_merged
from rlhf_core.config.evaluate import LanguageModelConfig
from rlhf_core.config.ppo import PPOConfig
from rlhf_core.config.rewards import LanguageModelReward, measured_graders
from rlhf_core.errors import GateFailed
from rlhf_core.pipeline import StageName

_AGREEMENT = "language_model/agreement"
_BY_CHANCE = "not significantly more often than by chance (0.5)"
_OF_MEMBER = re.compile(r"member_\d+/accuracy")


def check_gate(config: PipelineConfig, stage: StageName, metrics: Mapping[str, float]) -> None:
    """Raise GateFailed with the value, the limit and a possible fix."""
    if stage in ("reward", "judge"):
        _check_accuracy(config.reward.min_accuracy, stage, metrics)
    language_model = config.evaluate.language_model
    # What a stage has not measured is not in its metrics.
    if language_model is not None and f"{_AGREEMENT}/mean" in metrics:
        _check_language_model(language_model, stage, metrics)
    for grader in measured_graders(config.ppo.rewards):
        _check_grader(grader, stage, metrics)
    _check_published(config.ppo, metrics)


def _check_accuracy(limit: float, stage: StageName, metrics: Mapping[str, float]) -> None:
    """Check the model, and with `reward.ensemble` every member: a bad one can decide the lowest score. With
    the limit 0 there is no check.
    """
    if limit == 0:
        return
    for name in metrics:
        # `fullmatch` leaves out the bounds, `member_1/accuracy_low`, and what is measured with exchanged
        # prompts.
        if name != "accuracy" and not _OF_MEMBER.fullmatch(name):
            continue
        low, high = metrics[f"{name}_low"], metrics[f"{name}_high"]
        which = f" of {name.split('/')[0].replace('_', ' ')}" if "/" in name else ""
        found = f"{stage}: held-out accuracy{which} {metrics[name]:.3f} [{low:.3f}, {high:.3f}]"
        off = "set reward.min_accuracy=0 to continue without this check"
        train = "train longer, raise the learning rate, or check the pairs in the data card"
        # First, because a comparison with NaN is false, and the model would pass.
        if math.isnan(low):
            raise GateFailed(
                f"{stage}: no pair is held out to measure accuracy{which}; raise data.eval_fraction, or {off}"
            )
        if metrics[name] < limit:
            raise GateFailed(f"{found} is below reward.min_accuracy={limit}; {train}")
        if low <= 0.5:
            raise GateFailed(
                f"{found} is not significantly above chance (0.5); hold out more pairs (data.eval_fraction,"
                f" data.max_eval). If that does not help, {train}. Or {off}"
            )


def _check_published(ppo: PPOConfig, metrics: Mapping[str, float]) -> None:
    """Check how much of the change by training a policy with an adapter loses when it is merged."""
    loss, limit = metrics.get("published/loss", 0.0), ppo.published_loss_limit
    # `not <=`, so that NaN does not pass.
    if ppo.lora is not None and not loss <= limit:
        cause, fix = why_merged(ppo.lora)
        raise GateFailed(
            f"ppo: merged ({cause}) and rounded to {ppo.served_dtype}, the policy loses {loss:.0%} of the"
            f" change by training, above ppo.published_loss_limit={limit:g}; {fix}, train in float32, or"
            " raise the limit: the run then continues from its last checkpoint"
        )


def _check_grader(grader: LanguageModelReward, stage: StageName, metrics: Mapping[str, float]) -> None:
    """Check the agreement of a reward source with people, if it was measured."""
    name = grader.used_name
    prefix = f"reward_agreement/{name}"
    if f"{prefix}/mean" not in metrics:
        return
    agreement, low, high, pairs = (metrics[f"{prefix}/{part}"] for part in ("mean", "low", "high", "pairs"))
    assert grader.min_agreement is not None
    reason = _why_refused(agreement, low, "min_agreement", grader.min_agreement)
    order = ""
    if f"{prefix}/order_bias" in metrics:
        changing, bias = metrics[f"{prefix}/inconsistent"], metrics[f"{prefix}/order_bias"]
        order = (
            f" Its preference changes with the order of the answers on {changing:.0%} of the pairs (order"
            f" bias {bias:+.2f}; +1: always the first one)."
        )
    if reason:
        raise GateFailed(
            f"{stage}: reward {name} ({grader.model}) agrees with {agreement:.3f} [{low:.3f}, {high:.3f}] of"
            f" {pairs:.0f} held-out pairs of people (equal grades count half), {reason}.{order} Use a better"
            " model or rubric, or set its min_agreement to null if its grades are not about the preference of"
            " people"
        )


def _check_language_model(
    settings: LanguageModelConfig, stage: StageName, metrics: Mapping[str, float]
) -> None:
    agreement, low, high = (metrics[f"{_AGREEMENT}/{part}"] for part in ("mean", "low", "high"))
    field = "evaluate.language_model"
    reason = _why_refused(agreement, low, f"{field}.min_agreement", settings.min_agreement)
    if reason == _BY_CHANCE:
        reason += f"; raise {field}.pairs"
    other = "leave evaluate.language_model out"
    # Its judge is chosen by `sample.judge`, so the section itself need not go.
    if stage == "sample":
        other = "another sample.judge"
    if reason:
        raise GateFailed(
            f"{stage}: the language model {settings.name} agrees with {agreement:.3f} [{low:.3f},"
            f" {high:.3f}] of {metrics['language_model/pairs']:.0f} held-out pairs (ties count half),"
            f" {reason}. Its verdict changes with the order of the answers on"
            f" {metrics['language_model/pairs_inconsistent']:.0%} of the pairs, and"
            f" {metrics['language_model/pairs_first']:.0%} of its preferences are for the first answer. Use"
            f" a better model or rubric, or {other}"
        )


def _why_refused(agreement: float, low: float, field: str, limit: float) -> str:
    """Return why an agreement with the lower bound `low` does not pass; empty if it does."""
    if agreement < limit:
        return f"below {field}={limit:g}"
    # The point estimate alone would let a judge pass that a few pairs favour by luck.
    return _BY_CHANCE if low <= 0.5 else ""
