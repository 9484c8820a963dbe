"""Agreement of language models with people, before they judge or are reward sources."""

from __future__ import annotations

import logging
import math

from rlhf_core.config import PipelineConfig
from rlhf_core.config.rewards import LanguageModelReward, measured_graders
from rlhf_core.errors import RewardError
from rlhf_core.evaluation.language_model import LanguageModelJudge, held_out_pairs_of_people
from rlhf_core.evaluation.statistics import preference
from rlhf_core.evaluation.summary import Intervals
from rlhf_core.pipeline import StageName
from rlhf_core.rewards.compose import code_digests, prefixed_usage
from rlhf_core.rewards.failures import resolve_failures
from rlhf_core.rewards.language_model import asked_model
from rlhf_core.stages.gates import check_gate
from rlhf_core.system.home import Home
from rlhf_core.types import RewardInput, StageContext, prefixed

log = logging.getLogger(__name__)

_PAIRS = 100
"""Largest number of pairs. Each costs two questions."""


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
    context.metrics.log_metrics(prefixed(f"{prefix}/", metrics), 0)
    check_gate(config, stage, metrics)
    return judge


def check_language_model_rewards(
    config: PipelineConfig, context: StageContext, stage: StageName
) -> dict[str, float]:
    """Compare the grades of both answers of held-out pairs with the choice of people, for each
    `type: language_model` of `ppo.rewards` with a weight and `min_agreement`. Return the agreement as
    metrics, which `check_gate` compares with the limits again when the artifact is reused.

    A pair without a grade, which `on_error: mask` allows, is left out. Replies are kept, so a retry asks
    nothing again. Without pairs of people, a warning says that nothing was measured.

    Args:
        config: The configuration.
        context: Context of the stage.
        stage: The stage, for messages.

    Raises:
        GateFailed: A source agrees too little.
        RewardError: A source has no grade for most of the pairs.
    """
    sources = measured_graders(config.ppo.rewards)
    if not sources:
        return {}
    pairs, groups, of_models = held_out_pairs_of_people(context.data, _PAIRS)
    if not pairs:
        log.warning(
            "ppo.rewards: the agreement of %s with people was not measured: no held-out pair is labelled by"
            " people (%d by models)",
            ", ".join([source.used_name for source in sources]), of_models,
        )  # fmt: skip
        return {}
    answers: list[RewardInput] = []
    for index, pair in enumerate(pairs):
        for text in (pair.a, pair.b):
            # Two answers with one id are a group, so that a source that compares sees both.
            answers.append(RewardInput(f"pair {index}", pair.prompt, text, (), (), True, {}))
    metrics: dict[str, float] = {}
    for source in sources:
        found = _measure(config, context, source, answers, groups)
        context.metrics.log_metrics(found, 0)
        check_gate(config, stage, found)
        metrics |= found
    return metrics


def _measure(
    config: PipelineConfig,
    context: StageContext,
    source: LanguageModelReward,
    answers: list[RewardInput],
    groups: list[str],
) -> dict[str, float]:
    """Return the agreement of a source. `answers` are two of each pair, and `groups` those of the pairs."""
    name = source.used_name
    digest = code_digests(config.ppo.rewards, context.sources).get(name)
    outcome = asked_model(source, digest, Home.of(config.run.home).judge)(answers)
    grades = resolve_failures(name, source.on_error, outcome, answers)
    sign = 1 if source.weight > 0 else -1  # with a negative weight, the lower grade is the better one
    preferences: list[float] = []
    of_graded: list[str] = []
    for chosen, rejected, group in zip(grades[::2], grades[1::2], groups, strict=True):
        if not math.isnan(chosen + rejected):
            preferences.append(preference(sign * chosen, sign * rejected))
            of_graded.append(group)
    count = len(groups)
    # Those that could be graded may be the easy ones.
    if 2 * len(preferences) < count:
        reason = next(iter(outcome.reasons.values()), "")
        raise RewardError(
            f"reward {name}: {count - len(preferences)} of {count} held-out pairs have no grade, so its"
            f" agreement with people is not known: {reason}"
        )
    found = Intervals(config).win_rate(preferences, of_graded)
    log.info(
        "reward %s agrees with %.3f [%.3f, %.3f] of %d held-out pairs of people",
        name, found.mean, found.low, found.high, len(preferences),
    )  # fmt: skip
    numbers = found.to_json() | {"pairs": float(len(preferences))}
    metrics = prefixed(f"reward_agreement/{name}/", numbers)
    if source.compare is not None:
        usage = {part: outcome.usage[part] for part in ("comparisons", "inconsistent", "order_bias")}
        metrics |= prefixed("reward_agreement/", prefixed_usage({name: usage}))
    return metrics
