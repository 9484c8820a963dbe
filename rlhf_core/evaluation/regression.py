"""Regression sets (`evaluate.regression`): a policy that is worse on one of them is not promoted.

Policy and opponent answer the same prompts with the same seeds, and the reward source of the set scores the
answers. The opponent is the SFT model in the evaluation and the champion in the match. A set fails unless the
lower bound of the mean difference, paired by prompt, is above -margin (a test of non-inferiority).

The evaluation leaves the prompts in its artifact, so that the match asks the same ones.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

from rlhf_core.config import PipelineConfig
from rlhf_core.config.evaluate import prompts_for_margin
from rlhf_core.config.keys import result_settings
from rlhf_core.data.dataset import load_prompts, write
from rlhf_core.data.prompt_sets import Sets, read_sets
from rlhf_core.data.sources import regression_contents, require_unchanged
from rlhf_core.evaluation.prompts import TrainedPrompts
from rlhf_core.evaluation.scoring import score_rules
from rlhf_core.evaluation.statistics import units
from rlhf_core.evaluation.summary import Intervals
from rlhf_core.record.writer import AnswerRecord
from rlhf_core.types import RewardInput, StageContext

log = logging.getLogger(__name__)

_FOLDER = "regression"


def prepare_sets(config: PipelineConfig, context: StageContext) -> Sets:
    """Read the sources of all sets, and write their prompts to the output of the stage.

    Raises DataError for a row that cannot be used, and for a source that has changed since the run began.
    """
    if not config.evaluate.regression:
        return {}
    contents = regression_contents(config)
    digests = {name: source.digest for name, source in contents.items()}
    require_unchanged(digests, context.sources, config)
    data = context.data
    trained = TrainedPrompts.of([data])
    sets = read_sets(config, data, contents)
    for index, (name, prompts) in enumerate(sets.items()):
        known = sum(prompt in trained for prompt in prompts)
        if known:
            log.warning(
                "evaluate.regression[%d]: %d of %d prompts are in the training data, or related to one there",
                index,
                known,
                len(prompts),
            )
        folder = context.output / _FOLDER / name
        folder.mkdir(parents=True)
        write(folder, "prompts", "eval", prompts)
    return sets


def load_sets(config: PipelineConfig, evaluation: Path) -> Sets:
    """Return the prompts in an artifact of the evaluation."""
    names = [each.name for each in config.evaluate.regression]
    return {name: load_prompts(evaluation / _FOLDER / name, "eval") for name in names}


def compare_on_sets(
    config: PipelineConfig,
    responses: Mapping[str, Mapping[str, Sequence[RewardInput]]],
    opponent: str,
    code: Mapping[str, str],
    interval: Intervals,
    record: AnswerRecord,
) -> dict[str, dict[str, Any]]:
    """Return the results of each set: the mean of each model and in `difference` that of each policy minus
    the opponent, as intervals, `margin`, the number of `prompts`, whether these are `too_few` for the margin,
    and a digest of the `reward`.

    Args:
        config: Configuration of the run.
        responses: Responses of the opponent and of one or two policies, by set.
        opponent: Name of the opponent in `responses`.
        code: Digests of the external inputs of the stage, for the code of Python rewards.
        interval: Computes the confidence intervals, and knows the groups of the prompts.
        record: Gets the rewards of the responses, as their scores.
    """
    found: dict[str, dict[str, Any]] = {}
    for index, each in enumerate(config.evaluate.regression):
        answers = responses[opponent][each.name]
        count = len(answers)
        field, name = f"evaluate.regression.{index}.reward", each.reward.used_name
        digests = {name: code[field]} if field in code else {}
        # In one call, because a Python function may compare the responses of its batch.
        samples = list(chain.from_iterable(by_set[each.name] for by_set in responses.values()))
        scores = score_rules(config, (each.reward,), samples, digests).by_source[name]
        record.note("score", samples, scores)
        values = {model: scores[n * count : (n + 1) * count] for n, model in enumerate(responses)}
        groups = interval.groups(answers)
        prompts = len({answer.prompt_id for answer in answers})
        independent = len(set(groups))
        least = prompts_for_margin(each.margin, config.evaluate.confidence)
        # The bound is one for shares of right answers; other rewards have a spread that is not known before.
        is_small = set(scores) <= {0.0, 1.0} and independent < least
        # No error: an exact bound would refuse each small set, also for a policy with the same answers
        # (decision 37).
        if is_small:
            log.warning(
                "regression set %s: %s are too few for its margin of %g, which needs about %d: a loss of this"
                " size often passes",
                each.name,
                units(independent, prompts),
                each.margin,
                least,
            )
        seed = f"regression/{each.name}"
        # Settings that change no value, such as time limits, leave the digest as it is.
        settings = json.dumps(result_settings(each.reward), sort_keys=True) + digests.get(name, "")
        found[each.name] = {
            **interval.by_model(seed, values, groups, opponent),
            "margin": each.margin,
            "prompts": prompts,
            "too_few": is_small,
            "reward": hashlib.sha256(settings.encode()).hexdigest()[:16],
        }
    return found
