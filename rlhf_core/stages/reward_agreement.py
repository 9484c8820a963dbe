"""Agreement of language models that are reward sources with people, before PPO uses them."""

from __future__ import annotations

import logging
import math

from rlhf_core.config import PipelineConfig
from rlhf_core.config.rewards import LanguageModelReward
from rlhf_core.errors import GateFailed, RewardError
from rlhf_core.evaluation.language_model import held_out_pairs_of_people
from rlhf_core.evaluation.statistics import win_rate
from rlhf_core.evaluation.summary import Intervals
from rlhf_core.rewards.compose import code_digests, source_name
from rlhf_core.rewards.failures import resolve_failures
from rlhf_core.rewards.language_model import LanguageModelGrades
from rlhf_core.system.home import Home
from rlhf_core.types import RewardInput, StageContext

log = logging.getLogger(__name__)

_PAIRS = 100
"""Largest number of pairs. Each costs two questions."""


def check_language_model_rewards(config: PipelineConfig, context: StageContext) -> None:
    """Compare the grades of both answers of held-out pairs with the choice of people, for each
    `type: language_model` of `ppo.rewards` with a weight and `min_agreement`.

    A pair without a grade, which `on_error: mask` allows, is left out. Replies are kept, so a retry asks
    nothing again. Without pairs of people, a warning says that nothing was measured.

    Raises:
        GateFailed: A source agrees too little.
        RewardError: A source has no grade for most of the pairs.
    """
    sources = [
        source
        for source in config.ppo.rewards
        if isinstance(source, LanguageModelReward) and source.weight and source.min_agreement is not None
    ]
    if not sources:
        return
    pairs, of_models = held_out_pairs_of_people(context.inputs["data"], _PAIRS)
    if not pairs:
        log.warning(
            "ppo.rewards: the agreement of %s with people was not measured: no held-out pair is labelled by"
            " people (%d by models)",
            ", ".join(map(source_name, sources)), of_models,
        )  # fmt: skip
        return
    answers = [
        RewardInput(f"pair {index}", pair.prompt, text, (), (), True, {})
        for index, pair in enumerate(pairs)
        for text in (pair.a, pair.b)
    ]
    for source in sources:
        _check(config, context, source, answers)


def _check(
    config: PipelineConfig, context: StageContext, source: LanguageModelReward, answers: list[RewardInput]
) -> None:
    name = source_name(source)
    digest = code_digests(config.ppo.rewards, context.sources).get(name)
    outcome = LanguageModelGrades(source, digest, Home.of(config.run.home).judge)(answers)
    grades = resolve_failures(name, source.on_error, outcome, answers)
    both = [pair for pair in zip(grades[::2], grades[1::2], strict=True) if not any(map(math.isnan, pair))]
    count = len(answers) // 2
    if 2 * len(both) < count:
        reason = next(iter(outcome.reasons.values()), "")
        raise RewardError(
            f"reward {name}: {count - len(both)} of {count} held-out pairs have no grade, so its agreement"
            f" with people is not known: {reason}"
        )
    # With a negative weight, the lower grade is the better one.
    preferences = [0.5 if a == b else float((a > b) == (source.weight > 0)) for a, b in both]
    found = win_rate(preferences, **Intervals(config).settings(f"agreement of {name}"))
    metrics = {f"reward_agreement/{name}/{part}": value for part, value in found.to_json().items()}
    context.metrics.log_metrics(metrics | {f"reward_agreement/{name}/pairs": float(len(both))}, 0)
    text = (
        f"agrees with {found.mean:.3f} [{found.low:.3f}, {found.high:.3f}] of {len(both)} held-out pairs of"
        " people"
    )
    log.info("reward %s %s", name, text)
    assert source.min_agreement is not None
    if found.mean < source.min_agreement:
        reason = f"below min_agreement={source.min_agreement:g}"
    elif found.low <= 0.5:
        reason = "not significantly more often than by chance (0.5)"
    else:
        return
    raise GateFailed(
        f"ppo: reward {name} ({source.model}) {text} (equal grades count half), {reason}. Use a better model"
        " or rubric, or set its min_agreement to null if its grades are not about the preference of people"
    )
