"""Whether the scores of the reward model that PPO maximises and of an independent one diverge. This is a sign
of over-optimisation (Gao et al. 2022, Scaling Laws for Reward Model Overoptimization).

    evaluations: version -> means and standard errors over the same prompts
    -> the rise of the reward model's score that the judge's does not follow

Both scores are those of one reward model each, normalised in the same way, without weights and penalties.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

Evaluations = Mapping[int, Mapping[str, float]]
"""Metrics `eval/...` by policy version, in order."""

SCORE, REWARD_MODEL, JUDGE = "eval/score", "eval/reward_model", "eval/judge"
_SIGNIFICANT = 2.0
"""Standard errors by which the reward model's score must have risen."""


@dataclass(frozen=True)
class Divergence:
    """A rise of the reward model's score that the judge's score does not follow."""

    since: int
    """Version of the earlier evaluation."""
    version: int
    """Version of the last evaluation."""
    score: float
    """Rise of the reward model's score between them."""
    judge: float
    """Change of the judge's score between them."""


def divergence(evaluations: Evaluations, ratio: float) -> Divergence | None:
    """Compare the last evaluation with each earlier one, and return the largest rise of the reward model's
    score that is significant, and of which the judge's score has followed by less than `ratio`, by more than
    one standard error. None if there is no such rise, no reward model, or no judge.
    """
    if not evaluations:
        return None
    *earlier, version = sorted(evaluations)
    found: Divergence | None = None
    for since in earlier:
        score, score_error = _change(evaluations, REWARD_MODEL, since, version)
        judge, judge_error = _change(evaluations, JUDGE, since, version)
        risen = score > _SIGNIFICANT * score_error
        # Comparisons with NaN, of an evaluation without one of the models, are false.
        if risen and judge + judge_error < ratio * score and (found is None or score > found.score):
            found = Divergence(since, version, score, judge)
    return found


def _change(evaluations: Evaluations, name: str, since: int, version: int) -> tuple[float, float]:
    """Return the change of a mean between two versions, and its standard error."""
    before, after = evaluations[since], evaluations[version]
    change = after.get(name, math.nan) - before.get(name, math.nan)
    errors = [found.get(f"{name}_error", math.nan) for found in (before, after)]
    return change, math.hypot(*errors)


def in_words(evaluations: Evaluations, measure: str, label: str) -> str:
    """Describe what `measure` did between its highest value and the last evaluation, compared with the
    training score; an empty text if it is not known. `label` names the measure.
    """
    known = [version for version, found in evaluations.items() if measure in found and SCORE in found]
    if len(known) < 2:
        return ""
    best, last = max(known, key=lambda version: (evaluations[version][measure], -version)), known[-1]
    if best == last:
        return f"{label} is highest in the last evaluation (step {last})."
    change = evaluations[last][measure] - evaluations[best][measure]
    score = evaluations[last][SCORE] - evaluations[best][SCORE]
    text = f"From step {best} to step {last}, {label[0].lower()}{label[1:]} falls by {-change:.2f}"
    if score > 0:
        return f"{text} while the training score rises by {score:.2f}: the policy is over-optimised there."
    return f"{text}, and the training score by {-score:.2f}."
