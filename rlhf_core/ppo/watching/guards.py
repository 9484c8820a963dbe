"""Detection of failing training runs, as configured in `ppo.guards`.

    metrics of a step -> conditions -> several steps in a row -> alarm

An alarm is a warning in the log and `warnings/<name>` = 1, and with `stop` the end of the run.

Some conditions compare a metric with its initial value. This is the value of the first step, whose responses
are sampled from the SFT model. docs/diagnose.md lists all guards with an example of a failure for each.

The guard `overoptimization`: whether PPO over-optimises the reward model (Gao et al. 2022, Scaling Laws for
Reward Model Overoptimization): an independent reward model, the judge, does not agree with it any more, and
the policy still moves away.

    agreement    the correlation of both scores over the responses to the held-out prompts, compared with that
                 over the SFT model's responses
    movement     the rise of the square root of the KL per step since the last evaluation, compared with its
                 mean over all steps so far. The KL is that above the SFT model's, which is rounding

A policy that is tilted further towards the reward model, p(y) exp(t r(y)), changes the mean score of the
judge by Cov(judge, r) for each unit of t, and that of the reward model by Var(r). So the correlation is the
rise of the judge's mean for each rise of the reward model's mean that more training brings, both in standard
deviations. It falls before the judge's mean does, and one evaluation measures it, where a difference of two
means has the noise of both. It also falls in a sound run, after the policy has learned what both models agree
on. But there the KL penalty holds the policy, and it moves more slowly than before. Both conditions must
hold in two consecutive evaluations, because the KL between two of them is noisy.

Both scores are those of one reward model each, normalised in the same way, without weights and penalties.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, get_args

import numpy as np

from rlhf_core.algo.groups import effective_count
from rlhf_core.config.data import never_ends
from rlhf_core.config.ppo import PPOConfig
from rlhf_core.config.ppo_sections import GuardName, guard_limit

log = logging.getLogger(__name__)

Evaluations = Mapping[int, Mapping[str, float]]
"""Metrics `eval/...` by policy version, in order."""

SCORE, KL = "eval/score", "eval/kl"
DIVERSITY = "eval/distinct_2"
CORRELATION, CORRELATION_ERROR = "eval/judge_correlation", "eval/judge_correlation_error"
_SAME_SPEED = 0.95
"""A policy of this share of the mean speed has not become slower; the rest is noise of the KL."""


@dataclass(frozen=True)
class Divergence:
    """Reward model and judge do not agree on the responses of a policy that still moves."""

    version: int
    """Version of the last evaluation."""
    correlation: float
    """Over its responses."""
    initial: float
    """Over the SFT model's responses."""
    kl: float
    """KL of the version, in nats per response."""


def correlation(
    x: Sequence[float],
    y: Sequence[float],
    groups: Sequence[str] | None = None,
    *,
    of_ranks: bool = False,
) -> tuple[float, float]:
    """Return the Pearson correlation r and its standard error (1 - r^2) / sqrt(n - 1). Points with a NaN are
    left out. NaN with fewer than three points, or if all values of one side are equal. With `of_ranks` it is
    Spearman's: that of the ranks, where equal values share their mean rank.

    With groups of points, the error is that of the effective number of influences u v - r (u^2 + v^2) / 2,
    where u and v are the standardized values: r is their mean to first order.
    """
    points = np.asarray([x, y], dtype=np.float64)
    known = np.isfinite(points).all(axis=0)
    points = points[:, known]
    count = points.shape[1]
    # By the range, because the standard deviation of equal floats can be a rounding error instead of 0.
    if count < 3 or (np.ptp(points, axis=1) == 0).any():
        return math.nan, math.nan
    if of_ranks:
        # Here, because only evaluations with a judge need SciPy's statistics.
        from scipy.stats import rankdata

        points = rankdata(points, axis=1)
    value = float(np.corrcoef(points)[0, 1])
    error = (1 - value**2) / math.sqrt(count - 1)
    if groups is None:
        return value, error
    u, v = (points - points.mean(axis=1, keepdims=True)) / points.std(axis=1, keepdims=True)
    influences = (u * v - value * (u**2 + v**2) / 2).tolist()
    return value, error * math.sqrt(count / effective_count(influences, np.asarray(groups)[known].tolist()))


def divergence(evaluations: Evaluations, ratio: float) -> Divergence | None:
    """Return what the last evaluation shows, or None if it or the one before shows no over-optimisation."""
    before = sorted(evaluations)[:-1]
    if divergence_of_last({version: evaluations[version] for version in before}, ratio) is None:
        return None
    return divergence_of_last(evaluations, ratio)


def divergence_of_last(evaluations: Evaluations, ratio: float) -> Divergence | None:
    """Return what the last evaluation shows by itself, or None.

    Its correlation must be below `ratio` times that of the SFT model's responses by more than one standard
    error, and the policy must not move more slowly than before. None also without a reward model or judge,
    and if the two do not agree on the SFT model's responses either.
    """
    if len(evaluations) < 2:
        return None
    versions = sorted(evaluations)
    first, last = versions[0], versions[-1]
    initial, initial_error = _correlation(evaluations[first])
    value, error = _correlation(evaluations[last])
    # Comparisons with NaN, of an evaluation without one of the models, are false.
    agreed = initial > 2 * initial_error
    if agreed and value + error < ratio * initial and _moves(evaluations):
        return Divergence(last, value, initial, evaluations[last][KL])
    return None


def _correlation(found: Mapping[str, float]) -> tuple[float, float]:
    return found.get(CORRELATION, math.nan), found.get(CORRELATION_ERROR, math.nan)


def _moves(evaluations: Evaluations) -> bool:
    """Return whether the square root of the KL has risen per step since the last evaluation about as much as
    in the mean of all steps.
    """
    versions = sorted(evaluations)
    first, before, last = versions[0], versions[-2], versions[-1]
    distance = {}
    for version in (before, last):
        kl = evaluations[version].get(KL, math.nan) - evaluations[first].get(KL, math.nan)
        # The KL is an estimate from samples: close to 0 it can be negative.
        distance[version] = math.sqrt(max(kl, 0.0))
    speed = (distance[last] - distance[before]) / (last - before)
    mean = distance[last] / (last - first)
    return mean > 0 and speed >= _SAME_SPEED * mean


def in_words(evaluations: Evaluations, measure: str, label: str) -> str:
    """Describe what `measure` did between its highest value and the last evaluation, compared with the
    training score; an empty text if it is not known. `label` names the measure.

    A fall by at most the standard error of the difference, paired by prompt (`..._change_error`), is none.
    """
    known = [version for version, found in evaluations.items() if measure in found and SCORE in found]
    if len(known) < 2:
        return ""
    best, last = max(known, key=lambda version: (evaluations[version][measure], -version)), known[-1]
    if best == last:
        return f"{label} is highest in the last evaluation (step {last})."
    change = evaluations[last][measure] - evaluations[best][measure]
    score = evaluations[last][SCORE] - evaluations[best][SCORE]
    error = evaluations[last].get(f"{measure}_change_error", 0.0)
    text = f"From step {best} to step {last}, {label[0].lower()}{label[1:]}"
    if -change <= error:
        return f"{text} does not change measurably ({change:+.2f}, standard error {error:.2f})."
    text += f" falls by {-change:.2f}"
    if score > 0:
        return f"{text} while the training score rises by {score:.2f}: the policy is over-optimised there."
    return f"{text}, and the training score by {-score:.2f}."


TRAINS_POLICY = "ppo/trains_policy"
"""1 in steps that train the policy, 0 in those that train the critic only and in skipped ones."""
_INITIAL_METRICS = ("rollout/eos_rate", "policy/entropy", "rollout/length")
# The last two are checked after an evaluation (`check_evaluations`).
NAMES: tuple[GuardName, ...] = get_args(GuardName)[:-2]


def alarm(name: str, text: str) -> None:
    """Log one warning, which appears on the terminal and in Prefect. Its name becomes a tag of the MLflow
    run.
    """
    log.warning("%s", text, extra={"guard": name})


def check_evaluations(ppo: PPOConfig, evaluations: Evaluations, metrics: dict[str, float]) -> str | None:
    """Check the guards that look at evaluations, which have no counters: `overoptimization` and
    `diversity_loss`.

    Adds `warnings/<name>` to `metrics`. Returns a sentence if a guard must end the run.
    """
    failures = []
    for name, describe in _OF_EVALUATIONS.items():
        action = ppo.guards.get(name, "warn")
        if action == "off":
            continue
        text = describe(evaluations, guard_limit(ppo.guard_limits, name))
        metrics[f"warnings/{name}"] = float(text is not None)
        if text is not None:
            alarm(name, text)
            if action == "stop":
                failures.append(text)
    return "; ".join(failures) or None


def _overoptimised(evaluations: Evaluations, limit: float) -> str | None:
    found = divergence(evaluations, limit)
    if found is None:
        return None
    return (
        f"step {found.version}: the scores of reward model and judge have a correlation of"
        f" {found.correlation:.2f} over the responses to the held-out prompts, and {found.initial:.2f} over"
        f" the SFT model's, and the policy still moves away from it (KL {found.kl:.1f}): the reward model is"
        " over-optimised; raise ppo.kl.coef, or set ppo.publish=best and ppo.stop_patience"
    )


def _alike(evaluations: Evaluations, limit: float) -> str | None:
    versions = sorted(evaluations)
    initial, value = (evaluations[each].get(DIVERSITY, math.nan) for each in (versions[0], versions[-1]))
    # `not <`, so that a NaN on either side raises no alarm.
    if not value < limit * initial:
        return None
    return (
        f"step {versions[-1]}: {value:.1%} of the word pairs in the responses to the held-out prompts are"
        f" distinct, {initial:.1%} in the SFT model's: the responses become alike; read samples, raise"
        " ppo.kl.coef, or set ppo.publish=best"
    )


_OF_EVALUATIONS: Mapping[GuardName, Callable[[Evaluations, float], str | None]] = {
    "overoptimization": _overoptimised,
    "diversity_loss": _alike,
}


def raised_guards(
    ppo: PPOConfig, history: Mapping[int, Mapping[str, float]], evaluations: Evaluations
) -> dict[int, list[str]]:
    """Return the guards that a finished run raised, by step. They follow from its metrics.

    Args:
        ppo: Its settings.
        history: Metrics of its steps by step, in order, as in `metrics.jsonl`.
        evaluations: Those during the training.
    """
    guards = Guards(ppo, report=lambda name, text: None)
    raised: dict[int, list[str]] = {}
    for step, stored in history.items():
        if stored.get("ppo/skipped_steps"):
            continue
        # The file does not have this metric (`PPOController._log`).
        metrics = {**stored, TRAINS_POLICY: float("loss/policy" in stored)}
        guards.check(metrics, step)
        raised[step] = [name for name in NAMES if metrics.get(f"warnings/{name}")]
    for version in evaluations:
        until = {each: found for each, found in evaluations.items() if each <= version}
        for name, describe in _OF_EVALUATIONS.items():
            is_on = ppo.guards.get(name, "warn") != "off"
            if is_on and describe(until, guard_limit(ppo.guard_limits, name)) is not None:
                raised.setdefault(version, []).append(name)
    return {step: names for step, names in raised.items() if names}


class Guards:
    """The guards with their counters, which are stored in the checkpoint.

    Args:
        ppo: The settings.
        report: Gets the name and the text of a guard when it is raised.
    """

    def __init__(self, ppo: PPOConfig, report: Callable[[str, str], None] = alarm) -> None:
        self._ppo = ppo
        self._report = report
        self._initial: dict[str, float] = {}
        self._in_a_row: dict[str, int] = {}

    def state_dict(self) -> dict[str, Any]:
        return {"at_first": dict(self._initial), "in_a_row": dict(self._in_a_row)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._initial = {name: float(value) for name, value in state["at_first"].items()}
        self._in_a_row = {name: int(count) for name, count in state["in_a_row"].items()}

    def check(self, metrics: dict[str, float], step: int) -> list[str]:
        """Add `warnings/<name>` to `metrics`. Return one sentence for each guard that must end the run."""
        # A step that is skipped is not checked, so these metrics are finite.
        if not self._initial:
            self._initial = {name: metrics[name] for name in _INITIAL_METRICS if name in metrics}
            self._check_first_responses(metrics, step)
        conditions = self._conditions(metrics)
        failures = []
        for name in NAMES:
            action = self._ppo.guards.get(name, "warn")
            if action == "off":
                continue
            count = self._in_a_row.get(name, 0) + 1 if name in conditions else 0
            self._in_a_row[name] = count
            needed = self._ppo.guard_patience
            # Its limit is a number of steps, and replaces the patience of the other guards.
            if name == "blind_critic":
                needed = math.ceil(self._limit(name))
            metrics[f"warnings/{name}"] = float(count >= needed)
            # Once for each series: a sentence in every step would hide other warnings.
            if count == needed:
                self._report(name, f"step {step}: guard {name}: {conditions[name]}")
            # `>=`, because `stop` may be new in an attempt that continues with a longer series.
            if count >= needed and action == "stop":
                failures.append(f"guard {name}: {conditions[name]}")
        return failures

    def _limit(self, name: GuardName) -> float:
        return guard_limit(self._ppo.guard_limits, name)

    def _check_first_responses(self, metrics: Mapping[str, float], step: int) -> None:
        """Warn if the SFT model's responses never end. The condition of `eos_loss` does not show it: the
        share of responses with EOS must fall, which it cannot do from 0.
        """
        problem = never_ends({"the SFT model": metrics.get("rollout/eos_rate", 1.0)})
        if problem is not None and self._ppo.guards.get("eos_loss") != "off":
            self._report("eos_loss", f"step {step}: guard eos_loss: {problem}")

    def _conditions(self, metrics: Mapping[str, float]) -> dict[str, str]:
        """Return a description of each condition that is met, by the name of the guard."""
        initial, limit = self._initial, self._limit
        met: dict[str, str] = {}

        # Here and below, a metric that is not known has a value that meets no condition.
        eos, initial_eos = metrics.get("rollout/eos_rate", 1.0), initial.get("rollout/eos_rate", 0.0)
        if eos < limit("eos_loss") * initial_eos:
            met["eos_loss"] = (
                f"{eos:.1%} of the responses end with EOS, initially {initial_eos:.1%};"
                " raise ppo.missing_eos_penalty or ppo.kl.coef"
            )

        entropy, initial_entropy = metrics.get("policy/entropy", 0.0), initial.get("policy/entropy", 0.0)
        if entropy < limit("entropy_collapse") * initial_entropy:
            met["entropy_collapse"] = (
                f"the policy's entropy is {entropy:.2g} nats per token, initially {initial_entropy:.2g};"
                " raise ppo.kl.coef or ppo.entropy_coef, or lower ppo.policy.learning_rate"
            )
        if entropy > limit("entropy_explosion") * initial_entropy:
            met["entropy_explosion"] = (
                f"the policy's entropy is {entropy:.2g} nats per token, initially {initial_entropy:.2g};"
                " lower ppo.policy.learning_rate or ppo.entropy_coef, or raise ppo.kl.coef"
            )

        kl = metrics.get("objective/kl", 0.0)
        # Not below 0: the mean of k1 over samples is noisy, and often negative while the policy is close to
        # the reference.
        if kl < -limit("negative_kl"):
            met["negative_kl"] = (
                f"the KL to the reference is {kl:.3g} nats per response, which is impossible for"
                " responses of the trained policy; check rollout/logprob_gap_mean and the sampling"
                " settings"
            )

        length, initial_length = metrics.get("rollout/length", 0.0), initial.get("rollout/length", 0.0)
        ratio = limit("length_drift")
        if length > ratio * initial_length or length < initial_length / ratio:
            met["length_drift"] = (
                f"responses have {length:.0f} tokens on average, initially {initial_length:.0f}; check"
                " whether the reward depends on the length, or raise ppo.kl.coef"
            )

        share = metrics.get("rollout/repeating_rate", 0.0)
        if share >= limit("loops"):
            met["loops"] = (
                f"{share:.0%} of the responses contain loops; raise ppo.kl.coef, or add a reward of type"
                " repetition"
            )

        correlation = metrics.get("rollout/score_length_correlation", 0.0)
        if abs(correlation) >= limit("score_length"):
            met["score_length"] = (
                f"scores and lengths of the responses have a correlation of {correlation:.2f}, so the"
                " reward mostly depends on the length; check the reward model's length bias"
            )

        # With equal scores, the returns only contain the KL and the critic's own values, and say nothing
        # about the critic. The critic's warm-up has a warning of its own.
        is_judged = metrics.get("objective/scores_std", 1.0) > 0 and metrics.get(TRAINS_POLICY, 1.0) > 0
        explained = metrics.get("value/explained_variance", 1.0)
        if explained <= 0 and is_judged:
            met["blind_critic"] = (
                f"the critic does not predict the returns (explained variance {explained:.2g}); raise"
                " ppo.critic.learning_rate, ppo.critic_warmup_steps or ppo.critic_warmup_max_steps"
            )

        clipped = metrics.get("objective/score_clipfrac", 0.0)
        if clipped > limit("score_clip"):
            met["score_clip"] = (
                f"{clipped:.1%} of the reward model's scores are beyond"
                f" ppo.score_clip={self._ppo.score_clip:g} and are clipped; raise it, or check the"
                " responses with these scores"
            )
        return met
