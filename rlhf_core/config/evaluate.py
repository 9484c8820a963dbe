"""Sections of what follows the training. `evaluate`: prompts, judges, the language model that judges, and
regression sets. `benchmark`. `sample` and `register`: answers of the policy as the data of a next round, the
registry, and the rules of promotion.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Literal

from pydantic import field_validator

from rlhf_core.config.base import (
    BATCH,
    RANKS,
    TEMPERATURE,
    FiniteFloat,
    Fraction,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Range,
    Section,
    UserPath,
    content,
    execution,
    result,
    rounding,
    url_problem,
)
from rlhf_core.config.data import Source
from rlhf_core.config.rewards import AnyReward, ChatServiceConfig, ModelReward
from rlhf_core.pipeline import PolicyStage


class LanguageModelConfig(ChatServiceConfig):
    """A language model that judges answers. Either `path`, or `url` and `model`, must be given."""

    path: UserPath | None = content(None, min_length=1)
    """Folder of a model in Hugging Face layout, which vLLM runs in the stage with the settings of
    `ppo.engine`, and which replies with one token; null: `url`
    """
    pairs: PositiveInt = result(100, within=Range(10, 100_000, "with fewer, chance decides"))
    """Held-out preference pairs that the agreement is measured with, or all if there are fewer"""
    # In no key: an evaluation that is reused must meet it as well (`stages.gates`).
    min_agreement: PositiveFloat = execution(0.6, within=Range(0.51, 1.0, "agreement by chance is 0.5"))
    """If the judge agrees with less than this share of the held-out pairs, or not significantly more often
    than by chance, the stage `evaluate` fails. A pair on which the judge has no preference counts half
    """

    @property
    def name(self) -> str:
        """The name of the model in reports."""
        return self.model or str(self.path).rstrip("/").rpartition("/")[2]

    def problems(self) -> Iterator[str]:
        field = "evaluate.language_model"
        if (self.path is None) == (self.url is None):
            yield f"{field} needs either path or url; got {'both' if self.path else 'neither'}"
        if self.url is None:
            if self.model or self.api_key_env:
                yield f"{field}.path is run here; got model or api_key_env as well; leave them out"
            return
        if self.model is None:
            yield f"{field}.url needs {field}.model, the name of the model there"
        if problem := url_problem(self.url):
            yield f"{field}.url: {problem}"


class RegressionSet(Source):
    """Prompts with the reward source that scores their answers."""

    name: str = result(..., pattern=r"^[a-z0-9_]{1,32}$", form="1 to 32 of a-z, 0-9 and `_`")
    """Name in results and reasons"""
    reward: AnyReward = result(...)
    """Scores the answers: an item as in `ppo.rewards`, not of type `model`. Raw values are compared"""
    # Of a test of non-inferiority. A test of equality passes with few prompts, because it then finds nothing
    # (decision 37).
    margin: PositiveFloat = result(
        0.02, within=Range(1e-6, 1e6, "with 0, a policy that is equally good fails half of the time")
    )
    """The set fails unless the lower bound of the mean difference, paired by prompt, is above -margin"""

    def problems(self) -> Iterator[str]:
        if self.path == "synthetic":
            yield (
                "path: `synthetic` makes the prompts of training; got it for a regression set; give a file"
            )
        if self.weight != 1.0:
            raise ValueError("weight: a regression set has each prompt once; leave it out")
        # PPO raises the score of this model, so it cannot show what the policy has lost (decision 37).
        if isinstance(self.reward, ModelReward):
            yield (
                "reward.type: model is the reward model of the run, which judges no regression set; use"
                " another type, such as answer or python"
            )
        if getattr(self.reward, "on_error", "abort") != "abort":
            yield (
                "reward.on_error: mask would leave responses out of the comparison with a regression set; use"
                " abort"
            )
        if self.reward.weight != 1.0 or self.reward.normalize != "none":
            yield (
                "reward: a regression set compares raw values, so weight and normalize have no effect; leave"
                " them out"
            )


class EvaluateConfig(Section):
    """The policy against the SFT model on held-out prompts."""

    prompts: PositiveInt = result(128)
    """Held-out prompts, or all if there are fewer. Those that choose PPO's policy are left out if at least 50
    others remain. The default on GPUs is 384: those of `data.max_eval` that are not `ppo.evaluate_prompts`
    """
    answers_per_prompt: PositiveInt = result(
        1, within=Range(1, 64, "more answers hardly change the mean of a prompt"), later=True
    )
    """Answers of each model to each held-out prompt, in the evaluation and in the match. The outcomes of a
    prompt are averaged, so that a small difference needs fewer prompts
    ([promotion](promotion.md#how-many-prompts))
    """
    temperature: PositiveFloat | None = result(None, within=TEMPERATURE)
    """Sampling temperature of both models; null: ppo.temperature"""
    bootstrap: PositiveInt = result(
        2000, within=Range(1, 200_000, "intervals no longer change, and each resample is held in memory")
    )
    """Resamples for the confidence intervals"""
    confidence: PositiveFloat = result(
        0.95, within=Range(0.5, 0.999, "no interval has the level 1, and levels below 0.5 are not useful")
    )
    """Level of the intervals"""
    # Nobody configures a language model that is not to judge, so `auto` begins with it (decision 8).
    judge: Literal["auto", "language_model", "gold", "judge_model", "reward_model", "rules"] = result("auto")
    """The judge of a win. `auto`: the language model if there is one, else the true reward if there is one,
    else the second reward model (`reward.judge`), else the reward model, else the rules
    """
    # Not in the evaluations during PPO: a question for each prompt and version costs too much (decision 8).
    language_model: LanguageModelConfig | None = result(None, later=True)
    """A language model that judges the evaluation and the match; null: none"""
    samples: PositiveInt = result(20, within=Range(1, 10_000, "rows of one table"))
    """Sample pairs in the table and report"""
    chosen: bool = result(True, later=True)
    """Compare both models also with the `chosen` answers of held-out pairs, at most `prompts`; needs a judge
    that is no rule
    """
    regression: tuple[RegressionSet, ...] = result((), max_length=16, later=True)
    """Prompts on which the policy must not be worse than the SFT model, and in a match than the champion:
    otherwise it is not promoted ([promotion](promotion.md#regression-sets))
    """
    ranks: PositiveInt = execution(1, within=RANKS)
    """Ranks that compute log-probabilities and scores of the reward model, in the evaluation and in the match
    (one GPU each where there are GPUs). A model that was trained with ZeRO-3 is sharded over them; otherwise
    each has a copy
    """
    engines: PositiveInt = execution(1, within=RANKS)
    """Engines that sample at the same time, in the evaluation and in the match, with
    `ppo.engine.tensor_parallel` GPUs each
    """

    @field_validator("regression")
    @classmethod
    def _check_names(cls, sets: tuple[RegressionSet, ...]) -> tuple[RegressionSet, ...]:
        names = [each.name for each in sets]
        if len(set(names)) < len(names):
            raise ValueError(f"evaluate.regression needs distinct names; got {', '.join(names)}")
        return sets


class BenchmarkConfig(Section):
    """Tasks of [lm-evaluation-harness](harness.md) for the policy that is registered."""

    tasks: tuple[str, ...] = result(..., min_length=1)
    """Names of tasks, groups or tags of the harness, or of tasks in `folder`"""
    folder: UserPath | None = content(None, min_length=1)
    """Folder with tasks of your own: YAML files, their data and their Python files. Relative paths in the
    YAML files start there. The content of all its files is in the stage's key
    """
    limit: PositiveInt | None = result(None)
    """Items of each task, for a quick look; null: all"""
    num_fewshot: NonNegativeInt | None = result(None, within=Range(0, 1000, "no context has room for more"))
    """Solved examples before each item; null: as the task says"""
    apply_chat_template: bool | None = result(None)
    """Ask with the chat template of the policy; null: if the policy was trained with one (`data.template:
    chat`)
    """
    batch_size: PositiveInt = rounding(8, within=BATCH)
    """Sequences of one forward pass. Changing it changes the last bits of likelihoods"""


SampledStage = Literal["ppo", "dpo", "sft"]
"""The stages whose model can answer."""


class SampleConfig(Section):
    """Several answers of the policy to each training prompt: the best ones as demonstrations, the best and
    the worst one as pairs.
    """

    answers: PositiveInt = result(4, within=Range(2, 1024, "a pair needs two, and all are held in memory"))
    """Answers to each prompt"""
    # Not that of `register.policy`, which would change the keys of existing configurations (decision 48).
    policy: SampledStage = result("ppo", later=True)
    """The stage whose model answers: `ppo` or `dpo`, if it is enabled, or `sft` for the SFT model alone. With
    `dpo` and `sft`, a run that ends at `sample` (`--until`) leaves PPO out
    """
    prompts: PositiveInt | None = result(None)
    """Training prompts, at equal distances; null or more than there are: all"""
    temperature: PositiveFloat | None = result(None, within=TEMPERATURE)
    """Sampling temperature; null: ppo.temperature"""
    # A language model compares with the first answer only: n - 1 pairs, all asked at once. A knock-out has
    # turns that wait for each other, and all pairs are n (n - 1) / 2 (decision 48).
    judge: Literal["reward", "judge_model", "language_model", "people"] = result("reward")
    """Who scores the answers. `reward`: the rewards of PPO, with their weights; `judge_model`: the second
    reward model (`reward.judge`); `language_model`: `evaluate.language_model` compares each answer with the
    first one to the same prompt; `people`: nobody in the stage, and `rlhf rounds` waits for
    [votes](rounds.md#labels-of-people)
    """
    min_score: FiniteFloat | None = result(None)
    """The best answer to a prompt is no demonstration if its score is lower, for example 1 with a reward of 0
    or 1, or with a language model, for which 1 is a win; null: it always is
    """


class RegisterConfig(Section):
    """The MLflow registry."""

    model: str | None = result(
        None, pattern=r"^[\w.-]{1,100}$", form="1 to 100 letters, digits, `.`, `_` and `-`"
    )
    """Registered name; default `{run.name}-policy`"""
    policy: PolicyStage = result("ppo", later=True)
    """The stage whose policy is registered, evaluated and matched with the champion. With `dpo`
    ([promotion](promotion.md#the-policy-of-dpo)) PPO is trained too, if it is enabled, and the report
    compares both
    """
    min_win_rate: Fraction = result(0.5)
    """Against SFT; below this value the alias `champion` is not set"""
    # Few prompts are no evidence: winning two of two has p = 0.25 (decision 37).
    min_prompts: NonNegativeInt = result(50)
    """A match or evaluation with fewer prompts does not set the alias `champion`"""
    # Levels follow from times, and not from a number of tests in a year: after the last of these, every
    # candidate would be refused (decision 37).
    alpha: PositiveFloat = result(
        0.05, within=Range(1e-6, 0.5, "0 allows no champion, and above 0.5 chance decides")
    )
    """Maximum probability that, within 365 days, any candidate that is not better than the champion replaces
    it ([promotion](promotion.md)); while there is no champion, the k-th test has the level alpha / (k (k +
    1)), in addition to the budget of the year
    """
    votes: tuple[UserPath, ...] = content(())
    """Files of [votes](promotion.md#votes-of-people) about this policy and its SFT model, or about this
    policy and the champion
    """
    votes_margin: PositiveFloat | None = result(
        None, within=Range(0.001, 0.5, "with 0.5 only the loss of every pair refuses"), later=True
    )
    """The alias `champion` is not set unless people voted (`votes`) and the lower bound of the policy's win
    rate by their votes is above 0.5 - this; null: votes are only shown
    """
    independent_judge: bool = result(False, later=True)
    """The alias `champion` is not set if the policy was trained on the judge of its evaluation, whose win
    rate rises under over-optimisation
    """


def prompts_for_margin(margin: float, confidence: float) -> int:
    """Return the least number of prompts of a set of right or wrong answers.

    A policy that loses a share `margin` of such answers loses none of n prompts with a probability of
    (1 - margin)^n <= exp(-margin n). The interval then has no width, and the set passes. With
    n = ln(2 / (1 - confidence)) / margin this probability is (1 - confidence) / 2, that of the lower bound.
    For a confidence of 0.95, n is 3.7 / margin.
    """
    return math.ceil(math.log(2 / (1 - confidence)) / margin)
