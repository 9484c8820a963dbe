"""Stage `sample`: policy (`sample.policy`) + training prompts -> data of a next round.

    prompts -> n answers each -> scores -> best.jsonl     the best answer to each prompt, for `data.sft`
                                           pairs.jsonl    the best and the worst, for `data.preference`
                                           answers.jsonl  all answers, for people (`rlhf review --of sample`)
                                           record/        the same with their tokens

Only answers that end with EOS take part, have text, and have a score: the data stage puts an EOS after every
answer, so one that was cut would be an answer that the policy never gave. Held-out prompts are not sampled.
With `sample.judge: people` no answer has a score, and the first two files are empty.
"""

from __future__ import annotations

import logging
import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import starmap
from pathlib import Path
from typing import Any

from rlhf_core.config import PipelineConfig
from rlhf_core.config.data import never_ends
from rlhf_core.data.dataset import load_prompts
from rlhf_core.data.formats import normalise
from rlhf_core.data.messages import Message, RowError
from rlhf_core.data.prompt_sets import load_encoder
from rlhf_core.data.tokenizer import load_decoder
from rlhf_core.engines.distributed import resolve_device
from rlhf_core.errors import DataError
from rlhf_core.evaluation import scoring
from rlhf_core.evaluation.generate import SamplingSettings, sample_responses, seed_of
from rlhf_core.evaluation.policy_files import trained_files
from rlhf_core.evaluation.rank_scoring import evaluation_session
from rlhf_core.evaluation.review import AnswersToPrompt, SampledAnswer, write_answers
from rlhf_core.record.writer import AnswerRecord
from rlhf_core.rewards.compose import code_digests, reward_inputs
from rlhf_core.rewards.questions import Pair
from rlhf_core.stages.agreement import check_language_model_rewards, load_checked_judge
from rlhf_core.system.files import write_jsonl
from rlhf_core.types import PromptExample, RewardInput, StageContext, StageResult, finite_or_none, prefixed

log = logging.getLogger(__name__)

BEST, PAIRS = "best.jsonl", "pairs.jsonl"
_TIE = 0.5
"""Preference of a language model without a winner, and score of the answer that others are compared with."""


@dataclass(frozen=True)
class ScoredAnswer:
    """One answer and its score. The score is NaN if a reward source failed, or if people will label it."""

    sample: RewardInput
    score: float
    by_people: bool = False

    @property
    def is_usable(self) -> bool:
        """Whether the answer has a score, or needs none, and can be a row of data."""
        return (self.by_people or not math.isnan(self.score)) and _can_be_data(self.sample)


def _can_be_data(sample: RewardInput) -> bool:
    """Return whether an answer can be a row of data: it ended with EOS, and its text is valid."""
    # The data stage writes EOS after every answer: a cut one would become a text that the policy never
    # gives.
    if not sample.finished:
        return False
    try:
        row = {"prompt": sample.prompt, "completion": sample.response}
        # The data stage of the next round says so if its `data.thoughts` is not set.
        normalise(row, "completion", thoughts="keep")
    except RowError:
        return False
    return True


def run(config: PipelineConfig, context: StageContext) -> StageResult:
    """Sample and score answers, and write the files.

    Raises:
        DataError: No training prompt can be sampled.
        GateFailed: The language model that judges agrees too little with the held-out pairs.
        RLHFError: What engines, models and reward sources raise.
    """
    settings = config.sample
    assert settings is not None
    prompts, left_out = _prompts(config, context.data, settings.prompts)
    decoder = load_decoder(context.data)
    device = resolve_device(config.run.device)
    files = trained_files(config, settings.policy, context.inputs)
    sampling = SamplingSettings(settings.temperature or config.ppo.temperature, settings.answers, "sample")
    total, by_people = len(prompts) * settings.answers, config.labels_by_people

    def report(done: int) -> None:
        context.progress("sample", done, total, "answers")

    with evaluation_session(config, device, context):
        # First: a judge that is refused costs no samples.
        judge, agreement = None, _agreement_of_rewards(config, context)
        if config.labels_by_language_model:
            judge = load_checked_judge(config, context, "sample", "sample", device)
        rollouts = sample_responses(
            config, files, prompts, device=device, done=report, context=context, sampling=sampling
        )
        # In the order of `sample_responses`, which has the answers to one prompt side by side.
        repeated = [prompt for prompt in prompts for _ in range(settings.answers)]
        samples = reward_inputs(decoder.response, repeated, rollouts)
        if judge is not None:
            scores = preferences_over_first(samples, settings.answers, judge.preferences)
        elif by_people:
            scores = [math.nan] * total
        else:
            scorer = scoring.ResponseScorer(config, decoder.pad, device, context)
            scores = _scores(config, context, samples, scorer)
    answers = [ScoredAnswer(sample, score, by_people) for sample, score in zip(samples, scores, strict=True)]
    groups = [answers[start : start + settings.answers] for start in range(0, total, settings.answers)]
    best: list[ScoredAnswer] = []
    pairs: list[tuple[ScoredAnswer, ScoredAnswer]] = []
    if not by_people:
        best, pairs = select(groups, settings.min_score)
    write_jsonl(context.output / BEST, map(_demonstration, best))
    write_jsonl(context.output / PAIRS, starmap(_pair, pairs))
    write_answers(context.output, map(_answers_to_prompt, groups))
    record = AnswerRecord("sample", config.record, partial(seed_of, config, purpose=sampling.purpose))
    record.add(settings.policy, repeated, samples, "training")
    if not by_people:
        record.note("score", samples, scores)
    record.save(context)
    metrics = _metrics(answers, best) | {"pairs": float(len(pairs)), "prompts": float(len(prompts))}
    metrics["prompts_left_out"] = float(left_out)
    metrics |= agreement
    if judge is not None:
        metrics |= judge.metrics()
    if not best and not by_people:
        log.warning("no answer of %d is a demonstration: %s is empty", total, BEST)
    if problem := never_ends({"the model that answers": metrics["eos_rate"]}):
        log.warning("%s", problem)
    context.metrics.log_metrics(prefixed("sample/", metrics), 0)
    context.metrics.flush()
    attributes = {"judge": scoring.judge_name(config, settings.judge), "rl_algorithm": config.ppo.title}
    if settings.policy != "ppo":
        attributes["policy"] = settings.policy
    return StageResult(metrics, attributes)


def _agreement_of_rewards(config: PipelineConfig, context: StageContext) -> dict[str, float]:
    """Return the agreement with people of language models whose grades are the scores.

    It is empty if PPO, which measures it, has trained the policy.
    """
    assert config.sample is not None
    if config.sample.policy == "ppo" or config.sample.judge != "reward":
        return {}
    return check_language_model_rewards(config, context, "sample")


def _prompts(config: PipelineConfig, data: Path, most: int | None) -> tuple[list[PromptExample], int]:
    """Return the training prompts, at most `most`, and the number of those that cannot be sampled.

    The data artifact has only the text of a prompt, which as a row is another prompt if it was a conversation
    or had a system message. Raises DataError if no prompt is left.
    """
    # Once each: the copies that `weight` makes would get the same answers.
    every = list({each.prompt_id: each for each in load_prompts(data, "train")}.values())
    encoder = load_encoder(config, data)
    prompts = [each for each in every if encoder.prompt([Message("user", each.prompt)]) == each.input_ids]
    left_out = len(every) - len(prompts)
    if not prompts:
        raise DataError(
            f"sample: needs prompts of one message; {left_out} of {len(every)} training prompts are"
            " conversations or have a system message; give other data.prompts, or leave the section out"
        )
    if left_out:
        log.warning("%d of %d prompts are not sampled: they have several messages", left_out, len(every))
    if most is not None and most < len(prompts):
        # Evenly over the set, because the training rows are in the order of their sources.
        prompts = [prompts[index * len(prompts) // most] for index in range(most)]
    return prompts, left_out


def _scores(
    config: PipelineConfig,
    context: StageContext,
    samples: Sequence[RewardInput],
    scorer: scoring.ResponseScorer,
) -> list[float]:
    """Return the (n,) scores of the answers by rewards or by the second reward model."""
    assert config.sample is not None
    if config.sample.judge == "judge_model":
        return scorer.reward_model("judge", context.inputs["judge"] / "model", samples)
    model_scores = None
    if config.ppo.uses_reward_model:
        model_scores = scorer.reward_model("reward", context.inputs["reward"] / "model", samples)
    code = code_digests(config.ppo.rewards, context.sources)
    return scoring.score_as_ppo(config, samples, model_scores, code)


def preferences_over_first(
    samples: Sequence[RewardInput], answers: int, prefer: Callable[[Sequence[Pair]], Sequence[float]]
) -> list[float]:
    """Return the (n,) scores of answers by their comparison with the first one to the same prompt that can be
    data: 1 for a win, 0.5 for a tie, 0 for a loss.

    The first one has the score 0.5. Answers that cannot be data have NaN and are not compared.

    Args:
        samples: (n,) answers; those to one prompt are adjacent.
        answers: Answers to each prompt.
        prefer: Returns the preferences in pairs. Called once for all, because each call may start an engine.
    """
    scores = [math.nan] * len(samples)
    pairs: list[Pair] = []
    compared: list[int] = []
    for start in range(0, len(samples), answers):
        usable = [index for index in range(start, start + answers) if _can_be_data(samples[index])]
        if not usable:
            continue
        first = samples[usable[0]]
        # The value that a comparison with itself would have.
        scores[usable[0]] = _TIE
        for index in usable[1:]:
            pairs.append(Pair(first.prompt, samples[index].response, first.response))
            compared.append(index)
    for index, preference in zip(compared, prefer(pairs), strict=True):
        scores[index] = preference
    return scores


def select(
    groups: Iterable[Sequence[ScoredAnswer]], min_score: float | None = None
) -> tuple[list[ScoredAnswer], list[tuple[ScoredAnswer, ScoredAnswer]]]:
    """Return the best answers, and the pairs of best and worst answers.

    A group without a usable answer gives nothing. One whose usable answers have equal scores gives no pair.
    Of equal scores, the first answer counts.

    Args:
        groups: The answers to each prompt.
        min_score: Smallest score of a best answer; None: any. It does not apply to pairs.
    """
    best_answers: list[ScoredAnswer] = []
    pairs: list[tuple[ScoredAnswer, ScoredAnswer]] = []
    for answers in groups:
        usable = [answer for answer in answers if answer.is_usable]
        if not usable:
            continue
        # Of equal scores both functions take the first answer, so that the choice is the same in every
        # attempt.
        best = max(usable, key=lambda answer: answer.score)
        worst = min(usable, key=lambda answer: answer.score)
        # Pairs have no such limit: they only say which answer is better.
        if min_score is None or best.score >= min_score:
            best_answers.append(best)
        # The data stage refuses a pair of equal texts.
        if best.score > worst.score and best.sample.response != worst.sample.response:
            pairs.append((best, worst))
    return best_answers, pairs


def _demonstration(best: ScoredAnswer) -> dict[str, Any]:
    return {**_prompt_fields(best), "completion": best.sample.response, "score": best.score}


def _prompt_fields(answer: ScoredAnswer) -> dict[str, Any]:
    """Return the prompt of an answer, and the group that its row names: a row without it can join groups."""
    fields = {"prompt": answer.sample.prompt}
    if "group" in answer.sample.meta:
        fields["group"] = answer.sample.meta["group"]
    return fields


def _pair(best: ScoredAnswer, worst: ScoredAnswer) -> dict[str, Any]:
    return {
        **_prompt_fields(best),
        "chosen": best.sample.response,
        "rejected": worst.sample.response,
        "margin": best.score - worst.score,
    }


def _answers_to_prompt(answers: Sequence[ScoredAnswer]) -> AnswersToPrompt:
    prompt = answers[0].sample
    written = []
    for each in answers:
        written.append(SampledAnswer(each.sample.response, finite_or_none(each.score), each.is_usable))
    return AnswersToPrompt(prompt.prompt_id, prompt.prompt, tuple(written))


def _metrics(answers: Sequence[ScoredAnswer], best: Sequence[ScoredAnswer]) -> dict[str, float]:
    """Return means over all answers and over the best ones."""
    samples, best_samples = [each.sample for each in answers], [each.sample for each in best]
    metrics = {
        "best": float(len(best)),
        "usable": sum(answer.is_usable for answer in answers) / len(answers),
        "eos_rate": sum(sample.finished for sample in samples) / len(answers),
    }
    scored = [answer.score for answer in answers if not math.isnan(answer.score)]
    if scored:
        metrics["score_mean"] = statistics.fmean(scored)
    if best:
        metrics["score_best"] = statistics.fmean(answer.score for answer in best)
    if scoring.has_gold(samples):
        metrics["gold_mean"] = statistics.fmean(scoring.score_gold(samples))
        if best:
            metrics["gold_best"] = statistics.fmean(scoring.score_gold(best_samples))
    return metrics
